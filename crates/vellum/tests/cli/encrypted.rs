//! Encrypted images, with `qemu-img` as the other program: made, copied, served; secrets and keys.

use std::process::Stdio;
use std::time::Instant;

use rustix::process::{Signal, kill_process};

use super::refused;
use super::support::dir::Dir;
use super::support::program::{finish, pid_of, run, succeed, vellum, vellum_command, wait};
use super::support::server::Server;
use super::support::{PATIENCE, noise, patchy, until};

const LEN: usize = 3 << 20;

fn qemu_img(arguments: &[&str]) {
    succeed("qemu-img", arguments);
}

/// Files of secrets, and the options that name them.
fn secret(dir: &Dir, id: &str, bytes: &str) -> [String; 2] {
    let file = dir.text(id);
    std::fs::write(&file, bytes).expect("a secret");
    ["--secret".to_owned(), format!("id={id},file={file}")]
}

#[test]
fn images_go_to_and_fro_between_both_programs() {
    crate::requires!("qemu-img");
    let dir = Dir::new("encrypted");
    let [option, spec] = secret(&dir, "sec0", "correct horse");
    let object = format!("secret,id=sec0,file={}", dir.text("sec0"));
    let (raw, ours, back) = (dir.text("disk.raw"), dir.text("ours.qcow2"), dir.text("back.raw"));
    std::fs::write(&raw, patchy(LEN, 3)).expect("a disk");
    let new = "encrypt.format=luks,encrypt.key-secret=sec0,encrypt.iter-time=10";
    vellum(&["convert", &option, &spec, "-O", "qcow2", "-o", new, &raw, &ours]).answer();
    let source = format!("driver=qcow2,file.filename={ours},encrypt.key-secret=sec0");
    qemu_img(&["convert", "--object", &object, "--image-opts", &source, "-O", "raw", &back]);
    assert!(std::fs::read(&raw).expect("there") == std::fs::read(&back).expect("there"), "QEMU reads ours");
    qemu_img(&["check", "--object", &object, "--image-opts", &source]);
    vellum(&["check", &ours]).answer();
    // Theirs, inside qcow2 and raw, in both programs' words for a secret.
    for (format, options) in [("qcow2", new), ("luks", "key-secret=sec0,iter-time=10")] {
        let theirs = dir.text("theirs");
        qemu_img(&["convert", "--object", &object, "-f", "raw", "-O", format, "-o", options, &raw, &theirs]);
        let _ = std::fs::remove_file(&back);
        vellum(&["convert", "--object", &object, &theirs, &back]).answer();
        assert!(std::fs::read(&raw).expect("there") == std::fs::read(&back).expect("there"), "{format}");
        vellum(&["compare", &option, &spec, &theirs, &raw]).answer();
        assert!(vellum(&["info", &theirs]).answer().contains("encrypted: yes"));
        refused(1, &["encrypted with LUKS", "--secret id=NAME,file=FILE"], &["convert", &theirs, &back]);
        refused(1, &["line break"], &["convert", "--secret", &wrong(&dir), &theirs, &back]);
    }
}

