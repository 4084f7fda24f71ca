//! A virtual machine lives on when its server is killed: the next server accepts it only if nothing is
//! missing of what was acknowledged to it.

#![allow(unreachable_pub, reason = "the modules of a test are its own")]

#[path = "../../../vellum-export/tests/support/guest.rs"]
mod guest;
#[path = "../support/mod.rs"]
mod support;

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

use guest::{FEATURES, Machine, Memory, Queue, Shape};
use support::client::Client;
use support::dir::Dir;
use support::loops::Failing;
use support::program::vellum;
use support::server::Server;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserInflight;

const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const OK: u8 = 0;

/// What a front end keeps of a server that was killed.
struct Kept {
    inflight: VhostUserInflight,
    book: File,
}

fn connect<'a>(path: &str, memory: &'a Memory) -> Machine<'a> {
    Machine::over(UnixStream::connect(path).expect("it listens"), memory, FEATURES)
}

/// Connects for the first time, with a book, and writes: answered, not flushed.
fn first<'a>(path: &str, memory: &'a Memory) -> (Machine<'a>, Queue<'a>, Kept) {
    let mut machine = connect(path, memory);
    let wanted = VhostUserInflight::new(0, 0, 1, 16);
    let (inflight, book) = machine.front_end.get_inflight_fd(&wanted).expect("a book");
    machine.front_end.set_inflight_fd(&inflight, book.as_raw_fd()).expect("it is used");
    let mut queue = machine.start_queue(0, 16, 0);
    for sector in 0..8 {
        assert_eq!(queue.ask(OUT, sector * 128, &[7; 512], 0, Shape::Usual).status, OK);
    }
    (machine, queue, Kept { inflight, book })
}

/// Connects again with the same book.
fn again<'a>(path: &str, memory: &'a Memory, queue: &Queue<'_>, kept: &Kept) -> vhost::Result<Machine<'a>> {
    let mut machine = connect(path, memory);
    machine.front_end.set_inflight_fd(&kept.inflight, kept.book.as_raw_fd())?;
    machine.try_start(queue, queue.next_used)?;
    Ok(machine)
}

fn image(dir: &Dir, format: &str, options: &str) -> String {
    let image = dir.text("image");
    let options: &[&str] = if options.is_empty() { &[] } else { &["-o", options] };
    vellum(&[&["create", "-q", "-f", format][..], options, &[&image, "8M"]].concat()).answer();
    image
}

const KINDS: [(&str, &str); 4] =
    [("qcow2", ""), ("qcow2", "journal=off"), ("vellum", ""), ("vellum", "layout=table")];

#[test]
fn a_machine_whose_server_was_killed_is_refused_until_it_is_reset() {
    for (format, options) in KINDS {
        let (dir, place, memory) = (Dir::new("reconnect"), Dir::short(), Memory::new());
        let (image, path) = (image(&dir, format, options), place.text("vhost"));
        let serve = [image.as_str(), "--vhost-user-blk", &path];
        let server = Server::start(&serve);
        let (machine, queue, kept) = first(&path, &memory);
        server.kill();
        drop(machine);
        // A recovery of the image in between does not change that.
        vellum(&["recover", &image]);

        let server = Server::start(&serve);
        assert!(again(&path, &memory, &queue, &kept).is_err(), "{format} {options}");
        assert!(again(&path, &memory, &queue, &kept).is_err(), "{format} {options}: nor if it tries again");
        let said = server.says("Reset the virtual machine");
        assert_eq!(
            said.matches("Reset the virtual machine").count(),
            1,
            "once, however often it tries: {said}"
        );
        assert!(said.contains("WARN"), "{said}");

        // After a reset it begins anew, and may then come and go as it likes.
        memory.forget();
        let (machine, queue, kept) = first(&path, &memory);
        drop(machine);
        let machine = again(&path, &memory, &queue, &kept).expect("this server knows it");
        drop(machine);
        server.stop();
        let server = Server::start(&serve);
        let mut queue = queue;
        let machine = again(&path, &memory, &queue, &kept).expect("its server ended in good order");
        let read = queue.ask(IN, 0, &[], 512, Shape::Usual);
        assert!(read.status == OK && read.data == [7; 512], "{format} {options}");
        drop(machine);
        server.stop();
    }
}

#[test]
fn a_machine_of_a_durable_server_goes_on_and_misses_nothing() {
    for (format, options) in KINDS {
        let (dir, place, memory) = (Dir::new("durable"), Dir::short(), Memory::new());
        let (image, path) = (image(&dir, format, options), place.text("vhost"));
        let serve = [image.as_str(), "--vhost-user-blk", &path, "--durable"];
        let server = Server::start(&serve);
        let (machine, mut queue, kept) = first(&path, &memory);
        server.kill();
        drop(machine);
        let server = Server::start(&serve);
        let machine = again(&path, &memory, &queue, &kept).expect("it goes on");
        for sector in 0..8 {
            let read = queue.ask(IN, sector * 128, &[], 512, Shape::Usual);
            assert!(
                read.status == OK && read.data == [7; 512],
                "{format} {options}: sector {}",
                sector * 128
            );
        }
        assert_eq!(queue.ask(FLUSH, 0, &[], 0, Shape::Usual).status, OK);
        assert!(!server.said().contains("was not closed"), "{}", server.said());
        drop(machine);
        // What is missing is not made up for by serving it in another way from now on.
        server.kill();
        let server = Server::start(&serve[..3]);
        let machine = again(&path, &memory, &queue, &kept).expect("nothing is missing yet");
        server.kill();
        drop(machine);
        let server = Server::start(&serve);
        assert!(again(&path, &memory, &queue, &kept).is_err(), "{format} {options}");
        server.stop();
    }
}

