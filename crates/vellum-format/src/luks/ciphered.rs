//! A storage whose sectors are encrypted, as one that has the bytes before they were.
//!
//! ```text
//!   begin of the data                                       sector n of the cipher
//!   ├───────┬───────┬───────┬─ … of the storage below   ──decrypt──►   ├───────┬───── … of this one
//! ```
//!
//! 1. Buffers of the caller are never encrypted in place: what is written is a copy. What is read into memory that
//!    is lent to a guest passes through memory of our own, so no guest sees it encrypted.
//! 2. A sector is what one initial vector is for: 512 bytes, or up to 4096 in version 2 of LUKS. A part of a sector is read, changed and written as a whole, while no other write is in flight: the only case in
//!    which a lock is held across a transfer. Everybody who writes whole sectors shares that lock.
//! 3. Where a format says so ([`Unwritten::Zeros`]), a sector of which all stored bytes are zero reads as zero. Nothing
//!    else is ever stored as such a sector: `seal` refuses it.
//! 4. It cannot be made longer, because what a longer storage has behind the old end would not read as zero. Nothing
//!    is ever a hole, and a discard does nothing, for the same reason.

use std::sync::Arc;

use vellum_core::pin::Proof;
use vellum_core::{
    BlockSize, Buffer, Error, ErrorKind, ImageOffset, ImageSpan, Limits, LocalFuture, Offload, Result,
    SharedStorage, Storage, StorageRun, Zeroes, is_zero, offload,
};
use vellum_luks::{SECTOR, SectorCipher};

use crate::shared_or_alone::SharedOrAlone;

/// More bytes are encrypted and decrypted elsewhere, so that the worker serves others meanwhile.
const HERE_MAX: usize = 256 << 10;
/// Zeros are encrypted and written in pieces of this many bytes.
const ZEROS_AT_ONCE: u64 = 1 << 20;

/// What a sector is whose stored bytes are all zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unwritten {
    /// Encrypted like any other: it decrypts to random bytes.
    Random,
    /// One that nobody has written, or that was made zero: it is zero.
    Zeros,
}

/// The storage.
pub(crate) struct Ciphered {
    inner: SharedStorage,
    /// Where sector 0 of the cipher is.
    begin: u64,
    /// Where it ends; nothing where it ends with the storage below, however long that becomes.
    end: Option<u64>,
    /// What is encrypted as one.
    block: BlockSize,
    /// What is added to the number of a sector here.
    shift: u64,
    limits: Limits,
    cipher: Arc<SectorCipher>,
    unwritten: Unwritten,
    offload: Arc<dyn Offload>,
    /// Shared by those who write whole sectors.
    parts: SharedOrAlone,
}

/// The number of the sector that begins here.
pub(super) fn first_sector(at: ImageOffset) -> u64 {
    at.bytes() / SECTOR as u64
}

/// An encrypted copy of whole sectors, of which the first has this number.
///
/// # Errors
/// `Io` when a sector would be stored as the zeros that mean that nobody has written it.
pub(crate) async fn seal(
    cipher: &Arc<SectorCipher>,
    unwritten: Unwritten,
    place: &Arc<dyn Offload>,
    first: u64,
    data: &Buffer,
) -> Result<Buffer> {
    let mut copy = data.duplicate();
    let encrypt = move |cipher: &SectorCipher| {
        cipher.encrypt(first, copy.slice_mut());
        let is_taken = unwritten == Unwritten::Zeros && copy.slice().chunks(SECTOR).any(is_zero);
        (copy, is_taken)
    };
    let (copy, is_taken) = match data.len() <= HERE_MAX {
        true => encrypt(cipher),
        false => {
            let cipher = cipher.clone();
            offload(&**place, move || encrypt(&cipher)).await
        }
    };
    match is_taken {
        false => Ok(copy),
        // Once in 2^4096 sectors, or the guest knows the key.
        true => Err(Error::new(
            ErrorKind::Io,
            "what is written encrypts to nothing but zeros: write something else",
        )),
    }
}

