//! TLS: offered, required, and what a client may do wrong.

mod support;

use std::path::PathBuf;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use support::World;
use support::client::{Client, context_data, info_data, option_bytes};
use support::disks::{RuledDisk, shared};
use support::pipe::pipe;
use vellum_core::Random;
use vellum_export::nbd::wire::{option, option_reply as reply};
use vellum_export::nbd::{Ending, SessionLimits, Tls, TlsPolicy};

const SIZE: u64 = 1 << 20;

/// A directory with an authority and a server's certificate. Gone when it is dropped.
struct Certificates(PathBuf);

impl Certificates {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("vellum-tls-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a directory");
        let mut params = CertificateParams::new(Vec::<String>::new()).expect("no names");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority =
            CertifiedIssuer::self_signed(params, KeyPair::generate().expect("a key")).expect("a CA");
        let key = KeyPair::generate().expect("a key");
        let params = CertificateParams::new(vec!["localhost".to_owned()]).expect("a name");
        let certificate = params.signed_by(&key, &authority).expect("a certificate");
        let put = |name: &str, text: String| std::fs::write(path.join(name), text).expect("a file");
        put("ca-cert.pem", authority.pem());
        put("server-cert.pem", certificate.pem());
        put("server-key.pem", key.serialize_pem());
        Self(path)
    }

    fn tls(&self) -> Tls {
        Tls::from_directory(&self.0, false).expect("they are right")
    }
}

impl Drop for Certificates {
    fn drop(&mut self) {
        drop(std::fs::remove_dir_all(&self.0));
    }
}

fn world(policy: TlsPolicy) -> World {
    let mut world = World::new(shared(&RuledDisk::new(SIZE)));
    world.tls = policy;
    world
}

/// The head of a TLS record with a handshake message.
const RECORD: &[u8] = b"\x16\x03\x01";

#[test]
fn before_tls_nothing_else_is_answered_where_it_is_required() {
    let certificates = Certificates::new("required");
    let world = world(TlsPolicy::Required(certificates.tls()));
    world.run(async {
        let (mut client, _session) = world.connect();
        client.greet().await;
        let options: [(u32, Vec<u8>); 10] = [
            (option::LIST, vec![]),
            (option::STRUCTURED_REPLY, vec![]),
            (option::EXTENDED_HEADERS, vec![]),
            (option::INFO, info_data("", &[3])),
            (option::GO, info_data("", &[])),
            (option::GO, info_data("nobody", &[])),
            (option::SET_META_CONTEXT, context_data("", &["base:allocation"])),
            (option::LIST_META_CONTEXT, context_data("nobody", &[])),
            (99, b"what?".to_vec()),
            (option::LIST, vec![7; 100_000]),
        ];
        for (option, data) in options {
            let (replies, last) = client.ask_option(option, &data).await;
            assert_eq!((replies.len(), last), (0, reply::ERR_TLS_REQD), "option {option}");
        }
        let (_, last) = client.ask_option(option::STARTTLS, b"x").await;
        assert_eq!(last, reply::ERR_INVALID);
        let (_, last) = client.ask_option(option::STARTTLS, &[]).await;
        assert_eq!(last, reply::ACK, "and it still may");
        let (mut client, session) = world.connect();
        client.greet().await;
        client.option(option::EXPORT_NAME, b"").await;
        assert!(client.is_over().await, "there is no way to say no");
        assert!(matches!(session.await, Ending::Refused(_)));
        let (mut client, session) = world.connect();
        client.greet().await;
        assert_eq!(client.ask_option(option::ABORT, &[]).await.1, reply::ACK);
        assert!(matches!(session.await, Ending::Goodbye));
    });
}

#[test]
fn where_it_is_offered_one_may_do_without() {
    let certificates = Certificates::new("offered");
    let world = world(TlsPolicy::Offered(certificates.tls()));
    world.run(async {
        let (mut client, _session) = world.connect();
        client.greet().await;
        assert_eq!(client.inform(option::GO, "", &[]).await.map(|told| told.size), Ok(SIZE));
        assert_eq!(client.read(0, 512).await, [0; 512]);
    });
}

