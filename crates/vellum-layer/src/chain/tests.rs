//! Chains of images in memory: what may be below what, and what guests wait for.

use std::cell::RefCell;
use std::collections::HashMap;

use futures_lite::future::block_on;
use vellum_core::memory::SparseBytes;
use vellum_core::{Buffer, GuestOffset, MemoryStorage, Place, WriteFlags, map_merged};
use vellum_format::native;
use vellum_format::qcow2::{CreateOptions, create};

use super::*;

/// A directory in memory. A link is an entry that names another.
#[derive(Default)]
struct Shelf {
    files: RefCell<HashMap<PathBuf, Arc<MemoryStorage>>>,
    links: HashMap<PathBuf, PathBuf>,
}

impl Shelf {
    fn put(&self, path: &str, storage: Arc<MemoryStorage>) {
        self.files.borrow_mut().insert(PathBuf::from(path), storage);
    }

    fn qcow2(&self, path: &str, backing: Option<(&str, Option<&str>)>) {
        let storage = MemoryStorage::new(path);
        let backing = backing.map(|(name, format)| (name.to_owned(), format.map(str::to_owned)));
        let options = CreateOptions { size: 1 << 20, backing, ..CreateOptions::without_journal() };
        block_on(create(&*storage, None, &options)).unwrap();
        self.put(path, storage);
    }

    /// The format of the top image is as the options say, else qcow2.
    fn open(&self, path: &str, options: &ChainOptions) -> Result<Chain> {
        let format = options.format.or(Some(FormatKind::Qcow2));
        self.open_guessing(path, &ChainOptions { format, ..options.clone() })
    }

    fn open_guessing(&self, path: &str, options: &ChainOptions) -> Result<Chain> {
        block_on(Chain::open(self, Path::new(path), options))
    }
}

impl Opener for Shelf {
    fn canonical<'a>(&'a self, path: &'a Path) -> LocalFuture<'a, Result<PathBuf>> {
        let mut clean = PathBuf::new();
        for part in path.components() {
            match part {
                std::path::Component::ParentDir => drop(clean.pop()),
                std::path::Component::CurDir => {}
                part => clean.push(part),
            }
        }
        Box::pin(std::future::ready(Ok(self.links.get(&clean).cloned().unwrap_or(clean))))
    }

    fn open<'a>(
        &'a self,
        canonical: &'a Path,
        name: &'a Path,
        _purpose: Purpose,
    ) -> LocalFuture<'a, Result<SharedStorage>> {
        let file = self.files.borrow().get(canonical).cloned();
        let missing = || Error::new(ErrorKind::NotFound, format!("{} does not exist", name.display()));
        Box::pin(std::future::ready(file.map(|file| file as SharedStorage).ok_or_else(missing)))
    }
}

/// Reads one block of each page of the mapping of such a disk, twice. How often the mapping was read the
/// second time.
fn second_look(chain: &Chain, size: u64) -> u64 {
    let reads = |tally: &HostTally| tally.metadata.counts().reads;
    let all = || reads(&chain.top_tally) + reads(&chain.below_tally());
    let look = || (0..size).step_by(32 << 10).for_each(|at| _ = first_byte(chain.disk(), at));
    look();
    let first = all();
    look();
    all() - first
}

