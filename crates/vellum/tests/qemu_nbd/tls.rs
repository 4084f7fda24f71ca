//! Lists of exports, and clients that are admitted by the name of a certificate: both programs as servers, both as clients, in every pairing.

use std::io::{BufRead as _, BufReader};
use std::path::Path;

use rcgen::string::{BmpString, TeletexString};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType, DnValue,
    ExtendedKeyUsagePurpose, IsCa, KeyPair, KeyUsagePurpose,
};
use rustix::process::Signal;

use super::support::dir::Dir;
use super::support::program::{path_text, run, succeed, vellum};
use super::support::until;
use super::{Running, Whose};
use crate::requires;

/// An authority that certifies servers and clients, in directories as GnuTLS's users have them.
struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

fn named(name: &[(DnType, DnValue)], hosts: &[&str]) -> CertificateParams {
    let hosts: Vec<String> = hosts.iter().map(|host| (*host).to_owned()).collect();
    let mut params = CertificateParams::new(hosts).expect("names of hosts");
    params.distinguished_name = DistinguishedName::new();
    for (kind, value) in name {
        params.distinguished_name.push(kind.clone(), value.clone());
    }
    params
}

fn text(value: &str) -> DnValue {
    DnValue::Utf8String(value.to_owned())
}

impl Authority {
    fn new(name: &str) -> Self {
        let mut params = named(&[(DnType::CommonName, text(name))], &[]);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().expect("a key"));
        Self { issuer: issuer.expect("an authority") }
    }

    /// A directory with the authority, and the certificate of a `server` or a `client`.
    fn certify(&self, dir: &Path, who: &str, mut params: CertificateParams) -> String {
        std::fs::create_dir_all(dir).expect("a directory");
        let purpose = match who {
            "server" => ExtendedKeyUsagePurpose::ServerAuth,
            _ => ExtendedKeyUsagePurpose::ClientAuth,
        };
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
        params.extended_key_usages = vec![purpose];
        let key = KeyPair::generate().expect("a key");
        let certificate = params.signed_by(&key, &self.issuer).expect("a certificate");
        for (name, text) in [
            ("ca-cert.pem".to_owned(), self.issuer.pem()),
            (format!("{who}-cert.pem"), certificate.pem()),
            (format!("{who}-key.pem"), key.serialize_pem()),
        ] {
            std::fs::write(dir.join(name), text).expect("a file");
        }
        path_text(dir).to_owned()
    }
}

fn image(dir: &Dir) {
    succeed("qemu-img", &["create", "-q", "-f", "qcow2", &dir.text("d.qcow2"), "4M"]);
    succeed("qemu-img", &["bitmap", "--add", &dir.text("d.qcow2"), "daily"]);
}

