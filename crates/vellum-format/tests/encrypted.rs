//! Encrypted qcow2 images: the disk suite, crashes and failing drives, nothing readable on the medium, and QEMU in turns.

#![allow(clippy::print_stderr, reason = "a test says why it was skipped")]

mod common;

use std::cell::RefCell;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{QcowSetup, SECRET, cipher_of, encrypted, scale, sim};
use futures_lite::future::block_on;
use vellum_core::contract::{self, DiskFixture};
use vellum_core::{
    Buffer, CheckedDisk, Disk, Error, ErrorKind, GuestOffset, ImageOffset, ImageSpan, Inline, Limits,
    LocalFuture, MemoryDisk, MemoryStorage, Random, Result, SharedDisk, SharedStorage, Storage, StorageRun,
    WriteFlags, ZeroFlags, Zeroes,
};
use vellum_format::FormatKind;
use vellum_format::image::OpenOptions as AnyOptions;
use vellum_format::luks::{KeyArea, KeyChange, KeysChanged, Secret, Secrets, change_keys};
use vellum_format::qcow2::check::check;
use vellum_format::qcow2::{CreateOptions, Files, Header, OpenOptions, Preallocation, Qcow2, create};
use vellum_format::report::Repair;
use vellum_sim::Operation;

const SIZE: u64 = 192 << 10;

fn plain(cluster_size: u64) -> CreateOptions {
    CreateOptions { size: SIZE, cluster_size, ..CreateOptions::without_journal() }
}

/// What makes a difference: subclusters, a journal, a disk below.
fn setups() -> Vec<QcowSetup> {
    let setup = |name, options, has_base| QcowSetup { name, options: encrypted(options), has_base };
    vec![
        setup("4 KiB clusters", plain(4096), false),
        setup("4 KiB clusters over a base", plain(4096), true),
        setup("a journal", CreateOptions { journal: Some(128 << 10), ..plain(4096) }, false),
        setup(
            "a journal, subclusters over a base",
            CreateOptions { extended_l2: true, journal: Some(128 << 10), ..plain(16_384) },
            true,
        ),
    ]
}

/// Opens one image again and again, which is clean each time.
struct Fixture {
    options: CreateOptions,
    base: Option<Vec<u8>>,
    image: RefCell<Option<Arc<MemoryStorage>>>,
    data_file: RefCell<Option<Arc<MemoryStorage>>>,
}

impl Fixture {
    fn new(options: CreateOptions, with_base: bool) -> Self {
        let base = with_base.then(|| (0..700_001u32).map(|i| u8::try_from(i % 253 + 1).unwrap()).collect());
        let backing = with_base.then(|| ("base".to_owned(), Some("raw".to_owned())));
        let options = encrypted(CreateOptions { backing, ..options });
        Self { options, base, image: RefCell::default(), data_file: RefCell::default() }
    }

    async fn open(&self) -> Result<SharedDisk> {
        let image = self.image.borrow().clone().expect("made before") as SharedStorage;
        let header = Header::read(&*image).await?;
        let mut lines = Vec::new();
        let report = check(&header, &image, Repair::Nothing, &mut |line| lines.push(line)).await?;
        assert!(report.is_clean(), "an image that was closed is clean: {report:?} {lines:?}");
        let files = Files {
            image,
            data_file: self.data_file.borrow().clone().map(|file| file as SharedStorage),
            below: self.base.as_ref().map(|base| MemoryDisk::holding(base) as SharedDisk),
        };
        let options = OpenOptions { cipher: cipher_of(&self.options), ..OpenOptions::default() };
        Ok(CheckedDisk::new(Qcow2::open(header, files, options).await?))
    }
}

impl DiskFixture for Fixture {
    fn fresh(&self, size: u64) -> LocalFuture<'_, Result<SharedDisk>> {
        Box::pin(async move {
            let image = MemoryStorage::new("image");
            let data_file = self.options.data_file.is_some().then(|| MemoryStorage::new("data"));
            let shared = data_file.clone().map(|file| file as SharedStorage);
            create(&*image, shared.as_ref(), &CreateOptions { size, ..self.options.clone() }).await?;
            *self.image.borrow_mut() = Some(image);
            *self.data_file.borrow_mut() = data_file;
            self.open().await
        })
    }

    fn reopen(&self) -> LocalFuture<'_, Result<SharedDisk>> {
        Box::pin(self.open())
    }

    fn fresh_content(&self, size: u64) -> Vec<u8> {
        let mut content = self.base.clone().unwrap_or_default();
        content.resize(usize::try_from(size).unwrap(), 0);
        content
    }
}

