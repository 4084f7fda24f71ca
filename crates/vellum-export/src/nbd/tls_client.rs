//! The client's side of TLS: whom it trusts, and its own certificate.
//!
//! Its authorities, and its own certificate, are in a directory that is laid out as QEMU and libnbd have it. Without one the authorities are
//! those of this host, as for `https:`, and it has no certificate.
//!
//! 1. The server's chain is verified in any case, unless the caller asks for no verification at all; its name where the caller has one. On a
//!    Unix socket there is none.
//! 2. Where files cannot be read there is no connection. No certificate of its own is needed unless the server wants one.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{
    AlertDescription, CertificateError, ClientConfig, ClientConnection, DigitallySignedStruct, RootCertStore,
    SignatureScheme,
};
use vellum_core::{ByteStream, Error, ErrorKind, Result};

use super::tls::{TlsStream, certificates, private_key, revoked, trusted, unreadable};

/// Who the server must be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServerIdentity {
    /// It has a certificate for this name or address, by an authority in `ca-cert.pem`.
    Named(String),
    /// It has a certificate by such an authority, for whatever name.
    Known,
    /// Anybody.
    Anybody,
}

/// How a client talks TLS.
#[derive(Clone)]
pub struct TlsClient {
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
    /// Where it all was, for messages.
    directory: Option<PathBuf>,
}

impl fmt::Debug for TlsClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TlsClient")
    }
}

impl TlsClient {
    /// Reads `ca-cert.pem` of a directory, `ca-crl.pem` if it exists, and `client-cert.pem` with `client-key.pem` if they do. Without a
    /// directory the authorities are those of this host.
    ///
    /// # Errors
    /// When a file is missing, or holds something else; for an impossible name of the server.
    pub fn new(directory: Option<&Path>, identity: ServerIdentity) -> Result<Self> {
        let provider = Arc::new(ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(|error| Error::invalid(format!("can't use TLS: {error}")))?;
        let verifier: Arc<dyn ServerCertVerifier> = match identity {
            ServerIdentity::Anybody => Arc::new(Nameless { provider, chain: None }),
            ServerIdentity::Named(_) | ServerIdentity::Known => {
                let (roots, revoked, place) = match directory {
                    Some(directory) => {
                        let path = directory.join("ca-cert.pem");
                        (trusted(&path)?, revoked(&directory.join("ca-crl.pem"))?, path)
                    }
                    None => (trusted_by_host()?, Vec::new(), PathBuf::from("what this host trusts")),
                };
                let verifier = WebPkiServerVerifier::builder_with_provider(roots, provider.clone())
                    .with_crls(revoked)
                    .allow_unknown_revocation_status() // a certificate whose issuer has no list is not revoked
                    .build()
                    .map_err(|error| unreadable(&place, "an authority", &error))?;
                match identity {
                    ServerIdentity::Named(_) => verifier,
                    _ => Arc::new(Nameless { provider, chain: Some(verifier) }),
                }
            }
        };
        let builder = builder.dangerous().with_custom_certificate_verifier(verifier);
        let own = directory.map(|directory| (directory, directory.join("client-cert.pem")));
        let mut config = match own.filter(|(_, own)| !own.try_exists().is_ok_and(|exists| !exists)) {
            None => builder.with_no_client_auth(),
            Some((directory, own)) => {
                let key = private_key(&directory.join("client-key.pem"))?;
                builder.with_client_auth_cert(certificates(&own)?, key).map_err(|error| {
                    let doing = format!("can't use the certificate and the key in {}", directory.display());
                    Error::invalid(format!("{doing}: {error}"))
                })?
            }
        };
        let name = match identity {
            ServerIdentity::Named(name) => ServerName::try_from(name.clone()).map_err(|_| {
                Error::invalid(format!("{name:?} is neither the name nor the address of a host"))
            })?,
            ServerIdentity::Known | ServerIdentity::Anybody => {
                config.enable_sni = false;
                ServerName::try_from("localhost").expect("a name")
            }
        };
        Ok(Self { config: Arc::new(config), name, directory: directory.map(Path::to_owned) })
    }

    /// The client's side of the handshake, after the server has agreed to it.
    ///
    /// # Errors
    /// When the server is not who it must be, or does not talk TLS.
    pub async fn connect<'a>(&self, stream: &'a dyn ByteStream) -> Result<TlsStream<'a>> {
        let connection = ClientConnection::new(self.config.clone(), self.name.clone())
            .map_err(|error| Error::invalid(format!("can't start TLS: {error}")))?;
        let told = self.clone();
        TlsStream::connect(stream, connection, Arc::new(move |error| told.explained(error))).await
    }

    /// An error of rustls, with the file that it is about and what to do.
    fn explained(&self, error: &rustls::Error) -> Error {
        let refused = |why: String| Error::new(ErrorKind::Refused, why);
        let name = self.name.to_str();
        match error {
            rustls::Error::InvalidCertificate(why) => refused(match why {
                CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
                    "the server's certificate has expired: it needs a new one".to_owned()
                }
                CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
                    "the server's certificate is not valid yet: compare the clocks of both hosts".to_owned()
                }
                // Another authority of the same name is none of them.
                CertificateError::UnknownIssuer | CertificateError::BadSignature => match &self.directory {
                    Some(directory) => format!(
                        "the server's certificate is by no authority in {}",
                        directory.join("ca-cert.pem").display()
                    ),
                    None => "the server's certificate is by no authority that this host trusts: use --tls-certificates DIR, with its \
                             ca-cert.pem"
                        .to_owned(),
                },
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => format!(
                    "the server's certificate is for another name than {name}{}: use --tls-hostname NAME, with a name that it is for",
                    names_in(why)
                ),
                CertificateError::Revoked => "the server's certificate is revoked (ca-crl.pem)".to_owned(),
                _ => format!("the server's certificate is not valid: {why}"),
            }),
            rustls::Error::AlertReceived(
                alert @ (AlertDescription::BadCertificate
                | AlertDescription::UnsupportedCertificate
                | AlertDescription::CertificateRevoked
                | AlertDescription::CertificateExpired
                | AlertDescription::CertificateUnknown
                | AlertDescription::UnknownCA
                | AlertDescription::AccessDenied
                | AlertDescription::CertificateRequired),
            ) => {
                let wanted = match &self.directory {
                    Some(directory) => format!(
                        "it wants another one than {}, or one at all",
                        directory.join("client-cert.pem").display()
                    ),
                    None => "it wants one: use --tls-certificates DIR, with client-cert.pem and client-key.pem"
                        .to_owned(),
                };
                refused(format!("the server does not accept our certificate ({alert:?}): {wanted}"))
            }
            _ => Error::new(ErrorKind::Invalid, format!("invalid TLS data: {error}")),
        }
    }
}

