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
//! 7. Before a running disk is closed its own file, and those below, are looked at: what could not be opened again is
//!    not closed.
//! 8. Before the first write of a source that is taken back passes, the clients that were told that it has moved are
//!    sent away: a target that has taken over reads nothing of a disk that is written.
//! 9. A disk that is not written because a mark may not be durable is opened for writing by the next step, or a
//!    reopening, that makes the mark durable. An image that was not closed has no doubtful mark: it is recovered first.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use vellum_core::pin::{Proof, ProofKind};
use vellum_core::{Disk as _, Error, ErrorKind, Result, SharedDisk, SharedStorage, lock};
use vellum_export::nbd::wire::info;
use vellum_export::nbd::{Exports, SentAway};
use vellum_format::FormatKind;
use vellum_format::handover::{Handover, MoveNumber, may_change};
use vellum_io::{clock, unblock_at};
use vellum_layer::barred::Barred;
use vellum_layer::{Chain, Gate, migrate};

use super::steer::Held;
use super::{How, Served, Step};
use crate::closed::recover;
use crate::image::{ImageOptions, open_file, open_over};

/// How often to look whether clients that were sent away have gone.
const GONE_EVERY: Duration = Duration::from_millis(2);

/// How many challenges are shown at once: the latest.
const ASKED_MAX: usize = 4;

/// What became of a step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HandedOver {
    /// What the image says now.
    pub(crate) handover: Option<Handover>,
    /// How long its requests waited.
    pub(crate) held: Duration,
}

/// How far a step came that was tried.
struct Tried {
    /// The disk was not written before, by what the header said or because that might not be durable.
    was_barred: bool,
    /// The header was to be changed.
    may_be_marked: bool,
    /// It has been, durably.
    is_durable: bool,
    /// What it says now, if it can be read.
    read: Option<Option<Handover>>,
}

