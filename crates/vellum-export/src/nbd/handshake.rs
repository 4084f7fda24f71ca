//! The handshake: bytes in, bytes out, and in the end an export and the terms on which it is used. No I/O.
//!
//! ```text
//!            greeting
//!               ▼                        ┌────────────── answered ◄─────────────┐
//!   Flags ──4 bytes──► OptionHeader ──16 bytes──► OptionData ──len bytes──► answer()
//!                            │                                                  │
//!                            └──too long──► Skip ──► ERR_TOO_BIG      GO, EXPORT_NAME: Enter
//! ```
//!
//! 1. [`Handshake::feed`] takes the client's bytes in pieces of any size: it gathers them until the current
//!    message is complete.
//! 2. It stops after each answer, so that one answer is sent before the next is made, and at most one is
//!    held.
//! 3. A length that the client sent allocates nothing by itself; the buffer grows with the bytes that have
//!    arrived.
//! 4. Nothing but the geometry of an export's disk is queried, and no disk is touched before the client has
//!    chosen it.
//! 5. Answers never repeat the client's own words, so the server chooses their length.
//! 6. Each answer is a function of what was negotiated so far. TLS begins a new `Handshake` with an empty
//!    receive buffer: bytes that came in the clear do not count (CVE-2021-3716). Only the flags of the old
//!    one are kept.
//! 7. Where TLS is required, nothing else is answered before it, not even whether an option is known.
//!
//! Left out: clients that do not know fixed newstyle (before 2011). They cannot be sent an error, and are
//! disconnected.
//!
//! Source: NBD protocol, "Fixed newstyle negotiation", "Option types", "Option reply types".

use super::ending::Ending;
use super::exports::{Attached, Export, Exports};
use super::limits::SessionLimits;
use super::status::{Contexts, MetaContext, SharedMarks};
use super::terms::{Headers, Terms};
use super::wire::{
    self, ContextRequest, InfoRequest, OptionHeader, handshake_flag, info, option, option_reply as reply,
};

/// What came out of a handshake.
pub(super) struct Negotiated {
    pub(super) attached: Attached,
    pub(super) terms: Terms,
    /// What the chosen contexts are about, by their numbers.
    pub(super) marks: Vec<SharedMarks>,
    /// The client can be sent the error that there is no free seat.
    pub(super) may_be_refused: bool,
}

/// What follows the bytes that were fed.
pub(super) enum Step {
    /// More bytes are needed, or another look at the rest.
    More,
    /// The transmission begins with the next byte.
    Enter(Negotiated),
    /// TLS begins with the next byte, and another handshake in it.
    StartTls,
    /// It is over, once the answer is sent.
    End(Ending),
}

/// Replaces the answer to the option that chose an export: there is no seat for its client. The handshake
/// continues.
pub(super) fn has_no_place(out: &mut Vec<u8>) {
    out.clear();
    let why = "this export has no room for another client; try again later";
    refuse(out, option::GO, reply::ERR_POLICY, why);
}

/// The state of TLS in a handshake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TlsStage {
    /// The server has none.
    Absent,
    Offered,
    /// Comes before everything else.
    Required,
    /// The handshake is inside it.
    Done,
}

/// Why an option is not answered.
const TLS_FIRST: &str = "this server requires TLS";

enum State {
    Flags,
    OptionHeader,
    OptionData(OptionHeader),
    /// Data of an option that is skipped.
    Skip {
        option: u32,
        left: u32,
    },
}

/// Contexts that a client has chosen.
struct Chosen {
    export: String,
    contexts: Contexts,
    /// As it was marked then: names may come and go, and numbers stay what the client was told.
    marks: Vec<SharedMarks>,
}

/// One client's handshake, from its flags on.
pub(super) struct Handshake<'a> {
    exports: &'a Exports,
    limits: &'a SessionLimits,
    tls: TlsStage,
    state: State,
    gathered: Vec<u8>,
    options: u32,
    bytes: u64,
    no_zeroes: bool,
    headers: Headers,
    /// The contexts that were chosen last, and for which export.
    chosen: Option<Chosen>,
}

impl<'a> Handshake<'a> {
    pub(super) fn new(exports: &'a Exports, limits: &'a SessionLimits, tls: TlsStage) -> Self {
        Self {
            exports,
            limits,
            tls,
            state: State::Flags,
            gathered: Vec::new(),
            options: 0,
            bytes: 0,
            no_zeroes: false,
            headers: Headers::Simple,
            chosen: None,
        }
    }

