//! The flash cache, through the real program: `vellum flash` and `vellum serve --flash`.
//!
//! ```text
//!   commands.rs  made, described, checked, refused: what `vellum flash` does with a cache that no server has
//!   contract.rs  a guest over all kinds of images; what is read, what is kept over a restart, what the image has alone
//!   killed.rs    the server is killed while it writes: fast and full recovery, and QEMU's opinion of the images
//!   failing.rs   flash that fails while disks are served
//!   behind.rs    images that are behind their disk, and programs that do not know the cache
//!   policies.rs  what disks do with the cache, and changes of that while they are served
//!   shared.rs    one cache under several disks; clones of one template
//!   steps.rs     snapshots, resizing, detaching and migrating a disk that the cache holds writes of
//! ```

#![allow(unreachable_pub, reason = "the modules of a test are its own")]

#[path = "../kill/fio.rs"]
mod fio;
#[allow(dead_code, reason = "other tests use the rest")]
#[path = "../kill/guest.rs"]
mod guest;
#[allow(dead_code, reason = "other tests use the rest")]
#[path = "../kill/model.rs"]
mod model;
#[path = "../support/mod.rs"]
mod support;
#[path = "../kill/tap.rs"]
mod tap;

mod behind;
mod commands;
mod contract;
mod failing;
mod killed;
mod policies;
mod shared;
mod steps;

use serde_json::Value;

use support::dir::Dir;
use support::noise;
use support::program::{Ran, has, run, until_let_go, vellum};
use support::server::Server;

/// A kind of image that can be behind its cache.
#[derive(Debug, Clone, Copy)]
struct Kind {
    format: &'static str,
    options: &'static str,
    /// It is over a raw image.
    has_base: bool,
}

/// Those that are tested.
const KINDS: [Kind; 6] = [
    Kind { format: "qcow2", options: "journal=on", has_base: false },
    Kind { format: "qcow2", options: "journal=off", has_base: false },
    Kind { format: "qcow2", options: "journal=on,extended_l2=off", has_base: true },
    Kind { format: "vellum", options: "layout=zoned", has_base: true },
    Kind { format: "vellum", options: "layout=table", has_base: false },
    Kind { format: "vellum", options: "layout=linear", has_base: true },
];

impl Kind {
    /// An image of this many bytes in the directory, and what its disk reads as.
    #[track_caller]
    fn make(self, dir: &Dir, size: usize) -> (String, Vec<u8>) {
        let image = dir.text(if self.format == "qcow2" { "disk.qcow2" } else { "disk.vlm" });
        let create = ["create", "-q", "-f", self.format, "-o", self.options];
        if !self.has_base {
            vellum(&[&create[..], &[&image, &size.to_string()]].concat()).answer();
            return (image, vec![0; size]);
        }
        let mut bytes = noise(size, 7);
        bytes[size / 4..size / 2].fill(0);
        std::fs::write(dir.join("base.raw"), &bytes).expect("a base");
        vellum(&[&create[..], &["-b", "base.raw", "-F", "raw", &image]].concat()).answer();
        (image, bytes)
    }
}

/// A cache in the directory.
#[track_caller]
fn made_cache(dir: &Dir, size: &str) -> String {
    let cache = dir.text("cache");
    vellum(&["flash", "create", "-q", &cache, size]).answer();
    cache
}

/// What a cache holds that no server has.
#[track_caller]
fn info(cache: &str) -> Value {
    vellum(&["flash", "info", "--output", "json", cache]).json()
}

/// What a server says of its cache now.
#[track_caller]
fn cache_stats(control: &str) -> Value {
    vellum(&["stats", "--control", control, "--output", "json"]).json()["flash"].clone()
}

/// The disk of an image as it is without a cache.
#[track_caller]
fn alone(dir: &Dir, image: &str) -> Vec<u8> {
    let copy = dir.text("alone.raw");
    vellum(&["convert", "-q", "-O", "raw", image, &copy]).answer();
    let bytes = std::fs::read(&copy).expect("a copy");
    std::fs::remove_file(&copy).expect("the copy");
    bytes
}

/// The image is sound, also in QEMU's opinion.
#[track_caller]
fn is_sound(image: &str) {
    vellum(&["check", image]).answer();
    if image.ends_with(".qcow2") && has("qemu-img") {
        until_let_go(image);
        let theirs = run("qemu-img", &["check", image]);
        assert_eq!(theirs.code, 0, "{theirs:?}");
    }
}

/// It is refused, in one line that has these words.
#[track_caller]
fn is_refused(ran: &Ran, words: &[&str]) {
    assert_eq!((ran.code, ran.err.lines().count()), (1, 1), "{ran:?}");
    for word in words {
        assert!(ran.err.contains(word), "it does not say {word:?}: {}", ran.err);
    }
}

/// A server that does not come up.
#[track_caller]
fn is_not_served(arguments: &[&str], words: &[&str]) {
    match Server::try_start(arguments) {
        Ok(_) => panic!("{arguments:?} is served"),
        Err(ran) => {
            assert_eq!(ran.code, 1, "{ran:?}");
            for word in words {
                assert!(ran.err.contains(word), "it does not say {word:?}: {}", ran.err);
            }
        }
    }
}

/// The two bytes slices are the same; the message names where they differ.
#[track_caller]
fn same(found: &[u8], wanted: &[u8], about: &str) {
    if let Some(at) = support::first_difference(found, wanted) {
        panic!("{about}: byte {at:#x} is {:#x} and not {:#x}", found[at], wanted[at]);
    }
}
