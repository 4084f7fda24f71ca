//! The cost of making a block that holds its unit's entry: LZ4, the entry, its checksum. And of reading it.

use std::hint::black_box;
use std::time::{Duration, Instant};

use serde::Serialize;
use vellum_core::{Error, Result};
use vellum_format::native::embed::{BLOCK_LEN, Identity, Packed, unpack};
use vellum_lab::guest::Bytes;

use super::cases::Mix;
use crate::report::median;

/// Microseconds for a block.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct PackCost {
    /// One byte again and again.
    pub(super) same_us: f64,
    /// Words drawn from a few: what a text is like.
    pub(super) text_us: f64,
    /// Noise, which comes to nothing.
    pub(super) noise_us: f64,
    /// To read the text again.
    pub(super) unpack_us: f64,
}

/// For a first write that is incompressible this many blocks are tried.
const TRIED: f64 = 3.0;
const BATCH: u32 = 512;
const BATCHES: usize = 15;

impl PackCost {
    /// Measures it here: the median of some batches.
    pub(super) fn measure() -> Result<Self> {
        let identity = Identity { tag: 1, guest_unit: 2, image_unit: 3, block: 0 };
        let pack = |plain: &[u8]| Packed::of(black_box(plain)).map(|packed| packed.block(identity));
        let (same, noise, text) = (Bytes::Same.make(BLOCK_LEN), Bytes::Noise.make(BLOCK_LEN), text());
        let Some(block) = pack(&text).filter(|_| pack(&noise).is_none()) else {
            return Err(Error::corrupt("what packs does not, or what does not does"));
        };
        Ok(Self {
            same_us: per_call(|| drop(black_box(pack(&same)))),
            text_us: per_call(|| drop(black_box(pack(&text)))),
            noise_us: per_call(|| drop(black_box(pack(&noise)))),
            unpack_us: per_call(|| drop(black_box(unpack(black_box(&block), identity)))),
        })
    }

    /// For each new unit, in microseconds: one block if it is compressible, and all that are tried if none
    /// is.
    pub(super) fn of_unit(&self, mix: Mix, len: usize) -> f64 {
        let noise = if len > BLOCK_LEN { TRIED * self.noise_us } else { self.noise_us };
        match mix {
            Mix::Same => self.same_us,
            Mix::Half => f64::midpoint(self.same_us, noise),
            Mix::Noise => noise,
        }
    }

    pub(super) fn line(&self) -> String {
        let rate = |us: f64| BLOCK_LEN as f64 / us;
        format!(
            "LZ4 with entry and checksum, a block of 4 KiB: one byte {:.2} µs, text {:.2} µs ({:.0} MB/s), noise {:.2} µs; \
             unpacked {:.2} µs ({:.0} MB/s)",
            self.same_us,
            self.text_us,
            rate(self.text_us),
            self.noise_us,
            self.unpack_us,
            rate(self.unpack_us)
        )
    }
}

fn per_call(mut act: impl FnMut()) -> f64 {
    let mut batch = || {
        let begun = Instant::now();
        (0..BATCH).for_each(|_| act());
        begun.elapsed().max(Duration::from_nanos(1)).as_secs_f64() * 1e6 / f64::from(BATCH)
    };
    batch();
    median((0..BATCHES).map(|_| batch()))
}

/// A block of words.
fn text() -> Vec<u8> {
    const WORDS: [&str; 13] = [
        "zone ", "unit ", "entry ", "of the ", "write ", "is ", "flush ", "and ", "a table ", "block\n",
        "0x5a ", "return ", "let mut ",
    ];
    let mut state = 1_u64;
    let mut text = Vec::with_capacity(BLOCK_LEN + 16);
    while text.len() < BLOCK_LEN {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let word = usize::try_from(state >> 33).expect("31 bits") % WORDS.len();
        text.extend_from_slice(WORDS[word].as_bytes());
    }
    text.truncate(BLOCK_LEN);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_block_is_timed_and_a_unit_costs_what_its_mix_says() {
        let cost = PackCost::measure().unwrap();
        assert!(cost.same_us > 0.0 && cost.text_us > 0.0 && cost.noise_us > 0.0 && cost.unpack_us > 0.0);
        let cost = PackCost { same_us: 1.0, text_us: 2.0, noise_us: 5.0, unpack_us: 1.0 };
        assert_eq!(
            [Mix::Same, Mix::Half, Mix::Noise].map(|mix| cost.of_unit(mix, 64 << 10)),
            [1.0, 8.0, 15.0]
        );
        assert!((cost.of_unit(Mix::Noise, 4096) - 5.0).abs() < f64::EPSILON);
    }
}
