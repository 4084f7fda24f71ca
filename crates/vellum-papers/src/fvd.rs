//! The rows of the paper FVD (USENIX ATC 2011), reproduced: the gain of a bitmap beside a linear image over
//! QCOW2.
//!
//! ```text
//!   disk    ├─ 1 GiB: root, over a base of 501 MB ─┤─ 50 GiB: ext3, PostMark ─────────┤
//!   image   raw │ linear over the base │ table over the base │ QCOW2 of QEMU 0.12      on a volume of the modelled drive
//! ```
//!
//! F1 to F4 are simulated: PostMark's file creation and its transactions, as [`crate::postmark`] generates
//! them. F3 and F4 come from the requests to the drive, F1 and F2 from virtual time alone, without the time
//! that programs take. The recorded trace, if there is one, is a small PostMark on another file system, with
//! flushes; its results are reported beside them. F5 to F8 are counts of real images.

use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use vellum_core::{
    Buffer, Disk, Error, GuestOffset, HostTally, ImageOffset, IoCounts, Limits, MemoryStorage, Result,
    SharedDisk, SharedStorage, WriteFlags,
};
use vellum_format::Raw;
use vellum_format::native::{CreateOptions, Native, NewBase, OpenOptions, Region, Superblock, create};
use vellum_lab::cost::lab::{Lab, Plan};
use vellum_lab::cost::strace::Call;
use vellum_lab::guest::{Bytes, Request};
use vellum_lab::subjects::{Base, qemu};
use vellum_lab::trace::Trace;
use vellum_sim::World;
use vellum_sim::model::{Medium, MediumCounts};

use crate::model::{ForgetfulDrive, Hdd, HddParameters};
use crate::old_qcow2::OldQcow2;
use crate::player::{Engine, Player};
use crate::postmark::{FILES, PostMark, Rounds, TRANSACTIONS};

const ROOT: u64 = 1 << 30;
const DISK: u64 = 51 << 30;
const BASE: u64 = 501_000_000 / 512 * 512;
/// What the drive keeps of an image: everything but guest data.
const KEPT: u64 = 64 << 20;
/// Writes that the guest has in flight, and the other depths that are tried.
const DEPTH: usize = 32;
const SEED: u64 = 1;

/// The engine under test.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Image {
    Raw,
    Linear,
    Table,
    Qcow2,
}

impl Image {
    pub(crate) const ALL: [Self; 4] = [Self::Raw, Self::Linear, Self::Table, Self::Qcow2];

    /// Whether the paper compares it.
    pub(crate) fn is_compared(self) -> bool {
        matches!(self, Self::Linear | Self::Qcow2)
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Linear => "vellum linear",
            Self::Table => "vellum table",
            Self::Qcow2 => "QCOW2, QEMU 0.12 (model)",
        }
    }
}

/// A drive, and how many writes the guest has in flight.
#[derive(Debug, Clone)]
pub(crate) struct Stage {
    pub(crate) name: String,
    pub(crate) drive: HddParameters,
    pub(crate) depth: usize,
    /// Whether the guest's directory spreads its names.
    pub(crate) is_hashed: bool,
    pub(crate) rounds: Rounds,
}

/// The drive of the paper, and those around it that make the band.
pub(crate) fn stages() -> Vec<Stage> {
    let drive = HddParameters::server_10k();
    let stage = |what: &str, drive: HddParameters, depth| Stage {
        name: format!("{}{what}", drive.name),
        drive,
        depth,
        is_hashed: true,
        rounds: Rounds::Counted,
    };
    vec![
        stage("", drive.clone(), DEPTH),
        stage(", half the seeks", drive.clone().with_seeks_percent(50), DEPTH),
        stage(", twice the seeks", drive.clone().with_seeks_percent(200), DEPTH),
        stage(", write cache of 16 MiB", HddParameters { cache_bytes: 16 << 20, ..drive.clone() }, DEPTH),
        stage(", 8 writes at a time", drive.clone(), DEPTH / 4),
        stage(", 128 writes at a time", drive.clone(), DEPTH * 4),
        Stage { is_hashed: false, ..stage(", names in the order of their coming", drive.clone(), DEPTH) },
        Stage { rounds: Rounds::Timed, ..stage(", a commit each 5 s", drive, DEPTH) },
        stage("", HddParameters::desktop_7200(), DEPTH),
    ]
}

