//! Version 3 to version 2, in place: what version 2 cannot say must not be there.
//!
//! ```text
//!   look       features, snapshots, entries of all tables            ── a refusal changes nothing ──
//!   zeros      entries that say zero, over nothing, name nothing     ── tables beside the old ones, switch ──
//!   header     laid out anew in hops (`journal_setting.rs`), the last of which says version 2      commit point
//! ```
//!
//! 1. The disk and its snapshots read the same all the time. A crash leaves version 3, or version 2; the same command goes on.
//! 2. What is refused is what QEMU refuses, and two things besides: zeros over a backing image, and zeros that snapshots share.
//!    QEMU writes such zeros as data, which a copy does as well, and durably.
//! 3. What only version 3 has a place for, and means nothing then, goes: names of features, the journal's setting, a session that
//!    counts no more.

use vellum_core::{Context, Error, Result, SharedStorage};

use super::entry::{ClusterState, Entries};
use super::header::Header;
use super::journal_setting::{make_version_2, no_room, set_journal};
use super::layout::{COPIED, incompatible};
use super::shadow::{Edit, Flags, Shadow};
use super::snapshot_table::table_in;
use super::snapshots::put_l1;
use super::tree::{Named, each_table, entries_in, read_l1, table_of, tables_of};
use crate::hash::HashMap;

/// Makes a closed image, which is checked, one of version 2.
pub(super) async fn downgrade(header: Header, image: &SharedStorage) -> Result<()> {
    refuse(&header, image).await?;
    drop_zeros(header, image).await?;
    set_journal(image, None).await.context(|| "the journal cannot be removed")?;
    let header = Header::read(&**image).await?;
    match make_version_2(&header, &**image).await? {
        true => Ok(()),
        false => Err(no_room()),
    }
}

async fn refuse(header: &Header, image: &SharedStorage) -> Result<()> {
    let copy = "copy the image with `vellum convert -O qcow2 -o compat=0.10 OLD NEW`";
    let features = header.incompatible & !(incompatible::DIRTY | incompatible::JOURNAL);
    let refusals = [
        (header.refcount_bits() != 16, "version 2 needs refcounts of 16 bits: give refcount_bits=16 as well"),
        (
            header.has_data_file(),
            "its data lies in an external data file, which version 2 does not have: copy it into one file",
        ),
        (
            header.bitmaps().is_some(),
            "it has persistent bitmaps, which version 2 does not have: remove them first (`vellum bitmap --remove`)",
        ),
        (
            header.handover().is_some(),
            "it records a migration of its disk, for which version 2 has no place: finish that first",
        ),
    ];
    if let Some((_, why)) = refusals.iter().find(|(is_so, _)| *is_so) {
        return Err(Error::unsupported(*why));
    }
    if features != 0 {
        let named = [
            (incompatible::CORRUPT, "the mark of a corrupt image"),
            (incompatible::COMPRESSION, "a compression type"),
            (incompatible::EXTENDED_L2, "subclusters (extended_l2)"),
            (incompatible::HOLDS_WRITES, "writes that a flash cache holds"),
        ];
        let has: Vec<&str> =
            named.iter().filter(|(bit, _)| features & bit != 0).map(|(_, name)| *name).collect();
        return Err(Error::unsupported(format!(
            "version 2 does not have what the image has: {}: {copy}",
            has.join(", ")
        )));
    }
    for snapshot in table_in(header, image).await?.snapshots {
        if snapshot.disk_size != header.size() || snapshot.vm_state_size > u64::from(u32::MAX) {
            return Err(Error::unsupported(format!(
                "snapshot {} prevents it: in version 2 snapshots have the size of the disk, and a machine's state of less than \
                 4 GiB. Delete it first, or {copy}",
                snapshot.name
            )));
        }
    }
    Ok(())
}

/// Lets entries that say zero name nothing, which reads the same over nothing.
async fn drop_zeros(header: Header, image: &SharedStorage) -> Result<()> {
    let copy = "copy the image with `vellum convert -O qcow2 -o compat=0.10 OLD NEW`";
    let old = header.l1_span();
    let l1 = read_l1(image, old).await?;
    let active = tables_of(&l1);
    let mut kept = Named::new();
    for snapshot in table_in(&header, image).await?.snapshots {
        kept.extend(tables_of(&read_l1(image, snapshot.l1).await?));
    }
    let (in_snapshots, _) = zeros_in(&header, image, &kept).await?;
    let (tables, places) = zeros_in(&header, image, &active).await?;
    if !in_snapshots.is_empty() {
        return Err(Error::unsupported(format!(
            "its snapshots have clusters that say zero, for which version 2 has no place: delete the snapshots, or {copy}"
        )));
    }
    if tables.is_empty() {
        return Ok(());
    }
    if header.backing_file().is_some() {
        return Err(Error::unsupported(format!(
            "it has clusters that say zero over its backing image, for which version 2 has no place: {copy}"
        )));
    }
    let mut shadow = Shadow::new(header, image).await?;
    for place in places {
        shadow.drop_table(place);
    }
    let mut copies = HashMap::default();
    for table in tables {
        shadow.unshare(table, active[&table]);
        let edit = Edit { drops_zeros: true, ..Edit::NONE };
        copies.insert(table, shadow.edit_table(Some(table), Flags::ByCount, edit).await?);
    }
    let new: Vec<u64> = l1
        .iter()
        .map(|entry| match table_of(*entry).and_then(|table| copies.get(&table)) {
            Some(copy) => copy.bytes() | COPIED,
            None => *entry,
        })
        .collect();
    shadow.drop_table(old);
    put_l1(&mut shadow, &new).await?;
    shadow.header.void_session();
    shadow.switch().await
}

/// The tables among these that have an entry that says zero, and the places that such entries reserve.
async fn zeros_in(
    header: &Header,
    image: &SharedStorage,
    named: &Named,
) -> Result<(Vec<vellum_core::ImageOffset>, Vec<vellum_core::ImageSpan>)> {
    let (kinds, cluster) = (Entries::of(header), header.cluster_size().bytes());
    let (mut tables, mut places) = (Vec::new(), Vec::new());
    each_table(header, image, named, |at, _, table| {
        let mut has_zeros = false;
        for entry in entries_in(kinds, table) {
            let (_, _, ClusterState::Plain(units)) = entry? else { continue };
            if units.zero != 0 {
                has_zeros = true;
                places.extend(units.host.map(|host| host.span(cluster)));
            }
        }
        if has_zeros {
            tables.push(at);
        }
        Ok(())
    })
    .await?;
    Ok((tables, places))
}
