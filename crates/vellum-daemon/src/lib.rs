//! The control plane as a library: everything that a program does with images, put together from the crates below.
//!
//! The command line is a thin layer over it: it reads arguments, calls one function here, and prints what comes back.
//! Nothing here prints.
//!
//! In reading order: [`host`] (files as the chain's opener), [`image`] (opening and making images), [`mod@serve`] (a server, from
//! its specification to its end), `served` (its disks and their snapshots), `vhost` (its sockets for virtual machines), `fuse` (its files), `ublk` (its block devices), `lookers` (who is told that a disk is larger), `grow` (devices that
//! become full), [`control`] (what can be asked of it while it serves), `notify` (what a service manager is told),
//! [`stats`] (what was counted), [`template`] (where templates are zero).

#![forbid(unsafe_code)]

pub mod control;
mod fuse;
mod grow;
pub mod host;
pub mod image;
mod lookers;
mod notify;
pub mod serve;
mod served;
pub mod stats;
pub mod template;
#[cfg(feature = "ublk")]
mod ublk;
#[cfg(not(feature = "ublk"))]
#[path = "ublk_absent.rs"]
mod ublk;
mod vhost;

pub use fuse::FuseSpec;
pub use grow::GrowHook;
pub use host::{Host, HostOptions, Pool};
pub use image::{CreateTarget, ImageOptions, create_native, create_qcow2, create_raw, open_image};
pub use notify::NotifySocket;
pub use serve::{ExportSpec, Ready, Report, ServeSpec, UblkSpec, serve};
pub use vellum_export::nbd::{Tls, TlsPolicy};
pub use vellum_layer::valve::Settings as Limits;
pub use vhost::VhostSpec;
