//! Crashes of an image and of its fast medium, together and apart.
//!
//! ```text
//!   program of guests and promotions ──► logs of both media, a record of the answers
//!                           │ at a position: power cut or kill of the one × power cut or kill of the other
//!                           ▼
//!                         images × media, each pair once
//!                           │ open both ► read: the guest finds what it may
//!                           ├─► open the image alone ► it reads the same                  no copy is ever different
//!                           ▼ now and then: a program goes on there, with crashes of its own
//! ```
//!
//! 1. Both drives are in one world, so a position means the same to both.
//! 2. What a recovery has read is durable, so the program that goes on is judged by exactly that.
//! 3. A case is its seed: everything is drawn from it.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use futures_lite::future::block_on;
use vellum_core::{
    Buffer, Disk, GuestOffset, GuestSpan, ImageOffset, Random, Result as CoreResult, SharedStorage,
    WriteFlags, ZeroFlags,
};
use vellum_format::FormatKind;
use vellum_format::fast::{FastId, FastMedium, NewRow, Promotion, Reason, Tiers, create as create_fast};
use vellum_format::native::{Native, OpenOptions};
use vellum_sim::explore::Medium;
use vellum_sim::{
    Content, CrashKind, CrashPoint, Delay, Drive, DriveOptions, Effect, EventLog, Expectation, Fault,
    FaultPlan, Operation, Oracle, Position, World,
};

use crate::common::native::NativeSetup;

const UNIT: u64 = 64 << 10;
/// UUID of the image.
const UUID: [u8; 16] = [7; 16];

/// What is explored.
#[derive(Clone)]
pub(crate) struct Setup {
    pub(crate) name: &'static str,
    pub(crate) image: NativeSetup,
    /// Slots of the fast medium.
    pub(crate) slots: u64,
    pub(crate) guests: usize,
    pub(crate) steps: usize,
    /// Flushes, writes and reads fail.
    pub(crate) faults: bool,
    /// Units are mostly promoted and taken back, few of them.
    pub(crate) demotes: bool,
    /// At most this many positions of a program.
    pub(crate) positions: usize,
    /// One state in this many is gone on from.
    pub(crate) nested_one_in: u64,
}

impl Setup {
    pub(crate) fn of(name: &'static str, image: NativeSetup) -> Self {
        Self {
            name,
            image,
            slots: 5,
            guests: 1,
            steps: 40,
            faults: false,
            demotes: false,
            positions: 100,
            nested_one_in: 300,
        }
    }

    pub(crate) fn table() -> Self {
        Self::of("table", NativeSetup::table("table", 6 * UNIT + 512, UNIT))
    }

    pub(crate) fn over_a_base() -> Self {
        let base = (0..200 << 10).map(|at: u32| (at / 512).to_le_bytes()[0] | 1).collect();
        Self::of("over a base", NativeSetup::table("table over a base", 6 * UNIT, UNIT).over(base, 16 << 10))
    }

    pub(crate) fn zoned() -> Self {
        Self::of("zoned", NativeSetup::zoned("zoned", 6 * UNIT, UNIT, 256 << 10))
    }

    /// Two slots for each unit.
    pub(crate) fn large_units() -> Self {
        let image = NativeSetup::table("large units", 5 * 2 * UNIT, 2 * UNIT);
        Self { slots: 7, steps: 30, ..Self::of("large units", image) }
    }

    pub(crate) fn several(self) -> Self {
        Self { guests: 3, steps: 14, ..self }
    }

    pub(crate) fn demoting(self) -> Self {
        Self { demotes: true, slots: 3, ..self.several() }
    }

    pub(crate) fn faulty(self) -> Self {
        Self { faults: true, ..self }
    }

    fn size(&self) -> u64 {
        self.image.options.size
    }

    fn unit(&self) -> u64 {
        self.image.options.unit_size.expect("it has a table")
    }

    fn fast_bytes(&self) -> u64 {
        (640 << 10) + self.slots * UNIT
    }
}

/// What was looked at.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Counts {
    pub(crate) programs: u64,
    pub(crate) crashes: u64,
    pub(crate) states: u64,
    pub(crate) judged: u64,
    /// Units that were read from the fast medium in these states.
    pub(crate) fast_units: u64,
    pub(crate) nested: u64,
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.programs += other.programs;
        self.crashes += other.crashes;
        self.states += other.states;
        self.judged += other.judged;
        self.fast_units += other.fast_units;
        self.nested += other.nested;
    }
}

