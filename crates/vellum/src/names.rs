//! Images that the user names by options, in the words of QEMU: `--image-opts driver=qcow2,file.filename=a.qcow2`, and
//! `json:{"driver":"qcow2","file":{"filename":"a.qcow2"}}` wherever a file name may stand.
//!
//! Either is a tree of keys. It comes down to a name (a path or a URL) and perhaps a format:
//!
//! ```text
//!   driver   a format            the image at `file` has it
//!            file, host_device   the bytes of `filename` are the disk: raw
//!            nbd, http, https    the bytes there are the disk: raw
//!            none                the format is that of the content
//!   file     driver, filename, and for nbd: server, export, host, port, path, tls-creds, tls-hostname
//! ```
//!
//! 1. Only names that a user gives are read in this way. One that stands in an image is never taken apart: the gate for
//!    references sees a `json:` there as the name of a file.
//! 2. Keys that would change what is read, and are not known here, are refused by name. Keys that only ask for what is
//!    done anyway, or are about speed, are left aside.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;
use vellum_core::{Error, Result, Url};
use vellum_daemon::{Encrypted, FormatKind, Part};

use crate::key_values::split_options;
use crate::protocol::{escaped, place as place_of};

/// An image, as the user names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Named {
    pub(crate) path: PathBuf,
    pub(crate) format: Option<FormatKind>,
    /// The options say that it is encrypted.
    pub(crate) is_encrypted: bool,
    /// The options say whose certificates are for its server.
    pub(crate) tls: Option<NamedTls>,
}

/// Certificates, by the ID of their object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NamedTls {
    pub(crate) id: String,
    /// The name that the server's certificate must be for, instead of the host's.
    pub(crate) hostname: Option<String>,
}

impl Named {
    /// What opening it must find.
    pub(crate) fn must_be_encrypted(&self) -> Option<Encrypted> {
        self.is_encrypted.then_some(Encrypted::Top)
    }
}

/// What stands in front of a tree of keys in place of a file name.
const PREFIX: &str = "json:";

/// Keys whose meaning is what is done anyway, or does not change what is read.
const ASIDE: [&str; 9] = [
    "node-name",
    "read-only",
    "auto-read-only",
    "discard",
    "detect-zeroes",
    "locking",
    "aio",
    "cache.no-flush",
    "cache.direct",
];

/// Keys that say that the image is encrypted. Each secret is tried on each image, so which one is meant does not count.
const ENCRYPTED: [&str; 3] = ["encrypt.format", "encrypt.key-secret", "key-secret"];

/// As [`named`], and the part of the image that is meant: `driver=raw` may name one with `offset=` and `size=`.
pub(crate) fn named_part(
    text: &Path,
    format: Option<FormatKind>,
    is_options: bool,
    parse_size: fn(&str) -> Result<u64>,
) -> Result<(Named, Option<Part>)> {
    let mut part = None;
    let named = read_name(text, format, is_options, |keys| {
        if keys.get("driver").is_some_and(|driver| driver == "raw") {
            let mut take = |name: &str| keys.remove(name).map(|text| parse_size(&text)).transpose();
            part = match (take("offset")?, take("size")?) {
                (None, None) => None,
                (offset, size) => Some(Part { offset: offset.unwrap_or(0), size }),
            };
        }
        Ok(())
    })?;
    Ok((named, part))
}

/// The image that this text means. `is_options` says that it is a list of options, not a name.
pub(crate) fn named(text: &Path, format: Option<FormatKind>, is_options: bool) -> Result<Named> {
    read_name(text, format, is_options, |_| Ok(()))
}

fn read_name(
    text: &Path,
    format: Option<FormatKind>,
    is_options: bool,
    take: impl FnOnce(&mut BTreeMap<String, String>) -> Result<()>,
) -> Result<Named> {
    let plain = || Ok(Named { path: place_of(text)?, format, is_encrypted: false, tls: None });
    let Some(string) = text.to_str() else { return plain() };
    let mut keys = match (is_options, string.strip_prefix(PREFIX)) {
        (false, None) => return plain(),
        (false, Some(json)) => from_json(json)?,
        (true, _) => from_options(string)?,
    };
    if format.is_some() {
        return Err(Error::invalid(format!(
            "{string}: the options name the format with driver=, not with -f"
        )));
    }
    take(&mut keys).and_then(|()| of_keys(keys)).map_err(|error| error.context(format!("can't use {string}")))
}

fn from_options(text: &str) -> Result<BTreeMap<String, String>> {
    Ok(split_options(&[text.to_owned()])?.into_iter().collect())
}

