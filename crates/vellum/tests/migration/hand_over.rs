//! A disk that moves between two servers while it is used, and every step killed.

use std::cell::RefCell;
use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;

use super::support::client::{Answer, Client, WRITE};
use super::support::dir::Dir;
use super::support::program::{Ran, has, run, vellum, vellum_command};
use super::support::server::Server;
use super::support::until;

pub const MIB: u64 = 1 << 20;

/// A source, its target, and where both are served: at the same addresses after each start.
pub struct Move {
    pub dir: Dir,
    pub place: Dir,
    format: String,
    pub number: String,
    /// What the step accept has said.
    receipt: RefCell<String>,
}

impl Move {
    /// Starts the source, with the options of an image of this kind, and prepares the target.
    #[track_caller]
    pub fn new(format: &str, options: &str) -> (Self, Server) {
        let (dir, place) = (Dir::new("migrate"), Dir::short());
        let mut moved = Self {
            dir,
            place,
            format: format.to_owned(),
            number: String::new(),
            receipt: RefCell::default(),
        };
        let source = moved.source();
        let mut create = vec!["create", "-f", format];
        if !options.is_empty() {
            create.extend(["-o", options]);
        }
        vellum(&[&create[..], &[&source, "8M"]].concat()).answer();
        let from = moved.serve_source(&[]);
        let (target, uri) = (moved.target(), moved.uri());
        let prepared = ["migrate", "prepare", "--output", "json", "-f", format, "--from", &uri, &target];
        vellum(&prepared).json()["number"].as_str().expect("a number").clone_into(&mut moved.number);
        (moved, from)
    }

    pub fn source(&self) -> String {
        self.dir.text("source")
    }

    pub fn target(&self) -> String {
        self.dir.text("target")
    }

    pub fn control(&self, image: &str) -> String {
        self.place.text(&format!("{image}.control"))
    }

    /// Where the target reads from the source.
    pub fn uri(&self) -> String {
        format!("nbd+unix:///disk?socket={}", self.place.text("nbd"))
    }

    #[track_caller]
    pub fn serve_source(&self, more: &[&str]) -> Server {
        let (control, export) = (self.control("source"), format!("disk={}", self.source()));
        let address = format!("unix:{}", self.place.text("nbd"));
        let always = ["-f", &self.format, "--control", &control, "--nbd", &address, "--export", &export];
        Server::start(&[&always[..], more].concat())
    }

    #[track_caller]
    pub fn serve_target(&self, more: &[&str]) -> Server {
        let (control, export) = (self.control("target"), format!("disk={}", self.target()));
        let uri = self.uri();
        let always = ["-f", &self.format, "--control", &control, "--allow-url", &uri, "--export", &export];
        Server::start(&[&always[..], more].concat())
    }

    /// A command that needs both servers.
    fn arguments(&self, command: &str) -> Vec<String> {
        let (from, to) = (self.control("source"), self.control("target"));
        let words =
            ["migrate", command, "--output", "json", "--source-control", &from, "--target-control", &to];
        words.map(str::to_owned).to_vec()
    }

    pub fn migrate(&self, command: &str) -> Ran {
        let arguments = self.arguments(command);
        vellum(&arguments.iter().map(String::as_str).collect::<Vec<_>>())
    }

    #[track_caller]
    pub fn step(&self, name: &str, image: &str, number: &str) -> Ran {
        let (control, receipt) = (self.control(image), self.receipt.borrow().clone());
        let words = ["migrate", "step", name, "--control", &control, "--number", number, "--output", "json"];
        if name == "seal" {
            return vellum(&[&words[..], &["--receipt", &receipt]].concat());
        }
        let ran = vellum(&words);
        if name == "accept" && ran.code == 0 {
            let said = ran.clone().json();
            said["receipt"].as_str().expect("a receipt").clone_into(&mut self.receipt.borrow_mut());
        }
        ran
    }

    /// What an image says of the migration.
    pub fn says(&self, image: &str) -> Option<String> {
        let facts = vellum(&["info", "--output", "json", "-f", &self.format, &self.dir.text(image)]).json();
        let data = &facts["format-specific"]["data"];
        data["migration"]["state"].as_str().map(str::to_owned)
    }
}

