//! The export as a storage.
//!
//! Its length is fixed. A request is cut into pieces that the server takes. Of what is not aligned to the server's
//! blocks, reads read more than was asked for, and writes read the rest first, alone.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_lock::RwLock;
use vellum_core::pin::{Proof, ProofKind};
use vellum_core::{
    BlockSize, Buffer, Error, ErrorKind, ImageOffset, ImageSpan, Limits, LocalFuture, Result, Storage,
    StorageRun, Zeroes, try_join_all,
};
use vellum_export::nbd::wire::transmission_flag;

use super::desk::{Answer, Ask, Desk};
use super::handshake::ExportFacts;

/// A longer request goes out in pieces, so that the first bytes of the reply are taken while the next ones come.
const PIECE_BYTES: u64 = 1 << 20;
/// The longest run that one request zeroes or discards, in bytes: a server may have to write them.
const CHANGE_BYTES: u64 = 32 << 20;
/// The longest run whose status one request asks for, in bytes.
const STATUS_BYTES: u64 = 1 << 30;

/// A bounded command asks a server at most this many times what is stored. At a gibibyte a time that covers an export of 64 TiB.
pub const STATUSES_MAX: u64 = 64 << 10;
/// An answer to one of these questions may have at most this many runs.
const RUNS_PER_STATUS: u64 = 64;

/// An export of an NBD server.
pub struct NbdStorage {
    desk: Arc<Desk>,
    facts: ExportFacts,
    limits: Limits,
    /// Held alone by a write that reads what surrounds it first.
    around: RwLock<()>,
    /// How often it may be asked what is stored, how often it was, and how many runs that were.
    statuses_max: Option<u64>,
    statuses: AtomicU64,
    runs: AtomicU64,
}

impl Drop for NbdStorage {
    fn drop(&mut self) {
        self.desk.close();
    }
}

impl NbdStorage {
    pub(super) fn new(
        desk: Arc<Desk>,
        facts: ExportFacts,
        read_only: bool,
        statuses_max: Option<u64>,
    ) -> Result<Self> {
        let name = desk.name();
        if !read_only && facts.is_read_only() {
            return Err(Error::new(
                ErrorKind::ReadOnly,
                format!("can't write {name}: the export is read-only"),
            ));
        }
        if !facts.size.is_multiple_of(facts.block_size.bytes()) {
            return Err(Error::unsupported(format!(
                "{name}: its size, {} bytes, is no multiple of the {} bytes in which it can be read",
                facts.size,
                facts.block_size.bytes()
            )));
        }
        let limits = Limits {
            block_size: facts.block_size,
            physical_block: BlockSize::PAGE,
            fixed_len: true,
            read_only,
            grows_zeroed: false,
            fast_zeroes: facts.has(transmission_flag::SEND_WRITE_ZEROES),
            discards: facts.has(transmission_flag::SEND_TRIM),
            prefers_written: false,
        };
        Ok(Self {
            desk,
            facts,
            limits,
            around: RwLock::new(()),
            statuses_max,
            statuses: AtomicU64::new(0),
            runs: AtomicU64::new(0),
        })
    }

    /// What its server states of it.
    pub fn facts(&self) -> &ExportFacts {
        &self.facts
    }

    fn piece_bytes(&self) -> u64 {
        self.facts.block_size.round_down(PIECE_BYTES.min(u64::from(self.facts.payload_max)))
    }

    /// Reads a run that is aligned and inside the export.
    async fn read_aligned(&self, at: u64, mut buffer: Buffer) -> Result<Buffer> {
        let size = usize::try_from(self.piece_bytes()).expect("a piece is short");
        let mut pieces = Vec::new();
        let mut start = at;
        while !buffer.is_empty() {
            let piece = buffer.split_to(size.min(buffer.len()));
            let len = piece.len() as u64;
            pieces.push(Box::pin(self.desk.submit(Ask::Read { at: start, buffer: piece })));
            start += len;
        }
        let mut whole = Buffer::empty();
        for answer in try_join_all(pieces).await? {
            let Answer::Bytes(piece) = answer else { unreachable!("a read is answered with bytes") };
            whole.append(piece);
        }
        Ok(whole)
    }

