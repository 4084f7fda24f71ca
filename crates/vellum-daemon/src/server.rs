//! A server: it opens disks, binds sockets, spreads connections over the workers, and ends all of it in good
//! order.
//!
//! ```text
//!   control (worker 0)   binds ► opens concurrently: each disk is served when it is open ► reports ready
//!                        ► handles signals
//!                        ► each disk drains and closes by itself ► counts
//!   accept, per socket   takes a connection, enters it in the list of clients, and gives it to the next worker
//!                        in turn (`door`)
//!   session              one per connection, on one worker; requests go to the shared disk
//!   device               one per vhost-user socket: one front end at a time, its queues on the workers (`vhost`)
//!   tending              one per disk that is written, on one worker: background work, and the watch over a device
//!                        that may become full (`served/tending.rs`)
//!   files                a file for each `--fuse`, served by all workers (`fuse`)
//!   block devices        one for each `--ublk`, their queues on the workers (`ublk`); one for each `--nbd-device`, a client of
//!                        this server in the kernel (`nbd_devices`)
//!   control socket       on worker 0, if there is one: commands to a running server (`control/`)
//!   watch                on worker 0, once a second: requests that take long, failures not yet logged (`meter`)
//! ```
//!
//! 1. One chain per image file, however many exports and sockets it has.
//! 2. On SIGTERM or SIGINT no new client is admitted, paused disks are resumed, and all disks end
//!    concurrently and independently: requests that were begun are answered, then the disk is closed. A
//!    second signal, or a drain that exceeds its time, cuts the connections. A snapshot that is being deleted
//!    is left half deleted, for the next opening.
//! 3. A disk that does not end, because its storage does not answer, does not keep others from being closed.
//!    It delays the end of the server only by the time of another drain, or until a third signal. It is named
//!    in the log, and the exit code reports it.
//! 4. A connection that fails, whatever its client did, ends alone. So does a file that another program
//!    unmounts.
//! 5. Tending ends before a disk is closed, and is never interrupted.
//! 6. SIGHUP reloads the certificates. No signal but SIGTERM, SIGINT and SIGKILL ends a server.

use std::cell::Cell;
use std::ops::ControlFlow;
use std::rc::Rc;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use event_listener::Event;
use futures_lite::future::{or, zip};
use vellum_core::{Error, ErrorKind, Result, join_all, lock};
use vellum_export::nbd::{Clients, Exports, View};
use vellum_export::{ConnectionSlots, Shutdown};
use vellum_format::fast::FastMedium;
use vellum_io::{Address, Listener, Signal, Signals, Task, WorkersHandle, clock, spawn_local, unblock};
use vellum_layer::hydrate::FillerTurns;

use crate::contained::{contained, in_rounds};
use crate::control::places::{CONNECTIONS_MAX, Places};
use crate::control::server::Control;
use crate::door::{Accepting, Bolt, Door};
use crate::flash::HostFlash;
use crate::fuse::FuseFiles;
use crate::metrics::Metrics;
use crate::nbd_devices::NbdDevices;
use crate::notify::NotifySocket;
use crate::seats::Seats;
use crate::served::{Disks, Group, How, Opening, PATIENCE, Served, SnapshotExports};
use crate::size_watchers::SizeWatchers;
use crate::spec::{ExportSpec, Ready, Report, ServeSpec};
use crate::tls::{TlsFiles, TlsNow};
use crate::ublk::Blocks;
use crate::vhost::{Devices, SocketId};

/// What closing disks may take at least, after connections were cut.
const CLOSING_MIN: Duration = Duration::from_secs(5);
/// How often it is looked for requests that take long.
const WATCHED_EVERY: Duration = Duration::from_secs(1);
/// Once the first disk is open, the others may take this long before NBD clients are admitted and find them
/// missing.
const OTHERS_TIME: Duration = Duration::from_secs(1);
/// How long it is waited for certificates that are read again.
const CERTIFICATES_IN: Duration = Duration::from_secs(10);
/// How often statistics are written.
const REPORTED_EVERY: Duration = Duration::from_secs(1);

