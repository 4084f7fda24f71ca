//! `vellum serve`, as a user starts it: in a process of its own, which never outlives the test.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process};
use serde_json::Value;

use super::PATIENCE;
use super::client::Peer;
use super::dir::Dir;
use super::program::{Ran, path_text, pid_of, until_let_go, vellum_command, wait};

/// How long to wait for a server's output after it has ended: a program that it had started may still have
/// its stderr open.
const LAST_WORDS: Duration = Duration::from_secs(10);

/// A server that is up.
pub struct Server {
    child: Option<Child>,
    begun: Instant,
    place: Dir,
    /// Its words that name a file.
    files: Vec<PathBuf>,
    /// Its output on stderr so far.
    said: Arc<Mutex<String>>,
    /// Ends when there are no more writers.
    reader: JoinHandle<()>,
    tcp: Option<SocketAddr>,
}

impl Server {
    /// Serves at a socket of its own with these arguments, and waits until clients can connect.
    #[track_caller]
    pub fn start(arguments: &[&str]) -> Self {
        Self::try_start(arguments).unwrap_or_else(|ran| panic!("serve {arguments:?} ended: {ran:?}"))
    }

    /// As above; returns how it ended, if it does not come up.
    pub fn try_start(arguments: &[&str]) -> Result<Self, Box<Ran>> {
        Self::try_start_in(&[], arguments)
    }

    /// As above, with these variables.
    pub fn try_start_in(environment: &[(&str, &str)], arguments: &[&str]) -> Result<Self, Box<Ran>> {
        let place = Dir::short();
        let mut command = vellum_command();
        command.envs(environment.iter().copied());
        let address = format!("unix:{}", place.text("nbd"));
        command.args(["serve", "--nbd", &address, "--stats-json", &place.text("stats.json")]).args(arguments);
        let begun = Instant::now();
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("our own program can be started");
        let said = Arc::new(Mutex::new(String::new()));
        let (line_read, lines) = mpsc::channel();
        let stderr = BufReader::new(child.stderr.take().expect("it was asked for"));
        let notes = said.clone();
        let reader = std::thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                let mut notes = notes.lock().expect("the notes");
                notes.push_str(&line);
                notes.push('\n');
                drop(notes);
                drop(line_read.send(line));
            }
        });
        // `IMAGE`, and `NAME=IMAGE`.
        let words =
            arguments.iter().flat_map(|word| [Some(*word), word.split_once('=').map(|(_, file)| file)]);
        let files = words.flatten().map(PathBuf::from).filter(|path| path.exists()).collect();
        let mut server = Self { child: Some(child), begun, place, files, said, reader, tcp: None };
        // One line for each address and export; the socket is there with the first of them.
        let wanted =
            arguments.windows(2).filter(|pair| pair[0] == "--nbd" && pair[1].starts_with("tcp:")).count();
        let mut seen_tcp = 0;
        loop {
            match lines.recv_timeout(PATIENCE) {
                Ok(line) => {
                    let Some(uri) = line.strip_prefix("serving ") else { continue };
                    if let Some(rest) = uri.strip_prefix("nbd://").or(uri.strip_prefix("nbds://")) {
                        let (address, _) = rest.split_once('/').expect("an address and a name");
                        server.tcp = Some(address.parse().expect("numbers"));
                        seen_tcp += 1;
                    }
                    if seen_tcp >= wanted {
                        return Ok(server);
                    }
                }
                Err(_) => return Err(Box::new(server.end(None, PATIENCE))),
            }
        }
    }

    pub fn socket(&self) -> PathBuf {
        self.place.join("nbd")
    }

    /// The URI of an export.
    pub fn uri(&self, name: &str) -> String {
        format!("nbd+unix:///{name}?socket={}", path_text(&self.socket()))
    }

    /// The URI of an export over TCP, if it was started with `--nbd tcp:…`.
    pub fn tcp_uri(&self, name: &str) -> String {
        format!("nbd://{}/{name}", self.tcp.expect("it serves TCP"))
    }

    pub fn tcp(&self) -> SocketAddr {
        self.tcp.expect("it serves TCP")
    }

    pub fn peer(&self) -> Peer {
        Peer::Unix(self.socket())
    }

    pub fn pid(&self) -> u32 {
        self.child.as_ref().expect("it runs").id()
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(pid_of(self.child.as_ref().expect("it runs")), signal).expect("it runs");
    }

    /// Whether it has not ended.
    pub fn is_running(&mut self) -> bool {
        self.child.as_mut().is_some_and(|child| child.try_wait().expect("a child").is_none())
    }

    /// Waits until it ends by itself.
    pub fn wait(mut self, patience: Duration) -> Ran {
        self.end(None, patience)
    }

    /// Asks it to end in good order, and waits until it has.
    #[track_caller]
    pub fn stop(mut self) -> Ran {
        let ran = self.end(Some(Signal::TERM), PATIENCE);
        assert_eq!(ran.code, 0, "the server ends in good order:\n{}", ran.err);
        ran
    }

    /// As above, and what it counted.
    #[track_caller]
    pub fn stop_and_count(mut self) -> Value {
        let ran = self.end(Some(Signal::TERM), PATIENCE);
        assert_eq!(ran.code, 0, "the server ends in good order:\n{}", ran.err);
        self.stats()
    }

    /// Kills it, as a crash would. Its images are not locked afterwards.
    pub fn kill(mut self) {
        self.end(Some(Signal::KILL), PATIENCE);
        self.files.iter().for_each(|file| until_let_go(file));
    }

    fn end(&mut self, signal: Option<Signal>, patience: Duration) -> Ran {
        let child = self.child.take().expect("it runs");
        if let Some(signal) = signal {
            let _ = kill_process(pid_of(&child), signal);
        }
        let ran = wait(child, self.begun, patience);
        let ended = Instant::now();
        while !self.reader.is_finished() && ended.elapsed() < LAST_WORDS {
            std::thread::sleep(Duration::from_millis(1));
        }
        let err = self.said();
        match ran {
            Some(ran) => Ran { err, ..ran },
            None => panic!("the server did not end in {patience:?}; it said:\n{err}"),
        }
    }

    /// Its output on stderr so far.
    pub fn said(&self) -> String {
        self.said.lock().expect("the notes").clone()
    }

    /// As above, once the log contains these words. Another thread reads the log, so they may come after an
    /// answer.
    #[track_caller]
    pub fn says(&self, words: &str) -> String {
        let begun = Instant::now();
        loop {
            let said = self.said();
            if said.contains(words) {
                return said;
            }
            assert!(begun.elapsed() < PATIENCE, "it does not say {words:?}:\n{said}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Its statistics as they were written last.
    pub fn stats(&self) -> Value {
        let text = std::fs::read_to_string(self.place.join("stats.json")).expect("the statistics");
        serde_json::from_str(&text).expect("JSON")
    }

    /// The most memory it ever had, in KiB.
    pub fn memory_kib_max(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).expect("it runs");
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a peak");
        line.split_whitespace().next().and_then(|number| number.parse().ok()).expect("a number")
    }

    /// Its open files.
    pub fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.pid())).expect("it runs").count()
    }

    /// Whether it has this file open.
    pub fn has_open(&self, path: &str) -> bool {
        self.times_open(path) > 0
    }

    /// How often it has this file open.
    pub fn times_open(&self, path: &str) -> usize {
        let all = std::fs::read_dir(format!("/proc/{}/fd", self.pid())).expect("it runs");
        let is_it = |link: PathBuf| std::fs::read_link(link).is_ok_and(|file| file == Path::new(path));
        all.flatten().filter(|link| is_it(link.path())).count()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            drop(child.kill());
            drop(child.wait());
        }
    }
}

