//! Internal snapshots of a closed qcow2 image: made, reverted to, deleted and renamed, in random order with writes, discards
//! and resizes in between; interrupted by a crash at every step; and with every operation of the host that can fail.
//! Whatever is left, the disk and each snapshot read as they did before or as they do afterwards, and the check has nothing
//! to say: no wrong refcount, no wrong flag, no leak.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::{QcowSetup, base, cipher_of, encrypted, look, random_request, scale, setups};
use futures_lite::future::block_on;
use vellum_core::{
    Buffer, Disk, Error, ErrorKind, GuestOffset, ImageOffset, ImageSpan, Limits, LocalFuture, MemoryDisk,
    Random, Result, SharedDisk, SharedStorage, Storage, StorageRun, WriteFlags, ZeroFlags, Zeroes,
};
use vellum_format::FormatKind;
use vellum_format::image::{Amend, Growth, Reserve, Wanted};
use vellum_format::qcow2::{CreateOptions, Files, Header, OpenOptions, Qcow2, create, snapshot};
use vellum_sim::explore::{Care, Depth, Medium, Offline, explore_offline};
use vellum_sim::{
    Content, CrashKind, Drive, DriveOptions, Fault, FaultPlan, Operation, Operations, Repeat, World,
};

/// How space is reserved.
const RESERVES: [Reserve; 4] = [Reserve::Nothing, Reserve::Places, Reserve::Space, Reserve::Zeros];

/// What a disk reads as.
type Bytes = Vec<u8>;

/// The disk and its snapshots, by their names, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Model {
    disk: Bytes,
    snapshots: Vec<(String, Bytes)>,
}

fn kinds() -> Vec<QcowSetup> {
    let mut kinds = setups();
    let plain =
        |cluster_size| CreateOptions { size: common::SIZE, cluster_size, ..CreateOptions::without_journal() };
    let kind = |name, options, has_base| QcowSetup { name, options, has_base };
    kinds.push(kind("version 2", CreateOptions { version: 2, ..plain(512) }, false));
    let short = |cluster_size| CreateOptions { size: 96 << 10, ..plain(cluster_size) };
    kinds.push(kind("shorter than its base", short(4096), true));
    let short = CreateOptions { extended_l2: true, journal: Some(64 << 10), ..short(16_384) };
    kinds.push(kind("subclusters, shorter than its base", short, true));
    kinds.push(kind("refcounts of 8 bits", CreateOptions { refcount_bits: 8, ..plain(1024) }, false));
    kinds.push(kind("lazy refcounts", CreateOptions { lazy_refcounts: true, ..plain(2048) }, true));
    kinds.push(kind(
        "encrypted",
        encrypted(CreateOptions { extended_l2: true, journal: Some(64 << 10), ..plain(16_384) }),
        false,
    ));
    kinds
}

async fn open(
    kind: &QcowSetup,
    image: &SharedStorage,
    snapshot: Option<&str>,
) -> Result<std::sync::Arc<Qcow2>> {
    let header = Header::read(&**image).await?;
    let below = kind.has_base.then(|| MemoryDisk::holding(&base()) as SharedDisk);
    let options = OpenOptions {
        journal_key: Some(1),
        cipher: cipher_of(&kind.options),
        snapshot: snapshot.map(str::to_owned),
        ..OpenOptions::default()
    };
    Qcow2::open(header, Files { image: image.clone(), data_file: None, below }, options).await
}

async fn read_all(disk: &dyn Disk) -> Result<Bytes> {
    let len = usize::try_from(disk.geometry().size).unwrap();
    Ok(disk.read(GuestOffset::ZERO, Buffer::zeroed(len)).await?.to_vec())
}

async fn names(image: &SharedStorage) -> Result<Vec<(String, String)>> {
    let header = Header::read(&**image).await?;
    let all = snapshot::list(&header, &**image).await?;
    Ok(all.into_iter().map(|one| (one.id, one.name)).collect())
}

