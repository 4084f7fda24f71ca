//! Hash tables of numbers that an image or a guest may have chosen: their seeds are drawn anew for each, so that nobody
//! can choose numbers that all fall together.
//!
//! A fuzzer learns from which way an input went. Where it runs, the seeds are always the same, and so is the way.

#[cfg(fuzzing)]
type Seeds = std::hash::BuildHasherDefault<std::hash::DefaultHasher>;
#[cfg(not(fuzzing))]
type Seeds = std::hash::RandomState;

pub(crate) type HashMap<K, V> = std::collections::HashMap<K, V, Seeds>;
pub(crate) type HashSet<K> = std::collections::HashSet<K, Seeds>;
