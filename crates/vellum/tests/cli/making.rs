//! Making images: create, convert, quickstart.

use std::os::unix::fs::MetadataExt;
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process};

use super::support::dir::Dir;
use super::support::program::{has, pid_of, qemu_dump, run, succeed, vellum, vellum_command, wait};
use super::support::{first_difference, noise, patchy};
use super::{MIB, refused};
use crate::requires;

fn room(path: &str) -> usize {
    usize::try_from(std::fs::metadata(path).expect("the file").blocks() * 512).expect("a number")
}

#[test]
fn sizes_have_suffixes() {
    let dir = Dir::new("sizes");
    let image = dir.text("image");
    for (text, bytes) in [
        ("512", 512),
        ("1k", 1024),
        ("3K", 3072),
        ("5M", 5 << 20),
        ("1.5G", 3 << 29),
        ("2T", 2u64 << 40),
        ("0", 0),
    ] {
        for format in ["raw", "qcow2"] {
            vellum(&["create", "-q", "-f", format, &image, text]).answer();
            let info = vellum(&["info", "-f", format, "--output", "json", &image]).json();
            assert_eq!(info["virtual-size"], bytes, "{format} {text}");
            assert!(room(&image) < MIB, "a disk of {text} takes {} bytes", room(&image));
        }
    }
    // A command that cannot be parsed fails like any other: 2 would mean a corrupt image.
    for text in ["", "-5", "1Q", "lots", "1.2.3M", "99999999999E"] {
        let ran = vellum(&["create", "-f", "qcow2", &image, "--", text]);
        assert_eq!(ran.code, 1, "{text:?}: {ran:?}");
        assert!(ran.err.contains("size") && ran.out.is_empty(), "{text:?}: {ran:?}");
    }
    assert_eq!(vellum(&["check", "--nonsense", &image]).code, 1);
    assert_eq!(vellum(&["--help"]).code, 0);
}

#[test]
fn options_of_convert_may_stand_between_its_images() {
    let dir = Dir::new("between");
    let (one, two, copy) = (dir.text("one"), dir.text("two"), dir.text("copy"));
    std::fs::write(&one, noise(MIB, 1)).expect("a disk");
    std::fs::write(&two, noise(MIB, 2)).expect("a disk");
    let all = [noise(MIB, 1), noise(MIB, 2)].concat();
    for (words, len) in [
        (&[one.as_str(), "-O", "raw", &copy][..], MIB),
        (&["-f", "raw", &one, "-O", "raw", &two, "-q", &copy], 2 * MIB),
        (&[&one, &two, &copy, "-O", "raw", "-f", "raw"], 2 * MIB),
    ] {
        vellum(&[&["convert"], words].concat()).answer();
        assert!(std::fs::read(&copy).expect("a copy") == all[..len], "{words:?}");
    }
    refused(1, &["TARGET"], &["convert", "-O", "raw", &one]);
}

