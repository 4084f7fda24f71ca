//! The requests in flight, each in a slot; only those that were woken are polled.
//!
//! ```text
//!   slot      0     1     2     3   …          a future and its waker, made once and used again
//!   woken   [ 1     0     0     1   … ]        one bit per slot, 64 to a word, set by the wakers
//!                                 └─► and then the session itself is woken, once for many bits
//! ```
//!
//! 1. A future is polled when it is started, and after each call of its waker by the next poll of the flight.
//! 2. A future that completes at its first poll (bytes that were in memory) never takes a slot.
//! 3. Wakers may be called from any thread, late and too often: a bit that is set for nothing costs one poll.
//! 4. Of the long futures, each poll of which may take a while ([`start_long`](Flight::start_long)), one is
//!    polled per turn of the session, round robin: a client that sends many long requests at once occupies a
//!    worker no longer than a client that sends one.
//!
//! Left out: `FuturesUnordered`, which does the same with an allocation per future; a session starts a
//! million requests a second and has at most a few hundred running.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use futures_util::task::AtomicWaker;

const WORD_BITS: usize = u64::BITS as usize;

/// Futures that run concurrently, at most as many as there are slots.
pub(crate) struct Flight<F> {
    slots: Vec<Slot<F>>,
    free: Vec<usize>,
    running: usize,
    /// The slot of the long one that was polled last.
    last_long: usize,
    /// A long one was polled in this turn.
    has_polled_long: bool,
    woken: Arc<Woken>,
}

struct Slot<F> {
    future: Option<F>,
    is_long: bool,
    waker: Waker,
}

/// Which slots were woken, and the session to wake.
struct Woken {
    words: Box<[AtomicU64]>,
    session: AtomicWaker,
}

struct SlotWaker {
    woken: Arc<Woken>,
    index: usize,
}

impl Woken {
    fn mark(&self, slot: usize) {
        self.words[slot / WORD_BITS].fetch_or(1 << (slot % WORD_BITS), Ordering::AcqRel);
    }
}

impl Wake for SlotWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.woken.mark(self.index);
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
            last_long: 0,
            has_polled_long: false,
            woken: Arc::new(Woken { words, session: AtomicWaker::new() }),
        }
    }

    /// How many are running.
    pub(crate) fn running(&self) -> usize {
        self.running
    }

    /// Polls the future for the first time. Returns its output if it has completed; otherwise it takes a
    /// slot. Panics when there is none: the caller counts.
    pub(crate) fn start(&mut self, mut future: F) -> Option<F::Output> {
        let index = self.free_slot();
        let slot = &mut self.slots[index];
        match Pin::new(&mut future).poll(&mut Context::from_waker(&slot.waker)) {
            Poll::Ready(output) => {
                self.free.push(index);
                Some(output)
            }
            Poll::Pending => {
                (slot.future, slot.is_long) = (Some(future), false);
                self.running += 1;
                None
            }
        }
    }

    /// Takes a slot for a future that may take a while at each poll. It is polled when it is its turn. Panics
    /// as `start`.
    pub(crate) fn start_long(&mut self, future: F) {
        let index = self.free_slot();
        let slot = &mut self.slots[index];
        (slot.future, slot.is_long) = (Some(future), true);
        self.running += 1;
        slot.waker.wake_by_ref();
    }

    /// A new turn of the session: a long one may be polled again.
    pub(crate) fn begin_turn(&mut self) {
        self.has_polled_long = false;
    }

    fn free_slot(&mut self) -> usize {
        self.free.pop().unwrap_or_else(|| self.add_slot())
    }

    fn add_slot(&mut self) -> usize {
        let index = self.slots.len();
        assert!(index < self.woken.words.len() * WORD_BITS, "more requests are running than were allowed");
        let waker = Waker::from(Arc::new(SlotWaker { woken: self.woken.clone(), index }));
        self.slots.push(Slot { future: None, is_long: false, waker });
        index
    }

    /// Polls the futures that were woken and hands over the outputs of those that completed. Returns how many
    /// did. The task of `context` is woken when there is more to do.
    pub(crate) fn poll_woken(&mut self, context: &Context<'_>, mut ended: impl FnMut(F::Output)) -> usize {
        if self.running == 0 {
            return 0;
        }
        // First the registration, then the look: a bit that is set after the look wakes the task.
        self.woken.session.register(context.waker());
        let before = self.running;
        // The first long one, and the first behind the one that was polled last.
        let (mut first_long, mut next_long, mut longs) = (None, None, 0);
        for index in 0..self.woken.words.len() {
            let word = &self.woken.words[index];
            if word.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let mut bits = word.swap(0, Ordering::AcqRel);
            while bits != 0 {
                let slot_index = index * WORD_BITS + bits.trailing_zeros() as usize;
                bits &= bits - 1;
                let slot = &self.slots[slot_index];
                if slot.is_long && slot.future.is_some() {
                    self.woken.mark(slot_index);
                    longs += 1;
                    first_long.get_or_insert(slot_index);
                    if slot_index > self.last_long {
                        next_long.get_or_insert(slot_index);
                    }
                } else {
                    self.poll_slot(slot_index, &mut ended);
                }
            }
        }
        if let Some(chosen) = next_long.or(first_long).filter(|_| !self.has_polled_long) {
            let bit = 1 << (chosen % WORD_BITS);
            self.woken.words[chosen / WORD_BITS].fetch_and(!bit, Ordering::AcqRel);
            (self.last_long, self.has_polled_long) = (chosen, true);
            longs -= 1;
            self.poll_slot(chosen, &mut ended);
        }
        if longs > 0 {
            context.waker().wake_by_ref();
        }
        before - self.running
    }

    fn poll_slot(&mut self, index: usize, ended: &mut impl FnMut(F::Output)) {
        let slot = &mut self.slots[index];
        let Some(future) = &mut slot.future else { return };
        if let Poll::Ready(output) = Pin::new(future).poll(&mut Context::from_waker(&slot.waker)) {
            slot.future = None;
            self.free.push(index);
            self.running -= 1;
            ended(output);
        }
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

    /// Futures that complete when the test says so.
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
    fn long_ones_take_turns_and_keep_nobody_waiting() {
        let polled = Rc::new(RefCell::new(Vec::new()));
        let mut flight: Flight<std::pin::Pin<Box<dyn Future<Output = u32>>>> = Flight::new(64);
        for id in 0..3 {
            let polled = polled.clone();
            flight.start_long(Box::pin(poll_fn(move |context| {
                polled.borrow_mut().push(id);
                context.waker().wake_by_ref();
                Poll::Pending
            })));
        }
        assert!(polled.borrow().is_empty(), "none is polled before its turn");
        let gates = Gates::default();
        for turn in 0..9 {
            flight.start(Box::pin(gates.future(7)));
            gates.open(7);
            flight.begin_turn();
            let mut ended = Vec::new();
            block_on(poll_fn(|context| {
                // However many passes a turn has.
                for _ in 0..4 {
                    flight.poll_woken(context, |id| ended.push(id));
                }
                Poll::Ready(())
            }));
            assert_eq!(ended, [7], "a short one ends in the turn in which it can");
            assert_eq!(polled.borrow().len(), turn + 1, "one poll of a long one in each turn");
        }
        let mut times = [0; 3];
        polled.borrow().iter().for_each(|id| times[*id as usize] += 1);
        assert_eq!(times, [3, 3, 3]);
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
