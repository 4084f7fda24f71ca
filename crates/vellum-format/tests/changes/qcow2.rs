//! A larger disk in a qcow2 image; one without its backing file. (Adding or removing a journal: `journal_setting.rs`.)

use std::sync::atomic::AtomicBool;

use futures_lite::future::block_on;
use vellum_core::{
    Buffer, Disk, Error, GuestOffset, ImageOffset, LocalFuture, MemoryDisk, Result, SharedDisk,
    SharedStorage, WriteFlags,
};
use vellum_format::FormatKind;
use vellum_format::qcow2::{CreateOptions, Files, Header, OpenOptions, Qcow2, create, grow};
use vellum_sim::Content;
use vellum_sim::explore::{Medium, Offline};

use crate::common::look;

const SIZE: u64 = (3 << 20) + 512;
/// The table gets entries; they were other bytes before.
const GROWN: u64 = 200 << 20;
const PLACES: [u64; 4] = [0, 8192, 1 << 20, SIZE - 512];

pub(crate) struct Grow {
    name: &'static str,
    options: CreateOptions,
}

pub(crate) fn grows() -> [Grow; 2] {
    let plain = CreateOptions { size: SIZE, cluster_size: 4096, ..CreateOptions::default() };
    let journal = CreateOptions { journal: Some(64 << 10), ..plain.clone() };
    [Grow { name: "qcow2", options: plain }, Grow { name: "qcow2 with a journal", options: journal }]
}

async fn open(image: &SharedStorage) -> Result<std::sync::Arc<Qcow2>> {
    let header = Header::read(&**image).await?;
    let options = OpenOptions { journal_key: Some(1), ..OpenOptions::default() };
    Qcow2::open(header, Files { image: image.clone(), data_file: None, below: None }, options).await
}

impl Offline for Grow {
    fn name(&self) -> String {
        format!("{}, made larger", self.name)
    }

    fn image(&self) -> Content {
        let medium = Medium::new(Content::zeroed(0));
        let image: SharedStorage = medium.clone();
        block_on(async {
            create(&*image, None, &self.options).await.unwrap();
            let disk = open(&image).await.unwrap();
            for at in PLACES {
                let data = Buffer::copy_of(&[7; 512]);
                disk.write(GuestOffset::new(at), data, WriteFlags::default()).await.unwrap();
            }
            disk.close().await.unwrap();
            // What lies behind the entries of the table counts for nothing.
            let header = image.read(ImageOffset::ZERO, Buffer::zeroed(64)).await.unwrap().to_vec();
            let entries = u32::from_be_bytes(header[36..40].try_into().unwrap());
            let table = ImageOffset::new(u64::from_be_bytes(header[40..48].try_into().unwrap()));
            image.write(table + u64::from(entries) * 8, Buffer::copy_of(&[0xAB; 256])).await.unwrap();
        });
        medium.content()
    }

    fn change(&self, image: SharedStorage) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move { grow(&image, GROWN).await.map(drop) })
    }

    fn ways(&self) -> usize {
        2
    }

    fn go_on(&self, image: SharedStorage, way: usize) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move { if way == 0 { Ok(()) } else { grow(&image, GROWN).await.map(drop) } })
    }

    fn judge(
        &self,
        image: SharedStorage,
        way: Option<usize>,
        is_done: bool,
    ) -> LocalFuture<'_, std::result::Result<(), String>> {
        Box::pin(async move {
            let text = |error: Error| error.chain();
            let disk = open(&image).await.map_err(text)?;
            let size = disk.geometry().size;
            let must_be_new = is_done || way == Some(1);
            if size != GROWN && (size != SIZE || must_be_new) {
                return Err(format!("the disk has {size} bytes"));
            }
            for at in PLACES {
                let bytes = disk.read(GuestOffset::new(at), Buffer::zeroed(512)).await.map_err(text)?;
                if bytes.to_vec() != [7; 512] {
                    return Err(format!("other bytes at {at}"));
                }
            }
            let mut behind = SIZE;
            while behind < size {
                let bytes = disk.read(GuestOffset::new(behind), Buffer::zeroed(512)).await.map_err(text)?;
                if bytes.to_vec() != [0; 512] {
                    return Err(format!("bytes at {behind}, where there were none"));
                }
                behind += (7 << 20) + 512;
            }
            let last = GuestOffset::new(size - 512);
            disk.write(last, Buffer::copy_of(&[9; 512]), WriteFlags::FUA).await.map_err(text)?;
            disk.close().await.map_err(text)?;
            let (report, lines) = look(&image).await.map_err(text)?;
            if report.is_clean() { Ok(()) } else { Err(format!("the check says: {}", lines.join("; "))) }
        })
    }
}

