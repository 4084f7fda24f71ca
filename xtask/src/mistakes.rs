//! `cargo xtask mistakes edit` and `record`: the seeded mistakes as source that can be edited, and back. With `flash`
//! behind it, those of `vellum-flash`.
//!
//! ```text
//!   crates/vellum-format/src ──────────┬──► target/mistakes/base    as it was when the editing began
//!   crates/vellum-seeded/mistakes ─────┴──► target/mistakes/src     with the mistakes: edited by hand
//!                                 ◄─ record: the differences of the two, a patch for each file that differs
//! ```
//!
//! 1. `edit` applies every hunk that applies, and reports the others; the mistakes that they hold are put in
//!    by hand, from the `.rej` file beside the source.
//! 2. `record` refuses while a `.rej` file is left, and when the source has changed since `edit`: the patches
//!    would undo that change.
//! 3. A patch has the name of its source file. A file that only the copy has is kept as it is.
//!
//! The work on texts is git's. `crates/vellum-seeded/build.rs` applies the patches for the tests.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Outcome;
use crate::shell::{root, target_dir};

/// Files by their paths inside a directory.
type Tree = BTreeMap<String, String>;

/// The two commands have these places in common.
struct Places {
    source: PathBuf,
    mistakes: PathBuf,
    base: PathBuf,
    copy: PathBuf,
}

pub(crate) fn run(arguments: &[String]) -> Outcome {
    let work = target_dir().join("mistakes");
    let places = |of: &str, seeded: &str| Places {
        source: root().join("crates").join(of).join("src"),
        mistakes: root().join("crates").join(seeded).join("mistakes"),
        base: work.join("base"),
        copy: work.join("src"),
    };
    let (format, flash) =
        (places("vellum-format", "vellum-seeded"), places("vellum-flash", "vellum-flash-seeded"));
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["edit"] => edit(&format),
        ["record"] => record(&format),
        ["edit", "flash"] => edit(&flash),
        ["record", "flash"] => record(&flash),
        _ => Err("`mistakes edit [flash]`, or `mistakes record [flash]`".to_owned()),
    }
}

fn edit(places: &Places) -> Outcome {
    let copy = &places.copy;
    if copy.exists() {
        return Err(format!(
            "{} is there already: `cargo xtask mistakes record` takes it up, or remove it",
            copy.display()
        ));
    }
    let source = read_tree(&places.source)?;
    for (path, text) in &source {
        write(&places.base.join(path), text)?;
        write(&copy.join(path), text)?;
    }
    let mut left = Vec::new();
    for (path, text) in read_tree(&places.mistakes)? {
        match path.strip_suffix(".patch") {
            None => write(&copy.join(&path), &text)?,
            Some(patched) if source.contains_key(patched) => {
                let mut command = git(copy, &["apply", "--reject", "--whitespace=nowarn"]);
                let applied = command.arg(places.mistakes.join(&path)).output();
                let applied = applied.map_err(|error| format!("git: {error}"))?;
                let rejected = format!("{patched}.rej");
                if copy.join(&rejected).exists() {
                    left.push(rejected);
                } else if !applied.status.success() {
                    return Err(format!("{path}: {}", String::from_utf8_lossy(&applied.stderr).trim()));
                }
            }
            // The file has gone, so that all of it is left to do.
            Some(gone) => {
                write(&copy.join(format!("{gone}.rej")), &text)?;
                left.push(format!("{gone}.rej"));
            }
        }
    }
    eprintln!("{}: the source with its mistakes; `cargo xtask mistakes record` takes it up", copy.display());
    for path in &left {
        eprintln!(
            "{}: these hunks do not apply: put them in by hand, and remove this file",
            copy.join(path).display()
        );
    }
    Ok(())
}