fn from_json(text: &str) -> Result<BTreeMap<String, String>> {
    let tree: Value = serde_json::from_str(text)
        .map_err(|error| Error::invalid(format!("{PREFIX}{text}: this is not JSON: {error}")))?;
    let mut keys = BTreeMap::new();
    flatten("", &tree, &mut keys)?;
    Ok(keys)
}

/// Puts the leaves of a tree under the names of their branches, joined by dots. JSON's own parser bounds the depth.
fn flatten(name: &str, tree: &Value, keys: &mut BTreeMap<String, String>) -> Result<()> {
    let leaf = match tree {
        Value::Object(branches) => {
            for (key, branch) in branches {
                let name = if name.is_empty() { key.clone() } else { format!("{name}.{key}") };
                flatten(&name, branch, keys)?;
            }
            return Ok(());
        }
        Value::String(text) => text.clone(),
        Value::Number(number) => number.to_string(),
        Value::Bool(true) => "on".to_owned(),
        Value::Bool(false) => "off".to_owned(),
        Value::Array(_) | Value::Null => {
            return Err(Error::invalid(format!(
                "{PREFIX}…: {name:?} is neither a text, a number nor a group"
            )));
        }
    };
    keys.insert(name.to_owned(), leaf);
    Ok(())
}

/// Drivers that give bytes as they are.
const PROTOCOLS: [&str; 5] = ["file", "host_device", "nbd", "http", "https"];

fn of_keys(mut keys: BTreeMap<String, String>) -> Result<Named> {
    let driver = keys.remove("driver");
    let format = match driver.as_deref() {
        // Bytes that have no format are a disk.
        Some(protocol) if PROTOCOLS.contains(&protocol) => {
            let (path, tls) = place(protocol, "", &mut keys)?;
            refuse_rest(&keys)?;
            return Ok(Named { path, format: Some(FormatKind::Raw), is_encrypted: false, tls });
        }
        Some(format) => Some(format.parse::<FormatKind>()?),
        None => None,
    };
    if let Some(node) = keys.get("file") {
        return Err(Error::unsupported(format!("file={node} names a node: give file.filename= instead")));
    }
    let protocol = keys.remove("file.driver").unwrap_or_else(|| {
        let is_nbd = keys.keys().any(|key| key.starts_with("file.server") || key == "file.export");
        if is_nbd { "nbd".to_owned() } else { "file".to_owned() }
    });
    let (path, tls) = place(&protocol, "file.", &mut keys)?;
    if let Some(kind) = keys.get("encrypt.format").filter(|kind| !["luks", "aes"].contains(&kind.as_str())) {
        return Err(Error::unsupported(format!("encrypt.format={kind}: use luks")));
    }
    let is_encrypted = ENCRYPTED.iter().fold(false, |any, key| any | keys.remove(*key).is_some());
    refuse_rest(&keys)?;
    Ok(Named { path, format, is_encrypted, tls })
}

/// Takes the keys that say where the bytes are, and whose certificates are for their server.
fn place(
    protocol: &str,
    prefix: &str,
    keys: &mut BTreeMap<String, String>,
) -> Result<(PathBuf, Option<NamedTls>)> {
    let mut take = |name: &str| keys.remove(&format!("{prefix}{name}"));
    let missing = |name: &str| Error::invalid(format!("{prefix}{name} is missing"));
    match protocol {
        "file" | "host_device" => Ok((take("filename").ok_or_else(|| missing("filename"))?.into(), None)),
        "http" | "https" => Ok((take("url").ok_or_else(|| missing("url"))?.into(), None)),
        "nbd" => {
            let tls = match (take("tls-creds"), take("tls-hostname")) {
                (Some(id), hostname) => Some(NamedTls { id, hostname }),
                (None, Some(_)) => {
                    return Err(Error::invalid(format!(
                        "{prefix}tls-hostname: {prefix}tls-creds is missing"
                    )));
                }
                (None, None) => None,
            };
            let url = nbd_place(prefix, &mut take)?;
            match tls {
                None => Ok((url.into(), None)),
                Some(tls) => Ok((over_tls(&url, prefix)?.into(), Some(tls))),
            }
        }
        other => Err(Error::unsupported(format!(
            "the driver {other} is not supported: use file, nbd, http or https"
        ))),
    }
}