/// A content, and what a host's cache shows in its place after a failed flush.
#[derive(Clone)]
struct Shown {
    content: Content,
    shown: Option<Content>,
}

impl Shown {
    fn digest(&self) -> u64 {
        self.content.digest() ^ self.shown.as_ref().map_or(0, Content::digest).rotate_left(17)
    }

    fn medium(&self, is_stubborn: bool) -> Arc<Medium> {
        let medium = Medium::new(self.content.clone());
        match &self.shown {
            Some(shown) => medium.behind(shown.clone(), is_stubborn),
            None => medium,
        }
    }
}

impl From<Content> for Shown {
    fn from(content: Content) -> Self {
        Self { content, shown: None }
    }
}

/// What both media hold.
#[derive(Clone)]
struct Images {
    image: Shown,
    fast: Shown,
}

impl Images {
    fn digest(&self) -> u64 {
        self.image.digest().wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(23) ^ self.fast.digest()
    }
}

struct Run {
    world: World,
    image: EventLog,
    fast: EventLog,
    oracle: Oracle,
}

impl Run {
    /// What happened to both media before a position, for a person.
    fn events_before(&self, position: Position) -> String {
        let of = |name: &str, log: &EventLog| -> Vec<(Position, String)> {
            let events = log.events().iter().filter(|event| event.submitted() < position);
            let line = |event: &vellum_sim::Event| {
                let (submitted, ended) = (event.submitted(), event.ended());
                let text = format!(
                    "{submitted} {name} {:?} {} ended {ended:?} {:?}",
                    event.operation(),
                    event.span(),
                    event.outcome()
                );
                (submitted, text)
            };
            events.map(line).collect()
        };
        let mut all = of("image", &self.image);
        all.extend(of("fast", &self.fast));
        all.sort();
        all.into_iter().map(|(_, line)| line + "\n").collect()
    }
}

fn begin(setup: &Setup) -> Images {
    let image = Medium::new(setup.image.empty_image());
    let fast = Medium::new(Content::default());
    block_on(async {
        let id = FastId::new([3; 16]).unwrap();
        let storage: SharedStorage = fast.clone();
        create_fast(&storage, setup.fast_bytes(), id).await.unwrap();
        let medium = FastMedium::open(storage, Random::from_seed(5)).await.unwrap();
        let row = NewRow { uuid: UUID, budget: 1 << 40, name: "image".to_owned() };
        medium.attach(row).await.unwrap();
        let storage: SharedStorage = image.clone();
        FormatKind::Native.format().attach_fast(&storage, id, "fast").await.unwrap();
    });
    Images { image: image.content().into(), fast: fast.content().into() }
}

/// Opens the image with its fast medium, or without.
async fn open(
    setup: &Setup,
    image: SharedStorage,
    fast: Option<SharedStorage>,
    seed: u64,
) -> CoreResult<Arc<Native>> {
    let fast = match fast {
        Some(fast) => Some(FastMedium::open(fast, Random::from_seed(seed)).await?),
        None => None,
    };
    let options = OpenOptions { journal_key: Some(1), fast, ..OpenOptions::default() };
    Native::open(image, setup.image.below(), options).await
}

