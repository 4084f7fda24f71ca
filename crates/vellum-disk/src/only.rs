//! The opener for an image in a storage of the caller's own: it knows this storage and no other.

use std::path::{Path, PathBuf};

use vellum_core::{Error, ErrorKind, LocalFuture, Result, SharedStorage};
use vellum_layer::{Opener, Purpose};

/// Opens one storage, under its name.
pub(crate) struct Only(pub(crate) SharedStorage);

impl Only {
    /// # Errors
    /// `NotFound` for any other name: an image that refers to a second file needs an [`Opener`] that has it.
    fn is_it(&self, path: &Path) -> Result<()> {
        if path == Path::new(self.0.name()) {
            return Ok(());
        }
        let why = format!("{} is not in this storage, which holds {} alone", path.display(), self.0.name());
        Err(Error::new(ErrorKind::NotFound, why))
    }
}

impl Opener for Only {
    fn canonical<'a>(&'a self, path: &'a Path) -> LocalFuture<'a, Result<PathBuf>> {
        Box::pin(async move { self.is_it(path).map(|()| path.to_owned()) })
    }

    fn open<'a>(
        &'a self,
        canonical: &'a Path,
        _name: &'a Path,
        _purpose: Purpose,
    ) -> LocalFuture<'a, Result<SharedStorage>> {
        Box::pin(async move { self.is_it(canonical).map(|()| self.0.clone()) })
    }
}
