//! Block devices of a server: each shows a disk by the kernel's ublk driver, its queues on the workers.
//!
//! ```text
//!   begin    what a dead server of ours left is removed ► added ► described ► opened ► queues on the workers, all asking
//!            ► started (the kernel looks for partitions)
//!            what a dead server of ours left to the next one: taken over ► opened ► queues on the workers ► goes on
//!   end      stopped: the kernel writes back what it has cached, waits for requests under way, and tells the queues
//!            ► queues ended ► removed
//! ```
//!
//! 1. Whatever fails on the way, what was added is stopped and removed.
//! 2. Calls of the control device block, and are made on threads that may; queues are served meanwhile.
//! 3. A device of another program, or one that is served, is left alone: those of this program carry a mark, which also says
//!    which disk they are of.
//! 4. A device that outlives its server is taken over by the next server of the same disk, and goes on where it was. So it has no
//!    write cache: what was answered is durable, or a killed server would have lost it behind its users' backs.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use event_listener::Event;
use futures_lite::future::or;
use vellum_core::{Buffer, Disk, Error, ErrorKind, Result, SharedDisk};
use vellum_export::Shutdown;
use vellum_export::ublk::{
    DEPTH, Facts, Kernel, QUEUES_MAX, REQUEST_BYTES_MAX, Row, SECTOR_BYTES, Target, Told, serve_queue,
};
use vellum_io::ublk::{self, Control, Device, NUMBERS_MAX, Params, Queue, Shape, State};
use vellum_io::{IoMode, Spawned, WorkersHandle, clock, io_mode, unblock};

use crate::UblkSpec;
use crate::serve::ExportSpec;
use crate::served::Disks;

/// What is written at our devices: in the upper bits which program, in the lower ones which disk.
const MARK: u64 = 0x564C << MARK_SHIFT;
const MARK_SHIFT: u32 = 48;

/// How long a queue has to be told that its questions make no sense.
const REFUSED_WITHIN: Duration = Duration::from_millis(2);

/// How long a device that a dead server left may take to become free, and how often it is looked at.
const FREE_WITHIN: Duration = Duration::from_secs(5);
const LOOKED_EVERY: Duration = Duration::from_millis(20);

/// The block devices of a server.
pub(crate) struct Blocks(Vec<Shown>);

struct Shown {
    control: Handle,
    number: u32,
    disk: SharedDisk,
    target: Arc<Target>,
    queues: Vec<Spawned<()>>,
}

/// The control device, for one call at a time.
#[derive(Clone)]
struct Handle(Arc<Mutex<Control>>);

impl Handle {
    /// Makes a call where it may block.
    async fn call<T: Send + 'static>(&self, call: impl FnOnce(&mut Control) -> T + Send + 'static) -> T {
        let control = self.0.clone();
        unblock(move || call(&mut control.lock().unwrap_or_else(PoisonError::into_inner))).await
    }
}

impl Blocks {
    /// Makes all of them; when one cannot be made, none stays. Once `shutdown` cuts, requests that come fail.
    pub(crate) async fn begin(
        specs: &[UblkSpec],
        exports: &[ExportSpec],
        disks: &Arc<Disks>,
        workers: &WorkersHandle,
        shutdown: &Shutdown,
    ) -> Result<Self> {
        let mut blocks = Self(Vec::new());
        let mut first_worker = 0;
        for spec in specs {
            match Shown::begin(spec, exports, disks, (workers, first_worker), shutdown).await {
                Ok(shown) => {
                    first_worker += shown.queues.len();
                    blocks.0.push(shown);
                }
                Err(error) => {
                    blocks.end().await;
                    return Err(error);
                }
            }
        }
        Ok(blocks)
    }

    /// Where they are.
    pub(crate) fn paths(&self) -> Vec<PathBuf> {
        self.0.iter().map(|shown| path_of(shown.number)).collect()
    }

