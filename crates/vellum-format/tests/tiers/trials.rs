//! One image and one fast medium, and what may happen to either: it is absent, a copy, old, failing. Each trial returns
//! what went wrong, so that mistakes in the engine can be looked for with the same ones.

use std::sync::Arc;

use vellum_core::{
    Buffer, Disk, GuestOffset, GuestSpan, ImageOffset, Random, Result as CoreResult, SharedDisk,
    SharedStorage, WriteFlags,
};
use vellum_format::FormatKind;
use vellum_format::fast::{FastId, FastMedium, NewRow, Promoted, Promotion, Reason, Tiers, create};
use vellum_format::native::{CreateOptions, Native, OpenOptions, create as create_image};
use vellum_sim::{Content, CrashKind, Drive, DriveOptions, Fate, FaultPlan, World};

use crate::common::native::NativeSetup;

pub(crate) const UNIT: u64 = 64 << 10;
pub(crate) const UNITS: u64 = 6;

/// A world with an image and a fast medium that are attached.
pub(crate) struct Both {
    pub(crate) world: World,
    pub(crate) image: Arc<Drive>,
    pub(crate) fast: Arc<Drive>,
    pub(crate) faults: FaultPlan,
    setup: NativeSetup,
}

pub(crate) type Trial = Result<(), String>;

pub(crate) fn ensure(holds: bool, what: impl Into<String>) -> Trial {
    if holds { Ok(()) } else { Err(what.into()) }
}

pub(crate) fn chain(error: vellum_core::Error) -> String {
    error.chain()
}

impl Both {
    pub(crate) fn new() -> Self {
        let setup = NativeSetup::table("table", UNITS * UNIT, UNIT);
        let world = World::new(1);
        let faults = FaultPlan::none();
        let image = Drive::from_content(&world, setup.empty_image(), DriveOptions::default());
        let options = DriveOptions { faults: faults.clone(), ..DriveOptions::default() };
        let fast = Drive::from_content(&world, Content::default(), options);
        let both = Self { world, image, fast, faults, setup };
        both.world.run(async {
            let storage: SharedStorage = both.fast.clone();
            let id = FastId::new([3; 16]).unwrap();
            create(&storage, (640 << 10) + UNITS * UNIT, id).await.unwrap();
            let medium = both.medium(1).await.unwrap();
            let row = NewRow { uuid: [7; 16], budget: u64::MAX, name: String::new() };
            medium.attach(row).await.unwrap();
            let image: SharedStorage = both.image.clone();
            FormatKind::Native.format().attach_fast(&image, id, "fast").await.unwrap();
        });
        both
    }

    pub(crate) async fn medium(&self, seed: u64) -> CoreResult<Arc<FastMedium>> {
        FastMedium::open(self.fast.clone(), Random::from_seed(seed)).await
    }

    pub(crate) fn below(&self) -> Option<SharedDisk> {
        self.setup.below()
    }

    async fn open_on(
        &self,
        image: SharedStorage,
        fast: Option<SharedStorage>,
        seed: u64,
    ) -> Result<Arc<Native>, String> {
        let fast = match fast {
            Some(fast) => Some(FastMedium::open(fast, Random::from_seed(seed)).await.map_err(chain)?),
            None => None,
        };
        let options = OpenOptions { journal_key: Some(1), fast, ..OpenOptions::default() };
        Native::open(image, self.setup.below(), options).await.map_err(chain)
    }

    pub(crate) async fn open(&self, seed: u64) -> Result<Arc<Native>, String> {
        self.open_on(self.image.clone(), Some(self.fast.clone()), seed).await
    }

    pub(crate) async fn open_alone(&self) -> Result<Arc<Native>, String> {
        self.open_on(self.image.clone(), None, 0).await
    }

