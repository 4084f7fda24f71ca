//! Backups by a bitmap: of a closed image, of a disk that guests write meanwhile, and with kills in between. What is restored from the chain
//! of backups is what the disk was.

use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use vellum_core::Random;

use super::Controlled;
use super::support::client::Client;
use super::support::dir::Dir;
use super::support::program::{finish, run, vellum, vellum_command};
use super::support::{noise, scale};
use crate::requires;

#[allow(clippy::print_stderr, reason = "the counts are what the test is for")]
fn report(what: &str) {
    eprintln!("{what}");
}

const SIZE: usize = 24 << 20;

/// What an image reads as.
fn content(dir: &Dir, image: &str) -> Vec<u8> {
    let raw = dir.text("content.raw");
    vellum(&["convert", "-q", "-O", "raw", image, &raw]).answer();
    std::fs::read(&raw).expect("a copy")
}

fn write_some(image: &str, random: &mut Random) {
    let server = Controlled::start(&["-f", "qcow2", image]);
    let mut client = server.client("");
    for number in 0..4 {
        let at = random.index(SIZE / 4096) * 4096;
        let len = (4096 * (1 + random.index(40))).min(SIZE - at);
        match number {
            0 => client.zero(at as u64, u32::try_from(len).expect("short"), 0).expect("zeros"),
            _ => client.write(at as u64, &noise(len, random.below(u64::MAX)), 0).expect("a write"),
        };
    }
    client.disconnect();
    server.server.stop();
}

fn new_image(dir: &Dir) -> String {
    let (raw, image) = (dir.text("disk.raw"), dir.text("disk.qcow2"));
    std::fs::write(&raw, noise(SIZE, 77)).expect("a disk");
    vellum(&["convert", "-q", "-O", "qcow2", "-o", "journal=on", &raw, &image]).answer();
    vellum(&["bitmap", "--add", &image, "daily"]).answer();
    image
}

#[test]
fn a_chain_of_backups_is_what_the_disk_was() {
    let dir = Dir::new("backups");
    let image = new_image(&dir);
    let mut random = Random::from_seed(31);
    let all =
        vellum(&["backup", "--output", "json", "--bitmap", "daily", &image, &dir.text("0.qcow2")]).json();
    assert_eq!(all["bytes-copied"], SIZE);
    for number in 1..5 {
        write_some(&image, &mut random);
        let (before, target) =
            (dir.text(&format!("{}.qcow2", number - 1)), dir.text(&format!("{number}.qcow2")));
        let line = [
            "backup",
            "--output",
            "json",
            "--bitmap",
            "daily",
            "--incremental",
            "-B",
            &before,
            "-F",
            "qcow2",
            &image,
            &target,
        ];
        let done = vellum(&line).json();
        let marked = done["bytes-marked"].as_u64().expect("a number");
        assert!(marked > 0 && marked < 3 << 20, "{done}");
        assert!(content(&dir, &target) == content(&dir, &image), "backup {number}");
        let again = vellum(&[
            "backup",
            "--output",
            "json",
            "--bitmap",
            "daily",
            "--incremental",
            "-B",
            &before,
            "-F",
            "qcow2",
            &image,
            &dir.text("nothing.qcow2"),
        ])
        .json();
        assert_eq!(again["bytes-marked"], 0, "it began anew");
        std::fs::remove_file(dir.join("nothing.qcow2")).expect("the image");
        assert_eq!(vellum(&["check", "-q", &image]).code, 0);
    }
    for (line, word) in [
        (&["backup", "--bitmap", "none", &image, &dir.text("x")][..], "there is no bitmap named none"),
        (&["backup", "--bitmap", "daily", &image], "TARGET"),
        (&["backup", "--bitmap", "daily", &dir.text("content.raw"), &dir.text("x")], "raw"),
    ] {
        let ran = vellum(line);
        assert!(ran.code == 1 && ran.err.contains(word), "{line:?}: {ran:?}");
    }
    assert!(!dir.join("x").exists());
}

