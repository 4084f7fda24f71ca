//! The small programs: nbdinfo queries, nbdcopy copies, nbdkit is a proxy in between.

use serde_json::{Value, json};

use super::support::program::{run, succeed};
use super::support::server::{Foreign, Server};
use super::support::{first_difference, noise, patchy};
use super::{Image, KINDS, Kind, MIB, ways, write_sparse};
use crate::requires;
use crate::support::dir::Dir;

/// The JSON that nbdinfo answers.
#[track_caller]
fn nbdinfo(arguments: &[&str]) -> Value {
    let text = succeed("nbdinfo", &[&["--json"], arguments].concat());
    serde_json::from_str(&text).expect("JSON")
}

#[test]
fn nbdinfo_hears_what_the_server_can() {
    requires!("nbdinfo");
    let dir = Dir::new("nbdinfo");
    for kind in KINDS {
        for (read_only, extra) in [(false, &[][..]), (true, &["--read-only"])] {
            let image = Image::new(&dir, "disk", kind, &patchy(3 * MIB + 512, 1));
            let server = image.serve(&[&["--nbd", "tcp:127.0.0.1:0"], extra].concat());
            for uri in [server.uri(""), server.tcp_uri("")] {
                let info = nbdinfo(&[&uri]);
                assert_eq!(info["protocol"], "newstyle-fixed");
                assert_eq!(info["structured"], true);
                let export = &info["exports"][0];
                let expected = [
                    ("export-size", json!(3 * MIB + 512)),
                    ("is_read_only", json!(read_only)),
                    ("is_rotational", json!(false)),
                    ("can_cache", json!(true)),
                    ("can_df", json!(true)),
                    ("can_flush", json!(true)),
                    ("can_fua", json!(true)),
                    ("can_multi_conn", json!(true)),
                    ("can_trim", json!(!read_only)),
                    ("can_zero", json!(!read_only)),
                    ("can_fast_zero", json!(!read_only)),
                    ("block_size_minimum", json!(1)),
                    ("block_size_maximum", json!(32 * MIB)),
                    ("contexts", json!(["base:allocation", "qemu:allocation-depth"])),
                    ("description", json!(image.path.file_name().and_then(|name| name.to_str()))),
                ];
                for (field, value) in expected {
                    assert_eq!(export[field], value, "{field} of {kind:?}, read-only {read_only}, at {uri}");
                }
                let preferred = export["block_size_preferred"].as_u64().expect("a number");
                assert_eq!(preferred, if kind == Kind::Raw { 4096 } else { 65536 }, "{kind:?}");
            }
            server.stop();
        }
    }
}

#[test]
fn nbdinfo_lists_the_exports() {
    requires!("nbdinfo");
    let dir = Dir::new("nbdinfo");
    let one = Image::new(&dir, "one", Kind::Qcow2, &patchy(MIB, 2));
    let two = Image::new(&dir, "two", Kind::Clone, &patchy(2 * MIB, 3));
    let (first, second) = (format!("web={}", one.text()), format!("db 1={}", two.text()));
    let server = Server::start(&["--export", &first, "--export", &second]);
    let list = nbdinfo(&["--list", &server.uri("")]);
    let listed: Vec<_> = list["exports"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|export| (export["export-name"].as_str().expect("a name"), export["export-size"].clone()))
        .collect();
    assert_eq!(listed, [("db 1", json!(2 * MIB)), ("web", json!(MIB))]);
    // No export has the default name.
    let refused = run("nbdinfo", &[server.uri("")]);
    assert_ne!(refused.code, 0, "{refused:?}");
    assert_eq!(nbdinfo(&[&server.uri("db%201")])["exports"][0]["export-size"], json!(2 * MIB));
    server.stop();
}

#[test]
fn nbdinfo_maps_what_is_where() {
    requires!("nbdinfo");
    let dir = Dir::new("nbdinfo");
    let mut bytes = vec![0; 4 * MIB];
    bytes[MIB..2 * MIB].copy_from_slice(&noise(MIB, 4));
    let hole =
        |at: usize, len: usize| json!({"offset": at, "length": len, "type": 3, "description": "hole,zero"});
    let data = |at: usize, len: usize| json!({"offset": at, "length": len, "type": 0, "description": "data"});
    for kind in KINDS {
        let image = Image::new(&dir, "disk", kind, &bytes);
        let server = image.serve(&[]);
        let map = nbdinfo(&["--map", &server.uri("")]);
        assert_eq!(map, json!([hole(0, MIB), data(MIB, MIB), hole(2 * MIB, 2 * MIB)]), "{kind:?}");
        let mut client = super::support::client::Client::connect(&server.peer(), "").expect("a server");
        client.write(3 * MIB as u64, &noise(65536, 5), 0).expect("a write");
        client.trim(MIB as u64, 65536).expect("a trim");
        let map = nbdinfo(&["--map", &server.uri("")]);
        let rows = map.as_array().expect("rows");
        assert!(rows.contains(&data(3 * MIB, 65536)), "{kind:?}: {map}");
        assert!(rows.contains(&data(MIB + 65536, MIB - 65536)), "{kind:?}: {map}");
        if kind == Kind::Clone {
            let depth = nbdinfo(&["--map=qemu:allocation-depth", &server.uri("")]);
            let local = json!({"offset": 3 * MIB, "length": 65536, "type": 1, "description": "local"});
            assert!(depth.as_array().expect("rows").contains(&local), "{depth}");
        }
        client.disconnect();
        server.stop();
        image.check();
    }
}

