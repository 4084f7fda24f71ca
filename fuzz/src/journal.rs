//! Records that somebody made up, in the journal of an image that was not closed.
//!
//! ```text
//!   │ shape │ record │ record │ …        a record: its block, sequence, tail, flags, items; the checksum is made right
//! ```
//!
//! Whatever is in the journal, recovery ends with an error or with an image that can be opened, read, written and closed;
//! what its tables then say is the affair of the check.

use std::sync::OnceLock;

use futures_lite::future::block_on;
use vellum_core::{Buffer, Disk, GuestOffset, ImageOffset, MemoryStorage, WriteFlags};
use vellum_format::qcow2::{CreateOptions, Header, OpenOptions, create};
use vellum_format::report::Repair;

use crate::Image;
use crate::bytes::Bytes;

const RECORDS_MAX: usize = 8;
const BLOCK: u64 = 4096;
const HEADER_LEN: usize = 80;

/// The target.
pub fn qcow2_journal(data: &[u8]) {
    crate::bounded(|| block_on(run(Bytes::of(data))));
}

/// An image that was written, flushed and left, and where its journal begins.
fn unclosed() -> &'static (Vec<u8>, u64) {
    static UNCLOSED: OnceLock<(Vec<u8>, u64)> = OnceLock::new();
    UNCLOSED.get_or_init(|| {
        block_on(async {
            let storage = MemoryStorage::new("image");
            let options = CreateOptions {
                size: 256 << 10,
                cluster_size: 4096,
                journal: Some(64 << 10),
                ..CreateOptions::without_journal()
            };
            create(&*storage, None, &options).await.expect("good options");
            let image =
                Image { storage: storage.clone(), data_file: MemoryStorage::new("none"), has_base: false };
            let disk = image.open(OpenOptions::default()).await.expect("a new image");
            for at in [0, 100_000, 8192] {
                let data = Buffer::copy_of(&[7; 5000]);
                disk.write(GuestOffset::new(at), data, WriteFlags::FUA).await.expect("there is room");
            }
            drop(disk);
            let bytes = storage.content().to_vec();
            let journal = bytes.windows(8).step_by(512).position(|magic| magic == b"VELLUMJ1");
            (bytes, journal.expect("it has records") as u64 * 512)
        })
    })
}

async fn run(mut bytes: Bytes<'_>) {
    let (content, journal) = unclosed();
    let storage = MemoryStorage::holding("image", content);
    let image = Image { storage, data_file: MemoryStorage::new("none"), has_base: false };
    for _ in 0..RECORDS_MAX {
        if bytes.is_empty() {
            break;
        }
        let at = ImageOffset::new(journal + u64::from(bytes.byte() % 16) * BLOCK);
        image.storage.write(at, Buffer::copy_of(&record(&mut bytes))).await.expect("memory");
    }
    let Ok(disk) = image.open(OpenOptions::default()).await else { return };
    let size = usize::try_from(disk.geometry().size).expect("small");
    let _ = disk.read(GuestOffset::ZERO, Buffer::zeroed(size)).await;
    let _ = disk.write(GuestOffset::new(4000), Buffer::copy_of(&[9; 3000]), WriteFlags::FUA).await;
    let _ = disk.close().await;
    drop(disk);
    let header = Header::read(&*image.storage).await.expect("recovery leaves the header whole");
    if !header.needs_replay() {
        let _ = image.check(Repair::All).await;
    }
}

/// A record whose checksum is right and whose rest is anybody's guess.
pub(crate) fn record(bytes: &mut Bytes<'_>) -> Vec<u8> {
    let mut record = b"VELLUMJ1".to_vec();
    record.extend(1u64.to_be_bytes()); // the generation
    let sequence = u64::from(bytes.byte());
    let durable = sequence.saturating_sub(u64::from(bytes.byte() % 4));
    let tail = sequence.saturating_sub(u64::from(bytes.byte() % 8));
    record.extend([sequence, durable, tail].into_iter().flat_map(u64::to_be_bytes));
    let [items, flags] = bytes.array();
    record.extend([0; 4]); // the length
    record.extend(u32::from(flags % 2).to_be_bytes());
    record.extend(u32::from(items % 8).to_be_bytes());
    record.extend([0; 12]); // the checksum, and zeros
    record.extend(crate::KEY.to_be_bytes());
    for _ in 0..items % 8 {
        item(bytes, &mut record);
    }
    let len = u32::try_from(record.len()).expect("short");
    record[40..44].copy_from_slice(&len.to_be_bytes());
    debug_assert!(record.len() >= HEADER_LEN);
    let crc = crc32c::crc32c(&record);
    record[52..56].copy_from_slice(&crc.to_be_bytes());
    record
}

fn item(bytes: &mut Bytes<'_>, record: &mut Vec<u8>) {
    let [kind, count, shift] = bytes.array();
    let place = bytes.number() << (shift % 48);
    let count = if count == 255 { u32::MAX } else { u32::from(count % 5) };
    record.extend(u32::from(kind % 8).to_be_bytes());
    record.extend(count.to_be_bytes());
    record.extend(place.to_be_bytes());
    let body = match kind % 8 {
        1 => count.min(4) as usize * 8,
        3 => (count.min(4) as usize).next_multiple_of(2) * 4,
        6 => count.min(2) as usize * 512,
        _ => 8,
    };
    for _ in 0..body / 8 {
        let word = bytes.number() << (bytes.byte() % 56);
        record.extend(word.to_be_bytes());
    }
}
