//! The crash explorer: runs a program, puts a crash everywhere, and judges every image that it can leave.
//!
//! ```text
//!   program ──run──▶ log of host events + record of the answers to the guest
//!                         │ at every position, for every kind of crash
//!                         ▼
//!                    images (subsets, corners, tears, chance)
//!                         │ each image once, with all that may be expected of it in this program
//!                         ▼
//!            open ► recover ► read, compare ► close ► look from outside          ── now and then: the same on a medium
//!                     │ after a failed flush, all of it through a cache            that records, and a crash in there
//!                     ▼ that shows what the medium has not
//!            the cache is lost ► open ► read, compare, with what was read before too ► close ► look
//! ```
//!
//! 1. A *state* is an image that a crash left. It counts once for each subject, whatever programs lead to it.
//! 2. An image is judged again where the expectation may differ, in whatever program. Recovery does not know
//!    the expectation, so within one program an image is recovered and read once, and the result is compared
//!    with each expectation.
//! 3. Everything is determined by the [`Case`]: subject, program, seed, fault, kind, position and number of
//!    the image. A failing state is kept as that text, and can be written to a file.
//! 4. In a program of one queue only the last step and the closing are examined if the caller says so: the
//!    shorter programs have covered what comes before.
//!
//! Any format plugs in as a [`Subject`]. Left out: images of several files.

mod case;
mod medium;
mod offline;
mod program;
mod run;
mod states;
mod watch;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_lite::future::block_on;
use vellum_core::{
    Buffer, Disk, GuestOffset, GuestSpan, LocalFuture, Random, Result as CoreResult, SharedDisk,
    SharedStorage, lock,
};

pub use case::{Case, Failure, Plan};
pub use medium::Medium;
pub use offline::{Care, Looked, Offline, explore_offline};
pub use program::{Act, Program, Step};
pub use states::Depth;

use crate::change::Granule;
use crate::content::Content;
use crate::crash::{CrashKind, CrashPoint, Fate};
use crate::expectation::Expectation;
use crate::log::EventLog;
use crate::mix::{DigestMap, DigestSet, mix};
use crate::world::Position;
use run::Run;
use states::{Images, each_state};
use watch::Watch;

/// A kind of image that is explored.
pub trait Subject: Sync {
    /// One word or a few; part of a case.
    fn name(&self) -> String;

    /// The image at the beginning, durable and closed.
    fn image(&self) -> Content;

    /// What the guest sees of it then.
    fn guest(&self) -> Content;

    /// The places of a program: two near each other, one far off, then as many as there are.
    fn places(&self) -> Vec<GuestOffset>;

    /// Opens an image for writing, whatever state a crash has left it in.
    fn open(&self, image: SharedStorage) -> LocalFuture<'_, CoreResult<SharedDisk>>;

    /// Inspects a closed image from outside: returns a sentence about what is wrong.
    fn verify(&self, image: SharedStorage) -> LocalFuture<'_, Result<(), String>>;

    /// Whether the disk continues to read as it was read first, once a cache that showed what a failed flush
    /// had not written is gone. If the image does not record that it was not closed, it cannot.
    fn reads_the_medium(&self) -> bool {
        true
    }

    /// Is given some images that were recovered, verified and closed: for other programs to look at.
    fn sample(&self, _recovered: &Content) -> Result<(), String> {
        Ok(())
    }
}

/// How much is looked at.
#[derive(Debug, Clone)]
pub struct Thoroughness {
    /// The images of one crash.
    pub depth: Depth,
    /// One in this many states is recovered with crashes in between.
    pub nested_one_in: u64,
    /// One in this many recovered images is given to [`Subject::sample`].
    pub sample_one_in: u64,
    /// One in this many is compared as a whole, not only around what was written.
    pub whole_one_in: u64,
}

impl Default for Thoroughness {
    fn default() -> Self {
        Self { depth: Depth::FULL, nested_one_in: 100, sample_one_in: 450, whole_one_in: 50 }
    }
}

