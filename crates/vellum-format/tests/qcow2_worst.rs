//! Images that refer to much with few bytes: many entries for one table, tables that are holes, one block of
//! refcounts for everything. Checking them costs no more than their content, and finds what checking each
//! reference would find; QEMU checks them as well.

#![allow(clippy::print_stderr, reason = "a test says why it was skipped")]

mod common;

use std::process::Command;
use std::sync::Arc;

use common::look;
use futures_lite::future::block_on;
use vellum_core::{
    Buffer, Disk, GuestOffset, ImageOffset, IoTally, MemoryStorage, SharedStorage, Storage, Tallied,
    WriteFlags,
};
use vellum_format::qcow2::check::check;
use vellum_format::qcow2::{CreateOptions, Files, Header, OpenOptions, Qcow2, create};
use vellum_format::report::{CheckReport, Repair};
use vellum_format::work;

const CLUSTER: u64 = 64 << 10;
/// Entries of a table.
const ENTRIES: u64 = CLUSTER / 8;
/// What a table maps.
const REACH: u64 = ENTRIES * CLUSTER;
const PLACE: u64 = 0x00FF_FFFF_FFFF_FE00;
const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;

async fn word(image: &MemoryStorage, at: u64) -> u64 {
    let read = image.read(ImageOffset::new(at), Buffer::zeroed(8)).await.unwrap();
    u64::from_be_bytes(read.slice().try_into().unwrap())
}

async fn put(image: &MemoryStorage, at: u64, words: &[u64]) {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_be_bytes()).collect();
    image.write(ImageOffset::new(at), Buffer::copy_of(&bytes)).await.unwrap();
}

async fn open(image: &SharedStorage) -> Arc<Qcow2> {
    let header = Header::read(&**image).await.unwrap();
    let files = Files { image: image.clone(), data_file: None, below: None };
    Qcow2::open(header, files, OpenOptions::default()).await.unwrap()
}

/// An image with room for this many tables, and data in its first cluster.
async fn image(tables: u64) -> Arc<MemoryStorage> {
    let image = MemoryStorage::new("image");
    let options = CreateOptions { size: tables * REACH, ..CreateOptions::without_journal() };
    create(&*image, None, &options).await.unwrap();
    let shared: SharedStorage = image.clone();
    let disk = open(&shared).await;
    disk.write(GuestOffset::ZERO, Buffer::copy_of(&[7; 4096]), WriteFlags::FUA).await.unwrap();
    disk.close().await.unwrap();
    image
}

/// It was not closed.
async fn make_dirty(image: &MemoryStorage) {
    put(image, 72, &[word(image, 72).await | 1]).await;
}

/// Where the L1 table and the first L2 table are.
async fn tables(image: &MemoryStorage) -> (u64, u64) {
    let l1 = word(image, 40).await;
    (l1, word(image, l1).await & PLACE)
}

/// An image with one L2 table, which is full, and to which this many entries refer. Refcounts are as they
/// were before.
async fn named_again(times: u64) -> Arc<MemoryStorage> {
    let image = image(times).await;
    let (l1, l2) = tables(&image).await;
    let first = word(&image, l2).await & PLACE;
    let entries: Vec<u64> = (0..ENTRIES).map(|index| (first + index * CLUSTER) | COPIED).collect();
    put(&image, l2, &entries).await;
    put(&image, l1, &vec![l2 | COPIED; usize::try_from(times).unwrap()]).await;
    image.set_len(first + REACH).await.unwrap();
    make_dirty(&image).await;
    image
}

/// What this costs: steps, bytes read, and writes.
fn cost<T>(image: &Arc<MemoryStorage>, what: impl AsyncFnOnce(SharedStorage) -> T) -> (T, u64, u64, u64) {
    let tally = Arc::new(IoTally::default());
    work::take();
    let done = block_on(what(Tallied::shared(image.clone(), tally.clone())));
    let counts = tally.counts();
    (done, work::take(), counts.bytes_read, counts.writes)
}

async fn look_with(image: SharedStorage, repair: Repair) -> CheckReport {
    let header = Header::read(&*image).await.unwrap();
    check(&header, &image, repair, &mut |_| {}).await.unwrap()
}

