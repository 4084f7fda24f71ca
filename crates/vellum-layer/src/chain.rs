//! The copy-on-write chain: an image, its backing image, that one's, and so on down.
//!
//! ```text
//!   top      overlay.qcow2 ── reads and writes          opened last, over the others
//!   below    middle.qcow2  ── reads only
//!   below    base.raw      ── reads only                 found first by following the names down
//! ```
//!
//! A format knows only that there may be a disk below; which one, is settled here, once, when the chain is opened: the
//! names are followed down through the headers, each asked of the [`Gate`], then the disks are made from the bottom up.
//!
//! 1. No file is opened that the gate did not let through, and no image twice in one chain (a loop).
//! 2. Only the top image is opened for writing.
//! 3. The memory for mappings is shared out, so that a long chain takes no more than a short one.
//!
//! `change` has what makes its disk another one: a snapshot that it goes back to, another size.

mod change;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use vellum_core::{
    Clock, Context, Error, ErrorKind, HostTally, Inline, LocalFuture, Offload, Result, SharedDisk,
    SharedStorage,
};
use vellum_format::native::{self, Native, Superblock, Superblocks};
use vellum_format::qcow2::open::MAPPING_BYTES_DEFAULT;
use vellum_format::qcow2::{self, Header, Qcow2};
use vellum_format::{FormatKind, Prealloc, Raw, probe};

use crate::gate::Gate;

/// Images in one chain, at most.
pub const DEPTH_MAX: usize = 256;

/// What a file is opened for; it decides what others may do with it meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Reading: nobody may write.
    Read,
    /// Writing: nobody else may write, and nobody may count on its content.
    Write,
}

/// Opens files for the chain: the only place that knows where they are.
pub trait Opener {
    /// The file's own path: absolute, links followed.
    fn canonical(&self, path: &Path) -> Result<PathBuf>;

    /// Opens the file at a canonical path. Its name in messages is `name`.
    fn open<'a>(
        &'a self,
        canonical: &'a Path,
        name: &'a Path,
        purpose: Purpose,
    ) -> LocalFuture<'a, Result<SharedStorage>>;
}

/// How a chain is opened.
#[derive(Clone)]
pub struct ChainOptions {
    /// The format of the top image; guessed when it is not given.
    pub format: Option<FormatKind>,
    /// Nothing is written.
    pub read_only: bool,
    /// Open this internal snapshot of the top image.
    pub snapshot: Option<String>,
    /// Open the top image alone, as if it had no backing file.
    pub without_backing: bool,
    /// Which files may be referred to.
    pub gate: Gate,
    /// Memory for the mappings of the whole chain, in bytes.
    pub mapping_bytes_max: u64,
    /// Where long computations run.
    pub offload: Arc<dyn Offload>,
    /// Whether the top image prepares space ahead of need.
    pub prealloc: Prealloc,
    /// Zones of a native image are emptied in quiet times.
    pub compaction: bool,
    /// With it those who flush an image wait for one another a little, where that lets them share.
    pub clock: Option<Arc<dyn Clock>>,
}

impl Default for ChainOptions {
    fn default() -> Self {
        Self {
            format: None,
            read_only: false,
            snapshot: None,
            without_backing: false,
            gate: Gate::default(),
            mapping_bytes_max: MAPPING_BYTES_DEFAULT,
            offload: Arc::new(Inline),
            prealloc: Prealloc::default(),
            compaction: false,
            clock: None,
        }
    }
}

/// One image of a chain.
pub struct Member {
    /// The path as it was asked for, or as the image above has it.
    pub path: PathBuf,
    /// Its format.
    pub format: FormatKind,
    /// Its file.
    pub storage: SharedStorage,
    /// Its header, when it is qcow2.
    pub header: Option<Header>,
    /// Its superblock, when it is of the native format.
    pub superblock: Option<Superblock>,
    /// Its external data file: path and file.
    pub data_file: Option<(PathBuf, SharedStorage)>,
    /// The disk it makes, over those below.
    pub disk: SharedDisk,
    /// The same, when it is of the native format.
    pub native: Option<Arc<Native>>,
}

