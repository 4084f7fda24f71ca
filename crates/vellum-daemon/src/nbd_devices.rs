//! Block devices of the kernel's nbd driver that show disks of this server.
//!
//! ```text
//!   begin   a pair of sockets for each connection: one end is a client of this server, whose handshake is made here
//!           ► the other ends to the kernel, on a thread that stays there ► the device is there
//!   end     the kernel writes back what it has cached ► disconnected ► the thread returns
//!   gone    another program has disconnected it: the thread returns by itself, and closes the device, which is free then
//! ```
//!
//! 1. To the server the kernel is a client as any other: it is counted, listed, limited and cut off as they are. TLS is not
//!    asked of it, because its sockets never leave this process.
//! 2. A device ends before the sessions do, or what the kernel has cached could not be written any more.
//! 3. The calls of the driver block. They are made on threads that may.
//!
//! With `--ublk` a disk needs less time for a request, and can wait for the next server; this driver is in every kernel, and
//! is what scripts for `qemu-nbd -c` expect.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use event_listener::Event;
use futures_lite::future::{or, zip};
use vellum_core::{Context, Error, ErrorKind, Result, SharedDisk, join_all};
use vellum_export::nbd::wire;
use vellum_io::{NbdDevice, NbdShape, Socket, clock, unblock};

use crate::door::Door;
use crate::served::{Disks, Served};
use crate::spec::NbdDeviceSpec;

/// The kernel's requests are of whole sectors.
const BLOCK_BYTES: u32 = 512;
/// More connections than these are of no use.
const CONNECTIONS_MAX: usize = 4;
/// How long the handshake with this server itself, and the kernel, may take.
const BEGIN_MAX: Duration = Duration::from_secs(10);
/// How long it is waited for the thread of a device that was disconnected.
const END_MAX: Duration = Duration::from_secs(5);
const LOOKED_EVERY: Duration = Duration::from_millis(5);
/// How long it is waited for the thread of a device that nobody here has disconnected: where another program has, its sessions
/// end a moment before, and nothing can be written back any more.
const HUNG_UP_MAX: Duration = Duration::from_millis(250);

/// The devices of a server.
#[derive(Default)]
pub(crate) struct NbdDevices(Vec<Shown>);

struct Shown {
    served: Arc<Served>,
    device: Arc<NbdDevice>,
    disk: SharedDisk,
    told_blocks: Arc<AtomicU64>,
    ended: Arc<Ended>,
}

/// How the thread of a device ended.
#[derive(Default)]
struct Ended {
    how: std::sync::OnceLock<Option<Error>>,
    event: Event,
}

impl Ended {
    fn say(&self, result: Result<()>) {
        let is_first = self.how.set(result.err()).is_ok();
        debug_assert!(is_first, "a thread ends once");
        self.event.notify(usize::MAX);
    }

    async fn wait(&self) -> Result<()> {
        loop {
            let event = self.event.listen();
            if let Some(how) = self.how.get() {
                return how.clone().map_or(Ok(()), Err);
            }
            event.await;
        }
    }
}

impl NbdDevices {
    /// Connects all of them. When one cannot be connected, none stays.
    pub(crate) async fn begin(
        specs: &[NbdDeviceSpec],
        disks: &Arc<Disks>,
        door: &Door,
        connections_max: Option<usize>,
    ) -> Result<Self> {
        let mut shown = Self::default();
        for spec in specs {
            match Shown::begin(spec, disks, door, connections_max).await {
                Ok(one) => shown.0.push(one),
                Err(error) => {
                    shown.end().await;
                    return Err(error);
                }
            }
        }
        Ok(shown)
    }

    /// Where they are.
    pub(crate) fn paths(&self) -> Vec<PathBuf> {
        self.0.iter().map(|shown| shown.device.path().to_owned()).collect()
    }

    /// The handles that see that a disk has grown.
    pub(crate) fn size_notifiers(&self) -> Arc<[SizeNotifier]> {
        self.0.iter().map(Shown::size_notifier).collect()
    }

