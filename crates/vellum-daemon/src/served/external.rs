//! External snapshots of disks that are served: the image on top becomes one that is only read, and a new one goes on top.
//!
//! ```text
//!   guests at work   refuse what cannot be ► new image in a draft beside its name ► drain ► flush
//!   requests wait    flush ► close ► the draft gets its name ► open it, over the image that was on top
//!                                    commit point
//!   guests at work   everything that is written goes to the new image
//! ```
//!
//! `docs/design/0025-live-chains.md` argues why a crash loses nothing.
//!
//! 1. The new image gets its name when nothing is written any more and everything that was answered is durable in the one
//!    below. So where there is a file of that name it is the disk, and where there is none the old image is.
//! 2. Until requests continue nothing has been written to the new image: a step that fails takes it away again, and the disk
//!    goes on with the old one.
//! 3. Of several disks all are held before the first one is exchanged, and none continues before the last one is: their
//!    snapshots are of one moment. If one fails, all go back.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_lock::RwLockWriteGuard;
use vellum_core::{Error, ErrorKind, Result, lock};
use vellum_format::FormatKind;
use vellum_format::luks::Secrets;
use vellum_io::{Draft, clock, unblock_at};
use vellum_layer::hydrate::State;
use vellum_layer::{Chain, Referrer, Trust};

use super::steer::{Begun, Held};
use super::{Place, Served, Step};
use crate::create::backing_name;
use crate::host::Host;
use crate::new_top::NewTop;

/// An image that is to go on top.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Overlay {
    /// Its file, by its absolute path. There is none of this name.
    pub(crate) path: PathBuf,
    /// Its format; by default that of its name, else that of the image below it, else the native one.
    pub(crate) format: Option<FormatKind>,
}

/// What was done.
#[derive(Debug, Clone)]
pub(crate) struct Overlaid {
    /// The image on top.
    pub(crate) image: PathBuf,
    /// Its format.
    pub(crate) format: FormatKind,
    /// The one below, which was on top.
    pub(crate) below: PathBuf,
    /// How long requests waited.
    pub(crate) held: Duration,
    /// The key slots of the one below that do not open the one on top.
    pub(crate) slots_left: Vec<usize>,
    /// An image of the chain names a fast medium.
    pub(crate) has_fast: bool,
}

/// Puts a new image on top of each of these disks, at one moment.
///
/// # Errors
/// `Unsupported`, `Refused` or `ReadOnly` where a disk cannot have one, `Invalid` for a name that cannot be given, the errors of
/// the images. Nothing has changed then, unless the error says that a disk could not be opened again.
pub(crate) async fn put_on_top(all: &[(Arc<Served>, Overlay)]) -> Result<Vec<Overlaid>> {
    let mut switches = Vec::with_capacity(all.len());
    for (index, (served, overlay)) in all.iter().enumerate() {
        if all[..index].iter().any(|(other, _)| Arc::ptr_eq(other, served)) {
            return Err(Error::invalid(format!("{} is named twice", served.shown())));
        }
        switches.push(Switch::prepare(served, overlay).await?);
    }
    for at in 0..switches.len() {
        if let Err(error) = switches[at].hold().await {
            switches.iter_mut().for_each(Switch::go_on);
            return Err(error);
        }
    }
    for at in 0..switches.len() {
        if let Err(error) = switches[at].exchange().await {
            for done in &mut switches[..at] {
                done.take_back().await;
            }
            switches.iter_mut().for_each(Switch::go_on);
            return Err(error);
        }
    }
    let mut done = Vec::with_capacity(switches.len());
    for switch in &mut switches {
        switch.go_on();
        done.push(switch.done().await);
    }
    Ok(done)
}

/// One disk that gets another image on top.
struct Switch<'a> {
    served: &'a Arc<Served>,
    _step: Begun<'a>,
    chain: RwLockWriteGuard<'a, Option<Chain>>,
    draft: Option<Draft>,
    slots_left: Vec<usize>,
    before: Place,
    after: Place,
    held: Option<Held<'a>>,
    began: Duration,
}

