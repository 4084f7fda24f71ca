//! How much room is left on a device, and what it has got since: a device may be made larger while the image is open.
//!
//! 1. The end of a device is looked at when a request finds no unit free, before it fails, and whenever somebody asks how much room
//!    there is. What a device has more is units of unknown content, as all of it was.
//! 2. A device is never believed to be shorter than it was.

use vellum_core::{ImageOffset, Result, Room};

use super::geometry::Places;
use super::image::Native;

/// How many units lie wholly inside an image of this length.
pub(super) fn whole_units(places: &Places, len: u64) -> u32 {
    let data = len.saturating_sub(places.data_offset().bytes());
    let most = places.unit_max().min(u32::MAX >> 1);
    u32::try_from((data / places.unit(1).len()).min(u64::from(most))).expect("as just bounded")
}

impl Native {
    /// Looks whether the device has become longer; gives its length.
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
        self.state.check_open()?;
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

    /// How much longer the device must be for one unit more.
    pub(super) fn missing(&self) -> u64 {
        let unit = self.unit().expect("only a table has units");
        let len = self.metadata.len();
        let units = u64::from(whole_units(&self.places, len));
        (self.places.data_offset() + ((units + 1) << unit.shift()) - ImageOffset::ZERO).saturating_sub(len)
    }
}