#[test]
fn an_encrypted_image_is_a_disk() {
    for with_base in [false, true] {
        for options in [
            plain(65_536),
            plain(512),
            CreateOptions { version: 2, ..plain(4096) },
            CreateOptions { extended_l2: true, ..plain(65_536) },
            CreateOptions { journal: Some(1 << 20), ..plain(65_536) },
            CreateOptions { journal: Some(64 << 10), ..plain(4096) },
            CreateOptions { journal: Some(128 << 10), extended_l2: true, ..plain(16_384) },
            CreateOptions { data_file: Some("data".to_owned()), ..plain(65_536) },
        ] {
            block_on(contract::disk(&Fixture::new(options, with_base)));
        }
    }
}

#[test]
fn the_contract_holds_when_the_drive_answers_in_any_order() {
    sim::contract_in_any_order(&setups());
}

#[test]
fn crashes_of_a_busy_image() {
    sim::crashes_of_a_busy_image(&setups());
}

#[test]
fn every_host_operation_fails_once() {
    sim::every_host_operation_fails(&setups(), Operation::Write | Operation::WriteZeroes, 20);
}

fn files(image: &Arc<MemoryStorage>, below: Option<SharedDisk>) -> Files {
    Files { image: image.clone(), data_file: None, below }
}

async fn open(image: &Arc<MemoryStorage>, options: &CreateOptions, below: Option<SharedDisk>) -> Arc<Qcow2> {
    let header = Header::read(&**image).await.unwrap();
    let open = OpenOptions { cipher: cipher_of(options), ..OpenOptions::default() };
    Qcow2::open(header, files(image, below), open).await.unwrap()
}

