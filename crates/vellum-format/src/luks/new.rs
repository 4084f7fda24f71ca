//! The keys of a new image.

use std::fmt;
use std::sync::Arc;

use vellum_core::{Error, ErrorKind, Offload, Result, SharedStorage, offload as run_aside};
use vellum_luks::{Chance, Header, NewHeader, Secret, Secrets, SectorCipher};

use super::{KeyArea, Unlock};

/// The header of an image that is to be made, with its key in slot 0, or in those that another image has.
#[derive(Clone)]
pub struct NewKeys {
    header: Header,
    /// Of each slot that is filled.
    materials: Vec<(usize, Arc<[u8]>)>,
    slots_left: Vec<usize>,
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
        Ok((Self { header, materials: vec![(0, material.into())], slots_left: Vec::new() }, Arc::new(cipher)))
    }

    /// Draws a key for an image that is to be opened by the secrets that open another one: its mode, hash and work are those of that one, and
    /// each slot of it that a secret opens has one here, of the same number. The others are [`left`](Self::slots_left): nobody can fill a
    /// slot without its secret.
    ///
    /// The key is another one. With the same one, the same bytes at the same place of both files would be seen to be the same.
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
        let mut left: Vec<usize> = old.active_slots().collect();
        let mut opened = Vec::new();
        let mut refused = None;
        for secret in secrets.all() {
            // Trying takes seconds, so it ends with the last slot.
            if left.is_empty() {
                break;
            }
            let mut one = Secrets::default();
            one.add("one", secret.clone())?;
            match area.open(&old, storage, &Unlock { secrets: &one, may_be_weak: false, offload }).await {
                Ok((_, slot)) if left.contains(&slot) => {
                    left.retain(|other| *other != slot);
                    let iterations = old.slot_iterations(slot).expect("it was just opened");
                    opened.push((slot, secret.clone(), iterations));
                }
                // The same secret under another name.
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::Invalid => refused = Some(error),
                Err(error) => return Err(error),
            }
        }
        if opened.is_empty() {
            return Err(refused.unwrap_or_else(|| {
                Error::unsupported(format!("{}: there is no secret that opens it", storage.name()))
            }));
        }
        let new = NewHeader {
            mode: old.mode(),
            key_len: old.key_len(),
            hash: old.hash(),
            digest_iterations: old.digest_iterations(),
        };
        let make = move || {
            let (mut header, key) = new.make(&mut system_chance)?;
            let mut materials = Vec::new();
            for (slot, secret, iterations) in opened {
                let material = header.fill_slot(slot, &key, &secret, iterations, &mut system_chance)?;
                materials.push((slot, material.into()));
            }
            Ok(Arc::new(Self { header, materials, slots_left: left }))
        };
        run_aside(&**offload, make).await
    }

    /// Slots of the other image whose secrets were not given: they open nothing here.
    pub fn slots_left(&self) -> &[usize] {
        &self.slots_left
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
    pub(crate) fn parts(&self) -> impl Iterator<Item = (u64, Vec<u8>)> {
        let place = |slot: usize| self.header.material(slot).0;
        let materials = self.materials.iter().map(move |(slot, bytes)| (place(*slot), bytes.to_vec()));
        std::iter::once((0, self.header.encode().to_vec())).chain(materials)
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
