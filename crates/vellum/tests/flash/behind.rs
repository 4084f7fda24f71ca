//! Images that are behind their disk, because a cache holds writes of them; and programs that do not know the cache.

use rustix::process::Signal;

use super::support::client::Client;
use super::support::dir::Dir;
use super::support::loops::Mount;
use super::support::program::{has, qemu_io, run, succeed, until_let_go, vellum};
use super::support::server::Server;
use super::support::{PATIENCE, noise};
use super::{KINDS, Kind, alone, info, is_not_served, is_refused, is_sound, made_cache, same};
use crate::requires;

const SIZE: usize = 8 << 20;

/// Writes these bytes at 1 MiB through a cache, flushed, and lets the server keep them there.
fn left_behind(cache: &str, image: &str, bytes: &[u8]) {
    let server = Server::start(&[image, "--flash", cache, "--flash-keep"]);
    let mut client = Client::connect(&server.peer(), "").expect("it is served");
    client.write(1 << 20, bytes, 0).expect("it is written");
    client.flush().expect("a flush");
    client.disconnect();
    server.stop();
    assert!(info(cache)["dirty-bytes"].as_u64() >= Some(bytes.len() as u64), "{}", info(cache));
}

/// An image whose file system is full cannot be completed when the server ends: the server says that it is behind, and what
/// helps. Nothing is lost, so it does not say that.
#[test]
fn an_image_that_cannot_grow_is_behind_and_nothing_of_it_is_lost() {
    let Some(tmpfs) = Mount::tmpfs(4 << 20) else { return };
    let dir = Dir::new("flash-cannot-grow");
    let cache = made_cache(&dir, "32M");
    let (image, mut model) = KINDS[1].make(&tmpfs.dir, SIZE);
    let server = Server::start(&[&image, "--flash", &cache]);
    let mut client = Client::connect(&server.peer(), "").expect("it is served");
    let bytes = noise(6 << 20, 21);
    client.write(1 << 20, &bytes, 0).expect("it is written to the cache");
    client.flush().expect("a flush of the cache");
    // Not flushed, and not lost either.
    client.write(0, &bytes[..4096], 0).expect("it is written to the cache");
    model[1 << 20..7 << 20].copy_from_slice(&bytes);
    model[..4096].copy_from_slice(&bytes[..4096]);
    client.disconnect();
    server.signal(Signal::TERM);
    let ran = server.wait(PATIENCE);
    assert_eq!(ran.code, 1, "{ran:?}");
    for said in ["is behind, and nothing is lost", "vellum flash recover --full", &image] {
        assert!(ran.err.contains(said), "it does not say {said:?}: {}", ran.err);
    }
    assert!(!ran.err.contains("may be missing"), "{}", ran.err);
    succeed("mount", &["-o", "remount,size=32M", &tmpfs.dir.path().display().to_string()]);
    vellum(&["flash", "recover", "--full", &cache, &image]).answer();
    same(&alone(&dir, &image), &model, "completed");
    is_sound(&image);
}

#[test]
fn an_image_without_its_cache_is_refused_until_that_is_forgotten() {
    for kind in KINDS {
        let dir = Dir::new("flash-behind");
        let cache = made_cache(&dir, "32M");
        let (image, before) = kind.make(&dir, SIZE);
        left_behind(&cache, &image, &noise(64 << 10, 4));
        let remedies = ["cache", "vellum flash recover", "vellum flash forget"];
        is_not_served(&[&image], &remedies);
        is_not_served(&[&image, "--read-only"], &remedies);
        is_refused(&vellum(&["convert", "-q", "-O", "raw", &image, &dir.text("copy")]), &remedies);
        is_refused(&vellum(&["resize", &image, "16M"]), &remedies);
        is_refused(&vellum(&["snapshot", "create", &image, "s"]), &[]);
        vellum(&["info", &image]).answer();
        vellum(&["check", &image]).answer();
        // Another cache does not know it.
        let other = dir.text("other");
        vellum(&["flash", "create", "-q", &other, "16M"]).answer();
        is_not_served(&[&image, "--flash", &other], &remedies[1..]);
        if kind.format == "qcow2" && has("qemu-img") {
            until_let_go(&image);
            let theirs = run("qemu-img", &["convert", "-O", "raw", &image, &dir.text("copy")]);
            assert!(theirs.code != 0, "{theirs:?}");
        }
        let said = vellum(&["flash", "forget", &image]).answer();
        assert!(said.contains("given up"), "{said}");
        is_sound(&image);
        same(&alone(&dir, &image), &before, &format!("{kind:?}: it is as it was, without what was given up"));
        // The cache has the writes, and they never come back.
        let server = Server::start(&[&image, "--flash", &cache]);
        let mut client = Client::connect(&server.peer(), "").expect("it is served");
        same(&client.read_all().expect("it is read"), &before, &format!("{kind:?}: an old cache"));
        client.disconnect();
        server.stop();
        same(&alone(&dir, &image), &before, &format!("{kind:?}: drained"));
    }
}

