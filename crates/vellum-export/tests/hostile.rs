//! Abuse. Each test is named for an attack that NBD servers have fallen to, with the CVE. The server must not
//! panic, hang or grow, and no connection may harm another.

mod support;

use std::sync::atomic::Ordering;

use support::World;
use support::client::{Client, Wish, context_data, info_data, option_bytes};
use support::disks::{RuledDisk, shared};
use support::pipe::pipe;
use vellum_core::{MemoryDisk, Place, Random};
use vellum_export::nbd::wire::{RequestHeader, command, command_flag, option, option_reply as reply};
use vellum_export::nbd::{Ending, SessionLimits};
use vellum_export::{ConnectionSlots, Shutdown};

const SIZE: u64 = 1 << 20;

fn world() -> World {
    World::new(MemoryDisk::new(SIZE))
}

/// A second client that must not notice what the first one does.
async fn is_well(world: &World) {
    let (mut client, _session) = world.connect();
    client.begin(Wish::default()).await;
    assert_eq!(client.write(0, 512, b"well").await.error, 0);
    assert_eq!(client.read(512, 4).await, b"well");
    client.send(&header(command::DISC, 0, 0).encode()).await;
    assert!(client.is_over().await);
}

fn header(command: u16, offset: u64, len: u64) -> RequestHeader {
    RequestHeader { flags: 0, command, cookie: 7, offset, len }
}

/// CVE-2005-3534, CVE-2011-0530: a request longer than the server's buffer overran it.
#[test]
fn cve_2005_3534_and_2011_0530_a_request_longer_than_any_buffer() {
    for structured in [true, false] {
        for len in [(32 << 20) + 1, 0x7fff_ffff, 0x8000_0000, 0xffff_ffff] {
            let world = world();
            world.run(async {
                let (mut client, session) = world.connect();
                client.begin(Wish { structured, contexts: &[], ..Wish::default() }).await;
                let answer = client.ask(command::READ, 0, 0, len).await;
                assert_eq!((answer.error, answer.data.len()), (22, 0), "past the end, and nothing is sent");
                // The payload is never waited for: an answer, and the end.
                client.request(header(command::WRITE, 0, len), b"").await;
                assert_eq!(client.answer_to(7).await.error, 22);
                assert!(client.is_over().await);
                assert!(matches!(session.await, Ending::Violation(_)));
                is_well(&world).await;
            });
            world.assert_nothing_is_left();
        }
    }
}

/// As above, with 64-bit lengths.
#[test]
fn extended_payloads_longer_than_any_buffer() {
    let flag = command_flag::PAYLOAD_LEN;
    let cases = [
        (command::WRITE, flag, (32 << 20) + 1, 22),
        (command::WRITE, flag, u64::MAX, 22),
        (command::WRITE, 0, u64::MAX, 22),
        (command::BLOCK_STATUS, flag, 1 << 40, 22),
        (command::TRIM, flag, u64::MAX, 22),
        (77, flag, 1 << 63, 22),
    ];
    for (command, flags, len, errno) in cases {
        let world = world();
        world.run(async {
            let (mut client, session) = world.connect();
            client.begin(Wish { extended: true, ..Wish::default() }).await;
            client.request(RequestHeader { flags, command, cookie: 7, offset: 0, len }, b"").await;
            assert_eq!(client.answer_to(7).await.error, errno, "command {command}, {len} bytes");
            assert!(client.is_over().await);
            assert!(matches!(session.await, Ending::Violation(_)));
            is_well(&world).await;
        });
        world.assert_nothing_is_left();
    }
}

/// A payload where none belongs is taken off the wire, and the next request is found behind it.
#[test]
fn extended_payloads_of_commands_without_one_are_thrown_away() {
    let world = world();
    world.run(async {
        let (mut client, _session) = world.connect();
        client.begin(Wish { extended: true, ..Wish::default() }).await;
        for command in [0, 3, 4, 5, 6, 7, 8, 77, u16::MAX] {
            for len in [1, 512, 100_000] {
                let header = RequestHeader { flags: 0, command, cookie: 7, offset: 0, len };
                let payload = vec![0x25; usize::try_from(len).expect("small")];
                client.request(header, &payload).await;
                assert_eq!(client.answer_to(7).await.error, 22, "command {command}");
            }
        }
        assert_eq!(client.write(0, 0, b"fine").await.error, 0);
        assert_eq!(client.read(0, 4).await, b"fine");
    });
}

