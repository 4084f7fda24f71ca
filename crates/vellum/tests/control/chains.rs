//! Chains that change while their disk is served: commits and rebases, with guests at work, steered, and killed.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::Value;
use vellum_core::Random;

use super::Controlled;
use super::external::{LEN, read, same, scribble};
use super::killed::Pages;
use super::support::client::Client;
use super::support::dir::Dir;
use super::support::loops::Mount;
use super::support::program::{Ran, has, succeed, vellum, vellum_command};
use super::support::{noise, scale, until};

/// Images over one another, from the bottom up, each with a name that says its format.
struct Chain {
    dir: Dir,
    files: Vec<String>,
    model: Vec<u8>,
}

fn format_of(file: &str) -> &'static str {
    match file.rsplit('.').next() {
        Some("vlm") => "vellum",
        Some("qcow2") => "qcow2",
        _ => "raw",
    }
}

impl Chain {
    /// The first image has noise in its first half, and each other one bytes here and there.
    fn new(name: &str, files: &[(&str, &str)]) -> Self {
        let dir = Dir::new(name);
        let mut chain = Self { files: Vec::new(), model: vec![0; LEN], dir };
        let mut random = Random::from_seed(17);
        for (file, options) in files {
            let path = chain.dir.text(file);
            let options: &[&str] = if options.is_empty() { &[] } else { &["-o", options] };
            let mut words = vec!["create", "-q", "-f", format_of(file)];
            words.extend(options.iter().copied());
            match chain.files.last() {
                Some(below) => words.extend(["-b", below, "-F", format_of(below), &path]),
                None => words.extend([&path, "6M"]),
            }
            vellum(&words).answer();
            chain.files.push(path.clone());
            let served = chain.serve();
            let mut guest = served.client("");
            if chain.files.len() == 1 {
                let bytes = noise(LEN / 2, 5);
                guest.write(0, &bytes, 0).expect("it is written");
                chain.model[..LEN / 2].copy_from_slice(&bytes);
            } else {
                scribble(&mut guest, &mut chain.model, &mut random, 8);
            }
            guest.flush().expect("a flush");
            guest.disconnect();
            served.server.stop();
        }
        chain
    }

    fn top(&self) -> &str {
        self.files.last().expect("there is one")
    }

    fn serve(&self) -> Controlled {
        Controlled::start(&["-f", format_of(self.top()), self.top()])
    }

    #[track_caller]
    fn is_sound(&self, file: &str, about: &str) {
        same(&read(file, format_of(file)), &self.model, &format!("{about}: {file}"));
        if format_of(file) != "raw" {
            vellum(&["check", "-q", file]).answer();
        }
        let is_known = self.files.iter().all(|file| format_of(file) != "vellum");
        if format_of(file) == "qcow2" && (is_known || file == self.files[0]) && has("qemu-img") {
            succeed("qemu-img", &["check", "-q", file]);
            if is_known {
                std::fs::write(self.dir.join("model"), &self.model).expect("a model");
                let model = self.dir.text("model");
                succeed("qemu-img", &["compare", "-f", "qcow2", "-F", "raw", file, &model]);
            }
        }
    }

    fn below(&self, file: &str) -> Option<String> {
        let info = vellum(&["info", "--output", "json", "-f", format_of(file), file]).json();
        info["backing-filename"].as_str().map(str::to_owned)
    }
}

/// `vellum COMMAND --control …`.
fn ask(served: &Controlled, words: &[&str]) -> Ran {
    let (command, rest) = words.split_first().expect("a command");
    served.ask(command, rest)
}

fn job(served: &Controlled, verb: &str, rest: &[&str]) -> Ran {
    vellum(&[&["job", verb, "--control", &served.socket, "--output", "json"], rest].concat())
}

#[track_caller]
fn state(served: &Controlled) -> Value {
    job(served, "status", &[]).json()
}

#[track_caller]
fn refused(served: &Controlled, words: &[&str], command: &[&str]) {
    let ran = ask(served, command);
    assert_eq!((ran.code, ran.err.lines().count()), (1, 1), "{command:?}: {ran:?}");
    for word in words {
        assert!(ran.err.contains(word), "{command:?} does not say {word:?}: {}", ran.err);
    }
}

