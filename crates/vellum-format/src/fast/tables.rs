//! The tables of a fast medium, read when it is opened.
//!
//! 1. Where nothing was ever written nothing is read.
//! 2. An entry that cannot be read, and may be needed, keeps its bytes; so few that no memory to speak of is taken.
//! 3. A medium that is opened for what is left of it is never written. So of its tables that may be blank which cannot be read.

use roaring::RoaringBitmap;
use vellum_core::{BlockSize, Buffer, Error, ImageOffset, ImageSpan, Result, SharedStorage};

use super::layout::{ENTRY_LEN, Entry, FastId, Layout, ROW_LEN, ROWS, Row, SUPER_LEN, parse_super};
use crate::hash::HashMap;
use crate::truth::reconcile;

/// The table is read in pieces of this many bytes, a multiple of an entry.
const READ_AT_ONCE: u64 = 1 << 20;
/// Rows are read in pieces of this many.
const PIECE_LEN: usize = 64 << 10;
/// More entries than these that cannot be read are no accident of some sectors.
const UNREADABLE_MAX: usize = 1 << 16;

/// How the tables are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tables {
    /// All of them, or there is an error.
    Whole,
    /// What can be read.
    WhatIsLeft,
}

impl Tables {
    /// The bytes of a span; zeros for pages of it that cannot be read, if that is allowed.
    async fn read(self, storage: &SharedStorage, span: ImageSpan) -> Result<Vec<u8>> {
        let len = |span: ImageSpan| usize::try_from(span.len()).expect("a piece");
        match storage.read(span.start(), Buffer::for_overwrite(len(span))).await {
            Err(_) if self == Self::WhatIsLeft => {}
            read => return Ok(read?.to_vec()),
        }
        let (mut bytes, mut rest) = (Vec::with_capacity(len(span)), span);
        while !rest.is_empty() {
            let (page, later) = rest.split_at(BlockSize::PAGE.bytes());
            match storage.read(page.start(), Buffer::for_overwrite(len(page))).await {
                Ok(read) => bytes.extend(read.to_vec()),
                Err(_) => bytes.resize(bytes.len() + len(page), 0),
            }
            rest = later;
        }
        Ok(bytes)
    }
}

pub(super) async fn read_super(storage: &SharedStorage, tables: Tables) -> Result<(FastId, Layout)> {
    let span = ImageOffset::ZERO.span(2 * SUPER_LEN as u64);
    let len = match tables {
        Tables::Whole => {
            reconcile(&**storage, span).await?;
            storage.len()
        }
        Tables::WhatIsLeft => u64::MAX,
    };
    let both = tables.read(storage, span).await?;
    let (first, copy) = both.split_at(SUPER_LEN);
    match parse_super(first, len) {
        Err(error) => parse_super(copy, len).map_err(|_| error),
        found => found,
    }
}

/// Whether nothing was ever written there.
async fn is_hole(storage: &SharedStorage, span: ImageSpan) -> Result<bool> {
    let runs = storage.runs(span).await?;
    Ok(runs.iter().all(|run| !run.is_data) && runs.last().is_some_and(|run| run.span.end() >= span.end()))
}

/// The rows, and which of them are damaged.
pub(super) async fn read_rows(
    storage: &SharedStorage,
    tables: Tables,
) -> Result<(Vec<Option<Row>>, RoaringBitmap)> {
    let (mut rows, mut bad) = (Vec::with_capacity(usize::from(ROWS)), RoaringBitmap::new());
    let mut rest = Layout::rows();
    while !rest.is_empty() {
        let (now, later) = rest.split_at(PIECE_LEN as u64);
        let len = usize::try_from(now.len()).expect("a piece");
        if is_hole(storage, now).await? {
            rows.resize(rows.len() + len / ROW_LEN, None);
        } else {
            for bytes in tables.read(storage, now).await?.chunks(ROW_LEN) {
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
    (may_be_needed, tables): (bool, Tables),
) -> Result<Entries> {
    // What a slot that was cut off had is lost in any case.
    let slots = match tables {
        Tables::Whole => layout.slots,
        Tables::WhatIsLeft => layout.slots_within(storage.len()),
    };
    let mut found = Entries {
        entries: Vec::with_capacity(slots as usize),
        litter: RoaringBitmap::new(),
        unreadable: HashMap::default(),
        sequence: 0,
    };
    let table = u64::from(slots) * ENTRY_LEN as u64;
    let mut rest = layout.table().split_at(BlockSize::SECTOR.round_up(table)).0;
    while !rest.is_empty() {
        let (now, later) = rest.split_at(READ_AT_ONCE);
        let len = usize::try_from(now.len()).expect("a piece");
        let is_hole = is_hole(storage, now).await?;
        let bytes = match is_hole {
            true => vec![0; len],
            false => tables.read(storage, now).await?,
        };
        for bytes in bytes.chunks(ENTRY_LEN) {
            let slot = u32::try_from(found.entries.len()).expect("at most 2^28");
            if slot >= slots {
                break;
            }
            let entry = if is_hole { None } else { Entry::parse(slot, bytes, rows) };
            found.sequence = found.sequence.max(entry.map_or(0, |entry| entry.sequence));
            found.entries.push(entry);
            if entry.is_some() || bytes.iter().all(|byte| *byte == 0) {
                continue;
            }
            if !may_be_needed || tables == Tables::WhatIsLeft {
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
