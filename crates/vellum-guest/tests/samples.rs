//! The file systems that fuzzing begins with, which are also read where no `mkfs` is.

use futures_lite::future::block_on;
use vellum_core::MemoryDisk;
use vellum_guest::{VolumeKind, find_files, has_path, look, samples};

const KIB: u64 = 1024;

#[test]
fn a_file_system_that_was_made_by_hand_is_read() {
    for (image, partitions, at) in [
        (samples::ext(false), vec![None], 0),
        (samples::ext(true), vec![None], 0),
        (samples::partitioned(), vec![Some(1), Some(5)], 16 * KIB),
    ] {
        let disk = MemoryDisk::holding(&image);
        block_on(async {
            let volumes = look(&*disk).await.expect("its volumes");
            let found: Vec<_> = volumes.iter().map(|volume| volume.partition).collect();
            assert_eq!((found, volumes[0].kind), (partitions, VolumeKind::Ext));
            let spans = async |path: &str| {
                let found = find_files(&*disk, &volumes[0], &[path.to_owned()], &mut |_| true).await;
                let found = found.expect(path);
                let of = |span: &vellum_core::GuestSpan| (span.start().bytes() - at, span.len());
                (found.files, found.spans.iter().map(of).collect::<Vec<_>>())
            };
            // Blocks 3 to 6 of the file were never written, and it ends 100 bytes behind block 8.
            let file = vec![(20 * KIB, 2 * KIB), (30 * KIB, KIB + 100)];
            assert_eq!(spans("/d/f").await, (1, file.clone()));
            assert_eq!(spans("/link/../link").await, (1, file.clone()), "two names, one file");
            assert_eq!(spans("/old").await, (1, vec![(10 * KIB, KIB), (12 * KIB, KIB)]));
            assert_eq!(spans("/").await.0, 2);
            for (path, is_there) in
                [("/d/none", false), ("/d/f/g", false), ("/d/the same", true), ("/", true)]
            {
                assert_eq!(has_path(&*disk, &volumes[0], path).await.expect(path), is_there, "{path}");
            }
            assert!(has_path(&*disk, &volumes[0], "d").await.is_err());
        });
    }
}

#[test]
fn a_file_system_of_xfs_that_was_made_by_hand_is_read() {
    for is_v5 in [false, true] {
        let image = samples::xfs(is_v5);
        let disk = MemoryDisk::holding(&image);
        block_on(async {
            let volume = look(&*disk).await.expect("its volumes")[0];
            assert_eq!(volume.kind, VolumeKind::Xfs);
            let spans = async |path: &str| {
                let found = find_files(&*disk, &volume, &[path.to_owned()], &mut |_| true).await.expect(path);
                let of = |span: &vellum_core::GuestSpan| (span.start().bytes(), span.len());
                (found.files, found.spans.iter().map(of).collect::<Vec<_>>())
            };
            let file = vec![(20 * KIB, 2 * KIB), (30 * KIB, KIB + 100)];
            assert_eq!(spans("/d/f").await, (1, file.clone()));
            assert_eq!(spans("/link/../link").await, (1, file), "two names, one file");
            assert_eq!(spans("/old").await, (1, vec![(10 * KIB, KIB), (12 * KIB, KIB)]));
            assert_eq!(spans("/").await.0, 2);
            assert!(!has_path(&*disk, &volume, "/d/none").await.expect("it is read"));
            assert!(has_path(&*disk, &volume, "/d/the same").await.expect("it is read"));
        });
        // A log whose last record is no unmount, one that has another record behind it, and one that begins with no record.
        for (at, value) in [(512 + 9, 0), (43, 2), (1024 + 3, 1), (3, 0)] {
            if !is_v5 {
                // Records of version 4 may have no CRC.
                continue;
            }
            let mut image = image.clone();
            image[40 * 1024 + at] = value;
            let disk = MemoryDisk::holding(&image);
            let volume = block_on(look(&*disk)).expect("its volumes")[0];
            let found = block_on(has_path(&*disk, &volume, "/d")).expect_err("damage is seen").chain();
            assert!(found.contains("the log of its XFS file system is damaged"), "{at}: {found}");
        }
    }
}

#[test]
fn what_lies_behind_the_volume_is_refused_although_the_file_system_says_that_it_is_longer() {
    let mut ext = samples::ext(false);
    // 128 blocks of which the disk has 64, and the last extent of /d/f at block 100.
    ext[1024 + 4] = 128;
    ext[7 * 1024 + 12 * 3 + 8] = 100;
    let mut xfs = samples::xfs(true);
    (xfs[15], xfs[87], xfs[124]) = (128, 128, 7);
    let extent = 7 * 1024 + 72 + 2 * 16;
    xfs[extent + 8..extent + 16].copy_from_slice(&(100_u64 << 21 | 4).to_be_bytes());
    for image in [ext, xfs] {
        let disk = MemoryDisk::holding(&image);
        block_on(async {
            let volume = look(&*disk).await.expect("its volumes")[0];
            let found =
                async |path: &str| find_files(&*disk, &volume, &[path.to_owned()], &mut |_| true).await;
            assert_eq!(found("/old").await.expect("it is in the volume").files, 1);
            let error = found("/d/f").await.expect_err("it is not").chain();
            assert!(error.contains("behind the end of the volume"), "{error}");
        });
    }
}
