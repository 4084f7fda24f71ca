//! Errors for programs: sizes that do not fit, operations that are not supported, lack of space.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;

use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;

use super::shown::{Shown, is_here};
use super::support::client::Client;
use super::support::dir::Dir;
use super::support::loops::Mount;
use super::support::program::vellum;
use super::{KINDS, MIB};

fn both(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).expect("the file")
}

#[track_caller]
fn fails<T>(result: std::io::Result<T>, errno: Errno) {
    let error = result.err().expect("it is refused");
    assert_eq!(error.raw_os_error(), Some(errno.raw_os_error()), "{error}");
}

#[test]
fn the_size_is_the_disks() {
    if !is_here() {
        return;
    }
    let dir = Dir::new("fuse-size");
    let image = KINDS[0].make(&dir, MIB);
    let shown = Shown::start(&dir.join("disk"), &[&image]);
    let file = both(&shown.file);
    let len = MIB as u64;
    fails(file.set_len(len - 512), Errno::PERM);
    fails(file.set_len(len + 512), Errno::PERM);
    file.set_len(len).expect("it has this size");
    fails(File::create(&shown.file), Errno::PERM);

    // As a device: what fits is written.
    assert_eq!(file.write_at(&[3; 1000], len - 600).expect("a part"), 600);
    fails(file.write_at(&[3; 10], len), Errno::NOSPC);
    fails(file.write_at(&[3; 10], len + 99), Errno::NOSPC);
    fails(OpenOptions::new().append(true).open(&shown.file).expect("the file").write(b"x"), Errno::NOSPC);
    let mut bytes = [7; 1000];
    assert_eq!(file.read_at(&mut bytes, len - 600).expect("a part"), 600);
    assert!(bytes[..600].iter().all(|byte| *byte == 3) && bytes[600] == 7);
    assert_eq!(file.read_at(&mut bytes, len).expect("the end"), 0);
    assert_eq!(file.read_at(&mut bytes, 1 << 40).expect("behind the end"), 0);

    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    assert_eq!(fallocate(&file, FallocateFlags::ZERO_RANGE, len - 100, 200), Err(Errno::FBIG));
    assert_eq!(fallocate(&file, punch, len - 100, 200), Ok(()));
    assert_eq!(fallocate(&file, FallocateFlags::empty(), 0, 4096), Err(Errno::OPNOTSUPP));
    assert_eq!(fallocate(&file, FallocateFlags::KEEP_SIZE, 0, 4096), Err(Errno::OPNOTSUPP));
    assert_eq!(fallocate(&file, FallocateFlags::COLLAPSE_RANGE, 0, 4096), Err(Errno::OPNOTSUPP));
    file.read_exact_at(&mut bytes[..600], len - 600).expect("a read");
    assert!(bytes[..500].iter().all(|byte| *byte == 3) && bytes[500..600].iter().all(|byte| *byte == 0));
    assert_eq!(file.metadata().expect("facts").len(), len);
    drop(file);
    shown.stop();
}

#[test]
fn a_program_may_sync_close_and_own_the_file() {
    if !is_here() {
        return;
    }
    let dir = Dir::new("fuse-own");
    let image = KINDS[0].make(&dir, MIB);
    let shown = Shown::start(&dir.join("disk"), &[&image]);
    let facts = || std::fs::metadata(&shown.file).expect("the file");
    assert_eq!((facts().permissions().mode() & 0o777, facts().uid()), (0o600, 0));
    std::fs::set_permissions(&shown.file, PermissionsExt::from_mode(0o640)).expect("it is ours");
    std::os::unix::fs::chown(&shown.file, Some(12), Some(34)).expect("we are root");
    assert_eq!((facts().permissions().mode() & 0o777, facts().uid(), facts().gid()), (0o640, 12, 34));

    // Closing a reader costs no flush, closing a writer costs one, and a synchronous write has its own.
    drop(File::open(&shown.file).expect("the file"));
    both(&shown.file).write_all(b"written").expect("a write");
    let file = both(&shown.file);
    file.sync_all().expect("a sync");
    file.sync_data().expect("a sync");
    drop(file);
    let synced = i32::try_from(rustix::fs::OFlags::DSYNC.bits()).expect("a flag");
    let mut options = OpenOptions::new();
    let file = std::os::unix::fs::OpenOptionsExt::custom_flags(options.write(true), synced).open(&shown.file);
    file.expect("the file").write_all(b"durable").expect("a write");
    let said = shown.stop();
    // One when the writer closed, and two syncs.
    assert!(said.contains("writes 2 (") && said.contains("flushes 3;"), "{said}");
}

#[test]
fn a_disk_for_reading_is_a_file_for_reading() {
    if !is_here() {
        return;
    }
    let dir = Dir::new("fuse-read");
    let image = KINDS[0].make(&dir, MIB);
    let shown = Shown::start(&dir.join("disk"), &["-r", &image]);
    fails(OpenOptions::new().write(true).open(&shown.file), Errno::ROFS);
    assert_eq!(std::fs::read(&shown.file).expect("all of it"), vec![0; MIB]);
    shown.stop();
}

#[test]
fn where_there_is_no_room_programs_are_told_and_what_was_there_stays() {
    if !is_here() {
        return;
    }
    let Some(small) = Mount::tmpfs(4 << 20) else { return };
    let image = small.dir.text("image");
    vellum(&["create", "-f", "qcow2", &image, "64M"]).answer();
    let dir = Dir::new("fuse-room");
    let shown = Shown::start(&dir.join("disk"), &[&image]);
    let file = both(&shown.file);
    let mut written = 0_u64;
    let error = loop {
        match file.write_all_at(&[9; 64 << 10], written << 16) {
            Ok(()) => written += 1,
            Err(error) => break error,
        }
        assert!(written < 1000, "4 MiB hold no 64");
    };
    assert_eq!(error.raw_os_error(), Some(Errno::NOSPC.raw_os_error()), "{error}");
    assert!(written > 8, "{written} clusters");
    let mut bytes = vec![0; 64 << 10];
    for cluster in 0..written {
        file.read_exact_at(&mut bytes, cluster << 16).expect("a read");
        assert!(bytes.iter().all(|byte| *byte == 9), "cluster {cluster}");
    }
    // What is given back can be used again.
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(&file, punch, 0, 8 << 16).expect("zeros");
    drop(file);
    drop(Client::connect(&shown.server().peer(), "").expect("it serves"));
    drop(shown);
}
