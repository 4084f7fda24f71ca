//! The file itself, without a file system on it: compared with a copy in memory, as `fsx` does, and killed.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::Duration;

use rustix::fs::{FallocateFlags, OFlags, SeekFrom, fallocate, seek};
use rustix::io::Errno;
use vellum_core::{Buffer, Random};

use super::model::{Content, Model, SECTOR};
use super::shown::{Shown, is_here};
use super::support::client::Client;
use super::support::dir::Dir;
use super::support::{first_difference, scale, until};
use super::{KINDS, Kind, MIB, seed};

/// No multiple of a page, as disks need not be.
const SIZE: usize = 6 * MIB + 3 * 512;
const STEPS: usize = 400;

/// The file twice, as programs open it: with and without `O_DIRECT`, which requires aligned memory and
/// offsets.
struct Hands {
    plain: File,
    direct: File,
}

impl Hands {
    fn on(path: &Path) -> Self {
        let open = |flags: OFlags| {
            let flags = i32::try_from(flags.bits()).expect("a flag");
            OpenOptions::new().read(true).write(true).custom_flags(flags).open(path).expect("the file")
        };
        Self { plain: open(OFlags::empty()), direct: open(OFlags::DIRECT) }
    }
}

/// A run of bytes, most of them short, many of them meeting each other.
fn run_in(random: &mut Random, size: usize, is_aligned: bool) -> (usize, usize) {
    let longest = *random.pick(&[300, 5000, 70_000, 2 * MIB]);
    let grain = if is_aligned { 512 } else { 1 };
    let reach = if random.one_in(2) { size } else { size / 16 };
    let at = random.index(reach) / grain * grain;
    let len = (1 + random.index(longest)).next_multiple_of(grain).min(size - at);
    (at, len)
}

fn step(hands: &Hands, shadow: &mut [u8], random: &mut Random) {
    let is_direct = random.one_in(3);
    let (at, len) = run_in(random, shadow.len(), is_direct);
    let (place, end) = (at as u64, at + len);
    let file = if is_direct { &hands.direct } else { &hands.plain };
    match random.below(10) {
        0..4 => {
            let mut bytes = Buffer::zeroed(len);
            random.fill(bytes.slice_mut());
            file.write_all_at(bytes.slice(), place).expect("a write");
            shadow[at..end].copy_from_slice(bytes.slice());
        }
        4..7 => {
            let mut bytes = Buffer::zeroed(len);
            file.read_exact_at(bytes.slice_mut(), place).expect("a read");
            let differs = first_difference(bytes.slice(), &shadow[at..end]);
            assert_eq!(differs.map(|byte| at + byte), None, "read {at}+{len}");
        }
        7 => {
            let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let how = *random.pick(&[punch, FallocateFlags::ZERO_RANGE]);
            fallocate(file, how, place, len as u64).expect("zeros");
            shadow[at..end].fill(0);
        }
        8 => file.sync_data().expect("a sync"),
        _ => look_for_holes(file, shadow),
    }
}

/// `lseek` from one end to the other: holes are zero, and data and holes take turns.
fn look_for_holes(file: &File, shadow: &[u8]) {
    let mut at = 0;
    while at < shadow.len() {
        let data = match seek(file, SeekFrom::Data(at as u64)) {
            Ok(data) => usize::try_from(data).expect("small"),
            Err(Errno::NXIO) => shadow.len(),
            Err(error) => panic!("SEEK_DATA from {at}: {error}"),
        };
        assert!(data >= at && shadow[at..data].iter().all(|byte| *byte == 0), "a hole {at}..{data} has data");
        if data == shadow.len() {
            break;
        }
        let hole =
            usize::try_from(seek(file, SeekFrom::Hole(data as u64)).expect("SEEK_HOLE")).expect("small");
        assert!(hole > data && hole <= shadow.len(), "the hole behind {data} is at {hole}");
        at = hole;
    }
    let nothing = seek(file, SeekFrom::Data(shadow.len() as u64));
    assert_eq!(nothing, Err(Errno::NXIO), "there is nothing at the end");
}

