//! A base that another program changes while copies of it are made.

use vellum_core::pin::{Proof, ProofKind};
use vellum_core::{ImageOffset, ImageSpan, Limits, Storage, StorageRun, Zeroes};

use super::*;

/// The file that the disk below is in, as far as it can say that it has changed.
pub(super) struct Fact {
    pub(super) memory: Arc<MemoryStorage>,
    pub(super) changes: AtomicU64,
}

impl Fact {
    fn proof_of(&self, changes: u64) -> Option<Proof> {
        Proof::new(ProofKind::File, SIZE, format!("1@{changes}")).ok()
    }
}

impl Storage for Fact {
    fn name(&self) -> &str {
        "base.raw"
    }

    fn limits(&self) -> &Limits {
        self.memory.limits()
    }

    fn len(&self) -> u64 {
        self.memory.len()
    }

    fn proof(&self) -> Option<Proof> {
        self.proof_of(0)
    }

    fn proof_now(&self) -> LocalFuture<'_, Result<Option<Proof>>> {
        Box::pin(std::future::ready(Ok(self.proof_of(self.changes.load(SeqCst)))))
    }

    fn read(&self, at: ImageOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        self.memory.read(at, buffer)
    }

    fn write(&self, at: ImageOffset, data: Buffer) -> LocalFuture<'_, Result<()>> {
        self.memory.write(at, data)
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        self.memory.flush()
    }

    fn write_zeroes(&self, span: ImageSpan, how: Zeroes) -> LocalFuture<'_, Result<()>> {
        self.memory.write_zeroes(span, how)
    }

    fn discard(&self, span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        self.memory.discard(span)
    }

    fn set_len(&self, len: u64) -> LocalFuture<'_, Result<()>> {
        self.memory.set_len(len)
    }

    fn preallocate(&self, span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        self.memory.preallocate(span)
    }

    fn runs(&self, span: ImageSpan) -> LocalFuture<'_, Result<Vec<StorageRun>>> {
        self.memory.runs(span)
    }
}

impl Set {
    /// Another program writes the whole base.
    async fn overwrite_base(&self) {
        self.fact.changes.fetch_add(1, SeqCst);
        let len = usize::try_from(SIZE).unwrap();
        let other = Buffer::copy_of(&vec![0xEE; len]);
        self.below.memory.write(GuestOffset::ZERO, other, WriteFlags::default()).await.unwrap();
    }

    /// What the image itself has is what the base had at first. Returns how much that is.
    async fn own_is_of_the_first_base(&self) -> u64 {
        let map = self.top.map(GuestOffset::ZERO.span(SIZE)).await.unwrap();
        let own = map.iter().filter(|extent| !matches!(extent.place, Place::Below));
        let mut sum = 0;
        for span in own.map(|extent| extent.span) {
            let read = self.top.read(span.start(), Buffer::zeroed(usize::try_from(span.len()).unwrap()));
            let right = (span.start().bytes()..span.end().bytes()).map(|at| byte_of(at / BLOCK));
            assert!(read.await.unwrap().to_vec().into_iter().eq(right), "{span:?}");
            sum += span.len();
        }
        sum
    }
}

/// Another program writes the base while it is prefetched: what was read before counts, nothing after it, and the disk says so.
#[test]
fn of_a_base_that_changes_nothing_more_is_copied_ahead_of_need() {
    for seed in 0..20 {
        let set = set(seed, false, u64::MAX);
        *lock(&set.below.took) = Duration::from_millis(10);
        set.control.set_prefetch(PrefetchLimits::default(), None);
        set.world.run(async {
            let filler = set.filler();
            let prefetching = set.world.spawn(async move { filler.prefetch().await });
            // In the middle of a fetch.
            set.sleep(15 + seed % 7).await;
            set.overwrite_base().await;
            assert_eq!(prefetching.await, Outcome::Changed);
            assert!((1..SIZE).contains(&set.own_is_of_the_first_base().await), "seed {seed}");
            let progress = set.control.progress();
            assert_eq!(progress.state, State::Changed);
            assert!(progress.last_error.unwrap().chain().starts_with("base.raw has changed while"));
            // It stays so, whatever the file is later, and is said also of a disk that is paused.
            set.fact.changes.store(0, SeqCst);
            set.control.set_paused(true);
            assert_eq!(set.filler().prefetch().await, Outcome::Changed);
            assert_eq!(set.control.progress().state, State::Changed);
        });
    }
}

#[test]
fn of_a_base_that_changes_no_read_is_copied_and_every_read_is_answered() {
    let set = set(1, true, u64::MAX);
    set.world.run(async {
        set.read(0, 4096).await.unwrap();
        set.read(BLOCK, 4096).await.unwrap();
        set.overwrite_base().await;
        let filler = set.filler();
        let its = filler.clone();
        let keeping = set.world.spawn(async move { its.keep_copies().await });
        assert_eq!(filler.prefetch().await, Outcome::Changed, "whoever copies tells the other");
        assert_eq!((set.own().await, set.control.progress().state), (0, State::Changed));
        let fetched = set.tap.counts().fetched;
        assert_eq!(set.read(5 * BLOCK, 100).await.unwrap().slice()[0], 0xEE);
        assert_eq!((set.tap.counts().fetched, set.own().await), (fetched, 0), "it is not widened any more");
        set.control.end();
        keeping.await;
        assert_eq!(filler.prefetch().await, Outcome::Ended);
    });
}