/// Whatever way the bytes take: fresh, in place, through the journal, filled in from below, a part of a sector.
#[test]
fn nothing_of_the_guest_is_readable_on_the_medium() {
    let mark: Vec<u8> = b"nobody may read this".iter().copied().cycle().take(64 << 10).collect();
    let is_there = |image: &MemoryStorage| {
        let bytes = image.content().to_vec();
        bytes.windows(16).any(|window| mark[..40].windows(16).any(|part| part == window))
    };
    for setup in setups() {
        block_on(async {
            let below = setup.has_base.then(|| MemoryDisk::holding(&mark) as SharedDisk);
            let image = MemoryStorage::new("image");
            create(&*image, None, &setup.options).await.unwrap();
            let disk = open(&image, &setup.options, below).await;
            let write = async |at: u64, len: usize| {
                let data = Buffer::copy_of(&mark[..len]);
                disk.write(GuestOffset::new(at), data, WriteFlags::default()).await.unwrap();
            };
            for round in 0..3 {
                write(0, 20_000).await;
                write(1000, 300).await;
                disk.flush().await.unwrap();
                // Of a transaction that is not verified yet: where there is a journal it goes through that.
                write(512, 4096).await;
                write(70_000 + round * 1000, 10).await;
                disk.write_zeroes(GuestOffset::new(600).span(100), ZeroFlags::default()).await.unwrap();
                write(100_000, 40).await;
                disk.flush().await.unwrap();
                assert!(!is_there(&image), "{}", setup.name);
            }
            let read = disk.read(GuestOffset::new(70_000), Buffer::zeroed(10)).await.unwrap();
            assert_eq!(read.to_vec(), mark[..10]);
            disk.close().await.unwrap();
            assert!(!is_there(&image), "{}", setup.name);
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
async fn open_with(image: &Arc<MemoryStorage>, given: &[&str]) -> Result<SharedDisk> {
    let shared: SharedStorage = image.clone();
    let head = FormatKind::Qcow2.format().read(&*shared).await?;
    let options = AnyOptions { secrets: secrets(given), ..AnyOptions::default() };
    Ok(head.open(files(image, None), options).await?.disk)
}

#[test]
fn keys_open_an_image_until_they_are_removed() {
    block_on(async {
        let image = MemoryStorage::new("image");
        create(&*image, None, &encrypted(plain(4096))).await.unwrap();
        let shared: SharedStorage = image.clone();
        let area = FormatKind::Qcow2.format().read(&*shared).await.unwrap().key_area().unwrap();
        let disk = open_with(&image, &[SECRET]).await.unwrap();
        disk.write(GuestOffset::new(4096), Buffer::copy_of(&[7; 4096]), WriteFlags::default()).await.unwrap();
        disk.close().await.unwrap();
        let reads = async |given: &[&str]| {
            let disk = open_with(&image, given).await?;
            let read = disk.read(GuestOffset::new(4096), Buffer::zeroed(4096)).await?;
            assert_eq!(read.to_vec(), [7; 4096]);
            disk.close().await
        };
        let none = reads(&[]).await.unwrap_err();
        assert_eq!(none.kind(), ErrorKind::Unsupported);
        assert!(none.chain().contains("--secret id=NAME,file=FILE"), "{}", none.chain());
        let wrong = reads(&["wrong", "wrong\n"]).await.unwrap_err();
        assert!(
            wrong.kind() == ErrorKind::Invalid && wrong.chain().contains("line break"),
            "{}",
            wrong.chain()
        );
        reads(&["wrong", SECRET]).await.unwrap();
        let mut random = Random::from_seed(5);
        let mut change = async |given: &[&str], change: KeyChange| {
            let mut chance = |bytes: &mut [u8]| {
                random.fill(bytes);
                Ok(())
            };
            let place: Arc<dyn vellum_core::Offload> = Arc::new(Inline);
            change_keys(area, &shared, &secrets(given), &change, &mut chance, &place)
                .await
                .map(|changed| changed.slots)
        };
        let add = |text: &str, slot| {
            let secret = Secret::new(text.into()).unwrap();
            KeyChange::Add { secret, slot, iterations: 1000 }
        };
        assert!(change(&["wrong"], add("more", None)).await.unwrap_err().chain().contains("no secret"));
        for slot in 1..8 {
            let text = format!("key {slot}");
            let wanted = (slot == 6).then_some(6);
            assert_eq!(change(&[SECRET], add(&text, wanted)).await.unwrap(), [slot]);
            reads(&[&text]).await.unwrap();
        }
        assert!(change(&[SECRET], add("more", None)).await.unwrap_err().chain().contains("in use"));
        assert!(change(&[SECRET], add("more", Some(3))).await.unwrap_err().chain().contains("in use"));
        let old = KeyChange::RemoveSecret { secret: Secret::new(SECRET.into()).unwrap() };
        assert_eq!(change(&[], old.clone()).await.unwrap(), [0]);
        assert!(reads(&[SECRET]).await.is_err());
        assert!(change(&[], old).await.unwrap_err().chain().contains("no key slot"));
        for slot in 1..7 {
            reads(&[&format!("key {slot}")]).await.unwrap();
            assert_eq!(change(&[], KeyChange::Remove { slot }).await.unwrap(), [slot]);
            assert!(reads(&[&format!("key {slot}")]).await.is_err());
        }
        assert!(change(&[], KeyChange::Remove { slot: 7 }).await.unwrap_err().chain().contains("last key"));
        reads(&["key 7"]).await.unwrap();
        // A secret that all slots have is not removed from any of them.
        for slot in 0..3 {
            assert_eq!(change(&["key 7"], add("key 7", None)).await.unwrap(), [slot]);
        }
        let the_only_one = KeyChange::RemoveSecret { secret: Secret::new("key 7".into()).unwrap() };
        assert!(change(&[], the_only_one.clone()).await.unwrap_err().chain().contains("every key slot"));
        assert_eq!(area.header(&*shared).await.unwrap().active_slots().collect::<Vec<_>>(), [0, 1, 2, 7]);
        assert_eq!(change(&["key 7"], add("another", None)).await.unwrap(), [3]);
        assert_eq!(change(&[], the_only_one).await.unwrap(), [0, 1, 2, 7]);
        reads(&["another"]).await.unwrap();
        // Each slot once more, in any order, and a damaged header.
        let header = Header::read(&*shared).await.unwrap();
        let report = check(&header, &shared, Repair::Nothing, &mut |_| {}).await.unwrap();
        assert!(report.is_clean(), "keys are not leaked: {report:?}");
        shared.write(area.span.start(), Buffer::copy_of(b"SKUL")).await.unwrap();
        assert_eq!(reads(&["another"]).await.unwrap_err().kind(), ErrorKind::Corrupt);
    });
}

/// An image one write or flush of which fails, counted from 0.
struct Failing {
    image: Arc<MemoryStorage>,
    fails: usize,
    changes: AtomicUsize,
}

impl Failing {
    fn may_change(&self) -> Result<()> {
        match self.changes.fetch_add(1, Ordering::Relaxed) == self.fails {
            true => Err(Error::new(ErrorKind::Io, "the drive failed")),
            false => Ok(()),
        }
    }
}

impl Storage for Failing {
    fn name(&self) -> &str {
        self.image.name()
    }

    fn limits(&self) -> &Limits {
        self.image.limits()
    }

    fn len(&self) -> u64 {
        self.image.len()
    }

    fn read(&self, at: ImageOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        self.image.read(at, buffer)
    }

    fn write(&self, at: ImageOffset, data: Buffer) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.may_change()?;
            self.image.write(at, data).await
        })
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.may_change()?;
            self.image.flush().await
        })
    }

    fn write_zeroes(&self, span: ImageSpan, how: Zeroes) -> LocalFuture<'_, Result<()>> {
        self.image.write_zeroes(span, how)
    }

    fn discard(&self, span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        self.image.discard(span)
    }

    fn set_len(&self, len: u64) -> LocalFuture<'_, Result<()>> {
        self.image.set_len(len)
    }

    fn preallocate(&self, span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        self.image.preallocate(span)
    }

    fn runs(&self, span: ImageSpan) -> LocalFuture<'_, Result<Vec<StorageRun>>> {
        self.image.runs(span)
    }
}

