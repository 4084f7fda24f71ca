//! A tap between a third-party NBD client and the server: everything is passed on unchanged, and the model
//! gets the requests and answers.
//!
//! ```text
//!   fio ──request──► tap ──► server        recorded before it is passed on: a write and its bytes, a flush
//!   fio ◄──reply──── tap ◄── server        recorded before it is passed on: that it was answered
//! ```
//!
//! It knows simple and structured replies; a client that negotiates anything else gets no further.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::Scope;
use std::time::Duration;

use super::model::{Model, SECTOR};
use super::support::client::{DISCONNECT, FLAG_FUA, FLUSH, Peer, Socket, WRITE};
use super::support::dir::Dir;

const OPTION: u32 = u32::from_be_bytes(*b"IHAV");
const OPTION_REPLY: u32 = 0x0003_e889;
const REQUEST: u32 = 0x2560_9513;
const SIMPLE_REPLY: u32 = 0x6744_6698;
const STRUCTURED_REPLY: u32 = 0x668e_33ef;
const REPLY_DONE: u16 = 1;
const REPLY_IS_ERROR: u16 = 1 << 15;

/// What a request was, until it is answered.
enum Sent {
    Write(usize),
    Flush(u64),
}

/// One connection's requests that are in flight.
type UnderWay = Mutex<BTreeMap<u64, Sent>>;

pub struct Tap<'a> {
    model: &'a Model,
    server: Peer,
    place: Dir,
    is_over: AtomicBool,
    pub writes_answered: AtomicUsize,
    pub flushes_answered: AtomicUsize,
}

impl<'a> Tap<'a> {
    pub fn new(model: &'a Model, server: Peer) -> Self {
        Self {
            model,
            server,
            place: Dir::short(),
            is_over: AtomicBool::new(false),
            writes_answered: AtomicUsize::new(0),
            flushes_answered: AtomicUsize::new(0),
        }
    }

    /// Where a client finds it.
    pub fn socket(&self) -> PathBuf {
        self.place.join("tap")
    }

    /// Takes connections until it is over; each has two threads.
    pub fn open<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) {
        let listener = UnixListener::bind(self.socket()).expect("a socket");
        listener.set_nonblocking(true).expect("a socket");
        scope.spawn(move || {
            while !self.is_over.load(Ordering::Relaxed) {
                match listener.accept() {
                    Ok((client, _)) => drop(self.connect(scope, client)),
                    Err(_) => std::thread::sleep(Duration::from_millis(2)),
                }
            }
        });
    }

    /// No more connections.
    pub fn close(&self) {
        self.is_over.store(true, Ordering::Relaxed);
    }

    fn connect<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>, client: UnixStream) -> io::Result<()> {
        client.set_nonblocking(false)?;
        let client = Socket::Unix(client);
        client.set_patience(Duration::from_secs(60))?;
        let server = self.server.connect()?;
        let (mut from_client, mut to_client) = (client.duplicate()?, client);
        let (mut from_server, mut to_server) = (server.duplicate()?, server);
        let under_way = std::sync::Arc::new(UnderWay::default());
        let also = under_way.clone();
        scope.spawn(move || {
            drop(self.pass_requests(&mut from_client, &mut to_server, &under_way));
            from_client.shut_down();
            to_server.shut_down();
        });
        scope.spawn(move || {
            drop(self.pass_replies(&mut from_server, &mut to_client, &also));
            from_server.shut_down();
            to_client.shut_down();
        });
        Ok(())
    }

    fn pass_requests(&self, from: &mut Socket, to: &mut Socket, under_way: &UnderWay) -> io::Result<()> {
        to.write_all(&from.exactly(4)?)?; // the client's flags
        loop {
            let mut message = from.exactly(4)?;
            match u32_in(&message, 0) {
                OPTION => {
                    message.extend(from.exactly(12)?);
                    message.extend(from.exactly(u32_in(&message, 12) as usize)?);
                }
                REQUEST => {
                    message.extend(from.exactly(24)?);
                    let (flags, command) = (u16_in(&message, 4), u16_in(&message, 6));
                    let (cookie, at) = (u64_in(&message, 8), u64_in(&message, 16));
                    let sent = match command {
                        WRITE => {
                            let data = from.exactly(u32_in(&message, 24) as usize)?;
                            message.extend_from_slice(&data);
                            let sector = usize::try_from(at).expect("a small disk") / SECTOR;
                            Some(Sent::Write(self.model.data_sent(sector, data, flags & FLAG_FUA != 0)))
                        }
                        FLUSH => Some(Sent::Flush(self.model.flush_sent())),
                        DISCONNECT => None,
                        other => panic!("the client sends command {other}"),
                    };
                    under_way.lock().expect("no one fails with it").extend(sent.map(|sent| (cookie, sent)));
                }
                other => panic!("the client sends {other:#x}"),
            }
            to.write_all(&message)?;
        }
    }

    fn pass_replies(&self, from: &mut Socket, to: &mut Socket, under_way: &UnderWay) -> io::Result<()> {
        to.write_all(&from.exactly(18)?)?; // the greeting
        loop {
            let mut message = from.exactly(4)?;
            match u32_in(&message, 0) {
                OPTION_REPLY => {
                    message.extend(from.exactly(16)?);
                    message.extend(from.exactly(u32_in(&message, 16) as usize)?);
                }
                SIMPLE_REPLY => {
                    message.extend(from.exactly(12)?);
                    assert_eq!(u32_in(&message, 4), 0, "a request fails");
                    self.answered(u64_in(&message, 8), under_way);
                }
                STRUCTURED_REPLY => {
                    message.extend(from.exactly(16)?);
                    message.extend(from.exactly(u32_in(&message, 16) as usize)?);
                    let (flags, kind) = (u16_in(&message, 4), u16_in(&message, 6));
                    assert_eq!(kind & REPLY_IS_ERROR, 0, "a request fails");
                    if flags & REPLY_DONE != 0 {
                        self.answered(u64_in(&message, 8), under_way);
                    }
                }
                other => panic!("the server sends {other:#x}"),
            }
            to.write_all(&message)?;
        }
    }

    fn answered(&self, cookie: u64, under_way: &UnderWay) {
        let sent = under_way.lock().expect("no one fails with it").remove(&cookie);
        match sent.expect("an answer to what was asked") {
            Sent::Write(number) => {
                self.model.write_answered(number);
                self.writes_answered.fetch_add(1, Ordering::Relaxed);
            }
            Sent::Flush(sent) => {
                self.model.flush_answered(sent);
                self.flushes_answered.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

fn u16_in(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes(bytes[at..at + 2].try_into().expect("two bytes"))
}

fn u32_in(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u64_in(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}
