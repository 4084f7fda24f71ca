//! The images that one crash can leave, in an order that is always the same, so that a number names one of them.

use vellum_core::Random;

use crate::content::Content;
use crate::crash::{CrashPoint, Fate};

/// How far the images of one crash are gone through.
#[derive(Debug, Clone)]
pub struct Depth {
    /// All subsets of up to this many changes; beyond, the corners.
    pub subsets_of: usize,
    /// So many images drawn by chance, where the subsets are not all there, or where changes can be torn.
    pub sampled: usize,
    /// A change of up to this many units is torn everywhere, a longer one in this many places.
    pub tears_each: u64,
}

impl Depth {
    /// For the crash that is looked for.
    pub const FULL: Self = Self { subsets_of: 12, sampled: 24, tears_each: 8 };
    /// For a crash within a recovery.
    pub const NESTED: Self = Self { subsets_of: 5, sampled: 6, tears_each: 2 };
}

/// Calls `visit` with each image and its number, until it says stop; images may repeat.
pub(crate) fn each_state<E>(
    point: &CrashPoint,
    depth: &Depth,
    mut visit: impl FnMut(usize, Content) -> Result<(), E>,
) -> Result<(), E> {
    let mut number = 0;
    let mut next = |content: Content| {
        number += 1;
        visit(number - 1, content)
    };
    let count = point.pending().len();
    let all_are_there = count <= depth.subsets_of;
    if all_are_there {
        for (_, content) in point.subsets().expect("so few changes have all their subsets") {
            next(content)?;
        }
    } else {
        for content in point.corners() {
            next(content)?;
        }
    }
    let mut can_tear = false;
    for (torn, pending) in point.pending().iter().enumerate() {
        let units = pending.units();
        if units < 2 {
            continue;
        }
        can_tear = true;
        // Beside the torn change: nothing, everything, and everything that came before.
        for kept in [0, u64::MAX, (1u64 << torn.min(63)) - 1] {
            if units <= depth.tears_each {
                for content in point.tears(torn, kept) {
                    next(content)?;
                }
            } else {
                let step = units.div_ceil(depth.tears_each + 1);
                for at in (1..units).step_by(usize::try_from(step).expect("small")) {
                    for tear in [crate::Torn::First(at), crate::Torn::AllBut(at)] {
                        let content = point.image(|index| match index {
                            _ if index == torn => Fate::Torn(tear.clone()),
                            _ if index < 64 && kept & (1 << index) != 0 => Fate::Kept,
                            _ => Fate::Lost,
                        });
                        next(content)?;
                    }
                }
            }
        }
    }
    if !all_are_there || can_tear {
        let mut random = Random::from_seed(0x5EED ^ count as u64);
        for _ in 0..depth.sampled {
            next(point.random_image(&mut random))?;
        }
    }
    Ok(())
}
