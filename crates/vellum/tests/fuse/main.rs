//! Disks as files: `vellum serve --fuse`, with the kernel on the other side.
//!
//! ```text
//!   file.rs      random reads, writes, holes and syncs on the file, beside a copy in memory and NBD; killed in between
//!   answers.rs   what it refuses, and with which error
//!   endings.rs   how it comes, goes, is detached, and is found after its server was killed
//!   systems.rs   ext4, XFS and btrfs over a loop device over the file; the server killed; everything synced is there
//!     tree.rs    the files that are made, changed and remembered in them
//! ```
//!
//! Whatever fails, nothing stays mounted and no loop device stays behind: `shown.rs` has the guards.

#![allow(unreachable_pub, reason = "the modules of a test are its own")]

#[path = "../support/mod.rs"]
mod support;

mod answers;
mod endings;
mod file;
#[allow(dead_code, reason = "the tests of kills use all of it")]
#[path = "../kill/model.rs"]
mod model;
mod shown;
mod systems;
mod tree;

use support::dir::Dir;
use support::program::vellum;

const MIB: usize = 1 << 20;

/// A kind of image, by the arguments of `create`.
#[derive(Debug, Clone, Copy)]
struct Kind {
    name: &'static str,
    format: &'static str,
    options: &'static str,
}

/// What holds an own journal, and a raw disk for comparison.
const KINDS: [Kind; 5] = [
    Kind { name: "qcow2", format: "qcow2", options: "journal=on" },
    Kind { name: "zoned", format: "vellum", options: "layout=zoned" },
    Kind { name: "table", format: "vellum", options: "layout=table" },
    Kind { name: "linear", format: "vellum", options: "layout=linear" },
    Kind { name: "raw", format: "raw", options: "" },
];

impl Kind {
    /// Makes an image of `len` bytes.
    fn make(&self, dir: &Dir, len: usize) -> String {
        let (image, len) = (dir.text("image"), len.to_string());
        let mut arguments = vec!["create", "-f", self.format, &image, &len];
        if !self.options.is_empty() {
            arguments.extend(["-o", self.options]);
        }
        vellum(&arguments).answer();
        image
    }

    /// The image is closed, and sound.
    #[track_caller]
    fn is_sound(&self, image: &str) {
        if self.format != "raw" {
            let ran = vellum(&["check", image]);
            assert_eq!(ran.code, 0, "{}: {ran:?}", self.name);
        }
    }
}

fn seed() -> u64 {
    std::env::var("VELLUM_TEST_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(20_261_122)
}
