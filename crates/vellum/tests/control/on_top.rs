//! Images that go on top of a served disk: how they are laid out, and what is left below them.

use serde_json::Value;

use super::Controlled;
use super::support::dir::Dir;
use super::support::program::{has, succeed, until_let_go, vellum};

/// What `vellum info` says of how an image is laid out.
fn layout(image: &str) -> Value {
    let info = vellum(&["info", "--output", "json", image]).json();
    let mut data = info["format-specific"]["data"].clone();
    let its = data.as_object_mut().expect("facts");
    // Whose image it is, and how much it has.
    for own in ["uuid", "data-offset", "table-parts", "snapshots"] {
        its.remove(own);
    }
    data["format"] = info["format"].clone();
    data["cluster-size"] = info["cluster-size"].clone();
    data
}

fn external(served: &Controlled, image: &str) {
    vellum(&["snapshot", "external", "--control", &served.socket, image]).answer();
}

/// The new image of a snapshot, and the one without data that a commit leaves, are laid out as the image that was on top.
#[test]
fn images_that_go_on_top_are_laid_out_as_the_one_before() {
    let kinds = [
        ("qcow2", "compat=0.10,cluster_size=4k"),
        ("qcow2", "cluster_size=1M,extended_l2=off,journal=off,lazy_refcounts=on,refcount_bits=32"),
        ("qcow2", "cluster_size=128k,journal_size=256k,compression_type=zstd,prealloc=off"),
        ("vellum", "layout=zoned,zone_size=1M,embed=off"),
        ("vellum", "layout=table,unit_size=256k,journal_size=128k,block_size=16k"),
        ("vellum", "layout=linear,block_size=4k"),
    ];
    for (format, options) in kinds {
        let dir = Dir::new("on-top");
        let suffix = if format == "vellum" { "vlm" } else { format };
        let (base, top, new) =
            (dir.text("base.qcow2"), dir.text(&format!("top.{suffix}")), dir.text(&format!("new.{suffix}")));
        vellum(&["create", "-q", "-f", "qcow2", &base, "6M"]).answer();
        vellum(&["create", "-q", "-f", format, "-o", options, "-b", &base, "-F", "qcow2", &top]).answer();
        let wanted = layout(&top);
        let served = Controlled::start(&["-f", format, &top]);
        external(&served, &new);
        let mut guest = served.client("");
        guest.write(70_000, &[7; 5000], 0).expect("it is written");
        served.json("commit", &["--base", &top]);
        guest.write(0, &[8; 5000], 0).expect("it is written");
        guest.disconnect();
        served.server.stop();
        for (image, what) in [(&new, "without data, over the old one"), (&top, "the one before")] {
            assert_eq!(layout(image), wanted, "{format} {options}: {what}");
            vellum(&["check", "-q", image]).answer();
            vellum(&["compare", "-q", "-f", format, "-F", format, image, &top]).answer();
        }
        // And one that has data.
        let served = Controlled::start(&["-f", format, &top]);
        let another = dir.text(&format!("another.{suffix}"));
        external(&served, &another);
        served.server.stop();
        assert_eq!(layout(&another), wanted, "{format} {options}");
        if format == "qcow2" && has("qemu-img") {
            succeed("qemu-img", &["check", "-q", &another]);
        }
    }
}

/// Where nothing was chosen: of another format, or over an image that stands alone.
#[test]
fn other_images_on_top_have_the_defaults() {
    let dir = Dir::new("on-top");
    let (raw, other) = (dir.text("disk.raw"), dir.text("other.vlm"));
    std::fs::write(&raw, vec![5; 1 << 20]).expect("a disk");
    let served = Controlled::start(&["-f", "raw", &raw]);
    external(&served, &other);
    // So that snapshots inside it can be made.
    vellum(&["snapshot", "create", "--control", &served.socket, "one"]).answer();
    served.server.stop();
    assert_eq!(layout(&other)["layout"], "zoned");
    for (options, subclusters, journal) in [
        ("journal=on", true, true),
        ("cluster_size=8k,journal=off", false, false),
        ("data_file=data", true, true),
    ] {
        let (alone, over) = (dir.text("alone.qcow2"), dir.text("over.qcow2"));
        let _ = (std::fs::remove_file(&alone), std::fs::remove_file(&over));
        vellum(&["create", "-q", "-f", "qcow2", "-o", options, &alone, "1M"]).answer();
        let data = dir.text("data");
        let named: &[&str] = if options.starts_with("data_file") { &["--data-file", &data] } else { &[] };
        let served = Controlled::start(&[&["-f", "qcow2"], named, &[&alone]].concat());
        external(&served, &over);
        served.server.stop();
        let is = layout(&over);
        assert_eq!(is["extended-l2"], subclusters, "{options}: {is}");
        assert_eq!(is["journal"].is_object(), journal, "{options}: {is}");
        assert_eq!(is["data-file"], Value::Null, "{options}: {is}");
    }
}

