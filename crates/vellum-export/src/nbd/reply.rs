//! Replies on their way out, joined so that all that are ready leave in one write.
//!
//! ```text
//!   ready   │ header │ header │ payload │ header │ payload │ header │ …      one Buffer, nothing copied together
//!                │        │        └── as the disk gave it
//!                └────────┴── cut from a page of headers: neighbours there are one piece again
//! ```
//!
//! 1. Either the whole reply is encoded or its error is: nothing can fail after the first byte.
//! 2. Once structured replies were negotiated, reads are answered with chunks only, and the last chunk of
//!    each reply, and no other, has the flag that says so. A reply without payload is a simple reply, as the
//!    protocol allows; failures are chunks, which have room for a message. With extended headers everything
//!    is a chunk.
//! 3. Error messages are short and come from the server's own text, never from the client or from a file name
//!    (CVE-2020-10761).
//!
//! Source: NBD protocol, "Simple reply message", "Structured reply chunk message", "Structured reply types".

use vellum_core::{Buffer, Error, GuestSpan};

use super::sparse::{self, Part, Parts};
use super::status::Statuses;
use super::terms::Headers;
use super::wire::{self, CHUNK_HEADER_BYTES, EXTENDED_HEADER_BYTES, Errno, SIMPLE_REPLY_BYTES, chunk};

/// Headers are cut from pages of this size.
const PAGE_BYTES: usize = 4096;

/// The parts of a request that its reply repeats.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Label {
    pub(super) cookie: u64,
    /// As it came, right or wrong.
    pub(super) offset: u64,
}

/// Replies that are ready to be sent.
pub(super) struct Replies {
    headers: Headers,
    ready: Buffer,
    /// The rest of the page that headers are cut from.
    page: Buffer,
}