/// What the image has. It may not have been closed.
async fn model_of(kind: &QcowSetup, image: &SharedStorage) -> Result<Model> {
    let disk = open(kind, image, None).await?;
    let bytes = read_all(&*disk).await?;
    disk.close().await?;
    let mut snapshots = Vec::new();
    for (id, name) in names(image).await? {
        let disk = open(kind, image, Some(&id)).await?;
        snapshots.push((name, read_all(&*disk).await?));
    }
    Ok(Model { disk: bytes, snapshots })
}

async fn must_be_clean(image: &SharedStorage, when: &str) {
    let (report, lines) = look(image).await.unwrap();
    assert!(report.is_clean(), "{when}: {}", lines.join("; "));
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Step {
    Create(String),
    Revert(String),
    Delete(String),
    Rename(String, String),
    /// Where the host says at once that it has no room, and then has what is there.
    DeleteInPlace(String),
    /// The image is amended: refcounts of this many bits.
    Width(u32),
    /// Version 3, with lazy refcounts.
    Upgrade,
    /// Version 2.
    Downgrade,
    /// The disk gets this size, over a disk below of this many bytes, with space for what is added.
    Resize(u64, u64, Reserve),
}

/// An image whose first write finds no room.
struct Full {
    image: SharedStorage,
    has_said: AtomicBool,
}

impl Storage for Full {
    fn name(&self) -> &str {
        self.image.name()
    }

    fn limits(&self) -> &Limits {
        self.image.limits()
    }

    fn len(&self) -> u64 {
        self.image.len()
    }

    fn read(&self, at: ImageOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        self.image.read(at, buffer)
    }

    fn write(&self, at: ImageOffset, data: Buffer) -> LocalFuture<'_, Result<()>> {
        match self.has_said.swap(true, Ordering::Relaxed) {
            true => self.image.write(at, data),
            false => Box::pin(async { Err(Error::new(ErrorKind::NoSpace, "it is full")) }),
        }
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        self.image.flush()
    }

    fn write_zeroes(&self, span: ImageSpan, how: Zeroes) -> LocalFuture<'_, Result<()>> {
        self.image.write_zeroes(span, how)
    }

    fn discard(&self, span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        self.image.discard(span)
    }

    fn set_len(&self, len: u64) -> LocalFuture<'_, Result<()>> {
        self.image.set_len(len)
    }

    fn preallocate(&self, span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        self.image.preallocate(span)
    }

    fn runs(&self, span: ImageSpan) -> LocalFuture<'_, Result<Vec<StorageRun>>> {
        self.image.runs(span)
    }
}

impl Step {
    async fn perform(&self, image: &SharedStorage) -> Result<()> {
        let format = FormatKind::Qcow2.format();
        let closed = format.closed_snapshots().expect("qcow2 has snapshots");
        match self {
            Self::Create(name) => {
                closed.create(image, name, Duration::new(1_700_000_000, 5), false).await.map(drop)
            }
            Self::Revert(name) => format.revert(image, name).await,
            Self::Delete(name) => closed.delete(image, Wanted::Name(name)).await,
            Self::DeleteInPlace(name) => {
                let full: SharedStorage =
                    Arc::new(Full { image: image.clone(), has_said: AtomicBool::new(false) });
                closed.delete(&full, Wanted::Name(name)).await
            }
            Self::Rename(old, new) => closed.rename(image, Wanted::IdOrName(old), new).await,
            Self::Width(bits) => {
                let wish = Amend { refcount_bits: Some(*bits), ..Amend::default() };
                format.amend(image, &wish).await
            }
            Self::Upgrade => {
                let wish = Amend { version: Some(3), lazy_refcounts: Some(true), ..Amend::default() };
                format.amend(image, &wish).await
            }
            Self::Downgrade => format.amend(image, &Amend { version: Some(2), ..Amend::default() }).await,
            Self::Resize(size, below, reserve) => {
                let before = Header::read(&**image).await?.size();
                match *size < before {
                    true => format.resize(image, *size, true).await,
                    false => {
                        let growth = Growth { below: *below, reserve: *reserve, ..Growth::default() };
                        format.grow_with(image, *size, &growth).await
                    }
                }
            }
        }
    }

