//! Growth between crashes: each opening finds its device larger than the one before left it, and first
//! enlarges the disk of an image that was closed or not. While it is open a full device grows again.
//!
//! ```text
//!   size of the disk    sizes[0] ──opening──► sizes[1] ──opening──► sizes[2]      which it is, the superblock says
//!   the device          until it is resized lens[1], then opened with that, up to lens[2] on demand …
//! ```
//!
//! 1. A device never shrinks: at an opening the disk is never larger than at the next one.
//! 2. The guest sees sizes[1] of all these disks: any opening has reached that, whatever was interrupted
//!    before.
//! 3. Behind that every disk reads as zero.

use vellum_core::{Buffer, Disk, Geometry, GuestOffset, Result, SharedDisk, SharedStorage};
use vellum_format::native::{Native, OpenOptions, Superblocks, resize};
use vellum_sim::{ForwardDisk, Forwarding};

use super::device::Device;
use crate::common::native::opening;

/// How large the disk is, one opening after the other, and how long its device; in a file there is none.
#[derive(Clone, Copy)]
pub(crate) struct Grows {
    pub(crate) sizes: &'static [u64],
    pub(crate) lens: Option<&'static [u64]>,
}

impl Grows {
    /// What the guest sees.
    pub(crate) fn seen(&self) -> u64 {
        self.sizes[1]
    }

    /// The longest that the device becomes.
    pub(crate) fn len_max(&self) -> Option<u64> {
        self.lens.and_then(|lens| lens.last().copied())
    }

    /// The medium while the disk has this one of its sizes: as long as it was by then, and as long as it may
    /// become.
    fn medium(&self, image: &SharedStorage, has_zones: bool, from: usize, to: usize) -> SharedStorage {
        let Some(lens) = self.lens else { return image.clone() };
        let len = |number: usize| lens[number.min(lens.len() - 1)];
        Device::growing(image.clone(), has_zones, len(from), len(to))
    }

    /// Enlarges the disk, and returns the medium on which it will be opened.
    pub(crate) async fn grow(&self, image: &SharedStorage, has_zones: bool) -> Result<SharedStorage> {
        let size = Superblocks::read(&**image).await?.superblock.size();
        let number = self.sizes.iter().position(|one| *one == size).expect("it has one of its sizes");
        let medium = self.medium(image, has_zones, number + 1, number + 1);
        let Some(larger) = self.sizes.get(number + 1) else { return Ok(medium) };
        // An interrupted change is finished, as by `resize` itself, without randomness.
        let options = OpenOptions { journal_key: Some(1), without_base: true, ..opening() };
        Native::open(medium.clone(), None, options).await?.close().await?;
        resize(&medium, *larger, false).await?;
        Ok(self.medium(image, has_zones, number + 1, number + 2))
    }

    /// Whether a closed disk is zero behind what the guest sees.
    pub(crate) async fn verify(
        &self,
        image: &SharedStorage,
        below: Option<SharedDisk>,
    ) -> std::result::Result<(), String> {
        let looked = async {
            let options = OpenOptions { read_only: true, ..opening() };
            let disk = Native::open(image.clone(), below, options).await?;
            let (seen, size) = (self.seen(), disk.geometry().size);
            for at in [seen, seen + (64 << 10), 66 << 20, size / 2, size.saturating_sub(64 << 10)] {
                let len = size.saturating_sub(at).min(64 << 10);
                if at < seen || len == 0 {
                    continue;
                }
                let len = usize::try_from(len).expect("small");
                let bytes = disk.read(GuestOffset::new(at), Buffer::zeroed(len)).await?;
                if bytes.pieces().any(|piece| piece.iter().any(|byte| *byte != 0)) {
                    return Ok(Some(at));
                }
            }
            Ok(None)
        };
        match looked.await {
            Ok(None) => Ok(()),
            Ok(Some(at)) => Err(format!("what the disk has become larger by is not zero near {at}")),
            Err(error) => Err(vellum_core::Error::chain(&error)),
        }
    }
}

/// The front of a disk: the guest sees no more of it.
pub(crate) struct Seen {
    disk: SharedDisk,
    size: u64,
}

impl Seen {
    pub(crate) fn of(disk: SharedDisk, size: u64) -> SharedDisk {
        Forwarding::new(Self { disk, size })
    }
}

impl ForwardDisk for Seen {
    fn inner(&self) -> &dyn Disk {
        &*self.disk
    }

    fn geometry(&self) -> Geometry {
        Geometry { size: self.size, ..self.disk.geometry() }
    }
}
