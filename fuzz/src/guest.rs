//! Disks with partitions and file systems that are damaged: the files on them are looked for.
//!
//! ```text
//!   │ which sample │ poke │ poke │ …      a poke: where (3 bytes), how many, these bytes
//!   │ 0xFF │ bytes                        the bytes are the disk
//! ```

use futures_lite::future::block_on;
use vellum_core::MemoryDisk;
use vellum_guest::{VolumeKind, find_files, has_path, look, samples};

const POKES_MAX: usize = 32;
/// A file system of so few blocks is read in no more time than this many inputs a second allow.
const DISK_MAX: usize = 256 << 10;

/// The target.
pub fn guest_files(data: &[u8]) {
    let Some((which, mut rest)) = data.split_first() else { return };
    let mut disk = match which {
        0xff => rest.to_vec(),
        which => match which % 8 {
            0 => samples::ext(false),
            1 => samples::ext(true),
            2 => samples::partitioned(),
            3 => samples::xfs(false),
            4 => samples::xfs(true),
            // The log goes round its end.
            5 => samples::log::xfs_logged(false, 248, 5),
            6 => samples::log::xfs_logged(true, 0, 1),
            _ => samples::log::xfs_logged(true, 248, 5),
        },
    };
    if *which != 0xff {
        for _ in 0..POKES_MAX {
            let [high, middle, low, count, more @ ..] = rest else { break };
            let at = (usize::from(*high) << 16 | usize::from(*middle) << 8 | usize::from(*low)) % disk.len();
            let len = usize::from(*count % 16 + 1).min(more.len()).min(disk.len() - at);
            disk[at..at + len].copy_from_slice(&more[..len]);
            rest = &more[len..];
        }
        // What was changed in a record would be seen by its CRC, and nothing else.
        if which % 8 > 5 {
            samples::log::seal(&mut disk);
        }
    }
    disk.truncate(DISK_MAX);
    let disk = MemoryDisk::holding(&disk);
    crate::bounded(|| {
        block_on(async {
            for volume in look(&*disk).await.unwrap_or_default() {
                for path in ["/d/f", "/link", "/old"] {
                    drop(has_path(&*disk, &volume, path).await);
                }
                let found =
                    find_files(&*disk, &volume, &["/".to_owned()], &mut |file| file.modified > 0).await;
                assert!(found.is_err() || volume.kind != VolumeKind::Other);
                for pair in found.iter().flat_map(|found| found.spans.windows(2)) {
                    assert!(pair[0].end() < pair[1].start(), "they are in order, and apart");
                }
                for span in found.iter().flat_map(|found| &found.spans) {
                    assert!(span.start() >= volume.span.start() && span.end() <= volume.span.end());
                }
            }
        });
    });
}
