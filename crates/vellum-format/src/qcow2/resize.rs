//! A larger disk in an existing image, as far as the L1 table has room in its place.
//!
//! The new entries of the table are durable zeros before one write of the header's first sector says that
//! they exist and how large the disk is. So a crash leaves the old size or the new one. A table that must
//! move, or a smaller disk, needs a copy of the image.

use vellum_core::{Context, Error, Result, SharedStorage, Storage, Zeroes};

use super::header::Header;
use super::layout::*;

/// Enlarges the disk of a closed image. Returns the size before, in bytes.
///
/// # Errors
/// `Invalid` for a smaller size or one that is no multiple of 512, `Unsupported` when the L1 table has no
/// room or something else in the image must change with the size, and errors of the storage.
pub async fn grow(image: &SharedStorage, size: u64) -> Result<u64> {
    grow_inner(&**image, size).await.context(|| format!("can't resize {}", image.name()))
}

async fn grow_inner(image: &dyn Storage, size: u64) -> Result<u64> {
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
        (header.bitmaps().is_some(), "it has persistent bitmaps, which would have to grow as well"),
    ];
    if let Some((_, why)) = refusals.iter().find(|(is_so, _)| *is_so) {
        return Err(Error::unsupported(*why));
    }
    if !size.is_multiple_of(512) {
        return Err(Error::invalid(format!("a disk of {size} bytes: the size must be a multiple of 512")));
    }
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
    header.set_size(size);
    image.write(vellum_core::ImageOffset::ZERO, header.first_sector()).await?;
    image.flush().await?; // commit point
    Ok(before)
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
    use vellum_core::MemoryStorage;

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
}
