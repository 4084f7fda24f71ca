//! Clones of a snapshot, while the image that has it is opened, written, enlarged and closed in the same process.
//!
//! Files are locked as on a host: a writer excludes every other opening, within the process too. What each clone
//! reads is compared with what the snapshot had. Each test prints its seed when it fails.

use std::cell::RefCell;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use futures_lite::future::{block_on, yield_now, zip};
use vellum_core::{
    Buffer, Error, ErrorKind, GuestOffset, ImageOffset, ImageSpan, Limits, LocalFuture, MemoryStorage,
    Random, Result, SharedStorage, Storage, StorageRun, WriteFlags, Zeroes, join_all,
};
use vellum_format::{FormatKind, SNAPSHOT_FORMAT, SnapshotBase, SnapshotKey, native, qcow2};
use vellum_layer::{Chain, ChainOptions, Identity, Opener, Purpose, Templates};

const SIZE: u64 = 1 << 20;
const UNIT: u64 = 64 << 10;
const PARENT: &str = "/d/parent.vlm";

/// A file, and its openings: -1 for a writer, else the number of readers.
#[derive(Clone)]
struct OnHost {
    storage: Arc<MemoryStorage>,
    openings: Arc<AtomicI64>,
}

/// A directory of a host.
#[derive(Default)]
struct Shelf {
    files: RefCell<HashMap<PathBuf, OnHost>>,
}

/// A file that is open, and locked.
struct Locked {
    file: OnHost,
    holds: i64,
}

impl Drop for Locked {
    fn drop(&mut self) {
        self.file.openings.fetch_sub(self.holds, Ordering::SeqCst);
    }
}

impl Storage for Locked {
    fn name(&self) -> &str {
        self.file.storage.name()
    }

    fn limits(&self) -> &Limits {
        self.file.storage.limits()
    }

    fn len(&self) -> u64 {
        self.file.storage.len()
    }

    fn read(&self, at: ImageOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        Box::pin(async move {
            yield_now().await;
            self.file.storage.read(at, buffer).await
        })
    }

    fn write(&self, at: ImageOffset, data: Buffer) -> LocalFuture<'_, Result<()>> {
        assert_eq!(self.holds, -1, "{} is open for reading", self.name());
        self.file.storage.write(at, data)
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        self.file.storage.flush()
    }

    fn write_zeroes(&self, span: ImageSpan, how: Zeroes) -> LocalFuture<'_, Result<()>> {
        self.file.storage.write_zeroes(span, how)
    }

    fn discard(&self, span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        self.file.storage.discard(span)
    }

    fn set_len(&self, len: u64) -> LocalFuture<'_, Result<()>> {
        self.file.storage.set_len(len)
    }

    fn preallocate(&self, span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        self.file.storage.preallocate(span)
    }

    fn runs(&self, span: ImageSpan) -> LocalFuture<'_, Result<Vec<StorageRun>>> {
        self.file.storage.runs(span)
    }
}

impl Opener for Shelf {
    fn canonical<'a>(&'a self, path: &'a Path) -> LocalFuture<'a, Result<PathBuf>> {
        Box::pin(std::future::ready(Ok(path.to_owned())))
    }

    fn open<'a>(
        &'a self,
        canonical: &'a Path,
        _name: &'a Path,
        purpose: Purpose,
    ) -> LocalFuture<'a, Result<SharedStorage>> {
        Box::pin(async move {
            yield_now().await;
            let file = self.files.borrow().get(canonical).cloned();
            let file = file.ok_or_else(|| Error::new(ErrorKind::NotFound, "there is no such file"))?;
            let holds = match purpose {
                Purpose::Look => 0,
                Purpose::Read | Purpose::Replay => 1,
                Purpose::Write => -1,
            };
            let locked = file.openings.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |now| match holds {
                0 => Some(now),
                1 => (now >= 0).then_some(now + 1),
                _ => (now == 0).then_some(-1),
            });
            match locked {
                Ok(_) => Ok(Arc::new(Locked { file, holds }) as SharedStorage),
                Err(now) => Err(Error::new(ErrorKind::Locked, format!("the file is in use: {now}"))),
            }
        })
    }

    fn identities(&self, paths: Vec<PathBuf>) -> LocalFuture<'_, Option<Vec<Identity>>> {
        let files = self.files.borrow();
        let one = |path: &PathBuf| Some([0, 0, Arc::as_ptr(&files.get(path)?.storage) as usize as u64, 0]);
        Box::pin(std::future::ready(paths.iter().map(one).collect()))
    }
}

impl Shelf {
    fn put(&self, path: &str, storage: Arc<MemoryStorage>) {
        let file = OnHost { storage, openings: Arc::default() };
        self.files.borrow_mut().insert(PathBuf::from(path), file);
    }

