//! One connection from the greeting to the end: the handshake under its deadline, then the transmission.
//!
//! ```text
//!   greeting ──► Handshake, fed and answered ──► attached to an export ──► transmit ──► Ending
//!                  ▲    │ STARTTLS
//!                  └────┘ once, anew, in a TlsStream
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
use super::handshake::{Handshake, Negotiated, Step, TlsStage};
use super::limits::Limits;
use super::tls::{TlsPolicy, TlsStream};
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
struct Opening<'a> {
    negotiated: Negotiated,
    /// The stream within the stream, if there is one.
    sealed: Option<TlsStream<'a>>,
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
    serve_connection_with(&TlsPolicy::Off, stream, exports, clock, limits, shutdown).await
}

/// The same, with TLS where the policy says so.
///
/// # Panics
/// When the limits cannot be worked with; see [`Limits::check`].
pub async fn serve_connection_with(
    tls: &TlsPolicy,
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
    let opening = or(until_shutdown(shutdown), or(negotiate(tls, stream, exports, limits), deadline));
    let ending = match opening.await {
        Ok(Opening { negotiated: Negotiated { attached, terms }, sealed, early }) => {
            let export = attached.export();
            let has_tls = sealed.is_some();
            tracing::info!(export = export.name, read_only = terms.read_only, has_tls, "a client begins");
            let stream = sealed.as_ref().map_or(stream, |sealed| sealed as &dyn ByteStream);
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

/// How a handshake went on in the end.
enum Talk {
    Chosen(Negotiated, Vec<u8>),
    StartTls,
}

async fn negotiate<'a>(
    policy: &TlsPolicy,
    stream: &'a dyn ByteStream,
    exports: &Exports,
    limits: &Limits,
) -> Result<Opening<'a>, Ending> {
    let (stage, tls) = match policy {
        TlsPolicy::Off => (TlsStage::Absent, None),
        TlsPolicy::Offered(tls) => (TlsStage::Offered, Some(tls)),
        TlsPolicy::Required(tls) => (TlsStage::Required, Some(tls)),
    };
    let mut handshake = Handshake::new(exports, limits, stage);
    let talk = converse(stream, &mut handshake, wire::greeting().to_vec()).await?;
    let tls = match (talk, tls) {
        (Talk::Chosen(negotiated, early), _) => return Ok(Opening { negotiated, sealed: None, early }),
        (Talk::StartTls, Some(tls)) => tls,
        (Talk::StartTls, None) => unreachable!("it is refused where there is none"),
    };
    let sealed = TlsStream::accept(stream, tls, limits).await?;
    match converse(&sealed, &mut handshake.inside_tls(), Vec::new()).await? {
        Talk::Chosen(negotiated, early) => Ok(Opening { negotiated, sealed: Some(sealed), early }),
        Talk::StartTls => unreachable!("it is refused inside TLS"),
    }
}

/// Carries the handshake's bytes to and fro.
async fn converse(
    stream: &dyn ByteStream,
    handshake: &mut Handshake<'_>,
    mut out: Vec<u8>,
) -> Result<Talk, Ending> {
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
                    return Ok(Talk::Chosen(negotiated, rest.to_vec()));
                }
                // Nobody who waits for the answer, as TLS is begun, has said more. Somebody else has.
                Step::StartTls if !rest.is_empty() => {
                    return Err(Ending::Violation("bytes in the clear behind the beginning of TLS"));
                }
                Step::StartTls => {
                    send(stream, &mut out).await?;
                    return Ok(Talk::StartTls);
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
