//! One file for each paper: which runs are made, and the rows and figures that come of them; `run` puts them together.

pub(crate) mod cowcache;
pub(crate) mod fast16;
pub(crate) mod fvd;
pub(crate) mod hvd;
mod progress;
pub(crate) mod run;
pub(crate) mod selfie;

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use vellum_core::Result;
use vellum_lab::server::Vellum;

/// How much of each paper is made, and where QEMU may work.
#[derive(Debug, Clone, Default)]
pub(crate) struct Options {
    /// On the papers' own scale.
    pub(crate) is_full: bool,
    /// Directory for images of QEMU, whose calls are replayed.
    pub(crate) dir: Option<PathBuf>,
    /// A vellum; it is not looked at.
    pub(crate) vellum: Option<Vellum>,
    /// Recorded guests of others, for COWCache.
    pub(crate) traces: cowcache::Files,
}

/// Jobs, each a world of its own, so that processors can share them; the results in the order of the jobs.
fn on_all_processors<J: Sync, T: Send>(jobs: &[J], run: impl Fn(&J) -> Result<T> + Sync) -> Result<Vec<T>> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(job) = jobs.get(index) else {
                return Ok(done);
            };
            done.push((index, run(job)?));
        }
    };
    let workers = thread::available_parallelism().map_or(1, usize::from).min(jobs.len());
    let mut answers: Vec<(usize, T)> = Vec::new();
    thread::scope(|scope| {
        let workers: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_for_each(|worker| -> Result<()> {
            answers.extend(worker.join().expect("who simulates does not panic")?);
            Ok(())
        })
    })?;
    answers.sort_by_key(|(index, _)| *index);
    Ok(answers.into_iter().map(|(_, answer)| answer).collect())
}
