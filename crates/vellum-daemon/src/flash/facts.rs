//! What is said of a flash cache and of the disks that use it.

use std::path::Path;

use serde::Serialize;
use vellum_flash::{Facts, FlashCache, FlashCounts, Look, MetadataCounts, RowFacts};
use vellum_layer::Chain;

use super::word_of;

/// Bytes of a block.
const BLOCK: u64 = 4096;

/// A flash cache that a server has open.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct CacheStats {
    /// Where it is.
    pub path: String,
    /// Its id.
    pub id: String,
    /// `running`, or `failed` when it has stopped: its disks refuse writes until the server is started again.
    pub state: String,
    /// Why it has stopped.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
    /// Bytes that it can hold.
    pub capacity_bytes: u64,
    /// Bytes that it holds.
    pub cached_bytes: u64,
    /// Bytes of those that images do not have yet.
    pub dirty_bytes: u64,
    /// Runs of zeros that images do not have yet.
    pub zero_runs: u64,
    /// Regions of 64 MiB that are being written through: after an unclean end their blocks are read anew.
    pub written_regions: u64,
    /// Memory that its map takes, in bytes.
    pub memory_bytes: u64,
    /// The most memory that it takes, in bytes.
    pub budget_bytes: u64,
    /// What counts against that: what is there, and what a commit may take besides.
    pub budget_used_bytes: u64,
    /// Records that were written: one for each flush, or fewer.
    pub records: u64,
    /// Bytes of those.
    pub record_bytes: u64,
    /// Parts of the map that were written.
    pub slices: u64,
    /// Bytes of those.
    pub slice_bytes: u64,
    /// Flushes of the flash.
    pub flushes: u64,
    /// Bytes that became free and were passed to the drive as discards.
    pub discard_bytes: u64,
}

impl CacheStats {
    pub(super) fn of(path: &Path, cache: &FlashCache) -> Self {
        let (facts, counts) = (cache.facts(), cache.counts());
        let failure = cache.failure();
        Self {
            path: path.display().to_string(),
            id: cache.id().to_string(),
            state: if failure.is_some() { "failed" } else { "running" }.to_owned(),
            last_error: failure.map(|error| error.chain()),
            capacity_bytes: facts.slots * BLOCK,
            cached_bytes: facts.blocks * BLOCK,
            dirty_bytes: facts.dirty_blocks * BLOCK,
            zero_runs: facts.zero_runs,
            written_regions: facts.written_regions,
            memory_bytes: facts.memory_bytes,
            budget_bytes: facts.budget_bytes,
            budget_used_bytes: facts.budget_used_bytes,
            records: counts.records,
            record_bytes: counts.record_bytes,
            slices: counts.slices,
            slice_bytes: counts.slice_bytes,
            flushes: counts.flushes,
            discard_bytes: counts.discard_bytes,
        }
    }
}

/// A disk that uses a flash cache.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct FlashStats {
    /// `writeback`, `writethrough`, `readonly` or `off`.
    pub policy: String,
    /// Bytes that the cache has and the image has not.
    pub dirty_bytes: u64,
    /// Why nothing could be written home the last time; nothing when it could.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
    /// What was counted for the disk itself.
    pub disk: FlashOperations,
    /// What was counted for the images below it. Disks that share those images share these counts.
    pub below: FlashOperations,
    /// What was read of the tables of the image itself.
    pub tables: TableReads,
    /// What was read of those of the images below it. Disks that share those images share these counts.
    pub below_tables: TableReads,
}

/// From where the tables of an image were read: L2 tables and refcounts, or pages of the mapping.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct TableReads {
    /// Entries of L2 tables that were looked up.
    pub lookups: u64,
    /// Those that were in memory, or known to be zero.
    pub memory_hits: u64,
    /// Reads that needed nothing because the table was known to be zero.
    pub zeros: u64,
    /// Reads from flash.
    pub flash_hits: u64,
    /// Reads from the image.
    pub misses: u64,
    /// Bytes read from flash.
    pub flash_read_bytes: u64,
    /// Bytes read from the image.
    pub image_read_bytes: u64,
    /// Bytes written to flash.
    pub flash_write_bytes: u64,
}

impl From<MetadataCounts> for TableReads {
    fn from(counts: MetadataCounts) -> Self {
        Self {
            lookups: counts.lookups,
            memory_hits: counts.memory_hits(),
            zeros: counts.zeros,
            flash_hits: counts.flash_hits,
            misses: counts.misses,
            flash_read_bytes: counts.flash_read_bytes,
            image_read_bytes: counts.image_read_bytes,
            flash_write_bytes: counts.flash_write_bytes,
        }
    }
}

/// What a flash cache has done for a disk.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct FlashOperations {
    /// Blocks that were read from the cache.
    pub hits: u64,
    /// Blocks that were read from the image.
    pub misses: u64,
    /// Blocks that were written to the cache.
    pub writes: u64,
    /// Blocks that were read from the image and kept.
    pub admitted: u64,
    /// Blocks that were read from the image and not kept.
    pub refused: u64,
    /// Blocks that were given up early, because a write masks them.
    pub demoted: u64,
    /// Blocks that were written home to the image.
    pub written_home: u64,
    /// Bytes written to flash for writes.
    pub write_bytes: u64,
    /// Bytes written to flash to keep what was read.
    pub admit_bytes: u64,
    /// Requests to flash or to the image that failed.
    pub errors: u64,
    /// Blocks that were written through and are not cached: another request wrote them too, or there was no room.
    pub passed: u64,
}