/// The URL with TLS, whatever it says: the user who names certificates wants it. Nothing that has no TLS is opened instead.
fn over_tls(url: &str, prefix: &str) -> Result<String> {
    let parsed = Url::parse(url).filter(|url| url.as_ref().map_or(true, |url| url.scheme().is_nbd()));
    let Some(parsed) = parsed else {
        return Err(Error::invalid(format!(
            "{prefix}tls-creds: {url} is no export that TLS can be used for: name it nbds://HOST/EXPORT or \
             nbds+unix:///EXPORT?socket=PATH"
        )));
    };
    // Parsed, it is in lower case.
    let text = parsed?.to_string();
    Ok(match text.strip_prefix("nbd").filter(|rest| !rest.starts_with('s')) {
        Some(rest) => format!("nbds{rest}"),
        None => text,
    })
}

/// The URL of an export that keys name.
fn nbd_place(prefix: &str, take: &mut dyn FnMut(&str) -> Option<String>) -> Result<String> {
    if let Some(url) = take("filename").or_else(|| take("uri")) {
        return Ok(url);
    }
    let export: String = take("export").unwrap_or_default().bytes().map(escaped).collect();
    let kind = take("server.type");
    let socket = take("server.path").or_else(|| take("path"));
    let host = take("server.host").or_else(|| take("host"));
    let port = take("server.port").or_else(|| take("port"));
    match (kind.as_deref(), socket, host) {
        (Some("unix") | None, Some(socket), None) => {
            let socket: String = socket.bytes().map(escaped).collect();
            Ok(format!("nbd+unix:///{export}?socket={socket}"))
        }
        (Some("inet") | None, None, Some(host)) => {
            let host = if host.contains(':') { format!("[{host}]") } else { host };
            Ok(format!("nbd://{host}:{}/{export}", port.as_deref().unwrap_or("10809")))
        }
        _ => Err(Error::invalid(format!("{prefix}server: give type=unix and path, or type=inet and host"))),
    }
}

