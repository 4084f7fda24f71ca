//! Chains of all formats in any order; and servers that are killed.

use super::support::client::Client;
use super::support::dir::Dir;
use super::support::program::vellum;
use super::support::server::Server;
use super::support::{first_difference, noise, patchy};
use super::{MIB, check_says, same};

/// Writes to a disk by a server, and closes it.
fn write_to(image: &str, format: &str, work: impl FnOnce(&mut Client)) {
    let server = Server::start(&[image, "-f", format]);
    let mut client = Client::connect(&server.peer(), "").expect("a server");
    work(&mut client);
    client.flush().expect("a flush");
    server.stop();
}

#[test]
fn formats_over_one_another_in_any_order() {
    let dir = Dir::new("native-chains");
    let size = 4 * MIB;
    for (number, formats) in
        [["vellum", "qcow2", "vellum"], ["qcow2", "vellum", "qcow2"], ["vellum", "vellum", "qcow2"]]
            .into_iter()
            .enumerate()
    {
        let mut model = patchy(3 * MIB + 512, 5);
        std::fs::write(dir.join("base.raw"), &model).expect("a base");
        model.resize(size, 0);
        let (mut below, mut below_format) = ("base.raw".to_owned(), "raw");
        for (depth, format) in formats.into_iter().enumerate() {
            let suffix = if format == "vellum" { "vlm" } else { format };
            let name = format!("{number}-{depth}.{suffix}");
            let image = dir.text(&name);
            let table = ["-o", "layout=table,unit_size=64k,journal_size=256k"];
            let zoned = ["-o", "layout=zoned,zone_size=1M,journal_size=256k"];
            let options = match (format, depth + number) {
                ("vellum", 2) => &table[..],
                ("vellum", 0 | 3) => &zoned[..],
                _ => &[],
            };
            let arguments =
                [&["create", "-q", "-f", format, "-b", &below, "-F", below_format], options, &[&image, "4M"]]
                    .concat();
            vellum(&arguments).answer();
            let seed = (number * 3 + depth) as u64;
            let at = 200_000 * (depth + 1) + 300;
            let data = noise(150_000, seed);
            write_to(&image, format, |client| {
                client.write(at as u64, &data, 0).expect("a write");
                client.zero(at as u64 + 40_000, 9000, 0).expect("zeros");
            });
            model[at..at + 150_000].copy_from_slice(&data);
            model[at + 40_000..at + 49_000].fill(0);
            std::fs::write(dir.join("model.raw"), &model).expect("a model");
            same(&image, &dir.text("model.raw"));
            if format == "vellum" {
                check_says(&image, 0);
            }
            (below, below_format) = (name, format);
        }
        let info = vellum(&["info", "--backing-chain", "--output", "json", &dir.text(&below)]).json();
        assert_eq!(info.as_array().map(Vec::len), Some(4), "{formats:?}");
    }
}

#[test]
fn a_killed_server_loses_nothing_that_was_flushed() {
    let dir = Dir::new("native-killed");
    let model = patchy(3 * MIB, 9);
    std::fs::write(dir.join("base.raw"), &model).expect("a base");
    for options in [
        "layout=linear,journal_size=256k",
        "layout=table,unit_size=64k,journal_size=256k",
        "layout=zoned,zone_size=256k,journal_size=256k",
    ] {
        let image = dir.text("disk.vlm");
        vellum(&["create", "-q", "-f", "vellum", "-o", options, "-b", "base.raw", "-F", "raw", &image])
            .answer();
        let mut model = model.clone();
        let server = Server::start(&[&image]);
        let mut client = Client::connect(&server.peer(), "").expect("a server");
        for round in 0..20 {
            let (at, data) = (round * 140_000 + 777, noise(5000 + round * 1000, round as u64));
            client.write(at as u64, &data, 0).expect("a write");
            model[at..at + data.len()].copy_from_slice(&data);
            client.flush().expect("a flush");
        }
        server.kill();
        let info = vellum(&["info", "--output", "json", &image]).json();
        assert_eq!(info["dirty-flag"], true, "{options}: {info}");
        let text = vellum(&["info", &image]).answer();
        assert!(text.contains("must be replayed: run `vellum recover"), "{text}");
        let before = std::fs::read(&image).expect("the image");
        // The other checker reads what is in the file, and replays nothing.
        vellum(&["check", &image]).answer();
        let map = vellum(&["map", "--output", "json", &image]).json();
        let seen = dir.text("seen.raw");
        vellum(&["convert", "-O", "raw", &image, &seen]).answer();
        assert_eq!(first_difference(&std::fs::read(&seen).expect("a copy"), &model), None, "{options}");
        assert!(std::fs::read(&image).expect("the image") == before, "{options}: nobody wrote it");
        let answer = vellum(&["recover", "--output", "json", &image]).json();
        assert_eq!(answer["was-dirty"], true, "{answer}");
        assert!(answer["journal"]["records-replayed"].as_u64() > Some(0), "{answer}");
        check_says(&image, 0);
        assert_eq!(
            vellum(&["map", "--output", "json", &image]).json(),
            map,
            "{options}: as it was in memory"
        );
        let back = dir.text("back.raw");
        vellum(&["convert", "-O", "raw", &image, &back]).answer();
        let back = std::fs::read(&back).expect("the copy");
        assert_eq!(first_difference(&back, &model), None, "{options}");
        assert!(vellum(&["recover", &image]).answer().contains("nothing to do"));
    }
}

#[test]
fn a_damaged_superblock_is_told_and_written_anew() {
    let dir = Dir::new("native-superblock");
    let image = dir.text("disk.vlm");
    vellum(&["create", "-q", "-f", "vellum", "-o", "layout=table", &image, "8M"]).answer();
    let mut bytes = std::fs::read(&image).expect("the image");
    bytes[..4096].fill(0xAB);
    std::fs::write(&image, bytes).expect("damage");
    let info = vellum(&["info", "--output", "json", &image]).json();
    assert_eq!(info["format-specific"]["data"]["damaged-superblock"], "A", "{info}");
    let checked = vellum(&["check", &image]);
    assert!(checked.code == 0 && checked.err.contains("superblock A"), "{checked:?}");
    let repaired = vellum(&["check", "-r", "all", "--output", "json", &image]).json();
    assert_eq!(
        (&repaired["corruptions-fixed"], &repaired["format"]),
        (&1.into(), &"vellum".into()),
        "{repaired}"
    );
    assert_eq!(vellum(&["check", &image]).err, "");
}