/// Decrypts the sectors of a piece of which the first has this number.
fn decrypt(cipher: &SectorCipher, unwritten: Unwritten, first: u64, piece: &mut [u8]) {
    if unwritten == Unwritten::Random {
        return cipher.decrypt(first, piece);
    }
    let count = piece.len() / SECTOR;
    let is_written = |piece: &[u8], sector: usize| !is_zero(&piece[sector * SECTOR..(sector + 1) * SECTOR]);
    let mut sector = 0;
    while sector < count {
        let end = (sector..count).find(|at| !is_written(piece, *at)).unwrap_or(count);
        cipher.decrypt(first + sector as u64, &mut piece[sector * SECTOR..end * SECTOR]);
        sector = (end..count).find(|at| is_written(piece, *at)).unwrap_or(count);
    }
}

/// Decrypts whole sectors that were read into memory of our own, of which the first has this number.
async fn unseal(
    cipher: &Arc<SectorCipher>,
    unwritten: Unwritten,
    place: &Arc<dyn Offload>,
    first: u64,
    mut data: Buffer,
) -> Buffer {
    let decrypt = move |cipher: &SectorCipher, data: &mut Buffer| {
        let mut first = first;
        for piece in data.pieces_mut() {
            decrypt(cipher, unwritten, first, piece);
            first += (piece.len() / SECTOR) as u64;
        }
    };
    if data.len() <= HERE_MAX {
        decrypt(cipher, &mut data);
        return data;
    }
    let cipher = cipher.clone();
    offload(&**place, move || {
        decrypt(&cipher, &mut data);
        data
    })
    .await
}

impl Ciphered {
    /// The data of `inner` from `begin` to its end.
    pub(crate) fn behind(
        begin: u64,
        inner: SharedStorage,
        cipher: Arc<SectorCipher>,
        offload: Arc<dyn Offload>,
    ) -> Self {
        let len = inner.len().saturating_sub(begin);
        let all = Self::all_of(inner, cipher, offload);
        Self { begin, end: Some(all.block.round_down(len)), ..all }
    }

    /// As it is, but for an end that may lie within a sector.
    pub(super) fn ending_at(self, end: u64) -> Self {
        Self { end: Some(end), ..self }
    }

    /// All of `inner`, which may become longer: for reading what others encrypt there.
    pub(crate) fn all_of(inner: SharedStorage, cipher: Arc<SectorCipher>, offload: Arc<dyn Offload>) -> Self {
        let block = BlockSize::from_shift(cipher.sector_bytes().trailing_zeros());
        let limits = Limits {
            block_size: inner.limits().block_size.max(block),
            fixed_len: true,
            grows_zeroed: false,
            fast_zeroes: false,
            discards: false,
            ..inner.limits().clone()
        };
        let unwritten = Unwritten::Random;
        Self {
            inner,
            begin: 0,
            end: None,
            block,
            shift: 0,
            limits,
            cipher,
            unwritten,
            offload,
            parts: SharedOrAlone::default(),
        }
    }

    /// The same, of a format in which a sector of zeros is one that nobody has written.
    pub(super) fn with_unwritten(self, unwritten: Unwritten) -> Self {
        Self { unwritten, ..self }
    }

    /// The same, with this added to the number of each sector.
    pub(crate) fn shifted(self, shift: u64) -> Self {
        Self { shift, ..self }
    }

    fn number(&self, at: ImageOffset) -> u64 {
        first_sector(at).wrapping_add(self.shift)
    }

    fn within(&self, span: ImageSpan) -> ImageSpan {
        (span.start() + self.begin).span(span.len())
    }

    fn check_end(&self, span: ImageSpan) -> Result<()> {
        match self.end {
            Some(end) if span.end().bytes() > end => Err(Error::new(
                ErrorKind::NoSpace,
                format!("{}: its encrypted data ends at {end}", self.inner.name()),
            )),
            _ => Ok(()),
        }
    }

    /// Reads whole sectors.
    async fn read_whole(&self, at: ImageOffset, mut buffer: Buffer) -> Result<Buffer> {
        let sector = self.cipher.sector_bytes();
        let is_ours = !buffer.is_lent() && buffer.piece_lengths().all(|len| len.is_multiple_of(sector));
        let own = match is_ours {
            true => std::mem::take(&mut buffer),
            false => Buffer::for_overwrite(buffer.len()),
        };
        let own = self.inner.read(at + self.begin, own).await?;
        let own = unseal(&self.cipher, self.unwritten, &self.offload, self.number(at), own).await;
        if is_ours {
            return Ok(own);
        }
        buffer.copy_from(0, own.slice());
        Ok(buffer)
    }

