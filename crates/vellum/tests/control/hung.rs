//! Disks on storage that does not answer: files whose server is paused.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Stdio;
use std::time::Instant;

use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};

use super::exports::damage;
use super::guest::{FEATURES, Machine, Memory, Shape};
use super::support::PATIENCE;
use super::support::client::{Client, Peer, READ, TRIM};
use super::support::dir::Dir;
use super::support::program::{is_root, pid_of, skipped, vellum, vellum_command, wait};
use super::support::server::Server;
use super::{Controlled, made, told_of, until};

/// Files whose server can be stopped: requests to them hang then.
struct Storage {
    server: Server,
    files: Vec<String>,
    control: String,
    _place: Dir,
}

impl Storage {
    fn new(dir: &Dir, files: usize) -> Option<Self> {
        if !is_root() || !Path::new("/dev/fuse").exists() {
            skipped("files by FUSE are root's");
            return None;
        }
        let place = Dir::short();
        let control = place.text("control");
        let mut arguments = vec!["-f".to_owned(), "raw".to_owned(), "--control".to_owned(), control.clone()];
        let files: Vec<String> = (0..files).map(|file| place.text(&format!("file-{file}"))).collect();
        for (number, file) in files.iter().enumerate() {
            let below = made(dir, "raw", "", "4M");
            arguments.extend(["--export".to_owned(), format!("{number}={below}")]);
            arguments.extend(["--fuse".to_owned(), format!("{number}={file}")]);
        }
        let server = Server::start(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
        until("the files are there", || files.iter().all(|file| Path::new(file).exists()));
        Some(Self { server, files, control, _place: place })
    }

    fn for_each(&self, command: &str) {
        for number in 0..self.files.len() {
            let ran = vellum(&[command, "--control", &self.control, "--disk", &number.to_string()]);
            assert!(ran.code == 0 || std::thread::panicking(), "{ran:?}");
        }
    }

    /// It does not answer until the result is dropped: also when a test fails, because a program that waits
    /// for it cannot be ended.
    fn hang(&self) -> Hung<'_> {
        self.for_each("pause");
        Hung(self)
    }

    /// As above, for the first file alone.
    fn hang_first(&self) -> Hung<'_> {
        vellum(&["pause", "--control", &self.control, "--disk", "0"]).answer();
        Hung(self)
    }
}

/// Storage that does not answer, until dropped.
struct Hung<'a>(&'a Storage);

impl Drop for Hung<'_> {
    fn drop(&mut self) {
        self.0.for_each("resume");
    }
}

/// One disk is in a file whose server does not answer. The other is closed, and the server ends all the same.
#[test]
fn a_hung_disk_keeps_no_other_from_being_closed() {
    let dir = Dir::new("hung");
    let Some(storage) = Storage::new(&dir, 1) else { return };
    let (good, file) = (made(&dir, "qcow2", "", "4M"), storage.files[0].clone());

    let (bad, exports) = (format!("bad={file}"), format!("good={good}"));
    let served = Controlled::start(&["-f", "raw", "--export", &bad, "--drain-seconds", "5"]);
    vellum(&["export", "add", "-f", "qcow2", "--control", &served.socket, &exports]).answer();
    let (mut hangs, mut goes) = (served.client("bad"), served.client("good"));
    let hung = storage.hang();
    let read = hangs.send(READ, 0, 0, 4096, &[]).expect("sent");
    goes.write(0, &[7; 4096], 0).expect("the other disk is served");
    until("it is hung", || served.json("stats", &[])["disks"][0]["state"] == "hung");
    let told = served.json("stats", &[]);
    let long = &told["disks"][0]["under-way"]["long"][0];
    assert_eq!((&long["request"], &long["length"]), (&"read".into(), &4096.into()), "{told}");
    until("and that is said", || served.server.said().contains("the storage does not answer"));
    goes.write(4096, &[8; 4096], 0).expect("the other disk is still served");
    // What waits for its requests to end does not wait forever: all others would be held meanwhile.
    served.refuses(&["do not finish: ", "a read of 4096 bytes"], "resize", &["--disk", "bad", "8M"]);

    served.server.signal(Signal::TERM);
    until("the other disk is closed", || vellum(&["info", &good]).code == 0);
    assert_eq!(vellum(&["check", &good]).code, 0, "in good order");
    // The kernel may keep a process until its last read is answered; its messages come before.
    served.server.says("1 disk could not be closed");
    served.server.says(&format!("{file}: a read of 4096 bytes at 0x0 has been in flight"));
    drop(hung);
    let ran = served.server.wait(PATIENCE);
    assert_eq!(ran.code, 1, "{ran:?}");
    let _ = read;
    storage.server.stop();

    let server = Server::start(&[&good]);
    let mut client = Client::connect(&server.peer(), "").expect("it is there");
    assert_eq!((client.read(0, 1).expect("read"), client.read(4096, 1).expect("read")), (vec![7], vec![8]));
    assert!(!server.said().contains("was not closed"), "{}", server.said());
    server.stop();
}

