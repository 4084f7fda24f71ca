//! The crash explorer for changes of a closed image: a crash everywhere in the change, and every image that
//! it can leave is opened, or given to another program, and judged.
//!
//! ```text
//!   image ──change──▶ log of host events
//!                       │ at every position, power cuts and kills
//!                       ▼
//!                  images, each once ──▶ each way of going on ──▶ judged: as it was before, or as it is afterwards
//!                                                                 now and then: a crash in there, and judged again
//! ```
//!
//! 1. When the change has returned, its result is final.
//! 2. A failing state has a name from which it can be made again: position, kind, number, way, and where the
//!    way was interrupted.

use std::panic::{AssertUnwindSafe, catch_unwind};

use futures_lite::future::block_on;
use vellum_core::{LocalFuture, Result as CoreResult, SharedStorage};

use super::Medium;
use super::states::{Depth, Images, each_state};
use crate::change::Granule;
use crate::content::Content;
use crate::crash::CrashKind;
use crate::mix::{DigestSet, mix};
use crate::world::Position;

/// What is done to a closed image in several steps.
pub trait Offline: Sync {
    /// What it is called.
    fn name(&self) -> String;

    /// The image at the beginning, durable and closed.
    fn image(&self) -> Content;

    /// Does it.
    fn change(&self, image: SharedStorage) -> LocalFuture<'_, CoreResult<()>>;

    /// How many ways there are to continue.
    fn ways(&self) -> usize;

    /// Goes on with an image that may be left half changed, in one of the ways.
    fn go_on(&self, image: SharedStorage, way: usize) -> LocalFuture<'_, CoreResult<()>>;

    /// Opens the image and judges it: returns a sentence about what is wrong. `is_done` says that the change
    /// had returned, `way` which way has returned; without one perhaps any of them was interrupted.
    fn judge(
        &self,
        image: SharedStorage,
        way: Option<usize>,
        is_done: bool,
    ) -> LocalFuture<'_, Result<(), String>>;
}

/// How much is looked at.
#[derive(Debug, Clone)]
pub struct Care {
    /// The images of one crash.
    pub depth: Depth,
    /// One in this many images is judged.
    pub one_in: u64,
    /// One in this many of these is crashed again while it is judged.
    pub nested_one_in: u64,
}

/// What was looked at.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Looked {
    /// Different images.
    pub states: u64,
    /// How often one was judged.
    pub judged: u64,
    /// As above, for images that a crash left while one was judged.
    pub nested: u64,
}

impl std::fmt::Display for Looked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} states, {} judged, {} nested, 0 violations", self.states, self.judged, self.nested)
    }
}

/// Judges every state that a crash in the change can leave.
///
/// # Errors
/// The first one that is not as it should be, by name.
pub fn explore_offline(subject: &dyn Offline, care: &Care) -> Result<Looked, String> {
    let medium = Medium::recording(subject.image(), Granule::Sector);
    block_on(subject.change(medium.clone()))
        .map_err(|error| format!("{}: nothing failed, and yet: {}", subject.name(), error.chain()))?;
    let log = medium.log().expect("it records");
    let mut looked = Looked::default();
    let mut seen = DigestSet::default();
    let positions = log.crash_positions();
    let last = positions.last().copied().unwrap_or(Position::START);
    for position in positions {
        for kind in [CrashKind::PowerCut, CrashKind::ProcessKill] {
            let point = log.crash(kind, position);
            let mut images = Images::of(&point);
            let mut recipes = DigestSet::default();
            each_state(&point, &care.depth, |state, fates| {
                if !recipes.insert(images.recipe(fates)) {
                    return Ok(());
                }
                let image = images.image(fates);
                let is_done = position == last;
                let digest = mix(image.digest(), u64::from(is_done));
                if !seen.insert(digest) || !(is_done || mix(digest, 5).is_multiple_of(care.one_in)) {
                    return Ok(());
                }
                looked.states += 1;
                let name =
                    || format!("{}, {kind:?} at {position}, state {state}, done {is_done}", subject.name());
                one_state(subject, care, &image, is_done, &mut looked)
                    .map_err(|what| format!("{}: {what}", name()))
            })?;
        }
    }
    Ok(looked)
}

fn one_state(
    subject: &dyn Offline,
    care: &Care,
    image: &Content,
    is_done: bool,
    looked: &mut Looked,
) -> Result<(), String> {
    for way in 0..subject.ways() {
        looked.judged += 1;
        let is_nested = mix(image.digest(), 9 + way as u64).is_multiple_of(care.nested_one_in);
        let medium = match is_nested {
            true => Medium::recording(image.clone(), Granule::Sector),
            false => Medium::new(image.clone()),
        };
        let gone_on =
            without_panic(|| block_on(subject.go_on(medium.clone(), way)).map_err(|error| error.chain()));
        gone_on.map_err(|what| format!("way {way}: {what}"))?;
        let judge = |content: Content, way| {
            without_panic(|| block_on(subject.judge(Medium::new(content), way, is_done)))
        };
        judge(medium.content(), Some(way)).map_err(|what| format!("way {way}: {what}"))?;
        let Some(log) = medium.log() else { continue };
        let (mut recipes, mut seen) = (DigestSet::default(), DigestSet::default());
        for at in log.crash_positions() {
            let point = log.crash(CrashKind::PowerCut, at);
            let mut images = Images::of(&point);
            each_state(&point, &Depth::NESTED, |number, fates| {
                if !recipes.insert(images.recipe(fates)) {
                    return Ok(());
                }
                let image = images.image(fates);
                if !seen.insert(image.digest()) {
                    return Ok(());
                }
                looked.nested += 1;
                judge(image, None).map_err(|what| format!("way {way}, cut off at {at}, {number}: {what}"))
            })?;
        }
    }
    Ok(())
}

fn without_panic(work: impl FnOnce() -> Result<(), String>) -> Result<(), String> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        Err(format!("panic: {}", text.or(panic.downcast_ref().copied()).unwrap_or("of another kind")))
    })
}
