//! A guest works on a disk under a cache: it reads what it wrote, over restarts; and when the cache has been drained the
//! image alone has all of it.

use vellum_core::Random;

use super::support::client::Client;
use super::support::dir::Dir;
use super::support::program::vellum;
use super::support::server::Server;
use super::support::{noise, scale, until};
use super::{KINDS, Kind, alone, info, is_sound, made_cache, same};

const SIZE: usize = 8 << 20;

/// Writes, zeros and discards, and checks reads against a model. A discard is only done where the model knows what
/// comes of it: it reads as zero or as before.
fn work(client: &mut Client, model: &mut [u8], random: &mut Random, requests: usize) {
    for _ in 0..requests {
        let len = if random.one_in(4) { 1 + random.index(300_000) } else { 512 * (1 + random.index(32)) };
        let at = if random.one_in(2) { random.index(SIZE - len) } else { random.index(SIZE / 8) };
        let at = if random.one_in(3) { at } else { at / 4096 * 4096 };
        let (from, count) = (at as u64, u32::try_from(len).expect("short"));
        match random.below(10) {
            0..4 => {
                let bytes = noise(len, random.any());
                client.write(from, &bytes, 0).expect("it is written");
                model[at..at + len].copy_from_slice(&bytes);
            }
            4 => {
                client.zero(from, count, 0).expect("it is zeroed");
                model[at..at + len].fill(0);
            }
            5 => {
                client.trim(from, count).expect("it is discarded");
                let now = client.read(from, count).expect("it is read");
                let known = now.iter().zip(&model[at..at + len]).all(|(now, was)| now == was || *now == 0);
                assert!(known, "discarded at {at:#x}, {len:#x}");
                model[at..at + len].copy_from_slice(&now);
            }
            6 => client.flush().expect("it is flushed"),
            _ => {
                let found = client.read(from, count).expect("it is read");
                same(&found, &model[at..at + len], &format!("read at {at:#x}"));
            }
        }
    }
}

/// Rounds of one image over one cache, of which the last leaves the image alone.
fn rounds(kind: Kind, cache_size: &str, keeps: bool) {
    let dir = Dir::new("flash-contract");
    let cache = made_cache(&dir, cache_size);
    let (image, mut model) = kind.make(&dir, SIZE);
    let mut random = Random::from_seed(18);
    let keep: &[&str] = if keeps { &["--flash-keep"] } else { &[] };
    for round in 0..3 {
        let server = Server::start(&[&[&image, "--flash", &cache][..], keep].concat());
        let mut client = Client::connect(&server.peer(), "").expect("it is served");
        same(&client.read_all().expect("it is read"), &model, &format!("{kind:?}, round {round}"));
        work(&mut client, &mut model, &mut random, 150 * scale());
        same(
            &client.read_all().expect("it is read"),
            &model,
            &format!("{kind:?}, round {round}, at its end"),
        );
        client.disconnect();
        let stats = server.stop_and_count();
        let flash = &stats["disks"][0]["flash"];
        assert_eq!(flash["policy"], "writeback", "{kind:?}: {flash}");
        assert!(
            flash["disk"]["writes"].as_u64() > Some(0) && flash["disk"]["hits"].as_u64() > Some(0),
            "{flash}"
        );
        let dirty = info(&cache)["disks"]
            .as_array()
            .expect("disks")
            .iter()
            .any(|disk| disk["dirty-bytes"].as_u64() > Some(0) || disk["zero-bytes"].as_u64() > Some(0));
        assert_eq!(dirty, keeps, "{kind:?}: {}", info(&cache));
        assert_eq!(vellum(&["flash", "check", &cache]).code, 0, "{kind:?}");
    }
    if keeps {
        vellum(&["flash", "drain", &cache, &image]).answer();
    }
    is_sound(&image);
    same(&alone(&dir, &image), &model, &format!("{kind:?}, alone"));
}

#[test]
fn a_guest_reads_what_it_wrote_and_the_image_has_it_in_the_end() {
    KINDS.into_iter().for_each(|kind| rounds(kind, "64M", false));
}

#[test]
fn what_stays_in_the_cache_is_there_in_the_next_server_and_goes_home_when_drained() {
    KINDS.into_iter().for_each(|kind| rounds(kind, "64M", true));
}

#[test]
fn a_cache_smaller_than_what_is_written_holds_up_nothing() {
    KINDS[..4].iter().for_each(|kind| rounds(*kind, "3M", false));
}

#[test]
fn what_was_read_is_there_after_a_restart() {
    let dir = Dir::new("flash-warm");
    let cache = made_cache(&dir, "64M");
    let kind = Kind { format: "qcow2", options: "journal=on", has_base: true };
    let (image, model) = kind.make(&dir, SIZE);
    let place = Dir::short();
    let control = place.text("control");
    let arguments = [image.as_str(), "--flash", &cache, "--control", &control];
    let server = Server::start(&arguments);
    let mut client = Client::connect(&server.peer(), "").expect("it is served");
    // What is read faster than it can be kept is not kept; zeros are not either.
    let blocks = model.chunks(4096).filter(|block| block.iter().any(|byte| *byte != 0)).count() as u64;
    until("all that is not zero is cached", || {
        same(&client.read_all().expect("it is read"), &model, "what the base has");
        let stats = vellum(&["stats", "--control", &control, "--output", "json"]).json();
        stats["disks"][0]["flash"]["below"]["admitted"].as_u64() >= Some(blocks)
    });
    client.disconnect();
    server.stop();
    assert!(info(&cache)["cached-bytes"].as_u64() >= Some(blocks * 4096));
    let server = Server::start(&arguments);
    let mut client = Client::connect(&server.peer(), "").expect("it is served");
    same(&client.read_all().expect("it is read"), &model, "what is cached of the base");
    client.disconnect();
    let below = server.stop_and_count()["disks"][0]["flash"]["below"].clone();
    assert!(below["hits"].as_u64() >= Some(blocks), "{below}");
}

#[test]
fn tables_are_there_after_a_restart_and_not_after_a_kill() {
    for (format, options) in [("qcow2", "journal=on"), ("qcow2", "journal=off"), ("vellum", "layout=table")] {
        let dir = Dir::new("flash-tables");
        let cache = made_cache(&dir, "16M");
        let kind = Kind { format, options, has_base: false };
        let (image, mut model) = kind.make(&dir, SIZE);
        let arguments = [image.as_str(), "--flash", &cache];
        let mut tables = Vec::new();
        for round in 0..5u8 {
            let server = Server::start(&arguments);
            let mut client = Client::connect(&server.peer(), "").expect("it is served");
            same(&client.read_all().expect("it is read"), &model, "what was written before");
            if round == 0 {
                for place in (0..SIZE).step_by(SIZE / 16) {
                    model[place..place + 4096].fill(round + 1);
                    client.write(place as u64, &model[place..place + 4096], 0).expect("it is written");
                }
                client.flush().expect("it is flushed");
            }
            client.disconnect();
            if round == 3 {
                server.kill();
                tables.push(serde_json::Value::Null);
            } else {
                tables.push(server.stop_and_count()["disks"][0]["flash"]["tables"].clone());
            }
        }
        assert!(tables[2]["flash-hits"].as_u64() > Some(0), "{format} {options}: {tables:?}");
        assert!(tables[4]["misses"].as_u64() > Some(0), "{format} {options}: after a kill: {tables:?}");
    }
}
