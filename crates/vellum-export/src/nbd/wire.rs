//! The NBD protocol's numbers and byte layouts, and nothing else. Source: `doc/proto.md` of
//! NetworkBlockDevice/nbd, whose section names are given here. All integers are big-endian.
//!
//! ```text
//!   greeting      │ NBDMAGIC 8 │ IHAVEOPT 8 │ flags 2 │                              server → client
//!   client flags  │ flags 4 │                                                        client → server
//!   option        │ IHAVEOPT 8 │ option 4 │ len 4 │ data …                           client → server
//!   option reply  │ magic 8 │ option 4 │ kind 4 │ len 4 │ data …                     server → client
//!
//!   request       │ magic 4 │ flags 2 │ command 2 │ cookie 8 │ offset 8 │ len 4 │ payload of a write …
//!   simple reply  │ magic 4 │ error 4 │ cookie 8 │ payload of a read …
//!   chunk         │ magic 4 │ flags 2 │ kind 2 │ cookie 8 │ len 4 │ payload …
//!     data        │ offset 8 │ bytes …
//!     hole        │ offset 8 │ len 4 │
//!     status      │ context 4 │ len 4 │ status 4 │ len 4 │ status 4 │ …
//!     error       │ error 4 │ message len 2 │ message … │
//!     error at    │ error 4 │ message len 2 │ message … │ offset 8 │
//!
//!   with extended headers, instead:
//!   request       │ magic 4 │ flags 2 │ command 2 │ cookie 8 │ offset 8 │ len 8 │ payload, if a flag says so …
//!   chunk         │ magic 4 │ flags 2 │ kind 2 │ cookie 8 │ offset 8 │ len 8 │ payload …
//!     status      │ context 4 │ runs 4 │ len 8 │ status 8 │ len 8 │ status 8 │ …
//! ```
//!
//! 1. Parsing reads the bytes it was given and no others; input that is invalid yields `None`, never a panic.
//! 2. A length that a peer sent is compared before it is used, and never allocates anything by itself.
//!
//! Extended headers are in the branch `extension-ext-header` of the same document; QEMU speaks them since
//! 8.2.
//!
//! Left out: oldstyle negotiation (withdrawn from the standard).

use vellum_core::ErrorKind;

/// `NBDMAGIC`, how every greeting begins.
pub const GREETING_MAGIC: u64 = u64::from_be_bytes(*b"NBDMAGIC");
/// `IHAVEOPT`, the second word of a newstyle greeting and the first of each option.
pub const OPTION_MAGIC: u64 = u64::from_be_bytes(*b"IHAVEOPT");
/// The first word of the server's replies to options.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// The first word of a request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// The first word of a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// The first word of a structured reply chunk.
pub const CHUNK_MAGIC: u32 = 0x668e_33ef;

/// The first word of a request with extended headers.
pub const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
/// The first word of a chunk with extended headers.
pub const EXTENDED_CHUNK_MAGIC: u32 = 0x6e8a_278c;

/// No string of the protocol is longer ("Conventions").
pub const STRING_BYTES_MAX: usize = 4096;
/// The payload every server should take where nothing else was agreed ("Size constraints").
pub const PAYLOAD_BYTES_DEFAULT: u32 = 32 << 20;
/// No advertised minimum block size is larger ("Size constraints").
pub const BLOCK_BYTES_MIN_MAX: u32 = 64 << 10;
/// The bytes of a greeting.
pub const GREETING_BYTES: usize = 18;
/// The bytes of the client's flags.
pub const CLIENT_FLAGS_BYTES: usize = 4;
/// The bytes of an option without its data.
pub const OPTION_HEADER_BYTES: usize = 16;
/// The bytes of a request without its payload.
pub const REQUEST_HEADER_BYTES: usize = 28;
/// The bytes of a simple reply without its payload.
pub const SIMPLE_REPLY_BYTES: usize = 16;
/// The bytes of a chunk without its payload.
pub const CHUNK_HEADER_BYTES: usize = 20;
/// The bytes of an extended request, and of an extended chunk, without their payload.
pub const EXTENDED_HEADER_BYTES: usize = 32;

