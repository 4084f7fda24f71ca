//! `dd` of a file: written with one sync at the end, read back, overwritten with incompressible data.

use std::sync::Arc;

use serde::Serialize;
use vellum_core::Result;

use super::scene::{DISK, Scene, units_of_which};
use super::{Image, REQUEST, Stage, ZONE};

/// Writes in flight at once, as a guest's page cache has it; reads, as its read-ahead.
const WRITES: u64 = 32;
const READS: u64 = 2;

/// What it took.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Dd {
    /// To write the file, and the sync.
    pub(crate) seconds: f64,
    /// To read it back.
    pub(crate) read_seconds: f64,
    /// How many of its units have an embedded entry.
    pub(crate) packed: u64,
    /// To write noise over it, and what that read of the image.
    pub(crate) again_seconds: f64,
    pub(crate) again_reads: u64,
}

pub(crate) fn dd(image: Image, stage: Stage, bytes: u64) -> Result<Dd> {
    let scene = Scene::new(image, stage, DISK)?;
    let places = || (0..bytes).step_by(REQUEST);
    let len = move |at: u64| usize::try_from((bytes - at).min(REQUEST as u64)).expect("a request is short");
    let copy = |data: &Arc<Vec<u8>>| {
        let data = data.clone();
        scene.time(|| {
            scene.work(WRITES, places(), move |engine, at| {
                let data = data.clone();
                async move { engine.write(at, &data[..len(at)]).await }
            })?;
            scene.flush()
        })
    };
    // The file that dd reads was read meanwhile: time to make ready.
    scene.make_ready(DISK - ZONE)?;
    let before = scene.drive.packed();
    let seconds = copy(&scene.bytes)?;
    let packed = scene.drive.packed() - before;
    let read_seconds = scene.time(|| {
        scene.work(READS, places(), move |engine, at| async move { engine.read(at, len(at)).await })
    })?;
    let reads = scene.drive.counts().reads;
    let again_seconds = copy(&units_of_which(0))?;
    let again_reads = scene.drive.counts().reads - reads;
    Ok(Dd { seconds, read_seconds, packed, again_seconds, again_reads })
}

#[cfg(test)]
mod tests {
    use super::super::{Below, Drive, UNIT};
    use super::*;

    #[test]
    fn each_unit_that_packs_has_one_packed_block_and_is_read_back() {
        let bytes = 16 << 20;
        let stage = |packs| Stage { drive: Drive::Hdd, below: Below::ThinVolume, packs };
        let seen = |packs| dd(Image::Zoned, stage(packs), bytes).unwrap();
        let units = bytes / UNIT as u64;
        // S14: one of sixteen blocks is packed; S13: noise over them reads nothing.
        assert_eq!([100, 50, 0].map(|packs| seen(packs).packed), [units, units / 2, 0]);
        assert_eq!(seen(100).again_reads, 0);
        // S9: reads cost what they cost the host.
        let (host, zoned) = (dd(Image::Host, stage(100), bytes).unwrap(), seen(100));
        assert!(zoned.read_seconds <= 1.1 * host.read_seconds, "{zoned:?} {host:?}");
        assert_eq!((host.packed, host.again_reads), (0, 0));
        assert_eq!(seen(100), zoned, "virtual time: the same each time");
    }

    #[test]
    fn what_fills_units_is_written_once_whatever_is_ready() {
        let bytes = 192 << 20;
        let seen = |image, below, packs| dd(image, Stage { drive: Drive::Hdd, below, packs }, bytes).unwrap();
        let host = seen(Image::Host, Below::Volume, 100);
        for below in [Below::Cleared(8), Below::Volume, Below::ThinVolume] {
            for packs in [100, 0] {
                let ours = seen(Image::Zoned, below, packs);
                // S10, S12: zeros before all of it would be twice the bytes. S13: units that are filled move.
                assert!(ours.seconds <= 1.2 * host.seconds, "{below:?} {packs}: {ours:?} {host:?}");
                assert!(
                    ours.again_seconds <= 1.2 * host.again_seconds,
                    "{below:?} {packs}: {ours:?} {host:?}"
                );
            }
        }
    }
}