    fn apply(&self, model: &mut Model) {
        let at =
            |model: &Model, name: &str| model.snapshots.iter().position(|(there, _)| there == name).unwrap();
        match self {
            Self::Create(name) => model.snapshots.push((name.clone(), model.disk.clone())),
            Self::Revert(name) => model.disk = model.snapshots[at(model, name)].1.clone(),
            Self::Delete(name) | Self::DeleteInPlace(name) => drop(model.snapshots.remove(at(model, name))),
            Self::Rename(old, new) => {
                let index = at(model, old);
                model.snapshots[index].0 = new.clone();
            }
            Self::Width(_) | Self::Upgrade | Self::Downgrade => {}
            Self::Resize(size, ..) => model.disk.resize(usize::try_from(*size).unwrap(), 0),
        }
    }
}

/// Writes the last sector of the disk once more: its cluster is the image's own then. As a caller does that makes a disk
/// larger over a longer one.
async fn own_the_end(kind: &QcowSetup, image: &SharedStorage) {
    let disk = open(kind, image, None).await.unwrap();
    let last = GuestOffset::new(disk.geometry().size - 512);
    let bytes = disk.read(last, Buffer::zeroed(512)).await.unwrap();
    disk.write(last, bytes, WriteFlags::default()).await.unwrap();
    disk.close().await.unwrap();
}

fn len_below(kind: &QcowSetup) -> u64 {
    if kind.has_base { base().len() as u64 } else { 0 }
}

/// Changes the disk at random.
async fn work(kind: &QcowSetup, image: &SharedStorage, random: &mut Random, requests: u64) -> Bytes {
    let disk = open(kind, image, None).await.unwrap();
    for _ in 0..requests {
        random_request(&*disk, random).await.unwrap();
    }
    let bytes = read_all(&*disk).await.unwrap();
    disk.close().await.unwrap();
    bytes
}

