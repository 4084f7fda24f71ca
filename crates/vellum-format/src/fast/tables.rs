//! The tables of a fast medium, read when it is opened.
//!
//! 1. Where nothing was ever written nothing is read.
//! 2. An entry that is damaged, and may be needed, is like one that cannot be read: nothing is written there.
//! 3. A medium that is opened for what is left of it is never written. So of its tables that may be blank which cannot be read.
//! 4. What cannot be read is known by sectors. A medium with such sectors keeps them as they are, and gets nothing new. If there are
//!    too many of them, it is not opened.

use roaring::RoaringBitmap;
use vellum_core::{BlockSize, Buffer, ImageOffset, ImageSpan, Result, SharedStorage};

use super::layout::{
    ENTRIES_TOGETHER, ENTRY_LEN, Entry, Layout, ROW_LEN, ROWS, Row, SUPER_LEN, Super, parse_super,
};
use crate::truth::reconcile;

/// The table is read in pieces of this many bytes, a multiple of an entry.
const READ_AT_ONCE: u64 = 1 << 20;
/// Rows are read in pieces of this many.
const PIECE_LEN: usize = 64 << 10;
/// At most this many sectors of a piece that is read at once may be unreadable: with more the medium is beyond use.
const BAD_SECTORS_MAX: usize = 64;

/// How the tables are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tables {
    /// All of them, or there is an error.
    Whole,
    /// What can be read.
    WhatIsLeft,
}

impl Tables {
    /// How long the medium must seem to be.
    pub(super) fn len_of(self, storage: &SharedStorage) -> u64 {
        match self {
            Self::Whole => storage.len(),
            Self::WhatIsLeft => u64::MAX,
        }
    }

    /// The bytes of a span, zeros for sectors of it that cannot be read, and which ones these are, counted from its start.
    async fn read(self, storage: &SharedStorage, span: ImageSpan) -> Result<(Vec<u8>, Vec<u32>)> {
        let read = async |span: ImageSpan| {
            let len = usize::try_from(span.len()).expect("a piece");
            storage.read(span.start(), Buffer::for_overwrite(len)).await.map(|read| read.to_vec())
        };
        if let Ok(bytes) = read(span).await {
            return Ok((bytes, Vec::new()));
        }
        let (mut bytes, mut bad, mut rest) = (Vec::new(), Vec::new(), span);
        while !rest.is_empty() {
            let (page, later) = rest.split_at(BlockSize::PAGE.bytes());
            rest = later;
            if let Ok(read) = read(page).await {
                bytes.extend(read);
                continue;
            }
            let mut sectors = page;
            while !sectors.is_empty() {
                let (sector, later) = sectors.split_at(BlockSize::SECTOR.bytes());
                sectors = later;
                match read(sector).await {
                    Ok(read) => bytes.extend(read),
                    Err(error) if self == Self::Whole && bad.len() == BAD_SECTORS_MAX => return Err(error),
                    Err(_) => {
                        let number = (sector.start() - span.start()) / BlockSize::SECTOR.bytes();
                        bad.push(u32::try_from(number).expect("a piece"));
                        let len = usize::try_from(sector.len()).expect("a sector");
                        bytes.resize(bytes.len() + len, 0);
                    }
                }
            }
        }
        Ok((bytes, bad))
    }
}

/// What both superblocks say.
pub(super) async fn read_supers(storage: &SharedStorage, tables: Tables) -> [Result<Super>; 2] {
    let page = async |number: u64| {
        let span = ImageOffset::new(number * SUPER_LEN as u64).span(SUPER_LEN as u64);
        if tables == Tables::Whole {
            reconcile(&**storage, span).await?;
        }
        let read = storage.read(span.start(), Buffer::for_overwrite(SUPER_LEN)).await?;
        parse_super(&read.to_vec())
    };
    [page(0).await, page(1).await]
}

/// What counts of them: the first, unless that is damaged or cannot be read, or the other one says that more of the medium was cut off.
///
/// # Errors
/// What is wrong with the first, where neither is good.
pub(super) fn one_of(pages: &[Result<Super>; 2]) -> Result<Super> {
    match pages {
        [Ok(first), Ok(copy)] if first.id == copy.id && first.layout == copy.layout => {
            Ok(if copy.len() < first.len() { *copy } else { *first })
        }
        [Ok(one), _] | [Err(_), Ok(one)] => Ok(*one),
        [Err(error), Err(_)] => Err(error.clone()),
    }
}

