//! Creating images from the user's options.

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use vellum_core::pin::Pin;
use vellum_core::{
    BlockSize, Buffer, Context, Error, ErrorKind, GuestSpan, ImageOffset, Result, SharedStorage, Storage, Url,
};
use vellum_format::FormatKind;
use vellum_format::handover::Handover;
use vellum_format::image::Reserve;
use vellum_format::luks::{self, NewKeys, Secrets};
use vellum_format::native::{self, Layout, Region};
use vellum_format::probe::probe;
use vellum_format::qcow2::{self, CreateOptions, Preallocation};
use vellum_io::File;
use vellum_layer::{Chain, Gate, Referrer, Trust};

use crate::host::Host;
use crate::image::{ImageOptions, Remote, new_file, open_image};
use crate::making::Making;
use crate::same_file::{files_of, first_same_file, refuse_same_file};
use crate::template::{self, ListUse};

/// A new image: where, and what is below it.
#[derive(Debug, Clone)]
pub struct CreateTarget {
    /// The image file. An existing file is replaced unless it is in use.
    pub path: PathBuf,
    /// The size of the disk in bytes; that of the backing image when not given.
    pub size: Option<u64>,
    /// The backing image's name, as it will stand in the new one, and its format.
    pub backing: Option<(String, FormatKind)>,
    /// The backing image is not opened; the size must be given.
    pub trust_backing: bool,
    /// Where the backing image's own references may lead: directories, and prefixes of URLs.
    pub allow_dirs: Vec<PathBuf>,
    /// How remote images are asked for.
    pub remote: Remote,
    /// A backing image at a URL that proves nothing never changes: the user says so.
    pub trust_base: bool,
    /// What opens the backing image, and those below it, where they are encrypted.
    pub secrets: Arc<Secrets>,
    /// Becomes true when the backing image, or one below it, is opened and is encrypted.
    pub stands_on_encrypted: Arc<AtomicBool>,
    /// Nothing is flushed: a crash of the machine may ruin the image.
    pub never_flushed: bool,
}

impl CreateTarget {
    /// The size of the disk: as given, else as the backing image has it.
    ///
    /// # Errors
    /// When there is neither, or the backing image cannot be opened.
    pub async fn disk_size(&self) -> Result<u64> {
        self.size_and_below(None).await.map(|(size, _)| size)
    }

    /// As above, and what the image is to record of the images below it. None of their files is to be written: not the image, nor
    /// its data file.
    async fn size_and_below(&self, data_file: Option<&Path>) -> Result<(u64, Option<Pin>)> {
        let written: Vec<PathBuf> =
            [self.path.clone()].into_iter().chain(data_file.map(Path::to_owned)).collect();
        let Some(chain) = self.open_backing().await? else {
            let below = self.backing.as_ref().map(|(name, _)| Gate::resolve(&self.path, name)).transpose()?;
            refuse_below(&written, below.as_slice())?;
            return Ok((self.size_over(None)?, None));
        };
        let size = chain.disk().geometry().size;
        let (pin, refused) = (chain.pin_of_all(), refuse_below(&written, &files_of(&chain)));
        chain.close().await?;
        refused?;
        Ok((self.size_over(Some(size))?, pin?))
    }

    /// Why the image, now that it is made, could not be opened for writing as it is: its references would not
    /// be followed.
    pub fn refusal(&self, format: FormatKind, data_file: Option<&str>) -> Option<Error> {
        let canonical = self.path.canonicalize().ok()?;
        let trust = Trust::of(&[&self.path, &canonical], format);
        let is_device = canonical.metadata().is_ok_and(|facts| facts.file_type().is_block_device());
        let asked = trust.and_then(|trust| {
            let image = Referrer { canonical: &canonical, is_device, trust };
            let gate = Host::gate(&self.allow_dirs, &[])?;
            let place = |name: &str| {
                let path = Gate::resolve(&self.path, name)?;
                if Url::of_path(&path).is_some() {
                    return Ok(path);
                }
                path.canonicalize().context(|| name.to_owned())
            };
            if let Some((name, _)) = &self.backing {
                // A missing file that was not checked is reported when the image is opened.
                place(name).map_or(Ok(()), |target| gate.check(image, &target))?;
            }
            data_file.map_or(Ok(()), |name| gate.check_data_file(image, &place(name)?, true))
        });
        asked.err()
    }

