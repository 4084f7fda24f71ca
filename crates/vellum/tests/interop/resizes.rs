//! Larger and smaller disks, by QEMU and by Vellum in turns, with writes and snapshots in between. QEMU checks and reads the
//! image after each step.

use vellum_core::Random;

use super::support::dir::Dir;
use super::support::program::{qemu_dump, qemu_io, run, succeed, vellum};
use super::support::{first_difference, noise, scale};
use crate::requires;

const KIB: usize = 1 << 10;

/// Options of images, and whether they stand on a base that is longer than they are at times.
const KINDS: &[(&str, bool)] = &[
    ("cluster_size=64k", false),
    ("cluster_size=4k,lazy_refcounts=on", false),
    ("cluster_size=64k", true),
    ("cluster_size=16k,extended_l2=on", true),
    ("cluster_size=512,refcount_bits=8", true),
    ("compat=0.10", false),
];

#[test]
fn disks_are_resized_by_both_programs_in_turns() {
    requires!("qemu-img", "qemu-io");
    let dir = Dir::new("resizes");
    let base = noise(3000 * KIB, 5);
    std::fs::write(dir.join("base.raw"), &base).expect("a base");
    let mut steps = 0;
    for (number, (options, has_base)) in KINDS.iter().enumerate() {
        for seed in 0..scale() as u64 {
            let mut random = Random::from_seed(seed * 100 + number as u64);
            let image = dir.text(&format!("{number}-{seed}.qcow2"));
            let mut words = vec!["create", "-q", "-f", "qcow2", "-o", options];
            let base_path = dir.text("base.raw");
            if *has_base {
                words.extend(["-b", &base_path, "-F", "raw"]);
            }
            words.extend([&image, "2M"]);
            succeed("qemu-img", &words);
            let mut model = if *has_base { base[..2048 * KIB].to_vec() } else { vec![0; 2048 * KIB] };
            let mut snapshots: Vec<Vec<u8>> = Vec::new();
            for _ in 0..14 {
                let when = match random.below(8) {
                    0..=2 => {
                        // QEMU leaves what the last cluster has behind a new end: it gets whole ones.
                        let by_qemu = random.one_in(3) && !has_base;
                        let unit = if by_qemu { 64 * KIB as u64 } else { 512 };
                        let size = unit * (1 + random.below(5 * 1024 * KIB as u64 / unit));
                        if !snapshots.is_empty() && options.contains("0.10") {
                            continue;
                        }
                        let grows = size > model.len() as u64;
                        let how =
                            ["off", "metadata", "falloc", "full"][usize::try_from(random.below(4)).unwrap()];
                        let is_plain = !grows || options.contains("0.10") || by_qemu;
                        let how = format!("--preallocation={}", if is_plain { "off" } else { how });
                        let bytes = size.to_string();
                        let words = ["resize", "-q", "-f", "qcow2", "--shrink", &how, &image, &bytes];
                        match by_qemu {
                            true => drop(succeed("qemu-img", &words)),
                            false => drop(vellum(&words).answer()),
                        }
                        model.resize(usize::try_from(size).expect("small"), 0);
                        format!("{words:?} by QEMU: {by_qemu}")
                    }
                    3 => {
                        let name = format!("s{}", snapshots.len());
                        succeed("qemu-img", &["snapshot", "-c", &name, &image]);
                        snapshots.push(model.clone());
                        format!("snapshot {name}")
                    }
                    4 if !snapshots.is_empty() => {
                        let name = format!("s{}", snapshots.len() - 1);
                        vellum(&["snapshot", "delete", &image, &name]).answer();
                        snapshots.pop();
                        format!("delete {name}")
                    }
                    _ => {
                        let at = usize::try_from(random.below(model.len() as u64)).expect("small");
                        let len = (1 + usize::try_from(random.below(300_000)).expect("small"))
                            .min(model.len() - at);
                        let byte = u8::try_from(1 + random.below(255)).expect("a byte");
                        qemu_io(&["-f", "qcow2", &image], &[format!("write -P {byte} {at} {len}")]);
                        model[at..at + len].fill(byte);
                        format!("write {at} {len}")
                    }
                };
                steps += 1;
                let context = format!("{options}, base {has_base}, seed {seed}: {when}");
                let checked = run("qemu-img", &["check", "-f", "qcow2", &image]);
                assert_eq!(checked.code, 0, "{context}: {}{}", checked.out, checked.err);
                let read = qemu_dump(image.as_ref(), "qcow2", None);
                assert_eq!(first_difference(&read, &model), None, "{context}");
                for (index, kept) in snapshots.iter().enumerate() {
                    // QEMU reads a snapshot in the size that the disk has now.
                    let copy = dir.text("copy.raw");
                    let name = format!("s{index}");
                    vellum(&["convert", "-q", "-l", &name, "-O", "raw", &image, &copy]).answer();
                    let read = std::fs::read(&copy).expect("a copy");
                    assert_eq!(first_difference(&read, kept), None, "{context}: s{index}");
                }
            }
        }
    }
    assert!(steps > 60, "{steps}");
}