/// Does something while a guest writes, and keeps the model.
fn beside_a_guest(served: &Controlled, model: &mut [u8], work: impl FnOnce()) -> Client {
    let (ends, mut guest) = (AtomicBool::new(false), served.client(""));
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut random = Random::from_seed(23);
            while !ends.load(Ordering::Acquire) {
                scribble(&mut guest, model, &mut random, 3);
                guest.flush().expect("a flush");
            }
        });
        work();
        std::thread::sleep(Duration::from_millis(20));
        ends.store(true, Ordering::Release);
        writer.join().expect("a guest");
    });
    guest
}

/// The kinds of chains that are committed, from the bottom up.
const CHAINS: [&[(&str, &str)]; 6] = [
    &[("base.raw", ""), ("top.qcow2", "")],
    &[("base.qcow2", "journal=off"), ("top.qcow2", "journal=off,extended_l2=off")],
    &[("base.qcow2", ""), ("mid.qcow2", ""), ("top.qcow2", "")],
    &[("base.vlm", "layout=zoned"), ("top.vlm", "layout=zoned")],
    &[("base.vlm", "layout=table"), ("mid.vlm", "layout=linear"), ("top.vlm", "layout=table")],
    &[("base.raw", ""), ("mid.qcow2", "journal=off"), ("top.vlm", "layout=linear")],
];

#[test]
fn the_image_on_top_goes_into_the_one_at_the_bottom_beside_a_guest() {
    for files in CHAINS {
        let about = format!("{files:?}");
        let mut chain = Chain::new("live-commit", files);
        let served = chain.serve();
        let (base, top) = (chain.files[0].clone(), chain.top().to_owned());
        let mut model = chain.model.clone();
        let mut guest = beside_a_guest(&served, &mut model, || {
            let said = ask(&served, &["commit", "-b", &base, "--output", "json"]).json();
            assert_eq!((&said["state"], &said["image"]), (&"done".into(), &base.as_str().into()), "{said}");
            let useless = chain.files[1..chain.files.len() - 1].iter().map(String::as_str);
            assert_eq!(said["useless"].as_array().map_or(0, Vec::len), useless.count(), "{said}");
        });
        chain.model = model;
        assert_eq!(served.told()["image"], base, "{about}");
        assert_eq!(served.told()["job"]["state"], "done", "{about}");
        assert_eq!(served.server.times_open(&top), 0, "{about}: it is let go");
        same(&guest.read_all().expect("it is read"), &chain.model, &about);
        guest.flush().expect("a flush");
        guest.disconnect();
        served.server.stop();
        // Either of the two can be served.
        chain.is_sound(&base, &about);
        chain.is_sound(&top, &about);
        assert!(base.ends_with(&chain.below(&top).expect("a base")), "{about}");
        let served = chain.serve();
        let mut guest = served.client("");
        same(&guest.read_all().expect("it is read"), &chain.model, &about);
        guest.disconnect();
        served.server.stop();
    }
}

#[test]
fn an_image_between_goes_into_the_one_below_it_beside_a_guest() {
    for files in [CHAINS[2], CHAINS[4], CHAINS[5]] {
        let about = format!("{files:?}");
        let mut chain = Chain::new("live-commit-between", files);
        let served = chain.serve();
        let (base, between, top) = (chain.files[0].clone(), chain.files[1].clone(), chain.files[2].clone());
        let mut model = chain.model.clone();
        let mut guest = beside_a_guest(&served, &mut model, || {
            let said = ask(&served, &["commit", "--top", &between, "--output", "json"]).json();
            assert_eq!((&said["state"], &said["image"]), (&"done".into(), &top.as_str().into()), "{said}");
        });
        chain.model = model;
        assert_eq!(served.server.times_open(&between), 0, "{about}: it is let go");
        std::fs::remove_file(&between).expect("nobody needs it");
        chain.files.remove(1);
        same(&guest.read_all().expect("it is read"), &chain.model, &about);
        guest.flush().expect("a flush");
        guest.disconnect();
        served.server.stop();
        chain.is_sound(&top, &about);
        assert!(base.ends_with(&chain.below(&top).expect("a base")), "{about}");
    }
}

