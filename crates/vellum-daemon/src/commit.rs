//! Writing what an image has into an image below it.
//!
//! ```text
//!   top ──┐  each opened alone: what it has, without what is below
//!   …   ──┤  the uppermost one that has a run decides
//!         └──► base, and what is below that, open for writing ► flush ► closed
//! ```
//!
//! 1. Through the top image the guest sees the same before, meanwhile and afterwards, also after a crash at any moment: what is
//!    written into the base is hidden by those above. So it can be stopped and run again.
//! 2. Images between the two, and other images over the base, show the base where they have nothing. Those are looked
//!    for beside the base and beside the image; where there is one, nothing is changed without `force`.
//! 3. What proves the base to those above is taken out of them, durably, before it changes: a crash must not leave an image
//!    that refuses its base. Where the base then cannot be opened, and so is as it was, they get it back.
//! 4. Snapshots inside those above read from the base as well: with some, nothing is changed.
//! 5. All files are open, and locked, while bytes move: those above for reading, the base for writing.
//!
//! The image keeps what it has. It is not emptied: it reads the same, and can be deleted or made anew.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use vellum_core::pin::Pin;
use vellum_core::{Context, Error, ErrorKind, LocalFuture, Result, Url};
use vellum_format::FormatKind;
use vellum_format::image::NewBacking;
use vellum_layer::Chain;
use vellum_layer::merge::{Merge, Steering};

use crate::clones_of::images_over;
use crate::closed::{ResizeOptions, resize};
use crate::create::refuse_moved;
use crate::image::{ImageOptions, open_file, open_image};
use crate::signals::Stop;

/// No guest waits for the images meanwhile. Each piece is a mebibyte of memory.
const PIECES_AT_ONCE: usize = 8;

/// What is written where.
#[derive(Debug, Clone, Default)]
pub struct Commit {
    /// The image below that gets it all; the one directly below when not given.
    pub base: Option<PathBuf>,
    /// Also where other images stand on the base, or between the two: they are useless afterwards.
    pub force: bool,
}

/// What was done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Committed {
    /// The image that has it all now.
    pub base: PathBuf,
    /// Images between the two, which are of no use any more.
    pub between: Vec<PathBuf>,
    /// Bytes of data that were written into the base.
    pub bytes_written: u64,
    /// The base is not encrypted, and an image above it was.
    pub is_less_protected: bool,
}

/// An image above the base.
#[derive(Debug, Clone)]
pub(crate) struct Layer {
    pub(crate) path: PathBuf,
    pub(crate) format: FormatKind,
    /// The size of its disk, in bytes.
    pub(crate) size: u64,
    /// As it names the image below it.
    below: Option<(String, Option<String>)>,
    pin: Option<Pin>,
}

/// The way down to the base.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    /// All images above the base, from the top down.
    pub(crate) layers: Vec<Layer>,
    /// The first of them whose contents go into the base, and those of all below it.
    pub(crate) from: usize,
    pub(crate) base: PathBuf,
    pub(crate) format: FormatKind,
    pub(crate) base_size: u64,
}

impl Plan {
    /// What is written into the base, in bytes of the disk.
    pub(crate) fn size(&self) -> u64 {
        // What a larger base has behind the end of the images above it is hidden by them, too.
        self.layers[self.from].size.max(if self.from == 0 { 0 } else { self.base_size })
    }

    /// The images between those that stay and the base: of no use afterwards.
    pub(crate) fn between(&self) -> Vec<PathBuf> {
        self.layers[self.from + 1..].iter().map(|layer| layer.path.clone()).collect()
    }
}

/// Writes what the image and those between have into one below. `progress` gets the size of the disk and the bytes
/// done.
///
/// # Errors
/// `Unsupported` when there is no image below or an image above it has snapshots, `Refused` when other images stand on the
/// base, the errors of the images, and `Closed` when it was stopped.
pub async fn commit(
    path: &Path,
    options: &ImageOptions,
    wish: &Commit,
    stop: &mut Stop,
    progress: &dyn Fn(u64, u64),
) -> Result<Committed> {
    let mut plan = stop.or_stopped(plan(path, options, wish)).await?;
    if !wish.force {
        refuse_others(&plan).await?;
    }
    say_format(&mut plan, options).await?;
    for layer in &plan.layers {
        put_pin(layer, options, None).await?;
    }
    let mut layers = Vec::new();
    for layer in &plan.layers {
        layers.push(alone(layer, options).await?);
    }
    let base = match stop.or_stopped(open_base(&plan, options)).await {
        Ok(base) => base,
        Err(error) => {
            drop(layers);
            give_pins_back(&plan, options).await?;
            return Err(error);
        }
    };
    let steering = Stopping(&stop.flag);
    let merge = Merge {
        layers: layers.iter().map(|chain| chain.disk().clone()).collect(),
        base: base.disk().clone(),
        steering: &steering,
    };
    let was_encrypted = layers.iter().any(|layer| layer.top().head.is_encrypted());
    let is_less_protected = was_encrypted && !base.top().head.is_encrypted();
    let size = plan.size();
    let copied = match merge.all(size, &|done| progress(size, done)).await {
        Ok(bytes) => merge.flush().await.map(|()| bytes),
        failed => failed,
    };
    let closed = base.close().await;
    for chain in &layers {
        chain.close().await?;
    }
    let bytes_written = copied.and_then(|bytes| closed.map(|()| bytes)).context(|| left_by_failure(&plan))?;
    let between = plan.between();
    Ok(Committed { base: plan.base, between, bytes_written, is_less_protected })
}