impl<'a> Switch<'a> {
    /// What needs no requests to wait: checks, and the new image.
    async fn prepare(served: &'a Arc<Served>, overlay: &Overlay) -> Result<Self> {
        let step = served.begin(Step::Overlay)?;
        let chain = served.alone_or_closed().await?;
        let open = chain.as_ref().ok_or_else(|| served.is_closed())?;
        served.may_get_overlay(open)?;
        served.is_the_same_file(Some(open)).await?;
        served.could_be_opened_again(Some(open)).await?;
        let before = lock(&served.place).clone();
        let format = format_of(overlay, before.format)?;
        let canonical = place_of(&overlay.path).await?;
        let referrer = Referrer { canonical: &canonical, is_device: false, trust: Trust::Declared };
        Host::gate(&served.image.allow_dirs, &[])?.check(referrer, &before.canonical)?;
        let (draft, slots_left) = draft(open, &before, &overlay.path, format, &served.image.secrets).await?;
        if let Some(flash) = open.flash() {
            flash.drain().await?;
        }
        // Most of it while guests are at work.
        served.has_room_in_time(open).await?;
        let after = Place { path: overlay.path.clone(), canonical, format, stated: Some(format) };
        let began = clock().now();
        Ok(Self {
            served,
            _step: step,
            chain,
            draft: Some(draft),
            slots_left,
            before,
            after,
            held: None,
            began,
        })
    }

    /// From when this returns on no request is in flight, and everything that was answered is durable.
    async fn hold(&mut self) -> Result<()> {
        self.began = clock().now();
        self.held = Some(self.served.hold_to_change(self.chain.as_ref()).await?);
        Ok(())
    }

    /// Closes the image, and opens the new one over it. If that fails the old one is opened again.
    async fn exchange(&mut self) -> Result<()> {
        self.close().await?;
        let draft = self.draft.take().expect("it is published once");
        let held = self.held.as_ref().expect("its requests wait");
        let exchanged = match draft.publish().await {
            // commit point: the new image has its name.
            Ok(()) => {
                *lock(&self.served.place) = self.after.clone();
                self.served.hydration.set_off();
                self.served.open_again(&held.hold, &mut self.chain).await
            }
            failed => failed,
        };
        match exchanged {
            Ok(()) => Ok(()),
            Err(error) => {
                self.open_old().await;
                Err(error)
            }
        }
    }

    /// Closes the image that is open. If that fails it is opened again.
    async fn close(&mut self) -> Result<()> {
        let (served, held) = (self.served, self.held.as_ref().expect("its requests wait"));
        match served.close_held(held, &mut self.chain).await {
            Ok(()) => Ok(()),
            Err(error) => {
                self.open_old().await;
                Err(error)
            }
        }
    }

    /// The old image is on top again, and the new one, to which nothing was written, is removed.
    async fn open_old(&mut self) {
        let (served, held) = (self.served, self.held.as_ref().expect("its requests wait"));
        *lock(&served.place) = self.before.clone();
        // An image that stays reads as the old one does, as long as nothing is written to it.
        let path = self.after.path.clone();
        let removed = unblock_at(&self.after.path, move || std::fs::remove_file(path)).await;
        if let Some(error) = removed.err().filter(|error| error.kind() != std::io::ErrorKind::NotFound) {
            tracing::warn!(
                "{}: it is of no use and could not be removed: {error}",
                self.after.path.display()
            );
        }
        if let Err(error) = served.open_again(&held.hold, &mut self.chain).await {
            tracing::error!(
                "{} is closed, and every request fails until `vellum export reopen` opens it again: {}",
                served.shown(),
                error.chain()
            );
        }
    }

    /// As before, where another disk could not be exchanged.
    async fn take_back(&mut self) {
        if self.close().await.is_ok() {
            self.open_old().await;
        }
    }

    /// Requests continue.
    fn go_on(&mut self) {
        if let Some(held) = self.held.take() {
            held.finish();
            self.chain.iter().for_each(Chain::resume_forks);
        }
        // Nothing was exchanged.
        if self.chain.is_some() {
            self.served.tend();
        }
    }

