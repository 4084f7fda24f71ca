//! Changing the bitmaps of a closed image: adding, removing, clearing, merging, enabling and disabling them.
//!
//! ```text
//!   read the directory ► each change, in memory ► room in the header's first sector
//!        ► tables, bits and directory beside the old ─ flush ► sector 0 ─ flush (`shadow.rs`)          commit point
//! ```
//!
//! 1. All changes of a call are made at once: a crash leaves the bitmaps as they were or as they were to be, with right
//!    refcounts. Nothing has to be marked as in use.
//! 2. A change that is refused changes nothing.
//! 3. The disk is not touched, and not read.

use vellum_core::{Context, Error, GuestOffset, GuestSpan, ImageSpan, Result, SharedStorage};

use super::directory::{COUNT_MAX, Entry, GRANULARITY_BITS, NAME_BYTES_MAX, encode, table_entries};
use super::{Bits, none_named, read_bits, read_directory};
use crate::closed_bitmaps::{BitmapChange, MergeSource};
use crate::qcow2::header::{BitmapDirectory, Header};
use crate::qcow2::journal_setting::{make_room_for_bitmaps, remove_bitmaps_entry};
use crate::qcow2::layout::put64;
use crate::qcow2::shadow::Shadow;
use crate::qcow2::snapshots::checked;
use crate::qcow2::tree::{read_l1, table_of};

/// Granularities of new bitmaps that are not given one, as powers of two: the cluster size, within these.
const DEFAULT_BITS: std::ops::RangeInclusive<u32> = 12..=16;

/// A bitmap as it will be.
struct Planned {
    entry: Entry,
    /// It is written anew with these bits.
    new: Option<Bits>,
}

/// The bitmaps of an image, and what they will be.
struct Plan<'a> {
    image: &'a SharedStorage,
    header: Header,
    all: Vec<Planned>,
    /// Tables that are no longer used, with the bits that they name.
    gone: Vec<ImageSpan>,
}

/// Changes the bitmap of this name.
pub(in crate::qcow2) async fn change(
    image: &SharedStorage,
    name: &str,
    changes: &[BitmapChange],
) -> Result<()> {
    let context = || format!("can't change bitmap {name} of {}", image.name());
    change_inner(image, name, changes).await.context(context)
}

async fn change_inner(image: &SharedStorage, name: &str, changes: &[BitmapChange]) -> Result<()> {
    let header = checked(image).await?;
    if header.version() < 3 {
        return Err(Error::unsupported(
            "version 2 has no bitmaps: `vellum amend -o compat=1.1` makes it version 3",
        ));
    }
    let mut plan = Plan::new(image, header).await?;
    for change in changes {
        plan.apply(name, change).await?;
    }
    plan.write().await
}

impl<'a> Plan<'a> {
    async fn new(image: &'a SharedStorage, header: Header) -> Result<Self> {
        let all = read_directory(&header, &**image).await?;
        let all = all.into_iter().map(|entry| Planned { entry, new: None }).collect();
        Ok(Self { image, header, all, gone: Vec::new() })
    }

    fn found(&self, name: &str) -> Result<usize> {
        let index = self.all.iter().position(|one| one.entry.name == name.as_bytes());
        index.ok_or_else(|| none_named(name))
    }

    /// As above, a bitmap that can be used.
    fn usable(&self, name: &str) -> Result<usize> {
        let index = self.found(name)?;
        let one = &self.all[index];
        if one.new.is_none() {
            one.entry.check(&self.header)?;
        }
        Ok(index)
    }

    /// The bits of a bitmap as they will be.
    async fn bits(&self, index: usize) -> Result<Bits> {
        let one = &self.all[index];
        match &one.new {
            None => Ok(read_bits(&self.header, &**self.image, &one.entry).await?.bits),
            Some(bits) => {
                let copy = Bits::new(bits.size(), one.entry.granularity_bits())?;
                copy.merge(bits);
                Ok(copy)
            }
        }
    }