/// One step of a guest.
async fn step(random: &mut Random, setup: &Setup, disk: &dyn Disk, native: &Native) -> CoreResult<()> {
    let (size, unit) = (setup.size(), setup.unit());
    let units = size.div_ceil(unit);
    let span = |at: u64, len: u64| GuestOffset::new(at).span(len.min(size - at));
    // Few units, so that they are promoted and written again.
    let some_unit = |random: &mut Random| random.below(units) * unit;
    let bytes = |random: &mut Random, len: u64| {
        let mut bytes = vec![0; usize::try_from(len).unwrap()];
        random.fill(&mut bytes);
        Buffer::copy_of(&bytes)
    };
    let fua = WriteFlags { fua: random.one_in(12) };
    if setup.demotes && !random.one_in(4) {
        let span = span(random.below(3.min(units)) * unit, 4096);
        return match random.below(4) {
            0 => disk.write(span.start(), bytes(random, span.len()), fua).await,
            1 => or_open_without(native.demote(&[span]).await.map(drop)),
            _ => promote(random, native, span).await,
        };
    }
    match random.below(32) {
        0..=7 => {
            let within = 4096 * random.below(unit / 4096);
            let at = some_unit(random) + if random.one_in(2) { within } else { 0 };
            let span = span(at.min(size - 512), 4096);
            disk.write(span.start(), bytes(random, span.len()), fua).await
        }
        8..=9 => {
            let at = random.below(size / 512) * 512;
            let span = span(at, 512 * (1 + random.below(20)));
            disk.write(span.start(), bytes(random, span.len()), fua).await
        }
        10..=11 => {
            let span = span(some_unit(random), unit);
            disk.write(span.start(), bytes(random, span.len()), fua).await
        }
        12 => {
            let span = span(random.below(size / 4096) * 4096, 4096 * (1 + random.below(40)));
            disk.write_zeroes(span, ZeroFlags { may_unmap: random.one_in(2), ..ZeroFlags::default() }).await
        }
        13 => disk.discard(span(some_unit(random), unit * (1 + random.below(2))), fua).await,
        14..=19 => disk.flush().await,
        20..=21 => {
            let span = span(random.below(size / 512) * 512, 1 + random.below(2 * unit));
            let len = usize::try_from(span.len()).unwrap();
            disk.read(span.start(), Buffer::for_overwrite(len)).await.map(drop)
        }
        22 => {
            let span = span(some_unit(random), 1 + random.below(2 * unit));
            or_open_without(native.demote(&[span]).await.map(drop))
        }
        _ => {
            let range = span(some_unit(random), 1 + random.below(3 * unit));
            promote(random, native, range).await
        }
    }
}

async fn promote(random: &mut Random, native: &Native, range: GuestSpan) -> CoreResult<()> {
    let reason = *random.pick(&Reason::ALL);
    let promotion = Promotion { ranges: vec![range], reason, copies_base: random.one_in(2) };
    or_open_without(native.promote(promotion).await.map(drop))
}

/// Where the image is open without its medium, there is nothing to do.
fn or_open_without(done: CoreResult<()>) -> CoreResult<()> {
    match done {
        Err(error) if error.kind() == vellum_core::ErrorKind::Unsupported => Ok(()),
        done => done,
    }
}

/// Runs a program from these images, on which the guest finds `initial`.
fn run(setup: &Setup, images: &Images, initial: &Content, seed: u64) -> (Run, Result<(), String>) {
    let mut random = Random::from_seed(seed);
    let several = setup.guests > 1;
    let world = if several { World::shuffled(seed) } else { World::new(seed) };
    let delay = match several {
        true => {
            let usual = Duration::from_micros(20)..=Duration::from_micros(300);
            Delay::between(usual).with_flush(Duration::from_micros(400))
        }
        false => Delay::none(),
    };
    let plan = |random: &mut Random, may_read: bool| {
        let plan = FaultPlan::none();
        if setup.faults && random.one_in(2) {
            match random.below(if may_read { 3 } else { 2 }) {
                0 => plan.add(Fault::nth(Operation::Flush, 1 + random.below(14))),
                1 => plan.add(Fault {
                    effect: Effect::Some,
                    ..Fault::nth(Operation::Write, 1 + random.below(40))
                }),
                _ => plan.add(Fault::nth(Operation::Read, 1 + random.below(30))),
            }
        }
        plan
    };
    let drive = |content: &Shown, random: &mut Random, may_read: bool| {
        let faults = plan(random, may_read);
        let options = DriveOptions { delay: delay.clone(), faults, ..DriveOptions::default() };
        Drive::from_content(&world, content.content.clone(), options)
    };
    let image = drive(&images.image, &mut random, false);
    let fast = drive(&images.fast, &mut random, true);
    let oracle = Oracle::new(&world, initial.clone());
    let closes = random.below(4) > 0;
    let outcome = world.run(async {
        let shared = || -> (SharedStorage, SharedStorage) { (image.clone(), fast.clone()) };
        let with = |storage: SharedStorage, is_there: bool| is_there.then_some(storage);
        let is_there = !random.one_in(6);
        let mut native = open(setup, shared().0, with(shared().1, is_there), seed).await?;
        let mut first_error = Ok(());
        if several {
            let mut tasks = Vec::new();
            for guest in 0..setup.guests {
                let watched = oracle.watch(native.clone());
                let (native, setup) = (native.clone(), setup.clone());
                let mut random = Random::from_seed(seed ^ (guest as u64 + 1) << 40);
                tasks.push(world.spawn(async move {
                    let mut first_error = Ok(());
                    for _ in 0..setup.steps {
                        first_error = first_error.and(step(&mut random, &setup, &*watched, &native).await);
                    }
                    first_error
                }));
            }
            for task in tasks {
                first_error = first_error.and(task.await);
            }
        } else {
            for number in 0..setup.steps {
                if random.one_in(16) {
                    let closed = oracle.watch(native.clone()).close().await;
                    drop(native);
                    if closed.is_err() {
                        return first_error.and(closed);
                    }
                    let is_there = !random.one_in(4);
                    let seed = seed ^ (number as u64) << 32;
                    native = open(setup, shared().0, with(shared().1, is_there), seed).await?;
                    continue;
                }
                let watched = oracle.watch(native.clone());
                first_error = first_error.and(step(&mut random, setup, &*watched, &native).await);
            }
        }
        if closes {
            first_error = first_error.and(oracle.watch(native.clone()).close().await);
        }
        first_error
    });
    let wrong = match outcome {
        Err(error) if !setup.faults => Err(format!("nothing failed, and yet: {}", error.chain())),
        _ => Ok(()),
    };
    (Run { image: image.log(), fast: fast.log(), oracle, world }, wrong)
}

