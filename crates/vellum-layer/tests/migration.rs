//! A migration between two images on two drives, and every crash in it.
//!
//! ```text
//!   guest    source: 1 everywhere, flush, 2 in sector 0      │ target: 3 in sector 1, flush
//!   steps    ………………………………………………… fix ── accept ──│            (or: fix ── void ── restore │ source: 3 …)
//!   crashes     at each position, of each kind; each subset of what was not flushed, on both drives
//! ```
//!
//! In further courses the server is killed at a flush of its mark as well, and the command is run again.
//!
//! After each crash: at most one of the two images can be opened for writing. The table of `migrate.rs`, asked with
//! what the headers say, leads to exactly one writer, in both directions where they are possible, and the disk has
//! what was flushed or something later in each sector. Mistakes that are made on purpose are found.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use vellum_core::{
    Buffer, Error, ErrorKind, GuestOffset, LocalFuture, Result, SharedDisk, SharedStorage, Storage,
    WriteFlags,
};
use vellum_format::handover::{Handover, MoveNumber};
use vellum_format::image::{Files, OpenOptions};
use vellum_format::{FormatKind, native, qcow2};
use vellum_layer::migrate::{Goal, Side, Step, Written, next};
use vellum_sim::{Content, CrashKind, Drive, DriveOptions, ForwardStorage, Forwarding, Position, World};

const SIZE: u64 = 1 << 20;
const SECTORS: usize = 3;

/// The kinds of images; both of a migration are of one kind.
const KINDS: [&str; 4] = ["qcow2", "qcow2 journal", "linear", "table"];

/// What is done wrong on purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mistake {
    /// The target accepts before the mark of the source is flushed.
    AcceptEarly,
    /// The source is taken back, and the target is not void.
    RestoreWithoutVoid,
    /// The target is void only in memory when the source is taken back.
    VoidUnflushed,
    /// The target gets a copy of the source before that is fixed.
    FillEarly,
    /// A mark that was found is taken for one that is durable.
    TrustMark,
    /// The same of the target's, before the source is given up for good.
    SealUnflushed,
}

/// How a migration runs.
#[derive(Debug, Clone, Copy)]
struct Course {
    goal: Goal,
    /// The server is killed at this flush of a mark, counted from 0, and started again; the command as well.
    killed_at: Option<usize>,
}

/// A storage whose flushes do nothing.
struct Unflushed(SharedStorage);

impl ForwardStorage for Unflushed {
    fn inner(&self) -> &dyn Storage {
        &*self.0
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }
}

/// A storage whose server is killed at a flush.
struct Killed {
    inner: SharedStorage,
    flushes_left: AtomicUsize,
}

impl ForwardStorage for Killed {
    fn inner(&self) -> &dyn Storage {
        &*self.inner
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        let left = self.flushes_left.load(Ordering::Relaxed);
        if left == 0 {
            return Box::pin(std::future::ready(Err(Error::new(ErrorKind::Io, "the server is killed"))));
        }
        self.flushes_left.store(left - 1, Ordering::Relaxed);
        self.inner.flush()
    }
}

fn number() -> MoveNumber {
    MoveNumber::new([0x5a; 16]).unwrap()
}

fn format_of(kind: &str) -> FormatKind {
    if kind.starts_with("qcow2") { FormatKind::Qcow2 } else { FormatKind::Native }
}

async fn create(kind: &str, image: &dyn Storage, has_base: bool) {
    if kind.starts_with("qcow2") {
        let journal = kind.ends_with("journal").then_some(64 << 10);
        let backing = has_base.then(|| ("nbd://source/disk".to_owned(), Some("raw".to_owned())));
        let options = qcow2::CreateOptions { size: SIZE, journal, backing, ..Default::default() };
        return qcow2::create(image, None, &options).await.unwrap();
    }
    let base = has_base.then(|| native::NewBase {
        name: "nbd://source/disk".to_owned(),
        format: Some("raw".to_owned()),
        size: SIZE,
        zeros: Vec::new(),
    });
    let has_table = kind == "table";
    let options = native::CreateOptions {
        size: SIZE,
        has_table,
        unit_size: has_table.then_some(64 << 10),
        journal_bytes: has_table.then_some(64 << 10),
        base,
        uuid: Some([1; 16]),
        ..Default::default()
    };
    native::create(image, &options).await.map(drop).unwrap();
}

async fn open(
    kind: &str,
    image: &SharedStorage,
    below: Option<SharedDisk>,
    read_only: bool,
) -> Result<SharedDisk> {
    let head = format_of(kind).format().read(&**image).await?;
    let files = Files { image: image.clone(), data_file: None, below };
    Ok(head.open(files, OpenOptions { read_only, ..OpenOptions::default() }).await?.disk)
}

