//! Exports over TLS as images: sources, targets and backing images, at QEMU's server, nbdkit and our own, in our words and in QEMU's.

use std::os::unix::process::CommandExt as _;
use std::path::Path;

use super::support::client::Client;
use super::support::dir::Dir;
use super::support::program::{Ran, finish, path_text, run, succeed, vellum, vellum_command};
use super::support::server::{Foreign, Server};
use super::support::{first_difference, noise};
use super::tls::{certify, client_files};
use super::{Image, Kind, MIB};
use crate::requires;

/// This program under the name `qemu-img`.
fn as_qemu_img(arguments: &[&str]) -> Ran {
    let mut command = vellum_command();
    command.arg0("qemu-img").args(arguments);
    finish(command, None)
}

fn url(socket: &Path, export: &str) -> String {
    format!("nbds+unix:///{export}?socket={}", path_text(socket))
}

/// A server with certificates, and where it listens.
enum Running {
    Ours(Server),
    Other(Foreign),
}

impl Running {
    fn socket(&self) -> std::path::PathBuf {
        match self {
            Self::Ours(server) => server.socket(),
            Self::Other(server) => server.socket().to_owned(),
        }
    }

    fn stop(self) {
        match self {
            Self::Ours(server) => drop(server.stop()),
            Self::Other(server) => server.stop(),
        }
    }
}

/// Serves a raw file as the default export, over TLS and in no other way.
fn serve(program: &str, raw: &Path, certificates: &Path) -> Running {
    let (raw, dir) = (path_text(raw), path_text(certificates));
    match program {
        "vellum" => Running::Ours(Server::start(&[raw, "-f", "raw", "--tls-certificates", dir])),
        "qemu-nbd" => Running::Other(Foreign::start("qemu-nbd", |socket| {
            let object = format!("tls-creds-x509,id=t,endpoint=server,verify-peer=no,dir={dir}");
            let words =
                ["-t", "-e", "8", "-f", "raw", "--tls-creds", "t", "--object", &object, "-k", socket, raw];
            words.map(str::to_owned).to_vec()
        })),
        _ => Running::Other(Foreign::start("nbdkit", |socket| {
            let certificates = format!("--tls-certificates={dir}");
            let words = ["-f", "-U", socket, "--tls=require", &certificates, "file", raw];
            words.map(str::to_owned).to_vec()
        })),
    }
}

#[test]
fn each_command_reads_and_writes_exports_over_tls() {
    requires!("qemu-nbd");
    requires!("nbdkit");
    let dir = Dir::short();
    let ours = dir.join("ours");
    certify(&ours);
    let client = client_files(&ours, &dir.join("client"), false);
    let trust = ["--tls-certificates", client.as_str()];
    for (seed, program) in (40..).zip(["vellum", "qemu-nbd", "nbdkit"]) {
        let (raw, bytes) = (dir.join("served.raw"), noise(3 * MIB, seed));
        std::fs::write(&raw, &bytes).expect("a disk");
        let server = serve(program, &raw, &ours);
        let socket = server.socket();
        let (url, plain) = (url(&socket, ""), format!("nbd+unix:///?socket={}", path_text(&socket)));
        let with = |words: &[&str]| vellum(&[&words[..1], &trust, &words[1..]].concat());

        let info = with(&["info", "--output", "json", &url]).json();
        assert_eq!((&info["virtual-size"], &info["format"]), (&(3 * MIB).into(), &"raw".into()), "{program}");
        let map = with(&["map", "--output", "json", &url]).json();
        let mapped: u64 =
            map.as_array().expect("a list").iter().map(|run| run["length"].as_u64().expect("a length")).sum();
        assert_eq!(mapped, 3 * MIB as u64, "{program}");
        let copy = dir.text("copy.raw");
        with(&["convert", "-f", "raw", "-O", "raw", &url, &copy]).answer();
        assert_eq!(first_difference(&std::fs::read(&copy).expect("a copy"), &bytes), None, "{program}");
        with(&["compare", "-f", "raw", "-F", "raw", &url, &copy]).answer();
        with(&["measure", "-O", "qcow2", &url]).answer();

        // The other way.
        let new = noise(3 * MIB, seed + 100);
        std::fs::write(&copy, &new).expect("a disk");
        with(&["convert", "-f", "raw", "-O", "raw", &copy, &url]).answer();
        with(&["compare", "-f", "raw", "-F", "raw", &url, &copy]).answer();

        // A server that wants TLS is not talked to without.
        let said = vellum(&["info", &plain]);
        assert_eq!(said.code, 1, "{said:?}");
        assert!(said.err.contains("wants TLS") && said.err.contains("--tls-certificates DIR"), "{said:?}");
        // Nobody has said whom to trust, and this host does not know the authority.
        let said = vellum(&["info", &url]);
        assert!(said.code == 1 && said.err.contains("use --tls-certificates DIR"), "{program}: {said:?}");

        // In the words of QEMU, under both names.
        let object = format!("tls-creds-x509,id=tls0,dir={client},endpoint=client");
        let keys = format!(
            "driver=nbd,server.type=unix,server.path={},tls-creds=tls0,tls-hostname=localhost",
            path_text(&socket)
        );
        let json = format!(
            r#"json:{{"driver":"raw","file":{{"driver":"nbd","server":{{"type":"unix","path":"{}"}},"tls-creds":"tls0","tls-hostname":"localhost"}}}}"#,
            path_text(&socket)
        );
        for program in [vellum, as_qemu_img] {
            program(&["info", "--object", &object, "--image-opts", &keys]).answer();
            program(&["map", "--object", &object, &json]).answer();
            program(&["convert", "--object", &object, "--image-opts", &keys, "-O", "raw", &copy]).answer();
            assert_eq!(first_difference(&std::fs::read(&copy).expect("a copy"), &new), None);
            program(&["compare", "--object", &object, &json, &copy]).answer();
        }
        let target = ["convert", "-n", "--target-image-opts", "-f", "raw", "--object", &object, &copy, &keys];
        std::fs::write(&copy, &bytes).expect("a disk");
        as_qemu_img(&target).answer();
        server.stop();
        assert_eq!(first_difference(&std::fs::read(&raw).expect("a disk"), &bytes), None, "{program}");
    }
}

