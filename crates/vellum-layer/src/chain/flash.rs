//! The flash cache over the disks of a chain.
//!
//! ```text
//!   top image    ── FlashDisk ── written and read: its writes are home later (write-back), or at once (writethrough)
//!      │ where it has nothing
//!   image below  ── FlashDisk ── only read: what is cached of it is shared by all disks that stand on it
//!      │                         (two or more are read through one `View`, which then reads each through its own)
//!   base
//! ```
//!
//! 1. A written image has a row of its own in the cache by which file it is, and the session in its header decides
//!    whether what is cached counts. What is only read is known by what proves its content, and where it is: a file that
//!    has changed has another row, and so has a copy. What proves nothing is not cached.
//! 2. The image is complete whenever it is closed, except at the last closing of all where its dirty blocks are to
//!    be kept. So all that closes it for a change (`change`) finds it complete.
//! 3. An image is opened as one that the cache knows only where the cache is told of all changes, which is so in
//!    write-back and writethrough. Otherwise its first change voids what is cached of it.
//! 4. Nothing of an encrypted image is cached: the cache would have its data as it is.
//! 5. The tables of an image are cached too, by their places in its file. What proves that content says whether they are still those;
//!    while the image is open for writing nothing does.
//! 6. An image of which the cache holds writes is opened in write-back, whatever is asked for; then it is drained, and
//!    gets the policy that was asked for.

use std::fmt;
use std::sync::Arc;

use vellum_core::pin::{Proof, ProofKind};
use vellum_core::{Context, Error, ErrorKind, Result, SharedDisk, SharedStorage, Storage};
use vellum_flash::{
    DiskOptions, FlashCache, FlashCounts, FlashDisk, FlashMetadata, FlashPolicy, MetadataCounts,
    MetadataOptions,
};
use vellum_format::FormatKind;
use vellum_format::image::{CachedTables, Files, Head, Opened};
use vellum_format::session::{CacheId, Session};

use super::{Chain, ChainOptions, Identity};

/// The flash cache of a chain, and how its top disk uses it.
#[derive(Clone)]
pub struct FlashChoice {
    /// The cache, which is open.
    pub cache: Arc<FlashCache>,
    /// What the top disk does with it. By default write-back where the image has a place for a session, and otherwise
    /// only what is read is cached.
    pub policy: Option<FlashPolicy>,
    /// A number of this start of the host, if it has one. Tables of files are found again only until its next start.
    pub boot: Option<[u8; 16]>,
}

impl fmt::Debug for FlashChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FlashChoice").field("policy", &self.policy).finish_non_exhaustive()
    }
}

impl FlashChoice {
    /// Whether the cache takes no more changes until it is opened again.
    fn has_failed(&self) -> bool {
        self.cache.failure().is_some()
    }

    /// What is done with a disk that is written.
    fn policy_for(&self, head: &dyn Head) -> Result<FlashPolicy> {
        if head.is_encrypted() {
            return match self.policy {
                None | Some(FlashPolicy::Off) => Ok(FlashPolicy::Off),
                Some(_) => Err(Error::unsupported(
                    "the image is encrypted, and a flash cache would have its data as it is: use the flash policy off (`vellum serve \
                     --flash-policy NAME:off`)",
                )),
            };
        }
        match (self.policy, head.has_place_for_session()) {
            (Some(FlashPolicy::WriteBack), Err(why)) => {
                Err(why.context("the flash policy writeback is not possible"))
            }
            (Some(policy), _) => Ok(policy),
            (None, Ok(())) => Ok(FlashPolicy::WriteBack),
            (None, Err(_)) => Ok(FlashPolicy::ReadOnly),
        }
    }

    /// The cache as an image that is written is opened with it: only where the cache will be told of each change.
    /// Otherwise the first change voids what it has of the image.
    pub(super) fn id_for(&self, head: &dyn Head) -> Option<CacheId> {
        let is_told = is_behind(head)
            || match self.policy_for(head) {
                Ok(FlashPolicy::WriteBack) => true,
                Ok(FlashPolicy::WriteThrough) => head.has_place_for_session().is_ok(),
                Ok(FlashPolicy::ReadOnly | FlashPolicy::Off) | Err(_) => false,
            };
        is_told.then(|| self.cache.id())
    }
}

/// Whether a cache holds writes of the image.
fn is_behind(head: &dyn Head) -> bool {
    head.session().is_some_and(|session| session.holds_writes())
}

