//! What a policy would keep: a recorded sequence of uses goes through the map and a policy, without flash.
//!
//! ```text
//!   t_us,phase,op,offset,len,fua                        a first line names the columns; op, offset and len must be there
//!   128166372003061629,hm,0,Write,8192,4096,1331        MSR: time, host, disk, type, offset, length, response time
//!   11413000 0 657728 16 1                              DiskSim: time, disk, sector, sectors, 1 for a read
//! ```
//!
//! Every block that is used is put in, and every block is clean at once, so the figures are those of the policy
//! alone. For the choice of a default, by measurement: `examples/replacement.rs` prints them.

use vellum_core::{Error, Result};

use crate::layout::{BLOCK_BYTES, BLOCKS_MAX, Key, Layout, RING_BYTES_MIN, SECTOR_BYTES, SECTORS_ALL, Slot};
use crate::map::{Entry, Map};
use crate::policy::Replacement;

/// How often blocks were used, and were there.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HitCounts {
    /// Blocks that were read.
    pub reads: u64,
    /// Those of them that were cached.
    pub read_hits: u64,
    /// Blocks that were written.
    pub writes: u64,
    /// Those of them that were cached.
    pub write_hits: u64,
    /// Blocks that were given up.
    pub given_up: u64,
    /// What the policy keeps beside the map, in bytes, at the end.
    pub policy_bytes: u64,
}

/// What a cache of `slots` blocks with this replacement makes of these uses: the block's number below 2^48, and
/// whether it is written. Panics when there are no slots.
pub fn hits(replacement: Replacement, slots: u32, uses: impl IntoIterator<Item = (u64, bool)>) -> HitCounts {
    let layout = Layout::new(slots, RING_BYTES_MIN, 0x0074_7269_616C_7321).expect("a cache has slots");
    let mut map = Map::new(&layout);
    let mut policy = replacement.policy(slots as usize);
    let mut counts = HitCounts::default();
    for (block, is_write) in uses {
        let key = Key::new(0, block % BLOCKS_MAX);
        let is_hit = map.get(key).is_some();
        let (all, hits) = if is_write {
            (&mut counts.writes, &mut counts.write_hits)
        } else {
            (&mut counts.reads, &mut counts.read_hits)
        };
        *all += 1;
        *hits += u64::from(is_hit);
        if !is_hit {
            while map.blocks() >= u64::from(slots) || !map.has_room(key) {
                let most = usize::try_from(slots / 64).expect("as many as slots").clamp(1, 64);
                for victim in policy.victims(&mut map, most) {
                    map.remove(victim);
                    counts.given_up += 1;
                }
            }
            map.put(key, Entry { slot: Slot(0), sectors: SECTORS_ALL, dirty: false });
        }
        policy.used(&mut map, key, !is_hit);
    }
    counts.policy_bytes = policy.memory_bytes();
    counts
}

/// Blocks of a disk in a trace of several.
const DISK_BLOCKS: u64 = 1 << 32;
/// Blocks that one request may have: 64 MiB. What is longer clears space.
const REQUEST_BLOCKS_MAX: u64 = 16_384;

/// The blocks that the reads and writes of a trace touch, in order: the number of the block, and whether it is written.
/// Disk `n` of a trace of several begins at block `n` times 2^32.
pub fn uses_of(trace: &str) -> Result<Vec<(u64, bool)>> {
    let first = trace.lines().next().unwrap_or_default();
    let names: Vec<&str> = first.split(',').collect();
    let column = |name: &str| names.iter().position(|other| *other == name);
    let columns = (column("op"), column("offset"), column("len"));
    let read: Reader = match columns {
        (Some(op), Some(offset), Some(len)) => Box::new(move |line| named(line, [op, offset, len])),
        _ if names.len() == 7 => Box::new(msr),
        _ if first.split_whitespace().count() == 5 => Box::new(disksim),
        _ => {
            return Err(Error::corrupt(
                "its first line is none of a trace: it names no columns op, offset and len",
            ));
        }
    };
    let has_head = columns.0.is_some();
    let mut uses = Vec::new();
    for (number, line) in trace.lines().enumerate().skip(usize::from(has_head)) {
        let strange = || Error::corrupt(format!("line {} is no request: {line:?}", number + 1));
        let Use { disk, offset, len, is_write } = read(line).ok_or_else(strange)?;
        let Some(is_write) = is_write else { continue };
        let end = offset.checked_add(len).filter(|_| len > 0 && disk < 1 << 15).ok_or_else(strange)?;
        let (from, to) = (offset / BLOCK_BYTES, end.div_ceil(BLOCK_BYTES));
        if to > DISK_BLOCKS {
            return Err(strange());
        }
        if to - from <= REQUEST_BLOCKS_MAX {
            uses.extend((from..to).map(|block| (disk * DISK_BLOCKS + block, is_write)));
        }
    }
    Ok(uses)
}