#[test]
fn a_table_that_many_entries_name_is_looked_at_once() {
    let times = 1000;
    let image = block_on(named_again(times));
    // The L1 table, the L2 table, a block of refcounts and their table; a repair also reads flags.
    let there = 3 * CLUSTER + times * 8;
    let (report, steps, bytes, _) = cost(&image, |image| look_with(image, Repair::Nothing));
    assert!(report.corruptions >= ENTRIES, "{report:?}");
    assert!(steps <= 4 * ENTRIES && bytes <= 3 * there, "a check: {steps} steps, {bytes} bytes");
    let ((), steps, bytes, writes) = cost(&image, async |image| open(&image).await.close().await.unwrap());
    assert!(steps <= 4 * ENTRIES && bytes <= 4 * there, "opening: {steps} steps, {bytes} bytes");
    assert!(writes <= 16, "{writes} writes");
    let (report, lines) = block_on(async { look(&(image as SharedStorage)).await.unwrap() });
    assert!(report.is_clean(), "{lines:?}");
    assert_eq!((report.allocated_clusters, report.fragmented_clusters), (times * ENTRIES, 0));
}

#[test]
fn tables_and_refcounts_that_lie_in_a_hole_are_not_read() {
    let count = 8000;
    let image = block_on(async {
        let image = image(count).await;
        let (l1, l2) = tables(&image).await;
        let behind = image.len().next_multiple_of(CLUSTER);
        let entries: Vec<u64> = (1..count).map(|index| behind + index * CLUSTER).collect();
        put(&image, l1, &[l2]).await;
        put(&image, l1 + 8, &entries).await;
        // Most of what the refcount table names says zero of clusters that are not there.
        let blocks = word(&image, 48).await;
        let names: Vec<u64> = (0..count / 2).map(|index| behind + (count + index) * CLUSTER).collect();
        put(&image, blocks + 8, &names).await;
        image.set_len(behind + 2 * count * CLUSTER).await.unwrap();
        make_dirty(&image).await;
        image
    });
    let ((), steps, bytes, writes) = cost(&image, async |image| open(&image).await.close().await.unwrap());
    assert!(steps <= 8 * ENTRIES && bytes <= 32 * CLUSTER, "opening: {steps} steps, {bytes} bytes");
    assert!(writes <= 16, "{writes} writes");
    let (report, lines) = block_on(async { look(&(image.clone() as SharedStorage)).await.unwrap() });
    assert!(report.is_clean(), "{lines:?}");
}

#[test]
fn a_block_of_refcounts_that_many_entries_name_is_read_once() {
    let image = block_on(async {
        let image = image(4).await;
        let table = word(&image, 48).await;
        let block = word(&image, table).await;
        put(&image, table, &vec![block; usize::try_from(ENTRIES).unwrap()]).await;
        image
    });
    let (report, steps, bytes, _) = cost(&image, |image| look_with(image, Repair::Nothing));
    assert!(report.corruptions > 0, "{report:?}");
    assert!(steps <= 8 * ENTRIES && bytes <= 16 * CLUSTER, "{steps} steps, {bytes} bytes");
    let (report, _, bytes, _) = cost(&image, |image| look_with(image, Repair::All));
    assert!(report.is_clean() && bytes <= 64 * CLUSTER, "{report:?}, {bytes} bytes");
}

/// What `qemu-img check` counts, and its exit code; nothing without QEMU.
fn qemu_check(name: &str, image: &MemoryStorage, repair: bool) -> Option<(i32, [u64; 5])> {
    let path = std::env::temp_dir().join(format!("vellum-worst-{name}-{}", std::process::id()));
    // A file of holes, as the image is.
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(image.len()).unwrap();
    for run in
        block_on(image.runs(ImageOffset::ZERO.span(image.len()))).unwrap().iter().filter(|run| run.is_data)
    {
        let len = usize::try_from(run.span.len()).unwrap();
        let bytes = block_on(image.read(run.span.start(), Buffer::zeroed(len))).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, bytes.slice(), run.span.start().bytes()).unwrap();
    }
    let mut command = Command::new("qemu-img");
    command
        .args(["check", "--output=json", "-f", "qcow2"])
        .args(repair.then_some(["-r", "all"]).iter().flatten());
    let output = command.arg(&path).output();
    std::fs::remove_file(&path).unwrap();
    let Ok(output) = output else {
        eprintln!("skipped: qemu-img is not installed");
        return None;
    };
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let number = |name: &str| {
        let rest = text.split_once(&format!("\"{name}\": ")).map_or("0", |(_, rest)| rest);
        rest.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse().unwrap()
    };
    let names = ["check-errors", "corruptions", "leaks", "allocated-clusters", "fragmented-clusters"];
    Some((output.status.code().unwrap(), names.map(number)))
}

fn counts(report: &CheckReport) -> [u64; 5] {
    let CheckReport { check_errors, corruptions, leaks, allocated_clusters, fragmented_clusters, .. } =
        *report;
    [check_errors, corruptions, leaks, allocated_clusters, fragmented_clusters]
}

