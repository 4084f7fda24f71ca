//! Compressed clusters: packed and unpacked, read, never written in place. `compress.rs` writes them.
//!
//! The bytes of a compressed cluster may begin at any byte of the image. Their end is known only to the
//! sector, so the decompressor stops when the cluster is full and ignores what follows. It runs where long
//! computations go ([`Offload`]). The last few clusters are kept, because guests read in smaller pieces than
//! a cluster.
//!
//! When several requests need one cluster, the first of them decompresses it for all.
//!
//! The key in that small cache is the place of the compressed bytes. Before other compressed bytes are written there, the
//! entry is forgotten.

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

/// The window that other readers of qcow2 have: 4 KiB.
const DEFLATE_WINDOW_BITS: u8 = 12;

/// The level of deflate where none is asked for.
const DEFLATE_LEVEL: i32 = 6;

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

    /// Forgets the clusters whose compressed bytes begin in the run.
    pub(crate) fn forget(&self, span: ImageSpan) {
        lock(&self.kept).retain(|(at, _)| !span.contains(*at));
    }

    /// Where long computations run.
    pub(crate) fn place(&self) -> &dyn Offload {
        &*self.place
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

/// Compresses one cluster: `None` where that makes it no smaller.
pub(crate) type Packer = Box<dyn FnMut(&[u8]) -> Result<Option<Vec<u8>>>>;

/// What compresses clusters of this many bytes, one after the other.
pub(crate) fn pack(method: Compression, level: Option<i32>, cluster: usize) -> Result<Packer> {
    // At least one byte less than the cluster, as readers expect.
    let room = cluster - 1;
    match method {
        Compression::Zlib => {
            let level = u32::try_from(level.unwrap_or(DEFLATE_LEVEL)).unwrap_or(0);
            let level = flate2::Compression::new(level.clamp(1, 9));
            let mut state = flate2::Compress::new_with_window_bits(level, false, DEFLATE_WINDOW_BITS);
            // Room for everything: a stream that is reset before its end keeps what it could not put out.
            let mut packed = vec![0; cluster + cluster / 8 + 1024];
            Ok(Box::new(move |data| {
                state.reset();
                let status = state.compress(data, &mut packed, flate2::FlushCompress::Finish);
                let status = status.map_err(|error| Error::invalid(format!("deflate: {error}")))?;
                if status != flate2::Status::StreamEnd {
                    return Err(Error::invalid("deflate: it does not end"));
                }
                let len = to_usize(state.total_out());
                Ok((len <= room).then(|| packed[..len].to_vec()))
            }))
        }
        Compression::Zstd => {
            let failed = |error: std::io::Error| Error::invalid(format!("zstd: {error}"));
            let mut state = zstd::bulk::Compressor::new(level.unwrap_or(0)).map_err(failed)?;
            // Where the result has no room, that is an error of the library; so the room is what is always enough.
            let mut packed = vec![0; zstd::zstd_safe::compress_bound(cluster)];
            Ok(Box::new(move |data| {
                let len = state.compress_to_buffer(data, &mut packed).map_err(failed)?;
                Ok((len <= room).then(|| packed[..len].to_vec()))
            }))
        }
    }
}

fn to_usize(bytes: u64) -> usize {
    usize::try_from(bytes).expect("a cluster fits memory")
}

#[cfg(test)]
mod tests {
    use vellum_core::Random;

    use super::*;

    /// Noise between what can be compressed: whatever comes before, each cluster is packed by itself.
    #[test]
    fn what_is_packed_is_unpacked() {
        for method in [Compression::Zlib, Compression::Zstd] {
            for (cluster, level) in
                [(512, None), (4096, None), (4096, Some(1)), (65_536, Some(9)), (2 << 20, None)]
            {
                let mut random = Random::from_seed(cluster as u64);
                let mut packer = pack(method, level, cluster).unwrap();
                for round in 0..40 {
                    let mut bytes = vec![0; cluster];
                    let noise = cluster * (round % 5) / 4;
                    random.fill(&mut bytes[..noise]);
                    let packed = packer(&bytes).unwrap();
                    assert_eq!(packed.is_none(), noise == cluster, "{method:?}, {noise} of {cluster}");
                    if let Some(packed) = packed {
                        assert!(packed.len() < cluster);
                        assert!(unpack(method, &packed, cluster).unwrap() == bytes, "{method:?} {cluster}");
                    }
                }
            }
        }
    }

    /// A reader with a window of 4 KiB must do.
    #[test]
    fn the_window_of_deflate_is_small() {
        let mut bytes = vec![0; 65_536];
        Random::from_seed(3).fill(&mut bytes[..8192]);
        let (first, rest) = bytes.split_at_mut(8192);
        rest[..8192].copy_from_slice(first);
        let packed = pack(Compression::Zlib, None, 65_536).unwrap()(&bytes).unwrap().unwrap();
        assert!(packed.len() > 16_000, "the copy 8 KiB further on is not seen: {}", packed.len());
        let mut reader = flate2::Decompress::new_with_window_bits(false, DEFLATE_WINDOW_BITS);
        let mut read = vec![0; 65_536];
        reader.decompress(&packed, &mut read, flate2::FlushDecompress::Finish).unwrap();
        assert!(read == bytes);
    }
}