#[test]
fn a_mapping_stays_in_memory_where_there_is_room_for_it() {
    const SIZE: u64 = 8 << 20;
    let shelf = Shelf::default();
    for (path, backing) in [("/d/base.qcow2", None), ("/d/top.qcow2", Some("base.qcow2"))] {
        let storage = MemoryStorage::new(path);
        let backing = backing.map(|name: &str| (name.to_owned(), Some("qcow2".to_owned())));
        let size = if backing.is_some() { 1 << 16 } else { SIZE };
        let options =
            CreateOptions { size: SIZE, cluster_size: 512, backing, ..CreateOptions::without_journal() };
        block_on(create(&*storage, None, &options)).unwrap();
        shelf.put(path, storage);
        let chain = shelf.open(path, &ChainOptions::default()).unwrap();
        (0..size).step_by(32 << 10).for_each(|at| write(chain.disk(), at, 7));
        block_on(chain.close()).unwrap();
    }
    let look = |mapping_bytes_max| {
        let options = ChainOptions { mapping_bytes_max, read_only: true, ..ChainOptions::default() };
        let chain = shelf.open("/d/top.qcow2", &options).unwrap();
        second_look(&chain, SIZE)
    };
    // 256 pages of 512 bytes in the base, two above it.
    assert_eq!(look(None), 0);
    assert_eq!(look(Some(160 << 10)), 0, "the base has what the image above it does not need");
    assert!(look(Some(64 << 10)) >= 128, "what is said is the bound");
}

fn write(disk: &SharedDisk, at: u64, byte: u8) {
    let write = disk.write(GuestOffset::new(at), Buffer::copy_of(&[byte; 4096]), WriteFlags::default());
    block_on(write).unwrap();
}

fn first_byte(disk: &SharedDisk, at: u64) -> u8 {
    block_on(disk.read(GuestOffset::new(at), Buffer::zeroed(1))).unwrap().slice()[0]
}

/// What was counted while guests wait for a disk of this size to be detached from a base that is as large.
fn cost_of_detaching(size: u64, has_table: bool, has_zones: bool) -> u64 {
    let shelf = Shelf::default();
    let mut content = SparseBytes::default();
    content.write(vellum_core::ImageOffset::new(1 << 20), &[7; 1 << 20]);
    content.set_len(size);
    shelf.put("/d/base.raw", MemoryStorage::with("base", vellum_core::Limits::plain(), content));
    let storage = MemoryStorage::new("top");
    let base = native::NewBase {
        name: "base.raw".to_owned(),
        format: Some("raw".to_owned()),
        size,
        zeros: Vec::new(),
    };
    let options =
        native::CreateOptions { size, has_table, has_zones, base: Some(base), ..Default::default() };
    block_on(native::create(&*storage, &options)).unwrap();
    shelf.put("/d/top.vlm", storage);
    let options = ChainOptions { tap: Some(TapOptions::default()), ..ChainOptions::default() };
    let mut chain = shelf.open_guessing("/d/top.vlm", &options).unwrap();
    let stop = std::sync::atomic::AtomicBool::new(false);
    let error = block_on(chain.detach(&stop)).unwrap_err();
    assert!(error.chain().contains("does not have everything"), "{}", error.chain());
    block_on(chain.disk().fill(GuestOffset::new(1 << 20), Buffer::copy_of(&[7; 1 << 20]))).unwrap();
    // Of some units the image has a part.
    (0..20).for_each(|unit| write(chain.disk(), (4 << 20) + unit * 100_000 / 4096 * 4096, 9));
    block_on(chain.prepare_detach(&|| false)).unwrap();
    assert!(chain.can_be_detached());
    write(chain.disk(), 3 << 20, 5);
    block_on(chain.disk().flush()).unwrap();
    assert!(chain.can_be_detached(), "guests are at work");
    let of = |tally: &HostTally| {
        let HostTally { data, metadata, checkpoint, prealloc } = tally;
        [data, metadata, checkpoint, prealloc]
            .map(|tally| tally.counts())
            .into_iter()
            .fold(0, |sum, counts| sum + counts.reads + counts.writes + counts.flushes)
    };
    let below = chain.below_tally();
    let before = of(&chain.top_tally) + of(&below);
    block_on(chain.detach(&stop)).unwrap();
    let cost = of(&chain.top_tally) + of(&below) - before;
    assert_eq!(chain.members().count(), 1);
    let bytes =
        [0, 1 << 20, 3 << 20, 4 << 20, (4 << 20) + 8192, size - 1].map(|at| first_byte(chain.disk(), at));
    assert_eq!(bytes, [0, 7, 5, 9, 0, 0]);
    block_on(chain.close()).unwrap();
    cost
}

