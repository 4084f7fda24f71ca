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
use vellum_core::{
    Buffer, Context, Error, ErrorKind, GuestOffset, GuestSpan, LocalFuture, Place, Result, SharedDisk, Url,
    WriteFlags, ZeroFlags,
};
use vellum_format::FormatKind;
use vellum_format::image::NewBacking;
use vellum_layer::Chain;

use crate::clones_of::images_over;
use crate::closed::{ResizeOptions, resize};
use crate::create::refuse_moved;
use crate::image::{ImageOptions, open_file, open_image};
use crate::signals::Stop;

/// Data is moved in pieces of this many bytes.
const PIECE: u64 = 1 << 20;
/// And zeros in pieces of this many.
const ZEROS: u64 = 64 << 20;

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
}

/// An image above the base.
struct Layer {
    path: PathBuf,
    format: FormatKind,
    /// As it names the image below it.
    below: Option<(String, Option<String>)>,
    pin: Option<Pin>,
}

/// The way down to the base.
struct Plan {
    layers: Vec<Layer>,
    base: PathBuf,
    format: FormatKind,
    size: u64,
    base_size: u64,
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
            for layer in &plan.layers {
                put_pin(layer, options, layer.pin.as_ref()).await?;
            }
            return Err(error);
        }
    };
    let copying = Copying {
        layers: layers.iter().map(|chain| chain.disk().clone()).collect(),
        base: base.disk().clone(),
        stop: &stop.flag,
    };
    let copied = copying.all(plan.size, progress).await;
    let closed = base.close().await;
    for chain in &layers {
        chain.close().await?;
    }
    let bytes_written = copied.and_then(|bytes| closed.map(|()| bytes))?;
    let between = plan.layers.into_iter().skip(1).map(|layer| layer.path).collect();
    Ok(Committed { base: plan.base, between, bytes_written })
}

/// Finds the base, and refuses what cannot be done, before anything changes.
async fn plan(path: &Path, options: &ImageOptions, wish: &Commit) -> Result<Plan> {
    let reading = ImageOptions { read_only: true, data_files: Vec::new(), ..options.clone() };
    let chain = open_image(path, &reading).await?;
    let depth = depth_of_base(path, &chain, wish.base.as_deref())?;
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
    for member in chain.members().take(depth) {
        if !member.head.snapshots(&member.storage, Some(&member.storage)).await?.is_empty() {
            return Err(Error::unsupported(format!(
                "{} has snapshots, which also read from {}: delete them first",
                member.path.display(),
                base.path.display()
            )));
        }
        layers.push(Layer {
            path: member.path.clone(),
            format: member.head.kind(),
            below: member.head.backing().map(|(name, format)| (name.to_owned(), format.map(str::to_owned))),
            pin: member.head.pin().cloned(),
        });
    }
    refuse_moved(&chain)?;
    let plan = Plan {
        layers,
        base: base.path.clone(),
        format: base.head.kind(),
        size: chain.disk().geometry().size,
        base_size: base.opened.disk.geometry().size,
    };
    chain.close().await?;
    Ok(plan)
}

fn depth_of_base(path: &Path, chain: &Chain, wanted: Option<&Path>) -> Result<usize> {
    let has_below = chain.members().nth(1).is_some();
    let Some(wanted) = wanted.filter(|_| has_below) else {
        return match has_below {
            true => Ok(1),
            false => Err(Error::unsupported(format!(
                "{} has no backing image that could get its contents",
                path.display()
            ))),
        };
    };
    let canonical = wanted.canonicalize().context(|| format!("can't find {}", wanted.display()))?;
    let is_it = |path: &Path| path.canonicalize().is_ok_and(|path| path == canonical);
    chain.members().skip(1).position(|member| is_it(&member.path)).map(|at| at + 1).ok_or_else(|| {
        let names: Vec<String> =
            chain.members().skip(1).map(|member| member.path.display().to_string()).collect();
        Error::invalid(format!(
            "{} is not below {}, but {}",
            wanted.display(),
            path.display(),
            names.join(" and ")
        ))
    })
}

