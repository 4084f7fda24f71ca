//! The virtual machine: QEMU without hardware acceleration, its disk over NBD or vhost-user-blk, its console
//! read line by line.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use serde_json::json;

use crate::support::program::{path_text, succeed};
use crate::template::Template;

/// A guest that prints nothing for longer hangs. Without the help of the processor a boot takes some ten
/// seconds; a busy host makes minutes of them.
const PATIENCE: Duration = Duration::from_secs(300);
/// For how long QEMU tries to reach a server that has gone.
const RECONNECT_SECONDS: u64 = 240;
/// How many lines of a console a complaint begins with.
const LAST_LINES: usize = 30;
/// What the guest's own lines begin with.
const MARK: &str = "guest: ";

/// A machine that runs, and is killed with the test.
pub struct Machine {
    child: Child,
    lines: mpsc::Receiver<String>,
    /// All output of the console and QEMU so far.
    console: Arc<Mutex<String>>,
    said: Vec<String>,
}

/// How a machine reaches its disk.
#[derive(Debug, Clone, Copy)]
pub enum Cable<'a> {
    /// QEMU's own client.
    Nbd(&'a Path),
    /// Shared memory, and this many queues; a processor for each.
    Vhost(&'a Path, usize),
}

impl Cable<'_> {
    fn arguments(self) -> Vec<String> {
        match self {
            Cable::Nbd(socket) => {
                let disk = nbd(socket).to_string();
                vec!["-m", "256", "-blockdev", &disk, "-device", "virtio-blk-pci,drive=disk"]
                    .into_iter()
                    .map(str::to_owned)
                    .collect()
            }
            Cable::Vhost(socket, queues) => {
                let lines = format!(
                    "-machine pc,memory-backend=mem -object memory-backend-memfd,id=mem,size=256M,share=on -m 256 \
                     -smp {queues} -device vhost-user-blk-pci,chardev=disk,num-queues={queues} \
                     -chardev socket,id=disk,path={},{}",
                    path_text(socket),
                    reconnecting()
                );
                lines.split_whitespace().map(str::to_owned).collect()
            }
        }
    }
}

fn nbd(socket: &Path) -> serde_json::Value {
    json!({
        "driver": "nbd",
        "node-name": "disk",
        "server": { "type": "unix", "path": path_text(socket) },
        "discard": "unmap",
        "reconnect-delay": RECONNECT_SECONDS,
    })
}

/// How a character device is configured to reconnect to its server: in seconds, since QEMU 9.2 in
/// milliseconds.
fn reconnecting() -> &'static str {
    let version = succeed("qemu-system-x86_64", &["--version"]);
    let numbers = version.split_whitespace().find_map(|word| word.split_once('.'));
    let parse = |text: &str| text.split('.').next().and_then(|number| number.parse::<u32>().ok());
    let version = numbers.and_then(|(major, rest)| Some((parse(major)?, parse(rest)?)));
    if version.is_some_and(|version| version >= (9, 2)) { "reconnect-ms=300" } else { "reconnect=1" }
}

impl Machine {
    /// Switches a machine on, with the disk at this socket, to play this story; `round` is handed to the
    /// guest. When the guest reboots, the machine is off.
    pub fn boot(template: &Template, socket: &Path, story: &str, round: u32) -> Self {
        Self::boot_with(template, Cable::Nbd(socket), &["-no-reboot"], story, round)
    }

    /// As above, whatever its disk hangs on, with more arguments for QEMU.
    pub fn boot_with(template: &Template, cable: Cable<'_>, more: &[&str], story: &str, round: u32) -> Self {
        // A guest that panics reboots at once; QEMU's option turns that into an exit.
        let words = format!("console=ttyS0 panic=-1 no_timer_check story={story} round={round}");
        let more = more.iter().map(|word| (*word).to_owned());
        let arguments: Vec<String> = more.chain(cable.arguments()).collect();
        Self::start(&template.kernel, &template.first_files, &words, &arguments)
    }

    /// Boots a machine with this kernel, its initramfs, its command line and more arguments for QEMU.
    pub fn start(kernel: &Path, first_files: &Path, words: &str, arguments: &[String]) -> Self {
        // If the test itself is killed, the kernel ends QEMU with it.
        let mut child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "qemu-system-x86_64"])
            .args(["-nodefaults", "-no-user-config", "-accel", "tcg", "-display", "none", "-serial", "stdio"])
            .arg("-kernel")
            .arg(kernel)
            .arg("-initrd")
            .arg(first_files)
            // A processor that waits for a busy host says nothing of the server. What hangs is still reported.
            .args(["-append", &format!("{words} rcupdate.rcu_cpu_stall_suppress=1 nosoftlockup")])
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("QEMU can be started");
        let console = Arc::new(Mutex::new(String::new()));
        let (line_read, lines) = mpsc::channel();
        listen(child.stdout.take().expect("it was asked for"), console.clone(), line_read.clone());
        listen(child.stderr.take().expect("it was asked for"), console.clone(), line_read);
        Self { child, lines, console, said: Vec::new() }
    }

    /// Waits until the guest prints a line that begins with these words, and returns the rest of it.
    #[track_caller]
    pub fn wait_for(&mut self, words: &str) -> String {
        while self.next_line() {
            if let Some(rest) = self.said.last().and_then(|line| line.strip_prefix(words)) {
                return rest.trim().to_owned();
            }
        }
        // The last lines are the most useful, and a report may show only the beginning of this.
        let status = self.child.wait().expect("a child");
        let console = self.console();
        let lines: Vec<&str> = console.lines().collect();
        let last = lines[lines.len().saturating_sub(LAST_LINES)..].join("\n");
        panic!(
            "the guest ended and did not say {words:?}; QEMU: {status}; it said {:?}; its last lines:\n{last}\n\nall of its \
             console:\n{console}",
            self.said
        );
    }

    /// Waits until the guest has printed that it is done and the machine is off. Returns all of its output.
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

    /// Cuts the power. Returns all output of the guest.
    #[track_caller]
    pub fn cut_power(mut self) -> Vec<String> {
        self.child.kill().expect("it runs");
        while self.next_line() {}
        std::mem::take(&mut self.said)
    }

    /// Reads one line more; returns whether there was one.
    #[track_caller]
    fn next_line(&mut self) -> bool {
        match self.lines.recv_timeout(PATIENCE) {
            Ok(line) => {
                if let Some(at) = line.find(MARK) {
                    self.said.push(line[at + MARK.len()..].trim_end().to_owned());
                }
                true
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => false,
            Err(mpsc::RecvTimeoutError::Timeout) => {
                panic!("the guest has printed nothing for {PATIENCE:?}; its console:\n{}", self.console())
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