/// A disk that lets go of its backing file. The clusters that it has not are zero there.
pub(crate) struct Detach {
    name: &'static str,
    options: CreateOptions,
}

pub(crate) fn detachments() -> [Detach; 4] {
    // So long that the header takes three sectors.
    let backing = |len| Some(("b".repeat(len), Some("raw".to_owned())));
    let plain = CreateOptions { size: SIZE, cluster_size: 4096, ..CreateOptions::without_journal() };
    let journal = CreateOptions { journal: Some(64 << 10), backing: backing(10), ..plain.clone() };
    // The header has no room to be laid out anew.
    let full = CreateOptions { cluster_size: 1024, ..journal.clone() };
    [
        Detach { name: "qcow2 with a full header", options: full },
        Detach { name: "qcow2", options: CreateOptions { backing: backing(1), ..plain.clone() } },
        Detach { name: "qcow2 with a long name", options: CreateOptions { backing: backing(1000), ..plain } },
        Detach { name: "qcow2 with a journal", options: journal },
    ]
}

impl Detach {
    async fn open(image: &SharedStorage) -> Result<(std::sync::Arc<Qcow2>, bool)> {
        let header = Header::read(&**image).await?;
        let options = OpenOptions { journal_key: Some(1), ..OpenOptions::default() };
        let has_backing = header.backing_file().is_some();
        let below = has_backing.then(|| MemoryDisk::new(SIZE) as SharedDisk);
        let files = Files { image: image.clone(), data_file: None, below };
        Ok((Qcow2::open(header, files, options).await?, has_backing))
    }
}

impl Offline for Detach {
    fn name(&self) -> String {
        format!("{}, detached", self.name)
    }

    fn image(&self) -> Content {
        let medium = Medium::new(Content::zeroed(0));
        let image: SharedStorage = medium.clone();
        block_on(async {
            create(&*image, None, &self.options).await.unwrap();
            let (disk, _) = Self::open(&image).await.unwrap();
            for at in PLACES {
                let data = Buffer::copy_of(&[7; 512]);
                disk.write(GuestOffset::new(at), data, WriteFlags::default()).await.unwrap();
            }
            disk.close().await.unwrap();
        });
        medium.content()
    }

    fn change(&self, image: SharedStorage) -> LocalFuture<'_, Result<()>> {
        Box::pin(
            async move { FormatKind::Qcow2.format().detach(&image, false, &AtomicBool::new(false)).await },
        )
    }

    fn ways(&self) -> usize {
        2
    }

    fn go_on(&self, image: SharedStorage, way: usize) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move { if way == 0 { Ok(()) } else { self.change(image).await } })
    }

    fn judge(
        &self,
        image: SharedStorage,
        way: Option<usize>,
        is_done: bool,
    ) -> LocalFuture<'_, std::result::Result<(), String>> {
        Box::pin(async move {
            let text = |error: Error| error.chain();
            let (disk, has_backing) = Self::open(&image).await.map_err(text)?;
            if has_backing && (is_done || way == Some(1)) {
                return Err("it still has its backing file".to_owned());
            }
            for at in (0..SIZE).step_by(4096) {
                let bytes = disk.read(GuestOffset::new(at), Buffer::zeroed(512)).await.map_err(text)?;
                let byte = if PLACES.contains(&at) { 7 } else { 0 };
                if bytes.to_vec() != [byte; 512] {
                    return Err(format!("other bytes at {at}"));
                }
            }
            disk.write(GuestOffset::new(40_960), Buffer::copy_of(&[9; 512]), WriteFlags::FUA)
                .await
                .map_err(text)?;
            disk.close().await.map_err(text)?;
            let (report, lines) = look(&image).await.map_err(text)?;
            if report.is_clean() { Ok(()) } else { Err(format!("the check says: {}", lines.join("; "))) }
        })
    }
}
