//! Persistent bitmaps: what a random guest changes, over openings, crashes and kills, is what they say; and adding, removing,
//! clearing and merging them leaves them as they were or as they were to be.

mod common;

use std::collections::BTreeSet;
use std::sync::Arc;

use common::{QcowSetup, base, cipher_of, look, scale, setups};
use futures_lite::future::block_on;
use vellum_core::{
    Buffer, Disk, Error, ErrorKind, GuestOffset, LocalFuture, MemoryDisk, Random, Result, SharedDisk,
    SharedStorage, WriteFlags, ZeroFlags,
};
use vellum_format::FormatKind;
use vellum_format::image::{BitmapChange, Bits, ClosedBitmaps, MergeSource, OpenBitmaps};
use vellum_format::qcow2::bitmaps::Bitmap;
use vellum_format::qcow2::{CreateOptions, Files, Header, OpenOptions, Qcow2};
use vellum_sim::explore::{Care, Depth, Medium, Offline, explore_offline};
use vellum_sim::{
    Content, CrashKind, Drive, DriveOptions, Fault, FaultPlan, Operation, Operations, Repeat, World,
};

/// Granules of a region (`track.rs`).
const REGION: u64 = 256;

fn bitmaps() -> &'static dyn ClosedBitmaps {
    FormatKind::Qcow2.format().closed_bitmaps().expect("qcow2 has bitmaps")
}

fn kinds() -> Vec<QcowSetup> {
    let mut kinds: Vec<QcowSetup> = setups();
    // Regions of 128 KiB: some are touched, others not.
    kinds.iter_mut().for_each(|kind| kind.options.size = 1 << 20);
    kinds
}

async fn open(kind: &QcowSetup, image: &SharedStorage) -> Result<Arc<Qcow2>> {
    let header = Header::read(&**image).await?;
    let below = kind.has_base.then(|| MemoryDisk::holding(&base()) as SharedDisk);
    let options =
        OpenOptions { journal_key: Some(1), cipher: cipher_of(&kind.options), ..OpenOptions::default() };
    Qcow2::open(header, Files { image: image.clone(), data_file: None, below }, options).await
}

/// The granules that are marked.
fn marked(bits: &Bits) -> BTreeSet<u64> {
    let (mut all, mut at) = (BTreeSet::new(), GuestOffset::ZERO);
    while let Some(run) = bits.next_marked(at) {
        at = run.end();
        all.extend(run.start().bytes() / bits.granularity()..at.bytes().div_ceil(bits.granularity()));
    }
    all
}

/// A request by chance, and the granules that it touches.
async fn request(disk: &dyn Disk, random: &mut Random, granularity: u64) -> Result<BTreeSet<u64>> {
    let size = disk.geometry().size;
    let at = random.below(size);
    let longest = *random.pick(&[1, 600, 9000, 40_000]);
    let len = (1 + random.below(longest)).min(size - at);
    let span = GuestOffset::new(at).span(len);
    let bytes =
        Buffer::copy_of(&vec![1 + u8::try_from(random.below(255)).unwrap(); usize::try_from(len).unwrap()]);
    match random.below(6) {
        0 => {
            disk.write_zeroes(span, ZeroFlags { may_unmap: random.one_in(2), ..ZeroFlags::default() }).await?
        }
        1 => disk.discard(span, WriteFlags::default()).await?,
        2 => disk.write(span.start(), bytes, WriteFlags::FUA).await?,
        _ => disk.write(span.start(), bytes, WriteFlags::default()).await?,
    }
    Ok((at / granularity..(at + len).div_ceil(granularity)).collect())
}

async fn must_be_clean(image: &SharedStorage, when: &str) {
    let (report, lines) = look(image).await.unwrap();
    assert!(report.is_clean(), "{when}: {}", lines.join("; "));
}

async fn add(image: &SharedStorage, name: &str, granularity: u64) {
    bitmaps().change(image, name, &[BitmapChange::Add { granularity: Some(granularity) }]).await.unwrap();
}

