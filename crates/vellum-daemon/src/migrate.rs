//! Preparing the target of a migration: an image over the source's export that awaits its disk.
//!
//! It is made under a temporary name, and gets its own when its header says that it is not to be written. So there is
//! never an image over the source that could be written beside it. It replaces nothing: what has its name already may be
//! a target that has taken over, and the only copy of what was written since.

use std::path::{Path, PathBuf};

use vellum_core::pin::{Pin, Proof, ProofKind};
use vellum_core::{Error, ErrorKind, Result, Url};
pub use vellum_format::handover::{Handover, MoveNumber};
use vellum_format::{FormatKind, native, qcow2};
use vellum_io::Draft;
pub use vellum_layer::migrate::{Goal, Side, Step, Written, next};

use crate::create::{CreateTarget, create_native, create_qcow2};
use crate::image::{ImageOptions, Remote, open_file, open_image};

/// The target of a migration.
#[derive(Debug, Clone)]
pub struct NewTarget {
    /// The image to be made. It must not exist.
    pub path: PathBuf,
    /// Its format: qcow2 or vellum.
    pub format: FormatKind,
    /// The URL of the source's export.
    pub source: String,
    /// How it is asked for.
    pub remote: Remote,
    /// The options of a qcow2 image.
    pub qcow2: qcow2::CreateOptions,
    /// The options of a native image.
    pub native: native::CreateOptions,
}

/// Makes it. Returns the number of the migration and the size of the disk, in bytes.
///
/// # Errors
/// `Unsupported` for a format without a place for the mark, `Invalid` where anything has the target's name, `Refused` for a
/// source that has moved, and the errors of the source and of creating the image.
pub async fn prepare(target: &NewTarget) -> Result<(MoveNumber, u64)> {
    let exists = || {
        let why = "it exists already, and the target of a migration is a new file: remove it, or choose another name";
        Error::invalid(format!("{}: {why}", target.path.display()))
    };
    // A link counts as well, also one that leads nowhere.
    if target.path.symlink_metadata().is_ok() {
        return Err(exists());
    }
    let reading = ImageOptions { remote: target.remote.clone(), ..ImageOptions::reading() };
    let source = open_image(Path::new(&target.source), &reading).await?;
    let size = source.disk().geometry().size;
    let proof = source.top().storage.proof();
    source.close().await?;
    if let Some(proof) = proof.filter(|proof| proof.kind() == ProofKind::Moved) {
        let why = format!(
            "{}: this disk has moved already (migration {}), and no other target can take it over: prepare the next one from \
             where it is written now, or take it back with `vellum migrate abort`",
            target.source,
            proof.value()
        );
        return Err(Error::new(ErrorKind::Refused, why));
    }
    let draft = Draft::begin(&target.path).await?.filter(|draft| !draft.replaces()).ok_or_else(exists)?;
    let made = make(target, draft.path(), size).await;
    match made {
        // commit point: it has its name, which nothing had
        Ok(number) => draft.publish().await.map(|()| (number, size)),
        Err(error) => {
            drop(draft);
            Err(error.context(format!("can't prepare {}", target.path.display())))
        }
    }
}

async fn make(target: &NewTarget, path: &Path, size: u64) -> Result<MoveNumber> {
    if target.format == FormatKind::Qcow2 && target.qcow2.journal.is_none() {
        return Err(Error::unsupported(
            "a target gets its data while it is served, which an image without a journal cannot do: leave out journal=off, \
             compat=v2, and clusters that are too small for one (`vellum journal` removes the journal afterwards)",
        ));
    }
    let source = match Url::parse(&target.source) {
        Some(url) => url?.to_string(),
        None => {
            return Err(Error::invalid(format!(
                "{}: the source is given as nbd://HOST/EXPORT",
                target.source
            )));
        }
    };
    let create = CreateTarget {
        path: path.to_owned(),
        size: Some(size),
        backing: Some((source, FormatKind::Raw)),
        // Nothing is derived from what the source holds: it is still written.
        trust_backing: true,
        allow_dirs: Vec::new(),
        remote: target.remote.clone(),
        trust_base: false,
        secrets: Default::default(),
        stands_on_encrypted: Default::default(),
        never_flushed: false,
    };
    match target.format {
        FormatKind::Qcow2 => drop(create_qcow2(&create, target.qcow2.clone()).await?),
        FormatKind::Native => drop(create_native(&create, target.native.clone()).await?),
        FormatKind::Foreign(_) => target.format.check_is_written()?,
        FormatKind::Raw | FormatKind::Luks => {
            return Err(Error::unsupported(
                "a raw image has no place for the mark that says which image is written: use -f qcow2 or -f vellum",
            ));
        }
    }
    let options = ImageOptions { format: Some(target.format), ..ImageOptions::default() };
    let (storage, format) = open_file(path, &options).await?;
    let number = MoveNumber::random()?;
    // Once the source has moved it never changes, and its server names the migration: no other export has that number.
    let proof = Proof::new(ProofKind::Moved, size, number.to_string())?;
    format.format().set_pin(&storage, &Pin::new(vec![proof])?).await?;
    format.format().set_handover(&storage, Some(Handover::Awaiting(number))).await?;
    Ok(number)
}
