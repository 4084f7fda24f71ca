//! URLs as names of images: what one may be, and which ones a prefix allows.
//!
//! ```text
//!   http://HOST[:PORT]/PATH[?QUERY]      https:// also
//!   s3://BUCKET/KEY[?versionId=VERSION]
//!   nbd://HOST[:PORT]/EXPORT             nbd+unix:///EXPORT?socket=PATH
//!   nbds://HOST[:PORT]/EXPORT            nbds+unix:///EXPORT?socket=PATH, both over TLS
//!   rbd:POOL/[NAMESPACE/]IMAGE[@SNAPSHOT]
//! ```
//!
//! Everything else with a colon before its first slash is refused, above all QEMU's `json:`.
//!
//! 1. [`Url::parse`] is the only way in, and gives each URL one spelling: scheme and host in lower case, no default
//!    port, percent-encoding only where it must be and in upper case. What has no one meaning is refused: empty, `.`
//!    and `..` segments (also encoded), backslashes, a fragment, a host that is not plain ASCII.
//! 2. A URL never holds a secret: it is stored in images, and printed. A user, a password, or the parameters of a
//!    signed URL are refused, and the message says where credentials belong. The message does not repeat them.
//! 3. A prefix is compared part by part, never as text: scheme, host and port must be equal, and a path ends at a
//!    slash. So `http://good.example` does not allow `http://good.example.evil.example/`, and `/a` does not allow `/ab`.
//! 4. A name in an image that is itself at a URL stays in the world of URLs: it never means a local file.

use std::fmt;
use std::path::Path;

use crate::{Error, ErrorKind, Result};

/// Longest URL, in bytes: what a header has room for.
pub const URL_BYTES_MAX: usize = 1023;

/// Where an image can be, besides files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scheme {
    /// A web server.
    Http,
    /// A web server, over TLS.
    Https,
    /// An object of a store that speaks S3.
    S3,
    /// An export of an NBD server.
    Nbd,
    /// The same, at a Unix socket.
    NbdUnix,
    /// An export of an NBD server, over TLS.
    Nbds,
    /// The same, at a Unix socket.
    NbdsUnix,
    /// An image of a Ceph cluster.
    Rbd,
}

impl Scheme {
    const ALL: [Self; 8] =
        [Self::Http, Self::Https, Self::S3, Self::Nbd, Self::NbdUnix, Self::Nbds, Self::NbdsUnix, Self::Rbd];

    /// Its name, as a URL begins.
    pub fn name(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Https => "https",
            Self::S3 => "s3",
            Self::Nbd => "nbd",
            Self::NbdUnix => "nbd+unix",
            Self::Nbds => "nbds",
            Self::NbdsUnix => "nbds+unix",
            Self::Rbd => "rbd",
        }
    }

    fn default_port(self) -> Option<u16> {
        match self {
            Self::Http => Some(80),
            Self::Https => Some(443),
            Self::Nbd | Self::Nbds => Some(10_809),
            Self::S3 | Self::NbdUnix | Self::NbdsUnix | Self::Rbd => None,
        }
    }

    /// Whether it names an export of an NBD server.
    pub fn is_nbd(self) -> bool {
        matches!(self, Self::Nbd | Self::Nbds) || self.is_nbd_socket()
    }

    /// Whether it names an export of an NBD server at a Unix socket.
    pub fn is_nbd_socket(self) -> bool {
        matches!(self, Self::NbdUnix | Self::NbdsUnix)
    }
}

/// A URL that names an image, in its one spelling.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Url {
    scheme: Scheme,
    /// The host, or the bucket; empty where there is none.
    host: String,
    port: Option<u16>,
    /// From its first slash on, without the query.
    path: String,
    query: Option<String>,
}

impl Url {
    /// The URL that `text` is; `None` when it does not begin like one, so that it is a file's name.
    ///
    /// # Errors
    /// `Refused` for one that is not allowed to be, with the reason.
    pub fn parse(text: &str) -> Option<Result<Self>> {
        let (scheme, rest) = split_scheme(text)?;
        Some(parse_rest(scheme, rest, text, false))
    }

