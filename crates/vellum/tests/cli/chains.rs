//! `vellum rebase` and `vellum commit`: chains that change, with qemu-img as judge.

use std::process::Stdio;
use std::time::Duration;

use super::flatten::used_clone;
use super::refused;
use super::support::client::Client;
use super::support::dir::Dir;
use super::support::program::{has, run, skipped, succeed, vellum, vellum_command};
use super::support::server::Server;
use super::support::{first_difference, noise, patchy};

const LEN: usize = 9 << 20;

/// The kinds of images that can be given any backing image.
const KINDS: [&[&str]; 4] = [
    &["-f", "qcow2"],
    &["-f", "qcow2", "-o", "journal=off"],
    &["-f", "qcow2", "-o", "cluster_size=2M,extended_l2=off"],
    &["-f", "qcow2", "-o", "compat=0.10,extended_l2=off,journal=off"],
];

fn read(image: &str, format: &str) -> Vec<u8> {
    let served = Server::start(&["-f", format, "--read-only", image]);
    let read = Client::connect(&served.peer(), "").expect("a connection").read_all().expect("read");
    assert_eq!(served.stop().code, 0);
    read
}

fn same(read: &[u8], wanted: &[u8], about: &str) {
    assert_eq!(read.len(), wanted.len(), "{about}");
    assert_eq!(first_difference(read, wanted), None, "{about}");
}

fn template(dir: &Dir) -> String {
    let (base, template) = (dir.text("base.raw"), dir.text("template.qcow2"));
    std::fs::write(&base, patchy(LEN, 7)).expect("a base");
    vellum(&["clone", "-q", "-F", "raw", &base, &template]).answer();
    template
}

#[test]
fn an_image_reads_the_same_over_another_backing_image() {
    let dir = Dir::new("rebase");
    let template = template(&dir);
    // One that is like the old one in some places, shorter, and has data where the old one has zeros.
    let other = dir.text("other.raw");
    let mut bytes = patchy(LEN, 7);
    bytes.truncate(7 << 20);
    bytes[5 << 20..6 << 20].copy_from_slice(&noise(1 << 20, 99));
    std::fs::write(&other, bytes).expect("another base");
    for (index, kind) in KINDS.iter().enumerate() {
        let clone = dir.text(&format!("{index}.qcow2"));
        let disk = used_clone(&template, kind, &clone, 10 * index as u64);
        let said = vellum(&["rebase", "-b", "other.raw", "-F", "raw", "--output", "json", &clone]).json();
        assert_eq!(said["backing-filename-before"], "template.qcow2", "{said}");
        let written = said["bytes-written"].as_u64().expect("a number");
        assert!((1 << 19..8 << 20).contains(&written), "{kind:?}: what is equal is not copied: {said}");
        let info = vellum(&["info", "--output", "json", &clone]).json();
        assert_eq!(info["backing-filename"], "other.raw", "{info}");
        assert_eq!(info["backing-filename-format"], "raw", "{info}");
        std::fs::rename(&template, dir.text("away")).expect("it is not needed");
        same(&read(&clone, "qcow2"), &disk, &format!("{kind:?}"));
        vellum(&["check", &clone]).answer();
        if has("qemu-img") {
            succeed("qemu-img", &["check", "-q", &clone]);
        } else {
            skipped("there is no qemu-img");
        }
        std::fs::rename(dir.text("away"), &template).expect("back");
        // And again, to the image below the old one, and to none.
        vellum(&["rebase", "-q", "-b", "base.raw", "-F", "raw", &clone]).answer();
        same(&read(&clone, "qcow2"), &disk, &format!("{kind:?}, over the base"));
        let again = vellum(&["rebase", "-b", "template.qcow2", "--output", "json", &clone]).json();
        assert_eq!(again["bytes-written"], 0, "they are the same: {again}");
        assert_eq!(again["backing-filename-format"], "qcow2", "{again}");
        vellum(&["rebase", "-q", "-b", "", &clone]).answer();
        same(&read(&clone, "qcow2"), &disk, &format!("{kind:?}, alone"));
        // An image that stands alone gets one.
        vellum(&["rebase", "-q", "-b", "other.raw", "-F", "raw", &clone]).answer();
        same(&read(&clone, "qcow2"), &disk, &format!("{kind:?}, over one again"));
        vellum(&["check", &clone]).answer();
    }
}