fn refuse_rest(keys: &BTreeMap<String, String>) -> Result<()> {
    let is_aside = |key: &str| ASIDE.contains(&key.strip_prefix("file.").unwrap_or(key));
    match keys.keys().find(|key| !is_aside(key)) {
        None => Ok(()),
        Some(key) if key.starts_with("backing") => Err(Error::unsupported(format!(
            "{key}: the backing image is the one that the image names (`vellum rebase -u`)"
        ))),
        Some(key) => Err(Error::unsupported(format!("the option {key} is not supported"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn means(text: &str, is_options: bool) -> (String, Option<String>) {
        let named = named(Path::new(text), None, is_options).unwrap();
        (named.path.display().to_string(), named.format.map(|format| format.to_string()))
    }

    fn found(path: &str, format: Option<&str>) -> (String, Option<String>) {
        (path.to_owned(), format.map(str::to_owned))
    }

    #[test]
    fn names_and_options_come_down_to_a_path_and_a_format() {
        assert_eq!(means("a,b=c", false), found("a,b=c", None));
        for (text, path, format) in [
            ("driver=qcow2,file.filename=a.qcow2", "a.qcow2", Some("qcow2")),
            ("driver=qcow2,file.driver=file,file.filename=a,,b,file.locking=off", "a,b", Some("qcow2")),
            ("file.filename=a", "a", None),
            ("driver=file,filename=/dev/x", "/dev/x", Some("raw")),
            ("driver=raw,file.driver=host_device,file.filename=/dev/x,read-only=on", "/dev/x", Some("raw")),
            (
                "driver=nbd,server.type=unix,server.path=/run/a b,export=d/1",
                "nbd+unix:///d/1?socket=/run/a%20b",
                Some("raw"),
            ),
            ("driver=nbd,host=h,port=10", "nbd://h:10/", Some("raw")),
            ("driver=nbd,server.type=inet,server.host=::1", "nbd://[::1]:10809/", Some("raw")),
            (
                "driver=qcow2,file.driver=nbd,file.server.path=/s,file.export=x",
                "nbd+unix:///x?socket=/s",
                Some("qcow2"),
            ),
            ("driver=qcow2,file.driver=https,file.url=https://h/a", "https://h/a", Some("qcow2")),
        ] {
            assert_eq!(means(text, true), found(path, format), "{text}");
        }
        for (text, path, format) in [
            (r#"json:{"driver":"qcow2","file":{"driver":"file","filename":"a"}}"#, "a", Some("qcow2")),
            (r#"json:{"file.filename":"a","driver":"vellum"}"#, "a", Some("vellum")),
            (
                r#"json:{"driver":"nbd","server":{"type":"inet","host":"h","port":"10809"},"export":"é"}"#,
                "nbd://h:10809/%C3%A9",
                Some("raw"),
            ),
        ] {
            assert_eq!(means(text, false), found(path, format), "{text}");
        }
    }

    #[test]
    fn certificates_are_named_by_keys_and_make_it_tls() {
        let tls = |id: &str, hostname: Option<&str>| {
            Some(NamedTls { id: id.to_owned(), hostname: hostname.map(str::to_owned) })
        };
        for (text, path, expected) in [
            ("driver=nbd,host=h,port=10,tls-creds=t", "nbds://h:10/", tls("t", None)),
            (
                "driver=qcow2,file.driver=nbd,file.server.path=/s,file.tls-creds=t,file.tls-hostname=n",
                "nbds+unix:///?socket=/s",
                tls("t", Some("n")),
            ),
            ("driver=nbd,uri=nbd://h/x,tls-creds=t", "nbds://h/x", tls("t", None)),
            ("driver=nbd,uri=nbds://h/x,tls-creds=t", "nbds://h/x", tls("t", None)),
            ("driver=nbd,uri=nbds://h/x", "nbds://h/x", None),
        ] {
            let found = named(Path::new(text), None, true).unwrap();
            assert_eq!((found.path.to_str().unwrap(), found.tls), (path, expected), "{text}");
        }
        let json = r#"json:{"driver":"raw","file":{"driver":"nbd","host":"h","tls-creds":"t"}}"#;
        assert_eq!(named(Path::new(json), None, false).unwrap().tls, tls("t", None));
        for text in ["NBD://h/x", "Nbd://h/x", "NBDS://h/x"] {
            let found = named(Path::new(&format!("driver=nbd,uri={text},tls-creds=t")), None, true).unwrap();
            assert_eq!((found.path.to_str().unwrap(), found.tls), ("nbds://h/x", tls("t", None)), "{text}");
        }
        for text in [
            "driver=nbd,host=h,tls-hostname=n",
            "driver=file,filename=a,tls-creds=t",
            "driver=nbd,filename=a,tls-creds=t",
            "driver=nbd,filename=nbd:h:10:exportname=x,tls-creds=t",
            "driver=nbd,uri=http://h/x,tls-creds=t",
        ] {
            assert!(named(Path::new(text), None, true).unwrap_err().chain().contains("tls-"), "{text}");
        }
    }

    #[test]
    fn options_of_encryption_are_a_claim() {
        for (text, is_encrypted) in [
            ("driver=qcow2,file.filename=a", false),
            ("driver=qcow2,file.filename=a,encrypt.key-secret=s", true),
            ("driver=qcow2,file.filename=a,encrypt.format=luks", true),
            ("driver=luks,file.filename=a,key-secret=s", true),
        ] {
            assert_eq!(named(Path::new(text), None, true).unwrap().is_encrypted, is_encrypted, "{text}");
        }
        for text in ["driver=raw,file.filename=a,encrypt.format=rot13", "driver=file,filename=a,key-secret=s"]
        {
            named(Path::new(text), None, true).unwrap_err();
        }
    }

    #[test]
    fn a_part_is_named_by_the_keys_of_raw() {
        fn size(text: &str) -> Result<u64> {
            text.parse().map_err(|_| Error::invalid("no number"))
        }
        let part = |text: &str| named_part(Path::new(text), None, true, size).map(|(_, part)| part);
        let all = "driver=raw,file.filename=a";
        assert_eq!(part(all).unwrap(), None);
        let some = part(&format!("{all},offset=1048576,size=65536")).unwrap();
        assert_eq!(some, Some(Part { offset: 1 << 20, size: Some(64 << 10) }));
        part("driver=qcow2,file.filename=a,offset=1048576").unwrap_err();
        part(&format!("{all},offset=x")).unwrap_err();
    }

    #[test]
    fn what_would_change_the_disk_is_not_left_aside() {
        for (text, word) in [
            ("driver=raw,offset=512,file.filename=a", "offset"),
            ("driver=qcow2,backing.file.filename=b,file.filename=a", "backing"),
            ("driver=qcow2,file=node0", "file.filename"),
            ("driver=qcow2", "file.filename"),
            ("driver=ssh,host=x", "ssh"),
            ("driver=raw,file.driver=ssh,file.host=x", "ssh"),
            ("driver=nbd,export=x", "server"),
            ("driver=throttle,file.filename=a", "throttle"),
        ] {
            let error = named(Path::new(text), None, true).unwrap_err().chain();
            assert!(error.contains(word), "{text}: {error}");
        }
        for text in ["json:", "json:{", "json:[1]", r#"json:{"driver":["a"]}"#, r#"json:{"driver":null}"#] {
            assert!(named(Path::new(text), None, false).is_err(), "{text}");
        }
        assert!(named(Path::new("driver=raw,file.filename=a"), Some(FormatKind::Qcow2), true).is_err());
    }
}