/// What was looked at.
#[derive(Debug, Clone, Default)]
pub struct Counts {
    /// Programs that were run.
    pub programs: u64,
    /// Positions at which a crash was put, each kind for itself.
    pub crashes: u64,
    /// Different images.
    pub states: u64,
    /// How often an image was recovered and judged.
    pub judged: u64,
    /// How often a recovery was crashed and the outcome recovered and judged.
    pub nested: u64,
    /// How many recovered images another program has checked.
    pub sampled: u64,
    /// How many of the states were recovered through a cache that showed something else, which was then lost.
    pub shown: u64,
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.programs += other.programs;
        self.crashes += other.crashes;
        self.states += other.states;
        self.judged += other.judged;
        self.nested += other.nested;
        self.sampled += other.sampled;
        self.shown += other.shown;
    }
}

/// Digests that all threads know.
#[derive(Default)]
struct Shared([Mutex<DigestSet>; 16]);

impl Shared {
    /// Tells whether it is new.
    fn insert(&self, digest: u64) -> bool {
        let shard = usize::try_from(digest >> 60).expect("four bits");
        lock(&self.0[shard]).insert(digest)
    }
}

/// Explores one subject. Threads may share it.
pub struct Explorer<'a> {
    subject: &'a dyn Subject,
    thoroughness: Thoroughness,
    image: Content,
    guest: Content,
    seen: Shared,
    /// Images with what was expected of them.
    judged: Shared,
    counts: Mutex<Counts>,
}

/// What an exploration came to.
#[derive(Debug)]
pub struct Report {
    /// The subject.
    pub subject: String,
    /// What was looked at.
    pub counts: Counts,
    /// The time in terms of one core: the processor time of the explorer's threads. Where the system does not
    /// report it, the elapsed time multiplied by the number of threads. The time of other programs that were
    /// given samples is not included.
    pub took: Duration,
    /// What was found; the first of each thread.
    pub failures: Vec<Failure>,
}

impl std::fmt::Display for Counts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { programs, crashes, states, judged, nested, sampled, shown } = self;
        write!(
            f,
            "{programs} programs, {crashes} crashes, {states} states ({shown} behind a cache), {judged} judged, {nested} \
             nested, {sampled} seen by others"
        )
    }
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (seconds, violations) = (self.took.as_secs_f64(), self.failures.len());
        #[allow(clippy::cast_precision_loss, reason = "a rate for people")]
        let rate = self.counts.states as f64 / seconds;
        write!(
            f,
            "{}: {}, {violations} violations; {seconds:.1} s of a core, {rate:.0} states per second",
            self.subject, self.counts
        )?;
        self.failures.iter().try_for_each(|failure| write!(f, "\n  {failure}"))
    }
}

impl<'a> Explorer<'a> {
    /// An explorer that has seen nothing.
    pub fn new(subject: &'a dyn Subject, thoroughness: Thoroughness) -> Self {
        let (image, guest) = (subject.image(), subject.guest());
        let (seen, judged) = Default::default();
        Self { subject, thoroughness, image, guest, seen, judged, counts: Mutex::default() }
    }

