//! Whether guest data of an open image is encrypted, and with what. What is done with it is in `encrypted.rs`.

use std::sync::Arc;

use vellum_core::{Error, Inline, Offload, Result, SharedStorage};
use vellum_luks::SectorCipher;

use super::superblock::Superblock;
use crate::luks::{GuestCipher, Unwritten};

/// How guest data of an open image is stored.
#[derive(Clone)]
pub(super) enum Encryption {
    /// As it is.
    Off,
    /// Encrypted, and the image was opened without its key.
    Locked,
    On(Arc<Unlocked>),
}

/// What an image has that was opened with its key.
pub(super) struct Unlocked {
    pub(super) cipher: GuestCipher,
    /// The storage of guest data, as it reads without encryption.
    pub(super) plain: SharedStorage,
}

impl Encryption {
    /// That of an image, over the storage that has its guest data.
    ///
    /// # Errors
    /// `Unsupported` for an encrypted image without its cipher, unless the caller does not read or write its data.
    pub(super) fn of(
        superblock: &Superblock,
        data: &SharedStorage,
        cipher: Option<Arc<SectorCipher>>,
        may_be_locked: bool,
        offload: Option<Arc<dyn Offload>>,
    ) -> Result<Self> {
        let offload = offload.unwrap_or_else(|| Arc::new(Inline));
        match (superblock.is_encrypted(), cipher) {
            (false, _) => Ok(Self::Off),
            (true, Some(cipher)) => Ok(Self::with_key(cipher, data, offload)),
            (true, None) if may_be_locked => Ok(Self::Locked),
            (true, None) => Err(Error::unsupported("it is encrypted, and was opened without its key")),
        }
    }

    fn with_key(cipher: Arc<SectorCipher>, data: &SharedStorage, offload: Arc<dyn Offload>) -> Self {
        let cipher = GuestCipher::new(cipher, Unwritten::Zeros, offload);
        let plain = cipher.plain(data.clone());
        Self::On(Arc::new(Unlocked { cipher, plain }))
    }
}
