//! An export of an NBD server as a [`Storage`](vellum_core::Storage): fixed newstyle, structured replies, block
//! status.
//!
//! ```text
//!   NbdStorage ── requests ──▶ Desk ──▶ Client: connect, handshake, Session … and again      one thread of its own
//!   any worker                         └─ url, intake: where it is, and its bytes
//! ```
//!
//! In reading order: `url`, `handshake`, `desk` (requests that wait), `session` (one connection), `client`
//! (connecting again), `storage`.
//!
//! Nothing proves what an NBD export holds: a caller that keeps parts of it must know that it does not change.
//!
//! `list` asks a server what it has, also over TLS.
//!
//! Left out: TLS for storages, several connections to one export, extended headers.

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
mod url;

use std::sync::Arc;

pub use client::{Client, ClientOptions, Dial, Opening, prepare};
pub use handshake::ExportFacts;
pub use list::{FLAG_NAMES, ListedExport, list};
pub use storage::NbdStorage;
pub use url::NbdUrl;
use vellum_core::{ByteStream, Error, LocalFuture, Result};
use vellum_io::{Address, IoMode, clock, connect, run};

use handshake::printable;

/// Connects to a real server.
struct Server(Address);

impl Dial for Server {
    fn dial(&self) -> LocalFuture<'_, Result<Box<dyn ByteStream>>> {
        Box::pin(async move { Ok(Box::new(connect(&self.0).await?.attach()) as Box<dyn ByteStream>) })
    }
}

/// Opens the export of this URL. Any executor may poll this; a thread that ends with the storage does the work.
///
/// # Errors
/// Why the export cannot be used, or not in this way.
pub async fn open(url: &NbdUrl, options: ClientOptions) -> Result<Arc<NbdStorage>> {
    let (opening, client) = prepare(url.to_string(), url.export.clone(), options);
    let server = Server(url.address.clone());
    let name = url.to_string();
    let started = std::thread::Builder::new().name("vellum-nbd".into()).spawn(move || {
        let ended = run(IoMode::Auto, async move || client.run(&server, &*clock()).await);
        if let Err(error) = ended {
            tracing::error!("{name}: {}", error.chain());
        }
    });
    started.map_err(|error| Error::io(error, format!("can't start a thread for {url}")))?;
    opening.opened().await
}