#[test]
fn what_is_between_is_copied_into_the_image_that_is_served() {
    for files in [CHAINS[2], CHAINS[4]] {
        let about = format!("{files:?}");
        let mut chain = Chain::new("live-rebase", files);
        let served = chain.serve();
        let (base, between, top) = (chain.files[0].clone(), chain.files[1].clone(), chain.files[2].clone());
        let mut model = chain.model.clone();
        let mut guest = beside_a_guest(&served, &mut model, || {
            let said = ask(&served, &["rebase", "-b", &base, "--output", "json"]).json();
            assert_eq!((&said["state"], &said["image"]), (&"done".into(), &top.as_str().into()), "{said}");
            assert_eq!(said["useless"][0], between, "{said}");
        });
        chain.model = model;
        std::fs::remove_file(&between).expect("nobody needs it");
        chain.files.remove(1);
        same(&guest.read_all().expect("it is read"), &chain.model, &about);
        // And to one that is not in the chain.
        let other = chain.dir.text("other.raw");
        let mut bytes = read(&base, format_of(&base));
        bytes[1 << 20..3 << 20].copy_from_slice(&noise(2 << 20, 77));
        std::fs::write(&other, bytes).expect("another base");
        ask(&served, &["rebase", "-q", "-b", &other, "-F", "raw"]).answer();
        same(&guest.read_all().expect("it is read"), &chain.model, &about);
        guest.flush().expect("a flush");
        guest.disconnect();
        served.server.stop();
        chain.is_sound(&top, &about);
        assert_eq!(chain.below(&top).as_deref(), Some("other.raw"), "{about}");
    }
}

#[test]
fn a_commit_is_paused_limited_cancelled_and_begun_again() {
    let mut chain = Chain::new("live-steered", CHAINS[2]);
    let served = chain.serve();
    let (base, top) = (chain.files[0].clone(), chain.top().to_owned());
    let ran = job(&served, "status", &[]);
    assert!(ran.code == 1 && ran.err.contains("nothing is done with its chain"), "{ran:?}");
    // So slow that it does not end here.
    let begin = ["commit", "--background", "--rate-limit", "1000", "-b", &base, "--output", "json"];
    let said = ask(&served, &begin).json();
    assert_eq!((&said["job"], &said["bytes-per-second-max"]), (&"commit".into(), &1000.into()), "{said}");
    assert_eq!(job(&served, "pause", &[]).json()["state"], "paused");
    for words in
        [&["commit", "-b", &base][..], &["rebase", "-b", &base], &["resize", "+1M"], &["pause"], &["flatten"]]
    {
        refused(&served, &["chain is being changed", "job cancel"], words);
    }
    let mut guest = served.client("");
    let mut random = Random::from_seed(3);
    scribble(&mut guest, &mut chain.model, &mut random, 20);
    same(&guest.read_all().expect("it is read"), &chain.model, "while it is paused");
    assert_eq!(job(&served, "resume", &[]).json()["state"], "running");
    assert_eq!(job(&served, "limit", &["2000"]).json()["bytes-per-second-max"], 2000);
    job(&served, "cancel", &[]).answer();
    until("it is cancelled", || state(&served)["state"] == "cancelled");
    let ran = job(&served, "cancel", &[]);
    assert!(ran.code == 1 && ran.err.contains("has ended"), "{ran:?}");
    scribble(&mut guest, &mut chain.model, &mut random, 20);
    same(&guest.read_all().expect("it is read"), &chain.model, "as before");
    assert_eq!(served.told()["image"], top);
    // A rebase is steered in the same way.
    ask(&served, &["rebase", "--background", "--rate-limit", "1000", "-b", &base]).answer();
    job(&served, "cancel", &[]).answer();
    until("it is cancelled", || state(&served)["state"] == "cancelled");
    // A server that ends does not wait for it, and the next one begins again.
    ask(&served, &begin).json();
    guest.flush().expect("a flush");
    guest.disconnect();
    served.server.stop();
    chain.is_sound(&top, "stopped");
    let served = chain.serve();
    ask(&served, &begin).json();
    assert_eq!(job(&served, "limit", &["0"]).json()["bytes-per-second-max"], Value::Null);
    until("it is done", || state(&served)["state"] == "done");
    served.server.stop();
    chain.is_sound(&base, "done");
    chain.is_sound(&top, "done");
}

