//! The bitmaps of an open image that are kept up, in memory: what has changed exactly, which regions are set on the medium, and what of
//! both waits to be written.
//!
//! ```text
//!   exact bits ──► word on the medium: all ones where its region is marked, else the exact bits     ──► seal ──► commit
//! ```
//!
//! 1. Nothing here waits. What is changed together is changed under the gate of the image (`image.rs`): a seal has all of it
//!    or nothing.
//! 2. A region is durable once a commit has succeeded that began after it was marked.
//! 3. What a failed commit was to write is listed again.
//!
//! When regions are marked, and what may rely on them, is the business of `marking.rs`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use arc_swap::ArcSwap;
use vellum_core::{BlockSize, Error, ErrorKind, GuestSpan, ImageOffset, ImageSpan, Result, Storage};

use super::bits::{Bits, WORD_BITS};
use super::directory::Entry;
use super::{ONES, Read, read_bits, read_directory};
use crate::qcow2::header::Header;
use crate::qcow2::layout::put64;
use crate::qcow2::mapping::L1Sector;
use crate::state::lock;

/// Why a bitmap is not kept up, and what helps.
const DISABLED: &str =
    "disabled: `vellum bitmap --enable` enables it, and what is written from then on is marked";
const INCONSISTENT: &str = "inconsistent, because a program that changed the disk has not saved it: remove it, add a new one \
     (`vellum bitmap --remove`, `--add`), and make a full backup";

/// Words of a region.
const REGION_WORDS: u64 = 4;
/// Words of a sector, in which bits are written.
const SECTOR_WORDS: u64 = 64;
/// Bytes that a marked region takes in a record, at most.
const REGION_RECORD_BYTES: u64 = 16 + REGION_WORDS * 8;

/// The bitmaps that are kept up.
#[derive(Default)]
pub(crate) struct Tracking {
    pub(super) tracked: Vec<Tracked>,
    /// The names of the others, and why they are not.
    others: Vec<(String, &'static str)>,
    /// Why none is, although there are some that would have to be.
    unusable: Option<String>,
}

/// A bitmap that is kept up.
pub(crate) struct Tracked {
    pub(super) name: String,
    /// What has changed.
    pub(super) exact: ArcSwap<Bits>,
    /// What must stay set on the medium besides.
    pub(super) held: Mutex<Option<Arc<Bits>>>,
    /// Regions that are set on the medium, or will be with the next commit.
    pub(super) marked: Bits,
    /// Regions that are set on the medium.
    pub(super) durable: Bits,
    cluster: BlockSize,
    table: ImageSpan,
    /// The entries of the table.
    pub(super) places: Box<[AtomicU64]>,
    pub(super) dirty: Mutex<Dirty>,
    /// Held while a place is made.
    pub(super) making: async_lock::Mutex<()>,
    /// The exact bits go to the medium.
    pub(super) is_closing: AtomicBool,
}

/// What is to be written.
#[derive(Default)]
pub(super) struct Dirty {
    pub(super) entries: BTreeSet<usize>,
    /// Words of each sector, by its number in the bits.
    words: BTreeMap<u64, u64>,
}

/// Copies of what a commit writes of a bitmap.
pub(crate) struct SealedBitmap {
    index: usize,
    dirty: Dirty,
    pub(crate) sectors: Vec<L1Sector>,
}

impl Tracking {
    /// Reads the bitmaps that must be kept up.
    ///
    /// # Errors
    /// Those of the storage. A bitmap that cannot be kept up is none: the first change makes all of them invalid.
    pub(crate) async fn load(header: &Header, image: &dyn Storage) -> Result<Self> {
        match Self::read(header, image).await {
            Ok((tracked, others)) => Ok(Self { tracked, others, unusable: None }),
            Err(error) if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Unsupported) => {
                Ok(Self::unusable_because(error.to_string()))
            }
            Err(error) => Err(error),
        }
    }

