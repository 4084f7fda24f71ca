//! The block device below a directory, which counts flushes.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use vellum_core::{Context, Error, Result};

/// A block device, which counts its requests.
pub struct Device {
    stat: PathBuf,
}

impl Device {
    /// The device below a directory.
    pub fn below(dir: &Path) -> Result<Self> {
        let device = fs::metadata(dir).context(|| format!("can't look at {}", dir.display()))?.dev();
        let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
        let device = Self { stat: PathBuf::from(format!("/sys/dev/block/{major}:{minor}/stat")) };
        device.flushes().context(|| format!("no device below {} counts flushes", dir.display()))?;
        Ok(device)
    }

    /// Flushes that the device has completed, whatever caused them.
    pub fn flushes(&self) -> Result<u64> {
        let context = || format!("can't read {}", self.stat.display());
        let text = fs::read_to_string(&self.stat).context(context)?;
        flushes_of(&text).ok_or_else(|| Error::corrupt("it has another form")).context(context)
    }
}

/// The 16th field of a device's `stat`.
fn flushes_of(stat: &str) -> Option<u64> {
    stat.split_whitespace().nth(15)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flushes_of_a_device() {
        let stat = "  5 0 40 1   9 2 72 3   0 4 5   0 0 0 0   77 12\n";
        assert_eq!(flushes_of(stat), Some(77));
        assert_eq!(flushes_of("5 0 40 1 9 2 72 3 0 4 5"), None, "an old kernel does not count them");
    }
}
