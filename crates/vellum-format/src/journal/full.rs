//! Guest data that goes through the journal: sectors that may not be overwritten in place.
//!
//! ```text
//!   overwritten too early ──► here, live ─ seal ► record ─ flush ► checkpoint ──── tail stated ► forgotten
//!                               ▲                                                    │
//!                               └────────── overwritten again (it sticks) ◄──────────┘
//! ```
//!
//! A sector comes here when it is overwritten after the transaction that allocated it was sealed and before
//! that transaction is verified. In place, the new bytes would fail the old check. The sector stays until a
//! flushed record says that recovery does not need the bytes in older records. Otherwise a replay would put
//! those old bytes over data that was written later.
//!
//! 1. A reader looks for data here first and then in the image, so it misses nothing that is not checkpointed
//!    yet.
//! 2. A checkpoint writes the bytes of the last flushed record, never the live bytes.
//! 3. A cluster is not given back while a sector of it is here (`give_back.rs`).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use smallvec::SmallVec;
use vellum_core::{
    Buffer, ImageOffset, ImageSpan, Limits, LocalFuture, Result, SharedStorage, Storage, StorageRun, Zeroes,
};

use super::record::{Item, SECTOR, SECTOR_LEN};
use crate::state::lock;

/// At most this many sectors are held here. A writer that needs more waits until these are checkpointed.
const SECTORS_MAX: usize = 16_384;

/// A write to a home location: the place, and the bytes as they will be there.
pub(crate) type HomeWrite = (ImageOffset, Arc<[u8]>);

/// A sector that is newer here than in the image.
struct Sector {
    bytes: Arc<[u8]>,
    /// The open transaction will hold it.
    is_live: bool,
    /// The last record that holds it.
    until: u64,
}

/// All such sectors, by place.
#[derive(Default)]
pub(crate) struct Full {
    sectors: Mutex<BTreeMap<u64, Sector>>,
    /// Whether there are any sectors. Read without the lock.
    any: AtomicBool,
}

/// The sectors that the bytes touch.
pub(super) fn sectors_of(span: ImageSpan) -> impl Iterator<Item = u64> {
    (span.start().bytes() / SECTOR * SECTOR..span.end().bytes()).step_by(SECTOR_LEN)
}

impl Full {
    fn within(&self, span: ImageSpan) -> SmallVec<[(u64, Arc<[u8]>); 8]> {
        if !self.any.load(Ordering::Acquire) || span.is_empty() {
            return SmallVec::new();
        }
        let start = span.start().bytes() / SECTOR * SECTOR;
        let sectors = lock(&self.sectors);
        sectors.range(start..span.end().bytes()).map(|(at, sector)| (*at, sector.bytes.clone())).collect()
    }

    /// Whether any sector is here.
    pub(super) fn any(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }

    /// Whether a sector of the run is here.
    pub(crate) fn has(&self, span: ImageSpan) -> bool {
        !self.within(span).is_empty()
    }

    /// Takes the sectors of `places`, and those that are here already, out of data that is written at `at`;
    /// adds the latter to `places`. Returns false, and takes nothing, when there is no room, or when part of
    /// a sector is written and the rest of it is not here.
    pub(super) fn take(&self, at: ImageOffset, data: &Buffer, places: &mut BTreeSet<u64>) -> bool {
        let (start, end) = (at.bytes(), at.bytes() + data.len() as u64);
        let mut sectors = lock(&self.sectors);
        // Some may have been forgotten since the caller looked, but none are new.
        places.extend(sectors.range(start / SECTOR * SECTOR..end).map(|(at, _)| *at));
        let is_whole = |place: u64| place >= start && place + SECTOR <= end;
        let can_take = |place: &u64| is_whole(*place) || sectors.contains_key(place);
        if sectors.len() + places.len() > SECTORS_MAX || !places.iter().all(can_take) {
            return false;
        }
        for place in places.iter() {
            let mut bytes = match sectors.get(place) {
                Some(sector) if !is_whole(*place) => sector.bytes.to_vec(),
                _ => vec![0; SECTOR_LEN],
            };
            let (from, to) = (start.max(*place), end.min(place + SECTOR));
            let (skip, len) = (index(from - place), index(to - from));
            let mut part = vec![0; len];
            data.copy_to(index(from - start), &mut part);
            bytes[skip..skip + len].copy_from_slice(&part);
            let until = sectors.get(place).map_or(0, |sector| sector.until);
            sectors.insert(*place, Sector { bytes: Arc::from(bytes), is_live: true, until });
        }
        self.any.store(true, Ordering::Release);
        true
    }

    /// The transaction's share of these sectors: its items, and the sectors as they will be in place.
    pub(super) fn seal(&self, sequence: u64, places: &BTreeSet<u64>) -> (Vec<Item>, Vec<HomeWrite>) {
        let mut sectors = lock(&self.sectors);
        let mut items: Vec<Item> = Vec::new();
        let mut writes = Vec::new();
        for place in places {
            let sector = sectors.get_mut(place).expect("a live sector stays");
            (sector.is_live, sector.until) = (false, sequence);
            let here = ImageOffset::new(*place);
            writes.push((here, sector.bytes.clone()));
            match items.last_mut() {
                Some(Item::Full { at, bytes }) if *at + bytes.len() as u64 == here => {
                    bytes.extend_from_slice(&sector.bytes);
                }
                _ => items.push(Item::Full { at: here, bytes: sector.bytes.to_vec() }),
            }
        }
        (items, writes)
    }

