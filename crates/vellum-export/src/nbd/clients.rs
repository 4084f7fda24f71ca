//! The clients of a server: which may connect, which are connected, and how one is disconnected.
//!
//! ```text
//!   accept ──arrive──► lobby ──admit──► seat ──leave──► lingering ──drop──► gone
//!                        │ full: the one that has been     │ its peer is gone, and a request
//!                        │ there longest is sent away      │ of it still hangs at the disk
//! ```
//!
//! 1. A client that was accepted is in the lobby until it has chosen an export. The lobby is bounded and
//!    never closed: a client that arrives when it is full replaces the one that has been there longest. So
//!    silent clients cannot lock others out. Neither can clients that reconnect over and over: a client that
//!    has had less than [`SAY_SOMETHING`] is not replaced, and the next ones wait in the listener's queue.
//! 2. A client takes a seat when it chooses an export. Seats are limited for the server and for each export,
//!    including its snapshots, so that the clients of one export cannot take all of them. A client that finds
//!    none waits in the lobby for half of the handshake's time. Then it is refused, if it chose in a way that
//!    can be refused, and may ask again until the deadline.
//! 3. A client whose peer is gone returns its seat at once, even while its requests hang: it lingers, and is
//!    counted separately. At most as many clients of an export may linger as may have a seat there; beyond
//!    that they keep their seats.
//! 4. With a limit on connections ([`Clients::admit_at_most`]) the next ones wait in the listener's queue, and have no
//!    deadline there.
//! 5. Nothing is held across a wait, and all memory that a peer can occupy here is bounded by the numbers
//!    above.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use event_listener::Event;
use futures_lite::future::or;
use vellum_core::{Clock, lock};

use super::budget::Budget;
use crate::shutdown::Shutdown;

/// The time between two warnings that clients had to wait.
const WARNED_EVERY: Duration = Duration::from_secs(60);

/// A client that comes in has at least this long to choose an export.
const SAY_SOMETHING: Duration = Duration::from_millis(250);

/// How many clients may be there that have not chosen an export yet. One takes a descriptor and about 24 KiB.
const LOBBY: usize = 512;

/// How many clients there may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// With an export, all together.
    pub seats: usize,
    /// With one export.
    pub seats_per_export: usize,
    /// Without one yet.
    pub lobby: usize,
    /// What the payloads of all clients may take in memory, beyond the floor that each may have.
    pub memory_bytes: usize,
}

impl Bounds {
    /// For this many clients of a server with this many exports: each of several exports gets at most half of
    /// the seats.
    pub fn new(seats: usize, exports: usize) -> Self {
        let seats_per_export = if exports > 1 { seats.div_ceil(2) } else { seats };
        Self { seats, seats_per_export, lobby: LOBBY, memory_bytes: 512 << 20 }
    }

    /// How many clients a server with this many exports admits by default.
    pub fn seats_for(exports: usize) -> usize {
        (exports * 16).clamp(128, 16 << 10)
    }
}

/// The clients of a server. Clones are one; it may be used from any thread.
#[derive(Clone)]
pub struct Clients(Arc<Inner>);

struct Inner {
    lobby: usize,
    clock: Arc<dyn Clock>,
    rows: Mutex<Rows>,
    freed: Event,
    /// A client has left the lobby.
    left_lobby: Event,
    budget: Arc<Budget>,
}

struct Rows {
    seats: usize,
    seats_per_export: usize,
    /// This many connections at once, with an export or without.
    connections_max: Option<usize>,
    /// The last client has left, and one that has had an export left as the last.
    is_deserted: bool,
    next: u64,
    all: BTreeMap<u64, Row>,
    /// When the last warning was logged, and how many clients have had to wait since.
    warned: Option<Duration>,
    unsaid: u64,
}

struct Row {
    facts: ClientFacts,
    shutdown: Shutdown,
}

/// Where a client is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// It has not chosen an export.
    Lobby,
    /// It is served.
    Seated,
    /// It is gone or was disconnected, and its requests have not ended.
    Lingering,
}

/// What is known of a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientFacts {
    /// Its number, which no other client of the server has had.
    pub id: u64,
    /// Where it comes from.
    pub peer: String,
    /// The subject of its certificate, if it has shown one.
    pub subject: Option<String>,
    /// What it has chosen.
    pub export: Option<String>,
    /// Where it is.
    pub stage: Stage,
    /// How long it has been there.
    pub age: Duration,
}

