//! Making images: the options, and what is refused.

use std::os::unix::fs::MetadataExt;

use serde_json::json;

use super::support::client::Client;
use super::support::dir::Dir;
use super::support::loops::LoopDevice;
use super::support::patchy;
use super::support::program::vellum;
use super::support::server::Server;
use super::{MIB, check_says, refused, same};

#[test]
fn options_and_what_info_tells_of_them() {
    let dir = Dir::new("native-options");
    std::fs::write(dir.join("base.raw"), patchy(3 * MIB, 1)).expect("a base");
    let image = dir.text("disk.vlm");
    for (options, has_base, wanted) in [
        ("", false, json!({ "layout": "zoned", "unit-size": 65_536, "zone-size": 64 * MIB, "embed": true })),
        ("", true, json!({ "layout": "zoned" })),
        ("unit_size=1M", false, json!({ "layout": "zoned", "unit-size": MIB })),
        ("layout=linear", false, json!({ "layout": "linear" })),
        ("block_size=4k,journal_size=64k", true, json!({ "block-size": 4096, "base-size": 3 * MIB })),
        ("layout=table", false, json!({ "layout": "table", "unit-size": MIB, "snapshots": false })),
        ("layout=table,unit_size=2M,block_size=1M", true, json!({ "unit-size": 2 * MIB, "block-size": MIB })),
        (
            "layout=zoned",
            false,
            json!({ "layout": "zoned", "unit-size": 65_536, "zone-size": 64 * MIB, "embed": true }),
        ),
        ("layout=zoned,zone_size=1M,embed=off", true, json!({ "zone-size": MIB, "embed": false })),
    ] {
        let mut arguments = vec!["create", "-f", "vellum", "--output", "json"];
        if !options.is_empty() {
            arguments.extend(["-o", options]);
        }
        if has_base {
            arguments.extend(["-b", "base.raw", "-F", "raw"]);
        }
        arguments.extend([image.as_str(), "5M"]);
        let made = vellum(&arguments).json();
        assert_eq!(
            (&made["format"], &made["virtual-size"]),
            (&"vellum".into(), &(5 * MIB).into()),
            "{options}"
        );
        let info = vellum(&["info", "--output", "json", &image]).json();
        assert_eq!(
            (&info["format"], &info["virtual-size"]),
            (&"vellum".into(), &(5 * MIB).into()),
            "{options}"
        );
        assert_eq!(info["backing-filename"].is_string(), has_base, "{options}");
        let data = &info["format-specific"]["data"];
        for (field, value) in wanted.as_object().expect("an object") {
            assert_eq!(data[field], *value, "{options}: {data}");
        }
        let text = vellum(&["info", &image]).answer();
        assert!(text.contains("file format: vellum") && text.contains("    uuid: "), "{text}");
        let facts = std::fs::metadata(&image).expect("the image");
        assert!(facts.blocks() * 512 <= 64 << 10, "{options}: {} bytes are taken", facts.blocks() * 512);
        check_says(&image, 0);
    }
}

#[test]
fn what_makes_no_sense_is_refused_and_leaves_nothing() {
    let dir = Dir::new("native-senseless");
    let image = dir.text("disk.vlm");
    for (options, words) in [
        ("layout=linear,unit_size=64k", "add layout=table"),
        ("block_size=64k", "name one with -b"),
        ("layout=linear,journal_size=1M", "nothing to record; omit it"),
        ("zeroed=on", "is for block devices"),
        ("layout=table,zeroed=on", "before they are used anyway; omit it"),
        ("layout=table,unit_size=32k", "64k to 2M"),
        ("layout=table,unit_size=4M", "64k to 2M"),
        ("layout=table,unit_size=100k", "64k to 2M"),
        ("layout=table,block_size=64k", "has no bitmap"),
        ("layout=table,journal_size=1k", "64k to 64M"),
        ("layout=table,journal_size=65M", "64k to 64M"),
        ("layout=table,journal_size=66000", "a multiple of 4k"),
        ("layout=heap", "linear, table, zoned"),
        ("layout=table,zone_size=1M", "need layout=zoned"),
        ("layout=zoned,zone_size=64k", "128k to 64M"),
        ("layout=zoned,unit_size=2M,zone_size=2M", "2 to 1024 units"),
        ("layout=linear,embed=on", "need layout=zoned"),
        ("nonsense=on", "unknown option"),
        ("cluster_size=64k", "use unit_size"),
        ("journal=off", "whenever it needs one"),
        ("prealloc=off", "always prepares units"),
        ("preallocation=full", "vellum images do not support it"),
        ("extended_l2=on", "use `-f qcow2`"),
    ] {
        refused(&[words], &["create", "-f", "vellum", "-o", options, &image, "1M"]);
        assert_eq!(dir.names(), Vec::<String>::new(), "{options} leaves something");
    }
    vellum(&["create", "-q", "-f", "vellum", "-o", "layout=linear", &image, "1M"]).answer();
    refused(&["snapshots need layout=zoned or layout=table"], &["snapshot", "create", &image, "monday"]);
    std::fs::remove_file(&image).expect("the image");
    refused(
        &["is a vellum option: use `-f vellum`"],
        &["create", "-f", "qcow2", "-o", "layout=table", &image, "1M"],
    );
    refused(&["has a journal whenever"], &{
        vellum(&["create", "-q", &image, "1M"]).answer();
        ["journal", "enable", image.as_str()]
    });
}

