//! External snapshots of a served disk: its image becomes one that is only read, and a new one goes on top.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use vellum_core::Random;

use super::Controlled;
use super::killed::Pages;
use super::support::client::Client;
use super::support::dir::Dir;
use super::support::program::{Ran, has, succeed, vellum, vellum_command};
use super::support::server::Server;
use super::support::{first_difference, noise, scale};

pub const LEN: usize = 6 << 20;

/// The kinds of images that get another one on top, and that one's name.
const KINDS: [(&str, &str, &str); 8] = [
    ("raw", "", "new.vlm"),
    ("raw", "", "new.qcow2"),
    ("qcow2", "journal=on", "new.qcow2"),
    ("qcow2", "journal=off,compat=0.10,extended_l2=off", "new.vlm"),
    ("qcow2", "journal=off", "new.qcow2"),
    ("vellum", "layout=linear", "new.vlm"),
    ("vellum", "layout=table", "new.qcow2"),
    ("vellum", "layout=zoned", "new.vlm"),
];

/// A new image with bytes here and there, and what its disk reads as.
fn made(dir: &Dir, format: &str, options: &str) -> (String, Vec<u8>) {
    let image = dir.text(&format!("old.{}", if format == "vellum" { "vlm" } else { format }));
    let options: &[&str] = if options.is_empty() { &[] } else { &["-o", options] };
    vellum(&[&["create", "-q", "-f", format], options, &[&image, &LEN.to_string()]].concat()).answer();
    (image, vec![0; LEN])
}

/// `vellum snapshot external`.
fn put(served: &Controlled, rest: &[&str]) -> Ran {
    vellum(&[&["snapshot", "external", "--control", &served.socket][..], rest].concat())
}

#[track_caller]
fn refused(served: &Controlled, words: &[&str], rest: &[&str]) {
    let ran = put(served, rest);
    assert_eq!((ran.code, ran.err.lines().count()), (1, 1), "{rest:?}: {ran:?}");
    for word in words {
        assert!(ran.err.contains(word), "{rest:?} does not say {word:?}: {}", ran.err);
    }
}

/// The disk of an image that nobody has open.
#[track_caller]
pub fn read(image: &str, format: &str) -> Vec<u8> {
    let copy = format!("{image}.copy");
    vellum(&["convert", "-q", "-f", format, "-O", "raw", image, &copy]).answer();
    let bytes = std::fs::read(&copy).expect("a copy");
    std::fs::remove_file(&copy).expect("our own");
    bytes
}

#[track_caller]
pub fn same(read: &[u8], wanted: &[u8], about: &str) {
    assert_eq!(first_difference(read, wanted), None, "{about}");
}

/// Writes here and there, as the model has it.
pub fn scribble(guest: &mut Client, model: &mut [u8], random: &mut Random, writes: usize) {
    for _ in 0..writes {
        let at = random.index(LEN - 70_000);
        let bytes = noise(1 + random.index(60_000), random.below(u64::MAX));
        guest.write(at as u64, &bytes, 0).expect("it is written");
        model[at..at + bytes.len()].copy_from_slice(&bytes);
    }
    let at = random.index(LEN - (1 << 20)) & !0xfff;
    guest.zero(at as u64, 1 << 19, 0).expect("zeros are written");
    model[at..at + (1 << 19)].fill(0);
}

#[test]
fn what_is_written_after_a_snapshot_goes_to_the_new_image() {
    for (format, options, name) in KINDS {
        let about = format!("{format} {options} {name}");
        let dir = Dir::new("external");
        let (old, mut model) = made(&dir, format, options);
        let (first, second) = (dir.text(name), dir.text(&format!("second-{name}")));
        let new_format = if name.ends_with("vlm") { "vellum" } else { "qcow2" };
        let served = Controlled::start(&["-f", format, &old]);
        let (mut guest, mut random) = (served.client(""), Random::from_seed(5));
        scribble(&mut guest, &mut model, &mut random, 40);
        let before = model.clone();
        let said = put(&served, &["--output", "json", &first]).json();
        assert_eq!(said["overlays"][0]["image"], first, "{said}");
        assert_eq!(said["overlays"][0]["backing-filename"], old, "{said}");
        assert_eq!(served.told()["image"], first, "{about}");
        scribble(&mut guest, &mut model, &mut random, 40);
        let between = model.clone();
        let said = put(&served, &[&second]).answer();
        assert!(said.contains(&format!("vellum serve -f {new_format} {second}")), "{said}");
        scribble(&mut guest, &mut model, &mut random, 40);
        same(&guest.read_all().expect("it is read"), &model, &about);
        guest.flush().expect("a flush");
        // The images below are only read, and not by others for writing.
        let ran = vellum(&["resize", "-f", format, &old, "+1M"]);
        assert!(ran.code != 0 && ran.err.contains("in use"), "{about}: {ran:?}");
        guest.disconnect();
        assert_eq!(served.server.stop().code, 0);
        for (image, format, wanted) in
            [(&old, format, &before), (&first, new_format, &between), (&second, new_format, &model)]
        {
            same(&read(image, format), wanted, &format!("{about}: {image}"));
            if format != "raw" {
                vellum(&["check", "-q", image]).answer();
            }
            // QEMU knows no image of ours below another one.
            let is_alone = image == &old || !about.contains("vellum") && !about.contains("vlm");
            if format == "qcow2" && is_alone && has("qemu-img") {
                succeed("qemu-img", &["check", "-q", image]);
            }
        }
        if has("qemu-img") && !about.contains("vellum") && new_format == "qcow2" {
            std::fs::write(dir.join("model"), &model).expect("a model");
            succeed("qemu-img", &["compare", "-F", "raw", "-f", "qcow2", &second, &dir.text("model")]);
        }
        let info = vellum(&["info", "--output", "json", &first]).json();
        let below = info["backing-filename"].as_str().expect("it has one");
        assert!(!below.contains('/') && old.ends_with(below), "both can be moved together: {info}");
        // And both go back into the one at the bottom.
        if format != "vellum" {
            vellum(&["commit", "-q", "-f", new_format, "-b", &old, &second]).answer();
            same(&read(&old, format), &model, &format!("{about}: committed"));
        }
    }
}

