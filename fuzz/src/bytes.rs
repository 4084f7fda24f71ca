//! A program is a string of bytes, taken from the front. When it is used up it goes on with nothing.

/// What is left of the input.
pub(crate) struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    pub(crate) fn of(data: &'a [u8]) -> Self {
        Self(data)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn byte(&mut self) -> u8 {
        self.array::<1>()[0]
    }

    pub(crate) fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut array = [0; N];
        let (taken, rest) = self.0.split_at(N.min(self.0.len()));
        array[..taken.len()].copy_from_slice(taken);
        self.0 = rest;
        array
    }

    /// A number from two bytes.
    pub(crate) fn number(&mut self) -> u64 {
        u64::from(u16::from_le_bytes(self.array()))
    }
}
