//! A chain whose disk is replaced: it is restored from a snapshot, or gets another size.
//!
//! Both are operations on a closed image. So the top image is closed, changed as any closed image is, and
//! opened again; the file stays open and locked all the time, and the images below stay open.
//!
//! 1. Every answered write is durable before the image is closed. So when closing fails the image is opened
//!    again, which recovers it with every answered write.
//! 2. This does not hold after a failed flush: the content of the file is unknown then. The disk stays
//!    closed.
//! 3. Opening is tried twice before the disk counts as gone: an error need not be permanent. The failure to
//!    open is reported at once, and again when the chain is closed; the next change tries to open it first.
//! 4. A change that was interrupted is finished by that opening, or has not happened: the disk is in one of
//!    the two states.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use vellum_core::pin::Pin;
use vellum_core::{Context, Error, ErrorKind, Result, SharedStorage};
use vellum_format::FormatKind;
use vellum_format::image::{ClosedSnapshots, Growth};

use crate::hydrate::is_whole;

use super::below::Stand;
use super::flash::{TablesState, over_tables};
use super::pins::FoundBelow;
use super::taps::over;
use super::{Chain, How, files_of, mapping_need, open_disk, top_share};

impl Chain {
    /// Restores the disk from an internal snapshot. The image is closed, changed and opened again, so the
    /// disk is another one afterwards, even on failure. The disk must not be in use meanwhile.
    ///
    /// # Errors
    /// `Unsupported` when the top image keeps no snapshots, `ReadOnly` when the disk is read-only, `NotFound` when there is no such
    /// snapshot, and the errors of the image. The disk can be used afterwards unless it is closed; the error
    /// also says that it could not be opened again.
    pub async fn revert(&mut self, wanted: &str) -> Result<()> {
        self.mend().await?;
        let top = &self.top;
        if top.opened.snapshots.is_none() && top.head.kind().format().closed_snapshots().is_none() {
            return Err(Error::unsupported(format!("{} keeps no snapshots", top.path.display())));
        }
        self.refuse_read_only()?;
        self.close_top().await?;
        let top = &self.top;
        let reverted = top.head.kind().format().revert(&top.storage, wanted).await;
        self.open_top_again().await?;
        reverted
    }