#[test]
fn an_image_that_cannot_be_completed_keeps_no_other_from_it() {
    let dir = Dir::new("flash-drain");
    let cache = made_cache(&dir, "32M");
    let (image, mut model) = KINDS[0].make(&dir, SIZE);
    let bytes = noise(64 << 10, 5);
    left_behind(&cache, &image, &bytes);
    let missing = dir.text("missing.qcow2");
    is_refused(&vellum(&["flash", "drain", &cache, &missing, &image]), &[&missing]);
    model[1 << 20..(1 << 20) + bytes.len()].copy_from_slice(&bytes);
    is_sound(&image);
    same(&alone(&dir, &image), &model, "the other image");
}

#[test]
fn a_cache_forgets_a_disk_whose_image_is_gone() {
    let dir = Dir::new("flash-gone");
    let cache = made_cache(&dir, "32M");
    let (image, _) = KINDS[0].make(&dir, SIZE);
    left_behind(&cache, &image, &noise(64 << 10, 4));
    std::fs::remove_file(&image).expect("the image");
    let disk = info(&cache)["disks"][0]["disk"].as_str().expect("digits").to_owned();
    let said = vellum(&["flash", "forget", "--cache", &cache, "--disk", &disk]).answer();
    assert!(said.contains("has forgotten"), "{said}");
    assert_eq!(info(&cache)["dirty-bytes"], 0);
    let again = vellum(&["flash", "forget", "--cache", &cache, "--disk", &disk]).answer();
    assert!(again.contains("no such disk"), "{again}");
    is_refused(&vellum(&["flash", "forget", "--cache", &cache, "--disk", "12"]), &["32 digits"]);
}

#[test]
fn a_disk_is_forgotten_by_the_session_that_its_image_names() {
    let dir = Dir::new("flash-session");
    let cache = made_cache(&dir, "32M");
    let (image, _) = KINDS[0].make(&dir, SIZE);
    left_behind(&cache, &image, &noise(64 << 10, 4));
    let session = info(&cache)["disks"][0]["session"].as_str().expect("a number").to_owned();
    assert!(vellum(&["flash", "info", &cache]).answer().contains(&session));
    for text in
        [vellum(&["info", &image]).answer(), vellum(&["info", "--output", "json", &image]).json().to_string()]
    {
        assert!(text.contains(&session), "{text}");
    }
    let said = vellum(&["flash", "forget", "--cache", &cache, "--disk", &session]).answer();
    assert!(said.contains("has forgotten"), "{said}");
    assert_eq!(info(&cache)["dirty-bytes"], 0);
    is_not_served(&[&image, "--flash", &cache], &["does not have the writes", "vellum flash forget"]);
}