/// Changes the keys of an image one write or flush of which fails.
async fn change_failing(
    image: &Arc<MemoryStorage>,
    area: KeyArea,
    random: &mut Random,
    fails: usize,
    change: &KeyChange,
) -> Result<KeysChanged> {
    let mut chance = |bytes: &mut [u8]| {
        random.fill(bytes);
        Ok(())
    };
    let place: Arc<dyn vellum_core::Offload> = Arc::new(Inline);
    let failing: SharedStorage =
        Arc::new(Failing { image: image.clone(), fails, changes: AtomicUsize::new(0) });
    change_keys(area, &failing, &secrets(&[SECRET]), change, &mut chance, &place).await
}

/// A change of keys that fails says what may be so, and can be repeated.
#[test]
fn keys_on_a_drive_that_fails_are_told_as_they_are() {
    block_on(async {
        let image = MemoryStorage::new("image");
        create(&*image, None, &encrypted(plain(4096))).await.unwrap();
        let shared: SharedStorage = image.clone();
        let area = FormatKind::Qcow2.format().read(&*shared).await.unwrap().key_area().unwrap();
        let mut random = Random::from_seed(6);
        let mut change = async |fails: usize, change: &KeyChange| {
            change_failing(&image, area, &mut random, fails, change).await
        };
        let header = async || area.header(&*shared).await.unwrap();
        let is_there = async |slot: usize| header().await.slot_iterations(slot).is_some();
        let material = async |slot: usize| {
            let (at, len) = header().await.material(slot);
            shared.read(area.span.start() + at, Buffer::zeroed(len)).await.unwrap().to_vec()
        };
        let secret = Secret::new("more".into()).unwrap();
        let add = KeyChange::Add { secret: secret.clone(), slot: Some(1), iterations: 1000 };
        // The material and the two sectors of the header, each with a flush.
        for fails in 0..6 {
            let said = change(fails, &add).await.unwrap_err().chain();
            let may_be_there = said.contains("the new key may be in slot 1 now, or may not");
            assert_eq!(may_be_there, fails >= 2, "{fails}: {said}");
            assert_eq!(is_there(1).await, fails == 5, "{fails}");
            if fails == 5 {
                assert!(said.contains("`vellum key remove --slot 1`"), "{said}");
                assert!(!change(usize::MAX, &KeyChange::Remove { slot: 1 }).await.unwrap().was_empty);
            }
        }
        for by_secret in [false, true] {
            let remove = match by_secret {
                true => KeyChange::RemoveSecret { secret: secret.clone() },
                false => KeyChange::Remove { slot: 1 },
            };
            for fails in 0..6 {
                change(usize::MAX, &add).await.unwrap();
                let before = material(1).await;
                let said = change(fails, &remove).await.unwrap_err().chain();
                let words = match fails {
                    ..4 => "the key in slot 1 may be gone, or may not",
                    _ => "its key material could not be overwritten and may still be there",
                };
                assert!(said.contains(words) && said.contains("`vellum key remove --slot 1`"), "{said}");
                assert_eq!(is_there(1).await, fails < 1, "{fails}");
                assert_eq!(material(1).await == before, fails < 5, "{fails}");
                // As advised.
                let again = change(usize::MAX, &KeyChange::Remove { slot: 1 }).await.unwrap();
                assert_eq!((again.slots, again.was_empty), (vec![1], fails >= 1), "{fails}");
                assert!(!is_there(1).await && is_there(0).await && material(1).await != before, "{fails}");
            }
        }
        let said = change(usize::MAX, &KeyChange::Remove { slot: 8 }).await.unwrap_err().chain();
        assert!(said.contains("no key in slot 8"), "{said}");
        open_with(&image, &[SECRET]).await.unwrap().close().await.unwrap();
    });
}