impl From<FlashCounts> for FlashOperations {
    fn from(counts: FlashCounts) -> Self {
        Self {
            hits: counts.hits,
            misses: counts.misses,
            writes: counts.writes,
            admitted: counts.admitted,
            refused: counts.refused,
            demoted: counts.demoted,
            written_home: counts.written_home,
            write_bytes: counts.slot_writes,
            admit_bytes: counts.admit_writes,
            errors: counts.errors,
            passed: counts.passed,
        }
    }
}

impl FlashStats {
    /// Those of the disk of a chain; `None` if the chain has no cache.
    pub(crate) fn of(chain: &Chain) -> Option<Self> {
        let below: FlashOperations = chain.flash_below().into();
        let tables = chain.flash_tables().into();
        let below_tables = chain.flash_tables_below().into();
        match chain.flash() {
            Some(flash) => Some(Self {
                policy: word_of(flash.policy()).to_owned(),
                dirty_bytes: flash.dirty_blocks() * BLOCK,
                last_error: flash.trouble().map(|error| error.chain()),
                disk: flash.counts().into(),
                below,
                tables,
                below_tables,
            }),
            None if chain.has_flash_choice() => {
                Some(Self { policy: "off".to_owned(), below, tables, below_tables, ..Self::default() })
            }
            None => None,
        }
    }
}

/// What a cache that no server has open holds, for programs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct CacheFacts {
    /// Where it is.
    pub filename: String,
    /// Its id.
    pub id: String,
    /// The length of the file or device that it uses, in bytes.
    pub size: u64,
    /// Bytes that it can hold.
    pub capacity_bytes: u64,
    /// Bytes that it holds.
    pub cached_bytes: u64,
    /// Bytes of those that images do not have yet.
    pub dirty_bytes: u64,
    /// Runs of zeros that images do not have yet.
    pub zero_runs: u64,
    /// Regions of 64 MiB that are being written through: after an unclean end their blocks are read anew.
    pub written_regions: u64,
    /// The number of its newest record.
    pub sequence: u64,
    /// Memory that its map takes in a server, in bytes.
    pub memory_bytes: u64,
    /// The most memory that it takes there where nothing else is said, in bytes.
    pub budget_bytes: u64,
    /// What counts against that: what is there, and what a commit may take besides.
    pub budget_used_bytes: u64,
    /// The disks of which it knows something.
    pub disks: Vec<DiskFacts>,
}

/// A disk of which a cache knows something.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct DiskFacts {
    /// What it is known by. A file that takes the place of another's may have the same.
    pub disk: String,
    /// `disk`, or `tables` for the tables of an image.
    pub kind: String,
    /// The number of the newest session; none for an image that is only read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session: Option<String>,
    /// Bytes that are cached.
    pub cached_bytes: u64,
    /// Bytes that its image does not have yet.
    pub dirty_bytes: u64,
    /// Bytes that are zero, and that its image does not have as zeros yet.
    pub zero_bytes: u64,
}

impl DiskFacts {
    fn of(row: &RowFacts) -> Self {
        Self {
            disk: row.disk.iter().map(|byte| format!("{byte:02x}")).collect(),
            kind: if row.is_tables { "tables" } else { "disk" }.to_owned(),
            session: row.newest.map(|number| number.to_string()),
            cached_bytes: row.blocks * BLOCK,
            dirty_bytes: row.dirty_blocks * BLOCK,
            zero_bytes: row.zero_blocks * BLOCK,
        }
    }
}

/// What is found in a cache, as it is answered.
pub fn facts_said(path: &Path, found: &Look) -> CacheFacts {
    let Facts {
        file_bytes,
        slots,
        blocks,
        dirty_blocks,
        zero_runs,
        written_regions,
        sequence,
        memory_bytes,
        budget_bytes,
        budget_used_bytes,
        ..
    } = found.facts;
    CacheFacts {
        filename: path.display().to_string(),
        id: found.id.to_string(),
        size: file_bytes,
        capacity_bytes: slots * BLOCK,
        cached_bytes: blocks * BLOCK,
        dirty_bytes: dirty_blocks * BLOCK,
        zero_runs,
        written_regions,
        sequence,
        memory_bytes,
        budget_bytes,
        budget_used_bytes,
        disks: {
            let (tables, disks): (Vec<&RowFacts>, Vec<&RowFacts>) =
                found.rows.iter().partition(|row| row.is_tables);
            disks.into_iter().chain(tables).map(DiskFacts::of).collect()
        },
    }
}

/// A picture of the slots of a cache ([`Look::strip`]), from the first to the last, in `columns` characters: `.` where nothing is
/// cached, `-`, `=`, `#` for a part that is up to a half, mostly, or all in use, and `*` where some of it is dirty.
pub fn map_strip(strip: &[(u32, u32, u32)], columns: usize) -> String {
    let columns = columns.min(strip.len());
    let of = |column: usize| {
        let (first, end) = (column * strip.len() / columns, (column + 1) * strip.len() / columns);
        let part = &strip[first..end];
        let sum = |number: fn(&(u32, u32, u32)) -> u32| part.iter().map(|one| u64::from(number(one))).sum();
        let (slots, used, dirty): (u64, u64, u64) = (sum(|one| one.0), sum(|one| one.1), sum(|one| one.2));
        match () {
            () if dirty > 0 => '*',
            () if used == 0 => '.',
            () if used * 2 <= slots => '-',
            () if used < slots => '=',
            () => '#',
        }
    };
    (0..columns).map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_strip_shows_what_is_used_and_what_is_dirty() {
        let strip = vec![(4, 0, 0), (4, 1, 0), (4, 3, 0), (4, 4, 0), (4, 4, 1), (4, 0, 0)];
        assert_eq!(map_strip(&strip, 80), ".-=#*.");
        assert_eq!(map_strip(&strip, 3), "-=*");
        assert_eq!(map_strip(&strip, 1), "*");
        assert_eq!(map_strip(&[], 10), "");
    }
}
