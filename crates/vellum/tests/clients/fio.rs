//! fio's nbd engine: many requests at once, each read back and verified by fio itself.

use super::support::program::{Ran, run, skipped};
use super::support::scale;
use super::{Image, KINDS, MIB, ways};
use crate::requires;
use crate::support::dir::Dir;

fn has_nbd_engine() -> bool {
    let has = run("fio", &["--enghelp"]).out.lines().any(|line| line.trim() == "nbd");
    if !has {
        skipped("fio was built without its nbd engine");
    }
    has
}

#[track_caller]
fn fio(uri: &str, arguments: &[&str]) {
    let uri = format!("--uri={uri}");
    let common = [
        "--name=story",
        "--ioengine=nbd",
        &uri,
        "--iodepth=32",
        "--output-format=json",
        "--verify_state_save=0",
    ];
    let ran: Ran = run("fio", &[&common, arguments].concat());
    assert_eq!(ran.code, 0, "fio {arguments:?}:\n{}\n{}", ran.out, ran.err);
    // A line of fio's own comes first.
    let begin = ran.out.find('{').expect("JSON");
    let report: serde_json::Value = serde_json::from_str(&ran.out[begin..]).expect("JSON");
    for job in report["jobs"].as_array().expect("jobs") {
        assert_eq!(job["error"], 0, "fio {arguments:?}: {job}");
    }
}

#[test]
fn fio_reads_back_what_it_wrote() {
    requires!("fio");
    if !has_nbd_engine() {
        return;
    }
    let dir = Dir::new("fio");
    let loops = format!("--loops={}", scale());
    for (index, way) in ways().into_iter().enumerate() {
        for kind in [KINDS[index % 3], KINDS[(index + 1) % 3]] {
            let image = Image::new(&dir, "disk", kind, &vec![0x5a; 32 * MIB]);
            let server = image.serve(&[&["--nbd", "tcp:127.0.0.1:0"], way].concat());
            let verify = ["--verify=crc32c", "--verify_fatal=1", &loops];
            let random = ["--rw=randwrite", "--bs=4k", "--size=16M", "--fsync=64"];
            fio(&server.uri(""), &[&verify[..], &random].concat());
            // Past the page cache a client has to keep to blocks.
            let lengths: &[&str] = match way.contains(&"--direct") {
                true => &["--bsrange=4k-96k", "--blockalign=4k"],
                false => &["--bsrange=512-96k", "--bs_unaligned=1"],
            };
            let mixed = ["--rw=randrw", "--size=12M", "--offset=18M"];
            fio(&server.tcp_uri(""), &[&verify[..], &mixed, lengths].concat());
            let trims = ["--rw=randtrim", "--bs=64k", "--size=4M", "--offset=8M"];
            fio(&server.uri(""), &trims);
            server.stop();
            image.check();
        }
    }
}

#[test]
fn fio_with_several_jobs_in_one_disk() {
    requires!("fio");
    if !has_nbd_engine() {
        return;
    }
    let dir = Dir::new("fio");
    for kind in KINDS {
        let image = Image::new(&dir, "disk", kind, &vec![0x5a; 32 * MIB]);
        let server = image.serve(&[]);
        // Each job has its own part and its own connection; parts meet within clusters.
        let jobs =
            ["--numjobs=4", "--thread=0", "--offset_increment=4100k", "--size=4100k", "--group_reporting"];
        let work = ["--rw=randwrite", "--bs=4k", "--verify=crc32c", "--verify_fatal=1", "--fsync=16"];
        fio(&server.uri(""), &[&jobs[..], &work].concat());
        let stats = server.stop_and_count();
        assert!(stats["disks"][0]["guest"]["writes"].as_u64() >= Some(4 * 1025), "{stats}");
        image.check();
    }
}