/// Some of what a crash can leave.
fn images_of(point: &CrashPoint, random: &mut Random, most: usize) -> Vec<Shown> {
    let mut images: Vec<Shown> = Vec::new();
    let count = point.pending().len();
    if point.kind() == CrashKind::FailedFlush {
        for _ in 0..most {
            let fates = point.random_fates(random);
            let content = point.image(|index| fates[index].clone());
            let shown = point.shown(|index| fates[index].clone());
            let shown = (shown != content).then_some(shown);
            images.push(Shown { content, shown });
        }
        return images;
    }
    if count <= 3 {
        images.extend(point.subsets().expect("few").map(|(_, content)| content.into()));
    } else {
        images.push(point.image_of(0).into());
        images.push(point.image_of(u64::MAX).into());
        for _ in 0..4 {
            let one = random.index(count.min(64));
            images.push(point.image_of(1 << one).into());
            images.push(point.image_of(!(1 << one)).into());
        }
        for _ in 0..4 {
            images.push(point.random_image(random).into());
        }
    }
    if count > 0 {
        let torn = random.index(count);
        let kept = *random.pick(&[0, u64::MAX, random.clone().any()]);
        images.extend(point.tears(torn, kept).take(512).step_by(41).map(Shown::from));
    }
    let mut seen = HashSet::new();
    images.retain(|image| seen.insert(image.digest()));
    while images.len() > most {
        images.swap_remove(random.index(images.len()));
    }
    images
}

async fn whole(disk: &dyn Disk) -> Result<Content, String> {
    let len = usize::try_from(disk.geometry().size).unwrap();
    let read = disk.read(GuestOffset::ZERO, Buffer::for_overwrite(len)).await;
    read.map(|bytes| Content::of(&bytes.to_vec()))
        .map_err(|error| format!("cannot be read: {}", error.chain()))
}

fn differs(what: &str, a: &Content, b: &Content) -> Result<(), String> {
    if a == b {
        return Ok(());
    }
    let bytes = |content: &Content| {
        let mut bytes = vec![0; usize::try_from(content.len()).unwrap()];
        content.read(ImageOffset::ZERO, &mut bytes);
        bytes
    };
    let (x, y) = (bytes(a), bytes(b));
    let sectors: Vec<usize> =
        x.chunks(512).zip(y.chunks(512)).enumerate().filter(|(_, (x, y))| x != y).map(|(at, _)| at).collect();
    Err(format!("{what}: {} sectors differ, from {:?} on", sectors.len(), sectors.first()))
}