/// Random steps on one file; the server ends and is started again in between, and NBD sees the same data
/// throughout.
fn random_steps(kind: &Kind, ways: &[&str]) {
    let dir = Dir::new("fuse-file");
    let image = kind.make(&dir, SIZE);
    let mut random = Random::from_seed(seed() ^ kind.name.len() as u64);
    let mut shadow = vec![0; SIZE];
    for _ in 0..2 {
        let shown = Shown::start(&dir.join("disk"), &[&[&image, "-f", kind.format], ways].concat());
        let facts = std::fs::metadata(&shown.file).expect("the file");
        assert!(facts.is_file() && facts.len() == SIZE as u64, "{facts:?}");
        // The space of the image, as `du` reports it. It may have grown since, in the background.
        let takes = std::fs::metadata(&image).expect("the image").blocks();
        assert!(facts.blocks() <= takes, "{} blocks, and the image takes {takes}", facts.blocks());
        let hands = Hands::on(&shown.file);
        let mut nbd = Client::connect(&shown.server().peer(), "").expect("NBD");
        for _ in 0..STEPS * scale() {
            step(&hands, &mut shadow, &mut random);
            if random.one_in(20) {
                let (at, len) = run_in(&mut random, SIZE.min(64 << 10), true);
                let bytes = nbd.read(at as u64, u32::try_from(len).expect("short")).expect("a read by NBD");
                assert_eq!(first_difference(&bytes, &shadow[at..at + len]), None, "NBD reads {at}+{len}");
                random.fill(&mut shadow[at..at + len]);
                nbd.write(at as u64, &shadow[at..at + len], 0).expect("a write by NBD");
            }
        }
        drop(hands);
        assert_eq!(first_difference(&std::fs::read(&shown.file).expect("all of it"), &shadow), None);
        shown.stop();
        kind.is_sound(&image);
    }
}

#[test]
fn random_steps_leave_what_they_should() {
    if !is_here() {
        return;
    }
    for (kind, ways) in
        KINDS.iter().zip([&[][..], &["--io", "threads"], &["--threads", "1"], &[], &["--direct"]])
    {
        let result = std::panic::catch_unwind(|| random_steps(kind, ways));
        result.unwrap_or_else(|panic| {
            let what = panic.downcast_ref::<String>().map_or("?", String::as_str);
            panic!("{} {ways:?}, seed {}: {what}", kind.name, seed())
        });
    }
}

/// A guest of the file: writes, zeros and syncs until the server is gone, and remembers every answer.
fn work(path: &Path, model: &Model, mut random: Random) -> io::Result<()> {
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    let sectors = model.sectors();
    loop {
        let reach = if random.one_in(3) { sectors } else { sectors / 8 };
        let first = random.index(reach);
        let longest = if random.one_in(8) { 256 } else { 24 };
        let count = (1 + random.index(longest)).min(sectors - first);
        let (at, len) = ((first * SECTOR) as u64, (count * SECTOR) as u64);
        match random.below(12) {
            0 => {
                let sent = model.flush_sent();
                file.sync_data()?;
                model.flush_answered(sent);
            }
            1 => {
                let number = model.write_sent(first, count, Content::Zero, false);
                fallocate(&file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, at, len)?;
                model.write_answered(number);
            }
            _ => {
                let number = model.write_sent(first, count, Content::Pattern, false);
                file.write_all_at(&model.bytes(number, first, count), at)?;
                model.write_answered(number);
            }
        }
    }
}

#[test]
fn what_was_synced_survives_a_kill() {
    if !is_here() {
        return;
    }
    let size = 6 * MIB;
    for kind in KINDS {
        let dir = Dir::new("fuse-kill");
        let image = kind.make(&dir, size);
        let mut random = Random::from_seed(seed() ^ 77 ^ kind.name.len() as u64);
        let mut bytes = vec![0; size];
        for round in 0..2 * scale() {
            let mut shown = Shown::start(&dir.join("disk"), &[&image, "-f", kind.format]);
            let model = Model::new(std::mem::take(&mut bytes), random.any());
            std::thread::scope(|scope| {
                for _ in 0..3 {
                    let (path, model, random) = (shown.file.clone(), &model, random.fork());
                    scope.spawn(move || work(&path, model, random).expect_err("the server is killed"));
                }
                until("something was answered", || model.counts().0 > 0);
                std::thread::sleep(Duration::from_millis(30 + random.below(200)));
                shown.kill();
            });
            drop(shown);
            let shown = Shown::start(&dir.join("disk"), &[&image, "-f", kind.format]);
            bytes = std::fs::read(&shown.file).expect("all of it");
            shown.stop();
            kind.is_sound(&image);
            model.judge(&bytes).unwrap_or_else(|what| {
                panic!("{}, round {round}, seed {}: {what}", kind.name, seed());
            });
            assert!(model.counts().0 > 0, "{}: nothing was answered", kind.name);
        }
    }
}