/// Reads a line.
type Reader = Box<dyn Fn(&str) -> Option<Use>>;

/// One line of a trace, in bytes. Flushes and what clears space neither read nor write.
struct Use {
    disk: u64,
    offset: u64,
    len: u64,
    is_write: Option<bool>,
}

fn named(line: &str, columns: [usize; 3]) -> Option<Use> {
    let fields: Vec<&str> = line.split(',').collect();
    let field = |index: usize| fields.get(columns[index]).copied();
    let is_write = match field(0)? {
        "R" => Some(false),
        "W" => Some(true),
        "F" | "T" | "Z" => None,
        _ => return None,
    };
    Some(Use { disk: 0, offset: field(1)?.parse().ok()?, len: field(2)?.parse().ok()?, is_write })
}

fn msr(line: &str) -> Option<Use> {
    let fields: Vec<&str> = line.split(',').collect();
    let [_, _, disk, kind, offset, len, _] = fields[..] else { return None };
    let is_write = match kind {
        "Read" => false,
        "Write" => true,
        _ => return None,
    };
    let number = |text: &str| text.parse::<u64>().ok();
    Some(Use { disk: number(disk)?, offset: number(offset)?, len: number(len)?, is_write: Some(is_write) })
}

fn disksim(line: &str) -> Option<Use> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let [_, disk, sector, sectors, kind] = fields[..] else { return None };
    let is_write = match kind {
        "1" => false,
        "0" => true,
        _ => return None,
    };
    let bytes = |text: &str| text.parse::<u64>().ok()?.checked_mul(SECTOR_BYTES);
    Some(Use {
        disk: disk.parse().ok()?,
        offset: bytes(sector)?,
        len: bytes(sectors)?,
        is_write: Some(is_write),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_form_of_a_trace_is_known_by_its_first_line() {
        let own =
            "t_us,phase,op,offset,len,fua\n1,w,W,4095,2,0\n2,w,F,0,0,0\n3,w,R,8192,512,0\n4,w,Z,0,4096,0\n";
        assert_eq!(uses_of(own).unwrap(), [(0, true), (1, true), (2, false)]);
        assert_eq!(uses_of("t_us,op,offset,len\n0,W,21981565440,512\n").unwrap(), [(5_366_593, true)]);
        let msr = "128166372003061629,hm,1,Write,8192,4096,1331\r\n128166372016382155,hm,0,Read,512,4096,2\n";
        assert_eq!(uses_of(msr).unwrap(), [(DISK_BLOCKS + 2, true), (0, false), (1, false)]);
        assert_eq!(
            uses_of("11413000 0 8 16 1\n11565000 2 0 1 0\n").unwrap(),
            [(1, false), (2, false), (2 * DISK_BLOCKS, true)]
        );
    }

    #[test]
    fn what_is_not_understood_is_an_error() {
        let msr = "1,hm,0,Read,0,512,1\n";
        let named = "op,offset,len\n";
        for (head, line) in [
            (msr, "1,hm,0,Trim,0,512,1"),
            (msr, "1,hm,32768,Read,0,512,1"),
            (msr, "1,hm,0,Read,0,0,1"),
            (msr, "1,hm,0,Read,18446744073709551615,512,1"),
            (msr, "1,hm,0,Read,17592186044416,512,1"),
            ("1 0 0 1 1\n", "1 0 0 1 2"),
            ("1 0 0 1 1\n", "1 0 0 1"),
            (named, "X,0,512"),
            (named, "W,0"),
            (named, "W,-1,512"),
        ] {
            let error = uses_of(&format!("{head}{line}\n")).unwrap_err();
            assert!(error.to_string().contains("line 2"), "{line}: {error}");
        }
        assert!(uses_of("").is_err() && uses_of("a,b\n").is_err());
    }

    #[test]
    fn what_fits_is_missed_once() {
        for kind in Replacement::ALL {
            let uses = (0..3).flat_map(|_| (0..100).map(|block| (block, block % 4 == 0)));
            let counts = hits(kind, 100, uses);
            assert_eq!((counts.reads, counts.read_hits), (225, 150), "{kind:?}");
            assert_eq!((counts.writes, counts.write_hits), (75, 50), "{kind:?}");
            assert_eq!(counts.given_up, 0, "{kind:?}");
        }
    }

    #[test]
    fn a_loop_that_does_not_fit_defeats_lru_and_not_s3_fifo() {
        let uses = || (0..20).flat_map(|_| (0..1200).map(|block| (block, false)));
        assert_eq!(hits(Replacement::Lru, 1000, uses()).read_hits, 0);
        assert!(hits(Replacement::S3Fifo, 1000, uses()).read_hits > 5000);
    }
}
