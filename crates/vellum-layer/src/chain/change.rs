//! A chain whose disk becomes another one: it goes back to a snapshot, or gets another size.
//!
//! Both are done to a closed image. So the top image is closed, changed by what changes closed images, and opened again; the file
//! stays open and locked all the time, and those below stay as they are.
//!
//! 1. All that was answered is durable before it is closed. So when closing fails the image is opened again, which recovers it: all
//!    that was answered is there.
//! 2. Not so when a flush has failed: what the file has then nobody knows. The disk stays closed.
//! 3. That it could not be opened again is told at once, and when the chain is closed; the next change tries it first.

use std::path::PathBuf;

use vellum_core::{Context, Error, ErrorKind, Result, SharedStorage};
use vellum_format::FormatKind;
use vellum_format::native::{self, Superblocks};
use vellum_format::qcow2::{self, Header};

use super::{Chain, Found, How, open_disk};

impl Chain {
    /// The disk becomes what an internal snapshot has: its image is closed, changed and opened again, so the disk is another one
    /// then, also when this fails. Nobody may use it meanwhile.
    ///
    /// # Errors
    /// `Unsupported` when the top image is not of the native format, `NotFound` when there is no such snapshot, and what the image
    /// says. The disk can be used afterwards unless it is closed: that it could not be opened again is told, too.
    pub async fn revert(&mut self, wanted: &str) -> Result<()> {
        self.mend().await?;
        let top = &self.members[0];
        if top.native.is_none() {
            return Err(Error::unsupported(format!("{} is not of the native format", top.path.display())));
        }
        self.close_top().await?;
        let top = &self.members[0];
        let alone = native::OpenOptions { without_base: true, ..native::OpenOptions::default() };
        let reverted = native::snapshots::revert(top.storage.clone(), None, alone, wanted).await;
        self.open_top_again().await?;
        reverted
    }

    /// Gives the disk more bytes, which read as zero: its image is closed, changed and opened again, so the disk is another one
    /// then, also when this fails. Nobody may use it meanwhile. Gives the size before.
    ///
    /// # Errors
    /// `Invalid` for a smaller size, `ReadOnly` when the disk is not written, and why its image cannot have a larger disk. The disk
    /// can be used afterwards unless it is closed: that it could not be opened again is told, too.
    pub async fn grow(&mut self, size: u64) -> Result<u64> {
        self.mend().await?;
        let below = self.members.get(1).map(|member| member.disk.clone());
        let top = &self.members[0];
        let geometry = top.disk.geometry();
        let before = geometry.size;
        if geometry.read_only {
            let why = format!("{} is open for reading only", top.path.display());
            return Err(Error::new(ErrorKind::ReadOnly, why));
        }
        if size < before {
            return Err(Error::invalid(format!(
                "the disk has {before} bytes, and is not made smaller while it is served: what lies behind {size} would be lost"
            )));
        }
        // qcow2 has no word for how far an image below counts.
        if let Some(below) = below.filter(|_| top.header.is_some()) {
            let shows = below.geometry().size;
            if shows > before && size > before {
                return Err(Error::unsupported(format!(
                    "its backing image has {shows} bytes, more than the disk, and would show behind {before}"
                )));
            }
        }
        if size == before {
            // It may have come so far when it was tried before, without being durable: the file knows.
            top.storage.flush().await.context(|| format!("can't flush {}", top.path.display()))?;
            return Ok(before);
        }
        if top.format == FormatKind::Raw && top.storage.limits().fixed_len {
            // Before it is closed: opened again it would be as long as the device.
            look_at_device(&top.storage, size).await?;
        }
        self.close_top().await?;
        let top = &self.members[0];
        let grown = match top.format {
            FormatKind::Raw => grow_raw(&top.storage, size).await,
            FormatKind::Qcow2 => qcow2::grow(&top.storage, size).await.map(drop),
            FormatKind::Native => native::resize(&top.storage, size, false).await.map(drop),
        };
        self.open_top_again().await?;
        grown.map(|()| before)
    }

    /// Closes the top image. When that fails its disk can be used: as it was before, or opened again, unless that failed, too.
    async fn close_top(&mut self) -> Result<()> {
        let top = &self.members[0];
        // When this fails nothing has happened to the disk.
        top.disk.flush().await.context(|| format!("can't flush {}", top.path.display()))?;
        let closed = top.disk.close().await.context(|| format!("can't close {}", top.path.display()));
        if let Err(error) = &closed {
            self.gone = Some(error.clone());
            self.mend().await?;
        }
        closed
    }

    /// Opens the top image again, when it was left closed.
    async fn mend(&mut self) -> Result<()> {
        let Some(why) = self.gone.clone() else { return Ok(()) };
        let top = &self.members[0];
        for storage in
            [Some(&top.storage), top.data_file.as_ref().map(|(_, file)| file)].into_iter().flatten()
        {
            // It says so for ever when a flush of it has failed, whoever asked for that.
            storage.flush().await.context(|| why.chain())?;
        }
        self.open_top_again().await.context(|| why.chain())
    }

    /// Opens the top image, which was closed, over those below as they are.
    async fn open_top_again(&mut self) -> Result<()> {
        let opened = self.try_open_top().await;
        self.gone = opened.as_ref().err().cloned();
        opened
    }

    async fn try_open_top(&mut self) -> Result<()> {
        let below = self.members.get(1).map(|member| member.disk.clone());
        let top = &mut self.members[0];
        let context = || format!("can't open {} again", top.path.display());
        let mut image = Found {
            path: top.path.clone(),
            canonical: PathBuf::new(), // it was compared with the others when they were found
            format: top.format,
            storage: top.storage.clone(),
            header: None,
            superblock: None,
            data_file: top.data_file.clone(),
        };
        match top.format {
            FormatKind::Raw => {}
            FormatKind::Qcow2 => image.header = Some(Header::read(&*top.storage).await.context(context)?),
            FormatKind::Native => {
                image.superblock = Some(Superblocks::read(&*top.storage).await.context(context)?.superblock);
            }
        }
        let how = How {
            read_only: self.options.read_only,
            snapshot: self.options.snapshot.clone(),
            tally: &self.top_tally,
            mapping_share: self.mapping_share,
            options: &self.options,
        };
        let (disk, native) = open_disk(&image, below, how).await.context(context)?;
        if image.superblock.is_some() {
            // As it is now: opening may have changed it.
            image.superblock = Some(Superblocks::read(&*top.storage).await.context(context)?.superblock);
        }
        (top.header, top.superblock, top.disk, top.native) = (image.header, image.superblock, disk, native);
        Ok(())
    }
}

/// Whether somebody has made the device so long.
async fn look_at_device(storage: &SharedStorage, size: u64) -> Result<()> {
    match storage.look_at_len().await? {
        len if len == size => Ok(()),
        len => Err(Error::new(
            ErrorKind::NoSpace,
            format!("{} is a device of {len} bytes, and so is its disk", storage.name()),
        )),
    }
}

/// A longer file. A device is as long as it is.
async fn grow_raw(storage: &SharedStorage, size: u64) -> Result<()> {
    if storage.limits().fixed_len {
        return Ok(());
    }
    storage.set_len(size).await?;
    storage.flush().await
}