#[test]
fn a_disk_without_room_keeps_its_size() {
    requires!("qemu-img");
    let dir = Dir::new("resizes");
    let image = dir.text("a.qcow2");
    succeed("qemu-img", &["create", "-q", "-f", "qcow2", &image, "1M"]);
    // One of no size has no L1 table.
    let empty = dir.text("empty.qcow2");
    succeed("qemu-img", &["create", "-q", "-f", "qcow2", &empty, "0"]);
    vellum(&["resize", "-q", &empty, "3M"]).answer();
    succeed("qemu-img", &["check", "-q", &empty]);
    assert_eq!(vellum(&["info", "--output=json", &empty]).json()["virtual-size"], 3 << 20);
    for (words, why) in [
        (&["resize", &image, "512k"][..], "--shrink"),
        (&["resize", "--shrink", "--preallocation=full", &image, "512k"], "nothing to preallocate"),
        (&["resize", "--preallocation=some", &image, "2M"], "off, metadata"),
        (&["resize", "-f", "raw", "--preallocation=metadata", &image, "+2M"], "falloc or full"),
        (&["resize", "--preallocation=falloc", &image, "1P"], "in steps"),
    ] {
        let ran = vellum(words);
        assert!(ran.code == 1 && ran.err.contains(why), "{words:?}: {ran:?}");
        succeed("qemu-img", &["check", "-q", "-f", "qcow2", &image]);
        assert_eq!(vellum(&["info", "--output=json", &image]).json()["virtual-size"], 1 << 20, "{words:?}");
    }
    for how in ["falloc", "full"] {
        let line = format!(
            "ulimit -f 8192; exec {} resize --preallocation={how} {image} 64M",
            env!("CARGO_BIN_EXE_vellum")
        );
        let ran = run("sh", &["-c", &line]);
        assert!(ran.code == 1 && ran.err.contains("nothing has changed"), "{how}: {ran:?}");
        succeed("qemu-img", &["check", "-q", "-f", "qcow2", &image]);
        assert_eq!(vellum(&["info", "--output=json", &image]).json()["virtual-size"], 1 << 20, "{how}");
        assert!(
            std::fs::metadata(&image).expect("the image").len() < 2 << 20,
            "{how}: the file is as it was"
        );
    }
    vellum(&["resize", "-q", "--preallocation=full", &image, "3M"]).answer();
    let map = vellum(&["map", "--output=json", &image]).json();
    let placed: u64 = map
        .as_array()
        .expect("a list")
        .iter()
        .filter(|run| run["present"] == true)
        .map(|run| run["length"].as_u64().expect("a length"))
        .sum();
    assert_eq!(placed, 2 << 20, "{map}");
}

