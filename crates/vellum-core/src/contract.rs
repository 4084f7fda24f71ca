//! The suites that every [`Storage`] and every [`Disk`] passes, in memory, simulated and real.
//!
//! A suite is an async function over a *fixture*: a factory that makes a fresh storage or disk and can open
//! it again, as after a clean restart. When the contract is broken the suite panics, with the seed if there
//! is one. Each check names its rule; the rules are in [`storage`](crate::storage) and [`disk`](crate::disk).

use crate::disk::{Disk, Place, SharedDisk, WriteFlags, ZeroFlags};
use crate::lending::{lend_disk, lend_storage};
use crate::merged::{fill_from_below, map_merged};
use crate::storage::{SharedStorage, Storage, Zeroes};
use crate::units::{GuestOffset, GuestSpan, ImageOffset};
use crate::{Buffer, ErrorKind, LocalFuture, Random, Result, join_all};

/// Makes storages for the suite.
pub trait StorageFixture {
    /// A fresh storage of `len` bytes of zero.
    fn fresh(&self, len: u64) -> LocalFuture<'_, Result<SharedStorage>>;
    /// The storage that was made last, opened again.
    fn reopen(&self) -> LocalFuture<'_, Result<SharedStorage>>;
}

/// Makes disks for the suite.
pub trait DiskFixture {
    /// A fresh disk of `size` bytes.
    fn fresh(&self, size: u64) -> LocalFuture<'_, Result<SharedDisk>>;
    /// The disk that was made last and has been closed, opened again.
    fn reopen(&self) -> LocalFuture<'_, Result<SharedDisk>>;
    /// What a fresh disk reads as: zeros, or the bytes of its base.
    fn fresh_content(&self, size: u64) -> Vec<u8> {
        vec![0; usize::try_from(size).expect("suites use small disks")]
    }
}

/// The same storages, whose requests come in lent memory (rule 9).
struct LendingStorages<'a>(&'a dyn StorageFixture);

impl StorageFixture for LendingStorages<'_> {
    fn fresh(&self, len: u64) -> LocalFuture<'_, Result<SharedStorage>> {
        Box::pin(async move { self.0.fresh(len).await.map(lend_storage) })
    }

    fn reopen(&self) -> LocalFuture<'_, Result<SharedStorage>> {
        Box::pin(async move { self.0.reopen().await.map(lend_storage) })
    }
}

/// The same disks, whose requests come in lent memory, as a guest's do (rule 13).
struct LendingDisks<'a>(&'a dyn DiskFixture);

impl DiskFixture for LendingDisks<'_> {
    fn fresh(&self, size: u64) -> LocalFuture<'_, Result<SharedDisk>> {
        Box::pin(async move { self.0.fresh(size).await.map(lend_disk) })
    }

    fn reopen(&self) -> LocalFuture<'_, Result<SharedDisk>> {
        Box::pin(async move { self.0.reopen().await.map(lend_disk) })
    }

    fn fresh_content(&self, size: u64) -> Vec<u8> {
        self.0.fresh_content(size)
    }
}

fn bytes(len: usize, random: &mut Random) -> Vec<u8> {
    let mut bytes = vec![0; len];
    random.fill(&mut bytes);
    bytes
}

async fn storage_read(storage: &dyn Storage, at: u64, len: usize) -> Vec<u8> {
    let buffer = storage.read(ImageOffset::new(at), Buffer::for_overwrite(len)).await;
    buffer.expect("a read succeeds").to_vec()
}

async fn storage_write(storage: &dyn Storage, at: u64, bytes: &[u8]) {
    storage.write(ImageOffset::new(at), Buffer::copy_of(bytes)).await.expect("a write succeeds");
}

/// The whole suite for storages.
pub async fn storage(fixture: &dyn StorageFixture) {
    storage_reads_what_was_written_at_any_alignment(fixture).await;
    storage_ends(fixture).await;
    storage_zeroes_and_discards(fixture).await;
    storage_runs_cover_and_are_true(fixture).await;
    storage_overlapping_writes_do_not_mix_sectors(fixture).await;
    storage_scattered_buffers(fixture).await;
    storage_random_operations(fixture, 1, 400).await;
    let lending = LendingStorages(fixture);
    storage_reads_what_was_written_at_any_alignment(&lending).await;
    storage_ends(&lending).await;
    storage_overlapping_writes_do_not_mix_sectors(&lending).await;
    storage_random_operations(&lending, 2, 300).await;
}

