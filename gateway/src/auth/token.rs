//! Tokens of notification consumers: HS256 JWTs whose claims are the platform's (Notifications 2.0; the Java and Go clients
//! parse them).

use jsonwebtoken::errors::ErrorKind;
use jsonwebtoken::{Algorithm, DecodingKey, EncodingKey, Header, Validation};
use serde::{Deserialize, Serialize};

use super::keys::SigningKey;
use super::random;
use crate::message::Tenant;

/// The longest token that is looked at, in bytes.
pub const MAX_TOKEN_BYTES: usize = 4_096;

/// The longest life of a token: 100 years. Longer wishes get this, since a client of the platform asks for sixty times what it
/// means when it renews.
pub const MAX_TOKEN_MINUTES: u64 = 100 * 365 * 24 * 60;

/// base64url of `{"alg":"HS256"}`. The gateway writes no other header, so it reads no other: whatever else a header may ask for
/// is refused before it is parsed.
const HEADER: &str = "eyJhbGciOiJIUzI1NiJ9";

/// The middle part of the topic of a consumer token.
const TOPIC_KIND: &str = "relnotif";

/// Who may consume what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConsumerClaims {
    /// The tenant that owns the topic.
    pub tenant: Tenant,
    /// The name of the consumer, unique within the topic. Letters and digits.
    pub subscriber: String,
    /// The name of the subscription, which is the topic's. Letters and digits.
    pub subscription: String,
    /// Whether several connections share the consumer.
    pub shared: bool,
    /// Whether the topic is the non-persistent one of that name.
    pub non_persistent: bool,
}

/// Why a token is not accepted. The text may be sent to the client.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    /// It is not a token as this gateway writes them, or names in it are not what names may be.
    #[error("The token is malformed.")]
    Malformed,
    /// It was not signed by this gateway, or for another purpose, or was changed.
    #[error("The signature of the token is not valid.")]
    BadSignature,
    /// It is genuine, but not for a notification consumer.
    #[error("The token is not for a notification consumer.")]
    WrongKind,
    /// It is genuine, and was valid until `expired_at`. It may still unsubscribe its consumer.
    #[error("The token has expired.")]
    Expired {
        /// What it granted.
        claims: ConsumerClaims,
        /// Seconds since the epoch.
        expired_at: i64,
    },
}

/// The claims on the wire, in the platform's order. Flags are the string `"true"` or absent: a JSON boolean breaks the Go client.
#[derive(Serialize, Deserialize)]
struct Payload {
    sub: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    shared: Option<True>,
    topic: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    volatile: Option<True>,
    jti: String,
    iat: i64,
    exp: i64,
}

#[derive(Serialize, Deserialize)]
enum True {
    #[serde(rename = "true")]
    True,
}

/// Mints and verifies consumer tokens.
pub struct ConsumerTokens {
    encoding: EncodingKey,
    decoding: DecodingKey,
    validation: Validation,
}

impl ConsumerTokens {
    /// Uses the key of [`super::KeyKind::Consumer`].
    #[must_use]
    pub fn new(key: &SigningKey) -> Self {
        let mut validation = Validation::new(Algorithm::HS256);
        // Time is checked here, against the gateway's clock, and an expired token still yields its claims.
        validation.validate_exp = false;
        validation.validate_aud = false;
        validation.required_spec_claims.clear();
        Self {
            encoding: EncodingKey::from_secret(key.as_bytes()).expect("invariant: the key is not empty"),
            decoding: DecodingKey::from_secret(key.as_bytes()).expect("invariant: the key is not empty"),
            validation,
        }
    }

