//! Lines of scripts, run by both programs: what clients see, what is in the image afterwards, and the exit code.

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose,
};
use serde_json::Value;

use super::support::dir::Dir;
use super::support::program::{path_text, qemu_dump, qemu_io, run, succeed};
use super::support::{first_difference, noise};
use super::{MIB, Running, Whose};
use crate::requires;

/// A directory with the images that the lines are about: the same bytes for both programs.
fn place() -> Dir {
    let dir = Dir::short();
    let mut disk = noise(4 * MIB, 7);
    disk[MIB..2 * MIB].fill(0);
    std::fs::write(dir.join("d.raw"), &disk).expect("a disk");
    let image = |arguments: &[&str]| {
        let places: Vec<String> =
            arguments
                .iter()
                .map(|word| {
                    if word.contains('.') && !word.contains('=') {
                        dir.text(word)
                    } else {
                        (*word).to_owned()
                    }
                })
                .collect();
        succeed("qemu-img", &places);
    };
    image(&["convert", "-f", "raw", "-O", "qcow2", "d.raw", "d.qcow2"]);
    image(&["snapshot", "-c", "one", "d.qcow2"]);
    qemu_io(&["-f", "qcow2", &dir.text("d.qcow2")], &["write -P 9 64k 200k".to_owned()]);
    image(&["create", "-q", "-f", "qcow2", "-b", "d.raw", "-F", "raw", "over.qcow2"]);
    qemu_io(&["-f", "qcow2", &dir.text("over.qcow2")], &["write -P 5 3M 64k".to_owned()]);
    image(&["create", "-q", "-f", "qcow2", "marked.qcow2", "4M"]);
    image(&["bitmap", "--add", "marked.qcow2", "daily"]);
    dir
}

/// Lines, and the name of the export that each has.
const LINES: &[(&str, &str)] = &[
    ("-f raw d.raw", ""),
    ("-r -f raw d.raw", ""),
    ("-f qcow2 d.qcow2", ""),
    ("d.qcow2", ""),
    ("-e 2 -f qcow2 d.qcow2", ""),
    ("-e 0 -f raw d.raw", ""),
    ("--shared=3 --read-only --format=qcow2 over.qcow2", ""),
    ("-f raw -x disk -D description d.raw", "disk"),
    ("-x a/b=c -f qcow2 d.qcow2", "a/b=c"),
    ("-f raw -o 1048576 d.raw", ""),
    ("-f raw -o 1536 d.raw", ""),
    ("-o 0x10000 -f qcow2 -r over.qcow2", ""),
    ("-l one -f qcow2 d.qcow2", ""),
    ("--load-snapshot snapshot.name=one d.qcow2", ""),
    ("-l snapshot.id=1 d.qcow2", ""),
    ("-s -f raw d.raw", ""),
    ("-s -f qcow2 over.qcow2", ""),
    ("-r -s -f qcow2 over.qcow2", ""),
    ("-n -f raw d.raw", ""),
    ("--cache=writethrough --aio=threads -f qcow2 d.qcow2", ""),
    ("--cache=none --aio=native -f raw d.raw", ""),
    ("--cache=directsync -f raw d.raw", ""),
    ("--cache=unsafe -f qcow2 d.qcow2", ""),
    ("--discard=unmap --detect-zeroes=unmap -f qcow2 d.qcow2", ""),
    ("--discard=ignore --detect-zeroes=on -f raw d.raw", ""),
    ("--image-opts driver=qcow2,file.filename=d.qcow2", ""),
    ("--image-opts driver=raw,offset=1048576,size=65536,file.driver=file,file.filename=d.raw", ""),
    ("-A -v --handshake-limit=5 -f qcow2 d.qcow2", ""),
    ("-B daily -f qcow2 marked.qcow2", ""),
    ("-r -B daily -f qcow2 marked.qcow2", ""),
];

/// Facts that are this program's own: see the guide. What else a client is told is the same.
const OWN: [&str; 3] = ["contexts", "block_size_minimum", "block_size_preferred"];

fn seen(running: &Running, name: &str) -> Value {
    let name: String = name.replace('/', "%2F").replace('=', "%3D");
    let text = succeed("nbdinfo", &["--json", &running.uri(&name)]);
    let mut all: Value = serde_json::from_str(&text).expect("JSON");
    for field in OWN {
        all["exports"][0].as_object_mut().expect("facts").remove(field);
    }
    all
}