/// All threads that the two modes give to a disk are taken by one whose storage does not answer; another disk
/// on the same worker continues.
#[test]
fn a_hung_disk_takes_no_threads_from_others() {
    let dir = Dir::new("hung-threads");
    for io in ["uring", "threads"] {
        let Some(storage) = Storage::new(&dir, 1) else { return };
        let exports = [format!("bad={}", storage.files[0]), format!("good={}", made(&dir, "raw", "", "4M"))];
        let arguments = ["-f", "raw", "--export", &exports[0], "--export", &exports[1]];
        let served = Controlled::start(&[&arguments[..], &["--threads", "1", "--io", io]].concat());
        let mut goes = served.client("good");
        let hung = storage.hang();
        let mut hang: Vec<Client> = (0..8).map(|_| served.client("bad")).collect();
        for client in &mut hang {
            for number in 0..12_u64 {
                client.send(TRIM, 0, number * 4096, 4096, &[]).expect("sent");
                client.send(READ, 0, number * 4096, 4096, &[]).expect("sent");
            }
        }
        until("all have begun", || {
            let told = served.json("stats", &[]);
            told["disks"][0]["under-way"]["count"].as_u64().is_some_and(|many| many >= 8 * 24)
        });
        for number in 0..20 {
            goes.write(number * 4096, &[5; 4096], 0).expect("written");
            goes.flush().expect("flushed");
            goes.trim(number * 4096, 4096).expect("trimmed");
            goes.zero(number * 4096, 4096, 0).expect("zeroed");
        }
        drop(hung);
        for client in &mut hang {
            for _ in 0..24 {
                let answer = client.answer().expect("all are answered");
                assert_eq!(answer.error, 0, "{io}");
                if answer.cookie % 2 == 0 {
                    client.socket.exactly(4096).expect("the data");
                }
            }
        }
        drop((hang, goes));
        served.server.stop();
        storage.server.stop();
    }
}

/// Reads that hang take no thread from those of other disks on the same worker, whose requests also take threads: a file
/// system that is slow by nature, and what is too much to be copied by the worker. There are as many clients as make the
/// reads that hang fewer than a share, exactly one, and several.
#[test]
fn reads_that_hang_keep_no_reads_and_writes_of_others_waiting() {
    const LEN: u32 = 1 << 20;
    let dir = Dir::new("hung-reads");
    for (io, clients) in [("uring", 1), ("uring", 2), ("uring", 8), ("threads", 8)] {
        let Some(storage) = Storage::new(&dir, 2) else { return };
        let exports = [
            format!("bad={}", storage.files[0]),
            format!("slow={}", storage.files[1]),
            format!("good={}", made(&dir, "raw", "", "4M")),
        ];
        let arguments: Vec<&str> = exports.iter().flat_map(|export| ["--export", export]).collect();
        let served =
            Controlled::start(&[&["-f", "raw", "--threads", "1", "--io", io], &arguments[..]].concat());
        let mut goes = [served.client("good"), served.client("slow")];
        let hung = storage.hang_first();
        let mut hang: Vec<Client> = (0..clients).map(|_| served.client("bad")).collect();
        for client in &mut hang {
            for number in 0..8_u64 {
                client.send(READ, 0, number * 4096, 4096, &[]).expect("sent");
            }
        }
        until("all have begun", || {
            let told = served.json("stats", &[]);
            told["disks"][0]["under-way"]["count"].as_u64().is_some_and(|many| many >= clients * 8)
        });
        for client in &mut goes {
            for round in 0..3_u8 {
                let data = vec![round + 1; LEN as usize];
                for part in 0..4_u64 {
                    client.write(part << 20, &data, 0).expect("written beside those that hang");
                }
                for number in 0..16_u64 {
                    client.send(READ, 0, (number % 4) << 20, LEN, &[]).expect("sent");
                }
                for _ in 0..16 {
                    assert_eq!(client.answer().expect("answered beside those that hang").error, 0, "{io}");
                    assert_eq!(client.socket.exactly(LEN as usize).expect("the data"), data, "{io}");
                }
            }
            client.flush().expect("flushed beside those that hang");
        }
        drop(hung);
        for client in &mut hang {
            for _ in 0..8 {
                assert_eq!(client.answer().expect("all are answered").error, 0, "{io}");
                client.socket.exactly(4096).expect("the data");
            }
        }
        drop((hang, goes));
        served.server.stop();
        storage.server.stop();
    }
}

