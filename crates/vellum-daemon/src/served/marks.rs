//! What a served disk is marked with, for its NBD clients: `qemu:dirty-bitmap:NAME`, the bitmaps of its image, and
//! `vellum:diff:SNAPSHOT`, what differs from a snapshot inside it.
//!
//! ```text
//!   map of the snapshot         ─┐
//!                                ├─► runs that have the same place, or nothing in both: not marked; all others are
//!   map of the disk, or another ─┘
//! ```
//!
//! 1. All bitmaps are offered that can be relied on, under the names that they had when the disk was opened; snapshots as they are when a
//!    client asks for contexts.
//! 2. An answer is what is marked at that moment. While guests write it is out of date at once, and never says less than was
//!    marked before.
//! 3. What a snapshot has is never overwritten. So what is not marked reads as it does in the snapshot, without being read. What is marked was
//!    written since, in units of the image, or moved, and may read the same.
//! 4. A snapshot is opened for one answer, and the image stays open meanwhile. Between two answers it may be deleted: then there are no
//!    more of them.
//! 5. With a flash cache nothing is offered: writes that only the cache has are marked when they go home.

use std::path::Path;
use std::sync::{Arc, Weak};

use futures_lite::future::yield_now;
use vellum_core::{Error, ErrorKind, GuestSpan, LocalFuture, Result, SharedDisk};
use vellum_export::nbd::{Marked, Marks, MarksKind, OffersMarks, SharedMarks};
use vellum_layer::Chain;

use super::{Served, Top};
use crate::delta::{MAPPED_MAX, likely};

/// An answer about a snapshot looks at this many pieces of the maps at most.
const PIECES_MAX: usize = 256;

/// A bitmap of a served disk, or a snapshot.
struct ServedMarks {
    served: Weak<Served>,
    kind: MarksKind,
    name: String,
    /// The snapshot that is compared, where that is not the disk.
    of: Option<String>,
}

/// All of them.
pub(super) struct Offered {
    served: Weak<Served>,
    of: Option<String>,
}

/// The bitmaps of the image on top that can be relied on.
pub(super) async fn names_of(chain: &Chain) -> Vec<String> {
    let top = chain.top();
    let Some(bitmaps) = top.head.kind().format().closed_bitmaps() else { return Vec::new() };
    if chain.flash().is_some() || top.opened.bitmaps.is_none() {
        return Vec::new();
    }
    // One that is damaged is none; opening the image has said so.
    let all = bitmaps.list(&*top.storage).await.unwrap_or_default();
    all.into_iter().filter(|one| !one.is_in_use).map(|one| one.name).collect()
}

/// An error unless all of these bitmaps are among those that are offered.
pub(super) fn must_have(image: &Path, offered: &[String], wanted: &[String]) -> Result<()> {
    match wanted.iter().find(|name| !offered.contains(name)) {
        None => Ok(()),
        Some(name) => Err(Error::new(
            ErrorKind::NotFound,
            format!(
                "{}: no dirty bitmap {name} can be offered to clients; `vellum info` lists what the image has. Those that are                  inconsistent, and those of a snapshot, of a part of a disk or behind a flash cache are not offered",
                image.display()
            ),
        )),
    }
}

impl Offered {
    /// For an export of the disk.
    pub(super) fn of_disk(served: Weak<Served>) -> Self {
        Self { served, of: None }
    }

    /// For an export of a snapshot: what differs from the others. It has no bitmaps.
    pub(super) fn of_snapshot(served: Weak<Served>, name: &str) -> Self {
        Self { served, of: Some(name.to_owned()) }
    }
}

impl OffersMarks for Offered {
    fn marks(&self) -> Vec<SharedMarks> {
        let Some(served) = self.served.upgrade() else { return Vec::new() };
        let one = |kind, name| {
            let (served, of) = (self.served.clone(), self.of.clone());
            Arc::new(ServedMarks { served, kind, name, of }) as SharedMarks
        };
        let bitmaps = served.bitmaps.iter().filter(|_| self.of.is_none()).cloned();
        let snapshots = served.snapshots_now().into_iter().filter(|name| self.of.as_ref() != Some(name));
        let bitmaps = bitmaps.map(|name| one(MarksKind::Bitmap, name));
        bitmaps.chain(snapshots.map(|name| one(MarksKind::Diff, name))).collect()
    }
}

