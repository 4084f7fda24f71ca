//! The client of a bucket: where it is, with which credentials, and what becomes of requests that get no answer.
//!
//! ```text
//!   environment, profile ──▶ bucket_store ──▶ object_store ──▶ Stays ──▶ one HTTP request
//!                                                                └─ an answer that redirects is an error
//! ```
//!
//! 1. No redirect is followed, not even to the same host: a request has the token of a session with it, and its signature
//!    counts for one host alone. The error names the host that it was sent to, never the rest of that URL, which may hold a
//!    signature.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::client::{
    ClientConfigKey, HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse,
    HttpService,
};
use object_store::{BackoffConfig, ClientOptions, RetryConfig};
use reqwest::header::LOCATION;
use vellum_core::{Error, Result};

use super::answers::{SentAway, explain};
use crate::credentials::{Profile, Provider};
use crate::settings::Settings;
use crate::silence::SILENCE_MAX;

/// How long a connection may take to be made.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(5);

/// As above, to what gives a virtual machine or a container its credentials: it is near, or does not exist.
const CONNECT_TIME_NEAR: Duration = Duration::from_secs(1);

/// Retries of one request, within its deadline.
const RETRIES_MAX: usize = 1000;

/// The longest name of a host that an error names.
const HOST_CHARS_MAX: usize = 255;

/// What a client of a bucket does with a request that gets no answer.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Client {
    /// It asks again, until the body of an answer begins or this time is over. The one that reads the body notices when it
    /// is silent.
    Patient(Duration),
    /// Nothing: its user has the limits and asks again.
    Once,
}

pub(crate) fn bucket_store(
    bucket: &str,
    settings: &Settings,
    profile: Option<Arc<Profile>>,
    client: Client,
) -> Result<object_store::aws::AmazonS3> {
    let mut builder = AmazonS3Builder::new().with_bucket_name(bucket);
    let mut has_region = false;
    let mut endpoint = None;
    for (name, value) in settings.of_stores() {
        let Ok(key) = name.to_ascii_lowercase().parse::<AmazonS3ConfigKey>() else { continue };
        match key {
            AmazonS3ConfigKey::Bucket => continue, // the URL has it
            AmazonS3ConfigKey::Region | AmazonS3ConfigKey::DefaultRegion => has_region = true,
            AmazonS3ConfigKey::S3Endpoint => endpoint = Some(value.to_owned()),
            AmazonS3ConfigKey::Endpoint if endpoint.is_none() => endpoint = Some(value.to_owned()),
            _ => {}
        }
        builder = builder.with_config(key, value);
    }
    if let Some(profile) = profile {
        if !has_region && let Some(region) = profile.value("region")? {
            builder = builder.with_region(region);
        }
        if endpoint.is_none()
            && let Some(url) = profile.value("endpoint_url")?
        {
            builder = builder.with_endpoint(&url);
            endpoint = Some(url);
        }
        if profile.source()?.is_some() {
            builder = builder.with_credentials(Arc::new(Provider(profile)));
        }
    }
    if let Some(endpoint) = &endpoint {
        if endpoint.contains('@') {
            return Err(Error::invalid(
                "AWS_ENDPOINT_URL contains a name or password; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY \
                 instead",
            ));
        }
        builder = builder.with_allow_http(endpoint.starts_with("http://"));
    }
    let mut options = ClientOptions::new()
        .with_allow_http(endpoint.is_some_and(|endpoint| endpoint.starts_with("http://")))
        .with_connect_timeout(CONNECT_TIME_MAX)
        .with_timeout_disabled()
        .with_http1_only()
        .with_user_agent(object_store::HeaderValue::from_static(concat!(
            "vellum/",
            env!("CARGO_PKG_VERSION")
        )));
    let backoff = BackoffConfig {
        init_backoff: Duration::from_millis(50),
        max_backoff: Duration::from_secs(5),
        base: 2.0,
    };
    let (max_retries, retry_timeout) = match client {
        Client::Patient(begin) => {
            // Of an upload, this would also count the time in which it is sent.
            options = options.with_read_timeout(SILENCE_MAX);
            (RETRIES_MAX, begin)
        }
        Client::Once => (0, Duration::ZERO),
    };
    let retry = RetryConfig { backoff, max_retries, retry_timeout };
    // The client's runtime threads must exist before it is made: it looks for the choice of cryptography.
    crate::runtime::start()?;
    let builder = builder.with_client_options(options).with_http_connector(Stays).with_retry(retry);
    builder.build().map_err(|error| explain(&error))
}

