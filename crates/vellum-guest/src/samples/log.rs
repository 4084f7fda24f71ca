//! A log of XFS that is made here: records with operations of transactions, and a file system whose newest files are in its
//! log alone.
//!
//! ```text
//!   blocks of 1 KiB │ 0 … 39 as in `xfs` │ … │ 64 … 191 the log
//! ```

use super::{BLOCK, put_be16, put_be32, put_be64, put16, put32, xfs};

/// Blocks of the file system with such a log, where its log begins, and how many it has.
const BLOCKS: usize = 192;
const LOG: usize = 64;
const LOG_BLOCKS: usize = BLOCKS - LOG;
const SECTOR: usize = 512;
const MAGIC: u32 = 0xfeed_babe;
const UUID: [u8; 16] = *b"a file system's.";

/// Flags of an operation.
pub mod flag {
    /// Of a transaction's first one.
    pub const START: u8 = 0x1;
    /// Of its last one.
    pub const COMMIT: u8 = 0x2;
    /// The region goes on in the next record.
    pub const CONTINUE: u8 = 0x4;
    /// It went on here.
    pub const CONTINUED: u8 = 0x8;
    /// And ends here.
    pub const END: u8 = 0x10;
}

/// An operation: the transaction's number, flags, data.
pub type Operation = (u32, u8, Vec<u8>);

/// The regions of an item.
pub type Item = Vec<Vec<u8>>;

/// What writes a log.
#[derive(Debug, Clone)]
pub struct LogMaker {
    log: Vec<u8>,
    /// The next block of 512 bytes, and its cycle.
    at: usize,
    cycle: u32,
    tail: u64,
    has_crc: bool,
}

impl LogMaker {
    /// One whose next record is at this block. What was written before is of the cycle before.
    pub fn new(at: usize, cycle: u32, has_crc: bool) -> Self {
        let mut log = vec![0; LOG_BLOCKS * BLOCK];
        for (number, block) in log.chunks_mut(SECTOR).enumerate() {
            put_be32(block, 0, if number < at { cycle } else { cycle - 1 });
        }
        Self { log, at, cycle, tail: u64::from(cycle) << 32 | at as u64, has_crc }
    }

    /// From now on records say that this is the first one that counts.
    pub fn set_tail(&mut self, cycle: u32, at: usize) {
        self.tail = u64::from(cycle) << 32 | at as u64;
    }

    /// Adds a record.
    pub fn record(&mut self, operations: &[Operation]) {
        let mut body = Vec::new();
        for (tid, flags, data) in operations {
            let len = u32::try_from(data.len()).expect("short");
            body.extend_from_slice(&[tid.to_be_bytes(), len.to_be_bytes()].concat());
            body.extend_from_slice(&[0x69, *flags, 0, 0]);
            body.extend_from_slice(data);
        }
        body.resize(body.len().next_multiple_of(SECTOR), 0);
        let mut record = vec![0; SECTOR];
        let (len, count) =
            (u32::try_from(body.len()).expect("short"), u32::try_from(operations.len()).expect("a few"));
        let words = [(0, MAGIC), (4, self.cycle), (8, 2), (12, len), (40, count), (300, 1), (320, 32 << 10)];
        words.into_iter().for_each(|(at, value)| put_be32(&mut record, at, value));
        put_be64(&mut record, 16, u64::from(self.cycle) << 32 | self.at as u64);
        put_be64(&mut record, 24, self.tail);
        record[304..320].copy_from_slice(&UUID);
        let blocks = self.log.len() / SECTOR;
        for (index, block) in body.chunks_mut(SECTOR).enumerate() {
            record[44 + 4 * index..48 + 4 * index].copy_from_slice(&block[..4]);
            let has_wrapped = self.at + 1 + index >= blocks;
            put_be32(block, 0, self.cycle + u32::from(has_wrapped));
        }
        record.append(&mut body);
        if self.has_crc {
            seal_record(&mut record);
        }
        for block in record.chunks(SECTOR) {
            self.log[self.at * SECTOR..][..SECTOR].copy_from_slice(block);
            self.at += 1;
            if self.at == blocks {
                (self.at, self.cycle) = (0, self.cycle + 1);
            }
        }
    }

    /// Adds a transaction in a record of its own.
    pub fn transaction(&mut self, tid: u32, items: &[Item]) {
        let mut operations = begun(tid);
        operations.extend(items.iter().flatten().map(|region| (tid, 0, region.clone())));
        operations.push((tid, flag::COMMIT, Vec::new()));
        self.record(&operations);
    }

    /// As [`Self::transaction`], but only the first block of the record is written.
    pub fn torn_transaction(&mut self, tid: u32, items: &[Item]) {
        let (before, at) = (self.clone(), self.at);
        self.transaction(tid, items);
        let header = self.log[at * SECTOR..][..SECTOR].to_vec();
        *self = before;
        self.log[at * SECTOR..][..SECTOR].copy_from_slice(&header);
    }

