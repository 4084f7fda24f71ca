//! A Linux guest that boots from a served clone.
//!
//! ```text
//!   Debian's kernel package, busybox ──► ext4 ──► template.qcow2 ◄── clone.qcow2 ──► vellum serve
//!                                                                                        │ NBD, vhost-user-blk
//!                                                  files compared by the host ◄── Linux in QEMU
//! ```
//!
//! `init.sh` is what the guest does. It prints on its console what it wrote and what it reads; the host
//! computes the same by itself, and later finds it in the clone with `debugfs`.
//!
//! The kernel comes from `VELLUM_GUEST_KERNEL_DIR`, or from where `cargo xtask packages` puts it.

#![allow(unreachable_pub, reason = "the modules of a test are its own")]

#[path = "../support/mod.rs"]
mod support;

mod cpio;
mod debian;
mod first_files;
mod machine;
mod nbd_device;
mod template;
mod tools;
mod ublk;

use std::ops::Range;

use debian::Debian;
use machine::{Cable, Machine};
use support::program::{path_text, skipped, vellum};
use support::server::Server;
use template::Template;
use tools::{Files, assert_image_is_clean, sha256};

/// Ends the test, with the reason, if no guest is available; else returns a template with a clone.
macro_rules! template {
    ($format:expr) => {{
        requires!("qemu-system-x86_64", "setpriv", "qemu-img", "mke2fs", "e2fsck", "debugfs", "sha256sum");
        match Debian::find() {
            Ok(debian) => Template::new(&debian, $format),
            Err(reason) => return skipped(&reason),
        }
    }};
}

#[allow(clippy::print_stderr, reason = "how much was covered is part of what the test says")]
fn report(line: &str) {
    eprintln!("{line}");
}

/// A file of `pages` in `init.sh`: some pages of the noise.
fn pages_range(number: usize) -> Range<usize> {
    let from = number * 4096;
    from..from + (1 + number % 17) * 4096
}

/// The last number that the guest reported as settled.
fn last_settled(said: &[String]) -> usize {
    let mut numbers = said.iter().filter_map(|line| line.strip_prefix("settled ")?.parse().ok());
    numbers.next_back().unwrap_or(0)
}

/// Of the files that `pages` wrote in a round, all up to the last settled one are whole.
#[track_caller]
fn assert_pages(files: &Files, template: &Template, round: u32, settled: usize) {
    for number in 1..=settled {
        files.assert_is(&format!("/data/pages.{round}.{number}"), &template.noise[pages_range(number)]);
    }
}

#[test]
fn a_guest_boots_from_a_served_clone_and_what_it_wrote_is_there() {
    let template = template!("qcow2");
    let server = Server::start(&[path_text(&template.clone), "--threads", "2"]);
    let said = Machine::boot(&template, &server.socket(), "write", 1).wait_for_the_end();
    assert_written(&template, &said, &server.stop_and_count());
}

/// The story `write` reports everything that it did, and nothing else.
#[track_caller]
fn assert_written(template: &Template, said: &[String], stats: &serde_json::Value) {
    template.assert_untouched();
    assert_image_is_clean(&template.clone);
    let files = Files::of_clean(&template.clone);
    assert!(said.contains(&format!("booted {}", template.release)), "{said:?}");

    // What was written is what the host computes.
    let noise = &template.noise;
    let mut rewritten = template.rewritten.clone();
    rewritten[333_000..1_334_000].copy_from_slice(&noise[7000..1_008_000]);
    files.assert_is("/srv/noise", noise);
    files.assert_is("/srv/rewritten", &rewritten);
    files.assert_is("/etc/motd", b"This is the template.\nThe guest was here.\n");
    files.assert_is("/data/copy", noise);
    files.assert_is("/data/joined", &[noise, &template.rewritten[..], noise].concat());
    let numbers: String = (1..=100_000).map(|number| format!("{number}\n")).collect();
    files.assert_is("/data/numbers", numbers.as_bytes());
    for log in 1..=4 {
        files.assert_is(&format!("/data/log.{log}"), &noise[log * 4096..(log + 32) * 4096]);
    }
    for number in 1..=200 {
        files.assert_is(&format!("/data/many/{number}"), format!("file {number}\n").as_bytes());
    }
    assert!(!files.has("/srv/deleted"), "the guest deleted it");

    // What the guest read back is what the host finds.
    let sums = said.iter().filter_map(|line| line.strip_prefix("sum ")?.split_once(' '));
    let mut count = 0;
    for (name, sum) in sums {
        assert_eq!(sha256(&files.path(name)), sum, "{name}");
        count += 1;
    }
    assert_eq!(count, 13, "{said:?}");

    // Every sync came through to the host, and so did the trim.
    let disk = &stats["disks"][0];
    let number = |pointer: &str| disk.pointer(pointer).and_then(serde_json::Value::as_u64).expect("a number");
    assert!(number("/guest/flushes") >= 32, "{disk:#}");
    assert!(number("/host/data/flushes") >= 32, "{disk:#}");
    assert!(number("/guest/bytes-discarded") >= 8 << 20, "{disk:#}");
    assert!(number("/below/data/bytes-read") > 0, "{disk:#}");
    assert_eq!(number("/below/data/writes") + number("/below/metadata/writes"), 0, "{disk:#}");
    assert_eq!(number("/guest-errors"), 0, "{disk:#}");
    report(&format!(
        "the guest: {} reads, {} writes, {} flushes, {} discards; the host: {} flushes",
        number("/guest/reads"),
        number("/guest/writes"),
        number("/guest/flushes"),
        number("/guest/discards"),
        number("/host/data/flushes"),
    ));
}