/// Rule 1.
async fn storage_reads_what_was_written_at_any_alignment(fixture: &dyn StorageFixture) {
    let storage = fixture.fresh(1 << 20).await.expect("a fresh storage");
    let mut random = Random::from_seed(7);
    let mut model = vec![0; 1 << 20];
    for (at, len) in
        [(0, 4096), (512, 512), (1, 1), (4095, 2), (65_535, 65_538), (100_000, 3), (1_048_575, 1)]
    {
        let data = bytes(len, &mut random);
        model[at..at + len].copy_from_slice(&data);
        storage_write(&*storage, at as u64, &data).await;
    }
    assert_eq!(storage_read(&*storage, 0, 1 << 20).await, model, "rule 1: bytes read as written");
    assert_eq!(storage_read(&*storage, 4094, 70_001).await, model[4094..74_095]);
    assert_eq!(storage_read(&*storage, 77, 0).await, b"");
    storage.flush().await.expect("a flush succeeds");
    drop(storage);
    let storage = fixture.reopen().await.expect("the storage opens again");
    assert_eq!(
        storage_read(&*storage, 0, 1 << 20).await,
        model,
        "rule 3: flushed bytes are there after reopening"
    );
}

/// Rule 2.
async fn storage_ends(fixture: &dyn StorageFixture) {
    let storage = fixture.fresh(10_000).await.expect("a fresh storage");
    let len = storage.len();
    assert!(len >= 10_000);
    storage_write(&*storage, len - 10, &[7; 10]).await;
    let mut expected = vec![7; 10];
    expected.resize(100, 0);
    assert_eq!(storage_read(&*storage, len - 10, 100).await, expected, "rule 2: zeros past the end");
    assert_eq!(storage_read(&*storage, len + 1_000_000, 10).await, [0; 10]);
    let past_end = storage.write(ImageOffset::new(len + 5_000), Buffer::copy_of(&[9; 10])).await;
    if storage.limits().fixed_len {
        let kind = past_end.expect_err("rule 2: a fixed length cannot grow").kind();
        assert_eq!(kind, ErrorKind::NoSpace);
        assert_eq!(storage.len(), len);
        let kind = storage.set_len(len + 1).await.expect_err("a fixed length cannot be set").kind();
        assert_eq!(kind, ErrorKind::Unsupported);
        return;
    }
    past_end.expect("rule 2: a write past the end grows the storage");
    assert_eq!(storage.len(), len + 5_010);
    assert_eq!(storage_read(&*storage, len, 5_000).await, [0; 5_000], "rule 2: zeros in between");
    storage.set_len(len - 5).await.expect("a storage can be cut off");
    storage.set_len(len + 100).await.expect("a storage can be grown");
    assert_eq!(
        storage_read(&*storage, len - 10, 50).await[..6],
        [7, 7, 7, 7, 7, 0],
        "cut off bytes are gone"
    );
    storage
        .write_zeroes(ImageOffset::new(len + 200).span(100), Zeroes::MayUnmap)
        .await
        .expect("zeros past the end");
    assert_eq!(storage.len(), len + 300, "zeros past the end grow the storage");
    storage.discard(ImageOffset::new(len + 200).span(4096)).await.expect("a discard past the end");
    assert_eq!(storage.len(), len + 300, "a discard does not change the length");
}

async fn storage_zeroes_and_discards(fixture: &dyn StorageFixture) {
    let storage = fixture.fresh(1 << 20).await.expect("a fresh storage");
    let mut random = Random::from_seed(9);
    let mut model = bytes(1 << 20, &mut random);
    storage_write(&*storage, 0, &model).await;
    for (at, len, how) in [
        (4096, 8192, Zeroes::Allocated),
        (65_536, 65_536, Zeroes::MayUnmap),
        (300_001, 70_001, Zeroes::MayUnmap),
        (500_001, 1, Zeroes::Allocated),
        (600_000, 0, Zeroes::MayUnmap),
    ] {
        let span = ImageOffset::new(at as u64).span(len as u64);
        storage.write_zeroes(span, how).await.expect("zeros are written");
        model[at..at + len].fill(0);
    }
    assert!(storage_read(&*storage, 0, 1 << 20).await == model, "zeros where asked and nowhere else");
    storage.discard(ImageOffset::new(700_001).span(100_000)).await.expect("a discard succeeds");
    let after = storage_read(&*storage, 0, 1 << 20).await;
    for (at, byte) in after.iter().enumerate() {
        let may_be_zero = (700_001..800_001).contains(&at);
        assert!(
            *byte == model[at] || (may_be_zero && *byte == 0),
            "byte {at} changed in a discard elsewhere"
        );
    }
}

