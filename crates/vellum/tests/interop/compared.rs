//! `compare -s`: both programs say the same of two images, which have data, zeros and nothing in the same places, or not.

use vellum_core::Random;

use super::report;
use super::support::dir::Dir;
use super::support::program::{qemu_io, run, succeed, vellum};
use super::support::scale;
use crate::requires;

const CLUSTER: u64 = 64 << 10;
const CLUSTERS: u64 = 64;

/// One disk in many formats, and another one that has zeros where that has data: each with each.
#[test]
fn strictly_compared_formats_are_what_qemu_says() {
    requires!("qemu-img", "qemu-io");
    let dir = Dir::new("compared-formats");
    // The last cluster is the last run that QEMU sees in each of these formats: it tells the run that reaches the end from others,
    // which in a qcow image is the last 4 KiB.
    let contents = [
        ["write -P 1 1M 256k", "write -P 2 3M 64k", "write -P 3 4032k 64k"],
        ["write -P 1 1M 256k", "write -P 0 3M 64k", "write -P 3 4032k 64k"],
    ];
    let formats = [
        ("raw", "", "raw"),
        ("qcow2", "", "qcow2"),
        ("vmdk", "", "vmdk"),
        ("vmdk", "subformat=streamOptimized", "stream"),
        ("vmdk", "subformat=monolithicFlat", "flat"),
        ("vdi", "", "vdi"),
        ("vhdx", "", "vhdx"),
        ("vhdx", "subformat=fixed", "fixed"),
        ("qed", "", "qed"),
        ("parallels", "", "parallels"),
    ];
    let mut images = Vec::new();
    for (number, commands) in contents.iter().enumerate() {
        let raw = dir.text(&format!("{number}.raw"));
        succeed("qemu-img", &["create", "-q", "-f", "raw", &raw, "4M"]);
        qemu_io(&["-f", "raw", &raw], &commands.map(str::to_owned));
        for (format, options, name) in formats {
            let image = dir.text(&format!("{number}-{name}"));
            let options = if options.is_empty() { vec![] } else { vec!["-o", options] };
            let convert = ["convert", "-f", "raw", "-O", format];
            let made = run("qemu-img", &[&convert[..], &options, &[&raw, &image]].concat());
            // Not every QEMU makes all of them.
            if made.code == 0 {
                images.push((format, image));
            }
        }
    }
    let mut met = [0; 2];
    for (one_format, one) in &images {
        for (other_format, other) in &images {
            let words = ["compare", "-s", "-f", one_format, "-F", other_format, one, other];
            let (theirs, ours) = (run("qemu-img", &words), vellum(&words));
            assert_eq!((ours.code, &ours.out), (theirs.code, &theirs.out), "{one} {other}: {ours:?}");
            met[usize::from(theirs.code == 0)] += 1;
        }
    }
    assert!(met.iter().all(|count| *count > 20), "{met:?}");
    report(&format!("{met:?}: different, and the same"));
}

#[test]
fn strictly_compared_images_are_what_qemu_says() {
    requires!("qemu-img", "qemu-io");
    let dir = Dir::new("compared");
    let (one, other) = (dir.text("one.qcow2"), dir.text("other.qcow2"));
    let (base, size) = (dir.text("base.raw"), (CLUSTERS * CLUSTER).to_string());
    std::fs::write(&base, vec![3; 1 << 20]).expect("a base");
    let mut met = [0; 3];
    for seed in 0..40 * scale() as u64 {
        let mut random = Random::from_seed(seed);
        let has_base = random.one_in(2);
        let mut commands = [Vec::new(), Vec::new()];
        for number in 0..random.below(9) {
            let at = random.below(CLUSTERS - 16) * CLUSTER;
            // QEMU compresses only what is not there yet.
            let packed = (CLUSTERS - 12 + number) * CLUSTER;
            let len = (1 + random.below(4)) * CLUSTER;
            let both = format!("write -P {} {at} {len}", 1 + random.below(3));
            let [a, b] = match random.below(12) {
                0 => [both.clone(), format!("write -z {at} {len}")],
                1 => [format!("write -P 1 {packed} {CLUSTER}"), format!("write -c -P 1 {packed} {CLUSTER}")],
                2 => [format!("write -P 0 {at} {len}"), format!("write -z {at} {len}")],
                3 => [both.clone(), String::new()],
                4 | 5 => [(); 2].map(|()| format!("write -z {at} {len}")),
                6 => [(); 2].map(|()| format!("write -c -P 7 {packed} {CLUSTER}")),
                7 => [(); 2].map(|()| format!("discard {at} {len}")),
                _ => [both.clone(), both],
            };
            commands[0].push(a);
            commands[1].push(b);
        }
        for (image, commands) in [&one, &other].into_iter().zip(&mut commands) {
            let mut words = vec!["create", "-q", "-f", "qcow2"];
            if has_base {
                words.extend(["-b", &base, "-F", "raw"]);
            }
            words.extend([image.as_str(), &size]);
            succeed("qemu-img", &words);
            commands.retain(|command| !command.is_empty());
            // What QEMU calls the end of the file begins in both where this ends.
            commands.push(format!("write -P 9 {} {CLUSTER}", (CLUSTERS - 2) * CLUSTER));
            qemu_io(&["-f", "qcow2", image], commands);
        }
        let words = ["compare", "-s", "-f", "qcow2", "-F", "qcow2", &one, &other];
        let (theirs, ours) = (run("qemu-img", &words), vellum(&words));
        assert_eq!((ours.code, &ours.out), (theirs.code, &theirs.out), "seed {seed}: {commands:?}: {ours:?}");
        met[match theirs.out {
            text if text.contains("identical") => 0,
            text if text.contains("status") => 1,
            _ => 2,
        }] += 1;
        if theirs.code == 0 {
            assert_eq!(vellum(&["compare", "-q", &one, &other]).code, 0, "seed {seed}");
        }
    }
    assert!(met.iter().all(|count| *count > 0), "{met:?}");
    report(&format!("{met:?}: the same, in other places, with other content"));
}
