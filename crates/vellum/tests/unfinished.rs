//! A copy that cannot be finished leaves nothing behind that could be taken for the whole disk, or says so.
//!
//! Copies end early because the source cannot be read, because there is no room, because of Ctrl-C, and
//! because the program was killed. The target did not exist, existed, is a link, has two names, is a device,
//! or was given to be filled.

#![allow(unreachable_pub, reason = "the modules of a test are its own")]

mod support;

use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process};
use support::dir::Dir;
use support::loops::{LoopDevice, Mount};
use support::program::{Ran, is_root, pid_of, run, skipped, vellum, vellum_command, wait};
use support::{noise, room_beside};

const MIB: usize = 1 << 20;
const NOBODY: u32 = 65534;
const PATIENCE: Duration = Duration::from_secs(60);

/// Makes a source whose second half cannot be read: an entry of its L1 table is damaged.
fn damaged(dir: &Dir) -> String {
    let source = dir.text("source");
    vellum(&["create", "-q", "-f", "qcow2", "-o", "cluster_size=4k", &source, "4M"]).answer();
    let mut bytes = std::fs::read(&source).expect("the source");
    let l1 = u64::from_be_bytes(bytes[40..48].try_into().expect("eight bytes"));
    let l1 = usize::try_from(l1).expect("it is near the beginning");
    // Each table maps 2 MiB. No table lies between two clusters.
    bytes[l1 + 8..l1 + 16].copy_from_slice(&0x8000_0000_0000_0200_u64.to_be_bytes());
    std::fs::write(&source, bytes).expect("the source");
    source
}

/// Makes a source that takes long to copy, as every zero is to be written.
fn endless(dir: &Dir) -> String {
    let source = dir.text("source");
    vellum(&["create", "-q", &source, "64G"]).answer();
    source
}

/// A conversion that must fail, in one line that has these words.
#[track_caller]
fn fails(words: &[&str], arguments: &[&str]) {
    says(&vellum(&[&["convert"], arguments].concat()), 1, words);
}

#[track_caller]
fn says(ran: &Ran, code: i32, words: &[&str]) {
    assert_eq!((ran.code, ran.err.lines().count(), ran.out.as_str()), (code, 1, ""), "{ran:?}");
    for word in words {
        assert!(ran.err.contains(word), "it does not say {word:?}: {}", ran.err);
    }
}

/// Starts a command and waits until it has written something beside these files.
fn under_way(dir: &Dir, others: &[&str], arguments: &[&str]) -> Child {
    let begun = Instant::now();
    let mut command = vellum_command();
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().expect("our own program");
    while room_beside(dir, others) < 2 * MIB as u64 {
        std::thread::sleep(Duration::from_millis(2));
        assert!(begun.elapsed() < PATIENCE, "{arguments:?}: nothing is written");
    }
    child
}

fn signal(child: Child, signal: Signal) -> Ran {
    kill_process(pid_of(&child), signal).expect("it runs");
    wait(child, Instant::now(), PATIENCE).expect("it ends")
}

fn is_same(path: impl AsRef<Path>, bytes: &[u8]) -> bool {
    std::fs::read(path).expect("the file") == bytes
}

#[test]
fn what_was_not_there_is_removed_after_an_error() {
    for format in ["raw", "qcow2"] {
        let dir = Dir::new("unfinished");
        let (source, target) = (damaged(&dir), dir.text("target"));
        fails(&["target was not created", "removed", "source"], &["-O", format, &source, &target]);
        assert_eq!(dir.names(), ["source"], "{format}");
        // A link to nothing is one to what is to be made.
        symlink("target", dir.join("link")).expect("a link");
        fails(&["link was not created", "removed"], &["-O", format, &source, &dir.text("link")]);
        assert_eq!(dir.names(), ["link", "source"], "{format}");
    }
}

#[test]
fn what_was_there_stays_after_an_error() {
    for format in ["raw", "qcow2"] {
        let dir = Dir::new("unfinished");
        let (source, target, old) = (damaged(&dir), dir.text("target"), noise(100_000, 1));
        std::fs::write(&target, &old).expect("a file");
        fails(&["target is unchanged", "removed"], &["-O", format, &source, &target]);
        assert!(is_same(&target, &old), "{format}");
        assert_eq!(dir.names(), ["source", "target"], "{format}");
    }
}