    /// Another image with a row on the medium. Nothing is open.
    pub(crate) async fn another(&self, medium: &FastMedium) -> Result<Arc<Drive>, String> {
        let drive = Drive::new(&self.world, DriveOptions::default());
        let options = CreateOptions { uuid: Some([8; 16]), ..self.setup.create_options() };
        create_image(&*drive, &options).await.map_err(chain)?;
        let row = NewRow { uuid: [8; 16], budget: u64::MAX, name: "another".to_owned() };
        medium.attach(row).await.map_err(chain)?;
        let image: SharedStorage = drive.clone();
        FormatKind::Native.format().attach_fast(&image, medium.id(), "fast").await.map_err(chain)?;
        Ok(drive)
    }

    /// Damages one sector of the medium's entries, those of the first slots.
    pub(crate) fn damage_entries(&self) -> Arc<Drive> {
        let mut content = self.fast.content();
        content.write(ImageOffset::new(520 << 10), &[0x5A; 512]);
        Drive::from_content(&self.world, content, DriveOptions::default())
    }

    /// A copy of what a drive has now.
    pub(crate) fn copy_of(&self, drive: &Drive) -> Arc<Drive> {
        Drive::from_content(&self.world, drive.content(), DriveOptions::default())
    }
}

pub(crate) async fn put(disk: &Native, unit: u64, value: u8) -> Trial {
    let data = Buffer::copy_of(&vec![value; usize::try_from(UNIT).unwrap()]);
    disk.write(GuestOffset::new(unit * UNIT), data, WriteFlags::default()).await.map_err(chain)?;
    disk.flush().await.map_err(chain)
}

pub(crate) async fn get(disk: &Native, unit: u64) -> Result<u8, String> {
    let bytes = disk.read(GuestOffset::new(unit * UNIT), Buffer::zeroed(512)).await.map_err(chain)?.to_vec();
    match bytes.iter().all(|byte| *byte == bytes[0]) {
        true => Ok(bytes[0]),
        false => Err("a sector is mixed".to_owned()),
    }
}

pub(crate) fn unit_span(unit: u64) -> GuestSpan {
    GuestOffset::new(unit * UNIT).span(UNIT)
}

pub(crate) async fn promote(disk: &Native, unit: u64) -> Result<Promoted, String> {
    let promotion = Promotion { ranges: vec![unit_span(unit)], reason: Reason::Asked, copies_base: false };
    disk.promote(promotion).await.map_err(chain)
}

pub(crate) async fn reads(disk: &Native, unit: u64, value: u8, when: &str) -> Trial {
    let found = get(disk, unit).await?;
    ensure(found == value, format!("unit {unit} reads as {found} and not {value} {when}"))
}

/// A copy of the image has the numbers that the image had when it was made.
pub(crate) fn a_copy_of_the_image_does_not_read_the_copies_of_the_original() -> Trial {
    let both = Both::new();
    both.world.run(async {
        let disk = both.open(1).await?;
        put(&disk, 0, 1).await?;
        promote(&disk, 0).await?;
        disk.close().await.map_err(chain)?;
        drop(disk);
        let copy = both.copy_of(&both.image);
        let disk = both.open(2).await?;
        put(&disk, 0, 2).await?;
        promote(&disk, 0).await?;
        reads(&disk, 0, 2, "in the original").await?;
        disk.close().await.map_err(chain)?;
        drop(disk);
        let disk = both.open_on(copy, Some(both.fast.clone()), 3).await?;
        reads(&disk, 0, 1, "in the copy").await?;
        drop(disk);
        let disk = both.open(4).await?;
        ensure(disk.facts().units == 1, "the original has lost its copy")?;
        reads(&disk, 0, 2, "in the original, again").await
    })
}

/// The medium is restored from a copy that was made before the last promotion.
pub(crate) fn a_medium_that_has_forgotten_is_not_believed() -> Trial {
    let both = Both::new();
    both.world.run(async {
        let disk = both.open(1).await?;
        put(&disk, 0, 1).await?;
        promote(&disk, 0).await?;
        let old = both.copy_of(&both.fast);
        put(&disk, 0, 2).await?;
        promote(&disk, 0).await?;
        disk.close().await.map_err(chain)?;
        drop(disk);
        let disk = both.open_on(both.image.clone(), Some(old), 2).await?;
        reads(&disk, 0, 2, "with the old medium").await?;
        ensure(disk.facts().units == 0, "what the old medium has counts")
    })
}

