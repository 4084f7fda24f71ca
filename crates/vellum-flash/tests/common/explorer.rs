//! Crashes of flash and of the homes, together and apart.
//!
//! ```text
//!   program of guests ──► logs of flash and homes, records of the answers
//!                           │ at a position: power cut or kill of flash × power cut or kill of the homes
//!                           ▼
//!                         images of flash × images of the homes, each pair once
//!                           │ open the cache ► read: each guest finds what it may
//!                           ▼ now and then: drain ► home alone reads the same ► the reopened cache reads the same
//!                         now and then: a program goes on there, with crashes of its own: the crash after a recovery
//! ```
//!
//! 1. All drives are in one world, so a position means the same to each of them.
//! 2. What a recovery has read is durable, so the program that goes on is judged by exactly that.
//! 3. A case is its seed: everything is drawn from it.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use futures_lite::future::block_on;
use vellum_core::{
    Buffer, Disk, GuestOffset, HostTally, ImageOffset, Random, Result as CoreResult, SharedDisk,
    SharedStorage, WriteFlags, ZeroFlags,
};
use vellum_format::Raw;
use vellum_sim::explore::Medium;
use vellum_sim::{
    Content, CrashKind, CrashPoint, Delay, Drive, DriveOptions, Effect, EventLog, Expectation, Fault,
    FaultPlan, Operation, Oracle, Position, World,
};

use super::{cache_with, over_with};
use crate::flash::{FlashCache, FlashDisk, FlashPolicy};

/// What is explored.
#[derive(Debug, Clone)]
pub struct Setup {
    pub slots: u64,
    /// Blocks of a disk, and sectors behind the last whole one.
    pub blocks: u64,
    pub sectors: u64,
    pub disks: usize,
    /// The disks from this one on are written through, the others back.
    pub through_from: usize,
    /// How many on each disk.
    pub guests: usize,
    pub steps: usize,
    /// Flushes and writes fail.
    pub faults: bool,
    /// At most this many positions of a program.
    pub positions: usize,
    /// One state in this many is gone on from; none where zero.
    pub nested_one_in: u64,
    /// One in this many is drained.
    pub drained_one_in: u64,
    /// Bytes of memory for blocks; none for the usual.
    pub memory: Option<u64>,
    /// Every other opening has an eighth of that.
    pub shrinks: bool,
    /// Free slots are discarded.
    pub trims: bool,
}

impl Setup {
    pub fn usual(slots: u64) -> Self {
        Self {
            slots,
            blocks: 20,
            sectors: 3,
            disks: 1,
            through_from: usize::MAX,
            guests: 1,
            steps: 40,
            faults: false,
            positions: 120,
            nested_one_in: 400,
            drained_one_in: 3,
            memory: None,
            shrinks: false,
            trims: false,
        }
    }

    fn policy(&self, disk: usize) -> FlashPolicy {
        if disk >= self.through_from { FlashPolicy::WriteThrough } else { FlashPolicy::WriteBack }
    }

    fn size(&self) -> u64 {
        self.blocks * 4096 + self.sectors * 512
    }

    /// Opens the cache, which is made when there is none.
    async fn cache(&self, storage: &SharedStorage, seed: u64) -> CoreResult<Arc<FlashCache>> {
        let is_small = self.shrinks && seed % 2 == 1;
        let memory = self.memory.map(|memory| if is_small { memory / 8 } else { memory });
        cache_with(storage, self.slots, seed, memory, self.trims).await
    }
}

/// What was looked at.
#[derive(Debug, Clone, Copy, Default)]
pub struct Counts {
    pub programs: u64,
    pub crashes: u64,
    pub states: u64,
    pub judged: u64,
    pub drained: u64,
    pub nested: u64,
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.programs += other.programs;
        self.crashes += other.crashes;
        self.states += other.states;
        self.judged += other.judged;
        self.drained += other.drained;
        self.nested += other.nested;
    }
}

/// What all media hold.
#[derive(Clone)]
struct Images {
    flash: Shown,
    homes: Vec<Shown>,
}