#[test]
#[allow(clippy::print_stderr, reason = "the counts are what the test is for")]
fn whatever_the_order_each_snapshot_reads_as_when_it_was_made() {
    let mut counts = [0_u64; 9];
    for kind in kinds() {
        for seed in 0..3 * scale() {
            let mut random = Random::from_seed(seed);
            let medium = Medium::new(kind.empty_image());
            let image: SharedStorage = medium.clone();
            block_on(async {
                let mut model =
                    Model { disk: work(&kind, &image, &mut random, 5).await, snapshots: Vec::new() };
                for number in 0..24 {
                    let some = match model.snapshots.len() {
                        0 => None,
                        all => Some(
                            model.snapshots[usize::try_from(random.below(all as u64)).unwrap()].0.clone(),
                        ),
                    };
                    let step = match (random.below(12), some) {
                        (9, _) if kind.options.version == 3 => Step::Width(*random.pick(&[4, 8, 16, 32, 64])),
                        (10, _) if kind.options.version == 3 || number > 12 => Step::Upgrade,
                        (0..=2, _) if model.snapshots.len() < 6 => Step::Create(format!("s{number}")),
                        (3, Some(name)) => Step::Revert(name),
                        (4, Some(name)) => Step::Delete(name),
                        (5, Some(_)) if kind.options.version == 3 => {
                            Step::DeleteInPlace(model.snapshots.last().unwrap().0.clone())
                        }
                        (6, Some(name)) => Step::Rename(name, format!("r{number}")),
                        (7 | 11, some) if kind.options.version == 3 || some.is_none() => {
                            let size = 512 * (60 + random.below(700));
                            let is_whole = kind.options.encryption.is_none()
                                || (model.disk.len() as u64).is_multiple_of(kind.options.cluster_size);
                            if size > model.disk.len() as u64 {
                                if !is_whole {
                                    continue;
                                }
                                if kind.has_base {
                                    own_the_end(&kind, &image).await;
                                }
                            }
                            let how = if kind.options.version == 2 {
                                Reserve::Nothing
                            } else {
                                *random.pick(&RESERVES)
                            };
                            Step::Resize(size, len_below(&kind), how)
                        }
                        _ => {
                            model.disk = work(&kind, &image, &mut random, 4).await;
                            counts[5] += 1;
                            continue;
                        }
                    };
                    let when = format!("{}, seed {seed}, {number}: {step:?}", kind.name);
                    step.perform(&image).await.unwrap_or_else(|error| panic!("{when}: {}", error.chain()));
                    let before = model.disk.len();
                    step.apply(&mut model);
                    counts[match step {
                        Step::Resize(..) if model.disk.len() < before => 8,
                        Step::Resize(..) => 4,
                        Step::Create(_) => 0,
                        Step::Revert(_) => 1,
                        Step::Delete(_) | Step::DeleteInPlace(_) => 2,
                        Step::Rename(..) => 3,
                        Step::Width(_) => 6,
                        Step::Upgrade | Step::Downgrade => 7,
                    }] += 1;
                    must_be_clean(&image, &when).await;
                    let found = model_of(&kind, &image).await.unwrap();
                    let names = |model: &Model| {
                        model.snapshots.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>()
                    };
                    assert_eq!(names(&found), names(&model), "{when}");
                    assert!(found == model, "{when}: other bytes");
                    must_be_clean(&image, &when).await;
                }
            });
        }
    }
    eprintln!(
        "created {}, reverted {}, deleted {}, renamed {}, grown {}, written {}, of another width {}, upgraded {}, \
         shrunk {}",
        counts[0], counts[1], counts[2], counts[3], counts[4], counts[5], counts[6], counts[7], counts[8]
    );
    assert!(counts.iter().all(|count| *count > 20), "{counts:?}");
}

/// A step on an image with two snapshots, interrupted.
struct Cut {
    kind: QcowSetup,
    step: Step,
    /// The image was not closed when the step begins.
    is_open: bool,
    image: Content,
    before: Model,
    after: Model,
}

impl Cut {
    fn new(kind: &QcowSetup, step: Step, is_open: bool) -> Self {
        let medium = Medium::new(kind.empty_image());
        let image: SharedStorage = medium.clone();
        let mut random = Random::from_seed(7);
        let before = block_on(async {
            work(kind, &image, &mut random, 6).await;
            Step::Create("one".to_owned()).perform(&image).await.unwrap();
            work(kind, &image, &mut random, 3).await;
            Step::Create("two".to_owned()).perform(&image).await.unwrap();
            work(kind, &image, &mut random, 3).await;
            model_of(kind, &image).await.unwrap()
        });
        let (image, before) = match is_open {
            false => (medium.content(), before),
            true => block_on(async {
                let disk = open(kind, &image, None).await.unwrap();
                let some = GuestOffset::new(9000);
                disk.write(some, Buffer::copy_of(&[5; 7000]), WriteFlags::FUA).await.unwrap();
                let image = medium.content();
                let before = Model { disk: read_all(&*disk).await.unwrap(), ..before };
                (image, before)
            }),
        };
        let step = match step {
            // Larger again than the disk below, which is longer than the disk.
            Step::Resize(size, _, how) if size > before.disk.len() as u64 => {
                Step::Resize(size, len_below(kind), how)
            }
            step => step,
        };
        let mut after = before.clone();
        step.apply(&mut after);
        Self { kind: kind.clone(), step, is_open, image, before, after }
    }

