//! What is served, under which names. Exports come and go while clients are connected.
//!
//! ```text
//!   add ──► listed ──attach──► a session uses it          attach and remove exclude each other,
//!             │                     │                     so nobody attaches to what was removed
//!          remove ──drain──► its sessions end ──► Removed::unused ──► the disk, to be closed
//! ```
//!
//! 1. Names are compared whole, byte by byte. The empty name is the default export.
//! 2. Nothing here asks the disk anything but its geometry, so that listing costs a host nothing.
//! 3. A removed disk is given back only when no session can start a request on it any more.
//! 4. Exports that are made when a client asks for them come after the others: [`OnDemand`]. Each lives as long as its session.
//!
//! Source: NBD protocol, `NBD_OPT_EXPORT_NAME`, `NBD_OPT_LIST`.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use event_listener::Event;
use vellum_core::{Error, ErrorKind, Result, SharedDisk};

use super::wire;
use crate::shutdown::Shutdown;

/// A disk and how it is offered.
#[derive(Clone)]
pub struct Export {
    /// What clients ask for; empty for the default.
    pub name: String,
    /// What it is, for a person who lists the exports; may be empty.
    pub description: String,
    /// What is served. Several exports may serve one disk.
    pub disk: SharedDisk,
    /// Writes are refused, also when the disk would take them.
    pub read_only: bool,
}

/// Exports that are there without being added: made when a client asks for one.
pub trait OnDemand: Send + Sync {
    /// Their names now.
    fn names(&self) -> Vec<String>;

    /// The export of this name.
    fn find(&self, name: &str) -> Option<Export>;
}

/// The exports of a server. Clones are one registry; it may be used from any thread.
#[derive(Clone, Default)]
pub struct Exports(Arc<Registry>);

#[derive(Default)]
struct Registry {
    added: Mutex<BTreeMap<String, Arc<Entry>>>,
    on_demand: OnceLock<Arc<dyn OnDemand>>,
}

pub(crate) struct Entry {
    export: Export,
    shutdown: Shutdown,
    sessions: AtomicUsize,
    session_ended: Event,
}

/// A session's hold on an export.
pub(crate) struct Attached(Arc<Entry>);

/// An export that is no longer listed, but perhaps still in use.
#[must_use = "the disk is in use until `unused` has returned"]
pub struct Removed(Arc<Entry>);

impl Exports {
    /// None yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Offers a disk from now on. `Invalid` when the name or the description is not what the protocol calls a string,
    /// `Locked` when the name is taken.
    pub fn add(&self, export: Export) -> Result<()> {
        for text in [&export.name, &export.description] {
            if !is_string(text) {
                return Err(Error::invalid(
                    "an export's name and description have at most 4096 bytes, none of them NUL",
                ));
            }
        }
        let mut exports = self.lock();
        if exports.contains_key(&export.name) {
            let context = format!("there is an export {:?} already", export.name);
            return Err(Error::new(ErrorKind::Locked, context));
        }
        exports.insert(export.name.clone(), Arc::new(Entry::new(export)));
        Ok(())
    }

    /// Offers these, too. Done once, before the first client.
    pub fn also(&self, on_demand: Arc<dyn OnDemand>) {
        let is_first = self.0.on_demand.set(on_demand).is_ok();
        debug_assert!(is_first, "there is one source of them");
    }

    /// Offers it no longer, and lets its sessions answer what they have started and end.
    pub fn remove(&self, name: &str) -> Option<Removed> {
        let entry = self.lock().remove(name)?;
        entry.shutdown.drain();
        Some(Removed(entry))
    }

    /// Offers them no longer, and gives them back, when none of them has a session; else tells how many there are.
    pub fn take_unused(&self, names: &[String]) -> Result<Vec<Export>, usize> {
        let mut exports = self.lock();
        let taken: Vec<Arc<Entry>> = names.iter().filter_map(|name| exports.get(name).cloned()).collect();
        match taken.iter().map(|entry| entry.sessions.load(Ordering::Acquire)).sum() {
            0 => {
                exports.retain(|name, _| !names.contains(name));
                Ok(taken.iter().map(|entry| entry.export.clone()).collect())
            }
            sessions => Err(sessions),
        }
    }

    /// The names in order.
    pub fn names(&self) -> Vec<String> {
        self.lock().keys().cloned().collect()
    }

    /// How many sessions use the export; `None` when it is not there.
    pub fn sessions(&self, name: &str) -> Option<usize> {
        self.lock().get(name).map(|entry| entry.sessions.load(Ordering::Acquire))
    }

    /// Name and description of each, in order, as long as `want` says so.
    pub(super) fn list(&self, mut want: impl FnMut(&str, &str) -> bool) {
        for entry in self.lock().values() {
            if !want(&entry.export.name, &entry.export.description) {
                return;
            }
        }
        let more = self.0.on_demand.get().map_or(Vec::new(), |more| more.names());
        let _is_whole = more.iter().filter(|name| is_string(name)).all(|name| want(name, ""));
    }

    /// Whether a client may ask for it.
    pub(super) fn has(&self, name: &str) -> bool {
        self.lock().contains_key(name) || self.find_on_demand(name).is_some()
    }

    pub(crate) fn attach(&self, name: &str) -> Option<Attached> {
        if let Some(entry) = self.lock().get(name) {
            // Counted under the lock: whoever removes the export afterwards sees it.
            entry.sessions.fetch_add(1, Ordering::AcqRel);
            return Some(Attached(entry.clone()));
        }
        let entry = Entry::new(self.find_on_demand(name)?);
        entry.sessions.fetch_add(1, Ordering::AcqRel);
        Some(Attached(Arc::new(entry)))
    }

