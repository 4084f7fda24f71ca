//! `serve --nbd-device`, in a guest whose kernel has the nbd driver; and the same under the name `qemu-nbd`, with `-c` and `-d`.
//!
//! ```text
//!   host:   noise, disk.qcow2, other.qcow2 ──► ext4 ──► the guest's disk ──► taken out again, checked and compared
//!   guest:  vellum serve ──► /dev/nbd0 ──► ext4 on it ──► SIGTERM, SIGKILL, again; qemu-nbd -c, -d
//! ```
//!
//! `nbd_device.sh` is what the guest does.

use std::path::{Path, PathBuf};

use super::debian::Debian;
use super::first_files::first_files;
use super::machine::Machine;
use super::pages_range;
use super::support::dir::Dir;
use super::support::noise;
use super::support::program::{path_text, skipped, vellum};
use super::tools::{Files, assert_image_is_clean, sha256, tool};
use crate::requires;

const NOISE_BYTES: usize = 4 << 20;
const DISK_BYTES: u64 = 64 << 20;

#[test]
fn a_guest_connects_devices_of_the_nbd_driver() {
    requires!("qemu-system-x86_64", "setpriv", "qemu-img", "mke2fs", "e2fsck", "debugfs", "sha256sum", "ldd");
    if !cfg!(target_arch = "x86_64") {
        return skipped("the guest is a PC, and what is built here does not run on one");
    }
    let debian = match Debian::find() {
        Ok(debian) => debian,
        Err(reason) => return skipped(&reason),
    };
    let dir = Dir::new("nbd-device");
    let noise = noise(NOISE_BYTES, 5);
    let disk = make_disk(&dir, &noise);
    let modules = ["virtio_pci", "virtio_blk", "ext4", "nbd"];
    let first_files = first_files(&debian, &dir, include_bytes!("nbd_device.sh"), &modules);

    let drive = format!("file={},format=raw,if=virtio,cache=unsafe", path_text(&disk));
    let arguments = ["-no-reboot", "-m", "1024", "-smp", "2", "-drive", &drive].map(str::to_owned);
    let machine = Machine::start(
        &debian.kernel(),
        &first_files,
        "console=ttyS0 panic=-1 quiet no_timer_check",
        &arguments,
    );
    let said = machine.wait_for_the_end();

    let has = |line: &str| assert!(said.iter().any(|one| one == line), "{line}: {said:#?}");
    has(&format!("booted {}", debian.release));
    has("traces 0");
    // Its size, that it has a write cache and discards, and how it is listed.
    has(&format!("device /dev/nbd0 {} write back 1", DISK_BYTES / 512));
    has("listed /dev/nbd0");
    // In good order, and nothing is left of it.
    has("ended 0 free");
    has("paused 0 free");
    has("taken away 0 free 1");
    has("killed free");
    has("read-only 1");
    has("connected /dev/nbd3 0");
    has("disconnected /dev/nbd3 disconnected");
    has("gone with its device");
    let refused =
        |words: &str| said.iter().any(|line| line.starts_with("refused 1 ") && line.contains(words));
    for words in [
        "is connected already by process",
        "modprobe nbd",
        "no block device of the kernel's nbd driver",
        "is not connected",
    ] {
        assert!(refused(words), "{words}: {said:#?}");
    }

    let out = dir.join("out");
    std::fs::create_dir(&out).expect("a directory");
    tool("debugfs", &["-R", &format!("rdump / {}", path_text(&out)), path_text(&disk)]);
    let files = assert_content(&out.join("disk.qcow2"), &said, "disk");
    files.assert_is("/data/noise", &noise);
    let settled = said.iter().find_map(|line| line.strip_prefix("settled ")?.parse().ok());
    let settled: usize = settled.expect("it says how many were synced");
    assert!(settled >= 12, "{settled}");
    for number in 1..=settled {
        files.assert_is(&format!("/data/pages.{number}"), &noise[pages_range(number)]);
    }
    let other = assert_content(&out.join("other.qcow2"), &said, "other");
    other.assert_is("/data/noise", &noise);
}

/// What the host finds in the image is what the guest read.
#[track_caller]
fn assert_content(image: &Path, said: &[String], name: &str) -> Files {
    assert_image_is_clean(image);
    let files = Files::of_clean(image);
    let begin = format!("sum {name} /mnt");
    let sums: Vec<_> = said.iter().filter_map(|line| line.strip_prefix(&begin)?.split_once(' ')).collect();
    assert!(!sums.is_empty(), "{said:#?}");
    for (file, sum) in sums {
        assert_eq!(sha256(&files.path(file)), sum, "{name}: {file}");
    }
    files
}

/// The guest's disk: an ext4 with the images, and noise.
fn make_disk(dir: &Dir, noise: &[u8]) -> PathBuf {
    let (root, disk) = (dir.join("host"), dir.join("disk.ext4"));
    std::fs::create_dir(&root).expect("a directory");
    std::fs::write(root.join("noise"), noise).expect("a file");
    for name in ["disk.qcow2", "other.qcow2"] {
        let (image, size) = (dir.text(&format!("host/{name}")), DISK_BYTES.to_string());
        vellum(&["create", "-q", "-f", "qcow2", "-o", "journal=on", &image, &size]).answer();
    }
    tool("mke2fs", &["-q", "-t", "ext4", "-d", path_text(&root), path_text(&disk), "320M"]);
    disk
}