#[track_caller]
pub fn client(server: &Server) -> Client {
    Client::connect(&server.peer(), "disk").expect("the export is there")
}

#[track_caller]
pub fn is_refused(ran: &Ran, words: &[&str]) {
    assert_eq!((ran.code, ran.err.lines().count()), (1, 1), "{ran:?}");
    assert!(words.iter().all(|word| ran.err.contains(word)), "{words:?}: {}", ran.err);
}

#[test]
fn a_disk_moves_while_it_is_used_and_nothing_is_lost() {
    for (format, options) in [("qcow2", ""), ("vellum", "layout=table"), ("vellum", "")] {
        let (moved, from) = Move::new(format, options);
        let mut writer = client(&from);
        for at in 0..32 {
            writer.write(at * 65_536, &[1; 4096], 0).expect("written");
        }
        let to = moved.serve_target(&[]);
        // The target runs at once: what the source writes is read there, and writes wait.
        let mut reader = client(&to);
        writer.write(0, &[2; 4096], 0).expect("written");
        assert_eq!(reader.read(0, 1).expect("read"), [2]);
        let waits = reader.send(WRITE, 0, 4096, 4096, &[3; 4096]).expect("sent");
        let status = moved.migrate("status").json();
        assert_eq!((&status["target"]["state"], &status["next"]["run"]), (&"awaiting".into(), &"fix".into()));
        writer.write(8192, &[4; 4096], 0).expect("written: the source is still the writer");
        let done = moved.migrate("run").json();
        assert_eq!(done["steps"], serde_json::json!(["fix", "accept", "seal"]));
        assert!(done["downtime-us"].as_u64().is_some_and(|micros| micros > 0), "{done}");
        assert_eq!(reader.answer().expect("now"), Answer { cookie: waits, error: 0 });
        writer.write(0, &[9; 4096], 0).expect_err("the source is written no more");
        for (at, value) in [(0, 2), (4096, 3), (8192, 4), (31 * 65_536, 1), (5 * MIB, 0)] {
            assert_eq!(reader.read(at, 1).expect("read"), [value], "{format} at {at}");
        }
        reader.flush().expect("flushed");
        assert_eq!(moved.migrate("run").json()["steps"], Value::Array(Vec::new()), "done is done");
        is_refused(&moved.migrate("abort"), &["has taken over"]);
        to.stop();
        from.stop();
        // The source is never written again, by no command.
        let source = moved.source();
        for command in
            [&["resize", "-f", format, &source, "16M"][..], &["check", "-f", format, "-r", "all", &source]]
        {
            let ran = vellum(command);
            assert!(ran.code != 0 && ran.err.contains("has moved"), "{command:?}: {ran:?}");
        }
        if format == "qcow2" && has("qemu-io") {
            let ran = run("qemu-io", &["-f", format, "-c", "write 0 512", &source]);
            assert!(ran.err.contains("disk that migrates"), "{ran:?}");
        }
        // It is still read, whether the user says that it is only read or not.
        for more in [&["-r"][..], &[]] {
            let from = moved.serve_source(more);
            let mut reader = client(&from);
            assert_eq!(reader.read(8192, 1).expect("read"), [4]);
            reader.write(0, &[9; 512], 0).expect_err("it has moved");
            from.stop();
        }
    }
}