    /// Explores all plans on this many threads; each thread stops at the first failure it finds.
    pub fn explore_all(&self, plans: &[Plan], threads: usize) -> Report {
        let next = AtomicUsize::new(0);
        let failures = Mutex::new(Vec::new());
        let took = Mutex::new(Duration::ZERO);
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    let watch = Watch::started();
                    while let Some(plan) = plans.get(next.fetch_add(1, Ordering::Relaxed)) {
                        if let Err(failure) = self.explore(plan) {
                            lock(&failures).push(*failure);
                            next.store(plans.len(), Ordering::Relaxed);
                        }
                    }
                    *lock(&took) += watch.elapsed();
                });
            }
        });
        Report {
            subject: self.subject.name(),
            counts: self.counts(),
            took: took.into_inner().unwrap_or_else(PoisonError::into_inner),
            failures: failures.into_inner().unwrap_or_else(PoisonError::into_inner),
        }
    }

    /// What has been explored so far.
    pub fn counts(&self) -> Counts {
        lock(&self.counts).clone()
    }

    /// Runs one program and judges every image of every crash.
    pub fn explore(&self, plan: &Plan) -> Result<(), Box<Failure>> {
        let run = Run::of(self.subject, plan, self.image.clone(), self.guest.clone());
        let mut work = Work::new(self, plan, &run);
        let outcome = work.every_crash();
        *lock(&self.counts) += work.counts;
        outcome
    }

    /// Judges the one state that a case names, and returns its image.
    pub fn replay(&self, case: &Case) -> (Content, Result<(), String>) {
        let run = Run::of(self.subject, &case.plan, self.image.clone(), self.guest.clone());
        let point = run.log.crash(case.kind, case.position);
        let expectation = run.oracle.expect_at(case.position);
        let state = state_number(&point, &self.thoroughness.depth, case.state);
        let Some((at, nested)) = case.nested else {
            let medium = state.medium();
            let verdict = self.recover_and_judge(&medium, &[&expectation], true);
            return (state.content, verdict.map_err(|(_, what)| what));
        };
        let log = self.recovery_log(&run, case.kind, case.position, &state);
        let point = log.crash(CrashKind::PowerCut, at);
        let image = state_number(&point, &Depth::NESTED, nested).content;
        let verdict = self.judge(&image, &expectation, true);
        (image, verdict)
    }

    /// The host events of a case's program up to the crash, one per line: for a person that looks for the cause.
    pub fn events_before(&self, case: &Case) -> String {
        let run = Run::of(self.subject, &case.plan, self.image.clone(), self.guest.clone());
        let before = run.log.events().iter().filter(|event| event.submitted() < case.position);
        before.map(|event| format!("{event}\n")).collect()
    }

    /// Puts `count` power cuts into one program, with random places and outcomes, and also has each recovered
    /// image examined by [`Subject::sample`].
    pub fn scenarios(&self, plan: &Plan, count: u64, seed: u64) -> Report {
        let watch = Watch::started();
        let run = Run::of(self.subject, plan, self.image.clone(), self.guest.clone());
        let mut random = Random::from_seed(seed);
        let (positions, depth) = (run.positions(), &self.thoroughness.depth);
        let mut counts = Counts { programs: 1, ..Counts::default() };
        let mut failures = Vec::new();
        for _ in 0..count {
            let position = *random.pick(&positions);
            let point = run.log.crash(CrashKind::PowerCut, position);
            let mut states = 0;
            let _ = each_state(&point, depth, |_, _| {
                states += 1;
                Ok::<_, ()>(())
            });
            let state = random.index(states);
            let image = state_number(&point, depth, state).content;
            counts.crashes += 1;
            counts.judged += 1;
            counts.states += u64::from(self.seen.insert(image.digest()));
            let medium = Medium::new(image);
            let verdict = self.recover_and_judge(&medium, &[&run.oracle.expect_at(position)], true);
            let verdict = verdict.map_err(|(_, what)| what).and_then(|()| {
                counts.sampled += 1;
                self.subject.sample(&medium.content())
            });
            if let Err(what) = verdict {
                let (subject, plan) = (self.subject.name(), plan.clone());
                let case = Case { subject, plan, kind: CrashKind::PowerCut, position, state, nested: None };
                failures.push(Failure { case, what });
            }
        }
        Report { subject: self.subject.name(), counts, took: watch.elapsed(), failures }
    }

    /// Recovers an image and judges what it has become.
    fn judge(&self, image: &Content, expectation: &Expectation, whole: bool) -> Result<(), String> {
        let medium = Medium::new(image.clone());
        self.recover_and_judge(&medium, &[expectation], whole).map_err(|(_, what)| what)
    }

    /// As above, for several expectations in the order of their positions: which of them is not met, and why.
    fn recover_and_judge(
        &self,
        medium: &Arc<Medium>,
        expectations: &[&Expectation],
        whole: bool,
    ) -> Result<(), (usize, String)> {
        let work = AssertUnwindSafe(|| block_on(self.recover(medium, expectations, whole)));
        catch_unwind(work).unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            Err((
                0,
                format!("panic: {}", text.or(panic.downcast_ref().copied()).unwrap_or("of another kind")),
            ))
        })
    }

    /// If the medium is behind a cache, the cache is lost after that, and everything is judged again.
    async fn recover(
        &self,
        medium: &Arc<Medium>,
        expectations: &[&Expectation],
        whole: bool,
    ) -> Result<(), (usize, String)> {
        let read = self.recover_once(medium, expectations, whole).await?;
        if !medium.lose_cache() {
            return Ok(());
        }
        let again = self.recover_once(medium, expectations, whole).await;
        let again = again.map_err(|(number, what)| (number, format!("when the cache is lost: {what}")))?;
        match again == read || !self.subject.reads_the_medium() {
            true => Ok(()),
            false => Err((0, "it reads as something else when the cache is lost".to_owned())),
        }
    }

    /// Returns a digest of what was read.
    async fn recover_once(
        &self,
        medium: &Arc<Medium>,
        expectations: &[&Expectation],
        whole: bool,
    ) -> Result<u64, (usize, String)> {
        let error = |what: &str, error: vellum_core::Error| (0, format!("{what}: {}", error.chain()));
        let disk = self.subject.open(medium.clone()).await.map_err(|e| error("it cannot be opened", e))?;
        let read = if whole {
            check_spans(&*disk, [GuestOffset::ZERO.span(disk.geometry().size)], expectations).await?
        } else {
            // The last one includes every request of the others.
            let touched = expectations.last().into_iter().flat_map(|last| last.touched());
            check_spans(&*disk, around(touched, disk.geometry().size), expectations).await?
        };
        disk.close().await.map_err(|e| error("it cannot be closed", e))?;
        self.subject.verify(medium.clone()).await.map_err(|what| (0, what))?;
        Ok(read)
    }

    /// What happens to a medium while an image is recovered, as a log.
    fn recovery_log(&self, run: &Run, kind: CrashKind, position: Position, state: &State) -> EventLog {
        let image = &state.content;
        let medium = match kind {
            // The host lives on: what was not flushed before the crash still is not.
            CrashKind::ProcessKill => {
                let mut log = run.log.until(position);
                log.become_visible(position, image);
                Medium::going_on(log, position)
            }
            _ => state.shown_over(Medium::recording(image.clone(), Granule::Sector)),
        };
        let work = AssertUnwindSafe(|| {
            block_on(async {
                if let Ok(disk) = self.subject.open(medium.clone()).await {
                    // Errors of closing are judged elsewhere.
                    let _ = disk.close().await;
                }
            });
        });
        let _ = catch_unwind(work);
        medium.log().expect("it records")
    }
}

