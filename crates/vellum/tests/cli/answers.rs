//! info, map and check give the answers of qemu-img.

use serde_json::Value;

use super::MIB;
use super::support::dir::Dir;
use super::support::program::{qemu_io, run, succeed, vellum};
use crate::requires;

/// Images of many kinds, made and filled by QEMU.
fn images(dir: &Dir) -> Vec<String> {
    let raw = dir.text("template");
    succeed("qemu-img", &["create", "-q", "-f", "raw", &raw, "8M"]);
    qemu_io(&["-f", "raw", &raw], &["write -P 9 64k 2M".to_owned(), "write -P 8 7M 64k".to_owned()]);
    let kinds: [(&str, &str, &[&str]); 9] = [
        ("plain", "", &[]),
        ("v2", "compat=0.10", &[]),
        ("small", "cluster_size=4k,refcount_bits=1", &[]),
        ("lazy", "lazy_refcounts=on,cluster_size=2M", &[]),
        ("subclusters", "extended_l2=on,cluster_size=32k", &[]),
        ("clone", "", &["-b", "template", "-F", "raw"]),
        ("zstd", "compression_type=zstd", &["-b", "clone.qcow2", "-F", "qcow2"]),
        ("metadata", "preallocation=metadata", &[]),
        ("data", "data_file=DATA,data_file_raw=on", &[]),
    ];
    let mut names = vec![raw];
    for (name, options, backing) in kinds {
        let path = dir.text(&format!("{name}.qcow2"));
        let options = options.replace("DATA", &dir.text("data.raw"));
        let options = if options.is_empty() { vec![] } else { vec!["-o", &options] };
        let arguments = [&["create", "-q", "-f", "qcow2"], &options[..], backing, &[&path, "8M"]].concat();
        succeed("qemu-img", &arguments);
        let mut commands: Vec<String> =
            ["write -P 1 100k 300k", "write -P 2 5M 4k", "write -z 6M 256k", "discard 128k 128k"]
                .map(str::to_owned)
                .into();
        if name != "v2" && name != "data" {
            commands.push("write -c -P 3 3M 64k".to_owned());
            if ["small", "lazy", "subclusters", "metadata"].contains(&name) {
                commands.pop();
            }
        }
        qemu_io(&["-f", "qcow2", &path], &commands);
        if name == "plain" {
            succeed("qemu-img", &["snapshot", "-c", "first", &path]);
            qemu_io(&["-f", "qcow2", &path], &["write -P 4 150k 100k".to_owned()]);
        }
        names.push(path);
    }
    names
}

#[track_caller]
fn same_json(image: &str, ours: &[&str], theirs: &[&str]) {
    let (mine, yours) = (vellum(ours), run("qemu-img", theirs));
    assert_eq!(mine.code, yours.code, "{image}: {ours:?}: {mine:?} {yours:?}");
    let parse =
        |text: &str| -> Value { serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}")) };
    assert_eq!(parse(&mine.out), parse(&yours.out), "{image}: {ours:?} and {theirs:?}");
    assert_eq!(mine.err, "", "{image}: {ours:?}");
}

#[test]
fn info_is_what_qemu_img_answers() {
    requires!("qemu-img", "qemu-io");
    let dir = Dir::new("answers");
    for image in images(&dir) {
        let arguments = ["info", "--output=json", &image];
        same_json(&image, &arguments, &arguments);
        let arguments = ["info", "--output=json", "--backing-chain", &image];
        same_json(&image, &arguments, &arguments);
        let (mine, yours) = (vellum(&["info", &image]), run("qemu-img", &["info", &image]));
        assert_eq!(mine.answer(), yours.answer(), "{image}");
    }
}

/// The rows of a map, reduced to what both programs report alike: of images with preallocated metadata QEMU also queries the host's
/// file system for holes in the data, and it reports a place for what is nowhere beside data of the same cluster.
fn rows(text: &str) -> Vec<(u64, u64, Value)> {
    let rows: Vec<Value> = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
    let mut merged: Vec<(u64, u64, Value)> = Vec::new();
    for mut row in rows {
        let (start, len) =
            (row["start"].as_u64().expect("a number"), row["length"].as_u64().expect("a number"));
        // The distance from its place in the disk to that in the file is one for all of an extent.
        let offset = row["offset"].as_u64().filter(|_| row["present"] == true);
        let place = offset.map(|offset| i128::from(offset) - i128::from(start));
        let zero = row["data"] == false && row["zero"] == true;
        for field in ["start", "length", "offset", "zero"] {
            row.as_object_mut().expect("an object").remove(field);
        }
        row["what"] = format!("zero {zero}, at {place:?}").into();
        match merged.last_mut() {
            Some(last) if last.2 == row => last.1 += len,
            _ => merged.push((start, len, row)),
        }
    }
    merged
}

#[test]
fn map_is_what_qemu_img_answers() {
    requires!("qemu-img", "qemu-io");
    let dir = Dir::new("answers");
    for image in images(&dir) {
        for part in [&[][..], &["--start-offset=128k", "--max-length=5M"]] {
            let arguments = [&["map", "--output=json"], part, &[&image]].concat();
            let (mine, yours) = (vellum(&arguments).answer(), run("qemu-img", &arguments).answer());
            assert_eq!(rows(&mine), rows(&yours), "{image}:\n{mine}\n{yours}");
        }
        let (mine, yours) = (vellum(&["map", &image]), run("qemu-img", &["map", &image]));
        assert_eq!(mine.code, yours.code, "{image}: {mine:?} {yours:?}");
        let is_alike = ["template", "v2", "small", "lazy", "subclusters"]
            .iter()
            .any(|name| image.rsplit('/').next().is_some_and(|file| file.starts_with(name)));
        if is_alike {
            assert_eq!(mine.out, yours.out, "{image}");
        }
    }
}

