//! Flash and one image beside it, in one world: a program on both, and what their crashes leave.
//!
//! ```text
//!   program ──► logs of flash and of the image
//!                 │ at a position: power cut or kill of flash × power cut or kill of the image
//!                 ▼
//!               some images of each, which the caller judges
//! ```

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use vellum_core::{Random, SharedStorage};
use vellum_sim::{Content, CrashKind, CrashPoint, Delay, Drive, DriveOptions, Position, World};

/// At most this many positions of a program.
const POSITIONS_MAX: usize = 40;

/// The two, and the world that they are in.
pub struct Pair {
    pub world: World,
    flash: Arc<Drive>,
    image: Arc<Drive>,
    /// Tasks run beside each other, and drives take their time.
    pub has_tasks: bool,
}

impl Pair {
    pub fn new(flash: &Content, image: &Content, seed: u64, random: &mut Random) -> Self {
        let has_tasks = random.one_in(2);
        let world = if has_tasks { World::shuffled(seed) } else { World::new(seed) };
        let delay = match has_tasks {
            true => Delay::between(Duration::from_micros(20)..=Duration::from_micros(300)),
            false => Delay::none(),
        };
        let drive = |content: &Content| {
            let options = DriveOptions { delay: delay.clone(), ..DriveOptions::default() };
            Drive::from_content(&world, content.clone(), options)
        };
        let (flash, image) = (drive(flash), drive(image));
        Self { world, flash, image, has_tasks }
    }

    pub fn storages(&self) -> (SharedStorage, SharedStorage) {
        (self.flash.clone(), self.image.clone())
    }

    /// Has some of what crashes leave judged: flash, the image, and a number that is drawn.
    pub fn judge(
        &self,
        seed: u64,
        mut judge: impl FnMut(&Content, &Content, u64) -> Result<(), String>,
    ) -> Result<(), String> {
        let mut random = Random::from_seed(seed ^ 0xC4A5);
        let (of_flash, of_image) = (self.flash.log(), self.image.log());
        let mut positions: Vec<Position> = of_flash.crash_positions();
        positions.extend(of_image.crash_positions());
        positions.retain(|position| *position <= self.world.position());
        positions.sort_unstable();
        positions.dedup();
        while positions.len() > POSITIONS_MAX {
            positions.remove(random.index(positions.len()));
        }
        let kinds = [CrashKind::PowerCut, CrashKind::ProcessKill];
        for position in positions {
            for (flash_kind, image_kind) in
                kinds.into_iter().flat_map(|kind| kinds.map(|other| (kind, other)))
            {
                let flashes = images_of(&of_flash.crash(flash_kind, position), &mut random, 4);
                let images = images_of(&of_image.crash(image_kind, position), &mut random, 3);
                for flash in &flashes {
                    let image = random.pick(&images);
                    judge(flash, image, random.any()).map_err(|what| {
                        format!("crash at {position:?} ({flash_kind:?} of flash, {image_kind:?} of the image): {what}")
                    })?;
                }
            }
        }
        Ok(())
    }
}

/// Some of what a crash can leave.
fn images_of(point: &CrashPoint, random: &mut Random, most: usize) -> Vec<Content> {
    let count = point.pending().len();
    let mut images: Vec<Content> = match count {
        0..=2 => point.subsets().expect("few").map(|(_, content)| content).collect(),
        _ => {
            let some = (0..4).map(|_| point.random_image(random)).collect::<Vec<_>>();
            [point.image_of(0), point.image_of(u64::MAX)].into_iter().chain(some).collect()
        }
    };
    let mut seen = HashSet::new();
    images.retain(|image| seen.insert(image.digest()));
    images.truncate(most);
    images
}