/// Keys come and go in the words of `qemu-img amend`, by both programs in turns.
#[test]
fn keys_are_amended_in_turns() {
    crate::requires!("qemu-img");
    let dir = Dir::new("encrypted-amend");
    let ids = ["a", "b", "c"];
    let all: Vec<String> = ids.iter().flat_map(|id| secret(&dir, id, &format!("the secret {id}"))).collect();
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    let objects: Vec<String> = ids.iter().map(|id| format!("secret,id={id},file={}", dir.text(id))).collect();
    let objects: Vec<&str> = objects.iter().flat_map(|object| ["--object", object]).collect();
    for (format, prefix) in [("qcow2", "encrypt."), ("luks", "")] {
        let image = dir.text(format);
        let made = match format {
            "qcow2" => "encrypt.format=luks,encrypt.key-secret=a,encrypt.iter-time=10",
            _ => "key-secret=a,iter-time=10",
        };
        qemu_img(&[&["create", "-q"], &objects[..], &["-f", format, "-o", made, &image, "1M"]].concat());
        let named = |id: &str| match format {
            "qcow2" => format!("driver=qcow2,encrypt.key-secret={id},file.filename={image}"),
            _ => format!("driver=luks,key-secret={id},file.filename={image}"),
        };
        let words = |options: &str| {
            options.split(',').map(|option| format!("{prefix}{option}")).collect::<Vec<_>>().join(",")
        };
        let ours = |options: &str| {
            let words = words(options);
            vellum(&[&["amend", "-f", format, "-o", &words], &all[..], &[&image]].concat())
        };
        let theirs = |id: &str, options: &str| {
            let words = words(options);
            qemu_img(&[&["amend"], &objects[..], &["--image-opts", "-o", &words, &named(id)]].concat());
        };
        let opens = |expected: &[&str]| {
            for id in ids {
                let info = run(
                    "qemu-io",
                    &[&objects[..], &["--image-opts", "-c", "read 0 512", &named(id)]].concat(),
                );
                assert_eq!(info.code == 0, expected.contains(&id), "{format} {id}: {info:?}");
            }
        };
        ours("state=active,new-secret=b,iter-time=10").answer();
        opens(&["a", "b"]);
        theirs("b", "state=active,new-secret=c,iter-time=10,keyslot=5");
        opens(&["a", "b", "c"]);
        ours("state=inactive,old-secret=a").answer();
        opens(&["b", "c"]);
        theirs("c", "state=inactive,old-secret=b");
        opens(&["c"]);
        ours("state=active,new-secret=a,iter-time=10,keyslot=2").answer();
        ours("state=inactive,keyslot=5").answer();
        opens(&["a"]);
        for (options, why) in [
            ("state=inactive,keyslot=2", "last key"),
            ("state=active,new-secret=b,keyslot=2,iter-time=10", "slot 2"),
            ("state=active", "new-secret"),
            ("state=inactive", "old-secret"),
            ("state=inactive,new-secret=b", "state=active"),
            ("state=active,new-secret=b,old-secret=a", "state=inactive"),
            ("new-secret=b", "state=active"),
            ("state=active,new-secret=nobody", "nobody"),
            ("state=gone", "active, inactive"),
            ("state=inactive,keyslot=8", "0 to 7"),
        ] {
            let ran = ours(options);
            assert!(ran.code == 1 && ran.err.contains(why), "{options}: {ran:?}");
            opens(&["a"]);
        }
    }
}

fn wrong(dir: &Dir) -> String {
    secret(dir, "wrong", "correct horse\n")[1].clone()
}

#[test]
fn what_a_server_writes_is_encrypted_and_kept() {
    let dir = Dir::new("encrypted-served");
    let [option, spec] = secret(&dir, "a", "b");
    let image = dir.text("disk.qcow2");
    let new = "encrypt.format=luks,encrypt.key-secret=a,encrypt.iter-time=10";
    vellum(&["create", "-q", "-f", "qcow2", &option, &spec, "-o", new, &image, "3M"]).answer();
    let bytes = noise(70_000, 9);
    let served = Server::start(&[&option, &spec, &image]);
    let mut guest = super::support::client::Client::connect(&served.peer(), "").expect("a connection");
    guest.write(1 << 20, &bytes, 0).expect("written");
    guest.write(5000, &bytes[..100], 0).expect("written");
    guest.flush().expect("flushed");
    assert_eq!(guest.read(1 << 20, 70_000).expect("read"), bytes);
    drop(guest);
    drop(served);
    let raw = dir.text("back.raw");
    vellum(&["recover", &image]).answer();
    vellum(&["convert", &option, &spec, &image, &raw]).answer();
    let read = std::fs::read(&raw).expect("there");
    assert!(read[1 << 20..][..70_000] == bytes && read[5000..5100] == bytes[..100]);
    let stored = std::fs::read(&image).expect("there");
    assert!(!stored.windows(32).any(|window| window == &bytes[512..544]), "nobody may read it");
}

