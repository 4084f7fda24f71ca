//! A kernel that refuses to enter an io_uring, once or for ever.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::MIB;
use super::support::dir::Dir;
use super::support::program::{Ran, has, pid_of, skipped, vellum, wait};
use super::support::{noise, until};

const PATIENCE: Duration = Duration::from_secs(120);

/// A copy while the kernel refuses, from some entry on or for some entries.
fn copying(dir: &Dir, fault: &str) -> Command {
    std::fs::write(dir.join("in.raw"), noise(8 * MIB, 71)).expect("a disk");
    let mut command = Command::new("strace");
    command.args(["-f", "-o", "/dev/null", "-e", "trace=io_uring_enter"]);
    command.args(["-e", &format!("inject=io_uring_enter:error={fault}")]);
    command.arg(env!("CARGO_BIN_EXE_vellum")).args([
        "convert",
        "-q",
        "-f",
        "raw",
        "-O",
        "qcow2",
        "in.raw",
        "out.qcow2",
    ]);
    command.current_dir(dir.path()).env("VELLUM_CONFIG", "/dev/null").env("RUST_BACKTRACE", "1");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn end_of(mut command: Command) -> Ran {
    let begun = Instant::now();
    wait(command.spawn().expect("strace"), begun, PATIENCE).expect("it ends by itself")
}

fn can_refuse() -> bool {
    let has_ring =
        std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled").is_ok_and(|text| text.trim() == "0");
    let can = has("strace") && has_ring;
    if !can {
        skipped("no strace, or no io_uring");
    }
    can
}

#[test]
fn a_ring_that_is_refused_for_good_is_an_error() {
    if !can_refuse() {
        return;
    }
    let dir = Dir::new("refused-ring");
    for fault in
        ["EIO:when=2+", "EINVAL:when=3+", "EIO:when=4+", "EBADF:when=1+", "ENOMEM:when=3+", "EAGAIN:when=2+"]
    {
        let ran = end_of(copying(&dir, fault));
        assert_eq!(ran.code, 1, "{fault}: {ran:?}");
        assert!(!ran.err.contains("panicked") && !ran.err.contains("backtrace"), "{fault}: {ran:?}");
        assert!(ran.err.starts_with("vellum convert: ") && ran.err.contains("io_uring"), "{fault}: {ran:?}");
        assert_eq!(dir.names(), ["in.raw"], "{fault}");
    }
}

#[test]
fn a_ring_that_is_refused_for_a_while_is_entered_again() {
    if !can_refuse() {
        return;
    }
    let dir = Dir::new("refused-for-a-while");
    for fault in ["ENOMEM:when=2..40", "EAGAIN:when=3..30", "EBUSY:when=2..30"] {
        let ran = end_of(copying(&dir, fault));
        assert_eq!((ran.code, ran.err.as_str()), (0, ""), "{fault}: {ran:?}");
        let [one, other] = ["in.raw", "out.qcow2"].map(|name| dir.text(name));
        vellum(&["compare", "-f", "raw", "-F", "qcow2", &one, &other]).answer();
        std::fs::remove_file(&other).expect("a copy");
    }
}

#[test]
fn signals_end_a_command_whose_ring_is_refused() {
    if !can_refuse() {
        return;
    }
    for signal in [rustix::process::Signal::INT, rustix::process::Signal::TERM] {
        let dir = Dir::new("refused-ring-signal");
        let begun = Instant::now();
        let child = copying(&dir, "ENOMEM:when=3+").spawn().expect("strace");
        let strace = pid_of(&child);
        let children = format!("/proc/{0}/task/{0}/children", strace.as_raw_nonzero());
        let program = || -> Option<i32> {
            let text = std::fs::read_to_string(&children).ok()?;
            text.split_whitespace().next()?.parse().ok()
        };
        // It has a draft.
        until("the copy begins", || program().is_some() && dir.names().len() > 1);
        let program = program().and_then(rustix::process::Pid::from_raw).expect("the program");
        rustix::process::kill_process(program, signal).expect("it runs");
        let ran = wait(child, begun, PATIENCE).expect("it ends by the signal");
        assert_eq!(ran.code, 130, "{ran:?}");
        assert!(ran.err.contains("interrupted"), "{ran:?}");
        assert_eq!(dir.names(), ["in.raw"]);
    }
}
