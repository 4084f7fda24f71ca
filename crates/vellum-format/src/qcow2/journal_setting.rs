//! Whether an image is to have a journal, and what proves its backing file: puts the extension into the header of an
//! existing image, or takes it out.
//!
//! The extension changes together with the feature bit, so it must be in the first sector. The bytes that
//! were there move back. A header of more than one sector does not change in one write, so it is moved in
//! hops, and each hop leaves an old or a new header:
//!
//! ```text
//!   sector 0            1                2                 3
//!   │head│A │B          │ B │C │name     │                 │              as it was
//!   │head│J │pad ───────┼────────────────┼►A │B │C │name   │   the rest is written, flushed; then sector 0
//!   │head│J │A │B       │ B │C │name     │                 │   the same again, without the padding
//! ```
//!
//! 1. Before sector 0 changes, nothing is written to a sector that the old header uses. After it, nothing is
//!    written to a sector that the new one uses. So a crash leaves the old header, or one of the new ones,
//!    and each of those says everything that the old one said.
//! 2. Extensions of other programs are kept byte for byte, in their order, and so is the backing file's name.
//!    Only the table of feature names gains or loses a row: our own. In a header that is too small for the
//!    table and the extension, names of features that the image does not have are left out, which the format
//!    allows.
//! 3. If there is no room for both layouts beside each other, nothing is done: [`ErrorKind::NoSpace`].
//!
//! An extension that another program moved behind the first sector when it rewrote the header is put back.

use vellum_core::pin::Pin;
use vellum_core::{Buffer, Context, Error, ErrorKind, ImageOffset, Result, SharedStorage, Storage};

use super::check::recover;
use super::create::{JOURNAL_FEATURE, put_extension};
use super::header::Header;
use super::journal::extension::Extension;
use super::layout::*;
use super::pin::encode as encode_pin;
use crate::Prealloc;
use crate::handover::Handover;
use crate::image::NewBacking;
use crate::journal::record::{BYTES_MAX, BYTES_MIN};
use crate::report::JournalChange;
use crate::session::Session;

const SECTOR: usize = 512;

/// Changes the image so that it is written with a journal of `wanted` bytes from now on, or with none. The
/// image must not be open elsewhere.
///
/// # Errors
/// `Invalid` for an impossible size or an unsuitable image, `NoSpace` when the header has no room, `Corrupt`
/// for an image that is marked corrupt, and errors of the storage.
pub async fn set_journal(image: &SharedStorage, wanted: Option<u64>) -> Result<JournalChange> {
    let context = || format!("can't change the journal of {}", image.name());
    set_inner(image, wanted).await.context(context)
}

async fn set_inner(image: &SharedStorage, wanted: Option<u64>) -> Result<JournalChange> {
    let mut change = JournalChange { after: wanted, ..JournalChange::default() };
    let mut header = Header::read(&**image).await?;
    refuse(&header, wanted)?;
    if header.needs_replay() {
        change.recovery = Some(recover(image).await.context(|| "the image was not closed")?);
        header = Header::read(&**image).await?;
    }
    change.before = header.journal_bytes();
    let old = Layout::read(&header, &**image).await?;
    if wanted.is_none() && !old.is_padded && !old.parts.has_ours() {
        return Ok(change);
    }
    let wanted = wanted.map(|bytes| old.extension(bytes));
    for names in [Names::All, Names::InUse] {
        if relay(&header, &**image, &old.parts.with_journal(wanted, names, &header)).await? {
            change.names_cut = names == Names::InUse;
            return Ok(change);
        }
    }
    Err(Error::new(
        ErrorKind::NoSpace,
        format!(
            "the header has no room for it: names and extensions take {} of the first cluster's {} bytes",
            old.used_end(),
            old.bytes.len()
        ),
    ))
}

