//! The control plane as a library: everything that a program does with images, put together from the crates
//! below.
//!
//! The command line is a thin layer over it: it parses arguments, calls one function here, and prints the
//! result. Nothing here prints. It depends on no crate below but `vellum-core`: what else it needs of them is
//! on this page.
//!
//! In reading order: [`host`] (files as the chain's opener), [`image`] (opening images), [`create`] (making
//! them), [`mod@clone`] (making many over one template or snapshot), `clones_of` (finding those of a snapshot), [`inspect`] (reporting on them), [`mod@map`] (where their data is), [`closed`] (changing them while
//! no server uses them), `data_file` (flushed before), [`bitmaps`] (of them), [`backup`] (of what changed), [`mod@copy`] (whole disks: copied, compared), [`mod@convert`] (into another image), [`mod@measure`] (how large one will be), `window` (a part of a disk), `same_file` (files that have several names), `salvage` (one that is damaged), [`mod@bench`] (how fast one is),
//! [`keys`] (of encrypted images), [`signals`] (that end such work), [`spec`] (the description of a server), [`mod@serve`] and `server` (from
//! its start to its end), `door` (accepting NBD clients), `tls` and `access` (certificates), `rights` (of sockets), `served` (its disks
//! and their snapshots), `new_top` (images that go on top of them), `meter` (measuring their requests), `metrics` (the figures for Prometheus), `vhost`
//! (its sockets for virtual machines), `fuse` (its files), `ublk` (its block devices), `size_watchers` (the front
//! ends that are notified when a disk has grown), `grow` (devices that become full), [`control`] (requests to
//! it while it serves), `notify` (notifications to a service manager), [`stats`] (counters), [`template`]
//! (where templates are zero), [`published`] (templates in stores), [`chunk_cache`] (where what was fetched is kept).

#![forbid(unsafe_code)]

mod access;
pub mod backup;
pub mod bench;
pub mod bitmaps;
pub mod chunk_cache;
pub mod clone;
mod clones_of;
pub mod closed;
pub mod commit;
mod contained;
pub mod control;
pub mod convert;
pub mod copy;
pub mod create;
mod data_file;
pub mod delta;
mod door;
pub mod flash;
pub mod flatten;
mod fuse;
mod grow;
pub mod host;
pub mod image;
pub mod inspect;
mod joined;
pub mod keys;
mod making;
pub mod map;
pub mod measure;
mod meter;
mod metrics;
pub mod migrate;
mod nbd_devices;
mod new_top;
mod notify;
mod occupied;
pub mod pins;
mod plain_file;
pub mod published;
pub mod rebase;
mod replaced;
mod rights;
mod salvage;
mod same_file;
mod seats;
pub mod serve;
mod served;
mod server;
pub mod signals;
mod size_watchers;
pub mod spec;
pub mod stats;
pub mod template;
pub mod tier;
mod tls;
#[cfg(feature = "ublk")]
mod ublk;
#[cfg(not(feature = "ublk"))]
#[path = "ublk_absent.rs"]
mod ublk;
mod vhost;
mod window;

pub use access::AccessSource;
pub use clone::{CloneOf, Cloned, Cloning, NewClone, clone_template};
pub use create::{
    CreateTarget, NativeImage, backing_name, create_luks, create_native, create_qcow2, create_raw,
};
pub use flash::{FlashSpec, policy_of};
pub use grow::GrowHook;
pub use host::{CountedPool, Host, HostOptions, Pool};
pub use image::{ImageOptions, Remote, open_image};
pub use nbd_devices::disconnect_nbd_device;
pub use notify::NotifySocket;
pub use rights::{SocketRights, identity_of};
pub use serve::serve;
pub use served::prefetch_limits;
pub use spec::{
    BootTrace, ExportSpec, FuseSpec, HydrationSpec, NbdDeviceSpec, NbdSpec, Ready, ReadyDisk, Report,
    ServeSpec, UblkSpec, VhostSpec,
};
pub use tls::TlsFiles;
pub use window::Part;

// The types of the crates below that callers give to these functions and get from them.
pub use vellum_export::nbd::SessionLimits;
pub use vellum_flash::{FlashPolicy, Look as FlashLook, RowFacts as FlashRow};
pub use vellum_format::image::{
    Amend, Bitmap, BitmapChange, Bits, Fact, Machine, MergeSource, Snapshot, Wanted,
};
pub use vellum_format::luks::{Hash, Secret, Secrets};
pub use vellum_format::native::{CreateOptions as NativeOptions, Layout};
pub use vellum_format::qcow2::{
    Compression, CreateOptions as Qcow2Options, JOURNAL_BYTES_DEFAULT, Preallocation,
};
pub use vellum_format::report::{CheckReport, JournalChange, Recovered, Recovery, Repair};
pub use vellum_format::session::{CacheId, Session};
pub use vellum_format::zeros::Zeros;
pub use vellum_format::{ForeignKind, FormatKind, Prealloc};
pub use vellum_io::{
    Address, Identity, IoMode, Output, PassedSocket, PassedTo, close_output, leave_session, lock_pid_file,
    run,
};
pub use vellum_layer::hydrate::trace::{TRACE_BYTES_MAX, Trace};
pub use vellum_layer::hydrate::{PrefetchLimits, Run};
pub use vellum_layer::valve::RateLimits;
pub use vellum_layer::{DiscardMode, Encrypted, SparseMode, ZeroDetection};
pub use vellum_remote::nbd::{
    FLAG_NAMES as NBD_FLAG_NAMES, ListedExport, NbdTls, TlsChoice, list as list_nbd_exports,
};
pub use vellum_remote::{end_programs, wait_for_closed};
