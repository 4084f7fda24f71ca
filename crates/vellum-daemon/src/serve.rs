//! A server: disks opened, sockets bound, connections spread over the workers, and all of it ended in good order.
//!
//! ```text
//!   control (worker 0)   opens chains ► binds ► says "ready" ► waits for a signal ► drains ► closes ► counts
//!   accept, per socket   takes a connection slot, a connection, and gives it to the next worker in turn
//!   session              one per connection, on one worker; requests go to the shared disk
//!   device               one per vhost-user socket: one front end at a time, its queues on the workers (`vhost`)
//!   tending              one per disk that is written, on one worker: the work that nobody waits for; and who looks after
//!                        its device, where it has one that may become full
//!   files                a file for each `--fuse`, done by all workers (`fuse`)
//!   block devices        one for each `--ublk`, their queues on the workers (`ublk`)
//!   control socket       on worker 0, when there is one: what can be asked of a server that runs (`control/`)
//! ```
//!
//! 1. One chain per image file, however many exports and sockets it has.
//! 2. On SIGTERM or SIGINT nobody new is let in, paused disks are resumed, requests that were begun are answered, then every disk is closed; a
//!    second signal, or a drain that takes longer than it may, cuts the connections but still closes the disks. A snapshot
//!    that is being deleted is left half deleted, for the next opening; other requests of the control socket are waited for.
//! 3. A connection that fails, whatever its client did, ends alone. A file that is unmounted by somebody else ends alone, too.
//! 4. Tending ends before the disks are closed, and is never cut off half way.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use futures_lite::future::{block_on, or, zip};
use vellum_core::{Disk, Error, ErrorKind, Result};
use vellum_export::fuse::allocate_without_write_back;
use vellum_export::nbd::{Export, Exports, Limits, TlsPolicy, serve_connection_with};
use vellum_export::{ConnectionSlots, Shutdown};
use vellum_io::{
    Address, IoMode, Listener, PassedSocket, Signal, Signals, Spawned, Workers, WorkersConfig, WorkersHandle,
    clock, spawn_local, unblock,
};
use vellum_layer::valve::Settings;

use crate::control::server::{CONNECTIONS_MAX, Control};
use crate::fuse::{FuseFiles, FuseSpec};
use crate::grow::GrowHook;
use crate::image::ImageOptions;
use crate::lookers::Lookers;
use crate::notify::NotifySocket;
use crate::served::{Disks, Served, SnapshotExports};
use crate::stats::Stats;
use crate::ublk::Blocks;
use crate::vhost::{Devices, VhostSpec};

/// A disk to be served, and under which name.
#[derive(Debug, Clone)]
pub struct ExportSpec {
    /// The export's name; empty for the default.
    pub name: String,
    /// The image.
    pub path: PathBuf,
    /// How it is opened.
    pub image: ImageOptions,
    /// A line about it for who lists the exports.
    pub description: String,
    /// How its requests are limited. Of several exports of one image those of the first count.
    pub limits: Settings,
}

/// What a server is to do.
#[derive(Debug, Clone)]
pub struct ServeSpec {
    /// What is served.
    pub exports: Vec<ExportSpec>,
    /// Where NBD clients are waited for.
    pub nbd: Vec<Address>,
    /// Sockets at which NBD clients are waited for, too: a service manager has opened them.
    pub passed: Vec<PassedSocket>,
    /// Whether NBD clients may, or must, talk TLS.
    pub tls: TlsPolicy,
    /// Where front ends of vhost-user-blk are waited for.
    pub vhost: Vec<VhostSpec>,
    /// Files that show the disks.
    pub fuse: Vec<FuseSpec>,
    /// Block devices of this kernel that show the disks.
    pub ublk: Vec<UblkSpec>,
    /// Workers.
    pub threads: usize,
    /// How they reach the kernel.
    pub mode: IoMode,
    /// How long a worker looks for something to do before it sleeps; zero, never.
    pub poll_max: Duration,
    /// Connections at once, over all sockets.
    pub connections_max: usize,
    /// What one connection may take.
    pub limits: Limits,
    /// How long a drain may take before connections are cut.
    pub drain_time: Duration,
    /// Makes a device larger that becomes full.
    pub grow_hook: Option<GrowHook>,
    /// Where statistics are written, once a second and at the end.
    pub stats_path: Option<PathBuf>,
    /// Where it can be asked things while it serves: a Unix socket for its owner alone.
    pub control_path: Option<PathBuf>,
    /// Who is told when clients can connect, and when no more are let in.
    pub notify: Option<NotifySocket>,
}

