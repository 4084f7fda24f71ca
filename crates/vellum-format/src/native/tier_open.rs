//! An image is opened with its fast medium, or without it: which units are copied, which are there alone, and which are lost.
//!
//! ```text
//!   named? ► row ► does the session count? ──no──► nothing is copied; refused, if units are there alone
//!                         │yes
//!                         └► bits that are set, and complete entries ► copied;  no entries: read from the image, or missing
//! ```
//!
//! 1. A unit that is there alone and of which the medium says nothing complete is *missing*: it reads as an error, and nothing
//!    changes its entry and its bit, but a request that has bytes for all of it.
//! 2. To salvage, an image that is only read is opened also without its medium, or with a wrong one: then all units that are
//!    there alone are missing.

use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex, OnceLock};

use vellum_core::{BlockSize, Context, Error, ErrorKind, Result};

use super::geometry::Region;
use super::image::Native;
use super::tier_state::{Copied, State, Tally, Tier};
use crate::epochs::Epochs;
use crate::fast::{FastMedium, OpenRow, Part, SLOT_BYTES};
use crate::hash::{HashMap, HashSet};

impl Native {
    /// Puts the fast medium beside the image, if it is the one that the image names. The error says why not.
    pub(super) async fn open_tier(&self, medium: &Arc<FastMedium>, salvages: bool) -> Result<()> {
        let (named, uuid) = {
            let superblocks = self.superblocks.lock().await;
            (superblocks.superblock.fast(), superblocks.superblock.uuid())
        };
        let Some(named) = named.filter(|named| named.id == medium.id()) else {
            let needed = self.superblocks.lock().await.superblock.may_do_without_fast();
            needed.context(|| {
                format!("{} is another fast medium, with the id {}", medium.name(), medium.id())
            })?;
            let why =
                format!("{} is not attached to {} (`vellum tier attach`)", self.engine.name, medium.name());
            return Err(Error::new(ErrorKind::NotFound, why));
        };
        let row = medium.open_row(uuid, self.engine.geometry.read_only)?;
        let last = self.find(|| self.home.word(self.places.fast_sequence())).await?;
        let counts = named.counts && named.number.is_some_and(|number| row.counts(number, last));
        let moved = self.moved_units().await?;
        if !counts && !moved.is_empty() {
            return Err(self.medium_is_wrong(medium, moved.len()));
        }
        self.may_take_row(medium, &row, counts)?;
        let (mut state, mut others) = (State::default(), Vec::new());
        if counts {
            state.copied = self.copied_units(&row, last).await?;
            let missing = self.note_moved(medium, &mut state, &moved, salvages)?;
            state.lost = self.lost_units(&state.copied).await?;
            // Their bits are to go on saying that the medium has them.
            state.lost.retain(|unit| missing.binary_search(unit).is_err());
            state.missing = missing.into_iter().collect();
            let kept: HashSet<u32> =
                state.copied.values().flat_map(|copied| copied.slots.iter().copied()).collect();
            others =
                row.parts().into_iter().map(|part| part.slot).filter(|slot| !kept.contains(slot)).collect();
            // What this image does not count may be what another copy of it has there alone.
            if !row.is_needed() && !self.engine.geometry.read_only {
                row.free(&std::mem::take(&mut others));
            }
            if !moved.is_empty() && !row.is_needed() && !self.engine.geometry.read_only {
                // The row was put back from a copy. If the medium fails, nothing of it is taken away in this opening.
                drop(row.say_needed(true).await);
            }
        }
        let tier = Tier {
            row,
            epochs: Epochs::default(),
            listed: AtomicUsize::new(state.copied.len() + state.lost.len() + state.missing.len()),
            state: Mutex::new(state),
            counts: AtomicBool::new(counts),
            begun: async_lock::Mutex::default(),
            has_session: AtomicBool::new(false),
            others: Mutex::new(others),
            tally: Tally::default(),
            heat: OnceLock::new(),
        };
        drop(self.tier.set(tier));
        Ok(())
    }