impl Served {
    /// The names of the snapshots that the disk can be compared with now: none of them while it is closed, or of a part of it.
    fn snapshots_now(&self) -> Vec<String> {
        if self.image.snapshot.is_some() || self.how.part.is_some() {
            return Vec::new();
        }
        // This does not wait: while the disk is being exchanged there are none.
        let Some(top) = self.chain.try_read().and_then(Top::of) else { return Vec::new() };
        let chain = top.0.as_ref().expect("it was looked at");
        if chain.flash().is_some() {
            return Vec::new();
        }
        let opened = &chain.top().opened;
        let all = opened.snapshots.as_ref().and_then(|snapshots| snapshots.list().ok()).unwrap_or_default();
        let mut names: Vec<String> = all.into_iter().map(|one| one.name).collect();
        names.extend(opened.views.iter().flat_map(|views| views.names()).cloned());
        let mut seen = std::collections::BTreeSet::new();
        // One of two with a name cannot be meant, and a name that is too long is none of a context.
        names.retain(|name| name.len() <= NAME_BYTES_MAX && seen.insert(name.clone()));
        names
    }

    /// A snapshot, as a disk beside this one.
    async fn snapshot_disk(&self, top: &Top<'_>, name: &str) -> Result<SharedDisk> {
        let opened = &top.member().opened;
        if let Some(views) = &opened.views {
            return views.view(name).await;
        }
        let gone = || Error::new(ErrorKind::NotFound, format!("{}: snapshot {name} is gone", self.shown()));
        let snapshots = opened.snapshots.as_ref().ok_or_else(gone)?;
        snapshots.clone().open(snapshots.named(name)?.ok_or_else(gone)?)
    }
}

/// The names of contexts have 4096 bytes at most.
const NAME_BYTES_MAX: usize = 4000;

impl ServedMarks {
    async fn of_bitmap(&self, served: &Served, span: GuestSpan, most: usize) -> Result<Marked> {
        let top = served.top().await?;
        let bitmaps = top.member().opened.bitmaps.clone().ok_or_else(|| self.closed())?;
        let bits = bitmaps.load(&self.name).await?;
        let (mut runs, mut at) = (Vec::new(), span.start());
        while runs.len() < most
            && let Some(run) = bits.next_marked(at)
            && run.start() < span.end()
        {
            at = run.end();
            runs.push(run.intersect(span));
        }
        Ok(Marked { runs, until: span.end() })
    }

    async fn of_snapshot(&self, served: &Served, span: GuestSpan, most: usize) -> Result<Marked> {
        let top = served.top().await?;
        let old = served.snapshot_disk(&top, &self.name).await?;
        let new = match &self.of {
            Some(name) => served.snapshot_disk(&top, name).await?,
            None => top.0.as_ref().expect("it was looked at").disk().clone(),
        };
        let mut runs: Vec<GuestSpan> = Vec::new();
        let mut until = span.start();
        for _ in 0..PIECES_MAX {
            let rest = GuestSpan::between(until, span.end());
            if rest.is_empty() {
                break;
            }
            for (part, is_equal) in likely(&old, &new, rest.split_at(MAPPED_MAX).0).await? {
                until = part.end();
                if is_equal {
                    continue;
                }
                let is_full = runs.len() == most;
                match runs.last_mut() {
                    Some(last) if last.end() == part.start() => {
                        *last = GuestSpan::between(last.start(), part.end());
                    }
                    _ if is_full => return Ok(Marked { runs, until: part.start() }),
                    _ => runs.push(part),
                }
            }
            if until == rest.start() {
                return Err(Error::corrupt("the map of a run of bytes is empty"));
            }
            yield_now().await;
        }
        Ok(Marked { runs, until })
    }

    fn closed(&self) -> Error {
        Error::new(ErrorKind::Closed, format!("{}: its disk is closed", self.name))
    }
}

impl Marks for ServedMarks {
    fn kind(&self) -> MarksKind {
        self.kind
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn marked(&self, span: GuestSpan, most: usize) -> LocalFuture<'_, Result<Marked>> {
        Box::pin(async move {
            let served = self.served.upgrade().ok_or_else(|| self.closed())?;
            match self.kind {
                MarksKind::Bitmap => self.of_bitmap(&served, span, most).await,
                MarksKind::Diff => self.of_snapshot(&served, span, most).await,
            }
        })
    }
}
