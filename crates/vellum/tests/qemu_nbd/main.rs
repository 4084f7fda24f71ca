//! The program under the name `qemu-nbd`: the same command lines, by both programs, with the same clients; and what
//! `vellum serve` has of the same kind.

#[path = "../support/mod.rs"]
mod support;

mod lines;
mod process;
mod tls;

use std::os::unix::fs::symlink;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use rustix::process::{Signal, kill_process};

use support::dir::Dir;
use support::program::{Ran, finish, path_text, pid_of, wait};
use support::{PATIENCE, until};

const MIB: usize = 1 << 20;

/// Whose program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Whose {
    Qemu,
    Ours,
}

impl Whose {
    const BOTH: [Self; 2] = [Self::Qemu, Self::Ours];

    /// The program with these arguments, to be run in this directory.
    fn command(self, dir: &Dir, arguments: &[&str]) -> Command {
        let mut command = match self {
            Self::Qemu => Command::new("qemu-nbd"),
            Self::Ours => {
                let name = dir.join("bin/qemu-nbd");
                if !name.exists() {
                    std::fs::create_dir_all(dir.join("bin")).expect("a directory");
                    symlink(env!("CARGO_BIN_EXE_vellum"), &name).expect("a link");
                }
                let mut command = Command::new(name);
                command
                    .env_remove("VELLUM_ALLOW_DIRS")
                    .env_remove("VELLUM_LOG")
                    .env("VELLUM_CONFIG", "/dev/null");
                command
            }
        };
        command.current_dir(dir.path()).args(arguments);
        command
    }

    /// Runs it to its end.
    fn run(self, dir: &Dir, arguments: &[&str]) -> Ran {
        finish(self.command(dir, arguments), None)
    }
}

/// Whether somebody listens at a socket. A file is there a moment earlier, and a client is refused then.
fn is_listening(socket: &Path) -> bool {
    const ACCEPTS: &str = "00010000";
    let sockets = std::fs::read_to_string("/proc/net/unix").expect("a list of sockets");
    let mut sockets = sockets.lines().map(|line| line.split_whitespace());
    sockets.any(|mut words| words.nth(3) == Some(ACCEPTS) && words.nth(3).map(Path::new) == Some(socket))
}

/// A server of either program, ended with the test.
struct Running {
    child: Option<Child>,
    begun: Instant,
    socket: PathBuf,
}

impl Running {
    /// Starts it with these arguments, at a socket of this name, and waits until the socket is there.
    #[track_caller]
    fn start(whose: Whose, dir: &Dir, arguments: &[&str]) -> Self {
        let socket = dir.join("s");
        drop(std::fs::remove_file(&socket));
        let mut command = whose.command(dir, &[&["-k", path_text(&socket)], arguments].concat());
        let begun = Instant::now();
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("it can be started");
        let mut running = Self { child: Some(child), begun, socket };
        until("the socket is there", || {
            // One that only looks would be a client: a server of one client would be busy.
            if running.socket.exists() && is_listening(&running.socket) {
                return true;
            }
            let ended = running.child.as_mut().expect("it runs").try_wait().expect("a child");
            if ended.is_some() {
                let ran = running.end(None);
                panic!("{whose:?} {arguments:?}: {ran:?}");
            }
            false
        });
        running
    }

    fn uri(&self, name: &str) -> String {
        format!("nbd+unix:///{name}?socket={}", path_text(&self.socket))
    }

    fn is_running(&mut self) -> bool {
        self.child.as_mut().is_some_and(|child| child.try_wait().expect("a child").is_none())
    }

    /// Waits until it ends, after this signal if there is one.
    fn end(&mut self, signal: Option<Signal>) -> Ran {
        let child = self.child.take().expect("it runs");
        if let Some(signal) = signal {
            kill_process(pid_of(&child), signal).expect("it runs");
        }
        wait(child, self.begun, PATIENCE).expect("it ends")
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            drop(child.kill());
            drop(child.wait());
        }
    }
}

/// A connection on which the server has said something: it was accepted.
fn greeted(socket: &Path) -> UnixStream {
    use std::io::Read as _;
    let mut stream = UnixStream::connect(socket).expect("it listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting).expect("a greeting");
    assert_eq!(&greeting[..8], b"NBDMAGIC");
    stream
}

/// Chooses the default export on a connection that was greeted.
fn choose(mut stream: &UnixStream) {
    use std::io::{Read as _, Write as _};
    let mut request = 3_u32.to_be_bytes().to_vec();
    request.extend_from_slice(b"IHAVEOPT");
    request.extend_from_slice(&1_u32.to_be_bytes());
    request.extend_from_slice(&0_u32.to_be_bytes());
    stream.write_all(&request).expect("it reads");
    // The size and the flags; zeros were declined.
    stream.read_exact(&mut [0; 10]).expect("an answer");
}
