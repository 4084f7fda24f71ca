//! What distinguishes two disks, as a list and as a file that makes one of the other.
//!
//! ```text
//!   diff     maps of both ► runs that may differ ► read ► blocks that do differ ► list, delta
//!   apply    pass 1: every record is whole, and the image has in each run what was before, or what is to be   (nothing is written)
//!            pass 2: runs that are not yet what they are to be are written ► flush
//! ```
//!
//! 1. Runs that both maps place at the same bytes of the same file, compressed or not, are equal without being read. That is most of two snapshots of one
//!    image, or of an image and the one below it. Both are open and locked meanwhile.
//! 2. Everything else is read and compared, by [`BLOCK`] bytes. So the answer is exact whatever the formats are.
//! 3. An image that has other bytes in a run than the delta was made of, or will make, is refused before anything is written.
//! 4. An application that was interrupted is run again: what is written already is recognised, by sectors. It may be what only the page
//!    cache has since a flush failed, so what the file really has is found out first.
//!
//! Not looked at: bytes of the image outside of the runs. A delta does not know them.

use std::fs::File;
use std::io::{BufReader, ErrorKind as IoErrorKind, Read as _, Seek as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::StreamExt as _;
use futures_util::stream::FuturesOrdered;
use vellum_core::{
    BlockSize, Buffer, Context, Error, ErrorKind, GuestOffset, GuestSpan, LocalFuture, Place, Result,
    SharedDisk, SharedStorage, WriteFlags, ZeroFlags, map_placed, read_below,
};
use vellum_io::{Draft, unblock, unblock_at};
use vellum_layer::Chain;
use vellum_layer::delta::{End, Found, HEAD_BYTES, Header, RUN_MAX, Record, Standing, Verified};

use crate::copy::in_units;
use crate::image::{ImageOptions, open_image};
use crate::signals::Stop;

/// Disks are compared in blocks of this many bytes.
pub const BLOCK: u64 = BlockSize::PAGE.bytes();
/// Maps are asked for this much at a time, in bytes.
pub(crate) const MAPPED_MAX: u64 = 1 << 30;
/// Records that are read at a time. Each has at most [`RUN_MAX`] bytes.
const BATCH: usize = 8;

/// A run of the new disk that differs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Difference {
    /// Where.
    pub span: GuestSpan,
    /// It reads as zero now.
    pub is_zero: bool,
}

/// What was found in all.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Differences {
    /// Bytes that differ, in whole blocks.
    pub bytes: u64,
    /// Those of them that read as zero now.
    pub zero_bytes: u64,
    /// Bytes of each disk that were read.
    pub bytes_read: u64,
}

/// How disks are compared.
pub struct Diffing<'a> {
    /// Pieces of [`RUN_MAX`] bytes that are read at a time.
    pub pieces_at_once: usize,
    /// Ends it when set.
    pub stop: &'a AtomicBool,
    /// Gets the bytes of the new disk that are done.
    pub progress: &'a dyn Fn(u64),
    /// Gets each run that differs, in order; neighbours are joined.
    pub found: &'a mut dyn FnMut(Difference),
}

/// A delta that is being written. It gets its name when it is whole.
pub struct NewDelta {
    draft: Draft,
    file: Option<File>,
    id: [u8; 16],
    counted: End,
}

impl NewDelta {
    /// Begins a delta of disks of these sizes, in bytes.
    ///
    /// # Errors
    /// When no file can be made there.
    pub async fn begin(path: &Path, id: [u8; 16], old_size: u64, new_size: u64) -> Result<Self> {
        let draft = Draft::begin(path).await?;
        let draft = draft.ok_or_else(|| {
            Error::invalid(format!(
                "{}: a delta has to be a new file, or replace a plain one",
                path.display()
            ))
        })?;
        let header = Header { id, old_size, new_size }.encode();
        let at = draft.path().to_owned();
        let file = unblock_at(path, move || {
            let mut file = File::options().write(true).open(&at)?;
            file.write_all(&header).map(|()| file)
        });
        let file = Some(file.await.context(|| format!("can't write {}", path.display()))?);
        Ok(Self { draft, file, id, counted: End::default() })
    }

