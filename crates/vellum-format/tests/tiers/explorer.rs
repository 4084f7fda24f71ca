//! Crashes of an image and of its fast medium, together and apart.
//!
//! ```text
//!   program of guests and promotions ──► logs of both media, a record of the answers
//!                           │ at a position: power cut or kill of the one × power cut or kill of the other
//!                           ▼
//!                         images × media, each pair once; now and then a medium of another position, or of a program before
//!                           │ open both ► read: the guest finds what it may
//!                           ├─► open the image alone ► it reads the same                  no copy is ever different
//!                           ├─► its snapshots, another disk of the medium ► the same with the medium and alone
//!                           ▼ now and then: a program goes on there, or from a snapshot, with crashes of its own
//! ```
//!
//! 1. Both drives are in one world, so a position means the same to both.
//! 2. What a recovery has read is durable, so the program that goes on is judged by exactly that.
//! 3. A case is its seed: everything is drawn from it.
//! 4. An image is right with a copy of its medium of any time, before or after: what the one says of the other does not count,
//!    or is still so. A copy has what the host showed at its time. A medium that confirms a flush and then loses what was
//!    flushed is no such copy.
//! 5. The other disk, where there is one, takes slots and gives them back. After a crash its image is as new as the first one, or
//!    the one that it began with.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use futures_lite::future::block_on;
use vellum_core::{
    Buffer, Disk, ErrorKind, GuestOffset, ImageOffset, Random, Result as CoreResult, SharedStorage,
};
use vellum_format::FormatKind;
use vellum_format::fast::{FastId, FastMedium, NewRow, Tiers, create as create_fast};
use vellum_format::native::{CreateOptions, Native, OpenOptions, create};
use vellum_sim::explore::Medium;
use vellum_sim::{
    Content, CrashKind, CrashPoint, Delay, Drive, DriveOptions, Effect, EventLog, Expectation, Fault,
    FaultPlan, Operation, Oracle, Position, Repeat, World,
};

use crate::common::native::NativeSetup;

#[path = "steps.rs"]
mod steps;

use steps::{step, step_of_other};

const UNIT: u64 = 64 << 10;
/// Where a medium of few slots has the first of them.
const SLOTS_AT: u64 = 576 << 10;
/// UUID of the image.
const UUID: [u8; 16] = [7; 16];
/// UUID of the other disk's image.
const OTHER_UUID: [u8; 16] = [8; 16];

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
    /// Snapshots are made and deleted, and the image is reverted to them.
    pub(crate) snapshots: bool,
    /// One state in this many has the medium of another time; none where zero.
    pub(crate) put_back_one_in: u64,
    /// Units are moved: their space in the image is free.
    pub(crate) moves: bool,
    /// Units that are moved are mostly written, zeroed and discarded as a whole, and some slots cannot be read.
    pub(crate) overwrites: bool,
    /// Another disk has copies on the medium, too.
    pub(crate) other: bool,
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
            snapshots: false,
            put_back_one_in: 0,
            moves: false,
            overwrites: false,
            other: false,
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

    pub(crate) fn with_snapshots(self) -> Self {
        Self { snapshots: true, ..self }
    }

    pub(crate) fn moving(self) -> Self {
        Self { moves: true, nested_one_in: 150, ..self }
    }

    pub(crate) fn overwriting(self) -> Self {
        Self { overwrites: true, ..self.moving() }
    }

    pub(crate) fn putting_back(self) -> Self {
        Self { put_back_one_in: 2, nested_one_in: 150, ..self }
    }

    pub(crate) fn beside_another(self) -> Self {
        Self { other: true, slots: 7, ..self.putting_back() }
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
    /// States with a medium of another time.
    pub(crate) put_back: u64,
    /// Snapshots that were read with the medium and without it.
    pub(crate) snapshots: u64,
    /// Programs that went on from a snapshot.
    pub(crate) reverted: u64,
    /// Units that only the fast medium had in these states.
    pub(crate) moved_units: u64,
    /// States in which a medium of another time was refused, because units are on the right one alone.
    pub(crate) refused: u64,
    /// States in which the image was refused without a medium.
    pub(crate) refused_alone: u64,
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.programs += other.programs;
        self.crashes += other.crashes;
        self.states += other.states;
        self.judged += other.judged;
        self.fast_units += other.fast_units;
        self.nested += other.nested;
        self.put_back += other.put_back;
        self.snapshots += other.snapshots;
        self.reverted += other.reverted;
        self.moved_units += other.moved_units;
        self.refused += other.refused;
        self.refused_alone += other.refused_alone;
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
    other: Content,
}

