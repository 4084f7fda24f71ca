//! Templates published in a directory: pushed, opened, read, collected; and what happens on bad days.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_lite::future::block_on;
use vellum_core::{Buffer, ErrorKind, ImageOffset, ImageSpan, Random, Storage, is_zero};
use vellum_remote::cache::CACHE_BYTES_MIN;
use vellum_remote::template::{
    Collected, Collection, Push, Pushed, TemplateName, TemplateStorage, list, remove,
};
use vellum_remote::{ChunkCache, Settings, Store};

const CHUNK: usize = 65536;

struct Directory(PathBuf);

impl Directory {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("vellum-template-{name}-{}", std::process::id()));
        std::fs::create_dir_all(path.join("store")).expect("makes a directory");
        Self(path)
    }

    fn store(&self) -> Store {
        let url = format!("file://{}", self.0.join("store").display());
        Store::open(&url, &Settings::default()).expect("it exists")
    }

    fn cache(&self) -> Arc<ChunkCache> {
        ChunkCache::open(&self.0.join("cache"), CACHE_BYTES_MIN).expect("opens")
    }

    /// The objects below a name, in order.
    fn objects(&self, below: &str) -> Vec<PathBuf> {
        let mut found = Vec::new();
        let mut dirs = vec![self.0.join("store").join(below)];
        while let Some(dir) = dirs.pop() {
            for entry in std::fs::read_dir(dir).into_iter().flatten() {
                let path = entry.expect("an entry").path();
                if path.is_dir() { dirs.push(path) } else { found.push(path) }
            }
        }
        found.sort();
        found
    }

    fn age(&self, below: &str, by: Duration) {
        for path in self.objects(below) {
            let file = std::fs::File::options().append(true).open(path).expect("it exists");
            file.set_modified(SystemTime::now() - by).expect("its time can be set");
        }
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        drop(std::fs::remove_dir_all(&self.0));
    }
}

fn name(text: &str) -> TemplateName {
    TemplateName::split(&format!("s3://b/{text}")).expect("a name").1
}

/// Chunks with content at some places of a disk of `count` chunks, whose last is short.
fn disk(seed: u64, count: usize) -> Vec<u8> {
    let mut random = Random::from_seed(seed);
    let mut bytes = vec![0; count * CHUNK - 512];
    for chunk in bytes.chunks_mut(CHUNK) {
        match random.below(4) {
            0 => {}
            1 => chunk.fill(u8::try_from(random.below(3) + 1).expect("small")),
            _ => random.fill(chunk),
        }
    }
    bytes
}

async fn push_part(store: &Store, as_name: &str, disk: &[u8], chunks: usize) -> Push {
    let push = Push::begin(store, &name(as_name), disk.len() as u64, 16).await.expect("begins");
    for (number, chunk) in disk.chunks(CHUNK).enumerate().take(chunks) {
        if !is_zero(chunk) {
            push.add(u32::try_from(number).expect("small"), chunk.to_vec()).await.expect("adds");
        }
    }
    push
}

async fn push(store: &Store, as_name: &str, disk: &[u8]) -> Pushed {
    push_part(store, as_name, disk, usize::MAX).await.commit().await.expect("commits")
}

async fn collect(store: &Store, grace: Duration, dry_run: bool) -> vellum_core::Result<Collected> {
    let collection = Collection::begin(store).await?;
    let collected = collection.run(grace, dry_run).await;
    collection.end().await;
    collected
}

async fn open(store: &Store, as_name: &str, cache: Option<Arc<ChunkCache>>) -> Arc<TemplateStorage> {
    TemplateStorage::open(store, &name(as_name), cache).await.expect("it is published")
}

async fn read_all(template: &TemplateStorage) -> Vec<u8> {
    let len = usize::try_from(template.len()).expect("small");
    template.read(ImageOffset::ZERO, Buffer::for_overwrite(len)).await.expect("reads").to_vec()
}

