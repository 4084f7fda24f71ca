//! Output: into pipes whose reader is gone, onto full disks, as progress.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process};
use serde_json::Value;

use super::support::client::Peer;
use super::support::dir::Dir;
use super::support::program::{Ran, finish, pid_of, run, vellum, vellum_command, wait};
use super::support::{PATIENCE, noise, patchy, until};
use super::{MIB, is_refusal};
use crate::requires;

/// A pipe without a reader.
fn closed_pipe() -> Stdio {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    writer.into()
}

/// A disk that is full.
fn full_disk() -> Stdio {
    File::options().write(true).open("/dev/full").expect("/dev/full").into()
}

/// Runs our program with its answer going there.
fn with_stdout(arguments: &[&str], stdout: Stdio) -> Ran {
    let mut command = vellum_command();
    let begun = Instant::now();
    let child = command.args(arguments).stdin(Stdio::null()).stdout(stdout).stderr(Stdio::piped());
    let child = child.spawn().expect("our program");
    wait(child, begun, PATIENCE).expect("it ends")
}

/// Each command that answers, with the exit code that it has when its answer is read. What is in braces is a
/// file.
const COMMANDS: [(&str, i32); 18] = [
    ("create -f qcow2 {new.qcow2} 1M", 0),
    ("create -f vellum {new.vlm} 1M", 0),
    ("create -o help", 0),
    ("info {disk.qcow2}", 0),
    ("info --output json {disk.qcow2}", 0),
    ("map {disk.qcow2}", 0),
    ("check {disk.qcow2}", 0),
    ("check --output json {disk.vlm}", 0),
    ("compare {disk.qcow2} {disk.vlm}", 0),
    ("compare {disk.qcow2} {other.raw}", 1),
    ("convert -p -O raw {disk.qcow2} {copy.raw}", 0),
    ("convert --output json -O raw {disk.qcow2} {copy.raw}", 0),
    ("recover {disk.qcow2}", 0),
    ("journal disable {disk.qcow2}", 0),
    ("resize {disk.vlm} +1M", 0),
    ("snapshot create {disk.vlm} monday", 0),
    ("template prepare {other.raw}", 0),
    ("serve --help", 0),
];

#[test]
fn an_answer_that_cannot_be_written_is_no_panic_and_not_mistaken_for_the_work() {
    for (line, code) in COMMANDS {
        for (is_full, stdout) in [(false, closed_pipe as fn() -> Stdio), (true, full_disk)] {
            let dir = Dir::new("output");
            let at = |name: &str| dir.text(name);
            std::fs::write(dir.join("other.raw"), patchy(MIB, 1)).expect("a disk");
            for name in ["disk.qcow2", "disk.vlm"] {
                vellum(&["create", "-q", &at(name), "1M"]).answer();
            }
            let arguments: Vec<String> = line
                .split(' ')
                .map(|word| match word.strip_prefix('{').and_then(|word| word.strip_suffix('}')) {
                    Some(name) => at(name),
                    None => word.to_owned(),
                })
                .collect();
            let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
            let ran = with_stdout(&arguments, stdout());
            assert!(!ran.err.contains("panicked"), "{line}: {ran:?}");
            if is_full {
                assert_eq!(ran.code, 1, "{line}: {ran:?}");
                let words = ["could not be written", "No space left", "the command itself succeeded"];
                assert!(words.iter().all(|word| ran.err.contains(word)), "{line}: {ran:?}");
            } else {
                assert_eq!((ran.code, ran.err.as_str()), (code, ""), "{line}: {ran:?}");
            }
            for made in ["new.qcow2", "new.vlm", "copy.raw"].iter().filter(|made| line.contains(*made)) {
                vellum(&["info", &at(made)]).answer();
            }
        }
    }
}

#[test]
fn a_message_that_cannot_be_written_changes_no_exit_code() {
    let dir = Dir::new("output");
    for stderr in [closed_pipe as fn() -> Stdio, full_disk] {
        for arguments in [&["info", &dir.text("none")][..], &["frob"], &["check", "-r", "some", "x"]] {
            let mut command = vellum_command();
            let status =
                command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr()).status();
            assert_eq!(status.expect("our program").code(), Some(1), "{arguments:?}");
        }
    }
}