/// Removes the name of the backing file, and of its format, from the header. In a header that is too small to be
/// laid out anew in steps, the name only loses its length.
///
/// # Errors
/// The errors of the storage.
pub(super) async fn remove_backing(header: &Header, image: &dyn Storage) -> Result<()> {
    let old = Layout::read(header, image).await?;
    if relay(header, image, &old.parts.without_backing(header)).await? {
        return Ok(());
    }
    let mut first = old.sector(0).to_vec();
    put32(&mut first, field::BACKING_FILE_SIZE, 0);
    if header.version() >= 3 {
        put64(&mut first, field::AUTOCLEAR, header.autoclear & autoclear::KNOWN & !autoclear::SESSION);
    }
    image.write(ImageOffset::ZERO, Buffer::copy_of(&first)).await?;
    image.flush().await // commit point
}

/// Gives a closed image this backing file, in the place of the one that it has, if it has one.
///
/// # Errors
/// As [`Format::set_backing`](crate::image::Format::set_backing).
pub(super) async fn set_backing(image: &SharedStorage, backing: NewBacking<'_>) -> Result<()> {
    let context = || format!("can't give {} the backing image {}", image.name(), backing.name);
    set_backing_inner(image, backing).await.context(context)
}

async fn set_backing_inner(image: &SharedStorage, backing: NewBacking<'_>) -> Result<()> {
    let mut header = Header::read(&**image).await?;
    if header.is_corrupt() {
        return Err(Error::corrupt("the image is marked corrupt: run `vellum check -r all` first"));
    }
    if header.needs_replay() {
        recover(image).await.context(|| "the image was not closed")?;
        header = Header::read(&**image).await?;
    }
    if header.snapshot_count > 0 {
        return Err(Error::unsupported(
            "the image has snapshots, which also read from the backing image: delete them first (`vellum snapshot delete`)",
        ));
    }
    if header.data_file_is_raw() {
        return Err(Error::unsupported("its data lies in a raw file, which has all of the disk"));
    }
    if backing.name.is_empty() || backing.name.len() > BACKING_NAME_MAX as usize {
        return Err(Error::invalid(format!("the name of a backing file has 1 to {BACKING_NAME_MAX} bytes")));
    }
    let old = Layout::read(&header, &**image).await?;
    for names in [Names::All, Names::InUse] {
        let wanted = old.parts.with_backing(backing, names, &header);
        if relay(&header, &**image, &wanted).await? {
            return match wanted == old.parts {
                // It may have been written before, and never flushed.
                true => write_again(&**image).await,
                false => Ok(()),
            };
        }
    }
    Err(Error::new(
        ErrorKind::NoSpace,
        "the header has no room for it: give the file a shorter name, or remove extensions of other programs",
    ))
}

/// Records the pin in a closed image.
///
/// # Errors
/// `Unsupported` without a backing file, `NoSpace` when the header has no room, `Corrupt` for an image that is
/// marked corrupt, and the errors of the storage.
pub(super) async fn set_pin(image: &SharedStorage, pin: &Pin) -> Result<()> {
    let context = || format!("can't record in {} what proves its backing image", image.name());
    set_pin_inner(image, pin).await.context(context)
}

async fn set_pin_inner(image: &SharedStorage, pin: &Pin) -> Result<()> {
    let mut header = Header::read(&**image).await?;
    if header.is_corrupt() {
        return Err(Error::corrupt("the image is marked corrupt: run `vellum check -r all` first"));
    }
    if header.needs_replay() {
        recover(image).await.context(|| "the image was not closed")?;
        header = Header::read(&**image).await?;
    }
    let Some(name) = header.backing_file().map(str::to_owned) else {
        return Err(Error::unsupported("it has no backing image"));
    };
    if put_pin(&header, &**image, encode_pin(&name, pin)).await? {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::NoSpace,
        "the header has no room for it: make the image with larger clusters, or remove extensions of other programs",
    ))
}

