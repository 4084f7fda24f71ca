//! The handshake, as a client: from the greeting to an export that is open. Between the two TLS may begin (`tls`).
//!
//! 1. A reply of the server is bounded in length and in number before anything is allocated for it.
//! 2. What the server states about the export is checked here and nowhere else: after [`handshake`] the sizes
//!    are possible.
//!
//! Left out: servers without `NBD_OPT_GO` (before 2016) and oldstyle ones.

use vellum_core::{BlockSize, Buffer, ByteStream, Error, Result};
use vellum_export::nbd::wire::{
    BLOCK_BYTES_MIN_MAX, GREETING_MAGIC, OPTION_MAGIC, OPTION_REPLY_MAGIC, PAYLOAD_BYTES_DEFAULT,
    handshake_flag, info, option, option_reply, transmission_flag,
};

use super::intake::Intake;

/// No reply to an option is longer, in bytes: a string and the numbers around it.
const REPLY_BYTES_MAX: u32 = 8 << 10;
/// No option has more replies.
const REPLIES_MAX: usize = 64;
/// The metadata context that says what is zero.
const ALLOCATION: &str = "base:allocation";

/// What the server states of an export.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportFacts {
    /// Its size in bytes.
    pub size: u64,
    /// Its transmission flags.
    pub flags: u16,
    /// Requests must be aligned to this.
    pub block_size: BlockSize,
    /// No payload may be longer, in bytes.
    pub payload_max: u32,
    /// Replies come in chunks.
    pub structured: bool,
    /// The number of the context `base:allocation`, if the server reports it.
    pub allocation: Option<u32>,
    /// The number of the migration in which the disk has moved, if the server says so of a read-only export.
    pub moved: Option<String>,
    /// What the server says about it, for people.
    pub description: String,
}

impl ExportFacts {
    /// Whether this transmission flag is set.
    pub fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }

    /// Whether writes are refused.
    pub fn is_read_only(&self) -> bool {
        self.has(transmission_flag::READ_ONLY)
    }
}

/// One reply to an option.
pub(super) struct Reply {
    pub(super) kind: u32,
    pub(super) data: Vec<u8>,
}

/// Agrees with a server that has greeted on how the export is used.
///
/// # Errors
/// `Closed` and `Io` for the connection, `NotFound` for an export that does not exist, `Refused` for one that may
/// not be used, and `Unsupported` for a server that is no NBD server or too old.
pub(super) async fn handshake(
    stream: &dyn ByteStream,
    intake: &mut Intake<'_>,
    export: &str,
) -> Result<ExportFacts> {
    ask(stream, option::STRUCTURED_REPLY, &[]).await?;
    let structured = last_reply(intake, option::STRUCTURED_REPLY).await?.1.kind == option_reply::ACK;
    let mut allocation = None;
    if structured {
        let mut data = text(export);
        data.extend_from_slice(&1_u32.to_be_bytes());
        data.extend_from_slice(&text(ALLOCATION));
        ask(stream, option::SET_META_CONTEXT, &data).await?;
        let (contexts, last) = last_reply(intake, option::SET_META_CONTEXT).await?;
        if last.kind == option_reply::ACK {
            let ours = contexts.iter().find_map(context_number);
            allocation = ours;
        }
    }
    let mut data = text(export);
    data.extend_from_slice(&2_u16.to_be_bytes());
    data.extend_from_slice(&info::BLOCK_SIZE.to_be_bytes());
    data.extend_from_slice(&info::DESCRIPTION.to_be_bytes());
    ask(stream, option::GO, &data).await?;
    let (replies, last) = last_reply(intake, option::GO).await?;
    if last.kind != option_reply::ACK {
        return Err(refusal(export, &last));
    }
    let mut facts = ExportFacts {
        size: 0,
        flags: 0,
        block_size: BlockSize::from_shift(0),
        payload_max: PAYLOAD_BYTES_DEFAULT,
        structured,
        allocation,
        moved: None,
        description: String::new(),
    };
    let mut has_size = false;
    for reply in replies.iter().filter(|reply| reply.kind == option_reply::INFO) {
        has_size |= note_fact(&mut facts, &reply.data)?;
    }
    facts.moved.take_if(|_| !facts.flags & transmission_flag::READ_ONLY != 0);
    if !has_size {
        return Err(broken("it does not state the size of the export"));
    }
    if facts.size > i64::MAX.cast_unsigned() {
        return Err(broken("it states an impossible size of the export"));
    }
    Ok(facts)
}