#[test]
fn bad_options_are_refused_and_leave_nothing() {
    let dir = Dir::new("options");
    let image = dir.text("image");
    for (options, word) in [
        ("nonsense=1", "nonsense"),
        ("cluster_size=3k", "cluster_size"),
        ("cluster_size=256", "cluster_size"),
        ("cluster_size=4M", "cluster_size"),
        ("refcount_bits=3", "refcount_bits"),
        ("refcount_bits=128", "refcount_bits"),
        ("compat=v4", "compat"),
        ("compat=v2,extended_l2=on", "extended_l2"),
        ("compat=v2,lazy_refcounts=on", "lazy_refcounts"),
        ("compat=v2,refcount_bits=1", "refcount_bits"),
        ("compat=v2,compression_type=zstd", "compression_type"),
        ("extended_l2=on,cluster_size=8k", "cluster"),
        ("extended_l2=perhaps", "extended_l2"),
        ("preallocation=some", "preallocation"),
        ("data_file_raw=on", "data_file"),
        ("compression_type=lzma", "compression_type"),
    ] {
        refused(1, &[word], &["create", "-f", "qcow2", "-o", options, &image, "1M"]);
        assert_eq!(dir.names(), Vec::<String>::new(), "{options} leaves something");
    }
    refused(1, &["cluster_size"], &["create", "-f", "raw", "-o", "cluster_size=4k", &image, "1M"]);
    refused(1, &["backing"], &["create", "-f", "raw", "-b", "x", "-F", "raw", &image, "1M"]);
    refused(1, &["size"], &["create", "-f", "qcow2", &image]);
    refused(1, &["-F raw", "base"], &["create", "-f", "qcow2", "-b", "base", &image]);
    refused(1, &["no such base"], &["create", "-f", "qcow2", "-b", "no such base", "-F", "raw", &image]);
    refused(1, &["not/there"], &["create", "-f", "qcow2", &dir.text("not/there"), "1M"]);
    assert_eq!(dir.names(), Vec::<String>::new());
    let help = vellum(&["create", "-o", "help"]).answer();
    assert!(help.contains("cluster_size") && help.contains("extended_l2"), "{help}");
}

#[test]
fn convert_keeps_the_bytes_and_the_holes() {
    let dir = Dir::new("convert");
    let mut bytes = patchy(48 * MIB + 512, 40);
    bytes[20 * MIB..30 * MIB].fill(0);
    let raw = dir.text("raw");
    std::fs::write(&raw, &bytes).expect("a disk without holes");
    let data = bytes.chunks(4096).filter(|block| block.iter().any(|byte| *byte != 0)).count() * 4096;
    for (index, options) in [
        "",
        "cluster_size=4k",
        "compat=v2",
        "extended_l2=on,cluster_size=64k",
        "cluster_size=2M",
        "preallocation=metadata",
    ]
    .into_iter()
    .enumerate()
    {
        let (qcow2, back) = (dir.text("there.qcow2"), dir.text("back"));
        let options = if options.is_empty() { vec![] } else { vec!["-o", options] };
        let ways: [&[&str]; 3] = [&[], &["--direct"], &["-m", "1"]];
        let there =
            [&["convert", "-f", "raw", "-O", "qcow2"], &options[..], ways[index % 3], &[&raw, &qcow2]]
                .concat();
        let ran = vellum(&there);
        assert_eq!((ran.code, ran.out.as_str(), ran.err.as_str()), (0, "", ""), "{there:?}");
        assert_eq!(vellum(&["compare", "-f", "raw", &raw, &qcow2]).code, 0, "{options:?}");
        vellum(&["check", &qcow2]).answer();
        if has("qemu-img") {
            succeed("qemu-img", &["check", &qcow2]);
            let theirs = qemu_dump(qcow2.as_ref(), "qcow2", None);
            assert_eq!(first_difference(&theirs, &bytes), None, "{options:?}");
        }
        vellum(&["convert", "-O", "raw", &qcow2, &back]).answer();
        assert_eq!(first_difference(&std::fs::read(&back).expect("the copy"), &bytes), None, "{options:?}");
        assert!(room(&back) < data + 8 * MIB, "{} bytes for {data} bytes of data", room(&back));
        std::fs::remove_file(&qcow2).expect("the copy");
        std::fs::remove_file(&back).expect("the copy");
    }
}

