//! Files that are known by several names: whether what is to be written is something that is read. Links of both kinds lead to one
//! file, and several device files to one device.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use vellum_core::{Error, Result};
use vellum_layer::{Chain, Member};

/// All files of an open image, and of those below it.
pub(crate) fn files_of(chain: &Chain) -> Vec<PathBuf> {
    chain.members().flat_map(files_of_member).collect()
}

/// Those of the image on top alone, which are written where it is.
pub(crate) fn files_of_top(chain: &Chain) -> Vec<PathBuf> {
    files_of_member(chain.top()).collect()
}

fn files_of_member(member: &Member) -> impl Iterator<Item = PathBuf> {
    let others = member.data_file.iter().chain(&member.parts).map(|(path, _)| path);
    std::iter::once(&member.path).chain(others).cloned()
}

/// The first file that is among those others, as messages name it.
pub(crate) fn first_same_file(files: &[PathBuf], others: &[PathBuf]) -> Option<String> {
    let (one, other) =
        files.iter().find_map(|one| Some((one, others.iter().find(|other| same_file(one, other))?)))?;
    Some(match one == other {
        true => one.display().to_string(),
        false => format!("{} (the same file as {})", one.display(), other.display()),
    })
}

/// Checks that a new image is not its own data file.
///
/// # Errors
/// `Invalid` when both names are those of one file, whether or not it is there.
pub(crate) fn refuse_same_file(image: &Path, data_file: &Path) -> Result<()> {
    let place = |path: &Path| {
        let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        Some((dir.canonicalize().ok()?, path.file_name()?.to_owned()))
    };
    let is_one_place = place(image).is_some_and(|one| place(data_file) == Some(one));
    match is_one_place || same_file(image, data_file) {
        true => Err(Error::invalid(format!(
            "{} cannot be its own data file: name another file with `-o data_file`",
            image.display()
        ))),
        false => Ok(()),
    }
}

/// Whether both names lead to one file or device.
pub fn same_file(a: &Path, b: &Path) -> bool {
    let (Ok(a), Ok(b)) = (a.metadata(), b.metadata()) else { return false };
    let same_device =
        a.file_type().is_block_device() && b.file_type().is_block_device() && a.rdev() == b.rdev();
    (a.dev(), a.ino()) == (b.dev(), b.ino()) || same_device
}