/// What was touched and its neighbourhood, in order, nothing twice.
fn around(touched: impl Iterator<Item = GuestSpan>, size: u64) -> impl Iterator<Item = GuestSpan> {
    const AROUND: u64 = 4096;
    let mut done = 0;
    touched.filter_map(move |span| {
        let start = (span.start().bytes() / AROUND * AROUND).saturating_sub(AROUND).max(done);
        let end = (span.end().bytes().next_multiple_of(AROUND) + AROUND).min(size);
        done = done.max(end);
        (start < end).then(|| GuestSpan::between(GuestOffset::new(start), GuestOffset::new(end)))
    })
}

/// Reads each span once, and holds it against each expectation: which of them is not met, and why.
async fn check_spans(
    disk: &dyn Disk,
    spans: impl IntoIterator<Item = GuestSpan>,
    expectations: &[&Expectation],
) -> Result<u64, (usize, String)> {
    /// At once; a whole number of sectors.
    const READ_MAX: u64 = 64 << 10;
    let mut digest = 0;
    for span in spans {
        let mut rest = span;
        while !rest.is_empty() {
            let (now, later) = rest.split_at(READ_MAX);
            rest = later;
            let buffer = Buffer::for_overwrite(usize::try_from(now.len()).expect("small"));
            let bytes = disk.read(now.start(), buffer).await;
            let bytes = bytes.map_err(|e| (0, format!("{now} cannot be read: {}", e.chain())))?.contiguous();
            for (number, expectation) in expectations.iter().enumerate() {
                let verdict = expectation.check_bytes(now.start(), bytes.slice());
                verdict.map_err(|violation| (number, violation.to_string()))?;
            }
            digest = mix(digest, Content::of(bytes.slice()).digest());
        }
    }
    Ok(digest)
}

