//! The bytes of a write that changes the mapping, on their way to the medium.
//!
//! ```text
//!   step:    fill │ guest │ fill     fill │ guest │ fill           pieces, read or taken off the request
//!            ───────────────────     ───────────────────           adjacent ones are one write
//!            checks of the fresh sectors, for the record
//!            may recovery still look at the old bytes?  ──no──► one host write
//!                          │yes
//!            fresh parts wait for a commit ┆ others are overwritten like any bytes in place
//! ```
//!
//! 1. The journal's record describes fresh bytes, so from the moment their checks are taken they cannot
//!    change any more.
//! 2. In bulk nothing is checked: the data of the open transaction is flushed before its record (the fence
//!    of `journal/checks.rs`).
//! 3. The writes of one request do not overlap, and nothing is published before all have ended. So they need
//!    no order among themselves.

use std::cell::Cell;

use vellum_core::{Buffer, ImageOffset, LocalFuture, Result, try_join_all};

use super::Commit as _;
use super::writer::{Pieces, Step, Writer};
use crate::journal::{checks_of, unchanging};
use crate::sabotage::{self, Bug};

/// The writes of a request, ready to be sent to the storage.
#[must_use]
pub(super) struct Writes(Vec<(ImageOffset, Buffer)>);

/// Gathers the bytes of the steps, and takes the checks of those that are fresh.
pub(super) async fn gather<W: Writer>(
    image: &W,
    steps: &mut [Step<'_, W>],
    data: &mut Buffer,
) -> Result<Writes> {
    let any_fresh = steps.iter().any(|step| !step.fresh.is_empty());
    let is_checked = any_fresh && image.journal().is_some_and(|journal| !journal.is_fenced());
    if is_checked {
        *data = unchanging(std::mem::take(data));
    }
    let mut pieces = Pieces::default();
    for step in &*steps {
        image.add_pieces(step, data, &mut pieces);
    }
    let writes = pieces.join().await?;
    if is_checked {
        for (at, data) in &writes {
            let is_fresh = fresh_at(image, steps);
            let checks = checks_of(*at, data, image.checks_together(), is_fresh);
            for check in checks {
                let index = owner(image, steps, check.0).expect("every write is some step's");
                steps[index].checks.push(check);
            }
        }
    } else {
        steps.iter_mut().for_each(|step| step.is_unchecked = !step.fresh.is_empty());
    }
    Ok(Writes(writes))
}

impl Writes {
    /// Sends them.
    pub(super) async fn write<W: Writer>(self, image: &W, steps: &[Step<'_, W>]) -> Result<()> {
        let mut parts = Vec::with_capacity(self.0.len());
        for (at, data) in self.0 {
            write_run(image, steps, at, data, &mut parts);
        }
        try_join_all(parts).await.map(drop)
    }
}

/// Overwrites bytes of the disk in place.
pub(super) async fn write_in_place<W: Writer>(image: &W, at: ImageOffset, data: Buffer) -> Result<()> {
    match image.journal() {
        None => image.data().write(at, data).await,
        Some(journal) => journal.write_in_place(image.data(), at, data, async || image.commit().await).await,
    }
}

/// Writes a run of bytes that may mix fresh units and others. Where recovery may still look at the old
/// bytes, the others are overwritten like any bytes in place, mostly without a commit, and only the fresh
/// ones wait.
fn write_run<'s, W: Writer>(
    image: &'s W,
    steps: &[Step<'_, W>],
    at: ImageOffset,
    mut data: Buffer,
    parts: &mut Vec<LocalFuture<'s, Result<()>>>,
) {
    let span = at.span(data.len() as u64);
    let journal = image.journal().filter(|_| !sabotage::is(Bug::FilledOverUnverified));
    let Some(journal) = journal.filter(|journal| journal.must_wait(span)) else {
        return parts.push(image.data().write(at, data));
    };
    let mut here = at;
    while here < span.end() {
        let (fresh, mut end) = stretch(image, steps, here);
        while end < span.end()
            && let (also, next) = stretch(image, steps, end)
            && also == fresh
        {
            end = next;
        }
        let end = end.min(span.end());
        let part = data.split_to(usize::try_from(end - here).expect("within the buffer"));
        let place = here;
        parts.push(match fresh {
            false => Box::pin(write_in_place(image, place, part)),
            true => Box::pin(async move {
                journal.make_way(place.span(part.len() as u64), async || image.commit().await).await?;
                image.data().write(place, part).await
            }),
        });
        here = end;
    }
}

/// Whether a sector is one that these steps are the first to fill.
fn fresh_at<'s, W: Writer>(
    image: &'s W,
    steps: &'s [Step<'_, W>],
) -> impl Fn(ImageOffset) -> bool + use<'s, W> {
    let known = Cell::new((ImageOffset::ZERO, ImageOffset::ZERO, false));
    move |sector| {
        let (start, end, is_fresh) = known.get();
        if (start..end).contains(&sector) {
            return is_fresh;
        }
        let (is_fresh, end) = stretch(image, steps, sector);
        known.set((sector, end, is_fresh));
        is_fresh
    }
}

/// Whether the byte at this place is one that the steps are the first to fill, and from where on the answer
/// may be another.
fn stretch<W: Writer>(image: &W, steps: &[Step<'_, W>], at: ImageOffset) -> (bool, ImageOffset) {
    // A byte behind the last step belongs to none.
    let Some(index) = owner(image, steps, at) else { return (false, at + 1) };
    let (step, place) = (&steps[index], steps[index].at());
    let within = at - place;
    let next = step.fresh.partition_point(|fresh| fresh.end <= within);
    match step.fresh.get(next) {
        Some(fresh) if fresh.start <= within => (true, place + fresh.end),
        Some(fresh) => (false, place + fresh.start),
        None => (false, place + image.cell().bytes()),
    }
}

/// The step to which the byte at this place belongs.
fn owner<W: Writer>(image: &W, steps: &[Step<'_, W>], at: ImageOffset) -> Option<usize> {
    steps.iter().position(|step| step.at() <= at && at < step.at() + image.cell().bytes())
}
