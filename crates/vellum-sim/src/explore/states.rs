//! The images that one crash can leave, in a fixed order, so that a number names one of them.
//!
//! Crashes at neighbouring positions mostly leave the same images. So a state is first given by the fates of
//! the changes. From these follows a *recipe*, a number that is equal for equal images, and only an image
//! that is new is assembled ([`Images`]).

use vellum_core::Random;

use crate::change::Torn;
use crate::content::Content;
use crate::crash::{CrashPoint, Fate};
use crate::mix::mix;

/// How thoroughly the images of one crash are enumerated.
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
    /// For the crash that is being explored.
    pub const FULL: Self = Self { subsets_of: 12, sampled: 24, tears_each: 8 };
    /// For a crash within a recovery.
    pub const NESTED: Self = Self { subsets_of: 5, sampled: 6, tears_each: 2 };
}

/// Puts the images of one crash together.
pub(crate) struct Images<'a> {
    point: &'a CrashPoint,
    /// Stands for what is sure, and for each change.
    digests: (u64, Vec<u64>),
    /// The fates of the previous image, and the content after the first n of them.
    before: Vec<Fate>,
    made: Vec<Content>,
}

impl<'a> Images<'a> {
    pub(crate) fn of(point: &'a CrashPoint) -> Self {
        Self { point, digests: point.digests(), before: Vec::new(), made: vec![point.base().clone()] }
    }

    /// The same number for the same image, whichever crash leaves it: the certain content, and the remainders
    /// of the changes, in order. (Two recipes may nevertheless produce one image.)
    pub(crate) fn recipe(&self, fates: &[Fate]) -> u64 {
        let (base, changes) = &self.digests;
        let all = self.point.pending().iter().zip(changes).zip(fates);
        all.fold(*base, |recipe, ((pending, change), fate)| {
            let units = pending.units();
            let whole = u64::MAX >> 64u64.saturating_sub(units);
            let kept = match fate {
                Fate::Lost => 0,
                Fate::Kept => whole,
                Fate::Torn(torn) => torn.kept_of(units),
            };
            if kept == 0 { recipe } else { mix(recipe, mix(*change, kept)) }
        })
    }

    /// The image in which each change has its fate. Neighbours share the work.
    pub(crate) fn image(&mut self, fates: &[Fate]) -> Content {
        let common = self.before.iter().zip(fates).take_while(|(before, fate)| before == fate).count();
        self.made.truncate(common + 1);
        self.before.clear();
        self.before.extend_from_slice(fates);
        let mut content = self.made[self.made.len() - 1].clone();
        for (index, fate) in fates.iter().enumerate().skip(self.made.len() - 1) {
            self.point.apply(index, fate, &mut content);
            self.made.push(content.clone());
        }
        content.seal();
        content
    }
}

/// Calls `visit` with the fates of each image and its number, until it returns stop; images may repeat.
pub(crate) fn each_state<E>(
    point: &CrashPoint,
    depth: &Depth,
    mut visit: impl FnMut(usize, &[Fate]) -> Result<(), E>,
) -> Result<(), E> {
    let mut number = 0;
    let mut next = |fates: &[Fate]| {
        number += 1;
        visit(number - 1, fates)
    };
    let count = point.pending().len();
    let mut fates = vec![Fate::Lost; count];
    let mut each_of = |fate_of: &dyn Fn(usize) -> Fate| {
        fates.iter_mut().enumerate().for_each(|(index, fate)| *fate = fate_of(index));
        next(&fates)
    };
    let kept_if = |is_kept: bool| if is_kept { Fate::Kept } else { Fate::Lost };
    let all_are_there = count <= depth.subsets_of;
    if all_are_there {
        // The last change goes to and fro the most, so that neighbours share what comes before.
        for kept in 0u64..1 << count {
            each_of(&|index| kept_if(kept >> (count - 1 - index) & 1 == 1))?;
        }
    } else {
        for end in 0..=count {
            each_of(&|index| kept_if(index < end))?;
        }
        for lost in 0..count {
            each_of(&|index| kept_if(index != lost))?;
        }
        for kept in 0..count {
            each_of(&|index| kept_if(index == kept))?;
        }
    }
    let mut can_tear = false;
    for (torn, pending) in point.pending().iter().enumerate() {
        if pending.units() < 2 {
            continue;
        }
        can_tear = true;
        let tears = tears(pending.units(), depth.tears_each);
        // Beside the torn change: nothing, everything, and everything that came before.
        for kept in [0, u64::MAX, (1u64 << torn.min(63)) - 1] {
            for tear in &tears {
                each_of(&|index| match index {
                    _ if index == torn => Fate::Torn(tear.clone()),
                    _ => kept_if(index < 64 && kept & (1 << index) != 0),
                })?;
            }
        }
    }
    if !all_are_there || can_tear {
        let mut random = Random::from_seed(0x5EED ^ count as u64);
        for _ in 0..depth.sampled {
            next(&point.random_fates(&mut random))?;
        }
    }
    Ok(())
}

/// How a change of this many units is torn.
fn tears(units: u64, tears_each: u64) -> Vec<Torn> {
    if units <= tears_each.min(8) {
        return (0..1 << units).map(Torn::These).collect();
    }
    let step = if units <= tears_each { 1 } else { units.div_ceil(tears_each + 1) };
    let places = (1..units).step_by(usize::try_from(step).expect("small"));
    places.flat_map(|at| [Torn::First(at), Torn::AllBut(at)]).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use vellum_core::{Buffer, ImageOffset};

    use super::*;
    use crate::crash::CrashKind;
    use crate::explore::Medium;
    use crate::{Granule, Position};
    use vellum_core::Storage as _;

    /// Five changes, of which some meet, one is long and one only makes the medium longer.
    fn point() -> CrashPoint {
        let medium = Medium::recording(Content::of(&[1; 8192]), Granule::Sector);
        futures_lite::future::block_on(async {
            for (at, len, byte) in [(0, 1024, 2), (512, 2048, 3), (4096, 65_536, 4), (100, 700, 5)] {
                medium.write(ImageOffset::new(at), Buffer::copy_of(&vec![byte; len])).await.unwrap();
            }
        });
        let log = medium.log().unwrap();
        let end: Position = *log.crash_positions().last().unwrap();
        log.crash(CrashKind::PowerCut, end)
    }

    #[test]
    fn an_image_is_what_the_fates_say_and_its_recipe_stands_for_it() {
        let point = point();
        let mut images = Images::of(&point);
        let mut known = HashMap::new();
        let (mut states, mut again) = (0, 0);
        let outcome: Result<(), ()> = each_state(&point, &Depth::FULL, |number, fates| {
            assert_eq!(number, states);
            states += 1;
            let image = images.image(fates);
            assert_eq!(image, point.image(|index| fates[index].clone()), "{fates:?}");
            again += usize::from(known.contains_key(&images.recipe(fates)));
            assert_eq!(*known.entry(images.recipe(fates)).or_insert(image.digest()), image.digest());
            Ok(())
        });
        outcome.unwrap();
        assert!(again > 20 && known.len() > 100, "{states} states, {again} again, {} recipes", known.len());
    }
}