/// A content, and what a host's cache shows in its place after a failed flush.
#[derive(Clone)]
struct Shown {
    content: Content,
    shown: Option<Content>,
}

impl Shown {
    fn digest(&self) -> u64 {
        let shown = self.shown.as_ref().map_or(0, Content::digest);
        self.content.digest() ^ shown.rotate_left(17)
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

impl Images {
    fn digest(&self) -> u64 {
        self.homes.iter().fold(self.flash.digest(), |digest, home| {
            digest.wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(23) ^ home.digest()
        })
    }
}

struct Run {
    world: World,
    flash: EventLog,
    homes: Vec<EventLog>,
    oracles: Vec<Oracle>,
}

impl Run {
    /// What happened to all media before a position, for a person.
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
        let mut all = of("flash", &self.flash);
        for (number, home) in self.homes.iter().enumerate() {
            all.extend(of(&format!("home {number}"), home));
        }
        all.sort();
        all.into_iter().map(|(_, line)| line + "\n").collect()
    }
}

fn pattern(seed: u64, len: u64) -> Content {
    let mut random = Random::from_seed(seed);
    let mut bytes = vec![0; usize::try_from(len).unwrap()];
    random.fill(&mut bytes);
    Content::of(&bytes)
}

fn begin(setup: &Setup) -> Images {
    let flash = Medium::new(Content::default());
    let storage: SharedStorage = flash.clone();
    block_on(setup.cache(&storage, 1)).expect("a cache is made");
    let homes = (0..setup.disks).map(|disk| pattern(100 + disk as u64, setup.size()).into()).collect();
    Images { flash: flash.content().into(), homes }
}

fn home_on(storage: SharedStorage) -> SharedDisk {
    Raw::open(storage, false, &HostTally::default())
}

async fn open(
    setup: &Setup,
    cache: &Arc<FlashCache>,
    number: usize,
    home: SharedDisk,
) -> CoreResult<Arc<FlashDisk>> {
    over_with(cache, u8::try_from(number + 1).unwrap(), home, setup.policy(number)).await
}

/// One step of a guest.
async fn step(
    random: &mut Random,
    disk: &dyn Disk,
    raw: &FlashDisk,
    cache: &FlashCache,
    now: Duration,
) -> CoreResult<()> {
    let size = disk.geometry().size;
    let blocks = size.div_ceil(4096);
    let span = |block: u64, len: u64| {
        let at = block * 4096;
        GuestOffset::new(at).span(len.min(size - at))
    };
    let bytes = |random: &mut Random, len: u64| {
        let mut bytes = vec![0; usize::try_from(len).unwrap()];
        random.fill(&mut bytes);
        Buffer::copy_of(&bytes)
    };
    let fua = WriteFlags { fua: random.one_in(10) };
    match random.below(40) {
        0..=11 => {
            // Few blocks, so that they are written again.
            let block = if random.one_in(2) { random.below(3.min(blocks)) } else { random.below(blocks) };
            let span = span(block, 4096);
            disk.write(span.start(), bytes(random, span.len()), fua).await
        }
        12..=14 => {
            let sector = random.below(size / 512);
            let len = (512 * (1 + random.below(10))).min(size - sector * 512);
            disk.write(GuestOffset::new(sector * 512), bytes(random, len), fua).await
        }
        15..=16 => {
            let span = span(random.below(blocks), 4096 * (1 + random.below(7)));
            disk.write(span.start(), bytes(random, span.len()), fua).await
        }
        17..=18 => {
            let at = random.below(size - 1);
            let len = (1 + random.below(6000)).min(size - at);
            disk.write(GuestOffset::new(at), bytes(random, len), fua).await
        }
        19..=20 => {
            let span = span(random.below(blocks), 4096 * (1 + random.below(5)));
            let flags = ZeroFlags { may_unmap: random.one_in(2), fua: fua.fua, fast_only: false };
            disk.write_zeroes(span, flags).await
        }
        21 => {
            let at = random.below(size - 1);
            let span = GuestOffset::new(at).span((1 + random.below(9000)).min(size - at));
            disk.write_zeroes(span, ZeroFlags::default()).await
        }
        22..=23 => disk.discard(span(random.below(blocks), 4096 * (1 + random.below(5))), fua).await,
        24..=33 => disk.flush().await,
        34 => raw.drain().await,
        35 => {
            let span = span(random.below(blocks), 4096 * (1 + random.below(4)));
            let len = usize::try_from(span.len()).unwrap();
            disk.read(span.start(), Buffer::for_overwrite(len)).await.map(drop)
        }
        _ => {
            for _ in 0..3 {
                cache.tend(now).await;
            }
            Ok(())
        }
    }
}

/// Runs a program from these images, on which the guests find `initial`.
fn run(setup: &Setup, images: &Images, initial: &[Content], seed: u64) -> (Run, Result<(), String>) {
    let mut random = Random::from_seed(seed);
    let several = setup.guests * setup.disks > 1;
    let world = if several { World::shuffled(seed) } else { World::new(seed) };
    let delay = match several {
        true => {
            let usual = Duration::from_micros(20)..=Duration::from_micros(300);
            Delay::between(usual).with_flush(Duration::from_micros(400))
        }
        false => Delay::none(),
    };
    let plan = |random: &mut Random| {
        let plan = FaultPlan::none();
        if setup.faults && random.one_in(2) {
            match random.one_in(2) {
                true => plan.add(Fault::nth(Operation::Flush, 1 + random.below(12))),
                false => plan.add(Fault {
                    effect: Effect::Some,
                    ..Fault::nth(Operation::Write, 1 + random.below(40))
                }),
            }
        }
        plan
    };
    let drive = |content: &Shown, random: &mut Random| {
        let options = DriveOptions { delay: delay.clone(), faults: plan(random), ..DriveOptions::default() };
        Drive::from_content(&world, content.content.clone(), options)
    };
    let flash = drive(&images.flash, &mut random);
    let homes: Vec<Arc<Drive>> = images.homes.iter().map(|home| drive(home, &mut random)).collect();
    let oracles: Vec<Oracle> = initial.iter().map(|initial| Oracle::new(&world, initial.clone())).collect();
    let how = random.below(4);
    let outcome = world.run(async {
        let storage: SharedStorage = flash.clone();
        let mut cache = setup.cache(&storage, seed).await?;
        let mut disks: Vec<Arc<FlashDisk>> = Vec::new();
        for (number, home) in homes.iter().enumerate() {
            disks.push(open(setup, &cache, number, home_on(home.clone())).await?);
        }
        let mut first_error = Ok(());
        if several {
            let mut tasks = Vec::new();
            for (number, disk) in disks.iter().enumerate() {
                for guest in 0..setup.guests {
                    let watched = oracles[number].watch(disk.clone());
                    let (raw, cache, steps) = (disk.clone(), cache.clone(), setup.steps);
                    let mut random = Random::from_seed(seed ^ ((number * 16 + guest) as u64 + 1) << 40);
                    tasks.push(world.spawn(async move {
                        let mut first_error = Ok(());
                        for number in 0..steps {
                            let now = Duration::from_secs(number as u64 * 9);
                            first_error =
                                first_error.and(step(&mut random, &*watched, &raw, &cache, now).await);
                        }
                        first_error
                    }));
                }
            }
            for task in tasks {
                first_error = first_error.and(task.await);
            }
        } else {
            let mut watched = oracles[0].watch(disks[0].clone());
            for number in 0..setup.steps {
                if random.one_in(25) {
                    disks[0].keep_at_close(random.one_in(2));
                    let closed = watched.close().await;
                    let closed = match closed {
                        Ok(()) => cache.close().await,
                        Err(error) => Err(error),
                    };
                    if closed.is_err() {
                        return first_error.and(closed);
                    }
                    let again = if setup.shrinks { random.any() } else { seed };
                    cache = setup.cache(&storage, again).await?;
                    disks[0] = open(setup, &cache, 0, home_on(homes[0].clone())).await?;
                    watched = oracles[0].watch(disks[0].clone());
                    continue;
                }
                let now = Duration::from_secs(number as u64 * 9);
                first_error = first_error.and(step(&mut random, &*watched, &disks[0], &cache, now).await);
            }
        }
        if how > 0 {
            for (number, disk) in disks.iter().enumerate() {
                disk.keep_at_close(how == 1);
                first_error = first_error.and(oracles[number].watch(disk.clone()).close().await);
            }
            first_error = first_error.and(cache.close().await);
        }
        first_error
    });
    let wrong = match outcome {
        Err(error) if !setup.faults => Err(format!("nothing failed, and yet: {}", error.chain())),
        _ => Ok(()),
    };
    let run =
        Run { flash: flash.log(), homes: homes.iter().map(|home| home.log()).collect(), oracles, world };
    (run, wrong)
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
        images.extend(point.tears(torn, kept).take(512).step_by(37).map(Shown::from));
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

fn differs(what: &str, disk: usize, a: &Content, b: &Content) -> Result<(), String> {
    if a == b {
        return Ok(());
    }
    let (mut x, mut y) =
        (vec![0; usize::try_from(a.len()).unwrap()], vec![0; usize::try_from(a.len()).unwrap()]);
    a.read(ImageOffset::ZERO, &mut x);
    b.read(ImageOffset::ZERO, &mut y);
    let sectors: Vec<usize> =
        (0..x.len() / 512).filter(|s| x[s * 512..][..512] != y[s * 512..][..512]).collect();
    Err(format!("{what}: disk {disk} differs in sectors {sectors:?}"))
}

/// Opens what a crash left, judges what is read, and returns it.
fn judge(
    setup: &Setup,
    images: &Images,
    expectations: &[&Expectation],
    drains: bool,
    counts: &mut Counts,
) -> Result<Vec<Content>, String> {
    counts.judged += 1;
    let is_stubborn = images.digest().is_multiple_of(2);
    let flash = images.flash.medium(is_stubborn);
    let homes: Vec<Arc<Medium>> = images.homes.iter().map(|home| home.medium(is_stubborn)).collect();
    let chain = |error: vellum_core::Error| error.chain();
    block_on(async {
        // After a failed flush, a program that opens the image must see to what it shows.
        for home in &homes {
            vellum_format::settle(&**home).await.map_err(chain)?;
        }
        let storage: SharedStorage = flash.clone();
        // Where memory shrinks, some have little of it. With much, all that flash names is read.
        let opening = if setup.shrinks && is_stubborn { 2 } else { 3 };
        let cache = setup
            .cache(&storage, opening)
            .await
            .map_err(|error| format!("the cache cannot be opened: {}", error.chain()))?;
        let mut disks = Vec::new();
        let mut found = Vec::new();
        for (number, home) in homes.iter().enumerate() {
            let disk = open(setup, &cache, number, home_on(home.clone())).await.map_err(chain)?;
            let content = whole(&*disk).await?;
            expectations[number]
                .check(&content)
                .map_err(|violation| format!("disk {number}: {violation}"))?;
            if disk.policy() == FlashPolicy::WriteThrough {
                differs("home alone, written through", number, &content, &homes[number].content())?;
            }
            found.push(content);
            disks.push(disk);
        }
        flash.lose_cache();
        for home in &homes {
            home.lose_cache();
        }
        if !drains {
            return Ok(found);
        }
        counts.drained += 1;
        for (number, disk) in disks.iter().enumerate() {
            differs("once the host's cache is lost", number, &found[number], &whole(&**disk).await?)?;
            disk.drain().await.map_err(chain)?;
            if disk.dirty_blocks() > 0 {
                return Err(format!("disk {number} has dirty blocks after a drain"));
            }
            differs("drained", number, &found[number], &whole(&**disk).await?)?;
            differs("home alone", number, &found[number], &homes[number].content())?;
        }
        // Another opening, whether or not what the drain said has become durable.
        if is_stubborn {
            cache.flush().await.map_err(chain)?;
        }
        drop(disks);
        let storage: SharedStorage = Medium::new(flash.content());
        let cache = setup.cache(&storage, 4).await.map_err(chain)?;
        for (number, home) in homes.iter().enumerate() {
            let disk = open(setup, &cache, number, home_on(home.clone())).await.map_err(chain)?;
            differs("drained and opened again", number, &found[number], &whole(&*disk).await?)?;
            disk.drain().await.map_err(chain)?;
            differs("home alone, drained again", number, &found[number], &homes[number].content())?;
        }
        Ok(found)
    })
}

/// Explores one program, and some that go on after a crash in it.
pub fn explore(setup: &Setup, seed: u64, seen: &mut HashSet<u64>) -> Result<Counts, String> {
    let images = begin(setup);
    let initial: Vec<Content> = images.homes.iter().map(|home| home.content.clone()).collect();
    let mut counts = Counts::default();
    explore_from(setup, &images, &initial, seed, seen, &mut counts, 0)
        .map_err(|what| format!("seed {seed} of {setup:?}: {what}"))?;
    Ok(counts)
}

fn explore_from(
    setup: &Setup,
    images: &Images,
    initial: &[Content],
    seed: u64,
    seen: &mut HashSet<u64>,
    counts: &mut Counts,
    depth: u32,
) -> Result<(), String> {
    let (run, wrong) = run(setup, images, initial, seed);
    wrong?;
    counts.programs += 1;
    let mut random = Random::from_seed(seed ^ 0xC4A5);
    let mut positions: Vec<Position> = run.flash.crash_positions();
    positions.extend(run.homes.iter().flat_map(EventLog::crash_positions));
    positions.extend(run.oracles.iter().flat_map(Oracle::answers));
    positions.retain(|position| *position <= run.world.position());
    positions.sort_unstable();
    positions.dedup();
    let most = if depth == 0 { setup.positions } else { 12 };
    while positions.len() > most {
        positions.remove(random.index(positions.len()));
    }
    for position in positions {
        let expectations: Vec<Expectation> =
            run.oracles.iter().map(|oracle| oracle.expect_at(position)).collect();
        let expected = expectations.iter().fold(0u64, |digest, one| digest.rotate_left(9) ^ one.digest());
        let expectations: Vec<&Expectation> = expectations.iter().collect();
        let kinds = [CrashKind::PowerCut, CrashKind::ProcessKill];
        for (of_flash, of_homes) in kinds.into_iter().flat_map(|kind| kinds.map(|other| (kind, other))) {
            counts.crashes += 1;
            let flashes = images_of(&run.flash.crash(of_flash, position), &mut random, 14);
            let homes: Vec<Vec<Shown>> = run
                .homes
                .iter()
                .map(|home| images_of(&home.crash(of_homes, position), &mut random, 6))
                .collect();
            for flash in flashes {
                for number in 0..3 {
                    let pick = |all: &Vec<Shown>, random: &mut Random| match number {
                        0 => all[0].clone(),
                        _ => random.pick(all).clone(),
                    };
                    let homes = homes.iter().map(|all| pick(all, &mut random)).collect();
                    let left = Images { flash: flash.clone(), homes };
                    let digest = left.digest();
                    if !seen.insert(digest ^ expected.rotate_left(31)) {
                        continue;
                    }
                    counts.states += u64::from(seen.insert(digest));
                    let drains = random.one_in(setup.drained_one_in);
                    let at = |what: String| {
                        format!(
                            "depth {depth}, crash at {position:?} ({of_flash:?} of flash, {of_homes:?} of homes): {what}"
                        )
                    };
                    let found = judge(setup, &left, &expectations, drains, counts).map_err(|what| {
                        let dump = std::env::var_os("VELLUM_EXPLORE_DUMP").is_some();
                        at(if dump { format!("{what}\n{}", run.events_before(position)) } else { what })
                    })?;
                    let goes_on = depth < 2
                        && setup.nested_one_in > 0
                        && left.flash.shown.is_none()
                        && left.homes.iter().all(|home| home.shown.is_none())
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