    /// The URL that a path is, if it is one: paths of images are kept as they were spelled.
    ///
    /// # Errors
    /// As [`parse`](Self::parse).
    pub fn of_path(path: &Path) -> Option<Result<Self>> {
        Self::parse(path.to_str()?)
    }

    /// Where it leads.
    pub fn scheme(&self) -> Scheme {
        self.scheme
    }

    /// The host or the bucket.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The port: the stated one, or that of the scheme.
    pub fn port(&self) -> Option<u16> {
        self.port.or(self.scheme.default_port())
    }

    /// From the first slash on, without the query.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The version of an object in a store, if it names one.
    pub fn version(&self) -> Option<&str> {
        let query = self.query.as_deref().filter(|_| self.scheme == Scheme::S3)?;
        query.strip_prefix("versionId=")
    }

    /// Behind the question mark.
    pub fn query(&self) -> Option<&str> {
        self.query.as_deref()
    }

    /// The URL that `name` means in an image at this one.
    ///
    /// # Errors
    /// `Refused` for a name that leads elsewhere than to a URL, or not to one image.
    pub fn join(&self, name: &str) -> Result<Self> {
        if let Some(url) = Self::parse(name) {
            return url;
        }
        let is_plain = !name.is_empty()
            && !name.split('/').next().unwrap_or_default().contains(':')
            && !name.contains(['?', '#', '\\', '%']);
        if !is_plain || self.scheme == Scheme::Rbd || self.scheme.is_nbd_socket() {
            return Err(refused(name, "an image at a URL may only name other URLs, or names beside itself"));
        }
        let name = name.strip_prefix("./").unwrap_or(name);
        let path = match name.strip_prefix('/') {
            Some(name) => format!("/{name}"),
            None => format!("{}/{name}", self.directory()),
        };
        let base = Self { path: String::new(), query: None, ..self.clone() };
        Self::parse(&format!("{base}{path}")).expect("it has a scheme")
    }

    /// The path without its last segment and the slash in front of it.
    pub fn directory(&self) -> &str {
        self.path.rsplit_once('/').map_or("", |(directory, _)| directory)
    }

    /// Whether `other` is at the same place, in the same directory or below it.
    pub fn is_beside(&self, other: &Self) -> bool {
        self.has_same_origin(other)
            && !(self.scheme == Scheme::Rbd || self.scheme.is_nbd_socket())
            && other.path.strip_prefix(self.directory()).is_some_and(|rest| rest.starts_with('/'))
    }

    /// Whether scheme, host and port are equal.
    pub fn has_same_origin(&self, other: &Self) -> bool {
        (self.scheme, &self.host, self.port) == (other.scheme, &other.host, other.port)
    }
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let slashes = if self.scheme == Scheme::Rbd { "" } else { "//" };
        write!(f, "{}:{slashes}{}", self.scheme.name(), self.host)?;
        if let Some(port) = self.port {
            write!(f, ":{port}")?;
        }
        f.write_str(&self.path)?;
        self.query.as_ref().map_or(Ok(()), |query| write!(f, "?{query}"))
    }
}

/// What the user allows: all URLs that begin like this, part by part.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct UrlPrefix(Url);

impl UrlPrefix {
    /// The prefix that `text` is. Its path may be empty, and may end with a slash.
    ///
    /// # Errors
    /// `Invalid` when it is not the beginning of a URL.
    pub fn parse(text: &str) -> Result<Self> {
        let invalid = |why: &str| Error::invalid(format!("can't allow these URLs: {why}"));
        let Some((scheme, rest)) = split_scheme(text) else {
            return Err(invalid(&format!("{text:?}: use for example https://host/templates/")));
        };
        let url = parse_rest(scheme, rest, text, true).map_err(|error| invalid(&error.to_string()))?;
        match url.query {
            None => Ok(Self(url)),
            Some(_) if scheme.is_nbd_socket() => Ok(Self(url)),
            Some(_) => Err(invalid("give the part in front of the question mark")),
        }
    }