/// Openings that end well, and others that end with a kill or a power cut. After a clean close exactly what was written is
/// marked; after a crash all of it, and nothing outside of the regions of what was.
#[test]
#[allow(clippy::print_stderr, reason = "the counts are what the test is for")]
fn what_a_guest_changes_is_marked() {
    let (mut closed, mut crashed) = (0, 0);
    for kind in kinds() {
        for seed in 0..6 * scale() {
            let mut random = Random::from_seed(seed);
            let granularity = *random.pick(&[512, 1024, 4096]);
            let world = World::new(seed);
            let mut drive = Drive::from_content(&world, kind.empty_image(), DriveOptions::default());
            let mut model = BTreeSet::new();
            world.run(async {
                let image: SharedStorage = drive.clone();
                add(&image, "all", granularity).await;
                add(&image, "none", granularity).await;
                bitmaps().change(&image, "none", &[BitmapChange::Disable]).await.unwrap();
            });
            for round in 0..8 {
                let when = format!("{}, seed {seed}, round {round}", kind.name);
                let image: SharedStorage = drive.clone();
                let is_crash = random.one_in(2);
                let mut touched = BTreeSet::new();
                let loose = world.run(async {
                    let disk = open(&kind, &image).await.unwrap();
                    for _ in 0..random.below(7) {
                        touched.extend(request(&*disk, &mut random, granularity).await.unwrap());
                        if random.one_in(5) {
                            disk.flush().await.unwrap();
                        }
                    }
                    if is_crash {
                        return true;
                    }
                    disk.close().await.unwrap();
                    false
                });
                if loose {
                    let kind = *random.pick(&[CrashKind::ProcessKill, CrashKind::PowerCut]);
                    let content = drive.crash(kind, &mut random);
                    drive = Drive::from_content(&world, content, DriveOptions::default());
                }
                let image: SharedStorage = drive.clone();
                let (bits, none) = world.run(async {
                    open(&kind, &image).await.unwrap().close().await.unwrap();
                    must_be_clean(&image, &when).await;
                    let bits = bitmaps().load(&*image, "all").await.unwrap();
                    (bits, bitmaps().load(&*image, "none").await.unwrap())
                });
                assert!(none.is_empty(), "{when}: a bitmap that is disabled");
                let found = marked(&bits);
                model.extend(&touched);
                if loose {
                    let regions: BTreeSet<u64> = touched.iter().map(|granule| granule / REGION).collect();
                    for extra in found.difference(&model) {
                        assert!(regions.contains(&(extra / REGION)), "{when}: {extra} is marked");
                    }
                    assert!(
                        model.is_subset(&found),
                        "{when}: {:?} is missing",
                        model.difference(&found).next()
                    );
                    // From here on that is what the bitmap says.
                    model = found;
                    crashed += 1;
                } else {
                    assert_eq!(found, model, "{when}");
                    closed += 1;
                }
            }
        }
    }
    eprintln!("{closed} openings that were closed, {crashed} that were not");
    assert!(closed > 100 && crashed > 100);
}

