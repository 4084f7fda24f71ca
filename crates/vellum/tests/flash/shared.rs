//! One cache under several disks, and under clones of one template.

use serde_json::Value;

use super::support::client::Client;
use super::support::dir::Dir;
use super::support::program::{until_let_go, vellum};
use super::support::server::Server;
use super::support::{noise, until};
use super::{KINDS, alone, info, is_sound, made_cache, same};

const SIZE: usize = 4 << 20;
const CLONES: usize = 6;

/// Clones of one template, of both formats.
fn clones(dir: &Dir) -> (Vec<String>, Vec<u8>) {
    let bytes = noise(SIZE, 11);
    std::fs::write(dir.join("template.raw"), &bytes).expect("a template");
    let made = (0..CLONES).map(|number| {
        let (format, ending) = if number % 2 == 0 { ("qcow2", "qcow2") } else { ("vellum", "vlm") };
        let image = dir.text(&format!("clone-{number}.{ending}"));
        vellum(&["create", "-q", "-f", format, "-b", "template.raw", "-F", "raw", &image]).answer();
        image
    });
    (made.collect(), bytes)
}

fn exports(images: &[String]) -> Vec<String> {
    let named = images.iter().enumerate().map(|(number, image)| format!("d{number}={image}"));
    named.flat_map(|export| ["--export".to_owned(), export]).collect()
}

fn arguments<'a>(exports: &'a [String], cache: &'a str) -> Vec<&'a str> {
    exports.iter().map(String::as_str).chain(["--flash", cache]).collect()
}

#[test]
fn clones_share_the_blocks_of_their_template() {
    let dir = Dir::new("flash-clones");
    let cache = made_cache(&dir, "64M");
    let (images, template) = clones(&dir);
    let exports = exports(&images);
    let place = Dir::short();
    let control = place.text("control");
    let server = Server::start(&[&arguments(&exports, &cache)[..], &["--control", &control]].concat());
    let mut models = vec![template; CLONES];
    // What is read faster than it can be kept is not kept.
    let blocks = (SIZE / 4096) as u64;
    let mut first = Client::connect(&server.peer(), "d0").expect("it is served");
    until("the template is cached", || {
        same(&first.read_all().expect("it is read"), &models[0], "the first clone");
        let stats = vellum(&["stats", "--control", &control, "--output", "json"]).json();
        stats["disks"][0]["flash"]["below"]["admitted"].as_u64() >= Some(blocks)
    });
    first.disconnect();
    for round in 0..2 {
        for (number, model) in models.iter_mut().enumerate() {
            let mut client = Client::connect(&server.peer(), &format!("d{number}")).expect("it is served");
            same(&client.read_all().expect("it is read"), model, &format!("clone {number}, round {round}"));
            let bytes = noise(40_000, (number * 10 + round) as u64);
            let at = number * 100_000 + round * 1_000_000;
            client.write(at as u64, &bytes, 0).expect("it is written");
            model[at..at + bytes.len()].copy_from_slice(&bytes);
            client.flush().expect("a flush");
            client.disconnect();
        }
    }
    let stats = server.stop_and_count();
    let below: &Value = &stats["disks"][0]["flash"]["below"];
    let number = |name: &str| below[name].as_u64().expect("a number");
    // Once for all of them; what is written by some of them is dropped for none but all.
    assert!(number("hits") >= 2 * blocks, "{below}");
    let masked: u64 = (0..CLONES)
        .map(|disk| stats["disks"][disk]["flash"]["disk"]["demoted"].as_u64().expect("a number"))
        .sum();
    assert!(masked > 0, "what a clone has written is not needed of the template: {stats}");
    let facts = info(&cache);
    let of_template: Vec<_> = facts["disks"]
        .as_array()
        .expect("disks")
        .iter()
        .filter(|disk| disk.get("session").is_none() && disk["kind"] == "disk")
        .collect();
    assert_eq!(of_template.len(), 1, "{facts}");
    assert!(of_template[0]["cached-bytes"].as_u64() <= Some(SIZE as u64), "{facts}");
    for (image, model) in images.iter().zip(&models) {
        is_sound(image);
        same(&alone(&dir, image), model, image);
    }
}

/// The cache has rows for 1,022 disks.
#[test]
fn disks_beyond_the_rows_of_a_cache_are_served_without_it() {
    let dir = Dir::new("flash-many");
    let cache = made_cache(&dir, "64M");
    let template = noise(1 << 20, 12);
    std::fs::write(dir.join("template.raw"), &template).expect("a template");
    let images: Vec<String> = (0..1030).map(|number| dir.text(&format!("c{number}.qcow2"))).collect();
    let names: Vec<&str> = images.iter().map(String::as_str).collect();
    vellum(&[&["clone", "-q", "-F", "raw", &dir.text("template.raw")], &names[..]].concat()).answer();
    let exports = exports(&images);
    let server = Server::start(&arguments(&exports, &cache));
    let mut models = Vec::new();
    for number in [0, 1029] {
        let mut client = Client::connect(&server.peer(), &format!("d{number}")).expect("it is served");
        let mut model = template.clone();
        model[5000..9000].copy_from_slice(&noise(4000, number));
        client.write(5000, &model[5000..9000], 0).expect("it is written");
        client.flush().expect("a flush");
        same(&client.read_all().expect("it is read"), &model, &format!("clone {number}"));
        client.disconnect();
        models.push((number, model));
    }
    let stats = server.stop_and_count();
    let policy = |number: usize| stats["disks"][number]["flash"]["policy"].clone();
    assert_eq!(policy(0), "writeback", "{}", stats["disks"][0]);
    assert_ne!(policy(1029), "writeback", "{}", stats["disks"][1029]);
    for (number, model) in models {
        let image = &images[usize::try_from(number).expect("small")];
        is_sound(image);
        same(&alone(&dir, image), &model, image);
    }
}

