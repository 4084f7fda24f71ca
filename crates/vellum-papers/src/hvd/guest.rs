//! Guests of the paper, as requests with the processor's work between them.
//!
//! ```text
//!   sequential, random   sysbench: one request after the other, 128 KiB or 16 KiB, in a file of 2 GiB of the template
//!   mix                  the same at random places, reads and writes
//!   boot                 files of the template, each read in order; far more work than reading
//!   OLTP                 a transaction: work, now and then a read of the table, the log; the table's pages are written later
//!   decompression        an archive of the template is read, with some reading beside it; files are written
//!   writing              a file is written in order, and the file system's journal and tables beside it
//!   again                what was written is read, again and again: the paper's future work
//! ```
//!
//! The paper prints no requests. What it says is kept: 130 transactions a second, reads and writes as 1.5 to 1 in the
//! decompression, `sysbench`. `OLTP_READS` is fitted to the 130 transactions of one machine on the hard disk. All other
//! sizes and times are guesses, the same for each place of the images; they are constants below.
//!
//! Left out: the guest's and the driver machine's page cache (a request here is one that has missed them), and cache
//! flushes, which a guest of Linux 2.6.18 did not send.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use vellum_core::{Buffer, Clock, GuestOffset, Random, Result, SharedDisk, WriteFlags, try_join_all};
use vellum_sim::{Handle, Spawner};

use super::processors::Processors;
use super::scene::Scene;
use super::{Answered, GIB, KIB, MIB};

/// What machines do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Load {
    SequentialRead,
    SequentialWrite,
    RandomRead,
    RandomWrite,
    /// So many of a hundred requests are writes.
    Mix(u64),
    Boot,
    Oltp,
    Decompress,
    Write,
    /// What was written is read so many times; the last one is answered.
    Again(u64),
}

/// Where `sysbench` has its file, and how long it is.
const FILE_AT: u64 = GIB;
const FILE_BYTES: u64 = 2 * GIB;
const RANDOM_BYTES: u64 = 16 * KIB;
const SEQUENTIAL_BYTES: u64 = 128 * KIB;
/// What a request costs between guest and driver machine.
const CROSSING: Duration = Duration::from_micros(200);

/// A boot: files of so many bytes are read, so many of them, with so much work in all.
const BOOT_FILES: u64 = 400;
const BOOT_READS_OF_FILE: u64 = 3;
const BOOT_READ_BYTES: u64 = 16 * KIB;
const BOOT_WORK: Duration = Duration::from_micros(15_000_000);

/// OLTP: work of a transaction, reads in a hundred of them, pages that are written for a hundred, and the table.
const OLTP_WORK: Duration = Duration::from_micros(2000);
const OLTP_READS: u64 = 70;
const OLTP_WRITES: u64 = 25;
const OLTP_TRANSACTIONS: u64 = 8000;
const TABLE_AT: u64 = GIB;
const TABLE_BYTES: u64 = 256 * MIB;
const LOG_AT: u64 = 3 * GIB;
const LOG_BYTES: u64 = 10 * MIB;

/// A decompression: bytes written, work for a MiB of them, files of a directory, and bytes of a file.
const TREE_BYTES: u64 = 240 * MIB;
const TREE_WORK: Duration = Duration::from_micros(60_000);
const TREE_FILES: u64 = 32;
const TREE_FILE_BYTES: u64 = 16 * KIB;
const TREE_GROUP_BYTES: u64 = 128 * MIB;

/// Writing: bytes of the file, and how much of it is written between two commits of the file system's journal.
const WRITTEN_BYTES: u64 = 256 * MIB;
const WRITTEN_PIECE: u64 = 64 * KIB;
const COMMIT_EVERY: u64 = 16;

/// Between the first pass over what was written and the second.
const IDLE: Duration = Duration::from_micros(180_000_000);

/// Write requests of a page cache that are under way at most.
const UNDER_WAY: usize = 16;

#[derive(Clone)]
struct Guest {
    disk: SharedDisk,
    clock: Arc<dyn Clock>,
    spawner: Spawner,
    processors: Arc<Processors>,
    crossing: Duration,
    late: Rc<RefCell<Vec<Handle<Result<()>>>>>,
}

impl Guest {
    async fn read(&self, at: u64, len: u64) -> Result<()> {
        self.clock.sleep(self.crossing).await;
        let buffer = Buffer::for_overwrite(usize::try_from(len).expect("a request"));
        self.disk.read(GuestOffset::new(at), buffer).await.map(drop)
    }

    async fn write(&self, at: u64, len: u64) -> Result<()> {
        self.clock.sleep(self.crossing).await;
        let data = Buffer::copy_of(&vec![1; usize::try_from(len).expect("a request")]);
        self.disk.write(GuestOffset::new(at), data, WriteFlags::default()).await
    }