/// More images hang as they are opened than are opened at once. The others are opened, served, and closed at
/// the end.
#[test]
fn images_whose_opening_hangs_keep_no_other_from_being_served_and_closed() {
    let dir = Dir::new("hung-opening");
    let Some(storage) = Storage::new(&dir, 17) else { return };
    let (good, place) = (made(&dir, "qcow2", "", "4M"), Dir::short());
    let hung = storage.hang();
    let mut command = vellum_command();
    command.args([
        "serve",
        "--threads",
        "1",
        "--drain-seconds",
        "5",
        "--nbd",
        &format!("unix:{}", place.text("nbd")),
    ]);
    for (number, file) in storage.files.iter().enumerate() {
        command.args(["--export", &format!("bad-{number}={file}")]);
    }
    command.args(["--export", &format!("good={good}")]);
    let log = std::fs::File::create(place.join("log")).expect("a log");
    let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().expect("it starts");
    let peer = Peer::Unix(place.join("nbd"));
    let mut client = peer.wait_for("good");
    client.write(0, &[7; 4096], 0).expect("written");
    kill_process(pid_of(&child), Signal::TERM).expect("it runs");
    let said = || std::fs::read_to_string(place.join("log")).expect("the log");
    until("what hangs is named", || said().contains("17 disks could not be closed"));
    until("and what it waited for", || said().matches("opening it does not finish").count() == 2 * 17);
    let ran = vellum(&["check", &good]);
    assert_eq!((ran.code, ran.err.contains("was not closed")), (0, false), "{ran:?}");
    drop(hung);
    let ran = wait(child, Instant::now(), PATIENCE).expect("it ends");
    assert_eq!(ran.code, 1);
    storage.server.stop();
}

#[test]
fn a_hung_disk_does_not_hide_one_that_was_not_closed_well() {
    let dir = Dir::new("hung-and-bad");
    let Some(storage) = Storage::new(&dir, 1) else { return };
    let image = made(&dir, "qcow2", "", "4M");
    let exports = [format!("hung={}", storage.files[0]), format!("bad={image}")];
    let served = Controlled::start(&["-f", "raw", "--export", &exports[0], "--drain-seconds", "5"]);
    vellum(&["export", "add", "-f", "qcow2", "--control", &served.socket, &exports[1]]).answer();
    damage(&image);
    assert_eq!(vellum(&["export", "reopen", "--control", &served.socket, "bad"]).code, 1);
    let mut hangs = served.client("hung");
    let hung = storage.hang();
    hangs.send(READ, 0, 0, 4096, &[]).expect("sent");
    until("it is under way", || served.json("stats", &[])["disks"][0]["under-way"]["count"] == 1);
    served.server.signal(Signal::TERM);
    until("what hangs is named", || served.server.said().contains("1 disk could not be closed"));
    drop(hung);
    let ran = served.server.wait(PATIENCE);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.err.contains("not closed cleanly") && ran.err.contains(&image), "{ran:?}");
    storage.server.stop();
}

