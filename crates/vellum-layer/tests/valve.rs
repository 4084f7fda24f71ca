//! The valve in front of a disk: the contract holds, limited or not; and the cost of a request.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use vellum_core::contract::{self, DiskFixture};
use vellum_core::{
    Buffer, Clock, Disk, GuestOffset, LocalFuture, MemoryDisk, Result, SharedDisk, WriteFlags, ZeroFlags,
};
use vellum_layer::Valve;
use vellum_layer::valve::{RateLimits, State};
use vellum_sim::World;

struct Fixture {
    clock: Arc<dyn Clock>,
    limits: RateLimits,
    last: Mutex<Option<Arc<MemoryDisk>>>,
}

impl Fixture {
    fn before(&self, disk: Arc<MemoryDisk>) -> SharedDisk {
        *self.last.lock().expect("one thread") = Some(disk.clone());
        let valve = Valve::new(disk, self.clock.clone());
        valve.limit(self.limits.clone());
        valve
    }
}

impl DiskFixture for Fixture {
    fn fresh(&self, size: u64) -> LocalFuture<'_, Result<SharedDisk>> {
        Box::pin(async move { Ok(self.before(MemoryDisk::new(size))) })
    }

    fn reopen(&self) -> LocalFuture<'_, Result<SharedDisk>> {
        let last = self.last.lock().expect("one thread").take().expect("one was made");
        Box::pin(async move { Ok(self.before(last.reopened())) })
    }
}

#[test]
fn a_disk_behind_it_keeps_to_the_contract() {
    for said in [&[][..], &[("iops-total", 100), ("bps-write", 10 << 20)]] {
        let world = World::new(1);
        let limits = RateLimits::of(said.iter().copied()).expect("they go together");
        let fixture = Fixture { clock: world.clock(), limits, last: Mutex::default() };
        world.run(contract::disk(&fixture));
        assert_eq!(world.now() > Duration::ZERO, !said.is_empty(), "limits take time, and nothing else does");
    }
}

/// A guest that writes at the full rate does not delay a flush; and a request that moves nothing is not
/// slowed by its length.
#[test]
fn flushes_wait_for_nobody_and_discards_are_as_long_as_they_like() {
    let world = World::new(2);
    let valve = Valve::new(MemoryDisk::new(1 << 30), world.clock());
    valve.limit(RateLimits::of([("bps-total", 1 << 20), ("iops-write", 1000)]).expect("they go together"));
    world.run(async {
        for number in 0..32u64 {
            let valve = valve.clone();
            drop(world.spawn(async move {
                let data = Buffer::copy_of(&vec![1; 1 << 20]);
                valve
                    .write(GuestOffset::new(number << 20), data, WriteFlags::default())
                    .await
                    .expect("written");
            }));
        }
        world.sleep(Duration::from_secs(3)).await;
        assert_eq!(valve.limited(), 28, "one at once, and one a second, the first a little early");
        let before = world.now();
        valve.flush().await.expect("flushed");
        valve.map(GuestOffset::ZERO.span(1 << 20)).await.expect("looked up");
        assert_eq!(world.now(), before, "neither waited");
        valve.pause().await.expect("who waits in line is not under way");
        assert_eq!(world.now(), before);
        assert!(matches!(valve.state(), State::Paused(_)));
        valve.end();
        world.sleep(Duration::from_millis(1)).await;
        assert_eq!((valve.limited(), valve.held()), (0, 0), "all of them were let through");
    });
    let world = World::new(3);
    let valve = Valve::new(MemoryDisk::new(1 << 30), world.clock());
    valve.limit(RateLimits::of([("bps-total", 1 << 20)]).expect("it is a limit"));
    world.run(async {
        let all = GuestOffset::ZERO.span(1 << 30);
        for _ in 0..10 {
            valve.discard(all, WriteFlags::default()).await.expect("discarded");
            valve
                .write_zeroes(all, ZeroFlags { may_unmap: true, ..ZeroFlags::default() })
                .await
                .expect("zeroed");
        }
    });
    assert_eq!(world.now(), Duration::ZERO);
}