    /// A step on an image to which all of these happened.
    fn after(kind: &QcowSetup, earlier: &[Step], step: Step) -> Self {
        let medium = Medium::new(kind.empty_image());
        let image: SharedStorage = medium.clone();
        let before = block_on(async {
            work(kind, &image, &mut Random::from_seed(11), 12).await;
            for step in earlier {
                step.perform(&image).await.unwrap();
            }
            model_of(kind, &image).await.unwrap()
        });
        let mut after = before.clone();
        step.apply(&mut after);
        Self { kind: kind.clone(), step, is_open: false, image: medium.content(), before, after }
    }

    async fn judge_it(&self, image: &SharedStorage, must_be_new: bool) -> std::result::Result<(), String> {
        let text = |error: Error| error.chain();
        let found = model_of(&self.kind, image).await.map_err(text)?;
        let is_new = found == self.after;
        if !is_new && (must_be_new || found != self.before) {
            let names =
                |model: &Model| model.snapshots.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
            return Err(format!("neither old nor new: {:?}, done {must_be_new}", names(&found)));
        }
        // What is written now is seen in no snapshot.
        let disk = open(&self.kind, image, None).await.map_err(text)?;
        let size = disk.geometry().size;
        disk.write(GuestOffset::new(4096), Buffer::copy_of(&[9; 9000]), WriteFlags::FUA)
            .await
            .map_err(text)?;
        disk.write_zeroes(GuestOffset::new(size - 30_000).span(20_000), ZeroFlags::default())
            .await
            .map_err(text)?;
        disk.close().await.map_err(text)?;
        let later = model_of(&self.kind, image).await.map_err(text)?;
        if later.snapshots != found.snapshots {
            return Err("a snapshot has changed".to_owned());
        }
        let (report, lines) = look(image).await.map_err(text)?;
        if report.is_clean() { Ok(()) } else { Err(format!("the check says: {}", lines.join("; "))) }
    }
}

impl Offline for Cut {
    fn name(&self) -> String {
        let open = if self.is_open { ", not closed" } else { "" };
        format!("{}{open}, {:?}", self.kind.name, self.step)
    }

    fn image(&self) -> Content {
        self.image.clone()
    }

    fn change(&self, image: SharedStorage) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move { self.step.perform(&image).await })
    }

    fn ways(&self) -> usize {
        2
    }

    /// As it is; or the step is repeated, where it has not been done.
    fn go_on(&self, image: SharedStorage, way: usize) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            if way == 1 && model_of(&self.kind, &image).await? != self.after {
                self.step.perform(&image).await?;
            }
            Ok(())
        })
    }

    fn judge(
        &self,
        image: SharedStorage,
        way: Option<usize>,
        is_done: bool,
    ) -> LocalFuture<'_, std::result::Result<(), String>> {
        Box::pin(async move {
            // Before anything opens it for writing: nothing needs a repair.
            let is_repaired = matches!(self.step, Step::DeleteInPlace(_));
            if !self.is_open && !is_repaired && way == Some(0) {
                let (report, lines) = look(&image).await.map_err(|error| error.chain())?;
                if !report.is_clean() {
                    return Err(format!("the check says at once: {}", lines.join("; ")));
                }
            }
            self.judge_it(&image, is_done || way == Some(1)).await
        })
    }
}

fn steps() -> Vec<Step> {
    let text = str::to_owned;
    vec![
        Step::Create(text("three")),
        Step::Revert(text("one")),
        Step::Revert(text("two")),
        Step::Delete(text("one")),
        Step::Delete(text("two")),
        Step::DeleteInPlace(text("two")),
        Step::Rename(text("one"), text("a longer name of it")),
        Step::Width(32),
        Step::Width(4),
        Step::Upgrade,
        Step::Resize(70 << 10, 0, Reserve::Nothing),
        Step::Resize((90 << 10) + 512, 0, Reserve::Nothing),
        Step::Resize(4 << 20, 0, Reserve::Nothing),
        Step::Resize(240 << 10, 0, Reserve::Places),
        Step::Resize(260 << 10, 0, Reserve::Zeros),
    ]
}