    /// Who tells the kernel that a disk is larger.
    pub(crate) fn tellers(&self) -> Tellers {
        let teller = |shown: &Shown| Teller {
            control: shown.control.clone(),
            number: shown.number,
            disk: shown.disk.clone(),
            target: shown.target.clone(),
        };
        Tellers(self.0.iter().map(teller).collect())
    }

    /// Takes all of them away.
    pub(crate) async fn end(self) {
        for shown in self.0 {
            shown.end().await;
        }
    }
}

impl Shown {
    async fn begin(
        spec: &UblkSpec,
        exports: &[ExportSpec],
        disks: &Arc<Disks>,
        (workers, first_worker): (&WorkersHandle, usize),
        shutdown: &Shutdown,
    ) -> Result<Self> {
        let served = disks.find(spec.export.as_deref())?;
        if spec.number.is_some_and(|number| number >= NUMBERS_MAX) {
            return Err(Error::invalid(format!("a ublk device has a number below {NUMBERS_MAX}")));
        }
        let queues = spec.queues.map_or(workers.count(), usize::from);
        let queues = u16::try_from(queues).unwrap_or(QUEUES_MAX).clamp(1, QUEUES_MAX);
        if io_mode() == IoMode::Threads {
            return Err(Error::unsupported(
                "can't make a block device by ublk without io_uring, by which alone the kernel is reached; leave --io threads out, or use --fuse FILE or --nbd unix:PATH instead",
            ));
        }
        let image = served.path();
        let is_for_reading = |export: &ExportSpec| export.path == image && export.image.read_only;
        let is_for_reading = exports.iter().any(is_for_reading);
        let facts = Facts::new(&served.disk().geometry(), is_for_reading, spec.keeps);
        let control = Handle(Arc::new(Mutex::new(unblock(Control::open).await?)));
        let mark = mark_of(image).await;
        let waiting = match spec.number {
            Some(number) => clear(&control, number, mark, spec.keeps.then_some(&facts)).await?,
            None => None,
        };
        let is_taken_over = waiting.is_some();
        let (number, shape) = match waiting {
            Some(waiting) => waiting,
            None => {
                let wanted = Shape { queues, depth: DEPTH, request_bytes_max: REQUEST_BYTES_MAX };
                add(&control, spec, wanted, mark).await?
            }
        };
        let target = Arc::new(Target::new(served.disk(), &facts));
        let mut shown = Self { control, number, disk: served.disk(), target, queues: Vec::new() };
        // Nobody else may go back to a snapshot under it from here on.
        served.hold();
        match shown.start((shape, is_taken_over), &facts, (workers, first_worker), shutdown).await {
            Ok(()) => Ok(shown),
            Err(error) => {
                shown.end().await;
                Err(error.context(format!("can't make {}", path_of(number).display())))
            }
        }
    }

    async fn start(
        &mut self,
        (shape, is_taken_over): (Shape, bool),
        facts: &Facts,
        (workers, first_worker): (&WorkersHandle, usize),
        shutdown: &Shutdown,
    ) -> Result<()> {
        let number = self.number;
        let params = Params {
            sectors: facts.sectors,
            read_only: facts.read_only,
            write_through: facts.write_through,
            physical_shift: facts.physical_shift,
            best_shift: facts.best_shift,
            request_bytes_max: shape.request_bytes_max.min(REQUEST_BYTES_MAX),
            discard_granularity: 1 << facts.physical_shift,
            range_sectors_max: facts.range_sectors_max,
        };
        if !is_taken_over {
            self.control.call(move |control| control.describe(number, &params)).await?;
        }
        let device = unblock(move || Device::open(number)).await?;
        let opened = (0..shape.queues).map(|queue| device.queue(queue, shape.depth));
        let opened: Vec<Queue> = opened.collect::<Result<_>>()?;
        drop(device);
        let asked = Arc::new(Asked::default());
        for (index, queue) in opened.into_iter().enumerate() {
            let (target, shutdown, asked) = (self.target.clone(), shutdown.clone(), asked.clone());
            self.queues.push(workers.spawn((first_worker + index) % workers.count(), move || async move {
                let serving = serve_queue(OnWorker(queue), shape.depth, target, shutdown);
                // Polled after it, when all tags have asked.
                let saying = async {
                    clock().sleep(REFUSED_WITHIN).await;
                    asked.one_more();
                    std::future::pending().await
                };
                or(serving, saying).await;
            }));
        }
        let broken = async {
            while self.target.broken().is_none() {
                clock().sleep(LOOKED_EVERY).await;
            }
        };
        or(asked.by_all(usize::from(shape.queues)), broken).await;
        if let Some(error) = self.target.broken() {
            return Err(error);
        }
        let start = if is_taken_over { Control::go_on } else { Control::start };
        self.control.call(move |control| start(control, number)).await
    }