    async fn done(&mut self) -> Overlaid {
        let served = self.served;
        let held = clock().now().saturating_sub(self.began);
        let (image, below) = (self.after.path.clone(), self.before.path.clone());
        served.record.is_of(image.display().to_string());
        // Clones of snapshots of the image that was on top read its file from now on.
        if let Ok(host) = served.image.host().await {
            served.how.templates.left(&host, &self.before.canonical).await;
        }
        tracing::warn!(
            "{} is on top of {} from now on: serve it, and not that one, when this server ends",
            image.display(),
            below.display()
        );
        let slots_left = std::mem::take(&mut self.slots_left);
        NewTop::say_slots_left(&slots_left, &image, &below);
        let names_one = |chain: &Chain| chain.members().any(|member| member.head.fast().is_some());
        let has_fast = self.chain.as_ref().is_some_and(names_one);
        Overlaid { image, format: self.after.format, below, held, slots_left, has_fast }
    }
}

impl Served {
    /// Refuses disks on which nothing can be put.
    fn may_get_overlay(&self, open: &Chain) -> Result<()> {
        let path = self.shown();
        if let Some(snapshot) = &self.image.snapshot {
            return Err(Error::unsupported(format!(
                "{path}: its snapshot {snapshot} is served, and not its disk: `vellum clone` makes an image over a snapshot"
            )));
        }
        if !self.disk_is_written() || self.is_barred() {
            return Err(Error::new(
                ErrorKind::ReadOnly,
                format!("{path} is not written here: `vellum create -b` makes an image over it"),
            ));
        }
        self.chain_may_change(open)?;
        self.has_no_bitmaps()?;
        if open.is_any_encrypted() && !open.top().head.is_encrypted() {
            return Err(Error::unsupported(format!(
                "an image below {path} is encrypted, and the new image would not be, as {path} is not: stop the server and use \
                 `vellum create -b` with `-o encrypt.format=luks`"
            )));
        }
        let is_copied = lock(&self.tap).is_some()
            && self.hydration.prefetches()
            && self.hydration.progress().state != State::Paused;
        if is_copied {
            let why = "its backing image is being copied into it: wait until that is done, or stop it with `vellum prefetch pause`";
            return Err(self.in_use(why));
        }
        Ok(())
    }
}

/// The format of the new image.
fn format_of(overlay: &Overlay, below: FormatKind) -> Result<FormatKind> {
    let by_name = || FormatKind::of_name(&overlay.path).filter(|kind| *kind != FormatKind::Raw);
    let like_below = || (below == FormatKind::Qcow2).then_some(FormatKind::Qcow2);
    let format = overlay.format.or_else(by_name).or_else(like_below).unwrap_or(FormatKind::Native);
    match format {
        FormatKind::Native | FormatKind::Qcow2 => Ok(format),
        other => Err(Error::invalid(format!(
            "{}: a {other} image has no backing image: use the format qcow2 or vellum",
            overlay.path.display()
        ))),
    }
}

/// Where the new image will be, links followed.
async fn place_of(path: &Path) -> Result<PathBuf> {
    let (Some(dir), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(Error::invalid(format!("{} is no name of a file", path.display())));
    };
    if !path.is_absolute() {
        return Err(Error::invalid(format!("{}: give the absolute path of the new image", path.display())));
    }
    let (its, file) = (dir.to_owned(), path.to_owned());
    let (dir, is_there) =
        unblock_at(path, move || (its.canonicalize(), file.symlink_metadata().is_ok())).await;
    if is_there {
        return Err(Error::invalid(format!(
            "{} exists already, and nothing is replaced: remove it, or choose another name",
            path.display()
        )));
    }
    let dir = dir.map_err(|error| Error::io(error, format!("can't create {}", path.display())))?;
    Ok(dir.join(name))
}

/// The new image, complete, durable and without its name; and the key slots of the one below that do not open it.
async fn draft(
    open: &Chain,
    below: &Place,
    path: &Path,
    format: FormatKind,
    secrets: &Secrets,
) -> Result<(Draft, Vec<usize>)> {
    let context = |error: Error| error.context(format!("can't create {}", path.display()));
    let name = backing_name(&below.path, path)?;
    let size = open.disk().geometry().size;
    let draft = Draft::begin(path).await?.filter(|draft| !draft.replaces());
    let draft = draft.ok_or_else(|| {
        Error::invalid(format!("{}: this name cannot be given to a new file", path.display()))
    })?;
    let top = NewTop::like(open.top(), format, secrets).await?;
    let slots_left = top.slots_left();
    top.make(&draft, size, (name, below.format)).await.map_err(context)?;
    // What guests write from now on is as private as what they wrote before.
    draft.take_rights_of(&below.path)?;
    Ok((draft, slots_left))
}