    async fn apply(&mut self, name: &str, change: &BitmapChange) -> Result<()> {
        match change {
            BitmapChange::Add { granularity } => self.add(name, *granularity),
            BitmapChange::Remove => {
                let index = self.found(name)?;
                let one = self.all.remove(index);
                self.drop_old(&one)
            }
            BitmapChange::Clear => {
                let index = self.usable(name)?;
                let bits = Bits::new(self.header.size(), self.all[index].entry.granularity_bits())?;
                self.put(index, bits)
            }
            BitmapChange::Enable | BitmapChange::Disable => {
                let index = self.usable(name)?;
                self.all[index].entry.set_auto(matches!(change, BitmapChange::Enable));
                Ok(())
            }
            BitmapChange::Merge(source) => {
                let index = self.usable(name)?;
                let bits = self.bits(index).await?;
                match source {
                    MergeSource::Own(source) => bits.merge(&self.bits(self.usable(source)?).await?),
                    MergeSource::Other(other) if other.size() == bits.size() => bits.merge(other),
                    MergeSource::Other(other) => {
                        return Err(Error::invalid(format!(
                            "the disk has {} bytes, and that of the bitmap to merge has {}: both must be the same",
                            bits.size(),
                            other.size()
                        )));
                    }
                }
                self.put(index, bits)
            }
        }
    }

    fn add(&mut self, name: &str, granularity: Option<u64>) -> Result<()> {
        if self.all.iter().any(|one| one.entry.name == name.as_bytes()) {
            return Err(Error::invalid(format!("there is a bitmap named {name} already")));
        }
        if name.is_empty() || name.len() > NAME_BYTES_MAX || name.chars().any(char::is_control) {
            return Err(Error::invalid(format!(
                "the name of a bitmap has 1 to {NAME_BYTES_MAX} bytes, and no line breaks or other control characters"
            )));
        }
        if self.all.len() >= COUNT_MAX {
            return Err(Error::unsupported(format!("a qcow2 image has at most {COUNT_MAX} bitmaps")));
        }
        if self.header.size() == 0 {
            return Err(Error::unsupported("a disk of 0 bytes has no bitmaps"));
        }
        let bits = match granularity {
            None => self.header.cluster_size().shift().clamp(*DEFAULT_BITS.start(), *DEFAULT_BITS.end()),
            Some(bytes) if bytes.is_power_of_two() && GRANULARITY_BITS.contains(&bytes.trailing_zeros()) => {
                bytes.trailing_zeros()
            }
            Some(bytes) => {
                return Err(Error::invalid(format!(
                    "a granularity of {bytes} bytes: it must be a power of two from 512 bytes to 2 GiB"
                )));
            }
        };
        let new = Some(Bits::new(self.header.size(), bits)?);
        self.all.push(Planned { entry: Entry::new(name, bits), new });
        Ok(())
    }

    /// Notes that a bitmap is written anew with these bits.
    fn put(&mut self, index: usize, bits: Bits) -> Result<()> {
        if self.all[index].new.is_none() {
            let table = self.all[index].entry.table(&self.header)?;
            self.gone.push(table);
        }
        self.all[index].new = Some(bits);
        Ok(())
    }

    /// Notes that nothing uses the table of a bitmap any more, unless that was noted before, or it never had one.
    fn drop_old(&mut self, one: &Planned) -> Result<()> {
        if one.new.is_none() {
            self.gone.push(one.entry.table(&self.header)?);
        }
        Ok(())
    }

    /// Writes what was planned, and switches to it.
    async fn write(self) -> Result<()> {
        let Self { image, header, all, gone } = self;
        let header = match all.is_empty() && header.bitmaps().is_none() {
            true => return Ok(()),
            false => make_room_for_bitmaps(&header, &**image).await?,
        };
        let is_last = all.is_empty();
        let mut shadow = Shadow::new(header, image).await?;
        put_all(&mut shadow, image, all, gone).await?;
        shadow.header.void_session();
        if is_last {
            shadow.header.set_bitmaps(None);
        }
        shadow.switch().await?;
        if is_last {
            // The bit says that there are none. What is left of the entry harms nobody.
            let _ = remove_bitmaps_entry(&Header::read(&**image).await?, &**image).await;
        }
        Ok(())
    }
}

