//! One count: an image is made, it gets requests, it is closed, and the cost of all that is counted.
//!
//! ```text
//!   make ► (serve, fill, stop) ► (snapshot) ► serve ► warm up │ what counts      │ stop: the image is closed
//!                                                             └── foreground ────┘
//!                                                             └───────────── total ──────────────┘
//! ```

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::SystemTime;

use vellum_core::{Context, Error, ErrorKind, Result};

use super::{Guest, Host, stats, strace};
use crate::device::Device;
use crate::guest::{Bytes, Guest as Client, Request};
use crate::programs::{dir_or_beside_me, run};
use crate::server::{Cache, QemuNbd, Running, Server, Serving, Vellum, first_line_of};
use crate::subjects::{Maker, Subject, Tools};

/// The witness that counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Witness {
    /// Vellum's own counters.
    Stats,
    /// `strace`.
    Strace,
    /// Both, of one run.
    Both,
}

/// What is asked, in order.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The size of the disk.
    pub disk_bytes: u64,
    /// What is written.
    pub bytes: Bytes,
    /// What is written before all else; the image is closed then.
    pub fill: Vec<Request>,
    /// The first operations, which do not count.
    pub warm_up: Vec<Request>,
    /// What counts, for each guest.
    pub counted: Vec<Vec<Request>>,
}

impl Plan {
    /// What the guests ask that count.
    pub fn asked(&self) -> Guest {
        let mut guest = Guest::default();
        for request in self.counted.iter().flatten() {
            match request {
                Request::Write { len, .. } => {
                    guest.writes += 1;
                    guest.bytes_written += *len as u64;
                }
                // It includes the request for a flush.
                Request::WriteThrough { len, .. } => {
                    guest.writes += 1;
                    guest.bytes_written += *len as u64;
                    guest.flushes += 1;
                }
                Request::Discard { .. } => guest.discards += 1,
                Request::Flush => guest.flushes += 1,
                Request::Read { .. } | Request::Zero { .. } => {}
            }
        }
        guest
    }
}

/// The image that a plan is for.
#[derive(Clone, Copy)]
pub struct Scene<'a> {
    /// What its guests ask.
    pub plan: &'a Plan,
    /// A raw image below.
    pub base: Option<&'a Path>,
    /// Whether an internal snapshot shares what was filled.
    pub snapshot: bool,
}

/// What was seen of a plan.
#[derive(Debug, Clone, Copy)]
pub struct Seen {
    /// Vellum's own counts; at least one of the two is there.
    pub stats: Option<Host>,
    /// The counts of `strace`.
    pub strace: Option<Host>,
    /// What was read of the base meanwhile, as `strace` saw it.
    pub base_bytes_read: Option<u64>,
    /// Flushes that the device below the directory completed, whatever caused them, up to the last answer.
    pub device_flushes: Option<u64>,
}

impl Seen {
    /// The counts of the witness that is reported: `strace` has the time of each call.
    pub fn host(&self) -> Option<Host> {
        self.strace.or(self.stats)
    }
}

/// The directory, the programs, and what they can.
pub struct Lab {
    /// Where images, sockets and traces are; removed with it.
    pub dir: PathBuf,
    /// The build of Vellum.
    pub vellum: Vellum,
    /// What all programs say of their version.
    pub programs: Vec<String>,
    /// Why there is no `strace`.
    pub blind: Option<String>,
    /// Why there is no QEMU.
    pub no_qemu: Option<String>,
    /// Where flushes are counted too.
    pub device: Option<Device>,
    knows_journal: bool,
}

/// The files of one worker, which counts one row at a time.
pub struct Desk {
    /// The directory of all the others.
    pub dir: PathBuf,
    /// The image.
    pub image: PathBuf,
    /// The server's socket.
    pub socket: PathBuf,
    /// What `vellum serve --stats-json` writes.
    pub figures: PathBuf,
    /// What `strace` writes.
    pub trace: PathBuf,
}

impl Desk {
    /// Makes the directory, or empties it, for an image of this format.
    pub fn new(dir: PathBuf, format: &str) -> Result<Self> {
        drop(fs::remove_dir_all(&dir));
        fs::create_dir(&dir).context(|| format!("can't make {}", dir.display()))?;
        let path = |name: &str| dir.join(name);
        let image = path(&format!("image.{format}"));
        let (socket, figures, trace) = (path("nbd.sock"), path("stats.json"), path("trace"));
        Ok(Self { dir, image, socket, figures, trace })
    }
}