/// A header may ask for so many iterations that a key takes minutes.
#[test]
fn a_server_that_derives_a_key_ends_when_it_is_told_to() {
    const ITERATIONS: u32 = 99_000_000;
    let dir = Dir::new("encrypted-slow");
    let [option, spec] = secret(&dir, "a", "b");
    let image = dir.text("disk.qcow2");
    let new = "encrypt.format=luks,encrypt.key-secret=a,encrypt.iter-time=10";
    vellum(&["create", "-q", "-f", "qcow2", &option, &spec, "-o", new, &image, "3M"]).answer();
    let mut bytes = std::fs::read(&image).expect("an image");
    let header = bytes.windows(6).position(|part| part == b"LUKS\xBA\xBE").expect("a header");
    // The iterations of the first slot.
    bytes[header + 212..][..4].copy_from_slice(&ITERATIONS.to_be_bytes());
    std::fs::write(&image, &bytes).expect("our own file");
    for signal in [Signal::TERM, Signal::INT] {
        let place = Dir::short();
        let nbd = format!("unix:{}", place.text("nbd"));
        let mut command = vellum_command();
        // A server that waits for the key ends with an error after twice this time.
        command.args(["serve", &option, &spec, &image, "--nbd", &nbd, "--drain-seconds", "5"]);
        let begun = Instant::now();
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("our own program can be started");
        until("it derives a key", || derives(child.id()));
        kill_process(pid_of(&child), signal).expect("it runs");
        let ran = wait(child, begun, PATIENCE).expect("it ends");
        assert_eq!(ran.code, 0, "{signal:?}: {ran:?}");
        assert!(!ran.err.contains("not closed") && !ran.err.contains("ready"), "{signal:?}: {ran:?}");
        assert!(std::fs::read(&image).expect("there") == bytes, "{signal:?}: it is as it was");
    }
}

/// Whether a thread for computations has computed for a while.
fn derives(pid: u32) -> bool {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return false };
    threads.flatten().any(|thread| {
        let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
        let (name, rest) = stat.rsplit_once(')').unwrap_or_default();
        // Its time in user mode, in hundredths of a second.
        let ticks = rest.split_whitespace().nth(11).and_then(|ticks| ticks.parse().ok());
        name.contains("vellum-blocking") && ticks.is_some_and(|ticks: u64| ticks >= 20)
    })
}

#[test]
fn what_is_temporary_is_not_kept_in_plain_text() {
    let dir = Dir::new("encrypted-temporary");
    let [option, spec] = secret(&dir, "a", "b");
    let (image, over, socket) = (dir.text("disk.qcow2"), dir.text("over.qcow2"), dir.text("s"));
    let new = "encrypt.format=luks,encrypt.key-secret=a,encrypt.iter-time=10";
    vellum(&["create", "-q", "-f", "qcow2", &option, &spec, "-o", new, &image, "3M"]).answer();
    vellum(&["create", "-q", "-f", "qcow2", &option, &spec, "-b", &image, "-F", "qcow2", &over]).answer();
    let nbd = format!("unix:{socket}");
    for image in [&image, &over] {
        let names = dir.names();
        let mut command = vellum_command();
        command
            .args(["serve", "--temporary", "--nbd", &nbd, &option, &spec, image])
            .env("TMPDIR", dir.path());
        let ran = finish(command, None);
        assert_eq!(ran.code, 1, "{ran:?}");
        for words in ["is encrypted", "--temporary", "make an encrypted clone"] {
            assert!(ran.err.contains(words), "{ran:?}");
        }
        assert_eq!(dir.names(), names, "nothing is left");
    }
}

