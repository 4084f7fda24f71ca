//! A guest that keeps several requests in flight and remembers every answer.

use std::collections::BTreeMap;
use std::io;

use vellum_core::Random;

use super::model::{Content, Model, SECTOR};
use super::support::client::{Client, FLAG_FUA, FLAG_NO_HOLE, FLUSH, Peer, TRIM, WRITE, WRITE_ZEROES};

/// Requests in flight at most.
const DEPTH: usize = 12;

/// What a request was, until it is answered.
enum Sent {
    Write(usize),
    Flush(u64),
}

/// One connection of the guest.
pub struct Guest<'a> {
    client: Client,
    model: &'a Model,
    random: Random,
    /// Places and lengths are multiples of this many sectors.
    block: usize,
    /// It uses only this many sectors from the first on.
    sectors: usize,
    under_way: BTreeMap<u64, Sent>,
}

impl<'a> Guest<'a> {
    pub fn connect(peer: &Peer, model: &'a Model, block: usize, random: Random) -> io::Result<Self> {
        let sectors = model.sectors();
        let client = Client::connect(peer, "")?;
        assert_eq!(client.size, (model.sectors() * SECTOR) as u64);
        Ok(Self { client, model, random, block, sectors, under_way: BTreeMap::new() })
    }

    /// It leaves what is behind to others.
    pub fn keep_to(mut self, sectors: usize) -> Self {
        self.sectors = sectors;
        self
    }

    /// Works until the server is gone, or this many requests are sent; those are left unanswered.
    pub fn work(&mut self, requests: usize) -> io::Result<()> {
        for _ in 0..requests {
            while self.under_way.len() >= DEPTH {
                self.hear()?;
            }
            self.ask()?;
            if self.random.one_in(3) && !self.under_way.is_empty() {
                self.hear()?;
            }
        }
        Ok(())
    }

    /// Waits for the answers to all that was sent.
    pub fn hear_all(&mut self) -> io::Result<()> {
        while !self.under_way.is_empty() {
            self.hear()?;
        }
        Ok(())
    }

    fn ask(&mut self) -> io::Result<()> {
        let kind = self.random.below(20);
        if kind < 2 {
            let sent = self.model.flush_sent();
            let cookie = self.client.send(FLUSH, 0, 0, 0, &[])?;
            self.under_way.insert(cookie, Sent::Flush(sent));
            return Ok(());
        }
        let blocks = self.sectors / self.block;
        // Most requests meet others in the same few clusters.
        let reach = if self.random.one_in(3) { blocks } else { blocks / 8 };
        let longest = if self.random.one_in(8) { 256 } else { 24 };
        let first = self.random.index(reach);
        let count = (1 + self.random.index(longest.min(reach))).min(blocks - first);
        let (first, count) = (first * self.block, count * self.block);
        let (command, content, flags) = match kind {
            2 | 3 => (WRITE_ZEROES, Content::Zero, if self.random.one_in(2) { FLAG_NO_HOLE } else { 0 }),
            4 => (TRIM, Content::Hint, 0),
            _ => (WRITE, Content::Pattern, 0),
        };
        let fua = command != TRIM && self.random.one_in(8);
        let flags = if fua { flags | FLAG_FUA } else { flags };
        let number = self.model.write_sent(first, count, content, fua);
        let data = match content {
            Content::Pattern => self.model.bytes(number, first, count),
            _ => Vec::new(),
        };
        let (at, len) = ((first * SECTOR) as u64, u32::try_from(count * SECTOR).expect("short"));
        let cookie = self.client.send(command, flags, at, len, &data)?;
        self.under_way.insert(cookie, Sent::Write(number));
        Ok(())
    }

    fn hear(&mut self) -> io::Result<()> {
        let answer = self.client.answer()?;
        assert_eq!(answer.error, 0, "a request fails");
        match self.under_way.remove(&answer.cookie).expect("an answer to what was asked") {
            Sent::Write(number) => self.model.write_answered(number),
            Sent::Flush(sent) => self.model.flush_answered(sent),
        }
        Ok(())
    }
}