/// Where the name is wrong, or an object, nothing is read, and the message says which option is about it.
#[test]
fn a_server_that_is_not_the_one_that_was_meant_is_refused_with_the_remedy() {
    let dir = Dir::short();
    let (ours, other) = (dir.join("ours"), dir.join("other"));
    certify(&ours);
    certify(&other);
    let client = client_files(&ours, &dir.join("client"), false);
    let stranger = client_files(&other, &dir.join("stranger"), false);
    let image = Image::new(&dir, "disk", Kind::Raw, &noise(MIB, 50));
    let server = image.serve(&["--tls-certificates", path_text(&ours), "--nbd", "tcp:127.0.0.1:0"]);
    let here = format!("nbds://127.0.0.1:{}/", server.tcp().port());
    let info = |words: &[&str]| vellum(&[&["info", &here], words].concat());
    info(&["--tls-certificates", &client, "--tls-hostname", "localhost"]).answer();
    info(&["--tls-unverified"]).answer();
    for (words, expected) in [
        (
            &["--tls-certificates", client.as_str()][..],
            &["another name than 127.0.0.1", "--tls-hostname NAME"][..],
        ),
        (
            &["--tls-certificates", &stranger, "--tls-hostname", "localhost"],
            &["by no authority in", "stranger/ca-cert.pem"],
        ),
        (&["--tls-certificates", "/nonexistent"], &["/nonexistent/ca-cert.pem"]),
        (
            &["--tls-hostname", "localhost"],
            &["by no authority that this host trusts", "--tls-certificates DIR"],
        ),
    ] {
        let said = info(words);
        assert!(said.code == 1 && expected.iter().all(|word| said.err.contains(word)), "{words:?}: {said:?}");
    }
    let plain = here.replace("nbds:", "nbd:");
    let said = vellum(&["info", &plain, "--tls-certificates", &client]);
    assert!(said.code == 1 && said.err.contains(&format!("name it {here}")), "{said:?}");
    let keys = |more: &str| format!("driver=nbd,host=127.0.0.1,port={}{more}", server.tcp().port());
    let object = format!("tls-creds-x509,id=t,dir={client}");
    let of_server = format!("tls-creds-x509,id=t,endpoint=server,dir={}", path_text(&ours));
    for (object, keys, expected) in [
        (&object, keys(",tls-creds=t"), "another name than 127.0.0.1"),
        (&object, keys(",tls-creds=x"), "No TLS credentials with id 'x'"),
        (&of_server, keys(",tls-creds=t"), "--object tls-creds-x509"),
        (&object, keys(""), "wants TLS"),
    ] {
        for program in [vellum, as_qemu_img] {
            let said = program(&["info", "--object", object, "--image-opts", &keys]);
            assert!(said.code == 1 && said.err.contains(expected), "{keys}: {said:?}");
        }
    }
    let right = keys(",tls-creds=t,tls-hostname=localhost");
    as_qemu_img(&["info", "--object", &object, "--image-opts", &right]).answer();
    let anybody = format!("{object},verify-peer=off");
    as_qemu_img(&["info", "--object", &anybody, "--image-opts", &keys(",tls-creds=t")]).answer();
    server.stop();
}

/// A server that asks for certificates lets in whom the files make known.
#[test]
fn a_client_shows_the_certificate_of_its_directory() {
    let dir = Dir::short();
    let ours = dir.join("ours");
    certify(&ours);
    let known = client_files(&ours, &dir.join("known"), true);
    let unnamed = client_files(&ours, &dir.join("unnamed"), false);
    let image = Image::new(&dir, "disk", Kind::Raw, &noise(MIB, 51));
    let server = image.serve(&["--tls-certificates", path_text(&ours), "--tls-verify-peer"]);
    let here = url(&server.socket(), "");
    vellum(&["info", "--tls-certificates", &known, &here]).answer();
    let said = vellum(&["info", "--tls-certificates", &unnamed, &here]);
    assert!(said.code == 1 && said.err.contains("unnamed/client-cert.pem"), "{said:?}");
    server.stop();
}

