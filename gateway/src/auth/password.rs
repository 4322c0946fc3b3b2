//! Passwords: argon2id hashes and generated passwords.

use argon2::password_hash::phc::PasswordHash;
use argon2::password_hash::{PasswordHasher, PasswordVerifier};
use argon2::{Algorithm, Argon2, Params, Version};

use super::{AuthError, random};

/// The shortest new password in characters.
pub const MIN_PASSWORD_CHARS: usize = 8;

/// The longest password in bytes.
pub const MAX_PASSWORD_BYTES: usize = 256;

/// Of OWASP's recommendations for argon2id, which are equally strong, the one that takes the least memory: 7 MiB, five passes,
/// one lane.
const PARAMS: Params = match Params::new(7 * 1024, 5, 1, None) {
    Ok(params) => params,
    Err(_) => panic!("valid parameters"),
};

/// Without look-alikes: no 0, 1, I, O, i, l, o.
const ALPHABET: &[u8; 55] = b"23456789abcdefghjkmnpqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ";
const GENERATED_CHARS: usize = 24;

/// The argon2id hash of a password as a PHC string, with a new salt. Takes 7 MiB and some 20 ms of processor time: call it
/// where blocking is allowed.
///
/// # Errors
/// [`AuthError::Password`] when the password is shorter than [`MIN_PASSWORD_CHARS`] or longer than [`MAX_PASSWORD_BYTES`].
pub fn hash_password(password: &str) -> Result<String, AuthError> {
    if password.chars().count() < MIN_PASSWORD_CHARS || password.len() > MAX_PASSWORD_BYTES {
        return Err(AuthError::Password);
    }
    let hash = hasher(PARAMS)
        .hash_password_with_salt(password.as_bytes(), &random::<16>())
        .expect("invariant: the parameters and the salt's length are valid");
    Ok(hash.to_string())
}

/// Compares a password with a hash, at the hash's cost.
pub(super) fn verify(password: &[u8], hash: &PasswordHash) -> bool {
    hasher(PARAMS).verify_password(password, hash).is_ok()
}

/// A hash that belongs to nobody, so that an unknown user costs the same time as a wrong password.
pub(super) fn nobody() -> PasswordHash {
    let hash = "$argon2id$v=19$m=7168,t=5,p=1$bm9ib2R5IGlzIGhlcmUh$AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA";
    PasswordHash::new(hash).expect("invariant: a valid PHC string")
}

/// Reads a stored hash: argon2id, with salt and output, at most 64 MiB, 10 passes and 4 lanes, so that a damaged row cannot
/// make a login arbitrarily expensive.
pub(super) fn parse_hash(text: &str) -> Option<PasswordHash> {
    let hash = PasswordHash::new(text).ok()?;
    let params = Params::try_from(&hash).ok()?;
    let sound = hash.algorithm.as_str() == Algorithm::Argon2id.as_str()
        && hash.salt.is_some()
        && hash.hash.is_some()
        && params.m_cost() <= 64 * 1024
        && params.t_cost() <= 10
        && params.p_cost() <= 4;
    sound.then_some(hash)
}

/// A password of 24 letters and digits (138 bits) that survives copying by hand: no two characters look alike.
#[must_use]
pub fn generate_password() -> String {
    // Bytes past the last whole multiple of the alphabet would favour its first characters.
    let fair = u8::MAX - u8::MAX % 55;
    std::iter::repeat_with(random::<32>)
        .flatten()
        .filter(|byte| *byte < fair)
        .map(|byte| char::from(ALPHABET[usize::from(byte) % ALPHABET.len()]))
        .take(GENERATED_CHARS)
        .collect()
}

fn hasher(params: Params) -> Argon2<'static> {
    Argon2::new(Algorithm::Argon2id, Version::V0x13, params)
}

/// A hash that is quick to verify, for tests of what stands around it.
#[cfg(test)]
pub(super) fn cheap_hash(password: &str) -> String {
    let params = Params::new(8, 1, 1, None).expect("valid parameters");
    let hash = hasher(params).hash_password_with_salt(password.as_bytes(), &random::<16>());
    hash.expect("valid parameters").to_string()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn a_hash_has_owasps_parameters_and_accepts_only_its_password() {
        let text = hash_password("correct horse").unwrap();
        assert!(text.starts_with("$argon2id$v=19$m=7168,t=5,p=1$"), "{text}");
        let hash = parse_hash(&text).unwrap();
        assert!(verify(b"correct horse", &hash));
        assert!(!verify(b"correct horsf", &hash));
        assert!(!verify(b"", &hash));
    }

    #[test]
    fn two_hashes_of_one_password_differ() {
        assert_ne!(cheap_hash("same"), cheap_hash("same"));
    }

    #[test]
    fn passwords_have_a_length() {
        for short in ["", "1234567", "äöüäöüä"] {
            assert_eq!(hash_password(short), Err(AuthError::Password), "{short}");
        }
        assert!(hash_password("äöüäöüäö").is_ok());
        assert_eq!(hash_password(&"x".repeat(MAX_PASSWORD_BYTES + 1)), Err(AuthError::Password));
        assert!(hash_password(&"x".repeat(MAX_PASSWORD_BYTES)).is_ok());
    }

    #[test]
    fn stored_hashes_of_other_kinds_and_costs_are_refused() {
        let good = cheap_hash("x");
        assert!(parse_hash(&good).is_some());
        for bad in [
            String::new(),
            "secret".into(),
            good.replace("argon2id", "argon2i"),
            good.replace("m=8", "m=1048576"),
            good.replace("t=1", "t=99"),
            good.rsplit_once('$').unwrap().0.to_owned(),
        ] {
            assert!(parse_hash(&bad).is_none(), "{bad}");
        }
    }

    #[test]
    fn the_hash_of_nobody_costs_what_a_new_hash_costs() {
        let new = parse_hash(&hash_password("12345678").unwrap()).unwrap();
        assert_eq!(nobody().params, new.params);
        assert_eq!(nobody().version, new.version);
        assert_eq!(nobody().hash.unwrap().len(), new.hash.unwrap().len());
    }

    #[test]
    fn generated_passwords_are_unique_and_easy_to_paste() {
        let mut seen = HashSet::new();
        let mut used = HashSet::new();
        for _ in 0..500 {
            let password = generate_password();
            assert_eq!(password.len(), GENERATED_CHARS);
            assert!(password.bytes().all(|byte| ALPHABET.contains(&byte)));
            used.extend(password.bytes());
            assert!(seen.insert(password));
        }
        assert_eq!(used.len(), ALPHABET.len(), "every character comes up");
    }
}
