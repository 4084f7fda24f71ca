//! What ties an image to its flash cache: the session in its header, and the mark that the cache holds writes.
//!
//! ```text
//!   write 1, close ► with A: begin N1 + mark, write 2, clear, close ► with A: begin N2 + mark, write 3, close behind
//!   ► with A: end, close ► with A: begin N3, close ► with nothing: write 4, close
//! ```
//!
//! With a crash at each moment, and with a failure of each operation, the header is the one before a step or the one
//! after it, and a session that counts never goes with a change that was made without its cache. Mistakes that are made on
//! purpose are found.

use std::sync::Arc;

use vellum_core::{
    Buffer, ErrorKind, GuestOffset, LocalFuture, MemoryDisk, Result, SharedDisk, SharedStorage, Storage,
    WriteFlags, ZeroFlags,
};
use vellum_format::handover::{Handover, MoveNumber};
use vellum_format::image::{Files, OpenOptions, Opened};
use vellum_format::report::Repair;
use vellum_format::session::{CacheId, Session, SessionNumber, SessionState};
use vellum_format::{FormatKind, native, qcow2};
use vellum_sim::{
    Content, CrashKind, Drive, DriveOptions, Fault, FaultPlan, ForwardStorage, Forwarding, Operation,
    Position, World,
};

const SIZE: u64 = 1 << 20;
const KINDS: [&str; 7] =
    ["qcow2", "qcow2 journal", "qcow2 journal 512", "linear", "linear base", "table", "zoned base"];

fn cache(byte: u8) -> CacheId {
    CacheId::new([byte; 16]).expect("not zero")
}

fn number(byte: u8) -> SessionNumber {
    SessionNumber::new([byte; 16]).expect("not zero")
}

const OWN: u8 = 0xA0;

fn named(byte: u8, state: SessionState) -> Option<Session> {
    Some(Session { cache: cache(OWN), number: number(byte), state })
}

fn kind_of(kind: &str) -> FormatKind {
    if kind.starts_with("qcow2") { FormatKind::Qcow2 } else { FormatKind::Native }
}

async fn create(kind: &str, image: &dyn Storage) {
    if kind.starts_with("qcow2") {
        let journal = kind.contains("journal").then_some(64 << 10);
        let cluster_size = if kind.ends_with("512") { 512 } else { 4096 };
        let backing = kind.ends_with("base").then(|| ("base.raw".to_owned(), Some("raw".to_owned())));
        let options =
            qcow2::CreateOptions { size: SIZE, journal, cluster_size, backing, ..Default::default() };
        return qcow2::create(image, None, &options).await.unwrap();
    }
    let base = kind.ends_with("base").then(|| native::NewBase {
        name: "base.raw".to_owned(),
        format: Some("raw".to_owned()),
        size: SIZE,
        zeros: Vec::new(),
    });
    let has_table = !kind.starts_with("linear");
    let options = native::CreateOptions {
        size: SIZE,
        has_table,
        has_zones: kind.starts_with("zoned"),
        unit_size: has_table.then_some(64 << 10),
        journal_bytes: base.is_some().then_some(64 << 10).or(has_table.then_some(64 << 10)),
        base,
        uuid: Some([1; 16]),
        ..Default::default()
    };
    native::create(image, &options).await.map(drop).unwrap();
}

async fn open(
    kind: &str,
    image: &SharedStorage,
    flash: Option<CacheId>,
    options: OpenOptions,
) -> Result<Opened> {
    let head = kind_of(kind).format().read(&**image).await?;
    let below = head.backing().map(|_| MemoryDisk::holding(&vec![9; 1 << 20]) as SharedDisk);
    let files = Files { image: image.clone(), data_file: None, below };
    head.open(files, OpenOptions { flash, ..options }).await
}

async fn open_with(kind: &str, image: &SharedStorage, flash: Option<CacheId>) -> Result<Opened> {
    open(kind, image, flash, OpenOptions::default()).await
}

async fn session_of(kind: &str, image: &SharedStorage) -> Result<Option<Session>> {
    Ok(kind_of(kind).format().read(&**image).await?.session())
}

async fn write(disk: &SharedDisk, value: u8) -> Result<()> {
    disk.write(GuestOffset::ZERO, Buffer::copy_of(&[value; 512]), WriteFlags::default()).await
}

