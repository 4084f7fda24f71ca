//! Compressed chunks: unpacked as a whole, where long computations run, and kept for a while, because guests
//! read in smaller pieces.
//!
//! 1. A chunk is at most [`CHUNK_BYTES_MAX`] long, packed and unpacked. The unpacker has a buffer of the stated
//!    length and stops when it is full, so no input grows without bound.
//! 2. A chunk that ends early, or is damaged, is an error, never zeros.
//! 3. When several requests need one chunk, the first of them unpacks it for all.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use vellum_core::{Context, Error, Offload, Result, Storage, lock, offload};

use crate::bytes::read_at;

/// The longest chunk, in bytes, as in QEMU.
pub(crate) const CHUNK_BYTES_MAX: u64 = 64 << 20;

/// Unpacked chunks in memory take at most this many bytes, but at least one chunk is kept.
const KEPT_BYTES: usize = 4 << 20;

/// Requests for this many different chunks are unpacked at once.
const TURNS: usize = 16;

/// How a chunk is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Packing {
    /// Deflate in a zlib envelope.
    Zlib,
    /// Deflate alone.
    Deflate,
    /// As the program bzip2 writes it.
    Bzip2,
}

/// A compressed chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Packed {
    /// Which file of the image has it.
    pub(crate) file: usize,
    /// Where it begins there.
    pub(crate) at: u64,
    /// How long it is there, at most.
    pub(crate) packed_len: u64,
    /// How long its content is.
    pub(crate) len: u64,
    pub(crate) packing: Packing,
}

/// The content of a chunk, and where its file has it.
type Chunk = ((usize, u64), Arc<Vec<u8>>);

/// Unpacks the chunks of one image.
pub(crate) struct Unpacker {
    place: Arc<dyn Offload>,
    kept: Mutex<VecDeque<Chunk>>,
    turns: [async_lock::Mutex<()>; TURNS],
}

impl Unpacker {
    pub(crate) fn new(place: Arc<dyn Offload>) -> Self {
        Self { place, kept: Mutex::default(), turns: Default::default() }
    }

    /// The content of a chunk of this file.
    pub(crate) async fn read(&self, file: &dyn Storage, chunk: &Packed) -> Result<Arc<Vec<u8>>> {
        let Packed { at, packed_len, len, packing, .. } = *chunk;
        if len > CHUNK_BYTES_MAX || packed_len > CHUNK_BYTES_MAX {
            return Err(Error::corrupt(format!(
                "{}: the compressed chunk at {at:#x} would have {len} bytes in {packed_len}: at most \
                 {CHUNK_BYTES_MAX} are possible",
                file.name()
            )));
        }
        if let Some(content) = self.find(chunk) {
            return Ok(content);
        }
        let turn = usize::try_from(at / 512 % TURNS as u64).expect("one of them");
        let _turn = self.turns[turn].lock().await;
        if let Some(content) = self.find(chunk) {
            return Ok(content); // another request was first
        }
        let packed = read_at(file, at, packed_len).await?;
        let len = usize::try_from(len).expect("bounded above");
        let unpacked = offload(&*self.place, move || unpack(packing, &packed, len)).await;
        let unpacked = Arc::new(
            unpacked.context(|| format!("{}: the compressed chunk at {at:#x} is damaged", file.name()))?,
        );
        let mut kept = lock(&self.kept);
        let bytes = |kept: &VecDeque<Chunk>| kept.iter().map(|(_, content)| content.len()).sum::<usize>();
        while bytes(&kept) + len > KEPT_BYTES && !kept.is_empty() {
            kept.pop_front();
        }
        kept.push_back(((chunk.file, at), unpacked.clone()));
        Ok(unpacked)
    }

    fn find(&self, chunk: &Packed) -> Option<Arc<Vec<u8>>> {
        let kept = lock(&self.kept);
        let is_it =
            |(key, content): &&Chunk| *key == (chunk.file, chunk.at) && content.len() as u64 == chunk.len;
        kept.iter().find(is_it).map(|(_, content)| content.clone())
    }
}

