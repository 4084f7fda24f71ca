//! What each sector may hold after a crash.
//!
//! Every event takes the next tick of one clock: a request before it is sent, its answer after it has come. A
//! write is *durable* when it was answered and had FUA, or when a flush that was sent after its answer was
//! answered itself. A sector may hold what a write gave it unless a durable write was sent after that write's
//! answer.

use std::collections::BTreeMap;
use std::sync::Mutex;

pub const SECTOR: usize = 512;

/// The content that a write gives its sectors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// What was there when the model began.
    First,
    /// A pattern of its own for each write and sector.
    Pattern,
    /// Bytes that another program chose.
    Data,
    Zero,
    /// Zeros, or what was there: a trim is only a hint.
    Hint,
}

#[derive(Debug, Clone, Copy)]
struct Write {
    content: Content,
    fua: bool,
    sent: u64,
    answered: Option<u64>,
}

#[derive(Default)]
struct State {
    clock: u64,
    writes: Vec<Write>,
    /// For each sector, the writes to it.
    sectors: Vec<Vec<usize>>,
    /// The first sector and the bytes of each write of [`Content::Data`].
    data: BTreeMap<usize, (usize, Vec<u8>)>,
    /// When the last of the answered flushes was sent.
    flush_sent: u64,
}

/// The history of a disk since it was last checked.
pub struct Model {
    first: Vec<u8>,
    salt: u64,
    state: Mutex<State>,
}

impl Model {
    /// The disk reads as `first`, durably. Patterns of models with different salts differ.
    pub fn new(first: Vec<u8>, salt: u64) -> Self {
        let beginning = Write { content: Content::First, fua: true, sent: 0, answered: Some(0) };
        let sectors = vec![vec![0]; first.len() / SECTOR];
        let state = State { writes: vec![beginning], sectors, ..State::default() };
        Self { first, salt, state: Mutex::new(state) }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().expect("nobody fails while holding it")
    }

    pub fn sectors(&self) -> usize {
        self.first.len() / SECTOR
    }

    /// A write is about to be sent. Returns its number.
    pub fn write_sent(&self, sector: usize, count: usize, content: Content, fua: bool) -> usize {
        Self::note(&mut self.state(), sector, count, content, fua)
    }

    /// A write of these bytes, whole sectors, is about to be sent. Returns its number.
    pub fn data_sent(&self, sector: usize, bytes: Vec<u8>, fua: bool) -> usize {
        let mut state = self.state();
        let number = Self::note(&mut state, sector, bytes.len() / SECTOR, Content::Data, fua);
        state.data.insert(number, (sector, bytes));
        number
    }

    fn note(state: &mut State, sector: usize, count: usize, content: Content, fua: bool) -> usize {
        state.clock += 1;
        let (number, sent) = (state.writes.len(), state.clock);
        state.writes.push(Write { content, fua, sent, answered: None });
        for history in &mut state.sectors[sector..sector + count] {
            history.push(number);
        }
        number
    }

    pub fn write_answered(&self, number: usize) {
        let mut state = self.state();
        state.clock += 1;
        state.writes[number].answered = Some(state.clock);
    }

    /// A flush is about to be sent. Returns the moment.
    pub fn flush_sent(&self) -> u64 {
        let mut state = self.state();
        state.clock += 1;
        state.clock
    }

    pub fn flush_answered(&self, sent: u64) {
        let mut state = self.state();
        state.flush_sent = state.flush_sent.max(sent);
    }

    /// How many writes were answered, and how many were not.
    pub fn counts(&self) -> (usize, usize) {
        let state = self.state();
        let answered = state.writes[1..].iter().filter(|write| write.answered.is_some()).count();
        (answered, state.writes.len() - 1 - answered)
    }

    /// The bytes of a write, from its first sector on.
    pub fn bytes(&self, number: usize, sector: usize, count: usize) -> Vec<u8> {
        (sector..sector + count).flat_map(|sector| self.pattern(number, sector)).collect()
    }

