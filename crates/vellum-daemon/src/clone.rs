//! Clones: one or many new images over one template, which is opened once, or over a snapshot.
//!
//! ```text
//!   template        open for reading, and locked against writers until the last clone is there;
//!                   at the end its name must still lead to the same file
//!   each clone      draft beside its name ► header and tables ► flush ► rename ► flush of the directory
//!                   at most AT_ONCE at the same time: the host puts their flushes together
//! ```
//!
//! A snapshot of an image that a server has open is not opened here: the server marks it as cloned, says what a
//! clone must know, and after the last clone confirms that the mark is still there.
//!
//! 1. A clone gets its name when it is complete and durable. So a crash leaves whole clones and drafts, which the
//!    next clone of that name removes.
//! 2. Nothing that exists is replaced.
//! 3. After a failure no further clone is begun. Those that are there stay.
//! 4. The mark of a snapshot is durable before the first clone has its name. Between the two, a crash leaves a
//!    snapshot that must be released before it can be deleted, and no clone.

use std::cell::RefCell;
use std::collections::HashSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use vellum_core::pin::Pin;
use vellum_core::{BlockSize, Context, Error, ErrorKind, LocalFuture, Result, Url, try_join_all};
use vellum_format::luks::Secrets;
use vellum_format::zeros::Zeros;
use vellum_format::{FormatKind, SNAPSHOT_FORMAT, SnapshotBase, SnapshotKey, native, qcow2};
use vellum_io::Draft;
use vellum_layer::Chain;

use crate::closed::{snapshot_hold, snapshot_of};
use crate::control::{HeldSnapshot, Request, SnapshotFacts, call, call_in_turn};
use crate::create::{CreateTarget, backing_name, refuse_moved, write_native, write_qcow2};
use crate::image::{ImageOptions, Remote, open_image};
use crate::signals::Stop;
use crate::template::{self, ListUse};

/// This many clones are made at once.
const AT_ONCE: usize = 16;

/// How long to try again to have a snapshot marked while the server has other commands, and how long each may take.
const BUSY_FOR: Duration = Duration::from_secs(30);
const ANSWER_WITHIN: Duration = Duration::from_secs(600);

/// What is cloned, and how.
#[derive(Debug, Clone)]
pub struct Cloning {
    /// The template.
    pub template: CloneOf,
    /// The size of each clone's disk in bytes; that of the template's disk when not given.
    pub size: Option<u64>,
    /// Where the template's own references may lead, and the clones' references to it.
    pub allow_dirs: Vec<PathBuf>,
    /// How remote images are asked for.
    pub remote: Remote,
    /// A template at a URL that proves nothing never changes: the user says so.
    pub trust_base: bool,
    /// What opens the template where it is encrypted.
    pub secrets: Arc<Secrets>,
    /// For clones of the native format. Size and base are filled in.
    pub native: native::CreateOptions,
    /// For qcow2 clones. Size and backing file are filled in; a data file is refused.
    pub qcow2: qcow2::CreateOptions,
}

/// What clones stand on.
#[derive(Debug, Clone)]
pub enum CloneOf {
    /// An image of any format. It must not change from now on.
    Image {
        /// Its file.
        path: PathBuf,
        /// Its format.
        format: FormatKind,
    },
    /// A snapshot of an image of the native format, by its name or number. Its disk may be written.
    Snapshot {
        /// The file of the image, which no program writes just now.
        path: PathBuf,
        /// Which of its snapshots.
        snapshot: String,
    },
    /// As above, where a server has the image open.
    Served {
        /// The control socket of the server.
        control: PathBuf,
        /// The export of the disk; the only disk when not given.
        disk: Option<String>,
        /// Which of its snapshots.
        snapshot: String,
    },
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
    /// The file of the image that they stand on.
    pub template: PathBuf,
    /// Its format.
    pub template_format: FormatKind,
    /// Which of its snapshots they stand on, if it is one.
    pub snapshot: Option<String>,
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
    /// Whether the template, or an image below it, is encrypted. The clones are not.
    pub stands_on_encrypted: bool,
}

impl Cloned {
    /// What they stand on: the file, and the name of the snapshot if it is one.
    pub fn template_name(&self) -> String {
        let file = self.template.display();
        self.snapshot.as_ref().map_or_else(|| file.to_string(), |name| format!("{file}@{name}"))
    }
}

/// What the clones have in common.
struct Template<'a> {
    how: &'a Cloning,
    path: PathBuf,
    format: FormatKind,
    /// Which of its snapshots they stand on.
    snapshot: Option<SnapshotKey>,
    disk_bytes: u64,
    size: u64,
    zeros: Option<Zeros>,
    pin: Option<Pin>,
}

