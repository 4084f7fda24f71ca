//! Making, deleting and renaming internal snapshots of a closed image, and reverting its disk to one.
//!
//! ```text
//!   create   the snapshot gets the disk's L1 table and all that it leads to, as they are
//!            the disk gets a new L1 table and new L2 tables, without flags: all that they name is shared
//!   revert   the disk gets a copy of the snapshot's L1 table, and its size; what the disk had is let go
//!   delete   what the snapshot had is let go; the disk gets the flags of what is its own again
//!   rename   a new snapshot table
//! ```
//!
//! Each is planned in memory and switched to in one step (`shadow.rs`): a crash leaves the image before it or after it. Where the
//! host has no room for that, the last snapshot is deleted in place (`delete_in_place.rs`).
//!
//! 1. Nothing of a snapshot is ever written: its tables stay as they are and where they are, with the machine's state that
//!    lies behind its disk. Flags in them have no meaning.
//! 2. A table whose entries have no flags is shared as a whole. One that has flags is copied for the disk, which then
//!    changes it without another copy.
//! 3. The disk gets no machine's state: reverting copies the part of the L1 table that the disk needs.
//! 4. The image is checked first. A snapshot is made of no image with a fault, which it would share and keep.
//!
//! Left out: images whose data lies in another file, as in QEMU: a snapshot cannot keep what is overwritten there.

use std::time::Duration;

use vellum_core::{Context, Error, ErrorKind, ImageOffset, ImageSpan, Result, SharedStorage};

use super::bitmaps;
use super::check::check;
use super::delete_in_place::delete_last;
use super::header::Header;
use super::journal_setting::remove_bitmaps_entry;
use super::layout::{COPIED, L1_BYTES_MAX, SNAPSHOTS_MAX, TABLES_BYTES_MAX, put64};
use super::open::recover_or_repair;
use super::shadow::{Flags, Shadow};
use super::snapshot::{NAME_BYTES_MAX, Snapshot, SnapshotTable};
use super::snapshot_table::{put_table, table_in};
use super::tree::{Named, check_reach, count_table, each_table, read_l1, table_of, tables_of};
use crate::hash::HashMap;
use crate::image::Wanted;
use crate::report::Repair;

/// Makes a snapshot of the disk as it is. Returns its id.
pub(super) async fn create(
    image: &SharedStorage,
    name: &str,
    now: Duration,
    may_repeat: bool,
) -> Result<String> {
    let context = || format!("can't create snapshot {name} of {}", image.name());
    create_inner(image, name, now, may_repeat).await.context(context)
}

/// Makes the disk what a snapshot has.
pub(super) async fn revert(image: &SharedStorage, wanted: Wanted<'_>) -> Result<()> {
    let context = || format!("can't revert {} to snapshot {}", image.name(), wanted.text());
    revert_inner(image, wanted).await.context(context)
}

/// Deletes a snapshot.
pub(super) async fn delete(image: &SharedStorage, wanted: Wanted<'_>) -> Result<()> {
    let context = || format!("can't delete snapshot {} of {}", wanted.text(), image.name());
    delete_inner(image, wanted).await.context(context)
}

/// Gives a snapshot another name.
pub(super) async fn rename(image: &SharedStorage, wanted: Wanted<'_>, name: &str) -> Result<()> {
    let context = || format!("can't rename snapshot {} of {}", wanted.text(), image.name());
    rename_inner(image, wanted, name).await.context(context)
}

/// The header of a closed image, which is recovered and checked.
pub(super) async fn checked(image: &SharedStorage) -> Result<Header> {
    let header = recover_or_repair(Header::read(&**image).await?, image, false).await?;
    let mut first = None;
    let mut say = |line| first = first.take().or(Some(line));
    let report = check(&header, image, Repair::Nothing, &mut say).await?;
    if report.corruptions > 0 || report.check_errors > 0 {
        return Err(Error::corrupt(format!(
            "the image is damaged ({}): run `vellum check -r all` first",
            first.unwrap_or_default()
        )));
    }
    Ok(header)
}

