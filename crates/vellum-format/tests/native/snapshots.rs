//! Internal snapshots against a model: every one keeps its content, whatever happens to the disk, to other
//! snapshots and to the power.
//!
//! Each test prints its seed when it fails; the same seed gives the same run.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures_lite::future::block_on;
use vellum_core::{
    Buffer, Disk, GuestOffset, HostTally, LocalFuture, MemoryStorage, Random, SharedDisk, SharedStorage,
    WriteFlags, ZeroFlags, join_all,
};
use vellum_format::native::snapshots::{revert, snapshots};
use vellum_format::native::{Native, OpenOptions, Places, Superblocks, create};
use vellum_sim::{CrashKind, Drive, DriveOptions, FaultPlan, World};

use super::common::native::{NativeSetup, look_native};
use super::common::{SIZE, busy_drive, noise, scale};
use super::trials::{content, model_of, options, setups, written_beside_a_copy};

async fn snapshot_content(image: &SharedStorage, below: Option<SharedDisk>, name: &str) -> Vec<u8> {
    let options = OpenOptions { snapshot: Some(name.to_owned()), ..options() };
    let disk = Native::open(image.clone(), below, options).await;
    content(&*disk.unwrap_or_else(|error| panic!("{name}: {}", error.chain()))).await
}

/// One request; the model's bytes change with it.
pub(super) async fn request(
    disk: &dyn Disk,
    model: &mut [u8],
    random: &mut Random,
) -> vellum_core::Result<()> {
    let align = *random.pick(&[1, 512, 4096, 65_536]);
    let size = model.len() as u64;
    let at = random.below(size) / align * align;
    let longest = *random.pick(&[512, 4096, 20_000, 140_000]);
    let len = (1 + random.below(longest)).next_multiple_of(align).min(size - at);
    let span = GuestOffset::new(at).span(len);
    let range = usize::try_from(at).unwrap()..usize::try_from(at + len).unwrap();
    let fua = random.one_in(8);
    match random.below(8) {
        0 | 1 => {
            model[range].fill(0);
            disk.write_zeroes(span, ZeroFlags { fua, may_unmap: random.one_in(2), fast_only: false }).await
        }
        2 => {
            // What is discarded may be anything until it is written.
            disk.discard(span, WriteFlags { fua }).await?;
            let data = noise(span, random);
            model[range].copy_from_slice(&data.to_vec());
            disk.write(span.start(), data, WriteFlags { fua }).await
        }
        _ => {
            let data = noise(span, random);
            model[range].copy_from_slice(&data.to_vec());
            disk.write(span.start(), data, WriteFlags { fua }).await
        }
    }
}

/// The number of the first map unit, from the list's last entry.
async fn first_map_unit(image: &SharedStorage, places: &Places) -> u32 {
    let at = places.snapshot(4095).start();
    let bytes = image.read(at, Buffer::zeroed(4)).await.unwrap();
    u32::from_be_bytes(bytes.slice().try_into().unwrap())
}

#[test]
fn every_snapshot_keeps_its_content() {
    for setup in setups() {
        for seed in 0..12 * scale() {
            block_on(one_model(&setup, seed));
        }
    }
}