/// Microseconds since 1970, the format of `strace -ttt`.
fn now_us() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_micros()).unwrap_or(u64::MAX)
}

/// All guests at once, each waiting for its answers.
fn ask_all(clients: &mut [Client], requests: &[Vec<Request>]) -> Result<()> {
    thread::scope(|scope| {
        let guests: Vec<_> = clients
            .iter_mut()
            .zip(requests)
            .map(|(client, requests)| {
                scope.spawn(|| requests.iter().try_for_each(|request| client.ask(*request)))
            })
            .collect();
        guests.into_iter().try_for_each(|guest| guest.join().expect("guests do not panic"))
    })
}

/// What was counted up to a moment.
#[derive(Clone, Copy)]
struct Mark {
    /// When the observation was begun, and when it had started.
    at_us: u64,
    settled_us: u64,
    stats: stats::Figures,
    device: [u64; 2],
}

impl Lab {
    /// Checks which programs are installed and what they support, and makes a directory in `dir`.
    pub fn open(dir: Option<&PathBuf>, vellum: Option<&Vellum>) -> Result<Self> {
        let vellum = vellum.cloned().map_or_else(Vellum::beside_me, Ok)?;
        let mut programs = vec![first_line_of(Command::new(&vellum.path).arg("--version"))?];
        let mut missing =
            |program: &str, version: &str| match first_line_of(Command::new(program).arg(version)) {
                Ok(version) => {
                    programs.push(version);
                    None
                }
                Err(error) => Some(error.chain()),
            };
        let blind = missing("strace", "--version");
        let no_qemu = missing("qemu-img", "--version").or_else(|| missing("qemu-nbd", "--version"));
        let dir = dir_or_beside_me(dir)?.join(format!("vellum-lab-{}", std::process::id()));
        fs::create_dir_all(&dir).context(|| format!("can't make {}", dir.display()))?;
        // As the kernel names it: paths in a trace are compared with it.
        let dir = dir.canonicalize().context(|| format!("can't find {}", dir.display()))?;
        let knows_journal = Tools::probe(&vellum.path, &dir.join("probe"))?.knows_journal;
        Ok(Self { dir, vellum, programs, blind, no_qemu, device: None, knows_journal })
    }