/// With the whole disk in the target, the source is not needed any more.
#[test]
fn a_target_that_has_everything_stands_alone() {
    for format in ["qcow2", "vellum"] {
        for ahead in [true, false] {
            let (moved, from) = Move::new(format, "");
            let mut writer = client(&from);
            for at in 0..32 {
                writer.write(at * 65_536, &[1; 4096], 0).expect("written");
            }
            let more: &[&str] = if ahead { &["--prefetch"] } else { &["--copy-on-read"] };
            let to = moved.serve_target(more);
            let control = moved.control("target");
            is_refused(&vellum(&["flatten", "--control", &control]), &["migration"]);
            moved.migrate("run").answer();
            let mut writer = client(&to);
            writer.write(0, &[2; 4096], 0).expect("written");
            match ahead {
                true => until("it is detached", || {
                    let said = vellum(&["prefetch", "status", "--output", "json", "--control", &control]);
                    said.json().to_string().contains("\"detached\"")
                }),
                false => {
                    vellum(&["flatten", "--control", &control]).answer();
                }
            }
            to.stop();
            from.stop();
            drop(std::fs::remove_file(moved.source()));
            let (target, export) = (moved.target(), format!("disk={}", moved.target()));
            let facts = vellum(&["info", "--output", "json", "-f", format, &target]).json();
            assert_eq!(facts.get("backing-filename"), None, "{facts}");
            let alone = Server::start(&["-f", format, "--export", &export]);
            let mut reader = client(&alone);
            for (at, value) in [(0, 2), (65_536, 1), (31 * 65_536, 1), (5 * MIB, 0)] {
                assert_eq!(reader.read(at, 1).expect("read"), [value], "{format} at {at}");
            }
            reader.write(4096, &[3; 512], 0).expect("it is a disk like any other");
            alone.stop();
            vellum(&["check", "-f", format, &target]).answer();
        }
    }
}

/// Both servers are killed after each step. At most one image can be written, and when the servers are started again
/// the command continues, in either direction.
#[test]
fn whatever_is_killed_there_is_one_writer_or_none_and_the_command_continues() {
    for format in ["qcow2", "vellum"] {
        for (steps, back) in [0, 1, 2, 3].into_iter().flat_map(|steps| [(steps, false), (steps, true)]) {
            let (moved, from) = Move::new(format, "");
            let mut writer = client(&from);
            writer.write(0, &[1; 4096], 0).expect("written");
            writer.flush().expect("flushed");
            writer.write(4096, &[2; 4096], 0).expect("written");
            let to = moved.serve_target(&[]);
            let order: &[(&str, &str)] = match back {
                false => &[("fix", "source"), ("accept", "target"), ("seal", "source")],
                true => &[("fix", "source"), ("void", "target"), ("restore", "source")],
            };
            for (name, image) in &order[..steps] {
                moved.step(name, image, &moved.number).answer();
            }
            if !back && steps >= 2 {
                let mut writer = client(&to);
                writer.write(12_288, &[7; 512], 0).expect("the target is written");
                writer.flush().expect("flushed");
            }
            to.kill();
            from.kill();
            let fixed = steps >= 1 && !(back && steps == 3);
            let arrived = !back && steps >= 2;
            assert_eq!(
                matches!(moved.says("source").as_deref(), Some("moved" | "gone")),
                fixed,
                "{format}: {order:?} {steps}"
            );
            assert_eq!(
                moved.says("target").as_deref() == Some("arrived"),
                arrived,
                "{format}: {order:?} {steps}"
            );
            let from = moved.serve_source(&[]);
            let mut of_source = client(&from);
            assert_eq!(of_source.read(0, 1).expect("read"), [1], "what was flushed is there");
            if fixed {
                let read = of_source.read(4096, 1).expect("read");
                assert_eq!(read, [2], "a fixed source has all that was answered");
            }
            assert_eq!(of_source.write(8192, &[5; 512], 0).is_ok(), !fixed);
            if back && steps > 1 {
                let export = format!("disk={}", moved.target());
                let words = ["-f", format, "--allow-url", &moved.uri(), "--export", &export];
                let ran = Server::try_start(&words).err().expect("it was given up");
                assert!(ran.err.contains("given up"), "{ran:?}");
                // With a control socket it is served, so that the command can continue.
                let to = moved.serve_target(&[]);
                client(&to).write(8192, &[8; 512], 0).expect_err("it is not written");
                moved.migrate("abort").answer();
                to.stop();
                client(&from).write(8192, &[6; 512], 0).expect("the source is written again");
                from.stop();
                continue;
            }
            let to = moved.serve_target(&[]);
            let goal = if back { "abort" } else { "run" };
            moved.migrate(goal).answer();
            let (writer, other) = if back { (&from, &to) } else { (&to, &from) };
            let mut of_writer = client(writer);
            assert_eq!(of_writer.read(0, 1).expect("read"), [1]);
            if arrived {
                assert_eq!(of_writer.read(12_288, 1).expect("read"), [7]);
            }
            of_writer.write(8192, &[6; 512], 0).expect("the writer is written");
            of_writer.flush().expect("flushed");
            if !back {
                client(other).write(8192, &[8; 512], 0).expect_err("the other is not");
            }
            assert_eq!(of_writer.read(8192, 1).expect("read"), [6]);
            to.stop();
            from.stop();
        }
    }
}