    /// Whether the URL begins like this. What follows a question mark is not asked for, but for the socket of
    /// `nbd+unix` and `nbds+unix`, which must be the same.
    pub fn allows(&self, url: &Url) -> bool {
        let Self(prefix) = self;
        let path = prefix.path.strip_suffix('/').unwrap_or(&prefix.path);
        // A snapshot of an allowed image.
        let is_rbd = prefix.scheme == Scheme::Rbd;
        let in_path = match url.path.strip_prefix(path) {
            Some(rest) if prefix.path.ends_with('/') => rest.starts_with('/'),
            Some(rest) => {
                rest.is_empty()
                    || path.is_empty()
                    || rest.starts_with('/')
                    || (is_rbd && rest.starts_with('@'))
            }
            None => false,
        };
        prefix.has_same_origin(url)
            && in_path
            && (!prefix.scheme.is_nbd_socket() || prefix.query == url.query)
    }
}

impl fmt::Display for UrlPrefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Scheme and rest, if the text begins like a URL of a kind that is known.
fn split_scheme(text: &str) -> Option<(Scheme, &str)> {
    let (name, rest) = text.split_once(':')?;
    let scheme = Scheme::ALL.into_iter().find(|scheme| scheme.name().eq_ignore_ascii_case(name))?;
    match scheme {
        Scheme::Rbd => Some((scheme, rest)),
        _ => rest.strip_prefix("//").map(|rest| (scheme, rest)),
    }
}

fn refused(name: &str, why: &str) -> Error {
    Error::new(ErrorKind::Refused, format!("{name:?} cannot name an image: {why}"))
}

fn parse_rest(scheme: Scheme, rest: &str, text: &str, is_prefix: bool) -> Result<Url> {
    let no = |why: &str| Err(refused(text, why));
    let bare = format!("{}:", scheme.name());
    let has_secret = |what: &str| {
        // The text itself is not repeated.
        Err(Error::new(
            ErrorKind::Refused,
            format!(
                "a {bare} URL with {what} cannot name an image, because names are stored in images and printed: give \
                 credentials in the environment or a file instead"
            ),
        ))
    };
    let (before_query, query) = match rest.split_once('?') {
        Some((before, query)) => (before, Some(query)),
        None => (rest, None),
    };
    if before_query.split('/').next().unwrap_or_default().contains('@') && scheme != Scheme::Rbd {
        return has_secret("a user or password");
    }
    if query.is_some_and(query_has_secret) {
        return has_secret("a signature, token or key");
    }
    if text.len() > URL_BYTES_MAX {
        return Err(Error::new(
            ErrorKind::Refused,
            format!(
                "a URL of {} bytes cannot name an image: at most {URL_BYTES_MAX} are possible",
                text.len()
            ),
        ));
    }
    if !text.bytes().all(|byte| byte.is_ascii_graphic()) {
        return no("only printable ASCII characters may be in a URL, without spaces");
    }
    if text.contains(['\\', '#', '"', '<', '>', '^', '`', '{', '|', '}']) {
        return no("it has a character that does not belong into a URL");
    }
    if scheme == Scheme::Rbd {
        return parse_rbd(rest, text, is_prefix);
    }
    let (authority, path) = before_query.split_at(before_query.find('/').unwrap_or(before_query.len()));
    let (host, port) =
        split_port(authority).ok_or_else(|| refused(text, "its port is not a number from 1 to 65535"))?;
    let host = host.to_ascii_lowercase();
    let is_host = match scheme {
        Scheme::NbdUnix | Scheme::NbdsUnix => host.is_empty() && port.is_none(),
        Scheme::S3 => is_bucket(&host) && host == authority && port.is_none(),
        _ => is_host(&host),
    };
    if !is_host {
        return no(match scheme {
            Scheme::NbdUnix => "it must begin with nbd+unix:///",
            Scheme::NbdsUnix => "it must begin with nbds+unix:///",
            Scheme::S3 => "the bucket's name has 3 to 63 lower-case letters, digits, dots and hyphens",
            _ => "its host is neither a name nor an address",
        });
    }
    // What is encoded in a key of a store would be one thing to some programs and another to others.
    let is_encoded_key = scheme == Scheme::S3 && path.contains('%');
    let path = path_of(path, is_prefix || scheme.is_nbd());
    let Some(path) = path.filter(|_| !is_encoded_key) else {
        return no("its path must name one image: no empty, `.` or `..` part, and no slash at the end");
    };
    let query = match query {
        None => None,
        Some("") => return no("its query is empty"),
        Some(query) if scheme == Scheme::S3 && !is_version(query) => {
            return no(
                "an s3: URL has no other query than ?versionId=VERSION, with the version of an object",
            );
        }
        Some(query) => match normalised(query) {
            Some(query) => Some(query),
            None => return no("its percent-encoding is broken"),
        },
    };
    let port = port.filter(|port| Some(*port) != scheme.default_port());
    Ok(Url { scheme, host, port, path, query })
}

