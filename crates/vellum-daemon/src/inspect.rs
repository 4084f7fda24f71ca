//! Information about an image file and the images below it: also about one that another program writes, one
//! whose name and content disagree, one that is encrypted, and one whose format cannot be read.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use vellum_core::{Context, Error, Result};
use vellum_format::foreign::Foreign;
use vellum_format::image::{Fact, Head, Snapshot};
use vellum_format::probe::Guess;
use vellum_layer::Gate;
use vellum_layer::chain::DEPTH_MAX;

use crate::host::Host;
use crate::image::{ImageOptions, Look, look_at};

/// Information about one image.
pub struct ImageFacts {
    /// The path as it was requested, or as it is in the image above.
    pub path: PathBuf,
    /// Its format.
    pub format: Guess,
    /// How long the file is, in bytes.
    pub file_len: u64,
    /// Space the file takes, in bytes.
    pub actual_size: u64,
    /// The size of the disk, in bytes. Not known of all formats that are not read.
    pub virtual_size: Option<u64>,
    /// The facts from its header, if its format can be read.
    pub head: Option<Box<dyn Head>>,
    /// The facts that only its format has, under QEMU's names where there are any.
    pub specifics: Vec<(&'static str, Fact)>,
    /// Its snapshots; of some formats none while it is written.
    pub snapshots: Vec<Snapshot>,
    /// Another program has it open for writing.
    pub is_being_written: bool,
}

/// Inspects an image, and with `with_chain` all images below it. Must be called on a worker.
///
/// # Errors
/// What opening and reading say; `Corrupt` for a chain that is a loop; `Refused` for a reference that is not
/// allowed.
pub async fn inspect(path: &Path, options: &ImageOptions, with_chain: bool) -> Result<Vec<ImageFacts>> {
    let mut options = options.clone();
    let gate = Host::gate(&options.allow_dirs, &[])?;
    let mut images: Vec<ImageFacts> = Vec::new();
    let mut seen: Vec<PathBuf> = Vec::new();
    let mut next = Some(path.to_owned());
    while let Some(path) = next.take() {
        let found = ImageFacts::of(&path, &options).await.map_err(|error| match images.len() {
            0 => error,
            depth => error.context(format!("can't open backing image {} (depth {depth})", path.display())),
        });
        let (facts, look) = found?;
        seen.push(look.canonical.clone());
        if let (true, Some((name, format))) = (with_chain, facts.backing()) {
            let path = Gate::resolve(&facts.path, name)?;
            let target = path.canonicalize().context(|| format!("can't open {}", path.display()))?;
            look.may_refer_to(&gate, &target)?;
            if seen.contains(&target) {
                return Err(Error::corrupt(format!(
                    "the backing chain is a loop: {} appears twice",
                    path.display()
                )));
            }
            if images.len() >= DEPTH_MAX {
                return Err(Error::unsupported(format!(
                    "the backing chain is longer than {DEPTH_MAX} images"
                )));
            }
            options.format = format.map(str::parse).transpose()?;
            next = Some(path);
        }
        images.push(facts);
    }
    Ok(images)
}

impl ImageFacts {
    async fn of(path: &Path, options: &ImageOptions) -> Result<(Self, Look)> {
        let look = look_at(path, options).await?;
        let storage = &look.storage;
        let metadata = std::fs::metadata(path).context(|| format!("can't stat {}", path.display()))?;
        let head = match look.format {
            Guess::Known(kind) => Some(kind.format().look(&**storage).await?),
            Guess::Foreign(_) => None,
        };
        let specifics = match &head {
            Some(head) => head.facts(&**storage).await?,
            None => Vec::new(),
        };
        // An image that was not closed is described as recovery will leave it.
        let within = look.replayed(path, options).await?;
        let snapshots = match &head {
            Some(head) => head.snapshots(storage, within.as_ref()).await?,
            None => Vec::new(),
        };
        let facts = Self {
            path: path.to_owned(),
            format: look.format.clone(),
            file_len: storage.len(),
            actual_size: metadata.blocks() * 512,
            virtual_size: match (&head, &look.format) {
                (Some(head), _) => Some(head.size()),
                (None, Guess::Foreign(foreign)) => foreign.virtual_size,
                (None, Guess::Known(_)) => None,
            },
            head,
            specifics,
            snapshots,
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

    /// The backing image's name as this program will look for it.
    pub fn full_backing(&self) -> Option<String> {
        let (name, _) = self.backing()?;
        Some(match Gate::resolve(&self.path, name) {
            Ok(path) => path.strip_prefix("./").unwrap_or(&path).display().to_string(),
            Err(_) => name.to_owned(),
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
