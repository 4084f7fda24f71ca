//! A copy is durable when the command ends, unless nothing is to be flushed: counted at the system calls.

use std::process::Command;

use super::support::dir::Dir;
use super::support::patchy;
use super::support::program::{finish, run, skipped, vellum};
use crate::requires;

/// The calls of a conversion that concern durability, in order: without a ring, whose flushes are not seen.
fn calls(dir: &Dir, arguments: &[&str]) -> Vec<String> {
    let log = dir.text("calls");
    let mut command = Command::new("strace");
    command.args([
        "-f",
        "-qq",
        "-o",
        &log,
        "-e",
        "trace=fsync,fdatasync,sync_file_range,syncfs,/rename,io_uring_setup",
    ]);
    command.args(["-e", "inject=io_uring_setup:error=ENOSYS", env!("CARGO_BIN_EXE_vellum"), "convert", "-q"]);
    command.args(arguments);
    finish(command, None).answer();
    let text = std::fs::read_to_string(&log).expect("the log");
    let call = |line: &str| Some(line.split_once(' ')?.1.trim_start().split_once('(')?.0.to_owned());
    // Calls that strace does not know by name are not these.
    let is_meant = |call: &String| call.contains("sync") || call.starts_with("rename");
    text.lines().filter_map(call).filter(is_meant).collect()
}

#[test]
fn a_copy_is_flushed_unless_that_is_not_wanted() {
    requires!("strace");
    let dir = Dir::new("durable");
    let (source, target) = (dir.text("source.raw"), dir.text("target"));
    std::fs::write(&source, patchy(3 << 20, 4)).expect("a disk");
    for format in ["raw", "qcow2", "vellum"] {
        for is_there in [false, true] {
            let _ = is_there || std::fs::remove_file(&target).is_ok();
            let to = ["-f", "raw", "-O", format, &source, &target];
            let unsafe_calls = calls(&dir, &[&["-t", "unsafe"][..], &to].concat());
            assert!(unsafe_calls.iter().all(|call| call.starts_with("rename")), "{format}: {unsafe_calls:?}");
            assert_eq!(unsafe_calls.len(), 1, "{format}: it gets its name: {unsafe_calls:?}");
            assert_eq!(
                vellum(&["compare", "-q", "-f", "raw", "-F", format, &source, &target]).code,
                0,
                "{format}"
            );
            for mode in [&[][..], &["-t", "writeback"], &["-t", "writethrough"]] {
                let calls = calls(&dir, &[mode, &to].concat());
                let named =
                    calls.iter().position(|call| call.starts_with("rename")).expect("it gets its name");
                // Of a file without a name nobody recovers anything: one flush, of all of it.
                assert_eq!(calls[..named], ["fsync"], "{format} {mode:?}: its content: {calls:?}");
                assert_eq!(calls[named + 1..], ["fsync"], "{format} {mode:?}: its name");
            }
        }
    }
    // An image that is there.
    let fill = ["-n", "-f", "raw", "-O", "vellum", &source, &target];
    assert_eq!(calls(&dir, &[&["-t", "unsafe"][..], &fill].concat()), [""; 0]);
    assert!(calls(&dir, &fill).iter().any(|call| call == "fdatasync"));
    assert_eq!(vellum(&["convert", "-t", "sometimes", &source, &target]).code, 1);
}

/// Under the name of QEMU's program, too, nothing but the word for it gives the promise up.
#[test]
fn the_other_name_keeps_the_promise() {
    requires!("strace");
    let dir = Dir::new("durable-name");
    let (source, target, name) = (dir.text("source.raw"), dir.text("target"), dir.text("qemu-img"));
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_vellum"), &name).expect("a link");
    std::fs::write(&source, patchy(1 << 20, 4)).expect("a disk");
    for (mode, is_flushed) in [(&[][..], true), (&["-t", "writeback"], true), (&["-t", "unsafe"], false)] {
        let log = dir.text("calls");
        let traced = [
            "-f",
            "-qq",
            "-o",
            &log,
            "-e",
            "trace=fsync,fdatasync,io_uring_setup",
            "-e",
            "inject=io_uring_setup:error=ENOSYS",
        ];
        let words = [&traced[..], &[&name, "convert"], mode, &["-f", "raw", "-O", "qcow2", &source, &target]]
            .concat();
        run("strace", &words).answer();
        let text = std::fs::read_to_string(&log).expect("the log");
        assert_eq!(text.contains("sync("), is_flushed, "{mode:?}: {text}");
    }
}

