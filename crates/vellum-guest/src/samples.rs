//! Small file systems, made by hand, for fuzzing and for tests where no `mkfs` is.
//!
//! ```text
//!   ext     block 1 superblock   2 descriptors   3, 4 inodes   5 /   6 /d   7 extents of /d/f   8, 9 /old   10 … data   40 … journal
//!   XFS     block 0 superblock   4, 5 inodes   6 /d   7 extents of /d/f   20 … data   40 … log
//! ```

pub mod log;

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

fn put_be16(bytes: &mut [u8], at: usize, value: u16) {
    bytes[at..at + 2].copy_from_slice(&value.to_be_bytes());
}

fn put_be64(bytes: &mut [u8], at: usize, value: u64) {
    bytes[at..at + 8].copy_from_slice(&value.to_be_bytes());
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

/// An extent of XFS: where it is in the file, the blocks, and whether they were written.
fn xfs_extent(bytes: &mut [u8], at: usize, (offset, block, count): (u64, u64, u64), is_written: bool) {
    put_be64(bytes, at, u64::from(!is_written) << 63 | offset << 9);
    put_be64(bytes, at + 8, block << 21 | count);
}

/// The same tree in XFS: `/d` is a block, `/d/f` has a B-tree with three runs, of which one was never written, `/old` two
/// extents in its inode, and `/link` leads to `/d`. Version 5 or 4, and a log that is empty.
pub fn xfs(is_v5: bool) -> Vec<u8> {
    let mut image = vec![0; BLOCK * usize::from(BLOCKS)];
    let words = [
        (0, 0x5846_5342),
        (4, 1024),
        (12, 64),
        (52, 40),
        (60, 16),
        (84, 64),
        (88, 1),
        (96, 8),
        (216, u32::from(is_v5)),
    ];
    words.into_iter().for_each(|(at, value)| put_be32(&mut image, at, value));
    put_be16(&mut image, 100, if is_v5 { 0xb4a5 } else { 0xb4a4 });
    put_be16(&mut image, 104, 256);
    image[120..125].copy_from_slice(&[10, 9, 8, 2, 6]);
    put_be32(&mut image, 200, if is_v5 { 0 } else { 0x200 });
    let core = if is_v5 { 176 } else { 100 };
    let inode = |number: usize| number * 256;
    for (number, mode, form, size, extents) in [
        (16, 0x41ed, 1, 40, 0),
        (17, 0x41ed, 2, 1024, 1),
        (18, 0x81a4, 3, 9 * 1024 + 100, 3),
        (19, 0x81a4, 2, 14 * 1024, 2),
        (20, 0xa1ff, 1, 2, 0),
    ] {
        let its = &mut image[inode(number)..inode(number + 1)];
        put_be16(its, 0, 0x494e);
        put_be16(its, 2, mode);
        its[4..6].copy_from_slice(&[if is_v5 { 3 } else { 2 }, form]);
        put_be32(its, 32, 2_000);
        put_be32(its, 40, 1_000);
        put_be64(its, 56, size);
        put_be32(its, 76, extents);
        if is_v5 {
            put_be64(its, 152, number as u64);
        }
    }
    // The root: three entries, short numbers, itself as parent; then each with its place, name, type and number.
    let mut root = vec![3, 0, 0, 0, 0, 16];
    for (name, kind, number) in [(&b"d"[..], 2, 17_u8), (b"old", 1, 19), (b"link", 7, 20)] {
        root.push(u8::try_from(name.len()).expect("short"));
        root.extend_from_slice(&[0, 0x60]);
        root.extend_from_slice(name);
        root.extend_from_slice(&[kind, 0, 0, 0, number]);
    }
    image[inode(16) + core..][..root.len()].copy_from_slice(&root);
    xfs_extent(&mut image, inode(17) + core, (0, 6, 1), true);
    xfs_extent(&mut image, inode(19) + core, (0, 10, 1), true);
    xfs_extent(&mut image, inode(19) + core + 16, (13, 12, 1), true);
    image[inode(20) + core..][..2].copy_from_slice(b"/d");
    // The root of the tree: one level, one pointer, behind as many keys as there is room for.
    let room = (256 - core - 4) / 16;
    put_be16(&mut image, inode(18) + core, 1);
    put_be16(&mut image, inode(18) + core + 2, 1);
    put_be64(&mut image, inode(18) + core + 4 + 8 * room, 7);
    let leaf = &mut image[7 * BLOCK..8 * BLOCK];
    put_be32(leaf, 0, if is_v5 { 0x424d_4133 } else { 0x424d_4150 });
    put_be16(leaf, 6, 3);
    let header = if is_v5 { 72 } else { 24 };
    for (index, (extent, is_written)) in
        [((0, 20, 2), true), ((3, 24, 4), false), ((8, 30, 4), true)].into_iter().enumerate()
    {
        xfs_extent(leaf, header + 16 * index, extent, is_written);
    }
    let directory = &mut image[6 * BLOCK..7 * BLOCK];
    put_be32(directory, 0, if is_v5 { 0x5844_4233 } else { 0x5844_3242 });
    let mut at = if is_v5 { 64 } else { 16 };
    for (name, number) in [(&b"."[..], 17), (b"..", 16), (b"f", 18), (b"the same", 18)] {
        put_be64(directory, at, number);
        directory[at + 8] = u8::try_from(name.len()).expect("short");
        directory[at + 9..at + 9 + name.len()].copy_from_slice(name);
        at += (12 + name.len()).next_multiple_of(8);
    }
    // What is unused, up to an index of four entries.
    let end = BLOCK - 8 - 4 * 8;
    put_be16(directory, at, 0xffff);
    put_be16(directory, at + 2, u16::try_from(end - at).expect("a block"));
    put_be32(directory, BLOCK - 8, 4);
    // One record in the log: its header, and the unmount.
    let log = &mut image[40 * BLOCK..];
    for (at, value) in [(0, 0xfeed_babe), (4, 1), (8, 2), (12, 512), (40, 1), (320, 32 << 10), (512, 1)] {
        put_be32(log, at, value);
    }
    log[512 + 9] = 0x20;
    image
}
