//! Migrations whose steps are taken in a wrong order, or by hand beside the command, and files that are not where they were:
//! what is refused changes nothing, and what an error names as the way out is one.

use super::hand_over::{MIB, Move, client, is_refused};
use super::support::client::Client;
use super::support::program::vellum;
use super::support::server::Server;

/// What has the name of the target may be the only copy of what was written since the hand-over.
#[test]
fn a_target_is_a_new_file_and_replaces_nothing() {
    for format in ["qcow2", "vellum"] {
        let (moved, from) = Move::new(format, "");
        let to = moved.serve_target(&[]);
        let uri = moved.uri();
        let prepare = |target: &str| vellum(&["migrate", "prepare", "-f", format, "--from", &uri, target]);
        let note = moved.dir.text("note");
        std::fs::write(&note, "a note").expect("a file");
        std::os::unix::fs::symlink("nothing", moved.dir.join("link")).expect("a link");
        for name in [moved.target(), note.clone(), moved.dir.text("link")] {
            is_refused(&prepare(&name), &["exists already", "choose another name"]);
        }
        assert_eq!(std::fs::read(&note).expect("the note"), b"a note");
        // Of several at once one makes it.
        for round in 0..3 {
            let name = moved.dir.text(&format!("both-{round}"));
            let made = std::thread::scope(|scope| {
                let running = [(); 3].map(|()| scope.spawn(|| prepare(&name).code == 0));
                running.map(|one| one.join().expect("it ends")).iter().filter(|made| **made).count()
            });
            assert_eq!(made, 1, "{format}");
        }
        moved.migrate("run").answer();
        client(&to).write(0, &[2; 65_536], 0).expect("the target is written");
        to.stop();
        is_refused(&prepare(&moved.target()), &["exists already"]);
        is_refused(&prepare(&moved.dir.text("other")), &["has moved already", &moved.number]);
        assert!(!moved.dir.join("other").exists());
        let to = moved.serve_target(&[]);
        assert_eq!(client(&to).read(0, 1).expect("read"), [2], "{format}");
        to.stop();
        from.stop();
    }
}

/// The source is taken back by hand although the target has taken over. The target's session has the source open.
#[test]
fn a_target_reads_nothing_of_a_source_that_is_written() {
    for format in ["qcow2", "vellum"] {
        let (moved, from) = Move::new(format, "");
        let mut guest = client(&from);
        guest.write(MIB, &[1; 65_536], 0).expect("written");
        guest.write(4 * MIB, &[7; 65_536], 0).expect("written");
        let to = moved.serve_target(&["--remote-timeout", "1"]);
        moved.step("fix", "source", &moved.number).answer();
        moved.step("accept", "target", &moved.number).answer();
        let mut reader = client(&to);
        assert_eq!(reader.read(MIB, 1).expect("read"), [1]);
        // Who attached before the disk moved stays.
        moved.step("restore", "source", &moved.number).answer();
        for goal in ["run", "abort"] {
            is_refused(&moved.migrate(goal), &["both images could be written", "step fix"]);
        }
        assert!(reader.read(2 * MIB, 512).is_err(), "{format}: its source is a disk that may be written");
        // The way out that is named, as long as nothing was written.
        moved.step("fix", "source", &moved.number).answer();
        moved.migrate("run").answer();
        assert_eq!(client(&to).read(4 * MIB, 1).expect("read"), [7], "{format}");
        to.stop();
        // And where it was, for a target of which a copy was given up.
        let (moved, from_other) = Move::new(format, "");
        let mut guest_there = client(&from_other);
        guest_there.write(4 * MIB, &[7; 65_536], 0).expect("written");
        let to = moved.serve_target(&["--remote-timeout", "1"]);
        moved.step("fix", "source", &moved.number).answer();
        moved.step("accept", "target", &moved.number).answer();
        let mut reader = client(&to);
        assert_eq!(reader.read(MIB, 1).expect("read"), [0]);
        moved.step("restore", "source", &moved.number).answer();
        guest_there.write(4 * MIB, &[9; 65_536], 0).expect("its client has stayed, and writes again");
        guest.write(0, &[9; 512], 0).expect_err("the other disk has moved");
        match reader.read(4 * MIB, 65_536) {
            Ok(read) => panic!("{format}: it read {} of a disk that is written", read[0]),
            Err(_) => to.kill(),
        }
        from_other.stop();
        from.stop();
    }
}