    async fn read_inside(&self, at: u64, mut buffer: Buffer) -> Result<Buffer> {
        let asked = ImageOffset::new(at).span(buffer.len() as u64);
        let wide = self.facts.block_size.widen(asked);
        if wide == asked {
            return self.read_aligned(at, buffer).await;
        }
        let len = usize::try_from(wide.len()).map_err(|_| Error::invalid("a read is too long"))?;
        let bytes = self.read_aligned(wide.start().bytes(), Buffer::for_overwrite(len)).await?;
        let before = usize::try_from(at - wide.start().bytes()).expect("less than a block");
        let bytes = bytes.contiguous();
        buffer.copy_from(0, &bytes.slice()[before..before + buffer.len()]);
        Ok(buffer)
    }

    /// Writes a run that is aligned and inside the export.
    async fn write_aligned(&self, at: u64, mut data: Buffer) -> Result<()> {
        let size = usize::try_from(self.piece_bytes()).expect("a piece is short");
        let mut pieces = Vec::new();
        let mut start = at;
        while !data.is_empty() {
            let piece = data.split_to(size.min(data.len()));
            let len = piece.len() as u64;
            pieces.push(Box::pin(self.desk.submit(Ask::Write { at: start, data: piece })));
            start += len;
        }
        try_join_all(pieces).await.map(drop)
    }

    async fn write_inside(&self, at: u64, data: Buffer) -> Result<()> {
        let asked = ImageOffset::new(at).span(data.len() as u64);
        let wide = self.facts.block_size.widen(asked);
        if wide == asked {
            let _shared = self.around.read().await;
            return self.write_aligned(at, data).await;
        }
        let _alone = self.around.write().await;
        let len = usize::try_from(wide.len()).map_err(|_| Error::invalid("a write is too long"))?;
        let around = self.read_aligned(wide.start().bytes(), Buffer::for_overwrite(len)).await?;
        let mut around = around.contiguous();
        let before = usize::try_from(at - wide.start().bytes()).expect("less than a block");
        around.copy_from(before, &data.to_vec());
        self.write_aligned(wide.start().bytes(), around).await
    }

    fn check_change(&self, span: ImageSpan) -> Result<()> {
        let name = self.desk.name();
        if self.limits.read_only {
            return Err(Error::new(ErrorKind::ReadOnly, format!("{name} is open for reading only")));
        }
        if span.end().bytes() > self.facts.size {
            return Err(Error::new(
                ErrorKind::NoSpace,
                format!("{name} is {} bytes long and cannot grow", self.facts.size),
            ));
        }
        Ok(())
    }

    /// The part of the run that is inside the export.
    fn inside(&self, span: ImageSpan) -> ImageSpan {
        span.intersect(ImageOffset::ZERO.span(self.facts.size))
    }

    async fn zero(&self, span: ImageSpan, how: Zeroes) -> Result<()> {
        self.check_change(span)?;
        let aligned = self.facts.block_size.narrow(span);
        if !self.limits.fast_zeroes || aligned.is_empty() {
            return self.write_zeros(span).await;
        }
        self.write_zeros(ImageSpan::between(span.start(), aligned.start())).await?;
        self.write_zeros(ImageSpan::between(aligned.end(), span.end())).await?;
        let mut rest = aligned;
        let _shared = self.around.read().await;
        while !rest.is_empty() {
            let (piece, after) = rest.split_at(CHANGE_BYTES.min(rest.len()));
            let len = u32::try_from(piece.len()).expect("a piece is short");
            let keeps_space = how == Zeroes::Allocated;
            self.desk.submit(Ask::Zero { at: piece.start().bytes(), len, keeps_space }).await?;
            rest = after;
        }
        Ok(())
    }

    /// Writes zeros one by one.
    async fn write_zeros(&self, span: ImageSpan) -> Result<()> {
        let mut rest = span;
        while !rest.is_empty() {
            let (piece, after) = rest.split_at(self.piece_bytes().min(rest.len()));
            let len = usize::try_from(piece.len()).expect("a piece is short");
            self.write_inside(piece.start().bytes(), Buffer::zeroed(len)).await?;
            rest = after;
        }
        Ok(())
    }

    async fn trim(&self, span: ImageSpan) -> Result<()> {
        let mut rest = self.facts.block_size.narrow(self.inside(span));
        self.check_change(rest)?;
        if !self.limits.discards {
            return Ok(());
        }
        let _shared = self.around.read().await;
        while !rest.is_empty() {
            let (piece, after) = rest.split_at(CHANGE_BYTES.min(rest.len()));
            let len = u32::try_from(piece.len()).expect("a piece is short");
            self.desk.submit(Ask::Trim { at: piece.start().bytes(), len }).await?;
            rest = after;
        }
        Ok(())
    }

