//! Deleting a snapshot where the host has no room for new tables beside the old ones.
//!
//! ```text
//!   plan      what will be free                                            ── nothing is written ──
//!   header    one snapshot less, and the mark of an unclean close          ── flush ──   commit point
//!   repair    refcounts and flags, in place; the mark goes                 (`check/repair.rs`)
//!   punch     what is free, and so there is room
//! ```
//!
//! 1. Everything is written where something is already, which takes no room of a host that overwrites in place.
//! 2. The table of snapshots is not written at all: the last entry is behind its end when the header counts one less. So it is
//!    only the last one that is deleted in this way.
//! 3. After the commit point refcounts are too high and flags too few, as after a crash of any program: whoever opens the image for
//!    writing repairs that first, and QEMU does, too. Version 2 has no such mark, and is left alone.

use vellum_core::{Context, ImageOffset, Result, SharedStorage};

use super::check::repair_dirty;
use super::header::Header;
use super::layout::incompatible;
use super::shadow::Shadow;
use super::snapshot::SnapshotTable;
use super::tree::{count_table, each_table, read_l1, tables_of};

/// Deletes the snapshot with this index in the table of an image that is checked. Returns whether that could be done; if not,
/// nothing has changed.
pub(super) async fn delete_last(
    image: &SharedStorage,
    header: &Header,
    table: &SnapshotTable,
    index: usize,
) -> Result<bool> {
    if header.version() < 3 || index + 1 != table.snapshots.len() {
        return Ok(false);
    }
    let l1 = read_l1(image, table.snapshots[index].l1).await?;
    let mut shadow = Shadow::new(header.clone(), image).await?;
    let named = tables_of(&l1);
    let minus = &mut shadow.minus;
    each_table(header, image, &named, |_, times, table| count_table(header, table, times, minus).map(drop))
        .await?;
    named.iter().for_each(|(table, times)| shadow.unshare(*table, *times));
    shadow.drop_table(table.snapshots[index].l1);
    if index == 0 {
        shadow.drop_table(table.span);
    }
    let freed = shadow.freed().await?;

    let mut fewer = header.clone();
    fewer.set_snapshots(if index == 0 { ImageOffset::ZERO } else { header.snapshots_offset }, index);
    fewer.void_session();
    fewer.set_features(fewer.incompatible | incompatible::DIRTY, fewer.autoclear);
    image.write(ImageOffset::ZERO, fewer.first_sector()).await?;
    image.flush().await?; // commit point

    let repaired = repair_dirty(&Header::read(&**image).await?, image).await;
    repaired
        .context(|| "it is deleted, but the image's refcounts are not corrected yet: run `vellum recover`")?;
    shadow.punch(freed).await;
    Ok(true)
}