#[test]
fn what_was_there_is_replaced_with_its_mode_and_through_links() {
    let dir = Dir::new("unfinished");
    let (source, target, link) = (dir.text("source"), dir.text("target"), dir.text("link"));
    let disk = noise(3 * MIB, 2);
    std::fs::write(&source, &disk).expect("a disk");
    std::fs::write(&target, noise(5 * MIB, 3)).expect("a file");
    std::fs::set_permissions(&target, std::fs::Permissions::from_mode(0o606)).expect("our file");
    symlink("target", &link).expect("a link");
    vellum(&["convert", "-f", "raw", "-O", "raw", &source, &link]).answer();
    assert!(is_same(&target, &disk));
    assert_eq!(std::fs::metadata(&target).expect("the target").permissions().mode() & 0o777, 0o606);
    assert!(dir.join("link").is_symlink());
    assert_eq!(dir.names(), ["link", "source", "target"]);
    std::fs::remove_file(&target).expect("the target");
    vellum(&["convert", "-f", "raw", "-O", "raw", &source, &link]).answer();
    assert!(is_same(&target, &disk) && dir.join("link").is_symlink());
}

#[test]
fn a_file_with_two_names_is_filled_in_place() {
    for format in ["raw", "qcow2"] {
        let dir = Dir::new("unfinished");
        let (source, target) = (damaged(&dir), dir.text("target"));
        std::fs::write(&target, noise(100_000, 4)).expect("a file");
        std::fs::hard_link(&target, dir.join("other")).expect("a second name");
        fails(&["target was emptied"], &["-O", format, &source, &target]);
        assert!(is_same(&target, &[]), "{format}");
        let disk = noise(MIB, 5);
        std::fs::write(&source, &disk).expect("a disk");
        vellum(&["convert", "-f", "raw", "-O", "raw", &source, &target]).answer();
        assert!(is_same(dir.join("other"), &disk), "{format}: both names are the copy's");
    }
}

#[test]
fn owners_are_kept_and_a_closed_directory_is_no_hindrance() {
    requires!("setpriv");
    if !is_root() {
        return skipped("only root gives files away");
    }
    // Where everybody may look.
    let dir = Dir::short();
    let (source, target, disk) = (dir.text("source"), dir.text("target"), noise(MIB, 14));
    std::fs::write(&source, &disk).expect("a disk");
    let arguments = ["convert", "-f", "raw", "-O", "raw", &source, &target];
    let is_copied = |about: &str| {
        assert!(is_same(&target, &disk), "{about}");
        assert_eq!(std::fs::metadata(&target).expect("the target").uid(), NOBODY, "{about}");
        assert_eq!(dir.names(), ["source", "target"], "{about}");
    };
    let before = || {
        drop(std::fs::remove_file(&target));
        std::fs::write(&target, "old").expect("a file");
        chown(&target, Some(NOBODY), Some(NOBODY)).expect("root's right");
    };
    before();
    vellum(&arguments).answer();
    is_copied("by root");
    before();
    let us = dir.text("program");
    std::fs::copy(env!("CARGO_BIN_EXE_vellum"), &us).expect("our own program");
    let nobody = NOBODY.to_string();
    let nobody = ["--reuid", &nobody, "--regid", &nobody, "--clear-groups", &us];
    let ran = run("setpriv", &[&nobody[..], &arguments].concat());
    std::fs::remove_file(&us).expect("the program");
    assert_eq!(ran.code, 0, "{ran:?}");
    is_copied("by somebody who cannot write the directory");
}