/// A server is killed at some moment while the command runs.
#[test]
#[allow(clippy::print_stderr, reason = "how often that was in the middle differs from run to run")]
fn servers_that_are_killed_in_the_middle_are_started_again_and_the_command_continues() {
    let mut cut_short = 0;
    for round in 0..8_u64 {
        let format = if round % 2 == 0 { "qcow2" } else { "vellum" };
        let (moved, from) = Move::new(format, "");
        let mut writer = client(&from);
        writer.write(0, &[1; 65_536], 0).expect("written");
        writer.flush().expect("flushed");
        let to = moved.serve_target(&[]);
        let mut command = vellum_command();
        command.args(moved.arguments("run")).stdout(Stdio::null()).stderr(Stdio::null());
        let mut running = command.spawn().expect("our own program can be started");
        std::thread::sleep(Duration::from_millis(round / 2 * 15));
        let (kills_source, mut from, mut to) = (round / 2 % 2 == 0, Some(from), Some(to));
        let killed = if kills_source { &mut from } else { &mut to };
        killed.take().expect("it runs").kill();
        cut_short += usize::from(!running.wait().expect("it ends").success());
        let from = from.unwrap_or_else(|| moved.serve_source(&[]));
        let to = to.unwrap_or_else(|| moved.serve_target(&[]));
        moved.migrate("run").answer();
        let mut writer = client(&to);
        let read = writer.read(0, 65_536).expect("read");
        assert!(read.iter().all(|byte| *byte == 1), "{format}: what was flushed is there");
        writer.write(0, &[2; 512], 0).expect("the target is written");
        client(&from).write(0, &[9; 512], 0).expect_err("the source is not");
        assert_eq!(writer.read(0, 1).expect("read"), [2]);
        to.stop();
        from.stop();
    }
    eprintln!("{cut_short} of 8 commands were cut short");
}

#[test]
fn the_disk_can_be_taken_back_until_the_target_has_it() {
    let (moved, from) = Move::new("qcow2", "");
    let to = moved.serve_target(&[]);
    let mut writer = client(&from);
    writer.write(0, &[1; 4096], 0).expect("written");
    // Orders that do not belong to this migration, or come too early.
    let other = "0123456789abcdef0123456789abcdef";
    is_refused(&moved.step("accept", "target", other), &["cannot take over"]);
    is_refused(&moved.step("accept", "source", &moved.number), &["cannot take over"]);
    is_refused(&moved.step("restore", "target", &moved.number), &["cannot be taken back"]);
    moved.step("fix", "source", &moved.number).answer();
    is_refused(&moved.step("fix", "source", other), &["cannot be fixed"]);
    is_refused(&moved.step("restore", "source", other), &["cannot be taken back"]);
    // Also where the source was started again, to be read only.
    from.stop();
    let from = moved.serve_source(&["-r"]);
    let done = moved.migrate("abort").json();
    assert_eq!(done["steps"], serde_json::json!(["void", "restore"]));
    is_refused(&moved.step("accept", "target", &moved.number), &["cannot take over"]);
    is_refused(&moved.migrate("run"), &["given up"]);
    from.stop();
    let from = moved.serve_source(&[]);
    client(&from).write(0, &[2; 4096], 0).expect("the source is written again");
    to.stop();
    from.stop();
}

/// Nothing could ever complete the migration.
#[test]
fn a_target_that_cannot_be_steered_is_not_served() {
    let (moved, from) = Move::new("vellum", "");
    let export = format!("disk={}", moved.target());
    let ran = Server::try_start(&["-f", "vellum", "--allow-url", &moved.uri(), "--export", &export]);
    let ran = ran.err().expect("it has no control socket");
    assert!(ran.err.contains("--control"), "{ran:?}");
    from.stop();
}