    /// A token that is valid for `minutes` (at most [`MAX_TOKEN_MINUTES`]; more is cut) from `now_ms`, milliseconds since the
    /// epoch. Its payload holds only letters and digits, because clients decode it with the standard base64 alphabet.
    ///
    /// # Errors
    /// [`TokenError::Malformed`] when a name is not one that [`ConsumerTokens::verify`] accepts.
    pub fn mint(&self, claims: &ConsumerClaims, minutes: u64, now_ms: i64) -> Result<String, TokenError> {
        if !claims.are_sound() {
            return Err(TokenError::Malformed);
        }
        let now = now_ms.div_euclid(1_000);
        let life = i64::try_from(minutes.min(MAX_TOKEN_MINUTES)).expect("invariant: far below the limit") * 60;
        let payload = Payload {
            sub: claims.subscriber.clone(),
            shared: claims.shared.then_some(True::True),
            topic: format!("{}/{TOPIC_KIND}/{}", claims.tenant, claims.subscription),
            volatile: claims.non_persistent.then_some(True::True),
            jti: jti(),
            iat: now,
            exp: now.saturating_add(life),
        };
        let mut header = Header::new(Algorithm::HS256);
        header.typ = None;
        let token = jsonwebtoken::encode(&header, &payload, &self.encoding);
        let token = token.expect("invariant: plain values serialize and HS256 signs with any key");
        if token.len() > MAX_TOKEN_BYTES { Err(TokenError::Malformed) } else { Ok(token) }
    }

    /// The claims of a token that is genuine and valid at `now_ms`, milliseconds since the epoch.
    ///
    /// # Errors
    /// [`TokenError`]; [`TokenError::Expired`] carries the claims of a genuine token.
    pub fn verify(&self, token: &str, now_ms: i64) -> Result<ConsumerClaims, TokenError> {
        self.open_valid(token, now_ms).map(|(_, claims)| claims)
    }

    /// The claims of such a token as JSON, as they stand in it.
    ///
    /// # Errors
    /// As [`ConsumerTokens::verify`].
    pub fn describe(&self, token: &str, now_ms: i64) -> Result<String, TokenError> {
        let (payload, _) = self.open_valid(token, now_ms)?;
        Ok(serde_json::to_string(&payload).expect("invariant: texts and numbers serialize"))
    }

    fn open_valid(&self, token: &str, now_ms: i64) -> Result<(Payload, ConsumerClaims), TokenError> {
        let payload = self.open(token)?;
        let claims = payload.claims()?;
        if now_ms.div_euclid(1_000) < payload.exp {
            Ok((payload, claims))
        } else {
            Err(TokenError::Expired { claims, expired_at: payload.exp })
        }
    }

    fn open(&self, token: &str) -> Result<Payload, TokenError> {
        if token.len() > MAX_TOKEN_BYTES {
            return Err(TokenError::Malformed);
        }
        let rest = token.strip_prefix(HEADER).ok_or(TokenError::Malformed)?;
        if !rest.starts_with('.') {
            return Err(TokenError::Malformed);
        }
        match jsonwebtoken::decode(token, &self.decoding, &self.validation) {
            Ok(decoded) => Ok(decoded.claims),
            Err(error) if matches!(error.kind(), ErrorKind::InvalidSignature) => Err(TokenError::BadSignature),
            Err(_) => Err(TokenError::Malformed),
        }
    }
}

impl ConsumerClaims {
    /// Names that keep the topic unambiguous and, in base64, the payload free of `-` and `_`.
    fn are_sound(&self) -> bool {
        let is_word = |name: &str| !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric());
        let tenant = self.tenant.as_str();
        let is_tenant_byte = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
        is_word(&self.subscriber)
            && is_word(&self.subscription)
            && !tenant.is_empty()
            && tenant.bytes().all(is_tenant_byte)
    }
}

impl Payload {
    fn claims(&self) -> Result<ConsumerClaims, TokenError> {
        let mut parts = self.topic.split('/');
        let (Some(tenant), Some(kind), Some(subscription), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(TokenError::Malformed);
        };
        if kind != TOPIC_KIND {
            return Err(TokenError::WrongKind);
        }
        let claims = ConsumerClaims {
            tenant: tenant.into(),
            subscriber: self.sub.clone(),
            subscription: subscription.to_owned(),
            shared: self.shared.is_some(),
            non_persistent: self.volatile.is_some(),
        };
        if claims.are_sound() { Ok(claims) } else { Err(TokenError::Malformed) }
    }
}

