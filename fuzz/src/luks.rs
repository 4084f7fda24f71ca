//! LUKS headers: parsed, written again, and described as an image that has nothing behind them.
//!
//! An input that begins as one of version 2 is also taken for its JSON alone, under a checksum that is right: no random change of
//! a whole header keeps that.

use std::sync::Arc;

use futures_lite::future::block_on;
use vellum_core::memory::SparseBytes;
use vellum_core::{ImageOffset, Limits, MemoryStorage, Random, Result, SharedStorage};
use vellum_format::FormatKind;
use vellum_luks::luks2::{COPY_LENS, Header2, PREAMBLE_LEN, Slot2, put_checksum};
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

/// A copy of a header of version 2 at this place, with this JSON.
pub fn copy_of_version_2(at: u64, json: &[u8]) -> Vec<u8> {
    let len = COPY_LENS[0];
    let mut copy = vec![0; usize::try_from(len).expect("16 KiB")];
    copy[..8].copy_from_slice(if at == 0 { b"LUKS\xBA\xBE\0\x02" } else { b"SKUL\xBA\xBE\0\x02" });
    copy[8..16].copy_from_slice(&len.to_be_bytes());
    copy[23] = 1 + u8::from(at != 0);
    copy[72..78].copy_from_slice(b"sha256");
    copy[256..264].copy_from_slice(&at.to_be_bytes());
    let json = &json[..json.len().min(copy.len() - PREAMBLE_LEN)];
    copy[PREAMBLE_LEN..][..json.len()].copy_from_slice(json);
    put_checksum(&mut copy);
    copy
}

fn version_2(json: &[u8]) {
    let copy = copy_of_version_2(0, json);
    let Ok(header) = Header2::parse(&copy, 0) else { return };
    let segment = header.segment();
    let mut last = 2 * COPY_LENS[0];
    let mut places: Vec<_> = header.slots().iter().filter_map(Slot2::material).collect();
    places.sort_unstable();
    for (at, len) in places {
        assert!(at >= last && len <= 64 * 4000, "each slot has its own place");
        last = at + len as u64;
    }
    assert!(last <= segment.at && segment.sector_bytes <= 4096);
    assert!(header.slots().iter().all(|slot| slot.material().is_some() != slot.trouble().is_some()));
    let _bounded = header.check_work();
    // With the second copy behind it, as a file.
    let second = copy_of_version_2(COPY_LENS[0], json);
    let mut content = SparseBytes::default();
    content.write(ImageOffset::ZERO, &[copy, second].concat());
    content.set_len(segment.at.min(1 << 47) + 8192);
    crate::bounded(|| {
        let storage: SharedStorage = MemoryStorage::with("image", Limits::plain(), content);
        block_on(async {
            let Ok(head) = FormatKind::Luks.format().read(&*storage).await else { return };
            head.facts(&*storage).await.expect("the header was read");
        });
    });
}

/// The target. The last byte makes the file longer than its bytes, so that the data may seem to lie inside.
pub fn luks_header(data: &[u8]) {
    let Some((stretch, data)) = data.split_last() else { return };
    if let Some(json) = data.strip_prefix(b"LUKS\xBA\xBE\0\x02") {
        version_2(json);
    }
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
            assert!(head.size() < storage.len() && head.size().is_multiple_of(512), "{}", head.size());
            head.facts(&*storage).await.expect("the header was read");
        });
    });
}
