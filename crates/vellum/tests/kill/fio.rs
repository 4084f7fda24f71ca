//! fio beside the guests, with its own checksums in what it writes, and flushing as it goes.
//!
//! ```text
//!   0                          4 MiB             5 MiB             6 MiB
//!   ├── our guests, all kinds ──┼── fio, to its end, then flushed ──┼── fio, until the server is killed ──┤
//! ```
//!
//! All requests and answers of fio pass through the tap, so the model knows for each sector what it may hold.
//! What fio had finished is also verified by fio itself, after the recovery.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::support::program::{has, run, skipped, wait};

/// Where fio's part of the disk begins, in bytes.
pub const BEGIN: usize = 4 << 20;

/// Whether there is a fio that speaks NBD.
pub fn is_here() -> bool {
    if !has("fio") {
        skipped("fio is not installed");
        return false;
    }
    let speaks = run("fio", &["--enghelp"]).out.lines().any(|line| line.trim() == "nbd");
    if !speaks {
        skipped("fio was built without its nbd engine");
    }
    speaks
}

fn command(dir: &Path, socket: &Path, seed: u64) -> Command {
    let mut command = Command::new("fio");
    command.current_dir(dir).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.args([
        "--name=kill",
        "--ioengine=nbd",
        "--iodepth=8",
        "--rw=randwrite",
        "--size=1M",
        "--fsync=8",
    ]);
    command.args(["--verify=crc32c", "--verify_state_save=0"]);
    command.arg(format!("--uri=nbd+unix:///?socket={}", socket.display()));
    command.arg(format!("--randseed={seed}"));
    command
}

/// Writes all of its part once.
pub fn write(dir: &Path, socket: &Path, seed: u64) {
    let mut command = whole(command(dir, socket, seed));
    command.arg("--do_verify=0");
    finish(command);
}

/// Reads what [`write`] wrote with the same seed, and checks the checksums.
pub fn verify(dir: &Path, socket: &Path, seed: u64) {
    let mut command = whole(command(dir, socket, seed));
    command.args(["--verify_only", "--verify_fatal=1"]);
    finish(command);
}

/// Writes pieces of many lengths, again and again.
pub fn start_endless(dir: &Path, socket: &Path, seed: u64) -> Child {
    let mut command = command(dir, socket, seed);
    command.args(["--offset=5M", "--bsrange=4k-64k", "--blockalign=4k", "--do_verify=0"]);
    command.args(["--time_based", "--runtime=600"]);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().expect("fio can be started")
}

fn whole(mut command: Command) -> Command {
    command.args(["--offset=4M", "--bs=16k"]);
    command
}

fn finish(mut command: Command) {
    let child = command.spawn().expect("fio can be started");
    let ran = wait(child, std::time::Instant::now(), std::time::Duration::from_secs(120));
    let ran = ran.unwrap_or_else(|| panic!("fio does not end: {command:?}"));
    assert_eq!(ran.code, 0, "{command:?}: {}{}", ran.out, ran.err);
}