/// Flags of the greeting and of the client's answer ("Handshake flags", "Client flags"): both have the same
/// bits.
pub mod handshake_flag {
    /// Options are answered one by one.
    pub const FIXED_NEWSTYLE: u16 = 1 << 0;
    /// No 124 zeros after `NBD_OPT_EXPORT_NAME`.
    pub const NO_ZEROES: u16 = 1 << 1;
}

/// What an export can do ("Transmission flags").
pub mod transmission_flag {
    /// Always set.
    pub const HAS_FLAGS: u16 = 1 << 0;
    /// Writes are refused.
    pub const READ_ONLY: u16 = 1 << 1;
    /// `NBD_CMD_FLUSH` works.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// `NBD_CMD_FLAG_FUA` works.
    pub const SEND_FUA: u16 = 1 << 3;
    /// `NBD_CMD_TRIM` works.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// `NBD_CMD_WRITE_ZEROES` works.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// `NBD_CMD_FLAG_DF` works.
    pub const SEND_DF: u16 = 1 << 7;
    /// A flush on one connection covers what was completed on all.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// `NBD_CMD_CACHE` works.
    pub const SEND_CACHE: u16 = 1 << 10;
    /// `NBD_CMD_FLAG_FAST_ZERO` works.
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// What a client may ask during the handshake ("Option types").
pub mod option {
    /// Choose an export and begin, without an answer that could be an error.
    pub const EXPORT_NAME: u32 = 1;
    /// Say goodbye.
    pub const ABORT: u32 = 2;
    /// List the exports.
    pub const LIST: u32 = 3;
    /// Begin TLS.
    pub const STARTTLS: u32 = 5;
    /// Tell about an export.
    pub const INFO: u32 = 6;
    /// Choose an export and begin.
    pub const GO: u32 = 7;
    /// Use structured replies.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// List the metadata contexts of an export.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Choose metadata contexts of an export.
    pub const SET_META_CONTEXT: u32 = 10;
    /// Use 64-bit headers.
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// How an option is answered ("Option reply types").
pub mod option_reply {
    /// Done.
    pub const ACK: u32 = 1;
    /// An export.
    pub const SERVER: u32 = 2;
    /// A fact about an export.
    pub const INFO: u32 = 3;
    /// A metadata context.
    pub const META_CONTEXT: u32 = 4;
    /// The server does not know the option.
    pub const ERR_UNSUP: u32 = (1 << 31) | 1;
    /// The server will not, for now.
    pub const ERR_POLICY: u32 = (1 << 31) | 2;
    /// The request contradicts itself.
    pub const ERR_INVALID: u32 = (1 << 31) | 3;
    /// TLS comes first.
    pub const ERR_TLS_REQD: u32 = (1 << 31) | 5;
    /// There is no such export.
    pub const ERR_UNKNOWN: u32 = (1 << 31) | 6;
    /// The server is going down.
    pub const ERR_SHUTDOWN: u32 = (1 << 31) | 7;
    /// The request or its answer is too large.
    pub const ERR_TOO_BIG: u32 = (1 << 31) | 9;
    /// Extended headers were negotiated, and there is no way back.
    pub const ERR_EXT_HEADER_REQD: u32 = (1 << 31) | 10;
}

/// Facts about an export (`NBD_REP_INFO`).
pub mod info {
    /// Size and transmission flags.
    pub const EXPORT: u16 = 0;
    /// Its canonical name.
    pub const NAME: u16 = 1;
    /// What it is, for a person.
    pub const DESCRIPTION: u16 = 2;
    /// Vellum's own: a description that ends with this and the number of a migration, 32 hexadecimal digits, is that of
    /// an image whose disk has moved. It never changes again, unless the disk is taken back.
    pub const MOVED: &str = "moved in migration ";
    /// The same of one whose disk is taken back by nobody: another image has taken it over.
    pub const GONE: &str = "gone in migration ";
    /// Vellum's own: with a challenge, 32 hexadecimal digits, what a description has while the export is looked for.
    pub const ASKED: &str = "asked by ";
    /// Its size constraints.
    pub const BLOCK_SIZE: u16 = 3;
}

/// What a request asks for ("Request types").
pub mod command {
    /// Read bytes.
    pub const READ: u16 = 0;
    /// Write bytes.
    pub const WRITE: u16 = 1;
    /// Say goodbye.
    pub const DISC: u16 = 2;
    /// Make durable what was completed.
    pub const FLUSH: u16 = 3;
    /// Bytes that are skipped.
    pub const TRIM: u16 = 4;
    /// These bytes will be read.
    pub const CACHE: u16 = 5;
    /// Write zeros.
    pub const WRITE_ZEROES: u16 = 6;
    /// Tell where data and holes are.
    pub const BLOCK_STATUS: u16 = 7;
}

/// Options of a request ("Command flags").
pub mod command_flag {
    /// Durable when answered.
    pub const FUA: u16 = 1 << 0;
    /// Zeros keep their space.
    pub const NO_HOLE: u16 = 1 << 1;
    /// One content chunk.
    pub const DF: u16 = 1 << 2;
    /// One extent.
    pub const REQ_ONE: u16 = 1 << 3;
    /// Zeros faster than a write, or not at all.
    pub const FAST_ZERO: u16 = 1 << 4;
    /// With extended headers: the length is that of a payload that follows, not that of what the request is
    /// about.
    pub const PAYLOAD_LEN: u16 = 1 << 5;
}

/// Structured replies ("Structured reply types").
pub mod chunk {
    /// This chunk is the last of its reply.
    pub const FLAG_DONE: u16 = 1 << 0;
    /// Nothing more to say.
    pub const NONE: u16 = 0;
    /// Bytes.
    pub const OFFSET_DATA: u16 = 1;
    /// Zeros.
    pub const OFFSET_HOLE: u16 = 2;
    /// Extents of one metadata context.
    pub const BLOCK_STATUS: u16 = 5;
    /// As above, with 64 bits each for lengths and statuses.
    pub const BLOCK_STATUS_EXT: u16 = 6;
    /// A failure.
    pub const ERROR: u16 = (1 << 15) | 1;
    /// A failure at one place.
    pub const ERROR_OFFSET: u16 = (1 << 15) | 2;
}

/// The status of an extent in `base:allocation`.
pub mod allocation {
    /// No space is set aside for it.
    pub const HOLE: u32 = 1 << 0;
    /// It reads as zero.
    pub const ZERO: u32 = 1 << 1;
}

/// The failures that a reply can express ("Error values"). The numbers are the protocol's own, not the
/// host's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Errno {
    /// A write to a read-only export.
    Perm = 1,
    /// The host failed.
    Io = 5,
    /// The request is wrong.
    Invalid = 22,
    /// No room, or a write past the end.
    NoSpace = 28,
    /// More than the server does at once.
    Overflow = 75,
    /// Not done because it would not be fast.
    NotSupported = 95,
    /// The server is going down.
    Shutdown = 108,
}

impl Errno {
    /// What a failure of the disk is to the client. `NBD_ENOTSUP` is kept for zeros that had to be fast: "The
    /// server SHOULD NOT return NBD_ENOTSUP except as documented in response to NBD_CMD_WRITE_ZEROES".
    pub fn of(kind: ErrorKind, had_to_be_fast: bool) -> Self {
        match kind {
            ErrorKind::NoSpace => Self::NoSpace,
            ErrorKind::Invalid => Self::Invalid,
            ErrorKind::ReadOnly | ErrorKind::Refused => Self::Perm,
            ErrorKind::Closed => Self::Shutdown,
            ErrorKind::Unsupported if had_to_be_fast => Self::NotSupported,
            ErrorKind::Unsupported => Self::Invalid,
            _ => Self::Io,
        }
    }