/// Puts the extension with this body in the place of the one that says what proves the backing file. Returns
/// whether there was room.
///
/// # Errors
/// The errors of the storage.
async fn put_pin(header: &Header, image: &dyn Storage, body: Vec<u8>) -> Result<bool> {
    let old = Layout::read(header, image).await?;
    for names in [Names::All, Names::InUse] {
        if relay(header, image, &old.parts.with_pin(body.clone(), names, header)).await? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Records how far the image is in a migration, in an image that was closed.
///
/// # Errors
/// As [`Format::set_handover`](crate::image::Format::set_handover).
pub(super) async fn set_handover(image: &SharedStorage, handover: Option<Handover>) -> Result<()> {
    let context = || format!("can't record in {} that its disk migrates", image.name());
    set_handover_inner(image, handover).await.context(context)
}

async fn set_handover_inner(image: &SharedStorage, handover: Option<Handover>) -> Result<()> {
    let header = Header::read(&**image).await?;
    if header.version() < 3 {
        return Err(Error::unsupported(
            "a migration needs version 3: convert the image with `vellum convert -O qcow2`",
        ));
    }
    if header.has_data_file() {
        return Err(Error::unsupported(
            "its data lies in another file, which has no place for the mark that it has moved",
        ));
    }
    if header.needs_replay() || header.is_dirty() {
        return Err(header.replay_first(image.name()));
    }
    let old = Layout::read(&header, &**image).await?;
    for names in [Names::All, Names::InUse] {
        if relay(&header, &**image, &old.parts.with_handover(handover, names, &header)).await? {
            if header.handover() == handover {
                // It may have been written before, and never flushed.
                return write_again(&**image).await;
            }
            return Ok(());
        }
    }
    Err(Error::new(ErrorKind::NoSpace, "the header has no room for it"))
}

/// Records the session with a flash cache, or takes it out, in an image that has a place for it. Returns the header as
/// it is then; nothing if it has no room.
///
/// # Errors
/// Those of the storage.
pub(super) async fn set_session(
    header: &Header,
    image: &dyn Storage,
    session: Option<Session>,
) -> Result<Option<Header>> {
    if session.is_none() && header.session().is_none() {
        image.flush().await?; // an earlier attempt may have come this far without being durable
        return Ok(Some(header.clone()));
    }
    let old = Layout::read(header, image).await?;
    for names in [Names::All, Names::InUse] {
        if relay(header, image, &old.parts.with_session(session, names, header)).await? {
            if header.session() == session {
                // It may have been written before, and never flushed.
                write_again(image).await?;
            }
            let cluster = Layout::read(header, image).await?;
            return Header::parse(&cluster.bytes, image.len()).map(Some);
        }
    }
    Ok(None)
}

/// Why there is none, where the header has no room.
pub(super) fn no_room_for_session() -> Error {
    Error::new(
        ErrorKind::NoSpace,
        "the header has no room for it: make the image with larger clusters, or remove extensions of other programs",
    )
}

/// Whether the image has a place for a session.
///
/// # Errors
/// `Unsupported`, with the reason.
pub(super) fn has_place_for_session(header: &Header) -> Result<()> {
    if header.version() < 3 {
        return Err(Error::unsupported(
            "qcow2 version 2 has no place for a session with a flash cache: convert the image with `vellum convert -O \
             qcow2`, or use the policy readonly",
        ));
    }
    if header.data_file_is_raw() {
        return Err(Error::unsupported(
            "its data lies in a raw file, which other programs can write, and nothing would show that: use the policy \
             readonly",
        ));
    }
    Ok(())
}

/// Lays the header of an image of version 2 out as one of version 3. What version 3 requires of other tables is there.
/// Returns whether there was room.
///
/// # Errors
/// Those of the storage.
pub(super) async fn make_version_3(header: &Header, image: &dyn Storage) -> Result<bool> {
    let old = Layout::read(header, image).await?;
    let mut parts = old.parts.clone();
    parts.fields.truncate(V2_HEADER_LEN);
    parts.fields.resize(V3_HEADER_LEN, 0);
    put32(&mut parts.fields, field::VERSION, 3);
    put32(&mut parts.fields, field::REFCOUNT_ORDER, header.refcount_order);
    put32(&mut parts.fields, field::HEADER_LENGTH, u32::try_from(V3_HEADER_LEN).expect("112"));
    relay(header, image, &parts).await
}

/// Puts the extension that names the bitmaps into the first sector, where it changes together with the bit that says whether
/// they are valid; one that names none, where there is none that counts. Returns the header as it is then.
///
/// # Errors
/// `NoSpace` when the header has no room, and those of the storage.
pub(super) async fn make_room_for_bitmaps(header: &Header, image: &dyn Storage) -> Result<Header> {
    if header.bitmaps_at().is_some() {
        return Ok(header.clone());
    }
    let old = Layout::read(header, image).await?;
    let found = old.parts.extensions.iter().find(|(kind, _)| *kind == extension::BITMAPS);
    let body = match found.filter(|_| header.bitmaps().is_some()) {
        Some((_, body)) => body.clone(),
        None => vec![0; BITMAPS_LEN],
    };
    for names in [Names::All, Names::InUse] {
        if relay(header, image, &old.parts.with_bitmaps(Some(&body), names, header)).await? {
            let header = Header::read(image).await?;
            if header.bitmaps_at().is_some() {
                return Ok(header);
            }
        }
    }
    Err(no_room())
}

/// Takes the extension that names the bitmaps out.
///
/// # Errors
/// Those of the storage.
pub(super) async fn remove_bitmaps_entry(header: &Header, image: &dyn Storage) -> Result<()> {
    let old = Layout::read(header, image).await?;
    relay(header, image, &old.parts.with_bitmaps(None, Names::All, header)).await.map(drop)
}

/// Lays the header of an image of version 3 out as one of version 2. Nothing else in the image needs version 3. Returns whether
/// there was room.
///
/// # Errors
/// Those of the storage.
pub(super) async fn make_version_2(header: &Header, image: &dyn Storage) -> Result<bool> {
    let old = Layout::read(header, image).await?;
    let mut parts = old.parts.clone();
    parts.fields.truncate(V2_HEADER_LEN);
    put32(&mut parts.fields, field::VERSION, 2);
    // Bits and their names have no place there, nor has what only bits make valid.
    let gone = [extension::FEATURE_NAMES, extension::BITMAPS, extension::SESSION, extension::JOURNAL];
    parts.extensions.retain(|(kind, _)| !gone.contains(kind));
    relay(header, image, &parts).await
}

/// Why the header stays as it is, where it has no room.
pub(super) fn no_room() -> Error {
    Error::new(
        ErrorKind::NoSpace,
        "the header has no room for it: copy the image with `vellum convert -O qcow2`",
    )
}

fn refuse(header: &Header, wanted: Option<u64>) -> Result<()> {
    if header.is_corrupt() {
        return Err(Error::corrupt("the image is marked corrupt: run `vellum check -r all` first"));
    }
    let Some(bytes) = wanted else { return Ok(()) };
    if header.version() < 3 {
        return Err(Error::invalid(
            "a journal needs version 3: convert the image with `vellum convert -O qcow2`",
        ));
    }
    if header.has_data_file() {
        return Err(Error::invalid("an image whose data lies in another file cannot have a journal yet"));
    }
    if !(BYTES_MIN..=BYTES_MAX).contains(&bytes) {
        return Err(Error::invalid(format!(
            "a journal of {bytes} bytes: its size must be {BYTES_MIN} to {BYTES_MAX} bytes"
        )));
    }
    Ok(())
}

/// The rows that the table of feature names keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Names {
    All,
    InUse,
}

/// The contents of a header, without their layout.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Parts {
    /// The fields, up to the header's length. The place of the backing file's name is ignored.
    fields: Vec<u8>,
    extensions: Vec<(u32, Vec<u8>)>,
    backing_name: Vec<u8>,
}

