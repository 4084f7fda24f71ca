//! Whether the images below are the ones that the image above was made over.
//!
//! 1. What an image records is compared each time it is opened, with what each image below proves now. Any
//!    difference fails the opening, and the message names the image, what was recorded, what is there, and the remedy.
//!    While it is open, [`BaseFiles`] looks again.
//! 2. An image over a URL that records nothing yet gets the pin before its disk is opened for writing: before
//!    the first byte of the base is used for a write. When it is only read, nothing is recorded: nothing of the base is
//!    kept either.
//! 3. An image below that proves nothing, such as an NBD export or a weak entity tag, counts as trusted only if the
//!    user, or the pin, says so. An image over it that is only read needs no trust: it keeps nothing of it. The pin of the
//!    image on top covers all those below it, so an image further down only compares its own, if it has one.

use std::sync::Arc;

use vellum_core::pin::{Pin, Proof, ProofKind};
use vellum_core::{Error, ErrorKind, Result, Url};
use vellum_format::image::Head;

use super::{Chain, Member};
use crate::hydrate::BaseFiles;

/// What is found below an image, from the top down: what each proves, and by which name it is known.
pub(super) struct FoundBelow {
    proofs: Vec<Proof>,
    names: Vec<String>,
    /// The first image that proves nothing, if there is one.
    unproven: Option<usize>,
    has_url: bool,
}

impl Chain {
    /// The files below the image on top, as far as anything tells whether they change while they are open.
    pub fn base_files(&self) -> &Arc<BaseFiles> {
        &self.base_files
    }

    /// Compares what the image on top records of those below it with what they were when this chain was opened. Opening
    /// has done so, but for the target of a migration.
    ///
    /// # Errors
    /// `Changed` when they are others.
    pub fn check_pin(&self) -> Result<()> {
        let (Some(below), Some(pin)) = (&self.below, self.top.head.pin()) else { return Ok(()) };
        FoundBelow::of(below.members().iter()).compare(pin)
    }
}

/// The files of these images, without those that are written by the disks whose snapshots they have.
pub(super) fn files_below(members: &[Member]) -> Arc<BaseFiles> {
    let members = members.iter().filter(|member| !member.is_snapshot);
    let files = members.flat_map(|member| {
        let data_file = member.data_file.as_ref().map(|(_, file)| file);
        let parts = member.parts.iter().map(|(_, file)| file);
        std::iter::once(&member.storage).chain(data_file).chain(parts).cloned()
    });
    BaseFiles::of(files.filter(|file| file.proof().is_some()).collect())
}

impl FoundBelow {
    pub(super) fn of<'a>(members: impl Iterator<Item = &'a Member>) -> Self {
        let mut found = Self { proofs: Vec::new(), names: Vec::new(), unproven: None, has_url: false };
        for (index, member) in members.enumerate() {
            if member.is_snapshot {
                // Its file changes while its disk is written; the snapshot, which is named by a number, does not.
                found.proofs.push(Proof::trusted(member.opened.disk.geometry().size));
                found.names.push(member.path.display().to_string());
                continue;
            }
            let proof = member.storage.proof();
            let is_at_url = Url::of_path(&member.path).is_some();
            // A device of this host proves nothing either, and is held as before.
            if proof.is_none() && is_at_url {
                found.unproven.get_or_insert(index);
            }
            found.has_url |= is_at_url;
            found.proofs.push(proof.unwrap_or_else(|| Proof::trusted(member.storage.len())));
            found.names.push(member.path.display().to_string());
            for (path, file) in &member.parts {
                found.proofs.push(file.proof().unwrap_or_else(|| Proof::trusted(file.len())));
                found.names.push(path.display().to_string());
            }
        }
        found
    }

    /// Compares what the image above records, and says what it is to record, if anything.
    ///
    /// # Errors
    /// `Changed` when the pins differ; `Refused` when a URL proves nothing and is not trusted.
    pub(super) fn hold_against(
        &self,
        pin: Option<&Pin>,
        trusts: bool,
        pins_files: bool,
    ) -> Result<Option<Pin>> {
        if let Some(pin) = pin {
            return self.compare(pin).map(|()| None);
        }
        if !self.has_url && !pins_files {
            return Ok(None);
        }
        if let Some(index) = self.unproven.filter(|_| !trusts) {
            return Err(Error::new(
                ErrorKind::Refused,
                format!(
                    "nothing proves that {} stays as it is (a strong ETag, the version of an object in a store, or a protected snapshot would), so another version of it \
                     could be mixed in later: if it never changes, say so with `--trust-base` (of `vellum create`, \
                     `clone` or `serve`, which records it)",
                    self.names[index]
                ),
            ));
        }
        Pin::new(self.proofs.clone()).map(Some)
    }

    /// Compares what an image records of those below it.
    ///
    /// # Errors
    /// `Changed` when they are others.
    pub(super) fn compare(&self, pin: &Pin) -> Result<()> {
        let Some((index, now)) = pin.difference(&self.proofs) else { return Ok(()) };
        let was = pin.proofs().get(index);
        let name = self.names.get(index).or(self.names.last()).map_or("the image below", String::as_str);
        let why = match (was, now) {
            (Some(was), Some(now)) => {
                format!("{name} has changed: it was {}, and is {} now", said(was), said(now))
            }
            (Some(was), None) => format!("an image below {name} is gone, which was {}", said(was)),
            (None, _) => format!("{name} is below the image now, and was not when it was made"),
        };
        Err(Error::new(
            ErrorKind::Changed,
            format!(
                "{why}: the image only makes sense over the content that it was made over, so bring that back, or make \
                 a new image over the new one"
            ),
        ))
    }
}

/// Compares the content number that an image records of the one below it, where both formats have that (VMDK).
///
/// # Errors
/// `Changed` when the image below has another one: it was written since.
pub(super) fn check_content_id(above: &dyn Head, below: Option<&Member>) -> Result<()> {
    let now = below.and_then(|below| below.head.content_id());
    let (Some(was), Some(now), Some(below)) = (above.content_id_below(), now, below) else { return Ok(()) };
    if was == now {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Changed,
        format!(
            "{} was written since the image over it was made: its CID was {was:08x}, and is {now:08x} now",
            below.path.display()
        ),
    ))
}

pub(crate) fn said(proof: &Proof) -> String {
    match proof.kind() {
        ProofKind::Trusted => format!("{} bytes that nothing proves", proof.len()),
        ProofKind::Moved => {
            format!("the disk of {} bytes that moved in migration {}", proof.len(), proof.value())
        }
        kind => format!("{} bytes with {} {}", proof.len(), kind.name(), proof.value()),
    }
}
