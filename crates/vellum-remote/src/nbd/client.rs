//! The client of one export: it connects, serves the requests of its storage, and connects again.
//!
//! 1. It is one future, and needs nothing but something that connects and a clock: it runs on a thread of its own
//!    ([`open`](super::open)) and in the simulator alike.
//! 2. The export must be the same after it was connected to again, as far as the server says: its size, its flags,
//!    its limits. Another one is never read as if it were the first; the requests that are held fail.
//! 3. Where there is TLS it begins on each connection before anything else is said; there is no way back to plain text (`tls`).
//! 4. A server that does not answer is left after [`ClientOptions::stall`]; the requests are then held, and sent
//!    again on the next connection. After [`ClientOptions::patience`] they fail.

use std::sync::Arc;
use std::time::Duration;

use futures_lite::future::{or, yield_now};
use vellum_core::{ByteStream, Clock, Error, ErrorKind, LocalFuture, Result};
use vellum_export::nbd::{TlsClient, TlsStream};
use vellum_io::{OneshotReceiver, OneshotSender, oneshot};

use super::desk::Desk;
use super::handshake::{ExportFacts, greet, handshake};
use super::intake::Intake;
use super::session::Session;
use super::storage::NbdStorage;
use super::tls::{reason, start_tls};

/// How long the client waits before it connects again: at first, and at most.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// Deadlines are looked at this often.
const TICK: Duration = Duration::from_millis(500);
/// At the end of TLS a server gets at most this long to take the closing alert.
const CLOSING: Duration = Duration::from_secs(1);

/// Connects to the server.
pub trait Dial {
    /// A new connection.
    ///
    /// # Errors
    /// Why there is none.
    fn dial(&self) -> LocalFuture<'_, Result<Box<dyn ByteStream>>>;

    /// How the next connection is to be encrypted; `None` for not at all.
    ///
    /// # Errors
    /// Why it cannot be.
    fn tls(&self) -> LocalFuture<'_, Result<Option<TlsClient>>> {
        Box::pin(std::future::ready(Ok(None)))
    }
}

/// How an export is used.
#[derive(Debug, Clone)]
pub struct ClientOptions {
    /// Nothing is written.
    pub read_only: bool,
    /// Requests are held for this long while the server is not reachable; then they fail.
    pub patience: Duration,
    /// A server that says nothing for this long, while requests wait for it, is connected to anew.
    pub stall: Duration,
    /// Connecting, and the handshake, may each take this long.
    pub connect: Duration,
    /// At most this many questions about what is stored go to the server; further ones fail. `None` sets no limit.
    pub statuses_max: Option<u64>,
}

impl Default for ClientOptions {
    fn default() -> Self {
        Self {
            read_only: true,
            patience: Duration::from_secs(90),
            stall: Duration::from_secs(30),
            connect: Duration::from_secs(15),
            statuses_max: None,
        }
    }
}

impl ClientOptions {
    /// The options with which a request to a remote image is held for at most `timeout`.
    pub fn with_timeout(timeout: Duration) -> Self {
        let usual = Self::default();
        Self { patience: timeout, connect: usual.connect.min(timeout), ..usual }
    }
}

/// A storage that is not open yet.
pub struct Opening {
    desk: Arc<Desk>,
    options: ClientOptions,
    facts: OneshotReceiver<Result<ExportFacts>>,
}

/// What serves the storage, as long as it is open.
pub struct Client {
    desk: Arc<Desk>,
    export: String,
    options: ClientOptions,
    first: Option<OneshotSender<Result<ExportFacts>>>,
}

/// The two halves of a storage that is called `name` in messages: one that becomes the storage, and one that runs.
pub fn prepare(name: String, export: String, options: ClientOptions) -> (Opening, Client) {
    let desk = Arc::new(Desk::new(name, options.patience));
    let (sender, facts) = oneshot();
    let client = Client { desk: desk.clone(), export, options: options.clone(), first: Some(sender) };
    (Opening { desk, options, facts }, client)
}

impl Opening {
    /// Waits until the export is open.
    ///
    /// # Errors
    /// Why it cannot be used, or not in this way.
    pub async fn opened(self) -> Result<Arc<NbdStorage>> {
        let Self { desk, options, facts } = self;
        let name = desk.name().to_owned();
        let gone = || Err(Error::new(ErrorKind::Closed, "the client has ended"));
        let opened = facts.await.unwrap_or_else(gone);
        let opened = opened.map_err(|error| error.context(format!("can't open {name}")));
        let storage = opened
            .and_then(|facts| NbdStorage::new(desk.clone(), facts, options.read_only, options.statuses_max));
        if storage.is_err() {
            desk.close();
        }
        storage.map(Arc::new)
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.desk.end();
    }
}

impl Client {
    /// Runs until the storage is dropped.
    pub async fn run(mut self, dial: &dyn Dial, clock: &dyn Clock) {
        let desk = self.desk.clone();
        let expire = async {
            loop {
                clock.sleep(TICK).await;
                desk.give_up(clock.now());
            }
        };
        or(self.connections(dial, clock), expire).await;
    }

    async fn connections(&mut self, dial: &dyn Dial, clock: &dyn Clock) {
        let mut wait = BACKOFF.0;
        let mut facts: Option<ExportFacts> = None;
        loop {
            let mut answered = 0;
            match self.one(dial, clock, &mut facts, &mut answered).await {
                Ok(()) => return,
                // Nobody has the storage yet: the first error is the answer.
                Err(_) if facts.is_none() => return,
                Err(_) => {}
            }
            if answered > 0 {
                wait = BACKOFF.0;
            }
            let closed = async {
                loop {
                    let listener = self.desk.listen();
                    if self.desk.is_closed() {
                        return;
                    }
                    listener.await;
                }
            };
            or(closed, clock.sleep(wait)).await;
            if self.desk.is_closed() {
                return;
            }
            wait = (wait * 2).min(BACKOFF.1);
            yield_now().await;
        }
    }

