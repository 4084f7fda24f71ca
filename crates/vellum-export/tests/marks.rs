//! What an export is marked with: bitmaps, and what differs from snapshots. Listed by namespace, chosen, and answered with short and long
//! headers, while names come and go.

mod support;

use std::sync::{Arc, Mutex};

use support::World;
use support::client::{Wish, context_data};
use support::disks::{RuledDisk, shared};
use vellum_core::{Error, ErrorKind, GuestOffset, GuestSpan, LocalFuture, Result};
use vellum_export::nbd::wire::{command, option, option_reply as reply};
use vellum_export::nbd::{Export, Marked, Marks, MarksKind, OffersMarks, SharedMarks};

const SIZE: u64 = 1 << 40;

/// A snapshot or a bitmap: its name, and what is marked.
#[derive(Clone)]
struct One {
    kind: MarksKind,
    name: &'static str,
    runs: Vec<GuestSpan>,
    all: Arc<Names>,
    /// Nothing is known beyond so many bytes behind the start of the question.
    reach: u64,
}

#[derive(Default)]
struct Names(Mutex<Vec<One>>);

/// All of them, as they are now.
struct Offered(Arc<Names>);

impl OffersMarks for Offered {
    fn marks(&self) -> Vec<SharedMarks> {
        self.0.0.lock().unwrap().iter().map(|one| Arc::new(one.clone()) as SharedMarks).collect()
    }
}

impl Marks for One {
    fn kind(&self) -> MarksKind {
        self.kind
    }

    fn name(&self) -> &str {
        self.name
    }

    fn marked(&self, span: GuestSpan, most: usize) -> LocalFuture<'_, Result<Marked>> {
        let is_there =
            self.all.0.lock().unwrap().iter().any(|one| (one.kind, one.name) == (self.kind, self.name));
        let (span, _) = span.split_at(self.reach);
        let runs = self.runs.iter().map(|run| run.intersect(span)).filter(|run| !run.is_empty());
        let marked = Marked { runs: runs.take(most).collect(), until: span.end() };
        Box::pin(std::future::ready(match is_there {
            true => Ok(marked),
            false => Err(Error::new(ErrorKind::NotFound, "it is gone")),
        }))
    }
}

fn span(at: u64, len: u64) -> GuestSpan {
    GuestOffset::new(at).span(len)
}

/// A world whose export `disk` is marked, and the marks.
fn world() -> (World, Arc<Names>) {
    let world = World::new(shared(&RuledDisk::new(SIZE)));
    let names = Arc::new(Names::default());
    let one = |kind, name, runs, reach| One { kind, name, runs, all: names.clone(), reach };
    *names.0.lock().unwrap() = vec![
        one(MarksKind::Bitmap, "daily", vec![span(0, 4096)], u64::MAX),
        one(MarksKind::Diff, "daily", vec![span(3 << 30, 6 << 30), span(SIZE - 512, 512)], u64::MAX),
        one(MarksKind::Diff, "slow", vec![span(1 << 29, 1 << 30)], 1 << 30),
    ];
    let export = Export {
        name: "disk".to_owned(),
        description: String::new(),
        disk: world.disk.clone(),
        read_only: false,
        marks: Some(Arc::new(Offered(names.clone()))),
    };
    world.exports.add(export).expect("the name is free");
    (world, names)
}

#[test]
fn marks_are_listed_by_name_and_namespace_as_they_are_now() {
    let (world, names) = world();
    let (mut client, _session) = world.connect();
    world.run(async {
        client.greet().await;
        client.structured().await;
        let (bitmap, daily, slow) = ("qemu:dirty-bitmap:daily", "vellum:diff:daily", "vellum:diff:slow");
        let fixed = ["base:allocation", "qemu:allocation-depth"];
        let all = [fixed[0], fixed[1], bitmap, daily, slow];
        let cases: [(&[&str], &[&str]); 7] = [
            (&[], &all),
            (&["vellum:"], &[daily, slow]),
            (&["vellum:diff:"], &[daily, slow]),
            (&["vellum:diff:slow", "qemu:dirty-bitmap:daily"], &[bitmap, slow]),
            (&["qemu:"], &[fixed[1], bitmap]),
            (&["vellum:diff", "vellum:diff:other", "vellum", "diff:"], &[]),
            (&["vellum:diff:daily", "vellum:diff:daily"], &[daily]),
        ];
        for (queries, expected) in cases {
            let data = context_data("disk", queries);
            let (replies, last) = client.ask_option(option::LIST_META_CONTEXT, &data).await;
            assert_eq!(last, reply::ACK);
            let listed: Vec<_> =
                replies.iter().map(|(_, data)| std::str::from_utf8(&data[4..]).expect("a name")).collect();
            assert_eq!(listed, expected, "{queries:?}");
        }
        names.0.lock().unwrap().truncate(1);
        let data = context_data("disk", &["vellum:"]);
        assert!(client.ask_option(option::LIST_META_CONTEXT, &data).await.0.is_empty(), "they are gone");
        let data = context_data("", &[]);
        assert_eq!(client.ask_option(option::LIST_META_CONTEXT, &data).await.0.len(), 2, "of another export");
    });
}

#[test]
fn what_was_chosen_is_answered_with_short_and_long_headers() {
    for extended in [false, true] {
        let (world, names) = world();
        let (mut client, _session) = world.connect();
        world.run(async {
            let contexts = &["vellum:diff:daily", "vellum:diff:slow"];
            client.begin(Wish { name: "disk", structured: true, extended, contexts, sizes: false }).await;
            let short = u64::from(u32::MAX) / 512 * 512;
            let status =
                client.ask(command::BLOCK_STATUS, 0, 0, if extended { SIZE } else { short }).await.status;
            let runs = |id: u32| status.iter().find(|(its, _)| *its == id).expect("it was chosen").1.clone();
            let rest = SIZE - 512 - (9 << 30);
            match extended {
                true => assert_eq!(runs(4), [(3 << 30, 0), (6 << 30, 1), (rest, 0), (512, 1)]),
                false => assert_eq!(runs(4), [(3 << 30, 0), (short - (3 << 30), 1)]),
            }
            assert_eq!(runs(5), [(1 << 29, 0), (1 << 29, 1)], "no more is known, and no more is said");
            let next = client.ask(command::BLOCK_STATUS, 0, 1 << 30, 1 << 31).await.status;
            assert!(
                next.iter().any(|(id, runs)| *id == 5 && *runs == [(1 << 29, 1), (1 << 29, 0)]),
                "{next:?}"
            );
            // Others come and one goes: numbers stay what the client was told, and the rest of the session goes on.
            let gone = names.0.lock().unwrap().remove(1);
            names.0.lock().unwrap().insert(0, One { name: "new", ..gone });
            assert_eq!(client.ask(command::BLOCK_STATUS, 0, 0, 4096).await.error, 5, "one of them is gone");
            assert_eq!(client.read(0, 512).await, [0; 512]);
        });
        let (mut client, _session) = world.connect();
        world.run(async {
            let contexts = &["vellum:diff:slow"];
            client.begin(Wish { name: "disk", structured: true, extended, contexts, sizes: false }).await;
            let status = client.ask(command::BLOCK_STATUS, 0, 1 << 29, 4096).await.status;
            assert_eq!(status, [(5, vec![(4096, 1)])], "it has its place among those that are there now");
        });
    }
}