/// There is no space for bits: the request that needs none itself is done, and the bitmap says that all may have changed.
#[test]
fn a_full_device_marks_all() {
    for journal in [None, Some(64 << 10)] {
        let options = CreateOptions {
            size: 128 << 10,
            cluster_size: 4096,
            journal,
            ..CreateOptions::without_journal()
        };
        let kind = QcowSetup { name: "full", options, has_base: false };
        let medium = Medium::new(kind.empty_image());
        let image: SharedStorage = medium.clone();
        block_on(async {
            let disk = open(&kind, &image).await.unwrap();
            disk.write(GuestOffset::ZERO, Buffer::copy_of(&[1; 128 << 10]), WriteFlags::default())
                .await
                .unwrap();
            disk.close().await.unwrap();
            add(&image, "all", 512).await;
        });
        let world = World::new(0);
        let plan = FaultPlan::none();
        let options = DriveOptions { faults: plan.clone(), ..DriveOptions::default() };
        let drive = Drive::from_content(&world, medium.content(), options);
        let image: SharedStorage = drive.clone();
        plan.add(Fault {
            error: ErrorKind::NoSpace,
            repeat: Repeat::ForEver,
            ..Fault::nth(Operation::WriteZeroes | Operation::Preallocate | Operation::SetLen, 0)
        });
        world.run(async {
            let disk = open(&kind, &image).await.unwrap();
            disk.write(GuestOffset::new(4096), Buffer::copy_of(&[2; 512]), WriteFlags::FUA).await.unwrap();
            disk.close().await.unwrap();
            let bits = bitmaps().load(&*image, "all").await.unwrap();
            assert_eq!(bits.marked_bytes(), 128 << 10, "{journal:?}");
            must_be_clean(&image, "full").await;
        });
    }
}

#[derive(Debug, Clone)]
struct Step(&'static str, Vec<BitmapChange>);

/// The bitmaps of an image: names, flags, and what is marked.
type State = Vec<(String, bool, u64, Option<BTreeSet<u64>>)>;

async fn state_of(image: &SharedStorage) -> Result<State> {
    let mut state = Vec::new();
    for Bitmap { name, granularity, is_in_use, is_auto } in bitmaps().list(&**image).await? {
        let bits = if is_in_use { None } else { Some(marked(&bitmaps().load(&**image, &name).await?)) };
        state.push((name, is_auto, granularity, bits));
    }
    Ok(state)
}

/// A change of an image with two bitmaps, interrupted.
struct Cut {
    kind: QcowSetup,
    step: Step,
    image: Content,
    before: State,
    after: State,
}

impl Cut {
    fn new(kind: &QcowSetup, step: Step) -> Self {
        let medium = Medium::new(kind.empty_image());
        let image: SharedStorage = medium.clone();
        let mut random = Random::from_seed(5);
        block_on(async {
            for (name, granularity) in [("one", 512), ("two", 4096)] {
                add(&image, name, granularity).await;
                let disk = open(kind, &image).await.unwrap();
                for _ in 0..4 {
                    request(&*disk, &mut random, granularity).await.unwrap();
                }
                disk.close().await.unwrap();
            }
        });
        let content = medium.content();
        let (before, after) = block_on(async {
            let before = state_of(&image).await.unwrap();
            bitmaps().change(&image, step.0, &step.1).await.unwrap();
            must_be_clean(&image, &format!("{}, {step:?}", kind.name)).await;
            (before, state_of(&image).await.unwrap())
        });
        Self { kind: kind.clone(), step, image: content, before, after }
    }

    async fn judge_it(&self, image: &SharedStorage, must_be_new: bool) -> std::result::Result<(), String> {
        let text = |error: Error| error.chain();
        let found = state_of(image).await.map_err(text)?;
        if found != self.after && (must_be_new || found != self.before) {
            return Err(format!("neither old nor new: {found:?}, done {must_be_new}"));
        }
        let (report, lines) = look(image).await.map_err(text)?;
        if !report.is_clean() {
            return Err(format!("the check says: {}", lines.join("; ")));
        }
        // What is written now is marked in what is enabled.
        let disk = open(&self.kind, image).await.map_err(text)?;
        disk.write(GuestOffset::new(70_000), Buffer::copy_of(&[9; 9000]), WriteFlags::FUA)
            .await
            .map_err(text)?;
        disk.close().await.map_err(text)?;
        for ((name, is_auto, granularity, bits), later) in
            found.iter().zip(state_of(image).await.map_err(text)?)
        {
            let mut expected = bits.clone().expect("none is in use");
            if *is_auto {
                expected.extend(70_000 / granularity..79_000_u64.div_ceil(*granularity));
            }
            if later.3.as_ref() != Some(&expected) {
                return Err(format!("{name} does not say what was written then"));
            }
        }
        let (report, lines) = look(image).await.map_err(text)?;
        if report.is_clean() { Ok(()) } else { Err(format!("the check says at last: {}", lines.join("; "))) }
    }
}

impl Offline for Cut {
    fn name(&self) -> String {
        format!("{}, {:?}", self.kind.name, self.step)
    }

    fn image(&self) -> Content {
        self.image.clone()
    }

    fn change(&self, image: SharedStorage) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move { bitmaps().change(&image, self.step.0, &self.step.1).await })
    }

    fn ways(&self) -> usize {
        2
    }

    /// As it is; or the step is repeated, where it has not been done.
    fn go_on(&self, image: SharedStorage, way: usize) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            if way == 1 && state_of(&image).await? != self.after {
                self.change(image).await?;
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
        Box::pin(async move { self.judge_it(&image, is_done || way == Some(1)).await })
    }
}