/// The first sector, read with the cache.
async fn read(kind: &str, image: &SharedStorage) -> Result<u8> {
    let opened = open_with(kind, image, Some(cache(OWN))).await?;
    let bytes = opened.disk.read(GuestOffset::ZERO, Buffer::for_overwrite(512)).await?.to_vec();
    assert!(bytes.iter().all(|byte| *byte == bytes[0]), "a sector is mixed");
    opened.disk.close().await?;
    Ok(bytes[0])
}

fn in_world<T>(kind: &str, of: impl AsyncFnOnce(SharedStorage) -> T) -> T {
    let world = World::new(1);
    let drive = Drive::new(&world, DriveOptions::default());
    world.run(async {
        let image: SharedStorage = drive;
        create(kind, &*image).await;
        of(image).await
    })
}

/// Leaves the image behind its cache.
async fn behind(kind: &str, image: &SharedStorage) {
    let opened = open_with(kind, image, Some(cache(OWN))).await.unwrap();
    opened.sessions.as_ref().expect("it has a place").begin(number(1), true).await.unwrap();
    write(&opened.disk, 2).await.unwrap();
    opened.disk.close().await.unwrap();
}

#[test]
fn an_image_that_is_behind_is_opened_with_its_cache_and_with_nothing_else() {
    for kind in KINDS {
        in_world(kind, async |image| {
            behind(kind, &image).await;
            assert_eq!(
                session_of(kind, &image).await.unwrap(),
                named(1, SessionState::HoldsWrites),
                "{kind}"
            );
            for flash in [None, Some(cache(3))] {
                for read_only in [false, true] {
                    let options = OpenOptions { read_only, ..OpenOptions::default() };
                    let error = open(kind, &image, flash, options).await.err().expect("it is refused");
                    assert_eq!(error.kind(), ErrorKind::Refused, "{kind}");
                    let said = error.chain();
                    let words = ["a0a0", "vellum flash recover", "vellum flash forget", image.name()];
                    assert!(words.iter().all(|word| said.contains(word)), "{kind}: {said}");
                }
            }
            assert_eq!(read(kind, &image).await.unwrap(), 2, "{kind}");
            assert_eq!(
                session_of(kind, &image).await.unwrap(),
                named(1, SessionState::HoldsWrites),
                "{kind}"
            );
        });
    }
}

#[test]
fn every_door_of_a_closed_image_that_is_behind_is_shut_but_for_looking() {
    for kind in KINDS {
        in_world(kind, async |image| {
            behind(kind, &image).await;
            let before =
                image.read(vellum_core::ImageOffset::ZERO, Buffer::for_overwrite(8192)).await.unwrap();
            let format = kind_of(kind).format();
            let (journal, stop) = (Some(None), std::sync::atomic::AtomicBool::new(false));
            let moved = Some(Handover::Moved(MoveNumber::new([4; 16]).unwrap()));
            let refusals = [
                ("recover", format.recover(&image).await.err()),
                ("check -r leaks", format.check(&image, Repair::Leaks, &mut |_| {}).await.err()),
                ("check -r all", format.check(&image, Repair::All, &mut |_| {}).await.err()),
                ("finish", format.finish(&image).await.err()),
                ("resize", format.resize(&image, 2 * SIZE, false).await.err()),
                ("shrink", format.resize(&image, SIZE / 2, true).await.err()),
                ("grow", format.grow(&image, 2 * SIZE).await.err()),
                ("detach", format.detach(&image, false, &stop).await.err()),
                ("migrate", format.set_handover(&image, moved).await.err()),
                ("journal", format.set_journal(&image, "i", journal).await.err()),
                ("snapshot", format.open_alone(&image).await.err()),
                ("revert", format.revert(&image, "s").await.err()),
            ];
            for (what, refusal) in refusals {
                let error = refusal.unwrap_or_else(|| panic!("{kind}: {what} is not refused"));
                let kinds = [ErrorKind::Refused, ErrorKind::Unsupported];
                assert!(kinds.contains(&error.kind()), "{kind}, {what}: {}", error.chain());
                let has_none = ["snapshots of", "it has a journal whenever"];
                let is_so = error.chain().contains("vellum flash recover")
                    || has_none.iter().any(|word| error.chain().contains(word));
                assert!(is_so, "{kind}, {what}: {}", error.chain());
            }
            let report = format.check(&image, Repair::Nothing, &mut |_| {}).await.unwrap().unwrap();
            assert!(report.is_clean(), "{kind}");
            let after =
                image.read(vellum_core::ImageOffset::ZERO, Buffer::for_overwrite(8192)).await.unwrap();
            assert!(before.slice() == after.slice(), "{kind}: the header is as it was");
            let forgotten = format.forget_session(&image).await.unwrap();
            assert_eq!(forgotten, named(1, SessionState::HoldsWrites), "{kind}");
            assert_eq!(session_of(kind, &image).await.unwrap(), None, "{kind}");
            open_with(kind, &image, None).await.unwrap().disk.close().await.unwrap();
            assert_eq!(format.forget_session(&image).await.unwrap(), None, "{kind}");
        });
    }
}

