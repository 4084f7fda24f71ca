//! Block devices of a server: each exports a disk through the kernel's ublk driver, with its queues on the
//! workers.
//!
//! ```text
//!   begin    what a dead server of ours left is removed ► added ► described ► opened ► queues on the workers, all asking
//!            ► started (the kernel looks for partitions)
//!            what a server of ours left to the next one: taken over ► opened ► queues on the workers ► goes on
//!   end      stopped: the kernel writes back what it has cached, waits for requests under way, and tells the queues
//!            ► queues ended ► removed
//!            one that is kept: nothing more is begun, what was begun is answered ► the process ends, its rings with it,
//!            and the kernel keeps what it has for the next server
//! ```
//!
//! 1. If a step fails, the devices that were added are stopped and removed, and those that were taken over go
//!    back to waiting, because they have users. All devices are examined before the first is changed.
//! 2. Calls of the control device block, and are made on threads that may block; queues are served meanwhile.
//! 3. A device of another program, or one that is being served, is left alone: devices of this program carry
//!    a mark, which also identifies their disk.
//! 4. A device that outlives its server is taken over by the next server of the same disk, and continues
//!    where it was. So it has no write cache: a request that was answered is durable. Otherwise a killed
//!    server would lose data without its users noticing.

mod standing;

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use event_listener::Event;
use futures_lite::future::or;
use vellum_core::{Buffer, Disk, Error, ErrorKind, Result, SharedDisk, join_all, lock};
use vellum_export::Shutdown;
use vellum_export::ublk::{
    DEPTH, Facts, Kernel, QUEUES_MAX, REQUEST_BYTES_MAX, Row, SECTOR_BYTES, Target, Told, serve_queue,
};
use vellum_io::ublk::{self, Control, Device, NUMBERS_MAX, Params, Queue, Shape, State};
use vellum_io::{IoMode, Spawned, WorkersHandle, clock, io_mode, unblock};

use self::standing::{Found, clear, look, mark_of, remove, take_over};
use crate::contained::contained;
use crate::served::{Disks, Served};
use crate::spec::{ExportSpec, UblkSpec};

/// How long a queue may take to report that its commands are invalid.
const REFUSED_WITHIN: Duration = Duration::from_millis(2);

/// How long a device that a server left may take to become free, and how often that is checked.
const FREE_WITHIN: Duration = Duration::from_secs(5);
/// How long removing may take at the end. A kernel that waits until the device is not in use (before Linux
/// 6.9) has removed it before it waits.
const REMOVED_WITHIN: Duration = Duration::from_secs(1);
const LOOKED_EVERY: Duration = Duration::from_millis(20);

/// The block devices of a server.
#[derive(Default)]
pub(crate) struct Blocks(Vec<Shown>);

struct Shown {
    served: Arc<Served>,
    control: Handle,
    number: u32,
    disk: SharedDisk,
    target: Arc<Target>,
    queues: Vec<Spawned<()>>,
    /// Queues that have ended.
    ended: Arc<Count>,
    keeps: bool,
    is_taken_over: bool,
    is_started: bool,
}

/// The control device, for one call at a time.
#[derive(Clone)]
struct Handle(Arc<Mutex<Control>>);

impl Handle {
    /// Makes a call on a thread that may block.
    async fn call<T: Send + 'static>(&self, call: impl FnOnce(&mut Control) -> T + Send + 'static) -> T {
        let control = self.0.clone();
        unblock(move || call(&mut lock(&control))).await
    }
}

