//! The steps of a migration, on a disk that is served.
//!
//! ```text
//!   requests wait ► flush ► close ► the header changes, durably ► open again, writable or not ► requests continue
//! ```
//!
//! 1. The order of the steps, and what each writes, is that of `vellum-layer/migrate.rs`.
//! 2. The file is locked for writing while its header changes. Between closing it and that another program may take
//!    it: then the step fails, and the disk is opened again as it was.
//! 3. A disk whose image must not be written refuses changes (the source) or holds them (the target, until it
//!    accepts). The target can be written from the first moment, as its front ends see it; the source has become
//!    read-only.
//! 4. A step that is repeated writes and flushes the mark again. It may be repeated on a disk that could not be opened after
//!    it: what the header says counts then.
//! 5. The target takes over only from a source whose server says that its disk has moved in the same migration, and that
//!    nothing else has taken it over.
//! 6. A server that reads a snapshot of an image says nothing of the migration of its disk, and takes no step.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use vellum_core::pin::{Proof, ProofKind};
use vellum_core::{Disk as _, Error, ErrorKind, Result, SharedDisk, SharedStorage, lock};
use vellum_export::nbd::Exports;
use vellum_export::nbd::wire::info;
use vellum_format::FormatKind;
use vellum_format::handover::{Handover, MoveNumber, may_change};
use vellum_io::{clock, unblock_at};
use vellum_layer::barred::Barred;
use vellum_layer::{Chain, Gate, migrate};

use super::steer::Held;
use super::{How, Served, Step};
use crate::image::{ImageOptions, open_file, open_over};

/// What became of a step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HandedOver {
    /// What the image says now.
    pub(crate) handover: Option<Handover>,
    /// How long its requests waited.
    pub(crate) held: Duration,
}

/// The disk as its front ends see it, if a migration forbids to write its image.
pub(super) fn barred(chain: &Chain, disk: SharedDisk, is_barred: bool) -> SharedDisk {
    if !is_barred {
        return disk;
    }
    let top = chain.top();
    let path = top.path.display().to_string();
    let handover = top.head.handover();
    // Targets can be written from the first moment, as their front ends see it.
    let is_target = matches!(handover, Some(Handover::Awaiting(_) | Handover::Arrived(_)));
    let why = may_change(&path, handover).err().unwrap_or_else(|| {
        // Its header allows writing, so the mark is one whose flush failed.
        let why = match is_target {
            true => "it has taken over its disk, and this may not be durable: repeat `vellum migrate run`",
            false => "its disk was taken back, and this may not be durable: repeat `vellum migrate abort`",
        };
        Error::new(ErrorKind::Refused, format!("{path}: {why}"))
    });
    Barred::over(disk, why, !is_target)
}

/// As [`open_chain`]. The error names the image, not only one below it.
pub(super) async fn open_named(how: &How, path: &Path, image: ImageOptions) -> Result<Chain> {
    open_chain(how, path, image).await.map_err(|error| {
        let name = path.display().to_string();
        if error.chain().contains(&name) { error } else { error.context(format!("can't open {name}")) }
    })
}

/// Opens an image to be served. The target of a migration is served at once, and written later; its source stays
/// served, and is only read.
async fn open_chain(how: &How, path: &Path, image: ImageOptions) -> Result<Chain> {
    let error = match open_over(Some(&how.templates), path, &image).await {
        Err(error) if error.kind() == ErrorKind::Refused && !image.read_only => error,
        opened => return opened,
    };
    let image = ImageOptions { read_only: true, ..image };
    let Ok(chain) = open_over(Some(&how.templates), path, &image).await else { return Err(error) };
    match chain.top().head.handover() {
        Some(Handover::Awaiting(_)) if !how.is_steered => {
            let why =
                "it is the target of a migration, and its writes would wait forever: serve it with --control";
            Err(error.context(why))
        }
        Some(Handover::Awaiting(_)) => Ok(chain),
        Some(Handover::Void(_)) if how.is_steered => {
            tracing::warn!("{}: it is served so that this can be finished", error.chain());
            Ok(chain)
        }
        Some(Handover::Moved(number) | Handover::Gone(number)) => {
            let path = path.display();
            tracing::warn!("{path} has moved (migration {number}): it is served, and refuses every change");
            Ok(chain)
        }
        _ => Err(error),
    }
}