    async fn add(&mut self, bytes: Vec<u8>) -> Result<()> {
        let mut file =
            self.file.take().ok_or_else(|| Error::new(ErrorKind::Io, "an earlier write failed"))?;
        let written = unblock_at(self.draft.path(), move || file.write_all(&bytes).map(|()| file)).await;
        self.file = Some(written.context(|| format!("can't write {}", self.draft.path().display()))?);
        Ok(())
    }

    /// Gives it its name.
    ///
    /// # Errors
    /// When it cannot be written.
    pub async fn publish(mut self) -> Result<End> {
        let (end, bytes) = (self.counted, self.counted.encode(self.id));
        self.add(bytes).await?;
        self.draft.publish().await?; // commit point
        Ok(end)
    }
}

/// A piece that was read, and what differs in it.
type Pieces = Result<(GuestSpan, Vec<Changed>)>;

/// Finds what of the new disk is not on the old one. Behind its end, the old one reads as zero.
///
/// # Errors
/// Those of the disks and of the delta; `Closed` when it was stopped.
pub async fn diff(
    old: &SharedDisk,
    new: &SharedDisk,
    how: Diffing<'_>,
    mut delta: Option<&mut NewDelta>,
) -> Result<Differences> {
    let Diffing { pieces_at_once, stop, progress, found } = how;
    let mut rest = GuestOffset::ZERO.span(new.geometry().size);
    let mut unread: Vec<(GuestSpan, bool)> = Vec::new();
    let mut reading: FuturesOrdered<LocalFuture<'_, Pieces>> = FuturesOrdered::new();
    let (mut all, mut last) = (Differences::default(), None::<Difference>);
    let id = delta.as_ref().map(|delta| delta.id);
    loop {
        while reading.len() < pieces_at_once.max(1) && !(rest.is_empty() && unread.is_empty()) {
            if stop.load(Ordering::Relaxed) {
                return Err(Error::new(ErrorKind::Closed, "stopped before the end"));
            }
            if unread.is_empty() {
                let parts = likely(old, new, rest.split_at(MAPPED_MAX).0).await?;
                unread = in_units(parts, BlockSize::PAGE, rest.end());
                let end = unread.last().map_or(rest.end(), |(span, _)| span.end());
                rest = GuestSpan::between(end, rest.end());
                unread.reverse();
            }
            let Some((span, is_equal)) = unread.pop() else { continue };
            if is_equal {
                reading.push_back(Box::pin(std::future::ready(Ok((span, Vec::new())))));
                continue;
            }
            let (piece, later) = span.split_at(RUN_MAX - span.start().bytes() % RUN_MAX);
            if !later.is_empty() {
                unread.push((later, false));
            }
            all.bytes_read += piece.len();
            reading.push_back(Box::pin(async move { Ok((piece, changed_in(old, new, piece, id).await?)) }));
        }
        let Some(read) = reading.next().await else { break };
        let (piece, changed) = read?;
        for Changed { difference, record } in changed {
            let Difference { span, is_zero } = difference;
            all.bytes += span.len();
            all.zero_bytes += if is_zero { span.len() } else { 0 };
            if let (Some(delta), Some(record)) = (&mut delta, record) {
                delta.add(record).await?;
                delta.counted.add(span.len());
            }
            last = Some(match last {
                Some(before) if before.span.end() == span.start() && before.is_zero == is_zero => {
                    Difference { span: GuestSpan::between(before.span.start(), span.end()), is_zero }
                }
                before => {
                    before.into_iter().for_each(&mut *found);
                    difference
                }
            });
        }
        progress(piece.end().bytes());
    }
    last.into_iter().for_each(found);
    Ok(all)
}

