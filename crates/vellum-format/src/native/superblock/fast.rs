//! The fast medium that a superblock names, and whether its bits of units count.

use vellum_core::{Error, ErrorKind, Result};

use super::texts::{put_text, text};
use super::{Superblock, field};
use crate::bytes::{be64, put64};
use crate::fast::{FAST_NAME_MAX, FastId, NamedFast};
use crate::session::SessionNumber;

/// The fast medium that has copies of units, as the superblock has it.
#[derive(Debug, Clone)]
pub(super) struct Fast {
    id: FastId,
    name: String,
    number: Option<SessionNumber>,
    /// The generation in which the session counts.
    generation: u64,
}

impl Fast {
    pub(super) fn parse(page: &[u8]) -> Result<Self> {
        let id = FastId::new(page[field::FAST_ID..field::FAST_ID + 16].try_into().expect("16 bytes"));
        let number = page[field::FAST_NUMBER..field::FAST_NUMBER + 16].try_into().expect("16 bytes");
        Ok(Self {
            id: id.ok_or_else(|| Error::corrupt("it names a fast medium without an id"))?,
            name: text(
                page,
                field::FAST_NAME_LEN,
                field::FAST_NAME,
                FAST_NAME_MAX,
                "name of the fast medium",
            )?,
            number: SessionNumber::new(number),
            generation: be64(page, field::FAST_GENERATION),
        })
    }

    pub(super) fn encode(&self, bytes: &mut [u8]) {
        bytes[field::FAST_ID..field::FAST_ID + 16].copy_from_slice(&self.id.bytes());
        let number = self.number.map_or([0; 16], SessionNumber::bytes);
        bytes[field::FAST_NUMBER..field::FAST_NUMBER + 16].copy_from_slice(&number);
        put64(bytes, field::FAST_GENERATION, self.generation);
        bytes[field::FAST_NAME..field::FAST_END].fill(0);
        put_text(bytes, field::FAST_NAME_LEN, field::FAST_NAME, &self.name);
    }
}

/// The error of an image that is not complete without its fast medium.
fn needs_medium(id: FastId, name: &str) -> Error {
    Error::new(
        ErrorKind::Refused,
        format!(
            "units of it are on a fast medium alone, last seen at {name} (id {id}): give that medium (--fast PATH, where \
             the command takes it), or bring the units back first (`vellum tier move --back --all --fast PATH`). If it is lost, \
             `vellum convert --salvage` copies the rest"
        ),
    )
}

impl Superblock {
    /// The fast medium that it names.
    pub(crate) fn fast(&self) -> Option<NamedFast> {
        self.fast.as_ref().map(|fast| NamedFast {
            id: fast.id,
            name: fast.name.clone(),
            number: fast.number,
            counts: self.fast_counts(),
            is_needed: self.has_moved,
        })
    }

    /// Whether its bits of units on the fast medium count: the image was not changed without the medium.
    pub(crate) fn fast_counts(&self) -> bool {
        self.fast.as_ref().is_some_and(|fast| fast.number.is_some() && fast.generation == self.generation)
    }

    /// Names a fast medium, with the region for the bits of units that it has. They do not count yet. A snapshot may
    /// have a disk of `largest` bytes.
    pub(crate) fn attach_fast(&mut self, id: FastId, name: &str, largest: u64) -> Result<()> {
        if name.len() > FAST_NAME_MAX || name.contains('\0') {
            return Err(Error::invalid(format!(
                "the name of a fast medium has at most {FAST_NAME_MAX} bytes, none of them zero"
            )));
        }
        if self.fast.is_none() {
            self.places = self.places.with_fast(largest)?;
        }
        let before = self.fast.take().filter(|fast| fast.id == id);
        let (number, generation) = before.map_or((None, 0), |fast| (fast.number, fast.generation));
        self.fast = Some(Fast { id, name: name.to_owned(), number, generation });
        Ok(())
    }

    /// Names no fast medium any more. Whether it did.
    ///
    /// # Errors
    /// `Refused` while the medium may be the only one that has a unit.
    pub(crate) fn detach_fast(&mut self) -> Result<bool> {
        self.may_do_without_fast()?;
        if self.fast.take().is_none() {
            return Ok(false);
        }
        self.places = self.places.without_fast()?;
        self.page.0[field::FAST..field::FAST_END].fill(0);
        Ok(true)
    }

    /// Refuses what is done without the fast medium, or makes its bits void, while it may be the only one that has a
    /// unit.
    pub(crate) fn may_do_without_fast(&self) -> Result<()> {
        match self.fast.as_ref().filter(|_| self.has_moved) {
            None => Ok(()),
            Some(fast) => Err(needs_medium(fast.id, &fast.name)),
        }
    }

    /// Names a session with its fast medium: from now on its bits count.
    pub(crate) fn begin_fast(&mut self, number: SessionNumber) {
        if let Some(fast) = &mut self.fast {
            (fast.number, fast.generation) = (Some(number), self.generation);
        }
    }

    /// A new generation has been drawn in an opening with the fast medium, before which its bits counted.
    pub(crate) fn renew_fast(&mut self) {
        if let Some(fast) = &mut self.fast {
            fast.generation = self.generation;
        }
    }
}
