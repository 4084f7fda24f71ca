//! What becomes of the entries of an L2 table that is copied (`shadow.rs`).

use std::ops::Range;

use vellum_core::{BlockSize, Error, ImageOffset, Result};

use super::entry::{ClusterState, Entries, Units};
use super::layout::{be64, put64};
use super::tree::entries_in;

/// The two words of an entry of a table.
fn words_in(kinds: Entries, table: &[u8], index: usize) -> (u64, u64) {
    let at = index * kinds.words() * 8;
    (be64(table, at), if kinds.words() == 2 { be64(table, at + 8) } else { 0 })
}

pub(super) fn put_words(kinds: Entries, table: &mut [u8], index: usize, (word, bitmap): (u64, u64)) {
    let at = index * kinds.words() * 8;
    put64(table, at, word);
    if kinds.words() == 2 {
        put64(table, at + 8, bitmap);
    }
}

/// Lets entries that say zero name nothing.
pub(super) fn drop_zeros(kinds: Entries, table: &mut [u8]) -> Result<()> {
    let zeros = entries_in(kinds, table).filter_map(|entry| match entry {
        Ok((at, _, ClusterState::Plain(units))) if units.zero != 0 => Some(Ok(at)),
        Ok(_) => None,
        Err(error) => Some(Err(error)),
    });
    for at in zeros.collect::<Result<Vec<usize>>>()? {
        table[at..at + kinds.words() * 8].fill(0);
    }
    Ok(())
}

/// Makes what has nothing of its own in these bytes read as zero.
pub(super) fn put_zeros(
    kinds: Entries,
    cluster: BlockSize,
    table: &mut [u8],
    zeros: Range<u64>,
) -> Result<()> {
    if zeros.is_empty() {
        return Ok(());
    }
    for index in zeros.start >> cluster.shift()..cluster.count_for(zeros.end) {
        let from = zeros.start.max(index << cluster.shift()) - (index << cluster.shift());
        let index = usize::try_from(index).expect("a table is short");
        let ClusterState::Plain(mut units) = kinds.decode(words_in(kinds, table, index))? else { continue };
        let covered = kinds.covered(from, cluster.bytes());
        let is_cut = kinds.touched(from, cluster.bytes()) & !covered;
        if (units.alloc | units.zero) & is_cut != is_cut {
            return Err(Error::unsupported(
                "the disk ends within a cluster that is only in the backing image, which goes on: write to the last sector of \
                 the disk first",
            ));
        }
        units.zero |= covered & !units.alloc;
        put_words(kinds, table, index, kinds.encode(units));
    }
    Ok(())
}

/// Gives clusters places, in which they read as zero.
pub(super) fn put_places(
    kinds: Entries,
    cluster: BlockSize,
    table: &mut [u8],
    entries: Range<u64>,
    at: ImageOffset,
) -> Result<()> {
    for (number, index) in entries.enumerate() {
        let index = usize::try_from(index).expect("a table is short");
        match kinds.decode(words_in(kinds, table, index))? {
            ClusterState::Plain(units) if units.host.is_none() => {
                let host = Some(at + ((number as u64) << cluster.shift()));
                let zeros = Units { host, copied: true, alloc: 0, zero: kinds.all() };
                put_words(kinds, table, index, kinds.encode(zeros));
            }
            _ => return Err(Error::corrupt("the disk has a cluster behind its end: run `vellum check`")),
        }
    }
    Ok(())
}
