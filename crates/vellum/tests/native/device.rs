//! Images directly on a block device: none of its old content is ever visible, and it may grow while it is
//! used.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use rustix::process::Signal;

use super::support::client::{Client, READ, WRITE};
use super::support::dir::Dir;
use super::support::loops::LoopDevice;
use super::support::program::{Ran, vellum};
use super::support::server::Server;
use super::support::{PATIENCE, until};
use super::{MIB, check_says, refused};

const NO_SPACE: i32 = 28;

/// A device that is full of old bytes.
fn full_of_old_bytes(len: usize, block: u32) -> Option<LoopDevice> {
    let device = LoopDevice::new(len as u64, block)?;
    std::fs::write(&device.path, vec![0x77; len]).expect("old bytes");
    Some(device)
}

/// All of the disk, read from the outside: served, and converted.
#[track_caller]
fn reads_as(device: &str, model: &[u8], when: &str) {
    let server = Server::start(&["-r", device]);
    let bytes = Client::connect(&server.peer(), "").expect("a server").read_all().expect("all of it");
    server.stop();
    assert_eq!(bytes.iter().zip(model).position(|(is, should)| is != should), None, "{when}, served");
    let dir = Dir::new("device-copy");
    vellum(&["convert", "-O", "raw", device, &dir.text("copy")]).answer();
    let copy = std::fs::read(dir.join("copy")).expect("the copy");
    assert!(copy == model, "{when}, converted");
}

#[test]
fn what_a_device_held_is_never_seen() {
    for (block, options, size) in [
        (512, "layout=table,unit_size=64k,journal_size=64k", 30 * MIB),
        (4096, "layout=table,journal_size=1M", 30 * MIB),
        (512, "layout=zoned,zone_size=256k,journal_size=1M", 30 * MIB),
        (512, "", 16 * MIB),
        (512, "zeroed=on", 16 * MIB),
    ] {
        let Some(device) = full_of_old_bytes(40 * MIB, block) else { return };
        let device = device.text();
        let bytes = size.to_string();
        refused(&["zeroed=on"], &["create", "-f", "vellum", "-o", "layout=linear", &device, &bytes]);
        let said = if options.is_empty() { vec![] } else { vec!["-o", options] };
        vellum(&[&["create", "-f", "vellum"], &said[..], &[&device, &bytes]].concat()).answer();
        let mut model = vec![0; size];
        reads_as(&device, &model, "new");
        // Sectors here and there, so that most of each unit is what the format made of it; then they are let
        // go, and used again by others; at last by others still, after a crash.
        for round in 0..4_u8 {
            let server = Server::start(&[&device]);
            let mut client = Client::connect(&server.peer(), "").expect("a server");
            for i in 0..40 {
                let at = (i * 733_696 + usize::from(round) * 7 * 512) % (size - 512);
                let value = round * 40 + u8::try_from(i).expect("small") + 1;
                client.write(at as u64, &[value; 512], 0).expect("a write");
                model[at..at + 512].fill(value);
            }
            client.flush().expect("a flush");
            let half = usize::from(round % 2) * size / 2;
            client.trim(half as u64, u32::try_from(size / 2).expect("small")).expect("a discard");
            client.flush().expect("a flush");
            let all = client.read_all().expect("all of it");
            for (index, (is, should)) in all.iter().zip(&model).enumerate() {
                let may_be_gone = (half..half + size / 2).contains(&index);
                assert!(
                    is == should || (may_be_gone && *is == 0),
                    "{options}, round {round}: {index} reads {is}"
                );
            }
            model = all;
            if round == 2 {
                server.kill();
                vellum(&["recover", &device]).answer();
            } else {
                server.stop();
            }
            check_says(&device, 0);
            reads_as(&device, &model, &format!("{options}, round {round}"));
        }
    }
}

/// The byte that is written at a mebibyte of the disk.
fn value(at: u64) -> u8 {
    u8::try_from(at % 251 + 1).expect("a byte")
}

/// Writes one mebibyte after the other, from `from` on, until there is no space; returns where that was.
#[track_caller]
fn fill(client: &mut Client, from: u64, most: u64) -> u64 {
    for at in from..from + most {
        match client.write(at * MIB as u64, &vec![value(at); MIB], 0) {
            Ok(()) => {}
            Err(error) => {
                assert_eq!(error.raw_os_error(), Some(NO_SPACE), "{error}");
                return at;
            }
        }
    }
    from + most
}

#[track_caller]
fn holds(client: &mut Client, blocks: u64) {
    for at in 0..blocks {
        let bytes = client.read(at * MIB as u64, u32::try_from(MIB).expect("small")).expect("a read");
        assert!(bytes.iter().all(|byte| *byte == value(at)), "mebibyte {at}");
    }
}

