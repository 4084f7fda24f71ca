//! The end of a file that was not closed: space behind everything in use, which is given back.

use std::collections::BTreeMap;

use vellum_core::{Buffer, Context, ImageOffset, ImageSpan, Result, Storage, is_zero};

use super::header::Header;
use super::hole::Hole;
use super::layout::{OFFSET_MASK, be64};
use super::refcount;

/// Cuts an image that was not closed to the end of what its refcounts say is in use, but leaves `keep` in
/// place. The refcounts must be right and checkpointed.
pub(super) async fn give_back_tail(header: &Header, storage: &dyn Storage, keep: ImageSpan) -> Result<()> {
    if storage.limits().fixed_len {
        return Ok(());
    }
    let end = used_end(header, storage).await?.max(keep.end().bytes());
    if end < storage.len() {
        storage.set_len(end).await.context(|| "can't truncate the file")?;
    }
    Ok(())
}

/// The end of the last cluster with a refcount, in bytes. Begins at the end, and looks at no more than
/// necessary.
async fn used_end(header: &Header, storage: &dyn Storage) -> Result<u64> {
    let cluster = header.cluster_size();
    let read = async |span: ImageSpan| {
        let len = usize::try_from(span.len()).expect("a table fits memory");
        storage.read(span.start(), Buffer::for_overwrite(len)).await.context(|| "can't read the refcounts")
    };
    let table = read(header.refcount_table).await?;
    let per_block = (cluster.bytes() * 8) >> header.refcount_order;
    let entries = table.slice().chunks_exact(8).enumerate();
    let mut blocks: Vec<(ImageOffset, usize)> =
        entries.map(|(index, entry)| (ImageOffset::new(be64(entry, 0) & OFFSET_MASK), index)).collect();
    blocks.retain(|(block, _)| block.bytes() != 0);
    blocks.sort_unstable();
    // Blocks in holes have no refcounts.
    let mut hole = Hole::default();
    let mut there = BTreeMap::new();
    for (block, index) in blocks {
        if !hole.covers(storage, block.span(cluster.bytes())).await {
            there.insert(index, block);
        }
    }
    for (index, block) in there.into_iter().rev() {
        let block = read(block.span(cluster.bytes())).await?;
        if is_zero(block.slice()) {
            continue;
        }
        let last =
            (0..per_block).rev().find(|i| refcount::read(block.slice(), header.refcount_order, *i) != 0);
        if let Some(last) = last {
            return Ok((index as u64 * per_block + last + 1) << cluster.shift());
        }
    }
    Ok(cluster.bytes())
}