/// A server that is killed after a commit leaves the base to be recovered. Started with the old name it only reads the base, and says so:
/// other programs refuse that one until then.
#[test]
fn a_base_that_is_only_read_and_was_not_closed_is_named() {
    let dir = Dir::new("on-top");
    let (base, top) = (dir.text("base.qcow2"), dir.text("top.qcow2"));
    vellum(&["create", "-q", "-f", "qcow2", &base, "4M"]).answer();
    vellum(&["create", "-q", "-f", "qcow2", "-b", &base, "-F", "qcow2", &top]).answer();
    let served = Controlled::start(&["-f", "qcow2", &top]);
    served.json("commit", &[]);
    let mut guest = served.client("");
    guest.write(0, &[3; 70_000], 0).expect("it is written");
    guest.flush().expect("a flush");
    served.server.kill();
    until_let_go(&base);
    let served = Controlled::start(&["-f", "qcow2", &top]);
    let said = served.server.says("was not closed");
    assert!(said.contains(&format!("vellum recover {base}")), "{said}");
    let mut guest = served.client("");
    assert_eq!(guest.read(0, 70_000).expect("a read"), [3; 70_000]);
    guest.disconnect();
    served.server.stop();
    vellum(&["recover", &base]).answer();
    let served = Controlled::start(&["-f", "qcow2", &top]);
    assert!(!served.server.stop().err.contains("was not closed"));
    if has("qemu-img") {
        succeed("qemu-img", &["check", "-q", &top]);
        succeed("qemu-img", &["compare", "-q", &top, &base]);
    }
}

/// `-o encrypt.…` and `--secret …` for the secret in this file.
fn secret(dir: &Dir, text: &str) -> [String; 2] {
    let file = dir.text(text);
    std::fs::write(&file, text).expect("a file");
    ["--secret".to_owned(), format!("id={text},file={file}")]
}

/// The new image is opened by all secrets of the old one that the server has, in the same slots; the others are named.
#[test]
fn all_secrets_that_the_server_has_open_what_goes_on_top() {
    for format in ["qcow2", "vellum"] {
        let dir = Dir::new("on-top");
        let name =
            |name: &str| dir.text(&format!("{name}.{}", if format == "vellum" { "vlm" } else { format }));
        let [option, one] = secret(&dir, "one");
        let [two, three] = ["two", "three"].map(|text| secret(&dir, text)[1].clone());
        let (old, new) = (name("old"), name("new"));
        let wish = "encrypt.format=luks,encrypt.key-secret=one,encrypt.iter-time=10";
        vellum(&["create", "-q", "-f", format, &option, &one, "-o", wish, &old, "4M"]).answer();
        for (secret, new, slot) in [(&two, "two", "2"), (&three, "three", "5")] {
            vellum(&[
                "key",
                "add",
                &option,
                &one,
                &option,
                secret,
                "--new-secret",
                new,
                "--slot",
                slot,
                "--iter-time",
                "10",
                &old,
            ])
            .answer();
        }
        // One of them twice, under two names.
        let again = one.replace("id=one", "id=again");
        let served = Controlled::start(&[
            "-f", format, "--secret", &three, "--secret", &again, "--secret", &one, &old,
        ]);
        let mut guest = served.client("");
        guest.write(0, &[7; 4096], 0).expect("it is written");
        let answer =
            vellum(&["snapshot", "external", "--control", &served.socket, "--output", "json", &new]).json();
        assert_eq!(answer["overlays"][0]["key-slots-left"], serde_json::json!([2]), "{answer}");
        guest.write(1 << 20, &[8; 4096], 0).expect("it is written");
        guest.disconnect();
        assert!(served.server.said().contains("key slots [2]"), "{}", served.server.said());
        served.server.stop();
        let in_use = |image: &str| {
            let slots = vellum(&["key", "list", "--output", "json", image]).json()["slots"].clone();
            let slots = slots.as_array().expect("slots").iter().enumerate();
            slots.filter(|(_, slot)| slot["active"] == true).map(|(at, _)| at).collect::<Vec<_>>()
        };
        assert_eq!((in_use(&old), in_use(&new)), (vec![0, 2, 5], vec![0, 5]), "{format}");
        let raw = dir.text("raw");
        for (secret, opens) in [(&one, true), (&three, true), (&two, false)] {
            // The old image below it is opened too.
            let ran = vellum(&["convert", "-q", "-O", "raw", &option, secret, &new, &raw]);
            assert_eq!(ran.code == 0, opens, "{format} {secret}: {ran:?}");
            if opens {
                let disk = std::fs::read(&raw).expect("a copy");
                assert!(
                    disk[..4096] == [7; 4096] && disk[1 << 20..][..4096] == [8; 4096],
                    "{format} {secret}"
                );
            }
        }
    }
}