/// A server writes its log to the program that started it, which may be gone, or whose disk may be full.
#[test]
fn a_server_whose_messages_cannot_be_written_serves_and_closes_its_disks() {
    for stderr in [closed_pipe as fn() -> Stdio, full_disk] {
        let dir = Dir::short();
        let (image, socket, control) = (dir.text("disk.qcow2"), dir.text("nbd"), dir.text("control"));
        vellum(&["create", "-q", &image, "1M"]).answer();
        let mut command = vellum_command();
        command.args(["serve", &image, "--nbd", &format!("unix:{socket}"), "--control", &control]);
        command.env("VELLUM_LOG", "debug").stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr());
        let child = command.spawn().expect("our program");
        let (pid, begun) = (pid_of(&child), Instant::now());
        let mut client = Peer::Unix(socket.clone().into()).wait_for("");
        client.write(0, &noise(4096, 1), 0).expect("it serves");
        vellum(&["pause", "--control", &control]).answer();
        vellum(&["resume", "--control", &control]).answer();
        kill_process(pid, Signal::TERM).expect("it is ours");
        let ran = wait(child, begun, PATIENCE).expect("it ends");
        assert_eq!(ran.code, 0, "{ran:?}");
        assert_eq!(vellum(&["info", "--output", "json", &image]).json()["dirty-flag"], false);
    }
}

#[test]
fn progress_goes_into_pipes_as_with_qemu_img() {
    requires!("qemu-img");
    let dir = Dir::new("output");
    let (source, copy) = (dir.text("source.raw"), dir.text("copy.qcow2"));
    std::fs::write(&source, noise(24 * MIB, 1)).expect("a disk");
    let parts = |out: &str| -> Vec<String> { out.split('\r').map(str::to_owned).collect() };
    let arguments = ["convert", "-p", "-f", "raw", "-O", "qcow2", &source, &copy];
    let theirs = parts(&run("qemu-img", &arguments).answer());
    let ours = parts(&vellum(&arguments).answer());
    for out in [&theirs, &ours] {
        assert_eq!(out[0], "    (0.00/100%)");
        assert_eq!(out[out.len() - 2..], ["    (100.00/100%)", "\n"]);
        assert!(out.len() > 10, "{out:?}");
    }
    let compared = vellum(&["compare", "-p", "-f", "raw", &source, &copy]).answer();
    assert!(compared.ends_with("    (100.00/100%)\r\nImages are identical.\n"), "{compared:?}");
    assert_eq!(vellum(&["convert", "-O", "raw", &copy, &dir.text("quiet.raw")]).answer(), "");
    assert_eq!(vellum(&["convert", "-p", "-q", "-O", "raw", &copy, &dir.text("quiet.raw")]).answer(), "");
}

#[test]
fn progress_and_answer_are_lines_of_json_when_both_are_wanted() {
    let dir = Dir::new("output");
    let (source, copy) = (dir.text("source.raw"), dir.text("copy.qcow2"));
    std::fs::write(&source, noise(8 * MIB, 1)).expect("a disk");
    for arguments in [
        &["convert", "-p", "--output", "json", &source, &copy][..],
        &["compare", "-p", "--output", "json", &source, &copy],
    ] {
        let out = vellum(arguments).answer();
        let lines: Vec<Value> = out.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        let (answer, progress) = lines.split_last().expect("there is an answer");
        let parts: Vec<f64> =
            progress.iter().map(|line| line["progress"].as_f64().expect("a number")).collect();
        assert!(parts.is_sorted() && parts.first() == Some(&0.0) && parts.last() == Some(&100.0), "{out}");
        assert!(progress.iter().all(|line| line["total"] == 8 * MIB), "{out}");
        assert!(answer["target"].is_string() || answer["identical"] == true, "{out}");
    }
}

/// Starts a copy; it handles signals when this returns. (A program that has just been started has not
/// installed its handlers yet.)
fn copying(arguments: &[&str]) -> Child {
    let mut command = vellum_command();
    command.arg("convert").args(arguments);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().expect("our program");
    until("it takes signals", || has_handler(child.id()));
    child
}

fn is_progress(line: &str) -> bool {
    line.starts_with("    (") && line.ends_with("/100%)")
}

