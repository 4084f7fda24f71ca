//! A queue whose kernel is the test, and whose disk answers late.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::future::poll_fn;
use std::task::Waker;

use futures_lite::future::{block_on, poll_once, yield_now, zip};
use vellum_core::{
    BlockSize, Disk, Extent, Geometry, GuestOffset, GuestSpan, ImageOffset, Losses, MemoryStorage, Random,
    Storage,
};

use super::*;

const SECTORS: u64 = 256;
const DEPTH: u16 = 8;

/// A kernel whose users are the test: requests and their data go in, answers and data come out.
#[derive(Clone, Default)]
struct Fake(Rc<RefCell<State>>);

#[derive(Default)]
struct State {
    /// The request of each tag, and its data.
    asked: BTreeMap<u16, (Row, Vec<u8>)>,
    /// What waits for a tag that is free.
    waiting: VecDeque<(Row, Vec<u8>)>,
    /// Tags that have been submitted and have no request.
    idle: BTreeMap<u16, Option<Waker>>,
    /// Rows, data and answers, in the order of answers.
    answered: Vec<(Row, Vec<u8>, i32)>,
    is_stopped: bool,
    is_refusing: bool,
    /// This many submissions fail for want of memory.
    is_short: u32,
}

impl Fake {
    fn ask(&self, row: Row, data: Vec<u8>) {
        self.0.borrow_mut().waiting.push_back((row, data));
        self.wake();
    }

    fn stop(&self) {
        self.0.borrow_mut().is_stopped = true;
        self.wake();
    }

    fn wake(&self) {
        let wakers: Vec<Waker> = self.0.borrow_mut().idle.values_mut().filter_map(Option::take).collect();
        wakers.into_iter().for_each(Waker::wake);
    }

    fn answered(&self) -> usize {
        self.0.borrow().answered.len()
    }

    async fn until_answered(&self, count: usize) {
        while self.answered() < count {
            yield_now().await;
        }
    }
}

impl Fake {
    /// The tag answers, if it had a request, and fetches the next.
    fn hear(&self, tag: u16, answer: Option<i32>) -> Result<()> {
        let mut state = self.0.borrow_mut();
        if state.is_refusing {
            state.asked.remove(&tag);
            drop(state);
            self.wake();
            return Err(Error::os(libc::EINVAL, "as planned"));
        }
        assert_eq!(answer.is_some(), state.asked.contains_key(&tag), "tag {tag} answers what it was asked");
        if let (Some(answer), Some((row, data))) = (answer, state.asked.remove(&tag)) {
            state.answered.push((row, data, answer));
        }
        state.idle.insert(tag, None);
        drop(state);
        // Wakes the waiter for the last answer, so that it looks again.
        self.wake();
        Ok(())
    }
}

impl Kernel for Fake {
    async fn pause(&self) {
        yield_now().await;
    }

    async fn next(&self, tag: u16, answer: Option<i32>) -> Result<Told> {
        let short = self.0.borrow().is_short;
        if short > 0 {
            self.0.borrow_mut().is_short = short - 1;
            return Ok(Told::NotNow);
        }
        self.hear(tag, answer)?;
        poll_fn(|context| {
            let mut state = self.0.borrow_mut();
            if let Some(request) = state.waiting.pop_front() {
                state.idle.remove(&tag);
                state.asked.insert(tag, request);
                return Poll::Ready(Ok(Told::Request));
            }
            if state.is_stopped && state.asked.is_empty() {
                return Poll::Ready(Ok(Told::NoMore));
            }
            state.idle.insert(tag, Some(context.waker().clone()));
            Poll::Pending
        })
        .await
    }

    fn row(&self, tag: u16) -> Row {
        self.0.borrow().asked[&tag].0
    }

    fn take(&self, tag: u16, len: usize) -> Result<Buffer> {
        let state = self.0.borrow();
        let data = &state.asked[&tag].1;
        assert_eq!(data.len(), len);
        Ok(Buffer::copy_of(data))
    }

    fn give(&self, tag: u16, data: &Buffer) -> Result<()> {
        self.0.borrow_mut().asked.get_mut(&tag).expect("it was asked").1 = data.to_vec();
        Ok(())
    }
}