/// What a phase took and what reached the medium.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Phase {
    pub(crate) seconds: f64,
    pub(crate) reads: u64,
    pub(crate) writes: u64,
    pub(crate) mebibytes_written: f64,
    pub(crate) average_seek_mebibytes: f64,
}

impl Phase {
    fn new(took: Duration, counts: MediumCounts) -> Self {
        let mebibytes = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        Self {
            seconds: took.as_secs_f64(),
            reads: counts.reads,
            writes: counts.writes,
            mebibytes_written: mebibytes(counts.bytes_written),
            average_seek_mebibytes: mebibytes(counts.average_seek_bytes()),
        }
    }

    pub(crate) fn operations(&self) -> u64 {
        self.reads + self.writes
    }
}

/// An image on a drive, with a guest on it.
struct Scene {
    world: World,
    medium: Medium,
    engine: Engine,
    depth: usize,
    metadata: HostTally,
}

impl Scene {
    fn new(image: Image, stage: &Stage) -> Result<Self> {
        let world = World::new(SEED);
        let medium = Medium::new(Hdd::new(stage.drive.clone()));
        let drive = ForgetfulDrive::new(&world, medium.clone(), Limits::plain(), DISK, KEPT);
        let storage: SharedStorage = drive;
        let metadata = HostTally::default();
        let engine = match image {
            Image::Raw => Engine::Disk(Raw::open(storage, false, &metadata)),
            Image::Qcow2 => Engine::Old(Box::new(OldQcow2::new(storage.clone())), storage),
            Image::Linear | Image::Table => {
                let base = NewBase { name: "base".to_owned(), size: BASE, ..NewBase::default() };
                let has_table = image == Image::Table;
                Engine::Disk(world.run(open(storage, has_table, base, &metadata))?)
            }
        };
        Ok(Self { world, medium, engine, depth: stage.depth, metadata })
    }

    /// One phase: all rounds, to the last answer.
    fn play(&self, mut round: impl FnMut(Duration) -> Option<Vec<Request>>) -> Result<Phase> {
        let (begun, counts) = (self.world.now(), self.medium.counts());
        let mut player = Player::new(&self.world, &self.engine, self.depth);
        self.world.run(async {
            while let Some(requests) = round(self.world.now()) {
                player.ask(&requests).await?;
            }
            player.drain().await
        })?;
        Ok(Phase::new(self.world.now() - begun, self.medium.counts() - counts))
    }
}

async fn open(
    storage: SharedStorage,
    has_table: bool,
    base: NewBase,
    tally: &HostTally,
) -> Result<SharedDisk> {
    let below = MemoryStorage::new("base");
    vellum_core::Storage::set_len(&*below, base.size).await?;
    let options = CreateOptions {
        size: DISK,
        has_table,
        base: Some(base),
        uuid: Some([7; 16]),
        ..CreateOptions::default()
    };
    create(&*storage, &options).await?;
    let options = OpenOptions { tally: tally.clone(), journal_key: Some(1), ..OpenOptions::default() };
    let below: SharedDisk = Raw::open(below, true, &HostTally::default());
    let disk = Native::open(storage, Some(below), options).await?;
    // The first change of an opening marks the image as in use, once. That is no part of what a write costs.
    disk.discard(GuestOffset::new(DISK - 4096).span(4096), WriteFlags::default()).await?;
    Ok(disk)
}

/// PostMark on an image.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Run {
    pub(crate) image: Image,
    pub(crate) stage: String,
    pub(crate) creation: Phase,
    pub(crate) transactions: Phase,
    /// What a native image wrote for itself.
    pub(crate) metadata_writes: u64,
}

/// A pool of one `scale`th of the paper's files, and as many transactions.
pub(crate) fn postmark(image: Image, stage: &Stage, scale: u64) -> Result<Run> {
    let scene = Scene::new(image, stage)?;
    let opened = own_writes(&scene.metadata);
    let mut guest = PostMark::new(ROOT, stage.is_hashed, stage.rounds, SEED);
    let creation = scene.play(|now| guest.creation_round(FILES / scale, now))?;
    let mut left = TRANSACTIONS / scale;
    let transactions = scene.play(|now| (left > 0).then(|| guest.transaction_round(&mut left, now)))?;
    if guest.end() > DISK {
        return Err(Error::invalid("the pool does not fit the disk"));
    }
    let metadata_writes = own_writes(&scene.metadata) - opened;
    Ok(Run { image, stage: stage.name.clone(), creation, transactions, metadata_writes })
}