#[test]
fn a_source_is_given_up_only_with_the_receipt_of_its_target() {
    let (moved, from) = Move::new("vellum", "");
    let to = moved.serve_target(&[]);
    moved.step("fix", "source", &moved.number).answer();
    let control = moved.control("source");
    let seal = |more: &[&str]| {
        let words = ["migrate", "step", "seal", "--control", &control, "--number", &moved.number];
        vellum(&[&words[..], more].concat())
    };
    is_refused(&seal(&[]), &["step accept", "--receipt"]);
    is_refused(&seal(&["--receipt", "00000000"]), &["step accept", "--receipt"]);
    assert_eq!(moved.says("source").as_deref(), Some("moved"));
    let done = moved.step("accept", "target", &moved.number).json();
    seal(&["--receipt", done["receipt"].as_str().expect("a receipt")]).answer();
    assert_eq!(moved.says("source").as_deref(), Some("gone"));
    client(&to).write(0, &[2; 512], 0).expect("the target is written");
    to.stop();
    from.stop();
}

#[test]
fn a_target_that_has_arrived_may_have_another_size() {
    let (moved, from) = Move::new("qcow2", "");
    let to = moved.serve_target(&[]);
    moved.step("fix", "source", &moved.number).answer();
    moved.step("accept", "target", &moved.number).answer();
    let control = moved.control("target");
    vellum(&["resize", "--control", &control, "+8M"]).answer();
    assert_eq!(moved.migrate("run").json()["steps"], serde_json::json!(["accept", "seal"]));
    assert_eq!(moved.migrate("run").json()["steps"], serde_json::json!([]));
    to.stop();
    from.stop();
    // Before that it is another disk.
    let (moved, from) = Move::new("qcow2", "");
    vellum(&["resize", "--control", &moved.control("source"), "+8M"]).answer();
    let to = moved.serve_target(&[]);
    is_refused(&moved.migrate("run"), &["resized after the target was prepared", "migrate abort"]);
    client(&from).write(0, &[1; 512], 0).expect("the source is written");
    moved.migrate("abort").answer();
    to.stop();
    from.stop();
}

/// The name of an image leads nowhere, or to another file: its disk goes on.
#[test]
fn a_disk_whose_file_is_not_under_its_name_is_not_closed() {
    for format in ["qcow2", "vellum"] {
        let (moved, from) = Move::new(format, "");
        let mut writer = client(&from);
        writer.write(0, &[1; 512], 0).expect("written");
        let to = moved.serve_target(&[]);
        let (source, target, kept) = (moved.source(), moved.target(), moved.dir.text("kept"));
        let control = moved.control("source");
        std::fs::rename(&source, &kept).expect("renamed");
        for ran in [moved.migrate("run"), vellum(&["export", "reopen", "--control", &control])] {
            is_refused(&ran, &["not found under its name", "nothing was changed"]);
        }
        writer.write(512, &[2; 512], 0).expect("it is served as before");
        std::fs::rename(&kept, &source).expect("renamed");
        // That of the target is looked at before the source is fixed.
        std::fs::rename(&target, &kept).expect("renamed");
        is_refused(&moved.migrate("run"), &["not found under its name", "nothing was changed"]);
        std::fs::copy(&kept, &target).expect("copied");
        is_refused(&moved.migrate("run"), &["another file", "nothing was changed"]);
        writer.write(1024, &[3; 512], 0).expect("it is served as before");
        std::fs::rename(&kept, &target).expect("renamed");
        moved.migrate("run").answer();
        let mut reader = client(&to);
        assert_eq!([0, 512, 1024].map(|at| reader.read(at, 1).expect("read")[0]), [1, 2, 3]);
        to.stop();
        from.stop();
    }
}

