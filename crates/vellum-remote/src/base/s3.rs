//! Objects of S3-compatible stores, as they are now or in one version (`?versionId=`), which never changes. Where the store is, and with which credentials, is in the environment, as for all
//! stores (`settings.rs`, `store.rs`).

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::TryFutureExt as _;
use futures_util::stream::{BoxStream, TryStreamExt as _};
use object_store::aws::AmazonS3;
use object_store::path::Path;
use object_store::{GetOptions, GetRange, ObjectStore};
use vellum_core::pin::{Proof, ProofKind};
use vellum_core::{Context, Error, ErrorKind, Result, Url};

use super::engine::{Facts, Failure, Parts, RemoteBase, Transport};
use super::ground::Real;
use super::kept::Kept;
use super::{REMEDY, RemoteOptions, proof_of};
use crate::credentials::Profile;
use crate::store::{Client, bucket_store, explain, is_denied, sent_away};
use crate::{Settings, runtime};

/// How long the begin of an answer may be waited for here; the engine has the patience, and waits for what follows.
const REQUEST_TIME: Duration = Duration::from_secs(10);

/// The store, and what its credentials come from.
#[derive(Clone)]
struct Bucket {
    store: Arc<AmazonS3>,
    profile: Option<Arc<Profile>>,
}

impl Bucket {
    fn open(name: &str) -> Result<Self> {
        let settings = Settings::from_env();
        let profile = match settings.get("AWS_ACCESS_KEY_ID") {
            Some(_) => None,
            None => Profile::find(&settings)?.map(Arc::new),
        };
        let store = Arc::new(bucket_store(name, &settings, profile.clone(), Client::Patient(REQUEST_TIME))?);
        Ok(Self { store, profile })
    }

    /// Whether other credentials may help: they expire.
    async fn renews_after(&self, error: &object_store::Error) -> bool {
        match &self.profile {
            Some(profile) if is_denied(error) => {
                profile.forget().await;
                true
            }
            _ => false,
        }
    }
}

#[derive(Clone)]
struct Object {
    bucket: Bucket,
    path: Path,
    url: Arc<str>,
    len: u64,
    tag: Option<String>,
    version: Option<String>,
}

impl Object {
    async fn get(
        &self,
        range: Range<u64>,
    ) -> Result<BoxStream<'static, object_store::Result<Bytes>>, Failure> {
        let answer = match self.get_once(&range).await {
            Err(error) if self.bucket.renews_after(&error).await => self.get_once(&range).await,
            answer => answer,
        };
        answer.map_err(|error| self.failure(&error))
    }

    fn failure(&self, error: &object_store::Error) -> Failure {
        let is_final = matches!(
            error,
            object_store::Error::NotFound { .. }
                | object_store::Error::Precondition { .. }
                | object_store::Error::PermissionDenied { .. }
                | object_store::Error::Unauthenticated { .. }
        ) || sent_away(error).is_some();
        let has_changed = matches!(error, object_store::Error::Precondition { .. });
        let mut why = explain(error);
        if has_changed {
            let was = self.tag.as_deref().unwrap_or("without an entity tag");
            let text = format!(
                "it has changed while it was in use: it was {} bytes with entity tag {was}; {REMEDY}",
                self.len
            );
            why = Error::new(ErrorKind::Changed, text);
        }
        let why = why.context(self.url.to_string());
        if is_final { Failure::Final(why) } else { Failure::Passing(why) }
    }

    async fn get_once(
        &self,
        range: &Range<u64>,
    ) -> object_store::Result<BoxStream<'static, object_store::Result<Bytes>>> {
        let options = GetOptions {
            if_match: self.tag.clone(),
            version: self.version.clone(),
            range: Some(GetRange::Bounded(range.clone())),
            ..GetOptions::default()
        };
        let answer = self.bucket.store.get_opts(&self.path, options).await?;
        let changed = |what: String| object_store::Error::Precondition {
            path: self.path.to_string(),
            source: what.into(),
        };
        // Some stores take no notice of a condition.
        let is_other_version = self.version.is_some() && answer.meta.version != self.version;
        if answer.meta.e_tag != self.tag || answer.meta.size != self.len || is_other_version {
            return Err(changed(format!(
                "{} bytes with entity tag {:?}",
                answer.meta.size, answer.meta.e_tag
            )));
        }
        if answer.range != *range {
            return Err(object_store::Error::Generic {
                store: "S3",
                source: "other bytes were sent than asked for".into(),
            });
        }
        Ok(answer.into_stream())
    }
}

impl Transport for Object {
    fn fetch(&self, range: Range<u64>) -> Parts {
        let object = self.clone();
        let parts = async move {
            let parts = object.get(range).await?;
            Ok(parts.map_err(move |error| object.failure(&error)))
        };
        Box::pin(parts.try_flatten_stream())
    }
}

/// Opens the object at the URL.
pub(super) async fn open(url: &Url, options: &RemoteOptions) -> Result<(RemoteBase, Option<String>)> {
    let bucket = Bucket::open(url.host()).context(|| format!("can't open {url}"))?;
    let path = Path::parse(url.path().trim_start_matches('/'))
        .map_err(|error| Error::new(ErrorKind::Refused, format!("{url}: {error}")))?;
    let version = url.version().map(str::to_owned);
    let (asked, key, of_version) = (bucket.clone(), path.clone(), version.clone());
    let meta = runtime::job(async move {
        let head = async || {
            let options = GetOptions { head: true, version: of_version.clone(), ..GetOptions::default() };
            Ok(asked.store.get_opts(&key, options).await?.meta)
        };
        match head().await {
            Err(error) if asked.renews_after(&error).await => head().await,
            found => found,
        }
    })?
    .await
    .map_err(|error| explain(&error))
    .context(|| format!("can't open {url}"))?;
    let proof = match &version {
        // Stores without versions take no notice of them.
        Some(_) if meta.version != version => {
            return Err(Error::unsupported(format!(
                "{url}: the store does not give this version, but the object as it is now: it keeps no versions, so name the \
                 object without ?versionId="
            )));
        }
        Some(version) => Proof::new(ProofKind::Version, meta.size, version.as_str()).map(Some)?,
        None => proof_of(meta.e_tag.as_deref(), meta.size),
    };
    let facts = Facts {
        kept: Kept::of(options.cache.as_ref(), &url.to_string(), proof.as_ref()),
        name: url.to_string(),
        len: meta.size,
        proof,
        timeout: options.timeout,
    };
    let content = meta.e_tag.as_ref().map(|tag| format!("{} bytes with entity tag {tag}", meta.size));
    let object =
        Object { bucket, path, url: url.to_string().into(), len: meta.size, tag: meta.e_tag, version };
    Ok((RemoteBase::new(facts, Box::new(object), Box::new(Real::new()?)), content))
}
