//! Replies on their way out, joined so that all that are ready leave in one write.
//!
//! ```text
//!   ready   │ header │ header │ payload │ header │ payload │ header │ …      one Buffer, nothing copied together
//!                │        │        └── as the disk gave it
//!                └────────┴── cut from a page of headers: neighbours there are one piece again
//! ```
//!
//! 1. A reply is encoded whole, or its error is: nothing can fail after its first byte.
//! 2. Once structured replies were negotiated, reads are answered by chunks only, and the last chunk of each reply,
//!    and no other, has the flag that says so. What has no payload is answered by a simple reply, as the protocol
//!    allows; failures are chunks, which have room for a sentence.
//! 3. Sentences come from the server's own text, never from the client or from a file name, and are short
//!    (CVE-2020-10761).
//!
//! Source: NBD protocol, "Simple reply message", "Structured reply chunk message", "Structured reply types".

use vellum_core::{Buffer, Error, GuestSpan};

use super::sparse::{self, Part, Parts};
use super::status::Statuses;
use super::wire::{self, CHUNK_HEADER_BYTES, Errno, SIMPLE_REPLY_BYTES, chunk};

/// Headers are cut from pages of this size.
const PAGE_BYTES: usize = 4096;

/// Replies that are ready to be sent.
pub(super) struct Replies {
    structured: bool,
    ready: Buffer,
    /// The rest of the page that headers are cut from.
    page: Buffer,
}