impl Images {
    fn digest(&self) -> u64 {
        let both =
            self.image.digest().wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(23) ^ self.fast.digest();
        both ^ self.other.digest().rotate_left(11)
    }
}

struct Run {
    world: World,
    image: EventLog,
    fast: EventLog,
    other: EventLog,
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
        let other = Medium::new(Content::default());
        if setup.other {
            let options = CreateOptions { uuid: Some(OTHER_UUID), ..other_setup(setup).create_options() };
            create(&*other, &options).await.unwrap();
            let row = NewRow { uuid: OTHER_UUID, budget: 1 << 40, name: "other".to_owned() };
            medium.attach(row).await.unwrap();
            let storage: SharedStorage = other.clone();
            FormatKind::Native.format().attach_fast(&storage, id, "fast").await.unwrap();
        }
        Images { image: image.content().into(), fast: fast.content().into(), other: other.content() }
    })
}

fn other_setup(setup: &Setup) -> NativeSetup {
    NativeSetup::table("other", 3 * setup.unit(), setup.unit())
}

async fn medium_of(fast: Option<SharedStorage>, seed: u64) -> CoreResult<Option<Arc<FastMedium>>> {
    match fast {
        Some(fast) => Ok(Some(FastMedium::open(fast, Random::from_seed(seed)).await?)),
        None => Ok(None),
    }
}

/// Opens the image with its fast medium, or without.
async fn open(
    setup: &Setup,
    image: SharedStorage,
    fast: Option<SharedStorage>,
    seed: u64,
) -> CoreResult<Arc<Native>> {
    open_with(&setup.image, image, medium_of(fast, seed).await?, None).await
}

async fn open_with(
    setup: &NativeSetup,
    image: SharedStorage,
    fast: Option<Arc<FastMedium>>,
    snapshot: Option<String>,
) -> CoreResult<Arc<Native>> {
    let options = OpenOptions { journal_key: Some(1), fast, snapshot, ..OpenOptions::default() };
    Native::open(image, setup.below(), options).await
}

/// The disk, and the other one where there is one, with one medium or without.
async fn open_both(
    setup: &Setup,
    image: SharedStorage,
    other: SharedStorage,
    fast: Option<SharedStorage>,
    seed: u64,
) -> CoreResult<(Arc<Native>, Option<Arc<Native>>)> {
    let medium = medium_of(fast, seed).await?;
    let native = open_with(&setup.image, image, medium.clone(), None).await?;
    let other = match setup.other {
        true => Some(open_with(&other_setup(setup), other, medium, None).await?),
        false => None,
    };
    Ok((native, other))
}