fn cuts(is_open: bool) -> impl Iterator<Item = Cut> {
    let all = kinds().into_iter().flat_map(|kind| steps().into_iter().map(move |step| (kind.clone(), step)));
    // Version 2 does not say that it was not closed, and its snapshots have no size.
    let fits = |kind: &QcowSetup, step: &Step| {
        kind.options.version == 3
            || !matches!(step, Step::Width(_) | Step::Resize(..) | Step::DeleteInPlace(_))
    };
    // A disk that was not closed is recovered before it is resized.
    let is_left = move |kind: &QcowSetup, step: &Step| {
        let is_for_closed = matches!(step, Step::Resize(..) | Step::DeleteInPlace(_));
        !is_open || kind.options.version == 3 && !is_for_closed
    };
    all.filter(move |(kind, step)| fits(kind, step) && is_left(kind, step))
        .map(move |(kind, step)| Cut::new(&kind, step, is_open))
}

#[allow(clippy::print_stderr, reason = "the counts are what the test is for")]
fn explore(cuts: impl Iterator<Item = Cut>, one_in: u64) {
    let (mut states, mut judged, mut nested) = (0, 0, 0);
    for cut in cuts {
        // An amendment takes few writes, and a larger disk may take one.
        let is_short =
            matches!(cut.step, Step::Width(_) | Step::Upgrade | Step::Downgrade | Step::Resize(..));
        let least = if matches!(cut.step, Step::Resize(..)) { 0 } else { 1 };
        let one_in = if is_short { 1 } else { one_in };
        let care = Care { depth: Depth::NESTED, one_in, nested_one_in: 40 };
        let looked = explore_offline(&cut, &care).unwrap_or_else(|what| panic!("{what}"));
        assert!(looked.states > if is_short { least } else { 2 }, "{}: {looked}", cut.name());
        (states, judged, nested) = (states + looked.states, judged + looked.judged, nested + looked.nested);
    }
    eprintln!("{states} states, {judged} judged, {nested} nested, 0 violations");
}

#[test]
fn a_crash_leaves_the_image_before_the_step_or_after_it() {
    explore(cuts(false), 6 / scale().min(6));
}

/// Version 2 has no zeros, which the disk has here and there; and the cluster in which the disk ends is a snapshot's as well, with
/// bytes behind that end.
#[test]
fn a_crash_leaves_version_2_or_3_and_the_old_end_or_the_new_one() {
    let ends = [Step::Create("one".to_owned()), Step::Resize((90 << 10) + 512, 0, Reserve::Nothing)];
    let grown = Step::Resize((121 << 10) + 512, 0, Reserve::Nothing);
    let kinds: Vec<QcowSetup> =
        kinds().into_iter().filter(|kind| kind.options.encryption.is_none()).collect();
    let is_plain = |kind: &&QcowSetup| {
        let options = &kind.options;
        !kind.has_base && !options.extended_l2 && options.refcount_bits == 16 && options.version == 3
    };
    let downgraded = kinds.iter().filter(is_plain).map(|kind| Cut::after(kind, &[], Step::Downgrade));
    let grown = kinds
        .iter()
        .filter(|kind| kind.options.version == 3 && !kind.has_base)
        .map(|kind| Cut::after(kind, &ends, grown.clone()));
    let cuts: Vec<Cut> = downgraded.chain(grown).collect();
    assert!(cuts.len() > 5, "{}", cuts.len());
    explore(cuts.into_iter(), 1);
}

#[test]
fn so_it_does_when_the_image_was_not_closed() {
    explore(cuts(true), 24 / scale().min(24));
}