/// Another program's server, `qemu-nbd` or `nbdkit`: ended with the test.
pub struct Foreign {
    child: Child,
    _place: Dir,
    socket: PathBuf,
}

impl Foreign {
    /// Starts it with arguments made from the path of its socket, and waits until the socket is there.
    #[track_caller]
    pub fn start(program: &str, arguments: impl FnOnce(&str) -> Vec<String>) -> Self {
        let place = Dir::short();
        let socket = place.join("nbd");
        let child = std::process::Command::new(program)
            .args(arguments(path_text(&socket)))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap_or_else(|error| panic!("{program}: {error}"));
        let mut server = Self { child, _place: place, socket };
        let begun = Instant::now();
        while std::os::unix::net::UnixStream::connect(&server.socket).is_err() {
            let ended = server.child.try_wait().expect("a child");
            assert!(ended.is_none(), "{program} ended: {ended:?}");
            assert!(begun.elapsed() < PATIENCE, "{program} does not listen");
            std::thread::sleep(Duration::from_millis(10));
        }
        server
    }

    pub fn socket(&self) -> &Path {
        &self.socket
    }

    pub fn uri(&self, name: &str) -> String {
        format!("nbd+unix:///{name}?socket={}", path_text(&self.socket))
    }

    /// Lets it end in good order.
    pub fn stop(mut self) {
        let _ = kill_process(pid_of(&self.child), Signal::TERM);
        drop(self.child.wait());
    }

    pub fn kill(mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}