async fn says(kind: &str, image: &SharedStorage) -> Result<Option<Handover>, String> {
    let head = format_of(kind).format().read(&**image).await;
    head.map(|head| head.handover()).map_err(|error| error.chain())
}

async fn write(disk: &SharedDisk, sector: usize, value: u8) {
    let at = GuestOffset::new(sector as u64 * 512);
    disk.write(at, Buffer::copy_of(&[value; 512]), WriteFlags::default()).await.unwrap();
}

async fn read(disk: &SharedDisk) -> Vec<u8> {
    let bytes = disk.read(GuestOffset::ZERO, Buffer::for_overwrite(SECTORS * 512)).await.unwrap().to_vec();
    let sectors = bytes.chunks(512);
    sectors
        .map(|sector| {
            assert!(sector.iter().all(|byte| *byte == sector[0]), "a sector is mixed");
            sector[0]
        })
        .collect()
}

/// What each sector may hold from a position on: its last flushed value, and those written since.
type May = Vec<Vec<u8>>;

/// A run: both drives, and what may be read after a crash at each position.
struct Run {
    source: Arc<Drive>,
    target: Arc<Drive>,
    milestones: Vec<(Position, May)>,
    /// From here on the source has moved: the order to accept may have been sent, and may come at any time.
    fixed: Position,
}

impl Run {
    fn may(&self, position: Position) -> &May {
        let passed = self.milestones.iter().take_while(|(begins, _)| *begins <= position);
        &passed.last().expect("the first is at the beginning").1
    }
}

async fn take(kind: &str, image: &SharedStorage, step: Step) {
    let (_, after) = step.writes(number()).unwrap();
    step.check(says(kind, image).await.unwrap(), number()).unwrap();
    format_of(kind).format().set_handover(image, after).await.unwrap();
}

/// A step of a server that may be killed in the middle. Then another one takes the step again.
async fn take_killed(
    kind: &str,
    image: &SharedStorage,
    step: Step,
    course: Course,
    mistake: Option<Mistake>,
) {
    let (_, after) = step.writes(number()).unwrap();
    if let Some(flushes) = course.killed_at {
        let killed: SharedStorage =
            Forwarding::new(Killed { inner: image.clone(), flushes_left: AtomicUsize::new(flushes) });
        // Where it has fewer flushes, it is killed afterwards.
        let _ = format_of(kind).format().set_handover(&killed, after).await;
    }
    if mistake != Some(Mistake::TrustMark) || says(kind, image).await.unwrap() != after {
        take(kind, image, step).await;
    }
}

/// One migration, to its end in this direction.
async fn migrate(world: &World, kind: &str, course: Course, mistake: Option<Mistake>) -> Run {
    let goal = course.goal;
    let drive =
        |name: &str| Drive::new(world, DriveOptions { name: name.to_owned(), ..DriveOptions::default() });
    let (source_drive, target_drive) = (drive("source"), drive("target"));
    let (source, target): (SharedStorage, SharedStorage) = (source_drive.clone(), target_drive.clone());
    create(kind, &*source, false).await;
    create(kind, &*target, true).await;
    format_of(kind).format().set_handover(&target, Some(Handover::Awaiting(number()))).await.unwrap();
    let disk = open(kind, &source, None, false).await.unwrap();
    for sector in 0..SECTORS {
        write(&disk, sector, 1).await;
    }
    disk.flush().await.unwrap();
    let ones: May = vec![vec![1]; SECTORS];
    let mut milestones = vec![(world.position(), ones)];
    let mut note = |may: [&[u8]; SECTORS]| {
        milestones.push((world.position(), may.iter().map(|values| values.to_vec()).collect()));
    };
    if mistake == Some(Mistake::FillEarly) {
        let format = format_of(kind).format();
        format.set_handover(&target, None).await.unwrap();
        let early = open(kind, &target, Some(disk.clone()), false).await.unwrap();
        for sector in 0..SECTORS {
            write(&early, sector, 1).await;
        }
        early.close().await.unwrap();
        format.set_handover(&target, Some(Handover::Awaiting(number()))).await.unwrap();
    }
    note([&[1, 2], &[1], &[1]]);
    write(&disk, 0, 2).await;
    // Paused, flushed and closed.
    disk.flush().await.unwrap();
    note([&[2], &[1], &[1]]);
    disk.close().await.unwrap();
    let early: SharedStorage = Forwarding::new(Unflushed(source.clone()));
    match mistake {
        Some(Mistake::AcceptEarly) => {
            take(kind, &early, Step::Fix).await;
            take(kind, &target, Step::Accept).await;
            source.flush().await.unwrap();
        }
        _ => take_killed(kind, &source, Step::Fix, course, mistake).await,
    }
    let fixed = world.position();
    if goal == Goal::Back {
        match mistake {
            Some(Mistake::RestoreWithoutVoid) => {}
            Some(Mistake::VoidUnflushed) => {
                let unflushed: SharedStorage = Forwarding::new(Unflushed(target.clone()));
                take(kind, &unflushed, Step::Void).await;
            }
            _ => take_killed(kind, &target, Step::Void, course, mistake).await,
        }
        take(kind, &source, Step::Restore).await;
        let disk = open(kind, &source, None, false).await.unwrap();
        note([&[2], &[1, 3], &[1]]);
        write(&disk, 1, 3).await;
        disk.flush().await.unwrap();
        note([&[2], &[3], &[1]]);
        disk.close().await.unwrap();
        return Run { source: source_drive, target: target_drive, milestones, fixed };
    }
    match mistake {
        Some(Mistake::AcceptEarly) => {}
        Some(Mistake::SealUnflushed) => {
            let unflushed: SharedStorage = Forwarding::new(Unflushed(target.clone()));
            take(kind, &unflushed, Step::Accept).await;
            take(kind, &source, Step::Seal).await;
        }
        None => take_killed(kind, &target, Step::Accept, course, mistake).await,
        _ => take(kind, &target, Step::Accept).await,
    }
    let below = open(kind, &source, None, true).await.unwrap();
    let disk = open(kind, &target, Some(below), false).await.unwrap();
    note([&[2], &[1, 3], &[1]]);
    write(&disk, 1, 3).await;
    disk.flush().await.unwrap();
    note([&[2], &[3], &[1]]);
    if mistake.is_none() {
        take(kind, &source, Step::Seal).await;
    }
    disk.close().await.unwrap();
    Run { source: source_drive, target: target_drive, milestones, fixed }
}