/// The run from its start, in parts: whether the maps say that both disks read the same there. May stop early, but is not empty
/// unless the run is.
pub(crate) async fn likely(
    old: &SharedDisk,
    new: &SharedDisk,
    span: GuestSpan,
) -> Result<Vec<(GuestSpan, bool)>> {
    let (before, after) = (map_placed(old, span).await?, map_placed(new, span).await?);
    let mut parts: Vec<(GuestSpan, bool)> = Vec::new();
    let (mut i, mut j) = (0, 0);
    while let (Some(one), Some(other)) = (before.get(i), after.get(j)) {
        let part = one.span.intersect(other.span);
        let into = |extent: GuestSpan| part.start().bytes() - extent.start().bytes();
        let is_equal = match (&one.place, &other.place) {
            (Place::Zero { .. } | Place::Below, Place::Zero { .. } | Place::Below) => true,
            (Place::Data { storage: a, at: p }, Place::Data { storage: b, at: q })
            | (Place::Compressed { from: Some((a, p)) }, Place::Compressed { from: Some((b, q)) }) => {
                is_one_file(a, b) && *p + into(one.span) == *q + into(other.span)
            }
            _ => false,
        };
        match parts.last_mut() {
            Some((last, same)) if *same == is_equal => *last = GuestSpan::between(last.start(), part.end()),
            _ => parts.push((part, is_equal)),
        }
        let (ends, its) = (one.span.end(), other.span.end());
        i += usize::from(ends <= its);
        j += usize::from(its <= ends);
    }
    Ok(parts)
}

/// Whether both are the same file in the same state. A file that cannot prove that is read.
fn is_one_file(a: &SharedStorage, b: &SharedStorage) -> bool {
    let is_proven = || a.name() == b.name() && a.proof().is_some() && a.proof() == b.proof();
    std::sync::Arc::ptr_eq(a, b) || is_proven()
}

/// A run that differs, and its record if a delta is made.
struct Changed {
    difference: Difference,
    record: Option<Vec<u8>>,
}

async fn changed_in(
    old: &SharedDisk,
    new: &SharedDisk,
    span: GuestSpan,
    id: Option<[u8; 16]>,
) -> Result<Vec<Changed>> {
    let len = usize::try_from(span.len()).expect("a piece is small");
    let before = read_below(Some(old), span.start(), Buffer::for_overwrite(len)).await?.contiguous();
    let after = new.read(span.start(), Buffer::for_overwrite(len)).await?.contiguous();
    if before.slice() == after.slice() {
        return Ok(Vec::new());
    }
    let (before, after) = (before.slice().to_vec(), after.slice().to_vec());
    // Digests and compression take longer than the reads.
    let work = move || {
        let runs = differing(span.start().bytes(), &before, &after).into_iter();
        runs.map(|(from, to, is_zero)| {
            let at = span.start() + from as u64;
            let record = id.map(|id| Record::encode(id, at.bytes(), &before[from..to], &after[from..to]));
            Changed { difference: Difference { span: at.span((to - from) as u64), is_zero }, record }
        })
        .collect()
    };
    Ok(unblock(work).await)
}

/// Where the bytes differ, in blocks of the disk, neighbours of a kind joined: from, to, whether it is zero now.
fn differing(start: u64, before: &[u8], after: &[u8]) -> Vec<(usize, usize, bool)> {
    let (mut runs, mut at): (Vec<(usize, usize, bool)>, usize) = (Vec::new(), 0);
    while at < after.len() {
        let left = BLOCK - (start + at as u64) % BLOCK;
        let end = after.len().min(at + usize::try_from(left).expect("a block"));
        if before[at..end] != after[at..end] {
            let is_zero = after[at..end].iter().all(|byte| *byte == 0);
            match runs.last_mut() {
                Some((_, to, same)) if *to == at && *same == is_zero => *to = end,
                _ => runs.push((at, end, is_zero)),
            }
        }
        at = end;
    }
    runs
}

/// What an application did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Applied {
    /// Bytes of the disk that were changed.
    pub bytes_written: u64,
    /// Bytes that were already what they were to be.
    pub bytes_there: u64,
}

