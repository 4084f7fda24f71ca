//! One image and one fast medium, and what may happen to either: it is absent, a copy, old, failing. Each trial returns
//! what went wrong, so that mistakes in the engine can be looked for with the same ones.

use std::sync::Arc;

use vellum_core::{
    Buffer, Disk, GuestOffset, GuestSpan, Random, Result as CoreResult, SharedStorage, WriteFlags,
};
use vellum_format::FormatKind;
use vellum_format::fast::{FastId, FastMedium, NewRow, Promoted, Promotion, Reason, Tiers, create};
use vellum_format::native::{Native, OpenOptions};
use vellum_sim::{Content, Drive, DriveOptions, FaultPlan, World};

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

    /// A copy of what a drive has now.
    fn copy_of(&self, drive: &Drive) -> Arc<Drive> {
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
