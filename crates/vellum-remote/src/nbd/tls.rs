//! TLS to a server: who it must be, and how it begins on a connection.
//!
//! 1. Where TLS was asked for nothing is said in the clear but `NBD_OPT_STARTTLS`, on each connection anew. A server that has none is left.
//! 2. Bytes that came in the clear behind the server's consent are never read as if they had come inside (CVE-2021-3716).
//! 3. Certificates are chosen by the user. A URL, which may stand in an image, names none.
//! 4. The files are read again for each connection, so that new certificates are used when one was lost.

use std::path::PathBuf;

use vellum_core::{Buffer, ByteStream, Error, ErrorKind, Result, Url};
use vellum_export::nbd::wire::{option, option_reply};
use vellum_export::nbd::{ServerIdentity, TlsClient, TlsStream};
use vellum_io::Address;

use super::handshake::{ask, broken, last_reply, said};
use super::intake::Intake;

/// Whom a client trusts, and who it is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TlsChoice {
    /// The directory with `ca-cert.pem`, and perhaps `client-cert.pem` and `client-key.pem`; what this host trusts without one.
    pub directory: Option<PathBuf>,
    /// The name that the server's certificate must be for, instead of the host's. At a Unix socket any will do without it.
    pub hostname: Option<String>,
    /// Any server will do.
    pub is_unverified: bool,
}

impl TlsChoice {
    /// Whether something was said.
    pub fn is_said(&self) -> bool {
        *self != Self::default()
    }

    /// Reads the files, for a server at this address. May block.
    ///
    /// # Errors
    /// When a file is missing, or holds something else.
    pub fn client(&self, address: &Address) -> Result<TlsClient> {
        let identity = match (self.is_unverified, &self.hostname, address) {
            (true, ..) => ServerIdentity::Anybody,
            (false, Some(name), _) => ServerIdentity::Named(name.clone()),
            (false, None, Address::Tcp { host, .. }) => ServerIdentity::Named(host.clone()),
            (false, None, Address::Unix(_)) => ServerIdentity::Known,
        };
        TlsClient::new(self.directory.as_deref(), identity)
    }
}

/// Which certificates are for which server.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NbdTls {
    /// For all of which nothing else is said.
    pub usual: TlsChoice,
    /// For single exports.
    pub of: Vec<(Url, TlsChoice)>,
}

impl NbdTls {
    /// What is to be used for this export; `None` for one that is talked to in the clear.
    ///
    /// # Errors
    /// `Refused` for an export of another host that is not to be encrypted, where the user has said whom to trust.
    pub fn choice(&self, url: &Url, has_tls: bool) -> Result<Option<&TlsChoice>> {
        if has_tls {
            let own = self.of.iter().find(|(its, _)| its == url).map(|(_, choice)| choice);
            return Ok(Some(own.unwrap_or(&self.usual)));
        }
        match self.usual.is_said() && !url.scheme().is_nbd_socket() {
            true => Err(Error::new(
                ErrorKind::Refused,
                format!(
                    "{url} is not encrypted, but TLS was asked for: name it nbds:{}",
                    url.to_string().trim_start_matches("nbd:")
                ),
            )),
            false => Ok(None),
        }
    }
}

/// Begins TLS on a connection on which the server has greeted.
pub(super) async fn start_tls<'a>(
    stream: &'a dyn ByteStream,
    intake: &mut Intake<'_>,
    tls: &TlsClient,
) -> Result<TlsStream<'a>> {
    ask(stream, option::STARTTLS, &[]).await?;
    let (before, reply) = last_reply(intake, option::STARTTLS).await?;
    if reply.kind != option_reply::ACK {
        return Err(Error::unsupported(format!("the server does not talk TLS{}", said(&reply))));
    }
    if !before.is_empty() || !reply.data.is_empty() {
        return Err(broken("it says more than that TLS may begin"));
    }
    if !intake.is_empty() {
        return Err(broken("unencrypted bytes follow the start of TLS"));
    }
    tls.connect(stream).await
}

/// Why a handshake inside has failed. A server that does not accept our certificate says so, and ends the connection: what fails may be
/// what we send to it meanwhile.
pub(super) async fn reason(sealed: &TlsStream<'_>, error: Error) -> Error {
    if !matches!(error.kind(), ErrorKind::Io | ErrorKind::Closed) {
        return error;
    }
    match sealed.read(Buffer::zeroed(64)).await {
        Err(said) if said.kind() == ErrorKind::Refused => said,
        _ if error.kind() == ErrorKind::Closed => error.context(
            "it ended the connection when TLS had begun, as a server does that wants a certificate of its clients \
             (client-cert.pem and client-key.pem in --tls-certificates DIR)",
        ),
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn url(text: &str) -> Url {
        Url::parse(text).expect("a URL").expect("a URL")
    }

    #[test]
    fn each_export_has_its_certificates_and_what_is_to_be_encrypted_is() {
        let of = |name: &str| TlsChoice { directory: Some(name.into()), ..TlsChoice::default() };
        let (one, usual) = (of("one"), of("usual"));
        let tls = NbdTls { usual: usual.clone(), of: vec![(url("nbds://h:10809/a"), one.clone())] };
        assert_eq!(tls.choice(&url("nbds://h/a"), true).expect("it is there"), Some(&one));
        assert_eq!(tls.choice(&url("nbds://h/b"), true).expect("it is there"), Some(&usual));
        assert_eq!(tls.choice(&url("nbd+unix:///a?socket=/s"), false).expect("it stays here"), None);
        let error = tls.choice(&url("nbd://h/a"), false).expect_err("it would be in the clear");
        assert!(error.chain().contains("name it nbds://h/a"), "{}", error.chain());
        let nothing = NbdTls { usual: TlsChoice::default(), ..tls };
        assert_eq!(nothing.choice(&url("nbd://h/a"), false).expect("nobody asked"), None);
        assert_eq!(
            nothing.choice(&url("nbds://h/b"), true).expect("a URL is enough"),
            Some(&TlsChoice::default())
        );
    }
}
