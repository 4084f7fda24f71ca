//! Openings that several use: of the disks that want one URL at the same time, one asks the server.
//!
//! ```text
//!   disk 1 ── asks ─────────────────── answer ───── opens: the same storage
//!   disk 2 ────── asks ─ waits for 1 ─ answer
//!   disk 3 ───────── asks ─ waits for a lock of disk 1 ─────── the answer that disk 1 got: it asked before
//!                                                      disk 4 ── asks ── the server again
//! ```
//!
//! 1. A caller that asked before an opening ended gets its outcome, a failure too: asking again would find out nothing
//!    that is newer than the question. A caller that asks later gets an opening of its own.
//! 2. An outcome is kept for [`KEPT_FOR`], so that what was opened to see what it is need not be opened again.
//! 3. Openings differ when the URL or any of the options differs. Exports of NBD servers and images
//!    of Ceph clusters are not shared: they are connections, which end with their last user.

use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use futures_util::future::{BoxFuture, FutureExt as _, Shared};
use vellum_core::{Result, Scheme, SharedStorage, Url, lock};

use super::{RemoteOptions, open_known};
use crate::runtime::job;

/// How long an outcome is kept for those that asked before. It holds the blocks of a base in memory.
const KEPT_FOR: Duration = Duration::from_secs(10);

/// An open image, and what tells its content from another.
#[derive(Clone)]
pub struct Opened {
    /// The image.
    pub storage: SharedStorage,
    /// Equal for two openings of one URL that found the same content, as far as the server tells; none where
    /// nothing does.
    pub content: Option<String>,
}

struct Opening {
    url: String,
    options: RemoteOptions,
    outcome: Shared<BoxFuture<'static, Result<Opened>>>,
    ended: Arc<OnceLock<Instant>>,
}

impl Opening {
    fn is_of(&self, url: &str, options: &RemoteOptions) -> bool {
        let cache = |options: &RemoteOptions| options.cache.as_ref().map(Arc::as_ptr);
        self.url == url
            && self.options.timeout == options.timeout
            && self.options.allowed == options.allowed
            && cache(&self.options) == cache(options)
    }
}

/// Those that are under way, and the outcomes that are kept.
static OPENINGS: Mutex<Vec<Opening>> = Mutex::new(Vec::new());

/// As [`open`](super::open), for one that asked at `since`: what others have found after that is his, too. Dropping the
/// future lets the opening go on for others.
///
/// # Errors
/// Those of `open`.
pub async fn open_since(url: &Url, options: &RemoteOptions, since: Instant) -> Result<Opened> {
    if url.scheme().is_nbd() || url.scheme() == Scheme::Rbd {
        return open_known(url, options).await;
    }
    let text = url.to_string();
    let outcome = {
        let mut all = lock(&OPENINGS);
        let is_new_enough = |one: &Opening| one.ended.get().is_none_or(|ended| *ended >= since);
        match all.iter().find(|one| one.is_of(&text, options) && is_new_enough(one)) {
            Some(one) => one.outcome.clone(),
            None => {
                let ended = Arc::new(OnceLock::new());
                let outcome = begin(url.clone(), options.clone(), ended.clone())?;
                all.push(Opening { url: text, options: options.clone(), outcome: outcome.clone(), ended });
                outcome
            }
        }
    };
    outcome.await
}

fn begin(
    url: Url,
    options: RemoteOptions,
    ended: Arc<OnceLock<Instant>>,
) -> Result<Shared<BoxFuture<'static, Result<Opened>>>> {
    let opening = job(async move {
        let outcome = open_known(&url, &options).await;
        ended.get_or_init(Instant::now);
        tokio::spawn(async move {
            tokio::time::sleep(KEPT_FOR).await;
            let is_this = |one: &mut Opening| Arc::ptr_eq(&one.ended, &ended);
            let gone: Vec<Opening> = lock(&OPENINGS).extract_if(.., is_this).collect();
            drop(gone); // not under the lock: it may be the last use of the image
        });
        outcome
    })?;
    Ok(opening.boxed().shared())
}

#[cfg(test)]
mod tests {
    use futures_lite::future::block_on;
    use vellum_core::try_join_all;
    use vellum_web::{Fault, Server};

    use super::*;

    fn at(web: &Server) -> (Url, RemoteOptions) {
        let url = Url::parse(&web.url("/a")).expect("a URL").expect("a URL");
        (url, RemoteOptions::default())
    }

    #[test]
    fn those_that_asked_before_an_opening_ended_have_its_outcome() {
        for tag in ["\"one\"", "W/\"one\""] {
            let web = Server::start();
            web.put("/a", vec![7; 100_000]);
            web.set_tag("/a", tag);
            let ((url, options), since) = (at(&web), Instant::now());
            let all = (0..20).map(|_| Box::pin(open_since(&url, &options, since)));
            let opened = block_on(try_join_all(all.collect::<Vec<_>>())).expect("it is there");
            assert!(opened.windows(2).all(|two| Arc::ptr_eq(&two[0].storage, &two[1].storage)));
            block_on(open_since(&url, &options, since)).expect("it was asked before the first one ended");
            assert_eq!(web.counts().requests, 1);
            let later = block_on(open_since(&url, &options, Instant::now())).expect("it is there");
            assert_eq!((web.counts().requests, &later.content), (2, &opened[0].content), "{tag}");
            assert!(later.content.is_some(), "{tag}");
            web.set_tag("/a", &tag.replace("one", "two"));
            let changed = block_on(open_since(&url, &options, Instant::now())).expect("it is there");
            assert_ne!(changed.content, later.content, "{tag}");
        }
    }

    #[test]
    fn a_failure_is_that_of_all_who_asked_before_it() {
        let web = Server::start();
        web.put("/a", vec![7; 100_000]);
        web.always(Fault::Status(403));
        let ((url, options), since) = (at(&web), Instant::now());
        for _ in 0..20 {
            let error = block_on(open_since(&url, &options, since)).err().expect("it is denied");
            assert!(error.chain().contains("denies"), "{}", error.chain());
        }
        assert_eq!(web.counts().requests, 1);
        web.always(Fault::None);
        block_on(open_since(&url, &options, Instant::now())).expect("a later question has its own answer");
    }
}
