//! Which request is changing which cluster: allocations synchronise per cluster (per subcluster, if there are
//! any), not per image.
//!
//! A writer *claims* the units of a cluster that it is going to allocate, zero or free; a second writer that
//! needs any of the same units waits, others continue. Writers that fill different subclusters of one new
//! cluster share the place in the image that the first of them gets: the *fresh* host cluster, kept here
//! until one of them publishes it in the L2 entry. Reads and writes in place claim nothing.
//!
//! 1. A unit is claimed by one holder at a time.
//! 2. Claims on several clusters are taken in ascending order, so that holders never wait in a cycle; no
//!    claim is waited for while a fresh cluster is being allocated.
//! 3. A fresh cluster that was not published when the last holder releases its claim is freed by that holder.
//! 4. What may be left of a write that failed, or of a copy that was given up, is counted: bytes that the mapping does not
//!    name, in space that it may name later.
//! 5. A holder that was dropped keeps nobody waiting: the next one that asks allocates the fresh cluster.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use event_listener::{Event, EventListener};
use vellum_core::{GuestCluster, ImageOffset};

use crate::hash::HashMap;
use crate::state::lock;

const SHARDS: usize = 16;

/// A cluster of the image that has been allocated for a guest cluster but may not be in its L2 entry yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fresh {
    /// Where it is.
    pub(crate) at: ImageOffset,
    /// It reads as zero where it has not been written.
    pub(crate) zeroed: bool,
}

#[derive(Default)]
struct Claim {
    busy: u32,
    /// The units of the holder that is allocating the fresh cluster. 0 when nobody is.
    allocating: u32,
    fresh: Option<Fresh>,
    published: bool,
}

#[derive(Default)]
struct Shard {
    claims: Mutex<HashMap<GuestCluster, Claim>>,
    changed: Event,
}

/// All claims of one image.
#[derive(Default)]
pub(crate) struct Claims {
    shards: [Shard; SHARDS],
    spoiled: AtomicU64,
}

/// The result of asking for the fresh cluster.
pub(crate) enum Ask {
    /// There is one.
    Have(Fresh),
    /// The asker must allocate it and call [`Held::provide`] or [`Held::give_up`].
    Yours,
    /// Another holder is allocating it; ask again afterwards.
    Wait(EventListener),
}

impl Claims {
    /// How often bytes were left in space that the mapping does not name.
    pub(crate) fn spoiled(&self) -> u64 {
        self.spoiled.load(Ordering::Acquire)
    }

    /// Such bytes were left.
    pub(crate) fn note_spoiled(&self) {
        self.spoiled.fetch_add(1, Ordering::AcqRel);
    }

    fn shard(&self, cluster: GuestCluster) -> &Shard {
        &self.shards[usize::try_from(cluster.index() % SHARDS as u64).expect("a small number")]
    }

    /// Claims the units of the mask, if nobody has claimed any unit of the cluster. Never waits.
    pub(crate) fn try_claim(&self, cluster: GuestCluster, mask: u32) -> Option<Held<'_>> {
        let mut claims = self.shard(cluster).lock();
        let claim = claims.entry(cluster).or_default();
        // A claim that is listed has a holder.
        if claim.busy != 0 {
            return None;
        }
        claim.busy = mask;
        Some(Held { claims: self, cluster, mask, released: false })
    }

    /// Claims the units of the mask, waiting until they are free.
    pub(crate) async fn claim(&self, cluster: GuestCluster, mask: u32) -> Held<'_> {
        loop {
            let listener = {
                let shard = self.shard(cluster);
                let mut claims = shard.lock();
                let claim = claims.entry(cluster).or_default();
                if claim.busy & mask == 0 {
                    claim.busy |= mask;
                    return Held { claims: self, cluster, mask, released: false };
                }
                shard.changed.listen()
            };
            listener.await;
        }
    }
}

impl Shard {
    #[track_caller]
    fn lock(&self) -> MutexGuard<'_, HashMap<GuestCluster, Claim>> {
        lock(&self.claims)
    }
}