/// A backup that is killed leaves the bitmap as it was, or a whole backup: the next one has all that is missing.
#[test]
fn a_backup_that_is_killed_is_made_again() {
    let dir = Dir::new("backups");
    let image = new_image(&dir);
    let mut random = Random::from_seed(32);
    let mut last = dir.text("0.qcow2");
    vellum(&["backup", "-q", "--bitmap", "daily", &image, &last]).answer();
    let (mut killed, mut ended) = (0, 0);
    for number in 1..12 * scale() {
        write_some(&image, &mut random);
        let target = dir.text(&format!("{number}.qcow2"));
        let line = [
            "backup",
            "-q",
            "--bitmap",
            "daily",
            "--incremental",
            "-B",
            &last,
            "-F",
            "qcow2",
            &image,
            &target,
        ];
        let mut child = vellum_command().args(line).stdin(Stdio::null()).spawn().expect("vellum");
        std::thread::sleep(Duration::from_millis(random.below(60)));
        let _ = child.kill();
        child.wait().expect("it ends");
        super::support::program::until_let_go(&image);
        // A backup that has its name is whole. One that has none is made again.
        if std::path::Path::new(&target).exists() {
            ended += 1;
        } else {
            killed += 1;
            vellum(&line).answer();
        }
        assert!(content(&dir, &target) == content(&dir, &image), "backup {number}");
        assert_eq!(vellum(&["check", "-q", &image]).code, 0, "backup {number}");
        last = target;
    }
    report(&format!("{killed} backups were killed and made again, {ended} had ended"));
}

/// A disk that is cut off and grows again has zeros where the backup has data: they are in the next one. All names are bare ones.
#[test]
fn what_was_cut_off_is_in_the_next_backup() {
    let dir = Dir::new("backups");
    new_image(&dir);
    let here = |line: &[&str]| {
        let mut command = vellum_command();
        command.args(line).current_dir(dir.join(""));
        finish(command, None)
    };
    here(&["backup", "-q", "--bitmap", "daily", "disk.qcow2", "monday.qcow2"]).answer();
    here(&["resize", "-q", "--shrink", "disk.qcow2", "9000448"]).answer();
    here(&["resize", "-q", "disk.qcow2", "24M"]).answer();
    let line =
        ["backup", "--bitmap", "daily", "--incremental", "-B", "monday.qcow2", "-F", "qcow2", "disk.qcow2"];
    here(&[&line[..], &["tuesday.qcow2"]].concat()).answer();
    assert_eq!(here(&["compare", "disk.qcow2", "tuesday.qcow2"]).code, 0);
    let again = here(&[&line[..], &["tuesday.qcow2"]].concat());
    assert!(again.code == 1 && again.err.contains("replaces no file"), "{again:?}");
    assert_eq!(here(&["compare", "disk.qcow2", "tuesday.qcow2"]).code, 0);
}

/// The Nth call of the host fails, or the command is killed in it, also after the bitmap has begun anew: where there is an image, it is a
/// whole backup, and the same command again does not replace it. Otherwise the same command makes it.
#[test]
fn a_backup_that_failed_loses_nothing_when_it_is_repeated() {
    requires!("strace");
    let dir = Dir::new("backups");
    let image = new_image(&dir);
    let (before, target, kept) =
        (dir.text("monday.qcow2"), dir.text("tuesday.qcow2"), dir.text("kept.qcow2"));
    vellum(&["backup", "-q", "--bitmap", "daily", &image, &before]).answer();
    write_some(&image, &mut Random::from_seed(34));
    std::fs::copy(&image, &kept).expect("a copy");
    let line =
        ["backup", "--bitmap", "daily", "--incremental", "-B", &before, "-F", "qcow2", &image, &target];
    let (mut refused, mut repeated, mut done) = (0, 0, 0);
    let faults = ["error=EIO", "signal=KILL"];
    let calls = [("pwritev", 8), ("pwrite64", 4), ("fdatasync", 8), ("ftruncate", 4)];
    for ((call, most), fault) in calls.iter().flat_map(|call| faults.map(|fault| (*call, fault))) {
        for number in 1..=most {
            let when = format!("{call} {number}: {fault}");
            std::fs::copy(&kept, &image).expect("a copy");
            let _ = std::fs::remove_file(&target);
            let mut command = std::process::Command::new("strace");
            command.args(["-f", "-o", "/dev/null", "-e", &format!("trace={call},io_uring_setup")]);
            command.args(["-e", "inject=io_uring_setup:error=EPERM"]);
            command.args(["-e", &format!("inject={call}:{fault}:when={number}")]);
            command.arg(env!("CARGO_BIN_EXE_vellum")).args(line).env("VELLUM_CONFIG", "/dev/null");
            let ran = finish(command, None);
            super::support::program::until_let_go(&image);
            let is_there = std::path::Path::new(&target).exists();
            assert!(ran.code != 0 || is_there, "{when}: {ran:?}");
            assert!(!is_there || ran.code == 0 || fault.starts_with("signal"), "{when}: {ran:?}");
            if ran.code == 0 {
                done += 1;
            } else {
                let mut again = vellum(&line);
                if again.code != 0 && !again.err.contains("replaces no file") {
                    vellum(&["recover", &image]);
                    again = vellum(&line);
                }
                match is_there {
                    true => assert!(
                        again.code == 1 && again.err.contains("replaces no file"),
                        "{when}: {again:?}"
                    ),
                    false => assert_eq!(again.code, 0, "{when}: {again:?}"),
                }
                refused += usize::from(is_there);
                repeated += usize::from(!is_there);
            }
            let same = vellum(&["compare", "-q", &image, &target]);
            assert_eq!(same.code, 0, "{when}: {same:?}");
        }
    }
    report(&format!("{repeated} backups were made again, {refused} were there already, {done} ended well"));
    assert!(repeated > 0);
}

