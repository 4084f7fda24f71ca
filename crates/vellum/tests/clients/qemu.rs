//! QEMU's own programs as clients.

use super::support::program::{path_text, qemu_io, run, succeed};
use super::support::server::Server;
use super::support::{first_difference, noise, patchy};
use super::{Image, KINDS, Kind, MIB, ways, write_sparse};
use crate::requires;
use crate::support::dir::Dir;

#[test]
fn qemu_img_converts_from_and_to_a_server() {
    requires!("qemu-img");
    let dir = Dir::new("qemu-img");
    let (old, new) = (patchy(16 * MIB, 20), patchy(16 * MIB, 21));
    write_sparse(&dir.join("new"), &new);
    for (index, way) in ways().into_iter().enumerate() {
        let kind = KINDS[(index + 1) % 3];
        let image = Image::new(&dir, "disk", kind, &old);
        let server = image.serve(&[&["--nbd", "tcp:127.0.0.1:0"], way].concat());
        let out = dir.join("out");
        succeed("qemu-img", &["convert", "-f", "raw", "-O", "raw", &server.uri(""), path_text(&out)]);
        let copied = std::fs::read(&out).expect("the copy");
        assert_eq!(first_difference(&copied, &old), None, "{kind:?} {way:?}: what was read");
        let new_path = dir.text("new");
        let to = server.tcp_uri("");
        succeed("qemu-img", &["convert", "-n", "-W", "-m", "8", "-f", "raw", "-O", "raw", &new_path, &to]);
        let same = run("qemu-img", &["compare", "-f", "raw", "-F", "raw", &new_path, &server.uri("")]);
        assert_eq!(same.code, 0, "{kind:?} {way:?}: {}{}", same.out, same.err);
        server.stop();
        assert_eq!(first_difference(&image.bytes(), &new), None, "{kind:?} {way:?}: what is in the image");
        image.check();
    }
}

#[test]
fn qemu_img_asks_and_maps() {
    requires!("qemu-img");
    let dir = Dir::new("qemu-img");
    let mut bytes = vec![0; 8 * MIB];
    bytes[2 * MIB..3 * MIB].copy_from_slice(&noise(MIB, 22));
    for kind in KINDS {
        let image = Image::new(&dir, "disk", kind, &bytes);
        let server = image.serve(&["--read-only"]);
        let uri = server.uri("");
        let info = run("qemu-img", &["info", "--output=json", "-f", "raw", &uri]).json();
        assert_eq!(info["virtual-size"], 8 * MIB, "{info}");
        let map = run("qemu-img", &["map", "--output=json", "-f", "raw", &uri]).json();
        let rows: Vec<_> = map
            .as_array()
            .expect("rows")
            .iter()
            .map(|row| (row["start"].as_u64().expect("a number") / MIB as u64, row["zero"] == true))
            .collect();
        assert_eq!(rows, [(0, true), (2, false), (3, true)], "{kind:?}: {map}");
        let write = run("qemu-io", &["-f", "raw", "-c", "write 0 512", &uri]);
        assert_ne!(write.code, 0, "an export that is read-only: {write:?}");
        server.stop();
        assert_eq!(first_difference(&image.bytes(), &bytes), None);
    }
}

#[test]
fn qemu_io_does_every_kind_of_request() {
    requires!("qemu-io");
    let dir = Dir::new("qemu-io");
    for (index, way) in ways().into_iter().enumerate() {
        let kind = KINDS[(index + 2) % 3];
        let image = Image::new(&dir, "disk", kind, &vec![0x11; 4 * MIB]);
        let server = image.serve(way);
        let commands = [
            "read -P 0x11 0 4M",
            "write -P 0x22 100 70000",
            "write -f -P 0x33 1M 64k",
            "aio_write -P 0x44 1500k 3k",
            "aio_write -P 0x55 1503k 3k",
            "aio_flush",
            "write -z 2M 128k",
            "write -z -u 2200k 128k",
            "discard 3M 256k",
            "flush",
            "read -P 0x11 0 100",
            "read -P 0x22 100 70000",
            "read -P 0x11 70100 900000",
            "read -P 0x33 1M 64k",
            "read -P 0x44 1500k 3k",
            "read -P 0x55 1503k 3k",
            "read -P 0 2M 128k",
            "read -P 0 2200k 128k",
            "read -P 0x11 3328k 768k",
        ]
        .map(str::to_owned);
        qemu_io(&["-f", "raw", "-t", "writeback", &server.uri("")], &commands);
        server.stop();
        // The same again, from the image.
        let again: Vec<String> = commands
            .iter()
            .filter(|command| command.starts_with("read") && **command != commands[0])
            .cloned()
            .collect();
        qemu_io(&["-r", "-f", image.format, image.text()], &again);
        image.check();
    }
}

#[test]
fn several_exports_are_several_disks() {
    requires!("qemu-io");
    let dir = Dir::new("exports");
    let one = Image::new(&dir, "one", Kind::Qcow2, &patchy(4 * MIB, 23));
    let two = Image::new(&dir, "two", Kind::Clone, &patchy(4 * MIB, 24));
    let (first, second) = (format!("a={}", one.text()), format!("b={}", two.text()));
    let again = format!("c={}", one.text());
    let server = Server::start(&["--export", &first, "--export", &second, "--export", &again]);
    qemu_io(&["-f", "raw", &server.uri("a")], &["write -P 1 1M 1M".to_owned()]);
    qemu_io(&["-f", "raw", &server.uri("b")], &["write -P 2 1M 1M".to_owned()]);
    // One image under two names is one disk.
    qemu_io(&["-f", "raw", &server.uri("c")], &["read -P 1 1M 1M".to_owned(), "write -P 3 2M 1M".to_owned()]);
    qemu_io(&["-f", "raw", &server.uri("a")], &["read -P 3 2M 1M".to_owned()]);
    qemu_io(&["-f", "raw", &server.uri("b")], &["read -P 2 1M 1M".to_owned()]);
    let unknown = run("qemu-io", &["-f", "raw", "-c", "read 0 512", &server.uri("d")]);
    assert_ne!(unknown.code, 0, "{unknown:?}");
    server.stop();
    one.check();
    two.check();
}