/// Hears the greeting, and answers it.
pub(super) async fn greet(stream: &dyn ByteStream, intake: &mut Intake<'_>) -> Result<()> {
    if intake.long().await? != GREETING_MAGIC {
        return Err(Error::unsupported("this is no NBD server"));
    }
    if intake.long().await? != OPTION_MAGIC {
        return Err(Error::unsupported("the server speaks the oldstyle protocol, which names no export"));
    }
    let greeted = intake.half().await?;
    if greeted & handshake_flag::FIXED_NEWSTYLE == 0 {
        return Err(Error::unsupported("the server does not answer options (no fixed newstyle)"));
    }
    let flags = handshake_flag::FIXED_NEWSTYLE | (greeted & handshake_flag::NO_ZEROES);
    send(stream, &u32::from(flags).to_be_bytes()).await?;
    Ok(())
}

/// Takes up one fact; whether it was the size.
fn note_fact(facts: &mut ExportFacts, data: &[u8]) -> Result<bool> {
    let number = data.first_chunk().map(|bytes| u16::from_be_bytes(*bytes));
    let rest = data.get(2..).unwrap_or_default();
    match number {
        Some(info::EXPORT) => {
            let (Some(size), Some(flags), 10) = (rest.first_chunk(), rest.last_chunk(), rest.len()) else {
                return Err(broken("the facts about the export have a wrong length"));
            };
            (facts.size, facts.flags) = (u64::from_be_bytes(*size), u16::from_be_bytes(*flags));
            Ok(true)
        }
        Some(info::BLOCK_SIZE) => {
            let (Some(min), Some(max), 12) = (rest.first_chunk(), rest.last_chunk(), rest.len()) else {
                return Err(broken("the block sizes have a wrong length"));
            };
            let (min, max) = (u32::from_be_bytes(*min), u32::from_be_bytes(*max));
            if !min.is_power_of_two() || min > BLOCK_BYTES_MIN_MAX || max < min.max(4096) {
                return Err(broken("its block sizes are impossible"));
            }
            facts.block_size = BlockSize::from_shift(min.trailing_zeros());
            facts.payload_max = max.min(PAYLOAD_BYTES_DEFAULT) & !(min - 1);
            Ok(false)
        }
        Some(info::DESCRIPTION) => {
            facts.moved = moved_in(rest);
            facts.description = String::from_utf8_lossy(rest).into_owned();
            Ok(false)
        }
        _ => Ok(false),
    }
}

/// The number of the migration that a description ends with.
fn moved_in(description: &[u8]) -> Option<String> {
    let (before, number) =
        std::str::from_utf8(description).ok()?.split_at_checked(description.len().checked_sub(32)?)?;
    let is_number = number.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte));
    let has_moved = [info::MOVED, info::GONE].iter().any(|words| before.ends_with(words));
    (is_number && has_moved).then(|| number.to_owned())
}

/// The number of `base:allocation`, if this reply is about it.
fn context_number(reply: &Reply) -> Option<u32> {
    let (number, name) = reply.data.split_first_chunk()?;
    let is_ours = reply.kind == option_reply::META_CONTEXT && name == ALLOCATION.as_bytes();
    is_ours.then(|| u32::from_be_bytes(*number))
}

/// All replies to an option: those before the last one, and it.
pub(super) async fn last_reply(intake: &mut Intake<'_>, asked: u32) -> Result<(Vec<Reply>, Reply)> {
    replies_until_last(intake, asked, REPLIES_MAX).await
}