/// A change that is planned, and the table of snapshots as it will be.
struct Change<'a> {
    image: &'a SharedStorage,
    shadow: Shadow<'a>,
    snapshots: SnapshotTable,
}

impl<'a> Change<'a> {
    /// Recovers and checks the image.
    async fn begin(image: &'a SharedStorage) -> Result<Self> {
        let header = checked(image).await?;
        if header.has_data_file() {
            return Err(Error::unsupported(
                "its data lies in another file, where a snapshot cannot keep what is overwritten: copy it into one file \
                 with `vellum convert -O qcow2` first",
            ));
        }
        let snapshots = table_in(&header, image).await?;
        Ok(Self { image, shadow: Shadow::new(header, image).await?, snapshots })
    }

    fn header(&self) -> &Header {
        &self.shadow.header
    }

    /// What is changed is meant beyond doubt: a name that is another snapshot's id is refused.
    fn found(&self, wanted: Wanted<'_>) -> Result<usize> {
        let found = match wanted {
            Wanted::IdOrName(wanted) => {
                let (found, named) = (self.snapshots.find(wanted), self.snapshots.named(wanted));
                if let (Some(found), Some(named)) = (found, named)
                    && found.id == wanted
                    && found.name != wanted
                {
                    return Err(Error::invalid(format!(
                        "{wanted} is the id of snapshot {} and the name of another, whose id is {}: give its name for the one, and \
                         the id for the other",
                        found.name, named.id
                    )));
                }
                found
            }
            Wanted::Name(name) => self.snapshots.named(name),
        };
        let index = found.and_then(|found| {
            self.snapshots.snapshots.iter().position(|snapshot| std::ptr::eq(snapshot, found))
        });
        index.ok_or_else(|| {
            Error::new(ErrorKind::NotFound, format!("there is no snapshot named {}", wanted.text()))
        })
    }

    /// Counts what these tables name as named more often, or less. Returns those of them whose entries have flags.
    async fn count(&mut self, named: &Named, is_more: bool) -> Result<Vec<ImageOffset>> {
        let header = self.shadow.header.clone();
        let references = if is_more { &mut self.shadow.plus } else { &mut self.shadow.minus };
        let mut with_flags = Vec::new();
        each_table(&header, self.image, named, |at, times, table| {
            if count_table(&header, table, times, references)? {
                with_flags.push(at);
            }
            Ok(())
        })
        .await?;
        Ok(with_flags)
    }

    /// Shares all that these L1 entries lead to. Returns the entries for the disk.
    async fn shared(&mut self, l1: &[u64]) -> Result<Vec<u64>> {
        let named = tables_of(l1);
        let with_flags = self.count(&named, true).await?;
        let mut copies = HashMap::default();
        for from in with_flags.into_iter().filter(|from| named[from] == 1) {
            copies.insert(from, self.shadow.copy_table(from, Flags::Clear).await?);
        }
        for (table, times) in named.iter().filter(|(table, _)| !copies.contains_key(table)) {
            self.shadow.share(*table, *times);
        }
        Ok(l1.iter().map(|entry| entry_for(*entry, &copies)).collect())
    }

    /// Writes the disk's L1 table to a new place.
    async fn put_l1(&mut self, l1: &[u64]) -> Result<()> {
        put_l1(&mut self.shadow, l1).await
    }

    /// Writes the table of snapshots to a new place.
    async fn put_snapshots(&mut self) -> Result<()> {
        put_table(&mut self.shadow, &mut self.snapshots).await
    }

    /// Lets go of the bitmaps, which say nothing of a disk that reads differently.
    async fn drop_bitmaps(&mut self) -> Result<()> {
        let Some(directory) = self.header().bitmaps() else { return Ok(()) };
        for table in bitmaps::tables(self.header(), &**self.image).await? {
            let entries = read_l1(self.image, table).await?;
            entries.iter().filter_map(|entry| table_of(*entry)).for_each(|bits| self.shadow.unshare(bits, 1));
            self.shadow.drop_table(table);
        }
        self.shadow.drop_table(directory.span);
        Ok(())
    }

