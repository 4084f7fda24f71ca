//! Remote bases: an image at a URL as a storage that can only be read.
//!
//! ```text
//!   open(url) ─► HTTP or S3: one request finds out length and entity tag    http.rs, s3.rs
//!        ─► RBD: the snapshot of a Ceph cluster                              rbd/
//!            ─► RemoteBase: blocks, patience, reading ahead                 engine.rs, decisions in plan.rs
//!            ─► s3://…/NAME:VERSION is a published template                 ../template/disk.rs
//! ```
//!
//! 1. What is open is one content: each answer must carry the entity tag and the length that were found when it was
//!    opened, and each request says so (`If-Match`). Anything else is `Changed`, never a mixture.
//! 2. A strong entity tag is a proof. A weak one, or none, is not: the storage then has no proof, and whoever opens an
//!    image over it must say that it is trusted.
//! 3. A redirect is followed only to the same scheme, host and port, or to a URL that the user allows. The requests to a store
//!    have credentials with them and follow none.
//! 4. With a cache on the host, a base that has a proof is read from there where possible (`kept.rs`).
//! 5. Opening waits at most [`OPEN_TIME_MAX`] for an answer; reads wait as long as the options say. Those that want the same
//!    image at the same time share one opening (`shared.rs`).

mod engine;
pub(crate) mod ground;
mod http;
mod kept;
pub(crate) mod plan;
mod rbd;
mod s3;
mod shared;

use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use vellum_core::pin::{Proof, ProofKind};
use vellum_core::{Result, Scheme, SharedStorage, Storage, Url, UrlPrefix, lock};

use crate::nbd::{self, NbdTls};
use crate::template::{TemplateName, TemplateStorage};
use crate::{ChunkCache, Settings, Store};

pub use engine::{CACHE_BYTES, FetchCounts, RemoteBase};
pub use plan::FETCH_BLOCK;
pub use rbd::wait_for_closed;
pub use shared::{Opened, open_since};

/// How long a request is held, when nothing else is said, while the server does not answer.
pub const REMOTE_TIMEOUT_DEFAULT: Duration = Duration::from_secs(60);

/// How long opening waits for an answer.
pub const OPEN_TIME_MAX: Duration = Duration::from_secs(10);

/// What to do about a base that has changed while it was in use.
const REMEDY: &str = "bring the earlier content back, or make a new image over the new one";

/// How remote images are read.
#[derive(Debug, Clone)]
pub struct RemoteOptions {
    /// How long a read is held while the server does not answer; then it fails.
    pub timeout: Duration,
    /// Where redirects may lead, besides the same host.
    pub allowed: Vec<UrlPrefix>,
    /// Where what was fetched is kept on this host, if anywhere.
    pub cache: Option<Arc<ChunkCache>>,
    /// How exports of NBD servers are encrypted.
    pub nbd_tls: NbdTls,
    /// How often such a server is asked what is stored, if not without end.
    pub statuses_max: Option<u64>,
}

impl Default for RemoteOptions {
    fn default() -> Self {
        Self {
            timeout: REMOTE_TIMEOUT_DEFAULT,
            allowed: Vec::new(),
            cache: None,
            nbd_tls: NbdTls::default(),
            statuses_max: None,
        }
    }
}

/// What is counted of an open remote image.
trait Counted: Storage {
    fn fetch_counts(&self) -> FetchCounts;
}

impl Counted for RemoteBase {
    fn fetch_counts(&self) -> FetchCounts {
        self.counts()
    }
}

impl Counted for TemplateStorage {
    fn fetch_counts(&self) -> FetchCounts {
        let counts = self.counts();
        FetchCounts {
            requests: counts.fetched + counts.repeated,
            fetched_bytes: counts.fetched_bytes,
            retries: counts.damaged + counts.repeated,
            cached: counts.cached,
            failed: counts.failed,
            ..FetchCounts::default()
        }
    }
}

/// All that are open, for the statistics.
static OPEN: Mutex<Vec<Weak<dyn Counted>>> = Mutex::new(Vec::new());

