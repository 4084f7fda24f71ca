//! Where the maps of a disk and of its snapshots say that both have the same bytes in the same place, they read the same; and
//! else something was written there.
//!
//! ```text
//!   snapshot   [ base ][ packed, 3 ][ base ][ data ]      written since: sub-block 2
//!   disk       [ base ][ data     ][ data ][ data ]       the unit was copied, so all that it has lies in another place
//!                        marked         marked marked     what is read from the base is not
//! ```
//!
//! 1. What differs is always marked.
//! 2. In a unit that was not written since, nothing is marked, whether it is packed or not.
//! 3. In a unit that was written, what is still read from the base is not marked. What both have is marked: only the bytes say that it was
//!    copied and not written.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures_lite::future::block_on;
use vellum_core::{
    Buffer, Disk, GuestOffset, MemoryStorage, Place, Random, SharedDisk, SharedStorage, WriteFlags,
    ZeroFlags, map_placed,
};
use vellum_format::native::{Native, create};

use super::common::native::{NativeSetup, look_native};
use super::common::scale;
use super::trials::{content, model_of, options};

const SUB: usize = 4096;
const UNIT: usize = 64 << 10;
const LEN: usize = 1 << 20;

/// What is known of a disk at a time.
#[derive(Clone)]
struct Model {
    bytes: Vec<u8>,
    /// Writes that there were before each sub-block was written last; 0: never.
    written: Vec<u64>,
}

impl Model {
    fn note(&mut self, at: usize, len: usize, count: u64) {
        self.written[at / SUB..(at + len).div_ceil(SUB)].fill(count);
    }
}

/// For each sub-block, whether both maps say the same place, or nothing in both, for all of it.
async fn same_places(one: &SharedDisk, other: &SharedDisk) -> Vec<bool> {
    let places = async |disk: &SharedDisk| {
        let (mut places, mut rest) = (Vec::new(), GuestOffset::ZERO.span(LEN as u64));
        while !rest.is_empty() {
            for extent in map_placed(disk, rest).await.unwrap() {
                rest = vellum_core::GuestSpan::between(extent.span.end(), rest.end());
                for at in (0..extent.span.len()).step_by(512) {
                    places.push(match &extent.place {
                        Place::Zero { .. } | Place::Below => None,
                        Place::Data { storage, at: start } => {
                            Some((false, Some((storage.clone(), *start + at))))
                        }
                        Place::Compressed { from } => {
                            Some((true, from.as_ref().map(|(storage, start)| (storage.clone(), *start + at))))
                        }
                    });
                }
            }
        }
        places
    };
    let (first, second) = (places(one).await, places(other).await);
    assert_eq!((first.len(), second.len()), (LEN / 512, LEN / 512));
    let is_same = |sector: usize| match (&first[sector], &second[sector]) {
        (None, None) => true,
        (Some((packed, Some((a, p)))), Some((its, Some((b, q))))) => {
            packed == its && Arc::ptr_eq(a, b) && p == q
        }
        _ => false,
    };
    (0..LEN / SUB).map(|sub| (sub * 8..(sub + 1) * 8).all(is_same)).collect()
}

/// Packs, does not pack, is zero; within a sub-block, or beyond several units.
async fn write_some(disk: &Native, model: &mut Model, random: &mut Random, count: u64) {
    let align = *random.pick(&[512, 4096, 4096, 4096]);
    let longest = *random.pick(&[1, 1, 2, 40]);
    let len = (align * (1 + random.index(longest))).min(100_000);
    let at = random.index(LEN - len) / align * align;
    model.note(at, len, count);
    let part = &mut model.bytes[at..at + len];
    let start = GuestOffset::new(at as u64);
    match random.below(8) {
        0 => {
            let flags = ZeroFlags { may_unmap: random.one_in(2), ..ZeroFlags::default() };
            part.fill(0);
            return disk.write_zeroes(start.span(len as u64), flags).await.unwrap();
        }
        1 => part.iter_mut().for_each(|byte| *byte = u8::try_from(random.below(256)).unwrap()),
        _ => part.fill(u8::try_from(1 + random.below(255)).unwrap()),
    }
    disk.write(start, Buffer::copy_of(part), WriteFlags::default()).await.unwrap();
}