/// A file, as far as it can be told from others and from what it was.
#[derive(Clone, PartialEq, Eq)]
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
    let is_native = clones.iter().any(|clone| clone.format == FormatKind::Native);
    let Source { path, format, snapshot, disk_bytes, zeros, list, chain, before } =
        stop.or_stopped(open_source(how, is_native)).await?;
    let size = BlockSize::SECTOR.round_up(how.size.unwrap_or(disk_bytes));
    let pin = chain.as_ref().map(Chain::pin_of_all).transpose()?.flatten();
    let stands_on_encrypted = chain.as_ref().is_some_and(Chain::is_any_encrypted);
    let template = Template { how, path, format, snapshot, disk_bytes, size, zeros, pin };
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
    let ended = template.end(chain, before).await;
    let mut indices = made.into_inner();
    indices.sort_unstable();
    let made: Vec<NewClone> = indices.into_iter().map(|index| clones[index].clone()).collect();
    let refusal = made.iter().find_map(|clone| match template.target(&clone.path, clone) {
        Ok(target) => target.refusal(clone.format, None),
        Err(error) => Some(error),
    });
    let snapshot = template.snapshot.as_ref().map(|key| key.name.clone());
    let (path, template_format) = (template.path, template.format);
    Ok(Cloned {
        template: path,
        template_format,
        snapshot,
        size,
        made,
        failed: failed.or(ended.err()),
        refusal,
        zeros: list,
        stands_on_encrypted,
    })
}

/// What the clones stand on, found.
struct Source {
    path: PathBuf,
    format: FormatKind,
    snapshot: Option<SnapshotKey>,
    disk_bytes: u64,
    zeros: Option<Zeros>,
    list: ListUse,
    /// Open, and so locked; nothing, where a server has it.
    chain: Option<Chain>,
    /// The file that is open.
    before: Option<Identity>,
}

async fn open_source(how: &Cloning, is_native: bool) -> Result<Source> {
    let reading = |format, snapshot| ImageOptions {
        format: Some(format),
        snapshot,
        allow_dirs: how.allow_dirs.clone(),
        remote: how.remote.clone(),
        trust_base: how.trust_base,
        secrets: how.secrets.clone(),
        ..ImageOptions::reading()
    };
    match &how.template {
        CloneOf::Image { path, format } => {
            let before = Some(identity(path)?);
            let chain = open_image(path, &reading(*format, None)).await?;
            refuse_moved(&chain)?;
            let (zeros, list) =
                if is_native { template::zeros_of(&chain).await } else { (None, ListUse::None) };
            let disk_bytes = chain.disk().geometry().size;
            let (path, format, snapshot) = (path.clone(), *format, None);
            Ok(Source { path, format, snapshot, disk_bytes, zeros, list, chain: Some(chain), before })
        }
        CloneOf::Snapshot { path, snapshot } => {
            // Where it is marked already, clones of it may be in use: the image is not opened for writing then.
            let mut is_second = false;
            let (chain, key) = loop {
                let options = reading(FormatKind::Native, Some(snapshot.clone()));
                let chain = open_image(path, &options).await?;
                let top = chain.top();
                let all = top.head.snapshots(&top.storage, Some(&top.storage)).await?;
                let found = snapshot_of(&all, snapshot)?;
                let key = key_of(&found.name, &found.id)?;
                if found.is_cloned {
                    break (chain, key);
                }
                chain.close().await?;
                drop(chain);
                if std::mem::replace(&mut is_second, true) {
                    let why = "it was released meanwhile: try again";
                    return Err(Error::new(ErrorKind::Locked, format!("snapshot {key}: {why}")));
                }
                snapshot_hold(path, Some(FormatKind::Native), &found.id).await?;
            };
            Ok(Source {
                path: path.clone(),
                format: FormatKind::Native,
                snapshot: Some(key),
                disk_bytes: chain.disk().geometry().size,
                zeros: None,
                list: ListUse::None,
                before: Some(Identity { content: None, ..identity(path)? }),
                chain: Some(chain),
            })
        }
        CloneOf::Served { control, disk, snapshot } => {
            let held = hold(control, disk.clone(), snapshot.clone()).await?;
            Ok(Source {
                snapshot: Some(key_of(&held.name, &held.id)?),
                path: held.image,
                format: FormatKind::Native,
                disk_bytes: held.virtual_size,
                zeros: None,
                list: ListUse::None,
                chain: None,
                before: None,
            })
        }
    }
}

/// Has the server mark a snapshot as cloned, or confirm that it is. Waits for a while where other commands, or steps of the
/// disk, come first.
async fn hold(control: &Path, disk: Option<String>, name: String) -> Result<HeldSnapshot> {
    let request = Request::SnapshotHold { disk, name };
    let answer = call_in_turn(control, &request, ANSWER_WITHIN, BUSY_FOR).await?;
    serde_json::from_value(answer)
        .map_err(|error| Error::invalid(format!("unexpected answer of the server: {error}")))
}