    async fn end(self) {
        let Self { control, number, queues, .. } = self;
        if let Err(error) = control.call(move |control| control.stop(number)).await {
            tracing::warn!("{}", error.chain());
        }
        for queue in queues {
            // A worker that has ended has nothing under way.
            let _ = queue.await;
        }
        if let Err(error) = control.call(move |control| control.remove(number)).await {
            tracing::warn!("{}", error.chain());
        }
    }
}

/// Those who tell the kernel that a disk is larger.
#[derive(Clone)]
pub(crate) struct Tellers(Arc<[Teller]>);

struct Teller {
    control: Handle,
    number: u32,
    disk: SharedDisk,
    target: Arc<Target>,
}

impl Tellers {
    /// Each looks whether its disk is larger.
    pub(crate) async fn look_again(&self) {
        for teller in &*self.0 {
            teller.look_again().await;
        }
    }
}

impl Teller {
    async fn look_again(&self) {
        let (number, sectors) = (self.number, self.disk.geometry().size / SECTOR_BYTES);
        // First what requests are measured by: the kernel may ask for what is new at once.
        if !self.target.resize(sectors) {
            return;
        }
        let resized = self.control.call(move |control| match control.can_resize() {
            true => control.resize(number, sectors),
            false => Err(Error::unsupported("this kernel can't resize it (Linux 6.16 or later can)")),
        });
        if let Err(error) = resized.await {
            let path = path_of(number);
            tracing::warn!("{} keeps its size until the next start: {}", path.display(), error.chain());
        }
    }
}

/// How many queues have asked for their first requests, and were not refused.
#[derive(Default)]
struct Asked {
    queues: AtomicUsize,
    event: Event,
}

impl Asked {
    fn one_more(&self) {
        self.queues.fetch_add(1, Ordering::AcqRel);
        self.event.notify(usize::MAX);
    }

    async fn by_all(&self, queues: usize) {
        while self.queues.load(Ordering::Acquire) < queues {
            let listener = self.event.listen();
            if self.queues.load(Ordering::Acquire) < queues {
                listener.await;
            }
        }
    }
}

/// A queue of the kernel, on the worker that serves it.
struct OnWorker(Queue);

impl Kernel for OnWorker {
    async fn next(&self, tag: u16, answer: Option<i32>) -> Result<Told> {
        Ok(match self.0.next(tag, answer).await? {
            ublk::Told::Request => Told::Request,
            ublk::Told::NoMore => Told::NoMore,
        })
    }

    fn row(&self, tag: u16) -> Row {
        let ublk::Row { op_flags, sectors, start } = self.0.row(tag);
        Row { op_flags, sectors, start }
    }

    fn take(&self, tag: u16, len: usize) -> Result<Buffer> {
        self.0.take(tag, len)
    }

    fn give(&self, tag: u16, data: &Buffer) -> Result<()> {
        self.0.give(tag, data)
    }
}

fn path_of(number: u32) -> PathBuf {
    PathBuf::from(format!("/dev/ublkb{number}"))
}

