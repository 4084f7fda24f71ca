//! A guest whose server is killed beside it: what it had flushed is in what is left.

use std::sync::atomic::{AtomicU64, Ordering};

use super::support::client::Client;
use super::support::noise;

const PAGE: usize = 4096;

/// Pages that a guest writes one by one, each with bytes of its own, and flushes.
pub struct Pages {
    len: usize,
    first: u64,
    seed: u64,
    flushed: AtomicU64,
}

impl Pages {
    /// On a disk of this size.
    pub fn new(len: usize, first: u64, seed: u64) -> Self {
        Self { len, first, seed: seed >> 1, flushed: AtomicU64::new(0) }
    }

    fn page(&self, number: u64) -> (usize, Vec<u8>) {
        let page = (number * 7 + self.first) % (self.len / PAGE) as u64;
        (usize::try_from(page).expect("a short disk") * PAGE, noise(PAGE, self.seed + number))
    }

    /// How many were flushed.
    pub fn flushed(&self) -> u64 {
        self.flushed.load(Ordering::Acquire)
    }

    /// Writes until the server is gone, or so many.
    pub fn write_on(&self, guest: &mut Client, most: u64) {
        for number in self.flushed()..most {
            let (at, bytes) = self.page(number);
            if guest.write(at as u64, &bytes, 0).and_then(|()| guest.flush()).is_err() {
                return;
            }
            self.flushed.store(number + 1, Ordering::Release);
        }
    }

    /// Each sector of what was found is as it was flushed, or as the page has it that was being written. Returns whether the
    /// model, which it was before, is that now.
    #[track_caller]
    pub fn judge(&self, found: &[u8], model: &mut [u8], about: &str) {
        let put = |model: &mut [u8], number| {
            let (at, bytes) = self.page(number);
            model[at..at + PAGE].copy_from_slice(&bytes);
        };
        (0..self.flushed()).for_each(|number| put(model, number));
        let mut later = model.to_vec();
        put(&mut later, self.flushed());
        assert_eq!(found.len(), model.len(), "{about}");
        for (sector, bytes) in found.chunks(512).enumerate() {
            let span = sector * 512..sector * 512 + bytes.len();
            let is_right = *bytes == model[span.clone()] || *bytes == later[span];
            assert!(is_right, "{about}: sector {sector} is wrong, {} pages were flushed", self.flushed());
        }
        model.copy_from_slice(found);
    }
}