async fn storage_runs_cover_and_are_true(fixture: &dyn StorageFixture) {
    let storage = fixture.fresh(1 << 20).await.expect("a fresh storage");
    storage_write(&*storage, 200_000, &[5; 10_000]).await;
    storage_write(&*storage, 700_000, &[5; 1]).await;
    let mut at = ImageOffset::ZERO;
    while at.bytes() < 1 << 20 {
        let rest = at.span((1 << 20) - at.bytes());
        let runs = storage.runs(rest).await.expect("runs are told");
        assert!(!runs.is_empty(), "runs go on to the end");
        for run in runs {
            assert_eq!(run.span.start(), at, "runs have no gap");
            assert!(!run.span.is_empty());
            let len = usize::try_from(run.span.len()).expect("a small storage");
            let content = storage_read(&*storage, at.bytes(), len).await;
            assert!(run.is_data || content.iter().all(|byte| *byte == 0), "a hole reads as zero");
            at = run.span.end();
        }
    }
    assert_eq!(at.bytes(), 1 << 20);
    let beyond = storage.runs(ImageOffset::new(storage.len()).span(4096)).await.expect("runs are told");
    assert!(beyond.is_empty(), "there are no runs past the end");
}

/// Rule 1, last sentence.
async fn storage_overlapping_writes_do_not_mix_sectors(fixture: &dyn StorageFixture) {
    let storage = fixture.fresh(1 << 18).await.expect("a fresh storage");
    for round in 0..8u64 {
        let writes = (1..=8u8).map(|value| {
            let at = (u64::from(value) * 1536 + round * 512) % 65_536;
            storage.write(ImageOffset::new(at), Buffer::copy_of(&[value; 32_768]))
        });
        for written in join_all(writes).await {
            written.expect("a write succeeds");
        }
        let content = storage_read(&*storage, 0, 131_072).await;
        for (index, sector) in content.chunks(512).enumerate() {
            assert!(sector.iter().all(|byte| *byte == sector[0]), "rule 1: sector {index} is mixed");
        }
        // Unaligned neighbours: each keeps its own bytes although they share a sector.
        let writes = (0..16u8).map(|value| {
            let at = 200_000 + u64::from(value) * 100;
            storage.write(ImageOffset::new(at), Buffer::copy_of(&[value + 1; 100]))
        });
        for written in join_all(writes).await {
            written.expect("a write succeeds");
        }
        let content = storage_read(&*storage, 200_000, 1_600).await;
        for (index, part) in content.chunks(100).enumerate() {
            let value = u8::try_from(index + 1).expect("sixteen parts");
            assert!(part.iter().all(|byte| *byte == value), "rule 1: a neighbour's write was lost");
        }
    }
}

async fn storage_scattered_buffers(fixture: &dyn StorageFixture) {
    let storage = fixture.fresh(1 << 18).await.expect("a fresh storage");
    let mut random = Random::from_seed(3);
    for sizes in [vec![4096, 4096, 4096], vec![512, 1, 511, 7], vec![65_536, 3, 4096], vec![1; 40]] {
        let mut data = Buffer::empty();
        for size in &sizes {
            data.append(Buffer::copy_of(&bytes(*size, &mut random)));
        }
        let expected = data.to_vec();
        storage.write(ImageOffset::new(4096), data).await.expect("a scattered write succeeds");
        let mut target = Buffer::empty();
        for size in sizes.iter().rev() {
            target.append(Buffer::for_overwrite(*size));
        }
        let target = storage.read(ImageOffset::new(4096), target).await.expect("a scattered read succeeds");
        assert_eq!(target.to_vec(), expected);
    }
}