/// The mark of a device that shows this image.
async fn mark_of(image: &Path) -> u64 {
    let image = image.to_owned();
    let path = unblock(move || image.canonicalize().unwrap_or(image)).await;
    // FNV-1a: it is the same in every build, and nobody gains by finding another path with the same sum.
    let sum = path.as_os_str().as_bytes().iter().fold(0xCBF2_9CE4_8422_2325, |sum: u64, byte| {
        (sum ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01B3)
    });
    MARK | sum >> (u64::BITS - MARK_SHIFT)
}

/// Removes what a dead server of ours left under this number. One that was killed a moment ago may be still on its way out.
/// One that waits for the next server of this disk is taken over, where there are facts that it must agree with, and given back
/// with its shape.
async fn clear(
    control: &Handle,
    number: u32,
    mark: u64,
    keeps: Option<&Facts>,
) -> Result<Option<(u32, Shape)>> {
    let begun = clock().now();
    let path = path_of(number);
    while let Some(standing) = control.call(move |control| control.look(number)).await? {
        let used = |who: &str| Error::new(ErrorKind::Locked, format!("can't make {}: {who}", path.display()));
        if standing.mark >> MARK_SHIFT != MARK >> MARK_SHIFT {
            return Err(used("another program has a ublk device with this number"));
        }
        if standing.state == State::Live {
            if clock().now() - begun > FREE_WITHIN {
                return Err(used(&format!("process {} serves a disk there", standing.pid)));
            }
            clock().sleep(LOOKED_EVERY).await;
            continue;
        }
        if standing.state == State::Waiting {
            if standing.mark != mark {
                return Err(used("a device that shows another image waits there for its server"));
            }
            if let Some(facts) = keeps {
                let size = control.call(move |control| control.size(number)).await?;
                if size != (facts.sectors, facts.read_only)
                    || standing.shape.request_bytes_max > REQUEST_BYTES_MAX
                {
                    return Err(used(
                        "the device that waits there is not as this disk is now; without --ublk-keep it is taken away",
                    ));
                }
                take_over(control, number).await?;
                return Ok(Some((number, standing.shape)));
            }
        }
        // Nobody else has it open: who is about to start it, or is on the way out.
        if let Err(error) = unblock(move || Device::open(number)).await {
            if clock().now() - begun > FREE_WITHIN {
                return Err(error.context(format!("can't make {}", path.display())));
            }
            clock().sleep(LOOKED_EVERY).await;
            continue;
        }
        tracing::info!("{} was left by a server that has gone, and is taken away", path.display());
        control.call(move |control| control.stop(number)).await?;
        return control.call(move |control| control.remove(number)).await.map(|()| None);
    }
    Ok(None)
}

/// Takes over a device that waits. Its last server may still be on its way out.
async fn take_over(control: &Handle, number: u32) -> Result<()> {
    let begun = clock().now();
    while !control.call(move |control| control.take_over(number)).await? {
        if clock().now() - begun > FREE_WITHIN {
            let context = format!("can't make {}: another process has it open", path_of(number).display());
            return Err(Error::new(ErrorKind::Locked, context));
        }
        clock().sleep(LOOKED_EVERY).await;
    }
    tracing::info!("{} waited for its server, and goes on", path_of(number).display());
    Ok(())
}

/// Adds a device. The number of one that was just removed may take a moment to be free.
async fn add(control: &Handle, spec: &UblkSpec, shape: Shape, mark: u64) -> Result<(u32, Shape)> {
    let (begun, number, keeps) = (clock().now(), spec.number, spec.keeps);
    loop {
        match control.call(move |control| control.add(number, shape, mark, keeps)).await {
            Err(error) if error.kind() == ErrorKind::Locked && clock().now() - begun < FREE_WITHIN => {
                clock().sleep(LOOKED_EVERY).await;
            }
            added => return added,
        }
    }
}
