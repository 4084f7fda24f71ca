//! measure, dd and bench, beside qemu-img.

use serde_json::Value;

use super::support::dir::Dir;
use super::support::program::{has, run, succeed, vellum};
use super::support::{first_difference, noise, patchy};
use super::{MIB, refused};
use crate::requires;

fn theirs(arguments: &[&str]) -> Value {
    let all = [&["measure", "--output", "json"], arguments].concat();
    serde_json::from_str(&succeed("qemu-img", &all)).expect("JSON")
}

fn ours(arguments: &[&str]) -> Value {
    vellum(&[&["measure", "--output", "json"], arguments].concat()).json()
}

#[test]
fn sizes_are_those_that_qemu_measures() {
    requires!("qemu-img");
    for size in ["0", "512", "1000", "1M", "1G", "1.5G", "100G", "3T"] {
        for format in ["raw", "qcow2"] {
            // Without a journal, which QEMU does not have.
            let options = if format == "raw" { vec![] } else { vec!["-o", "journal=off"] };
            let arguments = ["-O", format, "--size", size];
            assert_eq!(ours(&[&arguments, &options[..]].concat()), theirs(&arguments), "{format} {size}");
        }
        for options in [
            "cluster_size=4k",
            "cluster_size=2M",
            "compat=0.10",
            "refcount_bits=1",
            "refcount_bits=64",
            "extended_l2=on,cluster_size=128k",
            "preallocation=metadata",
            "preallocation=falloc",
            "preallocation=full,cluster_size=1M",
        ] {
            let arguments = ["-O", "qcow2", "--size", size, "-o", options];
            assert_eq!(
                ours(&[&arguments[..], &["-o", "journal=off"]].concat()),
                theirs(&arguments),
                "{options} {size}"
            );
        }
    }
    let (text, other) = (
        ["measure", "-O", "qcow2", "-o", "journal=off", "--size", "1G"],
        ["measure", "-O", "qcow2", "--size", "1G"],
    );
    assert_eq!(vellum(&text).answer(), succeed("qemu-img", &other));
}

#[test]
fn images_are_measured_as_qemu_measures_them() {
    requires!("qemu-img");
    let dir = Dir::new("measure");
    let (raw, qcow2, packed) = (dir.text("raw"), dir.text("a.qcow2"), dir.text("packed.qcow2"));
    let mut bytes = patchy(24 * MIB, 50);
    bytes[8 * MIB..16 * MIB].fill(0);
    std::fs::write(&raw, &bytes).expect("a disk");
    succeed("qemu-img", &["convert", "-f", "raw", "-O", "qcow2", &raw, &qcow2]);
    succeed("qemu-img", &["convert", "-c", "-f", "raw", "-O", "qcow2", &raw, &packed]);
    succeed("qemu-img", &["bitmap", "--add", &qcow2, "one"]);
    succeed("qemu-img", &["bitmap", "--add", "-g", "512", &qcow2, "another one"]);
    succeed("qemu-img", &["snapshot", "-c", "s", &packed]);
    for (image, format) in [(&raw, "raw"), (&qcow2, "qcow2"), (&packed, "qcow2")] {
        for options in ["cluster_size=64k", "cluster_size=4k", "compat=0.10", "extended_l2=on"] {
            let arguments = ["-f", format, "-O", "qcow2", "-o", options, image];
            let one = ours(&[&["-o", "journal=off"][..], &arguments].concat());
            assert_eq!(one, theirs(&arguments), "{image} {options}");
        }
        let arguments = ["-f", format, "-O", "raw", image];
        assert_eq!(ours(&arguments), theirs(&arguments), "{image}");
    }
    let arguments = ["-O", "qcow2", "-l", "s", &packed];
    let mut expected = theirs(&arguments);
    expected.as_object_mut().expect("an object").remove("bitmaps");
    assert_eq!(ours(&[&["-o", "journal=off"][..], &arguments].concat()), expected);
}

