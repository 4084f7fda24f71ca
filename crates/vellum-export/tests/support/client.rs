//! A client that knows the protocol well and forgives nothing: everything the server sends is checked against
//! the rules of the standard before the test sees it.

use std::collections::BTreeMap;

use vellum_core::{Buffer, ByteStream};
use vellum_export::nbd::wire::{
    self, RequestHeader, chunk, command, command_flag, handshake_flag, info, option, option_reply,
};

use super::pipe::Pipe;

/// The client's requests at the beginning.
pub struct Wish<'a> {
    pub name: &'a str,
    pub structured: bool,
    /// Ask for extended headers, after structured replies if those are also wanted.
    pub extended: bool,
    pub contexts: &'a [&'a str],
    /// Ask for the sizes, and so promise to keep to them.
    pub sizes: bool,
}

impl Default for Wish<'_> {
    fn default() -> Self {
        Self { name: "", structured: true, extended: false, contexts: &["base:allocation"], sizes: false }
    }
}

/// What the server reports about an export.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Told {
    pub size: u64,
    pub flags: u16,
    pub name: Option<String>,
    pub description: Option<String>,
    /// Smallest block, preferred block, largest payload.
    pub blocks: Option<[u32; 3]>,
}

/// A whole reply, perhaps gathered from many chunks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Answer {
    pub cookie: u64,
    /// Zero for success.
    pub error: u32,
    pub message: String,
    /// The bytes of a read.
    pub data: Vec<u8>,
    /// Runs that were reported as holes: offset and length.
    pub holes: Vec<(u64, u64)>,
    /// Content chunks of a read.
    pub chunks: usize,
    /// Failures with a place.
    pub failed_at: Vec<(u32, u64)>,
    /// Block status: context and its runs (length, status).
    pub status: Vec<(u32, Vec<(u64, u32)>)>,
}

struct Asked {
    header: RequestHeader,
    answer: Answer,
    /// Which bytes of a read have been answered.
    told: Vec<bool>,
}

/// A client.
pub struct Client {
    pub stream: Pipe,
    unread: Vec<u8>,
    structured: bool,
    extended: bool,
    contexts: usize,
    asked: BTreeMap<u64, Asked>,
}

impl Client {
    pub fn new(stream: Pipe) -> Self {
        Self {
            stream,
            unread: Vec::new(),
            structured: false,
            extended: false,
            contexts: 0,
            asked: BTreeMap::new(),
        }
    }

    /// Requests without an answer.
    pub fn open(&self) -> usize {
        self.asked.len()
    }

    pub async fn send(&self, bytes: &[u8]) {
        self.try_send(bytes).await.expect("the server listens");
    }

    pub async fn try_send(&self, bytes: &[u8]) -> vellum_core::Result<()> {
        match bytes.is_empty() {
            true => Ok(()),
            false => self.stream.write_all(Buffer::copy_of(bytes)).await,
        }
    }

    /// The next `len` bytes, or `None` when the stream ends first.
    pub async fn try_receive(&mut self, len: usize) -> Option<Vec<u8>> {
        while self.unread.len() < len {
            let (buffer, count) =
                self.stream.read(Buffer::zeroed(65536)).await.expect("a pipe does not fail");
            if count == 0 {
                return None;
            }
            self.unread.extend_from_slice(&buffer.slice()[..count]);
        }
        Some(self.unread.drain(..len).collect())
    }

    pub async fn receive(&mut self, len: usize) -> Vec<u8> {
        self.try_receive(len).await.expect("the server goes on")
    }

    /// Whether the server has closed the connection, with nothing left to read.
    pub async fn is_over(&mut self) -> bool {
        self.try_receive(1).await.is_none()
    }

    async fn u16(&mut self) -> u16 {
        u16::from_be_bytes(self.receive(2).await.try_into().unwrap())
    }

    async fn u32(&mut self) -> u32 {
        u32::from_be_bytes(self.receive(4).await.try_into().unwrap())
    }

    async fn u64(&mut self) -> u64 {
        u64::from_be_bytes(self.receive(8).await.try_into().unwrap())
    }

    /// Takes the greeting and answers it.
    pub async fn greet(&mut self) {
        self.greet_with(u32::from(handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES)).await;
    }

    pub async fn greet_with(&mut self, flags: u32) {
        assert_eq!(self.receive(18).await, b"NBDMAGICIHAVEOPT\0\x03");
        self.send(&flags.to_be_bytes()).await;
    }

    pub async fn option(&mut self, option: u32, data: &[u8]) {
        self.send(&option_bytes(option, data)).await;
    }

