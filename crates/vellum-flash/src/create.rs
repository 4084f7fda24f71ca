//! A new cache.
//!
//! ```text
//!   zeros over both superblocks ► flush ► an empty slice in each first place, zeros in each second, and over the ring
//!     ► flush ► superblocks ► flush   (commit point)
//! ```
//!
//! A cache whose creation was cut off has no superblock.

use vellum_core::{
    Buffer, Context, Error, ImageOffset, LocalFuture, Result, SharedStorage, Zeroes, try_join_all,
};

use crate::facts::Facts;
use crate::layout::{BLOCK_BYTES, COPY_AT, Layout, Superblock};
use crate::slice::Slice;

/// At most this many writes are in flight at once.
const WRITES_AT_ONCE: usize = 32;

/// Makes a cache of this many bytes in the storage, which has that length already. `id` and `secret` are random; the id
/// is not zero.
///
/// # Errors
/// `Invalid` when that is too little, and those of the storage.
pub async fn create(storage: &SharedStorage, file_bytes: u64, id: [u8; 16], secret: u64) -> Result<Facts> {
    let layout = Layout::for_size(file_bytes, secret)?;
    if storage.len() < layout.total_bytes() {
        let why = format!(
            "{}: a flash cache of {file_bytes} bytes does not fit into {}",
            storage.name(),
            storage.len()
        );
        return Err(Error::invalid(why));
    }
    let id = u128::from_be_bytes(id);
    if id == 0 {
        return Err(Error::invalid("the id of a flash cache is not zero"));
    }
    let made = write_all(storage, id, &layout).await;
    made.context(|| format!("can't make a flash cache in {}", storage.name()))?;
    Ok(Facts::of_layout(&layout))
}

async fn write_all(storage: &SharedStorage, id: u128, layout: &Layout) -> Result<()> {
    storage.write_zeroes(ImageOffset::ZERO.span(2 * BLOCK_BYTES), Zeroes::Allocated).await?;
    storage.flush().await?;
    storage.write_zeroes(layout.ring(), Zeroes::Allocated).await?;
    write_slices(storage, id, layout, &mut |_| Ok(Vec::new())).await?;
    storage.flush().await?;
    let superblock = Superblock { id, layout: *layout, features: Superblock::KNOWN }.encode();
    for at in [0, COPY_AT] {
        storage.write(ImageOffset::new(at), Buffer::copy_of(&superblock)).await?;
    }
    storage.flush().await // commit point
}

/// Writes the first place of each slice, as of no record, and zeros into the start of the second. `payload` says what is
/// in a slice, and may stop it all.
pub(crate) async fn write_slices(
    storage: &SharedStorage,
    id: u128,
    layout: &Layout,
    payload: &mut dyn FnMut(u32) -> Result<Vec<u8>>,
) -> Result<()> {
    let mut number = 0;
    while number < layout.slices() {
        let mut writes: Vec<LocalFuture<'_, Result<()>>> = Vec::new();
        while number < layout.slices() && writes.len() < WRITES_AT_ONCE {
            let slice = Slice { number, as_of: 0, payload: payload(number)? };
            writes.push(storage.write(layout.slice_at(number, 0), Buffer::copy_of(&slice.encode(id))));
            let second = layout.slice_at(number, 1).span(BLOCK_BYTES);
            writes.push(storage.write_zeroes(second, Zeroes::Allocated));
            number += 1;
        }
        try_join_all(writes).await?;
    }
    Ok(())
}
