//! HTTP and HTTPS: ranges of one URL, each held against what was found when it was opened.
//!
//! 1. An answer counts only when it is 206, says exactly the range that was asked for and the length that the base has,
//!    has its entity tag, and is not encoded. A body is read no further than what was asked for.
//! 2. 408, 429, 5xx, and what happens to connections may pass. Everything else is final.
//! 3. Proxies are those of the environment (`HTTPS_PROXY`, `HTTP_PROXY`, `NO_PROXY`). Certificates are those that the host trusts.
//! 4. Errors name the URL of the base, never one that a redirect led to: it may hold a signature.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::TryFutureExt as _;
use futures_util::stream;
use reqwest::header::{
    ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_RANGE, ETAG, HeaderMap, IF_MATCH, LAST_MODIFIED, RANGE,
};
use reqwest::redirect::Policy;
use reqwest::{Client, Response, StatusCode};
use vellum_core::{Error, ErrorKind, Result, Url};

use super::engine::{Facts, Failure, Parts, RemoteBase, Transport};
use super::ground::Real;
use super::kept::Kept;
use super::plan::{AfterFailure, after_failure};
use super::{OPEN_TIME_MAX, REMEDY, RemoteOptions, proof_of};
use crate::runtime;

/// Redirects that are followed one after another.
const REDIRECTS_MAX: usize = 5;

/// How long a connection may take to be made.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(5);

/// What tells one content of a URL from another.
///
/// A strong tag says all. The time of change is looked at beside a weaker one only: mirrors of one file have their own times.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Version {
    len: u64,
    tag: Option<String>,
    modified: Option<String>,
}

impl Version {
    fn is_strong(&self) -> bool {
        proof_of(self.tag.as_deref(), self.len).is_some()
    }

    fn is_of_same_content(&self, other: &Self) -> bool {
        let is_same_time = self.is_strong() || self.modified == other.modified;
        self.len == other.len && self.tag == other.tag && is_same_time
    }

    fn said(&self) -> String {
        let tag = match &self.tag {
            Some(tag) => format!("with entity tag {tag}"),
            None => "without an entity tag".to_owned(),
        };
        match &self.modified {
            Some(time) if !self.is_strong() => format!("{} bytes {tag}, changed on {time}", self.len),
            _ => format!("{} bytes {tag}", self.len),
        }
    }
}

#[derive(Clone)]
struct Web {
    client: Client,
    url: Arc<str>,
    version: Option<Arc<Version>>,
}

/// What an answer to a request for a range is.
#[derive(Debug, PartialEq, Eq)]
enum Answer {
    /// The bytes of the range, of this content.
    Range(Version),
    /// The object has no bytes.
    Empty(Version),
    /// No bytes, because of this; `true` when it may pass.
    No(ErrorKind, String, bool),
}