/// The native format, in every layout: made, served and killed, managed without a secret, cloned, copied.
#[test]
fn native_images_are_encrypted() {
    let dir = Dir::new("encrypted-native");
    let [option, spec] = secret(&dir, "a", "b");
    let on = "encrypt.format=luks,encrypt.key-secret=a,encrypt.iter-time=10";
    let (raw, back, image) = (dir.text("disk.raw"), dir.text("back.raw"), dir.text("disk.vlm"));
    let (text, clone) = (noise(70_000, 9), dir.text("clone.vlm"));
    for layout in ["linear", "table", "zoned"] {
        let mut model = patchy(LEN, 3);
        std::fs::write(&raw, &model).expect("a disk");
        let new = format!("{on},layout={layout}");
        vellum(&["convert", &option, &spec, "-O", "vellum", "-o", &new, &raw, &image]).answer();
        let info = vellum(&["info", &image]).answer();
        assert!(info.contains("encrypted: yes") && info.contains("luks (aes-256-xts-plain64"), "{info}");
        assert_eq!(vellum(&["key", "list", &image]).answer().matches("in use").count(), 1, "{layout}");
        refused(1, &["encrypted with LUKS", "--secret id=NAME,file=FILE"], &["convert", &image, &back]);
        refused(1, &["line break"], &["convert", "--secret", &wrong(&dir), &image, &back]);
        let served = Server::start(&[&option, &spec, &image]);
        let mut guest = super::support::client::Client::connect(&served.peer(), "").expect("a connection");
        guest.write(1 << 20, &text, 0).expect("written");
        guest.write(5000, &text[..100], 0).expect("written");
        guest.flush().expect("flushed");
        assert_eq!(guest.read(1 << 20, 70_000).expect("read"), text);
        drop(guest);
        drop(served);
        model[1 << 20..][..70_000].copy_from_slice(&text);
        model[5000..5100].copy_from_slice(&text[..100]);
        vellum(&["recover", &image]).answer();
        vellum(&["check", &image]).answer();
        if layout != "linear" {
            vellum(&["snapshot", "create", &image, "one"]).answer();
        }
        vellum(&["resize", "-q", &image, "+1M"]).answer();
        model.resize(LEN + (1 << 20), 0);
        let options =
            ["create", "-q", "-f", "vellum", &option, &spec, "-b", "disk.vlm", "-F", "vellum", "-o"];
        vellum(&[&options[..], &[&new, &clone]].concat()).answer();
        for image in [&image, &clone] {
            vellum(&["convert", "-q", &option, &spec, image, &back]).answer();
            assert!(std::fs::read(&back).expect("there") == model, "{layout}: {image}");
            let stored = std::fs::read(image).expect("there");
            assert!(!stored.windows(32).any(|window| window == &text[512..544]), "nobody may read {image}");
        }
    }
    let fast = dir.text("fast");
    refused(1, &["as they are"], &["tier", "attach", "--fast", &fast, "--fast-size", "64M", &image]);
    let new = format!("{on},layout=table");
    let with = ["create", "-f", "vellum", &option, &spec, "-o", &new, "--fast", &fast, "--fast-size", "64M"];
    refused(1, &["--fast"], &[&with[..], &[&dir.text("new.vlm"), "1M"]].concat());
    assert!(!std::path::Path::new(&fast).exists(), "no medium is left behind");
    let embed = format!("{on},layout=zoned,embed=on");
    let create = ["create", "-f", "vellum", &option, &spec, "-o", &embed, &image, "1M"];
    refused(1, &["embed=on cannot be combined"], &create);
}

#[test]
fn keys_are_changed() {
    for format in ["qcow2", "vellum"] {
        keys_of(format);
    }
}