#[test]
fn a_vellum_image_gets_a_backing_image_of_the_same_size() {
    let dir = Dir::new("rebase-native");
    let template = template(&dir);
    let other = dir.text("other.raw");
    let mut bytes = patchy(LEN, 7);
    bytes[5 << 20..6 << 20].copy_from_slice(&noise(1 << 20, 99));
    std::fs::write(&other, &bytes).expect("another base");
    std::fs::write(dir.join("short.raw"), &bytes[..LEN - 4096]).expect("a shorter one");
    for (index, layout) in ["zoned", "table", "linear"].iter().enumerate() {
        let clone = dir.text(&format!("{layout}.vlm"));
        let kind = ["-f", "vellum", "-o", &format!("layout={layout}")];
        let disk = used_clone(&template, &kind, &clone, 20 + 10 * index as u64);
        refused(
            1,
            &["short.raw", "same size", "flatten"],
            &["rebase", "-b", "short.raw", "-F", "raw", &clone],
        );
        same(&read(&clone, "vellum"), &disk, layout);
        vellum(&["rebase", "-q", "-b", "other.raw", "-F", "raw", &clone]).answer();
        same(&read(&clone, "vellum"), &disk, layout);
        vellum(&["check", &clone]).answer();
        let info = vellum(&["info", "--output", "json", &clone]).json();
        assert_eq!(info["backing-filename"], "other.raw", "{info}");
    }
    let alone = dir.text("alone.vlm");
    vellum(&["create", "-q", "-f", "vellum", &alone, "9M"]).answer();
    refused(
        1,
        &["alone.vlm", "made without a backing image"],
        &["rebase", "-b", "other.raw", "-F", "raw", &alone],
    );
}

#[test]
fn what_cannot_be_rebased_stays_as_it_is() {
    let dir = Dir::new("not-rebased");
    let template = template(&dir);
    let (clone, native) = (dir.text("clone.qcow2"), dir.text("clone.vlm"));
    vellum(&["clone", "-q", &template, &clone]).answer();
    vellum(&["clone", "-q", &template, &native]).answer();
    let over = dir.text("over.qcow2");
    vellum(&["clone", "-q", &clone, &over]).answer();
    let before = std::fs::read(&clone).expect("an image");
    refused(1, &["would be a loop", "over.qcow2"], &["rebase", "-b", "over.qcow2", &clone]);
    refused(1, &["would be a loop"], &["rebase", "-b", "clone.qcow2", &clone]);
    refused(1, &["missing.raw", "`-u`"], &["rebase", "-b", "missing.raw", "-F", "raw", &clone]);
    refused(1, &["missing.raw", "-F"], &["rebase", "-u", "-b", "missing.raw", &clone]);
    assert!(std::fs::read(&clone).expect("an image") == before);
    vellum(&["snapshot", "create", &native, "then"]).answer();
    refused(1, &["clone.vlm", "has snapshots"], &["rebase", "-b", "base.raw", "-F", "raw", &native]);
    refused(1, &["clone.vlm", "has snapshots"], &["rebase", "-u", "-b", "base.raw", "-F", "raw", &native]);
    let served = Server::start(&[&clone]);
    refused(1, &["clone.qcow2", "in use"], &["rebase", "-b", "base.raw", "-F", "raw", &clone]);
    refused(1, &["clone.qcow2", "in use"], &["rebase", "-u", "-b", "base.raw", "-F", "raw", &clone]);
    assert_eq!(served.stop().code, 0);
    // A template that has moved: only the name changes.
    let disk = read(&clone, "qcow2");
    std::fs::rename(&template, dir.text("moved.qcow2")).expect("moved");
    vellum(&["rebase", "-q", "-u", "-b", "moved.qcow2", &clone]).answer();
    same(&read(&clone, "qcow2"), &disk, "moved");
    vellum(&["rebase", "-q", "-u", "-b", "", &clone]).answer();
    same(&read(&clone, "qcow2"), &vec![0; LEN], "nothing of it was its own");
}

