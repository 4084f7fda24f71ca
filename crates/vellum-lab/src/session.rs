//! The client's side of an NBD connection: the handshake, and bytes out and in.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use vellum_core::{Context, Error, Result};
use vellum_export::nbd::wire::{
    GREETING_BYTES, GREETING_MAGIC, OPTION_MAGIC, OPTION_REPLY_MAGIC, RequestHeader, command, info, option,
    option_reply,
};

/// A server that sends nothing for this long is stuck.
const PATIENCE: Duration = Duration::from_secs(30);

/// In which form a server answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// Simple replies.
    Simple,
    /// Structured replies with headers of 32-bit lengths.
    Structured,
    /// Structured replies, and the context `base:allocation`.
    Mapping,
    /// As above, with headers of 64-bit lengths: one request can ask for the map of a whole disk.
    Extended,
}

/// A connection past its handshake.
pub struct Session {
    stream: UnixStream,
    structured: bool,
    /// The size of the disk.
    pub size: u64,
}

/// The error for a server that does not keep to the protocol.
pub fn broken(what: &str) -> Error {
    Error::corrupt(format!("the server broke the protocol: {what}"))
}

/// The bytes of a field at this place.
pub fn be<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes[at..at + N].try_into().expect("as many as were asked for")
}

impl Session {
    /// Connects to the default export.
    pub fn open(socket: &Path, structured: bool) -> Result<Self> {
        Self::open_export(socket, "", structured)
    }

    /// Connects to the export of this name.
    pub fn open_export(socket: &Path, export: &str, structured: bool) -> Result<Self> {
        Self::open_speaking(socket, export, if structured { Dialect::Structured } else { Dialect::Simple })
    }

    /// Connects to the export of this name, with this form of replies; if it may be missing,
    /// [`Dialect::Structured`] becomes [`Dialect::Simple`], and the others are errors.
    pub fn open_speaking(socket: &Path, export: &str, dialect: Dialect) -> Result<Self> {
        let stream = UnixStream::connect(socket).context(|| "can't connect to the server")?;
        let mut session = Self { stream, structured: false, size: 0 };
        session.wait_at_most(PATIENCE)?;
        session.negotiate(export, dialect).context(|| "can't agree with the server")?;
        Ok(session)
    }

    /// How long a read may wait for the server.
    pub fn wait_at_most(&mut self, time: Duration) -> Result<()> {
        self.stream.set_read_timeout(Some(time)).context(|| "can't set a timeout")?;
        self.stream.set_write_timeout(Some(time)).context(|| "can't set a timeout")
    }

    fn negotiate(&mut self, export: &str, dialect: Dialect) -> Result<()> {
        let greeting: [u8; GREETING_BYTES] = self.take()?;
        if be(&greeting, 0) != GREETING_MAGIC.to_be_bytes() || be(&greeting, 8) != OPTION_MAGIC.to_be_bytes()
        {
            return Err(broken("its greeting is not that of NBD, newstyle"));
        }
        self.put(&3u32.to_be_bytes())?;
        match dialect {
            Dialect::Simple => {}
            Dialect::Structured => {
                self.ask(option::STRUCTURED_REPLY, &[])?;
                self.structured = self.answer(option::STRUCTURED_REPLY)?.0 == option_reply::ACK;
            }
            Dialect::Mapping => self.agree_on_maps(option::STRUCTURED_REPLY, export)?,
            Dialect::Extended => self.agree_on_maps(option::EXTENDED_HEADERS, export)?,
        }
        let len = u32::try_from(export.len()).expect("a short name").to_be_bytes();
        // And no wish for facts.
        self.ask(option::GO, &[&len[..], export.as_bytes(), &[0; 2]].concat())?;
        loop {
            let (kind, data) = self.answer(option::GO)?;
            match kind {
                option_reply::INFO if data.len() == 12 && be(&data, 0) == info::EXPORT.to_be_bytes() => {
                    self.size = u64::from_be_bytes(be(&data, 2));
                }
                option_reply::INFO => {}
                option_reply::ACK => return Ok(()),
                kind => return Err(broken(&format!("it answers GO with {kind:#x}"))),
            }
        }
    }

    /// Asks for this form of replies, and for the context `base:allocation`.
    fn agree_on_maps(&mut self, form: u32, export: &str) -> Result<()> {
        let string = |text: &str| {
            let len = u32::try_from(text.len()).expect("a short string").to_be_bytes();
            [&len[..], text.as_bytes()].concat()
        };
        self.ask(form, &[])?;
        if self.answer(form)?.0 != option_reply::ACK {
            return Err(Error::unsupported("the server does not know such replies"));
        }
        self.structured = true;
        let wish = [&string(export)[..], &1u32.to_be_bytes(), &string("base:allocation")].concat();
        self.ask(option::SET_META_CONTEXT, &wish)?;
        let (first, _) = self.answer(option::SET_META_CONTEXT)?;
        if first != option_reply::META_CONTEXT
            || self.answer(option::SET_META_CONTEXT)?.0 != option_reply::ACK
        {
            return Err(Error::unsupported("the server has no map of this disk"));
        }
        Ok(())
    }

    /// The socket itself, for a client that breaks the rules.
    pub fn stream(&mut self) -> &mut UnixStream {
        &mut self.stream
    }

    pub(crate) fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.stream.write_all(bytes).context(|| "can't write to the server")
    }

    pub(crate) fn take<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    pub(crate) fn fill(&mut self, bytes: &mut [u8]) -> Result<()> {
        self.stream.read_exact(bytes).context(|| "can't read from the server")
    }

    fn ask(&mut self, option: u32, data: &[u8]) -> Result<()> {
        let len = u32::try_from(data.len()).expect("a short option");
        let bytes =
            [&OPTION_MAGIC.to_be_bytes(), &option.to_be_bytes()[..], &len.to_be_bytes(), data].concat();
        self.put(&bytes)
    }

    /// Tells the server that nothing more comes.
    pub fn say_goodbye(&mut self) -> Result<()> {
        let header = RequestHeader { flags: 0, command: command::DISC, cookie: 0, offset: 0, len: 0 };
        self.put(&header.encode())
    }

    fn answer(&mut self, option: u32) -> Result<(u32, Vec<u8>)> {
        let head: [u8; 20] = self.take()?;
        if be(&head, 0) != OPTION_REPLY_MAGIC.to_be_bytes() || be(&head, 8) != option.to_be_bytes() {
            return Err(broken("an answer to another question"));
        }
        let len = u32::from_be_bytes(be(&head, 16));
        if len > 1 << 16 {
            return Err(broken("an answer without end"));
        }
        let mut data = vec![0; len as usize];
        self.stream.read_exact(&mut data).context(|| "can't read from the server")?;
        Ok((u32::from_be_bytes(be(&head, 12)), data))
    }
}
