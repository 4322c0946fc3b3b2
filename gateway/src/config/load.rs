//! Loading: read the sources, check each by itself, merge.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

use ::config::{Config as Merged, Environment, File as FileSource, FileFormat, Map, Source, Value, ValueKind};

use super::Config;
use super::keys::{KEYS, Medium, kind, nearest};

/// The largest configuration file.
const MAX_FILE_BYTES: u64 = 1_024 * 1_024;

const PREFIX: &str = "TIDEGATE_";
const SEPARATOR: &str = "__";

/// Why a configuration is refused. The text is for the operator.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{origin} cannot be read: {reason}")]
    Read {
        /// The file.
        origin: String,
        /// What the system said.
        reason: io::Error,
    },
    /// The file is not TOML.
    #[error("{origin} is not valid TOML: {reason}")]
    Syntax {
        /// The file.
        origin: String,
        /// Where and why.
        reason: String,
    },
    /// There is no such key.
    #[error("{origin}: there is no key {key:?}; did you mean {nearest:?}?")]
    UnknownKey {
        /// The file or the variable.
        origin: String,
        /// What was written.
        key: String,
        /// The known key that looks most like it; a variable's name when the environment is meant.
        nearest: String,
    },
    /// A value has the wrong type or is out of range.
    #[error("{origin}: {key} must be {expected}, not {found}")]
    Value {
        /// The file or the variable.
        origin: String,
        /// The key.
        key: String,
        /// What the key accepts.
        expected: String,
        /// What was written.
        found: String,
    },
    /// The sources could not be merged.
    #[error("the configuration cannot be merged: {0}")]
    Merge(String),
}

impl Config {
    /// Merges the defaults, `file` (TOML, at most 1 MiB) and the variables `TIDEGATE_<SECTION>__<KEY>` of `env`; the later one
    /// wins. Variables without the double underscore belong to others (`TIDEGATE_URL`) and are ignored, unless they are a key
    /// but for it.
    ///
    /// # Errors
    /// [`ConfigError`] names the first value that is wrong, in the order file, environment, key.
    pub fn load(file: Option<&Path>, env: impl Iterator<Item = (String, String)>) -> Result<Self, ConfigError> {
        let mut builder = Merged::builder().add_source(Merged::try_from(&Self::default()).map_err(merge)?);
        if let Some(path) = file {
            let origin = path.display().to_string();
            let source = FileSource::from_str(&read(path, &origin)?, FileFormat::Toml);
            let syntax = |error: ::config::ConfigError| ConfigError::Syntax {
                origin: origin.clone(),
                reason: error.to_string(),
            };
            let mut values = Vec::new();
            flatten("", source.collect().map_err(syntax)?, &mut values);
            check(values, Medium::File, |_| origin.clone())?;
            builder = builder.add_source(source);
        }
        let source = Environment::with_prefix("TIDEGATE")
            .prefix_separator("_")
            .separator(SEPARATOR)
            .source(Some(variables(env)?));
        check(source.collect().map_err(merge)?.into_iter().collect(), Medium::Environment, variable)?;
        let merged = builder.add_source(source).build().map_err(merge)?;
        merged.try_deserialize().map_err(merge)
    }
}

#[allow(clippy::needless_pass_by_value, reason = "the shape of map_err")]
fn merge(error: ::config::ConfigError) -> ConfigError {
    ConfigError::Merge(error.to_string())
}

fn read(path: &Path, origin: &str) -> Result<String, ConfigError> {
    let failed = |reason| ConfigError::Read { origin: origin.to_owned(), reason };
    let mut text = String::new();
    File::open(path).and_then(|file| file.take(MAX_FILE_BYTES + 1).read_to_string(&mut text)).map_err(failed)?;
    if text.len() as u64 > MAX_FILE_BYTES {
        return Err(failed(io::Error::new(io::ErrorKind::FileTooLarge, "it is longer than 1 MiB")));
    }
    Ok(text)
}

/// The variables that are configuration keys.
fn variables(env: impl Iterator<Item = (String, String)>) -> Result<Map<String, String>, ConfigError> {
    let mut variables = Map::new();
    for (name, value) in env {
        let Some(rest) = name.strip_prefix(PREFIX) else {
            continue;
        };
        if rest.contains(SEPARATOR) {
            variables.insert(name, value);
        } else if let Some((key, _)) = KEYS.iter().find(|(key, _)| rest.eq_ignore_ascii_case(&key.replace('.', "_"))) {
            return Err(ConfigError::UnknownKey {
                origin: "the environment".into(),
                key: name,
                nearest: variable_name(key),
            });
        }
    }
    Ok(variables)
}

