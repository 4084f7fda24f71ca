//! Snapshots: the list, the chains, and the copies of pages.

use std::collections::{BTreeMap, BTreeSet};

use vellum_core::{ImageOffset, ImageSpan, Result};

use super::super::geometry::{Region, SNAPSHOTS};
use super::Walk;
use super::units::MAP;
use crate::bytes::{be32, be64};

/// `next` of the snapshot that relies on home.
const HOME: u32 = u32::MAX;
/// The first bytes of an index page.
const MAP_MAGIC: &[u8] = b"VELLUMmu";
/// Bytes before the entries of an index page, and of one entry.
const INDEX_ENTRY_LEN: usize = 16;

/// The snapshots that exist, and the first map unit.
pub(super) struct Snapshots {
    ids: BTreeSet<u32>,
    first_map_unit: u32,
}

/// The content of the list's last entry.
struct Last {
    relies_on_home: u32,
    next_id: u32,
    reverts_to: u32,
}

impl Walk<'_> {
    /// Checks the list and its chains.
    pub(super) async fn snapshots(&mut self) -> Result<Snapshots> {
        let region = self.places.region(Region::Snapshots);
        let mut next_of: BTreeMap<u32, u32> = BTreeMap::new();
        let mut first_map_unit = 0;
        let Some(bytes) = self.read(region, Region::Snapshots.name()).await else {
            return Ok(Snapshots { ids: BTreeSet::new(), first_map_unit });
        };
        let has_snapshots = self.superblocks.superblock.has_snapshots;
        let has_clones = self.superblocks.superblock.has_clones;
        let size_max = self.places.size_max();
        let at =
            usize::try_from(self.places.snapshot(SNAPSHOTS - 1).start() - region.start()).expect("512 KiB");
        let last = Last {
            relies_on_home: be32(&bytes, at + 4),
            next_id: be32(&bytes, at + 8).max(1),
            reverts_to: be32(&bytes, at + 12),
        };
        for index in 0..SNAPSHOTS {
            let at = usize::try_from(self.places.snapshot(index).start() - region.start()).expect("512 KiB");
            let entry = &bytes[at..at + 128];
            let (id, next, size) = (be32(entry, 0), be32(entry, 4), be64(entry, 8));
            if index == SNAPSHOTS - 1 {
                first_map_unit = id;
                continue;
            }
            if id == 0 {
                continue;
            }
            let flags = be32(entry, 32);
            let name = entry[64..].split(|byte| *byte == 0).next().unwrap_or_default();
            let problem = if id >= last.next_id {
                Some("its ID was never assigned")
            } else if next_of.insert(id, next).is_some() {
                Some("its ID appears twice")
            } else if !size.is_multiple_of(512) || size > size_max {
                Some("its disk has an impossible size")
            } else if std::str::from_utf8(name).is_err() {
                Some("its name is not valid text")
            } else if flags & 3 == 3 {
                Some("it is being deleted, and clones stand on it")
            } else if flags & 2 != 0 && !has_clones {
                Some("clones stand on it, but the superblock says that there have never been any")
            } else {
                None
            };
            if let Some(why) = problem {
                self.error(|| format!("snapshot list: entry {index}, id {id}: {why}"));
            }
        }
        if !has_snapshots && (!next_of.is_empty() || first_map_unit != 0) {
            self.error(|| {
                "snapshot list: there are snapshots, but the superblock says that there have never been any"
                    .to_owned()
            });
        }
        self.chains(&next_of, &last);
        Ok(Snapshots { ids: next_of.into_keys().collect(), first_map_unit })
    }

    fn chains(&mut self, next_of: &BTreeMap<u32, u32>, last: &Last) {
        let Last { relies_on_home, reverts_to, .. } = *last;
        if reverts_to != 0 && !next_of.contains_key(&reverts_to) {
            self.error(|| {
                format!("the disk is being reverted to snapshot {reverts_to}, which does not exist")
            });
        }
        if relies_on_home != 0 && !next_of.contains_key(&relies_on_home) {
            self.error(|| {
                format!("snapshot {relies_on_home} should rely on the home pages but does not exist")
            });
        }
        // Snapshots whose chain is known to end, so that each is followed once.
        let mut ending: BTreeSet<u32> = BTreeSet::new();
        for (&id, &next) in next_of {
            if (next == HOME) != (id == relies_on_home) {
                self.error(|| format!("snapshot {id}: its `next` and the last entry do not agree on which snapshot relies on the home pages"));
            }
            let (mut at, mut seen) = (id, BTreeSet::new());
            loop {
                if at == 0 || at == HOME || ending.contains(&at) {
                    break;
                }
                if !seen.insert(at) {
                    self.error(|| format!("snapshot {id}: it relies on itself"));
                    break;
                }
                match next_of.get(&at) {
                    Some(next) => at = *next,
                    None => {
                        self.error(|| {
                            format!("snapshot {id}: it relies on snapshot {at}, which does not exist")
                        });
                        break;
                    }
                }
            }
            ending.extend(seen);
        }
    }

    /// Checks the map units and the copies in them.
    pub(super) async fn map_units(&mut self, snapshots: &Snapshots) -> Result<()> {
        let Some(unit_size) = self.places.shape().layout.unit() else { return Ok(()) };
        let copies = usize::try_from(unit_size.bytes() / 4096 - 1).expect("at most 511");
        let copies = copies.min((4096 - INDEX_ENTRY_LEN) / INDEX_ENTRY_LEN);
        let (mut unit, mut seen, mut pages) = (snapshots.first_map_unit, BTreeSet::new(), BTreeSet::new());
        while unit != 0 {
            if !self.is_inside(unit) {
                self.error(|| format!("map units: unit {unit} lies past the end of the file"));
                return Ok(());
            }
            if !seen.insert(unit) {
                self.error(|| format!("map units: unit {unit} appears twice in their chain"));
                return Ok(());
            }
            self.names.add(unit, MAP);
            let span = self.places.unit(unit);
            self.report.image_end_offset = self.report.image_end_offset.max(span.end().bytes());
            let Some(index) = self.read(span.start().span(4096), "map unit").await else { return Ok(()) };
            if !index.starts_with(MAP_MAGIC) {
                self.error(|| format!("map units: unit {unit} does not begin with its magic number"));
                return Ok(());
            }
            for slot in 0..copies {
                let at = INDEX_ENTRY_LEN * (slot + 1);
                let (id, page) = (be32(&index, at), be64(&index, at + 8));
                if id != 0 {
                    let copy = (span.start() + 4096 * (slot as u64 + 1)).span(4096);
                    let entry = (span.start() + at as u64).span(INDEX_ENTRY_LEN as u64);
                    self.copy(id, ImageOffset::new(page), copy, entry, snapshots, &mut pages).await?;
                }
            }
            let next = be64(&index, 8);
            unit = u32::try_from(next).unwrap_or_else(|_| {
                self.error(|| format!("map units: unit {unit} is followed by {next}, which is not a unit"));
                0
            });
        }
        Ok(())
    }

    async fn copy(
        &mut self,
        id: u32,
        page: ImageOffset,
        copy: ImageSpan,
        entry: ImageSpan,
        snapshots: &Snapshots,
        pages: &mut BTreeSet<(u32, u64)>,
    ) -> Result<()> {
        if !snapshots.ids.contains(&id) {
            self.leak_to_zero(entry, || {
                format!("copy at {:#x}: snapshot {id} does not exist", copy.start().bytes())
            });
            return Ok(());
        }
        let first = self.places.entry_at(page);
        let is_of_base =
            [Region::Bitmap, Region::Masks].iter().any(|region| self.places.region(*region).contains(page));
        if !page.bytes().is_multiple_of(4096) || !(is_of_base || first.is_some()) {
            self.error(|| {
                format!(
                    "snapshot {id}: the copy at {:#x} is of {:#x}, which is not a page of a view",
                    copy.start().bytes(),
                    page.bytes()
                )
            });
            return Ok(());
        }
        if !pages.insert((id, page.bytes())) {
            self.error(|| format!("snapshot {id}: there are two copies of page {:#x}", page.bytes()));
        }
        let Some(first) = first else { return Ok(()) };
        let Some(bytes) = self.read(copy, "copy of a table page").await else { return Ok(()) };
        let view = format!("snapshot {id}");
        for (index, number) in (first..).zip(bytes.chunks_exact(4).map(|entry| be32(entry, 0))) {
            if number != 0 {
                self.entry(index, number, &view);
            }
        }
        Ok(())
    }
}