    /// One more question for what is stored, from here on. A server may have an export as large as it likes, and say as little of it at a time.
    fn count_status(&self, at: ImageOffset) -> Result<()> {
        let (Some(max), asked) = (self.statuses_max, self.statuses.fetch_add(1, Ordering::Relaxed)) else {
            return Ok(());
        };
        let runs = self.runs.load(Ordering::Relaxed);
        if asked < max && runs < max * RUNS_PER_STATUS {
            return Ok(());
        }
        Err(Error::unsupported(format!(
            "{}: its server was asked {asked} times what is stored, and has told {runs} parts, up to {at} of {} bytes: it is asked no \
             further (`vellum map --start-offset N --max-length N` maps a part)",
            self.desk.name(),
            self.facts.size
        )))
    }

    async fn status(&self, span: ImageSpan) -> Result<Vec<StorageRun>> {
        let span = self.inside(span);
        if span.is_empty() {
            return Ok(Vec::new());
        }
        if self.facts.allocation.is_none() {
            return Ok(vec![StorageRun { span, is_data: true }]);
        }
        self.count_status(span.start())?;
        let wide = self.facts.block_size.widen(span);
        let (asked, _) = wide.split_at(STATUS_BYTES.min(wide.len()));
        let len = u32::try_from(asked.len()).expect("a status is about at most 1 GiB");
        let answer = self.desk.submit(Ask::Status { at: asked.start().bytes(), len }).await?;
        let Answer::Runs(runs) = answer else { unreachable!("a status is answered with runs") };
        self.runs.fetch_add(runs.len() as u64, Ordering::Relaxed);
        let mut at = asked.start();
        let mut found: Vec<StorageRun> = Vec::new();
        for (len, is_data) in runs {
            let run = at.span(len);
            at = run.end();
            let run = run.intersect(span);
            if !run.is_empty() {
                found.push(StorageRun { span: run, is_data });
            }
        }
        match found.is_empty() {
            true => Ok(vec![StorageRun { span, is_data: true }]),
            false => Ok(found),
        }
    }
}

impl Storage for NbdStorage {
    fn name(&self) -> &str {
        self.desk.name()
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn len(&self) -> u64 {
        self.facts.size
    }

    fn proof(&self) -> Option<Proof> {
        let number = self.facts.moved.as_ref()?;
        Proof::new(ProofKind::Moved, self.facts.size, number).ok()
    }

    fn description(&self) -> String {
        self.facts.description.clone()
    }

    fn read(&self, at: ImageOffset, mut buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        Box::pin(async move {
            let inside = self.facts.size.saturating_sub(at.bytes()).min(buffer.len() as u64);
            let past = buffer.split_off(usize::try_from(inside).expect("at most the length of a buffer"));
            let mut read = match buffer.is_empty() {
                true => buffer,
                false => self.read_inside(at.bytes(), buffer).await?,
            };
            let mut past = past;
            past.fill(0);
            read.append(past);
            Ok(read)
        })
    }

    fn write(&self, at: ImageOffset, data: Buffer) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.check_change(at.span(data.len() as u64))?;
            match data.is_empty() {
                true => Ok(()),
                false => self.write_inside(at.bytes(), data.owned()).await,
            }
        })
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            match self.facts.has(transmission_flag::SEND_FLUSH) && !self.limits.read_only {
                true => self.desk.submit(Ask::Flush).await.map(drop),
                // Without the flag what is answered is durable, as far as such a server can say so.
                false => Ok(()),
            }
        })
    }

    fn write_zeroes(&self, span: ImageSpan, how: Zeroes) -> LocalFuture<'_, Result<()>> {
        Box::pin(self.zero(span, how))
    }

    fn discard(&self, span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        Box::pin(self.trim(span))
    }

    fn set_len(&self, _len: u64) -> LocalFuture<'_, Result<()>> {
        let error = Error::unsupported(format!("{}: the size of an NBD export is fixed", self.desk.name()));
        Box::pin(std::future::ready(Err(error)))
    }

    fn preallocate(&self, _span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        let error = Error::unsupported(format!("{}: an NBD server reserves no space", self.desk.name()));
        Box::pin(std::future::ready(Err(error)))
    }

    fn runs(&self, span: ImageSpan) -> LocalFuture<'_, Result<Vec<StorageRun>>> {
        Box::pin(self.status(span))
    }
}
