//! Internal snapshots: the table that lists them is read and checked. They are preserved and can be read.
//! Making and deleting them is left out for now.

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

/// Reads the snapshot table.
pub(crate) async fn read_table(header: &Header, storage: &dyn Storage) -> Result<SnapshotTable> {
    let start = header.snapshots_offset;
    let mut snapshots = Vec::new();
    let mut at = start;
    let mut window = Window { storage, at: start, bytes: Vec::new() };
    let mut l1_bytes = 0;
    for index in 0..header.snapshot_count {
        let context = || format!("{}: snapshot {index} cannot be read", storage.name());
        let (snapshot, len) = read_entry(header, &mut window, at).await.context(context)?;
        l1_bytes += snapshot.l1.len();
        snapshots.push(snapshot);
        at += len;
        if at - start > SNAPSHOT_TABLE_BYTES_MAX {
            return Err(Error::corrupt("the snapshot table is larger than 64 MiB"));
        }
        if l1_bytes > TABLES_BYTES_MAX {
            return Err(Error::corrupt("the L1 tables of its snapshots are larger than 256 MiB together"));
        }
    }
    Ok(SnapshotTable { snapshots, span: ImageSpan::between(start, at) })
}

async fn read_entry(header: &Header, window: &mut Window<'_>, at: ImageOffset) -> Result<(Snapshot, u64)> {
    let storage = window.storage;
    let mut fixed = [0; FIXED_LEN];
    fixed.copy_from_slice(window.get(at, FIXED_LEN).await?);
    let (id_len, name_len) = (usize::from(be16(&fixed, 12)), usize::from(be16(&fixed, 14)));
    let extra_len = be32(&fixed, 36);
    if extra_len > SNAPSHOT_EXTRA_MAX {
        return Err(Error::corrupt(format!("{extra_len} bytes of extra data are too many")));
    }
    let extra_len = extra_len as usize;
    let rest_len = extra_len + id_len + name_len;
    let rest = window.get(at + FIXED_LEN as u64, rest_len).await?;
    let (extra, names) = rest.split_at(extra_len);
    let (id, name) = names.split_at(id_len);
    let extra_u64 = |index: usize| (extra.len() >= (index + 1) * 8).then(|| be64(extra, index * 8));
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
    };
    Ok((snapshot, (FIXED_LEN + rest_len).next_multiple_of(8) as u64))
}

impl SnapshotTable {
    /// The snapshot with this id, else with this name.
    pub(crate) fn find(&self, wanted: &str) -> Option<&Snapshot> {
        let by_id = self.snapshots.iter().find(|snapshot| snapshot.id == wanted);
        by_id.or_else(|| self.snapshots.iter().find(|snapshot| snapshot.name == wanted))
    }
}
