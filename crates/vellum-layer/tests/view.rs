//! Chains of many images read like a disk that was written in one piece.
//!
//! Any images, of any formats and sizes, over one another; each is written, closed and built upon. What the top
//! reads as is compared with bytes in memory, while it is written, too; and how often the images below are
//! read is counted.

use std::cell::RefCell;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures_lite::future::block_on;
use vellum_core::{
    Buffer, Error, ErrorKind, GuestOffset, ImageOffset, LocalFuture, MemoryStorage, Random, Result,
    SharedDisk, SharedStorage, Storage as _, WriteFlags, ZeroFlags, map_merged,
};
use vellum_format::{native, qcow2};
use vellum_layer::{Chain, ChainOptions, Opener, Purpose};

const SECTOR: u64 = 512;
const MIB: u64 = 1 << 20;

/// Files in memory.
#[derive(Default)]
struct Files(RefCell<HashMap<PathBuf, Arc<MemoryStorage>>>);

/// An image below another one.
struct Base<'a> {
    name: &'a str,
    format: &'a str,
    size: u64,
}

impl Files {
    fn put(&self, name: &str, file: Arc<MemoryStorage>) {
        self.0.borrow_mut().insert(PathBuf::from(name), file);
    }

    fn open(&self, name: &str, options: &ChainOptions) -> Chain {
        let chain = block_on(Chain::open(self, Path::new(name), options));
        chain.unwrap_or_else(|error| panic!("{name}: {}", error.chain()))
    }

    fn qcow2(&self, name: &str, size: u64, base: Option<&Base<'_>>, cluster_size: u64) {
        let extended_l2 = cluster_size == 16 << 10;
        let backing = base.map(|base| (base.name.to_owned(), Some(base.format.to_owned())));
        let plain = qcow2::CreateOptions::without_journal();
        let options = qcow2::CreateOptions { size, cluster_size, extended_l2, backing, ..plain };
        let file = MemoryStorage::new(name);
        block_on(qcow2::create(&*file, None, &options)).unwrap();
        self.put(name, file);
    }

    fn native(&self, name: &str, size: u64, base: Option<&Base<'_>>, random: &mut Random) {
        let has_table = random.one_in(2);
        let base = base.map(|base| native::NewBase {
            name: base.name.to_owned(),
            format: Some(base.format.to_owned()),
            size: base.size,
            zeros: Vec::new(),
        });
        let journal_bytes = (has_table || base.is_some()).then_some(64 << 10);
        let plain = native::CreateOptions::default();
        let options = native::CreateOptions { size, has_table, base, journal_bytes, ..plain };
        let file = MemoryStorage::new(name);
        block_on(native::create(&*file, &options)).unwrap();
        self.put(name, file);
    }
}

impl Opener for Files {
    fn canonical<'a>(&'a self, path: &'a Path) -> LocalFuture<'a, Result<PathBuf>> {
        Box::pin(std::future::ready(Ok(path.to_owned())))
    }

    fn open<'a>(
        &'a self,
        canonical: &'a Path,
        name: &'a Path,
        _purpose: Purpose,
    ) -> LocalFuture<'a, Result<SharedStorage>> {
        let file = self.0.borrow().get(canonical).cloned();
        let missing = || Error::new(ErrorKind::NotFound, format!("{} does not exist", name.display()));
        Box::pin(std::future::ready(file.map(|file| file as SharedStorage).ok_or_else(missing)))
    }
}

fn read(disk: &SharedDisk, at: u64, len: u64) -> Vec<u8> {
    let buffer = Buffer::zeroed(usize::try_from(len).unwrap());
    block_on(disk.read(GuestOffset::new(at), buffer)).unwrap().slice().to_vec()
}

fn write(disk: &SharedDisk, at: u64, bytes: &[u8]) {
    block_on(disk.write(GuestOffset::new(at), Buffer::copy_of(bytes), WriteFlags::default())).unwrap();
}

/// A range of the disk, mostly short, seldom aligned.
fn any_range(size: u64, random: &mut Random) -> (u64, u64) {
    let at = random.below(size);
    let longest = *random.pick(&[600, 5000, 100_000, 3 * MIB]);
    (at, 1 + random.below(longest.min(size - at)))
}

