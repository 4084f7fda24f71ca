//! What an L1 table names: L2 tables, and the clusters that their entries name. Read as a whole, each table once.
//!
//! ```text
//!   L1 table ──► L2 tables, by their places, and how often each is named ──► entries ──► counts per cluster
//! ```
//!
//! The caller has checked the image: an impossible entry is an error here, and no finding.

use std::collections::BTreeMap;

use futures_lite::future::yield_now;
use vellum_core::{Buffer, Context, Error, ImageOffset, ImageSpan, Result, SharedStorage, try_join_all};

use super::entry::{ClusterState, Entries};
use super::header::Header;
use super::layout::{COPIED, OFFSET_MASK, be64};
use super::references::References;

/// At most this many tables are in memory at once.
const TABLES_AT_ONCE: usize = 8;

/// L2 tables by their places, and how often each is named.
pub(super) type Named = BTreeMap<ImageOffset, u64>;

/// The entries of an L1 table.
pub(super) async fn read_l1(image: &SharedStorage, span: ImageSpan) -> Result<Vec<u64>> {
    if span.is_empty() {
        return Ok(Vec::new());
    }
    let len = usize::try_from(span.len()).expect("at most 32 MiB");
    let context = || format!("can't read the L1 table at {}", span.start());
    let bytes = image.read(span.start(), Buffer::for_overwrite(len)).await.context(context)?;
    Ok(bytes.slice().chunks_exact(8).map(|entry| be64(entry, 0)).collect())
}

/// The table that an L1 entry names.
pub(super) fn table_of(entry: u64) -> Option<ImageOffset> {
    Some(ImageOffset::new(entry & OFFSET_MASK)).filter(|at| at.bytes() != 0)
}

/// The tables that these L1 entries name.
pub(super) fn tables_of(l1: &[u64]) -> Named {
    let mut named = Named::new();
    for table in l1.iter().filter_map(|entry| table_of(*entry)) {
        *named.entry(table).or_insert(0) += 1;
    }
    named
}

/// Reads the tables, some at a time, and gives each to `visit` with its place and the number of times that it is named.
pub(super) async fn each_table(
    header: &Header,
    image: &SharedStorage,
    named: &Named,
    mut visit: impl FnMut(ImageOffset, u64, &[u8]) -> Result<()>,
) -> Result<()> {
    let all: Vec<(ImageOffset, u64)> = named.iter().map(|(at, times)| (*at, *times)).collect();
    for some in all.chunks(TABLES_AT_ONCE) {
        let reads = some.iter().map(|(at, _)| Box::pin(read_table(header, image, *at)));
        for ((at, times), table) in some.iter().zip(try_join_all(reads).await?) {
            visit(*at, *times, table.slice())?;
            yield_now().await;
        }
    }
    Ok(())
}

/// One L2 table.
pub(super) async fn read_table(header: &Header, image: &SharedStorage, at: ImageOffset) -> Result<Buffer> {
    let len = usize::try_from(header.cluster_size().bytes()).expect("at most 2 MiB");
    let context = || format!("can't read the L2 table at {at}");
    image.read(at, Buffer::for_overwrite(len)).await.context(context)
}

/// The entries of a table that name anything, with their places in the table in bytes and their first words.
pub(super) fn entries_in(
    entries: Entries,
    table: &[u8],
) -> impl Iterator<Item = Result<(usize, u64, ClusterState)>> {
    let len = entries.words() * 8;
    table.chunks_exact(len).enumerate().filter_map(move |(index, words)| {
        let pair = (be64(words, 0), if len == 16 { be64(words, 8) } else { 0 });
        if pair == (0, 0) {
            return None;
        }
        let state = entries.decode(pair).context(|| format!("entry {index} of an L2 table is damaged"));
        Some(state.map(|state| (index * len, pair.0, state)))
    })
}

/// Counts the clusters that the entries of a table name, each `times`. Whether any entry may be written in place.
pub(super) fn count_table(
    header: &Header,
    table: &[u8],
    times: u64,
    references: &mut References,
) -> Result<bool> {
    let (entries, cluster) = (Entries::of(header), header.cluster_size());
    let mut has_flags = false;
    for entry in entries_in(entries, table) {
        let (_, word, state) = entry?;
        match state {
            ClusterState::Compressed(packed) => {
                cluster.clusters_in(packed).for_each(|cluster| _ = references.add(cluster.index(), times));
            }
            ClusterState::Plain(units) => {
                has_flags |= word & COPIED != 0;
                if let Some(host) = units.host {
                    references.add(cluster.cluster_of(host).index(), times);
                }
            }
        }
    }
    Ok(has_flags)
}

/// Refuses a snapshot whose L1 table is shorter than its disk.
pub(super) fn check_reach(header: &Header, entries: usize, size: u64) -> Result<usize> {
    let needed = usize::try_from(size.div_ceil(header.l2_reach())).unwrap_or(usize::MAX);
    if needed > entries {
        return Err(Error::corrupt("the L1 table of the snapshot is too small for its disk"));
    }
    Ok(needed)
}