/// The two images after a crash, on drives of their own.
fn restarted(world: &World, source: &Content, target: &Content) -> (SharedStorage, SharedStorage) {
    let drive = |content: &Content| {
        Drive::from_content(world, content.clone(), DriveOptions::default()) as SharedStorage
    };
    (drive(source), drive(target))
}

async fn can_be_written(kind: &str, image: &SharedStorage, below: Option<SharedDisk>) -> bool {
    match open(kind, image, below, false).await {
        Ok(disk) => {
            disk.close().await.unwrap();
            true
        }
        Err(error) => {
            assert!(error.chain().contains("migration"), "{}", error.chain());
            false
        }
    }
}

/// What is wrong with such a pair of images.
async fn judge(
    kind: &str,
    (source, target): (&SharedStorage, &SharedStorage),
    is_late: bool,
    goal: Goal,
    may: &May,
) -> Result<(), String> {
    // An order that was on its way when the target crashed.
    let waits = matches!(says(kind, target).await?, Some(Handover::Awaiting(_)));
    if is_late && waits && Step::Accept.check(says(kind, target).await?, number()).is_ok() {
        take(kind, target, Step::Accept).await;
    }
    let source_writes = can_be_written(kind, source, None).await;
    let below = open(kind, source, None, true).await.map_err(|error| error.chain())?;
    if can_be_written(kind, target, Some(below)).await && source_writes {
        return Err("both can be written".to_owned());
    }
    let mut last = None;
    loop {
        let now = (says(kind, source).await?, says(kind, target).await?);
        let step = match next(now.0, now.1, Written::BOTH, goal, last) {
            Ok(step) => step,
            // It has gone too far to be taken back, or was given up.
            Err(error) if matches!(now.1, Some(Handover::Arrived(_) | Handover::Void(_))) => {
                if error.kind() == vellum_core::ErrorKind::Corrupt {
                    return Err(error.chain());
                }
                break;
            }
            Err(error) => return Err(error.chain()),
        };
        last = Some(step);
        match step.writes(number()) {
            Some((Side::Source, _)) => take(kind, source, step).await,
            Some((Side::Target, _)) => take(kind, target, step).await,
            None => break,
        }
    }
    let source_writes = can_be_written(kind, source, None).await;
    let below = open(kind, source, None, true).await.map_err(|error| error.chain())?;
    let target_writes = can_be_written(kind, target, Some(below.clone())).await;
    let disk = match (source_writes, target_writes) {
        (true, false) => below,
        (false, true) => open(kind, target, Some(below), true).await.map_err(|error| error.chain())?,
        // Given up, and not asked to go back.
        (false, false) if goal == Goal::Forward => return Ok(()),
        both => return Err(format!("source, target writable at the end: {both:?}")),
    };
    let found = read(&disk).await;
    match found.iter().zip(may).all(|(value, may)| may.contains(value)) {
        true => Ok(()),
        false => Err(format!("the disk reads {found:?}, and may read {may:?}")),
    }
}