    /// Completes when all of them were disconnected, though none was ended here; at once, when there are none.
    pub(crate) async fn gone(&self) -> Result<()> {
        let gone = self.0.iter().map(|shown| {
            Box::pin(async {
                let how = shown.ended.wait().await;
                let path = shown.device.path().display();
                match &how {
                    Ok(()) if shown.served.state().0 == "paused" => tracing::warn!(
                        "{path} was disconnected by another program while its disk was paused: requests of it that waited have failed, and \
                         what the kernel had cached of it is lost"
                    ),
                    Ok(()) => tracing::info!("{path} was disconnected by another program"),
                    Err(error) => tracing::error!("{path} is no longer connected: {}", error.chain()),
                }
                how
            })
        });
        join_all(gone).await.into_iter().collect()
    }

    /// Disconnects all of them.
    pub(crate) async fn end(self) {
        join_all(self.0.into_iter().map(|shown| Box::pin(shown.end()))).await;
    }
}

impl Shown {
    async fn begin(
        spec: &NbdDeviceSpec,
        disks: &Arc<Disks>,
        door: &Door,
        connections_max: Option<usize>,
    ) -> Result<Self> {
        let served = disks.find(spec.export.as_deref())?;
        let name = match &spec.export {
            Some(name) => name.clone(),
            None => served.names().into_iter().next().unwrap_or_default(),
        };
        let path = spec.path.clone();
        let device = Arc::new(unblock(move || NbdDevice::open(&path)).await?);
        let wanted =
            connections_max.unwrap_or(CONNECTIONS_MAX).min(door.workers.count()).min(CONNECTIONS_MAX);
        let mut sockets = Vec::new();
        let mut shape = None;
        while sockets.len() < wanted.max(1) {
            let (ours, kernels) = UnixStream::pair().context(|| "can't create a pair of sockets")?;
            door.let_in_local(Socket::new(ours.into(), spec.path.display().to_string()));
            let (name, path) = (name.clone(), spec.path.clone());
            let hands = unblock(move || shake_hands(kernels, &name, &path));
            let late = async {
                clock().sleep(BEGIN_MAX).await;
                Err(Error::new(ErrorKind::Io, "this server does not answer"))
            };
            let (socket, found) = or(hands, late).await?;
            sockets.push(socket.into());
            shape = Some(found);
            if found.flags & wire::transmission_flag::CAN_MULTI_CONN == 0 {
                break;
            }
        }
        let shape = shape.expect("there is a connection at least");
        let disk: SharedDisk = served.disk();
        let rest = disk.geometry().size % u64::from(BLOCK_BYTES);
        if rest > 0 {
            tracing::warn!("{} does not show the last {rest} bytes of the disk", spec.path.display());
        }
        served.hold();
        let ended: Arc<Ended> = Arc::default();
        let (running, says) = (device.clone(), ended.clone());
        let thread = std::thread::Builder::new().name("nbd-device".to_owned());
        let begun = thread.spawn(move || says.say(running.run(sockets, shape)));
        let shown = Self { served, device, disk, told_blocks: Arc::new(AtomicU64::new(shape.blocks)), ended };
        match begun.context(|| "can't start a thread") {
            Ok(_) => shown.until_connected().await?,
            Err(error) => {
                shown.served.release();
                return Err(error);
            }
        }
        Ok(shown)
    }

    /// Waits until the kernel has the device.
    async fn until_connected(&self) -> Result<()> {
        let connected = async {
            // If another program was faster, the thread has ended. What the kernel says is the number of a thread.
            while !self.device.is_connected() {
                clock().sleep(LOOKED_EVERY).await;
            }
            // Whoever opens it first has the kernel look for partitions.
            let path = self.device.path().to_owned();
            unblock(move || std::fs::File::open(&path).and_then(|file| first_byte_of(&file)))
                .await
                .or_else(|error| match error.kind() {
                    std::io::ErrorKind::UnexpectedEof => Ok(()),
                    _ => Err(error),
                })
                .context(|| format!("can't read {}", self.device.path().display()))
        };
        let ended = async {
            self.ended.wait().await?;
            Err(Error::new(
                ErrorKind::Io,
                format!("{} was disconnected at once", self.device.path().display()),
            ))
        };
        let late = async {
            clock().sleep(BEGIN_MAX).await;
            Err(Error::new(
                ErrorKind::Io,
                format!("the kernel does not begin with {}", self.device.path().display()),
            ))
        };
        let result = or(ended, or(connected, late)).await;
        if result.is_err() {
            let device = self.device.clone();
            if self.ended.how.get().is_none() {
                drop(unblock(move || device.disconnect()).await);
            }
            self.served.release();
        }
        result
    }