    /// How images are made here.
    pub fn tools(&self) -> Tools<'_> {
        Tools { vellum: &self.vellum.path, knows_journal: self.knows_journal }
    }

    /// Where a full base goes.
    pub fn base(&self) -> PathBuf {
        self.dir.join("base.raw")
    }

    /// Where a base without data goes.
    pub fn zeros(&self) -> PathBuf {
        self.dir.join("zeros.raw")
    }

    /// Why a format is left out.
    pub fn refusal(&self, subject: &Subject) -> Result<Option<String>> {
        match (&self.no_qemu, subject.maker) {
            (Some(reason), Maker::Qemu) => Ok(Some(reason.clone())),
            _ => subject.refusal(self.tools(), &self.dir.join("probe")),
        }
    }

    /// Makes an image, does what is planned, closes it.
    pub fn count(
        &self,
        subject: &Subject,
        scene: Scene<'_>,
        witness: Witness,
        worker: usize,
    ) -> Result<Seen> {
        let Scene { plan, base, snapshot } = scene;
        let desk = Desk::new(self.dir.join(worker.to_string()), subject.format)?;
        subject.make(self.tools(), &desk.image, plan.disk_bytes, base)?;
        let serving = Serving {
            image: &desk.image,
            format: subject.format,
            cache: Cache::Buffered,
            connections: plan.counted.len(),
            socket: &desk.socket,
        };
        let server: &dyn Server = match subject.maker {
            Maker::Vellum => &self.our_server(&desk.figures, witness, subject.prepares()),
            Maker::Qemu => &QemuNbd::VISIBLE,
        };
        if !plan.fill.is_empty() {
            let running = Running::start(server, &serving)?;
            let mut client = Client::connect_writing(running.socket(), plan.bytes)?;
            plan.fill.iter().try_for_each(|request| client.ask(*request))?;
            client.leave()?;
            running.stop()?;
            drop(fs::remove_file(&desk.figures)); // those of the server that has ended
        }
        if snapshot {
            run(&mut subject.snapshot(self.tools(), &desk.image))?;
        }
        let mut command = server.command(&serving)?;
        if witness != Witness::Stats {
            command = strace::watched(&command, &desk.trace);
        }
        let running = Running::start_command(command, &serving)?;
        let pid = running.pid();
        let connect = |_| Client::connect_writing(running.socket(), plan.bytes);
        let mut clients = (0..plan.counted.len()).map(connect).collect::<Result<Vec<_>>>()?;
        let device = || self.device.as_ref().map_or(Ok(0), Device::flushes);
        let mark = |clients: &mut [Client], number: u64| {
            let (at_us, before) = (now_us(), device()?);
            let stats = if witness == Witness::Strace {
                stats::Figures::default()
            } else {
                // Figures that know of this read were taken after the last answer.
                clients[0].read_a_block()?;
                stats::read_after(&desk.figures, number)?
            };
            Ok(Mark { at_us, settled_us: now_us(), stats, device: [before, device()?] })
        };
        plan.warm_up.iter().try_for_each(|request| clients[0].ask(*request))?;
        let begun = mark(&mut clients, 1)?;
        ask_all(&mut clients, &plan.counted)?;
        let ended = mark(&mut clients, 2)?;
        clients.into_iter().try_for_each(Client::leave)?;
        running.stop()?;
        let mut seen = Seen {
            stats: None,
            strace: None,
            base_bytes_read: None,
            device_flushes: self.device.as_ref().map(|_| ended.device[0] - begun.device[1]),
        };
        if witness != Witness::Strace {
            let closed = stats::read(&desk.figures)?;
            seen.stats = Some(Host {
                foreground: ended.stats.foreground - begun.stats.foreground,
                total: closed.total - begun.stats.total,
            });
        }
        if witness != Witness::Stats {
            let trace = strace::read(&desk.trace, pid)?;
            let calls = strace::parse(&trace, &desk.dir)?;
            let until = |end_us| strace::sum(&calls, begun.at_us, end_us);
            seen.strace = Some(Host { foreground: until(ended.at_us), total: until(u64::MAX) });
            if let Some(base) = base {
                let calls = strace::parse(&trace, base)?;
                seen.base_bytes_read = Some(strace::bytes_read(&calls, begun.settled_us, ended.at_us));
            }
        }
        Ok(seen)
    }

    /// The server's calls to the host, one by one, to the clean close.
    pub fn calls(&self, subject: &Subject, plan: &Plan) -> Result<Vec<strace::Call>> {
        if let Some(reason) = &self.blind {
            return Err(Error::new(ErrorKind::NotFound, reason.clone()));
        }
        self.count(subject, Scene { plan, base: None, snapshot: false }, Witness::Strace, 0)?;
        // The desk stays until the next one is made in its place.
        let desk = self.dir.join("0");
        let trace = desk.join("trace");
        let text = fs::read_to_string(&trace).context(|| format!("can't read {}", trace.display()))?;
        strace::parse(&text, &desk)
    }

    /// Vellum, which writes its counters to this file; without a ring when it is traced. The amount that it
    /// prepares ahead of need depends on the time, so it is counted in rows of its own.
    fn our_server(&self, figures: &Path, witness: Witness, prepares: bool) -> Vellum {
        let mut vellum = self.vellum.clone();
        if !prepares {
            vellum.arguments.extend(["--prealloc".into(), "off".into()]);
        }
        vellum.arguments.extend(["--stats-json".into(), figures.into()]);
        // For the base, which is not beside the image.
        vellum.arguments.extend(["--allow-dir".into(), self.dir.clone().into()]);
        if witness != Witness::Stats {
            vellum.arguments.extend(["--io".into(), "threads".into()]);
        }
        vellum
    }

    /// What both witnesses say of one run.
    pub fn both(&self, subject: &Subject, scene: Scene<'_>, worker: usize) -> Result<(Host, Host)> {
        let seen = self.count(subject, scene, Witness::Both, worker)?;
        seen.stats
            .zip(seen.strace)
            .ok_or_else(|| Error::new(ErrorKind::NotFound, "one of the witnesses said nothing"))
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.dir));
    }
}
