//! What is known of an image's tables beside what flash has of them: which sectors have changed since, and which are zero.
//!
//! ```text
//!   window   64 KiB of the image, or a table if that is shorter; known from the first read on
//!     zero     these sectors read as zero               before anything else
//!     changed  flash has them older, or may have        the image is read
//!     neither                                           flash, if it has them
//! ```
//!
//! 1. A sector counts as changed from before its change reaches the image. That ends only when the window's blocks have been
//!    given up and were read anew, with no change of the window under way at any time in between.
//! 2. A sector is known to be zero only if it was read so, with no change of the window under way meanwhile; until its next change.
//! 3. A window that becomes known while changes of it are under way begins with their sectors changed.
//! 4. A change that is dropped half way is under way for ever: it may still happen at any time.
//! 5. All images together know only as many windows as there is memory for ([`Room`]). One image takes no more than what it
//!    leaves for others, so each gets some.
//!
//! Pure. Left out: where blocks are (`map`).

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use crate::layout::SECTOR_BYTES;
use crate::windows::Room;

/// A window that has changed is read anew after this many reads of what has changed in it.
const READS_MAX: u32 = 256;

/// Where some bytes of a window are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    /// They are zero.
    Zero,
    /// Flash, if it has them; else the whole window is read, and kept.
    Flash,
    /// The image alone: flash has them older.
    Image,
    /// The image: the whole window, which is kept in place of what flash has.
    Anew,
}

#[derive(Debug, Clone, Copy, Default)]
struct Window {
    changed: u128,
    zero: u128,
    reads: u32,
}

struct UnderWay {
    sectors: Range<u64>,
    is_change: bool,
    is_anew: bool,
    /// A change of some of these sectors was under way at the same time.
    is_disturbed: bool,
}

/// What is known. Sectors are counted from the beginning of the image.
pub(crate) struct Known {
    sectors: u64,
    room: Arc<Room>,
    windows: BTreeMap<u64, Window>,
    under_way: BTreeMap<u64, UnderWay>,
    begun: u64,
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

impl Known {
    /// Nothing is known, of windows of this many bytes: a power of two, up to 64 KiB.
    pub(crate) fn new(window_bytes: u64, room: Arc<Room>) -> Self {
        let sectors = window_bytes / SECTOR_BYTES;
        assert!(sectors.is_power_of_two() && sectors <= 128, "a mask has a bit for each sector");
        Self { sectors, room, windows: BTreeMap::new(), under_way: BTreeMap::new(), begun: 0 }
    }

    fn window_span(&self, window: u64) -> Range<u64> {
        window * self.sectors..(window + 1) * self.sectors
    }

    /// The bits of the sectors that lie in a window.
    fn mask(&self, window: u64, sectors: &Range<u64>) -> u128 {
        let span = self.window_span(window);
        let (first, end) = (sectors.start.max(span.start), sectors.end.min(span.end));
        if first >= end {
            return 0;
        }
        (u128::MAX >> (128 - (end - first))) << (first - span.start)
    }

    /// The window is known from here on. False when there are too many.
    pub(crate) fn note(&mut self, window: u64) -> bool {
        if self.windows.contains_key(&window) {
            return true;
        }
        if !self.room.take(self.windows.len() as u64) {
            return false;
        }
        let changes = self.under_way.values().filter(|one| one.is_change);
        let changed = changes.fold(0, |changed, one| changed | self.mask(window, &one.sectors));
        self.windows.insert(window, Window { changed, ..Window::default() });
        true
    }

    /// Where these sectors of one window are read.
    pub(crate) fn find(&mut self, window: u64, sectors: &Range<u64>) -> Source {
        if !self.note(window) {
            return Source::Image;
        }
        let mask = self.mask(window, sectors);
        let known = self.windows.get_mut(&window).expect("it is known");
        if known.zero & mask == mask {
            return Source::Zero;
        }
        if known.changed & mask == 0 {
            return Source::Flash;
        }
        known.reads += 1;
        if known.reads < READS_MAX {
            return Source::Image;
        }
        known.reads = 0;
        Source::Anew
    }

