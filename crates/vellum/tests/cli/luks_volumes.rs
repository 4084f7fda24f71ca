//! Raw LUKS volumes that are made here, with `qemu-img` as the other program: created, copied into, measured, resized, served.

use std::os::unix::process::CommandExt as _;

use super::refused;
use super::support::client::Client;
use super::support::dir::Dir;
use super::support::loops::LoopDevice;
use super::support::program::{Ran, finish, run, succeed, vellum, vellum_command};
use super::support::server::Server;
use super::support::{noise, patchy};

const LEN: usize = 3 << 20;
/// Bytes before the data, as QEMU has it.
const HEADER: u64 = 2_068_480;

/// The options of one secret, for both programs.
struct Words {
    ours: [String; 2],
    theirs: [String; 2],
}

impl Words {
    fn of(dir: &Dir) -> Self {
        std::fs::write(dir.join("s"), "correct horse").expect("a secret");
        let file = dir.text("s");
        Self {
            ours: ["--secret".to_owned(), format!("id=s,file={file}")],
            theirs: ["--object".to_owned(), format!("secret,id=s,file={file}")],
        }
    }

    fn ours(&self) -> [&str; 2] {
        self.ours.each_ref().map(String::as_str)
    }

    fn theirs(&self) -> [&str; 2] {
        self.theirs.each_ref().map(String::as_str)
    }
}

fn named(path: &str) -> String {
    format!("driver=luks,key-secret=s,file.filename={path}")
}

/// This program, by the other's name.
fn as_qemu_img(line: &[String]) -> Ran {
    let mut command = vellum_command();
    command.arg0("qemu-img").args(line);
    finish(command, None)
}

fn len(path: &str) -> u64 {
    std::fs::metadata(path).expect("there").len()
}

/// Made by either program, written by the other, read by both.
#[test]
fn volumes_are_made_by_either_program() {
    crate::requires!("qemu-img");
    crate::requires!("qemu-io");
    let dir = Dir::new("luks-made");
    let words = Words::of(&dir);
    let (ours, theirs, raw) = (dir.text("ours"), dir.text("theirs"), dir.text("raw"));
    for options in [
        "key-secret=s,iter-time=10",
        "key-secret=s,iter-time=10,cipher-alg=aes-128,hash-alg=sha1",
        "key-secret=s,iter-time=10,cipher-mode=xts,ivgen-alg=plain64,hash-alg=sha512,preallocation=full",
        "key-secret=s,iter-time=10,preallocation=falloc",
    ] {
        // The same command line, under the other's name.
        let line = |path: &str| {
            let words = words.theirs();
            ["create", "-f", "luks", words[0], words[1], "-o", options, path, "3M"].map(str::to_owned)
        };
        let ran = as_qemu_img(&line(&ours));
        assert_eq!(ran.code, 0, "{ran:?}");
        let line = line(&theirs);
        let line: Vec<&str> = line.iter().map(String::as_str).collect();
        let said = run("qemu-img", &line);
        assert_eq!(ran.out.replace(&ours, &theirs), said.out, "{options}");
        assert_eq!(len(&ours), len(&theirs), "{options}");
        let facts = |path: &str| {
            let mut facts = vellum(&["info", "--output", "json", path]).json()["format-specific"].clone();
            for key in ["uuid", "master-key-iters"] {
                facts["data"][key] = 0.into();
            }
            facts["data"]["slots"][0]["iters"] = 0.into();
            facts
        };
        assert_eq!(facts(&ours), facts(&theirs), "{options}");
        // What was never written reads as random bytes; what is written, by whom ever, is there.
        let content = noise(LEN, 3);
        std::fs::write(&raw, &content).expect("a disk");
        let copy = ["convert", "-n", "--object", &words.theirs[1], "-f", "raw", &raw, "--target-image-opts"];
        succeed("qemu-img", &[&copy[..], &[&named(&ours)]].concat());
        vellum(
            &[&["convert", "-n"], &words.ours()[..], &["-O", "luks", "-f", "raw", &raw, &theirs]].concat(),
        )
        .answer();
        for volume in [&ours, &theirs] {
            vellum(&[&["compare"], &words.ours()[..], &[volume, &raw]].concat()).answer();
            let source = named(volume);
            let compare = ["compare", "--object", &words.theirs[1], "--image-opts", &source];
            succeed("qemu-img", &[&compare[..], &[&format!("driver=raw,file.filename={raw}")]].concat());
            let stored = std::fs::read(volume).expect("there");
            assert!(!stored.windows(32).any(|window| window == &content[512..544]), "nobody may read it");
        }
    }
}

