//! LUKS headers: parsed, written again, and described as an image that has nothing behind them.

use std::sync::Arc;

use futures_lite::future::block_on;
use vellum_core::memory::SparseBytes;
use vellum_core::{ImageOffset, Limits, MemoryStorage, Random, Result, SharedStorage};
use vellum_format::FormatKind;
use vellum_luks::{HEADER_LEN, Hash, Header, MasterKey, Mode, NewHeader, SLOTS, SectorCipher};

fn new() -> (Header, MasterKey) {
    let mut random = Random::from_seed(1);
    let mut chance = |bytes: &mut [u8]| {
        random.fill(bytes);
        Ok(())
    };
    let mode = Mode::named("xts-plain64").expect("it is known");
    let made: Result<_> =
        NewHeader { mode, key_len: 64, hash: Hash::Sha256, digest_iterations: 1000 }.make(&mut chance);
    made.expect("good options")
}

/// A cipher that is always the same.
pub(crate) fn cipher() -> Arc<SectorCipher> {
    let (header, key) = new();
    Arc::new(SectorCipher::new(header.mode(), &key).expect("a key of its mode"))
}

/// The target. The last byte makes the file longer than its bytes, so that the data may seem to lie inside.
pub fn luks_header(data: &[u8]) {
    let Some((stretch, data)) = data.split_last() else { return };
    if let Ok(header) = Header::parse(data) {
        let again = Header::parse(&header.encode()).expect("what is written can be read");
        assert_eq!(again.encode(), header.encode());
        let mut last = HEADER_LEN as u64;
        let mut places: Vec<(u64, usize)> = (0..SLOTS).map(|slot| header.material(slot)).collect();
        places.sort_unstable();
        for (at, len) in places {
            assert!(at >= last && len <= 64 * 4000, "each slot has its own place");
            last = at + len as u64;
        }
        assert!(last <= header.payload());
    }
    let mut content = SparseBytes::default();
    content.write(ImageOffset::ZERO, data);
    content.set_len(data.len() as u64 + (1_u64 << (stretch % 48)) - 1);
    crate::bounded(|| {
        let storage: SharedStorage = MemoryStorage::with("image", Limits::plain(), content);
        block_on(async {
            let Ok(head) = FormatKind::Luks.format().read(&*storage).await else { return };
            assert!(head.size() < storage.len() && head.size().is_multiple_of(512));
            head.facts(&*storage).await.expect("the header was read");
        });
    });
}
