//! What the crash explorer explores: small images of several kinds.

#![allow(dead_code, reason = "each test file uses its part")]

use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use vellum_core::{GuestOffset, HostTally, LocalFuture, MemoryDisk, Result, SharedDisk, SharedStorage};
use vellum_format::qcow2::{CreateOptions, Files, Header, OpenOptions, Qcow2};
use vellum_format::raw::Raw;
use vellum_sim::Content;
use vellum_sim::explore::Subject;

use crate::common::{Setup, base, look};

const SIZE: u64 = 4 << 20;

/// A qcow2 image.
pub(crate) struct QcowSubject {
    setup: Setup,
    /// Where the second L2 table begins.
    far: u64,
    below: Option<SharedDisk>,
    /// Version 2 has no mark for an image that was not closed: what a crash leaves allocated stays so until a repair.
    may_leak: bool,
}

impl QcowSubject {
    fn new(name: &'static str, options: CreateOptions, has_base: bool, far: u64) -> Self {
        let below = has_base.then(|| MemoryDisk::holding(&base()) as SharedDisk);
        let may_leak = options.version == 2;
        Self { setup: Setup { name, options, has_base }, far, below, may_leak }
    }

    fn options(cluster_size: u64) -> CreateOptions {
        CreateOptions { size: SIZE, cluster_size, ..CreateOptions::default() }
    }

    pub(crate) fn plain() -> Self {
        Self::new("qcow2, 4 KiB clusters", Self::options(4096), false, 2 << 20)
    }

    pub(crate) fn over_a_base() -> Self {
        let options = CreateOptions { size: 256 << 10, ..Self::options(512) };
        Self::new("qcow2, 512 byte clusters over a base", options, true, 96 << 10)
    }

    /// The order of metadata is all there is to rely on.
    pub(crate) fn version_2() -> Self {
        let options = CreateOptions { version: 2, size: 256 << 10, ..Self::options(512) };
        Self::new("qcow2 version 2, 512 byte clusters", options, false, 96 << 10)
    }

    pub(crate) fn subclusters() -> Self {
        let options = CreateOptions { extended_l2: true, ..Self::options(16_384) };
        Self::new("qcow2, subclusters over a base", options, true, 3 << 20)
    }

    /// A journal so small that it goes round within a few steps, and much does not fit a record.
    pub(crate) fn journal() -> Self {
        let options = CreateOptions { journal: Some(64 << 10), ..Self::options(4096) };
        Self::new("qcow2 with a journal, 4 KiB clusters", options, false, 2 << 20)
    }

    pub(crate) fn journal_over_a_base() -> Self {
        let options = CreateOptions { size: 256 << 10, journal: Some(64 << 10), ..Self::options(512) };
        Self::new("qcow2 with a journal, 512 byte clusters over a base", options, true, 96 << 10)
    }

    pub(crate) fn journal_subclusters() -> Self {
        let options = CreateOptions { extended_l2: true, journal: Some(128 << 10), ..Self::options(16_384) };
        Self::new("qcow2 with a journal, subclusters over a base", options, true, 3 << 20)
    }

    pub(crate) fn large_clusters() -> Self {
        Self::new("qcow2, 64 KiB clusters", Self::options(65_536), false, 3 << 20)
    }
}

impl Subject for QcowSubject {
    fn name(&self) -> String {
        self.setup.name.to_owned()
    }

    fn image(&self) -> Content {
        self.setup.empty_image()
    }

    fn guest(&self) -> Content {
        self.setup.content()
    }

    fn places(&self) -> Vec<GuestOffset> {
        let far = self.far;
        let places = [16_384, 32_768, far, far + 8192, 0, far + 4096, 49_152, far + 65_536];
        places.map(GuestOffset::new).to_vec()
    }

    fn open(&self, image: SharedStorage) -> LocalFuture<'_, Result<SharedDisk>> {
        Box::pin(async move {
            let header = Header::read(&*image).await?;
            let files = Files { image, data_file: None, below: self.below.clone() };
            Ok(Qcow2::open(header, files, OpenOptions { journal_key: Some(1), ..OpenOptions::default() })
                .await? as SharedDisk)
        })
    }

    fn verify(&self, image: SharedStorage) -> LocalFuture<'_, Result<(), String>> {
        Box::pin(async move {
            let (report, lines) = look(&image).await.map_err(|error| error.chain())?;
            let is_sound = report.check_errors == 0 && report.corruptions == 0;
            if is_sound && (report.leaks == 0 || self.may_leak) {
                Ok(())
            } else {
                Err(format!("the check says: {}", lines.join("; ")))
            }
        })
    }

    fn sample(&self, recovered: &Content) -> std::result::Result<(), String> {
        qemu_check(recovered, self.may_leak)
    }
}

/// What QEMU says of an image, where there is QEMU.
fn qemu_check(image: &Content, may_leak: bool) -> std::result::Result<(), String> {
    static FILES: AtomicU32 = AtomicU32::new(0);
    let name = format!("explored-{}-{}.qcow2", std::process::id(), FILES.fetch_add(1, Relaxed));
    let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let written = std::fs::File::create(&path).and_then(|mut file| image.write_to(&mut file));
    written.map_err(|error| format!("{}: {error}", path.display()))?;
    let checked = Command::new("qemu-img").args(["check", "-f", "qcow2"]).arg(&path).output();
    std::fs::remove_file(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    match checked {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(format!("qemu-img: {error}")),
        Ok(output) => match output.status.code() {
            Some(0) => Ok(()),
            Some(3) if may_leak => Ok(()),
            code => {
                Err(format!("qemu-img check ends with {code:?}: {}", String::from_utf8_lossy(&output.stdout)))
            }
        },
    }
}

/// A raw image.
pub(crate) struct RawSubject;

impl Subject for RawSubject {
    fn name(&self) -> String {
        "raw".to_owned()
    }

    fn image(&self) -> Content {
        Content::zeroed(SIZE)
    }

    fn guest(&self) -> Content {
        Content::zeroed(SIZE)
    }

    fn places(&self) -> Vec<GuestOffset> {
        [16_384, 32_768, 3 << 20, 0, 8192].map(GuestOffset::new).to_vec()
    }

    fn open(&self, image: SharedStorage) -> LocalFuture<'_, Result<SharedDisk>> {
        Box::pin(async move { Ok(Raw::open(image, false, &HostTally::default()) as SharedDisk) })
    }

    fn verify(&self, image: SharedStorage) -> LocalFuture<'_, Result<(), String>> {
        Box::pin(async move {
            if image.len() == SIZE { Ok(()) } else { Err(format!("it is {} bytes long", image.len())) }
        })
    }
}