/// Guests write all the time: each backup is what the disk was at one moment, and the last one, with nobody writing, is the disk.
#[test]
fn a_disk_is_backed_up_while_guests_write() {
    let dir = Dir::new("backups");
    let image = new_image(&dir);
    let served = Controlled::start(&["-f", "qcow2", &image]);
    let is_over = AtomicBool::new(false);
    let mut last = dir.text("0.qcow2");
    let first = served.json("backup", &["--bitmap", "daily", &last]);
    assert_eq!(first["bytes-copied"], SIZE);
    // One block after the other: at any moment the first is as new as the second, or one step newer.
    let guest = |mut client: Client| {
        let mut random = Random::from_seed(33);
        let mut count = 0_u64;
        while !is_over.load(Ordering::Relaxed) {
            count += 1;
            client.write(0, &count.to_be_bytes().repeat(512), 0).expect("a write");
            client.write(SIZE as u64 - 4096, &count.to_be_bytes().repeat(512), 0).expect("a write");
            let at = 4096 * (1 + random.index(SIZE / 4096 - 3));
            client.write(at as u64, &noise(4096, count), 0).expect("a write");
        }
        client.disconnect();
        count
    };
    let mut counts = Vec::new();
    let written = std::thread::scope(|scope| {
        let guest = scope.spawn(|| guest(served.client("")));
        for number in 1..=4 * scale() {
            std::thread::sleep(Duration::from_millis(200));
            let target = dir.text(&format!("{number}.qcow2"));
            served
                .json("backup", &["--bitmap", "daily", "--incremental", "-B", &last, "-F", "qcow2", &target]);
            let bytes = content(&dir, &target);
            let count = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
            let (newer, older) = (count(0), count(SIZE - 4096));
            assert!(
                newer == older || newer == older + 1,
                "backup {number} is of no moment: {newer} and {older}"
            );
            assert!(bytes[..4096].chunks(8).all(|chunk| chunk == &bytes[..8]), "a torn block");
            counts.push(newer);
            last = target;
        }
        is_over.store(true, Ordering::Relaxed);
        guest.join().expect("the guest")
    });
    assert!(counts.is_sorted() && *counts.last().expect("some") > 0, "{counts:?}");
    let target = dir.text("last.qcow2");
    served.json("backup", &["--bitmap", "daily", "--incremental", "-B", &last, "-F", "qcow2", &target]);
    served.refuses(
        &["there is no bitmap named none", "--add"],
        "backup",
        &["--bitmap", "none", &dir.text("x")],
    );
    served.server.stop();
    assert!(content(&dir, &target) == content(&dir, &image));
    report(&format!("{} backups beside a guest that wrote {} times", counts.len() + 2, 3 * written));
}

