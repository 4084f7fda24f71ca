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
//! 1. Whatever a client does ends its own session and nothing else: there is an [`Ending`] for it, never a
//!    panic.
//! 2. Until a client has chosen an export it holds a small receive buffer, one option and one answer, and may
//!    do so for [`SessionLimits::handshake_time`] only (CVE-2024-7409).
//! 3. The export is held from the moment it was chosen until the last of its requests has ended.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use futures_lite::future::or;
use vellum_core::{Buffer, ByteStream, Clock, LocalFuture, Result};

use super::clients::{Bounds, Client, Clients};
use super::ending::Ending;
use super::exports::Exports;
use super::handshake::{Handshake, Negotiated, Step, TlsStage, has_no_place};
use super::limits::SessionLimits;
use super::tls::{TlsPolicy, TlsStream};
use super::transmission::{Ground, transmit};
use super::wire;
use crate::shutdown::{Shutdown, Stage, Watch};

/// What the handshake left behind.
struct Opening<'a> {
    negotiated: Negotiated,
    /// The stream within the stream, if there is one.
    sealed: Option<TlsStream<'a>>,
    /// Bytes that came behind it.
    early: Vec<u8>,
}

/// Serves one client on one connection, and returns when the connection has ended and nothing it began is
/// running.
///
/// The stream was shut down then, and can be closed. The future must not be dropped before it has ended: disk
/// requests may be half done (contract 10 of the disk). To end it early, use the `shutdown`.
///
/// An accept loop runs this as a task of its own for each connection, on the connection's worker:
///
/// ```
/// # use vellum_core::{ByteStream, Clock};
/// # use vellum_export::nbd::{Exports, SessionLimits, serve_connection};
/// # use vellum_export::{ConnectionSlot, Shutdown};
/// # async fn one(
/// #     stream: &dyn ByteStream, slot: ConnectionSlot,
/// #     exports: &Exports, clock: &dyn Clock, limits: &SessionLimits, shutdown: &Shutdown,
/// # ) {
/// let ending = serve_connection(stream, exports, clock, limits, shutdown).await;
/// drop(slot);
/// # let _ = ending; }
/// ```
///
/// # Panics
/// When the limits cannot be worked with; see [`SessionLimits::check`].
pub async fn serve_connection(
    stream: &dyn ByteStream,
    exports: &Exports,
    clock: &dyn Clock,
    limits: &SessionLimits,
    shutdown: &Shutdown,
) -> Ending {
    serve_connection_with(&TlsPolicy::Off, stream, exports, clock, limits, shutdown).await
}

/// As above, with TLS where the policy says so.
///
/// # Panics
/// When the limits cannot be worked with; see [`SessionLimits::check`].
pub async fn serve_connection_with(
    tls: &TlsPolicy,
    stream: &dyn ByteStream,
    exports: &Exports,
    clock: &dyn Clock,
    limits: &SessionLimits,
    shutdown: &Shutdown,
) -> Ending {
    let nobody_else = Bounds { seats: 1, seats_per_export: 1, lobby: 1, memory_bytes: usize::MAX };
    let client = Clients::new(nobody_else, Arc::new(Timeless)).arrive("a client");
    serve_client(&client, tls, stream, exports, clock, limits, shutdown).await
}

/// For clients that are not counted.
struct Timeless;

impl Clock for Timeless {
    fn now(&self) -> Duration {
        Duration::ZERO
    }

    fn sleep(&self, _wait: Duration) -> LocalFuture<'static, ()> {
        Box::pin(std::future::pending())
    }
}