/// Written, reverted or shrunk without the medium; then bits count again in a new session.
pub(crate) fn what_was_void_stays_void() -> Trial {
    for how in ["written", "reverted", "shrunk"] {
        let both = Both::new();
        both.world.run(async {
            let disk = both.open(1).await?;
            put(&disk, 0, 1).await?;
            put(&disk, 5, 1).await?;
            if how == "reverted" {
                disk.snapshot_create("one", 0).await.map_err(chain)?;
                put(&disk, 0, 2).await?;
            }
            // The first slot is used again first, and that is not to be the one of unit 0.
            promote(&disk, 5).await?;
            promote(&disk, 0).await?;
            disk.close().await.map_err(chain)?;
            drop(disk);
            let image: SharedStorage = both.image.clone();
            let expected = match how {
                "written" => {
                    let disk = both.open_alone().await?;
                    put(&disk, 0, 3).await?;
                    disk.close().await.map_err(chain)?;
                    3
                }
                "reverted" => {
                    FormatKind::Native.format().revert(&image, "one").await.map_err(chain)?;
                    1
                }
                _ => {
                    FormatKind::Native.format().resize(&image, 5 * UNIT, true).await.map_err(chain)?;
                    1
                }
            };
            let disk = both.open(2).await?;
            ensure(disk.facts().units == 0, format!("copies count after it was {how}"))?;
            reads(&disk, 0, expected, how).await?;
            // The session that begins now is about another unit alone.
            put(&disk, 1, 4).await?;
            promote(&disk, 1).await?;
            disk.close().await.map_err(chain)?;
            drop(disk);
            let disk = both.open(3).await?;
            ensure(disk.facts().units == 1, "one unit was promoted")?;
            reads(&disk, 0, expected, how).await?;
            reads(&disk, 1, 4, how).await
        })?;
    }
    Ok(())
}

/// The image is copied while it is in use, between two promotions of a unit.
pub(crate) fn a_copy_of_an_image_in_use_does_not_read_what_was_promoted_later() -> Trial {
    let both = Both::new();
    both.world.run(async {
        let disk = both.open(1).await?;
        put(&disk, 0, 1).await?;
        promote(&disk, 0).await?;
        let copy = both.copy_of(&both.image);
        put(&disk, 0, 2).await?;
        promote(&disk, 0).await?;
        disk.close().await.map_err(chain)?;
        drop(disk);
        let disk = both.open_on(copy, Some(both.fast.clone()), 2).await?;
        reads(&disk, 0, 1, "in the copy").await?;
        // What it promotes does not lift it over what is not its own.
        put(&disk, 1, 4).await?;
        promote(&disk, 1).await?;
        disk.close().await.map_err(chain)?;
        drop(disk);
        let copy = both.open(3).await?;
        reads(&copy, 0, 2, "in the original").await
    })
}

/// Of a unit that was promoted twice, the copies of the second promotion go to another disk; then a copy of the image is
/// put back that knows them.
pub(crate) fn an_earlier_promotion_does_not_come_back() -> Trial {
    let both = Both::new();
    both.world.run(async {
        let disk = both.open(1).await?;
        for unit in [1, 2, 3, 0] {
            put(&disk, unit, 1).await?;
            promote(&disk, unit).await?;
        }
        // The next promotion takes the first slot that is free, which is not the one that the unit had.
        put(&disk, 0, 2).await?;
        ensure(disk.demote(&[unit_span(1)]).await.map_err(chain)?.units == 1, "it was there")?;
        promote(&disk, 0).await?;
        disk.close().await.map_err(chain)?;
        drop(disk);
        let copy = both.copy_of(&both.image);
        // In one process: the disk gives its slots back, and the other one takes three of them.
        let medium = both.medium(2).await.map_err(chain)?;
        let open = |image: SharedStorage| {
            let fast = Some(medium.clone());
            let options = OpenOptions { journal_key: Some(1), fast, ..OpenOptions::default() };
            Native::open(image, both.setup.below(), options)
        };
        let disk = open(both.image.clone()).await.map_err(chain)?;
        for unit in 0..4 {
            put(&disk, unit, 3).await?;
        }
        disk.demote(&[]).await.map_err(chain)?;
        let other = open(both.another(&medium).await?).await.map_err(chain)?;
        for unit in 0..3 {
            put(&other, unit, 0xaa).await?;
            promote(&other, unit).await?;
        }
        disk.close().await.map_err(chain)?;
        drop(disk);
        other.close().await.map_err(chain)?;
        drop((other, medium));
        let disk = both.open_on(copy, Some(both.fast.clone()), 5).await?;
        reads(&disk, 0, 2, "in the copy").await
    })
}

