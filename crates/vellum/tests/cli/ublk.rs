//! `serve --ublk` where it is not possible: the messages, and what is refused. That it works is tested in a
//! guest (`tests/guest`).

use super::refused;
use super::support::dir::Dir;
use super::support::program::{skipped, vellum};

fn image(dir: &Dir) -> String {
    let path = dir.text("disk.qcow2");
    vellum(&["create", "-q", "-f", "qcow2", &path, "4M"]).answer();
    path
}

#[test]
fn where_there_is_no_driver_it_says_what_to_do() {
    if cfg!(feature = "ublk") && std::path::Path::new("/dev/ublk-control").exists() {
        return skipped("this kernel has the driver");
    }
    let dir = Dir::new("ublk");
    let image = image(&dir);
    let instead = ["--fuse FILE", "--nbd unix:PATH"];
    let why: &[&str] = match cfg!(feature = "ublk") {
        true => &["/dev/ublk-control", "modprobe ublk_drv", "Linux 6.5"],
        false => &["built without it"],
    };
    let said = [why, &instead].concat();
    for device in ["0", "auto"] {
        refused(1, &said, &["serve", &image, "--ublk", device]);
    }
    // Whatever had begun beside it ends, and the image is closed.
    let socket = dir.text("nbd");
    let nbd = format!("unix:{socket}");
    refused(1, &said, &["serve", &image, "--nbd", &nbd, "--ublk", "0"]);
    assert!(!dir.join("nbd").exists(), "the socket is gone");
    vellum(&["check", &image]).answer();
}

#[test]
fn without_a_ring_it_is_refused() {
    if !cfg!(feature = "ublk") {
        return skipped("built without block devices");
    }
    let dir = Dir::new("ublk");
    let said = ["without io_uring", "--io threads", "--fuse FILE"];
    refused(1, &said, &["serve", &image(&dir), "--ublk", "0", "--io", "threads"]);
}

#[test]
fn what_makes_no_sense_is_refused() {
    let dir = Dir::new("ublk");
    let image = image(&dir);
    if !cfg!(feature = "ublk") {
        return skipped("built without block devices");
    }
    let exports = [format!("web={image}"), format!("db={}", dir.text("other.qcow2"))];
    vellum(&["create", "-q", "-f", "qcow2", &dir.text("other.qcow2"), "4M"]).answer();
    let both = ["serve", "--export", &exports[0], "--export", &exports[1]];
    refused(1, &["several disks", "\"web\""], &[&both[..], &["--ublk", "0"]].concat());
    refused(1, &["no export \"mail\""], &[&both[..], &["--ublk", "mail=auto"]].concat());
    refused(1, &["below 1048576"], &["serve", &image, "--ublk", "1048576"]);
    refused(1, &["--queues", "--ublk"], &["serve", &image, "--nbd", "unix:x", "--queues", "2"]);
    refused(1, &["--ublk-keep", "auto"], &["serve", &image, "--ublk", "auto", "--ublk-keep"]);
    for device in ["", "b0", "-1", "/dev/ublkb0", "web=", "4294967296"] {
        let ran = vellum(&["serve", &image, "--ublk", device]);
        assert_eq!((ran.code, ran.out.as_str()), (1, ""), "{device:?}: {ran:?}");
    }
}