fn record(places: &Places) -> Outcome {
    let copy = &places.copy;
    if !copy.exists() {
        return Err("there is nothing to record: begin with `cargo xtask mistakes edit`".to_owned());
    }
    let source = read_tree(&places.source)?;
    if source != read_tree(&places.base)? {
        return Err(format!(
            "the source has changed since `edit`: make that change in {} too, and copy the source to {}",
            copy.display(),
            places.base.display()
        ));
    }
    let mut format = Command::new("rustfmt");
    format.args(["--edition", "2024", "--config-path"]).arg(root().join("rustfmt.toml"));
    crate::shell::run(format.arg(copy.join("lib.rs")))?;
    let edited = read_tree(copy)?;
    if let Some(path) = edited.keys().find(|path| path.ends_with(".rej")) {
        return Err(format!("{}: put these hunks in, and remove the file", copy.join(path).display()));
    }
    if let Some(gone) = source.keys().find(|path| !edited.contains_key(*path)) {
        return Err(format!("{} is missing: a mistake cannot take away a file", copy.join(gone).display()));
    }
    let mut mistakes = Tree::new();
    for (path, text) in edited {
        match source.get(&path) {
            None => drop(mistakes.insert(path, text)),
            Some(before) if *before == text => {}
            Some(_) => {
                let mut command = git(&root(), &["diff", "--no-index", "--no-color", "--no-ext-diff", "-U3"]);
                let output = command.arg(places.base.join(&path)).arg(copy.join(&path)).output();
                let output = output.map_err(|error| format!("git: {error}"))?;
                let patch = patch(&path, &String::from_utf8_lossy(&output.stdout))?;
                mistakes.insert(format!("{path}.patch"), patch);
            }
        }
    }
    let before = read_tree(&places.mistakes)?;
    for path in before.keys().filter(|path| !mistakes.contains_key(*path)) {
        remove(&places.mistakes.join(path))?;
    }
    for (path, text) in mistakes.iter().filter(|(path, text)| before.get(*path) != Some(text)) {
        write(&places.mistakes.join(path), text)?;
        eprintln!("{path}");
    }
    // What is edited next begins with the source of then.
    for dir in [copy, &places.base] {
        fs::remove_dir_all(dir).map_err(|error| format!("{}: {error}", dir.display()))?;
    }
    Ok(())
}

/// A patch as it is kept: the paths of this machine are left out, and so are blanks at the ends of lines.
fn patch(path: &str, diff: &str) -> Result<String, String> {
    let start = diff.find("\n@@ ").ok_or_else(|| format!("{path}: git shows no difference"))?;
    let hunks = diff[start + 1..].lines().map(|line| match line.starts_with("@@ ") || line == " " {
        true => line.trim_end(),
        false => line,
    });
    let lines = hunks.flat_map(|line| [line, "\n"]).collect::<String>();
    Ok(format!("--- a/{path}\n+++ b/{path}\n{lines}"))
}

/// A command of git that takes the directory for no part of a repository.
fn git(dir: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new("git");
    command.args(arguments).current_dir(dir);
    if let Some(above) = dir.parent() {
        command.env("GIT_CEILING_DIRECTORIES", above);
    }
    command
}

fn read_tree(dir: &Path) -> Result<Tree, String> {
    let mut tree = Tree::new();
    let mut open = vec![String::new()];
    while let Some(prefix) = open.pop() {
        let at = dir.join(&prefix);
        let failed = |error| format!("{}: {error}", at.display());
        for entry in fs::read_dir(&at).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let path = format!("{prefix}{}", entry.file_name().to_string_lossy());
            if entry.path().is_dir() {
                open.push(format!("{path}/"));
            } else {
                tree.insert(path, fs::read_to_string(entry.path()).map_err(failed)?);
            }
        }
    }
    Ok(tree)
}

fn write(path: &Path, text: &str) -> Outcome {
    let dir = path.parent().expect("a file lies in a directory");
    let written = fs::create_dir_all(dir).and_then(|()| fs::write(path, text));
    written.map_err(|error| format!("{}: {error}", path.display()))
}

