//! `serve --ublk`, in a guest whose kernel has the driver, and which serves disks to itself with it.
//!
//! ```text
//!   host:   noise, journaled.qcow2, native.vlm ──► ext4 ──► the guest's disk ──► taken out again, checked and compared
//!   guest:  vellum serve ──► /dev/ublkb0 ──► read and written past the cache ──► ext4 on it ──► SIGTERM, SIGKILL, again
//! ```
//!
//! `ublk.sh` is what the guest does. The kernel comes from `VELLUM_UBLK_KERNEL_DIR`, or from where `cargo
//! xtask packages` puts it.

use std::path::{Path, PathBuf};

use super::debian::Debian;
use super::first_files::first_files;
use super::machine::Machine;
use super::pages_range;
use super::support::dir::Dir;
use super::support::noise;
use super::support::program::{path_text, skipped, vellum};
use super::tools::{Files, sha256, tool};
use crate::requires;

const NOISE_BYTES: usize = 4 << 20;
const DISK_BYTES: u64 = 64 << 20;

#[test]
fn a_guest_serves_block_devices_to_itself() {
    requires!("qemu-system-x86_64", "setpriv", "qemu-img", "mke2fs", "e2fsck", "debugfs", "sha256sum", "ldd");
    if !cfg!(feature = "ublk") {
        return skipped("built without block devices");
    }
    if !cfg!(target_arch = "x86_64") {
        return skipped("the guest is a PC, and what is built here does not run on one");
    }
    let debian = match Debian::find_with_ublk() {
        Ok(debian) => debian,
        Err(reason) => return skipped(&reason),
    };
    let dir = Dir::new("ublk");
    let noise = noise(NOISE_BYTES, 4);
    let disk = make_disk(&dir, &noise);
    let init = include_bytes!("ublk.sh");
    let first_files = first_files(&debian, &dir, init, &["virtio_pci", "virtio_blk", "ext4", "ublk_drv"]);

    let drive = format!("file={},format=raw,if=virtio,cache=unsafe", path_text(&disk));
    let arguments = ["-no-reboot", "-m", "1024", "-smp", "2", "-drive", &drive].map(str::to_owned);
    let machine = Machine::start(
        &debian.kernel(),
        &first_files,
        "console=ttyS0 panic=-1 quiet no_timer_check",
        &arguments,
    );
    let said = machine.wait_for_the_end();

    assert!(said.contains(&format!("booted {}", debian.release)), "{said:#?}");
    assert!(said.contains(&"traces 0".to_owned()), "{said:#?}");
    let out = dir.join("out");
    std::fs::create_dir(&out).expect("a directory");
    tool("debugfs", &["-R", &format!("rdump / {}", path_text(&out)), path_text(&disk)]);
    let mut written = noise.clone();
    written[333_000..1_334_000].copy_from_slice(&noise[7000..1_008_000]);
    for (image, device) in [("journaled.qcow2", "/dev/ublkb0"), ("native.vlm", "/dev/ublkb3")] {
        let sectors = DISK_BYTES / 512;
        let device = format!("device {image} {device} {sectors} 2 1 write back");
        assert!(said.contains(&device), "{device}: {said:#?}");
        // Twice in good order, with nothing left of the device afterwards.
        let ended = said.iter().filter(|line| **line == format!("ended {image} 0 0")).count();
        assert!(ended >= 2, "{said:#?}");
        assert_counts(&said, image);
        assert_content(&dir, &out.join(image), &said, &noise, &written);
    }
    // One device, through four deaths of its servers; and what was answered over it without a flush.
    assert!(said.contains(&"kept journaled.qcow2 write through".to_owned()), "{said:#?}");
    assert!(said.contains(&"not-kept journaled.qcow2 write back".to_owned()), "{said:#?}");
    assert!(said.iter().any(|line| line.starts_with("sum journaled.qcow2 /mnt/data/direct ")), "{said:#?}");
    // Left by a server that was ended, and with a disk that grew meanwhile.
    assert!(said.contains(&"left journaled.qcow2 0 1".to_owned()), "{said:#?}");
    assert!(said.contains(&"smaller journaled.qcow2".to_owned()), "{said:#?}");
    for file in ["cached", "patient"] {
        let sum = format!("sum journaled.qcow2 /mnt/data/{file} ");
        assert!(said.iter().any(|line| line.starts_with(&sum)), "{file}: {said:#?}");
    }
    assert!(said.contains(&"busy 1".to_owned()), "{said:#?}");
    assert!(said.contains(&"both 2".to_owned()), "{said:#?}");
    assert!(said.contains(&"auto /dev/ublkb0".to_owned()), "{said:#?}");
    assert!(said.contains(&"read-only 1 1".to_owned()), "{said:#?}");
    assert!(said.contains(&"resized".to_owned()), "{said:#?}");
    let refused =
        |words: &str| said.iter().any(|line| line.starts_with("refused 1 ") && line.contains(words));
    assert!(refused("is still in use") && refused("two --ublk options name"), "{said:#?}");
    assert!(refused("kept for another image"), "{said:#?}");
    assert!(refused("serves a disk under this number") && refused("without io_uring"), "{said:#?}");
}

