//! A copy lies in the order of the disk, though several pieces of it are written at once, and its file grows seldom.

use super::support::dir::Dir;
use super::support::program::{run, vellum};
use crate::requires;

/// A disk of many pieces, nearly all of them data.
fn fill(dir: &Dir, name: &str) -> String {
    let mut random = vellum_core::Random::from_seed(36);
    let mut bytes = vec![0; 96 << 20];
    for (number, run) in bytes.chunks_mut(5 << 20).enumerate() {
        let data = run.len() - (number % 3) * (200 << 10);
        random.fill(&mut run[..data]);
    }
    std::fs::write(dir.join(name), bytes).expect("a disk");
    dir.text(name)
}

#[test]
fn a_copy_lies_in_the_order_of_the_disk() {
    let dir = Dir::new("layout-order");
    let (source, target) = (fill(&dir, "source.raw"), dir.text("target"));
    for options in [&[][..], &["-t", "unsafe"], &["-t", "none"], &["-o", "extended_l2=on"], &["-m", "64"]] {
        let to = ["convert", "-q", "-f", "raw", "-O", "qcow2", &source, &target];
        vellum(&[&to[..2], options, &to[2..]].concat()).answer();
        let map = vellum(&["map", "--output", "json", "-f", "qcow2", &target]).json();
        let places: Vec<u64> =
            map.as_array().expect("runs").iter().filter_map(|run| run["offset"].as_u64()).collect();
        assert!(places.len() > 10, "{options:?}: {places:?}");
        assert!(places.is_sorted(), "{options:?}: {places:?}");
        assert_eq!(vellum(&["compare", "-q", "-f", "raw", "-F", "qcow2", &source, &target]).code, 0);
    }
}

#[test]
fn the_file_of_a_copy_grows_at_once() {
    requires!("strace");
    let dir = Dir::new("layout-growth");
    let (source, target, log) = (fill(&dir, "source.raw"), dir.text("target"), dir.text("calls"));
    let traced = ["-f", "-qq", "-o", &log, "-e", "trace=ftruncate", env!("CARGO_BIN_EXE_vellum")];
    let to = ["convert", "-q", "-f", "raw", "-O", "qcow2", &source, &target];
    run("strace", &[&traced[..], &to].concat()).answer();
    let lengths: Vec<u64> = std::fs::read_to_string(&log)
        .expect("the log")
        .lines()
        .filter_map(|line| line.split_once(", ")?.1.split_once(')')?.0.parse().ok())
        .collect();
    // Emptied, made, grown, and cut to what is in use.
    let grown = lengths.windows(2).filter(|pair| pair[1] > pair[0]).count();
    assert!((2..=3).contains(&grown), "{lengths:?}");
    let len = std::fs::metadata(&target).expect("the copy").len();
    assert_eq!(lengths.last(), Some(&len), "nothing is left over: {lengths:?}");
    assert!((80 << 20..100 << 20).contains(&len), "{len}");
}
