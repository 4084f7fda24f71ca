//! Signals as something a task can wait for.
//!
//! ```text
//!   the handler:  flags[signal] = true, then one byte into a socket   (all that a handler may do)
//!   the task:     reads the socket, then takes the flags
//! ```
//!
//! Signals of one kind that arrive faster than they are taken count as one, as signals always do. A wait may
//! be dropped at any time: bytes are taken only when there are some, never by a read whose future was
//! dropped.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use rustix::io::Errno;
use signal_hook::SigId;
use signal_hook::low_level::{pipe, unregister};
use vellum_core::{Context, Result};

use crate::ready::readable;

/// A signal that a server acts upon.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Signal {
    /// SIGTERM: end in good order.
    Terminate,
    /// SIGINT: as SIGTERM, from the keyboard.
    Interrupt,
    /// SIGHUP: read the configuration again.
    Hangup,
    /// SIGUSR1: defined by the program.
    User1,
    /// SIGUSR2: the same.
    User2,
    /// SIGQUIT: the keyboard's other one (Ctrl-\\).
    Quit,
}

impl Signal {
    fn number(self) -> i32 {
        match self {
            Self::Terminate => libc::SIGTERM,
            Self::Interrupt => libc::SIGINT,
            Self::Hangup => libc::SIGHUP,
            Self::User1 => libc::SIGUSR1,
            Self::User2 => libc::SIGUSR2,
            Self::Quit => libc::SIGQUIT,
        }
    }
}

/// The signals that a task waits for. While this exists they have no other effect; afterwards they have no
/// effect at all.
pub struct Signals {
    watched: Vec<Watched>,
    bell: Arc<OwnedFd>,
}

struct Watched {
    signal: Signal,
    came: Arc<AtomicBool>,
    handlers: [SigId; 2],
}

impl Signals {
    /// Takes these signals from now on. For a worker.
    pub fn new(signals: &[Signal]) -> Result<Self> {
        let failed = || "can't handle signals";
        let (read, write) = UnixStream::pair().context(failed)?;
        read.set_nonblocking(true).context(failed)?;
        let mut taken = Self { watched: Vec::new(), bell: Arc::new(read.into()) };
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
            readable(&self.bell).await?;
            // What rings from here on is found by the next look at the flags, or by the next wait.
            match rustix::io::read(&self.bell, &mut [0; 64]) {
                Ok(_) | Err(Errno::AGAIN | Errno::INTR) => {}
                Err(errno) => return Err(std::io::Error::from(errno)).context(|| "can't handle signals"),
            }
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
