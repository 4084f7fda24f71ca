//! `SEEK_DATA` and `SEEK_HOLE`, answered from the disk's map, a slice at a time.
//!
//! A hole is whatever reads as zero, whether or not space is allocated for it: a program that copies the file
//! need not read it.

use futures_lite::future::yield_now;
use vellum_core::{Error, GuestOffset, GuestSpan, PlaceKind, Result, SharedDisk};

use crate::slices::SLICE;

/// What is sought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Target {
    Data,
    Hole,
}

/// The first place from `at` on, before `size`, that is what is sought. The end of the file is a hole; behind
/// the last data there is nothing to find.
pub(super) async fn seek(
    disk: &SharedDisk,
    size: u64,
    at: GuestOffset,
    target: Target,
) -> Result<Option<GuestOffset>> {
    let end = GuestOffset::new(size);
    if at >= end {
        return Ok(None);
    }
    let mut rest = GuestSpan::between(at, end);
    while !rest.is_empty() {
        let (now, _) = rest.split_at(SLICE.bytes());
        let mut covered = now.start();
        for extent in disk.map_whole(now).await? {
            let part = extent.span.intersect(now);
            let is_hole = matches!(extent.place, PlaceKind::Zero { .. } | PlaceKind::Below);
            if is_hole == (target == Target::Hole) && !part.is_empty() {
                return Ok(Some(part.start()));
            }
            covered = part.end();
        }
        if covered == now.start() {
            return Err(Error::corrupt("the map of a run of bytes is empty"));
        }
        rest = GuestSpan::between(covered, end);
        // A disk that has its map in memory would not let others have their turn.
        yield_now().await;
    }
    Ok((target == Target::Hole).then_some(end))
}

#[cfg(test)]
mod tests {
    use futures_lite::future::block_on;
    use vellum_core::{Buffer, Disk, MemoryDisk, WriteFlags};

    use super::*;

    const SIZE: u64 = 1 << 20;

    fn found(disk: &SharedDisk, at: u64, target: Target) -> Option<u64> {
        let found = block_on(seek(disk, SIZE, GuestOffset::new(at), target)).expect("a map");
        found.map(GuestOffset::bytes)
    }

    #[test]
    fn data_and_holes_are_found_from_everywhere() {
        // A range that the image does not have itself and that lies behind the end of the disk below: no
        // image of the chain has it.
        let disk = MemoryDisk::over(SIZE, Some(MemoryDisk::new(0)));
        for at in [64 << 10, 512 << 10] {
            let data = Buffer::copy_of(&[7; 8 << 10]);
            block_on(disk.write(GuestOffset::new(at), data, WriteFlags::default())).expect("a write");
        }
        let disk: SharedDisk = disk;
        assert_eq!(found(&disk, 0, Target::Data), Some(64 << 10));
        assert_eq!(found(&disk, 0, Target::Hole), Some(0));
        assert_eq!(found(&disk, 65 << 10, Target::Data), Some(65 << 10));
        assert_eq!(found(&disk, 65 << 10, Target::Hole), Some(72 << 10));
        assert_eq!(found(&disk, 72 << 10, Target::Data), Some(512 << 10));
        assert_eq!(found(&disk, 520 << 10, Target::Data), None);
        assert_eq!(found(&disk, SIZE - 1, Target::Hole), Some(SIZE - 1));
    }

    #[test]
    fn the_end_is_a_hole_and_nothing_lies_behind_it() {
        let disk: SharedDisk = MemoryDisk::holding(&[1; 1 << 20]);
        assert_eq!(found(&disk, 0, Target::Hole), Some(SIZE));
        assert_eq!(found(&disk, SIZE - 1, Target::Data), Some(SIZE - 1));
        assert_eq!(found(&disk, SIZE, Target::Data), None);
        assert_eq!(found(&disk, SIZE, Target::Hole), None);
    }
}
