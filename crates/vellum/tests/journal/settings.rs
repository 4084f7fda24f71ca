//! `vellum journal enable|disable` on images that QEMU made.

use serde_json::Value;

use super::support::dir::Dir;
use super::support::noise;
use super::support::program::{path_text, qemu_io, run, succeed, vellum};
use super::support::server::Server;
use super::{FEATURE, MIB, bytes_of, is_clean, journal_of, killed_after};
use crate::requires;

/// An image as QEMU makes it: its options, what lies below, what else its header has.
struct Made {
    options: &'static str,
    /// The name of the image below; a long one fills a part of the header.
    below: Option<String>,
    bitmap: bool,
    snapshot: bool,
}

const SIZE: usize = 4 * MIB;

impl Made {
    fn new(options: &'static str) -> Self {
        Self { options, below: None, bitmap: false, snapshot: false }
    }

    fn make(&self, dir: &Dir) -> (String, Vec<u8>) {
        let image = dir.text("disk.qcow2");
        let mut bytes = vec![0; SIZE];
        let mut arguments = vec!["create", "-q", "-f", "qcow2", "-o", self.options];
        if let Some(name) = &self.below {
            let path = dir.join(name);
            std::fs::create_dir_all(path.parent().expect("a directory")).expect("a directory");
            bytes = noise(SIZE, 70);
            std::fs::write(&path, &bytes).expect("a template");
            arguments.extend(["-F", "raw", "-b", name]);
        }
        let size = SIZE.to_string();
        arguments.extend([image.as_str(), &size]);
        succeed("qemu-img", &arguments);
        if self.bitmap {
            succeed("qemu-img", &["bitmap", "--add", &image, "a bitmap"]);
        }
        qemu_io(&["-f", "qcow2", &image], &["write -P 9 100000 300000".to_owned()]);
        bytes[100_000..400_000].fill(9);
        if self.snapshot {
            succeed("qemu-img", &["snapshot", "-c", "before", &image]);
        }
        (image, bytes)
    }
}

/// QEMU's report on an image, except for the space that it takes.
fn told(image: &str) -> Value {
    let mut info = run("qemu-img", &["info", "--output", "json", image]).json();
    info["actual-size"] = Value::Null;
    info["children"] = Value::Null;
    info
}

fn one(made: &Made) {
    let about = format!("{} {:?} {} {}", made.options, made.below, made.bitmap, made.snapshot);
    let dir = Dir::new("setting");
    let (image, mut bytes) = made.make(&dir);
    let (before, said) = (std::fs::read(&image).expect("the image"), told(&image));
    let answer = vellum(&["journal", "enable", "--size", "128k", "--output", "json", &image]).json();
    assert_eq!(
        (&answer["journal-size-before"], &answer["journal-size"]),
        (&Value::Null, &(128 << 10).into())
    );
    assert_eq!(told(&image), said, "{about}: QEMU sees the same image");
    is_clean(&image);
    assert_eq!(journal_of(&image)["size"], 128 << 10, "{about}");
    let again = vellum(&["journal", "enable", &image]).answer();
    assert!(again.contains("already has a journal of 128 KiB"), "{about}: {again}");
    let said = vellum(&["journal", "disable", &image]).answer();
    assert!(said.contains("the journal is now disabled"), "{about}: {said}");
    assert!(std::fs::read(&image).expect("the image") == before, "{about}: byte for byte as it was");
    assert!(vellum(&["journal", "disable", &image]).answer().contains("nothing to do"), "{about}");

    vellum(&["journal", "enable", &image]).answer();
    assert_eq!(journal_of(&image)["size"], 1 << 20, "{about}");
    killed_after(&image, |client| {
        client.write(200_000, &[3; 500_000], 0).expect("a write");
        client.flush().expect("a flush");
    });
    bytes[200_000..700_000].fill(3);
    let refused = run("qemu-img", &["info", &image]);
    assert!(refused.code == 1 && refused.err.contains(FEATURE), "{about}: {refused:?}");
    vellum(&["recover", &image]).answer();
    is_clean(&image);
    if made.bitmap {
        let info = run("qemu-img", &["info", "--output=json", &image]).json();
        let bitmaps = info["format-specific"]["data"]["bitmaps"].as_array().cloned().unwrap_or_default();
        assert!(
            bitmaps.iter().all(|bitmap| bitmap["flags"] == serde_json::json!(["auto"])),
            "{about}: {info}"
        );
        assert!(!bitmaps.is_empty(), "{about}: the bitmap is kept over the kill");
    }
    assert!(bytes_of(&image) == bytes, "{about}");
    if made.snapshot {
        let old =
            super::support::program::qemu_dump(dir.join("disk.qcow2").as_path(), "qcow2", Some("before"));
        assert!(old[200_000..400_000].iter().all(|byte| *byte == 9), "{about}: the snapshot is as it was");
    }
    vellum(&["journal", "disable", &image]).answer();
    is_clean(&image);
    assert!(bytes_of(&image) == bytes, "{about}: without the journal");
}