fn steps() -> Vec<Step> {
    use BitmapChange::{Add, Clear, Disable, Enable, Merge, Remove};
    let merge = |name: &str| Merge(MergeSource::Own(name.to_owned()));
    let other = Bits::new(1 << 20, 16).unwrap();
    vec![
        Step("three", vec![Add { granularity: None }]),
        Step("three", vec![Add { granularity: Some(2048) }, Disable, merge("one"), merge("two")]),
        Step("one", vec![Remove]),
        Step("two", vec![Clear]),
        Step("one", vec![Disable]),
        Step("one", vec![Disable, Clear, Enable]),
        Step("two", vec![merge("one")]),
        Step("one", vec![merge("two")]),
        Step("one", vec![Remove, Add { granularity: Some(8192) }, merge("two")]),
        Step("one", vec![Merge(MergeSource::Other(Arc::new(other)))]),
    ]
}

fn cuts() -> impl Iterator<Item = Cut> {
    let all = kinds().into_iter().flat_map(|kind| steps().into_iter().map(move |step| (kind.clone(), step)));
    all.map(|(kind, step)| Cut::new(&kind, step))
}

#[test]
#[allow(clippy::print_stderr, reason = "the counts are what the test is for")]
fn a_crash_leaves_all_bitmaps_before_the_change_or_after_it() {
    let (mut states, mut judged, mut nested) = (0, 0, 0);
    for cut in cuts() {
        let care = Care { depth: Depth::NESTED, one_in: 2, nested_one_in: 40 };
        let looked = explore_offline(&cut, &care).unwrap_or_else(|what| panic!("{what}"));
        (states, judged, nested) = (states + looked.states, judged + looked.judged, nested + looked.nested);
    }
    eprintln!("{states} states, {judged} judged, {nested} nested, 0 violations");
    assert!(states > 500, "{states}");
}

/// The Nth operation of the host fails, for every N.
#[test]
#[allow(clippy::print_stderr, reason = "the counts are what the test is for")]
fn a_change_that_fails_leaves_all_bitmaps_before_it_or_after_it() {
    let writes = Operation::Write | Operation::WriteZeroes | Operation::Preallocate | Operation::SetLen;
    let sweeps: [(Operations, ErrorKind, Repeat); 2] =
        [(Operations::ALL, ErrorKind::Io, Repeat::Once), (writes, ErrorKind::NoSpace, Repeat::ForEver)];
    let mut met = 0;
    for cut in cuts() {
        for (operations, error, repeat) in &sweeps {
            for number in 0.. {
                let fault = Fault { error: *error, repeat: *repeat, ..Fault::nth(*operations, number) };
                let when = format!("{}: {fault:?}", cut.name());
                let (world, plan) = (World::new(0), FaultPlan::none());
                let options = DriveOptions { faults: plan.clone(), ..DriveOptions::default() };
                let drive = Drive::from_content(&world, cut.image(), options);
                let image: SharedStorage = drive.clone();
                plan.add(fault);
                let done = world.run(cut.change(image));
                let is_met = plan.hits() > 0;
                plan.clear();
                let content = match drive.is_poisoned() {
                    true => drive.crash(CrashKind::FailedFlush, &mut Random::from_seed(1)),
                    false => drive.content(),
                };
                let image: SharedStorage = Medium::new(content);
                block_on(cut.judge_it(&image, done.is_ok()))
                    .unwrap_or_else(|what| panic!("{when} ({done:?}): {what}"));
                if !is_met {
                    break;
                }
                met += 1;
            }
        }
    }
    eprintln!("{met} failures, 0 violations");
    assert!(met > 500, "{met}");
}