#[test]
fn what_a_guest_has_synced_survives_the_death_of_server_and_guest() {
    let template = template!("qcow2");
    let mut settled = Vec::new();
    // Each death comes right after a sync, with another writer in progress.
    let rounds = 2 * u32::try_from(support::scale()).expect("a small scale");
    for round in 1..=rounds {
        let death_at = if round % 2 == 1 { "settled 4" } else { "settled 40" };
        let server = Server::start(&[path_text(&template.clone)]);
        let mut machine = Machine::boot(&template, &server.socket(), "until-killed", round);
        machine.wait_for(death_at);
        let discards = server.stats()["disks"][0]["guest"]["discards"].clone();
        server.kill();
        let last = last_settled(&machine.cut_power());
        report(&format!("round {round}: {last} files were settled at the death, {discards} discards before"));
        settled.push((round, last));

        vellum(&["recover", path_text(&template.clone)]).answer();
        assert_image_is_clean(&template.clone);
        let files = Files::of_crashed(&template.clone);
        for (round, settled) in &settled {
            assert_pages(&files, &template, *round, *settled);
        }
    }

    // The guest itself replays the journal of its file system, and reads all of it.
    let server = Server::start(&[path_text(&template.clone)]);
    let said = Machine::boot(&template, &server.socket(), "verify", rounds + 1).wait_for_the_end();
    server.stop();
    template.assert_untouched();
    assert_image_is_clean(&template.clone);
    let files = Files::of_clean(&template.clone);
    for (round, settled) in settled {
        assert_pages(&files, &template, round, settled);
        for number in 1..=settled {
            let name = format!("/data/pages.{round}.{number}");
            let line = format!("sum {name} {}", sha256(&files.path(&name)));
            assert!(said.contains(&line), "the guest did not say: {line}\n{said:#?}");
        }
    }
}

#[test]
fn a_guest_does_not_notice_that_its_server_is_restarted() {
    let template = template!("raw");
    let place = support::dir::Dir::short();
    let at = format!("--nbd=unix:{}", place.text("nbd"));
    let serve = |options: &[&str]| Server::start(&[&[path_text(&template.clone), &at], options].concat());
    let mut server = serve(&[]);
    let mut machine = Machine::boot(&template, &place.join("nbd"), "some-pages", 1);
    let moments = [
        ("booted", &["--io", "threads"][..]),
        ("settled 12", &["--direct"]),
        ("settled 32", &["--threads", "2"]),
    ];
    for (moment, options) in moments {
        machine.wait_for(moment);
        server.stop();
        server = serve(options);
    }
    let said = machine.wait_for_the_end();
    server.stop();
    template.assert_untouched();
    assert_image_is_clean(&template.clone);
    assert_eq!(last_settled(&said), 60, "{said:#?}");
    assert_pages(&Files::of_clean(&template.clone), &template, 1, 60);
}

#[test]
fn a_guest_boots_over_vhost_user_blk_and_what_it_wrote_is_there() {
    let template = template!("qcow2");
    let place = support::dir::Dir::short();
    let server = Server::start(&[path_text(&template.clone), "--vhost-user-blk", &place.text("vhost")]);
    let socket = place.join("vhost");
    let machine = Machine::boot_with(&template, Cable::Vhost(&socket, 1), &["-no-reboot"], "write", 1);
    let said = machine.wait_for_the_end();
    assert!(said.contains(&"queues 1".to_owned()), "{said:?}");
    assert_written(&template, &said, &server.stop_and_count());
}