    fn size_over(&self, backing: Option<u64>) -> Result<u64> {
        self.size.or(backing).ok_or_else(|| {
            Error::invalid(format!(
                "{}: give the size after the file name, for example 20G",
                self.path.display()
            ))
        })
    }

    /// The backing image, if there is one and it is to be checked.
    async fn open_backing(&self) -> Result<Option<Chain>> {
        let Some((name, format)) = self.backing.as_ref().filter(|_| !self.trust_backing) else {
            return Ok(None);
        };
        let options = ImageOptions {
            format: Some(*format),
            allow_dirs: self.allow_dirs.clone(),
            remote: self.remote.clone(),
            trust_base: self.trust_base,
            secrets: self.secrets.clone(),
            ..ImageOptions::reading()
        };
        let path = Gate::resolve(&self.path, name)?;
        let chain = open_image(&path, &options).await.context(|| {
            format!("can't use the backing image {name} (`-u` creates the image without opening it)")
        })?;
        refuse_moved(&chain)?;
        self.stands_on_encrypted.fetch_or(chain.is_any_encrypted(), Ordering::Relaxed);
        Ok(Some(chain))
    }
}

/// Checks that no file that is written is one of those below.
fn refuse_below(written: &[PathBuf], below: &[PathBuf]) -> Result<()> {
    match first_same_file(written, below) {
        None => Ok(()),
        Some(one) => Err(Error::invalid(format!(
            "{one} is below the new image, which would overwrite it: name another file"
        ))),
    }
}

/// Checks that no migration makes an image that is to be a base writable.
///
/// # Errors
/// `Refused` while its disk may be taken back, or is awaited.
pub(crate) fn refuse_moved(chain: &Chain) -> Result<()> {
    match chain.top().head.handover() {
        Some(Handover::Moved(number)) => Err(Error::new(
            ErrorKind::Refused,
            format!(
                "{} has moved (migration {number}), and its disk can still be taken back and written: finish with `vellum \
                 migrate run`, or copy it with `vellum convert`",
                chain.top().path.display()
            ),
        )),
        Some(Handover::Awaiting(number)) => Err(Error::new(
            ErrorKind::Refused,
            format!(
                "{} awaits the disk of migration {number}, and will be written: a base never changes, so copy it with `vellum \
                 convert`",
                chain.top().path.display()
            ),
        )),
        _ => Ok(()),
    }
}

/// The name by which a new image refers to its backing image: the file name if both are in the same directory,
/// so that they can be moved together, else the full path. A block device has the path that was given, as far
/// as its last link: what that link leads to, such as `/dev/dm-3`, may be another device after a reboot.
///
/// # Errors
/// Those of finding the backing image and the new image's directory; `Invalid` for a name that is not UTF-8.
pub fn backing_name(backing: &Path, image: &Path) -> Result<String> {
    if let Some(url) = Url::of_path(backing) {
        return Ok(url?.to_string());
    }
    let context = |path: &Path| format!("can't find {}", path.display());
    let canonical = backing.canonicalize().context(|| context(backing))?;
    if canonical.metadata().is_ok_and(|facts| facts.file_type().is_block_device()) {
        return path_text(&std::path::absolute(backing).context(|| context(backing))?);
    }
    let dir = image.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let dir = dir.canonicalize().context(|| context(dir))?;
    let Some(name) = canonical.strip_prefix(&dir).ok().filter(|rest| rest.components().count() == 1) else {
        return path_text(&canonical);
    };
    let name = path_text(name)?;
    // What stands before a colon would be taken for a protocol.
    Ok(if name.contains(':') { format!("./{name}") } else { name })
}

