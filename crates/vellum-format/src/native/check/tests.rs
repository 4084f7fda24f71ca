//! Each invariant is broken once: what the check reports, and what a repair leaves.

use std::sync::Arc;

use futures_lite::future::block_on;
use vellum_core::MemoryStorage;

use super::super::create::{CreateOptions, NewBase, create};
use super::super::geometry::Bits;
use super::super::superblock::Slot;
use super::*;

struct Image {
    storage: Arc<MemoryStorage>,
    places: Places,
}

const UNIT: u64 = 65_536;

impl Image {
    /// A disk of 1 MiB + 512 bytes, 17 units, over a base of 644 KiB − 1024: 11 blocks, 161 sub-blocks. Ten
    /// units of data in the file.
    fn new() -> Self {
        let options = CreateOptions {
            size: (1 << 20) + 512,
            has_table: true,
            unit_size: Some(UNIT),
            journal_bytes: Some(65_536),
            base: Some(NewBase { name: "b".to_owned(), size: 644 * 1024 - 1024, ..NewBase::default() }),
            ..CreateOptions::default()
        };
        let storage = MemoryStorage::new("image");
        let places = block_on(create(&*storage, &options)).unwrap().places();
        block_on(storage.set_len(places.data_offset().bytes() + 10 * UNIT)).unwrap();
        Self { storage, places }
    }

    fn put(&self, at: ImageOffset, bytes: &[u8]) {
        block_on(self.storage.write(at, Buffer::copy_of(bytes))).unwrap();
    }

    fn set(&self, bits: Bits, value: u64) {
        let word = block_on(self.storage.read(bits.word, Buffer::zeroed(8))).unwrap();
        let word = u64::from_be_bytes(word.slice().try_into().unwrap());
        self.put(bits.word, &bits.set(word, value).to_be_bytes());
    }

    fn entry(&self, unit: u64, number: u64) {
        self.set(self.places.entry(unit), number);
    }

    /// Sets the feature bit for snapshots. The newest one is `relies`, and the next gets `next`.
    fn superblock(&self, relies: u32, next: u32) {
        let mut superblocks = block_on(Superblocks::read(&*self.storage)).unwrap();
        superblocks.superblock.has_snapshots = true;
        block_on(superblocks.write(&*self.storage)).unwrap();
        let last = self.places.snapshot(4095).start();
        self.put(last + 4, &relies.to_be_bytes());
        self.put(last + 8, &next.to_be_bytes());
    }

    fn snapshot(&self, index: u64, id: u32, next: u32) {
        let mut entry = [0; 128];
        entry[..4].copy_from_slice(&id.to_be_bytes());
        entry[4..8].copy_from_slice(&next.to_be_bytes());
        entry[8..16].copy_from_slice(&(1u64 << 20).to_be_bytes());
        entry[64] = b's';
        self.put(self.places.snapshot(index).start(), &entry);
    }

    fn partial(&self, slot: u64, unit: u32, under: u32) {
        let mut entry = [0; 128];
        entry[..4].copy_from_slice(&unit.to_be_bytes());
        entry[4..8].copy_from_slice(&under.to_be_bytes());
        entry[8] = 1;
        self.put(self.places.partial(slot).start(), &entry);
    }

    /// Makes unit 9 a map unit whose slot 0 is the copy of `page` for snapshot `id`.
    fn map_unit(&self, id: u32, page: u64) {
        self.put(self.places.snapshot(4095).start(), &9u32.to_be_bytes());
        let at = self.places.unit(9).start();
        self.put(at, b"VELLUMmu");
        self.put(at + 16, &id.to_be_bytes());
        self.put(at + 24, &page.to_be_bytes());
    }

    fn check(&self, repair: Repair) -> (CheckReport, Vec<String>) {
        let mut lines = Vec::new();
        let storage: SharedStorage = self.storage.clone();
        let report = block_on(check(&storage, repair, &mut |line| lines.push(line))).unwrap();
        (report, lines)
    }
}

/// An image with something in every region and no damage.
fn sound() -> Image {
    let image = Image::new();
    for (unit, number) in [(0, 3), (1, 4), (5, 1), (16, 2)] {
        image.entry(unit, number);
    }
    image.set(image.places.bit(10), 1);
    image.set(image.places.mask(160), 3); // its block has a bit, so it does not count
    image.set(image.places.mask(5), 2);
    image.superblock(2, 3);
    image.superblock(2, 3); // so that both copies have it
    image.snapshot(0, 1, 2);
    image.snapshot(7, 2, u32::MAX);
    let table = image.places.region(Region::Table).start().bytes();
    image.map_unit(2, table);
    let copy = image.places.unit(9).start() + 4096;
    image.put(copy, &[3u32, 4, 0, 0, 0, 6].map(u32::to_be_bytes).concat());
    image.partial(0, 1, 6);
    image
}

