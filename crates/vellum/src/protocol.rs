//! Names that begin with a protocol, in QEMU's way: what they mean.
//!
//! ```text
//!   file:NAME, host_device:NAME            the file or device NAME
//!   nbd:HOST:PORT[:exportname=EXPORT]      nbd://HOST:PORT/EXPORT
//!   nbd:unix:PATH[:exportname=EXPORT]      nbd+unix:///EXPORT?socket=PATH
//! ```
//!
//! 1. A protocol is what stands before a colon that comes before the first slash. So `./a:b` is a file.
//! 2. Other protocols do not exist under the names of QEMU's programs, as they do not there. Under our own name such a text is
//!    the name of a file.
//! 3. Only names that a user gives are read in this way, none that stands in an image.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use clap::builder::{OsStringValueParser, TypedValueParser};
use vellum_core::{Error, Result, Url};

/// How QEMU's programs begin the name of an export.
const EXPORT: &str = ":exportname=";

/// This was called as a program of QEMU's.
static IS_STRICT: AtomicBool = AtomicBool::new(false);

/// From now on a protocol that does not exist is refused.
pub(crate) fn as_other_program() {
    IS_STRICT.store(true, Ordering::Relaxed);
}

/// Reads the name of an image on the command line.
pub(crate) fn image_name() -> impl TypedValueParser<Value = PathBuf> {
    OsStringValueParser::new().try_map(|name: OsString| place(Path::new(&name)))
}

/// The file, device or URL that a name means.
///
/// # Errors
/// `Invalid` for one that begins with a protocol and means nothing.
pub(crate) fn place(name: &Path) -> Result<PathBuf> {
    place_as(name, IS_STRICT.load(Ordering::Relaxed))
}

/// What a name means on a command line of QEMU's.
///
/// # Errors
/// As [`place`].
pub(crate) fn place_there(name: &OsStr) -> Result<PathBuf> {
    match name.as_bytes().starts_with(b"json:") {
        true => Ok(name.into()),
        false => place_as(Path::new(name), true),
    }
}

/// A name that keys give, which has no protocol: of a file or a URL.
pub(crate) fn as_file(name: &Path) -> PathBuf {
    match split(name) {
        Some(_) if Url::of_path(name).is_none() => Path::new(".").join(name),
        _ => name.to_owned(),
    }
}

/// Whether this name is that of an export of an NBD server.
pub(crate) fn is_nbd(name: &Path) -> bool {
    Url::of_path(name).and_then(Result::ok).is_some_and(|url| url.scheme().is_nbd())
}

fn place_as(name: &Path, is_strict: bool) -> Result<PathBuf> {
    let Some((protocol, rest)) = split(name) else { return Ok(name.to_owned()) };
    let no = |why: String| Err(Error::invalid(format!("{}: {why}", name.display())));
    match protocol {
        _ if Url::of_path(name).is_some() => Ok(name.to_owned()),
        b"file" | b"host_device" if rest.is_empty() => no("the name of the file is missing".to_owned()),
        b"file" | b"host_device" => Ok(match split(Path::new(rest)) {
            Some(_) => Path::new(".").join(rest),
            None => rest.into(),
        }),
        b"nbd" => match rest.to_str().and_then(nbd_url) {
            Some(url) => Ok(url.into()),
            None => no("use nbd:HOST:PORT or nbd:unix:PATH, with :exportname=NAME behind it, or a URL, \
                        nbd://HOST:PORT/NAME"
                .to_owned()),
        },
        other if is_strict => no(format!(
            "Unknown protocol '{}' (the file of this name is ./{})",
            String::from_utf8_lossy(other),
            name.display()
        )),
        _ => Ok(name.to_owned()),
    }
}

/// The protocol of a name, and what comes after it.
fn split(name: &Path) -> Option<(&[u8], &OsStr)> {
    let bytes = name.as_os_str().as_bytes();
    let end = bytes.iter().position(|byte| matches!(byte, b':' | b'/'))?;
    (bytes[end] == b':').then(|| (&bytes[..end], OsStr::from_bytes(&bytes[end + 1..])))
}

/// The URL for the older way of naming an export.
fn nbd_url(text: &str) -> Option<String> {
    let (server, export) = text.split_once(EXPORT).unwrap_or((text, ""));
    let export: String = export.bytes().map(escaped).collect();
    if let Some(socket) = server.strip_prefix("unix:") {
        let socket: String = socket.bytes().map(escaped).collect();
        return (!socket.is_empty()).then(|| format!("nbd+unix:///{export}?socket={socket}"));
    }
    let (host, port) = server.rsplit_once(':')?;
    let port: u16 = port.parse().ok()?;
    let host = if host.is_empty() { "localhost" } else { host };
    Some(format!("nbd://{host}:{port}/{export}"))
}

/// A byte of a part of a URL.
pub(crate) fn escaped(byte: u8) -> String {
    match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => {
            char::from(byte).to_string()
        }
        _ => format!("%{byte:02X}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn protocols_of_qemu_name_files_and_exports() {
        for (name, means) in [
            ("a", "a"),
            ("./a:b", "./a:b"),
            ("d/a:b", "d/a:b"),
            ("/a:b", "/a:b"),
            ("file:a", "a"),
            ("file:/d/a", "/d/a"),
            ("file:a:b", "./a:b"),
            ("file:file:b", "./file:b"),
            ("file:///d/a", "///d/a"),
            ("host_device:/dev/x", "/dev/x"),
            ("nbd:h:10", "nbd://h:10/"),
            ("nbd:[::1]:10:exportname=a b", "nbd://[::1]:10/a%20b"),
            ("nbd::10809", "nbd://localhost:10809/"),
            ("nbd:unix:/run/s", "nbd+unix:///?socket=/run/s"),
            ("nbd:unix:/run/a b:exportname=x/y", "nbd+unix:///x/y?socket=/run/a%20b"),
            ("nbd://h:10/x", "nbd://h:10/x"),
            ("https://h/a", "https://h/a"),
            ("rbd:pool/image", "rbd:pool/image"),
        ] {
            for is_strict in [false, true] {
                assert_eq!(place_as(Path::new(name), is_strict).unwrap(), Path::new(means), "{name}");
            }
        }
        for name in
            ["file:", "nbd:", "nbd:h", "nbd:h:port", "nbd:h:65536", "nbd:unix:", "nbd:unix::exportname=x"]
        {
            place_as(Path::new(name), false).unwrap_err();
        }
        for name in ["a:b", "2026-11-27T10:30.raw", "ssh://h/a", ":a"] {
            assert_eq!(place_as(Path::new(name), false).unwrap(), Path::new(name));
            let said = place_as(Path::new(name), true).unwrap_err().chain();
            assert!(said.contains(": Unknown protocol '"), "{said}");
        }
    }
}