/// A first cluster, and which of its sectors have a meaning.
struct Layout {
    bytes: Vec<u8>,
    parts: Parts,
    used: Vec<bool>,
    /// An earlier change was interrupted between two hops.
    is_padded: bool,
}

impl Layout {
    async fn read(header: &Header, image: &dyn Storage) -> Result<Self> {
        let len = usize::try_from(header.cluster_size().bytes()).expect("at most 2 MiB");
        let bytes = image.read(ImageOffset::ZERO, Buffer::for_overwrite(len)).await?.to_vec();
        Ok(Self::parse(bytes))
    }

    /// For bytes that have been checked as a header.
    fn parse(bytes: Vec<u8>) -> Self {
        let fields_len = if be32(&bytes, field::VERSION) == 2 {
            V2_HEADER_LEN
        } else {
            be32(&bytes, field::HEADER_LENGTH) as usize
        };
        let name_at = usize::try_from(be64(&bytes, field::BACKING_FILE_OFFSET)).expect("it was checked");
        let name_len = be32(&bytes, field::BACKING_FILE_SIZE) as usize;
        let (end, name) = match name_at {
            0 => (bytes.len(), Vec::new()),
            at => (at, bytes[at..at + name_len].to_vec()),
        };
        let mut used = vec![false; bytes.len().div_ceil(SECTOR)];
        let mut using = |from: usize, to: usize| used[from / SECTOR..to.div_ceil(SECTOR)].fill(true);
        using(0, fields_len.max(SECTOR));
        using(name_at, name_at + name.len());
        let (mut extensions, mut is_padded) = (Vec::new(), false);
        let mut at = fields_len;
        while at + 8 <= end {
            let (kind, len) = (be32(&bytes, at), be32(&bytes, at + 4) as usize);
            if kind == extension::END {
                using(at, at + 8);
                break;
            }
            let body = at + 8..at + 8 + len;
            using(at, if kind == extension::PADDING { body.start } else { body.end });
            is_padded |= kind == extension::PADDING;
            if kind != extension::PADDING {
                extensions.push((kind, bytes[body.clone()].to_vec()));
            }
            at = body.start + len.next_multiple_of(8);
        }
        let parts = Parts { fields: bytes[..fields_len].to_vec(), extensions, backing_name: name };
        Self { bytes, parts, used, is_padded }
    }

