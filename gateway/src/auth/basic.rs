//! Basic authentication whose hot path never meets argon2.
//!
//! An argon2id run takes megabytes and tens of milliseconds, so one runs at a time, a bounded line waits for it, requests with the
//! same header share one run, and its outcome is remembered for a minute under a keyed hash of the header.

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use argon2::password_hash::phc::PasswordHash;
use aws_lc_rs::hmac;
use base64::Engine as _;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use lru::LruCache;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::Instant;

use super::password::{hash_password, nobody, verify};
use super::users::{User, UserError, UserRow, Users};
use super::{AuthError, MAX_PASSWORD_BYTES, MAX_USER_CHARS, Principal, random};
use crate::message::Tenant;

/// The tenant of a user name without one.
pub const DEFAULT_TENANT: &str = "edge";

/// How long an outcome is believed.
const REMEMBERED: Duration = Duration::from_secs(60);

/// Outcomes kept of each sort, less than 100 bytes each. Refusals have a store of their own, so that guessing does not push out good logins.
const REMEMBERED_COUNT: NonZeroUsize = NonZeroUsize::new(16_384).expect("not zero");

/// Verifications that wait for the running one; the next is [`AuthError::Busy`].
const WAITING: usize = 64;

/// The longest header that can be right: two names of four-byte characters and a password, in base64.
const MAX_HEADER_BYTES: usize = (2 * 4 * MAX_USER_CHARS + MAX_PASSWORD_BYTES + 2).div_ceil(3) * 4 + 16;

const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

type Outcome = Result<Principal, AuthError>;
type Fingerprint = [u8; 32];
type Flight = watch::Receiver<Option<Outcome>>;

/// Verifies `Authorization: Basic` headers. Clones share users and memory.
#[derive(Clone)]
pub struct Authenticator(Arc<Inner>);

struct Inner {
    key: hmac::Key,
    state: Mutex<State>,
    /// Places of the running verification and of those that wait.
    places: Arc<Semaphore>,
    /// One verification at a time, in the order of arrival.
    turn: Semaphore,
    verifications: AtomicU64,
}

struct State {
    users: Users,
    /// Counts the changes of `users`: an outcome that was found before a change is not remembered after it.
    generation: u64,
    accepted: Memory,
    refused: Memory,
    /// Verifications under way; as many as there are places.
    flights: HashMap<Fingerprint, Flight>,
}

enum Check {
    Remembered(Outcome),
    UnderWay(Flight),
}

/// What a verification needs, taken from the header and the users when it was queued.
struct Job {
    fingerprint: Fingerprint,
    login: Login,
    user: Option<User>,
    generation: u64,
    answer: watch::Sender<Option<Outcome>>,
    place: OwnedSemaphorePermit,
}

impl Authenticator {
    /// Starts with these users and an empty memory.
    #[must_use]
    pub fn new(users: Users) -> Self {
        Self(Arc::new(Inner {
            key: hmac::Key::new(hmac::HMAC_SHA256, &random::<32>()),
            state: Mutex::new(State {
                users,
                generation: 0,
                accepted: Memory::new(),
                refused: Memory::new(),
                flights: HashMap::new(),
            }),
            places: Arc::new(Semaphore::new(WAITING + 1)),
            turn: Semaphore::new(1),
            verifications: AtomicU64::new(0),
        }))
    }

    /// Verifies the value of an `Authorization` header: `Basic`, then base64 (padded or not) of `tenant/user:password`, or of
    /// `user:password` for the tenant [`DEFAULT_TENANT`]. The password may hold colons. Must be called in a tokio runtime.
    ///
    /// An outcome is remembered for 60 s, a good one for as long after its last use. A caller that goes away does not stop the verification that others wait for.
    ///
    /// # Errors
    /// [`AuthError::Missing`], [`AuthError::BadCredentials`], and [`AuthError::Busy`] when 64 verifications wait already.
    pub async fn basic(&self, header: Option<&[u8]>) -> Result<Principal, AuthError> {
        let header = header.ok_or(AuthError::Missing)?;
        match self.0.check(header, Instant::now())? {
            Check::Remembered(outcome) => outcome,
            Check::UnderWay(mut flight) => match flight.wait_for(Option::is_some).await {
                Ok(outcome) => outcome.clone().expect("invariant: waited for an outcome"),
                // The verification died with its runtime.
                Err(_) => Err(AuthError::Busy),
            },
        }
    }

