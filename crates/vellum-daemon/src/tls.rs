//! The certificates of a server, and its access list: read when it starts, and again on SIGHUP. An access list in a file is also read
//! again when the file has changed, as QEMU does.
//!
//! Existing connections keep the certificates they began with. If files cannot be read, the previous ones
//! stay in use.

use std::convert::Infallible;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use vellum_core::{Result, lock};
use vellum_export::nbd::{Tls, TlsPolicy};
use vellum_io::{clock, unblock};

use crate::access::AccessSource;

/// How often it is looked whether the access list has changed.
const LOOKED_EVERY: Duration = Duration::from_secs(1);

/// Where certificates are, and what clients must do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// The directory, laid out as QEMU has it.
    pub directory: PathBuf,
    /// Clients without a certificate by an authority in `ca-cert.pem` are kept out.
    pub verifies_clients: bool,
    /// Nothing is answered before TLS.
    pub is_required: bool,
    /// Which of the clients that the authorities know are let in. `None`: all of them.
    pub access: Option<AccessSource>,
}

impl TlsFiles {
    /// Reads them.
    ///
    /// # Errors
    /// When a file is missing, or holds something else.
    pub fn read(&self) -> Result<TlsPolicy> {
        let tls = Tls::from_directory(&self.directory, self.verifies_clients)?;
        let tls = match &self.access {
            Some(access) => tls.with_access_list(access.read()?),
            None => tls,
        };
        Ok(if self.is_required { TlsPolicy::Required(tls) } else { TlsPolicy::Offered(tls) })
    }
}

/// What the next connection is given.
#[derive(Clone, Default)]
pub(crate) struct TlsNow {
    files: Option<TlsFiles>,
    policy: Arc<Mutex<TlsPolicy>>,
    /// The file of the access list in use, as it was when it began to be read.
    seen: Arc<Mutex<Option<Option<Stamp>>>>,
    /// The same of the last one that could not be read, which was said.
    failed: Arc<Mutex<Option<Option<Stamp>>>>,
}

/// A file that is replaced is another one; one that is written, or gets a time that it had before, was changed at another time, to the
/// nanosecond.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Stamp {
    file: (u64, u64),
    bytes: u64,
    changed: (i64, i64),
}

impl Stamp {
    fn of(path: &Path) -> Option<Self> {
        let facts = std::fs::metadata(path).ok()?;
        Some(Self {
            file: (facts.dev(), facts.ino()),
            bytes: facts.size(),
            changed: (facts.ctime(), facts.ctime_nsec()),
        })
    }
}

impl TlsNow {
    pub(crate) fn read(files: Option<TlsFiles>) -> Result<Self> {
        let now = Self { files, ..Self::default() };
        *lock(&now.seen) = now.stamp();
        if let Some(files) = &now.files {
            *lock(&now.policy) = files.read()?;
        }
        Ok(now)
    }

    pub(crate) fn policy(&self) -> TlsPolicy {
        lock(&self.policy).clone()
    }

    /// Reads the access list again whenever its file has changed, for ever. One that cannot be read is tried again each time.
    pub(crate) async fn watch(&self) -> Infallible {
        if self.stamp().is_none() {
            return std::future::pending().await;
        }
        loop {
            clock().sleep(LOOKED_EVERY).await;
            let tls = self.clone();
            unblock(move || {
                let now = tls.stamp();
                // Between the removal of a file and the next one of its name the list stays as it is.
                if now.as_ref().is_some_and(Option::is_some) && now != *lock(&tls.seen) {
                    tls.read_list_again(now);
                }
            })
            .await;
        }
    }

    /// What tells that the file of the access list has changed, if there is a file. May block.
    fn stamp(&self) -> Option<Option<Stamp>> {
        match self.files.as_ref()?.access.as_ref()? {
            AccessSource::Said(_) => None,
            AccessSource::File(path) => Some(Stamp::of(path)),
        }
    }

    /// Reads the access list again, and leaves the certificates as they are: those may just be replaced, and whom the list keeps out
    /// is to be kept out nevertheless.
    fn read_list_again(&self, stamp: Option<Option<Stamp>>) {
        let Some(access) = self.files.as_ref().and_then(|files| files.access.as_ref()) else { return };
        match access.read() {
            Ok(list) => {
                let mut policy = lock(&self.policy);
                let taken = std::mem::take(&mut *policy);
                *policy = match taken {
                    TlsPolicy::Off => TlsPolicy::Off,
                    TlsPolicy::Offered(tls) => TlsPolicy::Offered(tls.with_access_list(list)),
                    TlsPolicy::Required(tls) => TlsPolicy::Required(tls.with_access_list(list)),
                };
                drop(policy);
                *lock(&self.seen) = stamp;
                tracing::warn!("the access list was reloaded; new connections are judged by it");
            }
            Err(error) => {
                let said = lock(&self.failed).replace(stamp.clone().flatten());
                if said != stamp {
                    tracing::error!(
                        "the access list was not reloaded, and the one in use is kept: {}",
                        error.chain()
                    );
                }
            }
        }
    }

    /// Reads the files again, where there are any. May block.
    pub(crate) fn read_again(&self) {
        let Some(files) = &self.files else { return };
        let directory = files.directory.display();
        let stamp = self.stamp();
        let list = if files.access.is_some() { " and the access list" } else { "" };
        match files.read() {
            Ok(policy) => {
                *lock(&self.policy) = policy;
                *lock(&self.seen) = stamp;
                tracing::warn!(
                    "the certificates in {directory}{list} were reloaded; new connections use them"
                );
            }
            Err(error) => {
                tracing::error!(
                    "the certificates{list} were not reloaded, and those in use are kept: {}",
                    error.chain()
                );
            }
        }
    }
}
