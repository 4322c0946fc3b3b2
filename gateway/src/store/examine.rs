//! Looks at a database without changing it: whether it can be used at all, and whether everything in it fits together.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use sqlx::sqlite::SqliteConnection;
use sqlx::{ConnectOptions as _, Connection as _, Row as _};

use super::{MIGRATIONS, StoreError, beside, options, wal_of};
use crate::auth::KEYS;

/// What the check of a start may take; a small database is checked whole in it.
const CHECK_TIME: Duration = Duration::from_millis(250);
/// Steps of SQLite's machine between two looks at the clock.
const STEPS: i32 = 1000;
/// Findings of a kind that are shown.
const SHOWN: usize = 20;

/// A rule of the backlog or of the objects, and a query that finds what breaks it.
struct Rule {
    /// The migration that made what it is about.
    since: i64,
    broken: &'static str,
    /// Selects one text for each row that breaks it.
    query: &'static str,
}

const RULES: [Rule; 10] = [
    Rule {
        since: 1,
        broken: "a consumer without its topic",
        query: "SELECT name || ' (row ' || id || ')' FROM consumer WHERE topic NOT IN (SELECT id FROM topic)",
    },
    Rule {
        since: 1,
        broken: "a consumer without its cursor",
        query: "SELECT name || ' (row ' || id || ')' FROM consumer WHERE id NOT IN (SELECT consumer FROM cursor)",
    },
    Rule {
        since: 1,
        broken: "a cursor without its consumer",
        query: "SELECT 'row ' || consumer FROM cursor WHERE consumer NOT IN (SELECT id FROM consumer)",
    },
    Rule {
        since: 1,
        broken: "a cursor whose unacknowledged messages are not ascending ids below its end",
        query: "SELECT 'row ' || consumer FROM cursor WHERE NOT json_valid(holes) OR json_type(holes) <> 'array' OR EXISTS (
                  SELECT 1 FROM (SELECT value AS id, lag(value, 1, 0) OVER (ORDER BY key) AS before, type FROM json_each(holes))
                  WHERE type <> 'integer' OR id <= before OR id >= hi)",
    },
    Rule {
        since: 1,
        broken: "a counter that is missing",
        query: "SELECT column1 FROM (VALUES ('object_id'), ('message_id')) WHERE column1 NOT IN (SELECT k FROM meta)"
    },
    Rule {
        since: 3,
        broken: "an object whose id would be given again",
        query: "SELECT t || ' ' || id FROM (
                  SELECT 'managed object' AS t, max(id) AS id FROM managed_object
                  UNION ALL SELECT 'measurement', max(id) FROM measurement UNION ALL SELECT 'event', max(id) FROM event
                  UNION ALL SELECT 'alarm', max(id) FROM alarm UNION ALL SELECT 'operation', max(id) FROM operation
                  UNION ALL SELECT 'subscription', max(id) FROM subscription)
                WHERE id >= (SELECT v FROM meta WHERE k = 'object_id')",
    },
    Rule {
        since: 12,
        broken: "a measurement that has no place, or two, among those of its source",
        query: "SELECT 'measurement ' || id FROM measurement AS m WHERE 1 <> (
                  SELECT count(*) FROM measurement_place AS p WHERE p.source = m.source AND p.time = m.time AND p.id = m.id)",
    },
    Rule {
        since: 12,
        broken: "a place of a measurement that does not exist",
        query: "SELECT 'measurement ' || id FROM measurement_place WHERE id NOT IN (SELECT id FROM measurement)",
    },
    Rule {
        since: 1,
        broken: "a subscription that cannot be read",
        query: "SELECT 'subscription ' || id FROM subscription WHERE NOT json_valid(body)",
    },
    Rule {
        since: 2,
        broken: "an external id of an object that does not exist",
        query: "SELECT type || ' ' || value FROM external_id WHERE object NOT IN (SELECT id FROM managed_object)",
    },
];