/// Whether the target of a migration waits for its disk.
pub(super) fn is_awaiting(chain: &Chain) -> bool {
    matches!(chain.top().head.handover(), Some(Handover::Awaiting(_)))
}

/// The remark for clients of an image that says this: that its disk has moved. The target knows its base by that.
pub(super) fn remark(handover: Option<Handover>, image: &ImageOptions) -> String {
    match handover {
        // What it has of the disk is older.
        _ if image.snapshot.is_some() => String::new(),
        Some(Handover::Moved(number)) => format!("{}{number}", info::MOVED),
        Some(Handover::Gone(number)) => format!("{}{number}", info::GONE),
        _ => String::new(),
    }
}

/// The image below the top one.
fn path_below(chain: &Chain) -> Option<PathBuf> {
    chain.members().nth(1).map(|member| member.path.clone())
}

/// Whether a migration forbids to write it.
pub(super) fn is_read_only(chain: &Chain) -> bool {
    chain.top().head.handover().is_some_and(|handover| !handover.allows_writing())
}

impl Served {
    /// How its image is opened now: as the user wants, unless a migration forbids to write it.
    pub(super) fn image_options(&self) -> ImageOptions {
        let read_only = self.image.read_only || self.is_barred();
        ImageOptions { read_only, ..self.image.clone() }
    }

    /// Whether the user wants it writable, and a migration forbids that.
    pub(super) fn is_barred(&self) -> bool {
        self.is_barred.load(Ordering::Acquire)
    }

    /// What its image records of a migration.
    ///
    /// # Errors
    /// Those of reading its header, where it is not open.
    pub(crate) async fn handover(&self) -> Result<Option<Handover>> {
        let chain = self.chain.read().await;
        match &*chain {
            Some(chain) => Ok(chain.top().head.handover()),
            // A step may have closed it: what the header says is how far that was.
            None => self.read_handover().await,
        }
    }

    /// Whether changes of it are carried out.
    pub(crate) async fn is_written_now(&self) -> bool {
        self.chain.read().await.is_some() && !self.is_barred() && !self.image.read_only
    }

    /// Shows a challenge to clients that connect from now on, until the next step.
    ///
    /// # Errors
    /// `Refused` where a snapshot of the image is served.
    pub(crate) fn ask_for(&self, challenge: MoveNumber, exports: &Exports) -> Result<()> {
        self.is_its_disk()?;
        let remark = {
            let mut remark = lock(&self.remark);
            let what_it_says = remark.rsplit("; ").next().filter(|text| !text.starts_with(info::ASKED));
            let what_it_says = what_it_says.unwrap_or_default().to_owned();
            let between = if what_it_says.is_empty() { "" } else { "; " };
            *remark = format!("{}{challenge}{between}{what_it_says}", info::ASKED);
            remark.clone()
        };
        self.names().iter().try_for_each(|name| exports.set_remark(name, &remark))
    }

    /// Whether the export that it reads from shows this challenge; `None` if it reads from nothing.
    ///
    /// # Errors
    /// Those of connecting to it.
    pub(crate) async fn looks_for(&self, challenge: MoveNumber) -> Result<Option<bool>> {
        let below = match &*self.chain.read().await {
            Some(chain) => path_below(chain),
            // A step may have closed it.
            None => self.path_in_header().await?,
        };
        let Some(below) = below else { return Ok(None) };
        let source = self.source_at(&below).await?;
        Ok(Some(source.description().contains(&format!("{}{challenge}", info::ASKED))))
    }

    fn is_its_disk(&self) -> Result<()> {
        let Some(snapshot) = &self.image.snapshot else { return Ok(()) };
        let path = self.path.display();
        let why = format!(
            "the snapshot {snapshot} of {path} is served, and not its disk: serve it without --load-snapshot to migrate it"
        );
        Err(Error::new(ErrorKind::Refused, why))
    }

    /// Gives its exports the remark for clients that connect from now on.
    pub(crate) fn tell(&self, exports: &Exports) -> Result<()> {
        let remark = lock(&self.remark).clone();
        self.names().iter().try_for_each(|name| exports.set_remark(name, &remark))
    }