/// Whether nothing was ever written there.
async fn is_hole(storage: &SharedStorage, span: ImageSpan) -> Result<bool> {
    let runs = storage.runs(span).await?;
    Ok(runs.iter().all(|run| !run.is_data) && runs.last().is_some_and(|run| run.span.end() >= span.end()))
}

/// The rows.
pub(super) struct Rows {
    pub(super) rows: Vec<Option<Row>>,
    /// Those that are damaged, or cannot be read.
    pub(super) bad: RoaringBitmap,
}

/// The rows, and which of them are damaged.
pub(super) async fn read_rows(storage: &SharedStorage, tables: Tables) -> Result<Rows> {
    let (mut rows, mut bad) = (Vec::with_capacity(usize::from(ROWS)), RoaringBitmap::new());
    let mut rest = Layout::rows();
    while !rest.is_empty() {
        let (now, later) = rest.split_at(PIECE_LEN as u64);
        let len = usize::try_from(now.len()).expect("a piece");
        if is_hole(storage, now).await? {
            rows.resize(rows.len() + len / ROW_LEN, None);
        } else {
            let (bytes, unread) = tables.read(storage, now).await?;
            let first = u32::try_from(rows.len()).expect("at most 1024");
            bad.extend(unread.iter().map(|sector| first + sector));
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
    Ok(Rows { rows, bad })
}

/// The entries.
pub(super) struct Entries {
    pub(super) entries: Vec<Option<Entry>>,
    /// Slots whose entries cannot be read and are not needed.
    pub(super) litter: RoaringBitmap,
    /// Slots whose entries are damaged and may be needed, lie in sectors that cannot be read, or say nothing because their slots were
    /// cut off.
    pub(super) blind: RoaringBitmap,
    /// The highest.
    pub(super) sequence: u64,
}

/// The entries of a medium with these rows, some of which may be needed.
pub(super) async fn read_entries(
    storage: &SharedStorage,
    found: &Super,
    rows: &[Option<Row>],
    (has_bad_rows, tables): (bool, Tables),
) -> Result<Entries> {
    let may_be_needed = has_bad_rows || rows.iter().flatten().any(|row| row.is_needed);
    // What a slot that was cut off had is lost in any case.
    let layout = found.layout;
    let slots = match tables {
        Tables::Whole => layout.slots,
        Tables::WhatIsLeft => layout.slots_within(storage.len().min(found.len())),
    };
    let whole_slots = found.whole_slots();
    let mut read = Entries {
        entries: Vec::with_capacity(slots as usize),
        litter: RoaringBitmap::new(),
        blind: RoaringBitmap::new(),
        sequence: 0,
    };
    let table = u64::from(slots) * ENTRY_LEN as u64;
    let mut rest = layout.table().split_at(BlockSize::SECTOR.round_up(table)).0;
    while !rest.is_empty() {
        let (now, later) = rest.split_at(READ_AT_ONCE);
        let len = usize::try_from(now.len()).expect("a piece");
        let is_hole = is_hole(storage, now).await?;
        let (bytes, unread) = match is_hole {
            true => (vec![0; len], Vec::new()),
            false => tables.read(storage, now).await?,
        };
        let first = u32::try_from(read.entries.len()).expect("at most 2^28");
        for sector in unread {
            let slot = first + sector * ENTRIES_TOGETHER;
            read.blind.insert_range(slot..(slot + ENTRIES_TOGETHER).min(slots));
        }
        for bytes in bytes.chunks(ENTRY_LEN) {
            let slot = u32::try_from(read.entries.len()).expect("at most 2^28");
            if slot >= slots {
                break;
            }
            let entry = if is_hole { None } else { Entry::parse(slot, bytes, rows) };
            read.sequence = read.sequence.max(entry.map_or(0, |entry| entry.sequence));
            if slot >= whole_slots && tables == Tables::Whole {
                read.entries.push(None);
                read.blind.insert(slot);
                continue;
            }
            read.entries.push(entry);
            if entry.is_some() || bytes.iter().all(|byte| *byte == 0) {
                continue;
            }
            match may_be_needed && tables == Tables::Whole {
                true => read.blind.insert(slot),
                false => read.litter.insert(slot),
            };
        }
        rest = later;
    }
    Ok(read)
}