/// How many clients there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Census {
    /// Without an export yet.
    pub lobby: usize,
    /// With one.
    pub seated: usize,
    /// Gone, with requests that have not ended.
    pub lingering: usize,
}

/// One client, until dropped.
pub struct Client {
    clients: Clients,
    id: u64,
    peer: String,
    shutdown: Shutdown,
}

impl Clients {
    /// No client yet.
    pub fn new(bounds: Bounds, clock: Arc<dyn Clock>) -> Self {
        let budget = Budget::new(bounds.memory_bytes);
        let rows = Mutex::new(Rows {
            seats: bounds.seats,
            seats_per_export: bounds.seats_per_export,
            connections_max: None,
            is_deserted: false,
            next: 0,
            all: BTreeMap::new(),
            warned: None,
            unsaid: 0,
        });
        let (freed, left_lobby) = (Event::new(), Event::new());
        Self(Arc::new(Inner { lobby: bounds.lobby, clock, rows, freed, left_lobby, budget }))
    }

    /// Sets the number of seats. If it grows, waiting clients sit down; if it shrinks, every client that has
    /// a seat keeps it.
    pub fn set_seats(&self, seats: usize, seats_per_export: usize) {
        let mut rows = self.rows();
        (rows.seats, rows.seats_per_export) = (seats, seats_per_export);
        drop(rows);
        self.0.freed.notify(usize::MAX);
    }

    /// At most this many connections are accepted at once by each listener, in all. The next ones wait.
    pub fn admit_at_most(&self, connections: usize) {
        self.rows().connections_max = Some(connections);
    }

    /// Completes when a client that had an export has left, and no client remains.
    pub async fn deserted(&self) {
        loop {
            let freed = self.0.freed.listen();
            if self.rows().is_deserted {
                return;
            }
            freed.await;
        }
    }

    /// Waits until the next client may be accepted: the lobby has room, or the client that has been there
    /// longest has had its time.
    pub async fn may_arrive(&self) {
        loop {
            let (left, freed) = (self.0.left_lobby.listen(), self.0.freed.listen());
            if self.rows().are_all_connected() {
                freed.await;
                continue;
            }
            let Some(wait) = self.crowded_for() else { return };
            or(left, self.0.clock.sleep(wait)).await;
        }
    }

    /// How long until a client in the lobby can be replaced.
    fn crowded_for(&self) -> Option<Duration> {
        let rows = self.rows();
        let mut waiting = rows.all.values().filter(|row| row.facts.stage == Stage::Lobby);
        let oldest = waiting.next()?;
        if 1 + waiting.count() < self.0.lobby {
            return None;
        }
        let left = (oldest.facts.age + SAY_SOMETHING).saturating_sub(self.0.clock.now());
        Some(left).filter(|left| !left.is_zero())
    }

    /// A connection was accepted.
    pub fn arrive(&self, peer: &str) -> Client {
        let mut rows = self.rows();
        let waiting = |row: &&Row| row.facts.stage == Stage::Lobby;
        if rows.all.values().filter(waiting).count() >= self.0.lobby
            && let Some(oldest) = rows.all.values_mut().find(|row| row.facts.stage == Stage::Lobby)
        {
            tracing::debug!(
                peer = oldest.facts.peer,
                "disconnected to make room for another client: it has not \
             chosen an export"
            );
            oldest.facts.stage = Stage::Lingering;
            oldest.shutdown.cut();
        }
        let id = rows.next;
        rows.next += 1;
        let facts = ClientFacts {
            id,
            peer: peer.to_owned(),
            subject: None,
            export: None,
            stage: Stage::Lobby,
            age: self.0.clock.now(),
        };
        let shutdown = Shutdown::new();
        rows.all.insert(id, Row { facts, shutdown: shutdown.clone() });
        Client { clients: self.clone(), id, peer: peer.to_owned(), shutdown }
    }

    /// All of them, in the order in which they came.
    pub fn list(&self) -> Vec<ClientFacts> {
        let now = self.0.clock.now();
        let facts = |row: &Row| ClientFacts { age: now.saturating_sub(row.facts.age), ..row.facts.clone() };
        self.rows().all.values().map(facts).collect()
    }