    /// One connection, from dialling to its end. `Ok` when the storage is closed.
    async fn one(
        &mut self,
        dial: &dyn Dial,
        clock: &dyn Clock,
        facts: &mut Option<ExportFacts>,
        answered: &mut u64,
    ) -> Result<()> {
        let (limit, begun) = (self.options.connect, clock.now());
        let connecting = async { Ok((dial.tls().await?, dial.dial().await?)) };
        let connected = within(clock, begun, limit, "can't connect", connecting).await;
        let (tls, stream) = match connected {
            Ok(connected) => connected,
            Err(error) => return Err(self.failed(clock, facts.is_some(), error)),
        };
        let mut intake = Intake::new(&*stream);
        let begun = clock.now();
        let greeting = async {
            greet(&*stream, &mut intake).await?;
            match &tls {
                Some(tls) => start_tls(&*stream, &mut intake, tls).await.map(Some),
                None => Ok(None),
            }
        };
        let sealed: Option<TlsStream<'_>> = match within(clock, begun, limit, "no handshake", greeting).await
        {
            Ok(sealed) => sealed,
            Err(error) => {
                stream.shutdown();
                return Err(self.failed(clock, facts.is_some(), error));
            }
        };
        let stream: &dyn ByteStream = match &sealed {
            Some(sealed) => {
                intake = Intake::new(sealed);
                sealed
            }
            None => &*stream,
        };
        let shaking = async {
            match (handshake(stream, &mut intake, &self.export).await, &sealed) {
                (Err(error), Some(sealed)) => Err(reason(sealed, error).await),
                (shaken, _) => shaken,
            }
        };
        let shaken = within(clock, begun, limit, "no handshake", shaking).await;
        let now_facts = match (shaken, &*facts) {
            (Ok(new), Some(old)) if is_same(old, &new, self.options.read_only) => new,
            (Ok(_), Some(_)) => {
                stream.shutdown();
                let error = Error::new(
                    ErrorKind::Io,
                    "the export has changed: its size or its properties are others",
                );
                return Err(self.failed(clock, true, error));
            }
            (Ok(new), None) => new,
            (Err(error), known) => {
                stream.shutdown();
                return Err(self.failed(clock, known.is_some(), error));
            }
        };
        *facts = Some(now_facts.clone());
        self.desk.up();
        if let Some(first) = self.first.take() {
            first.send(Ok(now_facts.clone()));
        }
        let session = Session::new(&self.desk, stream, &now_facts);
        let send = async { session.send().await };
        let receive = async { session.receive(&mut intake).await.map(|never| match never {}) };
        let watch = async { Err(until_stalled(&session, clock, self.options.stall).await) };
        let ended = or(or(send, receive), watch).await;
        *answered = session.answered.get();
        if ended.is_ok() && sealed.is_some() {
            // A server may take an end without it for an attack.
            or(async { drop(stream.send_close().await) }, clock.sleep(CLOSING)).await;
        }
        stream.shutdown();
        let unanswered = session.into_left();
        if let Err(error) = &ended {
            tracing::debug!("{}: {}", self.desk.name(), error.chain());
            self.desk.lost(clock.now(), error, unanswered, *answered > 0);
        }
        ended
    }

    /// There is no connection for this reason.
    fn failed(&mut self, clock: &dyn Clock, was_open: bool, error: Error) -> Error {
        match self.first.take() {
            Some(first) => first.send(Err(error.clone())),
            None if was_open => self.desk.down(clock.now(), &error, Vec::new()),
            None => {}
        }
        error
    }
}

/// Whether it is the export that was opened first. The number of a context belongs to its connection, and a disk that
/// is only read may have become read-only.
fn is_same(old: &ExportFacts, new: &ExportFacts, read_only: bool) -> bool {
    let ExportFacts { size, flags, block_size, payload_max, structured, allocation, moved, description: _ } =
        old;
    *size == new.size
        && (read_only || *flags == new.flags)
        && *block_size == new.block_size
        && *payload_max == new.payload_max
        && *structured == new.structured
        && allocation.is_some() == new.allocation.is_some()
        // It may move meanwhile, and does not come back.
        && (moved.is_none() || *moved == new.moved)
}

/// The work, if it ends within a time that has begun.
async fn within<T>(
    clock: &dyn Clock,
    begun: Duration,
    limit: Duration,
    what: &str,
    work: impl Future<Output = Result<T>>,
) -> Result<T> {
    let late = async {
        clock.sleep((begun + limit).saturating_sub(clock.now())).await;
        Err(Error::new(ErrorKind::Io, format!("{what} within {} seconds", limit.as_secs())))
    };
    or(work, late).await
}

/// Waits until the server has said nothing for this long while requests were waiting for it.
async fn until_stalled(session: &Session<'_>, clock: &dyn Clock, stall: Duration) -> Error {
    let mut seen = (session.heard.get(), clock.now());
    loop {
        clock.sleep(TICK.min(stall)).await;
        let (heard, now) = (session.heard.get(), clock.now());
        if heard != seen.0 || session.pending.borrow().is_empty() {
            seen = (heard, now);
        } else if now.saturating_sub(seen.1) >= stall {
            return Error::new(
                ErrorKind::Io,
                format!("the server has not answered for {} seconds", stall.as_secs()),
            );
        }
    }
}
