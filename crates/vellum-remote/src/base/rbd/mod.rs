//! Images of Ceph clusters (RBD), through Ceph's own library, which is loaded when it is needed.
//!
//! ```text
//!   open ─► Cluster, shared by the process ─► Image ─► RemoteBase: blocks, patience, reading ahead       ../engine.rs
//!           library.rs: the library's functions, and all that is unsafe
//! ```
//!
//! 1. A snapshot that is protected proves its content: nobody can delete it, and nothing can write it. An image without
//!    a snapshot, or one that is not protected, proves nothing: it must be trusted.
//! 2. Which cluster, user and key: Ceph's own ways (`CEPH_CONF`, `CEPH_ARGS`, the keyring that the configuration names).
//!    None of it is in a URL, an image or a message.
//! 3. Opening runs on a thread of its own, and is left alone after [`OPEN_TIME_MAX`]. A read that
//!    the library does not answer holds one of [`READS_MAX`] places until it does, or until its own limit.
//!
//! Left out: writing; other configurations than one for each process.

#[allow(unsafe_code, reason = "functions of a C library; the file has the rules")]
mod library;

use std::ops::Range;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use futures_util::future::FutureExt as _;
use tokio::sync::Semaphore;
use vellum_core::pin::{Proof, ProofKind};
use vellum_core::{Context, Error, ErrorKind, Result, Url, lock};

use self::library::{Cluster, Image, ImageFacts, Login, Place, failed};
use super::engine::{Facts, Failure, IN_FLIGHT_MAX, Parts, RemoteBase, Transport};
use super::ground::Real;
use super::kept::Kept;
use super::{OPEN_TIME_MAX, RemoteOptions};
use crate::runtime;

/// Reads of one image that the library has not answered, with those that nobody waits for any more.
const READS_MAX: usize = 2 * IN_FLIGHT_MAX;

/// The cluster's time for one operation, of which the library makes several for a read.
const OPERATION_TIME: Duration = Duration::from_secs(30);

/// The user of Ceph that is meant when nothing else is said.
const USER_DEFAULT: &str = "admin";

/// The user that these arguments of Ceph's tools name, without `client.`. The library itself takes no user from them.
fn user_of(arguments: &str) -> &str {
    let mut user = USER_DEFAULT;
    let mut words = arguments.split_whitespace();
    while let Some(word) = words.next() {
        let (option, value) = match word.split_once('=') {
            Some((option, value)) => (option, Some(value)),
            None => (word, None),
        };
        if matches!(option, "--id" | "--user" | "--name" | "-n")
            && let Some(value) = value.or_else(|| words.next())
        {
            user = value.strip_prefix("client.").unwrap_or(value);
        }
    }
    user
}

/// What a URL names: `rbd:POOL/[NAMESPACE/]IMAGE[@SNAPSHOT]`.
fn place_of(url: &Url) -> Result<Place> {
    let path = url.path().trim_start_matches('/');
    let (path, snapshot) = match path.split_once('@') {
        Some((path, snapshot)) => (path, Some(snapshot.to_owned())),
        None => (path, None),
    };
    let (namespace, image) = match path.split_once('/') {
        Some((namespace, image)) => (Some(namespace.to_owned()), image),
        None => (None, path),
    };
    if image.is_empty() {
        return Err(Error::invalid(format!("{url} names no image")));
    }
    Ok(Place { pool: url.host().to_owned(), namespace, image: image.to_owned(), snapshot })
}

/// The connection that the images of this process share, and how it was made.
static CLUSTER: Mutex<Option<(Login, Weak<Cluster>)>> = Mutex::new(None);

/// Opens the image, on a connection that is there or a new one.
fn connect_and_open(login: &Login, place: &Place) -> Result<(Image, ImageFacts)> {
    let shared =
        lock(&CLUSTER).as_ref().filter(|(made, _)| made == login).and_then(|(_, cluster)| cluster.upgrade());
    let cluster = match shared {
        Some(cluster) => cluster,
        None => {
            let cluster = Arc::new(Cluster::connect(login)?);
            *lock(&CLUSTER) = Some((login.clone(), Arc::downgrade(&cluster)));
            cluster
        }
    };
    Image::open(&cluster, place)
}