    /// The number on the wire.
    pub fn code(self) -> u32 {
        self as u32
    }
}

/// The server's greeting.
pub fn greeting() -> [u8; GREETING_BYTES] {
    let mut bytes = [0; GREETING_BYTES];
    bytes[..8].copy_from_slice(&GREETING_MAGIC.to_be_bytes());
    bytes[8..16].copy_from_slice(&OPTION_MAGIC.to_be_bytes());
    let flags = handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES;
    bytes[16..].copy_from_slice(&flags.to_be_bytes());
    bytes
}

/// An option as it comes from the wire, before its data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OptionHeader {
    /// Which option.
    pub option: u32,
    /// The bytes of its data.
    pub len: u32,
}

impl OptionHeader {
    /// `None` when the magic is wrong.
    pub fn parse(bytes: &[u8; OPTION_HEADER_BYTES]) -> Option<Self> {
        let mut reader = Reader::new(bytes);
        if reader.u64()? != OPTION_MAGIC {
            return None;
        }
        Some(Self { option: reader.u32()?, len: reader.u32()? })
    }
}

/// A request as it arrives: only its magic was checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestHeader {
    /// See [`command_flag`].
    pub flags: u16,
    /// See [`command`].
    pub command: u16,
    /// The client's word for it, given back with the reply.
    pub cookie: u64,
    /// The first byte.
    pub offset: u64,
    /// How many bytes. 32 bits on the wire; 64 with extended headers.
    pub len: u64,
}

