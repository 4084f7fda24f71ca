//! Chains that change while their disk is in use, and every crash in it: a new image on top, and what images have merged into one
//! below them.
//!
//! ```text
//!   external   base ◄─ top        guest: 2, flush, 3 │ close │ NEW gets its name │ guest: 4, flush      NEW over top
//!   pivot      base ◄─ top        guest: 2 … merge … guest: 3, flush … merge │ close │ an empty image takes TOP's name │ guest on base: 4
//!   between    base ◄─ mid ◄─ top guest: 2 … merge mid … guest: 3, flush │ close │ top's header names base │ guest: 4
//!   crashes    at each position, of each kind; each subset of what was not flushed, on all drives
//! ```
//!
//! After each crash the image of the name that was served reads what was flushed, or something later, in each sector; from the moment on
//! in which a file gets or changes its name, so does the image of the new name, and the base. Mistakes that are made on purpose are found.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use vellum_core::{
    Buffer, Error, ErrorKind, GuestOffset, LocalFuture, Result, SharedDisk, SharedStorage, Storage,
    WriteFlags,
};
use vellum_format::image::NewBacking;
use vellum_format::{FormatKind, native, qcow2};
use vellum_layer::merge::{Merge, Steering};
use vellum_layer::noted::{NotedDisk, Notes};
use vellum_layer::{Chain, ChainOptions, Gate, Opener, Purpose};
use vellum_sim::{Content, CrashKind, CrashPoint, Drive, DriveOptions, Position, World};

const SIZE: u64 = 1 << 20;
/// The sectors that are looked at, in bytes of the disk: two near each other, two elsewhere.
const SECTORS: [u64; 4] = [0, 4096, 256 << 10, 700 << 10];
const KINDS: [&str; 5] = ["raw", "qcow2", "qcow2 journal", "linear", "table"];

/// What is done wrong on purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mistake {
    /// The names change before the image that is read from then on is flushed.
    NameEarly,
    /// What was changed while it was copied is not copied again.
    ForgetNotes,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Course {
    External,
    Pivot,
    Between,
}

/// Files by their names.
#[derive(Default)]
struct Shelf(RefCell<BTreeMap<PathBuf, Arc<Drive>>>);

impl Shelf {
    fn put(&self, world: &World, name: &str) -> Arc<Drive> {
        if let Some(drive) = self.0.borrow().get(Path::new(name)) {
            return drive.clone();
        }
        let drive = Drive::new(world, DriveOptions { name: name.to_owned(), ..DriveOptions::default() });
        self.0.borrow_mut().insert(PathBuf::from(name), drive.clone());
        drive
    }
}

impl Opener for Shelf {
    fn canonical<'a>(&'a self, path: &'a Path) -> LocalFuture<'a, Result<PathBuf>> {
        Box::pin(std::future::ready(Ok(path.to_owned())))
    }

    fn open<'a>(
        &'a self,
        canonical: &'a Path,
        _: &'a Path,
        _: Purpose,
    ) -> LocalFuture<'a, Result<SharedStorage>> {
        let file = self.0.borrow().get(canonical).cloned().map(|drive| drive as SharedStorage);
        let missing = || Error::new(ErrorKind::NotFound, format!("there is no {}", canonical.display()));
        Box::pin(std::future::ready(file.ok_or_else(missing)))
    }
}

struct Unlimited;

impl Steering for Unlimited {
    fn go_on(&self, _bytes: u64) -> LocalFuture<'_, Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }
}

fn format_of(kind: &str) -> FormatKind {
    match kind {
        "raw" => FormatKind::Raw,
        kind if kind.starts_with("qcow2") => FormatKind::Qcow2,
        _ => FormatKind::Native,
    }
}

async fn create(kind: &str, image: &dyn Storage, below: Option<(&str, &str)>) {
    let below = below.map(|(name, kind)| (name.to_owned(), format_of(kind).to_string()));
    match format_of(kind) {
        FormatKind::Raw => {
            image.set_len(SIZE).await.unwrap();
            image.flush().await.unwrap();
        }
        FormatKind::Qcow2 => {
            let journal = kind.ends_with("journal").then_some(64 << 10);
            let backing = below.map(|(name, format)| (name, Some(format)));
            let options = qcow2::CreateOptions { size: SIZE, journal, backing, ..Default::default() };
            qcow2::create(image, None, &options).await.unwrap();
        }
        _ => {
            let has_table = kind == "table";
            let base = below.map(|(name, format)| native::NewBase {
                name,
                format: Some(format),
                size: SIZE,
                zeros: Vec::new(),
            });
            let options = native::CreateOptions {
                size: SIZE,
                has_table,
                unit_size: has_table.then_some(64 << 10),
                journal_bytes: (has_table || base.is_some()).then_some(64 << 10),
                base,
                uuid: Some([1; 16]),
                ..Default::default()
            };
            native::create(image, &options).await.map(drop).unwrap();
        }
    }
}