/// What a commit that has failed, or was stopped, leaves: the image on top reads as before, over a base that has a part of it.
fn left_by_failure(plan: &Plan) -> String {
    let (top, base) = (plan.layers[0].path.display(), plan.base.display());
    match plan.format {
        FormatKind::Raw => format!("{top} reads as before; the same command goes on"),
        _ => format!(
            "{top} reads as before; the same command goes on, and `vellum recover {base}` closes {base}"
        ),
    }
}

/// Stopping is safe at any time.
struct Stopping<'a>(&'a AtomicBool);

impl Steering for Stopping<'_> {
    fn go_on(&self, _bytes: u64) -> LocalFuture<'_, Result<()>> {
        let is_stopped = self.0.load(Ordering::Relaxed);
        Box::pin(std::future::ready(match is_stopped {
            true => Err(Error::new(ErrorKind::Closed, "stopped by a signal")),
            false => Ok(()),
        }))
    }

    fn pieces_at_once(&self) -> usize {
        PIECES_AT_ONCE
    }
}

/// Finds the base, and refuses what cannot be done, before anything changes.
async fn plan(path: &Path, options: &ImageOptions, wish: &Commit) -> Result<Plan> {
    let reading = ImageOptions { read_only: true, data_files: Vec::new(), ..options.clone() };
    let chain = open_image(path, &reading).await?;
    let plan = plan_of(&chain, None, wish.base.as_deref()).await?;
    refuse_moved(&chain)?;
    chain.close().await?;
    Ok(plan)
}

/// As above, of images that are open. `top` is the uppermost one whose contents are written; the one on top when not given.
pub(crate) async fn plan_of(chain: &Chain, top: Option<&Path>, base: Option<&Path>) -> Result<Plan> {
    let from = match top {
        Some(top) => depth_of(chain, top, 0)?,
        None => 0,
    };
    let depth = match base {
        Some(base) => depth_of(chain, base, from + 1)?,
        None if chain.members().count() > from + 1 => from + 1,
        None => {
            let path = &chain.member(from).path;
            return Err(Error::unsupported(format!(
                "{} has no backing image that could get its contents",
                path.display()
            )));
        }
    };
    let base = chain.member(depth);
    if base.is_snapshot {
        return Err(Error::unsupported(format!(
            "{} stands on a snapshot, which never changes: copy the disk with `vellum convert`",
            chain.member(depth - 1).path.display()
        )));
    }
    if Url::of_path(&base.path).is_some() {
        return Err(Error::unsupported(format!("{} is only read", base.path.display())));
    }
    let mut layers = Vec::new();
    for (index, member) in chain.members().take(depth).enumerate() {
        // The one that is open for writing knows its own.
        let has_snapshots = match index == 0 && !member.opened.disk.geometry().read_only {
            true => chain.has_snapshots().await?,
            false => !member.head.snapshots(&member.storage, Some(&member.storage)).await?.is_empty(),
        };
        if has_snapshots {
            return Err(Error::unsupported(format!(
                "{} has snapshots, which also read from {}: delete them first",
                member.path.display(),
                base.path.display()
            )));
        }
        layers.push(Layer {
            path: member.path.clone(),
            format: member.head.kind(),
            size: member.opened.disk.geometry().size,
            below: member.head.backing().map(|(name, format)| (name.to_owned(), format.map(str::to_owned))),
            pin: member.head.pin().cloned(),
        });
    }
    Ok(Plan {
        layers,
        from,
        base: base.path.clone(),
        format: base.head.kind(),
        base_size: base.opened.disk.geometry().size,
    })
}

/// How deep an image is that is at `least` or below.
fn depth_of(chain: &Chain, wanted: &Path, least: usize) -> Result<usize> {
    let canonical = wanted.canonicalize().context(|| format!("can't find {}", wanted.display()))?;
    let is_it = |path: &Path| path.canonicalize().is_ok_and(|path| path == canonical);
    let found = chain.members().skip(least).position(|member| is_it(&member.path));
    found.map(|at| at + least).ok_or_else(|| {
        let names: Vec<String> =
            chain.members().skip(least).map(|member| member.path.display().to_string()).collect();
        let above = chain.member(least.saturating_sub(1)).path.display();
        match names.is_empty() {
            true => Error::unsupported(format!("{above} has no backing image that could get its contents")),
            false => Error::invalid(format!(
                "{} is not below {above}, but {}",
                wanted.display(),
                names.join(" and ")
            )),
        }
    })
}

