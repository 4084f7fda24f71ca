//! What is behind the valve of a disk: the disk of its chain, and the layers over it that a server was asked for.

use std::path::Path;
use std::sync::Arc;

use vellum_core::SharedDisk;
use vellum_layer::noted::{NotedDisk, Notes};
use vellum_layer::{Chain, Durable};

use super::{How, hand_over};
use crate::grow::Growing;
use crate::meter::{Metered, Record};

/// The disk on top of a chain as it is served, and the task that enlarges its device.
pub(super) async fn behind_valve(
    chain: &Chain,
    path: &Path,
    how: &How,
    record: &Arc<Record>,
    (is_barred, notes): (bool, Option<Arc<Notes>>),
) -> (SharedDisk, Option<Arc<Growing>>) {
    let growing = Growing::over(chain.disk(), path.display().to_string(), how.grow_hook.clone()).await;
    let disk: SharedDisk = match &growing {
        Some(growing) => growing.clone(),
        None => chain.disk().clone(),
    };
    let disk = match notes {
        Some(notes) => NotedDisk::over(disk, notes),
        None => disk,
    };
    let disk = hand_over::barred(chain, disk, is_barred);
    let disk = if how.is_durable { Durable::over(disk) } else { disk };
    let disk = how.sparse.over(disk);
    let disk = how.part.map_or_else(|| disk.clone(), |part| part.of(disk.clone()));
    (Metered::new(disk, record.clone()), growing)
}