fn copied(dir: &Dir, running: &Running, name: &str) -> Vec<u8> {
    let name: String = name.replace('/', "%2F").replace('=', "%3D");
    let copy = dir.text("copy");
    succeed("nbdcopy", &[&running.uri(&name), &copy]);
    std::fs::read(&copy).expect("the copy")
}

#[test]
fn the_same_lines_show_clients_the_same_and_end_with_the_last_of_them() {
    requires!("qemu-nbd", "qemu-img", "qemu-io", "nbdinfo", "nbdcopy");
    let dir = place();
    for (line, name) in LINES {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [theirs, ours] = Whose::BOTH.map(|whose| {
            let mut running = Running::start(whose, &dir, &words);
            let facts = seen(&running, name);
            let ran = running.end(None);
            assert_eq!(ran.code, 0, "{whose:?} {line}: {}", ran.err);
            assert!(!running.socket.exists(), "{whose:?} {line}: the socket is removed");
            let mut running = Running::start(whose, &dir, &words);
            let bytes = copied(&dir, &running, name);
            // A client that only lists does not end a server that no client has used; nbdcopy has.
            assert_eq!(running.end(None).code, 0, "{whose:?} {line}");
            (facts, bytes)
        });
        assert_eq!(theirs.0, ours.0, "{line}");
        assert_eq!(first_difference(&theirs.1, &ours.1), None, "{line}");
        assert!(!theirs.1.is_empty());
    }
}

/// Lines of servers that are written, and the format of their image.
const WRITTEN: &[(&str, &str)] = &[
    ("-f raw d.raw", "raw"),
    ("-f qcow2 d.qcow2", "qcow2"),
    ("-f qcow2 over.qcow2", "qcow2"),
    ("--discard=unmap -f qcow2 d.qcow2", "qcow2"),
    ("--discard=unmap --detect-zeroes=unmap -f qcow2 over.qcow2", "qcow2"),
    ("--detect-zeroes=on -f qcow2 d.qcow2", "qcow2"),
    ("-f raw -o 4096 d.raw", "raw"),
    ("-o 65536 -f qcow2 over.qcow2", "qcow2"),
    ("-s -f raw d.raw", "raw"),
    ("-s over.qcow2", "qcow2"),
    ("--cache=none -f raw d.raw", "raw"),
    ("--cache=directsync -f qcow2 d.qcow2", "qcow2"),
];

#[test]
fn what_the_same_clients_write_is_the_same_in_the_image() {
    requires!("qemu-nbd", "qemu-img", "qemu-io");
    for (line, format) in WRITTEN {
        let words: Vec<&str> = line.split_whitespace().collect();
        let file = *words.last().expect("a file");
        let [theirs, ours] = Whose::BOTH.map(|whose| {
            let dir = place();
            let before = std::fs::read(dir.join(file)).expect("the image");
            let mut running = Running::start(whose, &dir, &words);
            let commands = [
                "write -P 1 100 70000",
                "write -P 2 2M 256k",
                "write -P 0 1M 512k",
                "write -z 2500k 128k",
                "write -z -u 2700k 128k",
                "write -f -P 3 3500k 512",
                "discard 64k 128k",
                "write -P 0 0 64k",
                "flush",
                "write -P 4 3000k 64k",
                "read -P 2 2M 256k",
            ]
            .map(str::to_owned);
            qemu_io(&["-f", "raw", &running.uri("")], &commands);
            let ran = running.end(None);
            assert_eq!(ran.code, 0, "{whose:?} {line}: {}", ran.err);
            if line.contains("-s ") {
                assert!(std::fs::read(dir.join(file)).expect("the image") == before, "{whose:?} {line}");
            }
            if *format == "qcow2" {
                succeed("qemu-img", &["check", "-q", &dir.text(file)]);
            }
            let map = succeed("qemu-img", &["map", "--output=json", "-f", format, &dir.text(file)]);
            let zeros = zeros_in(&serde_json::from_str(&map).expect("JSON"), 64 << 10);
            (qemu_dump(&dir.join(file), format, None), zeros)
        });
        // Whether discarded bytes read as before or as zeros is the server's choice.
        let (start, end) = (64 << 10, 192 << 10);
        let offset: usize = match words.iter().position(|word| *word == "-o") {
            Some(at) => words[at + 1].parse().expect("a number"),
            None => 0,
        };
        let [mut theirs_bytes, mut ours_bytes] = [theirs.0, ours.0];
        if line.contains("--discard=unmap") {
            theirs_bytes[offset + start..offset + end].fill(0);
            ours_bytes[offset + start..offset + end].fill(0);
        }
        assert_eq!(first_difference(&theirs_bytes, &ours_bytes), None, "{line}");
        assert_eq!(theirs.1, ours.1, "{line}: which clusters are zero without data");
    }
}