/// Makes the disk of the image what the delta says. `progress` gets the bytes to do in both passes, and those that are done.
///
/// # Errors
/// `Invalid` when the image is not what the delta was made of, `Corrupt` when the delta is damaged; nothing is written then. The
/// errors of the image, and `Closed` when it was stopped: the same again continues.
pub async fn apply(
    delta: &Path,
    image: &Path,
    options: &ImageOptions,
    stop: &mut Stop,
    progress: &dyn Fn(u64, u64),
) -> Result<Applied> {
    let chain = stop.or_stopped(open_image(image, options)).await?;
    let applied = apply_to(delta, image, &chain, &stop.flag, progress).await;
    let closed = chain.close().await;
    applied.and_then(|applied| closed.map(|()| applied))
}

async fn apply_to(
    delta: &Path,
    image: &Path,
    chain: &Chain,
    stop: &AtomicBool,
    progress: &dyn Fn(u64, u64),
) -> Result<Applied> {
    let disk = chain.disk();
    let size = disk.geometry().size;
    let (mut missing, mut applied) = (0, Applied::default());
    let mut reader = Reader::open(delta).await?;
    for is_written in [false, true] {
        if is_written {
            if applied.bytes_there > 0 {
                chain.settle().await?;
            }
            reader.rewind().await?;
        }
        let wanted = reader.header.new_size;
        if size != wanted {
            return Err(Error::invalid(format!(
                "{} has {size} bytes, and with the delta it has {wanted}: `vellum resize {} {wanted}` first",
                image.display(),
                image.display()
            )));
        }
        let to_do = reader.bytes * 2;
        while let Some(records) = reader.next().await? {
            for verified in records {
                let record = verified.record;
                if stop.load(Ordering::Relaxed) {
                    return Err(Error::new(ErrorKind::Closed, "stopped before the end"));
                }
                let span = GuestOffset::new(record.offset).span(record.len);
                let len = usize::try_from(record.len).expect("at most a run");
                let there = disk.read(span.start(), Buffer::for_overwrite(len)).await?.contiguous();
                match verified.standing(there.slice()) {
                    Standing::After => applied.bytes_there += if is_written { 0 } else { record.len },
                    Standing::Before if is_written => {
                        put(disk, span, verified.made).await?;
                        applied.bytes_written += record.len;
                    }
                    Standing::Before => missing += record.len,
                    Standing::Strange => {
                        let why = format!(
                            "{} is not the disk that the delta was made of: it differs in {} bytes at {}",
                            image.display(),
                            record.len,
                            record.offset
                        );
                        return Err(Error::invalid(why));
                    }
                }
                let before = if is_written { reader.bytes } else { 0 };
                progress(to_do, before + reader.position.min(reader.bytes));
            }
        }
        if missing == 0 && applied.bytes_there == 0 {
            break;
        }
    }
    disk.flush().await?; // commit point
    Ok(applied)
}

async fn put(disk: &SharedDisk, span: GuestSpan, bytes: Option<Vec<u8>>) -> Result<()> {
    match bytes {
        Some(bytes) => disk.write(span.start(), Buffer::copy_of(&bytes), WriteFlags::default()).await,
        None => disk.write_zeroes(span, ZeroFlags { may_unmap: true, ..ZeroFlags::default() }).await,
    }
}

/// A delta that is read from its beginning.
struct Reader {
    path: PathBuf,
    file: Option<BufReader<File>>,
    header: Header,
    /// The length of the file.
    bytes: u64,
    position: u64,
    /// Where the last run ended on the disk.
    from: u64,
    counted: End,
    is_at_end: bool,
}

impl Reader {
    /// Goes back to the first record. It is the same file, whatever has its name now, and must be the same delta.
    async fn rewind(&mut self) -> Result<()> {
        let context = || format!("can't read {}", self.path.display());
        let mut file = self.file.take().ok_or_else(|| Error::new(ErrorKind::Io, "an earlier read failed"))?;
        let read = unblock_at(&self.path, move || {
            let mut head = [0; HEAD_BYTES];
            file.rewind()?;
            file.read_exact(&mut head).map(|()| (file, head))
        });
        let (file, head) = read.await.context(context)?;
        if head != self.header.encode() {
            return Err(Error::corrupt(format!("{} was changed while it was read", self.path.display())));
        }
        self.file = Some(file);
        (self.position, self.from) = (HEAD_BYTES as u64, 0);
        (self.counted, self.is_at_end) = (End::default(), false);
        Ok(())
    }

