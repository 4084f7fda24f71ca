//! Parts of requests: how a new image is to be encrypted, and where secrets are.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// How a new image is to be encrypted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct EncryptionWish {
    /// The name of the secret that opens it.
    pub secret: String,
    /// Bits of each half of the key: 128 or 256.
    pub key_bits: usize,
    /// The hash of its slots.
    pub hash: String,
    /// How long opening it is to take, in milliseconds.
    pub iter_time: u64,
}

/// Where a secret is. The secret itself is never in a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct SecretFile {
    /// The name by which it is meant.
    pub id: String,
    /// The file: an absolute path, which the server reads.
    pub file: PathBuf,
    /// What is in the file is the base64 text of the secret.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub base64: bool,
}
