//! Keys are added to an image, and removed.
//!
//! ```text
//!   add      material ─ flush ─► second sector of the header ─ flush ─► first sector ─ flush: commit point
//!   remove   sector with the slot's state ─ flush: commit point ─► the other ─ flush ─► material overwritten with random bytes ─ flush
//! ```
//!
//! The header has 592 bytes and so lies in two sectors, of which a crash may leave either. The slot's state is in the
//! first for the slots 0 to 6, and in the second for slot 7, which lies there as a whole.
//!
//! 1. A slot that is marked as in use has its material and its salt, and so opens: otherwise it would pass for the key that is
//!    left, and the last one that opens could be removed. Slot 6 has the end of its salt in the second sector, which is written
//!    before the state of a slot that is added, and after that of one that is removed.
//! 2. A removed slot's material is destroyed only once the slot is durably marked as empty. A crash or an error in between leaves
//!    material without its salt; to remove an empty slot overwrites what is in its place.
//! 3. At each moment at least one slot holds the key: a crash cannot lose it. What would remove the last one changes
//!    nothing.

use std::sync::Arc;

use vellum_core::{Buffer, Context, Error, ImageOffset, Offload, Result, SharedStorage};
use vellum_luks::{Chance, Header, SECTOR, SLOTS, Secret, Secrets};

use super::area::{KeyArea, Unlock};

/// What is done to the keys of an image.
#[derive(Debug, Clone)]
pub enum KeyChange {
    /// One more secret opens it.
    Add {
        /// The new secret.
        secret: Secret,
        /// In this slot; in the first empty one, when not given.
        slot: Option<usize>,
        /// Iterations for the new slot.
        iterations: u32,
    },
    /// What is in a slot opens it no more.
    Remove {
        /// The slot.
        slot: usize,
    },
    /// A secret opens it no more, in whichever slots it is.
    RemoveSecret {
        /// The secret.
        secret: Secret,
    },
}

/// What was done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeysChanged {
    /// The slots that were changed.
    pub slots: Vec<usize>,
    /// The slot to be removed was empty already: its key material was overwritten once more.
    pub was_empty: bool,
}

impl KeysChanged {
    fn of(slots: Vec<usize>) -> Self {
        Self { slots, was_empty: false }
    }
}

/// Changes the keys of a closed image. `secrets` have one that opens it, where a key is added. A slot that is removed may be empty:
/// its key material is overwritten again, as an earlier removal may have failed to do.
///
/// # Errors
/// `Invalid` for a wrong secret, a slot that is not as it must be, or when no key would be left; those of the storage.
pub async fn change_keys(
    area: KeyArea,
    image: &SharedStorage,
    secrets: &Secrets,
    change: &KeyChange,
    chance: &mut Chance<'_>,
    offload: &Arc<dyn Offload>,
) -> Result<KeysChanged> {
    let changed = change_inner(area, image, secrets, change, chance, offload).await;
    changed.context(|| format!("can't change the keys of {}", image.name()))
}

async fn change_inner(
    area: KeyArea,
    image: &SharedStorage,
    secrets: &Secrets,
    change: &KeyChange,
    chance: &mut Chance<'_>,
    offload: &Arc<dyn Offload>,
) -> Result<KeysChanged> {
    let mut header = area.header(&**image).await?;
    match change {
        KeyChange::Add { secret, slot, iterations } => {
            let unlock = Unlock { secrets, may_be_weak: true, offload };
            let slot = match *slot {
                Some(slot) => slot,
                None => header
                    .free_slot()
                    .ok_or_else(|| Error::invalid("all 8 key slots are in use: remove one"))?,
            };
            if slot >= SLOTS {
                return Err(Error::invalid(format!("there is no key slot {slot}: they are 0 to 7")));
            }
            let (key, _) = area.open(&header, image, &unlock).await?;
            let material = header.fill_slot(slot, &key, secret, *iterations, chance)?;
            write_material(area, image, &header, slot, &material).await?;
            write_header(area, image, &header, SECOND_FIRST).await.context(|| {
                format!(
                    "the new key may be in slot {slot} now, or may not (`vellum key list` shows the slots): if it is, do not add \
                     it again, or remove it with `vellum key remove --slot {slot}`"
                )
            })?;
            Ok(KeysChanged::of(vec![slot]))
        }
        KeyChange::Remove { slot } if *slot < SLOTS && header.slot_iterations(*slot).is_none() => {
            wipe(area, image, &header, *slot, chance).await?;
            Ok(KeysChanged { slots: vec![*slot], was_empty: true })
        }
        KeyChange::Remove { slot } => {
            remove(area, image, &mut header, *slot, chance).await?;
            Ok(KeysChanged::of(vec![*slot]))
        }
        KeyChange::RemoveSecret { secret } => {
            let slots = slots_of(area, image, &header, secret).await?;
            if slots.is_empty() {
                return Err(Error::invalid(
                    "no key slot is opened by this secret (if an earlier removal failed to overwrite its key material, \
                     `vellum key remove --slot N` does it)",
                ));
            }
            if slots.len() == header.active_slots().count() {
                return Err(Error::invalid(
                    "this secret opens every key slot that is in use: without it nobody can read the image any more. Add \
                     another key first, or remove slots by their number",
                ));
            }
            for slot in &slots {
                remove(area, image, &mut header, *slot, chance).await?;
            }
            Ok(KeysChanged::of(slots))
        }
    }
}

