//! Room in the image before a flush, and memory for copies: nothing is fetched twice for want of them without being counted.

use super::*;

/// Pieces that wait for the same flush share the room that it makes. Those that get none wait for the next one.
#[test]
fn what_waits_for_room_is_not_fetched_again() {
    for seed in 0..20 {
        // A piece has eight times as much.
        let set = set(seed, false, 64 << 10);
        set.world.run(async {
            set.control.set_prefetch(PrefetchLimits::default(), None);
            let filler = set.filler();
            let prefetching = set.world.spawn(async move { filler.prefetch().await });
            while set.own().await < SIZE {
                set.sleep(50).await;
                set.top.flush().await.unwrap();
                set.guest.flushes.fetch_add(1, SeqCst);
            }
            set.control.end();
            prefetching.await;
            assert_eq!(set.control.counts().commits, 0, "there are flushes of the guest");
            let bytes: u64 = set.base_reads().iter().map(|span| span.len()).sum();
            assert_eq!(bytes, SIZE, "seed {seed}");
        });
    }
}

/// A fill has taken the room that a flush has made, and is not done, when others look for it: they wait. What is fetched is
/// what is kept, byte by byte, also where the prefetcher flushes for itself.
#[test]
fn a_copy_is_not_dropped_while_another_fill_has_the_room() {
    for seed in 0..20 {
        for (hurries, takes) in [(false, 1), (false, 7), (true, 1), (true, 7)] {
            let set = set(seed, false, 64 << 10);
            *lock(&set.top.takes) = Duration::from_millis(takes);
            set.control.set_prefetch(PrefetchLimits::default(), None);
            let _hurry = hurries.then(|| set.control.hurry());
            set.world.run(async {
                assert_eq!(set.filler().prefetch().await, Outcome::Complete);
            });
            let fetched: u64 = set.base_reads().iter().map(|span| span.len()).sum();
            let counts = (fetched, set.control.counts().prefetched, set.tap.counts().dropped);
            assert_eq!(counts, (SIZE, SIZE, 0), "seed {seed}, in a hurry {hurries}, takes {takes} ms");
            assert_eq!(set.tap.counts().fetched, SIZE);
        }
    }
}

/// An image that never has room gives up each copy after a bounded number of flushes, and says how much that was.
#[test]
fn a_copy_that_no_flush_makes_room_for_is_dropped_and_counted() {
    let set = set(3, false, 0);
    set.control.set_prefetch(PrefetchLimits::default(), None);
    let _hurry = set.control.hurry();
    set.world.run(async {
        let filler = set.filler();
        let prefetching = set.world.spawn(async move { filler.prefetch().await });
        set.sleep(900).await;
        set.control.end();
        prefetching.await;
        let counts = set.tap.counts();
        assert!(counts.dropped >= SIZE && counts.dropped == counts.fetched, "{counts:?}");
        assert_eq!((set.control.counts().prefetched, set.own().await), (0, 0));
    });
}

#[test]
fn a_copy_without_memory_is_dropped_and_the_read_is_answered() {
    let set = set(3, true, u64::MAX);
    set.world.run(async {
        // Nobody takes the copies.
        for block in 0..SIZE / BLOCK {
            let read = set.read(block * BLOCK, 4096).await.unwrap();
            assert_eq!(read.slice()[0], byte_of(block));
        }
        assert_eq!(set.tap.counts().dropped, 0, "there is memory for 16 MiB");
    });
    let memory = Arc::new(CopyMemory::of(8 * BLOCK));
    let tap = Tap::over(
        set.below.clone(),
        Arc::default(),
        TapOptions { copy_on_read: true, memory: memory.clone(), ..TapOptions::default() },
    );
    tap.is_below(&*set.top);
    set.world.run(async {
        for block in 0..20 {
            let read = tap.read(GuestOffset::new(block * BLOCK), Buffer::zeroed(4096)).await.unwrap();
            assert_eq!(read.slice()[0], byte_of(block));
        }
    });
    assert_eq!((memory.used(), tap.counts().dropped), (8 * BLOCK, 12 * BLOCK));
    tap.drop_copies();
    assert_eq!((memory.used(), tap.counts().dropped), (0, 20 * BLOCK));
}

/// Guests have as many reads in flight as they like, and the disks below do not answer: a disk whose does is copied.
#[test]
fn disks_that_hang_leave_memory_for_the_copies_of_others() {
    let memory = Arc::new(CopyMemory::default());
    let set = set(21, true, u64::MAX);
    let tap = || {
        let options = TapOptions { copy_on_read: true, memory: memory.clone(), ..TapOptions::default() };
        let tap = Tap::over(set.below.clone(), Arc::default(), options);
        tap.is_below(&*set.top);
        tap
    };
    let (taps, healthy): (Vec<_>, _) = ((0..15).map(|_| tap()).collect(), tap());
    set.below.hangs.store(true, SeqCst);
    set.world.run(async {
        let reads = taps.iter().flat_map(|tap| {
            (0..32).map(move |_| Box::pin(tap.read(GuestOffset::ZERO, Buffer::zeroed(1 << 20))))
        });
        let mut reads: Vec<_> = reads.collect();
        for read in &mut reads {
            assert!(poll_once(read).await.is_none());
        }
        let used = memory.used();
        assert!((60 << 20..64 << 20).contains(&used), "{used}");
        let pieces: Vec<_> = (0..4).map(|_| healthy.memory(512 << 10)).collect();
        assert!(pieces.iter().all(Option::is_some), "there is room for its pieces");
        drop(pieces);
        set.below.hangs.store(false, SeqCst);
        vellum_core::join_all(reads).await.into_iter().for_each(|read| drop(read.unwrap()));
        taps.iter().for_each(|tap| tap.drop_copies());
        assert_eq!(memory.used(), 0);
    });
}