/// Whether the query of an object in a store names a version of it. `null` is none: it is what an object without
/// versions is called, and that can be replaced.
fn is_version(query: &str) -> bool {
    query.strip_prefix("versionId=").is_some_and(|version| {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
        !version.is_empty() && version != "null" && version.bytes().all(is_plain)
    })
}

/// `POOL/[NAMESPACE/]IMAGE[@SNAPSHOT]`, without the options that QEMU takes behind a colon.
fn parse_rbd(rest: &str, text: &str, is_prefix: bool) -> Result<Url> {
    if rest.contains(':') {
        // One of the options may be a key: the text is not repeated.
        return Err(Error::new(
            ErrorKind::Refused,
            "an rbd: URL with options cannot name an image, because names are stored in images and printed: use \
             rbd:POOL/IMAGE@SNAPSHOT, and give the configuration in CEPH_CONF, and the user in CEPH_ARGS (--id)",
        ));
    }
    let is_name = |name: &str| {
        !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
    };
    let (image, snapshot) = match rest.split_once('@') {
        Some((image, snapshot)) => (image, Some(snapshot)),
        None => (rest, None),
    };
    let trimmed = image.strip_suffix('/').filter(|_| is_prefix).unwrap_or(image);
    let parts: Vec<&str> = trimmed.split('/').collect();
    let parts_min = if is_prefix { 1 } else { 2 };
    let fits = (parts_min..=3).contains(&parts.len())
        && parts.iter().all(|part| is_name(part) && *part != "." && *part != "..")
        && snapshot.is_none_or(is_name);
    if !fits {
        return Err(refused(text, "use rbd:POOL/IMAGE or rbd:POOL/NAMESPACE/IMAGE, and @SNAPSHOT behind it"));
    }
    let (pool, image) = rest.split_once('/').unwrap_or((rest, ""));
    let path = if image.is_empty() && !rest.ends_with('/') { String::new() } else { format!("/{image}") };
    Ok(Url { scheme: Scheme::Rbd, host: pool.to_owned(), port: None, path, query: None })
}

/// Parameters that make a URL a credential, as far as their names say so.
fn query_has_secret(query: &str) -> bool {
    /// Such a name is enough.
    const NAMES: [&str; 9] = ["key", "sig", "jwt", "policy", "sid", "session", "pwd", "pass", "sas"];
    /// So is a name that has one of these anywhere, without its separators.
    const PARTS: [&str; 10] = [
        "signature",
        "credential",
        "token",
        "secret",
        "password",
        "passwd",
        "auth",
        "apikey",
        "accesskey",
        "keypair",
    ];
    query.split(['&', ';']).any(|pair| {
        let name = pair.split('=').next().unwrap_or_default();
        let mut plain = decoded(name).unwrap_or_default().to_ascii_lowercase();
        plain.retain(|character| !matches!(character, '-' | '_' | '.'));
        NAMES.contains(&plain.as_str())
            || plain.ends_with("key")
            || plain.starts_with("session")
            || PARTS.iter().any(|part| plain.contains(part))
    })
}

fn split_port(authority: &str) -> Option<(&str, Option<u16>)> {
    let in_brackets = authority.starts_with('[');
    let (host, port) = match authority.rsplit_once(':') {
        Some((host, port)) if !in_brackets || host.ends_with(']') => (host, port),
        _ => return Some((authority, None)),
    };
    let is_number =
        !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit()) && !port.starts_with('0');
    Some((host, Some(port.parse().ok().filter(|_| is_number)?)))
}

