//! Every command of the transmission, with every flag, valid and invalid: what the client sees, and what the
//! disk is asked to do.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use support::World;
use support::client::{Client, Wish};
use support::disks::{Kind, RuledDisk, Seen, shared};
use vellum_core::{
    BlockSize, Disk, Error, ErrorKind, Geometry, ImageOffset, MemoryDisk, MemoryStorage, Place,
};
use vellum_core::{Random, SharedDisk, ZeroFlags};
use vellum_export::nbd::wire::{RequestHeader, command, command_flag as flag};
use vellum_export::nbd::{Ending, SessionLimits};

const SIZE: u64 = 4 << 20;

/// A world with one client that has begun.
fn begun(disk: SharedDisk, wish: Wish<'_>) -> (World, Client, async_executor::Task<Ending>) {
    let world = World::new(disk);
    let (mut client, session) = world.connect();
    world.run(client.begin(wish));
    (world, client, session)
}

fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; len];
    Random::from_seed(seed).fill(&mut bytes);
    bytes
}

fn simple() -> Wish<'static> {
    Wish { structured: false, contexts: &[], ..Wish::default() }
}

#[test]
fn what_was_written_is_read_at_any_place_and_length() {
    for wish in [Wish::default(), simple()] {
        let (world, mut client, _session) = begun(MemoryDisk::new(SIZE), wish);
        world.run(async {
            for (seed, (at, len)) in
                (0..).zip([(0, 1), (1, 511), (4095, 2), (100_000, 65_537), (SIZE - 1_000_000, 1_000_000)])
            {
                let data = noise(len, seed);
                assert_eq!(client.write(0, at, &data).await.error, 0);
                assert!(client.read(at, len as u64).await == data, "{len} bytes at {at}");
            }
            assert_eq!(client.read(77, 0).await, b"");
            assert_eq!(client.write(0, 77, b"").await.error, 0);
        });
    }
}

#[test]
fn flags_reach_the_disk() {
    let disk = RuledDisk::new(SIZE);
    let (world, mut client, _session) = begun(shared(&disk), Wish::default());
    world.run(async {
        let zero = |fua, may_unmap, fast_only| ZeroFlags { fua, may_unmap, fast_only };
        let seen = |kind, fua, zero| Seen { kind, at: 4096, len: 512, fua, zero };
        let none = ZeroFlags::default();
        assert_eq!(client.write(0, 4096, &[1; 512]).await.error, 0);
        assert_eq!(client.write(flag::FUA, 4096, &[1; 512]).await.error, 0);
        let asked =
            [(4, 0), (4, flag::FUA), (6, 0), (6, flag::NO_HOLE), (6, flag::FUA | flag::FAST_ZERO), (0, 1)];
        for (command, flags) in asked {
            assert_eq!(client.ask(command, flags, 4096, 512).await.error, 0);
        }
        assert_eq!(client.ask(3, flag::FUA, 0, 0).await.error, 0);
        let expected = [
            seen(Kind::Write, false, none),
            seen(Kind::Write, true, none),
            seen(Kind::Discard, false, none),
            seen(Kind::Discard, true, none),
            seen(Kind::Zero, false, zero(false, true, false)),
            seen(Kind::Zero, false, zero(false, false, false)),
            seen(Kind::Zero, false, zero(true, true, true)),
            seen(Kind::Read, false, none),
            Seen { kind: Kind::Flush, at: 0, len: 0, fua: false, zero: none },
        ];
        assert_eq!(disk.take_seen(), expected);
    });
}

