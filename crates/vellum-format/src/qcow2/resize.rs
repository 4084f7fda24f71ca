//! A larger disk in an existing image, as far as the L1 table has room in its place.
//!
//! The new entries of the table are durable zeros before one write of the header's first sector says that
//! they exist and how large the disk is. What the last cluster held behind the old end is zero by then. So a crash leaves the old size or the new one. A table that must
//! move, or a smaller disk, needs a copy of the image.

use vellum_core::{Buffer, Context, Disk, Error, GuestOffset, Place, Result, SharedStorage, Storage, Zeroes};

use super::Qcow2;
use super::header::Header;
use super::layout::*;
use super::open::OpenOptions;
use crate::image::Files;

/// Enlarges the disk of a closed image. Returns the size before, in bytes.
///
/// # Errors
/// `Invalid` for a smaller size or one that is no multiple of 512, `Unsupported` when the L1 table has no
/// room or something else in the image must change with the size, and errors of the storage.
pub async fn grow(image: &SharedStorage, size: u64) -> Result<u64> {
    grow_inner(image, size).await.context(|| format!("can't resize {}", image.name()))
}

async fn grow_inner(shared: &SharedStorage, size: u64) -> Result<u64> {
    let image: &dyn Storage = &**shared;
    let mut header = Header::read(image).await?;
    if header.needs_replay() {
        return Err(header.replay_first(image.name()));
    }
    let before = header.size();
    let refusals = [
        (size < before, "a qcow2 disk cannot be shrunk: copy the data to keep into a smaller image"),
        (header.is_dirty(), "the image was not closed: run `vellum recover` first"),
        (header.is_corrupt(), "the image is marked as corrupt: run `vellum check` first"),
        (header.has_data_file(), "its data is in an external data file, which would have to grow as well"),
        (
            header.snapshot_count > 0 && header.version() < 3,
            "its snapshots (version 2) have no size of their own",
        ),
        (
            header.encryption().is_some() && !before.is_multiple_of(header.cluster_size().bytes()),
            "it is encrypted, and its last cluster is not whole: what is behind the end of the disk there can be made \
             zero only with its key. Copy it into a larger image",
        ),
        (header.bitmaps().is_some(), "it has persistent bitmaps, which would have to grow as well"),
    ];
    if let Some((_, why)) = refusals.iter().find(|(is_so, _)| *is_so) {
        return Err(Error::unsupported(*why));
    }
    if !size.is_multiple_of(512) {
        return Err(Error::invalid(format!("a disk of {size} bytes: the size must be a multiple of 512")));
    }
    refuse_named_behind(image, &header).await?;
    let span = header.l1_span();
    let room = header.cluster_size().round_up(span.len()).min(L1_BYTES_MAX) / 8;
    let needed = size.div_ceil(header.l2_reach());
    if needed > room {
        let most = exact(room * header.l2_reach());
        return Err(Error::unsupported(format!(
            "this qcow2 image can grow to {most} at most; for more, copy it into one with larger clusters: \
             `vellum convert -O qcow2 -o cluster_size=2M OLD NEW`, and grow that"
        )));
    }
    if needed > u64::from(header.l1_entries) {
        let rest = span.end().span((room - u64::from(header.l1_entries)) * 8);
        image.write_zeroes(rest, Zeroes::Allocated).await?;
        image.flush().await?;
        header.set_l1_entries(u32::try_from(needed).expect("at most 4 Mi"));
    }
    clear_behind_end(shared, &header, size).await?;
    header.set_size(size);
    image.write(vellum_core::ImageOffset::ZERO, header.first_sector()).await?;
    image.flush().await?; // commit point
    Ok(before)
}

/// A larger disk would show what the L1 table names behind the end of this one: a machine's state, where another program has
/// reverted to a snapshot with one.
async fn refuse_named_behind(image: &dyn Storage, header: &Header) -> Result<()> {
    let used = header.size().div_ceil(header.l2_reach()) * 8;
    let (_, behind) = header.l1_span().split_at(used);
    if behind.is_empty() {
        return Ok(());
    }
    let len = usize::try_from(behind.len()).expect("at most 32 MiB");
    match image.read(behind.start(), Buffer::for_overwrite(len)).await?.is_zero() {
        true => Ok(()),
        false => Err(Error::unsupported(
            "its table names data behind the end of the disk, such as the state of a machine. `vellum snapshot revert`, or a copy \
             with `vellum convert`, leaves that out",
        )),
    }
}