/// A backing image that would not be opened without a further option is named as such.
#[test]
fn a_backing_image_elsewhere_is_said_to_need_an_option() {
    let (dir, elsewhere) = (Dir::new("rebase-here"), Dir::new("rebase-there"));
    let template = template(&dir);
    let clone = dir.text("clone.qcow2");
    vellum(&["clone", "-q", &template, &clone]).answer();
    let disk = read(&clone, "qcow2");
    let other = elsewhere.text("other.raw");
    std::fs::write(&other, patchy(LEN, 8)).expect("another base");
    let ran = vellum(&["rebase", "-b", &other, "-F", "raw", &clone]);
    assert!(
        ran.code == 0 && ran.err.contains("further option") && ran.err.contains("--allow-dir"),
        "{ran:?}"
    );
    let served = Server::start(&["--allow-dir", &elsewhere.text(""), &clone]);
    let found = Client::connect(&served.peer(), "").expect("a connection").read_all().expect("read");
    assert_eq!(served.stop().code, 0);
    same(&found, &disk, "over a base elsewhere");
}

/// Killed at any moment, it leaves an image that reads the same; the next run ends it.
#[test]
fn a_rebase_that_is_killed_goes_on() {
    let dir = Dir::new("rebase-killed");
    let (base, other) = (dir.text("base.raw"), dir.text("other.raw"));
    std::fs::write(&base, noise(64 << 20, 3)).expect("a base");
    std::fs::write(&other, noise(64 << 20, 4)).expect("another");
    for (format, name) in [("qcow2", "clone.qcow2"), ("vellum", "clone.vlm")] {
        let clone = dir.text(name);
        vellum(&["clone", "-q", "-F", "raw", &base, &clone]).answer();
        let mut interrupted = 0;
        for wait_ms in [1, 5, 10, 20, 30, 40, 60, 80, 120, 200] {
            let mut command = vellum_command();
            command.args(["rebase", "-b", "other.raw", "-F", "raw", &clone]);
            let mut child =
                command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("our own program");
            std::thread::sleep(Duration::from_millis(wait_ms));
            child.kill().expect("it was started");
            interrupted += usize::from(!child.wait().expect("it ends").success());
            vellum(&["compare", "-q", "-f", format, "-F", "raw", &clone, &base]).answer();
        }
        assert!(interrupted > 0);
        vellum(&["rebase", "-q", "-b", "other.raw", "-F", "raw", &clone]).answer();
        vellum(&["compare", "-q", "-f", format, "-F", "raw", &clone, &base]).answer();
        vellum(&["check", &clone]).answer();
    }
}

/// A base, an image over it and one over that, each with writes of its own. Returns what the last one reads as.
fn three(dir: &Dir, kind: &[&str], base_format: &str) -> (String, String, String, Vec<u8>) {
    let (base, middle, top) = (dir.text("b.img"), dir.text("m.img"), dir.text("t.img"));
    let raw = dir.text("r.raw");
    std::fs::write(&raw, patchy(LEN, 5)).expect("a base");
    vellum(&["convert", "-q", "-f", "raw", "-O", base_format, &raw, &base]).answer();
    std::fs::remove_file(&raw).expect("it is there");
    let write = |image: &str, seed: u64, format: &str| {
        let served = Server::start(&["-f", format, image]);
        let mut guest = Client::connect(&served.peer(), "").expect("a connection");
        guest.write((seed << 19) + 512, &noise(70_000, seed), 0).expect("written");
        guest.zero((seed << 20) + 4096, 200_000, 0).expect("zeroed");
        guest.trim(seed << 18, 1 << 16).expect("discarded");
        guest.write(8 << 20, &noise(512, seed + 50), 0).expect("written");
        guest.flush().expect("flushed");
        let disk = guest.read_all().expect("read");
        guest.disconnect();
        assert_eq!(served.stop().code, 0);
        disk
    };
    vellum(&[&["create", "-q", "-b", "b.img", "-F", base_format], kind, &[&middle, "9500k"]].concat())
        .answer();
    write(&middle, 3, kind[1]);
    vellum(&[&["create", "-q", "-b", "m.img", "-F", kind[1]], kind, &[&top, "11M"]].concat()).answer();
    let disk = write(&top, 4, kind[1]);
    (base, middle, top, disk)
}