    /// How many there are.
    pub fn census(&self) -> Census {
        let mut census = Census::default();
        for row in self.rows().all.values() {
            *match row.facts.stage {
                Stage::Lobby => &mut census.lobby,
                Stage::Seated => &mut census.seated,
                Stage::Lingering => &mut census.lingering,
            } += 1;
        }
        census
    }

    /// Whether no client is left, lingering ones included.
    pub fn is_empty(&self) -> bool {
        self.rows().all.is_empty()
    }

    /// Sends a client away: nothing more is read from it or sent to it. False if there is none of that
    /// number.
    pub fn disconnect(&self, id: u64) -> bool {
        let rows = self.rows();
        let Some(row) = rows.all.get(&id) else { return false };
        tracing::info!(peer = row.facts.peer, export = row.facts.export, "a client is disconnected");
        row.shutdown.cut();
        true
    }

    /// Sends away all that use one of these exports, or a snapshot of it.
    pub fn disconnect_from(&self, exports: &[String]) {
        let is_one = |name: &str| exports.iter().any(|export| disk_of(export) == disk_of(name));
        for row in self.rows().all.values() {
            if row.facts.export.as_deref().is_some_and(is_one) {
                row.shutdown.cut();
            }
        }
    }

    fn rows(&self) -> MutexGuard<'_, Rows> {
        lock(&self.0.rows)
    }
}

/// The part of a name that identifies the disk: an export's snapshots have names with an `@` behind it.
fn disk_of(export: &str) -> &str {
    export.split('@').next().unwrap_or(export)
}

impl Rows {
    fn are_all_connected(&self) -> bool {
        let connected = self.all.values().filter(|row| row.facts.stage != Stage::Lingering).count();
        self.connections_max.is_some_and(|most| connected >= most)
    }

    fn of(&self, export: &str, stage: Stage) -> usize {
        let is_it = |row: &&Row| {
            row.facts.stage == stage
                && row.facts.export.as_deref().is_some_and(|its| disk_of(its) == disk_of(export))
        };
        self.all.values().filter(is_it).count()
    }
}

impl Client {
    /// Where it comes from.
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// Completes when it is disconnected.
    pub(super) fn shutdown(&self) -> &Shutdown {
        &self.shutdown
    }

    pub(super) fn budget(&self) -> &Arc<Budget> {
        &self.clients.0.budget
    }

    /// It has shown a certificate.
    pub(super) fn identify(&self, subject: String) {
        if let Some(row) = self.clients.rows().all.get_mut(&self.id) {
            row.facts.subject = Some(subject);
        }
    }

    /// Takes a seat with this export, as soon as there is one.
    pub(super) async fn admit(&self, export: &str) {
        if self.sit_down(export) {
            return;
        }
        self.warn(export);
        loop {
            let freed = self.clients.0.freed.listen();
            if self.sit_down(export) {
                return;
            }
            freed.await;
        }
    }

    fn sit_down(&self, export: &str) -> bool {
        let mut rows = self.clients.rows();
        let seated = rows.all.values().filter(|row| row.facts.stage == Stage::Seated).count();
        if seated >= rows.seats || rows.of(export, Stage::Seated) >= rows.seats_per_export {
            return false;
        }
        let Some(row) = rows.all.get_mut(&self.id).filter(|row| row.facts.stage == Stage::Lobby) else {
            return false; // it was sent away
        };
        (row.facts.stage, row.facts.export) = (Stage::Seated, Some(export.to_owned()));
        drop(rows);
        self.clients.0.left_lobby.notify(usize::MAX);
        true
    }

    /// Logs that clients have to wait, at most once in a while.
    fn warn(&self, export: &str) {
        let now = self.clients.0.clock.now();
        let mut rows = self.clients.rows();
        rows.unsaid += 1;
        if rows.warned.is_some_and(|last| now < last + WARNED_EVERY) {
            return;
        }
        rows.warned = Some(now);
        let times = std::mem::take(&mut rows.unsaid);
        let on_export = rows.of(export, Stage::Seated);
        let (seats, per_export) = (rows.seats, rows.seats_per_export);
        drop(rows);
        tracing::warn!(
            peer = self.peer,
            export,
            on_export,
            times,
            "a client must wait: the limit is {seats} connections, {per_export} per export; see --max-connections \
             and `vellum client list`"
        );
    }

