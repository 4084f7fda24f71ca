//! The front ends that have reported a disk's size and must be notified when it grows: those of virtual
//! machines, and the kernel for files and block devices. NBD has no message for it: its clients see the size
//! when they connect.

use std::cell::OnceCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use futures_lite::future::or;
use vellum_core::join_all;
use vellum_export::fuse::SizeNotifier;
use vellum_io::{clock, unblock};

use crate::vhost::Devices;
use crate::{nbd_devices, ublk};

/// How long to wait for a kernel to read the size again. It is notified all the same: a file whose lanes are full
/// follows later.
const NOTIFY_MAX: Duration = Duration::from_secs(2);

/// All of them. Files and block devices are added once they are served.
#[derive(Clone)]
pub(crate) struct SizeWatchers {
    devices: Devices,
    shown: Rc<OnceCell<Shown>>,
}

type Shown = (Arc<[SizeNotifier]>, ublk::SizeNotifiers, Arc<[nbd_devices::SizeNotifier]>);

impl SizeWatchers {
    pub(crate) fn new(devices: Devices) -> Self {
        Self { devices, shown: Rc::default() }
    }

    /// Adds the files and block devices.
    pub(crate) fn add(
        &self,
        files: Arc<[SizeNotifier]>,
        blocks: ublk::SizeNotifiers,
        nbd_devices: Arc<[nbd_devices::SizeNotifier]>,
    ) {
        let is_first = self.shown.set((files, blocks, nbd_devices)).is_ok();
        debug_assert!(is_first, "they are made once");
    }

    /// Makes all of them read the size again. A front end that already knows it does nothing.
    pub(crate) async fn notify(&self) {
        self.devices.look_again();
        let Some((files, blocks, nbd_devices)) = self.shown.get() else { return };
        let files = files.iter().cloned().map(|file| Box::pin(unblock(move || file.notify())));
        or(async { drop(join_all(files).await) }, clock().sleep(NOTIFY_MAX)).await;
        blocks.look_again().await;
        let devices =
            nbd_devices.iter().cloned().map(|device| Box::pin(unblock(move || device.look_again())));
        or(async { drop(join_all(devices).await) }, clock().sleep(NOTIFY_MAX)).await;
    }
}
