//! The snapshot table, written anew beside the old one (`shadow.rs`).

use vellum_core::{ImageOffset, Result, SharedStorage};

use super::header::Header;
use super::shadow::Shadow;
use super::snapshot::{Snapshot, SnapshotTable, read_table, read_table_to_mend};

/// The table of an image; an empty one, if it has no snapshots.
pub(super) async fn table_in(header: &Header, image: &SharedStorage) -> Result<SnapshotTable> {
    match header.snapshot_count {
        0 => Ok(SnapshotTable { snapshots: Vec::new(), span: ImageOffset::ZERO.span(0) }),
        _ => read_table(header, &**image).await,
    }
}

/// Writes the table to a new place, with what version 3 requires of its entries. (Version 2 ignores it.)
pub(super) async fn put_table(shadow: &mut Shadow<'_>, table: &mut SnapshotTable) -> Result<()> {
    table.snapshots.iter_mut().for_each(Snapshot::complete);
    let bytes = table.bytes()?;
    shadow.drop_table(table.span);
    let span = match bytes.len() as u64 {
        0 => ImageOffset::ZERO.span(0),
        len => shadow.place(len).await?,
    };
    if !span.is_empty() {
        shadow.write(span, bytes);
    }
    shadow.header.set_snapshots(span.start(), table.snapshots.len());
    Ok(())
}

/// Makes the table of an image that is sound otherwise as it must be: with what version 3 requires of its entries, and without
/// what is over the limits.
pub(super) async fn complete(header: Header, image: &SharedStorage) -> Result<()> {
    let mut table = read_table_to_mend(&header, &**image).await?.table;
    let mut shadow = Shadow::new(header, image).await?;
    put_table(&mut shadow, &mut table).await?;
    shadow.header.void_session();
    shadow.switch().await
}
