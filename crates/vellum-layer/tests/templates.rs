//! Disks of one process that stand on the same images share them.
//!
//! Counted: how often each file is opened, and how many hold it open. Files are replaced, names are changed, and
//! disks come and go in any order; what each reads is compared with what its own images hold.

use std::cell::RefCell;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures_lite::future::{block_on, yield_now};
use vellum_core::{
    Buffer, Error, ErrorKind, GuestOffset, ImageOffset, LocalFuture, MemoryStorage, Random, Result,
    SharedStorage, Storage as _, WriteFlags, join_all,
};
use vellum_format::{FormatKind, qcow2};
use vellum_layer::{Chain, ChainOptions, Gate, Identity, Opener, Purpose, Templates};

const SIZE: u64 = 1 << 20;

/// A directory in memory. Opening a file takes some turns.
#[derive(Default)]
struct Shelf {
    files: RefCell<HashMap<PathBuf, Arc<MemoryStorage>>>,
    /// A name that leads to a file elsewhere.
    links: RefCell<HashMap<PathBuf, PathBuf>>,
    opened: RefCell<Vec<PathBuf>>,
    /// The next opening of this file fails.
    fails: RefCell<Option<PathBuf>>,
    /// When something is asked about one of these paths, the first leads to the second from then on.
    switches: RefCell<Option<[PathBuf; 2]>>,
    way: u64,
}

impl Shelf {
    fn put(&self, path: &str, storage: Arc<MemoryStorage>) {
        self.files.borrow_mut().insert(PathBuf::from(path), storage);
    }

    fn raw(&self, path: &str, byte: u8) {
        self.put(path, MemoryStorage::holding(path, &vec![byte; usize::try_from(SIZE).unwrap()]));
    }

    fn qcow2(&self, path: &str, backing: Option<(&str, &str)>) {
        let storage = MemoryStorage::new(path);
        let backing = backing.map(|(name, format)| (name.to_owned(), Some(format.to_owned())));
        let options = qcow2::CreateOptions { size: SIZE, backing, ..qcow2::CreateOptions::without_journal() };
        block_on(qcow2::create(&*storage, None, &options)).unwrap();
        self.put(path, storage);
    }

    fn real(&self, path: &Path) -> PathBuf {
        self.links.borrow().get(path).cloned().unwrap_or_else(|| path.to_owned())
    }

    async fn open_later(&self, path: &str, options: &ChainOptions) -> Result<Chain> {
        Chain::open(self, Path::new(path), options).await
    }

    fn open(&self, path: &str, options: &ChainOptions) -> Chain {
        let chain = block_on(self.open_later(path, options));
        chain.unwrap_or_else(|error| panic!("{path}: {}", error.chain()))
    }

    fn times_opened(&self, path: &str) -> usize {
        self.opened.borrow().iter().filter(|opened| **opened == *path).count()
    }
}

impl Opener for Shelf {
    fn canonical<'a>(&'a self, path: &'a Path) -> LocalFuture<'a, Result<PathBuf>> {
        Box::pin(std::future::ready(Ok(self.real(path))))
    }

    fn open<'a>(
        &'a self,
        canonical: &'a Path,
        name: &'a Path,
        _purpose: Purpose,
    ) -> LocalFuture<'a, Result<SharedStorage>> {
        Box::pin(async move {
            for _ in 0..3 {
                yield_now().await;
            }
            let fails = self.fails.borrow_mut().take_if(|path| path == canonical).is_some();
            self.opened.borrow_mut().push(canonical.to_owned());
            let file = self.files.borrow().get(canonical).filter(|_| !fails).cloned();
            let missing = || Error::new(ErrorKind::NotFound, format!("{} does not exist", name.display()));
            file.map(|file| file as SharedStorage).ok_or_else(missing)
        })
    }

    fn identities(&self, paths: Vec<PathBuf>) -> LocalFuture<'_, Option<Vec<Identity>>> {
        Box::pin(async move {
            yield_now().await;
            let meant = |[link, _]: &mut [PathBuf; 2]| {
                let target = self.real(link);
                paths.iter().any(|path| *path == *link || *path == target)
            };
            if let Some([link, target]) = self.switches.borrow_mut().take_if(meant) {
                self.links.borrow_mut().insert(link, target);
            }
            let files = self.files.borrow();
            let number = |path: &PathBuf| Some(Arc::as_ptr(files.get(&self.real(path))?) as usize as u64);
            paths.iter().map(|path| Some([0, 0, 0, number(path)?])).collect()
        })
    }

    fn way(&self) -> u64 {
        self.way
    }
}

