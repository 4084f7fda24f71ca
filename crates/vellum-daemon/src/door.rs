//! Accepting NBD clients: each connection is given to the next worker in turn.

use std::cell::RefCell;
use std::ops::ControlFlow;
use std::panic::AssertUnwindSafe;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use event_listener::Event;
use futures_lite::FutureExt as _;
use vellum_core::ErrorKind;
use vellum_export::Shutdown;
use vellum_export::nbd::{Clients, Exports, SessionLimits, TlsPolicy, View, serve_client};
use vellum_io::{Listener, Socket, Task, WorkersHandle, clock, spawn_local};

use crate::contained::in_rounds;
use crate::tls::TlsNow;
use crate::vhost::ExportId;

/// Whether clients are admitted: not before an export is available, or they would be refused. Until then they
/// wait in the sockets' queues.
#[derive(Clone, Default)]
pub(crate) struct Bolt(Arc<Drawn>);

#[derive(Default)]
struct Drawn {
    is_drawn: AtomicBool,
    event: Event,
}

impl Bolt {
    /// From now on they are.
    pub(crate) fn draw(&self) {
        self.0.is_drawn.store(true, Ordering::Release);
        self.0.event.notify(usize::MAX);
    }

    async fn drawn(&self) {
        while !self.0.is_drawn.load(Ordering::Acquire) {
            let event = self.0.event.listen();
            if !self.0.is_drawn.load(Ordering::Acquire) {
                event.await;
            }
        }
    }
}

/// Accept loops, each for all exports or for one. They belong to the worker that started them.
#[derive(Clone, Default)]
pub(crate) struct Accepting(Rc<RefCell<Vec<Letting>>>);

/// One of them, and the export that it is for.
type Letting = (Option<ExportId>, Task<()>);

impl Accepting {
    /// Runs this until it is ended.
    pub(crate) fn begin(&self, export: Option<ExportId>, accept: impl Future<Output = ()> + 'static) {
        self.0.borrow_mut().push((export, spawn_local(accept)));
    }

    /// Ends those for this export, or all: their sockets are closed, and the files of these removed.
    pub(crate) async fn end(&self, export: Option<&ExportId>) {
        let is_it = |of: &Option<ExportId>| export.is_none() || of.as_ref() == export;
        let ended: Vec<_> = self.0.borrow_mut().extract_if(.., |(of, _)| is_it(of)).collect();
        for (_, task) in ended {
            task.cancel().await;
        }
    }
}

/// Where connections come in.
#[derive(Clone)]
pub(crate) struct Door {
    pub(crate) bolt: Bolt,
    pub(crate) exports: Exports,
    pub(crate) clients: Clients,
    pub(crate) shutdown: Shutdown,
    pub(crate) session_limits: SessionLimits,
    pub(crate) tls: TlsNow,
    pub(crate) workers: WorkersHandle,
    pub(crate) next_worker: Arc<AtomicUsize>,
}

impl Door {
    /// As this one, for clients that see only `view`.
    pub(crate) fn showing(&self, view: View) -> Self {
        Self { exports: self.exports.seen_as(view), ..self.clone() }
    }

    pub(crate) async fn accept(self, listener: Listener) {
        self.bolt.drawn().await;
        let what = format!("the listener at {}", listener.address());
        in_rounds(&what, async || self.let_in(&listener).await).await;
    }

    /// The next one.
    async fn let_in(&self, listener: &Listener) -> ControlFlow<()> {
        self.clients.may_arrive().await;
        let socket = match listener.accept().await {
            Ok(socket) => socket,
            Err(error) if error.kind() == ErrorKind::NoSpace => {
                tracing::warn!("{}", error.chain());
                return ControlFlow::Continue(());
            }
            Err(error) => {
                tracing::error!("no more clients are accepted at {}: {}", listener.address(), error.chain());
                return ControlFlow::Break(());
            }
        };
        self.begin(socket, self.tls.policy());
        ControlFlow::Continue(())
    }

    /// A client of this process, whose connection nobody else can read.
    pub(crate) fn let_in_local(&self, socket: Socket) {
        self.begin(socket, TlsPolicy::Off);
    }

    /// Begins the session of a client, on the next worker.
    fn begin(&self, socket: Socket, tls: TlsPolicy) {
        let worker = self.next_worker.fetch_add(1, Ordering::Relaxed) % self.workers.count();
        let (exports, shutdown, limits) =
            (self.exports.clone(), self.shutdown.clone(), self.session_limits.clone());
        let client = self.clients.arrive(socket.peer());
        // The session continues by itself; the result is only a way to wait for it.
        drop(self.workers.spawn(worker, move || async move {
            let stream = socket.attach();
            let clock = clock();
            let served = serve_client(&client, &tls, &stream, &exports, &*clock, &limits, &shutdown);
            // What a disk does is caught there; this is for the session's own rules.
            if AssertUnwindSafe(served).catch_unwind().await.is_err() {
                tracing::error!(
                    peer = client.peer(),
                    "a session failed with an internal error and was closed"
                );
                stream.shut_down(std::net::Shutdown::Both);
            }
        }));
    }
}
