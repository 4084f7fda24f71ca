//! Reading, and querying the block status.

use smallvec::SmallVec;
use vellum_core::{
    Buffer, Extent, GuestOffset, GuestSpan, LocalFuture, Place, Result, SharedDisk, read_below, try_join_all,
};

use super::geometry::SUB_BLOCK;
use super::home_pages::Missing;
use super::image::{Native, Origin, Sub};

/// At most this many reads of one request are in flight at once.
const READS_AT_ONCE: usize = 32;
/// An answer ends after this many extents.
const EXTENTS_MAX: usize = 1024;
/// The mapping is queried for at most this many bytes at a time.
const LOOKED_AT_ONCE: u64 = 64 << 20;

/// A run of the disk whose bytes are in one place.
#[derive(Debug, Clone, Copy)]
pub(super) struct Part {
    pub(super) len: u64,
    pub(super) from: Origin,
}

pub(super) type Parts = SmallVec<[Part; 4]>;

/// What decides where the bytes of the base's range are.
#[derive(Clone, Copy)]
enum Look {
    /// Bits and masks.
    Recorded,
    /// Also the blocks that were filled, which are read from the image.
    Shown,
}

fn push(parts: &mut Parts, next: Part) {
    if let Some(last) = parts.last_mut() {
        let continues = match (last.from, next.from) {
            (Origin::Host(first), Origin::Host(second)) => first + last.len == second,
            (one, other) => one == other,
        };
        if continues {
            last.len += next.len;
            return;
        }
    }
    parts.push(next);
}

/// How many of the first parts make one read: those that are contiguous in the image, including whole packed
/// blocks.
fn joined(parts: &[Part]) -> usize {
    let place = |part: &Part| match part.from {
        Origin::Host(at) => Some(at),
        Origin::Embedded(at) if part.len == SUB_BLOCK.bytes() => Some(at),
        _ => None,
    };
    let follows = |pair: &[Part]| {
        let end = place(&pair[0]).map(|at| at + pair[0].len);
        end.is_some() && place(&pair[1]) == end
    };
    1 + parts.windows(2).take_while(|pair| follows(pair)).count()
}

impl Native {
    /// Adds the parts of the run as far as the pages in memory describe it. The error says from where on a
    /// page is missing, and which.
    fn cut(&self, span: GuestSpan, by: Look, parts: &mut Parts) -> Result<(), (GuestSpan, Missing)> {
        let mut rest = span;
        while !rest.is_empty() {
            let state = match by {
                Look::Recorded => self.first_state(rest),
                Look::Shown => self.first_state_shown(rest),
            };
            let (sub, len) = state.map_err(|missing| (rest, missing))?;
            let (mut now, later) = rest.split_at(len);
            match sub {
                Sub::Base => push(parts, Part { len, from: Origin::Below }),
                Sub::Zero => push(parts, Part { len, from: Origin::Zero }),
                Sub::Broken => push(parts, Part { len, from: Origin::Broken }),
                Sub::Image => {
                    while !now.is_empty() {
                        let from = GuestSpan::between(now.start(), rest.end());
                        let (origin, len) = self.place(now.start()).map_err(|missing| (from, missing))?;
                        let (here, next) = now.split_at(len);
                        push(parts, Part { len: here.len(), from: origin });
                        now = next;
                    }
                }
            }
            rest = later;
        }
        Ok(())
    }

    /// All parts of a run, as bits and masks say.
    pub(super) async fn parts(&self, span: GuestSpan) -> Result<Parts> {
        self.parts_by(span, Look::Recorded).await
    }

    async fn parts_by(&self, span: GuestSpan, by: Look) -> Result<Parts> {
        let mut parts = Parts::new();
        let mut rest = span;
        while let Err((from, missing)) = self.cut(rest, by, &mut parts) {
            rest = from;
            self.load(missing).await?;
        }
        Ok(parts)
    }