#[test]
fn raw_disks_are_refused_with_the_reason() {
    let dir = Dir::new("migrate-raw");
    let image = dir.text("disk.raw");
    vellum(&["create", "-f", "raw", &image, "1M"]).answer();
    let control = dir.text("control");
    let export = format!("disk={image}");
    let from = Server::start(&["-f", "raw", "--control", &control, "--export", &export]);
    let uri = from.uri("disk");
    is_refused(
        &vellum(&["migrate", "prepare", "-f", "raw", "--from", &uri, &dir.text("copy")]),
        &["no place for the mark"],
    );
    let number = "0123456789abcdef0123456789abcdef";
    is_refused(
        &vellum(&["migrate", "step", "fix", "--control", &control, "--number", number]),
        &["no place for the mark", "convert"],
    );
    client(&from).write(0, &[1; 512], 0).expect("served as before");
    from.stop();
}

/// Another disk of the same size is named as the source. The target knows that it is not its base.
#[test]
fn a_target_takes_over_from_no_other_source() {
    for format in ["qcow2", "vellum"] {
        let (moved, from) = Move::new(format, "");
        client(&from).write(0, &[1; 512], 0).expect("written");
        from.stop();
        let other = moved.dir.text("other");
        vellum(&["create", "-q", "-f", format, &other, "8M"]).answer();
        let from = moved.serve_source(&["--export", &format!("other={other}")]);
        let to = moved.serve_target(&[]);
        let mut waiting = client(&to);
        let waits = waiting.send(WRITE, 0, 512, 512, &[3; 512]).expect("sent");
        let command = |name: &str, disk: &str| {
            let arguments = moved.arguments(name);
            let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
            vellum(&[&words[..], &["--source-disk", disk]].concat())
        };
        for goal in ["run", "abort"] {
            is_refused(&command(goal, "other"), &["is not the disk", "nothing was changed"]);
        }
        let is_written = |disk: &str| {
            let mut client = Client::connect(&from.peer(), disk).expect("the export is there");
            client.write(0, &[2; 512], 0).is_ok()
        };
        assert_eq!([is_written("disk"), is_written("other")], [true, true], "{format}");
        assert_eq!(moved.says("target").as_deref(), Some("awaiting"));
        // By hand another disk can be fixed. The target does not take over, nor is that disk given up later.
        let other_step = |name: &str| {
            let (control, number) = (moved.control("source"), moved.number.as_str());
            vellum(&["migrate", "step", name, "--control", &control, "--disk", "other", "--number", number])
        };
        other_step("fix").answer();
        is_refused(&moved.step("accept", "target", &moved.number), &["has not moved in this migration"]);
        assert_eq!(command("run", "disk").json()["steps"], serde_json::json!(["fix", "accept", "seal"]));
        is_refused(&command("run", "other"), &["is not the disk"]);
        assert_eq!(waiting.answer().expect("now"), Answer { cookie: waits, error: 0 });
        other_step("restore").answer();
        assert_eq!([is_written("disk"), is_written("other")], [false, true], "{format}");
        to.stop();
        from.stop();
    }
}

/// Somebody has copied the target while it waited. What the copy says takes nothing back.
#[test]
fn a_copy_of_the_target_takes_nothing_back() {
    for format in ["qcow2", "vellum"] {
        let (moved, from) = Move::new(format, "");
        std::fs::copy(moved.target(), moved.dir.join("copy")).expect("a copy");
        let to = moved.serve_target(&[]);
        moved.migrate("run").answer();
        client(&to).write(0, &[3; 512], 0).expect("the target is written");
        to.stop();
        std::fs::rename(moved.target(), moved.dir.join("kept")).expect("renamed");
        std::fs::rename(moved.dir.join("copy"), moved.target()).expect("renamed");
        let copy = moved.serve_target(&[]);
        for goal in ["abort", "run"] {
            is_refused(&moved.migrate(goal), &["another copy"]);
        }
        is_refused(&moved.step("restore", "source", &moved.number), &["moved for good"]);
        is_refused(&moved.step("accept", "target", &moved.number), &["another image has taken over"]);
        client(&from).write(0, &[4; 512], 0).expect_err("it is not written again");
        copy.stop();
        from.stop();
    }
}