#[test]
fn a_file_that_is_mounted_is_filled_in_place() {
    if !is_root() {
        return skipped("mounting is root's");
    }
    let dir = Dir::new("unfinished");
    let (source, target, disk) = (dir.text("source"), dir.text("target"), noise(MIB, 6));
    std::fs::write(&source, &disk).expect("a disk");
    std::fs::write(&target, "old").expect("a file");
    let ran = run("mount", &["--bind", &target, &target]);
    if ran.code != 0 {
        return skipped(&format!("no bind mount: {}", ran.err.trim()));
    }
    let converted = vellum(&["convert", "-f", "raw", "-O", "raw", &source, &target]);
    drop(run("umount", &["-l", &target]));
    converted.answer();
    assert!(is_same(&target, &disk));
}

#[test]
fn a_target_that_was_given_is_left_and_named() {
    let dir = Dir::new("unfinished");
    let (source, target) = (damaged(&dir), dir.text("target"));
    std::fs::write(&target, noise(4 * MIB, 7)).expect("a file");
    fails(&["target contains only part", "filled again"], &["-n", "-O", "raw", &source, &target]);
    assert_eq!(std::fs::metadata(&target).expect("it is kept").len(), 4 * MIB as u64);
    // Nothing was written, and no other claim is made.
    let small = noise(MIB, 8);
    std::fs::write(&target, &small).expect("a file");
    let ran = vellum(&["convert", "-n", "-O", "raw", &source, &target]);
    says(&ran, 1, &["target has 1048576 bytes"]);
    assert!(!ran.err.contains("part") && is_same(&target, &small), "{ran:?}");
}

#[test]
fn a_device_is_left_and_named() {
    let Some(device) = LoopDevice::new(16 << 20, 512) else { return };
    let dir = Dir::new("unfinished");
    let source = damaged(&dir);
    for format in ["raw", "qcow2"] {
        let part = format!("{} contains only part", device.text());
        fails(&[&part, "filled again"], &["-O", format, &source, &device.text()]);
    }
}

#[test]
fn a_data_file_is_removed_or_named() {
    let dir = Dir::new("unfinished");
    let (source, target) = (damaged(&dir), dir.text("target"));
    let arguments = ["-O", "qcow2", "-o", "data_file=data", &source, &target];
    fails(&["target was not created"], &arguments);
    assert_eq!(dir.names(), ["source"]);
    std::fs::write(dir.join("data"), "old").expect("a file");
    fails(&["data contains only part", "delete it"], &arguments);
    assert_eq!(dir.names(), ["data", "source"]);
    // A new image that cannot be made takes its data file with it.
    std::fs::remove_file(dir.join("data")).expect("the data file");
    std::fs::create_dir(&target).expect("a directory");
    let ran = vellum(&["create", "-f", "qcow2", "-o", "data_file=data", &target, "1M"]);
    says(&ran, 1, &["target", "directory"]);
    assert_eq!(dir.names(), ["source", "target"]);
}

#[test]
fn a_target_that_can_be_none_is_told_and_the_source_is_safe() {
    let dir = Dir::new("unfinished");
    let (source, other, disk) = (dir.text("source"), dir.text("other"), noise(MIB, 15));
    std::fs::write(&source, &disk).expect("a disk");
    std::fs::hard_link(&source, &other).expect("a second name");
    for way in [&["-f", "raw"][..], &["-f", "raw", "-U"], &["-f", "raw", "-n"]] {
        fails(&["source", "itself"], &[way, &[&source, &other]].concat());
        assert!(is_same(&source, &disk), "{way:?}");
    }
    fails(&["a pipe"], &["-f", "raw", &source, "/dev/stdout"]);
    fails(&["a character device"], &["-f", "raw", &source, "/dev/null"]);
    fails(&["a directory"], &["-f", "raw", &source, &dir.text("")]);
    fails(&["not there/target"], &["-f", "raw", &source, &dir.text("not there/target")]);
    assert_eq!(dir.names(), ["other", "source"]);
}

#[test]
fn a_target_in_use_is_not_touched() {
    let dir = Dir::new("unfinished");
    let (source, target) = (dir.text("source"), dir.text("target"));
    vellum(&["create", "-q", "-f", "qcow2", &source, "1M"]).answer();
    vellum(&["create", "-q", "-f", "qcow2", &target, "1M"]).answer();
    let before = std::fs::read(&target).expect("the target");
    let server = support::server::Server::start(&[&target]);
    fails(&["target is in use", "close it there first"], &["-O", "raw", &source, &target]);
    server.stop();
    assert_eq!(std::fs::metadata(&target).expect("the target").len(), before.len() as u64);
    assert_eq!(dir.names(), ["source", "target"]);
}