    /// Forgets sectors when a flushed record says that records before `tail` are not needed.
    pub(crate) fn forget(&self, tail: u64) {
        if !self.any.load(Ordering::Acquire) {
            return;
        }
        let mut sectors = lock(&self.sectors);
        sectors.retain(|_, sector| sector.is_live || sector.until >= tail);
        self.any.store(!sectors.is_empty(), Ordering::Release);
    }
}

fn index(bytes: u64) -> usize {
    usize::try_from(bytes).expect("within a buffer")
}

/// The image as the place of guest data, overlaid with the newer sectors in memory.
pub(crate) struct Overlaid {
    pub(crate) image: SharedStorage,
    pub(crate) full: Arc<Full>,
}

impl Storage for Overlaid {
    fn name(&self) -> &str {
        self.image.name()
    }

    fn limits(&self) -> &Limits {
        self.image.limits()
    }

    fn len(&self) -> u64 {
        self.image.len()
    }

    fn look_at_len(&self) -> LocalFuture<'_, Result<u64>> {
        self.image.look_at_len()
    }

    fn read(&self, at: ImageOffset, mut buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        let newer = self.full.within(at.span(buffer.len() as u64));
        if newer.is_empty() {
            return self.image.read(at, buffer);
        }
        Box::pin(async move {
            // The image's bytes there are not always the guest's (a packed block), so a guest that lent the
            // memory must not see them.
            let own = match buffer.is_lent() {
                true => Buffer::for_overwrite(buffer.len()),
                false => std::mem::take(&mut buffer),
            };
            let mut own = self.image.read(at, own).await?;
            let (start, end) = (at.bytes(), at.bytes() + own.len() as u64);
            for (place, bytes) in newer {
                let (from, to) = (start.max(place), end.min(place + SECTOR));
                own.copy_from(index(from - start), &bytes[index(from - place)..index(to - place)]);
            }
            if buffer.is_empty() {
                return Ok(own);
            }
            buffer.copy_from(0, own.contiguous().slice());
            Ok(buffer)
        })
    }

    fn write(&self, at: ImageOffset, data: Buffer) -> LocalFuture<'_, Result<()>> {
        self.image.write(at, data)
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        self.image.flush()
    }

    fn reconcile(&self, span: ImageSpan) -> LocalFuture<'_, Result<bool>> {
        self.image.reconcile(span)
    }

    fn write_zeroes(&self, span: ImageSpan, how: Zeroes) -> LocalFuture<'_, Result<()>> {
        self.image.write_zeroes(span, how)
    }

    fn discard(&self, span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        self.image.discard(span)
    }

    fn set_len(&self, len: u64) -> LocalFuture<'_, Result<()>> {
        self.image.set_len(len)
    }

    fn preallocate(&self, span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        self.image.preallocate(span)
    }

    fn runs(&self, span: ImageSpan) -> LocalFuture<'_, Result<Vec<StorageRun>>> {
        self.image.runs(span)
    }
}

#[cfg(test)]
mod tests {
    use futures_lite::future::block_on;
    use vellum_core::MemoryStorage;

    use super::*;

    #[test]
    fn what_is_newer_lies_over_the_image_until_a_tail_has_passed_it() {
        let image = MemoryStorage::holding("image", &[1; 4096]);
        let full = Arc::new(Full::default());
        let data = Overlaid { image, full: full.clone() };
        let at = ImageOffset::new;
        let read = || block_on(data.read(at(500), Buffer::zeroed(1100))).unwrap().to_vec();
        let whole: BTreeSet<u64> = [512].into();
        assert!(full.take(at(512), &Buffer::copy_of(&[2; 512]), &mut whole.clone()));
        assert_eq!(read(), [vec![1; 12], vec![2; 512], vec![1; 576]].concat());
        assert!(
            !full.take(at(1020), &Buffer::copy_of(&[3; 8]), &mut [512, 1024].into()),
            "half of 1024 is elsewhere"
        );
        assert!(full.take(at(1020), &Buffer::copy_of(&[3; 4]), &mut BTreeSet::new()));
        assert_eq!(read(), [vec![1; 12], vec![2; 508], vec![3; 4], vec![1; 576]].concat());
        let (items, writes) = full.seal(7, &whole);
        let bytes = [vec![2; 508], vec![3; 4]].concat();
        assert_eq!(items, [Item::Full { at: at(512), bytes: bytes.clone() }]);
        assert_eq!(writes, [(at(512), Arc::from(bytes))]);
        full.forget(7);
        assert!(full.has(at(0).span(513)) && !full.has(at(0).span(512)));
        full.forget(8);
        assert_eq!(read(), vec![1; 1100]);
    }
}
