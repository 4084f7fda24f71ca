//! The images below the top of a chain, open for reading only: of one disk, or of all disks of a process that
//! stand on them.
//!
//! ```text
//!   web.qcow2   db.qcow2   ci-000.qcow2 … ci-999.qcow2      tops: each its disk's own, written
//!       └──────────┴────────────┴─────────────┘
//!                          Stand                            one for each disk
//!                          Below                            opened once: files, mappings, view
//!                  template.qcow2, base.raw
//! ```
//!
//! 1. What is below is closed when its last disk leaves it, and cannot be joined after that.
//! 2. A disk that is dropped without being closed also leaves. What is below was not written, so nothing is lost
//!    with it.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use vellum_core::{Disk as _, HostTally, Result, SharedDisk, lock};
use vellum_format::FormatKind;
use vellum_format::image::Opened;

use super::flash::{TablesState, over_below, over_tables};
use super::forks::{Base, Parent, Wanted};
use super::pins::{FoundBelow, check_content_id};
use super::share::{Shares, shares};
use super::way_down::{Backing, Step, WayDown, describe};
use super::{
    ChainOptions, Found, How, Identity, Member, Opener, files_of, find_one, mapping_need, open_disk,
};
use crate::view::{Layer, Unadmitting, View};

/// Images that are open for reading, over one another.
pub(super) struct Below {
    /// From the top down; at least one.
    members: Vec<Member>,
    /// Where each of them is.
    canonicals: Vec<PathBuf>,
    /// Which files they are; nothing when that cannot be said, and where an image has a data file.
    identities: Option<Vec<Identity>>,
    /// For each, whether it is a snapshot, whose file may be written meanwhile.
    are_snapshots: Vec<bool>,
    /// The snapshots among them.
    bases: Vec<Arc<Base>>,
    /// The members as one disk, where there are at least two.
    view: Option<Arc<View>>,
    disk: SharedDisk,
    /// The same, for reads of which a flash cache keeps nothing, where there is one.
    fills: Option<SharedDisk>,
    tally: HostTally,
    /// How much the mapping of each image takes as a whole, in bytes.
    needs: Vec<u64>,
    /// How many disks use these images. At zero they are closed for good.
    users: Mutex<usize>,
}

