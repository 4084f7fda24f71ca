//! New raw LUKS images.
//!
//! ```text
//!   header │ key material │ payload: as long as the disk
//! ```
//!
//! 1. The header is written last. Until then the file is not a LUKS image, and afterwards it is an empty one with all of its
//!    keys. A copy into it comes after that, as with the other formats.
//! 2. The payload is not written, so the disk reads as random bytes until it is written, as one that QEMU has made. A copy of a
//!    disk into it has to write the zeros, too.

use vellum_core::{BlockSize, Buffer, Error, ErrorKind, ImageOffset, Result, Storage, Zeroes};
use vellum_luks::{Hash, IvRule, Mode, NewHeader};

use super::NewKeys;
use crate::image::Reserve;
use crate::raw::reserve;

/// Makes an image with these keys, for a disk of this size, which is rounded up to whole sectors. Returns the size. A device keeps its length, and its
/// disk has all of it.
///
/// # Errors
/// `Invalid` for a reservation that has no meaning here, `NoSpace` for a device that is too small, and the errors of the
/// storage.
pub async fn create(storage: &dyn Storage, size: u64, keys: &NewKeys, how: Reserve) -> Result<u64> {
    let size = size.checked_next_multiple_of(BlockSize::SECTOR.bytes());
    let whole = size.and_then(|size| Some((size, size.checked_add(keys.len())?)));
    let Some((size, end)) = whole.filter(|(_, end)| i64::try_from(*end).is_ok()) else {
        return Err(Error::invalid("the size is too large"));
    };
    refuse_places(how)?;
    if !storage.limits().fixed_len {
        if storage.len() > 0 {
            // No header of another volume may outlive its keys.
            storage.set_len(0).await?;
            storage.flush().await?; // commit point: what was there is given up
        }
        storage.set_len(end).await?;
    } else {
        if end > storage.len() {
            let needs =
                format!("the device is too small: it has {} bytes, the image needs {end}", storage.len());
            return Err(Error::new(ErrorKind::NoSpace, needs));
        }
        // The device may have the header and the keys of another volume there.
        let (header, materials) = ImageOffset::ZERO.span(keys.len()).split_at(4096);
        storage.write_zeroes(header, Zeroes::Allocated).await?;
        storage.flush().await?; // commit point: what was there is given up
        storage.write_zeroes(materials, Zeroes::Allocated).await?;
    }
    reserve(storage, keys.len(), end, how).await?;
    let write = async |(at, bytes): (u64, Vec<u8>)| {
        storage.write(ImageOffset::new(at), Buffer::copy_of(&bytes)).await
    };
    let (header, materials): (Vec<_>, Vec<_>) = keys.parts().partition(|(at, _)| *at == 0);
    for part in materials {
        write(part).await?;
    }
    storage.flush().await?;
    for part in header {
        write(part).await?;
    }
    storage.flush().await?; // commit point: from now on it is an image
    Ok(size)
}

/// Bytes before the data of an image with a key of this length.
pub fn header_bytes(key_len: usize) -> u64 {
    let mode = Mode::Xts(IvRule::Plain64);
    NewHeader { mode, key_len, hash: Hash::Sha256, digest_iterations: 1 }.payload()
}

/// Refuses to reserve what these images have not.
pub(super) fn refuse_places(how: Reserve) -> Result<()> {
    match how {
        Reserve::Places => {
            Err(Error::invalid("a luks image has no metadata to preallocate: use falloc or full"))
        }
        Reserve::Nothing | Reserve::Space | Reserve::Zeros => Ok(()),
    }
}
