//! Logs of XFS that are made by hand: what real ones rarely have, and what only an attacker writes.

use futures_lite::future::block_on;
use vellum_core::{Error, MemoryDisk};
use vellum_guest::{VolumeKind, find_files, look};

use vellum_guest::samples::log::{
    CANCEL, DIRECTORY, Item, LogMaker, TREE, buffer, fork_of, inode, inode_at, intent, mapping, new_inodes,
    xfs_for_log, xfs_logged,
};

const KIB: u64 = 1024;
const BLOCK: usize = 1024;

type Spans = Vec<(u64, u64)>;

fn found(image: &[u8], path: &str) -> Result<(u64, Spans), Error> {
    let disk = MemoryDisk::holding(image);
    block_on(async {
        let volume = look(&*disk).await.expect("its volumes")[0];
        assert_eq!(volume.kind, VolumeKind::Xfs);
        let found = find_files(&*disk, &volume, &[path.to_owned()], &mut |_| true).await?;
        let of = |span: &vellum_core::GuestSpan| (span.start().bytes(), span.len());
        Ok((found.files, found.spans.iter().map(of).collect()))
    })
}

fn refused(image: &[u8], path: &str) -> String {
    found(image, path).expect_err("it is refused").chain()
}

/// What `/d/f` has in all of these.
fn file() -> (u64, Spans) {
    (1, vec![(20 * KIB, 2 * KIB), (30 * KIB, KIB + 100)])
}

fn block(image: &[u8], number: usize) -> Vec<u8> {
    image[number * BLOCK..(number + 1) * BLOCK].to_vec()
}

/// A file system with these transactions in its log, each in a record of its own.
fn logged(image: &[u8], transactions: &[&[Item]]) -> Vec<u8> {
    let mut log = LogMaker::new(0, 7, true);
    for (tid, items) in (1..).zip(transactions) {
        log.transaction(tid, items);
    }
    let mut image = image.to_vec();
    log.put(&mut image);
    image
}

fn put64(bytes: &mut [u8], at: usize, number: u64) {
    bytes[at..at + 8].copy_from_slice(&number.to_be_bytes());
}

#[test]
fn what_is_only_in_the_log_is_found_wherever_the_log_begins() {
    for is_v5 in [false, true] {
        for at in 0..256 {
            for cycle in [1, 5] {
                // The blocks before the tail are the newest of a log that never went round.
                let image = xfs_logged(is_v5, at, cycle);
                let what = format!("version 5: {is_v5}, from block {at}, cycle {cycle}");
                let found = |path: &str| {
                    found(&image, path).unwrap_or_else(|error| panic!("{what}: {}", error.chain()))
                };
                assert_eq!(found("/d/f"), file(), "{what}");
                assert_eq!(found("/link"), file(), "{what}");
                assert_eq!(found("/").0, 2, "{what}");
            }
        }
    }
}

#[test]
fn a_record_that_is_not_whole_is_where_the_log_ends() {
    let image = xfs_for_log(true);
    let other = vec![0x77; BLOCK];
    let bad: Item = buffer(6, 1, DIRECTORY, &other, &[(0, 8)]);
    // Its second block is of the cycle before, or has one wrong bit.
    for (at, value) in [(3 * 512 + 3, 6), (3 * 512 + 300, 1)] {
        let mut image = logged(&image, &[&[new_inodes(9)], std::slice::from_ref(&bad)]);
        assert!(refused(&image, "/d/f").contains("damaged"), "the second record counts");
        image[64 * BLOCK + at] = value;
        assert_eq!(found(&image, "/d/f").expect("it does not"), file());
    }
}

#[test]
fn a_block_that_is_newer_at_home_is_left_alone() {
    let mut image = xfs_for_log(true);
    let uuid: Vec<u8> = image[32..48].to_vec();
    image[6 * BLOCK + 24..6 * BLOCK + 40].copy_from_slice(&uuid);
    // In the log the directory's entry leads elsewhere.
    let mut older = block(&image, 6);
    let entry = (0..BLOCK).find(|at| older[*at..].starts_with(b"\x01f")).expect("its name") - 8;
    put64(&mut older, entry, 19);
    let items: [Item; 1] = [buffer(6, 1, DIRECTORY, &older, &[(0, 2)])];
    let other = (1, vec![(10 * KIB, KIB), (12 * KIB, KIB)]);
    for (cycle, number, wanted) in
        [(7, 0, other.clone()), (6, 0xffff, other.clone()), (7, 1, file()), (8, 0, file())]
    {
        put64(&mut image, 6 * BLOCK + 16, cycle << 32 | number);
        assert_eq!(
            found(&logged(&image, &[&items]), "/d/f").expect("it is read"),
            wanted,
            "{cycle}, {number}"
        );
    }
    // Of another file system.
    image[6 * BLOCK + 24] ^= 1;
    assert_eq!(found(&logged(&image, &[&items]), "/d/f").expect("it is read"), other);
}