/// The first change of an opening without the cache, of each kind.
#[test]
fn a_number_counts_until_the_image_is_changed_without_its_cache() {
    let span = || GuestOffset::ZERO.span(4096);
    for kind in KINDS {
        for change in ["none", "read", "write", "zero", "discard", "repair", "own write", "other's write"] {
            in_world(kind, async |image| {
                let opened = open_with(kind, &image, Some(cache(OWN))).await.unwrap();
                let sessions = opened.sessions.as_ref().unwrap();
                write(&opened.disk, 1).await.unwrap();
                sessions.begin(number(1), true).await.unwrap();
                write(&opened.disk, 2).await.unwrap();
                sessions.clear_mark().await.unwrap();
                assert_eq!(sessions.session().await, named(1, SessionState::Clean));
                opened.disk.close().await.unwrap();
                assert_eq!(session_of(kind, &image).await.unwrap(), named(1, SessionState::Clean), "{kind}");
                let flash = match change {
                    "own write" => Some(cache(OWN)),
                    "other's write" => Some(cache(7)),
                    _ => None,
                };
                if change == "repair" {
                    kind_of(kind).format().check(&image, Repair::All, &mut |_| {}).await.unwrap();
                } else {
                    let opened = open_with(kind, &image, flash).await.unwrap();
                    assert_eq!(opened.sessions.is_some(), flash.is_some(), "{kind}");
                    let disk = &opened.disk;
                    match change {
                        "none" => {}
                        "read" => {
                            drop(disk.read(GuestOffset::ZERO, Buffer::for_overwrite(512)).await.unwrap())
                        }
                        "zero" => disk.write_zeroes(span(), ZeroFlags::default()).await.unwrap(),
                        "discard" => disk.discard(span(), WriteFlags::default()).await.unwrap(),
                        _ => write(disk, 3).await.unwrap(),
                    }
                    // Void before the change counts, not at the close.
                    let is_kept = ["none", "read", "own write"].contains(&change);
                    let state = if is_kept { SessionState::Clean } else { SessionState::Void };
                    assert_eq!(session_of(kind, &image).await.unwrap(), named(1, state), "{kind}: {change}");
                    disk.close().await.unwrap();
                }
                // A repair that repairs nothing may leave it.
                let found = session_of(kind, &image).await.unwrap();
                let states = match change {
                    "none" | "read" | "own write" => &[SessionState::Clean][..],
                    "repair" => &[SessionState::Clean, SessionState::Void],
                    _ => &[SessionState::Void],
                };
                assert!(states.iter().any(|state| found == named(1, *state)), "{kind}, {change}: {found:?}");
            });
        }
    }
}

#[test]
fn of_changes_of_a_closed_image_those_of_its_disk_make_a_session_void() {
    for kind in ["qcow2 base", "qcow2 journal base", "linear", "linear base", "table", "zoned base"] {
        for change in ["grow", "shrink", "detach", "handover", "journal"] {
            in_world(kind, async |image| {
                let opened = open_with(kind, &image, Some(cache(OWN))).await.unwrap();
                opened.sessions.as_ref().unwrap().begin(number(1), false).await.unwrap();
                opened.disk.close().await.unwrap();
                let format = kind_of(kind).format();
                let stop = std::sync::atomic::AtomicBool::new(false);
                let has_base = kind.ends_with("base");
                let moved = Some(Handover::Arrived(MoveNumber::new([4; 16]).unwrap()));
                let (done, state) = match change {
                    "grow" => (format.resize(&image, 2 * SIZE, false).await, SessionState::Clean),
                    "shrink" => (format.resize(&image, SIZE / 2, true).await, SessionState::Void),
                    "detach" => (format.detach(&image, false, &stop).await, SessionState::Void),
                    "handover" => (format.set_handover(&image, moved).await, SessionState::Clean),
                    _ => (format.set_journal(&image, "i", None).await.map(drop), SessionState::Clean),
                };
                let is_done = match done {
                    Err(error) if error.kind() == ErrorKind::Unsupported => false,
                    done => done
                        .map(|()| true)
                        .unwrap_or_else(|error| panic!("{kind}, {change}: {}", error.chain())),
                };
                let changes = is_done && (change != "detach" || has_base);
                // Growing a native disk may have to open it.
                let found = session_of(kind, &image).await.unwrap();
                let expected = if changes { state } else { SessionState::Clean };
                let is_careful = change == "grow" && found == named(1, SessionState::Void);
                assert!(found == named(1, expected) || is_careful, "{kind}, {change}: {found:?}");
            });
        }
    }
}

