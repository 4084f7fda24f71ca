//! A backup of what a bitmap says has changed, in a new image over the backup before; or of all of the disk.
//!
//! ```text
//!   monday.qcow2 (all) ◄── tuesday.qcow2 (what changed) ◄── wednesday.qcow2 (what changed)
//!
//!   the bitmap begins anew ► what was marked is read, and written into a draft ► the draft gets its name   commit point
//!                          ► what was marked is given up                                                   commit point
//! ```
//!
//! 1. What was marked stays marked in the image until the backup has its name, durably. A crash before that leaves the bitmap as if
//!    there had been no backup; one between the two leaves a whole backup, and a bitmap that has it marked once more.
//!    Once it has its name it is made, whatever fails then: that is a warning.
//! 2. The image is open for writing, and so locked, from the first look at the bitmap until it is closed.
//! 3. Runs that read as zero are zeros in the backup. So it reads as the disk did, also where the backup before has data.
//! 4. What has only the changes replaces no file: one of that name may be the whole backup of a run that was killed when the bitmap had
//!    begun anew already, and a second one would lack these changes.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use vellum_core::{
    Buffer, Error, ErrorKind, GuestOffset, GuestSpan, PlaceKind, Result, SharedDisk, WriteFlags, ZeroFlags,
};
use vellum_format::FormatKind;
use vellum_format::image::{Bits, OpenBitmaps};
use vellum_format::luks::Secrets;
use vellum_format::qcow2::CreateOptions;
use vellum_io::Draft;
use vellum_layer::Chain;

use crate::create::{CreateTarget, backing_name, create_qcow2};
use crate::image::{ImageOptions, open_image};
use crate::signals::Stop;

/// Data is copied in pieces of this many bytes.
const PIECE: u64 = 1 << 20;
/// And zeros in pieces of this many; maps are asked for as much.
const ZEROS: u64 = 64 << 20;

/// What backups that were killed have left is removed when it is as old as this.
const LEFT_FOR: Duration = Duration::from_secs(3600);

/// Where a backup goes.
#[derive(Debug, Clone)]
pub struct Backup {
    /// The bitmap that says what has changed. It begins anew.
    pub bitmap: String,
    /// The new image, of the format qcow2. An existing file is replaced if all of the disk is copied.
    pub target: PathBuf,
    /// The backup before, and its format: only what has changed since is copied. Without it all of the disk is.
    pub before: Option<(PathBuf, FormatKind)>,
    /// The options of the new image.
    pub options: CreateOptions,
    /// The new image is not encrypted although the disk is, as the user has explicitly asked.
    pub is_plain_text: bool,
    /// What opens the new image and the backup before, where they are encrypted.
    pub secrets: Arc<Secrets>,
    /// Where references of the backup before may lead, besides its own directory.
    pub allow_dirs: Vec<PathBuf>,
}

/// What was done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BackedUp {
    /// Bytes of the disk that were marked.
    pub bytes_marked: u64,
    /// Bytes of data that were copied.
    pub bytes_copied: u64,
}

/// Makes a backup of an image that no server uses. `progress` gets the bytes that are to be looked at, and those done.
///
/// # Errors
/// `Unsupported` for a format without bitmaps, or a bitmap that is not kept up; the errors of the images; `Closed` when it was
/// stopped. The bitmap is then as before, and there is no new image.
pub async fn backup(
    path: &Path,
    options: &ImageOptions,
    wish: &Backup,
    stop: &mut Stop,
    progress: &dyn Fn(u64, u64),
) -> Result<BackedUp> {
    let source = stop.or_stopped(open_image(path, options)).await?;
    let done = with_source(&source, wish, stop, progress).await;
    let closed = source.close().await;
    if let (Ok(_), Err(error)) = (&done, closed) {
        tracing::warn!("{} is complete, but: {}", wish.target.display(), error.chain());
    }
    done
}

async fn with_source(
    source: &Chain,
    wish: &Backup,
    stop: &Stop,
    progress: &dyn Fn(u64, u64),
) -> Result<BackedUp> {
    refuse_plain_text_by_mistake(source, wish)?;
    let bitmaps = bitmaps_of(source)?;
    let target = Target::make(wish, source.disk().geometry().size).await?;
    let marked = match bitmaps.begin_anew(&wish.bitmap) {
        Ok(marked) => marked,
        Err(error) => return Err(target.give_up(error).await),
    };
    let mut done = BackedUp::default();
    let is_stopped = || stop.flag.load(Ordering::Relaxed);
    let copying = Copying { source: source.disk(), target: target.disk(), is_stopped: &is_stopped, progress };
    let copied = match wish.before {
        Some(_) => copying.marked(&marked, &mut done).await,
        None => copying.all(&mut done).await,
    };
    let ended = match copied {
        Ok(()) => target.publish(&is_stopped).await,
        Err(error) => Err(target.give_up(error).await),
    };
    match ended {
        Ok(()) => {
            forget(&*bitmaps, wish).await; // commit point
            Ok(done)
        }
        Err(error) => {
            bitmaps.take_back(&wish.bitmap);
            Err(error)
        }
    }
}

