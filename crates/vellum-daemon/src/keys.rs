//! The keys of encrypted images: made for new ones, listed, added and removed.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::OFlags;
use vellum_core::{Context as _, Error, Offload, Result};
use vellum_format::FormatKind;
pub use vellum_format::luks::KeysChanged;
use vellum_format::luks::{
    Hash, KeyArea, KeyChange, Mode, NewHeader, NewKeys, SLOTS, Secret, Secrets, TIME_DEFAULT, change_keys,
    iterations_for, system_chance,
};
use vellum_io::{clock, unblock};

use crate::control::{EncryptionWish, SecretFile};
use crate::host::Pool;
use crate::image::{ImageOptions, open_file};
use crate::plain_file;

/// How a new image is to be encrypted.
#[derive(Debug, Clone)]
pub struct NewEncryption {
    /// The name of the secret that opens it.
    pub secret: String,
    /// Bits of each half of the key: 128 or 256.
    pub key_bits: usize,
    /// The hash of its slots.
    pub hash: Hash,
    /// How long opening it is to take.
    pub time: Duration,
}

impl NewEncryption {
    /// As QEMU does it by default: AES-256 in XTS mode, SHA-256.
    pub fn with_secret(name: &str) -> Self {
        Self { secret: name.to_owned(), key_bits: 256, hash: Hash::Sha256, time: TIME_DEFAULT }
    }

    /// Bytes that a raw LUKS image has before its data.
    pub fn header_bytes(&self) -> u64 {
        vellum_format::luks::header_bytes(2 * self.key_bits / 8)
    }

    /// Draws the keys, and measures how many iterations they are to have. Must be called on a worker.
    ///
    /// # Errors
    /// `Invalid` when there is no such secret.
    pub fn keys(&self, secrets: &Secrets) -> Result<Arc<NewKeys>> {
        let secret = named(secrets, &self.secret)?;
        let key_len = 2 * self.key_bits / 8;
        let iterations = iterations_for(self.hash, key_len, self.time, processor_time);
        let mode = Mode::named("xts-plain64")?;
        // The digest needs less than a slot: a caller that can try keys has done the work of the slot already.
        let new = NewHeader { mode, key_len, hash: self.hash, digest_iterations: iterations / 8 };
        NewKeys::make(&new, secret, iterations, &mut system_chance).map(|(keys, _)| Arc::new(keys))
    }
}

/// The time that this thread has had of a processor; where the kernel does not say it, the time of a clock.
fn processor_time() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let nanos = text.split(' ').next().and_then(|nanos| nanos.parse().ok());
    nanos.map_or_else(|| clock().now(), Duration::from_nanos)
}

/// The secret of this name.
///
/// # Errors
/// `Invalid` when there is none.
pub fn named<'a>(secrets: &'a Secrets, name: &str) -> Result<&'a Secret> {
    secrets.named(name).ok_or_else(|| {
        Error::invalid(format!(
            "there is no secret named {name:?}: give it with `--secret id={name},file=FILE`"
        ))
    })
}

/// The secrets of a server and those that a client names by their files, and the keys of a new image. A client's secret takes the place of one
/// of the server's with its name.
///
/// # Errors
/// Those of the files; `Invalid` for a secret that nobody has, and for what is not made.
pub(crate) async fn keys_of_new(
    known: &Arc<Secrets>,
    files: &[SecretFile],
    wish: Option<&EncryptionWish>,
) -> Result<(Arc<Secrets>, Option<Arc<NewKeys>>)> {
    let (known, files, wish) = (known.clone(), files.to_vec(), wish.cloned());
    // It reads files, and takes as long as opening an image with these keys.
    unblock(move || {
        let mut secrets = (*known).clone();
        let mut seen: Vec<&str> = Vec::new();
        for SecretFile { id, file, base64 } in &files {
            if seen.contains(&id.as_str()) {
                return Err(Error::invalid(format!("there are two secrets named {id:?}")));
            }
            seen.push(id);
            if !file.is_absolute() {
                return Err(Error::invalid(format!("the file of the secret {id} needs an absolute path")));
            }
            let using = || format!("can't use the secret {id} in {}", file.display());
            let secret = plain_file::open(file, OFlags::empty()).context(using).and_then(Secret::read)?;
            let secret = if *base64 { secret.from_base64().context(using)? } else { secret };
            secrets = secrets.without(id);
            secrets.add(id, secret)?;
        }
        let keys = wish.map(|wish| {
            if ![128, 256].contains(&wish.key_bits) {
                return Err(Error::invalid(format!("key-bits {}: use 128 or 256", wish.key_bits)));
            }
            let new = NewEncryption {
                secret: wish.secret,
                key_bits: wish.key_bits,
                hash: Hash::named(&wish.hash)?,
                time: Duration::from_millis(wish.iter_time),
            };
            new.keys(&secrets)
        });
        let keys = keys.transpose()?;
        Ok((Arc::new(secrets), keys))
    })
    .await
}

