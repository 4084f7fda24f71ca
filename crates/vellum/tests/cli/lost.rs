//! What is lost, and what can be done, is said in every case.

use std::process::Command;

use super::MIB;
use super::support::dir::Dir;
use super::support::noise;
use super::support::program::{finish, vellum};
use crate::requires;

/// Bitmaps say nothing of a disk that was reverted.
#[test]
fn a_revert_names_the_bitmaps_that_it_removes() {
    let dir = Dir::new("reverted");
    let image = dir.text("disk.qcow2");
    vellum(&["create", "-q", "-f", "qcow2", &image, "1M"]).answer();
    vellum(&["snapshot", "create", &image, "one"]).answer();
    let revert = ["snapshot", "revert", &image, "one"];
    let ran = vellum(&revert);
    assert_eq!((ran.code, ran.err.as_str()), (0, ""), "{ran:?}");
    let short = ["snapshot", "-a", "one", &image];
    for (line, is_quiet) in [
        (&revert[..], false),
        (&short, false),
        (&["snapshot", "-q", "-a", "one", &image], true),
        (&["snapshot", "revert", "--output", "json", &image, "one"], false),
    ] {
        for name in ["monday", "b"] {
            vellum(&["bitmap", "--add", &image, name]).answer();
        }
        let ran = vellum(line);
        assert_eq!(ran.code, 0, "{ran:?}");
        let is_said = ran.err.lines().count() == 1
            && ran.err.contains("its bitmaps were removed")
            && ran.err.trim_end().ends_with(": monday, b");
        assert_eq!((is_said, ran.err.is_empty()), (!is_quiet, is_quiet), "{ran:?}");
        assert!(!line.contains(&"json") || ran.out.contains("\"bitmaps-removed\": [\n"), "{ran:?}");
        assert!(!vellum(&["info", &image]).answer().contains("monday"));
    }
}

/// Also where the last flush finds that there was no room.
#[test]
fn an_old_image_is_in_the_way_of_its_copy() {
    requires!("strace");
    let dir = Dir::new("no-room-at-the-end");
    std::fs::write(dir.join("in.raw"), noise(MIB, 5)).expect("a disk");
    std::fs::write(dir.join("out.raw"), noise(MIB, 6)).expect("a disk");
    let mut command = Command::new("strace");
    command.args(["-f", "-o", "/dev/null", "-e", "trace=fsync,fdatasync,io_uring_setup"]);
    command.args(["-e", "inject=io_uring_setup:error=EPERM", "-e", "inject=fsync,fdatasync:error=ENOSPC"]);
    command
        .arg(env!("CARGO_BIN_EXE_vellum"))
        .args(["convert", "-f", "raw", "-O", "raw", "in.raw", "out.raw"]);
    command.current_dir(dir.path()).env("VELLUM_CONFIG", "/dev/null");
    let ran = finish(command, None);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.err.contains("is unchanged") && ran.err.contains("there must be room for both"), "{ran:?}");
    assert_eq!(dir.names(), ["in.raw", "out.raw"]);
}
