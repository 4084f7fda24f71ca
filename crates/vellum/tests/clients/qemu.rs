//! QEMU's own programs as clients.

use super::support::program::{path_text, qemu_io, run, succeed};
use super::support::server::{Foreign, Server};
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

/// QEMU chooses extended headers where they are offered. Its trace shows that a request of more than 4 GiB is
/// a single one.
#[test]
fn qemu_io_zeroes_six_gib_in_one_request() {
    requires!("qemu-io");
    const GIB: usize = 1 << 30;
    let dir = Dir::new("qemu-extended");
    for kind in [Kind::Raw, Kind::Qcow2] {
        let path = dir.text("disk");
        let format = if kind == Kind::Raw { "raw" } else { "qcow2" };
        succeed("qemu-img", &["create", "-q", "-f", format, &path, "16G"]);
        let server = Server::start(&["-f", format, &path]);
        let uri = server.uri("");
        let trace = ["-T", "enable=nbd_send_request", "-f", "raw"];
        let script = [
            "write -P 7 1G 1M",
            "write -P 8 7G 64k",
            // With a hole, as the host need not have 6 GiB to spare.
            "write -z -u -n 512M 6G",
            "read -P 0 1G 1M",
            "write -P 9 1G 1M",
            "write -z -n 1G 1M",
            "read -P 0 1G 1M",
            "read -P 8 7G 64k",
            "write -z -u -n 0 16G",
            "read -P 0 7G 1M",
        ];
        let commands: Vec<&str> = script.iter().flat_map(|line| ["-c", line]).collect();
        let ran = run("qemu-io", &[&trace[..], &commands, &[&uri]].concat());
        assert_eq!(ran.code, 0, "{kind:?}: {ran:?}");
        assert!(!ran.out.contains("failed"), "{kind:?}: {ran:?}");
        if ran.err.contains("nbd_send_request") {
            for len in [6 * GIB, 16 * GIB] {
                assert!(ran.err.contains(&format!(".len = {len},")), "{kind:?}: {ran:?}");
            }
        }
        let map = run("qemu-img", &["map", "--output=json", "-f", "raw", &uri]).json();
        let rows = map.as_array().expect("rows");
        assert!(rows.iter().all(|row| row["zero"] == true), "{kind:?}: {map}");
        server.stop();
        if kind == Kind::Qcow2 {
            succeed("qemu-img", &["check", "-q", "-f", format, &path]);
        }
        std::fs::remove_file(&path).expect("it is there");
    }
}

/// Chains as `qemu-nbd --allocation-depth` reports them, queried with libnbd and with QEMU.
#[test]
fn allocation_depth_is_what_qemu_nbd_says() {
    requires!("qemu-nbd");
    requires!("nbdinfo");
    let dir = Dir::short();
    let path = |name: &str| dir.text(name);
    let create = |name: &str, format: &str, below: Option<(&str, &str)>, size: &str, script: &[&str]| {
        let mut arguments = vec!["create".to_owned(), "-q".to_owned(), "-f".to_owned(), format.to_owned()];
        if let Some((below, its_format)) = below {
            arguments.extend(["-b".to_owned(), path(below), "-F".to_owned(), its_format.to_owned()]);
        }
        arguments.extend([path(name), size.to_owned()]);
        succeed("qemu-img", &arguments);
        let script: Vec<String> = script.iter().map(|&line| line.to_owned()).collect();
        qemu_io(&["-f", format, &path(name)], &script);
    };
    create("base", "raw", None, "6M", &["write -q 0 64k", "write -q 3M 64k"]);
    let middle = ["write -q 1M 128k", "write -q -z 2M 64k", "write -q 7M 64k"];
    create("middle", "qcow2", Some(("base", "raw")), "8M", &middle);
    let top = ["write -q 1M 64k", "write -q -z -u 4M 64k", "write -q 9M 64k"];
    create("top", "qcow2", Some(("middle", "qcow2")), "10M", &top);
    let below = ["write -q 0 64k", "write -q -z -u 3M 64k", "discard -q 0 64k", "write -q 5M 64k"];
    create("below", "qcow2", None, "6M", &below);
    let over = ["write -q 1M 64k", "discard -q 5M 64k", "write -q 512 512"];
    create("over", "qcow2", Some(("below", "qcow2")), "6M", &over);
    for (name, format, rows_min) in
        [("base", "raw", 1), ("middle", "qcow2", 4), ("top", "qcow2", 9), ("over", "qcow2", 6)]
    {
        let image = path(name);
        let qemu = Foreign::start("qemu-nbd", |socket| {
            ["-r", "-A", "-t", "-f", format, "-k", socket, &image].map(str::to_owned).to_vec()
        });
        let server = Server::start(&["-r", "-f", format, &image]);
        let theirs = qemu.uri("");
        for context in ["base:allocation", "qemu:allocation-depth"] {
            let ask = |uri: &str| succeed("nbdinfo", &[&format!("--map={context}"), uri]);
            assert_eq!(ask(&server.uri("")), ask(&theirs), "{name}, {context}");
        }
        // Over extended headers, as QEMU itself queries; it shows a status that is not 0 as data that is
        // missing.
        let ask = |socket: &str| {
            let options = format!(
                "driver=nbd,server.type=unix,server.path={socket},x-dirty-bitmap=qemu:allocation-depth"
            );
            run("qemu-img", &["map", "--output=json", "--image-opts", &options]).json()
        };
        let (ours, theirs) = (ask(path_text(&server.socket())), ask(path_text(qemu.socket())));
        assert_eq!(ours, theirs, "{name}");
        let map = succeed("nbdinfo", &["--map=qemu:allocation-depth", &server.uri("")]);
        assert!(map.lines().count() >= rows_min, "{name} has a map worth comparing: {map}");
        server.stop();
        qemu.kill();
    }
}