/// Random operations against a vector of bytes, with reopening in between.
pub async fn storage_random_operations(fixture: &dyn StorageFixture, seed: u64, count: usize) {
    let mut random = Random::from_seed(seed);
    let mut storage = fixture.fresh(1 << 19).await.expect("a fresh storage");
    let mut model = vec![0u8; 1 << 19];
    for step in 0..count {
        let at = random.index(model.len());
        let len = random.index((model.len() - at).min(100_000) + 1);
        let (at, len) = if random.one_in(2) { (at & !511, len & !511) } else { (at, len) };
        let span = ImageOffset::new(at as u64).span(len as u64);
        match random.below(10) {
            0..=3 => {
                let data = bytes(len, &mut random);
                storage_write(&*storage, at as u64, &data).await;
                model[at..at + len].copy_from_slice(&data);
            }
            4 => {
                let how = if random.one_in(2) { Zeroes::Allocated } else { Zeroes::MayUnmap };
                storage.write_zeroes(span, how).await.expect("zeros are written");
                model[at..at + len].fill(0);
            }
            5 if random.one_in(4) => {
                storage.flush().await.expect("a flush succeeds");
                drop(storage);
                storage = fixture.reopen().await.expect("the storage opens again");
            }
            5 => storage.flush().await.expect("a flush succeeds"),
            _ => {
                let content = storage_read(&*storage, at as u64, len).await;
                assert!(content == model[at..at + len], "seed {seed} step {step}: {span} reads differently");
            }
        }
    }
    assert!(storage_read(&*storage, 0, model.len()).await == model, "seed {seed}: the end differs");
}

async fn disk_read(disk: &dyn Disk, at: usize, len: usize) -> Vec<u8> {
    let read = disk.read(GuestOffset::new(at as u64), Buffer::for_overwrite(len)).await;
    read.expect("a read succeeds").to_vec()
}

async fn disk_write(disk: &dyn Disk, at: usize, bytes: &[u8], flags: WriteFlags) {
    disk.write(GuestOffset::new(at as u64), Buffer::copy_of(bytes), flags).await.expect("a write succeeds");
}

/// The whole suite for disks.
pub async fn disk(fixture: &dyn DiskFixture) {
    disk_reads_what_was_written_at_any_alignment(fixture).await;
    disk_refuses_what_passes_its_end(fixture).await;
    disk_zeroes_and_discards(fixture).await;
    disk_concurrent_writes(fixture).await;
    disk_closes(fixture).await;
    disk_random_operations(fixture, 1 << 20, 1, 300).await;
    disk_random_operations(fixture, (1 << 20) + 12_345 * 512, 2, 300).await;
    let lending = LendingDisks(fixture);
    disk_reads_what_was_written_at_any_alignment(&lending).await;
    disk_concurrent_writes(&lending).await;
    disk_random_operations(&lending, 1 << 20, 3, 200).await;
}

async fn disk_reads_what_was_written_at_any_alignment(fixture: &dyn DiskFixture) {
    let size = 1 << 20;
    let disk = fixture.fresh(size as u64).await.expect("a fresh disk");
    let mut model = fixture.fresh_content(size as u64);
    assert!(disk_read(&*disk, 0, size).await == model, "a fresh disk reads as its base");
    let mut random = Random::from_seed(7);
    for (at, len, flags) in [
        (0, 4096, WriteFlags::default()),
        (512, 512, WriteFlags::FUA),
        (1, 1, WriteFlags::default()),
        (65_535, 65_538, WriteFlags::default()),
        (size - 1, 1, WriteFlags::FUA),
        (300_000, 300_000, WriteFlags::default()),
        (1000, 0, WriteFlags::default()),
    ] {
        let data = bytes(len, &mut random);
        model[at..at + len].copy_from_slice(&data);
        disk_write(&*disk, at, &data, flags).await;
    }
    assert!(disk_read(&*disk, 0, size).await == model, "bytes read as written");
    assert!(disk_read(&*disk, 511, 600_001).await == model[511..600_512]);
    disk_map_agrees(&disk, &model).await;
    disk.close().await.expect("a disk closes");
    let disk = fixture.reopen().await.expect("the disk opens again");
    assert!(disk_read(&*disk, 0, size).await == model, "rule 1: a closed disk has kept every byte");
    disk.close().await.expect("a disk closes");
}

