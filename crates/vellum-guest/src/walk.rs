//! Paths, the directories below them, and the bytes of the files there.
//!
//! 1. Links in a path are followed, within the file system, at most [`LINKS_MAX`] of them. Links that are found below a
//!    path are not.
//! 2. Each inode is looked at once, so hard links count once, and a directory that contains itself ends.

use std::collections::HashSet;

use vellum_core::{Context, Disk, Error, ErrorKind, GuestSpan, Result};

use crate::ext::{self, Ext};
use crate::file::{FileFacts, FileKind};
use crate::partitions::{Volume, VolumeKind};
use crate::pieces::Pieces;
use crate::xfs::{self, Xfs};

/// Files and directories that are looked at, at most.
pub const FILES_MAX: usize = 4 << 20;
/// Runs of bytes that are found, at most.
pub const SPANS_MAX: usize = 2 << 20;
const LINKS_MAX: u32 = 40;
const PATH_MAX: usize = 4096;

/// The bytes of files.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Found {
    /// Where they are on the disk, in order, without overlaps.
    pub spans: Vec<GuestSpan>,
    /// How many files that are.
    pub files: u64,
    /// Files that were looked at and not wanted.
    pub others: u64,
}

/// A file system.
enum System<'a> {
    Ext(Ext<'a>),
    Xfs(Xfs<'a>),
}

/// What a name leads to.
enum Node {
    Ext(ext::Node),
    Xfs(xfs::Node),
}

impl Node {
    fn number(&self) -> u64 {
        match self {
            Self::Ext(node) => node.number,
            Self::Xfs(node) => node.number,
        }
    }

    fn kind(&self) -> FileKind {
        match self {
            Self::Ext(node) => node.kind,
            Self::Xfs(node) => node.kind,
        }
    }

    fn facts(&self) -> FileFacts {
        match self {
            Self::Ext(node) => node.facts,
            Self::Xfs(node) => node.facts,
        }
    }
}

impl System<'_> {
    fn root(&self) -> u64 {
        match self {
            Self::Ext(system) => system.root(),
            Self::Xfs(system) => system.root(),
        }
    }

    async fn node(&self, number: u64) -> Result<Node> {
        match self {
            Self::Ext(system) => system.node(number).await.map(Node::Ext),
            Self::Xfs(system) => system.node(number).await.map(Node::Xfs),
        }
    }

    async fn entries(&self, node: &Node, visit: &mut dyn FnMut(&[u8], u64) -> bool) -> Result<()> {
        match (self, node) {
            (Self::Ext(system), Node::Ext(node)) => system.entries(node, visit).await,
            (Self::Xfs(system), Node::Xfs(node)) => system.entries(node, visit).await,
            _ => Err(foreign()),
        }
    }

    async fn link(&self, node: &Node) -> Result<Vec<u8>> {
        match (self, node) {
            (Self::Ext(system), Node::Ext(node)) => system.link(node).await,
            (Self::Xfs(system), Node::Xfs(node)) => system.link(node).await,
            _ => Err(foreign()),
        }
    }

    async fn runs(&self, node: &Node, add: &mut dyn FnMut(u64, u64) -> Result<()>) -> Result<()> {
        match (self, node) {
            (Self::Ext(system), Node::Ext(node)) => system.runs(node, add).await,
            (Self::Xfs(system), Node::Xfs(node)) => system.runs(node, add).await,
            _ => Err(foreign()),
        }
    }
}

fn foreign() -> Error {
    Error::invalid("a file of another file system")
}

async fn open<'a>(disk: &'a dyn Disk, volume: &Volume) -> Result<System<'a>> {
    match volume.kind {
        VolumeKind::Ext => Ext::open(Pieces::new(disk, volume.span)).await.map(System::Ext),
        VolumeKind::Xfs => Xfs::open(Pieces::new(disk, volume.span)).await.map(System::Xfs),
        VolumeKind::Other => {
            Err(Error::unsupported("it has no file system that is read here: ext2, ext3, ext4, XFS"))
        }
    }
}