/// Zeros are not left out in a copy: a hole of the file does not read as zero.
#[test]
fn a_copy_has_the_zeros_of_its_source() {
    crate::requires!("qemu-img");
    let dir = Dir::new("luks-copied");
    let words = Words::of(&dir);
    let (raw, qcow2, volume, back) = (dir.text("raw"), dir.text("a.qcow2"), dir.text("v"), dir.text("back"));
    let mut content = patchy(LEN, 3);
    content[1 << 20..2 << 20].fill(0);
    std::fs::write(&raw, &content).expect("a disk");
    vellum(&["convert", "-q", "-f", "raw", "-O", "qcow2", &raw, &qcow2]).answer();
    for (source, more) in
        [(&raw, &["-f", "raw"][..]), (&qcow2, &[]), (&qcow2, &["-S", "0", "-W"]), (&qcow2, &["-t", "none"])]
    {
        let new = ["-O", "luks", "-o", "key-secret=s,iter-time=10"];
        // In place of something, in a file with two names, and alone.
        vellum(&[&["convert", "-q"], more, &words.ours()[..], &new, &[source, &volume]].concat()).answer();
        assert_eq!(len(&volume), HEADER + LEN as u64);
        let theirs = words.theirs();
        succeed(
            "qemu-img",
            &["convert", theirs[0], theirs[1], "--image-opts", &named(&volume), "-O", "raw", &back],
        );
        assert!(std::fs::read(&back).expect("there") == content, "{more:?}");
        vellum(&[&["convert", "-q"], &words.ours()[..], &[&volume, &back]].concat()).answer();
        assert!(std::fs::read(&back).expect("there") == content, "{more:?}");
    }
    std::fs::hard_link(&volume, dir.join("second")).expect("a second name");
    content.reverse();
    std::fs::write(&raw, &content).expect("a disk");
    let new = ["-f", "raw", "-O", "luks", "-o", "key-secret=s,iter-time=10", &raw, &volume];
    vellum(&[&["convert", "-q"], &words.ours()[..], &new].concat()).answer();
    vellum(&[&["compare"], &words.ours()[..], &[&dir.text("second"), &raw]].concat()).answer();
}

#[test]
fn a_volume_is_measured_as_by_qemu_img() {
    crate::requires!("qemu-img");
    let dir = Dir::new("luks-measured");
    let words = Words::of(&dir);
    let image = dir.text("a.qcow2");
    vellum(&["create", "-q", "-f", "qcow2", &image, "5M"]).answer();
    for line in [
        &["-o", "key-secret=s", "--size", "10M"][..],
        &["-o", "key-secret=s,cipher-alg=aes-128", "--size", "1G"],
        &["-o", "key-secret=s", "-f", "qcow2", &image],
    ] {
        let theirs = words.theirs();
        let line = [&["measure", theirs[0], theirs[1], "-O", "luks"][..], line].concat();
        assert_eq!(vellum(&line).answer().trim_end(), run("qemu-img", &line).out.trim_end(), "{line:?}");
    }
}

