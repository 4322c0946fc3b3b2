//! `tidegate plugin new`: a language, a world and a name in, a folder out with a project that builds into a working plugin with
//! public tools. The texts are those of `plugins/templates`.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};

use crate::admin::print;
use crate::plugin::World;

/// A file of a project: where it goes, and its text. In both, `{{…}}` is filled in.
type File = (&'static str, &'static str);

/// `tidegate plugin new`
#[derive(clap::Args, Debug)]
pub struct NewArgs {
    /// The language that it is written in
    #[arg(long = "lang", value_enum)]
    language: Language,
    /// What it does: decide which messages pass, or reshape their bodies
    #[arg(long, value_enum, default_value = "filter")]
    world: World,
    /// The name of the plugin and of its folder: a lower-case letter, then at most 63 of these, digits and hyphens
    name: String,
}

#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum Language {
    Rust,
    #[value(name = "js", alias = "javascript")]
    JavaScript,
    C,
    Python,
}

/// Writes the project into a new folder of the current one, and says what is next.
///
/// # Errors
/// For a name that is none, a folder that exists, and what the file system says.
pub fn new(args: &NewArgs) -> anyhow::Result<()> {
    let NewArgs { language, world, name } = args;
    ensure!(is_name(name), "{name}: a name is a lower-case letter, then at most 63 of these, digits and hyphens");
    write_project(Path::new(name), name, *language, *world)?;
    print(&[format!("{name}/README.md says how to go on")])
}

/// Whether this can be the name of a plugin.
pub(crate) fn is_name(name: &str) -> bool {
    name.len() <= 64
        && name.starts_with(|first: char| first.is_ascii_lowercase())
        && name.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-'))
}

fn write_project(folder: &Path, name: &str, language: Language, world: World) -> anyhow::Result<()> {
    fs::create_dir(folder).map_err(|error| match error.kind() {
        ErrorKind::AlreadyExists => anyhow::anyhow!("{name} exists already"),
        _ => anyhow::Error::new(error).context(format!("{name} can't be made")),
    })?;
    let fill = |text: &str| {
        let text = text.replace("{{name}}", name).replace("{{world}}", world.name());
        text.replace("{{settings}}", settings(world))
    };
    for (path, text) in files(language, world) {
        let path: PathBuf = folder.join(fill(path));
        let written = path.parent().map_or(Ok(()), fs::create_dir_all).and_then(|()| fs::write(&path, fill(text)));
        written.with_context(|| format!("{} can't be written", path.display()))?;
    }
    Ok(())
}

/// What the READMEs try it with.
fn settings(world: World) -> &'static str {
    match world {
        World::Filter => r#"{"limit": 20}"#,
        World::Transform => r#"{"site": "Lyon"}"#,
    }
}

macro_rules! template {
    ($file:literal) => {
        include_str!(concat!("../../plugins/templates/", $file))
    };
}

const WIT: File = ("wit/plugin.wit", include_str!("../../wit/plugin.wit"));

fn files(language: Language, world: World) -> Vec<File> {
    use World::{Filter, Transform};
    let by_world = |filter: &'static str, transform: &'static str| match world {
        Filter => filter,
        Transform => transform,
    };
    let mut files = vec![("messages.jsonl", by_world(template!("filter.jsonl"), template!("transform.jsonl")))];
    files.extend(match language {
        Language::Rust => vec![
            ("README.md", template!("rust/README.md")),
            ("Cargo.toml", template!("rust/Cargo.toml")),
            (".cargo/config.toml", template!("rust/config.toml")),
            ("src/lib.rs", by_world(template!("rust/filter.rs"), template!("rust/transform.rs"))),
            WIT,
        ],
        Language::JavaScript => vec![
            ("README.md", template!("javascript/README.md")),
            ("{{name}}.js", by_world(template!("javascript/filter.js"), template!("javascript/transform.js"))),
        ],
        Language::C => vec![
            ("README.md", template!("c/README.md")),
            ("Makefile", template!("c/Makefile")),
            ("plugin.c", by_world(template!("c/filter.c"), template!("c/transform.c"))),
            ("lib/memory.c", template!("c/lib/memory.c")),
            ("lib/stdlib.h", template!("c/lib/stdlib.h")),
            ("lib/string.h", template!("c/lib/string.h")),
            ("bindings/{{world}}.h", by_world(template!("c/bindings/filter.h"), template!("c/bindings/transform.h"))),
            ("bindings/{{world}}.c", by_world(template!("c/bindings/filter.c"), template!("c/bindings/transform.c"))),
            WIT,
        ],
        Language::Python => vec![
            ("README.md", template!("python/README.md")),
            ("app.py", by_world(template!("python/filter.py"), template!("python/transform.py"))),
            WIT,
        ],
    });
    files
}