#[test]
fn what_cannot_be_is_refused_and_the_disk_goes_on() {
    let (dir, elsewhere) = (Dir::new("external-refused"), Dir::new("external-elsewhere"));
    let (old, mut model) = made(&dir, "vellum", "layout=zoned");
    let served = Controlled::start(&[&old]);
    let (mut guest, mut random) = (served.client(""), Random::from_seed(6));
    scribble(&mut guest, &mut model, &mut random, 5);
    std::fs::write(dir.join("there.vlm"), "precious").expect("a file");
    let refuses = |words: &[&str], rest: &[&str]| {
        refused(&served, words, rest);
    };
    refuses(&["there.vlm", "exists already"], &[&dir.text("there.vlm")]);
    refuses(&["outside its own directory", "--allow-dir"], &[&elsewhere.text("new.vlm")]);
    refuses(&["no backing image", "qcow2 or vellum"], &[&dir.text("new.raw"), "-f", "raw"]);
    refuses(&["there is no export \"b\""], &[&format!("b={}", dir.text("new.vlm"))]);
    refuses(&["can't create"], &[&dir.text("no/new.vlm")]);
    refuses(&["named twice"], &[&dir.text("one.vlm"), &dir.text("two.vlm")]);
    same(&guest.read_all().expect("it is read"), &model, "as before");
    guest.disconnect();
    assert_eq!(served.server.stop().code, 0);
    assert_eq!(std::fs::read(dir.join("there.vlm")).expect("it is there"), b"precious");
    let mut names = dir.names();
    names.sort();
    assert_eq!(names, ["old.vlm", "there.vlm"], "nothing is left behind");
    let served = Controlled::start(&["--read-only", &old]);
    refused(&served, &["not written here", "create -b"], &[&dir.text("new.vlm")]);
    assert_eq!(served.server.stop().code, 0);
    // Where the server may look, the image may be.
    let served = Controlled::start(&["--allow-dir", &dir.text(""), &old]);
    put(&served, &[&elsewhere.text("new.vlm")]).answer();
    assert_eq!(served.server.stop().code, 0);
    same(&read_allowed(&elsewhere.text("new.vlm"), &dir), &model, "elsewhere");
}

fn read_allowed(image: &str, dir: &Dir) -> Vec<u8> {
    let copy = format!("{image}.copy");
    vellum(&["convert", "-q", "--allow-dir", &dir.text(""), "-O", "raw", image, &copy]).answer();
    std::fs::read(&copy).expect("a copy")
}

/// A base that proves nothing: the new image may not be opened over it without a word of the user, which comes out when the
/// old image is closed already. Of two disks both go back.
#[test]
fn a_new_image_that_cannot_be_opened_is_taken_away_again() {
    let dir = Dir::new("external-back");
    let base = dir.text("base.raw");
    std::fs::write(&base, noise(LEN, 8)).expect("a base");
    let source = Server::start(&["-f", "raw", "--read-only", &base]);
    let (url, clone) = (source.uri(""), dir.text("clone.vlm"));
    let made = [
        "create",
        "-q",
        "-f",
        "vellum",
        "-b",
        &url,
        "-F",
        "raw",
        "--trust-base",
        "--allow-url",
        &url,
        &clone,
    ];
    vellum(&made).answer();
    let (other, mut others) = self::made(&dir, "vellum", "layout=zoned");
    let (named, named_other) = (format!("clone={clone}"), format!("other={other}"));
    let served = Controlled::start(&["--allow-url", &url, "--export", &named_other, "--export", &named]);
    let (mut guest, mut beside) = (served.client("clone"), served.client("other"));
    let (mut model, mut random) = (noise(LEN, 8), Random::from_seed(7));
    scribble(&mut guest, &mut model, &mut random, 10);
    scribble(&mut beside, &mut others, &mut random, 10);
    let all = [format!("other={}", dir.text("b.vlm")), format!("clone={}", dir.text("a.vlm"))];
    refused(&served, &["a.vlm", "nothing proves"], &[&all[0], &all[1]]);
    same(&guest.read_all().expect("it is read"), &model, "the clone");
    same(&beside.read_all().expect("it is read"), &others, "the other one");
    scribble(&mut guest, &mut model, &mut random, 10);
    scribble(&mut beside, &mut others, &mut random, 10);
    guest.flush().expect("no write was lost");
    beside.flush().expect("no write was lost");
    assert!(!dir.join("a.vlm").exists() && !dir.join("b.vlm").exists(), "{:?}", dir.names());
    // One alone can have it, and the other one as well, once the user says so.
    put(&served, &[&all[0]]).answer();
    scribble(&mut beside, &mut others, &mut random, 10);
    same(&beside.read_all().expect("it is read"), &others, "over the old one");
    drop((guest, beside));
    assert_eq!(served.server.stop().code, 0);
    same(&read(&dir.text("b.vlm"), "vellum"), &others, "the new one");
}