/// A slot that counts as a key opens the image, wherever a change of it ends: also slot 6, the salt of which lies in two sectors.
#[test]
fn a_slot_in_use_opens_wherever_a_change_ends() {
    block_on(async {
        let image = MemoryStorage::new("image");
        create(&*image, None, &encrypted(plain(4096))).await.unwrap();
        let shared: SharedStorage = image.clone();
        let area = FormatKind::Qcow2.format().read(&*shared).await.unwrap().key_area().unwrap();
        let mut random = Random::from_seed(8);
        let mut change = async |fails: usize, change: &KeyChange| {
            change_failing(&image, area, &mut random, fails, change).await
        };
        let secret = Secret::new("more".into()).unwrap();
        let opens = async |slot: usize| {
            let header = area.header(&*shared).await.unwrap();
            if header.slot_iterations(slot).is_none() {
                return true;
            }
            let (at, len) = header.material(slot);
            let material = shared.read(area.span.start() + at, Buffer::zeroed(len)).await.unwrap().to_vec();
            header.open_slot(slot, &material, &secret).unwrap().is_some()
        };
        for slot in [1, 5, 6, 7] {
            let add = KeyChange::Add { secret: secret.clone(), slot: Some(slot), iterations: 1000 };
            let remove = KeyChange::Remove { slot };
            for fails in 0..6 {
                change(fails, &add).await.unwrap_err();
                assert!(opens(slot).await, "slot {slot} is added, and change {fails} fails");
                change(usize::MAX, &remove).await.unwrap();
                change(usize::MAX, &add).await.unwrap();
                assert!(opens(slot).await, "slot {slot}");
                change(fails, &remove).await.unwrap_err();
                assert!(opens(slot).await, "slot {slot} is removed, and change {fails} fails");
                change(usize::MAX, &remove).await.unwrap();
            }
        }
    });
}

#[test]
fn what_cannot_be_encrypted_is_refused() {
    let refused = |options: CreateOptions| {
        let image = MemoryStorage::new("image");
        block_on(create(&*image, None, &encrypted(options))).unwrap_err().chain()
    };
    let all = CreateOptions { preallocation: Preallocation::Full, ..plain(4096) };
    assert!(refused(all).contains("random bytes"));
    let image = MemoryStorage::new("image");
    block_on(async {
        create(&*image, None, &encrypted(plain(4096))).await.unwrap();
        let header = Header::read(&*image).await.unwrap();
        let error = Qcow2::open(header, files(&image, None), OpenOptions::default()).await.err().unwrap();
        assert!(error.chain().contains("without its key"));
    });
}

// QEMU in turns.

struct Dir(PathBuf);

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn qemu(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().unwrap();
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && !text.contains("error"), "{program} {arguments:?} failed:\n{text}");
}

/// Draws a request; returns its place, which is aligned so that QEMU need not read around it, and the byte it writes.
fn draw(random: &mut Random, size: usize) -> (usize, usize, u8) {
    let align = *random.pick(&[512, 4096, 65_536]);
    let at = random.index(size / align) * align;
    let len = (1 + random.index(100_000)).next_multiple_of(align).min(size - at);
    (at, len, 1 + u8::try_from(random.below(255)).unwrap())
}

