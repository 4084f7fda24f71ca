//! Information about an image file and the images below it: also about one that another program writes, one
//! whose name and content disagree, one that is encrypted, and one whose format cannot be read.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use vellum_core::pin::Pin;
use vellum_core::{Context, ImageOffset, Result, Storage, Url};
use vellum_format::SnapshotKey;
use vellum_format::foreign::Foreign;
use vellum_format::image::{Fact, Head, Snapshot};
use vellum_format::probe::Guess;
use vellum_io::unblock_at;
use vellum_layer::chain::{Backing, Step, WayDown, being_written};
use vellum_remote::nbd::STATUSES_MAX;

use crate::host::{Host, is_nbd};
use crate::image::{ImageOptions, Look, look_at};

/// Information about one image.
pub struct ImageFacts {
    /// The path as it was requested, or as it is in the image above.
    pub path: PathBuf,
    /// Its format.
    pub format: Guess,
    /// How long the file is, in bytes.
    pub file_len: u64,
    /// Space the file takes, in bytes. Not known of an export whose server says too little at a time.
    pub actual_size: Option<u64>,
    /// The size of the disk, in bytes. Not known of all formats that are not read.
    pub virtual_size: Option<u64>,
    /// The facts from its header, if its format can be read.
    pub head: Option<Box<dyn Head>>,
    /// The facts that only its format has, under QEMU's names where there are any.
    pub specifics: Vec<(&'static str, Fact)>,
    /// Its snapshots; of some formats none while it is written.
    pub snapshots: Vec<Snapshot>,
    /// The snapshot of it that the image above stands on; nothing, where that is its disk.
    pub snapshot: Option<SnapshotKey>,
    /// Another program has it open for writing.
    pub is_being_written: bool,
}

/// Inspects an image, and with `with_chain` all images below it. Must be called on a worker.
///
/// # Errors
/// What opening and reading say; `Corrupt` for a chain that is a loop; `Refused` for a reference that is not
/// allowed; each names the file and its depth.
pub async fn inspect(path: &Path, options: &ImageOptions, with_chain: bool) -> Result<Vec<ImageFacts>> {
    let (host, gate) = (options.host().await?, Host::gate(&options.allow_dirs, &[])?);
    let mut images: Vec<ImageFacts> = Vec::new();
    let (mut way, top) = WayDown::begin(&host, &gate, path, options.format).await?;
    let mut next = Some(top);
    while let Some(step) = next.take() {
        let describe = |error| step.describe(error);
        let (facts, look) = ImageFacts::of(&host, &step).await.map_err(describe)?;
        // An image that refers to nothing is described whether or not its name agrees with its content.
        if let Some(head) = facts.head.as_deref().filter(|head| with_chain && head.backing().is_some()) {
            let referrer = look.referrer(&step).map_err(describe)?;
            next = way.next_below(&step, referrer, head).await?;
        }
        images.push(facts);
    }
    Ok(images)
}

/// How long the disk below an image is, in bytes, where all of it shows. It is in the headers of the two, so no secret is
/// needed where one of them is encrypted.
pub(crate) async fn len_below(path: &Path, options: &ImageOptions) -> Result<Option<u64>> {
    let (host, gate) = (options.host().await?, Host::gate(&options.allow_dirs, &[])?);
    let (mut way, top) = WayDown::begin(&host, &gate, path, options.format).await?;
    let (facts, look) = ImageFacts::of(&host, &top).await.map_err(|error| top.describe(error))?;
    let shows = |head: &&dyn Head| head.shows_all_below() && head.backing().is_some();
    let Some(head) = facts.head.as_deref().filter(shows) else { return Ok(None) };
    let Some(below) = way.next_below(&top, look.referrer(&top)?, head).await? else { return Ok(None) };
    let found = async {
        let (facts, look) = ImageFacts::of(&host, &below).await?;
        look.referrer(&below)?;
        // A snapshot has the length that it had when it was made.
        if below.snapshot.is_some() {
            return Ok(facts.virtual_size);
        }
        let Guess::Known(kind) = look.format else { return Ok(None) };
        let storage = look.replayed(&host, &below).await?.ok_or_else(|| being_written(&below.path))?;
        Ok(Some(kind.format().read(&*storage).await?.size()))
    };
    found.await.map_err(|error| below.describe(error))
}

/// How much of it is data, if the storage says so in the end.
async fn actual_size(storage: &dyn Storage) -> Result<Option<u64>> {
    let (mut at, mut data, mut asked) = (ImageOffset::ZERO, 0, 0);
    while at.bytes() < storage.len() {
        if asked == STATUSES_MAX {
            tracing::warn!(
                "{}: how much of it is data is not known: its server was asked {asked} times, and has told of {at} of {} bytes",
                storage.name(),
                storage.len()
            );
            return Ok(None);
        }
        asked += 1;
        let runs = storage.runs(at.span(storage.len() - at.bytes())).await?;
        let Some(last) = runs.last() else { break };
        at = last.span.end();
        data += runs.iter().filter(|run| run.is_data).map(|run| run.span.len()).sum::<u64>();
    }
    Ok(Some(data))
}

impl ImageFacts {
    async fn of(host: &Host, step: &Step) -> Result<(Self, Look)> {
        let look = look_at(host, step).await?;
        let storage = &look.storage;
        let actual_size = match Url::of_path(&step.canonical) {
            Some(Ok(url)) if is_nbd(&url) => actual_size(&**storage).await?,
            Some(_) => Some(storage.len()),
            None => {
                let canonical = step.canonical.clone();
                let metadata = unblock_at(&step.canonical, move || std::fs::metadata(canonical)).await;
                Some(metadata.context(|| format!("can't stat {}", step.path.display()))?.blocks() * 512)
            }
        };
        let head = match look.format {
            Guess::Known(kind) => Some(kind.format().read(&**storage).await?),
            Guess::Foreign(_) => None,
        };
        let specifics = match &head {
            Some(head) => head.facts(&**storage).await?,
            None => Vec::new(),
        };
        // An image that was not closed is described as recovery will leave it.
        let within = look.replayed(host, step).await?;
        let snapshots = match &head {
            Some(head) => head.snapshots(storage, within.as_ref()).await?,
            None => Vec::new(),
        };
        let facts = Self {
            path: step.path.clone(),
            format: look.format.clone(),
            file_len: storage.len(),
            actual_size,
            virtual_size: match (&head, &look.format, &step.snapshot) {
                (Some(_), _, Some(key)) => {
                    snapshots.iter().find(|one| one.id == key.id.to_string()).map(|one| one.size)
                }
                (Some(head), _, None) => Some(head.size()),
                (None, Guess::Foreign(foreign), _) => foreign.virtual_size,
                (None, Guess::Known(_), _) => None,
            },
            head,
            specifics,
            snapshots,
            snapshot: step.snapshot.clone(),
            is_being_written: within.is_none(),
        };
        Ok((facts, look))
    }

