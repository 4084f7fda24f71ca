//! Images with a journal, as their owner meets them: made, served, killed, inspected, recovered; and QEMU
//! beside.
//!
//! ```text
//!   life.rs     a server is killed, everybody refuses the image and says why, `vellum recover`; closed it is plain qcow2
//!   prepared.rs space ahead of need: a server that has prepared some is killed, or closes
//!   settings.rs `vellum journal enable|disable` on images that QEMU made
//!   turns.rs    QEMU and Vellum write one image in turns, Vellum sometimes killed
//! ```

#![allow(unreachable_pub, reason = "the modules of a test are its own")]

#[path = "../support/mod.rs"]
mod support;

mod life;
mod prepared;
mod settings;
mod turns;

use std::path::Path;

use serde_json::Value;
use support::client::Client;
use support::program::{has, path_text, qemu_dump, run, vellum};
use support::server::Server;

const MIB: usize = 1 << 20;
const FEATURE: &str = "vellum journal needs replay";

/// Serves an image, and kills the server when this was done.
fn killed_after(image: &str, work: impl FnOnce(&mut Client)) {
    let server = Server::start(&[image, "-f", "qcow2"]);
    let mut client = Client::connect(&server.peer(), "").expect("a server");
    work(&mut client);
    server.kill();
}

/// Serves an image, and closes it when this was done.
fn closed_after(image: &str, work: impl FnOnce(&mut Client)) {
    let server = Server::start(&[image, "-f", "qcow2"]);
    let mut client = Client::connect(&server.peer(), "").expect("a server");
    work(&mut client);
    client.flush().expect("a flush");
    server.stop();
}

/// The journal as `info` reports it; null when there is none.
#[track_caller]
fn journal_of(image: &str) -> Value {
    let info = vellum(&["info", "--output", "json", image]).json();
    info["format-specific"]["data"]["journal"].clone()
}

/// Both programs find nothing wrong.
#[track_caller]
fn is_clean(image: &str) {
    let ours = vellum(&["check", image]);
    assert_eq!(ours.code, 0, "{ours:?}");
    if has("qemu-img") {
        let theirs = run("qemu-img", &["check", image]);
        assert_eq!(theirs.code, 0, "{theirs:?}");
    }
}

/// The disk, as QEMU reads it where QEMU is there.
#[track_caller]
fn bytes_of(image: &str) -> Vec<u8> {
    if has("qemu-img") {
        return qemu_dump(Path::new(image), "qcow2", None);
    }
    let raw = Path::new(image).with_extension("copy");
    vellum(&["convert", "-O", "raw", image, path_text(&raw)]).answer();
    std::fs::read(&raw).expect("the copy")
}