/// Encrypted images get encrypted ones on top, opened by the same secret; what they have goes into encrypted ones only.
#[test]
fn what_is_encrypted_stays_so() {
    for format in ["qcow2", "vellum"] {
        let dir = Dir::new("on-top");
        let suffix = if format == "vellum" { "vlm" } else { format };
        let name = |name: &str| dir.text(&format!("{name}.{suffix}"));
        let (base, top, new, plain) = (name("base"), name("top"), name("new"), name("plain"));
        let [option, key] = secret(&dir, "one");
        let [_, other] = secret(&dir, "two");
        let encrypted = "encrypt.format=luks,encrypt.key-secret=one,encrypt.iter-time=10";
        let made = |words: &[&str]| {
            let all = [&["create", "-q", "-f", format, &option, &key][..], words].concat();
            vellum(&all).answer();
        };
        made(&["-o", encrypted, &base, "4M"]);
        made(&["-o", encrypted, "-b", &base, "-F", format, &top]);
        // Other secrets are given too, as for several disks.
        let served = Controlled::start(&["-f", format, "--secret", &other, "--secret", &key, &top]);
        let mut guest = served.client("");
        let marks: Vec<u8> = b"readable ".iter().copied().cycle().take(9 << 10).collect();
        guest.write(0, &marks, 0).expect("it is written");
        external(&served, &new);
        guest.write(1 << 20, &marks, 0).expect("it is written");
        // All of it into the one below, which goes on top; then into the base.
        served.json("commit", &[]);
        guest.write(2 << 20, &marks, 0).expect("it is written");
        served.json("commit", &["--force"]);
        guest.write(3 << 20, &marks, 0).expect("it is written");
        guest.flush().expect("a flush");
        guest.disconnect();
        served.server.stop();
        let raw = dir.text("raw");
        for image in [&base, &top, &new] {
            let info = vellum(&["info", "--output", "json", image]).json();
            assert_eq!(info["encrypted"], true, "{image}");
            let bytes = std::fs::read(image).expect("an image");
            assert!(!bytes.windows(9).any(|at| at == b"readable "), "{image}");
            assert_ne!(vellum(&["convert", "-O", "raw", "--secret", &other, image, &raw]).code, 0);
            vellum(&["convert", "-O", "raw", &option, &key, image, &raw]).answer();
            let disk = std::fs::read(&raw).expect("a copy");
            assert!((0..4).all(|at| disk[at << 20..].starts_with(&marks)), "{format} {image}");
            vellum(&["check", "-q", image]).answer();
        }
        // Nothing of an encrypted image goes into one that is not.
        std::fs::remove_file(&new).expect("it is there");
        made(&[&plain, "4M"]);
        made(&["-o", encrypted, "-b", &plain, "-F", format, &new]);
        let over = name("over");
        made(&["-b", &base, "-F", format, &over]);
        for (image, words, command, rest) in [
            (&new, "is encrypted and", "commit", &[][..]),
            (&over, "is encrypted and", "rebase", &["-b", &plain]),
        ] {
            let served = Controlled::start(&["-f", format, &option, &key, image]);
            served.refuses(&[words, "without a secret"], command, rest);
            served.server.stop();
        }
        let served = Controlled::start(&["-f", format, &option, &key, &over]);
        let refused = vellum(&["snapshot", "external", "--control", &served.socket, &name("another")]);
        assert!(refused.code == 1 && refused.err.contains("would not be"), "{refused:?}");
        served.server.stop();
    }
}