/// Whether the file system has this path.
///
/// # Errors
/// Those of the disk, `Corrupt` and `Unsupported` for what the file system has on the way.
pub async fn has_path(disk: &dyn Disk, volume: &Volume, path: &str) -> Result<bool> {
    let system = open(disk, volume).await?;
    match resolve(&system, path).await {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// The bytes of all files at these paths and below them that are `wanted`.
///
/// # Errors
/// `NotFound` for a path that does not exist, `Corrupt` and `Unsupported` for what the file system has on the way,
/// `Refused` where it has more than [`FILES_MAX`] or [`SPANS_MAX`], and those of the disk.
pub async fn find_files(
    disk: &dyn Disk,
    volume: &Volume,
    paths: &[String],
    wanted: &mut dyn FnMut(&FileFacts) -> bool,
) -> Result<Found> {
    let system = open(disk, volume).await?;
    let (mut found, mut seen) = (Found::default(), HashSet::new());
    for path in paths {
        let node = resolve(&system, path).await?;
        below(&system, volume.span, node, wanted, &mut seen, &mut found).await.context(|| path.clone())?;
    }
    found.spans = merged(std::mem::take(&mut found.spans));
    Ok(found)
}

/// What a path leads to.
async fn resolve(system: &System<'_>, path: &str) -> Result<Node> {
    let missing = || Error::new(ErrorKind::NotFound, format!("{path} does not exist there"));
    if !path.starts_with('/') || path.len() > PATH_MAX {
        return Err(Error::invalid(format!("{path}: a path in the guest begins with a slash")));
    }
    let parts = |path: &[u8]| -> Vec<Vec<u8>> {
        let parts = path.split(|byte| *byte == b'/').filter(|part| !part.is_empty() && *part != b".");
        parts.map(<[u8]>::to_vec).rev().collect()
    };
    let root = system.node(system.root()).await?;
    // The directories on the way, and the names that are still to come; the next one is the last.
    let (mut way, mut rest, mut links) = (vec![root], parts(path.as_bytes()), 0);
    while let Some(name) = rest.pop() {
        if name == b".." {
            way.truncate((way.len() - 1).max(1));
            continue;
        }
        let here = way.last().expect("the root stays");
        if here.kind() != FileKind::Directory {
            return Err(missing());
        }
        let mut number = None;
        let mut look = |its: &[u8], inode| {
            if its == name {
                number = Some(inode);
            }
            number.is_none()
        };
        system.entries(here, &mut look).await.context(|| path.to_owned())?;
        let node = system.node(number.ok_or_else(missing)?).await?;
        if node.kind() != FileKind::Link {
            way.push(node);
            continue;
        }
        links += 1;
        if links > LINKS_MAX {
            return Err(Error::invalid(format!("{path}: too many symbolic links on the way")));
        }
        let target = system.link(&node).await?;
        if target.first() == Some(&b'/') {
            way.truncate(1);
        }
        rest.extend(parts(&target));
        if rest.len() > PATH_MAX {
            return Err(Error::invalid(format!("{path}: its symbolic links make it too long")));
        }
    }
    Ok(way.pop().expect("the root stays"))
}

async fn below(
    system: &System<'_>,
    volume: GuestSpan,
    top: Node,
    wanted: &mut dyn FnMut(&FileFacts) -> bool,
    seen: &mut HashSet<u64>,
    found: &mut Found,
) -> Result<()> {
    let mut next = vec![top.number()];
    while let Some(number) = next.pop() {
        if !seen.insert(number) {
            continue;
        }
        let node = system.node(number).await?;
        match node.kind() {
            FileKind::Directory => {
                let mut add = |_: &[u8], inode| {
                    if !seen.contains(&inode) {
                        next.push(inode);
                    }
                    next.len() + seen.len() <= FILES_MAX
                };
                system.entries(&node, &mut add).await?;
            }
            FileKind::File if wanted(&node.facts()) => {
                found.files += 1;
                let mut add = |at: u64, len: u64| {
                    // A file system may say that it is longer than its volume.
                    if at.checked_add(len).is_none_or(|end| end > volume.len()) {
                        let why =
                            format!("inode {number}: it refers to byte {at}, behind the end of the volume");
                        return Err(Error::corrupt(why));
                    }
                    let start = volume.start() + at;
                    let span = GuestSpan::between(start, start + len);
                    match found.spans.last_mut() {
                        Some(last) if last.end() == start => {
                            *last = GuestSpan::between(last.start(), span.end())
                        }
                        _ => found.spans.push(span),
                    }
                    match found.spans.len() <= SPANS_MAX {
                        true => Ok(()),
                        false => Err(too_many("runs of bytes", SPANS_MAX)),
                    }
                };
                system.runs(&node, &mut add).await?;
            }
            FileKind::File => found.others += 1,
            FileKind::Link | FileKind::Other => {}
        }
        if next.len() + seen.len() > FILES_MAX {
            return Err(too_many("files", FILES_MAX));
        }
    }
    Ok(())
}

fn too_many(what: &str, most: usize) -> Error {
    Error::new(ErrorKind::Refused, format!("it has more than {most} {what}: name smaller parts"))
}

/// In order, and neighbours together.
fn merged(mut spans: Vec<GuestSpan>) -> Vec<GuestSpan> {
    spans.sort_unstable_by_key(|span| (span.start(), span.end()));
    spans.dedup_by(|next, last| {
        let meets = next.start() <= last.end();
        if meets {
            *last = GuestSpan::between(last.start(), last.end().max(next.end()));
        }
        meets
    });
    spans
}
