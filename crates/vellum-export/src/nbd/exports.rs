//! What is served, and under which names. Exports come and go while clients are connected.
//!
//! ```text
//!   add ──► listed ──attach──► a session uses it          attach and remove exclude each other,
//!             │                     │                     so no session attaches to a removed export
//!          remove ──drain──► its sessions end ──► Removed::unused ──► the disk, to be closed
//! ```
//!
//! 1. Names are compared as a whole, byte by byte. The empty name is the default export.
//! 2. Nothing here queries more of the disk than its geometry, so that a listing causes no host I/O.
//! 3. A removed disk is returned only when no session can start a request on it any more.
//! 4. The clients of one endpoint may see only some of the exports ([`View`]): for them the others do not
//!    exist.
//! 5. Exports that are created when a client asks for them come after the others: [`OnDemand`]. Each lives as
//!    long as its session.
//!
//! Source: NBD protocol, `NBD_OPT_EXPORT_NAME`, `NBD_OPT_LIST`.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use event_listener::Event;
use vellum_core::{Error, ErrorKind, Result, SharedDisk, lock, witnessed_by_connection};

use super::status::{OffersMarks, SharedMarks};
use super::wire;
use crate::shutdown::Shutdown;

/// A disk and how it is offered.
#[derive(Clone)]
pub struct Export {
    /// What clients ask for; empty for the default.
    pub name: String,
    /// A description for a person who lists the exports; may be empty.
    pub description: String,
    /// What is served. Several exports may serve one disk.
    pub disk: SharedDisk,
    /// Writes are refused, also when the disk would take them.
    pub read_only: bool,
    /// What clients may ask for besides its map: bitmaps, what differs from snapshots.
    pub marks: Option<Arc<dyn OffersMarks>>,
}

/// Exports that exist without being added: created when a client asks for one.
pub trait OnDemand: Send + Sync {
    /// Their names now.
    fn names(&self) -> Vec<String>;

    /// The export of this name, and what sends its client away.
    fn find(&self, name: &str) -> Option<(Export, Shutdown)>;
}

/// The exports of a server. Clones are one registry; it may be used from any thread.
#[derive(Clone, Default)]
pub struct Exports {
    registry: Arc<Registry>,
    /// What clients see of it; nothing, all.
    view: Option<Arc<View>>,
}

/// What clients that connect at one endpoint see.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct View {
    /// These names; all names by default.
    pub names: Option<Vec<String>>,
    /// Also the on-demand exports of the names above: their names with an `@` behind them. One whose own name
    /// is above is seen in any case.
    pub on_demand: bool,
}

impl View {
    fn has(&self, name: &str) -> bool {
        self.names.as_ref().is_none_or(|names| names.iter().any(|its| its == name))
    }

    fn has_on_demand(&self, name: &str) -> bool {
        let is_below =
            |its: &String| name.strip_prefix(its.as_str()).is_some_and(|rest| rest.starts_with('@'));
        match &self.names {
            None => self.on_demand,
            Some(names) => self.has(name) || self.on_demand && names.iter().any(is_below),
        }
    }
}

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
    /// No client is admitted for the time being.
    is_suspended: AtomicBool,
    /// The text that follows its description for the time being; may be empty.
    remark: Mutex<String>,
    /// What sends away the sessions that were told that its disk has moved.
    told: Mutex<Arc<Shutdown>>,
}

/// Sessions that were told that the disk has moved, and are sent away.
#[must_use = "they may still be in use"]
pub struct SentAway(Arc<Shutdown>);

impl SentAway {
    /// Whether all have ended: none of them gets an answer any more.
    pub fn is_over(&self) -> bool {
        Arc::strong_count(&self.0) == 1
    }
}

/// Exports that keep their names but admit no client until this is dropped.
#[must_use = "they let clients in again when it is dropped"]
pub struct Suspended(Vec<Arc<Entry>>);

impl Drop for Suspended {
    fn drop(&mut self) {
        self.0.iter().for_each(|entry| entry.is_suspended.store(false, Ordering::Release));
    }
}

/// A session's hold on an export.
pub(crate) struct Attached {
    entry: Arc<Entry>,
    /// As this session uses it.
    disk: SharedDisk,
    /// With the remark that it had when the session attached.
    description: String,
    /// Ends the sessions that were told that the disk has moved; of another one it ends nothing.
    told: Arc<Shutdown>,
}

/// An export that is no longer listed, but perhaps still in use.
#[must_use = "the disk is in use until `unused` has returned"]
pub struct Removed(Arc<Entry>);

