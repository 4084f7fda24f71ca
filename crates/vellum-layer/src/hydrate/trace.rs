//! The file of a boot trace: in which order a guest reads its disk first.
//!
//! ```text
//!   vellum-trace 1                    the version of the format
//!   size 10737418240                  of the disk, in bytes
//!   0 4096                            a run: where it begins, how many bytes; in the order of the reads
//!   1048576 65536
//!   end 2 crc32c f4279673             how many runs, and the CRC32C of all bytes before this line
//! ```
//!
//! 1. Lines end with a line feed; numbers are decimal, without leading zeros; nothing follows the last line.
//! 2. At most [`RUNS_MAX`] runs, each with a byte at least, and within 2^63 bytes. Runs may lie past the end of the
//!    disk, and may overlap: a trace is advice. What does not fit is left out by whoever uses it.
//! 3. A file that is cut, or changed, is refused: by the last line.
//!
//! `docs/format/trace.md` is the specification.

use std::fmt::Write as _;

use vellum_core::{Error, ErrorKind, Result};

use super::order::{RUNS_MAX, Run};

/// A longer file is not a trace, in bytes.
pub const TRACE_BYTES_MAX: u64 = 4 << 20;

const MAGIC: &str = "vellum-trace ";
const VERSION: &str = "1";
/// No disk is larger, in bytes.
const DISK_BYTES_MAX: u64 = 1 << 63;

/// A boot trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trace {
    /// The size of the disk that it was recorded on, in bytes.
    pub disk_size: u64,
    /// What was read, in the order of the first reads.
    pub runs: Vec<Run>,
}

impl Trace {
    /// The file.
    ///
    /// # Panics
    /// When there are more runs than a trace has.
    pub fn encode(&self) -> String {
        assert!(self.runs.len() <= RUNS_MAX, "{} runs are no trace", self.runs.len());
        let mut text = format!("{MAGIC}{VERSION}\nsize {}\n", self.disk_size);
        for Run { at, len } in &self.runs {
            writeln!(text, "{at} {len}").expect("a string takes all of it");
        }
        let crc = crc32c::crc32c(text.as_bytes());
        writeln!(text, "end {} crc32c {crc:08x}", self.runs.len()).expect("a string takes all of it");
        text
    }

    /// Reads a file.
    ///
    /// # Errors
    /// `Unsupported` for another version, `Corrupt` for everything else that is not a whole trace; the error names the line.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        if bytes.len() as u64 > TRACE_BYTES_MAX {
            return Err(bad(1, &format!("it has more than {TRACE_BYTES_MAX} bytes")));
        }
        let text = std::str::from_utf8(bytes).map_err(|_| bad(1, "it is not text"))?;
        let body = text.strip_suffix('\n').ok_or_else(|| bad(1, "its end is missing"))?;
        let (before, last) = body.rsplit_once('\n').ok_or_else(|| bad(1, "its end is missing"))?;
        let mut lines = before.split('\n');
        match lines.next().and_then(|line| line.strip_prefix(MAGIC)) {
            Some(VERSION) => {}
            Some(other) => {
                let other: String = other.chars().take(20).collect();
                let why = format!(
                    "this is a boot trace of version {other:?}; this program reads version {VERSION}"
                );
                return Err(Error::unsupported(why));
            }
            None => return Err(bad(1, "it does not begin with \"vellum-trace\"")),
        }
        let size = lines.next().and_then(|line| number(line.strip_prefix("size ")?));
        let disk_size = size.ok_or_else(|| bad(2, "\"size\" and a number were expected"))?;
        let mut runs = Vec::new();
        for (index, line) in lines.enumerate() {
            if runs.len() == RUNS_MAX {
                return Err(bad(index + 3, &format!("it has more than {RUNS_MAX} runs")));
            }
            runs.push(run(line).ok_or_else(|| bad(index + 3, "an offset and a length were expected"))?);
        }
        let (crc, count) = (crc32c::crc32c(&bytes[..before.len() + 1]), runs.len());
        if last != format!("end {count} crc32c {crc:08x}") {
            return Err(bad(count + 3, "its end is missing, or it was changed"));
        }
        Ok(Self { disk_size, runs })
    }
}

fn bad(line: usize, why: &str) -> Error {
    Error::new(ErrorKind::Corrupt, format!("this is not a boot trace: line {line}: {why}"))
}

