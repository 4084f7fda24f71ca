//! Names of templates, and where their parts lie in a store.
//!
//! ```text
//!   s3://BUCKET/PREFIX/NAME:VERSION          what users write
//!
//!   PREFIX/index/NAME/VERSION                the index: which chunks make up the disk
//!   PREFIX/chunks/ab/abcd…                   a chunk, by the digest of its content
//!   PREFIX/leases/…                          pushes and collections under way
//! ```
//!
//! Everything under one prefix shares its chunks.

use std::fmt;
use std::time::SystemTime;

use chrono::{DateTime, SecondsFormat, Utc};
use vellum_core::{Error, ErrorKind, Result};

use crate::store::Store;

/// The longest name of a template, and of a version.
const NAME_LEN_MAX: usize = 64;

/// How many versions of all templates a store may have to be listed. Each takes about 200 bytes meanwhile.
const LISTED_MAX: usize = 100_000;

/// Where indexes lie.
const INDEXES: &str = "index";

/// The name of a template in a store, and of one version of it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct TemplateName {
    /// Which template.
    pub name: String,
    /// Which version of it; the newest when not given.
    pub version: Option<String>,
}

impl TemplateName {
    /// Splits `STORE/NAME[:VERSION]` into the URL of the store and the name in it.
    ///
    /// # Errors
    /// `Invalid` when there is no name, or one with characters that names do not have.
    pub fn split(url: &str) -> Result<(&str, Self)> {
        let (store, last) = url.rsplit_once('/').unwrap_or(("", url));
        let is_path = store.contains("://") && !store.ends_with('/');
        if !is_path {
            return Err(Error::invalid(format!(
                "{url:?} names no template: write s3://BUCKET/NAME:VERSION or file:///DIR/NAME:VERSION"
            )));
        }
        let (name, version) = match last.split_once(':') {
            Some((name, version)) => (name, Some(version)),
            None => (last, None),
        };
        for part in [Some(name), version].into_iter().flatten() {
            check_part(part)?;
        }
        Ok((store, Self { name: name.to_owned(), version: version.map(str::to_owned) }))
    }
}

impl TemplateName {
    /// Whether a URL names a version of a template, and so no other object.
    pub(crate) fn is_version(url: &str) -> bool {
        url.rsplit('/').next().is_some_and(|last| last.contains(':'))
    }

    /// The key of the index of the version that it names.
    ///
    /// # Errors
    /// `Invalid` when it names none.
    pub(crate) fn index_key(&self) -> Result<String> {
        let version = self.version.as_ref();
        version
            .map(|version| index_key(&self.name, version))
            .ok_or_else(|| Error::invalid(format!("say which version of {self} is meant: {self}:VERSION")))
    }
}

impl fmt::Display for TemplateName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        self.version.as_ref().map_or(Ok(()), |version| write!(f, ":{version}"))
    }
}

/// Removes a version. Its chunks stay until they are collected.
///
/// # Errors
/// `Invalid` without a version, `NotFound` when the store does not have it; those of the store.
pub async fn remove(store: &Store, name: &TemplateName) -> Result<()> {
    let key = name.index_key()?;
    if store.head(&key).await?.is_none() {
        return Err(Error::new(ErrorKind::NotFound, format!("{} has no template {name}", store.url())));
    }
    store.delete(&[key]).await
}

/// The version that a name means: the one it says, else the newest.
///
/// # Errors
/// `NotFound` when the store has no version of the template; those of the store.
pub(crate) async fn resolve(store: &Store, name: &TemplateName) -> Result<String> {
    if let Some(version) = &name.version {
        return Ok(version.clone());
    }
    let newest = list(store, Some(&name.name)).await?.pop();
    newest
        .map(|newest| newest.version)
        .ok_or_else(|| Error::new(ErrorKind::NotFound, format!("{} has no template {name}", store.url())))
}

/// The key of an index.
pub(crate) fn index_key(name: &str, version: &str) -> String {
    format!("{INDEXES}/{name}/{version}")
}

