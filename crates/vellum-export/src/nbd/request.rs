//! The only way in for requests: a header from the wire becomes a [`Request`] that is known to be valid, or a
//! refusal.
//!
//! ```text
//!   RequestHeader ──check()──► Ok(Request)      goes to the disk; nothing is checked again
//!                         └──► Err(Refusal)     is answered with its errno; a payload is taken off the wire first
//! ```
//!
//! 1. It is a pure function of the header, the [`Terms`], and the current size of the disk. That may differ
//!    from the size that was announced to the client: a client can learn a larger size from another
//!    connection, and must not reach past a smaller one.
//! 2. A range in a [`Request`] lies inside the export and, for reads and writes, fits a payload.
//! 3. A refusal says how many bytes of payload follow the header, so that the next header can be found. It
//!    ends the connection only where skipping that many would be an abuse.
//!
//! With extended headers a flag says that a payload follows, and a write must have it. But QEMU's client
//! (10.0) sends its writes without the flag, and its server expects the payload all the same. So a write has
//! its payload with or without the flag.
//!
//! Source: NBD protocol, "Command flags", "Request types", "Size constraints", "Error values".

use vellum_core::{GuestOffset, GuestSpan, ZeroFlags};

use super::terms::{Headers, Terms};
use super::wire::{Errno, PAYLOAD_BYTES_DEFAULT, RequestHeader, command, command_flag as flag};

/// A request that may be executed as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Request {
    /// `whole`: all bytes in one chunk (`NBD_CMD_FLAG_DF`).
    Read {
        span: GuestSpan,
        whole: bool,
    },
    /// Its payload, as long as the span, follows the header.
    Write {
        span: GuestSpan,
        fua: bool,
    },
    Flush,
    Trim {
        span: GuestSpan,
        fua: bool,
    },
    Cache {
        span: GuestSpan,
    },
    Zero {
        span: GuestSpan,
        flags: ZeroFlags,
    },
    /// `one`: a single extent is requested (`NBD_CMD_FLAG_REQ_ONE`).
    Status {
        span: GuestSpan,
        one: bool,
    },
    /// The client says goodbye.
    Disconnect,
}

/// Why a request is not done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) errno: Errno,
    /// For a person.
    pub(super) message: &'static str,
    /// Bytes that follow the header.
    pub(super) payload: u64,
    /// The payload is too large to wait for: the connection ends after the reply.
    pub(super) is_abuse: bool,
}

