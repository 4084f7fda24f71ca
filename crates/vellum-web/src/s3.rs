//! What S3 adds to plain HTTP, as far as the crate `object_store` asks for it: listing, deletion of many objects,
//! and uploads in parts. A bucket is the first part of a path.

use std::sync::atomic::Ordering;

use crate::message::{Answer, Request};
use crate::{Object, Shared};

/// Objects in one page of a listing.
const PAGE: usize = 1000;

/// The answer to a request that is more than plain HTTP; `None` for any other.
pub(crate) fn answer(shared: &Shared, request: &Request) -> Option<Answer> {
    match (request.method.as_str(), request.parameter("uploadId")) {
        ("GET", _) if request.parameter("list-type").is_some() => Some(list(shared, request)),
        ("POST", _) if request.parameter("delete").is_some() => Some(delete(shared, request)),
        ("POST", _) if request.parameter("uploads").is_some() => Some(begin_upload(shared, request)),
        ("PUT", Some(id)) => Some(put_part(shared, request, id)),
        ("POST", Some(id)) => Some(end_upload(shared, request, id)),
        ("DELETE", Some(id)) => {
            shared.state().uploads.remove(id);
            Some(Answer::of(204))
        }
        _ => None,
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

fn list(shared: &Shared, request: &Request) -> Answer {
    let bucket = format!("{}/", request.path.trim_end_matches('/'));
    let prefix = request.parameter("prefix").unwrap_or_default();
    let after =
        request.parameter("continuation-token").or(request.parameter("start-after")).unwrap_or_default();
    let delimiter = request.parameter("delimiter").filter(|delimiter| !delimiter.is_empty());
    let state = shared.state();
    let (mut objects, mut common) = (String::new(), Vec::<String>::new());
    let (mut count, mut last, mut is_cut) = (0, String::new(), false);
    for (path, object) in &state.objects {
        let Some(key) = path.strip_prefix(&bucket).filter(|key| key.starts_with(prefix) && *key > after)
        else {
            continue;
        };
        if count == PAGE {
            is_cut = true;
            break;
        }
        count += 1;
        last = key.to_owned();
        let below = delimiter
            .and_then(|delimiter| key[prefix.len()..].find(delimiter).map(|at| at + delimiter.len()));
        if let Some(len) = below {
            let directory = key[..prefix.len() + len].to_owned();
            if common.last() != Some(&directory) {
                common.push(directory);
            }
            continue;
        }
        // Objects that were stored later have later times, which are enough for a test.
        let age = object.stored.elapsed().as_secs();
        let second = 86_399 - age.min(86_399);
        objects += &format!(
            "<Contents><Key>{}</Key><LastModified>2026-11-25T{:02}:{:02}:{:02}.000Z</LastModified><ETag>{}</ETag><Size>{}</Size>\
             <StorageClass>STANDARD</StorageClass></Contents>",
            escaped(key),
            second / 3600,
            second / 60 % 60,
            second % 60,
            escaped(&object.tag),
            object.len()
        );
    }
    let common: String = common
        .iter()
        .map(|key| format!("<CommonPrefixes><Prefix>{}</Prefix></CommonPrefixes>", escaped(key)))
        .collect();
    let token = if is_cut {
        format!("<NextContinuationToken>{}</NextContinuationToken>", escaped(&last))
    } else {
        String::new()
    };
    Answer::xml(
        200,
        format!(
            "<?xml version=\"1.0\"?><ListBucketResult><Name>{}</Name><Prefix>{}</Prefix><KeyCount>{count}</KeyCount>\
             <MaxKeys>{PAGE}</MaxKeys><IsTruncated>{is_cut}</IsTruncated>{objects}{common}{token}</ListBucketResult>",
            escaped(bucket.trim_matches('/')),
            escaped(prefix)
        ),
    )
}

/// The texts between these tags.
fn between<'a>(text: &'a str, tag: &str) -> Vec<&'a str> {
    let (open, close) = (format!("<{tag}>"), format!("</{tag}>"));
    text.split(&open).skip(1).filter_map(|rest| Some(rest.split_once(&close)?.0)).collect()
}

fn delete(shared: &Shared, request: &Request) -> Answer {
    let bucket = request.path.trim_end_matches('/');
    let text = String::from_utf8_lossy(&request.body).into_owned();
    let mut deleted = String::new();
    for key in between(&text, "Key") {
        let plain =
            key.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", "\"").replace("&amp;", "&");
        shared.state().objects.remove(&format!("{bucket}/{plain}"));
        deleted += &format!("<Deleted><Key>{key}</Key></Deleted>");
    }
    Answer::xml(200, format!("<?xml version=\"1.0\"?><DeleteResult>{deleted}</DeleteResult>"))
}

fn begin_upload(shared: &Shared, request: &Request) -> Answer {
    let mut state = shared.state();
    state.uploads_begun += 1;
    let id = format!("upload-{}", state.uploads_begun);
    state.uploads.insert(id.clone(), Default::default());
    Answer::xml(
        200,
        format!(
            "<?xml version=\"1.0\"?><InitiateMultipartUploadResult><Key>{}</Key><UploadId>{id}</UploadId>\
             </InitiateMultipartUploadResult>",
            escaped(&request.path)
        ),
    )
}

fn put_part(shared: &Shared, request: &Request, id: &str) -> Answer {
    let Some(number) = request.parameter("partNumber").and_then(|number| number.parse().ok()) else {
        return Answer::error(400, "InvalidPart");
    };
    let tag = Object::new(request.body.clone()).tag;
    shared.bytes_stored.fetch_add(request.body.len() as u64, Ordering::Relaxed);
    match shared.state().uploads.get_mut(id) {
        None => Answer::error(404, "NoSuchUpload"),
        Some(parts) => {
            parts.insert(number, request.body.clone());
            Answer { headers: vec![("ETag", tag)], ..Answer::of(200) }
        }
    }
}

fn end_upload(shared: &Shared, request: &Request, id: &str) -> Answer {
    let mut state = shared.state();
    let Some(parts) = state.uploads.remove(id) else { return Answer::error(404, "NoSuchUpload") };
    let object = Object::new(parts.into_values().flatten().collect());
    let tag = escaped(&object.tag);
    state.objects.insert(request.path.clone(), object);
    Answer::xml(
        200,
        format!(
            "<?xml version=\"1.0\"?><CompleteMultipartUploadResult><Key>{}</Key><ETag>{tag}</ETag>\
             </CompleteMultipartUploadResult>",
            escaped(&request.path)
        ),
    )
}
