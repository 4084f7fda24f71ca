//! A race of guests that own sectors, on an image of the native format: see `own.rs`. It returns what a guest finds that is
//! not as it left it.

#![allow(dead_code, reason = "each test file uses its part")]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_lite::future::block_on;
use vellum_core::{
    Buffer, Disk, ErrorKind, GuestOffset, Random, SharedStorage, WriteFlags, ZeroFlags, fill_from_below,
};
use vellum_format::native::{Native, OpenOptions, Superblocks, create};
use vellum_format::{Prealloc, perturb};

use super::common::native::{NativeSetup, look_native};
use super::volatile::{Volatile, index};

const UNIT: u64 = 64 << 10;
/// The disk has two pages of table.
const SIZE: u64 = 128 << 20;
const FAR: u64 = 1024;
/// Units of which each guest owns every fourth sector of the first ones.
const SHARED: [u64; 4] = [0, 1, FAR, 3];
const SHARED_SECTORS: u64 = 32;
const GUESTS: u64 = 4;
/// Units of the guest that lets them go and takes them again.
const WHOLE: [u64; 5] = [4, 5, FAR + 1, 7, FAR + 2];
/// Requests of each guest.
const REQUESTS: u64 = 200;

/// What the guests race over.
#[derive(Clone)]
pub(crate) struct Kind {
    pub(crate) setup: NativeSetup,
    /// Units that the device has, if it is one.
    device: Option<u64>,
    compaction: bool,
    prealloc: Prealloc,
    has_snapshots: bool,
}

impl Kind {
    fn of(setup: NativeSetup) -> Self {
        Self { setup, device: None, compaction: false, prealloc: Prealloc::Off, has_snapshots: true }
    }
}

pub(crate) fn table() -> Kind {
    Kind::of(NativeSetup::table("table", SIZE, UNIT))
}

pub(crate) fn zoned() -> Kind {
    Kind::of(NativeSetup::zoned("zoned", SIZE, UNIT, 4 * UNIT))
}

/// Zones are emptied where there is room elsewhere.
fn compacted() -> Kind {
    let setup = NativeSetup::zoned("zoned, compacted", SIZE, UNIT, 2 * UNIT);
    Kind { device: Some(48), compaction: true, has_snapshots: false, ..Kind::of(setup) }
}

/// A device with room for this many units, of which the guests use [`USED`] when all are written.
pub(crate) fn nearly_full(units: u64) -> Kind {
    let kind = compacted();
    let image = Volatile::device(8 << 20);
    let superblocks = block_on(async {
        create(&*image, &kind.setup.create_options()).await.unwrap();
        Superblocks::read(&*image).await.unwrap()
    });
    let before = superblocks.superblock.places().data_offset().bytes() - (1 << 20);
    Kind { device: Some(before / UNIT + units), ..kind }
}

/// Units that the guests use.
pub(crate) const USED: u64 = SHARED.len() as u64 + WHOLE.len() as u64;

fn zeros() -> Vec<u8> {
    vec![0; index(SIZE / 2 + 2 * UNIT)]
}

pub(crate) fn over_a_base() -> Kind {
    Kind::of(NativeSetup::table("table over a base", SIZE, UNIT).over(zeros(), 16 << 10))
}

pub(crate) fn kinds() -> Vec<Kind> {
    let zoned_over_a_base =
        NativeSetup::zoned("zoned over a base", SIZE, UNIT, 4 * UNIT).over(zeros(), 16 << 10);
    let on_a_device = NativeSetup::zoned("zoned, on a device", SIZE, UNIT, 2 * UNIT);
    vec![
        table(),
        over_a_base(),
        zoned(),
        Kind { prealloc: Prealloc::Fixed(256 << 10), ..Kind::of(zoned_over_a_base) },
        compacted(),
        Kind { device: Some(120), compaction: true, ..Kind::of(on_a_device) },
    ]
}

/// What a guest has to say when something is not as it was.
pub(crate) type Outcome = Result<(), String>;

struct Fixture<'a> {
    disk: &'a Arc<Native>,
    seed: u64,
    /// What each thread does first.
    on_thread: fn(),
    has_ended: AtomicBool,
    threads: AtomicU64,
}

