//! VMDK, the format of VMware.
//!
//! ```text
//!   descriptor    a text: the parent, and the extents in order, each with its file     alone, or in a sparse file
//!   extents       FLAT, VMFS       a run of a file
//!                 SPARSE           a file of grains, with tables of its own              `sparse`
//!                 VMFSSPARSE       the same, as ESX has it
//!                 ZERO             nothing
//!   disk          the extents, one after the other
//! ```
//!
//! A sparse file with a descriptor in it (monolithic, stream-optimised) is one extent and its own file.
//!
//! 1. An extent lies in its file as a whole: one that is shorter is an error when the image is opened.
//! 2. At most [`EXTENTS_MAX`] extents in [`PARTS_MAX`] files, and a descriptor of at most [`descriptor::BYTES_MAX`]
//!    bytes. A file that several extents name is opened once.
//!
//! Left out: seSparse, raw devices, extents that may not be accessed, and encryption.

mod descriptor;
mod sparse;

use std::collections::BTreeMap;

use vellum_core::{Context, Error, LocalFuture, Result, SharedStorage, Storage};

use crate::bytes::{read_at, read_padded};
use crate::layout::{Header, Layout, OpenLayout, Run, Where};
use crate::pages::Pages;
use crate::{Description, ForeignFact, ForeignKind};
use descriptor::{Descriptor, ExtentKind};
use sparse::Sparse;

pub(crate) const SECTOR: u64 = 512;
/// QEMU makes one for every 2 GiB; 32,768 of them are 64 TiB.
const EXTENTS_MAX: usize = 32_768;
/// Each is open as long as the image is. Programs that split a disk of a terabyte make as many.
const PARTS_MAX: usize = 512;

/// An image as its descriptor says.
struct Vmdk {
    extents: Vec<Planned>,
}

/// An extent, its file not opened yet.
struct Planned {
    len: u64,
    /// Which of the image's files it is in.
    file: usize,
    kind: PlannedKind,
}

enum PlannedKind {
    Zero,
    Flat {
        at: u64,
    },
    /// Its header is read when its file is open.
    Sparse,
    /// The image is this extent, and its header was read.
    Itself(Sparse),
}

pub(crate) async fn look(image: &dyn Storage) -> Result<Description> {
    let start = read_padded(image, 0, 4).await?;
    if sparse::is_sparse(&start) {
        let sparse = Sparse::read(image).await?;
        let descriptor = match sparse.descriptor {
            Some((at, len)) => {
                let text = read_at(image, at, len.min(descriptor::BYTES_MAX)).await?;
                Descriptor::parse(&text)?
            }
            None => Descriptor::default(),
        };
        // ESX has descriptors with nothing but the text in such a file.
        if sparse.len > 0 || descriptor.extents.is_empty() {
            return Ok(of_one(image.name(), &descriptor, sparse));
        }
        return of_many(&descriptor);
    }
    if image.len() > descriptor::BYTES_MAX {
        return Err(Error::corrupt(format!("its descriptor has more than {} bytes", descriptor::BYTES_MAX)));
    }
    of_many(&Descriptor::parse(&read_at(image, 0, image.len()).await?)?)
}

fn of_one(name: &str, descriptor: &Descriptor, sparse: Sparse) -> Description {
    let (len, grain, format) = (sparse.len, sparse.grain(), sparse.format());
    let facts = facts(descriptor, vec![extent_fact(name, format, len)]);
    let extent = Planned { len, file: 0, kind: PlannedKind::Itself(sparse) };
    let description = Description::of(ForeignKind::Vmdk, len, Vmdk { extents: vec![extent] });
    with_parent(Description { cluster_size: Some(grain), facts, ..description }, descriptor)
}

fn of_many(descriptor: &Descriptor) -> Result<Description> {
    if descriptor.extents.is_empty() {
        return Err(Error::corrupt("its descriptor has no extents"));
    }
    if descriptor.extents.len() > EXTENTS_MAX {
        return Err(Error::unsupported(format!("more than {EXTENTS_MAX} extents")));
    }
    let (mut parts, mut extents, mut listed) = (Vec::new(), Vec::new(), Vec::new());
    let mut places = BTreeMap::new();
    let mut size = 0_u64;
    for extent in &descriptor.extents {
        let len = extent.sectors.checked_mul(SECTOR).filter(|len| *len > 0);
        let len = len.ok_or_else(|| Error::corrupt(format!("no extent has {} sectors", extent.sectors)))?;
        size = size.checked_add(len).ok_or_else(|| Error::corrupt("its extents are longer than any disk"))?;
        let (kind, format) = match extent.kind {
            ExtentKind::Zero => (PlannedKind::Zero, "ZERO"),
            ExtentKind::Flat { at } => (PlannedKind::Flat { at }, "FLAT"),
            ExtentKind::Sparse => (PlannedKind::Sparse, "SPARSE"),
        };
        let mut file = 0;
        if let Some(name) = &extent.file {
            file = *places.entry(name.as_str()).or_insert_with(|| {
                parts.push(name.clone());
                parts.len()
            });
        }
        listed.push(extent_fact(extent.file.as_deref().unwrap_or_default(), format, len));
        extents.push(Planned { len, file, kind });
    }
    if parts.len() > PARTS_MAX {
        return Err(Error::unsupported(format!(
            "it has its data in {} files, and at most {PARTS_MAX} are read: make one of them with `qemu-img convert`",
            parts.len()
        )));
    }
    let description = Description::of(ForeignKind::Vmdk, size, Vmdk { extents });
    let description = Description { parts, facts: facts(descriptor, listed), ..description };
    Ok(with_parent(description, descriptor))
}

