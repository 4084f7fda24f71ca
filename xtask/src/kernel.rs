//! The Linux kernels that guests of the tests boot: Debian's own for virtual machines, unpacked beside
//! cargo's output. There are two of them: that of the release, and that of backports, which lets programs
//! serve block devices (ublk).
//!
//! They are not installed: the tests must not change which kernel the machine itself has. A test finds them
//! through `VELLUM_GUEST_KERNEL_DIR` and `VELLUM_UBLK_KERNEL_DIR`, with `boot/vmlinuz-*` and `lib/modules/`
//! in it.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Outcome;
use crate::apt::{self, Sources};
use crate::shell::{has, output, root_is_running, run, target_dir};

/// The package that always depends on the newest of them. The guest is a PC, whatever the host is.
const PACKAGE: &str = "linux-image-cloud-amd64";

/// One of the two.
#[derive(Clone, Copy)]
pub(crate) struct Kernel {
    /// Where a test looks for it.
    pub(crate) variable: &'static str,
    /// What it is for.
    pub(crate) purpose: &'static str,
    name: &'static str,
    is_of_backports: bool,
}

pub(crate) const KERNELS: [Kernel; 2] = [
    Kernel {
        variable: "VELLUM_GUEST_KERNEL_DIR",
        purpose: "boots from a served clone",
        name: "kernel",
        is_of_backports: false,
    },
    Kernel {
        variable: "VELLUM_UBLK_KERNEL_DIR",
        purpose: "has block devices that programs serve",
        name: "kernel-backports",
        is_of_backports: true,
    },
];

impl Kernel {
    /// Where it is, if it is there.
    pub(crate) fn dir(self) -> Option<PathBuf> {
        let dir = place().join(self.name);
        is_whole(&dir).then_some(dir)
    }

    /// Downloads and unpacks it, unless it is there.
    pub(crate) fn get(self) -> Outcome {
        if self.dir().is_some() {
            return Ok(());
        }
        for program in ["apt-get", "dpkg-deb"] {
            if !has(program) {
                return Err(format!("there is no {program} to get it with"));
            }
        }
        if !self.is_of_backports {
            return self.get_from(&[]);
        }
        let codename = apt::codename()?;
        let sources = Sources::with_backports(&codename)?;
        let suite = format!("APT::Default-Release={codename}-backports");
        self.get_from(&[&sources.options()[..], &["-o".to_owned(), suite]].concat())
    }

    fn get_from(self, options: &[String]) -> Outcome {
        let name = match apt::first_dependency(PACKAGE, options) {
            Ok(name) => name,
            // A fresh machine has no lists of packages yet.
            Err(_) if root_is_running() => {
                run(apt::get(&["update"]).args(options))?;
                apt::first_dependency(PACKAGE, options)?
            }
            Err(reason) => return Err(reason),
        };
        let place = place();
        let (download, unpacked) = (place.join("download"), place.join("unpacked"));
        for dir in [&download, &unpacked] {
            drop(fs::remove_dir_all(dir));
            fs::create_dir_all(dir).map_err(|error| format!("{}: {error}", dir.display()))?;
        }
        eprintln!("packages: downloading {name} for the guest that {}", self.purpose);
        run(apt::get(&["download", &name]).args(options).current_dir(&download))?;
        let archive = only_file(&download)?;
        output(Command::new("dpkg-deb").arg("-x").arg(&archive).arg(&unpacked))?;
        if !is_whole(&unpacked) {
            return Err(format!("{name} holds no boot/vmlinuz-* and lib/modules"));
        }
        // It gets its name only when it is whole.
        let there = place.join(self.name);
        drop(fs::remove_dir_all(&there));
        fs::rename(&unpacked, &there).map_err(|error| format!("{}: {error}", there.display()))?;
        drop(fs::remove_dir_all(&download));
        Ok(())
    }
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
