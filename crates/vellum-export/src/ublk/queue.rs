//! One queue, on one worker: each tag asks for a request, does it, and answers with the next question.
//!
//! ```text
//!   tag 0   next ─► row ─► the disk ─► next(answer) ─► …       until the kernel says that there are no more
//!   tag 1   next ─► …
//! ```
//!
//! 1. A queue is one future on one worker and shares nothing with other queues but the disk and its [`Target`].
//! 2. It ends when all tags have heard that there are no more, which the kernel says when the device was stopped and all
//!    requests were answered.
//! 3. When the server is cut off, requests that come are answered with EIO and begin nothing, so that the kernel gets to its
//!    end; those that were begun are waited for.
//! 4. No tag keeps a worker: it comes back to the kernel after each request.

use std::future::poll_fn;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;

use vellum_core::{Buffer, Error, ErrorKind, LocalFuture, Result, SharedDisk, WriteFlags, ZeroFlags};

use super::facts::Facts;
use super::request::{Request, Row, Terms};
use crate::flight::Flight;
use crate::shutdown::Shutdown;

/// The kernel, as a queue sees it.
pub trait Kernel {
    /// Tells what became of the tag's last request, if there was one, and waits for the next.
    fn next(&self, tag: u16, answer: Option<i32>) -> impl Future<Output = Result<Told>>;

    /// What the tag's request asks.
    fn row(&self, tag: u16) -> Row;

    /// The data of a write.
    fn take(&self, tag: u16, len: usize) -> Result<Buffer>;

    /// Hands over the data of a read.
    fn give(&self, tag: u16, data: &Buffer) -> Result<()>;
}

/// What a queue hears.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Told {
    /// There is a request.
    Request,
    /// There are no more.
    NoMore,
}

/// What all queues of a device share.
pub struct Target {
    disk: SharedDisk,
    sectors: AtomicU64,
    read_only: bool,
    write_through: bool,
    /// What kept a queue from hearing of requests.
    broken: Mutex<Option<Error>>,
}

impl Target {
    /// The disk, and what the kernel was told of it.
    pub fn new(disk: SharedDisk, facts: &Facts) -> Self {
        let sectors = AtomicU64::new(facts.sectors);
        let Facts { read_only, write_through, .. } = *facts;
        Self { disk, sectors, read_only, write_through, broken: Mutex::default() }
    }

    /// The disk is so large now; true if that is news.
    pub fn resize(&self, sectors: u64) -> bool {
        self.sectors.swap(sectors, Ordering::Relaxed) != sectors
    }

