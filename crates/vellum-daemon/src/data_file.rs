//! The data file of a closed image, made durable before the image says something that relies on it.
//!
//! A program that was killed leaves writes in the page cache: they can be read, and a power cut takes them back. The image itself knows
//! that it was not closed. What is in its data file has to be on the medium before that mark goes, and before a bitmap says
//! that nothing has changed since: a copy made before the power cut has what the disk then has not.
//!
//! | the image | its data file |
//! |---|---|
//! | was closed, or the user does not allow its data file to be written | flushed |
//! | was not closed, and its data file may be written | what it reads as is made true ([`settle`]), also after a flush that has failed |

use std::path::Path;

use rustix::fs::{Mode, OFlags};
use vellum_core::{Context, Error, ErrorKind, Result, SharedStorage};
use vellum_format::{FormatKind, settle};
use vellum_io::unblock_at;
use vellum_layer::chain::{Step, guess_format};
use vellum_layer::{Gate, Opener, Purpose, Trust};

use crate::host::Host;
use crate::image::ImageOptions;

/// Makes what the data file of this image has durable, if there is one. The image is open for writing. A data file that is gone has
/// nothing that could be lost.
///
/// # Errors
/// `Refused` for one that the image may not refer to, and the errors of the file.
pub(crate) async fn make_durable(
    path: &Path,
    options: &ImageOptions,
    image: &SharedStorage,
    kind: FormatKind,
) -> Result<()> {
    let head = kind.format().read(&**image).await?;
    let Some(name) = head.data_file() else { return Ok(()) };
    let data = Gate::resolve(path, name)?;
    let host = options.host().await?;
    let context = || format!("can't flush {}, the data file of {}", data.display(), path.display());
    let canonical = match host.canonical(&data).await {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        found => found.context(context)?,
    };
    let step = Step {
        path: path.to_owned(),
        canonical: host.canonical(path).await?,
        format: options.format,
        snapshot: None,
        depth: 0,
    };
    let trust = match options.format {
        Some(_) => Trust::Declared,
        None => guess_format(&**image, path, &step.canonical).await?.1,
    };
    let (gate, referrer) =
        (Host::gate(&options.allow_dirs, &options.data_files)?, step.referrer(image, trust));
    let may_be_written = gate.check_data_file(referrer, &canonical, true).is_ok();
    if head.was_left_open() && may_be_written {
        let file = host.open(&canonical, &data, Purpose::Write).await.context(context)?;
        return settle(&*file).await.context(context);
    }
    gate.check_data_file(referrer, &canonical, false).context(context)?;
    // Flushing changes nothing, so it needs no permission to write.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let its = canonical.clone();
    let flushed =
        unblock_at(&canonical, move || rustix::fs::fdatasync(rustix::fs::open(&its, flags, Mode::empty())?));
    flushed.await.map_err(|errno| Error::io(errno.into(), context()))
}
