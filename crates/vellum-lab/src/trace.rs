//! Block traces that include flushes: what a guest requested of its disk, in order, as text, optionally
//! compressed with `xz`.
//!
//! ```text
//!   t_us,phase,op,offset,len,fua        the first line names the columns; op, offset and len must be there
//!   10033,w,W,4096,8192,0               W write, R read, F flush, T discard, Z write zeroes
//!   10034,w,F,0,0,0
//! ```
//!
//! Only the order counts here, not the times: each request waits for the answer to the one before.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use lzma_rust2::XzReader;
use vellum_core::{Context, Error, Result};

use crate::guest::Request;

const XZ_MAGIC: [u8; 6] = [0xfd, b'7', b'z', b'X', b'Z', 0];

/// What is unpacked at most: more is no trace but a mistake.
const TEXT_BYTES_MAX: u64 = 1 << 30;

/// Guests that were recorded for this project; `crates/vellum-lab/traces/README.md` says how.
const RECORDED: [(&str, &[u8]); 6] = [
    ("boot_debian12", include_bytes!("../traces/boot_debian12.csv.xz")),
    ("dd_256m", include_bytes!("../traces/dd_256m.csv.xz")),
    ("mkfs_ext4_8g", include_bytes!("../traces/mkfs_ext4_8g.csv.xz")),
    ("postmark_selfie_small", include_bytes!("../traces/postmark_selfie_small.csv.xz")),
    ("sqlite_tpcc_like", include_bytes!("../traces/sqlite_tpcc_like.csv.xz")),
    ("varmail_16t", include_bytes!("../traces/varmail_16t.csv.xz")),
];

/// A trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trace {
    /// The phase of each request, where the trace records it, and the request.
    pub requests: Vec<(Option<String>, Request)>,
    /// The position of the last byte that any request covers.
    pub end: u64,
}

impl Trace {
    /// Reads one.
    pub fn read(path: &Path) -> Result<Self> {
        let context = || format!("can't read {}", path.display());
        let mut bytes = Vec::new();
        File::open(path).and_then(|mut file| file.read_to_end(&mut bytes)).context(context)?;
        Self::unpacked(&bytes).context(context)
    }

    /// One of those that come with the program, by the name of its file in `traces/` without `.csv.xz`.
    pub fn recorded(name: &str) -> Result<Self> {
        let Some((_, bytes)) = RECORDED.iter().find(|(other, _)| *other == name) else {
            return Err(Error::invalid(format!("no trace is named {name}")));
        };
        Self::unpacked(bytes).context(|| format!("can't read the trace {name}"))
    }

    fn unpacked(bytes: &[u8]) -> Result<Self> {
        let mut text = String::new();
        if bytes.starts_with(&XZ_MAGIC) {
            let mut unpacked = XzReader::new(bytes, true).take(TEXT_BYTES_MAX);
            unpacked.read_to_string(&mut text).context(|| "it cannot be unpacked")?;
        } else {
            let bytes = std::str::from_utf8(bytes).map_err(|_| Error::corrupt("it is no text"))?;
            bytes.clone_into(&mut text);
        }
        Self::parse(&text)
    }

