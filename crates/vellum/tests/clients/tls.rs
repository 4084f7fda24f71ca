//! TLS through the command line: QEMU's and libnbd's clients (GnuTLS), and one of our own for requests that
//! they do not make.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, CertifiedIssuer, DnType,
    ExtendedKeyUsagePurpose, IsCa, KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams, date_time_ymd,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

use super::support::dir::Dir;
use super::support::program::{path_text, run, succeed};
use super::support::server::Server;
use super::support::{first_difference, noise, until};
use super::{Image, Kind, MIB};
use crate::requires;

/// An authority, and what it has signed, in the files that GnuTLS's users are used to.
pub(super) fn certify(dir: &Path) {
    std::fs::create_dir_all(dir).expect("a directory");
    let params = |name: &str| {
        let mut params = CertificateParams::new(vec!["localhost".to_owned()]).expect("a name");
        params.distinguished_name.push(DnType::CommonName, name);
        params
    };
    let mut authority = params("authority");
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    authority.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let authority =
        CertifiedIssuer::self_signed(authority, KeyPair::generate().expect("a key")).expect("a CA");
    std::fs::write(dir.join("ca-cert.pem"), authority.pem()).expect("a file");
    let purposes =
        [("server", ExtendedKeyUsagePurpose::ServerAuth), ("client", ExtendedKeyUsagePurpose::ClientAuth)];
    for (serial, (name, purpose)) in (1_u64..).zip(purposes) {
        let key = KeyPair::generate().expect("a key");
        let mut params = params(name);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
        params.extended_key_usages = vec![purpose];
        params.serial_number = Some(serial.into());
        let certificate = params.signed_by(&key, &authority).expect("a certificate");
        std::fs::write(dir.join(format!("{name}-cert.pem")), certificate.pem()).expect("a file");
        std::fs::write(dir.join(format!("{name}-key.pem")), key.serialize_pem()).expect("a file");
    }
    // No certificate here has the serial number 3.
    for (serial, name) in [(2_u64, "client-revoked.pem"), (3, "other-revoked.pem")] {
        let list = CertificateRevocationListParams {
            this_update: date_time_ymd(2026, 1, 1),
            next_update: date_time_ymd(2126, 1, 1),
            crl_number: 1_u64.into(),
            issuing_distribution_point: None,
            revoked_certs: vec![RevokedCertParams {
                serial_number: serial.into(),
                revocation_time: date_time_ymd(2026, 1, 1),
                reason_code: None,
                invalidity_date: None,
            }],
            key_identifier_method: KeyIdMethod::Sha256,
        };
        let list = list.signed_by(&authority).expect("a list");
        std::fs::write(dir.join(name), list.pem().expect("a list")).expect("a file");
    }
}

/// A client's directory, with a certificate of its own or without.
pub(super) fn client_files(from: &Path, to: &Path, has_certificate: bool) -> String {
    std::fs::create_dir_all(to).expect("a directory");
    let names = ["ca-cert.pem", "client-cert.pem", "client-key.pem"];
    for name in &names[..if has_certificate { 3 } else { 1 }] {
        std::fs::copy(from.join(name), to.join(name)).expect("it is there");
    }
    path_text(to).to_owned()
}

fn uri(server: &Server, certificates: &str) -> String {
    let socket = server.socket();
    format!("nbds+unix://localhost/?socket={}&tls-certificates={certificates}", path_text(&socket))
}

fn qemu(server: &Server, certificates: &str) -> [String; 4] {
    let object = format!("tls-creds-x509,id=tls,endpoint=client,verify-peer=yes,dir={certificates}");
    let socket = server.socket();
    let socket = path_text(&socket);
    let options =
        format!("driver=nbd,server.type=unix,server.path={socket},tls-creds=tls,tls-hostname=localhost");
    ["--object".to_owned(), object, "--image-opts".to_owned(), options]
}