/// As above, with the medium also where it was not to be there, if the image is not opened without it.
async fn open_as_it_can_be(
    setup: &Setup,
    (image, other): (SharedStorage, SharedStorage),
    (fast, is_there): (SharedStorage, bool),
    seed: u64,
) -> CoreResult<(Arc<Native>, Option<Arc<Native>>)> {
    let without = is_there.then(|| fast.clone());
    match open_both(setup, image.clone(), other.clone(), without, seed).await {
        Err(error) if setup.moves && !is_there && error.kind() == ErrorKind::Refused => {
            open_both(setup, image, other, Some(fast), seed).await
        }
        opened => opened,
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
        // What a slot has is lost for this program. What a crash leaves is judged with a medium that gives it again.
        if setup.overwrites && may_read && random.one_in(2) {
            plan.add(Fault {
                within: Some((ImageOffset::new(SLOTS_AT) + random.below(setup.slots) * UNIT).span(UNIT)),
                repeat: Repeat::ForEver,
                ..Fault::nth(Operation::Read, random.below(4))
            });
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
    let other = Drive::from_content(&world, images.other.clone(), DriveOptions::default());
    let oracle = Oracle::new(&world, initial.clone());
    let closes = random.below(4) > 0;
    let outcome = world.run(async {
        let shared = || -> (SharedStorage, SharedStorage) { (image.clone(), fast.clone()) };
        let is_there = !random.one_in(6);
        let (mut native, mut beside) =
            open_as_it_can_be(setup, (shared().0, other.clone()), (shared().1, is_there), seed).await?;
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
            if let Some(other) = beside.clone() {
                let setup = setup.clone();
                let mut random = Random::from_seed(seed ^ 0x0751);
                tasks.push(world.spawn(async move {
                    let mut first_error = Ok(());
                    for _ in 0..setup.steps {
                        first_error = first_error.and(step_of_other(&mut random, &setup, &other).await);
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
                    let closed_beside = close_beside(beside).await;
                    if closed.is_err() || closed_beside.is_err() {
                        return first_error.and(closed).and(closed_beside);
                    }
                    let is_there = !random.one_in(4);
                    let seed = seed ^ (number as u64) << 32;
                    let (image, fast) = shared();
                    let images = (image, other.clone() as SharedStorage);
                    (native, beside) = open_as_it_can_be(setup, images, (fast, is_there), seed).await?;
                    continue;
                }
                if let (Some(other), true) = (&beside, random.one_in(4)) {
                    first_error = first_error.and(step_of_other(&mut random, setup, other).await);
                }
                let watched = oracle.watch(native.clone());
                first_error = first_error.and(step(&mut random, setup, &*watched, &native).await);
            }
        }
        if closes {
            first_error = first_error.and(oracle.watch(native.clone()).close().await);
            first_error = first_error.and(close_beside(beside).await);
        }
        first_error
    });
    let wrong = match outcome {
        Err(error) if !setup.faults && !setup.overwrites => {
            Err(format!("nothing failed, and yet: {}", error.chain()))
        }
        _ => Ok(()),
    };
    (Run { image: image.log(), fast: fast.log(), other: other.log(), oracle, world }, wrong)
}

async fn close_beside(other: Option<Arc<Native>>) -> CoreResult<()> {
    match other {
        Some(other) => other.close().await,
        None => Ok(()),
    }
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
        for _ in 0..2 {
            let one = random.index(count.min(64));
            images.push(point.image_of(1 << one).into());
            images.push(point.image_of(!(1 << one)).into());
        }
        for _ in 0..4 {
            images.push(point.random_image(random).into());
        }
    }
    if count > 0 {
        // Other tears are among the random ones.
        let torn = random.index(count);
        let kept = *random.pick(&[0, u64::MAX, random.clone().any()]);
        images.extend(point.tears(torn, kept).take(2).map(Shown::from));
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

/// What was found.
struct Found {
    disk: Content,
    /// The image after its recovery.
    image: Content,
    snapshots: Vec<(String, Content)>,
}

/// Opens what a crash left, judges what is read, and returns it.
fn judge(
    setup: &Setup,
    images: &Images,
    expectation: &Expectation,
    is_put_back: bool,
    counts: &mut Counts,
) -> Result<Option<Found>, String> {
    counts.judged += 1;
    let digest = images.digest();
    let is_stubborn = digest.is_multiple_of(2);
    let (image, fast) = (images.image.medium(is_stubborn), images.fast.medium(is_stubborn));
    let chain = |error: vellum_core::Error| error.chain();
    block_on(async {
        let medium = medium_of(Some(fast.clone()), 3).await.map_err(chain)?;
        let native = match open_with(&setup.image, image.clone(), medium.clone(), None).await {
            // Never read as anything else. With a medium of its own time it is always opened.
            Err(error)
                if setup.moves
                    && is_put_back
                    && matches!(error.kind(), ErrorKind::Changed | ErrorKind::Refused) =>
            {
                counts.refused += 1;
                return Ok(None);
            }
            opened => opened.map_err(|error| format!("cannot be opened: {}", error.chain()))?,
        };
        let found = whole(&*native).await?;
        expectation.check(&found).map_err(|violation| violation.to_string())?;
        let fast_units = native.facts().units;
        counts.fast_units += fast_units;
        let moved_units = native.facts().moved;
        counts.moved_units += moved_units;
        // Each is read in some states: their reading is not what is new here. It takes an image that was closed.
        let names: Vec<String> = match setup.snapshots && digest % 8 == 1 {
            true => native.snapshots().map_err(chain)?.into_iter().map(|snapshot| snapshot.name).collect(),
            false => Vec::new(),
        };
        if !names.is_empty() {
            native.close().await.map_err(chain)?;
        }
        drop(native);
        image.lose_cache();
        // The recovery is done, so nothing but a copy can be read differently. Where there is none, the image was read.
        let alone: SharedStorage = Medium::new(image.content());
        let head = FormatKind::Native.format().read(&*alone).await.map_err(chain)?;
        if head.fast().is_some_and(|named| named.is_needed) {
            counts.refused_alone += 1;
            match open(setup, alone.clone(), None, 4).await {
                Err(error) if error.kind() == ErrorKind::Refused => {}
                Err(error) => return Err(format!("alone: {}", error.chain())),
                Ok(_) => return Err("opened alone, although units are on the medium alone".to_owned()),
            }
        } else if moved_units > 0 {
            return Err("units are moved, and the image does not say so".to_owned());
        } else if fast_units > 0 || !names.is_empty() {
            let native = open(setup, alone.clone(), None, 4).await.map_err(chain)?;
            differs("the image alone", &found, &whole(&*native).await?)?;
            if !names.is_empty() {
                native.close().await.map_err(chain)?;
            }
        }
        let mut snapshots = Vec::new();
        for name in names {
            counts.snapshots += 1;
            let read = async |storage: SharedStorage, medium: Option<Arc<FastMedium>>| {
                let opened =
                    open_with(&setup.image, storage, medium, Some(name.clone())).await.map_err(chain)?;
                whole(&*opened).await
            };
            let content = read(image.clone(), medium.clone()).await?;
            differs(&format!("snapshot {name} alone"), &content, &read(alone.clone(), None).await?)?;
            snapshots.push((name, content));
        }
        if setup.other {
            let of_other = other_setup(setup);
            let other: SharedStorage = Medium::new(images.other.clone());
            let opened = open_with(&of_other, other.clone(), medium, None).await.map_err(chain)?;
            let content = whole(&*opened).await?;
            drop(opened);
            let opened = open_with(&of_other, other, None, None).await.map_err(chain)?;
            differs("the other disk alone", &content, &whole(&*opened).await?)?;
        }
        Ok(Some(Found { disk: found, image: image.content(), snapshots }))
    })
}

/// The image as it is after a revert to this snapshot, which was made while nothing had it open.
fn reverted(image: Content, name: &str) -> Result<Content, String> {
    let medium = Medium::new(image);
    let storage: SharedStorage = medium.clone();
    let done = block_on(FormatKind::Native.format().revert(&storage, name));
    done.map_err(|error| format!("cannot be reverted to {name}: {}", error.chain()))?;
    Ok(medium.content())
}

/// Explores one program, and some that go on after a crash in it.
pub(crate) fn explore(setup: &Setup, seed: u64, seen: &mut HashSet<u64>) -> Result<Counts, String> {
    let images = begin(setup);
    let mut counts = Counts::default();
    explore_from(setup, &images, &setup.image.content(), seed, seen, &mut counts, &[])
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
    media_before: &[Shown],
) -> Result<(), String> {
    let depth = media_before.len();
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
    for position in positions.iter().copied() {
        let expectation: Expectation = run.oracle.expect_at(position);
        let expected = expectation.digest();
        let kinds = [CrashKind::PowerCut, CrashKind::ProcessKill];
        for (of_image, of_fast) in kinds.into_iter().flat_map(|kind| kinds.map(|other| (kind, other))) {
            counts.crashes += 1;
            let all = images_of(&run.image.crash(of_image, position), &mut random, 10);
            let fasts = images_of(&run.fast.crash(of_fast, position), &mut random, 6);
            let other = match setup.other && !random.one_in(4) {
                true => run.other.crash(CrashKind::ProcessKill, position).image_of(u64::MAX),
                false => images.other.clone(),
            };
            for image in all {
                for number in 0..2 {
                    // What went to the image and was lost may have led to what the medium got later, so of such an image
                    // only what was there before is another time.
                    let upto = match of_image == CrashKind::ProcessKill && image.shown.is_none() {
                        true => run.world.position(),
                        false => position,
                    };
                    let is_put_back =
                        setup.put_back_one_in > 0 && number > 0 && random.one_in(setup.put_back_one_in);
                    let (fast, whence) = match number {
                        _ if is_put_back => {
                            let before = positions.iter().copied().filter(|other| *other <= upto).collect();
                            another_time(&run, images, media_before, before, &mut random)
                        }
                        0 => (fasts[0].clone(), format!("{of_fast:?}")),
                        _ => (random.pick(&fasts).clone(), format!("{of_fast:?}")),
                    };
                    let left = Images { image: image.clone(), fast, other: other.clone() };
                    let digest = left.digest();
                    if !seen.insert(digest ^ expected.rotate_left(31)) {
                        continue;
                    }
                    let is_new = seen.insert(digest);
                    counts.states += u64::from(is_new);
                    counts.put_back += u64::from(is_new && is_put_back);
                    let at = |what: String| {
                        format!(
                            "depth {depth}, crash at {position:?} ({of_image:?} of the image, {whence} of the fast medium): {what}"
                        )
                    };
                    let found = judge(setup, &left, &expectation, is_put_back, counts).map_err(|what| {
                        let dump = std::env::var_os("VELLUM_EXPLORE_DUMP").is_some();
                        at(if dump { format!("{what}\n{}", run.events_before(position)) } else { what })
                    })?;
                    let Some(found) = found else { continue };
                    let goes_on = depth < 2
                        && left.image.shown.is_none()
                        && left.fast.shown.is_none()
                        && random.one_in(setup.nested_one_in);
                    if goes_on {
                        counts.nested += 1;
                        let shorter = Setup { steps: setup.steps / 2, ..setup.clone() };
                        let mut before = media_before.to_vec();
                        before.push(random.pick(&fasts).clone());
                        let (mut left, mut initial) = (left, found.disk);
                        if let (Some((name, content)), true) = (found.snapshots.first(), random.one_in(2)) {
                            counts.reverted += 1;
                            left.image = reverted(found.image, name).map_err(at)?.into();
                            initial = content.clone();
                        }
                        explore_from(&shorter, &left, &initial, random.any(), seen, counts, &before)
                            .map_err(at)?;
                    }
                }
            }
        }
    }
    Ok(())
}

/// A copy of the medium that was made at the beginning, at some of these positions, or in a program before this one: what
/// the host showed then.
fn another_time(
    run: &Run,
    images: &Images,
    media_before: &[Shown],
    positions: Vec<Position>,
    random: &mut Random,
) -> (Shown, String) {
    match random.below(6) {
        0 => (images.fast.clone(), "the beginning".to_owned()),
        1 if !media_before.is_empty() => {
            let program = random.index(media_before.len());
            (media_before[program].clone(), format!("the end of program {program}"))
        }
        _ => {
            let position = *random.pick(&positions);
            let point = run.fast.crash(CrashKind::ProcessKill, position);
            let left = images_of(&point, random, 4);
            let Shown { content, shown } = random.pick(&left).clone();
            (shown.unwrap_or(content).into(), format!("a copy at {position:?}"))
        }
    }
}