/// A map covers the disk; zero extents read as zero, and data is where the map says.
async fn disk_map_agrees(disk: &SharedDisk, model: &[u8]) {
    let mut at = GuestOffset::ZERO;
    while at.bytes() < model.len() as u64 {
        let rest = GuestSpan::between(at, GuestOffset::new(model.len() as u64));
        for extent in map_merged(disk, rest).await.expect("a disk can be mapped") {
            assert_eq!(extent.span.start(), at, "a map has no gap");
            at = extent.span.end();
            let len = usize::try_from(extent.span.len()).expect("a small disk");
            let start = usize::try_from(extent.span.start().bytes()).expect("a small disk");
            let expected = &model[start..start + len];
            match extent.place {
                Place::Zero { .. } | Place::Below => {
                    assert!(expected.iter().all(|byte| *byte == 0), "a zero extent reads as zero");
                }
                Place::Data { storage, at } => {
                    let content =
                        storage.read(at, Buffer::for_overwrite(len)).await.expect("a read succeeds");
                    assert!(content.to_vec() == expected, "data lies where the map says");
                }
                Place::Compressed { .. } => {}
            }
        }
    }
}

/// Rule 8.
async fn disk_refuses_what_passes_its_end(fixture: &dyn DiskFixture) {
    let size = 1 << 18;
    let disk = fixture.fresh(size).await.expect("a fresh disk");
    for (at, len) in [(size, 1), (size - 1, 2), (u64::MAX - 10, 5), (size + 512, 0)] {
        let at = GuestOffset::new(at);
        let len_usize = usize::try_from(len).expect("a small request");
        let refused = [
            disk.read(at, Buffer::zeroed(len_usize)).await.map(drop),
            disk.write(at, Buffer::zeroed(len_usize), WriteFlags::default()).await,
            disk.write_zeroes(at.span(len), ZeroFlags::default()).await,
            disk.discard(at.span(len), WriteFlags::default()).await,
            disk.map(at.span(len)).await.map(drop),
        ];
        for result in refused {
            let kind = result.expect_err("rule 8: a request past the end is refused").kind();
            assert_eq!(kind, ErrorKind::Invalid, "rule 8: at {at} length {len}");
        }
    }
    disk_read(&*disk, usize::try_from(size).expect("a small disk"), 0).await;
    disk.close().await.expect("a disk closes");
}

async fn disk_zeroes_and_discards(fixture: &dyn DiskFixture) {
    let size = 1 << 20;
    let disk = fixture.fresh(size as u64).await.expect("a fresh disk");
    let mut random = Random::from_seed(5);
    let mut model = fixture.fresh_content(size as u64);
    let data = bytes(size / 2, &mut random);
    disk_write(&*disk, size / 4, &data, WriteFlags::default()).await;
    model[size / 4..size / 4 * 3].copy_from_slice(&data);
    let both = [false, true];
    for (index, (at, len)) in
        [(0, 65_536), (300_000, 100_000), (1, 1), (size - 70_000, 70_000), (131_072, 131_072)]
            .iter()
            .enumerate()
    {
        let flags = ZeroFlags { fua: both[index % 2], may_unmap: both[(index / 2) % 2], fast_only: false };
        let span = GuestOffset::new(*at as u64).span(*len as u64);
        disk.write_zeroes(span, flags).await.expect("zeros are written");
        model[*at..*at + *len].fill(0);
        assert!(disk_read(&*disk, 0, size).await == model, "zeros where asked and nowhere else ({span})");
    }
    disk_write(&*disk, 10_000, &[8; 5_000], WriteFlags::default()).await;
    model[10_000..15_000].fill(8);
    let fast = ZeroFlags { fast_only: true, ..ZeroFlags::default() };
    match disk.write_zeroes(GuestOffset::new(9_000).span(3_000), fast).await {
        Ok(()) => model[9_000..12_000].fill(0),
        Err(error) => assert_eq!(error.kind(), ErrorKind::Unsupported, "fast zeros are done or refused"),
    }
    assert!(disk_read(&*disk, 0, size).await == model);
    // A discard leaves each sector zero or as it was, and survives as such.
    let discarded = [(196_608, 131_072), (500_001, 33_333), (0, 512)];
    for (at, len) in discarded {
        let span = GuestOffset::new(at as u64).span(len as u64);
        disk.discard(span, WriteFlags::default()).await.expect("a discard succeeds");
    }
    let settled = disk_read(&*disk, 0, size).await;
    for (at, byte) in settled.iter().enumerate() {
        let may_be_zero = discarded.iter().any(|(start, len)| (*start..start + len).contains(&at));
        assert!(
            *byte == model[at] || (may_be_zero && *byte == 0),
            "byte {at} is neither as before nor zero after a discard"
        );
    }
    disk_map_agrees(&disk, &settled).await;
    disk.close().await.expect("a disk closes");
    let disk = fixture.reopen().await.expect("the disk opens again");
    assert!(disk_read(&*disk, 0, size).await == settled, "rule 2: zeros and discards are still there");
    disk.close().await.expect("a disk closes");
}