    /// Adds or replaces one user and forgets what was remembered of it.
    ///
    /// # Errors
    /// Those of [`Users::put`]; nothing is changed then.
    pub fn put(&self, row: UserRow) -> Result<(), UserError> {
        let mut state = self.0.state();
        let (tenant, name) = (row.tenant.clone(), row.name.clone());
        state.users.put(row)?;
        state.forget(&tenant, Some(&name));
        Ok(())
    }

    /// Removes one user and forgets what was remembered of it; `false` when there was none.
    pub fn remove(&self, tenant: &Tenant, name: &str) -> bool {
        let mut state = self.0.state();
        state.forget(tenant, Some(name));
        state.users.remove(tenant, name)
    }

    /// Removes all users of a tenant and forgets what was remembered of them.
    pub fn remove_tenant(&self, tenant: &Tenant) {
        let mut state = self.0.state();
        state.forget(tenant, None);
        state.users.remove_tenant(tenant);
    }

    /// Whether the tenant is there: one always has users.
    #[must_use]
    pub fn knows(&self, tenant: &Tenant) -> bool {
        self.0.state().users.knows(tenant)
    }

    /// The hash of a new password. Waits its turn among the logins, since it costs what one of them does.
    ///
    /// # Errors
    /// [`AuthError::Password`], and [`AuthError::Busy`] when 64 wait already.
    pub async fn hash(&self, password: String) -> Result<String, AuthError> {
        let _place = self.0.places.try_acquire().map_err(|_| AuthError::Busy)?;
        let _turn = self.0.turn.acquire().await.expect("invariant: never closed");
        tokio::task::spawn_blocking(move || hash_password(&password)).await.unwrap_or(Err(AuthError::Busy))
    }

    /// How many times argon2 has run.
    #[must_use]
    pub fn verifications(&self) -> u64 {
        self.0.verifications.load(Ordering::Relaxed)
    }
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        // No code that can panic runs between two changes that belong together.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fingerprint(&self, header: &[u8]) -> Fingerprint {
        let mut fingerprint = Fingerprint::default();
        hmac::sign_to_buffer(&self.key, header, &mut fingerprint).expect("invariant: the buffer has the tag's length");
        fingerprint
    }

    fn check(self: &Arc<Self>, header: &[u8], now: Instant) -> Result<Check, AuthError> {
        if header.len() > MAX_HEADER_BYTES {
            return Err(AuthError::BadCredentials);
        }
        let fingerprint = self.fingerprint(header);
        let mut state = self.state();
        if let Some(outcome) = state.recall(&fingerprint, now) {
            return Ok(Check::Remembered(outcome));
        }
        if let Some(flight) = state.flights.get(&fingerprint) {
            return Ok(Check::UnderWay(flight.clone()));
        }
        let login = Login::parse(header).ok_or(AuthError::BadCredentials)?;
        let place = Arc::clone(&self.places).try_acquire_owned().map_err(|_| AuthError::Busy)?;
        let user = state.users.get(&login.tenant, &login.user).cloned();
        let (answer, flight) = watch::channel(None);
        state.flights.insert(fingerprint, flight.clone());
        let job = Job { fingerprint, login, user, generation: state.generation, answer, place };
        tokio::spawn(Arc::clone(self).run(job));
        Ok(Check::UnderWay(flight))
    }

    /// Has a task of its own, so that it outlives the request that started it.
    async fn run(self: Arc<Self>, job: Job) {
        let turn = self.turn.acquire().await.expect("invariant: never closed");
        self.verifications.fetch_add(1, Ordering::Relaxed);
        let Job { login, user, .. } = job;
        let verification = tokio::task::spawn_blocking(move || login.verify(user.as_ref()));
        let outcome = verification.await.unwrap_or(Err(AuthError::Busy));
        drop(turn);
        self.state().land(job.generation, job.fingerprint, &outcome, Instant::now());
        drop(job.place);
        job.answer.send_replace(Some(outcome));
    }
}