/// The names that a certificate is for, where they are known.
fn names_in(why: &CertificateError) -> String {
    match why {
        CertificateError::NotValidForNameContext { presented, .. } if !presented.is_empty() => {
            let names: Vec<String> = presented.iter().take(8).map(|name| plain_name(name)).collect();
            format!(" ({})", names.join(", "))
        }
        _ => String::new(),
    }
}

/// A name in a certificate: `DnsName("host")` and `IpAddress(127.0.0.1)` to rustls.
fn plain_name(name: &str) -> String {
    let inner = name.split_once('(').and_then(|(_, rest)| rest.strip_suffix(')')).unwrap_or(name);
    inner.trim_matches('"').escape_debug().to_string()
}

/// The authorities that programs on this host trust.
fn trusted_by_host() -> Result<Arc<RootCertStore>> {
    let found = rustls_native_certs::load_native_certs();
    let mut roots = RootCertStore::empty();
    // Old ones that cannot be parsed are usual.
    let (added, _) = roots.add_parsable_certificates(found.certs);
    match added {
        0 => {
            Err(Error::invalid("this host trusts no authority: use --tls-certificates DIR, with ca-cert.pem"))
        }
        _ => Ok(Arc::new(roots)),
    }
}

/// A server whose name is not looked at. It has the key of the certificate that it shows in any case.
#[derive(Debug)]
struct Nameless {
    provider: Arc<CryptoProvider>,
    /// Verifies its chain, unless anybody will do.
    chain: Option<Arc<WebPkiServerVerifier>>,
}

impl ServerCertVerifier for Nameless {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let Some(chain) = &self.chain else { return Ok(ServerCertVerified::assertion()) };
        match chain.verify_server_cert(end_entity, intermediates, name, ocsp, now) {
            // The name is looked at last, when everything else was right.
            Err(rustls::Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) => Ok(ServerCertVerified::assertion()),
            other => other,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let known = &self.provider.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signed, known)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let known = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signed, known)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
