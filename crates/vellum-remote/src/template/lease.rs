//! Leases: how pushes and collections in one store keep out of each other's way.
//!
//! A push relies on chunks that are in the store; a collection deletes those that no index names. So they exclude
//! each other, by objects that each writes before it looks for those of the others:
//!
//! ```text
//!   push         put leases/push-ID    list leases    a collection is under way: wait until it has ended
//!   collection   put leases/gc-ID      list leases    anything is under way: give up, delete the own lease
//! ```
//!
//! Stores list what was put before. So of two that begin at once, at least one sees the other; if both do, the
//! push waits and the collection gives up.
//!
//! 1. A lease lasts for [`LASTS`] after it was last written, by the clock of the store: no other clock counts. Its
//!    holder writes it again every quarter of that. What a killed process leaves behind lapses.
//! 2. A holder that did not write in time, because its host slept or the network was gone, has lost its lease for
//!    good, even if it writes again: [`Lease::check`] fails from then on.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use vellum_core::{Context, Error, ErrorKind, Result, lock};

use crate::runtime::{Job, job};
use crate::store::{ObjectFacts, Put, Store};

/// How long a lease lasts after it was last written.
pub(crate) const LASTS: Duration = Duration::from_secs(600);

/// How long after it has lapsed a lease is kept.
const FORGOTTEN: Duration = Duration::from_secs(3600);

/// How many leases are looked at. There is one for each push under way, and for those that were killed.
const LEASES_MAX: usize = 10_000;

const LEASES: &str = "leases";

/// Who holds a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Holder {
    Push,
    Collection,
}

impl Holder {
    fn prefix(self) -> &'static str {
        match self {
            Self::Push => "push-",
            Self::Collection => "gc-",
        }
    }
}

/// A lease that is held until it is dropped or given back.
pub(crate) struct Lease {
    shared: Arc<Shared>,
    _writes: Job<()>,
}

struct Shared {
    store: Store,
    key: String,
    /// When it was last written, by the clock of the store.
    written: Mutex<SystemTime>,
    is_lost: AtomicBool,
}

impl Lease {
    /// Writes a lease, and keeps writing it.
    pub(crate) async fn take(store: &Store, holder: Holder) -> Result<Self> {
        let mut id = [0; 8];
        getrandom::fill(&mut id)
            .map_err(|error| Error::new(ErrorKind::Io, format!("no random number: {error}")))?;
        let key = format!("{LEASES}/{}{:016x}", holder.prefix(), u64::from_be_bytes(id));
        let shared = Arc::new(Shared {
            store: store.clone(),
            key,
            written: Mutex::new(SystemTime::UNIX_EPOCH),
            is_lost: AtomicBool::new(false),
        });
        let now = shared.write().await.context(|| "can't announce the work in the store")?;
        *lock(&shared.written) = now;
        let again = shared.clone();
        let writes = job(async move {
            loop {
                tokio::time::sleep(LASTS / 4).await;
                // A failure shows when the lease is checked.
                drop(again.renew().await);
            }
        })?;
        Ok(Self { shared, _writes: writes })
    }

    /// The time in the store.
    ///
    /// # Errors
    /// `Closed` when the lease is lost.
    pub(crate) async fn check(&self) -> Result<SystemTime> {
        self.shared.renew().await?;
        let written = *lock(&self.shared.written);
        self.covers(written)
    }

    /// Whether it was held until a time in the store that is not before it was last written.
    pub(crate) fn covers(&self, time: SystemTime) -> Result<SystemTime> {
        let written = *lock(&self.shared.written);
        if self.shared.is_lost.load(Ordering::SeqCst) || lapsed(written, time) {
            return Err(Error::new(
                ErrorKind::Closed,
                format!(
                    "the work was interrupted for more than {} s, and its lease in the store has lapsed; run the \
                     command again, which continues",
                    LASTS.as_secs()
                ),
            ));
        }
        Ok(time)
    }

    /// Whether it is this one.
    pub(crate) fn is(&self, lease: &ObjectFacts) -> bool {
        lease.key == self.shared.key
    }

    /// Lets it lapse.
    #[cfg(test)]
    pub(crate) fn lose(&self) {
        self.shared.is_lost.store(true, Ordering::SeqCst);
    }