impl Replies {
    pub(super) fn new(structured: bool) -> Self {
        Self { structured, ready: Buffer::empty(), page: Buffer::empty() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.ready.is_empty()
    }

    /// How many bytes are ready.
    pub(super) fn len(&self) -> usize {
        self.ready.len()
    }

    /// All that is ready, in order.
    pub(super) fn take(&mut self) -> Buffer {
        std::mem::take(&mut self.ready)
    }

    /// Success, with nothing to tell.
    pub(super) fn done(&mut self, cookie: u64) {
        self.simple(cookie, 0);
    }

    /// Failure, in a sentence where there is room for one.
    pub(super) fn failed(&mut self, cookie: u64, errno: Errno, message: &str) {
        if !self.structured {
            return self.simple(cookie, errno.code());
        }
        let message = short(message);
        let mut bytes = Vec::with_capacity(CHUNK_HEADER_BYTES + 6 + message.len());
        bytes.extend_from_slice(&chunk_header(chunk::FLAG_DONE, chunk::ERROR, cookie, 6 + message.len()));
        push_error(&mut bytes, errno, message);
        self.put(&bytes);
    }

    /// The bytes of a read. `whole`: in one piece, with the zeros that are in them.
    pub(super) fn read(&mut self, cookie: u64, span: GuestSpan, whole: bool, bytes: Buffer) {
        if !self.structured {
            self.simple(cookie, 0);
            return self.ready.append(bytes);
        }
        let mut parts = Parts::new();
        if !whole {
            sparse::push_read(&mut parts, span, Ok(bytes));
        } else if !bytes.is_empty() {
            parts.push(Part::Data { at: span.start(), bytes });
        }
        self.parts(cookie, parts);
    }

    /// The parts of a read, which may be none. Only where structured replies were negotiated.
    pub(super) fn parts(&mut self, cookie: u64, parts: Parts) {
        assert!(self.structured, "a simple reply has no parts");
        let mut left = parts.len();
        if left == 0 {
            self.put(&chunk_header(chunk::FLAG_DONE, chunk::NONE, cookie, 0));
        }
        for part in parts {
            left -= 1;
            let flags = if left == 0 { chunk::FLAG_DONE } else { 0 };
            match part {
                Part::Data { at, bytes } => {
                    let mut head = [0; CHUNK_HEADER_BYTES + 8];
                    let header = chunk_header(flags, chunk::OFFSET_DATA, cookie, 8 + bytes.len());
                    head[..CHUNK_HEADER_BYTES].copy_from_slice(&header);
                    head[CHUNK_HEADER_BYTES..].copy_from_slice(&at.bytes().to_be_bytes());
                    self.put(&head);
                    self.ready.append(bytes);
                }
                Part::Hole { at, len } => {
                    let mut whole = [0; CHUNK_HEADER_BYTES + 12];
                    let (header, rest) = whole.split_at_mut(CHUNK_HEADER_BYTES);
                    header.copy_from_slice(&chunk_header(flags, chunk::OFFSET_HOLE, cookie, 12));
                    rest[..8].copy_from_slice(&at.bytes().to_be_bytes());
                    rest[8..].copy_from_slice(&to_u32(len).to_be_bytes());
                    self.put(&whole);
                }
                Part::Failed { at, error } => {
                    let (errno, message) = (Errno::of(error.kind(), false), error.kind().to_string());
                    let message = short(&message);
                    let mut bytes = Vec::new();
                    let len = 14 + message.len();
                    bytes.extend_from_slice(&chunk_header(flags, chunk::ERROR_OFFSET, cookie, len));
                    push_error(&mut bytes, errno, message);
                    bytes.extend_from_slice(&at.bytes().to_be_bytes());
                    self.put(&bytes);
                }
            }
        }
    }

    /// The runs of each context. Only where structured replies were negotiated.
    pub(super) fn status(&mut self, cookie: u64, answers: &Statuses) {
        assert!(self.structured, "a simple reply has no status");
        for (index, (context, runs)) in answers.iter().enumerate() {
            let flags = if index + 1 == answers.len() { chunk::FLAG_DONE } else { 0 };
            let len = 4 + 8 * runs.len();
            let mut bytes = Vec::with_capacity(CHUNK_HEADER_BYTES + len);
            bytes.extend_from_slice(&chunk_header(flags, chunk::BLOCK_STATUS, cookie, len));
            bytes.extend_from_slice(&context.id().to_be_bytes());
            for run in runs {
                bytes.extend_from_slice(&to_u32(run.len).to_be_bytes());
                bytes.extend_from_slice(&run.status.to_be_bytes());
            }
            self.put(&bytes);
        }
    }

    fn simple(&mut self, cookie: u64, error: u32) {
        let mut bytes = [0; SIMPLE_REPLY_BYTES];
        bytes[..4].copy_from_slice(&wire::SIMPLE_REPLY_MAGIC.to_be_bytes());
        bytes[4..8].copy_from_slice(&error.to_be_bytes());
        bytes[8..].copy_from_slice(&cookie.to_be_bytes());
        self.put(&bytes);
    }

    fn put(&mut self, bytes: &[u8]) {
        if bytes.len() > PAGE_BYTES {
            return self.ready.append(Buffer::copy_of(bytes));
        }
        if bytes.len() > self.page.len() {
            self.page = Buffer::for_overwrite(PAGE_BYTES);
        }
        let mut place = self.page.split_to(bytes.len());
        place.slice_mut().copy_from_slice(bytes);
        self.ready.append(place);
    }
}

/// What a client is told of a failure of the disk: its kind. The rest names files of the host, and is for the log.
pub(super) fn sentence_of(error: &Error) -> String {
    error.kind().to_string()
}

fn chunk_header(flags: u16, kind: u16, cookie: u64, len: usize) -> [u8; CHUNK_HEADER_BYTES] {
    let mut bytes = [0; CHUNK_HEADER_BYTES];
    bytes[..4].copy_from_slice(&wire::CHUNK_MAGIC.to_be_bytes());
    bytes[4..6].copy_from_slice(&flags.to_be_bytes());
    bytes[6..8].copy_from_slice(&kind.to_be_bytes());
    bytes[8..16].copy_from_slice(&cookie.to_be_bytes());
    bytes[16..].copy_from_slice(&to_u32(len as u64).to_be_bytes());
    bytes
}

fn push_error(bytes: &mut Vec<u8>, errno: Errno, message: &str) {
    bytes.extend_from_slice(&errno.code().to_be_bytes());
    let len = u16::try_from(message.len()).expect("a sentence is short");
    bytes.extend_from_slice(&len.to_be_bytes());
    bytes.extend_from_slice(message.as_bytes());
}

/// At most 256 bytes of the message, cut between characters.
fn short(message: &str) -> &str {
    &message[..message.floor_char_boundary(256)]
}

fn to_u32(len: u64) -> u32 {
    u32::try_from(len).expect("a chunk fits 32 bits")
}

#[cfg(test)]
mod tests {
    use vellum_core::GuestOffset;

    use super::super::status::{MetaContext, Run};
    use super::*;

    const COOKIE: u64 = 0x0102_0304_0506_0708;

    fn bytes(structured: bool, encode: impl FnOnce(&mut Replies)) -> Vec<u8> {
        let mut replies = Replies::new(structured);
        encode(&mut replies);
        replies.take().to_vec()
    }

    fn at(offset: u64) -> GuestOffset {
        GuestOffset::new(offset)
    }

    fn read(replies: &mut Replies, offset: u64, data: &[u8]) {
        replies.read(COOKIE, at(offset).span(data.len() as u64), false, Buffer::copy_of(data));
    }

