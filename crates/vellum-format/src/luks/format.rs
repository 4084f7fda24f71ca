//! Raw LUKS images, as one of the formats: the disk is what the payload decrypts to, byte for byte.
//!
//! There is nothing of an image in it that a write could leave half done: a sector of the disk is one of the file, so
//! it comes out of a crash old or new, as that does. The key material is never written meanwhile.
//!
//! Version 1 is read and written, version 2 only read (`two.rs`).

use std::sync::Arc;

use vellum_core::{
    BlockSize, Buffer, Error, ErrorKind, ImageOffset, LocalFuture, Result, SharedStorage, Storage,
};
use vellum_luks::Header;
use vellum_luks::luks2::Header2;

use super::area::{KeyArea, Unlock};
use super::create::refuse_places;
use super::{Ciphered, facts, two};
use crate::image::{Fact, Files, Format, Growth, Head, OpenOptions, Opened, ready};
use crate::probe::FormatKind;
use crate::raw::{Raw, reserve_added};
use crate::report::{CheckReport, JournalChange, Repair};

/// LUKS, as one of the formats.
pub(crate) struct LuksFormat;

/// The header of a raw image, and how long the disk is.
struct LuksHead {
    header: AnyHeader,
    area: KeyArea,
    size: u64,
}

enum AnyHeader {
    One(Box<Header>),
    Two(Box<Header2>),
}

async fn head(image: &dyn Storage) -> Result<LuksHead> {
    let area = KeyArea::of_raw(image);
    let first = image.read(ImageOffset::ZERO, Buffer::for_overwrite(8)).await?;
    if !first.slice().starts_with(b"LUKS\xBA\xBE\0\x01") {
        let header = two::header(image).await?;
        let size = two::size(&header, image)?;
        return Ok(LuksHead { header: AnyHeader::Two(Box::new(header)), area, size });
    }
    let header = area.header(image).await?;
    let size = BlockSize::SECTOR.round_down(two::behind(image, header.payload())?);
    Ok(LuksHead { header: AnyHeader::One(Box::new(header)), area, size })
}

/// Bytes before the disk, and the bytes that it has, of an image whose disk can become longer or shorter.
async fn to_resize(image: &dyn Storage) -> Result<(u64, u64)> {
    let why = match head(image).await? {
        LuksHead { header: AnyHeader::One(header), size, .. } if header.mode().is_for_writing() => {
            return Ok((header.payload(), size));
        }
        LuksHead { header: AnyHeader::One(header), .. } => format!("in aes-{}", header.mode().name()),
        LuksHead { header: AnyHeader::Two(_), .. } => "with LUKS version 2".to_owned(),
    };
    Err(Error::unsupported(format!(
        "{} is encrypted {why}, which is only read: copy it with `vellum convert -O luks`, and resize the copy",
        image.name()
    )))
}

fn file_len(payload: u64, size: u64) -> Result<u64> {
    let end = payload.checked_add(size).filter(|end| i64::try_from(*end).is_ok());
    end.ok_or_else(|| Error::invalid("the size is too large"))
}

impl Format for LuksFormat {
    fn kind(&self) -> FormatKind {
        FormatKind::Luks
    }

    fn versions(&self) -> &'static [u32] {
        &[1]
    }

    fn read<'a>(&'a self, image: &'a dyn Storage) -> LocalFuture<'a, Result<Box<dyn Head>>> {
        Box::pin(async move { Ok(Box::new(head(image).await?) as Box<dyn Head>) })
    }

    fn check<'a>(
        &'a self,
        _image: &'a SharedStorage,
        _repair: Repair,
        _say: &'a mut dyn FnMut(String),
    ) -> LocalFuture<'a, Result<Option<CheckReport>>> {
        ready(Ok(None))
    }

    fn finish<'a>(&'a self, image: &'a SharedStorage) -> LocalFuture<'a, Result<u64>> {
        Box::pin(async move { Ok(head(&**image).await?.size) })
    }

    fn resize<'a>(
        &'a self,
        image: &'a SharedStorage,
        size: u64,
        may_shrink: bool,
    ) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move {
            let (payload, before) = to_resize(&**image).await?;
            if size < before && !may_shrink {
                return Err(Error::invalid(format!(
                    "the disk has {before} bytes, and data beyond {size} would be lost: use --shrink"
                )));
            }
            let len = file_len(payload, size)?;
            // The length of a device is fixed.
            if image.len() != len {
                image.set_len(len).await?;
            }
            image.flush().await // commit point: the length of the file is that of the disk
        })
    }

    fn grow_with<'a>(
        &'a self,
        image: &'a SharedStorage,
        size: u64,
        growth: &'a Growth,
    ) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move {
            refuse_places(growth.reserve)?;
            let (payload, before) = to_resize(&**image).await?;
            let (old, new) = (file_len(payload, before)?, file_len(payload, size)?);
            self.resize(image, size, false).await?;
            reserve_added(&**image, old, new, growth.reserve).await
        })
    }

    /// The length of a device cannot be set.
    fn grow<'a>(&'a self, image: &'a SharedStorage, size: u64) -> LocalFuture<'a, Result<()>> {
        match image.limits().fixed_len {
            true => ready(Ok(())),
            false => self.resize(image, size, false),
        }
    }

    /// Whether a device has been extended to exactly the length that the disk needs.
    fn may_grow<'a>(&'a self, image: &'a SharedStorage, size: u64) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move {
            let (payload, _) = to_resize(&**image).await?;
            let wanted = file_len(payload, size)?;
            if !image.limits().fixed_len {
                return Ok(());
            }
            match image.look_at_len().await? {
                len if len == wanted => Ok(()),
                len => Err(Error::new(
                    ErrorKind::NoSpace,
                    format!("{} is a device of {len} bytes, and the image needs {wanted}", image.name()),
                )),
            }
        })
    }

    fn set_journal<'a>(
        &'a self,
        _image: &'a SharedStorage,
        name: &'a str,
        _setting: Option<Option<u64>>,
    ) -> LocalFuture<'a, Result<JournalChange>> {
        ready(Err(Error::unsupported(format!("{name} is a luks image, which cannot have a journal"))))
    }
}