/// Checks that an image that is only read has all of its disk: the cache is not over it as over one that is written.
///
/// # Errors
/// `Refused`, with what can be done, where this very cache holds writes of it.
pub(super) fn may_only_read(options: &ChainOptions, head: &dyn Head, name: &str) -> Result<()> {
    let Some(choice) = &options.flash else { return Ok(()) };
    let own = |session: &Session| session.holds_writes() && session.cache == choice.cache.id();
    if head.session().filter(own).is_none() {
        return Ok(());
    }
    let why = format!(
        "{name} is behind its disk: this flash cache holds writes of it, which are not seen where the image is only \
         read. Serve it so that it can be written, or complete it first with `vellum flash recover --full {} {name}`",
        choice.cache.name()
    );
    Err(Error::new(ErrorKind::Refused, why))
}

/// A disk with the cache over it.
pub struct Flashed {
    /// The cache's side.
    pub flash: Arc<FlashDisk>,
    disk: SharedDisk,
    /// What is known of a file that is written and has no place for a session.
    file: Option<WrittenFile>,
}

/// A file that is written, by which proof of its content the next opening finds what is cached.
#[derive(Debug, Clone, Copy)]
struct WrittenFile {
    kind: FormatKind,
    place: Identity,
    boot: Option<[u8; 16]>,
}

impl Flashed {
    fn over(flash: Arc<FlashDisk>) -> Self {
        Self { disk: flash.clone(), flash, file: None }
    }

    /// The image was closed for good. What is cached of a file that is written and has no place for a session counts for the
    /// next opening only if nothing of it is changed from here on, until this program has given it up.
    pub(super) async fn leave(&self, storage: &dyn Storage, is_done: bool) -> Result<()> {
        let Some(WrittenFile { kind, place, boot }) = self.file else { return Ok(()) };
        let name = async || match is_done {
            true => id_of_left(What::Data, kind, storage, Some(&place), boot).await.ok().flatten(),
            false => None,
        };
        self.flash.leave_as(name).await
    }

    /// The same, for reads of which nothing is kept.
    pub(super) fn unadmitting(&self) -> SharedDisk {
        self.flash.unadmitting()
    }

    /// The disk as it is read and written through the cache.
    pub fn disk(&self) -> &SharedDisk {
        &self.disk
    }
}

/// Sixteen bytes that stand for these.
fn hashed(kind: &str, parts: &[&[u8]]) -> [u8; 16] {
    let mut hasher = blake3::Hasher::new_derive_key(kind);
    for part in parts {
        hasher.update(&(part.len() as u64).to_be_bytes());
        hasher.update(part);
    }
    *hasher.finalize().as_bytes().first_chunk().expect("32 bytes")
}

/// The row of a file that is written: which file it is, whatever it holds.
fn id_of_file(identity: &Identity) -> [u8; 16] {
    let [device, node, inode, _] = identity.map(u64::to_be_bytes);
    hashed("vellum flash cache: a file that is written", &[&device, &node, &inode])
}

/// The row of what is only read, in its format; `None` if nothing proves its content, or it is encrypted.
///
/// A proof tells an image from what its own place held before, not from what is in other places: files of two file
/// systems may have the same number, times and length, and so may what two servers tell of theirs. So the place is
/// part of it: of a file its file system, its device and when anything of it was changed last.
fn id_of_content(head: &dyn Head, storage: &dyn Storage, place: Option<&Identity>) -> Option<[u8; 16]> {
    let proof = storage.proof().filter(|_| !head.is_encrypted())?;
    let place: Vec<u8> = match place {
        Some(identity) => identity.iter().flat_map(|part| part.to_be_bytes()).collect(),
        None if proof.kind() == ProofKind::File => return None,
        None => storage.name().as_bytes().to_vec(),
    };
    let (kind, len) = (head.kind().to_string(), storage.len().to_be_bytes());
    let parts = [kind.as_bytes(), proof.kind().name().as_bytes(), proof.value().as_bytes(), &len, &place];
    Some(hashed("vellum flash cache: a content in its place", &parts))
}

