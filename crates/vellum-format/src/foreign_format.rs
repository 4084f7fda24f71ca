//! The formats of other programs that are read: `vellum-foreign` as one of the formats.
//!
//! Everything that would change such an image is refused, with the way to an image that can be changed.

use std::sync::atomic::AtomicBool;

use vellum_core::{
    BlockSize, Error, ErrorKind, GuestOffset, GuestSpan, HostTally, Inline, LocalFuture, Place, Result,
    SharedDisk, SharedStorage, Storage,
};
use vellum_foreign::{Description, ForeignFact, ForeignFiles, ForeignKind, look};

use crate::image::{Fact, Files, Format, Head, OpenOptions, Opened, ready};
use crate::probe::FormatKind;
use crate::report::{CheckReport, JournalChange, Repair};

/// After this many mistakes a check stops.
const MISTAKES_MAX: u64 = 1000;

/// One of them as a format.
struct ForeignFormat(ForeignKind);

static FORMATS: [ForeignFormat; ForeignKind::ALL.len()] = {
    let mut formats = [const { ForeignFormat(ForeignKind::Vmdk) }; ForeignKind::ALL.len()];
    let mut index = 0;
    while index < formats.len() {
        formats[index] = ForeignFormat(ForeignKind::ALL[index]);
        index += 1;
    }
    formats
};

/// What can be done with images of this format.
pub(crate) fn of(kind: ForeignKind) -> &'static dyn Format {
    FORMATS.iter().find(|format| format.0 == kind).expect("it is one of all")
}

struct ForeignHead {
    kind: ForeignKind,
    description: Description,
}

fn only_read(kind: ForeignKind, name: &str) -> Error {
    Error::new(
        ErrorKind::ReadOnly,
        format!(
            "{name} is a {} image, a format that is only read: open it read-only, put an overlay on it with `vellum \
             create -b`, or convert it with `vellum convert -O qcow2`",
            kind.name()
        ),
    )
}

impl ForeignFormat {
    fn refused<'a, T: 'a>(&self, image: &dyn Storage) -> LocalFuture<'a, Result<T>> {
        ready(Err(only_read(self.0, image.name())))
    }
}

impl Format for ForeignFormat {
    fn kind(&self) -> FormatKind {
        FormatKind::Foreign(self.0)
    }

    fn read<'a>(&'a self, image: &'a dyn Storage) -> LocalFuture<'a, Result<Box<dyn Head>>> {
        Box::pin(async move {
            let description = look(self.0, image).await?;
            Ok(Box::new(ForeignHead { kind: self.0, description }) as Box<dyn Head>)
        })
    }

    /// Looks up every block, and whether the file has its bytes. What compressed chunks contain is not decoded.
    fn check<'a>(
        &'a self,
        image: &'a SharedStorage,
        repair: Repair,
        say: &'a mut dyn FnMut(String),
    ) -> LocalFuture<'a, Result<Option<CheckReport>>> {
        Box::pin(async move {
            if repair != Repair::Nothing {
                return Err(only_read(self.0, image.name()));
            }
            let description = look(self.0, &**image).await?;
            if !description.parts().is_empty() {
                return Err(Error::unsupported(format!(
                    "{} has its data in {} other files, and a check reads one: `vellum convert` or `vellum compare` \
                     read all of them",
                    image.name(),
                    description.parts().len()
                )));
            }
            let files = ForeignFiles {
                image: image.clone(),
                parts: Vec::new(),
                below: None,
                offload: std::sync::Arc::new(Inline),
                tally: HostTally::default(),
            };
            let disk = description.open(files).await?;
            let unit = description.cluster_size().unwrap_or(BlockSize::SECTOR.bytes());
            let mut report = check_all(&disk, unit, say).await;
            report.image_end_offset = image.len();
            Ok(Some(report))
        })
    }

    fn finish<'a>(&'a self, image: &'a SharedStorage) -> LocalFuture<'a, Result<u64>> {
        self.refused(&**image)
    }

    fn resize<'a>(
        &'a self,
        image: &'a SharedStorage,
        _size: u64,
        _may_shrink: bool,
    ) -> LocalFuture<'a, Result<()>> {
        self.refused(&**image)
    }

    fn may_grow<'a>(&'a self, image: &'a SharedStorage, _size: u64) -> LocalFuture<'a, Result<()>> {
        self.refused(&**image)
    }

    fn detach<'a>(
        &'a self,
        image: &'a SharedStorage,
        _is_prepared: bool,
        _stop: &'a AtomicBool,
    ) -> LocalFuture<'a, Result<()>> {
        self.refused(&**image)
    }

    fn set_journal<'a>(
        &'a self,
        _image: &'a SharedStorage,
        name: &'a str,
        _setting: Option<Option<u64>>,
    ) -> LocalFuture<'a, Result<JournalChange>> {
        ready(Err(only_read(self.0, name)))
    }
}

