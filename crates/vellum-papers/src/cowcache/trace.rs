//! Recorded guests of others, supplied by the user: CSV of the MSR Cambridge traces and of CloudPhysics.
//!
//! ```text
//!   128166372003061629,hm,0,Write,8192,4096,1331     MSR: time in 100 ns, host, disk, type, offset, length, response time
//!   version,time,op,size,lbn                         CloudPhysics as libCacheSim has it (data/cloudPhysicsIO.csv):
//!   1,5633898,2a,512,42932745                          seconds, SCSI operation, bytes, sector
//!   t_us,op,offset,len                               the project's own form, with R and W; other columns are passed over
//! ```
//!
//! Plain text, or packed with `xz`. None of these has flushes. A trace is not trusted: lines and requests are
//! bounded, and what is no request is an error that names file and line.

use std::fmt::Display;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::time::Duration;

use lzma_rust2::XzReader;
use vellum_core::{Context, Error, Result};
use vellum_lab::guest::Request;

use super::{BLOCK_BYTES, DISK_BYTES};

/// The longest line that is read.
const LINE_BYTES_MAX: u64 = 512;
/// The longest request.
const REQUEST_BYTES_MAX: u64 = 64 << 20;
/// How many requests a trace may have; the largest of MSR has 12.5 million.
const REQUESTS_MAX: usize = 1 << 24;
const XZ_MAGIC: [u8; 6] = [0xfd, b'7', b'z', b'X', b'Z', 0];

/// A recorded guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Recorded {
    /// The name of its file, without endings.
    pub(crate) name: String,
    pub(crate) form: Form,
    /// Reads and writes, and when each came, counted from the first.
    pub(crate) requests: Vec<(Duration, Request)>,
}

/// Which forms may be in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    Msr,
    /// A first line names the columns.
    Named,
}

/// Where the columns are that are needed.
#[derive(Debug, Clone, Copy)]
enum Columns {
    Msr,
    Own { time: Option<usize>, op: usize, offset: usize, len: usize },
    Scsi { time: usize, op: usize, len: usize, sector: usize },
}

/// One line: time, a read or a write or nothing of both, offset, length.
type Line = (Duration, Option<bool>, u64, u64);

impl Recorded {
    /// Reads a file.
    pub(crate) fn read(path: &Path, form: Form) -> Result<Self> {
        let context = || format!("can't read {}", path.display());
        let mut file = BufReader::new(File::open(path).context(context)?);
        let is_packed = file.fill_buf().context(context)?.starts_with(&XZ_MAGIC);
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let name = name.split('.').next().unwrap_or_default().to_owned();
        let requests = match is_packed {
            true => parse(BufReader::new(XzReader::new(file, true)), form),
            false => parse(file, form),
        };
        Ok(Self { name, form, requests: requests.context(context)? })
    }

    /// How many blocks are touched.
    pub(crate) fn blocks(&self) -> u64 {
        let mut blocks: Vec<u64> = Vec::new();
        for (_, request) in &self.requests {
            if let Request::Read { offset, len } | Request::Write { offset, len } = *request {
                blocks.extend(offset / BLOCK_BYTES..(offset + len as u64).div_ceil(BLOCK_BYTES));
            }
            // Now and then, so that it takes no more memory than blocks are touched.
            if blocks.len() > 1 << 24 {
                blocks.sort_unstable();
                blocks.dedup();
            }
        }
        blocks.sort_unstable();
        blocks.dedup();
        blocks.len() as u64
    }
}

fn parse(mut text: impl BufRead, form: Form) -> Result<Vec<(Duration, Request)>> {
    let mut requests = Vec::new();
    let mut columns = (form == Form::Msr).then_some(Columns::Msr);
    let mut first: Option<(Duration, String)> = None;
    let mut line = Vec::new();
    for number in 1u64.. {
        line.clear();
        let read = (&mut text).take(LINE_BYTES_MAX).read_until(b'\n', &mut line);
        let at = || format!("line {number}");
        if read.context(at)? == 0 {
            break;
        }
        let strange = |why: &dyn Display| Error::corrupt(format!("line {number} is no request: {why}"));
        if line.len() as u64 == LINE_BYTES_MAX && line.last() != Some(&b'\n') {
            return Err(strange(&format!("it is longer than {LINE_BYTES_MAX} bytes")));
        }
        let text = std::str::from_utf8(&line).map_err(|_| strange(&"it is no text"))?.trim_end();
        let fields: Vec<&str> = text.split(',').collect();
        let Some(columns) = columns else {
            columns = Some(named(&fields).ok_or_else(|| {
                Error::corrupt(
                    "line 1 does not name the columns: t_us, op, offset and len, or time, op, size and lbn",
                )
            })?);
            continue;
        };
        let shown = || format!("{text:?}");
        let (time, is_write, offset, len) = parsed(columns, &fields).ok_or_else(|| strange(&shown()))?;
        let Some(is_write) = is_write else { continue };
        let end = offset.checked_add(len).filter(|end| *end <= DISK_BYTES);
        if len == 0 || len > REQUEST_BYTES_MAX || end.is_none() {
            return Err(strange(&format!(
                "{text:?} does not lie in a disk of 1 TiB, or is longer than 64 MiB"
            )));
        }
        let of = if matches!(columns, Columns::Msr) {
            format!("{}.{}", fields[1], fields[2])
        } else {
            String::new()
        };
        let (began, one) = first.get_or_insert_with(|| (time, of.clone()));
        if *one != of {
            return Err(strange(&format!(
                "it is of {of}, and the first line of {one}: a trace is of one disk"
            )));
        }
        if requests.len() == REQUESTS_MAX {
            return Err(strange(&format!("there are more than {REQUESTS_MAX} before it")));
        }
        let len = usize::try_from(len).expect("at most 64 MiB");
        let request = if is_write { Request::Write { offset, len } } else { Request::Read { offset, len } };
        requests.push((time.saturating_sub(*began), request));
    }
    match requests.is_empty() {
        true => Err(Error::corrupt("it has no reads and no writes")),
        false => Ok(requests),
    }
}