#[test]
fn sigusr1_prints_how_far_the_work_is() {
    let dir = Dir::new("output");
    let (source, copy) = (dir.text("source.raw"), dir.text("copy.raw"));
    // Every zero must be written: that takes long enough to send a signal.
    vellum(&["create", "-q", &source, "2G"]).answer();
    let mut child = copying(&["-f", "raw", "-O", "raw", "-S", "0", "-m", "1", &source, &copy]);
    let pid = pid_of(&child);
    let mut lines = BufReader::new(child.stderr.take().expect("it was asked for")).lines();
    let said = std::thread::spawn(move || (lines.next(), lines));
    // A question that comes before the work has begun is not answered.
    until("it says something", || {
        let _ = kill_process(pid, Signal::USR1);
        said.is_finished()
    });
    let (line, _lines) = said.join().expect("it reads");
    let line = line.expect("it says something").expect("text");
    assert!(is_progress(&line), "{line}");
    let _ = kill_process(pid, Signal::INT);
    wait(child, Instant::now(), PATIENCE).expect("it ends");
}

#[test]
fn sigusr1_never_ends_the_work() {
    let dir = Dir::new("output");
    let (source, copy) = (dir.text("source.raw"), dir.text("copy.vlm"));
    std::fs::write(&source, noise(64 * MIB, 1)).expect("a disk");
    let child = copying(&[&source, &copy]);
    let (pid, begun) = (pid_of(&child), Instant::now());
    let asking = std::thread::spawn(move || {
        // It is not reaped meanwhile, so that its process id stays its own.
        for _ in 0..100 {
            let _ = kill_process(pid, Signal::USR1);
            std::thread::sleep(Duration::from_millis(5));
        }
    });
    asking.join().expect("it asks");
    let ran = wait(child, begun, PATIENCE).expect("it ends");
    assert_eq!((ran.code, ran.out.as_str()), (0, ""), "{ran:?}");
    assert!(ran.err.lines().all(is_progress), "{ran:?}");
    assert!(!dir.names().iter().any(|name| name.starts_with('.')), "{:?}", dir.names());
    vellum(&["compare", &source, &copy]).answer();
}

/// Whether the process has a handler for SIGUSR1.
fn has_handler(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap_or("0").trim();
    u64::from_str_radix(caught, 16).unwrap_or(0) & (1 << 9) != 0
}

#[test]
fn a_log_wish_that_is_not_understood_is_named() {
    for (wish, is_understood) in [
        ("", true),
        ("debug", true),
        ("WARN", true),
        ("off", true),
        ("warn,vellum_export=debug", true),
        ("loud", false),
        ("warn,7=x=y", false),
    ] {
        let mut command = vellum_command();
        command.args(["create", "-o", "help"]).env("VELLUM_LOG", wish);
        let ran = finish(command, None);
        assert_eq!(ran.code, 0, "{wish}: {ran:?}");
        if is_understood {
            assert_eq!(ran.err, "", "{wish}");
        } else {
            let words = ["VELLUM_LOG", wish, "is not valid", "warn is used"];
            assert!(words.iter().all(|word| ran.err.contains(word)), "{wish}: {ran:?}");
        }
    }
}

#[test]
fn names_from_outside_do_not_move_the_cursor() {
    requires!("qemu-img");
    let dir = Dir::new("output");
    let (image, base) = (dir.text("disk.qcow2"), "\u{1b}[2Jx.raw");
    std::fs::write(dir.join(base), noise(MIB, 1)).expect("a base");
    vellum(&["create", "-q", "-u", "-b", base, "-F", "raw", &image, "1M"]).answer();
    super::support::program::succeed("qemu-img", &["snapshot", "-q", "-c", "mon\nday\u{7}", &image]);
    std::fs::remove_file(dir.join(base)).expect("the base");
    let info = vellum(&["info", &image]).answer();
    let list = vellum(&["snapshot", "list", &image]).answer();
    assert!(info.contains(r"backing file: \u{1b}[2Jx.raw"), "{info}");
    for out in [&info, &list] {
        assert!(
            out.contains(r"mon\nday\u{7}") && !out.contains(|c: char| c.is_control() && c != '\n'),
            "{out}"
        );
    }
    let ran = vellum(&["map", &image]);
    is_refusal(&ran, 1, &[r"\u{1b}[2Jx.raw"], &["map"]);
    let native = dir.text("disk.vlm");
    vellum(&["create", "-q", &native, "1M"]).answer();
    super::refused(1, &["control characters", r"mon\nday"], &["snapshot", "create", &native, "mon\nday"]);
}
