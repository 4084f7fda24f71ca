//! What an image asks of the program that serves it: copy-on-read and prefetch (FVD, USENIX ATC 2011, section 3,
//! keeps both in its header too).
//!
//! A wish is kept in the compatible features of either format. A program that does not know it ignores it, and
//! reads the same disk. It has a meaning only while the image has a backing image.

/// What an image asks for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Wish {
    /// Blocks that guests read from below are copied into the image.
    pub copy_on_read: bool,
    /// Everything is copied from below ahead of need, and the image is detached then.
    pub prefetch: bool,
}

impl Wish {
    /// Why an image on its own has none.
    pub(crate) const NEEDS_BACKING: &str =
        "copy_on_read and prefetch need a backing image: name one with -b, or omit them";

    /// The bits of this wish: that of copy-on-read first, then that of prefetch.
    pub(crate) fn bits(self, copy_on_read: u64, prefetch: u64) -> u64 {
        let bit = |is_set: bool, bit: u64| if is_set { bit } else { 0 };
        bit(self.copy_on_read, copy_on_read) | bit(self.prefetch, prefetch)
    }

    /// The wish in these bits.
    pub(crate) fn of(bits: u64, copy_on_read: u64, prefetch: u64) -> Self {
        Self { copy_on_read: bits & copy_on_read != 0, prefetch: bits & prefetch != 0 }
    }

    /// Whether nothing is asked for.
    pub fn is_none(self) -> bool {
        self == Self::default()
    }
}
