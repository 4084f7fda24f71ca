//! Snapshots of an image that is open, as disks beside its own.
//!
//! 1. Nothing of a snapshot is ever written, and its tables lie where they are as long as the image is open (`snapshots.rs`). So they are
//!    read from the file, whatever the journal has of the disk's own tables.
//! 2. Data is read through the storages of the disk. So a place that both have is one place of one storage, and sectors that only the
//!    journal has are seen.
//! 3. Snapshots change while the image is closed: nobody has a view then.
//! 4. A view has the snapshot's whole first table in memory. So there is one at most for each snapshot, which those share that want it
//!    at the same time.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use async_lock::Mutex;
use vellum_core::{Context, Error, ErrorKind, LocalFuture, Result, SharedDisk};

use super::header::Header;
use super::image::Qcow2;
use super::layout::incompatible;
use super::open::OpenOptions;
use super::snapshot;
use crate::image::{Files, Snapshot, Views};

/// An open image with snapshots.
pub(super) struct Viewed {
    disk: Arc<Qcow2>,
    all: Vec<Snapshot>,
    /// By their ids.
    open: Mutex<HashMap<String, Weak<Qcow2>>>,
}

impl Viewed {
    /// The snapshots of an image with this header; nothing if it has none, or their table cannot be read.
    pub(super) async fn of(disk: &Arc<Qcow2>, header: &Header) -> Option<Self> {
        if header.snapshot_count == 0 {
            return None;
        }
        let all = snapshot::list(header, &*disk.metadata).await.ok()?;
        let all = all.into_iter().map(Snapshot::from).collect();
        Some(Self { disk: disk.clone(), all, open: Mutex::default() })
    }
}

impl Views for Viewed {
    fn snapshots(&self) -> &[Snapshot] {
        &self.all
    }

    fn view<'a>(&'a self, id: &'a str) -> LocalFuture<'a, Result<SharedDisk>> {
        Box::pin(async move {
            // While one opens it the others wait, and then share it.
            let mut open = self.open.lock().await;
            if let Some(view) = open.get(id).and_then(Weak::upgrade) {
                return Ok(view as SharedDisk);
            }
            let context = || format!("can't read snapshot {id} of {}", self.disk.engine.name);
            let view = self.disk.view_of(id).await.context(context)?;
            open.insert(id.to_owned(), Arc::downgrade(&view));
            Ok(view as SharedDisk)
        })
    }
}

impl Qcow2 {
    async fn view_of(&self, id: &str) -> Result<Arc<Self>> {
        let mut header = self.header.read(Header::clone);
        if header.version() >= 3 {
            // What marks the image as being written concerns the disk alone.
            let marks = incompatible::JOURNAL | incompatible::DIRTY;
            header.set_features(header.incompatible & !marks, header.autoclear);
        }
        let table = snapshot::read_table(&header, &*self.metadata).await?;
        let is_there = table.snapshots.iter().any(|one| one.id == id);
        let id = is_there
            .then(|| id.to_owned())
            .ok_or_else(|| Error::new(ErrorKind::NotFound, "there is none"))?;
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