#[test]
fn convert_flattens_a_chain_and_refuses_what_makes_no_sense() {
    let dir = Dir::new("convert");
    let bytes = noise(2 * MIB, 41);
    std::fs::write(dir.join("template"), &bytes).expect("a template");
    let (clone, flat) = (dir.text("clone.qcow2"), dir.text("flat.qcow2"));
    vellum(&["create", "-q", "-f", "qcow2", "-b", "template", "-F", "raw", &clone]).answer();
    vellum(&["convert", "-O", "qcow2", &clone, &flat]).answer();
    let info = vellum(&["info", "--output", "json", &flat]).json();
    assert!(info.get("backing-filename").is_none(), "{info}");
    std::fs::remove_file(dir.join("template")).expect("the template");
    refused(1, &["template"], &["convert", "-O", "raw", &clone, &dir.text("none")]);
    let copy = dir.text("copy");
    vellum(&["convert", "-O", "raw", &flat, &copy]).answer();
    assert_eq!(first_difference(&std::fs::read(&copy).expect("the copy"), &bytes), None);
    refused(1, &["itself"], &["convert", "-O", "qcow2", &flat, &flat]);
    refused(1, &["no such"], &["convert", &dir.text("no such"), &dir.text("none")]);
    let small = dir.text("small");
    vellum(&["create", "-q", &small, "1M"]).answer();
    refused(1, &["small", "1048576"], &["convert", "-n", "-O", "raw", &flat, &small]);
    assert_eq!(std::fs::metadata(&small).expect("it is kept").len(), MIB as u64);
    assert!(!dir.join("none").exists());
}

#[test]
fn convert_stops_when_told_and_leaves_nothing() {
    let dir = Dir::new("convert");
    let (source, target) = (dir.text("source"), dir.text("target"));
    // Every zero must be written: that takes long enough to be interrupted.
    vellum(&["create", "-q", &source, "64G"]).answer();
    for (format, signal) in [("raw", Signal::INT), ("qcow2", Signal::TERM), ("raw", Signal::HUP)] {
        let mut command = vellum_command();
        command.args(["convert", "-f", "raw", "-O", format, "-S", "0", "-m", "1", &source, &target]);
        let begun = Instant::now();
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("our own program");
        while super::support::room_beside(&dir, &["source"]) < 2 * MIB as u64 {
            std::thread::sleep(Duration::from_millis(2));
            assert!(begun.elapsed() < Duration::from_secs(60), "nothing is written");
        }
        kill_process(pid_of(&child), signal).expect("it runs");
        let ran = wait(child, begun, Duration::from_secs(60)).expect("it ends");
        super::is_refusal(&ran, 130, &["interrupted", "target", "removed"], &["convert", format]);
        assert_eq!(dir.names(), ["source"], "{format}");
    }
}

#[test]
fn quickstart_shows_that_nothing_flushed_is_lost() {
    let dir = Dir::new("quickstart");
    let mut command = vellum_command();
    command.args(["quickstart", "--seconds", "1"]).env("TMPDIR", dir.path()).current_dir(dir.path());
    let ran = super::support::program::finish(command, None);
    let out = ran.answer();
    for word in ["template", "clone", "client", "writes", "recover"] {
        assert!(out.to_lowercase().contains(word), "it does not tell of {word}:\n{out}");
    }
    assert_eq!(dir.names(), Vec::<String>::new(), "it cleans up");
    let kept = dir.text("kept");
    let mut command = vellum_command();
    command.args(["quickstart", "--seconds", "1", "--keep", &kept]).env("TMPDIR", dir.path());
    super::support::program::finish(command, None).answer();
    vellum(&["check", &format!("{kept}/clone.qcow2")]).answer();
}

