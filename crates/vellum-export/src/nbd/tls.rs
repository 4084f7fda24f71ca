//! TLS between a client and its session: which clients may use it, the handshake, and a stream that encrypts.
//!
//! ```text
//!   socket ──► inbox │ sealed records ░░░░ │ ──► rustls ──► bytes for the session
//!   socket ◄── one write per 128 KiB ◄────────── rustls ◄── replies, in pieces
//! ```
//!
//! 1. Bytes that came in the clear do not count after the handshake: its first record begins with the first
//!    byte behind `NBD_OPT_STARTTLS` that was read after the answer left, and bytes that were there before
//!    end the connection (CVE-2021-3716).
//! 2. A failed handshake, or an invalid record, ends the connection. There is no way back to plain text.
//! 3. A session may read and write at the same time; only one of the two uses rustls at a time, and never
//!    while either waits. What rustls has to send because of a read, such as the answer to a key update,
//!    leaves with the next reply.
//! 4. In addition to a plain session it holds an inbox, an incomplete record (rustls bounds both), and
//!    [`SEALED_BYTES`] of replies, twice that while they are sent.
//!
//! 5. A session ends with TLS's closing alert (`close_notify`): without it a client cannot tell the end from
//!    a truncation.
//!
//! Left out: pre-shared keys, which rustls does not have; session resumption, because a connection lasts as
//! long as a disk is used; the ciphers of TLS 1.2 that wear out (AES-GCM after 2^24 records), because that
//! version cannot update its keys.
//!
//! Source: NBD protocol, "TLS support".

use std::cell::RefCell;
use std::fmt;
use std::io::{BufRead, IoSlice, Read, Write};
use std::path::Path;
use std::sync::Arc;

use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{
    ClientConnection, Connection, RootCertStore, ServerConfig, ServerConnection, SupportedCipherSuite,
};
use vellum_core::{Buffer, ByteStream, Error, ErrorKind, LocalFuture, Result};

use super::access::{SharedAccessList, Verdict};
use super::certificate::{distinguished_name, loggable, subject};
use super::ending::Ending;
use super::limits::SessionLimits;

/// A file of certificates, keys or revocation lists has at most this many bytes.
const PEM_MAX: u64 = 16 << 20;

/// Sealed replies leave when there is so much of them.
const SEALED_BYTES: usize = 128 << 10;

/// The inbox: a whole record, and room for the head of the next.
const INBOX_BYTES: usize = 32 << 10;

/// A server's part of the handshake is not longer, in bytes: its certificates are the most of it.
const CLIENT_HANDSHAKE_BYTES_MAX: u64 = 1 << 20;

/// Whether clients may, or must, talk TLS.
#[derive(Debug, Clone, Default)]
pub enum TlsPolicy {
    /// There is none.
    #[default]
    Off,
    /// TLS is offered, not required.
    Offered(Tls),
    /// Nothing else is talked about before it.
    Required(Tls),
}

/// The server's certificate, its key, and the authorities that it trusts.
#[derive(Clone)]
pub struct Tls {
    config: Arc<ServerConfig>,
    /// Which of the clients that the authorities know are let in; all of them without a list.
    access: Option<SharedAccessList>,
}

impl Tls {
    /// Reads `server-cert.pem` (with the chain up to, and without, the authority) and `server-key.pem` of a
    /// directory. When clients are verified, only those with a certificate signed by an authority in
    /// `ca-cert.pem` are admitted. Those that `ca-crl.pem` lists, if it exists, are refused.
    ///
    /// # Errors
    /// When a file is missing, or holds something else; when certificate and key do not belong together.
    pub fn from_directory(directory: &Path, verifies_clients: bool) -> Result<Self> {
        let chain = certificates(&directory.join("server-cert.pem"))?;
        let key_path = directory.join("server-key.pem");
        let key = private_key(&key_path)?;
        let mut provider = ring::default_provider();
        provider.cipher_suites.retain(|suite| match suite {
            SupportedCipherSuite::Tls12(suite) => suite.common.confidentiality_limit == u64::MAX,
            SupportedCipherSuite::Tls13(_) => true,
        });
        let provider = Arc::new(provider);
        let builder = ServerConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(|error| Error::invalid(format!("can't use TLS: {error}")))?;
        let builder = if verifies_clients {
            let path = directory.join("ca-cert.pem");
            let verifier = WebPkiClientVerifier::builder_with_provider(trusted(&path)?, provider)
                .with_crls(revoked(&directory.join("ca-crl.pem"))?)
                .allow_unknown_revocation_status() // a certificate whose issuer has no list is not revoked
                .build()
                .map_err(|error| unreadable(&path, "an authority", &error))?;
            builder.with_client_cert_verifier(verifier)
        } else {
            builder.with_no_client_auth()
        };
        let mut config = builder.with_single_cert(chain, key).map_err(|error| {
            let doing = format!("can't use the certificate and the key in {}", directory.display());
            Error::invalid(format!("{doing}: {error}"))
        })?;
        config.send_tls13_tickets = 0;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        Ok(Self { config: Arc::new(config), access: None })
    }

