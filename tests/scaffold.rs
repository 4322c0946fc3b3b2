//! `tidegate plugin new` as a process. What is written is built and run in `peers/authors.rs`.

use std::fs;
use std::path::Path;

use crate::harness::Program;

/// Runs it in `directory`: whether it succeeded and what it printed.
async fn plugin_new(directory: &Path, arguments: &[&str]) -> (bool, String, String) {
    let arguments = [&["plugin", "new"], arguments].concat();
    fs::remove_file(directory.join("new.err")).unwrap_or_default();
    let mut program = Program::spawn(&arguments, &[], directory, "new");
    let succeeded = program.wait().await.success();
    (succeeded, program.stdout(), program.stderr())
}

/// The files below `directory`, by their paths in it.
fn files(directory: &Path) -> Vec<String> {
    fn walk(root: &Path, directory: &Path, found: &mut Vec<String>) {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => walk(root, &path, found),
                false => found.push(path.strip_prefix(root).unwrap().display().to_string()),
            }
        }
    }
    let mut found = Vec::new();
    walk(directory, directory, &mut found);
    found.sort();
    found
}

#[tokio::test]
async fn a_project_has_all_its_files_and_no_blanks_in_them() {
    let directory = tempfile::tempdir().unwrap();
    for (language, world, expected) in [
        ("rust", "filter", &[".cargo/config.toml", "Cargo.toml", "src/lib.rs", "wit/plugin.wit"][..]),
        ("rust", "transform", &[".cargo/config.toml", "Cargo.toml", "src/lib.rs", "wit/plugin.wit"]),
        ("js", "filter", &["js-filter.js"]),
        ("js", "transform", &["js-transform.js"]),
        (
            "c",
            "filter",
            &["Makefile", "plugin.c", "bindings/filter.c", "bindings/filter.h", "lib/memory.c", "wit/plugin.wit"],
        ),
        (
            "c",
            "transform",
            &["Makefile", "plugin.c", "bindings/transform.h", "lib/stdlib.h", "lib/string.h", "wit/plugin.wit"],
        ),
        ("python", "filter", &["app.py", "wit/plugin.wit"]),
        ("python", "transform", &["app.py", "wit/plugin.wit"]),
    ] {
        let name = format!("{language}-{world}");
        let (succeeded, printed, error) =
            plugin_new(directory.path(), &["--lang", language, "--world", world, &name]).await;
        assert!(succeeded, "{name}: {error}");
        assert_eq!(printed, format!("{name}/README.md says how to go on\n"));
        let project = directory.path().join(&name);
        let files = files(&project);
        for file in expected.iter().chain(&["README.md", "messages.jsonl"]) {
            assert!(files.iter().any(|known| known == file), "{name}: no {file} among {files:?}");
        }
        for file in &files {
            let text = fs::read_to_string(project.join(file)).unwrap();
            assert!(!text.contains("{{") && !text.is_empty(), "{name}: {file}: {text}");
        }
        let readme = fs::read_to_string(project.join("README.md")).unwrap();
        assert!(readme.contains(&format!("# {name}\n")) && readme.contains(&format!("A {world} for")), "{readme}");
    }
}

#[tokio::test]
async fn a_filter_is_what_is_written_unless_a_transform_is_asked_for() {
    let directory = tempfile::tempdir().unwrap();
    assert!(plugin_new(directory.path(), &["--lang", "python", "a"]).await.0);
    assert!(fs::read_to_string(directory.path().join("a/app.py")).unwrap().contains("class Filtering"));
}

#[tokio::test]
async fn a_folder_that_exists_and_an_odd_name_are_refused_and_nothing_is_written() {
    let directory = tempfile::tempdir().unwrap();
    fs::create_dir(directory.path().join("mine")).unwrap();
    let (succeeded, _, error) = plugin_new(directory.path(), &["--lang", "c", "mine"]).await;
    assert!(!succeeded && error.contains("mine exists already"), "{error}");
    let long = "a".repeat(65);
    for name in ["", "Mine", "1st", "a_b", "a/b", "../a", "a.b", "ä", &long] {
        let (succeeded, _, error) = plugin_new(directory.path(), &["--lang", "c", "--", name]).await;
        assert!(!succeeded && error.contains("a name is a lower-case letter"), "{name}: {error}");
    }
    assert_eq!(files(directory.path()), ["new.err", "new.out"]);
    assert!(plugin_new(directory.path(), &["--lang", "c", &long[1..]]).await.0, "64 characters are a name");
    let (succeeded, _, error) = plugin_new(directory.path(), &["--lang", "cobol", "b"]).await;
    assert!(!succeeded && error.contains("rust, js, c, python"), "{error}");
}
