//! Encrypted images of the native format: nothing readable on the medium in any mode, keys, wrong ones and damaged ones,
//! what can be done without a key, and what is refused.

mod common;
#[path = "native_encrypted/trials.rs"]
mod trials;

use std::sync::Arc;

use common::native::{NativeSetup, encrypted_setups, look_native, opening};
use common::{SECRET, base};
use futures_lite::future::block_on;
use trials::{is_readable, marks, read, write};
use vellum_core::{
    Buffer, Disk, ErrorKind, GuestOffset, ImageOffset, Inline, MemoryDisk, MemoryStorage, Offload, Random,
    Result, SharedDisk, SharedStorage, WriteFlags, ZeroFlags,
};
use vellum_format::FormatKind;
use vellum_format::fast::FastId;
use vellum_format::image::{Files, OpenOptions as AnyOptions};
use vellum_format::luks::{KeyChange, Secret, Secrets, change_keys};
use vellum_format::native::snapshots::revert;
use vellum_format::native::{CreateOptions, Native, OpenOptions, Region, Superblocks, create, resize};

const UNIT: u64 = 64 << 10;
#[test]
fn nothing_of_the_guest_is_readable_on_the_medium() {
    for setup in encrypted_setups() {
        trials::nothing_is_readable(setup).unwrap_or_else(|what| panic!("{what}"));
    }
}

/// A pattern that is stored is told from one that is not: the test above would find it.
#[test]
fn what_is_not_encrypted_is_readable() {
    block_on(async {
        let image = MemoryStorage::new("image");
        let setup = NativeSetup::table("table", 512 << 10, UNIT);
        create(&*image, &setup.create_options()).await.unwrap();
        let disk = Native::open(image.clone(), None, opening()).await.unwrap();
        write(&*disk, 70_000, &marks(40)).await;
        assert!(is_readable(&image));
    });
}

/// Space that nobody has written reads as zero, and so does what is made zero in its place; a hole costs nothing.
#[test]
fn sectors_that_nobody_has_written_are_zero() {
    for setup in encrypted_setups() {
        block_on(async {
            let image = MemoryStorage::new("image");
            create(&*image, &setup.create_options()).await.unwrap();
            let disk = Native::open(image.clone(), setup.below(), opening()).await.unwrap();
            let mut model = setup.content().to_vec();
            let mut random = Random::from_seed(4);
            for _ in 0..300 {
                let at = random.index(model.len() - 5000);
                let len = 1 + random.index(5000);
                let span = GuestOffset::new(at as u64).span(len as u64);
                match random.below(4) {
                    0 => {
                        model[at..at + len].fill(0);
                        let flags = ZeroFlags { may_unmap: random.one_in(2), ..ZeroFlags::default() };
                        disk.write_zeroes(span, flags).await.unwrap();
                    }
                    1 => disk.flush().await.unwrap(),
                    _ => {
                        // Zeros are data like any other.
                        let byte = if random.one_in(3) { 0 } else { 0xA5 };
                        model[at..at + len].fill(byte);
                        write(&*disk, at as u64, &model[at..at + len]).await;
                    }
                }
                let at = random.index(model.len() - 9000);
                assert!(read(&*disk, at as u64, 9000).await == model[at..at + 9000], "{}", setup.name);
            }
            disk.close().await.unwrap();
            let disk = Native::open(image.clone(), setup.below(), opening()).await.unwrap();
            assert!(read(&*disk, 0, model.len()).await == model, "{}", setup.name);
        });
    }
}

fn secrets(of: &[&str]) -> Arc<Secrets> {
    let mut secrets = Secrets::default();
    for text in of {
        secrets.add(text, Secret::new((*text).into()).unwrap()).unwrap();
    }
    Arc::new(secrets)
}