#[test]
fn copies_read_as_their_source() {
    let dir = Dir::new("native-copies");
    let (raw, image, back) = (dir.text("source.raw"), dir.text("copy.vlm"), dir.text("back.raw"));
    std::fs::write(&raw, patchy(5 * MIB + 512, 2)).expect("a source");
    vellum(&["convert", "-f", "raw", &raw, &image]).answer();
    assert_eq!(vellum(&["info", "--output", "json", &image]).json()["format"], "vellum", "its name says so");
    for options in [
        vec![],
        vec!["-o", "layout=linear"],
        vec!["-o", "layout=table"],
        vec!["-o", "layout=table,unit_size=64k"],
        vec!["-o", "layout=table,unit_size=2M,journal_size=64k"],
        vec!["-o", "layout=zoned,zone_size=256k,journal_size=64k"],
    ] {
        let arguments = [&["convert", "-f", "raw", "-O", "vellum"], &options[..], &[&raw, &image]].concat();
        vellum(&arguments).answer();
        same(&raw, &image);
        check_says(&image, 0);
        vellum(&["convert", "-O", "raw", &image, &back]).answer();
        assert!(std::fs::read(&raw).expect("read") == std::fs::read(&back).expect("read"), "{options:?}");
        let rows = vellum(&["map", "--output", "json", &image]).json();
        let rows = rows.as_array().expect("rows");
        let length: u64 = rows.iter().filter_map(|row| row["length"].as_u64()).sum();
        assert_eq!(length, 5 * MIB as u64 + 512, "{options:?}");
        assert!(rows.iter().any(|row| row["data"] == true) && rows.iter().any(|row| row["zero"] == true));
    }
}

/// As of a qcow2 image: what was never written is in none of the images.
#[test]
fn what_no_image_has_is_not_present() {
    let dir = Dir::new("native-present");
    let (image, raw) = (dir.text("disk.vlm"), dir.text("disk.raw"));
    let mut bytes = vec![0; 8 * MIB];
    bytes[4 * MIB..5 * MIB].fill(7);
    std::fs::write(&raw, &bytes).expect("a source");
    for layout in ["linear", "table", "zoned"] {
        let options = format!("layout={layout}");
        vellum(&["convert", "-f", "raw", "-O", "vellum", "-o", &options, &raw, &image]).answer();
        let rows = vellum(&["map", "--output", "json", &image]).json();
        let rows = rows.as_array().expect("rows").iter();
        let has = |wanted: bool| -> u64 {
            let those = rows.clone().filter(|row| row["present"] == wanted);
            those.map(|row| row["length"].as_u64().expect("a length")).sum()
        };
        assert_eq!((has(true), has(false)), (MIB as u64, 7 * MIB as u64), "{layout}");
    }
}

#[test]
fn devices_that_held_something_else() {
    let Some(device) = LoopDevice::new(24 << 20, 512) else { return };
    std::fs::write(&device.path, vec![0x77; 24 << 20]).expect("old bytes");
    let device = device.text();
    refused(&["zeroed=on"], &["create", "-f", "vellum", "-o", "layout=linear", &device, "4M"]);
    vellum(&["create", "-f", "vellum", "-o", "zeroed=on", &device, "4M"]).answer();
    let empty = Dir::new("native-device");
    vellum(&["create", "-q", &empty.text("empty"), "4M"]).answer();
    same(&device, &empty.text("empty"));
    // A table hands out units of the device, which must not show their old content.
    std::fs::write(&device, vec![0x77; 24 << 20]).expect("old bytes");
    vellum(&["create", "-f", "vellum", "-o", "layout=table,journal_size=64k", &device, "64M"]).answer();
    vellum(&["create", "-q", "-f", "raw", &empty.text("model"), "64M"]).answer();
    for (disk, format) in [(&device, "vellum"), (&empty.text("model"), "raw")] {
        let server = Server::start(&[disk, "-f", format]);
        let mut client = Client::connect(&server.peer(), "").expect("a server");
        for at in [512, 9 << 20, 40_000_000 / 512 * 512] {
            client.write(at, &[5; 700], 0).expect("a write");
        }
        client.flush().expect("a flush");
        server.stop();
    }
    same(&device, &empty.text("model"));
    check_says(&device, 0);
    refused(&["too small"], &["create", "-f", "vellum", "-o", "zeroed=on", &device, "24M"]);
}