/// What was measured is enough, and the whole of it is not much too much.
#[test]
fn a_copy_fits_what_was_measured() {
    let dir = Dir::new("measure");
    let (raw, copy) = (dir.text("raw"), dir.text("copy"));
    let mut bytes = patchy(40 * MIB, 51);
    bytes[8 * MIB..24 * MIB].fill(0);
    std::fs::write(&raw, &bytes).expect("a disk");
    // With holes: what is zero is not data.
    let sparse = dir.text("sparse");
    vellum(&["convert", "-f", "raw", "-O", "raw", &raw, &sparse]).answer();
    for (format, options) in [
        ("qcow2", "size=40M"),
        ("qcow2", "cluster_size=512"),
        ("qcow2", "cluster_size=2M"),
        ("qcow2", "extended_l2=on,journal=off"),
        ("vellum", "layout=table"),
        ("vellum", "layout=zoned"),
        ("vellum", "layout=table,unit_size=64k"),
        ("vellum", "layout=linear"),
    ] {
        let measured = ours(&["-f", "raw", "-O", format, "-o", options, &sparse]);
        let (required, full) = (&measured["required"], &measured["fully-allocated"]);
        vellum(&["convert", "-f", "raw", "-O", format, "-o", options, &sparse, &copy]).answer();
        let facts = std::fs::metadata(&copy).expect("the copy");
        let taken = std::os::unix::fs::MetadataExt::blocks(&facts) * 512;
        assert!(
            taken <= required.as_u64().expect("a number"),
            "{format} {options}: {taken} bytes, {measured}"
        );
        let full = full.as_u64().expect("a number");
        assert!(
            facts.len() <= full || format == "vellum",
            "{format} {options}: {} bytes, {measured}",
            facts.len()
        );
        assert!(full >= 40 << 20 && required.as_u64() < Some(full), "{format} {options}: {measured}");
    }
    refused(1, &["-O qcow2"], &["measure", "-O", "raw", "-o", "cluster_size=4k", "--size", "1M"]);
    refused(1, &["no such"], &["measure", "-O", "qcow2", &dir.text("no such")]);
    refused(1, &["vdi"], &["measure", "-O", "vdi", "--size", "1M"]);
}

