//! Opening images from the user's options.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use vellum_core::{Error, ErrorKind, Result, SharedStorage};
use vellum_format::fast::FastMedium;
use vellum_format::image::FileGrowth;
use vellum_format::luks::Secrets;
use vellum_format::probe::{Guess, guess};
use vellum_format::{FormatKind, Prealloc};
use vellum_io::{File, OpenOptions, clock};
use vellum_layer::chain::{Step, being_written, guess_format, replayed};
use vellum_layer::hydrate::TapOptions;
use vellum_layer::{
    Chain, ChainOptions, Encrypted, FlashChoice, Opener, Purpose, Referrer, Templates, Trust,
};
use vellum_remote::nbd::{NbdTls, STATUSES_MAX};
use vellum_remote::{REMOTE_TIMEOUT_DEFAULT, RemoteOptions};

use crate::chunk_cache::CacheChoice;
use crate::host::{CountedPool, Host, HostOptions, check_new_name};

/// How remote images are asked for.
#[derive(Debug, Clone, Default)]
pub struct Remote {
    /// How long a request is held while the server does not answer.
    pub timeout: Option<Duration>,
    /// How exports of NBD servers are encrypted.
    pub nbd_tls: NbdTls,
    /// Their servers are asked what is stored, but not without end.
    pub is_bounded: bool,
}

/// How an image is opened.
#[derive(Debug, Clone, Default)]
pub struct ImageOptions {
    /// Its format; guessed when not given, but never for writing a raw disk.
    pub format: Option<FormatKind>,
    /// Nothing is written.
    pub read_only: bool,
    /// Read even while others write; only with `read_only`.
    pub force_share: bool,
    /// Past the page cache.
    pub direct: bool,
    /// What is written, past the page cache where its file system can do that.
    pub writes_direct: bool,
    /// What is written is never flushed: a crash of the machine may ruin the image.
    pub never_flushed: bool,
    /// This internal snapshot.
    pub snapshot: Option<String>,
    /// The image alone, without what it refers to below.
    pub without_backing: bool,
    /// Where references may lead, besides each image's own directory: directories, and prefixes of URLs.
    pub allow_dirs: Vec<PathBuf>,
    /// A base at a URL that proves nothing never changes: the user says so.
    pub trust_base: bool,
    /// How remote images are asked for.
    pub remote: Remote,
    /// Data files that images may have and write, because the user named them.
    pub data_files: Vec<PathBuf>,
    /// Whether space is prepared ahead of need while it is served.
    pub prealloc: Prealloc,
    /// Zones of a native image are emptied in quiet times.
    pub compaction: bool,
    /// Memory for the mappings of a qcow2 image and of those below it, in bytes; as it needs, within bounds,
    /// when not given.
    pub mapping_bytes_max: Option<u64>,
    /// Where what is fetched from stores and servers is kept on this host; where the environment says, when not given.
    pub chunk_cache: Option<CacheChoice>,
    /// The image records what proves those below, because it will have copies of them.
    pub pin_base: bool,
    /// The image at this depth of the chain (the number of images above it) is written as well: it gets what those above have.
    pub merges_into: Option<usize>,
    /// What an image that is written reads from below is seen, and copied.
    pub tap: Option<TapOptions>,
    /// As `tap`, where the image itself asks for copies.
    pub wished_tap: Option<TapOptions>,
    /// What opens encrypted images: each secret is tried on each of them.
    pub secrets: Arc<Secrets>,
    /// Which image must be encrypted, if the user has said that one is.
    pub must_be_encrypted: Option<Encrypted>,
    /// Images that are only read may be encrypted in a mode that is not written any more: they are to be copied into
    /// one that is.
    pub may_be_weak: bool,
    /// The flash cache over its disks.
    pub flash: Option<FlashChoice>,
    /// A fast medium that may have copies of units of images that name it.
    pub fast: Option<Arc<FastMedium>>,
    /// How the file grows.
    pub growth: FileGrowth,
    /// What images have on a fast medium alone, and what is not there, is a read error; images that are only read are opened
    /// without their medium, too.
    pub salvages: bool,
    /// Becomes true when a remote image is asked for.
    pub asks_remote: Arc<AtomicBool>,
    /// Where its long computations run, such as deriving a key.
    pub computing: CountedPool,
}

impl ImageOptions {
    /// For looking at an image.
    pub fn reading() -> Self {
        Self { read_only: true, ..Self::default() }
    }

