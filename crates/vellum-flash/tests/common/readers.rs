//! A reader that is still in a slot while others write.

use futures_lite::future::poll_once;
use vellum_core::{Buffer, Disk, GuestOffset, MemoryDisk, SharedDisk, SharedStorage, WriteFlags};
use vellum_sim::{Content, Drive, DriveOptions, Operation, World};

use super::{cache_on, over};

async fn write(disk: &dyn Disk, block: u64, value: u8) {
    let data = Buffer::copy_of(&[value; 4096]);
    disk.write(GuestOffset::new(block * 4096), data, WriteFlags::default()).await.expect("a write succeeds");
    disk.flush().await.expect("a flush succeeds");
}

/// A read has looked its slot up and waits for flash. Its block is written anew, and enough others that every slot that
/// is free has been used. The read must not find another block's bytes.
pub fn slots_are_not_reused_beside_a_reader() -> Result<(), String> {
    let world = World::new(1);
    let flash = Drive::from_content(&world, Content::default(), DriveOptions::default());
    let storage: SharedStorage = flash.clone();
    world.run(async {
        let cache = cache_on(&storage, 8, 1).await.expect("a cache opens");
        let home: SharedDisk = MemoryDisk::new(64 << 12);
        let disk = over(&cache, 1, home).await.expect("a disk opens");
        write(&*disk, 0, 1).await;
        let hold = flash.hold(Operation::Read);
        let mut reading = Box::pin(disk.read(GuestOffset::ZERO, Buffer::zeroed(4096)));
        assert!(poll_once(&mut reading).await.is_none(), "it is held");
        write(&*disk, 0, 2).await;
        // Those that need the slot wait for the reader; the others do not.
        let writing = async {
            for block in 1..8 {
                write(&*disk, block, 9).await;
            }
        };
        let mut writing = Box::pin(writing);
        let is_over = poll_once(&mut writing).await.is_some();
        drop(hold);
        let found = reading.await.expect("a read succeeds").to_vec();
        if !is_over {
            writing.await;
        }
        match found.iter().all(|byte| *byte == 1 || *byte == 2) {
            true => Ok(()),
            false => Err(format!("the read found {}", found[0])),
        }
    })
}
