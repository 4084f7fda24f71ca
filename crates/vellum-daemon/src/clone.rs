//! Clones: one or many new images over one template, which is opened once.
//!
//! ```text
//!   template        open for reading, and locked against writers until the last clone is there
//!   each clone      draft beside its name ► header and tables ► flush ► rename ► flush of the directory
//!                   at most AT_ONCE at the same time: the host puts their flushes together
//! ```
//!
//! 1. A clone gets its name when it is complete and durable. So a crash leaves whole clones and drafts, which the
//!    next clone of that name removes.
//! 2. Nothing that exists is replaced.
//! 3. After a failure no further clone is begun. Those that are there stay.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use vellum_core::{Context, Error, ErrorKind, LocalFuture, Result, try_join_all};
use vellum_format::zeros::Zeros;
use vellum_format::{FormatKind, native, qcow2};
use vellum_io::Draft;

use crate::create::{CreateTarget, backing_name, base_of, write_native, write_qcow2};
use crate::image::{ImageOptions, open_image};
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
    /// Why the others are not.
    pub failed: Option<Error>,
    /// Why opening a clone for writing will need a further option.
    pub refusal: Option<Error>,
    /// What became of the list of the template's zeros.
    pub zeros: ListUse,
}

/// What the clones have in common.
struct Template<'a> {
    how: &'a Cloning,
    canonical: PathBuf,
    disk_bytes: u64,
    size: u64,
    zeros: Option<Zeros>,
}

/// Makes the clones. `progress` gets how many there are so far. Must be called on a worker.
///
/// # Errors
/// What opening the template says, and `Invalid` for options or names that no clone can have: then none is
/// made. Later errors are in [`Cloned::failed`]; it is `Closed` when `stop` ended the work.
pub async fn clone_template(
    how: &Cloning,
    clones: &[NewClone],
    stop: &AtomicBool,
    progress: &dyn Fn(usize),
) -> Result<Cloned> {
    check(how, clones)?;
    let options = ImageOptions {
        format: Some(how.template_format),
        allow_dirs: how.allow_dirs.clone(),
        ..ImageOptions::reading()
    };
    let chain = open_image(&how.template, &options).await?;
    let (zeros, list) = match clones.iter().any(|clone| clone.format == FormatKind::Native) {
        true => template::zeros_of(&chain).await,
        false => (None, ListUse::None),
    };
    let disk_bytes = chain.disk().geometry().size;
    let canonical = how.template.canonicalize().context(|| how.template.display().to_string())?;
    let size = how.size.unwrap_or(disk_bytes);
    let template = Template { how, canonical, disk_bytes, size, zeros };
    let mut cloned = Cloned { size, made: Vec::new(), failed: None, refusal: None, zeros: list };
    for some in clones.chunks(AT_ONCE) {
        if stop.load(Ordering::Relaxed) {
            cloned.failed.get_or_insert(Error::new(ErrorKind::Closed, "stopped by a signal"));
        }
        if cloned.failed.is_some() {
            break;
        }
        // Each is brought to its end, whatever becomes of its neighbours.
        let all = some.iter().map(|clone| {
            let template = &template;
            Box::pin(async move { Ok(template.clone_to(clone).await) }) as LocalFuture<'_, Result<Result<()>>>
        });
        let ended = try_join_all(all.collect::<Vec<_>>()).await?;
        for (clone, result) in some.iter().zip(ended) {
            match result {
                Ok(()) => cloned.made.push(clone.clone()),
                Err(error) => drop(cloned.failed.get_or_insert(error)),
            }
        }
        progress(cloned.made.len());
    }
    // Until here the template is locked, and so is as the list of zeros has it.
    chain.close().await?;
    for clone in &cloned.made {
        cloned.refusal = template.target(&clone.path, clone)?.refusal(clone.format, None);
        if cloned.refusal.is_some() {
            break;
        }
    }
    Ok(cloned)
}

/// Refuses what cannot be done before anything is.
fn check(how: &Cloning, clones: &[NewClone]) -> Result<()> {
    if how.qcow2.data_file.is_some() {
        return Err(Error::invalid("clones cannot share a data file: make each with `vellum create -b`"));
    }
    let mut paths: Vec<&Path> = clones.iter().map(|clone| clone.path.as_path()).collect();
    paths.sort_unstable();
    if let Some(pair) = paths.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(Error::invalid(format!("{} is named twice", pair[0].display())));
    }
    for clone in clones {
        if clone.format == FormatKind::Raw {
            let why = "a raw image cannot be a clone: use the format qcow2 or vellum";
            return Err(Error::invalid(format!("{}: {why}", clone.path.display())));
        }
        if clone.path.symlink_metadata().is_ok() {
            let why = "it exists already, and cloning replaces nothing: remove it, or choose another name";
            return Err(Error::invalid(format!("{}: {why}", clone.path.display())));
        }
    }
    Ok(())
}

impl Template<'_> {
    /// A clone that is laid out in this file.
    fn target(&self, file: &Path, clone: &NewClone) -> Result<CreateTarget> {
        Ok(CreateTarget {
            path: file.to_owned(),
            size: Some(self.size),
            backing: Some((backing_name(&self.canonical, &clone.path)?, self.how.template_format)),
            // It is open.
            trust_backing: true,
            allow_dirs: self.how.allow_dirs.clone(),
        })
    }

    async fn clone_to(&self, clone: &NewClone) -> Result<()> {
        self.lay_out(clone).await.context(|| format!("can't create {}", clone.path.display()))
    }

    async fn lay_out(&self, clone: &NewClone) -> Result<()> {
        let Some(draft) = Draft::begin(&clone.path).await?.filter(|draft| !draft.replaces()) else {
            return Err(Error::invalid("this name cannot be given to a new file"));
        };
        let target = self.target(draft.path(), clone)?;
        match clone.format {
            FormatKind::Native => {
                let zeros = self.zeros.as_ref().map(|zeros| zeros.runs.clone()).unwrap_or_default();
                let base = base_of(&target, self.disk_bytes, zeros);
                let options = native::CreateOptions { size: self.size, base, ..self.how.native.clone() };
                write_native(&target, &options).await.map(drop)?;
            }
            _ => {
                let backing = target.backing.clone().map(|(name, format)| (name, Some(format.to_string())));
                let options =
                    qcow2::CreateOptions { size: self.size, backing, ..self.how.qcow2.clone() }.settled();
                write_qcow2(&target, None, &options).await?;
            }
        }
        draft.publish().await // commit point: the clone has its name
    }
}