#[test]
fn an_inode_that_is_newer_at_home_is_left_alone() {
    for is_v5 in [false, true] {
        let mut image = xfs_for_log(is_v5);
        let home = 19 * 256;
        let mut older = inode_at(&image, 19);
        put64(&mut older, 56, 1000);
        let (shorter, whole) = ((1, vec![(10 * KIB, 1000)]), (1, vec![(10 * KIB, KIB), (12 * KIB, KIB)]));
        let cases: &[(u64, u16, u16, bool)] = match is_v5 {
            true => &[
                (7 << 32, 0, 0, false),
                (7 << 32 | 1, 0, 0, true),
                (6 << 32 | 99, 0, 0, false),
                (u64::MAX, 0, 0, false),
            ],
            false => &[
                (0, 5, 5, false),
                (0, 6, 5, true),
                (0, 4, 5, false),
                (0, 0xffff, 3, false),
                (0, 0xffff, 0x8000, true),
            ],
        };
        for (lsn, home_flushes, flushes, is_newer) in cases {
            match is_v5 {
                true => put64(&mut image, home + 112, *lsn),
                false => image[home + 30..home + 32].copy_from_slice(&home_flushes.to_be_bytes()),
            }
            let mut item = inode(19, &older, 0, None);
            item[1][30..32].copy_from_slice(&flushes.to_le_bytes());
            let got = found(&logged(&image, &[&[item]]), "/old").expect("it is read");
            assert_eq!(
                &got,
                if *is_newer { &whole } else { &shorter },
                "{is_v5}: {lsn:#x}, {home_flushes}, {flushes}"
            );
        }
    }
}

#[test]
fn the_newest_core_and_the_newest_fork_count_each() {
    let image = xfs_for_log(true);
    let old = inode_at(&image, 19);
    let mut longer = old.clone();
    put64(&mut longer, 56, 13 * KIB + 7);
    let mut fork = fork_of(&old, 32);
    put64(&mut fork, 8, 40 << 21 | 1);
    let transactions: [&[Item]; 2] = [&[inode(19, &old, 4, Some(fork))], &[inode(19, &longer, 0, None)]];
    let wanted = (1, vec![(12 * KIB, 7), (40 * KIB, KIB)]);
    assert_eq!(found(&logged(&image, &transactions), "/old").expect("it is read"), wanted);
    // Later the inode is freed with its buffer: what was logged before does not count.
    let gone = [transactions[0], transactions[1], &[buffer(4, 1, CANCEL, &[], &[])]];
    let wanted = (1, vec![(10 * KIB, KIB), (12 * KIB, KIB)]);
    assert_eq!(found(&logged(&image, &gone), "/old").expect("it is read"), wanted);
}

#[test]
fn a_tree_whose_block_is_freed_and_used_again_has_what_came_after() {
    let image = xfs_for_log(true);
    let leaf = block(&image, 7);
    // One extent instead of three.
    let mut other = leaf.clone();
    other[7] = 1;
    let free = || buffer(7, 1, CANCEL, &[], &[]);
    let write = |bytes: &[u8]| buffer(7, 1, TREE, bytes, &[(0, 8)]);
    // Freed twice: what is between does not count either. A cancellation counts behind what else its transaction has.
    let transactions: [&[Item]; 3] = [&[write(&other), free()], &[write(&other)], &[free(), write(&other)]];
    assert_eq!(found(&logged(&image, &transactions), "/d/f").expect("it is read"), file());
    let again: [&[Item]; 4] = [transactions[0], transactions[1], transactions[2], &[write(&leaf)]];
    assert_eq!(found(&logged(&image, &again), "/d/f").expect("it is read"), file());
    let last: [&[Item]; 4] = [transactions[0], transactions[1], transactions[2], &[write(&other)]];
    assert!(
        found(&logged(&image, &last), "/d/f").is_err()
            || found(&logged(&image, &last), "/d/f").ok() != Some(file())
    );
}

#[test]
fn new_inodes_have_no_past() {
    // At home there is what looks like a newer inode, which is another file's data.
    let mut image = xfs_for_log(true);
    let link = inode_at(&image, 20);
    put64(&mut image, 20 * 256 + 112, 99 << 32);
    image[20 * 256 + 176] = b'x';
    let its = inode(20, &link, 2, Some(fork_of(&link, 4)));
    assert!(found(&logged(&image, &[std::slice::from_ref(&its)]), "/link").is_err(), "the link leads to x");
    let transactions: [&[Item]; 1] = [&[its, new_inodes(5)]];
    assert_eq!(found(&logged(&image, &transactions), "/link").expect("it is read"), file());
}

