//! The program under the name `qemu-img`, and images that are named by keys: the same command lines, by both programs.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use super::support::dir::Dir;
use super::support::program::{Ran, finish, succeed, vellum};
use super::support::{noise, until};
use super::{MIB, refused};
use crate::requires;

/// Our program under another name, in this directory.
fn under_the_name(dir: &Dir, arguments: &[&str]) -> Ran {
    let name = dir.join("bin/qemu-img");
    if !name.exists() {
        std::fs::create_dir_all(dir.join("bin")).expect("a directory");
        symlink(env!("CARGO_BIN_EXE_vellum"), &name).expect("a link");
    }
    let mut command = Command::new(name);
    command.env_remove("VELLUM_ALLOW_DIRS").env_remove("VELLUM_LOG").env("VELLUM_CONFIG", "/dev/null");
    command.current_dir(dir.path()).args(arguments);
    finish(command, None)
}

fn by_qemu(dir: &Dir, arguments: &[&str]) -> Ran {
    let mut command = Command::new("qemu-img");
    command.current_dir(dir.path()).args(arguments);
    finish(command, None)
}

/// Lines as scripts have them. Each is run by both programs, in directories of their own, one after the other.
const LINES: &[&str] = &[
    "create -q -f raw base.raw 8M",
    "create -f qcow2 a.qcow2 8M",
    "create a 1M",
    "create -q -f qcow2 -o cluster_size=128k,lazy_refcounts=on,compat=1.1 b.qcow2 1.5G",
    "create -qf qcow2 -b in.raw -F raw clone.qcow2",
    "create -q -f qcow2 -F qcow2 -b clone.qcow2 top.qcow2",
    "create -q -f qcow2 -u -b nothing.qcow2 -F qcow2 unsafe.qcow2 1G",
    "create -q -f qcow2 bad.qcow2 -5",
    "create -q -f qcow2 -o cluster_size=3k bad.qcow2 1M",
    "create -q -f qcow2 -b nothing -F raw bad.qcow2",
    "info in.raw",
    "info --output=json a.qcow2",
    "info -U --output json --backing-chain top.qcow2",
    "info nothing",
    "check a.qcow2",
    "check -q --output=json clone.qcow2",
    "check -f raw in.raw",
    "check -r all b.qcow2",
    "map -f raw --output=json in.raw",
    "map --output=json top.qcow2",
    "map -f raw --start-offset=64k --max-length 1M --output=json in.raw",
    "convert -f raw -O qcow2 in.raw copy.qcow2",
    "convert -p -f raw -O qcow2 -t none -T none in.raw copy2.qcow2",
    "convert -c -f raw -O qcow2 -W -m 4 in.raw small.qcow2",
    "convert -c -O qcow2 -o compression_type=zstd copy.qcow2 small2.qcow2",
    "convert -O raw small.qcow2 back.raw",
    "convert small2.qcow2 back2.raw",
    "convert -B in.raw -F raw -O qcow2 small2.qcow2 over.qcow2",
    "convert -B nothing -F raw -O qcow2 small2.qcow2 bad.qcow2",
    "convert -B in.raw -O raw small2.qcow2 bad.raw",
    "convert -n -f raw -O raw --target-is-zero in.raw base.raw",
    "convert -f raw -O qcow2 -S 0 in.raw full.qcow2",
    "convert -f raw -O qcow2 -r 1G --salvage in.raw slow.qcow2",
    "convert --image-opts driver=qcow2,file.filename=copy.qcow2 -O raw opts.raw",
    "convert -O raw json:{\"driver\":\"qcow2\",\"file\":{\"driver\":\"file\",\"filename\":\"copy.qcow2\"}} json.raw",
    "convert -f raw -O nonsense in.raw bad",
    "convert -f qcow2 -O raw in.raw bad",
    "compare -f raw -F qcow2 in.raw copy.qcow2",
    "compare -s -p in.raw in.raw -f raw -F raw",
    "compare -q copy.qcow2 a.qcow2",
    "compare --image-opts driver=raw,file.filename=opts.raw driver=raw,file.filename=json.raw",
    "compare nothing a.qcow2",
    "measure --size 1G -O qcow2 -o preallocation=off --output=json",
    "measure -f raw -O raw --output=json in.raw",
    "measure",
    "dd if=copy.qcow2 of=part.raw bs=64k count=3",
    "dd -f raw -O qcow2 if=in.raw of=part.qcow2 bs=1M",
    "dd if=in.raw",
    "bench -f qcow2 -c 64 -d 4 copy.qcow2",
    "bench -f qcow2 -w -c 16 -d 4 --flush-interval 8 a.qcow2",
    "resize -q a.qcow2 +1G",
    "resize a.qcow2 16M",
    "resize --shrink -q a.qcow2 16M",
    "resize --preallocation=falloc -q a.qcow2 24M",
    "resize --preallocation=full -f raw -q a 3M",
    "resize -f raw -q --shrink a 2M",
    "resize --shrink -f raw a -1M",
    "resize -f raw a -1M",
    "rebase -u -f qcow2 -b in.raw -F raw clone.qcow2",
    "rebase -f qcow2 -b '' top.qcow2",
    "snapshot -c one copy.qcow2",
    "snapshot -l copy.qcow2",
    "snapshot -a one copy.qcow2",
    "snapshot -q -d one copy.qcow2",
    "snapshot -a none copy.qcow2",
    "create -f qcow2 file:named.qcow2 1M",
    "create ./a:b 1M",
    "create file:c:d 1M",
    "info file:named.qcow2",
    "convert -f raw -O qcow2 file:in.raw file:local.qcow2",
    "convert -O raw -f raw ./a:b file:e:f",
    "resize -q file:named.qcow2 2M",
    "snapshot -c one file:named.qcow2",
    "snapshot -l file:named.qcow2",
    "bitmap --add file:named.qcow2 b",
    "amend -o compat=1.1 file:named.qcow2",
    "check file:named.qcow2",
    "map --output=json file:local.qcow2",
    "measure -O raw -f raw --output=json file:c:d",
    "compare -f raw -F qcow2 file:in.raw file:local.qcow2",
    "dd -f raw if=file:in.raw of=file:local.raw bs=64k count=2",
    "create -q -f qcow2 -b file:c:d -F raw below.qcow2",
    "rebase -u -b file:c:d -F raw file:below.qcow2",
    "commit -q file:below.qcow2",
    "convert -f raw -O qcow2 in.raw c:d a two.qcow2",
    "convert -f raw -O qcow2 in.raw ./c:d a two.qcow2",
    "convert -f raw -O raw -c in.raw a bad.raw",
    "convert -f raw -O raw -l x in.raw a bad.raw",
    "convert -f raw -O qcow2 --bitmaps in.raw a bad.raw",
    "convert -f raw -O qcow2 -B in.raw -F raw in.raw a bad.raw",
    "convert -f raw -O raw in.raw nothing bad.raw",
    "convert -f raw -O raw -S 513 in.raw bad.raw",
    "convert -f raw -O raw -m 17 in.raw bad.raw",
    "amend -f qcow2 -o help",
    "snapshot -l in.raw",
    "snapshot in.raw",
    "rebase -u -b in.raw clone.qcow2",
    "resize -q --image-opts driver=qcow2,file.filename=a.qcow2 32M",
    "amend --image-opts -o lazy_refcounts=on driver=qcow2,file.filename=a.qcow2",
    "snapshot -l --image-opts driver=qcow2,file.filename=copy.qcow2",
    "create foo:bar 1M",
    "create -f qcow2 foo:bar 1M",
    "convert -f raw -O raw in.raw foo:bar",
    "convert -O raw foo:bar bad.raw",
    "dd -f raw if=in.raw of=foo:bar count=1",
    "info foo:bar",
    "info foo:bar/d",
    "resize foo:bar 1M",
    "snapshot -c one foo:bar",
    "bitmap --add foo:bar b",
    "info nbd:x",
    "info nbd:localhost:1",
    "info nbd:unix:/nothing",
    "convert -f raw -O raw in.raw nbd:localhost:1",
    "convert -n -f raw -O raw in.raw nbd:unix:/nothing",
    "--version",
    "--help",
    "convert --help",
    "nonsense a",
    "info --nonsense a.qcow2",
    "info",
];