    fn used_end(&self) -> usize {
        self.used.iter().rposition(|used| *used).map_or(0, |last| (last + 1) * SECTOR)
    }

    /// An extension for a journal of this many bytes. It keeps the other values of an existing one, wherever
    /// that is.
    fn extension(&self, wanted_bytes: u64) -> Extension {
        let found = self.parts.extensions.iter().find(|(kind, _)| *kind == extension::JOURNAL);
        let found = found.and_then(|(_, body)| Extension::decode(body).ok());
        let (generation, prealloc) =
            found.map_or((0, Prealloc::Auto), |found| (found.generation, found.prealloc));
        Extension { wanted_bytes, run: ImageOffset::ZERO.span(0), generation, key: 0, prealloc }
    }

    /// Whether sector 0 of `next` may replace that of `self`: the other sectors that differ are not used by
    /// `self`.
    fn leads_to(&self, next: &Self) -> bool {
        self.before_sector_0(next).all(|sector| !self.used[sector])
    }

    /// Sectors that must be written before sector 0 of `next` is.
    fn before_sector_0(&self, next: &Self) -> impl Iterator<Item = usize> {
        let differs = |sector: &usize| self.sector(*sector) != next.sector(*sector);
        (1..next.used.len()).filter(|sector| next.used[*sector]).filter(differs)
    }

    fn sector(&self, index: usize) -> &[u8] {
        &self.bytes[index * SECTOR..(index + 1) * SECTOR]
    }
}

impl Parts {
    /// Whether anything of a journal is here.
    fn has_ours(&self) -> bool {
        self.extensions.iter().any(|(kind, body)| match *kind {
            extension::JOURNAL => true,
            extension::FEATURE_NAMES => body.chunks_exact(FEATURE_NAME_LEN).any(is_own_row),
            _ => false,
        })
    }

    fn with_journal(&self, wanted: Option<Extension>, names: Names, header: &Header) -> Self {
        let mut parts = self.clone();
        parts.extensions.retain(|(kind, _)| *kind != extension::JOURNAL);
        let table = parts.extensions.iter().position(|(kind, _)| *kind == extension::FEATURE_NAMES);
        if let Some(table) = table {
            let rows = std::mem::take(&mut parts.extensions[table].1);
            let keeps = |row: &[u8]| match row.len() {
                FEATURE_NAME_LEN => !is_own_row(row) && (names == Names::All || is_in_use(header, row)),
                _ => true, // a piece of a row, of unknown origin
            };
            parts.extensions[table].1 =
                rows.chunks(FEATURE_NAME_LEN).filter(|row| keeps(row)).flatten().copied().collect();
        }
        if let Some(wanted) = wanted {
            let mut row = vec![0; FEATURE_NAME_LEN];
            row[1] = JOURNAL_BIT;
            row[2..2 + JOURNAL_FEATURE.len()].copy_from_slice(JOURNAL_FEATURE.as_bytes());
            match table {
                Some(table) if parts.extensions[table].1.len().is_multiple_of(FEATURE_NAME_LEN) => {
                    parts.extensions[table].1.extend(row);
                }
                Some(_) => {}
                None => parts.extensions.push((extension::FEATURE_NAMES, row)),
            }
            parts.extensions.insert(0, (extension::JOURNAL, wanted.encode().to_vec()));
        }
        parts.extensions.retain(|(kind, body)| *kind != extension::FEATURE_NAMES || !body.is_empty());
        parts.forget_unknown(header);
        parts
    }