#[test]
fn changes_of_mappings_that_are_not_done_are_done() {
    let image = xfs_for_log(true);
    let old = |transactions: &[&[Item]]| found(&logged(&image, transactions), "/old");
    // The second block of the file goes, and another comes in its place.
    let begun: [&[Item]; 1] = [&[mapping(1, 19, false, 13, 12, 1), mapping(2, 19, true, 13, 44, 1)]];
    assert_eq!(old(&begun).expect("it is read"), (1, vec![(10 * KIB, KIB), (44 * KIB, KIB)]));
    let half: [&[Item]; 2] = [begun[0], &[intent(0x1245, 2, [0, 0])]];
    assert_eq!(old(&half).expect("it is read"), (1, vec![(10 * KIB, KIB)]));
    let done: [&[Item]; 3] = [begun[0], half[1], &[intent(0x1245, 1, [0, 0])]];
    assert_eq!(old(&done).expect("it is read"), (1, vec![(10 * KIB, KIB), (12 * KIB, KIB)]));
    // What comes and goes again, and the middle of a run.
    let twice: [&[Item]; 2] = [&[mapping(1, 19, true, 3, 40, 5)], &[mapping(2, 19, false, 4, 41, 2)]];
    let wanted = vec![(10 * KIB, KIB), (12 * KIB, KIB), (40 * KIB, KIB), (43 * KIB, 2 * KIB)];
    assert_eq!(old(&twice).expect("it is read"), (1, wanted));
    // Directories are not changed so.
    let directory: [&[Item]; 1] = [&[mapping(1, 17, true, 1, 40, 1)]];
    assert!(refused(&logged(&image, &directory), "/d/f").contains("inode 17"));
    assert_eq!(found(&logged(&image, &directory), "/old").expect("it is not on the way").0, 1);
}

#[test]
fn an_exchange_of_two_files_that_is_not_done_is_refused_by_name() {
    let image = xfs_for_log(true);
    let begun: [&[Item]; 1] = [&[intent(0x1248, 1, [18, 19])]];
    for (path, number) in [("/d/f", 18), ("/old", 19)] {
        let why = refused(&logged(&image, &begun), path);
        assert!(why.contains(&format!("inode {number}")) && why.contains("mount"), "{why}");
    }
    let done: [&[Item]; 2] = [begun[0], &[intent(0x1249, 1, [0, 0])]];
    assert_eq!(found(&logged(&image, &done), "/d/f").expect("it is read"), file());
}

#[test]
fn what_is_not_known_is_refused_by_name() {
    let image = xfs_for_log(true);
    let unknown: [&[Item]; 1] = [&[intent(0x1299, 1, [0, 0])]];
    assert!(refused(&logged(&image, &unknown), "/").contains("0x1299"));
    let quota: [&[Item]; 1] = [&[intent(0x123d, 1, [0, 0])]];
    assert_eq!(found(&logged(&image, &quota), "/d/f").expect("quotas are not read"), file());
    let logged = logged(&image, &quota);
    for (at, value, wanted) in
        [(220 + 3, 2, "features 0x2"), (64 * BLOCK + 303, 2, "damaged"), (48, 0, "on another device")]
    {
        let mut image = logged.clone();
        image[at] = value;
        if at == 48 {
            image[48..56].fill(0);
        }
        let why = refused(&image, "/");
        assert!(why.contains(wanted), "{why}");
    }
    // Of a big-endian machine, and of another file system.
    for (at, value, wanted) in [(303, 2, "big-endian"), (304, 2, "another file system")] {
        let mut image = logged.clone();
        image[64 * BLOCK + at] = value;
        vellum_guest::samples::log::seal(&mut image);
        let why = refused(&image, "/");
        assert!(why.contains(wanted), "{why}");
    }
}

#[test]
fn items_that_are_not_so_are_damage() {
    let image = xfs_for_log(true);
    let good = buffer(6, 1, DIRECTORY, &block(&image, 6), &[(0, 2)]);
    let with = |at: usize, value: u8| {
        let mut item = good.clone();
        item[0][at] = value;
        item
    };
    let mut long = inode(19, &inode_at(&image, 19), 4, Some(vec![0; 300]));
    let mut lost = inode(19, &inode_at(&image, 19), 0, None);
    (long[0][40], lost[0][40]) = (8, 255);
    lost[0][43] = 255;
    let cases: [Item; 10] = [
        // More bits than regions, bits behind the buffer's end, a buffer behind the volume's, less than a buffer's head.
        with(20, 0xff),
        with(21, 0x01),
        with(10, 0xff),
        vec![good[0][..12].to_vec(), Vec::new()],
        // Less than a region is for; no regions.
        vec![good[0].clone(), good[1][..100].to_vec()],
        with(2, 0),
        long,
        lost,
        vec![vec![0x3b, 0x12, 2, 0, 1, 0, 0, 0], vec![0; 176]],
        vec![{
            let mut new = new_inodes(5).remove(0);
            new[4] = 0xff;
            new
        }],
    ];
    for (index, item) in cases.into_iter().enumerate() {
        let item: Item = item.into_iter().filter(|region| !region.is_empty()).collect();
        let why = refused(&logged(&image, &[&[item]]), "/d/f");
        assert!(why.contains("log of its XFS file system"), "{index}: {why}");
    }
}