/// Requests of the other kind than was negotiated.
#[test]
fn compact_and_extended_requests_are_not_mixed() {
    for extended in [true, false] {
        let world = world();
        world.run(async {
            let (mut client, session) = world.connect();
            client.begin(Wish { extended, ..Wish::default() }).await;
            let wrong = header(command::READ, 0, 512);
            let bytes = if extended { wrong.encode().to_vec() } else { wrong.encode_extended().to_vec() };
            client.send(&[&bytes[..], &[0; 32]].concat()).await;
            assert!(client.is_over().await);
            assert!(matches!(session.await, Ending::Violation(_)));
            is_well(&world).await;
        });
        world.assert_nothing_is_left();
    }
}

/// CVE-2013-6410: access was granted by comparing a prefix.
#[test]
fn cve_2013_6410_names_are_compared_whole() {
    let world = world();
    world.offer("vm1", false);
    world.run(async {
        let (mut client, _session) = world.connect();
        client.greet().await;
        for name in ["vm", "vm10", "VM1", "vm1/", " vm1", "v"] {
            assert_eq!(client.inform(option::GO, name, &[]).await, Err(reply::ERR_UNKNOWN), "{name}");
        }
        assert!(client.inform(option::GO, "vm1", &[]).await.is_ok());
    });
}

/// CVE-2013-7441: an unknown export, or a client that left during negotiation, ended the whole server.
#[test]
fn cve_2013_7441_leaving_during_negotiation_ends_one_session() {
    let world = world();
    world.run(async {
        let (mut client, session) = world.connect();
        client.greet().await;
        client.option(option::EXPORT_NAME, b"nobody").await;
        assert!(client.is_over().await);
        assert!(matches!(session.await, Ending::Refused(_)));
        is_well(&world).await;
    });
    world.assert_nothing_is_left();
}

/// CVE-2015-0847: ending the server from a signal handler corrupted it. Here a shutdown may be requested at
/// any time, from any thread, and more than once.
#[test]
fn cve_2015_0847_shutting_down_again_and_again_from_other_threads() {
    let disk = RuledDisk::new(SIZE);
    let world = World::new(shared(&disk));
    world.run(async {
        let (mut client, session) = world.connect();
        client.begin(Wish::default()).await;
        disk.close_gate();
        client.request(header(command::READ, 0, 512), b"").await;
        world.settle().await;
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let shutdown = world.shutdown.clone();
                std::thread::spawn(move || (0..100).for_each(|_| shutdown.drain()))
            })
            .collect();
        world.settle().await;
        for thread in threads {
            thread.join().expect("asking is harmless");
        }
        disk.open_gate();
        assert_eq!(client.answer().await.expect("it was under way").data, [0; 512]);
        assert!(client.is_over().await);
        assert!(matches!(session.await, Ending::Drained));
    });
    world.assert_nothing_is_left();
}

/// CVE-2017-7539, CVE-2017-9524: a client that disconnected early hit an assertion. Here it leaves after
/// every byte.
#[test]
fn cve_2017_7539_and_2017_9524_leaving_after_every_byte_of_the_handshake() {
    let talk = [
        3_u32.to_be_bytes().to_vec(),
        option_bytes(option::STRUCTURED_REPLY, &[]),
        option_bytes(option::SET_META_CONTEXT, &context_data("", &["base:allocation"])),
        option_bytes(option::LIST, &[]),
        option_bytes(option::INFO, &info_data("", &[0, 1, 2, 3])),
        option_bytes(option::GO, &info_data("", &[3])),
        header(command::READ, 0, 512).encode().to_vec(),
    ]
    .concat();
    let world = world();
    for len in 0..talk.len() {
        // Once reading nothing and vanishing, once closing only its own direction and reading on.
        for vanishes in [true, false] {
            world.run(async {
                let (client, session) = world.connect();
                client.send(&talk[..len]).await;
                if vanishes {
                    drop(client);
                    session.await;
                } else {
                    client.stream.end_writing();
                    session.await;
                    drop(client);
                }
            });
        }
    }
    world.run(is_well(&world));
    world.assert_nothing_is_left();
}