#[test]
fn a_sound_image_is_sound() {
    let image = sound();
    let (report, lines) = image.check(Repair::Nothing);
    assert!(report.is_clean(), "{lines:#?}");
    assert_eq!((report.total_clusters, report.allocated_clusters, report.fragmented_clusters), (17, 4, 2));
    assert_eq!(report.image_end_offset, image.places.unit(9).end().bytes());
    let before = image.storage.content().to_vec();
    assert!(image.check(Repair::All).0.is_clean());
    assert!(before == image.storage.content().to_vec(), "a repair of nothing changes nothing");
}

type Poke = fn(&Image);

#[test]
fn whatever_is_broken_is_found_and_repaired_where_it_can_be() {
    // The report's words; corruptions, leaks; whether a repair leaves a sound image.
    let cases: [(&str, u64, u64, bool, Poke); 28] = [
        ("bits of blocks past the end", 1, 0, true, |image| {
            image.put(image.places.region(Region::Bitmap).start() + 1, &[0b1000_0100]);
        }),
        ("bits of blocks past the end", 1, 0, true, |image| {
            image.put(image.places.region(Region::Bitmap).start() + 2000, &[1]);
        }),
        ("masks of sub-blocks past the end", 1, 0, true, |image| {
            image.put(image.places.region(Region::Masks).start() + 40, &[0b1100]);
        }),
        ("sub-block 7 has the value 3", 1, 0, false, |image| image.set(image.places.mask(7), 3)),
        ("unit 2 of the disk lies in unit 11, past the end", 1, 0, false, |image| image.entry(2, 11)),
        ("entries past the end of the disk", 1, 0, true, |image| {
            image.put(image.places.region(Region::Table).start() + 17 * 4, &[1]);
        }),
        ("entries past the end of the disk", 1, 0, true, |image| {
            let last: ImageOffset = image.places.region(Region::Table).start() + 70_000;
            image.put(last, &[1]);
        }),
        ("unit 4 is used for unit 1 of the disk and for unit 2", 1, 0, false, |image| image.entry(2, 4)),
        ("unit 6 is used for unit 5 of the disk and for unit 8", 1, 0, false, |image| image.entry(8, 6)),
        ("unit 9 is used for unit 8 of the disk and for copies", 1, 0, false, |image| image.entry(8, 9)),
        ("id 1: its ID appears twice", 2, 0, false, |image| image.snapshot(9, 1, u32::MAX)),
        ("id 3: its ID was never assigned", 1, 0, false, |image| image.snapshot(9, 3, 2)),
        ("do not agree on which snapshot relies", 1, 0, false, |image| image.snapshot(0, 1, u32::MAX)),
        ("do not agree on which snapshot relies", 1, 0, false, |image| image.snapshot(7, 2, 0)),
        ("it relies on itself", 1, 0, false, |image| image.snapshot(0, 1, 1)),
        ("relies on snapshot 77, which does not exist", 1, 0, false, |image| image.snapshot(0, 1, 77)),
        ("should rely on the home pages but does not exist", 1, 0, false, |image| {
            image.superblock(3, 4);
            image.snapshot(7, 2, 0);
        }),
        ("impossible size", 1, 0, false, |image| {
            image.put(image.places.snapshot(0).start() + 8, &u64::MAX.to_be_bytes());
        }),
        ("its name is not valid text", 1, 0, false, |image| {
            image.put(image.places.snapshot(0).start() + 64, &[0xFF]);
        }),
        ("clones stand on it, but the superblock says", 1, 0, false, |image| {
            image.put(image.places.snapshot(0).start() + 32, &2u32.to_be_bytes());
        }),
        ("it is being deleted, and clones stand on it", 1, 0, false, |image| {
            image.put(image.places.snapshot(0).start() + 32, &3u32.to_be_bytes());
        }),
        ("snapshot 5 does not exist", 0, 1, true, |image| {
            let table = image.places.region(Region::Table).start().bytes();
            image.put(image.places.unit(9).start() + 32, &5u32.to_be_bytes());
            image.put(image.places.unit(9).start() + 40, &table.to_be_bytes());
        }),
        ("there are two copies of page", 1, 0, false, |image| {
            let table = image.places.region(Region::Table).start().bytes();
            image.put(image.places.unit(9).start() + 32, &2u32.to_be_bytes());
            image.put(image.places.unit(9).start() + 40, &table.to_be_bytes());
        }),
        ("is not a page of a view", 1, 0, false, |image| image.put(image.places.unit(9).start() + 24, &[1])),
        ("unit 9 does not begin with its magic", 1, 0, false, |image| {
            image.put(image.places.unit(9).start(), &[0]);
        }),
        ("unit 9 appears twice", 1, 0, false, |image| {
            image.put(image.places.unit(9).start() + 8, &9u64.to_be_bytes())
        }),
        ("nothing names its unit 8", 0, 1, true, |image| image.partial(1, 8, 7)),
        ("slot 1, unit 1 over 7: another slot has it", 1, 0, false, |image| image.partial(1, 1, 7)),
    ];
    for (index, (says, corruptions, leaks, is_repaired, poke)) in cases.into_iter().enumerate() {
        let image = sound();
        poke(&image);
        let (report, lines) = image.check(Repair::Nothing);
        assert_eq!((report.corruptions, report.leaks), (corruptions, leaks), "{index}: {says}: {lines:#?}");
        assert!(lines.iter().any(|line| line.contains(says)), "{index}: {says}: {lines:#?}");
        let (after, _) = image.check(Repair::Leaks);
        assert_eq!(
            (after.leaks, after.leaks_fixed, after.corruptions),
            (0, leaks, corruptions),
            "{index}: {says}"
        );
        let (after, _) = image.check(Repair::All);
        assert_eq!(after.is_clean(), is_repaired, "{index}: {says}: {after:?}");
        assert_eq!(after.corruptions_fixed, if is_repaired { corruptions } else { 0 }, "{index}: {says}");
        assert_eq!(image.check(Repair::Nothing).0.is_clean(), is_repaired, "{index}: {says}");
    }
}

