//! The images that the disks of a process stand on, each opened once.
//!
//! ```text
//!   path of the first image below, its format as stated, gate, way of opening, memory
//!        └─> the open images, while any disk uses them
//! ```
//!
//! 1. Disks share what is below them when the key is equal and when the paths still lead to the open files: a
//!    template that was replaced is opened anew.
//! 2. Each disk's own reference is checked by its gate. The references below are checked when the images are
//!    opened, by an equal gate.
//! 3. Of several disks that want the same images at the same time one opens them, and the others wait. If
//!    that fails, the next one tries again.

use std::collections::HashMap;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, Weak};

use vellum_core::{Result, lock};
use vellum_format::luks::Secrets;
use vellum_format::{FormatKind, SnapshotKey};

use super::below::{Below, Stand};
use super::forks::{Forks, Parent, Turn};
use super::way_down::{Step, WayDown};
use super::{ChainOptions, Gate, Opener};

/// What decides how the images below a disk are opened.
#[derive(PartialEq, Eq, Hash)]
struct Key {
    canonical: PathBuf,
    /// As the image above states it.
    format: Option<FormatKind>,
    /// Which of its snapshots.
    snapshot: Option<SnapshotKey>,
    /// As the name suggests it, under which the image above knows it: what is not stated is held against that.
    suggested: Option<FormatKind>,
    gate: Gate,
    way: u64,
    mapping_bytes_max: Option<u64>,
    secrets: SameSecrets,
    /// Whether a flash cache is over them.
    is_flashed: bool,
}

/// The secrets that images were opened with, compared by which they are and not by what they say.
struct SameSecrets(Arc<Secrets>);

impl PartialEq for SameSecrets {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || (self.0.is_empty() && other.0.is_empty())
    }
}

impl Eq for SameSecrets {}

impl Hash for SameSecrets {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.is_empty().hash(state);
    }
}

/// What is open; held while it is being opened.
type Slot = async_lock::Mutex<Weak<Below>>;

/// Images that are shared by disks. A disk shares those below it with all others that were given the same
/// `Templates` ([`ChainOptions::templates`]).
#[derive(Default)]
pub struct Templates {
    slots: Mutex<HashMap<Key, Arc<Slot>>>,
    forks: Forks,
}

/// Nothing of an image's snapshots is read while this is there.
#[must_use]
pub struct HeldForks(#[expect(dead_code, reason = "it is held")] Turn);

impl fmt::Debug for Templates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Templates").field("open", &lock(&self.slots).len()).finish()
    }
}

impl Templates {
    /// The image at this canonical path, of which snapshots may be below disks of the process.
    pub(super) fn parent(&self, canonical: &Path) -> Arc<Parent> {
        self.forks.parent(canonical)
    }

    /// To be called after a chain with these templates was closed and dropped, or could not be opened: disks that
    /// stand on snapshots of its top image read these from the file from now on.
    pub async fn left(&self, opener: &dyn Opener, canonical: &Path) {
        self.forks.parent(canonical).detach().await.read_file(opener).await;
    }

    /// Disks that stand on snapshots of the image at this canonical path have nothing of it open until
    /// [`left`](Self::left) is called, after what this returns was dropped.
    pub async fn hold(&self, canonical: &Path) -> HeldForks {
        HeldForks(self.forks.parent(canonical).detach().await)
    }

    /// A place on the image of this step and all below it, which are opened if they are not.
    pub(super) async fn stand(
        &self,
        way: &mut WayDown<'_>,
        step: Step,
        options: &ChainOptions,
    ) -> Result<Stand> {
        let slot = self.slot(Key {
            canonical: step.canonical.clone(),
            format: step.format,
            snapshot: step.snapshot.clone(),
            suggested: FormatKind::of_name(&step.path),
            gate: options.gate.clone(),
            way: way.opener().way(),
            mapping_bytes_max: options.mapping_bytes_max,
            secrets: SameSecrets(options.secrets.clone()),
            is_flashed: options.is_flashed(),
        });
        // Waits only while they are being opened.
        let known = slot.lock().await.upgrade();
        if let Some(stand) = stand_on(known, way, &step).await? {
            return Ok(stand);
        }
        let mut open = slot.lock().await;
        // Another disk may have opened them meanwhile.
        if let Some(stand) = stand_on(open.upgrade(), way, &step).await? {
            return Ok(stand);
        }
        // The memory is divided as if the mapping of the image above were large: it differs from disk to disk.
        let below = Below::open(way, step, options, u64::MAX).await?;
        *open = Arc::downgrade(&below);
        Ok(Stand::on(below))
    }

    fn slot(&self, key: Key) -> Arc<Slot> {
        let mut slots = lock(&self.slots);
        if let Some(slot) = slots.get(&key) {
            return slot.clone();
        }
        // Those that no disk stands on, or is about to, are of no use.
        slots.retain(|_, slot| {
            Arc::strong_count(slot) > 1 || slot.try_lock().is_none_or(|open| open.strong_count() > 0)
        });
        slots.entry(key).or_default().clone()
    }
}

/// A place on images that are open, if they are what is found at this step.
async fn stand_on(below: Option<Arc<Below>>, way: &mut WayDown<'_>, step: &Step) -> Result<Option<Stand>> {
    let Some(below) = below else { return Ok(None) };
    if !below.are_found_at(&step.path, way.opener()).await || !below.join() {
        return Ok(None);
    }
    let stand = Stand::on(below.clone());
    way.join(below.canonicals()[1..].iter())?;
    Ok(Some(stand))
}
