//! Snapshots of an image that is open, as disks beside its own.
//!
//! 1. Nothing of a snapshot is ever written, and its tables lie where they are as long as the image is open (`snapshots.rs`). So they are
//!    read from the file, whatever the journal has of the disk's own tables.
//! 2. Data is read through the storages of the disk. So a place that both have is one place of one storage, and sectors that only the
//!    journal has are seen.
//! 3. Snapshots change while the image is closed: nobody has a view then.

use std::sync::Arc;

use vellum_core::{Context, Error, ErrorKind, LocalFuture, Result, SharedDisk};

use super::header::Header;
use super::image::Qcow2;
use super::layout::incompatible;
use super::open::OpenOptions;
use super::snapshot;
use crate::image::{Files, Views};

/// An open image with snapshots.
pub(super) struct Viewed {
    disk: Arc<Qcow2>,
    names: Vec<String>,
}

impl Viewed {
    /// The snapshots of an image with this header; nothing if it has none, or their table cannot be read.
    pub(super) async fn of(disk: &Arc<Qcow2>, header: &Header) -> Option<Self> {
        if header.snapshot_count == 0 {
            return None;
        }
        let all = snapshot::list(header, &*disk.metadata).await.ok()?;
        Some(Self { disk: disk.clone(), names: all.into_iter().map(|one| one.name).collect() })
    }
}

impl Views for Viewed {
    fn names(&self) -> &[String] {
        &self.names
    }

    fn view<'a>(&'a self, name: &'a str) -> LocalFuture<'a, Result<SharedDisk>> {
        Box::pin(async move {
            let context = || format!("can't read snapshot {name} of {}", self.disk.engine.name);
            self.disk.view_of(name).await.context(context).map(|disk| disk as SharedDisk)
        })
    }
}

impl Qcow2 {
    async fn view_of(&self, name: &str) -> Result<Arc<Self>> {
        let mut header = self.header.read(Header::clone);
        if header.version() >= 3 {
            // What marks the image as being written concerns the disk alone.
            let marks = incompatible::JOURNAL | incompatible::DIRTY;
            header.set_features(header.incompatible & !marks, header.autoclear);
        }
        let table = snapshot::read_table(&header, &*self.metadata).await?;
        let found = table.named(name).map(|found| found.id.clone());
        let id = found.ok_or_else(|| Error::new(ErrorKind::NotFound, "there is none"))?;
        let files = Files {
            image: self.metadata.clone(),
            data_file: self.has_data_file.then(|| self.data.clone()),
            below: self.below.clone(),
        };
        let options = OpenOptions {
            read_only: true,
            snapshot: Some(id),
            cipher: self.encrypted.as_ref().map(|encrypted| encrypted.cipher()),
            flash: self.flash,
            ..OpenOptions::default()
        };
        let mut view = Self::open(header, files, options).await?;
        let its = Arc::get_mut(&mut view).expect("nobody else has it yet");
        (its.data, its.plain) = (self.data.clone(), self.plain.clone());
        Ok(view)
    }
}