/// A clone over an export at another server, which is served itself; an image may only name one that the user allows.
#[test]
fn an_export_over_tls_is_a_backing_image_and_is_served_again() {
    let dir = Dir::short();
    let ours = dir.join("ours");
    certify(&ours);
    let client = client_files(&ours, &dir.join("client"), false);
    let mut bytes = noise(2 * MIB, 52);
    let image = Image::new(&dir, "disk", Kind::Raw, &bytes);
    let server = image.serve(&["--tls-certificates", path_text(&ours), "--read-only"]);
    let here = url(&server.socket(), "");
    let top = dir.text("top.qcow2");
    vellum(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "--trust-base",
        "--tls-certificates",
        &client,
        "-b",
        &here,
        "-F",
        "raw",
        &top,
    ])
    .answer();
    let trust = ["--remote-tls-certificates", client.as_str(), "--trust-base"];
    // Not allowed at all; allowed, but only in the clear.
    let in_the_clear = here.replace("nbds+unix:", "nbd+unix:");
    for allowed in [&[][..], &["--allow-url", &in_the_clear]] {
        let refused = Server::try_start(&[&[top.as_str(), "-f", "qcow2"], &trust[..], allowed].concat());
        let refused = refused.err().expect("it is refused");
        assert!(refused.err.contains("--allow-url nbds+unix:"), "{refused:?}");
    }
    let served = Server::start(&[&[top.as_str(), "-f", "qcow2", "--allow-url", &here], &trust[..]].concat());
    let mut guest = Client::connect(&served.peer(), "").expect("a connection");
    guest.write(MIB as u64, &[9; 70_000], 0).expect("written");
    guest.flush().expect("flushed");
    bytes[MIB..MIB + 70_000].fill(9);
    assert_eq!(first_difference(&guest.read_all().expect("read"), &bytes), None);
    guest.disconnect();
    served.stop();
    let copy = dir.text("copy.raw");
    let reading = ["--allow-url", &here, "--tls-certificates", &client];
    vellum(&[&["convert", "-f", "qcow2", "-O", "raw", &top, &copy], &reading[..]].concat()).answer();
    assert_eq!(first_difference(&std::fs::read(&copy).expect("a copy"), &bytes), None);
    let chain = vellum(&[&["info", "--backing-chain", &top], &reading[..]].concat()).answer();
    assert!(chain.contains(&here), "{chain}");
    // The export itself, served again, in both ways of naming it.
    let object = format!("tls-creds-x509,id=t,endpoint=client,dir={client}");
    let keys = format!(
        "driver=raw,file.driver=nbd,file.path={},file.tls-creds=t,file.tls-hostname=localhost",
        path_text(&server.socket())
    );
    for words in [
        &["-f", "raw", &here, "--remote-tls-certificates", &client][..],
        &["--image-opts", "--object", &object, &keys],
    ] {
        let served = Server::start(&[words, &["--read-only"]].concat());
        let mut guest = Client::connect(&served.peer(), "").expect("a connection");
        assert_eq!(guest.read(5, 1000).expect("read"), noise(2 * MIB, 52)[5..1005]);
        guest.disconnect();
        served.stop();
    }
    server.stop();
}

/// What `qemu-img` says of an export over TLS, we say, too.
#[test]
fn both_programs_say_the_same_of_an_export_over_tls() {
    requires!("qemu-img");
    let dir = Dir::short();
    let ours = dir.join("ours");
    certify(&ours);
    let client = client_files(&ours, &dir.join("client"), false);
    let mut bytes = noise(2 * MIB, 53);
    bytes[MIB / 2..MIB].fill(0);
    let image = Image::new(&dir, "disk", Kind::Qcow2, &bytes);
    let server = image.serve(&["--tls-certificates", path_text(&ours), "--read-only"]);
    let object = format!("tls-creds-x509,id=t,endpoint=client,dir={client}");
    let socket = server.socket();
    let keys = format!(
        "driver=nbd,server.type=unix,server.path={},tls-creds=t,tls-hostname=localhost",
        path_text(&socket)
    );
    let theirs =
        succeed("qemu-img", &["map", "--output", "json", "--object", &object, "--image-opts", &keys]);
    let our = as_qemu_img(&["map", "--output", "json", "--object", &object, "--image-opts", &keys]).answer();
    let zeros = |text: &str| {
        let runs: serde_json::Value = serde_json::from_str(text).expect("JSON");
        let runs = runs.as_array().expect("a list").clone();
        let zeros: Vec<_> = runs.iter().filter(|run| run["zero"] == true).cloned().collect();
        zeros.iter().map(|run| (run["start"].clone(), run["length"].clone())).collect::<Vec<_>>()
    };
    assert_eq!(zeros(&theirs), zeros(&our));
    assert_eq!(zeros(&our).len(), 1, "{our}");
    let failed = run(
        "qemu-img",
        &["info", "--object", &object, "--image-opts", &keys.replace("=localhost", "=other")],
    );
    assert_ne!(failed.code, 0, "{failed:?}");
    server.stop();
}
