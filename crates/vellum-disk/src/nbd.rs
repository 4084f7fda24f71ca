//! Serving disks over NBD from one's own program.
//!
//! This is a plain server: one worker, no TLS. `vellum serve` has what a machine needs that faces many
//! clients.

use std::ops::ControlFlow;

use futures_lite::future::or;
use vellum_core::{ErrorKind, Result};
use vellum_export::ConnectionSlots;
pub use vellum_export::Shutdown;
use vellum_export::nbd::serve_connection;
pub use vellum_export::nbd::{Export, Exports, SessionLimits};
pub use vellum_io::{Address, Listener};
use vellum_io::{Task, clock, spawn_local};

/// Accepts clients until the shutdown is requested, and returns when the last of them has been served. At
/// most `clients_max` are served at a time; further ones wait. Must be polled on a worker, to its end.
///
/// The disks stay open: the caller closes them afterwards.
///
/// # Errors
/// `Invalid` for impossible limits, and why no more clients could be accepted. Those that are connected are
/// served to their end first.
pub async fn serve(
    listener: &Listener,
    exports: &Exports,
    limits: &SessionLimits,
    clients_max: usize,
    shutdown: &Shutdown,
) -> Result<()> {
    limits.check()?;
    let slots = ConnectionSlots::new(clients_max);
    let mut sessions: Vec<Task<()>> = Vec::new();
    let result = loop {
        let next = async {
            let slot = slots.take().await;
            ControlFlow::Continue((slot, listener.accept().await))
        };
        let ended = async {
            shutdown.requested().await;
            ControlFlow::Break(())
        };
        let (slot, socket) = match or(ended, next).await {
            ControlFlow::Break(()) => break Ok(()),
            ControlFlow::Continue((slot, Ok(socket))) => (slot, socket),
            // The host is short of descriptors for a moment.
            ControlFlow::Continue((_, Err(error))) if error.kind() == ErrorKind::NoSpace => continue,
            ControlFlow::Continue((_, Err(error))) => break Err(error),
        };
        sessions.retain(|session| !session.is_finished());
        let (exports, limits, shutdown) = (exports.clone(), limits.clone(), shutdown.clone());
        sessions.push(spawn_local(async move {
            let stream = socket.attach();
            serve_connection(&stream, &exports, &*clock(), &limits, &shutdown).await;
            drop(slot);
        }));
    };
    for session in sessions {
        session.await;
    }
    result
}