/// Rule 9.
async fn disk_concurrent_writes(fixture: &dyn DiskFixture) {
    let size = 1 << 20;
    let disk = fixture.fresh(size as u64).await.expect("a fresh disk");
    let mut model = fixture.fresh_content(size as u64);
    // 64 neighbours of one 4 KiB block each, first touch of four clusters of 64 KiB, in a shuffled order.
    let writes = (0..64usize).map(|i| {
        let block = (i * 37) % 64;
        let value = u8::try_from(block + 1).expect("64 values");
        let at = GuestOffset::new((block * 4096) as u64);
        disk.write(at, Buffer::copy_of(&[value; 4096]), WriteFlags::default())
    });
    for written in join_all(writes).await {
        written.expect("a write succeeds");
    }
    for block in 0..64usize {
        model[block * 4096..(block + 1) * 4096].fill(u8::try_from(block + 1).expect("64 values"));
    }
    assert!(disk_read(&*disk, 0, size).await == model, "rule 9: neighbours do not harm each other");
    // Bytes that share a sector.
    let writes = (0..32u8).map(|value| {
        let at = GuestOffset::new(400_000 + u64::from(value) * 10);
        disk.write(at, Buffer::copy_of(&[value; 10]), WriteFlags::default())
    });
    for written in join_all(writes).await {
        written.expect("a write succeeds");
    }
    for value in 0..32u8 {
        let at = 400_000 + usize::from(value) * 10;
        model[at..at + 10].fill(value);
    }
    assert!(
        disk_read(&*disk, 0, size).await == model,
        "rule 9: neighbours in one sector do not harm each other"
    );
    // Overlapping ones: each sector is one of them.
    let writes = (1..=8u8).map(|value| {
        let at = GuestOffset::new(524_288 + u64::from(value) * 1536);
        disk.write(at, Buffer::copy_of(&[value; 65_536]), WriteFlags::default())
    });
    for written in join_all(writes).await {
        written.expect("a write succeeds");
    }
    let content = disk_read(&*disk, 0, size).await;
    let end = 524_288 + 8 * 1536 + 65_536;
    assert!(content[..524_288] == model[..524_288] && content[end..] == model[end..]);
    for (index, sector) in content[524_288 + 8 * 1536..524_288 + 1536 + 65_536].chunks(512).enumerate() {
        let value = sector[0];
        assert!(
            (1..=8).contains(&value) && sector.iter().all(|byte| *byte == value),
            "sector {index} is mixed"
        );
    }
    // Concurrent writes, zeros, discards and flushes leave the rest alone.
    model.copy_from_slice(&content);
    let mut mixed: Vec<LocalFuture<'_, Result<()>>> = Vec::new();
    for i in 0..16u64 {
        let at = GuestOffset::new(i * 32_768);
        mixed.push(disk.write(at, Buffer::copy_of(&[0xEE; 4096]), WriteFlags::default()));
        mixed.push(
            disk.write_zeroes((at + 8192).span(4096), ZeroFlags { may_unmap: true, ..Default::default() }),
        );
        mixed.push(disk.flush());
    }
    for result in join_all(mixed).await {
        result.expect("a request succeeds");
    }
    for i in 0..16usize {
        model[i * 32_768..i * 32_768 + 4096].fill(0xEE);
        model[i * 32_768 + 8192..i * 32_768 + 12_288].fill(0);
    }
    assert!(disk_read(&*disk, 0, size).await == model, "rule 9: mixed requests do not harm each other");
    disk.close().await.expect("a disk closes");
    let disk = fixture.reopen().await.expect("the disk opens again");
    assert!(disk_read(&*disk, 0, size).await == model);
    disk.close().await.expect("a disk closes");
}