#[test]
fn both_programs_list_the_exports_of_both_in_the_same_lines() {
    requires!("qemu-nbd", "qemu-img");
    let dir = Dir::short();
    image(&dir);
    std::fs::write(dir.join("d.raw"), [7; 1 << 20]).expect("a disk");
    for line in [
        "-f qcow2 d.qcow2",
        "-r -f raw d.raw",
        "-e 4 -x a/b=c -D what_it_is -f qcow2 d.qcow2",
        "-A -B daily -f qcow2 d.qcow2",
    ] {
        for server in Whose::BOTH {
            let words: Vec<&str> = ["-t"].into_iter().chain(line.split_whitespace()).collect();
            let mut running = Running::start(server, &dir, &words);
            let [theirs, ours] =
                Whose::BOTH.map(|client| client.run(&dir, &["-L", "-k", path_text(&running.socket)]));
            assert_eq!((theirs.code, ours.code), (0, 0), "{server:?} {line}: {theirs:?} {ours:?}");
            assert_eq!(theirs.out, ours.out, "{server:?} {line}");
            assert!(ours.out.starts_with("exports available: 1\n export: '"), "{}", ours.out);
            assert_eq!(running.end(Some(Signal::TERM)).code, 0);
        }
    }
    // In our own words: several, and JSON.
    let (one, two, socket) = (dir.text("d.qcow2"), dir.text("d.raw"), dir.text("many"));
    let [one, two] = [format!("one={one}"), format!("two={two}")];
    let address = format!("unix:{socket}");
    let server = super::support::server::Server::start(&[
        "--export",
        &one,
        "--export",
        &two,
        "--nbd",
        &address,
        "--read-only",
    ]);
    let listed = vellum(&["export", "list", "--nbd", &address, "--output", "json"]).json();
    let names: Vec<_> =
        listed.as_array().expect("a list").iter().map(|export| export["name"].clone()).collect();
    assert_eq!(names, ["one", "two"]);
    assert_eq!((&listed[0]["size"], &listed[1]["size"]), (&(4 << 20).into(), &(1 << 20).into()));
    assert_eq!(listed[0]["contexts"][0], "base:allocation");
    let theirs = succeed("qemu-nbd", &["-L", "-k", &socket]);
    assert_eq!(vellum(&["export", "list", "--nbd", &address]).answer(), theirs);
    server.stop();
    for whose in Whose::BOTH {
        for words in [&["-L", "-k", "/nonexistent"][..], &["-L", "-p", "1", "-b", "127.0.0.1"]] {
            let ran = whose.run(&dir, words);
            assert!(ran.code == 1 && ran.out.is_empty() && ran.err.lines().count() == 1, "{whose:?} {ran:?}");
        }
    }
}

#[test]
fn exports_are_listed_over_tls_by_clients_that_trust_the_server_only() {
    requires!("qemu-nbd", "qemu-img");
    let dir = Dir::short();
    image(&dir);
    let (ours, others) = (Authority::new("ours"), Authority::new("others"));
    let host = |name: &str| named(&[(DnType::CommonName, text(name))], &["localhost"]);
    let pki = ours.certify(&dir.join("server"), "server", host("server"));
    let known = ours.certify(&dir.join("known"), "client", host("client"));
    let stranger = others.certify(&dir.join("stranger"), "client", host("client"));
    for verifies in ["on", "off"] {
        let object = format!("tls-creds-x509,id=t,endpoint=server,dir={pki},verify-peer={verifies}");
        for server in Whose::BOTH {
            let words = ["-t", "--object", &object, "--tls-creds", "t", "-f", "qcow2", "d.qcow2"];
            let mut running = Running::start(server, &dir, &words);
            let socket = path_text(&running.socket).to_owned();
            let list = |client: Whose, creds: &str, rest: &[&str]| {
                let object = format!("tls-creds-x509,id=c,endpoint=client,{creds}");
                let words = ["-L", "-k", &socket, "--object", &object, "--tls-creds", "c"];
                client.run(&dir, &[&words[..], rest].concat())
            };
            for client in Whose::BOTH {
                let of = |ran: super::Ran| (ran.code, ran.out.lines().next().unwrap_or_default().to_owned());
                let good = (0, "exports available: 1".to_owned());
                let bad = (1, String::new());
                let shown = |what: &str| format!("{server:?} {verifies}, {client:?}: {what}");
                let known_dir = format!("dir={known}");
                let at = |host: &'static str| ["--tls-hostname", host];
                assert_eq!(of(list(client, &known_dir, &at("localhost"))), good, "{}", shown("by name"));
                assert_eq!(of(list(client, &known_dir, &[])), bad, "{}", shown("no name"));
                assert_eq!(of(list(client, &known_dir, &at("elsewhere"))), bad, "{}", shown("another name"));
                // It trusts another authority, and is not trusted.
                let strangers = format!("dir={stranger}");
                assert_eq!(of(list(client, &strangers, &at("localhost"))), bad, "{}", shown("a stranger"));
                let careless = format!("dir={stranger},verify-peer=off");
                let expected = if verifies == "on" { bad.clone() } else { good.clone() };
                assert_eq!(of(list(client, &careless, &[])), expected, "{}", shown("anybody"));
                // Without TLS.
                assert_eq!(of(client.run(&dir, &["-L", "-k", &socket])), bad, "{}", shown("in the clear"));
            }
            // In our own words a socket needs no name.
            let address = format!("unix:{socket}");
            for (rest, code) in [
                (&["--tls-certificates", &known][..], 0),
                (&["--tls-certificates", &known, "--tls-hostname", "elsewhere"], 1),
                (&["--tls-certificates", &stranger], 1),
                (&[], 1),
            ] {
                let ran = vellum(&[&["export", "list", "--nbd", &address], rest].concat());
                assert_eq!(ran.code, code, "{server:?} {rest:?}: {ran:?}");
            }
            assert_eq!(running.end(Some(Signal::TERM)).code, 0);
        }
    }
    // A server without TLS is not talked to in the clear by a client that wants it.
    let mut running = Running::start(Whose::Ours, &dir, &["-t", "-f", "qcow2", "d.qcow2"]);
    let object = format!("tls-creds-x509,id=c,endpoint=client,dir={known}");
    for client in Whose::BOTH {
        let words = ["-L", "-k", path_text(&running.socket), "--object", &object, "--tls-creds", "c"];
        assert_eq!(client.run(&dir, &words).code, 1, "{client:?}");
    }
    assert_eq!(running.end(Some(Signal::TERM)).code, 0);
}