    async fn read_any(&self, at: ImageOffset, mut buffer: Buffer) -> Result<Buffer> {
        let span = at.span(buffer.len() as u64);
        if buffer.is_empty() {
            return Ok(buffer);
        }
        if self.block.aligns(at) && self.block.aligns(span.end()) {
            return self.read_whole(at, buffer).await;
        }
        let start = ImageOffset::new(self.block.round_down(at.bytes()));
        let end = self.block.round_up(span.end().bytes());
        let len = usize::try_from(end - start.bytes()).expect("a request fits memory");
        let whole = self.read_whole(start, Buffer::for_overwrite(len)).await?;
        let skip = usize::try_from(at - start).expect("within a sector");
        buffer.copy_from(0, &whole.slice()[skip..skip + buffer.len()]);
        Ok(buffer)
    }

    async fn write_whole(&self, at: ImageOffset, data: &Buffer) -> Result<()> {
        let sealed = seal(&self.cipher, self.unwritten, &self.offload, self.number(at), data).await?;
        self.inner.write(at + self.begin, sealed).await
    }

    async fn write_any(&self, at: ImageOffset, data: Buffer) -> Result<()> {
        let span = at.span(data.len() as u64);
        self.check_end(span)?;
        if data.is_empty() {
            return Ok(());
        }
        if self.block.aligns(at) && self.block.aligns(span.end()) {
            let _shared = self.parts.shared().await;
            return self.write_whole(at, &data).await;
        }
        let _alone = self.parts.alone().await;
        let start = ImageOffset::new(self.block.round_down(at.bytes()));
        let end = self.block.round_up(span.end().bytes());
        let len = usize::try_from(end - start.bytes()).expect("a request fits memory");
        let mut whole = self.read_whole(start, Buffer::for_overwrite(len)).await?;
        let skip = usize::try_from(at - start).expect("within a sector");
        data.copy_to(0, &mut whole.slice_mut()[skip..skip + data.len()]);
        self.write_whole(start, &whole).await
    }
}

impl Storage for Ciphered {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn len(&self) -> u64 {
        self.end.unwrap_or_else(|| self.inner.len())
    }

    fn proof(&self) -> Option<Proof> {
        self.inner.proof()
    }

    fn proof_now(&self) -> LocalFuture<'_, Result<Option<Proof>>> {
        self.inner.proof_now()
    }

    fn description(&self) -> String {
        self.inner.description()
    }

    fn read(&self, at: ImageOffset, mut buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        Box::pin(async move {
            // What lies past the end reads as zero.
            let room = self.end.map_or(u64::MAX, |end| end.saturating_sub(at.bytes()));
            let inside = usize::try_from(room).unwrap_or(usize::MAX);
            let mut behind = buffer.split_off(buffer.len().min(inside));
            behind.fill(0);
            let mut read = self.read_any(at, buffer).await?;
            read.append(behind);
            Ok(read)
        })
    }

    fn write(&self, at: ImageOffset, data: Buffer) -> LocalFuture<'_, Result<()>> {
        Box::pin(self.write_any(at, data))
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        self.inner.flush()
    }

    fn reconcile(&self, span: ImageSpan) -> LocalFuture<'_, Result<bool>> {
        self.inner.reconcile(self.within(span))
    }

    fn write_zeroes(&self, span: ImageSpan, _how: Zeroes) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.check_end(span)?;
            for part in BlockSize::from_shift(ZEROS_AT_ONCE.trailing_zeros()).pieces_of(span) {
                let len = usize::try_from(part.len()).expect("a piece is small");
                self.write_any(part.start(), Buffer::zeroed(len)).await?;
            }
            Ok(())
        })
    }

    fn discard(&self, _span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn set_len(&self, _len: u64) -> LocalFuture<'_, Result<()>> {
        Box::pin(std::future::ready(Err(Error::unsupported(format!(
            "{}: encrypted data has a fixed length",
            self.inner.name()
        )))))
    }

    fn preallocate(&self, _span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        Box::pin(std::future::ready(Err(Error::unsupported(format!(
            "{}: encrypted data cannot be reserved",
            self.inner.name()
        )))))
    }

    fn runs(&self, span: ImageSpan) -> LocalFuture<'_, Result<Vec<StorageRun>>> {
        let end = span.end().bytes().min(self.len());
        let runs = match end > span.start().bytes() {
            true => vec![StorageRun { span: span.start().span(end - span.start().bytes()), is_data: true }],
            false => Vec::new(),
        };
        Box::pin(std::future::ready(Ok(runs)))
    }
}