#[test]
fn nbdcopy_copies_both_ways() {
    requires!("nbdcopy");
    let dir = Dir::new("nbdcopy");
    let (old, new) = (patchy(24 * MIB, 6), patchy(24 * MIB, 7));
    let file = dir.join("new");
    write_sparse(&file, &new);
    for (index, way) in ways().into_iter().enumerate() {
        let kind = KINDS[index % 3];
        let image = Image::new(&dir, "disk", kind, &old);
        let server = image.serve(&[&["--nbd", "tcp:127.0.0.1:0"], way].concat());
        let out = dir.text("out");
        drop(std::fs::remove_file(&out));
        succeed("nbdcopy", &["--connections=4", "--requests=16", &server.uri(""), &out]);
        let copied = std::fs::read(&out).expect("the copy");
        assert_eq!(first_difference(&copied, &old), None, "{kind:?} {way:?}: what was read");
        succeed("nbdcopy", &["--connections=4", "--flush", &dir.text("new"), &server.tcp_uri("")]);
        let back = dir.text("back");
        drop(std::fs::remove_file(&back));
        succeed("nbdcopy", &["--synchronous", &server.uri(""), &back]);
        let copied = std::fs::read(&back).expect("the copy");
        assert_eq!(first_difference(&copied, &new), None, "{kind:?} {way:?}: what was written");
        let stats = server.stop_and_count();
        assert!(
            stats["disks"][0]["guest"]["zeroes"].as_u64() != Some(0),
            "holes are not sent as data: {stats}"
        );
        assert_eq!(first_difference(&image.bytes(), &new), None, "{kind:?} {way:?}: what is in the image");
        image.check();
    }
}

#[test]
fn nbdcopy_leaves_holes_where_there_are_zeros() {
    requires!("nbdcopy");
    let dir = Dir::new("nbdcopy");
    let mut bytes = vec![0; 64 * MIB];
    bytes[9 * MIB..10 * MIB].copy_from_slice(&noise(MIB, 8));
    let source = Image::new(&dir, "source", Kind::Qcow2, &bytes);
    let target = dir.text("target.qcow2");
    super::vellum(&["create", "-f", "qcow2", &target, "64M"]).answer();
    let from = source.serve(&["--read-only"]);
    let to = Server::start(&[&target]);
    succeed("nbdcopy", &["--destination-is-zero", "--connections=2", "--flush", &from.uri(""), &to.uri("")]);
    from.stop();
    to.stop();
    use std::os::unix::fs::MetadataExt;
    let taken = std::fs::metadata(&target).expect("the image").blocks() * 512;
    assert!(taken < 2 * MIB as u64, "a mebibyte of data takes {taken} bytes");
    assert_eq!(super::vellum(&["compare", source.text(), &target]).code, 0);
}

#[test]
fn nbdkit_stands_in_between() {
    requires!("nbdkit", "nbdcopy");
    if run("nbdkit", &["nbd", "--dump-plugin"]).code != 0 {
        return super::skipped("nbdkit has no nbd plugin here");
    }
    let dir = Dir::new("nbdkit");
    let (old, new) = (patchy(8 * MIB, 9), patchy(8 * MIB, 10));
    write_sparse(&dir.join("new"), &new);
    for kind in KINDS {
        let image = Image::new(&dir, "disk", kind, &old);
        let server = image.serve(&[]);
        let nbdkit = Foreign::start("nbdkit", |socket| {
            let uri = format!("uri={}", server.uri(""));
            ["-f", "-U", socket, "nbd", "shared=false", &uri].map(str::to_owned).to_vec()
        });
        let out = dir.text("out");
        drop(std::fs::remove_file(&out));
        succeed("nbdcopy", &["--connections=3", &nbdkit.uri(""), &out]);
        let copied = std::fs::read(&out).expect("the copy");
        assert_eq!(first_difference(&copied, &old), None, "{kind:?}: what was read");
        succeed("nbdcopy", &["--connections=3", "--flush", &dir.text("new"), &nbdkit.uri("")]);
        nbdkit.stop();
        server.stop();
        assert_eq!(first_difference(&image.bytes(), &new), None, "{kind:?}: what was written");
        image.check();
    }
}