    /// Switches to it. Bitmaps say nothing of the disk any more if `is_other`, that is, if it reads differently.
    async fn switch(mut self, is_other: bool) -> Result<()> {
        let loses_bitmaps = is_other && self.header().bitmaps().is_some();
        let image = self.image;
        self.shadow.header.void_session();
        if is_other {
            self.shadow.header.void_bitmaps();
        }
        self.shadow.switch().await?;
        if loses_bitmaps {
            // They are gone already. What is left of their entry harms nobody; other programs warn of it.
            let _ = remove_bitmaps_entry(&Header::read(&**image).await?, &**image).await;
        }
        Ok(())
    }

    fn refuse_name(&self, name: &str, may_repeat: bool) -> Result<()> {
        if name.is_empty() || name.len() > NAME_BYTES_MAX || name.contains('\0') {
            return Err(Error::invalid(format!(
                "the name of a snapshot has 1 to {NAME_BYTES_MAX} bytes, none of them zero"
            )));
        }
        if !may_repeat && self.snapshots.named(name).is_some() {
            return Err(Error::invalid(format!("there is a snapshot named {name} already")));
        }
        Ok(())
    }
}

/// The entry of the disk's L1 table, where these tables were copied for it and others are shared.
fn entry_for(entry: u64, copies: &HashMap<ImageOffset, ImageOffset>) -> u64 {
    match table_of(entry) {
        None => 0,
        Some(table) => copies.get(&table).map_or(table.bytes(), |copy| copy.bytes() | COPIED),
    }
}

async fn create_inner(image: &SharedStorage, name: &str, now: Duration, may_repeat: bool) -> Result<String> {
    let mut change = Change::begin(image).await?;
    change.refuse_name(name, may_repeat)?;
    let all = &change.snapshots.snapshots;
    if all.len() as u64 >= u64::from(SNAPSHOTS_MAX) {
        return Err(Error::unsupported(format!(
            "a qcow2 image has at most {SNAPSHOTS_MAX} snapshots: delete some first"
        )));
    }
    let old: ImageSpan = change.header().l1_span();
    let together: u64 = all.iter().map(|snapshot| snapshot.l1.len()).sum();
    if together + old.len() > TABLES_BYTES_MAX {
        return Err(Error::unsupported(
            "the L1 tables of its snapshots would be larger than 256 MiB together: delete snapshots first",
        ));
    }
    let newest = all.iter().filter_map(|snapshot| snapshot.id.parse::<u64>().ok()).max().unwrap_or(0);
    let id =
        newest.checked_add(1).ok_or_else(|| Error::unsupported("there is no id left for it"))?.to_string();
    let l1 = read_l1(image, old).await?;
    let l1 = change.shared(&l1).await?;
    change.put_l1(&l1).await?;
    let size = change.header().size();
    let snapshot = Snapshot::new(old, id.clone(), name.to_owned(), now, size);
    change.snapshots.snapshots.push(snapshot);
    change.put_snapshots().await?;
    change.switch(false).await?;
    Ok(id)
}

async fn revert_inner(image: &SharedStorage, wanted: Wanted<'_>) -> Result<()> {
    let mut change = Change::begin(image).await?;
    let index = change.found(wanted)?;
    let snapshot = change.snapshots.snapshots[index].clone();
    let old = change.header().l1_span();
    let l1 = read_l1(image, old).await?;
    let named = tables_of(&l1);
    change.count(&named, false).await?;
    named.iter().for_each(|(table, times)| change.shadow.unshare(*table, *times));
    change.shadow.drop_table(old);

    let mut l1 = read_l1(image, snapshot.l1).await?;
    let needed = check_reach(change.header(), l1.len(), snapshot.disk_size)?;
    l1.truncate(needed);
    let mut l1 = change.shared(&l1).await?;
    // As much room to grow as before.
    let entries = usize::try_from(old.len().min(L1_BYTES_MAX) / 8).expect("at most 4 Mi");
    l1.resize(needed.max(entries), 0);
    change.put_l1(&l1).await?;
    change.shadow.header.set_size(snapshot.disk_size);
    change.drop_bitmaps().await?;
    change.switch(true).await
}

