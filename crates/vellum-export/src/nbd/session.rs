//! One connection from the greeting to the end: the handshake under its deadline, then the transmission.
//!
//! ```text
//!   greeting ──► Handshake, fed and answered ──► attached to an export ──► transmit ──► Ending
//!                  │ deadline, limits, shutdown        │ counted until the session ends
//!                  └──────────► Ending ◄───────────────┘
//! ```
//!
//! 1. Whatever a client does ends its own session and nothing else: there is an [`Ending`] for it, not a panic.
//! 2. Until a client has chosen an export it holds a small receive buffer, one option and one answer, and may do so
//!    for [`Limits::handshake_time`] only (CVE-2024-7409).
//! 3. The export is held from the moment it was chosen until the last of its requests has ended.

use std::fmt;
use std::future::poll_fn;
use std::task::Poll;

use futures_lite::future::or;
use vellum_core::{Buffer, ByteStream, Clock, Error, Result};

use super::exports::Exports;
use super::handshake::{Handshake, Negotiated, Step};
use super::limits::Limits;
use super::transmission::{Ground, transmit};
use super::wire;
use crate::shutdown::{Shutdown, Stage, Watch};

/// How a connection ended.
#[derive(Debug, Clone)]
pub enum Ending {
    /// The client said goodbye, and everything it had asked was answered.
    Goodbye,
    /// The client left between two requests without a word. Everything it had asked was answered, if it still listened.
    Hangup,
    /// A shutdown, or the removal of the export, was asked for; everything that was begun was answered.
    Drained,
    /// A shutdown was cut short; what was begun has ended, but was not answered.
    Cut,
    /// The server did not want the client: an unknown export, too many options, too slow a handshake.
    Refused(&'static str),
    /// The client broke the protocol.
    Violation(&'static str),
    /// The stream failed.
    Failed(Error),
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Goodbye => f.write_str("the client said goodbye"),
            Self::Hangup => f.write_str("the client hung up"),
            Self::Drained => f.write_str("the server drained it"),
            Self::Cut => f.write_str("the server cut it"),
            Self::Refused(why) => write!(f, "the client was refused: {why}"),
            Self::Violation(why) => write!(f, "the client broke the protocol: {why}"),
            Self::Failed(error) => write!(f, "the connection failed: {}", error.chain()),
        }
    }
}

/// What the handshake left behind.
struct Opening {
    negotiated: Negotiated,
    /// Bytes that came behind it.
    early: Vec<u8>,
}

/// Serves one client on one connection, and returns when the connection has ended and nothing it began is running.
///
/// The stream was shut down then, and can be closed. The future must not be dropped before it has ended: disk requests
/// may be half done (contract 10 of the disk). To end it early, use the `shutdown`.
///
/// What an accept loop runs as a task of its own for each connection, on the worker it shall stay on:
///
/// ```
/// # use vellum_core::{ByteStream, Clock};
/// # use vellum_export::nbd::{Exports, Limits, serve_connection};
/// # use vellum_export::{ConnectionSlot, Shutdown};
/// # async fn one(
/// #     stream: &dyn ByteStream, slot: ConnectionSlot,
/// #     exports: &Exports, clock: &dyn Clock, limits: &Limits, shutdown: &Shutdown,
/// # ) {
/// let ending = serve_connection(stream, exports, clock, limits, shutdown).await;
/// drop(slot);
/// # let _ = ending; }
/// ```
///
/// # Panics
/// When the limits cannot be worked with; see [`Limits::check`].
pub async fn serve_connection(
    stream: &dyn ByteStream,
    exports: &Exports,
    clock: &dyn Clock,
    limits: &Limits,
    shutdown: &Shutdown,
) -> Ending {
    limits.check().expect("the limits were checked when they were set");
    let deadline = async {
        clock.sleep(limits.handshake_time).await;
        Err(Ending::Refused("the handshake took too long"))
    };
    let opening = or(until_shutdown(shutdown), or(negotiate(stream, exports, limits), deadline));
    let ending = match opening.await {
        Ok(Opening { negotiated: Negotiated { attached, terms }, early }) => {
            let export = attached.export();
            tracing::info!(export = export.name, read_only = terms.read_only, "a client begins");
            let watches = [Watch::new(shutdown), Watch::new(attached.shutdown())];
            let ending = transmit(Ground { stream, export, terms: &terms, limits }, watches, &early).await;
            tracing::info!(export = export.name, %ending, "a client has left");
            ending
        }
        Err(ending) => {
            tracing::debug!(%ending, "a client chose no export");
            ending
        }
    };
    stream.shutdown();
    ending
}

async fn until_shutdown<T>(shutdown: &Shutdown) -> Result<T, Ending> {
    let mut watch = Watch::new(shutdown);
    poll_fn(|context| match watch.poll_stage(context) {
        Stage::Serving => Poll::Pending,
        Stage::Draining => Poll::Ready(Err(Ending::Drained)),
        Stage::Cut => Poll::Ready(Err(Ending::Cut)),
    })
    .await
}

/// The receive buffer of a handshake. Options are gathered elsewhere, as they come.
const RECEIVE_BYTES: usize = 4096;

/// Carries the handshake's bytes to and fro.
async fn negotiate(stream: &dyn ByteStream, exports: &Exports, limits: &Limits) -> Result<Opening, Ending> {
    let mut handshake = Handshake::new(exports, limits);
    let mut out = wire::greeting().to_vec();
    let mut inbox = Buffer::for_overwrite(RECEIVE_BYTES);
    loop {
        send(stream, &mut out).await?;
        let (buffer, count) = stream.read(inbox).await.map_err(Ending::Failed)?;
        if count == 0 {
            return Err(Ending::Hangup);
        }
        let mut rest = &buffer.slice()[..count];
        // An option without data is answered at once, so an empty rest has nothing more to say.
        while !rest.is_empty() {
            let (taken, step) = handshake.feed(rest, &mut out);
            rest = &rest[taken..];
            match step {
                Step::More => send(stream, &mut out).await?,
                Step::Enter(negotiated) => {
                    send(stream, &mut out).await?;
                    return Ok(Opening { negotiated, early: rest.to_vec() });
                }
                Step::End(ending) => {
                    send(stream, &mut out).await?;
                    return Err(ending);
                }
            }
        }
        inbox = buffer;
    }
}

async fn send(stream: &dyn ByteStream, out: &mut Vec<u8>) -> Result<(), Ending> {
    if out.is_empty() {
        return Ok(());
    }
    let written = stream.write_all(Buffer::copy_of(out)).await;
    out.clear();
    written.map_err(Ending::Failed)
}
