//! Remote images of a server: how long they are waited for, and whom it trusts where they are at NBD servers. The options for TLS have
//! other names than elsewhere, because those are for the clients of this server.

use std::path::PathBuf;
use std::time::Duration;

use vellum_core::Result;
use vellum_daemon::{NbdTls, Remote, TlsChoice};

use super::IMAGES;
use crate::args::{parse_seconds, with_certificates};
use crate::names::Named;
use crate::secrets::SecretArgs;

/// How remote images are asked for
#[derive(Debug, clap::Args)]
pub(crate) struct RemoteArgs {
    /// How long to hold a request while a remote backing image does not answer, in seconds (default 60)
    ///
    /// After that the request fails with an I/O error, and the next one tries again.
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds, help_heading = IMAGES)]
    remote_timeout: Option<Duration>,
    /// For images at NBD exports named nbds:…, ca-cert.pem in DIR, and client-cert.pem and client-key.pem if they exist
    ///
    /// Default: the authorities that this host trusts, and no certificate.
    #[arg(long, value_name = "DIR", help_heading = IMAGES)]
    remote_tls_certificates: Option<PathBuf>,
    /// For NBD exports named nbds:…, the name that the server's certificate must be for. Default: the host of the URL; at a Unix socket, any
    #[arg(long, value_name = "NAME", help_heading = IMAGES)]
    remote_tls_hostname: Option<String>,
    /// For NBD exports named nbds:…, accept any server
    #[arg(long, conflicts_with = "remote_tls_hostname", help_heading = IMAGES)]
    remote_tls_unverified: bool,
}

impl RemoteArgs {
    /// As the library takes it, with the certificates that the image has been given by options.
    pub(super) fn of(&self, named: Option<&Named>, secrets: &SecretArgs) -> Result<Remote> {
        let usual = TlsChoice {
            directory: self.remote_tls_certificates.clone(),
            hostname: self.remote_tls_hostname.clone(),
            is_unverified: self.remote_tls_unverified,
        };
        let nbd_tls = NbdTls { usual, of: Vec::new() };
        // Guests may ask for as long as they like.
        let remote = Remote { timeout: self.remote_timeout, nbd_tls, is_bounded: false };
        with_certificates(remote, named.as_slice(), secrets)
    }
}
