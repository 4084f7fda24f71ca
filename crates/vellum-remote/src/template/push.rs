//! Publishing a disk: its chunks first, then the index that names them.
//!
//! ```text
//!   begin    take a lease; wait for collections to end; list the chunks that the store has
//!   add      for each chunk of the disk, in any order, several at once: digest; upload unless the store has it
//!   commit   check the lease; put the index (the commit point); check that the lease held until then
//! ```
//!
//! 1. Every chunk that the index names is in the store when the index is put: uploaded, or found in a listing
//!    that was made while no collection was under way, and none was until after the index was there.
//! 2. A push that was killed leaves chunks and a lease. The next push of the same content finds the chunks and
//!    uploads the rest.
//! 3. What was reported as published is not withdrawn: only an index of which a chunk is missing is.
//! 4. A version is never replaced. Pushing the same disk as the same version again is a success without effect.
//! 5. Memory: one content and one object for each call of [`Push::add`] under way, 32 bytes for each chunk that
//!    the store has, up to [`KNOWN_MAX`], and about 60 for each of the disk.

use std::collections::{BTreeMap, HashSet};
use std::sync::Mutex;
use std::time::Duration;

use bytes::Bytes;
use vellum_core::{Error, ErrorKind, Result, lock};

use super::chunk;
use super::index::{CHUNK_SHIFTS, Digest, INDEX_BYTES_MAX, Index, chunks_of};
use super::lease::{Holder, LASTS, Lease, lasts_until};
use super::name::{TemplateName, index_key};
use crate::runtime::blocking;
use crate::store::{Put, Store};

/// How many chunks of a store are listed and kept in mind. Of a store with more, each chunk is asked for.
pub(crate) const KNOWN_MAX: usize = 1 << 20;

/// The size of a chunk unless the user says otherwise, as a power of two.
pub const CHUNK_SHIFT_DEFAULT: u32 = 18;

/// How often to look whether others have ended.
const PAUSE: Duration = Duration::from_secs(1);

/// Digits of the digest that name a version without a name.
const VERSION_DIGITS: usize = 16;

/// The key of a chunk.
pub(crate) fn chunk_key(digest: Digest) -> String {
    let name = digest.to_string();
    format!("{CHUNKS}/{}/{name}", &name[..2])
}

/// Where chunks lie.
pub(crate) const CHUNKS: &str = "chunks";

/// A push under way.
pub struct Push {
    store: Store,
    name: TemplateName,
    size: u64,
    chunk_shift: u32,
    lease: Lease,
    /// The chunks that the store has or is getting.
    known: Mutex<HashSet<Digest>>,
    /// No other chunk is there.
    knows_all: bool,
    chunks: Mutex<BTreeMap<u32, Digest>>,
    counts: Mutex<PushCounts>,
}

/// What a push has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PushCounts {
    /// Chunks of the disk that are not zero.
    pub chunks: u64,
    /// Those that were uploaded.
    pub uploaded: u64,
    /// Their length in the store, in bytes.
    pub uploaded_bytes: u64,
    /// Their length on the disk, in bytes.
    pub content_bytes: u64,
}

/// A version that was published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pushed {
    /// Its name, with the version.
    pub name: TemplateName,
    /// The digest of its index.
    pub digest: Digest,
    /// The length of its index in bytes.
    pub index_len: u64,
    /// False when the version was there already, with the same content.
    pub is_new: bool,
    /// What it took.
    pub counts: PushCounts,
}

impl Push {
    /// Begins to publish a disk of `size` bytes.
    ///
    /// # Errors
    /// `Invalid` for a size or a chunk size that templates do not have; those of the store; `Locked` when a
    /// collection does not end.
    pub async fn begin(store: &Store, name: &TemplateName, size: u64, chunk_shift: u32) -> Result<Self> {
        if !CHUNK_SHIFTS.contains(&chunk_shift) || !size.is_multiple_of(512) {
            return Err(Error::invalid(
                "a template has chunks of 64 KiB to 4 MiB, a power of two, and a size that is a multiple of 512",
            ));
        }
        if chunks_of(size, chunk_shift).is_none() {
            return Err(Error::invalid("the disk has too many chunks of this size; use larger ones"));
        }
        let lease = Lease::take(store, Holder::Push).await?;
        wait_for_collections(&lease).await?;
        let (objects, knows_all) = store.list(CHUNKS, KNOWN_MAX).await?;
        let digest_of = |key: &str| Digest::parse(key.rsplit_once('/')?.1);
        let known = objects.iter().filter_map(|object| digest_of(&object.key)).collect();
        Ok(Self {
            store: store.clone(),
            name: name.clone(),
            size,
            chunk_shift,
            lease,
            known: Mutex::new(known),
            knows_all,
            chunks: Mutex::default(),
            counts: Mutex::default(),
        })
    }