/// An open chain. The top image is the first member.
pub struct Chain {
    /// The images, from the top down.
    pub members: Vec<Member>,
    /// What the top image costs the host.
    pub top_tally: HostTally,
    /// What the images below cost the host.
    pub below_tally: HostTally,
    options: ChainOptions,
    /// Memory for the mappings of one image, in bytes.
    mapping_share: u64,
    /// Why the disk on top is closed, when it could not be opened again.
    gone: Option<Error>,
}

/// An image that was found on the way down and has no disk yet.
struct Found {
    path: PathBuf,
    canonical: PathBuf,
    format: FormatKind,
    storage: SharedStorage,
    header: Option<Header>,
    superblock: Option<Superblock>,
    data_file: Option<(PathBuf, SharedStorage)>,
}

impl Found {
    /// The name of the image below, and its format, as they stand in this one.
    fn backing(&self) -> Option<(&str, Option<&str>)> {
        if let Some(header) = &self.header {
            return header.backing_file().map(|name| (name, header.backing_format()));
        }
        let base = self.superblock.as_ref()?.base()?;
        Some((&base.name, base.format.as_deref()))
    }
}

impl Chain {
    /// Opens the image and everything below it.
    ///
    /// # Errors
    /// `Refused` for a reference that the gate does not allow, `Corrupt` for a loop or a damaged image, `Invalid` when a
    /// disk of unknown format is to be written, and what the files say; each names the file and its depth.
    pub async fn open(opener: &dyn Opener, path: &Path, options: &ChainOptions) -> Result<Self> {
        let found = find(opener, path, options).await?;
        let (top_tally, below_tally) = (HostTally::default(), HostTally::default());
        let mapping_share = (options.mapping_bytes_max / found.len() as u64).max(1 << 20);
        let mut members: Vec<Member> = Vec::with_capacity(found.len());
        for (depth, image) in found.into_iter().enumerate().rev() {
            let is_top = depth == 0;
            let below = members.last().map(|member| member.disk.clone());
            let how = How {
                read_only: options.read_only || !is_top,
                snapshot: options.snapshot.clone().filter(|_| is_top),
                tally: if is_top { &top_tally } else { &below_tally },
                mapping_share,
                options,
            };
            let opened = open_disk(&image, below, how).await;
            let (disk, native) = opened.context(|| describe(&image.path, depth))?;
            let Found { path, format, storage, header, superblock, data_file, .. } = image;
            members.push(Member { path, format, storage, header, superblock, data_file, disk, native });
        }
        members.reverse();
        Ok(Self { members, top_tally, below_tally, options: options.clone(), mapping_share, gone: None })
    }

    /// The disk on top.
    pub fn disk(&self) -> &SharedDisk {
        &self.members[0].disk
    }

    /// Why the disk on top is closed, when a change closed it and could not open it again.
    pub fn gone(&self) -> Option<&Error> {
        self.gone.as_ref()
    }

    /// Closes all disks, the top one first; the first error counts, and the others are closed all the same.
    pub async fn close(&self) -> Result<()> {
        let mut result = self.gone.clone().map_or(Ok(()), Err);
        for member in &self.members {
            let closed =
                member.disk.close().await.context(|| format!("can't close {}", member.path.display()));
            result = result.and(closed);
        }
        result
    }
}

/// How one image of a chain is opened.
struct How<'a> {
    read_only: bool,
    snapshot: Option<String>,
    tally: &'a HostTally,
    mapping_share: u64,
    options: &'a ChainOptions,
}