    /// One reply to an option: its kind and data.
    pub async fn option_reply(&mut self, option: u32) -> (u32, Vec<u8>) {
        assert_eq!(self.u64().await, wire::OPTION_REPLY_MAGIC);
        assert_eq!(self.u32().await, option);
        let kind = self.u32().await;
        let len = self.u32().await as usize;
        assert!(len <= 2 * 4096 + 4, "a reply of {len} bytes");
        let data = self.receive(len).await;
        if kind & (1 << 31) != 0 {
            assert!(data.len() <= 4096 && std::str::from_utf8(&data).is_ok(), "an error is a string");
        }
        (kind, data)
    }

    /// All replies to an option, up to the last. Returns those before it, and the kind of the last.
    pub async fn option_replies(&mut self, option: u32) -> (Vec<(u32, Vec<u8>)>, u32) {
        let mut replies = Vec::new();
        loop {
            let (kind, data) = self.option_reply(option).await;
            if kind == option_reply::ACK || kind & (1 << 31) != 0 {
                return (replies, kind);
            }
            replies.push((kind, data));
        }
    }

    pub async fn ask_option(&mut self, option: u32, data: &[u8]) -> (Vec<(u32, Vec<u8>)>, u32) {
        self.option(option, data).await;
        self.option_replies(option).await
    }

    pub async fn structured(&mut self) {
        let (_, last) = self.ask_option(option::STRUCTURED_REPLY, &[]).await;
        assert_eq!(last, option_reply::ACK);
        self.structured = true;
    }

    pub async fn extended(&mut self) {
        let (_, last) = self.ask_option(option::EXTENDED_HEADERS, &[]).await;
        assert_eq!(last, option_reply::ACK);
        self.extended = true;
    }

    /// Chooses contexts; returns their numbers.
    pub async fn contexts(&mut self, name: &str, contexts: &[&str]) -> Vec<(u32, String)> {
        let (replies, last) = self.ask_option(option::SET_META_CONTEXT, &context_data(name, contexts)).await;
        assert_eq!(last, option_reply::ACK);
        self.contexts = replies.len();
        replies
            .into_iter()
            .map(|(kind, data)| {
                assert_eq!(kind, option_reply::META_CONTEXT);
                let id = u32::from_be_bytes(data[..4].try_into().unwrap());
                (id, String::from_utf8(data[4..].to_vec()).unwrap())
            })
            .collect()
    }

    /// `NBD_OPT_INFO` or `NBD_OPT_GO`; returns the answer, or the error.
    pub async fn inform(&mut self, option: u32, name: &str, facts: &[u16]) -> Result<Told, u32> {
        let (replies, last) = self.ask_option(option, &info_data(name, facts)).await;
        if last != option_reply::ACK {
            assert!(replies.is_empty(), "an export that is refused is not described");
            return Err(last);
        }
        let mut told = Told::default();
        let mut seen = Vec::new();
        for (kind, data) in replies {
            assert_eq!(kind, option_reply::INFO);
            let fact = u16::from_be_bytes(data[..2].try_into().unwrap());
            assert!(!seen.contains(&fact), "each fact is told once");
            seen.push(fact);
            let text = || Some(String::from_utf8(data[2..].to_vec()).unwrap());
            match fact {
                info::EXPORT => {
                    assert_eq!(data.len(), 12);
                    told.size = u64::from_be_bytes(data[2..10].try_into().unwrap());
                    told.flags = u16::from_be_bytes(data[10..].try_into().unwrap());
                }
                info::NAME => told.name = text(),
                info::DESCRIPTION => told.description = text(),
                info::BLOCK_SIZE => {
                    assert_eq!(data.len(), 14);
                    let number = |at| u32::from_be_bytes(data[at..at + 4].try_into().unwrap());
                    let blocks = [number(2), number(6), number(10)];
                    let [min, preferred, max] = blocks;
                    assert!(min.is_power_of_two() && min <= 65536);
                    assert!(preferred.is_power_of_two() && preferred >= min.max(512) && preferred <= max);
                    told.blocks = Some(blocks);
                }
                _ => panic!("nobody knows the fact {fact}"),
            }
        }
        assert!(seen.contains(&info::EXPORT));
        Ok(told)
    }

    /// From the greeting to the first request.
    pub async fn begin(&mut self, wish: Wish<'_>) -> Told {
        self.greet().await;
        if wish.structured {
            self.structured().await;
        }
        if wish.extended {
            self.extended().await;
        }
        if (wish.structured || wish.extended) && !wish.contexts.is_empty() {
            self.contexts(wish.name, wish.contexts).await;
        }
        let facts: &[u16] = if wish.sizes { &[info::BLOCK_SIZE] } else { &[] };
        self.inform(option::GO, wish.name, facts).await.expect("the export is there")
    }

