//! Internal snapshots: the table that lists them is read, checked and laid out anew. `snapshots.rs` changes it.
//!
//! ```text
//!   L1 offset 8 │ L1 entries 4 │ id len 2 │ name len 2 │ date 4+4 │ clock 8 │ state 4 │ extra len 4 │ extra │ id │ name │ pad
//! ```
//!
//! An entry keeps its bytes as they were read. One that is written again says everything that it said before, also what
//! other programs put into its extra data.

use std::time::Duration;

use vellum_core::{Buffer, Context, Error, ImageOffset, ImageSpan, Result, Storage};

use super::header::Header;
use super::layout::*;

/// One internal snapshot, as described in its table entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// The place of its L1 table.
    pub(crate) l1: ImageSpan,
    /// A short name that is unique in the image, usually a number.
    pub id: String,
    /// The name the user gave.
    pub name: String,
    /// When it was made: seconds since 1970.
    pub date_seconds: u32,
    /// The rest of that moment, in nanoseconds.
    pub date_nanoseconds: u32,
    /// How long the guest had run, in nanoseconds.
    pub vm_clock_nanoseconds: u64,
    /// Bytes of saved machine state; 0 when only the disk was kept.
    pub vm_state_size: u64,
    /// The size of the disk then, in bytes.
    pub disk_size: u64,
    /// Instructions the guest had executed, if they were counted.
    pub icount: Option<u64>,
    /// Version 3 requires the sizes of the machine's state and of the disk, and the entry is too short to
    /// hold them.
    pub(crate) is_incomplete: bool,
    /// Its entry in the table, without the padding behind it.
    entry: Vec<u8>,
}

/// The table of snapshots, and its place.
#[derive(Debug, Clone)]
pub(crate) struct SnapshotTable {
    pub(crate) snapshots: Vec<Snapshot>,
    pub(crate) span: ImageSpan,
}

/// The internal snapshots of an image, in the order of its table.
///
/// # Errors
/// `Corrupt` when the table is damaged.
pub async fn list(header: &Header, storage: &dyn Storage) -> Result<Vec<Snapshot>> {
    Ok(read_table(header, storage).await?.snapshots)
}

const FIXED_LEN: usize = 40;
/// The extra data that is written: the sizes of the machine's state and of the disk, and the count of instructions.
const EXTRA_LEN: usize = 24;
/// Bytes of a name, as in QEMU, which cuts off longer ones.
pub(crate) const NAME_BYTES_MAX: usize = 255;

/// The part of the table that is in memory: entries are short, and there may be 65,536 of them.
struct Window<'a> {
    storage: &'a dyn Storage,
    at: ImageOffset,
    bytes: Vec<u8>,
}

/// How much of the table is read at once, in bytes.
const WINDOW_BYTES: u64 = 256 << 10;

impl Window<'_> {
    async fn get(&mut self, at: ImageOffset, len: usize) -> Result<&[u8]> {
        let end = at + len as u64;
        if end.bytes() > self.storage.len() {
            return Err(Error::corrupt("the file ends within the snapshot table: it was truncated"));
        }
        if at < self.at || end > self.at + self.bytes.len() as u64 {
            let all = WINDOW_BYTES.max(len as u64).min(self.storage.len() - at.bytes());
            let buffer = Buffer::for_overwrite(usize::try_from(all).expect("bounded"));
            self.bytes = self.storage.read(at, buffer).await?.to_vec();
            self.at = at;
        }
        let from = usize::try_from(at - self.at).expect("within the window");
        Ok(&self.bytes[from..from + len])
    }
}

/// A table of which only a part can be used, without the rest.
#[derive(Debug)]
pub(crate) struct MendedTable {
    pub(crate) table: SnapshotTable,
    /// The entries, by their numbers, that had too much extra data: it was cut.
    pub(crate) cut: Vec<u32>,
    /// Entries behind those that are kept: the table was too long.
    pub(crate) dropped: u32,
}

impl MendedTable {
    /// What is wrong, in lines; nothing for a table that can be used as it is.
    pub(crate) fn faults(&self) -> Vec<String> {
        let cut =
            self.cut.iter().map(|index| format!("too much extra metadata in snapshot table entry {index}"));
        let dropped = (self.dropped > 0)
            .then(|| format!("{} overhanging snapshots: the snapshot table is too big", self.dropped));
        cut.chain(dropped).collect()
    }
}

