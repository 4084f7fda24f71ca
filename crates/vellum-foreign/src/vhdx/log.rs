//! The log of a VHDX: what was to be written when the last writer stopped.
//!
//! ```text
//!   a ring of sectors of 4 KiB       an entry: header and descriptors, then a sector for each data descriptor
//!   a sequence                       entries with ascending numbers, each behind the one before
//!   the active one                   that with the highest number, from the entry that its last one calls the tail
//! ```
//!
//! 1. An entry is used only when its checksum, the log's GUID, and the number in each of its sectors fit.
//! 2. The log has at most [`LOG_BYTES_MAX`] bytes, the replay at most [`PATCHES_MAX`] writes, and no more than
//!    [`SUMS_PER_BYTE`] times the log is summed up while it is searched. No two valid entries overlap: where one is
//!    found, the search goes on behind it.
//! 3. A log that is to be replayed and has no valid sequence is an error: what is in the file is then unknown.

use std::collections::BTreeMap;

use vellum_core::{Error, Result, Storage};

use super::overlay::{Patch, Patches, SECTOR_BYTES};
use super::{Guid, MIB, has_good_checksum};
use crate::bytes::{field, le32, le64, read_at};

const SECTOR: u64 = SECTOR_BYTES as u64;
/// QEMU and Hyper-V make logs of 1 MiB.
const LOG_BYTES_MAX: u64 = 64 << 20;
const PATCHES_MAX: usize = 1 << 20;
const SUMS_PER_BYTE: u64 = 8;
const ENTRY_HEADER: usize = 64;
const DESCRIPTOR: usize = 32;

/// A log that is to be replayed.
#[derive(Debug, Clone)]
pub(super) struct Log {
    guid: Guid,
    at: u64,
    len: u64,
}

/// A valid entry.
struct Entry {
    number: u64,
    /// Where it begins and where the next one does, within the log.
    at: u64,
    end: u64,
    tail: u64,
    /// The file had this length at least when it was written, and has this one once it is replayed.
    flushed_len: u64,
    last_len: u64,
    sectors: Vec<u8>,
    descriptors: usize,
}

impl Log {
    /// The log of a header, if it is to be replayed.
    pub(super) fn of_header(header: &[u8]) -> Result<Option<Self>> {
        let guid: Guid = field(header, 48);
        if guid == [0; 16] {
            return Ok(None);
        }
        let (len, at) = (u64::from(le32(header, 68)), le64(header, 72));
        if at < MIB || at % MIB != 0 || len == 0 || len % MIB != 0 || at.checked_add(len).is_none() {
            return Err(Error::corrupt(format!("a log of {len} bytes cannot be at {at:#x}")));
        }
        if len > LOG_BYTES_MAX {
            return Err(Error::unsupported(format!(
                "a log of {len} bytes must be replayed, and at most {LOG_BYTES_MAX} are: open the image once with \
                 Hyper-V or QEMU"
            )));
        }
        Ok(Some(Self { guid, at, len }))
    }

    /// What the log changes in the file.
    pub(super) async fn replay(&self, image: &dyn Storage) -> Result<Patches> {
        let ring = read_at(image, self.at, self.len).await?;
        let mut patches = Patches::default();
        let entries = self.active(&ring)?;
        if let Some(entry) = entries.iter().find(|entry| entry.flushed_len > image.len()) {
            return Err(Error::corrupt(format!(
                "the file has {} bytes, but had {} when its log was written: it was not copied as a whole",
                image.len(),
                entry.flushed_len
            )));
        }
        for entry in &entries {
            entry.apply(&mut patches)?;
            patches.lengthen(entry.last_len);
        }
        Ok(patches)
    }

