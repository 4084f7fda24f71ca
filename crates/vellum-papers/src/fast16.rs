//! The rows of the paper on sync amplification (FAST 2016) that one image shows: how many flushes of the drive a
//! flush of the guest becomes.
//!
//! ```text
//!   append   50 times: 64 KiB behind the last ─ flush        each allocates, the file grows
//!   again    the same places once more                       nothing allocates
//! ```
//!
//! The images are those of [`crate::selfie`], on a volume, where a flush of the image is one of the drive, and in a file
//! of ext4, whose own commit adds one where the file grew. QCOW2 of then leaves out refcounts, in its favour.

use serde::Serialize;
use vellum_core::Result;
use vellum_lab::guest::Request;
use vellum_lab::trace::Trace;

use crate::selfie::{Below, Drive, Image, Played, Recorded, Stage, play};

const APPENDS: u64 = 50;
const LEN: usize = 64 << 10;

/// What the guest did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Load {
    Append,
    Again,
    Varmail,
}

/// One guest on one image.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Run {
    pub(crate) load: Load,
    pub(crate) image: Image,
    pub(crate) stage: Stage,
    /// Flushes of the guest.
    pub(crate) asked: u64,
    pub(crate) played: Played,
}

impl Run {
    /// Flushes of the drive for one of the guest.
    pub(crate) fn flushes(&self) -> f64 {
        self.played.flushes as f64 / self.asked as f64
    }
}

/// The images that are compared.
pub(crate) const IMAGES: [Image; 3] = [Image::RawFile, Image::Qcow2, Image::Journal];

pub(crate) fn run(load: Load, image: Image, below: Below, drive: Drive) -> Result<Run> {
    let stage = Stage { drive, below, packs: 100 };
    let appends: Vec<Request> = (0..APPENDS)
        .flat_map(|index| [Request::Write { offset: index * LEN as u64, len: LEN }, Request::Flush])
        .collect();
    let mut guest = match load {
        Load::Append => Recorded { counted: appends, ..Recorded::default() },
        Load::Again => Recorded { before: appends.clone(), counted: appends, ..Recorded::default() },
        Load::Varmail => Recorded::of(&Trace::recorded("varmail_16t")?),
    };
    let asked = guest.counted.iter().filter(|request| **request == Request::Flush).count() as u64;
    // The player ends with one of its own: it stands for the last of the guest's.
    if guest.counted.last() == Some(&Request::Flush) {
        guest.counted.pop();
    }
    let played = play(image, stage, &guest)?;
    Ok(Run { load, image, stage, asked, played })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flush_of_the_guest_is_one_of_the_drive_and_of_a_growing_file_two() {
        let flushes = |image, load, below| run(load, image, below, Drive::Hdd).unwrap().flushes();
        let one = |value: f64| (value - 1.0).abs() < 1e-9;
        assert!(one(flushes(Image::Journal, Load::Append, Below::ThinVolume)), "A2");
        assert!(one(flushes(Image::RawFile, Load::Append, Below::ThinVolume)));
        assert!(flushes(Image::Qcow2, Load::Append, Below::ThinVolume) > 1.9);
        assert!(
            (flushes(Image::RawFile, Load::Append, Below::File) - 2.0).abs() < 1e-9,
            "A3: the file grows"
        );
        assert!(one(flushes(Image::RawFile, Load::Again, Below::File)), "A3: it does not");
    }
}