#[test]
fn what_others_need_is_not_committed_into() {
    let chain = Chain::new("live-refused", CHAINS[2]);
    let (base, between) = (chain.files[0].clone(), chain.files[1].clone());
    let sibling = chain.dir.text("sibling.qcow2");
    vellum(&["create", "-q", "-f", "qcow2", "-b", &base, "-F", "qcow2", &sibling]).answer();
    let served = chain.serve();
    refused(&served, &["sibling.qcow2", "useless"], &["commit", "-b", &base]);
    refused(&served, &["sibling.qcow2", "useless"], &["commit", "--top", &between]);
    refused(&served, &["is not below"], &["commit", "-b", &sibling]);
    refused(&served, &["vellum flatten --control"], &["rebase", "-b", ""]);
    refused(&served, &["would be a loop"], &["rebase", "-b", chain.top()]);
    ask(&served, &["commit", "-q", "--force", "-b", &base]).answer();
    refused(&served, &["no backing image"], &["commit"]);
    served.server.stop();
    chain.is_sound(&base, "with force");
    // A larger base would make the disk larger.
    let dir = Dir::new("live-larger");
    let (base, top) = (dir.text("base.qcow2"), dir.text("top.qcow2"));
    vellum(&["create", "-q", &base, "8M"]).answer();
    vellum(&["create", "-q", "-b", &base, "-F", "qcow2", &top, "4M"]).answer();
    let served = Controlled::start(&[&top]);
    refused(&served, &["becomes no larger", "resize --control"], &["commit"]);
    served.ask("resize", &["8M"]);
    served.server.stop();
    let served = Controlled::start(&["--read-only", &top]);
    refused(&served, &["not written here"], &["commit"]);
    refused(&served, &["not written here"], &["rebase", "-b", &base]);
    served.server.stop();
    // A snapshot would read from what changes.
    let chain = Chain::new("live-snapshots", CHAINS[3]);
    vellum(&["snapshot", "create", chain.top(), "one"]).answer();
    let served = chain.serve();
    refused(&served, &["has snapshots"], &["commit"]);
    refused(&served, &["has snapshots"], &["rebase", "-b", &chain.files[0]]);
    vellum(&["snapshot", "delete", "--control", &served.socket, "one"]).answer();
    ask(&served, &["commit", "--background", "--rate-limit", "1000"]).answer();
    let ran = vellum(&["snapshot", "create", "--control", &served.socket, "two"]);
    assert!(ran.code == 1 && ran.err.contains("chain is being changed"), "{ran:?}");
    served.server.stop();
    chain.is_sound(chain.top(), "stopped");
}

/// The server is killed at any moment of a commit. The image that was served is the disk, whatever became of the commit, and nothing
/// that was flushed is missing; once the base is on top it is the disk as well.
#[test]
fn a_server_that_is_killed_during_a_commit_has_lost_nothing_that_was_flushed() {
    killed(&CHAINS, "commit", |chain, rounds| {
        let top = chain.files.len() - 1;
        match rounds % 3 {
            // What is between, where there is something.
            0 if top > 1 => vec!["commit".to_owned(), "--top".to_owned(), chain.files[top - 1].clone()],
            _ => vec!["commit".to_owned(), "-b".to_owned(), chain.files[0].clone()],
        }
    });
}

#[test]
fn a_server_that_is_killed_during_a_rebase_has_lost_nothing_that_was_flushed() {
    killed(&[CHAINS[2], CHAINS[4]], "rebase", |chain, _| {
        vec!["rebase".to_owned(), "-b".to_owned(), chain.files[0].clone()]
    });
}

/// Of some rounds the command ended before the server was killed, and of others it did not.
fn killed(chains: &[&[(&str, &str)]], about: &str, command: impl Fn(&Chain, usize) -> Vec<String>) {
    let (mut done, rounds) = (0, 6 * scale());
    let mut random = Random::from_seed(29);
    for files in chains {
        for round in 0..rounds {
            let mut chain = Chain::new(&format!("killed-{about}"), files);
            let served = chain.serve();
            let mut guest = served.client("");
            let wait = Duration::from_micros(random.below(400_000));
            let pages = Pages::new(LEN, round as u64 * 131, random.below(u64::MAX));
            let words = command(&chain, round);
            let socket = served.socket.clone();
            std::thread::scope(|scope| {
                let writer = scope.spawn(|| pages.write_on(&mut guest, u64::MAX));
                let asks = scope.spawn(move || {
                    let mut command = vellum_command();
                    command.arg(&words[0]).args(["--control", &socket]).args(&words[1..]);
                    command.output().expect("a command").status.success()
                });
                std::thread::sleep(wait);
                served.server.kill();
                writer.join().expect("a writer");
                done += usize::from(asks.join().expect("a command"));
            });
            let about = format!("{about} {files:?}, round {round}, killed after {wait:?}");
            let (base, top) = (chain.files[0].clone(), chain.top().to_owned());
            let found = read(&top, format_of(&top));
            pages.judge(&found, &mut chain.model, &about);
            // It can be done again, or has been done.
            // Without those between, which may not be below the top any more.
            let ran = vellum(&["commit", "-q", "--force", "-f", format_of(&top), "-b", &base, &top]);
            assert_eq!(ran.code, 0, "{about}: {ran:?}");
            chain.is_sound(&base, &about);
            vellum(&["recover", "-f", format_of(&top), &top]).answer();
            chain.is_sound(&top, &about);
        }
    }
    assert!(done < chains.len() * rounds, "{about}: it is killed meanwhile: {done}");
}

