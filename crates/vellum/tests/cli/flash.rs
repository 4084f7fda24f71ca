//! An image of which a flash cache holds writes: what looks at it says so, and everything else is refused.

use std::path::Path;

use futures_lite::future::block_on;
use vellum_core::{MemoryStorage, SharedStorage};
use vellum_format::FormatKind;
use vellum_format::image::{Files, OpenOptions};
use vellum_format::session::{CacheId, SessionNumber};

use super::refused;
use super::support::dir::Dir;
use super::support::program::{has, run, vellum};

const ID: &str = "a0a1a2a3a4a5a6a7a8a9aaabacadaeaf";

/// Opens the image with a flash cache, as a server would, and closes it; with `holds_writes` it is behind then.
fn used_with_cache(path: &Path, holds_writes: bool) {
    let storage = MemoryStorage::holding("image", &std::fs::read(path).expect("the image"));
    let image: SharedStorage = storage.clone();
    block_on(async {
        let kind = vellum_format::probe(&*image).await.expect("a format");
        let head = kind.format().read(&*image).await.expect("a header");
        let flash: CacheId = ID.parse().expect("an id");
        let files = Files { image: image.clone(), data_file: None, below: None };
        let opened = head.open(files, OpenOptions { flash: Some(flash), ..OpenOptions::default() }).await;
        let opened = opened.expect("it opens");
        let number = SessionNumber::new([7; 16]).expect("not zero");
        let sessions = opened.sessions.expect("it has a place");
        sessions.begin(number, holds_writes).await.expect("it is recorded");
        opened.disk.close().await.expect("closed");
    });
    std::fs::write(path, storage.content().to_vec()).expect("the image");
}

#[test]
fn an_image_that_is_behind_is_described_and_checked_and_nothing_else() {
    for (format, extra) in [("qcow2", ""), ("vellum", "table"), ("vellum", "linear")] {
        let dir = Dir::new("flash");
        let path = dir.text("disk.img");
        let made = match extra {
            "" => vellum(&["create", "-f", format, &path, "4M"]),
            layout => vellum(&["create", "-f", format, "-o", &format!("layout={layout}"), &path, "4M"]),
        };
        made.answer();
        used_with_cache(Path::new(&path), true);
        let before = std::fs::read(&path).expect("the image");

        let info = vellum(&["info", &path]).answer();
        assert!(info.contains(&format!("behind its disk: flash cache {ID} holds writes")), "{info}");
        assert!(info.contains("the cache holds writes that the image has not"), "{info}");
        let info = vellum(&["info", "--output", "json", &path]).json();
        let flash = &info["format-specific"]["data"]["flash"];
        assert_eq!(
            (flash["cache"].as_str(), flash["state"].as_str()),
            (Some(ID), Some("holds-writes")),
            "{info}"
        );
        let checked = vellum(&["check", &path]);
        assert!(
            checked.code == 0 && checked.err.contains(ID) && checked.err.contains("behind"),
            "{checked:?}"
        );
        let checked = vellum(&["check", "--output", "json", &path]).json();
        assert_eq!(checked["behind-flash-cache"], ID, "{checked}");

        let (new, clone) = (dir.text("new.img"), dir.text("clone.qcow2"));
        let socket = format!("unix:{}", dir.text("socket"));
        let words = ["vellum flash recover", "vellum flash forget", &path];
        let mut doors = vec![
            vec!["convert", "-O", "raw", &path, &new],
            vec!["map", &path],
            vec!["compare", &path, &path],
            vec!["resize", &path, "8M"],
            vec!["resize", "--shrink", &path, "2M"],
            vec!["check", "-r", "leaks", &path],
            vec!["check", "-r", "all", &path],
            vec!["recover", &path],
            vec!["create", "-f", "qcow2", "-b", &path, "-F", format, &clone],
            vec!["clone", "-F", format, &path, &clone],
            vec!["serve", "-r", "--nbd", &socket, &path],
            vec!["serve", "--nbd", &socket, &path],
        ];
        match extra {
            "" => doors.push(vec!["journal", "disable", &path]),
            "table" => doors.push(vec!["snapshot", "create", &path, "one"]),
            _ => {}
        }
        for door in doors {
            refused(if door[0] == "compare" { 2 } else { 1 }, &words, &door);
            assert!(std::fs::read(&path).expect("the image") == before, "{door:?} has changed the image");
        }
    }
}

#[test]
fn an_image_that_is_complete_is_used_without_its_cache_and_says_so_afterwards() {
    for format in ["qcow2", "vellum"] {
        let dir = Dir::new("flash");
        let (path, copy) = (dir.text("disk.img"), dir.text("copy.raw"));
        vellum(&["create", "-f", format, &path, "4M"]).answer();
        used_with_cache(Path::new(&path), false);
        let state = || {
            let info = vellum(&["info", "--output", "json", &path]).json();
            info["format-specific"]["data"]["flash"]["state"].as_str().unwrap_or("none").to_owned()
        };
        assert_eq!(state(), "clean", "{format}");
        vellum(&["convert", "-O", "raw", &path, &copy]).answer();
        vellum(&["check", &path]).answer();
        assert_eq!(state(), "clean", "{format}: it was only read");
        vellum(&["resize", &path, "8M"]).answer();
        let kept = state();
        assert!(["clean", "void"].contains(&kept.as_str()), "{format}: {kept}");
    }
}

#[test]
fn qemu_refuses_an_image_that_is_behind_by_name_and_its_write_makes_a_session_void() {
    crate::requires!("qemu-img", "qemu-io");
    let dir = Dir::new("flash");
    let (behind, complete) = (dir.text("behind.qcow2"), dir.text("complete.qcow2"));
    for (path, holds_writes) in [(&behind, true), (&complete, false)] {
        vellum(&["create", "-f", "qcow2", path, "4M"]).answer();
        used_with_cache(Path::new(path), holds_writes);
    }
    for arguments in [
        &["info", "-f", "qcow2", &behind][..],
        &["check", "-f", "qcow2", &behind],
        &["check", "-r", "all", "-f", "qcow2", &behind],
        &["amend", "-f", "qcow2", "-o", "lazy_refcounts=on", &behind],
        &["snapshot", "-c", "one", &behind],
    ] {
        let ran = run("qemu-img", arguments);
        assert!(
            ran.code != 0 && ran.err.contains("vellum flash cache holds writes"),
            "{arguments:?}: {ran:?}"
        );
    }
    let state = || {
        let kind = FormatKind::Qcow2;
        let storage = MemoryStorage::holding("image", &std::fs::read(&complete).expect("the image"));
        let head = block_on(kind.format().read(&*storage)).expect("a header");
        head.session().map(|session| (session.cache.to_string(), session.state.word()))
    };
    assert_eq!(state(), Some((ID.to_owned(), "clean")));
    assert_eq!(run("qemu-img", &["check", "-f", "qcow2", &complete]).code, 0);
    let read = run("qemu-io", &["-r", "-f", "qcow2", "-c", "read 0 64k", &complete]);
    assert_eq!((read.code, state()), (0, Some((ID.to_owned(), "clean"))), "a read changes nothing");
    let written = run("qemu-io", &["-f", "qcow2", "-c", "write -P 7 0 64k", &complete]);
    assert_eq!((written.code, state()), (0, Some((ID.to_owned(), "void"))), "{written:?}");
    assert!(has("qemu-img") && vellum(&["check", &complete]).code == 0);
}