#[test]
fn where_there_is_no_room_the_old_file_stays() {
    let Some(mount) = Mount::tmpfs(8 << 20) else { return };
    let dir = Dir::new("unfinished");
    let source = dir.text("source");
    std::fs::write(&source, noise(6 * MIB, 9)).expect("a disk");
    let (target, old) = (mount.dir.text("target"), noise(4 * MIB, 10));
    for format in ["raw", "qcow2"] {
        std::fs::write(&target, &old).expect("a file");
        let words = ["target is unchanged", "delete the old one first", "No space left"];
        fails(&words, &["-f", "raw", "-O", format, &source, &target]);
        assert!(is_same(&target, &old), "{format}");
        assert_eq!(mount.dir.names(), ["target"], "{format}");
        // As it is set.
        std::fs::remove_file(&target).expect("the target");
        vellum(&["convert", "-f", "raw", "-O", format, &source, &target]).answer();
        std::fs::remove_file(&target).expect("the target");
    }
}

#[test]
fn ctrl_c_leaves_what_was_there() {
    let dir = Dir::new("unfinished");
    let (source, target, old) = (endless(&dir), dir.text("target"), noise(MIB, 11));
    std::fs::write(&target, &old).expect("a file");
    let others = ["source", "target"];
    for way in [&["-O", "raw", "-S", "0"][..], &["-O", "qcow2", "-o", "preallocation=full"]] {
        let arguments = [&["convert", "-f", "raw", "-m", "1"], way, &[&source, &target]].concat();
        let ran = signal(under_way(&dir, &others, &arguments), Signal::INT);
        says(&ran, 130, &["interrupted", "target is unchanged", "removed"]);
        assert!(is_same(&target, &old), "{way:?}");
        assert_eq!(dir.names(), others, "{way:?}");
    }
    // Filled in place, which the message says.
    vellum(&["create", "-q", &target, "64G"]).answer();
    let arguments = ["convert", "-n", "-f", "raw", "-m", "1", "-S", "0", "-O", "raw", &source, &target];
    let ran = signal(under_way(&dir, &["source"], &arguments), Signal::INT);
    says(&ran, 130, &["interrupted", "target contains only part"]);
}

#[test]
fn a_kill_leaves_what_was_there_and_the_next_copy_cleans_up() {
    let elsewhere = Dir::new("unfinished");
    let bad = damaged(&elsewhere);
    for format in ["raw", "qcow2"] {
        for old in [None, Some(noise(MIB, 12))] {
            let about = format!("{format}, {} was there", if old.is_some() { "a file" } else { "nothing" });
            let dir = Dir::new("unfinished");
            let (source, target) = (endless(&dir), dir.text("target"));
            if let Some(old) = &old {
                std::fs::write(&target, old).expect("a file");
            }
            let others = dir.names();
            let known: Vec<&str> = others.iter().map(String::as_str).collect();
            let arguments = ["convert", "-f", "raw", "-S", "0", "-m", "1", "-O", format, &source, &target];
            let child = under_way(&dir, &known, &arguments);
            // Its draft is in use, and a second copy of the same name leaves it alone.
            let drafts = |dir: &Dir| -> Vec<String> {
                dir.names().into_iter().filter(|name| name.starts_with(".target.vellum-")).collect()
            };
            assert_eq!(drafts(&dir).len(), 1, "{about}");
            fails(&["target"], &["-O", "raw", &bad, &target]);
            assert_eq!(drafts(&dir).len(), 1, "{about}");
            assert_eq!(signal(child, Signal::KILL).code, 128 + 9, "{about}");
            match &old {
                Some(old) => assert!(is_same(&target, old), "{about}"),
                None => assert!(!dir.join("target").exists(), "{about}"),
            }
            assert_eq!(drafts(&dir).len(), 1, "{about}: what a killed program leaves");
            let disk = noise(MIB, 13);
            std::fs::write(&source, &disk).expect("a disk");
            vellum(&["convert", "-f", "raw", "-O", format, &source, &target]).answer();
            assert_eq!(vellum(&["compare", "-f", "raw", "-F", format, &source, &target]).code, 0, "{about}");
            assert_eq!(dir.names(), ["source", "target"], "{about}");
        }
    }
}