    /// Its peer is gone, or it was disconnected: others may have its seat, whatever still hangs.
    pub(super) fn leave(&self) {
        let mut rows = self.clients.rows();
        let Some(row) = rows.all.get(&self.id).filter(|row| row.facts.stage == Stage::Seated) else {
            return;
        };
        let export = row.facts.export.clone().unwrap_or_default();
        if rows.of(&export, Stage::Lingering) < rows.seats_per_export
            && let Some(row) = rows.all.get_mut(&self.id)
        {
            row.facts.stage = Stage::Lingering;
            drop(rows);
            self.clients.0.freed.notify(usize::MAX);
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let mut rows = self.clients.rows();
        let had_export = rows.all.remove(&self.id).is_some_and(|row| row.facts.export.is_some());
        rows.is_deserted |= had_export && rows.all.is_empty();
        drop(rows);
        self.clients.0.freed.notify(usize::MAX);
        self.clients.0.left_lobby.notify(usize::MAX);
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use futures_lite::future::{block_on, poll_once};
    use vellum_core::LocalFuture;
    use vellum_sim::World;

    use super::*;

    struct Still;

    impl Clock for Still {
        fn now(&self) -> Duration {
            Duration::ZERO
        }

        fn sleep(&self, _wait: Duration) -> LocalFuture<'static, ()> {
            Box::pin(pending())
        }
    }

    fn clients(seats: usize, seats_per_export: usize, lobby: usize) -> Clients {
        let bounds = Bounds { seats, seats_per_export, lobby, memory_bytes: 1 << 20 };
        Clients::new(bounds, Arc::new(Still))
    }

    fn is_admitted(client: &Client, export: &str) -> bool {
        block_on(poll_once(client.admit(export))).is_some()
    }

    #[test]
    fn those_who_say_nothing_lock_nobody_out() {
        let all = clients(10, 10, 3);
        let silent: Vec<Client> = (0..3).map(|number| all.arrive(&format!("silent {number}"))).collect();
        let late = all.arrive("late");
        assert!(silent[0].shutdown().is_cut(), "the oldest connection makes room");
        assert!(!silent[1].shutdown().is_cut() && is_admitted(&late, "a"));
        assert!(!is_admitted(&silent[0], "a"), "who was sent away gets no seat");
        assert_eq!(all.census(), Census { lobby: 2, seated: 1, lingering: 1 });
        drop(silent);
        drop(late);
        assert!(all.is_empty());
    }

    #[test]
    fn a_client_has_time_to_speak_however_many_come_after_it() {
        let world = World::new(1);
        let bounds = Bounds { seats: 10, seats_per_export: 10, lobby: 3, memory_bytes: 1 << 20 };
        let all = Clients::new(bounds, world.clock());
        world.run(async {
            // A storm: each comes as soon as it may.
            let mut storm: Vec<(Client, Duration)> = Vec::new();
            for _ in 0..30 {
                all.may_arrive().await;
                storm.push((all.arrive("a storm"), world.now()));
                let is_rushed = |(one, since): &&(Client, Duration)| {
                    one.shutdown().is_cut() && world.now() < *since + SAY_SOMETHING
                };
                assert_eq!(storm.iter().filter(is_rushed).count(), 0);
            }
            assert!(is_admitted(&storm[29].0, "a"));
        });
        assert_eq!(world.now(), SAY_SOMETHING * 9, "three at a time");
        // One that leaves makes room at once.
        let quiet = clients(10, 10, 1);
        let only = quiet.arrive("one");
        let mut next = Box::pin(quiet.may_arrive());
        assert!(block_on(poll_once(&mut next)).is_none());
        drop(only);
        assert!(block_on(poll_once(&mut next)).is_some());
    }

    #[test]
    fn the_clients_of_one_export_leave_seats_to_others() {
        let all = clients(4, 2, 8);
        let of = |export: &'static str| {
            let client = all.arrive(export);
            (is_admitted(&client, export), client)
        };
        let ones: Vec<_> = (0..3).map(|_| of("a")).collect();
        assert_eq!(ones.iter().map(|(is_in, _)| *is_in).collect::<Vec<_>>(), [true, true, false]);
        let others: Vec<_> = (0..3).map(|_| of("b")).collect();
        assert_eq!(others.iter().filter(|(is_in, _)| *is_in).count(), 2);
    }