/// The flags with which the target was opened for writing, each time.
fn target_flags(dir: &Dir, arguments: &[&str]) -> Vec<String> {
    let log = dir.text("opens");
    let traced =
        ["-f", "-qq", "-o", &log, "-e", "trace=/openat", env!("CARGO_BIN_EXE_vellum"), "convert", "-q"];
    run("strace", &[&traced[..], arguments].concat()).answer();
    let text = std::fs::read_to_string(&log).expect("the log");
    let is_target =
        |line: &&str| line.contains("target") && line.contains("O_RDWR") && !line.contains("O_EXCL");
    text.lines().filter(is_target).map(str::to_owned).collect()
}

#[test]
fn a_target_bypasses_the_page_cache_unless_it_is_to_stay_there() {
    requires!("strace");
    let dir = Dir::new("durable-direct");
    let (source, target) = (dir.text("source.raw"), dir.text("target"));
    std::fs::write(&source, patchy(3 << 20, 4)).expect("a disk");
    let is_able = std::process::Command::new("dd")
        .args(["if=/dev/zero", "oflag=direct", "bs=64k", "count=1", "status=none"])
        .arg(format!("of={}", dir.text("probe")))
        .status();
    if !is_able.is_ok_and(|status| status.success()) {
        return skipped("the file system of the temporary directory has no O_DIRECT");
    }
    for format in ["raw", "qcow2", "vellum"] {
        let to = ["-f", "raw", "-O", format, &source, &target];
        for (mode, is_direct) in [
            (&[][..], format != "vellum"),
            (&["-t", "none"], true),
            (&["-t", "writeback"], false),
            (&["-t", "writethrough"], false),
            (&["-t", "unsafe"], false),
        ] {
            let _ = std::fs::remove_file(&target);
            let opens = target_flags(&dir, &[mode, &to].concat());
            let found = opens.iter().any(|line| line.contains("O_DIRECT"));
            assert_eq!(found, is_direct, "{format} {mode:?}: {opens:?}");
            let same = vellum(&["compare", "-q", "-f", "raw", "-F", format, &source, &target]);
            assert_eq!(same.code, 0, "{format} {mode:?}");
        }
    }
}

/// As with a file system that has no O_DIRECT: ramfs, which any user can mount in a name space of its own.
#[test]
fn a_target_goes_through_the_page_cache_where_there_is_no_other_way() {
    requires!("unshare", "dd");
    let dir = Dir::new("durable-ramfs");
    let source = dir.text("source.raw");
    std::fs::write(&source, patchy(3 << 20, 4)).expect("a disk");
    std::fs::create_dir(dir.text("ram")).expect("a directory");
    let script = "mount -t ramfs none \"$1/ram\" 2>/dev/null || exit 77
        cd \"$1/ram\" && ! dd if=/dev/zero of=probe oflag=direct bs=64k count=1 2>/dev/null || exit 77
        for format in raw qcow2 vellum; do
            \"$2\" convert -q -f raw -O $format ../source.raw target &&
            \"$2\" compare -q -f raw -F $format ../source.raw target || exit 1
            ! \"$2\" convert -q -t none -f raw -O $format ../source.raw other 2>message &&
            grep -q 'direct I/O: its file system does not support it' message || exit 2
        done";
    let ran = run("unshare", &["-rm", "sh", "-c", script, "sh", &dir.text(""), env!("CARGO_BIN_EXE_vellum")]);
    match ran.code {
        0 => {}
        77 => skipped("no ramfs without O_DIRECT can be mounted here"),
        _ if ran.err.contains("unshare") => skipped(&ran.err),
        code => panic!("{code}: {}", ran.err),
    }
}