async fn delete_inner(image: &SharedStorage, wanted: Wanted<'_>) -> Result<()> {
    let error = match delete_beside(image, wanted).await {
        Err(error) if error.kind() == ErrorKind::NoSpace => error,
        done => return done,
    };
    // Nothing has changed. What is freed may be the room that others wait for.
    let change = Change::begin(image).await?;
    let index = change.found(wanted)?;
    match delete_last(image, change.header(), &change.snapshots, index).await? {
        true => Ok(()),
        false => Err(error.context("or delete the newest snapshot first: in version 3 that needs no room")),
    }
}

async fn delete_beside(image: &SharedStorage, wanted: Wanted<'_>) -> Result<()> {
    let mut change = Change::begin(image).await?;
    let index = change.found(wanted)?;
    let snapshot = change.snapshots.snapshots.remove(index);
    let l1 = read_l1(image, snapshot.l1).await?;
    let named = tables_of(&l1);
    change.count(&named, false).await?;
    named.iter().for_each(|(table, times)| change.shadow.unshare(*table, *times));
    change.shadow.drop_table(snapshot.l1);
    own_again(&mut change).await?;
    change.put_snapshots().await?;
    change.switch(false).await
}

/// Sets the flags of what only the disk names after this.
async fn own_again(change: &mut Change<'_>) -> Result<()> {
    let old = change.header().l1_span();
    let l1 = read_l1(change.image, old).await?;
    let new = owned(&mut change.shadow, change.image, &l1).await?;
    if new != l1 {
        change.shadow.drop_table(old);
        change.put_l1(&new).await?;
    }
    Ok(())
}

/// The disk's L1 entries once all that is counted less often has been planned: what only the disk names then has its
/// flags, in copies of tables where they change.
pub(super) async fn owned(shadow: &mut Shadow<'_>, image: &SharedStorage, l1: &[u64]) -> Result<Vec<u64>> {
    let header = shadow.header.clone();
    let (mut flagged, mut copies) = (Vec::new(), HashMap::default());
    for table in tables_of(l1).into_keys() {
        // What another snapshot shares has no flags, and gets none.
        if shadow.count_after(table).await? != 1 {
            continue;
        }
        flagged.push(table);
        let bytes = super::tree::read_table(&header, image, table).await?;
        if shadow.changes_flags(bytes.slice()).await? {
            copies.insert(table, shadow.copy_table(table, Flags::ByCount).await?);
        }
    }
    copies.keys().for_each(|table| shadow.unshare(*table, 1));
    let entry = |entry: u64| match table_of(entry) {
        None => 0,
        Some(table) if copies.contains_key(&table) => copies[&table].bytes() | COPIED,
        Some(table) if flagged.binary_search(&table).is_ok() => table.bytes() | COPIED,
        Some(table) => table.bytes(),
    };
    Ok(l1.iter().map(|old| entry(*old)).collect())
}

/// Writes the disk's L1 table to a new place.
pub(super) async fn put_l1(shadow: &mut Shadow<'_>, l1: &[u64]) -> Result<()> {
    if l1.is_empty() {
        let none = shadow.header.l1_offset.span(0);
        shadow.header.set_l1(none);
        return Ok(());
    }
    let span = shadow.place(l1.len() as u64 * 8).await?;
    let mut bytes = vec![0; l1.len() * 8];
    l1.iter().enumerate().for_each(|(index, entry)| put64(&mut bytes, index * 8, *entry));
    shadow.write(span, bytes);
    shadow.header.set_l1(span);
    Ok(())
}

async fn rename_inner(image: &SharedStorage, wanted: Wanted<'_>, name: &str) -> Result<()> {
    let mut change = Change::begin(image).await?;
    let index = change.found(wanted)?;
    if change.snapshots.snapshots[index].name == name {
        return image.flush().await; // an earlier attempt may not have been durable
    }
    change.refuse_name(name, false)?;
    change.snapshots.snapshots[index].rename(name);
    change.put_snapshots().await?;
    change.switch(false).await
}