fn own_writes(tally: &HostTally) -> u64 {
    let writes = |counts: IoCounts| counts.writes;
    writes(tally.metadata.counts()) + writes(tally.checkpoint.counts())
}

/// A recorded guest on the second partition: the requests of its workload.
pub(crate) fn recorded_requests() -> Result<Vec<Request>> {
    let trace = Trace::recorded("postmark_selfie_small")?;
    if trace.end > DISK - ROOT {
        return Err(Error::invalid("the trace needs a larger disk than the paper had"));
    }
    let behind = |request: Request| match request {
        Request::Write { offset, len } => Request::Write { offset: ROOT + offset, len },
        Request::WriteThrough { offset, len } => Request::WriteThrough { offset: ROOT + offset, len },
        Request::Read { offset, len } => Request::Read { offset: ROOT + offset, len },
        other => other,
    };
    let of_workload = |(phase, request): (Option<String>, Request)| {
        (phase.as_deref() == Some("w")).then(|| behind(request))
    };
    Ok(trace.requests.into_iter().filter_map(of_workload).collect())
}

/// Requests on an image.
pub(crate) fn replayed(image: Image, stage: &Stage, requests: Vec<Request>) -> Result<Phase> {
    let mut requests = Some(requests);
    Scene::new(image, stage)?.play(|_| requests.take())
}

/// The requests of today's QEMU to its host for these requests on a new qcow2, one at a time: as requests to
/// a raw disk. Ranges that it zeroes without writing are left out.
pub(crate) fn todays_log(lab: &Lab, mut requests: Vec<Request>) -> Result<Vec<Request>> {
    let subject = qemu("qemu qcow2", "qcow2", "", Base::Never);
    if let Some(reason) = lab.refusal(&subject)? {
        return Err(Error::invalid(reason));
    }
    requests.push(Request::Flush);
    let plan = Plan {
        disk_bytes: DISK,
        bytes: Bytes::Noise,
        fill: Vec::new(),
        warm_up: Vec::new(),
        counted: vec![requests],
    };
    let bytes = |bytes: u64| usize::try_from(bytes).expect("a call is short");
    let as_request = |call: Call| match call {
        Call { counts, .. } if counts.flushes > 0 => Some(Request::Flush),
        Call { counts, offset, .. } if counts.bytes_written > 0 => {
            Some(Request::Write { offset, len: bytes(counts.bytes_written) })
        }
        Call { bytes_read, offset, .. } if bytes_read > 0 => {
            Some(Request::Read { offset, len: bytes(bytes_read) })
        }
        _ => None,
    };
    Ok(lab.calls(&subject, &plan)?.into_iter().filter_map(as_request).collect())
}

/// What images of one TiB have on disk for themselves, in bytes: of the images as they are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Sizes {
    /// Over a base as large as the disk.
    pub(crate) bitmap: u64,
    /// For sub-blocks of blocks that were written in part; a hole until then.
    pub(crate) masks: u64,
    pub(crate) table: u64,
    /// Over a template of 10 GiB.
    pub(crate) template_bitmap: u64,
    pub(crate) journal: u64,
}

pub(crate) fn sizes() -> Result<Sizes> {
    let tib = 1u64 << 40;
    let made = |has_table: bool, base: u64| -> Result<Superblock> {
        let base = NewBase { name: "base".to_owned(), size: base, ..NewBase::default() };
        let options = CreateOptions {
            size: tib,
            has_table,
            base: Some(base),
            uuid: Some([7; 16]),
            ..CreateOptions::default()
        };
        let storage = MemoryStorage::new("image");
        World::new(SEED).run(create(&*storage, &options))
    };
    let region = |superblock: &Superblock, region| superblock.places().region(region).len();
    let (linear, template) = (made(false, tib)?, made(false, 10 << 30)?);
    // A new image gives its table the room that is left for the disk to grow: what a TiB asks for counts.
    let table = made(true, tib)?.places().shape().need(Region::Table);
    Ok(Sizes {
        bitmap: region(&linear, Region::Bitmap),
        masks: region(&linear, Region::Masks),
        table,
        template_bitmap: region(&template, Region::Bitmap),
        journal: region(&linear, Region::Journal),
    })
}

/// Writes of metadata for writes that the paper calls free: behind the base, and over zeros of the base. And
/// for one that is not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct FreeWrites {
    pub(crate) guest_writes: u64,
    pub(crate) metadata_writes: u64,
    pub(crate) metadata_writes_over_data: u64,
}

