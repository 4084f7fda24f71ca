//! The server is killed while guests write: what was flushed is there, by fast recovery and by full recovery.
//!
//! ```text
//!   guest, 3 connections ──► server with a cache ──► SIGKILL at a random moment
//!        │                                             ├─ even rounds: the next server recovers the cache
//!        └─ remembers every answer ──► judges ◄────────┴─ odd rounds: `vellum flash recover --full`, perhaps killed
//!                                                         too; then the image alone, which QEMU checks
//! ```
//!
//! Some of it beside fio, whose requests and answers the model gets as well. What fio had written and flushed before is
//! also verified by fio, with checksums of its own: from the next server, and from the image alone.

use std::process::Stdio;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use vellum_core::Random;

use super::fio;
use super::guest::Guest;
use super::model::{Model, SECTOR};
use super::support::client::Client;
use super::support::dir::Dir;
use super::support::program::{has, qemu_dump, until_let_go, vellum, vellum_command};
use super::support::server::Server;
use super::support::{scale, until};
use super::tap::Tap;
use super::{KINDS, Kind, alone, info, is_sound, made_cache};

const SIZE: usize = 6 << 20;
const CONNECTIONS: usize = 3;
const ROUNDS: usize = 6;
/// Beside fio; a soak has at least 50 of each kind.
const ROUNDS_WITH_FIO: usize = 3;