fn run(line: &str) -> Option<Run> {
    let (at, len) = line.split_once(' ')?;
    let (at, len) = (number(at)?, number(len)?);
    (len > 0 && at.checked_add(len)? <= DISK_BYTES_MAX).then_some(Run { at, len })
}

fn number(text: &str) -> Option<u64> {
    let is_plain = text.bytes().all(|byte| byte.is_ascii_digit()) && (text == "0" || !text.starts_with('0'));
    is_plain.then(|| text.parse().ok())?.filter(|number| *number <= DISK_BYTES_MAX)
}

/// What the fuzz target does with its bytes: what is read is what is written.
#[doc(hidden)]
pub fn fuzz_trace(bytes: &[u8]) {
    if let Ok(trace) = Trace::decode(bytes) {
        assert!(trace.runs.len() <= RUNS_MAX);
        assert_eq!(trace.encode().as_bytes(), bytes, "there is one way to write a trace");
    }
}

#[cfg(test)]
mod tests {
    use vellum_core::Random;

    use super::*;

    fn trace() -> Trace {
        let run = |at, len| Run { at, len };
        Trace { disk_size: 10 << 30, runs: vec![run(0, 4096), run(1 << 20, 65_536), run(512, 1)] }
    }

    #[test]
    fn it_is_read_as_it_was_written() {
        for trace in [trace(), Trace { disk_size: 0, runs: Vec::new() }] {
            assert_eq!(Trace::decode(trace.encode().as_bytes()).unwrap(), trace);
        }
        assert_eq!(
            trace().encode(),
            "vellum-trace 1\nsize 10737418240\n0 4096\n1048576 65536\n512 1\nend 3 crc32c 3818782a\n"
        );
    }

    #[test]
    fn one_that_was_cut_or_changed_is_refused() {
        let good = trace().encode().into_bytes();
        for len in 0..good.len() {
            assert!(Trace::decode(&good[..len]).is_err(), "cut at {len}");
        }
        let mut random = Random::from_seed(1);
        for at in 0..good.len() {
            let mut bytes = good.clone();
            bytes[at] ^= 1 << random.below(8);
            assert!(Trace::decode(&bytes).is_err(), "changed at {at}");
            fuzz_trace(&bytes);
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        let sealed = |text: &str, count: usize| {
            format!("{text}end {count} crc32c {:08x}\n", crc32c::crc32c(text.as_bytes()))
        };
        for (text, words) in [
            (String::new(), "its end is missing"),
            (sealed("vellum-trace 2\nsize 1\n", 0), "version \"2\""),
            (sealed("boot 1\nsize 1\n", 0), "line 1"),
            (sealed("vellum-trace 1\nsize x\n", 0), "line 2"),
            (sealed("vellum-trace 1\nsize 1\n0 0\n", 1), "line 3"),
            (sealed("vellum-trace 1\nsize 1\n0 1\n01 1\n", 2), "line 4"),
            (sealed("vellum-trace 1\nsize 1\n9223372036854775808 1\n", 1), "line 3"),
            (sealed("vellum-trace 1\nsize 1\n0 1\n", 2), "line 4"),
            ("vellum-trace 1\nsize 1\n0 1\nend 1 crc32c 00000000\n".to_owned(), "it was changed"),
        ] {
            let error = Trace::decode(text.as_bytes()).expect_err(&text);
            assert!(error.chain().contains(words), "{text:?}: {}", error.chain());
        }
    }

    #[test]
    fn it_is_bounded() {
        let runs: Vec<Run> = (0..=RUNS_MAX as u64).map(|at| Run { at: at * 2, len: 1 }).collect();
        let most = Trace { disk_size: 1 << 63, runs: runs[..RUNS_MAX].to_vec() };
        assert_eq!(Trace::decode(most.encode().as_bytes()).unwrap(), most);
        let more = most.encode().replacen("0 1\n", "0 1\n1 1\n", 1);
        assert!(Trace::decode(more.as_bytes()).unwrap_err().chain().contains("more than 65536 runs"));
        let long = vec![b'0'; usize::try_from(TRACE_BYTES_MAX).unwrap() + 1];
        assert!(Trace::decode(&long).unwrap_err().chain().contains("more than 4194304 bytes"));
    }
}