#[test]
fn an_image_that_is_killed_in_the_making_is_none() {
    let dir = Dir::new("unfinished");
    let image = dir.text("image");
    // A raw disk of zeros is one from the beginning; a qcow2 image is one when its header is written, at the
    // end.
    let arguments = ["create", "-f", "qcow2", "-o", "preallocation=full", &image, "64G"];
    assert_eq!(signal(under_way(&dir, &[], &arguments), Signal::KILL).code, 128 + 9);
    says(&vellum(&["info", "-f", "qcow2", &image]), 1, &["image"]);
    // What it holds is replaced by the next.
    vellum(&["create", "-q", "-f", "qcow2", &image, "1M"]).answer();
    vellum(&["check", &image]).answer();
    // The header of a luks image is written last, too: also in place of another one.
    let [secret, spec] = secret_beside(&dir);
    let image = dir.text("volume");
    let made = ["create", "-q", "-f", "luks", &secret, &spec, "-o", "key-secret=a,iter-time=10", &image];
    for size in ["1M", "64G"] {
        if size == "64G" {
            let others = dir.names();
            let known: Vec<&str> =
                others.iter().map(String::as_str).filter(|name| *name != "volume").collect();
            let full = [&made[..], &["-o", "preallocation=full", size]].concat();
            assert_eq!(signal(under_way(&dir, &known, &full), Signal::KILL).code, 128 + 9);
            says(&vellum(&["info", "-f", "luks", &image]), 1, &["volume"]);
            says(
                &vellum(&["convert", &secret, &spec, "-f", "luks", &image, &dir.text("copy")]),
                1,
                &["volume"],
            );
        }
        vellum(&[&made[..], &["1M"]].concat()).answer();
        assert!(vellum(&["info", &image]).answer().contains("virtual size: 1 MiB"));
    }
}

/// The options of a secret in a file of the directory.
fn secret_beside(dir: &Dir) -> [String; 2] {
    std::fs::write(dir.join("secret"), "correct horse").expect("a secret");
    ["--secret".to_owned(), format!("id=a,file={}", dir.text("secret"))]
}

#[test]
fn a_luks_copy_that_is_killed_leaves_what_was_there() {
    for old in [None, Some(noise(MIB, 12))] {
        let dir = Dir::new("unfinished");
        let (source, target) = (endless(&dir), dir.text("target"));
        let [secret, spec] = secret_beside(&dir);
        if let Some(old) = &old {
            std::fs::write(&target, old).expect("a file");
        }
        let others = dir.names();
        let known: Vec<&str> = others.iter().map(String::as_str).collect();
        let new = [&secret, &spec, "-O", "luks", "-o", "key-secret=a,iter-time=10"];
        let arguments = [&["convert", "-f", "raw"], &new[..], &[&source, &target]].concat();
        // Zeros are data there, and every one of them is written: it stops at once all the same.
        for (with, code) in [(Signal::INT, 130), (Signal::KILL, 128 + 9)] {
            assert_eq!(signal(under_way(&dir, &known, &arguments), with).code, code);
            match &old {
                Some(old) => assert!(is_same(&target, old)),
                None => assert!(!dir.join("target").exists()),
            }
            assert_eq!(
                dir.names().len() - others.len(),
                usize::from(with == Signal::KILL),
                "{:?}",
                dir.names()
            );
        }
        std::fs::write(&source, noise(MIB, 13)).expect("a disk");
        vellum(&arguments).answer();
        assert_eq!(vellum(&["compare", &secret, &spec, "-f", "raw", "-F", "luks", &source, &target]).code, 0);
        assert_eq!(dir.names(), ["secret", "source", "target"]);
    }
}