    async fn read(
        header: &Header,
        image: &dyn Storage,
    ) -> Result<(Vec<Tracked>, Vec<(String, &'static str)>)> {
        let (mut tracked, mut others) = (Vec::new(), Vec::new());
        for entry in read_directory(header, image).await? {
            if entry.is_in_use() {
                others.push((entry.shown(), INCONSISTENT));
            } else if !entry.is_auto() {
                others.push((entry.shown(), DISABLED));
            } else {
                entry.check(header)?;
                let read = read_bits(header, image, &entry).await?;
                tracked.push(Tracked::new(header, &entry, read)?);
            }
        }
        Ok((tracked, others))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.tracked.is_empty()
    }

    /// None is kept up, for this reason: the first change makes all of them invalid.
    pub(crate) fn unusable_because(why: String) -> Self {
        Self { unusable: Some(why), ..Self::default() }
    }

    /// Why a bitmap of this name is not kept up.
    pub(super) fn why_not(&self, name: &str) -> Error {
        let other = self.others.iter().find(|(its, _)| its == name);
        match (&self.unusable, other) {
            (Some(why), _) => Error::unsupported(format!("its bitmaps cannot be kept up: {why}")),
            (None, Some((_, why))) => Error::unsupported(format!("bitmap {name} is {why}")),
            (None, None) => {
                let why = format!("there is no bitmap named {name}: `vellum bitmap --add` adds one");
                Error::new(ErrorKind::NotFound, why)
            }
        }
    }

    /// Why the first change makes all bitmaps invalid, if it does.
    pub(crate) fn unusable(&self) -> Option<&str> {
        self.unusable.as_deref()
    }

    /// The parts of the image that they lie in.
    pub(crate) fn metadata(&self) -> impl Iterator<Item = ImageSpan> {
        self.tracked.iter().flat_map(|one| {
            let places = one.places.iter().filter_map(|entry| place_in(entry.load(Ordering::Acquire)));
            std::iter::once(one.table).chain(places.map(|at| at.span(one.cluster.bytes())))
        })
    }

    /// Marks a run in memory. Whether some of it must be marked on the medium before it changes.
    pub(super) fn mark(&self, span: GuestSpan) -> bool {
        let mut is_new = false;
        for one in &self.tracked {
            one.exact.load().mark(span);
            is_new |= !one.durable.covers(span);
        }
        is_new
    }

    /// Copies what has changed. For a seal.
    pub(crate) fn seal(&self) -> Vec<SealedBitmap> {
        let mut sealed = Vec::new();
        for (index, one) in self.tracked.iter().enumerate() {
            let dirty = std::mem::take(&mut *lock(&one.dirty));
            if !dirty.entries.is_empty() || !dirty.words.is_empty() {
                sealed.push(SealedBitmap { index, sectors: one.sectors_of(&dirty), dirty });
            }
        }
        sealed
    }

    /// The commit has failed: what it was to write waits to be written again.
    pub(crate) fn put_back(&self, sealed: Vec<SealedBitmap>) {
        for SealedBitmap { index, dirty: Dirty { entries, words }, .. } in sealed {
            let mut dirty = lock(&self.tracked[index].dirty);
            dirty.entries.extend(entries);
            words.into_iter().for_each(|(sector, mask)| *dirty.words.entry(sector).or_insert(0) |= mask);
        }
    }
}

/// The place that an entry of a table names.
fn place_in(entry: u64) -> Option<ImageOffset> {
    (entry > ONES).then(|| ImageOffset::new(entry))
}

impl Tracked {
    fn new(header: &Header, entry: &Entry, read: Read) -> Result<Self> {
        let Read { bits, table, entries } = read;
        let region_shift = entry.granularity_bits() + (WORD_BITS * REGION_WORDS).trailing_zeros();
        Ok(Self {
            name: entry.shown(),
            exact: ArcSwap::from_pointee(bits),
            held: Mutex::default(),
            marked: Bits::new(header.size(), region_shift)?,
            durable: Bits::new(header.size(), region_shift)?,
            cluster: header.cluster_size(),
            table,
            places: entries.into_iter().map(AtomicU64::new).collect(),
            dirty: Mutex::default(),
            making: Default::default(),
            is_closing: AtomicBool::new(false),
        })
    }

    /// What has changed, as it is now.
    pub(super) fn exact(&self) -> Arc<Bits> {
        self.exact.load_full()
    }

