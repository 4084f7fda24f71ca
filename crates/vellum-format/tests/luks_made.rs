//! Raw LUKS images that are made here: the disk suite, what a crash leaves of one in the making, and other sizes.

mod common;

use std::cell::RefCell;
use std::sync::Arc;

use common::{SECRET, keys, scale};
use futures_lite::future::block_on;
use vellum_core::contract::{self, DiskFixture};
use vellum_core::{
    Buffer, CheckedDisk, ErrorKind, GuestOffset, Limits, LocalFuture, MemoryStorage, Random, Result,
    SharedDisk, SharedStorage, Storage, WriteFlags, ZeroFlags,
};
use vellum_format::FormatKind;
use vellum_format::image::{Files, Growth, OpenOptions, Reserve};
use vellum_format::luks::{self, Hash, Mode, NewHeader, NewKeys, Secret, Secrets};
use vellum_sim::{Content, CrashKind, Drive, DriveOptions, World};

fn opened_by(secrets: &[&str]) -> OpenOptions {
    let mut all = Secrets::default();
    for secret in secrets {
        all.add(secret, Secret::new(secret.as_bytes().to_vec()).unwrap()).unwrap();
    }
    OpenOptions { secrets: Arc::new(all), ..OpenOptions::default() }
}

async fn open(image: SharedStorage, secrets: &[&str]) -> Result<SharedDisk> {
    let head = FormatKind::Luks.format().read(&*image).await?;
    Ok(head.open(Files { image, data_file: None, below: None }, opened_by(secrets)).await?.disk)
}

async fn read(disk: &SharedDisk, at: u64, len: usize) -> Vec<u8> {
    disk.read(GuestOffset::new(at), Buffer::zeroed(len)).await.unwrap().to_vec()
}

/// Opens one image again and again.
#[derive(Default)]
struct Fixture {
    image: RefCell<Option<Arc<MemoryStorage>>>,
}

impl DiskFixture for Fixture {
    fn fresh(&self, size: u64) -> LocalFuture<'_, Result<SharedDisk>> {
        Box::pin(async move {
            let image = MemoryStorage::new("volume");
            assert_eq!(luks::create(&*image, size, &keys().0, Reserve::Nothing).await?, size);
            *self.image.borrow_mut() = Some(image);
            let disk = self.reopen().await?;
            // It reads as random bytes.
            disk.write_zeroes(GuestOffset::ZERO.span(size), ZeroFlags::default()).await?;
            Ok(disk)
        })
    }

    fn reopen(&self) -> LocalFuture<'_, Result<SharedDisk>> {
        let image = self.image.borrow().clone().expect("made before");
        Box::pin(async move { Ok(CheckedDisk::new(open(image, &[SECRET]).await?) as SharedDisk) })
    }
}

#[test]
fn a_volume_is_a_disk() {
    block_on(contract::disk(&Fixture::default()));
    for seed in 0..4 * scale() {
        block_on(contract::disk_random_operations(&Fixture::default(), (96 << 10) + 512 * seed, seed, 200));
    }
}

const SIZE: u64 = 64 << 10;
const OLD: &str = "the old secret";

/// Keys that another secret opens.
fn old_keys() -> NewKeys {
    let mut random = Random::from_seed(7);
    let mut chance = |bytes: &mut [u8]| {
        random.fill(bytes);
        Ok(())
    };
    let mode = Mode::named("xts-plain64").unwrap();
    let new = NewHeader { mode, key_len: 32, hash: Hash::Sha256, digest_iterations: 1000 };
    NewKeys::make(&new, &Secret::new(OLD.into()).unwrap(), 1000, &mut chance).unwrap().0
}

