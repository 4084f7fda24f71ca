//! URLs of NBD exports, as QEMU, nbdkit and libnbd write them (see the URI specification of NetworkBlockDevice/nbd).
//!
//! ```text
//!   nbd://HOST[:PORT][/EXPORT]              TCP; the port is 10809 if none is given
//!   nbd+unix:///[EXPORT]?socket=PATH        a Unix socket
//!   nbds://…, nbds+unix://…                 the same over TLS
//! ```
//!
//! An export's name may have escapes of two hexadecimal digits (`%2F`). A URL says nothing of certificates: it may stand in an image,
//! which must not choose them.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use vellum_core::{Error, Result};
use vellum_export::nbd::wire::STRING_BYTES_MAX;
use vellum_io::Address;

/// The port that the protocol has by convention.
const PORT_DEFAULT: u16 = 10809;

/// The longest path of a Unix socket on Linux, in bytes.
const SOCKET_PATH_MAX: usize = 107;

/// Where an export is, and its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NbdUrl {
    text: String,
    /// Where its server listens.
    pub address: Address,
    /// The name of the export; empty for the default one.
    pub export: String,
    /// It is talked to over TLS, and in no other way.
    pub has_tls: bool,
}

impl fmt::Display for NbdUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl FromStr for NbdUrl {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let invalid = |what: &str| {
            Error::invalid(format!(
                "{text}: {what}; write nbd://HOST[:PORT]/EXPORT or nbd+unix:///EXPORT?socket=PATH, with nbds for TLS"
            ))
        };
        let (scheme, rest) =
            text.split_once("://").ok_or_else(|| invalid("this is no URL of an NBD export"))?;
        if rest.contains('#') {
            return Err(invalid("a URL of an NBD export has no fragment"));
        }
        let (place, query) = rest.split_once('?').map_or((rest, None), |(place, query)| (place, Some(query)));
        let (authority, path) = place.split_once('/').map_or((place, ""), |(host, path)| (host, path));
        let export = unescaped(path).ok_or_else(|| invalid("the name of the export is not valid UTF-8"))?;
        if export.len() > STRING_BYTES_MAX || export.contains('\0') {
            return Err(invalid("an export has no such name"));
        }
        let address = match scheme {
            "nbd" | "nbds" if query.is_none() => {
                tcp(authority).ok_or_else(|| invalid("there is no valid host and port"))?
            }
            "nbd" | "nbds" => {
                return Err(invalid(
                    "it takes no parameters (certificates are given by --tls-certificates DIR, the name of the server by \
                     --tls-hostname NAME)",
                ));
            }
            "nbd+unix" | "nbds+unix" if authority.is_empty() => {
                let path = query.and_then(|query| query.strip_prefix("socket=")).and_then(unescaped);
                let path = path.filter(|path| !path.is_empty() && path.len() <= SOCKET_PATH_MAX);
                let path = path.filter(|path| !path.contains(['&', '\0']));
                Address::Unix(PathBuf::from(path.ok_or_else(|| invalid("there is no valid socket=PATH"))?))
            }
            "nbd+unix" | "nbds+unix" => return Err(invalid("a Unix socket has no host: three slashes")),
            _ => return Err(invalid("this is no URL of an NBD export")),
        };
        Ok(Self { text: text.to_owned(), address, export, has_tls: scheme.starts_with("nbds") })
    }
}

fn tcp(authority: &str) -> Option<Address> {
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (host, rest) = rest.split_once(']')?;
            (host, if rest.is_empty() { None } else { Some(rest.strip_prefix(':')?) })
        }
        None => authority.split_once(':').map_or((authority, None), |(host, port)| (host, Some(port))),
    };
    let port = match port {
        None => PORT_DEFAULT,
        Some(port) => port.parse().ok().filter(|port| *port != 0)?,
    };
    let is_valid = !host.is_empty() && !host.contains(['@', '%', '\0', '[', ']', ' ']);
    is_valid.then(|| Address::tcp(host, port))
}

/// The text without its escapes; `None` if one is invalid or the result is not UTF-8.
fn unescaped(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        rest = after;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let (digits, after) = rest.split_at_checked(2)?;
        let digit = |byte: u8| char::from(byte).to_digit(16);
        bytes.push(u8::try_from(digit(digits[0])? * 16 + digit(digits[1])?).ok()?);
        rest = after;
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> (Address, String) {
        let url: NbdUrl = text.parse().unwrap();
        assert_eq!(url.to_string(), text);
        (url.address, url.export)
    }

    #[test]
    fn what_qemu_writes_is_understood() {
        assert_eq!(parsed("nbd://host/disk"), (Address::tcp("host", 10809), "disk".into()));
        assert_eq!(parsed("nbd://host:99"), (Address::tcp("host", 99), String::new()));
        assert_eq!(parsed("nbd://[::1]:99/a/b"), (Address::tcp("::1", 99), "a/b".into()));
        assert_eq!(parsed("nbd://h/a%2Fb%20c"), (Address::tcp("h", 10809), "a/b c".into()));
        assert_eq!(
            parsed("nbd+unix:///disk?socket=/run/a.sock"),
            (Address::unix("/run/a.sock"), "disk".into())
        );
        assert_eq!(parsed("nbd+unix:///?socket=a%20b"), (Address::unix("a b"), String::new()));
    }

    #[test]
    fn the_scheme_says_whether_there_is_tls() {
        for (text, has_tls) in [
            ("nbd://h/x", false),
            ("nbds://h/x", true),
            ("nbd+unix:///x?socket=/s", false),
            ("nbds+unix:///x?socket=/s", true),
        ] {
            assert_eq!(text.parse::<NbdUrl>().unwrap().has_tls, has_tls, "{text}");
        }
        assert_eq!(parsed("nbds://host/disk"), (Address::tcp("host", 10809), "disk".into()));
        assert_eq!(parsed("nbds+unix:///d?socket=/s"), (Address::unix("/s"), "d".into()));
    }

    #[test]
    fn what_is_no_such_url_is_refused_with_the_way_to_write_one() {
        for text in [
            "nbd:host:10809:exportname=x",
            "nbd:///disk",
            "nbd://h:0/x",
            "nbd://h:70000/x",
            "nbd://user@h/x",
            "nbd://h/%zz",
            "nbd://h/%f",
            "nbd://h/%ff",
            "nbd://h/x?socket=/a",
            "nbd://h/x#y",
            "nbd+unix://h/x?socket=/a",
            "nbd+unix:///x",
            "nbd+unix:///x?socket=",
            "nbd+unix:///x?socket=/a&tls=1",
            "nbds://h/x?tls-certificates=/d",
            "nbds+unix:///x",
            "nbds+tcp://h/x",
            "http://h/x",
        ] {
            let error = text.parse::<NbdUrl>().unwrap_err();
            assert!(error.chain().contains("nbd://HOST[:PORT]/EXPORT"), "{text}: {}", error.chain());
        }
        let long = format!("nbd://h/{}", "a".repeat(STRING_BYTES_MAX + 1));
        long.parse::<NbdUrl>().unwrap_err();
    }
}
