//! The files of a package, where they are installed.
//!
//! Manual pages and completions are written by the program that is packaged, so they say what it does.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{make_executable, read, set_mode, write};
use crate::Outcome;
use crate::shell::{output, root};

/// Files of the tree that are installed as they are.
const COPIES: [(&str, &str); 5] = [
    ("contrib/systemd/vellum@.service", "usr/lib/systemd/system/vellum@.service"),
    ("packaging/vellum.toml", "etc/vellum/vellum.toml"),
    ("packaging/deb/sysusers.conf", "usr/lib/sysusers.d/vellum.conf"),
    ("packaging/deb/copyright", "usr/share/doc/vellum/copyright"),
    ("packaging/disk.conf", "usr/share/doc/vellum/examples/disk.conf"),
];

/// Where shells look for completions that packages bring.
const COMPLETIONS: [(&str, &str); 3] = [
    ("bash", "usr/share/bash-completion/completions/vellum"),
    ("zsh", "usr/share/zsh/vendor-completions/_vellum"),
    ("fish", "usr/share/fish/vendor_completions.d/vellum.fish"),
];

/// Lays out everything below `dir`, which is empty.
pub(super) fn lay_out(program: &Path, sbom: &Path, dir: &Path) -> Outcome {
    let installed = dir.join("usr/bin/vellum");
    write(&installed, read(program)?)?;
    make_executable(&installed)?;
    for (from, to) in COPIES {
        write(&dir.join(to), read(&root().join(from))?)?;
    }
    let doc = dir.join("usr/share/doc/vellum");
    write(&doc.join("vellum.cdx.json"), read(sbom)?)?;
    write(&doc.join("changelog"), read(&root().join("CHANGELOG.md"))?)?;
    for (shell, to) in COMPLETIONS {
        write(&dir.join(to), output(&mut ask(&installed, &["completions", shell]))? + "\n")?;
    }
    let man = dir.join("usr/share/man/man1");
    let mut pages = ask(&installed, &["man"]);
    output(pages.arg(&man))?;
    let mut packed = vec![doc.join("changelog")];
    packed.extend(entries(&man)?);
    // No names and no times.
    output(Command::new("gzip").args(["-9", "-n", "--"]).args(&packed))?;
    set_modes(dir)
}

/// The program, without the configuration of this machine.
fn ask(program: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(["--config", "/dev/null"]).args(arguments);
    command
}

fn entries(dir: &Path) -> Result<Vec<PathBuf>, String> {
    let fail = |error: std::io::Error| format!("can't read {}: {error}", dir.display());
    let entries = fs::read_dir(dir).map_err(fail)?.map(|entry| Ok(entry.map_err(fail)?.path()));
    let mut entries: Vec<PathBuf> = entries.collect::<Result<_, String>>()?;
    entries.sort();
    Ok(entries)
}

/// All that is below, with what it weighs.
pub(super) fn files_below(dir: &Path) -> Result<Vec<(PathBuf, u64)>, String> {
    let mut files = Vec::new();
    for path in entries(dir)? {
        let facts = path.symlink_metadata().map_err(|error| format!("{}: {error}", path.display()))?;
        if facts.is_dir() {
            files.extend(files_below(&path)?);
        } else {
            files.push((path, facts.len()));
        }
    }
    Ok(files)
}

/// What was written under a strict umask is for everybody all the same.
fn set_modes(dir: &Path) -> Outcome {
    set_mode(dir, 0o755)?;
    for path in entries(dir)? {
        if path.is_dir() {
            set_modes(&path)?;
        } else if path.extension().is_some_and(|name| name == "gz") {
            set_mode(&path, 0o644)?;
        }
    }
    Ok(())
}
