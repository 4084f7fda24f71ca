//! Clones: one or many new images over one template, which is opened once.
//!
//! ```text
//!   template        open for reading, and locked against writers until the last clone is there;
//!                   at the end its name must still lead to the same file
//!   each clone      draft beside its name ► header and tables ► flush ► rename ► flush of the directory
//!                   at most AT_ONCE at the same time: the host puts their flushes together
//! ```
//!
//! 1. A clone gets its name when it is complete and durable. So a crash leaves whole clones and drafts, which the
//!    next clone of that name removes.
//! 2. Nothing that exists is replaced.
//! 3. After a failure no further clone is begun. Those that are there stay.

use std::cell::RefCell;
use std::collections::HashSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use vellum_core::pin::Pin;
use vellum_core::{BlockSize, Context, Error, LocalFuture, Result, Url, try_join_all};
use vellum_format::zeros::Zeros;
use vellum_format::{FormatKind, native, qcow2};
use vellum_io::Draft;

use crate::create::{CreateTarget, backing_name, base_of, write_native, write_qcow2};
use crate::image::{ImageOptions, open_image};
use crate::signals::Stop;
use crate::template::{self, ListUse};

/// This many clones are made at once.
const AT_ONCE: usize = 16;

/// What is cloned, and how.
#[derive(Debug, Clone)]
pub struct Cloning {
    /// The template: an image of any format. It must not change from now on.
    pub template: PathBuf,
    /// Its format.
    pub template_format: FormatKind,
    /// The size of each clone's disk in bytes; that of the template's disk when not given.
    pub size: Option<u64>,
    /// Where the template's own references may lead, and the clones' references to it.
    pub allow_dirs: Vec<PathBuf>,
    /// A template at a URL that proves nothing never changes: the user says so.
    pub trust_base: bool,
    /// For clones of the native format. Size and base are filled in.
    pub native: native::CreateOptions,
    /// For qcow2 clones. Size and backing file are filled in; a data file is refused.
    pub qcow2: qcow2::CreateOptions,
}

/// A clone to be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewClone {
    /// Its file, which must not exist.
    pub path: PathBuf,
    /// Its format: qcow2 or native.
    pub format: FormatKind,
}

/// What was made.
#[derive(Debug)]
pub struct Cloned {
    /// The size of each disk in bytes.
    pub size: u64,
    /// The clones that are there, in the order in which they were named.
    pub made: Vec<NewClone>,
    /// Why the others are not, or why these are of no use; `Closed` when the work was stopped.
    pub failed: Option<Error>,
    /// Why opening a clone for writing will need a further option.
    pub refusal: Option<Error>,
    /// What became of the list of the template's zeros.
    pub zeros: ListUse,
}

/// What the clones have in common.
struct Template<'a> {
    how: &'a Cloning,
    disk_bytes: u64,
    size: u64,
    zeros: Option<Zeros>,
    pin: Option<Pin>,
}

/// A file, as far as it can be told from others and from what it was.
#[derive(PartialEq, Eq)]
struct Identity {
    file: (u64, u64),
    /// Of a file that is no device.
    content: Option<(u64, i64, i64)>,
}

/// Makes the clones. `progress` gets how many there are so far. Must be called on a worker.
///
/// # Errors
/// What opening the template says, `Invalid` for options or names that no clone can have, and `Closed` when it
/// was stopped before the template was open: then none is made. Later errors are in [`Cloned::failed`].
pub async fn clone_template(
    how: &Cloning,
    clones: &[NewClone],
    stop: &mut Stop,
    progress: &dyn Fn(usize),
) -> Result<Cloned> {
    check(how, clones)?;
    let options = ImageOptions {
        format: Some(how.template_format),
        allow_dirs: how.allow_dirs.clone(),
        trust_base: how.trust_base,
        ..ImageOptions::reading()
    };
    let before = identity(&how.template)?;
    let is_native = clones.iter().any(|clone| clone.format == FormatKind::Native);
    let opened = async {
        let chain = open_image(&how.template, &options).await?;
        let zeros = if is_native { template::zeros_of(&chain).await } else { (None, ListUse::None) };
        Ok((chain, zeros))
    };
    let (chain, (zeros, list)) = stop.or_stopped(opened).await?;
    let disk_bytes = chain.disk().geometry().size;
    let size = BlockSize::SECTOR.round_up(how.size.unwrap_or(disk_bytes));
    let template = Template { how, disk_bytes, size, zeros, pin: chain.pin_of_all()? };
    let made = RefCell::new(Vec::new());
    let mut failed = None;
    for (batch, some) in clones.chunks(AT_ONCE).enumerate() {
        let all = some.iter().enumerate().map(|(index, clone)| {
            let (template, made) = (&template, &made);
            // Each is brought to its end, whatever becomes of its neighbours.
            Box::pin(async move {
                let result = template.clone_to(clone).await;
                if result.is_ok() {
                    made.borrow_mut().push(batch * AT_ONCE + index);
                }
                Ok(result)
            }) as LocalFuture<'_, Result<Result<()>>>
        });
        failed = match stop.or_stopped(try_join_all(all.collect::<Vec<_>>())).await {
            Ok(ended) => ended.into_iter().find_map(Result::err),
            Err(error) => Some(error),
        };
        progress(made.borrow().len());
        if failed.is_some() {
            break;
        }
    }
    let closed = chain.close().await;
    // The lock was on the file that was opened. Under its name there may be another one by now.
    let is_same = identity(&how.template).is_ok_and(|now| now == before);
    let changed = || {
        let why = "was replaced or changed while clones of it were made: they are of no use, remove them";
        Err(Error::corrupt(format!("{} {why}", how.template.display())))
    };
    let ended = if is_same { closed } else { changed() };
    let mut indices = made.into_inner();
    indices.sort_unstable();
    let made: Vec<NewClone> = indices.into_iter().map(|index| clones[index].clone()).collect();
    let refusal = made.iter().find_map(|clone| match template.target(&clone.path, clone) {
        Ok(target) => target.refusal(clone.format, None),
        Err(error) => Some(error),
    });
    Ok(Cloned { size, made, failed: failed.or(ended.err()), refusal, zeros: list })
}