    /// Whether the last writer has not closed it.
    pub fn is_dirty(&self) -> bool {
        self.head.as_ref().is_some_and(|head| head.was_left_open())
    }

    /// Whether the guest's data is encrypted.
    pub fn is_encrypted(&self) -> bool {
        self.head.as_ref().is_some_and(|head| head.is_encrypted())
    }

    /// How much is allocated at once, in bytes.
    pub fn cluster_size(&self) -> Option<u64> {
        self.head.as_ref()?.cluster_size()
    }

    /// The name of the image below, and its format, as they stand in this one.
    pub fn backing(&self) -> Option<(&str, Option<&str>)> {
        self.head.as_ref()?.backing()
    }

    /// The format of the image below, as recorded in this one.
    pub fn backing_format(&self) -> Option<&str> {
        self.head.as_ref()?.backing_format()
    }

    /// What proves that the images below are the ones that this image was made over, if it records that.
    pub fn pin(&self) -> Option<&Pin> {
        self.head.as_ref()?.pin()
    }

    /// The backing image's name as this program will look for it.
    pub fn full_backing(&self) -> Option<String> {
        let (name, _) = self.backing()?;
        let found = Backing::of(&self.path, self.head.as_deref()?);
        Some(match found {
            Ok(Some(Backing { path, snapshot, .. })) => {
                let path = path.strip_prefix("./").unwrap_or(&path).display().to_string();
                match snapshot {
                    Some(SnapshotKey { name, id }) => format!("{path}@{name}#{id}"),
                    None => path,
                }
            }
            _ => name.to_owned(),
        })
    }

    /// The format, when it is one that is not read.
    pub fn foreign(&self) -> Option<&Foreign> {
        match &self.format {
            Guess::Foreign(foreign) => Some(foreign),
            Guess::Known(_) => None,
        }
    }

    /// The format's name, as `qemu-img` has it.
    pub fn format_name(&self) -> String {
        match &self.format {
            Guess::Foreign(foreign) => foreign.qemu_name.to_owned(),
            Guess::Known(kind) => kind.to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use vellum_core::{ErrorKind, MemoryStorage};
    use vellum_format::qcow2::{CreateOptions, create};
    use vellum_io::{IoMode, run};
    use vellum_layer::chain::DEPTH_MAX;

    use super::*;

    async fn put(dir: &Path, name: &str, backing: Option<String>) {
        let storage = MemoryStorage::new(name);
        let backing = backing.map(|name| (name, Some("qcow2".to_owned())));
        let options =
            CreateOptions { size: 1 << 20, cluster_size: 512, backing, ..CreateOptions::without_journal() };
        create(&*storage, None, &options).await.expect("a new image");
        std::fs::write(dir.join(name), storage.content().to_vec()).expect("the file");
    }

    #[test]
    fn a_chain_is_as_long_as_one_that_can_be_opened() {
        let dir = std::env::temp_dir().join(format!("vellum-inspect-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("a directory");
        let longest = run(IoMode::Threads, async || {
            for index in 0..=DEPTH_MAX {
                let below = (index < DEPTH_MAX).then(|| format!("{}.qcow2", index + 1));
                put(&dir, &format!("{index}.qcow2"), below).await;
            }
            let options = ImageOptions::reading();
            let too_long = inspect(&dir.join("0.qcow2"), &options, true).await.err();
            (too_long, inspect(&dir.join("1.qcow2"), &options, true).await.map(|images| images.len()))
        });
        std::fs::remove_dir_all(&dir).expect("its own files");
        let (too_long, longest) = longest.expect("a worker");
        let too_long = too_long.expect("it is refused");
        assert_eq!(too_long.kind(), ErrorKind::Unsupported, "{}", too_long.chain());
        assert_eq!(longest.expect("it is described"), DEPTH_MAX);
    }
}
