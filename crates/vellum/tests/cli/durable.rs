//! A copy is durable when the command ends, unless nothing is to be flushed: counted at the system calls.

use std::process::Command;

use super::support::dir::Dir;
use super::support::patchy;
use super::support::program::{finish, run, vellum};
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
                let is_flush = |call: &String| call == "fsync" || call == "fdatasync";
                assert!(calls[..named].iter().any(is_flush), "{format} {mode:?}: its content: {calls:?}");
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