#[test]
fn each_connection_hears_once_that_writes_were_lost() {
    const EIO: u32 = 5;
    let disk = RuledDisk::new(SIZE);
    let (world, mut one, _session) = begun(shared(&disk), Wish::default());
    let (mut other, _other) = world.connect();
    world.run(async {
        other.begin(Wish::default()).await;
        assert_eq!(one.write(0, 0, &[1; 512]).await.error, 0);
        assert_eq!(one.ask(3, 0, 0, 0).await.error, 0);
        disk.losses.grow();
        assert_eq!(one.write(0, 0, &[2; 512]).await.error, 0, "a write promises nothing");
        assert_eq!(one.ask(3, 0, 0, 0).await.error, EIO);
        assert_eq!(one.ask(3, 0, 0, 0).await.error, 0);
        assert_eq!(other.write(flag::FUA, 0, &[2; 512]).await.error, EIO);
        assert_eq!(other.write(flag::FUA, 0, &[2; 512]).await.error, 0);
        assert_eq!(other.ask(3, 0, 0, 0).await.error, EIO, "the connection that flushes gets the error, too");
        assert_eq!(other.ask(3, 0, 0, 0).await.error, 0);
        disk.losses.grow();
    });
    // Each may be one that was connected then.
    let (mut next, _next) = world.connect();
    let (mut last, _last) = world.connect();
    world.run(async {
        next.begin(Wish::default()).await;
        // More than is done in one go.
        assert_eq!(next.ask(6, flag::FUA, 0, SIZE).await.error, EIO);
        assert_eq!(next.ask(3, 0, 0, 0).await.error, EIO);
        assert_eq!(next.ask(3, 0, 0, 0).await.error, 0);
        last.begin(Wish::default()).await;
        assert_eq!(last.ask(3, 0, 0, 0).await.error, EIO, "also where another has heard of it");
        assert_eq!(last.ask(3, 0, 0, 0).await.error, 0);
    });
}

#[test]
fn a_client_hears_that_writes_were_lost_when_it_comes_back_without_the_reply_that_said_so() {
    const EIO: u32 = 5;
    let disk = RuledDisk::new(SIZE);
    let (world, mut client, session) = begun(shared(&disk), Wish::default());
    world.run(async {
        assert_eq!(client.write(0, 0, &[1; 512]).await.error, 0);
        // Its flush waits while the disk is opened again, and its connection breaks meanwhile.
        disk.close_gate();
        let header = RequestHeader { flags: 0, command: command::FLUSH, cookie: 1, offset: 0, len: 0 };
        let flush = client.note(header);
        client.send(&flush).await;
        world.settle().await;
        client.stream.break_down();
        drop(client);
        world.settle().await;
        disk.losses.grow();
        disk.open_gate();
        session.await;
    });
    assert!(!disk.losses.is_unheard(), "it went to nobody, and counts as heard");
    let (mut again, _again) = world.connect();
    world.run(async {
        again.begin(Wish::default()).await;
        assert_eq!(again.ask(3, 0, 0, 0).await.error, EIO);
        assert_eq!(again.ask(3, 0, 0, 0).await.error, 0);
    });
}

#[test]
fn requests_that_are_wrong_never_reach_the_disk() {
    let disk = RuledDisk::new(SIZE);
    for wish in [Wish::default(), simple()] {
        let (world, mut client, session) = begun(shared(&disk), wish);
        world.run(async {
            let wrong = [
                (0, flag::NO_HOLE, 0, 512),
                (0, 0, SIZE, 1),
                (0, 0, u64::MAX, 2),
                (3, 0, 0, 1),
                (4, flag::DF, 0, 512),
                (5, flag::FAST_ZERO, 0, 512),
                (6, flag::REQ_ONE, 0, 512),
                (6, 0, SIZE - 1, 2),
                (7, flag::FAST_ZERO, 0, 512),
                (7, 0, 0, u64::from(u32::MAX)),
                (7, 0, 0, 0),
                (8, 0, 0, 0),
                (99, 0xffff, 1, 2),
            ];
            for (command, flags, offset, len) in wrong {
                let answer = client.ask(command, flags, offset, len).await;
                let expected = if command == 6 && offset > 0 { 28 } else { 22 };
                assert_eq!(answer.error, expected, "command {command}");
            }
            assert_eq!(client.write(flag::NO_HOLE, 0, &[1; 512]).await.error, 22);
            assert_eq!(client.write(0, SIZE - 511, &[1; 512]).await.error, 28);
            assert_eq!(disk.take_seen(), []);
            assert_eq!(client.read(0, 512).await, [0; 512], "the session goes on");
            assert_eq!(disk.take_seen().len(), 1);
            drop(client);
            assert!(matches!(session.await, Ending::Hangup));
        });
        world.assert_nothing_is_left();
    }
}