/// CVE-2017-15118: a name longer than 256 bytes smashed the stack.
#[test]
fn cve_2017_15118_names_of_every_critical_length() {
    let world = world();
    world.run(async {
        for len in [255, 256, 257, 511, 512, 1024, 4095, 4096, 4097, 5000, 65_000] {
            let name = "n".repeat(len);
            let expected = if len <= 4096 { reply::ERR_UNKNOWN } else { reply::ERR_INVALID };
            let (mut client, session) = world.connect();
            client.greet().await;
            for option in [option::INFO, option::GO] {
                assert_eq!(client.inform(option, &name, &[]).await, Err(expected), "{len}");
            }
            client.option(option::EXPORT_NAME, name.as_bytes()).await;
            assert!(client.is_over().await);
            assert!(matches!(session.await, Ending::Refused(_)));
        }
        let longest = "n".repeat(4096);
        world.offer(&longest, false);
        let (mut client, _session) = world.connect();
        client.begin(Wish { name: &longest, ..Wish::default() }).await;
        assert_eq!(client.read(0, 512).await, [0; 512]);
    });
}

/// CVE-2017-15119: options with much data kept the server busy and filled its memory.
#[test]
fn cve_2017_15119_floods_of_options_end() {
    let limits = SessionLimits { options_max: 100, ..SessionLimits::default() };
    let world = World::with(MemoryDisk::new(SIZE), false, limits);
    world.run(async {
        let (mut client, session) = world.connect();
        client.greet().await;
        for _ in 0..100 {
            assert_eq!(client.ask_option(77, &[]).await.1, reply::ERR_UNSUP);
        }
        client.option(77, &[]).await;
        assert!(client.is_over().await, "the 101st option");
        assert!(matches!(session.await, Ending::Refused(_)));

        let (mut client, session) = world.connect();
        client.greet().await;
        for option in [77, option::GO, option::LIST, option::SET_META_CONTEXT] {
            let (_, last) = client.ask_option(option, &vec![0; (64 << 10) + 1]).await;
            assert_eq!(last, reply::ERR_TOO_BIG, "too long, but skipped");
        }
        for _ in 0..70 {
            if client.try_send(&option_bytes(77, &vec![0; 64 << 10])).await.is_err() {
                break;
            }
        }
        assert!(matches!(session.await, Ending::Refused(_)), "more than 4 MiB without choosing an export");
        is_well(&world).await;
    });
}

/// CVE-2019-14850: any connection made the server open its backend.
#[test]
fn cve_2019_14850_a_handshake_costs_the_disk_nothing() {
    let disk = RuledDisk::new(SIZE);
    let world = World::new(shared(&disk));
    world.run(async {
        let (mut client, _session) = world.connect();
        assert_eq!(disk.geometries.load(Ordering::Relaxed), 0, "connecting asks nothing");
        client.greet().await;
        client.structured().await;
        client.ask_option(option::LIST, &[]).await;
        client.ask_option(option::LIST_META_CONTEXT, &context_data("", &[])).await;
        client.contexts("", &["base:allocation"]).await;
        assert_eq!(disk.geometries.load(Ordering::Relaxed), 0, "listing asks nothing");
        client.inform(option::INFO, "", &[]).await.expect("the export is there");
        assert!(disk.geometries.load(Ordering::Relaxed) > 0);
        assert_eq!(disk.take_seen(), [], "and no request is made");
    });
}

/// CVE-2019-14851: options in an unusual order hit an assertion. Here every sequence of four.
#[test]
fn cve_2019_14851_options_in_every_order() {
    let options = [
        (option::LIST, vec![]),
        (option::STRUCTURED_REPLY, vec![]),
        (option::INFO, info_data("", &[3])),
        (option::INFO, info_data("nobody", &[])),
        (option::SET_META_CONTEXT, context_data("", &["base:allocation"])),
        (option::LIST_META_CONTEXT, context_data("other", &[])),
        (option::STARTTLS, vec![]),
        (option::GO, info_data("", &[])),
        (option::ABORT, vec![]),
    ];
    let world = world();
    world.offer("other", true);
    let n = options.len();
    for sequence in 0..n.pow(4) {
        let (mut client, session) = world.connect();
        world.run(async {
            client.greet().await;
            let mut has_begun = false;
            for step in 0..4 {
                let (option, data) = &options[sequence / n.pow(step) % n];
                let (_, last) = client.ask_option(*option, data).await;
                has_begun = *option == option::GO && last == reply::ACK;
                if has_begun || *option == option::ABORT {
                    break;
                }
            }
            if has_begun {
                client.send(&header(command::FLUSH, 0, 0).encode()).await;
                assert_eq!(client.receive(16).await[..8], *b"\x67\x44\x66\x98\0\0\0\0");
            }
            drop(client);
            session.await;
        });
    }
    world.assert_nothing_is_left();
}