#[test]
fn units_under_one_another() {
    let image = sound();
    // Nothing names unit 8, but it lies under unit 1. So its slot stays.
    image.partial(0, 1, 8);
    image.partial(1, 8, 6);
    assert!(image.check(Repair::Nothing).0.is_clean());
    image.partial(1, 8, 1);
    let (report, lines) = image.check(Repair::Nothing);
    assert_eq!(report.corruptions, 2, "{lines:#?}");
    assert!(lines.iter().all(|line| line.contains("lies under itself")), "{lines:#?}");
}

#[test]
fn a_copy_of_the_superblock_is_written_anew() {
    for slot in [Slot::A, Slot::B] {
        let image = sound();
        image.put(slot.offset() + 100, &[0xAA; 8]);
        let (report, lines) = image.check(Repair::Nothing);
        assert!(report.is_clean() && lines[0].contains(&format!("superblock {}", slot.name())), "{lines:#?}");
        let (report, _) = image.check(Repair::All);
        assert_eq!((report.is_clean(), report.corruptions_fixed), (true, 1));
        assert!(image.check(Repair::Nothing).1.is_empty());
    }
}

#[test]
fn an_image_that_was_not_closed_is_recovered_first() {
    let image = sound();
    let mut superblocks = block_on(Superblocks::read(&*image.storage)).unwrap();
    superblocks.superblock.key = Some(5);
    block_on(superblocks.write(&*image.storage)).unwrap();
    let storage: SharedStorage = image.storage.clone();
    let error = block_on(check(&storage, Repair::All, &mut |_| {})).unwrap_err();
    assert!(error.chain().contains("vellum recover"), "{}", error.chain());
}

#[test]
fn the_number_of_messages_is_bounded() {
    let image = sound();
    let units = image.places.region(Region::Table).len() / 4;
    for unit in 0..units.min(17) {
        image.entry(unit, 4_000_000_000);
    }
    let copy = image.places.unit(9).start() + 4096;
    image.put(copy, &[0xEE; 4096]);
    image.put(image.places.unit(9).start() + 32, &1u32.to_be_bytes());
    image.put(
        image.places.unit(9).start() + 40,
        &image.places.region(Region::Table).start().bytes().to_be_bytes(),
    );
    image.put(copy + 4096, &[0xEE; 4096]);
    let (report, lines) = image.check(Repair::Nothing);
    assert!(report.corruptions > 2000, "{report:?}");
    assert!(lines.len() < 1100 && lines.last().unwrap().contains("are not listed"), "{}", lines.len());
}