#[test]
fn other_clients_speak_tls_and_only_that() {
    requires!("qemu-img");
    requires!("nbdcopy");
    let dir = Dir::short();
    let (ours, other) = (dir.join("ours"), dir.join("other"));
    certify(&ours);
    certify(&other);
    let client = client_files(&ours, &dir.join("client"), false);
    let stranger = client_files(&other, &dir.join("stranger"), false);
    let old = noise(6 * MIB, 30);
    for way in [&[][..], &["--io", "threads", "--threads", "2"]] {
        let image = Image::new(&dir, "disk", Kind::Qcow2, &old);
        let server = image.serve(&[&["--tls-certificates", path_text(&ours)], way].concat());
        let info = run("nbdinfo", &[&uri(&server, &client)]);
        assert!(info.out.contains("protocol: newstyle-fixed with TLS, using structured packets"), "{info:?}");
        let out = dir.text("out");
        succeed("nbdcopy", &["--connections=4", "--requests=64", &uri(&server, &client), &out]);
        assert_eq!(first_difference(&std::fs::read(&out).expect("the copy"), &old), None);
        let new = noise(6 * MIB, 31);
        std::fs::write(&out, &new).expect("a file");
        succeed("nbdcopy", &["--flush", "--connections=4", &out, &uri(&server, &client)]);
        let [object, creds, _, options] = qemu(&server, &client);
        let io = |command: &str| {
            let ran = run("qemu-io", &[&object, &creds, "-c", command, "--image-opts", &options]);
            assert_eq!(ran.code, 0, "{command}: {ran:?}");
        };
        io("write -P 9 1M 3M");
        io("read -P 9 1M 3M");
        io("write -z -u 2M 1M");
        let back =
            succeed("qemu-img", &["convert", &object, &creds, "--image-opts", &options, "-O", "raw", &out]);
        assert_eq!(back, "");
        let mut expected = new;
        expected[MIB..4 * MIB].fill(9);
        expected[2 * MIB..3 * MIB].fill(0);
        assert_eq!(first_difference(&std::fs::read(&out).expect("the copy"), &expected), None);
        // Without TLS. A client that trusts another authority refuses our certificate (libnbd does not check
        // it on a Unix socket).
        let refused = run("nbdinfo", &["--size", &server.uri("")]);
        assert_ne!(refused.code, 0, "{refused:?}");
        let refused = run("qemu-img", &[&["info".to_owned()], &qemu(&server, &stranger)[..]].concat());
        assert_ne!(refused.code, 0, "{refused:?}");
        let refused = run("qemu-img", &["info", &server.uri("")]);
        assert!(refused.code != 0 && refused.err.contains("TLS"), "{refused:?}");
        server.stop();
        assert_eq!(first_difference(&image.bytes(), &expected), None);
        image.check();
    }
}

#[test]
fn clients_without_a_certificate_are_kept_out_where_one_is_wanted() {
    requires!("qemu-img");
    requires!("nbdinfo");
    let dir = Dir::short();
    let (ours, other) = (dir.join("ours"), dir.join("other"));
    certify(&ours);
    certify(&other);
    let known = client_files(&ours, &dir.join("known"), true);
    let unnamed = client_files(&ours, &dir.join("unnamed"), false);
    // It trusts us, but we do not trust it.
    let stranger = client_files(&other, &dir.join("stranger"), true);
    std::fs::copy(ours.join("ca-cert.pem"), dir.join("stranger").join("ca-cert.pem")).expect("it is there");
    let image = Image::new(&dir, "disk", Kind::Qcow2, &noise(MIB, 32));
    let server = image.serve(&["--tls-certificates", path_text(&ours), "--tls-verify-peer"]);
    for (certificates, is_let_in) in [(&known, true), (&unnamed, false), (&stranger, false), (&known, true)] {
        let asked = run("nbdinfo", &["--size", &uri(&server, certificates)]);
        assert_eq!(asked.code == 0, is_let_in, "{certificates}: {asked:?}");
        let options = qemu(&server, certificates);
        let asked = run("qemu-img", &[&["info".to_owned()], &options[..]].concat());
        assert_eq!(asked.code == 0, is_let_in, "{certificates}: {asked:?}");
    }
    server.stop();
    // A list of revoked certificates counts only if it is there.
    let arguments = [image.text(), "--tls-certificates", path_text(&ours), "--tls-verify-peer"];
    for (list, is_let_in) in [("other-revoked.pem", true), ("client-revoked.pem", false)] {
        std::fs::copy(ours.join(list), ours.join("ca-crl.pem")).expect("it is there");
        let server = image.serve(&arguments[1..]);
        let asked = run("nbdinfo", &["--size", &uri(&server, &known)]);
        assert_eq!(asked.code == 0, is_let_in, "{list}: {asked:?}");
        server.stop();
    }
    std::fs::write(ours.join("ca-crl.pem"), "no list").expect("a file");
    let ran = Server::try_start(&arguments).err().expect("it does not start");
    assert!(ran.code == 1 && ran.err.contains("ca-crl.pem"), "{ran:?}");
}