/// Judges the head of an answer to a request for `range`.
fn judge(status: StatusCode, headers: &HeaderMap, range: &Range<u64>) -> Answer {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
    let version = |len| Version { len, tag: text(ETAG), modified: text(LAST_MODIFIED) };
    let content_range = text(CONTENT_RANGE).unwrap_or_default();
    let final_no = |kind, why: &str| Answer::No(kind, why.to_owned(), false);
    let is_coded = |coding: &String| !coding.trim().eq_ignore_ascii_case("identity");
    let coding = text(CONTENT_ENCODING).filter(is_coded).unwrap_or_default();
    match status.as_u16() {
        206 if !coding.is_empty() => final_no(
            ErrorKind::Unsupported,
            &format!(
                "the server sends encoded bytes (Content-Encoding {coding:?}) instead of those of the file: switch that off for \
                 this file, or download and decode it first"
            ),
        ),
        206 => match parse_content_range(&content_range) {
            Some((Some((first, end)), len)) if first == range.start && end == range.end.min(len) => {
                Answer::Range(version(len))
            }
            _ => final_no(
                ErrorKind::Io,
                &format!(
                    "the server sent other bytes than the ones that it was asked for ({content_range:?})"
                ),
            ),
        },
        200 => final_no(
            ErrorKind::Unsupported,
            "the server sends the whole file instead of a range of it: only servers with range requests can be used; or \
             download the file first",
        ),
        404 | 410 => final_no(ErrorKind::NotFound, "the server has no such file"),
        401 | 403 => final_no(ErrorKind::Refused, "the server denies the request"),
        412 => final_no(ErrorKind::Changed, &format!("it has changed while it was in use; {REMEDY}")),
        416 => match parse_content_range(&content_range) {
            Some((None, 0)) => Answer::Empty(version(0)),
            _ => final_no(ErrorKind::Changed, &format!("it is shorter than it was; {REMEDY}")),
        },
        300..=399 => final_no(
            ErrorKind::Refused,
            "the server redirects to another host, too often, or to no URL: name the URL that it redirects to, or allow it with \
             `--allow-url`",
        ),
        408 | 429 | 500..=599 => Answer::No(ErrorKind::Io, format!("the server answers {status}"), true),
        _ => Answer::No(ErrorKind::Io, format!("the server answers {status}"), false),
    }
}

/// `bytes FIRST-LAST/LENGTH` as (first, end) and length, or `bytes */LENGTH`.
fn parse_content_range(text: &str) -> Option<(Option<(u64, u64)>, u64)> {
    let (range, len) = text.strip_prefix("bytes ")?.split_once('/')?;
    let len = len.parse().ok()?;
    if range == "*" {
        return Some((None, len));
    }
    let (first, last) = range.split_once('-')?;
    let (first, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
    let end = last.checked_add(1).filter(|end| first < *end && *end <= len)?;
    Some((Some((first, end)), len))
}

impl Web {
    /// Makes a request. The answer has no body where the object has no bytes.
    async fn ask(&self, range: Range<u64>) -> Result<(Version, Option<Body>), Failure> {
        let mut request = self
            .client
            .get(&*self.url)
            .header(RANGE, format!("bytes={}-{}", range.start, range.end - 1))
            .header(ACCEPT_ENCODING, "identity");
        let pinned = self.version.as_deref();
        if let Some(tag) =
            pinned.filter(|version| version.is_strong()).and_then(|version| version.tag.as_deref())
        {
            request = request.header(IF_MATCH, tag);
        }
        let response = request.send().await.map_err(|error| broken(&self.url, error))?;
        let no = |kind, why: &str| Error::new(kind, format!("{}: {why}", self.url));
        let version = match judge(response.status(), response.headers(), &range) {
            Answer::Range(version) => version,
            Answer::Empty(version) => return Ok((version, None)),
            Answer::No(kind, why, true) => return Err(Failure::Passing(no(kind, &why))),
            Answer::No(kind, why, false) => return Err(Failure::Final(no(kind, &why))),
        };
        if let Some(pinned) = pinned.filter(|pinned| !pinned.is_of_same_content(&version)) {
            let why = format!(
                "it has changed while it was in use: it was {}, and is {} now; {REMEDY}",
                pinned.said(),
                version.said()
            );
            return Err(Failure::Final(no(ErrorKind::Changed, &why)));
        }
        let left = range.end.min(version.len) - range.start;
        Ok((version, Some(Body { response, url: self.url.clone(), left })))
    }
}

/// The body of an answer that counts.
struct Body {
    response: Response,
    url: Arc<str>,
    /// Bytes of it that have not come yet.
    left: u64,
}

impl Body {
    /// Its next bytes; `None` after its end.
    async fn next(&mut self) -> Result<Option<Bytes>, Failure> {
        let no = |why: String| Error::new(ErrorKind::Io, format!("{}: {why}", self.url));
        match self.response.chunk().await.map_err(|error| broken(&self.url, error))? {
            Some(part) if part.len() as u64 > self.left => {
                let why = "the server sent more bytes than the ones that it was asked for";
                Err(Failure::Final(no(why.to_owned())))
            }
            Some(part) => {
                self.left -= part.len() as u64;
                Ok(Some(part))
            }
            None if self.left > 0 => {
                Err(Failure::Passing(no(format!("the answer ended {} bytes too early", self.left))))
            }
            None => Ok(None),
        }
    }
}

fn broken(url: &str, error: reqwest::Error) -> Failure {
    let (is_redirect, error) = (error.is_redirect(), error.without_url());
    let failure = Error::new(ErrorKind::Io, format!("{url}: {}", chain(&error)));
    if is_redirect { Failure::Final(failure) } else { Failure::Passing(failure) }
}

/// An error of the client and its causes in one line.
fn chain(error: &dyn std::error::Error) -> String {
    let mut line = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        line += &format!(": {cause}");
        next = cause.source();
    }
    line
}

