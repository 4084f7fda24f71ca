//! Where the image on top of a served disk is: another one may come in its place while it is served.

use std::path::PathBuf;

use vellum_core::lock;
use vellum_format::FormatKind;

use super::Served;

/// Where its image on top is. A step may put another image in its place (`external`).
#[derive(Debug, Clone)]
pub(super) struct Place {
    pub(super) path: PathBuf,
    pub(super) canonical: PathBuf,
    pub(super) format: FormatKind,
    /// The format that was stated.
    pub(super) stated: Option<FormatKind>,
}

impl Served {
    /// The image on top.
    pub(crate) fn path(&self) -> PathBuf {
        lock(&self.place).path.clone()
    }

    /// As above, for messages.
    pub(crate) fn shown(&self) -> String {
        lock(&self.place).path.display().to_string()
    }

    /// Where that is, links followed.
    pub(super) fn canonical(&self) -> PathBuf {
        lock(&self.place).canonical.clone()
    }

    /// The format of the image on top.
    pub(super) fn format(&self) -> FormatKind {
        lock(&self.place).format
    }
}
