//! The exports of a server, listed: their names, sizes, flags and contexts. None of them is used.
//!
//! ```text
//!   greeting ► (STARTTLS, and all of this inside) ► EXTENDED_HEADERS, else STRUCTURED_REPLY ► LIST
//!            ► for each export INFO, LIST_META_CONTEXT ► ABORT
//! ```
//!
//! What the server says is bounded in number and in length before it is kept.

use std::time::Duration;

use futures_lite::future::or;
use vellum_core::{ByteStream, Error, ErrorKind, Result};
use vellum_export::nbd::TlsClient;
use vellum_export::nbd::wire::{info, option, option_reply, transmission_flag};
use vellum_io::{Address, clock, connect};

use super::handshake::{Reply, ask, broken, greet, last_reply, replies_until_last, said, text, wants_tls};
use super::intake::Intake;
use super::tls::{reason, start_tls};

/// No server has more exports that are listed.
const EXPORTS_MAX: usize = 16 << 10;
/// No export has more contexts that are listed.
const CONTEXTS_MAX: usize = 1024;
/// Connecting, and everything after it, may each take this long.
const PATIENCE: Duration = Duration::from_secs(30);

/// An export, as a server describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedExport {
    /// Its name.
    pub name: String,
    /// What it is, for people.
    pub description: String,
    /// Its size in bytes and its transmission flags, if the server says so without opening it.
    pub size_and_flags: Option<(u64, u16)>,
    /// The smallest, the preferred and the largest request, in bytes, if the server says so.
    pub block_bytes: Option<[u32; 3]>,
    /// Requests have 64-bit lengths (extended headers).
    pub has_long_requests: bool,
    /// The metadata contexts that can be queried.
    pub contexts: Vec<String>,
}

/// The bits of the transmission flags that have a name, from the lowest.
pub const FLAG_NAMES: [(u16, &str); 12] = [
    (transmission_flag::READ_ONLY, "readonly"),
    (transmission_flag::SEND_FLUSH, "flush"),
    (transmission_flag::SEND_FUA, "fua"),
    (1 << 4, "rotational"),
    (transmission_flag::SEND_TRIM, "trim"),
    (transmission_flag::SEND_WRITE_ZEROES, "zeroes"),
    (transmission_flag::SEND_DF, "df"),
    (transmission_flag::CAN_MULTI_CONN, "multi"),
    (1 << 9, "resize"),
    (transmission_flag::SEND_CACHE, "cache"),
    (transmission_flag::SEND_FAST_ZERO, "fast-zero"),
    (1 << 12, "block-status-payload"),
];

/// Lists the exports of the server at this address.
///
/// # Errors
/// `Io` and `Closed` for the connection, `Unsupported` for what is no NBD server, is too old, or wants TLS; `Refused` for a server that does
/// not list its exports.
pub async fn list(address: &Address, tls: Option<&TlsClient>) -> Result<Vec<ListedExport>> {
    let naming = || format!("can't list the exports at {address}");
    let stream =
        within("connecting", connect(address)).await.map_err(|error| error.context(naming()))?.attach();
    let listed = within("listing", list_over(&stream, tls)).await;
    stream.shutdown();
    listed.map_err(|error| error.context(naming()))
}

async fn within<T>(what: &str, work: impl Future<Output = Result<T>>) -> Result<T> {
    let late = async {
        clock().sleep(PATIENCE).await;
        Err(Error::new(ErrorKind::Io, format!("{what} took longer than {} seconds", PATIENCE.as_secs())))
    };
    or(work, late).await
}

pub(super) async fn list_over(stream: &dyn ByteStream, tls: Option<&TlsClient>) -> Result<Vec<ListedExport>> {
    let mut intake = Intake::new(stream);
    greet(stream, &mut intake).await?;
    let Some(tls) = tls else { return list_inside(stream, &mut intake).await };
    let sealed = start_tls(stream, &mut intake, tls).await?;
    match list_inside(&sealed, &mut Intake::new(&sealed)).await {
        Ok(listed) => {
            let _ = sealed.send_close().await;
            Ok(listed)
        }
        Err(error) => Err(reason(&sealed, error).await),
    }
}

