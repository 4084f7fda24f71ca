//! What a guest does while crashes are explored: short programs of all kinds, long random ones, and their
//! names.
//!
//! ```text
//!   w4k@0 flush fua@2 reopen          one queue, four steps
//!   w512@0 flush | zero@1 flush       two queues side by side
//! ```
//!
//! A name is a seed: it always yields the same program, with the same bytes in every write.

use std::fmt;
use std::str::FromStr;

use vellum_core::{
    Buffer, Disk, GuestOffset, GuestSpan, Random, Result, WriteFlags, ZeroFlags, fill_from_below,
};

use crate::mix::mix;

/// What is done at a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Act {
    /// One sector.
    Write512,
    /// One block.
    Write4k,
    /// Many clusters, or one.
    Write64k,
    /// 5,000 bytes that begin and end within sectors.
    Odd,
    /// A block that is durable when it returns.
    Fua,
    /// Zeros over a block and a half.
    Zero,
    /// A discard of two blocks.
    Discard,
    /// A discard of 64 KiB: a whole unit where units are large. Never drawn at random; a test that wants it
    /// names it.
    Drop64k,
    /// 140,001 bytes that begin and end within sectors: over several units, and more than some formats write
    /// at once. Never drawn.
    Long,
    /// Zeros over a block and a half whose space is kept. Never drawn.
    Keep,
    /// Zeros over a block and a half that are durable when it returns. Never drawn.
    ZeroFua,
    /// A discard of two blocks that is durable when it returns. Never drawn.
    DiscardFua,
    /// Zeros from within a block on over more than two units. Never drawn.
    Zero160k,
    /// A discard over more than two units. Never drawn.
    Drop160k,
    /// A copy of one block of the disk below. Never drawn.
    Fill4k,
    /// A copy of 64 KiB of the disk below. Never drawn.
    Fill64k,
    /// A copy of what lies below of more than two units. Never drawn.
    Fill160k,
}

impl Act {
    const ALL: [(Self, &'static str); 7] = [
        (Self::Write512, "w512"),
        (Self::Write4k, "w4k"),
        (Self::Write64k, "w64k"),
        (Self::Odd, "odd"),
        (Self::Fua, "fua"),
        (Self::Zero, "zero"),
        (Self::Discard, "discard"),
    ];

    /// What only a program that names it has.
    const NAMED: [(Self, &'static str); 10] = [
        (Self::Drop64k, "drop64k"),
        (Self::Long, "long"),
        (Self::Keep, "keep"),
        (Self::ZeroFua, "zfua"),
        (Self::DiscardFua, "dfua"),
        (Self::Zero160k, "zero160k"),
        (Self::Drop160k, "drop160k"),
        (Self::Fill4k, "fill4k"),
        (Self::Fill64k, "fill64k"),
        (Self::Fill160k, "fill160k"),
    ];

    fn named() -> impl Iterator<Item = (Self, &'static str)> {
        Self::ALL.into_iter().chain(Self::NAMED)
    }

    fn span(self, place: GuestOffset, size: u64) -> GuestSpan {
        let (skip, len) = match self {
            Self::Write512 => (1024, 512),
            Self::Write4k | Self::Fua | Self::Fill4k => (0, 4096),
            Self::Write64k | Self::Fill64k => (0, 65_536),
            Self::Odd => (300, 5000),
            Self::Zero | Self::Keep | Self::ZeroFua => (2048, 6144),
            Self::Discard | Self::DiscardFua => (0, 8192),
            Self::Drop64k => (0, 65_536),
            Self::Long => (300, 140_001),
            Self::Zero160k => (2048, 163_840),
            Self::Drop160k | Self::Fill160k => (0, 163_840),
        };
        let start = place.bytes() + skip;
        GuestOffset::new(start).span(len.min(size.saturating_sub(start)))
    }
}

/// One step of a program. A place is a number, to which the subject gives its meaning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Step {
    /// Something is done at a place.
    At(Act, usize),
    /// What has returned becomes durable.
    Flush,
    /// The disk is closed and opened again; in a program of several queues, a flush.
    Reopen,
}

/// What each queue does, step by step.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Program {
    /// One list for each queue.
    pub queues: Vec<Vec<Step>>,
}

impl Step {
    /// Every step at each of the first `places` places.
    pub fn all(places: usize) -> Vec<Self> {
        let acts = (0..places).flat_map(|place| Act::ALL.map(|(act, _)| Self::At(act, place)));
        acts.chain([Self::Flush, Self::Reopen]).collect()
    }