/// Reads as much of the snapshot table as a repair keeps.
pub(crate) async fn read_table_to_mend(header: &Header, storage: &dyn Storage) -> Result<MendedTable> {
    let (table, cut, kept) = read_entries(header, storage, true).await?;
    Ok(MendedTable { table, cut, dropped: header.snapshot_count - kept + header.overhanging_snapshots })
}

/// Reads the snapshot table.
pub(crate) async fn read_table(header: &Header, storage: &dyn Storage) -> Result<SnapshotTable> {
    Ok(read_entries(header, storage, false).await?.0)
}

/// The table, the numbers of the entries that were cut, and how many were read. With `mends`, entries are cut, and the table
/// ends before it is too long.
async fn read_entries(
    header: &Header,
    storage: &dyn Storage,
    mends: bool,
) -> Result<(SnapshotTable, Vec<u32>, u32)> {
    let start = header.snapshots_offset;
    let mut snapshots = Vec::new();
    let mut cut = Vec::new();
    let mut at = start;
    let mut window = Window { storage, at: start, bytes: Vec::new() };
    let mut l1_bytes = 0;
    for index in 0..header.snapshot_count {
        let context = || format!("{}: snapshot {index} cannot be read", storage.name());
        let (snapshot, len, is_cut) = read_entry(header, &mut window, at, mends).await.context(context)?;
        if at + len - start > SNAPSHOT_TABLE_BYTES_MAX {
            if mends {
                return Ok((SnapshotTable { snapshots, span: ImageSpan::between(start, at) }, cut, index));
            }
            return Err(Error::corrupt("the snapshot table is larger than 64 MiB"));
        }
        l1_bytes += snapshot.l1.len();
        snapshots.push(snapshot);
        if is_cut {
            cut.push(index);
        }
        at += len;
        if l1_bytes > TABLES_BYTES_MAX {
            return Err(Error::corrupt("the L1 tables of its snapshots are larger than 256 MiB together"));
        }
    }
    Ok((SnapshotTable { snapshots, span: ImageSpan::between(start, at) }, cut, header.snapshot_count))
}

/// An entry, the bytes that it takes in the table, and whether some of its extra data is left out.
async fn read_entry(
    header: &Header,
    window: &mut Window<'_>,
    at: ImageOffset,
    mends: bool,
) -> Result<(Snapshot, u64, bool)> {
    let storage = window.storage;
    let mut fixed = [0; FIXED_LEN];
    fixed.copy_from_slice(window.get(at, FIXED_LEN).await?);
    let (id_len, name_len) = (usize::from(be16(&fixed, 12)), usize::from(be16(&fixed, 14)));
    let stored_len = be32(&fixed, 36);
    let is_cut = stored_len > SNAPSHOT_EXTRA_MAX;
    if is_cut && !mends {
        return Err(Error::corrupt(format!("{stored_len} bytes of extra data are too many")));
    }
    let extra_len = stored_len.min(SNAPSHOT_EXTRA_MAX) as usize;
    put32(&mut fixed, 36, stored_len.min(SNAPSHOT_EXTRA_MAX));
    let extra = window.get(at + FIXED_LEN as u64, extra_len).await?.to_vec();
    let names = window.get(at + (FIXED_LEN as u64 + u64::from(stored_len)), id_len + name_len).await?;
    let entry = [&fixed[..], &extra, names].concat();
    let (id, name) = names.split_at(id_len);
    let extra_u64 = |index: usize| (extra.len() >= (index + 1) * 8).then(|| be64(&extra, index * 8));
    let l1_len = u64::from(be32(&fixed, 8)) * 8;
    if l1_len > L1_BYTES_MAX {
        return Err(Error::corrupt(format!("its L1 table of {l1_len} bytes is too large")));
    }
    let l1 = match l1_len {
        0 => ImageOffset::ZERO.span(0),
        _ => header.table(be64(&fixed, 0), l1_len, "L1 table of a snapshot")?,
    };
    if l1.end().bytes() > storage.len() {
        return Err(Error::corrupt("its L1 table lies past the end of the file: it was truncated"));
    }
    let snapshot = Snapshot {
        l1,
        id: String::from_utf8_lossy(id).into_owned(),
        name: String::from_utf8_lossy(name).into_owned(),
        date_seconds: be32(&fixed, 16),
        date_nanoseconds: be32(&fixed, 20),
        vm_clock_nanoseconds: be64(&fixed, 24),
        vm_state_size: extra_u64(0).unwrap_or(u64::from(be32(&fixed, 32))),
        disk_size: extra_u64(1).unwrap_or(header.size()),
        icount: extra_u64(2).filter(|count| *count != u64::MAX),
        is_incomplete: header.version() >= 3 && extra.len() < 16,
        entry,
    };
    let len = FIXED_LEN as u64 + u64::from(stored_len) + (id_len + name_len) as u64;
    Ok((snapshot, len.next_multiple_of(8), is_cut))
}