    pub(crate) async fn host(&self) -> Result<Host> {
        if self.force_share && !self.read_only {
            return Err(Error::invalid(
                "--force-share needs read-only access: only one program at a time may write an image",
            ));
        }
        Ok(Host::new(HostOptions {
            direct: self.direct,
            writes_direct: self.writes_direct,
            never_flushed: self.never_flushed,
            force_share: self.force_share,
            asks_remote: self.asks_remote.clone(),
            remote: RemoteOptions {
                timeout: self.remote.timeout.unwrap_or(REMOTE_TIMEOUT_DEFAULT),
                nbd_tls: self.remote.nbd_tls.clone(),
                statuses_max: self.remote.is_bounded.then_some(STATUSES_MAX),
                allowed: Host::url_prefixes(&self.allow_dirs)?,
                cache: match self
                    .chunk_cache
                    .clone()
                    .map_or_else(CacheChoice::from_env, |said| Ok(Some(said)))?
                {
                    Some(choice) => choice.open().await?,
                    None => None,
                },
            },
        }))
    }
}

/// Opens an image and everything below it. Must be called on a worker.
///
/// # Errors
/// Those of [`Chain::open`].
pub async fn open_image(path: &Path, options: &ImageOptions) -> Result<Chain> {
    open_over(None, path, options).await
}

/// As [`open_image`]; the images below are shared with the other disks of the templates.
///
/// # Errors
/// Those of [`Chain::open`].
pub async fn open_over(
    templates: Option<&Arc<Templates>>,
    path: &Path,
    options: &ImageOptions,
) -> Result<Chain> {
    let chain = ChainOptions {
        format: options.format,
        read_only: options.read_only,
        snapshot: options.snapshot.clone(),
        without_backing: options.without_backing,
        gate: Host::gate(&options.allow_dirs, &options.data_files)?,
        offload: Arc::new(options.computing.clone()),
        prealloc: options.prealloc,
        compaction: options.compaction,
        mapping_bytes_max: options.mapping_bytes_max,
        trust_base: options.trust_base,
        // Copies of a base fit over no other one.
        pin_base: options.pin_base,
        merges_into: options.merges_into,
        clock: Some(clock()),
        templates: templates.cloned(),
        tap: options.tap.clone(),
        wished_tap: options.wished_tap.clone(),
        secrets: options.secrets.clone(),
        must_be_encrypted: options.must_be_encrypted,
        may_be_weak: options.may_be_weak,
        flash: options.flash.clone(),
        fast: options.fast.clone(),
        growth: options.growth,
        salvages: options.salvages,
    };
    let opened = Chain::open(&options.host().await?, path, &chain).await?;
    if !options.read_only && options.snapshot.is_none() {
        warn_of_losses(&opened).await;
        warn_if_unused(&opened);
    }
    if options.salvages {
        warn_if_missing(&opened);
    }
    Ok(opened)
}

/// Warns of costs of writing the image on top that the user did not ask for, and of images below that other programs refuse.
async fn warn_of_losses(chain: &Chain) {
    let top = chain.top();
    let name = top.path.display().to_string();
    for line in top.head.losses(&*top.storage, &name).await {
        tracing::warn!("{line}");
    }
    for below in chain.members().skip(1).filter(|below| below.is_replayed) {
        let path = below.path.display();
        tracing::warn!(
            "{path}, below {name}, was not closed. It is only read here, as it will be once it is recovered; other programs refuse it \
             until then: `vellum recover {path}`, when nothing uses it"
        );
    }
}

/// Warns of a fast medium that is named and not used: writing the image makes its copies void.
fn warn_if_unused(chain: &Chain) {
    let top = chain.top();
    let Some(named) = top.head.fast() else { return };
    let trouble = match chain.tier() {
        Some(tier) => tier.facts().trouble.map(|error| error.chain()),
        None => Some("it was not given: --fast PATH".to_owned()),
    };
    if let Some(trouble) = trouble {
        tracing::warn!(
            "{} has a fast medium, last seen at {}, which is not used ({trouble}). The first write makes the copies there void",
            top.path.display(),
            named.name
        );
    }
}

/// Warns of what a fast medium alone should have, and has not.
fn warn_if_missing(chain: &Chain) {
    let Some(facts) = chain.tier().map(|tier| tier.facts()).filter(|facts| facts.missing > 0) else { return };
    // That what is left of a medium is not written is no reason.
    let trouble = facts.trouble.filter(|error| error.kind() != ErrorKind::ReadOnly);
    let why = trouble.map(|error| format!(" ({})", error.chain())).unwrap_or_default();
    tracing::warn!(
        "{}: {} units ({} bytes) are on its fast medium alone, and are not there: reads of them are errors{why}",
        chain.top().path.display(),
        facts.missing,
        facts.missing.saturating_mul(facts.unit_bytes)
    );
}

/// One image file, as it is found.
pub struct Look {
    /// The file, open for reading.
    pub storage: SharedStorage,
    /// Its format: the stated one, else the probed one.
    pub format: Guess,
    trust: Result<Trust>,
}