/// A disk in memory that answers late, sometimes.
struct Slow {
    storage: Arc<MemoryStorage>,
    random: Mutex<Random>,
    fails: bool,
    /// The requests with flags that it got: the operation, FUA, and whether it may unmap.
    flags: Mutex<Vec<(char, bool, bool)>>,
    losses: Arc<Losses>,
}

impl Slow {
    fn note(&self, op: char, fua: bool, may_unmap: bool) {
        self.flags.lock().expect("no panic").push((op, fua, may_unmap));
    }

    async fn wait(&self) -> Result<()> {
        let turns = self.random.lock().expect("no panic").index(4);
        for _ in 0..turns {
            yield_now().await;
        }
        if self.fails { Err(Error::new(ErrorKind::NoSpace, "as planned")) } else { Ok(()) }
    }

    async fn zero(&self, span: GuestSpan) -> Result<()> {
        self.wait().await?;
        let data = Buffer::zeroed(usize::try_from(span.len()).expect("small"));
        self.storage.write(ImageOffset::new(span.start().bytes()), data).await
    }
}

impl Disk for Slow {
    fn losses(&self) -> Option<Arc<Losses>> {
        Some(self.losses.clone())
    }

    fn geometry(&self) -> Geometry {
        let block_size = BlockSize::from_bytes(512).expect("a power of two");
        let size = SECTORS * 512;
        Geometry { size, block_size, preferred_size: block_size, read_only: false, fast_zeroes: true }
    }

    fn read(&self, at: GuestOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        Box::pin(async move {
            self.wait().await?;
            self.storage.read(ImageOffset::new(at.bytes()), buffer).await
        })
    }

    fn write(&self, at: GuestOffset, data: Buffer, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        self.note('w', flags.fua, false);
        Box::pin(async move {
            self.wait().await?;
            self.storage.write(ImageOffset::new(at.bytes()), data).await
        })
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(self.wait())
    }

    fn write_zeroes(&self, span: GuestSpan, flags: ZeroFlags) -> LocalFuture<'_, Result<()>> {
        assert!(!flags.fast_only, "nobody asks for that");
        self.note('z', flags.fua, flags.may_unmap);
        Box::pin(self.zero(span))
    }

    fn discard(&self, span: GuestSpan, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        self.note('d', flags.fua, false);
        Box::pin(self.zero(span))
    }

    fn map(&self, _span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
        unreachable!("nobody asks")
    }

    fn close(&self) -> LocalFuture<'_, Result<()>> {
        unreachable!("nobody closes it")
    }
}

fn slow(fails: bool) -> Arc<Slow> {
    let storage = MemoryStorage::holding("disk", &vec![0; usize::try_from(SECTORS).expect("small") * 512]);
    Arc::new(Slow {
        storage,
        random: Mutex::new(Random::from_seed(7)),
        fails,
        flags: Mutex::default(),
        losses: Arc::default(),
    })
}

fn target_of(disk: Arc<Slow>, write_through: bool) -> Arc<Target> {
    let facts = Facts::new(&disk.geometry(), false, write_through);
    Arc::new(Target::new(disk, &facts))
}

fn target(fails: bool) -> Arc<Target> {
    target_of(slow(fails), false)
}

fn row(op_flags: u32, start: u64, sectors: u32) -> Row {
    Row { op_flags, sectors, start }
}