    /// The units that a bit and all of their newest entries say are on the fast medium. What was promoted after the
    /// image's last promotion is of a newer state of the image than this one, which was copied while it was in use.
    async fn copied_units(&self, row: &OpenRow, last: u64) -> Result<HashMap<u64, Copied>> {
        let unit_bytes = self.unit().map_or(0, BlockSize::bytes);
        let parts_of_unit = usize::try_from(unit_bytes / SLOT_BYTES).expect("at most 32");
        let mut newest: HashMap<u64, Vec<Part>> = HashMap::default();
        for part in row.parts() {
            let parts = newest.entry(part.unit).or_default();
            match parts.first().map_or(0, |one| one.sequence).cmp(&part.sequence) {
                std::cmp::Ordering::Less => *parts = vec![part],
                std::cmp::Ordering::Equal => parts.push(part),
                std::cmp::Ordering::Greater => {}
            }
        }
        let mut copied = HashMap::default();
        for (unit, mut parts) in newest {
            let bit = self.places.fast_bit(unit).filter(|_| unit < self.places.shape().units());
            let Some(bit) = bit else { continue };
            parts.sort_unstable_by_key(|part| part.part);
            let is_complete =
                parts.len() == parts_of_unit && (0..).zip(&parts).all(|(number, part)| part.part == number);
            let is_ours = parts.first().is_some_and(|part| part.sequence <= last);
            if is_complete && is_ours && self.find(|| self.home.get(bit)).await? == 1 {
                let slots = parts.iter().map(|part| part.slot).collect();
                copied.insert(unit, Copied { slots, reason: parts[0].reason, is_moved: false });
            }
        }
        Ok(copied)
    }

    /// The units whose bit is set and that are not among these.
    async fn lost_units(&self, copied: &HashMap<u64, Copied>) -> Result<HashSet<u64>> {
        let region = self.places.region(Region::Fast);
        let mut lost = HashSet::default();
        let mut page = region.start();
        while page < region.end() {
            self.find(|| self.home.word(page)).await?;
            for at in (0..512).map(|word| page + word * 8) {
                if self.home.word(at).is_ok_and(|word| word == 0) {
                    continue;
                }
                // The first word is no bits.
                let end = (at - region.start()) / 8 * 64;
                for unit in end.saturating_sub(64)..end.min(self.places.shape().units()) {
                    let bit = self.places.fast_bit(unit).expect("it is in the region");
                    if !copied.contains_key(&unit) && self.find(|| self.home.get(bit)).await? == 1 {
                        lost.insert(unit);
                    }
                }
            }
            page += 4096;
        }
        Ok(lost)
    }

    /// Puts the fast medium beside the image, if it can be used. An image that names another one, or none, is open without.
    ///
    /// # Errors
    /// Why it cannot be used, for an image that needs it; with `salvages` only where the image is written.
    pub(super) async fn with_fast(
        self: Arc<Self>,
        medium: Option<&Arc<FastMedium>>,
        salvages: bool,
    ) -> Result<Arc<Self>> {
        // A snapshot is read from the slow medium: the bits are about the disk.
        if self.view.is_some() {
            return Ok(self);
        }
        let opened = match medium {
            Some(medium) => self.open_tier(medium, salvages).await,
            // It was opened without the medium that it needs.
            None if salvages => self.superblocks.lock().await.superblock.may_do_without_fast(),
            None => return Ok(self),
        };
        let Err(error) = opened else { return Ok(self) };
        if self.superblocks.lock().await.superblock.has_moved {
            if !(salvages && self.engine.geometry.read_only) {
                return Err(error);
            }
            drop(self.missing.set(self.moved_units().await?));
        }
        drop(self.tier_trouble.set(error));
        Ok(self)
    }

    /// Whether a fast medium was given to it, whether or not it can be used.
    pub(super) fn has_fast(&self) -> bool {
        self.tier.get().is_some() || self.tier_trouble.get().is_some()
    }
}