/// What there is of a server, as far as it has started.
struct Server {
    spec: Rc<ServeSpec>,
    workers: WorkersHandle,
    exports: Exports,
    disks: Arc<Disks>,
    devices: Devices,
    /// Sockets that were bound at the start, by the names of their exports.
    sockets: Vec<(String, SocketId)>,
    size_watchers: SizeWatchers,
    shutdown: Shutdown,
    clients: Clients,
    seats: Seats,
    control_slots: ConnectionSlots,
    control_places: Places,
    tls: TlsNow,
    opening: Option<Arc<Opening>>,
    door: Door,
    /// Loops that let clients in.
    accepting: Accepting,
    files: FuseFiles,
    blocks: Blocks,
    nbd_devices: NbdDevices,
    telling: Option<Task<()>>,
}

/// What is open for all disks of a server, from before the first until after the last.
struct Media {
    flash: Option<Arc<HostFlash>>,
    fast: Option<Arc<FastMedium>>,
}

/// Why a server could not close all of its disks.
struct BadEnd {
    error: Error,
    hangs: bool,
}

/// Serves until there is a reason to end. Returns the report, and whether something hangs.
pub(crate) async fn run(
    spec: ServeSpec,
    workers: WorkersHandle,
    ready: impl FnOnce(Ready<'_>) -> Result<()>,
) -> (Result<Report>, bool) {
    // Signals first: one that comes while images are opened is not lost.
    let signals = Signals::new(&[
        Signal::Terminate,
        Signal::Interrupt,
        Signal::Hangup,
        Signal::Quit,
        Signal::User1,
        Signal::User2,
    ]);
    let (mut signals, tls) = match (signals, TlsNow::read(spec.tls.clone())) {
        (Ok(signals), Ok(tls)) => (signals, tls),
        (Err(error), _) | (_, Err(error)) => return (Err(error), false),
    };
    let flash = match &spec.flash {
        Some(flash) => match HostFlash::open(flash, &workers).await {
            Ok(flash) => Some(flash),
            Err(error) => return (Err(error), false),
        },
        None => None,
    };
    let fast = match &spec.fast {
        // A disk that is written needs a medium that can be.
        Some(path) => {
            match crate::tier::medium_to_read(Some(path), spec.image.salvages && spec.image.read_only).await {
                Ok(fast) => fast,
                // Two servers with one medium are a mistake, and so is one that is asked to be complete without it.
                Err(error) if spec.require_all || error.kind() == ErrorKind::Locked => {
                    return (Err(error), false);
                }
                Err(error) => {
                    tracing::warn!("{} (disks are served from their images alone)", error.chain());
                    None
                }
            }
        }
        None => None,
    };
    let mut server = Server::new(spec, workers, tls, Media { flash: flash.clone(), fast });
    let (disks, stats_path) = (server.disks.clone(), server.spec.stats_path.clone());
    let mut reporting = None;
    let result = server.run(&mut signals, ready, &mut reporting).await;
    let closed = server.end(&mut signals).await;
    if let Some(reporting) = reporting {
        reporting.end().await;
    }
    let hangs = matches!(&closed, Err(end) if end.hangs);
    // A disk that hangs may still use it.
    let flash_closed = match flash.filter(|_| !hangs) {
        Some(flash) => flash.end().await,
        None => Ok(()),
    };
    let stats = disks.stats(&Exports::new());
    disks.drop_closed();
    let written = match stats_path.filter(|_| result.is_ok()) {
        None => Ok(()),
        Some(path) => {
            let stats = stats.clone();
            // A file whose storage does not answer delays the server no longer than this.
            let late = async {
                clock().sleep(CLOSING_MIN).await;
                Err(Error::new(ErrorKind::Io, "the last statistics could not be written in time"))
            };
            or(unblock(move || stats.write_to(&path)), late).await
        }
    };
    let report = match (result, closed) {
        (Err(error), _) => Err(error),
        (Ok(_), Err(end)) => Err(end.error),
        (Ok(signal), Ok(())) => flash_closed.and(written).map(|()| Report { stats, signal }),
    };
    (report, hangs)
}

impl Server {
    fn new(spec: ServeSpec, workers: WorkersHandle, tls: TlsNow, Media { flash, fast }: Media) -> Self {
        let exports = Exports::new();
        let how = How {
            grow_hook: spec.grow_hook.clone(),
            is_steered: spec.control_path.is_some(),
            is_durable: spec.durable,
            holds_when_full: spec.hold_when_full,
            sparse: spec.sparse,
            part: spec.part,
            patience: PATIENCE,
            templates: Arc::default(),
            copy_memory: Arc::default(),
            filler_turns: FillerTurns::default(),
            flash,
            warms: spec.tier_heat && fast.is_some(),
            fast,
        };
        let disks = Disks::new(how, exports.clone(), workers.clone());
        exports.also(Arc::new(SnapshotExports(disks.clone())));
        let devices = Devices::new(&workers, &exports, spec.rights.clone());
        let (shutdown, seats) = (Shutdown::new(), Seats::new(&spec, &disks));
        let clients = seats.clients().clone();
        spec.connections_at_once.into_iter().for_each(|most| clients.admit_at_most(most));
        let door = Door {
            bolt: Bolt::default(),
            exports: exports.clone(),
            clients: clients.clone(),
            shutdown: shutdown.clone(),
            session_limits: spec.session_limits.clone(),
            tls: tls.clone(),
            workers: workers.clone(),
            next_worker: Arc::new(AtomicUsize::new(0)),
        };
        Self {
            size_watchers: SizeWatchers::new(devices.clone()),
            devices,
            sockets: Vec::new(),
            disks,
            exports,
            shutdown,
            clients,
            seats,
            control_slots: ConnectionSlots::new(CONNECTIONS_MAX),
            control_places: Places::default(),
            tls,
            opening: None,
            door,
            accepting: Accepting::default(),
            files: FuseFiles::default(),
            blocks: Blocks::default(),
            nbd_devices: NbdDevices::default(),
            telling: None,
            workers,
            spec: Rc::new(spec),
        }
    }

    fn ears(&self) -> Ears {
        Ears {
            tls: self.tls.clone(),
            disks: self.disks.clone(),
            exports: self.exports.clone(),
            tell: self.spec.tell,
        }
    }

    /// Starts, and serves until there is a reason to end. [`Server::end`] ends whatever was started by then.
    async fn run(
        &mut self,
        signals: &mut Signals,
        ready: impl FnOnce(Ready<'_>) -> Result<()>,
        reporting: &mut Option<Reporting>,
    ) -> Result<Option<Signal>> {
        let (ears, drain_time) = (self.ears(), self.spec.drain_time);
        let heard = async { ears.asked_to_end(signals).await.map(Err) };
        let addresses = match or(async { self.bind().await.map(Ok) }, heard).await? {
            Ok(addresses) => addresses,
            Err(signal) => return Ok(Some(signal)),
        };
        let opened = {
            let opened = async { self.open().await.map(|()| None) };
            let ended = async { ears.asked_to_end(signals).await.map(Some) };
            or(opened, ended).await?
        };
        if opened.is_some() {
            return Ok(opened);
        }
        self.opening = None;
        let heard = Cell::new(None);
        let late = async {
            heard.set(Some(ears.asked_to_end(signals).await?));
            // What is half mounted would stay behind.
            clock().sleep(drain_time).await;
            Ok(())
        };
        or(self.show(), late).await?;
        if let Some(signal) = heard.get() {
            return Ok(Some(signal));
        }
        self.door.bolt.draw();
        let (disks, exports) = (self.disks.clone(), self.exports.clone());
        *reporting = self.spec.stats_path.clone().map(|path| Reporting::begin(disks, exports, path));
        let disks: Vec<_> = self.disks.all().iter().map(|disk| disk.introduction()).collect();
        let mut blocks = self.blocks.paths();
        blocks.extend(self.nbd_devices.paths());
        ready(Ready { addresses: &addresses, blocks: &blocks, disks: &disks })?;
        self.telling =
            self.spec.notify.clone().map(|manager| spawn_local(async move { manager.is_ready().await }));
        let signal = async { ears.asked_to_end(signals).await.map(Some) };
        let (ends_with_clients, clients) = (self.spec.ends_with_clients, self.clients.clone());
        let deserted = async move {
            match ends_with_clients {
                true => clients.deserted().await,
                false => std::future::pending().await,
            }
            Ok(None)
        };
        let tls = self.tls.clone();
        let watched = async { match tls.watch().await {} };
        or(or(signal, watched), or(deserted, self.unused(addresses.is_empty()))).await
    }

    /// Opens the images. Each is served as soon as it is open.
    async fn open(&mut self) -> Result<()> {
        let opening = self.disks.open_all(Group::all_of(&self.spec.exports).await);
        self.opening = Some(opening.clone());
        let front = (&self.devices, &self.sockets[..], &self.seats);
        opened(&opening, &self.spec, &self.disks, front, &self.door.bolt).await
    }

    /// Binds all that clients find, and lets them in: they find each disk from when it is open.
    async fn bind(&mut self) -> Result<Vec<(Address, Vec<String>)>> {
        let spec = self.spec.clone();
        let mut names: Vec<&str> = spec.exports.iter().map(|export| export.name.as_str()).collect();
        names.sort_unstable();
        if let Some(twice) = names.windows(2).find(|two| two[0] == two[1]) {
            let why = format!("an export named {:?} already exists", twice[0]);
            return Err(Error::new(ErrorKind::Locked, why));
        }
        // The control socket first: a client that finds the server can control it.
        if let Some(path) = &spec.control_path {
            let control = Control {
                spec: spec.clone(),
                disks: self.disks.clone(),
                exports: self.exports.clone(),
                devices: self.devices.clone(),
                shutdown: self.shutdown.clone(),
                slots: self.control_slots.clone(),
                places: self.control_places.clone(),
                clients: self.clients.clone(),
                seats: self.seats.clone(),
                size_watchers: self.size_watchers.clone(),
                door: self.door.clone(),
                accepting: self.accepting.clone(),
            };
            let listener = Listener::bind_private(path).await?;
            self.accepting.begin(None, control.accept(listener));
        }
        if let Some(address) = &spec.metrics {
            let listener = Listener::bind(address).await?;
            spec.rights.give_to(listener.address())?;
            let metrics = Metrics { disks: self.disks.clone(), exports: self.exports.clone() };
            self.accepting.begin(None, metrics.accept(listener));
        }
        let mut listeners: Vec<(Listener, Option<Vec<String>>)> =
            spec.passed.iter().map(|passed| (Listener::from(passed), None)).collect();
        for (address, names) in places(&spec)? {
            warn_if_open_to_all(&address, spec.tls.as_ref());
            let listener = Listener::bind(&address).await?;
            spec.rights.give_to(listener.address())?;
            listeners.push((listener, names));
        }
        for device in &spec.vhost {
            let bound = self.devices.bind(device, &spec.exports).await?;
            self.sockets.push(bound);
        }
        let mut addresses = Vec::new();
        for (listener, names) in listeners {
            let all = || spec.exports.iter().map(|export| export.name.clone()).collect();
            addresses.push((listener.address().clone(), names.clone().unwrap_or_else(all)));
            let door = self.door.showing(View { names, on_demand: spec.export_snapshots });
            self.accepting.begin(None, door.accept(listener));
        }
        let disks = self.disks.clone();
        self.accepting.begin(None, async move {
            in_rounds("the watch for slow requests", async || {
                clock().sleep(WATCHED_EVERY).await;
                disks.all().iter().for_each(|disk| disk.record().look());
                ControlFlow::Continue(())
            })
            .await;
        });
        Ok(addresses)
    }

    /// Shows the disks as files and as block devices.
    async fn show(&mut self) -> Result<()> {
        let spec = &self.spec;
        // An image that could not be opened is not exported; that was logged.
        let is_there = |name: &Option<String>| match name {
            Some(name) => {
                self.disks.find(Some(name)).is_ok() || !spec.exports.iter().any(|one| one.name == *name)
            }
            None => true,
        };
        let files: Vec<_> = spec.fuse.iter().filter(|file| is_there(&file.export)).cloned().collect();
        let blocks: Vec<_> = spec.ublk.iter().filter(|block| is_there(&block.export)).cloned().collect();
        self.files = FuseFiles::begin(&files, &spec.exports, &self.disks, &self.workers).await?;
        let where_to = (&self.workers, spec.mode);
        self.blocks = Blocks::begin(&blocks, &spec.exports, &self.disks, where_to, &self.shutdown).await?;
        let devices: Vec<_> =
            spec.nbd_devices.iter().filter(|device| is_there(&device.export)).cloned().collect();
        self.nbd_devices =
            NbdDevices::begin(&devices, &self.disks, &self.door, spec.connections_at_once).await?;
        let (files, blocks) = (self.files.size_notifiers(), self.blocks.size_notifiers());
        self.size_watchers.add(files, blocks, self.nbd_devices.size_notifiers());
        Ok(())
    }

    /// Completes when the server has become unreachable for all clients although no signal came.
    async fn unused(&self, has_no_socket: bool) -> Result<Option<Signal>> {
        let spec = &self.spec;
        let serves_others = spec.fuse.is_empty() && spec.ublk.is_empty() && spec.nbd_devices.is_empty()
            || !has_no_socket
            || !spec.vhost.is_empty()
            || spec.control_path.is_some();
        let unmounted = async {
            if !spec.fuse.is_empty() {
                self.files.unmounted().await;
            }
        };
        let ((), gone) = zip(unmounted, zip(self.blocks.gone(), self.nbd_devices.gone())).await;
        let gone = gone.0.and(gone.1);
        if serves_others {
            std::future::pending::<()>().await;
        }
        gone.map(|()| None)
    }

    /// Ends everything that was started. Each disk is closed as soon as it is not in use.
    async fn end(mut self, signals: &mut Signals) -> Result<(), BadEnd> {
        tracing::info!("draining");
        let ears = self.ears();
        if let Some(task) = self.telling.take() {
            task.cancel().await; // messages that have not been sent by now are out of date
        }
        self.spec.notify.iter().for_each(NotifySocket::is_stopping);
        self.accepting.end(None).await; // the sockets are closed and their files removed
        self.disks.flash().iter().for_each(|flash| flash.server_ends());
        let all = self.disks.end();
        all.iter().for_each(|disk| disk.open_for_good()); // what waits at a paused disk was begun, too
        // While their sessions are there: the kernel writes what it has cached.
        let devices = std::mem::take(&mut self.nbd_devices);
        let shown = devices.paths();
        let ended = async {
            devices.end().await;
            true
        };
        let late = async {
            or(clock().sleep(self.spec.drain_time), async { drop(ears.asked_to_end(signals).await) }).await;
            false
        };
        if !or(ended, late).await {
            tracing::warn!(
                "not disconnected in time, and what the kernel has cached of it may be lost: {shown:?}"
            );
        }
        self.shutdown.drain();
        let (files, blocks) = (std::mem::take(&mut self.files), std::mem::take(&mut self.blocks));
        // The errors of closing, including those of disks that are closed while others are not.
        let failures: Arc<Mutex<Vec<Error>>> = Arc::default();
        let closing: Vec<_> = all
            .iter()
            .map(|disk| {
                let (disk, exports, failures) = (disk.clone(), self.exports.clone(), failures.clone());
                // On all workers, as closing may take them some time each.
                self.workers.spawn(disk.number() % self.workers.count(), move || async move {
                    let what = format!("closing {}", disk.shown());
                    if let Err(error) = contained(&what, disk.end(&exports)).await {
                        tracing::error!("a disk was not closed cleanly: {}", error.chain());
                        lock(&failures).push(error);
                    }
                })
            })
            .collect();
        let first_failure = || lock(&failures).first().cloned();
        let sessions = async {
            let is_asked = || self.control_slots.taken() > 0 || self.control_places.under_way() > 0;
            while !self.clients.is_empty() || is_asked() {
                clock().sleep(Duration::from_millis(5)).await;
            }
        };
        let left_over = async {
            if let Some(opening) = &self.opening {
                opening.give_up();
                while opening.next().await.is_some() {}
            }
        };
        let others =
            zip(zip(self.devices.drained(None), sessions), zip(files.end(&self.shutdown), blocks.end()));
        let closed = zip(zip(join_all(closing), left_over), others);
        let closed = async {
            let ((closed, ()), _) = closed.await;
            // A worker that has ended has closed nothing.
            let ended = closed.into_iter().collect::<Result<Vec<()>>>().err();
            first_failure().or(ended).map_or(Ok(()), |error| Err(BadEnd { error, hangs: false }))
        };
        let impatient = async {
            let spec = &self.spec;
            or(async { drop(ears.asked_to_end(signals).await) }, clock().sleep(spec.drain_time)).await;
            tracing::warn!("closing the remaining connections");
            self.shutdown.cut();
            self.devices.cut();
            let closing = clock().sleep(spec.drain_time.max(CLOSING_MIN));
            or(async { drop(ears.asked_to_end(signals).await) }, closing).await;
            let hung = self.disks.what_hangs();
            if hung.is_empty() {
                // The remaining clients use no disk. All the same it is not a clean end. A command whose
                // client has left has no connection, and is counted all the same.
                let asked = self.control_slots.taken().max(self.control_places.under_way());
                let left = self.clients.list().len() + asked;
                let sessions = if left == 1 { "1 session".to_owned() } else { format!("{left} sessions") };
                let why = format!(
                    "{sessions} did not end although their connections were cut; all disks have been closed"
                );
                let error = first_failure().unwrap_or_else(|| Error::new(ErrorKind::Io, why));
                return Err(BadEnd { error, hangs: true });
            }
            hung.iter().for_each(|what| tracing::error!("not closed: {what}"));
            let (disks, what) = (if hung.len() == 1 { "disk" } else { "disks" }, hung.join("; "));
            let others = match first_failure() {
                None => "the others are closed".to_owned(),
                Some(error) => format!("of the others, one was not closed cleanly ({})", error.chain()),
            };
            let error = format!(
                "{} {disks} could not be closed because the storage does not answer; flushed data is safe, \
                 {others}: {what}",
                hung.len()
            );
            Err(BadEnd { error: Error::new(ErrorKind::Io, error), hangs: true })
        };
        or(closed, impatient).await
    }
}

/// What hears signals.
struct Ears {
    tls: TlsNow,
    disks: Arc<Disks>,
    exports: Exports,
    tell: fn(&str),
}

impl Ears {
    /// The next signal that ends the server. Others are handled.
    async fn asked_to_end(&self, signals: &mut Signals) -> Result<Signal> {
        loop {
            match signals.next().await? {
                signal @ (Signal::Terminate | Signal::Interrupt) => return Ok(signal),
                Signal::Hangup => {
                    let tls = self.tls.clone();
                    // A directory that does not answer must not delay the handling of the next signal.
                    or(unblock(move || tls.read_again()), clock().sleep(CERTIFICATES_IN)).await;
                }
                _ => (self.tell)(&self.disks.stats(&self.exports).line()),
            }
        }
    }
}

/// The clients of a disk that has broken its rules leave: it answers nothing until it is opened again.
pub(crate) fn send_away_when_broken(served: &Arc<Served>, clients: &Clients) {
    let (there, clients) = (Arc::downgrade(served), clients.clone());
    served.disk().when_broken(move |why| {
        // The exports that it has by then. The clients of one that is being removed are already asked to
        // leave, and another disk may have the name.
        let names = there.upgrade().map_or(Vec::new(), |served| served.offered());
        tracing::error!(exports = ?names, "a disk is out of service until it is reopened: {why}");
        clients.disconnect_from(&names);
    });
}

/// The addresses for NBD clients: each once, with the names that are given for it; all names if it is once
/// given without one.
fn places(spec: &ServeSpec) -> Result<Vec<(Address, Option<Vec<String>>)>> {
    let mut places: Vec<(Address, Option<Vec<String>>)> = Vec::new();
    for nbd in &spec.nbd {
        let is_it = |export: &ExportSpec, name: &str| {
            name.strip_prefix(export.name.as_str())
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('@'))
        };
        if let Some(name) = &nbd.export
            && !spec.exports.iter().any(|export| is_it(export, name))
        {
            let why = format!("there is no export {name:?} to offer at {}", nbd.address);
            return Err(Error::invalid(why));
        }
        match (places.iter_mut().find(|(address, _)| *address == nbd.address), &nbd.export) {
            (None, export) => places.push((nbd.address.clone(), export.clone().map(|name| vec![name]))),
            (Some((_, Some(names))), Some(name)) => names.push(name.clone()),
            (Some((_, names)), _) => *names = None,
        }
    }
    Ok(places)
}

/// Warns if every client that can reach this host may read and write the disks.
pub(crate) fn warn_if_open_to_all(address: &Address, tls: Option<&TlsFiles>) {
    let is_open = match address {
        Address::Tcp { host, .. } => matches!(host.as_str(), "0.0.0.0" | "::" | "*"),
        Address::Unix(_) => false,
    };
    if is_open && !tls.is_some_and(|tls| tls.is_required) {
        tracing::warn!(
            "{address} accepts connections from every network without TLS: anyone who can reach it can use the \
             exports; use --tls-certificates, or listen on one address"
        );
    }
}

/// Waits until every image is open, or could not be opened; each that is open is served meanwhile.
async fn opened(
    opening: &Opening,
    spec: &ServeSpec,
    disks: &Disks,
    (devices, sockets, seats): (&Devices, &[(String, SocketId)], &Seats),
    bolt: &Bolt,
) -> Result<()> {
    let all = async {
        let ids: Vec<_> = sockets.iter().map(|(_, id)| *id).collect();
        let (mut failed, mut drawing): (Option<Error>, Option<Task<()>>) = (None, None);
        while let Some((group, opened)) = opening.next().await {
            seats.opened(group.exports.len());
            match opened {
                Ok(served) => {
                    if served.may_miss_writes().await {
                        tell_what_may_be_missing(spec, &served.shown());
                    }
                    send_away_when_broken(&served, seats.clients());
                    devices.begin(&served, &ids);
                    let bolt = bolt.clone();
                    let one_is_open = async move {
                        clock().sleep(OTHERS_TIME).await;
                        bolt.draw();
                    };
                    // Images that take long are not waited for.
                    drawing.get_or_insert_with(|| spawn_local(one_is_open));
                }
                Err(error) if spec.require_all => return Err(error),
                Err(error) => {
                    let others = opening.others();
                    if others > 0 {
                        tracing::error!("{} (the other images are served)", error.chain());
                    }
                    let is_its = |name: &String| group.exports.iter().any(|export| export.name == *name);
                    let its = sockets.iter().filter(|(name, _)| is_its(name));
                    its.for_each(|(_, id)| devices.forget(*id));
                    failed = failed.or(Some(error));
                }
            }
        }
        match failed {
            Some(error) if disks.all().is_empty() => Err(error),
            _ if spec.grow_hook.is_some() && disks.all().iter().all(|disk| disk.growing().is_none()) => {
                Err(Error::invalid(
                    "--grow-hook needs a writable vellum image with layout=zoned or layout=table on a block device; \
                     none is served",
                ))
            }
            _ => Ok(()),
        }
    };
    let telling = async {
        match &spec.notify {
            Some(manager) => manager.is_starting().await,
            None => std::future::pending().await,
        }
    };
    or(all, telling).await
}

/// The previous user of the image did not close it. Front ends of virtual machines say whether they were
/// connected before; NBD clients do not.
pub(crate) fn tell_what_may_be_missing(spec: &ServeSpec, path: &str) {
    let serves_nbd = !spec.nbd.is_empty() || !spec.passed.is_empty();
    if serves_nbd || !spec.fuse.is_empty() {
        tracing::warn!(
            "{path} was not closed by its last server: writes that were acknowledged but not flushed may be \
             missing. An NBD client that reconnects on its own does not notice: restart it, or the program \
             that uses its disk. With --durable no acknowledged write is lost"
        );
    }
}

/// Statistics that are written at intervals.
struct Reporting {
    ends: Arc<Event>,
    task: Task<()>,
}

impl Reporting {
    fn begin(disks: Arc<Disks>, exports: Exports, path: std::path::PathBuf) -> Self {
        let ends = Arc::new(Event::new());
        let ended = ends.listen();
        let task = spawn_local(async move {
            let mut ended = ended;
            let mut said: Option<String> = None;
            in_rounds("writing statistics", async || {
                let wait = async {
                    clock().sleep(REPORTED_EVERY).await;
                    false
                };
                let end = async {
                    (&mut ended).await;
                    true
                };
                if or(end, wait).await {
                    return ControlFlow::Break(());
                }
                let (now, path) = (disks.stats(&exports), path.clone());
                let failed = unblock(move || now.write_to(&path)).await.err().map(|error| error.chain());
                if let Some(error) = failed.as_ref().filter(|error| said.as_ref() != Some(*error)) {
                    tracing::warn!("{error}");
                }
                said = failed;
                ControlFlow::Continue(())
            })
            .await;
        });
        Self { ends, task }
    }

    /// Stops writing. A write in progress has ended when this returns, unless the storage of its file does
    /// not answer.
    async fn end(self) {
        self.ends.notify(usize::MAX);
        or(self.task, clock().sleep(CLOSING_MIN)).await;
    }
}
