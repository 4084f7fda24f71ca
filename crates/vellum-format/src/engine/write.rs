//! The order of a write.
//!
//! ```text
//!   a request ──► parts ──► attempt, inside an epoch
//!                             │ decide
//!                             ├ all of it in place  ► one host write per run, nothing else
//!                             ├ not yet             ► leave the epoch, wait, the next attempt
//!                             └ the mapping changes
//!                                 plan      claims, and where each cell's bytes go
//!                                 transfer  data and fill, written together
//!                                 publish   mapping and checks, cell by cell
//!                                 release   claims; what was not published is given back
//!                                   │ no space: make some, the next attempt
//! ```
//!
//! A request is cut into cells, the parts of the disk that are claimed and placed as one. Each cell that must
//! change is a [`Step`]. The transfer of the steps:
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
//! 1. Bytes are written before the entry that names them is published, so a reader never sees the bytes that
//!    were there before.
//! 2. Published entries reach the medium at the next commit, after the data or together with it
//!    (`commit.rs`).
//! 3. When anything fails, cells that were placed and not published are given back: each cell of the disk
//!    reads as before or as written. What may have been written to counts as unknown content.
//! 4. No lock is held while bytes move. Claims keep other writers only from the same units.
//! 5. Nothing waits for requests to leave their epoch while it is inside one, or holds a claim.
//! 6. A step waits for another request's allocation only after all its own are done. So the allocator never
//!    waits for another request.
//! 7. The journal's record describes fresh bytes, so from the moment their checks are taken they cannot
//!    change any more. In bulk nothing is checked: the data of the open transaction is flushed before its
//!    record (the fence of `journal/checks.rs`).
//! 8. The writes of one request do not overlap, and nothing is published before all have ended. So they need
//!    no order among themselves.

use std::cell::Cell;

use vellum_core::{Buffer, ErrorKind, GuestSpan, ImageOffset, LocalFuture, Result, try_join_all};

use super::Commit;
use super::writer::{Done, Pieces, Runs, Space, Step, Way, Writer};
use crate::claims::{Ask, Fresh, Held};
use crate::journal::{checks_of, unchanging};

/// How a disk is written.
pub(crate) trait Write: Writer {
    /// Writes a run of the disk in parts of at most `at_once` bytes. Commits after a part when that is due.
    async fn write_in_parts(
        &self,
        span: GuestSpan,
        mut data: Buffer,
        at_once: u64,
        is_commit_due: impl Fn() -> bool,
    ) -> Result<()> {
        let mut rest = span;
        while !rest.is_empty() {
            let (now, later) = rest.split_between_blocks(at_once);
            let part = match later.is_empty() {
                true => std::mem::take(&mut data),
                false => data.split_to(usize::try_from(now.len()).expect("within the buffer")),
            };
            write_some(self, now, part).await?;
            rest = later;
            if is_commit_due() {
                self.commit().await?;
            }
        }
        Ok(())
    }

    /// Writes cells of which some must change in the mapping. Takes the data out of the buffer when all cells
    /// have a place. If it fails before that, or something else must happen first, the buffer is unchanged.
    /// The caller is inside an epoch.
    async fn write_allocating(&self, span: GuestSpan, data: &mut Buffer) -> Result<Done<Self::Before>> {
        let mut steps = Vec::new();
        let mut result = self.plan_steps(span, data, &mut steps).await;
        let is_planned = matches!(result, Ok(Done::Yes));
        if is_planned {
            result = write_steps(self, &mut steps, data).await.map(|()| Done::Yes);
        }
        if !matches!(result, Ok(Done::After(_))) {
            self.engine().commits.note_change();
        }
        if let Err(error) = &result {
            if is_planned {
                steps.iter().filter_map(|step| step.held.as_ref()).for_each(Held::spoil);
            }
            // If there is no space for fresh cells, those that have a place wait for it.
            let before = steps.iter_mut().filter_map(|step| step.instead_of.take()).max();
            if let Some(before) = before.filter(|_| error.kind() == ErrorKind::NoSpace) {
                result = Ok(Done::After(before));
            }
        }
        self.release_steps(steps).await;
        result
    }
}

impl<W: Writer> Write for W {}

/// Writes a run of the disk, in as many attempts as it takes.
async fn write_some<W: Writer>(image: &W, span: GuestSpan, mut data: Buffer) -> Result<()> {
    let engine = image.engine();
    let mut turn = W::Turn::default();
    loop {
        let mut copy = None;
        let (given, result) = {
            let _inside = engine.epochs.enter();
            match image.decide(span, &data).await? {
                Way::InPlace(runs) => {
                    let result = write_runs(image, runs, data).await;
                    engine.commits.note_change();
                    return result;
                }
                Way::After(before) => (0, Ok(Done::After(before))),
                Way::Allocate(Space { given, more_may_come }) => {
                    if more_may_come {
                        copy = Some(data.duplicate());
                    }
                    // Boxed, so that the future of a write in place is small: it is moved more than once.
                    (given, Box::pin(image.write_allocating(span, &mut data)).await)
                }
            }
        };
        let error = match result {
            Ok(Done::Yes) => return Ok(()),
            Ok(Done::After(before)) => {
                Box::pin(image.wait_for(before, span)).await?;
                continue;
            }
            Err(error) if error.kind() == ErrorKind::NoSpace => error,
            Err(error) => return Err(error),
        };
        if data.len() as u64 != span.len() {
            let Some(copy) = copy else { return Err(error) };
            data = copy;
        }
        // The missing space may have been freed but not given back yet.
        if !Box::pin(image.find_space(span, given, &mut turn)).await? {
            return Err(error);
        }
    }
}

