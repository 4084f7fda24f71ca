//! An export of an NBD server as the base of other images.

use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::path::Path;
use std::time::Duration;

use super::support::client::Client;
use super::support::dir::Dir;
use super::support::program::{Ran, vellum};
use super::support::server::{Foreign, Server};
use super::support::{first_difference, patchy, until};
use crate::requires;

const LEN: usize = 4 << 20;

/// It fails with these words, in one line.
#[track_caller]
fn refused(arguments: &[&str], words: &[&str]) {
    says_no(&vellum(arguments), arguments, words);
}

#[track_caller]
fn says_no(ran: &Ran, arguments: &[&str], words: &[&str]) {
    assert_eq!((ran.code, ran.err.lines().count()), (1, 1), "{arguments:?}: {ran:?}");
    assert!(words.iter().all(|word| ran.err.contains(word)), "{arguments:?}: {}", ran.err);
}

#[track_caller]
fn not_served(arguments: &[&str], words: &[&str]) {
    let ran = Server::try_start(arguments).err().expect("it is not served");
    assert!(words.iter().all(|word| ran.err.contains(word)), "{arguments:?}: {}", ran.err);
}

fn raw_in(dir: &Dir, seed: u64) -> (String, Vec<u8>) {
    let (raw, bytes) = (dir.text("base.raw"), patchy(LEN, seed));
    std::fs::write(&raw, &bytes).expect("a file");
    (raw, bytes)
}

/// A clone over an export that is trusted.
#[track_caller]
fn trusting(uri: &str, format: &str, image: &str) {
    vellum(&["create", "-q", "-f", format, "--trust-base", "-b", uri, "-F", "raw", image]).answer();
}

/// Clones over this export, from being made to standing alone.
#[track_caller]
fn bears_clones(uri: &str, disk: &[u8]) {
    let dir = Dir::new("nbd-base");
    for format in ["qcow2", "vellum"] {
        let image = dir.text(&format!("clone.{format}"));
        let create = ["create", "-q", "-f", format, "-b", uri, "-F", "raw", &image];
        refused(&create, &["--trust-base", uri]);
        assert!(!Path::new(&image).exists());
        trusting(uri, format, &image);
        let pin = vellum(&["info", "--output", "json", &image]).json()["backing-pin"][0].clone();
        assert_eq!((pin["kind"].as_str(), pin["length"].as_u64()), (Some("trusted"), Some(LEN as u64)));

        not_served(&["-f", format, &image], &["--allow-url", uri]);
        let served = Server::start(&["-f", format, "--allow-url", uri, "--copy-on-read", &image]);
        let mut guest = Client::connect(&served.peer(), "").expect("a connection");
        let mut now = disk.to_vec();
        guest.write(1 << 20, &[9; 70_000], 0).expect("written");
        now[1 << 20..(1 << 20) + 70_000].fill(9);
        assert_eq!(first_difference(&guest.read_all().expect("read"), &now), None, "{format}");
        guest.disconnect();
        served.stop();

        let copy = dir.text("copy.raw");
        let convert = ["convert", "-f", format, "--allow-url", uri, "-O", "raw", &image, &copy];
        vellum(&convert).answer();
        assert_eq!(first_difference(&std::fs::read(&copy).expect("a copy"), &now), None, "{format}");
        vellum(&["flatten", "-f", format, "--allow-url", uri, &image]).answer();
        vellum(&["compare", "-f", format, "-F", "raw", &image, &copy]).answer();
    }
    let clones = [dir.text("a.qcow2"), dir.text("b.vlm")];
    refused(&["clone", "-F", "raw", uri, &clones[0]], &["--trust-base"]);
    vellum(&["clone", "-F", "raw", "--trust-base", uri, &clones[0], &clones[1]]).answer();
    for clone in &clones {
        assert_eq!(vellum(&["info", "--output", "json", clone]).json()["backing-pin"][0]["kind"], "trusted");
    }
}

#[test]
fn an_export_of_our_own_server_is_a_base_where_it_is_trusted() {
    let dir = Dir::new("nbd-base-own");
    let (raw, disk) = raw_in(&dir, 1);
    let server =
        Server::start(&["-r", "-f", "raw", "--nbd", "tcp:127.0.0.1:0", "--export", &format!("d={raw}")]);
    bears_clones(&server.tcp_uri("d"), &disk);
    server.stop();
}