impl Tried {
    /// What the header is taken to say, and whether the disk is not written for that.
    fn outcome(
        &self,
        step: migrate::Step,
        before: Option<Handover>,
        after: Option<Handover>,
    ) -> (Option<Handover>, bool) {
        let says = self.read.unwrap_or(if self.may_be_marked { after } else { before });
        let allows = matches!(step, migrate::Step::Accept | migrate::Step::Restore);
        let is_doubtful = (allows || self.was_barred) && !self.is_durable;
        (says, is_doubtful || says.is_some_and(|handover| !handover.allows_writing()))
    }
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
    /// How its image is opened now: as the user wants by now, unless a migration forbids to write it.
    pub(super) fn image_options(&self) -> ImageOptions {
        let read_only = self.image.read_only || self.is_barred();
        let format = lock(&self.place).stated;
        let mut options = ImageOptions { read_only, format, ..self.image.clone() };
        if let (Some(flash), Some(policy)) = (&mut options.flash, *lock(&self.flash_policy)) {
            flash.policy = Some(policy);
        }
        self.put_merging(&mut options);
        options
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
            // Of commands that run at once, each looks for its own.
            let (mut asked, said): (Vec<&str>, Vec<&str>) = remark
                .split("; ")
                .filter(|text| !text.is_empty())
                .partition(|text| text.starts_with(info::ASKED));
            let new = format!("{}{challenge}", info::ASKED);
            asked.drain(..asked.len().saturating_sub(ASKED_MAX - 1));
            asked.push(&new);
            *remark = [asked, said].concat().join("; ");
            remark.clone()
        };
        self.names().iter().try_for_each(|name| exports.set_remark(name, &remark))
    }

    /// Whether the export that it reads from shows this challenge; `None` if it reads from nothing.
    ///
    /// # Errors
    /// Those of connecting to it; `Refused` if another file has the name of its image.
    pub(crate) async fn looks_for(&self, challenge: MoveNumber) -> Result<Option<bool>> {
        let chain = self.chain.read().await;
        // Its next step would refuse that, when the source is written no more.
        self.is_the_same_file(chain.as_ref()).await?;
        let below = match &*chain {
            Some(chain) => path_below(chain),
            // A step may have closed it.
            None => self.path_in_header().await?,
        };
        drop(chain);
        let Some(below) = below else { return Ok(None) };
        let source = self
            .source_at(&below)
            .await
            .map_err(|error| error.context(format!("{} does not reach its source", self.shown())))?;
        Ok(Some(source.description().contains(&format!("{}{challenge}", info::ASKED))))
    }

    fn is_its_disk(&self) -> Result<()> {
        let Some(snapshot) = &self.image.snapshot else { return Ok(()) };
        let path = self.shown();
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
        exports: &Exports,
    ) -> Result<HandedOver> {
        self.is_its_disk()?;
        let path = self.shown();
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
        // A target that is given up needs nothing of its source.
        let is_looked_at = matches!((step, before), (migrate::Step::Accept, Some(Handover::Awaiting(_))));
        if step != migrate::Step::Void && !is_looked_at {
            self.could_be_opened_again(chain.as_ref()).await?;
        }
        if step == migrate::Step::Restore {
            self.send_away_told(exports).await?;
        }
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
                self.tell(exports)?;
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
        let may_be_marked = closed.is_ok() && released.is_ok();
        let changed = match closed.and(released) {
            Ok(()) => {
                // Clones of its snapshots, in this server, hold the file as well.
                let forks = self.how.templates.hold(&self.canonical()).await;
                let changed = self.change_handover(after).await;
                drop(forks);
                changed
            }
            failed => failed,
        };
        // What the header says now decides what passes. A disk whose mark may not be durable is not written: the step
        // is to be taken again. One that cannot be read may have got its mark.
        let read = self.read_handover().await;
        let (was_barred, is_durable) = (self.is_barred(), changed.is_ok());
        let tried = Tried { was_barred, may_be_marked, is_durable, read: read.as_ref().ok().copied() };
        let (says, forbids) = tried.outcome(step, before, after);
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
        // Clients hear nothing of a header that could not be read.
        *lock(&self.remark) = remark(read.unwrap_or(before), &self.image);
        let told = self.tell(exports);
        // It is open, or closed: nothing is half done.
        held.finish();
        let waited = clock().now().saturating_sub(began);
        changed?;
        told?;
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

    /// Sends away the clients that were told that the disk has moved, and tells nobody else: it is to be written again.
    /// Returns when none of them gets an answer any more.
    ///
    /// # Errors
    /// `Locked` if their requests do not end. Nothing has changed then.
    async fn send_away_told(&self, exports: &Exports) -> Result<()> {
        let names = self.names();
        names.iter().try_for_each(|name| exports.set_remark(name, ""))?;
        let sent_away: Vec<SentAway> = names.iter().filter_map(|name| exports.send_away_told(name)).collect();
        let until = clock().now() + self.how.patience;
        while !sent_away.iter().all(SentAway::is_over) {
            if clock().now() >= until {
                self.tell(exports)?;
                return Err(self.in_use(
                    "requests of clients that were told that it has moved do not finish; try again",
                ));
            }
            clock().sleep(GONE_EVERY).await;
        }
        Ok(())
    }

    /// A barred disk is reopened: if its header may allow writing, as above.
    pub(super) async fn before_writing(&self, open: Option<&Chain>, exports: &Exports) -> Result<()> {
        match self.is_barred() && open.is_none_or(|open| !is_read_only(open)) {
            true => self.send_away_told(exports).await,
            false => Ok(()),
        }
    }

    /// Makes the mark durable of a disk that its header allows to be written, and that is barred because the mark may not be.
    /// The image is closed.
    ///
    /// # Errors
    /// Those of the image: it is not written, as before.
    pub(super) async fn allow_writing_again(&self) -> Result<()> {
        if !self.is_barred() {
            return Ok(());
        }
        let says = self.read_handover().await?;
        if says.is_none_or(Handover::allows_writing) {
            let forks = self.how.templates.hold(&self.canonical()).await;
            let changed = self.change_handover(says).await;
            drop(forks);
            changed?;
            self.is_barred.store(false, Ordering::Release);
        }
        *lock(&self.remark) = remark(says, &self.image);
        Ok(())
    }

    /// Opens the images below anew, as the step will: what cannot be opened now could not be after it. The disk goes on.
    ///
    /// # Errors
    /// Those of opening them; `Refused` if one is another than the one that is open.
    pub(super) async fn could_be_opened_again(&self, open: Option<&Chain>) -> Result<()> {
        let nothing = || {
            let path = self.shown();
            format!(
                "{path} could not be opened again after it was closed, so nothing was changed, and the disk goes on"
            )
        };
        let Some(open) = open else { return Ok(()) };
        // What was read over another content would be wrong.
        let is_pinned = open.top().head.pin().is_some();
        // The image of a snapshot may be open for writing, here or elsewhere.
        for member in open.members().skip(1).filter(|member| !member.is_snapshot) {
            let options =
                ImageOptions { read_only: true, format: Some(member.head.kind()), ..self.image.clone() };
            let (storage, _) =
                open_file(&member.path, &options).await.map_err(|error| error.context(nothing()))?;
            let proof = member.storage.proof().filter(|proof| is_pinned && proof.kind() != ProofKind::File);
            if proof.is_some() && storage.proof() != proof {
                let why = format!("{} has changed since it was opened", member.path.display());
                return Err(Error::new(ErrorKind::Refused, why).context(nothing()));
            }
        }
        Ok(())
    }

    /// Whether this server can take the step on an image in this state.
    fn may_hand_over(&self, step: migrate::Step, now: Option<Handover>, is_open: bool) -> Result<()> {
        let path = self.shown();
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
    pub(super) async fn hold_flushed(self: &Arc<Self>, open: Option<&Chain>) -> Result<Held<'_>> {
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
        let refused = |why: &str| Error::new(ErrorKind::Refused, format!("{}: {why}", self.shown()));
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
        let options = ImageOptions { read_only: true, format: Some(self.format()), ..self.image.clone() };
        let (storage, format) = open_file(&self.path(), &options).await?;
        let head = format.format().read(&*storage).await?;
        head.backing().map(|(name, _)| Gate::resolve(&self.path(), name)).transpose()
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
        let path = self.path();
        let there =
            unblock_at(&self.path(), move || Ok(std::fs::metadata(&path).map(|facts| facts.ino()))).await?;
        let name = self.shown();
        let why = match there {
            Ok(there) if there == number => return Ok(()),
            Ok(_) => format!(
                "{name}: there is another file now, and the disk that is served is that of a file without this name"
            ),
            Err(error) => format!("{name}: the file that is served is not found under its name ({error})"),
        };
        let why = format!(
            "{why}: nothing was changed; put the file back that was opened (`ls -i`: {number}), or copy the disk from the server, \
             for example with `vellum convert nbd://…`"
        );
        Err(Error::new(ErrorKind::Refused, why))
    }

    async fn read_handover(&self) -> Result<Option<Handover>> {
        let options = ImageOptions { read_only: true, format: Some(self.format()), ..self.image.clone() };
        let (storage, format) = open_file(&self.path(), &options).await?;
        Ok(format.format().read(&*storage).await?.handover())
    }

    /// An image that may be written and was not closed is recovered first.
    async fn change_handover(&self, after: Option<Handover>) -> Result<()> {
        let options = ImageOptions { read_only: false, format: Some(self.format()), ..self.image.clone() };
        let (storage, format) = open_file(&self.path(), &options).await?;
        let head = format.format().read(&*storage).await?;
        if head.was_left_open() && head.handover().is_none_or(Handover::allows_writing) {
            drop((head, storage));
            recover(&self.path(), &options).await?;
            let (storage, format) = open_file(&self.path(), &options).await?;
            return format.format().set_handover(&storage, after).await;
        }
        format.format().set_handover(&storage, after).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_that_may_have_a_mark_is_not_written() {
        use migrate::Step::{Accept, Fix, Restore, Seal};
        let number = MoveNumber::new([7; 16]).expect("a number");
        let (awaiting, arrived) = (Some(Handover::Awaiting(number)), Some(Handover::Arrived(number)));
        let (moved, gone) = (Some(Handover::Moved(number)), Some(Handover::Gone(number)));
        for (step, before, after, may_be_marked, is_durable, read, is_barred) in [
            (Fix, None, moved, true, true, Some(moved), true),
            // It was not closed: nothing was changed.
            (Fix, None, moved, false, false, Some(None), false),
            (Fix, None, moved, false, false, None, false),
            // The mark may be there, and cannot be read.
            (Fix, None, moved, true, true, None, true),
            (Fix, None, moved, true, false, None, true),
            (Accept, awaiting, arrived, true, true, Some(arrived), false),
            (Accept, awaiting, arrived, true, true, None, false),
            (Accept, awaiting, arrived, true, false, Some(arrived), true),
            (Accept, awaiting, arrived, true, false, None, true),
            (Accept, awaiting, arrived, false, false, None, true),
            (Restore, moved, None, true, true, Some(None), false),
            (Restore, moved, None, true, false, Some(None), true),
            (Restore, moved, None, false, false, None, true),
            (Restore, moved, None, false, false, Some(None), true),
            (Seal, moved, gone, true, false, None, true),
        ] {
            let was_barred = before.is_some_and(|handover| !handover.allows_writing());
            let tried = Tried { was_barred, may_be_marked, is_durable, read };
            assert_eq!(tried.outcome(step, before, after).1, is_barred, "{step:?} {is_durable} {read:?}");
        }
        // A doubt stays until a mark is durable.
        for (is_durable, is_barred) in [(false, true), (true, false)] {
            let tried = Tried { was_barred: true, may_be_marked: true, is_durable, read: Some(None) };
            assert_eq!(tried.outcome(Restore, None, None).1, is_barred);
            let tried = Tried { is_durable: false, ..tried };
            assert!(tried.outcome(Fix, None, moved).1);
        }
    }
}
