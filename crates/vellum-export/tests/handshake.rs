//! The handshake as a client sees it: every option, in valid and invalid order.

mod support;

use support::World;
use support::client::{Wish, context_data, info_data, option_bytes};
use support::disks::{RuledDisk, shared};
use vellum_core::{BlockSize, Geometry};
use vellum_export::nbd::wire::{self, info, option, option_reply as reply, transmission_flag as flag};
use vellum_export::nbd::{Ending, Export, SessionLimits};

const SIZE: u64 = 1 << 20;

fn world() -> World {
    World::new(shared(&RuledDisk::new(SIZE)))
}

#[test]
fn go_tells_everything_and_begins() {
    let world = world();
    let (mut client, session) = world.connect();
    world.run(async {
        client.greet().await;
        let facts = [info::EXPORT, info::NAME, info::DESCRIPTION, info::BLOCK_SIZE, 999];
        let told = client.inform(option::INFO, "", &facts).await.expect("the default export");
        assert_eq!(told.size, SIZE);
        assert_eq!(told.name.as_deref(), Some(""));
        assert_eq!(told.description.as_deref(), Some("the disk "));
        assert_eq!(told.blocks, Some([1, 4096, 32 << 20]));
        let again = client.inform(option::GO, "", &facts).await.expect("the default export");
        assert_eq!(again, told, "GO says what INFO said");
        assert_eq!(world.exports.sessions(""), Some(1));
        client.send(&[0x25, 0x60, 0x95, 0x13, 0, 0, 0, 2]).await;
        client.send(&[0; 20]).await;
        assert!(matches!(session.await, Ending::Goodbye));
        assert_eq!(world.exports.sessions(""), Some(0));
    });
    world.assert_nothing_is_left();
}

#[test]
fn only_what_was_asked_for_and_exists_is_told() {
    let world = world();
    let export = Export {
        name: "plain".to_owned(),
        description: String::new(),
        disk: world.disk.clone(),
        read_only: false,
        marks: None,
    };
    world.exports.add(export).expect("the name is free");
    let (mut client, _session) = world.connect();
    world.run(async {
        client.greet().await;
        let told = client.inform(option::INFO, "", &[]).await.expect("the default export");
        assert_eq!((told.name, told.description), (None, None), "nothing was asked");
        assert!(told.blocks.is_some(), "but sizes are told to all");
        let facts = [info::NAME, info::DESCRIPTION];
        let told = client.inform(option::INFO, "plain", &facts).await.expect("it is there");
        assert_eq!(
            (told.name.as_deref(), told.description),
            (Some("plain"), None),
            "there is no description"
        );
    });
}

#[test]
fn flags_follow_what_was_negotiated() {
    let always =
        flag::HAS_FLAGS | flag::SEND_FLUSH | flag::SEND_FUA | flag::SEND_CACHE | flag::CAN_MULTI_CONN;
    let writing = flag::SEND_TRIM | flag::SEND_WRITE_ZEROES | flag::SEND_FAST_ZERO;
    let world = world();
    world.offer("ro", true);
    let (mut client, _session) = world.connect();
    world.run(async {
        client.greet().await;
        let flags = client.inform(option::INFO, "", &[]).await.unwrap().flags;
        assert_eq!(flags, always | writing);
        let flags = client.inform(option::INFO, "ro", &[]).await.unwrap().flags;
        assert_eq!(flags, always | flag::READ_ONLY);
        client.structured().await;
        let flags = client.inform(option::INFO, "ro", &[]).await.unwrap().flags;
        assert_eq!(flags, always | flag::READ_ONLY | flag::SEND_DF);
    });
}

#[test]
fn sizes_bind_only_those_who_asked_for_them() {
    let geometry = Geometry {
        size: SIZE,
        block_size: BlockSize::PAGE,
        preferred_size: BlockSize::from_shift(16),
        read_only: false,
        fast_zeroes: true,
    };
    let world = World::new(shared(&RuledDisk::with(geometry)));
    let (mut strict, _session) = world.connect();
    let (mut loose, _session) = world.connect();
    world.run(async {
        let told = strict.begin(Wish { sizes: true, ..Wish::default() }).await;
        assert_eq!(told.blocks, Some([4096, 65536, 32 << 20]));
        assert_eq!(strict.ask(0, 0, 512, 512).await.error, 22);
        assert_eq!(strict.ask(0, 0, 4096, 4096).await.error, 0);
        let told = loose.begin(Wish::default()).await;
        assert_eq!(told.blocks, Some([1, 65536, 32 << 20]), "told, but with no smallest block");
        assert_eq!(loose.ask(0, 0, 511, 3).await.error, 0);
    });
}