impl Fixture<'_> {
    /// A thread begins.
    fn begin(&self) -> Random {
        let thread = self.threads.fetch_add(1, Ordering::SeqCst);
        (self.on_thread)();
        perturb::begin(self.seed, thread);
        Random::from_seed(self.seed * 16 + thread)
    }

    fn read(&self, at: u64, len: usize) -> Vec<u8> {
        block_on(self.disk.read(GuestOffset::new(at), Buffer::zeroed(len))).unwrap().to_vec()
    }

    /// Where the device is nearly full other requests may have the free units; not forever.
    fn write(&self, at: u64, bytes: &[u8], fua: bool) -> Outcome {
        for _ in 0..1000 {
            let written =
                block_on(self.disk.write(GuestOffset::new(at), Buffer::copy_of(bytes), WriteFlags { fua }));
            match written {
                Ok(()) => return Ok(()),
                Err(error) if error.kind() == ErrorKind::NoSpace => std::thread::yield_now(),
                Err(error) => return Err(error.chain()),
            }
        }
        Err(format!("at {at}: no space for ever"))
    }

    /// A guest of which every fourth sector is. Returns what they hold.
    fn sectors(&self, guest: u64) -> Result<BTreeMap<u64, u64>, String> {
        let mut random = self.begin();
        let mut model = BTreeMap::new();
        for number in 1..=REQUESTS {
            let unit = *random.pick(&SHARED);
            let at = unit * UNIT + (random.below(SHARED_SECTORS / GUESTS) * GUESTS + guest) * 512;
            let span = GuestOffset::new(at).span(512);
            let fua = random.one_in(16);
            match random.below(12) {
                0 => block_on(self.disk.flush()).unwrap(),
                1 => {
                    let flags = ZeroFlags { fua, may_unmap: random.one_in(2), fast_only: false };
                    block_on(self.disk.write_zeroes(span, flags)).unwrap();
                    model.insert(at, 0);
                }
                _ => {
                    let value = number << 8 | guest | 1 << 63;
                    self.write(at, &value.to_be_bytes().repeat(64), fua)?;
                    model.insert(at, value);
                }
            }
            if random.one_in(2) {
                self.sector_is(at, model.get(&at).copied().unwrap_or(0))?;
            }
        }
        for (at, value) in &model {
            self.sector_is(*at, *value)?;
        }
        Ok(model)
    }

    fn sector_is(&self, at: u64, value: u64) -> Outcome {
        let bytes = self.read(at, 512);
        match bytes.chunks(8).all(|word| word == value.to_be_bytes()) {
            true => Ok(()),
            false => Err(format!("at {at}: {:02x?} in place of {value:#x}", &bytes[..8])),
        }
    }

    /// A guest with units to itself. Returns the byte that each holds.
    fn units(&self) -> Result<BTreeMap<u64, u8>, String> {
        let mut random = self.begin();
        let mut model = BTreeMap::new();
        for number in 0..REQUESTS / 4 {
            let unit = *random.pick(&WHOLE);
            let span = GuestOffset::new(unit * UNIT).span(UNIT);
            let byte = u8::try_from(1 + number % 200).unwrap();
            if random.one_in(2) {
                block_on(self.disk.discard(span, WriteFlags::default())).unwrap();
                block_on(self.disk.write_zeroes(span, ZeroFlags { may_unmap: true, ..Default::default() }))
                    .unwrap();
                model.insert(unit, 0);
            }
            if random.one_in(2) {
                self.write(unit * UNIT, &vec![byte; index(UNIT)], false)?;
                model.insert(unit, byte);
            }
            let should = model.get(&unit).copied().unwrap_or(0);
            if self.read(unit * UNIT, index(UNIT)).iter().any(|is| *is != should) {
                return Err(format!("unit {unit} does not hold {should} everywhere"));
            }
        }
        Ok(model)
    }

    /// What a snapshot reads as, where anybody writes.
    fn seen(disk: &dyn Disk) -> Vec<u8> {
        let mut seen = Vec::new();
        let shared = SHARED.map(|unit| (unit, SHARED_SECTORS * 512));
        for (unit, len) in shared.into_iter().chain(WHOLE.map(|unit| (unit, 4096))) {
            let read = disk.read(GuestOffset::new(unit * UNIT), Buffer::zeroed(index(len)));
            seen.extend(block_on(read).unwrap().to_vec());
        }
        seen
    }

    /// A task that makes snapshots, checks them and deletes them. Returns those that are left.
    fn snapshots(&self) -> Result<BTreeMap<u32, Vec<u8>>, String> {
        let mut random = self.begin();
        let mut taken = BTreeMap::new();
        for number in 0.. {
            if self.has_ended.load(Ordering::SeqCst) {
                break;
            }
            let id = match block_on(self.disk.snapshot_create(&format!("s{number}"), 0)) {
                Ok(id) => id,
                Err(error) if error.kind() == ErrorKind::NoSpace => continue,
                Err(error) => return Err(error.chain()),
            };
            taken.insert(id, Self::seen(&*self.disk.snapshot_open(id).unwrap()));
            while taken.len() > 1 || random.one_in(2) {
                // The newest as often as any other.
                let id = match random.one_in(2) {
                    true => taken.keys().last().copied(),
                    false => taken.keys().nth(random.index(taken.len().max(1))).copied(),
                };
                let Some(id) = id else { break };
                let before = taken.remove(&id).unwrap();
                if Self::seen(&*self.disk.snapshot_open(id).unwrap()) != before {
                    return Err(format!("snapshot {id} has changed"));
                }
                block_on(self.disk.snapshot_delete(&id.to_string())).map_err(|error| error.chain())?;
            }
        }
        Ok(taken)
    }

    /// A task that fills the disk where guests write.
    fn fill(&self) {
        let random = self.begin();
        fill_beside(&**self.disk, random, &self.has_ended);
    }

    /// A task that tends the disk, with long pauses in between.
    fn tend(&self) {
        self.begin();
        let mut seconds = 0;
        while !self.has_ended.load(Ordering::SeqCst) {
            seconds += 3;
            while block_on(self.disk.tend(Duration::from_secs(seconds))) {}
            std::thread::yield_now();
        }
    }
}