    fn with_pin(&self, body: Vec<u8>, names: Names, header: &Header) -> Self {
        let mut parts = self.clone();
        parts.extensions.retain(|(kind, _)| *kind != extension::PIN);
        parts.keep_names(names, header);
        parts.extensions.push((extension::PIN, body));
        parts.forget_unknown(header);
        parts
    }

    fn with_handover(&self, handover: Option<Handover>, names: Names, header: &Header) -> Self {
        let mut parts = self.clone();
        parts.extensions.retain(|(kind, _)| *kind != extension::HANDOVER);
        let forbids = handover.is_some_and(|handover| !handover.allows_writing());
        let features = header.incompatible & !incompatible::HANDOVER;
        let bit = if forbids { incompatible::HANDOVER } else { 0 };
        put64(&mut parts.fields, field::INCOMPATIBLE, features | bit);
        parts.name_feature(HANDOVER_BIT, forbids.then_some(HANDOVER_FEATURE), names, header);
        if handover.is_some() {
            parts.extensions.push((extension::HANDOVER, Handover::encode(handover).to_vec()));
        }
        parts.forget_unknown(header);
        parts
    }

    /// The name of the mark's feature stays as long as there is a session. So a new number, and a mark that is set or
    /// cleared, mostly change the first sector only.
    fn with_session(&self, session: Option<Session>, names: Names, header: &Header) -> Self {
        let mut parts = self.clone();
        parts.extensions.retain(|(kind, _)| *kind != extension::SESSION);
        let is_marked = session.is_some_and(|session| session.holds_writes());
        let features = header.incompatible & !incompatible::HOLDS_WRITES;
        let bit = if is_marked { incompatible::HOLDS_WRITES } else { 0 };
        put64(&mut parts.fields, field::INCOMPATIBLE, features | bit);
        parts.name_feature(HOLDS_WRITES_BIT, session.map(|_| HOLDS_WRITES_FEATURE), names, header);
        if let Some(session) = &session {
            let first = parts.extensions.iter().take_while(|(kind, _)| *kind == extension::JOURNAL).count();
            parts.extensions.insert(first, (extension::SESSION, session.encode().to_vec()));
        }
        parts.forget_unknown(header);
        let autoclear = header.autoclear & autoclear::KNOWN & !autoclear::SESSION;
        let counts = session.is_some_and(|session| session.counts());
        put64(&mut parts.fields, field::AUTOCLEAR, autoclear | if counts { autoclear::SESSION } else { 0 });
        parts
    }

    /// What lies before it in the first sector are extensions of fixed lengths.
    fn with_bitmaps(&self, body: Option<&[u8]>, names: Names, header: &Header) -> Self {
        let mut parts = self.clone();
        parts.extensions.retain(|(kind, _)| *kind != extension::BITMAPS);
        parts.keep_names(names, header);
        if let Some(body) = body {
            let is_before = |kind: u32| [extension::JOURNAL, extension::SESSION].contains(&kind);
            let first = parts.extensions.iter().take_while(|(kind, _)| is_before(*kind)).count();
            parts.extensions.insert(first, (extension::BITMAPS, body.to_vec()));
        }
        parts.forget_unknown(header);
        parts
    }