/// CVE-2020-10761: an error message that repeated the client's name grew past the limit of strings. (`Client`
/// checks the length of every message it gets.)
#[test]
fn cve_2020_10761_no_error_is_longer_than_a_string() {
    let world = world();
    world.run(async {
        let (mut client, _session) = world.connect();
        client.greet().await;
        client.structured().await;
        let name = "%n".repeat(2048);
        for option in [option::INFO, option::GO] {
            client.option(option, &info_data(&name, &[])).await;
            let (kind, message) = client.option_reply(option).await;
            assert_eq!(kind, reply::ERR_UNKNOWN);
            assert!(!message.windows(2).any(|pair| pair == b"%n"), "nothing is repeated");
        }
        for option in [option::LIST_META_CONTEXT, option::SET_META_CONTEXT] {
            client.option(option, &context_data(&name, &[])).await;
            let (kind, message) = client.option_reply(option).await;
            assert_eq!((kind, message.len() < 100), (reply::ERR_UNKNOWN, true));
        }
    });
}

/// CVE-2021-3716: what was sent in the clear behind STARTTLS counted inside TLS. Here TLS is refused, and
/// what was negotiated before and what follows are what they were.
#[test]
fn cve_2021_3716_nothing_changes_when_tls_is_refused() {
    let world = world();
    world.run(async {
        let (mut client, _session) = world.connect();
        client.greet().await;
        let starttls = option_bytes(option::STARTTLS, &[]);
        let injected = option_bytes(option::STRUCTURED_REPLY, &[]);
        client.send(&[starttls, injected].concat()).await;
        assert_eq!(client.option_replies(option::STARTTLS).await.1, reply::ERR_UNSUP);
        assert_eq!(client.option_replies(option::STRUCTURED_REPLY).await.1, reply::ACK);
        let flags = client.inform(option::INFO, "", &[]).await.expect("the export is there").flags;
        assert_ne!(flags & 0x80, 0, "an option behind it is an option");
    });
}

/// CVE-2022-26495: a name of 0xffffffff bytes overflowed the heap. CVE-2022-26496: a name longer than its
/// option overflowed the stack.
#[test]
fn cve_2022_26495_and_26496_lengths_that_contradict_each_other() {
    let world = world();
    world.run(async {
        for name_len in [1_u32, 3, 0x7fff_ffff, 0xffff_fffa, 0xffff_ffff] {
            let mut info = info_data("", &[3]);
            info[..4].copy_from_slice(&name_len.to_be_bytes());
            let mut context = context_data("", &["base:allocation"]);
            context[..4].copy_from_slice(&name_len.to_be_bytes());
            let mut query = context_data("", &["base:allocation"]);
            query[8..12].copy_from_slice(&(name_len | 0x100).to_be_bytes());
            let (mut client, _session) = world.connect();
            client.greet().await;
            client.structured().await;
            for (option, data) in [
                (option::INFO, &info),
                (option::GO, &info),
                (option::SET_META_CONTEXT, &context),
                (option::LIST_META_CONTEXT, &query),
            ] {
                assert_eq!(client.ask_option(option, data).await.1, reply::ERR_INVALID, "{name_len:#x}");
            }
        }
        // An option that itself claims to be that long.
        for len in [0xffff_ffff_u32, 0x8000_0000, 0x7fff_ffff, (4 << 20) + 1] {
            for option in [option::EXPORT_NAME, option::GO, option::LIST, 99] {
                let (mut client, session) = world.connect();
                client.greet().await;
                client.send(&[&b"IHAVEOPT"[..], &option.to_be_bytes(), &len.to_be_bytes()].concat()).await;
                assert!(client.is_over().await, "it is not waited for");
                assert!(matches!(session.await, Ending::Violation(_)));
            }
        }
        is_well(&world).await;
    });
}