    /// Notes that a request is in flight, and gives its bytes.
    pub fn note(&mut self, header: RequestHeader) -> Vec<u8> {
        let told = match header.command {
            // One that is refused may be of any length.
            command::READ if header.len <= 1 << 30 => vec![false; usize::try_from(header.len).unwrap()],
            _ => Vec::new(),
        };
        let answer = Answer { cookie: header.cookie, ..Answer::default() };
        let before = self.asked.insert(header.cookie, Asked { header, answer, told });
        assert!(before.is_none(), "a cookie is used once at a time");
        if self.extended { header.encode_extended().to_vec() } else { header.encode().to_vec() }
    }

    /// With extended headers the flag for the payload is set where there is one.
    pub async fn request(&mut self, mut header: RequestHeader, payload: &[u8]) {
        if self.extended && !payload.is_empty() {
            header.flags |= command_flag::PAYLOAD_LEN;
        }
        let bytes = self.note(header);
        self.send(&[&bytes, payload].concat()).await;
    }

    /// Asks and waits.
    pub async fn ask(&mut self, command: u16, flags: u16, offset: u64, len: u64) -> Answer {
        let cookie = 0xC00C_1E00 + u64::from(command);
        self.request(RequestHeader { flags, command, cookie, offset, len }, &[]).await;
        self.answer_to(cookie).await
    }

    pub async fn write(&mut self, flags: u16, offset: u64, data: &[u8]) -> Answer {
        let len = data.len() as u64;
        let header = RequestHeader { flags, command: command::WRITE, cookie: 0x3317, offset, len };
        self.request(header, data).await;
        self.answer_to(0x3317).await
    }

    pub async fn read(&mut self, offset: u64, len: u64) -> Vec<u8> {
        let answer = self.ask(command::READ, 0, offset, len).await;
        assert_eq!(answer.error, 0, "{}", answer.message);
        answer.data
    }

    /// The next whole answer, when it is this one.
    pub async fn answer_to(&mut self, cookie: u64) -> Answer {
        let answer = self.answer().await.expect("the server goes on");
        assert_eq!(answer.cookie, cookie);
        answer
    }

    /// The next whole answer; `None` when the stream has ended.
    pub async fn answer(&mut self) -> Option<Answer> {
        loop {
            let magic = u32::from_be_bytes(self.try_receive(4).await?.try_into().unwrap());
            let done = match magic {
                wire::SIMPLE_REPLY_MAGIC => self.simple_reply().await,
                wire::CHUNK_MAGIC | wire::EXTENDED_CHUNK_MAGIC => {
                    assert_eq!(self.extended, magic == wire::EXTENDED_CHUNK_MAGIC, "as was negotiated");
                    self.chunk().await
                }
                _ => panic!("no reply begins with {magic:#x}"),
            };
            if let Some(answer) = done {
                return Some(answer);
            }
        }
    }

    async fn simple_reply(&mut self) -> Option<Answer> {
        assert!(!self.extended, "with extended headers every reply is a chunk");
        let error = self.u32().await;
        let cookie = self.u64().await;
        let mut asked = self.asked.remove(&cookie).expect("a reply answers a request");
        let is_read = asked.header.command == command::READ;
        assert!(!(is_read && self.structured), "reads are answered by chunks");
        assert_eq!(asked.answer.chunks, 0);
        if is_read && error == 0 {
            asked.answer.data = self.receive(usize::try_from(asked.header.len).unwrap()).await;
        }
        asked.answer.error = error;
        Some(asked.answer)
    }