/// After the hand-over another disk is served where the source was.
#[test]
fn the_base_of_a_target_is_the_disk_that_has_moved_and_no_other() {
    for format in ["qcow2", "vellum"] {
        let (moved, from) = Move::new(format, "");
        client(&from).write(0, &[1; 512], 0).expect("written");
        let to = moved.serve_target(&["--remote-timeout", "2"]);
        moved.migrate("run").answer();
        from.stop();
        let source = moved.source();
        std::fs::rename(&source, moved.dir.join("kept")).expect("renamed");
        vellum(&["create", "-q", "-f", format, &source, "8M"]).answer();
        let from = moved.serve_source(&[]);
        let mut reader = client(&to);
        assert!(reader.read(0, 512).is_err(), "{format}: not these bytes");
        reader.write(0, &[2; 512], 0).expect_err("it would need the rest of the block");
        to.kill();
        let export = format!("disk={}", moved.target());
        let words = ["-f", format, "--allow-url", &moved.uri(), "--export", &export];
        let ran = Server::try_start(&words).err().expect("it has another base");
        assert!(ran.err.contains("has changed") && ran.err.contains("moved in migration"), "{ran:?}");
        from.stop();
        std::fs::rename(moved.dir.join("kept"), &source).expect("renamed");
        let from = moved.serve_source(&[]);
        let to = moved.serve_target(&[]);
        assert_eq!(client(&to).read(0, 1).expect("read"), [1]);
        to.stop();
        from.stop();
    }
}

/// The source's server is gone when the target is to take over.
#[test]
fn a_target_that_cannot_see_its_source_goes_on_waiting() {
    for format in ["qcow2", "vellum"] {
        let (moved, from) = Move::new(format, "");
        client(&from).write(0, &[1; 512], 0).expect("written");
        let to = moved.serve_target(&["--remote-timeout", "2"]);
        let mut waiting = client(&to);
        let waits = waiting.send(WRITE, 0, 512, 512, &[3; 512]).expect("sent");
        moved.step("fix", "source", &moved.number).answer();
        from.stop();
        assert_eq!(moved.step("accept", "target", &moved.number).code, 1);
        assert_eq!(moved.says("target").as_deref(), Some("awaiting"), "{format}");
        let from = moved.serve_source(&[]);
        assert_eq!(moved.migrate("run").json()["steps"], serde_json::json!(["fix", "accept", "seal"]));
        assert_eq!(waiting.answer().expect("now"), Answer { cookie: waits, error: 0 });
        assert_eq!([waiting.read(0, 1), waiting.read(512, 1)].map(|read| read.expect("read")[0]), [1, 3]);
        to.stop();
        from.stop();
    }
}

/// What a snapshot has is older than the disk that has moved.
#[test]
fn a_snapshot_of_the_source_is_not_its_disk() {
    let (moved, from) = Move::new("vellum", "");
    let mut writer = client(&from);
    writer.write(0, &[1; 512], 0).expect("written");
    let control = moved.control("source");
    vellum(&["snapshot", "create", "--control", &control, "s1"]).answer();
    writer.write(0, &[2; 512], 0).expect("written");
    let to = moved.serve_target(&["--remote-timeout", "2"]);
    moved.step("fix", "source", &moved.number).answer();
    from.kill();
    let from = moved.serve_source(&["-l", "s1"]);
    is_refused(&moved.step("restore", "source", &moved.number), &["the snapshot s1", "is served"]);
    assert_eq!(moved.step("accept", "target", &moved.number).code, 1);
    assert_eq!(moved.migrate("run").code, 1);
    assert_eq!(moved.says("target").as_deref(), Some("awaiting"));
    from.stop();
    let from = moved.serve_source(&[]);
    moved.migrate("run").answer();
    assert_eq!(client(&to).read(0, 1).expect("read"), [2]);
    // Nor is it what the target reads from later.
    from.stop();
    let from = moved.serve_source(&["-l", "s1"]);
    assert!(client(&to).read(MIB, 512).is_err(), "not these bytes");
    to.kill();
    from.stop();
}