    /// Lets in only clients that the list allows. It is for servers that verify their clients: one without a certificate is in no list.
    #[must_use]
    pub fn with_access_list(self, access: SharedAccessList) -> Self {
        Self { access: Some(access), ..self }
    }
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tls")
    }
}

pub(super) fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let wanted = "certificates";
    let bytes = bytes_of(path, wanted)?;
    let all: std::result::Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes).collect();
    let all = all.map_err(|error| unreadable(path, wanted, &error))?;
    if all.is_empty() {
        return Err(Error::invalid(format!("{} contains no PEM certificate", path.display())));
    }
    Ok(all)
}

/// The authorities in a file.
pub(super) fn trusted(path: &Path) -> Result<Arc<RootCertStore>> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path)? {
        roots.add(certificate).map_err(|error| unreadable(path, "an authority", &error))?;
    }
    Ok(Arc::new(roots))
}

/// The lists of revoked certificates, if there are any.
pub(super) fn revoked(path: &Path) -> Result<Vec<CertificateRevocationListDer<'static>>> {
    if !path.try_exists().is_ok_and(|exists| !exists) {
        let wanted = "certificate revocation lists";
        let bytes = bytes_of(path, wanted)?;
        let lists = CertificateRevocationListDer::pem_slice_iter(&bytes);
        let lists: std::result::Result<Vec<_>, _> = lists.collect();
        let lists = lists.map_err(|error| unreadable(path, wanted, &error))?;
        return match lists.is_empty() {
            true => {
                Err(Error::invalid(format!("{} contains no PEM certificate revocation list", path.display())))
            }
            false => Ok(lists),
        };
    }
    Ok(Vec::new())
}

/// The private key in a file.
pub(super) fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>> {
    let wanted = "a private key without a password";
    PrivateKeyDer::from_pem_slice(&bytes_of(path, wanted)?).map_err(|error| unreadable(path, wanted, &error))
}

/// A file as long as the revocation lists of a large authority can be. What is not a plain file may never end, or keep a thread for ever.
fn bytes_of(path: &Path, wanted: &str) -> Result<Vec<u8>> {
    let unreadable = |why: &dyn fmt::Display| unreadable(path, wanted, why);
    let facts = std::fs::metadata(path).map_err(|error| unreadable(&error))?;
    if !facts.is_file() {
        return Err(unreadable(&"it is no plain file"));
    }
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).map_err(|error| unreadable(&error))?;
    file.take(PEM_MAX + 1).read_to_end(&mut bytes).map_err(|error| unreadable(&error))?;
    match bytes.len() as u64 > PEM_MAX {
        true => Err(unreadable(&format!("it has more than {PEM_MAX} bytes"))),
        false => Ok(bytes),
    }
}

pub(super) fn unreadable(path: &Path, wanted: &str, why: &dyn fmt::Display) -> Error {
    Error::invalid(format!("{} can't be read as {wanted} in PEM: {why}", path.display()))
}

/// The bytes of one connection, sealed.
pub struct TlsStream<'a> {
    inner: &'a dyn ByteStream,
    connection: RefCell<Connection>,
    /// What has come and rustls has not taken.
    inbox: RefCell<Inbox>,
    /// Explains errors of rustls, where this is the client's side.
    explain: Option<Explain>,
}

/// What an error of rustls means to a client, which knows the authorities it trusts.
pub(super) type Explain = Arc<dyn Fn(&rustls::Error) -> Error>;

/// Why there is no TLS.
enum Unshaken {
    /// One side does not want the other.
    Refused(Error),
    /// The stream failed.
    Failed(Error),
    /// The other side has ended the connection.
    Hangup,
    /// The other side has sent too much.
    Excess,
}

/// Bytes `start..end` of a buffer, which is away while a read is going on.
#[derive(Default)]
struct Inbox {
    buffer: Buffer,
    start: usize,
    end: usize,
}