    /// Puts the log into a file system of [`xfs_for_log`].
    pub fn put(&self, image: &mut [u8]) {
        image[LOG * BLOCK..].copy_from_slice(&self.log);
    }
}

/// The operations that begin a transaction.
pub fn begun(tid: u32) -> Vec<Operation> {
    let mut header = vec![0; 16];
    put32(&mut header, 0, 0x5452_414e);
    vec![(tid, flag::START, Vec::new()), (tid, 0, header)]
}

fn seal_record(record: &mut [u8]) {
    record[32..36].fill(0);
    let len = u32::from_be_bytes(record[12..16].try_into().expect("4 bytes")) as usize;
    let body = &record[SECTOR..][..len.min(record.len() - SECTOR)];
    let crc = crc32c::crc32c_append(crc32c::crc32c(&record[..328]), body);
    put32(record, 32, crc);
}

/// Gives the records in a file system of [`xfs_for_log`] the right CRCs.
pub fn seal(image: &mut [u8]) {
    let Some(log) = image.get_mut(LOG * BLOCK..) else { return };
    for at in (0..log.len() / SECTOR).map(|block| block * SECTOR) {
        if log.len() - at > SECTOR && log[at..at + 4] == MAGIC.to_be_bytes() {
            seal_record(&mut log[at..]);
        }
    }
}

/// A buffer of blocks of the file system: the first, how many, its flags, and pieces of 128 bytes that are logged.
pub fn buffer(block: usize, blocks: usize, flags: u16, bytes: &[u8], pieces: &[(usize, usize)]) -> Item {
    let mut first = vec![0; 20 + 4 * (blocks * BLOCK / 128).div_ceil(32)];
    for (at, value) in [(0, 0x123c), (2, 1 + pieces.len()), (4, flags.into()), (6, blocks * BLOCK / SECTOR)] {
        put16(&mut first, at, u16::try_from(value).expect("short"));
    }
    put32(&mut first, 8, u32::try_from(block * BLOCK / SECTOR).expect("small"));
    put32(&mut first, 16, u32::try_from((blocks * BLOCK / 128).div_ceil(32)).expect("small"));
    for bit in pieces.iter().flat_map(|(from, upto)| *from..*upto) {
        first[20 + bit / 8] |= 1 << (bit % 8);
    }
    let regions = pieces.iter().map(|(from, upto)| bytes[128 * from..128 * upto].to_vec());
    std::iter::once(first).chain(regions).collect()
}

/// An inode, given as it is on the disk: its number, the fields that are logged, and the region of its data.
pub fn inode(number: u32, bytes: &[u8], fields: u32, data: Option<Vec<u8>>) -> Item {
    let is_v5 = bytes[4] == 3;
    let mut first = vec![0; 56];
    put16(&mut first, 0, 0x123b);
    put16(&mut first, 2, 2 + u16::from(data.is_some()));
    put32(&mut first, 4, 1 | fields);
    put32(&mut first, 16, number);
    // The buffer is its block, of four inodes.
    put32(&mut first, 40, number / 4 * 2);
    put32(&mut first, 48, 2);
    put32(&mut first, 52, number % 4 * 256);
    let mut core = bytes[..if is_v5 { 176 } else { 96 }].to_vec();
    let numbers = [(0, 2), (2, 2), (32, 4), (40, 4), (56, 8), (76, 4), (90, 2), (120, 8), (152, 8)];
    for (at, len) in numbers {
        if let Some(number) = core.get_mut(at..at + len) {
            number.reverse();
        }
    }
    [first, core].into_iter().chain(data).collect()
}

/// New inodes in a block.
pub fn new_inodes(block: u32) -> Item {
    let mut first = vec![0; 28];
    put16(&mut first, 0, 0x123f);
    put16(&mut first, 2, 1);
    for (at, value) in [(4, 0), (8, block), (12, 4), (16, 256), (20, 1)] {
        put_be32(&mut first, at, value);
    }
    vec![first]
}

/// A change of a file's mapping: its id, inode, whether blocks are added, where in the file, which block, how many.
pub fn mapping(id: u32, inode: u32, is_map: bool, offset: u32, block: u32, count: u32) -> Item {
    let mut first = vec![0; 48];
    put16(&mut first, 0, 0x1244);
    put16(&mut first, 2, 1);
    let words =
        [(4, 1), (8, id), (16, inode), (24, block), (32, offset), (40, count), (44, 2 - u32::from(is_map))];
    words.into_iter().for_each(|(at, value)| put32(&mut first, at, value));
    vec![first]
}

