//! libnbd from Python: the script beside this file sends every command and flag and checks the answers
//! itself.

use std::process::Command;

use super::support::program::{finish, skipped};
use super::support::{first_difference, noise};
use super::{Image, KINDS, Kind, MIB, ways};
use crate::support::dir::Dir;

const SCRIPT: &str = include_str!("libnbd.py");

/// A Python that has libnbd: Debian's own, else the first of the path.
fn python() -> Option<&'static str> {
    let found = ["/usr/bin/python3", "python3"].into_iter().find(|python| {
        Command::new(python).args(["-c", "import nbd"]).output().is_ok_and(|output| output.status.success())
    });
    if found.is_none() {
        skipped("no Python with libnbd is installed");
    }
    found
}

#[track_caller]
fn script(python: &str, story: &str, arguments: &[&str]) {
    let mut command = Command::new(python);
    command.args(["-c", SCRIPT, story]).args(arguments);
    let ran = finish(command, None);
    assert!(ran.code == 0 && ran.out.trim() == "good", "{story} {arguments:?}:\n{}\n{}", ran.out, ran.err);
}

#[test]
fn every_command_and_flag() {
    let Some(python) = python() else { return };
    let dir = Dir::new("libnbd");
    for (index, way) in ways().into_iter().enumerate() {
        for kind in [KINDS[index % 3], KINDS[(index + 1) % 3]] {
            let image = Image::new(&dir, "disk", kind, &vec![0x11; 8 * MIB]);
            let server = image.serve(&[&["--nbd", "tcp:127.0.0.1:0"], way].concat());
            script(python, "commands", &[&server.uri(""), &format!("{kind:?}")]);
            script(python, "simple", &[&server.tcp_uri("")]);
            server.stop();
            image.check();
        }
    }
}

#[test]
fn what_a_read_only_export_refuses() {
    let Some(python) = python() else { return };
    let dir = Dir::new("libnbd");
    for kind in KINDS {
        let image = Image::new(&dir, "disk", kind, &vec![0x11; 8 * MIB]);
        let before = std::fs::read(&image.path).expect("the image");
        let server = image.serve(&["--read-only"]);
        script(python, "read_only", &[&server.uri("")]);
        server.stop();
        assert_eq!(std::fs::read(&image.path).expect("the image"), before, "{kind:?}");
    }
}

/// Written on one connection, flushed on another: what multi-conn promises, held even if the server is killed
/// at once.
#[test]
fn a_flush_covers_all_connections() {
    let Some(python) = python() else { return };
    let dir = Dir::new("libnbd");
    for kind in [Kind::Raw, Kind::Qcow2, Kind::Clone] {
        for way in ways() {
            let old = noise(8 * MIB, 30);
            let image = Image::new(&dir, "disk", kind, &old);
            let server = image.serve(way);
            script(python, "multi_conn", &[&server.uri(""), &server.pid().to_string()]);
            server.kill();
            if image.format == "qcow2" {
                super::vellum(&["recover", image.text()]).answer();
            }
            image.check();
            let mut expected = old;
            for index in 0..32 {
                let at = index * 200 * 1024 + 4096;
                expected[at..at + 8192].fill(u8::try_from(index + 1).expect("few"));
            }
            assert_eq!(first_difference(&image.bytes(), &expected), None, "{kind:?} {way:?}");
        }
    }
}
