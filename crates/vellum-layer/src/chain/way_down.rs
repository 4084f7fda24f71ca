//! How the images of a chain are found, each by its name in the one above: once for everything that follows
//! them, whether it opens the images or only describes them.

use std::path::{Path, PathBuf};

use vellum_core::{Context, Error, Result, SharedStorage, Url};
use vellum_format::image::Head;
use vellum_format::{FormatKind, SNAPSHOT_FORMAT, SnapshotBase, SnapshotKey};

use super::{DEPTH_MAX, Opener};
use crate::gate::{Gate, Referrer, Trust};

/// An image on the way down. It may be opened at its canonical path, and has not been yet.
pub struct Step {
    /// The path as it was requested, or as it is in the image above.
    pub path: PathBuf,
    /// Where it is: absolute, links followed.
    pub canonical: PathBuf,
    /// The format that the user, or the image above, states.
    pub format: Option<FormatKind>,
    /// The snapshot of it that the image above stands on; nothing, where that is its disk.
    pub snapshot: Option<SnapshotKey>,
    /// How many images are above it.
    pub depth: usize,
}

impl Step {
    /// Adds which image of the chain it was, unless it was the one that the user named, which the error names
    /// already.
    pub fn describe(&self, error: Error) -> Error {
        describe(error, &self.path, self.depth)
    }

    /// What the gate needs to know of the image once it is open.
    pub fn referrer(&self, storage: &SharedStorage, trust: Trust) -> Referrer<'_> {
        Referrer { canonical: &self.canonical, is_device: storage.limits().fixed_len, trust }
    }
}

/// The way from the top image down.
pub struct WayDown<'a> {
    opener: &'a dyn Opener,
    gate: &'a Gate,
    top: &'a Path,
    /// Where the images so far are, from the top down.
    seen: Vec<PathBuf>,
}

impl<'a> WayDown<'a> {
    /// Begins at the image that the user names, which the gate does not check.
    ///
    /// # Errors
    /// Those of the opener.
    pub async fn begin(
        opener: &'a dyn Opener,
        gate: &'a Gate,
        top: &'a Path,
        format: Option<FormatKind>,
    ) -> Result<(Self, Step)> {
        let canonical = opener.canonical(top).await.map_err(|error| describe(error, top, 0))?;
        let seen = vec![canonical.clone()];
        let format = format.or_else(|| opener.stated_format(&canonical));
        Ok((
            Self { opener, gate, top, seen },
            Step { path: top.to_owned(), canonical, format, snapshot: None, depth: 0 },
        ))
    }

    pub(super) fn opener(&self) -> &'a dyn Opener {
        self.opener
    }

    /// Goes on with images that are open already: those at these paths are below the last image so far.
    ///
    /// # Errors
    /// `Corrupt` for a loop.
    pub(super) fn join<'b>(&mut self, canonicals: impl Iterator<Item = &'b PathBuf>) -> Result<()> {
        for canonical in canonicals {
            self.check_is_new(canonical, canonical)?;
            self.seen.push(canonical.clone());
        }
        Ok(())
    }

    fn check_is_new(&self, path: &Path, canonical: &Path) -> Result<()> {
        if self.seen.iter().any(|seen| seen == canonical) {
            return Err(Error::corrupt(format!(
                "the backing chain of {} is a loop: {} appears again at depth {}",
                self.top.display(),
                path.display(),
                self.seen.len()
            )));
        }
        Ok(())
    }

    /// The image below `image`, which is the last one so far and has this header, if there is one.
    ///
    /// # Errors
    /// `Corrupt` for a loop, `Unsupported` for a chain that is too long, `Refused` for a reference that the
    /// gate does not allow, and the errors of the opener.
    pub async fn next_below(
        &mut self,
        image: &Step,
        referrer: Referrer<'_>,
        head: &dyn Head,
    ) -> Result<Option<Step>> {
        let context = || format!("can't open the backing image of {}", image.path.display());
        let Some(Backing { path, format, snapshot }) = Backing::of(&image.path, head).context(context)?
        else {
            return Ok(None);
        };
        let depth = image.depth + 1;
        let describe = |error| describe(error, &path, depth);
        let canonical = self.opener.canonical(&path).await.map_err(describe)?;
        // Checked before it is opened: the lock of the one above would be in the way, and name another cause.
        self.check_is_new(&path, &canonical)?;
        if depth == DEPTH_MAX {
            return Err(Error::unsupported(format!(
                "the backing chain of {} is longer than {DEPTH_MAX} images",
                self.top.display()
            )));
        }
        self.gate.check(referrer, &canonical).map_err(describe)?;
        self.seen.push(canonical.clone());
        let format = format.or_else(|| self.opener.stated_format(&canonical));
        Ok(Some(Step { path, canonical, format, snapshot, depth }))
    }
}

/// The image below another one, as that names it.
pub struct Backing {
    /// Its file.
    pub path: PathBuf,
    /// Its format, where that is stated.
    pub format: Option<FormatKind>,
    /// Which of its snapshots it is, if it is one.
    pub snapshot: Option<SnapshotKey>,
}

impl Backing {
    /// The image below the one with this path and header, if there is one.
    ///
    /// # Errors
    /// `Refused` for a name that is not a plain file name, `Unsupported` for a format that is not known, and
    /// `Corrupt` for the name of a snapshot that is none.
    pub fn of(image: &Path, head: &dyn Head) -> Result<Option<Self>> {
        let Some((name, format)) = head.backing() else { return Ok(None) };
        if format == Some(SNAPSHOT_FORMAT) {
            let SnapshotBase { file, snapshot } = SnapshotBase::parse(name)?;
            let path = Gate::resolve(image, &file)?;
            return Ok(Some(Self { path, format: Some(FormatKind::Native), snapshot: Some(snapshot) }));
        }
        let format = format.filter(|format| !format.is_empty()).map(str::parse::<FormatKind>).transpose()?;
        Ok(Some(Self { path: Gate::resolve(image, name)?, format, snapshot: None }))
    }
}

pub(super) fn describe(error: Error, path: &Path, depth: usize) -> Error {
    let name = match Url::of_path(path) {
        // It may hold a secret, and the error says what is wrong with it.
        Some(Err(_)) => return error,
        _ => path.strip_prefix("./").unwrap_or(path).display().to_string(),
    };
    match depth {
        0 if error.to_string().contains(&name) => error,
        0 => error.context(format!("can't open image {name}")),
        _ => error.context(format!("can't open backing image {name} (depth {depth})")),
    }
}
