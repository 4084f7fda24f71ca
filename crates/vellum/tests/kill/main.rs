//! The server is killed in the middle of its work, again and again, and every flushed byte is there.
//!
//! ```text
//!   guest, 3 connections ──► server ──► SIGKILL at a random moment
//!        │                                   │
//!        └─ remembers every answer           ├─ QEMU checks what is left: leaks perhaps, errors never
//!                 │                          ├─ `vellum recover` (perhaps killed too), or the next server does it
//!                 └──────► judges ◄──────────┘
//! ```
//!
//! With a journal, fio works beside the guests, through a tap that feeds the same model (`fio.rs`, `tap.rs`).
//!
//! Rounds follow each other on one image, so that later crashes meet what earlier ones left.
//! `VELLUM_TEST_SCALE` makes more of them, `VELLUM_TEST_SEED` repeats a run as far as a race can be repeated.

#![allow(unreachable_pub, reason = "the modules of a test are its own")]

#[path = "../support/mod.rs"]
mod support;

mod fio;
mod guest;
mod model;
mod tap;

use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Barrier;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use guest::Guest;
use model::{Model, SECTOR};
use rustix::process::Signal;
use support::client::{Client, FLUSH, Peer};
use support::dir::Dir;
use support::program::{has, qemu_dump, run, skipped, succeed, until_let_go, vellum, vellum_command};
use support::server::Server;
use support::{PATIENCE, noise, scale, until};
use tap::Tap;
use vellum_core::Random;

const SIZE: usize = 6 << 20;
const CONNECTIONS: usize = 3;
/// For each kind of image.
const ROUNDS: usize = 5;

/// A kind of image, by the options it is made with.
struct Kind {
    name: &'static str,
    format: &'static str,
    options: &'static str,
    /// The format of the image below.
    base: Option<&'static str>,
    /// What else its servers are told.
    flags: &'static [&'static str],
    /// It is made independent of the image below while it is written.
    flattened: bool,
}

impl Kind {
    const fn qcow2(name: &'static str, options: &'static str, base: Option<&'static str>) -> Self {
        Self { name, format: "qcow2", options, base, flags: &[], flattened: false }
    }

    /// One that is filled from below while it is written.
    const fn filled(name: &'static str, format: &'static str, options: &'static str) -> Self {
        Self { name, format, options, base: Some("raw"), flags: SLOWLY_FILLED, flattened: false }
    }

    /// Makes the image, and returns its content.
    fn make(&self, dir: &Dir) -> (PathBuf, Vec<u8>) {
        let path = dir.join("disk");
        let text = dir.text("disk");
        if self.format == "raw" {
            vellum(&["create", "-f", "raw", &text, &SIZE.to_string()]).answer();
            return (path, vec![0; SIZE]);
        }
        // QEMU resolves the name of a data file from its own working directory, so the path is absolute.
        let mut options = self.options.replace("DIR", &dir.text(""));
        if self.format == "qcow2" && !self.has_journal() {
            options = format!("journal=off,{options}");
        }
        let options = ["-o", &options];
        let Some(base) = self.base else {
            let size = SIZE.to_string();
            vellum(&[&["create", "-f", "qcow2"], &options[..], &[&text, &size]].concat()).answer();
            return (path, vec![0; SIZE]);
        };
        let mut bytes = noise(SIZE, 1);
        bytes[SIZE / 2..SIZE / 2 + (SIZE >> 3)].fill(0);
        std::fs::write(dir.join("template"), &bytes).expect("a template");
        let mut below = "template";
        if base == "qcow2" {
            below = "base";
            vellum(&["convert", "-f", "raw", "-O", "qcow2", &dir.text("template"), &dir.text(below)])
                .answer();
        }
        vellum(&[&["create", "-f", self.format, "-b", below, "-F", base], &options[..], &[&text]].concat())
            .answer();
        (path, bytes)
    }

    /// After a crash a version 2 image may have leaks until it is recovered: it has no dirty bit.
    fn has_dirty_bit(&self) -> bool {
        self.format == "qcow2" && !self.options.contains("v2")
    }