/// NBD clients see what is marked, with short and with long headers.
#[test]
fn clients_query_what_is_marked() {
    requires!("nbdinfo", "qemu-img");
    let dir = Dir::new("backups");
    let image = new_image(&dir);
    vellum(&["bitmap", "--add", "--disable", "-g", "4k", &image, "old"]).answer();
    let server = Controlled::start(&["-f", "qcow2", &image]);
    let uri = server.server.uri("");
    let runs = |bitmap: &str| {
        let map = run("nbdinfo", &["--json", &format!("--map=qemu:dirty-bitmap:{bitmap}"), &uri]).json();
        let all = map.as_array().expect("runs").clone();
        let dirty = all.iter().filter(|run| run["type"] == 1);
        dirty
            .map(|run| (run["offset"].as_u64().unwrap(), run["length"].as_u64().unwrap()))
            .collect::<Vec<_>>()
    };
    assert_eq!(runs("daily"), []);
    let mut client = server.client("");
    client.write(70_000, &[1; 10], 0).expect("a write");
    client.zero(10 << 20, 100_000, 0).expect("zeros");
    assert_eq!(runs("daily"), [(65_536, 65_536), (10 << 20, 131_072)]);
    assert_eq!(runs("old"), []);
    let listed = run("nbdinfo", &["--json", &uri]).json();
    let contexts = listed["exports"][0]["contexts"].to_string();
    assert!(
        contexts.contains("qemu:dirty-bitmap:daily") && contexts.contains("qemu:dirty-bitmap:old"),
        "{contexts}"
    );
    let theirs = format!(
        "driver=nbd,server.type=unix,server.path={},x-dirty-bitmap=qemu:dirty-bitmap:daily",
        super::support::program::path_text(&server.server.socket())
    );
    let map = run("qemu-img", &["map", "--output=json", "--image-opts", &theirs]).json();
    let dirty = map.as_array().expect("runs").iter().filter(|run| run["data"] == false).count();
    assert_eq!(dirty, 2, "QEMU shows what is marked as no data: {map}");
    client.disconnect();
    server.server.stop();
}

/// A server was killed, and what it wrote to the data file is in the page cache only. The disk reads it, so a copy has it: before the image
/// says that nothing has changed since, or that it was closed, the data file is flushed. Seen at the system calls.
#[test]
fn a_data_file_is_flushed_before_the_image_relies_on_it() {
    requires!("strace");
    let dir = Dir::new("backups");
    let (image, data) = (dir.text("disk.qcow2"), dir.text("data"));
    let log = dir.text("calls");
    let clear = ["bitmap", "--clear", &image, "daily"];
    let allowed = ["bitmap", "--clear", "--data-file", &data, &image, "daily"];
    let lines: [&[&str]; 4] = [&clear, &allowed, &["recover", &image], &["check", "-q", "-r", "all", &image]];
    for line in lines {
        let _ = (std::fs::remove_file(&image), std::fs::remove_file(&data));
        let options = format!("data_file={data}");
        vellum(&["create", "-q", "-f", "qcow2", "-o", &options, &image, "4M"]).answer();
        vellum(&["bitmap", "--add", &image, "daily"]).answer();
        let server = Controlled::start(&["-f", "qcow2", "--data-file", &data, &image]);
        let mut client = server.client("");
        client.write(1 << 20, &[1; 4096], 0).expect("a write");
        client.flush().expect("a flush");
        client.write(1 << 20, &[2; 4096], 0).expect("a write");
        server.server.kill();
        super::support::program::until_let_go(&image);
        super::support::program::until_let_go(&data);
        let mut command = std::process::Command::new("strace");
        command.args(["-f", "-y", "-qq", "-o", &log, "-e", "inject=io_uring_setup:error=EPERM"]);
        command.args(["-e", "trace=io_uring_setup,pwrite64,pwritev,pwritev2,fdatasync,fsync"]);
        command.arg(env!("CARGO_BIN_EXE_vellum")).args(line).env("VELLUM_CONFIG", "/dev/null");
        finish(command, None).answer();
        let calls = std::fs::read_to_string(&log).expect("the log");
        let first = |call: &str, file: &str| {
            let is_it = |line: &str| line.contains(call) && line.contains(&format!("{file}>"));
            calls.lines().position(is_it)
        };
        let flushed = first("sync(", &data).unwrap_or_else(|| panic!("{line:?}: not flushed:\n{calls}"));
        let changed = first("sync(", &image).unwrap_or_else(|| panic!("{line:?}: not changed:\n{calls}"));
        assert!(flushed < changed, "{line:?}: {calls}");
    }
    // Elsewhere than beside the image a data file is one that the user names.
    let elsewhere = Dir::new("backups");
    let other = elsewhere.text("data");
    let options = format!("data_file={other}");
    std::fs::remove_file(&image).expect("it is there");
    vellum(&["create", "-q", "-f", "qcow2", "-o", &options, &image, "4M"]).answer();
    let refused = vellum(&["bitmap", "--add", &image, "daily"]);
    assert!(refused.code == 1 && refused.err.contains("--allow-dir"), "{refused:?}");
    vellum(&["bitmap", "--add", "--data-file", &other, &image, "daily"]).answer();
    std::fs::remove_file(&other).expect("it is there");
    vellum(&["bitmap", "--remove", &image, "daily"]).answer();
}

