//! One page of the view: where each byte of 2 MiB of the guest is. No I/O.
//!
//! ```text
//!   depth 1   ██░░░░██████░░░░░░      each image has only its own bytes
//!   depth 2   ░░██░░░░░░░░░░██░░
//!   depth 3   ████████████░░          and this one is shorter
//!   runs      1 2 3 1     3 2 zero    the first image from above that has the bytes
//! ```
//!
//! 1. The runs begin at 0, ascend, and cover the page; each ends where the next begins.
//! 2. Neighbours that continue each other are one run.

use std::ops::Range;

use vellum_core::{BlockSize, ImageOffset};

/// The length of a page: a few runs of large clusters, and an amount that each image answers for quickly.
pub(super) const PAGE: BlockSize = BlockSize::from_shift(21);

/// What holds the bytes of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Holder {
    /// They are zero.
    Zero,
    /// The storage of the image at this index, from a place on.
    Storage(u16),
    /// The disk of the image at this index reads them itself: they are compressed there.
    Disk(u16),
}

/// Bytes of one holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Run {
    /// The first byte, within the page.
    start: u32,
    holder: Holder,
    /// Where the first byte is in its storage; without meaning elsewhere.
    place: u64,
}

/// A run, or a part of one, that a request reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) len: u64,
    pub(super) holder: Holder,
    /// Where the first byte is in its storage; without meaning elsewhere.
    pub(super) place: ImageOffset,
}

/// Where the bytes of a page are.
#[derive(Debug)]
pub(super) struct Page {
    runs: Box<[Run]>,
    len: u32,
}

impl Page {
    /// What it takes in memory, in bytes, with its entry among the pages.
    pub(super) fn memory(&self) -> u64 {
        const ENTRY: usize = 128;
        (ENTRY + size_of_val(&*self.runs)) as u64
    }

    /// The parts of a range of the page, in order.
    pub(super) fn parts(&self, range: Range<u32>) -> impl Iterator<Item = Part> {
        let first = self.runs.partition_point(|run| run.start <= range.start).saturating_sub(1);
        let ends = self.runs[first..].iter().skip(1).map(|next| next.start).chain([self.len]);
        let inside = self.runs[first..].iter().zip(ends).take_while(move |(run, _)| run.start < range.end);
        inside.map(move |(run, end)| {
            let start = run.start.max(range.start);
            let end = end.min(range.end);
            let place = ImageOffset::new(run.place + u64::from(start - run.start));
            Part { len: u64::from(end - start), holder: run.holder, place }
        })
    }
}

/// A page that is being made: image after image is asked for the bytes that none above it has.
#[derive(Debug)]
pub(super) struct Draft {
    found: Vec<Run>,
    /// What no image had so far, in order.
    holes: Vec<Range<u32>>,
    len: u32,
}

impl Draft {
    /// Nothing is known of a page of this many bytes.
    pub(super) fn new(len: u32) -> Self {
        Self { found: Vec::new(), holes: non_empty(0..len).into_iter().collect(), len }
    }

    /// The shortest range with all bytes that no image had; `None` when there are none left.
    pub(super) fn wanted(&self) -> Option<Range<u32>> {
        Some(self.holes.first()?.start..self.holes.last()?.end)
    }

    /// The next image has the bytes of these ranges, which ascend. Those that an image above it has are not
    /// taken.
    pub(super) fn lay_under(&mut self, has: impl IntoIterator<Item = (Range<u32>, Holder, u64)>) {
        let mut left = Vec::with_capacity(self.holes.len());
        let mut holes = std::mem::take(&mut self.holes).into_iter();
        let mut hole = holes.next();
        for (range, holder, place) in has {
            while let Some(now) = hole.clone().filter(|hole| hole.start < range.end) {
                let (start, end) = (now.start.max(range.start), now.end.min(range.end));
                if start < end {
                    left.extend(non_empty(now.start..start));
                    self.found.push(Run { start, holder, place: place + u64::from(start - range.start) });
                    hole = non_empty(end..now.end).or_else(|| holes.next());
                } else {
                    left.push(now);
                    hole = holes.next();
                }
            }
        }
        left.extend(hole);
        left.extend(holes);
        self.holes = left;
    }

    /// The page: what no image had is zero.
    pub(super) fn finish(self) -> Page {
        let Self { mut found, holes, len } = self;
        found.extend(holes.into_iter().map(|hole| Run { start: hole.start, holder: Holder::Zero, place: 0 }));
        found.sort_unstable_by_key(|run| run.start);
        found.dedup_by(|next, run| continues(run, next));
        Page { runs: found.into_boxed_slice(), len }
    }
}

fn non_empty(range: Range<u32>) -> Option<Range<u32>> {
    (!range.is_empty()).then_some(range)
}