    async fn open(path: &Path) -> Result<Self> {
        let (its, context) = (path.to_owned(), || format!("can't read {}", path.display()));
        let opened = unblock_at(path, move || {
            // A pipe would be waited for, and cannot be read twice.
            let facts = std::fs::metadata(&its)?;
            if !facts.is_file() {
                let why = "a delta is a plain file, which is read twice: copy it into one";
                return Err(std::io::Error::new(IoErrorKind::InvalidInput, why));
            }
            let (bytes, mut file) = (facts.len(), BufReader::new(File::open(&its)?));
            let mut head = [0; HEAD_BYTES];
            match file.read_exact(&mut head) {
                Ok(()) => Ok((bytes, file, head)),
                // What is shorter is something else, as its first bytes say.
                Err(error) if error.kind() == IoErrorKind::UnexpectedEof => {
                    Ok((bytes, file, [0; HEAD_BYTES]))
                }
                Err(error) => Err(error),
            }
        });
        let (bytes, file, head) = opened.await.context(context)?;
        let header = Header::decode(&head).context(|| path.display().to_string())?;
        let position = HEAD_BYTES as u64;
        let file = Some(file);
        let counted = End::default();
        Ok(Self { path: path.to_owned(), file, header, bytes, position, from: 0, counted, is_at_end: false })
    }

    /// Some more records, all of them whole; nothing behind the last.
    async fn next(&mut self) -> Result<Option<Vec<Verified>>> {
        if self.is_at_end {
            return Ok(None);
        }
        let Some(mut file) = self.file.take() else { return Ok(None) };
        let (header, mut from, mut counted, mut position) =
            (self.header, self.from, self.counted, self.position);
        let read = unblock_at(&self.path, move || {
            let mut records = Vec::new();
            while records.len() < BATCH {
                let mut head = [0; HEAD_BYTES];
                read_all(&mut file, &mut head)?;
                position += HEAD_BYTES as u64;
                match Record::decode(&header, &head, from)? {
                    Found::Record(record) => {
                        let mut data = vec![0; record.follow()];
                        read_all(&mut file, &mut data)?;
                        position += data.len() as u64;
                        from = record.offset + record.len;
                        counted.add(record.len);
                        records.push(record.verified(&header, data)?);
                    }
                    Found::End(end) => {
                        let more = file.read(&mut [0]).context(|| "can't read")?;
                        if end != counted || more > 0 {
                            let why =
                                "the delta is damaged: it does not end where it says. Copy or make it again";
                            return Err(Error::corrupt(why));
                        }
                        return Ok((file, true, records, from, counted, position));
                    }
                }
            }
            Ok((file, false, records, from, counted, position))
        });
        let (file, is_at_end, records, from, counted, position) =
            read.await.context(|| self.path.display().to_string())?;
        (self.file, self.from, self.counted, self.position) = (Some(file), from, counted, position);
        self.is_at_end = is_at_end;
        Ok(Some(records))
    }
}

fn read_all(file: &mut BufReader<File>, bytes: &mut [u8]) -> Result<()> {
    file.read_exact(bytes).map_err(|error| match error.kind() {
        IoErrorKind::UnexpectedEof => Error::corrupt("the delta is cut off: copy or make it again"),
        _ => Error::io(error, "can't read"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_the_disk_differ() {
        let (mut before, mut after) = (vec![1; 20_000], vec![1; 20_000]);
        assert!(differing(0, &before, &after).is_empty());
        after[5000] = 2;
        after[9000] = 3;
        assert_eq!(differing(0, &before, &after), [(4096, 12_288, false)]);
        // Where the run does not begin with a block.
        assert_eq!(differing(8192 - 1000, &before, &after), [(1000, 5096 + 4096, false)]);
        before[12_288..16_384].fill(7);
        after[12_288..16_384].fill(0);
        after[19_999] = 9;
        let all = [(4096, 12_288, false), (12_288, 16_384, true), (16_384, 20_000, false)];
        assert_eq!(differing(0, &before, &after), all);
    }
}
