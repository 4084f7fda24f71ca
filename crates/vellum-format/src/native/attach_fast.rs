//! Which fast medium a closed image names.
//!
//! ```text
//!   attach   [the medium has a row] ► superblock: medium, region for bits, no number ── flush ► the other copy ── flush
//!   detach   superblock without them ── flush: commit point ► the other copy ── flush      [► the row is taken away]
//! ```
//!
//! 1. Attaching makes nothing count: the first promotion of an opening with the medium clears the bits and begins a
//!    session.
//! 2. Both copies of the superblock get the region, because in an older one its pages belong to the table.

use vellum_core::{Context, Error, Result, SharedStorage};

use super::open::finish;
use super::snapshots::snapshots;
use super::superblock::Superblocks;
use crate::fast::FastId;

/// Names a fast medium in the image.
pub(super) async fn attach_fast(image: &SharedStorage, id: FastId, name: &str) -> Result<()> {
    let attached = async {
        let mut superblocks = Superblocks::read(&**image).await?;
        if superblocks.superblock.is_encrypted() {
            return Err(Error::unsupported(
                "the image is encrypted, and the fast medium would have copies of its data as they are: keep the image \
                 itself on fast storage, or copy it into one that is not encrypted (`vellum convert`)",
            ));
        }
        if superblocks.superblock.has_moved {
            // Nothing but the name can be another.
            if superblocks.superblock.needs_replay() {
                return Err(superblocks.superblock.replay_first(image.name()));
            }
            if superblocks.superblock.fast().is_none_or(|named| named.id != id) {
                superblocks.superblock.may_do_without_fast()?;
            }
        } else {
            finish(image).await?;
            superblocks = Superblocks::read(&**image).await?;
        }
        let largest = match superblocks.superblock.has_snapshots() {
            true => snapshots(image).await?.into_iter().map(|one| one.size).max().unwrap_or(0),
            false => 0,
        };
        superblocks.superblock.attach_fast(id, name, largest)?;
        write_both(&mut superblocks, image).await
    };
    attached.await.context(|| format!("can't attach {} to a fast medium", image.name()))
}

/// Names none any more. Whether it did.
pub(super) async fn detach_fast(image: &SharedStorage) -> Result<bool> {
    let detached = async {
        finish(image).await?;
        let mut superblocks = Superblocks::read(&**image).await?;
        let did = superblocks.superblock.detach_fast()?;
        if did {
            write_both(&mut superblocks, image).await?;
        }
        Ok::<_, Error>(did)
    };
    detached.await.context(|| format!("can't detach {} from its fast medium", image.name()))
}

async fn write_both(superblocks: &mut Superblocks, image: &SharedStorage) -> Result<()> {
    for _ in 0..2 {
        superblocks.write(&**image).await?;
        image.flush().await?; // commit point, the first time
    }
    Ok(())
}