fn identity(path: &Path) -> Result<Identity> {
    if Url::of_path(path).is_some() {
        // What is read of it is held against what it proved when it was opened, each time.
        return Ok(Identity { file: (0, 0), content: None });
    }
    let facts = path.metadata().context(|| format!("can't open {}", path.display()))?;
    let content = facts.is_file().then(|| (facts.len(), facts.mtime(), facts.mtime_nsec()));
    Ok(Identity { file: (facts.dev(), facts.ino()), content })
}

/// Refuses what cannot be done before anything is.
fn check(how: &Cloning, clones: &[NewClone]) -> Result<()> {
    if how.qcow2.data_file.is_some() {
        return Err(Error::invalid("clones cannot share a data file: make each with `vellum create -b`"));
    }
    let mut places = HashSet::new();
    for clone in clones {
        let name = clone.path.display();
        if clone.format == FormatKind::Raw {
            return Err(Error::invalid(format!(
                "{name}: a raw image cannot be a clone: use the format qcow2 or vellum"
            )));
        }
        let dir = clone.path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let dir = dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
        if !places.insert((dir, clone.path.file_name())) {
            return Err(Error::invalid(format!("{name} is named twice")));
        }
        refuse_existing(&clone.path)?;
    }
    Ok(())
}

/// A link counts as well, also one that leads nowhere.
fn refuse_existing(path: &Path) -> Result<()> {
    if path.symlink_metadata().is_ok() {
        let why = "it exists already, and cloning replaces nothing: remove it, or choose another name";
        return Err(Error::invalid(format!("{}: {why}", path.display())));
    }
    Ok(())
}

impl Template<'_> {
    /// A clone that is written to this file.
    fn target(&self, file: &Path, clone: &NewClone) -> Result<CreateTarget> {
        Ok(CreateTarget {
            path: file.to_owned(),
            size: Some(self.size),
            backing: Some((backing_name(&self.how.template, &clone.path)?, self.how.template_format)),
            // It is open.
            trust_backing: true,
            allow_dirs: self.how.allow_dirs.clone(),
            trust_base: self.how.trust_base,
        })
    }

    async fn clone_to(&self, clone: &NewClone) -> Result<()> {
        self.write(clone).await.context(|| format!("can't create {}", clone.path.display()))
    }

    async fn write(&self, clone: &NewClone) -> Result<()> {
        // It may have appeared since all names were checked.
        refuse_existing(&clone.path)?;
        let Some(draft) = Draft::begin(&clone.path).await?.filter(|draft| !draft.replaces()) else {
            return Err(Error::invalid("this name cannot be given to a new file"));
        };
        let target = self.target(draft.path(), clone)?;
        match clone.format {
            FormatKind::Native => {
                let zeros = self.zeros.as_ref().map(|zeros| zeros.runs.clone()).unwrap_or_default();
                let base = base_of(&target, self.disk_bytes, zeros);
                let options = native::CreateOptions { size: self.size, base, ..self.how.native.clone() };
                write_native(&target, &options, self.pin.as_ref()).await.map(drop)?;
            }
            _ => {
                let backing = target.backing.clone().map(|(name, format)| (name, Some(format.to_string())));
                let options =
                    qcow2::CreateOptions { size: self.size, backing, ..self.how.qcow2.clone() }.settled();
                write_qcow2(&target, None, &options, self.pin.as_ref()).await?;
            }
        }
        draft.publish().await // commit point: the clone has its name
    }
}
