//! The server is killed while guests write: what was flushed is there, by fast recovery and by full recovery.
//!
//! ```text
//!   guest, 3 connections ──► server with a cache ──► SIGKILL at a random moment
//!        │                                             ├─ even rounds: the next server recovers the cache
//!        └─ remembers every answer ──► judges ◄────────┴─ odd rounds: `vellum flash recover --full`, perhaps killed
//!                                                         too; then the image alone, which QEMU checks
//! ```

use std::process::Stdio;
use std::time::Duration;

use vellum_core::Random;

use super::guest::Guest;
use super::model::Model;
use super::support::client::Client;
use super::support::dir::Dir;
use super::support::program::{has, qemu_dump, until_let_go, vellum, vellum_command};
use super::support::server::Server;
use super::support::{scale, until};
use super::{KINDS, Kind, alone, info, is_sound, made_cache};

const SIZE: usize = 6 << 20;
const CONNECTIONS: usize = 3;
const ROUNDS: usize = 6;

fn seed() -> u64 {
    std::env::var("VELLUM_TEST_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(20_261_125)
}

fn rounds(kind: Kind, cache_size: &str) {
    let dir = Dir::new("flash-killed");
    let cache = made_cache(&dir, cache_size);
    let (image, mut bytes) = kind.make(&dir, SIZE);
    let mut random = Random::from_seed(seed() ^ kind.options.len() as u64);
    let (mut answered, mut lost, mut behind) = (0, 0, 0);
    for round in 0..ROUNDS * scale() {
        let about = format!("{kind:?}, round {round}, seed {}", seed());
        let model = Model::new(std::mem::take(&mut bytes), random.any());
        let server = Server::start(&[&image, "--flash", &cache]);
        std::thread::scope(|scope| {
            for _ in 0..CONNECTIONS {
                let (peer, model, random) = (server.peer(), &model, random.fork());
                scope.spawn(move || {
                    // It ends with the server, whenever that is.
                    Guest::connect(&peer, model, 1, random).and_then(|mut guest| guest.work(usize::MAX))
                });
            }
            until("the guests have begun", || model.counts().0 > 0);
            std::thread::sleep(Duration::from_millis(10 + random.below(300)));
            server.kill();
        });
        until_let_go(&cache);
        let counts = model.counts();
        (answered, lost) = (answered + counts.0, lost + counts.1);
        assert_eq!(vellum(&["flash", "check", &cache]).code, 0, "{about}");
        behind += u64::from(info(&cache)["dirty-bytes"].as_u64() > Some(0));
        bytes = if round % 2 == 0 {
            served(&cache, &image)
        } else {
            recovered(&dir, &cache, &image, &mut random)
        };
        if let Err(what) = model.judge(&bytes) {
            panic!("{about}: {what}");
        }
    }
    assert!(answered > 0 && lost > 0, "{kind:?}: {answered} answered, {lost} under way");
    assert!(behind > 0, "{kind:?}: no crash left anything in the cache alone");
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
    KINDS[..3].iter().for_each(|kind| rounds(*kind, "64M"));
}

#[test]
fn killed_with_a_cache_over_vellum() {
    KINDS[3..].iter().for_each(|kind| rounds(*kind, "64M"));
}

#[test]
fn killed_with_a_cache_that_is_full() {
    [KINDS[0], KINDS[3]].iter().for_each(|kind| rounds(*kind, "3M"));
}