/// Removes a file, and the directories that it leaves empty.
fn remove(path: &Path) -> Outcome {
    fs::remove_file(path).map_err(|error| format!("{}: {error}", path.display()))?;
    for dir in path.ancestors().skip(1) {
        if fs::remove_dir(dir).is_err() {
            break; // there are others in it
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_patch_names_no_place_of_this_machine() {
        let diff = "diff --git a/x/base/a.rs b/x/src/a.rs\nindex 1..2 100644\n--- a/x/base/a.rs\n+++ b/x/src/a.rs\n\
                    @@ -1,3 +1,4 @@ fn f() \n one\n \n+two\n three\n";
        let expected = "--- a/a.rs\n+++ b/a.rs\n@@ -1,3 +1,4 @@ fn f()\n one\n\n+two\n three\n";
        assert_eq!(patch("a.rs", diff).as_deref(), Ok(expected));
        assert!(patch("a.rs", "").is_err());
    }

    /// The mistakes survive a round, one that no longer fits is reported and keeps the rest from being recorded.
    #[test]
    fn what_is_edited_is_recorded() {
        let dir = std::env::temp_dir().join(format!("vellum-mistakes-{}", std::process::id()));
        let places = ["source", "mistakes", "work/base", "work/src"].map(|name| dir.join(name)).to_vec();
        let [source, mistakes, base, copy] = <[PathBuf; 4]>::try_from(places).expect("four");
        let places = Places { source, mistakes, base, copy };
        let at = |place: &Path, path: &str| fs::read_to_string(place.join(path)).expect("it is there");
        let lines =
            |words: &[&str]| words.iter().map(|word| format!("fn {word}() {{}}\n")).collect::<String>();
        fs::create_dir_all(&places.mistakes).expect("a directory");
        write(&places.source.join("lib.rs"), "mod a;\n").expect("written");
        write(&places.source.join("a.rs"), &lines(&["a", "b", "c", "d", "e"])).expect("written");

        edit(&places).expect("edited");
        assert!(edit(&places).is_err(), "what is being edited is not lost");
        write(&places.copy.join("a.rs"), &lines(&["a", "b", "c", "bug", "d", "e"])).expect("written");
        write(&places.copy.join("lib.rs"), "mod a;\nmod bugs;\n").expect("written");
        write(&places.copy.join("bugs.rs"), "fn bugs() {}\n").expect("written");
        record(&places).expect("recorded");
        assert!(!places.copy.exists());
        assert!(at(&places.mistakes, "a.rs.patch").contains("\n+fn bug() {}\n"));
        assert_eq!(at(&places.mistakes, "bugs.rs"), "fn bugs() {}\n");

        let before = read_tree(&places.mistakes).expect("read");
        edit(&places).expect("edited");
        assert_eq!(at(&places.copy, "a.rs"), lines(&["a", "b", "c", "bug", "d", "e"]));
        record(&places).expect("recorded");
        assert_eq!(read_tree(&places.mistakes).expect("read"), before);

        write(&places.source.join("a.rs"), &lines(&["a", "b", "x", "d", "e"])).expect("written");
        edit(&places).expect("edited");
        assert_eq!(at(&places.copy, "lib.rs"), "mod a;\nmod bugs;\n", "what fits is put in");
        assert!(record(&places).expect_err("not yet").contains("a.rs.rej"));
        fs::remove_file(places.copy.join("a.rs.rej")).expect("removed");
        record(&places).expect("recorded");
        assert!(!places.mistakes.join("a.rs.patch").exists(), "it was given up");
        edit(&places).expect("edited");
        write(&places.source.join("a.rs"), &lines(&["a"])).expect("written");
        assert!(record(&places).expect_err("it would undo that").contains("has changed"));
        fs::remove_dir_all(&dir).expect("removed");
    }
}