#[test]
fn requests_of_many_tags_are_done_and_answered_once() {
    for seed in 0..50 {
        let (kernel, target) = (Fake::default(), target(false));
        let mut random = Random::from_seed(seed);
        let mut model = vec![0_u8; usize::try_from(SECTORS).expect("small") * 512];
        let driving = async {
            let mut count = 0;
            for _ in 0..40 {
                // At most as many as can be in flight at once, at distinct places.
                let batch: Vec<Row> = (0..12)
                    .map(|place| {
                        let op = [0, 1, 1, 2, 3, 5][random.index(6)];
                        let sectors = 1 + u32::try_from(random.index(20)).expect("small");
                        row(op, place * 21, sectors)
                    })
                    .collect();
                for asked in &batch {
                    let from = usize::try_from(asked.start).expect("small") * 512;
                    let len = asked.sectors as usize * 512;
                    let mut data = vec![0xEE; len];
                    match asked.op_flags {
                        1 => {
                            data.fill_with(|| random.any().to_le_bytes()[0]);
                            model[from..from + len].copy_from_slice(&data);
                        }
                        3 | 5 => model[from..from + len].fill(0),
                        _ => {}
                    }
                    kernel.ask(*asked, data);
                }
                count += batch.len();
                kernel.until_answered(count).await;
                for (asked, data, answer) in &kernel.0.borrow().answered[count - batch.len()..] {
                    let from = usize::try_from(asked.start).expect("small") * 512;
                    let len = asked.sectors as usize * 512;
                    let moved = if asked.op_flags < 2 { len } else { 0 };
                    assert_eq!(usize::try_from(*answer), Ok(moved), "seed {seed}: {asked:?}");
                    if asked.op_flags == 0 {
                        assert!(*data == model[from..from + len], "seed {seed}: {asked:?}");
                    }
                }
            }
            kernel.stop();
        };
        let serving = serve_queue(kernel.clone(), DEPTH, target.clone(), Shutdown::new());
        block_on(zip(serving, driving));
        assert!(target.broken().is_none());
    }
}

#[test]
fn all_tags_have_asked_when_it_is_first_pending() {
    let kernel = Fake::default();
    let mut serving = Box::pin(serve_queue(kernel.clone(), DEPTH, target(false), Shutdown::new()));
    assert!(block_on(poll_once(&mut serving)).is_none());
    assert_eq!(kernel.0.borrow().idle.len(), usize::from(DEPTH));
    kernel.stop();
    block_on(serving);
}

#[test]
fn what_fails_is_told_and_what_makes_no_sense_is_refused() {
    let kernel = Fake::default();
    let rows = [
        (row(0, 0, 1), -libc::ENOSPC),
        (row(2, 0, 0), -libc::ENOSPC),
        (row(0, SECTORS, 1), -libc::EIO),
        (row(9, 0, 1), -libc::EOPNOTSUPP),
    ];
    let driving = async {
        for (index, (row, expected)) in rows.into_iter().enumerate() {
            kernel.ask(row, Vec::new());
            kernel.until_answered(index + 1).await;
            assert_eq!(kernel.0.borrow().answered[index].2, expected, "{row:?}");
        }
        kernel.stop();
    };
    block_on(zip(serve_queue(kernel.clone(), DEPTH, target(true), Shutdown::new()), driving));
}

#[test]
fn flags_arrive_as_they_were_asked() {
    let (fua, keep) = (1 << 13, 1 << 15);
    // The request, and what the disk gets: FUA, may unmap.
    let rows = [
        (1, ('w', false, false)),
        (1 | fua, ('w', true, false)),
        (3, ('d', false, false)),
        (3 | fua, ('d', true, false)),
        (5, ('z', false, true)),
        (5 | keep, ('z', false, false)),
        (5 | fua, ('z', true, true)),
        (5 | keep | fua, ('z', true, false)),
    ];
    for write_through in [false, true] {
        let (kernel, disk) = (Fake::default(), slow(false));
        let driving = async {
            for (index, (op_flags, _)) in rows.into_iter().enumerate() {
                kernel.ask(row(op_flags, 0, 1), vec![1; 512]);
                kernel.until_answered(index + 1).await;
            }
            kernel.stop();
        };
        let target = target_of(disk.clone(), write_through);
        block_on(zip(serve_queue(kernel.clone(), DEPTH, target, Shutdown::new()), driving));
        let expected = rows.map(|(_, (op, fua, may_unmap))| (op, fua || write_through, may_unmap));
        assert_eq!(*disk.flags.lock().expect("no panic"), expected);
    }
}

#[test]
fn what_the_kernel_has_no_memory_for_is_told_again() {
    let kernel = Fake::default();
    let driving = async {
        for index in 0..20 {
            kernel.0.borrow_mut().is_short = 3;
            kernel.ask(row(1, 0, 1), vec![1; 512]);
            kernel.until_answered(index + 1).await;
        }
        kernel.stop();
    };
    let target = target(false);
    block_on(zip(serve_queue(kernel.clone(), DEPTH, target.clone(), Shutdown::new()), driving));
    assert!(target.broken().is_none());
    assert!(kernel.0.borrow().answered.iter().all(|(_, _, answer)| *answer == 512));
}

