//! Ten thousand random operations on one disk, in process but on real files, compared with bytes in memory.
//!
//! Requests are sent in batches, several in flight at once and on several workers. Within a batch they touch
//! different bytes, so what each must read is known; now and then a batch races for the same sectors instead,
//! and then each sector must hold what one of them wrote.

use std::ops::Range;
use std::path::Path;

use futures_lite::future::block_on;
use vellum_core::{Buffer, ErrorKind, GuestOffset, Random, SharedDisk, WriteFlags, ZeroFlags};
use vellum_daemon::{ImageOptions, open_image};
use vellum_io::{Spawned, Workers};

const SECTOR: usize = 512;

#[derive(Debug, Clone)]
enum Kind {
    Read,
    Write { data: Vec<u8>, fua: bool },
    Zero(ZeroFlags),
    Discard { fua: bool },
    Flush,
}

#[derive(Debug, Clone)]
struct Request {
    at: usize,
    len: usize,
    kind: Kind,
}

/// What came back.
#[derive(Debug)]
enum Reply {
    Done,
    Bytes(Vec<u8>),
    /// Zeros could not be had quickly, and nothing was changed.
    NotFast,
}

impl Request {
    fn span(&self) -> Range<usize> {
        self.at..self.at + self.len
    }

    fn describe(&self) -> String {
        let what = match &self.kind {
            Kind::Read => "read".to_owned(),
            Kind::Write { fua, .. } => format!("write (fua {fua})"),
            Kind::Zero(flags) => format!("{flags:?}"),
            Kind::Discard { fua } => format!("discard (fua {fua})"),
            Kind::Flush => return "flush".to_owned(),
        };
        format!("{what} {:#x}+{:#x}", self.at, self.len)
    }

    async fn perform(self, disk: SharedDisk) -> vellum_core::Result<Reply> {
        let start = GuestOffset::new(self.at as u64);
        let span = start.span(self.len as u64);
        let done = match self.kind {
            Kind::Read => {
                let read = disk.read(start, Buffer::for_overwrite(self.len)).await?;
                return Ok(Reply::Bytes(read.to_vec()));
            }
            Kind::Write { data, fua } => disk.write(start, Buffer::copy_of(&data), WriteFlags { fua }).await,
            Kind::Zero(flags) => match disk.write_zeroes(span, flags).await {
                Err(error) if flags.fast_only && error.kind() == ErrorKind::Unsupported => {
                    return Ok(Reply::NotFast);
                }
                done => done,
            },
            Kind::Discard { fua } => disk.discard(span, WriteFlags { fua }).await,
            Kind::Flush => disk.flush().await,
        };
        done.map(|()| Reply::Done)
    }
}

/// Writes on one disk, and knows what it must read as.
pub struct Writer<'a> {
    pub workers: &'a Workers,
    pub model: &'a mut Vec<u8>,
    pub random: &'a mut Random,
    /// Requests like to begin and end at multiples of this.
    pub cluster: usize,
    /// For messages.
    pub name: String,
}