/// While a removal waits nothing else is begun on its disk, and an export that is added under the same name
/// is another one.
#[test]
fn a_disk_that_is_being_removed_is_left_alone_and_its_name_is_free() {
    let dir = Dir::new("hung-removed");
    let Some(storage) = Storage::new(&dir, 1) else { return };
    let (good, next, place) = (made(&dir, "qcow2", "", "4M"), made(&dir, "vellum", "", "4M"), Dir::short());
    let going = format!("going={}", storage.files[0]);
    let served = Controlled::start(&["--export", &format!("good={good}")]);
    let export = |rest: &[&str]| {
        let what = ["export", rest[0], "--control", &served.socket];
        vellum(&[&what[..], &rest[1..]].concat())
    };
    let mut going_sockets = Vec::new();
    for kind in ["vhost", "nbd"] {
        going_sockets.push(place.text(&format!("old-{kind}")));
    }
    let nbd = format!("unix:{}", going_sockets[1]);
    export(&["add", "-f", "raw", &going, "--vhost-user-blk", &going_sockets[0], "--nbd", &nbd]).answer();
    let (mut hangs, memory) = (served.client("going"), Memory::new());
    let socket = UnixStream::connect(&going_sockets[0]).expect("it listens");
    let mut machine = Machine::over(socket, &memory, FEATURES);
    let mut queue = machine.start_queue(0, 16, 0);
    let hung = storage.hang();
    hangs.send(READ, 0, 0, 4096, &[]).expect("sent");
    let read = queue.place(0, 0, &[], 512, Shape::Usual);
    queue.hang(&read.pieces);
    queue.kick();
    until("both have begun", || told_of(&served, "going")["under-way"]["count"] == 2);
    let mut removing = vellum_command();
    removing.args(["export", "remove", "--control", &served.socket, "--force", "going"]);
    let removing = removing.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let removing = removing.spawn().expect("it starts");
    until("it is offered no more", || Client::connect(&served.server.peer(), "going").is_err());
    for rest in [&["remove", "going"][..], &["remove", "--force", "going"], &["reopen", "going"]] {
        let ran = export(rest);
        assert!(ran.code == 1 && ran.err.contains("it is being removed"), "{rest:?}: {ran:?}");
    }
    let words = ["it is being removed"];
    served.refuses(&words, "pause", &["--disk", "going"]);
    served.refuses(&words, "resize", &["--disk", "going", "8M"]);
    let ran = vellum(&["snapshot", "create", "--control", &served.socket, "--disk", "going", "one"]);
    assert!(ran.code == 1 && ran.err.contains(words[0]), "{ran:?}");

    let (vhost, nbd) = (place.text("new-vhost"), place.text("new-nbd"));
    let address = format!("unix:{nbd}");
    let added = format!("going={next}");
    export(&["add", &added, "--vhost-user-blk", &vhost, "--nbd", &address]).answer();
    let mut client = Client::connect(&Peer::Unix((&nbd).into()), "going").expect("it is another");
    client.write(0, &[3; 512], 0).expect("written");
    // The name now means the new export.
    vellum(&["pause", "--control", &served.socket, "--disk", "going"]).answer();
    vellum(&["resume", "--control", &served.socket, "--disk", "going"]).answer();
    vellum(&["snapshot", "create", "--control", &served.socket, "--disk", "going", "one"]).answer();
    let ran = export(&["remove", "going"]);
    assert!(ran.code == 1 && ran.err.contains("1 client is connected"), "{ran:?}");
    drop(hung);
    assert_eq!(wait(removing, Instant::now(), PATIENCE).expect("it ends").code, 0);
    assert!(!Path::new(&going_sockets[0]).exists() && !Path::new(&going_sockets[1]).exists());
    assert!(
        Path::new(&vhost).exists() && Path::new(&nbd).exists(),
        "the end of the one before is not its own"
    );
    drop(UnixStream::connect(&vhost).expect("it listens for machines"));
    let mut another = Client::connect(&Peer::Unix((&nbd).into()), "going").expect("it is served");
    assert_eq!(another.read(0, 1).expect("read"), [3]);
    client.flush().expect("nobody was sent away");
    drop((client, another));
    served.server.stop();
    storage.server.stop();
}