#[test]
fn export_name_begins_without_a_word() {
    let world = world();
    world.offer("other", true);
    for (flags, zeros) in [(1_u32, 124), (3, 0)] {
        let (mut client, _session) = world.connect();
        world.run(async {
            client.greet_with(flags).await;
            client.option(option::EXPORT_NAME, b"other").await;
            let answer = client.receive(10 + zeros).await;
            assert_eq!(answer[..8], SIZE.to_be_bytes());
            assert_eq!(answer[8..10], 0b0101_0000_1111_u16.to_be_bytes());
            assert!(answer[10..].iter().all(|byte| *byte == 0));
            let answer = client.ask(0, 0, 0, 512).await;
            assert_eq!((answer.error, answer.data.len()), (0, 512));
        });
    }
    let (mut client, session) = world.connect();
    world.run(async {
        client.greet().await;
        client.option(option::EXPORT_NAME, b"nobody").await;
        assert!(client.is_over().await, "the only way to say no");
        assert!(matches!(session.await, Ending::Refused(_)));
    });
}

#[test]
fn exports_are_listed_in_order_with_descriptions() {
    let world = world();
    world.offer("b", false);
    world.offer("a", true);
    let (mut client, _session) = world.connect();
    world.run(async {
        client.greet().await;
        let (replies, last) = client.ask_option(option::LIST, &[]).await;
        assert_eq!(last, reply::ACK);
        let list: Vec<_> = replies.iter().map(|(kind, data)| (*kind, &data[..])).collect();
        let expected: [(u32, &[u8]); 3] = [
            (reply::SERVER, b"\0\0\0\0the disk "),
            (reply::SERVER, b"\0\0\0\x01athe disk a"),
            (reply::SERVER, b"\0\0\0\x01bthe disk b"),
        ];
        assert_eq!(list, expected);
        let (replies, last) = client.ask_option(option::LIST, &[0]).await;
        assert_eq!((replies.len(), last), (0, reply::ERR_INVALID));
    });
}

#[test]
fn a_list_that_is_too_long_says_so_and_stays_bounded() {
    let world = world();
    for index in 0..200 {
        world.offer(&format!("{index:04}{}", "n".repeat(4000)), false);
    }
    let (mut client, _session) = world.connect();
    world.run(async {
        client.greet().await;
        let (replies, last) = client.ask_option(option::LIST, &[]).await;
        assert_eq!(last, reply::ERR_TOO_BIG);
        let bytes: usize = replies.iter().map(|(_, data)| data.len()).sum();
        assert!(bytes <= 256 << 10 && !replies.is_empty());
        assert_eq!(client.inform(option::GO, "", &[]).await.map(|told| told.size), Ok(SIZE));
    });
}

#[test]
fn abort_is_acknowledged() {
    for data in [&b""[..], b"nobody reads this"] {
        let world = world();
        let (mut client, session) = world.connect();
        world.run(async {
            client.greet().await;
            assert_eq!(client.ask_option(option::ABORT, data).await.1, reply::ACK);
            assert!(client.is_over().await);
            assert!(matches!(session.await, Ending::Goodbye));
        });
    }
}

#[test]
fn what_the_server_does_not_know_is_refused_and_the_next_option_works() {
    let world = world();
    let (mut client, _session) = world.connect();
    world.run(async {
        client.greet().await;
        for option in [0, 4, option::STARTTLS, 12, 77, u32::MAX] {
            for data in [&b""[..], b"data"] {
                let (replies, last) = client.ask_option(option, data).await;
                assert_eq!((replies.len(), last), (0, reply::ERR_UNSUP), "option {option}");
            }
        }
        assert_eq!(client.inform(option::GO, "", &[]).await.map(|told| told.size), Ok(SIZE));
    });
}