#[test]
fn a_read_only_export_serves_reads_and_refuses_changes_cleanly() {
    let disk = RuledDisk::new(SIZE);
    let world = World::with(shared(&disk), true, SessionLimits::default());
    let (mut client, _session) = world.connect();
    world.run(async {
        client.begin(Wish::default()).await;
        assert_eq!(client.write(0, 0, &noise(100_000, 1)).await.error, 1);
        assert_eq!(client.ask(4, 0, 0, 512).await.error, 1);
        assert_eq!(client.ask(6, 0, 0, 512).await.error, 1);
        assert_eq!(disk.take_seen(), []);
        assert_eq!(client.ask(3, 0, 0, 0).await.error, 0);
        assert_eq!(client.read(0, 512).await, [0; 512], "the payload was taken off the wire");
    });
}

#[test]
fn the_disk_can_make_itself_read_only() {
    let geometry = Geometry { read_only: true, ..RuledDisk::new(SIZE).geometry.clone() };
    let (world, mut client, _session) = begun(shared(&RuledDisk::with(geometry)), Wish::default());
    world.run(async {
        assert_eq!(client.write(0, 0, &[1; 10]).await.error, 1);
        assert_eq!(client.read(0, 10).await, [0; 10]);
    });
}

#[test]
fn failures_of_the_disk_are_told_by_kind_and_without_names_of_the_host() {
    let cases = [
        (ErrorKind::Io, 5),
        (ErrorKind::NoSpace, 28),
        (ErrorKind::Corrupt, 5),
        (ErrorKind::Unsupported, 22),
        (ErrorKind::Invalid, 22),
        (ErrorKind::ReadOnly, 1),
        (ErrorKind::Poisoned, 5),
        (ErrorKind::Closed, 108),
    ];
    for (kind, number) in cases {
        for wish in [Wish::default(), simple()] {
            let structured = wish.structured;
            let disk = RuledDisk::new(SIZE);
            disk.fail(move |_| Some(Error::new(kind, "cannot touch /srv/secret.qcow2")));
            let (world, mut client, _session) = begun(shared(&disk), wish);
            world.run(async {
                let mut answers = vec![client.write(0, 0, &[1; 512]).await];
                for command in [0, 4, 5, 6] {
                    answers.push(client.ask(command, 0, 0, 512).await);
                }
                answers.push(client.ask(3, 0, 0, 0).await);
                if structured {
                    answers.push(client.ask(7, 0, 0, 512).await);
                    answers.push(client.ask(0, 0, 0, 1 << 20).await);
                }
                for answer in answers {
                    assert_eq!(answer.error, number, "{kind:?}");
                    assert!(!answer.message.contains("secret"), "{}", answer.message);
                    assert_eq!(answer.message.is_empty(), !structured);
                }
            });
        }
    }
}

#[test]
fn zeros_that_must_be_fast_fail_as_unsupported_where_they_are_not() {
    let geometry = Geometry { fast_zeroes: false, ..RuledDisk::new(SIZE).geometry.clone() };
    let (world, mut client, _session) = begun(shared(&RuledDisk::with(geometry)), Wish::default());
    world.run(async {
        assert_eq!(client.write(0, 0, &[7; 512]).await.error, 0);
        assert_eq!(client.ask(6, flag::FAST_ZERO, 0, 512).await.error, 95);
        assert_eq!(client.read(0, 512).await, [7; 512], "nothing was changed");
        assert_eq!(client.ask(6, 0, 0, 512).await.error, 0, "slowly it works");
        assert_eq!(client.read(0, 512).await, [0; 512]);
    });
}

#[test]
fn zeros_and_trims_may_be_as_long_as_the_wire_allows() {
    let size = 8 << 30;
    let disk = RuledDisk::new(size);
    let (world, mut client, _session) = begun(shared(&disk), Wish::default());
    world.run(async {
        for command in [4, 6] {
            assert_eq!(client.ask(command, 0, 4 << 30, u64::from(u32::MAX)).await.error, 0);
        }
        let seen: Vec<_> = disk.take_seen().iter().map(|seen| (seen.kind, seen.at >> 26, seen.len)).collect();
        let pieces = |kind| (64..128).map(move |at| (kind, at, (1_u64 << 26) - u64::from(at == 127)));
        assert_eq!(seen, pieces(Kind::Discard).chain(pieces(Kind::Zero)).collect::<Vec<_>>());
    });
}

const EXTENDED: Wish<'_> =
    Wish { name: "", structured: false, extended: true, contexts: &["base:allocation"], sizes: false };