#[test]
fn exports_of_other_servers_are_bases_where_they_are_trusted() {
    requires!("qemu-nbd", "nbdkit");
    let dir = Dir::short();
    let (raw, disk) = raw_in(&dir, 2);
    let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<String>>();
    let qemu = Foreign::start("qemu-nbd", |socket| words(&format!("-f raw -x d -t -r -k {socket} {raw}")));
    bears_clones(&qemu.uri("d"), &disk);
    let kit = Foreign::start("nbdkit", |socket| words(&format!("-f -r -U {socket} file {raw}")));
    bears_clones(&kit.uri(""), &disk);
}

/// An image that another program made over an export records nothing of it.
#[test]
fn an_image_without_a_pin_is_read_and_not_written_until_its_base_is_trusted() {
    let dir = Dir::new("nbd-base-unpinned");
    let (raw, disk) = raw_in(&dir, 3);
    let server = Server::start(&["-r", "-f", "raw", "--export", &format!("d={raw}")]);
    let (uri, image, copy) = (server.uri("d"), dir.text("clone.qcow2"), dir.text("copy.raw"));
    let size = LEN.to_string();
    vellum(&["create", "-q", "-f", "qcow2", "-u", "-b", &uri, "-F", "raw", &image, &size]).answer();
    assert!(vellum(&["info", "--output", "json", &image]).json().get("backing-pin").is_none());

    vellum(&["convert", "--allow-url", &uri, "-O", "raw", &image, &copy]).answer();
    assert_eq!(first_difference(&std::fs::read(&copy).expect("a copy"), &disk), None);
    vellum(&["map", "--allow-url", &uri, &image]).answer();
    let served = Server::start(&["-r", "--allow-url", &uri, &image]);
    let mut guest = Client::connect(&served.peer(), "").expect("a connection");
    assert_eq!(first_difference(&guest.read_all().expect("read"), &disk), None);
    guest.disconnect();
    served.stop();

    let remedy = &["nothing proves that", "--trust-base", &*uri][..];
    refused(&["flatten", "--allow-url", &uri, &image], remedy);
    not_served(&["--allow-url", &uri, &image], remedy);
    not_served(&["--allow-url", &uri, "--copy-on-read", &image], remedy);
    not_served(&["--allow-url", &uri, "--prefetch", &image], remedy);
    Server::start(&["--allow-url", &uri, "--trust-base", &image]).stop();
    Server::start(&["--allow-url", &uri, "--copy-on-read", &image]).stop();

    // An image above takes the word of its own pin for all that is below.
    let top = dir.text("top.qcow2");
    let create = ["create", "-q", "-f", "qcow2", "--allow-url", &uri, "-b", &image, "-F", "qcow2", &top];
    refused(&create, &["--trust-base"]);
    vellum(&[&create[..], &["--trust-base"]].concat()).answer();
    Server::start(&["--allow-url", &uri, &top]).stop();
    server.stop();
}

