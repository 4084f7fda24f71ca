//! Files of a server: each exports a disk through FUSE, served by all workers, mounted before readiness is
//! reported and unmounted at the end.
//!
//! ```text
//!   begin    point ready ► lanes on the workers ► mounted
//!   end      unmounted; if it is in use: nothing more is begun, what was begun is answered, detached
//!            (another program's mount at the path is left) ► threads of fuser ended ► lanes ended
//!            ► the file removed, if it was made here
//! ```
//!
//! A server that has nothing else to serve ends when all of its files were unmounted, as other file systems
//! do.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures_lite::future::or;
use vellum_core::{Disk, Result, join_all};
use vellum_export::Shutdown;
use vellum_export::fuse::{DiskFile, Facts, Mounted, Point, SizeNotifier, Taken};
use vellum_io::{Spawned, WorkersHandle, clock, unblock};

use crate::contained::in_rounds;
use crate::served::{Disks, Served};
use crate::spec::{ExportSpec, FuseSpec};

/// More lanes than this do not help: the kernel has one queue for all of them.
const LANES_MAX: usize = 4;

/// How long the kernel may take to report that a file was unmounted.
const FAREWELL_MAX: Duration = Duration::from_secs(5);

/// The files of a server.
#[derive(Default)]
pub(crate) struct FuseFiles(Vec<Shown>);

struct Shown {
    served: Arc<Served>,
    file: DiskFile,
    mounted: Mounted,
    lanes: Vec<Spawned<()>>,
}

impl FuseFiles {
    /// Mounts all of them; when one cannot be, none stays.
    pub(crate) async fn begin(
        specs: &[FuseSpec],
        exports: &[ExportSpec],
        disks: &Arc<Disks>,
        workers: &WorkersHandle,
    ) -> Result<Self> {
        let mut files = Self(Vec::new());
        for spec in specs {
            match Shown::begin(spec, exports, disks, workers, files.0.len()).await {
                Ok(shown) => files.0.push(shown),
                Err(error) => {
                    files.end(&Shutdown::new()).await;
                    return Err(error);
                }
            }
        }
        Ok(files)
    }

    /// The handles that tell the kernel that a file has grown.
    pub(crate) fn size_notifiers(&self) -> Arc<[SizeNotifier]> {
        self.0.iter().map(|shown| shown.mounted.size_notifier()).collect()
    }

    /// Completes when all of them were unmounted; never, when there are none.
    pub(crate) async fn unmounted(&self) {
        if self.0.is_empty() {
            std::future::pending::<()>().await;
        }
        for shown in &self.0 {
            shown.mounted.ended().await;
        }
    }

    /// Unmounts all of them. Requests in flight are waited for until `shutdown` cuts.
    pub(crate) async fn end(self, shutdown: &Shutdown) {
        // At once: one whose disk does not answer keeps no other.
        join_all(self.0.into_iter().map(|shown| Box::pin(shown.end(shutdown)))).await;
    }
}

impl Shown {
    async fn begin(
        spec: &FuseSpec,
        exports: &[ExportSpec],
        disks: &Arc<Disks>,
        workers: &WorkersHandle,
        number: usize,
    ) -> Result<Self> {
        let served = disks.find(spec.export.as_deref())?;
        let disk = served.disk();
        let path = spec.path.clone();
        let point = unblock(move || Point::prepare(&path)).await?;
        let image = served.path();
        let is_for_reading = |export: &&ExportSpec| export.path == image && export.image.read_only;
        let facts = Facts {
            read_only: disk.geometry().read_only || exports.iter().any(|export| is_for_reading(&export)),
            owner: point.owner(),
            allocated: Box::new(move || allocated(&image)),
        };
        let file = DiskFile::new(disk, facts, workers.count().min(LANES_MAX));
        let lanes = (0..file.lanes()).map(|lane| {
            let file = file.clone();
            // The files begin with different workers.
            workers.spawn((number + lane) % workers.count(), move || async move {
                in_rounds("a FUSE queue", async || {
                    file.serve(lane).await;
                    ControlFlow::Break(())
                })
                .await;
            })
        });
        let lanes: Vec<_> = lanes.collect();
        let mounting = file.clone();
        match unblock(move || point.mount(&mounting)).await {
            Ok(mounted) => {
                served.hold();
                Ok(Self { served, file, mounted, lanes })
            }
            Err(error) => {
                file.close();
                ended(lanes).await;
                Err(error)
            }
        }
    }

    async fn end(self, shutdown: &Shutdown) {
        let Self { served, file, mut mounted, lanes } = self;
        let (mut mounted, mut taken) = unblock(move || {
            let taken = mounted.unmount();
            (mounted, taken)
        })
        .await;
        let path = mounted.path().display();
        match taken {
            Ok(Taken::Free) | Err(_) => {}
            Ok(Taken::Busy) => {
                tracing::warn!(
                    "{path} is in use; it is unmounted, and programs that have it open get errors"
                );
            }
            Ok(Taken::Elsewhere) => {
                tracing::warn!(
                    "{path} was unmounted by another program; programs that still have it open get errors"
                );
            }
        }
        if let Ok(Taken::Busy | Taken::Elsewhere) = taken {
            file.drain();
            while !file.is_idle() && !shutdown.is_cut() {
                clock().sleep(Duration::from_millis(5)).await;
            }
        }
        if let Ok(Taken::Busy) = taken {
            (mounted, taken) = unblock(move || {
                let forced = mounted.force();
                (mounted, forced)
            })
            .await;
        }
        // A file that is open elsewhere vanishes with the process. If it is also mounted in another mount
        // namespace, no notification comes before.
        let is_elsewhere = matches!(taken, Ok(Taken::Elsewhere));
        complain(taken);
        if !is_elsewhere {
            or(mounted.ended(), clock().sleep(FAREWELL_MAX)).await;
        }
        file.close();
        ended(lanes).await;
        unblock(move || mounted.finish()).await;
        served.release();
    }
}

fn complain(result: Result<Taken>) {
    if let Err(error) = result {
        tracing::warn!("{}", error.chain());
    }
}

async fn ended(lanes: Vec<Spawned<()>>) {
    for lane in lanes {
        // A worker that has ended has nothing in flight.
        let _ = lane.await;
    }
}

/// What an image takes on the host; a device takes all of itself.
fn allocated(image: &Path) -> Option<u64> {
    use std::os::unix::fs::MetadataExt;
    let facts = std::fs::metadata(image).ok().filter(|facts| facts.is_file())?;
    Some(facts.blocks() * 512)
}
