//! Background work for a disk: what can be done in quiet times, and a device that may become full.
//!
//! ```text
//!   something was changed ──► every 50 ms while there is more to do, and a while after
//!                                  │ nothing was to do, and nothing changed
//!                                  ▼
//!                             half as often each time, down to every half minute ──► something was changed
//! ```
//!
//! So a disk that is not written costs next to nothing, however many there are.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use event_listener::Event;
use futures_lite::future::or;
use vellum_core::{Disk, Result, lock};
use vellum_io::{Spawned, WorkersHandle, clock};

use super::Served;
use super::warming::warm;
use crate::contained::in_rounds;

/// How often a disk is tended that was changed a moment ago.
const OFTEN: Duration = Duration::from_millis(50);
/// And for how long after the last change: work that waits for a quiet time has been offered it by then.
const A_WHILE: Duration = Duration::from_secs(5);
/// How often to tend a disk that does not change.
const SELDOM: Duration = Duration::from_secs(30);
/// Between two things that are done at once, so that requests come first.
const NEXT: Duration = Duration::from_millis(1);

/// The tasks that tend a disk.
pub(super) struct Tending {
    has_ended: Arc<AtomicBool>,
    /// It has: nobody sleeps on.
    ends: Arc<Event>,
    served: Arc<Served>,
    tasks: Vec<Spawned<()>>,
}

impl Tending {
    pub(super) fn begin(served: &Arc<Served>, workers: &WorkersHandle) -> Self {
        let has_ended = Arc::new(AtomicBool::new(false));
        // The last worker first: the first has the sockets and the signals.
        let worker = workers.count() - 1 - served.number() % workers.count();
        let ends = Arc::new(Event::new());
        let (its, ended, ending) = (served.clone(), has_ended.clone(), ends.clone());
        let mut tasks = vec![workers.spawn(worker, move || async move {
            let what = format!("the background work on {}", its.shown());
            in_rounds(&what, async || {
                tend(&its, &ended, &ending).await;
                ControlFlow::Break(())
            })
            .await;
        })];
        if served.growing().is_some() {
            let (its, ended) = (served.clone(), has_ended.clone());
            tasks.push(workers.spawn(worker, move || async move {
                let what = format!("the watch on the device of {}", its.shown());
                in_rounds(&what, async || {
                    if ended.load(Ordering::Acquire) {
                        return ControlFlow::Break(());
                    }
                    if let Some(growing) = its.growing() {
                        growing.watch(&ended).await;
                    }
                    clock().sleep(OFTEN).await;
                    ControlFlow::Continue(())
                })
                .await;
            }));
        }
        if served.how.warms {
            let (its, ended) = (served.clone(), has_ended.clone());
            tasks.push(workers.spawn(worker, move || async move {
                let what = format!("the heat of {}", its.shown());
                in_rounds(&what, async || {
                    warm(&its, &ended).await;
                    ControlFlow::Break(())
                })
                .await;
            }));
        }
        Self { has_ended, ends, served: served.clone(), tasks }
    }

    /// Waits until what was begun is done.
    pub(super) async fn end(self) {
        self.has_ended.store(true, Ordering::Release);
        self.ends.notify(usize::MAX);
        self.served.record.work.wake();
        for task in self.tasks {
            // A worker that has ended has nothing in flight.
            let _ = task.await;
        }
    }
}

impl Served {
    /// Starts the background tasks that are not at work.
    pub(super) fn tend(self: &Arc<Self>) {
        let is_tended = lock(&self.tending).is_some();
        if !is_tended && !vellum_core::Disk::geometry(&*self.disk).read_only {
            self.count_heat();
            *lock(&self.tending) = Some(Tending::begin(self, &self.workers));
        }
        if lock(&self.hydrating).is_none() {
            self.begin_hydrating();
        }
    }

    /// As below, where requests are not to wait for images below that do not answer.
    ///
    /// # Errors
    /// `Locked` when they do not answer in time.
    pub(super) async fn tend_no_more_in_time(&self) -> Result<()> {
        self.hydrate_no_more_in_time().await?;
        self.tend_no_more().await;
        Ok(())
    }

    /// Stops the background task. Waits until it has finished what it had begun.
    pub(super) async fn tend_no_more(&self) {
        self.hydrate_no_more().await;
        let tending = lock(&self.tending).take();
        if let Some(tending) = tending {
            tending.end().await;
        }
    }
}

async fn tend(served: &Served, has_ended: &AtomicBool, ends: &Event) {
    let (mut changed, mut pause) = (clock().now(), OFTEN);
    let mut has_lost = false;
    loop {
        let ended = ends.listen();
        if has_ended.load(Ordering::Acquire) {
            return;
        }
        let has_more = served.disk.tend(clock().now()).await;
        if !has_lost && served.has_lost_reads() {
            has_lost = true;
            tracing::warn!(
                "{}: units that are on its fast medium alone cannot be read: the guest gets I/O errors there",
                served.path().display()
            );
        }
        let now = clock().now();
        if served.record.work.take() || has_more {
            (changed, pause) = (now, OFTEN);
        } else if now.saturating_sub(changed) > A_WHILE {
            pause = (pause * 2).min(SELDOM);
        }
        if has_more || pause == OFTEN {
            or(ended, clock().sleep(if has_more { NEXT } else { OFTEN })).await;
        } else {
            or(served.record.work.wait(), clock().sleep(pause)).await;
        }
    }
}