/// Opens what a crash left, judges what is read, and returns it.
fn judge(
    setup: &Setup,
    images: &Images,
    expectation: &Expectation,
    counts: &mut Counts,
) -> Result<Content, String> {
    counts.judged += 1;
    let is_stubborn = images.digest().is_multiple_of(2);
    let (image, fast) = (images.image.medium(is_stubborn), images.fast.medium(is_stubborn));
    let chain = |error: vellum_core::Error| error.chain();
    block_on(async {
        let both: (SharedStorage, SharedStorage) = (image.clone(), fast.clone());
        let native = open(setup, both.0, Some(both.1), 3)
            .await
            .map_err(|error| format!("cannot be opened: {}", error.chain()))?;
        let found = whole(&*native).await?;
        expectation.check(&found).map_err(|violation| violation.to_string())?;
        counts.fast_units += native.facts().units;
        drop(native);
        image.lose_cache();
        // The recovery is done, so nothing but a copy can be read differently.
        let alone: SharedStorage = Medium::new(image.content());
        let native = open(setup, alone, None, 4).await.map_err(chain)?;
        differs("the image alone", &found, &whole(&*native).await?)?;
        Ok(found)
    })
}

/// Explores one program, and some that go on after a crash in it.
pub(crate) fn explore(setup: &Setup, seed: u64, seen: &mut HashSet<u64>) -> Result<Counts, String> {
    let images = begin(setup);
    let mut counts = Counts::default();
    explore_from(setup, &images, &setup.image.content(), seed, seen, &mut counts, 0)
        .map_err(|what| format!("seed {seed} of {}: {what}", setup.name))?;
    Ok(counts)
}

fn explore_from(
    setup: &Setup,
    images: &Images,
    initial: &Content,
    seed: u64,
    seen: &mut HashSet<u64>,
    counts: &mut Counts,
    depth: u32,
) -> Result<(), String> {
    let (run, wrong) = run(setup, images, initial, seed);
    wrong?;
    counts.programs += 1;
    let mut random = Random::from_seed(seed ^ 0xC4A5);
    let mut positions: Vec<Position> = run.image.crash_positions();
    positions.extend(run.fast.crash_positions());
    positions.extend(run.oracle.answers());
    positions.retain(|position| *position <= run.world.position());
    positions.sort_unstable();
    positions.dedup();
    let most = if depth == 0 { setup.positions } else { 12 };
    while positions.len() > most {
        positions.remove(random.index(positions.len()));
    }
    for position in positions {
        let expectation: Expectation = run.oracle.expect_at(position);
        let expected = expectation.digest();
        let kinds = [CrashKind::PowerCut, CrashKind::ProcessKill];
        for (of_image, of_fast) in kinds.into_iter().flat_map(|kind| kinds.map(|other| (kind, other))) {
            counts.crashes += 1;
            let all = images_of(&run.image.crash(of_image, position), &mut random, 10);
            let fasts = images_of(&run.fast.crash(of_fast, position), &mut random, 6);
            for image in all {
                for number in 0..2 {
                    let fast = if number == 0 { fasts[0].clone() } else { random.pick(&fasts).clone() };
                    let left = Images { image: image.clone(), fast };
                    let digest = left.digest();
                    if !seen.insert(digest ^ expected.rotate_left(31)) {
                        continue;
                    }
                    counts.states += u64::from(seen.insert(digest));
                    let at = |what: String| {
                        format!(
                            "depth {depth}, crash at {position:?} ({of_image:?} of the image, {of_fast:?} of the fast medium): {what}"
                        )
                    };
                    let found = judge(setup, &left, &expectation, counts).map_err(|what| {
                        let dump = std::env::var_os("VELLUM_EXPLORE_DUMP").is_some();
                        at(if dump { format!("{what}\n{}", run.events_before(position)) } else { what })
                    })?;
                    let goes_on = depth < 2
                        && left.image.shown.is_none()
                        && left.fast.shown.is_none()
                        && random.one_in(setup.nested_one_in);
                    if goes_on {
                        counts.nested += 1;
                        let shorter = Setup { steps: setup.steps / 2, ..setup.clone() };
                        explore_from(&shorter, &left, &found, random.any(), seen, counts, depth + 1)
                            .map_err(at)?;
                    }
                }
            }
        }
    }
    Ok(())
}