/// A disk of 1 TiB on 32 MiB: it reports what it needs, and continues when it gets it.
#[test]
fn a_device_that_is_made_larger_by_hand() {
    let Some(device) = full_of_old_bytes(32 * MIB, 512) else { return };
    let path = device.text();
    refused(&["too small"], &["create", "-f", "vellum", "-o", "zeroed=on", &path, "1T"]);
    vellum(&["create", "-f", "vellum", "-o", "layout=table,journal_size=1M", &path, "1T"]).answer();
    let info = vellum(&["info", "--output", "json", &path]).json();
    assert_eq!(info["virtual-size"], 1_u64 << 40, "{info}");
    let server = Server::start(&[&path]);
    let mut client = Client::connect(&server.peer(), "").expect("a server");
    let full_at = fill(&mut client, 0, 100);
    assert!((20..31).contains(&full_at), "{full_at}");
    client.flush().expect("what was written is safe");
    server.says(&format!("{path} is full"));
    assert_eq!(fill(&mut client, full_at, 1), full_at, "full still");
    // 5 MiB and the rest of a unit.
    device.grow(37 * MIB as u64 + 512 * 1024);
    assert_eq!(fill(&mut client, full_at, 100), full_at + 5);
    client.write(full_at * MIB as u64, &vec![value(full_at); MIB], 0).expect("overwriting needs nothing");
    client.flush().expect("a flush");
    holds(&mut client, full_at + 5);
    std::thread::sleep(Duration::from_secs(1));
    let said = server.said();
    assert_eq!(said.matches(&format!("{path} is full")).count(), 1, "said once:\n{said}");
    assert!(said.contains("by at least 1048576 bytes"), "how much is missing:\n{said}");
    server.kill();
    let server = Server::start(&[&path]);
    holds(&mut Client::connect(&server.peer(), "").expect("a server"), full_at + 5);
    server.stop();
    check_says(&path, 0);
    // The size of the disk is another matter.
    vellum(&["resize", "-q", &path, "1100G"]).answer();
    vellum(&["resize", "-q", "--shrink", &path, "24M"]).answer();
    check_says(&path, 0);
    let server = Server::start(&[&path]);
    let mut client = Client::connect(&server.peer(), "").expect("a server");
    holds(&mut client, full_at.min(24));
    server.stop();
}

/// With a hook the guest sees nothing of it.
#[test]
fn a_hook_makes_the_device_larger_in_time() {
    let Some(device) = full_of_old_bytes(32 * MIB, 512) else { return };
    let (path, dir) = (device.text(), Dir::new("hook"));
    let script = dir.join("grow");
    let text = format!(
        "#!/bin/sh\nset -e\necho \"$@\" >> {}\ntruncate -s \"$2\" {}\nlosetup -c \"$1\"\n",
        dir.text("calls"),
        device.backing().display()
    );
    std::fs::write(&script, text).expect("a script");
    std::fs::set_permissions(&script, PermissionsExt::from_mode(0o755)).expect("ours");
    vellum(&["create", "-f", "vellum", "-o", "layout=table", &path, "1T"]).answer();
    let hook = format!("{} {{device}} {{size}} {{more}}", script.display());
    let server = Server::start(&[&path, "--grow-hook", &hook]);
    let mut client = Client::connect(&server.peer(), "").expect("a server");
    assert_eq!(fill(&mut client, 0, 200), 200, "{}", server.said());
    client.flush().expect("a flush");
    holds(&mut client, 200);
    server.stop();
    check_says(&path, 0);
    let calls = std::fs::read_to_string(dir.join("calls")).expect("it was called");
    assert!((3..=6).contains(&calls.lines().count()), "{calls}");
    // 64 MiB more than the 32 there were.
    assert_eq!(calls.lines().next(), Some(format!("{path} {} {}", 96 * MIB, 64 * MIB).as_str()), "{calls}");
}

#[test]
fn a_hook_that_does_not_help_and_hooks_that_make_no_sense() {
    let Some(device) = full_of_old_bytes(32 * MIB, 512) else { return };
    let path = device.text();
    vellum(&["create", "-f", "vellum", "-o", "layout=table", &path, "1T"]).answer();
    for (hook, words) in
        [("false", "exit status: 1"), ("true", "still has"), ("/no/such/program", "No such file")]
    {
        let server = Server::start(&[&path, "--grow-hook", hook]);
        let mut client = Client::connect(&server.peer(), "").expect("a server");
        let full_at = fill(&mut client, 0, 100);
        assert!(full_at < 31, "{full_at}");
        client.flush().expect("what was written is safe");
        server.says(words);
        server.says(" is full");
        holds(&mut client, full_at);
        server.stop();
    }
    check_says(&path, 0);
    let dir = Dir::new("no-device");
    let file = dir.text("disk.vlm");
    vellum(&["create", "-o", "layout=table", &file, "1G"]).answer();
    let server = |hook: &str| Server::try_start(&[&file, "--grow-hook", hook]).map(drop);
    for (hook, words) in
        [("true", "on a block device"), ("grow {it}", "placeholder {it}"), ("", "give a command")]
    {
        let ran = server(hook).expect_err("it makes no sense");
        assert!(ran.code == 1 && ran.err.contains(words), "{hook:?}: {ran:?}");
    }
}