#[test]
fn with_extended_headers_one_request_may_mean_the_whole_disk() {
    let size = 1 << 40;
    let disk = RuledDisk::new(size);
    let (world, mut client, session) = begun(shared(&disk), EXTENDED);
    world.run(async {
        assert_eq!(client.write(0, 5 << 37, b"hello").await.error, 0);
        assert_eq!(client.read(5 << 37, 5).await, b"hello");
        // As QEMU sends it: without the flag for its payload.
        let header =
            RequestHeader { flags: 0, command: command::WRITE, cookie: 1, offset: (5 << 37) + 1, len: 1 };
        let bytes = client.note(header);
        client.send(&[&bytes[..], b"u"].concat()).await;
        assert_eq!(client.answer_to(1).await.error, 0);
        assert_eq!(client.read(5 << 37, 5).await, b"hullo");
        let status = client.ask(7, 0, 0, size).await.status;
        assert_eq!(status.len(), 1);
        assert_eq!(status[0].1[0], (5 << 37, 3), "lengths of 64 bits");
        assert_eq!(status[0].1.iter().map(|(len, _)| len).sum::<u64>(), size);
        let maps = disk.take_seen();
        assert_eq!(maps.iter().filter(|seen| seen.kind == Kind::Map).count(), 1 << 14);
        assert!(maps.iter().all(|seen| seen.len <= 1 << 26), "a disk may look at all of it without waiting");
        for (command, kind) in [(4, Kind::Discard), (6, Kind::Zero)] {
            assert_eq!(client.ask(command, flag::FUA, 100, 6 << 30).await.error, 0);
            let pieces = disk.take_seen();
            let (last, pieces) = pieces.split_last().expect("some");
            assert_eq!(last.kind, Kind::Flush, "one makes all of them durable");
            assert!(!pieces.iter().any(|piece| piece.fua || piece.zero.fua));
            assert_eq!(pieces.iter().map(|piece| piece.len).sum::<u64>(), 6 << 30);
            assert!(pieces.iter().all(|piece| piece.kind == kind && piece.len <= 1 << 26));
        }
        assert_eq!(client.ask(6, 0, size - 512, 513).await.error, 28, "past the end");
        assert_eq!(client.ask(0, 0, 0, size).await.error, 75, "a read is bounded");
        assert!(disk.take_seen().is_empty());
        drop(client);
        session.await;
    });
    world.assert_nothing_is_left();
}

/// A piece that was answered is lost, and a flush beside it gets the error.
#[test]
fn a_long_request_with_fua_is_not_answered_well_when_a_piece_of_it_was_lost() {
    for (command, kind) in [(4, Kind::Discard), (6, Kind::Zero)] {
        let disk = RuledDisk::new(1 << 36);
        let losses = disk.losses.clone();
        let pieces = AtomicU64::new(0);
        disk.fail(move |seen| {
            if seen.kind == kind && pieces.fetch_add(1, Ordering::SeqCst) == 1 {
                losses.grow();
            }
            None
        });
        let (world, mut client, _session) = begun(shared(&disk), EXTENDED);
        world.run(async {
            let header =
                |command, flags, cookie, len| RequestHeader { flags, command, cookie, offset: 0, len };
            let long = client.note(header(command, flag::FUA, 1, 1 << 36));
            client.send(&long).await;
            // Until the loss, and no longer.
            while !disk.take_seen().iter().any(|seen| seen.kind == kind && seen.at > 0) {
                futures_lite::future::yield_now().await;
            }
            let flush = client.note(header(command::FLUSH, 0, 2, 0));
            client.send(&flush).await;
            for _ in 0..2 {
                let answer = client.answer().await.expect("the session goes on");
                assert_ne!(answer.error, 0, "{}: both get the error", answer.cookie);
            }
        });
    }
}