impl RequestHeader {
    /// `None` when the magic is wrong.
    pub fn parse(bytes: &[u8; REQUEST_HEADER_BYTES]) -> Option<Self> {
        let mut reader = Reader::new(bytes);
        let header = Self::parse_all_but_len(&mut reader, REQUEST_MAGIC)?;
        Some(Self { len: u64::from(reader.u32()?), ..header })
    }

    /// As above, with extended headers.
    pub fn parse_extended(bytes: &[u8; EXTENDED_HEADER_BYTES]) -> Option<Self> {
        let mut reader = Reader::new(bytes);
        let header = Self::parse_all_but_len(&mut reader, EXTENDED_REQUEST_MAGIC)?;
        Some(Self { len: reader.u64()?, ..header })
    }

    fn parse_all_but_len(reader: &mut Reader<'_>, magic: u32) -> Option<Self> {
        if reader.u32()? != magic {
            return None;
        }
        Some(Self {
            flags: reader.u16()?,
            command: reader.u16()?,
            cookie: reader.u64()?,
            offset: reader.u64()?,
            len: 0,
        })
    }

    /// The bytes on the wire with extended headers, for clients.
    pub fn encode_extended(&self) -> [u8; EXTENDED_HEADER_BYTES] {
        let mut bytes = [0; EXTENDED_HEADER_BYTES];
        bytes[..4].copy_from_slice(&EXTENDED_REQUEST_MAGIC.to_be_bytes());
        bytes[4..6].copy_from_slice(&self.flags.to_be_bytes());
        bytes[6..8].copy_from_slice(&self.command.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        bytes[16..24].copy_from_slice(&self.offset.to_be_bytes());
        bytes[24..].copy_from_slice(&self.len.to_be_bytes());
        bytes
    }

    /// The bytes on the wire, for clients. Panics when the length needs more than 32 bits.
    pub fn encode(&self) -> [u8; REQUEST_HEADER_BYTES] {
        let len = u32::try_from(self.len).expect("a compact request has a 32-bit length");
        let mut bytes = [0; REQUEST_HEADER_BYTES];
        bytes[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
        bytes[4..6].copy_from_slice(&self.flags.to_be_bytes());
        bytes[6..8].copy_from_slice(&self.command.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        bytes[16..24].copy_from_slice(&self.offset.to_be_bytes());
        bytes[24..].copy_from_slice(&len.to_be_bytes());
        bytes
    }
}

/// The data of `NBD_OPT_INFO` and `NBD_OPT_GO`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InfoRequest<'a> {
    /// Which export.
    pub name: &'a str,
    /// The requested facts, as bits 1 << [`info`]; unknown ones are left out.
    wanted: u16,
}

impl<'a> InfoRequest<'a> {
    /// `None` when the data contradicts itself.
    pub fn parse(data: &'a [u8]) -> Option<Self> {
        let mut reader = Reader::new(data);
        let name = reader.string()?;
        let mut wanted = 0;
        for _ in 0..reader.u16()? {
            // "The server MUST ignore any information requests it does not understand."
            wanted |= 1_u16.checked_shl(u32::from(reader.u16()?)).unwrap_or(0);
        }
        reader.is_empty().then_some(Self { name, wanted })
    }

    /// Whether the client requested this fact, one of [`info`].
    pub fn wants(&self, fact: u16) -> bool {
        1_u16.checked_shl(u32::from(fact)).is_some_and(|bit| self.wanted & bit != 0)
    }
}

/// The data of `NBD_OPT_LIST_META_CONTEXT` and `NBD_OPT_SET_META_CONTEXT`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContextRequest<'a> {
    /// Which export.
    pub name: &'a str,
    /// The queries. Each takes at least four of the option's bytes, so their number is bounded.
    pub queries: Vec<&'a str>,
}

impl<'a> ContextRequest<'a> {
    /// `None` when the data contradicts itself.
    pub fn parse(data: &'a [u8]) -> Option<Self> {
        let mut reader = Reader::new(data);
        let name = reader.string()?;
        let mut queries = Vec::new();
        for _ in 0..reader.u32()? {
            queries.push(reader.string()?);
        }
        reader.is_empty().then_some(Self { name, queries })
    }
}

/// Whether the bytes are what the protocol calls a string: UTF-8, no NUL, at most 4096 bytes.
pub fn parse_string(bytes: &[u8]) -> Option<&str> {
    if bytes.len() > STRING_BYTES_MAX || bytes.contains(&0) {
        return None;
    }
    std::str::from_utf8(bytes).ok()
}

/// Takes integers and strings off the front of untrusted bytes.
struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (array, rest) = self.rest.split_first_chunk()?;
        self.rest = rest;
        Some(*array)
    }

    fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    /// A 32-bit length and as many bytes of string.
    fn string(&mut self) -> Option<&'a str> {
        let len = usize::try_from(self.u32()?).ok()?;
        let (bytes, rest) = self.rest.split_at_checked(len)?;
        self.rest = rest;
        parse_string(bytes)
    }

    fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info_data(name: &[u8], facts: &[u16]) -> Vec<u8> {
        let mut data = u32::try_from(name.len()).unwrap().to_be_bytes().to_vec();
        data.extend_from_slice(name);
        data.extend_from_slice(&u16::try_from(facts.len()).unwrap().to_be_bytes());
        for fact in facts {
            data.extend_from_slice(&fact.to_be_bytes());
        }
        data
    }

    fn context_data(name: &[u8], queries: &[&[u8]]) -> Vec<u8> {
        let mut data = u32::try_from(name.len()).unwrap().to_be_bytes().to_vec();
        data.extend_from_slice(name);
        data.extend_from_slice(&u32::try_from(queries.len()).unwrap().to_be_bytes());
        for query in queries {
            data.extend_from_slice(&u32::try_from(query.len()).unwrap().to_be_bytes());
            data.extend_from_slice(query);
        }
        data
    }

    #[test]
    fn the_magics_are_those_of_the_standard() {
        assert_eq!(GREETING_MAGIC, 0x4e42_444d_4147_4943);
        assert_eq!(OPTION_MAGIC, 0x4948_4156_454F_5054);
        assert_eq!(greeting()[..], *b"NBDMAGICIHAVEOPT\x00\x03");
    }

    #[test]
    fn a_request_survives_the_wire() {
        let header = RequestHeader {
            flags: 0x8001,
            command: 7,
            cookie: u64::MAX - 1,
            offset: 1 << 63,
            len: u64::from(u32::MAX),
        };
        assert_eq!(RequestHeader::parse(&header.encode()), Some(header));
        let mut bytes = header.encode();
        bytes[3] ^= 1;
        assert_eq!(RequestHeader::parse(&bytes), None);
        let long = RequestHeader { len: u64::MAX - 7, ..header };
        assert_eq!(RequestHeader::parse_extended(&long.encode_extended()), Some(long));
        let mut bytes = long.encode_extended();
        bytes[0] ^= 0x80;
        assert_eq!(RequestHeader::parse_extended(&bytes), None);
    }

    #[test]
    fn an_option_needs_its_magic() {
        let mut bytes = [0; OPTION_HEADER_BYTES];
        bytes[..8].copy_from_slice(b"IHAVEOPT");
        bytes[11] = 7;
        bytes[15] = 9;
        assert_eq!(OptionHeader::parse(&bytes), Some(OptionHeader { option: 7, len: 9 }));
        bytes[0] = b'i';
        assert_eq!(OptionHeader::parse(&bytes), None);
    }

    #[test]
    fn what_a_client_asks_about_an_export() {
        let data = info_data(b"disk", &[info::BLOCK_SIZE, 77, 15, info::BLOCK_SIZE]);
        let request = InfoRequest::parse(&data).unwrap();
        assert_eq!(request.name, "disk");
        assert!(request.wants(info::BLOCK_SIZE) && !request.wants(info::NAME));
        assert!(!InfoRequest::parse(&info_data(b"", &[])).unwrap().wants(info::EXPORT));
    }

    #[test]
    fn info_data_that_contradicts_itself_is_refused() {
        let good = info_data(b"disk", &[info::NAME]);
        for len in 0..good.len() {
            assert_eq!(InfoRequest::parse(&good[..len]), None, "cut off at {len}");
        }
        let mut long = good.clone();
        long.push(0);
        assert_eq!(InfoRequest::parse(&long), None, "bytes too many");
        for name_len in [5, 6, 7, 8, 9, 0x7fff_ffff, 0xffff_ffff_u32] {
            let mut wrong = good.clone();
            wrong[..4].copy_from_slice(&name_len.to_be_bytes());
            assert_eq!(InfoRequest::parse(&wrong), None, "a name of {name_len} bytes");
        }
        for name in [&b"a\0b"[..], b"\xff", &[b'a'; 4097]] {
            assert_eq!(InfoRequest::parse(&info_data(name, &[])), None);
        }
        assert!(InfoRequest::parse(&info_data(&[b'a'; 4096], &[])).is_some());
    }

    #[test]
    fn context_data_that_contradicts_itself_is_refused() {
        let good = context_data(b"disk", &[b"base:allocation", b"qemu:"]);
        assert_eq!(ContextRequest::parse(&good).unwrap().queries, ["base:allocation", "qemu:"]);
        for len in 0..good.len() {
            assert_eq!(ContextRequest::parse(&good[..len]), None, "cut off at {len}");
        }
        let mut many = context_data(b"", &[]);
        many[4..8].copy_from_slice(&u32::MAX.to_be_bytes());
        assert_eq!(ContextRequest::parse(&many), None, "more queries than bytes");
        assert_eq!(ContextRequest::parse(&context_data(b"", &[&[b'q'; 4097]])), None);
    }

    #[test]
    fn each_kind_of_failure_has_its_number() {
        let number = |kind| Errno::of(kind, false).code();
        assert_eq!(number(ErrorKind::Io), 5);
        assert_eq!(number(ErrorKind::NoSpace), 28);
        assert_eq!(number(ErrorKind::Corrupt), 5);
        assert_eq!(number(ErrorKind::Unsupported), 22);
        assert_eq!(number(ErrorKind::Invalid), 22);
        assert_eq!(number(ErrorKind::ReadOnly), 1);
        assert_eq!(number(ErrorKind::Poisoned), 5);
        assert_eq!(number(ErrorKind::Closed), 108);
        assert_eq!(Errno::of(ErrorKind::Unsupported, true).code(), 95);
        assert_eq!(Errno::of(ErrorKind::Io, true).code(), 5);
        assert_eq!(Errno::Overflow.code(), 75);
    }
}
