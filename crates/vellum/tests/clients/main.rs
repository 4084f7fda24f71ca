//! Third-party clients against `vellum serve`: their requests succeed, and their writes are there.
//!
//! ```text
//!   tools.rs    nbdinfo, nbdcopy, nbdkit's nbd plugin in front of the server
//!   qemu.rs     qemu-img and qemu-io
//!   fio.rs      fio's nbd engine, which verifies what it wrote
//!   tls.rs      QEMU and libnbd with certificates, and without
//!   sources.rs  the other way round: our commands, and servers that talk TLS
//!   libnbd.rs   libnbd from Python: every command and flag, and the promise that multi-conn makes
//! ```
//!
//! Each program sees every kind of disk in [`Kind`], served in every way in [`WAYS`], as far as that can
//! matter to it.

#![allow(unreachable_pub, reason = "the modules of a test are its own")]

#[path = "../support/mod.rs"]
mod support;

mod fio;
mod libnbd;
mod qemu;
mod sources;
mod tls;
mod tools;

use std::path::PathBuf;

use support::dir::Dir;
use support::program::{path_text, skipped, vellum};
use support::server::Server;

pub(crate) const MIB: usize = 1 << 20;

/// A kind of disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Raw,
    Qcow2,
    /// qcow2 over a raw template, which holds what the disk reads as in the beginning.
    Clone,
}

pub(crate) const KINDS: [Kind; 3] = [Kind::Raw, Kind::Qcow2, Kind::Clone];

/// How disks are served.
pub(crate) const WAYS: [&[&str]; 4] =
    [&[], &["--io", "threads"], &["--direct", "--threads", "3"], &["--io", "threads", "--direct"]];

/// An image that reads as some bytes.
pub(crate) struct Image {
    pub(crate) path: PathBuf,
    pub(crate) format: &'static str,
}

impl Image {
    /// Makes an image `name` of this kind that reads as `bytes`.
    pub(crate) fn new(dir: &Dir, name: &str, kind: Kind, bytes: &[u8]) -> Self {
        let raw = dir.join(&format!("{name}.raw"));
        write_sparse(&raw, bytes);
        let path = dir.join(&format!("{name}.qcow2"));
        let (template, target) = (path_text(&raw), path_text(&path));
        match kind {
            Kind::Raw => return Self { path: raw, format: "raw" },
            Kind::Qcow2 => {
                vellum(&["convert", "-f", "raw", "-O", "qcow2", template, target]).answer();
            }
            Kind::Clone => {
                vellum(&["create", "-f", "qcow2", "-b", template, "-F", "raw", target]).answer();
            }
        }
        Self { path, format: "qcow2" }
    }

    pub(crate) fn text(&self) -> &str {
        path_text(&self.path)
    }

    /// Serves it, under the default name, in this way.
    #[track_caller]
    pub(crate) fn serve(&self, way: &[&str]) -> Server {
        Server::start(&[&[self.text(), "-f", self.format], way].concat())
    }

    /// What it reads as, read by our own program.
    #[track_caller]
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let raw = self.path.with_extension("bytes");
        vellum(&["convert", "-f", self.format, "-O", "raw", self.text(), path_text(&raw)]).answer();
        std::fs::read(&raw).expect("the copy")
    }

    /// Nothing is wrong with it. Raw images have nothing that could be.
    #[track_caller]
    pub(crate) fn check(&self) {
        if self.format == "qcow2" {
            vellum(&["check", self.text()]).answer();
            if support::program::has("qemu-img") {
                support::program::succeed("qemu-img", &["check", self.text()]);
            }
        }
    }
}

/// Writes a file and leaves holes where a whole 64 KiB is zero.
pub(crate) fn write_sparse(path: &std::path::Path, bytes: &[u8]) {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::create(path).expect("a file");
    file.set_len(bytes.len() as u64).expect("its length");
    for (index, piece) in bytes.chunks(64 << 10).enumerate() {
        if piece.iter().any(|byte| *byte != 0) {
            file.write_all_at(piece, (index << 16) as u64).expect("a piece");
        }
    }
}

/// The ways that work here: where the kernel refuses io_uring, ways that use it are left out.
pub(crate) fn ways() -> Vec<&'static [&'static str]> {
    let dir = Dir::new("ways");
    let image = Image::new(&dir, "probe", Kind::Raw, &[0; 4096]);
    let mut ways = WAYS.to_vec();
    match Server::try_start(&[image.text(), "-f", "raw", "--io", "uring"]) {
        Ok(server) => {
            server.stop();
            ways.push(&["--io", "uring"]);
        }
        Err(ran) => skipped(&format!("io_uring does not work here: {}", ran.err.trim())),
    }
    ways
}
