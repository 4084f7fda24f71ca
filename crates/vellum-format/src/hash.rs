//! Hash tables of numbers that an image or a guest may have chosen. Each has a new random seed, so that
//! colliding numbers cannot be chosen in advance.
//!
//! A fuzzer relies on an input always taking the same path. Under a fuzzer the seeds are constant, and so is
//! the path.

#[cfg(fuzzing)]
type Seeds = std::hash::BuildHasherDefault<std::hash::DefaultHasher>;
#[cfg(not(fuzzing))]
type Seeds = std::hash::RandomState;

pub(crate) type HashMap<K, V> = std::collections::HashMap<K, V, Seeds>;
pub(crate) type HashSet<K> = std::collections::HashSet<K, Seeds>;
