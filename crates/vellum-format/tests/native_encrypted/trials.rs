//! A trial of encrypted images, for the tests of the format and for those that seed a mistake.

#![allow(dead_code, reason = "each test file uses its part")]

use std::sync::Arc;

use futures_lite::future::block_on;
use vellum_core::{
    Buffer, Disk, GuestOffset, MemoryStorage, SharedStorage, WriteFlags, ZeroFlags, fill_from_below,
};
use vellum_format::native::{Native, create, recover, resize};

use super::common::native::{NativeSetup, look_native, opening};

const MARK: &[u8] = b"nobody may read this";

pub(crate) fn marks(len: usize) -> Vec<u8> {
    MARK.iter().copied().cycle().take(len).collect()
}

/// Whether any ten bytes of the mark are in the image.
pub(crate) fn is_readable(image: &MemoryStorage) -> bool {
    let bytes = image.content().to_vec();
    let parts = [&MARK[..8], &MARK[6..14], &MARK[12..]];
    bytes.windows(8).any(|window| parts.contains(&window))
}

pub(crate) async fn write(disk: &dyn Disk, at: u64, bytes: &[u8]) {
    disk.write(GuestOffset::new(at), Buffer::copy_of(bytes), WriteFlags::default()).await.unwrap();
}

pub(crate) async fn read(disk: &dyn Disk, at: u64, len: usize) -> Vec<u8> {
    disk.read(GuestOffset::new(at), Buffer::zeroed(len)).await.unwrap().to_vec()
}

/// Whatever way the bytes take: fresh, in place, through the journal, filled in around a write, copied from the base, moved
/// because a snapshot sees them, a part of a sector, into a larger disk. Says what is wrong.
pub(crate) fn nothing_is_readable(mut setup: NativeSetup) -> Result<(), String> {
    let mark = marks(300 << 10);
    let name = setup.name;
    setup.options.size = 512 << 10;
    if let Some(base) = &mut setup.base {
        *base = Arc::new(mark.clone());
        setup.options.base.as_mut().unwrap().size = mark.len() as u64;
    }
    let (has_table, has_base) = (setup.options.has_table, setup.base.is_some());
    let ensure = |holds: bool, what: &str| if holds { Ok(()) } else { Err(format!("{name}: {what}")) };
    block_on(async {
        let image = MemoryStorage::new("image");
        create(&*image, &setup.create_options()).await.unwrap();
        let shared: SharedStorage = image.clone();
        let hidden = |when: &str| ensure(!is_readable(&image), &format!("readable on the medium {when}"));
        let open = async || Native::open(shared.clone(), setup.below(), opening()).await.unwrap();
        let mut disk = open().await;
        for round in 0..3u64 {
            write(&*disk, 0, &mark[..20_000]).await;
            write(&*disk, 1000, &mark[..300]).await;
            disk.flush().await.unwrap();
            // Of a transaction that is not verified yet: where there is a journal it goes through that.
            write(&*disk, 512, &mark[..4096]).await;
            write(&*disk, 0, &mark[..8192]).await;
            write(&*disk, 70_000 + round * 1000, &mark[..10]).await;
            disk.write_zeroes(GuestOffset::new(600).span(100), ZeroFlags::default()).await.unwrap();
            disk.write_zeroes(GuestOffset::new(4096).span(512), ZeroFlags::default()).await.unwrap();
            write(&*disk, 100_000, &mark[..40]).await;
            let filled = fill_from_below(&*disk, GuestOffset::new(128 << 10).span(64 << 10)).await;
            ensure(filled.is_ok(), "a fill")?;
            disk.flush().await.unwrap();
            hidden("after a flush")?;
            if has_table {
                disk.snapshot_create(&format!("s{round}"), round).await.unwrap();
                write(&*disk, 3 * 4096, &mark[..512]).await;
                write(&*disk, 100_100, &mark[..40]).await;
                disk.flush().await.unwrap();
                hidden("beside a snapshot")?;
                let view = disk.snapshot_open(u32::try_from(round + 1).unwrap()).unwrap();
                ensure(read(&*view, 100_000, 40).await == mark[..40], "what a snapshot sees")?;
            }
            ensure(read(&*disk, 1024, 3072).await == mark[1024..4096], "the disk")?;
            if round == 1 {
                disk.close().await.unwrap();
                disk = open().await;
            }
        }
        ensure(read(&*disk, 70_000, 10).await == mark[..10], "a part of a sector")?;
        if has_base {
            ensure(read(&*disk, 128 << 10, 4096).await == mark[128 << 10..][..4096], "a copy of the base")?;
        }
        // Not closed: what a recovery writes is what the journal has.
        drop(disk);
        if has_table || has_base {
            recover(&shared).await.unwrap();
        }
        hidden("after a recovery")?;
        let (report, lines) = look_native(&shared).await.unwrap();
        ensure(report.is_clean(), &lines.join("; "))?;
        // A closed image is made larger without its key, so no snapshot may see its last unit.
        resize(&shared, 1 << 20, false).await.unwrap();
        let disk = open().await;
        write(&*disk, 512 << 10, &mark[..8192]).await;
        ensure(read(&*disk, (512 << 10) + 4096, 4096).await == mark[4096..8192], "the larger disk")?;
        disk.close().await.unwrap();
        hidden("in the larger disk")
    })
}