fn is_host(host: &str) -> bool {
    if let Some(address) = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        return address.parse::<std::net::Ipv6Addr>().is_ok_and(|parsed| parsed.to_string() == address);
    }
    let is_label = |label: &str| {
        !label.is_empty() && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte))
    };
    if !host.split('.').all(is_label) {
        return false;
    }
    // Numbers in other notations than four decimal ones would be another spelling of an address.
    let last = host.rsplit('.').next().unwrap_or_default();
    let is_number = last.bytes().all(|byte| byte.is_ascii_digit()) || last.starts_with("0x");
    !is_number || host.parse::<std::net::Ipv4Addr>().is_ok()
}

fn is_bucket(name: &str) -> bool {
    (3..=63).contains(&name.len())
        && name.split('.').all(|label| !label.is_empty())
        && name
            .bytes()
            .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-.".contains(&byte))
}

/// The path in its one spelling. `is_open`: it may be empty, or end with a slash.
fn path_of(path: &str, is_open: bool) -> Option<String> {
    let path = normalised(path)?;
    if path.is_empty() || path == "/" {
        return is_open.then_some(path);
    }
    let inner = path.strip_prefix('/')?;
    let inner = inner.strip_suffix('/').filter(|_| is_open).unwrap_or(inner);
    // Servers differ in when they decode a slash, so a part counts in every reading.
    let plain = decoded(inner)?;
    let is_part = |part: &str| !part.is_empty() && part != "." && part != "..";
    (plain.split(['/', '\\']).all(is_part) && !plain.contains('\0')).then_some(path)
}

/// The bytes that percent-encoding stands for, as text.
fn decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(if byte == b'%' { hex(rest.next()?)? << 4 | hex(rest.next()?)? } else { byte });
    }
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

fn hex(digit: u8) -> Option<u8> {
    char::from(digit).to_digit(16).and_then(|digit| u8::try_from(digit).ok())
}