#[test]
fn what_an_image_has_goes_into_the_one_below() {
    for (kind, base_format) in [
        (KINDS[0], "raw"),
        (KINDS[1], "qcow2"),
        (KINDS[2], "vellum"),
        (&["-f", "vellum"], "qcow2"),
        (KINDS[3], "raw"),
    ] {
        let about = format!("{kind:?} over {base_format}");
        let dir = Dir::new("commit");
        let (base, middle, top, disk) = three(&dir, kind, base_format);
        let stated = ["-f", kind[1]];
        let judge = has("qemu-img") && kind[1] == "qcow2" && base_format != "vellum";
        let there = Dir::new("commit-qemu");
        if judge {
            for name in ["b.img", "m.img", "t.img"] {
                std::fs::copy(dir.join(name), there.join(name)).expect("a copy");
            }
            let journaled = vellum(&["info", "--output", "json", &there.text("m.img")]).json().to_string();
            if journaled.contains("journal") {
                vellum(&["journal", "disable", &there.text("m.img")]);
                vellum(&["journal", "disable", &there.text("t.img")]);
            }
        } else if !has("qemu-img") {
            skipped("there is no qemu-img");
        }
        // Into the one directly below, which is smaller.
        let said = vellum(&[&["commit", "--output", "json"], &stated[..], &[&top]].concat()).json();
        assert_eq!(said["committed-into"], middle, "{about}: {said}");
        same(&read(&top, kind[1]), &disk, &about);
        same(&read(&middle, kind[1]), &disk, &about);
        vellum(&["check", "-f", kind[1], &middle]).answer();
        // And all of it into the base.
        let said =
            vellum(&[&["commit", "--output", "json", "-b", &base], &stated[..], &[&top]].concat()).json();
        assert_eq!(said["useless"][0], middle, "{about}: {said}");
        same(&read(&base, base_format), &disk, &about);
        same(&read(&top, kind[1]), &disk, &about);
        vellum(&["check", "-f", base_format, &base]);
        if judge {
            let ran =
                run("qemu-img", &["commit", "-q", "-d", "-b", &there.text("b.img"), &there.text("t.img")]);
            assert_eq!(ran.code, 0, "{about}: {ran:?}");
            vellum(&["compare", "-f", base_format, "-F", base_format, &base, &there.text("b.img")]).answer();
            succeed(
                "qemu-img",
                &["compare", "-f", base_format, "-F", base_format, &base, &there.text("b.img")],
            );
        }
    }
}

#[test]
fn what_would_ruin_other_images_is_not_committed() {
    let dir = Dir::new("not-committed");
    let template = template(&dir);
    let (clone, other) = (dir.text("clone.qcow2"), dir.text("other.vlm"));
    let disk = used_clone(&template, KINDS[0], &clone, 1);
    vellum(&["clone", "-q", &template, &other]).answer();
    let before = std::fs::read(&template).expect("an image");
    refused(1, &["other.vlm", "--force", "flatten"], &["commit", &clone]);
    refused(1, &["base.raw", "no backing image"], &["commit", "-f", "raw", &dir.text("base.raw")]);
    refused(1, &["other.vlm is not below"], &["commit", "-b", &other, &clone]);
    let served = Server::start(&["--read-only", &template]);
    vellum(&["flatten", "-q", &other]).answer();
    refused(1, &["template.qcow2", "in use"], &["commit", &clone]);
    assert_eq!(served.stop().code, 0);
    assert!(std::fs::read(&template).expect("an image") == before, "nothing was written");
    vellum(&["commit", "-q", &clone]).answer();
    same(&read(&template, "qcow2"), &disk, "the template has it");
    same(&read(&clone, "qcow2"), &disk, "the image reads the same");
    let native = dir.text("with-snapshots.vlm");
    vellum(&["clone", "-q", &template, &native]).answer();
    vellum(&["snapshot", "create", &native, "then"]).answer();
    refused(1, &["with-snapshots.vlm", "has snapshots"], &["commit", "--force", &native]);
}