async fn list_inside(stream: &dyn ByteStream, intake: &mut Intake<'_>) -> Result<Vec<ListedExport>> {
    ask(stream, option::EXTENDED_HEADERS, &[]).await?;
    let answer = last_reply(intake, option::EXTENDED_HEADERS).await?.1;
    refuse_if_tls_is_wanted(&answer)?;
    let has_long_requests = answer.kind == option_reply::ACK;
    let mut has_chunks = has_long_requests;
    if !has_chunks {
        ask(stream, option::STRUCTURED_REPLY, &[]).await?;
        has_chunks = last_reply(intake, option::STRUCTURED_REPLY).await?.1.kind == option_reply::ACK;
    }
    ask(stream, option::LIST, &[]).await?;
    let (servers, last) = replies_until_last(intake, option::LIST, EXPORTS_MAX).await?;
    refuse_if_tls_is_wanted(&last)?;
    if last.kind != option_reply::ACK {
        return Err(Error::new(
            ErrorKind::Refused,
            format!("the server does not list its exports{}", said(&last)),
        ));
    }
    let mut exports = Vec::new();
    for reply in servers.iter().filter(|reply| reply.kind == option_reply::SERVER) {
        let (name, description) = name_of(&reply.data)?;
        exports.push(ListedExport {
            name,
            description,
            size_and_flags: None,
            block_bytes: None,
            has_long_requests,
            contexts: Vec::new(),
        });
    }
    for export in &mut exports {
        let mut data = text(&export.name);
        data.extend_from_slice(&1_u16.to_be_bytes());
        data.extend_from_slice(&info::BLOCK_SIZE.to_be_bytes());
        ask(stream, option::INFO, &data).await?;
        let (facts, last) = last_reply(intake, option::INFO).await?;
        if last.kind == option_reply::ERR_UNSUP {
            // An old server: the names are all that it tells.
            break;
        }
        if last.kind != option_reply::ACK {
            return Err(Error::new(
                ErrorKind::Io,
                format!(
                    "the server does not describe the export '{}'{}",
                    export.name.escape_debug(),
                    said(&last)
                ),
            ));
        }
        facts
            .iter()
            .filter(|reply| reply.kind == option_reply::INFO)
            .try_for_each(|reply| note(export, reply))?;
        if !has_chunks {
            continue;
        }
        let mut data = text(&export.name);
        data.extend_from_slice(&0_u32.to_be_bytes());
        ask(stream, option::LIST_META_CONTEXT, &data).await?;
        let (contexts, last) = replies_until_last(intake, option::LIST_META_CONTEXT, CONTEXTS_MAX).await?;
        // A server that has no contexts may say so in this way.
        if last.kind == option_reply::ACK {
            let contexts = contexts.iter().filter(|reply| reply.kind == option_reply::META_CONTEXT);
            let name = |reply: &Reply| Some(String::from_utf8_lossy(reply.data.get(4..)?).into_owned());
            let names: Option<Vec<String>> = contexts.map(name).collect();
            export.contexts = names.ok_or_else(|| broken("a context has no number"))?;
        }
    }
    // Nobody waits for the answer, and a server that has gone already is no failure.
    let _ = ask(stream, option::ABORT, &[]).await;
    Ok(exports)
}

/// Takes up one fact about an export.
fn note(export: &mut ListedExport, reply: &Reply) -> Result<()> {
    let (number, rest) = reply.data.split_first_chunk().ok_or_else(|| broken("a fact has no number"))?;
    match u16::from_be_bytes(*number) {
        info::EXPORT => {
            let (Some(size), Some(flags), 10) = (rest.first_chunk(), rest.last_chunk(), rest.len()) else {
                return Err(broken("the facts about the export have a wrong length"));
            };
            export.size_and_flags = Some((u64::from_be_bytes(*size), u16::from_be_bytes(*flags)));
        }
        info::BLOCK_SIZE => {
            let (words, []) = rest.as_chunks::<4>() else {
                return Err(broken("the block sizes have a wrong length"));
            };
            let words: [[u8; 4]; 3] =
                words.try_into().map_err(|_| broken("the block sizes have a wrong length"))?;
            export.block_bytes = Some(words.map(u32::from_be_bytes));
        }
        _ => {}
    }
    Ok(())
}

/// The name and the description in a reply to `NBD_OPT_LIST`.
fn name_of(data: &[u8]) -> Result<(String, String)> {
    let (len, rest) = data.split_first_chunk().ok_or_else(|| broken("a listed export has no name"))?;
    let (name, description) = usize::try_from(u32::from_be_bytes(*len))
        .ok()
        .and_then(|len| rest.split_at_checked(len))
        .ok_or_else(|| broken("the name of a listed export is too long"))?;
    let name = std::str::from_utf8(name).map_err(|_| broken("the name of a listed export is not UTF-8"))?;
    Ok((name.to_owned(), String::from_utf8_lossy(description).into_owned()))
}

fn refuse_if_tls_is_wanted(reply: &Reply) -> Result<()> {
    match reply.kind {
        option_reply::ERR_TLS_REQD => Err(wants_tls(reply, "use --tls-certificates DIR")),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_facts_of_wrong_lengths_are_refused() {
        assert_eq!(name_of(b"\0\0\0\x02abtext").unwrap(), ("ab".to_owned(), "text".to_owned()));
        assert_eq!(name_of(b"\0\0\0\0").unwrap(), (String::new(), String::new()));
        for data in [&b""[..], b"\0\0", b"\0\0\0\x03ab", b"\xff\xff\xff\xffab", b"\0\0\0\x01\xff"] {
            assert!(name_of(data).unwrap_err().chain().contains("breaks the NBD protocol"), "{data:?}");
        }
        let export = || ListedExport {
            name: String::new(),
            description: String::new(),
            size_and_flags: None,
            block_bytes: None,
            has_long_requests: false,
            contexts: Vec::new(),
        };
        let noted = |data: &[u8]| {
            let mut one = export();
            note(&mut one, &Reply { kind: option_reply::INFO, data: data.to_vec() }).map(|()| one)
        };
        let sizes = noted(b"\0\x03\0\0\0\x01\0\0\x10\0\x02\0\0\0").unwrap();
        assert_eq!(sizes.block_bytes, Some([1, 4096, 32 << 20]));
        let facts = noted(b"\0\0\0\0\0\0\0\0\x02\0\x01\x03").unwrap();
        assert_eq!(facts.size_and_flags, Some((512, 0x103)));
        assert_eq!(noted(b"\0\x77anything").unwrap(), export());
        for data in [
            &b""[..],
            b"\0",
            b"\0\0",
            b"\0\0\x01",
            b"\0\x03\0\0\0\x01",
            b"\0\x03\0\0\0\x01\0\0\x10\0\x02\0\0\0\0",
        ] {
            assert!(noted(data).is_err(), "{data:?}");
        }
    }
}