/// A backup of an encrypted disk is encrypted, unless somebody wants it not to be.
///
/// # Errors
/// `Unsupported` where it would not be.
pub(crate) fn refuse_plain_text_by_mistake(source: &Chain, wish: &Backup) -> Result<()> {
    if source.is_any_encrypted() && wish.options.encryption.is_none() && !wish.is_plain_text {
        return Err(Error::unsupported(
            "its disk is encrypted, and the backup would not be: add `-o encrypt.format=luks,encrypt.key-secret=ID`, or --plain-text if \
             whoever can read the backup may read the disk",
        ));
    }
    Ok(())
}

/// Gives up what was marked: the backup has it, under its name. If that fails, the next backup has it once more, which is right as well.
pub(crate) async fn forget(bitmaps: &dyn OpenBitmaps, wish: &Backup) {
    if let Err(error) = bitmaps.forget(&wish.bitmap).await {
        tracing::warn!(
            "{} is complete, but bitmap {} may still have marked what it has, and the next backup copies that once more: {}",
            wish.target.display(),
            wish.bitmap,
            error.chain()
        );
    }
}

/// The bitmaps of the image on top.
pub(crate) fn bitmaps_of(chain: &Chain) -> Result<Arc<dyn OpenBitmaps>> {
    let top = chain.top();
    top.opened.bitmaps.clone().ok_or_else(|| {
        let how = "`vellum bitmap --add` adds one to a qcow2 image";
        Error::new(ErrorKind::NotFound, format!("{} has no bitmaps: {how}", top.path.display()))
    })
}

/// The new image, under a temporary name.
pub(crate) struct Target {
    draft: Draft,
    chain: Chain,
    name: PathBuf,
}

impl Target {
    /// Makes it, for a disk of this many bytes.
    pub(crate) async fn make(wish: &Backup, size: u64) -> Result<Self> {
        let name = wish.target.clone();
        let draft = Draft::begin(&name).await?.ok_or_else(|| {
            Error::invalid(format!(
                "{}: a backup has to be a new file, or replace a plain one",
                name.display()
            ))
        })?;
        if wish.before.is_some() && draft.replaces() {
            let _ = draft.discard();
            return Err(Error::invalid(format!(
                "{0} exists, and an incremental backup replaces no file. It may be the whole backup of a run that was killed before it \
                 could say so: if it is (`vellum compare` it with the disk), keep it, and give it with -B for the next backup. If it is \
                 something else, name another target",
                name.display()
            )));
        }
        // Each backup has a name of its own, so nobody else removes what killed ones have left.
        draft.sweep(LEFT_FOR).await;
        match Self::make_in(&draft, wish, size).await {
            Ok(chain) => Ok(Self { draft, chain, name }),
            Err(error) => {
                let _ = draft.discard();
                Err(error.context(format!("{} was not created", name.display())))
            }
        }
    }

    async fn make_in(draft: &Draft, wish: &Backup, size: u64) -> Result<Chain> {
        let backing = match &wish.before {
            Some((path, format)) => Some((backing_name(path, &wish.target)?, *format)),
            None => None,
        };
        // A bare name has an empty parent.
        let dir = |path: &Path| path.parent().map(|dir| Path::new(".").join(dir));
        let beside = wish.before.iter().filter_map(|(path, _)| dir(path));
        let allow_dirs: Vec<PathBuf> = wish.allow_dirs.iter().cloned().chain(beside).collect();
        let target = CreateTarget {
            path: draft.path().to_owned(),
            size: Some(size),
            trust_backing: backing.is_none(),
            backing,
            allow_dirs: allow_dirs.clone(),
            remote: Default::default(),
            trust_base: false,
            secrets: wish.secrets.clone(),
            stands_on_encrypted: Arc::default(),
            never_flushed: false,
        };
        create_qcow2(&target, wish.options.clone()).await?;
        let options = ImageOptions {
            format: Some(FormatKind::Qcow2),
            allow_dirs,
            secrets: wish.secrets.clone(),
            ..ImageOptions::default()
        };
        open_image(draft.path(), &options).await
    }