async fn one_model(setup: &NativeSetup, seed: u64) {
    let what = format!("{}, seed {seed}", setup.name);
    let mut random = Random::from_seed(seed);
    let storage = MemoryStorage::new("image");
    let image: SharedStorage = storage.clone();
    create(&*image, &setup.create_options()).await.unwrap();
    let open = async || Native::open(image.clone(), setup.below(), options()).await.unwrap();
    let (mut model, mut taken) = (model_of(setup), BTreeMap::<String, Vec<u8>>::new());
    let mut disk = open().await;
    for step in 0..120 {
        match random.below(12) {
            0..=5 => request(&*disk, &mut model, &mut random).await.unwrap(),
            6 | 7 => {
                let name = format!("s{step}");
                disk.snapshot_create(&name, step).await.unwrap();
                taken.insert(name, model.clone());
            }
            8 if !taken.is_empty() => {
                let name = taken.keys().nth(random.index(taken.len())).unwrap().clone();
                disk.snapshot_delete(&name).await.unwrap();
                taken.remove(&name);
            }
            9 => disk.flush().await.unwrap(),
            10 if random.one_in(2) && !taken.is_empty() => {
                disk.close().await.unwrap();
                let name = taken.keys().nth(random.index(taken.len())).unwrap().clone();
                revert(image.clone(), setup.below(), options(), &name).await.unwrap();
                model.clone_from(&taken[&name]);
                disk = open().await;
            }
            _ => {
                disk.close().await.unwrap();
                let (report, lines) = look_native(&image).await.unwrap();
                assert!(report.is_clean(), "{what}, step {step}: {lines:?}");
                for (name, should) in &taken {
                    let is = snapshot_content(&image, setup.below(), name).await;
                    assert!(is == *should, "{what}, step {step}: snapshot {name} has changed");
                }
                let listed: Vec<String> =
                    snapshots(&image).await.unwrap().into_iter().map(|snapshot| snapshot.name).collect();
                assert_eq!(listed.len(), taken.len(), "{what}: {listed:?}");
                disk = open().await;
            }
        }
        assert!(content(&*disk).await == model, "{what}, step {step}: the disk");
    }
    // With the last snapshot all space that they had is free again, once the image is opened again.
    for name in taken.keys() {
        disk.snapshot_delete(name).await.unwrap();
    }
    disk.close().await.unwrap();
    let disk = open().await;
    disk.write(GuestOffset::ZERO, Buffer::copy_of(&model[..4096]), WriteFlags::FUA).await.unwrap();
    disk.snapshot_create("last", 0).await.unwrap();
    disk.snapshot_delete("last").await.unwrap();
    assert!(content(&*disk).await == model, "{what}: at the end");
    disk.close().await.unwrap();
    let (report, lines) = look_native(&image).await.unwrap();
    assert!(report.is_clean(), "{what}: {lines:?}");
    let places = Superblocks::read(&*image).await.unwrap().superblock.places();
    assert_eq!(first_map_unit(&image, &places).await, 0, "{what}: map units stay");
    let used = report.allocated_clusters * setup.options.unit_size.unwrap();
    assert!(storage.content().len() >= places.data_offset().bytes() + used);
}

/// Several guests, snapshots made and deleted meanwhile, then a crash at many moments.
#[test]
fn crashes_keep_every_acknowledged_snapshot() {
    for setup in setups() {
        // Large ones take their time.
        let rounds = if setup.options.size > SIZE { 1 } else { 6 };
        for seed in 0..rounds * scale() {
            one_crashing(&setup, seed);
        }
    }
}

/// What is known of a snapshot: between these two positions of the log it is there for sure.
struct Known {
    name: String,
    content: Vec<u8>,
    /// Bytes that were being written while it was made.
    is_unsure: Vec<bool>,
    from: vellum_sim::Position,
    until: Option<vellum_sim::Position>,
    gone: Option<vellum_sim::Position>,
}