/// As above, for one of several [`Clients`].
///
/// # Panics
/// When the limits cannot be worked with; see [`SessionLimits::check`].
pub async fn serve_client(
    client: &Client,
    tls: &TlsPolicy,
    stream: &dyn ByteStream,
    exports: &Exports,
    clock: &dyn Clock,
    limits: &SessionLimits,
    shutdown: &Shutdown,
) -> Ending {
    limits.check().expect("the limits were checked when they were set");
    let deadline = async {
        clock.sleep(limits.handshake_time).await;
        Err(Ending::Refused("the handshake took too long"))
    };
    let ended = or(until_shutdown(shutdown), until_shutdown(client.shutdown()));
    let opening = or(ended, or(negotiate(client, clock, tls, stream, exports, limits), deadline));
    let ending = match opening.await {
        Ok(Opening { negotiated: Negotiated { attached, terms, marks, .. }, sealed, early }) => {
            let export = attached.export();
            let has_tls = sealed.is_some();
            let (peer, subject) = (client.peer(), sealed.as_ref().and_then(TlsStream::subject));
            let read_only = terms.read_only;
            tracing::info!(peer, subject, export = export.name, read_only, has_tls, "a client has connected");
            if let Some(subject) = subject {
                client.identify(subject);
            }
            let stream = sealed.as_ref().map_or(stream, |sealed| sealed as &dyn ByteStream);
            let watches = [shutdown, attached.shutdown(), attached.told(), client.shutdown()].map(Watch::new);
            let disk = attached.disk();
            let ground = Ground { client, clock, stream, disk, terms: &terms, marks: &marks, limits };
            let ending = transmit(ground, watches, &early).await;
            tracing::info!(peer, export = export.name, %ending, "a client has disconnected");
            ending
        }
        Err(ending) => {
            tracing::debug!(peer = client.peer(), %ending, "a client did not choose an export");
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
    client: &Client,
    clock: &dyn Clock,
    policy: &TlsPolicy,
    stream: &'a dyn ByteStream,
    exports: &Exports,
    limits: &SessionLimits,
) -> Result<Opening<'a>, Ending> {
    let (stage, tls) = match policy {
        TlsPolicy::Off => (TlsStage::Absent, None),
        TlsPolicy::Offered(tls) => (TlsStage::Offered, Some(tls)),
        TlsPolicy::Required(tls) => (TlsStage::Required, Some(tls)),
    };
    let mut handshake = Handshake::new(exports, limits, stage);
    // Soon enough for the answer to come before the deadline of all.
    let patience = (clock, limits.handshake_time / 2);
    let talk = converse(client, patience, stream, &mut handshake, wire::greeting().to_vec()).await?;
    let tls = match (talk, tls) {
        (Talk::Chosen(negotiated, early), _) => return Ok(Opening { negotiated, sealed: None, early }),
        (Talk::StartTls, Some(tls)) => tls,
        (Talk::StartTls, None) => unreachable!("it is refused where there is none"),
    };
    let sealed = TlsStream::accept(stream, tls, limits).await?;
    if !sealed.admits(tls, client.peer()) {
        // It may be told that this is the end; whether it hears it does not matter.
        let _ = sealed.send_close().await;
        return Err(Ending::Refused("its certificate is not in the access list"));
    }
    match converse(client, patience, &sealed, &mut handshake.inside_tls(), Vec::new()).await? {
        Talk::Chosen(negotiated, early) => Ok(Opening { negotiated, sealed: Some(sealed), early }),
        Talk::StartTls => unreachable!("it is refused inside TLS"),
    }
}

/// Carries the handshake's bytes to and fro.
async fn converse(
    client: &Client,
    (clock, place_time): (&dyn Clock, Duration),
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
                    let admitted = async {
                        client.admit(&negotiated.attached.export().name).await;
                        true
                    };
                    let late = async {
                        match negotiated.may_be_refused {
                            true => clock.sleep(place_time).await,
                            false => std::future::pending().await,
                        }
                        false
                    };
                    if !or(admitted, late).await {
                        has_no_place(&mut out);
                        send(stream, &mut out).await?;
                        continue;
                    }
                    send(stream, &mut out).await?;
                    return Ok(Talk::Chosen(negotiated, rest.to_vec()));
                }
                // A client waits for this answer before it begins TLS, so it sends nothing more. The bytes
                // are from an attacker in between.
                Step::StartTls if !rest.is_empty() => {
                    return Err(Ending::Violation("unencrypted bytes after the start of TLS"));
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