#[test]
fn images_without_a_place_say_why() {
    let world = World::new(1);
    world.run(async {
        let raw: SharedStorage = Drive::new(&world, DriveOptions::default());
        raw.set_len(SIZE).await.unwrap();
        let old: SharedStorage = Drive::new(&world, DriveOptions::default());
        let options =
            qcow2::CreateOptions { size: SIZE, version: 2, ..qcow2::CreateOptions::without_journal() };
        qcow2::create(&*old, None, &options).await.unwrap();
        for (kind, image, word) in
            [(FormatKind::Raw, raw, "raw image"), (FormatKind::Qcow2, old, "version 2")]
        {
            let head = kind.format().read(&*image).await.unwrap();
            let error = head.has_place_for_session().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert!(error.chain().contains(word) && error.chain().contains("readonly"), "{}", error.chain());
            let files = Files { image: image.clone(), data_file: None, below: None };
            let options = OpenOptions { flash: Some(cache(OWN)), ..OpenOptions::default() };
            assert!(head.open(files, options).await.unwrap().sessions.is_none(), "{kind}");
            assert_eq!(kind.format().forget_session(&image).await.unwrap(), None);
        }
    });
}

#[test]
fn raw_data_files_have_no_place_and_others_have_one() {
    for (is_raw, has_place) in [(false, true), (true, false)] {
        let world = World::new(1);
        world.run(async {
            let image: SharedStorage = Drive::new(&world, DriveOptions::default());
            let data: SharedStorage = Drive::new(&world, DriveOptions::default());
            let options = qcow2::CreateOptions {
                size: SIZE,
                data_file: Some("data.raw".to_owned()),
                data_file_raw: is_raw,
                ..qcow2::CreateOptions::without_journal()
            };
            qcow2::create(&*image, Some(&data), &options).await.unwrap();
            let head = FormatKind::Qcow2.format().read(&*image).await.unwrap();
            assert_eq!(head.has_place_for_session().is_ok(), has_place);
            let files = Files { image: image.clone(), data_file: Some(data), below: None };
            let options = OpenOptions { flash: Some(cache(OWN)), ..OpenOptions::default() };
            let opened = head.open(files, options).await.unwrap();
            assert_eq!(opened.sessions.is_some(), has_place);
            if let Some(sessions) = &opened.sessions {
                sessions.begin(number(1), true).await.unwrap();
            }
            opened.disk.close().await.unwrap();
            let found = session_of("qcow2", &image).await.unwrap();
            assert_eq!(found, named(1, SessionState::HoldsWrites).filter(|_| has_place));
        });
    }
}

/// What is done wrong on purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mistake {
    /// Nothing of a session is flushed.
    Unflushed,
    /// A change without the cache leaves the number as it is.
    NotVoided,
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

/// From a position on: the sessions that the header may name, and what the sector may read where a number counts.
struct Milestone {
    begins: Position,
    sessions: Vec<Option<Session>>,
    values: Vec<u8>,
}