/// Lays the bitmaps out beside the old ones, for a disk of the size that the shadow has.
async fn put_all(
    shadow: &mut Shadow<'_>,
    image: &SharedStorage,
    all: Vec<Planned>,
    gone: Vec<ImageSpan>,
) -> Result<()> {
    for table in gone {
        let entries = read_l1(image, table).await?;
        entries.iter().filter_map(|entry| table_of(*entry)).for_each(|bits| shadow.unshare(bits, 1));
        shadow.drop_table(table);
    }
    let mut entries = Vec::with_capacity(all.len());
    for Planned { mut entry, new } in all {
        if let Some(bits) = new {
            let table = put_bits(shadow, &bits, entry.granularity_bits()).await?;
            entry.set_table(table);
        }
        entries.push(entry);
    }
    if let Some(old) = shadow.header.bitmaps() {
        shadow.drop_table(old.span);
    }
    if !entries.is_empty() {
        let bytes = encode(&entries);
        let span = shadow.place(bytes.len() as u64).await?;
        shadow.write(span, bytes);
        let count = u32::try_from(entries.len()).expect("at most 65535");
        shadow.header.set_bitmaps(Some(BitmapDirectory { count, span }));
    }
    Ok(())
}

/// Writes bits and their table to new places. Returns the place of the table.
async fn put_bits(shadow: &mut Shadow<'_>, bits: &Bits, granularity_bits: u32) -> Result<ImageSpan> {
    let cluster = shadow.header.cluster_size();
    let count = table_entries(bits.size(), granularity_bits, cluster)?;
    let table = shadow.place(count * 8).await?;
    let mut bytes = vec![0; usize::try_from(count * 8).expect("bounded by the bits")];
    let per_cluster = cluster.bytes() / 8;
    for index in 0..count {
        let words = index * per_cluster..((index + 1) * per_cluster).min(bits.words());
        if words.clone().all(|word| bits.word(word) == 0) {
            continue;
        }
        let place = shadow.place(cluster.bytes()).await?;
        let content = words.flat_map(|word| bits.word(word).to_le_bytes()).collect();
        shadow.write(place, content);
        put64(&mut bytes, usize::try_from(index * 8).expect("as above"), place.start().bytes());
    }
    shadow.write(table, bytes);
    Ok(table)
}

/// Gives the bitmaps the size that the disk will have, as part of that change. What is cut off is forgotten. What is added is marked in
/// those that are enabled: the disk may have been longer when they were cleared, with data where there are zeros now.
///
/// # Errors
/// `NoSpace` when the header has no room, `Unsupported` for a bitmap of an unknown kind.
pub(in crate::qcow2) async fn resize(
    shadow: &mut Shadow<'_>,
    image: &SharedStorage,
    old: &Header,
    size: u64,
) -> Result<()> {
    if old.bitmaps().is_none() {
        return Ok(());
    }
    if size == 0 {
        return Err(Error::unsupported(
            "a disk of 0 bytes has no bitmaps: remove them first (`vellum bitmap --remove`)",
        ));
    }
    let mut plan = Plan::new(image, old.clone()).await?;
    for index in 0..plan.all.len() {
        let entry = &plan.all[index].entry;
        if entry.is_in_use() {
            continue; // it is of no use, whatever its length
        }
        entry.check(old)?;
        let (new, before) = (Bits::new(size, entry.granularity_bits())?, plan.bits(index).await?);
        let mut at = GuestOffset::ZERO;
        while let Some(run) = before.next_marked(at) {
            new.mark(run);
            at = run.end();
        }
        if entry.is_auto() {
            new.mark(GuestSpan::between(GuestOffset::new(old.size().min(size)), GuestOffset::new(size)));
        }
        plan.put(index, new)?;
    }
    put_all(shadow, image, plan.all, plan.gone).await
}