fn sharing(templates: &Arc<Templates>) -> ChainOptions {
    ChainOptions { templates: Some(templates.clone()), ..ChainOptions::default() }
}

fn first_byte(chain: &Chain) -> Result<u8> {
    Ok(block_on(chain.disk().read(GuestOffset::ZERO, Buffer::zeroed(512)))?.slice()[0])
}

fn write(chain: &Chain, byte: u8) {
    let data = Buffer::copy_of(&[byte; 4096]);
    block_on(chain.disk().write(GuestOffset::ZERO, data, WriteFlags::default())).unwrap();
}

/// Two tops over `template`, which is over `base.raw`.
fn two_clones() -> (Shelf, ChainOptions) {
    let shelf = Shelf::default();
    shelf.raw("/d/base.raw", 1);
    shelf.qcow2("/d/template.qcow2", Some(("base.raw", "raw")));
    shelf.qcow2("/d/a.qcow2", Some(("template.qcow2", "qcow2")));
    shelf.qcow2("/d/b.qcow2", Some(("template.qcow2", "qcow2")));
    (shelf, sharing(&Arc::default()))
}

#[test]
fn a_template_is_opened_once_and_closed_when_its_last_disk_goes() {
    let (shelf, options) = two_clones();
    let (a, b) = (shelf.open("/d/a.qcow2", &options), shelf.open("/d/b.qcow2", &options));
    write(&a, 7);
    assert_eq!((first_byte(&a).unwrap(), first_byte(&b).unwrap()), (7, 1));
    assert_eq!(b.members().count(), 3);
    for path in ["/d/template.qcow2", "/d/base.raw"] {
        assert_eq!(shelf.times_opened(path), 1, "{path}");
    }
    block_on(a.close()).unwrap();
    block_on(a.close()).unwrap();
    assert_eq!(first_byte(&a).unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(first_byte(&b).unwrap(), 1, "the other one still stands on it, however often this is closed");
    drop(a);
    let below = b.member(1).opened.disk.clone();
    block_on(b.close()).unwrap();
    let closed = block_on(below.read(GuestOffset::ZERO, Buffer::zeroed(512))).unwrap_err();
    assert_eq!(closed.kind(), ErrorKind::Closed);
    // `b` still has it in memory, and nobody may stand on it now.
    let again = shelf.open("/d/b.qcow2", &options);
    assert_eq!(first_byte(&again).unwrap(), 1);
    assert_eq!(shelf.times_opened("/d/base.raw"), 2);
}

#[test]
fn a_disk_that_is_dropped_leaves_too() {
    let (shelf, options) = two_clones();
    let holders = || Arc::strong_count(&shelf.files.borrow()[Path::new("/d/base.raw")]);
    let (a, b) = (shelf.open("/d/a.qcow2", &options), shelf.open("/d/b.qcow2", &options));
    let both = holders();
    drop(a);
    assert_eq!(holders(), both);
    block_on(b.close()).unwrap();
    drop(b);
    assert_eq!(holders(), 1, "only the directory has it");
    // An opening that fails above the template has left it.
    shelf.put("/d/b.qcow2", MemoryStorage::holding("b", b"QFI\xfb, damaged"));
    let qcow2 = ChainOptions { format: Some(FormatKind::Qcow2), ..options };
    assert!(block_on(shelf.open_later("/d/b.qcow2", &qcow2)).is_err());
    assert_eq!(holders(), 1);
}

#[test]
fn many_at_once_open_it_once_also_when_the_first_one_fails() {
    let (shelf, options) = two_clones();
    for index in 0..50 {
        shelf.qcow2(&format!("/d/{index}.qcow2"), Some(("template.qcow2", "qcow2")));
    }
    *shelf.fails.borrow_mut() = Some(PathBuf::from("/d/base.raw"));
    let names: Vec<String> = (0..50).map(|index| format!("/d/{index}.qcow2")).collect();
    let opened = block_on(join_all(names.iter().map(|name| Box::pin(shelf.open_later(name, &options)))));
    let (good, bad): (Vec<_>, Vec<_>) = opened.into_iter().partition(Result::is_ok);
    assert_eq!((good.len(), bad.len()), (49, 1), "it failed for one, and another tried again");
    assert_eq!(shelf.times_opened("/d/base.raw"), 2);
    // One that gives up while it opens leaves the way free.
    drop(good);
    let mut given_up = Box::pin(shelf.open_later("/d/0.qcow2", &options));
    block_on(async {
        for _ in 0..6 {
            assert!(futures_lite::future::poll_once(&mut given_up).await.is_none());
        }
    });
    drop(given_up);
    assert_eq!(first_byte(&shelf.open("/d/1.qcow2", &options)).unwrap(), 1);
}

#[test]
fn a_template_that_was_replaced_is_opened_anew() {
    let (shelf, options) = two_clones();
    let a = shelf.open("/d/a.qcow2", &options);
    shelf.raw("/d/base.raw", 2);
    let b = shelf.open("/d/b.qcow2", &options);
    assert_eq!((first_byte(&a).unwrap(), first_byte(&b).unwrap()), (1, 2));
    block_on(a.close()).unwrap();
    let again = shelf.open("/d/a.qcow2", &options);
    assert_eq!(first_byte(&again).unwrap(), 2);
    assert_eq!(shelf.times_opened("/d/base.raw"), 2, "the new one is shared");
    shelf.files.borrow_mut().remove(Path::new("/d/base.raw"));
    assert!(block_on(shelf.open_later("/d/a.qcow2", &options)).is_err(), "it is gone for new disks");
    assert_eq!(first_byte(&b).unwrap(), 2);
}

#[test]
fn names_lead_from_the_directory_in_which_the_template_is_named() {
    let (shelf, options) = two_clones();
    // The same template by another name: what it names is elsewhere.
    shelf.links.borrow_mut().insert(PathBuf::from("/e/link.qcow2"), PathBuf::from("/d/template.qcow2"));
    shelf.raw("/e/base.raw", 3);
    shelf.qcow2("/e/c.qcow2", Some(("link.qcow2", "qcow2")));
    let gate = Gate::allowing(vec![PathBuf::from("/")]);
    let options = ChainOptions { gate, ..options };
    let (a, c) = (shelf.open("/d/a.qcow2", &options), shelf.open("/e/c.qcow2", &options));
    assert_eq!((first_byte(&a).unwrap(), first_byte(&c).unwrap()), (1, 3));
}

#[test]
fn a_link_that_changes_while_images_are_opened_leaves_nothing_behind() {
    let shelf = Shelf::default();
    let options = sharing(&Arc::default());
    let link = PathBuf::from("/d/current.raw");
    shelf.raw("/d/v1.raw", 1);
    shelf.raw("/d/v2.raw", 2);
    shelf.links.borrow_mut().insert(link.clone(), PathBuf::from("/d/v1.raw"));
    shelf.qcow2("/d/template.qcow2", Some(("current.raw", "raw")));
    shelf.qcow2("/d/a.qcow2", Some(("template.qcow2", "qcow2")));
    shelf.qcow2("/d/b.qcow2", Some(("template.qcow2", "qcow2")));
    *shelf.switches.borrow_mut() = Some([link, PathBuf::from("/d/v2.raw")]);
    let a = shelf.open("/d/a.qcow2", &options);
    assert!(shelf.switches.borrow().is_none(), "it changed");
    let b = shelf.open("/d/b.qcow2", &options);
    assert!([1, 2].contains(&first_byte(&a).unwrap()));
    assert_eq!(first_byte(&b).unwrap(), 2, "the link was stable before this one began");
}

#[test]
fn a_name_that_is_refused_is_refused_also_for_images_that_are_open() {
    let shelf = Shelf::default();
    let options = sharing(&Arc::default());
    let create = |path: &str, backing: &str| {
        let storage = MemoryStorage::new(path);
        let backing = Some((backing.to_owned(), None));
        let create = qcow2::CreateOptions { size: SIZE, backing, ..qcow2::CreateOptions::without_journal() };
        block_on(qcow2::create(&*storage, None, &create)).unwrap();
        shelf.put(path, storage);
    };
    shelf.raw("/d/base.raw", 1);
    shelf.qcow2("/d/template", Some(("base.raw", "raw")));
    for link in ["/d/template.qcow2", "/d/disk.raw"] {
        shelf.links.borrow_mut().insert(PathBuf::from(link), PathBuf::from("/d/template"));
    }
    create("/d/a.qcow2", "template.qcow2");
    create("/d/b.qcow2", "template");
    create("/d/c.qcow2", "disk.raw");
    let a = shelf.open("/d/a.qcow2", &options);
    for refused in ["/d/b.qcow2", "/d/c.qcow2"] {
        let error =
            block_on(shelf.open_later(refused, &options)).err().expect("refused when it is alone, too");
        assert_eq!(error.kind(), ErrorKind::Refused, "{refused}: {}", error.chain());
    }
    assert_eq!(first_byte(&a).unwrap(), 1);
}

#[test]
fn what_is_opened_differently_is_not_shared() {
    let (mut shelf, options) = two_clones();
    let a = shelf.open("/d/a.qcow2", &options);
    let gate = Gate::allowing(vec![PathBuf::from("/elsewhere")]);
    let other_gate = ChainOptions { gate, ..options.clone() };
    let less_memory = ChainOptions { mapping_bytes_max: Some(1 << 20), ..options.clone() };
    let alone = ChainOptions { templates: None, ..options.clone() };
    let others = sharing(&Arc::default());
    let mut open = Vec::new();
    for (index, different) in [other_gate, less_memory, alone, others].iter().enumerate() {
        open.push(shelf.open("/d/b.qcow2", different));
        assert_eq!(shelf.times_opened("/d/base.raw"), index + 2, "{index}");
    }
    shelf.way = 1;
    let b = shelf.open("/d/b.qcow2", &options);
    assert_eq!(shelf.times_opened("/d/base.raw"), 6);
    assert_eq!((first_byte(&a).unwrap(), first_byte(&b).unwrap()), (1, 1));
}

#[test]
fn a_loop_is_found_in_images_that_are_open_already() {
    let shelf = Shelf::default();
    let options = sharing(&Arc::default());
    shelf.raw("/d/base.raw", 1);
    shelf.qcow2("/d/low.qcow2", Some(("base.raw", "raw")));
    shelf.qcow2("/d/middle.qcow2", Some(("low.qcow2", "qcow2")));
    shelf.qcow2("/d/top.qcow2", Some(("middle.qcow2", "qcow2")));
    let top = shelf.open("/d/top.qcow2", &options);
    // The same file is another image by now, as nobody should do.
    let template = MemoryStorage::new("low");
    let backing = Some(("middle.qcow2".to_owned(), Some("qcow2".to_owned())));
    let create = qcow2::CreateOptions { size: SIZE, backing, ..qcow2::CreateOptions::without_journal() };
    block_on(qcow2::create(&*template, None, &create)).unwrap();
    let bytes = template.content().to_vec();
    let file = shelf.files.borrow()[Path::new("/d/low.qcow2")].clone();
    block_on(file.write(ImageOffset::ZERO, Buffer::copy_of(&bytes))).unwrap();
    let reading = ChainOptions { read_only: true, ..options };
    let error = block_on(shelf.open_later("/d/low.qcow2", &reading)).err().expect("a loop");
    assert!(error.chain().contains("loop"), "{}", error.chain());
    assert_eq!(first_byte(&top).unwrap(), 1);
}

#[test]
fn disks_that_come_and_go_read_their_own_bytes() {
    for seed in 0..40 {
        let random = &mut Random::from_seed(seed);
        let (shelf, options) = two_clones();
        let mut model: HashMap<String, Option<u8>> = HashMap::new();
        for index in 0..6 {
            let below = if index % 2 == 0 { ("template.qcow2", "qcow2") } else { ("base.raw", "raw") };
            let name = format!("/d/clone-{index}.qcow2");
            shelf.qcow2(&name, Some(below));
            model.insert(name, None);
        }
        let mut open: Vec<(String, Chain)> = Vec::new();
        for step in 0..200 {
            match random.below(4) {
                0 | 1 => {
                    let name = format!("/d/clone-{}.qcow2", random.below(6));
                    if open.iter().all(|(other, _)| *other != name) {
                        let chain = shelf.open(&name, &options);
                        open.push((name, chain));
                    }
                }
                2 if !open.is_empty() => {
                    let index = usize::try_from(random.below(open.len() as u64)).unwrap();
                    let (name, chain) = open.swap_remove(index);
                    block_on(chain.close()).unwrap_or_else(|error| panic!("{name}: {}", error.chain()));
                }
                _ => {
                    for (name, chain) in &open {
                        let byte = u8::try_from(2 + random.below(200)).unwrap();
                        if random.one_in(3) {
                            write(chain, byte);
                            model.insert(name.clone(), Some(byte));
                        }
                    }
                }
            }
            for (name, chain) in &open {
                let expected = model[name].unwrap_or(1);
                assert_eq!(first_byte(chain).unwrap(), expected, "seed {seed}, step {step}, {name}");
            }
        }
        drop(open);
        let base = shelf.files.borrow()[Path::new("/d/base.raw")].clone();
        assert_eq!(Arc::strong_count(&base), 2, "seed {seed}: nobody has it open");
    }
}
