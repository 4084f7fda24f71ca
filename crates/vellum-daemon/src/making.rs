//! A file in which an image is being made, and what is left of it when that fails.
//!
//! 1. A file that was made for the image is removed again.
//! 2. What a file or device held before is given up only when the image is written; the error of a failure
//!    after that says so, because the user may still believe that it is there.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use vellum_core::{Buffer, Context, ImageOffset, Result, Storage};
use vellum_io::File;

use crate::image::new_file;

/// By its first bytes an image of any format is known again.
const LOOKED_AT: u64 = 4096;

/// A file that is being made into an image.
pub(crate) struct Making {
    pub(crate) file: Arc<File>,
    path: PathBuf,
    is_new: bool,
    /// How long an existing file was, and its first bytes, unless they could not be read.
    before: Option<(u64, Buffer)>,
}

impl Making {
    /// Opens the file, or makes it.
    ///
    /// # Errors
    /// `Locked` for a file that is in use, and those of the file.
    pub(crate) async fn begin(path: &Path, never_flushed: bool) -> Result<Self> {
        let is_new = !path.exists();
        let file = new_file(path, never_flushed).await?;
        // Sectors that cannot be read may be written all the same.
        let before = if is_new { None } else { first_bytes(&file).await.ok() };
        Ok(Self { file, path: path.to_owned(), is_new, before })
    }

    /// Ends it, with what became of it.
    ///
    /// # Errors
    /// That with which it ended.
    pub(crate) async fn end<T>(self, made: Result<T>) -> Result<T> {
        let Err(error) = made else { return made };
        if self.is_new {
            drop(self.file);
            let _ = std::fs::remove_file(&self.path);
            return Err(error);
        }
        let Some(before) = self.before else { return Err(error) };
        // A file that cannot be read now may have lost it, too.
        let is_there = first_bytes(&self.file)
            .await
            .is_ok_and(|now| now.0 == before.0 && now.1.slice() == before.1.slice());
        let was_empty = before.0 == 0;
        match is_there || was_empty {
            true => Err(error),
            false => Err(error).context(|| {
                format!("{} holds no whole image, and what it held before is gone", self.path.display())
            }),
        }
    }
}

/// The length of a file in bytes, and its first ones.
async fn first_bytes(file: &File) -> Result<(u64, Buffer)> {
    let len = file.len();
    let first = usize::try_from(len.min(LOOKED_AT)).expect("at most a page");
    Ok((len, file.read(ImageOffset::ZERO, Buffer::for_overwrite(first)).await?))
}
