//! A disk that is stopped, let go on, limited, and made larger while it is served.
//!
//! To make it larger nobody may use it: requests wait at the valve while the image is closed, changed and opened again.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_lock::RwLockWriteGuard;
use vellum_core::{BlockSize, Disk, Error, ErrorKind, Result, SharedDisk};
use vellum_io::clock;
use vellum_layer::Chain;
use vellum_layer::valve::{Hold, Settings};

use super::{IS_READ, Served, behind_valve};

/// A size that is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wish {
    /// So many bytes.
    Size(u64),
    /// So many more.
    More(u64),
}

impl Wish {
    /// In bytes, for a disk that has `before`.
    fn bytes(self, before: u64) -> Result<u64> {
        let size = match self {
            Self::Size(size) => Some(size),
            Self::More(more) => before.checked_add(more),
        };
        // The last sector is a whole one.
        let size = size.filter(|size| *size <= BlockSize::SECTOR.round_down(u64::MAX));
        let size = size.ok_or_else(|| {
            Error::invalid(format!("the disk has {before} bytes, and none can have so many more"))
        })?;
        Ok(BlockSize::SECTOR.round_up(size))
    }
}

/// How often, and how long after one another, it is tried to have a chain alone: who only looks is gone by then.
const ALONE_TRIES: usize = 20;
const ALONE_EVERY: Duration = Duration::from_millis(5);

impl Served {
    pub(super) fn in_use(&self, why: &str) -> Error {
        Error::new(ErrorKind::Locked, format!("{}: {why}", self.path.display()))
    }

    /// Pauses or resizes it, as long as this is held.
    fn steer(&self) -> Result<async_lock::MutexGuard<'_, ()>> {
        self.steering.try_lock().ok_or_else(|| self.in_use("it is being paused or resized"))
    }

    /// The chain, for one alone. Who makes or deletes a snapshot is not waited for: that may take long.
    pub(super) async fn alone(&self) -> Result<RwLockWriteGuard<'_, Chain>> {
        for _ in 0..ALONE_TRIES {
            if let Some(chain) = self.chain.try_write() {
                return Ok(chain);
            }
            clock().sleep(ALONE_EVERY).await;
        }
        let why = "a snapshot of it is being made, deleted or gone back to, or it is being paused or resized; try again when \
                   that is done";
        Err(self.in_use(why))
    }

    /// Lets no new requests go on. Returns when none is under way and what was answered is durable.
    pub(crate) async fn pause(&self) -> Result<()> {
        let _steering = self.steer()?;
        // Whoever makes or deletes a snapshot changes the image, and no request of a guest tells of it.
        let _alone = self.alone().await?;
        self.valve.pause().await?;
        tracing::warn!("{} is paused: its requests wait until it is resumed", self.path.display());
        Ok(())
    }

    /// Lets requests go on; true if they had been stopped.
    pub(crate) fn resume(&self) -> bool {
        let was_stopped = self.valve.resume();
        if was_stopped {
            tracing::warn!("{} is resumed", self.path.display());
        }
        was_stopped
    }

    /// Limits its requests from now on.
    pub(crate) fn limit(&self, limits: Settings) {
        self.valve.limit(limits);
    }

    /// How its requests are limited, by names.
    pub(crate) fn limits_said(&self) -> BTreeMap<String, u64> {
        self.valve.limits().said().into_iter().collect()
    }

    /// Lets all requests that wait go on, for good: the server ends.
    pub(crate) fn open_for_good(&self) {
        self.valve.end();
    }

    /// Makes the disk larger, durably. Gives the sizes before and after, in bytes.
    pub(crate) async fn resize(&self, wish: Wish) -> Result<(u64, u64)> {
        let _steering = self.steer()?;
        let mut chain = self.alone().await?;
        let size = wish.bytes(self.disk.geometry().size)?;
        if chain.members[0].native.as_ref().is_some_and(|native| native.has_open_snapshots()) {
            return Err(self.in_use(IS_READ));
        }
        let (hold, before) = (self.valve.hold().await, chain.disk().clone());
        let grown = chain.grow(size).await;
        self.follow(&hold, &chain, &before).await;
        drop(hold);
        Ok((grown?, size))
    }

    /// Requests go to the chain's disk from now on, if that is another one than before. The one before keeps who looks after its
    /// device as long as it is open: of two of them one would wait for answers that the other gets.
    pub(super) async fn follow(&self, hold: &Hold, chain: &Chain, before: &SharedDisk) {
        if let Some(error) = chain.gone() {
            let (path, error) = (self.path.display(), error.chain());
            tracing::error!(
                "{path} is closed, and every request fails, until a resize opens it again: {error}"
            );
        }
        if Arc::ptr_eq(before, chain.disk()) {
            return;
        }
        let (inner, growing) = behind_valve(chain, &self.path, self.grow_hook.as_ref()).await;
        self.valve.exchange(hold, inner);
        *self.watcher() = growing;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_whole_sectors_and_there_is_a_largest() {
        for (wish, size) in [
            (Wish::Size(1 << 20), Some(1 << 20)),
            (Wish::Size(1000), Some(1024)),
            (Wish::More(1), Some((1 << 20) + 512)),
            (Wish::More(0), Some(1 << 20)),
            (Wish::More(u64::MAX), None),
            (Wish::Size(u64::MAX), None),
        ] {
            assert_eq!(wish.bytes(1 << 20).ok(), size, "{wish:?}");
        }
    }
}
