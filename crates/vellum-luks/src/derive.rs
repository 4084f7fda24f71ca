//! How version 2 derives a key from a secret: PBKDF2 or argon2.
//!
//! What a header asks for is bounded before it is done: a count of iterations, or memory times the passes over it. Both
//! are counted in one unit, so that all slots together have one bound.

use argon2::{Algorithm, Argon2, Block, Params, Version};
use vellum_core::{Error, Result};
use zeroize::{Zeroize as _, Zeroizing};

use crate::header::{WORK_MAX, check_iterations};
use crate::kdf::Hash;

/// At most this many kibibytes are taken for one key, as by cryptsetup.
const MEMORY_KIB_MAX: u32 = 4 << 20;
/// At most this many lanes, as in cryptsetup. They are filled one after the other here.
const LANES_MAX: u32 = 4;
/// A kibibyte that argon2 fills once counts as this many iterations of a hash.
const ITERATIONS_PER_KIB: u64 = 4;

/// How a key is derived from a secret, or a digest from a key.
#[derive(Debug, Clone)]
pub struct Kdf {
    kind: Kind,
    salt: Vec<u8>,
}

#[derive(Debug, Clone, Copy)]
enum Kind {
    Pbkdf2 { hash: Hash, iterations: u32 },
    Argon2 { algorithm: Algorithm, memory_kib: u32, passes: u32, lanes: u32 },
}

impl Kdf {
    pub(crate) fn pbkdf2(hash: Hash, iterations: u32, salt: Vec<u8>) -> Result<Self> {
        check_iterations(iterations, "it")?;
        Ok(Self { kind: Kind::Pbkdf2 { hash, iterations }, salt })
    }

    /// The argon2 of this name. `numbers` are the memory in kibibytes, the passes over it, and the lanes.
    pub(crate) fn argon2(name: &str, numbers: (u32, u32, u32), salt: Vec<u8>) -> Result<Self> {
        let algorithm = match name {
            "argon2i" => Algorithm::Argon2i,
            "argon2id" => Algorithm::Argon2id,
            _ => {
                return Err(Error::unsupported(
                    "its key is derived in an unknown way: pbkdf2, argon2i and argon2id are supported",
                ));
            }
        };
        let (memory_kib, passes, lanes) = numbers;
        if memory_kib > MEMORY_KIB_MAX || lanes > LANES_MAX {
            return Err(Error::unsupported(format!(
                "it asks for {} MiB of memory and {lanes} lanes: at most {} MiB and {LANES_MAX} lanes are accepted",
                memory_kib >> 10,
                MEMORY_KIB_MAX >> 10
            )));
        }
        let kdf = Self { kind: Kind::Argon2 { algorithm, memory_kib, passes, lanes }, salt };
        if Params::new(memory_kib, passes, lanes, None).is_err() {
            return Err(Error::corrupt(format!(
                "argon2 with {memory_kib} KiB, {passes} passes and {lanes} lanes is impossible"
            )));
        }
        if kdf.work(0) > WORK_MAX {
            return Err(Error::unsupported(format!(
                "it asks for {passes} passes over {} MiB of memory, which would take many minutes",
                memory_kib >> 10
            )));
        }
        Ok(kdf)
    }

    /// What it costs to derive this many bytes, in iterations of a hash.
    pub(crate) fn work(&self, len: usize) -> u64 {
        match self.kind {
            Kind::Pbkdf2 { hash, iterations } => u64::from(iterations) * len.div_ceil(hash.len()) as u64,
            Kind::Argon2 { memory_kib, passes, .. } => {
                (u64::from(memory_kib) * u64::from(passes)).saturating_mul(ITERATIONS_PER_KIB)
            }
        }
    }

    /// Derives `len` bytes.
    ///
    /// # Errors
    /// `Unsupported` when there is not enough memory.
    pub(crate) fn derive(&self, secret: &[u8], len: usize) -> Result<Zeroizing<Vec<u8>>> {
        let (algorithm, memory_kib, passes, lanes) = match self.kind {
            Kind::Pbkdf2 { hash, iterations } => {
                return Ok(hash.derive(secret, &self.salt, iterations, len));
            }
            Kind::Argon2 { algorithm, memory_kib, passes, lanes } => (algorithm, memory_kib, passes, lanes),
        };
        let cannot = |error: argon2::Error| Error::unsupported(format!("argon2: {error}"));
        let params = Params::new(memory_kib, passes, lanes, Some(len)).map_err(cannot)?;
        let mut memory: Vec<Block> = Vec::new();
        memory.try_reserve_exact(params.block_count()).map_err(|_| {
            Error::unsupported(format!(
                "deriving its key takes {} MiB of memory, which this host does not have",
                memory_kib >> 10
            ))
        })?;
        memory.resize(params.block_count(), Block::new());
        let mut out = Zeroizing::new(vec![0; len]);
        let argon2 = Argon2::new(algorithm, Version::V0x13, params);
        let derived = argon2.hash_password_into_with_memory(secret, &self.salt, &mut out, &mut memory);
        memory.zeroize();
        derived.map_err(cannot)?;
        Ok(out)
    }

    /// Its name in a header.
    pub fn name(&self) -> &'static str {
        match self.kind {
            Kind::Pbkdf2 { .. } => "pbkdf2",
            Kind::Argon2 { algorithm: Algorithm::Argon2i, .. } => "argon2i",
            Kind::Argon2 { .. } => "argon2id",
        }
    }

    /// Its numbers, by their names.
    pub fn numbers(&self) -> Vec<(&'static str, u64)> {
        match self.kind {
            Kind::Pbkdf2 { iterations, .. } => vec![("iters", iterations.into())],
            Kind::Argon2 { memory_kib, passes, lanes, .. } => {
                vec![
                    ("iters", passes.into()),
                    ("memory", u64::from(memory_kib) << 10),
                    ("cpus", lanes.into()),
                ]
            }
        }
    }
}