#[test]
fn an_unknown_export_is_refused_and_another_may_be_chosen() {
    let world = world();
    let (mut client, _session) = world.connect();
    world.run(async {
        client.greet().await;
        client.structured().await;
        for option in [option::INFO, option::GO] {
            assert_eq!(client.inform(option, "nobody", &[]).await, Err(reply::ERR_UNKNOWN));
        }
        for option in [option::LIST_META_CONTEXT, option::SET_META_CONTEXT] {
            let data = context_data("nobody", &["base:allocation"]);
            assert_eq!(client.ask_option(option, &data).await.1, reply::ERR_UNKNOWN);
        }
        assert!(client.inform(option::GO, "", &[]).await.is_ok());
    });
}

#[test]
fn contexts_are_listed_by_name_and_namespace() {
    let world = world();
    let (mut client, _session) = world.connect();
    world.run(async {
        client.greet().await;
        let none = client.ask_option(option::LIST_META_CONTEXT, &context_data("", &[])).await;
        assert_eq!(none.1, reply::ERR_INVALID, "structured replies come first");
        client.structured().await;
        let allocation = b"\0\0\0\0base:allocation".to_vec();
        let depth = b"\0\0\0\0qemu:allocation-depth".to_vec();
        let cases: [(&[&str], &[&Vec<u8>]); 6] = [
            (&[], &[&allocation, &depth]),
            (&["base:"], &[&allocation]),
            (&["base:allocation", "base:", "base:allocation"], &[&allocation]),
            (&["qemu:", "base:allocation"], &[&allocation, &depth]),
            (&["qemu:dirty-bitmap:x", "x-other:", "", "nonsense"], &[]),
            (&["qemu:allocation-depth"], &[&depth]),
        ];
        for (queries, expected) in cases {
            let (replies, last) =
                client.ask_option(option::LIST_META_CONTEXT, &context_data("", queries)).await;
            assert_eq!(last, reply::ACK);
            let listed: Vec<_> = replies.iter().map(|(_, data)| data).collect();
            assert_eq!(listed, expected, "{queries:?}");
        }
    });
}

#[test]
fn the_contexts_of_the_last_set_count_and_only_for_their_export() {
    let world = world();
    world.offer("other", false);
    // What is set, one after the other; and whether block status then works on the default export.
    type Sets = &'static [(&'static str, &'static [&'static str])];
    let cases: [(Sets, bool); 7] = [
        (&[("", &["base:allocation"])], true),
        (&[("", &["base:allocation"]), ("", &[])], false),
        (&[("", &[]), ("", &["qemu:allocation-depth"])], true),
        (&[("other", &["base:allocation"])], false),
        (&[("", &["base:allocation"]), ("other", &["base:allocation"])], false),
        (&[("other", &["base:allocation"]), ("", &["base:allocation"])], true),
        (&[("", &["base:"])], false),
    ];
    for (sets, works) in cases {
        let (mut client, _session) = world.connect();
        world.run(async {
            client.greet().await;
            client.structured().await;
            for (name, contexts) in sets {
                let chosen = client.contexts(name, contexts).await;
                assert!(chosen.iter().all(|(_, context)| contexts.contains(&context.as_str())));
            }
            client.inform(option::GO, "", &[]).await.expect("the export is there");
            let answer = client.ask(7, 0, 0, 512).await;
            assert_eq!(answer.error, if works { 0 } else { 22 }, "{sets:?}");
        });
    }
    let (mut client, _session) = world.connect();
    world.run(async {
        client.greet().await;
        client.structured().await;
        client.contexts("", &["base:allocation"]).await;
        let (_, last) = client.ask_option(option::SET_META_CONTEXT, b"broken").await;
        assert_eq!(last, reply::ERR_INVALID);
        client.inform(option::GO, "", &[]).await.expect("the export is there");
        assert_eq!(client.ask(7, 0, 0, 512).await.error, 22, "a set that fails also replaces");
    });
}

#[test]
fn option_data_that_contradicts_itself_is_invalid() {
    let world = world();
    let (mut client, _session) = world.connect();
    world.run(async {
        client.greet().await;
        client.structured().await;
        let mut long = info_data("", &[]);
        long.push(0);
        for option in [option::INFO, option::GO] {
            for data in [&b""[..], b"\0", &[0; 5], b"\0\0\0\x01\0\0", &long, &[0xff; 30]] {
                assert_eq!(client.ask_option(option, data).await.1, reply::ERR_INVALID, "{data:?}");
            }
        }
        for option in [option::LIST_META_CONTEXT, option::SET_META_CONTEXT] {
            for data in [&b""[..], &[0; 7], &[0; 9], b"\0\0\0\0\0\0\0\x01", &[0xff; 40]] {
                assert_eq!(client.ask_option(option, data).await.1, reply::ERR_INVALID, "{data:?}");
            }
        }
        assert_eq!(client.ask_option(option::STRUCTURED_REPLY, b"x").await.1, reply::ERR_INVALID);
        assert_eq!(client.ask_option(option::EXTENDED_HEADERS, b"x").await.1, reply::ERR_INVALID);
        assert!(client.inform(option::GO, "", &[]).await.is_ok());
    });
}

