//! Images whose data is compressed, with qemu-img as judge.

use super::support::dir::Dir;
use super::support::program::{qemu_dump, succeed, vellum};
use super::support::{first_difference, noise};
use super::{MIB, refused};
use crate::requires;
use vellum_core::Random;

/// A disk of text, noise and zeros; it ends within a cluster.
fn bytes_of_all_kinds(len: usize, seed: u64) -> Vec<u8> {
    let mut random = Random::from_seed(seed);
    let words: Vec<Vec<u8>> = (0..200).map(|word| noise(3 + word % 9, word as u64)).collect();
    let mut bytes = Vec::with_capacity(len + 4096);
    while bytes.len() < len {
        let end = bytes.len() + 4096 * (1 + random.index(60));
        match random.below(4) {
            0 => bytes.resize(end, 0),
            1 => bytes.extend(noise(end - bytes.len(), random.below(1000))),
            _ => {
                while bytes.len() < end {
                    let word: &Vec<u8> = random.pick(&words);
                    bytes.extend_from_slice(word);
                }
            }
        }
    }
    bytes.truncate(len);
    bytes
}

fn len(path: &str) -> u64 {
    std::fs::metadata(path).expect("the file").len()
}

#[test]
fn compressed_copies_are_as_those_of_qemu() {
    requires!("qemu-img");
    let dir = Dir::new("compressed");
    let bytes = bytes_of_all_kinds(12 * MIB + 1536, 70);
    let (raw, ours, theirs) = (dir.text("raw"), dir.text("ours.qcow2"), dir.text("theirs.qcow2"));
    std::fs::write(&raw, &bytes).expect("a disk");
    for (index, options) in [
        "compression_type=zlib",
        "compression_type=zstd",
        "cluster_size=4k",
        "cluster_size=512,compression_type=zstd",
        "cluster_size=2M",
        "compat=v2",
        "extended_l2=on,compression_type=zstd",
        "refcount_bits=1",
        "refcount_bits=2,cluster_size=1M",
        "refcount_bits=8,cluster_size=1M,compression_type=zstd",
        "refcount_bits=64",
    ]
    .into_iter()
    .enumerate()
    {
        let ways: [&[&str]; 4] = [&[], &["-W", "-m", "3"], &["-m", "1"], &["--level", "9", "--direct"]];
        let command = ["convert", "-c", "-f", "raw", "-O", "qcow2", "-o", options];
        let there = [&command[..], ways[index % 4], &[&raw, &ours]].concat();
        let ran = vellum(&there);
        assert_eq!((ran.code, ran.out.as_str(), ran.err.as_str()), (0, "", ""), "{there:?}");
        vellum(&["check", &ours]).answer();
        succeed("qemu-img", &["check", &ours]);
        succeed("qemu-img", &["compare", "-f", "raw", "-F", "qcow2", &raw, &ours]);
        assert_eq!(first_difference(&qemu_dump(ours.as_ref(), "qcow2", None), &bytes), None, "{options}");
        succeed("qemu-img", &["convert", "-c", "-f", "raw", "-O", "qcow2", "-o", options, &raw, &theirs]);
        let (one, other) = (len(&ours), len(&theirs));
        let journal_and_rest = 3 << 20;
        assert!(one < other + other / 20 + journal_and_rest, "{options}: {one} bytes, QEMU's {other}");
        let check = vellum(&["check", "--output", "json", &ours]).json();
        assert!(check["compressed-clusters"].as_u64() > Some(0), "{options}: {check}");
        // The same clusters are compressed.
        let compressed = |image: &str| {
            let map = vellum(&["map", "-f", "qcow2", "--output", "json", image]).json();
            let rows = map.as_array().expect("a list").iter().filter(|row| row["compressed"] == true);
            rows.map(|row| row["length"].as_u64().expect("a length")).sum::<u64>()
        };
        let (one, other) = (compressed(&ours), compressed(&theirs));
        assert!(one.abs_diff(other) * 20 <= other, "{options}: {one} bytes compressed, by QEMU {other}");
    }
}