    async fn chunk(&mut self) -> Option<Answer> {
        assert!(self.structured || self.extended, "chunks only for those who asked for them");
        let flags = self.u16().await;
        let kind = self.u16().await;
        let cookie = self.u64().await;
        let offset = if self.extended { Some(self.u64().await) } else { None };
        let len = match self.extended {
            true => usize::try_from(self.u64().await).unwrap(),
            false => self.u32().await as usize,
        };
        assert!(len <= (32 << 20) + 8, "no payload is longer");
        let payload = self.receive(len).await;
        assert_eq!(flags & !chunk::FLAG_DONE, 0);
        let is_last = flags & chunk::FLAG_DONE != 0;
        let asked = self.asked.get_mut(&cookie).expect("a chunk answers a request");
        let Asked { header, answer, told } = asked;
        assert!(offset.is_none_or(|offset| offset == header.offset), "the place of the request");
        let u32_at = |at: usize| u32::from_be_bytes(payload[at..at + 4].try_into().unwrap());
        let u64_at = |at: usize| u64::from_be_bytes(payload[at..at + 8].try_into().unwrap());
        match kind {
            chunk::NONE => assert!(is_last && len == 0),
            chunk::OFFSET_DATA | chunk::OFFSET_HOLE => {
                assert_eq!(header.command, command::READ);
                let at = usize::try_from(u64_at(0) - header.offset).unwrap();
                let bytes = match kind {
                    chunk::OFFSET_DATA => payload[8..].to_vec(),
                    _ => {
                        assert_eq!(len, 12);
                        answer.holes.push((u64_at(0), u64::from(u32_at(8))));
                        vec![0; u32_at(8) as usize]
                    }
                };
                assert!(!bytes.is_empty(), "a content chunk has content");
                answer.data.resize(told.len(), 0);
                for (index, byte) in bytes.iter().enumerate() {
                    assert!(!told[at + index], "no byte is told twice");
                    told[at + index] = true;
                    answer.data[at + index] = *byte;
                }
                answer.chunks += 1;
                if header.flags & command_flag::DF != 0 {
                    assert!(answer.chunks == 1 && kind == chunk::OFFSET_DATA, "one piece was asked for");
                }
            }
            chunk::BLOCK_STATUS | chunk::BLOCK_STATUS_EXT => {
                assert_eq!(header.command, command::BLOCK_STATUS);
                assert_eq!(self.extended, kind == chunk::BLOCK_STATUS_EXT);
                let runs: Vec<(u64, u32)> = if self.extended {
                    assert!(len >= 24 && len == 8 + 16 * u32_at(4) as usize);
                    let run = |at| (u64_at(at), u32::try_from(u64_at(at + 8)).expect("32 bits are in use"));
                    (8..len).step_by(16).map(run).collect()
                } else {
                    assert!(len >= 12 && (len - 4).is_multiple_of(8));
                    (4..len).step_by(8).map(|at| (u64::from(u32_at(at)), u32_at(at + 4))).collect()
                };
                assert!(runs.iter().all(|(len, _)| *len > 0));
                let sum: u64 = runs.iter().map(|(len, _)| *len).sum();
                assert!(sum <= header.len, "no further than was asked");
                if header.flags & command_flag::REQ_ONE != 0 {
                    assert_eq!(runs.len(), 1);
                }
                assert!(answer.status.iter().all(|(id, _)| *id != u32_at(0)), "each context once");
                answer.status.push((u32_at(0), runs));
            }
            chunk::ERROR | chunk::ERROR_OFFSET => {
                answer.error = u32_at(0);
                assert_ne!(answer.error, 0);
                let message_len = usize::from(u16::from_be_bytes(payload[4..6].try_into().unwrap()));
                assert!(message_len <= 4096);
                answer.message = String::from_utf8(payload[6..6 + message_len].to_vec()).unwrap();
                if kind == chunk::ERROR_OFFSET {
                    assert_eq!(len, 14 + message_len);
                    let at = u64_at(6 + message_len);
                    assert!((header.offset..header.offset + header.len.max(1)).contains(&at));
                    answer.failed_at.push((u32_at(0), at));
                } else {
                    assert_eq!(len, 6 + message_len);
                }
            }
            _ => panic!("nobody knows the chunk {kind:#x}"),
        }
        if !is_last {
            return None;
        }
        let asked = self.asked.remove(&cookie).expect("it was there");
        if asked.answer.error == 0 {
            assert!(asked.told.iter().all(|told| *told), "a read that succeeds tells every byte");
            if asked.header.command == command::BLOCK_STATUS {
                assert_eq!(asked.answer.status.len(), self.contexts, "one chunk for each context");
            }
        }
        Some(asked.answer)
    }
}

pub fn option_bytes(option: u32, data: &[u8]) -> Vec<u8> {
    let len = u32::try_from(data.len()).unwrap();
    [&b"IHAVEOPT"[..], &option.to_be_bytes(), &len.to_be_bytes(), data].concat()
}

fn text_data(text: &str) -> Vec<u8> {
    [&u32::try_from(text.len()).unwrap().to_be_bytes(), text.as_bytes()].concat()
}

pub fn info_data(name: &str, facts: &[u16]) -> Vec<u8> {
    let mut data = text_data(name);
    data.extend_from_slice(&u16::try_from(facts.len()).unwrap().to_be_bytes());
    data.extend(facts.iter().flat_map(|fact| fact.to_be_bytes()));
    data
}

pub fn context_data(name: &str, queries: &[&str]) -> Vec<u8> {
    let mut data = text_data(name);
    data.extend_from_slice(&u32::try_from(queries.len()).unwrap().to_be_bytes());
    data.extend(queries.iter().flat_map(|query| text_data(query)));
    data
}