/// Refuses where other images read from what would change.
async fn refuse_others(plan: &Plan) -> Result<()> {
    let canonical = |path: &Path| path.canonicalize().context(|| format!("can't find {}", path.display()));
    let mut changing = vec![canonical(&plan.base)?];
    let mut own = Vec::new();
    for (index, layer) in plan.layers.iter().enumerate() {
        let path = canonical(&layer.path)?;
        if index > 0 {
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

/// The base for writing, large enough.
async fn open_base(plan: &Plan, options: &ImageOptions) -> Result<Chain> {
    if plan.size > plan.base_size {
        let grow = ResizeOptions {
            format: Some(plan.format),
            may_shrink: false,
            allow_dirs: options.allow_dirs.clone(),
            remote_timeout: options.remote_timeout,
            ..ResizeOptions::default()
        };
        resize(&plan.base, &grow, |_| Ok(plan.size)).await?;
    }
    let writing = ImageOptions { format: Some(plan.format), ..options.clone() };
    open_image(&plan.base, &writing).await
}

/// Records the format of the base in the image above it, where that names none. Guessed anew after the guest's own bytes have
/// come to a raw file, it could be another one, with names of files that the guest has chosen.
async fn say_format(plan: &mut Plan, options: &ImageOptions) -> Result<()> {
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
async fn put_pin(layer: &Layer, options: &ImageOptions, pin: Option<&Pin>) -> Result<()> {
    let Some((name, format)) = layer.below.as_ref().filter(|_| layer.pin.is_some()) else { return Ok(()) };
    let writing = ImageOptions { format: Some(layer.format), ..options.clone() };
    let (storage, kind) = open_file(&layer.path, &writing).await?;
    let format = format.as_deref();
    kind.format().set_backing(&storage, NewBacking { name, format, size: None, pin }).await
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

/// The disks between which bytes move.
struct Copying<'a> {
    /// From the top down, each without what is below it.
    layers: Vec<SharedDisk>,
    base: SharedDisk,
    stop: &'a AtomicBool,
}

impl Copying<'_> {
    async fn all(&self, size: u64, progress: &dyn Fn(u64, u64)) -> Result<u64> {
        let (mut rest, mut written) = (GuestOffset::ZERO.span(size), 0);
        while !rest.is_empty() {
            let now;
            (now, rest) = rest.split_at(ZEROS);
            written += self.run(0, now).await?;
            progress(size, now.end().bytes());
        }
        self.base.flush().await.context(|| "can't flush the backing image")?;
        Ok(written)
    }

    /// What this layer and those below it have of a run. Returns how many bytes of data were written.
    fn run(&self, depth: usize, run: GuestSpan) -> LocalFuture<'_, Result<u64>> {
        Box::pin(async move {
            let Some(layer) = self.layers.get(depth) else { return Ok(0) }; // the base has it
            let (mut rest, behind) = {
                let within = run.intersect(GuestOffset::ZERO.span(layer.geometry().size));
                (within, GuestSpan::between(within.end().max(run.start()), run.end()))
            };
            let mut written = 0;
            while !rest.is_empty() {
                let extents = layer.map(rest).await?;
                for extent in &extents {
                    written += match extent.place {
                        Place::Below => self.run(depth + 1, extent.span).await?,
                        Place::Zero { .. } => self.zeros(extent.span).await?,
                        Place::Data { .. } | Place::Compressed => self.data(layer, extent.span).await?,
                    };
                }
                let done = extents.last().map_or(rest.end(), |extent| extent.span.end());
                rest = GuestSpan::between(done, rest.end());
            }
            // A larger image reads zeros behind the end of the one below it.
            written += self.zeros(behind).await?;
            Ok(written)
        })
    }

    async fn zeros(&self, run: GuestSpan) -> Result<u64> {
        let mut rest = run;
        while !rest.is_empty() {
            self.go_on()?;
            let now;
            (now, rest) = rest.split_at(ZEROS);
            let flags = ZeroFlags { may_unmap: true, ..ZeroFlags::default() };
            self.base
                .write_zeroes(now, flags)
                .await
                .context(|| format!("can't write zeros at {}", now.start()))?;
        }
        Ok(0)
    }

    async fn data(&self, layer: &SharedDisk, run: GuestSpan) -> Result<u64> {
        let mut rest = run;
        while !rest.is_empty() {
            self.go_on()?;
            let now;
            (now, rest) = rest.split_at(PIECE - rest.start().bytes() % PIECE);
            let bytes = usize::try_from(now.len()).expect("a piece");
            let data = layer
                .read(now.start(), Buffer::for_overwrite(bytes))
                .await
                .context(|| format!("can't read {bytes} bytes at {}", now.start()))?;
            self.base
                .write(now.start(), data, WriteFlags::default())
                .await
                .context(|| format!("can't write {bytes} bytes at {}", now.start()))?;
        }
        Ok(run.len())
    }

    /// Stopping is safe at any time.
    fn go_on(&self) -> Result<()> {
        match self.stop.load(Ordering::Relaxed) {
            true => Err(Error::new(ErrorKind::Closed, "stopped by a signal")),
            false => Ok(()),
        }
    }
}
