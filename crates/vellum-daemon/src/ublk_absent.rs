//! Block devices of a server, where the program is built without the feature `ublk`: there are none, and a
//! request for one fails with the reason.

use std::path::PathBuf;
use std::sync::Arc;

use vellum_core::{Error, Result};
use vellum_export::Shutdown;
use vellum_io::{IoMode, WorkersHandle};

use crate::served::Disks;
use crate::spec::{ExportSpec, UblkSpec};

/// None.
#[derive(Default)]
pub(crate) struct Blocks(());

/// None.
#[derive(Clone)]
pub(crate) struct SizeNotifiers;

impl SizeNotifiers {
    #[expect(clippy::unused_async, reason = "as where there are some")]
    pub(crate) async fn look_again(&self) {}
}

impl Blocks {
    #[expect(clippy::unused_async, reason = "as where there are some")]
    pub(crate) async fn begin(
        specs: &[UblkSpec],
        _exports: &[ExportSpec],
        _disks: &Arc<Disks>,
        _workers: (&WorkersHandle, IoMode),
        _shutdown: &Shutdown,
    ) -> Result<Self> {
        if specs.is_empty() {
            return Ok(Self::default());
        }
        Err(Error::unsupported(
            "can't make a block device by ublk: this program was built without it (the feature `ublk`); use --fuse FILE or --nbd unix:PATH instead",
        ))
    }

    #[expect(clippy::unused_self, reason = "as where there are some")]
    pub(crate) fn paths(&self) -> Vec<PathBuf> {
        Vec::new()
    }

    #[expect(clippy::unused_self, reason = "as where there are some")]
    pub(crate) fn size_notifiers(&self) -> SizeNotifiers {
        SizeNotifiers
    }

    #[expect(clippy::unused_async, reason = "as where there are some")]
    pub(crate) async fn gone(&self) -> Result<()> {
        Ok(())
    }

    #[expect(clippy::unused_async, reason = "as where there are some")]
    pub(crate) async fn end(self) {}
}
