//! Makes the copy of a crate that has the mistakes: of `vellum-format` for `vellum-seeded`, of `vellum-flash` for
//! `vellum-flash-seeded`.
//!
//! ```text
//!   crates/vellum-format/src ──► OUT_DIR/src ◄── mistakes/PATH.rs.patch    applied to PATH.rs
//!                                            ◄── mistakes/PATH.rs          added
//!        lib.rs ─────────────► root.rs: without what only the root of a crate may have
//! ```
//!
//! A patch that does not apply fails the build, and the message says what to do.

#![allow(clippy::print_stdout, reason = "this is how a build script speaks to cargo")]

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::{env, fs};

use diffy::Patch;

/// The crate that is copied, this crate, and how `cargo xtask mistakes` is told so.
const COPIES: [(&str, &str, &str); 2] =
    [("vellum-format", "vellum-seeded", ""), ("vellum-flash", "vellum-flash-seeded", " flash")];

fn main() -> ExitCode {
    match make() {
        Ok(()) => ExitCode::SUCCESS,
        Err(what) => {
            println!("cargo::error={what}");
            ExitCode::FAILURE
        }
    }
}

fn make() -> Result<(), String> {
    let own = PathBuf::from(variable("CARGO_MANIFEST_DIR")?);
    let name = variable("CARGO_PKG_NAME")?;
    let of = COPIES.iter().find(|(_, copy, _)| *copy == name).ok_or("it is no copy of a crate")?;
    let (source, mistakes) = (own.join("..").join(of.0).join("src"), own.join("mistakes"));
    for dir in [&source, &mistakes] {
        println!("cargo::rerun-if-changed={}", dir.display());
    }
    println!("cargo::rerun-if-changed=build.rs");
    let copy = PathBuf::from(variable("OUT_DIR")?).join("src");
    if copy.exists() {
        fs::remove_dir_all(&copy).map_err(|error| format!("{}: {error}", copy.display()))?;
    }
    for path in files(&source)? {
        write(&copy.join(&path), &read(&source.join(&path))?)?;
    }
    for path in files(&mistakes)? {
        let text = read(&mistakes.join(&path))?;
        match path.strip_suffix(".patch") {
            Some(patched) => apply(&copy, patched, &text, of)?,
            None => write(&copy.join(&path), &text)?,
        }
    }
    write(&copy.join("root.rs"), &without_inner(&read(&copy.join("lib.rs"))?))
}

fn apply(copy: &Path, path: &str, patch: &str, of: &(&str, &str, &str)) -> Result<(), String> {
    let (source, own, word) = of;
    let said = |what: &dyn std::fmt::Display| {
        format!(
            "crates/{own}/mistakes/{path}.patch does not apply to crates/{source}/src/{path} ({what}): run `cargo xtask \
             mistakes edit{word}`, put what it reports into target/mistakes/src by hand, and run `cargo xtask mistakes \
             record{word}`"
        )
    };
    let at = copy.join(path);
    if !at.exists() {
        return Err(said(&"there is no such file"));
    }
    let patch = Patch::from_str(patch).map_err(|error| said(&error))?;
    let patched = diffy::apply(&read(&at)?, &patch).map_err(|error| said(&error))?;
    write(&at, &patched)
}

/// The root of the crate as something that is included: its own documents and attributes stay outside.
fn without_inner(root: &str) -> String {
    let lines = root.lines().filter(|line| !line.starts_with("//!") && !line.starts_with("#!["));
    lines.flat_map(|line| [line, "\n"]).collect()
}

/// The files in a directory and in those below it, by their paths inside it, sorted.
fn files(dir: &Path) -> Result<Vec<String>, String> {
    let mut found = Vec::new();
    let mut open = vec![String::new()];
    while let Some(prefix) = open.pop() {
        let at = dir.join(&prefix);
        let entries = fs::read_dir(&at).map_err(|error| format!("{}: {error}", at.display()))?;
        for entry in entries {
            let entry = entry.map_err(|error| format!("{}: {error}", at.display()))?;
            let path = format!("{prefix}{}", entry.file_name().to_string_lossy());
            if entry.path().is_dir() { open.push(format!("{path}/")) } else { found.push(path) }
        }
    }
    found.sort();
    Ok(found)
}

fn variable(name: &str) -> Result<String, String> {
    env::var(name).map_err(|error| format!("{name}: {error}"))
}

fn read(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))
}

fn write(path: &Path, text: &str) -> Result<(), String> {
    let dir = path.parent().ok_or("a file lies in a directory")?;
    fs::create_dir_all(dir)
        .and_then(|()| fs::write(path, text))
        .map_err(|error| format!("{}: {error}", path.display()))
}