    /// The handshake that follows this one inside TLS. It continues with the first option.
    pub(super) fn inside_tls(&self) -> Self {
        let begun = Self::new(self.exports, self.limits, TlsStage::Done);
        Self { state: State::OptionHeader, no_zeroes: self.no_zeroes, ..begun }
    }

    /// Takes bytes off the front of `input` and appends what is to be sent to `out`. Tells how many it took;
    /// bytes that are left are fed again, unless the handshake is over.
    pub(super) fn feed(&mut self, input: &[u8], out: &mut Vec<u8>) -> (usize, Step) {
        let before = self.bytes;
        let step = self.advance(input, out);
        (usize::try_from(self.bytes - before).expect("no more than were given"), step)
    }

    fn advance(&mut self, input: &[u8], out: &mut Vec<u8>) -> Step {
        if let State::Skip { option, left } = &mut self.state {
            let part = (*left).min(u32::try_from(input.len()).unwrap_or(u32::MAX));
            *left -= part;
            self.bytes += u64::from(part);
            if *left == 0 {
                match self.tls {
                    TlsStage::Required => refuse(out, *option, reply::ERR_TLS_REQD, TLS_FIRST),
                    _ => refuse(out, *option, reply::ERR_TOO_BIG, "the option is too long"),
                }
                self.state = State::OptionHeader;
            }
            return self.within_limits();
        }
        let wanted = match &self.state {
            State::Flags => wire::CLIENT_FLAGS_BYTES,
            State::OptionHeader => wire::OPTION_HEADER_BYTES,
            State::OptionData(header) => header.len as usize,
            State::Skip { .. } => unreachable!("skipped above"),
        };
        let part = (wanted - self.gathered.len()).min(input.len());
        self.gathered.extend_from_slice(&input[..part]);
        self.bytes += part as u64;
        if self.gathered.len() < wanted {
            return self.within_limits();
        }
        let gathered = std::mem::take(&mut self.gathered);
        let step = match &self.state {
            State::Flags => self.take_flags(&gathered),
            State::OptionHeader => self.take_header(&gathered, out),
            State::OptionData(header) => {
                let option = header.option;
                self.state = State::OptionHeader;
                self.answer(option, &gathered, out)
            }
            State::Skip { .. } => unreachable!("skipped above"),
        };
        match step {
            Step::More => self.within_limits(),
            over => over,
        }
    }

    fn within_limits(&self) -> Step {
        if self.bytes > self.limits.handshake_bytes_max {
            return Step::End(Ending::Refused("too many bytes before an export was chosen"));
        }
        Step::More
    }

    fn take_flags(&mut self, bytes: &[u8]) -> Step {
        let flags = bytes.try_into().map_or(0, u32::from_be_bytes);
        let fixed = u32::from(handshake_flag::FIXED_NEWSTYLE);
        let no_zeroes = u32::from(handshake_flag::NO_ZEROES);
        if flags & !(fixed | no_zeroes) != 0 {
            // "The server MUST drop the TCP connection if the client sets an unknown flag."
            return Step::End(Ending::Violation("unknown client flags"));
        }
        if flags & fixed == 0 {
            return Step::End(Ending::Refused("the client does not know fixed newstyle negotiation"));
        }
        self.no_zeroes = flags & no_zeroes != 0;
        self.state = State::OptionHeader;
        Step::More
    }

