//! The keys of a new image.

use std::fmt;
use std::sync::Arc;

use vellum_core::{Error, ErrorKind, Offload, Result, SharedStorage, offload as run_aside};
use vellum_luks::{Chance, Header, NewHeader, Secret, Secrets, SectorCipher};

use super::{KeyArea, Unlock};

/// The header of an image that is to be made, with its key in slot 0.
#[derive(Clone)]
pub struct NewKeys {
    header: Header,
    material: Arc<[u8]>,
}

impl fmt::Debug for NewKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NewKeys").field("header", &self.header).finish_non_exhaustive()
    }
}

impl NewKeys {
    /// Draws a key, to be opened by this secret. Takes as long as the iterations. Also returns the cipher that the key
    /// makes.
    ///
    /// # Errors
    /// `Invalid` for a header that is not made, and the errors of `chance`.
    pub fn make(
        new: &NewHeader,
        secret: &Secret,
        iterations: u32,
        chance: &mut Chance<'_>,
    ) -> Result<(Self, Arc<SectorCipher>)> {
        let (mut header, key) = new.make(chance)?;
        let material = header.fill_slot(0, &key, secret, iterations, chance)?;
        let cipher = SectorCipher::new(header.mode(), &key)?;
        Ok((Self { header, material: material.into() }, Arc::new(cipher)))
    }

    /// Draws a key for an image that is to be opened by the secret that opens another one: its mode, hash and work are those of that one.
    /// Other slots of that one are not taken over.
    ///
    /// # Errors
    /// `Invalid` when none of the secrets opens it, `Unsupported` when there is none, and as above.
    pub async fn like(
        area: KeyArea,
        storage: &SharedStorage,
        secrets: &Secrets,
        offload: &Arc<dyn Offload>,
    ) -> Result<Arc<Self>> {
        let old = area.header(&**storage).await?;
        let mut refused = None;
        for secret in secrets.all() {
            let mut one = Secrets::default();
            one.add("one", secret.clone())?;
            let slot = match area
                .open(&old, storage, &Unlock { secrets: &one, may_be_weak: false, offload })
                .await
            {
                Ok((_, slot)) => slot,
                Err(error) if error.kind() == ErrorKind::Invalid => {
                    refused = Some(error);
                    continue;
                }
                Err(error) => return Err(error),
            };
            let iterations = old.slot_iterations(slot).expect("it was just opened");
            let new = NewHeader {
                mode: old.mode(),
                key_len: old.key_len(),
                hash: old.hash(),
                digest_iterations: old.digest_iterations(),
            };
            let secret = secret.clone();
            let make = move || Self::make(&new, &secret, iterations, &mut system_chance);
            return run_aside(&**offload, make).await.map(|(keys, _)| Arc::new(keys));
        }
        Err(refused.unwrap_or_else(|| {
            Error::unsupported(format!("{}: there is no secret that opens it", storage.name()))
        }))
    }

    /// The header.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Bytes that the header and the material of all slots take.
    pub(crate) fn len(&self) -> u64 {
        self.header.payload()
    }

    /// The place and the bytes of each part that is not zero.
    pub(crate) fn parts(&self) -> [(u64, Vec<u8>); 2] {
        [(0, self.header.encode().to_vec()), (self.header.material(0).0, self.material.to_vec())]
    }
}

/// Random bytes of the system, for keys and salts.
///
/// # Errors
/// `Io` when it has none.
#[expect(clippy::disallowed_methods, reason = "nobody may guess a key")]
pub fn system_chance(bytes: &mut [u8]) -> Result<()> {
    getrandom::fill(bytes)
        .map_err(|error| Error::new(ErrorKind::Io, format!("the system provides no random numbers: {error}")))
}