    /// A write that nobody waits for, unless too many are under way.
    async fn write_late(&self, at: u64, len: u64) -> Result<()> {
        let oldest = {
            let mut late = self.late.borrow_mut();
            (late.len() >= UNDER_WAY).then(|| late.remove(0))
        };
        if let Some(oldest) = oldest {
            oldest.await?;
        }
        let guest = self.clone();
        let written = self.spawner.spawn(async move { guest.write(at, len).await });
        self.late.borrow_mut().push(written);
        Ok(())
    }

    async fn settle(&self) -> Result<()> {
        let late: Vec<_> = self.late.borrow_mut().drain(..).collect();
        for written in late {
            written.await?;
        }
        Ok(())
    }
}

/// The load on all machines; ends when the last has done it.
pub(super) fn all(scene: &Scene, load: Load, part: u64) -> Result<Answered> {
    let guests = scene.machines.iter().enumerate().map(|(number, machine)| {
        let guest = Guest {
            disk: machine.disk.clone(),
            clock: scene.world.clock(),
            spawner: scene.world.spawner(),
            processors: scene.processors.clone(),
            crossing: if scene.is_native { Duration::ZERO } else { CROSSING },
            late: Rc::default(),
        };
        let random = Random::from_seed(number as u64 + 1);
        scene.world.spawn(async move {
            let done = one(&guest, load, part, random).await?;
            guest.settle().await?;
            Ok(done)
        })
    });
    let guests: Vec<_> = guests.collect();
    let mut sum = Answered::default();
    for done in scene.world.run(try_join_all(guests))? {
        sum += done;
    }
    Ok(sum)
}

async fn one(guest: &Guest, load: Load, part: u64, mut random: Random) -> Result<Answered> {
    let of = |whole: u64| (whole / part).max(1);
    match load {
        Load::SequentialRead | Load::SequentialWrite => {
            sequential(guest, load == Load::SequentialRead, of(4096)).await
        }
        Load::RandomRead => mix(guest, 0, of(10_000), &mut random).await,
        Load::RandomWrite => mix(guest, 100, of(10_000), &mut random).await,
        Load::Mix(writes) => mix(guest, writes, of(10_000), &mut random).await,
        Load::Boot => boot(guest, of(BOOT_FILES), &mut random).await,
        Load::Oltp => oltp(guest, of(OLTP_TRANSACTIONS), &mut random).await,
        Load::Decompress => decompress(guest, of(TREE_BYTES), &mut random).await,
        Load::Write => write(guest, of(WRITTEN_BYTES)).await,
        Load::Again(times) => again(guest, of(WRITTEN_BYTES), times).await,
    }
}

async fn timed(guest: &Guest, done: &mut Answered, act: impl Future<Output = Result<()>>) -> Result<()> {
    let begun = guest.clock.now();
    act.await?;
    *done += Answered { answered: 1, took: guest.clock.now() - begun };
    Ok(())
}

async fn sequential(guest: &Guest, is_read: bool, requests: u64) -> Result<Answered> {
    let mut done = Answered::default();
    for number in 0..requests {
        let at = FILE_AT + number * SEQUENTIAL_BYTES;
        match is_read {
            true => timed(guest, &mut done, guest.read(at, SEQUENTIAL_BYTES)).await?,
            false => timed(guest, &mut done, guest.write(at, SEQUENTIAL_BYTES)).await?,
        }
    }
    Ok(done)
}

async fn mix(guest: &Guest, writes_of_100: u64, requests: u64, random: &mut Random) -> Result<Answered> {
    let mut done = Answered::default();
    for _ in 0..requests {
        let at = FILE_AT + random.below(FILE_BYTES / RANDOM_BYTES) * RANDOM_BYTES;
        match random.below(100) < writes_of_100 {
            true => timed(guest, &mut done, guest.write(at, RANDOM_BYTES)).await?,
            false => timed(guest, &mut done, guest.read(at, RANDOM_BYTES)).await?,
        }
    }
    Ok(done)
}

/// One boot is what is answered.
async fn boot(guest: &Guest, files: u64, random: &mut Random) -> Result<Answered> {
    let begun = guest.clock.now();
    // The files are the same in each machine.
    let mut places = Random::from_seed(77);
    for number in 0..files {
        let file = places.below(GIB / MIB) * MIB;
        for read in 0..BOOT_READS_OF_FILE {
            guest.read(file + read * BOOT_READ_BYTES, BOOT_READ_BYTES).await?;
        }
        // No two machines boot in step.
        let tenths = 9 + u32::try_from(random.below(3)).expect("small");
        let work = BOOT_WORK / u32::try_from(BOOT_FILES).expect("few") * tenths / 10;
        guest.processors.work(work).await;
        if number % 8 == 0 {
            guest.write_late(LOG_AT + number * 4 * KIB, 4 * KIB).await?;
        }
    }
    Ok(Answered { answered: 1, took: guest.clock.now() - begun })
}