impl Blocks {
    /// Makes all of them; when one cannot be made, none stays but those that were there before, which wait
    /// again. Once `shutdown` cuts, requests that come fail.
    pub(crate) async fn begin(
        specs: &[UblkSpec],
        exports: &[ExportSpec],
        disks: &Arc<Disks>,
        (workers, mode): (&WorkersHandle, IoMode),
        shutdown: &Shutdown,
    ) -> Result<Self> {
        let mut numbers: Vec<u32> = specs.iter().filter_map(|spec| spec.number).collect();
        numbers.sort_unstable();
        if let Some(twice) = numbers.windows(2).find(|two| two[0] == two[1]) {
            return Err(Error::invalid(format!("two --ublk options name {}", path_of(twice[0]).display())));
        }
        let mut plans = Vec::new();
        for spec in specs {
            plans.push(Plan::make(spec, exports, disks, mode).await?);
        }
        let mut blocks = Self(Vec::new());
        let mut first_worker = 0;
        for plan in plans {
            match Shown::begin(plan, (workers, first_worker), shutdown).await {
                Ok(shown) => {
                    first_worker += shown.queues.len();
                    blocks.0.push(shown);
                }
                Err(error) => {
                    blocks.end_all(false).await;
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

    /// The handles that tell the kernel that a disk has grown.
    pub(crate) fn size_notifiers(&self) -> SizeNotifiers {
        SizeNotifiers(self.0.iter().map(Shown::size_notifier).collect())
    }

    /// Completes when none of them is served any more, though none was ended here; at once, when there are
    /// none.
    pub(crate) async fn gone(&self) -> Result<()> {
        let gone = self.0.iter().map(|shown| Box::pin(shown.gone()));
        join_all(gone).await.into_iter().collect()
    }

    /// Removes all of them, or leaves them to the next server, as configured.
    pub(crate) async fn end(self) {
        self.end_all(true).await;
    }

    async fn end_all(self, have_served: bool) {
        // Concurrently: a device that is to be left must be marked before requests fail.
        join_all(self.0.into_iter().map(|shown| Box::pin(shown.end(have_served)))).await;
    }
}

/// What is to be shown, and what is there already.
struct Plan<'a> {
    spec: &'a UblkSpec,
    served: Arc<Served>,
    control: Handle,
    facts: Facts,
    mark: u64,
    found: Found,
}

impl<'a> Plan<'a> {
    async fn make(
        spec: &'a UblkSpec,
        exports: &[ExportSpec],
        disks: &Arc<Disks>,
        mode: IoMode,
    ) -> Result<Self> {
        let served = disks.find(spec.export.as_deref())?;
        if spec.number.is_some_and(|number| number >= NUMBERS_MAX) {
            return Err(Error::invalid(format!("a ublk device has a number below {NUMBERS_MAX}")));
        }
        if mode == IoMode::Threads {
            return Err(Error::unsupported(
                "can't create a ublk device without io_uring, the driver's only interface; omit --io threads, or \
                 use --fuse FILE or --nbd unix:PATH instead",
            ));
        }
        let image = served.path();
        let mut exports = exports.iter().filter(|export| export.path == image).map(|export| &export.image);
        let snapshot = exports.clone().find_map(|image| image.snapshot.as_deref());
        let facts = Facts::new(&served.disk().geometry(), exports.any(|image| image.read_only), spec.keeps);
        let control = Handle(Arc::new(Mutex::new(unblock(Control::open).await?)));
        if io_mode() == IoMode::Threads {
            return Err(Error::unsupported(
                "can't create a ublk device: io_uring, the driver's only interface, is missing or too old on this \
                 kernel; use --fuse FILE or --nbd unix:PATH instead",
            ));
        }
        let mark = mark_of(&image, snapshot).await;
        let found = match spec.number {
            Some(number) => look(&control, number, mark, spec.keeps, &facts).await?,
            None => Found::Nothing,
        };
        Ok(Self { spec, served, control, facts, mark, found })
    }
}

impl Shown {
    async fn begin(
        plan: Plan<'_>,
        (workers, first_worker): (&WorkersHandle, usize),
        shutdown: &Shutdown,
    ) -> Result<Self> {
        let Plan { spec, served, control, mut facts, mark, found } = plan;
        let is_taken_over = matches!(found, Found::Waiting { .. });
        let (number, shape) = match (found, spec.number) {
            (Found::Waiting { shape, pid, sectors }, Some(number)) => {
                facts.sectors = sectors;
                take_over(&control, number, pid).await?;
                (number, shape)
            }
            (found, number) => {
                if let (Found::Left, Some(number)) = (found, number) {
                    clear(&control, number).await?;
                }
                let queues = spec.queues.map_or(workers.count(), usize::from);
                let queues = u16::try_from(queues).unwrap_or(QUEUES_MAX).clamp(1, QUEUES_MAX);
                let wanted = Shape { queues, depth: DEPTH, request_bytes_max: REQUEST_BYTES_MAX };
                add(&control, spec, wanted, mark).await?
            }
        };
        let mut shown = Self {
            served: served.clone(),
            control,
            number,
            disk: served.disk(),
            target: Arc::new(Target::new(served.disk(), &facts)),
            queues: Vec::new(),
            ended: Arc::default(),
            keeps: spec.keeps,
            is_taken_over,
            is_started: false,
        };
        // From here on the disk under it cannot be restored from a snapshot.
        served.hold();
        match shown.start(shape, &facts, (workers, first_worker), shutdown).await {
            Ok(()) => {
                shown.is_started = true;
                // One that was taken over may be smaller than its disk.
                shown.size_notifier().look_again().await;
                Ok(shown)
            }
            Err(error) => {
                shown.end(false).await;
                Err(error.context(format!("can't create {}", path_of(number).display())))
            }
        }
    }

    async fn start(
        &mut self,
        shape: Shape,
        facts: &Facts,
        (workers, first_worker): (&WorkersHandle, usize),
        shutdown: &Shutdown,
    ) -> Result<()> {
        let (number, is_taken_over) = (self.number, self.is_taken_over);
        let params = Params {
            sectors: facts.sectors,
            read_only: facts.read_only,
            write_through: facts.write_through,
            physical_shift: facts.physical_shift,
            best_shift: facts.best_shift,
            request_bytes_max: shape.request_bytes_max.min(REQUEST_BYTES_MAX),
            discard_granularity: 1 << facts.physical_shift,
            range_sectors_max: facts.range_sectors_max,
            zeroes_sectors_max: facts.zeroes_sectors_max,
        };
        if !is_taken_over {
            self.control.call(move |control| control.describe(number, &params)).await?;
        }
        let device = unblock(move || Device::open(number)).await?;
        let opened = (0..shape.queues).map(|queue| device.queue(queue, shape.depth));
        let opened: Vec<Queue> = opened.collect::<Result<_>>()?;
        drop(device);
        let asked = Arc::new(Count::default());
        for (index, queue) in opened.into_iter().enumerate() {
            let (target, shutdown) = (self.target.clone(), shutdown.clone());
            let (asked, ended, end) = (asked.clone(), self.ended.clone(), self.target.clone());
            self.queues.push(workers.spawn((first_worker + index) % workers.count(), move || async move {
                let serving = serve_queue(OnWorker(queue), shape.depth, target, shutdown);
                // Polled after it, when all tags have been submitted.
                let saying = async {
                    clock().sleep(REFUSED_WITHIN).await;
                    asked.one_more();
                    std::future::pending().await
                };
                let served = async {
                    or(serving, saying).await;
                    Ok(())
                };
                let what = format!("queue {index} of {}", path_of(number).display());
                if let Err(error) = contained(&what, served).await {
                    // The task that waits for the device sees, and logs, that it is not served properly.
                    end.break_down(error);
                }
                ended.one_more();
            }));
        }
        let broken = async { drop(self.target.breaks_down().await) };
        or(asked.by_all(usize::from(shape.queues)), broken).await;
        if let Some(error) = self.target.broken() {
            return Err(error);
        }
        let start = if is_taken_over { Control::go_on } else { Control::start };
        self.control.call(move |control| start(control, number)).await
    }

    fn size_notifier(&self) -> SizeNotifier {
        let Self { control, number, disk, target, .. } = self;
        SizeNotifier { control: control.clone(), number: *number, disk: disk.clone(), target: target.clone() }
    }

    /// Completes when it is not served any more, though it was not ended here.
    async fn gone(&self) -> Result<()> {
        let path = path_of(self.number);
        let ended = async {
            self.ended.by_all(self.queues.len()).await;
            Ok(())
        };
        let gone = or(async { Err(self.target.breaks_down().await) }, ended).await;
        match &gone {
            Ok(()) => tracing::error!("{} was removed by another program", path.display()),
            Err(error) => {
                tracing::error!("{} can no longer be served: {}", path.display(), error.chain());
            }
        }
        gone.map_err(|error| error.context(format!("can't serve {}", path.display())))
    }

    /// Removes it, or leaves it to the next server: when it `has_served`, if it is to be kept, else, if it
    /// existed before. A broken device is left to the kernel, which removes it when the process ends:
    /// stopping it would mean waiting for requests that are never answered.
    async fn end(self, has_served: bool) {
        let served = self.served.clone();
        self.leave_or_stop(has_served).await;
        served.release();
    }

    async fn leave_or_stop(self, has_served: bool) {
        let Self { control, number, target, queues, ended, keeps, is_taken_over, is_started, .. } = self;
        let path = path_of(number);
        let is_kept = if has_served { keeps } else { is_taken_over };
        if is_kept || is_started && target.broken().is_some() {
            target.leave().await;
            if is_kept {
                tracing::info!("{} is kept for the next server", path.display());
            }
            return;
        }
        if has_served && ended.queues.load(Ordering::Acquire) == queues.len() {
            // The device has been removed elsewhere; the number may belong to another device now.
            return;
        }
        if let Err(error) = control.call(move |control| control.stop(number)).await {
            tracing::warn!("{}", error.chain());
        }
        for queue in queues {
            // A worker that has ended has nothing in flight.
            let _ = queue.await;
        }
        match remove(&control, number, REMOVED_WITHIN).await {
            Some(Ok(())) => {}
            Some(Err(error)) => tracing::warn!("{}", error.chain()),
            None => tracing::info!("{} and its number are still in use", path.display()),
        }
    }
}

/// The handles that tell the kernel that a disk has grown.
#[derive(Clone)]
pub(crate) struct SizeNotifiers(Arc<[SizeNotifier]>);

struct SizeNotifier {
    control: Handle,
    number: u32,
    disk: SharedDisk,
    target: Arc<Target>,
}

impl SizeNotifiers {
    /// Each checks whether its disk has grown.
    pub(crate) async fn look_again(&self) {
        for notifier in &*self.0 {
            notifier.look_again().await;
        }
    }
}

impl SizeNotifier {
    async fn look_again(&self) {
        let (number, sectors) = (self.number, self.disk.geometry().size / SECTOR_BYTES);
        // First what requests are measured by: the kernel may ask for what is new at once.
        if !self.target.resize(sectors) {
            return;
        }
        let resized = self.control.call(move |control| match control.can_resize() {
            // Some kernels do not look themselves; and what has the number may be another's by now.
            true if !control.look(number)?.is_some_and(|standing| {
                standing.state == State::Live && standing.pid.cast_unsigned() == std::process::id()
            }) =>
            {
                Err(Error::unsupported("it is no longer served"))
            }
            true => control.resize(number, sectors),
            false => Err(Error::unsupported("this kernel can't resize it (Linux 6.16 or later can)")),
        });
        if let Err(error) = resized.await {
            let path = path_of(number);
            tracing::warn!("{} keeps its size until it is created again: {}", path.display(), error.chain());
        }
    }
}

/// How many queues are settled: their first fetches were accepted, or they have ended.
#[derive(Default)]
struct Count {
    queues: AtomicUsize,
    event: Event,
}

impl Count {
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
            ublk::Told::NotNow => Told::NotNow,
        })
    }

    async fn pause(&self) {
        clock().sleep(LOOKED_EVERY).await;
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
