//! Recorded guests on the images: `mkfs.ext4`, and PostMark on the file system that it made.
//!
//! A trace records what a guest requested of its disk, and when it flushed; its times are not used. Between
//! two flushes as many requests are in flight as a page cache sends. Zeros are written, because guests of
//! that time had no other way. The bytes were not recorded: those of `mkfs` are compressible, and of
//! PostMark's blocks as many as its parameters say (`NOISE_PERCENT`).

use std::collections::HashSet;
use std::sync::Arc;

use serde::Serialize;
use vellum_core::{Error, Result};
use vellum_lab::guest::{Bytes, Request};
use vellum_lab::trace::Trace;

use super::scene::{DISK, Scene};
use super::{Image, REQUEST, Stage, UNIT};

const BLOCK: usize = 4096;
/// Requests in flight at once between two flushes.
const DEPTH: u64 = 32;
/// Of PostMark's blocks. Its text is drawn at random, and LZ4 makes nothing shorter that does not come twice;
/// so a block packs when it is the end of a file. Of files of 500 to 10,000 bytes 448 of 1000 blocks are
/// full.
const NOISE_PERCENT: u64 = 45;

/// The requests of a guest: those before the measurement, and those that count.
#[derive(Debug, Clone, Default)]
pub(crate) struct Recorded {
    pub(crate) before: Vec<Request>,
    pub(crate) counted: Vec<Request>,
    /// The percentage of its blocks that is incompressible.
    pub(crate) noise_percent: u64,
}

/// What it took.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Played {
    pub(crate) seconds: f64,
    /// What reached the image.
    pub(crate) writes: u64,
    pub(crate) flushes: u64,
    /// Units with an embedded entry.
    pub(crate) packed: u64,
}

/// How much of what is written was written before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Overwrites {
    /// Writes, each counted once for each unit that it touches.
    pub(crate) writes: u64,
    /// Those to a unit that was written before.
    pub(crate) again: u64,
    /// Units written for the first time.
    pub(crate) units: u64,
}

impl Recorded {
    /// `mkfs.ext4` of 8 GiB.
    pub(crate) fn mkfs() -> Result<Self> {
        Self::mkfs_in(REQUEST)
    }

    /// The same, in requests of at most this length.
    pub(crate) fn mkfs_in(request: usize) -> Result<Self> {
        let trace = Trace::recorded("mkfs_ext4_8g")?;
        Ok(Self { counted: cut(&phase(&trace, "m"), request), ..Self::default() })
    }

    /// PostMark, a twentieth of the paper's files and transactions.
    pub(crate) fn postmark() -> Result<Self> {
        let trace = Trace::recorded("postmark_selfie_small")?;
        Ok(Self::of(&trace))
    }

    /// Any trace that has phases.
    pub(crate) fn of(trace: &Trace) -> Self {
        Self { before: phase(trace, "m"), counted: phase(trace, "w"), noise_percent: NOISE_PERCENT }
    }

    /// What is written again, counted: no drive, no image.
    pub(crate) fn overwrites(&self) -> Overwrites {
        let mut seen = HashSet::new();
        let units = |request: &Request| match *request {
            Request::Write { offset, len } | Request::WriteThrough { offset, len } => {
                offset / UNIT as u64..(offset + len as u64).div_ceil(UNIT as u64)
            }
            _ => 0..0,
        };
        seen.extend(self.before.iter().flat_map(units));
        let mut counts = Overwrites { writes: 0, again: 0, units: 0 };
        for unit in self.counted.iter().flat_map(units) {
            let is_new = seen.insert(unit);
            counts.writes += 1;
            counts.again += u64::from(!is_new);
            counts.units += u64::from(is_new);
        }
        counts
    }
}

/// A phase, as requests to a disk.
fn phase(trace: &Trace, name: &str) -> Vec<Request> {
    let of_it = trace.requests.iter().filter(|(phase, _)| phase.as_deref() == Some(name));
    let mut requests = Vec::new();
    for (_, request) in of_it {
        match *request {
            Request::Write { offset, len } | Request::Zero { offset, len } => {
                requests.extend((0..len).step_by(REQUEST).map(|from| Request::Write {
                    offset: offset + from as u64,
                    len: REQUEST.min(len - from),
                }));
            }
            Request::WriteThrough { offset, len } => {
                requests.extend([Request::Write { offset, len }, Request::Flush]);
            }
            Request::Read { .. } | Request::Flush => requests.push(*request),
            // Volumes of then had no discards.
            Request::Discard { .. } => {}
        }
    }
    requests
}

/// The same writes, in requests of at most this length.
fn cut(requests: &[Request], most: usize) -> Vec<Request> {
    let pieces = |request: &Request| match *request {
        Request::Write { offset, len } => (0..len)
            .step_by(most)
            .map(|from| Request::Write { offset: offset + from as u64, len: most.min(len - from) })
            .collect(),
        other => vec![other],
    };
    requests.iter().flat_map(pieces).collect()
}

/// The content of a block of the disk: the same each time.
fn is_noise(block: u64, percent: u64) -> bool {
    (block.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) % 100 < percent
}

/// Whose bytes a request takes.
struct Content {
    same: Vec<u8>,
    noise: Vec<u8>,
    noise_percent: u64,
}

impl Content {
    fn new(noise_percent: u64) -> Arc<Self> {
        let (same, noise) = (Bytes::Same.make(BLOCK), Bytes::Noise.make(BLOCK));
        Arc::new(Self { same, noise, noise_percent })
    }