/// The clones are there, and the server does not confirm, for this reason, that their snapshot is kept for them.
///
/// # Errors
/// What became of the snapshot, unless the mark is there and stays: nothing clears it in an image that is not written.
async fn not_confirmed(control: &Path, disk: Option<String>, key: &SnapshotKey, why: Error) -> Result<()> {
    let listed = call(control, &Request::SnapshotList { disk }).await.and_then(|answer| {
        serde_json::from_value::<Vec<SnapshotFacts>>(answer)
            .map_err(|error| Error::invalid(format!("unexpected answer of the server: {error}")))
    });
    let id = key.id.to_string();
    let there = listed.map(|all| all.into_iter().find(|one| one.id == id));
    let what = match there {
        Ok(None) => {
            format!(
                "snapshot {key} was deleted while clones of it were made: they are of no use, remove them"
            )
        }
        Ok(Some(one)) if one.held_by_clones && why.kind() == ErrorKind::ReadOnly => return Ok(()),
        _ => format!(
            "the clones are there, and whether snapshot {key} is kept for them is not known: they are sound if `vellum \
             snapshot list` shows it as held by clones, and of no use if it is not there"
        ),
    };
    Err(why.context(what))
}

fn key_of(name: &str, id: &str) -> Result<SnapshotKey> {
    let number = id.parse().map_err(|_| Error::invalid(format!("snapshot {name} has the ID {id:?}")))?;
    let key = SnapshotKey { name: name.to_owned(), id: number };
    // Before anything is made.
    SnapshotBase { file: "image".to_owned(), snapshot: key.clone() }.encode()?;
    Ok(key)
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
        clone.format.check_is_written()?;
        if matches!(clone.format, FormatKind::Raw | FormatKind::Luks) {
            return Err(Error::invalid(format!(
                "{name}: a {} image cannot be a clone: use the format qcow2 or vellum",
                clone.format
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
            backing: Some((backing_name(&self.path, &clone.path)?, self.format)),
            // It is open.
            trust_backing: true,
            allow_dirs: self.how.allow_dirs.clone(),
            remote: self.how.remote.clone(),
            trust_base: self.how.trust_base,
            secrets: self.how.secrets.clone(),
            stands_on_encrypted: Arc::default(),
            never_flushed: false,
        })
    }

    /// The name of what a clone stands on, as it will stand in the clone, and its format.
    fn backing(&self, clone: &NewClone) -> Result<(String, String)> {
        let file = backing_name(&self.path, &clone.path)?;
        match &self.snapshot {
            None => Ok((file, self.format.to_string())),
            Some(snapshot) => {
                let base = SnapshotBase { file, snapshot: snapshot.clone() };
                Ok((base.encode()?, SNAPSHOT_FORMAT.to_owned()))
            }
        }
    }

    /// The clones stand on what was meant, and it is closed.
    async fn end(&self, chain: Option<Chain>, before: Option<Identity>) -> Result<()> {
        if let (CloneOf::Served { control, disk, .. }, Some(key)) = (&self.how.template, &self.snapshot) {
            // It may have been released meanwhile, as if there were no clone.
            return match hold(control, disk.clone(), key.id.to_string()).await {
                Ok(_) => Ok(()),
                Err(error) => not_confirmed(control, disk.clone(), key, error).await,
            };
        }
        let closed = match chain {
            Some(chain) => chain.close().await,
            None => Ok(()),
        };
        // The lock was on the file that was opened. Under its name there may be another one by now.
        let is_same = |before: &Identity| {
            identity(&self.path).is_ok_and(|now| {
                now.file == before.file && (before.content.is_none() || now.content == before.content)
            })
        };
        if before.as_ref().is_none_or(is_same) {
            return closed;
        }
        let why = "was replaced or changed while clones of it were made: they are of no use, remove them";
        Err(Error::corrupt(format!("{} {why}", self.path.display())))
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
                let (name, format) = self.backing(clone)?;
                let base = native::NewBase { name, format: Some(format), size: self.disk_bytes, zeros };
                let base = Some(base);
                let options = native::CreateOptions { size: self.size, base, ..self.how.native.clone() };
                write_native(&target, &options, self.pin.as_ref()).await.map(drop)?;
            }
            _ => {
                let (name, format) = self.backing(clone)?;
                let backing = Some((name, Some(format)));
                let options =
                    qcow2::CreateOptions { size: self.size, backing, ..self.how.qcow2.clone() }.settled();
                write_qcow2(&target, (None, None), &options, self.pin.as_ref()).await?;
            }
        }
        draft.publish().await // commit point: the clone has its name
    }
}