impl<'a> TlsStream<'a> {
    /// The server's side of the handshake.
    pub(super) async fn accept(
        inner: &'a dyn ByteStream,
        tls: &Tls,
        limits: &SessionLimits,
    ) -> Result<Self, Ending> {
        let connection = ServerConnection::new(tls.config.clone()).map_err(|error| {
            tracing::warn!("can't start TLS: {error}");
            Ending::Refused("TLS could not be started")
        })?;
        Self::shake_hands(inner, connection.into(), None, limits.handshake_bytes_max).await.map_err(
            |unshaken| match unshaken {
                Unshaken::Refused(error) => {
                    tracing::debug!(error = error.chain(), "no TLS");
                    Ending::Refused("the TLS handshake failed")
                }
                Unshaken::Failed(error) => Ending::Failed(error),
                Unshaken::Hangup => Ending::Hangup,
                Unshaken::Excess => Ending::Refused("too many bytes before an export was chosen"),
            },
        )
    }

    /// The client's side of it.
    pub(super) async fn connect(
        inner: &'a dyn ByteStream,
        connection: ClientConnection,
        explain: Explain,
    ) -> Result<Self> {
        let shaken = Self::shake_hands(inner, connection.into(), Some(explain), CLIENT_HANDSHAKE_BYTES_MAX);
        shaken.await.map_err(|unshaken| match unshaken {
            Unshaken::Refused(error) => error.context("the TLS handshake failed"),
            Unshaken::Failed(error) => error,
            Unshaken::Hangup => Error::new(
                ErrorKind::Closed,
                "the server has closed the connection in the TLS handshake: it may want another certificate",
            ),
            Unshaken::Excess => Error::invalid("the server's part of the TLS handshake is too long"),
        })
    }

    async fn shake_hands(
        inner: &'a dyn ByteStream,
        mut connection: Connection,
        explain: Option<Explain>,
        mut bytes_left: u64,
    ) -> Result<Self, Unshaken> {
        connection.set_buffer_limit(Some(SEALED_BYTES));
        let stream = Self {
            inner,
            connection: RefCell::new(connection),
            inbox: RefCell::new(Inbox::default()),
            explain,
        };
        loop {
            // Errors are also sent to the other side, as an alert, before the connection ends.
            let understood = stream.take_in();
            let sealed = stream.sealed(Vec::new());
            if !sealed.is_empty() {
                let sent = inner.write_all(Buffer::copy_of(&sealed)).await;
                if understood.is_ok() {
                    sent.map_err(Unshaken::Failed)?;
                }
            }
            understood.map_err(Unshaken::Refused)?;
            if !stream.connection.borrow().is_handshaking() {
                return Ok(stream);
            }
            if !stream.inbox_is_empty() {
                // It waited for the answer to leave.
                continue;
            }
            let count = stream.receive().await.map_err(Unshaken::Failed)?;
            if count == 0 {
                return Err(Unshaken::Hangup);
            }
            bytes_left = bytes_left.checked_sub(count as u64).ok_or(Unshaken::Excess)?;
        }
    }

    /// Whether the client may stay. Where it may not, the log says who it was.
    pub(super) fn admits(&self, tls: &Tls, peer: &str) -> bool {
        let Some(access) = &tls.access else { return true };
        let connection = self.connection.borrow();
        let certificate = connection.peer_certificates().and_then(|chain| chain.first());
        let Some(name) = certificate.and_then(|certificate| distinguished_name(certificate)) else {
            tracing::warn!(peer, "a client is refused: it has no certificate whose name can be read");
            return false;
        };
        let is_let_in = access.verdict(&name) == Verdict::Allow;
        if !is_let_in {
            tracing::warn!(
                peer,
                "a client is refused: its certificate is not in the access list: {}",
                loggable(&name)
            );
        }
        is_let_in
    }

    /// The subject of the client's certificate, if it has sent one.
    pub(super) fn subject(&self) -> Option<String> {
        let connection = self.connection.borrow();
        connection.peer_certificates()?.first().and_then(|certificate| subject(certificate))
    }

    /// Passes to rustls what has arrived, as much as it takes.
    fn take_in(&self) -> Result<()> {
        let mut connection = self.connection.borrow_mut();
        let mut inbox = self.inbox.borrow_mut();
        let Inbox { buffer, start, end } = &mut *inbox;
        while start < end && connection.wants_read() {
            let mut rest = &buffer.slice()[*start..*end];
            let taken =
                connection.read_tls(&mut rest).map_err(|error| Error::io(error, "the TLS buffer is full"))?;
            *start += taken;
            let state = connection.process_new_packets().map_err(|error| match &self.explain {
                Some(explain) => explain(&error),
                None => Error::new(ErrorKind::Invalid, format!("invalid TLS data: {error}")),
            })?;
            if taken == 0 {
                return Err(Error::new(ErrorKind::Invalid, "invalid TLS data: a record is too long"));
            }
            if state.plaintext_bytes_to_read() > 0 {
                break;
            }
        }
        Ok(())
    }