    fn find_on_demand(&self, name: &str) -> Option<Export> {
        self.0.on_demand.get()?.find(name)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Entry>>> {
        self.0.added.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entry {
    fn new(export: Export) -> Self {
        Self { export, shutdown: Shutdown::new(), sessions: AtomicUsize::new(0), session_ended: Event::new() }
    }
}

/// Whether it is what the protocol calls a string.
fn is_string(text: &str) -> bool {
    wire::parse_string(text.as_bytes()).is_some()
}

impl Attached {
    pub(crate) fn export(&self) -> &Export {
        &self.0.export
    }

    pub(crate) fn shutdown(&self) -> &Shutdown {
        &self.0.shutdown
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        self.0.sessions.fetch_sub(1, Ordering::AcqRel);
        self.0.session_ended.notify(usize::MAX);
    }
}

impl Removed {
    /// Sessions that still use it stop sending, too: for when the drain takes longer than the caller cares to wait.
    pub fn cut(&self) {
        self.0.shutdown.cut();
    }

    /// Waits until no session uses it, and gives the disk back, so that it can be closed.
    pub async fn unused(self) -> SharedDisk {
        loop {
            let ended = self.0.session_ended.listen();
            if self.0.sessions.load(Ordering::Acquire) == 0 {
                return self.0.export.disk.clone();
            }
            ended.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_lite::future::{block_on, poll_once, zip};
    use vellum_core::MemoryDisk;

    use super::*;

    fn export(name: &str) -> Export {
        Export {
            name: name.to_owned(),
            description: String::new(),
            disk: MemoryDisk::new(4096),
            read_only: false,
        }
    }

    #[test]
    fn names_are_compared_whole() {
        let exports = Exports::new();
        exports.add(export("disk")).expect("the name is free");
        for name in ["", "dis", "disk1", "Disk", "disk "] {
            assert!(exports.attach(name).is_none(), "{name:?}");
        }
        assert!(exports.attach("disk").is_some());
    }

    #[test]
    fn a_name_is_given_once_and_must_be_a_string() {
        let exports = Exports::new();
        exports.add(export("")).expect("the default export");
        assert_eq!(exports.add(export("")).expect_err("taken").kind(), ErrorKind::Locked);
        exports.add(export(&"n".repeat(4096))).expect("the longest name");
        for name in ["a\0b".to_owned(), "n".repeat(4097)] {
            assert_eq!(exports.add(export(&name)).expect_err("no string").kind(), ErrorKind::Invalid);
        }
        let long = Export { description: "d".repeat(4097), ..export("x") };
        assert_eq!(exports.add(long).expect_err("no string").kind(), ErrorKind::Invalid);
        assert_eq!(exports.names().len(), 2);
    }

    struct Letters;

    impl OnDemand for Letters {
        fn names(&self) -> Vec<String> {
            vec!["@a".to_owned(), "@b\0".to_owned()]
        }

        fn find(&self, name: &str) -> Option<Export> {
            (name == "@a").then(|| export(name))
        }
    }

    #[test]
    fn exports_on_demand_come_after_the_others() {
        let exports = Exports::new();
        exports.add(export("disk")).expect("the name is free");
        exports.also(Arc::new(Letters));
        let mut seen = Vec::new();
        exports.list(|name, _| {
            seen.push(name.to_owned());
            true
        });
        assert_eq!(seen, ["disk", "@a"], "what is no string is not listed");
        assert!(exports.has("@a") && exports.has("disk") && !exports.has("@c"));
        let attached = exports.attach("@a").expect("it is made");
        assert_eq!(attached.export().name, "@a");
        assert!(exports.attach("@c").is_none());
    }

    #[test]
    fn exports_are_taken_only_when_nobody_uses_them() {
        let exports = Exports::new();
        for name in ["a", "b", "c"] {
            exports.add(export(name)).expect("the name is free");
        }
        let names = ["a".to_owned(), "b".to_owned()];
        let session = exports.attach("b").expect("it is there");
        assert_eq!(exports.take_unused(&names).err(), Some(1));
        assert_eq!(exports.names().len(), 3, "none was taken");
        drop(session);
        let taken = exports.take_unused(&names).unwrap_or_default();
        assert_eq!(taken.len(), 2);
        assert_eq!(exports.names(), ["c"]);
    }

    #[test]
    fn a_removed_disk_comes_back_when_the_last_session_has_ended() {
        let exports = Exports::new();
        exports.add(export("a")).expect("the name is free");
        let first = exports.attach("a").expect("it is there");
        let second = exports.attach("a").expect("it is there");
        assert_eq!(exports.sessions("a"), Some(2));
        let removed = exports.remove("a").expect("it is there");
        assert!(exports.remove("a").is_none() && exports.attach("a").is_none());
        assert!(first.shutdown().is_requested());
        exports.add(export("a")).expect("the name is free again");
        block_on(async {
            let mut unused = std::pin::pin!(removed.unused());
            assert!(poll_once(&mut unused).await.is_none());
            drop(first);
            assert!(poll_once(&mut unused).await.is_none());
            let (disk, ()) = zip(unused, async { drop(second) }).await;
            disk.close().await.expect("nobody uses it");
        });
    }
}