/// Whatever name leads to it: what is read for a new image, or lies below it, is not overwritten by it.
#[test]
fn a_data_file_is_nothing_that_is_read() {
    let dir = Dir::new("data-file");
    let (base, over, new) = (dir.text("base.raw"), dir.text("over.qcow2"), dir.text("new.qcow2"));
    let content = noise(1 << 20, 5);
    std::fs::write(&base, &content).expect("a disk");
    vellum(&["create", "-q", "-f", "qcow2", "-b", &base, "-F", "raw", &over]).answer();
    std::os::unix::fs::symlink("base.raw", dir.join("link.raw")).expect("a link");
    std::fs::hard_link(&base, dir.join("second.raw")).expect("a second name");
    let is_as_it_was = |what: &[&str]| {
        assert!(std::fs::read(&base).expect("there") == content, "{what:?} has changed it");
        assert!(!std::path::Path::new(&new).exists(), "{what:?} has made an image");
    };
    let overwrites = ["would overwrite it", "name another file"];
    for name in ["base.raw", "link.raw", "second.raw", "./base.raw", &base] {
        let option = format!("data_file={name}");
        for source in [["-f", "raw", &base], ["-f", "qcow2", &over]] {
            let how = ["convert", "-U", "-O", "qcow2", "-o", &option];
            let words = [&how[..], &source, &[&new]].concat();
            refused(1, &overwrites, &words);
            is_as_it_was(&words);
        }
        for below in [
            &["-b", "base.raw", "-F", "raw", &new][..],
            &["-b", "over.qcow2", "-F", "qcow2", &new],
            &["-u", "-b", "base.raw", "-F", "raw", &new, "1M"],
        ] {
            let words = [&["create", "-f", "qcow2", "-o", &option][..], below].concat();
            refused(1, &overwrites, &words);
            is_as_it_was(&words);
        }
    }
    // An image that is there, whose data file is the source, or a file below it; and a target that is one.
    let there = dir.text("there.qcow2");
    vellum(&["create", "-q", "-f", "qcow2", "-o", "data_file=there.data", &there, "1M"]).answer();
    std::fs::remove_file(dir.join("there.data")).expect("it is there");
    std::fs::hard_link(&base, dir.join("there.data")).expect("a second name");
    for data_file in [&[][..], &["--data-file", &dir.text("there.data")]] {
        let allowed = ["--allow-dir", &dir.text("")];
        let words =
            [&["convert", "-n", "-U", "-O", "qcow2"][..], &allowed, data_file, &[&over, &there]].concat();
        refused(1, &overwrites, &words);
        is_as_it_was(&words);
    }
    for how in [&["-U"][..], &["-U", "-n"]] {
        let words = [&["convert", "-f", "qcow2", "-O", "raw"][..], how, &[&over, &base]].concat();
        refused(1, &overwrites, &words);
        is_as_it_was(&words);
    }
    for format in ["qcow2", "vellum"] {
        let words = ["create", "-f", format, "-b", &base, "-F", "raw", &base];
        refused(1, &overwrites, &words);
        is_as_it_was(&words);
    }
    let itself = ["cannot be its own data file", "name another file"];
    for name in ["new.qcow2", "./new.qcow2", &new] {
        let option = format!("data_file={name}");
        refused(1, &itself, &["create", "-f", "qcow2", "-o", &option, &new, "1M"]);
        refused(1, &itself, &["convert", "-f", "raw", "-O", "qcow2", "-o", &option, &base, &new]);
        is_as_it_was(&[name]);
    }
    let names = ["base.raw", "link.raw", "over.qcow2", "second.raw", "there.data", "there.qcow2"];
    assert_eq!(dir.names(), names, "and nothing is left");
}

