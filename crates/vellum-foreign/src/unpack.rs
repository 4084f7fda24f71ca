//! Compressed chunks: unpacked as a whole, where long computations run, and kept for a while, because guests
//! read in smaller pieces.
//!
//! 1. A chunk is at most [`CHUNK_BYTES_MAX`] long, packed and unpacked. The unpacker has a buffer of the stated
//!    length and stops when it is full, so no input grows without bound.
//! 2. No more of a chunk is read than its content can take at worst, whatever length is stated for it.
//! 3. Chunks of more than [`BIG_BYTES`] are unpacked one at a time: an image has at most the largest and 16 of those in
//!    memory at once.
//! 4. A chunk that ends early, or is damaged, is an error, never zeros. A checksum behind content that ends where it
//!    must is compared.
//! 5. When several requests need one chunk, the first of them unpacks it for all.

use std::collections::VecDeque;
use std::io::Read as _;
use std::sync::{Arc, Mutex};

use vellum_core::{Context, Error, Offload, Result, Storage, lock, offload};

use crate::bytes::{beyond, read_at};

/// The longest chunk, in bytes, as in QEMU.
pub(crate) const CHUNK_BYTES_MAX: u64 = 64 << 20;

/// Unpacked chunks in memory take at most this many bytes, but at least one chunk is kept.
const KEPT_BYTES: usize = 4 << 20;

/// Requests for this many different chunks are unpacked at once.
const TURNS: usize = 16;

/// Of longer chunks one is unpacked at once.
const BIG_BYTES: u64 = 4 << 20;

/// The most bytes that content of this length takes when it is compressed: what cannot be made shorter has a few bytes
/// in front of every few thousand (deflate), or grows by a hundredth (bzip2).
fn packed_max(len: u64) -> u64 {
    len + len / 16 + 4096
}

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
    big: async_lock::Mutex<()>,
}

impl Unpacker {
    pub(crate) fn new(place: Arc<dyn Offload>) -> Self {
        Self { place, kept: Mutex::default(), turns: Default::default(), big: async_lock::Mutex::new(()) }
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
        let _alone = match len > BIG_BYTES {
            true => Some(self.big.lock().await),
            false => None,
        };
        if at.checked_add(packed_len).is_none_or(|end| end > file.len()) {
            return Err(beyond(file, at, packed_len));
        }
        let packed = read_at(file, at, packed_len.min(packed_max(len))).await?;
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
    // With a byte more, into which nothing goes where the content ends as it must: the checksum behind it is seen then.
    let mut content = vec![0; len + 1];
    if packing == Packing::Bzip2 {
        let mut reader = bzip2::bufread::BzDecoder::new(packed);
        let read = reader.read_exact(&mut content[..len]).and_then(|()| reader.read(&mut content[len..]));
        read.map_err(|error| Error::corrupt(format!("bzip2: {error}")))?;
    } else {
        inflate(flate2::Decompress::new(packing == Packing::Zlib), packed, &mut content)?;
    }
    content.truncate(len);
    Ok(content)
}

/// Fills all but the last byte, and that too where the content is longer.
fn inflate(mut state: flate2::Decompress, packed: &[u8], content: &mut [u8]) -> Result<()> {
    let len = content.len() as u64 - 1;
    let progress = |state: &flate2::Decompress| (state.total_in(), state.total_out());
    while state.total_out() <= len {
        let before = progress(&state);
        let input = usize::try_from(before.0).expect("within the input");
        let output = usize::try_from(before.1).expect("within the output");
        let status = state
            .decompress(&packed[input..], &mut content[output..], flate2::FlushDecompress::None)
            .map_err(|error| Error::corrupt(format!("deflate: {error}")))?;
        if status == flate2::Status::StreamEnd || progress(&state) == before {
            break;
        }
    }
    match state.total_out() < len {
        true => Err(Error::corrupt(format!("it ends after {} of {len} bytes", state.total_out()))),
        false => Ok(()),
    }
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
    fn a_wrong_checksum_is_an_error() {
        let content = [5; 3000];
        let mut writer = bzip2::write::BzEncoder::new(Vec::new(), bzip2::Compression::best());
        writer.write_all(&content).unwrap();
        for (packing, packed) in [(Packing::Zlib, zlib(&content)), (Packing::Bzip2, writer.finish().unwrap())]
        {
            assert_eq!(unpack(packing, &packed, content.len()).unwrap(), content);
            let mut damaged = packed.clone();
            *damaged.last_mut().unwrap() ^= 0x80;
            damaged[packed.len() - 3] ^= 1;
            let error = unpack(packing, &damaged, content.len()).expect_err("the checksum is another one");
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{packing:?}");
        }
    }

    #[test]
    fn no_more_is_read_than_the_content_can_take() {
        let content = [7; 512];
        let mut file = zlib(&content);
        file.resize(usize::try_from(CHUNK_BYTES_MAX).unwrap(), 0);
        let storage = MemoryStorage::holding("chunks", &file);
        let tally = vellum_core::HostTally::default();
        let storage = vellum_core::Tallied::shared(storage, tally.data.clone());
        let unpacker = Unpacker::new(Arc::new(Inline));
        let chunk = Packed { file: 0, at: 0, packed_len: CHUNK_BYTES_MAX, len: 512, packing: Packing::Zlib };
        assert_eq!(*block_on(unpacker.read(&*storage, &chunk)).unwrap(), content);
        let past = Packed { at: 1, ..chunk };
        assert_eq!(
            block_on(unpacker.read(&*storage, &past)).expect_err("past the end").kind(),
            ErrorKind::Corrupt
        );
        let read = tally.data.counts().bytes_read;
        assert!(read <= packed_max(512), "{read} bytes were read");
        // What cannot be compressed fits into what is read.
        let mut noise = vec![0; 1 << 20];
        vellum_core::Random::from_seed(3).fill(&mut noise);
        let mut writer = bzip2::write::BzEncoder::new(Vec::new(), bzip2::Compression::best());
        writer.write_all(&noise).unwrap();
        let packed = [zlib(&noise), writer.finish().unwrap()];
        assert!(packed.iter().all(|packed| packed.len() as u64 <= packed_max(noise.len() as u64)));
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