/// Whoever ends the command does not want the backup: there is no new image, the bitmap is as before, and the same command makes it.
#[test]
fn a_served_backup_ends_with_its_command() {
    const LARGE: usize = 192 << 20;
    let dir = Dir::new("backups");
    let image = dir.text("disk.qcow2");
    vellum(&["create", "-q", "-f", "qcow2", &image, &LARGE.to_string()]).answer();
    vellum(&["bitmap", "--add", &image, "daily"]).answer();
    let served = Controlled::start(&["-f", "qcow2", &image]);
    let full = dir.text("0.qcow2");
    served.json("backup", &["--bitmap", "daily", &full]);
    let mut client = served.client("");
    let piece = noise(1 << 20, 41);
    for at in (0..LARGE).step_by(piece.len()) {
        client.write(at as u64, &piece, 0).expect("a write");
    }
    let target = dir.text("1.qcow2");
    let words = ["--bitmap", "daily", "--incremental", "-B", &full, "-F", "qcow2", &target];
    let mut stopped = 0;
    // The first ends before any disk has been copied, however fast.
    for millis in [2, 10, 20, 50, 100] {
        let mut command = vellum_command();
        command.args(["backup", "--control", &served.socket]).args(words);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("it starts");
        std::thread::sleep(Duration::from_millis(millis));
        let signal =
            if millis % 20 == 0 { rustix::process::Signal::INT } else { rustix::process::Signal::KILL };
        let is_over = child.try_wait().expect("a child").is_some();
        let _ = rustix::process::kill_process(super::support::program::pid_of(&child), signal);
        let said = child.wait_with_output().expect("a child").stderr;
        // Until nobody makes one any more. It may not have begun when its command ended.
        super::support::until("the backup is given up, and its draft removed", || {
            let tried = served.ask("resize", &[&LARGE.to_string()]);
            let is_draft = |name: &String| name.contains(".vellum-");
            !tried.err.contains("a backup of it is being made") && !dir.names().iter().any(is_draft)
        });
        if std::path::Path::new(&target).exists() {
            break;
        }
        assert!(!is_over, "{}", String::from_utf8_lossy(&said));
        stopped += 1;
    }
    if !std::path::Path::new(&target).exists() {
        let done = served.json("backup", &words);
        assert!(done["bytes-marked"].as_u64().expect("a number") >= LARGE as u64, "{done}");
    }
    client.disconnect();
    served.server.stop();
    assert!(content(&dir, &target) == content(&dir, &image));
    report(&format!("{stopped} backups were given up with their commands"));
    assert!(stopped > 0);
}

/// Whether a thread of the process is in this call.
fn waits_in_fsync(pid: &str) -> bool {
    let number = if cfg!(target_arch = "x86_64") { "74 " } else { "82 " };
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).expect("it runs");
    let calls =
        threads.flatten().filter_map(|thread| std::fs::read_to_string(thread.path().join("syscall")).ok());
    calls.into_iter().any(|call| call.starts_with(number))
}