    fn openings(&self, path: &str) -> i64 {
        self.files.borrow()[Path::new(path)].openings.load(Ordering::SeqCst)
    }

    /// A clone of the snapshot with this number.
    async fn clone_of(&self, path: &str, name: &str, id: u32) {
        let storage = MemoryStorage::new(path);
        let snapshot = SnapshotKey { name: name.to_owned(), id };
        let base = SnapshotBase { file: PARENT.to_owned(), snapshot }.encode().unwrap();
        let backing = Some((base, Some(SNAPSHOT_FORMAT.to_owned())));
        let options = qcow2::CreateOptions { size: SIZE, backing, ..qcow2::CreateOptions::without_journal() };
        qcow2::create(&*storage, None, &options).await.unwrap();
        self.put(path, storage);
    }
}

fn options(templates: &Arc<Templates>) -> ChainOptions {
    ChainOptions { templates: Some(templates.clone()), ..ChainOptions::default() }
}

async fn open(shelf: &Shelf, path: &str, templates: &Arc<Templates>) -> Chain {
    let chain = Chain::open(shelf, Path::new(path), &options(templates)).await;
    chain.unwrap_or_else(|error| panic!("{path}: {}", error.chain()))
}

async fn write(chain: &Chain, unit: u64, value: u8) {
    let data = Buffer::copy_of(&[value; 4096]);
    chain.disk().write(GuestOffset::new(unit * UNIT), data, WriteFlags::default()).await.unwrap();
}

async fn byte(chain: &Chain, unit: u64) -> u8 {
    chain.disk().read(GuestOffset::new(unit * UNIT), Buffer::zeroed(1)).await.unwrap().slice()[0]
}

async fn close(shelf: &Shelf, chain: Chain, templates: &Arc<Templates>, path: &str) {
    chain.hold_forks().await;
    chain.close().await.unwrap();
    drop(chain);
    templates.left(shelf, Path::new(path)).await;
}

/// A parent with some snapshots, each with a clone. Returns what each clone reads, by units.
async fn made(shelf: &Shelf, random: &mut Random) -> Vec<(String, Vec<u8>)> {
    let storage = MemoryStorage::new(PARENT);
    let has_zones = random.one_in(2);
    let options = native::CreateOptions {
        size: SIZE,
        has_table: true,
        has_zones,
        zone_size: has_zones.then_some(256 << 10),
        unit_size: Some(UNIT),
        ..native::CreateOptions::default()
    };
    native::create(&*storage, &options).await.unwrap();
    shelf.put(PARENT, storage);
    let chain = open(shelf, PARENT, &Arc::default()).await;
    let (mut model, mut clones) = (vec![0; 16], Vec::new());
    for name in ["one", "two", "three"] {
        for _ in 0..6 {
            let (unit, value) = (random.below(16), u8::try_from(1 + random.below(200)).unwrap());
            write(&chain, unit, value).await;
            model[usize::try_from(unit).unwrap()] = value;
        }
        let snapshots = chain.top().opened.snapshots.clone().unwrap();
        let id = snapshots.create(name, 0).await.unwrap();
        snapshots.mark_cloned(name).await.unwrap();
        let path = format!("/d/{name}.qcow2");
        shelf.clone_of(&path, name, id).await;
        clones.push((path, model.clone()));
    }
    chain.close().await.unwrap();
    clones
}

#[test]
fn clones_read_their_snapshot_whatever_becomes_of_its_disk() {
    for seed in 0..40 {
        block_on(one(seed));
    }
}