/// CVE-2024-7409: a server that stopped while a client was connecting used freed memory, and any number of
/// clients could hold handshakes open forever.
#[test]
fn cve_2024_7409_slow_handshakes_end_and_connections_are_counted() {
    let world = world();
    world.run(async {
        // Slow: nothing, half the flags, half an option, an answer that is not read.
        let slow: [&[u8]; 4] =
            [b"", b"\0\0", b"\0\0\0\x03IHAVEOPT\0\0\0\x07\0\0\0\x20abc", b"\0\0\0\x03IHAV"];
        let mut sessions = Vec::new();
        for bytes in slow {
            let (client, session) = world.connect();
            client.send(bytes).await;
            sessions.push((client, session));
        }
        let (client, session) = world.connect_over(10);
        sessions.push((client, session));
        world.settle().await;
        assert_eq!(world.running(), 5);
        world.clock.ring();
        for (_client, session) in sessions {
            assert!(matches!(session.await, Ending::Refused(_)));
        }
    });
    let world = self::world();
    world.run(async {
        // Stopping while clients are in the handshake, at every stage of it.
        let mut sessions = Vec::new();
        let talk = [&[0, 0, 0, 3], &option_bytes(option::INFO, &info_data("", &[]))[..]].concat();
        for len in 0..talk.len() {
            let (client, session) = world.connect();
            client.send(&talk[..len]).await;
            sessions.push((client, session));
        }
        world.settle().await;
        world.shutdown.drain();
        for (mut client, session) in sessions {
            assert!(matches!(session.await, Ending::Drained));
            client.receive(18).await;
            while client.try_receive(1).await.is_some() {}
        }
        // And a client that connects while it stops.
        let (client, session) = world.connect();
        assert!(matches!(session.await, Ending::Drained));
        drop(client);
    });
    world.assert_nothing_is_left();
    let slots = ConnectionSlots::new(2);
    let taken = (slots.try_take(), slots.try_take());
    assert!(slots.try_take().is_none());
    drop(taken);
    assert_eq!(slots.taken(), 0);
}

/// CVE-2025-47711: a block status extent that ended 2^32 bytes on was off by one. Extents here are far longer
/// than the length on the wire can say.
#[test]
fn cve_2025_47711_extents_longer_than_the_wire_can_tell() {
    let size = 1 << 50;
    let disk = RuledDisk::new(size);
    disk.say(0, size, Place::Zero { allocated: false });
    let world = World::new(shared(&disk));
    world.run(async {
        let (mut client, _session) = world.connect();
        client.begin(Wish::default()).await;
        for len in [1, 0x7fff_ffff, 0x8000_0000, 0xffff_fe00, 0xffff_ffff] {
            for offset in [0, 1, (1 << 32) - 1, size - len] {
                for flags in [0, 8] {
                    let answer = client.ask(command::BLOCK_STATUS, flags, offset, len).await;
                    assert_eq!(answer.error, 0);
                    assert_eq!(answer.status, [(1, vec![(len, 3)])]);
                }
            }
        }
        for (offset, len) in [(size - 1, 2), (u64::MAX, 1), (u64::MAX - 0xffff_fffe, 0xffff_ffff)] {
            assert_eq!(client.ask(command::BLOCK_STATUS, 0, offset, len).await.error, 22);
        }
    });
}

/// CVE-2025-47712: rounding a block status request to the block size overflowed. Extents here are unaligned
/// to the block the client was promised; runs must be aligned and must not pass the end.
#[test]
fn cve_2025_47712_runs_are_whole_blocks_whatever_the_extents() {
    let geometry = vellum_core::Geometry {
        size: 1 << 20,
        block_size: vellum_core::BlockSize::PAGE,
        ..RuledDisk::new(1 << 20).geometry.clone()
    };
    let mut random = Random::from_seed(4);
    for _ in 0..100 {
        let disk = RuledDisk::with(geometry.clone());
        let mut at = 0;
        while at < 1 << 20 {
            let len = (random.below(20_000) + 1).min((1 << 20) - at);
            disk.say(at, len, Place::Zero { allocated: random.one_in(2) });
            at += len;
        }
        let world = World::new(shared(&disk));
        world.run(async {
            let (mut client, _session) = world.connect();
            let told = client.begin(Wish { sizes: true, ..Wish::default() }).await;
            assert_eq!(told.blocks.map(|blocks| blocks[0]), Some(4096));
            let mut at = 0;
            while at < 1 << 20 {
                let answer = client.ask(command::BLOCK_STATUS, 0, at, (1 << 20) - at).await;
                for (len, _) in &answer.status[0].1 {
                    assert!(len.is_multiple_of(4096));
                    at += *len;
                }
            }
            assert_eq!(at, 1 << 20);
        });
    }
}

