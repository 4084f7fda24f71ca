//! How much room is left on a device, and how much it has gained: a device may grow while the image is open.
//!
//! 1. The length of a device is read when a request finds no free unit, before the request fails, and
//!    whenever the room is queried. The space that a device has gained is units of unknown content, as all of
//!    it once was.
//! 2. A device is never taken to be shorter than it was.

use vellum_core::{ImageOffset, Result, Room};

use super::geometry::Places;
use super::image::Native;

/// The number of units that lie wholly inside an image of this length.
pub(super) fn whole_units(places: &Places, len: u64) -> u32 {
    let data = len.saturating_sub(places.data_offset().bytes());
    let most = places.unit_max().min(u32::MAX >> 1);
    u32::try_from((data / places.unit(1).len()).min(u64::from(most))).expect("as just bounded")
}

impl Native {
    /// Checks whether the device has grown, and returns its length.
    pub(super) async fn look_at_device(&self) -> Result<u64> {
        let len = self.metadata.look_at_len().await?;
        self.units().extend(whole_units(&self.places, len));
        Ok(len)
    }

    pub(super) async fn room_left(&self) -> Result<Option<Room>> {
        let (Some(units), Some(unit)) = (&self.units, self.unit()) else {
            return Ok(None);
        };
        if !self.metadata.limits().fixed_len {
            return Ok(None);
        }
        self.engine.state.check_open()?;
        let len = self.look_at_device().await?;
        let all = self.places.shape().units() << unit.shift();
        Ok(Some(Room {
            len,
            free: units.free() << unit.shift(),
            step: self.missing(),
            len_for_all: (self.places.data_offset() + all - ImageOffset::ZERO),
            refused: units.refused(),
        }))
    }

    /// How many bytes the device must grow by for one more unit.
    pub(super) fn missing(&self) -> u64 {
        let unit = self.unit().expect("only a table has units");
        let len = self.metadata.len();
        let units = u64::from(whole_units(&self.places, len));
        (self.places.data_offset() + ((units + 1) << unit.shift()) - ImageOffset::ZERO).saturating_sub(len)
    }
}
