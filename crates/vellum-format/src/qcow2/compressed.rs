//! Compressed clusters: read, never written in place.
//!
//! The bytes of a compressed cluster may begin at any byte of the image. Their end is known only to the
//! sector, so the decompressor stops when the cluster is full and ignores what follows. It runs where long
//! computations go ([`Offload`]). The last few clusters are kept, because guests read in smaller pieces than
//! a cluster.
//!
//! When several requests need one cluster, the first of them decompresses it for all.
//!
//! An entry of that small cache cannot become wrong: its key is the place of the compressed bytes, and this
//! program never writes compressed clusters into an open image.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use vellum_core::{
    BlockSize, Buffer, Context, Error, ImageOffset, ImageSpan, Offload, Result, SharedStorage, offload,
};
use zstd::stream::raw::{InBuffer, Operation, OutBuffer};

use super::header::Compression;
use crate::keyed::KeyedLocks;
use crate::state::lock;

/// Decompressed clusters in memory take at most this many bytes, but at least one cluster is kept.
const KEPT_BYTES: usize = 1 << 20;

/// Reads compressed clusters of one image.
pub(crate) struct Decompressor {
    storage: SharedStorage,
    method: Compression,
    cluster: usize,
    place: Arc<dyn Offload>,
    kept: Mutex<VecDeque<(ImageOffset, Arc<Vec<u8>>)>>,
    /// Held while the cluster that begins there is decompressed.
    unpacking: KeyedLocks,
}

impl Decompressor {
    pub(crate) fn new(
        storage: SharedStorage,
        method: Compression,
        cluster: BlockSize,
        place: Arc<dyn Offload>,
    ) -> Self {
        let cluster = usize::try_from(cluster.bytes()).expect("a cluster fits memory");
        Self { storage, method, cluster, place, kept: Mutex::default(), unpacking: KeyedLocks::default() }
    }

    /// The bytes of the cluster that is stored compressed in the run.
    pub(crate) async fn read(&self, span: ImageSpan) -> Result<Arc<Vec<u8>>> {
        if let Some(cluster) = self.find(span.start()) {
            return Ok(cluster);
        }
        let _unpacking = self.unpacking.lock(span.start().bytes()).await;
        if let Some(cluster) = self.find(span.start()) {
            return Ok(cluster); // another task was first
        }
        let len = usize::try_from(span.len()).expect("bounded by twice a cluster");
        let packed = self.storage.read(span.start(), Buffer::for_overwrite(len)).await?;
        let (method, cluster) = (self.method, self.cluster);
        let unpacked =
            offload(&*self.place, move || unpack(method, packed.slice(), cluster)).await.context(|| {
                format!("{}: the compressed cluster at {} is damaged", self.storage.name(), span.start())
            })?;
        let unpacked = Arc::new(unpacked);
        let mut kept = lock(&self.kept);
        if kept.len() >= (KEPT_BYTES / self.cluster).max(1) {
            kept.pop_front();
        }
        kept.push_back((span.start(), unpacked.clone()));
        Ok(unpacked)
    }

    fn find(&self, at: ImageOffset) -> Option<Arc<Vec<u8>>> {
        lock(&self.kept).iter().find(|(place, _)| *place == at).map(|(_, cluster)| cluster.clone())
    }
}

/// Decompresses one cluster. The input may be longer than the cluster's compressed bytes.
pub(crate) fn unpack(method: Compression, packed: &[u8], cluster: usize) -> Result<Vec<u8>> {
    let mut unpacked = vec![0; cluster];
    match method {
        Compression::Zlib => {
            let mut state = flate2::Decompress::new(false);
            while state.total_out() < cluster as u64 {
                let (input, output) = (to_usize(state.total_in()), to_usize(state.total_out()));
                let status = state
                    .decompress(&packed[input..], &mut unpacked[output..], flate2::FlushDecompress::None)
                    .map_err(|error| Error::corrupt(format!("deflate: {error}")))?;
                let stuck = (to_usize(state.total_in()), to_usize(state.total_out())) == (input, output);
                if stuck || (status == flate2::Status::StreamEnd && state.total_out() < cluster as u64) {
                    return Err(Error::corrupt(format!("deflate: ends after {} bytes", state.total_out())));
                }
            }
        }
        Compression::Zstd => {
            let failed = |error: std::io::Error| Error::corrupt(format!("zstd: {error}"));
            let mut state = zstd::stream::raw::Decoder::new().map_err(failed)?;
            let mut input = InBuffer::around(packed);
            let mut output = OutBuffer::around(&mut unpacked[..]);
            while output.pos() < cluster {
                let before = (input.pos(), output.pos());
                let hint = state.run(&mut input, &mut output).map_err(failed)?;
                let stuck = (input.pos(), output.pos()) == before;
                if (stuck || hint == 0) && output.pos() < cluster {
                    return Err(Error::corrupt(format!("zstd: ends after {} bytes", output.pos())));
                }
            }
        }
    }
    Ok(unpacked)
}

fn to_usize(bytes: u64) -> usize {
    usize::try_from(bytes).expect("a cluster fits memory")
}