#[test]
fn a_guest_with_four_queues_reboots_and_does_not_notice_restarts_of_its_server() {
    let template = template!("raw");
    let place = support::dir::Dir::short();
    let socket = place.join("vhost");
    let at = place.text("vhost");
    let serve = |options: &[&str]| {
        let image = path_text(&template.clone);
        Server::start(&[&[image, "--vhost-user-blk", &at, "--queues", "4"], options].concat())
    };
    let mut server = serve(&[]);
    let mut machine = Machine::boot_with(&template, Cable::Vhost(&socket, 4), &[], "pages-and-reboot", 1);
    let moments = [
        ("settled 12", &["--io", "threads"][..]),
        ("settled 32", &["--direct"]),
        ("rebooting", &[]),
        ("settled 24", &["--threads", "1"]),
    ];
    for (moment, options) in moments {
        machine.wait_for(moment);
        server.stop();
        server = serve(options);
    }
    let said = machine.wait_for_the_end();
    server.stop();
    template.assert_untouched();
    assert_image_is_clean(&template.clone);
    assert_eq!(said.iter().filter(|line| *line == "queues 4").count(), 2, "{said:#?}");
    assert_eq!(said.iter().filter(|line| *line == "settled 60").count(), 2, "{said:#?}");
    let files = Files::of_clean(&template.clone);
    for round in 1..=2 {
        assert_pages(&files, &template, round, 60);
    }
    let sums = said.iter().filter_map(|line| line.strip_prefix("sum ")?.split_once(' '));
    for (name, sum) in sums {
        assert_eq!(sha256(&files.path(name)), sum, "{name}");
    }
}

#[test]
fn a_guest_sees_its_disk_grow() {
    let template = template!("raw");
    let place = support::dir::Dir::short();
    let (at, control) = (place.text("vhost"), place.text("control"));
    let image = path_text(&template.clone);
    let server = Server::start(&[image, "--vhost-user-blk", &at, "--queues", "1", "--control", &control]);
    let (socket, more) = (place.join("vhost"), ["-no-reboot"]);
    let mut machine = Machine::boot_with(&template, Cable::Vhost(&socket, 1), &more, "grows", 1);
    let before: u64 = machine.wait_for("size ").parse().expect("sectors");
    machine.wait_for("settled 4");
    let answer = vellum(&["resize", "--control", &control, "--output", "json", "+16M"]).json();
    let after: u64 = machine.wait_for("size ").parse().expect("sectors");
    assert_eq!(
        (answer["virtual-size-before"].as_u64(), answer["virtual-size"].as_u64()),
        (Some(before * 512), Some(after * 512))
    );
    assert_eq!(after, before + (16 << 11));
    let said = machine.wait_for_the_end();
    server.stop();
    let noise = place.join("noise");
    std::fs::write(&noise, &template.noise[..64 * 512]).expect("a file");
    assert!(said.contains(&format!("behind {}", sha256(&noise))), "{said:#?}");
    template.assert_untouched();
    assert_image_is_clean(&template.clone);
    assert_pages(&Files::of_clean(&template.clone), &template, 1, 24);
}

#[test]
fn a_guest_lives_on_when_its_server_is_killed_and_another_comes() {
    let template = template!("raw");
    let place = support::dir::Dir::short();
    let (socket, at) = (place.join("vhost"), place.text("vhost"));
    // A raw disk: what was answered is in the host's page cache, which outlives the server.
    let (raw, image) = (place.text("disk.raw"), path_text(&template.clone));
    vellum(&["convert", "-q", "-f", "qcow2", "-O", "raw", image, &raw]).answer();
    let serve = || Server::start(&[&raw, "-f", "raw", "--vhost-user-blk", &at, "--queues", "2"]);
    let mut server = serve();
    let mut machine =
        Machine::boot_with(&template, Cable::Vhost(&socket, 2), &["-no-reboot"], "some-pages", 1);
    for moment in ["booted", "settled 12", "settled 32", "settled 48"] {
        machine.wait_for(moment);
        server.kill();
        server = serve();
    }
    let said = machine.wait_for_the_end();
    server.stop();
    assert_eq!(last_settled(&said), 60, "{said:#?}");
    let found = place.join("found.qcow2");
    vellum(&["convert", "-q", "-f", "raw", "-O", "qcow2", &raw, path_text(&found)]).answer();
    assert_pages(&Files::of_clean(&found), &template, 1, 60);
}