impl State {
    fn recall(&mut self, fingerprint: &Fingerprint, now: Instant) -> Option<Outcome> {
        // A client that is heard of stays known, however many others are waiting to be verified. Changes of users forget it.
        self.accepted.renew(fingerprint, now);
        self.accepted.recall(fingerprint, now).or_else(|| self.refused.recall(fingerprint, now))
    }

    /// Ends a verification and remembers its outcome, unless the users have changed since it began.
    fn land(&mut self, generation: u64, fingerprint: Fingerprint, outcome: &Outcome, now: Instant) {
        if generation != self.generation {
            return;
        }
        self.flights.remove(&fingerprint);
        match outcome {
            Ok(_) => self.accepted.keep(fingerprint, outcome.clone(), now),
            Err(AuthError::BadCredentials) => self.refused.keep(fingerprint, outcome.clone(), now),
            Err(_) => {}
        }
    }

    /// Forgets good outcomes of this user, or of all of the tenant, and all refusals, whose user is not known. The outcomes of
    /// others stay: to verify everybody anew would keep many clients waiting.
    fn forget(&mut self, tenant: &Tenant, user: Option<&str>) {
        self.generation += 1;
        self.accepted
            .drop_where(|principal| principal.tenant == *tenant && user.is_none_or(|user| *principal.user == *user));
        self.refused.0.clear();
        self.flights.clear();
    }
}

/// Outcomes with the time at which they stop to count; the least recently used goes first.
struct Memory(LruCache<Fingerprint, (Outcome, Instant)>);

impl Memory {
    fn new() -> Self {
        Self(LruCache::sparse(REMEMBERED_COUNT))
    }

    fn recall(&mut self, fingerprint: &Fingerprint, now: Instant) -> Option<Outcome> {
        let (outcome, until) = self.0.get(fingerprint)?;
        (now < *until).then(|| outcome.clone())
    }

    fn renew(&mut self, fingerprint: &Fingerprint, now: Instant) {
        if let Some((_, until)) = self.0.get_mut(fingerprint)
            && now < *until
        {
            *until = now + REMEMBERED;
        }
    }

    fn drop_where(&mut self, mut gone: impl FnMut(&Principal) -> bool) {
        let stale = self.0.iter().filter(|(_, (outcome, _))| outcome.as_ref().is_ok_and(&mut gone));
        for fingerprint in stale.map(|(fingerprint, _)| *fingerprint).collect::<Vec<_>>() {
            self.0.pop(&fingerprint);
        }
    }

    fn keep(&mut self, fingerprint: Fingerprint, outcome: Outcome, now: Instant) {
        self.0.put(fingerprint, (outcome, now + REMEMBERED));
    }
}

/// Credentials as they came.
struct Login {
    tenant: Tenant,
    user: Arc<str>,
    password: Vec<u8>,
}

impl Login {
    fn parse(header: &[u8]) -> Option<Self> {
        let space = header.iter().position(|byte| *byte == b' ')?;
        let (scheme, encoded) = header.split_at(space);
        if !scheme.eq_ignore_ascii_case(b"basic") {
            return None;
        }
        let decoded = BASE64.decode(encoded.trim_ascii()).ok()?;
        let colon = decoded.iter().position(|byte| *byte == b':')?;
        let name = std::str::from_utf8(&decoded[..colon]).ok()?;
        let (tenant, user) = name.split_once('/').unwrap_or((DEFAULT_TENANT, name));
        let password = &decoded[colon + 1..];
        if tenant.is_empty() || user.is_empty() || password.is_empty() || password.len() > MAX_PASSWORD_BYTES {
            return None;
        }
        Some(Self { tenant: tenant.into(), user: user.into(), password: password.to_vec() })
    }

