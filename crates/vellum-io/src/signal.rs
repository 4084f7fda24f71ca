//! Signals as something a task can wait for.
//!
//! ```text
//!   the handler:  flags[signal] = true, then one byte into a socket   (all that a handler may do)
//!   the task:     reads the socket, then takes the flags
//! ```
//!
//! Signals of one kind that come faster than they are taken count as one, as signals always do.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use signal_hook::SigId;
use signal_hook::low_level::{pipe, unregister};
use vellum_core::{Buffer, ByteStream, Context, Result};

use crate::socket::{Socket, Stream};

/// A signal that a server acts upon.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Signal {
    /// SIGTERM: end in good order.
    Terminate,
    /// SIGINT: the same, from the keyboard.
    Interrupt,
    /// SIGHUP: read the configuration again.
    Hangup,
    /// SIGUSR1: whatever the program says.
    User1,
}

impl Signal {
    fn number(self) -> i32 {
        match self {
            Self::Terminate => libc::SIGTERM,
            Self::Interrupt => libc::SIGINT,
            Self::Hangup => libc::SIGHUP,
            Self::User1 => libc::SIGUSR1,
        }
    }
}

/// The signals somebody waits for. While it exists they do nothing else; afterwards they do nothing at all.
pub struct Signals {
    watched: Vec<Watched>,
    stream: Stream,
}

struct Watched {
    signal: Signal,
    came: Arc<AtomicBool>,
    handlers: [SigId; 2],
}

impl Signals {
    /// Takes these signals from now on. For a worker.
    pub fn new(signals: &[Signal]) -> Result<Self> {
        let failed = || "can't take signals";
        let (read, write) = UnixStream::pair().context(failed)?;
        let mut taken = Self { watched: Vec::new(), stream: Socket::new(read.into(), "the kernel").attach() };
        for signal in signals {
            let came = Arc::new(AtomicBool::new(false));
            // Handlers run in the order they were registered: the flag is there before the byte.
            let flag = signal_hook::flag::register(signal.number(), came.clone()).context(failed)?;
            let write = write.try_clone().context(failed)?;
            let bell = match pipe::register(signal.number(), write).context(failed) {
                Ok(bell) => bell,
                Err(error) => {
                    unregister(flag);
                    return Err(error);
                }
            };
            taken.watched.push(Watched { signal: *signal, came, handlers: [flag, bell] });
        }
        Ok(taken)
    }

    /// The next signal that comes, or has come since the last.
    pub async fn next(&mut self) -> Result<Signal> {
        loop {
            if let Some(watched) = self.watched.iter().find(|watched| watched.came.swap(false, SeqCst)) {
                return Ok(watched.signal);
            }
            self.stream.read(Buffer::for_overwrite(64)).await?;
        }
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        for watched in &self.watched {
            for handler in watched.handlers {
                unregister(handler);
            }
        }
    }
}