/// A sector of entries is damaged after a unit was promoted twice.
pub(crate) fn damaged_entries_do_not_bring_an_earlier_promotion_back() -> Trial {
    let both = Both::new();
    both.world.run(async {
        let disk = both.open(1).await?;
        // Sixteen entries lie in a sector: the unit is first promoted to another one.
        put(&disk, 0, 1).await?;
        let mut others = Vec::new();
        for unit in 1..UNITS {
            put(&disk, unit, 7).await?;
            promote(&disk, unit).await?;
            others.push(unit_span(unit));
        }
        promote(&disk, 0).await?;
        disk.demote(&others).await.map_err(chain)?;
        put(&disk, 0, 2).await?;
        promote(&disk, 0).await?;
        disk.close().await.map_err(chain)?;
        drop(disk);
        for slot in 0..UNITS {
            let mut content = both.fast.content();
            content.write(ImageOffset::new((520 << 10) + slot * 32), &[0x5A; 32]);
            let damaged = Drive::from_content(&both.world, content, DriveOptions::default());
            let disk = both.open_on(both.copy_of(&both.image), Some(damaged), 2).await?;
            reads(&disk, 0, 2, &format!("with the entry of slot {slot} damaged")).await?;
        }
        let disk = both.open_on(both.image.clone(), Some(both.damage_entries()), 3).await?;
        reads(&disk, 0, 2, "with a damaged sector of entries").await
    })
}

/// What the medium says of a unit cannot be read in one opening, and can in the next.
pub(crate) fn a_unit_that_was_written_while_its_entry_was_lost_stays_written() -> Trial {
    for how in ["written", "zeroed", "discarded", "taken back"] {
        let both = Both::new();
        both.world.run(async {
            let disk = both.open(1).await?;
            put(&disk, 0, 1).await?;
            promote(&disk, 0).await?;
            disk.close().await.map_err(chain)?;
            drop(disk);
            let disk = both.open_on(both.image.clone(), Some(both.damage_entries()), 2).await?;
            ensure(disk.facts().units == 0, "nothing is known of it")?;
            reads(&disk, 0, 1, "from the image").await?;
            let expected = match how {
                "written" => {
                    put(&disk, 0, 2).await?;
                    2
                }
                "zeroed" => {
                    let how = vellum_core::ZeroFlags::default();
                    disk.write_zeroes(unit_span(0), how).await.map_err(chain)?;
                    0
                }
                "discarded" => {
                    disk.discard(unit_span(0), WriteFlags::default()).await.map_err(chain)?;
                    get(&disk, 0).await?
                }
                _ => {
                    ensure(
                        disk.demote(&[unit_span(0)]).await.map_err(chain)?.units == 0,
                        "it was not there",
                    )?;
                    1
                }
            };
            disk.close().await.map_err(chain)?;
            drop(disk);
            let disk = both.open(3).await?;
            reads(&disk, 0, expected, &format!("after it was {how}")).await?;
            ensure(disk.facts().units == 0, format!("the copy counts after it was {how}"))?;
            promote(&disk, 0).await?;
            reads(&disk, 0, expected, "from the new copy").await
        })?;
    }
    Ok(())
}