/// `vellum COMMAND --control … REST`: its output, as JSON.
fn asked(control: &str, command: &str, rest: &[&str]) -> Ran {
    vellum(&[&[command, "--control", control, "--output", "json"], rest].concat())
}

/// A write that finds the device full is answered, also after a resize that changed nothing, and the server
/// ends.
#[test]
fn who_looks_after_the_device_does_so_after_a_resize() {
    let Some(device) = full_of_old_bytes(32 * MIB, 512) else { return };
    let (path, place) = (device.text(), Dir::short());
    let control = place.text("control");
    vellum(&["create", "-f", "vellum", "-o", "layout=table", &path, "1T"]).answer();
    for (size, code) in [("1T", 0), ("1G", 1), ("1000000T", 1), ("+1G", 0)] {
        let server = Server::start(&[&path, "--control", &control, "--grow-hook", "false"]);
        let ran = asked(&control, "resize", &[size]);
        assert_eq!(ran.code, code, "{size}: {ran:?}");
        let mut client = Client::connect(&server.peer(), "").expect("a server");
        assert!(fill(&mut client, 0, 100) < 31, "{size}");
        client.flush().expect("what was written is safe");
        server.stop();
    }
    check_says(&path, 0);
}

/// A server with a write for which its device has no room, and which waits for a hook that does not help, and
/// ends when it is let go.
struct Stuck {
    server: Server,
    _client: Client,
    control: String,
    place: Dir,
}

impl Stuck {
    fn on(device: &LoopDevice) -> Self {
        let (path, place) = (device.text(), Dir::short());
        let (control, script) = (place.text("control"), place.text("grow"));
        let (begun, hold) = (place.text("begun"), place.text("hold"));
        let text = format!("#!/bin/sh\ntouch {begun}\nwhile [ -e {hold} ]; do sleep 0.1; done\n");
        std::fs::write(&script, text).expect("a script");
        std::fs::set_permissions(&script, PermissionsExt::from_mode(0o755)).expect("ours");
        std::fs::write(&hold, "").expect("a file");
        vellum(&["create", "-f", "vellum", "-o", "layout=table", &path, "1T"]).answer();
        let server = Server::start(&[&path, "--control", &control, "--grow-hook", &script]);
        let mut client = Client::connect(&server.peer(), "").expect("a server");
        let len = u32::try_from(32 * MIB).expect("small");
        client.send(WRITE, 0, 0, len, &vec![7; 32 * MIB]).expect("sent");
        until("the hook is waited for", || Path::new(&begun).exists());
        Self { server, _client: client, control, place }
    }

    fn let_go(&self) {
        std::fs::remove_file(self.place.join("hold")).expect("it is there");
    }

    fn told(&self) -> serde_json::Value {
        asked(&self.control, "stats", &[]).json()["disks"][0].clone()
    }
}

/// No command queues behind a pause that cannot end, and one resume ends it.
#[test]
fn a_pause_that_waits_for_a_full_device_is_ended_by_one_resume() {
    let Some(device) = full_of_old_bytes(32 * MIB, 512) else { return };
    let stuck = Stuck::on(&device);
    let control = &stuck.control;
    std::thread::scope(|scope| {
        let first = scope.spawn(|| asked(control, "pause", &[]));
        until("it is being paused", || stuck.told()["state"] == "pausing");
        let second = asked(control, "pause", &[]);
        assert!(second.code == 1 && second.err.contains("it is being paused"), "{second:?}");
        assert_eq!(asked(control, "resume", &[]).json()["was-paused"], true);
        let first = first.join().expect("it ends");
        assert!(first.code == 1 && first.err.contains("resumed"), "{first:?}");
    });
    assert_eq!(stuck.told()["state"], "running");
    stuck.let_go();
    stuck.server.kill();
}

/// A server that is asked to end also handles the second signal, while a resize waits for a write; and ends
/// when that is answered.
#[test]
fn a_server_ends_while_a_resize_cannot() {
    let Some(device) = full_of_old_bytes(32 * MIB, 512) else { return };
    let stuck = Stuck::on(&device);
    let control = stuck.control.clone();
    let mut other = Client::connect(&stuck.server.peer(), "").expect("a server");
    std::thread::scope(|scope| {
        scope.spawn(|| asked(&control, "resize", &["+1G"]));
        until("the resize waits, and others wait for it", || {
            other.send(READ, 0, 0, 512, &[]).expect("sent");
            stuck.told()["held"].as_u64() > Some(0)
        });
        stuck.server.signal(Signal::TERM);
        until("it has heard that", || !stuck.server.socket().exists());
        stuck.server.signal(Signal::TERM);
        let said = stuck.server.says("closing the remaining connections");
        assert!(!said.contains("still has"), "only when the hook had ended:\n{said}");
        stuck.let_go();
        let ran = stuck.server.wait(PATIENCE);
        assert_eq!(ran.code, 0, "{ran:?}");
    });
    check_says(&device.text(), 0);
}
