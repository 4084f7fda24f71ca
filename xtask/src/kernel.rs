//! The Linux that the guest test boots: Debian's own for virtual machines, unpacked beside what cargo builds.
//!
//! It is not installed: it is nobody's business which kernel the machine itself has. A test finds it through
//! `VELLUM_GUEST_KERNEL_DIR`, with `boot/vmlinuz-*` and `lib/modules/` in it.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Outcome;
use crate::apt;
use crate::shell::{has, output, root_is_running, run, target_dir};

/// The package that always depends on the newest of them. The guest is a PC, whatever the host is.
const PACKAGE: &str = "linux-image-cloud-amd64";

/// Where it is, if it is there.
pub(crate) fn dir() -> Option<PathBuf> {
    let dir = place().join("kernel");
    is_whole(&dir).then_some(dir)
}

/// Downloads and unpacks it, unless it is there.
pub(crate) fn get() -> Outcome {
    if dir().is_some() {
        return Ok(());
    }
    for program in ["apt-get", "dpkg-deb"] {
        if !has(program) {
            return Err(format!("there is no {program} to get it with"));
        }
    }
    let name = match apt::first_dependency(PACKAGE) {
        Ok(name) => name,
        // A fresh machine has no lists of packages yet.
        Err(_) if root_is_running() => {
            run(&mut apt::get(&["update"]))?;
            apt::first_dependency(PACKAGE)?
        }
        Err(reason) => return Err(reason),
    };
    let place = place();
    let (download, unpacked) = (place.join("download"), place.join("unpacked"));
    for dir in [&download, &unpacked] {
        drop(fs::remove_dir_all(dir));
        fs::create_dir_all(dir).map_err(|error| format!("{}: {error}", dir.display()))?;
    }
    eprintln!("packages: downloading {name} for the guest");
    run(apt::get(&["download", &name]).current_dir(&download))?;
    let archive = only_file(&download)?;
    output(Command::new("dpkg-deb").arg("-x").arg(&archive).arg(&unpacked))?;
    if !is_whole(&unpacked) {
        return Err(format!("{name} holds no boot/vmlinuz-* and lib/modules"));
    }
    // It gets its name only when it is whole.
    let there = place.join("kernel");
    drop(fs::remove_dir_all(&there));
    fs::rename(&unpacked, &there).map_err(|error| format!("{}: {error}", there.display()))?;
    drop(fs::remove_dir_all(&download));
    Ok(())
}

fn place() -> PathBuf {
    target_dir().join("guest")
}

fn is_whole(dir: &Path) -> bool {
    let is_kernel = |name: &OsStr| name.to_string_lossy().starts_with("vmlinuz-");
    let mut files = fs::read_dir(dir.join("boot")).into_iter().flatten().flatten();
    files.any(|file| is_kernel(&file.file_name())) && dir.join("lib/modules").is_dir()
}

fn only_file(dir: &Path) -> Result<PathBuf, String> {
    let mut files = fs::read_dir(dir).into_iter().flatten().flatten();
    files.next().map(|file| file.path()).ok_or_else(|| format!("nothing was downloaded to {}", dir.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_without_its_modules_is_not_taken() {
        let dir = std::env::temp_dir().join(format!("xtask-kernel-{}", std::process::id()));
        drop(fs::remove_dir_all(&dir));
        assert!(!is_whole(&dir), "nothing there");
        fs::create_dir_all(dir.join("boot")).expect("a directory");
        fs::write(dir.join("boot/vmlinuz-1"), "").expect("a file");
        assert!(!is_whole(&dir), "no modules");
        fs::create_dir_all(dir.join("lib/modules")).expect("a directory");
        assert!(is_whole(&dir));
        fs::remove_dir_all(&dir).expect("it was made here");
    }
}
