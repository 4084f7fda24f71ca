//! Which blocks are given up when slots are short.
//!
//! ```text
//!   used(key)         it was read or written; or put in (`is_new`)             cache ─► policy
//!   victims(n)        up to n clean blocks to give up                          cache ◄─ policy
//! ```
//!
//! 1. A policy names only blocks that are cached and clean. It knows nothing of flash.
//! 2. What it keeps beside the map is bounded by the number that it is made with, and a call looks at a bounded
//!    number of keys. So a call may name none although there are clean blocks; a caller asks again.
//! 3. Blocks that a policy does not know (what a recovery found, what its tables had no room for) are found by the
//!    hand of the map, so none stays for ever.
//! 4. A named block may stay cached: a caller that finds it claimed takes another.
//!
//! CLOCK needs one bit for a block, which the map has. LRU needs 34 bytes more, S3-FIFO 27. `trial` measures which is
//! best for recorded uses.

use std::collections::VecDeque;
use std::fmt::Debug;
use std::str::FromStr;

use vellum_core::Error;

use crate::layout::{Key, mix};
use crate::map::Map;
use crate::table::{Table, entry_of};

/// The ways of replacement that there are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Replacement {
    /// Give up what was not used since a hand last passed it.
    #[default]
    Clock,
    /// Give up what was not used for the longest time.
    Lru,
    /// Three queues: what is used only once leaves a small first one quickly.
    S3Fifo,
}

impl Replacement {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Clock, Self::Lru, Self::S3Fifo];

    /// Its name on a command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Clock => "clock",
            Self::Lru => "lru",
            Self::S3Fifo => "s3-fifo",
        }
    }

    /// A policy that remembers at most this many keys.
    pub(crate) fn policy(self, keys_max: usize) -> Box<dyn Policy> {
        match self {
            Self::Clock => Box::new(Clock),
            Self::Lru => Box::new(Lru::new(keys_max)),
            Self::S3Fifo => Box::new(S3Fifo::new(keys_max)),
        }
    }
}

impl FromStr for Replacement {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        let found = Self::ALL.into_iter().find(|kind| kind.name() == name);
        found.ok_or_else(|| {
            Error::invalid(format!("no replacement is called {name:?}: use clock, lru or s3-fifo"))
        })
    }
}

/// Names blocks to give up.
pub(crate) trait Policy: Debug + Send {
    /// The block, which is cached, was used. `is_new`: it has just been put in.
    fn used(&mut self, map: &mut Map, key: Key, is_new: bool);

    /// Whether a use of a block that is not new means more than that the map's bit *seen* is set.
    fn orders_uses(&self) -> bool {
        false
    }

    /// The block, which is cached, is less worth than any other: what lies over it hides it.
    fn demoted(&mut self, map: &mut Map, key: Key);

    /// Up to `most` cached and clean blocks, which the caller gives up.
    fn victims(&mut self, map: &mut Map, most: usize) -> Vec<Key>;

    /// The memory beside the map, in bytes.
    fn memory_bytes(&self) -> u64;
}

/// How many groups or keys a call looks at, beside those that it names.
const LOOKS_MAX: usize = 4096;

/// The map's bit *seen*, and its hand.
#[derive(Debug)]
struct Clock;

impl Policy for Clock {
    fn used(&mut self, map: &mut Map, key: Key, is_new: bool) {
        if !is_new {
            map.set_seen(key, true);
        }
    }

    fn demoted(&mut self, map: &mut Map, key: Key) {
        map.set_seen(key, false);
    }

    fn victims(&mut self, map: &mut Map, most: usize) -> Vec<Key> {
        map.sweep(most, LOOKS_MAX)
    }

    fn memory_bytes(&self) -> u64 {
        0
    }
}

/// A key in the list of [`Lru`].
#[derive(Debug, Clone, Copy)]
struct Node {
    key: u64,
    /// Used after it, and before it.
    newer: u32,
    older: u32,
}

const NONE: u32 = u32::MAX;

/// A list in the order of the last use, and a table of where in it a key is. The map's bit *seen* says that a block
/// is in the list.
#[derive(Debug)]
struct Lru {
    nodes: Vec<Node>,
    free: Vec<u32>,
    /// Key, and the number of its node.
    index: Table<6>,
    newest: u32,
    oldest: u32,
    keys_max: usize,
}

/// Spreads the keys of the table. The map's own secret is not needed: the order of the list says all.
const LRU_SECRET: u64 = 0x6C72_755F_7365_6564;