    /// Takes a step of the migration with this number. A step that was taken before is taken again: the mark may be
    /// one that a server has written and not flushed before it was killed.
    ///
    /// # Errors
    /// `Refused` if the image is not in the state for it; the errors of the image. The disk is then served as before
    /// unless the error says that it could not be opened again.
    pub(crate) async fn hand_over(
        self: &Arc<Self>,
        step: migrate::Step,
        number: MoveNumber,
    ) -> Result<HandedOver> {
        self.is_its_disk()?;
        let path = self.path.display().to_string();
        let _step = self.begin(Step::HandOver)?;
        let mut chain = self.alone_or_closed().await?;
        let before = match chain.as_ref() {
            Some(open) => open.top().head.handover(),
            None if step == migrate::Step::Fix => return Err(self.is_closed()),
            None => self.read_handover().await?,
        };
        self.may_hand_over(step, before, chain.is_some())?;
        step.check(before, number).map_err(|error| error.context(path.clone()))?;
        let Some((_, after)) = step.writes(number) else {
            return Ok(HandedOver { handover: before, held: Duration::ZERO });
        };
        if step == migrate::Step::Accept && matches!(before, Some(Handover::Awaiting(_))) {
            self.source_has_moved(chain.as_ref(), number).await?;
        }
        self.is_the_same_file(chain.as_ref()).await?;
        let began = clock().now();
        // It reads the images below, which are closed.
        let held = match self.hydrate_no_more_in_time().await {
            Ok(()) => self.hold_flushed(chain.as_ref()).await,
            Err(error) => Err(error),
        };
        let held = match held {
            Ok(held) => held,
            Err(error) => {
                chain.iter().for_each(Chain::resume_forks);
                self.begin_hydrating();
                return Err(error);
            }
        };
        let closed = match chain.as_ref() {
            Some(open) => open.close().await,
            None => Ok(()),
        };
        if closed.is_err() && !self.how.is_durable && self.disk_is_written() {
            self.valve.lose(&held.hold);
            self.reconnects.lost();
        }
        self.tend_no_more().await;
        let released = self.release_files(&held.hold, &mut chain).await;
        let changed = match closed.and(released) {
            Ok(()) => {
                // Clones of its snapshots, in this server, hold the file as well.
                let forks = self.how.templates.hold(&self.canonical).await;
                let changed = self.change_handover(after).await;
                drop(forks);
                changed
            }
            failed => failed,
        };
        // What the header says now decides what passes. A disk whose mark may not be durable is not written: the step
        // is to be taken again.
        let says = self.read_handover().await.unwrap_or(before);
        let is_doubtful = changed.is_err() && matches!(step, migrate::Step::Accept | migrate::Step::Restore);
        let forbids = is_doubtful || says.is_some_and(|handover| !handover.allows_writing());
        self.is_barred.store(forbids && !self.image.read_only, Ordering::Release);
        let opened = self.open_again(&held.hold, &mut chain).await;
        if opened.is_ok() && self.is_barred() {
            // Otherwise the disk attaches them.
            self.forks_read_file().await;
        }
        // Writes that wait for the target wait on where it has taken over and could not be opened.
        let waits = match says {
            Some(Handover::Awaiting(_)) => self.is_barred(),
            Some(Handover::Arrived(_)) => self.is_barred() || opened.is_err(),
            _ => false,
        };
        self.valve.bar(waits);
        *lock(&self.remark) = remark(says, &self.image);
        // It is open, or closed: nothing is half done.
        held.finish();
        let waited = clock().now().saturating_sub(began);
        changed?;
        match opened {
            // A target that is given up needs nothing of its source, nor to be open.
            Err(error) if step == migrate::Step::Void => {
                tracing::warn!("{path} could not be opened again after it was given up: {}", error.chain());
            }
            opened => opened?,
        }
        if let Some(open) = chain.as_ref().filter(|_| step == migrate::Step::Accept) {
            self.hydrate_as_said(&self.hydration_said, open.top().head.wish())?;
        }
        tracing::warn!("{path}: migration {number}: {}", after.map_or("taken back", Handover::word));
        Ok(HandedOver { handover: after, held: waited })
    }

    /// Whether this server can take the step on an image in this state.
    fn may_hand_over(&self, step: migrate::Step, now: Option<Handover>, is_open: bool) -> Result<()> {
        let path = self.path.display();
        let is_broken = || self.disk.is_broken() || self.life().is_cut_off() || self.record.is_poisoned();
        // What a disk lost that is closed was reported when it was closed.
        if is_open && is_broken() {
            let why =
                format!("{path} has failed and may have lost writes: `vellum export reopen` recovers it");
            return Err(Error::new(ErrorKind::Poisoned, why));
        }
        let begins_or_ends_writing = match step {
            migrate::Step::Accept => true,
            migrate::Step::Fix => now.is_none_or(Handover::allows_writing),
            migrate::Step::Void | migrate::Step::Restore | migrate::Step::Seal | migrate::Step::Done => false,
        };
        if begins_or_ends_writing && self.image.read_only {
            let why = format!("{path} is served read-only: a disk that migrates is served writable");
            return Err(Error::new(ErrorKind::ReadOnly, why));
        }
        Ok(())
    }