impl Transport for Web {
    fn fetch(&self, range: Range<u64>) -> Parts {
        let web = self.clone();
        let body = async move {
            let (_, body) = web.ask(range).await?;
            Ok(stream::try_unfold(body, async |body: Option<Body>| {
                let Some(mut body) = body else { return Ok(None) };
                Ok(body.next().await?.map(|part| (part, Some(body))))
            }))
        };
        Box::pin(body.try_flatten_stream())
    }
}

/// Whether a redirect from `from` may be followed to `to`. The target's query is not looked at: stores sign it.
fn may_follow(from: &Url, to: &str, options: &RemoteOptions) -> bool {
    let bare = to.split(['?', '#']).next().unwrap_or_default();
    match Url::parse(bare) {
        Some(Ok(url)) => {
            from.has_same_origin(&url) || options.allowed.iter().any(|prefix| prefix.allows(&url))
        }
        _ => false,
    }
}

fn client(url: &Url, options: &RemoteOptions) -> Result<Client> {
    let (from, options) = (url.clone(), options.clone());
    let policy = Policy::custom(move |attempt| {
        match attempt.previous().len() <= REDIRECTS_MAX && may_follow(&from, attempt.url().as_str(), &options)
        {
            true => attempt.follow(),
            false => attempt.stop(),
        }
    });
    let built = Client::builder()
        .redirect(policy)
        .referer(false) // it may hold a signature that a redirect has added
        .connect_timeout(CONNECT_TIME_MAX)
        .user_agent(concat!("vellum/", env!("CARGO_PKG_VERSION")))
        .build();
    built.map_err(|error| {
        Error::new(ErrorKind::Io, format!("can't prepare requests to {url}: {}", chain(&error)))
    })
}

/// Opens what is at the URL: one request finds out what it is.
pub(super) async fn open(url: &Url, options: &RemoteOptions) -> Result<(RemoteBase, Option<String>)> {
    runtime::start()?;
    let web = Web { client: client(url, options)?, url: url.to_string().into(), version: None };
    let asked = web.clone();
    let version = runtime::job(async move { first_answer(asked, OPEN_TIME_MAX).await })?.await?;
    let proof = proof_of(version.tag.as_deref(), version.len);
    let facts = Facts {
        kept: Kept::of(options.cache.as_ref(), &url.to_string(), proof.as_ref()),
        name: url.to_string(),
        len: version.len,
        proof,
        timeout: options.timeout,
    };
    let content = Some(version.said());
    let pinned = Web { version: Some(Arc::new(version)), ..web };
    Ok((RemoteBase::new(facts, Box::new(pinned), Box::new(Real::new()?)), content))
}

