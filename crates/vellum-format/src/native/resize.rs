//! Another size for the disk of a closed image.
//!
//! ```text
//!   larger    what lies behind the end made zero ► flush ► superblock ► flush         commit point
//!   smaller   superblock ► flush ► bits, masks, entries behind the end cleared         commit point: the first flush
//! ```
//!
//! 1. A crash leaves the old size or the new one. What a smaller disk leaves behind is cleared by the check's repair, and
//!    once more before a disk becomes larger: so what was cut off never comes back.
//! 2. The base counts no further than the disk ever reached: what a disk is made larger by reads as zero.
//! 3. Regions stay where they are. A table has room for `Places::size_max`; what needs more is refused.

use vellum_core::{
    Buffer, Context, Disk, Error, ErrorKind, GuestOffset, GuestSpan, Result, SharedStorage, Storage, Zeroes,
};

use super::check::{Repair, check_some};
use super::geometry::{Layout, Places};
use super::image::Native;
use super::open::OpenOptions;
use super::superblock::Superblocks;

/// Gives the disk of a closed image another size, in bytes. Gives the size before.
///
/// # Errors
/// `Invalid` for a size that cannot be or a smaller one where `may_shrink` is not said, `Corrupt` for an image that cannot be
/// repaired, and what the storage says.
pub async fn resize(image: &SharedStorage, size: u64, may_shrink: bool) -> Result<u64> {
    let context = || format!("can't resize {}", image.name());
    resize_inner(image, size, may_shrink).await.context(context)
}

async fn resize_inner(image: &SharedStorage, size: u64, may_shrink: bool) -> Result<u64> {
    let superblock = Superblocks::read(&**image).await?.superblock;
    if superblock.needs_replay() {
        return Err(superblock.replay_first(image.name()));
    }
    let (old, before) = (superblock.places(), superblock.size());
    if size < before && !may_shrink {
        return Err(Error::invalid(format!(
            "the disk has {before} bytes, and what lies behind {size} would be lost: say --shrink"
        )));
    }
    if size < before && superblock.has_snapshots() {
        return Err(Error::unsupported("a disk with snapshots cannot be made smaller"));
    }
    if size > old.size_max() {
        return Err(Error::invalid(format!(
            "its table has room for a disk of {} bytes: copy it into a new image (`vellum convert`)",
            old.size_max()
        )));
    }
    let new = old.resized(size)?;
    clear_leftovers(image).await?;
    if size > before && old.shape().zone().is_some() {
        make_last_plain(image, before).await?;
    }
    if size > before {
        make_room(&**image, &old, &new).await?;
        image.flush().await?;
    }
    let mut superblocks = Superblocks::read(&**image).await?;
    superblocks.superblock.places = new;
    superblocks.write(&**image).await?;
    image.flush().await?; // commit point
    if size < before {
        clear_leftovers(image).await?;
        if new.shape().layout == Layout::Linear && !image.limits().fixed_len {
            image.set_len(new.data_offset().bytes() + size).await?;
        }
        image.flush().await?;
    }
    Ok(before)
}

/// The block in which the disk ends is to become longer: it may not be packed, nor be a snapshot's.
async fn make_last_plain(image: &SharedStorage, size: u64) -> Result<()> {
    let options = OpenOptions { without_base: true, ..OpenOptions::default() };
    let native = Native::open(image.clone(), None, options).await?;
    let unit = native.unit().expect("it has zones");
    let last = GuestOffset::new(size & !(unit.bytes() - 1));
    if size > last.bytes() {
        native.unshare(GuestSpan::between(last, GuestOffset::new(size))).await?;
        let _inside = native.epochs.enter();
        native.make_plain(unit.cluster_of(last).index(), None).await?;
    }
    native.close().await
}

/// Clears bits, masks and entries behind the end. An image that is damaged otherwise keeps its size. Guests may be waiting: what is
/// packed is not read.
async fn clear_leftovers(image: &SharedStorage) -> Result<()> {
    let report = check_some(image, Repair::All, false, &mut |_| {}).await?;
    match report.check_errors + report.corruptions {
        0 => Ok(()),
        _ => Err(Error::new(ErrorKind::Corrupt, "the image is damaged: `vellum check` tells how")),
    }
}