#[test]
fn check_is_what_qemu_img_answers() {
    requires!("qemu-img", "qemu-io");
    let dir = Dir::new("answers");
    for image in images(&dir).iter().skip(1) {
        let arguments = ["check", "--output=json", image];
        same_json(image, &arguments, &arguments);
        let (mine, yours) = (vellum(&["check", image]), run("qemu-img", &["check", image]));
        assert_eq!((mine.code, mine.out), (yours.code, yours.out), "{image}");
    }
}

/// What we make, QEMU describes as it describes what it makes itself.
#[test]
fn create_makes_what_qemu_img_makes() {
    requires!("qemu-img");
    let dir = Dir::new("create");
    succeed("qemu-img", &["create", "-q", "-f", "raw", &dir.text("template"), "3M"]);
    let cases: [&[&str]; 12] = [
        &["-f", "raw", "IMAGE", "1M"],
        &["-f", "qcow2", "IMAGE", "10G"],
        &["-f", "qcow2", "-o", "compat=0.10", "IMAGE", "1500K"],
        &["-f", "qcow2", "-o", "compat=1.1,lazy_refcounts=on", "IMAGE", "3T"],
        &["-f", "qcow2", "-o", "cluster_size=512,refcount_bits=64", "IMAGE", "17M"],
        &["-f", "qcow2", "-o", "cluster_size=2M", "-o", "extended_l2=on", "IMAGE", "100M"],
        &["-f", "qcow2", "-o", "compression_type=zstd", "IMAGE", "1.5G"],
        &["-f", "qcow2", "-b", "template", "-F", "raw", "-o", "extended_l2=off", "IMAGE"],
        &["-f", "qcow2", "-b", "template", "-F", "raw", "-o", "extended_l2=on", "IMAGE", "5M"],
        &["-f", "qcow2", "-o", "backing_file=template,backing_fmt=raw,cluster_size=8k", "IMAGE", "4M"],
        &["-f", "qcow2", "-o", "preallocation=metadata", "IMAGE", "32M"],
        &["-f", "qcow2", "-u", "-b", "not there", "-F", "qcow2", "-o", "compat=0.10", "IMAGE", "1M"],
    ];
    let describe = |image: &str| {
        let mut info = run("qemu-img", &["info", "-U", "--output=json", image]).json();
        // How much room the file takes is each program's own affair.
        for field in ["actual-size", "children"] {
            info.as_object_mut().expect("an object").remove(field);
        }
        info
    };
    for case in cases {
        let image = dir.text("image");
        let arguments: Vec<&str> =
            ["create"].iter().chain(case).map(|word| if *word == "IMAGE" { &image } else { *word }).collect();
        let mine = vellum(&arguments).answer();
        let my_info = describe(&image);
        if !case.contains(&"-u") {
            let checked = run("qemu-img", &["check", &image]);
            assert!([0, 63].contains(&checked.code), "{case:?}: {checked:?}");
        }
        std::fs::remove_file(&image).expect("the image");
        let yours = succeed("qemu-img", &arguments);
        assert_eq!(my_info, describe(&image), "{case:?}");
        assert_eq!(mine, yours, "{case:?}");
        std::fs::remove_file(&image).expect("the image");
    }
}

/// An image over another one has subclusters by default, so that a small write copies nothing from below.
#[test]
fn a_clone_has_subclusters_by_default() {
    let dir = Dir::new("clone");
    std::fs::write(dir.join("template"), vec![7; MIB]).expect("a template");
    for (options, expected) in
        [(&[][..], true), (&["-o", "extended_l2=off"], false), (&["-o", "compat=v2"], false)]
    {
        let clone = dir.text("clone");
        let words = [&["create", "-f", "qcow2", "-b", "template", "-F", "raw"], options, &[&clone]].concat();
        vellum(&words).answer();
        let info = vellum(&["info", "--output", "json", &clone]).json();
        let has = &info["format-specific"]["data"]["extended-l2"];
        assert_eq!(has == &Value::Bool(true), expected, "{options:?}: {info}");
    }
}

#[test]
fn json_is_json_everywhere() {
    let dir = Dir::new("json");
    let (one, two, raw) = (dir.text("one.qcow2"), dir.text("two.qcow2"), dir.text("raw"));
    let json = |arguments: &[&str]| -> Value {
        let ran = vellum(&[arguments, &["--output", "json"]].concat());
        assert_eq!(ran.err, "", "{arguments:?}");
        ran.json()
    };
    let made = json(&["create", "-f", "qcow2", &one, "2M"]);
    assert_eq!((&made["virtual-size"], &made["cluster-size"]), (&(2 * MIB).into(), &65536.into()), "{made}");
    assert_eq!(json(&["convert", "-O", "raw", &one, &raw])["virtual-size"], 2 * MIB);
    assert_eq!(json(&["convert", "-f", "raw", "-O", "qcow2", &raw, &two])["format"], "qcow2");
    assert_eq!(json(&["compare", &one, &two])["identical"], true);
    assert_eq!(json(&["recover", &two])["was-dirty"], false);
    assert_eq!(json(&["check", &two])["check-errors"], 0);
    assert_eq!(json(&["info", &two])["format"], "qcow2");
    assert_eq!(json(&["map", &two])[0]["zero"], true);
    std::fs::write(&raw, vec![1; 2 * MIB]).expect("a disk");
    let differ = vellum(&["compare", "-f", "raw", "--output", "json", &raw, &two]);
    assert_eq!(differ.code, 1);
    let answer: Value = serde_json::from_str(&differ.out).expect("JSON");
    assert_eq!((&answer["identical"], &answer["mismatch-offset"]), (&false.into(), &0.into()));
}
