//! Changing the size of the disk of a closed image.
//!
//! ```text
//!   both      an interrupted change is finished first (`unfinished.rs`), before anything is looked at
//!   larger    the unit in which the disk ends is its own ► the space behind the end made zero
//!             ► a part of the table, if needed, made zero ► flush ► superblock ► flush          commit point
//!   smaller   superblock ► flush ► marked as in use ► flush ► bits, masks, entries behind the end cleared
//!             ► flush ► no mark ► flush                                           commit point: first flush
//! ```
//!
//! 1. A crash leaves the old size or the new one. What a smaller disk leaves behind its end is cleared by the
//!    next read-write opening at the latest, and so before the disk is enlarged again. Data that was
//!    truncated never comes back.
//! 2. The base counts no further than the disk ever reached. The space by which a disk grows reads as zero.
//! 3. Regions stay where they are. A table has room for `Places::size_max`. For more it gets a part
//!    (`parts.rs`), in units that nothing names: in a file behind its end, as a hole, and on a device in free
//!    ones. Until the superblock names the part, these units are as free as before.
//! 4. Nothing is made zero in a unit that a snapshot sees.

use vellum_core::{
    BlockSize, Buffer, Context, Disk, Error, ErrorKind, GuestOffset, GuestSpan, ImageOffset, ImageSpan,
    Result, SharedStorage, Zeroes,
};

use super::geometry::{Layout, Places, Shape};
use super::image::Native;
use super::open::{OpenOptions, finish};
use super::parts::Part;
use super::snapshots::snapshots;
use super::superblock::Superblocks;
use super::unfinished::clear_behind_the_end;

/// Changes the size of the disk of a closed image, in bytes. Returns the old size. An interrupted change is
/// finished first.
///
/// # Errors
/// `Invalid` for an impossible size, or for a smaller one without `may_shrink`, `Corrupt` for a damaged
/// image, and the errors of the storage.
pub async fn resize(image: &SharedStorage, size: u64, may_shrink: bool) -> Result<u64> {
    let context = || format!("can't resize {}", image.name());
    resize_inner(image, size, may_shrink).await.context(context)
}

async fn resize_inner(image: &SharedStorage, size: u64, may_shrink: bool) -> Result<u64> {
    // Only an image that can be read at all is opened.
    Superblocks::read(&**image).await?;
    let before = finish(image).await?;
    let superblock = Superblocks::read(&**image).await?.superblock;
    let old = superblock.places();
    if size < before && !may_shrink {
        return Err(Error::invalid(format!(
            "the disk has {before} bytes, and data beyond {size} would be lost: use --shrink"
        )));
    }
    if size < before && superblock.has_snapshots() && !snapshots(image).await?.is_empty() {
        return Err(Error::unsupported("a disk with snapshots cannot be shrunk: delete them first"));
    }
    if let Some(unit) = old.shape().layout.unit()
        && size > old.size_limit()
    {
        return Err(Error::invalid(format!(
            "with units of {} bytes a disk can have at most {} bytes: copy it into an image with larger units \
             (`vellum convert -o unit_size=…`)",
            unit.bytes(),
            old.size_limit()
        )));
    }
    Shape { size, base_bytes: None, ..old.shape() }.check()?;
    let mut new = old;
    if size > before {
        make_room(image, &old, size).await?;
        if size > old.size_max() {
            new = new.with_part(make_part(image, &old, size).await?)?;
        }
        image.flush().await?;
    }
    let new = new.resized(size)?;
    let mut superblocks = Superblocks::read(&**image).await?;
    superblocks.superblock.places = new;
    if size < before {
        superblocks.superblock.draw_generation(None);
    }
    superblocks.write(&**image).await?;
    image.flush().await?; // commit point
    if size < before {
        clear_behind_the_end(image, None).await?;
        if new.shape().layout == Layout::Linear && !image.limits().fixed_len {
            image.set_len(new.data_offset().bytes() + size).await?;
            image.flush().await?;
        }
    }
    Ok(before)
}

