//! Templates in stores: the index and the chunks, which anybody who can write to the store can forge.

use std::collections::BTreeMap;

use vellum_remote::template::{Digest, Index, chunk};

/// The target. The first byte says what the others are: an index, an index without its checksum, or a chunk.
pub fn template_store(data: &[u8]) {
    let Some((kind, data)) = data.split_first() else { return };
    crate::bounded(|| match kind % 3 {
        0 => judge(data.to_vec()),
        1 => judge([data, &Digest::of(data).0].concat()),
        _ => {
            let Some((len, object)) = data.split_first_chunk::<4>() else { return };
            let len = usize::try_from(u32::from_be_bytes(*len) % (4 << 20)).expect("small");
            // Right for a content that is stored as it is.
            let digest = Digest::of(object.get(12..).unwrap_or_default());
            if let Ok(content) = chunk::decode(&object.to_vec().into(), len, digest) {
                assert!(content.len() == len && Digest::of(&content) == digest, "only what was asked for");
            }
        }
    });
}

/// What is accepted can be used, and is the only spelling of what it says.
fn judge(bytes: Vec<u8>) {
    let Ok(index) = Index::parse(bytes.clone().into()) else { return };
    assert_eq!(index.digests().count() as u64, index.chunk_count());
    let end = u32::try_from(index.size().div_ceil(index.chunk_size())).expect("chunks are numbered");
    let mut chunks = BTreeMap::new();
    let mut number = 0;
    while number < end {
        let (is_stored, next) = index.run_from(number, end);
        assert!(next > number, "the walk goes on");
        let stored = (number..if is_stored { next } else { number }).map(|number| {
            assert!(index.chunk_len(number) > 0, "no chunk is behind the end");
            (number, index.chunk(number).expect("it is in a run"))
        });
        chunks.extend(stored);
        number = next;
    }
    assert_eq!(chunks.len() as u64, index.chunk_count());
    let shift = index.chunk_size().trailing_zeros();
    let again = Index::build(index.size(), shift, &chunks).expect("it was built before");
    assert_eq!(again, bytes, "one spelling");
}