/// The disk that an image makes over the one below it.
async fn open_disk(
    image: &Found,
    below: Option<SharedDisk>,
    how: How<'_>,
) -> Result<(SharedDisk, Option<Arc<Native>>)> {
    let How { read_only, snapshot, tally, mapping_share, options } = how;
    match (&image.header, &image.superblock) {
        (None, None) => Ok((Raw::open(image.storage.clone(), read_only, tally), None)),
        (None, Some(_)) => {
            let open = native::OpenOptions {
                read_only,
                snapshot,
                tally: tally.clone(),
                prealloc: options.prealloc,
                compaction: options.compaction,
                clock: options.clock.clone(),
                ..native::OpenOptions::default()
            };
            let opened = Native::open(image.storage.clone(), below, open).await?;
            Ok((opened.clone(), Some(opened)))
        }
        (Some(header), _) => {
            let files = qcow2::Files {
                image: image.storage.clone(),
                data_file: image.data_file.as_ref().map(|(_, file)| file.clone()),
                below,
            };
            let open = qcow2::OpenOptions {
                read_only,
                snapshot,
                mapping_bytes_max: mapping_share,
                offload: options.offload.clone(),
                tally: tally.clone(),
                journal_key: None,
                prealloc: options.prealloc,
                clock: options.clock.clone(),
            };
            Ok((Qcow2::open(header.clone(), files, open).await?, None))
        }
    }
}

fn describe(path: &Path, depth: usize) -> String {
    match depth {
        0 => format!("can't open image {}", path.display()),
        _ => format!("can't open backing image {} (depth {depth})", path.display()),
    }
}

/// Follows the names down.
async fn find(opener: &dyn Opener, path: &Path, options: &ChainOptions) -> Result<Vec<Found>> {
    let mut found: Vec<Found> = Vec::new();
    let mut next = Some((path.to_owned(), options.format));
    while let Some((path, format)) = next.take() {
        let depth = found.len();
        let context = || describe(&path, depth);
        let image = find_one(opener, &path, format, found.last(), options).await.context(context)?;
        if found.iter().any(|above| above.canonical == image.canonical) {
            return Err(Error::corrupt(format!(
                "the backing chain of {} is a loop: {} comes again at depth {depth}",
                found[0].path.display(),
                path.display()
            )));
        }
        if depth == DEPTH_MAX {
            return Err(Error::unsupported(format!(
                "the backing chain of {} is longer than {DEPTH_MAX} images",
                found[0].path.display()
            )));
        }
        if let Some((name, format)) = image.backing().filter(|_| !options.without_backing) {
            let format = format
                .filter(|format| !format.is_empty())
                .map(|format| format.parse::<FormatKind>())
                .transpose();
            let format = format.context(|| format!("can't open the backing image of {}", path.display()))?;
            next = Some((Gate::resolve(&image.path, name)?, format));
        }
        found.push(image);
    }
    Ok(found)
}