fn keep_count<T: Counted + 'static>(base: &Arc<T>) {
    let counted: Arc<dyn Counted> = base.clone();
    let mut open = lock(&OPEN);
    open.retain(|other| other.strong_count() > 0);
    open.push(Arc::downgrade(&counted));
}

/// Opens the image at a URL. Any executor may poll this.
///
/// # Errors
/// `NotFound`, `Refused` where the server denies it, `Unsupported` for a server without ranges and for a scheme that
/// cannot be read, and `Io` when there was no answer.
pub async fn open(url: &Url, options: &RemoteOptions) -> Result<SharedStorage> {
    Ok(open_known(url, options).await?.storage)
}

async fn open_known(url: &Url, options: &RemoteOptions) -> Result<Opened> {
    let (base, content) = match url.scheme() {
        Scheme::Http | Scheme::Https => http::open(url, options).await?,
        Scheme::S3 if TemplateName::is_version(&url.to_string()) => {
            let template = open_template(&url.to_string(), options).await?;
            keep_count(&template);
            let content = template.proof().map(|proof| proof.to_string());
            return Ok(Opened { storage: template, content });
        }
        Scheme::S3 => s3::open(url, options).await?,
        Scheme::Nbd | Scheme::NbdUnix | Scheme::Nbds | Scheme::NbdsUnix => {
            let storage = nbd::open(url, options, true).await?;
            return Ok(Opened { storage, content: None });
        }
        Scheme::Rbd => (rbd::open(url, options).await?, None),
    };
    let base = Arc::new(base);
    keep_count(&base);
    let content = base.proof().map(|proof| proof.to_string()).or(content);
    Ok(Opened { storage: base, content })
}

/// Opens a published template. Its reads are held as long as those of other remote images.
async fn open_template(url: &str, options: &RemoteOptions) -> Result<Arc<TemplateStorage>> {
    let (store, name) = TemplateName::split(url)?;
    let open = |deadline, option| Store::open(store, &Settings::from_env().with_deadline(deadline, option));
    let option = Some("--remote-timeout");
    // A store that does not answer is noticed before the rest is asked for.
    let opening =
        open(OPEN_TIME_MAX.min(options.timeout), option.filter(|_| options.timeout < OPEN_TIME_MAX))?;
    opening.head(&name.index_key()?).await?;
    TemplateStorage::open(&open(options.timeout, option)?, &name, options.cache.clone()).await
}

/// What was done for each remote base that is open, by its URL; bases of one URL together.
pub fn fetch_counts() -> Vec<(String, FetchCounts)> {
    let mut all: Vec<(String, FetchCounts)> = Vec::new();
    for base in lock(&OPEN).iter().filter_map(Weak::upgrade) {
        let (name, counts) = (base.name().to_owned(), base.fetch_counts());
        match all.iter_mut().find(|(other, _)| *other == name) {
            Some((_, sum)) => sum.add(counts),
            None => all.push((name, counts)),
        }
    }
    all
}

/// The proof in an entity tag; `None` for a weak one and for none.
fn proof_of(tag: Option<&str>, len: u64) -> Option<Proof> {
    let tag = tag?;
    let is_strong = tag.len() > 2 && tag.starts_with('"') && tag.ends_with('"');
    Proof::new(ProofKind::Etag, len, tag).ok().filter(|_| is_strong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_strong_tag_is_a_proof() {
        for (tag, is_proof) in [
            (Some("\"abc\""), true),
            (Some("\"9b2c-17\""), true),
            (Some("W/\"abc\""), false),
            (Some("abc"), false),
            (Some("\"\""), false),
            (Some("\""), false),
            (Some("\"a b\""), false),
            (None, false),
        ] {
            assert_eq!(proof_of(tag, 5).is_some(), is_proof, "{tag:?}");
        }
        let long = format!("\"{}\"", "x".repeat(300));
        assert!(proof_of(Some(&long), 5).is_none());
    }
}