/// Where the answer leads, if it is a redirect.
fn redirect_of(answer: &HttpResponse) -> Option<SentAway> {
    let status = answer.status();
    if !status.is_redirection() || status.as_u16() == 304 {
        return None;
    }
    let header = |name: &str| answer.headers().get(name)?.to_str().ok();
    let region = header("x-amz-bucket-region").map(printable);
    let host = header(LOCATION.as_str()).and_then(host_of).map(printable);
    let to = host.map_or_else(|| "elsewhere".to_owned(), |host| format!("to {host}"));
    let its = region.map_or_else(String::new, |region| format!("; the bucket is in the region {region}"));
    Some(SentAway(format!(
        "the store redirects {to} (status {}), and no request with credentials follows{its}; set AWS_REGION and \
             AWS_ENDPOINT_URL, or region and endpoint_url of the profile, to where the bucket is",
        status.as_u16()
    )))
}

/// The host and the port in a URL; `None` where it has none.
fn host_of(url: &str) -> Option<&str> {
    let (_, rest) = url.split_once("//")?;
    let authority = rest.split(['/', '?', '#', '\\']).next()?;
    Some(authority.rsplit_once('@').map_or(authority, |(_, host)| host)).filter(|host| !host.is_empty())
}

fn printable(text: &str) -> String {
    text.chars().filter(|c| c.is_ascii_graphic()).take(HOST_CHARS_MAX).collect()
}

/// Makes clients that stay where they are.
#[derive(Debug)]
struct Stays;

impl HttpConnector for Stays {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        // `object_store` makes no client without redirects. It says by the shorter time whom it is about to ask.
        let said = |key| options.get_config_value(&key);
        let is_near = said(ClientConfigKey::ConnectTimeout).is_some_and(|time| time == "1s");
        let mut builder = reqwest::Client::builder()
            .redirect(reqwest::redirect::Policy::none())
            .http1_only()
            .connect_timeout(if is_near { CONNECT_TIME_NEAR } else { CONNECT_TIME_MAX })
            .user_agent(concat!("vellum/", env!("CARGO_PKG_VERSION")))
            .https_only(said(ClientConfigKey::AllowHttp).is_none_or(|allows| allows != "true"));
        if said(ClientConfigKey::ReadTimeout).is_some() {
            builder = builder.read_timeout(SILENCE_MAX);
        }
        let client = builder.build().map_err(|error| object_store::Error::Generic {
            store: "HTTP client",
            source: Box::new(error.without_url()),
        })?;
        Ok(HttpClient::new(Staying(client)))
    }
}

#[derive(Debug)]
struct Staying(reqwest::Client);

impl HttpService for Staying {
    fn call<'a, 'b>(
        &'a self,
        request: HttpRequest,
    ) -> Pin<Box<dyn Future<Output = Result<HttpResponse, HttpError>> + Send + 'b>>
    where
        'a: 'b,
        Self: 'b,
    {
        Box::pin(async {
            let answer = HttpService::call(&self.0, request).await?;
            match redirect_of(&answer) {
                Some(away) => Err(HttpError::new(HttpErrorKind::Unknown, away)),
                None => Ok(answer),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_named_without_what_may_be_secret() {
        for (url, host) in [
            ("https://other.example/b/x?X-Amz-Signature=hush", Some("other.example")),
            ("http://user:hush@other.example:81", Some("other.example:81")),
            ("//other.example/x", Some("other.example")),
            ("/x?y", None),
            ("https:///x", None),
        ] {
            assert_eq!(host_of(url), host, "{url}");
        }
        assert_eq!(printable("a\u{7f}b\u{e9}c"), "abc");
    }
}