impl Writer<'_> {
    /// Opens the image, sends this many requests, and closes it.
    pub fn write_on(&mut self, path: &Path, options: &ImageOptions, requests: usize) {
        let (path, options) = (path.to_owned(), options.clone());
        let opening = self.workers.spawn(0, move || async move { open_image(&path, &options).await });
        let chain = block_on(opening).expect("the worker lives");
        let chain = chain.unwrap_or_else(|error| panic!("{}: {}", self.name, error.chain()));
        let mut done = 0;
        while done < requests {
            done += match self.random.one_in(15) {
                true => self.race(chain.disk(), done),
                false => self.batch(chain.disk(), done),
            };
        }
        let closing = self.workers.spawn(0, move || async move { chain.close().await });
        let closed = block_on(closing).expect("the worker lives");
        closed.unwrap_or_else(|error| panic!("{}: {}", self.name, error.chain()));
    }

    fn start(&mut self, disk: &SharedDisk, request: Request) -> Spawned<vellum_core::Result<Reply>> {
        let disk = disk.clone();
        let worker = self.random.index(self.workers.count());
        self.workers.spawn(worker, move || request.perform(disk))
    }

    fn finish(&self, request: &Request, reply: Spawned<vellum_core::Result<Reply>>, after: usize) -> Reply {
        let reply = block_on(reply).expect("the worker lives");
        let what = || format!("{}, after {after} requests: {}", self.name, request.describe());
        reply.unwrap_or_else(|error| panic!("{}: {}", what(), error.chain()))
    }

    /// Requests that touch different bytes.
    fn batch(&mut self, disk: &SharedDisk, done: usize) -> usize {
        let mut requests: Vec<Request> = Vec::new();
        for _ in 0..1 + self.random.below(8) {
            let request = self.random_request();
            let apart = |other: &Request| {
                let (a, b) = (request.span(), other.span());
                a.end <= b.start || b.end <= a.start
            };
            if requests.iter().all(apart) {
                requests.push(request);
            }
        }
        let replies: Vec<_> = requests.iter().map(|request| self.start(disk, request.clone())).collect();
        for (request, reply) in requests.iter().zip(replies) {
            let reply = self.finish(request, reply, done);
            let model = &mut self.model[request.span()];
            match (&request.kind, reply) {
                (Kind::Read, Reply::Bytes(bytes)) => self.compare(request, &bytes, done),
                (Kind::Write { data, .. }, _) => model.copy_from_slice(data),
                (Kind::Zero(_), Reply::Done) => model.fill(0),
                (Kind::Discard { .. }, _) => self.look_at_discarded(disk, request, done),
                _ => {}
            }
        }
        requests.len()
    }

    fn compare(&self, request: &Request, bytes: &[u8], done: usize) {
        let model = &self.model[request.span()];
        if let Some(at) = crate::support::first_difference(bytes, model) {
            panic!(
                "{}, after {done} requests: {} differs at {:#x}: {:#x} instead of {:#x}",
                self.name,
                request.describe(),
                request.at + at,
                bytes[at],
                model[at]
            );
        }
    }

    /// What was discarded reads as zero or as before, sector by sector.
    fn look_at_discarded(&mut self, disk: &SharedDisk, request: &Request, done: usize) {
        let look = Request { kind: Kind::Read, ..request.clone() };
        let reading = self.start(disk, look.clone());
        let Reply::Bytes(bytes) = self.finish(&look, reading, done) else { panic!("a read gives bytes") };
        for sector in sectors_of(request.span()) {
            let now = &bytes[sector.start - request.at..sector.end - request.at];
            if vellum_core::is_zero(now) {
                self.model[sector].fill(0);
            }
        }
        self.compare(request, &bytes, done);
    }

    /// Requests for the same sectors.
    fn race(&mut self, disk: &SharedDisk, done: usize) -> usize {
        let region = (96 << 10).min(self.model.len() / SECTOR * SECTOR);
        let first = self.random.index((self.model.len() - region) / SECTOR + 1) * SECTOR;
        let mut requests: Vec<Request> = Vec::new();
        for _ in 0..2 + self.random.below(5) {
            let at = self.random.index(region / SECTOR) * SECTOR;
            let len = (1 + self.random.index(40 << 10)).next_multiple_of(SECTOR).min(region - at);
            let kind = match self.random.below(4) {
                0 => Kind::Zero(ZeroFlags { may_unmap: self.random.one_in(2), ..ZeroFlags::default() }),
                1 => Kind::Read,
                _ => Kind::Write { data: self.bytes(len), fua: self.random.one_in(60) },
            };
            requests.push(Request { at: first + at, len, kind });
        }
        let replies: Vec<_> = requests.iter().map(|request| self.start(disk, request.clone())).collect();
        for (request, reply) in requests.iter().zip(replies) {
            self.finish(request, reply, done);
        }
        let whole = Request { at: first, len: region, kind: Kind::Read };
        let reading = self.start(disk, whole.clone());
        let Reply::Bytes(now) = self.finish(&whole, reading, done) else { panic!("a read gives bytes") };
        for sector in sectors_of(whole.span()) {
            let mine = &now[sector.start - first..sector.end - first];
            let writers = requests.iter().filter(|request| {
                !matches!(request.kind, Kind::Read)
                    && request.at <= sector.start
                    && sector.end <= request.span().end
            });
            let mut has_writer = false;
            let mut is_theirs = false;
            for request in writers {
                has_writer = true;
                is_theirs |= match &request.kind {
                    Kind::Write { data, .. } => {
                        mine == &data[sector.start - request.at..sector.end - request.at]
                    }
                    _ => vellum_core::is_zero(mine),
                };
            }
            let is_old = mine == &self.model[sector.clone()];
            assert!(
                if has_writer { is_theirs } else { is_old },
                "{}, after {done} requests: the sector at {:#x} is nobody's in a race of {:?}",
                self.name,
                sector.start,
                requests.iter().map(Request::describe).collect::<Vec<_>>()
            );
            self.model[sector].copy_from_slice(mine);
        }
        requests.len()
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        // Some data is mostly zeros, and some all.
        match self.random.below(10) {
            0 => {}
            1 => bytes[len / 2] = 1,
            _ => self.random.fill(&mut bytes),
        }
        bytes
    }

    fn random_request(&mut self) -> Request {
        let size = self.model.len();
        let align = *self.random.pick(&[1, SECTOR, 4096, self.cluster, self.cluster]);
        let longest = *self.random.pick(&[SECTOR, 4096, 4096, 30_000, 3 * self.cluster.min(60_000)]);
        let at = self.random.index(size) / align * align;
        let len = (1 + self.random.index(longest)).next_multiple_of(align).min(size - at);
        let kind = match self.random.below(100) {
            0..=44 => Kind::Write { data: self.bytes(len), fua: self.random.one_in(80) },
            45..=59 => Kind::Zero(ZeroFlags {
                fua: self.random.one_in(80),
                may_unmap: self.random.one_in(2),
                fast_only: self.random.one_in(4),
            }),
            60..=68 => Kind::Discard { fua: self.random.one_in(80) },
            69..=97 => Kind::Read,
            _ => return Request { at: 0, len: 0, kind: Kind::Flush },
        };
        Request { at, len, kind }
    }
}

/// The sectors that have a byte in the span, cut to it.
fn sectors_of(span: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let first = span.start / SECTOR;
    (first..span.end.div_ceil(SECTOR))
        .map(move |sector| (sector * SECTOR).max(span.start)..((sector + 1) * SECTOR).min(span.end))
}