/// Makes zero what the larger disk has and the smaller one had not.
async fn make_room(image: &dyn Storage, old: &Places, new: &Places) -> Result<()> {
    let size = old.shape().size;
    let Some(unit) = old.shape().layout.unit() else {
        let (end, new_end) = (old.data_offset() + size, new.data_offset() + new.shape().size);
        if !image.limits().fixed_len {
            // Once shorter: whatever an earlier end left behind is gone.
            image.set_len(end.bytes()).await?;
            return image.set_len(new_end.bytes()).await;
        }
        if new_end.bytes() > image.len() {
            let needs = format!("the device has {} bytes, the disk needs {}", image.len(), new_end.bytes());
            return Err(Error::new(ErrorKind::NoSpace, needs));
        }
        return image.write_zeroes(end.span(new_end - end), Zeroes::MayUnmap).await;
    };
    let within = unit.within(GuestOffset::new(size));
    if within == 0 {
        return Ok(());
    }
    let entry = old.entry(size >> unit.shift());
    let word = image.read(entry.word, Buffer::for_overwrite(8)).await?;
    let raw = u32::try_from(entry.get(crate::bytes::be64(word.slice(), 0))).expect("32 bits");
    let (number, form) = old.split_entry(raw);
    if number == 0 {
        return Ok(());
    }
    debug_assert_eq!(form, 0, "made plain before");
    let (_, rest) = old.unit(number).split_at(within);
    let in_file = rest.intersect(vellum_core::ImageOffset::ZERO.span(image.len()));
    if in_file.is_empty() { Ok(()) } else { image.write_zeroes(in_file, Zeroes::MayUnmap).await }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use futures_lite::future::block_on;
    use vellum_core::{Disk, MemoryDisk, MemoryStorage, SharedDisk, WriteFlags};

    use super::super::create::{CreateOptions, NewBase, create};
    use super::super::{Native, OpenOptions};
    use super::*;

    async fn open(storage: &Arc<MemoryStorage>, has_base: bool) -> Arc<Native> {
        let base: SharedDisk = MemoryDisk::holding(&[7; 500_000]);
        Native::open(storage.clone(), has_base.then_some(base), OpenOptions::default()).await.unwrap()
    }

    async fn bytes(storage: &Arc<MemoryStorage>, has_base: bool) -> Vec<u8> {
        let disk = open(storage, has_base).await;
        let len = usize::try_from(disk.geometry().size).unwrap();
        let bytes = disk.read(GuestOffset::ZERO, Buffer::zeroed(len)).await.unwrap().to_vec();
        disk.close().await.unwrap();
        bytes
    }

    #[test]
    fn what_was_cut_off_never_comes_back() {
        for (has_table, has_zones, has_base) in [
            (false, false, false),
            (false, false, true),
            (true, false, false),
            (true, false, true),
            (true, true, false),
            (true, true, true),
        ] {
            let options = CreateOptions {
                size: 1 << 20,
                has_table,
                has_zones,
                zone_size: has_zones.then_some(1 << 20),
                unit_size: has_table.then_some(65_536),
                journal_bytes: (has_table || has_base).then_some(65_536),
                base: has_base.then(|| NewBase { name: "b".to_owned(), size: 500_000, ..NewBase::default() }),
                ..CreateOptions::default()
            };
            let storage = MemoryStorage::new("image");
            let shared: SharedStorage = storage.clone();
            block_on(async {
                create(&*storage, &options).await.unwrap();
                let disk = open(&storage, has_base).await;
                let data = Buffer::copy_of(&[9; 300_000]);
                disk.write(GuestOffset::new(90_000), data, WriteFlags::FUA).await.unwrap();
                disk.close().await.unwrap();
                let mut model = bytes(&storage, has_base).await;
                assert!(resize(&shared, 100_352, false).await.unwrap_err().chain().contains("--shrink"));
                for size in [100_352, 65_536, 700_416, 3 << 20, 512, 0, 1 << 20] {
                    let before = resize(&shared, size, true).await.unwrap();
                    assert_eq!(before, model.len() as u64);
                    model.resize(usize::try_from(size).unwrap(), 0);
                    let found = bytes(&storage, has_base).await;
                    let wrong = found.iter().zip(&model).position(|(is, should)| is != should);
                    assert_eq!(
                        (found.len(), wrong),
                        (model.len(), None),
                        "table {has_table}, base {has_base}: {size}"
                    );
                    let report =
                        crate::native::check::check(&shared, Repair::Nothing, &mut |_| {}).await.unwrap();
                    assert!(report.is_clean(), "{report:?}");
                }
                assert!(resize(&shared, 1000, true).await.is_err(), "no multiple of 512");
                if has_table {
                    let error = resize(&shared, 1 << 50, true).await.unwrap_err();
                    assert!(error.chain().contains("has room for"), "{}", error.chain());
                }
            });
        }
    }
}
