//! Changing what an existing image is, without a copy of its data: its version, lazy refcounts, the width of refcounts.
//!
//! ```text
//!   width      all refcounts anew beside the old, and a switch (`shadow.rs`)                       commit point
//!   version    the snapshot table gets what version 3 requires ─ switch ► the header is laid out anew
//!              in hops (`journal_setting.rs`), and the last of them says version 3                 commit point
//!   lazy       a bit in the header's first sector                                                  commit point
//!   version 2  `downgrade.rs`                                                                      commit point
//! ```
//!
//! 1. They are done in this order: version 3, width, lazy, version 2. A crash leaves the image after one of them or before it, and the same
//!    command goes on from there.
//! 2. The disk and its snapshots read the same all the time.

use vellum_core::{Context, Error, ImageOffset, Result, SharedStorage};

use super::downgrade::downgrade;
use super::header::Header;
use super::journal_setting::{make_version_3, no_room};
use super::layout::compatible;
use super::shadow::Shadow;
use super::snapshot_table::complete;
use super::snapshots::checked;
use crate::closed_snapshots::Amend;

/// Changes a closed image.
pub(super) async fn amend(image: &SharedStorage, wish: &Amend) -> Result<()> {
    amend_inner(image, wish).await.context(|| format!("can't amend {}", image.name()))
}

async fn amend_inner(image: &SharedStorage, wish: &Amend) -> Result<()> {
    let mut header = checked(image).await?;
    refuse(&header, wish)?;
    if wish.version == Some(3) && header.version() == 2 {
        if header.snapshot_count > 0 {
            complete(header, image).await?;
            header = Header::read(&**image).await?;
        }
        if !make_version_3(&header, &**image).await? {
            return Err(no_room());
        }
        header = Header::read(&**image).await?;
    }
    if let Some(bits) = wish.refcount_bits.filter(|bits| *bits != header.refcount_bits()) {
        let mut shadow = Shadow::new(header, image).await?;
        shadow.set_width(bits.trailing_zeros());
        shadow.header.void_session();
        shadow.switch().await?;
        header = Header::read(&**image).await?;
    }
    if let Some(is_lazy) = wish.lazy_refcounts.filter(|is_lazy| *is_lazy != header.has_lazy_refcounts()) {
        let bit = compatible::LAZY_REFCOUNTS;
        header.set_compatible(if is_lazy { header.compatible | bit } else { header.compatible & !bit });
        image.write(ImageOffset::ZERO, header.first_sector()).await?;
    }
    image.flush().await?; // commit point
    match wish.version {
        Some(2) if header.version() > 2 => downgrade(header, image).await,
        _ => Ok(()),
    }
}

fn refuse(header: &Header, wish: &Amend) -> Result<()> {
    let version = wish.version.unwrap_or(header.version());
    if version < 3 && wish.lazy_refcounts == Some(true) {
        return Err(Error::invalid("lazy refcounts need version 3: give compat=1.1 as well"));
    }
    match wish.refcount_bits {
        Some(bits) if !bits.is_power_of_two() || bits > 64 => {
            Err(Error::invalid(format!("refcount_bits={bits}: expected 1, 2, 4, 8, 16, 32 or 64")))
        }
        Some(bits) if version < 3 && bits != 16 => {
            Err(Error::invalid("refcounts of version 2 have 16 bits: give compat=1.1 as well"))
        }
        _ => Ok(()),
    }
}