/// Makes zero what the last cluster holds behind the end of the disk, as far as a disk of this size would show it. Other
/// programs, and older ones of ours, fill whole clusters from below when they write.
async fn clear_behind_end(image: &SharedStorage, header: &Header, size: u64) -> Result<()> {
    let before = header.size();
    let end = header.cluster_size().round_up(before).min(size);
    if end <= before {
        return Ok(());
    }
    let behind = GuestOffset::new(before).span(end - before);
    let mut larger = header.clone();
    larger.set_size(end);
    let files = Files { image: image.clone(), data_file: None, below: None };
    let disk = Qcow2::open(larger, files, OpenOptions { read_only: true, ..OpenOptions::default() }).await?;
    let len = usize::try_from(behind.len()).expect("less than a cluster");
    let bytes = disk.read(behind.start(), Buffer::for_overwrite(len)).await?;
    if bytes.is_zero() {
        return Ok(());
    }
    let refusal = || {
        Error::unsupported(
            "its last cluster holds bytes behind the end of the disk, and it is compressed or may belong to a \
             snapshot: write to the last sector of the disk first",
        )
    };
    if header.snapshot_count > 0 {
        return Err(refusal());
    }
    for extent in disk.map(behind).await? {
        match extent.place {
            Place::Data { at, .. } => {
                image.write_zeroes(at.span(extent.span.len()), Zeroes::Allocated).await?
            }
            Place::Compressed => return Err(refusal()),
            Place::Zero { .. } | Place::Below => {}
        }
    }
    image.flush().await
}

/// A number of bytes in the largest unit that leaves no rest.
fn exact(bytes: u64) -> String {
    let units = [(40, "TiB"), (30, "GiB"), (20, "MiB")];
    let fits = |&&(shift, _): &&(u32, &str)| bytes > 0 && bytes.is_multiple_of(1 << shift);
    match units.iter().find(fits) {
        Some((shift, unit)) => format!("{} {unit}", bytes >> shift),
        None => format!("{bytes} bytes"),
    }
}

#[cfg(test)]
mod tests {
    use futures_lite::future::block_on;
    use vellum_core::{MemoryDisk, MemoryStorage, WriteFlags};

    use super::super::check::check;
    use super::super::create::{CreateOptions, create};
    use super::*;
    use crate::report::Repair;

    #[test]
    fn as_far_as_the_table_has_room() {
        // One cluster of 4 KiB has 512 entries, each for 2 MiB.
        let options = CreateOptions { size: 3 << 20, cluster_size: 4096, ..CreateOptions::without_journal() };
        let storage = MemoryStorage::new("image");
        let shared: SharedStorage = storage.clone();
        block_on(create(&*storage, None, &options)).unwrap();
        for size in [3 << 20, 4 << 20, (4 << 20) + 512, 1 << 30] {
            let before = block_on(grow(&shared, size)).unwrap();
            assert!(before <= size);
            let header = block_on(Header::read(&*storage)).unwrap();
            assert_eq!((header.size(), u64::from(header.l1_entries)), (size, size.div_ceil(2 << 20)));
            assert!(block_on(check(&header, &shared, Repair::Nothing, &mut |_| {})).unwrap().is_clean());
        }
        for (size, why) in [
            ((1 << 30) + 512, "can grow to 1 GiB at most"),
            (1 << 20, "smaller"),
            ((1 << 30) + 1, "multiple of 512"),
        ] {
            let error = block_on(grow(&shared, size)).unwrap_err().chain();
            assert!(error.contains(why), "{error}");
        }
    }

    /// The disk ends within a cluster, and the base goes on: what the base has there is never seen.
    #[test]
    fn what_lies_behind_the_old_end_reads_as_zero() {
        const CLUSTER: u64 = 64 << 10;
        const SIZE: u64 = 3 * CLUSTER + 512;
        for (extended_l2, spoiled) in [(false, false), (false, true), (true, false), (true, true)] {
            block_on(async {
                let backing = Some(("base".to_owned(), None));
                let options = CreateOptions { size: SIZE, extended_l2, backing, ..CreateOptions::default() };
                let storage = MemoryStorage::new("image");
                let shared: SharedStorage = storage.clone();
                create(&*storage, None, &options).await.unwrap();
                let base = MemoryDisk::holding(&vec![0xaa; 5 << 16]);
                let files = || Files { image: shared.clone(), data_file: None, below: Some(base.clone()) };
                let header = Header::read(&*storage).await.unwrap();
                let disk = Qcow2::open(header, files(), OpenOptions::default()).await.unwrap();
                let last = GuestOffset::new(SIZE - 512);
                disk.write(last, Buffer::copy_of(&[7; 512]), WriteFlags::default()).await.unwrap();
                let map = disk.map(last.span(512)).await.unwrap();
                let Place::Data { at, .. } = map[0].place else { panic!("{map:?}") };
                disk.close().await.unwrap();
                let behind = at + 512;
                let rest = Buffer::for_overwrite(512);
                assert!(storage.read(behind, rest).await.unwrap().is_zero(), "nothing of the base is copied");
                if spoiled {
                    storage.write(behind, Buffer::copy_of(&[9; 1024])).await.unwrap();
                }
                grow(&shared, SIZE + CLUSTER).await.unwrap();
                let header = Header::read(&*storage).await.unwrap();
                let alone = Files { image: shared.clone(), data_file: None, below: None };
                let disk = Qcow2::open(header, alone, OpenOptions::default()).await.unwrap();
                let old = disk.read(last, Buffer::for_overwrite(512)).await.unwrap();
                let new = Buffer::for_overwrite(64 << 10);
                let new = disk.read(GuestOffset::new(SIZE), new).await.unwrap();
                assert!(old.to_vec() == [7; 512] && new.is_zero(), "{extended_l2} {spoiled}");
            });
        }
    }
}
