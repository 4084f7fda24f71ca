//! The vhost-user-blk sockets of a server: each has one front end at a time, whose queues run on the workers.
//!
//! ```text
//!   accept (worker 0) ──► session, on a thread of its own ──► queue 0 on worker n, queue 1 on worker n + 1, …
//!        ▲                       │ ended
//!        └───────────────────────┘ the next front end, or the same one again
//! ```
//!
//! 1. A front end that connects while another is served waits in the socket's queue.
//! 2. A socket is bound when the server starts; front ends are admitted when the disk is open.
//! 3. When the server drains, no new front end is admitted; queues hand back what they took before the front
//!    end is disconnected, so one that connects to the next server continues where it was.

use std::cell::{Cell, RefCell};
use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use event_listener::Event;
use futures_lite::future::or;
use vellum_core::{Context, ErrorKind, LocalFuture, Result, join_all, lock};
use vellum_export::Shutdown;
use vellum_export::nbd::Exports;
use vellum_export::vhost::{Device, Heard, Host, MakeQueue, Session, SessionHandle};
use vellum_io::{Address, Listener, Socket, Task, WorkersHandle, clock, readable, spawn_local};

use crate::contained::in_rounds;
use crate::rights::SocketRights;
use crate::served::Served;
use crate::spec::{ExportSpec, VhostSpec};

/// All vhost-user sockets of a server. They belong to the worker that has bound them.
#[derive(Clone)]
pub(crate) struct Devices(Rc<Inner>);

struct Inner {
    workers: WorkersHandle,
    exports: Exports,
    rights: SocketRights,
    next_worker: Cell<usize>,
    next_id: Cell<u64>,
    sockets: RefCell<Vec<Place>>,
    is_draining: Cell<bool>,
}

/// A socket that was bound, distinguished from all others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SocketId(u64);

/// An export of a disk, distinguished from an earlier one of the same name.
pub(crate) type ExportId = (usize, String);

/// A socket.
struct Place {
    id: SocketId,
    /// The export whose disk it is for.
    export: String,
    /// As above, once its disk is open.
    of: Option<ExportId>,
    shutdown: Shutdown,
    now: Now,
    /// Bound; no front end is admitted before the disk is open.
    bound: Option<(Listener, Bound)>,
    task: Option<Task<()>>,
}

/// What a front end will be given.
struct Bound {
    name: String,
    serial: String,
    queues: u16,
    takes_unsealed: bool,
}

/// The session of a socket, while there is one.
type Now = Rc<RefCell<Option<Arc<SessionHandle>>>>;

impl Devices {
    pub(crate) fn new(workers: &WorkersHandle, exports: &Exports, rights: SocketRights) -> Self {
        Self(Rc::new(Inner {
            workers: workers.clone(),
            exports: exports.clone(),
            rights,
            next_worker: Cell::new(0),
            next_id: Cell::new(0),
            sockets: RefCell::default(),
            is_draining: Cell::new(false),
        }))
    }

    /// Binds a socket for one of these exports. Front ends wait until its disk is there.
    pub(crate) async fn bind(&self, spec: &VhostSpec, exports: &[ExportSpec]) -> Result<(String, SocketId)> {
        let (name, export) = spec.export(exports)?;
        let queues = spec.queues(self.0.workers.count())?;
        let listener = Listener::bind(&Address::unix(&spec.path)).await?;
        self.0.rights.give_to(listener.address())?;
        let serial = if name.is_empty() { export.description.clone() } else { name.clone() };
        let id = SocketId(self.0.next_id.get());
        self.0.next_id.set(id.0 + 1);
        self.0.sockets.borrow_mut().push(Place {
            id,
            of: None,
            export: export.name.clone(),
            shutdown: Shutdown::new(),
            now: Now::default(),
            bound: Some((listener, Bound { name, serial, queues, takes_unsealed: spec.takes_unsealed })),
            task: None,
        });
        Ok((export.name.clone(), id))
    }

    /// The disk is open: front ends of these sockets that are for one of its exports are admitted.
    pub(crate) fn begin(&self, served: &Served, ids: &[SocketId]) {
        for place in self.0.sockets.borrow_mut().iter_mut() {
            if self.0.is_draining.get() || !ids.contains(&place.id) || !served.has_name(&place.export) {
                continue;
            }
            let Some((listener, Bound { name, serial, queues, takes_unsealed })) = place.bound.take() else {
                continue;
            };
            let first_worker = self.0.next_worker.get();
            self.0.next_worker.set(first_worker + usize::from(queues));
            let host = Arc::new(OnWorkers { workers: self.0.workers.clone(), first_worker });
            let (exports, reconnects) = (self.0.exports.clone(), served.reconnects().clone());
            let (clock, heard) = (clock(), Heard::default());
            let device = Device { exports, name, serial, queues, takes_unsealed, reconnects, clock, heard };
            let (shutdown, now) = (place.shutdown.clone(), place.now.clone());
            place.of = Some((served.number(), place.export.clone()));
            place.task =
                Some(spawn_local(Door { device, host, shutdown, now, said: Arc::default() }.keep(listener)));
        }
    }

    /// The disk will not be there: this socket goes.
    pub(crate) fn forget(&self, id: SocketId) {
        self.0.sockets.borrow_mut().retain(|place| place.id != id || place.bound.is_none());
    }