    /// The entries of the active sequence, in order.
    fn active(&self, ring: &[u8]) -> Result<Vec<Entry>> {
        let mut valid: BTreeMap<u64, Entry> = BTreeMap::new();
        let (mut at, mut sums_left) = (0, self.len * SUMS_PER_BYTE);
        while at < self.len {
            match self.entry(ring, at, &mut sums_left)? {
                Some(entry) => {
                    at = entry.end;
                    valid.insert(entry.at, entry);
                }
                None => at += SECTOR,
            }
        }
        let heads = self.heads(&valid);
        // The last one of a sequence is complete where the one that it calls the tail leads to it.
        let complete = valid.values().filter(|entry| heads.get(&entry.tail) == Some(&entry.at));
        let Some(head) = complete.max_by_key(|entry| entry.number) else {
            return Err(Error::corrupt(
                "its log is to be replayed, but has no valid entries: the image is damaged, or is being written",
            ));
        };
        let (mut at, end) = (head.tail, head.at);
        let mut order = vec![at];
        while at != end {
            at = valid[&at].end % self.len;
            order.push(at);
        }
        Ok(order.into_iter().map(|at| valid.remove(&at).expect("each once")).collect())
    }

    /// For each entry, the last of those that follow it without a gap, one number after the other: each looked at once.
    fn heads(&self, valid: &BTreeMap<u64, Entry>) -> BTreeMap<u64, u64> {
        let mut from_last: Vec<&Entry> = valid.values().collect();
        from_last.sort_unstable_by_key(|entry| std::cmp::Reverse(entry.number));
        let mut heads = BTreeMap::new();
        for entry in from_last {
            let next = valid.get(&(entry.end % self.len));
            let next = next.filter(|next| Some(next.number) == entry.number.checked_add(1));
            // Its number is higher, so its own last one is known.
            heads.insert(entry.at, next.map_or(entry.at, |next| heads[&next.at]));
        }
        heads
    }

    /// The entry at this place of the ring, if there is a valid one.
    fn entry(&self, ring: &[u8], at: u64, sums_left: &mut u64) -> Result<Option<Entry>> {
        let start = usize::try_from(at).expect("the ring is in memory");
        let header = &ring[start..start + SECTOR_BYTES];
        if !header.starts_with(b"loge") || field::<16>(header, 32) != self.guid {
            return Ok(None);
        }
        let (len, tail, number) = (u64::from(le32(header, 8)), u64::from(le32(header, 12)), le64(header, 16));
        let (descriptors, flushed_len) = (le32(header, 24) as usize, le64(header, 48));
        let fits = len >= SECTOR && len % SECTOR == 0 && len <= self.len;
        if !fits || tail % SECTOR != 0 || tail >= self.len || number == 0 {
            return Ok(None);
        }
        *sums_left = sums_left
            .checked_sub(len)
            .ok_or_else(|| Error::corrupt("its log has far more entries than fit in it"))?;
        let len = usize::try_from(len).expect("no longer than the ring");
        let mut sectors = Vec::with_capacity(len);
        let first = (ring.len() - start).min(len);
        sectors.extend_from_slice(&ring[start..start + first]);
        sectors.extend_from_slice(&ring[..len - first]);
        let (end, last_len) = (at + len as u64, le64(&sectors, 56));
        let entry = Entry { number, at, end, tail, flushed_len, last_len, sectors, descriptors };
        Ok((has_good_checksum(&entry.sectors) && entry.is_sound()).then_some(entry))
    }
}

impl Entry {
    fn descriptor_sectors(&self) -> usize {
        (ENTRY_HEADER + self.descriptors * DESCRIPTOR).div_ceil(SECTOR_BYTES)
    }

    fn descriptors(&self) -> impl Iterator<Item = &[u8]> {
        self.sectors[ENTRY_HEADER..].chunks_exact(DESCRIPTOR).take(self.descriptors)
    }