fn one_crashing(setup: &NativeSetup, seed: u64) {
    let world = World::shuffled(seed);
    let drive = busy_drive(&world, setup.empty_image(), FaultPlan::none());
    let mut known: Vec<Known> = Vec::new();
    world.run(async {
        let disk = setup.open(&drive).await.unwrap();
        let mut random = Random::from_seed(seed);
        let mut model = model_of(setup);
        for round in 0..14 {
            // The guests have a part of the disk each, so that it is known what is there.
            let before = model.clone();
            let third = model.len() / 3;
            let mut forks: Vec<Random> = (0..3).map(|_| random.fork()).collect();
            let mut touched = vec![false; model.len()];
            let parts: Vec<_> = model.chunks_mut(third).zip(touched.chunks_mut(third)).enumerate().collect();
            let guests = parts.into_iter().zip(&mut forks).map(|((part, (bytes, touched)), random)| {
                let disk = Shifted { disk: disk.clone(), by: (part * third) as u64 };
                Box::pin(async move {
                    for _ in 0..random.below(4) {
                        disk.write_some(bytes, touched, random).await;
                    }
                }) as LocalFuture<'_, ()>
            });
            let guests = join_all(guests.collect::<Vec<_>>());
            let name = format!("s{round}");
            let is_beside = random.one_in(2);
            if is_beside {
                let made = async {
                    disk.snapshot_create(&name, 1).await.unwrap();
                    world.position()
                };
                let (from, _) = futures_lite::future::zip(made, guests).await;
                let now = content(&*disk).await;
                assert!(now == model, "{}, seed {seed}, round {round}: the disk", setup.name);
                known.push(Known {
                    name,
                    content: before,
                    is_unsure: touched,
                    from,
                    until: None,
                    gone: None,
                });
                model = now;
            } else {
                guests.await;
                let now = content(&*disk).await;
                assert!(now == model, "{}, seed {seed}, round {round}: the disk", setup.name);
                disk.snapshot_create(&name, 1).await.unwrap();
                let is_unsure = vec![false; now.len()];
                known.push(Known {
                    name,
                    content: now.clone(),
                    is_unsure,
                    from: world.position(),
                    until: None,
                    gone: None,
                });
                model = now;
            }
            let alive: Vec<usize> = (0..known.len()).filter(|index| known[*index].until.is_none()).collect();
            if alive.len() > 2 {
                let index = *random.pick(&alive);
                known[index].until = Some(world.position());
                disk.snapshot_delete(&known[index].name.clone()).await.unwrap();
                known[index].gone = Some(world.position());
            }
        }
        if seed.is_multiple_of(2) {
            disk.close().await.unwrap();
        }
    });
    let log = drive.log();
    let positions = log.crash_positions();
    let mut random = Random::from_seed(seed);
    for _ in 0..40 {
        let position = *random.pick(&positions);
        let kind = *random.pick(&[CrashKind::PowerCut, CrashKind::ProcessKill]);
        let image = log.crash(kind, position).random_image(&mut random);
        let what = format!("{}, seed {seed}, {kind:?} at {position}", setup.name);
        let world = World::new(0);
        let drive = Drive::from_content(&world, image, DriveOptions::default());
        world.run(async {
            let disk = setup.open(&drive).await.unwrap_or_else(|error| panic!("{what}: {}", error.chain()));
            let there: Vec<String> = disk
                .snapshots()
                .map_or(Vec::new(), |all| all.into_iter().map(|snapshot| snapshot.name).collect());
            // It goes on working: what is written now harms no snapshot.
            let mut scratch = content(&*disk).await;
            for _ in 0..4 {
                request(&*disk, &mut scratch, &mut Random::from_seed(seed)).await.unwrap();
            }
            assert!(content(&*disk).await == scratch, "{what}: the disk afterwards");
            disk.close().await.unwrap();
            let image: SharedStorage = drive.clone();
            let (report, lines) = look_native(&image).await.unwrap();
            assert!(report.is_clean(), "{what}: {lines:?}");
            for snapshot in &known {
                let name = &snapshot.name;
                let must_be =
                    snapshot.from <= position && snapshot.until.is_none_or(|until| position <= until);
                let must_not = snapshot.gone.is_some_and(|gone| gone <= position);
                assert!(!must_be || there.contains(name), "{what}: {name} is lost");
                assert!(!must_not || !there.contains(name), "{what}: {name} is back");
                if must_be {
                    let is = snapshot_content(&image, setup.below(), name).await;
                    let wrong = is.iter().zip(&snapshot.content).zip(&snapshot.is_unsure);
                    let wrong = wrong.enumerate().find(|(_, ((is, was), unsure))| is != was && !**unsure);
                    assert!(wrong.is_none(), "{what}: {name} has changed at {:?}", wrong.map(|(at, _)| at));
                }
            }
        });
    }
}

