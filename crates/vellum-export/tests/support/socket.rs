//! A real Unix socket with a minimal server behind it, so that third-party clients can be run against the
//! session.

use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use async_executor::LocalExecutor;
use async_io::{Async, Timer, block_on};
use futures_lite::future::or;
use vellum_core::{Buffer, ByteStream, Clock, Error, LocalFuture, Result};
use vellum_export::nbd::{Exports, SessionLimits, serve_connection};
use vellum_export::{ConnectionSlots, Shutdown};

/// A connected socket.
pub struct Socket(Async<UnixStream>);

impl Socket {
    pub fn new(stream: Async<UnixStream>) -> Self {
        Self(stream)
    }
}

impl ByteStream for Socket {
    fn read(&self, mut buffer: Buffer) -> LocalFuture<'_, Result<(Buffer, usize)>> {
        Box::pin(async move {
            let read = self.0.read_with(|mut stream| {
                let mut pieces: Vec<_> = buffer.pieces_mut().map(IoSliceMut::new).collect();
                stream.read_vectored(&mut pieces)
            });
            let count = read.await.map_err(|error| Error::io(error, "can't read from the socket"))?;
            Ok((buffer, count))
        })
    }

    fn write_all(&self, data: Buffer) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let mut pieces: Vec<_> = data.pieces().map(IoSlice::new).collect();
            let mut rest = &mut pieces[..];
            while !rest.is_empty() {
                let written = self.0.write_with(|mut stream| stream.write_vectored(rest)).await;
                let count = written.map_err(|error| Error::io(error, "can't write to the socket"))?;
                IoSlice::advance_slices(&mut rest, count);
            }
            Ok(())
        })
    }

    fn shutdown(&self) {
        // A connection that is gone is shut down.
        let _ = self.0.get_ref().shutdown(std::net::Shutdown::Both);
    }
}

/// The time of day, on the reactor of `async-io`.
pub struct SystemClock(Instant);

impl Default for SystemClock {
    #[expect(clippy::disallowed_methods, reason = "real sockets want real time")]
    fn default() -> Self {
        Self(Instant::now())
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Duration {
        self.0.elapsed()
    }

    fn sleep(&self, wait: Duration) -> LocalFuture<'static, ()> {
        Box::pin(async move {
            Timer::after(wait).await;
        })
    }
}

/// A server in a thread of its own, on a socket in a directory of its own. Dropping it drains it.
pub struct Server {
    directory: PathBuf,
    shutdown: Shutdown,
    served: Arc<AtomicU64>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Server {
    pub fn start(exports: &Exports) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let directory = std::env::temp_dir().join(format!("vellum-nbd-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&directory).expect("a directory for the socket");
        let listener = UnixListener::bind(directory.join("socket")).expect("a socket");
        let (exports, shutdown, served) = (exports.clone(), Shutdown::new(), Arc::new(AtomicU64::new(0)));
        let (asked, count) = (shutdown.clone(), served.clone());
        let thread = std::thread::spawn(move || serve(listener, &exports, &asked, &count));
        Self { directory, shutdown, served, thread: Some(thread) }
    }

    /// Where it can be found.
    pub fn uri(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.socket().display())
    }

    pub fn socket(&self) -> PathBuf {
        self.directory.join("socket")
    }

    /// A place for the test's own files.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Connections that were accepted.
    pub fn served(&self) -> u64 {
        self.served.load(Ordering::Relaxed)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shutdown.drain();
        let ended = self.thread.take().map(std::thread::JoinHandle::join);
        let _ = std::fs::remove_dir_all(&self.directory);
        if !std::thread::panicking() {
            ended.expect("it is joined once").expect("the server ends well");
        }
    }
}

/// The accept loop, as a program would write it.
fn serve(listener: UnixListener, exports: &Exports, shutdown: &Shutdown, served: &AtomicU64) {
    let slots = ConnectionSlots::new(64);
    let (limits, clock) = (SessionLimits::default(), SystemClock::default());
    let executor = LocalExecutor::new();
    let accepting = async {
        let listener = Async::new(listener).expect("a socket that does not block");
        let mut sessions = Vec::new();
        loop {
            let slot = slots.take().await;
            let accepted = or(async { Some(listener.accept().await) }, async {
                shutdown.requested().await;
                None
            });
            let Some(accepted) = accepted.await else { break };
            let (stream, _) = accepted.expect("a client");
            served.fetch_add(1, Ordering::Relaxed);
            let (limits, clock) = (&limits, &clock);
            sessions.push(executor.spawn(async move {
                let stream = Socket::new(stream);
                serve_connection(&stream, exports, clock, limits, shutdown).await;
                drop(slot);
            }));
        }
        for session in sessions {
            session.await;
        }
    };
    block_on(executor.run(accepting));
}