fn keys_of(format: &str) {
    let dir = Dir::new(&format!("encrypted-keys-{format}"));
    let ([option, old], [_, new]) = (secret(&dir, "old", "one"), secret(&dir, "new", "two"));
    let (image, raw) = (dir.text("disk"), dir.text("back.raw"));
    let made = "encrypt.format=luks,encrypt.key-secret=old,encrypt.iter-time=10";
    vellum(&["create", "-q", "-f", format, &option, &old, "-o", made, &image, "1M"]).answer();
    let added = vellum(&[
        "key",
        "add",
        &option,
        &old,
        &option,
        &new,
        "--new-secret",
        "new",
        "--iter-time",
        "10",
        &image,
    ]);
    assert!(added.answer().contains("slot 1"));
    assert_eq!(vellum(&["key", "list", &image]).answer().matches("in use").count(), 2);
    for spec in [&old, &new] {
        vellum(&["convert", &option, spec, &image, &raw]).answer();
    }
    vellum(&["key", "remove", &option, &old, "--old-secret", "old", &image]).answer();
    refused(1, &["no secret that was given opens"], &["convert", &option, &old, &image, &raw]);
    // As after a removal that failed in the middle.
    let again = vellum(&["key", "remove", "--slot", "0", &image]).answer();
    assert!(again.contains("slot 0 had no key: its key material was overwritten again"), "{again}");
    refused(1, &["last key"], &["key", "remove", "--slot", "1", &image]);
    let all = ["key", "remove", &option, &new, "--old-secret", "new", &image];
    refused(1, &["every key slot"], &all);
    refused(1, &["say which key"], &["key", "remove", &image]);
    vellum(&["convert", &option, &new, &image, &raw]).answer();
    vellum(&["check", &image]).answer();
}

/// What is below is only measured, which needs no secret.
#[test]
fn an_image_over_an_encrypted_one_is_resized_without_a_secret() {
    let dir = Dir::new("encrypted-resized");
    let [option, spec] = secret(&dir, "a", "b");
    let on = "encrypt.format=luks,encrypt.key-secret=a,encrypt.iter-time=10";
    let (base, long, top) = (dir.text("base.qcow2"), dir.text("long.qcow2"), dir.text("top.qcow2"));
    vellum(&["create", "-q", "-f", "qcow2", &option, &spec, "-o", on, &base, "3M"]).answer();
    vellum(&["create", "-q", "-f", "qcow2", &option, &spec, "-o", on, &long, "9M"]).answer();
    for (below, options) in [("base.qcow2", &["-o", on][..]), ("base.qcow2", &[]), ("long.qcow2", &[])] {
        let create = ["create", "-q", "-f", "qcow2", &option, &spec, "-b", below, "-F", "qcow2"];
        vellum(&[&create[..], options, &[&top, "3M"]].concat()).answer();
        vellum(&["resize", "-q", &top, "+1M"]).answer();
        assert_eq!(vellum(&["info", "--output", "json", &top]).json()["virtual-size"], 4 << 20);
    }
}

