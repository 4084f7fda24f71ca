//! The vhost-user-blk sockets of a server: each has one front end at a time, whose queues run on the workers.
//!
//! ```text
//!   accept (worker 0) ──► session, on a thread of its own ──► queue 0 on worker n, queue 1 on worker n + 1, …
//!        ▲                       │ ended
//!        └───────────────────────┘ the next front end, or the same one again
//! ```
//!
//! 1. A front end that comes while another is served waits in the socket's queue.
//! 2. When the server drains, nobody new is let in; queues hand back what they took before the front end is left alone, so
//!    one that connects to the next server goes on where it was.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use event_listener::Event;
use futures_lite::future::or;
use vellum_core::{Context, Error, ErrorKind, LocalFuture, Result, join_all};
use vellum_export::Shutdown;
use vellum_export::nbd::Exports;
use vellum_export::vhost::{Device, Host, MakeQueue, QUEUES_MAX, Session, SessionHandle};
use vellum_io::{Address, Listener, Socket, Task, WorkersHandle, readable, spawn_local};

use crate::serve::ExportSpec;

/// A socket for virtual machines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VhostSpec {
    /// Which export; when not said, the default one or the only one.
    pub export: Option<String>,
    /// Where the socket is.
    pub path: PathBuf,
    /// How many queues a front end may use; as many as there are workers and may be queues, when not said.
    pub queues: Option<u16>,
}

impl VhostSpec {
    fn device(&self, specs: &[ExportSpec], exports: &Exports, workers: usize) -> Result<Device> {
        let wanted = match (&self.export, specs) {
            (Some(name), _) => name.as_str(),
            (None, [only]) => only.name.as_str(),
            (None, _) => "",
        };
        // Of several names of one image, or a snapshot's, the part before the @ counts.
        let is_it = |spec: &&ExportSpec| {
            wanted
                .strip_prefix(spec.name.as_str())
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('@'))
        };
        let Some(spec) = specs.iter().find(is_it) else {
            let context = match &self.export {
                Some(name) => format!("there is no export {name:?}"),
                None => "there are several disks; say which: NAME=PATH".to_owned(),
            };
            return Err(Error::invalid(format!("{}: {context}", self.path.display())));
        };
        let serial = if wanted.is_empty() { &spec.description } else { wanted };
        let queues = self.queues.unwrap_or_else(|| queues_of(workers));
        if queues == 0 || queues > QUEUES_MAX {
            return Err(Error::invalid(format!("a disk has 1 to {QUEUES_MAX} queues, not {queues}")));
        }
        Ok(Device { exports: exports.clone(), name: wanted.to_owned(), serial: serial.to_owned(), queues })
    }
}

/// The queues of a disk when nobody said how many.
fn queues_of(workers: usize) -> u16 {
    u16::try_from(workers).map_or(QUEUES_MAX, |workers| workers.min(QUEUES_MAX))
}

/// All vhost-user sockets of a server.
pub(crate) struct Devices {
    shutdown: Shutdown,
    now: Vec<Now>,
    tasks: Mutex<Vec<Task<()>>>,
}

/// The sessions of all sockets.
#[derive(Clone)]
pub(crate) struct Sessions(Vec<Now>);

impl Sessions {
    /// Each looks whether its disk is larger, and tells its front end.
    pub(crate) fn look_again(&self) {
        self.0.iter().filter_map(|now| lock(now).clone()).for_each(|session| session.look_again());
    }
}

/// The session of a socket, while there is one.
type Now = Arc<Mutex<Option<Arc<SessionHandle>>>>;

