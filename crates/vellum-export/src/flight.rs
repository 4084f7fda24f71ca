//! The requests that are running, in slots; only those that were woken are polled.
//!
//! ```text
//!   slot      0     1     2     3   …          a future and its waker, made once and used again
//!   woken   [ 1     0     0     1   … ]        one bit per slot, 64 to a word, set by the wakers
//!                                 └─► and then the session itself is woken, once for many bits
//! ```
//!
//! 1. A future is polled when it is started and after each time its waker was called, by whoever polls the flight.
//! 2. One that ends at its first poll (bytes that were in memory) never takes a slot.
//! 3. Wakers may be called from any thread, late and too often: a bit that is set for nothing costs one poll.
//!
//! Left out: `FuturesUnordered`, which does the same with an allocation per future; a session starts a million
//! requests a second and has at most a few hundred running.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use futures_util::task::AtomicWaker;

const WORD_BITS: usize = u64::BITS as usize;

/// Futures that run at the same time, at most as many as there are slots.
pub(crate) struct Flight<F> {
    slots: Vec<Slot<F>>,
    free: Vec<usize>,
    running: usize,
    woken: Arc<Woken>,
}

struct Slot<F> {
    future: Option<F>,
    waker: Waker,
}

/// Which slots were woken, and whom to tell.
struct Woken {
    words: Box<[AtomicU64]>,
    session: AtomicWaker,
}

struct SlotWaker {
    woken: Arc<Woken>,
    index: usize,
}

impl Wake for SlotWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let bit = 1 << (self.index % WORD_BITS);
        self.woken.words[self.index / WORD_BITS].fetch_or(bit, Ordering::AcqRel);
        self.woken.session.wake();
    }
}