/// What lies behind the end that it had in between is gone, whoever else names its cluster. That takes the secret where there is
/// something, and no secret where there is nothing.
#[test]
fn an_encrypted_disk_grows_from_an_end_within_a_cluster() {
    const END: usize = 399_872;
    let dir = Dir::new("encrypted-grown");
    let [option, spec] = secret(&dir, "a", "b");
    let on = "encrypt.format=luks,encrypt.key-secret=a,encrypt.iter-time=10";
    let (raw, back) = (dir.text("disk.raw"), dir.text("back.raw"));
    let content = noise(1 << 20, 8);
    std::fs::write(&raw, &content).expect("a disk");
    let reads = |image: &str, snapshot: &[&str]| {
        let how = ["convert", "-q", "-O", "raw", &option, &spec];
        vellum(&[&how[..], snapshot, &[image, &back]].concat()).answer();
        std::fs::read(&back).expect("a copy")
    };
    for (options, snapshots) in
        [("", 0), ("", 1), (",extended_l2=off", 0), (",cluster_size=4k,extended_l2=off", 2)]
    {
        let image = dir.text("disk.qcow2");
        let on = format!("{on}{options}");
        vellum(&["convert", "-q", "-O", "qcow2", &option, &spec, "-o", &on, &raw, &image]).answer();
        for name in &["one", "two"][..snapshots] {
            vellum(&["snapshot", "create", &image, name]).answer();
        }
        vellum(&["resize", "-q", "--shrink", &image, &END.to_string()]).answer();
        refused(1, &["only with its key", "--secret id=NAME,file=FILE"], &["resize", &image, "1M"]);
        refused(1, &["no secret that was given"], &["resize", "--secret", &wrong(&dir), &image, "1M"]);
        assert!(reads(&image, &[]) == content[..END], "{options}: refused");
        vellum(&["resize", "-q", &option, &spec, &image, "1M"]).answer();
        let disk = reads(&image, &[]);
        assert!(disk[..END] == content[..END], "{options} {snapshots}: what it had");
        assert!(disk[END..].iter().all(|byte| *byte == 0), "{options} {snapshots}: what was cut off is back");
        for name in &["one", "two"][..snapshots] {
            assert!(reads(&image, &["-l", name]) == content, "{options}: snapshot {name}");
        }
        vellum(&["check", &image]).answer();
        std::fs::remove_file(&image).expect("it is there");
    }
    // A served disk: its server has the secret.
    let (image, control) = (dir.text("served.qcow2"), dir.text("control"));
    vellum(&["convert", "-q", "-O", "qcow2", &option, &spec, "-o", on, &raw, &image]).answer();
    vellum(&["resize", "-q", "--shrink", &image, &END.to_string()]).answer();
    let served = Server::start(&[&option, &spec, "--control", &control, &image]);
    vellum(&["resize", "-q", "--control", &control, "1M"]).answer();
    served.stop();
    let disk = reads(&image, &[]);
    assert!(
        disk[..END] == content[..END] && disk[END..].iter().all(|byte| *byte == 0),
        "grown while it is served"
    );
    // A disk that has nothing in that cluster.
    let image = dir.text("empty.qcow2");
    let size = END.to_string();
    vellum(&["create", "-q", "-f", "qcow2", &option, &spec, "-o", on, &image, &size]).answer();
    vellum(&["resize", "-q", &image, "1M"]).answer();
    assert!(reads(&image, &[]).iter().all(|byte| *byte == 0));
}

#[test]
fn what_is_less_protected_than_before_is_said() {
    let dir = Dir::new("encrypted-copies");
    let [option, spec] = secret(&dir, "a", "b");
    let on = "encrypt.format=luks,encrypt.key-secret=a,encrypt.iter-time=10";
    let (base, raw) = (dir.text("base.qcow2"), dir.text("copy.raw"));
    vellum(&["create", "-q", "-f", "qcow2", &option, &spec, "-o", on, &base, "1M"]).answer();
    let warns = |arguments: &[&str], warns: bool| {
        let ran = vellum(&[&arguments[..1], &[&option, &spec], &arguments[1..]].concat());
        assert_eq!(
            (ran.code, ran.err.lines().count()),
            (0, usize::from(warns)),
            "{arguments:?}: {}",
            ran.err
        );
        assert!(ran.err.contains("without a secret") == warns, "{}", ran.err);
    };
    let [copy, clone, top] = ["copy.qcow2", "clone.qcow2", "top.qcow2"].map(|name| dir.text(name));
    warns(&["convert", &base, &raw], true);
    warns(&["convert", "-q", &base, &raw], false);
    warns(&["convert", "-n", &base, &raw], true);
    warns(&["convert", "-O", "qcow2", "-o", on, &base, &copy], false);
    warns(&["convert", "-n", "-O", "qcow2", &base, &copy], false);
    warns(&["convert", &raw, &copy], false);
    warns(&["clone", &base, &clone], true);
    warns(&["convert", &clone, &raw], true);
    for (format, name) in [("qcow2", "top.qcow2"), ("vellum", "top.vlm")] {
        let top = dir.text(name);
        warns(&["create", "-f", format, "-b", "base.qcow2", "-F", "qcow2", &top], true);
        warns(&["create", "-q", "-f", format, "-b", "base.qcow2", "-F", "qcow2", &top], false);
    }
    warns(&["create", "-f", "qcow2", "-o", on, "-b", "base.qcow2", "-F", "qcow2", &top], false);
}