/// One key slot of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeySlot {
    /// Its number.
    pub number: usize,
    /// Its iterations; nothing, where it is empty.
    pub iterations: Option<u32>,
}

/// What is done to the keys of an image.
#[derive(Debug, Clone)]
pub enum KeyWish {
    /// One more secret opens it, by its name among the secrets.
    Add {
        /// The name of the new secret.
        secret: String,
        /// The slot; the first empty one, when not given.
        slot: Option<usize>,
        /// How long opening it is to take.
        time: Duration,
    },
    /// A slot is emptied.
    Remove {
        /// The slot.
        slot: usize,
    },
    /// A secret opens it no more, by its name among the secrets.
    RemoveSecret {
        /// The name of the secret.
        secret: String,
    },
}

/// The key slots of an image. Must be called on a worker.
///
/// # Errors
/// `Invalid` when the image is not encrypted, and what opening it says.
pub async fn list(path: &Path, format: Option<FormatKind>) -> Result<Vec<KeySlot>> {
    let options = ImageOptions { format, force_share: true, ..ImageOptions::reading() };
    let (storage, kind) = open_file(path, &options).await?;
    let head = kind.format().read(&*storage).await?;
    let area = head.key_area().ok_or_else(|| not_encrypted(path))?;
    let header = area.header(&*storage).await?;
    Ok((0..SLOTS).map(|number| KeySlot { number, iterations: header.slot_iterations(number) }).collect())
}

fn not_encrypted(path: &Path) -> Error {
    Error::invalid(format!("{} is not encrypted with LUKS: it has no keys", path.display()))
}

/// Changes the keys of an image that no program has open. Must be called on a
/// worker.
///
/// # Errors
/// `Invalid` for an image without keys, a wrong or missing secret, and when no key would be left; `Locked` when another
/// program has the image open; what the file says.
pub async fn change(
    path: &Path,
    format: Option<FormatKind>,
    secrets: &Arc<Secrets>,
    wish: &KeyWish,
) -> Result<KeysChanged> {
    let (storage, kind) = open_file(path, &ImageOptions { format, ..ImageOptions::default() }).await?;
    let head = kind.format().read(&*storage).await?;
    let area: KeyArea = head.key_area().ok_or_else(|| not_encrypted(path))?;
    let hash = area.header(&*storage).await?.hash();
    let (mut unlocking, change) = (secrets.clone(), &wish);
    let change = match change {
        KeyWish::Add { secret, slot, time } => {
            let new = named(secrets, secret)?.clone();
            // The new one opens nothing yet.
            unlocking = Arc::new(secrets.without(secret));
            let iterations = iterations_for(hash, 64, *time, processor_time);
            KeyChange::Add { secret: new, slot: *slot, iterations }
        }
        KeyWish::Remove { slot } => KeyChange::Remove { slot: *slot },
        KeyWish::RemoveSecret { secret } => {
            KeyChange::RemoveSecret { secret: named(secrets, secret)?.clone() }
        }
    };
    let pool: Arc<dyn Offload> = Arc::new(Pool);
    change_keys(area, &storage, &unlocking, &change, &mut system_chance, &pool).await
}
