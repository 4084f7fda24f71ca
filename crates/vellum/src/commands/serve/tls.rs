//! TLS for NBD clients: the certificates, and the list of clients that are admitted.

use std::path::PathBuf;

use clap::ValueEnum;
use vellum_core::{Context, Error, Result};
use vellum_daemon::{AccessSource, TlsFiles};

use super::NBD;

/// TLS for NBD clients
#[derive(Debug, clap::Args)]
pub(crate) struct TlsArgs {
    /// Serve NBD over TLS, with server-cert.pem and server-key.pem in DIR
    #[arg(long, value_name = "DIR", help_heading = NBD)]
    tls_certificates: Option<PathBuf>,
    /// Whether NBD clients must use TLS
    #[arg(long, value_enum, value_name = "HOW", default_value = "require", requires = "tls_certificates", help_heading = NBD)]
    tls: TlsMode,
    /// Require a client certificate signed by an authority in DIR/ca-cert.pem
    ///
    /// Refuse those that DIR/ca-crl.pem lists, if that file exists. DIR is that of --tls-certificates.
    #[arg(long, requires = "tls_certificates", help_heading = NBD)]
    tls_verify_peer: bool,
    /// Let in only NBD clients whose certificate has this distinguished name; may be given several times
    ///
    /// Such as "C=GB,O=Example,CN=host-7": the names in the order of the certificate, with a backslash before a comma in a value.
    /// The log has the name of each client that connects or is refused.
    #[arg(long, value_name = "NAME", requires = "tls_verify_peer", conflicts_with = "tls_access_list", help_heading = NBD)]
    tls_allow: Vec<String>,
    /// Let in only NBD clients that this access list allows
    ///
    /// FILE has JSON, as for QEMU's authz-list-file: {"policy": "deny", "rules": [{"match": "*,CN=host-?", "format":
    /// "glob", "policy": "allow"}]}. The first rule that fits decides. The file is read again when it has changed. A text that
    /// begins with { is a list itself.
    #[arg(long, value_name = "FILE", requires = "tls_verify_peer", help_heading = NBD)]
    tls_access_list: Option<PathBuf>,
}

/// Whether NBD clients must use TLS
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum TlsMode {
    /// Refuse clients that do not use TLS
    Require,
    /// TLS is offered, not required
    On,
}

impl TlsArgs {
    /// Whether there is TLS.
    pub(super) fn is_used(&self) -> bool {
        self.tls_certificates.is_some()
    }

    /// The certificates and the access list, if there is to be TLS.
    pub(super) fn files(&self, speaks_nbd: bool) -> Result<Option<TlsFiles>> {
        let Some(directory) = &self.tls_certificates else { return Ok(None) };
        if !speaks_nbd {
            return Err(Error::invalid("--tls-certificates is for NBD and needs --nbd"));
        }
        if self.tls_verify_peer && self.tls == TlsMode::On {
            return Err(Error::invalid(
                "--tls-verify-peer has no effect with --tls on, which accepts clients without TLS: use --tls require",
            ));
        }
        let access = match &self.tls_access_list {
            Some(list) => Some(match list.to_str().filter(|text| text.starts_with('{')) {
                Some(text) => AccessSource::text(text)?,
                None => AccessSource::File(
                    std::path::absolute(list).context(|| format!("can't find {}", list.display()))?,
                ),
            }),
            None if self.tls_allow.is_empty() => None,
            None => Some(AccessSource::names(self.tls_allow.iter().cloned())),
        };
        Ok(Some(TlsFiles {
            directory: directory.clone(),
            verifies_clients: self.tls_verify_peer,
            is_required: self.tls == TlsMode::Require,
            access,
        }))
    }
}