#[test]
fn a_secret_never_stands_on_a_command_line() {
    let dir = Dir::new("encrypted-words");
    let image = dir.text("disk.qcow2");
    let make = |words: &[&str]| {
        let all = [&["create", "-f", "qcow2"], words, &[&image, "1M"]].concat();
        let ran = refused(1, &[], &all.iter().map(|word| &**word).collect::<Vec<_>>());
        assert!(!ran.err.contains("hunter2"), "{}", ran.err);
        ran.err
    };
    let on = "encrypt.format=luks,encrypt.key-secret=a";
    assert!(make(&["--object", "secret,id=a,data=hunter2", "-o", on]).contains("all users"));
    assert!(make(&["--secret", "hunter2", "-o", on]).contains("id=NAME"));
    assert!(make(&["-o", on]).contains("--secret id=a,file=FILE"));
    assert!(make(&["-o", "encrypt.format=luks"]).contains("encrypt.key-secret"));
    assert!(make(&["-o", "encryption=on"]).contains("encrypt.format=luks"));
    assert!(make(&["-o", "encrypt.format=aes,encrypt.key-secret=a"]).contains("broken"));
    let [option, spec] = secret(&dir, "a", "b");
    let full = format!("{on},preallocation=full");
    assert!(make(&[&option, &spec, "-o", &full]).contains("random bytes"));
}

/// Options that say that an image is encrypted, and a secret for a single disk, are claims: whoever can write to the file could
/// have cleared the mark, and what a guest writes would be plain.
#[test]
fn an_image_that_is_said_to_be_encrypted_must_be() {
    let dir = Dir::new("encrypted-claims");
    let [option, spec] = secret(&dir, "a", "b");
    let on = "encrypt.format=luks,encrypt.key-secret=a,encrypt.iter-time=10";
    for (format, name) in [("qcow2", "qcow2"), ("vellum", "vlm")] {
        let (plain, encrypted) = (dir.text(&format!("plain.{name}")), dir.text(&format!("encrypted.{name}")));
        vellum(&["create", "-q", "-f", format, &plain, "1M"]).answer();
        vellum(&["create", "-q", "-f", format, &option, &spec, "-o", on, &encrypted, "1M"]).answer();
        let options = |path: &str| format!("driver={format},encrypt.key-secret=a,file.filename={path}");
        let (raw, nowhere) = (dir.text("raw"), format!("unix:{}", dir.text("s")));
        let what = ["is not encrypted", "omit them"];
        refused(1, &what, &["convert", "-q", &option, &spec, "--image-opts", &options(&plain), &raw]);
        refused(1, &what, &["check", &option, &spec, "--image-opts", &options(&plain)]);
        refused(2, &what, &["compare", &option, &spec, "--image-opts", &options(&plain), &options(&plain)]);
        refused(1, &what, &["serve", "--nbd", &nowhere, &option, &spec, "--image-opts", &options(&plain)]);
        refused(
            1,
            &what,
            &["serve", "--temporary", "--nbd", &nowhere, &option, &spec, "--image-opts", &options(&plain)],
        );
        refused(1, &["omit --secret"], &["serve", "--nbd", &nowhere, &option, &spec, &plain]);
        let json = format!(
            "json:{{\"driver\":\"{format}\",\"encrypt\":{{\"format\":\"luks\"}},\"file\":{{\"filename\":\"{plain}\"}}}}"
        );
        refused(1, &what, &["serve", "--nbd", &nowhere, &json]);
        vellum(&["convert", "-q", &option, &spec, "--image-opts", &options(&encrypted), &raw]).answer();
        drop(Server::start(&[&option, &spec, "--image-opts", &options(&encrypted)]));
        // One of two disks need not be, and an image over an encrypted one need not be.
        let export = format!("second={encrypted}");
        drop(Server::start(&[&option, &spec, &plain, "--export", &export]));
        let top = dir.text("top.qcow2");
        let below = format!("encrypted.{name}");
        vellum(&["create", "-q", "-f", "qcow2", &option, &spec, "-b", &below, "-F", format, &top]).answer();
        drop(Server::start(&[&option, &spec, &top]));
    }
}