/// Names of clients, such as somebody could have who wants to be taken for somebody else.
fn names() -> Vec<Vec<(DnType, DnValue)>> {
    use DnType::{CommonName, CountryName, CustomDnType, OrganizationName, OrganizationalUnitName};
    let mail = || CustomDnType(vec![1, 2, 840, 113_549, 1, 9, 1]);
    vec![
        vec![
            (CountryName, DnValue::PrintableString("GB".try_into().expect("letters"))),
            (CommonName, text("host 7")),
        ],
        vec![(CommonName, text("host-7")), (OrganizationName, text("Example"))],
        vec![(CommonName, text("host-7,O=Example"))],
        vec![(OrganizationName, text("a+b\"c\\d<e>f;g=h")), (CommonName, text(" lead"))],
        vec![
            (OrganizationName, text("#x")),
            (OrganizationalUnitName, text("trail ")),
            (CommonName, text(" ")),
        ],
        vec![(OrganizationName, text("Größe")), (CommonName, text("日本"))],
        vec![(OrganizationName, DnValue::BmpString(BmpString::try_from("Größe").expect("letters")))],
        vec![(OrganizationName, DnValue::TeletexString(TeletexString::try_from("plain").expect("letters")))],
        vec![(CommonName, DnValue::Ia5String("of another kind".try_into().expect("letters")))],
        vec![(mail(), DnValue::Ia5String("a@example.org".try_into().expect("letters")))],
        vec![(mail(), text("a@example.org"))],
        vec![(CustomDnType(vec![1, 2, 3, 4, 5]), text("hello")), (CommonName, text("x"))],
        vec![(CustomDnType(vec![2, 5, 4, 20]), text("123")), (CommonName, text("tab\tand\nline"))],
        vec![(CustomDnType(vec![0, 9, 2342, 19_200_300, 100, 1, 1]), text("user")), (CommonName, text("*"))],
    ]
}

/// The name that a server has refused last, in its own words.
fn refused_name(whose: Whose, said: &str) -> Option<String> {
    let (before, after) = match whose {
        Whose::Qemu => ("TLS x509 authz check for ", " is denied"),
        Whose::Ours => ("is not in the access list: ", " peer="),
    };
    let at = said.rfind(before)? + before.len();
    let name = &said[at..];
    Some(name[..name.rfind(after)?].to_owned())
}