/// Makes a qcow2 image. Must be called on a worker. Returns the options of the new image as they turned out.
///
/// # Errors
/// `Invalid` for options that contradict each other, and what the files say. An image that could not be made
/// whole is removed.
pub async fn create_qcow2(target: &CreateTarget, options: CreateOptions) -> Result<CreateOptions> {
    create_qcow2_instead(target, options, None).await
}

/// As above, of an image that will take the place of `old`, whose data is in the same data file: that is emptied before the data file
/// changes. Until the new one is complete it would be a disk with the bytes of another.
///
/// # Errors
/// As above, and those of emptying it.
pub(crate) async fn create_qcow2_instead(
    target: &CreateTarget,
    options: CreateOptions,
    old: Option<&File>,
) -> Result<CreateOptions> {
    let data_path = options.data_file.as_ref().map(|name| data_file_path(&target.path, name)).transpose()?;
    data_path.as_ref().map_or(Ok(()), |path| refuse_same_file(&target.path, path))?;
    let (size, pin) = target.size_and_below(data_path.as_deref()).await?;
    let backing = target.backing.as_ref().map(|(name, format)| (name.clone(), Some(format.to_string())));
    let mut options = CreateOptions { size, backing, ..options }.settled();
    options.data_file = data_path.as_ref().map(|path| path_text(path)).transpose()?;
    let is_new_data = data_path.as_ref().filter(|path| !path.exists());
    let data_file: Option<SharedStorage> = match &data_path {
        None => None,
        Some(path) => Some(new_data_file(path, target.never_flushed).await?),
    };
    let made = write_qcow2(target, (data_file.as_ref(), old), &options, pin.as_ref()).await;
    if let (Err(_), Some(path)) = (&made, is_new_data) {
        drop(data_file);
        let _ = std::fs::remove_file(path);
    }
    made.map(|()| options)
}

/// The place of a new image's data file, in full. A relative name means the image's directory here and the
/// current directory to QEMU, so the image gets one that both find.
fn data_file_path(image: &Path, name: &str) -> Result<PathBuf> {
    let path = Gate::resolve(image, name)?;
    let context = || format!("can't use {} as the data file", path.display());
    let file = path.file_name().ok_or_else(|| Error::invalid("it is a directory")).context(context)?;
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    Ok(dir.canonicalize().context(context)?.join(file))
}

fn path_text(path: &Path) -> Result<String> {
    let text = path.to_str().map(str::to_owned);
    text.ok_or_else(|| {
        Error::invalid(format!("{} is not UTF-8, so it cannot be stored in an image", path.display()))
    })
}

/// A data file to be filled. An image is refused: its content would be lost.
async fn new_data_file(path: &Path, never_flushed: bool) -> Result<Arc<File>> {
    let is_there = path.exists();
    let file = new_file(path, never_flushed).await?;
    let held = match is_there && file.len() > 0 {
        true => probe(&*file).await.map(|format| format.to_string()),
        false => return Ok(file),
    };
    match held {
        Ok(format) if format == FormatKind::Raw.to_string() => Ok(file),
        Err(error) if error.kind() == ErrorKind::Io => Err(error.context(format!(
            "can't find out whether {}, which is to become the data file, is an image",
            path.display()
        ))),
        held => Err(Error::new(
            ErrorKind::Refused,
            format!(
                "{} cannot become the data file: {}: delete it if it is no longer needed, or name another file",
                path.display(),
                held.map_or_else(|error| error.to_string(), |format| format!("it is a {format} image"))
            ),
        )),
    }
}

/// Records the pin in a new image.
async fn record(image: SharedStorage, format: FormatKind, pin: Option<&Pin>) -> Result<()> {
    match pin {
        Some(pin) => format.format().set_pin(&image, pin).await,
        None => Ok(()),
    }
}

pub(crate) async fn write_qcow2(
    target: &CreateTarget,
    (data_file, old): (Option<&SharedStorage>, Option<&File>),
    options: &CreateOptions,
    pin: Option<&Pin>,
) -> Result<()> {
    let making = Making::begin(&target.path, target.never_flushed).await?;
    let give_up_old = async || match old {
        None => Ok(()),
        Some(old) => {
            old.set_len(0).await?;
            old.flush().await // commit point: the old disk is given up
        }
    };
    let mut made = qcow2::create_with(&*making.file, data_file, options, give_up_old).await;
    if made.is_ok() {
        made = record(making.file.clone(), FormatKind::Qcow2, pin).await;
    }
    making.end(made).await
}