/// An item with an id, and inodes behind it: a change or an exchange of mappings that is done, or an exchange that is begun.
pub fn intent(kind: u16, id: u32, inodes: [u32; 2]) -> Item {
    let mut first = vec![0; 88];
    put16(&mut first, 0, kind);
    put16(&mut first, 2, 1);
    for (at, value) in [(8, id), (16, inodes[0]), (24, inodes[1])] {
        put32(&mut first, at, value);
    }
    vec![first]
}

/// The file system of [`xfs`], larger, with place for a log.
pub fn xfs_for_log(is_v5: bool) -> Vec<u8> {
    let mut image = xfs(is_v5);
    image.truncate(40 * BLOCK);
    image.resize(BLOCKS * BLOCK, 0);
    let (log, log_blocks) = (u32::try_from(LOG).expect("small"), u32::try_from(LOG_BLOCKS).expect("small"));
    for (at, value) in [(12, 192), (52, log), (84, 192), (96, log_blocks)] {
        put_be32(&mut image, at, value);
    }
    image[32..48].copy_from_slice(&UUID);
    image[124] = 8;
    image
}

/// What a file system of [`xfs_for_log`] has there.
pub fn inode_at(image: &[u8], number: usize) -> Vec<u8> {
    image[number * 256..(number + 1) * 256].to_vec()
}

/// The fork of an inode, and its root as it is in memory: the header of a block, keys, pointers.
pub fn fork_of(bytes: &[u8], len: usize) -> Vec<u8> {
    let core = if bytes[4] == 3 { 176 } else { 100 };
    bytes[core..core + len].to_vec()
}

/// The root of the tree of `/d/f`, as it is in memory.
pub fn root(is_v5: bool) -> Vec<u8> {
    let header = if is_v5 { 72 } else { 24 };
    let mut root = vec![0; header + 16];
    put_be16(&mut root, 4, 1);
    put_be16(&mut root, 6, 1);
    put_be64(&mut root, header + 8, 7);
    root
}

/// What buffers have: a directory, a tree.
pub const DIRECTORY: u16 = 10 << 11;
/// As above.
pub const TREE: u16 = 4 << 11;
/// The buffer is freed.
pub const CANCEL: u16 = 2;

/// The same tree as in [`xfs`], with `/d`, its files and `/link` in the log alone, which begins at this block. The log has what
/// does not count: a buffer that is freed later, a transaction that is not committed, and a record that is not whole.
pub fn xfs_logged(is_v5: bool, at: usize, cycle: u32) -> Vec<u8> {
    let mut image = xfs_for_log(is_v5);
    let block = |number: usize| image[number * BLOCK..(number + 1) * BLOCK].to_vec();
    let (directory, leaf, other) = (block(6), block(7), vec![0x77; BLOCK]);
    let [d, f, link] = [17, 18, 20].map(|number| inode_at(&image, number));
    let mut log = LogMaker::new(at, cycle, is_v5);
    log.transaction(70, &[buffer(6, 1, DIRECTORY, &other, &[(0, 8)]), new_inodes(5)]);
    // The buffer is no more, and then it is a directory; what leads to the file goes over three records.
    log.transaction(71, &[buffer(6, 1, CANCEL, &[], &[])]);
    let whole = |item: Item| -> Vec<Operation> { item.into_iter().map(|region| (72, 0, region)).collect() };
    let mut operations = begun(72);
    operations.extend(whole(inode(17, &d, 4, Some(fork_of(&d, 16)))));
    operations.extend(whole(inode(20, &link, 2, Some(fork_of(&link, 4)))));
    operations.extend(whole(buffer(6, 1, DIRECTORY, &directory, &[(0, 3), (3, 8)])));
    let tree = buffer(7, 1, TREE, &leaf, &[(0, 2)]);
    operations.push((72, 0, tree[0].clone()));
    operations.push((72, flag::CONTINUE, tree[1][..100].to_vec()));
    log.record(&operations);
    log.record(&[(72, flag::CONTINUED | flag::CONTINUE, tree[1][100..160].to_vec())]);
    let mut operations = vec![(72, flag::CONTINUED | flag::END, tree[1][160..].to_vec())];
    operations.extend(whole(inode(18, &f, 8, Some(root(is_v5)))));
    operations.push((72, flag::COMMIT, Vec::new()));
    log.record(&operations);
    let mut operations = begun(73);
    operations.extend(buffer(6, 1, DIRECTORY, &other, &[(0, 8)]).into_iter().map(|region| (73, 0, region)));
    log.record(&operations);
    log.torn_transaction(74, &[buffer(7, 1, TREE, &other, &[(0, 8)])]);
    for gone in [6 * BLOCK..8 * BLOCK, 17 * 256..19 * 256, 20 * 256..21 * 256] {
        image[gone].fill(0x99);
    }
    log.put(&mut image);
    image
}