#[test]
fn names_of_certificates_are_read_as_there_and_decide_who_is_let_in() {
    requires!("qemu-nbd", "qemu-img");
    let dir = Dir::short();
    image(&dir);
    let authority = Authority::new("ours");
    let pki = authority.certify(
        &dir.join("server"),
        "server",
        named(&[(DnType::CommonName, text("server"))], &["localhost"]),
    );
    let creds = format!("tls-creds-x509,id=t,endpoint=server,dir={pki}");
    let serve = |whose: Whose, access: &str| {
        let words = [
            "-t",
            "--object",
            &creds,
            "--tls-creds",
            "t",
            "--object",
            access,
            "--tls-authz",
            "a",
            "-f",
            "qcow2",
            "d.qcow2",
        ];
        Running::start(whose, &dir, &words)
    };
    let asks = |running: &Running, client: &str| {
        let object = format!("tls-creds-x509,id=c,endpoint=client,dir={client}");
        let words = ["-L", "-k", path_text(&running.socket), "--object", &object, "--tls-creds", "c"];
        run("qemu-nbd", &[&words[..], &["--tls-hostname", "localhost"]].concat()).code == 0
    };
    let clients: Vec<String> = names()
        .iter()
        .enumerate()
        .map(|(at, name)| authority.certify(&dir.join(&format!("c{at}")), "client", named(name, &[])))
        .collect();
    let mut told = Vec::new();
    for client in &clients {
        let [theirs, ours] = Whose::BOTH.map(|whose| {
            let mut running = serve(whose, "authz-simple,id=a,identity=nobody");
            assert!(!asks(&running, client), "{whose:?} {client}");
            let ran = running.end(Some(Signal::TERM));
            refused_name(whose, &ran.err).unwrap_or_else(|| panic!("{whose:?} {client}: {ran:?}"))
        });
        // The log of ours has no control characters.
        let theirs_logged: String = theirs
            .chars()
            .map(|letter| if letter.is_control() { letter.escape_debug().to_string() } else { letter.into() })
            .collect();
        assert_eq!(theirs_logged, ours, "{client}");
        told.push(theirs);
    }
    assert_eq!(told[1], "CN=host-7,O=Example");
    assert_eq!(told[2], "CN=host-7\\,O=Example");
    // Exactly the client is let in whose name is given, by both.
    for (at, name) in told.iter().enumerate() {
        let access = format!("authz-simple,id=a,identity={}", name.replace(',', ",,"));
        for whose in Whose::BOTH {
            let mut running = serve(whose, &access);
            for other in [at, (at + 1) % clients.len()] {
                assert_eq!(asks(&running, &clients[other]), other == at, "{whose:?} {name}: {other}");
            }
            assert_eq!(running.end(Some(Signal::TERM)).code, 0);
        }
    }
    // Lists: the first rule that fits.
    for (access, expected) in [
        ("authz-list,id=a,policy=allow", [true, true, true]),
        ("authz-list,id=a", [false, false, false]),
        (
            "authz-list,id=a,rules.0.match=CN=host-7,,O=Example,rules.0.policy=deny,rules.1.match=*host?7*,rules.1.policy=allow,\
             rules.1.format=glob",
            [true, false, true],
        ),
        ("authz-list,id=a,rules.0.match=*host?7*,rules.0.policy=allow", [false, false, false]),
        (
            r#"{"qom-type":"authz-list","id":"a","policy":"allow","rules":[{"match":"CN=*\\,*","policy":"deny","format":"glob"}]}"#,
            [true, true, false],
        ),
    ] {
        for whose in Whose::BOTH {
            let mut running = serve(whose, access);
            let let_in = [0, 1, 2].map(|at| asks(&running, &clients[at]));
            assert_eq!(let_in, expected, "{whose:?} {access}");
            assert_eq!(running.end(Some(Signal::TERM)).code, 0);
        }
    }
    // A list in a file is read again when it has changed; one that is no list changes nothing.
    let file = dir.text("list");
    std::fs::write(&file, "{}").expect("a file");
    let mut running = serve(Whose::Ours, &format!("authz-list-file,id=a,filename={file}"));
    assert!(!asks(&running, &clients[1]));
    std::fs::write(&file, r#"{"rules":[{"match":"CN=host-7,O=Example","policy":"allow"}]}"#).expect("a file");
    until("the file is read again", || asks(&running, &clients[1]));
    assert!(!asks(&running, &clients[2]));
    std::fs::write(&file, "{").expect("a file");
    assert!(asks(&running, &clients[1]), "nobody has taken it back");
    std::fs::write(dir.join("next"), r#"{"policy":"deny"}"#).expect("a file");
    std::fs::rename(dir.join("next"), &file).expect("it is there");
    until("the file is read again", || !asks(&running, &clients[1]));
    // Also while the certificates are being replaced, and after a moment in which a pipe was there.
    let key = dir.join("server/server-key.pem");
    std::fs::rename(&key, dir.join("key")).expect("it is there");
    std::fs::write(&file, r#"{"policy":"allow"}"#).expect("a file");
    until("the file is read again", || asks(&running, &clients[1]));
    std::fs::rename(dir.join("key"), &key).expect("it is there");
    std::fs::remove_file(&file).expect("it is there");
    assert!(std::process::Command::new("mkfifo").arg(&file).status().expect("mkfifo").success());
    // The server has looked at it when it says so; its log is read until the test ends, so that it can be written.
    let log = running.child.as_mut().and_then(|child| child.stderr.take()).expect("it is piped");
    let mut log = BufReader::new(log).lines().map_while(std::result::Result::ok);
    let is_refusal =
        |line: String| line.contains("the access list was not reloaded") && line.contains("no plain file");
    assert!(log.any(is_refusal), "it says what is there");
    std::fs::write(dir.join("next"), r#"{"policy":"deny"}"#).expect("a file");
    std::fs::rename(dir.join("next"), &file).expect("it is there");
    until("the file is read again", || !asks(&running, &clients[1]));
}

#[test]
fn what_would_let_everybody_in_is_refused() {
    let dir = Dir::short();
    let authority = Authority::new("ours");
    let pki = authority.certify(&dir.join("server"), "server", named(&[], &["localhost"]));
    std::fs::write(dir.join("d.raw"), [7; 4096]).expect("a disk");
    let socket = dir.text("s");
    let (creds, list) = (format!("tls-creds-x509,id=t,endpoint=server,dir={pki}"), dir.text("list"));
    std::fs::write(&list, r#"{"polizy":"deny"}"#).expect("a file");
    for (words, said) in [
        (vec!["--tls-creds", "t", "--tls-authz", "a"], "there is no --object"),
        (vec!["--tls-authz", "a"], "--tls-authz is not permitted without --tls-creds"),
        (
            vec![
                "--object",
                "authz-list-file,id=a,filename=/nonexistent",
                "--tls-creds",
                "t",
                "--tls-authz",
                "a",
            ],
            "/nonexistent",
        ),
        (
            vec![
                "--object",
                &format!("authz-list-file,id=a,filename={list}"),
                "--tls-creds",
                "t",
                "--tls-authz",
                "a",
            ],
            "polizy",
        ),
    ]
    .map(|(words, said)| (words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>(), said))
    {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let ran = Whose::Ours
            .run(&dir, &[&["-k", &socket, "--object", &creds][..], &words, &["-f", "raw", "d.raw"]].concat());
        assert!(
            ran.code == 1 && ran.err.contains(said) && ran.err.lines().count() == 1,
            "{words:?}: {ran:?}"
        );
    }
    let lax = format!("{creds},verify-peer=off");
    let words =
        ["-k", &socket, "--object", &lax, "--object", "authz-simple,id=a,identity=x", "--tls-creds", "t"];
    let ran = Whose::Ours.run(&dir, &[&words[..], &["--tls-authz", "a", "-f", "raw", "d.raw"]].concat());
    assert!(ran.code == 1 && ran.err.contains("needs verify-peer=on"), "{ran:?}");
    let ran = vellum(&[
        "serve",
        "-f",
        "raw",
        &dir.text("d.raw"),
        "--nbd",
        &format!("unix:{socket}"),
        "--tls-certificates",
        &pki,
        "--tls-allow",
        "CN=a",
    ]);
    assert!(ran.code == 1 && ran.err.contains("--tls-verify-peer"), "{ran:?}");
}