/// The rest of the last cluster is a snapshot's as well, or compressed: it is zero when the disk grows, whoever has made it smaller,
/// and the snapshot keeps what it has.
#[test]
fn a_disk_that_ends_within_a_cluster_grows_with_zeros() {
    requires!("qemu-img", "qemu-io");
    let dir = Dir::new("resizes");
    let disk = noise(2048 * KIB, 11);
    let raw = dir.text("disk.raw");
    std::fs::write(&raw, &disk).expect("a disk");
    let mut grown = 0;
    for (options, is_compressed) in [
        ("cluster_size=64k", false),
        ("cluster_size=64k,extended_l2=on", false),
        ("cluster_size=64k", true),
        ("cluster_size=4k,compression_type=zstd", true),
        ("compat=0.10,cluster_size=4k", true),
    ] {
        for by_qemu in [false, true] {
            for has_snapshot in [false, true] {
                if !is_compressed && !has_snapshot || has_snapshot && options.contains("0.10") {
                    continue;
                }
                let context =
                    format!("{options}, compressed {is_compressed}, {has_snapshot}, by QEMU {by_qemu}");
                let image = dir.text("image.qcow2");
                let mut words = vec!["convert", "-f", "raw", "-O", "qcow2", "-o", options];
                if is_compressed {
                    words.push("-c");
                }
                words.extend([raw.as_str(), &image]);
                succeed("qemu-img", &words);
                if has_snapshot {
                    succeed("qemu-img", &["snapshot", "-c", "whole", &image]);
                }
                let mut model = disk.clone();
                for (size, again) in
                    [(1024 * KIB + 1536, 2048 * KIB), (700 * KIB + 512, 701 * KIB), (512, 3000 * KIB)]
                {
                    let bytes = size.to_string();
                    let words = ["resize", "-q", "-f", "qcow2", "--shrink", &image, &bytes];
                    match by_qemu {
                        true => drop(succeed("qemu-img", &words)),
                        false => drop(vellum(&words).answer()),
                    }
                    vellum(&["resize", "-q", "-f", "qcow2", &image, &again.to_string()]).answer();
                    model.truncate(size);
                    model.resize(again, 0);
                    grown += 1;
                    let read = qemu_dump(image.as_ref(), "qcow2", None);
                    assert_eq!(first_difference(&read, &model), None, "{context}: {size} and {again}");
                    let checked = run("qemu-img", &["check", "-f", "qcow2", &image]);
                    assert_eq!(checked.code, 0, "{context}: {}{}", checked.out, checked.err);
                    if has_snapshot {
                        let copy = dir.text("copy.raw");
                        vellum(&["convert", "-q", "-l", "whole", "-O", "raw", &image, &copy]).answer();
                        let read = std::fs::read(&copy).expect("a copy");
                        assert_eq!(first_difference(&read, &disk), None, "{context}: the snapshot");
                    }
                }
            }
        }
    }
    assert_eq!(grown, 42);
}

/// A full image has no room for the tables of a smaller disk but behind its data. They do not stay there.
#[test]
fn a_full_image_that_shrinks_ends_earlier() {
    requires!("qemu-img");
    let dir = Dir::new("resizes");
    let raw = dir.text("disk.raw");
    let disk = noise(48 << 20, 13);
    std::fs::write(&raw, &disk).expect("a disk");
    for options in ["cluster_size=4k", "cluster_size=4k,refcount_bits=64", "cluster_size=64k,extended_l2=on"]
    {
        let image = dir.text("image.qcow2");
        succeed("qemu-img", &["convert", "-f", "raw", "-O", "qcow2", "-o", options, &raw, &image]);
        for size in [20 << 20, 8 << 20, (1 << 20) + 512] {
            vellum(&["resize", "-q", "--shrink", "-f", "qcow2", &image, &size.to_string()]).answer();
            let bytes = std::fs::read(&image).expect("the image");
            assert!(bytes.len() <= size + (1 << 20), "{options}: {} bytes for a disk of {size}", bytes.len());
            let checked = run("qemu-img", &["check", "-f", "qcow2", &image]);
            assert_eq!(checked.code, 0, "{options}, {size}: {}{}", checked.out, checked.err);
            let read = qemu_dump(image.as_ref(), "qcow2", None);
            assert_eq!(first_difference(&read, &disk[..size]), None, "{options}, {size}");
        }
    }
}