/// Percent-encoding only where it is needed, and in upper case.
fn normalised(text: &str) -> Option<String> {
    let mut out = String::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            out.push(char::from(byte));
            continue;
        }
        let byte = hex(rest.next()?)? << 4 | hex(rest.next()?)?;
        match byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            true => out.push(char::from(byte)),
            false => out.push_str(&format!("%{byte:02X}")),
        }
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn url(text: &str) -> Url {
        Url::parse(text).expect("a URL").unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    #[test]
    fn each_url_has_one_spelling() {
        for (text, canonical) in [
            ("http://host/a", "http://host/a"),
            ("HTTP://Host.Example/A", "http://host.example/A"),
            ("http://host:80/a", "http://host/a"),
            ("https://host:443/a", "https://host/a"),
            ("https://host:8443/a/b?v=1&w", "https://host:8443/a/b?v=1&w"),
            ("http://host/%61%2d%7e%2f%c3", "http://host/a-~%2F%C3"),
            ("http://127.0.0.1:9000/x.qcow2", "http://127.0.0.1:9000/x.qcow2"),
            ("http://[::1]:8080/x", "http://[::1]:8080/x"),
            ("s3://bucket/dir/key.qcow2", "s3://bucket/dir/key.qcow2"),
            (
                "s3://bucket/key?versionId=L4kqtJlcpXroDTDmpUMLUo",
                "s3://bucket/key?versionId=L4kqtJlcpXroDTDmpUMLUo",
            ),
            ("nbd://host/", "nbd://host/"),
            ("nbd://host:10809/disk", "nbd://host/disk"),
            ("nbd+unix:///disk?socket=/run/x", "nbd+unix:///disk?socket=/run/x"),
            ("nbds://Host:10809/disk", "nbds://host/disk"),
            ("nbds+unix:///disk?socket=/run/x", "nbds+unix:///disk?socket=/run/x"),
            ("rbd:pool/image@snap", "rbd:pool/image@snap"),
            ("rbd:pool/space/image", "rbd:pool/space/image"),
        ] {
            assert_eq!(url(text).to_string(), canonical, "{text}");
            assert_eq!(url(canonical), url(text), "{text}");
        }
    }

    #[test]
    fn files_are_no_urls_and_strange_urls_are_refused() {
        for text in [
            "base.raw",
            "/a/b",
            "json:{}",
            "file:a",
            "http:a",
            "c:/x",
            "fat:rw:/etc",
            "ftp://host/a",
            "./http://h/a",
        ] {
            assert!(Url::parse(text).is_none(), "{text}");
        }
        for text in [
            "http://",
            "http:///a",
            "http://host",
            "http://host/",
            "http://host/a/",
            "http://host//a",
            "http://host/a/../b",
            "http://host/.",
            "http://host/a/%2e%2e/b",
            "http://host/a/%2E./b",
            "http://host/a%2f..%2fb",
            "http://host/a%5c..%5cb",
            "http://host/a#b",
            "http://host/a b",
            "http://host\\@evil/a",
            "http://host/%",
            "http://host/%4",
            "http://host/%zz",
            "http://host/a%00b",
            "http://host:0/a",
            "http://host:/a",
            "http://host:65536/a",
            "http://host:+80/a",
            "http://host:080/a",
            "http://ho%73t/a",
            "http://h\u{f6}st/a",
            "http://2130706433/a",
            "http://0x7f000001/a",
            "http://[::1/a",
            "http://[0::1]/a",
            "http://host/a?",
            "http://host/a?%g",
            "s3://b/k",
            "s3://Bucket/k",
            "s3://bucket",
            "s3://bucket/",
            "s3://bucket/a//b",
            "s3://bucket/a/../b",
            "s3://bucket/k?versionId=",
            "s3://bucket/k?versionId=null",
            "s3://bucket/k?versionId=1&partNumber=2",
            "s3://bucket/k?versionId=%31",
            "s3://bucket/k?torrent",
            "s3://bucket:80/k",
            "s3://bucket/%41",
            "nbd+unix://host/x?socket=/a",
            "nbds+unix://host/x?socket=/a",
            "nbds://user@host/x",
            "rbd:pool",
            "rbd:pool/",
            "rbd:pool/image:id=admin",
            "rbd:pool/../x",
            "rbd:pool/a/b/c",
            "rbd:/x",
            "rbd:pool/image@",
            "rbd:pool/image@a@b",
        ] {
            let refused = Url::parse(text).unwrap_or_else(|| panic!("{text} is like a URL"));
            assert_eq!(refused.expect_err(text).kind(), ErrorKind::Refused, "{text}");
        }
        for host in ["host.", ".host", "ho..st", "0x7f.1", "127.1", "127.0.0.256"] {
            let text = format!("http://{host}/a");
            assert!(Url::parse(&text).expect("like a URL").is_err(), "{text}");
        }
        let long = format!("http://host/{}", "x".repeat(URL_BYTES_MAX));
        assert!(Url::parse(&long).expect("like a URL").is_err());
    }

    #[test]
    fn secrets_are_refused_and_not_repeated() {
        for text in [
            "http://user:hunter2@host/a",
            "http://hunter2@host/a",
            "https://host/a?X-Amz-Signature=hunter2",
            "https://host/a?x=1&x-amz-security-token=hunter2",
            "https://host/a?%73ig=hunter2",
            "https://host/a?API_KEY=hunter2",
            "https://host/a?private_token=hunter2",
            "https://host/a?X-Oss-Signature=hunter2",
            "https://host/a?Policy=hunter2&Key-Pair-Id=hunter2",
            "https://host/a?key=hunter2",
            "https://host/a?jwt=hunter2",
            "https://host/a?passwd=hunter2",
            "https://host/a?session_id=hunter2",
            "nbd://user:hunter2@host/a",
            "s3://key:hunter2@bucket/a",
        ] {
            let error = Url::parse(text).expect("like a URL").expect_err(text);
            assert!(!error.chain().contains("hunter2"), "{}", error.chain());
            assert!(error.chain().contains("in the environment"), "{}", error.chain());
        }
    }

    #[test]
    fn a_prefix_allows_what_is_below_it_and_nothing_that_looks_like_it() {
        for (prefix, text, is_allowed) in [
            ("http://good.example", "http://good.example/a", true),
            ("http://good.example/", "http://good.example/a/b?x=1", true),
            ("http://good.example/a", "http://good.example/a@evil", false),
            ("s3://bucket/a", "s3://bucket/a@evil", false),
            ("http://good.example", "http://good.example:8080/a", false),
            ("http://good.example", "http://good.example:80/a", true),
            ("http://good.example", "https://good.example/a", false),
            ("http://good.example", "http://good.example.evil.example/a", false),
            ("http://good.example", "http://evil.good.example/a", false),
            ("http://good.example", "http://good.exampleevil.example/a", false),
            ("HTTP://good.example", "http://good.example/a", true),
            ("http://good.example/a", "http://good.example/a", true),
            ("http://good.example/a", "http://good.example/a/b", true),
            ("http://good.example/a", "http://good.example/ab", false),
            ("http://good.example/a", "http://good.example/A/b", false),
            ("http://good.example/a/", "http://good.example/a/b", true),
            ("http://good.example/a/", "http://good.example/a", false),
            ("http://good.example/a", "http://good.example/%61/b", true),
            ("http://good.example/%61", "http://good.example/a/b", true),
            ("http://good.example/a%2Fb", "http://good.example/a/b", false),
            ("http://good.example:8080/a", "http://good.example:8080/a/b", true),
            ("s3://bucket", "s3://bucket/k", true),
            ("s3://bucket/templates/", "s3://bucket/templates/k", true),
            ("s3://bucket", "s3://bucket2/k", false),
            ("nbd://host", "nbd://host/disk", true),
            ("nbd://host/disk", "nbd://host/disk2", false),
            ("nbd+unix:///disk?socket=/run/a", "nbd+unix:///disk?socket=/run/a", true),
            ("nbd+unix:///disk?socket=/run/a", "nbd+unix:///disk?socket=/run/b", false),
            // Who allows one of the two has not allowed the other.
            ("nbds://host", "nbds://host/disk", true),
            ("nbds://host", "nbd://host/disk", false),
            ("nbd://host", "nbds://host/disk", false),
            ("nbds+unix:///disk?socket=/run/a", "nbds+unix:///disk?socket=/run/a", true),
            ("nbds+unix:///disk?socket=/run/a", "nbds+unix:///disk?socket=/run/b", false),
            ("rbd:pool", "rbd:pool/image", true),
            ("rbd:pool/", "rbd:pool/image@s", true),
            ("rbd:pool", "rbd:pool2/image", false),
            ("rbd:pool/image", "rbd:pool/image@s", true),
            ("rbd:pool/image", "rbd:pool/image2", false),
        ] {
            let allowed = UrlPrefix::parse(prefix).unwrap().allows(&url(text));
            assert_eq!(allowed, is_allowed, "{prefix} {text}");
        }
        for bad in [
            "",
            "good.example",
            "http://",
            "http://host/../a",
            "http://user@host/",
            "http://host/a?x",
            "/a",
            "json:",
            "http",
        ] {
            assert_eq!(UrlPrefix::parse(bad).expect_err(bad).kind(), ErrorKind::Invalid, "{bad}");
        }
    }

    #[test]
    fn a_name_in_an_image_at_a_url_is_beside_it_or_a_url() {
        let image = url("https://host/dir/top.qcow2?v=1");
        for (name, joined) in [
            ("base.raw", "https://host/dir/base.raw"),
            ("./base.raw", "https://host/dir/base.raw"),
            ("sub/base.raw", "https://host/dir/sub/base.raw"),
            ("/etc/shadow", "https://host/etc/shadow"),
            ("http://other/x", "http://other/x"),
        ] {
            assert_eq!(image.join(name).unwrap().to_string(), joined, "{name}");
        }
        for name in ["../base.raw", "", "file:/etc/shadow", "json:{}", "x?y", "a%2fb", "//host/x"] {
            assert_eq!(image.join(name).expect_err(name).kind(), ErrorKind::Refused, "{name}");
        }
        for (other, is_beside) in [
            ("https://host/dir/base.raw", true),
            ("https://host/dir/sub/base.raw", true),
            ("https://host/directory/x", false),
            ("https://host/x", false),
            ("http://host/dir/base.raw", false),
            ("https://host:444/dir/base.raw", false),
        ] {
            assert_eq!(image.is_beside(&url(other)), is_beside, "{other}");
        }
    }
}
