//! Removing the base from a closed image.
//!
//! ```text
//!   packed blocks over the base made plain ► closed ► what the masks call zero, or the base's, made zero in its
//!   place ► flush ► superblock without base, bitmap and masks ► flush           commit point ► the other copy ► flush
//! ```
//!
//! 1. The caller has written everything that the base has and the image had not: where the disk still shows the
//!    base, the base reads as zero. So the disk reads the same before and after.
//! 2. Without masks each byte of a unit counts, and in `linear` each byte of the data. So what the masks call
//!    zero is made zero in its place while they still count; until the commit point nobody reads these bytes.
//! 3. Regions stay where they are. Those of bitmap and masks are no more, and in `linear` neither is the
//!    journal's; their space is left as a gap.
//! 4. A crash leaves the disk over its base, or the disk alone. Both copies of the superblock are written, so that
//!    a damaged one is not replaced by one that still names the base. After a failed flush the next attempt says
//!    that the base is gone only when a flush has succeeded.
//! 5. Snapshots also read from the base: an image that has some is left as it is.

use std::sync::atomic::{AtomicBool, Ordering};

use vellum_core::{
    Context, Disk, Error, ErrorKind, GuestOffset, GuestSpan, ImageOffset, ImageSpan, Result, SharedStorage,
    Zeroes,
};

use super::geometry::{Places, SUB_BLOCK};
use super::image::{Native, Origin};
use super::open::OpenOptions;
use super::superblock::Superblocks;

/// The mapping is looked at for this many bytes of the guest at a time.
const LOOKED_AT_ONCE: u64 = 64 << 20;

/// Removes the base from a closed image. Where the disk still shows it, it reads as zero from then on.
///
/// # Errors
/// `Unsupported` when the image has snapshots, `Closed` when it was stopped, `Corrupt` for a damaged image, and
/// the errors of the storage.
pub(super) async fn detach(image: &SharedStorage, stop: &AtomicBool) -> Result<()> {
    detach_inner(image, stop)
        .await
        .context(|| format!("can't detach {} from its backing image", image.name()))
}

async fn detach_inner(image: &SharedStorage, stop: &AtomicBool) -> Result<()> {
    // Opening it finishes an interrupted change.
    let native = Native::open(image.clone(), None, without_base(false)).await?;
    let prepared = prepare(&native, stop).await;
    native.close().await?;
    let Some(over) = prepared? else {
        // An earlier attempt may have come this far without being durable.
        return image.flush().await;
    };
    zero_in_place(image, over, stop).await?;
    image.flush().await?;
    let mut superblocks = Superblocks::read(&**image).await?;
    superblocks.superblock.detach()?;
    superblocks.write(&**image).await?;
    image.flush().await?; // commit point
    superblocks.write(&**image).await?;
    image.flush().await
}

fn without_base(read_only: bool) -> OpenOptions {
    OpenOptions { read_only, without_base: true, ..OpenOptions::default() }
}

/// Stopping is safe before the commit point: the image still has its base.
fn go_on(stop: &AtomicBool) -> Result<()> {
    match stop.load(Ordering::Relaxed) {
        true => Err(Error::new(ErrorKind::Closed, "stopped by a signal")),
        false => Ok(()),
    }
}

/// Makes each packed block over the base plain. The part of the disk that lies over the base, if there is one.
async fn prepare(native: &Native, stop: &AtomicBool) -> Result<Option<GuestSpan>> {
    let shape = native.places.shape();
    let Some(base_bytes) = shape.base_bytes else { return Ok(None) };
    if shape.layout.has_table() && !native.snapshots()?.is_empty() {
        return Err(Error::unsupported(
            "the image has snapshots, which also read from the backing image: delete them first",
        ));
    }
    let over = GuestOffset::ZERO.span(SUB_BLOCK.round_up(base_bytes).min(shape.size));
    if let Some(unit) = shape.layout.unit().filter(|_| shape.zone().is_some()) {
        let _inside = native.engine.epochs.enter();
        for number in 0..unit.count_for(over.len()) {
            let (_, form) = native.find(|| native.entry_and_form(number)).await?;
            go_on(stop)?;
            if form != 0 {
                native.make_plain(number, None).await?;
            }
        }
    }
    Ok(Some(over))
}

/// Zeroes the space of everything that the masks call zero, or the base's. The image is closed, so home says all.
async fn zero_in_place(image: &SharedStorage, over: GuestSpan, stop: &AtomicBool) -> Result<()> {
    let native = Native::open(image.clone(), None, without_base(true)).await?;
    let mut rest = over;
    while !rest.is_empty() {
        go_on(stop)?;
        let now;
        (now, rest) = rest.split_at(LOOKED_AT_ONCE);
        let mut at = now.start();
        for part in native.parts(now).await? {
            let span = at.span(part.len);
            at = span.end();
            match part.from {
                Origin::Below | Origin::Zero => zero_places(&native, image, span).await?,
                Origin::Broken => return Err(native.broken(span.start())),
                Origin::Embedded(_) => {
                    return Err(Error::corrupt(format!(
                        "a packed block at {} cannot be moved",
                        span.start()
                    )));
                }
                Origin::Host(_) | Origin::NoUnit => {}
            }
        }
    }
    native.close().await
}

/// Zeroes the space of a part of the disk, as far as there is any.
async fn zero_places(native: &Native, image: &SharedStorage, span: GuestSpan) -> Result<()> {
    let places: Places = native.places;
    let in_file = ImageOffset::ZERO.span(image.len());
    let zero = async |space: ImageSpan| match space.intersect(in_file) {
        space if space.is_empty() => Ok(()),
        space => image.write_zeroes(space, Zeroes::MayUnmap).await,
    };
    let Some(unit) = places.shape().layout.unit() else {
        return zero((places.data_offset() + span.start().bytes()).span(span.len())).await;
    };
    for piece in unit.pieces_of(span) {
        let (number, _) =
            native.find(|| native.entry_and_form(unit.cluster_of(piece.start()).index())).await?;
        if number != 0 {
            let start = places.unit(number).start() + unit.within(piece.start());
            zero(start.span(piece.len())).await?;
        }
    }
    Ok(())
}