    fn begin(&mut self, sectors: Range<u64>, is_change: bool, is_anew: bool) -> u64 {
        let mut others = self.under_way.values().filter(|one| overlap(&one.sectors, &sectors));
        let is_disturbed = others.any(|one| one.is_change);
        self.begun += 1;
        self.under_way.insert(self.begun, UnderWay { sectors, is_change, is_anew, is_disturbed });
        self.begun
    }

    /// These sectors are about to change.
    pub(crate) fn begin_change(&mut self, sectors: Range<u64>) -> u64 {
        for one in self.under_way.values_mut().filter(|one| overlap(&one.sectors, &sectors)) {
            one.is_disturbed = true;
        }
        if sectors.start < sectors.end {
            let windows = sectors.start / self.sectors..sectors.end.div_ceil(self.sectors);
            let known: Vec<u64> = self.windows.range(windows).map(|(window, _)| *window).collect();
            for window in known {
                let mask = self.mask(window, &sectors);
                let known = self.windows.get_mut(&window).expect("it was found");
                known.changed |= mask;
                known.zero &= !mask;
            }
        }
        self.begin(sectors, true, false)
    }

    /// The change has ended, well or not.
    pub(crate) fn end_change(&mut self, number: u64) {
        self.under_way.remove(&number);
    }

    /// The window is about to be read as a whole. If anew, what flash has of it is given up after this.
    pub(crate) fn begin_fetch(&mut self, window: u64, is_anew: bool) -> u64 {
        self.begin(self.window_span(window), false, is_anew)
    }

    /// It was read, and these sectors are zero.
    pub(crate) fn end_fetch(&mut self, number: u64, zero: u128) {
        let Some(fetch) = self.under_way.remove(&number) else { return };
        if fetch.is_disturbed {
            return;
        }
        if let Some(known) = self.windows.get_mut(&(fetch.sectors.start / self.sectors)) {
            known.zero |= zero;
            if fetch.is_anew {
                known.changed = 0;
            }
        }
    }

    /// It was not read.
    pub(crate) fn give_up_fetch(&mut self, number: u64) {
        self.under_way.remove(&number);
    }

    /// Whether nothing changes now.
    pub(crate) fn is_quiet(&self) -> bool {
        !self.under_way.values().any(|one| one.is_change)
    }

    /// Runs of sectors that flash has older, or may have.
    pub(crate) fn changed(&self) -> Vec<Range<u64>> {
        let mut runs: Vec<Range<u64>> = Vec::new();
        for (window, known) in &self.windows {
            let first = window * self.sectors;
            let mut rest = known.changed;
            while rest != 0 {
                let skip = u64::from(rest.trailing_zeros());
                let len = u64::from((rest >> skip).trailing_ones());
                runs.push(first + skip..first + skip + len);
                rest &= !self.mask(*window, &(first + skip..first + skip + len));
            }
        }
        runs
    }
}

impl Drop for Known {
    fn drop(&mut self) {
        self.room.give_back(self.windows.len() as u64);
    }
}

#[cfg(test)]
mod tests {
    use vellum_core::Random;

    use super::*;
    use crate::windows::{WINDOW_BYTES, WINDOWS_MAX, WINDOWS_MIN};

    fn room() -> Arc<Room> {
        Arc::new(Room::of_slots(1))
    }

    #[test]
    fn images_share_the_windows_and_give_them_back() {
        let room = room();
        let known = |room: &Arc<Room>| {
            let mut known = Known::new(64 << 10, room.clone());
            let count = (0..2 * WINDOWS_MIN).take_while(|window| known.note(*window)).count() as u64;
            assert!(known.note(0) && !known.note(WINDOWS_MAX), "what is known stays so");
            (known, count)
        };
        let (first, of_first) = known(&room);
        let (second, of_second) = known(&room);
        assert!(of_first >= WINDOWS_MIN / 2 && of_second >= WINDOWS_MIN / 4, "{of_first}, {of_second}");
        assert_eq!(room.bytes(), (of_first + of_second) * WINDOW_BYTES);
        assert!(room.bytes() < room.bytes_max());
        drop(first);
        let (third, of_third) = known(&room);
        assert!(of_third > of_second, "{of_third} of what the first has given back");
        drop((second, third));
        assert_eq!((room.bytes(), room.bytes_max()), (0, WINDOWS_MIN * WINDOW_BYTES));
    }