#[test]
fn a_volume_is_resized_and_keeps_its_data() {
    crate::requires!("qemu-img");
    let dir = Dir::new("luks-resized");
    let words = Words::of(&dir);
    let (raw, volume) = (dir.text("raw"), dir.text("volume"));
    let content = noise(LEN, 3);
    std::fs::write(&raw, &content).expect("a disk");
    let new = ["-f", "raw", "-O", "luks", "-o", "key-secret=s,iter-time=10", &raw, &volume];
    vellum(&[&["convert", "-q"], &words.ours()[..], &new].concat()).answer();
    for (more, size) in [
        (&["4M"][..], 4_u64 << 20),
        (&["--preallocation", "full", "+1M"], 5 << 20),
        (&["--preallocation", "falloc", "6M"], 6 << 20),
        (&["--shrink", "-2M"], 4 << 20),
        (&["--shrink", "2M"], 2 << 20),
    ] {
        let (size_word, options) = more.split_last().expect("a size");
        vellum(&[&["resize", "-q"], options, &words.ours()[..], &[&volume, size_word]].concat()).answer();
        assert_eq!(len(&volume), HEADER + size, "{more:?}");
        let theirs = words.theirs();
        let kept = usize::try_from(size).expect("small").min(LEN);
        let read = dir.text("read");
        succeed(
            "qemu-img",
            &["convert", theirs[0], theirs[1], "--image-opts", &named(&volume), "-O", "raw", &read],
        );
        let read = std::fs::read(&read).expect("there");
        assert_eq!(read.len() as u64, size, "{more:?}");
        assert!(read[..kept] == content[..kept], "{more:?}");
    }
    refused(1, &["--shrink"], &["resize", &volume, "1M"]);
    refused(1, &["falloc or full"], &["resize", "--preallocation", "metadata", &volume, "8M"]);
    assert_eq!(len(&volume), HEADER + (2 << 20));
}

/// Written over NBD, with zeros and discards, and made longer meanwhile.
#[test]
fn a_volume_is_served_for_writing() {
    let dir = Dir::new("luks-served");
    let words = Words::of(&dir);
    let (volume, control) = (dir.text("volume"), dir.text("control"));
    let create = ["create", "-q", "-f", "luks", "-o", "key-secret=s,iter-time=10", &volume, "3M"];
    vellum(&[&create[..], &words.ours()].concat()).answer();
    let [option, spec] = words.ours();
    let source = named(&volume);
    for how in [&["-f", "luks", &volume][..], &["--image-opts", &source]] {
        let served = Server::start(&[&["--control", &control, option, spec], how].concat());
        let mut guest = Client::connect(&served.peer(), "").expect("a connection");
        let bytes = noise(700_000, 9);
        guest.write(5000, &bytes, 0).expect("written");
        guest.zero(6000, 300_001, 0).expect("zeros");
        guest.trim(1 << 20, 65_536).expect("a discard may do nothing");
        guest.flush().expect("flushed");
        let mut expected = bytes;
        expected[1000..301_001].fill(0);
        assert!(guest.read(5000, 700_000).expect("read") == expected);
        drop(guest);
        vellum(&["resize", "-q", "--control", &control, "+1M"]).answer();
        let mut guest = Client::connect(&served.peer(), "").expect("a connection");
        guest.write(3 << 20, &expected[..512], 0).expect("written");
        drop(guest);
        served.stop();
        let back = dir.text("back");
        vellum(&["convert", "-q", option, spec, &volume, &back]).answer();
        assert!(std::fs::read(&back).expect("there")[5000..705_000] == expected);
    }
    assert_eq!(len(&volume), HEADER + (5 << 20));
}

