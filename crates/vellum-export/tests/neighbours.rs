//! Many clients of one server: seats, memory, and clients that hang, stall or stay silent. The others hardly
//! notice.

mod support;

use futures_lite::future::zip;
use support::World;
use support::client::{Client, Wish};
use support::disks::{Kind, RuledDisk, shared};
use support::pipe::pipe;
use vellum_export::nbd::wire::{RequestHeader, command, option, option_reply};
use vellum_export::nbd::{Bounds, Census, Ending, SessionLimits};

const MIB: u64 = 1 << 20;

fn read(cookie: u64, len: u64) -> RequestHeader {
    RequestHeader { flags: 0, command: command::READ, cookie, offset: 0, len }
}

fn bounds(seats: usize, lobby: usize, memory_bytes: usize) -> Bounds {
    Bounds { seats, seats_per_export: seats, lobby, memory_bytes }
}

const PLAIN: Wish<'_> = Wish { name: "", structured: false, extended: false, contexts: &[], sizes: false };

/// Once with requests to spare, so that the session hears of the end; once with none, so that it does not
/// listen.
#[test]
fn a_client_that_vanishes_while_its_requests_hang_makes_room_for_the_next() {
    for requests_max in [128, 2] {
        let disk = RuledDisk::new(64 * MIB);
        let limits = SessionLimits { requests_max, ..SessionLimits::default() };
        let world = World::bounded(shared(&disk), limits, bounds(1, 8, 1 << 30));
        world.run(async {
            let (mut first, hung) = world.connect();
            first.begin(PLAIN).await;
            disk.close_gate();
            for cookie in 0..3 {
                first.send(&read(cookie, 4096).encode()).await;
            }
            world.settle().await;
            drop(first);
            world.settle().await;
            world.clock.strike();
            world.settle().await;
            let (mut next, other) = world.connect();
            next.begin(PLAIN).await;
            assert_eq!(world.clients.census(), Census { lobby: 0, seated: 1, lingering: 1 });
            assert!(!hung.is_finished(), "what it began is still waited for");
            disk.open_gate();
            hung.await;
            assert_eq!(next.read(0, 4096).await.len(), 4096);
            drop(next);
            other.await;
        });
        world.assert_nothing_is_left();
    }
}

#[test]
fn a_client_that_finds_no_place_is_told_so() {
    let world = World::bounded(shared(&RuledDisk::new(MIB)), SessionLimits::default(), bounds(1, 8, 1 << 30));
    world.run(async {
        let (mut first, session) = world.connect();
        first.begin(PLAIN).await;
        let (mut next, other) = world.connect();
        next.greet().await;
        let half_of_its_time = async {
            world.settle().await;
            world.clock.strike();
        };
        // Every alarm rings at once here, the last one, too.
        let (told, ()) = zip(next.inform(option::GO, "", &[]), half_of_its_time).await;
        assert_eq!(told, Err(option_reply::ERR_POLICY));
        assert!(next.is_over().await);
        assert!(matches!(other.await, Ending::Refused(_)));
        assert_eq!(first.read(0, 512).await.len(), 512);
        drop(first);
        session.await;
        let (mut last, session) = world.connect();
        last.begin(PLAIN).await;
        drop(last);
        session.await;
    });
    world.assert_nothing_is_left();
}

#[test]
fn silent_strangers_keep_nobody_out() {
    let world = World::bounded(shared(&RuledDisk::new(MIB)), SessionLimits::default(), bounds(4, 3, 1 << 30));
    world.run(async {
        let strangers: Vec<_> = (0..10).map(|_| world.connect()).collect();
        world.settle().await;
        let (mut client, session) = world.connect();
        client.begin(PLAIN).await;
        assert_eq!(client.read(0, 512).await.len(), 512);
        assert_eq!(world.clients.census(), Census { lobby: 2, seated: 1, lingering: 0 });
        drop(client);
        session.await;
        drop(strangers);
    });
}