#[test]
fn dd_copies_what_qemu_copies() {
    requires!("qemu-img");
    let dir = Dir::new("dd");
    let (raw, qcow2) = (dir.text("raw"), dir.text("a.qcow2"));
    let bytes = noise(5 * MIB + 512, 52);
    std::fs::write(&raw, &bytes).expect("a disk");
    vellum(&["convert", "-f", "raw", "-O", "qcow2", &raw, &qcow2]).answer();
    let (one, other) = (dir.text("one"), dir.text("other"));
    for operands in [
        &["bs=1M"][..],
        &["bs=1M", "count=2"],
        &["count=3"],
        &["bs=64k", "skip=79"],
        &["bs=3k", "count=100"],
        &["bs=1M", "count=0"],
        &["bs=1M", "skip=500"],
    ] {
        for (image, format) in [(&raw, "raw"), (&qcow2, "qcow2")] {
            for target in ["raw", "qcow2"] {
                let copy = |output: &str| {
                    let files = [format!("if={image}"), format!("of={output}")];
                    let mut all = vec![
                        "dd".to_owned(),
                        "-f".to_owned(),
                        format.to_owned(),
                        "-O".to_owned(),
                        target.to_owned(),
                    ];
                    all.extend(files.into_iter().chain(operands.iter().map(|text| (*text).to_owned())));
                    all
                };
                let ran = vellum(&copy(&one).iter().map(String::as_str).collect::<Vec<_>>());
                let judge = run("qemu-img", &copy(&other));
                assert_eq!(ran.code, judge.code, "{operands:?}: {ran:?} {judge:?}");
                assert_eq!(ran.err.is_empty(), judge.err.is_empty(), "{operands:?}: {ran:?} {judge:?}");
                succeed("qemu-img", &["compare", "-s", "-f", target, "-F", target, &one, &other]);
            }
        }
    }
    refused(1, &["bs=0"], &["dd", "bs=0", &format!("if={raw}"), &format!("of={one}")]);
    refused(1, &["of=FILE"], &["dd", &format!("if={raw}")]);
    refused(1, &["oflag"], &["dd", "oflag=direct", &format!("if={raw}"), &format!("of={one}")]);
    refused(1, &["itself"], &["dd", &format!("if={raw}"), &format!("of={raw}")]);
    assert_eq!(first_difference(&std::fs::read(&raw).expect("the disk"), &bytes), None);
    // As dd, and QEMU from 10.1 on; before, `count` counted from the beginning.
    for (block, count, skip) in [(MIB, 2, 3), (512, 3, 9), (3072, 100, 11), (65_536, 5, 79)] {
        let operands = [format!("bs={block}"), format!("count={count}"), format!("skip={skip}")];
        let files = [format!("if={qcow2}"), format!("of={one}")];
        let all: Vec<&str> =
            ["dd"].into_iter().chain(operands.iter().chain(&files).map(String::as_str)).collect();
        vellum(&all).answer();
        let (start, end) = (block * skip, (block * (skip + count)).min(bytes.len()));
        assert!(std::fs::read(&one).expect("the copy") == bytes[start..end], "{operands:?}");
    }
    // Rounded up to whole sectors, as by QEMU.
    vellum(&["dd", "bs=1", "count=1000", &format!("if={raw}"), &format!("of={one}")]).answer();
    let read = std::fs::read(&one).expect("the copy");
    assert!(read[..1000] == bytes[..1000] && read[1000..] == [0; 24], "{} bytes", read.len());
    let skip = bytes.len() / 1000;
    let operands = ["bs=1000".to_owned(), format!("skip={skip}"), format!("if={raw}"), format!("of={one}")];
    vellum(&["dd"].into_iter().chain(operands.iter().map(String::as_str)).collect::<Vec<_>>()).answer();
    let (read, rest) = (std::fs::read(&one).expect("the copy"), &bytes[skip * 1000..]);
    assert!(!rest.is_empty() && rest.len() < 1000, "{} bytes", rest.len());
    assert!(
        read.len() == rest.len().next_multiple_of(512) && read[..rest.len()] == *rest,
        "{} bytes",
        read.len()
    );
}

#[test]
fn bench_sends_what_it_says() {
    let dir = Dir::new("bench");
    let image = dir.text("a.qcow2");
    vellum(&["create", "-q", "-f", "qcow2", &image, "4M"]).answer();
    let write =
        ["-w", "--pattern", "7", "-c", "64", "-d", "4", "-s", "64k", "--flush-interval", "16", &image];
    let ran = vellum(&[&["bench", "-f", "qcow2"], &write[..]].concat()).answer();
    let lines: Vec<&str> = ran.lines().collect();
    assert_eq!(lines.len(), 3, "{ran}");
    assert!(lines[2].starts_with("Run completed in ") && lines[2].ends_with(" seconds."), "{ran}");
    let raw = dir.text("raw");
    vellum(&["convert", "-O", "raw", &image, &raw]).answer();
    assert!(std::fs::read(&raw).expect("the disk").iter().all(|byte| *byte == 7));
    if has("qemu-img") {
        let theirs = succeed("qemu-img", &[&["bench", "-f", "qcow2"], &write[..]].concat());
        assert_eq!(theirs.lines().take(2).collect::<Vec<_>>(), lines[..2]);
        succeed("qemu-img", &["check", &image]);
    }
    let facts =
        vellum(&["bench", "-c", "100", "-s", "512", "-S", "12345", "-o", "3M", "--output", "json", &image])
            .json();
    assert_eq!((&facts["requests"], &facts["bytes"]), (&100.into(), &51_200.into()), "{facts}");
    refused(1, &["--flush-interval"], &["bench", "-w", "-d", "8", "--flush-interval", "4", &image]);
    refused(1, &["8388608"], &["bench", "-s", "8M", &image]);
    refused(1, &["at most 4G"], &["bench", "-s", "1G", "-d", "100", &image]);
}