/// The clusters of this size that are zeros without data.
fn zeros_in(map: &Value, cluster: u64) -> Vec<u64> {
    let runs =
        map.as_array().expect("a list").iter().filter(|run| run["zero"] == true && run["data"] == false);
    let ends =
        runs.map(|run| (run["start"].as_u64().expect("a place"), run["length"].as_u64().expect("a length")));
    ends.flat_map(|(start, len)| start.div_ceil(cluster)..(start + len) / cluster).collect()
}

#[test]
fn what_cannot_be_served_ends_both_with_the_same_code() {
    requires!("qemu-nbd", "qemu-img", "qemu-io");
    let dir = place();
    let socket = dir.text("s");
    for line in [
        "-f raw nothing",
        "-f nope d.raw",
        "-f qcow2 d.raw",
        "-l nothing d.qcow2",
        "-l x -f raw d.raw",
        "-B nothing d.qcow2",
        "-B nothing -f raw d.raw",
        "-B daily -B nothing -f qcow2 marked.qcow2",
        "-r -B nothing -f qcow2 marked.qcow2",
        "-f raw -o 99999999 d.raw",
        "--pid-file=/nonexistent/pid -f raw d.raw",
        "--fork -f raw nothing",
        "--fork --pid-file=/nonexistent/pid -f raw d.raw",
        "--image-opts driver=qcow2,file.filename=nothing",
        "--tls-creds=nothing -f raw d.raw",
        "-c /dev/nothing -f raw d.raw",
    ] {
        let words: Vec<&str> = ["-k", &socket].into_iter().chain(line.split_whitespace()).collect();
        for whose in Whose::BOTH {
            let ran = whose.run(&dir, &words);
            assert_eq!(ran.code, 1, "{whose:?} {line}: {ran:?}");
            assert!(!ran.err.is_empty() && ran.out.is_empty(), "{whose:?} {line}: {ran:?}");
            let said: Vec<&str> = ran.err.lines().collect();
            let is_ours = whose == Whose::Ours;
            assert!(!is_ours || said.len() == 1, "one line: {said:?}");
        }
    }
    let names = dir.names();
    assert!(!names.iter().any(|name| name == "s"), "no socket is left: {names:?}");
}

/// A server's certificate, and the authority that has signed it.
fn certify(dir: &str) {
    std::fs::create_dir_all(dir).expect("a directory");
    let params = |name: &str| {
        let mut params = CertificateParams::new(vec!["localhost".to_owned()]).expect("a name");
        params.distinguished_name.push(DnType::CommonName, name);
        params
    };
    let mut authority = params("authority");
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    authority.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    let authority =
        CertifiedIssuer::self_signed(authority, KeyPair::generate().expect("a key")).expect("a CA");
    let key = KeyPair::generate().expect("a key");
    let mut params = params("server");
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    let certificate = params.signed_by(&key, &authority).expect("a certificate");
    for (name, text) in [
        ("ca-cert.pem", authority.pem()),
        ("server-cert.pem", certificate.pem()),
        ("server-key.pem", key.serialize_pem()),
    ] {
        std::fs::write(format!("{dir}/{name}"), text).expect("a file");
    }
}

#[test]
fn a_set_of_certificates_is_used_as_there() {
    requires!("qemu-nbd", "qemu-img", "qemu-io", "nbdinfo");
    let dir = place();
    let certificates = dir.text("pki");
    certify(&certificates);
    for (verify, is_let_in) in [("off", true), ("on", false)] {
        let object =
            format!("tls-creds-x509,id=tls0,endpoint=server,dir={certificates},verify-peer={verify}");
        for whose in Whose::BOTH {
            let words = ["-t", "--object", &object, "--tls-creds", "tls0", "-f", "raw", "d.raw"];
            let mut running = Running::start(whose, &dir, &words);
            let plain = run("nbdinfo", &["--size", &running.uri("")]);
            assert_ne!(plain.code, 0, "{whose:?}: without TLS nobody is let in");
            let socket = path_text(&running.socket).to_owned();
            let uri = format!("nbds+unix://localhost/?socket={socket}&tls-certificates={certificates}");
            let sealed = run("nbdinfo", &["--size", &uri]);
            assert_eq!(sealed.code == 0, is_let_in, "{whose:?} {verify}: {sealed:?}");
            assert!(running.is_running());
            assert_eq!(running.end(Some(rustix::process::Signal::TERM)).code, 0);
        }
    }
}