#[test]
fn what_is_found_in_a_table_counts_as_often_as_it_is_named() {
    for (what, poke) in [
        ("nothing else", None),
        ("reserved bits", Some(1 << 61 | COPIED | (5 * CLUSTER))),
        ("a gap", Some(0)),
    ] {
        let image = block_on(async {
            let image = named_again(3).await;
            let (_, l2) = tables(&image).await;
            if let Some(poke) = poke {
                put(&image, l2 + 100 * 8, &[poke]).await;
            }
            image
        });
        let shared: SharedStorage = image.clone();
        let here = block_on(look_with(shared.clone(), Repair::Nothing));
        let Some((_, theirs)) = qemu_check("named", &image, false) else { return };
        assert_eq!(counts(&here), theirs, "{what}");
    }
}

/// Two bits have changed in the entry of a cluster: it reads as zeros, and the place set aside for it cannot
/// be. Nothing that the entry says is lost without that place.
#[test]
fn zeros_at_a_place_that_cannot_be_are_repaired() {
    for extended_l2 in [false, true] {
        let image = block_on(async {
            let image = MemoryStorage::new("image");
            let options = CreateOptions { size: REACH, extended_l2, ..CreateOptions::without_journal() };
            create(&*image, None, &options).await.unwrap();
            let shared: SharedStorage = image.clone();
            let disk = open(&shared).await;
            disk.write(GuestOffset::ZERO, Buffer::copy_of(&[7; 3 << 16]), WriteFlags::FUA).await.unwrap();
            disk.close().await.unwrap();
            let (_, l2) = tables(&image).await;
            let at = if extended_l2 { 16 } else { 8 };
            let entry = word(&image, l2 + at).await;
            match extended_l2 {
                true => put(&image, l2 + at, &[entry ^ 0x200, u64::from(u32::MAX) << 32]).await,
                false => put(&image, l2 + at, &[entry ^ 0x201]).await,
            }
            image
        });
        let shared: SharedStorage = image.clone();
        let before = block_on(look_with(shared.clone(), Repair::Nothing));
        if let Some((code, _)) = qemu_check("zeros", &image, true) {
            assert_eq!(code, 0, "extended {extended_l2}: QEMU repairs it, too");
        }
        let after = block_on(look_with(shared.clone(), Repair::All));
        assert!(before.corruptions == 1 && after.is_clean(), "extended {extended_l2}: {before:?}, {after:?}");
        let read = block_on(async {
            open(&shared).await.read(GuestOffset::ZERO, Buffer::zeroed(3 << 16)).await.unwrap().to_vec()
        });
        let expected = [[7; 1 << 16], [0; 1 << 16], [7; 1 << 16]].concat();
        assert!(read == expected, "extended {extended_l2}");
    }
}

/// A cluster of data whose tail holds a compressed cluster is used twice, so it may not be written in place.
#[test]
fn what_shares_its_place_with_compressed_bytes_is_not_marked_as_its_own() {
    for is_last in [true, false] {
        for refcount in [1, 2] {
            let image = block_on(async {
                let image = image(1).await;
                let (_, l2) = tables(&image).await;
                let plain = word(&image, l2).await;
                let packed = COMPRESSED | ((plain & PLACE) + 0x8000);
                let (one, other) = if is_last { (plain, packed) } else { (packed, plain) };
                put(&image, l2, &[one, other]).await;
                let block = word(&image, word(&image, 48).await).await;
                let cluster = (plain & PLACE) / CLUSTER;
                let at = ImageOffset::new(block + cluster * 2);
                image.write(at, Buffer::copy_of(&[0, refcount])).await.unwrap();
                image
            });
            let shared: SharedStorage = image.clone();
            let here = block_on(look_with(shared.clone(), Repair::Nothing));
            assert!(here.corruptions > 0, "compressed last {is_last}, refcount {refcount}: {here:?}");
            if let Some((_, theirs)) = qemu_check("packed", &image, false) {
                assert_eq!(here.corruptions, theirs[1], "compressed last {is_last}, refcount {refcount}");
            }
            block_on(async {
                make_dirty(&image).await;
                open(&shared).await.close().await.unwrap();
                let entry = word(&image, tables(&image).await.1 + u64::from(!is_last) * 8).await;
                assert_eq!(
                    entry & COPIED,
                    0,
                    "compressed last {is_last}, refcount {refcount}: repaired at opening"
                );
            });
            if let Some((code, theirs)) = qemu_check("packed", &image, false) {
                assert_eq!((code, theirs[1]), (0, 0), "compressed last {is_last}, refcount {refcount}");
            }
        }
    }
}