/// The course at the head of this file.
async fn course(world: &World, drive: &Arc<Drive>, kind: &str, mistake: Option<Mistake>) -> Vec<Milestone> {
    use SessionState::{Clean, HoldsWrites, Void};
    let image: SharedStorage = match mistake {
        Some(Mistake::Unflushed) => Forwarding::new(Unflushed(drive.clone())),
        _ => drive.clone(),
    };
    let own = Some(cache(OWN));
    let opened = open_with(kind, &image, own).await.unwrap();
    write(&opened.disk, 1).await.unwrap();
    opened.disk.close().await.unwrap();
    let mut milestones = Vec::new();
    let mut note = |sessions: &[Option<Session>], values: &[u8]| {
        let (sessions, values) = (sessions.to_vec(), values.to_vec());
        milestones.push(Milestone { begins: world.position(), sessions, values });
    };
    let (behind_1, clean_1) = (named(1, HoldsWrites), named(1, Clean));
    let (behind_2, clean_3, void_3) = (named(2, HoldsWrites), named(3, Clean), named(3, Void));

    let opened = open_with(kind, &image, own).await.unwrap();
    let sessions = opened.sessions.as_ref().unwrap();
    note(&[None, behind_1], &[1]);
    sessions.begin(number(1), true).await.unwrap();
    note(&[behind_1], &[1, 2]);
    write(&opened.disk, 2).await.unwrap();
    opened.disk.flush().await.unwrap();
    note(&[behind_1, clean_1], &[2]);
    sessions.clear_mark().await.unwrap();
    note(&[clean_1], &[2]);
    opened.disk.close().await.unwrap();

    let opened = open_with(kind, &image, own).await.unwrap();
    let sessions = opened.sessions.as_ref().unwrap();
    note(&[clean_1, behind_2], &[2]);
    sessions.begin(number(2), true).await.unwrap();
    note(&[behind_2], &[2, 3]);
    write(&opened.disk, 3).await.unwrap();
    opened.disk.close().await.unwrap();
    note(&[behind_2], &[3]);

    let opened = open_with(kind, &image, own).await.unwrap();
    let sessions = opened.sessions.as_ref().unwrap();
    note(&[behind_2, None], &[3]);
    sessions.end().await.unwrap();
    note(&[None], &[3]);
    opened.disk.close().await.unwrap();

    let opened = open_with(kind, &image, own).await.unwrap();
    let sessions = opened.sessions.as_ref().unwrap();
    note(&[None, clean_3], &[3]);
    sessions.begin(number(3), false).await.unwrap();
    note(&[clean_3], &[3]);
    opened.disk.close().await.unwrap();

    let flash = if mistake == Some(Mistake::NotVoided) { own } else { None };
    let opened = open_with(kind, &image, flash).await.unwrap();
    note(&[clean_3, void_3], &[3]);
    write(&opened.disk, 4).await.unwrap();
    opened.disk.flush().await.unwrap();
    note(&[void_3], &[4]);
    opened.disk.close().await.unwrap();
    note(&[void_3], &[4]);
    milestones
}

/// What is wrong with an image after a crash.
async fn judge(kind: &str, image: &SharedStorage, may: &Milestone) -> Result<(), String> {
    let found = session_of(kind, image).await.map_err(|error| error.chain())?;
    if !may.sessions.contains(&found) {
        return Err(format!("it names {found:?}, and may name {:?}", may.sessions));
    }
    let is_behind = found.is_some_and(|session| session.holds_writes());
    if is_behind != open_with(kind, image, None).await.is_err() {
        return Err(format!("{found:?}, and it opens without the cache, or does not"));
    }
    if !is_behind && session_of(kind, image).await.map_err(|error| error.chain())? != found {
        return Err("opening it has changed the session".to_owned());
    }
    let value = read(kind, image).await.map_err(|error| error.chain())?;
    let counts = found.is_some_and(|session| session.counts());
    if counts && !may.values.contains(&value) {
        return Err(format!("{found:?} counts, and the disk reads {value} instead of {:?}", may.values));
    }
    // With its cache a recovery leaves the session as it is.
    match session_of(kind, image).await.map_err(|error| error.chain())? == found {
        true => Ok(()),
        false => Err("the recovery has changed the session".to_owned()),
    }
}

/// All crashes of the course: how many states there were, and what was wrong first.
fn explore(kind: &str, mistake: Option<Mistake>) -> (usize, Option<String>) {
    let world = World::new(3);
    let drive = Drive::new(&world, DriveOptions::default());
    let milestones = world.run(async {
        create(kind, &*drive).await;
        drive.flush().await.unwrap();
        course(&world, &drive, kind, mistake).await
    });
    let log = drive.log();
    let mut positions = log.crash_positions();
    positions.push(world.position());
    positions.retain(|position| *position >= milestones[0].begins);
    let (mut states, mut seen) = (0, std::collections::HashSet::new());
    for position in positions {
        let (index, may) = milestones
            .iter()
            .enumerate()
            .take_while(|(_, milestone)| milestone.begins <= position)
            .last()
            .expect("the first is at the beginning");
        for crash in [CrashKind::PowerCut, CrashKind::ProcessKill, CrashKind::FailedFlush] {
            let point = log.crash(crash, position);
            let whole: Vec<Content> = match point.subsets().filter(|_| point.pending().len() <= 4) {
                Some(subsets) => subsets.map(|(_, content)| content).collect(),
                None => point.corners().collect(),
            };
            let torn = (0..point.pending().len().min(4)).flat_map(|index| point.tears(index, u64::MAX));
            for content in whole.into_iter().chain(torn) {
                if !seen.insert((index, content.digest())) {
                    continue;
                }
                states += 1;
                let world = World::new(4);
                let image: SharedStorage = Drive::from_content(&world, content, DriveOptions::default());
                if let Err(why) = world.run(judge(kind, &image, may)) {
                    return (states, Some(format!("{kind}, {crash:?} at {position:?}, step {index}: {why}")));
                }
            }
        }
    }
    (states, None)
}