impl Exports {
    /// None yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// The same exports, limited to what clients see through this view.
    pub fn seen_as(&self, view: View) -> Self {
        Self { registry: self.registry.clone(), view: Some(Arc::new(view)) }
    }

    fn shows(&self, name: &str) -> bool {
        self.view.as_ref().is_none_or(|view| view.has(name))
    }

    fn shows_on_demand(&self, name: &str) -> bool {
        self.view.as_ref().is_none_or(|view| view.has_on_demand(name))
    }

    /// Offers a disk from now on. `Invalid` when the name or the description is not what the protocol calls a
    /// string, `Locked` when the name is taken.
    pub fn add(&self, export: Export) -> Result<()> {
        self.add_with_remark(export, String::new())
    }

    /// As above, with a [remark](Self::set_remark) from the first client on.
    pub fn add_with_remark(&self, export: Export, remark: String) -> Result<()> {
        for text in [&export.name, &export.description] {
            if !is_string(text) {
                return Err(Error::invalid(
                    "an export's name and description may have at most 4096 bytes and no NUL",
                ));
            }
        }
        check_remark(&export, &remark)?;
        let mut exports = self.lock();
        if exports.contains_key(&export.name) {
            let context = format!("an export named {:?} already exists", export.name);
            return Err(Error::new(ErrorKind::Locked, context));
        }
        let entry = Entry { remark: Mutex::new(remark), ..Entry::new(export, Shutdown::new()) };
        exports.insert(entry.export.name.clone(), Arc::new(entry));
        Ok(())
    }

    /// Also offers these. Called once, before the first client.
    pub fn also(&self, on_demand: Arc<dyn OnDemand>) {
        let is_first = self.registry.on_demand.set(on_demand).is_ok();
        debug_assert!(is_first, "there is one source of them");
    }

    /// Offers it no longer, and lets its sessions answer what they have started and end.
    pub fn remove(&self, name: &str) -> Option<Removed> {
        let entry = self.lock().remove(name)?;
        entry.shutdown.drain();
        Some(Removed(entry))
    }

    /// As above, if it is of this disk: a name whose export was removed may have been given to another one
    /// since.
    pub fn remove_of(&self, name: &str, disk: &SharedDisk) -> Option<Removed> {
        let mut exports = self.lock();
        let is_its = exports.get(name).is_some_and(|entry| Arc::ptr_eq(&entry.export.disk, disk));
        let entry = if is_its { exports.remove(name)? } else { return None };
        entry.shutdown.drain();
        Some(Removed(entry))
    }

    /// Sets the text that follows the description, for clients that connect from now on; an empty one removes it.
    ///
    /// # Errors
    /// `Invalid` when both together are not what the protocol calls a string.
    pub fn set_remark(&self, name: &str, text: &str) -> Result<()> {
        let Some(entry) = self.lock().get(name).cloned() else { return Ok(()) };
        check_remark(&entry.export, text)?;
        text.clone_into(&mut lock(&entry.remark));
        Ok(())
    }

    /// Sends away the clients that were told that the disk of this export has moved. Nothing more is read from them or
    /// sent to them. Those that connected before that, or connect from now on, stay.
    pub fn send_away_told(&self, name: &str) -> Option<SentAway> {
        let entry = self.lock().get(name).cloned()?;
        // Under the lock of the remark, like `attach`.
        let _remark = lock(&entry.remark);
        let told = std::mem::take(&mut *lock(&entry.told));
        told.cut();
        Some(SentAway(told))
    }