#[test]
fn a_template_that_was_replaced_is_read_anew() {
    let dir = Dir::new("flash-replaced");
    let cache = made_cache(&dir, "64M");
    let (images, _) = clones(&dir);
    for round in 0..2 {
        let bytes = noise(SIZE, 20 + round);
        // Another content under the same name; the clones have nothing of their own.
        std::fs::write(dir.join("template.raw"), &bytes).expect("a template");
        let server = Server::start(&[&images[0], "--flash", &cache]);
        let mut client = Client::connect(&server.peer(), "").expect("it is served");
        same(&client.read_all().expect("it is read"), &bytes, &format!("round {round}"));
        client.disconnect();
        server.stop();
    }
}

/// The last block of the disk is the image's own in its second half only: the first is the template's, also later.
#[test]
fn what_a_template_has_of_a_block_is_not_kept_as_the_image_s_own() {
    let dir = Dir::new("flash-half");
    let cache = made_cache(&dir, "64M");
    let (template, image) = (dir.join("template.raw"), dir.text("clone.qcow2"));
    std::fs::write(&template, vec![0x11; SIZE]).expect("a template");
    let options = ["-o", "extended_l2=on,cluster_size=64k", "-b", "template.raw", "-F", "raw"];
    vellum(&[&["create", "-q", "-f", "qcow2"], &options[..], &[&image]].concat()).answer();
    let server = Server::start(&[&image]);
    let mut client = Client::connect(&server.peer(), "").expect("it is served");
    client.write(SIZE as u64 - 1024, &[0x99; 1024], 0).expect("written");
    client.disconnect();
    server.stop();
    for value in [0x11, 0x22] {
        std::fs::write(&template, vec![value; SIZE]).expect("a template");
        let place = Dir::short();
        let control = place.text("control");
        let server = Server::start(&[&image, "--flash", &cache, "--control", &control]);
        let mut client = Client::connect(&server.peer(), "").expect("it is served");
        let admitted = || {
            let stats = vellum(&["stats", "--control", &control, "--output", "json"]).json();
            let flash = &stats["disks"][0]["flash"];
            flash["admitted"].as_u64().unwrap_or(0) + flash["below"]["admitted"].as_u64().unwrap_or(0)
        };
        client.read(0, 1 << 20).expect("read");
        until("something is cached", || admitted() > 0);
        for _ in 0..20 {
            let found = client.read(SIZE as u64 - 4096, 4096).expect("read");
            // The image has the sub-cluster of 2 KiB that was written, filled up from the first template.
            same(&found[..2048], &[value; 2048], &format!("the template of {value:#x}"));
            same(&found[2048..3072], &[0x11; 1024], "what was filled up");
            same(&found[3072..], &[0x99; 1024], "the image");
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        client.disconnect();
        server.stop();
    }
}

#[test]
fn a_template_that_was_rewritten_and_has_its_old_times_is_read_anew() {
    let dir = Dir::new("flash-rewritten");
    let cache = made_cache(&dir, "64M");
    let (images, _) = clones(&dir);
    let template = dir.join("template.raw");
    let before = std::fs::metadata(&template).and_then(|facts| facts.modified()).expect("its time");
    for round in 0..2 {
        let bytes = noise(SIZE, 20 + round);
        std::fs::write(&template, &bytes).expect("a template");
        let file = std::fs::File::options().write(true).open(&template).expect("the template");
        file.set_modified(before).expect("its time");
        drop(file);
        let place = Dir::short();
        let control = place.text("control");
        let server = Server::start(&[&images[0], "--flash", &cache, "--control", &control]);
        let mut client = Client::connect(&server.peer(), "").expect("it is served");
        until("the template is cached", || {
            same(&client.read_all().expect("it is read"), &bytes, &format!("round {round}"));
            let stats = vellum(&["stats", "--control", &control, "--output", "json"]).json();
            stats["disks"][0]["flash"]["below"]["admitted"].as_u64() >= Some(1)
        });
        client.disconnect();
        server.stop();
    }
}

#[test]
fn several_disks_of_a_killed_server_are_recovered_together() {
    let dir = Dir::new("flash-several");
    let cache = made_cache(&dir, "64M");
    let places: Vec<Dir> = KINDS.iter().map(|_| Dir::within(dir.path(), "disk")).collect();
    let made = KINDS.into_iter().zip(&places).map(|(kind, place)| kind.make(place, SIZE));
    let (images, mut models): (Vec<String>, Vec<Vec<u8>>) = made.unzip();
    let exports = exports(&images);
    let server = Server::start(&arguments(&exports, &cache));
    for (number, model) in models.iter_mut().enumerate() {
        let mut client = Client::connect(&server.peer(), &format!("d{number}")).expect("it is served");
        let bytes = noise(200_000, number as u64);
        client.write(300_000, &bytes, 0).expect("it is written");
        model[300_000..300_000 + bytes.len()].copy_from_slice(&bytes);
        client.flush().expect("a flush");
    }
    server.kill();
    images.iter().for_each(|image| until_let_go(image));
    until_let_go(&cache);
    let images_given: Vec<&str> = images.iter().map(String::as_str).collect();
    let done =
        vellum(&[&["flash", "recover", "--full", "--output", "json", &cache][..], &images_given].concat());
    assert_eq!(done.json()["disks-left"], 0);
    for (image, model) in images.iter().zip(&models) {
        is_sound(image);
        same(&alone(&dir, image), model, image);
    }
}