#[test]
fn images_that_qemu_made_get_one_and_lose_it_again() {
    requires!("qemu-img", "qemu-io");
    let below = |name: &str| Some(name.to_owned());
    one(&Made::new("cluster_size=64k"));
    one(&Made { below: below("base.raw"), ..Made::new("extended_l2=on") });
    one(&Made { below: below(&("deep/".repeat(150) + "base.raw")), ..Made::new("cluster_size=4k") });
    one(&Made { bitmap: true, ..Made::new("lazy_refcounts=on") });
    one(&Made { bitmap: true, below: below("base.raw"), snapshot: true, ..Made::new("cluster_size=2M") });
    one(&Made { snapshot: true, ..Made::new("cluster_size=512") });
    one(&Made { below: below("base.raw"), ..Made::new("cluster_size=512") });
    one(&Made { below: below("base.raw"), ..Made::new("cluster_size=2k,compression_type=zstd") });
}

#[test]
fn images_that_cannot_have_one_are_refused_and_stay_as_they_are() {
    requires!("qemu-img");
    let dir = Dir::new("setting");
    let image = dir.text("disk");
    let data = format!("data_file={}", dir.text("data"));
    let long = dir.text("base.raw");
    std::fs::write(&long, [0; 512]).expect("a base");
    let cases: [(&[&str], &str); 5] = [
        (&["qcow2", "-o", "compat=0.10"], "version 3"),
        (&["qcow2", "-o", &data], "another file"),
        (&["raw"], "is a raw image"),
        (&["qcow2"], "must be 65536 to 67108864 bytes"),
        (&["qcow2", "-o", "cluster_size=512", "-u", "-F", "raw", "-b", &long.repeat(10)[..330]], "no room"),
    ];
    for (options, words) in cases {
        drop(std::fs::remove_file(&image));
        succeed("qemu-img", &[&["create", "-q", "-f"], options, &[&image, "1M"]].concat());
        let before = std::fs::read(&image).expect("the image");
        let size = if words.starts_with("must") { "1k" } else { "64k" };
        let ran = vellum(&["journal", "enable", "--size", size, &image]);
        assert!(ran.code == 1 && ran.err.contains(words), "{options:?}: {ran:?}");
        assert!(std::fs::read(&image).expect("the image") == before, "{options:?}");
    }
    let ran = vellum(&["journal", "enable", path_text(&dir.join("none"))]);
    assert!(ran.code == 1 && ran.err.contains("none"), "{ran:?}");
}

/// QEMU rewrites a header when a bitmap is added, and puts unknown extensions last. That is reported, and
/// corrected when the image is opened for writing, or on request. The bitmap is kept.
#[test]
fn a_header_that_qemu_rewrote() {
    requires!("qemu-img", "qemu-io");
    let dir = Dir::new("setting");
    let image = dir.text("disk.qcow2");
    vellum(&["create", "-q", "-f", "qcow2", "-o", "journal=on", &image, "4M"]).answer();
    succeed("qemu-img", &["bitmap", "--add", &image, "a bitmap"]);
    assert_eq!(journal_of(&image)["misplaced"], true);
    let info = vellum(&["info", &image]).answer();
    assert!(info.contains(&format!("run `vellum journal enable {image}`")), "{info}");
    let after_kill = |needs_recovery: bool| {
        killed_after(&image, |client| client.write(0, &[1; 70_000], 1).expect("a durable write"));
        assert_eq!(journal_of(&image)["needs-recovery"], needs_recovery);
        vellum(&["recover", &image]).answer();
        is_clean(&image);
        assert_eq!(bytes_of(&image)[..70_000], [1; 70_000]);
    };
    let server = Server::start(&[&image]);
    let said = server.stop().err;
    assert!(said.contains("has been put back") && !said.contains("bitmaps"), "{said}");
    assert_eq!(journal_of(&image)["misplaced"], Value::Null);
    after_kill(true);
    // As above, without a server.
    succeed("qemu-img", &["rebase", "-u", "-F", "raw", "-b", "", &image]);
    if journal_of(&image)["misplaced"] == true {
        vellum(&["journal", "enable", &image]).answer();
    }
    after_kill(true);
}
