//! Vellum's own counts: the file of `serve --stats-json`, rewritten once a second and at the end.

use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use serde::Deserialize;
use vellum_core::{Context, Error, ErrorKind, Result};

use super::Counts;

/// How long new figures may take to come.
const PATIENCE: Duration = Duration::from_secs(120);

#[derive(Deserialize)]
struct File {
    disks: Vec<Disk>,
}

#[derive(Deserialize)]
struct Disk {
    guest: Operations,
    host: Host,
}

#[derive(Deserialize)]
struct Host {
    data: Operations,
    metadata: Operations,
    /// What a journal took home: work that no answer waited for.
    checkpoint: Operations,
    /// Zeros written ahead of need.
    prealloc: Operations,
}

/// The requests to the host until then.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Figures {
    /// What had to happen before the guest was answered.
    pub foreground: Counts,
    /// And what happened in the background.
    pub total: Counts,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Operations {
    reads: u64,
    writes: u64,
    flushes: u64,
    zeroes: u64,
    discards: u64,
    bytes_written: u64,
}

/// How many reads the guest had sent by then, and the requests to the host for the one disk that is served.
fn parse(text: &str) -> Result<(u64, Figures)> {
    let file: File = serde_json::from_str(text)
        .map_err(|error| Error::corrupt(format!("the statistics have another form: {error}")))?;
    let [disk] = &file.disks[..] else {
        return Err(Error::corrupt("the statistics are not those of one disk"));
    };
    let counts = |part: &Operations| Counts {
        flushes: part.flushes,
        writes: part.writes,
        bytes_written: part.bytes_written,
        holes: part.zeroes + part.discards,
    };
    let mut figures = Figures { foreground: counts(&disk.host.data), ..Figures::default() };
    figures.foreground += counts(&disk.host.metadata);
    figures.total = figures.foreground;
    figures.total += counts(&disk.host.checkpoint);
    figures.total += counts(&disk.host.prealloc);
    Ok((disk.guest.reads, figures))
}

/// All counters at the time of this line.
pub fn of(text: &str) -> Result<Figures> {
    Ok(parse(text)?.1)
}

/// All that was counted up to now.
pub fn read(path: &Path) -> Result<Figures> {
    let context = || format!("can't read {}", path.display());
    Ok(parse(&fs::read_to_string(path).context(context)?).context(context)?.1)
}

/// Waits for figures that were taken after the guest's read number `reads`.
pub fn read_after(path: &Path, reads: u64) -> Result<Figures> {
    let begun = Instant::now();
    loop {
        match fs::read_to_string(path) {
            Ok(text) => {
                let (seen, figures) = parse(&text)?;
                if seen >= reads {
                    return Ok(figures);
                }
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {} // the first second
            Err(error) => return Err(Error::io(error, format!("can't read {}", path.display()))),
        }
        if begun.elapsed() > PATIENCE {
            return Err(Error::new(ErrorKind::NotFound, "the server writes no statistics"));
        }
        thread::sleep(Duration::from_millis(20));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_and_metadata_are_counted_together() {
        let operations = |reads: u64, writes: u64, flushes: u64| {
            serde_json::json!({
                "reads": reads, "writes": writes, "flushes": flushes, "zeroes": 1, "discards": 2,
                "bytes-read": 9, "bytes-written": 4096 * writes, "bytes-zeroed": 9, "bytes-discarded": 9,
            })
        };
        let disk = serde_json::json!({
            "exports": [""], "image": "x", "guest": operations(7, 1, 1),
            "host": { "data": operations(0, 3, 5), "metadata": operations(1, 2, 0),
                "checkpoint": operations(0, 7, 0), "prealloc": operations(0, 11, 0) },
        });
        let text = serde_json::json!({ "io": "uring", "disks": [disk] }).to_string();
        let counts = Counts { flushes: 5, writes: 5, bytes_written: 5 * 4096, holes: 6 };
        let total = Counts { flushes: 5, writes: 23, bytes_written: 23 * 4096, holes: 12 };
        assert_eq!(parse(&text).unwrap(), (7, Figures { foreground: counts, total }));
        assert!(parse("{}").is_err() && parse(r#"{"disks": []}"#).is_err());
    }
}