/// Through the door that all formats have: the secret is what opens it.
async fn open_with(image: &SharedStorage, given: &[&str]) -> Result<SharedDisk> {
    let head = FormatKind::Native.format().read(&**image).await?;
    assert!(head.is_encrypted());
    let options = AnyOptions { secrets: secrets(given), ..AnyOptions::default() };
    let below = head.backing().is_some().then(|| MemoryDisk::holding(&base()) as SharedDisk);
    Ok(head.open(Files { image: image.clone(), data_file: None, below }, options).await?.disk)
}

#[test]
fn keys_open_an_image_until_they_are_removed() {
    for setup in encrypted_setups() {
        block_on(async {
            let memory = MemoryStorage::new("image");
            let image: SharedStorage = memory.clone();
            create(&*image, &setup.create_options()).await.unwrap();
            let disk = open_with(&image, &[SECRET]).await.unwrap();
            write(&*disk, 4096, &[7; 4096]).await;
            disk.close().await.unwrap();
            let reads = async |given: &[&str]| {
                let disk = open_with(&image, given).await?;
                assert_eq!(read(&*disk, 4096, 4096).await, [7; 4096]);
                disk.close().await
            };
            let none = reads(&[]).await.unwrap_err();
            assert_eq!(none.kind(), ErrorKind::Unsupported);
            assert!(none.chain().contains("--secret id=NAME,file=FILE"), "{}", none.chain());
            let wrong = reads(&["wrong", "wrong\n"]).await.unwrap_err();
            assert!(wrong.kind() == ErrorKind::Invalid && wrong.chain().contains("line break"), "{wrong:?}");
            reads(&["wrong", SECRET]).await.unwrap();
            let area = FormatKind::Native.format().read(&*image).await.unwrap().key_area().unwrap();
            let mut random = Random::from_seed(5);
            let mut change = async |given: &[&str], change: KeyChange| {
                let mut chance = |bytes: &mut [u8]| {
                    random.fill(bytes);
                    Ok(())
                };
                let place: Arc<dyn Offload> = Arc::new(Inline);
                change_keys(area, &image, &secrets(given), &change, &mut chance, &place)
                    .await
                    .map(|changed| changed.slots)
            };
            let add = |text: &str| {
                let secret = Secret::new(text.into()).unwrap();
                KeyChange::Add { secret, slot: None, iterations: 1000 }
            };
            for slot in 1..8 {
                let text = format!("key {slot}");
                assert_eq!(change(&[SECRET], add(&text)).await.unwrap(), [slot]);
                reads(&[&text]).await.unwrap();
            }
            let old = KeyChange::RemoveSecret { secret: Secret::new(SECRET.into()).unwrap() };
            assert_eq!(change(&[], old).await.unwrap(), [0]);
            assert!(reads(&[SECRET]).await.is_err());
            for slot in 1..7 {
                reads(&[&format!("key {slot}")]).await.unwrap();
                assert_eq!(change(&[], KeyChange::Remove { slot }).await.unwrap(), [slot]);
                assert!(reads(&[&format!("key {slot}")]).await.is_err());
            }
            assert!(
                change(&[], KeyChange::Remove { slot: 7 }).await.unwrap_err().chain().contains("last key")
            );
            let (report, lines) = look_native(&image).await.unwrap();
            assert!(report.is_clean(), "{lines:?}");
            // A damaged header: the check finds it, and nothing of the image is written.
            image.write(area.span.start(), Buffer::copy_of(b"SKUL")).await.unwrap();
            assert_eq!(reads(&["key 7"]).await.unwrap_err().kind(), ErrorKind::Corrupt);
            let (report, lines) = look_native(&image).await.unwrap();
            assert!(report.corruptions == 1 && lines[0].contains("keys"), "{lines:?}");
        });
    }
}