/// Units of a cluster that the holder may change.
pub(crate) struct Held<'a> {
    claims: &'a Claims,
    cluster: GuestCluster,
    mask: u32,
    released: bool,
}

impl Held<'_> {
    fn with<T>(&self, act: impl FnOnce(&mut Claim) -> T) -> T {
        let mut claims = self.claims.shard(self.cluster).lock();
        act(claims.get_mut(&self.cluster).expect("a held claim is listed"))
    }

    /// The units that are held.
    pub(crate) fn mask(&self) -> u32 {
        self.mask
    }

    /// Asks for the cluster's fresh place in the image.
    pub(crate) fn fresh(&self) -> Ask {
        self.with(|claim| match claim.fresh {
            Some(fresh) => Ask::Have(fresh),
            None if claim.allocating != 0 => Ask::Wait(self.claims.shard(self.cluster).changed.listen()),
            None => {
                claim.allocating = self.mask;
                Ask::Yours
            }
        })
    }

    /// Answers [`Ask::Yours`] with the cluster that was allocated.
    pub(crate) fn provide(&self, fresh: Fresh) {
        self.with(|claim| {
            assert!(claim.allocating == self.mask && claim.fresh.is_none(), "one allocates for all");
            claim.allocating = 0;
            claim.fresh = Some(fresh);
            claim.published = false;
        });
        self.claims.shard(self.cluster).changed.notify(usize::MAX);
    }

    /// A write to the cluster failed, or was not published, and may have changed any of the bytes it was for.
    pub(crate) fn spoil(&self) {
        self.claims.note_spoiled();
        self.with(|claim| {
            if let Some(fresh) = &mut claim.fresh {
                fresh.zeroed = false;
            }
        });
    }

    /// Answers [`Ask::Yours`] when nothing could be allocated.
    pub(crate) fn give_up(&self) {
        self.with(|claim| claim.allocating = 0);
        self.claims.shard(self.cluster).changed.notify(usize::MAX);
    }

    /// The fresh cluster is in the L2 entry: later requests find it there.
    pub(crate) fn published(&self) {
        self.with(|claim| claim.published = true);
    }

    /// Releases the claim. Returns the fresh cluster to the caller if no other holder has claimed the guest
    /// cluster and it was never published.
    #[must_use = "an unpublished cluster must be freed"]
    pub(crate) fn release(mut self) -> Option<Fresh> {
        self.end()
    }

    fn end(&mut self) -> Option<Fresh> {
        self.released = true;
        let shard = self.claims.shard(self.cluster);
        let mut claims = shard.lock();
        let claim = claims.get_mut(&self.cluster).expect("a held claim is listed");
        claim.busy &= !self.mask;
        claim.allocating &= !self.mask;
        let mut unpublished = None;
        if claim.busy == 0 {
            unpublished = claim.fresh.filter(|_| !claim.published);
            claims.remove(&self.cluster);
        }
        drop(claims);
        shard.changed.notify(usize::MAX);
        unpublished
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        // Only when a request's future is dropped half way: the fresh cluster, if any, stays allocated,
        // because a host write to it may still be in flight. To other holders it is no longer zero, and one
        // of them allocates it if this one was about to.
        if !self.released {
            self.spoil();
            let _still_allocated = self.end();
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_lite::future::{block_on, poll_once};

    use super::*;

    fn cluster() -> GuestCluster {
        GuestCluster::new(5)
    }

    #[test]
    fn disjoint_units_are_held_together_and_shared_ones_in_turn() {
        let claims = Claims::default();
        block_on(async {
            let first = claims.claim(cluster(), 0b0011).await;
            let second = claims.claim(cluster(), 0b0100).await;
            let mut third = Box::pin(claims.claim(cluster(), 0b0110));
            assert!(poll_once(&mut third).await.is_none());
            assert!(first.release().is_none());
            assert!(poll_once(&mut third).await.is_none());
            assert!(second.release().is_none());
            assert_eq!(third.await.mask(), 0b0110);
        });
    }

    #[test]
    fn a_claim_without_waiting_is_refused_beside_any_other() {
        let claims = Claims::default();
        let first = claims.try_claim(cluster(), 0b0011).expect("nobody else is here");
        assert!(claims.try_claim(cluster(), 0b0100).is_none());
        let mut second = Box::pin(claims.claim(cluster(), 0b0001));
        assert!(block_on(poll_once(&mut second)).is_none(), "it is a claim like any other");
        assert!(first.release().is_none());
        let second = block_on(second);
        assert!(claims.try_claim(cluster(), 0b0011).is_none());
        assert!(second.release().is_none());
        assert!(claims.try_claim(cluster(), 0b0011).is_some());
    }

    #[test]
    fn what_a_failed_write_was_for_is_not_zero_to_the_next_writer() {
        let claims = Claims::default();
        let fresh = Fresh { at: ImageOffset::new(0x10000), zeroed: true };
        block_on(async {
            let first = claims.claim(cluster(), 1).await;
            let second = claims.claim(cluster(), 2).await;
            assert!(matches!(first.fresh(), Ask::Yours));
            first.provide(fresh);
            first.spoil();
            assert!(first.release().is_none(), "somebody still uses it");
            let third = claims.claim(cluster(), 1).await;
            assert!(matches!(third.fresh(), Ask::Have(found) if found == Fresh { zeroed: false, ..fresh }));
            assert!(third.release().is_none() && second.release().is_some());
        });
    }

    #[test]
    fn a_holder_that_was_dropped_while_it_allocated_leaves_that_to_another() {
        let claims = Claims::default();
        let fresh = Fresh { at: ImageOffset::new(0x10000), zeroed: true };
        block_on(async {
            let first = claims.claim(cluster(), 1).await;
            let second = claims.claim(cluster(), 2).await;
            assert!(matches!(first.fresh(), Ask::Yours));
            let Ask::Wait(mut listener) = second.fresh() else { panic!("the first allocates") };
            let third = claims.claim(cluster(), 4).await;
            drop(third);
            assert!(matches!(second.fresh(), Ask::Wait(_)), "the third had nothing to do with it");
            drop(first);
            assert!(poll_once(&mut listener).await.is_some(), "it is woken");
            assert!(matches!(second.fresh(), Ask::Yours));
            second.provide(fresh);
            assert_eq!(second.release(), Some(fresh));
        });
    }

    #[test]
    fn what_a_dropped_write_was_for_is_not_zero_to_the_next_writer() {
        let claims = Claims::default();
        let fresh = Fresh { at: ImageOffset::new(0x10000), zeroed: true };
        block_on(async {
            let first = claims.claim(cluster(), 1).await;
            let second = claims.claim(cluster(), 2).await;
            assert!(matches!(first.fresh(), Ask::Yours));
            first.provide(fresh);
            drop(first);
            let third = claims.claim(cluster(), 1).await;
            assert!(matches!(third.fresh(), Ask::Have(found) if found == Fresh { zeroed: false, ..fresh }));
            assert!(third.release().is_none() && second.release().is_some());
        });
    }

    #[test]
    fn one_allocates_for_all_and_the_last_gives_back_what_was_not_published() {
        let claims = Claims::default();
        let fresh = Fresh { at: ImageOffset::new(0x10000), zeroed: true };
        block_on(async {
            let first = claims.claim(cluster(), 1).await;
            let second = claims.claim(cluster(), 2).await;
            assert!(matches!(first.fresh(), Ask::Yours));
            assert!(matches!(second.fresh(), Ask::Wait(_)));
            first.provide(fresh);
            assert!(matches!(second.fresh(), Ask::Have(found) if found == fresh));
            assert_eq!(first.release(), None, "somebody still uses it");
            assert_eq!(second.release(), Some(fresh));
            // The next one starts afresh.
            let third = claims.claim(cluster(), 1).await;
            assert!(matches!(third.fresh(), Ask::Yours));
            third.provide(fresh);
            third.published();
            assert_eq!(third.release(), None);
        });
    }
}