fn change(disk: &SharedDisk, model: &mut [u8], random: &mut Random) {
    let (at, len) = any_range(model.len() as u64, random);
    let range = usize::try_from(at).unwrap()..usize::try_from(at + len).unwrap();
    match random.below(5) {
        0 => {
            block_on(disk.write_zeroes(GuestOffset::new(at).span(len), ZeroFlags::default())).unwrap();
            model[range].fill(0);
        }
        _ => {
            random.fill(&mut model[range.clone()]);
            write(disk, at, &model[range]);
        }
    }
}

fn check(disk: &SharedDisk, model: &[u8], what: &str, random: &mut Random) {
    let (at, len) = any_range(model.len() as u64, random);
    let range = usize::try_from(at).unwrap()..usize::try_from(at + len).unwrap();
    assert!(read(disk, at, len) == model[range], "{what}: {len} bytes at {at}");
}

/// A chain of these images, the last one on top; and what its disk reads as.
fn any_chain(files: &Files, depth: u64, random: &mut Random) -> (String, Vec<u8>) {
    let mut below: Option<(String, &str)> = None;
    let mut model: Vec<u8> = Vec::new();
    for level in 0..depth {
        let size = (random.below(6 * MIB) + 1).next_multiple_of(SECTOR);
        let base = below.as_ref().map(|(name, format)| Base { name, format, size: model.len() as u64 });
        let kind = random.below(3);
        let (name, format) = match kind {
            0 if level == 0 => (format!("/{level}.raw"), "raw"),
            1 => (format!("/{level}.vlm"), "vellum"),
            _ => (format!("/{level}.qcow2"), "qcow2"),
        };
        match format {
            "raw" => {
                let mut bytes = vec![0; usize::try_from(size - random.below(SECTOR)).unwrap()];
                random.fill(&mut bytes);
                files.put(&name, MemoryStorage::holding(&name, &bytes));
                model = bytes;
            }
            "vellum" => files.native(&name, size, base.as_ref(), random),
            _ => files.qcow2(&name, size, base.as_ref(), *random.pick(&[512, 4096, 16_384, 65_536])),
        }
        model.resize(usize::try_from(size).unwrap(), 0);
        if format != "raw" {
            let chain = files.open(&name, &ChainOptions::default());
            (0..1 + random.below(8)).for_each(|_| change(chain.disk(), &mut model, random));
            block_on(chain.close()).unwrap();
        }
        below = Some((name, format));
    }
    (below.expect("an image").0, model)
}

#[test]
fn any_chain_reads_as_it_was_written() {
    for seed in 0..50 {
        let random = &mut Random::from_seed(seed);
        let files = Files::default();
        let depth = 2 + random.below(7);
        let (top, mut model) = any_chain(&files, depth, random);
        // With so little memory the view keeps one page in each shard.
        let mapping_bytes_max = random.one_in(2).then_some(1);
        let options = ChainOptions { mapping_bytes_max, ..ChainOptions::default() };
        let chain = files.open(&top, &options);
        assert_eq!(chain.members().count() as u64, depth);
        let what = format!("seed {seed}, {depth} images");
        assert!(read(chain.disk(), 0, model.len() as u64) == model, "{what}");
        for _ in 0..30 {
            check(chain.disk(), &model, &what, random);
            change(chain.disk(), &mut model, random);
            check(chain.disk(), &model, &what, random);
        }
        block_on(chain.close()).unwrap();
        let chain = files.open(&top, &ChainOptions { read_only: true, ..ChainOptions::default() });
        assert!(read(chain.disk(), 0, model.len() as u64) == model, "{what}, opened again");
        block_on(chain.close()).unwrap();
    }
}

/// A chain in which each image has another block of every mebibyte.
fn striped(files: &Files, depth: u64, size: u64) -> String {
    for level in 0..depth {
        let below = format!("/{}.qcow2", level.saturating_sub(1));
        let base = (level > 0).then_some(Base { name: &below, format: "qcow2", size });
        let name = format!("/{level}.qcow2");
        files.qcow2(&name, size, base.as_ref(), 4096);
        let chain = files.open(&name, &ChainOptions::default());
        for mebibyte in 0..size / MIB {
            let block = mebibyte * MIB + level * 8192;
            write(chain.disk(), block, &[u8::try_from(level + 1).unwrap(); 4096]);
        }
        block_on(chain.close()).unwrap();
    }
    format!("/{}.qcow2", depth - 1)
}