    fn take_header(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Step {
        let header = bytes.try_into().ok().and_then(OptionHeader::parse);
        let Some(header) = header else {
            return Step::End(Ending::Violation("an option without its magic"));
        };
        self.options += 1;
        if self.options > self.limits.options_max {
            return Step::End(Ending::Refused("too many options"));
        }
        if header.len == 0 {
            return self.answer(header.option, &[], out);
        }
        if header.len <= self.limits.option_bytes_max {
            self.state = State::OptionData(header);
        } else if u64::from(header.len) > self.limits.handshake_bytes_max {
            return Step::End(Ending::Violation("an option longer than a handshake"));
        } else if header.option == option::EXPORT_NAME {
            return Step::End(Ending::Refused("no such export"));
        } else {
            self.state = State::Skip { option: header.option, left: header.len };
        }
        Step::More
    }

    /// Answers one option.
    fn answer(&mut self, option: u32, data: &[u8], out: &mut Vec<u8>) -> Step {
        match option {
            option::EXPORT_NAME if self.tls == TlsStage::Required => {
                return Step::End(Ending::Refused(TLS_FIRST));
            }
            option::STARTTLS | option::ABORT => {}
            _ if self.tls == TlsStage::Required => {
                refuse(out, option, reply::ERR_TLS_REQD, TLS_FIRST);
                return Step::More;
            }
            _ => {}
        }
        match option {
            option::EXPORT_NAME => return self.export_name(data, out),
            option::GO => {
                if let Some(negotiated) = self.describe(option, data, out) {
                    return Step::Enter(negotiated);
                }
            }
            option::ABORT => {
                // "A server SHOULD ignore any data sent by the client."
                acknowledge(out, option);
                return Step::End(Ending::Goodbye);
            }
            option::INFO => {
                self.describe(option, data, out);
            }
            option::LIST if data.is_empty() => self.list(out),
            option::STRUCTURED_REPLY if data.is_empty() && self.headers == Headers::Extended => {
                refuse(out, option, reply::ERR_EXT_HEADER_REQD, "extended headers were already negotiated");
            }
            option::STRUCTURED_REPLY if data.is_empty() => {
                self.headers = Headers::Structured;
                acknowledge(out, option);
            }
            option::EXTENDED_HEADERS if data.is_empty() => {
                self.headers = Headers::Extended;
                acknowledge(out, option);
            }
            option::LIST | option::STRUCTURED_REPLY | option::EXTENDED_HEADERS => {
                refuse(out, option, reply::ERR_INVALID, "this option has no data");
            }
            option::LIST_META_CONTEXT => self.list_contexts(data, out),
            option::SET_META_CONTEXT => self.set_contexts(data, out),
            option::STARTTLS if self.tls == TlsStage::Absent => {
                refuse(out, option, reply::ERR_UNSUP, "this server does not support TLS");
            }
            option::STARTTLS if self.tls == TlsStage::Done => {
                refuse(out, option, reply::ERR_INVALID, "TLS is already active");
            }
            option::STARTTLS if !data.is_empty() => {
                refuse(out, option, reply::ERR_INVALID, "this option has no data");
            }
            option::STARTTLS => {
                acknowledge(out, option);
                return Step::StartTls;
            }
            _ => refuse(out, option, reply::ERR_UNSUP, "unknown option"),
        }
        Step::More
    }

    /// `NBD_OPT_EXPORT_NAME`: there is no way to say no but to hang up.
    fn export_name(&self, data: &[u8], out: &mut Vec<u8>) -> Step {
        if self.headers == Headers::Extended {
            // "Once extended headers are successfully requested, a client MUST NOT use NBD_OPT_EXPORT_NAME."
            return Step::End(Ending::Violation("an old option after extended headers"));
        }
        let attached = wire::parse_string(data).and_then(|name| self.exports.attach(name));
        let Some(attached) = attached else {
            return Step::End(Ending::Refused("no such export"));
        };
        let (terms, marks) = self.terms(attached.export(), false);
        out.extend_from_slice(&terms.size.to_be_bytes());
        out.extend_from_slice(&terms.flags().to_be_bytes());
        if !self.no_zeroes {
            out.extend_from_slice(&[0; 124]);
        }
        Step::Enter(Negotiated { attached, terms, marks, may_be_refused: false })
    }

    /// `NBD_OPT_INFO` and `NBD_OPT_GO`, which differ only in what follows.
    fn describe(&self, option: u32, data: &[u8], out: &mut Vec<u8>) -> Option<Negotiated> {
        let Some(request) = InfoRequest::parse(data) else {
            refuse(out, option, reply::ERR_INVALID, "the option's lengths contradict each other");
            return None;
        };
        let Some(attached) = self.exports.attach(request.name) else {
            refuse(out, option, reply::ERR_UNKNOWN, "no such export");
            return None;
        };
        let export = attached.export();
        let (terms, marks) = self.terms(export, request.wants(info::BLOCK_SIZE));
        let mut fact = |kind: u16, parts: &[&[u8]]| {
            let kind = kind.to_be_bytes();
            let mut data = vec![&kind[..]];
            data.extend_from_slice(parts);
            put(out, option, reply::INFO, &data);
        };
        fact(info::EXPORT, &[&terms.size.to_be_bytes(), &terms.flags().to_be_bytes()]);
        if request.wants(info::NAME) {
            fact(info::NAME, &[export.name.as_bytes()]);
        }
        let description = attached.description();
        if request.wants(info::DESCRIPTION) && !description.is_empty() {
            fact(info::DESCRIPTION, &[description.as_bytes()]);
        }
        // Sent to all clients, because they ignore information that they did not request. Clients that did
        // not request the block sizes get a minimum of one byte.
        let sizes = [terms.block_min, terms.block_preferred, terms.payload_max].map(u32::to_be_bytes);
        fact(info::BLOCK_SIZE, &[sizes.as_flattened()]);
        acknowledge(out, option);
        Some(Negotiated { attached, terms, marks, may_be_refused: true })
    }

    /// The terms for this export, and what it is marked with, as far as the client has asked for that.
    fn terms(&self, export: &Export, keeps_sizes: bool) -> (Terms, Vec<SharedMarks>) {
        let terms = Terms::new(&export.disk.geometry(), export.read_only, keeps_sizes, self.limits);
        let chosen = self.chosen.as_ref().filter(|chosen| chosen.export == export.name);
        let contexts = chosen.map_or_else(Contexts::default, |chosen| chosen.contexts.clone());
        let marks = chosen.map_or_else(Vec::new, |chosen| chosen.marks.clone());
        (Terms { headers: self.headers, contexts, ..terms }, marks)
    }

    fn list(&self, out: &mut Vec<u8>) {
        let begin = out.len();
        let mut is_whole = true;
        self.exports.list(|name, description| {
            let len = out.len() - begin + name.len() + description.len() + 64;
            is_whole = len <= self.limits.reply_bytes_max;
            if is_whole {
                let name_len = u32::try_from(name.len()).expect("at most 4096").to_be_bytes();
                let data = [&name_len[..], name.as_bytes(), description.as_bytes()];
                put(out, option::LIST, reply::SERVER, &data);
            }
            is_whole
        });
        if is_whole {
            acknowledge(out, option::LIST);
        } else {
            refuse(out, option::LIST, reply::ERR_TOO_BIG, "there are too many exports to list");
        }
    }

    fn list_contexts(&self, data: &[u8], out: &mut Vec<u8>) {
        let option = option::LIST_META_CONTEXT;
        let Some(request) = self.context_request(option, data, out) else { return };
        for (_, name) in MetaContext::all(&self.exports.marks(request.name)) {
            let queries = &request.queries;
            if queries.is_empty() || queries.iter().any(|query| MetaContext::is_matched(&name, query)) {
                put(out, option, reply::META_CONTEXT, &[&[0; 4], name.as_bytes()]);
            }
        }
        acknowledge(out, option);
    }

    fn set_contexts(&mut self, data: &[u8], out: &mut Vec<u8>) {
        let option = option::SET_META_CONTEXT;
        // "Issuing this command replaces all previously-set metadata contexts (including when this command
        // fails)."
        self.chosen = None;
        let Some(request) = self.context_request(option, data, out) else { return };
        let (mut contexts, marks) = (Contexts::default(), self.exports.marks(request.name));
        for (context, name) in MetaContext::all(&marks) {
            if request.queries.iter().any(|query| *query == name) {
                contexts.select(context);
                let id = context.id().to_be_bytes();
                put(out, option, reply::META_CONTEXT, &[&id, name.as_bytes()]);
            }
        }
        self.chosen = Some(Chosen { export: request.name.to_owned(), contexts, marks });
        acknowledge(out, option);
    }

    fn context_request<'d>(
        &self,
        option: u32,
        data: &'d [u8],
        out: &mut Vec<u8>,
    ) -> Option<ContextRequest<'d>> {
        if !self.headers.have_chunks() {
            refuse(out, option, reply::ERR_INVALID, "structured replies must be negotiated first");
            return None;
        }
        let Some(request) = ContextRequest::parse(data) else {
            refuse(out, option, reply::ERR_INVALID, "the option's lengths contradict each other");
            return None;
        };
        if !self.exports.has(request.name) {
            refuse(out, option, reply::ERR_UNKNOWN, "no such export");
            return None;
        }
        Some(request)
    }
}

fn acknowledge(out: &mut Vec<u8>, option: u32) {
    put(out, option, reply::ACK, &[]);
}

fn refuse(out: &mut Vec<u8>, option: u32, error: u32, message: &'static str) {
    put(out, option, error, &[message.as_bytes()]);
}

fn put(out: &mut Vec<u8>, option: u32, kind: u32, data: &[&[u8]]) {
    let len: usize = data.iter().map(|part| part.len()).sum();
    out.extend_from_slice(&wire::OPTION_REPLY_MAGIC.to_be_bytes());
    out.extend_from_slice(&option.to_be_bytes());
    out.extend_from_slice(&kind.to_be_bytes());
    out.extend_from_slice(&u32::try_from(len).expect("an answer is short").to_be_bytes());
    for part in data {
        out.extend_from_slice(part);
    }
}
