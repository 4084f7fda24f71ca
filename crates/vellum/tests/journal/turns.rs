//! QEMU and Vellum write one image in turns. Vellum is closed, or killed and recovered; the image is clean
//! after every turn, and has what was flushed.

use std::collections::BTreeMap;

use vellum_core::Random;

use super::support::client::{Client, FLAG_FUA, FLAG_NO_HOLE};
use super::support::dir::Dir;
use super::support::program::{qemu_io, succeed, vellum};
use super::support::server::Server;
use super::support::{first_difference, noise, scale};
use super::{bytes_of, is_clean, journal_of};
use crate::requires;

const SIZE: usize = 6 << 20;
const SECTOR: usize = 512;
const ROUNDS: usize = 10;

/// What the disk reads as, and what else a sector may hold because it was not flushed.
struct Model {
    bytes: Vec<u8>,
    unflushed: BTreeMap<usize, Vec<[u8; SECTOR]>>,
}

impl Model {
    fn write(&mut self, at: usize, data: &[u8], is_durable: bool) {
        for (index, new) in data.chunks_exact(SECTOR).enumerate() {
            let from = at + index * SECTOR;
            let old: [u8; SECTOR] = self.bytes[from..from + SECTOR].try_into().expect("a sector");
            match is_durable {
                true => drop(self.unflushed.remove(&(from / SECTOR))),
                false => self.unflushed.entry(from / SECTOR).or_default().push(old),
            }
            self.bytes[from..from + SECTOR].copy_from_slice(new);
        }
    }

    /// Takes what is found, sector by sector, where it is one of the things that may be there.
    #[track_caller]
    fn settle(&mut self, found: &[u8], about: &str) {
        for (sector, choices) in std::mem::take(&mut self.unflushed) {
            let span = sector * SECTOR..(sector + 1) * SECTOR;
            if choices.iter().any(|choice| choice == &found[span.clone()]) {
                self.bytes[span.clone()].copy_from_slice(&found[span]);
            }
        }
        assert_eq!(first_difference(found, &self.bytes), None, "{about}");
    }
}

fn qemus_turn(image: &str, model: &mut Model, random: &mut Random) {
    let mut commands = Vec::new();
    for _ in 0..1 + random.index(12) {
        let at = random.index(SIZE / SECTOR) * SECTOR;
        let len = ((1 + random.index(300)) * SECTOR).min(SIZE - at);
        let byte = u8::try_from(random.below(256)).expect("a byte");
        commands.push(match byte {
            0..=60 => format!("write -z -u {at} {len}"),
            byte => format!("write -P {byte} {at} {len}"),
        });
        model.write(at, &vec![if byte <= 60 { 0 } else { byte }; len], true);
    }
    qemu_io(&["-f", "qcow2", image], &commands);
}

fn our_turn(client: &mut Client, model: &mut Model, random: &mut Random) {
    for _ in 0..5 + random.index(40) {
        let at = random.index(SIZE / SECTOR) * SECTOR;
        let len = ((1 + random.index(300)) * SECTOR).min(SIZE - at);
        let fua = random.one_in(10);
        let flags = if fua { FLAG_FUA } else { 0 };
        match random.below(10) {
            0 | 1 => {
                client.flush().expect("a flush");
                model.unflushed.clear();
            }
            2 | 3 => {
                let hole = if random.one_in(2) { FLAG_NO_HOLE } else { 0 };
                client.zero(at as u64, u32::try_from(len).expect("short"), flags | hole).expect("zeros");
                model.write(at, &vec![0; len], fua);
            }
            _ => {
                let data = noise(len, random.any());
                client.write(at as u64, &data, flags).expect("a write");
                model.write(at, &data, fua);
            }
        }
    }
}

fn take_turns(name: &str, image: &str, bytes: Vec<u8>) {
    let seed: u64 =
        std::env::var("VELLUM_TEST_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(20_261_121);
    let mut random = Random::from_seed(seed);
    let mut model = Model { bytes, unflushed: BTreeMap::new() };
    let mut killed = 0;
    for round in 0..ROUNDS * scale() {
        let about = format!("{name}, round {round}, seed {seed}");
        qemus_turn(image, &mut model, &mut random);
        is_clean(image);
        model.settle(&bytes_of(image), &format!("{about}: after QEMU"));
        let server = Server::start(&[image, "-f", "qcow2"]);
        let mut client = Client::connect(&server.peer(), "").expect("a server");
        our_turn(&mut client, &mut model, &mut random);
        match random.below(3) {
            0 => {
                server.stop();
                model.unflushed.clear();
            }
            how => {
                server.kill();
                killed += usize::from(journal_of(image)["needs-recovery"] == true);
                match how {
                    1 => drop(vellum(&["recover", image]).answer()),
                    _ => drop(Server::start(&[image, "-f", "qcow2"]).stop()),
                }
            }
        }
        is_clean(image);
        model.settle(&bytes_of(image), &format!("{about}: after Vellum"));
        assert!(journal_of(image)["size"].as_u64() > Some(0), "{about}: the journal is still wanted");
    }
    assert!(killed > 0, "{name}, seed {seed}: a journal was replayed");
}

#[test]
fn on_an_image_that_vellum_made() {
    requires!("qemu-img", "qemu-io");
    let dir = Dir::new("turns");
    for options in ["journal=on", "journal=on,journal_size=64k,cluster_size=4k,lazy_refcounts=on"] {
        let image = dir.text("disk.qcow2");
        vellum(&["create", "-q", "-f", "qcow2", "-o", options, &image, &SIZE.to_string()]).answer();
        take_turns(options, &image, vec![0; SIZE]);
    }
}

#[test]
fn on_an_overlay_that_vellum_made() {
    requires!("qemu-img", "qemu-io");
    let dir = Dir::new("turns");
    let (image, base) = (dir.text("disk.qcow2"), dir.text("base.raw"));
    let bytes = noise(SIZE, 80);
    std::fs::write(&base, &bytes).expect("a base");
    let options = ["create", "-q", "-f", "qcow2", "-o", "journal=on", "-b", &base, "-F", "raw", &image];
    vellum(&options).answer();
    take_turns("an overlay", &image, bytes);
}

#[test]
fn on_an_image_that_qemu_made() {
    requires!("qemu-img", "qemu-io");
    let dir = Dir::new("turns");
    let image = dir.text("disk.qcow2");
    succeed("qemu-img", &["create", "-q", "-f", "qcow2", "-o", "cluster_size=8k", &image, &SIZE.to_string()]);
    qemu_io(&["-f", "qcow2", &image], &["write -P 5 0 1M".to_owned()]);
    succeed("qemu-img", &["snapshot", "-c", "before", &image]);
    vellum(&["journal", "enable", &image]).answer();
    let mut bytes = vec![0; SIZE];
    bytes[..1 << 20].fill(5);
    take_turns("made by QEMU, with a snapshot", &image, bytes);
}