/// The others continue while a long request does, and it ends with its client.
#[test]
fn a_long_request_gives_way_and_ends_when_its_client_is_gone() {
    for (command, kind) in [(4, Kind::Discard), (5, Kind::Read), (6, Kind::Zero)] {
        for ending in 0..3 {
            let disk = RuledDisk::new(1 << 60);
            let (world, mut client, session) = begun(shared(&disk), EXTENDED);
            world.run(async {
                let all = RequestHeader { flags: 0, command, cookie: 1, offset: 0, len: 1 << 60 };
                client.request(all, &[]).await;
                for _ in 0..20 {
                    assert_eq!(client.ask(3, 0, 0, 0).await.error, 0, "a flush is not kept waiting");
                }
                assert_eq!(client.open(), 1, "it is not done yet");
                assert!(disk.take_seen().iter().filter(|seen| seen.kind == kind).count() > 1);
                match ending {
                    0 => client.stream.break_down(),
                    1 => client.stream.end_writing(),
                    _ => drop(client),
                }
                session.await;
                assert!(disk.take_seen().len() < 100, "it ends soon");
                world.settle().await;
                assert!(disk.take_seen().is_empty(), "nothing goes on for nobody");
            });
            world.assert_nothing_is_left();
        }
    }
}

/// Counted in what the disk is asked: how much of one client's worst comes between two requests of another.
#[test]
fn many_long_requests_of_one_client_hardly_delay_another() {
    for (command, kind) in [(7, Kind::Map), (4, Kind::Discard), (6, Kind::Zero)] {
        let disk = RuledDisk::new(1 << 60);
        let (world, mut attacker, _session) = begun(shared(&disk), EXTENDED);
        let (mut victim, _other) = world.connect();
        world.run(async {
            victim.begin(EXTENDED).await;
            for cookie in 0..100 {
                let all = RequestHeader { flags: 0, command, cookie, offset: 0, len: 1 << 60 };
                attacker.request(all, &[]).await;
            }
            world.settle().await;
            disk.take_seen();
            let mut most = 0;
            for at in 0..50 {
                victim.read(at * 4096, 512).await;
                let seen = disk.take_seen();
                most = most.max(seen.iter().filter(|seen| seen.kind == kind).count());
                assert_eq!(attacker.open(), 100, "they still go on");
            }
            // The executor runs 200 tasks before it looks at the test itself, and a read takes two such
            // looks: one slice for each turn of a session, not one for each request in each pass of a turn.
            assert!(most <= 500, "{most} slices of {kind:?} during one read");
            attacker.stream.break_down();
        });
        drop(victim);
    }
}

#[test]
fn a_small_read_of_zeros_is_told_as_a_hole_unless_it_must_be_whole() {
    let (world, mut client, _session) = begun(shared(&RuledDisk::new(SIZE)), Wish::default());
    world.run(async {
        let answer = client.ask(0, 0, 4096, 4096).await;
        assert_eq!((answer.holes, answer.chunks), (vec![(4096, 4096)], 1));
        let answer = client.ask(0, flag::DF, 4096, 4096).await;
        assert_eq!((answer.holes, answer.data), (vec![], vec![0; 4096]));
        client.write(0, 8191, &[1]).await;
        let answer = client.ask(0, 0, 4096, 4096).await;
        assert_eq!((answer.holes.len(), answer.data[4095]), (0, 1));
        assert_eq!(client.ask(0, flag::DF, 0, 0).await.error, 0);
    });
}

#[test]
fn a_large_read_does_not_read_its_holes() {
    let disk = RuledDisk::new(SIZE);
    let (world, mut client, _session) = begun(shared(&disk), Wish::default());
    world.run(async {
        let data = noise(64 << 10, 1);
        client.write(0, 1 << 20, &data).await;
        disk.take_seen();
        let answer = client.ask(0, 0, 0, SIZE).await;
        assert_eq!(answer.holes, [(0, 1 << 20), ((1 << 20) + (64 << 10), SIZE - (1 << 20) - (64 << 10))]);
        assert_eq!(answer.chunks, 3);
        assert!(answer.data[1 << 20..][..64 << 10] == data);
        let read: Vec<_> = disk.take_seen().into_iter().filter(|seen| seen.kind == Kind::Read).collect();
        assert_eq!(read.iter().map(|seen| (seen.at, seen.len)).collect::<Vec<_>>(), [(1 << 20, 64 << 10)]);
    });
}