#[test]
fn lines_of_scripts_end_in_the_same_way() {
    requires!("qemu-img");
    let (ours, theirs) = (Dir::new("named"), Dir::new("named-qemu"));
    let mut bytes = noise(2 * MIB, 60);
    bytes.resize(6 * MIB, 7);
    bytes.resize(8 * MIB, 0);
    for dir in [&ours, &theirs] {
        std::fs::write(dir.join("in.raw"), &bytes).expect("a disk");
    }
    for line in LINES {
        let arguments: Vec<&str> = line.split(' ').map(|word| if word == "''" { "" } else { word }).collect();
        let (one, other) = (under_the_name(&ours, &arguments), by_qemu(&theirs, &arguments));
        assert_eq!(one.code, other.code, "{line}: {one:?}\n{other:?}");
        assert_eq!(one.err.is_empty(), other.err.is_empty(), "{line}: {one:?}\n{other:?}");
        let is_json = line.contains("--output");
        // `info` has what only one of them knows; sizes on the drive differ.
        if is_json && one.code == 0 && !line.starts_with("info") && !line.starts_with("check") {
            let read = |ran: &Ran| serde_json::from_str::<Value>(&ran.out).expect("JSON");
            let (one, other) = (read(&one), read(&other));
            if !line.starts_with("map") && !line.contains("qcow2") {
                assert_eq!(one, other, "{line}");
            }
        }
    }
    let with_colons =
        |dir: &Dir| dir.names().into_iter().filter(|name| name.contains(':')).collect::<Vec<_>>();
    assert_eq!(with_colons(&ours), ["a:b", "c:d", "e:f"]);
    assert_eq!(with_colons(&theirs), ["a:b", "c:d", "e:f"]);
    for name in [
        "copy.qcow2",
        "local.qcow2",
        "two.qcow2",
        "small.qcow2",
        "small2.qcow2",
        "over.qcow2",
        "a.qcow2",
        "full.qcow2",
        "slow.qcow2",
        "top.qcow2",
        "part.qcow2",
        "clone.qcow2",
    ] {
        succeed("qemu-img", &["check", "-q", &ours.text(name)]);
        succeed("qemu-img", &["compare", "-q", &ours.text(name), &theirs.text(name)]);
    }
    for name in
        ["back.raw", "back2.raw", "opts.raw", "json.raw", "part.raw", "base.raw", "a", "local.raw", "c:d"]
    {
        succeed(
            "qemu-img",
            &["compare", "-q", "-f", "raw", "-F", "raw", &ours.text(name), &theirs.text(name)],
        );
    }
    let info = vellum(&["info", "--output", "json", &ours.text("clone.qcow2")]).json();
    assert_eq!(info["format-specific"]["data"]["extended-l2"], false, "as QEMU makes it: {info}");
}

