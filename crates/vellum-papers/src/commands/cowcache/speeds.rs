//! What is timed: each guest over both sides, on three networks.

use serde::Serialize;
use vellum_core::Result;
use vellum_lab::guest::Request;

use super::super::on_all_processors;
use super::super::progress::Progress;
use super::MIB;
use super::printed::{PRINTED, Printed};
use crate::cowcache::BLOCK_BYTES;
use crate::cowcache::applications::{Application, Asked};
use crate::cowcache::guest::{Guest, OLTP_WRITES_OF_100, oltp_requests};
use crate::cowcache::scene::Sizes;
use crate::cowcache::timed::{NETWORKS, recovery, speed};
use crate::cowcache::trdc::Policy;

/// Requests of a run. A speed settles early; there is no time for the paper's million.
const REQUESTS: (u64, u64) = (10_000, 600);
/// One part in this many of an application is made.
const APPLICATION_PART: (u64, u64) = (10, 50);
const SEED: u64 = 17;
/// What is dirty when a recovery begins: as much as of the paper's trace prn_0.
const RECOVERED_BYTES: (u64, u64) = (13_926 << 20, 32 << 20);
/// Shares of allocating writes in figure 11, in percent. The paper's text names the first and the last.
pub(super) const ALLOCATING: [u64; 3] = [80, 60, 40];
const SIZES: [(u64, bool); 6] = [(4, true), (8, true), (16, true), (32, true), (64, true), (64, false)];
/// Memory for tables in figure 9.
pub(super) const MEMORY_MIB: [u64; 3] = [1, 64, 128];

/// A guest's speed over both sides, in requests a second, on each network.
#[derive(Debug, Clone, Copy, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Speed {
    pub(super) rival: [f64; 3],
    pub(super) ours: [f64; 3],
}

impl Speed {
    /// How much faster it is here: on the network as it is, and the least and the most of all three.
    pub(super) fn gain(&self) -> (f64, f64, f64) {
        let gains: Vec<f64> = self.ours.iter().zip(self.rival).map(|(ours, rival)| ours / rival).collect();
        let least = gains.iter().copied().fold(f64::INFINITY, f64::min);
        (gains[0], least, gains.iter().copied().fold(0.0, f64::max))
    }
}

/// All guests with one policy.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Guests {
    /// 64 KiB, by memory.
    pub(super) by_memory: Vec<Speed>,
    /// As the counted ones.
    pub(super) random: Vec<Speed>,
    /// By the share of allocating writes: two writes for a read, and one for two.
    pub(super) mixed: [Vec<Speed>; 2],
    /// OLTP2-1, 2-8, 8-1, 8-8.
    pub(super) oltp: Vec<Speed>,
    /// Figure 13's.
    pub(super) applications: Vec<Speed>,
}

/// All of them.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Speeds {
    pub(super) back: Guests,
    pub(super) through: Guests,
    /// Seconds of fast and of full recovery, on each network, and what was dirty.
    pub(super) recovery: Vec<(f64, f64)>,
    pub(super) recovered_bytes: u64,
}

#[derive(Debug, Clone, Copy)]
enum Asks {
    Made(Guest),
    Application(Application),
}

#[derive(Debug, Clone, Copy)]
struct Job {
    asks: Asks,
    memory_mib: u64,
    requests: u64,
}

fn one(job: &Job, is_ours: bool, policy: Policy, network: u32) -> Result<f64> {
    let (before, requests): (Vec<Request>, Box<dyn Iterator<Item = Request>>) = match job.asks {
        Asks::Made(guest) => (Vec::new(), guest.requests(job.requests, SEED)),
        // Here `requests` is the part of it.
        Asks::Application(which) => {
            let Asked { before, work } = which.requests(job.requests, SEED)?;
            (before, Box::new(work.into_iter()))
        }
    };
    let blocks = match job.asks {
        Asks::Made(Guest::Random { bytes, .. }) => job.requests * (bytes / BLOCK_BYTES + 1),
        Asks::Made(_) => job.requests * 2,
        Asks::Application(_) => 1 << 20,
    };
    let sizes =
        Sizes { blocks: None, blocks_max: blocks * 5 / 4 + 65_536, memory_bytes: job.memory_mib * MIB };
    speed(is_ours, policy, (sizes, network), before, requests)
}

impl Speeds {
    pub(super) fn run(is_full: bool, progress: Progress) -> Result<Self> {
        let of = |(full, small): (u64, u64)| if is_full { full } else { small };
        let recovered = of(RECOVERED_BYTES);
        let recovery = on_all_processors(&NETWORKS, |network| {
            progress.part(|_| format!("recovery, network {network} %"), || recovery(recovered, *network))
        })?;
        Ok(Self {
            back: Guests::run(is_full, Policy::WriteBack, progress)?,
            through: Guests::run(is_full, Policy::WriteThrough, progress)?,
            recovery,
            recovered_bytes: recovered,
        })
    }
}

impl Guests {
    fn run(is_full: bool, policy: Policy, progress: Progress) -> Result<Self> {
        let requests = if is_full { REQUESTS.0 } else { REQUESTS.1 };
        let made = |guest, memory_mib| Job { asks: Asks::Made(guest), memory_mib, requests };
        let random = SIZES.map(|(kib, is_aligned)| Guest::Random { bytes: kib << 10, is_aligned });
        let mut jobs: Vec<Job> = MEMORY_MIB.iter().map(|memory| made(random[4], *memory)).collect();
        jobs.extend(random.map(|guest| made(guest, 128)));
        for writes_of_three in [2, 1] {
            jobs.extend(
                ALLOCATING
                    .map(|allocating_percent| made(Guest::Mix { writes_of_three, allocating_percent }, 128)),
            );
        }
        for Printed { bytes, allocating_permille, memory_mib, .. } in PRINTED {
            let writes_of_100 = OLTP_WRITES_OF_100;
            let rounds = requests / oltp_requests(1, writes_of_100);
            let requests = oltp_requests(rounds, writes_of_100);
            let job = made(Guest::Oltp { bytes, allocating_permille, writes_of_100 }, memory_mib);
            jobs.push(Job { requests, ..job });
        }
        jobs.extend(Application::ALL.map(|which| Job {
            asks: Asks::Application(which),
            memory_mib: 128,
            requests: if is_full { APPLICATION_PART.0 } else { APPLICATION_PART.1 },
        }));
        let sides: Vec<(Job, bool, u32)> = jobs
            .iter()
            .flat_map(|job| NETWORKS.map(|network| [(*job, false, network), (*job, true, network)]))
            .flatten()
            .collect();
        let speeds = on_all_processors(&sides, |(job, is_ours, network)| {
            progress.part(
                |speed| {
                    let side = if *is_ours { "the flash cache" } else { "TRDC" };
                    let Job { asks, memory_mib, .. } = job;
                    format!(
                        "{asks:?} over {side}, {policy:?}, {memory_mib} MiB, network {network} %: {speed:.0} a second"
                    )
                },
                || one(job, *is_ours, policy, *network),
            )
        })?;
        let speeds: Vec<Speed> = speeds
            .chunks(6)
            .map(|six| Speed { rival: [six[0], six[2], six[4]], ours: [six[1], six[3], six[5]] })
            .collect();
        Ok(Self {
            by_memory: speeds[..3].to_vec(),
            random: speeds[3..9].to_vec(),
            mixed: [speeds[9..12].to_vec(), speeds[12..15].to_vec()],
            oltp: speeds[15..19].to_vec(),
            applications: speeds[19..].to_vec(),
        })
    }
}
