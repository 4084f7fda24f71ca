//! What must hold of packed blocks over a base, so that tests with mistakes in the engine can look at it, too.

use vellum_core::{Buffer, Disk, GuestOffset, WriteFlags};
use vellum_format::native::embed::{BLOCK_LEN, identify};
use vellum_sim::{Drive, DriveOptions, World};

use crate::common::native::NativeSetup;

/// How many packed blocks the image has of a unit over the base that was packed and flushed, and then released and
/// written again without a flush: a recovery might take the newer one, and lose what was flushed.
pub(crate) fn packed_blocks_of_a_released_unit() -> usize {
    const UNIT: u64 = 64 << 10;
    let setup = NativeSetup::zoned("zoned over a base", 1 << 20, UNIT, 256 << 10);
    let setup = setup.over(vec![200; 8 * 65_536], 32 << 10);
    let world = World::new(0);
    let drive = Drive::from_content(&world, setup.empty_image(), DriveOptions::default());
    let content = world.run(async {
        let disk = setup.open(&drive).await.unwrap();
        let data = |value: u8| Buffer::copy_of(&[value; BLOCK_LEN]);
        disk.write(GuestOffset::new(15 * UNIT), data(1), WriteFlags::FUA).await.unwrap();
        disk.write(GuestOffset::new(UNIT), data(2), WriteFlags::FUA).await.unwrap();
        disk.discard(GuestOffset::new(UNIT).span(UNIT), WriteFlags::default()).await.unwrap();
        disk.write(GuestOffset::new(UNIT + 4096), data(3), WriteFlags::default()).await.unwrap();
        drive.content().to_vec()
    });
    let word = |bytes: &[u8]| u32::from_be_bytes(bytes.try_into().unwrap());
    let of_unit_1 = |block: &&[u8]| {
        let tag = u64::from_be_bytes(block[..8].try_into().unwrap());
        identify(block, tag, word(&block[12..16]), block[16]).is_some_and(|found| found.guest_unit == 1)
    };
    content[1 << 20..].chunks_exact(BLOCK_LEN).filter(of_unit_1).count()
}
