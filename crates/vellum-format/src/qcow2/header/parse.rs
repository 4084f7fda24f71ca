//! The fields of the header, in the order in which they are checked.

use vellum_core::{BlockSize, Error, Result};

use super::extensions::text;
use super::{Compression, Encryption, VERSIONS};
use crate::qcow2::layout::*;

/// The version and the cluster size: what everything else depends on. `len` is the length of the file.
pub(super) fn version(cluster: &[u8], len: u64) -> Result<(u32, BlockSize)> {
    if cluster.len() < 512 || be32(cluster, field::MAGIC) != MAGIC {
        return Err(Error::invalid("not a qcow2 image: it does not begin with the magic number"));
    }
    let version = be32(cluster, field::VERSION);
    if !VERSIONS.contains(&version) {
        return Err(Error::unsupported(format!("qcow2 version {version} is not supported (2 and 3 are)")));
    }
    let cluster_bits = be32(cluster, field::CLUSTER_BITS);
    if !(CLUSTER_BITS_MIN..=CLUSTER_BITS_MAX).contains(&cluster_bits) {
        return Err(Error::corrupt(format!(
            "the cluster size 2^{cluster_bits} is outside 2^{CLUSTER_BITS_MIN} to 2^{CLUSTER_BITS_MAX}"
        )));
    }
    if len < V2_HEADER_LEN as u64 || (version == 3 && len < V3_HEADER_LEN_MIN as u64) {
        return Err(Error::corrupt("the file ends within the header: it was truncated"));
    }
    Ok((version, BlockSize::from_shift(cluster_bits)))
}

/// The fields that version 3 added. In version 2 they have fixed values.
pub(super) struct Features {
    pub(super) header_len: usize,
    pub(super) incompatible: u64,
    pub(super) compatible: u64,
    pub(super) autoclear: u64,
    pub(super) refcount_order: u32,
}

impl Features {
    pub(super) fn parse(cluster: &[u8], version: u32) -> Result<Self> {
        let features = match version {
            2 => Self {
                header_len: V2_HEADER_LEN,
                incompatible: 0,
                compatible: 0,
                autoclear: 0,
                refcount_order: 4,
            },
            _ => Self {
                header_len: header_len(cluster)?,
                incompatible: be64(cluster, field::INCOMPATIBLE),
                compatible: be64(cluster, field::COMPATIBLE),
                autoclear: be64(cluster, field::AUTOCLEAR),
                refcount_order: be32(cluster, field::REFCOUNT_ORDER),
            },
        };
        if features.refcount_order > 6 {
            return Err(Error::corrupt(format!(
                "a refcount width of 2^{} bits is above 64",
                features.refcount_order
            )));
        }
        Ok(features)
    }
}

fn header_len(cluster: &[u8]) -> Result<usize> {
    let header_len = be32(cluster, field::HEADER_LENGTH) as usize;
    if header_len < V3_HEADER_LEN_MIN || header_len > cluster.len() || !header_len.is_multiple_of(8) {
        return Err(Error::corrupt(format!("the header length {header_len} is impossible")));
    }
    Ok(header_len)
}

/// Where the extensions end: where the backing name begins, or at the end of the cluster.
pub(super) fn extensions_end(cluster: &[u8]) -> Result<usize> {
    match usize::try_from(be64(cluster, field::BACKING_FILE_OFFSET)) {
        Ok(0) => Ok(cluster.len()),
        Ok(at) if at <= cluster.len() => Ok(at),
        _ => Err(Error::corrupt("the backing file name lies outside the first cluster")),
    }
}

/// The name of the backing file, which lies at `at` if there is one.
pub(super) fn backing_file(cluster: &[u8], at: usize) -> Result<Option<String>> {
    match (be64(cluster, field::BACKING_FILE_OFFSET), be32(cluster, field::BACKING_FILE_SIZE)) {
        (0, _) | (_, 0) => Ok(None),
        (_, long) if long > BACKING_NAME_MAX => {
            Err(Error::corrupt(format!("a backing file name of {long} bytes is too long")))
        }
        (_, len) => {
            let name = cluster
                .get(at..at + len as usize)
                .ok_or_else(|| Error::corrupt("the backing file name passes the end of the first cluster"))?;
            Ok(Some(text(name, "backing file name")?))
        }
    }
}

/// How guest data is encrypted.
pub(super) fn encryption(cluster: &[u8]) -> Result<Option<Encryption>> {
    match be32(cluster, field::CRYPT_METHOD) {
        0 => Ok(None),
        1 => Ok(Some(Encryption::Aes)),
        2 => Ok(Some(Encryption::Luks)),
        other => Err(Error::corrupt(format!("encryption method {other} is unknown"))),
    }
}

/// How compressed clusters are compressed. A header that ends before this field means zlib.
pub(super) fn compression(cluster: &[u8], header_len: usize) -> Result<Compression> {
    match cluster.get(field::COMPRESSION_TYPE) {
        Some(kind) if header_len > field::COMPRESSION_TYPE => match kind {
            0 => Ok(Compression::Zlib),
            1 => Ok(Compression::Zstd),
            other => Err(Error::unsupported(format!("compression type {other} is unknown"))),
        },
        _ => Ok(Compression::Zlib),
    }
}