    fn inbox_is_empty(&self) -> bool {
        let inbox = self.inbox.borrow();
        inbox.start == inbox.end
    }

    /// Reads once into the inbox, which must be empty. Zero is the end.
    async fn receive(&self) -> Result<usize> {
        let mut buffer = std::mem::take(&mut self.inbox.borrow_mut().buffer);
        if buffer.is_empty() {
            // The first time, or a read was given up.
            buffer = Buffer::for_overwrite(INBOX_BYTES);
        }
        let (buffer, count) = self.inner.read(buffer).await?;
        *self.inbox.borrow_mut() = Inbox { buffer, start: 0, end: count };
        Ok(count)
    }

    /// Takes bytes for the session out of rustls. `None`: none are there before more has come.
    fn opened(&self, buffer: &mut Buffer) -> Result<Option<usize>> {
        let mut connection = self.connection.borrow_mut();
        let mut filled = 0;
        while filled < buffer.len() {
            let mut reader = connection.reader();
            let bytes = match reader.fill_buf() {
                // The client has sent its closing alert.
                Ok([]) => return Ok(Some(filled)),
                Ok(bytes) => bytes,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(Error::io(error, "can't read what TLS has opened")),
            };
            let count = bytes.len().min(buffer.len() - filled);
            buffer.copy_from(filled, &bytes[..count]);
            reader.consume(count);
            filled += count;
        }
        Ok((filled > 0).then_some(filled))
    }

    /// Appends what rustls wants to send.
    fn sealed(&self, mut sealed: Vec<u8>) -> Vec<u8> {
        let mut connection = self.connection.borrow_mut();
        while connection.wants_write() {
            connection.write_tls(&mut sealed).expect("memory takes everything");
        }
        sealed
    }
}

impl ByteStream for TlsStream<'_> {
    fn read(&self, mut buffer: Buffer) -> LocalFuture<'_, Result<(Buffer, usize)>> {
        Box::pin(async move {
            loop {
                if let Some(count) = self.opened(&mut buffer)? {
                    return Ok((buffer, count));
                }
                if self.inbox_is_empty() && self.receive().await? == 0 {
                    return Ok((buffer, 0));
                }
                self.take_in()?;
            }
        })
    }

    fn write_all(&self, data: Buffer) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let mut pieces: Vec<_> = data.pieces().map(IoSlice::new).collect();
            let mut rest = &mut pieces[..];
            while !rest.is_empty() {
                let taken = self.connection.borrow_mut().writer().write_vectored(rest);
                let taken = taken.map_err(|error| Error::io(error, "the TLS buffer is full"))?;
                IoSlice::advance_slices(&mut rest, taken);
                let sealed = self.sealed(Vec::new());
                self.inner.write_all(Buffer::copy_of(&sealed)).await?;
            }
            Ok(())
        })
    }

    fn send_close(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.connection.borrow_mut().send_close_notify();
            let sealed = self.sealed(Vec::new());
            self.inner.write_all(Buffer::copy_of(&sealed)).await
        })
    }

    fn sent(&self) -> Option<u64> {
        self.inner.sent()
    }

    fn is_deserted(&self) -> bool {
        self.inner.is_deserted()
    }

    fn shutdown(&self) {
        self.inner.shutdown();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_never_ends_is_no_file_of_certificates() {
        let path = std::env::temp_dir().join(format!("vellum-long-{}.pem", std::process::id()));
        std::fs::File::create(&path).and_then(|file| file.set_len(PEM_MAX + 1)).expect("a sparse file");
        let long = certificates(&path).expect_err("it is too long").chain();
        std::fs::remove_file(&path).expect("it is there");
        assert!(long.contains("has more than 16777216 bytes"), "{long}");
        let zeros = Path::new("/dev/zero");
        for error in [
            certificates(zeros).expect_err("it never ends"),
            revoked(zeros).expect_err("it never ends"),
            private_key(zeros).expect_err("it never ends"),
        ] {
            assert!(
                error.chain().contains("/dev/zero") && error.chain().contains("no plain file"),
                "{error}"
            );
        }
    }
}
