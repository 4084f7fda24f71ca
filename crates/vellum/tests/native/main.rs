//! Images of the native format, as their owner meets them.
//!
//! ```text
//!   making.rs     create, convert, info, map; options that make no sense; devices
//!   chains.rs     over and under raw and qcow2 images, in any order; served, killed, recovered
//!   forks.rs      clones of a snapshot, whose disk is written meanwhile
//!   resize.rs     larger and smaller disks, of every format
//!   snapshots.rs  made, listed, read, deleted, gone back to
//!   served.rs     the same while the disk is served, and what a rude client of the control socket meets
//!   template.rs   the list of a template's zeros, and when it does not count
//! ```

#![allow(unreachable_pub, reason = "the modules of a test are its own")]

#[path = "../support/mod.rs"]
mod support;

mod chains;
mod device;
mod forks;
mod making;
mod resize;
mod served;
mod snapshots;
mod template;

use std::path::Path;

use support::program::{Ran, has, run, skipped, vellum};

const MIB: usize = 1 << 20;

/// Runs our program, which must fail with one line on stderr that has all of these words.
#[track_caller]
fn refused(words: &[&str], arguments: &[&str]) -> Ran {
    let ran = vellum(arguments);
    assert_eq!((ran.code, ran.err.lines().count()), (1, 1), "{arguments:?}: {ran:?}");
    for word in words {
        assert!(ran.err.contains(word), "{arguments:?} does not say {word:?}: {}", ran.err);
    }
    ran
}

/// Both checkers find this in the image: ours, and the one that was written from the specification alone.
#[track_caller]
fn check_says(image: &str, code: i32) {
    let ours = vellum(&["check", image]);
    assert_eq!(ours.code, code, "{ours:?}");
    if !has("python3") {
        return skipped("python3 is not installed");
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/check-native.py");
    let theirs = run("python3", &[script.as_os_str(), image.as_ref()]);
    assert_eq!(theirs.code, code, "{theirs:?}");
}

/// Two disks read the same.
#[track_caller]
fn same(one: &str, other: &str) {
    let ran = vellum(&["compare", one, other]);
    assert_eq!(ran.code, 0, "{ran:?}");
}