/// A signal has the server read its certificates again, while it serves.
#[test]
fn certificates_are_read_again_on_sighup() {
    requires!("nbdinfo");
    let dir = Dir::short();
    let ours = dir.join("ours");
    certify(&ours);
    let known = client_files(&ours, &dir.join("known"), true);
    let image = Image::new(&dir, "disk", Kind::Qcow2, &noise(MIB, 34));
    let server = image.serve(&["--tls-certificates", path_text(&ours), "--tls-verify-peer"]);
    let is_let_in = || run("nbdinfo", &["--size", &uri(&server, &known)]).code == 0;
    let hang_up = |said: &str, times: usize| {
        server.signal(rustix::process::Signal::HUP);
        until(&format!("it says {said:?}"), || server.said().matches(said).count() >= times);
    };
    assert!(is_let_in());
    std::fs::copy(ours.join("client-revoked.pem"), ours.join("ca-crl.pem")).expect("it is there");
    assert!(is_let_in(), "nobody has said so yet");
    hang_up("were reloaded", 1);
    assert!(!is_let_in(), "it is on the list now");
    std::fs::write(ours.join("ca-crl.pem"), "no list").expect("a file");
    hang_up("were not reloaded", 1);
    assert!(!is_let_in(), "what was read before is in use");
    std::fs::remove_file(ours.join("ca-crl.pem")).expect("it is there");
    hang_up("were reloaded", 2);
    assert!(is_let_in());
    server.stop();
}

#[test]
fn options_for_tls_that_do_not_fit_are_refused() {
    let dir = Dir::short();
    let image = Image::new(&dir, "disk", Kind::Qcow2, &noise(MIB, 33));
    certify(&dir.join("ours"));
    let (ours, nothing) = (dir.text("ours"), dir.text("nothing"));
    let cases: [(&[&str], &str); 4] = [
        (&["--tls-verify-peer"], "--tls-certificates"),
        (&["--tls", "on"], "--tls-certificates"),
        (&["--tls-certificates", &nothing], "server-cert.pem"),
        (&["--tls-certificates", &ours, "--tls", "on", "--tls-verify-peer"], "has no effect with --tls on"),
    ];
    for (arguments, expected) in cases {
        let all = [&[image.text()], arguments].concat();
        let ran = Server::try_start(&all).err().expect("it does not start");
        assert!(ran.code == 1 && ran.err.contains(expected), "{arguments:?}: {ran:?}");
    }
}

/// A client of our own: what it sends and receives.
struct Talk<S>(S);

impl<S: Read + Write> Talk<S> {
    /// The kinds of all replies to an option.
    fn ask(&mut self, option: u32, data: &[u8]) -> Vec<u32> {
        let len = u32::try_from(data.len()).expect("short").to_be_bytes();
        let bytes = [&b"IHAVEOPT"[..], &option.to_be_bytes(), &len, data].concat();
        self.0.write_all(&bytes).expect("the server listens");
        let mut kinds = Vec::new();
        loop {
            let mut head = [0; 20];
            self.0.read_exact(&mut head).expect("the server answers");
            let number = |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().expect("four bytes"));
            assert_eq!(number(8), option);
            let mut data = vec![0; number(16) as usize];
            self.0.read_exact(&mut data).expect("the server answers");
            kinds.push(number(12));
            if number(12) == 1 || number(12) >> 31 == 1 {
                return kinds;
            }
        }
    }
}