    /// The words of a cluster of bits.
    fn words_per_cluster(&self) -> u64 {
        self.cluster.bytes() / 8
    }

    /// The entries of the table for the bits of a run.
    pub(super) fn entries_of(&self, span: GuestSpan) -> std::ops::Range<usize> {
        let per_entry = self.words_per_cluster() * WORD_BITS * self.exact.load().granularity();
        let index = |byte: u64| usize::try_from(byte).unwrap_or(usize::MAX).min(self.places.len());
        index(span.start().bytes() / per_entry)..index(span.end().bytes().div_ceil(per_entry))
    }

    fn entry(&self, word: u64) -> u64 {
        let index = usize::try_from(word / self.words_per_cluster()).unwrap_or(usize::MAX);
        self.places.get(index).map_or(0, |entry| entry.load(Ordering::Acquire))
    }

    /// What a word is to be on the medium.
    pub(super) fn medium_word(&self, index: u64) -> u64 {
        let exact = self.exact.load();
        let region = index / REGION_WORDS;
        let is_marked = self.marked.word(region / WORD_BITS) >> (region % WORD_BITS) & 1 == 1;
        if is_marked && !self.is_closing.load(Ordering::Acquire) {
            return exact.full_word(index);
        }
        // Locked before the exact bits are read: what was held may become part of them meanwhile.
        let held = lock(&self.held);
        self.exact.load().word(index) | held.as_ref().map_or(0, |held| held.word(index))
    }

    /// Marks the regions of a run on the medium, with the next commit. Returns how many bytes of a record that takes. The caller
    /// holds the gate, and their entries name places.
    pub(super) fn mark_regions(&self, span: GuestSpan) -> u64 {
        let mut bytes = 0;
        let mut dirty = lock(&self.dirty);
        for (word, mask) in self.marked.masks_in(span) {
            let mut new = mask & !self.marked.word(word);
            self.marked.add(word, new);
            while new != 0 {
                let region = word * WORD_BITS + u64::from(new.trailing_zeros());
                new &= new - 1;
                self.list(&mut dirty, region * REGION_WORDS..(region + 1) * REGION_WORDS);
                bytes += REGION_RECORD_BYTES;
            }
        }
        bytes
    }

    /// Adds words to those that are to be written. Where all bits are set for want of space, there are none.
    pub(super) fn list(&self, dirty: &mut Dirty, words: std::ops::Range<u64>) {
        for word in words {
            if place_in(self.entry(word)).is_some() {
                *dirty.words.entry(word / SECTOR_WORDS).or_insert(0) |= 1 << (word % SECTOR_WORDS);
            }
        }
    }

    /// The sectors of the table and of the bits that have changed.
    fn sectors_of(&self, dirty: &Dirty) -> Vec<L1Sector> {
        let mut sectors: Vec<L1Sector> = Vec::new();
        let per_sector = usize::try_from(SECTOR_WORDS).expect("64");
        let mut last = None;
        for index in &dirty.entries {
            let first = index / per_sector * per_sector;
            if last.replace(first) == Some(first) {
                continue;
            }
            let end = self.places.len().min(first + per_sector);
            let mut bytes = vec![0; (end - first) * 8];
            for (i, entry) in self.places[first..end].iter().enumerate() {
                put64(&mut bytes, i * 8, entry.load(Ordering::Acquire));
            }
            let changed = dirty.entries.range(first..end).map(|index| index - first).collect();
            sectors.push(L1Sector::new(self.table.start() + first as u64 * 8, bytes, changed));
        }
        for (sector, mask) in &dirty.words {
            let first = sector * SECTOR_WORDS;
            let Some(place) = place_in(self.entry(first)) else { continue };
            let mut bytes = Vec::with_capacity(per_sector * 8);
            (first..first + SECTOR_WORDS)
                .for_each(|word| bytes.extend_from_slice(&self.medium_word(word).to_le_bytes()));
            let changed = (0..per_sector).filter(|word| mask >> word & 1 == 1).collect();
            let within = first % self.words_per_cluster() * 8;
            sectors.push(L1Sector::new(place + within, bytes, changed));
        }
        sectors
    }
}