    /// Performs the step on a disk. `seed` determines the bytes of a write. The caller does a reopening
    /// itself.
    pub(crate) async fn perform(self, disk: &dyn Disk, places: &[GuestOffset], seed: u64) -> Result<()> {
        let Self::At(act, place) = self else { return disk.flush().await };
        let span = act.span(places[place % places.len()], disk.geometry().size);
        match act {
            Act::Zero | Act::Zero160k | Act::Keep | Act::ZeroFua => {
                let (may_unmap, fua) = (act != Act::Keep, act == Act::ZeroFua);
                disk.write_zeroes(span, ZeroFlags { may_unmap, fua, ..ZeroFlags::default() }).await
            }
            Act::Discard | Act::Drop64k | Act::Drop160k | Act::DiscardFua => {
                disk.discard(span, WriteFlags { fua: act == Act::DiscardFua }).await
            }
            // What is not copied is read from below, as before.
            Act::Fill4k | Act::Fill64k | Act::Fill160k => fill_from_below(disk, span).await.map(drop),
            _ => {
                let mut bytes = vec![0; usize::try_from(span.len()).expect("small")];
                fill(&mut bytes, seed);
                let flags = WriteFlags { fua: act == Act::Fua };
                disk.write(span.start(), Buffer::copy_of(&bytes), flags).await
            }
        }
    }
}

/// Eight bytes, repeated, distinguish each sector from every other, so that it can be packed; in one write of
/// four the whole sector is unique.
fn fill(bytes: &mut [u8], seed: u64) {
    let mut random = Random::from_seed(seed);
    if mix(seed, 4).is_multiple_of(4) {
        return random.fill(bytes);
    }
    for sector in bytes.chunks_mut(512) {
        let mut stamp = [0; 8];
        random.fill(&mut stamp);
        for part in sector.chunks_mut(8) {
            part.copy_from_slice(&stamp[..part.len()]);
        }
    }
}

impl Program {
    /// A program of one queue.
    pub fn single(steps: impl Into<Vec<Step>>) -> Self {
        Self { queues: vec![steps.into()] }
    }

    /// All programs of one queue and this many steps.
    pub fn all(len: u32, places: usize) -> impl Iterator<Item = Self> {
        let steps = Step::all(places);
        let count = steps.len().pow(len);
        (0..count).map(move |number| {
            let mut rest = number;
            let mut chosen = Vec::new();
            for _ in 0..len {
                chosen.push(steps[rest % steps.len()]);
                rest /= steps.len();
            }
            chosen.reverse();
            Self::single(chosen)
        })
    }

    /// A random program: this many queues of this many steps, with more flushes than an even chance would
    /// give.
    pub fn random(random: &mut Random, queues: usize, len: usize, places: usize) -> Self {
        let steps = Step::all(places);
        let mut step = || match random.below(8) {
            0 => Step::Flush,
            _ => *random.pick(&steps),
        };
        Self { queues: (0..queues).map(|_| (0..len).map(|_| step()).collect()).collect() }
    }

    /// The seed of the bytes that a step writes: the same in every program with this step in this place.
    pub(crate) fn seed_of(queue: usize, step: usize) -> u64 {
        mix(queue as u64 + 1, step as u64 + 1)
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flush => write!(f, "flush"),
            Self::Reopen => write!(f, "reopen"),
            Self::At(act, place) => {
                let name = Act::named().find(|(known, _)| known == act).expect("all are listed").1;
                write!(f, "{name}@{place}")
            }
        }
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, queue) in self.queues.iter().enumerate() {
            if number > 0 {
                write!(f, " | ")?;
            }
            let steps: Vec<String> = queue.iter().map(Step::to_string).collect();
            write!(f, "{}", steps.join(" "))?;
        }
        Ok(())
    }
}

impl FromStr for Step {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        match word {
            "flush" => return Ok(Self::Flush),
            "reopen" => return Ok(Self::Reopen),
            _ => {}
        }
        let wrong = || format!("{word} is no step; steps are flush, reopen, and NAME@PLACE such as w4k@0");
        let (name, place) = word.split_once('@').ok_or_else(wrong)?;
        let act = Act::named().find(|(_, known)| *known == name).ok_or_else(wrong)?.0;
        Ok(Self::At(act, place.parse().map_err(|_| wrong())?))
    }
}

impl FromStr for Program {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let queue =
            |part: &str| part.split_whitespace().map(str::parse).collect::<Result<Vec<Step>, String>>();
        let queues = text.split('|').map(queue).collect::<Result<Vec<_>, String>>()?;
        Ok(Self { queues })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_a_program() {
        for program in Program::all(2, 3).step_by(7) {
            assert_eq!(program.to_string().parse(), Ok(program));
        }
        let mut random = Random::from_seed(1);
        let program = Program::random(&mut random, 3, 20, 8);
        assert_eq!(program.to_string().parse(), Ok(program));
        assert!("w4k@x".parse::<Program>().is_err());
    }

    #[test]
    fn all_programs_are_all_different() {
        let mut all: Vec<String> = Program::all(2, 3).map(|program| program.to_string()).collect();
        let count = all.len();
        all.sort();
        all.dedup();
        assert_eq!((count, all.len()), (23 * 23, 23 * 23));
    }
}
