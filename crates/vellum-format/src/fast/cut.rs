//! What is noted on a fast medium that was cut off: how long it is.
//!
//! ```text
//!   shorter than its superblock says ► one page ► flush: commit point ► the other page ► flush      then units are read from it
//! ```
//!
//! 1. Slots have no checksums: nothing else would tell what was cut off from zeros, once the storage is longer again.
//! 2. The page that says less counts. So a crash, or a failing write, between the two leaves what was noted; the next one that opens the
//!    medium for writing, or notes it, finishes it.

use vellum_core::{Buffer, Context, Error, ErrorKind, ImageOffset, Result, SharedStorage};

use super::layout::{FastId, SUPER_LEN, Super};
use super::tables::{Tables, one_of, read_supers};

/// What is to be done with a medium that was cut off while it was in use. Whoever opens it next does not know of it.
pub(super) const AFTER_A_CUT: &str = "Stop the server, and before anything opens the medium again see that it has the length to which it was cut (of a file: `truncate \
     -s`): at another one what is gone would read as zeros. Then bring home what is left with `vellum tier move --back --all --fast PATH \
     IMAGE`, which notes on it that what was behind its end stays lost";

/// Notes on a medium that is shorter than it was, durably, how long it is: what is gone does not count from then on, even if the
/// medium becomes longer again, and the rest can be read. Whether that was so. What an earlier call could not finish is finished.
/// A medium with another id is left alone.
///
/// # Errors
/// `Changed` when nothing but tables is left, and the errors of the storage.
pub async fn note_cut(storage: &SharedStorage, id: FastId) -> Result<bool> {
    let context = || format!("{}: can't note that it was cut off", storage.name());
    let pages = read_supers(storage, Tables::WhatIsLeft).await;
    let found = one_of(&pages).context(context)?;
    if found.id != id {
        return Ok(false);
    }
    let cut_at = storage.len().min(found.len());
    if cut_at < found.layout.data_at() {
        let why = format!("it has {cut_at} bytes, which are not even its tables");
        return Err(Error::new(ErrorKind::Changed, why)).context(context);
    }
    let is_new = cut_at < found.len();
    if found.cut_at.is_some() || is_new {
        say_cut(storage, &Super { cut_at: Some(cut_at), ..found }, &pages).await.context(context)?;
    }
    Ok(is_new)
}

/// Makes both pages say so. One that cannot be written may be read again some day, so that is an error.
pub(super) async fn say_cut(
    storage: &SharedStorage,
    wanted: &Super,
    pages: &[Result<Super>; 2],
) -> Result<()> {
    for (number, page) in pages.iter().enumerate() {
        if page.as_ref().is_ok_and(|page| page == wanted) {
            continue;
        }
        let at = ImageOffset::new((number * SUPER_LEN) as u64);
        storage.write(at, Buffer::copy_of(&wanted.encode())).await?;
        storage.flush().await?; // commit point of the first: an opening believes the page that says less
    }
    Ok(())
}