/// CVE-2021-3716: bytes that an attacker in between has put behind the option must not be taken for the
/// client's.
#[test]
fn cve_2021_3716_what_came_in_the_clear_does_not_count() {
    let certificates = Certificates::new("injection");
    let injected: [Vec<u8>; 4] = [
        option_bytes(option::STRUCTURED_REPLY, &[]),
        option_bytes(option::GO, &info_data("", &[])),
        RECORD.to_vec(),
        vec![0],
    ];
    for policy in [TlsPolicy::Offered(certificates.tls()), TlsPolicy::Required(certificates.tls())] {
        for bytes in &injected {
            for is_together in [true, false] {
                let world = world(policy.clone());
                world.run(async {
                    let (mut client, session) = world.connect();
                    client.greet().await;
                    let starttls = option_bytes(option::STARTTLS, &[]);
                    if is_together {
                        client.send(&[&starttls, &bytes[..]].concat()).await;
                        assert!(client.is_over().await, "not even acknowledged");
                        assert!(matches!(session.await, Ending::Violation(_)));
                    } else {
                        client.send(&starttls).await;
                        assert_eq!(client.option_replies(option::STARTTLS).await.1, reply::ACK);
                        client.send(bytes).await;
                        client.stream.end_writing();
                        let ending = session.await;
                        assert!(matches!(ending, Ending::Refused(_) | Ending::Hangup), "{ending:?}");
                    }
                });
                world.assert_nothing_is_left();
            }
        }
    }
}

#[test]
fn a_handshake_of_tls_has_the_same_deadline_and_the_same_bounds() {
    let certificates = Certificates::new("bounds");
    let mut world = world(TlsPolicy::Required(certificates.tls()));
    world.run(async {
        let (mut client, session) = world.connect();
        client.greet().await;
        assert_eq!(client.ask_option(option::STARTTLS, &[]).await.1, reply::ACK);
        client.send(&RECORD[..2]).await;
        world.settle().await;
        assert_eq!(world.running(), 1, "it waits for the rest");
        world.clock.ring();
        assert!(matches!(session.await, Ending::Refused(_)));
    });
    world.clock = support::HandClock::default();
    world.limits = SessionLimits { handshake_bytes_max: 64 << 10, ..SessionLimits::default() };
    world.run(async {
        let (mut client, session) = world.connect();
        client.greet().await;
        assert_eq!(client.ask_option(option::STARTTLS, &[]).await.1, reply::ACK);
        // A client's first message that says it has 16 MiB.
        let mut sent = 0;
        let record = [&b"\x16\x03\x01\x40\0"[..], &[1, 0xff, 0xff, 0xff], &[3; 0x4000 - 4]].concat();
        while client.try_send(&record).await.is_ok() {
            sent += record.len();
            assert!(sent < 2 << 20, "it ends");
            world.settle().await;
        }
        let ending = session.await;
        assert!(matches!(ending, Ending::Refused(_)), "{ending:?}");
    });
    world.assert_nothing_is_left();
}

#[test]
fn noise_for_tls_ends_the_session_and_nothing_else() {
    let certificates = Certificates::new("noise");
    for seed in 0..300 {
        let mut random = Random::from_seed(seed);
        let world = world(TlsPolicy::Offered(certificates.tls()));
        world.run(async {
            let (server, client) = pipe(1 << 20);
            server.cut_reads(random.fork());
            let session = world.serve(server);
            let mut client = Client::new(client);
            client.greet().await;
            assert_eq!(client.ask_option(option::STARTTLS, &[]).await.1, reply::ACK);
            let mut noise = vec![0; random.index(2000)];
            random.fill(&mut noise);
            let kind = *random.pick(&[20, 21, 22, 23, 24]);
            let len = u16::try_from(noise.len()).expect("short").to_be_bytes();
            drop(client.try_send(&[&[kind, 3, 3], &len[..], &noise].concat()).await);
            client.stream.end_writing();
            let ending = session.await;
            assert!(matches!(ending, Ending::Refused(_) | Ending::Hangup), "seed {seed}: {ending:?}");
        });
        world.assert_nothing_is_left();
    }
}

#[test]
fn certificates_that_cannot_be_used_are_told_by_file() {
    let certificates = Certificates::new("files");
    let told =
        |verifies| Tls::from_directory(&certificates.0, verifies).expect_err("it is wrong").to_string();
    let (ca, certificate, key) = ("ca-cert.pem", "server-cert.pem", "server-key.pem");
    let with = |name: &str, content: Option<&str>, verifies: bool| {
        let path = certificates.0.join(name);
        let good = std::fs::read(&path).expect("it is there");
        match content {
            Some(text) => std::fs::write(&path, text).expect("a file"),
            None => std::fs::remove_file(&path).expect("it is there"),
        }
        let told = told(verifies);
        std::fs::write(&path, good).expect("a file");
        told
    };
    for (name, verifies) in [(ca, true), (certificate, false), (key, false)] {
        for content in [None, Some(""), Some("no PEM"), Some("-----BEGIN CERTIFICATE-----\nAAAA\n")] {
            let told = with(name, content, verifies);
            assert!(told.contains(name), "{content:?}: {told}");
        }
    }
    let other = KeyPair::generate().expect("a key").serialize_pem();
    let told = with(key, Some(&other), false);
    assert!(told.contains("the certificate and the key"), "{told}");
}