/// They have its file open, in the same server.
#[test]
fn clones_of_a_snapshot_beside_the_source_are_no_hindrance() {
    for goal in ["run", "abort"] {
        let (moved, from) = Move::new("vellum", "");
        client(&from).write(0, &[1; 512], 0).expect("written");
        let (control, clone) = (moved.control("source"), moved.dir.text("clone"));
        vellum(&["snapshot", "create", "--control", &control, "s1"]).answer();
        vellum(&["clone", "-q", "--control", &control, "--from", "disk@s1", &clone]).answer();
        client(&from).write(0, &[2; 512], 0).expect("written");
        let to = moved.serve_target(&[]);
        if goal == "abort" {
            moved.step("fix", "source", &moved.number).answer();
        }
        vellum(&["export", "add", "--control", &control, "-f", "qcow2", &format!("clone={clone}")]).answer();
        let arguments = moved.arguments(goal);
        let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
        vellum(&[&words[..], &["--source-disk", "disk"]].concat()).answer();
        let mut of_clone = Client::connect(&from.peer(), "clone").expect("the export is there");
        assert_eq!(of_clone.read(0, 1).expect("read"), [1], "{goal}");
        of_clone.write(4096, &[3; 512], 0).expect("written");
        let mut writer = client(if goal == "run" { &to } else { &from });
        assert_eq!(writer.read(0, 1).expect("read"), [2], "{goal}");
        writer.write(0, &[4; 512], 0).expect("written");
        to.stop();
        from.stop();
    }
}

/// Another file has the name of the image: it lacks what was written since it was copied.
#[test]
fn a_file_in_the_place_of_the_image_is_not_its_disk() {
    for format in ["qcow2", "vellum"] {
        let (moved, from) = Move::new(format, "");
        let mut writer = client(&from);
        writer.write(0, &[1; 512], 0).expect("written");
        writer.flush().expect("flushed");
        let (source, kept, control) = (moved.source(), moved.dir.text("kept"), moved.control("source"));
        std::fs::rename(&source, &kept).expect("renamed");
        std::fs::copy(&kept, &source).expect("copied");
        writer.write(0, &[2; 512], 0).expect("written");
        writer.flush().expect("flushed");
        let to = moved.serve_target(&[]);
        for ran in [moved.migrate("run"), vellum(&["export", "reopen", "--control", &control])] {
            is_refused(&ran, &["another file", "nothing was changed"]);
        }
        assert_eq!(writer.read(0, 1).expect("read"), [2]);
        writer.write(512, &[3; 512], 0).expect("it is served as before");
        std::fs::rename(&kept, &source).expect("renamed");
        moved.migrate("run").answer();
        let mut writer = client(&to);
        assert_eq!([writer.read(0, 1), writer.read(512, 1)].map(|read| read.expect("read")[0]), [2, 3]);
        to.stop();
        from.stop();
    }
}

/// It may be taken back and written.
#[test]
fn a_disk_that_has_moved_is_a_base_only_once_it_is_gone() {
    let (moved, from) = Move::new("qcow2", "");
    client(&from).write(0, &[1; 512], 0).expect("written");
    let to = moved.serve_target(&[]);
    let uri = moved.uri();
    let other = moved.dir.text("other");
    is_refused(
        &vellum(&["migrate", "prepare", "-o", "journal=off", "--from", &uri, &other]),
        &["journal=off"],
    );
    moved.step("fix", "source", &moved.number).answer();
    let (source, clone) = (moved.source(), moved.dir.text("clone"));
    is_refused(&vellum(&["clone", "-F", "qcow2", &source, &clone]), &["can still be taken back"]);
    let create = ["create", "-f", "qcow2", "-b", &source, "-F", "qcow2", &clone];
    is_refused(&vellum(&create), &["can still be taken back"]);
    moved.migrate("run").answer();
    vellum(&["clone", "-F", "qcow2", &source, &clone]).answer();
    to.stop();
    from.stop();
}
