//! Who has told somebody how large a disk is, and tells them when it is larger: front ends of virtual machines, and the kernel
//! about files and block devices. NBD has no message for it: its clients see the size when they connect.

use std::sync::Arc;
use std::time::Duration;

use futures_lite::future::or;
use vellum_core::join_all;
use vellum_export::fuse::Teller;
use vellum_io::{clock, unblock};

use crate::ublk;
use crate::vhost::Sessions;

/// How long a kernel may take to look again. It is told all the same: a file whose lanes are full is looked at later.
const LOOKING_MAX: Duration = Duration::from_secs(2);

/// All of them.
#[derive(Clone)]
pub(crate) struct Lookers {
    pub(crate) sessions: Sessions,
    pub(crate) files: Arc<[Teller]>,
    pub(crate) blocks: ublk::Tellers,
}

impl Lookers {
    /// Tells all of them to look; who sees what was there before does nothing.
    pub(crate) async fn tell(&self) {
        self.sessions.look_again();
        let files = self.files.iter().cloned().map(|file| Box::pin(unblock(move || file.look_again())));
        or(async { drop(join_all(files).await) }, clock().sleep(LOOKING_MAX)).await;
        self.blocks.look_again().await;
    }
}