/// Fills a disk until that is to end, here and there.
pub(crate) fn fill_beside(disk: &dyn Disk, mut random: Random, has_ended: &AtomicBool) {
    while disk.filling().is_some() && !has_ended.load(Ordering::SeqCst) {
        let places = SHARED.map(|unit| unit * UNIT).into_iter().chain([random.below(disk.geometry().size)]);
        let at = *random.pick(&places.filter(|at| *at < disk.geometry().size).collect::<Vec<_>>());
        match block_on(fill_from_below(disk, GuestOffset::new(at).span(1 + random.below(100_000)))) {
            Ok(filled) if filled.wants_flush && random.one_in(4) => block_on(disk.flush()).unwrap(),
            Ok(_) => {}
            Err(error) => assert_eq!(error.kind(), ErrorKind::NoSpace, "{}", error.chain()),
        }
        std::thread::yield_now();
    }
}

pub(crate) fn race(kind: &Kind, seed: u64, on_thread: fn()) -> Outcome {
    let image = match kind.device {
        None => Volatile::new(),
        Some(units) => Volatile::device((1 << 20) + units * UNIT),
    };
    block_on(create(&*image, &kind.setup.create_options())).unwrap();
    let open = |image: &Arc<Volatile>| {
        let options =
            OpenOptions { prealloc: kind.prealloc, compaction: kind.compaction, ..OpenOptions::default() };
        block_on(Native::open(image.clone(), kind.setup.below(), options)).unwrap()
    };
    let disk = open(&image);
    let fixture = Fixture {
        disk: &disk,
        seed,
        on_thread,
        has_ended: AtomicBool::new(false),
        threads: AtomicU64::new(0),
    };
    let wrong = Mutex::new(None);
    let note = |outcome: Outcome| {
        if let Err(what) = outcome {
            wrong.lock().unwrap().get_or_insert(what);
        }
    };
    let (mut sectors, mut units, mut taken) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
    std::thread::scope(|scope| {
        let fixture = &fixture;
        let guests: Vec<_> = (0..GUESTS).map(|guest| scope.spawn(move || fixture.sectors(guest))).collect();
        let whole = scope.spawn(|| fixture.units());
        let tender = scope.spawn(|| fixture.tend());
        let filler = scope.spawn(|| fixture.fill());
        let snapshots = kind.has_snapshots.then(|| scope.spawn(|| fixture.snapshots()));
        for guest in guests {
            note(guest.join().unwrap().map(|mut model| sectors.append(&mut model)));
        }
        note(whole.join().unwrap().map(|model| units = model));
        fixture.has_ended.store(true, Ordering::SeqCst);
        tender.join().unwrap();
        filler.join().unwrap();
        if let Some(snapshots) = snapshots {
            note(snapshots.join().unwrap().map(|left| taken = left));
        }
    });
    if let Some(what) = wrong.into_inner().unwrap() {
        return Err(what);
    }
    let is_cut = seed.is_multiple_of(2);
    let left = match is_cut {
        true => {
            block_on(disk.flush()).unwrap();
            Volatile::holding(image.after_power_cut(), &image)
        }
        false => {
            block_on(disk.close()).unwrap();
            image
        }
    };
    drop(disk);
    let again = open(&left);
    let fixture = Fixture {
        disk: &again,
        seed,
        on_thread,
        has_ended: AtomicBool::new(true),
        threads: AtomicU64::new(0),
    };
    for (at, value) in sectors {
        fixture.sector_is(at, value).map_err(|what| format!("opened again: {what}"))?;
    }
    for (unit, byte) in units {
        if fixture.read(unit * UNIT, index(UNIT)).iter().any(|is| *is != byte) {
            return Err(format!("opened again: unit {unit} does not hold {byte} everywhere"));
        }
    }
    for (id, before) in taken {
        if Fixture::seen(&*again.snapshot_open(id).unwrap()) != before {
            return Err(format!("opened again: snapshot {id} has changed"));
        }
    }
    block_on(again.close()).unwrap();
    let shared: SharedStorage = left;
    let (report, lines) = block_on(look_native(&shared)).unwrap();
    if report.is_clean() { Ok(()) } else { Err(lines.join("; ")) }
}