impl Lru {
    const fn new(keys_max: usize) -> Self {
        Self {
            nodes: Vec::new(),
            free: Vec::new(),
            index: Table::new(),
            newest: NONE,
            oldest: NONE,
            keys_max: if keys_max == 0 { 1 } else { keys_max },
        }
    }

    fn node_of(&self, key: Key) -> Option<u32> {
        let place = self.index.find(LRU_SECRET, key.bits())?;
        let entry = self.index.at(place).expect("just found");
        Some(u32::from(entry[4]) << 16 | u32::from(entry[5]))
    }

    fn unlink(&mut self, number: u32) {
        let Node { newer, older, .. } = self.nodes[number as usize];
        match newer {
            NONE => self.newest = older,
            _ => self.nodes[newer as usize].older = older,
        }
        match older {
            NONE => self.oldest = newer,
            _ => self.nodes[older as usize].newer = newer,
        }
    }

    fn push(&mut self, number: u32) {
        let node = &mut self.nodes[number as usize];
        (node.newer, node.older) = (NONE, self.newest);
        match self.newest {
            NONE => self.oldest = number,
            newest => self.nodes[newest as usize].newer = number,
        }
        self.newest = number;
    }

    fn forget(&mut self, number: u32) -> Key {
        self.unlink(number);
        let key = self.nodes[number as usize].key;
        let place = self.index.find(LRU_SECRET, key).expect("each node is in the table");
        self.index.remove(LRU_SECRET, place);
        self.free.push(number);
        Key::from_bits(key)
    }
}

impl Policy for Lru {
    fn orders_uses(&self) -> bool {
        true
    }

    fn used(&mut self, map: &mut Map, key: Key, _: bool) {
        map.set_seen(key, true);
        if let Some(number) = self.node_of(key) {
            self.unlink(number);
            return self.push(number);
        }
        if self.index.len() == self.keys_max {
            let oldest = self.forget(self.oldest);
            map.set_seen(oldest, false);
        }
        let node = Node { key: key.bits(), newer: NONE, older: NONE };
        let number = match self.free.pop() {
            Some(number) => {
                self.nodes[number as usize] = node;
                number
            }
            None => {
                self.nodes.push(node);
                u32::try_from(self.nodes.len() - 1).expect("at most as many as there are slots")
            }
        };
        let place = self.index.insert(LRU_SECRET, entry_of(key.bits()));
        let entry = self.index.at_mut(place);
        (entry[4], entry[5]) = ((number >> 16) as u16, (number & 0xFFFF) as u16);
        self.push(number);
    }

    fn demoted(&mut self, map: &mut Map, key: Key) {
        map.set_seen(key, false);
        if let Some(number) = self.node_of(key) {
            self.forget(number);
        }
    }

    fn victims(&mut self, map: &mut Map, most: usize) -> Vec<Key> {
        let mut found = Vec::new();
        if (self.index.len() as u64) < map.blocks() {
            found = map.find_unseen(most, LOOKS_MAX);
        }
        let mut passed = Vec::new();
        let mut number = self.oldest;
        for _ in 0..most + LOOKS_MAX {
            if found.len() >= most || number == NONE {
                break;
            }
            let newer = self.nodes[number as usize].newer;
            let key = Key::from_bits(self.nodes[number as usize].key);
            match map.get(key) {
                None => drop(self.forget(number)),
                Some(entry) if entry.dirty => passed.push(number),
                Some(_) => {
                    // It is named. Where it stays cached, the hand of the map finds it.
                    self.forget(number);
                    map.set_seen(key, false);
                    found.push(key);
                }
            }
            number = newer;
        }
        if found.is_empty() {
            // All of them are dirty. The next call looks at others.
            for number in passed {
                self.unlink(number);
                self.push(number);
            }
        }
        found
    }

    fn memory_bytes(&self) -> u64 {
        let lists = self.nodes.capacity() * size_of::<Node>() + self.free.capacity() * size_of::<u32>();
        lists as u64 + self.index.memory_bytes()
    }
}

/// What of the cached blocks is in the small queue: a tenth.
const SMALL_SHARE: u64 = 10;

/// S3-FIFO (Yang et al., SOSP 2023), with the map's bit *seen* as the count of uses: a small queue for what is new, a
/// main one for what was used there, and fingerprints of what left the small one unused.
#[derive(Debug)]
struct S3Fifo {
    small: VecDeque<u64>,
    main: VecDeque<u64>,
    ghosts: Ghosts,
    keys_max: usize,
}

