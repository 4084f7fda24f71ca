//! The virtual machine: QEMU without any help of the processor, its disk over NBD, its console read line by line.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::support::program::path_text;
use crate::template::Template;

/// A guest that takes longer hangs. Without the help of the processor a boot takes some ten seconds; a busy host makes
/// minutes of them.
const PATIENCE: Duration = Duration::from_secs(300);
/// For how long QEMU tries to reach a server that has gone.
const RECONNECT_SECONDS: u64 = 240;
/// What the guest's own lines begin with.
const MARK: &str = "guest: ";

/// A machine that runs, and is killed with the test.
pub struct Machine {
    child: Child,
    booted: Instant,
    lines: mpsc::Receiver<String>,
    /// All that console and QEMU said so far.
    console: Arc<Mutex<String>>,
    said: Vec<String>,
}

impl Machine {
    /// Switches a machine on, with the disk at this socket, to play this story; `round` is handed to the guest.
    pub fn boot(template: &Template, socket: &Path, story: &str, round: u32) -> Self {
        let disk = json!({
            "driver": "nbd",
            "node-name": "disk",
            "server": { "type": "unix", "path": path_text(socket) },
            "discard": "unmap",
            "reconnect-delay": RECONNECT_SECONDS,
        });
        // A guest that panics reboots at once, which QEMU is told not to do: it ends.
        let words = format!("console=ttyS0 panic=-1 story={story} round={round}");
        // If the test itself is killed, the kernel ends QEMU with it.
        let mut child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "qemu-system-x86_64"])
            .args(["-nodefaults", "-no-user-config", "-no-reboot", "-accel", "tcg", "-m", "256"])
            .args(["-display", "none", "-serial", "stdio"])
            .arg("-kernel")
            .arg(&template.kernel)
            .arg("-initrd")
            .arg(&template.first_files)
            .args(["-append", &words, "-blockdev", &disk.to_string(), "-device", "virtio-blk-pci,drive=disk"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("QEMU can be started");
        let console = Arc::new(Mutex::new(String::new()));
        let (line_read, lines) = mpsc::channel();
        listen(child.stdout.take().expect("it was asked for"), console.clone(), line_read.clone());
        listen(child.stderr.take().expect("it was asked for"), console.clone(), line_read);
        Self { child, booted: Instant::now(), lines, console, said: Vec::new() }
    }

    /// Waits until the guest says something that begins with these words, and gives what follows them.
    #[track_caller]
    pub fn wait_for(&mut self, words: &str) -> String {
        while self.next_line() {
            if let Some(rest) = self.said.last().and_then(|line| line.strip_prefix(words)) {
                return rest.trim().to_owned();
            }
        }
        panic!("the guest ended and did not say {words:?}; its console:\n{}", self.console());
    }

    /// Waits until the guest has said that it is done and the machine is off. Gives all that the guest said.
    #[track_caller]
    pub fn wait_for_the_end(mut self) -> Vec<String> {
        self.wait_for("done");
        while self.next_line() {}
        let status = self.child.wait().expect("a child");
        let console = self.console();
        let complains = ["I/O error", "EXT4-fs error", "EXT4-fs warning", "Call Trace"];
        let complained = complains.iter().any(|words| console.contains(words));
        assert!(status.success() && !complained, "QEMU: {status}; the guest's console:\n{console}");
        std::mem::take(&mut self.said)
    }

    /// Cuts the power. Gives all that the guest said.
    #[track_caller]
    pub fn cut_power(mut self) -> Vec<String> {
        self.child.kill().expect("it runs");
        while self.next_line() {}
        std::mem::take(&mut self.said)
    }

    /// Takes one line more; says whether there was one.
    #[track_caller]
    fn next_line(&mut self) -> bool {
        let left = PATIENCE.saturating_sub(self.booted.elapsed());
        match self.lines.recv_timeout(left) {
            Ok(line) => {
                if let Some(at) = line.find(MARK) {
                    self.said.push(line[at + MARK.len()..].trim_end().to_owned());
                }
                true
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => false,
            Err(mpsc::RecvTimeoutError::Timeout) => {
                panic!("the guest is not done in {PATIENCE:?}; its console:\n{}", self.console())
            }
        }
    }

    fn console(&self) -> String {
        self.console.lock().expect("the console").clone()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

fn listen(stream: impl Read + Send + 'static, console: Arc<Mutex<String>>, line_read: mpsc::Sender<String>) {
    std::thread::spawn(move || {
        for line in BufReader::new(stream).split(b'\n').map_while(Result::ok) {
            let line = String::from_utf8_lossy(&line).into_owned();
            let mut console = console.lock().expect("the console");
            console.push_str(&line);
            console.push('\n');
            drop(console);
            drop(line_read.send(line));
        }
    });
}
