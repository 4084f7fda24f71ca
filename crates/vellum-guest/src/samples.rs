//! A small file system, made by hand, for fuzzing and for tests where no `mkfs` is.
//!
//! ```text
//!   block 1 superblock   2 descriptors   3, 4 inodes   5 /   6 /d   7 extents of /d/f   8, 9 /old   10 … data   40 … journal
//! ```

const BLOCK: usize = 1024;
const BLOCKS: u16 = 64;
const JOURNAL: u16 = 40;
const JOURNAL_BLOCKS: u16 = 8;

fn put16(bytes: &mut [u8], at: usize, value: u16) {
    bytes[at..at + 2].copy_from_slice(&value.to_le_bytes());
}

fn put32(bytes: &mut [u8], at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

fn put_be32(bytes: &mut [u8], at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_be_bytes());
}

/// An extents node: an extent each, or the blocks of nodes below.
fn extents(bytes: &mut [u8], depth: u16, entries: &[(u32, u16, u32)]) {
    put16(bytes, 0, 0xf30a);
    put16(bytes, 2, u16::try_from(entries.len()).expect("a few"));
    put16(bytes, 4, 4);
    put16(bytes, 6, depth);
    for (index, (logical, count, physical)) in entries.iter().enumerate() {
        let at = 12 * (index + 1);
        put32(bytes, at, *logical);
        if depth == 0 {
            put16(bytes, at + 4, *count);
            put32(bytes, at + 8, *physical);
        } else {
            put32(bytes, at + 4, *physical);
        }
    }
}

fn directory(bytes: &mut [u8], entries: &[(u32, &[u8])]) {
    let mut at = 0;
    for (index, (inode, name)) in entries.iter().enumerate() {
        let len =
            if index + 1 == entries.len() { bytes.len() - at } else { (8 + name.len()).next_multiple_of(4) };
        put32(bytes, at, *inode);
        put16(bytes, at + 4, u16::try_from(len).expect("a block"));
        bytes[at + 6] = u8::try_from(name.len()).expect("short");
        bytes[at + 8..at + 8 + name.len()].copy_from_slice(name);
        at += len;
    }
}

/// `/d/f` has three runs, of which one was never written, `/old` indirect blocks, and `/link` leads to `/d`. With a
/// journal, `/d` is in it alone.
pub fn ext(has_journal: bool) -> Vec<u8> {
    let mut image = vec![0; BLOCK * usize::from(BLOCKS)];
    let sup = &mut image[1024..2048];
    for (at, value) in
        [(0, 16), (0x4, BLOCKS.into()), (0x14, 1), (0x20, 8192), (0x28, 16), (0x4c, 1), (0x60, 0x42)]
    {
        put32(sup, at, value);
    }
    put16(sup, 0x38, 0xef53);
    put16(sup, 0x58, 128);
    put32(sup, 0xe0, 8);
    if has_journal {
        put32(sup, 0x60, 0x46);
    }
    put32(&mut image[2 * BLOCK..], 8, 3);
    let inode = |number: usize| 3 * BLOCK + (number - 1) * 128;
    let mut make = |number: usize, mode: u16, size: u32, flags: u32| {
        put16(&mut image[inode(number)..], 0, mode);
        put32(&mut image[inode(number)..], 4, size);
        put32(&mut image[inode(number)..], 0x20, flags);
        for (at, time) in [(0x8, 2_000), (0x10, 1_000)] {
            put32(&mut image[inode(number)..], at, time);
        }
    };
    make(2, 0x41ed, 1024, 0x8_0000);
    make(8, 0x8180, u32::from(JOURNAL_BLOCKS) * 1024, 0x8_0000);
    make(11, 0x41ed, 1024, 0x8_0000);
    make(12, 0x81a4, 9 * 1024 + 100, 0x8_0000);
    make(13, 0x81a4, 14 * 1024, 0);
    make(14, 0xa1ff, 2, 0);
    let root = |number: usize| inode(number) + 0x28;
    extents(&mut image[root(2)..], 0, &[(0, 1, 5)]);
    extents(&mut image[root(8)..], 0, &[(0, JOURNAL_BLOCKS, JOURNAL.into())]);
    extents(&mut image[root(11)..], 0, &[(0, 1, 6)]);
    extents(&mut image[root(12)..], 1, &[(0, 0, 7)]);
    extents(&mut image[7 * BLOCK..8 * BLOCK], 0, &[(0, 2, 20), (3, 32768 + 4, 24), (8, 4, 30)]);
    put32(&mut image[root(13)..], 0, 10);
    put32(&mut image[root(13)..], 48, 8);
    put32(&mut image[8 * BLOCK..], 4, 12);
    image[root(14)..root(14) + 2].copy_from_slice(b"/d");
    directory(
        &mut image[5 * BLOCK..6 * BLOCK],
        &[(2, b"."), (2, b".."), (11, b"d"), (13, b"old"), (14, b"link")],
    );
    let mut its = vec![0; BLOCK];
    directory(&mut its, &[(11, b"."), (2, b".."), (12, b"f"), (12, b"the same")]);
    if !has_journal {
        image[6 * BLOCK..7 * BLOCK].copy_from_slice(&its);
        return image;
    }
    let header = |block: &mut [u8], kind: u32, sequence: u32| {
        for (at, value) in [(0, 0xc03b_3998), (4, kind), (8, sequence)] {
            put_be32(block, at, value);
        }
    };
    let mut log: Vec<&mut [u8]> = image[usize::from(JOURNAL) * BLOCK..]
        [..usize::from(JOURNAL_BLOCKS) * BLOCK]
        .chunks_mut(BLOCK)
        .collect();
    header(log[0], 4, 0);
    for (at, value) in [(0xc, 1024), (0x10, JOURNAL_BLOCKS.into()), (0x14, 1), (0x18, 7), (0x1c, 2)] {
        put_be32(log[0], at, value);
    }
    header(log[2], 1, 7);
    // Block 6, the last tag, with the same id.
    put_be32(log[2], 12, 6);
    put_be32(log[2], 16, 2 | 8);
    log[3].copy_from_slice(&its);
    header(log[4], 2, 7);
    // A transaction that was not committed takes it away.
    header(log[5], 5, 8);
    put_be32(log[5], 12, 20);
    put_be32(log[5], 16, 6);
    image
}

/// The same in a partition of an MBR, and behind a logical one.
pub fn partitioned() -> Vec<u8> {
    let system = ext(false);
    let mut disk = vec![0; 16 << 10];
    disk.extend_from_slice(&system);
    let sectors = u32::try_from(system.len() / 512).expect("small");
    for (table, index, kind, first, count) in
        [(0, 0, 0x83, 32, sectors), (0, 1, 5, 8, 16), (8, 0, 0x83, 1, 8)]
    {
        let at = table * 512 + 446 + 16 * index;
        disk[at + 4] = kind;
        put32(&mut disk, at + 8, first);
        put32(&mut disk, at + 12, count);
        disk[table * 512 + 510..table * 512 + 512].copy_from_slice(&[0x55, 0xaa]);
    }
    disk
}