#[test]
fn a_template_reads_as_the_disk_that_was_pushed() {
    let directory = Directory::new("reads");
    let store = directory.store();
    let seed = 1;
    let disk = disk(seed, 40);
    block_on(async {
        let pushed = push(&store, "debian:1", &disk).await;
        assert!(pushed.is_new && pushed.counts.uploaded < pushed.counts.chunks, "{pushed:?}");
        let template = open(&store, "debian", None).await;
        assert_eq!((template.len(), template.digest()), (disk.len() as u64, pushed.digest));
        assert!(template.name().ends_with("/debian:1"), "{}", template.name());
        let mut random = Random::from_seed(seed);
        for _ in 0..300 {
            let at = random.index(disk.len() + 1000);
            let len = random.index(5 * CHUNK);
            let read =
                template.read(ImageOffset::new(at as u64), Buffer::for_overwrite(len)).await.expect("reads");
            let mut expected = vec![0; len];
            let end = disk.len().min(at + len);
            if at < end {
                expected[..end - at].copy_from_slice(&disk[at..end]);
            }
            assert!(read.to_vec() == expected, "seed {seed}: {len} bytes at {at}");
        }
        let runs = template.runs(ImageOffset::ZERO.span(disk.len() as u64)).await.expect("a map");
        assert_eq!(runs.last().map(|run| run.span.end().bytes()), Some(disk.len() as u64));
        for run in runs {
            let range = usize::try_from(run.span.start().bytes()).expect("small")
                ..usize::try_from(run.span.end().bytes()).expect("small");
            assert_eq!(is_zero(&disk[range]), !run.is_data, "{run:?}");
        }
        let middle = ImageSpan::between(ImageOffset::new(1000), ImageOffset::new(2000));
        assert_eq!(template.runs(middle).await.expect("a map")[0].span, middle);
        assert_eq!(
            template.write(ImageOffset::ZERO, Buffer::zeroed(1)).await.expect_err("never").kind(),
            ErrorKind::ReadOnly
        );
    });
}

#[test]
fn versions_share_chunks_and_are_never_replaced() {
    let directory = Directory::new("versions");
    let store = directory.store();
    let one = disk(2, 40);
    let mut two = one.clone();
    two[5 * CHUNK..6 * CHUNK].fill(77);
    block_on(async {
        push(&store, "debian:1", &one).await;
        let pushed = push(&store, "debian:2", &two).await;
        assert_eq!(pushed.counts.uploaded, 1, "{:?}", pushed.counts);
        let again = push(&store, "debian:2", &two).await;
        assert!(!again.is_new && again.counts.uploaded == 0, "{again:?}");
        let other = push_part(&store, "debian:2", &one, usize::MAX).await.commit().await;
        assert!(other.expect_err("another content").chain().contains("never replaced"));
        // Without a version the content names it, so that the same push does the same.
        let unnamed = push(&store, "debian", &one).await;
        assert_eq!(push(&store, "debian", &one).await.name, unnamed.name);
        assert_eq!(list(&store, Some("debian")).await.expect("lists").len(), 3);
        assert_eq!(directory.objects("leases"), Vec::<PathBuf>::new(), "nothing is under way any more");
    });
}

#[test]
fn a_push_that_was_killed_is_continued() {
    let directory = Directory::new("killed");
    let store = directory.store();
    let disk = disk(3, 40);
    block_on(async {
        // A killed process gives no lease back.
        std::mem::forget(push_part(&store, "debian:1", &disk, 20).await);
        let there = directory.objects("chunks").len() as u64;
        assert!(there > 5 && directory.objects("index").is_empty());
        let pushed = push(&store, "debian:1", &disk).await;
        let all = directory.objects("chunks").len() as u64;
        assert_eq!(pushed.counts.uploaded, all - there, "only what was missing");
        assert!(read_all(&*open(&store, "debian:1", None).await).await == disk);
    });
}

