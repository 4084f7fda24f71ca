//! A VHDX whose log is to be replayed: as QEMU reads it once it has replayed it in the file.

#![allow(missing_docs, reason = "a test")]

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use futures_lite::future::block_on;
use vellum_core::{Buffer, GuestOffset, HostTally, Inline, MemoryStorage, SharedStorage};
use vellum_foreign::samples::{samples, seal_vhdx};
use vellum_foreign::{ForeignFiles, ForeignKind, look};

const MIB: usize = 1 << 20;

#[expect(clippy::print_stderr, reason = "a test that is skipped says why")]
fn has(program: &str) -> bool {
    let has = Command::new(program).arg("--version").output().is_ok();
    if !has {
        eprintln!("skipped: {program} is not installed");
    }
    has
}

fn run(program: &str, arguments: &[&str]) -> bool {
    Command::new(program).args(arguments).output().expect("it runs").status.success()
}

/// What the disk of an image reads as, or why it does not.
fn content(bytes: &[u8]) -> Result<Vec<u8>, String> {
    let image: SharedStorage = MemoryStorage::holding("image.vhdx", bytes);
    let read = async {
        let description = look(ForeignKind::Vhdx, &*image).await?;
        assert!(description.was_left_open());
        let files = ForeignFiles {
            image: image.clone(),
            parts: Vec::new(),
            below: None,
            offload: Arc::new(Inline),
            tally: HostTally::default(),
        };
        let disk = description.open(files).await?;
        let len = usize::try_from(disk.geometry().size).expect("small");
        disk.read(GuestOffset::ZERO, Buffer::for_overwrite(len)).await
    };
    block_on(read).map(|buffer| buffer.to_vec()).map_err(|error| error.chain())
}

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

/// QEMU writes each entry of the log under a GUID of its own, and applies it at once. Here the header names one entry
/// again, and the table is as it was before the first of them: as after a crash in between.
#[test]
fn a_log_is_replayed_as_qemu_replays_it() {
    if !has("qemu-img") || !has("qemu-io") {
        return;
    }
    let dir = std::env::temp_dir().join(format!("vellum-vhdx-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a directory");
    let (image, raw) = (dir.join("a.vhdx"), dir.join("a.raw"));
    let create = ["create", "-q", "-f", "vhdx", "-o", "block_size=1M", text(&image), "20M"];
    assert!(run("qemu-img", &create));
    let before = std::fs::read(&image).expect("the image");
    let writes = ["write -P 3 0 2M", "write -P 4 5M 64k", "write -P 5 12M 1M", "abort"];
    let mut arguments = vec!["-f", "vhdx", text(&image)];
    arguments.extend(writes.iter().flat_map(|write| ["-c", *write]));
    run("qemu-io", &arguments);
    let after = std::fs::read(&image).expect("the image");
    let number = |at: usize| u64::from_le_bytes(after[at..at + 8].try_into().expect("eight"));
    let entries: Vec<usize> =
        (MIB..2 * MIB).step_by(4096).filter(|at| after[*at..].starts_with(b"loge")).collect();
    assert!(entries.len() >= 3, "{entries:?}");
    let newer = if number(0x1_0008) > number(0x2_0008) { 0x1_0000 } else { 0x2_0000 };
    let mut read = Vec::new();
    for entry in &entries {
        let mut crashed = after.clone();
        crashed[2 * MIB..3 * MIB].copy_from_slice(&before[2 * MIB..3 * MIB]);
        crashed[newer + 48..newer + 64].copy_from_slice(&after[entry + 32..entry + 48]);
        seal_vhdx(&mut crashed);
        let disk = content(&crashed).expect("it is replayed");
        std::fs::write(&image, &crashed).expect("the image");
        std::fs::write(&raw, &disk).expect("a disk");
        assert!(run("qemu-img", &["check", "-q", "-r", "all", text(&image)]), "QEMU replays {entry:#x}");
        let compare = ["compare", "-q", "-f", "vhdx", "-F", "raw", text(&image), text(&raw)];
        assert!(run("qemu-img", &compare), "the entry at {entry:#x}");
        read.push(disk);
    }
    assert_eq!(read.last().expect("some")[12 * MIB], 5, "the last write was only in the log");
    read.dedup();
    assert!(read.len() >= 3, "each entry adds to the table");
    std::fs::remove_dir_all(&dir).expect("its own files");
}

fn sample() -> Vec<u8> {
    samples().into_iter().find(|sample| sample.name == "vhdx, not closed").expect("it is one of them").image
}

/// Each of these makes the one entry of the log invalid, and no other is there: the content is unknown then.
#[test]
fn a_log_without_a_valid_entry_is_an_error() {
    let good = sample();
    content(&good).expect("it is replayed");
    for (what, at, bytes, sealed) in [
        ("a checksum", MIB + 70, &[1][..], false),
        ("another GUID", MIB + 32, &[8], true),
        ("the number of a sector", MIB + 8188, &[6], true),
        ("the number of a descriptor", MIB + 64 + 24, &[6], true),
        ("an unaligned place", MIB + 96 + 16, &[1], true),
        ("an unaligned tail", MIB + 12, &[1], true),
        ("a tail elsewhere", MIB + 12, &[0, 16, 0, 0], true),
        ("a tail past the end", MIB + 12, &[0, 0, 32, 0], true),
        ("descriptors past its end", MIB + 24, &[0xFF, 0xFF, 0xFF, 0xFF], true),
        ("a length of none", MIB + 8, &[0, 0, 0, 0], true),
        ("a length past the ring", MIB + 8, &[0, 16, 16, 0], true),
        ("the number zero", MIB + 16, &[0], true),
        ("a descriptor of no kind", MIB + 64, b"what", true),
        ("a data sector of no kind", MIB + 4096, b"what", true),
    ] {
        let mut bad = good.clone();
        bad[at..at + bytes.len()].copy_from_slice(bytes);
        if sealed {
            seal_vhdx(&mut bad);
        }
        let why = content(&bad).expect_err(what);
        assert!(why.contains("log"), "{what}: {why}");
    }
    for (what, at, bytes) in [
        ("a file that was longer", MIB + 48, &[0, 0, 0, 1, 0, 0, 0, 0][..]),
        ("zeros past 2^64", MIB + 64 + 8, &[0, 0xF0, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF]),
        ("a log elsewhere", 0x2_0000 + 72, &[0, 0, 0, 0, 0, 0, 0, 1]),
        ("a log without bytes", 0x2_0000 + 68, &[0, 0, 0, 0]),
        ("a huge log", 0x2_0000 + 68, &[0, 0, 0, 0x80]),
    ] {
        let mut bad = good.clone();
        bad[at..at + bytes.len()].copy_from_slice(bytes);
        seal_vhdx(&mut bad);
        content(&bad).expect_err(what);
    }
}

/// Every sector of the log claims to begin an entry as long as the log: they are not all summed up.
#[test]
fn a_log_of_many_claims_ends_soon() {
    let mut bad = sample();
    let header = bad[MIB..MIB + 64].to_vec();
    for at in (MIB..2 * MIB).step_by(4096) {
        bad[at..at + 64].copy_from_slice(&header);
        bad[at + 8..at + 12].copy_from_slice(&u32::try_from(MIB).expect("small").to_le_bytes());
    }
    let why = content(&bad).expect_err("it is refused");
    assert!(why.contains("far more entries"), "{why}");
}