#[test]
fn reads_are_held_while_the_server_is_away_and_another_size_is_never_mixed_in() {
    let dir = Dir::new("nbd-base-away");
    let (raw, disk) = raw_in(&dir, 4);
    let export = format!("d={raw}");
    let serve = |address: &str| Server::start(&["-r", "-f", "raw", "--nbd", address, "--export", &export]);
    let base = serve("tcp:127.0.0.1:0");
    let (uri, address) = (base.tcp_uri("d"), format!("tcp:{}", base.tcp()));
    let image = dir.text("clone.qcow2");
    trusting(&uri, "qcow2", &image);
    let served = Server::start(&["--allow-url", &uri, &image]);
    let mut guest = Client::connect(&served.peer(), "").expect("a connection");
    guest.write(0, &[7; 65_536], 0).expect("written");
    base.kill();
    let base = std::thread::scope(|scope| {
        let reading = scope.spawn(|| guest.read(1 << 20, 4096));
        std::thread::sleep(Duration::from_millis(300));
        assert!(!reading.is_finished(), "it is held");
        let base = serve(&address);
        let read = reading.join().expect("no panic").expect("in the end");
        assert_eq!(read, disk[1 << 20..(1 << 20) + 4096]);
        base
    });
    guest.disconnect();
    served.stop();

    let served = Server::start(&["--allow-url", &uri, "--remote-timeout", "1", &image]);
    let mut guest = Client::connect(&served.peer(), "").expect("a connection");
    base.kill();
    assert!(guest.read(2 << 20, 4096).is_err(), "it is given up");
    assert_eq!(guest.read(0, 4096).expect("its own"), [7; 4096]);
    let base = serve(&address);
    until("it is tried again", || {
        guest.read(2 << 20, 4096).is_ok_and(|read| read == disk[2 << 20..(2 << 20) + 4096])
    });
    base.kill();
    std::fs::write(&raw, patchy(LEN / 2, 5)).expect("a file");
    let base = serve(&address);
    assert!(guest.read(1 << 20, 4096).is_err(), "other bytes are never given");
    assert_eq!(guest.read(0, 4096).expect("its own"), [7; 4096]);
    guest.disconnect();
    served.stop();
    not_served(
        &["--allow-url", &uri, &image],
        &["has changed: it was", "bytes that nothing proves", "make a new"],
    );
    base.stop();
}

/// Servers that say other things than NBD servers say.
#[test]
fn a_hostile_server_gives_nothing_and_takes_nothing() {
    const GREETING: &[u8] = b"NBDMAGICIHAVEOPT\0\x03";
    /// A reply to an option: its number, kind and length, and data.
    fn reply(option: u32, kind: u32, len: u32, data: &[u8]) -> Vec<u8> {
        let head = 0x0003_e889_0455_65a9_u64.to_be_bytes();
        [&head[..], &option.to_be_bytes(), &kind.to_be_bytes(), &len.to_be_bytes(), data].concat()
    }
    let unsupported = reply(8, 0x8000_0001, 0, &[]);
    let facts = |size: u64| [&0_u16.to_be_bytes()[..], &size.to_be_bytes(), &3_u16.to_be_bytes()].concat();
    let go = |size: u64| [reply(7, 3, 12, &facts(size)), reply(7, 1, 0, &[])].concat();
    for (says, words) in [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(), "no NBD server"),
        (b"NBDMAGIC\0\0\x42\x02\x81\x86\x12\x53".to_vec(), "oldstyle"),
        ([GREETING, &reply(8, 1, u32::MAX, &[])].concat(), "too long"),
        ([GREETING, &reply(9, 1, 0, &[])].concat(), "no reply to it"),
        ([GREETING, &unsupported, &go(u64::MAX)].concat(), "impossible"),
        ([GREETING, &unsupported, &reply(7, 1, 0, &[])].concat(), "size"),
        ([GREETING, &unsupported, &reply(7, 3, 12, &facts(LEN as u64))].concat(), ""),
    ] {
        let uri = says_only(says);
        refused(&["info", &uri], &[words, &uri]);
    }
    // It opens, and answers requests that nobody made.
    let dir = Dir::new("nbd-base-hostile");
    let image = dir.text("clone.qcow2");
    let uri = says_only([GREETING, &unsupported, &go(LEN as u64), &[0x67; 4096]].concat());
    trusting(&uri, "qcow2", &image);
    let served = Server::start(&["--allow-url", &uri, "--remote-timeout", "1", &image]);
    let mut guest = Client::connect(&served.peer(), "").expect("a connection");
    guest.write(0, &[7; 65_536], 0).expect("written");
    assert!(guest.read(1 << 20, 4096).is_err(), "it is given up");
    assert_eq!(guest.read(0, 4096).expect("its own"), [7; 4096]);
    guest.disconnect();
    served.stop();
}

/// A server that says this to each client. It ends with the test.
fn says_only(words: Vec<u8>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let uri = format!("nbd://{}/d", listener.local_addr().expect("an address"));
    std::thread::spawn(move || {
        for mut client in listener.incoming().flatten() {
            drop(client.write_all(&words));
            drop(client.shutdown(std::net::Shutdown::Write));
            std::thread::spawn(move || drop(client.read_to_end(&mut Vec::new())));
        }
    });
    uri
}