pub(crate) fn free_writes() -> Result<FreeWrites> {
    const ZEROS: u64 = 64 << 20;
    const WRITES: u64 = 512;
    let world = World::new(SEED);
    let storage = MemoryStorage::new("image");
    let tally = HostTally::default();
    let zeros = vec![GuestOffset::ZERO.span(ZEROS)];
    let base = NewBase { name: "base".to_owned(), size: 2 * ZEROS, zeros, ..NewBase::default() };
    world.run(async {
        let disk = open(storage.clone(), false, base, &tally).await?;
        let image: Arc<MemoryStorage> = storage;
        let opened = own_writes(&tally);
        let write = async |at: u64| {
            let data = Buffer::copy_of(&[7; 4096]);
            disk.write(GuestOffset::new(at), data, WriteFlags::FUA).await
        };
        let before = image.content();
        for i in 0..WRITES {
            let within = (i * 7919 % (ZEROS >> 12)) << 12;
            write(if i % 2 == 0 { within } else { 2 * ZEROS + within }).await?;
        }
        let metadata_writes = own_writes(&tally) - opened;
        if !same_head(&before, &image.content()) {
            return Err(Error::corrupt("what lies before the data has changed"));
        }
        write(ZEROS).await?;
        let metadata_writes_over_data = own_writes(&tally) - opened - metadata_writes;
        disk.close().await?;
        Ok(FreeWrites { guest_writes: WRITES, metadata_writes, metadata_writes_over_data })
    })
}

/// Whether everything before the data is the same, byte for byte.
fn same_head(one: &vellum_core::memory::SparseBytes, other: &vellum_core::memory::SparseBytes) -> bool {
    let read = |bytes: &vellum_core::memory::SparseBytes| {
        let mut head = vec![0; 1 << 20];
        bytes.read(ImageOffset::ZERO, &mut head);
        head
    };
    read(one) == read(other)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A two-hundredth of the paper's pool, small enough for each build; the same figures each time.
    const SCALE: u64 = 200;

    #[test]
    fn qcow2_asks_more_of_the_disk_and_goes_farther() {
        let stages = stages();
        let run = |image| postmark(image, &stages[0], SCALE).unwrap();
        let [raw, linear, table, qcow2] = Image::ALL.map(run);
        // F8: behind the base nothing is recorded. So the disk gets the same requests as for a raw image.
        assert_eq!((linear.metadata_writes, linear.transactions.reads), (0, raw.transactions.reads));
        assert_eq!(linear.creation.operations(), raw.creation.operations());
        assert!(table.metadata_writes > 0);
        // F3 and F4: 45 % more, 5.6 times as far.
        let (ours, theirs) = (linear.creation, qcow2.creation);
        assert!(theirs.operations() * 100 >= ours.operations() * 145, "{ours:?} {theirs:?}");
        assert!(theirs.average_seek_mebibytes >= 5.6 * ours.average_seek_mebibytes, "{ours:?} {theirs:?}");
        // It moves no less than the guest requests, and no bytes are lost.
        assert!((ours.mebibytes_written - raw.creation.mebibytes_written).abs() < f64::EPSILON);
        assert!(theirs.mebibytes_written > ours.mebibytes_written);
        // Virtual time: the same each time.
        let again = run(Image::Qcow2);
        assert_eq!((again.creation, again.transactions), (qcow2.creation, qcow2.transactions));
        // F2 on this model, and that a table costs little.
        assert!(qcow2.transactions.seconds > linear.transactions.seconds * 1.77);
        assert!(table.transactions.operations() < linear.transactions.operations() * 5 / 4);
    }

    #[test]
    fn sizes_are_those_of_the_paper() {
        let Sizes { bitmap, table, template_bitmap, journal, .. } = sizes().unwrap();
        assert_eq!((bitmap, table), (2 << 20, 4 << 20), "F5");
        assert_eq!(template_bitmap, 20 << 10, "F6");
        assert_eq!(journal, 16 << 20, "F7");
    }

    #[test]
    fn free_writes_update_nothing_on_disk() {
        let free = free_writes().unwrap();
        assert_eq!((free.guest_writes, free.metadata_writes), (512, 0), "F8");
        assert!(free.metadata_writes_over_data > 0, "one over data of the base is seen");
    }
}
