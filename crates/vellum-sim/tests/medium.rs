//! The seam for models of whole drives, with a model that is as simple as one can be.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use vellum_core::{Buffer, ImageOffset, Storage};
use vellum_sim::model::{DriveModel, Medium, MediumCounts};
use vellum_sim::{Delay, Drive, DriveOptions, Request, World};

const EACH: Duration = Duration::from_millis(1);

/// One request at a time, the latest first.
#[derive(Default)]
struct Stack {
    waiting: Vec<u64>,
    running: Option<(u64, Duration)>,
    counts: MediumCounts,
}

impl Stack {
    fn begin(&mut self, now: Duration) {
        if self.running.is_none() {
            self.running = self.waiting.pop().map(|ticket| (ticket, now + EACH));
        }
    }
}

impl DriveModel for Stack {
    fn submit(&mut self, ticket: u64, request: &Request) {
        self.counts.note(false, request.span.len(), request.span.start().bytes());
        self.waiting.push(ticket);
        self.begin(request.now);
    }

    fn next(&self) -> Option<Duration> {
        self.running.map(|(_, end)| end)
    }

    fn advance(&mut self, now: Duration, ended: &mut Vec<u64>) {
        while let Some((ticket, end)) = self.running.filter(|(_, end)| *end <= now) {
            ended.push(ticket);
            self.running = None;
            self.begin(end);
        }
    }

    fn counts(&self) -> MediumCounts {
        self.counts
    }
}

#[test]
fn a_model_ends_requests_in_its_own_order_and_says_what_the_medium_did() {
    let (world, medium) = (World::new(0), Medium::new(Stack::default()));
    let delay = Delay::medium(medium.clone());
    let drive = Drive::new(&world, DriveOptions { delay, ..DriveOptions::default() });
    let ended = Rc::new(RefCell::new(Vec::new()));
    world.run(async {
        let spawn = |index: u64| {
            let (drive, ended, clock) = (drive.clone(), ended.clone(), world.clock());
            world.spawn(async move {
                drive.write(ImageOffset::new(index * 4096), Buffer::zeroed(4096)).await.unwrap();
                ended.borrow_mut().push((index, clock.now()));
            })
        };
        for task in (0..4).map(spawn).collect::<Vec<_>>() {
            task.await;
        }
    });
    // The first begins at once. Those that arrive meanwhile wait, and the latest of them is next.
    assert_eq!(*ended.borrow(), [(0, EACH), (3, EACH * 2), (2, EACH * 3), (1, EACH * 4)]);
    let counts = medium.counts();
    assert_eq!((counts.writes, counts.bytes_written, counts.operations()), (4, 4 * 4096, 4));
    assert_eq!((counts.seeks, counts.average_seek_bytes()), (3, (1 + 2 + 3) * 4096 / 4));
}
