//! A medium on which some reads come late: their bytes are fixed at once, and returned on request. In between
//! the bytes may have changed, as they may while a slow drive's answer is on its way. Writes may come late,
//! too: they land on request.

#![allow(dead_code, reason = "each test file uses its part")]

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use event_listener::Event;
use vellum_core::{Buffer, Error, ImageOffset, LocalFuture, Result, SharedStorage, Storage};
use vellum_sim::{ForwardStorage, Forwarding};

/// What becomes of a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It returns when [`Late::release`] is called.
    Late,
    /// It fails.
    Fails,
    /// It fails, and so do all others of this length.
    AllFail,
}

pub(crate) struct Late {
    inner: SharedStorage,
    state: Mutex<State>,
    changed: Event,
}

#[derive(Default)]
struct State {
    /// Reads of exactly this many bytes.
    len: usize,
    fates: VecDeque<Fate>,
    caught: usize,
    /// The next write of exactly this many bytes is late.
    late_write: Option<usize>,
    has_released: bool,
}

impl Late {
    pub(crate) fn over(inner: SharedStorage) -> Arc<Forwarding<Self>> {
        Forwarding::new(Self { inner, state: Mutex::default(), changed: Event::new() })
    }

    /// The next reads of exactly this many bytes are treated so.
    pub(crate) fn arm(&self, len: usize, fates: &[Fate]) {
        *self.state.lock().unwrap() =
            State { len, fates: fates.iter().copied().collect(), ..State::default() };
    }

    /// The next write of exactly this many bytes lands when [`Late::release`] is called.
    pub(crate) fn arm_write(&self, len: usize) {
        *self.state.lock().unwrap() = State { late_write: Some(len), ..State::default() };
    }

    /// Waits until this many reads are late, or have failed.
    pub(crate) async fn caught(&self, count: usize) {
        loop {
            let listener = self.changed.listen();
            if self.state.lock().unwrap().caught >= count {
                return;
            }
            listener.await;
        }
    }

    /// Lets what is late return.
    pub(crate) fn release(&self) {
        self.state.lock().unwrap().has_released = true;
        self.changed.notify(usize::MAX);
    }

    async fn released(&self) {
        loop {
            let listener = self.changed.listen();
            if self.state.lock().unwrap().has_released {
                return;
            }
            listener.await;
        }
    }

    fn fate_of(&self, len: usize) -> Option<Fate> {
        let mut state = self.state.lock().unwrap();
        if state.len != len {
            return None;
        }
        let fate = match state.fates.front() {
            Some(Fate::AllFail) => Some(Fate::AllFail),
            _ => state.fates.pop_front(),
        };
        state.caught += usize::from(fate.is_some());
        drop(state);
        self.changed.notify(usize::MAX);
        fate
    }
}

impl ForwardStorage for Late {
    fn inner(&self) -> &dyn Storage {
        &*self.inner
    }

    fn read(&self, at: ImageOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        Box::pin(async move {
            let len = buffer.len();
            let read = self.inner.read(at, buffer).await?;
            match self.fate_of(len) {
                None => return Ok(read),
                Some(Fate::Fails | Fate::AllFail) => return Err(Error::invalid("a bad sector")),
                Some(Fate::Late) => {}
            }
            self.released().await;
            Ok(read)
        })
    }

    fn write(&self, at: ImageOffset, data: Buffer) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            if self.state.lock().unwrap().late_write.take_if(|len| *len == data.len()).is_some() {
                self.released().await;
            }
            self.inner.write(at, data).await
        })
    }
}
