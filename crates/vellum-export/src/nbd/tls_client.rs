//! The client's side of TLS: whom it trusts, and its own certificate.
//!
//! 1. The server's chain is verified in any case, unless the caller asks for no verification at all; its name where the caller has one. On a
//!    Unix socket there is none.
//! 2. Where files cannot be read there is no connection. No certificate of its own is needed unless the server wants one.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{
    CertificateError, ClientConfig, ClientConnection, DigitallySignedStruct, RootCertStore, SignatureScheme,
};
use vellum_core::{ByteStream, Error, Result};

use super::tls::{TlsStream, certificates, revoked, unreadable};

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
}

impl fmt::Debug for TlsClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TlsClient")
    }
}

impl TlsClient {
    /// Reads `ca-cert.pem` of a directory, `ca-crl.pem` if it exists, and `client-cert.pem` with `client-key.pem` if they do: the layout
    /// of QEMU and libnbd.
    ///
    /// # Errors
    /// When a file is missing, or holds something else; for an impossible name of the server.
    pub fn from_directory(directory: &Path, identity: ServerIdentity) -> Result<Self> {
        let provider = Arc::new(ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(|error| Error::invalid(format!("can't use TLS: {error}")))?;
        let verifier: Arc<dyn ServerCertVerifier> = match identity {
            ServerIdentity::Anybody => Arc::new(Nameless { provider, chain: None }),
            ServerIdentity::Named(_) | ServerIdentity::Known => {
                let path = directory.join("ca-cert.pem");
                let mut roots = RootCertStore::empty();
                for certificate in certificates(&path)? {
                    roots.add(certificate).map_err(|error| unreadable(&path, "an authority", &error))?;
                }
                let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider.clone())
                    .with_crls(revoked(&directory.join("ca-crl.pem"))?)
                    .allow_unknown_revocation_status() // a certificate whose issuer has no list is not revoked
                    .build()
                    .map_err(|error| unreadable(&path, "an authority", &error))?;
                match identity {
                    ServerIdentity::Named(_) => verifier,
                    _ => Arc::new(Nameless { provider, chain: Some(verifier) }),
                }
            }
        };
        let builder = builder.dangerous().with_custom_certificate_verifier(verifier);
        let own = directory.join("client-cert.pem");
        let mut config = if own.try_exists().is_ok_and(|exists| !exists) {
            builder.with_no_client_auth()
        } else {
            let key_path = directory.join("client-key.pem");
            let key = PrivateKeyDer::from_pem_file(&key_path)
                .map_err(|error| unreadable(&key_path, "a private key without a password", &error))?;
            builder.with_client_auth_cert(certificates(&own)?, key).map_err(|error| {
                let doing = format!("can't use the certificate and the key in {}", directory.display());
                Error::invalid(format!("{doing}: {error}"))
            })?
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
        Ok(Self { config: Arc::new(config), name })
    }

    /// The client's side of the handshake, after the server has agreed to it.
    ///
    /// # Errors
    /// When the server is not who it must be, or does not talk TLS.
    pub async fn connect<'a>(&self, stream: &'a dyn ByteStream) -> Result<TlsStream<'a>> {
        let connection = ClientConnection::new(self.config.clone(), self.name.clone())
            .map_err(|error| Error::invalid(format!("can't start TLS: {error}")))?;
        TlsStream::connect(stream, connection).await
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
