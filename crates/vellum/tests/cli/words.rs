//! What is refused, and the messages: foreign formats, invalid names, sizes, options that contradict each
//! other.

use serde_json::Value;

use super::support::dir::Dir;
use super::support::noise;
use super::support::program::{run, vellum};
use super::{MIB, refused};

/// Bytes, and where they are.
type Field = (usize, &'static [u8]);

/// Files of formats that Vellum does not read: their names, and bytes with where they are. Each says a disk of 1 MiB.
const FOREIGN: [(&str, &[Field]); 3] = [
    ("cloop", &[(0, b"#!/bin/sh\n#V2.0 Format\nmodprobe cloop "), (128, &[0, 0, 16, 0, 0, 0, 1, 0])]),
    ("bochs", &[(0, b"Bochs Virtual HD Image"), (32, b"Redolog"), (66, &[2]), (90, &[16])]),
    ("vmdk", &[(0, &[0xBE, 0xBA, 0xFE, 0xCA]), (8, &[1, 0, 0, 0, 2]), (17, &[8])]),
];

#[test]
fn formats_of_others_that_are_not_read_are_refused_by_name_and_told_of() {
    let dir = Dir::new("words");
    for (format, fields) in FOREIGN {
        let (image, out) = (dir.text(&format!("x.{format}")), dir.text("out.raw"));
        let mut bytes = vec![0; 65_536];
        for (at, field) in fields {
            bytes[*at..at + field.len()].copy_from_slice(field);
        }
        std::fs::write(&image, bytes).expect("an image");
        let way_out = format!("qemu-img convert -f {format} -O qcow2 {image} {}", dir.text("x.qcow2"));
        for arguments in [
            &["convert", "-O", "raw", &image, &out][..],
            &["check", &image],
            &["map", &image],
            &["resize", &image, "+1M"],
            &["serve", &image, "--nbd", &format!("unix:{}", dir.text("socket"))],
        ] {
            refused(1, &["looks like a", &way_out, "-f raw"], arguments);
        }
        let info = vellum(&["info", "--output", "json", &image]).json();
        assert_eq!((&info["format"], info["virtual-size"].as_u64()), (&Value::from(format), Some(1 << 20)));
        assert!(vellum(&["info", &image]).answer().contains(&way_out));
        // As a raw disk it is one.
        vellum(&["convert", "-f", "raw", "-O", "raw", &image, &out]).answer();
    }
}

#[test]
fn the_path_of_a_socket_that_is_too_long_is_named_with_its_length() {
    let dir = Dir::new("words");
    let image = dir.text("disk.qcow2");
    vellum(&["create", "-q", &image, "1M"]).answer();
    let socket = format!("/tmp/{}", "s".repeat(120));
    for option in [format!("--nbd=unix:{socket}"), format!("--vhost-user-blk={socket}")] {
        refused(1, &[&socket, "125 bytes of at most 107"], &["serve", &image, &option]);
    }
}

#[test]
fn names_that_lead_nowhere_are_told_once() {
    let dir = Dir::new("words");
    for command in ["info", "map", "check", "recover"] {
        let ran = refused(1, &["no such file"], &[command, &dir.text("none")]);
        assert_eq!(ran.err, format!("vellum {command}: {}: no such file\n", dir.text("none")));
        for url in ["ssh://localhost/x", "ftp://localhost/x.qcow2", "iscsi://localhost/x"] {
            let ran = refused(1, &["URLs", "not supported", url], &[command, url]);
            assert_eq!(ran.err.matches(url).count(), 1, "{}", ran.err);
        }
    }
    refused(1, &["json:{}", "file.filename is missing"], &["info", "json:{}"]);
}

#[test]
fn sizes_that_may_mean_two_things_are_refused() {
    let dir = Dir::new("words");
    let image = dir.text("disk.raw");
    vellum(&["create", "-q", &image, "1M"]).answer();
    refused(1, &["invalid size \"10X\"", "for example 20G"], &["resize", "-f", "raw", &image, "10X"]);
    let ran = vellum(&["create", &image, "1GB"]);
    assert!(ran.code == 1 && ran.err.contains("1000") && ran.err.contains("use 1G"), "{ran:?}");
    let ran = vellum(&["create", "-q", "-o", "size=1M", &image, "2M"]);
    assert!(ran.code == 1 && ran.err.contains("two sizes"), "{ran:?}");
    vellum(&["create", "-q", "-o", "size=1M", &image, "1024k"]).answer();
    refused(1, &["-F", "-b FILE"], &["create", "-q", "-F", "raw", &image, "1M"]);
    refused(1, &["-F", "-b FILE"], &["create", "-q", "-f", "qcow2", "-o", "backing_fmt=raw", &image, "1M"]);
}

#[test]
fn a_name_says_the_format_of_a_new_image() {
    let dir = Dir::new("words");
    for (name, format) in
        [("a.qcow2", "qcow2"), ("a.vlm", "vellum"), ("a.raw", "raw"), ("a", "raw"), ("a.img", "raw")]
    {
        let image = dir.text(name);
        let out = vellum(&["create", &image, "1M"]).answer();
        assert!(out.contains(&format!("fmt={format}")), "{out}");
        let copy = dir.text(&format!("copy-{name}"));
        vellum(&["convert", &image, &copy]).answer();
        assert_eq!(vellum(&["info", "--output", "json", &copy]).json()["format"], format);
    }
}

#[test]
fn options_are_listed_under_the_format_that_has_them() {
    let all = vellum(&["create", "-o", "help"]).answer();
    assert_eq!(all.matches("Options of").count(), 4);
    for (arguments, has, has_not) in [
        (&["create", "-f", "raw", "-o", "help"][..], "preallocation", "cluster_size"),
        (&["create", "-f", "qcow2", "-o", "help"], "cluster_size", "layout"),
        (&["create", "-o", "help", "x.vlm"], "layout", "cluster_size"),
    ] {
        let out = vellum(arguments).answer();
        assert!(out.contains(has) && !out.contains(has_not), "{out}");
    }
}

#[test]
fn resize_takes_its_arguments_as_qemu_img_does() {
    let dir = Dir::new("words");
    let image = dir.text("disk.raw");
    vellum(&["create", "-q", &image, "4M"]).answer();
    let mut expected = 4 * MIB as u64;
    for (arguments, by) in [
        (&["-f", "raw", "--shrink", &image, "-1M"][..], -1),
        (&["-f", "raw", &image, "--shrink", "-1M"], -1),
        (&["-f", "raw", "--", &image, "+1M"], 1),
        (&["-f", "raw", "--shrink", "--", &image, "-1M"], -1),
        (&["--shrink", "-f", "raw", &image, "1M"], -1),
    ] {
        vellum(&[&["resize", "-q"], arguments].concat()).answer();
        expected = expected.checked_add_signed(by * MIB as i64).expect("it stays above zero");
        assert_eq!(std::fs::metadata(&image).expect("it is there").len(), expected, "{arguments:?}");
    }
    refused(1, &["give the new size after", "20G"], &["resize", &image]);
    let native = dir.text("disk.vlm");
    vellum(&["create", "-q", &native, "4M"]).answer();
    vellum(&["snapshot", "create", "--", &native, "monday"]).answer();
    refused(1, &["give the snapshot's name"], &["snapshot", "delete", &native]);
}

#[test]
fn what_is_in_use_says_what_this_command_can_do() {
    let dir = Dir::new("words");
    let image = dir.text("disk.qcow2");
    vellum(&["create", "-q", &image, "4M"]).answer();
    let server = super::support::server::Server::start(&[&image]);
    for (arguments, is_reader) in [
        (&["map", &image][..], true),
        (&["check", &image], true),
        (&["check", "-r", "all", &image], false),
        (&["create", "-b", &image, "-F", "qcow2", &dir.text("over.qcow2")], false),
        (&["recover", &image], false),
        (&["serve", &image, "--nbd", &format!("unix:{}", dir.text("socket"))], false),
        (&["resize", &image, "+1M"], false),
    ] {
        let ran = refused(1, &["in use", "lsof"], arguments);
        assert_eq!(ran.err.contains("--force-share"), is_reader, "{ran:?}");
        assert_eq!(ran.err.contains("--control PATH"), arguments[0] == "resize", "{ran:?}");
    }
    server.stop();
}

#[test]
fn a_copy_is_laid_out_in_the_order_of_the_disk() {
    let dir = Dir::new("words");
    let source = dir.text("source.raw");
    std::fs::write(&source, noise(32 * MIB, 1)).expect("a disk");
    for format in ["qcow2", "vlm"] {
        for _ in 0..3 {
            let copy = dir.text(&format!("copy.{format}"));
            vellum(&["convert", &source, &copy]).answer();
            let map = vellum(&["map", "--output", "json", &copy]).json();
            let places: Vec<u64> =
                map.as_array().expect("rows").iter().filter_map(|row| row["offset"].as_u64()).collect();
            assert!(!places.is_empty() && places.is_sorted(), "{format}: {places:?}");
            vellum(&["convert", "-W", &source, &copy]).answer();
            vellum(&["compare", &source, &copy]).answer();
        }
    }
}

/// Scripts read what `qemu-img` prints.
#[test]
fn under_the_name_qemu_img_commands_print_what_that_prints() {
    let dir = Dir::new("words-qemu-img");
    let theirs = dir.text("qemu-img");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_vellum"), &theirs).expect("a link");
    let (base, other, top) = (dir.text("base.raw"), dir.text("other.raw"), dir.text("top.qcow2"));
    for disk in [&base, &other] {
        std::fs::write(disk, noise(1 << 20, 3)).expect("a disk");
    }
    let called = |arguments: &[&str]| {
        let ran = run(&theirs, arguments);
        assert_eq!((ran.code, &*ran.err), (0, ""), "{arguments:?}");
        ran.out
    };
    // The name of the backing image stands in an option, too.
    let over = "backing_file=base.raw,backing_fmt=raw";
    assert_eq!(called(&["convert", "-f", "raw", "-O", "qcow2", "-o", over, &other, &top]), "");
    let facts = vellum(&["info", "--output", "json", &top]).json();
    assert_eq!(facts["backing-filename"], "base.raw");
    assert_eq!(called(&["rebase", "-f", "qcow2", "-b", &other, "-F", "raw", &top]), "");
    assert_eq!(called(&["commit", "-f", "qcow2", &top]), "Image committed.\n");
    for (arguments, why) in [
        (&["-o", over, "-c"][..], "goes with neither -n nor -c"),
        (&["-o", "backing_file=base.raw"], "give the format of that image"),
        (&["-F", "raw"], "name that with -B"),
    ] {
        let how = [&["convert", "-f", "raw", "-O", "qcow2"][..], arguments, &[&other, &top]].concat();
        refused(1, &[why], &how);
    }
}
