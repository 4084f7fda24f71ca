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
//!    client asks for contexts. To that client the name means that snapshot, also when another one gets it.
//! 2. An answer is what is marked at that moment. While guests write it is out of date at once, and never says less than was
//!    marked before.
//! 3. What a snapshot has is never overwritten, compressed and packed blocks either. So what is not marked reads as it does in the snapshot,
//!    without being read. What is marked was written since, or was moved, and may read the same: the first write to a unit or cluster that a
//!    snapshot has copies it, and nothing but the bytes says which of its blocks are copies. Those that either still reads from the base are not
//!    marked.
//! 4. A snapshot is open while there are answers about it, once for all of them, and the image stays open meanwhile. Between two
//!    answers it may be deleted: then there are no more of them.
//! 5. With a flash cache nothing is offered: writes that only the cache has are marked when they go home.

use std::path::Path;
use std::sync::{Arc, Weak};

use futures_lite::future::yield_now;
use vellum_core::{Error, ErrorKind, GuestSpan, LocalFuture, Result, SharedDisk};
use vellum_export::nbd::{Marked, Marks, MarksKind, OffersMarks, SharedMarks};
use vellum_format::image::Snapshot;
use vellum_layer::Chain;

use super::{Served, Top};
use crate::delta::{MAPPED_MAX, likely};

/// An answer about a snapshot looks at this many pieces of the maps at most.
const PIECES_MAX: usize = 256;

/// A bitmap of a served disk, or a snapshot.
struct ServedMarks {
    served: Weak<Served>,
    name: String,
    what: What,
}

enum What {
    Bitmap,
    /// What differs from a snapshot, in the disk or in another one.
    Diff {
        from: Which,
        of: Option<Which>,
    },
}

/// A snapshot, which is never taken for another that has its name later.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Which {
    name: String,
    id: String,
    /// When it was made: ids may come again. Seconds since 1970, and nanoseconds where they are known.
    made: (u64, u32),
}

impl Which {
    fn of(snapshot: &Snapshot) -> Self {
        let Snapshot { id, name, seconds, machine, .. } = snapshot;
        let nanoseconds = machine.as_ref().map_or(0, |machine| machine.nanoseconds);
        Self { name: name.clone(), id: id.clone(), made: (*seconds, nanoseconds) }
    }

    /// Whether it is this one, whatever its name is by now.
    fn is(&self, snapshot: &Snapshot) -> bool {
        let other = Self::of(snapshot);
        (&self.id, self.made) == (&other.id, other.made)
    }
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
                "{}: no dirty bitmap {name} can be offered to clients; `vellum info` lists what the image has. Those that are inconsistent, and those of a snapshot, of a part of a disk or behind a flash cache are not offered",
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
        let now = served.snapshots_now();
        let of = match &self.of {
            None => None,
            Some(name) => match now.iter().find(|one| one.name == *name) {
                Some(own) => Some(own.clone()),
                None => return Vec::new(),
            },
        };
        let one = |name: &str, what| {
            let (served, name) = (self.served.clone(), name.to_owned());
            Arc::new(ServedMarks { served, name, what }) as SharedMarks
        };
        let bitmaps = served.bitmaps.iter().filter(|_| of.is_none()).map(|name| one(name, What::Bitmap));
        let others = now.into_iter().filter(|snapshot| self.of.as_ref() != Some(&snapshot.name));
        let others = others.map(|from| one(&from.name.clone(), What::Diff { from, of: of.clone() }));
        bitmaps.chain(others).collect()
    }
}

impl Served {
    /// The snapshots that the disk can be compared with now: none of them while it is closed, or of a part of it.
    fn snapshots_now(&self) -> Vec<Which> {
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
        let mut all: Vec<Which> = all.iter().map(Which::of).collect();
        all.extend(opened.views.iter().flat_map(|views| views.snapshots()).map(Which::of));
        let mut seen = std::collections::BTreeSet::new();
        // One of two with a name cannot be meant, and a name that is too long is none of a context.
        all.retain(|one| one.name.len() <= NAME_BYTES_MAX && seen.insert(one.name.clone()));
        all
    }

    /// A snapshot, as a disk beside this one.
    async fn snapshot_disk(&self, top: &Top<'_>, which: &Which) -> Result<SharedDisk> {
        let opened = &top.member().opened;
        let name = &which.name;
        let gone = || Error::new(ErrorKind::NotFound, format!("{}: snapshot {name} is gone", self.shown()));
        if let Some(views) = &opened.views {
            let is_there = views.snapshots().iter().any(|one| which.is(one));
            return if is_there { views.view(&which.id).await } else { Err(gone()) };
        }
        let snapshots = opened.snapshots.as_ref().ok_or_else(gone)?;
        let is_there = snapshots.list()?.iter().any(|one| which.is(one));
        let id = is_there.then(|| which.id.parse().ok()).flatten().ok_or_else(gone)?;
        snapshots.clone().open(id)
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

    async fn of_snapshot(
        &self,
        served: &Served,
        (from, of): (&Which, Option<&Which>),
        span: GuestSpan,
        most: usize,
    ) -> Result<Marked> {
        let top = served.top().await?;
        let old = served.snapshot_disk(&top, from).await?;
        let new = match of {
            Some(own) => served.snapshot_disk(&top, own).await?,
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
        match self.what {
            What::Bitmap => MarksKind::Bitmap,
            What::Diff { .. } => MarksKind::Diff,
        }
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn marked(&self, span: GuestSpan, most: usize) -> LocalFuture<'_, Result<Marked>> {
        Box::pin(async move {
            let served = self.served.upgrade().ok_or_else(|| self.closed())?;
            match &self.what {
                What::Bitmap => self.of_bitmap(&served, span, most).await,
                What::Diff { from, of } => self.of_snapshot(&served, (from, of.as_ref()), span, most).await,
            }
        })
    }
}
