//! A disk that is steered while it is served, through the real program: asked at its control socket, watched by its clients.
//!
//! ```text
//!   resize.rs   made larger, of every format, while somebody writes; what refuses; killed right after the answer
//!   limits.rs   slowed: no more than is said, and who is not slowed
//!   pause.rs    stopped and let go on; what waits, what is durable, and how it ends
//! ```

#![allow(unreachable_pub, reason = "the modules of a test are its own")]

#[path = "../support/mod.rs"]
mod support;

mod limits;
mod pause;
mod resize;

use serde_json::Value;

use support::client::Client;
use support::dir::Dir;
use support::program::{Ran, vellum};
use support::server::Server;

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

    /// The same; what it answers.
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

    /// What is told of the only disk.
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