async fn one_run(setup: &NativeSetup, seed: u64) -> [usize; 3] {
    let what = format!("{}, seed {seed}", setup.name);
    let base_len = setup.base.as_ref().map_or(0, |base| base.len());
    let mut random = Random::from_seed(seed);
    let image: SharedStorage = MemoryStorage::new("image");
    create(&*image, &setup.create_options()).await.unwrap();
    let mut disk = Native::open(image.clone(), setup.below(), options()).await.unwrap();
    let mut model = Model { bytes: model_of(setup), written: vec![0; LEN / SUB] };
    let mut taken = BTreeMap::<u32, (Model, u64)>::new();
    let (mut packed, mut told, mut beside) = (0, 0, 0);
    for step in 1..80 {
        match random.below(16) {
            0 => {
                let id = disk.snapshot_create(&format!("s{step}"), step).await.unwrap();
                taken.insert(id, (model.clone(), step));
            }
            1..=4 => disk.flush().await.unwrap(),
            5 => {
                disk.close().await.unwrap();
                disk = Native::open(image.clone(), setup.below(), options()).await.unwrap();
            }
            _ => write_some(&disk, &mut model, &mut random, step).await,
        }
        if step % 8 > 0 {
            continue;
        }
        let now: SharedDisk = disk.clone();
        for (id, (then, made)) in &taken {
            let open = disk.snapshot_open(*id).unwrap();
            assert!(content(&*open).await == then.bytes, "{what}, step {step}: snapshot {id} has changed");
            let open: SharedDisk = open;
            let map = map_placed(&open, GuestOffset::ZERO.span(LEN as u64)).await.unwrap();
            packed += map.iter().filter(|extent| matches!(extent.place, Place::Compressed { .. })).count();
            for (sub, is_same) in same_places(&open, &now).await.into_iter().enumerate() {
                let here = sub * SUB..(sub + 1) * SUB;
                let about = || format!("{what}, step {step}: snapshot {id}, sub-block {sub}");
                if is_same {
                    assert!(model.bytes[here.clone()] == then.bytes[here], "{}: it differs", about());
                    continue;
                }
                told += 1;
                let unit = sub * SUB / UNIT * (UNIT / SUB);
                let is_written = model.written[unit..unit + UNIT / SUB].iter().any(|count| count > made);
                assert!(is_written, "{}: nothing was written in its unit", about());
                // Behind the base, nothing says of a block in a unit that it was never written.
                assert!(sub * SUB >= base_len || model.written[sub] > 0, "{}: it was never written", about());
                beside += usize::from(model.written[sub] <= *made);
            }
        }
    }
    assert!(content(&*disk).await == model.bytes, "{what}: the disk");
    disk.close().await.unwrap();
    let (report, lines) = look_native(&image).await.unwrap();
    assert!(report.is_clean(), "{what}: {lines:?}");
    [packed, told, beside]
}

#[test]
fn a_disk_and_its_snapshots_read_the_same_where_both_lie_in_one_place() {
    let base: Vec<u8> = (0..LEN).map(|at| u8::try_from(at / 512 % 251 + 1).unwrap()).collect();
    let zoned = |name| NativeSetup::zoned(name, LEN as u64, UNIT as u64, 256 << 10);
    let setups = [
        zoned("zoned"),
        zoned("zoned over a base").over(base.clone(), 16 << 10),
        zoned("zoned, half of it over a base").over(base[..LEN / 2].to_vec(), 16 << 10),
        NativeSetup::table("table over a base", LEN as u64, UNIT as u64).over(base, 16 << 10),
    ];
    for setup in setups {
        let mut counts = [0; 3];
        for seed in 0..20 * scale() {
            let more = block_on(one_run(&setup, seed));
            counts.iter_mut().zip(more).for_each(|(count, more)| *count += more);
        }
        let [packed, told, beside] = counts;
        assert!(told > 100 && beside > 0, "{}: {counts:?}", setup.name);
        assert!((packed > 100) == setup.options.has_zones, "{}: {counts:?}", setup.name);
    }
}