/// Rule 12.
async fn disk_closes(fixture: &dyn DiskFixture) {
    let disk = fixture.fresh(1 << 18).await.expect("a fresh disk");
    disk_write(&*disk, 0, &[1; 4096], WriteFlags::default()).await;
    disk.close().await.expect("a disk closes");
    disk.close().await.expect("closing twice is legal");
    let at = GuestOffset::ZERO;
    let refused = [
        disk.read(at, Buffer::zeroed(512)).await.map(drop),
        disk.write(at, Buffer::zeroed(512), WriteFlags::default()).await,
        disk.flush().await,
        disk.write_zeroes(at.span(512), ZeroFlags::default()).await,
        disk.discard(at.span(512), WriteFlags::default()).await,
        disk.map(at.span(512)).await.map(drop),
    ];
    for result in refused {
        assert_eq!(result.expect_err("rule 12: a closed disk answers nothing").kind(), ErrorKind::Closed);
    }
}

/// Random operations against a vector of bytes, several at once now and then, with reopening in between. What
/// a discard leaves is taken over into the model.
pub async fn disk_random_operations(fixture: &dyn DiskFixture, size: u64, seed: u64, count: usize) {
    let mut random = Random::from_seed(seed);
    let mut disk = fixture.fresh(size).await.expect("a fresh disk");
    let mut model = fixture.fresh_content(size);
    for step in 0..count {
        let (at, len) = random_request(&mut random, model.len());
        let span = GuestOffset::new(at as u64).span(len as u64);
        match random.below(12) {
            0..=4 => {
                let data = bytes(len, &mut random);
                disk_write(&*disk, at, &data, WriteFlags { fua: random.one_in(8) }).await;
                model[at..at + len].copy_from_slice(&data);
            }
            5 => {
                let flags =
                    ZeroFlags { may_unmap: random.one_in(2), fua: random.one_in(8), fast_only: false };
                disk.write_zeroes(span, flags).await.expect("zeros are written");
                model[at..at + len].fill(0);
            }
            6 => {
                disk.discard(span, WriteFlags::default()).await.expect("a discard succeeds");
                let content = disk_read(&*disk, at, len).await;
                for (offset, byte) in content.iter().enumerate() {
                    assert!(
                        *byte == model[at + offset] || *byte == 0,
                        "seed {seed} step {step}: a discard of {span} left a foreign byte"
                    );
                }
                model[at..at + len].copy_from_slice(&content);
            }
            7 => {
                // Eight disjoint writes at once, in clusters that are close to each other.
                let stride = 1 + random.index(9_000);
                let base = random.index(model.len().saturating_sub(8 * stride) + 1);
                let parts: Vec<(usize, Vec<u8>)> = (0..8)
                    .map(|i| (base + i * stride, stride))
                    .filter(|(at, len)| at + len <= model.len())
                    .map(|(at, len)| (at, bytes(len, &mut random)))
                    .collect();
                let writes = parts.iter().map(|(at, data)| {
                    disk.write(GuestOffset::new(*at as u64), Buffer::copy_of(data), WriteFlags::default())
                });
                for written in join_all(writes).await {
                    written.expect("a write succeeds");
                }
                for (at, data) in parts {
                    model[at..at + data.len()].copy_from_slice(&data);
                }
            }
            8 if random.one_in(8) => {
                disk.close().await.expect("a disk closes");
                disk = fixture.reopen().await.expect("the disk opens again");
            }
            8 => disk.flush().await.expect("a flush succeeds"),
            9 if random.one_in(2) => {
                // Rule 15: the model does not change.
                let filled = fill_from_below(&*disk, span).await.expect("a fill succeeds");
                assert!(
                    filled.kept == 0 || disk.filling().is_some(),
                    "seed {seed} step {step}: kept nothing"
                );
            }
            _ => {
                let content = disk_read(&*disk, at, len).await;
                assert!(content == model[at..at + len], "seed {seed} step {step}: {span} reads differently");
            }
        }
    }
    assert!(disk_read(&*disk, 0, model.len()).await == model, "seed {seed}: the end differs");
    disk_map_agrees(&disk, &model).await;
    disk.close().await.expect("a disk closes");
    let disk = fixture.reopen().await.expect("the disk opens again");
    assert!(disk_read(&*disk, 0, model.len()).await == model, "seed {seed}: the reopened disk differs");
    disk.close().await.expect("a disk closes");
}