/// Refuses where other images read from what would change.
pub(crate) async fn refuse_others(plan: &Plan) -> Result<()> {
    let canonical = |path: &Path| path.canonicalize().context(|| format!("can't find {}", path.display()));
    let mut changing = vec![canonical(&plan.base)?];
    let mut own = Vec::new();
    for (index, layer) in plan.layers.iter().enumerate() {
        let path = canonical(&layer.path)?;
        if index > plan.from {
            changing.push(path.clone());
        }
        own.push(path);
    }
    let mut dirs: Vec<PathBuf> =
        changing.iter().chain(&own).filter_map(|path| path.parent().map(Path::to_owned)).collect();
    dirs.sort();
    dirs.dedup();
    let others = images_over(&dirs, &changing, &own).await?;
    if others.is_empty() {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Refused,
        format!(
            "other images also read from {}: {}. They would be useless: make them independent with `vellum flatten`, or use \
             --force",
            plan.base.display(),
            crate::clones_of::names(&others)
        ),
    ))
}

/// Makes the base large enough.
pub(crate) async fn enlarge_base(plan: &Plan, options: &ImageOptions) -> Result<()> {
    let size = plan.layers[plan.from].size;
    if size <= plan.base_size {
        return Ok(());
    }
    let grow = ResizeOptions {
        format: Some(plan.format),
        may_shrink: false,
        allow_dirs: options.allow_dirs.clone(),
        remote: options.remote.clone(),
        ..ResizeOptions::default()
    };
    resize(&plan.base, &grow, |_| Ok(size)).await.map(drop)
}

/// The base for writing, large enough.
async fn open_base(plan: &Plan, options: &ImageOptions) -> Result<Chain> {
    enlarge_base(plan, options).await?;
    let writing = ImageOptions { format: Some(plan.format), writes_direct: true, ..options.clone() };
    open_image(&plan.base, &writing).await
}

/// Records the format of the base in the image above it, where that names none. Guessed anew after the guest's own bytes have
/// come to a raw file, it could be another one, with names of files that the guest has chosen.
pub(crate) async fn say_format(plan: &mut Plan, options: &ImageOptions) -> Result<()> {
    let Some(layer) = plan.layers.last_mut() else { return Ok(()) };
    let Some((name, format @ None)) = &mut layer.below else { return Ok(()) };
    let writing = ImageOptions { format: Some(layer.format), ..options.clone() };
    let (storage, kind) = open_file(&layer.path, &writing).await?;
    let said = plan.format.to_string();
    let backing = NewBacking { name, format: Some(&said), size: None, pin: layer.pin.as_ref() };
    kind.format().set_backing(&storage, backing).await?; // commit point
    *format = Some(said);
    Ok(())
}

/// What proves the base to an image above it is taken out of that, or put back. An image that had none is left alone.
pub(crate) async fn put_pin(layer: &Layer, options: &ImageOptions, pin: Option<&Pin>) -> Result<()> {
    let Some((name, format)) = layer.below.as_ref().filter(|_| layer.pin.is_some()) else { return Ok(()) };
    let writing = ImageOptions { format: Some(layer.format), ..options.clone() };
    let (storage, kind) = open_file(&layer.path, &writing).await?;
    let format = format.as_deref();
    kind.format().set_backing(&storage, NewBacking { name, format, size: None, pin }).await
}

/// The images above the base record again what proves it: it is as it was.
pub(crate) async fn give_pins_back(plan: &Plan, options: &ImageOptions) -> Result<()> {
    for layer in &plan.layers {
        put_pin(layer, options, layer.pin.as_ref()).await?;
    }
    Ok(())
}

/// The image above those whose contents are in the base now names the base.
pub(crate) async fn skip_merged(plan: &Plan, name: &str, options: &ImageOptions) -> Result<()> {
    let above = &plan.layers[plan.from - 1];
    let writing = ImageOptions { format: Some(above.format), ..options.clone() };
    let (storage, kind) = open_file(&above.path, &writing).await?;
    let format = plan.format.to_string();
    let size = Some(plan.base_size.max(plan.layers[plan.from].size));
    kind.format().set_backing(&storage, NewBacking { name, format: Some(&format), size, pin: None }).await // commit point
}

/// An image without what is below it, for reading.
async fn alone(layer: &Layer, options: &ImageOptions) -> Result<Chain> {
    let options = ImageOptions {
        format: Some(layer.format),
        read_only: true,
        without_backing: true,
        data_files: Vec::new(),
        ..options.clone()
    };
    let chain = open_image(&layer.path, &options).await?;
    let now = chain.top().head.backing();
    if now != layer.below.as_ref().map(|(name, format)| (name.as_str(), format.as_deref())) {
        return Err(Error::new(
            ErrorKind::Changed,
            format!("{} has another backing image now: run the command again", layer.path.display()),
        ));
    }
    Ok(chain)
}