/// A new image of the native format, as it turned out.
#[derive(Debug, Clone)]
pub struct NativeImage {
    /// The size of its disk in bytes.
    pub size: u64,
    /// How guest offsets become places of the image.
    pub layout: Layout,
    /// Whether the first write of a unit may embed the unit's entry.
    pub embeds: bool,
    /// The granularity at which an image with a backing image tracks its own data, in bytes.
    pub block_bytes: Option<u64>,
    /// The size of its journal, if it has one.
    pub journal_bytes: Option<u64>,
    /// What became of the list of the template's zeros.
    pub zeros: ListUse,
}

/// Makes an image in the native format. Must be called on a worker.
///
/// # Errors
/// `Invalid` for options that contradict each other, and what the files say. An image that could not be made
/// whole is removed.
pub async fn create_native(target: &CreateTarget, options: native::CreateOptions) -> Result<NativeImage> {
    let backing = target.open_backing().await?;
    if let Some(chain) = &backing
        && let Err(error) = refuse_below(std::slice::from_ref(&target.path), &files_of(chain))
    {
        chain.close().await?;
        return Err(error);
    }
    let mut list = (None, ListUse::None);
    if let Some(chain) = &backing {
        list = template::zeros_of(chain).await;
    }
    let backing_size = backing.as_ref().map(|chain| chain.disk().geometry().size);
    let size = BlockSize::SECTOR.round_up(target.size_over(backing_size)?);
    // A backing image that is not checked may be as large as the disk.
    let zeros = list.0.map(|zeros| zeros.runs).unwrap_or_default();
    let base = base_of(target, backing_size.unwrap_or(size), zeros);
    let options = native::CreateOptions { size, base, ..options };
    let pin = backing.as_ref().map_or(Ok(None), Chain::pin_of_all)?;
    let made = write_native(target, &options, pin.as_ref()).await;
    // Until here its files are locked, and so are as the list has them.
    if let Some(chain) = backing {
        chain.close().await?;
    }
    let superblock = made?;
    let (places, shape) = (superblock.places(), superblock.places().shape());
    Ok(NativeImage {
        size: superblock.size(),
        layout: shape.layout,
        embeds: superblock.embeds(),
        block_bytes: shape.base_bytes.map(|_| shape.block.bytes()),
        journal_bytes: Some(places.region(Region::Journal).len()).filter(|bytes| *bytes > 0),
        zeros: list.1,
    })
}

/// What a native image holds of its backing image, whose disk has this many bytes and these zeros.
fn base_of(target: &CreateTarget, size: u64, zeros: Vec<GuestSpan>) -> Option<native::NewBase> {
    let base = |(name, format): &(String, FormatKind)| native::NewBase {
        name: name.clone(),
        format: Some(format.to_string()),
        size,
        zeros,
    };
    target.backing.as_ref().map(base)
}

pub(crate) async fn write_native(
    target: &CreateTarget,
    options: &native::CreateOptions,
    pin: Option<&Pin>,
) -> Result<native::Superblock> {
    let making = Making::begin(&target.path, target.never_flushed).await?;
    let mut made = native::create(&*making.file, options).await;
    if made.is_ok()
        && let Err(error) = record(making.file.clone(), FormatKind::Native, pin).await
    {
        made = Err(error);
    }
    making.end(made).await
}

/// Makes a raw disk of zeros. Must be called on a worker.
///
/// # Errors
/// `Invalid` for a preallocation that raw disks do not have, and the errors of the file. A file that could
/// not be completed is removed.
pub async fn create_raw(path: &Path, size: u64, preallocation: Preallocation) -> Result<()> {
    new_raw(path, size, preallocation, false).await
}

