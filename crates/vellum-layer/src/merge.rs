//! What images of a chain have, written into one below them: the copying of a commit, of closed images and of a disk that
//! is served.
//!
//! ```text
//!   top ──┐  for each run the uppermost image decides that has it
//!   …   ──┤  data is read from it; zeros are written as zeros
//!         └──► base, open for writing
//! ```
//!
//! 1. Only what an image above the base has is written into the base. So what is written is hidden there from whoever reads
//!    through those images: they read the same before, meanwhile and afterwards, also after a crash at any moment.
//! 2. The end of an image hides what is below it, too: behind it the one above reads zeros.
//! 3. No lock and no claim is held across a transfer. What changes while it is copied is noted by whoever lets it be
//!    changed ([`Notes`](crate::noted::Notes)), and copied again.

use vellum_core::{
    Buffer, Context, GuestOffset, GuestSpan, LocalFuture, Place, Result, SharedDisk, WriteFlags, ZeroFlags,
    try_join_all,
};

/// Data is moved in pieces of this many bytes.
const PIECE: u64 = 1 << 20;
/// And zeros in pieces of this many.
const ZEROS: u64 = 64 << 20;

/// Whoever is asked before each piece.
pub trait Steering {
    /// Waits until a piece with so many bytes of data may be moved.
    ///
    /// # Errors
    /// Why nothing is moved any more. To stop is safe at any time.
    fn go_on(&self, bytes: u64) -> LocalFuture<'_, Result<()>>;

    /// How many pieces of data may be on their way at once. One after the other delays requests of guests the least.
    fn pieces_at_once(&self) -> usize {
        1
    }
}

/// The disks between which bytes move.
pub struct Merge<'a> {
    /// From the top down. Their maps say what each has, without what is below it.
    pub layers: Vec<SharedDisk>,
    /// What gets it all. It is at least as large as the spans that are merged.
    pub base: SharedDisk,
    /// How fast.
    pub steering: &'a dyn Steering,
}

impl Merge<'_> {
    /// All of a disk of this many bytes. `progress` gets the bytes done. Returns how many bytes of data were written.
    ///
    /// # Errors
    /// Those of the disks and of the steering.
    pub async fn all(&self, size: u64, progress: &dyn Fn(u64)) -> Result<u64> {
        let (mut rest, mut written) = (GuestOffset::ZERO.span(size), 0);
        while !rest.is_empty() {
            let now;
            (now, rest) = rest.split_at(ZEROS);
            written += self.span(now).await?;
            progress(now.end().bytes());
        }
        Ok(written)
    }

    /// What the layers have of this span. Returns how many bytes of data were written.
    ///
    /// # Errors
    /// As above.
    pub async fn span(&self, span: GuestSpan) -> Result<u64> {
        self.run(0, span).await
    }

    /// Makes it durable in the base.
    ///
    /// # Errors
    /// Those of the base.
    pub async fn flush(&self) -> Result<()> {
        self.base.flush().await.context(|| "can't flush the backing image")
    }

    /// What this layer and those below it have of a run.
    fn run(&self, depth: usize, run: GuestSpan) -> LocalFuture<'_, Result<u64>> {
        Box::pin(async move {
            let Some(layer) = self.layers.get(depth) else { return Ok(0) }; // the base has it
            let (mut rest, behind) = {
                let within = run.intersect(GuestOffset::ZERO.span(layer.geometry().size));
                (within, GuestSpan::between(within.end().max(run.start()), run.end()))
            };
            let mut written = 0;
            while !rest.is_empty() {
                let extents = layer.map(rest).await?;
                for extent in &extents {
                    written += match extent.place {
                        Place::Below => self.run(depth + 1, extent.span).await?,
                        Place::Zero { .. } => self.zeros(extent.span).await?,
                        Place::Data { .. } | Place::Compressed { .. } => {
                            self.data(layer, extent.span).await?
                        }
                    };
                }
                let done = extents.last().map_or(rest.end(), |extent| extent.span.end());
                rest = GuestSpan::between(done, rest.end());
            }
            written += self.zeros(behind).await?;
            Ok(written)
        })
    }

    async fn zeros(&self, run: GuestSpan) -> Result<u64> {
        let mut rest = run;
        while !rest.is_empty() {
            self.steering.go_on(0).await?;
            let now;
            (now, rest) = rest.split_at(ZEROS);
            let flags = ZeroFlags { may_unmap: true, ..ZeroFlags::default() };
            self.base
                .write_zeroes(now, flags)
                .await
                .context(|| format!("can't write zeros at {}", now.start()))?;
        }
        Ok(0)
    }

    async fn data(&self, layer: &SharedDisk, run: GuestSpan) -> Result<u64> {
        let mut rest = run;
        while !rest.is_empty() {
            let mut pieces = Vec::new();
            while pieces.len() < self.steering.pieces_at_once().max(1) && !rest.is_empty() {
                let now;
                (now, rest) = rest.split_at(PIECE - rest.start().bytes() % PIECE);
                self.steering.go_on(now.len()).await?;
                pieces.push(Box::pin(self.piece(layer, now)) as LocalFuture<'_, Result<()>>);
            }
            try_join_all(pieces).await?;
        }
        Ok(run.len())
    }

    async fn piece(&self, layer: &SharedDisk, piece: GuestSpan) -> Result<()> {
        let bytes = usize::try_from(piece.len()).expect("a piece");
        let data = layer
            .read(piece.start(), Buffer::for_overwrite(bytes))
            .await
            .context(|| format!("can't read {bytes} bytes at {}", piece.start()))?;
        self.base
            .write(piece.start(), data, WriteFlags::default())
            .await
            .context(|| format!("can't write {bytes} bytes at {}", piece.start()))
    }
}