#[test]
fn a_collection_deletes_what_no_index_names() {
    let directory = Directory::new("collect");
    let store = directory.store();
    let (one, two) = (disk(4, 40), disk(5, 40));
    block_on(async {
        push(&store, "debian:1", &one).await;
        push(&store, "other:1", &two).await;
        let all = directory.objects("chunks").len();
        remove(&store, &name("other:1")).await.expect("removes");
        assert_eq!(remove(&store, &name("other:1")).await.expect_err("gone").kind(), ErrorKind::NotFound);
        let grace = Duration::from_secs(3600);
        let young = collect(&store, grace, false).await.expect("collects");
        assert!(young.deleted == 0 && young.young > 0, "{young:?}");
        directory.age("chunks", grace * 2);
        let counted = collect(&store, grace, true).await.expect("counts");
        assert!(counted.deleted == young.young && directory.objects("chunks").len() == all, "{counted:?}");
        let collected = collect(&store, grace, false).await.expect("collects");
        assert_eq!(collected, counted);
        assert_eq!(directory.objects("chunks").len() as u64, all as u64 - collected.deleted);
        assert!(read_all(&*open(&store, "debian:1", None).await).await == one, "what is named stays");
    });
}

#[test]
fn a_collection_and_a_push_exclude_each_other() {
    let directory = Directory::new("exclude");
    let store = directory.store();
    let disk = disk(6, 20);
    block_on(async {
        let under_way = push_part(&store, "debian:1", &disk, 10).await;
        directory.age("chunks", Duration::from_secs(7200));
        let refused = collect(&store, Duration::ZERO, false).await.expect_err("a push is under way");
        assert_eq!(refused.kind(), ErrorKind::Locked);
        assert!(refused.chain().contains("lapses at"), "{}", refused.chain());
        assert_eq!(directory.objects("leases").len(), 1, "the collection took its own lease back");
        under_way.abandon().await;
        let collected = collect(&store, Duration::ZERO, false).await.expect("nothing is under way");
        assert!(collected.deleted > 0, "{collected:?}");
        // A push waits for a collection; one that was killed is waited for until its lease lapses.
        std::fs::write(directory.0.join("store/leases/gc-0"), b"").expect("writes");
        let waiting = std::thread::spawn({
            let (store, disk) = (store.clone(), disk.clone());
            move || block_on(push(&store, "debian:1", &disk))
        });
        std::thread::sleep(Duration::from_millis(500));
        assert!(!waiting.is_finished(), "it waits");
        assert!(directory.objects("chunks").is_empty());
        directory.age("leases/gc-0", Duration::ZERO); // a file is no directory: nothing happens
        let gone = directory.0.join("store/leases/gc-0");
        let file = std::fs::File::options().append(true).open(gone).expect("it exists");
        file.set_modified(SystemTime::now() - Duration::from_secs(3600)).expect("lapses");
        assert!(waiting.join().expect("goes on").is_new);
    });
}

#[test]
fn a_collection_deletes_nothing_beside_an_index_that_cannot_be_read() {
    let directory = Directory::new("unreadable");
    let store = directory.store();
    block_on(async {
        push(&store, "debian:1", &disk(7, 10)).await;
        push(&store, "debian:2", &disk(8, 10)).await;
        remove(&store, &name("debian:2")).await.expect("removes");
        let index = directory.objects("index").pop().expect("one index");
        let mut bytes = std::fs::read(&index).expect("reads");
        bytes[70] ^= 1;
        std::fs::write(&index, bytes).expect("writes");
        let count = directory.objects("chunks").len();
        let refused = collect(&store, Duration::ZERO, false).await.expect_err("an index is damaged");
        assert!(refused.chain().contains("nothing was deleted"), "{}", refused.chain());
        assert_eq!(directory.objects("chunks").len(), count);
        assert_eq!(directory.objects("leases").len(), 0);
        let error = TemplateStorage::open(&store, &name("debian:1"), None).await.err().expect("damaged");
        assert_eq!(error.kind(), ErrorKind::Corrupt);
    });
}