/// A guest that writes more than is copied while requests wait.
#[test]
fn what_is_changed_meanwhile_is_copied_in_rounds() {
    let dir = Dir::new("live-rounds");
    let (base, top) = (dir.text("base.raw"), dir.text("top.qcow2"));
    vellum(&["create", "-q", "-f", "raw", &base, "48M"]).answer();
    vellum(&["create", "-q", "-f", "qcow2", "-b", &base, "-F", "raw", &top]).answer();
    let served = Controlled::start(&[&top]);
    let mut guest = served.client("");
    let mut model = noise(48 << 20, 4);
    for at in (0..48u64).map(|at| at << 20) {
        let piece = usize::try_from(at).expect("short");
        guest.write(at, &model[piece..piece + (1 << 20)], 0).expect("it is written");
    }
    ask(&served, &["commit", "-q", "--background", "--rate-limit", "1M"]).answer();
    for at in (0..48).step_by(2) {
        let piece = at << 20;
        let bytes = noise(1 << 20, 100 + at as u64);
        guest.write(piece as u64, &bytes, 0).expect("it is written");
        model[piece..piece + (1 << 20)].copy_from_slice(&bytes);
    }
    job(&served, "limit", &["0"]).answer();
    until("it is done", || state(&served)["state"] == "done");
    let said = state(&served);
    assert!(said["bytes-written"].as_u64().expect("a number") > 60 << 20, "{said}");
    same(&guest.read_all().expect("it is read"), &model, "in rounds");
    guest.flush().expect("a flush");
    guest.disconnect();
    served.server.stop();
    same(&std::fs::read(&base).expect("the base"), &model, "the base");
}

/// The base has no room: the commit fails, the disk goes on over it, and with room it is done.
#[test]
fn a_base_without_room_leaves_the_chain_as_it_was() {
    let Some(mount) = Mount::tmpfs(8 << 20) else { return };
    for (file, options) in [("base.raw", ""), ("base.qcow2", "journal=off"), ("base.qcow2", "")] {
        let dir = Dir::new("live-full");
        let (base, top, ballast) = (mount.dir.text(file), dir.text("top.qcow2"), mount.dir.join("ballast"));
        let options: &[&str] = if options.is_empty() { &[] } else { &["-o", options] };
        vellum(&[&["create", "-q", "-f", format_of(file)], options, &[&base, "6M"]].concat()).answer();
        vellum(&["create", "-q", "-f", "qcow2", "-b", &base, "-F", format_of(file), &top]).answer();
        std::fs::write(&ballast, noise(5 << 20, 1)).expect("there is room yet");
        let served = Controlled::start(&["--allow-dir", &mount.dir.text(""), &top]);
        let mut guest = served.client("");
        let mut model = noise(LEN, 9);
        guest.write(0, &model, 0).expect("it is written");
        let ran = ask(&served, &["commit", "-q"]);
        assert!(ran.code == 1 && ran.err.contains("has failed"), "{file}: {ran:?}");
        assert_eq!(state(&served)["state"], "failed", "{file}");
        let mut random = Random::from_seed(8);
        scribble(&mut guest, &mut model, &mut random, 10);
        same(&guest.read_all().expect("it is read"), &model, file);
        assert_eq!(served.told()["image"], top, "{file}");
        std::fs::remove_file(&ballast).expect("the ballast");
        ask(&served, &["commit", "-q"]).answer();
        same(&guest.read_all().expect("it is read"), &model, file);
        guest.flush().expect("a flush");
        guest.disconnect();
        served.server.stop();
        let copy = dir.text("copy.raw");
        vellum(&["convert", "-q", "-f", format_of(file), "-O", "raw", &base, &copy]).answer();
        same(&std::fs::read(&copy).expect("a copy"), &model, file);
        if format_of(file) == "qcow2" && has("qemu-img") {
            succeed("qemu-img", &["check", "-q", &base]);
        }
        std::fs::remove_file(&base).expect("our own");
    }
}