/// Whether the bytes of the next run follow those of this one in the same place.
fn continues(run: &Run, next: &Run) -> bool {
    run.holder == next.holder
        && match run.holder {
            Holder::Zero | Holder::Disk(_) => true,
            Holder::Storage(_) => run.place + u64::from(next.start - run.start) == next.place,
        }
}

#[cfg(test)]
mod tests {
    use vellum_core::Random;

    use super::*;

    #[test]
    fn the_first_image_that_has_the_bytes_counts() {
        let mut draft = Draft::new(1000);
        assert_eq!(draft.wanted(), Some(0..1000));
        draft.lay_under([(100..200, Holder::Storage(0), 7000), (300..400, Holder::Zero, 0)]);
        assert_eq!(draft.wanted(), Some(0..1000));
        draft.lay_under([(0..350, Holder::Storage(1), 0)]);
        assert_eq!(draft.wanted(), Some(400..1000));
        draft.lay_under([(0..500, Holder::Disk(2), 0), (500..900, Holder::Disk(2), 0)]);
        assert_eq!(draft.wanted(), Some(900..1000));
        let page = draft.finish();
        let holders: Vec<(u64, Holder)> = page.parts(0..1000).map(|part| (part.len, part.holder)).collect();
        let (first, second, third) = (Holder::Storage(0), Holder::Storage(1), Holder::Disk(2));
        let expected = [
            (100, second),
            (100, first),
            (100, second),
            (100, Holder::Zero),
            (500, third),
            (100, Holder::Zero),
        ];
        assert_eq!(holders, expected);
        let part = |len, holder, place| Part { len, holder, place: ImageOffset::new(place) };
        let some: Vec<Part> = page.parts(150..250).collect();
        assert_eq!(some, [part(50, first, 7050), part(50, second, 200)]);
        assert_eq!(page.parts(320..330).count(), 1);
        assert_eq!(page.parts(999..1000).count(), 1);
        assert_eq!(page.parts(5..5).map(|part| part.len).sum::<u64>(), 0);
    }

    #[test]
    fn runs_that_continue_each_other_are_one() {
        let mut draft = Draft::new(4096);
        draft.lay_under((0..8).map(|i| (i * 512..(i + 1) * 512, Holder::Storage(0), u64::from(i) * 512 + 9)));
        assert_eq!(draft.wanted(), None);
        assert_eq!(draft.finish().runs.len(), 1);
        let mut draft = Draft::new(1024);
        draft.lay_under([(0..512, Holder::Storage(0), 512), (512..1024, Holder::Storage(0), 0)]);
        assert_eq!(draft.finish().runs.len(), 2, "in the other order in the storage");
    }

    /// What an image has of a page: ranges, and beside them each byte for itself.
    fn any_image(
        random: &mut Random,
        image: u16,
        bytes: &mut [Option<(Holder, u64)>],
    ) -> Vec<(Range<u32>, Holder, u64)> {
        let mut has = Vec::new();
        let (mut at, len) = (0, u32::try_from(bytes.len()).unwrap());
        while at < len {
            let end = (at + 1 + u32::try_from(random.below(60)).unwrap()).min(len);
            let holders = [None, Some(Holder::Zero), Some(Holder::Storage(image)), Some(Holder::Disk(image))];
            if let Some(holder) = *random.pick(&holders) {
                let place = random.below(1 << 40);
                has.push((at..end, holder, place));
                for byte in at..end {
                    bytes[byte as usize].get_or_insert((holder, place + u64::from(byte - at)));
                }
            }
            at = end;
        }
        has
    }

    #[test]
    fn any_images_lie_over_each_other_as_a_search_byte_by_byte_finds() {
        const LEN: u32 = 300;
        for seed in 0..2000 {
            let mut random = Random::from_seed(seed);
            let mut draft = Draft::new(LEN);
            let mut bytes: Vec<Option<(Holder, u64)>> = vec![None; LEN as usize];
            for image in 0..u16::try_from(random.below(6)).unwrap() {
                draft.lay_under(any_image(&mut random, image, &mut bytes));
            }
            let page = draft.finish();
            let mut at = 0;
            for part in page.parts(0..LEN) {
                for byte in at..at + part.len {
                    let (holder, place) = bytes[usize::try_from(byte).unwrap()].unwrap_or((Holder::Zero, 0));
                    assert_eq!(part.holder, holder, "seed {seed}, byte {byte}");
                    if let Holder::Storage(_) = holder {
                        assert_eq!(part.place.bytes() + (byte - at), place, "seed {seed}, byte {byte}");
                    }
                }
                at += part.len;
            }
            assert_eq!(at, u64::from(LEN), "seed {seed}");
            let start = u32::try_from(random.below(LEN.into())).unwrap();
            let end = start + u32::try_from(random.below((LEN - start).into())).unwrap();
            let len: u64 = page.parts(start..end).map(|part| part.len).sum();
            assert_eq!(len, u64::from(end - start), "seed {seed}: {start}..{end}");
        }
    }
}