#[test]
fn a_second_read_asks_no_image_where_the_bytes_are() {
    const DEPTH: u64 = 60;
    let files = Files::default();
    let top = striped(&files, DEPTH, 8 * MIB);
    let chain = files.open(&top, &ChainOptions { read_only: true, ..ChainOptions::default() });
    let counts = || (chain.below_tally().metadata.counts().reads, chain.below_tally().data.counts().reads);
    let read_all = || {
        for level in 0..DEPTH {
            for mebibyte in 0..8 {
                let bytes = read(chain.disk(), mebibyte * MIB + level * 8192, 4096);
                assert!(
                    bytes.iter().all(|byte| u64::from(*byte) == level + 1),
                    "level {level}, {mebibyte} MiB"
                );
            }
        }
    };
    read_all();
    let (metadata, data) = counts();
    assert_eq!(data, (DEPTH - 1) * 8, "one read of the image that has the bytes, none of the others");
    read_all();
    assert_eq!(counts(), (metadata, 2 * data), "and none of any mapping");
    block_on(chain.close()).unwrap();
    let closed = block_on(chain.disk().read(GuestOffset::ZERO, Buffer::zeroed(512))).unwrap_err();
    assert_eq!(closed.kind(), ErrorKind::Closed);
}

#[test]
fn the_map_names_the_image_that_has_the_bytes() {
    const DEPTH: u64 = 5;
    let files = Files::default();
    let top = striped(&files, DEPTH, MIB);
    let chain = files.open(&top, &ChainOptions { read_only: true, ..ChainOptions::default() });
    for level in 0..DEPTH {
        let at = GuestOffset::new(level * 8192);
        let extents = block_on(map_merged(chain.disk(), at.span(4096))).unwrap();
        assert_eq!(extents[0].depth as u64, DEPTH - 1 - level);
    }
    block_on(chain.close()).unwrap();
}

#[test]
fn a_disk_that_grows_keeps_its_view() {
    let files = Files::default();
    let top = striped(&files, 4, 4 * MIB);
    let mut chain = files.open(&top, &ChainOptions::default());
    assert_eq!(block_on(chain.grow(8 * MIB)).unwrap(), 4 * MIB);
    assert_eq!(read(chain.disk(), 3 * MIB, 1)[0], 1);
    assert_eq!(read(chain.disk(), 3 * MIB + 16_384, 1)[0], 3);
    assert_eq!(read(chain.disk(), 5 * MIB, 1)[0], 0);
    block_on(chain.close()).unwrap();
}

/// One entry of a mapping is damaged, in the middle: what else is on its page is read and written as ever.
#[test]
fn a_damaged_entry_costs_its_own_cluster_and_no_other() {
    const SIZE: u64 = 4 * MIB;
    const CLUSTER: u64 = 64 << 10;
    let files = Files::default();
    files.put("/0.raw", MemoryStorage::holding("/0.raw", &vec![1; usize::try_from(SIZE).unwrap()]));
    let base = Base { name: "/0.raw", format: "raw", size: SIZE };
    files.qcow2("/1.qcow2", SIZE, Some(&base), CLUSTER);
    let chain = files.open("/1.qcow2", &ChainOptions::default());
    write(chain.disk(), 0, &vec![2; usize::try_from(MIB).unwrap()]);
    block_on(chain.close()).unwrap();
    let file = files.0.borrow()[Path::new("/1.qcow2")].clone();
    let word = |at: u64| {
        let mut bytes = [0; 8];
        file.content().read(ImageOffset::new(at), &mut bytes);
        u64::from_be_bytes(bytes)
    };
    let entry = (word(word(40)) & 0xFF_FFFF_FFFF_FE00) + 5 * 8;
    let damaged = (word(entry) | 0x200).to_be_bytes();
    block_on(file.write(ImageOffset::new(entry), Buffer::copy_of(&damaged))).unwrap();
    let below = Base { name: "/1.qcow2", format: "qcow2", size: SIZE };
    files.qcow2("/2.qcow2", SIZE, Some(&below), CLUSTER);
    let chain = files.open("/2.qcow2", &ChainOptions::default());
    let first = |cluster: u64| {
        let read = chain.disk().read(GuestOffset::new(cluster * CLUSTER), Buffer::zeroed(4096));
        block_on(read).map(|bytes| bytes.slice()[0])
    };
    for (cluster, byte) in [(0, 2), (4, 2), (6, 2), (15, 2), (16, 1), (31, 1), (32, 1)] {
        assert_eq!(first(cluster).unwrap(), byte, "cluster {cluster}");
    }
    assert!(first(5).is_err());
    write(chain.disk(), 17 * CLUSTER, &[7; 512]);
    assert_eq!(read(chain.disk(), 17 * CLUSTER, 1024), [[7; 512], [1; 512]].concat());
}