    fn of(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(len);
        while bytes.len() < len {
            let at = offset + bytes.len() as u64;
            let within = usize::try_from(at % BLOCK as u64).expect("within a block");
            let now = (BLOCK - within).min(len - bytes.len());
            let block =
                if is_noise(at / BLOCK as u64, self.noise_percent) { &self.noise } else { &self.same };
            bytes.extend_from_slice(&block[within..within + now]);
        }
        bytes
    }
}

impl Scene {
    /// Sends requests, this many at once, and waits for all of them at each flush.
    fn ask(&self, requests: &[Request], depth: u64, content: &Arc<Content>) -> Result<()> {
        for batch in requests.split_inclusive(|request| *request == Request::Flush) {
            let content = content.clone();
            let requests = Vec::from(batch);
            self.work(depth, requests.into_iter(), move |engine, request| {
                let content = content.clone();
                async move {
                    match request {
                        Request::Write { offset, len } => {
                            engine.write(offset, &content.of(offset, len)).await
                        }
                        Request::Read { offset, len } => engine.read(offset, len).await,
                        _ => Ok(()),
                    }
                }
            })?;
            if batch.last() == Some(&Request::Flush) {
                self.flush()?;
            }
        }
        Ok(())
    }
}

/// A recorded guest on an image. What it wrote is on the drive at the end.
pub(crate) fn play(image: Image, stage: Stage, guest: &Recorded) -> Result<Played> {
    let end = guest.counted.iter().chain(&guest.before).map(|request| match *request {
        Request::Write { offset, len } | Request::Read { offset, len } => offset + len as u64,
        _ => 0,
    });
    if end.max().is_some_and(|end| end > DISK) {
        return Err(Error::invalid("the trace needs a larger disk than the paper had"));
    }
    let scene = Scene::new(image, stage, DISK)?;
    let packing = Content::new(0);
    match guest.before.is_empty() {
        true => scene.make_ready(DISK - REQUEST as u64)?,
        false => {
            scene.ask(&guest.before, DEPTH, &packing)?;
            scene.idle();
        }
    }
    let (before, packed) = (scene.drive.counts(), scene.drive.packed());
    let seconds = scene.time(|| {
        scene.ask(&guest.counted, DEPTH, &Content::new(guest.noise_percent))?;
        scene.flush()
    })?;
    let counts = scene.drive.counts() - before;
    let packed = scene.drive.packed() - packed;
    Ok(Played { seconds, writes: counts.writes, flushes: counts.flushes, packed })
}

/// Calls of a program, one after the other, on the raw drive: seconds.
pub(crate) fn replayed_log(stage: Stage, log: &[Request]) -> Result<f64> {
    let scene = Scene::new(Image::Host, stage, DISK)?;
    scene.time(|| scene.ask(log, 1, &Content::new(0)))
}

#[cfg(test)]
mod tests {
    use super::super::{Below, Drive};
    use super::*;

    fn write(offset: u64, len: usize) -> Request {
        Request::Write { offset, len }
    }

    #[test]
    fn shorter_requests_are_the_same_bytes() {
        let requests = [write(512, 300), Request::Flush, write(4096, 1000)];
        let expected =
            [write(512, 300), Request::Flush, write(4096, 400), write(4496, 400), write(4896, 200)];
        assert_eq!(cut(&requests, 400), expected);
        assert_eq!(Recorded::mkfs_in(REQUEST).unwrap().counted, Recorded::mkfs().unwrap().counted);
    }

    #[test]
    fn what_is_written_again_is_counted_by_units() {
        let unit = UNIT as u64;
        let guest = Recorded {
            before: vec![write(0, 4096)],
            counted: vec![write(4096, 4096), write(unit, 2 * UNIT), Request::Flush, write(2 * unit, 512)],
            noise_percent: 0,
        };
        assert_eq!(guest.overwrites(), Overwrites { writes: 4, again: 2, units: 2 });
    }

    #[test]
    fn a_guest_costs_what_the_model_says_and_its_packing_units_tell_of_themselves() {
        let stage = Stage { drive: Drive::Hdd, below: Below::ThinVolume, packs: 100 };
        let requests = (0..32).map(|index| write(index << 20, UNIT)).chain([Request::Flush]).collect();
        let guest =
            |noise_percent| Recorded { counted: Vec::clone(&requests), noise_percent, ..Recorded::default() };
        let [packs, noise] = [0, 100].map(|percent| play(Image::Zoned, stage, &guest(percent)).unwrap());
        assert_eq!(
            (packs.packed, packs.writes, packs.flushes),
            (32, 32, 1),
            "nothing is left for the flush at the end"
        );
        assert!(noise.packed == 0 && noise.writes > 32, "{noise:?}");
        assert!(packs.seconds < noise.seconds, "{packs:?} {noise:?}");
        let host = play(Image::Host, stage, &guest(0)).unwrap();
        assert_eq!((host.writes, host.packed), (32, 0));
        let log = replayed_log(stage, &requests).unwrap();
        assert!((0.8..1.2).contains(&(log / host.seconds)), "the same calls: {log} {host:?}");
    }

    #[test]
    fn so_many_blocks_are_noise_as_is_said() {
        let noise = (0..10_000).filter(|block| is_noise(*block, NOISE_PERCENT)).count();
        assert!((4300..=4700).contains(&noise), "{noise}");
        let content = Content::new(NOISE_PERCENT);
        assert_eq!(content.of(512, 8192), [content.of(512, 4096), content.of(4608, 4096)].concat());
    }
}