    #[test]
    fn runs_of_changed_sectors_are_those_that_were_changed() {
        let mut known = Known::new(64 << 10, room());
        for window in 0..3 {
            assert!(known.note(window));
        }
        let change = known.begin_change(126..130);
        known.end_change(change);
        let change = known.begin_change(200..201);
        known.end_change(change);
        assert_eq!(known.changed(), [126..128, 128..130, 200..201]);
        let change = known.begin_change(300..u64::MAX);
        assert!(!known.is_quiet());
        known.end_change(change);
        assert_eq!(known.changed().last(), Some(&(300..384)), "what is not known is on no list");
    }

    /// What is believed of flash, and what is known to be zero, is what the image has; with reads and changes in every order.
    #[test]
    #[allow(clippy::cast_possible_truncation, reason = "there are few sectors")]
    fn what_is_believed_is_what_the_image_has() {
        const SECTORS: u64 = 8;
        const ALL: usize = 24;
        struct Fetch {
            number: u64,
            window: u64,
            bytes: Option<Vec<u32>>,
        }
        let mut believed = (0, 0);
        for seed in 0..400 {
            let mut random = Random::from_seed(seed);
            let mut known = Known::new(SECTORS * 512, room());
            let (mut image, mut flash) = ([0u32; ALL], [None; ALL]);
            let mut changes: Vec<(u64, Range<u64>, u32)> = Vec::new();
            let mut fetches: Vec<Fetch> = Vec::new();
            for step in 1..300u32 {
                let window = random.below(ALL as u64 / SECTORS);
                let first = random.below(ALL as u64 - 3);
                let sectors = first..first + 1 + random.below(3);
                match random.below(8) {
                    0 | 1 => changes.push((
                        known.begin_change(sectors.clone()),
                        sectors,
                        if random.one_in(3) { 0 } else { step },
                    )),
                    2 | 3 if !changes.is_empty() => {
                        let (number, sectors, value) = changes.swap_remove(random.index(changes.len()));
                        for sector in sectors {
                            image[sector as usize] = value;
                        }
                        known.end_change(number);
                    }
                    4 => {
                        let span = window * SECTORS..(window + 1) * SECTORS;
                        let is_anew = random.one_in(2);
                        known.find(window, &span);
                        let number = known.begin_fetch(window, is_anew);
                        if is_anew {
                            flash[span.start as usize..span.end as usize].fill(None);
                            // What was read before the blocks were given up is kept no more.
                            fetches.retain(|fetch| fetch.window != window);
                        }
                        fetches.push(Fetch { number, window, bytes: None });
                    }
                    5 | 6 if !fetches.is_empty() => {
                        let index = random.index(fetches.len());
                        let fetch = &mut fetches[index];
                        let span = (fetch.window * SECTORS) as usize..((fetch.window + 1) * SECTORS) as usize;
                        match fetch.bytes.take() {
                            None => fetch.bytes = Some(image[span].to_vec()),
                            Some(bytes) => {
                                let zero = (0..SECTORS).filter(|sector| bytes[*sector as usize] == 0);
                                known
                                    .end_fetch(fetch.number, zero.fold(0, |zero, sector| zero | 1 << sector));
                                for (place, byte) in flash[span].iter_mut().zip(bytes) {
                                    place.get_or_insert(byte);
                                }
                                fetches.swap_remove(index);
                            }
                        }
                    }
                    _ => {}
                }
                for sector in 0..ALL as u64 {
                    // Asked of a copy: a question counts.
                    let mask = known.mask(sector / SECTORS, &(sector..sector + 1));
                    let Some(window) = known.windows.get(&(sector / SECTORS)) else { continue };
                    let is_changing = changes.iter().any(|(_, sectors, _)| sectors.contains(&sector));
                    if is_changing {
                        assert_eq!(window.zero & mask, 0, "seed {seed}");
                        assert_ne!(window.changed & mask, 0, "seed {seed}");
                    } else if window.zero & mask != 0 {
                        assert_eq!(image[sector as usize], 0, "seed {seed}");
                        believed.0 += 1;
                    } else if let (0, Some(kept)) = (window.changed & mask, flash[sector as usize]) {
                        assert_eq!(image[sector as usize], kept, "seed {seed}");
                        believed.1 += 1;
                    }
                }
            }
        }
        assert!(believed.0 > 50_000 && believed.1 > 50_000, "{believed:?}");
    }
}