#[test]
fn guests_wait_as_long_for_a_large_disk_to_be_detached_as_for_a_small_one() {
    for (has_table, has_zones) in [(false, false), (true, false), (true, true)] {
        let [small, large] = [64 << 20, 8 << 30].map(|size| cost_of_detaching(size, has_table, has_zones));
        assert!(large <= small + 10, "{small} operations, and {large}");
    }
}

#[test]
fn a_chain_of_three_reads_through_and_writes_on_top() {
    let shelf = Shelf::default();
    shelf.put("/d/base.raw", MemoryStorage::holding("base", &[1; 700_000]));
    shelf.qcow2("/d/middle", Some(("base.raw", Some("raw"))));
    shelf.qcow2("/d/top", Some(("/d/middle", Some("qcow2"))));
    let middle = shelf.open("/d/middle", &ChainOptions::default()).unwrap();
    write(middle.disk(), 65_536, 2);
    block_on(middle.close()).unwrap();
    let top = shelf.open("/d/top", &ChainOptions::default()).unwrap();
    assert_eq!(top.members().count(), 3);
    write(top.disk(), 131_072, 3);
    let read: Vec<u8> = [0, 65_536, 131_072, 800_000].map(|at| first_byte(top.disk(), at)).to_vec();
    assert_eq!(read, [1, 2, 3, 0], "the base is shorter than the disk");
    let map = block_on(map_merged(top.disk(), GuestOffset::ZERO.span(1 << 20))).unwrap();
    let depths: Vec<usize> = map.iter().map(|extent| extent.depth).collect();
    assert_eq!(depths, [2, 1, 0, 2, 2], "base, middle, top, base, past the end of the base");
    assert!(matches!(map[4].place, Place::Zero { allocated: false }));
    assert!(top.below_tally().data.counts().reads > 0);
    block_on(top.close()).unwrap();
}

#[test]
fn references_outside_the_directory_are_refused_even_through_a_link() {
    let mut shelf = Shelf::default();
    shelf.put("/etc/shadow", MemoryStorage::holding("secret", &[7; 4096]));
    shelf.qcow2("/d/direct", Some(("/etc/shadow", Some("raw"))));
    shelf.qcow2("/d/dots", Some(("../etc/shadow", Some("raw"))));
    shelf.qcow2("/d/link", Some(("innocent", Some("raw"))));
    shelf.qcow2("/d/json", Some(("json:{}", Some("raw"))));
    shelf.links.insert(PathBuf::from("/d/innocent"), PathBuf::from("/etc/shadow"));
    for image in ["/d/direct", "/d/dots", "/d/link", "/d/json"] {
        let error = shelf.open(image, &ChainOptions::default()).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Refused, "{image}: {}", error.chain());
    }
    let gate = Gate::allowing(vec![PathBuf::from("/etc")]);
    let chain = shelf.open("/d/link", &ChainOptions { gate, ..ChainOptions::default() }).unwrap();
    assert_eq!(first_byte(chain.disk(), 0), 7);
}