fn state_number(point: &CrashPoint, depth: &Depth, wanted: usize) -> State {
    let mut found = None;
    let _ = each_state(point, depth, |number, fates| {
        if number == wanted {
            found = Some(State::of(point, fates));
            return Err(());
        }
        Ok(())
    });
    found.expect("the case names a state that this crash can leave")
}

/// What a crash has left.
struct State {
    content: Content,
    /// What a cache shows in its place.
    shown: Option<Content>,
}

impl State {
    fn of(point: &CrashPoint, fates: &[Fate]) -> Self {
        let content = point.image(|index| fates[index].clone());
        let shown = (point.kind() == CrashKind::FailedFlush)
            .then(|| point.shown(|index| fates[index].clone()))
            .filter(|shown| *shown != content);
        Self { content, shown }
    }

    fn digest(&self) -> u64 {
        let image = self.content.digest();
        self.shown.as_ref().map_or(image, |shown| mix(image, shown.digest()))
    }

    fn medium(&self) -> Arc<Medium> {
        self.shown_over(Medium::new(self.content.clone()))
    }

    /// Every other cache lets go of nothing.
    fn shown_over(&self, medium: Arc<Medium>) -> Arc<Medium> {
        let is_stubborn = mix(self.digest(), 3).is_multiple_of(2);
        match &self.shown {
            Some(shown) => medium.behind(shown.clone(), is_stubborn),
            None => medium,
        }
    }
}

/// So many images are collected before they are judged.
const IMAGES_MAX: usize = 4096;

/// One program's exploration.
struct Work<'a> {
    explorer: &'a Explorer<'a>,
    plan: &'a Plan,
    run: &'a Run,
    /// The digests of the images that were put together.
    recipes: DigestMap<u64>,
    /// What is to be judged next, and where in it each image is, by its digest.
    images: Vec<Image>,
    places: DigestMap<usize>,
    counts: Counts,
}

/// An image and what may be expected of it.
struct Image {
    state: State,
    /// Where it was found, each time that something else was expected of it, in order.
    found: Vec<Found>,
}

/// Where an image was found, and what is expected of it there.
struct Found {
    kind: CrashKind,
    position: Position,
    state: usize,
    expectation: Arc<Expectation>,
}

/// What is wrong with an image: the number of the place where it was found, and where its recovery crashed.
type Wrong = (usize, String, Option<(Position, usize)>);

impl<'a> Work<'a> {
    fn new(explorer: &'a Explorer<'a>, plan: &'a Plan, run: &'a Run) -> Self {
        Self {
            explorer,
            plan,
            run,
            recipes: DigestMap::default(),
            images: Vec::new(),
            places: DigestMap::default(),
            counts: Counts { programs: 1, ..Counts::default() },
        }
    }

    fn every_crash(&mut self) -> Result<(), Box<Failure>> {
        if let Some(wrong) = &self.run.wrong {
            let case = self.case(CrashKind::PowerCut, self.run.from, 0);
            return Err(Box::new(Failure { case, what: wrong.clone() }));
        }
        for position in self.run.positions() {
            let expectation = Arc::new(self.run.oracle.expect_at(position));
            let poisoned = self.run.log.is_poisoned_at(position);
            let kinds: &[CrashKind] = if poisoned {
                &[CrashKind::FailedFlush]
            } else {
                &[CrashKind::PowerCut, CrashKind::ProcessKill]
            };
            for kind in kinds {
                self.one_crash(*kind, position, &expectation)?;
            }
        }
        self.judge_images()
    }

    fn case(&self, kind: CrashKind, position: Position, state: usize) -> Case {
        let subject = self.explorer.subject.name();
        Case { subject, plan: self.plan.clone(), kind, position, state, nested: None }
    }