#[test]
fn a_chunk_that_lies_or_is_missing_fails_the_read_with_a_remedy() {
    let directory = Directory::new("lies");
    let store = directory.store();
    let disk = disk(9, 20);
    block_on(async {
        push(&store, "debian:1", &disk).await;
        let whole: BTreeMap<PathBuf, Vec<u8>> = directory
            .objects("chunks")
            .into_iter()
            .map(|path| (path.clone(), std::fs::read(path).expect("reads")))
            .collect();
        let (first, other) = (whole.keys().next().expect("one"), whole.values().nth(1).expect("two"));
        let damaged = whole[first][..whole[first].len() - 1].to_vec();
        for (what, bytes, words) in [
            ("another chunk", Some(other.clone()), "damaged in the store; delete file://"),
            ("a part of it", Some(damaged), "damaged in the store"),
            ("nothing", Some(Vec::new()), "damaged in the store"),
            ("far too much", Some(vec![0; CHUNK * 4]), "damaged in the store"),
            ("no object", None, "is missing in the store; publish the same image again"),
        ] {
            match bytes {
                Some(bytes) => std::fs::write(first, bytes).expect("writes"),
                None => std::fs::remove_file(first).expect("removes"),
            }
            let template = open(&store, "debian:1", None).await;
            let whole_disk = Buffer::for_overwrite(disk.len());
            let error = template.read(ImageOffset::ZERO, whole_disk).await.expect_err(what);
            assert_eq!(error.kind(), ErrorKind::Io, "{what}: the image above is not corrupt");
            let text = error.chain();
            assert!(text.contains("debian:1") && text.contains(words), "{what}: {text}");
        }
        // Publishing the same image again is the remedy.
        push(&store, "debian:1", &disk).await;
        assert!(read_all(&*open(&store, "debian:1", None).await).await == disk);
    });
}

#[test]
fn reads_at_once_share_fetches_and_a_second_host_process_fetches_nothing() {
    let directory = Directory::new("shared");
    let store = directory.store();
    let disk = disk(10, 30);
    block_on(async {
        let pushed = push(&store, "debian:1", &disk).await;
        let first = open(&store, "debian:1", Some(directory.cache())).await;
        let reads = (0..4).map(|_| read_all(&first));
        for read in futures_util::future::join_all(reads).await {
            assert!(read == disk);
        }
        let counts = first.counts();
        // Chunks of equal content are one object, which may be in the cache when the second is wanted.
        assert_eq!(counts.fetched + counts.cached, pushed.counts.chunks, "{counts:?}");
        assert!(counts.shared > 0, "{counts:?}");
        drop(first);
        // Entries are written behind the reads.
        let cache = directory.cache();
        while directory.0.join("cache").read_dir().is_err() || entries(&directory) < pushed.counts.uploaded {
            std::thread::sleep(Duration::from_millis(2));
        }
        let second = open(&store, "debian:1", Some(cache.clone())).await;
        assert!(read_all(&second).await == disk);
        assert_eq!((second.counts().fetched, second.counts().cached), (0, pushed.counts.chunks));
        // Entries of another content, written by a liar who knows the layout, are not believed.
        for digest in second.index().digests().collect::<std::collections::BTreeSet<_>>() {
            cache.put(digest.0, bytes::Bytes::from_static(b"VTCK\x01\x00\0\0\x00\0\0\0")).await;
        }
        let third = open(&store, "debian:1", Some(directory.cache())).await;
        assert!(read_all(&third).await == disk);
        assert_eq!(third.counts().cached + third.counts().fetched, pushed.counts.chunks);
        assert!(third.counts().fetched > 0);
    });
}

fn entries(directory: &Directory) -> u64 {
    let parts = std::fs::read_dir(directory.0.join("cache")).expect("lists");
    let count = |part: PathBuf| {
        let names = std::fs::read_dir(part).expect("lists").map(|entry| entry.expect("an entry").file_name());
        names.filter(|name| name.len() == 64).count() as u64
    };
    // Beside the parts, there is the tag of the directory.
    parts.map(|part| part.expect("a part").path()).filter(|part| part.is_dir()).map(count).sum()
}