/// A copy fills its data file under its own name. An image that is replaced and had its data there is not left with bytes of another disk.
#[test]
fn an_image_whose_data_file_is_filled_anew_is_emptied() {
    requires!("prlimit");
    let dir = Dir::new("data-file-anew");
    let (old, new, target) = (dir.text("old.raw"), dir.text("new.raw"), dir.text("t.qcow2"));
    std::fs::write(&old, noise(1 << 20, 1)).expect("a disk");
    std::fs::write(&new, noise(4 << 20, 2)).expect("a disk");
    let convert = |data_file: &str, from: &str| {
        let option = format!("data_file={data_file}");
        ["convert", "-q", "-f", "raw", "-O", "qcow2", "-o", &option, from, &target].map(str::to_owned)
    };
    let vellum_of = |words: &[String]| vellum(&words.iter().map(String::as_str).collect::<Vec<_>>());
    let fails = |words: &[String]| {
        let limited = ["--fsize=2097152", env!("CARGO_BIN_EXE_vellum")];
        run("prlimit", &limited.into_iter().chain(words.iter().map(String::as_str)).collect::<Vec<_>>())
    };
    vellum_of(&convert("t.data", &old)).answer();
    // Into another data file: the old disk is as it was.
    let failed = fails(&convert("other.data", &new));
    assert!(failed.code == 1 && failed.err.contains("t.qcow2 is unchanged"), "{}", failed.err);
    vellum(&["compare", "-q", "-f", "raw", "-F", "qcow2", &old, &target]).answer();
    let failed = fails(&convert("t.data", &new));
    assert!(failed.code == 1 && failed.err.contains("t.qcow2 was emptied"), "{}", failed.err);
    assert_eq!(std::fs::metadata(&target).expect("it is there").len(), 0);
    vellum_of(&convert("t.data", &new)).answer();
    vellum(&["compare", "-q", "-f", "raw", "-F", "qcow2", &new, &target]).answer();

    // What is refused changes nothing: here because the bytes of the disk, which begin the data file, are an image.
    let (nested, inner) = (dir.text("nested.raw"), dir.text("inner.qcow2"));
    vellum(&["create", "-q", "-f", "qcow2", &inner, "1M"]).answer();
    let mut bytes = std::fs::read(&inner).expect("it is there");
    bytes.resize(1 << 20, 0);
    std::fs::write(&nested, bytes).expect("a disk");
    vellum_of(&convert("t.data", &nested)).answer();
    let failed = vellum_of(&convert("t.data", &old));
    assert!(failed.code == 1 && failed.err.contains("t.qcow2 is unchanged"), "{}", failed.err);
    assert!(
        failed.err.contains("cannot become the data file") && !failed.err.contains("part of the copy"),
        "{}",
        failed.err
    );
    vellum(&["compare", "-q", "-f", "raw", "-F", "qcow2", &nested, &target]).answer();

    // An old disk that stands on the file, or on an image whose data is there.
    let base = dir.text("base.qcow2");
    for file in ["base.raw", "base.data"] {
        std::fs::write(dir.join(file), noise(3 << 20, 3)).expect("a disk");
        let below = match file {
            "base.raw" => ["-F", "raw", "-b", "base.raw"],
            _ => {
                let option = ["-o", "data_file=base.data,data_file_raw=on", &base, "3M"];
                vellum(&[&["create", "-q", "-f", "qcow2"][..], &option].concat()).answer();
                ["-F", "qcow2", "-b", "base.qcow2"]
            }
        };
        vellum(&[&["create", "-q", "-f", "qcow2"][..], &below, &[&target]].concat()).answer();
        let failed = fails(&convert(file, &new));
        assert!(failed.code == 1 && failed.err.contains("t.qcow2 was emptied"), "{}", failed.err);
        assert_eq!(std::fs::metadata(&target).expect("it is there").len(), 0);
    }
}