    /// The leases of others that have not lapsed.
    pub(crate) async fn others(&self) -> Result<Vec<ObjectFacts>> {
        let now = self.check().await?;
        let (leases, is_all) = self.shared.store.list(LEASES, LEASES_MAX).await?;
        if !is_all {
            return Err(Error::unsupported(format!(
                "{} has more than {LEASES_MAX} leases; delete the old ones",
                self.shared.store.url_of(LEASES)
            )));
        }
        let live = |lease: &ObjectFacts| lease.key != self.shared.key && !lapsed(lease.modified, now);
        Ok(leases.into_iter().filter(live).collect())
    }

    /// Deletes the leases of others that lapsed [`FORGOTTEN`] ago: of processes that were killed. One of them that still
    /// lives has lost its lease all the same (1).
    pub(crate) async fn forget_old(&self) -> Result<()> {
        let now = self.check().await?;
        let (leases, _) = self.shared.store.list(LEASES, LEASES_MAX).await?;
        let is_old = |lease: &ObjectFacts| {
            lease.key != self.shared.key
                && now.duration_since(lease.modified).is_ok_and(|age| age >= LASTS + FORGOTTEN)
        };
        let old: Vec<String> = leases.into_iter().filter(is_old).map(|lease| lease.key).collect();
        match old.is_empty() {
            true => Ok(()),
            false => self.shared.store.delete(&old).await.map(drop),
        }
    }

    /// The collections among the leases of others.
    pub(crate) async fn collections(&self) -> Result<Vec<ObjectFacts>> {
        let prefix = format!("{LEASES}/{}", Holder::Collection.prefix());
        let mut others = self.others().await?;
        others.retain(|lease| lease.key.starts_with(&prefix));
        Ok(others)
    }

    /// Ends it.
    pub(crate) async fn give_back(self) {
        // What stays behind lapses.
        drop(self.shared.store.delete(std::slice::from_ref(&self.shared.key)).await);
    }
}

impl Shared {
    /// Writes it and says when that was.
    async fn write(&self) -> Result<SystemTime> {
        let text = format!("process {}\n", std::process::id());
        self.store.put(&self.key, Bytes::from(text), Put::Replace).await?;
        let facts = self.store.head(&self.key).await?;
        // It can only be gone when another program deleted it, which nothing does while it is fresh.
        facts.map(|facts| facts.modified).ok_or_else(|| {
            Error::new(
                ErrorKind::NotFound,
                format!("{} was deleted by another program", self.store.url_of(&self.key)),
            )
        })
    }

    async fn renew(&self) -> Result<()> {
        let now = self.write().await?;
        let mut written = lock(&self.written);
        if lapsed(*written, now) {
            self.is_lost.store(true, Ordering::SeqCst);
        }
        *written = now.max(*written);
        Ok(())
    }
}

/// Whether a lease that was written then has lapsed now.
fn lapsed(written: SystemTime, now: SystemTime) -> bool {
    now.duration_since(written).is_ok_and(|age| age >= LASTS)
}

/// When a lease lapses, as seen from another that was written just now.
pub(crate) fn lasts_until(lease: &ObjectFacts) -> SystemTime {
    lease.modified + LASTS
}

#[cfg(test)]
mod tests {
    use futures_lite::future::block_on;

    use super::*;
    use crate::tests::Directory;

    #[test]
    fn leases_see_each_other_until_they_are_given_back() {
        let directory = Directory::new("leases");
        let store = directory.store();
        block_on(async {
            let push = Lease::take(&store, Holder::Push).await.expect("takes");
            assert_eq!(push.others().await.expect("lists"), []);
            let collection = Lease::take(&store, Holder::Collection).await.expect("takes");
            assert_eq!(collection.others().await.expect("lists").len(), 1);
            assert_eq!(push.collections().await.expect("lists").len(), 1);
            assert_eq!(collection.collections().await.expect("lists"), []);
            collection.give_back().await;
            assert_eq!(push.others().await.expect("lists"), []);
        });
    }

    #[test]
    fn a_lease_that_lapsed_is_not_seen_and_cannot_be_had_back() {
        let directory = Directory::new("lapsed");
        let store = directory.store();
        block_on(async {
            let held = Lease::take(&store, Holder::Push).await.expect("takes");
            let other = Lease::take(&store, Holder::Push).await.expect("takes");
            directory.age(&held.shared.key, LASTS * 2);
            assert_eq!(other.others().await.expect("lists"), [], "nobody counts it any more");
            // The holder slept: the time of its last writing is long ago.
            *lock(&held.shared.written) -= LASTS * 2;
            assert_eq!(held.check().await.expect_err("lost").kind(), ErrorKind::Closed);
            assert_eq!(held.check().await.expect_err("stays lost").kind(), ErrorKind::Closed);
        });
    }
}
