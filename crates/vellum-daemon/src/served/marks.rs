//! The bitmaps of a served image, for its NBD clients: `qemu:dirty-bitmap:NAME`.
//!
//! 1. All bitmaps are offered that can be relied on, under the names that they had when the disk was opened.
//! 2. An answer is what is marked at that moment. While guests write it is out of date at once, and never says less than was
//!    marked before.
//! 3. With a flash cache none is offered: writes that only the cache has are marked when they go home.

use std::path::Path;
use std::sync::{Arc, Weak};

use vellum_core::{Error, ErrorKind, GuestSpan, LocalFuture, Result};
use vellum_export::nbd::{Marks, SharedMarks};
use vellum_layer::Chain;

use super::Served;

/// A bitmap of a served disk.
struct ServedMarks {
    served: Weak<Served>,
    name: String,
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

/// The bitmaps of a disk, for an export of it.
pub(super) fn of(names: &[String], served: &Weak<Served>) -> Vec<SharedMarks> {
    let marks = |name: &String| Arc::new(ServedMarks { served: served.clone(), name: name.clone() });
    names.iter().map(|name| marks(name) as SharedMarks).collect()
}

impl Marks for ServedMarks {
    fn name(&self) -> &str {
        &self.name
    }

    fn marked(&self, span: GuestSpan, most: usize) -> LocalFuture<'_, Result<Vec<GuestSpan>>> {
        Box::pin(async move {
            let closed =
                || Error::new(ErrorKind::Closed, format!("bitmap {}: its disk is closed", self.name));
            let served = self.served.upgrade().ok_or_else(closed)?;
            let top = served.top().await?;
            let bitmaps = top.member().opened.bitmaps.clone().ok_or_else(closed)?;
            let bits = bitmaps.load(&self.name).await?;
            let (mut runs, mut at) = (Vec::new(), span.start());
            while runs.len() < most
                && let Some(run) = bits.next_marked(at)
                && run.start() < span.end()
            {
                at = run.end();
                runs.push(run.intersect(span));
            }
            Ok(runs)
        })
    }
}