/// Where a link in another directory is the target, the copy's data file is beside what it leads to, as that of the old image is.
#[test]
fn a_data_file_is_beside_what_a_link_leads_to() {
    requires!("prlimit");
    let dir = Dir::new("data-file-link");
    for name in ["far", "near"] {
        std::fs::create_dir(dir.join(name)).expect("a directory");
    }
    let (old, new) = (dir.text("old.raw"), dir.text("far/new.raw"));
    let (target, link, absent) =
        (dir.text("far/t.qcow2"), dir.text("near/t.qcow2"), dir.text("near/absent.qcow2"));
    std::os::unix::fs::symlink("../far/t.qcow2", &link).expect("a link");
    std::os::unix::fs::symlink("../far/absent.qcow2", &absent).expect("a link");
    let content = noise(4 << 20, 2);
    std::fs::write(&old, noise(1 << 20, 1)).expect("a disk");
    std::fs::write(&new, &content).expect("a disk");
    let to_link = |data_file: &str, to: &str| {
        let option = format!("data_file={data_file}");
        ["convert", "-q", "-f", "raw", "-O", "qcow2", "-o", &option, &new, to].map(str::to_owned)
    };
    let has_old = |target: &str| {
        vellum(&["compare", "-q", "-f", "raw", "-F", "qcow2", &old, target]).answer();
    };
    let option = ["-o", "data_file=t.data"];
    vellum(&[&["convert", "-q", "-f", "raw", "-O", "qcow2"][..], &option, &[&old, &target]].concat())
        .answer();

    for (data_file, to, words) in [
        ("new.raw", &link, "would overwrite it"),
        ("absent.qcow2", &absent, "cannot be its own data file"),
        ("t.qcow2", &link, "cannot be its own data file"),
    ] {
        let answer = vellum(&to_link(data_file, to).each_ref().map(String::as_str));
        assert!(answer.code == 1 && answer.err.contains(words), "{data_file}: {}", answer.err);
        assert!(std::fs::read(&new).expect("there") == content, "{data_file}");
        has_old(&target);
    }

    let words = to_link("t.data", &link);
    let limited = ["--fsize=2097152", env!("CARGO_BIN_EXE_vellum")];
    let failed =
        run("prlimit", &limited.into_iter().chain(words.iter().map(String::as_str)).collect::<Vec<_>>());
    assert!(failed.code == 1 && failed.err.contains("t.qcow2 was emptied"), "{}", failed.err);
    assert_eq!(std::fs::metadata(&target).expect("it is there").len(), 0);
    vellum(&words.each_ref().map(String::as_str)).answer();
    vellum(&["compare", "-q", "-f", "raw", "-F", "qcow2", &new, &target]).answer();
}

/// Whichever read fails while an image is replaced that has its data where the copy's will be: a header that cannot be read may be that
/// of a disk.
#[test]
fn an_image_whose_header_cannot_be_read_is_not_taken_for_none() {
    requires!("strace");
    let dir = Dir::new("data-file-unread");
    let (old, new, target) = (dir.text("old.raw"), dir.text("new.raw"), dir.text("t.qcow2"));
    std::fs::write(&old, noise(1 << 20, 1)).expect("a disk");
    std::fs::write(&new, noise(1 << 20, 2)).expect("a disk");
    let words = |from| {
        ["convert", "-q", "-f", "raw", "-O", "qcow2", "-o", "data_file=t.data", from, &target]
            .map(str::to_owned)
    };
    let vellum_of = |words: &[String]| vellum(&words.iter().map(String::as_str).collect::<Vec<_>>());
    let has = |disk: &str| vellum(&["compare", "-q", "-f", "raw", "-F", "qcow2", disk, &target]).code == 0;
    let mut unchanged = 0;
    for (call, count) in [("preadv2", 7), ("preadv", 3)] {
        for number in 1..=count {
            vellum_of(&words(&old)).answer();
            let fails = format!("inject={call}:error=EIO:when={number}");
            // Without a ring each read is a call.
            let traced =
                ["-f", "-qq", "-o", "/dev/null", "-e", "inject=io_uring_setup:error=ENOSYS", "-e", &fails];
            let convert = words(&new);
            let all = traced.into_iter().chain([env!("CARGO_BIN_EXE_vellum")]);
            let answer = run("strace", &all.chain(convert.iter().map(String::as_str)).collect::<Vec<_>>());
            let is_empty = std::fs::metadata(&target).expect("it is there").len() == 0;
            let is_true = match answer.code {
                0 => has(&new),
                _ if answer.err.contains("t.qcow2 was emptied") => is_empty,
                _ => {
                    unchanged += 1;
                    has(&old) && !answer.err.contains("delete it")
                }
            };
            assert!(is_true, "{call} {number}: {}", answer.err);
        }
    }
    assert!(unchanged >= 1, "{unchanged}");
}