/// A place and a length: small or large, aligned to a sector, a block, a cluster, or not at all.
fn random_request(random: &mut Random, size: usize) -> (usize, usize) {
    let longest = *random.pick(&[512, 4096, 65_536, 200_000]);
    let at = random.index(size);
    let len = 1 + random.index(longest);
    let align = *random.pick(&[1, 512, 4096, 65_536]);
    let at = at / align * align;
    let len = len.next_multiple_of(align).min(size - at);
    (at, len)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::future::ready;
    use std::sync::Arc;

    use futures_lite::future::block_on;

    use super::*;
    use crate::memory::SparseBytes;
    use crate::{CheckedDisk, Limits, MemoryDisk, MemoryStorage};

    struct Memory {
        limits: Limits,
        last: RefCell<Option<Arc<MemoryStorage>>>,
    }

    impl StorageFixture for Memory {
        fn fresh(&self, len: u64) -> LocalFuture<'_, Result<SharedStorage>> {
            let mut content = SparseBytes::default();
            content.set_len(len);
            let storage = MemoryStorage::with("memory", self.limits.clone(), content);
            *self.last.borrow_mut() = Some(storage.clone());
            Box::pin(ready(Ok(storage as SharedStorage)))
        }

        fn reopen(&self) -> LocalFuture<'_, Result<SharedStorage>> {
            let content = self.last.borrow().as_ref().expect("made before").content();
            let storage = MemoryStorage::with("memory", self.limits.clone(), content);
            *self.last.borrow_mut() = Some(storage.clone());
            Box::pin(ready(Ok(storage as SharedStorage)))
        }
    }

    #[test]
    fn the_memory_storage_keeps_the_contract() {
        let fixture = Memory { limits: Limits::plain(), last: RefCell::default() };
        block_on(storage(&fixture));
        let limits = Limits { fixed_len: true, ..Limits::plain() };
        block_on(storage(&Memory { limits, last: RefCell::default() }));
    }

    /// A memory disk cannot be opened again, so its "reopening" is a copy made before it was closed.
    struct MemoryDisks {
        base: Option<Vec<u8>>,
        last: RefCell<Option<Arc<MemoryDisk>>>,
    }

    impl DiskFixture for MemoryDisks {
        fn fresh(&self, size: u64) -> LocalFuture<'_, Result<SharedDisk>> {
            let below = self.base.as_ref().map(|base| MemoryDisk::holding(base) as SharedDisk);
            let disk = MemoryDisk::over(size, below);
            *self.last.borrow_mut() = Some(disk.clone());
            Box::pin(ready(Ok(CheckedDisk::new(disk) as SharedDisk)))
        }

        fn reopen(&self) -> LocalFuture<'_, Result<SharedDisk>> {
            let reopened = self.last.borrow().as_ref().expect("made before").reopened();
            *self.last.borrow_mut() = Some(reopened.clone());
            Box::pin(ready(Ok(CheckedDisk::new(reopened) as SharedDisk)))
        }

        fn fresh_content(&self, size: u64) -> Vec<u8> {
            let mut content = self.base.clone().unwrap_or_default();
            content.resize(usize::try_from(size).expect("a small disk"), 0);
            content
        }
    }

    #[test]
    fn the_memory_disk_keeps_the_contract() {
        block_on(disk(&MemoryDisks { base: None, last: RefCell::default() }));
        let base: Vec<u8> = (0..700_001u32).map(|i| u8::try_from(i % 253).expect("a byte")).collect();
        block_on(disk(&MemoryDisks { base: Some(base), last: RefCell::default() }));
    }
}
