//! Blocks of a remote base in the cache of this host.
//!
//! 1. Only a base with a strong entity tag, a version or a protected snapshot has blocks there: URL, proof and length of the
//!    base are part of their keys, so a block of another content is never found.
//! 2. A run is taken from the cache whole, or fetched whole.

use std::ops::Range;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use vellum_core::pin::{Proof, ProofKind};

use super::plan::FETCH_BLOCK;
use crate::cache::{ChunkCache, Key, key_of_block};
use crate::runtime::job;

/// The blocks of one base.
pub(crate) struct Kept {
    cache: Arc<ChunkCache>,
    url: String,
    content: String,
}

impl Kept {
    /// Those of the base at a URL, if there is a cache and the base has a proof.
    pub(crate) fn of(cache: Option<&Arc<ChunkCache>>, url: &str, proof: Option<&Proof>) -> Option<Self> {
        let proves = |kind| matches!(kind, ProofKind::Etag | ProofKind::Version | ProofKind::Snapshot);
        let proof = proof.filter(|proof| proves(proof.kind()))?;
        Some(Self { cache: cache?.clone(), url: url.to_owned(), content: proof.to_string() })
    }

    /// The bytes of a run of blocks, if all of them are there.
    pub(crate) async fn get(&self, range: &Range<u64>) -> Option<Bytes> {
        let mut run = BytesMut::new();
        for (key, part) in self.blocks(range) {
            let block = self.cache.get(key).await?;
            if block.len() as u64 != part.end - part.start {
                return None;
            }
            run.extend_from_slice(&block);
        }
        Some(run.freeze())
    }

    /// Keeps the bytes of a run. Nothing waits for that.
    pub(crate) fn put(&self, range: &Range<u64>, bytes: &Bytes) {
        let within = |at: u64| usize::try_from(at - range.start).expect("a run is short");
        let blocks: Vec<(Key, Bytes)> = self
            .blocks(range)
            .map(|(key, part)| (key, bytes.slice(within(part.start)..within(part.end))))
            .collect();
        let cache = self.cache.clone();
        let keeping = job(async move {
            for (key, block) in blocks {
                cache.put(key, block).await;
            }
        });
        // Where no thread can be started, nothing is kept.
        if let Ok(keeping) = keeping {
            keeping.detach();
        }
    }

    fn blocks(&self, range: &Range<u64>) -> impl Iterator<Item = (Key, Range<u64>)> {
        let (start, end) = (range.start, range.end);
        (start / FETCH_BLOCK..end.div_ceil(FETCH_BLOCK)).map(move |number| {
            let part = (number * FETCH_BLOCK).max(start)..((number + 1) * FETCH_BLOCK).min(end);
            (key_of_block(&self.url, &self.content, number), part)
        })
    }
}