#[test]
fn an_error_in_the_middle_of_a_large_read_spoils_only_its_part() {
    let disk = RuledDisk::new(SIZE);
    let (world, mut client, _session) = begun(shared(&disk), Wish::default());
    world.run(async {
        for at in [0, 1 << 20, 2 << 20] {
            client.write(0, at, &noise(64 << 10, at)).await;
        }
        disk.fail(|seen| {
            (seen.kind == Kind::Read && seen.at == 1 << 20).then(|| Error::new(ErrorKind::Io, "a bad sector"))
        });
        let answer = client.ask(0, 0, 0, SIZE).await;
        assert_eq!(answer.error, 5);
        assert_eq!(answer.failed_at, [(5, 1 << 20)]);
        assert!(answer.data[..64 << 10] == noise(64 << 10, 0));
        assert!(answer.data[2 << 20..][..64 << 10] == noise(64 << 10, 2 << 20));
        let whole = client.ask(0, flag::DF, 0, SIZE).await;
        assert_eq!((whole.error, whole.chunks), (0, 1), "another read, another fate");
    });
}

#[test]
fn a_cache_request_reads_in_pieces_and_sends_nothing() {
    let disk = RuledDisk::new(64 << 20);
    let (world, mut client, _session) = begun(shared(&disk), Wish::default());
    world.run(async {
        let answer = client.ask(5, 0, 100, (2 << 20) + 5).await;
        assert_eq!((answer.error, answer.data.len()), (0, 0));
        let read: Vec<_> = disk.take_seen().iter().map(|seen| (seen.at, seen.len)).collect();
        assert_eq!(read, [(100, 1 << 20), (100 + (1 << 20), 1 << 20), (100 + (2 << 20), 5)]);
        assert_eq!(client.ask(5, 0, 0, 0).await.error, 0);
        assert_eq!(client.ask(5, 0, 0, (32 << 20) + 1).await.error, 75, "bounded work for 28 bytes");
    });
}

#[test]
fn status_tells_holes_zeros_and_depth() {
    let disk = RuledDisk::new(SIZE);
    let data = || Place::Data { storage: MemoryStorage::new("elsewhere"), at: ImageOffset::ZERO };
    let k = 1024;
    disk.say(0, 64 * k, Place::Zero { allocated: false });
    disk.say(64 * k, 64 * k, data());
    disk.say(128 * k, 64 * k, Place::Compressed { from: None });
    disk.say(192 * k, 64 * k, Place::Zero { allocated: true });
    disk.say(256 * k, SIZE - 256 * k, Place::Below);
    let contexts = &["base:allocation", "qemu:allocation-depth"];
    let (world, mut client, _session) = begun(shared(&disk), Wish { contexts, ..Wish::default() });
    world.run(async {
        let k = 1024;
        let answer = client.ask(7, 0, 0, SIZE).await;
        let rest = SIZE - 256 * k;
        let allocation = vec![(64 * k, 3), (128 * k, 0), (64 * k, 2), (rest, 3)];
        let depth = vec![(256 * k, 1), (rest, 0)];
        assert_eq!(answer.status, [(1, allocation), (2, depth)]);
        let answer = client.ask(7, flag::REQ_ONE, 100 * k, 50 * k).await;
        assert_eq!(answer.status, [(1, vec![(50 * k, 0)]), (2, vec![(50 * k, 1)])]);
        let answer = client.ask(7, flag::REQ_ONE, 10, 512).await;
        assert_eq!(answer.status, [(1, vec![(512, 3)]), (2, vec![(512, 1)])]);
    });
}

#[test]
fn status_follows_the_chain() {
    let base = RuledDisk::new(SIZE);
    world_of_two(base, |world, mut client| {
        world.run(async move {
            let answer = client.ask(7, 0, 0, SIZE).await;
            let (kib, size) = (1024, SIZE);
            // The base has its second 64 KiB, the overlay the third.
            assert_eq!(
                answer.status,
                [
                    (1, vec![(64 * kib, 3), (128 * kib, 0), (size - 192 * kib, 3)]),
                    (2, vec![(64 * kib, 2), (64 * kib, 2), (64 * kib, 1), (size - 192 * kib, 2)])
                        .clone_merged(),
                ]
            );
        });
    });
}

/// Joins neighbours of one status, so that an expectation can be written part by part.
trait CloneMerged {
    fn clone_merged(&self) -> Self;
}

impl CloneMerged for (u32, Vec<(u64, u32)>) {
    fn clone_merged(&self) -> Self {
        let mut runs: Vec<(u64, u32)> = Vec::new();
        for (len, status) in &self.1 {
            match runs.last_mut() {
                Some(last) if last.1 == *status => last.0 += len,
                _ => runs.push((*len, *status)),
            }
        }
        (self.0, runs)
    }
}