/// As above, perhaps without a flush.
pub(crate) async fn new_raw(
    path: &Path,
    size: u64,
    preallocation: Preallocation,
    never_flushed: bool,
) -> Result<()> {
    let making = Making::begin(path, never_flushed).await?;
    let made = lay_out_raw(path, &making.file, size, preallocation).await;
    making.end(made).await
}

/// Makes a raw LUKS image with these keys. Its disk reads as random bytes until it is written. Must be called on a worker. Returns the size of the
/// disk.
///
/// # Errors
/// `Invalid` without keys, and for a preallocation that these images do not have; the errors of the file. A file that could
/// not be completed is removed.
pub async fn create_luks(
    path: &Path,
    size: u64,
    keys: Option<&NewKeys>,
    preallocation: Preallocation,
) -> Result<u64> {
    new_luks(path, size, keys, preallocation, false).await
}

/// As above, perhaps without a flush.
pub(crate) async fn new_luks(
    path: &Path,
    size: u64,
    keys: Option<&NewKeys>,
    preallocation: Preallocation,
    never_flushed: bool,
) -> Result<u64> {
    let keys = keys.ok_or_else(|| {
        Error::invalid(
            "a luks image needs a secret: name it with `-o key-secret=ID` (`--secret id=ID,file=FILE`)",
        )
    })?;
    let making = Making::begin(path, never_flushed).await?;
    let made = luks::create(&*making.file, size, keys, reserve_of(preallocation)).await;
    making.end(made).await
}

/// What a preallocation reserves.
pub(crate) fn reserve_of(preallocation: Preallocation) -> Reserve {
    match preallocation {
        Preallocation::Off => Reserve::Nothing,
        Preallocation::Metadata => Reserve::Places,
        Preallocation::Falloc => Reserve::Space,
        Preallocation::Full => Reserve::Zeros,
    }
}

async fn lay_out_raw(path: &Path, file: &File, size: u64, preallocation: Preallocation) -> Result<()> {
    if file.limits().fixed_len {
        if file.len() < size {
            return Err(Error::new(
                ErrorKind::NoSpace,
                format!("{} has {} bytes, the disk needs {size}", path.display(), file.len()),
            ));
        }
        return Ok(());
    }
    file.set_len(0).await?;
    file.set_len(size).await?;
    let all = ImageOffset::ZERO.span(size);
    match preallocation {
        Preallocation::Off => {}
        Preallocation::Metadata => return Err(Error::invalid("a raw disk has no metadata to preallocate")),
        Preallocation::Falloc => file.preallocate(all).await?,
        Preallocation::Full => {
            for span in BlockSize::from_shift(20).pieces_of(all) {
                let len = usize::try_from(span.len()).expect("a mebibyte");
                file.write(span.start(), Buffer::zeroed(len)).await?;
            }
        }
    }
    file.flush().await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_keeps_the_name_that_was_given() {
        let is_device = |path: &PathBuf| {
            path.metadata().is_ok_and(|facts| facts.file_type().is_block_device()) && !path.is_symlink()
        };
        let found =
            std::fs::read_dir("/dev").expect("devices").flatten().map(|entry| entry.path()).find(is_device);
        let Some(device) = found else {
            #[expect(clippy::print_stderr, reason = "a test says why it looked at nothing")]
            return eprintln!("skipped: there is no block device here");
        };
        let dir = std::env::temp_dir().join(format!("vellum-backing-name-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("a directory");
        let (link, file) = (dir.join("template"), dir.join("a:b.raw"));
        std::os::unix::fs::symlink(&device, &link).expect("a link");
        std::fs::write(&file, "").expect("a file");
        let name = |backing: &Path| backing_name(backing, &dir.join("clone.qcow2")).expect("it is there");
        // The device that the link leads to may be another one after a reboot.
        assert_eq!(Path::new(&name(&link)), link);
        assert_eq!(name(&file), "./a:b.raw");
        assert_eq!(
            backing_name(&file, Path::new("/clone.qcow2")).expect("it is there"),
            path_text(&file.canonicalize().expect("it is there")).expect("text")
        );
        std::fs::remove_dir_all(&dir).expect("our own directory");
    }
}
