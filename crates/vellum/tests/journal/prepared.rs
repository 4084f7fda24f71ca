//! Space that was prepared ahead of need: visible while an image is served, returned when it is closed or
//! recovered.

use super::support::client::Client;
use super::support::dir::Dir;
use super::support::program::vellum;
use super::support::server::Server;
use super::support::{noise, until};
use super::{MIB, bytes_of, is_clean, journal_of};

fn len_of(image: &str) -> u64 {
    std::fs::metadata(image).expect("the image").len()
}

/// Waits until the file has grown by what is prepared.
fn grown(image: &str) {
    until("space is prepared", || len_of(image) >= 7 << 20);
}

/// An image is killed once and closed once with space prepared behind its end, and nothing of that is left
/// over.
fn story(options: &str, arguments: &[&str]) {
    let dir = Dir::new("prepared");
    let (image, copy) = (dir.text("disk.qcow2"), dir.text("copy.qcow2"));
    vellum(&["create", "-f", "qcow2", "-o", options, &image, "64M"]).answer();
    let data = noise(MIB, 90);
    let serve = [&[image.as_str(), "-f", "qcow2"], arguments].concat();

    // Killed with zeros behind the end, which are durable or not.
    let server = Server::start(&serve);
    let mut client = Client::connect(&server.peer(), "").expect("a server");
    client.write(0, &data, 0).expect("a write");
    client.flush().expect("a flush");
    grown(&image);
    client.write(MIB as u64, &data, 0).expect("a write");
    client.flush().expect("a flush");
    server.kill();
    assert!(len_of(&image) >= 7 << 20, "{options}: {}", len_of(&image));
    std::fs::copy(&image, &copy).expect("a copy");
    vellum(&["recover", &image]).answer();
    let small = 2 * MIB as u64..4 * MIB as u64;
    assert!(small.contains(&len_of(&image)), "{options}: {}", len_of(&image));
    is_clean(&image);
    let mut wanted = [&data[..], &data].concat();
    wanted.resize(64 * MIB, 0);
    assert!(bytes_of(&image) == wanted, "{options}");

    // By a server that serves it again, and closes it.
    let server = Server::start(&[&[copy.as_str(), "-f", "qcow2"], arguments].concat());
    let mut client = Client::connect(&server.peer(), "").expect("a server");
    client.write(0, &data[..4096], 0).expect("a write");
    client.write(2 * MIB as u64, &data[..65_536], 0).expect("a write");
    client.flush().expect("a flush");
    grown(&copy);
    let stats = server.stop_and_count();
    let written = stats["disks"][0]["host"]["prealloc"]["bytes-written"].as_u64();
    assert!(written >= Some(4 << 20), "{options}: {stats}");
    assert!(small.contains(&len_of(&copy)), "{options}: {}", len_of(&copy));
    is_clean(&copy);
    wanted[2 * MIB..2 * MIB + 65_536].copy_from_slice(&data[..65_536]);
    assert!(bytes_of(&copy) == wanted, "{options}");
}

#[test]
fn with_a_journal() {
    story("journal=on,journal_size=256k", &["--prealloc", "8M"]);
}

#[test]
fn without_a_journal() {
    story("journal=off", &["--prealloc", "8M"]);
}

#[test]
fn an_image_that_asks_for_it() {
    story("journal=on,journal_size=256k,prealloc=8M", &[]);
}

#[test]
fn settings_are_shown_and_bad_ones_refused() {
    let dir = Dir::new("prepared");
    let image = dir.text("disk.qcow2");
    let made =
        vellum(&["create", "-f", "qcow2", "-o", "journal=on,prealloc=adaptive", &image, "8M"]).answer();
    assert!(made.contains(" prealloc=adaptive"), "{made}");
    assert_eq!(journal_of(&image)["prealloc"], "adaptive");
    let told = vellum(&["info", &image]).answer();
    assert!(told.contains("    journal: 1 MiB, prealloc=adaptive"), "{told}");
    for options in ["journal=on,prealloc=1k", "journal=on,prealloc=yes", "journal=off,prealloc=off"] {
        let ran = vellum(&["create", "-f", "qcow2", "-o", options, &image, "8M"]);
        assert_eq!(ran.code, 1, "{options}: {ran:?}");
        assert!(ran.err.contains("prealloc"), "{options}: {ran:?}");
    }
}