fn variable_name(key: &str) -> String {
    format!("{PREFIX}{}", key.replace('.', SEPARATOR).to_uppercase())
}

fn variable(key: &str) -> String {
    format!("the environment variable {}", variable_name(key))
}

/// Values by dotted key. An unknown section that holds nothing counts as a value, so that its name is checked.
fn flatten(prefix: &str, table: Map<String, Value>, values: &mut Vec<(String, Value)>) {
    for (name, value) in table {
        let key = if prefix.is_empty() { name } else { format!("{prefix}.{name}") };
        match value.kind {
            ValueKind::Table(table) if !table.is_empty() || is_section(&key) => {
                flatten(&key, table, values);
            }
            _ => values.push((key, value)),
        }
    }
}

fn is_section(name: &str) -> bool {
    KEYS.iter().any(|(key, _)| key.split_once('.').is_some_and(|(section, _)| section == name))
}

/// Refuses the first wrong value; `origin` says where a key was written.
fn check(mut values: Vec<(String, Value)>, medium: Medium, origin: impl Fn(&str) -> String) -> Result<(), ConfigError> {
    values.sort_by(|(a, _), (b, _)| a.cmp(b));
    for (key, value) in values {
        let expected = match kind(&key) {
            Some(kind) if kind.accepts(&value, medium) => continue,
            Some(kind) => kind.to_string(),
            None if is_section(&key) => "a section".to_owned(),
            None => {
                let origin = origin(&key);
                let nearest = nearest(&key).to_owned();
                return Err(ConfigError::UnknownKey { origin, key, nearest });
            }
        };
        return Err(ConfigError::Value { origin: origin(&key), key, expected, found: found(&value) });
    }
    Ok(())
}