    /// Whether its sectors are those that its descriptors call for, and all have its number.
    fn is_sound(&self) -> bool {
        let in_use = self.descriptor_sectors().checked_mul(SECTOR_BYTES);
        if self.descriptors > self.sectors.len() / DESCRIPTOR
            || in_use.is_none_or(|all| all > self.sectors.len())
        {
            return false;
        }
        let mut data = 0;
        for descriptor in self.descriptors() {
            let is_data = descriptor.starts_with(b"desc");
            if !is_data && !descriptor.starts_with(b"zero") || le64(descriptor, 24) != self.number {
                return false;
            }
            if !le64(descriptor, 16).is_multiple_of(SECTOR) {
                return false;
            }
            data += usize::from(is_data);
        }
        let sectors = self.sectors.chunks_exact(SECTOR_BYTES).skip(self.descriptor_sectors());
        let sound = sectors.take(data).filter(|sector| {
            let number = u64::from(le32(sector, 4)) << 32 | u64::from(le32(sector, SECTOR_BYTES - 4));
            sector.starts_with(b"data") && number == self.number
        });
        sound.count() == data
    }

    fn apply(&self, patches: &mut Patches) -> Result<()> {
        let mut data = self.sectors.chunks_exact(SECTOR_BYTES).skip(self.descriptor_sectors());
        for descriptor in self.descriptors() {
            let at = le64(descriptor, 16);
            if patches.count() >= PATCHES_MAX {
                return Err(Error::unsupported("its log has too many writes"));
            }
            if descriptor.starts_with(b"zero") {
                let len = le64(descriptor, 8);
                let end = at.checked_add(len).filter(|_| len.is_multiple_of(SECTOR));
                let end = end.ok_or_else(|| Error::corrupt(format!("{len} zeros at {at:#x} in its log")))?;
                patches.put(at, end, Patch::Zeros);
                continue;
            }
            let sector = data.next().expect("as many as descriptors");
            let mut page = Box::new([0; SECTOR_BYTES]);
            page.copy_from_slice(sector);
            page[..8].copy_from_slice(&descriptor[8..16]);
            page[SECTOR_BYTES - 4..].copy_from_slice(&descriptor[4..8]);
            let end = at.checked_add(SECTOR).ok_or_else(|| Error::corrupt(format!("a write at {at:#x}")))?;
            patches.put(at, end, Patch::Page(page));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use vellum_core::Random;

    use super::*;

    /// Whether the entries from the tail of this one to itself are all there: walked for each.
    fn reaches(log: &Log, valid: &BTreeMap<u64, Entry>, head: &Entry) -> bool {
        let mut entry = valid.get(&head.tail);
        while let Some(now) = entry {
            if now.at == head.at {
                return true;
            }
            let next = valid.get(&(now.end % log.len));
            entry = next.filter(|next| next.number == now.number + 1);
        }
        false
    }

    #[test]
    fn a_sequence_is_complete_where_a_walk_from_its_tail_ends_with_it() {
        let (mut random, mut complete) = (Random::from_seed(5), 0);
        for _ in 0..2000 {
            let sectors = 1 + random.below(24);
            let log = Log { guid: [1; 16], at: MIB, len: sectors * SECTOR };
            let (mut valid, mut at, mut number) = (BTreeMap::new(), 0, 1 + random.below(50));
            while at < log.len {
                let end = at + SECTOR * (1 + random.below(3));
                number = if random.below(5) == 0 { 1 + random.below(50) } else { number + 1 };
                let tail = random.below(sectors) * SECTOR;
                let (sectors, descriptors) = (Vec::new(), 0);
                if random.below(8) > 0 {
                    let entry =
                        Entry { number, at, end, tail, flushed_len: 0, last_len: 0, sectors, descriptors };
                    valid.insert(at, entry);
                }
                at = end;
            }
            let heads = log.heads(&valid);
            for entry in valid.values() {
                let followed = valid.get(&(entry.end % log.len));
                let is_head = followed.is_none_or(|next| next.number != entry.number + 1);
                let is_complete = is_head && reaches(&log, &valid, entry);
                assert_eq!(heads.get(&entry.tail) == Some(&entry.at), is_complete);
                complete += u32::from(is_complete);
            }
        }
        assert!(complete > 500, "{complete} were complete");
    }
}
