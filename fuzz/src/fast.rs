//! A fast medium that is damaged or made up: opened, described, given a row, and deprived of one.
//!
//! ```text
//!   │ slots │ seals │ poke │ poke │ …      a poke: where in the tables (3 bytes), how many, these bytes
//! ```
//!
//! Checksums are made after the pokes, where `seals` says so: nothing behind them would be reached otherwise.

use std::sync::Arc;

use futures_lite::future::block_on;
use vellum_core::memory::SparseBytes;
use vellum_core::{ErrorKind, ImageOffset, Limits, MemoryStorage, Random, SharedStorage};
use vellum_format::fast::{FastId, FastMedium, NewRow, create};

const PAGE: usize = 4096;
const ROWS_AT: usize = 2 * PAGE;
const ROW: usize = 512;
const ROWS: usize = 1024;
const ENTRIES_AT: usize = ROWS_AT + ROW * ROWS;
const ENTRY: usize = 32;
const POKES_MAX: usize = 64;
const SLOTS_MAX: u32 = 64;

fn seal(tables: &mut [u8], at: usize, len: usize, number: u32, more: &[u8]) {
    let crc = crc32c::crc32c_append(crc32c::crc32c(&number.to_be_bytes()), &tables[at + 4..at + len]);
    let crc = crc32c::crc32c_append(crc, more);
    tables[at..at + 4].copy_from_slice(&crc.to_be_bytes());
}

/// The target.
pub fn fast_medium(data: &[u8]) {
    let [slots, seals, pokes @ ..] = data else { return };
    let mut rest = pokes;
    let slots = u32::from(*slots) % SLOTS_MAX + 1;
    let bytes = u64::from(slots + 16) << 16;
    let storage: SharedStorage = MemoryStorage::with("fast", Limits::plain(), SparseBytes::default());
    let tables_len = ENTRIES_AT + ENTRY * SLOTS_MAX as usize;
    let mut tables = block_on(async {
        create(&storage, bytes, FastId::new([7; 16]).expect("not zero")).await.expect("a medium");
        let tables = storage.read(ImageOffset::ZERO, vellum_core::Buffer::for_overwrite(tables_len)).await;
        tables.expect("its tables").to_vec()
    });
    for _ in 0..POKES_MAX {
        let [high, middle, low, count, more @ ..] = rest else { break };
        let at = (usize::from(*high) << 16 | usize::from(*middle) << 8 | usize::from(*low)) % tables.len();
        let len = usize::from(*count % 32 + 1).min(more.len()).min(tables.len() - at);
        tables[at..at + len].copy_from_slice(&more[..len]);
        rest = &more[len..];
    }
    if seals & 1 != 0 {
        for at in [0, PAGE] {
            tables[at + 8..at + 12].fill(0);
            let crc = crc32c::crc32c(&tables[at..at + PAGE]);
            tables[at + 8..at + 12].copy_from_slice(&crc.to_be_bytes());
        }
    }
    for row in (0..ROWS as u32).filter(|row| seals & 2 != 0 && *row < 64) {
        let at = ROWS_AT + ROW * row as usize;
        if tables[at..at + ROW].iter().any(|byte| *byte != 0) {
            seal(&mut tables, at, ROW, row, &[]);
        }
    }
    for slot in (0..SLOTS_MAX).filter(|_| seals & 4 != 0) {
        let at = ENTRIES_AT + ENTRY * slot as usize;
        let row = usize::from(u16::from_be_bytes([tables[at + 4], tables[at + 5]])) % ROWS;
        let uuid = tables[ROWS_AT + ROW * row + 8..][..16].to_vec();
        if tables[at..at + ENTRY].iter().any(|byte| *byte != 0) {
            seal(&mut tables, at, ENTRY, slot, &uuid);
        }
    }
    crate::bounded(|| {
        block_on(async {
            storage.write(ImageOffset::ZERO, vellum_core::Buffer::copy_of(&tables)).await.expect("memory");
            let open = || FastMedium::open(storage.clone(), Random::from_seed(1));
            let Ok(medium) = open().await else { return };
            let used = |medium: &Arc<FastMedium>| medium.rows().iter().map(|row| row.used).sum::<u64>();
            assert!(medium.free_bytes() + used(&medium) <= medium.room_bytes());
            let rows = medium.rows();
            let new = NewRow { uuid: [9; 16], budget: u64::MAX, name: "é".repeat(200) };
            let attached = medium.attach(new).await;
            drop(medium);
            let Ok(medium) = open().await else { panic!("it was open a moment ago") };
            let again = medium.rows();
            assert_eq!(
                again.len(),
                rows.len() + usize::from(attached.is_ok() && !rows.iter().any(|row| row.uuid == [9; 16]))
            );
            let is_known = medium.check_tables().is_ok();
            for row in again {
                if !is_known {
                    let kept = medium.forget(row.uuid, true).await;
                    assert!(kept.is_err_and(|error| error.kind() == ErrorKind::Refused), "not all is known");
                    continue;
                }
                let gone = match medium.forget(row.uuid, false).await {
                    Err(error) if error.kind() == ErrorKind::Refused => medium.forget(row.uuid, true).await,
                    gone => gone,
                };
                assert!(gone.expect("memory"), "a row that is listed");
            }
            // A slot of which the entry is damaged stays somebody's.
            assert!(
                medium.rows().is_empty() == (is_known || rows.is_empty())
                    && medium.free_bytes() <= medium.room_bytes()
            );
        });
    });
}