fn check_part(part: &str) -> Result<()> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    if part.is_empty() || part.len() > NAME_LEN_MAX || part.starts_with('.') || !part.chars().all(is_plain) {
        return Err(Error::invalid(format!(
            "{part:?} cannot name a template or a version: use at most {NAME_LEN_MAX} letters, digits, `.`, `_` \
             and `-`, and do not begin with `.`"
        )));
    }
    Ok(())
}

/// A version of a template that a store has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublishedVersion {
    /// Which template.
    pub name: String,
    /// Which version.
    pub version: String,
    /// When it was published, by the clock of the store.
    pub published: SystemTime,
    /// The length of its index in bytes.
    pub index_len: u64,
}

impl PublishedVersion {
    /// When it was published, as text: `2026-11-25T04:00:00Z`.
    pub fn published_text(&self) -> String {
        DateTime::<Utc>::from(self.published).to_rfc3339_opts(SecondsFormat::Secs, true)
    }
}

/// The versions of all templates in a store, or of one. By name, then by age, oldest first.
///
/// # Errors
/// Those of the store; `Unsupported` when it has more versions than can be listed.
pub async fn list(store: &Store, name: Option<&str>) -> Result<Vec<PublishedVersion>> {
    let below = name.map_or_else(|| INDEXES.to_owned(), |name| format!("{INDEXES}/{name}"));
    let (objects, is_all) = store.list(&below, LISTED_MAX).await?;
    if !is_all {
        return Err(Error::unsupported(format!(
            "{} has more than {LISTED_MAX} versions of templates; publish some under another prefix",
            store.url()
        )));
    }
    let published = objects.into_iter().filter_map(|object| {
        let (name, version) = object.key.strip_prefix(INDEXES)?.strip_prefix('/')?.split_once('/')?;
        // Other objects may lie here. They name no template.
        check_part(name).and_then(|()| check_part(version)).ok()?;
        Some(PublishedVersion {
            name: name.to_owned(),
            version: version.to_owned(),
            published: object.modified,
            index_len: object.len,
        })
    });
    let mut published: Vec<PublishedVersion> = published.collect();
    published.sort_by(|a, b| (&a.name, a.published, &a.version).cmp(&(&b.name, b.published, &b.version)));
    Ok(published)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_part_of_a_url_names_the_template() {
        let (store, name) = TemplateName::split("s3://b/images/debian:12.1").expect("a name");
        assert_eq!((store, name.to_string().as_str()), ("s3://b/images", "debian:12.1"));
        let (store, name) = TemplateName::split("file:///srv/t/debian").expect("a name");
        assert_eq!((store, name.version), ("file:///srv/t", None));
        for bad in [
            "debian",
            "s3://debian",
            "s3://b/",
            "s3://b/a:",
            "s3://b/:1",
            "s3://b/a:b:c",
            "s3://b/.a",
            "s3://b/a b",
        ] {
            assert_eq!(TemplateName::split(bad).expect_err(bad).kind(), ErrorKind::Invalid, "{bad}");
        }
    }

    #[test]
    fn versions_are_listed_by_name_and_age() {
        let directory = crate::tests::Directory::new("list");
        let store = directory.store();
        let found = futures_lite::future::block_on(async {
            assert_eq!(list(&store, None).await.expect("lists"), []);
            // The last two name no version.
            for key in ["index/b/2", "index/a/1", "index/a/.x", "index/c"] {
                store.put(key, bytes::Bytes::from_static(b"x"), crate::Put::Replace).await.expect("writes");
            }
            assert_eq!(list(&store, Some("b")).await.expect("lists").len(), 1);
            list(&store, None).await.expect("lists")
        });
        let names: Vec<_> = found.iter().map(|one| (one.name.as_str(), one.version.as_str())).collect();
        assert_eq!(names, [("a", "1"), ("b", "2")]);
        assert!(found[0].published_text().starts_with("20"), "{}", found[0].published_text());
    }
}