fn world_of_two(base: Arc<RuledDisk>, test: impl FnOnce(&World, Client)) {
    let setup = async {
        let data = vellum_core::Buffer::copy_of(&[5; 64 << 10]);
        base.write(vellum_core::GuestOffset::new(64 << 10), data, Default::default()).await.unwrap();
        let overlay = MemoryDisk::over(SIZE, Some(shared(&base)));
        let data = vellum_core::Buffer::copy_of(&[6; 64 << 10]);
        overlay.write(vellum_core::GuestOffset::new(128 << 10), data, Default::default()).await.unwrap();
        overlay
    };
    let overlay = futures_lite::future::block_on(setup);
    let contexts = &["base:allocation", "qemu:allocation-depth"];
    let (world, client, _session) = begun(overlay, Wish { contexts, ..Wish::default() });
    test(&world, client);
}

#[test]
fn status_of_many_extents_is_cut_and_can_be_continued() {
    // 20,000 extents of 512 bytes: more than one answer holds.
    let disk = RuledDisk::new(SIZE * 4);
    let extents = 20_000;
    for index in 0..extents {
        disk.say(index * 512, 512, Place::Zero { allocated: index % 2 == 0 });
    }
    disk.say(extents * 512, SIZE * 4 - extents * 512, Place::Zero { allocated: true });
    let (world, mut client, _session) = begun(shared(&disk), Wish::default());
    world.run(async {
        let (mut at, mut answers, mut runs) = (0, 0, Vec::new());
        while at < SIZE * 4 {
            let answer = client.ask(7, 0, at, SIZE * 4 - at).await;
            assert_eq!(answer.error, 0);
            answers += 1;
            for (len, status) in &answer.status[0].1 {
                runs.push((at, *status));
                at += *len;
            }
        }
        assert_eq!(at, SIZE * 4);
        assert!(answers >= 3, "{answers} answers");
        for (index, (at, status)) in (0..).zip(runs.iter().take(20_000)) {
            assert_eq!((*at, *status), (index * 512, if index % 2 == 0 { 2 } else { 3 }));
        }
    });
}

#[test]
fn requests_run_side_by_side_and_are_answered_as_they_end() {
    let disk = RuledDisk::new(SIZE);
    let (world, mut client, _session) = begun(shared(&disk), simple());
    world.run(async {
        disk.answer_late(Random::from_seed(8));
        let mut bytes = Vec::new();
        for cookie in 0..100 {
            let header = RequestHeader { flags: 0, command: 0, cookie, offset: cookie * 512, len: 512 };
            bytes.extend(client.note(header));
        }
        client.send(&bytes).await;
        let mut order = Vec::new();
        for _ in 0..100 {
            order.push(client.answer().await.expect("it is answered").cookie);
        }
        assert_ne!(order, (0..100).collect::<Vec<_>>(), "not one after the other");
        order.sort_unstable();
        assert_eq!(order, (0..100).collect::<Vec<_>>(), "each once");
        assert!(disk.running_max.load(std::sync::atomic::Ordering::Relaxed) >= 60);
    });
}

#[test]
fn no_more_requests_run_than_the_limit_allows() {
    let disk = RuledDisk::new(SIZE);
    let limits = SessionLimits { requests_max: 7, ..SessionLimits::default() };
    let world = World::with(shared(&disk), false, limits);
    let (mut client, _session) = world.connect();
    world.run(async {
        client.begin(simple()).await;
        disk.answer_late(Random::from_seed(9));
        for cookie in 0..200 {
            let header = RequestHeader { flags: 0, command: 0, cookie, offset: cookie * 512, len: 512 };
            let bytes = client.note(header);
            client.send(&bytes).await;
        }
        for _ in 0..200 {
            assert_eq!(client.answer().await.expect("it is answered").error, 0);
        }
        assert_eq!(disk.running_max.load(std::sync::atomic::Ordering::Relaxed), 7);
    });
}