/// Refuses a database that the gateway cannot use; a file that is absent or empty will be made one at a first start.
pub(super) async fn refuse_unusable(file: &Path) -> Result<(), StoreError> {
    if is_empty(file) {
        // The keys are made when the database is there; a log alone may be left of a first start that a crash has ended.
        let lost = file.with_file_name(KEYS).exists();
        return if lost { Err(StoreError::Lost) } else { Ok(()) };
    }
    // A crash in the first moments of a database leaves a journal, which SQLite plays back when it opens the file for writing.
    if !is_empty(&beside(file, "-journal")) {
        return Ok(());
    }
    let mut connection = open(file).await?;
    let usable = async {
        refuse_other_versions(&mut connection).await?;
        // As much of it as can be had for little.
        let begun = Instant::now();
        connection.lock_handle().await?.set_progress_handler(STEPS, move || begun.elapsed() < CHECK_TIME);
        match sqlx::query_scalar::<_, String>("PRAGMA quick_check(1)").fetch_one(&mut connection).await {
            Ok(found) if found == "ok" => Ok(()),
            Ok(found) => Err(StoreError::Damaged(one_line(&found))),
            Err(error) => match StoreError::from(error) {
                StoreError::Interrupted => Ok(()),
                error => Err(error),
            },
        }
    };
    let usable = usable.await;
    connection.close().await?;
    usable
}

/// All that is wrong with the database `file`, one line each; none: it is sound.
///
/// # Errors
/// When it cannot be read at all, and says why.
pub async fn check(file: &Path) -> Result<Vec<String>, StoreError> {
    let mut connection = open(file).await?;
    let findings: Result<Vec<String>, StoreError> = async {
        let version = refuse_other_versions(&mut connection).await?;
        let mut findings: Vec<String> = sqlx::query_scalar("PRAGMA integrity_check").fetch_all(&mut connection).await?;
        findings.retain(|found| found != "ok");
        // The rules would only repeat what follows from damage.
        if findings.is_empty() {
            for rule in RULES.iter().filter(|rule| rule.since <= version) {
                findings.extend(rule.findings(&mut connection).await?);
            }
        }
        Ok(findings)
    }
    .await;
    connection.close().await?;
    let findings = match findings {
        Err(StoreError::Damaged(found)) => vec![found],
        findings => findings?,
    };
    Ok(findings.iter().map(|found| one_line(found)).collect())
}

impl Rule {
    async fn findings(&self, connection: &mut SqliteConnection) -> Result<Vec<String>, StoreError> {
        let rows: Vec<String> = sqlx::query_scalar(self.query).fetch_all(connection).await?;
        let shown = rows.iter().take(SHOWN).map(|row| format!("{}: {row}", self.broken));
        let more = rows.len().checked_sub(SHOWN + 1).map(|more| format!("{}: and {} more", self.broken, more + 1));
        Ok(shown.chain(more).collect())
    }
}

/// Leaves no files behind: without a write-ahead log, there is no need for any.
async fn open(file: &Path) -> Result<SqliteConnection, StoreError> {
    let whole = is_empty(&wal_of(file));
    Ok(options(file).read_only(true).immutable(whole).connect().await?)
}

fn is_empty(file: &Path) -> bool {
    fs::metadata(file).map_or(0, |file| file.len()) == 0
}

/// Takes only what this version or an earlier one has written. The newest migration that it has; 0: none.
pub(super) async fn refuse_other_versions(connection: &mut SqliteConnection) -> Result<i64, StoreError> {
    let tables = "SELECT count(*), count(*) FILTER (WHERE name = '_sqlx_migrations') FROM sqlite_schema";
    let row = sqlx::query(tables).fetch_one(&mut *connection).await?;
    match (row.try_get::<i64, _>(0)?, row.try_get::<i64, _>(1)?) {
        // What a crash at the first start has left.
        (0, _) => return Ok(0),
        (_, 0) => return Err(StoreError::Foreign),
        _ => {}
    }
    let newest: Option<i64> =
        sqlx::query_scalar("SELECT max(version) FROM _sqlx_migrations").fetch_one(connection).await?;
    let known = MIGRATIONS.iter().map(|migration| migration.version).max();
    if newest > known { Err(StoreError::Newer) } else { Ok(newest.unwrap_or_default()) }
}

fn one_line(found: &str) -> String {
    found.lines().collect::<Vec<_>>().join("; ")
}
