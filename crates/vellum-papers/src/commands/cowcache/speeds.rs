//! What is timed: each guest over both sides, on three networks.

use serde::Serialize;
use vellum_core::Result;
use vellum_lab::guest::Request;
use vellum_lab::trace::Trace;

use super::super::on_all_processors;
use super::MIB;
use crate::cowcache::BLOCK_BYTES;
use crate::cowcache::guest::{Guest, OLTP_READS, OLTP_WRITES};
use crate::cowcache::scene::Sizes;
use crate::cowcache::timed::{NETWORKS, speed};

/// Requests of a run. A speed settles early; there is no time for the paper's million.
const REQUESTS: (u64, u64) = (20_000, 1_000);
const SEED: u64 = 17;
/// Shares of allocating writes in figure 11, in percent. The paper's text names the first and the last but one.
pub(super) const ALLOCATING: [u64; 4] = [80, 60, 40, 20];
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

/// All of them.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Speeds {
    /// 64 KiB, by memory.
    pub(super) by_memory: Vec<Speed>,
    /// As the counted ones.
    pub(super) random: Vec<Speed>,
    /// By the share of allocating writes: two writes for a read, and one for two.
    pub(super) mixed: [Vec<Speed>; 2],
    /// OLTP2-1, 2-8, 8-1, 8-8.
    pub(super) oltp: Vec<Speed>,
    pub(super) varmail: Speed,
}

#[derive(Debug, Clone, Copy)]
enum Asks {
    Made(Guest),
    Varmail,
}

#[derive(Debug, Clone, Copy)]
struct Job {
    asks: Asks,
    memory_mib: u64,
    requests: u64,
}

fn one(job: &Job, is_ours: bool, network: u32) -> Result<f64> {
    let requests: Box<dyn Iterator<Item = Request>> = match job.asks {
        Asks::Made(guest) => guest.requests(job.requests, SEED),
        Asks::Varmail => {
            let trace = Trace::recorded("varmail_16t")?;
            let is_work = |phase: &Option<String>| phase.as_deref() == Some("w");
            Box::new(
                trace
                    .requests
                    .into_iter()
                    .filter(move |(phase, _)| is_work(phase))
                    .map(|(_, request)| request),
            )
        }
    };
    let blocks = match job.asks {
        Asks::Made(Guest::Random { bytes, .. }) => job.requests * (bytes / BLOCK_BYTES + 1),
        Asks::Made(_) => job.requests * 2,
        Asks::Varmail => 64 << 10,
    };
    let sizes =
        Sizes { blocks: None, blocks_max: blocks * 5 / 4 + 65_536, memory_bytes: job.memory_mib * MIB };
    speed(is_ours, sizes, network, requests)
}

impl Speeds {
    pub(super) fn run(is_full: bool) -> Result<Self> {
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
        for (bytes, allocating_permille, memory_mib) in
            [(2048, 731, 1), (2048, 688, 8), (8192, 745, 1), (8192, 699, 8)]
        {
            let rounds = requests.div_ceil(OLTP_WRITES + OLTP_READS + 1);
            let requests = rounds * (OLTP_WRITES + OLTP_READS + 1);
            let job = made(Guest::Oltp { bytes, allocating_permille }, memory_mib);
            jobs.push(Job { requests, ..job });
        }
        jobs.push(Job { asks: Asks::Varmail, memory_mib: 128, requests });
        let sides: Vec<(Job, bool, u32)> = jobs
            .iter()
            .flat_map(|job| NETWORKS.map(|network| [(*job, false, network), (*job, true, network)]))
            .flatten()
            .collect();
        let speeds = on_all_processors(&sides, |(job, is_ours, network)| one(job, *is_ours, *network))?;
        let speeds: Vec<Speed> = speeds
            .chunks(6)
            .map(|six| Speed { rival: [six[0], six[2], six[4]], ours: [six[1], six[3], six[5]] })
            .collect();
        Ok(Self {
            by_memory: speeds[..3].to_vec(),
            random: speeds[3..9].to_vec(),
            mixed: [speeds[9..13].to_vec(), speeds[13..17].to_vec()],
            oltp: speeds[17..21].to_vec(),
            varmail: speeds[21],
        })
    }
}