    fn size_notifier(&self) -> SizeNotifier {
        SizeNotifier {
            device: self.device.clone(),
            disk: self.disk.clone(),
            told_blocks: self.told_blocks.clone(),
            ended: self.ended.clone(),
        }
    }

    async fn end(self) {
        let Self { served, device, ended, .. } = self;
        or(async { drop(ended.wait().await) }, clock().sleep(HUNG_UP_MAX)).await;
        if ended.how.get().is_none() {
            let path = device.path().to_owned();
            let ending = unblock(move || {
                let written = device.write_back();
                written.and(device.disconnect())
            });
            let (result, ()) = zip(ending, async {
                let late = clock().sleep(END_MAX);
                or(async { drop(ended.wait().await) }, late).await;
            })
            .await;
            if let Err(error) = result {
                tracing::warn!("{}: {}", path.display(), error.chain());
            }
        }
        served.release();
    }
}

fn first_byte_of(mut file: &std::fs::File) -> std::io::Result<()> {
    file.read_exact(&mut [0])
}

/// Makes the client's part of the handshake on a new connection to this server.
fn shake_hands(mut stream: UnixStream, name: &str, path: &Path) -> Result<(UnixStream, NbdShape)> {
    let context = || format!("can't connect {} to this server", path.display());
    stream.set_read_timeout(Some(BEGIN_MAX)).context(context)?;
    let mut greeting = [0; wire::GREETING_BYTES];
    stream.read_exact(&mut greeting).context(context)?;
    let flags = wire::handshake_flag::FIXED_NEWSTYLE | wire::handshake_flag::NO_ZEROES;
    let mut said = u32::from(flags).to_be_bytes().to_vec();
    said.extend_from_slice(&wire::OPTION_MAGIC.to_be_bytes());
    said.extend_from_slice(&wire::option::EXPORT_NAME.to_be_bytes());
    said.extend_from_slice(&u32::try_from(name.len()).expect("at most 4096 bytes").to_be_bytes());
    said.extend_from_slice(name.as_bytes());
    stream.write_all(&said).context(context)?;
    // The size, and what the export can do. A server that has no place for the client only hangs up.
    let mut export = [0; 10];
    stream.read_exact(&mut export).map_err(|error| {
        let why = "can't connect it to this server, which has no place for another client (--connections, --shared), or no such export";
        Error::io(error, format!("{}: {why}", path.display()))
    })?;
    stream.set_read_timeout(None).context(context)?;
    let (size, flags) = export.split_at(8);
    let size = u64::from_be_bytes(size.try_into().expect("8 bytes"));
    let flags = u16::from_be_bytes(flags.try_into().expect("2 bytes"));
    Ok((stream, NbdShape { block_bytes: BLOCK_BYTES, blocks: size / u64::from(BLOCK_BYTES), flags }))
}

/// Sees that a disk has grown.
#[derive(Clone)]
pub(crate) struct SizeNotifier {
    device: Arc<NbdDevice>,
    disk: SharedDisk,
    told_blocks: Arc<AtomicU64>,
    ended: Arc<Ended>,
}

impl SizeNotifier {
    /// Checks whether the disk has grown. Blocks.
    pub(crate) fn look_again(&self) {
        let blocks = self.disk.geometry().size / u64::from(BLOCK_BYTES);
        if self.told_blocks.swap(blocks, Ordering::AcqRel) == blocks || self.ended.how.get().is_some() {
            return;
        }
        // The sessions behind it have the size that they were told when they began.
        tracing::warn!("{} keeps its size until it is connected again", self.device.path().display());
    }
}

/// Disconnects a device of the nbd driver from its server, whichever that is.
///
/// # Errors
/// When it is no such device, or has no server.
pub fn disconnect_nbd_device(path: &Path) -> Result<()> {
    NbdDevice::open(path)?.disconnect()
}