    /// Gives an incompatible feature this name in the table of feature names, or none.
    /// Leaves these of the names of features.
    fn keep_names(&mut self, names: Names, header: &Header) {
        if names == Names::All {
            return;
        }
        for (_, rows) in self.extensions.iter_mut().filter(|(kind, _)| *kind == extension::FEATURE_NAMES) {
            let keeps = |row: &&[u8]| row.len() < FEATURE_NAME_LEN || is_in_use(header, row);
            *rows = rows.chunks(FEATURE_NAME_LEN).filter(keeps).flatten().copied().collect();
        }
        self.extensions.retain(|(kind, body)| *kind != extension::FEATURE_NAMES || !body.is_empty());
    }

    fn name_feature(&mut self, bit: u8, name: Option<&str>, names: Names, header: &Header) {
        let is_row = |row: &[u8]| row.len() == FEATURE_NAME_LEN && row[0] == 0 && row[1] == bit;
        let table = self.extensions.iter().position(|(kind, _)| *kind == extension::FEATURE_NAMES);
        let mut rows = table.map_or_else(Vec::new, |table| std::mem::take(&mut self.extensions[table].1));
        let keeps = |row: &[u8]| {
            !is_row(row) && (names == Names::All || row.len() < FEATURE_NAME_LEN || is_in_use(header, row))
        };
        rows = rows.chunks(FEATURE_NAME_LEN).filter(|row| keeps(row)).flatten().copied().collect();
        if let Some(name) = name.filter(|_| rows.len().is_multiple_of(FEATURE_NAME_LEN)) {
            let mut row = vec![0; FEATURE_NAME_LEN];
            row[1] = bit;
            row[2..2 + name.len()].copy_from_slice(name.as_bytes());
            rows.extend(row);
        }
        match table {
            Some(table) => self.extensions[table].1 = rows,
            None => self.extensions.push((extension::FEATURE_NAMES, rows)),
        }
        self.extensions.retain(|(kind, body)| *kind != extension::FEATURE_NAMES || !body.is_empty());
    }

    fn without_backing(&self, header: &Header) -> Self {
        let mut parts = self.clone();
        parts.extensions.retain(|(kind, _)| ![extension::BACKING_FORMAT, extension::PIN].contains(kind));
        parts.backing_name.clear();
        put32(&mut parts.fields, field::BACKING_FILE_SIZE, 0);
        parts.forget_unknown(header);
        if header.version() >= 3 {
            let wished = compatible::COPY_ON_READ | compatible::PREFETCH;
            put64(&mut parts.fields, field::COMPATIBLE, header.compatible & !wished);
            put64(
                &mut parts.fields,
                field::AUTOCLEAR,
                header.autoclear & autoclear::KNOWN & !autoclear::SESSION,
            );
        }
        parts
    }

    fn with_backing(&self, backing: NewBacking<'_>, names: Names, header: &Header) -> Self {
        let mut parts = self.without_backing(header);
        parts.keep_names(names, header);
        if header.version() >= 3 {
            put64(&mut parts.fields, field::COMPATIBLE, header.compatible);
        }
        if let Some(format) = backing.format {
            parts.extensions.push((extension::BACKING_FORMAT, format.as_bytes().to_vec()));
        }
        if let Some(pin) = backing.pin {
            parts.extensions.push((extension::PIN, encode_pin(backing.name, pin)));
        }
        parts.backing_name = backing.name.as_bytes().to_vec();
        let len = u32::try_from(backing.name.len()).expect("it was checked");
        put32(&mut parts.fields, field::BACKING_FILE_SIZE, len);
        parts
    }

    /// This program cannot vouch for data that other programs keep consistent with the disk and that it does not
    /// know.
    fn forget_unknown(&mut self, header: &Header) {
        if header.version() >= 3 {
            put64(&mut self.fields, field::AUTOCLEAR, header.autoclear & autoclear::KNOWN);
        }
    }