/// Puts the cache over the disk of the top image. `state`: how the file was
/// opened; none where its proof is not all that proves what the disk has.
///
/// # Errors
/// `Unsupported` where write-back is asked of an image that has no place for a session, and the errors of the cache
/// and of the image.
pub(super) async fn over_top(
    choice: &FlashChoice,
    head: &dyn Head,
    opened: &Opened,
    storage: &dyn Storage,
    place: Option<&Identity>,
    is_written: bool,
    state: Option<TablesState>,
) -> Result<Option<Flashed>> {
    let home = opened.disk.clone();
    if !is_written {
        if choice.policy == Some(FlashPolicy::Off) {
            return Ok(None);
        }
        let Some(disk) = id_of_content(head, storage, place) else { return Ok(None) };
        return over_content(choice, disk, home).await;
    }
    let (policy, is_behind) = (choice.policy_for(head)?, is_behind(head));
    if policy == FlashPolicy::Off && !is_behind {
        return Ok(None);
    }
    if choice.has_failed() && policy != FlashPolicy::WriteBack && !is_behind {
        // The image has all of its disk, and goes on without the cache, which does not hear of it.
        leave_session(opened).await?;
        return Ok(None);
    }
    let disk = match place {
        Some(place) => id_of_file(place),
        None => {
            return Err(Error::unsupported(
                "nothing shows which file it is, so it has no place in a flash cache",
            ));
        }
    };
    let first = if is_behind { FlashPolicy::WriteBack } else { policy };
    let options =
        DiskOptions { disk, home, sessions: opened.sessions.clone(), policy: first, trusts_home: false };
    // Where the file alone proves what the disk has, it also proves what is cached of it.
    let file = match (place, &opened.sessions) {
        (Some(place), None) if state.is_some() => {
            Some(WrittenFile { kind: head.kind(), place: *place, boot: choice.boot })
        }
        _ => None,
    };
    let is_found = state != Some(TablesState::Reopened);
    let found = file.filter(|_| is_found).and_then(|WrittenFile { kind, place, boot }| {
        let proof = storage.proof().filter(|proof| proof.kind() == ProofKind::File)?;
        let [device, node, inode, changed_at] = place;
        id_of_changed(What::Data, kind, &proof, storage.len(), &[device, node, inode], changed_at, &boot?)
    });
    let flash = match choice.cache.open_file(options, found).await {
        Ok(flash) => flash,
        // No row is left. The cache has nothing of it then, and nobody has asked for it to be cached.
        Err(error) if error.kind() == ErrorKind::NoSpace && choice.policy.is_none() => {
            leave_session(opened).await?;
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    if first != policy {
        flash
            .set_policy(policy)
            .await
            .context(|| "its writes in the flash cache could not be written home")?;
    }
    Ok(Some(Flashed { file, ..Flashed::over(flash) }))
}

/// The image will change, and the cache will not hear of it.
async fn leave_session(opened: &Opened) -> Result<()> {
    if let Some(sessions) = &opened.sessions
        && sessions.session().await.is_some_and(|session| session.counts())
    {
        sessions.end().await?; // commit point
    }
    Ok(())
}

/// Puts the cache over the disk of an image below, unless there is none, or nothing proves its content.
///
/// # Errors
/// Those of the cache.
pub(super) async fn over_below(
    options: &ChainOptions,
    head: &dyn Head,
    storage: &dyn Storage,
    place: Option<&Identity>,
    home: &SharedDisk,
) -> Result<Option<Flashed>> {
    let Some(choice) = options.flash.as_ref().filter(|choice| choice.policy != Some(FlashPolicy::Off)) else {
        return Ok(None);
    };
    let Some(disk) = id_of_content(head, storage, place) else { return Ok(None) };
    over_content(choice, disk, home.clone()).await
}

/// What is only read. Where another disk of the process has its row, or no row is left, or flash has failed, it is read without
/// the cache.
async fn over_content(choice: &FlashChoice, disk: [u8; 16], home: SharedDisk) -> Result<Option<Flashed>> {
    if choice.has_failed() {
        return Ok(None);
    }
    let options =
        DiskOptions { disk, home, sessions: None, policy: FlashPolicy::ReadOnly, trusts_home: false };
    match choice.cache.open_disk(options).await {
        Ok(flash) => Ok(Some(Flashed::over(flash))),
        Err(error) if matches!(error.kind(), ErrorKind::Locked | ErrorKind::NoSpace) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The tables of an image of a chain, in the cache.
pub struct FlashedTables {
    metadata: Arc<FlashMetadata>,
    kind: FormatKind,
    place: Option<Identity>,
    boot: Option<[u8; 16]>,
}

impl FlashedTables {
    /// What the format is to read and write in place of these, and from where it is to read its tables.
    pub(super) fn put_into(&self, files: &mut Files) -> CachedTables {
        files.image = self.metadata.image();
        CachedTables { storage: self.metadata.tables(), lookups: self.metadata.lookups() }
    }

    /// The image is closed. Its tables count for the next opening only if nothing of it is changed from here on, until this
    /// program has given it up.
    pub(super) async fn close(&self, storage: &dyn Storage, is_done: bool) -> Result<()> {
        let name = async || match is_done {
            true => id_of_left(What::Tables, self.kind, storage, self.place.as_ref(), self.boot)
                .await
                .ok()
                .flatten(),
            false => None,
        };
        self.metadata.close(name).await
    }
}

/// A file system whose times are multiples of this may give two changes the same time although they are seconds apart.
const COARSE_NANOSECONDS: u64 = 1_000_000;

/// What an image's tables are known by, as it was found: before it was opened, because opening a file for writing looks whether
/// space of it can be given back, which changes its times. Whatever has changed it between the two has changed its proof.
fn id_of_found_tables(
    kind: FormatKind,
    storage: &dyn Storage,
    place: Option<&Identity>,
    boot: Option<[u8; 16]>,
    is_written: bool,
) -> Option<[u8; 16]> {
    let proof = storage.proof()?;
    let is_file = proof.kind() == ProofKind::File;
    match place {
        Some([device, node, inode, changed_at]) if is_file => id_of_changed(
            What::Tables,
            kind,
            &proof,
            storage.len(),
            &[*device, *node, *inode],
            *changed_at,
            &boot?,
        ),
        // What tells of no later change tells nothing of what is written.
        _ if is_written || is_file => None,
        _ => {
            let (name, len) = (storage.name().as_bytes(), storage.len().to_be_bytes());
            let kind = kind.to_string();
            let parts =
                [kind.as_bytes(), proof.kind().name().as_bytes(), proof.value().as_bytes(), &len, name];
            Some(hashed("vellum flash cache: tables of a content at its address", &parts))
        }
    }
}

/// What of a file that is written will be known by the file's proof.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    Tables,
    Data,
}

/// What a file's tables, or its data, will be known by, as it is now that it is closed.
async fn id_of_left(
    what: What,
    kind: FormatKind,
    storage: &dyn Storage,
    place: Option<&Identity>,
    boot: Option<[u8; 16]>,
) -> Result<Option<[u8; 16]>> {
    let (Some(proof), Some(changed_at), Some([device, node, inode, _]), Some(boot)) =
        (storage.proof_now().await?, storage.changed_at().await?, place, boot)
    else {
        return Ok(None);
    };
    let Ok(changed_at) = i64::try_from(changed_at) else { return Ok(None) };
    let changed_at = changed_at.cast_unsigned();
    Ok(id_of_changed(what, kind, &proof, storage.len(), &[*device, *node, *inode], changed_at, &boot))
}

/// The row of a file that is written: what proves its content, where it is, when anything of it was changed last, and in which
/// start of the host that was seen. Times prove less after a power cut: another program may have changed bytes and flushed them, and
/// a flush of data makes new times durable only where the length has changed.
fn id_of_changed(
    what: What,
    kind: FormatKind,
    proof: &Proof,
    len: u64,
    place: &[u64; 3],
    changed_at: u64,
    boot: &[u8; 16],
) -> Option<[u8; 16]> {
    if changed_at.is_multiple_of(COARSE_NANOSECONDS) {
        return None;
    }
    let (kind, len, changed_at) = (kind.to_string(), len.to_be_bytes(), changed_at.to_be_bytes());
    let place = place.map(u64::to_be_bytes).concat();
    let parts = [
        kind.as_bytes(),
        proof.kind().name().as_bytes(),
        proof.value().as_bytes(),
        &len,
        &changed_at,
        &place,
        boot,
    ];
    let context = match what {
        What::Tables => "vellum flash cache: tables of a content in its place",
        What::Data => "vellum flash cache: a content that was written, in its place",
    };
    Some(hashed(context, &parts))
}

/// How an image is about to be opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TablesState {
    OnlyRead,
    Written,
    /// It was opened before, and has been changed since.
    Reopened,
}

impl TablesState {
    pub(super) fn found(is_written: bool) -> Self {
        if is_written { Self::Written } else { Self::OnlyRead }
    }
}

/// Puts the cache between an image that is about to be opened and its tables, where its format has any that are read now and
/// then.
///
/// # Errors
/// Those of the cache and of the host.
pub(super) async fn over_tables(
    options: &ChainOptions,
    head: &dyn Head,
    storage: &SharedStorage,
    place: Option<&Identity>,
    state: TablesState,
) -> Result<Option<FlashedTables>> {
    let Some(choice) = options.flash.as_ref().filter(|choice| choice.policy != Some(FlashPolicy::Off)) else {
        return Ok(None);
    };
    let kind = head.kind();
    if head.is_encrypted() || choice.has_failed() || !matches!(kind, FormatKind::Qcow2 | FormatKind::Native) {
        return Ok(None);
    }
    let is_written = state != TablesState::OnlyRead;
    let name = match state {
        TablesState::Reopened => None,
        _ => id_of_found_tables(kind, &**storage, place, choice.boot, is_written),
    };
    if name.is_none() && !is_written {
        return Ok(None);
    }
    let table_bytes = head.cluster_size().unwrap_or(u64::MAX);
    let options = MetadataOptions { image: storage.clone(), name, is_written, table_bytes };
    match choice.cache.open_metadata(options).await {
        Ok(metadata) => Ok(Some(FlashedTables { metadata, kind, place: place.copied(), boot: choice.boot })),
        // Another disk of the process has them, or no row is left.
        Err(error) if matches!(error.kind(), ErrorKind::Locked | ErrorKind::NoSpace) => Ok(None),
        Err(error) => Err(error),
    }
}

impl Chain {
    /// What was read of the tables of the top image, where they are cached.
    pub fn flash_tables(&self) -> MetadataCounts {
        self.top.tables.as_ref().map(|tables| tables.metadata.counts()).unwrap_or_default()
    }

    /// The same of the images below, together.
    pub fn flash_tables_below(&self) -> MetadataCounts {
        let below = self.below.iter().flat_map(|below| below.members());
        let mut sum = MetadataCounts::default();
        for tables in below.filter_map(|member| member.tables.as_ref()) {
            sum += tables.metadata.counts();
        }
        sum
    }

    /// The flash cache over the top disk, if there is one.
    pub fn flash(&self) -> Option<&Arc<FlashDisk>> {
        self.top.flash.as_ref().map(|flashed| &flashed.flash)
    }

    /// Lets the cache know which disks the top one lies over: what it has of a block hides theirs.
    pub(super) fn tell_flash(&self) {
        let below = self.below.iter().flat_map(|below| below.members());
        let below: Vec<_> =
            below.filter_map(|member| member.flash.as_ref()).map(|flashed| flashed.flash.clone()).collect();
        if let Some(flash) = self.flash() {
            flash.lies_over(&below);
        }
    }

    /// Whether it was opened with a flash cache, also if the top disk does not use it.
    pub fn has_flash_choice(&self) -> bool {
        self.options.flash.is_some()
    }

    /// What the cache has counted for the images below, together.
    pub fn flash_below(&self) -> FlashCounts {
        let below = self.below.iter().flat_map(|below| below.members());
        below.filter_map(|member| member.flash.as_ref()).map(|flashed| flashed.flash.counts()).sum()
    }

    /// Writes home what only the cache has of the top disk. Requests may go on meanwhile, and what they write may not
    /// be home then.
    ///
    /// # Errors
    /// Those of the image and of the cache.
    pub async fn drain(&self) -> Result<()> {
        match self.flash() {
            Some(flash) => flash.drain().await,
            None => Ok(()),
        }
    }

    /// The last closing leaves in the cache what the image does not have. Without the cache the image is then behind.
    pub fn keep_dirty_at_close(&self) {
        if let Some(flash) = self.flash() {
            flash.keep_at_close(true);
        }
    }

    /// Changes what the top disk does with the cache. The image is closed and opened again, so the disk is another one
    /// afterwards, even on failure. The disk must not be in use meanwhile.
    ///
    /// # Errors
    /// `Unsupported` where the chain has no cache, or the image has no place for a session and write-back is asked for;
    /// and the errors of the image and of the cache. The disk can be used afterwards unless it is closed; the error also
    /// says that it could not be opened again.
    pub async fn set_flash_policy(&mut self, policy: FlashPolicy) -> Result<()> {
        self.mend().await?;
        let Some(choice) = &self.options.flash else {
            return Err(Error::unsupported("there is no flash cache: start the server with --flash PATH"));
        };
        if policy == FlashPolicy::WriteBack && self.is_written() {
            self.top.head.has_place_for_session()?;
        }
        let before = choice.policy;
        self.close_top().await?;
        self.choose_policy(Some(policy));
        let opened = self.open_top_again().await;
        if opened.is_err() {
            self.choose_policy(before);
            self.mend().await?;
        }
        opened
    }

    fn choose_policy(&mut self, policy: Option<FlashPolicy>) {
        if let Some(choice) = &mut self.options.flash {
            choice.policy = policy;
        }
    }

    pub(super) fn is_written(&self) -> bool {
        self.options.is_written()
    }
}

impl ChainOptions {
    /// Whether the top image is written.
    pub(super) fn is_written(&self) -> bool {
        !self.read_only && self.snapshot.is_none()
    }

    /// Whether the images below have the cache over them.
    pub(super) fn is_flashed(&self) -> bool {
        self.flash.as_ref().is_some_and(|choice| choice.policy != Some(FlashPolicy::Off))
    }
}