    fn one_crash(
        &mut self,
        kind: CrashKind,
        position: Position,
        expectation: &Arc<Expectation>,
    ) -> Result<(), Box<Failure>> {
        self.counts.crashes += 1;
        let point = self.run.log.crash(kind, position);
        let expected = expectation.digest();
        let depth = &self.explorer.thoroughness.depth;
        let mut images = Images::of(&point);
        let shows = kind == CrashKind::FailedFlush;
        each_state(&point, depth, |state, fates| {
            let mut made = None;
            let recipe = images.recipe(fates);
            let digest =
                *self.recipes.entry(if shows { mix(recipe, 5) } else { recipe }).or_insert_with(|| {
                    let image = match shows {
                        true => State::of(&point, fates),
                        false => State { content: images.image(fates), shown: None },
                    };
                    let digest = image.digest();
                    made = Some(image);
                    digest
                });
            if !self.explorer.judged.insert(mix(digest, expected)) {
                return Ok(());
            }
            let place = *self.places.entry(digest).or_insert(self.images.len());
            if place == self.images.len() {
                let state = made.unwrap_or_else(|| State::of(&point, fates));
                self.images.push(Image { state, found: Vec::new() });
            }
            self.images[place].found.push(Found { kind, position, state, expectation: expectation.clone() });
            if self.images.len() < IMAGES_MAX { Ok(()) } else { self.judge_images() }
        })
    }

    /// Judges what was collected.
    fn judge_images(&mut self) -> Result<(), Box<Failure>> {
        self.places.clear();
        for image in std::mem::take(&mut self.images) {
            self.one_image(&image).map_err(|(number, what, nested)| {
                let Found { kind, position, state, .. } = image.found[number];
                let case = Case { nested, ..self.case(kind, position, state) };
                Box::new(Failure { case, what })
            })?;
        }
        Ok(())
    }

    fn one_image(&mut self, image: &Image) -> Result<(), Wrong> {
        let digest = image.state.digest();
        let is_new = self.explorer.seen.insert(digest);
        self.counts.states += u64::from(is_new);
        self.counts.shown += u64::from(is_new && image.state.shown.is_some());
        self.counts.judged += image.found.len() as u64;
        let chance = mix(digest, 77);
        let thoroughness = &self.explorer.thoroughness;
        let whole = chance.is_multiple_of(thoroughness.whole_one_in);
        let medium = image.state.medium();
        let expectations: Vec<&Expectation> = image.found.iter().map(|found| &*found.expectation).collect();
        let verdict = self.explorer.recover_and_judge(&medium, &expectations, whole);
        verdict.map_err(|(number, what)| (number, what, None))?;
        if is_new && mix(chance, 1).is_multiple_of(thoroughness.sample_one_in) {
            self.counts.sampled += 1;
            let recovered = medium.content();
            self.explorer.subject.sample(&recovered).map_err(|what| (0, what, None))?;
        }
        if is_new && mix(chance, 2).is_multiple_of(thoroughness.nested_one_in) {
            let first = &image.found[0];
            self.crash_the_recovery(first.kind, first.position, &image.state, &first.expectation)
                .map_err(|(what, nested)| (0, what, nested))?;
        }
        Ok(())
    }

    fn crash_the_recovery(
        &mut self,
        kind: CrashKind,
        position: Position,
        state: &State,
        expectation: &Expectation,
    ) -> Result<(), (String, Option<(Position, usize)>)> {
        let log = self.explorer.recovery_log(self.run, kind, position, state);
        let (mut recipes, mut seen) = (DigestSet::default(), DigestSet::default());
        for at in
            log.crash_positions().into_iter().filter(|at| kind != CrashKind::ProcessKill || *at > position)
        {
            let point = log.crash(CrashKind::PowerCut, at);
            let mut images = Images::of(&point);
            each_state(&point, &Depth::NESTED, |number, fates| {
                if !recipes.insert(images.recipe(fates)) {
                    return Ok(());
                }
                let image = images.image(fates);
                if !seen.insert(image.digest()) {
                    return Ok(());
                }
                self.counts.nested += 1;
                let verdict = self.explorer.judge(&image, expectation, false);
                verdict.map_err(|what| (format!("after a crash in the recovery: {what}"), Some((at, number))))
            })?;
        }
        Ok(())
    }
}