#[test]
fn an_old_copy_of_an_image_is_refused_when_the_image_was_drained() {
    for kind in [KINDS[0], KINDS[4]] {
        let dir = Dir::new("flash-put-back");
        let cache = made_cache(&dir, "32M");
        let (image, mut model) = kind.make(&dir, SIZE);
        let bytes = noise(64 << 10, 4);
        left_behind(&cache, &image, &bytes);
        model[1 << 20..(1 << 20) + bytes.len()].copy_from_slice(&bytes);
        let copy = dir.text("old copy");
        std::fs::copy(&image, &copy).expect("a copy");
        vellum(&["flash", "drain", &cache, &image]).answer();
        let words = ["older copy", "vellum flash forget"];
        is_not_served(&[&copy, "--flash", &cache], &words);
        same(&alone(&dir, &image), &model, &format!("{kind:?}"));
        // In its place.
        until_let_go(&image);
        let kept = dir.text("kept");
        std::fs::copy(&image, &kept).expect("a copy");
        std::fs::copy(&copy, &image).expect("it is put back");
        is_not_served(&[&image, "--flash", &cache], &words);
        is_refused(&vellum(&["flash", "drain", &cache, &image]), &words);
        std::fs::copy(&kept, &image).expect("it is put back");
        let server = Server::start(&[&image, "--flash", &cache]);
        let mut client = Client::connect(&server.peer(), "").expect("it is served");
        same(&client.read_all().expect("it is read"), &model, &format!("{kind:?}"));
        client.disconnect();
        server.stop();
    }
}

#[test]
fn an_image_that_is_behind_is_not_only_read_with_its_cache() {
    for kind in [KINDS[0], KINDS[4]] {
        let dir = Dir::new("flash-only-read");
        let cache = made_cache(&dir, "32M");
        let (image, _) = kind.make(&dir, SIZE);
        left_behind(&cache, &image, &noise(64 << 10, 4));
        let remedy = format!("vellum flash recover --full {cache} {image}");
        is_not_served(&[&image, "--flash", &cache, "--read-only"], &["only read", &remedy]);
        vellum(&["flash", "recover", "--full", &cache, &image]).answer();
        Server::start(&[&image, "--flash", &cache, "--read-only"]).stop();
    }
}

#[test]
fn what_another_program_writes_is_not_hidden_by_an_old_cache() {
    requires!("qemu-io");
    let kind = Kind { format: "qcow2", options: "journal=on", has_base: false };
    let dir = Dir::new("flash-foreign");
    let cache = made_cache(&dir, "32M");
    let (image, mut model) = kind.make(&dir, SIZE);
    for round in 0..3u8 {
        let server = Server::start(&[&image, "--flash", &cache]);
        let mut client = Client::connect(&server.peer(), "").expect("it is served");
        same(&client.read_all().expect("it is read"), &model, &format!("round {round}"));
        let bytes = noise(256 << 10, round.into());
        client.write(1 << 20, &bytes, 0).expect("it is written");
        model[1 << 20..(1 << 20) + bytes.len()].copy_from_slice(&bytes);
        client.flush().expect("a flush");
        client.disconnect();
        server.stop();
        until_let_go(&image);
        // Over some of what the cache has.
        qemu_io(&["-f", "qcow2", &image], &[format!("write -P {} 1056k 64k", 100 + round)]);
        model[1056 << 10..1120 << 10].fill(100 + round);
    }
    same(&alone(&dir, &image), &model, "alone");
}

#[test]
fn a_copy_of_an_image_has_nothing_of_its_cache() {
    for kind in [KINDS[0], KINDS[4]] {
        let dir = Dir::new("flash-copy");
        let cache = made_cache(&dir, "32M");
        let (image, _) = kind.make(&dir, SIZE);
        let server = Server::start(&[&image, "--flash", &cache]);
        let mut client = Client::connect(&server.peer(), "").expect("it is served");
        client.write(0, &[1; 8192], 0).expect("it is written");
        client.disconnect();
        server.stop();
        let copy = format!("{}-{}", dir.text("copy"), image.rsplit('/').next().expect("a name"));
        std::fs::copy(&image, &copy).expect("a copy");
        let server = Server::start(&[&image, "--flash", &cache]);
        let mut client = Client::connect(&server.peer(), "").expect("it is served");
        client.write(0, &[2; 8192], 0).expect("it is written");
        client.disconnect();
        server.stop();
        let server = Server::start(&[&copy, "--flash", &cache]);
        let mut client = Client::connect(&server.peer(), "").expect("it is served");
        assert_eq!(client.read(0, 8192).expect("it is read"), vec![1; 8192], "{kind:?}");
        client.disconnect();
        server.stop();
    }
}