impl Below {
    /// Opens the image of this step and all below it. `top_need` is how much the mapping of the image above
    /// takes, in bytes: the memory is divided among all of them.
    pub(super) async fn open(
        way: &mut WayDown<'_>,
        step: Step,
        options: &ChainOptions,
        top_need: u64,
    ) -> Result<Arc<Self>> {
        let mut found: Vec<Found> = Vec::new();
        let mut canonicals = Vec::new();
        let mut snapshots = Vec::new();
        let mut next = Some(step);
        // Noted before they are opened, of the path that is opened: a file that is replaced in between is then one
        // that nobody shares.
        let asks = options.templates.is_some() || options.is_flashed();
        let mut places: Vec<Option<Identity>> = Vec::new();
        while let Some(step) = next {
            let place = match asks {
                true => way.opener().identities(vec![step.canonical.clone()]).await,
                false => None,
            };
            places.push(place.and_then(|found| found.first().copied()));
            let image;
            (image, next) = find_one(way, &step, options).await?;
            found.push(image);
            canonicals.push(step.canonical);
            snapshots.push(step.snapshot);
        }
        let need = |image: &Found| mapping_need(&*image.head, &image.storage, true);
        let needs: Vec<u64> = found.iter().map(need).collect();
        let all: Vec<u64> = std::iter::once(top_need).chain(needs.iter().copied()).collect();
        let Shares { images: memory, view: memory_of_view } = shares(&all, options.mapping_bytes_max);
        let tally = HostTally::default();
        let mut bases = Vec::new();
        let mut members: Vec<Member> = Vec::with_capacity(found.len());
        for (index, image) in found.into_iter().enumerate().rev() {
            let below = members.last().map(|member| member.opened.disk.clone());
            let depth = index + 1;
            // The file of a snapshot is written meanwhile.
            let is_written = options.writes_at(depth);
            let tables = match snapshots[index].is_some() || is_written {
                true => None,
                false => over_tables(
                    options,
                    &*image.head,
                    &image.storage,
                    places[index].as_ref(),
                    TablesState::OnlyRead,
                )
                .await
                .map_err(|error| describe(error, &image.path, depth))?,
            };
            // No cache is over it, and none is told of what changes.
            let unflashed;
            let options = match is_written {
                true => {
                    unflashed = ChainOptions { flash: None, ..options.clone() };
                    &unflashed
                }
                false => options,
            };
            let how = How {
                tables: tables.as_ref(),
                read_only: !is_written,
                snapshot: None,
                tally: &tally,
                mapping_share: memory[depth],
                fills: None,
                options,
            };
            let Found { path, storage, data_file, parts, head, is_replayed } = image;
            let opened = match &snapshots[index] {
                None => open_disk(&*head, files_of(&storage, data_file.as_ref(), below), &parts, how).await,
                Some(snapshot) => {
                    let canonical = &canonicals[index];
                    let parent = match &options.templates {
                        Some(templates) => templates.parent(canonical),
                        None => Arc::<Parent>::default(),
                    };
                    let wanted = Wanted {
                        path: path.clone(),
                        canonical: canonical.clone(),
                        snapshot: snapshot.clone(),
                        below,
                        head: head.kind().format().read(&*storage).await?,
                        tally: tally.clone(),
                        mapping_share: memory[depth],
                        // What it stands on is open already.
                        options: ChainOptions { templates: None, ..options.clone() },
                    };
                    let base = parent.open(way.opener(), wanted).await;
                    base.map(|base| {
                        bases.push(base.clone());
                        Opened {
                            disk: base,
                            snapshots: None,
                            compressing: None,
                            detaching: None,
                            sessions: None,
                            bitmaps: None,
                            views: None,
                            tier: None,
                            zeros: None,
                        }
                    })
                }
            };
            let opened = opened.map_err(|error| describe(error, &path, depth))?;
            let is_snapshot = snapshots[index].is_some();
            // The file of a snapshot is written meanwhile.
            let flash = match is_snapshot || is_written || data_file.is_some() || !parts.is_empty() {
                true => None,
                false => over_below(options, &*head, &*storage, places[index].as_ref(), &opened.disk)
                    .await
                    .map_err(|error| describe(error, &path, depth))?,
            };
            members.push(Member {
                path,
                storage,
                data_file,
                parts,
                head,
                is_replayed,
                is_snapshot,
                opened,
                flash,
                tables,
            });
        }
        members.reverse();
        for (index, member) in members.iter().enumerate() {
            let under = &members[index + 1..];
            check_content_id(&*member.head, under.first())
                .map_err(|error| describe(error, &member.path, index + 1))?;
            if let Some(pin) = member.head.pin().filter(|_| !under.is_empty()) {
                let found = FoundBelow::of(under.iter());
                found.compare(pin).map_err(|error| describe(error, &member.path, index + 1))?;
            }
        }
        let has_view = members.len() > 1;
        let are_snapshots: Vec<bool> = snapshots.iter().map(Option::is_some).collect();
        let layers = members.iter().zip(&are_snapshots).enumerate().map(|(index, (member, is_snapshot))| {
            layer_of(member, *is_snapshot || options.writes_at(index + 1))
        });
        let view = has_view.then(|| View::new(layers.collect(), memory_of_view));
        let disk = match &view {
            Some(view) => view.clone(),
            None => members[0].disk().clone(),
        };
        let has_flash = members.iter().any(|member| member.flash.is_some());
        let fills = match &view {
            Some(view) => has_flash.then(|| Arc::new(Unadmitting(view.clone())) as SharedDisk),
            None => members[0].flash.as_ref().map(|flashed| flashed.unadmitting()),
        };
        let is_one_file = |member: &Member| member.data_file.is_none() && member.parts.is_empty();
        let identities: Option<Vec<Identity>> = places.into_iter().collect();
        // Others are to be refused where this one has read errors.
        let is_shared = options.templates.is_some() && !options.salvages && members.iter().all(is_one_file);
        let identities = identities.filter(|_| is_shared);
        let users = Mutex::new(1);
        Ok(Arc::new(Self {
            members,
            canonicals,
            identities,
            are_snapshots,
            bases,
            view,
            disk,
            fills,
            tally,
            needs,
            users,
        }))
    }