async fn open(shelf: &Shelf, name: &str, kind: &str, merges_into: Option<usize>) -> Result<Chain> {
    let gate = Gate::allowing(vec![PathBuf::from("/")]);
    let format = Some(format_of(kind));
    let options = ChainOptions { format, gate, merges_into, ..ChainOptions::default() };
    Chain::open(shelf, Path::new(name), &options).await
}

async fn write(disk: &SharedDisk, sector: usize, value: u8) {
    let at = GuestOffset::new(SECTORS[sector]);
    disk.write(at, Buffer::copy_of(&[value; 512]), WriteFlags::default()).await.unwrap();
}

async fn read(disk: &SharedDisk) -> Result<Vec<u8>> {
    let mut values = Vec::new();
    for at in SECTORS {
        let bytes = disk.read(GuestOffset::new(at), Buffer::for_overwrite(512)).await?.to_vec();
        assert!(bytes.iter().all(|byte| *byte == bytes[0]), "a sector is mixed");
        values.push(bytes[0]);
    }
    Ok(values)
}

/// What each sector may hold from a position on: its last flushed value, and those written since.
type May = Vec<Vec<u8>>;

/// What happened, and what may be read after a crash at each position.
struct Run {
    drives: BTreeMap<PathBuf, Arc<Drive>>,
    /// The names that are the disk, from each position on, with the kinds of their images.
    names: Vec<(Position, Vec<(&'static str, String)>)>,
    /// Files that take the place of others, and since when.
    renamed: Option<(Position, &'static str, &'static str)>,
    milestones: Vec<(Position, May)>,
}

fn at<T>(all: &[(Position, T)], position: Position) -> &T {
    &all.iter().take_while(|(begins, _)| *begins <= position).last().expect("the first is at the beginning").1
}

async fn run(world: &World, course: Course, kind: &str, base_kind: &str, mistake: Option<Mistake>) -> Run {
    let shelf = Shelf::default();
    // Where they are made is known from the beginning, and nobody opens them before.
    for name in ["/new", "/empty"] {
        shelf.put(world, name);
    }
    let mut milestones = Vec::new();
    let mut note = |may: [&[u8]; 4]| {
        milestones.push((world.position(), may.iter().map(|values| values.to_vec()).collect::<May>()));
    };
    create(base_kind, &*shelf.put(world, "/base"), None).await;
    let base = open(&shelf, "/base", base_kind, None).await.unwrap();
    for sector in 0..SECTORS.len() {
        write(base.disk(), sector, 1).await;
    }
    base.close().await.unwrap();
    let mut below = ("/base", base_kind);
    if course == Course::Between {
        create(kind, &*shelf.put(world, "/mid"), Some(below)).await;
        let mid = open(&shelf, "/mid", kind, None).await.unwrap();
        // Not in a cluster that the guest writes in part: the top would have all of that.
        write(mid.disk(), 2, 7).await;
        mid.close().await.unwrap();
        below = ("/mid", kind);
    }
    let third = if course == Course::Between { 7 } else { 1 };
    create(kind, &*shelf.put(world, "/top"), Some(below)).await;
    note([&[1], &[1], &[third], &[1]]);
    let mut names = vec![(world.position(), vec![("/top", kind.to_owned())])];
    let mut renamed = None;
    let into = match course {
        Course::External => None,
        Course::Pivot => Some(1),
        Course::Between => Some(2),
    };
    let chain = open(&shelf, "/top", kind, into).await.unwrap();
    let notes = Notes::new(SIZE);
    let disk = NotedDisk::over(chain.disk().clone(), notes.clone());
    note([&[1, 2], &[1], &[third], &[1]]);
    write(&disk, 0, 2).await;
    disk.flush().await.unwrap();
    note([&[2], &[1], &[third], &[1, 3]]);
    match course {
        Course::External => {
            write(&disk, 3, 3).await;
            if mistake == Some(Mistake::NameEarly) {
                create(kind, &*shelf.put(world, "/new"), Some(("/top", kind))).await;
                names.push((world.position(), vec![("/new", kind.to_owned())]));
                let open = open(&shelf, "/new", kind, None).await.unwrap();
                note([&[2], &[1, 4], &[third], &[1, 3]]);
                write(open.disk(), 1, 4).await;
                // All that was answered is flushed, it is said.
                open.disk().flush().await.unwrap();
                note([&[2], &[4], &[third], &[3]]);
                let drives = shelf.0.into_inner();
                return Run { drives, names, renamed, milestones };
            }
            create(kind, &*shelf.put(world, "/new"), Some(("/top", kind))).await;
            chain.close().await.unwrap();
            note([&[2], &[1], &[third], &[3]]);
            drop((disk, chain));
            names.push((world.position(), vec![("/new", kind.to_owned())]));
            let chain = open(&shelf, "/new", kind, None).await.unwrap();
            note([&[2], &[1, 4], &[third], &[3]]);
            write(chain.disk(), 1, 4).await;
            chain.disk().flush().await.unwrap();
            note([&[2], &[4], &[third], &[3]]);
            chain.close().await.unwrap();
        }
        Course::Pivot | Course::Between => {
            let depth = into.expect("it is merged");
            let from = depth - 1;
            let merge = Merge {
                layers: (from..depth).map(|at| chain.member(at).disk().clone()).collect(),
                base: chain.member(depth).disk().clone(),
                steering: &Unlimited,
            };
            merge.span(GuestOffset::ZERO.span(SIZE / 2)).await.unwrap();
            write(&disk, 3, 3).await;
            disk.flush().await.unwrap();
            note([&[2, 5], &[1], &[third], &[3]]);
            merge.span(GuestOffset::new(SIZE / 2).span(SIZE / 2)).await.unwrap();
            write(&disk, 0, 5).await;
            disk.flush().await.unwrap();
            note([&[5], &[1], &[third], &[3]]);
            if course == Course::Pivot && mistake != Some(Mistake::ForgetNotes) {
                let mut at = GuestOffset::ZERO;
                while let Some(span) = notes.take(at) {
                    merge.span(span).await.unwrap();
                    at = span.end();
                }
            }
            let is_early = mistake == Some(Mistake::NameEarly);
            if !is_early {
                merge.flush().await.unwrap();
            }
            let top = chain.top().storage.clone();
            if course == Course::Pivot {
                if !is_early {
                    chain.close().await.unwrap();
                }
                create(kind, &*shelf.put(world, "/empty"), Some(("/base", base_kind))).await;
                renamed = Some((world.position(), "/top", "/empty"));
                names.push((
                    world.position(),
                    vec![("/top", kind.to_owned()), ("/base", base_kind.to_owned())],
                ));
                if is_early {
                    chain.close().await.unwrap();
                }
                drop((merge, disk, chain, top));
                let chain = open(&shelf, "/base", base_kind, None).await.unwrap();
                note([&[5], &[1, 4], &[third], &[3]]);
                write(chain.disk(), 1, 4).await;
                chain.disk().flush().await.unwrap();
                note([&[5], &[4], &[third], &[3]]);
                chain.close().await.unwrap();
            } else {
                let set = async || {
                    let format = format_of(base_kind).to_string();
                    let backing =
                        NewBacking { name: "/base", format: Some(&format), size: Some(SIZE), pin: None };
                    format_of(kind).format().set_backing(&top, backing).await.unwrap();
                };
                if is_early {
                    // The image on top is closed, and the base has nothing flushed.
                    chain.member(0).disk().close().await.unwrap();
                    set().await;
                    chain.close().await.ok();
                } else {
                    chain.close().await.unwrap();
                    set().await;
                }
                drop((merge, disk, chain));
                let chain = open(&shelf, "/top", kind, None).await.unwrap();
                note([&[5], &[1, 4], &[third], &[3]]);
                write(chain.disk(), 1, 4).await;
                chain.disk().flush().await.unwrap();
                note([&[5], &[4], &[third], &[3]]);
                chain.close().await.unwrap();
            }
        }
    }
    Run { drives: shelf.0.into_inner(), names, renamed, milestones }
}

/// What is wrong with these files after a crash.
async fn judge(shelf: &Shelf, names: &[(&'static str, String)], may: &May) -> Result<(), String> {
    // Each as the first to be opened, which recovers it.
    for (name, kind) in names {
        let chain =
            open(shelf, name, kind, None).await.map_err(|error| format!("{name}: {}", error.chain()))?;
        let found = read(chain.disk()).await.map_err(|error| format!("{name}: {}", error.chain()))?;
        chain.close().await.map_err(|error| error.chain())?;
        if !found.iter().zip(may).all(|(value, may)| may.contains(value)) {
            return Err(format!("{name} reads {found:?}, and may read {may:?}"));
        }
    }
    Ok(())
}

/// Every crash of one course: how many states there were, and what was wrong first.
fn explore(course: Course, kind: &str, base_kind: &str, mistake: Option<Mistake>) -> (usize, Option<String>) {
    let world = World::new(11);
    let run = world.run(run(&world, course, kind, base_kind, mistake));
    let start = run.milestones[0].0;
    let logs: Vec<_> = run.drives.iter().map(|(name, drive)| (name.clone(), drive.log())).collect();
    let mut positions: Vec<Position> = logs.iter().flat_map(|(_, log)| log.crash_positions()).collect();
    positions.extend(run.names.iter().map(|(position, _)| *position));
    positions.push(world.position());
    positions.retain(|position| *position >= start);
    positions.sort_unstable();
    positions.dedup();
    let mut states = 0;
    for position in positions {
        for crash in [CrashKind::PowerCut, CrashKind::ProcessKill] {
            let left = |point: &CrashPoint| -> Vec<Content> {
                match point.subsets().filter(|_| point.pending().len() <= 3) {
                    Some(subsets) => subsets.map(|(_, content)| content).collect(),
                    None => point.corners().collect(),
                }
            };
            let mut all: Vec<Vec<(PathBuf, Content)>> = vec![Vec::new()];
            for (name, log) in &logs {
                let contents = left(&log.crash(crash, position));
                all = all
                    .into_iter()
                    .flat_map(|before| {
                        contents.iter().map(move |content| {
                            let mut now = before.clone();
                            now.push((name.clone(), content.clone()));
                            now
                        })
                    })
                    .collect();
            }
            for files in all {
                states += 1;
                let world = World::new(12);
                let shelf = Shelf::default();
                for (name, content) in files {
                    let drive = Drive::from_content(&world, content, DriveOptions::default());
                    shelf.0.borrow_mut().insert(name, drive);
                }
                if let Some((_, name, file)) = run.renamed.filter(|(since, ..)| *since <= position) {
                    let file = shelf.0.borrow().get(Path::new(file)).cloned().expect("it is there");
                    shelf.0.borrow_mut().insert(PathBuf::from(name), file);
                }
                let (names, may) = (at(&run.names, position), at(&run.milestones, position));
                if let Err(why) = world.run(judge(&shelf, names, may)) {
                    let at =
                        format!("{course:?} of {kind} over {base_kind}: {crash:?} at {position:?}: {why}");
                    return (states, Some(at));
                }
            }
        }
    }
    (states, None)
}

#[track_caller]
fn all_well(course: Course, bases: &[&str]) -> usize {
    let mut states = 0;
    for kind in &KINDS[1..] {
        for base_kind in bases {
            let (count, wrong) = explore(course, kind, base_kind, None);
            assert_eq!(wrong, None);
            assert!(count > 20, "{course:?} of {kind} over {base_kind}: {count} states");
            states += count;
        }
    }
    states
}

#[test]
#[allow(clippy::print_stderr, reason = "the number of states is a figure")]
fn whatever_crashes_an_external_snapshot_loses_nothing_that_was_flushed() {
    eprintln!("{} states", all_well(Course::External, &["raw"]));
}

#[test]
#[allow(clippy::print_stderr, reason = "the number of states is a figure")]
fn whatever_crashes_a_commit_of_the_top_loses_nothing_that_was_flushed() {
    eprintln!("{} states", all_well(Course::Pivot, &["raw", "qcow2 journal"]));
}

#[test]
#[allow(clippy::print_stderr, reason = "the number of states is a figure")]
fn whatever_crashes_a_commit_between_loses_nothing_that_was_flushed() {
    eprintln!("{} states", all_well(Course::Between, &["raw", "qcow2 journal"]));
}

#[test]
#[ignore = "takes minutes; the tests above run a part of it"]
#[allow(clippy::print_stderr, reason = "the number of states is a figure")]
fn all_kinds_of_images_over_all_kinds() {
    let all = [Course::External, Course::Pivot, Course::Between];
    eprintln!("{} states", all.map(|course| all_well(course, &KINDS)).iter().sum::<usize>());
}

#[test]
fn mistakes_in_the_order_of_the_steps_are_found() {
    for (mistake, course, words) in [
        (Mistake::NameEarly, Course::External, "reads"),
        (Mistake::NameEarly, Course::Pivot, "reads"),
        (Mistake::NameEarly, Course::Between, "reads"),
        (Mistake::ForgetNotes, Course::Pivot, "reads"),
    ] {
        for kind in &KINDS[1..] {
            let wrong = explore(course, kind, "raw", Some(mistake)).1;
            let wrong = wrong.unwrap_or_else(|| panic!("{kind}: {mistake:?} of {course:?} was not found"));
            assert!(wrong.contains(words) || wrong.contains("mixed"), "{mistake:?}: {wrong}");
        }
    }
}