/// Checks everything in a header.
pub(super) fn check(header: &RequestHeader, terms: &Terms, size: u64) -> Result<Request, Refusal> {
    let is_extended = terms.headers == Headers::Extended;
    let is_write = header.command == command::WRITE;
    // With compact headers a write is the only request with a payload.
    let has_payload = is_write || (is_extended && header.flags & flag::PAYLOAD_LEN != 0);
    let payload = if has_payload { header.len } else { 0 };
    let is_abuse = payload > u64::from(terms.payload_max.max(PAYLOAD_BYTES_DEFAULT));
    let no = |errno, message| Err(Refusal { errno, message, payload, is_abuse });

    let legal = match header.command {
        command::READ if terms.headers.have_chunks() => flag::FUA | flag::DF,
        command::WRITE if is_extended => flag::FUA | flag::PAYLOAD_LEN,
        command::WRITE_ZEROES => flag::FUA | flag::NO_HOLE | flag::FAST_ZERO,
        command::BLOCK_STATUS => flag::FUA | flag::REQ_ONE,
        // "The server MUST accept all commands with this bit set (even by ignoring the bit)."
        command::READ..=command::CACHE => flag::FUA,
        _ => return no(Errno::Invalid, "unknown command"),
    };
    if header.command == command::DISC {
        return Ok(Request::Disconnect);
    }
    if header.flags & !legal != 0 {
        return no(Errno::Invalid, "a flag that this command does not have");
    }
    if header.command == command::FLUSH {
        return match (header.offset, header.len) {
            (0, 0) => Ok(Request::Flush),
            _ => no(Errno::Invalid, "a flush has no range"),
        };
    }

    let changes = is_write || matches!(header.command, command::TRIM | command::WRITE_ZEROES);
    if changes && terms.read_only {
        return no(Errno::Perm, "the export is read-only");
    }
    if is_write && header.len > u64::from(terms.payload_max) {
        return no(Errno::Invalid, "more payload than the server accepts");
    }
    let block = u64::from(terms.block_min);
    if !header.offset.is_multiple_of(block) || !header.len.is_multiple_of(block) {
        return no(Errno::Invalid, "not aligned to the minimum block size");
    }
    let span = GuestSpan::checked(GuestOffset::new(header.offset), header.len)
        .filter(|span| span.end().bytes() <= size);
    let Some(span) = span else {
        let stores = matches!(header.command, command::WRITE | command::WRITE_ZEROES);
        let errno = if stores { Errno::NoSpace } else { Errno::Invalid };
        return no(errno, "past the end of the export");
    };
    // What is read but not sent is bounded all the same: a request of 28 bytes should not cost the host 4
    // GiB. With extended headers a client may mean the whole export; then reading continues while the client
    // stays connected.
    let moves = header.command == command::READ || (header.command == command::CACHE && !is_extended);
    if moves && header.len > u64::from(terms.payload_max) {
        let errno = if terms.headers.have_chunks() { Errno::Overflow } else { Errno::Invalid };
        return no(errno, "more than the server reads at once");
    }

    let has = |bit| header.flags & bit != 0;
    let fua = has(flag::FUA);
    Ok(match header.command {
        command::READ => Request::Read { span, whole: has(flag::DF) },
        command::WRITE => Request::Write { span, fua },
        command::TRIM => Request::Trim { span, fua },
        command::CACHE => Request::Cache { span },
        command::WRITE_ZEROES => {
            let flags = ZeroFlags { fua, may_unmap: !has(flag::NO_HOLE), fast_only: has(flag::FAST_ZERO) };
            Request::Zero { span, flags }
        }
        _ if terms.contexts.is_empty() => return no(Errno::Invalid, "no metadata context was negotiated"),
        _ if span.is_empty() => return no(Errno::Invalid, "a block status of zero bytes"),
        _ => Request::Status { span, one: has(flag::REQ_ONE) },
    })
}

#[cfg(test)]
mod tests {
    use vellum_core::{BlockSize, Geometry};

    use super::super::limits::SessionLimits;
    use super::super::status::{Contexts, MetaContext};
    use super::*;

    const SIZE: u64 = 1 << 30;

    fn terms() -> Terms {
        let geometry = Geometry {
            size: SIZE,
            block_size: BlockSize::SECTOR,
            preferred_size: BlockSize::PAGE,
            read_only: false,
            fast_zeroes: true,
        };
        let mut contexts = Contexts::default();
        contexts.select(MetaContext::Allocation);
        let terms = Terms::new(&geometry, false, false, &SessionLimits::default());
        Terms { headers: Headers::Structured, contexts, ..terms }
    }

    /// As `super::check`, with the size in the terms as that of the disk.
    fn check(header: &RequestHeader, terms: &Terms) -> Result<Request, Refusal> {
        super::check(header, terms, terms.size)
    }

    fn ask(command: u16, flags: u16, offset: u64, len: u64) -> RequestHeader {
        RequestHeader { flags, command, cookie: 9, offset, len }
    }

    fn errno(result: Result<Request, Refusal>) -> u32 {
        result.expect_err("it is refused").errno.code()
    }

    fn span(at: u64, len: u64) -> GuestSpan {
        GuestOffset::new(at).span(len)
    }

    #[test]
    fn what_is_right_passes_with_its_flags() {
        let terms = terms();
        let zero = |fua, may_unmap, fast_only| ZeroFlags { fua, may_unmap, fast_only };
        let cases = [
            (ask(0, 0, 1, 2), Request::Read { span: span(1, 2), whole: false }),
            (ask(0, 5, 0, 32 << 20), Request::Read { span: span(0, 32 << 20), whole: true }),
            (ask(1, 0, SIZE - 1, 1), Request::Write { span: span(SIZE - 1, 1), fua: false }),
            (ask(1, 1, 0, 32 << 20), Request::Write { span: span(0, 32 << 20), fua: true }),
            (ask(1, 0, SIZE, 0), Request::Write { span: span(SIZE, 0), fua: false }),
            (ask(2, 0xffff, 7, 7), Request::Disconnect),
            (ask(3, 1, 0, 0), Request::Flush),
            (ask(4, 1, 0, SIZE), Request::Trim { span: span(0, SIZE), fua: true }),
            (ask(5, 0, 5, 5), Request::Cache { span: span(5, 5) }),
            (ask(6, 0, 0, SIZE), Request::Zero { span: span(0, SIZE), flags: zero(false, true, false) }),
            (ask(6, 2, 0, 1), Request::Zero { span: span(0, 1), flags: zero(false, false, false) }),
            (ask(6, 0x13, 0, 1), Request::Zero { span: span(0, 1), flags: zero(true, false, true) }),
            (ask(7, 8, 512, 512), Request::Status { span: span(512, 512), one: true }),
            (ask(7, 0, 0, SIZE), Request::Status { span: span(0, SIZE), one: false }),
        ];
        for (header, request) in cases {
            assert_eq!(check(&header, &terms), Ok(request), "{header:?}");
        }
    }