/// All of the disk is copied, and the host takes its time to make it durable: whoever ends the command then does not get a backup.
#[test]
fn a_backup_whose_command_was_killed_before_the_end_gets_no_name() {
    requires!("strace");
    let dir = Dir::new("backups");
    let image = new_image(&dir);
    let served = Controlled::start(&["-f", "qcow2", &image]);
    let (target, log) = (dir.text("0.qcow2"), dir.text("calls"));
    let pid = served.server.pid().to_string();
    let slow = ["-f", "-p", &pid, "-o", &log, "-e", "trace=fsync", "-e", "inject=fsync:delay_enter=5000000"];
    let mut strace = std::process::Command::new("strace");
    let mut strace =
        strace.args(slow).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it starts");
    super::support::until("the server is watched", || {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
        status.lines().any(|line| line.starts_with("TracerPid:") && !line.ends_with("\t0"))
    });
    let mut command = vellum_command();
    command.args(["backup", "--control", &served.socket, "--bitmap", "daily", &target]);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it starts");
    let is_draft = |name: &String| name.contains(".vellum-");
    super::support::until("there is a draft", || dir.names().iter().any(is_draft));
    super::support::until("the draft is being made durable", || waits_in_fsync(&pid));
    child.kill().expect("it waits for the answer");
    child.wait().expect("a child");
    super::support::until("the draft is removed", || !dir.names().iter().any(is_draft));
    assert!(!std::path::Path::new(&target).exists(), "a backup that nobody waits for");
    let _ = rustix::process::kill_process(
        super::support::program::pid_of(&strace),
        rustix::process::Signal::TERM,
    );
    strace.wait().expect("a child");
    assert!(
        std::fs::read_to_string(&log).expect("a log").contains("fsync("),
        "the draft is made durable first"
    );
    // The bitmap has everything still.
    let done = served.json("backup", &["--bitmap", "daily", &target]);
    assert!(done["bytes-marked"].as_u64().expect("a number") >= SIZE as u64, "{done}");
    served.server.stop();
    assert!(content(&dir, &target) == content(&dir, &image));
}

/// A signal that comes while the last data is copied is one that comes before the end.
#[test]
fn a_backup_that_is_interrupted_is_none() {
    requires!("strace");
    let dir = Dir::new("backups");
    let image = new_image(&dir);
    let (target, log) = (dir.text("0.qcow2"), dir.text("calls"));
    let mut interrupted = 0;
    for number in [3, 12, 20, 23] {
        let mut command = std::process::Command::new("strace");
        command.args(["-f", "-o", &log, "-e", "trace=pwritev,pwrite64,io_uring_setup"]);
        command.args(["-e", "inject=io_uring_setup:error=EPERM"]);
        command.args(["-e", &format!("inject=pwritev:signal=INT:when={number}")]);
        command.arg(env!("CARGO_BIN_EXE_vellum")).args(["backup", "--bitmap", "daily", &image, &target]);
        command.env("VELLUM_CONFIG", "/dev/null");
        let ran = finish(command, None);
        super::support::program::until_let_go(&image);
        let is_there = std::path::Path::new(&target).exists();
        assert_eq!(ran.code, if is_there { 0 } else { 130 }, "{number}: {ran:?}");
        if is_there {
            assert!(
                content(&dir, &target) == content(&dir, &image),
                "{number}: it lacks what was not copied"
            );
            std::fs::remove_file(&target).expect("it is there");
        }
        interrupted += usize::from(!is_there);
    }
    assert!(interrupted > 0);
}

/// A file with a secret, and `--secret …` for it.
fn secret(dir: &Dir, name: &str) -> String {
    let file = dir.text(name);
    std::fs::write(&file, name).expect("a file");
    format!("id={name},file={file}")
}

/// Whether there is readable text of the disk in a file.
fn is_readable(image: &str) -> bool {
    std::fs::read(image).expect("an image").windows(9).any(|at| at == b"readable ")
}