/// A part of a disk.
pub(super) struct Shifted {
    pub(super) disk: Arc<Native>,
    pub(super) by: u64,
}

impl Shifted {
    pub(super) async fn write_some(&self, model: &mut [u8], touched: &mut [bool], random: &mut Random) {
        let at = random.index(model.len());
        let len = (1 + random.index(*random.clone().pick(&[512, 4096, 30_000]))).min(model.len() - at);
        touched[at..at + len].fill(true);
        let span = GuestOffset::new(self.by + at as u64).span(len as u64);
        let flags = WriteFlags { fua: random.one_in(4) };
        if random.one_in(5) {
            model[at..at + len].fill(0);
            let zeros = ZeroFlags { may_unmap: true, ..ZeroFlags::default() };
            self.disk.write_zeroes(span, zeros).await.unwrap();
            return;
        }
        let data = noise(span, random);
        model[at..at + len].copy_from_slice(&data.to_vec());
        self.disk.write(span.start(), data, flags).await.unwrap();
    }
}

/// Making one is one entry: the same few writes for a small disk and a large one, in use or not.
#[test]
fn making_one_costs_the_same_whatever_the_size() {
    let mut costs = Vec::new();
    for (size, units) in [(16 << 20, 0), (16 << 20, 16), (1 << 40, 16), (1 << 40, 4096)] {
        let world = World::new(0);
        let drive = Drive::new(&world, DriveOptions::default());
        let mut setup = NativeSetup::table("table", size, 1 << 20);
        setup.options.journal_bytes = Some(16 << 20);
        world.run(async {
            create(&*drive, &setup.create_options()).await.unwrap();
            let disk = setup.open(&drive).await.unwrap();
            for unit in 0..units {
                let at = GuestOffset::new((unit * (size / units.max(1))) >> 20 << 20);
                disk.write(at, Buffer::copy_of(&[7; 4096]), WriteFlags::default()).await.unwrap();
            }
            disk.snapshot_create("first", 0).await.unwrap(); // the feature bit comes with this one
            for round in 0..3u64 {
                disk.write(GuestOffset::ZERO, Buffer::copy_of(&[8; 4096]), WriteFlags::FUA).await.unwrap();
                disk.flush().await.unwrap();
                let mark = drive.counts();
                disk.snapshot_create(&format!("{round}"), 0).await.unwrap();
                let cost = drive.counts_since(mark);
                costs.push((cost.flushes, cost.writes <= 4, cost.bytes_written <= 16 << 10));
            }
            disk.close().await.unwrap();
        });
    }
    assert!(costs.iter().all(|cost| *cost == (1, true, true)), "{costs:?}");
}