/// A block device that is to show a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UblkSpec {
    /// The export's name; nothing where there is one disk only.
    pub export: Option<String>,
    /// The N of `/dev/ublkbN`; the first that is free, when not said.
    pub number: Option<u32>,
    /// How many queues it has; as many as there are workers, when not said. The kernel makes no more than it has processors.
    pub queues: Option<u16>,
    /// It outlives a server that is killed, and waits for the next. Each write is durable when it is answered.
    pub keeps: bool,
}

/// What a server that is ready has found out.
#[derive(Debug, Clone, Copy)]
pub struct Ready<'a> {
    /// The addresses of NBD, as they are bound.
    pub addresses: &'a [Address],
    /// The block devices.
    pub blocks: &'a [PathBuf],
}

/// What became of a server that ended in good order.
#[derive(Debug, Clone)]
pub struct Report {
    /// What was counted, taken after everything was closed.
    pub stats: Stats,
    /// Which signal ended it; none when its files were unmounted, or its block devices taken away, and there
    /// was nothing else to serve.
    pub signal: Option<Signal>,
}

/// Serves until a signal comes. `ready` is called once clients can connect.
///
/// # Errors
/// What keeps it from starting, or what a disk said when it was closed: then flushed data is safe, and the error says
/// what is not.
pub fn serve(spec: ServeSpec, ready: impl FnOnce(Ready<'_>) + Send + 'static) -> Result<Report> {
    spec.limits.check()?;
    if !spec.fuse.is_empty() || !spec.ublk.is_empty() {
        // Before there are threads: all of them take part.
        allocate_without_write_back();
    }
    let workers =
        Workers::start(WorkersConfig { threads: spec.threads, mode: spec.mode, poll_max: spec.poll_max })?;
    let handle = workers.handle();
    let control = workers.spawn(0, move || control(spec, handle, ready));
    let report = block_on(control)?;
    workers.shutdown();
    report
}

async fn control(spec: ServeSpec, workers: WorkersHandle, ready: impl FnOnce(Ready<'_>)) -> Result<Report> {
    // Signals first: one that comes while images are opened is not lost.
    let mut signals = Signals::new(&[Signal::Terminate, Signal::Interrupt])?;
    let served =
        Arc::new(Disks::open(&spec.exports, spec.grow_hook.as_ref(), spec.control_path.is_some()).await?);
    let tending = Tending::begin(&served, &workers);
    let result = run(&spec, &served, workers, &mut signals, ready).await;
    tending.end().await;
    let closed = served.close().await;
    let signal = result?;
    closed?;
    let stats = Stats::of(&served, &Exports::new());
    if let Some(path) = &spec.stats_path {
        stats.write_to(path)?;
    }
    Ok(Report { stats, signal })
}

async fn run(
    spec: &ServeSpec,
    served: &Arc<Disks>,
    workers: WorkersHandle,
    signals: &mut Signals,
    ready: impl FnOnce(Ready<'_>),
) -> Result<Option<Signal>> {
    let exports = Exports::new();
    for export in &spec.exports {
        exports.add(Export {
            name: export.name.clone(),
            description: export.description.clone(),
            disk: served.find(Some(&export.name))?.disk(),
            read_only: export.image.read_only,
        })?;
    }
    exports.also(Arc::new(SnapshotExports(served.clone())));
    // The control socket first: who finds the server can control it.
    let control_listener = match &spec.control_path {
        Some(path) => Some(Listener::bind_private(path).await?),
        None => None,
    };
    let mut listeners: Vec<Listener> = spec.passed.iter().map(Listener::from).collect();
    for address in &spec.nbd {
        listeners.push(Listener::bind(address).await?);
    }
    let shutdown = Shutdown::new();
    let files = FuseFiles::begin(&spec.fuse, &spec.exports, served, &workers).await?;
    let devices = match Devices::open(&spec.vhost, &spec.exports, &exports, &workers).await {
        Ok(devices) => devices,
        Err(error) => {
            shutdown.drain();
            files.end(&shutdown).await;
            return Err(error);
        }
    };
    let blocks =
        match Blocks::begin(&spec.ublk, &spec.exports, served, (&workers, spec.mode), &shutdown).await {
            Ok(blocks) => blocks,
            Err(error) => {
                shutdown.drain();
                devices.drained().await;
                files.end(&shutdown).await;
                return Err(error);
            }
        };
    let addresses: Vec<Address> = listeners.iter().map(|listener| listener.address().clone()).collect();
    let slots = ConnectionSlots::new(spec.connections_max);
    let next_worker = Arc::new(AtomicUsize::new(0));
    let control = Control {
        disks: served.clone(),
        exports: exports.clone(),
        shutdown: shutdown.clone(),
        slots: ConnectionSlots::new(CONNECTIONS_MAX),
        lookers: Lookers { sessions: devices.sessions(), files: files.tellers(), blocks: blocks.tellers() },
    };
    let controlled = control_listener.map(|listener| spawn_local(control.clone().accept(listener)));
    let accepting: Vec<_> = listeners
        .into_iter()
        .map(|listener| {
            let door = Door {
                exports: exports.clone(),
                slots: slots.clone(),
                shutdown: shutdown.clone(),
                limits: spec.limits.clone(),
                tls: spec.tls.clone(),
                workers: workers.clone(),
                next_worker: next_worker.clone(),
            };
            spawn_local(door.accept(listener))
        })
        .collect();
    let reporting = spec.stats_path.clone().map(|path| {
        let (served, exports) = (served.clone(), exports.clone());
        spawn_local(async move {
            loop {
                clock().sleep(Duration::from_secs(1)).await;
                let (now, path) = (Stats::of(&served, &exports), path.clone());
                if let Err(error) = unblock(move || now.write_to(&path)).await {
                    tracing::warn!("{}", error.chain());
                }
            }
        })
    });
    ready(Ready { addresses: &addresses, blocks: &blocks.paths() });
    let telling = spec.notify.clone().map(|manager| spawn_local(async move { manager.is_ready().await }));

    let serves_others = spec.fuse.is_empty() && spec.ublk.is_empty()
        || !addresses.is_empty()
        || !spec.vhost.is_empty()
        || spec.control_path.is_some();
    let unused = async {
        let unmounted = async {
            if !spec.fuse.is_empty() {
                files.unmounted().await;
            }
        };
        let ((), gone) = zip(unmounted, blocks.gone()).await;
        if serves_others {
            std::future::pending::<()>().await;
        }
        gone.map(|()| None)
    };
    let signal = or(async { signals.next().await.map(Some) }, unused).await;
    tracing::info!(?signal, "draining");
    if let Some(task) = telling {
        task.cancel().await; // what it has not been told by now is no longer so
    }
    spec.notify.iter().for_each(NotifySocket::is_stopping);
    for task in accepting {
        task.cancel().await; // the sockets are closed and their files removed
    }
    if let Some(task) = controlled {
        task.cancel().await;
    }
    for disk in served.iter() {
        disk.open_for_good(); // what waits at a paused disk was begun, too
    }
    shutdown.drain();
    let drained = async {
        while slots.taken() > 0 || control.slots.taken() > 0 {
            // Again and again: who was waiting for a disk that was being resized may begin only now.
            served.iter().for_each(Served::stop_background);
            clock().sleep(Duration::from_millis(5)).await;
        }
    };
    let drained = async {
        zip(zip(devices.drained(), drained), zip(files.end(&shutdown), blocks.end())).await;
    };
    let impatient = async {
        or(async { drop(signals.next().await) }, clock().sleep(spec.drain_time)).await;
        tracing::warn!("cutting the connections that are left");
        shutdown.cut();
        devices.cut();
        std::future::pending().await
    };
    or(drained, impatient).await;
    if let Some(task) = reporting {
        task.cancel().await;
    }
    signal
}

/// Where connections come in.
struct Door {
    exports: Exports,
    slots: ConnectionSlots,
    shutdown: Shutdown,
    limits: Limits,
    tls: TlsPolicy,
    workers: WorkersHandle,
    next_worker: Arc<AtomicUsize>,
}

impl Door {
    async fn accept(self, listener: Listener) {
        loop {
            // A slot first: a client that finds the server full waits in the socket's queue.
            let slot = self.slots.take().await;
            let socket = match listener.accept().await {
                Ok(socket) => socket,
                Err(error) if error.kind() == ErrorKind::NoSpace => {
                    tracing::warn!("{}", error.chain());
                    continue;
                }
                Err(error) => {
                    tracing::error!(
                        "no more clients are let in at {}: {}",
                        listener.address(),
                        error.chain()
                    );
                    return;
                }
            };
            let worker = self.next_worker.fetch_add(1, Ordering::Relaxed) % self.workers.count();
            let (exports, shutdown, limits, tls) =
                (self.exports.clone(), self.shutdown.clone(), self.limits.clone(), self.tls.clone());
            // The session goes on by itself; what is returned is only a way to wait for it.
            drop(self.workers.spawn(worker, move || async move {
                let stream = socket.attach();
                serve_connection_with(&tls, &stream, &exports, &*clock(), &limits, &shutdown).await;
                drop(slot);
            }));
        }
    }
}

/// How often a disk is looked after that has nothing more to do at once.
const TENDED_EVERY: Duration = Duration::from_millis(50);
/// Between two things that are done at once, so that requests come first.
const TENDED_NEXT: Duration = Duration::from_millis(1);

/// The tasks that look after disks.
struct Tending {
    has_ended: Arc<AtomicBool>,
    tasks: Vec<Spawned<()>>,
}

impl Tending {
    fn begin(served: &Arc<Disks>, workers: &WorkersHandle) -> Self {
        let has_ended = Arc::new(AtomicBool::new(false));
        let written: Vec<usize> =
            (0..served.len()).filter(|index| !served[*index].disk().geometry().read_only).collect();
        let mut tasks = Vec::new();
        for (number, index) in written.into_iter().enumerate() {
            // The last worker first: the first has the sockets and the signals.
            let worker = workers.count() - 1 - number % workers.count();
            let (disks, ended) = (served.clone(), has_ended.clone());
            tasks.push(workers.spawn(worker, move || async move {
                while !ended.load(Ordering::Acquire) {
                    let has_more = disks[index].disk().tend(clock().now()).await;
                    clock().sleep(if has_more { TENDED_NEXT } else { TENDED_EVERY }).await;
                }
            }));
            if served[index].growing().is_some() {
                let (disks, ended) = (served.clone(), has_ended.clone());
                tasks.push(workers.spawn(worker, move || async move {
                    while !ended.load(Ordering::Acquire) {
                        if let Some(growing) = disks[index].growing() {
                            growing.watch(&ended).await;
                        }
                        clock().sleep(TENDED_EVERY).await;
                    }
                }));
            }
        }
        Self { has_ended, tasks }
    }

    /// Waits until what was begun is done.
    async fn end(self) {
        self.has_ended.store(true, Ordering::Release);
        for task in self.tasks {
            // A worker that has ended has nothing under way.
            let _ = task.await;
        }
    }
}

/// The address that `text` means: `unix:PATH` or `tcp:HOST:PORT`.
///
/// # Errors
/// `Invalid`, with the two forms.
pub fn parse_address(text: &str) -> Result<Address> {
    if let Some(path) = text.strip_prefix("unix:").filter(|path| !path.is_empty()) {
        return Ok(Address::unix(path));
    }
    let tcp = text.strip_prefix("tcp:").and_then(|rest| rest.rsplit_once(':'));
    if let Some((host, port)) = tcp
        && let Ok(port) = port.parse()
    {
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        return Ok(Address::tcp(if host.is_empty() { "localhost" } else { host }, port));
    }
    Err(Error::invalid(format!("{text:?} is no address: say unix:PATH or tcp:HOST:PORT")))
}