async fn one(seed: u64) {
    let mut random = Random::from_seed(seed);
    let (shelf, templates) = (Shelf::default(), Arc::<Templates>::default());
    let mut clones = made(&shelf, &mut random).await;
    let mut parent: Option<Chain> = None;
    let mut open_clones: HashMap<usize, Chain> = HashMap::new();
    let mut size = SIZE;
    for step in 0..60 {
        let index = random.index(clones.len());
        let values: Vec<(u64, u8)> =
            (0..4).map(|_| (random.below(16), u8::try_from(1 + random.below(200)).unwrap())).collect();
        // Some clones read meanwhile, whatever the parent does.
        let looks: Vec<(usize, u64)> =
            open_clones.keys().flat_map(|clone| values.iter().map(|(unit, _)| (*clone, *unit))).collect();
        let reads = looks.iter().map(|(clone, unit)| {
            let chain = &open_clones[clone];
            Box::pin(async move { byte(chain, *unit).await }) as LocalFuture<'_, u8>
        });
        let reads = join_all(reads.collect::<Vec<_>>());
        let (shelf, templates) = (&shelf, &templates);
        let act = random.below(6);
        let change = async {
            match (act, parent.take()) {
                (0 | 1, None) => Some(open(shelf, PARENT, templates).await),
                (0, Some(chain)) => {
                    close(shelf, chain, templates, PARENT).await;
                    None
                }
                (2, Some(mut chain)) => {
                    size += UNIT;
                    chain.hold_forks().await;
                    chain.grow(size).await.unwrap();
                    chain.resume_forks();
                    Some(chain)
                }
                (3, Some(mut chain)) => {
                    chain.hold_forks().await;
                    chain.revert("two").await.unwrap();
                    chain.resume_forks();
                    size = SIZE;
                    Some(chain)
                }
                (_, Some(chain)) => {
                    for (unit, value) in &values {
                        write(&chain, *unit, *value).await;
                    }
                    Some(chain)
                }
                (_, None) => None,
            }
        };
        let (read, after) = zip(reads, change).await;
        parent = after;
        for ((clone, unit), is) in looks.iter().zip(read) {
            let should = clones[*clone].1[usize::try_from(*unit).unwrap()];
            assert_eq!(is, should, "seed {seed}, step {step}: clone {clone}, unit {unit}");
        }
        match open_clones.remove(&index) {
            None => drop(open_clones.insert(index, open(shelf, &clones[index].0, templates).await)),
            Some(chain) if random.one_in(3) => close(shelf, chain, templates, &clones[index].0).await,
            Some(chain) => {
                let (unit, value) = values[0];
                write(&chain, unit, value).await;
                clones[index].1[usize::try_from(unit).unwrap()] = value;
                open_clones.insert(index, chain);
            }
        }
    }
    for (index, chain) in open_clones {
        close(&shelf, chain, &templates, &clones[index].0).await;
    }
    if let Some(chain) = parent {
        close(&shelf, chain, &templates, PARENT).await;
    }
    assert_eq!(shelf.openings(PARENT), 0, "seed {seed}: nothing holds the file");
}

/// Of a parent that another process writes, or reads.
#[test]
fn another_process_excludes_writers_or_is_excluded() {
    block_on(async {
        let shelf = Shelf::default();
        let clones = made(&shelf, &mut Random::from_seed(1)).await;
        let (here, there) = (Arc::<Templates>::default(), Arc::<Templates>::default());
        let writer = open(&shelf, PARENT, &there).await;
        let error = Chain::open(&shelf, Path::new(&clones[0].0), &options(&here)).await.err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Locked);
        assert!(error.chain().contains("serve the clones there"), "{}", error.chain());
        close(&shelf, writer, &there, PARENT).await;
        let (first, second) =
            (open(&shelf, &clones[0].0, &here).await, open(&shelf, &clones[1].0, &there).await);
        // Also where the process itself reads it only as the base of a clone.
        for templates in [&here, &there] {
            let error = Chain::open(&shelf, Path::new(PARENT), &options(templates)).await.err().unwrap();
            assert_eq!(error.kind(), ErrorKind::Locked);
            // The attempt leaves the clones as they were.
            assert_eq!(byte(&first, 3).await, clones[0].1[3]);
            assert_eq!(byte(&second, 3).await, clones[1].1[3]);
        }
        first.close().await.unwrap();
        drop(first);
        let parent = open(&shelf, PARENT, &there).await;
        write(&parent, 3, 201).await;
        assert_eq!(byte(&second, 3).await, clones[1].1[3]);
        close(&shelf, parent, &there, PARENT).await;
    });
}

/// Images that name each other: found out, with nothing waiting for the other.
#[test]
fn snapshots_in_a_circle_are_found_out() {
    block_on(async {
        let shelf = Shelf::default();
        for (path, other) in [("/d/a.vlm", "/d/b.vlm"), ("/d/b.vlm", "/d/a.vlm")] {
            let storage = MemoryStorage::new(path);
            let snapshot = SnapshotKey { name: "s".to_owned(), id: 1 };
            let name = SnapshotBase { file: other.to_owned(), snapshot }.encode().unwrap();
            let format = Some(SNAPSHOT_FORMAT.to_owned());
            let base = Some(native::NewBase { name, format, size: SIZE, zeros: Vec::new() });
            let options = native::CreateOptions { size: SIZE, has_table: true, base, ..Default::default() };
            native::create(&*storage, &options).await.unwrap();
            shelf.put(path, storage);
        }
        let options = options(&Arc::default());
        let both = zip(
            Chain::open(&shelf, Path::new("/d/a.vlm"), &options),
            Chain::open(&shelf, Path::new("/d/b.vlm"), &options),
        );
        let (a, b) = both.await;
        for chain in [a, b] {
            let error = chain.err().expect("it is refused");
            assert!(error.chain().contains("is a loop"), "{}", error.chain());
        }
        assert_eq!(FormatKind::of_name(Path::new(PARENT)), Some(FormatKind::Native));
    });
}