/// After a snapshot a synchronous write waits for one flush, the first one into a unit, too.
#[test]
#[allow(clippy::print_stderr, reason = "the numbers are what the test is for")]
fn after_a_snapshot_one_flush_each() {
    let world = World::new(0);
    let drive = Drive::new(&world, DriveOptions::default());
    let mut setup = NativeSetup::table("table", 1 << 30, 1 << 20);
    setup.options.journal_bytes = Some(1 << 20);
    world.run(async {
        create(&*drive, &setup.create_options()).await.unwrap();
        let tally = HostTally::default();
        let open = OpenOptions { tally: tally.clone(), ..options() };
        let disk = Native::open(drive.clone(), None, open).await.unwrap();
        for unit in 0..64u64 {
            let at = GuestOffset::new(unit << 20);
            disk.write(at, Buffer::copy_of(&[7; 1 << 20]), WriteFlags::default()).await.unwrap();
        }
        disk.snapshot_create("first", 0).await.unwrap();
        let foreground = || {
            let counts = [tally.data.counts(), tally.metadata.counts()];
            (counts.iter().map(|c| c.flushes).sum::<u64>(), counts.iter().map(|c| c.writes).sum::<u64>())
        };
        let before = foreground();
        for unit in 0..64u64 {
            let at = GuestOffset::new((unit << 20) + 8192);
            disk.write(at, Buffer::copy_of(&[8; 4096]), WriteFlags::FUA).await.unwrap();
        }
        let first = foreground();
        for unit in 0..64u64 {
            let at = GuestOffset::new((unit << 20) + 16_384);
            disk.write(at, Buffer::copy_of(&[9; 4096]), WriteFlags::FUA).await.unwrap();
        }
        let second = foreground();
        let per = |value: u64| value as f64 / 64.0;
        eprintln!(
            "after a snapshot, 4 KiB: the first into a unit {:.2} flushes {:.2} writes, the next {:.2} flushes {:.2} writes",
            per(first.0 - before.0),
            per(first.1 - before.1),
            per(second.0 - first.0),
            per(second.1 - first.1),
        );
        assert_eq!((first.0 - before.0, second.0 - first.0), (64, 64), "flushes");
        disk.close().await.unwrap();
        let image: SharedStorage = drive.clone();
        let old = snapshot_content(&image, None, "first").await;
        assert!(old[..64 << 20].iter().all(|byte| *byte == 7), "the snapshot");
    });
}

/// A thousand of them, deleted in any order; the others keep their content.
#[test]
fn a_thousand_deleted_in_any_order() {
    let setup = NativeSetup::table("table", 1 << 20, 64 << 10);
    let mut random = Random::from_seed(7);
    block_on(async {
        let image: SharedStorage = MemoryStorage::new("image");
        create(&*image, &setup.create_options()).await.unwrap();
        let open = async || Native::open(image.clone(), None, options()).await.unwrap();
        let disk = open().await;
        let mut model = vec![0; 1 << 20];
        let mut taken = Vec::new();
        for number in 0..1000u32 {
            let at = random.index(256) * 4096;
            model[at..at + 4096].fill(u8::try_from(number % 255 + 1).unwrap());
            let data = Buffer::copy_of(&model[at..at + 4096]);
            disk.write(GuestOffset::new(at as u64), data, WriteFlags::default()).await.unwrap();
            disk.snapshot_create(&format!("number {number}"), 0).await.unwrap();
            taken.push((format!("{}", number + 1), crc32c::crc32c(&model)));
        }
        assert_eq!(disk.snapshots().unwrap().len(), 1000);
        for last in (1..taken.len()).rev() {
            taken.swap(last, random.index(last + 1));
        }
        let later = taken.split_off(900);
        for (id, _) in &taken {
            disk.snapshot_delete(id).await.unwrap();
        }
        disk.close().await.unwrap();
        let (report, lines) = look_native(&image).await.unwrap();
        assert!(report.is_clean(), "{lines:?}");
        for (id, crc) in &later {
            let is = snapshot_content(&image, None, id).await;
            assert_eq!(crc32c::crc32c(&is), *crc, "snapshot {id}");
        }
        let disk = open().await;
        for (id, _) in &later {
            disk.snapshot_delete(id).await.unwrap();
        }
        assert!(content(&*disk).await == model);
        disk.close().await.unwrap();
        let (report, lines) = look_native(&image).await.unwrap();
        assert!(report.is_clean(), "{lines:?}");
    });
}

/// A unit is being copied for a snapshot when that is deleted. From then on the unit is written to where it
/// lies, so the copy must not count.
#[test]
fn what_is_written_while_a_copy_is_made_in_vain_is_kept() {
    for setup in setups() {
        assert_eq!(written_beside_a_copy(&setup), Ok(()), "{}", setup.name);
    }
}