async fn write_runs<W: Writer>(image: &W, runs: Runs, mut data: Buffer) -> Result<()> {
    if let [(at, _)] = runs[..] {
        return write_in_place(image, at, image.as_stored(at, data).await?).await;
    }
    let writes = runs.into_iter().map(|(at, len)| {
        let part = data.split_to(usize::try_from(len).expect("within the buffer"));
        let write = async move { write_in_place(image, at, image.as_stored(at, part).await?).await };
        Box::pin(write) as LocalFuture<'_, Result<()>>
    });
    let writes: Vec<_> = writes.collect();
    try_join_all(writes).await.map(drop)
}

/// Writes the bytes of the steps, and makes them part of the disk.
async fn write_steps<W: Writer>(image: &W, steps: &mut [Step<'_, W>], data: &mut Buffer) -> Result<()> {
    // Only now is it known whether a step may have to wait after all when the host is full: other requests
    // may have changed the mapping while this one waited for claims and tables.
    let may_wait = steps.iter().any(|step| step.instead_of.is_some());
    let copy = may_wait.then(|| data.duplicate());
    let result = transfer_and_publish(image, steps, data).await;
    if let Some(copy) = copy.filter(|_| result.is_err()) {
        *data = copy;
    }
    result
}

async fn transfer_and_publish<W: Writer>(
    image: &W,
    steps: &mut [Step<'_, W>],
    data: &mut Buffer,
) -> Result<()> {
    let is_checked = image.journal().is_some_and(|journal| !journal.is_fenced());
    let writes = gather(image, steps, data, is_checked).await?;
    writes.write(image, steps).await?;
    publish(image, steps).await
}

async fn publish<W: Writer>(image: &W, steps: &mut [Step<'_, W>]) -> Result<()> {
    for step in steps {
        image.publish_step(step).await?;
        step.is_published = true;
    }
    Ok(())
}

/// Gives each step that has no place yet a fresh one. `allocate` gives as many as it is asked for, or fewer.
/// Adjacent steps get adjacent places where it can.
pub(crate) async fn place_fresh<W: Writer, F: IntoIterator<Item = Fresh>>(
    steps: &mut [Step<'_, W>],
    allocate: impl AsyncFn(u64) -> Result<F>,
) -> Result<()> {
    let mut mine = Vec::new();
    for (index, step) in steps.iter_mut().enumerate().filter(|(_, step)| step.place.is_none()) {
        match step.held().fresh() {
            Ask::Have(fresh) => step.place = Some(fresh),
            Ask::Yours => mine.push(index),
            Ask::Wait(_) => {}
        }
    }
    let mut rest = &mine[..];
    while !rest.is_empty() {
        let fresh = match allocate(rest.len() as u64).await {
            Ok(fresh) => fresh,
            Err(error) => {
                rest.iter().for_each(|index| steps[*index].held().give_up());
                return Err(error);
            }
        };
        for fresh in fresh {
            let (index, later) = rest.split_first().expect("no more than it was asked for");
            steps[*index].held().provide(fresh);
            steps[*index].place = Some(fresh);
            rest = later;
        }
    }
    // Only now wait for allocations by other requests: they do not wait for this one.
    for step in steps.iter_mut().filter(|step| step.place.is_none()) {
        step.place = Some(loop {
            match step.held().fresh() {
                Ask::Have(fresh) => break fresh,
                Ask::Wait(listener) => listener.await,
                Ask::Yours => match allocate(1).await {
                    Ok(fresh) => fresh.into_iter().for_each(|fresh| step.held().provide(fresh)),
                    Err(error) => {
                        step.held().give_up();
                        return Err(error);
                    }
                },
            }
        });
    }
    Ok(())
}

/// The writes of a request, ready to be sent to the storage.
#[must_use]
pub(super) struct Writes(Vec<(ImageOffset, Buffer)>);

/// Gathers the bytes of the steps, and takes the checks of those that are fresh if there are to be any.
pub(super) async fn gather<W: Writer>(
    image: &W,
    steps: &mut [Step<'_, W>],
    data: &mut Buffer,
    is_checked: bool,
) -> Result<Writes> {
    let is_checked = is_checked && steps.iter().any(|step| !step.fresh.is_empty());
    if is_checked {
        *data = unchanging(std::mem::take(data));
    }
    let mut pieces = Pieces::default();
    for step in &*steps {
        image.add_pieces(step, data, &mut pieces);
    }
    let mut writes = pieces.join().await?;
    for (at, data) in &mut writes {
        *data = image.as_stored(*at, std::mem::take(data)).await?;
    }
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
            write_mixed(image, steps, at, data, &mut parts);
        }
        try_join_all(parts).await.map(drop)
    }
}

/// Overwrites bytes of the disk in place; they are as they are to be stored.
async fn write_in_place<W: Writer>(image: &W, at: ImageOffset, data: Buffer) -> Result<()> {
    match image.journal() {
        None => image.data().write(at, data).await,
        Some(journal) => journal.write_in_place(image.data(), at, data, async || image.commit().await).await,
    }
}

/// Writes a run of bytes that may mix fresh units and others. Where recovery may still look at the old
/// bytes, the others are overwritten like any bytes in place, mostly without a commit, and only the fresh
/// ones wait.
fn write_mixed<'s, W: Writer>(
    image: &'s W,
    steps: &[Step<'_, W>],
    at: ImageOffset,
    mut data: Buffer,
    parts: &mut Vec<LocalFuture<'s, Result<()>>>,
) {
    let span = at.span(data.len() as u64);
    let Some(journal) = image.journal().filter(|journal| journal.must_wait(span)) else {
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