impl Snapshot {
    /// A snapshot of the disk alone, of which nothing is written yet.
    pub(crate) fn new(l1: ImageSpan, id: String, name: String, now: Duration, disk_size: u64) -> Self {
        let date_seconds = u32::try_from(now.as_secs()).unwrap_or(u32::MAX);
        let mut entry = vec![0; FIXED_LEN + EXTRA_LEN];
        put64(&mut entry, 0, l1.start().bytes());
        put32(&mut entry, 8, u32::try_from(l1.len() / 8).expect("an L1 table is at most 32 MiB"));
        put16(&mut entry, 12, id.len());
        put16(&mut entry, 14, name.len());
        put32(&mut entry, 16, date_seconds);
        put32(&mut entry, 20, now.subsec_nanos());
        put32(&mut entry, 36, u32::try_from(EXTRA_LEN).expect("a few bytes"));
        put64(&mut entry, FIXED_LEN + 8, disk_size);
        put64(&mut entry, FIXED_LEN + 16, u64::MAX);
        entry.extend(id.as_bytes());
        entry.extend(name.as_bytes());
        Self {
            l1,
            id,
            name,
            date_seconds,
            date_nanoseconds: now.subsec_nanos(),
            vm_clock_nanoseconds: 0,
            vm_state_size: 0,
            disk_size,
            icount: None,
            is_incomplete: false,
            entry,
        }
    }

    /// Gives it another name. Everything else stays.
    pub(crate) fn rename(&mut self, name: &str) {
        let old = usize::from(be16(&self.entry, 14));
        self.entry.truncate(self.entry.len() - old);
        self.entry.extend(name.as_bytes());
        put16(&mut self.entry, 14, name.len());
        name.clone_into(&mut self.name);
    }

    /// Adds the sizes that version 3 requires, if they are missing.
    pub(crate) fn complete(&mut self) {
        let extra = be32(&self.entry, 36) as usize;
        if extra >= 16 {
            return;
        }
        let mut sizes = [0; 16];
        put64(&mut sizes, 0, self.vm_state_size);
        put64(&mut sizes, 8, self.disk_size);
        drop(self.entry.splice(FIXED_LEN..FIXED_LEN + extra, sizes));
        put32(&mut self.entry, 36, 16);
        self.is_incomplete = false;
    }
}

fn put16(bytes: &mut [u8], at: usize, value: usize) {
    let value = u16::try_from(value).expect("names were bounded");
    bytes[at..at + 2].copy_from_slice(&value.to_be_bytes());
}

impl SnapshotTable {
    /// The bytes of the table.
    ///
    /// # Errors
    /// `Unsupported` when it would be longer than other programs read.
    pub(crate) fn bytes(&self) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        for snapshot in &self.snapshots {
            bytes.extend(&snapshot.entry);
            bytes.resize(bytes.len().next_multiple_of(8), 0);
        }
        match bytes.len() as u64 <= SNAPSHOT_TABLE_BYTES_MAX {
            true => Ok(bytes),
            false => Err(Error::unsupported(
                "the snapshot table would be larger than 64 MiB: delete snapshots first",
            )),
        }
    }

    /// The snapshot with exactly this name.
    pub(crate) fn named(&self, name: &str) -> Option<&Snapshot> {
        self.snapshots.iter().find(|snapshot| snapshot.name == name)
    }

    /// The snapshot with this id, else with this name, else the one that `snapshot.id=ID,snapshot.name=NAME` means to QEMU,
    /// where one of the two is enough.
    pub(crate) fn find(&self, wanted: &str) -> Option<&Snapshot> {
        let by_id = self.snapshots.iter().find(|snapshot| snapshot.id == wanted);
        by_id.or_else(|| self.named(wanted)).or_else(|| self.find_by_options(wanted))
    }

    fn find_by_options(&self, options: &str) -> Option<&Snapshot> {
        let value = |key: &str| options.split(',').find_map(|option| option.strip_prefix(key));
        let (id, name) = (value("snapshot.id="), value("snapshot.name="));
        let is_meant = |snapshot: &&Snapshot| {
            id.is_none_or(|id| snapshot.id == id) && name.is_none_or(|name| snapshot.name == name)
        };
        (id.is_some() || name.is_some()).then(|| self.snapshots.iter().find(is_meant))?
    }
}
