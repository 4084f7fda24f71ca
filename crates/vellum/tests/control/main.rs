//! A disk that is controlled while it is served, through the real program: commands at its control socket,
//! watched by its clients.
//!
//! ```text
//!   backups.rs  by a bitmap, of what has changed; beside guests, and killed
//!   exports.rs  added, removed and opened again while others are served; images that cannot be opened
//!   chains.rs    committed and rebased while guests are at work; paused, cancelled, killed at any moment
//!   external.rs  new images on top, at one moment for several disks; killed at any moment
//!   on_top.rs    how images that go on top are laid out, and what is left below
//!   health.rs   full and failing: which reports there are; Prometheus
//!   hung.rs     on storage that does not answer: what that keeps others from, and how it ends
//!   hydration.rs  copies of the backing image, until the disk stands alone; what keeps it from that
//!   resize.rs   growing, in every format, during writes; what refuses; killed right after the answer
//!   limits.rs   throttled: no more than the limit, and what is not throttled
//!   shared.rs   clones of one template, which is opened once
//!   pause.rs    stopped and resumed; what waits, what is durable, and how it ends
//! ```

#![allow(unreachable_pub, reason = "the modules of a test are its own")]

#[path = "../../../vellum-export/tests/support/guest.rs"]
mod guest;
#[path = "../support/mod.rs"]
mod support;

mod backups;
mod chains;
mod diffs;
mod exports;
mod external;
mod health;
mod hung;
mod hydration;
mod killed;
mod limits;
mod on_top;
mod pause;
mod resize;
mod shared;

use serde_json::Value;

use support::client::Client;
use support::dir::Dir;
use support::program::{Ran, vellum};
use support::server::Server;
use support::until;

const MIB: u64 = 1 << 20;

/// A server with a control socket.
struct Controlled {
    server: Server,
    socket: String,
    _place: Dir,
}

impl Controlled {
    #[track_caller]
    fn start(arguments: &[&str]) -> Self {
        let place = Dir::short();
        let socket = place.text("control");
        let server = Server::start(&[&["--control", &socket][..], arguments].concat());
        Self { server, socket, _place: place }
    }

    /// `vellum COMMAND --control … REST`.
    fn ask(&self, command: &str, rest: &[&str]) -> Ran {
        vellum(&[&[command, "--control", &self.socket][..], rest].concat())
    }

    /// As above; returns the answer.
    #[track_caller]
    fn json(&self, command: &str, rest: &[&str]) -> Value {
        self.ask(command, &[&["--output", "json"][..], rest].concat()).json()
    }

    /// It is refused, in one line that has these words.
    #[track_caller]
    fn refuses(&self, words: &[&str], command: &str, rest: &[&str]) {
        let ran = self.ask(command, rest);
        assert_eq!((ran.code, ran.err.lines().count()), (1, 1), "{command} {rest:?}: {ran:?}");
        for word in words {
            assert!(ran.err.contains(word), "{command} {rest:?} does not say {word:?}: {}", ran.err);
        }
    }

    #[track_caller]
    fn client(&self, export: &str) -> Client {
        Client::connect(&self.server.peer(), export).expect("the export is there")
    }

    /// The status of the only disk.
    #[track_caller]
    fn told(&self) -> Value {
        self.json("stats", &[])["disks"][0].clone()
    }
}

/// A new image.
#[track_caller]
fn made(dir: &Dir, format: &str, options: &str, size: &str) -> String {
    let image = dir.text(&format!("disk-{}", dir.names().len()));
    let mut arguments = vec!["create", "-f", format];
    if !options.is_empty() {
        arguments.extend(["-o", options]);
    }
    vellum(&[&arguments[..], &[&image, size]].concat()).answer();
    image
}

/// The status of the disk that is exported under this name.
#[track_caller]
fn told_of(served: &Controlled, export: &str) -> Value {
    let told = served.json("stats", &[]);
    let disks = told["disks"].as_array().expect("disks");
    let is_it = |disk: &&Value| disk["exports"].as_array().expect("names").iter().any(|name| name == export);
    disks.iter().find(is_it).unwrap_or_else(|| panic!("{export} is not there: {told}")).clone()
}