/// Zeroes the space that the larger disk has and the smaller one has not.
async fn make_room(image: &SharedStorage, old: &Places, new_size: u64) -> Result<()> {
    let size = old.shape().size;
    if let Some(unit) = old.shape().layout.unit() {
        let rest = match unit.within(GuestOffset::new(size)) {
            0 => None,
            _ => rest_of_last_unit(image, size).await?,
        };
        let in_file = ImageOffset::ZERO.span(image.len());
        return match rest.map(|rest| rest.intersect(in_file)).filter(|rest| !rest.is_empty()) {
            Some(rest) => image.write_zeroes(rest, Zeroes::MayUnmap).await,
            None => Ok(()),
        };
    }
    let (end, new_end) = (old.data_offset() + size, old.data_offset() + new_size);
    if !image.limits().fixed_len {
        // Truncated first, so that bytes behind an earlier end are gone.
        image.set_len(end.bytes()).await?;
        return image.set_len(new_end.bytes()).await;
    }
    if new_end.bytes() > image.len() {
        let needs = format!("the device has {} bytes, the disk needs {}", image.len(), new_end.bytes());
        return Err(Error::new(ErrorKind::NoSpace, needs));
    }
    image.write_zeroes(end.span(new_end - end), Zeroes::MayUnmap).await
}

/// Makes a part of the table for a disk of this size, as zeros in free units. Only the superblock can name
/// them, and it does so when they are durable.
async fn make_part(image: &SharedStorage, places: &Places, size: u64) -> Result<Part> {
    let context =
        || format!("there is no space for {} more bytes of its table", places.next_part(size).home().len());
    let part = places.next_part(size);
    let unit = places.shape().layout.unit().expect("it has a table");
    let count = u32::try_from(unit.count_for(part.home().len())).expect("a part is short");
    let limits = image.limits();
    let first = match limits.fixed_len {
        true => free_run(image, count).await.context(context)?,
        // Behind the last unit, even one that exists only partly.
        false => unit.count_for(image.len() - places.data_offset().bytes()) + 1,
    };
    if first + u64::from(count) > u64::from(places.unit_max()) {
        return Err(Error::new(ErrorKind::NoSpace, "all unit numbers are in use").context(context()));
    }
    let first = places.unit(u32::try_from(first).expect("as just looked"));
    let whole = first.start().span(u64::from(count) * unit.bytes());
    if !limits.fixed_len {
        image.set_len(whole.end().bytes()).await.context(context)?;
    }
    if limits.fixed_len || !limits.grows_zeroed {
        image.write_zeroes(whole, Zeroes::MayUnmap).await.context(context)?;
    }
    Ok(Part { at: whole.start(), ..part })
}

/// The first of `count` contiguous free units of a device.
async fn free_run(image: &SharedStorage, count: u32) -> Result<u64> {
    let options = OpenOptions { without_base: true, without_key: true, ..OpenOptions::default() };
    let native = Native::open(image.clone(), None, options).await?;
    native.look_at_device().await?;
    let found = native.units().find_run(count);
    native.close().await?;
    found.map(u64::from).ok_or_else(|| {
        let unit = native.unit().map_or(0, BlockSize::bytes);
        let needs = format!(
            "the device does not have {count} contiguous free units of {unit} bytes: enlarge it by {} bytes, or \
             free some",
            u64::from(count) * unit
        );
        Error::new(ErrorKind::NoSpace, needs)
    })
}

/// Whether these bytes, the rest of a unit, are zero.
async fn reads_as_zero(image: &SharedStorage, span: ImageSpan) -> Result<bool> {
    let len = usize::try_from(span.len()).expect("within a unit");
    Ok(image.read(span.start(), Buffer::for_overwrite(len)).await?.is_zero())
}