/// Clones that name the base in other ways are found too.
#[test]
fn clones_by_other_names_are_found_before_a_commit() {
    let dir = Dir::new("other-names");
    let template = template(&dir);
    let clone = dir.text("clone.qcow2");
    used_clone(&template, KINDS[0], &clone, 1);
    std::fs::hard_link(&template, dir.join("hard.qcow2")).expect("a link");
    let sibling = dir.text("sibling.qcow2");
    vellum(&["clone", "-q", &dir.text("hard.qcow2"), &sibling]).answer();
    refused(1, &["sibling.qcow2", "--force"], &["commit", &clone]);
    std::fs::remove_file(&sibling).expect("removed");
    let elsewhere = Dir::new("elsewhere");
    vellum(&["clone", "-q", &template, &elsewhere.text("linked.qcow2")]).answer();
    std::os::unix::fs::symlink(elsewhere.join("linked.qcow2"), dir.join("link.qcow2")).expect("a link");
    refused(1, &["link.qcow2", "--force"], &["commit", &clone]);
    std::fs::remove_file(dir.join("link.qcow2")).expect("removed");
    vellum(&["commit", "-q", &clone]).answer();
}

/// What a guest has written at the beginning of its disk is never taken for an image, once it has come to a raw base.
#[test]
fn a_commit_records_the_format_of_its_base() {
    let dir = Dir::new("no-format");
    let (base, top) = (dir.text("base.img"), dir.text("top.qcow2"));
    std::fs::write(&base, vec![7; 2 << 20]).expect("a base");
    std::fs::write(dir.join("secret.img"), vec![b'S'; 2 << 20]).expect("a file");
    vellum(&["create", "-q", "-f", "qcow2", "-b", "base.img", "-F", "raw", &top]).answer();
    // As older programs have made it: the extension with the format becomes an unknown one.
    let mut bytes = std::fs::read(&top).expect("an image");
    let at = bytes.windows(4).position(|four| four == [0xe2, 0x79, 0x2a, 0xca]).expect("the extension");
    bytes[at..at + 4].copy_from_slice(&[0x12, 0x34, 0x56, 0x78]);
    std::fs::write(&top, bytes).expect("an image");
    let evil = dir.text("evil.qcow2");
    vellum(&["create", "-q", "-f", "qcow2", "-b", "secret.img", "-F", "raw", &evil]).answer();
    let mut evil = std::fs::read(&evil).expect("an image");
    evil.resize(256 << 10, 0);
    let server = Server::start(&["-f", "qcow2", &top]);
    let mut client = Client::connect(&server.peer(), "").expect("a connection");
    client.write(0, &evil, 0).expect("written");
    client.flush().expect("flushed");
    let disk = client.read_all().expect("read");
    client.disconnect();
    server.stop();
    vellum(&["commit", "-q", &top]).answer();
    let info = vellum(&["info", "--output", "json", &top]).json();
    assert_eq!(info["backing-filename-format"], "raw", "{info}");
    same(&read(&top, "qcow2"), &disk, "after the commit");
    assert!(!disk.contains(&b'S'), "and nothing of the other file");
}

/// Killed at any moment, the image reads the same; the next run ends it.
#[test]
fn a_commit_that_is_killed_goes_on() {
    let dir = Dir::new("commit-killed");
    for (format, base_format) in [("qcow2", "raw"), ("vellum", "qcow2"), ("qcow2", "vellum")] {
        let (base, clone, raw) = (dir.text("base"), dir.text("clone"), dir.text("raw"));
        std::fs::write(&raw, noise(64 << 20, 3)).expect("a base");
        vellum(&["convert", "-q", "-f", "raw", "-O", base_format, &raw, &base]).answer();
        vellum(&["create", "-q", "-f", format, "-b", "base", "-F", base_format, &clone]).answer();
        std::fs::write(&raw, noise(64 << 20, 4)).expect("the new content");
        vellum(&["convert", "-q", "-n", "-f", "raw", "-O", format, &raw, &clone]).answer();
        let mut interrupted = 0;
        for wait_ms in [1, 5, 10, 20, 30, 40, 60, 80, 120, 200] {
            let mut command = vellum_command();
            command.args(["commit", "-f", format, &clone]);
            let mut child =
                command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("our own program");
            std::thread::sleep(Duration::from_millis(wait_ms));
            child.kill().expect("it was started");
            interrupted += usize::from(!child.wait().expect("it ends").success());
            vellum(&["compare", "-q", "-f", format, "-F", "raw", &clone, &raw]).answer();
        }
        assert!(interrupted > 0);
        vellum(&["commit", "-q", "-f", format, &clone]).answer();
        vellum(&["compare", "-q", "-f", base_format, "-F", "raw", &base, &raw]).answer();
        vellum(&["check", "-f", base_format, &base]);
    }
}