#[test]
fn what_cannot_be_done_says_why_and_changes_nothing() {
    use BitmapChange::{Add, Clear, Enable, Merge, Remove};
    let make = |version| {
        let options = CreateOptions { size: 1 << 20, version, ..CreateOptions::without_journal() };
        let medium = Medium::new(QcowSetup { name: "refused", options, has_base: false }.empty_image());
        let image: SharedStorage = medium.clone();
        (medium, image)
    };
    let (medium, image) = make(3);
    block_on(add(&image, "one", 65_536));
    let before = medium.content().digest();
    let shorter = Arc::new(Bits::new(4096, 16).unwrap());
    for (name, change, kind, why) in [
        ("none", Clear, ErrorKind::NotFound, "no bitmap named none"),
        ("none", Remove, ErrorKind::NotFound, "no bitmap named none"),
        ("none", Enable, ErrorKind::NotFound, "no bitmap named none"),
        ("one", Merge(MergeSource::Own("none".to_owned())), ErrorKind::NotFound, "no bitmap named none"),
        ("one", Merge(MergeSource::Other(shorter)), ErrorKind::Invalid, "must be the same"),
        ("one", Add { granularity: None }, ErrorKind::Invalid, "already"),
        ("", Add { granularity: None }, ErrorKind::Invalid, "1 to 1023 bytes"),
        ("two", Add { granularity: Some(256) }, ErrorKind::Invalid, "power of two"),
        ("two", Add { granularity: Some(5000) }, ErrorKind::Invalid, "power of two"),
        ("two", Add { granularity: Some(1 << 32) }, ErrorKind::Invalid, "power of two"),
    ] {
        let error = block_on(bitmaps().change(&image, name, &[change])).expect_err(why);
        assert!(error.kind() == kind && error.chain().contains(why), "{}", error.chain());
    }
    assert_eq!(medium.content().digest(), before);
    let (_, image) = make(2);
    let error =
        block_on(bitmaps().change(&image, "one", &[Add { granularity: None }])).expect_err("version 2");
    assert!(error.chain().contains("compat=1.1"), "{}", error.chain());
}

/// Larger and smaller disks keep what is marked, what is added is marked in enabled bitmaps, and an image without bitmaps has nothing
/// of them left.
#[test]
fn a_disk_of_another_size_keeps_its_marks() {
    const NAMES: [(&str, u64, bool); 3] = [("fine", 512, true), ("coarse", 4096, true), ("old", 512, false)];
    for kind in kinds().into_iter().filter(|kind| !kind.has_base) {
        let image: SharedStorage = Medium::new(kind.empty_image());
        block_on(async {
            for (name, granularity, _) in NAMES {
                add(&image, name, granularity).await;
            }
            let disk = open(&kind, &image).await.unwrap();
            let places = [5000, 300_000, (1 << 20) - 10];
            for at in places {
                disk.write(GuestOffset::new(at), Buffer::copy_of(&[1; 10]), WriteFlags::default())
                    .await
                    .unwrap();
            }
            disk.close().await.unwrap();
            bitmaps().change(&image, "old", &[BitmapChange::Disable]).await.unwrap();
            let mut models: Vec<BTreeSet<u64>> =
                NAMES.iter().map(|(_, granularity, _)| places.map(|at| at / granularity).into()).collect();
            let mut before = 1 << 20;
            for size in [3 << 20, (3 << 20) + 512, 64 << 20, 512 << 10, 600 << 10, 300_032, 400_896] {
                FormatKind::Qcow2.format().resize(&image, size, true).await.unwrap();
                must_be_clean(&image, kind.name).await;
                for ((name, granularity, is_enabled), model) in NAMES.iter().zip(&mut models) {
                    model.retain(|granule| granule * granularity < size);
                    if *is_enabled && size > before {
                        model.extend(before / granularity..size.div_ceil(*granularity));
                    }
                    let bits = bitmaps().load(&*image, name).await.unwrap();
                    let found = marked(&bits);
                    assert!(bits.size() == size && found == *model, "{}, {name}, {size}", kind.name);
                }
                before = size;
            }
            for (name, ..) in NAMES {
                bitmaps().change(&image, name, &[BitmapChange::Remove]).await.unwrap();
            }
            must_be_clean(&image, kind.name).await;
            assert!(bitmaps().list(&*image).await.unwrap().is_empty());
            assert!(Header::read(&*image).await.unwrap().bitmaps().is_none());
        });
    }
}