/// A random UUID (RFC 9562, version 4).
fn jti() -> String {
    let mut id = u128::from_be_bytes(random());
    id = id & !(0xf << 76) | 4 << 76;
    id = id & !(3 << 62) | 2 << 62;
    let hex = format!("{id:032x}");
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use base64::Engine as _;
    use base64::engine::general_purpose::{STANDARD_NO_PAD, URL_SAFE_NO_PAD};
    use proptest::prelude::*;
    use proptest::test_runner::{Config, TestRunner};
    use serde_json::{Value, json};

    use super::*;

    const NOW_MS: i64 = 1_796_000_000_123;
    const NOW: i64 = 1_796_000_000;

    fn tokens() -> ConsumerTokens {
        ConsumerTokens::new(&SigningKey::ephemeral())
    }

    fn claims() -> ConsumerClaims {
        ConsumerClaims {
            tenant: "edge".into(),
            subscriber: "sub1".into(),
            subscription: "Sub2".into(),
            shared: false,
            non_persistent: false,
        }
    }

    fn payload() -> Value {
        json!({"sub": "sub1", "topic": "edge/relnotif/Sub2", "jti": "x", "iat": NOW, "exp": NOW + 60})
    }

    fn part(token: &str, index: usize) -> String {
        let part = token.split('.').nth(index).unwrap();
        String::from_utf8(STANDARD_NO_PAD.decode(part).unwrap()).unwrap()
    }

    /// A genuine signature over any header and payload.
    fn sign(tokens: &ConsumerTokens, header: &str, payload: &str) -> String {
        let message = format!("{}.{}", URL_SAFE_NO_PAD.encode(header), URL_SAFE_NO_PAD.encode(payload));
        let signature = jsonwebtoken::crypto::sign(message.as_bytes(), &tokens.encoding, Algorithm::HS256).unwrap();
        format!("{message}.{signature}")
    }

    fn verify_payload(payload: &Value) -> Result<ConsumerClaims, TokenError> {
        let tokens = tokens();
        tokens.verify(&sign(&tokens, r#"{"alg":"HS256"}"#, &payload.to_string()), NOW_MS)
    }

    #[test]
    fn the_layout_is_the_platforms() {
        let tokens = tokens();
        let token = tokens.mint(&claims(), 1_440, NOW_MS).unwrap();
        assert_eq!(part(&token, 0), r#"{"alg":"HS256"}"#);
        let text = part(&token, 1);
        let jti = serde_json::from_str::<Value>(&text).unwrap()["jti"].as_str().unwrap().to_owned();
        let exp = NOW + 86_400;
        assert_eq!(
            text,
            format!(r#"{{"sub":"sub1","topic":"edge/relnotif/Sub2","jti":"{jti}","iat":{NOW},"exp":{exp}}}"#)
        );
        let flags = ConsumerClaims { shared: true, non_persistent: true, ..claims() };
        let text = part(&tokens.mint(&flags, 1, NOW_MS).unwrap(), 1);
        assert!(
            text.starts_with(r#"{"sub":"sub1","shared":"true","topic":"edge/relnotif/Sub2","volatile":"true","jti":""#),
            "{text}"
        );
    }

    #[test]
    fn a_jti_is_a_uuid_of_its_own() {
        let (one, two) = (jti(), jti());
        assert_ne!(one, two);
        let groups: Vec<_> = one.split('-').collect();
        assert_eq!(groups.iter().map(|group| group.len()).collect::<Vec<_>>(), [8, 4, 4, 4, 12]);
        assert!(groups[2].starts_with('4') && groups[3].starts_with(['8', '9', 'a', 'b']), "{one}");
        assert!(groups.concat().bytes().all(|byte| byte.is_ascii_hexdigit()));
    }

    #[test]
    fn a_minted_token_verifies_until_it_expires() {
        let tokens = tokens();
        for (shared, non_persistent) in [(false, false), (true, false), (false, true), (true, true)] {
            let claims = ConsumerClaims { shared, non_persistent, ..claims() };
            let token = tokens.mint(&claims, 1, NOW_MS).unwrap();
            assert_eq!(tokens.verify(&token, NOW_MS), Ok(claims.clone()));
            let end_ms = (NOW + 60) * 1_000;
            assert_eq!(tokens.verify(&token, end_ms - 1), Ok(claims.clone()));
            let expired = TokenError::Expired { claims, expired_at: NOW + 60 };
            assert_eq!(tokens.verify(&token, end_ms), Err(expired));
        }
    }

    #[test]
    fn an_expired_token_must_be_genuine_to_yield_its_claims() {
        let (tokens, others) = (tokens(), tokens());
        let token = others.mint(&claims(), 1, 0).unwrap();
        assert_eq!(tokens.verify(&token, NOW_MS), Err(TokenError::BadSignature));
        assert!(matches!(others.verify(&token, NOW_MS), Err(TokenError::Expired { .. })));
    }

    #[test]
    fn a_life_of_centuries_is_cut_and_not_refused() {
        let tokens = tokens();
        let expiry = |minutes| {
            let token = tokens.mint(&claims(), minutes, NOW_MS).unwrap();
            serde_json::from_str::<Value>(&part(&token, 1)).unwrap()["exp"].as_i64().unwrap()
        };
        assert_eq!(expiry(86_400), NOW + 86_400 * 60);
        assert_eq!(expiry(u64::MAX), NOW + 100 * 365 * 86_400);
    }

    #[test]
    fn payloads_of_alphanumeric_names_hold_only_letters_and_digits() {
        let tokens = tokens();
        let name = "[A-Za-z0-9]{1,24}";
        let strategy = (name, name, name, any::<bool>(), any::<bool>(), 1..=MAX_TOKEN_MINUTES);
        let mut runner = TestRunner::new(Config { cases: 10_000, failure_persistence: None, ..Config::default() });
        runner
            .run(&strategy, |(tenant, subscriber, subscription, shared, non_persistent, minutes)| {
                let claims =
                    ConsumerClaims { tenant: tenant.as_str().into(), subscriber, subscription, shared, non_persistent };
                let token = tokens.mint(&claims, minutes, NOW_MS).unwrap();
                let payload = token.split('.').nth(1).unwrap();
                prop_assert!(payload.bytes().all(|byte| byte.is_ascii_alphanumeric()), "{}", payload);
                prop_assert_eq!(tokens.verify(&token, NOW_MS), Ok(claims));
                Ok(())
            })
            .unwrap();
    }

    #[test]
    fn names_that_would_break_clients_are_not_minted() {
        let tokens = tokens();
        for bad in ["", "a b", "a/b", "a-b", "a~b", "a?b", "größe", "a>b", "a\nb"] {
            let subscriber = ConsumerClaims { subscriber: bad.into(), ..claims() };
            let subscription = ConsumerClaims { subscription: bad.into(), ..claims() };
            for claims in [subscriber, subscription] {
                assert_eq!(tokens.mint(&claims, 1, NOW_MS), Err(TokenError::Malformed), "{bad:?}");
            }
        }
        for bad in ["", "a/b", "a~b", "ä"] {
            let claims = ConsumerClaims { tenant: bad.into(), ..claims() };
            assert_eq!(tokens.mint(&claims, 1, NOW_MS), Err(TokenError::Malformed), "{bad:?}");
        }
        let claims = ConsumerClaims { tenant: "my-plant_1.north".into(), ..claims() };
        let token = tokens.mint(&claims, 1, NOW_MS).unwrap();
        assert_eq!(tokens.verify(&token, NOW_MS), Ok(claims));
    }

    #[test]
    fn only_the_own_header_is_read() {
        let tokens = tokens();
        for header in [
            r#"{"alg":"none"}"#,
            r#"{"alg":"HS384"}"#,
            r#"{"alg":"RS256"}"#,
            r#"{"alg":"HS256","typ":"JWT"}"#,
            r#"{"alg":"HS256","crit":["exp"]}"#,
            r#"{"typ":"JWT","alg":"HS256"}"#,
            r#"{ "alg":"HS256"}"#,
            "{}",
        ] {
            let token = sign(&tokens, header, &payload().to_string());
            assert_eq!(tokens.verify(&token, NOW_MS), Err(TokenError::Malformed), "{header}");
        }
    }

    #[test]
    fn every_change_of_a_token_is_noticed() {
        let tokens = tokens();
        let token = tokens.mint(&claims(), 1, NOW_MS).unwrap();
        for i in 0..token.len() {
            let mut changed = token.clone().into_bytes();
            changed[i] = if changed[i] == b'A' { b'B' } else { b'A' };
            let changed = String::from_utf8(changed).unwrap();
            assert!(
                matches!(tokens.verify(&changed, NOW_MS), Err(TokenError::BadSignature | TokenError::Malformed)),
                "byte {i}"
            );
        }
        let (unsigned, signature) = token.rsplit_once('.').unwrap();
        for bad in [
            String::new(),
            ".".into(),
            "..".into(),
            unsigned.into(),
            format!("{unsigned}."),
            format!("{unsigned}.{}", &signature[..signature.len() - 1]),
            format!("{token}="),
            format!("{token}."),
            format!("{token} "),
            format!("{token}.{signature}"),
            format!("Bearer {token}"),
        ] {
            assert!(
                matches!(tokens.verify(&bad, NOW_MS), Err(TokenError::BadSignature | TokenError::Malformed)),
                "{bad}"
            );
        }
    }

    #[test]
    fn signed_claims_must_have_their_types() {
        assert_eq!(verify_payload(&payload()), Ok(claims()));
        let mut bad = Vec::new();
        for claim in ["sub", "topic", "jti", "iat", "exp"] {
            let mut missing = payload();
            missing.as_object_mut().unwrap().remove(claim);
            bad.push(missing);
            let mut null = payload();
            null[claim] = Value::Null;
            bad.push(null);
        }
        for (claim, value) in [
            ("sub", json!(1)),
            ("sub", json!("")),
            ("sub", json!("a/b")),
            ("topic", json!("edge/relnotif")),
            ("topic", json!("edge/relnotif/a/b")),
            ("topic", json!("/relnotif/a")),
            ("topic", json!("edge/relnotif/")),
            ("shared", json!(true)),
            ("shared", json!("false")),
            ("shared", json!("")),
            ("volatile", json!(1)),
            ("iat", json!("1")),
            ("exp", json!("1796000060")),
            ("exp", json!(1.5)),
            ("exp", json!(u64::MAX)),
        ] {
            let mut wrong = payload();
            wrong[claim] = value;
            bad.push(wrong);
        }
        bad.push(json!([]));
        for payload in bad {
            assert_eq!(verify_payload(&payload), Err(TokenError::Malformed), "{payload}");
        }
    }

    #[test]
    fn a_token_of_another_kind_is_no_consumer_token() {
        let mut mqtt = payload();
        mqtt["topic"] = json!("edge/mqtt/Sub2");
        assert_eq!(verify_payload(&mqtt), Err(TokenError::WrongKind));
    }

    #[test]
    fn a_claim_may_not_come_twice() {
        let tokens = tokens();
        let twice = payload().to_string().replacen('{', r#"{"sub":"other","#, 1);
        assert_eq!(tokens.verify(&sign(&tokens, r#"{"alg":"HS256"}"#, &twice), NOW_MS), Err(TokenError::Malformed));
    }

    #[test]
    fn a_long_token_is_refused_unread() {
        let tokens = tokens();
        let mut long = payload();
        long["jti"] = json!("x".repeat(MAX_TOKEN_BYTES));
        let token = sign(&tokens, r#"{"alg":"HS256"}"#, &long.to_string());
        assert_eq!(tokens.verify(&token, NOW_MS), Err(TokenError::Malformed));
        let huge = ConsumerClaims { subscriber: "x".repeat(MAX_TOKEN_BYTES), ..claims() };
        assert_eq!(tokens.mint(&huge, 1, NOW_MS), Err(TokenError::Malformed));
    }

    proptest! {
        #[test]
        fn no_text_makes_verification_panic(text in ".{0,200}") {
            let tokens = tokens();
            prop_assert!(tokens.verify(&text, NOW_MS).is_err());
            let token = format!("{HEADER}.{text}");
            prop_assert!(tokens.verify(&token, NOW_MS).is_err());
        }
    }
}