    #[test]
    fn simple_replies_are_as_drawn() {
        let done = bytes(false, |replies| replies.done(COOKIE));
        assert_eq!(done, b"\x67\x44\x66\x98\0\0\0\0\x01\x02\x03\x04\x05\x06\x07\x08");
        let failed = bytes(false, |replies| replies.failed(COOKIE, Errno::NoSpace, "no room"));
        assert_eq!(failed, b"\x67\x44\x66\x98\0\0\0\x1c\x01\x02\x03\x04\x05\x06\x07\x08");
        let data = bytes(false, |replies| read(replies, 9, b"hello"));
        assert_eq!(data, b"\x67\x44\x66\x98\0\0\0\0\x01\x02\x03\x04\x05\x06\x07\x08hello");
    }

    #[test]
    fn chunks_are_as_drawn_and_only_the_last_says_done() {
        let data = bytes(true, |replies| read(replies, 9, b"hello"));
        let head = b"\x66\x8e\x33\xef\0\x01\0\x01\x01\x02\x03\x04\x05\x06\x07\x08\0\0\0\x0d";
        assert_eq!(data, [&head[..], b"\0\0\0\0\0\0\0\x09hello"].concat());
        let parts = bytes(true, |replies| {
            let error = Error::new(vellum_core::ErrorKind::Io, "/secret/path failed");
            let parts = [
                Part::Hole { at: at(1), len: 2 },
                Part::Data { at: at(3), bytes: Buffer::copy_of(b"x") },
                Part::Failed { at: at(4), error },
            ];
            replies.parts(COOKIE, parts.into_iter().collect());
        });
        let hole = b"\x66\x8e\x33\xef\0\0\0\x02\x01\x02\x03\x04\x05\x06\x07\x08\0\0\0\x0c\0\0\0\0\0\0\0\x01\0\0\0\x02";
        let data = b"\x66\x8e\x33\xef\0\0\0\x01\x01\x02\x03\x04\x05\x06\x07\x08\0\0\0\x09\0\0\0\0\0\0\0\x03x";
        let fail =
            b"\x66\x8e\x33\xef\0\x01\x80\x02\x01\x02\x03\x04\x05\x06\x07\x08\0\0\0\x20\0\0\0\x05\0\x12";
        assert_eq!(parts, [&hole[..], data, fail, b"input/output error\0\0\0\0\0\0\0\x04"].concat());
        let none = bytes(true, |replies| replies.parts(COOKIE, Parts::new()));
        assert_eq!(none, b"\x66\x8e\x33\xef\0\x01\0\0\x01\x02\x03\x04\x05\x06\x07\x08\0\0\0\0");
    }

    #[test]
    fn a_failure_has_a_short_sentence_even_when_the_text_is_long() {
        let long = "ä".repeat(3000);
        let failed = bytes(true, |replies| replies.failed(COOKIE, Errno::Invalid, &long));
        assert_eq!(failed.len(), CHUNK_HEADER_BYTES + 6 + 256);
        assert_eq!(failed[20..26], *b"\0\0\0\x16\x01\0");
        assert!(std::str::from_utf8(&failed[26..]).is_ok());
    }

    #[test]
    fn each_context_has_its_chunk() {
        let status = bytes(true, |replies| {
            let runs = vec![Run { len: 512, status: 0 }, Run { len: 0xffff_fe00, status: 3 }];
            replies.status(
                COOKIE,
                &vec![
                    (MetaContext::Allocation, runs),
                    (MetaContext::AllocationDepth, vec![Run { len: 1, status: 7 }]),
                ],
            );
        });
        let first = b"\x66\x8e\x33\xef\0\0\0\x05\x01\x02\x03\x04\x05\x06\x07\x08\0\0\0\x14";
        let runs = b"\0\0\0\x01\0\0\x02\0\0\0\0\0\xff\xff\xfe\0\0\0\0\x03";
        let second = b"\x66\x8e\x33\xef\0\x01\0\x05\x01\x02\x03\x04\x05\x06\x07\x08\0\0\0\x0c";
        assert_eq!(status, [&first[..], runs, second, b"\0\0\0\x02\0\0\0\x01\0\0\0\x07"].concat());
    }

    #[test]
    fn headers_that_follow_each_other_are_one_piece() {
        let mut replies = Replies::new(false);
        for cookie in 0..200 {
            replies.done(cookie);
        }
        let all = replies.take();
        assert_eq!((all.len(), all.piece_count()), (3200, 1));
        assert!(replies.is_empty());
        for cookie in 0..2 {
            replies.read(cookie, at(0).span(4096), false, Buffer::zeroed(4096));
        }
        assert_eq!(replies.take().piece_count(), 4);
    }
}
