//! What an open image has for its encryption, where guest data lies anywhere in it (qcow2, native).
//!
//! A sector is encrypted with the number that it has in the storage, not with its number in the disk. So what moves is
//! decrypted and encrypted again.

use std::sync::Arc;

use vellum_core::{BlockSize, Buffer, GuestOffset, ImageOffset, Offload, Result, SharedStorage};
use vellum_luks::SectorCipher;

use super::ciphered::{Ciphered, Unwritten, first_sector, seal};
use crate::shared_or_alone::SharedOrAlone;

/// A cipher, and how the format uses it.
pub(crate) struct GuestCipher {
    cipher: Arc<SectorCipher>,
    unwritten: Unwritten,
    offload: Arc<dyn Offload>,
    /// Shared by changes of whole sectors, held alone by those of parts.
    pub(super) parts: SharedOrAlone,
}

impl GuestCipher {
    pub(crate) fn new(cipher: Arc<SectorCipher>, unwritten: Unwritten, offload: Arc<dyn Offload>) -> Self {
        Self { cipher, unwritten, offload, parts: SharedOrAlone::default() }
    }

    /// The cipher itself.
    pub(crate) fn cipher(&self) -> Arc<SectorCipher> {
        self.cipher.clone()
    }

    /// The storage of guest data as it reads without encryption.
    pub(crate) fn plain(&self, data: SharedStorage) -> SharedStorage {
        let all = Ciphered::all_of(data, self.cipher.clone(), self.offload.clone());
        Arc::new(all.with_unwritten(self.unwritten))
    }

    /// The bytes as they are stored at this place: a copy.
    ///
    /// # Errors
    /// `Io` when they would be stored as a sector that nobody has written.
    pub(crate) async fn seal(&self, at: ImageOffset, data: &Buffer) -> Result<Buffer> {
        debug_assert!(BlockSize::SECTOR.aligns(at));
        seal(&self.cipher, self.unwritten, &self.offload, first_sector(at), data).await
    }
}

/// What an image of qcow2's old scheme is read with, in which a sector is encrypted with its number in the disk.
pub(crate) struct OldCipher {
    cipher: Arc<SectorCipher>,
    offload: Arc<dyn Offload>,
}

impl OldCipher {
    pub(crate) fn new(cipher: Arc<SectorCipher>, offload: Arc<dyn Offload>) -> Self {
        Self { cipher, offload }
    }

    /// The storage in which what is at this place of `data` reads as the guest sees it from this place of the disk on.
    pub(crate) fn plain(&self, data: SharedStorage, host: ImageOffset, guest: GuestOffset) -> SharedStorage {
        let sector = |bytes: u64| bytes / BlockSize::SECTOR.bytes();
        let shift = sector(guest.bytes()).wrapping_sub(sector(host.bytes()));
        Arc::new(Ciphered::all_of(data, self.cipher.clone(), self.offload.clone()).shifted(shift))
    }
}