    /// How the image is given to `vellum serve`: a data file beside it is named.
    fn served_as<'a>(&'a self, image: &'a str) -> Vec<&'a str> {
        let mut arguments = [&[image, "-f", self.format], self.flags].concat();
        if self.options.contains("data_file=") {
            let dir = image.rfind('/').map_or("", |at| &image[..at]);
            arguments.extend(["--allow-dir", dir]);
        }
        arguments
    }

    fn has_journal(&self) -> bool {
        self.options.contains("journal=on")
    }

    /// Whether an image that was not closed says so, and is not read by others.
    fn needs_recovery(&self) -> bool {
        self.has_journal() || self.format == "vellum"
    }
}

/// What a crash has left. An image whose journal must be replayed is sound once that is done, in memory, and
/// refused by QEMU, which says why; any other may have leaks, and no errors.
#[track_caller]
fn check_crashed(kind: &Kind, image: &str) {
    let needs_recovery = kind.needs_recovery() && {
        let info = vellum(&["info", "--output", "json", image]).json();
        let journal = &info["format-specific"]["data"]["journal"];
        // A linear image on its own has no journal.
        let is_alone = kind.options == "layout=linear" && info.get("backing-filename").is_none();
        let needs = if is_alone { Some(false) } else { journal["needs-recovery"].as_bool() };
        assert_eq!(info["dirty-flag"].as_bool(), needs, "{}: {info}", kind.name);
        needs.expect("the journal is told")
    };
    if !needs_recovery {
        return check(kind, image, !kind.needs_recovery());
    }
    let ours = vellum(&["check", image]);
    assert!(ours.code == 0, "{}: {ours:?}", kind.name);
    if kind.format == "qcow2" && has("qemu-img") {
        let theirs = run("qemu-img", &["check", image]);
        let says_why = theirs.err.contains("vellum journal needs replay");
        assert!(theirs.code == 1 && says_why, "{}: {theirs:?}", kind.name);
    }
}

/// QEMU's opinion, where QEMU is there: no errors, and no leaks unless they are allowed.
#[track_caller]
fn check(kind: &Kind, image: &str, leaks_allowed: bool) {
    if kind.format == "raw" {
        return;
    }
    let good = |code: i32| code == 0 || leaks_allowed && code == 3;
    let ours = vellum(&["check", image]);
    assert!(good(ours.code), "{}: {ours:?}", kind.name);
    if kind.format == "qcow2" && has("qemu-img") {
        let theirs = run("qemu-img", &["check", image]);
        assert!(good(theirs.code), "{}: {theirs:?}", kind.name);
    }
}

fn ways() -> Vec<&'static [&'static str]> {
    let dir = Dir::new("ways");
    vellum(&["create", &dir.text("probe"), "4096"]).answer();
    let mut ways: Vec<&[&str]> = vec![&["--io", "threads"]];
    match Server::try_start(&[&dir.text("probe"), "-f", "raw", "--io", "uring"]) {
        Ok(_) => ways.extend([&["--io", "uring"][..], &["--io", "uring", "--direct"]]),
        Err(ran) => skipped(&format!("io_uring does not work here: {}", ran.err.trim())),
    }
    ways
}