/// The row of a disk that was detached is another disk's now, of which entries are lost.
pub(crate) fn another_disk_does_not_read_what_its_row_had_before() -> Trial {
    let both = Both::new();
    both.world.run(async {
        let disk = both.open(1).await?;
        put(&disk, 0, 0xaa).await?;
        promote(&disk, 0).await?;
        disk.close().await.map_err(chain)?;
        drop(disk);
        let before = both.fast.content();
        let medium = both.medium(2).await.map_err(chain)?;
        ensure(medium.forget([7; 16], false).await.map_err(chain)?, "it had a row")?;
        let other = both.another(&medium).await?;
        drop(medium);
        let disk = both.open_on(other.clone(), Some(both.fast.clone()), 3).await?;
        // Another unit gets the slot that the first one of the other disk had.
        for (unit, value) in [(1, 9), (0, 1)] {
            put(&disk, unit, value).await?;
            promote(&disk, unit).await?;
        }
        disk.close().await.map_err(chain)?;
        drop(disk);
        // The drive forgets the writes of all entries since.
        let mut content = both.fast.content();
        let mut entries = vec![0; 512];
        before.read(ImageOffset::new(520 << 10), &mut entries);
        content.write(ImageOffset::new(520 << 10), &entries);
        let lost = Drive::from_content(&both.world, content, DriveOptions::default());
        let disk = both.open_on(other, Some(lost), 4).await?;
        reads(&disk, 0, 1, "in the disk that has the row now").await
    })
}

/// The medium is restored from an old copy, and then another disk promotes as much as was forgotten.
pub(crate) fn what_another_disk_promotes_brings_no_old_copies_back() -> Trial {
    let both = Both::new();
    both.world.run(async {
        let disk = both.open(1).await?;
        put(&disk, 0, 1).await?;
        promote(&disk, 0).await?;
        let old = both.copy_of(&both.fast);
        put(&disk, 0, 2).await?;
        promote(&disk, 0).await?;
        disk.close().await.map_err(chain)?;
        drop(disk);
        let medium = FastMedium::open(old.clone(), Random::from_seed(2)).await.map_err(chain)?;
        let other = both.another(&medium).await?;
        drop(medium);
        let other = both.open_on(other, Some(old.clone()), 3).await?;
        for unit in 0..4 {
            put(&other, unit, 0xaa).await?;
            promote(&other, unit).await?;
        }
        other.close().await.map_err(chain)?;
        drop(other);
        let disk = both.open_on(both.image.clone(), Some(old), 4).await?;
        reads(&disk, 0, 2, "with the old medium").await
    })
}

/// A crash falls between the bytes of a slot and its entry. An image that was put back from a copy still has the bit
/// of what the slot had before.
pub(crate) fn a_slot_that_is_written_again_has_no_entry_meanwhile() -> Trial {
    let both = Both::new();
    both.world.run(async {
        let disk = both.open(1).await?;
        put(&disk, 0, 1).await?;
        promote(&disk, 0).await?;
        let copy = both.copy_of(&both.image);
        put(&disk, 0, 2).await?;
        for unit in 1..UNITS {
            put(&disk, unit, 9).await?;
        }
        let before = both.fast.log().crash_positions().len();
        for unit in 1..UNITS {
            promote(&disk, unit).await?;
        }
        drop(disk);
        let log = both.fast.log();
        let positions = log.crash_positions();
        ensure(positions.len() > before, "the medium was written")?;
        for position in &positions[before - 1..] {
            let crash = log.crash(CrashKind::PowerCut, *position);
            let pending = crash.pending().len();
            // All of it, nothing, and each change alone.
            for kept in 0..pending + 2 {
                let fate = |index: usize| {
                    if kept == pending || kept == index { Fate::Kept } else { Fate::Lost }
                };
                let cut = Drive::from_content(&both.world, crash.image(fate), DriveOptions::default());
                let disk = both.open_on(both.copy_of(&copy), Some(cut), 3).await?;
                reads(&disk, 0, 1, &format!("in the copy, after {position:?} of the medium, {kept}")).await?;
            }
        }
        Ok(())
    })
}