impl Look {
    /// What is in it, once its journal is replayed in memory where that must be; nothing when another program
    /// writes it.
    ///
    /// # Errors
    /// Those of the recovery.
    pub async fn replayed(&self, host: &Host, step: &Step) -> Result<Option<SharedStorage>> {
        match self.format {
            Guess::Known(kind) => {
                replayed(host, &step.canonical, &step.path, self.storage.clone(), kind).await
            }
            Guess::Foreign(_) => Ok(Some(self.storage.clone())),
        }
    }

    /// What the gate needs to know of it before a reference in it is followed.
    ///
    /// # Errors
    /// `Refused` when its name and its content disagree, `Unsupported` for a format that is not read.
    pub fn referrer<'a>(&self, step: &'a Step) -> Result<Referrer<'a>> {
        Ok(step.referrer(&self.storage, self.trust.clone()?))
    }
}

/// Inspects one image file of any kind: also one whose name and content disagree, and one whose format cannot
/// be read.
///
/// # Errors
/// What opening and reading it say.
pub async fn look_at(host: &Host, step: &Step) -> Result<Look> {
    let Step { path, canonical, format, .. } = step;
    let storage = host.open(canonical, path, Purpose::Read).await?;
    let (format, trust) = match *format {
        Some(format) => (Guess::Known(format), Ok(Trust::Declared)),
        None => match guess(&*storage).await? {
            Guess::Known(kind) => (Guess::Known(kind), Trust::of(&[path, canonical], kind)),
            Guess::Foreign(foreign) => {
                let refusal = foreign.refusal(storage.name());
                (Guess::Foreign(foreign), Err(refusal))
            }
        },
    };
    Ok(Look { storage, format, trust })
}

/// Opens one image file, without what it refers to, and returns its format.
///
/// # Errors
/// What opening and reading its first bytes say.
pub async fn open_file(path: &Path, options: &ImageOptions) -> Result<(SharedStorage, FormatKind)> {
    let host = options.host().await?;
    let purpose = if options.read_only { Purpose::Read } else { Purpose::Write };
    let canonical = host.canonical(path).await?;
    let storage = host.open(&canonical, path, purpose).await?;
    let format = match options.format.or_else(|| host.stated_format(&canonical)) {
        Some(format) => format,
        None => guess_format(&*storage, path, &canonical).await?.0,
    };
    if options.must_be_encrypted == Some(Encrypted::Top) {
        Encrypted::Top.check(path, format.format().read(&*storage).await?.is_encrypted())?;
    }
    Ok((storage, format))
}

/// As above, for reading the content: an image that was not closed reads as it will once it is recovered.
///
/// # Errors
/// Those of [`open_file`] and of the recovery; `Unsupported` when another program writes it just now.
pub async fn open_file_replayed(path: &Path, options: &ImageOptions) -> Result<(SharedStorage, FormatKind)> {
    let (storage, format) = open_file(path, options).await?;
    let host = options.host().await?;
    let read = replayed(&host, &host.canonical(path).await?, path, storage, format).await?;
    Ok((read.ok_or_else(|| being_written(path))?, format))
}

/// A file to be filled: created if it does not exist, else opened. The caller replaces its old content.
///
/// # Errors
/// `Locked` when another program has it open; `Unsupported` for a name that is not a file's.
pub async fn new_file(path: &Path, never_flushed: bool) -> Result<Arc<File>> {
    check_new_name(path)?;
    let options = OpenOptions { never_flushed, ..OpenOptions::writing() };
    // One that is there is opened first: where this is dropped meanwhile, nothing is created once it was removed.
    match File::open(path, options).await {
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        opened => return opened,
    }
    match File::create_new(path, options).await {
        Err(error) if path.exists() => match File::open(path, options).await {
            Err(second) if second.kind() == ErrorKind::NotFound => Err(error),
            opened => opened,
        },
        created => created,
    }
}

#[cfg(test)]
mod tests {
    use std::task::{Context, Waker};

    use vellum_io::{Draft, IoMode, run, unblock};

    use super::*;

    /// What is made under a draft's name may be dropped at any moment, as when the user stops the program. The draft is
    /// removed then, and nothing that is still at work makes it again.
    #[test]
    fn a_draft_that_is_given_up_stays_away() {
        let dir = std::env::temp_dir().join(format!("vellum-given-up-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("a directory");
        run(IoMode::Threads, async || {
            for turn in 0..300 {
                let draft =
                    Draft::begin(dir.join("target")).await.expect("a draft").expect("in a directory of ours");
                let path = draft.path().to_owned();
                let mut making = Box::pin(new_file(&path, false));
                let _ = making.as_mut().poll(&mut Context::from_waker(Waker::noop()));
                drop(making);
                draft.discard().expect("it is there");
                // A later job of the same threads.
                unblock(|| std::thread::sleep(Duration::from_micros(300))).await;
                assert!(!path.exists(), "turn {turn}: it came back");
            }
        })
        .expect("a worker");
        std::fs::remove_dir_all(&dir).expect("our own directory");
    }
}