/// The Nth operation of the host fails, for every N. The image is as it was or as it was to be.
#[test]
#[allow(clippy::print_stderr, reason = "the counts are what the test is for")]
fn a_step_that_fails_leaves_the_image_before_it_or_after_it() {
    let writes = Operation::Write | Operation::WriteZeroes | Operation::Preallocate | Operation::SetLen;
    let sweeps: [(Operations, ErrorKind, Repeat); 2] =
        [(Operations::ALL, ErrorKind::Io, Repeat::Once), (writes, ErrorKind::NoSpace, Repeat::ForEver)];
    let mut met = 0;
    for cut in cuts(false) {
        for (operations, error, repeat) in &sweeps {
            for number in 0.. {
                let fault = Fault { error: *error, repeat: *repeat, ..Fault::nth(*operations, number) };
                if !one_failing(&cut, fault) {
                    break;
                }
                met += 1;
            }
        }
    }
    eprintln!("{met} failures, 0 violations");
    assert!(met > 500, "{met}");
}

fn one_failing(cut: &Cut, fault: Fault) -> bool {
    let when = format!("{}: {fault:?}", cut.name());
    let world = World::new(0);
    let plan = FaultPlan::none();
    let options = DriveOptions { faults: plan.clone(), ..DriveOptions::default() };
    let drive = Drive::from_content(&world, cut.image(), options);
    let image: SharedStorage = drive.clone();
    plan.add(fault);
    let done = world.run(cut.step.perform(&image));
    let is_met = plan.hits() > 0;
    plan.clear();
    let content = match drive.is_poisoned() {
        true => drive.crash(CrashKind::FailedFlush, &mut Random::from_seed(1)),
        false => drive.content(),
    };
    let image: SharedStorage = Medium::new(content);
    block_on(cut.judge_it(&image, done.is_ok())).unwrap_or_else(|what| panic!("{when} ({done:?}): {what}"));
    is_met
}

/// Version 3 requires the sizes of the machine's state and of the disk in each entry. Older programs wrote none.
#[test]
fn a_table_with_short_entries_is_repaired() {
    let options =
        CreateOptions { size: common::SIZE, cluster_size: 4096, ..CreateOptions::without_journal() };
    let kind = QcowSetup { name: "short entries", options, has_base: false };
    let image: SharedStorage = Medium::new(kind.empty_image());
    block_on(async {
        let mut random = Random::from_seed(4);
        for name in ["one", "two"] {
            work(&kind, &image, &mut random, 5).await;
            Step::Create(name.to_owned()).perform(&image).await.unwrap();
        }
        let before = model_of(&kind, &image).await.unwrap();
        let head = image.read(vellum_core::ImageOffset::ZERO, Buffer::zeroed(512)).await.unwrap().to_vec();
        let place = u64::from_be_bytes(head[64..72].try_into().unwrap());
        let place = vellum_core::ImageOffset::new(place);
        let table = image.read(place, Buffer::zeroed(4096)).await.unwrap().to_vec();
        // 40 bytes, 24 of extra data, the id and the name; padded to 72.
        let mut short = Vec::new();
        for entry in table.chunks(72).take(2) {
            short.extend(&entry[..36]);
            short.extend([0; 4]);
            short.extend(&entry[64..72]);
        }
        short.resize(4096, 0);
        image.write(place, Buffer::copy_of(&short)).await.unwrap();
        let (report, lines) = look(&image).await.unwrap();
        assert_eq!(report.corruptions, 2, "{lines:?}");
        let refused = Step::Create("three".to_owned()).perform(&image).await.expect_err("it is damaged");
        assert!(refused.chain().contains("vellum check -r all"), "{}", refused.chain());
        let header = Header::read(&*image).await.unwrap();
        let all = vellum_format::report::Repair::All;
        let report = vellum_format::qcow2::check::check(&header, &image, all, &mut |_| {}).await.unwrap();
        assert_eq!((report.corruptions, report.corruptions_fixed), (0, 2));
        must_be_clean(&image, "repaired").await;
        assert!(model_of(&kind, &image).await.unwrap() == before);
    });
}