    pub(super) fn canonicals(&self) -> &[PathBuf] {
        &self.canonicals
    }

    /// Whether they are what an image finds that is above the file of this name: the names in the images still
    /// lead to the files that are open.
    pub(super) async fn are_found_at(&self, first: &Path, opener: &dyn Opener) -> bool {
        let Some(were) = &self.identities else { return false };
        if !self.bases.iter().all(|base| base.is_well()) {
            return false;
        }
        let mut paths = vec![first.to_owned()];
        for member in &self.members[..self.members.len() - 1] {
            let above = paths.last().expect("the first");
            match Backing::of(above, &*member.head) {
                Ok(Some(backing)) => paths.push(backing.path),
                _ => return false,
            }
        }
        // The gate has seen these paths and no others, even if others lead to the same files.
        for (path, canonical) in paths.iter().zip(&self.canonicals).skip(1) {
            if opener.canonical(path).await.ok().as_ref() != Some(canonical) {
                return false;
            }
        }
        // The file of a snapshot changes while its disk is written; which file it is does not.
        let is_same = |((are, were), is_snapshot): ((&Identity, &Identity), &bool)| match is_snapshot {
            true => are[..3] == were[..3],
            false => are == were,
        };
        let are = opener.identities(paths).await;
        are.is_some_and(|are| are.iter().zip(were).zip(&self.are_snapshots).all(is_same))
    }

    /// One more disk stands on them, unless they are closed.
    pub(super) fn join(&self) -> bool {
        let mut users = lock(&self.users);
        *users += usize::from(*users > 0);
        *users > 0
    }

    /// One disk less; whether it was the last one.
    fn leave(&self) -> bool {
        let mut users = lock(&self.users);
        *users -= 1;
        *users == 0
    }

    async fn close(&self) -> Result<()> {
        let mut result = Ok(());
        if let Some(view) = &self.view {
            result = view.close().await;
        }
        for member in &self.members {
            result = result.and(member.close().await);
        }
        result
    }
}

/// An image as a part of the view. Where it changes its places are not kept.
fn layer_of(member: &Member, changes: bool) -> Layer {
    let is_whole = member.head.kind() == FormatKind::Raw;
    // What lies in several files has no one storage.
    // What is cached is found by the disk, not by the storage.
    let is_exchanged = changes || !member.parts.is_empty() || member.flash.is_some();
    let unadmitting = member.flash.as_ref().map(|flashed| flashed.unadmitting());
    Layer { disk: member.disk().clone(), unadmitting, is_whole, is_exchanged }
}

/// One disk's place on the images below it.
pub(super) struct Stand {
    below: Arc<Below>,
    has_left: AtomicBool,
}

impl Stand {
    /// That of a disk which has been counted.
    pub(super) fn on(below: Arc<Below>) -> Self {
        Self { below, has_left: AtomicBool::new(false) }
    }

    pub(super) fn members(&self) -> &[Member] {
        &self.below.members
    }

    pub(super) fn disk(&self) -> &SharedDisk {
        &self.below.disk
    }

    /// What a format completes blocks from, if that is not the disk.
    pub(super) fn fills(&self) -> Option<SharedDisk> {
        self.below.fills.clone()
    }

    pub(super) fn tally(&self) -> &HostTally {
        &self.below.tally
    }

    pub(super) fn needs(&self) -> &[u64] {
        &self.below.needs
    }

    /// The disk does not use them any more. They are closed when it was the last one.
    pub(super) async fn leave(&self) -> Result<()> {
        match self.is_last() {
            true => self.below.close().await,
            false => Ok(()),
        }
    }

    fn is_last(&self) -> bool {
        !self.has_left.swap(true, Ordering::AcqRel) && self.below.leave()
    }
}

impl Drop for Stand {
    fn drop(&mut self) {
        self.is_last();
    }
}
