//! Header and snapshot table alone. They are where most of what an image claims is believed or not.

use futures_lite::future::block_on;
use vellum_core::ImageOffset;
use vellum_core::memory::SparseBytes;
use vellum_core::{Limits, MemoryStorage, SharedStorage};
use vellum_format::probe;
use vellum_format::qcow2::{Header, snapshot};

/// The target. The last byte makes the file longer than its bytes, so that tables may seem to lie inside.
pub fn qcow2_header(data: &[u8]) {
    let Some((stretch, data)) = data.split_last() else { return };
    let mut content = SparseBytes::default();
    content.write(ImageOffset::ZERO, data);
    content.set_len(data.len() as u64 + (1_u64 << (stretch % 48)) - 1);
    crate::bounded(|| {
        let storage: SharedStorage = MemoryStorage::with("image", Limits::plain(), content);
        block_on(async {
            let _ = probe(&*storage).await;
            let Ok(header) = Header::read(&*storage).await else { return };
            assert!(header.size() < 1 << 63, "a disk that can be addressed");
            let names = [header.backing_file(), header.backing_format(), header.data_file()];
            assert!(names.into_iter().flatten().all(|name| name.len() < 1 << 16), "names are short");
            let _ = header.bitmaps();
            if let Ok(snapshots) = snapshot::list(&header, &*storage).await {
                assert!(snapshots.len() <= 65_536, "no more than QEMU makes");
            }
        });
    });
}
