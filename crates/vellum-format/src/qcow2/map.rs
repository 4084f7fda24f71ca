//! The places of the disk's bytes: for block status, conversion, and the layers above.

use futures_lite::future::yield_now;
use vellum_core::{Extent, GuestSpan, ImageOffset, LocalFuture, Place, Result};

use super::entry::ClusterState;
use super::image::{Missing, Qcow2};
use super::read::{Origin, Parts};
use crate::image::ZeroPlaces;

/// An answer ends early after about this many extents.
const EXTENTS_MAX: usize = 1024;
/// The mapping is looked up in runs of this many clusters.
const CLUSTERS_AT_ONCE: u64 = 512;

impl Qcow2 {
    pub(crate) async fn map_span(&self, span: GuestSpan) -> Result<Vec<Extent>> {
        // A table that is looked up here must not be reused for another purpose before it is read.
        let _inside = self.engine.epochs.enter();
        let mut parts = Parts::new();
        let mut rest = span;
        while !rest.is_empty() && parts.len() < EXTENTS_MAX {
            let (now, later) = match self.mapping.without_table(rest) {
                Some(runs) => runs,
                None => rest.split_at(CLUSTERS_AT_ONCE << self.cluster.shift()),
            };
            rest = match self.cut(now, &mut parts)? {
                Ok(()) => {
                    // When the whole mapping is in memory, other requests would not get a turn.
                    if !later.is_empty() {
                        yield_now().await;
                    }
                    later
                }
                Err((from, Missing(page))) => {
                    self.load(page).await?;
                    GuestSpan::between(from.start(), rest.end())
                }
            };
        }
        let mut at = span.start();
        let extents = parts.into_iter().map(|part| {
            let span = at.span(part.len);
            at = span.end();
            let place = match part.from {
                Origin::Zero { allocated } => Place::Zero { allocated },
                Origin::Host(at) => Place::Data { storage: self.plain_at(at, span.start()), at },
                Origin::Below => Place::Below,
                // What is compressed is written once: another content has another place.
                Origin::Compressed { packed, skip } => Place::Compressed {
                    from: packed.start().checked_add(skip).map(|at| (self.plain.clone(), at)),
                },
            };
            Extent { span, place }
        });
        Ok(extents.collect())
    }
}

impl ZeroPlaces for Qcow2 {
    fn zero_places(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<(GuestSpan, ImageOffset)>>> {
        Box::pin(async move {
            let _inside = self.engine.epochs.enter();
            let mut found: Vec<(GuestSpan, ImageOffset)> = Vec::new();
            let mut rest = span;
            while !rest.is_empty() {
                if let Some((_, later)) = self.mapping.without_table(rest) {
                    rest = later;
                    yield_now().await;
                    continue;
                }
                let (now, later) = self.first_part(rest);
                let state = match self.lookup(self.cluster.cluster_of(now.start()))? {
                    Ok(state) => state,
                    Err(Missing(page)) => {
                        self.load(page).await?;
                        continue;
                    }
                };
                rest = later;
                if self.cluster.cluster_of(now.start()).index().is_multiple_of(CLUSTERS_AT_ONCE) {
                    yield_now().await;
                }
                let ClusterState::Plain(units) = state else { continue };
                // At the start of a data file such an entry has no place, as with QEMU.
                let Some(host) = units.host.filter(|host| host.bytes() > 0 && units.zero != 0) else {
                    continue;
                };
                let size = self.entries.unit_size();
                for piece in size.pieces_of(now) {
                    let within = self.cluster.within(piece.start());
                    if (units.zero & !units.alloc) >> (within >> size.shift()) & 1 == 0 {
                        continue;
                    }
                    let at = host + within;
                    match found.last_mut() {
                        Some((run, first)) if run.end() == piece.start() && *first + run.len() == at => {
                            *run = GuestSpan::between(run.start(), piece.end());
                        }
                        _ => found.push((piece, at)),
                    }
                }
            }
            Ok(found)
        })
    }
}