impl Devices {
    /// Binds all sockets and lets front ends in. To be called on a worker.
    pub(crate) async fn open(
        specs: &[VhostSpec],
        served: &[ExportSpec],
        exports: &Exports,
        workers: &WorkersHandle,
    ) -> Result<Self> {
        let mut devices = Self { shutdown: Shutdown::new(), now: Vec::new(), tasks: Mutex::default() };
        let mut doors = Vec::new();
        let mut first_worker = 0;
        for spec in specs {
            let device = spec.device(served, exports, workers.count())?;
            let listener = Listener::bind(&Address::unix(&spec.path)).await?;
            let queues = usize::from(device.queues);
            let host = Arc::new(OnWorkers { workers: workers.clone(), first_worker });
            first_worker += queues;
            let now = Now::default();
            devices.now.push(now.clone());
            doors.push((listener, Door { device, host, shutdown: devices.shutdown.clone(), now }));
        }
        let tasks = doors.into_iter().map(|(listener, door)| spawn_local(door.keep(listener)));
        devices.tasks().extend(tasks);
        Ok(devices)
    }

    /// Lets nobody in any more, and waits until each front end has got back what was taken from it.
    pub(crate) async fn drained(&self) {
        self.shutdown.drain();
        let tasks = std::mem::take(&mut *self.tasks());
        join_all(tasks).await;
    }

    /// The sessions there are, now and later.
    pub(crate) fn sessions(&self) -> Sessions {
        Sessions(self.now.clone())
    }

    /// Hears no longer what is being said.
    pub(crate) fn cut(&self) {
        self.now.iter().filter_map(|now| lock(now).clone()).for_each(|session| session.cut());
    }

    fn tasks(&self) -> MutexGuard<'_, Vec<Task<()>>> {
        lock(&self.tasks)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Where front ends of one socket come in.
struct Door {
    device: Device,
    host: Arc<OnWorkers>,
    shutdown: Shutdown,
    now: Now,
}

impl Door {
    async fn keep(self, listener: Listener) {
        let at = listener.address().clone();
        let mut listener = Some(listener);
        while let Some(open) = &listener {
            let nobody = async {
                self.shutdown.requested().await;
                None
            };
            let ended = match or(async { Some(open.accept().await) }, nobody).await {
                None => return,
                Some(Ok(socket)) => self.begin(socket),
                Some(Err(error)) if error.kind() == ErrorKind::NoSpace => Err(error),
                Some(Err(error)) => {
                    tracing::error!("no more front ends are let in at {at}: {}", error.chain());
                    return;
                }
            };
            let ended = match ended {
                Ok(ended) => ended,
                Err(error) => {
                    tracing::warn!("{}", error.chain());
                    continue;
                }
            };
            or(ended.wait(), self.shutdown.requested()).await;
            if !ended.is_so() {
                // The socket's file goes before the front end looks for the next server.
                listener = None;
                if let Some(session) = &*lock(&self.now) {
                    session.end();
                }
                ended.wait().await;
            }
            *lock(&self.now) = None;
        }
    }

    fn begin(&self, socket: Socket) -> Result<Arc<Ended>> {
        let (session, handle) = Session::new(UnixStream::from(OwnedFd::from(socket)))?;
        let ended = Arc::new(Ended::default());
        let (device, host, with_thread) = (self.device.clone(), self.host.clone(), WithThread(ended.clone()));
        let thread = std::thread::Builder::new().name("vellum-vhost".to_owned()).spawn(move || {
            let _with_thread = with_thread;
            if let Err(error) = session.serve(&device, host) {
                tracing::warn!("a vhost-user front end was turned away: {}", error.chain());
            }
        });
        thread.context(|| "can't start a thread for a vhost-user front end")?;
        *lock(&self.now) = Some(Arc::new(handle));
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
        // It ends by itself; who waits for it has a way of its own.
        drop(self.workers.spawn(worker, make));
    }

    fn readable(&self, descriptor: &Arc<OwnedFd>) -> LocalFuture<'static, Result<()>> {
        let descriptor = descriptor.clone();
        Box::pin(async move { readable(&descriptor).await })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_as_many_queues_as_workers_and_no_more_than_can_be() {
        for (workers, queues) in [(1, 1), (256, 256), (257, 256), (1 << 16, 256), (usize::MAX, 256)] {
            assert_eq!(queues_of(workers), queues, "{workers} workers");
        }
    }
}