impl Replies {
    pub(super) fn new(headers: Headers) -> Self {
        Self { headers, ready: Buffer::empty(), page: Buffer::empty() }
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

    /// Success, without a payload.
    pub(super) fn done(&mut self, label: Label) {
        match self.headers {
            Headers::Extended => self.chunk(chunk::FLAG_DONE, chunk::NONE, label, &[], 0),
            Headers::Simple | Headers::Structured => self.simple(label, 0),
        }
    }

    /// Failure, in a sentence where there is room for one.
    pub(super) fn failed(&mut self, label: Label, errno: Errno, message: &str) {
        if !self.headers.have_chunks() {
            return self.simple(label, errno.code());
        }
        self.chunk(chunk::FLAG_DONE, chunk::ERROR, label, &error_payload(errno, message), 0);
    }

    /// The bytes of a read. `whole`: in one piece, with the zeros that are in them.
    pub(super) fn read(&mut self, label: Label, span: GuestSpan, whole: bool, bytes: Buffer) {
        if !self.headers.have_chunks() {
            self.simple(label, 0);
            return self.ready.append(bytes);
        }
        let mut parts = Parts::new();
        if !whole {
            sparse::push_read(&mut parts, span, Ok(bytes));
        } else if !bytes.is_empty() {
            parts.push(Part::Data { at: span.start(), bytes });
        }
        self.parts(label, parts);
    }

    /// The parts of a read, which may be none. Only where replies may have parts.
    pub(super) fn parts(&mut self, label: Label, parts: Parts) {
        assert!(self.headers.have_chunks(), "a simple reply has no parts");
        let mut left = parts.len();
        if left == 0 {
            self.chunk(chunk::FLAG_DONE, chunk::NONE, label, &[], 0);
        }
        for part in parts {
            left -= 1;
            let flags = if left == 0 { chunk::FLAG_DONE } else { 0 };
            match part {
                Part::Data { at, bytes } => {
                    self.chunk(flags, chunk::OFFSET_DATA, label, &at.bytes().to_be_bytes(), bytes.len());
                    self.ready.append(bytes);
                }
                Part::Hole { at, len } => {
                    let mut payload = [0; 12];
                    payload[..8].copy_from_slice(&at.bytes().to_be_bytes());
                    payload[8..].copy_from_slice(&to_u32(len).to_be_bytes());
                    self.chunk(flags, chunk::OFFSET_HOLE, label, &payload, 0);
                }
                Part::Failed { at, error } => {
                    let errno = Errno::of(error.kind(), false);
                    let mut payload = error_payload(errno, &error.kind().to_string());
                    payload.extend_from_slice(&at.bytes().to_be_bytes());
                    self.chunk(flags, chunk::ERROR_OFFSET, label, &payload, 0);
                }
            }
        }
    }

    /// The runs of each context. Only where replies may have parts.
    pub(super) fn status(&mut self, label: Label, answers: &Statuses) {
        assert!(self.headers.have_chunks(), "a simple reply has no status");
        for (index, (context, runs)) in answers.iter().enumerate() {
            let flags = if index + 1 == answers.len() { chunk::FLAG_DONE } else { 0 };
            let mut payload = Vec::with_capacity(8 + 16 * runs.len());
            payload.extend_from_slice(&context.id().to_be_bytes());
            if self.headers == Headers::Extended {
                payload.extend_from_slice(&to_u32(runs.len() as u64).to_be_bytes());
                for run in runs {
                    payload.extend_from_slice(&run.len.to_be_bytes());
                    payload.extend_from_slice(&u64::from(run.status).to_be_bytes());
                }
                self.chunk(flags, chunk::BLOCK_STATUS_EXT, label, &payload, 0);
            } else {
                for run in runs {
                    payload.extend_from_slice(&to_u32(run.len).to_be_bytes());
                    payload.extend_from_slice(&run.status.to_be_bytes());
                }
                self.chunk(flags, chunk::BLOCK_STATUS, label, &payload, 0);
            }
        }
    }

    fn simple(&mut self, label: Label, error: u32) {
        let mut bytes = [0; SIMPLE_REPLY_BYTES];
        bytes[..4].copy_from_slice(&wire::SIMPLE_REPLY_MAGIC.to_be_bytes());
        bytes[4..8].copy_from_slice(&error.to_be_bytes());
        bytes[8..].copy_from_slice(&label.cookie.to_be_bytes());
        self.put(&[&bytes]);
    }

    /// A chunk whose payload is this and then `more` bytes that the caller appends.
    fn chunk(&mut self, flags: u16, kind: u16, label: Label, payload: &[u8], more: usize) {
        let len = (payload.len() + more) as u64;
        let is_extended = self.headers == Headers::Extended;
        let mut bytes = [0; EXTENDED_HEADER_BYTES];
        let magic = if is_extended { wire::EXTENDED_CHUNK_MAGIC } else { wire::CHUNK_MAGIC };
        bytes[..4].copy_from_slice(&magic.to_be_bytes());
        bytes[4..6].copy_from_slice(&flags.to_be_bytes());
        bytes[6..8].copy_from_slice(&kind.to_be_bytes());
        bytes[8..16].copy_from_slice(&label.cookie.to_be_bytes());
        if is_extended {
            bytes[16..24].copy_from_slice(&label.offset.to_be_bytes());
            bytes[24..].copy_from_slice(&len.to_be_bytes());
            return self.put(&[&bytes, payload]);
        }
        bytes[16..CHUNK_HEADER_BYTES].copy_from_slice(&to_u32(len).to_be_bytes());
        self.put(&[&bytes[..CHUNK_HEADER_BYTES], payload]);
    }

    fn put(&mut self, parts: &[&[u8]]) {
        let len = parts.iter().map(|part| part.len()).sum();
        if len > PAGE_BYTES {
            return self.ready.append(Buffer::copy_of(&parts.concat()));
        }
        if len > self.page.len() {
            self.page = Buffer::for_overwrite(PAGE_BYTES);
        }
        let mut place = self.page.split_to(len);
        let mut rest = place.slice_mut();
        for part in parts {
            let (now, later) = rest.split_at_mut(part.len());
            now.copy_from_slice(part);
            rest = later;
        }
        self.ready.append(place);
    }
}

/// What a client learns of a failure of the disk is its kind. The rest names files on the host, and goes to
/// the log.
pub(super) fn sentence_of(error: &Error) -> String {
    error.kind().to_string()
}

fn error_payload(errno: Errno, message: &str) -> Vec<u8> {
    let message = short(message);
    let mut bytes = Vec::with_capacity(14 + message.len());
    bytes.extend_from_slice(&errno.code().to_be_bytes());
    let len = u16::try_from(message.len()).expect("a sentence is short");
    bytes.extend_from_slice(&len.to_be_bytes());
    bytes.extend_from_slice(message.as_bytes());
    bytes
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

    const LABEL: Label = Label { cookie: 0x0102_0304_0506_0708, offset: 0x1112_1314_1516_1718 };

    fn bytes(headers: Headers, encode: impl FnOnce(&mut Replies)) -> Vec<u8> {
        let mut replies = Replies::new(headers);
        encode(&mut replies);
        replies.take().to_vec()
    }

    fn at(offset: u64) -> GuestOffset {
        GuestOffset::new(offset)
    }

    fn read(replies: &mut Replies, offset: u64, data: &[u8]) {
        replies.read(LABEL, at(offset).span(data.len() as u64), false, Buffer::copy_of(data));
    }

    #[test]
    fn simple_replies_are_as_drawn() {
        let done = bytes(Headers::Simple, |replies| replies.done(LABEL));
        assert_eq!(done, b"\x67\x44\x66\x98\0\0\0\0\x01\x02\x03\x04\x05\x06\x07\x08");
        let failed = bytes(Headers::Simple, |replies| replies.failed(LABEL, Errno::NoSpace, "no room"));
        assert_eq!(failed, b"\x67\x44\x66\x98\0\0\0\x1c\x01\x02\x03\x04\x05\x06\x07\x08");
        let data = bytes(Headers::Simple, |replies| read(replies, 9, b"hello"));
        assert_eq!(data, b"\x67\x44\x66\x98\0\0\0\0\x01\x02\x03\x04\x05\x06\x07\x08hello");
    }

    #[test]
    fn chunks_are_as_drawn_and_only_the_last_says_done() {
        let data = bytes(Headers::Structured, |replies| read(replies, 9, b"hello"));
        let head = b"\x66\x8e\x33\xef\0\x01\0\x01\x01\x02\x03\x04\x05\x06\x07\x08\0\0\0\x0d";
        assert_eq!(data, [&head[..], b"\0\0\0\0\0\0\0\x09hello"].concat());
        let parts = bytes(Headers::Structured, |replies| {
            let error = Error::new(vellum_core::ErrorKind::Io, "/secret/path failed");
            let parts = [
                Part::Hole { at: at(1), len: 2 },
                Part::Data { at: at(3), bytes: Buffer::copy_of(b"x") },
                Part::Failed { at: at(4), error },
            ];
            replies.parts(LABEL, parts.into_iter().collect());
        });
        let hole = b"\x66\x8e\x33\xef\0\0\0\x02\x01\x02\x03\x04\x05\x06\x07\x08\0\0\0\x0c\0\0\0\0\0\0\0\x01\0\0\0\x02";
        let data = b"\x66\x8e\x33\xef\0\0\0\x01\x01\x02\x03\x04\x05\x06\x07\x08\0\0\0\x09\0\0\0\0\0\0\0\x03x";
        let fail =
            b"\x66\x8e\x33\xef\0\x01\x80\x02\x01\x02\x03\x04\x05\x06\x07\x08\0\0\0\x20\0\0\0\x05\0\x12";
        assert_eq!(parts, [&hole[..], data, fail, b"input/output error\0\0\0\0\0\0\0\x04"].concat());
        let none = bytes(Headers::Structured, |replies| replies.parts(LABEL, Parts::new()));
        assert_eq!(none, b"\x66\x8e\x33\xef\0\x01\0\0\x01\x02\x03\x04\x05\x06\x07\x08\0\0\0\0");
    }

    #[test]
    fn a_failure_has_a_short_sentence_even_when_the_text_is_long() {
        let long = "ä".repeat(3000);
        let failed = bytes(Headers::Structured, |replies| replies.failed(LABEL, Errno::Invalid, &long));
        assert_eq!(failed.len(), CHUNK_HEADER_BYTES + 6 + 256);
        assert_eq!(failed[20..26], *b"\0\0\0\x16\x01\0");
        assert!(std::str::from_utf8(&failed[26..]).is_ok());
    }

    #[test]
    fn each_context_has_its_chunk() {
        let status = bytes(Headers::Structured, |replies| {
            let runs = vec![Run { len: 512, status: 0 }, Run { len: 0xffff_fe00, status: 3 }];
            replies.status(
                LABEL,
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
    fn extended_chunks_are_as_drawn_and_there_are_no_simple_replies() {
        let extended = |encode: fn(&mut Replies)| bytes(Headers::Extended, encode);
        let head = |kind: &[u8], len: u8| {
            let label = b"\x01\x02\x03\x04\x05\x06\x07\x08\x11\x12\x13\x14\x15\x16\x17\x18";
            [&b"\x6e\x8a\x27\x8c\0\x01"[..], kind, label, &[0; 7], &[len]].concat()
        };
        assert_eq!(extended(|replies| replies.done(LABEL)), head(b"\0\0", 0));
        let failed = extended(|replies| replies.failed(LABEL, Errno::NoSpace, "no room"));
        assert_eq!(failed, [&head(b"\x80\x01", 13)[..], b"\0\0\0\x1c\0\x07no room"].concat());
        let data = extended(|replies| read(replies, 9, b"hello"));
        assert_eq!(data, [&head(b"\0\x01", 13)[..], b"\0\0\0\0\0\0\0\x09hello"].concat());
        let status = extended(|replies| {
            let runs = vec![Run { len: 512, status: 0 }, Run { len: 1 << 40, status: 3 }];
            replies.status(LABEL, &vec![(MetaContext::Allocation, runs)]);
        });
        let runs =
            [&[0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 2, 0][..], &[0; 8], &[0, 0, 1, 0, 0, 0, 0, 0]];
        assert_eq!(status, [&head(b"\0\x06", 40)[..], &runs.concat(), &[0, 0, 0, 0, 0, 0, 0, 3]].concat());
    }

    #[test]
    fn headers_that_follow_each_other_are_one_piece() {
        let mut replies = Replies::new(Headers::Simple);
        for cookie in 0..200 {
            replies.done(Label { cookie, ..LABEL });
        }
        let all = replies.take();
        assert_eq!((all.len(), all.piece_count()), (3200, 1));
        assert!(replies.is_empty());
        for cookie in 0..2 {
            replies.read(Label { cookie, ..LABEL }, at(0).span(4096), false, Buffer::zeroed(4096));
        }
        assert_eq!(replies.take().piece_count(), 4);
    }
}