/// Looks up the whole disk. A block whose lookup fails is a mistake, and the next one follows.
async fn check_all(disk: &SharedDisk, unit: u64, say: &mut dyn FnMut(String)) -> CheckReport {
    let size = disk.geometry().size;
    let mut report = CheckReport { total_clusters: size.div_ceil(unit), ..CheckReport::default() };
    let (mut at, mut allocated, mut compressed) = (0, 0, 0);
    while at < size && report.corruptions < MISTAKES_MAX {
        // A part of the disk at a time: where one block fails, those before it are still counted.
        let len = (unit * 64).max(1 << 20).min(size - at);
        let mut rest = GuestOffset::new(at).span(len);
        while !rest.is_empty() && report.corruptions < MISTAKES_MAX {
            let answer = disk.map(rest).await;
            let answer = match answer {
                Err(_) if rest.len() > unit => disk.map(rest.split_at(unit).0).await,
                other => other,
            };
            match answer {
                Ok(extents) => {
                    for extent in extents {
                        rest = GuestSpan::between(extent.span.end(), rest.end());
                        match extent.place {
                            Place::Data { .. } => allocated += extent.span.len(),
                            Place::Compressed { .. } => compressed += extent.span.len(),
                            Place::Zero { .. } | Place::Below => {}
                        }
                    }
                }
                Err(error) => {
                    report.corruptions += 1;
                    say(format!("ERROR block at {}: {}", rest.start(), error.chain()));
                    rest = rest.split_at(unit).1;
                }
            }
        }
        at += len;
    }
    report.allocated_clusters = (allocated + compressed).div_ceil(unit);
    report.compressed_clusters = compressed.div_ceil(unit);
    report
}

impl Head for ForeignHead {
    fn kind(&self) -> FormatKind {
        FormatKind::Foreign(self.kind)
    }

    fn size(&self) -> u64 {
        self.description.size()
    }

    fn backing(&self) -> Option<(&str, Option<&str>)> {
        self.description.backing()
    }

    fn parts(&self) -> &[String] {
        self.description.parts()
    }

    fn content_id(&self) -> Option<u32> {
        self.description.content_id()
    }

    fn content_id_below(&self) -> Option<u32> {
        self.description.content_id_below()
    }

    fn knows_whether_closed(&self) -> bool {
        false
    }

    fn was_left_open(&self) -> bool {
        self.description.was_left_open()
    }

    fn cluster_size(&self) -> Option<u64> {
        self.description.cluster_size()
    }

    fn open<'a>(&'a self, files: Files, options: OpenOptions) -> LocalFuture<'a, Result<Opened>> {
        self.open_in_parts(files, Vec::new(), options)
    }

    fn open_in_parts<'a>(
        &'a self,
        files: Files,
        parts: Vec<SharedStorage>,
        options: OpenOptions,
    ) -> LocalFuture<'a, Result<Opened>> {
        Box::pin(async move {
            let Files { image, below, .. } = files;
            if options.snapshot.is_some() {
                let why = format!("snapshots in a {} image are not read", self.kind.name());
                return Err(Error::new(ErrorKind::NotFound, why));
            }
            if !options.read_only {
                return Err(only_read(self.kind, image.name()));
            }
            let (offload, tally) = (options.offload, options.tally);
            let files = ForeignFiles { image, parts, below, offload, tally };
            let disk = self.description.open(files).await?;
            Ok(Opened {
                disk,
                snapshots: None,
                compressing: None,
                detaching: None,
                sessions: None,
                bitmaps: None,
                views: None,
                tier: None,
                zeros: None,
            })
        })
    }

    fn facts<'a>(&'a self, _image: &'a dyn Storage) -> LocalFuture<'a, Result<Vec<(&'static str, Fact)>>> {
        ready(Ok(self.description.facts().iter().map(|(name, fact)| (*name, fact_of(fact))).collect()))
    }
}

fn fact_of(fact: &ForeignFact) -> Fact {
    match fact {
        ForeignFact::Text(text) => Fact::Text(text.clone()),
        ForeignFact::Number(number) => Fact::Number(*number),
        ForeignFact::List(groups) => {
            let group = |facts: &Vec<(&'static str, ForeignFact)>| {
                Fact::Group(facts.iter().map(|(name, fact)| (*name, fact_of(fact))).collect())
            };
            Fact::List(groups.iter().map(group).collect())
        }
    }
}