/// Snapshots are made and gone back to, and the disk gets other sizes; its data is neither read nor written.
#[test]
fn an_image_is_managed_without_its_key() {
    for setup in encrypted_setups() {
        let name = setup.name;
        block_on(async {
            let memory = MemoryStorage::new("image");
            let image: SharedStorage = memory.clone();
            create(&*image, &setup.create_options()).await.unwrap();
            let with_key = async || Native::open(image.clone(), setup.below(), opening()).await.unwrap();
            let disk = with_key().await;
            write(&*disk, 0, &[1; 100_000]).await;
            disk.close().await.unwrap();
            let error =
                Native::open(image.clone(), setup.below(), OpenOptions::default()).await.err().unwrap();
            assert!(error.chain().contains("without its key"), "{}", error.chain());
            let alone = OpenOptions { without_base: true, without_key: true, ..OpenOptions::default() };
            let disk = Native::open(image.clone(), setup.below(), alone.clone()).await.unwrap();
            let at = GuestOffset::new(4096);
            let error = disk.read(at, Buffer::zeroed(512)).await.err().unwrap();
            assert!(error.chain().contains("without its key"), "{}", error.chain());
            let data = Buffer::copy_of(&[2; 512]);
            assert!(disk.write(at, data, WriteFlags::default()).await.is_err(), "{name}");
            assert!(disk.write_zeroes(at.span(100), ZeroFlags::default()).await.is_err(), "{name}");
            assert!(disk.map(at.span(512)).await.is_err(), "{name}");
            if setup.options.has_table {
                disk.snapshot_create("one", 0).await.unwrap();
            }
            disk.close().await.unwrap();
            if setup.options.has_table {
                let disk = with_key().await;
                assert!(read(&*disk, 0, 100_000).await == [1; 100_000], "{name}");
                write(&*disk, 50_000, &[3; 30_000]).await;
                disk.close().await.unwrap();
                revert(image.clone(), setup.below(), alone, "one").await.unwrap();
                let disk = with_key().await;
                assert!(read(&*disk, 0, 100_000).await == [1; 100_000], "{name}");
                disk.close().await.unwrap();
            }
            let format = FormatKind::Native.format();
            let size = setup.options.size;
            if !setup.options.has_table {
                format.resize(&image, size - 4096, true).await.unwrap();
            }
            format.resize(&image, size + 4096, false).await.unwrap();
            let disk = with_key().await;
            assert_eq!(read(&*disk, size, 4096).await, [0; 4096], "{name}");
            assert!(read(&*disk, 0, 100_000).await == [1; 100_000], "{name}");
            disk.close().await.unwrap();
            let (report, lines) = look_native(&image).await.unwrap();
            assert!(report.is_clean(), "{name}: {lines:?}");
        });
    }
}

/// A snapshot sees the unit in which the disk ends, with bytes behind the end: without the key they cannot be copied.
#[test]
fn what_needs_the_key_says_so() {
    block_on(async {
        let image: SharedStorage = MemoryStorage::new("image");
        let setup = NativeSetup::table("", 2 * UNIT, UNIT).encrypted("encrypted, table");
        create(&*image, &setup.create_options()).await.unwrap();
        let open = async || Native::open(image.clone(), None, opening()).await.unwrap();
        let disk = open().await;
        write(&*disk, UNIT, &[1; 64 << 10]).await;
        disk.close().await.unwrap();
        resize(&image, UNIT + 4096, true).await.unwrap();
        let disk = open().await;
        disk.snapshot_create("small", 0).await.unwrap();
        write(&*disk, 0, &[2; 512]).await;
        disk.close().await.unwrap();
        resize(&image, UNIT + 4096, false).await.unwrap();
        let error = resize(&image, 2 * UNIT, false).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.chain().contains("delete the snapshots first"), "{}", error.chain());
        let disk = open().await;
        assert_eq!(disk.geometry().size, UNIT + 4096);
        disk.snapshot_delete("small").await.unwrap();
        disk.close().await.unwrap();
        resize(&image, 2 * UNIT, false).await.unwrap();
        let disk = open().await;
        assert_eq!(read(&*disk, UNIT, 4096).await, [1; 4096]);
        assert_eq!(read(&*disk, UNIT + 4096, 4096).await, [0; 4096]);
    });
}

