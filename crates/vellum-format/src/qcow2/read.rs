//! Reading: look up the mapping, then move bytes. Neither waits for a lock, a commit or a flush.
//!
//! The plan ([`Part`]s, adjacent ones merged) is made from memory. It waits only for a page of the mapping
//! that is not in memory. Then all parts are read at once, each into its own piece of the guest's buffer.

use smallvec::SmallVec;
use vellum_core::{
    Buffer, GuestOffset, GuestSpan, ImageOffset, ImageSpan, LocalFuture, Result, read_below, try_join_all,
};

use super::entry::{ClusterState, Units};
use super::image::{Missing, Qcow2};

/// At most this many parts of one request are read at once.
const READS_AT_ONCE: usize = 32;

/// Bytes of the request that are contiguous in one kind of place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) len: u64,
    pub(crate) from: Origin,
}

/// The place of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// They are zero; `allocated` when space is reserved for them.
    Zero { allocated: bool },
    /// In the data storage, from here on.
    Host(ImageOffset),
    /// In the disk below, at the guest's own offset.
    Below,
    /// In a compressed cluster, from this byte of it on.
    Compressed { packed: ImageSpan, skip: u64 },
}

/// The parts of a request.
pub(crate) type Parts = SmallVec<[Part; 4]>;

fn push(parts: &mut Parts, next: Part) {
    if let Some(last) = parts.last_mut() {
        let continues = match (last.from, next.from) {
            (Origin::Host(a), Origin::Host(b)) => a.checked_add(last.len) == Some(b),
            (Origin::Compressed { .. }, _) => false,
            (a, b) => a == b,
        };
        if continues {
            last.len += next.len;
            return;
        }
    }
    parts.push(next);
}

impl Qcow2 {
    /// Adds the parts of a run that lies within one cluster.
    fn cut_cluster(&self, span: GuestSpan, state: ClusterState, parts: &mut Parts) {
        let units = match state {
            ClusterState::Compressed(packed) => {
                let skip = self.cluster.within(span.start());
                return push(parts, Part { len: span.len(), from: Origin::Compressed { packed, skip } });
            }
            ClusterState::Plain(units) => units,
        };
        let size = self.entries.unit_size();
        for piece in size.pieces_of(span) {
            let within = self.cluster.within(piece.start());
            let from = self.unit_place(units, within);
            push(parts, Part { len: piece.len(), from });
        }
    }

    /// The place of the byte `within` a cluster of these units.
    fn unit_place(&self, units: Units, within: u64) -> Origin {
        let bit = 1 << (within >> self.entries.unit_size().shift());
        match units.host {
            Some(host) if units.alloc & bit != 0 => Origin::Host(host + within),
            _ if units.zero & bit != 0 => Origin::Zero { allocated: units.host.is_some() },
            _ => Origin::Below,
        }
    }

    /// The parts of the run, as far as the pages in memory tell; otherwise the rest and the page that is
    /// missing.
    pub(crate) fn cut(&self, span: GuestSpan, parts: &mut Parts) -> Result<Result<(), (GuestSpan, Missing)>> {
        let mut rest = span;
        while !rest.is_empty() {
            let (now, later) = self.first_part(rest);
            // Most requests are within one cluster.
            if later.is_empty() {
                match self.lookup(self.cluster.cluster_of(now.start()))? {
                    Ok(state) => self.cut_cluster(now, state, parts),
                    Err(missing) => return Ok(Err((rest, missing))),
                }
                break;
            }
            // A page that is missing because its table is would be waited for in vain.
            if let Some((now, later)) = self.mapping.without_table(rest) {
                push(parts, Part { len: now.len(), from: self.unit_place(Units::default(), 0) });
                rest = later;
                continue;
            }
            rest = match self.cut_page(rest, parts)? {
                Ok(later) => later,
                Err(missing) => return Ok(Err((rest, missing))),
            };
        }
        Ok(Ok(()))
    }

    /// As above, as far as one page of the mapping reaches; returns the rest. The run begins under a table. The page is found
    /// once, and where a cluster lies behind the one before, as most do, no entry is decoded.
    ///
    /// A page that is evicted meanwhile still says where the bytes were when this began.
    fn cut_page(&self, span: GuestSpan, parts: &mut Parts) -> Result<Result<GuestSpan, Missing>> {
        let slot = self.mapping.slot(self.cluster.cluster_of(span.start()));
        let Some(page) = self.mapping.page(slot.page) else { return Ok(Err(Missing(slot.page))) };
        let page = page.as_ref().expect("a found page is there");
        let step = self.cluster.bytes();
        let mut rest = span;
        let mut next = None;
        for index in slot.index..page.entries() {
            if rest.is_empty() {
                break;
            }
            let words = page.entry(index);
            if next == Some(words)
                && rest.len() >= step
                && let Some(last) = parts.last_mut()
            {
                last.len += step;
                (_, rest) = rest.split_at(step);
            } else {
                let (now, later) = self.first_part(rest);
                self.cut_cluster(now, self.decode(self.cluster.cluster_of(now.start()), words)?, parts);
                rest = later;
            }
            next = self.entries.next_to(words);
        }
        Ok(Ok(rest))
    }

    pub(crate) async fn read_span(&self, span: GuestSpan, mut buffer: Buffer) -> Result<Buffer> {
        // Places that are looked up here stay valid until this request has left.
        let _inside = self.engine.epochs.enter();
        let mut parts = Parts::new();
        let mut rest = span;
        while let Err((from, Missing(page))) = self.cut(rest, &mut parts)? {
            rest = from;
            Box::pin(self.load(page)).await?;
        }
        if let [part] = parts[..] {
            return self.read_part(span.start(), part, buffer).await;
        }
        let mut at = span.start();
        let mut filled = Buffer::empty();
        for some in parts.chunks(READS_AT_ONCE) {
            let mut reads: SmallVec<[LocalFuture<'_, Result<Buffer>>; 4]> = SmallVec::new();
            for part in some {
                let piece = buffer.split_to(usize::try_from(part.len).expect("within the buffer"));
                reads.push(Box::pin(self.read_part(at, *part, piece)));
                at += part.len;
            }
            for piece in try_join_all(reads).await? {
                filled.append(piece);
            }
        }
        Ok(filled)
    }

    async fn read_part(&self, at: GuestOffset, part: Part, mut buffer: Buffer) -> Result<Buffer> {
        match part.from {
            Origin::Host(host) if self.old_cipher.is_some() => {
                let plain = self.plain_at(host, at);
                plain.read(host, buffer).await
            }
            Origin::Host(host) => self.plain.read(host, buffer).await,
            Origin::Below => read_below(self.below.as_ref(), at, buffer).await,
            Origin::Zero { .. } => {
                buffer.fill(0);
                Ok(buffer)
            }
            Origin::Compressed { packed, skip } => {
                let cluster = Box::pin(self.decompressor.read(packed)).await?;
                let skip = usize::try_from(skip).expect("within a cluster");
                buffer.copy_from(0, &cluster[skip..skip + buffer.len()]);
                Ok(buffer)
            }
        }
    }
}