#[test]
fn what_cannot_be_done_says_why_and_changes_nothing() {
    let plain = CreateOptions { size: common::SIZE, cluster_size: 4096, ..CreateOptions::without_journal() };
    let make = |options: &CreateOptions| {
        let kind = QcowSetup { name: "refused", options: options.clone(), has_base: false };
        let medium = Medium::new(kind.empty_image());
        let image: SharedStorage = medium.clone();
        block_on(work(&kind, &image, &mut Random::from_seed(3), 8));
        (kind, medium, image)
    };
    let refused = |image: &SharedStorage, step: Step, kind: ErrorKind, why: &str| {
        let error = block_on(step.perform(image)).expect_err("it is refused");
        assert!(error.kind() == kind && error.chain().contains(why), "{step:?}: {}", error.chain());
    };
    // One bit cannot count two, and two bits cannot count four.
    for (refcount_bits, most) in [(1, 0), (2, 2)] {
        let (kind, medium, image) = make(&CreateOptions { refcount_bits, ..plain.clone() });
        for number in 0..most {
            block_on(Step::Create(format!("s{number}")).perform(&image)).unwrap();
        }
        let before = (medium.content().digest(), block_on(model_of(&kind, &image)).unwrap());
        refused(&image, Step::Create("more".to_owned()), ErrorKind::Unsupported, "refcount_bits=16");
        block_on(must_be_clean(&image, "refused"));
        assert!(block_on(model_of(&kind, &image)).unwrap() == before.1, "nothing has changed");
    }
    let (_, _, image) = make(&plain);
    block_on(Step::Create("one".to_owned()).perform(&image)).unwrap();
    let text = str::to_owned;
    refused(&image, Step::Create(text("one")), ErrorKind::Invalid, "already");
    refused(&image, Step::Create(String::new()), ErrorKind::Invalid, "1 to 255 bytes");
    refused(&image, Step::Create("x".repeat(256)), ErrorKind::Invalid, "1 to 255 bytes");
    refused(&image, Step::Delete(text("none")), ErrorKind::NotFound, "no snapshot named none");
    refused(&image, Step::Revert(text("none")), ErrorKind::NotFound, "no snapshot named none");
    refused(&image, Step::Rename(text("none"), text("x")), ErrorKind::NotFound, "no snapshot named none");
    block_on(Step::Create(text("two")).perform(&image)).unwrap();
    refused(&image, Step::Rename(text("two"), text("one")), ErrorKind::Invalid, "already");
    // `Name` is a name only.
    refused(&image, Step::Delete(text("1")), ErrorKind::NotFound, "no snapshot named 1");
    block_on(Step::Revert(text("1")).perform(&image)).unwrap();
    block_on(must_be_clean(&image, "at the end"));
    let fixed = CreateOptions { data_file: Some(text("data")), ..plain };
    let storage = vellum_core::MemoryStorage::new("image");
    let data: SharedStorage = vellum_core::MemoryStorage::new("data");
    block_on(create(&*storage, Some(&data), &fixed)).unwrap();
    let image: SharedStorage = storage;
    refused(&image, Step::Create(text("one")), ErrorKind::Unsupported, "another file");
    // What cannot be amended.
    let (_, _, image) = make(&CreateOptions { version: 2, ..CreateOptions { data_file: None, ..fixed } });
    refused(&image, Step::Width(32), ErrorKind::Invalid, "compat=1.1");
    block_on(Step::Upgrade.perform(&image)).unwrap();
    block_on(Step::Create(text("one")).perform(&image)).unwrap();
    refused(&image, Step::Width(1), ErrorKind::Unsupported, "count to 1");
    refused(&image, Step::Width(3), ErrorKind::Invalid, "refcount_bits=3");
    block_on(Step::Width(32).perform(&image)).unwrap();
    refused(&image, Step::Downgrade, ErrorKind::Unsupported, "refcount_bits=16");
    block_on(must_be_clean(&image, "amended"));
}