    fn verify(self, user: Option<&User>) -> Outcome {
        let absent;
        let hash: &PasswordHash = match user {
            Some(user) => &user.hash,
            None => {
                absent = nobody();
                &absent
            }
        };
        match (verify(&self.password, hash), user) {
            (true, Some(user)) => Ok(Principal { tenant: self.tenant, user: self.user, roles: user.roles }),
            _ => Err(AuthError::BadCredentials),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use base64::engine::general_purpose::STANDARD as PADDED;
    use base64::engine::general_purpose::STANDARD_NO_PAD as UNPADDED;

    use super::super::password::cheap_hash;
    use super::super::roles::{Role, Roles};
    use super::*;

    const ROLES: Roles = Roles::NONE.with(Role::MeasurementAdmin);

    fn row(tenant: &str, name: &str, password: &str) -> UserRow {
        UserRow { tenant: tenant.into(), name: name.into(), hash: cheap_hash(password), roles: ROLES }
    }

    fn authenticator() -> Authenticator {
        let rows = [row("edge", "admin", "secret"), row("t1", "ann", "a:b:c"), row("t1", "zoë", "pässword")];
        Authenticator::new(Users::load(rows).unwrap())
    }

    fn basic(credentials: impl AsRef<[u8]>) -> Vec<u8> {
        format!("Basic {}", PADDED.encode(credentials)).into_bytes()
    }

    async fn check(auth: &Authenticator, header: impl AsRef<[u8]>) -> Outcome {
        auth.basic(Some(header.as_ref())).await
    }

    fn principal(tenant: &str, user: &str) -> Principal {
        Principal { tenant: tenant.into(), user: user.into(), roles: ROLES }
    }

    #[tokio::test]
    async fn good_credentials_name_their_principal() {
        let auth = authenticator();
        assert_eq!(check(&auth, basic("edge/admin:secret")).await, Ok(principal("edge", "admin")));
        assert_eq!(check(&auth, basic("admin:secret")).await, Ok(principal("edge", "admin")));
        assert_eq!(check(&auth, basic("t1/ann:a:b:c")).await, Ok(principal("t1", "ann")));
        assert_eq!(check(&auth, basic("t1/zoë:pässword")).await, Ok(principal("t1", "zoë")));
    }

    #[tokio::test]
    async fn scheme_case_spaces_and_padding_do_not_matter() {
        let auth = authenticator();
        let padded = PADDED.encode("t1/ann:a:b:c");
        let unpadded = UNPADDED.encode("edge/admin:secret");
        assert_ne!(unpadded.len() % 4, 0);
        for header in [format!("basic {padded}"), format!("BASIC   {padded} "), format!("bAsIc {unpadded}")] {
            assert!(check(&auth, &header).await.is_ok(), "{header}");
        }
    }

    #[tokio::test]
    async fn everything_else_is_bad_credentials() {
        let auth = authenticator();
        assert_eq!(auth.basic(None).await, Err(AuthError::Missing));
        let mut headers = vec![
            b"".to_vec(),
            b"Basic".to_vec(),
            b"Basic ".to_vec(),
            b"Basic !!!!".to_vec(),
            b"Bearer abc".to_vec(),
            b"\xff\xfe \xff".to_vec(),
            PADDED.encode("admin:secret").into_bytes(),
        ];
        for credentials in [
            "admin",
            "admin:",
            ":secret",
            "/admin:secret",
            "edge/:secret",
            "admin:Secret",
            "admin:secret ",
            "admin: secret",
            "edge/edge/admin:secret",
            "t1/admin:secret",
            "Edge/admin:secret",
            "admin:secret\0",
            "nobody:secret",
            "ann:a:b:c",
        ] {
            headers.push(basic(credentials));
        }
        headers.push(basic(b"adm\xffin:secret"));
        headers.push(basic([b"admin:".as_slice(), &[b'x'; MAX_PASSWORD_BYTES + 1]].concat()));
        headers.push([b"Basic ".as_slice(), &[b'A'; MAX_HEADER_BYTES]].concat());
        for header in headers {
            let outcome = check(&auth, &header).await;
            assert_eq!(outcome, Err(AuthError::BadCredentials), "{}", String::from_utf8_lossy(&header));
        }
    }

    #[tokio::test]
    async fn the_longest_names_and_password_fit_into_a_header() {
        let (name, password) = ("\u{1F30A}".repeat(MAX_USER_CHARS), "x".repeat(MAX_PASSWORD_BYTES));
        let auth = Authenticator::new(Users::load([row(&name, &name, &password)]).unwrap());
        let header = basic(format!("{name}/{name}:{password}"));
        assert!(header.len() <= MAX_HEADER_BYTES);
        assert!(check(&auth, header).await.is_ok());
    }

    #[tokio::test]
    async fn success_and_failure_are_remembered() {
        let auth = authenticator();
        for (credentials, outcome) in
            [("admin:secret", Ok(principal("edge", "admin"))), ("admin:wrong", Err(AuthError::BadCredentials))]
        {
            let before = auth.verifications();
            for _ in 0..3 {
                assert_eq!(check(&auth, basic(credentials)).await, outcome);
            }
            assert_eq!(auth.verifications(), before + 1);
        }
    }

    #[tokio::test]
    async fn memory_ends_a_minute_after_the_last_use() {
        let auth = authenticator();
        let header = basic("admin:secret");
        let begun = Instant::now();
        check(&auth, &header).await.unwrap();
        let ended = Instant::now();
        let at = |now| auth.0.check(&header, now).unwrap();
        assert!(matches!(at(begun + REMEMBERED - Duration::from_millis(1)), Check::Remembered(Ok(_))));
        // Its use has renewed it.
        assert!(matches!(at(ended + REMEMBERED), Check::Remembered(Ok(_))));
        assert!(matches!(at(ended + 3 * REMEMBERED), Check::UnderWay(_)));
    }

    #[tokio::test]
    async fn malformed_headers_never_reach_argon2_and_unknown_users_do() {
        let auth = authenticator();
        check(&auth, b"Basic !!!!").await.unwrap_err();
        check(&auth, basic("no colon")).await.unwrap_err();
        assert_eq!(auth.verifications(), 0);
        check(&auth, basic("nobody:secret")).await.unwrap_err();
        assert_eq!(auth.verifications(), 1);
    }

    #[tokio::test]
    async fn guessing_does_not_push_out_a_good_login() {
        let auth = authenticator();
        let mut state = auth.0.state();
        let now = Instant::now();
        state.land(0, [1; 32], &Ok(principal("edge", "admin")), now);
        for i in 0..20_000_u32 {
            let mut guess = [2; 32];
            guess[..4].copy_from_slice(&i.to_le_bytes());
            state.land(0, guess, &Err(AuthError::BadCredentials), now);
        }
        assert_eq!(state.refused.0.len(), REMEMBERED_COUNT.get());
        assert!(matches!(state.recall(&[1; 32], now), Some(Ok(_))));
    }

    #[test]
    fn memory_is_bounded_and_the_least_recently_used_goes_first() {
        let mut memory = Memory::new();
        let now = Instant::now();
        let id = |i: usize| {
            let mut id = Fingerprint::default();
            id[..8].copy_from_slice(&i.to_le_bytes());
            id
        };
        for i in 0..REMEMBERED_COUNT.get() {
            memory.keep(id(i), Err(AuthError::BadCredentials), now);
        }
        assert!(memory.recall(&id(0), now).is_some());
        memory.keep(id(99_999), Err(AuthError::BadCredentials), now);
        assert_eq!(memory.0.len(), REMEMBERED_COUNT.get());
        assert!(memory.recall(&id(0), now).is_some());
        assert!(memory.recall(&id(1), now).is_none());
    }

    #[tokio::test]
    async fn first_requests_with_one_header_share_one_verification() {
        let auth = authenticator();
        let header = basic("admin:secret");
        let outcomes = futures_util::future::join_all((0..256).map(|_| check(&auth, &header))).await;
        assert!(outcomes.iter().all(Result::is_ok));
        assert_eq!(auth.verifications(), 1);
    }

    #[tokio::test]
    async fn a_verification_outlives_the_request_that_started_it() {
        let auth = authenticator();
        let header = basic("admin:secret");
        let held = auth.0.turn.acquire().await.unwrap();
        let mut first = Box::pin(auth.basic(Some(&header)));
        assert!(futures_util::poll!(&mut first).is_pending());
        let mut second = Box::pin(auth.basic(Some(&header)));
        assert!(futures_util::poll!(&mut second).is_pending());
        drop(first);
        drop(held);
        assert!(second.await.is_ok());
        assert_eq!(auth.verifications(), 1);
    }

    #[tokio::test]
    async fn the_waiting_line_is_bounded_and_remembered_logins_pass_it() {
        let auth = authenticator();
        check(&auth, basic("admin:secret")).await.unwrap();
        let held = auth.0.turn.acquire().await.unwrap();
        let headers: Vec<_> = (0..=WAITING).map(|i| basic(format!("admin:guess{i}"))).collect();
        let mut waiting: Vec<_> = headers.iter().map(|header| Box::pin(auth.basic(Some(header)))).collect();
        for request in &mut waiting {
            assert!(futures_util::poll!(request).is_pending());
        }
        assert_eq!(check(&auth, basic("admin:more")).await, Err(AuthError::Busy));
        assert!(check(&auth, basic("admin:secret")).await.is_ok());
        drop(held);
        for request in waiting {
            assert_eq!(request.await, Err(AuthError::BadCredentials));
        }
        assert_eq!(check(&auth, basic("admin:more")).await, Err(AuthError::BadCredentials), "Busy is not remembered");
        assert!(auth.0.state().flights.is_empty());
    }

    #[tokio::test]
    async fn a_changed_user_is_verified_anew() {
        let auth = authenticator();
        check(&auth, basic("admin:secret")).await.unwrap();
        check(&auth, basic("admin:fresh")).await.unwrap_err();
        auth.put(row("edge", "admin", "fresh")).unwrap();
        assert_eq!(check(&auth, basic("admin:secret")).await, Err(AuthError::BadCredentials));
        assert!(check(&auth, basic("admin:fresh")).await.is_ok());
        assert!(auth.remove(&"edge".into(), "admin"));
        assert_eq!(check(&auth, basic("admin:fresh")).await, Err(AuthError::BadCredentials));
    }

    #[tokio::test]
    async fn a_change_of_one_user_leaves_the_others_remembered() {
        let auth = authenticator();
        check(&auth, basic("t1/ann:a:b:c")).await.unwrap();
        check(&auth, basic("admin:secret")).await.unwrap();
        auth.put(row("edge", "admin", "fresh")).unwrap();
        auth.put(row("edge", "ann", "x")).unwrap();
        auth.remove(&"t1".into(), "zoë");
        check(&auth, basic("t1/ann:a:b:c")).await.unwrap();
        assert_eq!(auth.verifications(), 2);
        auth.remove_tenant(&"t1".into());
        assert!(!auth.knows(&"t1".into()) && auth.knows(&"edge".into()));
        assert_eq!(check(&auth, basic("t1/ann:a:b:c")).await, Err(AuthError::BadCredentials));
    }

    #[tokio::test]
    async fn new_passwords_are_hashed_in_turn_with_the_logins_and_refused_when_too_many_wait() {
        let auth = authenticator();
        let held = auth.0.turn.acquire().await.unwrap();
        let mut waiting: Vec<_> = (0..=WAITING).map(|_| Box::pin(auth.hash("correct horse".into()))).collect();
        for hash in &mut waiting {
            assert!(futures_util::poll!(hash).is_pending());
        }
        assert_eq!(auth.hash("correct horse".into()).await, Err(AuthError::Busy));
        assert_eq!(check(&auth, basic("admin:secret")).await, Err(AuthError::Busy));
        waiting.truncate(1);
        drop(held);
        assert!(waiting.remove(0).await.unwrap().starts_with("$argon2id$"));
        assert_eq!(auth.hash("short".into()).await, Err(AuthError::Password));
    }

    #[tokio::test]
    async fn an_outcome_from_before_a_change_is_not_remembered_after_it() {
        let auth = authenticator();
        let header = basic("admin:secret");
        let held = auth.0.turn.acquire().await.unwrap();
        let mut before = Box::pin(auth.basic(Some(&header)));
        assert!(futures_util::poll!(&mut before).is_pending());
        auth.remove(&"edge".into(), "admin");
        let mut after = Box::pin(auth.basic(Some(&header)));
        assert!(futures_util::poll!(&mut after).is_pending());
        drop(held);
        assert!(before.await.is_ok(), "it had begun when the user was there");
        assert_eq!(after.await, Err(AuthError::BadCredentials));
        assert_eq!(check(&auth, &header).await, Err(AuthError::BadCredentials));
    }

    #[tokio::test]
    async fn a_damaged_row_changes_nothing() {
        let auth = authenticator();
        check(&auth, basic("admin:secret")).await.unwrap();
        let damaged = UserRow { hash: "plain".into(), ..row("edge", "admin", "x") };
        assert!(auth.put(damaged).is_err());
        assert!(check(&auth, basic("admin:secret")).await.is_ok());
        assert_eq!(auth.verifications(), 1);
    }
}