    pub(crate) fn disk(&self) -> &SharedDisk {
        self.chain.disk()
    }

    /// Closes it, and gives it its name, unless it is not wanted any more by then. That is asked last, when all of it is durable.
    pub(crate) async fn publish(self, is_stopped: &dyn Fn() -> bool) -> Result<()> {
        let Self { mut draft, chain, name } = self;
        let mut ready = chain.close().await;
        drop(chain);
        if ready.is_ok() {
            ready = draft.flush().await;
        }
        if ready.is_ok() && is_stopped() {
            ready = Err(stopped());
        }
        match ready {
            Ok(()) => draft.publish().await, // commit point
            Err(error) => {
                let _ = draft.discard();
                Err(error.context(format!("{} was not created", name.display())))
            }
        }
    }

    /// Removes it, because of this error.
    pub(crate) async fn give_up(self, error: Error) -> Error {
        let Self { draft, chain, name } = self;
        let _ = chain.close().await;
        drop(chain);
        let _ = draft.discard();
        error.context(format!("{} was not created, and the bitmap is as before", name.display()))
    }
}

fn stopped() -> Error {
    Error::new(ErrorKind::Closed, "stopped before the end")
}

/// From one disk to the other.
pub(crate) struct Copying<'a> {
    pub(crate) source: &'a SharedDisk,
    pub(crate) target: &'a SharedDisk,
    /// Whether it is to end before it is whole.
    pub(crate) is_stopped: &'a dyn Fn() -> bool,
    pub(crate) progress: &'a dyn Fn(u64, u64),
}

impl Copying<'_> {
    /// Copies what is marked.
    pub(crate) async fn marked(&self, bits: &Bits, done: &mut BackedUp) -> Result<()> {
        let all = bits.marked_bytes();
        done.bytes_marked += all;
        let (mut at, mut before) = (GuestOffset::ZERO, 0);
        while let Some(run) = bits.next_marked(at) {
            at = run.end();
            self.run(run, true, done, &|bytes| (self.progress)(all, before + bytes)).await?;
            before += run.len();
        }
        Ok(())
    }

    /// Copies all of the disk, into a new image.
    pub(crate) async fn all(&self, done: &mut BackedUp) -> Result<()> {
        let size = self.source.geometry().size;
        done.bytes_marked += size;
        self.run(GuestOffset::ZERO.span(size), false, done, &|bytes| (self.progress)(size, bytes)).await
    }

    /// Copies a run. Zeros are written only over data.
    async fn run(
        &self,
        run: GuestSpan,
        over_data: bool,
        done: &mut BackedUp,
        progress: &dyn Fn(u64),
    ) -> Result<()> {
        let mut rest = run;
        while !rest.is_empty() {
            self.may_go_on()?;
            let (asked, _) = rest.split_at(ZEROS);
            let extents = self.source.map_whole(asked).await?;
            let Some(first) = extents.first() else {
                return Err(Error::corrupt("the map of a run is empty"));
            };
            let (part, _) = asked.split_at(first.span.end().bytes().saturating_sub(rest.start().bytes()));
            match first.place {
                PlaceKind::Zero { .. } | PlaceKind::Below => {
                    if over_data {
                        self.zeros(part).await?;
                    }
                }
                PlaceKind::Data | PlaceKind::Compressed => {
                    let mut data = part;
                    while !data.is_empty() {
                        let (piece, later) = data.split_at(PIECE);
                        self.may_go_on()?;
                        self.piece(piece, over_data, done).await?;
                        data = later;
                    }
                }
            }
            rest = GuestSpan::between(part.end(), rest.end());
            progress(part.end().bytes() - run.start().bytes());
        }
        Ok(())
    }

    fn may_go_on(&self) -> Result<()> {
        match (self.is_stopped)() {
            true => Err(stopped()),
            false => Ok(()),
        }
    }

    async fn piece(&self, piece: GuestSpan, over_data: bool, done: &mut BackedUp) -> Result<()> {
        let len = usize::try_from(piece.len()).expect("a piece is short");
        let bytes = self.source.read(piece.start(), Buffer::for_overwrite(len)).await?;
        match bytes.is_zero() {
            true if over_data => self.zeros(piece).await,
            true => Ok(()),
            false => {
                done.bytes_copied += piece.len();
                self.target.write(piece.start(), bytes, WriteFlags::default()).await
            }
        }
    }

    async fn zeros(&self, span: GuestSpan) -> Result<()> {
        self.target.write_zeroes(span, ZeroFlags { may_unmap: true, ..ZeroFlags::default() }).await
    }
}
