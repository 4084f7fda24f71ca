//! The files below an image while it is open: whether they are still what they were when they were opened.
//!
//! ```text
//!   read of the base ──► check ──► the copy goes into the image, or the image is detached
//!                          └── another content: nothing is copied any more, until the disk is opened anew
//! ```
//!
//! 1. What is below is locked, but a lock binds only programs that ask for it. A file that is overwritten or cut while
//!    copies of it are made would leave a mixture of two contents in the image, for good. So the check comes after the
//!    base was read and before what was read becomes the image's own: the host notes a change before it changes a byte.
//! 2. Once a file was found to be another one, it stays so, whatever it is later: nobody knows what was read meanwhile.
//!    Opening the image again compares it with the pin.
//! 3. A snapshot of another image is not looked at: its file changes while that one is written, and what the snapshot has
//!    does not. Nor is what has no proof, such as a device of this host. What is at a URL compares each answer itself.

use std::sync::{Arc, OnceLock};

use vellum_core::pin::Proof;
use vellum_core::{Error, ErrorKind, Result, SharedStorage};

use crate::chain::said;

/// See the module.
#[derive(Default)]
pub struct BaseFiles {
    files: Vec<SharedStorage>,
    changed: OnceLock<Error>,
}

impl BaseFiles {
    /// These files.
    pub(crate) fn of(files: Vec<SharedStorage>) -> Arc<Self> {
        Arc::new(Self { files, changed: OnceLock::new() })
    }

    /// Makes sure that what was read of them so far is what they had when they were opened.
    ///
    /// # Errors
    /// `Changed`, from the first time on that this is not so; the errors of the host.
    pub async fn check(&self) -> Result<()> {
        if let Some(error) = self.changed.get() {
            return Err(error.clone());
        }
        for file in &self.files {
            let (was, now) = (file.proof(), file.proof_now().await?);
            if was.as_ref().is_some_and(|was| now.as_ref().is_none_or(|now| !was.agrees(now))) {
                let error = has_changed(file.name(), was.as_ref(), now.as_ref());
                return Err(self.changed.get_or_init(|| error).clone());
            }
        }
        Ok(())
    }

    /// How one of them has changed, if a check has found that.
    pub(crate) fn changed(&self) -> Option<&Error> {
        self.changed.get()
    }
}

fn has_changed(name: &str, was: Option<&Proof>, now: Option<&Proof>) -> Error {
    let said = |proof: Option<&Proof>| proof.map_or_else(|| "nothing".to_owned(), said);
    Error::new(
        ErrorKind::Changed,
        format!(
            "{name} has changed while images over it were in use: it was {}, and is {} now. Nothing more of it is \
             copied, and what the image lacks now reads as what that file holds: bring back its content and the time of its \
             last change, and open the disk again, or make a new image over the new content",
            said(was),
            said(now)
        ),
    )
}