const INVALID: u32 = (1 << 31) | 3;
const CONTEXT: &[u8] = b"\0\0\0\0\0\0\0\x01\0\0\0\x0fbase:allocation";

#[test]
fn what_was_negotiated_before_tls_is_forgotten_and_it_begins_once() {
    let dir = Dir::short();
    let ours = dir.join("ours");
    certify(&ours);
    let image = Image::new(&dir, "disk", Kind::Qcow2, &noise(MIB, 34));
    let server = image.serve(&["--tls-certificates", path_text(&ours), "--tls", "on"]);
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(ours.join("ca-cert.pem")).expect("it is there")).expect("a CA");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    for version in [&rustls::version::TLS12, &rustls::version::TLS13] {
        let config = ClientConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[version])
            .expect("both are known")
            .with_root_certificates(roots.clone())
            .with_no_client_auth();
        let mut stream = UnixStream::connect(server.socket()).expect("it serves");
        stream.set_read_timeout(Some(std::time::Duration::from_secs(60))).expect("a time");
        stream.read_exact(&mut [0; 18]).expect("a greeting");
        stream.write_all(&3_u32.to_be_bytes()).expect("the server listens");
        let mut clear = Talk(stream);
        assert_eq!(clear.ask(8, &[]), [1]);
        assert_eq!(clear.ask(10, CONTEXT), [4, 1]);
        assert_eq!(clear.ask(5, b"data"), [INVALID]);
        assert_eq!(clear.ask(5, &[]), [1]);
        let name = ServerName::try_from("localhost").expect("a name");
        let connection = ClientConnection::new(Arc::new(config), name).expect("a client");
        let mut sealed = Talk(StreamOwned::new(connection, clear.0));
        assert_eq!(sealed.ask(5, &[]), [INVALID], "a second time");
        assert_eq!(sealed.ask(5, b"data"), [INVALID]);
        assert_eq!(sealed.ask(10, CONTEXT), [INVALID], "structured replies come first, again");
        assert_eq!(sealed.ask(7, &[0; 6]), [3, 3, 1]);
        // Simple replies: nothing else was agreed on in here. Many requests at once, in many records.
        let read = |cookie: u64| {
            [&b"\x25\x60\x95\x13\0\0\0\0"[..], &cookie.to_be_bytes(), &[0; 8], &0x40000_u32.to_be_bytes()]
                .concat()
        };
        let requests: Vec<u8> = (0..40).flat_map(read).collect();
        sealed.0.write_all(&requests).expect("the server listens");
        let expected = &noise(MIB, 34)[..0x40000];
        for _ in 0..40 {
            let mut reply = vec![0; 16 + 0x40000];
            sealed.0.read_exact(&mut reply).expect("the server answers");
            assert_eq!(reply[..8], *b"\x67\x44\x66\x98\0\0\0\0");
            assert!(reply[16..] == *expected);
        }
        if version.version == rustls::ProtocolVersion::TLSv1_2 {
            // A client that leaves in the middle of a record.
            sealed.0.sock.write_all(b"\x17\x03\x03\x10\0half of it").expect("the server listens");
            continue;
        }
        // A client that says goodbye gets TLS's closing alert: an end without it is an error to the client.
        let goodbye = [&b"\x25\x60\x95\x13\0\0\0\x02"[..], &[0; 20]].concat();
        sealed.0.write_all(&goodbye).expect("the server listens");
        assert_eq!(sealed.0.read(&mut [0; 1]).expect("an end, and no cut"), 0);
    }
    server.stop();
}
