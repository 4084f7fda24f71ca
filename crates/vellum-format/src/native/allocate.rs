//! Handing out units (`units.rs`): one that reads as zero, inside the file.

use vellum_core::{Context, Error, ErrorKind, ImageSpan, Result};

use super::image::Native;
use super::units::Units;

/// The file grows in steps of this many bytes. The excess is truncated when the image is closed.
const GROWTH_STEP: u64 = 16 << 20;

impl Native {
    pub(super) fn units(&self) -> &Units {
        self.units.as_ref().expect("an image with a table that is written has units")
    }

    /// A unit that reads as zero, durably. This never waits for a commit. A caller that can wait for one uses
    /// [`Native::make_space`].
    pub(super) async fn allocate(&self) -> Result<u32> {
        let take = || self.take_prepared().or_else(|| self.units().take());
        let unit = take().or_else(|| {
            // Better to use the zone that is being kept free than to fail.
            self.end_emptying(self.zones.as_ref()?);
            take()
        });
        let Some(unit) = unit else {
            let why = match self.metadata.limits().fixed_len {
                true => format!(
                    "{}: the device is full and needs at least {} more bytes",
                    self.engine.name,
                    self.missing()
                ),
                false => format!("{}: no unit is free", self.engine.name),
            };
            return Err(Error::new(ErrorKind::NoSpace, why));
        };
        // A unit that was given up because the file could not grow may come back as a clean one and still lie
        // behind the end of the file. If it were written there, a concurrent extension of the file could
        // truncate it.
        if let Err(error) = self.reach(self.places.unit(unit)).await {
            self.units().give_up(unit);
            return Err(error);
        }
        Ok(unit)
    }

    /// Returns a unit that was allocated and is not in the table. It may have been written to.
    pub(super) fn give_up(&self, unit: u32) {
        self.units().give_up(unit);
    }

    /// Makes the file long enough to hold the unit.
    pub(super) async fn reach(&self, unit: ImageSpan) -> Result<()> {
        if self.metadata.len() >= unit.end().bytes() {
            return Ok(());
        }
        let _growing = self.units().growing.lock().await;
        if self.metadata.len() < unit.end().bytes() {
            let len = unit.end().bytes() + GROWTH_STEP - unit.len().min(GROWTH_STEP);
            let longer = self.metadata.set_len(len).await;
            longer.context(|| format!("{}: can't extend the file", self.engine.name))?;
        }
        Ok(())
    }
}
