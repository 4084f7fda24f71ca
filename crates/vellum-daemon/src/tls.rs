//! The certificates of a server: read when it starts, and again on SIGHUP.
//!
//! Existing connections keep the certificates they began with. If files cannot be read, the previous ones
//! stay in use.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use vellum_core::{Result, lock};
use vellum_export::nbd::{Tls, TlsPolicy};

/// Where certificates are, and what clients must do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// The directory, laid out as QEMU has it.
    pub directory: PathBuf,
    /// Clients without a certificate by an authority in `ca-cert.pem` are kept out.
    pub verifies_clients: bool,
    /// Nothing is answered before TLS.
    pub is_required: bool,
}

impl TlsFiles {
    /// Reads them.
    ///
    /// # Errors
    /// When a file is missing, or holds something else.
    pub fn read(&self) -> Result<TlsPolicy> {
        let tls = Tls::from_directory(&self.directory, self.verifies_clients)?;
        Ok(if self.is_required { TlsPolicy::Required(tls) } else { TlsPolicy::Offered(tls) })
    }
}

/// What the next connection is given.
#[derive(Clone, Default)]
pub(crate) struct TlsNow {
    files: Option<TlsFiles>,
    policy: Arc<Mutex<TlsPolicy>>,
}

impl TlsNow {
    pub(crate) fn read(files: Option<TlsFiles>) -> Result<Self> {
        let policy = files.as_ref().map_or(Ok(TlsPolicy::Off), TlsFiles::read)?;
        Ok(Self { files, policy: Arc::new(Mutex::new(policy)) })
    }

    pub(crate) fn policy(&self) -> TlsPolicy {
        lock(&self.policy).clone()
    }

    /// Reads the files again, where there are any. May block.
    pub(crate) fn read_again(&self) {
        let Some(files) = &self.files else { return };
        let directory = files.directory.display();
        match files.read() {
            Ok(policy) => {
                *lock(&self.policy) = policy;
                tracing::warn!("the certificates in {directory} were reloaded; new connections use them");
            }
            Err(error) => {
                tracing::error!(
                    "the certificates were not reloaded, and those in use are kept: {}",
                    error.chain()
                );
            }
        }
    }
}
