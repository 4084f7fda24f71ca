//! An export of an NBD server as a [`Storage`](vellum_core::Storage): fixed newstyle, structured replies, block
//! status.
//!
//! ```text
//!   NbdStorage ── requests ──▶ Desk ──▶ Client: connect, handshake, Session … and again      one thread of its own
//!   any worker                         └─ url, intake, tls: where it is, its bytes, and how they are encrypted
//! ```
//!
//! In reading order: `url`, `handshake`, `tls`, `desk` (requests that wait), `session` (one connection), `client`
//! (connecting again), `storage`.
//!
//! Nothing proves what an NBD export holds: a caller that keeps parts of it must know that it does not change.
//!
//! `list` asks a server what it has.
//!
//! Left out: TLS with pre-shared keys, several connections to one export, extended headers.

mod client;
mod desk;
#[cfg(any(test, feature = "fuzz"))]
#[doc(hidden)]
pub mod fuzz;
mod handshake;
mod intake;
mod list;
mod session;
mod storage;
mod tls;
mod url;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

pub use client::{Client, ClientOptions, Dial, Opening, prepare};
pub use handshake::ExportFacts;
pub use list::{FLAG_NAMES, ListedExport, list};
pub use storage::{NbdStorage, STATUSES_MAX};
pub use tls::{NbdTls, TlsChoice};
pub use url::NbdUrl;
use vellum_core::{ByteStream, Error, ErrorKind, LocalFuture, Result, Url};
use vellum_export::nbd::TlsClient;
use vellum_io::{Address, IoMode, clock, connect, run, unblock, unblock_at};

use crate::RemoteOptions;

/// Connects to a real server.
struct Server {
    address: Address,
    tls: Option<TlsChoice>,
    /// The certificates are being read. A file system that hangs keeps one thread for each server, and not one for each attempt.
    is_reading: Arc<AtomicBool>,
}

impl Dial for Server {
    fn dial(&self) -> LocalFuture<'_, Result<Box<dyn ByteStream>>> {
        Box::pin(async move { Ok(Box::new(connect(&self.address).await?.attach()) as Box<dyn ByteStream>) })
    }

    fn tls(&self) -> LocalFuture<'_, Result<Option<TlsClient>>> {
        Box::pin(async move {
            let Some(choice) = self.tls.clone() else { return Ok(None) };
            if self.is_reading.swap(true, Ordering::AcqRel) {
                let why = "its certificates are still being read: does their file system answer?";
                return Err(Error::new(ErrorKind::Io, why));
            }
            let (address, is_reading) = (self.address.clone(), self.is_reading.clone());
            let place = choice.directory.as_ref().map(|directory| directory.join("ca-cert.pem"));
            let read = move || {
                let client = choice.client(&address);
                is_reading.store(false, Ordering::Release);
                client
            };
            match place {
                Some(place) => unblock_at(&place, read).await.map(Some),
                None => unblock(read).await.map(Some),
            }
        })
    }
}

/// Opens the export of this URL. Any executor may poll this; a thread that ends with the storage does the work.
///
/// # Errors
/// Why the export cannot be used, or not in this way.
pub async fn open(url: &Url, remote: &RemoteOptions, read_only: bool) -> Result<Arc<NbdStorage>> {
    let place: NbdUrl = url.to_string().parse()?;
    let options = ClientOptions {
        read_only,
        statuses_max: remote.statuses_max,
        ..ClientOptions::with_timeout(remote.timeout)
    };
    let server = Server {
        address: place.address.clone(),
        tls: remote.nbd_tls.choice(url, place.has_tls)?.cloned(),
        is_reading: Arc::default(),
    };
    let name = place.to_string();
    let (opening, client) = prepare(name.clone(), place.export, options);
    let started = std::thread::Builder::new().name("vellum-nbd".into()).spawn(move || {
        let ended = run(IoMode::Auto, async move || client.run(&server, &*clock()).await);
        if let Err(error) = ended {
            tracing::error!("{name}: {}", error.chain());
        }
    });
    started.map_err(|error| Error::io(error, format!("can't start a thread for {url}")))?;
    opening.opened().await
}
