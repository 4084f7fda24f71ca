//! The header and the key material, where they are in a storage; and how they are opened with a secret.

use std::sync::Arc;

use vellum_core::{
    Buffer, Context, Error, ErrorKind, ImageOffset, ImageSpan, Offload, Result, SharedStorage, Storage,
    offload,
};
use vellum_luks::{HEADER_LEN, Header, MasterKey, Mode, Secrets, SectorCipher};

/// Where a LUKS header and its key material are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeyArea {
    /// Their bytes in the storage.
    pub span: ImageSpan,
}

/// How the cipher of an image is obtained.
pub(crate) struct Unlock<'a> {
    pub(crate) secrets: &'a Secrets,
    /// A mode that is not written any more is let through.
    pub(crate) may_be_weak: bool,
    pub(crate) offload: &'a Arc<dyn Offload>,
}

impl KeyArea {
    /// That of a raw image, which begins with it.
    pub(crate) fn of_raw(storage: &dyn Storage) -> Self {
        Self { span: ImageOffset::ZERO.span(storage.len()) }
    }

    /// Reads the header, and checks that its key material is inside.
    ///
    /// # Errors
    /// Those of [`Header::parse`] and of the storage; `Corrupt` when it is cut off.
    pub async fn header(&self, storage: &dyn Storage) -> Result<Header> {
        let context = || format!("{} is not usable", storage.name());
        let bytes = storage.read(self.span.start(), Buffer::for_overwrite(HEADER_LEN)).await?;
        let header = Header::parse(bytes.slice()).context(context)?;
        for slot in header.active_slots() {
            let (at, len) = header.material(slot);
            let end = at + len as u64;
            if end > self.span.len() || self.span.start().bytes() + end > storage.len() {
                return Err(Error::corrupt(format!("the key material of slot {slot} is cut off")))
                    .context(context);
            }
        }
        Ok(header)
    }

    /// The key material of a slot.
    pub(super) async fn material(
        &self,
        header: &Header,
        slot: usize,
        storage: &dyn Storage,
    ) -> Result<Vec<u8>> {
        let (at, len) = header.material(slot);
        let bytes = storage.read(self.span.start() + at, Buffer::for_overwrite(len)).await?;
        Ok(bytes.to_vec())
    }

    /// Tries the secrets on the slots. Returns the key and the slot that had it.
    ///
    /// # Errors
    /// `Invalid` when there is no secret, or none fits.
    pub(super) async fn open(
        &self,
        header: &Header,
        storage: &SharedStorage,
        how: &Unlock<'_>,
    ) -> Result<(MasterKey, usize)> {
        refuse_without_secret(&**storage, "LUKS", how.secrets)?;
        header.check_work().context(|| storage.name().to_owned())?;
        let mut materials = Vec::new();
        for slot in header.active_slots() {
            materials.push((slot, Arc::new(self.material(header, slot, &**storage).await?)));
        }
        for secret in how.secrets.all() {
            for (slot, material) in &materials {
                let (header, material, secret, slot) =
                    (header.clone(), material.clone(), secret.clone(), *slot);
                let opened =
                    offload(&**how.offload, move || header.open_slot(slot, &material, &secret)).await?;
                if let Some(key) = opened {
                    return Ok((key, slot));
                }
            }
        }
        Err(opens_nothing(&**storage, how.secrets, materials.len()))
    }

    /// The cipher of the data, if one of the secrets opens it.
    ///
    /// # Errors
    /// `Unsupported` without a secret, and for a mode that the caller does not let through; `Invalid` for wrong secrets;
    /// those of the header and the storage.
    pub(crate) async fn unlock(
        &self,
        storage: &SharedStorage,
        how: &Unlock<'_>,
    ) -> Result<Arc<SectorCipher>> {
        let header = self.header(&**storage).await?;
        let mode = header.mode();
        refuse_weak(&**storage, mode, how.may_be_weak)?;
        let (key, _) = self.open(&header, storage, how).await?;
        SectorCipher::new(mode, &key).map(Arc::new)
    }
}

/// Refuses to open an encrypted image where no secret was given.
pub(crate) fn refuse_without_secret(storage: &dyn Storage, kind: &str, secrets: &Secrets) -> Result<()> {
    match secrets.is_empty() {
        false => Ok(()),
        true => Err(Error::unsupported(format!(
            "{} is encrypted with {kind}: give the secret that opens it with `--secret id=NAME,file=FILE`",
            storage.name()
        ))),
    }
}

/// None of the secrets opens any of the slots that were tried.
pub(super) fn opens_nothing(storage: &dyn Storage, secrets: &Secrets, slots: usize) -> Error {
    let newline = match secrets.all().any(|secret| secret.ends_with_newline()) {
        true => "; a secret that was given ends with a line break, which counts (`printf` writes none)",
        false => "",
    };
    let why = match slots {
        0 => "it has no key slot in use, so nothing can open it".to_owned(),
        slots => format!("no secret that was given opens any of its {slots} key slots{newline}"),
    };
    Error::new(ErrorKind::Invalid, format!("{} is encrypted with LUKS: {why}", storage.name()))
}

/// Refuses an image in a mode that is only read, unless the caller copies or compares it.
pub(crate) fn refuse_weak(storage: &dyn Storage, mode: Mode, may_be_weak: bool) -> Result<()> {
    match mode.is_for_writing() || may_be_weak {
        true => Ok(()),
        false => Err(Error::unsupported(format!(
            "{} is encrypted with aes-{}, whose bits others can change unnoticed where they can write the file: it is read \
             by `vellum convert` only. Convert it with `vellum convert -O qcow2 -o encrypt.format=luks`",
            storage.name(),
            mode.name()
        ))),
    }
}