/// The same, of at most this many before the last one.
pub(super) async fn replies_until_last(
    intake: &mut Intake<'_>,
    asked: u32,
    replies_max: usize,
) -> Result<(Vec<Reply>, Reply)> {
    let mut before = Vec::new();
    loop {
        if intake.long().await? != OPTION_REPLY_MAGIC || intake.word().await? != asked {
            return Err(broken("what follows an option is no reply to it"));
        }
        let kind = intake.word().await?;
        let len = intake.word().await?;
        if len > REPLY_BYTES_MAX {
            return Err(broken("a reply to an option is too long"));
        }
        let data = intake.bytes(len as usize).await?;
        let reply = Reply { kind, data };
        if kind == option_reply::ACK || kind & (1 << 31) != 0 {
            return Ok((before, reply));
        }
        if before.len() == replies_max {
            return Err(broken("an option has too many replies"));
        }
        before.push(reply);
    }
}

fn refusal(export: &str, reply: &Reply) -> Error {
    let says = match printable(&reply.data) {
        said if said.is_empty() => String::new(),
        said => format!(" (the server says: {said})"),
    };
    let name = export.escape_debug();
    match reply.kind {
        option_reply::ERR_UNKNOWN => {
            Error::new(vellum_core::ErrorKind::NotFound, format!("the server has no export '{name}'{says}"))
        }
        option_reply::ERR_TLS_REQD => wants_tls(
            reply,
            "name the export nbds://… or nbds+unix:///…, and use --tls-certificates DIR (`vellum serve --remote-tls-certificates DIR`)",
        ),
        option_reply::ERR_POLICY => Error::new(
            vellum_core::ErrorKind::Refused,
            format!("the server does not allow the export '{name}'{says}"),
        ),
        option_reply::ERR_UNSUP => Error::unsupported("the server is too old: it does not know NBD_OPT_GO"),
        _ => Error::new(
            vellum_core::ErrorKind::Io,
            format!("the server does not open the export '{name}'{says}"),
        ),
    }
}

/// What a server says, as far as it may be shown to a person.
pub(super) fn printable(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(400)]);
    text.escape_debug().to_string()
}

/// The error for a server that wants TLS from a client that has not begun it.
pub(super) fn wants_tls(reply: &Reply, remedy: &str) -> Error {
    Error::unsupported(format!("the server wants TLS{}: {remedy}", said(reply)))
}

/// What the server says beside an error.
pub(super) fn said(reply: &Reply) -> String {
    match printable(&reply.data) {
        text if text.is_empty() => String::new(),
        text => format!(" (it says: {text})"),
    }
}

/// An error for what no server may say.
pub(super) fn broken(what: &str) -> Error {
    Error::new(vellum_core::ErrorKind::Io, format!("the server breaks the NBD protocol: {what}"))
}

pub(super) fn text(text: &str) -> Vec<u8> {
    let len = u32::try_from(text.len()).expect("the name of an export is short");
    [&len.to_be_bytes()[..], text.as_bytes()].concat()
}

pub(super) async fn ask(stream: &dyn ByteStream, option: u32, data: &[u8]) -> Result<()> {
    let len = u32::try_from(data.len()).expect("options are short");
    let header = [&OPTION_MAGIC.to_be_bytes()[..], &option.to_be_bytes(), &len.to_be_bytes(), data].concat();
    send(stream, &header).await
}

async fn send(stream: &dyn ByteStream, bytes: &[u8]) -> Result<()> {
    stream.write_all(Buffer::copy_of(bytes)).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_that_has_moved_is_known_by_the_end_of_its_description() {
        let number = "0123456789abcdef0123456789abcdef";
        let found = |text: &str| moved_in(text.as_bytes());
        for before in ["", "disk.qcow2; "] {
            assert_eq!(found(&format!("{before}moved in migration {number}")).as_deref(), Some(number));
        }
        for other in [
            String::new(),
            number.to_owned(),
            format!("moved in migration {number} "),
            format!("moved in migration {}", number.to_uppercase()),
            format!("moved in migration {}", &number[1..]),
            format!("moved to {number}"),
            "\u{e9}".repeat(40),
        ] {
            assert_eq!(found(&other), None, "{other:?}");
        }
    }
}