    pub(super) async fn read_span(&self, span: GuestSpan, mut buffer: Buffer) -> Result<Buffer> {
        // Everything that is looked up here stays in place until this request has left its epoch.
        let _inside = self.engine.epochs.enter();
        let parts = self.parts_by(span, Look::Shown).await?;
        if let [part] = parts[..] {
            return self.read_part(span.start(), part, buffer).await;
        }
        let mut at = span.start();
        let mut filled = Buffer::empty();
        for some in parts.chunks(READS_AT_ONCE) {
            let mut reads: SmallVec<[LocalFuture<'_, Result<Buffer>>; 4]> = SmallVec::new();
            let mut rest = some;
            while !rest.is_empty() {
                let (now, later) = rest.split_at(joined(rest));
                let len = now.iter().map(|part| part.len).sum();
                let piece = buffer.split_to(usize::try_from(len).expect("within the buffer"));
                match now {
                    [part] => reads.push(Box::pin(self.read_part(at, *part, piece))),
                    _ => reads.push(Box::pin(self.read_joined(at, now, piece))),
                }
                at += len;
                rest = later;
            }
            for piece in try_join_all(reads).await? {
                filled.append(piece);
            }
        }
        Ok(filled)
    }

    async fn read_part(&self, at: GuestOffset, part: Part, mut buffer: Buffer) -> Result<Buffer> {
        match part.from {
            Origin::Host(host) => self.plain()?.read(host, buffer).await,
            Origin::Embedded(block) => self.read_embedded(at, block, buffer).await,
            Origin::Below => self.read_base(self.below.as_ref(), at, buffer).await,
            Origin::Broken => Err(self.broken(at)),
            Origin::Moved => Box::pin(self.read_moved(at, buffer)).await,
            Origin::NoUnit | Origin::Zero => {
                buffer.fill(0);
                Ok(buffer)
            }
        }
    }

    /// Reads the base, up to the end of the part that counts.
    pub(super) async fn read_base(
        &self,
        base: Option<&SharedDisk>,
        at: GuestOffset,
        mut buffer: Buffer,
    ) -> Result<Buffer> {
        let counts = self.places.shape().base_bytes.unwrap_or(0).saturating_sub(at.bytes());
        let mut outside = buffer.split_off(usize::try_from(counts).unwrap_or(usize::MAX).min(buffer.len()));
        outside.fill(0);
        let mut inside = read_below(base, at, buffer).await?;
        inside.append(outside);
        Ok(inside)
    }

    pub(super) async fn map_span(&self, span: GuestSpan) -> Result<Vec<Extent>> {
        let (span, _) = span.split_at(LOOKED_AT_ONCE);
        // The old space of a unit that has moved is punched only after this request has left.
        let _inside = self.engine.epochs.enter();
        let parts = self.parts_by(span, Look::Shown).await?;
        let mut at = span.start();
        let mut extents = Vec::new();
        for part in parts.into_iter().take(EXTENTS_MAX) {
            let span = at.span(part.len);
            at = span.end();
            match part.from {
                Origin::Host(host) => self.map_host(span, host, &mut extents).await?,
                Origin::NoUnit => extents.push(Extent { span, place: self.nothing() }),
                Origin::Zero => extents.push(Extent { span, place: Place::Zero { allocated: false } }),
                // Both are read through the disk alone. A packed block is never overwritten.
                Origin::Embedded(block) => {
                    let from = Some((self.plain()?.clone(), block + SUB_BLOCK.within(span.start())));
                    extents.push(Extent { span, place: Place::Compressed { from } });
                }
                Origin::Moved => extents.push(Extent { span, place: Place::Compressed { from: None } }),
                Origin::Below => self.map_base(span, &mut extents),
                Origin::Broken => return Err(self.broken(span.start())),
            }
        }
        Ok(extents)
    }

    /// The state of a run for which nothing is stored. Without a base no image in the chain has data there.
    /// Over a base this image says that the run is zero.
    fn nothing(&self) -> Place {
        match self.places.shape().base_bytes {
            None => Place::Below,
            Some(_) => Place::Zero { allocated: false },
        }
    }

    /// The extents of a run that the image has. Holes of the host read as zero. In `linear` nothing is stored
    /// there; in a unit the hole is part of the stored unit.
    async fn map_host(
        &self,
        span: GuestSpan,
        host: vellum_core::ImageOffset,
        extents: &mut Vec<Extent>,
    ) -> Result<()> {
        let whole = host.span(span.len());
        let mut rest = whole;
        let place = |at| span.start() + (at - host);
        let hole = || if self.unit().is_none() { self.nothing() } else { Place::Zero { allocated: false } };
        while !rest.is_empty() && extents.len() < 2 * EXTENTS_MAX {
            let runs = self.data.runs(rest).await?;
            if runs.is_empty() {
                // Behind the end of the file.
                let span = place(rest.start()).span(rest.len());
                extents.push(Extent { span, place: hole() });
                return Ok(());
            }
            for run in runs {
                let here = match run.is_data {
                    true => Place::Data { storage: self.plain()?.clone(), at: run.span.start() },
                    false => hole(),
                };
                extents.push(Extent { span: place(run.span.start()).span(run.span.len()), place: here });
                rest = vellum_core::ImageSpan::between(run.span.end(), whole.end());
            }
        }
        if !rest.is_empty() {
            let span = place(rest.start()).span(rest.len());
            let place = Place::Data { storage: self.plain()?.clone(), at: rest.start() };
            extents.push(Extent { span, place });
        }
        Ok(())
    }

    /// The base behind the part that counts reads as zero, whatever it has there now.
    fn map_base(&self, span: GuestSpan, extents: &mut Vec<Extent>) {
        let end = GuestOffset::new(self.places.shape().base_bytes.unwrap_or(0));
        let (inside, outside) = span.split_at(end.bytes().saturating_sub(span.start().bytes()));
        if !inside.is_empty() {
            extents.push(Extent { span: inside, place: Place::Below });
        }
        if !outside.is_empty() {
            extents.push(Extent { span: outside, place: Place::Zero { allocated: false } });
        }
    }
}