/// A guest that writes a number first to one disk and then to another one finds in no pair of snapshots a number on the second
/// that the first does not have.
#[test]
fn snapshots_of_several_disks_are_of_one_moment() {
    let dir = Dir::new("external-moment");
    let [one, other] = ["one.vlm", "other.qcow2"].map(|name| dir.text(name));
    for image in [&one, &other] {
        vellum(&["create", "-q", image, "4M"]).answer();
    }
    let served =
        Controlled::start(&["--export", &format!("one={one}"), "--export", &format!("other={other}")]);
    let ends = AtomicBool::new(false);
    let (mut tops, rounds) = (vec![(one.clone(), other.clone())], 4 * scale());
    std::thread::scope(|scope| {
        let guest = scope.spawn(|| {
            let (mut first, mut second) = (served.client("one"), served.client("other"));
            let mut number = 0u64;
            while !ends.load(Ordering::Acquire) {
                number += 1;
                let bytes = number.to_le_bytes().repeat(64);
                first.write(0, &bytes, 0).expect("it is written");
                second.write(0, &bytes, 0).expect("it is written");
            }
            number
        });
        for round in 0..rounds {
            std::thread::sleep(Duration::from_millis(30));
            let new = [dir.text(&format!("one-{round}.vlm")), dir.text(&format!("other-{round}.qcow2"))];
            let named = [format!("one={}", new[0]), format!("other={}", new[1])];
            let said = put(&served, &["--output", "json", &named[0], &named[1]]).json();
            assert_eq!(said["overlays"].as_array().map(Vec::len), Some(2), "{said}");
            tops.push(new.into());
        }
        ends.store(true, Ordering::Release);
        assert!(guest.join().expect("a guest") > rounds as u64);
    });
    assert_eq!(served.server.stop().code, 0);
    let mut before = 0;
    for (one, other) in &tops {
        let number = |image: &str, format| {
            u64::from_le_bytes(read(image, format)[..8].try_into().expect("eight bytes"))
        };
        let (first, second) = (number(one, "vellum"), number(other, "qcow2"));
        assert!(first == second || first == second + 1, "{one} has {first}, {other} has {second}");
        assert!(first >= before, "{one}: {first} after {before}");
        before = first;
    }
}

/// The server is killed at any moment of a snapshot. The new image is the disk if it is there, the old one if not; and nothing that
/// was flushed is missing.
#[test]
fn a_server_that_is_killed_during_a_snapshot_has_lost_nothing_that_was_flushed() {
    let mut switched = 0;
    let rounds = 24 * scale();
    for (format, options, name) in [
        ("vellum", "layout=zoned", "vlm"),
        ("qcow2", "journal=off", "qcow2"),
        ("vellum", "layout=linear", "vlm"),
    ] {
        let dir = Dir::new("external-killed");
        let (mut top, mut model) = made(&dir, format, options);
        let mut random = Random::from_seed(11);
        for round in 0..rounds {
            let new = dir.text(&format!("new-{round}.{name}"));
            let served = Controlled::start(&["-f", format, &top]);
            let mut guest = served.client("");
            let wait = Duration::from_micros(random.below(300_000));
            let pages = Pages::new(LEN, round as u64 * 131, random.below(u64::MAX));
            let (socket, path) = (served.socket.clone(), new.clone());
            std::thread::scope(|scope| {
                let writer = scope.spawn(|| pages.write_on(&mut guest, u64::MAX));
                let asks = scope.spawn(move || {
                    let mut command = vellum_command();
                    let _ = command.args(["snapshot", "external", "--control", &socket, &path]).output();
                });
                std::thread::sleep(wait);
                served.server.kill();
                writer.join().expect("a writer");
                asks.join().expect("a command");
            });
            let is_new = std::path::Path::new(&new).exists();
            switched += usize::from(is_new);
            if is_new {
                top = new;
            }
            pages.judge(
                &read(&top, format),
                &mut model,
                &format!("{format} {options}, round {round}, {is_new}"),
            );
        }
    }
    assert!(switched > 0 && switched < 3 * rounds, "it is killed before and after: {switched}");
}
