//! Raw LUKS images of version 2, which are only read.
//!
//! ```text
//!   first copy of the header │ second copy │ key material │ the segment: the disk, from its first byte to the end of the file
//! ```
//!
//! 1. Both copies are read, and the one with the higher number counts; one that is damaged does not. The second is found also
//!    where the first says nothing: its place is one of nine.
//! 2. Nothing is written, not even a damaged copy: `cryptsetup repair` does that.

use std::sync::Arc;

use vellum_core::{Buffer, Context, Error, ErrorKind, ImageOffset, Result, SharedStorage, Storage, offload};
use vellum_luks::SectorCipher;
use vellum_luks::luks2::{COPY_LENS, Header2, PREAMBLE_LEN, Preamble};

use super::area::{Unlock, opens_nothing, refuse_weak, refuse_without_secret};
use crate::image::Fact;

/// The bytes from here on. Behind the end of the file they are zero.
async fn bytes_at(storage: &dyn Storage, at: u64, len: usize) -> Result<Vec<u8>> {
    Ok(storage.read(ImageOffset::new(at), Buffer::for_overwrite(len)).await?.to_vec())
}

/// The copy of the header at this place, and its length.
async fn copy(storage: &dyn Storage, at: u64) -> Result<(Header2, u64)> {
    let begin = bytes_at(storage, at, PREAMBLE_LEN).await?;
    // No checksum has said yet that these bytes are what was written.
    let damaged = |error: Error| error.with_kind(ErrorKind::Corrupt);
    let Preamble { len, .. } = Preamble::parse(&begin, at).map_err(damaged)?;
    let bytes = bytes_at(storage, at, usize::try_from(len).expect("4 MiB at most")).await?;
    Ok((Header2::parse(&bytes, at)?, len))
}

/// The header that counts.
///
/// # Errors
/// Those of [`Header2::parse`] for the first copy, where none can be used, and those of the storage.
pub(super) async fn header(storage: &dyn Storage) -> Result<Header2> {
    let context = || format!("{} is not usable", storage.name());
    let first = copy(storage, 0).await;
    let places = match &first {
        Ok((_, len)) => vec![*len],
        // What is refused by name is refused, whatever the other copy says.
        Err(error) if error.kind() == ErrorKind::Unsupported => Vec::new(),
        Err(_) => COPY_LENS.to_vec(),
    };
    let mut newest = first.map(|(header, _)| header);
    for at in places {
        let Ok((second, _)) = copy(storage, at).await else { continue };
        if newest.as_ref().is_ok_and(|first| first.sequence() >= second.sequence()) {
            continue;
        }
        newest = Ok(second);
    }
    newest.context(context)
}

/// How much there is behind the place where the data begins.
///
/// # Errors
/// `Corrupt` when the file ends before it.
pub(super) fn behind(storage: &dyn Storage, at: u64) -> Result<u64> {
    storage.len().checked_sub(at).ok_or_else(|| {
        Error::corrupt(format!(
            "{} is cut off: its data begins at {at}, and the file has {} bytes",
            storage.name(),
            storage.len()
        ))
    })
}

/// How long the disk is, in bytes.
///
/// # Errors
/// `Corrupt` when the file ends within it, or before it.
pub(super) fn size(header: &Header2, storage: &dyn Storage) -> Result<u64> {
    let segment = header.segment();
    let there = behind(storage, segment.at)?;
    match segment.len {
        None => Ok(there - there % segment.sector_bytes as u64),
        Some(len) if len <= there => Ok(len),
        Some(len) => Err(Error::corrupt(format!(
            "{} is cut off: its disk has {len} bytes, of which the file has {there}",
            storage.name()
        ))),
    }
}

/// The cipher of the data, if one of the secrets opens it.
///
/// # Errors
/// `Unsupported` without a secret, and for a mode that the caller does not let through; `Invalid` for wrong secrets;
/// those of the storage.
pub(super) async fn unlock(
    header: &Header2,
    storage: &SharedStorage,
    how: &Unlock<'_>,
) -> Result<Arc<SectorCipher>> {
    refuse_weak(&**storage, header.segment().mode, how.may_be_weak)?;
    refuse_without_secret(&**storage, "LUKS", how.secrets)?;
    let context = || storage.name().to_owned();
    header.check_work().context(context)?;
    let mut slots = Vec::new();
    for slot in header.slots() {
        let Some((at, len)) = slot.material() else { continue };
        if at + len as u64 > storage.len() {
            return Err(Error::corrupt(format!("the key material of slot {} is cut off", slot.id)))
                .context(context);
        }
        slots.push((slot, Arc::new(bytes_at(&**storage, at, len).await?)));
    }
    if let Some(trouble) = header.slots().iter().find(|_| slots.is_empty()) {
        let why = trouble.trouble().unwrap_or_default();
        return Err(Error::unsupported(format!("key slot {} cannot be opened: {why}", trouble.id)))
            .context(context);
    }
    for secret in how.secrets.all() {
        for (slot, material) in &slots {
            let (one, material, secret) = ((*slot).clone(), material.clone(), secret.clone());
            let opened = offload(&**how.offload, move || one.open(&material, &secret)).await;
            if let Some(key) = opened.context(|| format!("{}: key slot {}", storage.name(), slot.id))? {
                return header.segment().cipher(&key).map(Arc::new);
            }
        }
    }
    Err(opens_nothing(&**storage, how.secrets, slots.len()))
}

/// The facts of the header, under the names that those of version 1 have.
pub(super) fn facts(header: &Header2) -> Vec<(&'static str, Fact)> {
    let segment = header.segment();
    let name = segment.mode.name();
    let (chaining, rule) = name.split_once('-').expect("a mode has two parts");
    let (rule, hash) = rule.split_once(':').unwrap_or((rule, ""));
    let mut facts: Vec<(&'static str, Fact)> = vec![("version", 2_u64.into()), ("ivgen-alg", rule.into())];
    if !hash.is_empty() {
        facts.push(("ivgen-hash-alg", hash.into()));
    }
    let slots = header.slots().iter().map(|slot| {
        let mut facts: Vec<(&'static str, Fact)> =
            vec![("id", u64::from(slot.id).into()), ("active", true.into())];
        match (slot.kdf(), slot.material()) {
            (Some(kdf), Some((at, _))) => {
                facts.push(("kdf", kdf.name().into()));
                facts.extend(kdf.numbers().into_iter().map(|(name, number)| (name, number.into())));
                facts.push(("key-offset", at.into()));
            }
            _ => facts.push(("unusable", slot.trouble().unwrap_or_default().into())),
        }
        Fact::Group(facts)
    });
    facts.extend([
        ("detached-header", false.into()),
        ("cipher-alg", header.cipher().into()),
        ("uuid", header.uuid().into()),
        ("cipher-mode", chaining.into()),
        ("sector-size", (segment.sector_bytes as u64).into()),
        ("slots", Fact::List(slots.collect())),
        ("payload-offset", segment.at.into()),
    ]);
    facts
}
