//! How sessions end: goodbyes, hang-ups at every byte, drains, cuts, removed exports, broken streams.
//! Whatever happens, every disk request that was begun is polled to its end.

mod support;

use support::World;
use support::client::{Wish, context_data, info_data, option_bytes};
use support::disks::{RuledDisk, shared};
use vellum_core::Random;
use vellum_export::nbd::Ending;
use vellum_export::nbd::wire::{RequestHeader, command, option};

const SIZE: u64 = 1 << 20;

fn header(command: u16, cookie: u64, offset: u64, len: u64) -> RequestHeader {
    RequestHeader { flags: 0, command, cookie, offset, len }
}

fn talk() -> Vec<u8> {
    [
        3_u32.to_be_bytes().to_vec(),
        option_bytes(option::STRUCTURED_REPLY, &[]),
        option_bytes(option::SET_META_CONTEXT, &context_data("", &["base:allocation"])),
        option_bytes(option::GO, &info_data("", &[3])),
        header(command::WRITE, 1, 0, 600).encode().to_vec(),
        vec![7; 600],
        header(command::READ, 2, 0, 1000).encode().to_vec(),
        header(command::WRITE_ZEROES, 3, 100, 100).encode().to_vec(),
        header(command::BLOCK_STATUS, 4, 0, 4096).encode().to_vec(),
        header(command::FLUSH, 5, 0, 0).encode().to_vec(),
        header(command::TRIM, 6, 0, 4096).encode().to_vec(),
        header(command::CACHE, 7, 0, 4096).encode().to_vec(),
        header(command::DISC, 8, 0, 0).encode().to_vec(),
    ]
    .concat()
}

/// The client vanishes after every byte of a conversation, while the disk takes its time.
#[test]
fn a_client_that_vanishes_at_any_byte_leaves_nothing_behind() {
    let talk = talk();
    for len in 0..=talk.len() {
        let disk = RuledDisk::new(SIZE);
        disk.answer_late(Random::from_seed(len as u64));
        let world = World::new(shared(&disk));
        world.run(async {
            let (client, session) = world.connect();
            client.send(&talk[..len]).await;
            for _ in 0..len % 7 {
                futures_lite::future::yield_now().await;
            }
            drop(client);
            session.await;
        });
        world.assert_nothing_is_left();
        assert_eq!(world.exports.sessions(""), Some(0));
    }
}

/// As above, with requests that have no chance to end before the client is gone.
#[test]
fn requests_under_way_end_after_their_client_has_gone() {
    let disk = RuledDisk::new(SIZE);
    let world = World::new(shared(&disk));
    world.run(async {
        disk.close_gate();
        let (client, session) = world.connect();
        client.send(&talk()[..talk().len() - 28]).await;
        world.settle().await;
        drop(client);
        world.settle().await;
        assert!(!session.is_finished(), "the disk is not done");
        assert_eq!(world.exports.sessions(""), Some(1), "and the export is in use");
        disk.open_gate();
        session.await;
    });
    world.assert_nothing_is_left();
}

/// Nothing but the cut of the bytes differs, so nothing but that may differ in the answers.
#[test]
fn input_in_any_pieces_gives_the_same_answers() {
    let talk = talk();
    let answers = |feed: &dyn Fn(&World) -> Vec<u8>| {
        let world = World::new(shared(&RuledDisk::new(SIZE)));
        let bytes = feed(&world);
        world.assert_nothing_is_left();
        bytes
    };
    let whole = answers(&|world| {
        world.run(async {
            let (mut client, session) = world.connect();
            client.send(&talk).await;
            session.await;
            let mut bytes = Vec::new();
            while let Some(byte) = client.try_receive(1).await {
                bytes.extend(byte);
            }
            bytes
        })
    });
    assert!(whole.len() > 1000);
    for cut in 0..=talk.len() {
        let cut_once = answers(&|world| {
            world.run(async {
                let (mut client, session) = world.connect();
                client.send(&talk[..cut]).await;
                world.settle().await;
                client.send(&talk[cut..]).await;
                session.await;
                let mut bytes = Vec::new();
                while let Some(byte) = client.try_receive(1).await {
                    bytes.extend(byte);
                }
                bytes
            })
        });
        assert!(cut_once == whole, "cut at {cut}");
    }
    for seed in 0..50 {
        let in_pieces = answers(&|world| {
            world.run(async {
                let (server, client) = support::pipe::pipe(1 << 20);
                server.cut_reads(Random::from_seed(seed));
                let session = world.serve(server);
                let mut client = support::client::Client::new(client);
                client.send(&talk).await;
                session.await;
                let mut bytes = Vec::new();
                while let Some(byte) = client.try_receive(1).await {
                    bytes.extend(byte);
                }
                bytes
            })
        });
        assert!(in_pieces == whole, "seed {seed}");
    }
}