/// The guest's requests arrived as what they are, and none failed.
#[track_caller]
fn assert_counts(said: &[String], image: &str) {
    let begin = format!("stats {image} ");
    let line = said.iter().find_map(|line| line.strip_prefix(&begin)).expect("it says what was counted");
    let stats: serde_json::Value = serde_json::from_str(line).expect("JSON");
    let disk = &stats["disks"][0];
    let number = |pointer: &str| disk.pointer(pointer).and_then(serde_json::Value::as_u64).expect("a number");
    assert!(number("/guest/flushes") >= 3, "{disk:#}");
    assert!(number("/guest/bytes-discarded") >= 8 << 20, "{disk:#}");
    assert!(number("/guest/bytes-zeroed") > 0, "{disk:#}");
    assert!(number("/guest/bytes-written") > 2 * NOISE_BYTES as u64, "{disk:#}");
    assert_eq!(number("/guest-errors"), 0, "{disk:#}");
}

/// What the host finds in the image is what the guest wrote, and what the guest read.
#[track_caller]
fn assert_content(dir: &Dir, image: &Path, said: &[String], noise: &[u8], written: &[u8]) {
    vellum(&["check", path_text(image)]).answer();
    let name = image.file_name().and_then(|name| name.to_str()).expect("a name");
    let copy = dir.text("copy.qcow2");
    drop(std::fs::remove_file(&copy));
    vellum(&["convert", "-q", "-O", "qcow2", path_text(image), &copy]).answer();
    let files = Files::of_clean(Path::new(&copy));
    files.assert_is("/data/noise", written);
    let numbers: String = (1..=100_000).map(|number| format!("{number}\n")).collect();
    files.assert_is("/data/numbers", numbers.as_bytes());
    assert!(!files.has("/data/deleted"), "the guest deleted it");
    let begin = format!("settled {name} ");
    let settled = said.iter().find_map(|line| line.strip_prefix(&begin)?.parse().ok());
    let settled: usize = settled.expect("it says how many were synced");
    assert!(settled >= 12, "{settled}");
    let begin = format!("kept-settled {name} ");
    let kept = said.iter().find_map(|line| line.strip_prefix(&begin)?.parse().ok());
    let settled = kept.unwrap_or(settled);
    if kept.is_some() {
        for file in ["direct", "cached", "patient"] {
            files.assert_is(&format!("/data/{file}"), noise);
        }
    }
    for number in 1..=settled {
        files.assert_is(&format!("/data/pages.{number}"), &noise[pages_range(number)]);
    }
    let begin = format!("sum {name} /mnt");
    let sums: Vec<_> = said.iter().filter_map(|line| line.strip_prefix(&begin)?.split_once(' ')).collect();
    assert!(sums.len() >= settled + 2, "{said:#?}");
    for (file, sum) in sums {
        assert_eq!(sha256(&files.path(file)), sum, "{name}: {file}");
    }
}

/// The guest's disk: an ext4 with the images, and noise.
fn make_disk(dir: &Dir, noise: &[u8]) -> PathBuf {
    let (root, disk) = (dir.join("host"), dir.join("disk.ext4"));
    std::fs::create_dir(&root).expect("a directory");
    std::fs::write(root.join("noise"), noise).expect("a file");
    let kinds = [("journaled.qcow2", "qcow2", "journal=on"), ("native.vlm", "vellum", "layout=table")];
    for (name, format, options) in kinds {
        let (image, size) = (dir.text(&format!("host/{name}")), DISK_BYTES.to_string());
        vellum(&["create", "-q", "-f", format, "-o", options, &image, &size]).answer();
    }
    tool("mke2fs", &["-q", "-t", "ext4", "-d", path_text(&root), path_text(&disk), "320M"]);
    disk
}