#[test]
fn a_device_that_is_left_answers_what_was_begun_and_nothing_else() {
    for seed in 0..50 {
        let (kernel, target) = (Fake::default(), target(false));
        let begun = 1 + Random::from_seed(seed).index(6);
        let mut serving = Box::pin(serve_queue(kernel.clone(), DEPTH, target.clone(), Shutdown::new()));
        assert!(block_on(poll_once(&mut serving)).is_none());
        for place in 0..begun {
            kernel.ask(row(1, place as u64, 1), vec![1; 512]);
        }
        assert!(block_on(poll_once(&mut serving)).is_none());
        let (late, answered) = (row(1, 9, 1), kernel.answered());
        let leaving = async {
            let mut left = Box::pin(target.leave());
            let is_left_at_once = poll_once(&mut left).await.is_some();
            assert_eq!(is_left_at_once, answered == begun, "seed {seed}");
            kernel.ask(late, vec![2; 512]);
            if !is_left_at_once {
                left.await;
            }
        };
        block_on(async {
            let ended = async {
                serving.as_mut().await;
                unreachable!("it waits for the kernel, which is not stopped");
            };
            futures_lite::future::or(leaving, ended).await;
            assert!(poll_once(&mut serving).await.is_none(), "seed {seed}");
        });
        assert_eq!(kernel.answered(), begun, "seed {seed}");
        let state = kernel.0.borrow();
        assert!(state.answered.iter().all(|(_, _, answer)| *answer == 512), "seed {seed}");
        assert!(state.asked.values().any(|(row, _)| *row == late), "it is with a tag: seed {seed}");
    }
}

#[test]
fn a_server_that_is_cut_off_begins_nothing_and_ends() {
    let (kernel, shutdown) = (Fake::default(), Shutdown::new());
    let driving = async {
        kernel.ask(row(1, 0, 1), vec![1; 512]);
        kernel.until_answered(1).await;
        shutdown.cut();
        kernel.ask(row(1, 0, 1), vec![2; 512]);
        kernel.ask(row(2, 0, 0), Vec::new());
        kernel.stop();
    };
    block_on(zip(serve_queue(kernel.clone(), DEPTH, target(false), shutdown.clone()), driving));
    let answers: Vec<i32> = kernel.0.borrow().answered.iter().map(|(_, _, answer)| *answer).collect();
    assert_eq!(answers, [512, -libc::EIO, -libc::EIO]);
}

#[test]
fn a_disk_that_has_grown_is_reached_and_a_queue_that_is_refused_says_so() {
    let (kernel, target) = (Fake::default(), target(false));
    assert!(!target.resize(SECTORS) && target.resize(SECTORS + 8));
    let driving = async {
        kernel.ask(row(1, SECTORS, 8), vec![3; 4096]);
        kernel.until_answered(1).await;
        kernel.ask(row(0, SECTORS + 7, 1), Vec::new());
        kernel.until_answered(2).await;
        kernel.0.borrow_mut().is_refusing = true;
        kernel.ask(row(2, 0, 0), Vec::new());
        kernel.stop();
    };
    block_on(zip(serve_queue(kernel.clone(), DEPTH, target.clone(), Shutdown::new()), driving));
    let answers: Vec<i32> = kernel.0.borrow().answered.iter().map(|(_, _, answer)| *answer).collect();
    assert_eq!(answers, [4096, 512]);
    assert!(target.broken().expect("it was refused").to_string().contains("as planned"));
}

#[test]
fn the_kernel_hears_once_that_writes_were_lost() {
    let disk = slow(false);
    let (kernel, target) = (Fake::default(), target_of(disk.clone(), false));
    let driving = async {
        for lost in [false, true, false] {
            if lost {
                disk.losses.grow();
            }
            let asked = kernel.answered();
            kernel.ask(row(2, 0, 0), Vec::new());
            kernel.until_answered(asked + 1).await;
        }
        kernel.stop();
    };
    block_on(zip(serve_queue(kernel.clone(), DEPTH, target, Shutdown::new()), driving));
    let answers: Vec<_> = kernel.0.borrow().answered.iter().map(|(_, _, answer)| *answer).collect();
    assert_eq!(answers, [0, -libc::EIO, 0]);
}
