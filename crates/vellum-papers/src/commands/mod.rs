//! One file for each paper: which runs are made, and what is printed of them.

pub(crate) mod fvd;
pub(crate) mod selfie;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use serde::Serialize;
use vellum_core::Result;
use vellum_lab::report::Table;

/// One row of the paper.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Row {
    id: &'static str,
    what: &'static str,
    paper: &'static str,
    ours: String,
    is_met: bool,
}

/// The rows beside the paper's, misses as misses.
fn tell(rows: &[Row], table: Table) {
    table.say("");
    table.say(&format!("{:<4} {:<46} {:>12}  here", "row", "", "paper"));
    for row in rows {
        let verdict = if row.is_met { "met" } else { "missed" };
        table.say(&format!("{:<4} {:<46} {:>12}  {:<46} {verdict}", row.id, row.what, row.paper, row.ours));
    }
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