    /// Changes the snapshots of the top image, of a format that does that with closed images. The image is closed, changed
    /// and opened again, so the disk is another one afterwards, even on failure; it reads the same. It must not be in use
    /// meanwhile.
    ///
    /// # Errors
    /// `Unsupported` for other formats, `ReadOnly` when the disk is read-only, and the errors of the image. The disk can be
    /// used afterwards unless it is closed; the error also says that it could not be opened again.
    pub async fn change_snapshots<T>(
        &mut self,
        change: impl AsyncFnOnce(&'static dyn ClosedSnapshots, &SharedStorage) -> Result<T>,
    ) -> Result<T> {
        self.mend().await?;
        let top = &self.top;
        let closed = top.head.kind().format().closed_snapshots().ok_or_else(|| {
            Error::unsupported(format!("{}: its snapshots are changed while it is open", top.path.display()))
        })?;
        self.refuse_read_only()?;
        self.close_top().await?;
        let changed = change(closed, &self.top.storage).await;
        self.open_top_again().await?;
        changed
    }

    fn refuse_read_only(&self) -> Result<()> {
        match self.top.opened.disk.geometry().read_only {
            true => {
                Err(Error::new(ErrorKind::ReadOnly, format!("{} is open read-only", self.top.path.display())))
            }
            false => Ok(()),
        }
    }

    /// Enlarges the disk by bytes that read as zero. The image is closed, changed and opened again, so the
    /// disk is another one afterwards, even on failure. The disk must not be in use meanwhile. Returns the
    /// previous size.
    ///
    /// # Errors
    /// `Invalid` for a smaller size, `ReadOnly` when the disk is read-only, and the reason why its image
    /// cannot have a larger disk. The disk can be used afterwards unless it is closed; the error also says
    /// that it could not be opened again.
    pub async fn grow(&mut self, size: u64) -> Result<u64> {
        self.mend().await?;
        let below = self.below.as_ref().map(|below| below.disk().clone());
        let top = &self.top;
        let geometry = top.opened.disk.geometry();
        let before = geometry.size;
        if geometry.read_only {
            let why = format!("{} is open read-only", top.path.display());
            return Err(Error::new(ErrorKind::ReadOnly, why));
        }
        if size < before {
            return Err(Error::invalid(format!(
                "the disk has {before} bytes and cannot be shrunk while it is served: data beyond {size} would be \
                 lost"
            )));
        }
        if let Some(below) = below.filter(|_| top.head.shows_all_below()) {
            let shows = below.geometry().size;
            if shows > before && size > before {
                return Err(Error::unsupported(format!(
                    "its backing image ({shows} bytes) is larger than the disk, and its data would appear beyond \
                     {before}"
                )));
            }
        }
        if size == before {
            // An earlier attempt may have come this far without being durable: the file knows.
            top.storage.flush().await.context(|| format!("can't flush {}", top.path.display()))?;
            return Ok(before);
        }
        let format = top.head.kind().format();
        format.may_grow(&top.storage, size).await?;
        self.close_top().await?;
        let top = &self.top;
        let grown = match top.head.is_encrypted() && top.head.kind() == FormatKind::Qcow2 {
            // What its last cluster has behind the old end may have to become zero.
            true => {
                let (secrets, offload) = (self.options.secrets.clone(), self.options.offload.clone());
                let growth = Growth { secrets, offload, ..Growth::default() };
                format.grow_with(&top.storage, size, &growth).await
            }
            false => format.grow(&top.storage, size).await,
        };
        self.open_top_again().await?;
        grown.map(|()| before)
    }

    /// Records in the image what proves those below, before the first byte of them is copied into it. From then on the
    /// image is refused over others. Where that was not recorded yet the image is closed, changed and opened again, so
    /// the disk is another one afterwards, even on failure. The disk must not be in use meanwhile.
    ///
    /// # Errors
    /// `Changed` when the images below are not those that it records, `Refused` when one proves nothing, `Unsupported`
    /// when the image has no place for it, and the errors of the image. The disk can be used afterwards unless it is
    /// closed; the error also says that it could not be opened again.
    pub async fn pin_below(&mut self) -> Result<()> {
        self.mend().await?;
        self.options.pin_base = true;
        let Some(pin) = self.pin_to_record()? else { return Ok(()) };
        self.close_top().await?;
        let top = &self.top;
        let pinned = top.head.kind().format().set_pin(&top.storage, &pin).await;
        self.open_top_again().await?;
        pinned
    }

    /// What the image is to record of those below before bytes of them are copied; `None` if it does, or stands alone.
    ///
    /// # Errors
    /// As for [`pin_below`](Self::pin_below).
    pub fn pin_to_record(&self) -> Result<Option<Pin>> {
        let Some(below) = &self.below else { return Ok(None) };
        let found = FoundBelow::of(below.members().iter());
        found.hold_against(self.top.head.pin(), self.options.trust_base, true)
    }

    /// What takes long of [`detach`](Self::detach): makes sure that the image has everything that those below have, and
    /// makes it ready to stand alone. The disk may be in use meanwhile, and is the same before and after. `stop` is asked
    /// between two steps.
    ///
    /// # Errors
    /// `Unsupported` when the image has snapshots, which also read from below; `Invalid` when it lacks something; `Changed` when
    /// a file below has changed since it was opened; `Closed` when it was stopped; and the errors of the image.
    pub async fn prepare_detach(&mut self, stop: &dyn Fn() -> bool) -> Result<()> {
        self.mend().await?;
        if self.below.is_none() {
            return Ok(());
        }
        if self.has_snapshots().await? {
            return Err(Error::unsupported(format!(
                "{} has snapshots, which also read from its backing image: delete them first",
                self.top.path.display()
            )));
        }
        self.is_whole = false;
        let detaching = self.top.opened.detaching.clone();
        let mark = detaching.as_ref().map_or(0, |detaching| detaching.mark());
        let is_whole = match &self.tap {
            Some(tap) => is_whole(self.disk(), tap, stop).await?,
            None => false,
        };
        if !is_whole {
            return Err(Error::invalid(format!(
                "{} does not have everything that its backing image has: it is not detached",
                self.top.path.display()
            )));
        }
        // What the maps called zero was asked before. From here on nothing of the images below counts any more.
        self.base_files
            .check()
            .await
            .context(|| format!("{} is not detached from the images below it", self.top.path.display()))?;
        if let Some(detaching) = detaching {
            detaching
                .prepare(mark, stop)
                .await
                .context(|| format!("{} cannot be made ready to stand alone", self.top.path.display()))?;
        }
        self.is_whole = true;
        Ok(())
    }

    /// Whether the disk can be detached without any further work: it has been prepared, and nothing has happened since that
    /// would need more.
    pub fn can_be_detached(&self) -> bool {
        self.is_whole && self.top.opened.detaching.as_ref().is_none_or(|detaching| detaching.is_prepared())
    }

    /// Makes the image independent of those below, which are closed unless other disks stand on them. The image is
    /// closed, its header is changed, and it is opened again, so the disk is another one afterwards, even on failure. It
    /// must not be in use meanwhile. What takes long is done before ([`prepare_detach`](Self::prepare_detach)), or else now.
    ///
    /// # Errors
    /// As for preparing it. The disk can be used afterwards unless it is closed; the error also says that it could not be
    /// opened again.
    pub async fn detach(&mut self, stop: &AtomicBool) -> Result<()> {
        self.mend().await?;
        if self.below.is_none() {
            return Ok(());
        }
        // What only the cache has would undo what was prepared.
        self.drain().await?;
        if !self.can_be_detached() {
            self.prepare_detach(&|| stop.load(Ordering::Relaxed)).await?;
        }
        self.close_top().await?;
        let top = &self.top;
        let detached = top.head.kind().format().detach(&top.storage, true, stop).await;
        self.open_top_again().await?;
        detached
    }

    /// Whether the top image has internal snapshots.
    ///
    /// # Errors
    /// Those of the image.
    pub async fn has_snapshots(&self) -> Result<bool> {
        let top = &self.top;
        match &top.opened.snapshots {
            Some(snapshots) => match snapshots.list() {
                // A layout without snapshots.
                Err(error) if error.kind() == ErrorKind::Unsupported => Ok(false),
                listed => Ok(!listed?.is_empty()),
            },
            None => Ok(!top.head.snapshots(&top.storage, Some(&top.storage)).await?.is_empty()),
        }
    }

    /// Whether the image is known to have snapshots without being asked: one that is open knows its own.
    pub fn has_known_snapshots(&self) -> bool {
        let snapshots = self.top.opened.snapshots.as_ref();
        snapshots.and_then(|snapshots| snapshots.list().ok()).is_some_and(|listed| !listed.is_empty())
    }

    /// Closes the top image. If that fails its disk can still be used: as it was before, or opened again,
    /// unless that failed too.
    pub(super) async fn close_top(&mut self) -> Result<()> {
        let top = &self.top;
        // When this fails nothing has happened to the disk.
        top.disk().flush().await.context(|| format!("can't flush {}", top.path.display()))?;
        // The cache writes home what only it has.
        let closed = top.close_disk().await;
        // The image is about to be changed.
        top.leave_cache(false).await;
        if let Err(error) = &closed {
            self.gone = Some(error.clone());
            self.mend().await?;
        }
        closed
    }

    /// Opens the top image again, when it was left closed.
    pub(super) async fn mend(&mut self) -> Result<()> {
        let Some(why) = self.gone.clone() else { return Ok(()) };
        self.flush_top().await.context(|| why.chain())?;
        self.open_top_again().await.context(|| why.chain())
    }

    /// Flushes the files of the top image. They report a failed flush forever, whichever request it belonged
    /// to.
    async fn flush_top(&self) -> Result<()> {
        let top = &self.top;
        let data_file = top.data_file.as_ref().map(|(_, file)| file);
        for storage in [Some(&top.storage), data_file].into_iter().flatten() {
            storage.flush().await?;
        }
        Ok(())
    }

    /// Opens the top image, which was closed, over those below as they are.
    pub(super) async fn open_top_again(&mut self) -> Result<()> {
        self.is_whole = false;
        let mut opened = self.try_open_top().await;
        if opened.is_err() && self.flush_top().await.is_ok() {
            opened = self.try_open_top().await;
        }
        self.gone = opened.as_ref().err().cloned();
        opened
    }

    async fn try_open_top(&mut self) -> Result<()> {
        let path = self.top.path.display().to_string();
        let context = || format!("can't reopen {path}");
        let head = self.top.head.kind().format().read(&*self.top.storage).await.context(context)?;
        // After it was detached: the image says whether it has been.
        if head.backing().is_none()
            && let Some(below) = self.below.take()
        {
            self.tap = None;
            self.base_files = Arc::default();
            // They were only read.
            let _ = below.leave().await;
        }
        let below = over(self.below.as_ref(), self.tap.as_ref());
        let top = &mut self.top;
        // It may be larger than it was.
        self.top_need = mapping_need(&*head, &top.storage, self.options.read_only);
        let tables =
            over_tables(&self.options, &*head, &top.storage, self.flash_id.as_ref(), TablesState::Reopened);
        let tables = tables.await.context(context)?;
        let how = How {
            tables: tables.as_ref(),
            read_only: self.options.read_only,
            snapshot: self.options.snapshot.clone(),
            tally: &self.top_tally,
            mapping_share: top_share(self.top_need, self.below.as_ref(), &self.options),
            fills: self.below.as_ref().and_then(Stand::fills),
            options: &self.options,
        };
        let files = files_of(&top.storage, top.data_file.as_ref(), below);
        let opened = open_disk(&*head, files, &top.parts, how).await.context(context)?;
        (top.head, top.opened, top.flash, top.tables) = (head, opened, None, tables);
        if let Err(error) =
            top.put_under_flash(&self.options, self.flash_id.as_ref(), TablesState::Reopened).await
        {
            drop(top.opened.disk.close().await);
            return Err(error.context(context()));
        }
        if let Some(tap) = &self.tap {
            tap.is_below(&*top.opened.disk);
        }
        self.tell_flash();
        Ok(())
    }
}
