//! The tables of a fast medium, read when it is opened.
//!
//! 1. Where nothing was ever written nothing is read.
//! 2. An entry that cannot be read, and may be needed, keeps its bytes; so few that no memory to speak of is taken.

use roaring::RoaringBitmap;
use vellum_core::{Buffer, Error, ImageOffset, ImageSpan, Result, SharedStorage};

use super::layout::{ENTRY_LEN, Entry, FastId, Layout, ROW_LEN, ROWS, Row, SUPER_LEN, parse_super};
use crate::hash::HashMap;
use crate::truth::reconcile;

/// The table is read in pieces of this many bytes, a multiple of an entry.
const READ_AT_ONCE: u64 = 1 << 20;
/// Rows are read in pieces of this many.
const PIECE_LEN: usize = 64 << 10;
/// More entries than these that cannot be read are no accident of some sectors.
const UNREADABLE_MAX: usize = 1 << 16;

pub(super) async fn read_super(storage: &SharedStorage) -> Result<(FastId, Layout)> {
    reconcile(&**storage, ImageOffset::ZERO.span(2 * SUPER_LEN as u64)).await?;
    let both = storage.read(ImageOffset::ZERO, Buffer::for_overwrite(2 * SUPER_LEN)).await?.to_vec();
    let (first, copy) = both.split_at(SUPER_LEN);
    match parse_super(first, storage.len()) {
        Err(error) => parse_super(copy, storage.len()).map_err(|_| error),
        found => found,
    }
}

/// Whether nothing was ever written there.
async fn is_hole(storage: &SharedStorage, span: ImageSpan) -> Result<bool> {
    let runs = storage.runs(span).await?;
    Ok(runs.iter().all(|run| !run.is_data) && runs.last().is_some_and(|run| run.span.end() >= span.end()))
}

/// The rows, and which of them are damaged.
pub(super) async fn read_rows(storage: &SharedStorage) -> Result<(Vec<Option<Row>>, RoaringBitmap)> {
    let (mut rows, mut bad) = (Vec::with_capacity(usize::from(ROWS)), RoaringBitmap::new());
    let mut rest = Layout::rows();
    while !rest.is_empty() {
        let (now, later) = rest.split_at(PIECE_LEN as u64);
        let len = usize::try_from(now.len()).expect("a piece");
        if is_hole(storage, now).await? {
            rows.resize(rows.len() + len / ROW_LEN, None);
        } else {
            let bytes = storage.read(now.start(), Buffer::for_overwrite(len)).await?.to_vec();
            for bytes in bytes.chunks(ROW_LEN) {
                let number = u16::try_from(rows.len()).expect("at most 1024");
                let row = Row::parse(number, bytes);
                if row.is_none() && bytes.iter().any(|byte| *byte != 0) {
                    bad.insert(number.into());
                }
                rows.push(row);
            }
        }
        rest = later;
    }
    Ok((rows, bad))
}

/// The entries.
pub(super) struct Entries {
    pub(super) entries: Vec<Option<Entry>>,
    /// Slots whose entries cannot be read and are not needed.
    pub(super) litter: RoaringBitmap,
    /// Those that may be needed.
    pub(super) unreadable: HashMap<u32, [u8; ENTRY_LEN]>,
    /// The highest.
    pub(super) sequence: u64,
}

/// The entries of a medium with these rows, some of which may be needed.
pub(super) async fn read_entries(
    storage: &SharedStorage,
    layout: Layout,
    rows: &[Option<Row>],
    may_be_needed: bool,
) -> Result<Entries> {
    let mut found = Entries {
        entries: Vec::with_capacity(layout.slots as usize),
        litter: RoaringBitmap::new(),
        unreadable: HashMap::default(),
        sequence: 0,
    };
    let mut rest = layout.table();
    while !rest.is_empty() {
        let (now, later) = rest.split_at(READ_AT_ONCE);
        let len = usize::try_from(now.len()).expect("a piece");
        let is_hole = is_hole(storage, now).await?;
        let bytes = match is_hole {
            true => vec![0; len],
            false => storage.read(now.start(), Buffer::for_overwrite(len)).await?.to_vec(),
        };
        for bytes in bytes.chunks(ENTRY_LEN) {
            let slot = u32::try_from(found.entries.len()).expect("at most 2^28");
            if slot >= layout.slots {
                break;
            }
            let entry = if is_hole { None } else { Entry::parse(slot, bytes, rows) };
            found.sequence = found.sequence.max(entry.map_or(0, |entry| entry.sequence));
            found.entries.push(entry);
            if entry.is_some() || bytes.iter().all(|byte| *byte == 0) {
                continue;
            }
            if !may_be_needed {
                found.litter.insert(slot);
                continue;
            }
            found.unreadable.insert(slot, bytes.try_into().expect("an entry"));
            if found.unreadable.len() > UNREADABLE_MAX {
                let why = format!("more than {UNREADABLE_MAX} entries of its table are damaged");
                return Err(Error::corrupt(why));
            }
        }
        rest = later;
    }
    Ok(found)
}