async fn oltp(guest: &Guest, transactions: u64, random: &mut Random) -> Result<Answered> {
    let mut done = Answered::default();
    for number in 0..transactions {
        let page = |random: &mut Random| TABLE_AT + random.below(TABLE_BYTES / RANDOM_BYTES) * RANDOM_BYTES;
        let read = (random.below(100) < OLTP_READS).then(|| page(random));
        let written = (random.below(100) < OLTP_WRITES).then(|| page(random));
        timed(guest, &mut done, async {
            guest.processors.work(OLTP_WORK).await;
            if let Some(at) = read {
                guest.read(at, RANDOM_BYTES).await?;
            }
            guest.write(LOG_AT + number * 4 * KIB % LOG_BYTES, 4 * KIB).await
        })
        .await?;
        if let Some(at) = written {
            guest.write_late(at, RANDOM_BYTES).await?;
        }
    }
    Ok(done)
}

async fn decompress(guest: &Guest, bytes: u64, random: &mut Random) -> Result<Answered> {
    let begun = guest.clock.now();
    let directory_bytes = TREE_FILES * TREE_FILE_BYTES;
    let mut archive = 0;
    for _ in 0..(bytes / directory_bytes).max(1) {
        // Three bytes are read for two that are written: two of them of the archive, one of other files.
        let (of_archive, of_others) = (directory_bytes, directory_bytes / 2);
        for _ in 0..of_archive / SEQUENTIAL_BYTES {
            guest.read(archive, SEQUENTIAL_BYTES).await?;
            archive += SEQUENTIAL_BYTES;
        }
        for _ in 0..of_others / RANDOM_BYTES {
            guest.read(FILE_AT + random.below(GIB / RANDOM_BYTES) * RANDOM_BYTES, RANDOM_BYTES).await?;
        }
        guest.processors.work(TREE_WORK * u32::try_from(directory_bytes / KIB).expect("small") / 1024).await;
        // A directory is in a group of its own, its files behind one another.
        let groups = (2 * GIB - directory_bytes) / TREE_GROUP_BYTES;
        let within = random.below(TREE_GROUP_BYTES / directory_bytes) * directory_bytes;
        let at = 2 * GIB + random.below(groups) * TREE_GROUP_BYTES + within;
        for file in 0..TREE_FILES {
            guest.write_late(at + file * TREE_FILE_BYTES, TREE_FILE_BYTES).await?;
        }
    }
    guest.settle().await?;
    Ok(Answered { answered: 1, took: guest.clock.now() - begun })
}

/// A file in order, and for each commit of the file system: its journal, a bitmap, an inode.
async fn write(guest: &Guest, bytes: u64) -> Result<Answered> {
    let begun = guest.clock.now();
    for piece in 0..bytes / WRITTEN_PIECE {
        guest.write_late(2 * GIB + piece * WRITTEN_PIECE, WRITTEN_PIECE).await?;
        if piece % COMMIT_EVERY == COMMIT_EVERY - 1 {
            let commit = piece / COMMIT_EVERY;
            guest.write_late(LOG_AT + commit * 16 * KIB % LOG_BYTES, 16 * KIB).await?;
            guest.write_late(GIB + commit / 128 * 4 * KIB, 4 * KIB).await?;
            guest.write_late(GIB + MIB, 4 * KIB).await?;
        }
    }
    guest.settle().await?;
    Ok(Answered { answered: 1, took: guest.clock.now() - begun })
}

/// Written once, and read in files, which lie in no order. After the first pass there is time for promotions.
async fn again(guest: &Guest, bytes: u64, times: u64) -> Result<Answered> {
    let files = bytes / SEQUENTIAL_BYTES;
    for file in 0..files {
        guest.write_late(2 * GIB + file * SEQUENTIAL_BYTES, SEQUENTIAL_BYTES).await?;
    }
    guest.settle().await?;
    guest.disk.flush().await?;
    let mut done = Answered::default();
    for pass in 0..times {
        if pass == 1 {
            guest.clock.sleep(IDLE).await;
        }
        done = Answered::default();
        timed(guest, &mut done, async {
            for file in 0..files {
                let at = 2 * GIB + file * 37 % files * SEQUENTIAL_BYTES;
                guest.read(at, SEQUENTIAL_BYTES).await?;
            }
            Ok(())
        })
        .await?;
    }
    Ok(done)
}