/// The client reads this many bytes of the replies and no more, over a connection that buffers little.
#[test]
fn a_client_that_stops_listening_at_any_byte_leaves_nothing_behind() {
    let talk = talk();
    for len in 0..1600 {
        let disk = RuledDisk::new(SIZE);
        let world = World::new(shared(&disk));
        world.run(async {
            let (mut client, session) = world.connect_over(2000);
            client.send(&talk).await;
            client.try_receive(len).await;
            drop(client);
            session.await;
        });
        world.assert_nothing_is_left();
    }
}

#[test]
fn a_stream_that_fails_ends_its_session_and_no_other() {
    let disk = RuledDisk::new(SIZE);
    let world = World::new(shared(&disk));
    world.run(async {
        for (while_waiting, is_begun) in [(true, true), (false, true), (true, false)] {
            let (mut client, session) = world.connect();
            if is_begun {
                client.begin(Wish::default()).await;
            }
            disk.close_gate();
            if !while_waiting {
                client.request(header(command::WRITE, 1, 0, 4), b"data").await;
            }
            world.settle().await;
            client.stream.break_down();
            world.settle().await;
            assert_eq!(session.is_finished(), while_waiting, "the disk is waited for");
            disk.open_gate();
            assert!(matches!(session.await, Ending::Failed(_)));
        }
    });
    world.assert_nothing_is_left();
}

#[test]
fn a_drain_in_the_middle_of_a_payload_does_not_wait_for_the_rest() {
    for come in [0, 100, 300_000] {
        let disk = RuledDisk::new(SIZE);
        let world = World::new(shared(&disk));
        world.run(async {
            let (mut client, session) = world.connect();
            client.begin(Wish::default()).await;
            let bytes = header(command::WRITE, 1, 0, 400_000).encode();
            client.send(&[&bytes[..], &vec![1; come]].concat()).await;
            world.settle().await;
            world.shutdown.drain();
            assert!(matches!(session.await, Ending::Drained));
        });
        assert_eq!(disk.take_seen(), []);
        world.assert_nothing_is_left();
    }
}

#[test]
fn the_deadline_of_the_handshake_ends_with_the_handshake() {
    let world = World::new(shared(&RuledDisk::new(SIZE)));
    world.run(async {
        let (mut client, session) = world.connect();
        client.begin(Wish::default()).await;
        world.clock.ring();
        world.settle().await;
        assert!(!session.is_finished(), "an idle client may stay");
        assert_eq!(client.read(0, 4).await, [0; 4]);
    });
}

#[test]
fn a_removed_export_can_be_cut_off_from_clients_that_do_not_read() {
    let disk = RuledDisk::new(SIZE);
    let world = World::new(shared(&disk));
    world.run(async {
        let (mut client, session) = world.connect_over(1000);
        client.begin(Wish::default()).await;
        client.write(0, 0, &[1; 100]).await;
        client.request(header(command::READ, 1, 0, 64 << 10), b"").await;
        world.settle().await;
        let removed = world.exports.remove("").expect("it is there");
        world.settle().await;
        assert!(!session.is_finished());
        removed.cut();
        let _disk = removed.unused().await;
        assert!(matches!(session.await, Ending::Cut));
    });
    world.assert_nothing_is_left();
}

#[test]
fn half_a_write_is_never_written() {
    let disk = RuledDisk::new(SIZE);
    let world = World::new(shared(&disk));
    world.run(async {
        for come in [0, 1, 4095, 300_000] {
            let (mut client, session) = world.connect();
            client.begin(Wish::default()).await;
            client.send(&header(command::WRITE, 1, 0, 400_000).encode()).await;
            client.try_send(&vec![1; come]).await.expect("the server listens");
            world.settle().await;
            client.stream.end_writing();
            assert!(client.is_over().await);
            assert!(matches!(session.await, Ending::Violation(_)));
        }
        assert_eq!(disk.take_seen(), []);
    });
    world.assert_nothing_is_left();
}

#[test]
fn a_client_that_only_stops_talking_still_gets_its_answers() {
    let disk = RuledDisk::new(SIZE);
    let world = World::new(shared(&disk));
    world.run(async {
        let (mut client, session) = world.connect();
        client.begin(Wish::default()).await;
        disk.close_gate();
        client.request(header(command::READ, 1, 0, 512), b"").await;
        client.stream.end_writing();
        world.settle().await;
        disk.open_gate();
        assert_eq!(client.answer().await.expect("it was under way").data.len(), 512);
        assert!(client.is_over().await);
        assert!(matches!(session.await, Ending::Hangup));
    });
}

#[test]
fn a_drain_answers_what_was_begun_and_begins_nothing_new() {
    let disk = RuledDisk::new(SIZE);
    let world = World::new(shared(&disk));
    world.run(async {
        let (mut client, session) = world.connect();
        client.begin(Wish::default()).await;
        disk.close_gate();
        for cookie in 0..10 {
            client.request(header(command::WRITE, cookie, cookie * 512, 4), b"data").await;
        }
        world.settle().await;
        world.shutdown.drain();
        world.settle().await;
        assert!(!session.is_finished());
        // Comes too late: it may not even be taken off the wire.
        let late = header(command::WRITE, 99, 0, 4).encode();
        client.send(&[&late[..], b"late"].concat()).await;
        world.settle().await;
        disk.open_gate();
        for _ in 0..10 {
            assert_eq!(client.answer().await.expect("it was begun").error, 0);
        }
        assert!(client.is_over().await);
        assert!(matches!(session.await, Ending::Drained));
        assert_eq!(disk.take_seen().len(), 10);
    });
    world.assert_nothing_is_left();
}