async fn slots_of(
    area: KeyArea,
    image: &SharedStorage,
    header: &Header,
    secret: &Secret,
) -> Result<Vec<usize>> {
    header.check_work()?;
    let mut slots = Vec::new();
    for slot in header.active_slots() {
        let material = area.material(header, slot, &**image).await?;
        if header.open_slot(slot, &material, secret)?.is_some() {
            slots.push(slot);
        }
    }
    Ok(slots)
}

async fn remove(
    area: KeyArea,
    image: &SharedStorage,
    header: &mut Header,
    slot: usize,
    chance: &mut Chance<'_>,
) -> Result<()> {
    header.clear_slot(slot)?;
    let order = if slot == SLOTS - 1 { SECOND_FIRST } else { FIRST_FIRST };
    write_header(area, image, header, order).await.context(|| {
        format!(
            "the key in slot {slot} may be gone, or may not (`vellum key list` shows the slots): repeat it with `vellum key remove \
             --slot {slot}`"
        )
    })?;
    wipe(area, image, header, slot, chance).await
}

/// Overwrites the key material of an empty slot.
async fn wipe(
    area: KeyArea,
    image: &SharedStorage,
    header: &Header,
    slot: usize,
    chance: &mut Chance<'_>,
) -> Result<()> {
    let mut nothing = vec![0; header.material(slot).1];
    let wiped = match chance(&mut nothing) {
        Ok(()) => write_material(area, image, header, slot, &nothing).await,
        Err(error) => Err(error),
    };
    wiped.context(|| {
        format!(
            "the key in slot {slot} is gone from the header, and its secret opens the image no more, but its key material could \
             not be overwritten and may still be there: repeat that with `vellum key remove --slot {slot}`"
        )
    })
}

async fn write_material(
    area: KeyArea,
    image: &SharedStorage,
    header: &Header,
    slot: usize,
    material: &[u8],
) -> Result<()> {
    let (at, len) = header.material(slot);
    let end = at + len as u64;
    if end > area.span.len() || area.span.start().bytes() + end > image.len() {
        return Err(Error::corrupt(format!("the place of slot {slot} is cut off")));
    }
    image.write(area.span.start() + at, Buffer::copy_of(material)).await?;
    image.flush().await
}

/// The orders in which the sectors of the header are written.
const SECOND_FIRST: [usize; 2] = [1, 0];
const FIRST_FIRST: [usize; 2] = [0, 1];

/// Writes the sectors of the header, each with a flush. What holds the state of the slot is the commit point.
async fn write_header(
    area: KeyArea,
    image: &SharedStorage,
    header: &Header,
    order: [usize; 2],
) -> Result<()> {
    let bytes = header.encode();
    let start: ImageOffset = area.span.start();
    for sector in order {
        let at = sector * SECTOR;
        let part = &bytes[at..bytes.len().min(at + SECTOR)];
        image.write(start + at as u64, Buffer::copy_of(part)).await?;
        image.flush().await?;
    }
    Ok(())
}