fn seed() -> u64 {
    std::env::var("VELLUM_TEST_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(20_261_121)
}

/// One image, killed often.
fn rounds(kind: &Kind) {
    so_many_rounds(kind, ROUNDS);
}

/// Returns where the image is.
fn so_many_rounds(kind: &Kind, count: usize) -> Dir {
    let dir = Dir::new("kill");
    let (path, mut bytes) = kind.make(&dir);
    let image = path.to_str().expect("text").to_owned();
    let ways = ways();
    let has_fio = kind.has_journal() && fio::is_here();
    let mut random = Random::from_seed(seed() ^ kind.name.len() as u64);
    let (mut answered, mut lost, mut by_fio) = (0, 0, (0, 0));
    for round in 0..count * scale() {
        let way = ways[round % ways.len()];
        let about = format!("{}, round {round} {way:?}, seed {}", kind.name, seed());
        let model = Model::new(std::mem::take(&mut bytes), random.any());
        let control = dir.text("control");
        let steered: &[&str] = if kind.flattened { &["--control", &control] } else { &[] };
        let server = Server::start(&[&kind.served_as(&image)[..], way, steered].concat());
        let block = if way.contains(&"--direct") { 8 } else { 1 };
        let tap = Tap::new(&model, server.peer());
        let (peer, fio_seed) = (server.peer(), random.below(1 << 31));
        let guests_end = if has_fio { fio::BEGIN } else { SIZE } / SECTOR;
        std::thread::scope(|scope| {
            if has_fio {
                tap.open(scope);
                fio::write(dir.path(), &tap.socket(), fio_seed);
                flush(&peer, &model);
            }
            for _ in 0..CONNECTIONS {
                let (peer, model, random) = (peer.clone(), &model, random.fork());
                scope.spawn(move || {
                    // It ends with the server, whenever that is.
                    let guest = Guest::connect(&peer, model, block, random);
                    guest.and_then(|guest| guest.keep_to(guests_end).work(usize::MAX))
                });
            }
            let writes_before = tap.writes_answered.load(Relaxed);
            let endless = has_fio.then(|| fio::start_endless(dir.path(), &tap.socket(), fio_seed));
            until("the guests have begun", || model.counts().0 > 0);
            until("and so has fio", || !has_fio || tap.writes_answered.load(Relaxed) > writes_before);
            let flatten = kind.flattened.then(|| {
                let mut flatten = vellum_command();
                flatten.args(["flatten", "--control", &control]).stdout(Stdio::null()).stderr(Stdio::null());
                flatten.spawn().expect("our own program can be started")
            });
            let at_most = if kind.flattened { 1200 } else { 250 };
            std::thread::sleep(Duration::from_millis(10 + random.below(at_most)));
            server.kill();
            flatten.map(|mut flatten| flatten.wait()); // it ends with the server
            until_let_go(format!("{image}.data")); // at once where there is none
            tap.close();
            if let Some(mut endless) = endless {
                drop(endless.kill());
                drop(endless.wait());
                by_fio.0 += tap.writes_answered.load(Relaxed) - writes_before;
                by_fio.1 += tap.flushes_answered.load(Relaxed);
            }
        });
        let counts = model.counts();
        (answered, lost) = (answered + counts.0, lost + counts.1);
        check_crashed(kind, &image);
        bytes = match round % 2 {
            0 if kind.format == "qcow2" => recovered(kind, &image, &mut random),
            _ => served(kind, &image),
        };
        if let Err(what) = model.judge(&bytes) {
            panic!("{about}: {what}");
        }
        if has_fio {
            let server = Server::start(&kind.served_as(&image));
            fio::verify(dir.path(), &server.socket(), fio_seed);
            server.stop();
        }
    }
    assert!(answered > 0 && lost > 0, "{}: {answered} answered, {lost} under way", kind.name);
    assert!(!has_fio || by_fio.0 > 0 && by_fio.1 > 0, "{}: fio has {by_fio:?} answers", kind.name);
    dir
}

/// Makes durable what has been answered.
fn flush(peer: &Peer, model: &Model) {
    let sent = model.flush_sent();
    let mut client = Client::connect(peer, "").expect("a server");
    client.send(FLUSH, 0, 0, 0, &[]).expect("a server");
    assert_eq!(client.answer().expect("a server").error, 0);
    model.flush_answered(sent);
    client.disconnect();
}

/// Lets `vellum recover` repair the image, perhaps killed on its way too, and reads it with another program.
fn recovered(kind: &Kind, image: &str, random: &mut Random) -> Vec<u8> {
    while random.one_in(2) {
        let mut command = vellum_command();
        command.args(["recover", "-f", kind.format, image]).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn().expect("our own program can be started");
        std::thread::sleep(Duration::from_micros(random.below(12_000)));
        drop(child.kill());
        drop(child.wait());
        until_let_go(image);
        until_let_go(format!("{image}.data"));
        check_crashed(kind, image);
    }
    vellum(&["recover", "-f", kind.format, "--output", "json", image]).json();
    check(kind, image, false);
    let info = vellum(&["info", "--output", "json", image]).json();
    assert_eq!(info["dirty-flag"], false, "{}: {info}", kind.name);
    let raw = format!("{image}.copy");
    if has("qemu-img") {
        return qemu_dump(std::path::Path::new(image), kind.format, None);
    }
    vellum(&["convert", "-f", kind.format, "-O", "raw", image, &raw]).answer();
    std::fs::read(&raw).expect("the copy")
}

/// Lets the next server repair the image, and reads it through that.
fn served(kind: &Kind, image: &str) -> Vec<u8> {
    let server = Server::start(&kind.served_as(image));
    let mut client = Client::connect(&server.peer(), "").expect("the server is there again");
    let bytes = client.read_all().expect("all of the disk");
    client.disconnect();
    server.stop();
    check(kind, image, !kind.has_dirty_bit());
    bytes
}

#[test]
fn killed_raw() {
    rounds(&Kind { name: "raw", format: "raw", options: "", base: None, flags: &[], flattened: false });
}

#[test]
fn killed_qcow2() {
    rounds(&Kind::qcow2("qcow2", "", None));
}

#[test]
fn killed_qcow2_over_raw() {
    rounds(&Kind::qcow2("qcow2 over raw", "", Some("raw")));
}

#[test]
fn killed_qcow2_over_qcow2() {
    rounds(&Kind::qcow2("qcow2 over qcow2", "cluster_size=16k", Some("qcow2")));
}

#[test]
fn killed_subclusters() {
    rounds(&Kind::qcow2("subclusters", "extended_l2=on,cluster_size=128k", Some("raw")));
}

#[test]
fn killed_small_clusters() {
    rounds(&Kind::qcow2("clusters of 512 bytes", "cluster_size=512,refcount_bits=1", None));
    rounds(&Kind::qcow2("clusters of 4 KiB", "cluster_size=4k,refcount_bits=64", Some("raw")));
}

#[test]
fn killed_version_2() {
    rounds(&Kind::qcow2("version 2", "compat=v2", Some("raw")));
}

#[test]
fn killed_data_file() {
    rounds(&Kind::qcow2("data file", "data_file=DIR/disk.data", None));
}

/// With a journal fifty times in all, as it is the journal that has most to lose.
#[test]
fn killed_journal() {
    so_many_rounds(&Kind::qcow2("journal", "journal=on", None), 20);
}

#[test]
fn killed_journal_over_qcow2() {
    let options = "cluster_size=16k,journal=on,journal_size=256k";
    so_many_rounds(&Kind::qcow2("journal over qcow2", options, Some("qcow2")), 10);
}

#[test]
fn killed_journal_and_subclusters() {
    let options = "extended_l2=on,cluster_size=128k,journal=on";
    so_many_rounds(&Kind::qcow2("journal, subclusters", options, Some("raw")), 10);
}

#[test]
fn killed_journal_and_small_clusters() {
    let options = "cluster_size=512,refcount_bits=1,journal=on,journal_size=64k";
    so_many_rounds(&Kind::qcow2("journal, clusters of 512 bytes", options, None), 10);
}

/// Guests read and write while the image is filled, so slowly that kills meet it at each stage.
const SLOWLY_FILLED: &[&str] = &["--copy-on-read", "--prefetch", "--prefetch-limit", "base-max=1M"];
/// Kinds of images that take copies.
const FILLED: [Kind; 4] = [
    Kind::filled("filled journal", "qcow2", "journal=on"),
    Kind::filled("filled linear", "vellum", "layout=linear"),
    Kind::filled("filled table", "vellum", "layout=table"),
    Kind::filled("filled zoned", "vellum", "layout=zoned"),
];

#[test]
fn killed_while_it_is_filled() {
    FILLED.iter().for_each(|kind| drop(so_many_rounds(kind, 6)));
}

#[test]
fn killed_while_it_is_detached() {
    let mut detached = 0;
    for kind in FILLED {
        let kind = Kind { flags: &[], flattened: true, ..kind };
        for _ in 0..4 {
            let dir = so_many_rounds(&kind, 1);
            let info = vellum(&["info", "--output", "json", &dir.text("disk")]).json();
            detached += usize::from(info.get("backing-filename").is_none());
        }
    }
    assert!(detached > 0, "all were killed before");
}

/// Requests of each guest that ends before the server.
const EACH: usize = 40;

/// How many requests of guests have been begun.
fn asked(control: &str) -> u64 {
    let told = vellum(&["stats", "--control", control, "--output", "json"]).json();
    let guest = &told["disks"][0]["guest"];
    ["reads", "writes", "flushes", "zeroes", "discards"]
        .iter()
        .map(|kind| guest[kind].as_u64().expect("a count"))
        .sum()
}

/// SIGTERM and Ctrl-C: what was sent is answered, what was answered is there, flushed or not, and the image
/// is closed.
#[test]
fn drained() {
    let kinds = [
        Kind { name: "raw", format: "raw", options: "", base: None, flags: &[], flattened: false },
        Kind::qcow2("qcow2", "", None),
        Kind::qcow2("subclusters", "extended_l2=on,cluster_size=64k", Some("raw")),
        Kind::qcow2("journal", "journal=on", Some("raw")),
    ];
    let signals = [Signal::TERM, Signal::INT, Signal::TERM, Signal::INT];
    for (kind, signal) in kinds.iter().zip(signals) {
        let dir = Dir::new("drain");
        let (path, bytes) = kind.make(&dir);
        let image = path.to_str().expect("text");
        let mut random = Random::from_seed(seed());
        for (way, finishes) in ways().into_iter().flat_map(|way| [(way, true), (way, false)]) {
            let bytes = if dir.join("seen").exists() {
                std::fs::read(dir.join("seen")).expect("the last round")
            } else {
                bytes.clone()
            };
            let model = Model::new(bytes, random.any());
            let place = Dir::short();
            let control = place.text("control");
            let server = Server::start(&[&[image, "-f", kind.format, "--control", &control], way].concat());
            let idle = Client::connect(&server.peer(), "").expect("a server");
            let block = if way.contains(&"--direct") { 8 } else { 1 };
            let peer = server.peer();
            let sent = Barrier::new(CONNECTIONS + 1);
            let ran = std::thread::scope(|scope| {
                for _ in 0..CONNECTIONS {
                    let (peer, model, random, sent) = (peer.clone(), &model, random.fork(), &sent);
                    scope.spawn(move || {
                        let mut guest = Guest::connect(&peer, model, block, random).expect("a server");
                        if finishes {
                            // All is sent, and read from the socket, when the signal comes.
                            guest.work(EACH).expect("a server");
                            sent.wait();
                            guest.hear_all().expect("what was begun is answered");
                        } else {
                            sent.wait();
                            drop(guest.work(usize::MAX));
                        }
                    });
                }
                sent.wait();
                // What is still in a socket when the server is asked to end is not read any more.
                until("all that was sent has come", || {
                    !finishes || asked(&control) == (CONNECTIONS * EACH) as u64
                });
                server.signal(signal);
                server.wait(PATIENCE)
            });
            drop(idle);
            assert_eq!(ran.code, 0, "{} {way:?}: {}", kind.name, ran.err);
            assert!(ran.err.contains("closed"), "{}", ran.err);
            if finishes {
                assert_eq!(model.counts().1, 0, "{} {way:?}: a request is not answered", kind.name);
            }
            // Closed is flushed: whatever was answered is there.
            let all = model.flush_sent();
            model.flush_answered(all);
            check(kind, image, false);
            let info = vellum(&["info", "--output", "json", "-f", kind.format, image]).json();
            assert_eq!(info["dirty-flag"], false, "{}: {info}", kind.name);
            let copy = dir.text("seen");
            vellum(&["convert", "-f", kind.format, "-O", "raw", image, &copy]).answer();
            if has("qemu-img") {
                succeed("qemu-img", &["compare", "-f", kind.format, "-F", "raw", image, &copy]);
            }
            model.judge(&std::fs::read(&copy).expect("the copy")).unwrap_or_else(|what| {
                panic!("{} {way:?}, seed {}: {what}", kind.name, seed());
            });
        }
    }
}
