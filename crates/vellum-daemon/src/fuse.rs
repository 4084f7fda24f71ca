//! Files of a server: each shows a disk by FUSE, done by all workers, mounted before anybody is told and taken off at the end.
//!
//! ```text
//!   begin    point ready ► lanes on the workers ► mounted
//!   end      unmounted; when somebody has it open: nothing more is begun, what was begun is answered, taken off by force
//!            (another's mount at the path is left) ► threads of fuser ended ► lanes ended
//!            ► the file removed, if it was made here
//! ```
//!
//! A server that has nothing else to serve ends when all of its files were unmounted, as other file systems do.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures_lite::future::or;
use vellum_core::{Disk, Result};
use vellum_export::Shutdown;
use vellum_export::fuse::{DiskFile, Facts, Mounted, Point, Taken, Teller};
use vellum_io::{Spawned, WorkersHandle, clock, unblock};

use crate::serve::ExportSpec;
use crate::served::Disks;

/// A file that is to show a disk.
#[derive(Debug, Clone)]
pub struct FuseSpec {
    /// The export's name; nothing where there is one disk only.
    pub export: Option<String>,
    /// The file: an empty one, or one that is not there.
    pub path: PathBuf,
}

/// More lanes than this do not help: the kernel has one queue for all of them.
const LANES_MAX: usize = 4;

/// How long the kernel may take to tell that a file was taken off.
const FAREWELL_MAX: Duration = Duration::from_secs(5);

/// The files of a server.
pub(crate) struct FuseFiles(Vec<Shown>);

struct Shown {
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

    /// Who tells the kernel that a file is larger.
    pub(crate) fn tellers(&self) -> Arc<[Teller]> {
        self.0.iter().map(|shown| shown.mounted.teller()).collect()
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

    /// Takes all of them off. Requests under way are waited for until `shutdown` cuts.
    pub(crate) async fn end(self, shutdown: &Shutdown) {
        for shown in self.0 {
            shown.end(shutdown).await;
        }
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
        let image = served.path().to_owned();
        let is_for_reading = |export: &&ExportSpec| export.path == image && export.image.read_only;
        let facts = Facts {
            read_only: disk.geometry().read_only || exports.iter().any(|export| is_for_reading(&export)),
            owner: point.owner(),
            allocated: Box::new(move || allocated(&image)),
        };
        let file = DiskFile::new(disk, facts, workers.count().min(LANES_MAX));
        let lanes = (0..file.lanes()).map(|lane| {
            let file = file.clone();
            // Not all files begin with the same worker.
            workers.spawn((number + lane) % workers.count(), move || async move { file.serve(lane).await })
        });
        let lanes: Vec<_> = lanes.collect();
        let mounting = file.clone();
        match unblock(move || point.mount(&mounting)).await {
            Ok(mounted) => {
                served.hold();
                Ok(Self { file, mounted, lanes })
            }
            Err(error) => {
                file.close();
                ended(lanes).await;
                Err(error)
            }
        }
    }

    async fn end(self, shutdown: &Shutdown) {
        let Self { file, mut mounted, lanes } = self;
        let (mut mounted, mut taken) = unblock(move || {
            let taken = mounted.unmount();
            (mounted, taken)
        })
        .await;
        let path = mounted.path().display();
        match taken {
            Ok(Taken::Free) | Err(_) => {}
            Ok(Taken::Busy) => {
                tracing::warn!("{path} is in use; it is taken away, and whoever has it open gets errors");
            }
            Ok(Taken::Elsewhere) => {
                tracing::warn!("{path} was taken off by another; whoever still has it open gets errors");
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
        // What is open somewhere else goes with the process. Where it is mounted in another name space, too, nothing is
        // told before.
        let is_elsewhere = matches!(taken, Ok(Taken::Elsewhere));
        complain(taken);
        if !is_elsewhere {
            or(mounted.ended(), clock().sleep(FAREWELL_MAX)).await;
        }
        file.close();
        ended(lanes).await;
        unblock(move || mounted.finish()).await;
    }
}

fn complain(result: Result<Taken>) {
    if let Err(error) = result {
        tracing::warn!("{}", error.chain());
    }
}

async fn ended(lanes: Vec<Spawned<()>>) {
    for lane in lanes {
        // A worker that has ended has nothing under way.
        let _ = lane.await;
    }
}

/// What an image takes on the host; a device takes all of itself.
fn allocated(image: &Path) -> Option<u64> {
    use std::os::unix::fs::MetadataExt;
    let facts = std::fs::metadata(image).ok().filter(|facts| facts.is_file())?;
    Some(facts.blocks() * 512)
}
