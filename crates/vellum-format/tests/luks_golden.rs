//! Encrypted images of other programs that are only read. They were made once, and must open forever with the same bytes.
//!
//! ```text
//!   luks2-argon2id-4096.img    cryptsetup 2.6: argon2id, AES-128-XTS, sectors of 4096 bytes. The data was encrypted by Python's
//!                              cryptography, with the key that cryptsetup says the volume has
//!   qcow2-old-aes.qcow2        qemu-img 10: encrypt.format=aes
//! ```

use std::path::Path;
use std::sync::Arc;

use futures_lite::future::block_on;
use vellum_core::{
    Buffer, ErrorKind, GuestOffset, ImageOffset, MemoryStorage, Result, SharedDisk, SharedStorage,
    Storage as _,
};
use vellum_format::FormatKind;
use vellum_format::image::{Files, OpenOptions};
use vellum_format::luks::{Secret, Secrets};

fn golden(name: &str) -> Arc<MemoryStorage> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(format!("{name}.zst"));
    let bytes =
        zstd::decode_all(&std::fs::read(path).expect("a golden image")[..]).expect("compressed by zstd");
    MemoryStorage::holding(name, &bytes)
}

fn content(len: usize) -> Vec<u8> {
    (0..len).map(|at| u8::try_from((at / 512 * 7 + at) % 251).expect("small")).collect()
}

fn options(secrets: &[&str], read_only: bool) -> OpenOptions {
    let mut all = Secrets::default();
    for (number, secret) in secrets.iter().enumerate() {
        all.add(&number.to_string(), Secret::new(secret.as_bytes().to_vec()).unwrap()).unwrap();
    }
    OpenOptions { secrets: Arc::new(all), read_only, may_be_weak: true, ..OpenOptions::default() }
}

async fn open(kind: FormatKind, image: &Arc<MemoryStorage>, options: OpenOptions) -> Result<SharedDisk> {
    let image: SharedStorage = image.clone();
    let head = kind.format().read(&*image).await?;
    Ok(head.open(Files { image, data_file: None, below: None }, options).await?.disk)
}

async fn read(disk: &SharedDisk, at: usize, len: usize) -> Vec<u8> {
    disk.read(GuestOffset::new(at as u64), Buffer::zeroed(len)).await.unwrap().to_vec()
}

#[test]
fn a_volume_of_luks_2_reads_as_it_did() {
    block_on(async {
        let (image, content) = (golden("luks2-argon2id-4096.img"), content(16 << 10));
        let good = image.content().to_vec();
        let disk = open(FormatKind::Luks, &image, options(&["wrong", "correct horse"], true)).await.unwrap();
        assert_eq!(disk.geometry().size, 16 << 10);
        for (at, len) in [(0, 16 << 10), (0, 4096), (512, 512), (5000, 11_000), (16_383, 1)] {
            assert_eq!(read(&disk, at, len).await, content[at..at + len], "{at}");
        }
        assert!(
            open(FormatKind::Luks, &image, options(&["correct horse"], false)).await.is_err(),
            "only read"
        );
        assert!(image.content().to_vec() == good, "nothing was written");
        // Each copy of the header alone.
        for at in [100, 5000] {
            let image = golden("luks2-argon2id-4096.img");
            image.write(ImageOffset::new(at), Buffer::copy_of(&[0x77; 8])).await.unwrap();
            let disk = open(FormatKind::Luks, &image, options(&["correct horse"], true)).await.unwrap();
            assert_eq!(read(&disk, 0, 4096).await, content[..4096]);
            image.write(ImageOffset::new((16 << 10) + at), Buffer::copy_of(&[0x77; 8])).await.unwrap();
            let error =
                open(FormatKind::Luks, &image, options(&["correct horse"], true)).await.err().unwrap();
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{}", error.chain());
        }
    });
}

#[test]
fn an_image_of_the_old_scheme_reads_as_it_did() {
    block_on(async {
        let (image, content) = (golden("qcow2-old-aes.qcow2"), content(20_480));
        let good = image.content().to_vec();
        let disk = open(FormatKind::Qcow2, &image, options(&["correct horse"], true)).await.unwrap();
        for (at, len) in [(0, 20_480), (4096, 4096), (512, 512), (5000, 12_000), (20_479, 1)] {
            assert_eq!(read(&disk, at, len).await, content[at..at + len], "{at}");
        }
        for (secrets, read_only) in
            [(&["correct horse"][..], false), (&["correct horse", "two"], true), (&[], true)]
        {
            assert!(
                open(FormatKind::Qcow2, &image, options(secrets, read_only)).await.is_err(),
                "{secrets:?}"
            );
        }
        let strict = OpenOptions { may_be_weak: false, ..options(&["correct horse"], true) };
        assert!(open(FormatKind::Qcow2, &image, strict).await.is_err());
        assert!(image.content().to_vec() == good, "nothing was written");
    });
}
