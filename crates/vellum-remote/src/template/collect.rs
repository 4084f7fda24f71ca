//! Collecting chunks that no index names.
//!
//! ```text
//!   take a lease; give up if a push or a collection is under way
//!   read every index                        the chunks that they name stay
//!   for each of 256 parts of the chunks:    list; delete what is not named and older than the grace time,
//!                                           after checking the lease again before each batch
//! ```
//!
//! 1. While it deletes, no push relies on what is in the store (lease.rs).
//! 2. When an index cannot be read, nothing is deleted.
//! 3. Chunks younger than the grace time stay: a push that was killed finds them when it is run again.
//! 4. What pushes left that were killed is deleted in the end: leases that have lapsed, and, in a directory, files
//!    that were never finished.
//! 5. It can be killed at any time. Each chunk that it deleted was named by no index.

use std::collections::HashSet;
use std::time::Duration;

use vellum_core::{Context, Error, ErrorKind, Result};

use super::index::{Digest, INDEX_BYTES_MAX, Index};
use super::lease::{Holder, Lease, lasts_until};
use super::name::{self, index_key};
use super::push::CHUNKS;
use crate::store::Store;

/// How old a file that was never finished must be, whatever the grace time: a push may be writing it.
const STAGED_MIN: Duration = Duration::from_secs(3600);

/// Chunks deleted with one request.
const BATCH: usize = 1000;

/// Chunks in one of the 256 parts of a store.
const PART_MAX: usize = 1 << 20;

/// Named chunks that fit in memory, at 40 bytes each.
const NAMED_MAX: usize = 64 << 20;

/// What a collection found and did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Collected {
    /// Versions that were read.
    pub versions: u64,
    /// Chunks that they name.
    pub named: u64,
    /// Chunks that were deleted.
    pub deleted: u64,
    /// Their length in the store, in bytes.
    pub deleted_bytes: u64,
    /// Chunks that no index names, but too young.
    pub young: u64,
}

/// A collection under way.
pub struct Collection {
    store: Store,
    lease: Lease,
}

impl Collection {
    /// Keeps pushes and other collections out of a store.
    ///
    /// # Errors
    /// `Locked` when one is under way; those of the store.
    pub async fn begin(store: &Store) -> Result<Self> {
        let lease = Lease::take(store, Holder::Collection).await?;
        let others = lease.others().await;
        let Some(other) = others.as_ref().ok().and_then(|others| others.first()) else {
            return match others {
                Ok(_) => Ok(Self { store: store.clone(), lease }),
                Err(error) => Err(error),
            };
        };
        let until = chrono::DateTime::<chrono::Utc>::from(lasts_until(other));
        lease.give_back().await;
        Err(Error::new(
            ErrorKind::Locked,
            format!(
                "a push or another collection is under way in {}; wait for it. If its process was killed, its lease \
                 lapses at {}",
                store.url(),
                until.to_rfc3339_opts(chrono::SecondsFormat::Secs, true)
            ),
        ))
    }

    /// Deletes the chunks that no index names and that are older than `grace`. With `dry_run` they are only counted.
    ///
    /// # Errors
    /// `Corrupt` when an index cannot be read, `Closed` when it was interrupted for too long; those of the store.
    pub async fn run(&self, grace: Duration, dry_run: bool) -> Result<Collected> {
        let collected = collect(&self.lease, &self.store, grace, dry_run).await?;
        if !dry_run {
            self.lease.forget_old().await?;
            self.store.forget_staged(grace.max(STAGED_MIN)).await?;
        }
        Ok(collected)
    }

    /// Lets pushes in again.
    pub async fn end(self) {
        self.lease.give_back().await;
    }
}

async fn collect(lease: &Lease, store: &Store, grace: Duration, dry_run: bool) -> Result<Collected> {
    let mut counts = Collected::default();
    let named = named_chunks(store, &mut counts).await?;
    for part in 0..=255_u8 {
        let below = format!("{CHUNKS}/{part:02x}");
        loop {
            let (chunks, is_all) = store.list(&below, PART_MAX).await?;
            let now = lease.check().await?;
            let mut condemned = Vec::new();
            for chunk in chunks {
                let digest = chunk.key.rsplit_once('/').and_then(|(_, name)| Digest::parse(name));
                // What is no chunk belongs to another program.
                if digest.is_none_or(|digest| named.contains(&digest)) {
                    continue;
                }
                if now.duration_since(chunk.modified).is_ok_and(|age| age >= grace) {
                    counts.deleted += 1;
                    counts.deleted_bytes += chunk.len;
                    condemned.push(chunk.key);
                } else {
                    counts.young += 1;
                }
            }
            let is_over = is_all || condemned.is_empty() || dry_run;
            for batch in condemned.chunks(BATCH).filter(|_| !dry_run) {
                lease.check().await?;
                store.delete(batch).await?;
            }
            if is_over {
                break;
            }
        }
    }
    Ok(counts)
}

async fn named_chunks(store: &Store, counts: &mut Collected) -> Result<HashSet<Digest>> {
    let mut named = HashSet::new();
    for version in name::list(store, None).await? {
        let key = index_key(&version.name, &version.version);
        let index = match store.get(&key, INDEX_BYTES_MAX).await {
            // Removed since it was listed: then it names nothing.
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            bytes => bytes.and_then(Index::parse),
        };
        let index = index.context(|| {
            format!(
                "nothing was deleted, because {} cannot be read; remove this version with `vellum template remove` \
                 if it is not wanted",
                store.url_of(&key)
            )
        })?;
        counts.versions += 1;
        named.extend(index.digests());
        if named.len() > NAMED_MAX {
            return Err(Error::unsupported(format!(
                "the store has more than {NAMED_MAX} chunks in use, which is more than a collection keeps in memory"
            )));
        }
    }
    counts.named = named.len() as u64;
    Ok(named)
}