impl<F: Future + Unpin> Flight<F> {
    /// Room for `slots` futures. Slots are made when they are first needed.
    pub(crate) fn new(slots: usize) -> Self {
        let words = (0..slots.div_ceil(WORD_BITS)).map(|_| AtomicU64::new(0)).collect();
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            running: 0,
            woken: Arc::new(Woken { words, session: AtomicWaker::new() }),
        }
    }

    /// How many are running.
    pub(crate) fn running(&self) -> usize {
        self.running
    }

    /// Polls the future for the first time. Gives its output when it has ended; otherwise it takes a slot. Panics
    /// when there is none: the caller counts.
    pub(crate) fn start(&mut self, mut future: F) -> Option<F::Output> {
        let index = self.free.pop().unwrap_or_else(|| self.add_slot());
        let slot = &mut self.slots[index];
        match Pin::new(&mut future).poll(&mut Context::from_waker(&slot.waker)) {
            Poll::Ready(output) => {
                self.free.push(index);
                Some(output)
            }
            Poll::Pending => {
                slot.future = Some(future);
                self.running += 1;
                None
            }
        }
    }

    fn add_slot(&mut self) -> usize {
        let index = self.slots.len();
        assert!(index < self.woken.words.len() * WORD_BITS, "more requests are running than were allowed");
        let waker = Waker::from(Arc::new(SlotWaker { woken: self.woken.clone(), index }));
        self.slots.push(Slot { future: None, waker });
        index
    }

    /// Polls those that were woken and hands over the outputs of those that ended; tells how many did. The task of
    /// `context` is woken when there is more to do.
    pub(crate) fn poll_woken(&mut self, context: &Context<'_>, mut ended: impl FnMut(F::Output)) -> usize {
        if self.running == 0 {
            return 0;
        }
        // First the registration, then the look: a bit that is set after the look wakes the task.
        self.woken.session.register(context.waker());
        let before = self.running;
        for (index, word) in self.woken.words.iter().enumerate() {
            if word.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let mut bits = word.swap(0, Ordering::AcqRel);
            while bits != 0 {
                let slot_index = index * WORD_BITS + bits.trailing_zeros() as usize;
                bits &= bits - 1;
                let slot = &mut self.slots[slot_index];
                let Some(future) = &mut slot.future else { continue };
                if let Poll::Ready(output) = Pin::new(future).poll(&mut Context::from_waker(&slot.waker)) {
                    slot.future = None;
                    self.free.push(slot_index);
                    self.running -= 1;
                    ended(output);
                }
            }
        }
        before - self.running
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::BTreeMap;
    use std::future::poll_fn;
    use std::rc::Rc;

    use futures_lite::future::{block_on, poll_once};
    use vellum_core::Random;

    use super::*;

    /// Futures that end when the test says so.
    #[derive(Clone, Default)]
    struct Gates(Rc<RefCell<BTreeMap<u32, Option<Waker>>>>);

    impl Gates {
        fn future(&self, id: u32) -> impl Future<Output = u32> + Unpin + use<> {
            let gates = self.0.clone();
            gates.borrow_mut().insert(id, None);
            poll_fn(move |context| match gates.borrow_mut().get_mut(&id) {
                Some(waker) => {
                    *waker = Some(context.waker().clone());
                    Poll::Pending
                }
                None => Poll::Ready(id),
            })
        }

        fn open(&self, id: u32) {
            if let Some(Some(waker)) = self.0.borrow_mut().remove(&id) {
                waker.wake();
            }
        }
    }

    fn gather<F: Future<Output = u32> + Unpin>(flight: &mut Flight<F>) -> Vec<u32> {
        let mut ended = Vec::new();
        block_on(poll_fn(|context| {
            flight.poll_woken(context, |id| ended.push(id));
            Poll::Ready(())
        }));
        ended
    }

    #[test]
    fn a_future_that_is_ready_at_once_takes_no_slot() {
        let mut flight = Flight::new(1);
        for id in 0..3 {
            assert_eq!(flight.start(std::future::ready(id)), Some(id));
        }
        assert_eq!(flight.running(), 0);
    }

    #[test]
    fn each_of_many_futures_ends_once_in_the_order_they_are_woken() {
        let gates = Gates::default();
        let mut flight = Flight::new(130);
        let mut random = Random::from_seed(3);
        let mut waiting: Vec<u32> = Vec::new();
        let mut next = 0;
        for _ in 0..5_000 {
            if waiting.len() < 130 && !random.one_in(3) {
                assert_eq!(flight.start(gates.future(next)), None);
                waiting.push(next);
                next += 1;
            } else if !waiting.is_empty() {
                let id = waiting.swap_remove(random.index(waiting.len()));
                gates.open(id);
                assert_eq!(gather(&mut flight), [id]);
            }
            assert_eq!(flight.running(), waiting.len());
        }
        assert!(flight.slots.len() <= 130);
    }

    #[test]
    fn many_wakes_wake_the_session_once() {
        struct Count(AtomicU64);
        impl Wake for Count {
            fn wake(self: Arc<Self>) {
                self.0.fetch_add(1, Ordering::Relaxed);
            }
        }
        let gates = Gates::default();
        let mut flight = Flight::new(64);
        for id in 0..64 {
            flight.start(gates.future(id));
        }
        let count = Arc::new(Count(AtomicU64::new(0)));
        let waker = Waker::from(count.clone());
        let mut ended = 0;
        flight.poll_woken(&Context::from_waker(&waker), |_| ended += 1);
        for id in 0..64 {
            gates.open(id);
        }
        assert_eq!(count.0.load(Ordering::Relaxed), 1);
        flight.poll_woken(&Context::from_waker(&waker), |_| ended += 1);
        assert_eq!((ended, flight.running()), (64, 0));
    }

    #[test]
    fn a_wake_from_another_thread_reaches_the_session() {
        let (sender, receiver) = std::sync::mpsc::channel::<Waker>();
        let thread = std::thread::spawn(move || receiver.recv().expect("a waker is sent").wake());
        let mut polls = 0;
        let future = poll_fn(|context| {
            polls += 1;
            match polls {
                1 => {
                    sender.send(context.waker().clone()).expect("the thread waits");
                    Poll::Pending
                }
                _ => Poll::Ready(7),
            }
        });
        let mut flight = Flight::new(1);
        assert_eq!(flight.start(future), None);
        let mut ended = Vec::new();
        block_on(poll_fn(|context| {
            flight.poll_woken(context, |id| ended.push(id));
            if ended.is_empty() { Poll::Pending } else { Poll::Ready(()) }
        }));
        assert_eq!(ended, [7]);
        thread.join().expect("the thread ends");
    }

    #[test]
    #[should_panic(expected = "more requests are running")]
    fn one_future_more_than_slots_is_a_bug() {
        let mut flight = Flight::new(64);
        for _ in 0..65 {
            flight.start(std::future::pending::<u32>());
        }
    }

    #[test]
    fn a_wake_that_comes_too_late_does_no_harm() {
        let gates = Gates::default();
        let mut flight = Flight::new(1);
        flight.start(gates.future(1));
        let late = gates.0.borrow().get(&1).cloned().flatten().expect("it was polled");
        gates.open(1);
        assert_eq!(gather(&mut flight), [1]);
        late.wake();
        flight.start(gates.future(2));
        assert!(gather(&mut flight).is_empty());
        assert!(block_on(poll_once(std::future::pending::<()>())).is_none());
        assert_eq!(flight.running(), 1);
    }
}