#[test]
fn an_idle_session_drains_at_once() {
    let world = World::new(shared(&RuledDisk::new(SIZE)));
    world.run(async {
        let (mut client, session) = world.connect();
        client.begin(Wish::default()).await;
        world.settle().await;
        world.shutdown.drain();
        assert!(matches!(session.await, Ending::Drained));
        assert!(client.is_over().await);
    });
    world.assert_nothing_is_left();
}

#[test]
fn a_cut_does_not_wait_for_a_client_that_does_not_read() {
    let disk = RuledDisk::new(SIZE);
    let world = World::new(shared(&disk));
    world.run(async {
        let (mut client, session) = world.connect_over(1000);
        client.begin(Wish::default()).await;
        client.write(0, 0, &[1; 500]).await;
        client.request(header(command::READ, 1, 0, 64 << 10), b"").await;
        world.settle().await;
        world.shutdown.drain();
        world.settle().await;
        assert!(!session.is_finished(), "its replies cannot leave");
        disk.close_gate();
        world.shutdown.cut();
        assert!(matches!(session.await, Ending::Cut));
    });
    world.assert_nothing_is_left();
}

#[test]
fn a_cut_still_waits_for_the_disk() {
    let disk = RuledDisk::new(SIZE);
    let world = World::new(shared(&disk));
    world.run(async {
        let (mut client, session) = world.connect();
        client.begin(Wish::default()).await;
        disk.close_gate();
        client.request(header(command::WRITE, 1, 0, 4), b"data").await;
        world.settle().await;
        world.shutdown.cut();
        world.settle().await;
        assert!(!session.is_finished());
        assert!(client.is_over().await, "the client knows at once");
        disk.open_gate();
        assert!(matches!(session.await, Ending::Cut));
        assert_eq!(disk.bytes(0, 4), b"data");
    });
    world.assert_nothing_is_left();
}

#[test]
fn removing_an_export_drains_its_sessions_and_no_others() {
    let disk = RuledDisk::new(SIZE);
    let world = World::new(shared(&disk));
    world.offer("other", false);
    world.run(async {
        let (mut leaving, leaving_session) = world.connect();
        let (mut staying, staying_session) = world.connect();
        leaving.begin(Wish { name: "other", ..Wish::default() }).await;
        staying.begin(Wish::default()).await;
        disk.close_gate();
        leaving.request(header(command::WRITE, 1, 0, 4), b"data").await;
        world.settle().await;
        let removed = world.exports.remove("other").expect("it is there");
        world.settle().await;
        disk.open_gate();
        let _disk = removed.unused().await;
        assert_eq!(leaving.answer().await.expect("it was begun").error, 0);
        assert!(leaving.is_over().await);
        assert!(matches!(leaving_session.await, Ending::Drained));
        assert_eq!(staying.read(0, 4).await, b"data");
        assert!(!staying_session.is_finished());
        world.shutdown.drain();
        staying_session.await;
    });
    world.assert_nothing_is_left();
}

/// Two sessions on one disk; one is abused in every way, the other keeps reading what it wrote.
#[test]
fn abuse_on_one_connection_never_harms_another() {
    let disk = RuledDisk::new(SIZE);
    disk.answer_late(Random::from_seed(1));
    let world = World::new(shared(&disk));
    let mut random = Random::from_seed(2);
    world.run(async {
        let (mut good, _session) = world.connect();
        good.begin(Wish::default()).await;
        for round in 0..200_u64 {
            let (mut bad, _bad_session) = world.connect_over(5000);
            if !random.one_in(4) {
                bad.begin(Wish::default()).await;
            }
            let mut bytes = Vec::new();
            for cookie in 0..random.below(20) {
                let command = u16::try_from(random.below(10)).unwrap();
                // Anywhere but in the good client's half.
                let offset = SIZE / 2 + random.below(SIZE);
                let len = random.below(100_000);
                bytes.extend(RequestHeader { flags: 0, command, cookie, offset, len }.encode());
                bytes.extend(vec![0xbd; random.index(200)]);
            }
            bytes.truncate(4900);
            let _ = bad.try_send(&bytes).await;
            let data = round.to_be_bytes();
            let at = random.below(SIZE / 2 - 8);
            assert_eq!(good.write(0, at, &data).await.error, 0);
            if random.one_in(2) {
                drop(bad);
            } else {
                bad.stream.end_writing();
            }
            assert_eq!(good.read(at, 8).await, data);
        }
        drop(good);
        world.settle().await;
    });
    world.run(async {
        while world.running() > 0 {
            futures_lite::future::yield_now().await;
        }
    });
    world.assert_nothing_is_left();
}
