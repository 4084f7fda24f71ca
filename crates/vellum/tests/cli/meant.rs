//! Which snapshot is meant, which copy is whole, and what a message says of it.

use std::process::Command;

use super::support::dir::Dir;
use super::support::patchy;
use super::support::program::{finish, vellum};
use crate::requires;

fn names_of(image: &str) -> Vec<String> {
    let all = vellum(&["snapshot", "list", "--output", "json", image]).json();
    let all = all.as_array().expect("a list");
    all.iter().map(|one| one["name"].as_str().expect("a name").to_owned()).collect()
}

#[test]
fn a_name_that_is_the_id_of_another_snapshot_is_no_name_to_delete() {
    let dir = Dir::new("meant");
    let image = dir.text("disk.vlm");
    vellum(&["create", "-q", "-f", "vellum", &image, "16M"]).answer();
    for name in ["2", "1", "three"] {
        vellum(&["snapshot", "create", &image, name]).answer();
    }
    for words in [&["delete", &image, "2"][..], &["revert", &image, "1"], &["rename", &image, "2", "x"]] {
        let refused = vellum(&[&["snapshot"], words].concat());
        assert_eq!(refused.code, 1, "{words:?}");
        assert!(refused.err.contains("snapshot.name="), "{words:?}: {}", refused.err);
        assert_eq!(names_of(&image), ["2", "1", "three"], "{words:?}");
    }
    // -d has a name in any case, and an id is none.
    assert_eq!(vellum(&["snapshot", "-d", "3", &image]).code, 1);
    vellum(&["snapshot", "-d", "2", &image]).answer();
    assert_eq!(names_of(&image), ["1", "three"]);
    vellum(&["snapshot", "delete", &image, "snapshot.id=2"]).answer();
    assert_eq!(names_of(&image), ["three"]);
    vellum(&["snapshot", "delete", &image, "3"]).answer();
    assert_eq!(names_of(&image), [""; 0]);
}

/// A qcow2 image with data and a bitmap.
fn with_bitmap(dir: &Dir, name: &str) -> String {
    let (raw, image) = (dir.text("source.raw"), dir.text(name));
    std::fs::write(&raw, patchy(1 << 20, 4)).expect("a disk");
    vellum(&["convert", "-q", "-f", "raw", "-O", "qcow2", &raw, &image]).answer();
    vellum(&["bitmap", "--add", &image, "daily"]).answer();
    image
}

#[test]
fn a_copy_has_its_bitmaps_before_it_has_its_name() {
    let dir = Dir::new("meant");
    let source = with_bitmap(&dir, "source.qcow2");
    let target = dir.text("target.qcow2");
    std::fs::write(&target, b"before").expect("a file");
    let line = ["convert", "-q", "--bitmaps", "-f", "qcow2", "-O", "qcow2"];
    let refused = vellum(&[&line[..], &["-o", "compat=v2", &source, &target]].concat());
    assert_eq!(refused.code, 1);
    assert!(refused.err.contains("is unchanged"), "{}", refused.err);
    assert_eq!(std::fs::read(&target).expect("the target"), b"before");
    assert!(dir.names().iter().all(|name| !name.contains(".vellum-")), "{:?}", dir.names());
    vellum(&[&line[..], &[&source, &target]].concat()).answer();
    let info = vellum(&["info", "--output", "json", "-f", "qcow2", &target]).json();
    assert!(info.to_string().contains("daily"), "{info}");

    // An image that is there and has a bitmap of that name.
    let there = with_bitmap(&dir, "there.qcow2");
    let before = std::fs::read(&there).expect("the image");
    let refused = vellum(&[&line[..], &["-n", &source, &there]].concat());
    assert_eq!(refused.code, 1);
    assert!(refused.err.contains("has a bitmap daily already"), "{}", refused.err);
    assert!(std::fs::read(&there).expect("the image") == before, "nothing was written");
}

#[test]
fn a_copy_whose_directory_cannot_be_flushed_is_not_called_unchanged() {
    requires!("strace");
    let dir = Dir::new("meant");
    let (source, log) = (dir.text("source.raw"), dir.text("calls"));
    std::fs::write(&source, patchy(1 << 20, 4)).expect("a disk");
    for is_there in [false, true] {
        let target = dir.text(if is_there { "there" } else { "new" });
        if is_there {
            std::fs::write(&target, b"before").expect("a file");
        }
        // The first flush is of the copy, the second of its directory.
        let mut command = Command::new("strace");
        command.args(["-f", "-qq", "-o", &log, "-e", "trace=fsync", "-e", "inject=fsync:error=EIO:when=2"]);
        command.args(["-e", "inject=io_uring_setup:error=ENOSYS", env!("CARGO_BIN_EXE_vellum"), "convert"]);
        command.args(["-q", "-f", "raw", "-O", "raw", &source, &target]);
        let ran = finish(command, None);
        assert_eq!(ran.code, 1, "{}", ran.err);
        assert!(ran.err.contains("is the whole copy"), "{}", ran.err);
        assert!(std::fs::read(&target).expect("the target") == std::fs::read(&source).expect("the source"));
    }
}

#[test]
fn a_luks_volume_that_ends_before_its_data_is_no_empty_disk() {
    let dir = Dir::new("meant");
    let (secret, image, copy) = (dir.text("secret"), dir.text("volume"), dir.text("copy"));
    std::fs::write(&secret, "correct horse").expect("a secret");
    let object = format!("secret,id=a,file={secret}");
    let key = format!("id=a,file={secret}");
    requires!("qemu-img");
    let mut make = Command::new("qemu-img");
    make.args(["create", "-q", "-f", "luks", "--object", &object, "-o", "key-secret=a,iter-time=10"]);
    make.args([&image, "4M"]);
    finish(make, None).answer();
    let file = std::fs::File::options().write(true).open(&image).expect("the volume");
    file.set_len(1_000_000).expect("it is cut");
    let ran = vellum(&["convert", "-q", "-f", "luks", "--secret", &key, "-O", "raw", &image, &copy]);
    assert_eq!(ran.code, 1);
    assert!(ran.err.contains("is cut off"), "{}", ran.err);
    assert!(!std::path::Path::new(&copy).exists());
}