    /// Admits no client to these exports until the result is dropped. Fails, with the number of sessions, if
    /// any of them has one. Their names stay taken, and clients get the error for an unknown export.
    ///
    /// # Errors
    /// How many sessions there are.
    pub fn suspend_unused(&self, names: &[String]) -> Result<Suspended, usize> {
        let exports = self.lock();
        let taken: Vec<Arc<Entry>> = names.iter().filter_map(|name| exports.get(name).cloned()).collect();
        match taken.iter().map(|entry| entry.sessions.load(Ordering::Acquire)).sum() {
            0 => {
                // Under the lock, like `attach`.
                taken.iter().for_each(|entry| entry.is_suspended.store(true, Ordering::Release));
                Ok(Suspended(taken))
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

    /// Name and description of each, in order, while `want` returns true.
    pub(super) fn list(&self, mut want: impl FnMut(&str, &str) -> bool) {
        let is_seen = |entry: &&Arc<Entry>| self.shows(&entry.export.name) && entry.lets_in();
        for entry in self.lock().values().filter(is_seen) {
            if !want(&entry.export.name, &entry.description()) {
                return;
            }
        }
        let more = self.registry.on_demand.get().map_or(Vec::new(), |more| more.names());
        let mut more = more.iter().filter(|name| is_string(name) && self.shows_on_demand(name));
        let _is_whole = more.all(|name| want(name, ""));
    }

    /// Whether a client may ask for it.
    pub(super) fn has(&self, name: &str) -> bool {
        let is_there = || self.lock().get(name).is_some_and(|entry| entry.lets_in());
        self.shows(name) && is_there() || self.find_on_demand(name).is_some()
    }

    /// What an export is marked with now.
    pub(super) fn marks(&self, name: &str) -> Vec<SharedMarks> {
        let entry = self.lock().get(name).filter(|_| self.shows(name)).cloned();
        let offers = match entry {
            Some(entry) => entry.export.marks.clone(),
            None => self.find_on_demand(name).and_then(|(export, _)| export.marks),
        };
        offers.map_or_else(Vec::new, |offers| offers.marks())
    }

    pub(crate) fn attach(&self, name: &str) -> Option<Attached> {
        if let Some(entry) = self.lock().get(name).filter(|entry| self.shows(name) && entry.lets_in()) {
            // Counted under the lock, so that a later removal of the export sees it.
            return Some(Attached::to(entry.clone()));
        }
        let (export, shutdown) = self.find_on_demand(name)?;
        Some(Attached::to(Arc::new(Entry::new(export, shutdown))))
    }

    fn find_on_demand(&self, name: &str) -> Option<(Export, Shutdown)> {
        if !self.shows_on_demand(name) {
            return None;
        }
        self.registry.on_demand.get()?.find(name)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Entry>>> {
        lock(&self.registry.added)
    }
}

impl Entry {
    fn new(export: Export, shutdown: Shutdown) -> Self {
        Self {
            export,
            shutdown,
            sessions: AtomicUsize::new(0),
            session_ended: Event::new(),
            is_suspended: AtomicBool::new(false),
            remark: Mutex::default(),
            told: Mutex::default(),
        }
    }

    fn description(&self) -> String {
        self.describe(&lock(&self.remark))
    }

    fn describe(&self, remark: &str) -> String {
        let description = &self.export.description;
        let between = match (description.is_empty(), remark.is_empty()) {
            (false, false) => "; ",
            // The name of a file is no remark, whatever it is.
            (false, true)
                if [wire::info::MOVED, wire::info::GONE].iter().any(|words| description.contains(words)) =>
            {
                ";"
            }
            _ => "",
        };
        format!("{description}{between}{remark}")
    }

    fn lets_in(&self) -> bool {
        !self.is_suspended.load(Ordering::Acquire)
    }
}

fn check_remark(export: &Export, remark: &str) -> Result<()> {
    match is_string(&format!("{}; {remark}", export.description)) {
        true => Ok(()),
        false if remark.is_empty() => Ok(()),
        false => Err(Error::invalid(format!(
            "the description of the export {:?} leaves no room for {remark:?}: together they have at most 4096 bytes",
            export.name
        ))),
    }
}

/// Whether it is what the protocol calls a string.
fn is_string(text: &str) -> bool {
    wire::parse_string(text.as_bytes()).is_some()
}

impl Attached {
    fn to(entry: Arc<Entry>) -> Self {
        // Before it is counted: what panics here leaves no session behind that never ends.
        let disk = witnessed_by_connection(entry.export.disk.clone());
        entry.sessions.fetch_add(1, Ordering::AcqRel);
        let (description, told) = {
            let remark = lock(&entry.remark);
            let is_told = [wire::info::MOVED, wire::info::GONE].iter().any(|words| remark.contains(words));
            let told = if is_told { lock(&entry.told).clone() } else { Arc::default() };
            (entry.describe(&remark), told)
        };
        Self { entry, disk, description, told }
    }

    pub(crate) fn export(&self) -> &Export {
        &self.entry.export
    }

    /// Its description, with the remark, for its client.
    pub(crate) fn description(&self) -> &str {
        &self.description
    }

    /// The disk for this session alone, which gets its own reports of lost writes.
    pub(crate) fn disk(&self) -> &SharedDisk {
        &self.disk
    }

    pub(crate) fn shutdown(&self) -> &Shutdown {
        &self.entry.shutdown
    }

    /// Ends this session if it was told that the disk has moved, and that is no longer so.
    pub(crate) fn told(&self) -> &Shutdown {
        &self.told
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        self.entry.sessions.fetch_sub(1, Ordering::AcqRel);
        self.entry.session_ended.notify(usize::MAX);
    }
}

impl Removed {
    /// Sessions that still use it also stop sending: for when the drain takes longer than the caller will
    /// wait.
    pub fn cut(&self) {
        self.0.shutdown.cut();
    }

    /// Waits until no session uses it, and returns the disk, so that it can be closed.
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
            marks: None,
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

    #[test]
    fn a_disk_removes_its_own_export_and_not_the_next_one_of_that_name() {
        let exports = Exports::new();
        let [one, next] = [export("a"), export("a")];
        exports.add(one.clone()).expect("the name is free");
        let removed = exports.remove_of("a", &one.disk).expect("it is its own");
        exports.add(next.clone()).expect("the name is free again");
        assert!(exports.remove_of("a", &one.disk).is_none());
        assert!(exports.attach("a").is_some(), "the other is still there");
        assert!(exports.remove_of("a", &next.disk).is_some() && exports.attach("a").is_none());
        drop(block_on(removed.unused()));
    }

    #[test]
    fn those_who_were_told_that_a_disk_has_moved_can_be_sent_away_alone() {
        let exports = Exports::new();
        exports.add(export("disk")).expect("the name is free");
        let attach = || exports.attach("disk").expect("it is there");
        let before = attach();
        exports.set_remark("disk", &format!("{}7", wire::info::MOVED)).expect("a string");
        let told = [attach(), attach()];
        assert!(told[0].description().ends_with("7") && before.description().is_empty());
        exports.set_remark("disk", "").expect("a string");
        let after = attach();
        let sent_away = exports.send_away_told("disk").expect("it is there");
        assert!(told.iter().all(|told| told.told().is_cut()) && !sent_away.is_over());
        drop(told);
        assert!(sent_away.is_over());
        exports.set_remark("disk", &format!("{}8", wire::info::GONE)).expect("a string");
        let again = attach();
        assert!([&before, &after, &again].iter().all(|stays| !stays.told().is_cut()));
        drop(exports.send_away_told("disk"));
        assert!(again.told().is_cut() && !before.told().is_cut());
        assert!(exports.send_away_told("other").is_none());
    }

    struct Letters;

    impl OnDemand for Letters {
        fn names(&self) -> Vec<String> {
            vec!["@a".to_owned(), "@b\0".to_owned()]
        }

        fn find(&self, name: &str) -> Option<(Export, Shutdown)> {
            (name == "@a").then(|| (export(name), Shutdown::new()))
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
    fn clients_see_what_their_place_shows() {
        let all = Exports::new();
        for name in ["", "disk", "other"] {
            all.add(export(name)).expect("the name is free");
        }
        all.also(Arc::new(Letters));
        let seen = |names: Option<&[&str]>, on_demand| {
            let names = names.map(|names| names.iter().map(|name| (*name).to_owned()).collect());
            let exports = all.seen_as(View { names, on_demand });
            let mut seen = Vec::new();
            exports.list(|name, _| {
                seen.push(name.to_owned());
                true
            });
            for name in ["", "disk", "other", "@a"] {
                let is_seen = seen.iter().any(|its| its == name);
                assert_eq!(
                    (exports.has(name), exports.attach(name).is_some()),
                    (is_seen, is_seen),
                    "{name:?}"
                );
            }
            seen
        };
        assert_eq!(seen(None, false), ["", "disk", "other"]);
        assert_eq!(seen(None, true), ["", "disk", "other", "@a"]);
        assert_eq!(seen(Some(&["disk"]), true), ["disk"], "what is made is of another");
        assert_eq!(seen(Some(&["disk", ""]), true), ["", "disk", "@a"]);
        assert_eq!(seen(Some(&["@a"]), false), ["@a"]);
    }

    #[test]
    fn exports_are_suspended_only_when_nobody_uses_them_and_keep_their_names() {
        let exports = Exports::new();
        for name in ["a", "b", "c"] {
            exports.add(export(name)).expect("the name is free");
        }
        let names = ["a".to_owned(), "b".to_owned()];
        let session = exports.attach("b").expect("it is there");
        assert_eq!(exports.suspend_unused(&names).err(), Some(1));
        assert!(exports.has("a") && exports.has("b"), "none was");
        drop(session);
        let suspended = exports.suspend_unused(&names).expect("nobody uses them");
        assert!(!exports.has("a") && exports.attach("b").is_none() && exports.has("c"));
        let mut seen = Vec::new();
        exports.list(|name, _| {
            seen.push(name.to_owned());
            true
        });
        assert_eq!(seen, ["c"]);
        assert_eq!(exports.add(export("a")).expect_err("the name is taken").kind(), ErrorKind::Locked);
        drop(suspended);
        assert!(exports.has("a") && exports.attach("b").is_some());
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
