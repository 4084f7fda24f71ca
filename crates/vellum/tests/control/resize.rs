//! A disk grows while it is served.

use std::sync::atomic::{AtomicBool, Ordering};

use vellum_core::Random;

use super::support::dir::Dir;
use super::support::first_difference;
use super::support::program::{run, vellum};
use super::support::server::Server;
use super::{Controlled, MIB, made};
use crate::requires;

const FORMATS: [(&str, &str); 7] = [
    ("raw", ""),
    ("qcow2", ""),
    ("qcow2", "journal=off"),
    ("qcow2", "extended_l2=on,cluster_size=128k"),
    ("vellum", "layout=linear"),
    ("vellum", "layout=table,unit_size=64k"),
    ("vellum", "layout=zoned,zone_size=1M"),
];

#[test]
fn every_format_grows_beside_a_client_that_writes() {
    for (format, options) in FORMATS {
        let dir = Dir::new("control-resize");
        let image = made(&dir, format, options, "4M");
        let served = Controlled::start(&["-f", format, &image]);
        let (ends, old_size) = (AtomicBool::new(false), 4 * MIB);
        let mut client = served.client("");
        std::thread::scope(|scope| {
            let ends = &ends;
            let writer = scope.spawn(move || {
                let mut random = Random::from_seed(5);
                let mut model = vec![0u8; usize::try_from(old_size).expect("small")];
                while !ends.load(Ordering::Relaxed) {
                    let (at, byte) =
                        (random.index(1023) * 4096, u8::try_from(random.below(255)).expect("a byte") + 1);
                    client.write(at as u64, &[byte; 4096], 0).expect("written");
                    model[at..at + 4096].fill(byte);
                    if random.one_in(16) {
                        client.flush().expect("flushed");
                    }
                }
                // It was connected before, and continues with the size that was announced to it.
                let wrong = first_difference(&client.read_all().expect("read"), &model);
                assert_eq!(wrong, None, "{format} {options}");
                model
            });
            for (wish, before, size) in [("+1M", 4, 5), ("5M", 5, 5), ("+1M", 5, 6), ("9M", 6, 9)] {
                let answer = served.json("resize", &[wish]);
                let told = (answer["virtual-size-before"].as_u64(), answer["virtual-size"].as_u64());
                assert_eq!(told, (Some(before * MIB), Some(size * MIB)), "{format} {options}: {wish}");
                let mut client = served.client("");
                assert_eq!(client.size, size * MIB, "{format} {options}: who comes later sees it");
                let old_end = u32::try_from(MIB).expect("small");
                let fresh = client.read((size - 1) * MIB, old_end).expect("it is there");
                assert!(wish == "5M" || fresh.iter().all(|byte| *byte == 0), "{format} {options}: {wish}");
                client.write(size * MIB - 4096, &[0xAA; 4096], 0).expect("and can be written");
                assert_eq!(served.told()["virtual-size"], size * MIB);
                client.disconnect();
            }
            ends.store(true, Ordering::Relaxed);
            let model = writer.join().expect("nothing went wrong");
            let mut client = served.client("");
            assert!(client.read_all().expect("read")[..model.len()] == model, "{format} {options}");
        });
        served.refuses(&["cannot be shrunk"], "resize", &["8M"]);
        served.refuses(&["cannot be shrunk"], "resize", &["--", "-1M"]);
        served.server.stop();
        let info = vellum(&["info", "-f", format, "--output", "json", &image]).json();
        assert_eq!(info["virtual-size"], 9 * MIB, "{format} {options}");
        if format != "raw" {
            assert_eq!(vellum(&["check", &image]).code, 0, "{format} {options}");
        }
    }
}

#[test]
fn an_answer_is_durable() {
    for (format, options) in FORMATS {
        let dir = Dir::new("control-resize-kill");
        let image = made(&dir, format, options, "4M");
        let served = Controlled::start(&["-f", format, &image]);
        served.client("").write(0, &[1; 4096], 1).expect("written");
        served.json("resize", &["6M"]);
        served.server.kill();
        let server = Server::start(&["-f", format, &image]);
        let mut client = super::support::client::Client::connect(&server.peer(), "").expect("it is there");
        assert_eq!((client.size, client.read(0, 1).expect("read")), (6 * MIB, vec![1]), "{format} {options}");
        client.disconnect();
        server.stop();
    }
}