    #[test]
    fn a_flag_that_the_command_does_not_have_is_refused() {
        let terms = terms();
        let legal = [0b00101, 0b00001, 0xffff, 0b00001, 0b00001, 0b00001, 0b10011, 0b01001];
        for (command, legal) in (0..).zip(legal) {
            for bit in 0..16 {
                let len = if command == command::FLUSH { 0 } else { 512 };
                let result = check(&ask(command, 1 << bit, 0, len), &terms);
                match legal & (1 << bit) {
                    0 => assert_eq!(errno(result), 22, "command {command}, bit {bit}"),
                    _ => assert!(result.is_ok(), "command {command}, bit {bit}"),
                }
            }
        }
        let simple = Terms { headers: Headers::Simple, ..terms };
        assert_eq!(errno(check(&ask(0, 4, 0, 512), &simple)), 22, "DF needs structured replies");
    }

    #[test]
    fn extended_lengths_are_those_of_a_payload_only_where_the_flag_says_so() {
        let terms = Terms { headers: Headers::Extended, size: 1 << 50, ..terms() };
        let all = span(0, 1 << 50);
        let write = Request::Write { span: span(0, 512), fua: true };
        assert_eq!(check(&ask(1, flag::PAYLOAD_LEN | flag::FUA, 0, 512), &terms), Ok(write));
        assert_eq!(check(&ask(1, flag::FUA, 0, 512), &terms), Ok(write), "as QEMU sends it");
        let refusal = check(&ask(1, 0, 0, u64::MAX), &terms).expect_err("too long");
        assert_eq!((refusal.errno, refusal.payload, refusal.is_abuse), (Errno::Invalid, u64::MAX, true));
        assert_eq!(check(&ask(4, 0, 0, 1 << 50), &terms), Ok(Request::Trim { span: all, fua: false }));
        assert_eq!(check(&ask(5, 0, 0, 1 << 50), &terms), Ok(Request::Cache { span: all }));
        assert_eq!(check(&ask(7, 0, 0, 1 << 50), &terms), Ok(Request::Status { span: all, one: false }));
        assert_eq!(errno(check(&ask(6, 0, 1, 1 << 50), &terms)), 28);
        assert_eq!(errno(check(&ask(6, 0, 1, u64::MAX), &terms)), 28, "the sum needs more than 64 bits");
        assert_eq!(errno(check(&ask(0, 0, 0, (32 << 20) + 1), &terms)), 75, "reads are bounded");
        for command in (0..100).filter(|command| ![1, 2].contains(command)) {
            for (len, abuse) in
                [(0, false), (9, false), (32 << 20, false), ((32 << 20) + 1, true), (u64::MAX, true)]
            {
                let refusal =
                    check(&ask(command, flag::PAYLOAD_LEN, 0, len), &terms).expect_err("no payload");
                assert_eq!((refusal.errno, refusal.payload), (Errno::Invalid, len), "command {command}");
                assert_eq!(refusal.is_abuse, abuse, "command {command}, {len} bytes");
            }
        }
        let compact = Terms { headers: Headers::Structured, ..terms };
        let refusal = check(&ask(1, flag::PAYLOAD_LEN, 0, 512), &compact).expect_err("not negotiated");
        assert_eq!((refusal.payload, refusal.is_abuse), (512, false), "a write has its payload all the same");
        let refusal = check(&ask(7, flag::PAYLOAD_LEN, 0, 512), &compact).expect_err("not negotiated");
        assert_eq!((refusal.payload, refusal.is_abuse), (0, false));
    }