#[test]
fn the_target_of_a_migration_is_encrypted() {
    let dir = Dir::new("encrypted-migration");
    let [option, spec] = secret(&dir, "a", "b");
    let on = "encrypt.format=luks,encrypt.key-secret=a,encrypt.iter-time=10";
    let source = dir.text("source.qcow2");
    vellum(&["create", "-q", "-f", "qcow2", &option, &spec, "-o", on, &source, "1M"]).answer();
    let served = Server::start(&[&option, &spec, &source]);
    for format in ["qcow2", "vellum"] {
        let (target, uri) = (dir.text(&format!("target-{format}")), served.uri(""));
        let prepare = ["migrate", "prepare", "-f", format, "--from", &uri, &option, &spec, "-o", on, &target];
        vellum(&prepare).answer();
        assert!(vellum(&["info", &target]).answer().contains("encrypted: yes"), "{format}");
        assert_eq!(vellum(&["key", "list", &target]).answer().matches("in use").count(), 1);
    }
}

/// An encrypted disk is backed up into encrypted images; a copy is measured before it is made.
#[test]
fn a_backup_of_an_encrypted_disk_is_encrypted() {
    let dir = Dir::new("encrypted-backup");
    let [option, spec] = secret(&dir, "a", "b");
    let on = "encrypt.format=luks,encrypt.key-secret=a,encrypt.iter-time=10";
    let (raw, image) = (dir.text("raw"), dir.text("disk.qcow2"));
    std::fs::write(&raw, patchy(LEN, 3)).expect("a disk");
    let wished = ["-O", "qcow2", "-o", on, &option, &spec, &raw];
    let measured = vellum(&[&["measure", "--output", "json"][..], &wished].concat()).json();
    vellum(&[&["convert"][..], &wished, &[&image]].concat()).answer();
    let len = std::fs::metadata(&image).expect("there").len();
    assert!(measured["required"].as_u64().is_some_and(|required| required >= len), "{measured}, {len}");
    vellum(&["bitmap", "--add", &image, "b0"]).answer();
    let (full, next) = (dir.text("full.qcow2"), dir.text("next.qcow2"));
    let backup = ["backup", "-q", "--bitmap", "b0", &option, &spec];
    refused(1, &["encrypt.format=luks"], &[&backup[..], &[&image, &full]].concat());
    vellum(&[&backup[..], &["-o", on, &image, &full]].concat()).answer();
    vellum(&["compare", &option, &spec, &image, &full]).answer();
    let served = Server::start(&[&option, &spec, &image]);
    let mut guest = super::support::client::Client::connect(&served.peer(), "").expect("a connection");
    let text = noise(70_000, 9);
    guest.write(1 << 20, &text, 0).expect("written");
    guest.flush().expect("flushed");
    drop(guest);
    served.stop();
    let incremental = ["--incremental", "-B", "full.qcow2", "-F", "qcow2"];
    let incremental =
        incremental.map(|word| if word == "full.qcow2" { full.clone() } else { word.to_owned() });
    let incremental: Vec<&str> = incremental.iter().map(String::as_str).collect();
    vellum(&[&backup[..], &incremental, &["-o", on, &image, &next]].concat()).answer();
    vellum(&["compare", &option, &spec, &image, &next]).answer();
    for file in [&full, &next] {
        let stored = std::fs::read(file).expect("there");
        assert!(!stored.windows(32).any(|window| window == &text[512..544]), "nobody may read {file}");
        assert!(vellum(&["info", file]).answer().contains("encrypted: yes"), "{file}");
    }
}
