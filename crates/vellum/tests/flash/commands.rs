//! What `vellum flash` does with a cache that no server has, and what it refuses.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;

use super::support::client::Client;
use super::support::dir::Dir;
use super::support::noise;
use super::support::program::{until_let_go, vellum};
use super::support::server::Server;
use super::{KINDS, alone, info, is_not_served, is_refused, made_cache, same};

#[test]
fn a_cache_is_made_described_and_checked() {
    let dir = Dir::new("flash-made");
    let cache = dir.text("cache");
    let made = vellum(&["flash", "create", "--output", "json", &cache, "64M"]).json();
    assert_eq!(made["size"], 64 << 20);
    let capacity = made["capacity-bytes"].as_u64().expect("a number");
    assert!((32 << 20..64 << 20).contains(&capacity), "{made}");
    let facts = info(&cache);
    assert_eq!(facts["capacity-bytes"], capacity);
    assert_eq!((&facts["cached-bytes"], &facts["dirty-bytes"]), (&0.into(), &0.into()));
    assert_eq!(facts["disks"].as_array().map(Vec::len), Some(0));
    let text = vellum(&["flash", "info", "--map", &cache]).answer();
    let strip = text.lines().find(|line| line.starts_with('[')).expect("a picture");
    assert!(strip.trim_matches(['[', ']']).chars().all(|part| part == '.'), "{strip}");
    assert!(vellum(&["flash", "check", &cache]).answer().contains("no errors"));
    assert!(vellum(&["flash", "recover", &cache]).answer().contains("recovered"));
}

#[test]
fn nothing_is_overwritten_without_being_told_to() {
    let dir = Dir::new("flash-force");
    let cache = made_cache(&dir, "16M");
    let first = info(&cache)["id"].clone();
    is_refused(&vellum(&["flash", "create", &cache, "16M"]), &["cache", "--force"]);
    assert_eq!(info(&cache)["id"], first);
    vellum(&["flash", "create", "--force", &cache, "16M"]).answer();
    assert_ne!(info(&cache)["id"], first);
    let text = dir.text("text");
    std::fs::write(&text, "not to be lost").expect("a file");
    is_refused(&vellum(&["flash", "create", &text, "16M"]), &["text", "--force"]);
    assert_eq!(std::fs::read(&text).expect("it is there"), b"not to be lost");
    let disk = dir.text("disk");
    let mut bytes = vec![0; 8 << 20];
    bytes[5 << 20] = 1;
    std::fs::write(&disk, &bytes).expect("a file");
    is_refused(&vellum(&["flash", "create", &disk, "4M"]), &["disk", "--force"]);
    assert!(std::fs::read(&disk).expect("it is there") == bytes);
    let sparse = dir.text("sparse");
    std::fs::File::create(&sparse).and_then(|file| file.set_len(64 << 20)).expect("a file of holes");
    vellum(&["flash", "create", &sparse, "16M"]).answer();
}

#[test]
fn a_cache_that_is_too_small_is_refused_and_leaves_no_file() {
    let dir = Dir::new("flash-small");
    let cache = dir.text("cache");
    is_refused(&vellum(&["flash", "create", &cache, "64k"]), &["cache"]);
    is_refused(&vellum(&["flash", "create", &cache]), &["size"]);
    assert!(!dir.join("cache").exists());
}

#[test]
fn what_is_no_cache_is_refused_by_all_commands() {
    let dir = Dir::new("flash-none");
    let image = dir.text("disk.qcow2");
    vellum(&["create", "-q", "-f", "qcow2", &image, "16M"]).answer();
    let before = std::fs::read(&image).expect("an image");
    for command in ["info", "recover"] {
        is_refused(&vellum(&["flash", command, &image]), &["disk.qcow2"]);
    }
    assert_ne!(vellum(&["flash", "check", &image]).code, 0);
    let raw = dir.text("disk.raw");
    std::fs::write(&raw, vec![0; 1 << 20]).expect("a disk");
    is_not_served(&[&raw, "-f", "raw", "--flash", &image], &["disk.qcow2"]);
    is_not_served(&[&raw, "-f", "raw", "--flash", &dir.text("nothing")], &["nothing"]);
    assert!(std::fs::read(&image).expect("an image") == before, "nothing was written");
}

/// CRC32C, bit by bit.
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| (crc >> 1) ^ if crc & 1 == 1 { 0x82F6_3B78 } else { 0 })
    })
}

#[test]
fn a_cache_of_another_version_is_refused() {
    let dir = Dir::new("flash-version");
    let cache = made_cache(&dir, "16M");
    let file = OpenOptions::new().read(true).write(true).open(&cache).expect("the cache");
    let mut block = vec![0; 4096];
    file.read_exact_at(&mut block, 0).expect("the superblock");
    assert_eq!(&block[..8], b"VELLUMF0");
    block[12..16].copy_from_slice(&9u32.to_be_bytes());
    block[8..12].fill(0);
    let crc = crc32c(&block).to_be_bytes();
    block[8..12].copy_from_slice(&crc);
    file.write_all_at(&block, 0).expect("it is written");
    file.write_all_at(&block, 4096).expect("it is written");
    is_refused(&vellum(&["flash", "info", &cache]), &["cache", "9"]);
}