async fn find_one(
    opener: &dyn Opener,
    path: &Path,
    format: Option<FormatKind>,
    above: Option<&Found>,
    options: &ChainOptions,
) -> Result<Found> {
    let canonical = opener.canonical(path)?;
    if let Some(above) = above {
        options.gate.check(&above.canonical, &canonical)?;
    }
    let is_top = above.is_none();
    let writes = is_top && !options.read_only && options.snapshot.is_none();
    let purpose = if writes { Purpose::Write } else { Purpose::Read };
    let storage = opener.open(&canonical, path, purpose).await?;
    let kind = match format {
        Some(kind) => kind,
        None => probe(&*storage).await?,
    };
    if kind == FormatKind::Raw && format.is_none() && writes {
        return Err(Error::invalid(format!(
            "{} has no format that can be recognised; if it is a raw disk, say `-f raw` to write it",
            path.display()
        )));
    }
    let mut found = Found {
        path: path.to_owned(),
        canonical,
        format: kind,
        storage,
        header: None,
        superblock: None,
        data_file: None,
    };
    match kind {
        FormatKind::Raw if options.snapshot.is_some() && is_top => {
            return Err(Error::new(ErrorKind::NotFound, "a raw image has no snapshots"));
        }
        FormatKind::Raw => {}
        FormatKind::Native => found.superblock = Some(Superblocks::read(&*found.storage).await?.superblock),
        FormatKind::Qcow2 => {
            let header = Header::read(&*found.storage).await?;
            if let Some(name) = header.data_file().filter(|_| header.has_data_file()) {
                let path = Gate::resolve(&found.path, name)?;
                let canonical = opener.canonical(&path)?;
                options.gate.check(&found.canonical, &canonical)?;
                let file =
                    opener.open(&canonical, &path, purpose).await.context(|| "can't open its data file")?;
                found.data_file = Some((path, file));
            }
            found.header = Some(header);
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::HashMap;

    use futures_lite::future::block_on;
    use vellum_core::{Buffer, GuestOffset, MemoryStorage, Place, WriteFlags, map_merged};
    use vellum_format::qcow2::{CreateOptions, create};

    use super::*;

    /// A directory in memory. A link is an entry that names another.
    #[derive(Default)]
    struct Shelf {
        files: RefCell<HashMap<PathBuf, Arc<MemoryStorage>>>,
        links: HashMap<PathBuf, PathBuf>,
    }

    impl Shelf {
        fn put(&self, path: &str, storage: Arc<MemoryStorage>) {
            self.files.borrow_mut().insert(PathBuf::from(path), storage);
        }

        fn qcow2(&self, path: &str, backing: Option<(&str, Option<&str>)>) {
            let storage = MemoryStorage::new(path);
            let backing = backing.map(|(name, format)| (name.to_owned(), format.map(str::to_owned)));
            let options = CreateOptions { size: 1 << 20, backing, ..CreateOptions::default() };
            block_on(create(&*storage, None, &options)).unwrap();
            self.put(path, storage);
        }

        fn open(&self, path: &str, options: &ChainOptions) -> Result<Chain> {
            block_on(Chain::open(self, Path::new(path), options))
        }
    }

    impl Opener for Shelf {
        fn canonical(&self, path: &Path) -> Result<PathBuf> {
            let mut clean = PathBuf::new();
            for part in path.components() {
                match part {
                    std::path::Component::ParentDir => drop(clean.pop()),
                    std::path::Component::CurDir => {}
                    part => clean.push(part),
                }
            }
            Ok(self.links.get(&clean).cloned().unwrap_or(clean))
        }

        fn open<'a>(
            &'a self,
            canonical: &'a Path,
            name: &'a Path,
            _purpose: Purpose,
        ) -> LocalFuture<'a, Result<SharedStorage>> {
            let file = self.files.borrow().get(canonical).cloned();
            let missing = || Error::new(ErrorKind::NotFound, format!("{} does not exist", name.display()));
            Box::pin(std::future::ready(file.map(|file| file as SharedStorage).ok_or_else(missing)))
        }
    }

    fn write(disk: &SharedDisk, at: u64, byte: u8) {
        let write = disk.write(GuestOffset::new(at), Buffer::copy_of(&[byte; 4096]), WriteFlags::default());
        block_on(write).unwrap();
    }

    fn first_byte(disk: &SharedDisk, at: u64) -> u8 {
        block_on(disk.read(GuestOffset::new(at), Buffer::zeroed(1))).unwrap().slice()[0]
    }

    #[test]
    fn a_chain_of_three_reads_through_and_writes_on_top() {
        let shelf = Shelf::default();
        shelf.put("/d/base.raw", MemoryStorage::holding("base", &[1; 700_000]));
        shelf.qcow2("/d/middle", Some(("base.raw", Some("raw"))));
        shelf.qcow2("/d/top", Some(("/d/middle", Some("qcow2"))));
        let middle = shelf.open("/d/middle", &ChainOptions::default()).unwrap();
        write(middle.disk(), 65_536, 2);
        block_on(middle.close()).unwrap();
        let top = shelf.open("/d/top", &ChainOptions::default()).unwrap();
        assert_eq!(top.members.len(), 3);
        write(top.disk(), 131_072, 3);
        let read: Vec<u8> = [0, 65_536, 131_072, 800_000].map(|at| first_byte(top.disk(), at)).to_vec();
        assert_eq!(read, [1, 2, 3, 0], "the base is shorter than the disk");
        let map = block_on(map_merged(top.disk(), GuestOffset::ZERO.span(1 << 20))).unwrap();
        let depths: Vec<usize> = map.iter().map(|extent| extent.depth).collect();
        assert_eq!(depths, [2, 1, 0, 2, 2], "base, middle, top, base, past the end of the base");
        assert!(matches!(map[4].place, Place::Zero { allocated: false }));
        assert!(top.below_tally.data.counts().reads > 0);
        block_on(top.close()).unwrap();
    }

    #[test]
    fn references_outside_the_directory_are_refused_even_through_a_link() {
        let mut shelf = Shelf::default();
        shelf.put("/etc/shadow", MemoryStorage::holding("secret", &[7; 4096]));
        shelf.qcow2("/d/direct", Some(("/etc/shadow", Some("raw"))));
        shelf.qcow2("/d/dots", Some(("../etc/shadow", Some("raw"))));
        shelf.qcow2("/d/link", Some(("innocent", Some("raw"))));
        shelf.qcow2("/d/json", Some(("json:{}", Some("raw"))));
        shelf.links.insert(PathBuf::from("/d/innocent"), PathBuf::from("/etc/shadow"));
        for image in ["/d/direct", "/d/dots", "/d/link", "/d/json"] {
            let error = shelf.open(image, &ChainOptions::default()).err().unwrap();
            assert_eq!(error.kind(), ErrorKind::Refused, "{image}: {}", error.chain());
        }
        let gate = Gate::allowing(vec![PathBuf::from("/etc")]);
        let chain = shelf.open("/d/link", &ChainOptions { gate, ..ChainOptions::default() }).unwrap();
        assert_eq!(first_byte(chain.disk(), 0), 7);
    }

    #[test]
    fn loops_and_endless_chains_end() {
        let shelf = Shelf::default();
        shelf.qcow2("/d/self", Some(("self", Some("qcow2"))));
        shelf.qcow2("/d/a", Some(("b", Some("qcow2"))));
        shelf.qcow2("/d/b", Some(("./a", Some("qcow2"))));
        for image in ["/d/self", "/d/a"] {
            let error = shelf.open(image, &ChainOptions::default()).err().unwrap();
            assert!(error.chain().contains("loop"), "{}", error.chain());
        }
        for i in 0..300 {
            let next = (i + 1).to_string();
            shelf.qcow2(&format!("/d/{i}"), Some((&next, Some("qcow2"))));
        }
        let error = shelf.open("/d/0", &ChainOptions::default()).err().unwrap();
        assert!(error.chain().contains("longer than 256"), "{}", error.chain());
    }

    #[test]
    fn a_disk_of_unknown_format_is_written_only_when_the_user_says_raw() {
        let shelf = Shelf::default();
        shelf.put("/d/disk", MemoryStorage::holding("disk", &[0; 4096]));
        let error = shelf.open("/d/disk", &ChainOptions::default()).err().unwrap();
        assert!(error.chain().contains("-f raw"), "{}", error.chain());
        shelf.open("/d/disk", &ChainOptions { read_only: true, ..ChainOptions::default() }).unwrap();
        let raw = ChainOptions { format: Some(FormatKind::Raw), ..ChainOptions::default() };
        write(shelf.open("/d/disk", &raw).unwrap().disk(), 0, 9);
    }

    #[test]
    fn what_is_missing_is_named_with_its_depth() {
        let shelf = Shelf::default();
        shelf.qcow2("/d/top", Some(("gone.qcow2", None)));
        let error = shelf.open("/d/top", &ChainOptions::default()).err().unwrap();
        assert!(error.chain().contains("gone.qcow2 (depth 1)"), "{}", error.chain());
        let alone = ChainOptions { without_backing: true, ..ChainOptions::default() };
        assert_eq!(first_byte(shelf.open("/d/top", &alone).unwrap().disk(), 0), 0);
    }
}