impl Head for LuksHead {
    fn kind(&self) -> FormatKind {
        FormatKind::Luks
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn knows_whether_closed(&self) -> bool {
        false
    }

    fn is_encrypted(&self) -> bool {
        true
    }

    fn key_area(&self) -> Option<KeyArea> {
        Some(self.area)
    }

    fn facts<'a>(&'a self, _image: &'a dyn Storage) -> LocalFuture<'a, Result<Vec<(&'static str, Fact)>>> {
        ready(Ok(match &self.header {
            AnyHeader::One(header) => facts(header),
            AnyHeader::Two(header) => two::facts(header),
        }))
    }

    fn open<'a>(&'a self, files: Files, options: OpenOptions) -> LocalFuture<'a, Result<Opened>> {
        Box::pin(async move {
            if options.snapshot.is_some() {
                return Err(Error::new(ErrorKind::NotFound, "a luks image has no snapshots"));
            }
            let unlock = Unlock {
                secrets: &options.secrets,
                may_be_weak: options.may_be_weak && options.read_only,
                offload: &options.offload,
            };
            let data = match &self.header {
                AnyHeader::One(header) => {
                    let cipher = self.area.unlock(&files.image, &unlock).await?;
                    Ciphered::behind(header.payload(), files.image, cipher, options.offload)
                }
                AnyHeader::Two(header) => {
                    if !options.read_only {
                        return Err(Error::unsupported(format!(
                            "{} is encrypted with LUKS version 2, which is only read: open it read-only, or copy it with \
                             `vellum convert -O qcow2 -o encrypt.format=luks`",
                            files.image.name()
                        )));
                    }
                    let cipher = two::unlock(header, &files.image, &unlock).await?;
                    let at = header.segment().at;
                    Ciphered::behind(at, files.image, cipher, options.offload).ending_at(self.size)
                }
            };
            let disk = Raw::open(Arc::new(data), options.read_only, &options.tally);
            Ok(Opened {
                disk,
                snapshots: None,
                compressing: None,
                detaching: None,
                sessions: None,
                bitmaps: None,
                views: None,
                tier: None,
                zeros: None,
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use futures_lite::future::block_on;
    use vellum_core::contract::{self, StorageFixture};
    use vellum_core::{Inline, MemoryStorage, Random, Zeroes};
    use vellum_luks::{Hash, Mode, NewHeader, SectorCipher};

    use super::*;

    /// Makes storages behind a cipher.
    struct Fixture {
        last: std::cell::RefCell<Option<(SharedStorage, Arc<SectorCipher>, u64)>>,
    }

    fn over(inner: &SharedStorage, cipher: &Arc<SectorCipher>, len: u64) -> SharedStorage {
        Arc::new(Ciphered::behind(8192, inner.clone(), cipher.clone(), Arc::new(Inline)).ending_at(len))
    }

    impl StorageFixture for Fixture {
        fn fresh(&self, len: u64) -> LocalFuture<'_, Result<SharedStorage>> {
            Box::pin(async move {
                let inner: SharedStorage = MemoryStorage::new("inner");
                inner.set_len(8192 + BlockSize::SECTOR.round_up(len)).await?;
                let mut random = Random::from_seed(len);
                let mut chance = |bytes: &mut [u8]| {
                    bytes.fill_with(|| u8::try_from(random.below(256)).expect("a byte"));
                    Ok(())
                };
                let mode = Mode::named("xts-plain64")?;
                let new = NewHeader { mode, key_len: 64, hash: Hash::Sha256, digest_iterations: 1000 };
                let cipher = Arc::new(SectorCipher::new(mode, &new.make(&mut chance)?.1)?);
                let storage = over(&inner, &cipher, len);
                storage.write_zeroes(ImageOffset::ZERO.span(len), Zeroes::Allocated).await?;
                *self.last.borrow_mut() = Some((inner, cipher, len));
                Ok(storage)
            })
        }

        fn reopen(&self) -> LocalFuture<'_, Result<SharedStorage>> {
            let last = self.last.borrow();
            let (inner, cipher, len) = last.as_ref().expect("one was made");
            ready(Ok(over(inner, cipher, *len)))
        }
    }

    #[test]
    fn what_is_behind_a_cipher_is_a_storage() {
        block_on(contract::storage(&Fixture { last: Default::default() }));
    }
}
