//! A chunk as it lies in a store, under the digest of its content.
//!
//! ```text
//!    0   4  "VTCK"          4   1  version, 1        5   1  codec: 0 as it is, 1 zstd        6   2  zero
//!    8   4  length of the content in bytes
//!   12   …  the content, compressed with one frame of zstd where that makes it shorter
//! ```
//!
//! 1. A chunk is at most [`OVERHEAD`] bytes longer than its content.
//! 2. [`decode`] allocates as much as the index says the chunk has, whatever the chunk itself says, and returns
//!    the content only when its digest is the one that the index has.

use bytes::Bytes;
use vellum_core::{Error, Result};

use super::index::Digest;

/// What a chunk has besides its content.
pub const OVERHEAD: u64 = 12;

/// How much zstd tries. Level 3 compresses about as fast as one core reads from an SSD.
const LEVEL: i32 = 3;

const MAGIC: &[u8; 4] = b"VTCK";
const VERSION: u8 = 1;
const AS_IT_IS: u8 = 0;
const ZSTD: u8 = 1;

/// The object for some content.
pub fn encode(content: &[u8]) -> Bytes {
    let len = u32::try_from(content.len()).expect("a chunk is small");
    // It cannot fail but for want of memory; then the content is stored as it is.
    let compressed = zstd::bulk::compress(content, LEVEL).ok().filter(|bytes| bytes.len() < content.len());
    let (codec, payload) = match &compressed {
        Some(bytes) => (ZSTD, bytes.as_slice()),
        None => (AS_IT_IS, content),
    };
    let mut object = Vec::with_capacity(payload.len() + 12);
    object.extend_from_slice(MAGIC);
    object.extend_from_slice(&[VERSION, codec, 0, 0]);
    object.extend_from_slice(&len.to_be_bytes());
    object.extend_from_slice(payload);
    object.into()
}

/// The content of an object, which must have this length and digest.
///
/// # Errors
/// `Corrupt` when it is something else.
pub fn decode(object: &Bytes, len: usize, digest: Digest) -> Result<Bytes> {
    let bad = |what: &str| Error::corrupt(format!("it is not the chunk that it is named after: {what}"));
    let header = object.get(..12).ok_or_else(|| bad("it is too short"))?;
    if &header[..4] != MAGIC || header[4] != VERSION || header[6..8] != [0, 0] {
        return Err(bad("it does not begin as one"));
    }
    if usize::try_from(u32::from_be_bytes(header[8..].try_into().expect("four bytes"))) != Ok(len) {
        return Err(bad("its length is another"));
    }
    let payload = object.slice(12..);
    let content = match header[5] {
        AS_IT_IS => payload,
        ZSTD => zstd::bulk::decompress(&payload, len).map_err(|_| bad("it cannot be decompressed"))?.into(),
        _ => return Err(bad("it is compressed in an unknown way")),
    };
    if content.len() != len || Digest::of(&content) != digest {
        return Err(bad("its content has another digest"));
    }
    Ok(content)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        vellum_core::Random::from_seed(7).fill(&mut bytes);
        bytes
    }

    #[test]
    fn content_comes_back_compressed_or_not() {
        for content in [vec![], vec![7; 65536], noise(65536), noise(1)] {
            let object = encode(&content);
            assert!(object.len() as u64 <= content.len() as u64 + OVERHEAD);
            let back = decode(&object, content.len(), Digest::of(&content)).expect("it is the chunk");
            assert_eq!(back, content);
        }
        assert!(encode(&vec![7; 65536]).len() < 1000);
    }

    #[test]
    fn an_object_that_is_something_else_is_refused() {
        let content = vec![7; 65536];
        let (object, digest) = (encode(&content), Digest::of(&content));
        for at in 0..object.len() {
            let mut bytes = object.to_vec();
            bytes[at] ^= 1;
            // A bit of the frame's own header may mean nothing. Then the content is still the right one.
            if let Ok(back) = decode(&bytes.into(), content.len(), digest) {
                assert_eq!(back, content, "byte {at}");
            }
        }
        for len in 0..object.len() {
            assert!(decode(&object.slice(..len), content.len(), digest).is_err(), "the first {len} bytes");
        }
        assert!(decode(&object, content.len(), Digest::of(b"other")).is_err());
    }

    #[test]
    fn a_bomb_fills_no_more_than_the_index_allows() {
        let bomb = encode(&vec![0; 4 << 20]);
        let mut forged = bomb.to_vec();
        forged[8..12].copy_from_slice(&65536_u32.to_be_bytes());
        let error = decode(&forged.into(), 65536, Digest::of(&[0; 65536])).expect_err("it is longer");
        assert!(error.chain().contains("cannot be decompressed"), "{}", error.chain());
    }
}