    #[test]
    fn every_other_command_is_unknown() {
        for command in 8..=u16::MAX {
            let refusal = check(&ask(command, 0, 0, 1 << 31), &terms()).expect_err("nobody knows it");
            assert_eq!((refusal.errno, refusal.payload, refusal.is_abuse), (Errno::Invalid, 0, false));
        }
    }

    #[test]
    fn past_the_end_is_an_error_of_its_own_for_each_command() {
        for (offset, len) in
            [(SIZE, 1), (SIZE - 1, 2), (SIZE + 1, 0), (u64::MAX, 1), (u64::MAX, u64::from(u32::MAX))]
        {
            let expected = [(0, 22), (1, 28), (4, 22), (5, 22), (6, 28), (7, 22)];
            for (command, number) in expected {
                let len = if command == 1 { len.min(32 << 20) } else { len };
                assert_eq!(
                    errno(check(&ask(command, 0, offset, len), &terms())),
                    number,
                    "{command} at {offset}"
                );
            }
        }
    }

    #[test]
    fn the_size_of_now_counts_and_not_the_one_that_was_told() {
        let terms = terms();
        let at_end = ask(0, 0, SIZE - 512, 512);
        assert_eq!(errno(super::check(&at_end, &terms, SIZE - 1)), 22);
        assert!(super::check(&at_end, &terms, SIZE).is_ok());
        let behind = ask(1, 0, SIZE, 512);
        assert_eq!(errno(super::check(&behind, &terms, SIZE + 511)), 28);
        assert!(super::check(&behind, &terms, SIZE + 512).is_ok());
    }

    #[test]
    fn a_read_only_export_refuses_changes_but_knows_their_payload() {
        let terms = Terms { read_only: true, ..terms() };
        for command in [1, 4, 6] {
            let refusal = check(&ask(command, 0, 0, 512), &terms).expect_err("it would change the disk");
            assert_eq!(refusal.errno, Errno::Perm);
            assert_eq!(refusal.payload, if command == 1 { 512 } else { 0 });
        }
        assert!(check(&ask(3, 0, 0, 0), &terms).is_ok());
    }

    #[test]
    fn a_payload_too_large_is_taken_off_the_wire_unless_it_is_an_abuse() {
        let small = Terms { payload_max: 1 << 20, ..terms() };
        for (len, abuse) in [((1 << 20) + 1, false), (32 << 20, false), ((32 << 20) + 1, true)] {
            let refusal = check(&ask(1, 0, 0, len), &small).expect_err("too large");
            assert_eq!((refusal.errno, refusal.payload), (Errno::Invalid, len));
            assert_eq!(refusal.is_abuse, abuse, "{len} bytes");
        }
        let large = Terms { payload_max: 64 << 20, ..terms() };
        assert!(check(&ask(1, 0, 0, 64 << 20), &large).is_ok());
        assert_eq!(errno(check(&ask(0, 0, 0, (32 << 20) + 1), &terms())), 75);
        assert_eq!(errno(check(&ask(5, 0, 0, (32 << 20) + 1), &terms())), 75);
        let simple = Terms { headers: Headers::Simple, ..terms() };
        assert_eq!(errno(check(&ask(0, 0, 0, (32 << 20) + 1), &simple)), 22);
    }

    #[test]
    fn alignment_is_asked_of_those_who_promised_it() {
        let strict = Terms { block_min: 512, ..terms() };
        for command in [0, 1, 4, 5, 6, 7] {
            assert!(check(&ask(command, 0, 1, 512), &terms()).is_ok());
            assert!(check(&ask(command, 0, 512, 512), &strict).is_ok());
            assert_eq!(errno(check(&ask(command, 0, 1, 512), &strict)), 22);
            assert_eq!(errno(check(&ask(command, 0, 512, 513), &strict)), 22);
        }
    }

    #[test]
    fn a_flush_with_a_range_and_a_status_without_one_are_refused() {
        assert_eq!(errno(check(&ask(3, 0, 1, 0), &terms())), 22);
        assert_eq!(errno(check(&ask(3, 0, 0, 1), &terms())), 22);
        assert_eq!(errno(check(&ask(7, 0, 0, 0), &terms())), 22);
        let none = Terms { contexts: Contexts::default(), ..terms() };
        assert_eq!(errno(check(&ask(7, 0, 0, 512), &none)), 22);
    }
}
