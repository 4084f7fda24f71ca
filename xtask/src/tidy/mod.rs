//! The habits no lint can check. Each rule is a pure function from the text of a file to complaints.
//!
//! ```text
//!   text.rs       any file          nothing left undone, nothing of one machine, only hosts that are allowed
//!   code.rs       Rust              a story at the head, a length one can read, `unsafe` only where it belongs
//!   manifest.rs   Cargo.toml, lock  the workspace's lints and licence, dependencies from the public registry
//!   circles.rs    Rust              files of a crate that use one another: only those that are known
//!   arrows.rs     Cargo.toml        crates use only those above them in ARCHITECTURE.md
//!   links.rs      Markdown, Rust    links that lead somewhere, and nothing in docs/ that is not listed there;
//!                                   pages that comments name
//!   words.rs      Rust              names of words that the glossary has, or that need no entry in it
//! ```

mod arrows;
mod circles;
mod code;
mod links;
mod manifest;
mod text;
mod words;

use std::fs;
use std::path::Path;

use crate::Outcome;
use crate::shell::root;

/// What is wrong, and where. Lines count from 1; 0 is the whole file.
#[derive(Debug, PartialEq)]
struct Complaint {
    line: usize,
    what: String,
}

fn complaint(line: usize, what: impl Into<String>) -> Complaint {
    Complaint { line, what: what.into() }
}

/// A file of the project. The path is from the root of the tree.
struct File {
    path: String,
    text: String,
}

pub(crate) fn run() -> Outcome {
    let mut files = Vec::new();
    collect(&root(), "", &mut files).map_err(|error| format!("reading the tree: {error}"))?;
    files.sort_by(|one, other| one.path.cmp(&other.path));
    let mut count = 0;
    for file in &files {
        for Complaint { line, what } in complaints(file, &files) {
            eprintln!("{}:{line}: {what}", file.path);
            count += 1;
        }
    }
    for (place, Complaint { what, .. }) in circles::check(&files).into_iter().chain(words::check(&files)) {
        eprintln!("{place}: {what}");
        count += 1;
    }
    if count == 0 { Ok(()) } else { Err(format!("{count} complaints about {} files", files.len())) }
}

fn complaints(file: &File, all: &[File]) -> Vec<Complaint> {
    let mut complaints = text::check(&file.path, &file.text);
    match file.path.rsplit(['.', '/']).next() {
        Some("rs") => {
            complaints.extend(code::check(&file.path, &file.text));
            complaints.extend(links::check_comments(&file.text, |path| root().join(path).exists()));
        }
        Some("toml" | "lock") => {
            complaints.extend(manifest::check(&file.path, &file.text));
            if let Some(map) = all.iter().find(|file| file.path == arrows::MAP) {
                complaints.extend(arrows::check(&file.path, &file.text, &map.text));
            }
        }
        Some("md") => {
            complaints.extend(arrows::check_map(&file.path, &file.text, |path| root().join(path).exists()));
            complaints.extend(links::check(&file.path, &file.text, |path| root().join(path).exists()));
            let paths: Vec<&str> = all.iter().map(|file| file.path.as_str()).collect();
            complaints.extend(links::check_index(&file.path, &file.text, &paths));
        }
        _ => {}
    }
    complaints
}

/// Every text file in the tree that is not made by a build. Inputs of the fuzz targets are not text.
fn collect(dir: &Path, prefix: &str, files: &mut Vec<File>) -> std::io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let path = format!("{prefix}{name}");
        let kind = entry.file_type()?;
        if kind.is_dir() {
            if !["target", ".git"].contains(&name.as_str())
                && !["fuzz/seeds", "fuzz/corpus", "fuzz/artifacts"].contains(&path.as_str())
            {
                collect(&entry.path(), &format!("{path}/"), files)?;
            }
        } else if kind.is_file()
            && name != ".git" // of a second working tree
            && let Ok(text) = String::from_utf8(fs::read(entry.path())?)
        {
            files.push(File { path, text });
        }
    }
    Ok(())
}