#[test]
fn a_client_can_be_sent_away_by_its_number() {
    let disk = RuledDisk::new(MIB);
    let world = World::new(shared(&disk));
    world.run(async {
        let (mut client, session) = world.connect();
        client.begin(PLAIN).await;
        let id = world.clients.list()[0].id;
        assert!(world.clients.disconnect(id));
        assert!(matches!(session.await, Ending::Cut));
        assert!(world.clients.is_empty());
    });
}

/// Six clients ask for 2 MiB each and read nothing: what they make the server hold is the budget's, not
/// theirs.
#[test]
fn all_clients_together_hold_no_more_than_the_budget() {
    let disk = RuledDisk::new(4 * MIB);
    let world = World::bounded(shared(&disk), SessionLimits::default(), bounds(64, 64, 2 << 20));
    world.run(async {
        let mut clients = Vec::new();
        for _ in 0..6 {
            let (server, client) = pipe(64 << 10);
            let (mut client, session) = (Client::new(client), world.serve(server));
            client.begin(PLAIN).await;
            client.request(read(1, 2 * MIB), &[]).await;
            clients.push((client, session));
        }
        world.settle().await;
        let begun = || disk.take_seen().iter().filter(|seen| seen.kind == Kind::Read).count();
        // Beyond a floor of 1 MiB each takes 1 of 2.
        assert_eq!(begun(), 2, "reads that were begun");
        // Ordinary requests continue.
        let (mut other, session) = world.connect();
        other.begin(PLAIN).await;
        assert_eq!(other.read(0, 64 << 10).await.len(), 64 << 10);
        assert_eq!(begun(), 1);
        drop(other);
        session.await;
        // And others have their turn as soon as those that hold the memory are gone.
        let mut served = 2;
        while served < 6 {
            clients.drain(..2).for_each(|(client, session)| {
                drop(client);
                session.detach();
            });
            world.settle().await;
            let more = begun();
            assert!(more <= 2, "{more} at once");
            served += more;
            if clients.is_empty() {
                break;
            }
        }
        assert!(served > 2, "{served} were served in all");
    });
}

#[test]
fn a_client_that_takes_nothing_is_cut_and_one_that_is_slow_is_not() {
    let world = World::new(shared(&RuledDisk::new(64 * MIB)));
    world.run(async {
        let (server, client) = pipe(4096);
        let (mut stuck, session) = (Client::new(client), world.serve(server));
        stuck.begin(PLAIN).await;
        stuck.request(read(1, MIB), &[]).await;
        let (server, client) = pipe(4096);
        let (mut slow, other) = (Client::new(client), world.serve(server));
        slow.begin(PLAIN).await;
        slow.request(read(1, MIB), &[]).await;
        for _ in 0..20 {
            world.settle().await;
            world.clock.strike();
            slow.stream.take_some(100);
        }
        world.settle().await;
        assert!(session.is_finished(), "it took no byte");
        assert!(!other.is_finished(), "it took some each time");
        drop(slow);
        other.await;
    });
    world.assert_nothing_is_left();
}

#[test]
fn a_client_that_stops_in_the_middle_of_a_request_is_cut() {
    let world = World::new(shared(&RuledDisk::new(64 * MIB)));
    world.run(async {
        let (mut idle, other) = world.connect();
        idle.begin(PLAIN).await;
        let (mut client, session) = world.connect();
        client.begin(PLAIN).await;
        let header = RequestHeader { flags: 0, command: command::WRITE, cookie: 1, offset: 0, len: 32 * MIB };
        client.send(&[&header.encode()[..], &[1]].concat()).await;
        for _ in 0..10 {
            world.settle().await;
            world.clock.strike();
        }
        world.settle().await;
        assert!(session.is_finished(), "it sent one byte, and then none");
        assert!(!other.is_finished(), "a client without requests may be silent");
        assert_eq!(idle.read(0, 512).await.len(), 512);
    });
}