/// Every crash of one migration: how many states there were, and what was wrong first.
fn explore(kind: &str, course: Course, mistake: Option<Mistake>) -> (usize, Option<String>) {
    let world = World::new(11);
    let run = world.run(migrate(&world, kind, course, mistake));
    let (source_log, target_log) = (run.source.log(), run.target.log());
    let start = run.milestones[0].0;
    let mut positions = [source_log.crash_positions(), target_log.crash_positions()].concat();
    positions.push(world.position());
    positions.retain(|position| *position >= start);
    positions.sort_unstable();
    positions.dedup();
    let mut states = 0;
    for position in positions {
        for crash in [CrashKind::PowerCut, CrashKind::ProcessKill] {
            let (of_source, of_target) =
                (source_log.crash(crash, position), target_log.crash(crash, position));
            let left = |point: &vellum_sim::CrashPoint| -> Vec<Content> {
                match point.subsets().filter(|_| point.pending().len() <= 3) {
                    Some(subsets) => subsets.map(|(_, content)| content).collect(),
                    None => point.corners().collect(),
                }
            };
            let targets = left(&of_target);
            for source in left(&of_source) {
                for target in &targets {
                    let late = [false, true].into_iter().filter(|late| !late || position >= run.fixed);
                    for (is_late, to) in late.flat_map(|late| [(late, Goal::Forward), (late, Goal::Back)]) {
                        states += 1;
                        let world = World::new(12);
                        let (source, target) = restarted(&world, &source, target);
                        let may = run.may(position);
                        let verdict = world.run(judge(kind, (&source, &target), is_late, to, may));
                        if let Err(why) = verdict {
                            let at =
                                format!("{kind}, {course:?}, {crash:?} at {position:?}, then {to:?}: {why}");
                            return (states, Some(at));
                        }
                    }
                }
            }
        }
    }
    (states, None)
}

/// Explores these courses of images of these kinds, of which none may go wrong. Returns the number of states.
#[track_caller]
fn all_well(kinds: &[&str], killed: &[Option<usize>]) -> usize {
    let courses = killed
        .iter()
        .flat_map(|killed_at| [Goal::Forward, Goal::Back].map(|goal| Course { goal, killed_at: *killed_at }));
    let all = courses.flat_map(|course| kinds.iter().map(move |kind| (kind, course)));
    all.map(|(kind, course)| {
        let (count, wrong) = explore(kind, course, None);
        assert_eq!(wrong, None);
        assert!(count > 50, "{kind}: {count} states");
        count
    })
    .sum()
}

#[test]
#[allow(clippy::print_stderr, reason = "the number of states is a figure")]
fn whatever_crashes_there_is_one_writer_or_none_and_nothing_flushed_is_lost() {
    eprintln!("{} states", all_well(&KINDS, &[None]));
}

#[test]
#[allow(clippy::print_stderr, reason = "the number of states is a figure")]
fn a_mark_that_was_not_flushed_is_made_again() {
    eprintln!("{} states", all_well(&["qcow2", "linear"], &[Some(0)]));
}

#[test]
#[ignore = "takes minutes; the tests above run a part of it"]
#[allow(clippy::print_stderr, reason = "the number of states is a figure")]
fn a_server_that_is_killed_at_any_flush_of_a_mark_and_another_crash_do_no_harm() {
    eprintln!("{} states", all_well(&KINDS, &[None, Some(0), Some(1), Some(2), Some(3), Some(4), Some(5)]));
}

#[test]
fn mistakes_in_the_order_of_the_steps_are_found() {
    for kind in KINDS {
        for (mistake, goal, words) in [
            (Mistake::AcceptEarly, Goal::Forward, "both"),
            (Mistake::RestoreWithoutVoid, Goal::Back, "both"),
            (Mistake::VoidUnflushed, Goal::Back, "both"),
            (Mistake::FillEarly, Goal::Forward, "reads"),
            (Mistake::TrustMark, Goal::Forward, "both"),
            (Mistake::SealUnflushed, Goal::Forward, "another copy"),
            (Mistake::TrustMark, Goal::Back, "both"),
        ] {
            // Which flush is that of the mark depends on how many sectors of the header change.
            let killed = match mistake {
                Mistake::TrustMark => (0..6).map(Some).collect(),
                _ => vec![None],
            };
            let wrong = killed
                .into_iter()
                .find_map(|killed_at| explore(kind, Course { goal, killed_at }, Some(mistake)).1);
            let wrong = wrong.unwrap_or_else(|| panic!("{kind}: {mistake:?} was not found"));
            // Without its flushes the header of a qcow2 image may also be torn.
            let is_it =
                [words, "both", "contradicts", "no migration"].iter().any(|words| wrong.contains(words));
            assert!(is_it, "{mistake:?}: {wrong}");
        }
    }
}