    /// Its requests wait, and everything that was answered is durable.
    async fn hold_flushed(self: &Arc<Self>, open: Option<&Chain>) -> Result<Held<'_>> {
        let held = self.hold_for_reopening(open).await?;
        let Some(open) = open else { return Ok(held) };
        match self.has_room_in_time(open).await {
            Ok(()) => Ok(held),
            Err(error) => {
                held.finish();
                Err(error)
            }
        }
    }

    /// Asks the server of the source, over a connection of its own, whether what it exports is the disk that has moved in
    /// this migration, and that nothing else has taken over. Nothing has changed if it is not, or does not answer.
    async fn source_has_moved(&self, open: Option<&Chain>, number: MoveNumber) -> Result<()> {
        let below = match open {
            Some(open) => path_below(open),
            None => self.path_in_header().await?,
        };
        let refused = |why: &str| Error::new(ErrorKind::Refused, format!("{}: {why}", self.path.display()));
        let below = below.ok_or_else(|| refused("it has no source"))?;
        let source = self.source_at(&below).await?;
        let proof = Proof::new(ProofKind::Moved, self.disk.geometry().size, number.to_string())?;
        if source.proof().as_ref() != Some(&proof) {
            return Err(refused("its source has not moved in this migration"));
        }
        match source.description().ends_with(&format!("{}{number}", info::MOVED)) {
            true => Ok(()),
            false => {
                Err(refused("another image has taken over the disk of its source: was this one copied?"))
            }
        }
    }

    /// The image below, opened anew.
    async fn source_at(&self, below: &Path) -> Result<SharedStorage> {
        let options = ImageOptions { read_only: true, format: Some(FormatKind::Raw), ..self.image.clone() };
        Ok(open_file(below, &options).await?.0)
    }

    /// The image below, as the header names it.
    async fn path_in_header(&self) -> Result<Option<PathBuf>> {
        let options = ImageOptions { read_only: true, format: Some(self.format), ..self.image.clone() };
        let (storage, format) = open_file(&self.path, &options).await?;
        let head = format.format().read(&*storage).await?;
        head.backing().map(|(name, _)| Gate::resolve(&self.path, name)).transpose()
    }

    /// The file under its name is the one that is open: another one in its place would lack what was written since.
    ///
    /// # Errors
    /// `Refused` if it is not.
    pub(super) async fn is_the_same_file(&self, open: Option<&Chain>) -> Result<()> {
        let proof =
            open.and_then(|open| open.top().storage.proof()).filter(|proof| proof.kind() == ProofKind::File);
        let Some(number) = proof.and_then(|proof| proof.value().split('@').next()?.parse::<u64>().ok())
        else {
            return Ok(());
        };
        let path = self.path.clone();
        let there =
            unblock_at(&self.path, move || Ok(std::fs::metadata(&path).map(|facts| facts.ino()))).await?;
        // Where there is none, opening says so.
        if there.is_err() || there.is_ok_and(|there| there == number) {
            return Ok(());
        }
        let why = format!(
            "{}: there is another file now, and the disk that is served is that of a file without this name: nothing was changed; put \
             the file back that was opened (`ls -i`: {number}), or copy the disk from the server, for example with `vellum \
             convert nbd://…`",
            self.path.display()
        );
        Err(Error::new(ErrorKind::Refused, why))
    }

    async fn read_handover(&self) -> Result<Option<Handover>> {
        let options = ImageOptions { read_only: true, format: Some(self.format), ..self.image.clone() };
        let (storage, format) = open_file(&self.path, &options).await?;
        Ok(format.format().read(&*storage).await?.handover())
    }

    async fn change_handover(&self, after: Option<Handover>) -> Result<()> {
        let options = ImageOptions { read_only: false, format: Some(self.format), ..self.image.clone() };
        let (storage, format) = open_file(&self.path, &options).await?;
        format.format().set_handover(&storage, after).await
    }
}