    /// The size of a chunk in bytes.
    pub fn chunk_size(&self) -> u64 {
        1 << self.chunk_shift
    }

    /// Adds a chunk of the disk, which is not zero. Returns once it is in the store.
    ///
    /// # Errors
    /// Those of the store. The push has failed then.
    pub async fn add(&self, number: u32, content: Vec<u8>) -> Result<()> {
        let content_len = content.len() as u64;
        let content = Bytes::from(content);
        let hashed = content.clone();
        let digest = blocking(move || Digest::of(&hashed))?.await;
        let is_known = !lock(&self.known).insert(digest);
        let mut uploaded = None;
        if !is_known {
            let key = chunk_key(digest);
            let is_there = !self.knows_all && self.store.head(&key).await?.is_some();
            if !is_there {
                let object = blocking(move || chunk::encode(&content))?.await;
                let len = object.len() as u64;
                self.store.put(&key, object, Put::OfContent).await?;
                uploaded = Some(len);
            }
        }
        lock(&self.chunks).insert(number, digest);
        let mut counts = lock(&self.counts);
        counts.chunks += 1;
        counts.content_bytes += content_len;
        if let Some(len) = uploaded {
            counts.uploaded += 1;
            counts.uploaded_bytes += len;
        }
        Ok(())
    }

    /// What was done until now.
    pub fn counts(&self) -> PushCounts {
        *lock(&self.counts)
    }

    /// Publishes the version, once all calls of [`add`](Self::add) have returned.
    ///
    /// # Errors
    /// `Invalid` when the version is there with another content, `Closed` when the work was interrupted for so
    /// long that chunks may have been collected; those of the store.
    pub async fn commit(self) -> Result<Pushed> {
        let pushed = self.publish().await;
        self.lease.give_back().await;
        pushed
    }

    async fn publish(&self) -> Result<Pushed> {
        let index = Index::build(self.size, self.chunk_shift, &lock(&self.chunks))?;
        let digest = Index::parse(index.clone())?.digest();
        let version = self.name.version.clone();
        let version = version.unwrap_or_else(|| digest.to_string()[..VERSION_DIGITS].to_owned());
        let name = TemplateName { name: self.name.name.clone(), version: Some(version.clone()) };
        let key = index_key(&name.name, &version);
        self.lease.check().await?;
        // The commit point: from here on the version is published.
        let is_new = self.store.put(&key, index.clone(), Put::IfAbsent).await?;
        if is_new {
            self.confirm(&key).await?;
        } else {
            self.compare(&key, digest, &name).await?;
        }
        Ok(Pushed { name, digest, index_len: index.len() as u64, is_new, counts: self.counts() })
    }

    /// If the lease lapsed while the index was on its way, a collection may have begun before it arrived. The index stays if
    /// all its chunks are there all the same. It is looked at, and withdrawn, as a collection does: while no other push is under
    /// way, because one that has found the index there, and has made its chunks sure, reports that it is published.
    async fn confirm(&self, key: &str) -> Result<()> {
        let published = self.store.head(key).await?.map(|facts| facts.modified);
        let lost = match published {
            Some(time) => match self.lease.covers(time) {
                Ok(_) => return Ok(()),
                Err(lost) => lost,
            },
            None => return Err(Error::new(ErrorKind::NotFound, "the index was deleted again at once")),
        };
        let mut waited = Duration::ZERO;
        loop {
            let lease = Lease::take(&self.store, Holder::Collection).await?;
            let decided = self.decide(key, &lease).await;
            lease.give_back().await;
            match decided {
                Ok(Some(true)) => return Ok(()),
                Ok(Some(false)) => return Err(lost),
                Ok(None) if waited < LASTS * 2 => {}
                Ok(None) => {
                    let why = format!(
                        "{}: whether all its chunks are there could not be found out, because others push there: run the command \
                         again",
                        self.store.url_of(key)
                    );
                    return Err(Error::new(ErrorKind::Locked, why));
                }
                Err(error) => return Err(error.context("can't withdraw an index without a lease")),
            }
            crate::runtime::job(async { tokio::time::sleep(PAUSE).await })?.await;
            waited += PAUSE;
        }
    }

