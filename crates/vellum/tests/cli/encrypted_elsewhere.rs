//! Encrypted images that are only read: volumes of cryptsetup (LUKS version 2), and qcow2 images of QEMU's old scheme.
//!
//! Without a device mapper cryptsetup writes no data, so the data of a volume is encrypted by Python's cryptography, with the key
//! that cryptsetup says the volume has.

use std::os::unix::fs::FileExt;

use super::refused;
use super::support::dir::Dir;
use super::support::program::{run, skipped, succeed, vellum};
use super::support::server::Server;
use super::support::{noise, patchy};

const LEN: usize = 300 << 10;
/// Where the data of the volumes begins, in bytes: behind two headers of 16 KiB and the key material.
const PAYLOAD: u64 = 2 << 20;

const ENCRYPT: &str = "
import sys
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
key, size, at, plain, volume = open(sys.argv[1], 'rb').read(), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]
plain = open(plain, 'rb').read()
with open(volume, 'r+b') as out:
    out.seek(at)
    for start in range(0, len(plain), size):
        one = Cipher(algorithms.AES(key), modes.XTS((start // 512).to_bytes(16, 'little'))).encryptor()
        out.write(one.update(plain[start:start + size]) + one.finalize())
";

/// A Python that has the ciphers.
fn python() -> Option<&'static str> {
    ["python3", "/usr/bin/python3"]
        .into_iter()
        .find(|python| run(python, &["-c", "import cryptography.hazmat.primitives.ciphers"]).code == 0)
}

fn secret(dir: &Dir, id: &str, bytes: &str) -> [String; 2] {
    let file = dir.text(id);
    std::fs::write(&file, bytes).expect("a secret");
    ["--secret".to_owned(), format!("id={id},file={file}")]
}

/// Makes a volume with this content. `how` are options of cryptsetup.
fn volume(dir: &Dir, python: &str, content: &[u8], how: &[&str]) -> String {
    let (path, plain, key) = (dir.text("volume"), dir.text("plain"), dir.text("volume-key"));
    for file in [&path, &key] {
        let _ = std::fs::remove_file(file);
    }
    let file = std::fs::File::create(&path).expect("a volume");
    file.set_len(PAYLOAD + content.len() as u64).expect("its length");
    std::fs::write(&plain, content).expect("its content");
    let offset = (PAYLOAD / 512).to_string();
    let small = ["--luks2-metadata-size", "16k", "--luks2-keyslots-size", "1m", "--offset", &offset];
    let format = ["luksFormat", "-q", "--type", "luks2", "--cipher", "aes-xts-plain64"];
    succeed("cryptsetup", &[&format[..], &small, how, &["--key-file", &dir.text("a"), &path]].concat());
    let dump =
        ["luksDump", "-q", "--dump-volume-key", "--volume-key-file", &key, "--key-file", &dir.text("a")];
    succeed("cryptsetup", &[&dump[..], &[&path]].concat());
    let sector = how.iter().position(|word| *word == "--sector-size").map_or("512", |at| how[at + 1]);
    succeed(python, &["-c", ENCRYPT, &key, sector, &PAYLOAD.to_string(), &plain, &path]);
    path
}

const QUICK: [&str; 6] = ["--pbkdf-memory", "1024", "--pbkdf-parallel", "2", "--pbkdf-force-iterations", "4"];

#[test]
fn volumes_of_luks_2_are_read() {
    crate::requires!("cryptsetup");
    let Some(python) = python() else { return skipped("Python has no cryptography") };
    let dir = Dir::new("luks2");
    let [option, spec] = secret(&dir, "a", "correct horse");
    let [_, other] = secret(&dir, "b", "battery staple");
    let (raw, back) = (dir.text("disk.raw"), dir.text("back.raw"));
    let content = patchy(LEN, 3);
    std::fs::write(&raw, &content).expect("a disk");
    let pbkdf2 = ["--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000"];
    for how in [
        &[&["--pbkdf", "argon2id", "--key-size", "512", "--sector-size", "512"][..], &QUICK].concat()[..],
        &[&["--pbkdf", "argon2i", "--key-size", "256", "--sector-size", "4096"][..], &QUICK].concat(),
        &[&["--hash", "sha512", "--key-size", "512", "--sector-size", "4096"][..], &pbkdf2].concat(),
        &[&["--hash", "sha1", "--key-size", "256", "--sector-size", "1024"][..], &pbkdf2].concat(),
    ] {
        let volume = volume(&dir, python, &content, how);
        vellum(&["convert", "-q", &option, &spec, &volume, &back]).answer();
        assert!(std::fs::read(&back).expect("there") == content, "{how:?}");
        vellum(&["compare", &option, &spec, &volume, &raw]).answer();
        let info = vellum(&["info", &volume]).answer();
        assert!(info.contains("encrypted: yes") && info.contains("luks"), "{info}");
        let json = vellum(&["info", "--output", "json", &volume]).json();
        assert_eq!(json["virtual-size"], LEN, "{json}");
        refused(
            1,
            &["no secret that was given opens any of its 1 key slots"],
            &["convert", &option, &other, &volume, &back],
        );
        refused(1, &["--secret id=NAME,file=FILE"], &["convert", &volume, &back]);
    }
}

/// Several slots; one of them is removed. Then what a server and an image over it see.
#[test]
fn a_volume_of_luks_2_is_served_read_only() {
    crate::requires!("cryptsetup");
    let Some(python) = python() else { return skipped("Python has no cryptography") };
    let dir = Dir::new("luks2-served");
    let [option, spec] = secret(&dir, "a", "correct horse");
    let [_, other] = secret(&dir, "b", "battery staple");
    let (back, content) = (dir.text("back.raw"), noise(LEN, 5));
    let how = [&["--pbkdf", "argon2id", "--sector-size", "4096"][..], &QUICK].concat();
    let volume = volume(&dir, python, &content, &how);
    let key = |verb: &str, with: &[&str], last: &[&str]| {
        let file = dir.text("a");
        let all = [&[verb, "-q"], with, &["--key-file", &file, &volume], last].concat();
        succeed("cryptsetup", &all);
    };
    key("luksAddKey", &["--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000"], &[&dir.text("b")]);
    for spec in [&spec, &other] {
        vellum(&["convert", "-q", &option, spec, &volume, &back]).answer();
        assert!(std::fs::read(&back).expect("there") == content);
    }
    succeed("cryptsetup", &["luksKillSlot", "-q", "--key-file", &dir.text("b"), &volume, "0"]);
    refused(1, &["no secret that was given opens"], &["convert", &option, &spec, &volume, &back]);
    let mut served = Server::start(&["--read-only", &option, &other, &volume]);
    let mut guest = super::support::client::Client::connect(&served.peer(), "").expect("a connection");
    for (at, len) in [(0, 4096_usize), (512, 1024), (5000, 9000), (LEN - 512, 512)] {
        assert_eq!(
            guest.read(at as u64, u32::try_from(len).expect("small")).expect("read"),
            content[at..at + len],
            "{at}"
        );
    }
    drop(guest);
    assert!(served.is_running());
    drop(served);
    refused(
        1,
        &["only read", "vellum convert"],
        &["serve", "--nbd", &format!("unix:{}", dir.text("s")), &option, &other, &volume],
    );
    refused(1, &["cryptsetup"], &["key", "list", &volume]);
    let top = dir.text("top.qcow2");
    vellum(&["create", "-q", "-f", "qcow2", &option, &other, "-b", "volume", "-F", "luks", &top]).answer();
    vellum(&["compare", &option, &other, &top, &volume]).answer();
    // The first copy of the header is damaged, then the second.
    let file = std::fs::File::options().write(true).open(&volume).expect("the volume");
    file.write_all_at(b"?", 5000).expect("damage");
    vellum(&["convert", "-q", &option, &other, &volume, &back]).answer();
    file.write_all_at(&[0; 4096], 0).expect("damage");
    vellum(&["convert", "-q", "-f", "luks", &option, &other, &volume, &back]).answer();
    assert!(std::fs::read(&back).expect("there") == content);
    file.write_all_at(b"?", (16 << 10) + 5000).expect("damage");
    refused(1, &["no LUKS header"], &["convert", "-f", "luks", &option, &other, &volume, &back]);
}

#[test]
fn a_volume_that_is_being_reencrypted_is_refused_by_name() {
    crate::requires!("cryptsetup");
    let dir = Dir::new("luks2-reencrypted");
    let [option, spec] = secret(&dir, "a", "correct horse");
    let volume = dir.text("volume");
    let file = std::fs::File::create(&volume).expect("a volume");
    file.set_len(PAYLOAD + (1 << 20)).expect("its length");
    let offset = (PAYLOAD / 512).to_string();
    let format = [
        "luksFormat",
        "-q",
        "--type",
        "luks2",
        "--luks2-metadata-size",
        "16k",
        "--luks2-keyslots-size",
        "1m",
    ];
    let with = [
        "--offset",
        &offset,
        "--pbkdf",
        "pbkdf2",
        "--pbkdf-force-iterations",
        "1000",
        "--key-file",
        &dir.text("a"),
    ];
    succeed("cryptsetup", &[&format[..], &with, &[&volume]].concat());
    let begin = ["reencrypt", "-q", "--init-only", "--key-file", &dir.text("a"), &volume];
    let ran = run("cryptsetup", &begin);
    if ran.code != 0 {
        return skipped(&format!("cryptsetup does not begin a reencryption here: {}", ran.err));
    }
    refused(1, &["reencrypt"], &["convert", &option, &spec, &volume, &dir.text("back.raw")]);
}

/// QEMU's old scheme: its key is the first 16 bytes of the secret.
#[test]
fn qcow2_images_of_the_old_scheme_are_read() {
    crate::requires!("qemu-img");
    let dir = Dir::new("encrypted-old");
    let (raw, old, back, copy) =
        (dir.text("disk.raw"), dir.text("old.qcow2"), dir.text("back.raw"), dir.text("copy.qcow2"));
    let content = patchy(3 << 20, 3);
    std::fs::write(&raw, &content).expect("a disk");
    for (text, options) in [
        ("short", ""),
        ("exactly sixteen.", ",cluster_size=4096"),
        ("much longer than sixteen bytes", ",compat=0.10"),
    ] {
        let [option, spec] = secret(&dir, "a", text);
        let object = format!("secret,id=a,file={}", dir.text("a"));
        let new = format!("encrypt.format=aes,encrypt.key-secret=a{options}");
        let _ = std::fs::remove_file(&old);
        let convert = ["convert", "--object", &object, "-f", "raw", "-O", "qcow2", "-o", &new, &raw, &old];
        let ran = run("qemu-img", &convert);
        if ran.code != 0 {
            return skipped(&format!("qemu-img makes no such image: {}", ran.err));
        }
        vellum(&["convert", "-q", &option, &spec, &old, &back]).answer();
        assert!(std::fs::read(&back).expect("there") == content, "{text}");
        vellum(&["compare", &option, &spec, &old, &raw]).answer();
        assert!(vellum(&["info", &old]).answer().contains("encrypted: yes"));
        vellum(&["check", &old]).answer();
        let map = vellum(&["map", "--output", "json", &option, &spec, &old]).json();
        assert!(map.as_array().is_some_and(|rows| rows.len() > 2), "{map}");
        // Over it, and as the source of a copy that is encrypted as it should be.
        let top = dir.text("top.qcow2");
        vellum(&["create", "-q", "-u", "-f", "qcow2", "-b", "old.qcow2", "-F", "qcow2", &top, "3M"]).answer();
        vellum(&["compare", &option, &spec, &top, &raw]).answer();
        let [_, second] = secret(&dir, "b", "another");
        let luks = "encrypt.format=luks,encrypt.key-secret=b,encrypt.iter-time=10";
        let both = [&option, &spec, &option, &second].map(String::as_str);
        vellum(&[&["convert", "-O", "qcow2", "-o", luks][..], &both, &[&old, &copy]].concat()).answer();
        vellum(&["convert", "-q", &option, &second, &copy, &back]).answer();
        assert!(std::fs::read(&back).expect("there") == content, "{text}");
        refused(1, &["does not tell"], &[&["convert"][..], &both, &[&old, &back]].concat());
        refused(1, &["--secret id=NAME"], &["convert", &old, &back]);
        for served in [&old, &top] {
            let serve = ["serve", "--nbd", &format!("unix:{}", dir.text("s")), &option, &spec, served];
            refused(1, &["aes-cbc", "vellum convert"], &serve);
        }
    }
    // A snapshot of it, at other places of the file.
    let [option, spec] = secret(&dir, "a", "much longer than sixteen bytes");
    let object = format!("secret,id=a,file={}", dir.text("a"));
    vellum(&["snapshot", "create", &old, "one"]).answer();
    let source = format!("driver=qcow2,encrypt.format=aes,encrypt.key-secret=a,file.filename={old}");
    let ran = run("qemu-io", &["--object", &object, "-c", "write -P 7 64k 1M", "--image-opts", &source]);
    if ran.code != 0 {
        return skipped(&format!("qemu-io does not write such an image: {}", ran.err));
    }
    vellum(&["convert", "-q", "-l", "one", &option, &spec, &old, &back]).answer();
    assert!(std::fs::read(&back).expect("there") == content, "the snapshot");
    vellum(&["convert", "-q", &option, &spec, &old, &back]).answer();
    let mut written = content;
    written[64 << 10..][..1 << 20].fill(7);
    assert!(std::fs::read(&back).expect("there") == written, "the disk");
}