#[test]
fn one_program_at_a_time_has_a_cache() {
    let dir = Dir::new("flash-locked");
    let cache = made_cache(&dir, "16M");
    let [one, other] = ["one.qcow2", "other.qcow2"].map(|name| dir.text(name));
    for image in [&one, &other] {
        vellum(&["create", "-q", "-f", "qcow2", image, "16M"]).answer();
    }
    let server = Server::start(&[&one, "--flash", &cache]);
    for command in ["info", "check", "recover"] {
        is_refused(&vellum(&["flash", command, &cache]), &["cache", "in use"]);
    }
    is_not_served(&[&other, "--flash", &cache], &["cache", "in use"]);
    server.stop();
    assert!(vellum(&["flash", "check", &cache]).answer().contains("no errors"));
}

/// Images that no cache can hold writes of are complete, whatever served them.
#[test]
fn an_image_that_was_never_behind_is_complete() {
    let dir = Dir::new("flash-complete");
    let cache = made_cache(&dir, "16M");
    let old = dir.text("old.qcow2");
    vellum(&["create", "-q", "-f", "qcow2", "-o", "compat=0.10", &old, "4M"]).answer();
    let (key, secret) = (dir.text("key"), format!("id=key,file={}", dir.text("key")));
    std::fs::write(&key, "secret").expect("a file");
    let encrypted = dir.text("encrypted.qcow2");
    let options = "encrypt.format=luks,encrypt.key-secret=key,encrypt.iter-time=10";
    vellum(&["create", "-q", "-f", "qcow2", "-o", options, "--secret", &secret, &encrypted, "4M"]).answer();
    let server = Server::start(&[&old, "--flash", &cache]);
    let mut client = Client::connect(&server.peer(), "").expect("it is served");
    client.write(0, &noise(1 << 20, 4), 0).expect("written");
    drop(client);
    server.kill();
    until_let_go(&old);
    let recover = ["flash", "recover", "--full", "--secret", &secret, "--output", "json", &cache];
    let done = vellum(&[&recover[..], &[&old, &encrypted]].concat()).json();
    let images = done["images"].as_array().expect("images");
    assert_eq!(images.len(), 2, "{done}");
    assert!(images.iter().all(|image| image["bytes-written-home"] == 0), "{done}");
}

/// What a check says of a damaged cache does not send its reader to the check.
#[test]
fn a_check_of_a_damaged_cache_says_what_is_wrong() {
    let dir = Dir::new("flash-damaged");
    let cache = made_cache(&dir, "16M");
    let file = OpenOptions::new().write(true).open(&cache).expect("the cache");
    // Both places of the first slice.
    file.write_all_at(&vec![0x5A; 2 * 90_112], 8192).expect("it is written");
    let checked = vellum(&["flash", "check", &cache]);
    let said = format!("{}{}", checked.out, checked.err);
    assert_eq!(checked.code, 2, "{checked:?}");
    assert!(
        said.contains("slice 0") && said.contains("flash forget") && !said.contains("flash check"),
        "{said}"
    );
}

/// Larger and smaller, with what only the cache has; and what has no room.
#[test]
fn a_cache_gets_another_size() {
    let dir = Dir::new("flash-resize");
    let cache = made_cache(&dir, "64M");
    let (image, mut model) = KINDS[1].make(&dir, 24 << 20);
    let server = Server::start(&[&image, "--flash", &cache, "--flash-keep"]);
    let mut client = Client::connect(&server.peer(), "").expect("it is served");
    client.write(0, &noise(12 << 20, 1), 0).expect("written");
    client.flush().expect("durable");
    model[..12 << 20].copy_from_slice(&noise(12 << 20, 1));
    let busy = vellum(&["flash", "resize", &cache, "128M"]);
    assert!(busy.code == 1 && busy.err.contains("stop that server first"), "{busy:?}");
    drop(client);
    server.stop();
    let dirty = info(&cache)["dirty-bytes"].clone();
    for size in ["128M", "40M", "200M"] {
        let resized = vellum(&["flash", "resize", &cache, size, "--output", "json"]).json();
        let facts = info(&cache);
        assert_eq!(
            (&facts["dirty-bytes"], &facts["capacity-bytes"]),
            (&dirty, &resized["capacity-bytes"]),
            "{size}"
        );
        assert_eq!(
            std::fs::metadata(&cache).expect("the cache").len(),
            resized["size"].as_u64().expect("a size")
        );
        vellum(&["flash", "check", &cache]).answer();
    }
    let refused = vellum(&["flash", "resize", &cache, "12M"]);
    assert!(refused.code == 1 && refused.err.contains("flash drain"), "{refused:?}");
    assert_eq!(info(&cache)["dirty-bytes"], dirty);
    let server = Server::start(&[&image, "--flash", &cache]);
    let mut client = Client::connect(&server.peer(), "").expect("it is served");
    same(&client.read_all().expect("it is read"), &model, "after three sizes");
    drop(client);
    server.stop();
    same(&alone(&dir, &image), &model, "alone");
    vellum(&["flash", "resize", &cache, "12M"]).answer();
}