    #[test]
    fn one_whose_peer_is_gone_gives_its_seat_to_who_waits_but_not_without_end() {
        let all = clients(1, 1, 8);
        let hung = all.arrive("hung");
        assert!(is_admitted(&hung, "a"));
        let next = all.arrive("next");
        block_on(async {
            let mut admit = Box::pin(next.admit("a"));
            assert!(poll_once(&mut admit).await.is_none());
            hung.leave();
            admit.await;
        });
        assert_eq!(all.census(), Census { lobby: 0, seated: 1, lingering: 1 });
        next.leave();
        assert_eq!(all.census().seated, 1, "as many linger as may");
        drop(hung);
        next.leave();
        assert_eq!(all.census(), Census { lobby: 0, seated: 0, lingering: 1 });
    }

    #[test]
    fn seats_that_are_added_are_taken_at_once_and_those_taken_away_are_not_given_again() {
        let all = clients(1, 1, 8);
        let (first, second) = (all.arrive("first"), all.arrive("second"));
        assert!(is_admitted(&first, "a"));
        block_on(async {
            let mut admit = Box::pin(second.admit("a"));
            assert!(poll_once(&mut admit).await.is_none());
            all.set_seats(2, 2);
            assert!(poll_once(&mut admit).await.is_some(), "it hears of it");
        });
        all.set_seats(1, 1);
        assert_eq!(all.census().seated, 2, "no client is disconnected");
        drop(first);
        assert!(!is_admitted(&all.arrive("third"), "a"));
        drop(second);
        assert!(is_admitted(&all.arrive("fourth"), "a"));
    }

    #[test]
    fn a_client_is_listed_and_sent_away_by_its_number() {
        let all = clients(2, 2, 8);
        let client = all.arrive("somebody");
        client.identify("CN=one".to_owned());
        assert!(is_admitted(&client, "a"));
        let [facts] = &all.list()[..] else { panic!("there is one") };
        assert_eq!((facts.peer.as_str(), facts.subject.as_deref()), ("somebody", Some("CN=one")));
        assert_eq!((facts.export.as_deref(), facts.stage), (Some("a"), Stage::Seated));
        assert!(all.disconnect(facts.id) && client.shutdown().is_cut());
        assert!(!all.disconnect(facts.id + 1));
    }

    #[test]
    fn connections_beyond_the_limit_wait_until_one_has_left() {
        let all = clients(10, 10, 8);
        all.admit_at_most(2);
        let (first, second) = (all.arrive("first"), all.arrive("second"));
        assert!(is_admitted(&first, "a"));
        block_on(async {
            let mut next = Box::pin(all.may_arrive());
            assert!(poll_once(&mut next).await.is_none(), "one without an export counts too");
            drop(second);
            assert!(poll_once(&mut next).await.is_some());
        });
        let _second = all.arrive("second");
        block_on(async {
            let mut next = Box::pin(all.may_arrive());
            assert!(poll_once(&mut next).await.is_none());
            first.leave();
            assert!(poll_once(&mut next).await.is_some(), "its peer is gone");
        });
    }

    #[test]
    fn a_server_is_deserted_when_the_last_that_had_an_export_has_left() {
        let all = clients(10, 10, 8);
        let is_deserted = || block_on(poll_once(all.deserted())).is_some();
        drop(all.arrive("one that only lists"));
        assert!(!is_deserted());
        let (first, second) = (all.arrive("first"), all.arrive("second"));
        assert!(is_admitted(&first, "a") && is_admitted(&second, "a"));
        drop(first);
        assert!(!is_deserted());
        let lists = all.arrive("one that only lists");
        drop(second);
        assert!(!is_deserted());
        drop(lists);
        assert!(!is_deserted(), "it waits for one that uses an export, as before the first");
        let last = all.arrive("last");
        assert!(is_admitted(&last, "a"));
        last.leave();
        assert!(!is_deserted(), "its requests have not ended");
        drop(last);
        assert!(is_deserted());
    }

    #[test]
    fn more_exports_mean_more_seats() {
        assert_eq!([1, 8, 9, 1000].map(Bounds::seats_for), [128, 128, 144, 16_000]);
        assert_eq!(Bounds::new(1, 5).seats_per_export, 1);
    }
}