/// Whether they come first or behind structured replies, and how often they are asked for.
#[test]
fn extended_headers_take_precedence_and_there_is_no_way_back() {
    for structured_first in [true, false] {
        let world = world();
        let (mut client, session) = world.connect();
        world.run(async {
            client.greet().await;
            if structured_first {
                client.structured().await;
                client.contexts("", &["base:allocation"]).await;
            }
            client.extended().await;
            client.extended().await;
            let (_, last) = client.ask_option(option::STRUCTURED_REPLY, &[]).await;
            assert_eq!(last, reply::ERR_EXT_HEADER_REQD);
            let (_, last) = client.ask_option(option::STRUCTURED_REPLY, b"x").await;
            assert_eq!(last, reply::ERR_INVALID);
            if !structured_first {
                client.contexts("", &["base:allocation"]).await;
            }
            let told = client.inform(option::GO, "", &[]).await.expect("the default export");
            assert_eq!(told.flags & flag::SEND_DF, flag::SEND_DF);
            assert_eq!(client.read(0, 512).await, [0; 512]);
            assert_eq!(client.ask(7, 0, 0, SIZE).await.status, [(1, vec![(SIZE, 3)])]);
            client
                .request(wire::RequestHeader { flags: 0, command: 2, cookie: 1, offset: 0, len: 0 }, &[])
                .await;
            assert!(matches!(session.await, Ending::Goodbye));
        });
        world.assert_nothing_is_left();
    }
    let world = world();
    let (mut client, session) = world.connect();
    world.run(async {
        client.greet().await;
        client.extended().await;
        client.option(option::EXPORT_NAME, b"").await;
        assert!(client.is_over().await, "the old option cannot be answered any more");
        assert!(matches!(session.await, Ending::Violation(_)));
    });
}

#[test]
fn a_client_that_cannot_be_told_errors_is_turned_away() {
    let cases = [(0_u32, false), (2, false), (4, true), (7, true), (0x8000_0001, true), (u32::MAX, true)];
    for (flags, is_violation) in cases {
        let world = world();
        let (mut client, session) = world.connect();
        world.run(async {
            client.greet_with(flags).await;
            assert!(client.is_over().await);
            match session.await {
                Ending::Refused(_) => assert!(!is_violation),
                Ending::Violation(_) => assert!(is_violation, "flags {flags:#x}"),
                other => panic!("{other:?}"),
            }
        });
    }
}

#[test]
fn an_option_without_its_magic_ends_the_session() {
    let world = world();
    let (mut client, session) = world.connect();
    world.run(async {
        client.greet().await;
        client.send(b"IHAVEOPX\0\0\0\x03\0\0\0\0").await;
        assert!(client.is_over().await);
        assert!(matches!(session.await, Ending::Violation(_)));
    });
}

#[test]
fn requests_may_follow_the_handshake_without_a_pause() {
    let world = world();
    let (mut client, _session) = world.connect();
    world.run(async {
        let request = b"\x25\x60\x95\x13\0\0\0\0\0\0\0\0\0\0\0\x07\0\0\0\0\0\0\0\0\0\0\0\x04";
        let go = option_bytes(option::GO, &info_data("", &[]));
        client.send(&[&[0, 0, 0, 3], &go[..], request, &request[..20]].concat()).await;
        assert_eq!(client.receive(18).await.len(), 18);
        assert_eq!(client.option_replies(option::GO).await.1, reply::ACK);
        assert_eq!(client.receive(20).await, b"\x67\x44\x66\x98\0\0\0\0\0\0\0\0\0\0\0\x07\0\0\0\0");
        client.send(&request[20..]).await;
        assert_eq!(client.receive(20).await[..4], *b"\x67\x44\x66\x98");
    });
}

#[test]
fn limits_that_cannot_work_are_noticed_at_once() {
    let limits = SessionLimits { requests_max: 0, ..SessionLimits::default() };
    assert!(limits.check().is_err());
}