/// As above, for a disk that is added to a running server, and one that is removed.
#[test]
fn exports_that_hang_as_they_come_and_go_are_named_at_the_end() {
    let dir = Dir::new("hung-added");
    let Some(storage) = Storage::new(&dir, 2) else { return };
    let good = made(&dir, "qcow2", "", "4M");
    let (going, coming) = (format!("going={}", storage.files[0]), format!("coming={}", storage.files[1]));
    let served = Controlled::start(&["--export", &format!("good={good}"), "--drain-seconds", "5"]);
    let export = |what: &str, rest: &[&str]| {
        let mut command = vellum_command();
        command.args(["export", what, "--control", &served.socket]).args(rest);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it starts")
    };
    vellum(&["export", "add", "--control", &served.socket, "-f", "raw", &going]).answer();
    let mut hangs = served.client("going");
    let hung = storage.hang();
    hangs.send(READ, 0, 0, 4096, &[]).expect("sent");
    until("it has begun", || told_of(&served, "going")["under-way"]["count"] == 1);
    let mut asking = [export("add", &[&coming]), export("remove", &["going", "--force"])];
    until("it is offered no more", || Client::connect(&served.server.peer(), "going").is_err());
    // Both commands are programs of their own, and either may come first.
    until("it is being opened", || served.server.has_open(&storage.files[1]));
    served.server.signal(Signal::TERM);
    served.server.says("2 disks could not be closed");
    served.server.says(&format!("{}: a read of 4096 bytes", storage.files[0]));
    served.server.says(&format!("{}: opening it does not finish", storage.files[1]));
    assert_eq!(vellum(&["check", &good]).code, 0, "in good order");
    drop(hung);
    assert_eq!(served.server.wait(PATIENCE).code, 1);
    asking.iter_mut().for_each(|child| drop(child.wait()));
    storage.server.stop();
}

/// A connection to the control socket that has sent this request.
fn asking(control: &str, request: &serde_json::Value) -> BufReader<UnixStream> {
    let mut socket = UnixStream::connect(control).expect("it listens");
    socket.write_all(format!("{request}\n").as_bytes()).expect("it is heard");
    BufReader::new(socket)
}

/// As many commands as there are connections wait for disks that hang. Queries are answered, and when the
/// clients of the commands have gone, so are all others.
#[test]
fn commands_about_hung_disks_leave_the_control_socket_to_others() {
    let dir = Dir::new("hung-asked");
    let Some(storage) = Storage::new(&dir, 4) else { return };
    let exports: Vec<String> =
        storage.files.iter().enumerate().map(|(number, file)| format!("bad-{number}={file}")).collect();
    let mut arguments = vec!["-f", "raw"];
    exports.iter().for_each(|export| arguments.extend(["--export", export]));
    let served = Controlled::start(&arguments);
    let good = format!("good={}", made(&dir, "qcow2", "", "4M"));
    vellum(&["export", "add", "-f", "qcow2", "--control", &served.socket, &good]).answer();
    let mut hangs: Vec<Client> = (0..4).map(|number| served.client(&format!("bad-{number}"))).collect();
    let hung = storage.hang();
    for client in &mut hangs {
        client.send(READ, 0, 0, 4096, &[]).expect("sent");
    }
    until("all have begun", || {
        let told = served.json("stats", &[]);
        (0..4).all(|disk| told["disks"][disk]["under-way"]["count"] == 1)
    });
    let ask = |request: Value| asking(&served.socket, &request);
    let list = |disk: &str| ask(json!({"command": "snapshot-list", "disk": disk}));
    let answer = |mut asked: BufReader<UnixStream>| {
        let mut answer = String::new();
        asked.read_line(&mut answer).expect("an answer");
        answer
    };
    let mut waiting = Vec::new();
    for number in 0..3 {
        let disk = format!("bad-{number}");
        waiting.push(ask(json!({"command": "pause", "disk": disk})));
        until("it is being paused", || served.json("stats", &[])["disks"][number]["state"] == "pausing");
        // These wait for the pause.
        (0..3).for_each(|_| waiting.push(list(&disk)));
    }
    until("all of them wait", || answer(list("good")).contains("busy: the server already has 12 commands"));
    let mut others: Vec<_> = (0..4).map(|_| list("bad-3")).collect();
    for other in others.drain(..) {
        assert!(answer(other).contains("busy: the server already has 12 commands"));
    }
    served.refuses(&["busy: ", "file-0 already has 4 commands"], "resize", &["--disk", "bad-0", "8M"]);
    served.json("stats", &[]);
    drop(waiting);
    until("there is room again", || answer(list("good")).contains("return"));
    served.refuses(&["busy: ", "file-0 already has 4 commands"], "resize", &["--disk", "bad-0", "8M"]);
    drop(hung);
    until("they have ended", || {
        // A command that was begun is carried out, though no client waits.
        (0..3).all(|disk| served.json("stats", &[])["disks"][disk]["state"] == "paused")
    });
    (0..3).for_each(|number| drop(served.ask("resume", &["--disk", &format!("bad-{number}")]).answer()));
    drop(hangs);
    served.server.stop();
    storage.server.stop();
}