#[test]
#[allow(clippy::print_stderr, reason = "the number of states is a figure")]
fn a_crash_leaves_the_session_before_a_step_or_after_it() {
    let mut sum = 0;
    for kind in KINDS {
        let (states, wrong) = explore(kind, None);
        assert_eq!(wrong, None);
        assert!(states > 20, "{kind}: {states} states");
        sum += states;
    }
    eprintln!("{sum} states");
}

#[test]
fn mistakes_are_found() {
    for kind in KINDS {
        for mistake in [Mistake::Unflushed, Mistake::NotVoided] {
            assert!(explore(kind, Some(mistake)).1.is_some(), "{kind}: {mistake:?} was not found");
        }
    }
}

/// A step of a session with a failure of one operation.
#[test]
#[allow(clippy::print_stderr, reason = "the number of failures is a figure")]
fn a_failure_leaves_the_session_before_a_step_or_after_it() {
    use SessionState::{Clean, HoldsWrites};
    let mut met = 0;
    for kind in KINDS {
        for step in ["begin", "begin again", "clear", "end"] {
            let (before, after) = match step {
                "begin" => (None, named(2, HoldsWrites)),
                "begin again" => (named(1, HoldsWrites), named(2, HoldsWrites)),
                "clear" => (named(1, HoldsWrites), named(1, Clean)),
                _ => (named(1, HoldsWrites), None),
            };
            for number_of_fault in 0.. {
                let world = World::new(5);
                let plan = FaultPlan::none();
                let options = DriveOptions { faults: plan.clone(), ..DriveOptions::default() };
                let drive = Drive::new(&world, options);
                let image: SharedStorage = drive.clone();
                let is_met = world.run(async {
                    create(kind, &*image).await;
                    if step != "begin" {
                        behind(kind, &image).await;
                    }
                    let opened = open_with(kind, &image, Some(cache(OWN))).await.unwrap();
                    write(&opened.disk, 5).await.unwrap();
                    let sessions = opened.sessions.as_ref().unwrap();
                    let operations = Operation::Write | Operation::Flush;
                    plan.add(Fault { error: ErrorKind::Io, ..Fault::nth(operations, number_of_fault) });
                    let done = match step {
                        "clear" => sessions.clear_mark().await,
                        "end" => sessions.end().await,
                        _ => sessions.begin(number(2), true).await,
                    };
                    let is_met = plan.hits() > 0;
                    plan.clear();
                    assert!(done.is_ok() || is_met, "{kind}, {step}");
                    if done.is_ok() {
                        assert_eq!(sessions.session().await, after, "{kind}, {step}");
                    }
                    // What the image still does of itself leaves it as it is.
                    let _ = write(&opened.disk, 6).await;
                    let _ = opened.disk.close().await;
                    is_met
                });
                let contents = match drive.is_poisoned() {
                    true => {
                        let point = drive.log().crash(CrashKind::FailedFlush, world.position());
                        point.corners().collect()
                    }
                    false => vec![drive.content()],
                };
                for content in contents {
                    let world = World::new(6);
                    let image: SharedStorage = Drive::from_content(&world, content, DriveOptions::default());
                    world.run(async {
                        let found = session_of(kind, &image).await.unwrap();
                        let at = format!("{kind}, {step}, operation {number_of_fault}: {found:?}");
                        assert!([before, after].contains(&found), "{at}");
                        let value = read(kind, &image).await.unwrap();
                        assert!([0, 2, 5, 6, 9].contains(&value), "{at}: {value}");
                    });
                }
                if !is_met {
                    break;
                }
                met += 1;
            }
        }
    }
    eprintln!("{met} failures");
    assert!(met > 60, "{met}");
}