/// The content of a chunk, which has this many bytes. What follows in the input is ignored.
fn unpack(packing: Packing, packed: &[u8], len: usize) -> Result<Vec<u8>> {
    let mut content = vec![0; len];
    if packing == Packing::Bzip2 {
        // Stops when the content is full.
        let mut reader = bzip2::bufread::BzDecoder::new(packed);
        let read = std::io::Read::read_exact(&mut reader, &mut content);
        return read.map(|()| content).map_err(|error| Error::corrupt(format!("bzip2: {error}")));
    }
    let mut inflate = flate2::Decompress::new(packing == Packing::Zlib);
    let progress = |state: &flate2::Decompress| (state.total_in(), state.total_out());
    while inflate.total_out() < len as u64 {
        let before = progress(&inflate);
        let input = usize::try_from(before.0).expect("within the input");
        let output = usize::try_from(before.1).expect("within the output");
        let status = inflate
            .decompress(&packed[input..], &mut content[output..], flate2::FlushDecompress::None)
            .map_err(|error| Error::corrupt(format!("deflate: {error}")))?;
        let is_over = status == flate2::Status::StreamEnd || progress(&inflate) == before;
        if is_over && inflate.total_out() < len as u64 {
            return Err(Error::corrupt(format!("it ends after {} of {len} bytes", inflate.total_out())));
        }
    }
    Ok(content)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use futures_lite::future::block_on;
    use vellum_core::{ErrorKind, Inline, MemoryStorage};

    use super::*;

    fn zlib(content: &[u8]) -> Vec<u8> {
        let mut writer = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::fast());
        writer.write_all(content).unwrap();
        writer.finish().unwrap()
    }

    #[test]
    fn a_chunk_is_whole_or_an_error() {
        let content: Vec<u8> = (0..100_000_u32).flat_map(|number| number.to_le_bytes()).collect();
        let packed = zlib(&content);
        assert_eq!(unpack(Packing::Zlib, &packed, content.len()).unwrap(), content);
        assert_eq!(unpack(Packing::Zlib, &packed, 1000).unwrap(), content[..1000], "what follows is ignored");
        for (damaged, len) in [
            (&packed[..packed.len() / 2], content.len()),
            (&packed[..], content.len() + 1),
            (&packed[2..], content.len()),
            (&[], 1),
        ] {
            let error = unpack(Packing::Zlib, damaged, len).expect_err("it is damaged");
            assert_eq!(error.kind(), ErrorKind::Corrupt);
        }
    }

    #[test]
    fn what_is_kept_is_bounded_and_never_that_of_another_chunk() {
        let unpacker = Unpacker::new(Arc::new(Inline));
        let contents: Vec<Vec<u8>> = (0..9_u8).map(|index| vec![index; 1 << 20]).collect();
        let (mut file, mut chunks) = (Vec::new(), Vec::new());
        for content in &contents {
            let packed = zlib(content);
            let (at, packed_len) = (file.len() as u64, packed.len() as u64);
            chunks.push(Packed { file: 0, at, packed_len, len: 1 << 20, packing: Packing::Zlib });
            file.extend(packed);
        }
        let storage = MemoryStorage::holding("chunks", &file);
        for _ in 0..2 {
            for (chunk, content) in chunks.iter().zip(&contents) {
                assert_eq!(*block_on(unpacker.read(&*storage, chunk)).unwrap(), *content);
                assert!(lock(&unpacker.kept).len() <= 4);
            }
        }
        let longer = Packed { len: (1 << 20) + 1, ..chunks[8] };
        assert!(block_on(unpacker.read(&*storage, &longer)).is_err(), "the kept one is shorter");
        for bomb in [
            Packed { len: CHUNK_BYTES_MAX + 1, ..chunks[0] },
            Packed { packed_len: u64::MAX, ..chunks[0] },
            Packed { at: u64::MAX - 1, ..chunks[0] },
        ] {
            let error = block_on(unpacker.read(&*storage, &bomb)).expect_err("it is refused");
            assert_eq!(error.kind(), ErrorKind::Corrupt);
        }
    }
}