/// A volume on a device has all of it, and grows with it: closed or served, and whatever the device's blocks are.
#[test]
fn a_volume_on_a_device_grows_with_it() {
    crate::requires!("losetup");
    let dir = Dir::new("luks-device");
    let words = Words::of(&dir);
    let [option, spec] = words.ours();
    for block in [512, 4096] {
        let Some(device) = LoopDevice::new(HEADER + (3 << 20), block) else { return };
        let (path, control) = (device.text(), dir.text("control"));
        let create = ["create", "-q", "-f", "luks", "-o", "key-secret=s,iter-time=10", option, spec];
        vellum(&[&create[..], &[&path, "3M"]].concat()).answer();
        vellum(&["resize", "-q", "-f", "luks", option, spec, &path, "3M"]).answer();
        refused(1, &[&path, "fixed"], &["resize", "-f", "luks", option, spec, &path, "4M"]);
        let served = Server::start(&["--control", &control, option, spec, "-f", "luks", &path]);
        let mut guest = Client::connect(&served.peer(), "").expect("a connection");
        let bytes = noise(9 << 16, 9);
        guest.write(0, &bytes, 0).expect("written");
        refused(1, &[&path, "the image needs"], &["resize", "--control", &control, "4M"]);
        device.grow(HEADER + (4 << 20));
        refused(1, &[&path, "the image needs"], &["resize", "--control", &control, "5M"]);
        vellum(&["resize", "-q", "--control", &control, "4M"]).answer();
        drop(guest);
        let mut guest = Client::connect(&served.peer(), "").expect("a connection");
        assert_eq!(guest.size, 4 << 20, "blocks of {block}");
        guest.write(4095 << 10, &bytes[..1024], 0).expect("written");
        guest.flush().expect("flushed");
        drop(guest);
        served.stop();
        let back = dir.text("back");
        vellum(&["convert", "-q", option, spec, "-f", "luks", &path, &back]).answer();
        let read = std::fs::read(&back).expect("there");
        assert!(read.len() == 4 << 20 && read[..bytes.len()] == bytes && read[4095 << 10..] == bytes[..1024]);
    }
}

#[test]
fn what_is_not_made_is_refused_by_name() {
    let dir = Dir::new("luks-refused");
    let words = Words::of(&dir);
    let [option, spec] = words.ours();
    let (raw, volume) = (dir.text("raw"), dir.text("volume"));
    std::fs::write(&raw, noise(4096, 3)).expect("a disk");
    for (options, why) in [
        ("iter-time=10", "key-secret=ID is missing"),
        ("key-secret=nobody", "nobody"),
        ("key-secret=s,cipher-alg=aes-192", "aes-256 or aes-128"),
        ("key-secret=s,cipher-alg=serpent-256", "aes-256 or aes-128"),
        ("key-secret=s,cipher-mode=cbc", "xts"),
        ("key-secret=s,ivgen-alg=essiv", "plain64"),
        ("key-secret=s,ivgen-hash-alg=sha256", "no hash"),
        ("key-secret=s,detached-header=on", "headers in a file of their own"),
        ("key-secret=s,preallocation=metadata,iter-time=10", "falloc or full"),
        ("encrypt.format=luks,encrypt.key-secret=s", "no `encrypt.`"),
        ("key-secret=s,cluster_size=4k", "qcow2 option"),
    ] {
        refused(1, &[why], &["create", "-f", "luks", option, spec, "-o", options, &volume, "1M"]);
        refused(
            1,
            &[why],
            &["convert", "-f", "raw", "-O", "luks", option, spec, "-o", options, &raw, &volume],
        );
        assert!(!dir.join("volume").exists(), "{options}");
    }
    refused(1, &["key-secret=ID is missing"], &["convert", "-f", "raw", "-O", "luks", &raw, &volume]);
    refused(1, &["key-secret=ID"], &["create", "-f", "luks", &volume, "1M"]);
    refused(1, &["size"], &["create", "-f", "luks", option, spec, "-o", "key-secret=s", &volume]);
    refused(
        1,
        &["vellum convert -O luks"],
        &["dd", "-O", "luks", &format!("if={raw}"), &format!("of={volume}")],
    );
    let backing = ["-b", "raw", "-F", "raw", "-o", "key-secret=s", &volume, "1M"];
    refused(1, &["backing image"], &[&["create", "-f", "luks", option, spec], &backing[..]].concat());
    refused(1, &["encrypt.key-secret"], &["create", "-f", "qcow2", "-o", "key-secret=s", &volume, "1M"]);
    assert!(!dir.join("volume").exists());
}
