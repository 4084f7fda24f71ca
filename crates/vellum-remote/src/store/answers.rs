//! What the answers of a store mean: which kind of error, whether asking again may help, and what a person should know.

use std::fmt;

use object_store::client::HttpError;
use vellum_core::{Error, ErrorKind};

/// How much of a server's answer an error quotes.
const ANSWER_CHARS_MAX: usize = 300;

/// Whether asking again may help: the connection failed, or the server has a bad time.
pub(super) fn may_pass(error: &object_store::Error) -> bool {
    sent_away(error).is_none()
        && sources(error).any(|cause| {
            // The crate shows the status in the text alone.
            let text = cause.to_string();
            let status = text.split_once("status code: ").and_then(|(_, rest)| rest.get(..3)?.parse().ok());
            cause.is::<HttpError>()
                || status.is_some_and(|status: u16| matches!(status, 408 | 429 | 500..=599))
        })
}

/// Whether the store denies it to these credentials, which may have expired.
pub(crate) fn is_denied(error: &object_store::Error) -> bool {
    match error {
        object_store::Error::PermissionDenied { .. } | object_store::Error::Unauthenticated { .. } => true,
        other => sources(other).any(|cause| {
            let text = cause.to_string();
            text.contains("ExpiredToken") || text.contains("TokenRefreshRequired")
        }),
    }
}

fn sources<'a>(
    error: &'a object_store::Error,
) -> impl Iterator<Item = &'a (dyn std::error::Error + 'static)> {
    std::iter::successors(Some(error as &(dyn std::error::Error + 'static)), |cause| cause.source())
}

/// The store sends a request to another place, with words for a person.
#[derive(Debug)]
pub(crate) struct SentAway(pub(super) String);

impl fmt::Display for SentAway {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for SentAway {}

/// Where the store sends the request, if it does.
pub(crate) fn sent_away(error: &object_store::Error) -> Option<&SentAway> {
    sources(error).find_map(|cause| cause.downcast_ref())
}

pub(super) fn kind_of(error: &object_store::Error) -> ErrorKind {
    if sent_away(error).is_some() {
        return ErrorKind::Invalid;
    }
    match error {
        object_store::Error::NotFound { .. } => return ErrorKind::NotFound,
        object_store::Error::PermissionDenied { .. } | object_store::Error::Unauthenticated { .. } => {
            return ErrorKind::Refused;
        }
        object_store::Error::InvalidPath { .. } => return ErrorKind::Invalid,
        object_store::Error::NotSupported { .. } | object_store::Error::NotImplemented { .. } => {
            return ErrorKind::Unsupported;
        }
        _ => {}
    }
    if is_denied(error) {
        return ErrorKind::Refused;
    }
    for cause in sources(error) {
        if let Some(own) = cause.downcast_ref::<Error>() {
            return own.kind();
        }
        if let Some(io) = cause.downcast_ref::<std::io::Error>() {
            return match ErrorKind::of_io(io) {
                ErrorKind::ReadOnly => ErrorKind::Refused,
                kind => kind,
            };
        }
        let text = cause.to_string();
        if ["507 ", "QuotaExceeded", "StorageFull", "InsufficientCapacity"]
            .iter()
            .any(|code| text.contains(code))
        {
            return ErrorKind::NoSpace;
        }
    }
    ErrorKind::Io
}

/// What went wrong, for a person.
pub(crate) fn explain(error: &object_store::Error) -> Error {
    let kind = kind_of(error);
    if let Some(away) = sent_away(error) {
        return Error::new(kind, away.to_string());
    }
    let innermost = sources(error).map(ToString::to_string).max_by_key(String::len).unwrap_or_default();
    let said = brief(&innermost);
    let remedy = match kind {
        ErrorKind::Refused => {
            "; check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, or AWS_PROFILE, and what \
             they allow"
        }
        ErrorKind::NoSpace => "; free space there, then run the command again: it continues where it stopped",
        _ => "",
    };
    Error::new(kind, format!("{said}{remedy}"))
}

/// A message without the XML of a server's answer, on one line, and not too long.
fn brief(text: &str) -> String {
    let element = |name: &str| {
        let rest = text.split_once(&format!("<{name}>"))?.1;
        Some(rest.split_once('<')?.0.trim().to_owned())
    };
    let head = text.split_once("<?xml").or_else(|| text.split_once("<Error")).map_or(text, |(head, _)| head);
    let mut brief = head.trim().trim_end_matches(':').to_owned();
    let answer = [element("Code"), element("Message")].into_iter().flatten().collect::<Vec<_>>().join(": ");
    if !answer.is_empty() {
        brief = format!("{brief}: {answer}");
    }
    let brief: String =
        brief.chars().map(|c| if c.is_control() { ' ' } else { c }).take(ANSWER_CHARS_MAX).collect();
    brief
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_quoted_without_what_it_echoes() {
        let answer = "Server returned non-2xx status code: 403 Forbidden: <?xml version=\"1.0\"?><Error><Code>\
            InvalidAccessKeyId</Code><Message>No such key</Message><AWSAccessKeyId>AKIAHUSH</AWSAccessKeyId></Error>";
        let brief = brief(answer);
        assert_eq!(
            brief,
            "Server returned non-2xx status code: 403 Forbidden: InvalidAccessKeyId: No such key"
        );
        assert_eq!(super::brief(&"x".repeat(1000)).len(), ANSWER_CHARS_MAX);
    }
}