fn without_key() -> Error {
    Error::unsupported(
        "it is encrypted, and a snapshot sees the unit in which the disk ends, which has bytes behind the end: delete the \
         snapshots first, or copy the disk with `vellum convert`",
    )
}

/// The part behind the disk's end of the stored unit in which the disk ends. That unit then belongs to the
/// disk alone, and none of it is packed.
async fn rest_of_last_unit(image: &SharedStorage, size: u64) -> Result<Option<ImageSpan>> {
    let options = OpenOptions { without_base: true, without_key: true, ..OpenOptions::default() };
    let native = Native::open(image.clone(), None, options).await?;
    let unit = native.unit().expect("it has a table");
    let (last, end) = (unit.cluster_of(GuestOffset::new(size)), GuestOffset::new(size));
    let start = GuestOffset::new(last.index() << unit.shift());
    if native.is_locked() && native.find(|| native.is_held(last.index())).await? {
        // A copy would have to be encrypted for its new place.
        let rest = native.find(|| native.entry(last.index())).await?;
        let rest = native.inside(native.places.unit(rest).split_at(unit.within(end)).1);
        let is_zero = reads_as_zero(image, rest).await?;
        native.close().await?;
        return if is_zero { Ok(None) } else { Err(without_key()) };
    }
    native.unshare(GuestSpan::between(start, end)).await?;
    if native.places.shape().zone().is_some() {
        let _inside = native.engine.epochs.enter();
        native.make_plain(last.index(), None).await?;
    }
    let (number, form) = native.find(|| native.entry_and_form(last.index())).await?;
    // The caller zeroes the rest that is returned, so no snapshot may see the unit.
    let is_held = native.find(|| native.is_held(last.index())).await?;
    let places = native.places;
    native.close().await?;
    match number {
        0 => Ok(None),
        _ if is_held || form != 0 => Err(Error::corrupt(format!(
            "unit {number}, in which the disk ends, still belongs to a snapshot or is packed: run `vellum check`"
        ))),
        _ => Ok(Some(places.unit(number).split_at(unit.within(end)).1)),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use futures_lite::future::block_on;
    use vellum_core::memory::SparseBytes;
    use vellum_core::{Buffer, Limits, MemoryDisk, MemoryStorage, SharedDisk, WriteFlags};

    use super::super::create::{CreateOptions, NewBase, create};
    use super::super::{Native, OpenOptions};
    use super::*;
    use crate::report::Repair;

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

    /// The table has one page, and so has the zone table.
    async fn with_the_shortest_table(storage: &Arc<MemoryStorage>, has_zones: bool) {
        let options = CreateOptions {
            size: 1 << 20,
            has_table: true,
            has_zones,
            zone_size: has_zones.then_some(64 << 20),
            unit_size: Some(65_536),
            journal_bytes: Some((1 << 20) - 544_768 - if has_zones { 4096 } else { 0 }),
            ..CreateOptions::default()
        };
        let places = create(&**storage, &options).await.unwrap().places();
        assert_eq!((places.size_max(), places.data_offset().bytes()), (64 << 20, 1 << 20));
    }

    async fn write(disk: &Native, at: u64, byte: u8) {
        let mut data = vec![byte; 4096];
        data[..8].copy_from_slice(&at.to_be_bytes());
        disk.write(GuestOffset::new(at), Buffer::copy_of(&data), WriteFlags::FUA).await.unwrap();
    }

    async fn has(disk: &Native, at: u64, byte: u8) {
        let read = disk.read(GuestOffset::new(at), Buffer::zeroed(4096)).await.unwrap().to_vec();
        let mut data = vec![byte; 4096];
        data[..8].copy_from_slice(&(if byte == 0 { 0 } else { at }).to_be_bytes());
        assert_eq!(read[..9], data[..9], "at {at}");
    }

    #[test]
    fn a_disk_outgrows_its_table() {
        for (has_zones, is_device, is_seen) in [
            (false, false, true),
            (true, false, false),
            (false, true, false),
            (true, true, true),
            (true, false, true),
        ] {
            let storage = match is_device {
                false => MemoryStorage::new("image"),
                true => {
                    let limits = Limits { fixed_len: true, grows_zeroed: false, ..Limits::plain() };
                    let mut content = SparseBytes::default();
                    content.write(ImageOffset::ZERO, &vec![0xEE; 16 << 20]);
                    MemoryStorage::with("device", limits, content)
                }
            };
            let shared: SharedStorage = storage.clone();
            block_on(async {
                with_the_shortest_table(&storage, has_zones).await;
                let (mut size, mut ends) = (1 << 20, Vec::new());
                for (step, bytes) in
                    [64 << 20, (64 << 20) + 4096, 2 << 30, 9 << 30, 40 << 30].into_iter().enumerate()
                {
                    assert_eq!(resize(&shared, bytes, false).await.unwrap(), size);
                    size = bytes;
                    let disk = open(&storage, false).await;
                    let byte = u8::try_from(step + 1).unwrap();
                    ends.push((size / 4096 * 4096 - 4096, byte));
                    write(&disk, size / 4096 * 4096 - 4096, byte).await;
                    for (at, byte) in &ends {
                        has(&disk, *at, *byte).await;
                    }
                    if step == 2 && is_seen {
                        disk.snapshot_create("two", 0).await.unwrap();
                        write(&disk, ends[1].0, 99).await;
                        ends[1].1 = 99;
                    }
                    disk.close().await.unwrap();
                    let report =
                        crate::native::check::check(&shared, Repair::Nothing, &mut |line| panic!("{line}"))
                            .await;
                    assert!(report.unwrap().is_clean());
                }
                let parts = Superblocks::read(&*storage).await.unwrap().superblock.places().parts().count();
                assert_eq!(parts, 4, "zones {has_zones}, device {is_device}");
                // The disk shrinks again, and the data behind its end is gone.
                if is_seen {
                    let options = OpenOptions::default();
                    crate::native::snapshots::revert(shared.clone(), None, options, "two").await.unwrap();
                    assert_eq!(open(&storage, false).await.geometry().size, 2 << 30);
                    ends[2].1 = 3;
                } else {
                    resize(&shared, 65 << 20, true).await.unwrap();
                    ends[2].1 = 0;
                }
                resize(&shared, 40 << 30, true).await.unwrap();
                let disk = open(&storage, false).await;
                for (at, byte) in [(ends[0].0, 1), (ends[1].0, 2), ends[2], (ends[3].0, 0), (ends[4].0, 0)] {
                    has(&disk, at, byte).await;
                }
                disk.close().await.unwrap();
            });
        }
    }

    #[test]
    fn a_device_without_room_for_more_of_the_table_keeps_its_disk() {
        let limits = Limits { fixed_len: true, grows_zeroed: false, ..Limits::plain() };
        let mut content = SparseBytes::default();
        content.write(ImageOffset::ZERO, &vec![0xEE; (1 << 20) + 4 * 65_536]);
        let storage = MemoryStorage::with("device", limits, content);
        let shared: SharedStorage = storage.clone();
        block_on(async {
            with_the_shortest_table(&storage, false).await;
            let error = resize(&shared, 4 << 40, false).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::NoSpace);
            assert!(error.chain().contains("contiguous free units of 65536 bytes"), "{}", error.chain());
            assert_eq!(open(&storage, false).await.geometry().size, 1 << 20);
            resize(&shared, 1 << 30, false).await.unwrap();
        });
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
                    assert_eq!(resize(&shared, 8 << 30, false).await.unwrap(), 1 << 20);
                    assert_eq!(resize(&shared, 1 << 20, true).await.unwrap(), 8 << 30);
                    let error = resize(&shared, 1 << 50, true).await.unwrap_err();
                    assert!(error.chain().contains("larger units"), "{}", error.chain());
                }
            });
        }
    }
}
