//! An image that was full and not closed, and what a recovery reads of it.

use std::sync::atomic::Ordering;

use serde::Serialize;
use vellum_core::{Error, IoCounts, Result, SharedStorage};
use vellum_format::native::recover;

use super::scene::{Scene, TENDED_EVERY};
use super::{Below, Drive, Image, Stage, UNIT};

/// What a recovery costs: reads and bytes of the image, and seconds on the modelled drive.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Recovered {
    /// Units that the image has, each allocated with an embedded entry.
    pub(crate) units: u64,
    /// Those that only their block's embedded entry recorded.
    pub(crate) embedded_units: u64,
    pub(crate) records: u64,
    pub(crate) reads: u64,
    pub(crate) mebibytes_read: f64,
    /// Of those what lies in zones: the young ones are read whole.
    pub(crate) mebibytes_of_zones: f64,
    pub(crate) seconds: f64,
    /// Writes of the image's own while its units were allocated: zones opened, and what was gathered of full ones.
    pub(crate) metadata_writes: u64,
}

/// An image of this many bytes, full of compressible data except for half a zone, that was not closed. Only
/// the first block of each unit is written: a recovery reads no more.
pub(crate) fn recovery(drive: Drive, bytes: u64) -> Result<Recovered> {
    let stage = Stage { drive, below: Below::ThinVolume, packs: 100 };
    let scene = Scene::new(Image::Zoned, stage, bytes)?;
    // The last zone is half full: only its blocks record its units.
    let units = bytes / UNIT as u64 - 512;
    let own_writes = || {
        let counts = [&scene.tally.metadata, &scene.tally.checkpoint].map(|tally| tally.counts().writes);
        counts.iter().sum::<u64>()
    };
    let opened = own_writes();
    scene.world.run(async {
        for unit in 0..units {
            scene.engine.write(unit * UNIT as u64, &scene.bytes[..4096]).await?;
            if unit % 64 == 63 {
                scene.engine.flush().await?;
            }
        }
        scene.engine.flush().await
    })?;
    if scene.tally.data.counts().writes != units {
        return Err(Error::corrupt("a unit was written otherwise than once"));
    }
    let metadata_writes = own_writes() - opened;
    scene.has_crashed.store(true, Ordering::Release);
    scene.world.run(scene.world.sleep(2 * TENDED_EVERY));
    let (before, begun): (IoCounts, _) = (scene.drive.counts(), scene.world.now());
    let storage: SharedStorage = scene.drive.clone();
    let of_zones = scene.drive.guest_read();
    let recovered = scene.world.run(recover(&storage))?;
    let after = scene.drive.counts();
    Ok(Recovered {
        units,
        embedded_units: recovered.embedded_units,
        records: recovered.records,
        reads: after.reads - before.reads,
        mebibytes_read: (after.bytes_read - before.bytes_read) as f64 / f64::from(1 << 20),
        mebibytes_of_zones: (scene.drive.guest_read() - of_zones) as f64 / f64::from(1 << 20),
        seconds: (scene.world.now() - begun).as_secs_f64(),
        metadata_writes,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recovery_reads_the_journal_and_young_zones_whatever_the_size() {
        let (small, large) = (recovery(Drive::Hdd, 1 << 30).unwrap(), recovery(Drive::Hdd, 4 << 30).unwrap());
        for seen in [small, large] {
            assert!(seen.embedded_units > 0 && seen.embedded_units < seen.units, "{seen:?}");
            let zones = seen.mebibytes_of_zones;
            assert!((64.0..=130.0).contains(&zones) && seen.mebibytes_read - zones <= 32.0, "{seen:?}");
            assert!(seen.reads <= 2048 && seen.mebibytes_read <= 160.0, "{seen:?}");
        }
        assert_eq!(recovery(Drive::Hdd, 1 << 30).unwrap(), small);
        assert!(large.mebibytes_read < small.mebibytes_read + 64.0, "{small:?} {large:?}");
    }
}