#[test]
fn a_flush_is_submitted_when_it_comes_and_not_after_the_writes_before_it() {
    let disk = RuledDisk::new(SIZE);
    let (world, mut client, _session) = begun(shared(&disk), simple());
    world.run(async {
        disk.close_gate();
        let write = RequestHeader { flags: 0, command: command::WRITE, cookie: 1, offset: 0, len: 4 };
        let flush = RequestHeader { flags: 0, command: command::FLUSH, cookie: 2, offset: 0, len: 0 };
        client.request(write, b"data").await;
        client.request(flush, b"").await;
        world.settle().await;
        let kinds: Vec<_> = disk.take_seen().iter().map(|seen| seen.kind).collect();
        assert_eq!(kinds, [Kind::Write, Kind::Flush], "both are under way");
        disk.open_gate();
        assert!(client.answer().await.is_some() && client.answer().await.is_some());
    });
}

/// Multi-conn: a flush on one connection is submitted after every write that was answered on another.
#[test]
fn a_flush_on_one_connection_covers_what_was_answered_on_another() {
    let disk = RuledDisk::new(SIZE);
    let world = World::new(shared(&disk));
    let (mut first, _session) = world.connect();
    let (mut second, _session) = world.connect();
    world.run(async {
        first.begin(Wish::default()).await;
        second.begin(Wish::default()).await;
        for round in 0..50_u64 {
            let data = noise(512, round);
            assert_eq!(first.write(0, round * 512, &data).await.error, 0);
            assert_eq!(second.ask(3, 0, 0, 0).await.error, 0);
            assert_eq!(second.read(round * 512, 512).await, data, "and it is seen there");
            let seen = disk.take_seen();
            let kinds: Vec<_> = seen.iter().map(|seen| seen.kind).collect();
            assert_eq!(kinds, [Kind::Write, Kind::Flush, Kind::Read]);
        }
    });
}

#[test]
fn disconnect_waits_for_what_is_under_way_and_ignores_what_follows() {
    let disk = RuledDisk::new(SIZE);
    let (world, mut client, session) = begun(shared(&disk), simple());
    world.run(async {
        disk.close_gate();
        let header = |command, cookie| RequestHeader { flags: 0, command, cookie, offset: 0, len: 4 };
        client.request(header(command::WRITE, 1), b"data").await;
        client.send(&header(command::DISC, 2).encode()).await;
        client.send(&header(command::READ, 3).encode()).await;
        world.settle().await;
        assert!(!session.is_finished());
        disk.open_gate();
        assert_eq!(client.answer().await.expect("it was under way").cookie, 1);
        assert!(client.is_over().await);
        assert!(matches!(session.await, Ending::Goodbye));
        assert_eq!(disk.take_seen().len(), 1);
    });
}

#[test]
fn a_large_payload_comes_in_many_pieces_and_goes_to_aligned_memory() {
    let geometry = Geometry {
        size: 64 << 20,
        block_size: BlockSize::from_shift(0),
        preferred_size: BlockSize::PAGE,
        read_only: false,
        fast_zeroes: true,
    };
    let disk = RuledDisk::with(geometry);
    let world = World::new(shared(&disk));
    let (mut client, _session) = world.connect_over(10_000);
    world.run(async {
        client.begin(simple()).await;
        for (seed, len) in
            [(1, 200_000), (2, 256 << 10), (3, (256 << 10) - 28), (4, 1_000_001), (5, 32 << 20)]
        {
            let data = noise(len, seed);
            assert_eq!(client.write(0, seed, &data).await.error, 0);
            assert!(disk.bytes(seed, len) == data, "{len} bytes");
        }
    });
}

#[test]
fn replies_that_are_ready_together_leave_together() {
    let disk = RuledDisk::new(SIZE);
    let (world, mut client, _session) = begun(shared(&disk), simple());
    world.run(async {
        disk.close_gate();
        let mut bytes = Vec::new();
        for cookie in 0..32 {
            let header = RequestHeader { flags: 0, command: 0, cookie, offset: 0, len: 512 };
            bytes.extend(client.note(header));
        }
        client.send(&bytes).await;
        world.settle().await;
        let before = client.stream.total_sent_here();
        let writes = client.stream.writes_here();
        disk.open_gate();
        for _ in 0..32 {
            client.answer().await.expect("it is answered");
        }
        assert_eq!(client.stream.total_sent_here() - before, 32 * (16 + 512));
        assert_eq!(client.stream.writes_here() - writes, 1, "32 replies, one write");
    });
}
