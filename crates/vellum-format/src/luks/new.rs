//! The keys of a new image.

use std::fmt;
use std::sync::Arc;

use vellum_core::{Error, ErrorKind, Result};
use vellum_luks::{Chance, Header, NewHeader, Secret, SectorCipher};

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