    /// Whether the index stays, if that can be decided now: under a lease of a collection that is the only one.
    async fn decide(&self, key: &str, lease: &Lease) -> Result<Option<bool>> {
        if lease.others().await?.iter().any(|other| !self.lease.is(other)) {
            return Ok(None);
        }
        let digests: HashSet<Digest> = lock(&self.chunks).values().copied().collect();
        let mut are_there = true;
        for digest in digests {
            are_there &= self.store.head(&chunk_key(digest)).await?.is_some();
        }
        lease.check().await?;
        if !are_there {
            self.store.delete(&[key.to_owned()]).await?;
        }
        Ok(Some(are_there))
    }

    async fn compare(&self, key: &str, digest: Digest, name: &TemplateName) -> Result<()> {
        let there = self.store.get(key, INDEX_BYTES_MAX).await?;
        match Index::parse(there) {
            Ok(there) if there.digest() == digest => Ok(()),
            _ => Err(Error::invalid(format!(
                "{name} is published already, with another content; versions are never replaced: publish this one \
                 under another name, or remove that one with `vellum template remove`"
            ))),
        }
    }

    /// Ends it without publishing. What was uploaded stays for the next try.
    pub async fn abandon(self) {
        self.lease.give_back().await;
    }
}

async fn wait_for_collections(lease: &Lease) -> Result<()> {
    let mut waited = Duration::ZERO;
    loop {
        let collections = lease.collections().await?;
        let Some(one) = collections.first() else { return Ok(()) };
        if waited > LASTS * 2 {
            let until = chrono::DateTime::<chrono::Utc>::from(lasts_until(one));
            return Err(Error::new(
                ErrorKind::Locked,
                format!(
                    "chunks are being collected in the store (`vellum template gc`), at least until {until}"
                ),
            ));
        }
        crate::runtime::job(async { tokio::time::sleep(PAUSE).await })?.await;
        waited += PAUSE;
    }
}

#[cfg(test)]
mod tests {
    use futures_lite::future::block_on;

    use super::*;
    use crate::tests::Directory;

    #[test]
    fn a_version_that_another_push_found_published_is_not_withdrawn() {
        let directory = Directory::new("withdrawn");
        let store = directory.store();
        let name = TemplateName { name: "debian".to_owned(), version: Some("1".to_owned()) };
        let (key, content) = (index_key("debian", "1"), vec![7; 1 << 16]);
        block_on(async {
            let begin = async || Push::begin(&store, &name, 1 << 16, 16).await.expect("begins");
            let late = begin().await;
            late.add(0, content.clone()).await.expect("adds");
            let index = Index::build(late.size, late.chunk_shift, &lock(&late.chunks)).expect("an index");
            assert!(store.put(&key, index.clone(), Put::IfAbsent).await.expect("writes"));
            let second = begin().await;
            second.add(0, content.clone()).await.expect("adds");
            let pushed = second.commit().await.expect("it is there already");
            assert!(!pushed.is_new);
            // Only now does the first one find out that its lease had lapsed.
            late.lease.lose();
            late.confirm(&key).await.expect("all its chunks are there");
            assert_eq!(store.get(&key, INDEX_BYTES_MAX).await.expect("it stays"), index);

            // A chunk is missing; the push that may be about to bring it is not disturbed.
            let chunk = chunk_key(pushed_chunk(&late));
            store.delete(std::slice::from_ref(&chunk)).await.expect("deletes");
            let third = begin().await;
            let lease = Lease::take(&store, Holder::Collection).await.expect("takes");
            assert_eq!(late.decide(&key, &lease).await.expect("looks"), None);
            lease.give_back().await;
            assert!(store.head(&key).await.expect("looks").is_some());
            third.abandon().await;
            let error = late.confirm(&key).await.expect_err("a chunk is missing");
            assert_eq!(error.kind(), ErrorKind::Closed, "{}", error.chain());
            assert_eq!(store.head(&key).await.expect("looks"), None, "it was withdrawn");
        });
    }

    fn pushed_chunk(push: &Push) -> Digest {
        *lock(&push.chunks).values().next().expect("it has one")
    }
}