    /// Admits no more front ends, and waits until each has got back what was taken from it. Of one export, or
    /// of all.
    pub(crate) async fn drained(&self, export: Option<&ExportId>) {
        let is_it = |place: &Place| export.is_none_or(|export| place.of.as_ref() == Some(export));
        if export.is_none() {
            self.0.is_draining.set(true);
        }
        let tasks: Vec<_> = {
            let mut sockets = self.0.sockets.borrow_mut();
            sockets.retain(|place| !is_it(place) || place.bound.is_none());
            let mine = sockets.iter_mut().filter(|place| is_it(place));
            mine.filter_map(|place| {
                place.shutdown.drain();
                place.task.take()
            })
            .collect()
        };
        join_all(tasks).await;
        self.0.sockets.borrow_mut().retain(|place| !is_it(place));
    }

    /// Each checks whether its disk has grown, and notifies its front end.
    pub(crate) fn look_again(&self) {
        self.with_sessions(SessionHandle::notify_resize);
    }

    /// Stops reading messages, even in the middle of one.
    pub(crate) fn cut(&self) {
        self.with_sessions(SessionHandle::cut);
    }

    fn with_sessions(&self, act: impl Fn(&SessionHandle)) {
        let sessions: Vec<_> =
            self.0.sockets.borrow().iter().filter_map(|place| place.now.borrow().clone()).collect();
        sessions.iter().for_each(|session| act(session));
    }
}

/// Where front ends of one socket come in.
struct Door {
    device: Device,
    host: Arc<OnWorkers>,
    shutdown: Shutdown,
    now: Now,
    said: Arc<Said>,
}

/// Why the last front end was refused: for one that reconnects every second this is logged once in a while.
#[derive(Default)]
struct Said(Mutex<Option<(String, Duration)>>);

/// How often the log repeats the same message.
const SAID_EVERY: Duration = Duration::from_secs(60);

impl Said {
    fn say(&self, why: &str) {
        let now = clock().now();
        let mut last = lock(&self.0);
        if last.as_ref().is_none_or(|(said, at)| said != why || now.saturating_sub(*at) >= SAID_EVERY) {
            tracing::warn!("a vhost-user front end was refused: {why}");
            *last = Some((why.to_owned(), now));
        }
    }
}

impl Door {
    async fn keep(self, listener: Listener) {
        let what = format!("accepting front ends at {}", listener.address());
        let mut listener = Some(listener);
        in_rounds(&what, async || self.serve_next(&mut listener).await).await;
    }

    /// The next front end, to its end. The socket is closed when no more are to come.
    async fn serve_next(&self, listener: &mut Option<Listener>) -> ControlFlow<()> {
        let Some(open) = &*listener else { return ControlFlow::Break(()) };
        let nobody = async {
            self.shutdown.requested().await;
            None
        };
        let ended = match or(async { Some(open.accept().await) }, nobody).await {
            None => return ControlFlow::Break(()),
            Some(Ok(socket)) => self.begin(socket),
            Some(Err(error)) if error.kind() == ErrorKind::NoSpace => Err(error),
            Some(Err(error)) => {
                tracing::error!("no more front ends are accepted at {}: {}", open.address(), error.chain());
                return ControlFlow::Break(());
            }
        };
        let ended = match ended {
            Ok(ended) => ended,
            Err(error) => {
                tracing::warn!("{}", error.chain());
                return ControlFlow::Continue(());
            }
        };
        or(ended.wait(), self.shutdown.requested()).await;
        if !ended.is_so() {
            // The socket's file is removed before the front end looks for the next server.
            *listener = None;
            if let Some(session) = &*self.now.borrow() {
                session.end();
            }
            ended.wait().await;
        }
        *self.now.borrow_mut() = None;
        ControlFlow::Continue(())
    }

    fn begin(&self, socket: Socket) -> Result<Arc<Ended>> {
        let (session, handle) = Session::new(UnixStream::from(OwnedFd::from(socket)))?;
        let ended = Arc::new(Ended::default());
        let (device, host, with_thread) = (self.device.clone(), self.host.clone(), WithThread(ended.clone()));
        let said = self.said.clone();
        let thread = std::thread::Builder::new().name("vellum-vhost".to_owned()).spawn(move || {
            let _with_thread = with_thread;
            if let Err(error) = session.serve(&device, host) {
                said.say(&error.chain());
            }
        });
        thread.context(|| "can't start a thread for a vhost-user front end")?;
        *self.now.borrow_mut() = Some(Arc::new(handle));
        Ok(ended)
    }
}

/// Whether the thread of a session has ended.
#[derive(Default)]
struct Ended {
    is_so: AtomicBool,
    event: Event,
}

impl Ended {
    fn is_so(&self) -> bool {
        self.is_so.load(Ordering::Acquire)
    }

    async fn wait(&self) {
        while !self.is_so() {
            let listener = self.event.listen();
            if !self.is_so() {
                listener.await;
            }
        }
    }
}

/// Tells, however the thread ends.
struct WithThread(Arc<Ended>);

impl Drop for WithThread {
    fn drop(&mut self) {
        self.0.is_so.store(true, Ordering::Release);
        self.0.event.notify(usize::MAX);
    }
}

/// Queues on the workers, one after the other from the first on.
struct OnWorkers {
    workers: WorkersHandle,
    first_worker: usize,
}

impl Host for OnWorkers {
    fn spawn(&self, queue: u32, make: MakeQueue) {
        let queue = usize::try_from(queue).expect("a small number");
        let worker = (self.first_worker + queue) % self.workers.count();
        // It ends by itself; its session waits for it in another way.
        drop(self.workers.spawn(worker, make));
    }

    fn readable(&self, descriptor: &Arc<OwnedFd>) -> LocalFuture<'static, Result<()>> {
        let descriptor = descriptor.clone();
        Box::pin(async move { readable(&descriptor).await })
    }

    fn ring(&self, eventfd: &Arc<OwnedFd>) {
        vellum_io::ring(eventfd);
    }
}