    /// What kept a queue from hearing of requests, if anything did.
    pub fn broken(&self) -> Option<Error> {
        self.broken.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn terms(&self) -> Terms {
        let sectors = self.sectors.load(Ordering::Relaxed);
        Terms { sectors, read_only: self.read_only, write_through: self.write_through }
    }

    fn break_down(&self, error: Error) {
        tracing::warn!("a queue of a ublk device is not served any more: {}", error.chain());
        self.broken.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
    }
}

/// Serves a queue of so many tags to its end. By the time it is first pending, all tags have asked.
pub async fn serve_queue<K: Kernel + 'static>(
    kernel: K,
    depth: u16,
    target: Arc<Target>,
    shutdown: Shutdown,
) {
    let kernel = Rc::new(kernel);
    let mut flight: Flight<LocalFuture<'static, Result<()>>> = Flight::new(usize::from(depth));
    let note = |ended: Result<()>| {
        if let Err(error) = ended {
            target.break_down(error);
        }
    };
    for tag in 0..depth {
        let serving = serve_tag(kernel.clone(), tag, target.clone(), shutdown.clone());
        if let Some(ended) = flight.start(Box::pin(serving)) {
            note(ended);
        }
    }
    poll_fn(|context| {
        flight.poll_woken(context, note);
        if flight.running() == 0 { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

async fn serve_tag<K: Kernel>(
    kernel: Rc<K>,
    tag: u16,
    target: Arc<Target>,
    shutdown: Shutdown,
) -> Result<()> {
    let mut answer = None;
    while kernel.next(tag, answer).await? == Told::Request {
        let done = match Request::parse(&kernel.row(tag), &target.terms()) {
            Ok(_) if shutdown.is_cut() => Err(libc::EIO),
            Ok(request) => perform(request, &*kernel, tag, &target.disk).await,
            Err(errno) => Err(errno),
        };
        answer = Some(match done {
            Ok(bytes) => i32::try_from(bytes).expect("requests are small"),
            Err(errno) => -errno,
        });
    }
    Ok(())
}

/// Gives how many bytes were moved.
async fn perform<K: Kernel>(request: Request, kernel: &K, tag: u16, disk: &SharedDisk) -> Result<usize, i32> {
    match request {
        Request::Read { at, len } => {
            let data = disk.read(at, Buffer::for_overwrite(len)).await.map_err(errno_of)?;
            kernel.give(tag, &data).map_err(errno_of)?;
            Ok(len)
        }
        Request::Write { at, len, fua } => {
            let data = kernel.take(tag, len).map_err(errno_of)?;
            disk.write(at, data, WriteFlags { fua }).await.map_err(errno_of)?;
            Ok(len)
        }
        Request::Flush => disk.flush().await.map(|()| 0).map_err(errno_of),
        Request::Discard { span, fua } => {
            disk.discard(span, WriteFlags { fua }).await.map(|()| 0).map_err(errno_of)
        }
        Request::WriteZeroes { span, fua, may_unmap } => {
            let flags = ZeroFlags { fua, may_unmap, fast_only: false };
            disk.write_zeroes(span, flags).await.map(|()| 0).map_err(errno_of)
        }
    }
}

/// The kernel is told that it failed; the log, why.
#[expect(clippy::needless_pass_by_value, reason = "it is what `map_err` gives")]
fn errno_of(error: Error) -> i32 {
    tracing::debug!("a request over ublk failed: {}", error.chain());
    match error.kind() {
        ErrorKind::NoSpace => libc::ENOSPC,
        ErrorKind::Unsupported => libc::EOPNOTSUPP,
        _ => libc::EIO,
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::{BTreeMap, VecDeque};
    use std::future::poll_fn;
    use std::task::Waker;

    use futures_lite::future::{block_on, poll_once, yield_now, zip};
    use vellum_core::{
        BlockSize, Disk, Extent, Geometry, GuestOffset, GuestSpan, ImageOffset, MemoryStorage, Random,
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
        /// What each tag asks, and the data of its request.
        asked: BTreeMap<u16, (Row, Vec<u8>)>,
        /// What waits for a tag that is free.
        waiting: VecDeque<(Row, Vec<u8>)>,
        /// Tags that have asked and have no request.
        idle: BTreeMap<u16, Option<Waker>>,
        /// Rows, data and answers, in the order of answers.
        answered: Vec<(Row, Vec<u8>, i32)>,
        is_stopped: bool,
        is_refusing: bool,
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
        /// The tag answers, if it was asked, and asks.
        fn hear(&self, tag: u16, answer: Option<i32>) -> Result<()> {
            let mut state = self.0.borrow_mut();
            if state.is_refusing {
                state.asked.remove(&tag);
                drop(state);
                self.wake();
                return Err(Error::os(libc::EINVAL, "as planned"));
            }
            assert_eq!(
                answer.is_some(),
                state.asked.contains_key(&tag),
                "tag {tag} answers what it was asked"
            );
            if let (Some(answer), Some((row, data))) = (answer, state.asked.remove(&tag)) {
                state.answered.push((row, data, answer));
            }
            state.idle.insert(tag, None);
            drop(state);
            // Who waits for the last answer to be given looks again.
            self.wake();
            Ok(())
        }
    }

    impl Kernel for Fake {
        async fn next(&self, tag: u16, answer: Option<i32>) -> Result<Told> {
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
    }

    impl Slow {
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

        fn write(&self, at: GuestOffset, data: Buffer, _flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
            Box::pin(async move {
                self.wait().await?;
                self.storage.write(ImageOffset::new(at.bytes()), data).await
            })
        }

        fn flush(&self) -> LocalFuture<'_, Result<()>> {
            Box::pin(self.wait())
        }

        fn write_zeroes(&self, span: GuestSpan, _flags: ZeroFlags) -> LocalFuture<'_, Result<()>> {
            Box::pin(self.zero(span))
        }

        fn discard(&self, span: GuestSpan, _flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
            Box::pin(self.zero(span))
        }

        fn map(&self, _span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
            unreachable!("nobody asks")
        }

        fn close(&self) -> LocalFuture<'_, Result<()>> {
            unreachable!("nobody closes it")
        }
    }

    fn target(fails: bool) -> Arc<Target> {
        let storage =
            MemoryStorage::holding("disk", &vec![0; usize::try_from(SECTORS).expect("small") * 512]);
        let disk = Arc::new(Slow { storage, random: Mutex::new(Random::from_seed(7)), fails });
        let facts = Facts::new(&disk.geometry(), false, false);
        Arc::new(Target::new(disk, &facts))
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
                    // At most as many as can be under way at once, in places of their own.
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
}