impl S3Fifo {
    fn new(keys_max: usize) -> Self {
        Self {
            small: VecDeque::new(),
            main: VecDeque::new(),
            ghosts: Ghosts::new(keys_max),
            keys_max: keys_max.max(16),
        }
    }

    fn len(&self) -> usize {
        self.small.len() + self.main.len()
    }

    /// The next key, and whether it comes from the small queue.
    fn pop(&mut self, map: &Map) -> Option<(u64, bool)> {
        let is_small = self.small.len() as u64 > map.blocks() / SMALL_SHARE || self.main.is_empty();
        let queue = if is_small { &mut self.small } else { &mut self.main };
        queue.pop_front().map(|key| (key, is_small))
    }
}

impl Policy for S3Fifo {
    fn used(&mut self, map: &mut Map, key: Key, is_new: bool) {
        if !is_new {
            return map.set_seen(key, true);
        }
        // Keys of blocks that went in another way stay in the queues until they come to the front.
        if self.len() >= self.keys_max {
            self.small.pop_front().or_else(|| self.main.pop_front());
        }
        let was_here = self.ghosts.take(key);
        let queue = if was_here { &mut self.main } else { &mut self.small };
        queue.push_back(key.bits());
    }

    fn demoted(&mut self, map: &mut Map, key: Key) {
        map.set_seen(key, false);
    }

    fn victims(&mut self, map: &mut Map, most: usize) -> Vec<Key> {
        let mut found = Vec::new();
        // More than a sixteenth is in no queue: what a recovery found.
        if (self.len() as u64) < map.blocks() - map.blocks() / 16 {
            found = map.sweep(most, LOOKS_MAX);
        }
        for _ in 0..most + LOOKS_MAX {
            if found.len() >= most {
                break;
            }
            let Some((bits, is_small)) = self.pop(map) else { break };
            let key = Key::from_bits(bits);
            let Some(entry) = map.get(key) else { continue };
            if map.is_seen(key) {
                map.set_seen(key, false);
                self.main.push_back(bits);
            } else if entry.dirty {
                let queue = if is_small { &mut self.small } else { &mut self.main };
                queue.push_back(bits);
            } else {
                if is_small {
                    self.ghosts.add(key, map.blocks());
                }
                found.push(key);
            }
        }
        // A block that left in another way and came back is in a queue twice.
        found.sort_unstable();
        found.dedup();
        if found.is_empty() { map.sweep(most, LOOKS_MAX) } else { found }
    }

    fn memory_bytes(&self) -> u64 {
        let keys = self.small.capacity() + self.main.capacity();
        keys as u64 * size_of::<u64>() as u64 + self.ghosts.memory_bytes()
    }
}

/// Fingerprints of keys that left, and when. Each has four places that it may be in.
#[derive(Debug)]
struct Ghosts {
    /// Fingerprint, and the count of those that had left by then.
    sets: Vec<[(u32, u32); 4]>,
    left: u32,
    /// For how many departures a fingerprint counts.
    span: u32,
}

const GHOST_SECRET: u64 = 0x6768_6F73_7473_0000;

impl Ghosts {
    fn new(keys_max: usize) -> Self {
        let sets = (keys_max / 4).clamp(1, 1 << 26);
        Self { sets: vec![[(0, 0); 4]; sets], left: 1, span: 1 }
    }

    fn place(&self, key: Key) -> (usize, u32) {
        let hash = mix(GHOST_SECRET, key);
        let set = ((hash >> 32) * self.sets.len() as u64) >> 32;
        (usize::try_from(set).expect("below the number of sets"), (hash & 0xFFFF_FFFF) as u32 | 1)
    }

    fn add(&mut self, key: Key, blocks: u64) {
        self.span = u32::try_from(blocks).unwrap_or(u32::MAX).max(1);
        self.left = self.left.wrapping_add(1);
        let (set, print) = self.place(key);
        let left = self.left;
        let oldest = self.sets[set].iter_mut().max_by_key(|(_, at)| left.wrapping_sub(*at));
        *oldest.expect("a set has four places") = (print, left);
    }

    /// Whether the key left not long ago. It is forgotten.
    fn take(&mut self, key: Key) -> bool {
        let (set, print) = self.place(key);
        let (left, span) = (self.left, self.span);
        let found =
            self.sets[set].iter_mut().find(|(other, at)| *other == print && left.wrapping_sub(*at) < span);
        found.map(|place| *place = (0, 0)).is_some()
    }

    const fn memory_bytes(&self) -> u64 {
        (self.sets.capacity() * size_of::<[(u32, u32); 4]>()) as u64
    }
}

#[cfg(test)]
mod tests;
