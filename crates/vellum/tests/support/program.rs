//! Programs that run to their end: ours, and those of others.

use std::ffi::OsStr;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::until;

/// Nothing here runs longer; what does hangs, and is killed.
pub const PATIENCE: Duration = Duration::from_secs(180);

/// Prints why something is not tested here.
#[allow(clippy::print_stderr, reason = "a test that is skipped says why")]
pub fn skipped(reason: &str) {
    eprintln!("skipped: {reason}");
}

/// Ends the test, with the reason, unless all of these programs are installed.
#[macro_export]
macro_rules! requires {
    ($($program:expr),+) => {
        $(if !$crate::support::program::has($program) {
            return $crate::support::program::skipped(&format!("{} is not installed", $program));
        })+
    };
}

/// Whether the program is there.
pub fn has(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .any(|dir| dir.join(program).is_file())
}

pub fn is_root() -> bool {
    std::fs::metadata("/proc/self").is_ok_and(|facts| facts.uid() == 0)
}

/// How a program ended, and its output.
#[derive(Debug, Clone)]
pub struct Ran {
    /// Its exit code; for a signal, as a shell reports it.
    pub code: i32,
    pub out: String,
    pub err: String,
    pub took: Duration,
}

impl Ran {
    pub fn of(output: Output, took: Duration) -> Self {
        use std::os::unix::process::ExitStatusExt;
        let code = output.status.code().or(output.status.signal().map(|signal| 128 + signal));
        Self {
            code: code.expect("a program ends by itself or by a signal"),
            out: String::from_utf8_lossy(&output.stdout).into_owned(),
            err: String::from_utf8_lossy(&output.stderr).into_owned(),
            took,
        }
    }

    /// What it answered, when it succeeded.
    #[track_caller]
    pub fn answer(self) -> String {
        assert_eq!(self.code, 0, "stdout:\n{}\nstderr:\n{}", self.out, self.err);
        self.out
    }

    #[track_caller]
    pub fn json(self) -> serde_json::Value {
        let text = self.answer();
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error} in\n{text}"))
    }
}

/// Our own program, with an environment that does not mention images, and without the configuration of this
/// machine.
pub fn vellum_command() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vellum"));
    command.env_remove("VELLUM_ALLOW_DIRS").env_remove("VELLUM_LOG").env("VELLUM_CONFIG", "/dev/null");
    command
}

pub fn vellum(arguments: &[&str]) -> Ran {
    let mut command = vellum_command();
    command.args(arguments);
    finish(command, None)
}

/// Runs a program to its end.
pub fn run<S: AsRef<OsStr>>(program: &str, arguments: &[S]) -> Ran {
    let mut command = Command::new(program);
    command.args(arguments);
    finish(command, None)
}

/// Runs a program to success, and returns its output.
#[track_caller]
pub fn succeed<S: AsRef<OsStr> + std::fmt::Debug>(program: &str, arguments: &[S]) -> String {
    let ran = run(program, arguments);
    assert_eq!(ran.code, 0, "{program} {arguments:?}:\n{}\n{}", ran.out, ran.err);
    ran.out
}

/// Runs a command to its end; one that hangs is killed, and the test with it.
pub fn finish(mut command: Command, input: Option<&str>) -> Ran {
    let begun = Instant::now();
    command.stdin(if input.is_some() { Stdio::piped() } else { Stdio::null() });
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("can't run {command:?}: {error}"));
    if let Some(input) = input {
        let mut stdin = child.stdin.take().expect("it was asked for");
        stdin.write_all(input.as_bytes()).expect("the program reads what it is told");
    }
    wait(child, begun, PATIENCE).unwrap_or_else(|| panic!("{command:?} did not end in {PATIENCE:?}"))
}

/// Waits for a program, at most this long; then kills it, and returns nothing.
pub fn wait(child: Child, begun: Instant, patience: Duration) -> Option<Ran> {
    let pid = pid_of(&child);
    let (done, watched) = mpsc::channel::<()>();
    let watchdog = std::thread::spawn(move || {
        let hangs = watched.recv_timeout(patience) == Err(mpsc::RecvTimeoutError::Timeout);
        if hangs {
            let _ = kill_process(pid, Signal::KILL);
        }
        hangs
    });
    let output = child.wait_with_output().expect("a child can be waited for");
    drop(done);
    let hung = watchdog.join().expect("the watchdog lives");
    (!hung).then(|| Ran::of(output, begun.elapsed()))
}

/// Waits until there is no lock on a file. The kernel releases those of a killed io_uring some time after the
/// process is gone, and QEMU does not wait for that; our own programs do, for a second.
#[track_caller]
pub fn until_let_go(path: impl AsRef<Path>) {
    let Ok(facts) = std::fs::metadata(path) else { return };
    let (major, minor) = (rustix::fs::major(facts.dev()), rustix::fs::minor(facts.dev()));
    let file = format!("{major:02x}:{minor:02x}:{}", facts.ino());
    until("nobody has a lock on it", || {
        let locks = std::fs::read_to_string("/proc/locks").unwrap_or_default();
        !locks.lines().any(|line| line.contains("OFDLCK") && line.split(' ').any(|word| word == file))
    });
}

pub fn pid_of(child: &Child) -> Pid {
    Pid::from_raw(i32::try_from(child.id()).expect("a process number")).expect("not zero")
}

/// Runs `qemu-io` on an image with these commands, each of which must succeed.
#[track_caller]
pub fn qemu_io(arguments: &[&str], commands: &[String]) -> String {
    let mut command = Command::new("qemu-io");
    command.args(arguments);
    for line in commands {
        command.args(["-c", line]);
    }
    let ran = finish(command, None);
    let failed = ran.out.contains("failed") || ran.out.contains("Invalid") || ran.out.contains("rror");
    assert!(ran.code == 0 && !failed, "qemu-io {arguments:?} {commands:?}:\n{}\n{}", ran.out, ran.err);
    ran.out
}

/// The disk of an image, as QEMU reads it.
#[track_caller]
pub fn qemu_dump(image: &Path, format: &str, snapshot: Option<&str>) -> Vec<u8> {
    let raw = image.with_extension("dump");
    let mut arguments = vec!["convert", "-f", format, "-O", "raw"];
    if let Some(snapshot) = snapshot {
        arguments.extend(["-l", snapshot]);
    }
    arguments.extend([path_text(image), path_text(&raw)]);
    succeed("qemu-img", &arguments);
    let bytes = std::fs::read(&raw).expect("the dump");
    std::fs::remove_file(&raw).expect("the dump");
    bytes
}

pub fn path_text(path: &Path) -> &str {
    path.to_str().expect("a path that is text")
}