    fn parse(text: &str) -> Result<Self> {
        let mut lines = text.lines();
        let names: Vec<&str> = lines.next().unwrap_or_default().split(',').collect();
        let column = |name: &str| names.iter().position(|other| *other == name);
        let (Some(op), Some(offset), Some(len)) = (column("op"), column("offset"), column("len")) else {
            return Err(Error::corrupt("its first line does not name the columns op, offset and len"));
        };
        let (phase, fua) = (column("phase"), column("fua"));
        let mut trace = Self { requests: Vec::new(), end: 0 };
        for (number, line) in lines.enumerate() {
            let strange = || Error::corrupt(format!("line {} is no request: {line:?}", number + 2));
            let fields: Vec<&str> = line.split(',').collect();
            let field = |index: usize| fields.get(index).copied().ok_or_else(strange);
            let offset: u64 = field(offset)?.parse().map_err(|_| strange())?;
            let len: u32 = field(len)?.parse().map_err(|_| strange())?;
            let end = offset.checked_add(u64::from(len)).ok_or_else(strange)?;
            let is_fua = fua.map(field).transpose()?.is_some_and(|value| value != "0");
            let len = usize::try_from(len).map_err(|_| strange())?;
            let request = match field(op)? {
                "F" => Request::Flush,
                _ if len == 0 => return Err(strange()),
                "W" if is_fua => Request::WriteThrough { offset, len },
                "W" => Request::Write { offset, len },
                "R" => Request::Read { offset, len },
                "T" => Request::Discard { offset, len },
                "Z" => Request::Zero { offset, len },
                _ => return Err(strange()),
            };
            if request != Request::Flush {
                trace.end = trace.end.max(end);
            }
            trace.requests.push((phase.map(field).transpose()?.map(str::to_owned), request));
        }
        Ok(trace)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_traces_that_come_with_the_program_can_be_read() {
        let writes = |trace: &Trace| {
            trace
                .requests
                .iter()
                .filter(|(phase, request)| {
                    phase.as_deref() == Some("w")
                        && matches!(request, Request::Write { .. } | Request::WriteThrough { .. })
                })
                .count()
        };
        let counts =
            RECORDED.map(|(name, _)| writes(&Trace::recorded(name).expect("it comes with the program")));
        // As the table in their README has them.
        assert_eq!(counts, [168, 851, 0, 3905, 4781, 3318]);
        assert!(Trace::recorded("other").is_err());
    }

    const TEXT: &str = "t_us,phase,op,offset,len,fua\n\
                        0,m,F,0,0,0\n\
                        5,w,W,4096,8192,0\n\
                        6,w,W,0,512,1\n\
                        7,w,R,65536,4096,0\n\
                        8,u,T,0,131072,0\n";

    /// `TEXT`, packed by `xz -9`.
    const PACKED: &[u8] = include_bytes!("trace/sample.csv.xz");

    #[test]
    fn requests_come_in_order_with_their_phases() {
        let trace = Trace::parse(TEXT).unwrap();
        let phase = |text: &str| Some(text.to_owned());
        let expected = vec![
            (phase("m"), Request::Flush),
            (phase("w"), Request::Write { offset: 4096, len: 8192 }),
            (phase("w"), Request::WriteThrough { offset: 0, len: 512 }),
            (phase("w"), Request::Read { offset: 65536, len: 4096 }),
            (phase("u"), Request::Discard { offset: 0, len: 131_072 }),
        ];
        assert_eq!(trace, Trace { requests: expected, end: 131_072 });
        let bare = Trace::parse("t_us,op,offset,len\n9,W,512,512\n").unwrap();
        assert_eq!(bare.requests, [(None, Request::Write { offset: 512, len: 512 })]);
    }

    #[test]
    fn packed_and_plain_are_the_same() {
        let path = std::env::temp_dir().join(format!("vellum-bench-trace-{}", std::process::id()));
        for bytes in [PACKED, TEXT.as_bytes()] {
            std::fs::write(&path, bytes).unwrap();
            assert_eq!(Trace::read(&path).unwrap(), Trace::parse(TEXT).unwrap());
        }
        std::fs::write(&path, &PACKED[..PACKED.len() - 20]).unwrap();
        assert!(Trace::read(&path).is_err(), "half of a file is an error");
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn what_is_not_understood_is_an_error() {
        let head = "t_us,op,offset,len\n";
        for line in ["1,X,0,512", "1,W,0", "1,W,-1,512", "1,W,18446744073709551615,512", "1,W,0,0", "1,W,a,1"]
        {
            let error = Trace::parse(&format!("{head}{line}\n")).unwrap_err();
            assert!(error.to_string().contains("line 2"), "{line}: {error}");
        }
        assert!(Trace::parse("").is_err() && Trace::parse("a,b\n").is_err());
    }
}