/// A backup has its name, but what it has cannot be given up, because the Nth operation of the host fails: then all of it is still
/// marked, in memory and, if the image can be closed, on the medium.
#[test]
fn what_cannot_be_given_up_stays_marked() {
    let mut met = 0;
    for kind in kinds() {
        for number in 0..40 {
            let when = format!("{}, operation {number}", kind.name);
            let (world, plan) = (World::new(0), FaultPlan::none());
            let options = DriveOptions { faults: plan.clone(), ..DriveOptions::default() };
            let drive = Drive::from_content(&world, kind.empty_image(), options);
            let image: SharedStorage = drive.clone();
            let closed = world.run(async {
                add(&image, "all", 512).await;
                let disk = open(&kind, &image).await.unwrap();
                let (near, far) = (GuestOffset::new(5000), GuestOffset::new(900_000));
                disk.write(near, Buffer::copy_of(&[1; 3000]), WriteFlags::FUA).await.unwrap();
                disk.close().await.unwrap();
                let disk = open(&kind, &image).await.unwrap();
                let written = number % 2 == 0;
                if written {
                    disk.write(far, Buffer::copy_of(&[1; 3000]), WriteFlags::FUA).await.unwrap();
                }
                let old = marked(&disk.begin_anew("all").unwrap());
                assert_eq!(old.len(), if written { 14 } else { 7 }, "{when}");
                let writes = Operation::Write | Operation::WriteZeroes | Operation::SetLen;
                plan.add(Fault { error: ErrorKind::NoSpace, ..Fault::nth(writes, number / 2) });
                let forgotten = disk.forget("all").await;
                plan.clear();
                let found = marked(&OpenBitmaps::load(&*disk, "all").await.unwrap());
                let expected = if forgotten.is_err() { old.clone() } else { BTreeSet::new() };
                assert_eq!(found, expected, "{when}");
                // The next backup has it.
                assert_eq!(marked(&disk.begin_anew("all").unwrap()), expected, "{when}");
                disk.take_back("all");
                met += usize::from(forgotten.is_err());
                disk.close().await.is_ok().then_some(expected)
            });
            if let Some(expected) = closed {
                let found = world.run(async { marked(&bitmaps().load(&*image, "all").await.unwrap()) });
                assert_eq!(found, expected, "{when}: on the medium");
            }
        }
    }
    assert!(met > 3, "{met}");
}