/// The parent, and the CIDs of both.
fn with_parent(description: Description, descriptor: &Descriptor) -> Description {
    let backing = descriptor.parent();
    let content_id_below = descriptor.parent_cid.filter(|_| backing.is_some());
    Description { backing, content_id: descriptor.cid, content_id_below, ..description }
}

fn facts(
    descriptor: &Descriptor,
    extents: Vec<Vec<(&'static str, ForeignFact)>>,
) -> Vec<(&'static str, ForeignFact)> {
    let mut facts = Vec::new();
    facts.extend(descriptor.cid.map(|cid| ("cid", ForeignFact::Number(u64::from(cid)))));
    facts.extend(descriptor.parent_cid.map(|cid| ("parent-cid", ForeignFact::Number(u64::from(cid)))));
    facts.extend(descriptor.create_type.clone().map(|text| ("create-type", ForeignFact::Text(text))));
    facts.push(("extents", ForeignFact::List(extents)));
    facts
}

fn extent_fact(name: &str, format: &str, len: u64) -> Vec<(&'static str, ForeignFact)> {
    vec![
        ("filename", ForeignFact::Text(name.to_owned())),
        ("format", ForeignFact::Text(format.to_owned())),
        ("virtual-size", ForeignFact::Number(len)),
    ]
}

/// An extent whose file is open.
struct Extent {
    /// Where it begins and ends in the disk.
    start: u64,
    end: u64,
    file: usize,
    kind: OpenKind,
}

enum OpenKind {
    Zero,
    Flat { at: u64 },
    Sparse(Sparse),
}

struct Extents {
    /// In the order of the disk, without gaps.
    extents: Vec<Extent>,
    pages: std::sync::Arc<Pages>,
}

impl Header for Vmdk {
    fn open(&self, files: Vec<SharedStorage>) -> LocalFuture<'_, Result<OpenLayout>> {
        Box::pin(async move {
            let mut extents = Vec::with_capacity(self.extents.len());
            let mut start = 0;
            let mut known: BTreeMap<usize, Sparse> = BTreeMap::new();
            for Planned { len, file, kind } in &self.extents {
                let (len, file, storage) = (*len, *file, &files[*file]);
                let kind = match kind {
                    PlannedKind::Zero => OpenKind::Zero,
                    PlannedKind::Flat { at } => {
                        if at.checked_add(len).is_none_or(|end| end > storage.len()) {
                            return Err(crate::bytes::beyond(&**storage, *at, len));
                        }
                        OpenKind::Flat { at: *at }
                    }
                    PlannedKind::Itself(sparse) => OpenKind::Sparse(sparse.clone()),
                    PlannedKind::Sparse => {
                        let context = || format!("the extent {}", storage.name());
                        let sparse = match known.get(&file) {
                            Some(sparse) => sparse.clone(),
                            None => Sparse::read(&**storage).await.context(context)?,
                        };
                        known.insert(file, sparse.clone());
                        if sparse.len < len {
                            return Err(Error::corrupt(format!(
                                "the extent {} has {} bytes, but {len} are stated for it",
                                storage.name(),
                                sparse.len
                            )));
                        }
                        OpenKind::Sparse(sparse)
                    }
                };
                extents.push(Extent { start, end: start + len, file, kind });
                start += len;
            }
            let pages = Pages::of(files);
            Ok(OpenLayout::over(pages.clone(), Extents { extents, pages }))
        })
    }
}

impl Layout for Extents {
    fn find(&self, at: u64, wanted: u64) -> LocalFuture<'_, Result<Run>> {
        Box::pin(async move {
            let index = self.extents.partition_point(|extent| extent.end <= at);
            let extent = &self.extents[index];
            let (within, rest) = (at - extent.start, extent.end - at);
            let mut run = match &extent.kind {
                OpenKind::Zero => Run { len: rest, place: Where::Zero { allocated: false } },
                OpenKind::Flat { at } => Run {
                    len: rest,
                    place: Where::Plain { file: extent.file, at: at + within, is_flat: true },
                },
                OpenKind::Sparse(sparse) => sparse.find(&self.pages, extent.file, within, wanted).await?,
            };
            run.len = run.len.min(rest);
            Ok(run)
        })
    }
}
