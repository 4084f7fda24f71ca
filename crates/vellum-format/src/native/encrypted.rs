//! Encryption of guest data: LUKS inside the image.
//!
//! ```text
//!   superblock ─► region keys: header │ key material           read before anything else; changed while the image is closed
//!
//!   guest's bytes ──► pieces of a request, each with its place ──encrypt──► checks, journal, image
//!   guest's bytes ◄────────────────────────────────────────── decrypt ◄──── image, overlaid by the journal
//!                                                              zeros ◄───── a sector whose stored bytes are zero
//! ```
//!
//! A sector is encrypted with the number that it has in the image file, not with its number in the disk, as in qcow2. So
//! a unit that moves is decrypted and encrypted again.
//!
//! 1. **A sector whose stored bytes are all zero is zero.** All that the format promises of space that nobody has
//!    written, of holes, and of what is made zero in place holds without a word changed: what follows a crash is a sector
//!    as it was (zero) or as it was written. Encrypted data never is such a sector: `luks/ciphered.rs` refuses to store it.
//! 2. What goes to the place of guest data is encrypted first: what the guest writes, zeros written as data, and what is
//!    filled in around them or copied from the base. So all that the engine and the journal know of it (checks, full data)
//!    is what is on the medium, and a recovery needs no key.
//! 3. Metadata is not encrypted, nor is a copy of a page of it that a snapshot keeps.
//! 4. Units do not hold their own entries: a packed block would tell how well 4 KiB of the guest can be compressed, and its
//!    identity must be read by a recovery that has no key.
//! 5. A part of a sector is written with the rest of it (`luks/sector_parts.rs`).
//! 6. An image can be opened without its key, to manage snapshots or its size: then guest data is neither read nor
//!    written, by any path.
//!
//! See `docs/design/0020-encryption.md`.

use vellum_core::{Buffer, Error, GuestSpan, ImageOffset, Result, SharedStorage, ZeroFlags};

use super::encryption_state::Encryption;
use super::image::Native;
use crate::luks::WholeSectors;

impl Native {
    fn locked(&self) -> Error {
        Error::unsupported(format!(
            "{} is encrypted, and was opened without its key: its data is neither read nor written",
            self.engine.name
        ))
    }

    /// The storage from which guest data is read.
    pub(super) fn plain(&self) -> Result<&SharedStorage> {
        match &self.encryption {
            Encryption::Off => Ok(&self.data),
            Encryption::On(unlocked) => Ok(&unlocked.plain),
            Encryption::Locked => Err(self.locked()),
        }
    }

    /// Whether guest data is encrypted, and there is no key.
    pub(super) fn is_locked(&self) -> bool {
        matches!(self.encryption, Encryption::Locked)
    }

    /// Guest data as it is to be stored at this place.
    pub(super) async fn stored(&self, at: ImageOffset, data: Buffer) -> Result<Buffer> {
        match &self.encryption {
            Encryption::Off => Ok(data),
            Encryption::On(unlocked) => Box::pin(unlocked.cipher.seal(at, &data)).await,
            Encryption::Locked => Err(self.locked()),
        }
    }

    /// Writes a run of the disk.
    pub(super) async fn write_any(&self, span: GuestSpan, data: Buffer) -> Result<()> {
        match &self.encryption {
            Encryption::Off => self.write_span(span, data).await,
            _ if span.is_empty() => Ok(()),
            Encryption::On(unlocked) => Box::pin(self.write_encrypted(&unlocked.cipher, span, data)).await,
            Encryption::Locked => Err(self.locked()),
        }
    }

    /// Makes a run of the disk zero.
    pub(super) async fn zero_any(&self, span: GuestSpan, flags: ZeroFlags) -> Result<()> {
        match &self.encryption {
            Encryption::Off => self.zero_span(span, flags).await,
            _ if span.is_empty() => Ok(()),
            Encryption::On(unlocked) => {
                let zero = async |whole: GuestSpan| self.zero_span(whole, flags).await;
                Box::pin(self.zero_encrypted(&unlocked.cipher, span, zero)).await
            }
            Encryption::Locked => Err(self.locked()),
        }
    }
}

impl WholeSectors for Native {
    fn name_of_disk(&self) -> &str {
        &self.engine.name
    }

    async fn read_whole(&self, span: GuestSpan, buffer: Buffer) -> Result<Buffer> {
        self.read_span(span, buffer).await
    }

    async fn write_whole(&self, span: GuestSpan, data: Buffer) -> Result<()> {
        self.write_span(span, data).await
    }
}