/// Directories, tables and bits with other bytes: nothing panics, what is written is there, and a bitmap that is then taken for valid
/// says so.
#[test]
#[allow(clippy::print_stderr, reason = "the counts are what the test is for")]
fn damaged_bitmaps_do_no_harm_to_the_disk() {
    let options = CreateOptions {
        size: 1 << 20,
        cluster_size: 512,
        journal: Some(64 << 10),
        ..CreateOptions::without_journal()
    };
    let kind = QcowSetup { name: "damaged", options, has_base: false };
    let medium = Medium::new(kind.empty_image());
    let image: SharedStorage = medium.clone();
    block_on(async {
        for (name, granularity) in [("one", 512), ("two", 4096)] {
            add(&image, name, granularity).await;
        }
        let disk = open(&kind, &image).await.unwrap();
        for at in [0, 200_000, 900_000] {
            let bytes = Buffer::copy_of(&[7; 3000]);
            disk.write(GuestOffset::new(at), bytes, WriteFlags::default()).await.unwrap();
        }
        disk.close().await.unwrap();
    });
    let sound = medium.content();
    let directory = block_on(Header::read(&*image)).unwrap().bitmaps().unwrap();
    let entry = directory.span.start();
    let fixed = block_on(image.read(entry, Buffer::zeroed(64))).unwrap().to_vec();
    let table = u64::from_be_bytes(fixed[..8].try_into().unwrap());
    let places = [(entry.bytes(), 64), (table, 64), (112, 200)];
    let (mut refused, mut void, mut kept) = (0, 0, 0);
    for seed in 0..600 * scale() {
        let mut random = Random::from_seed(seed);
        let medium = Medium::new(sound.clone());
        let image: SharedStorage = medium.clone();
        block_on(async {
            for _ in 0..1 + random.below(3) {
                let (start, len) = *random.pick(&places);
                let at = vellum_core::ImageOffset::new(start + random.below(len));
                let byte = match random.below(3) {
                    0 => 0,
                    1 => 0xFF,
                    _ => u8::try_from(random.below(256)).unwrap(),
                };
                image.write(at, Buffer::copy_of(&[byte])).await.unwrap();
            }
            let Ok(header) = Header::read(&*image).await else { return refused += 1 };
            for name in ["one", "two"] {
                let _ = bitmaps().load(&*image, name).await;
            }
            let Ok((before, _)) = look(&image).await else { return refused += 1 };
            let is_sound = before.is_clean();
            let copy: SharedStorage = Medium::new(medium.content());
            let name = *random.pick(&["one", "two"]);
            let changed = bitmaps().change(&copy, name, &[BitmapChange::Remove]).await;
            if changed.is_ok() && is_sound {
                must_be_clean(&copy, &format!("seed {seed}, removed")).await;
            }
            let Ok(disk) = open(&kind, &image).await else { return refused += 1 };
            let (at, bytes) = (GuestOffset::new(500_000), vec![9; 1000]);
            let written = disk.write(at, Buffer::copy_of(&bytes), WriteFlags::FUA).await;
            let closed = disk.close().await;
            if !is_sound {
                return refused += 1;
            }
            written.and(closed).unwrap_or_else(|error| panic!("seed {seed}: {}", error.chain()));
            let disk = open(&kind, &image).await.unwrap();
            let found = disk.read(at, Buffer::zeroed(1000)).await.unwrap().to_vec();
            assert!(found == bytes, "seed {seed}");
            disk.close().await.unwrap();
            let (after, lines) = look(&image).await.unwrap();
            assert!(after.corruptions == 0 && after.check_errors == 0, "seed {seed}: {}", lines.join("; "));
            let all = bitmaps().list(&*image).await.unwrap_or_default();
            if all.is_empty() {
                // The bit is cleared; what the bitmaps occupied is free for a repair.
                return void += 1;
            }
            assert_eq!(after.leaks, 0, "seed {seed}: {}", lines.join("; "));
            for one in all.iter().filter(|one| one.is_auto && !one.is_in_use) {
                if let Ok(bits) = bitmaps().load(&*image, &one.name).await {
                    let marked = bits.next_marked(at).expect("it is marked");
                    assert!(marked.start() <= at, "seed {seed}: {} says nothing", one.name);
                }
            }
            kept += 1;
            drop(header);
        });
    }
    eprintln!(
        "{refused} were damaged and refused or not judged, {void} lost their bitmaps, {kept} kept them"
    );
    assert!(refused > 50 && void > 10 && kept > 50, "{refused} {void} {kept}");
}