/// A disk that still reads from the host that it came from moves on, and that host is gone. It is not closed for a step that
/// could not open it again.
#[test]
fn a_disk_whose_base_is_gone_goes_on_where_it_is() {
    for format in ["qcow2", "vellum"] {
        let (moved, from) = Move::new(format, "");
        client(&from).write(MIB, &[1; 512], 0).expect("written");
        let middle = moved.serve_target(&["--remote-timeout", "1"]);
        moved.migrate("run").answer();
        let mut writer = client(&middle);
        writer.write(0, &[2; 65_536], 0).expect("written");
        let uri = middle.uri("disk");
        let (last, control) = (moved.dir.text("last"), moved.place.text("last.control"));
        vellum(&["migrate", "prepare", "-f", format, "--from", &uri, &last]).answer();
        let export = format!("disk={last}");
        let words = ["-f", format, "--control", &control, "--allow-url", &uri, "--export", &export];
        let to = Server::start(&words);
        let middle_control = moved.control("target");
        let run =
            || vellum(&["migrate", "run", "--source-control", &middle_control, "--target-control", &control]);
        from.kill();
        writer.write(0, &[3; 65_536], 0).expect("it has this block");
        for ran in [run(), vellum(&["export", "reopen", "--control", &middle_control])] {
            is_refused(&ran, &["could not be opened again", "nothing was changed"]);
        }
        assert_eq!(writer.read(0, 1).expect("its own block"), [3], "{format}");
        writer.write(0, &[4; 65_536], 0).expect("it is written");
        let from = moved.serve_source(&[]);
        run().answer();
        let mut reader = client(&to);
        assert_eq!([reader.read(0, 1), reader.read(MIB, 1)].map(|read| read.expect("read")[0]), [4, 1]);
        to.stop();
        middle.stop();
        from.stop();
    }
}

/// Nothing of an image that waits is what its disk will be.
#[test]
fn a_target_that_waits_is_no_base() {
    let (moved, from) = Move::new("qcow2", "");
    let (target, clone, uri) = (moved.target(), moved.dir.text("clone"), moved.uri());
    let made = ["clone", "-F", "qcow2", "--trust-base", "--allow-url", &uri, &target, &clone];
    is_refused(&vellum(&made), &["awaits the disk", "convert"]);
    from.stop();
}

/// They are made while others are, and while the disk moves: each is made, or says why not, and none is of no use.
#[test]
fn clones_that_are_made_beside_a_step_are_sound_or_refused() {
    let (moved, from) = Move::new("vellum", "");
    client(&from).write(0, &[1; 512], 0).expect("written");
    let control = moved.control("source");
    vellum(&["snapshot", "create", "--control", &control, "s1"]).answer();
    let to = moved.serve_target(&[]);
    let clones: Vec<String> = (0..12).map(|number| moved.dir.text(&format!("clone-{number}"))).collect();
    let made = std::thread::scope(|scope| {
        let running: Vec<_> = clones
            .iter()
            .map(|clone| {
                let words = ["clone", "-q", "--control", &control, "--from", "disk@s1", clone];
                scope.spawn(move || vellum(&words))
            })
            .collect();
        moved.migrate("run").answer();
        running.into_iter().map(|one| one.join().expect("it ends")).collect::<Vec<_>>()
    });
    for (ran, clone) in made.iter().zip(&clones) {
        assert!(ran.code == 0 || ran.err.contains("is open read-only"), "{ran:?}");
        assert!(!ran.err.contains("remove them"), "{ran:?}");
        if std::path::Path::new(clone).exists() {
            assert_eq!(ran.code, 0, "{ran:?}");
            let added = format!("clone={clone}");
            vellum(&["export", "add", "--control", &control, "-f", "qcow2", &added]).answer();
            let mut of_clone = Client::connect(&from.peer(), "clone").expect("the export is there");
            assert_eq!(of_clone.read(0, 1).expect("read"), [1]);
            drop(of_clone);
            vellum(&["export", "remove", "--force", "--control", &control, "clone"]).answer();
        }
    }
    to.stop();
    from.stop();
}