#[test]
fn a_disk_that_cannot_grow_goes_on_as_it_is() {
    let dir = Dir::new("control-resize-not");
    let (qcow2, table) = (made(&dir, "qcow2", "", "4M"), made(&dir, "vellum", "layout=table", "4M"));
    let served = Controlled::start(&["--export-snapshots", &qcow2, "--export", &format!("table={table}")]);
    let (mut one, mut other) = (served.client(""), served.client("table"));
    one.write(0, &[1; 512], 0).expect("written");
    other.write(0, &[2; 512], 0).expect("written");
    served.refuses(&["several disks"], "resize", &["5M"]);
    served.refuses(&["no export \"x\""], "resize", &["--disk", "x", "5M"]);
    served.refuses(&["can grow to 2048 TiB at most", "cluster_size=2M"], "resize", &["--disk", "", "4E"]);
    served.refuses(
        &["at most 70368744177664 bytes", "larger units"],
        "resize",
        &["--disk", "table", "1000T"],
    );
    served.refuses(&["invalid size"], "resize", &["--disk", "", "much"]);
    // A disk that is being read cannot be removed.
    run(
        env!("CARGO_BIN_EXE_vellum"),
        &["snapshot", "create", "--control", &served.socket, "--disk", "table", "old"],
    )
    .answer();
    let mut reader = served.client("table@old");
    served.refuses(&["reading a snapshot"], "resize", &["--disk", "table", "5M"]);
    assert_eq!(reader.read(0, 1).expect("it is still there"), [2]);
    one.write(4096, &[3; 512], 0).expect("nothing happened to it");
    assert_eq!((one.read(0, 1).expect("read"), other.read(0, 1).expect("read")), (vec![1], vec![2]));
    served.server.stop();
    let served = Controlled::start(&["-r", &qcow2]);
    served.refuses(&["open read-only"], "resize", &["5M"]);
    served.server.stop();
}

#[test]
fn what_a_longer_backing_image_has_behind_the_end_does_not_show() {
    let dir = Dir::new("control-resize-base");
    let base = dir.text("base.raw");
    std::fs::write(&base, vec![7; 2 << 20]).expect("a base");
    for (format, grows) in [("qcow2", false), ("vellum", true)] {
        let image = dir.text(format);
        vellum(&["create", "-f", format, "-b", &base, "-F", "raw", &image, "1M"]).answer();
        let served = Controlled::start(&["-f", format, &image]);
        if grows {
            served.json("resize", &["2M"]);
            let bytes = served.client("").read(MIB, 1 << 20).expect("read");
            assert!(bytes.iter().all(|byte| *byte == 0), "{format}");
        } else {
            served.refuses(&["backing image (2097152 bytes)"], "resize", &["2M"]);
        }
        assert_eq!(served.client("").read(MIB - 1, 1).expect("read"), [7], "{format}");
        served.server.stop();
    }
}

#[test]
fn a_file_is_larger_at_once_and_so_is_a_loop_device_that_is_told() {
    requires!("losetup");
    let dir = Dir::new("control-resize-file");
    if !super::support::program::is_root() || !std::path::Path::new("/dev/fuse").exists() {
        return super::support::program::skipped("it takes root and /dev/fuse");
    }
    for (format, options) in [("raw", ""), ("vellum", "layout=table")] {
        let (image, file) = (made(&dir, format, options, "4M"), dir.text("file"));
        let served = Controlled::start(&["-f", format, "--fuse", &file, &image]);
        let len = || std::fs::metadata(&file).expect("the file").len();
        assert_eq!(len(), 4 * MIB);
        let ran = run("losetup", &["--show", "-f", &file]);
        let device = (ran.code == 0).then(|| ran.out.trim().to_owned());
        served.json("resize", &["8M"]);
        assert_eq!(len(), 8 * MIB, "at once");
        match &device {
            None => super::support::program::skipped(&format!("no loop device: {}", ran.err.trim())),
            Some(device) => {
                let told = run("losetup", &["-c", device]);
                let size = run("blockdev", &["--getsize64", device]);
                run("losetup", &["-d", device]).answer();
                assert_eq!(told.code, 0, "{told:?}");
                assert_eq!(size.answer().trim(), (8 * MIB).to_string());
            }
        }
        let bytes = std::fs::read(&file).expect("all of it");
        assert_eq!(bytes.len() as u64, 8 * MIB);
        served.server.stop();
    }
}
