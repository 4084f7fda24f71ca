//! Records the commit that the program is built from, for `vellum --version`.
//!
//! 1. `VELLUM_COMMIT` wins: a package that is built from a tarball sets it. Without it git is asked, where the tree is a
//!    clone of the repository. Where neither answers there is no commit, and the build succeeds.
//! 2. A development build records none, unless `VELLUM_COMMIT` says one: otherwise each commit would compile the program
//!    and its tests again.
//! 3. An optimised build watches what git changes when HEAD moves. So a commit compiles this crate again, and nothing else.

#![allow(clippy::print_stdout, reason = "this is how a build script answers")]

use std::path::{Path, PathBuf};
use std::process::Command;

const VARIABLE: &str = "VELLUM_COMMIT";

/// What changes when HEAD moves to another commit, by commits, checkouts and resets.
const WATCHED: [&str; 3] = ["HEAD", "logs/HEAD", "packed-refs"];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed={VARIABLE}");
    let said = std::env::var(VARIABLE).ok().filter(|commit| !commit.is_empty());
    let is_optimised = std::env::var("PROFILE").is_ok_and(|profile| profile == "release");
    let commit = said.or_else(|| if is_optimised { commit_of_the_tree() } else { None });
    if let Some(commit) = commit {
        println!("cargo::rustc-env={VARIABLE}={commit}");
    }
}

/// The commit and its day. A tree without `.git` may lie inside another repository, whose commits say nothing about it.
fn commit_of_the_tree() -> Option<String> {
    let root = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR")?).join("../..");
    if !root.join(".git").exists() {
        return None;
    }
    let commit = git(&root, &["log", "-1", "--format=%h (%cs)", "--abbrev=12"])?;
    let branch = git(&root, &["rev-parse", "--symbolic-full-name", "HEAD"]).unwrap_or_default();
    for name in WATCHED.into_iter().chain([branch.as_str()]).filter(|name| !name.is_empty()) {
        let path = git(&root, &["rev-parse", "--git-path", name]).map(|path| root.join(path));
        // One that does not exist would have this run at every build.
        if let Some(path) = path.filter(|path: &PathBuf| path.exists()) {
            println!("cargo::rerun-if-changed={}", path.display());
        }
    }
    Some(commit)
}

/// What git answers, if it does.
fn git(root: &Path, arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").arg("-C").arg(root).args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?.trim().to_owned();
    (output.status.success() && !text.is_empty()).then_some(text)
}