/// Full and incremental backups of an encrypted disk that is served: encrypted with a secret of the client's or of the server's, restored
/// and compared; and in plain text only where that is asked for.
#[test]
fn backups_of_an_encrypted_disk_are_encrypted() {
    let dir = Dir::new("backups");
    let (image, raw) = (dir.text("disk.qcow2"), dir.text("disk.raw"));
    let (disk, backup, own) = (secret(&dir, "disk"), secret(&dir, "backup"), secret(&dir, "own"));
    let encrypted =
        |name: &str| format!("encrypt.format=luks,encrypt.key-secret={name},encrypt.iter-time=10");
    let marks: Vec<u8> = b"readable ".iter().copied().cycle().take(9 << 10).collect();
    let mut bytes = noise(4 << 20, 5);
    bytes[..marks.len()].copy_from_slice(&marks);
    std::fs::write(&raw, &bytes).expect("a disk");
    vellum(&["convert", "-q", "-O", "qcow2", "--secret", &disk, "-o", &encrypted("disk"), &raw, &image])
        .answer();
    vellum(&["bitmap", "--add", &image, "daily"]).answer();
    let served = Controlled::start(&["-f", "qcow2", "--secret", &disk, "--secret", &own, &image]);
    let mut guest = served.client("");
    let mut write = |at: usize| {
        guest.write(at as u64, &marks, 0).expect("it is written");
        bytes[at..at + marks.len()].copy_from_slice(&marks);
        bytes.clone()
    };
    let target = |name: &str| dir.text(&format!("{name}.qcow2"));
    let (options_of_client, options_of_server) = (encrypted("backup"), encrypted("own"));

    // What is not encrypted is not made by mistake.
    let plain = target("plain");
    served.refuses(&["would not be", "--plain-text"], "backup", &["--bitmap", "daily", &plain]);
    for (rest, words) in [
        (&["-o", &*options_of_client][..], &["no secret named", "backup"][..]),
        (&["-o", &options_of_client, "--secret", "id=backup,file=/nonexistent"], &["/nonexistent"]),
        (
            &["-o", &options_of_client, "--secret", "id=backup,env=HOME"],
            &["the server reads the secret", "file="],
        ),
        (&["-o", "cluster_size=64k"], &["only the options encrypt.*"]),
        (&["-o", &options_of_client, "--plain-text"], &["--plain-text"]),
    ] {
        let line = [&["--bitmap", "daily"][..], rest, &[&plain]].concat();
        let refused = served.ask("backup", &line);
        assert!(
            refused.code == 1 && words.iter().all(|word| refused.err.contains(word)),
            "{line:?}: {refused:?}"
        );
        assert!(!std::path::Path::new(&plain).exists());
    }

    // All of it with a secret of the client's; then what has changed, with one of the server's.
    let mut versions = vec![("0", write(1 << 20), vec![&*backup])];
    let zero = target("0");
    served.json("backup", &["--bitmap", "daily", "-o", &options_of_client, "--secret", &backup, &zero]);
    versions.push(("1", write(2 << 20), vec![&*backup, &*own]));
    let one = target("1");
    let incremental = ["--bitmap", "daily", "--incremental", "-F", "qcow2", "-B"];
    // Without the secret of the backup before nothing can stand on it.
    let line = [&incremental[..], &[&zero, "-o", &options_of_server, &one]].concat();
    let refused = served.ask("backup", &line);
    assert!(refused.code == 1 && refused.err.contains("0.qcow2"), "{refused:?}");
    let line = [&incremental[..], &[&zero, "-o", &options_of_server, "--secret", &backup, &one]].concat();
    let answer = served.json("backup", &line);
    assert_eq!(answer["bytes-marked"], 64 << 10, "the refused one has taken nothing: {answer}");
    // In so many words.
    versions.push(("2", write(3 << 20), vec![&*backup, &*own]));
    let two = target("2");
    let line = [&incremental[..], &[&one, "--plain-text", "--secret", &backup, &two]].concat();
    served.json("backup", &line);
    guest.disconnect();
    served.server.stop();

    for (name, expected, secrets) in versions {
        let image = target(name);
        assert_eq!(is_readable(&image), name == "2", "{name}");
        let secrets: Vec<&str> = secrets.iter().flat_map(|secret| ["--secret", *secret]).collect();
        let restored = dir.text("restored");
        let line = [&["convert", "-q", "-O", "raw"][..], &secrets, &[&image, &restored]].concat();
        vellum(&line).answer();
        assert!(std::fs::read(&restored).expect("a copy") == expected, "backup {name}");
        vellum(&["check", "-q", &image]).answer();
        let wrong = vellum(&["convert", "-q", "-O", "raw", "--secret", &disk, &image, &restored]);
        assert_eq!(wrong.code, 1, "{name}: the secret of the disk opens no backup: {wrong:?}");
    }
    // The closed image has the same words.
    let line = ["backup", "-q", "--bitmap", "daily", "--secret", &disk, &image, &plain];
    assert!(vellum(&line).err.contains("--plain-text"));
    vellum(&[&line[..6], &["--plain-text", &image, &plain]].concat()).answer();
    assert!(is_readable(&plain));
}