fn seed() -> u64 {
    std::env::var("VELLUM_TEST_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(20_261_125)
}

/// Kills of one image, and what was under way.
#[derive(Debug, Default)]
struct Counts {
    fast: usize,
    full: usize,
    /// Writes.
    answered: usize,
    unanswered: usize,
    /// Crashes that left something in the cache alone.
    behind: usize,
    /// Writes and flushes of fio that were answered while it waited for the kill.
    writes_by_fio: usize,
    flushes_by_fio: usize,
}

#[allow(clippy::print_stderr, reason = "how often it was killed is worth knowing")]
fn rounds(kind: Kind, cache_size: &str, count: usize, has_fio: bool) {
    let dir = Dir::new("flash-killed");
    let cache = made_cache(&dir, cache_size);
    let (image, mut bytes) = kind.make(&dir, SIZE);
    let mut random = Random::from_seed(seed() ^ kind.options.len() as u64);
    let mut counts = Counts::default();
    for round in 0..count * scale() {
        let about = format!("{kind:?}, round {round}, seed {}", seed());
        let model = Model::new(std::mem::take(&mut bytes), random.any());
        let server = Server::start(&[&image, "--flash", &cache]);
        let tap = Tap::new(&model, server.peer());
        let fio_seed = random.below(1 << 31);
        std::thread::scope(|scope| {
            if has_fio {
                tap.open(scope);
                fio::write(dir.path(), &tap.socket(), fio_seed);
                flush(&server, &model);
            }
            let guests_end = if has_fio { fio::BEGIN } else { SIZE } / SECTOR;
            let (writes, flushes) = (tap.writes_answered.load(Relaxed), tap.flushes_answered.load(Relaxed));
            for _ in 0..CONNECTIONS {
                let (peer, model, random) = (server.peer(), &model, random.fork());
                scope.spawn(move || {
                    // It ends with the server, whenever that is.
                    let guest = Guest::connect(&peer, model, 1, random);
                    guest.and_then(|guest| guest.keep_to(guests_end).work(usize::MAX))
                });
            }
            let endless = has_fio.then(|| fio::start_endless(dir.path(), &tap.socket(), fio_seed));
            until("the guests have begun", || model.counts().0 > 0);
            until("and so has fio", || !has_fio || tap.writes_answered.load(Relaxed) > writes);
            std::thread::sleep(Duration::from_millis(10 + random.below(300)));
            server.kill();
            tap.close();
            if let Some(mut endless) = endless {
                drop(endless.kill());
                drop(endless.wait());
                counts.writes_by_fio += tap.writes_answered.load(Relaxed) - writes;
                counts.flushes_by_fio += tap.flushes_answered.load(Relaxed) - flushes;
            }
        });
        until_let_go(&cache);
        let (answered, unanswered) = model.counts();
        counts.answered += answered;
        counts.unanswered += unanswered;
        assert_eq!(vellum(&["flash", "check", &cache]).code, 0, "{about}");
        counts.behind += usize::from(info(&cache)["dirty-bytes"].as_u64() > Some(0));
        let is_fast = round % 2 == 0;
        bytes = match is_fast {
            true => served(&cache, &image),
            false => recovered(&dir, &cache, &image, &mut random),
        };
        *(if is_fast { &mut counts.fast } else { &mut counts.full }) += 1;
        if let Err(what) = model.judge(&bytes) {
            panic!("{about}: {what}");
        }
        if has_fio {
            let with_cache = ["--flash", &cache];
            let more: &[&str] = if is_fast { &with_cache } else { &[] };
            let server = Server::start(&[&[image.as_str()], more].concat());
            fio::verify(dir.path(), &server.socket(), fio_seed);
            server.stop();
        }
    }
    eprintln!("{kind:?}, a cache of {cache_size}, fio: {has_fio}: {counts:?}");
    assert!(counts.answered > 0 && counts.unanswered > 0, "{kind:?}: {counts:?}");
    assert!(counts.behind > 0, "{kind:?}: no crash left anything in the cache alone");
    assert!(!has_fio || counts.writes_by_fio > 0 && counts.flushes_by_fio > 0, "{kind:?}: {counts:?}");
}

/// Makes durable what has been answered.
fn flush(server: &Server, model: &Model) {
    let sent = model.flush_sent();
    let mut client = Client::connect(&server.peer(), "").expect("a server");
    client.flush().expect("a flush");
    model.flush_answered(sent);
    client.disconnect();
}

/// What the next server shows. Every other time it is killed too, with what it had read again.
fn served(cache: &str, image: &str) -> Vec<u8> {
    let server = Server::start(&[image, "--flash", cache]);
    let mut client = Client::connect(&server.peer(), "").expect("the server is there again");
    let bytes = client.read_all().expect("all of the disk");
    client.disconnect();
    server.stop();
    is_sound(image);
    bytes
}

/// What the image has alone once it is completed.
fn recovered(dir: &Dir, cache: &str, image: &str, random: &mut Random) -> Vec<u8> {
    while random.one_in(2) {
        let mut command = vellum_command();
        command
            .args(["flash", "recover", "--full", cache, image])
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let mut child = command.spawn().expect("our own program can be started");
        std::thread::sleep(Duration::from_micros(random.below(40_000)));
        drop(child.kill());
        drop(child.wait());
        until_let_go(image);
        until_let_go(cache);
    }
    let done = vellum(&["flash", "recover", "--full", "--output", "json", cache, image]).json();
    assert_eq!(done["disks-left"], 0, "{done}");
    is_sound(image);
    if image.ends_with(".qcow2") && has("qemu-img") {
        return qemu_dump(std::path::Path::new(image), "qcow2", None);
    }
    alone(dir, image)
}

#[test]
fn killed_with_a_cache_over_qcow2() {
    KINDS[..3].iter().for_each(|kind| rounds(*kind, "64M", ROUNDS, false));
}

#[test]
fn killed_with_a_cache_over_vellum() {
    KINDS[3..].iter().for_each(|kind| rounds(*kind, "64M", ROUNDS, false));
}

#[test]
fn killed_with_a_cache_that_is_full() {
    [KINDS[0], KINDS[3]].iter().for_each(|kind| rounds(*kind, "3M", ROUNDS, false));
}

#[test]
fn killed_with_a_cache_beside_fio() {
    if fio::is_here() {
        rounds(KINDS[0], "64M", ROUNDS_WITH_FIO, true);
        rounds(KINDS[3], "64M", ROUNDS_WITH_FIO, true);
        rounds(KINDS[2], "3M", ROUNDS_WITH_FIO, true);
    }
}