#[test]
fn references_of_an_image_whose_format_nobody_says_are_not_followed() {
    let shelf = Shelf::default();
    shelf.put("/d/victim.raw", MemoryStorage::holding("secret", &[7; 4096]));
    for image in ["/d/disk", "/d/disk.img", "/d/guest.raw", "/d/clone.qcow2"] {
        shelf.qcow2(image, Some(("victim.raw", Some("raw"))));
    }
    let (plain, reading) =
        (ChainOptions::default(), ChainOptions { read_only: true, ..ChainOptions::default() });
    for options in [&plain, &reading] {
        for (image, words) in
            [("/d/disk", "-f qcow2"), ("/d/disk.img", "--allow-dir /d"), ("/d/guest.raw", "-f raw")]
        {
            let error = shelf.open_guessing(image, options).err().unwrap();
            assert_eq!(error.kind(), ErrorKind::Refused, "{image}: {}", error.chain());
            assert!(error.chain().contains(words), "{image}: {}", error.chain());
        }
        shelf.open_guessing("/d/clone.qcow2", options).unwrap();
        shelf.open("/d/disk.img", options).unwrap();
    }
    // The user allows the directory; the image above states the format, or does not.
    let gate = Gate::allowing(vec![PathBuf::from("/d")]);
    shelf.open_guessing("/d/disk.img", &ChainOptions { gate, ..ChainOptions::default() }).unwrap();
    shelf.qcow2("/d/over.qcow2", Some(("disk.img", Some("qcow2"))));
    shelf.open_guessing("/d/over.qcow2", &plain).unwrap();
    shelf.qcow2("/d/silent.qcow2", Some(("disk.img", None)));
    let error = shelf.open_guessing("/d/silent.qcow2", &plain).err().unwrap();
    assert!(error.chain().contains("only its content"), "{}", error.chain());
}

#[test]
fn loops_and_endless_chains_end() {
    let shelf = Shelf::default();
    shelf.qcow2("/d/self", Some(("self", Some("qcow2"))));
    shelf.qcow2("/d/a", Some(("b", Some("qcow2"))));
    shelf.qcow2("/d/b", Some(("./a", Some("qcow2"))));
    for image in ["/d/self", "/d/a"] {
        let error = shelf.open(image, &ChainOptions::default()).err().unwrap();
        assert!(error.chain().contains("loop"), "{}", error.chain());
    }
    for i in 0..300 {
        let next = (i + 1).to_string();
        shelf.qcow2(&format!("/d/{i}"), Some((&next, Some("qcow2"))));
    }
    let error = shelf.open("/d/0", &ChainOptions::default()).err().unwrap();
    assert!(error.chain().contains("longer than 256"), "{}", error.chain());
    let longest = 300 - DEPTH_MAX;
    shelf.qcow2("/d/299", None);
    let chain = shelf.open(&format!("/d/{longest}"), &ChainOptions::default()).unwrap();
    assert_eq!(chain.members().count(), DEPTH_MAX);
    assert!(shelf.open(&format!("/d/{}", longest - 1), &ChainOptions::default()).is_err());
}

#[test]
fn an_empty_backing_format_is_one_that_is_not_stated() {
    let shelf = Shelf::default();
    shelf.qcow2("/d/base.qcow2", None);
    shelf.qcow2("/d/top", Some(("base.qcow2", Some(""))));
    let chain = shelf.open("/d/top", &ChainOptions::default()).unwrap();
    assert_eq!(chain.top().head.backing_format(), Some(""));
    assert_eq!(chain.member(1).head.kind(), FormatKind::Qcow2);
}

#[test]
fn a_disk_of_unknown_format_is_written_only_when_the_user_says_raw() {
    let shelf = Shelf::default();
    shelf.put("/d/disk", MemoryStorage::holding("disk", &[0; 4096]));
    let error = shelf.open_guessing("/d/disk", &ChainOptions::default()).err().unwrap();
    assert!(error.chain().contains("-f raw"), "{}", error.chain());
    shelf.open_guessing("/d/disk", &ChainOptions { read_only: true, ..ChainOptions::default() }).unwrap();
    let raw = ChainOptions { format: Some(FormatKind::Raw), ..ChainOptions::default() };
    write(shelf.open("/d/disk", &raw).unwrap().disk(), 0, 9);
}

#[test]
fn what_is_missing_is_named_with_its_depth() {
    let shelf = Shelf::default();
    shelf.qcow2("/d/top", Some(("gone.qcow2", None)));
    let error = shelf.open("/d/top", &ChainOptions::default()).err().unwrap();
    assert!(error.chain().contains("gone.qcow2 (depth 1)"), "{}", error.chain());
    let alone = ChainOptions { without_backing: true, ..ChainOptions::default() };
    assert_eq!(first_byte(shelf.open("/d/top", &alone).unwrap().disk(), 0), 0);
}
