//! The one list of formats. Code that needs something from an image calls [`FormatKind::format`].

use crate::image::Format;
use crate::probe::FormatKind;
use crate::{foreign_format, luks, native, qcow2, raw};

impl FormatKind {
    /// What can be done with images of this format.
    pub fn format(self) -> &'static dyn Format {
        match self {
            Self::Raw => &raw::RawFormat,
            Self::Qcow2 => &qcow2::Qcow2Format,
            Self::Native => &native::NativeFormat,
            Self::Foreign(kind) => foreign_format::of(kind),
            Self::Luks => &luks::LuksFormat,
        }
    }
}