/// Writes in parts of compressed clusters, by QEMU and by this program in turn.
#[test]
fn compressed_clusters_are_overwritten() {
    requires!("qemu-img", "qemu-io");
    let dir = Dir::new("compressed");
    let (raw, image, flat) = (dir.text("raw"), dir.text("image.qcow2"), dir.text("flat"));
    for (index, options) in
        ["compression_type=zlib", "compression_type=zstd,journal=off", "cluster_size=4k,compat=v2"]
            .into_iter()
            .enumerate()
    {
        let mut bytes = bytes_of_all_kinds(6 * MIB, 71);
        std::fs::write(&raw, &bytes).expect("a disk");
        vellum(&["convert", "-c", "-f", "raw", "-O", "qcow2", "-o", options, &raw, &image]).answer();
        let mut random = Random::from_seed(72 + index as u64);
        for round in 0..6 {
            for _ in 0..6 {
                let at = 512 * random.index(bytes.len() / 512 - 200);
                let end = at + 512 * (1 + random.index(199));
                let pattern = 1 + random.index(200);
                bytes[at..end].fill(u8::try_from(pattern).expect("small"));
                let write = format!("write -P {pattern} {at} {}", end - at);
                succeed("qemu-io", &["-f", "qcow2", "-c", &write, &image]);
            }
            // Over what is there, compressed or not.
            let more = bytes_of_all_kinds(bytes.len(), 80 + round);
            let len = MIB * (1 + random.index(4));
            bytes[..len].copy_from_slice(&more[..len]);
            std::fs::write(&raw, &bytes[..len]).expect("a disk");
            let (command, compressed) = (["convert", "-n", "-f", "raw", "-O", "qcow2"], ["-c"]);
            let compressed = if round % 3 == 2 { &[][..] } else { &compressed[..] };
            vellum(&[&command, compressed, &[&raw, &image]].concat()).answer();
            succeed("qemu-img", &["check", &image]);
            vellum(&["check", &image]).answer();
            vellum(&["convert", "-O", "raw", &image, &flat]).answer();
            let read = std::fs::read(&flat).expect("a copy");
            assert_eq!(first_difference(&read, &bytes), None, "{options}, round {round}");
            assert_eq!(
                first_difference(&qemu_dump(image.as_ref(), "qcow2", None), &bytes),
                None,
                "{options}"
            );
        }
    }
}

#[test]
fn what_cannot_be_compressed_is_refused() {
    let dir = Dir::new("compressed");
    let (raw, image) = (dir.text("raw"), dir.text("image"));
    std::fs::write(&raw, noise(MIB, 5)).expect("a disk");
    let convert = |more: &[&'static str], words: &[&str]| {
        let all: Vec<&str> = [&["convert", "-c", "-f", "raw"], more, &[&raw, &image]].concat();
        refused(1, words, &all);
        assert_eq!(dir.names(), ["raw"], "{more:?}");
    };
    convert(&["-O", "raw"], &["-c", "-O qcow2"]);
    convert(&["-O", "vellum"], &["-c", "-O qcow2"]);
    convert(&["-O", "qcow2", "-o", "data_file=data"], &["-c", "data file"]);
    convert(&["-O", "qcow2", "--level", "10"], &["10", "1 to 9"]);
    convert(&["-O", "qcow2", "-o", "compression_type=zstd", "--level", "0"], &["1 to 19"]);
    vellum(&["create", "-q", "-f", "vellum", &image, "1M"]).answer();
    refused(1, &["qcow2"], &["convert", "-c", "-n", "-f", "raw", "-O", "vellum", &raw, &image]);
}

/// A target that is larger than the source keeps what lies behind it, also in the cluster in which the source ends.
#[test]
fn what_lies_behind_the_source_stays() {
    let dir = Dir::new("compressed");
    let (small, large, image, back) =
        (dir.text("small"), dir.text("large"), dir.text("image.qcow2"), dir.text("back"));
    let mut bytes = bytes_of_all_kinds(2 * MIB, 74);
    std::fs::write(&large, &bytes).expect("a disk");
    vellum(&["convert", "-c", "-f", "raw", "-O", "qcow2", &large, &image]).answer();
    bytes[..MIB + 1536].fill(b'x');
    std::fs::write(&small, &bytes[..MIB + 1536]).expect("a disk");
    vellum(&["convert", "-c", "-n", "-f", "raw", "-O", "qcow2", &small, &image]).answer();
    vellum(&["check", &image]).answer();
    vellum(&["convert", "-O", "raw", &image, &back]).answer();
    assert_eq!(first_difference(&std::fs::read(&back).expect("a copy"), &bytes), None);
}

/// Zeros that are to be stored, from a source with holes, and levels.
#[test]
fn levels_and_zeros() {
    let dir = Dir::new("compressed");
    let bytes = bytes_of_all_kinds(8 * MIB, 73);
    let (raw, image) = (dir.text("raw"), dir.text("image.qcow2"));
    std::fs::write(&raw, &bytes).expect("a disk");
    std::fs::File::options().write(true).open(&raw).expect("it").set_len(16 << 20).expect("a hole");
    let lens = ["1", "6", "9"].map(|level| {
        let convert = ["convert", "-c", "--level", level, "-f", "raw", "-O", "qcow2", &raw, &image];
        vellum(&convert).answer();
        assert_eq!(vellum(&["compare", "-f", "raw", &raw, &image]).code, 0, "{level}");
        let check = vellum(&["check", "--output", "json", &image]).json();
        check["image-end-offset"].as_u64().expect("an offset")
    });
    assert!(lens[0] >= lens[1] && lens[1] >= lens[2], "{lens:?}");
    vellum(&["convert", "-c", "-S", "0", "-f", "raw", "-O", "qcow2", &raw, &image]).answer();
    assert_eq!(vellum(&["compare", "-f", "raw", &raw, &image]).code, 0);
    let check = vellum(&["check", "--output", "json", &image]).json();
    assert_eq!(check["allocated-clusters"], 16 << 4, "{check}");
    assert!(len(&image) < 8 << 20, "{}", len(&image));
}