#[test]
fn a_request_without_its_magic_ends_the_session_and_answers_what_was_asked_before() {
    let world = world();
    world.run(async {
        let (mut client, session) = world.connect();
        client.begin(Wish::default()).await;
        let good = client.note(header(command::READ, 0, 512));
        let mut bad = header(command::READ, 0, 512).encode();
        bad[0] ^= 0x80;
        client.send(&[&good[..], &bad, &good].concat()).await;
        assert_eq!(client.answer().await.expect("it was right").data, [0; 512]);
        assert!(client.is_over().await);
        assert!(matches!(session.await, Ending::Violation(_)));
        is_well(&world).await;
    });
}

#[test]
fn one_cookie_for_all_requests_is_the_clients_own_trouble() {
    let world = world();
    world.run(async {
        let (mut client, _session) = world.connect();
        client.begin(Wish { structured: false, contexts: &[], ..Wish::default() }).await;
        for _ in 0..10 {
            client.send(&header(command::READ, 0, 4).encode()).await;
        }
        for _ in 0..10 {
            assert_eq!(client.receive(20).await[8..16], 7_u64.to_be_bytes());
        }
    });
}

#[test]
fn noise_never_harms_the_server() {
    let world = world();
    let mut random = Random::from_seed(99);
    for round in 0..300 {
        world.run(async {
            let (mut client, session) = world.connect();
            if round % 2 == 0 {
                client.begin(Wish { structured: round % 4 == 0, contexts: &[], ..Wish::default() }).await;
            }
            let mut noise = vec![0; random.index(2000) + 1];
            random.fill(&mut noise);
            if round % 3 == 0 {
                noise[..4].copy_from_slice(b"\x25\x60\x95\x13");
            }
            let _ = client.try_send(&noise).await;
            drop(client);
            session.await;
        });
    }
    world.run(is_well(&world));
    world.assert_nothing_is_left();
}

/// Each byte of a good conversation, changed in each bit.
#[test]
fn a_conversation_with_any_bit_wrong_ends_or_goes_on_but_nothing_else() {
    let talk = [
        3_u32.to_be_bytes().to_vec(),
        option_bytes(option::STRUCTURED_REPLY, &[]),
        option_bytes(option::SET_META_CONTEXT, &context_data("", &["base:allocation"])),
        option_bytes(option::GO, &info_data("", &[3])),
        header(command::READ, 0, 64).encode().to_vec(),
        header(command::WRITE, 64, 4).encode().to_vec(),
        b"data".to_vec(),
        header(command::BLOCK_STATUS, 0, 4096).encode().to_vec(),
        header(command::FLUSH, 0, 0).encode().to_vec(),
        header(command::DISC, 0, 0).encode().to_vec(),
    ]
    .concat();
    let limits = SessionLimits { memory_bytes_max: 32 << 20, ..SessionLimits::default() };
    let world = World::with(MemoryDisk::new(4096), false, limits);
    for bit in 0..talk.len() * 8 {
        let mut wrong = talk.clone();
        wrong[bit / 8] ^= 1 << (bit % 8);
        world.run(async {
            let (server, client) = pipe(1 << 20);
            let session = world.serve(server);
            let client = Client::new(client);
            client.send(&wrong).await;
            client.stream.end_writing();
            session.await;
        });
    }
    world.run(is_well(&world));
    world.assert_nothing_is_left();
}

#[test]
fn a_removed_export_is_gone_for_those_in_the_handshake() {
    let world = world();
    world.offer("short", false);
    world.run(async {
        let (mut client, _session) = world.connect();
        client.greet().await;
        assert!(client.inform(option::INFO, "short", &[]).await.is_ok());
        let removed = world.exports.remove("short").expect("it is there");
        assert_eq!(client.inform(option::GO, "short", &[]).await, Err(reply::ERR_UNKNOWN));
        let _disk = removed.unused().await;
        let never = Shutdown::new();
        assert!(!never.is_requested());
    });
}