    /// The first cluster. With padding, what follows the journal's extension begins at `at`. `None` when it
    /// does not fit.
    fn encode(&self, at: Option<usize>, cluster: usize) -> Option<Layout> {
        let mut bytes = self.fields.clone();
        let first = self.extensions.iter().take_while(|(kind, _)| *kind == extension::JOURNAL).count();
        let (journal, others) = self.extensions.split_at(first);
        for (kind, body) in journal {
            put_extension(&mut bytes, *kind, body);
        }
        if let Some(at) = at {
            let len = at.checked_sub(bytes.len() + 8)?;
            put_extension(&mut bytes, extension::PADDING, &vec![0; len]);
        }
        for (kind, body) in others {
            put_extension(&mut bytes, *kind, body);
        }
        put_extension(&mut bytes, extension::END, b"");
        let name_at = if self.backing_name.is_empty() { 0 } else { bytes.len() as u64 };
        put64(&mut bytes, field::BACKING_FILE_OFFSET, name_at);
        bytes.extend_from_slice(&self.backing_name);
        if bytes.len() > cluster {
            return None;
        }
        bytes.resize(cluster, 0);
        Some(Layout::parse(bytes))
    }
}

/// What other programs call the feature of an image that a migration forbids to write.
const HANDOVER_FEATURE: &str = "disk that migrates to or from another host";

/// What other programs call the feature of an image of which a flash cache holds writes.
const HOLDS_WRITES_FEATURE: &str = "vellum flash cache holds writes";

fn is_own_row(row: &[u8]) -> bool {
    row[0] == 0 && row[1] == JOURNAL_BIT
}

fn is_in_use(header: &Header, row: &[u8]) -> bool {
    let bits = [header.incompatible, header.compatible, header.autoclear];
    bits.get(usize::from(row[0])).is_some_and(|bits| row[1] < 64 && bits >> row[1] & 1 == 1)
}

/// Changes the header to say this. Returns whether there was room.
async fn relay(header: &Header, image: &dyn Storage, wanted: &Parts) -> Result<bool> {
    let cluster = usize::try_from(header.cluster_size().bytes()).expect("at most 2 MiB");
    let Some(last) = wanted.encode(None, cluster) else { return Ok(false) };
    // Checked before it is written. What another program has laid out in an odd way may have no such place.
    let Ok(seen) = Header::parse(&last.bytes, image.len()) else { return Ok(false) };
    let has_journal = wanted.extensions.iter().any(|(kind, _)| *kind == extension::JOURNAL);
    if seen.journal.is_some() != has_journal {
        return Ok(false); // it would not lie in the first sector
    }
    // A program that was killed may have left parts of a change that are not durable, and would not be written again.
    image.flush().await?;
    let old = Layout::read(header, image).await?;
    if old.leads_to(&last) {
        hop(image, &old, &last).await?;
        return Ok(true);
    }
    // Behind both headers, so that the padding can be removed again.
    let behind = [old.used_end().max(last.used_end()), old.used_end()];
    let between =
        behind.iter().find_map(|at| wanted.encode(Some(*at), cluster).filter(|next| old.leads_to(next)));
    let Some(between) = between else { return Ok(false) };
    hop(image, &old, &between).await?;
    let between = Layout::read(header, image).await?;
    if between.leads_to(&last) {
        hop(image, &between, &last).await?;
    }
    Ok(true)
}

/// Writes the first sector of the header as it is, and flushes it.
async fn write_again(image: &dyn Storage) -> Result<()> {
    let first = image.read(ImageOffset::ZERO, Buffer::for_overwrite(SECTOR)).await?;
    image.write(ImageOffset::ZERO, first).await?;
    image.flush().await // commit point
}

/// Moves from one header to another.
async fn hop(image: &dyn Storage, old: &Layout, next: &Layout) -> Result<()> {
    let place = |sector: usize| ImageOffset::new((sector * SECTOR) as u64);
    let write = |sector: usize| image.write(place(sector), Buffer::copy_of(next.sector(sector)));
    let mut has_written = false;
    for sector in old.before_sector_0(next) {
        write(sector).await?;
        has_written = true;
    }
    if has_written {
        image.flush().await?;
    }
    if old.sector(0) == next.sector(0) {
        return Ok(());
    }
    write(0).await?;
    image.flush().await?; // commit point: the new header counts from now on
    for sector in (1..next.used.len()).filter(|sector| !next.used[*sector] && old.used[*sector]) {
        write(sector).await?; // zeros, over sectors that are no longer used
    }
    image.flush().await
}