/// One byte is enough to learn what is there, and that it is sent in ranges.
async fn first_answer(web: Web, time_max: Duration) -> Result<Version> {
    let began = std::time::Instant::now();
    let mut tries = 0;
    let mut last: Option<Error> = None;
    loop {
        let left = time_max.saturating_sub(began.elapsed()).max(Duration::from_millis(1));
        let asked = tokio::time::timeout(left, async {
            let (version, body) = web.ask(0..1).await?;
            if let Some(mut body) = body {
                while body.next().await?.is_some() {}
            }
            Ok(version)
        });
        let error = match asked.await {
            Ok(Ok(version)) => return Ok(version),
            Ok(Err(Failure::Final(error))) => return Err(error),
            Ok(Err(Failure::Passing(error))) => error,
            // A try that was cut short says less than the one before.
            Err(_) => last
                .take()
                .unwrap_or_else(|| Error::new(ErrorKind::Io, format!("{}: the server is silent", web.url))),
        };
        match after_failure(tries, fastrand::u64(..), began.elapsed(), time_max) {
            AfterFailure::GiveUp => {
                let why = format!(
                    "no usable answer within {} s: check the URL and the network",
                    time_max.as_secs()
                );
                return Err(error.context(format!("{}: {why}", web.url)));
            }
            AfterFailure::Pause(pause) => tokio::time::sleep(pause).await,
        }
        last = Some(error);
        tries += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(status: u16, range: &str, tag: &str) -> Answer {
        let mut headers = HeaderMap::new();
        if !range.is_empty() {
            headers.insert(CONTENT_RANGE, range.parse().unwrap());
        }
        if !tag.is_empty() {
            headers.insert(ETAG, tag.parse().unwrap());
        }
        judge(StatusCode::from_u16(status).unwrap(), &headers, &(100..200))
    }

    #[test]
    fn an_answer_counts_only_when_it_is_the_range_that_was_asked_for() {
        let version = |len| Version { len, tag: Some("\"t\"".to_owned()), modified: None };
        assert_eq!(judged(206, "bytes 100-199/1000", "\"t\""), Answer::Range(version(1000)));
        assert_eq!(judged(206, "bytes 100-149/150", "\"t\""), Answer::Range(version(150)), "the end of it");
        assert_eq!(judged(416, "bytes */0", "\"t\""), Answer::Empty(version(0)));
        for (status, range, kind, may_pass) in [
            (206, "bytes 100-149/1000", ErrorKind::Io, false),
            (206, "bytes 101-200/1000", ErrorKind::Io, false),
            (206, "bytes 100-199/*", ErrorKind::Io, false),
            (206, "bytes 100-199/150", ErrorKind::Io, false),
            (206, "bytes 199-100/1000", ErrorKind::Io, false),
            (206, "bytes 100-18446744073709551615/1000", ErrorKind::Io, false),
            (206, "", ErrorKind::Io, false),
            (200, "", ErrorKind::Unsupported, false),
            (404, "", ErrorKind::NotFound, false),
            (403, "", ErrorKind::Refused, false),
            (401, "", ErrorKind::Refused, false),
            (412, "", ErrorKind::Changed, false),
            (416, "bytes */50", ErrorKind::Changed, false),
            (302, "", ErrorKind::Refused, false),
            (418, "", ErrorKind::Io, false),
            (429, "", ErrorKind::Io, true),
            (500, "", ErrorKind::Io, true),
            (503, "", ErrorKind::Io, true),
        ] {
            match judged(status, range, "\"t\"") {
                Answer::No(is, why, passes) => {
                    assert_eq!((is, passes), (kind, may_pass), "{status} {range}: {why}")
                }
                other => panic!("{status} {range}: {other:?}"),
            }
        }
    }

    #[test]
    fn a_strong_tag_says_more_than_a_time() {
        let version = |len, tag: Option<&str>, modified: Option<&str>| Version {
            len,
            tag: tag.map(str::to_owned),
            modified: modified.map(str::to_owned),
        };
        for (was, is, is_same) in [
            ((5, Some("\"a\""), Some("Mon")), (5, Some("\"a\""), Some("Tue")), true),
            ((5, Some("\"a\""), Some("Mon")), (5, Some("\"a\""), None), true),
            ((5, Some("\"a\""), Some("Mon")), (6, Some("\"a\""), Some("Mon")), false),
            ((5, Some("\"a\""), Some("Mon")), (5, Some("\"b\""), Some("Mon")), false),
            ((5, Some("W/\"a\""), Some("Mon")), (5, Some("W/\"a\""), Some("Mon")), true),
            ((5, Some("W/\"a\""), Some("Mon")), (5, Some("W/\"a\""), Some("Tue")), false),
            ((5, None, Some("Mon")), (5, None, Some("Tue")), false),
            ((5, None, None), (5, None, None), true),
        ] {
            let (was, is) = (version(was.0, was.1, was.2), version(is.0, is.1, is.2));
            assert_eq!(was.is_of_same_content(&is), is_same, "{was:?} {is:?}");
            assert!(
                is_same || was.said() != is.said(),
                "a message that does not say what differs: {}",
                was.said()
            );
        }
    }

    #[test]
    fn the_last_answer_is_told_when_opening_is_given_up() {
        use std::io::{Read as _, Write as _};

        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("binds");
        let text = format!("http://{}/a", listener.local_addr().expect("an address"));
        std::thread::spawn(move || {
            for (number, connection) in listener.incoming().enumerate() {
                let mut connection = connection.expect("accepts");
                let mut request = [0; 4096];
                drop(connection.read(&mut request));
                if number > 1 {
                    // Silent from now on.
                    std::mem::forget(connection);
                    continue;
                }
                let no = b"HTTP/1.1 500 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
                drop(connection.write_all(no));
            }
        });
        let url = Url::parse(&text).expect("a URL").expect("a URL");
        runtime::start().expect("starts");
        let client = client(&url, &RemoteOptions::default()).expect("a client");
        let web = Web { client, url: text.into(), version: None };
        let job = runtime::job(async move { first_answer(web, Duration::from_millis(1500)).await });
        let error = futures_lite::future::block_on(job.expect("starts")).expect_err("500 is no answer");
        assert!(error.chain().contains("500"), "{}", error.chain());
    }

    #[test]
    fn encoded_bytes_are_not_those_of_the_file() {
        for (coding, counts) in [("identity", true), ("Identity", true), ("gzip", false), ("br, gzip", false)]
        {
            let mut headers = HeaderMap::new();
            headers.insert(CONTENT_RANGE, "bytes 100-199/1000".parse().unwrap());
            headers.insert(CONTENT_ENCODING, coding.parse().unwrap());
            let answer = judge(StatusCode::PARTIAL_CONTENT, &headers, &(100..200));
            match answer {
                Answer::Range(_) => assert!(counts, "{coding}"),
                Answer::No(ErrorKind::Unsupported, why, false) => {
                    assert!(!counts && why.contains(coding), "{why}");
                }
                other => panic!("{coding}: {other:?}"),
            }
        }
    }

    #[test]
    fn redirects_stay_with_the_host_or_what_is_allowed() {
        let from = Url::parse("https://host/a").unwrap().unwrap();
        let options = RemoteOptions {
            allowed: vec![UrlPrefix::parse("https://cdn.example/t/").unwrap()],
            ..RemoteOptions::default()
        };
        for (to, is_allowed) in [
            ("https://host/b?token=x", true),
            ("http://host/b", false),
            ("https://host:444/b", false),
            ("https://host.evil.example/b", false),
            ("https://cdn.example/t/b?X-Amz-Signature=y", true),
            ("https://cdn.example/u/b", false),
            ("https://user:word@host/b", false),
            ("file:///etc/shadow", false),
            ("https://host/t/../b", false),
        ] {
            assert_eq!(may_follow(&from, to, &options), is_allowed, "{to}");
        }
    }

    use vellum_core::UrlPrefix;
}