    fn pattern(&self, number: usize, sector: usize) -> [u8; SECTOR] {
        let mut bytes = [0; SECTOR];
        let mut word = self.salt ^ ((number as u64) << 32) ^ (sector as u64);
        for chunk in bytes.chunks_exact_mut(8) {
            // The mixing step of splitmix64.
            word = word.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mixed = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            chunk.copy_from_slice(&(mixed ^ (mixed >> 27)).to_le_bytes());
        }
        bytes
    }

    /// Checks the disk after a crash. The error names the first sector that holds what it must not.
    pub fn judge(&self, disk: &[u8]) -> Result<(), String> {
        if disk.len() != self.first.len() {
            return Err(format!("the disk has {} bytes, it had {}", disk.len(), self.first.len()));
        }
        let state = self.state();
        for (sector, (found, history)) in disk.chunks_exact(SECTOR).zip(&state.sectors).enumerate() {
            let is_durable = |write: &Write| {
                write.content != Content::Hint
                    && write.answered.is_some_and(|answered| write.fua || answered < state.flush_sent)
            };
            let writes = || history.iter().map(|number| (*number, state.writes[*number]));
            let durable_sent =
                writes().filter(|(_, write)| is_durable(write)).map(|(_, write)| write.sent).max();
            let durable_sent = durable_sent.expect("the beginning is durable");
            let holds = |number: usize, content: Content| match content {
                Content::First => found == &self.first[sector * SECTOR..][..SECTOR],
                Content::Data => {
                    let (first, bytes) = &state.data[&number];
                    found == &bytes[(sector - first) * SECTOR..][..SECTOR]
                }
                Content::Pattern => found == self.pattern(number, sector),
                Content::Zero | Content::Hint => found.iter().all(|byte| *byte == 0),
            };
            let is_good = writes().any(|(number, write)| {
                write.answered.is_none_or(|answered| answered >= durable_sent) && holds(number, write.content)
            }) || writes()
                .any(|(number, write)| write.sent == durable_sent && holds(number, write.content));
            if !is_good {
                let was = writes().find(|(number, write)| holds(*number, write.content));
                return Err(format!(
                    "sector {sector} holds {}; a write sent at {durable_sent} was durable; last flush sent at {}; its \
                     writes: {:?}",
                    was.map_or_else(
                        || format!("{:x?}, which nobody wrote", &found[..16]),
                        |(n, w)| format!("{n}: {w:?}")
                    ),
                    state.flush_sent,
                    writes().collect::<Vec<_>>()
                ));
            }
        }
        Ok(())
    }
}

#[test]
fn old_or_new_and_nothing_else() {
    let model = Model::new(vec![7; 4 * SECTOR], 1);
    let first = vec![7; 4 * SECTOR];
    assert_eq!(model.judge(&first), Ok(()));
    let one = model.write_sent(1, 2, Content::Pattern, false);
    let mut torn = first.clone();
    torn[SECTOR..2 * SECTOR].copy_from_slice(&model.bytes(one, 1, 1));
    assert_eq!(model.judge(&first), Ok(()));
    assert_eq!(model.judge(&torn), Ok(()), "old or new for each sector");
    model.write_answered(one);
    assert_eq!(model.judge(&first), Ok(()), "no flush yet");
    let flush = model.flush_sent();
    assert_eq!(model.judge(&torn), Ok(()), "the flush is not answered yet");
    model.flush_answered(flush);
    assert!(model.judge(&torn).is_err(), "sector 2 is lost");
    torn[2 * SECTOR..3 * SECTOR].copy_from_slice(&model.bytes(one, 2, 1));
    assert_eq!(model.judge(&torn), Ok(()));
    let two = model.write_sent(2, 1, Content::Zero, true);
    let mut zeroed = torn.clone();
    zeroed[2 * SECTOR..3 * SECTOR].fill(0);
    assert_eq!(model.judge(&torn), Ok(()));
    assert_eq!(model.judge(&zeroed), Ok(()));
    model.write_answered(two);
    assert!(model.judge(&torn).is_err(), "FUA");
    assert_eq!(model.judge(&zeroed), Ok(()));
    zeroed[0] = 8;
    assert!(model.judge(&zeroed).is_err(), "nobody wrote it");
}
