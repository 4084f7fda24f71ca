//! Everything that a cache holds, in lines: the form in which `tools/check-flash.py --list` prints it too, so that two
//! readings of the same bytes can be compared.

use vellum_core::{Result, SharedStorage};

use crate::recover;
use crate::state::State;

/// Each row, word of written regions, run of zeros and block of a cache that is not open, in order. Writes nothing.
///
/// # Errors
/// `Corrupt` when it is none or has lost what was durable, `Unsupported` for another version, and those of the storage.
#[doc(hidden)]
pub async fn listing(storage: &SharedStorage) -> Result<Vec<String>> {
    let state = State::new(recover::start_of(recover::look(storage).await?));
    let mut lines = Vec::new();
    for row in state.ledger.rows.values() {
        let (number, has_record) = (row.number, u8::from(row.has_record));
        lines.push(format!(
            "row {number} {:032x} {:032x} {:032x} {has_record}",
            row.disk, row.named, row.newest
        ));
    }
    for word in state.ledger.regions.words() {
        lines.push(format!("written {} {} {:016x}", word.key.row(), word.key.block(), word.bits));
    }
    for run in state.ledger.zeros.runs() {
        let (key, may_free) = (run.key, u8::from(run.may_free));
        lines.push(format!("zero {} {} {} {may_free}", key.row(), key.block(), run.blocks));
    }
    let mut entries: Vec<_> = state.map.entries().collect();
    entries.sort_unstable_by_key(|(key, _)| *key);
    for (key, entry) in entries {
        let (row, block, slot) = (key.row(), key.block(), entry.slot.0);
        lines.push(format!("block {row} {block} {slot} {:02x} {}", entry.sectors, u8::from(entry.dirty)));
    }
    Ok(lines)
}