/// A raw disk has what was answered, as long as the host lives.
#[test]
fn a_machine_on_a_raw_disk_goes_on() {
    let (dir, place, memory) = (Dir::new("raw"), Dir::short(), Memory::new());
    let (image, path) = (image(&dir, "raw", ""), place.text("vhost"));
    let serve = ["-f", "raw", &image, "--vhost-user-blk", &path];
    let server = Server::start(&serve);
    let (machine, mut queue, kept) = first(&path, &memory);
    server.kill();
    drop(machine);
    let server = Server::start(&serve);
    let machine = again(&path, &memory, &queue, &kept).expect("it goes on");
    assert_eq!(queue.ask(IN, 128, &[], 512, Shape::Usual).data, [7; 512]);
    drop(machine);
    server.stop();
}

/// NBD clients cannot be recognised: the log names what may be missing.
#[test]
fn what_nbd_clients_may_miss_is_said() {
    for (arguments, is_said) in [(&[][..], true), (&["--durable"][..], false)] {
        let dir = Dir::new("nbd");
        let image = image(&dir, "qcow2", "");
        let server = Server::start(&[&[image.as_str()][..], arguments].concat());
        let mut client = Client::connect(&server.peer(), "").expect("a server");
        client.write(0, &[1; 4096], 0).expect("written");
        assert!(!server.said().contains("was not closed"), "{}", server.said());
        server.kill();
        let server = Server::start(&[&[image.as_str()][..], arguments].concat());
        assert_eq!(server.said().contains("was not closed by its last server"), is_said, "{}", server.said());
        server.stop();
    }
}

/// A front end that has had no report of lost writes by the time the server ends is not accepted by the next
/// one.
#[test]
fn a_machine_that_was_not_told_of_lost_writes_is_refused_by_the_next_server() {
    for hears in [false, true] {
        let Some(device) = Failing::new() else { return };
        let (place, memory) = (Dir::short(), Memory::new());
        let (path, control) = (place.text("vhost"), place.text("control"));
        let serve = ["-f", "raw", &device.path, "--vhost-user-blk", &path, "--control", &control];
        let server = Server::start(&serve);
        let (machine, mut queue, kept) = first(&path, &memory);
        device.fail();
        assert_eq!(queue.ask(OUT, 8 * 2048, &[7; 4096], 0, Shape::Usual).status, OK);
        assert_eq!(vellum(&["pause", "--control", &control]).code, 1, "its flush fails");
        device.succeed();
        vellum(&["export", "reopen", "--control", &control]).answer();
        if hears {
            assert_ne!(queue.ask(FLUSH, 0, &[], 0, Shape::Usual).status, OK);
        }
        drop(machine);
        server.stop();
        let server = Server::start(&serve);
        assert_eq!(again(&path, &memory, &queue, &kept).is_ok(), hears);
        server.stop();
    }
}

/// The flush that failed was not the machine's, which comes and goes meanwhile.
#[test]
fn a_machine_hears_once_of_writes_that_were_lost_behind_its_back() {
    for comes_back in [false, true] {
        let Some(device) = Failing::new() else { return };
        let (place, memory) = (Dir::short(), Memory::new());
        let (path, control) = (place.text("vhost"), place.text("control"));
        let server =
            Server::start(&["-f", "raw", &device.path, "--vhost-user-blk", &path, "--control", &control]);
        let (mut machine, mut queue, kept) = first(&path, &memory);
        assert_eq!(queue.ask(FLUSH, 0, &[], 0, Shape::Usual).status, OK);
        device.fail();
        let put = queue.ask(OUT, 8 * 2048, &[7; 4096], 0, Shape::Usual);
        assert_eq!(put.status, OK, "into the page cache");
        assert_eq!(vellum(&["pause", "--control", &control]).code, 1, "its flush fails");
        device.succeed();
        vellum(&["export", "reopen", "--control", &control]).answer();
        if comes_back {
            drop(machine);
            machine = again(&path, &memory, &queue, &kept).expect("this server knows it");
        }
        assert_ne!(queue.ask(FLUSH, 0, &[], 0, Shape::Usual).status, OK, "its writes may be gone");
        assert_eq!(queue.ask(FLUSH, 0, &[], 0, Shape::Usual).status, OK, "it was told once");
        drop(machine);
        server.stop();
    }
}