#[test]
fn qemu_and_this_program_in_turns() {
    if Command::new("qemu-img").arg("--version").output().is_err() {
        eprintln!("skipped: qemu-img is not installed");
        return;
    }
    const SIZE: usize = 3 << 20;
    let dir = Dir(std::env::temp_dir().join(format!("vellum-encrypted-{}", std::process::id())));
    std::fs::create_dir_all(&dir.0).unwrap();
    let (path, raw) = (dir.0.join("image.qcow2"), dir.0.join("model.raw"));
    let (path, raw) = (path.to_str().unwrap(), raw.to_str().unwrap());
    let secret = format!("secret,id=s,data={SECRET}");
    let options = format!("driver=qcow2,file.filename={path},encrypt.key-secret=s");
    for (seed, made) in (0..).zip([
        "encrypt.cipher-alg=aes-256",
        "encrypt.cipher-alg=aes-128,cluster_size=4k",
        "compat=0.10",
        "extended_l2=on,cluster_size=32k",
        "encrypt.hash-alg=sha512,cluster_size=512",
        "ours",
        "ours, journal",
    ]) {
        let mut model = vec![0; SIZE];
        match made {
            "ours" | "ours, journal" => {
                let journal = (made != "ours").then_some(128 << 10);
                let new = encrypted(CreateOptions { size: SIZE as u64, journal, ..plain(65_536) });
                let image = MemoryStorage::new("image");
                block_on(create(&*image, None, &new)).unwrap();
                std::fs::write(path, image.content().to_vec()).unwrap();
            }
            _ => {
                let made = format!("{made},encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10");
                let size = SIZE.to_string();
                qemu(
                    "qemu-img",
                    &["create", "-q", "--object", &secret, "-f", "qcow2", "-o", &made, path, &size],
                );
            }
        }
        for turn in 0..4 * scale() {
            let mut random = Random::from_seed(seed * 1000 + turn);
            let mut commands: Vec<String> = Vec::new();
            for _ in 0..40 {
                let (at, len, byte) = draw(&mut random, SIZE);
                match random.below(6) {
                    0 => {
                        model[at..at + len].fill(0);
                        commands.push(format!("write -z {at} {len}"));
                    }
                    _ => {
                        model[at..at + len].fill(byte);
                        commands.push(format!("write -P {byte} {at} {len}"));
                    }
                }
            }
            let mut arguments = vec!["--object", &secret, "--image-opts", &options];
            arguments.extend(commands.iter().flat_map(|command| ["-c", command.as_str()]));
            qemu("qemu-io", &arguments);
            if turn == 1 {
                qemu(
                    "qemu-img",
                    &["snapshot", "--object", &secret, "--image-opts", &options, "-c", "before"],
                );
            }
            block_on(async {
                let image = MemoryStorage::holding(made, &std::fs::read(path).unwrap());
                let disk = open_with(&image, &[SECRET]).await.unwrap();
                let read = disk.read(GuestOffset::ZERO, Buffer::zeroed(SIZE)).await.unwrap();
                assert!(read.to_vec() == model, "{made}: reads differently here");
                for _ in 0..60 {
                    let (at, len, byte) = draw(&mut random, SIZE);
                    let (at, len) =
                        if random.one_in(4) { (at + 3, len.min(SIZE - at - 3)) } else { (at, len) };
                    let span = GuestOffset::new(at as u64).span(len as u64);
                    match random.below(6) {
                        0 => {
                            let flags = ZeroFlags { may_unmap: random.one_in(2), ..ZeroFlags::default() };
                            disk.write_zeroes(span, flags).await.unwrap();
                            model[at..at + len].fill(0);
                        }
                        1 => disk.flush().await.unwrap(),
                        _ => {
                            model[at..at + len].fill(byte);
                            let data = Buffer::copy_of(&model[at..at + len]);
                            disk.write(span.start(), data, WriteFlags::default()).await.unwrap();
                        }
                    }
                }
                disk.close().await.unwrap();
                std::fs::write(path, image.content().to_vec()).unwrap();
            });
            std::fs::write(raw, &model).unwrap();
            qemu("qemu-img", &["check", "-q", "--object", &secret, "--image-opts", &options]);
            let theirs = format!("driver=raw,file.filename={raw}");
            qemu("qemu-img", &["compare", "-q", "--object", &secret, "--image-opts", &options, &theirs]);
        }
    }
}