#[test]
fn what_cannot_be_encrypted_is_refused() {
    block_on(async {
        let zoned = NativeSetup::zoned("", 1 << 20, UNIT, 1 << 20).encrypted("encrypted, zoned");
        let image: SharedStorage = MemoryStorage::new("image");
        let options = CreateOptions { embed: Some(true), ..zoned.create_options() };
        let error = create(&*image, &options).await.unwrap_err();
        assert!(
            error.kind() == ErrorKind::Invalid && error.chain().contains("embed=on"),
            "{}",
            error.chain()
        );
        let made = create(&*image, &zoned.create_options()).await.unwrap();
        assert!(made.is_encrypted() && !made.embeds());
        let fast = FastId::new(*b"0123456789abcdef").unwrap();
        let error = FormatKind::Native.format().attach_fast(&image, fast, "fast").await.unwrap_err();
        assert!(error.chain().contains("as they are"), "{}", error.chain());
        // A program that does not know the bit refuses the image; what contradicts it is refused here.
        let both = image.read(ImageOffset::ZERO, Buffer::zeroed(8192)).await.unwrap().to_vec();
        assert_eq!(u64::from_be_bytes(both[40..48].try_into().unwrap()) >> 10 & 1, 1);
        let with = |change: &dyn Fn(&mut [u8])| {
            let mut bytes = both.clone();
            for page in bytes.chunks_exact_mut(4096) {
                change(page);
                page[8..12].fill(0);
                let crc = crc32c::crc32c(page);
                page[8..12].copy_from_slice(&crc.to_be_bytes());
            }
            Superblocks::choose(&bytes).map(|found| found.superblock)
        };
        assert!(with(&|_| {}).unwrap().is_encrypted());
        let embeds = with(&|page| page[63] = 0).unwrap_err();
        assert!(embeds.chain().contains("own entries"), "{}", embeds.chain());
        let nowhere = with(&|page| page[2728..2744].fill(0)).unwrap_err();
        assert!(nowhere.chain().contains("no keys"), "{}", nowhere.chain());
        let places = Superblocks::read(&*image).await.unwrap().superblock.places();
        let journal = places.region(Region::Journal).start().bytes();
        let before = with(&|page| page[2728..2736].copy_from_slice(&(journal - 4096).to_be_bytes()));
        assert_eq!(before.unwrap_err().kind(), ErrorKind::Corrupt);
        // Keys without the bit: what is written next would be readable beside what is not.
        let unmarked = with(&|page| page[46] &= !4).unwrap_err();
        assert!(unmarked.chain().contains("not marked as encrypted"), "{}", unmarked.chain());
    });
}

/// What a guest has stored is not what it stores again: the same sector in two places is two ciphertexts.
#[test]
fn the_same_bytes_look_different_in_each_place() {
    block_on(async {
        let memory = MemoryStorage::new("image");
        let image: SharedStorage = memory.clone();
        let setup = NativeSetup::table("", 8 * UNIT, UNIT).encrypted("encrypted, table");
        create(&*image, &setup.create_options()).await.unwrap();
        let disk = Native::open(image.clone(), None, opening()).await.unwrap();
        write(&*disk, 0, &[9; 128 << 10]).await;
        disk.snapshot_create("one", 0).await.unwrap();
        write(&*disk, 0, &[9; 512]).await; // the unit moves
        disk.close().await.unwrap();
        let places = Superblocks::read(&*image).await.unwrap().superblock.places();
        let data =
            memory.content().to_vec().split_off(usize::try_from(places.data_offset().bytes()).unwrap());
        let mut sectors: Vec<&[u8]> =
            data.chunks(512).filter(|sector| !vellum_core::is_zero(sector)).collect();
        let count = sectors.len();
        // Two units, and the copy of one of them. The map unit of the snapshot is not encrypted.
        assert!(count >= 3 * 128, "{count}");
        sectors.sort_unstable();
        sectors.dedup();
        assert_eq!(sectors.len(), count);
    });
}