fn found(value: &Value) -> String {
    match &value.kind {
        ValueKind::String(text) => format!("{:?}", text.chars().take(64).collect::<String>()),
        ValueKind::Table(_) => "a section".to_owned(),
        ValueKind::Array(_) => "a list".to_owned(),
        ValueKind::Float(number) => format!("{number:?}"),
        _ => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use std::io::Write as _;

    use super::super::LogFormat;
    use super::super::keys::Kind;
    use super::*;

    fn from_file(text: &str) -> Result<Config, ConfigError> {
        from_both(text, &[])
    }

    fn from_env(env: &[(&str, &str)]) -> Result<Config, ConfigError> {
        Config::load(None, pairs(env))
    }

    fn from_both(text: &str, env: &[(&str, &str)]) -> Result<Config, ConfigError> {
        let mut file = tempfile::Builder::new().prefix("tidegate-").suffix(".toml").tempfile().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        Config::load(Some(file.path()), pairs(env))
    }

    fn pairs(env: &[(&str, &str)]) -> impl Iterator<Item = (String, String)> {
        env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
    }

    fn file_error(text: &str) -> String {
        let error = from_file(text).unwrap_err().to_string();
        assert!(error.contains("tidegate-") && error.contains(".toml"), "the file is named: {error}");
        error
    }

    fn env_error(name: &str, value: &str) -> String {
        from_env(&[(name, value)]).unwrap_err().to_string()
    }

    #[test]
    fn nothing_given_is_the_defaults() {
        assert_eq!(from_env(&[]).unwrap(), Config::default());
        assert_eq!(from_file("").unwrap(), Config::default());
        assert_eq!(from_file("[limits]").unwrap(), Config::default());
    }

    #[test]
    fn the_environment_wins_over_the_file_and_the_file_over_the_defaults() {
        let text = r#"
            [http]
            public_url = "https://gateway.example"
            [limits]
            body_bytes = 1_000
            bulk_count = 20
            [log]
            format = "json"
        "#;
        let env = [
            ("TIDEGATE_LIMITS__BODY_BYTES", "2000"),
            ("TIDEGATE_HTTP__ADDR", "[::1]:0"),
            ("TIDEGATE_PLUGINS__BUILTIN_DIR", "42"),
        ];
        let config = from_both(text, &env).unwrap();
        assert_eq!(config.limits.body_bytes, 2_000);
        assert_eq!(config.limits.bulk_count, 20);
        assert_eq!(config.limits.frame_bytes, Config::default().limits.frame_bytes);
        assert_eq!(config.http.addr.at(), Some("[::1]:0".parse().unwrap()));
        assert_eq!(config.http.public_url.as_deref(), Some("https://gateway.example"));
        assert_eq!(config.log.format, LogFormat::Json);
        assert_eq!(config.plugins.builtin_dir.as_deref(), Some(Path::new("42")));
    }

    #[test]
    fn variables_of_others_are_left_alone() {
        let others = [
            ("TIDEGATE_ADMIN_PASSWORD", "secret"),
            ("TIDEGATE_URL", "http://localhost:8080"),
            ("TIDEGATE_USER", "edge/admin"),
            ("TIDEGATE_PASSWORD", "secret"),
            ("TIDEGATE_SERVICE_HOST", "10.0.0.1"),
            ("TIDEGATE_PORT_8080_TCP_ADDR", "10.0.0.1"),
            ("OTHER_LIMITS__BODY_BYTES", "1"),
            ("PATH", "/bin"),
        ];
        assert_eq!(from_env(&others).unwrap(), Config::default());
    }

    #[test]
    fn an_unknown_key_is_named_with_its_place_and_the_nearest_known_one() {
        for (text, key, nearest) in [
            ("[limits]\nbody_byte = 5", "limits.body_byte", "limits.body_bytes"),
            ("[limit]\nbody_bytes = 5", "limit.body_bytes", "limits.body_bytes"),
            ("body_bytes = 5", "body_bytes", "limits.body_bytes"),
            ("[limits.body_bytes]\nx = 5", "limits.body_bytes.x", "limits.body_bytes"),
            ("[store]\nmaxbytes = 5", "store.maxbytes", "store.max_bytes"),
            ("[Log]\nfilter = \"info\"", "Log.filter", "log.filter"),
            ("[http.adr]", "http.adr", "http.addr"),
        ] {
            let error = file_error(text);
            let end = format!("there is no key \"{key}\"; did you mean \"{nearest}\"?");
            assert!(error.ends_with(&end), "{error}");
        }
        assert_eq!(
            env_error("TIDEGATE_CONSUMER__WINDOWS", "5"),
            "the environment variable TIDEGATE_CONSUMER__WINDOWS: there is no key \"consumer.windows\"; did you mean \"consumer.window\"?"
        );
        assert!(env_error("TIDEGATE_A__B__C", "").contains("there is no key \"a.b.c\""));
        assert!(env_error("TIDEGATE_ARR[0]__X", "").contains("there is no key"));
    }

    #[test]
    fn a_variable_with_one_underscore_too_few_is_not_ignored() {
        assert_eq!(
            env_error("TIDEGATE_LIMITS_BODY_BYTES", "5"),
            "the environment: there is no key \"TIDEGATE_LIMITS_BODY_BYTES\"; did you mean \"TIDEGATE_LIMITS__BODY_BYTES\"?"
        );
    }

    #[test]
    fn a_value_of_the_wrong_type_is_named_with_what_is_accepted() {
        for (text, end) in [
            ("[consumer]\nwindow = \"5\"", "consumer.window must be a whole number from 1 to 10000, not \"5\""),
            ("[consumer]\nwindow = 5.0", "consumer.window must be a whole number from 1 to 10000, not 5.0"),
            ("[consumer]\nwindow = true", "consumer.window must be a whole number from 1 to 10000, not true"),
            ("[consumer]\nwindow = [5]", "consumer.window must be a whole number from 1 to 10000, not a list"),
            ("[consumer.window]", "consumer.window must be a whole number from 1 to 10000, not a section"),
            ("consumer = 5", "consumer must be a section, not 5"),
            ("[[consumer]]\nwindow = 5", "consumer must be a section, not a list"),
            ("[log]\nformat = \"xml\"", "log.format must be text or json, not \"xml\""),
            (
                "[log]\nfilter = \"tidegate=loud\"",
                "log.filter must be a log filter, as in info or warn,tidegate=debug, not \"tidegate=loud\"",
            ),
            (
                "[http]\naddr = \"localhost\"",
                "http.addr must be an IP address and a port, as in 127.0.0.1:8080, or off, not \"localhost\"",
            ),
            (
                "[http]\naddr = 8080",
                "http.addr must be an IP address and a port, as in 127.0.0.1:8080, or off, not 8080",
            ),
            ("[http]\nallow_plain = 1", "http.allow_plain must be true or false, not 1"),
            ("[http]\nallow_plain = \"true\"", "http.allow_plain must be true or false, not \"true\""),
            ("[plugins]\nbuiltin_dir = \"\"", "plugins.builtin_dir must be a path, not \"\""),
        ] {
            let error = file_error(text);
            assert!(error.ends_with(end), "{error}");
        }
        for bad in ["", "x", "5.0", "-5", "5 ", "0x10", "1e3"] {
            let end = format!("consumer.window must be a whole number from 1 to 10000, not {bad:?}");
            assert_eq!(
                env_error("TIDEGATE_CONSUMER__WINDOW", bad),
                format!("the environment variable TIDEGATE_CONSUMER__WINDOW: {end}")
            );
        }
    }

    #[test]
    fn urls_are_a_scheme_and_a_host_and_perhaps_a_path() {
        for good in ["http://a", "https://gateway.example:8443", "http://[::1]:8080", "http://a/", "https://a/edge1"] {
            assert_eq!(
                from_env(&[("TIDEGATE_HTTP__PUBLIC_URL", good)]).unwrap().http.public_url.as_deref(),
                Some(good)
            );
        }
        for bad in
            ["", "a", "http://", "http:///a", "ftp://a", "http://a?b", "http://a/b#c", "http://u@a", "http://a b"]
        {
            let error = env_error("TIDEGATE_HTTP__PUBLIC_URL", bad);
            assert!(error.contains("http.public_url must be an http or https URL"), "{error}");
        }
    }

    #[test]
    fn listeners_can_be_off_and_flags_set_by_both_media() {
        let config = from_file("[http]\naddr = \"off\"\nhttps_addr = \"0.0.0.0:8443\"\nallow_plain = true").unwrap();
        assert_eq!((config.http.addr.at(), config.http.allow_plain), (None, true));
        assert_eq!(config.http.https_addr.at(), Some("0.0.0.0:8443".parse().unwrap()));
        let config = from_env(&[("TIDEGATE_HTTP__ADDR", "off"), ("TIDEGATE_HTTP__ALLOW_PLAIN", "true")]).unwrap();
        assert_eq!((config.http.addr.at(), config.http.allow_plain), (None, true));
        assert!(env_error("TIDEGATE_HTTP__ALLOW_PLAIN", "1").contains("must be true or false"));
    }

    #[test]
    fn origins_are_a_list_without_paths_and_wildcards() {
        let http = from_env(&[("TIDEGATE_HTTP__CORS_ORIGINS", "https://a.example, http://b:1")]).unwrap().http;
        assert!(http.allows_origin("https://a.example") && http.allows_origin("http://b:1"));
        for foreign in
            ["http://a.example", "https://a.example:443", "http://b", "null", "", "https://a.example, http://b:1"]
        {
            assert!(!http.allows_origin(foreign), "{foreign}");
        }
        assert!(!Config::default().http.allows_origin("") && !Config::default().http.allows_origin("null"));
        for bad in ["", "*", "a", "https://a/", "https://a,", "https://a/b", "https://a https://b"] {
            let error = env_error("TIDEGATE_HTTP__CORS_ORIGINS", bad);
            assert!(error.contains("http.cors_origins must be http or https origins"), "{error}");
        }
    }

    #[test]
    fn every_number_has_a_range_that_holds_its_default_and_bites_at_both_ends() {
        for (key, kind) in KEYS {
            let Kind::Number(range) = kind else { continue };
            let set = |number: i128| from_env(&[(&variable_name(key), &number.to_string())]);
            let (low, high) = (i128::from(*range.start()), i128::from(*range.end()));
            assert!(set(low).is_ok() && set(high).is_ok(), "{key}");
            for outside in [low - 1, high + 1] {
                let error = set(outside).unwrap_err().to_string();
                assert!(error.contains(key) && error.contains(&format!("from {low} to {high}")), "{error}");
                let (section, name) = key.split_once('.').unwrap();
                assert!(file_error(&format!("[{section}]\n{name} = {outside}")).contains(key));
            }
        }
    }

    #[test]
    fn a_long_wrong_value_is_cut_in_the_error() {
        assert!(env_error("TIDEGATE_LOG__FORMAT", &"x".repeat(10_000)).len() < 300);
    }

    #[test]
    fn broken_toml_says_where() {
        let error = file_error("[limits]\nbody_bytes = = 5");
        assert!(error.contains("is not valid TOML") && error.contains("line 2"), "{error}");
        assert!(file_error("[limits]\nbody_bytes = 1\nbody_bytes = 2").contains("duplicate key"));
    }

    #[test]
    fn a_file_that_is_absent_or_too_long_or_not_text_is_refused() {
        let error = Config::load(Some(Path::new("no/such/tidegate.toml")), pairs(&[])).unwrap_err().to_string();
        assert!(error.starts_with("no/such/tidegate.toml cannot be read"), "{error}");
        let long = "#".repeat(usize::try_from(MAX_FILE_BYTES).unwrap());
        assert!(from_file(&long).is_ok());
        assert!(file_error(&format!("{long}#")).contains("longer than 1 MiB"));
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(b"\xff\xfe").unwrap();
        assert!(matches!(Config::load(Some(file.path()), pairs(&[])), Err(ConfigError::Read { .. })));
    }
}
