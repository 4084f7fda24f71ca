//! Encryption of guest data: LUKS inside the image.
//!
//! ```text
//!   guest's bytes ──► pieces of a request, each with its place ──encrypt──► checks, journal, image
//!   guest's bytes ◄────────────────────────────────────────── decrypt ◄──── image, overlaid by the journal
//! ```
//!
//! A sector is encrypted with the number that it has in the image file (or in the data file), not with its number in
//! the disk. So a cluster that moves is decrypted and encrypted again.
//!
//! 1. What goes to the place of guest data is encrypted first: what the guest writes, zeros written as data, and what
//!    is filled in around them or copied from below. So all that the engine and the journal know of it (checks, full
//!    data) is what is on the medium, and a recovery needs no key.
//! 2. Space that reads as zero on the host does not read as zero in the disk. So no fill is left out because a fresh
//!    cluster is zero.
//! 3. Metadata and compressed clusters are not encrypted, as in QEMU.
//! 4. The old scheme (`encryption=on`) is only read, where the caller copies or compares: AES-CBC, and a sector's number is
//!    that in the disk.
//! 5. A part of a sector is written with the rest of it (`luks/sector_parts.rs`).
//!
//! See `docs/design/0020-encryption.md`.

use std::sync::Arc;

use vellum_core::{BlockSize, Buffer, Error, GuestOffset, GuestSpan, ImageOffset, Result, SharedStorage};
use vellum_luks::{IvRule, Mode, SectorCipher};

use super::header::{Encryption, Header};
use super::image::Qcow2;
use crate::image::OpenOptions;
use crate::luks::{KeyArea, Unlock, WholeSectors, refuse_weak, refuse_without_secret};

/// The cipher of an image, if it is encrypted.
///
/// # Errors
/// `Unsupported` for a kind of encryption that is not read, or without a secret; `Invalid` for wrong secrets; and those of
/// the header and the storage.
pub(crate) async fn unlock(
    header: &Header,
    image: &SharedStorage,
    options: &OpenOptions,
) -> Result<Option<Arc<SectorCipher>>> {
    match header.encryption() {
        None => Ok(None),
        Some(Encryption::Aes) => old_cipher(image, options).map(Some),
        Some(Encryption::Luks) => {
            let area = KeyArea { span: header.key_area().expect("it was checked") };
            let unlock = Unlock {
                secrets: &options.secrets,
                may_be_weak: options.may_be_weak && (options.read_only || options.snapshot.is_some()),
                offload: &options.offload,
            };
            area.unlock(image, &unlock).await.map(Some)
        }
    }
}

/// The cipher of the old scheme: AES-CBC, with the first 16 bytes of the secret as its key. Nothing in the image tells whether
/// that is the right one.
fn old_cipher(image: &SharedStorage, options: &OpenOptions) -> Result<Arc<SectorCipher>> {
    let is_read = options.read_only || options.snapshot.is_some();
    refuse_weak(&**image, Mode::Cbc(IvRule::Plain64), options.may_be_weak && is_read)?;
    refuse_without_secret(&**image, "the old scheme of qcow2", &options.secrets)?;
    match options.secrets.only() {
        Some(secret) => SectorCipher::of_old_qcow2(secret).map(Arc::new),
        None => Err(Error::invalid(format!(
            "{} is encrypted with the old scheme of qcow2, which does not tell whether a secret is the right one: give that \
             one with --secret, and beside it at most that of the copy",
            image.name()
        ))),
    }
}

impl Qcow2 {
    /// The storage in which what is stored here reads as the guest sees it from this place of the disk on.
    pub(super) fn plain_at(&self, host: ImageOffset, guest: GuestOffset) -> SharedStorage {
        match &self.old_cipher {
            None => self.plain.clone(),
            Some(cipher) => cipher.plain(self.data.clone(), host, guest),
        }
    }
}

/// Refuses what cannot be encrypted, and an encrypted image without its cipher.
pub(crate) fn check(header: &Header, size: u64, has_cipher: bool) -> Result<()> {
    let Some(_) = header.encryption() else { return Ok(()) };
    if !has_cipher {
        return Err(Error::unsupported("it is encrypted, and was opened without its key"));
    }
    if header.data_file_is_raw() {
        return Err(Error::unsupported("its data file cannot be raw and encrypted"));
    }
    if !size.is_multiple_of(BlockSize::SECTOR.bytes()) {
        return Err(Error::corrupt(format!(
            "a disk of {size} bytes cannot be encrypted: it ends within a sector"
        )));
    }
    Ok(())
}

impl WholeSectors for Qcow2 {
    fn name_of_disk(&self) -> &str {
        &self.engine.name
    }

    async fn read_whole(&self, span: GuestSpan, buffer: Buffer) -> Result<Buffer> {
        self.read_span(span, buffer).await
    }

    async fn write_whole(&self, span: GuestSpan, data: Buffer) -> Result<()> {
        self.write_sectors(span, data).await
    }
}