#[test]
fn what_cannot_be_done_says_so() {
    let dir = Dir::new("named");
    std::fs::write(dir.join("raw"), noise(MIB, 61)).expect("a disk");
    for (line, word) in [
        ("bitmap --add --image-opts driver=qcow2,backing.driver=raw,file.filename=raw one", "backing"),
        ("create -f vmdk new 1M", "only read"),
        ("commit -r 1M raw", "-r"),
    ] {
        let ran = under_the_name(&dir, &line.split(' ').collect::<Vec<_>>());
        assert_eq!((ran.code, ran.out.as_str(), ran.err.lines().count()), (1, "", 1), "{line}: {ran:?}");
        assert!(ran.err.starts_with("qemu-img: ") && ran.err.contains(word), "{line}: {}", ran.err);
    }
    assert_eq!(dir.names(), ["bin", "raw"]);
}

#[test]
fn images_are_named_by_keys() {
    let dir = Dir::new("keys");
    let (raw, image, copy) = (dir.text("raw"), dir.text("a.qcow2"), dir.text("copy"));
    std::fs::write(&raw, noise(MIB, 62)).expect("a disk");
    vellum(&["convert", "-f", "raw", "-O", "qcow2", &raw, &image]).answer();
    let keys = format!("driver=qcow2,file.driver=file,file.filename={image}");
    let json = format!(r#"json:{{"driver":"qcow2","file":{{"filename":"{image}"}}}}"#);
    let plain = vellum(&["info", "--output", "json", &image]).json();
    assert_eq!(vellum(&["info", "--output", "json", "--image-opts", &keys]).json(), plain);
    assert_eq!(vellum(&["info", "--output", "json", &json]).json(), plain);
    vellum(&["check", "--image-opts", &keys]).answer();
    vellum(&["map", "--output", "json", &json]).answer();
    vellum(&["measure", "-O", "qcow2", "--image-opts", &keys]).answer();
    vellum(&["compare", "--image-opts", &keys, &format!("driver=raw,file.filename={raw}")]).answer();
    // The bytes of the file, as a disk.
    let bytes = format!("driver=file,filename={image}");
    vellum(&["convert", "--image-opts", "-O", "raw", &bytes, &copy]).answer();
    assert_eq!(std::fs::read(&copy).expect("a copy"), std::fs::read(&image).expect("the image"));
    // An existing target.
    vellum(&["create", "-q", "-f", "qcow2", "-o", "cluster_size=4k", &copy, "1M"]).answer();
    let target = format!("driver=qcow2,file.filename={copy}");
    vellum(&["convert", "-n", "-f", "raw", "--target-image-opts", &raw, &target]).answer();
    assert_eq!(vellum(&["compare", "-f", "raw", "-F", "qcow2", &raw, &copy]).code, 0);
    refused(1, &["backing"], &["info", "--image-opts", &format!("{keys},backing.file.filename={raw}")]);
    refused(1, &["ssh"], &["info", r#"json:{"driver":"ssh","host":"x"}"#]);
    refused(1, &["JSON"], &["info", "json:{"]);
    // What stands in an image is no such name.
    let (inner, top) =
        (format!(r#"json:{{"driver":"raw","file":{{"filename":"{raw}"}}}}"#), dir.text("top.qcow2"));
    vellum(&["create", "-q", "-f", "qcow2", "-u", "-b", &inner, "-F", "raw", &top, "1M"]);
    if Path::new(&top).exists() {
        let ran = vellum(&["convert", "-O", "raw", &top, &dir.text("none")]);
        assert_eq!(ran.code, 1, "{ran:?}");
        assert!(!dir.join("none").exists());
    }
}

/// Exports of an NBD server: copied from, and filled.
#[test]
fn exports_are_named_by_urls_and_by_keys() {
    requires!("qemu-img", "qemu-nbd");
    let dir = Dir::short();
    let (raw, image, back, socket) = (dir.text("raw"), dir.text("a.qcow2"), dir.text("back"), dir.text("s"));
    let bytes = noise(2 * MIB, 63);
    std::fs::write(&raw, &bytes).expect("a disk");
    vellum(&["create", "-q", "-f", "qcow2", &image, "2M"]).answer();
    let mut server = Command::new("qemu-nbd");
    let mut server =
        server.args(["-t", "-x", "disk", "-f", "qcow2", "-k", &socket, &image]).spawn().expect("qemu-nbd");
    until("the server listens", || Path::new(&socket).exists());
    let url = format!("nbd+unix:///disk?socket={socket}");
    let keys = format!("driver=nbd,server.type=unix,server.path={socket},export=disk");
    let json =
        format!(r#"json:{{"driver":"nbd","server":{{"type":"unix","path":"{socket}"}},"export":"disk"}}"#);
    vellum(&["convert", "-n", "-f", "raw", "-O", "raw", &raw, &url]).answer();
    for source in [&["-f", "raw", url.as_str()][..], &["--image-opts", &keys], &[json.as_str()]] {
        vellum(&[&["convert", "-O", "raw"], source, &[&back]].concat()).answer();
        assert!(std::fs::read(&back).expect("the copy") == bytes, "{source:?}");
    }
    vellum(&["convert", "-n", "-f", "raw", "--target-image-opts", &raw, &keys]).answer();
    // The older names, which also stand for what is there already where they are a target.
    let older = format!("nbd:unix:{socket}:exportname=disk");
    let ran = under_the_name(&dir, &["convert", "-f", "raw", "-O", "raw", &raw, &older]);
    assert_eq!((ran.code, ran.err.as_str()), (0, ""), "{ran:?}");
    vellum(&["convert", "-f", "raw", "-O", "raw", &older, &back]).answer();
    assert!(std::fs::read(&back).expect("the copy") == bytes);
    refused(1, &["only files"], &["create", "-f", "raw", &older, "2M"]);
    assert!(dir.names().iter().all(|name| !name.starts_with("nbd")), "{:?}", dir.names());
    server.kill().expect("it runs");
    server.wait().expect("it ends");
    succeed("qemu-img", &["compare", "-f", "raw", "-F", "qcow2", &raw, &image]);
}