/// Opens the image at the URL.
pub(super) async fn open(url: &Url, options: &RemoteOptions) -> Result<RemoteBase> {
    let place = place_of(url)?;
    let arguments = std::env::var("CEPH_ARGS").unwrap_or_default();
    let login =
        Login { user: user_of(&arguments).to_owned(), connect: OPEN_TIME_MAX, operation: OPERATION_TIME };
    let context = || format!("can't open {url}");
    let (answer, answered) = tokio::sync::oneshot::channel();
    let opening = std::thread::Builder::new().name("vellum-rbd-open".into()).spawn(move || {
        // Where nobody waits any more, the image is closed again.
        drop(answer.send(connect_and_open(&login, &place)));
    });
    opening.context(|| format!("can't start a thread for {url}"))?;
    let opened = runtime::job(async move {
        let late = || Error::io(std::io::ErrorKind::TimedOut.into(), "the Ceph cluster does not answer");
        match tokio::time::timeout(OPEN_TIME_MAX, answered).await {
            Ok(Ok(opened)) => opened,
            Ok(Err(_)) => Err(Error::new(ErrorKind::Closed, "opening has ended")),
            Err(_) => Err(late()),
        }
    })?;
    let (image, found) = opened.await.context(context)?;
    let proof = found.snapshot.filter(|_| found.is_protected);
    let proof = proof.map(|snapshot| Proof::new(ProofKind::Snapshot, found.size, snapshot)).transpose()?;
    let facts = Facts {
        kept: Kept::of(options.cache.as_ref(), &url.to_string(), proof.as_ref()),
        name: url.to_string(),
        len: found.size,
        proof,
        timeout: options.timeout,
    };
    let reader = Reader {
        image: Arc::new(image),
        url: url.to_string().into(),
        places: Arc::new(Semaphore::new(READS_MAX)),
    };
    Ok(RemoteBase::new(facts, Box::new(reader), Box::new(Real::new()?)))
}

/// Waits until all that was dropped is closed, at most this long: the library's threads should end before the
/// process does.
pub fn wait_for_closed(limit: Duration) {
    library::wait_for_closed(limit);
}

/// An image as the fetch engine sees it.
struct Reader {
    image: Arc<Image>,
    url: Arc<str>,
    places: Arc<Semaphore>,
}

impl Transport for Reader {
    fn fetch(&self, range: Range<u64>) -> Parts {
        let (image, url, places) = (self.image.clone(), self.url.clone(), self.places.clone());
        let whole = async move {
            let passing = |error: Error| Failure::Passing(error.context(url.to_string()));
            let permit = places.acquire_owned().await.expect("it is never closed");
            let len = usize::try_from(range.end - range.start).expect("a run is short");
            let answer = image.read(range.start, len, permit).map_err(passing)?;
            match answer.await {
                Ok(Ok(bytes)) if bytes.len() == len => Ok(bytes),
                Ok(Ok(bytes)) => {
                    let why = format!("{} bytes came, and {len} were asked for", bytes.len());
                    Err(passing(Error::new(ErrorKind::Io, why)))
                }
                Ok(Err(number)) => {
                    let error =
                        failed(number, "the cluster does not give the bytes").context(url.to_string());
                    let is_final = matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ReadOnly);
                    Err(if is_final { Failure::Final(error) } else { Failure::Passing(error) })
                }
                Err(_) => Err(passing(Error::new(ErrorKind::Closed, "the read was dropped"))),
            }
        };
        Box::pin(whole.into_stream())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_user_is_that_of_cephs_arguments() {
        for (arguments, user) in [
            ("", "admin"),
            ("--id reader", "reader"),
            ("--id=reader", "reader"),
            ("-n client.reader --keyring /etc/x", "reader"),
            ("--conf /etc/x --name client.reader", "reader"),
            ("--id", "admin"),
            ("--identity x", "admin"),
        ] {
            assert_eq!(user_of(arguments), user, "{arguments}");
        }
    }

    #[test]
    fn a_url_names_pool_namespace_image_and_snapshot() {
        let place = |text: &str| place_of(&Url::parse(text).expect("a URL").expect("a good one"));
        let whole = place("rbd:pool/space/image@snap").expect("a place");
        let parts = (&*whole.pool, whole.namespace.as_deref(), &*whole.image, whole.snapshot.as_deref());
        assert_eq!(parts, ("pool", Some("space"), "image", Some("snap")));
        let short = place("rbd:pool/image").expect("a place");
        assert_eq!((short.namespace, &*short.image, short.snapshot), (None, "image", None));
    }
}