fn named(names: &[&str]) -> Option<Columns> {
    let column = |name: &str| names.iter().position(|other| *other == name);
    let own = || {
        let (op, offset, len) = (column("op")?, column("offset")?, column("len")?);
        Some(Columns::Own { time: column("t_us"), op, offset, len })
    };
    let scsi = || {
        let (time, op) = (column("time")?, column("op")?);
        Some(Columns::Scsi { time, op, len: column("size")?, sector: column("lbn")? })
    };
    own().or_else(scsi)
}

fn parsed(columns: Columns, fields: &[&str]) -> Option<Line> {
    let text = |index: usize| fields.get(index).copied();
    let number = |index: usize| text(index)?.parse::<u64>().ok();
    match columns {
        Columns::Msr => {
            if fields.len() != 7 {
                return None;
            }
            let is_write = match fields[3] {
                "Write" => true,
                "Read" => false,
                _ => return None,
            };
            let time = Duration::from_nanos(0) + Duration::from_micros(number(0)? / 10);
            number(2)?;
            Some((time, Some(is_write), number(4)?, number(5)?))
        }
        Columns::Own { time, op, offset, len } => {
            let is_write = match text(op)? {
                "W" => Some(true),
                "R" => Some(false),
                "F" | "T" | "Z" => None,
                _ => return None,
            };
            let time = time.map_or(Some(0), number)?;
            Some((Duration::from_micros(time), is_write, number(offset)?, number(len)?))
        }
        Columns::Scsi { time, op, len, sector } => {
            let is_write = match u8::from_str_radix(text(op)?, 16).ok()? {
                0x0a | 0x2a | 0xaa | 0x8a => true,
                0x08 | 0x28 | 0xa8 | 0x88 => false,
                _ => return None,
            };
            let time = Duration::from_secs(number(time)?);
            Some((time, Some(is_write), number(sector)?.checked_mul(512)?, number(len)?))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MSR: &str =
        "128166372003061629,hm,1,Write,8192,4096,1331\r\n128166372016382155,hm,1,Read,512,4096,2\n";

    #[test]
    fn each_form_gives_its_requests() {
        let write = |offset, len| Request::Write { offset, len };
        let read = |offset, len| Request::Read { offset, len };
        let parse = |text: &str, form| parse(text.as_bytes(), form).unwrap();
        assert_eq!(
            parse(MSR, Form::Msr),
            [(Duration::ZERO, write(8192, 4096)), (Duration::from_micros(1_332_053), read(512, 4096))]
        );
        let scsi = "version,time,op,size,lbn\n1,7,2a,512,3\n1,9,28,4096,8\n";
        assert_eq!(
            parse(scsi, Form::Named),
            [(Duration::ZERO, write(1536, 512)), (Duration::from_secs(2), read(4096, 4096))]
        );
        let own = "t_us,phase,op,offset,len,fua\n5,w,W,0,512,0\n6,w,F,0,0,0\n8,w,R,512,512,0\n";
        assert_eq!(
            parse(own, Form::Named),
            [(Duration::ZERO, write(0, 512)), (Duration::from_micros(3), read(512, 512))]
        );
        let trace = Recorded { name: String::new(), form: Form::Named, requests: parse(own, Form::Named) };
        assert_eq!(trace.blocks(), 1);
    }

    #[test]
    fn a_hostile_line_is_an_error_that_names_file_and_line() {
        let dir = std::env::temp_dir();
        let path = dir.join(format!("vellum-papers-trace-{}.csv", std::process::id()));
        let long = "1".repeat(100_000);
        for line in [
            "1,hm,1,Trim,0,512,1",
            "1,hm,1,Read,0,512",
            "1,hm,1,Read,0,512,1,1",
            "1,hm,1,Read,0,0,1",
            "1,hm,1,Read,0,67108865,1",
            "1,hm,1,Read,18446744073709551615,512,1",
            "1,hm,1,Read,1099511627776,512,1",
            "1,hm,1,Read,-1,512,1",
            "-1,hm,1,Read,0,512,1",
            "1,hm,x,Read,0,512,1",
            "1,hm,2,Read,0,512,1",
            "1,other,1,Read,0,512,1",
            "",
            long.as_str(),
        ] {
            std::fs::write(&path, format!("{MSR}{line}\n")).unwrap();
            let error = Recorded::read(&path, Form::Msr).unwrap_err().chain().to_string();
            let file = path.display().to_string();
            assert!(error.contains("line 3") && error.contains(&file), "{line}: {error}");
        }
        std::fs::write(&path, [MSR.as_bytes(), b"\xff\xfe\n"].concat()).unwrap();
        assert!(Recorded::read(&path, Form::Msr).is_err());
        std::fs::write(&path, "").unwrap();
        assert!(Recorded::read(&path, Form::Msr).is_err());
        std::fs::write(&path, "a,b\n1,2\n").unwrap();
        assert!(Recorded::read(&path, Form::Named).is_err());
        std::fs::remove_file(&path).unwrap();
    }
}
