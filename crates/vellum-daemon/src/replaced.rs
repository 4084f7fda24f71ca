//! The image that a new one replaces, as far as it reads the file that will be filled with the new one's data.
//!
//! ```text
//!   T.qcow2, to be replaced ──► its data file          any of these may be the file that the new T.qcow2
//!        └► its backing image ──► its data file        is to have its data in
//!             └► …
//! ```
//!
//! 1. Nothing is written, and of images only headers are read.
//! 2. What cannot be read may be an image: errors of the host are reported. What is damaged, absent or no regular file is no disk that could
//!    lose something.
//! 3. A name in an image may be meant from where the image is, and from where a link to it is: both are looked at.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use vellum_core::{ErrorKind, Result, SharedStorage};
use vellum_format::probe;
use vellum_io::{Draft, File, LockMode, OpenOptions};
use vellum_layer::Gate;
use vellum_layer::chain::DEPTH_MAX;

use crate::same_file::same_file;

/// The image that the draft of `target` will replace, if it reads the file that `data_file` will be in the new one.
///
/// # Errors
/// Those of the host, and a name that is none.
pub(crate) async fn replaced_that_reads(
    draft: &Draft,
    target: &Path,
    data_file: &str,
) -> Result<Option<Arc<File>>> {
    let Some(old) = draft.old() else { return Ok(None) };
    let new = Gate::resolve(draft.target(), data_file)?;
    let mut names = vec![draft.target().to_owned(), target.to_owned()];
    let mut image = Some(old.clone());
    for _ in 0..DEPTH_MAX {
        let Some(one) = image.take() else { break };
        let Some(refers) = Names::of(one).await? else { break };
        let places = |name: &String| -> Vec<PathBuf> {
            names.iter().filter_map(|image| Gate::resolve(image, name).ok()).collect()
        };
        let below = refers.below.as_ref().map(places).unwrap_or_default();
        let beside: Vec<PathBuf> = refers.beside.iter().flat_map(places).collect();
        if below.iter().chain(&beside).any(|its| same_file(its, &new)) {
            return Ok(Some(old));
        }
        let there = below.into_iter().find(|path| path.metadata().is_ok_and(|facts| facts.is_file()));
        let Some(there) = there else { break };
        let reading = OpenOptions::reading().lock(LockMode::ForceShare);
        image = match File::open(&there, reading).await {
            Ok(file) => Some(file),
            Err(error) if error.kind() == ErrorKind::Io => return Err(error),
            Err(_) => None,
        };
        names = there.canonicalize().into_iter().chain([there]).collect();
    }
    Ok(None)
}

/// The names of other files in an image.
struct Names {
    /// The data file, or the parts.
    beside: Vec<String>,
    below: Option<String>,
}

impl Names {
    async fn of(image: Arc<File>) -> Result<Option<Self>> {
        let storage: SharedStorage = image;
        let read = async {
            let format = probe(&*storage).await?;
            format.format().read(&*storage).await
        };
        match read.await {
            Ok(head) => {
                let beside =
                    head.data_file().map(str::to_owned).into_iter().chain(head.parts().iter().cloned());
                let below = head.backing().map(|(name, _)| name.to_owned());
                Ok(Some(Self { beside: beside.collect(), below }))
            }
            Err(error) if error.kind() == ErrorKind::Io => Err(error),
            Err(_) => Ok(None),
        }
    }
}