/// Over another volume, in a file and on a device: what a crash leaves is the old one, the new one, or none. Never is there
/// a header whose keys are gone.
#[test]
fn a_volume_that_was_not_finished_is_none() {
    for fixed_len in [false, true] {
        for kind in [CrashKind::PowerCut, CrashKind::ProcessKill] {
            let (world, old) = (World::new(3), MemoryStorage::new("old"));
            block_on(luks::create(&*old, SIZE, &old_keys(), Reserve::Nothing)).unwrap();
            let content = Content::of(&old.content().to_vec());
            let options =
                DriveOptions { limits: Limits { fixed_len, ..Limits::plain() }, ..DriveOptions::default() };
            let drive = Drive::from_content(&world, content, options.clone());
            world.run(luks::create(&*drive, SIZE, &keys().0, Reserve::Nothing)).unwrap();
            let (log, mut random, mut seen) = (drive.log(), Random::from_seed(5), [0; 3]);
            for position in log.crash_positions() {
                for _ in 0..8 * scale() {
                    let left = log.crash(kind, position).random_image(&mut random);
                    let image = Drive::from_content(&world, left, options.clone()) as SharedStorage;
                    let what = world.run(async {
                        if FormatKind::Luks.format().read(&*image).await.is_err() {
                            return 1;
                        }
                        let opens = async |secret| match open(image.clone(), &[secret]).await {
                            Ok(disk) => disk.geometry().size == SIZE,
                            Err(error) if error.kind() == ErrorKind::Invalid => false,
                            Err(error) => panic!("{}", error.chain()),
                        };
                        let (old, new) = (opens(OLD).await, opens(SECRET).await);
                        assert!(
                            old != new,
                            "device {fixed_len}, {kind:?}, {position:?}: opened by one of them"
                        );
                        if old { 0 } else { 2 }
                    });
                    seen[what] += 1;
                }
            }
            assert!(seen.iter().all(|seen| *seen > 0), "old, none and new: {seen:?}");
        }
    }
}

#[test]
fn other_sizes_keep_the_data() {
    block_on(async {
        let image = MemoryStorage::new("volume");
        luks::create(&*image, SIZE, &keys().0, Reserve::Space).await.unwrap();
        let (shared, format) = (image.clone() as SharedStorage, FormatKind::Luks.format());
        let disk = open(shared.clone(), &[SECRET]).await.unwrap();
        let text: Vec<u8> = (0..SIZE).map(|at| u8::try_from(at % 251).unwrap()).collect();
        disk.write(GuestOffset::ZERO, Buffer::copy_of(&text), WriteFlags::default()).await.unwrap();
        disk.close().await.unwrap();
        let before = image.len() - SIZE;
        for (size, may_shrink) in
            [(2 * SIZE, false), (SIZE / 2, true), (SIZE, false), (0, true), (512, false)]
        {
            format.resize(&shared, size, may_shrink).await.unwrap();
            assert_eq!((image.len(), format.finish(&shared).await.unwrap()), (before + size, size));
            if size >= SIZE / 2 {
                let disk = open(shared.clone(), &[SECRET]).await.unwrap();
                assert!(read(&disk, 0, 32 << 10).await == text[..32 << 10]);
            }
        }
        let refused = format.resize(&shared, 0, false).await.err().unwrap();
        assert!(refused.chain().contains("--shrink"), "{}", refused.chain());
        assert!(format.resize(&shared, u64::MAX - 511, false).await.is_err());
        for (reserve, is_made) in [(Reserve::Places, false), (Reserve::Space, true), (Reserve::Zeros, true)] {
            let growth = Growth { reserve, ..Growth::default() };
            let len = image.len();
            assert_eq!(format.grow_with(&shared, len - before + 4096, &growth).await.is_ok(), is_made);
            assert_eq!(image.len(), len + if is_made { 4096 } else { 0 });
        }
    });
}

/// What is only read keeps its length.
#[test]
fn a_volume_that_is_only_read_is_not_resized() {
    block_on(async {
        for name in ["luks2-argon2id-4096.img"] {
            let path =
                std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/golden/{name}.zst"));
            let bytes = zstd::decode_all(&std::fs::read(path).unwrap()[..]).unwrap();
            let image = MemoryStorage::holding(name, &bytes);
            let shared = image.clone() as SharedStorage;
            let error = FormatKind::Luks.format().resize(&shared, 1 << 20, true).await.err().unwrap();
            assert!(error.kind() == ErrorKind::Unsupported && error.chain().contains("LUKS version 2"));
            assert!(image.content().to_vec() == bytes);
        }
    });
}
