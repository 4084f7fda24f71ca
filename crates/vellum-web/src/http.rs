//! One connection: requests and their answers, and what goes wrong with them.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use socket2::SockRef;

use crate::message::{Answer, Request};
use crate::{Asked, Fault, Object, Shared, s3};

/// Longest head of a request, in bytes.
const HEAD_MAX: usize = 64 << 10;
/// Longest body of a request, in bytes.
const BODY_MAX: u64 = 1 << 30;

/// What is done instead of sending a whole answer.
#[derive(PartialEq, Eq)]
enum Then {
    Nothing,
    Close,
    Stall,
}

pub(crate) fn serve(shared: &Shared, stream: TcpStream) {
    drop(stream.set_nodelay(true));
    // So that a connection on which nothing comes looks whether the server is still there.
    drop(stream.set_read_timeout(Some(Duration::from_millis(50))));
    drop(talk(shared, stream));
}

fn talk(shared: &Shared, stream: TcpStream) -> io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut out = stream;
    while let Some(request) = read_request(shared, &mut reader, &mut out)? {
        if shared.is_closed() {
            return Ok(());
        }
        shared.requests.fetch_add(1, Ordering::Relaxed);
        let range = request.header("range").and_then(parse_range);
        shared.state().log.push(Asked {
            method: request.method.clone(),
            path: request.path.clone(),
            range: range.map(|(first, last)| (first, last.unwrap_or(u64::MAX))),
            if_match: request.header("if-match").map(str::to_owned),
        });
        let latency = shared.state().speed.latency;
        thread::sleep(latency);
        let is_of_object = request.query.iter().all(|(name, _)| name == "versionId");
        let is_read = request.method == "GET" && is_of_object;
        let fault = match request.method.as_str() {
            _ if is_read => shared.fault(),
            "PUT" if request.query.is_empty() => shared.fault_of_upload(&request.path),
            method => shared.fault_of_other(method),
        };
        if is_read {
            shared.reads.fetch_add(1, Ordering::Relaxed);
        }
        let mut answer = answer_of(shared, &request, &fault);
        let mut then = Then::Nothing;
        match fault {
            Fault::Late(time) => thread::sleep(time),
            Fault::Stall => {
                shared.stall();
                return Ok(());
            }
            Fault::Reset => {
                SockRef::from(&out).set_linger(Some(Duration::ZERO))?;
                return Ok(());
            }
            Fault::Status(status) => answer = Answer::error(status, "AsAsked"),
            Fault::Redirect(to) => answer = Answer { headers: vec![("Location", to)], ..Answer::of(302) },
            Fault::Encoded(coding) => answer.headers.push(("Content-Encoding", coding.to_owned())),
            Fault::Short => then = Then::Close,
            Fault::StallHalfway => then = Then::Stall,
            Fault::OtherBytes => answer.body.iter_mut().for_each(|byte| *byte ^= 0xff),
            Fault::None | Fault::OtherTag | Fault::Whole | Fault::OtherRange => {}
        }
        send(shared, &mut out, &request, answer, then == Then::Nothing)?;
        match then {
            Then::Nothing => {}
            Then::Close => return Ok(()),
            Then::Stall => {
                shared.stall();
                return Ok(());
            }
        }
    }
    Ok(())
}

fn answer_of(shared: &Shared, request: &Request, fault: &Fault) -> Answer {
    let key = shared.state().key.clone();
    if let Some(key) = key {
        let signed = format!("AWS4-HMAC-SHA256 Credential={key}/");
        if !request.header("authorization").is_some_and(|header| header.starts_with(&signed)) {
            return Answer::error(403, "AccessDenied");
        }
    }
    if let Some(answer) = s3::answer(shared, request) {
        return answer;
    }
    match request.method.as_str() {
        "GET" | "HEAD" => read_object(shared, request, fault),
        "DELETE" => {
            shared.state().objects.remove(&request.path);
            Answer::of(204)
        }
        "PUT" => {
            let mut state = shared.state();
            if request.header("if-none-match") == Some("*") && state.objects.contains_key(&request.path) {
                return Answer::error(412, "PreconditionFailed");
            }
            let object = Object::new(request.body.clone());
            let tag = object.tag.clone();
            shared.bytes_stored.fetch_add(object.len(), Ordering::Relaxed);
            state.store(&request.path, object);
            Answer { headers: vec![("ETag", tag)], ..Answer::of(200) }
        }
        _ => Answer::error(405, "MethodNotAllowed"),
    }
}

fn read_object(shared: &Shared, request: &Request, fault: &Fault) -> Answer {
    let found = {
        let state = shared.state();
        match (request.parameter("versionId"), &state.versions) {
            (Some(version), Some(versions)) => {
                versions.get(&(request.path.clone(), version.to_owned())).cloned()
            }
            _ => state.objects.get(&request.path).cloned(),
        }
    };
    let Some(object) = found else {
        return Answer::error(404, "NoSuchKey");
    };
    let if_match = request.header("if-match").filter(|_| *fault != Fault::OtherTag);
    if if_match.is_some_and(|wanted| wanted != object.tag || wanted.starts_with("W/")) {
        return Answer::error(412, "PreconditionFailed");
    }
    let tag = if *fault == Fault::OtherTag { "\"another\"".to_owned() } else { object.tag.clone() };
    let mut headers = vec![
        ("Accept-Ranges", "bytes".to_owned()),
        ("Last-Modified", "Wed, 25 Nov 2026 00:00:00 GMT".to_owned()),
    ];
    if let Some(version) = &object.version {
        headers.push(("x-amz-version-id", version.clone()));
    }
    if !tag.is_empty() {
        headers.push(("ETag", tag));
    }
    let len = object.len();
    let range = request.header("range").and_then(parse_range).filter(|_| *fault != Fault::Whole);
    let (status, at, count) = match range {
        None => (200, 0, len),
        Some((first, _)) if first >= len => {
            headers.push(("Content-Range", format!("bytes */{len}")));
            return Answer { headers, ..Answer::of(416) };
        }
        Some((first, last)) => {
            let last = last.unwrap_or(u64::MAX).min(len - 1);
            let off = u64::from(*fault == Fault::OtherRange);
            headers.push(("Content-Range", format!("bytes {}-{}/{len}", first + off, last + off)));
            (206, first, last + 1 - first)
        }
    };
    if request.method == "HEAD" {
        return Answer { headers, said_len: Some(count), ..Answer::of(status) };
    }
    match object.read(at, count) {
        Ok(body) => Answer { headers, body, ..Answer::of(status) },
        Err(_) => Answer::error(500, "InternalError"),
    }
}

fn send(
    shared: &Shared,
    out: &mut TcpStream,
    request: &Request,
    answer: Answer,
    is_whole: bool,
) -> io::Result<()> {
    let Answer { status, headers, body, said_len } = answer;
    let mut head = format!("HTTP/1.1 {status} As asked\r\n");
    for (name, value) in &headers {
        head += &format!("{name}: {value}\r\n");
    }
    if status != 204 {
        head += &format!("Content-Length: {}\r\n", said_len.unwrap_or(body.len() as u64));
    }
    out.write_all(format!("{head}\r\n").as_bytes())?;
    if request.method == "HEAD" {
        return Ok(());
    }
    let count = if is_whole { body.len() } else { body.len() / 2 };
    for piece in body[..count].chunks(64 << 10) {
        shared.take_line(piece.len() as u64);
        out.write_all(piece)?;
        shared.bytes_sent.fetch_add(piece.len() as u64, Ordering::Relaxed);
    }
    Ok(())
}

/// `bytes=FIRST-[LAST]`.
fn parse_range(text: &str) -> Option<(u64, Option<u64>)> {
    let (first, last) = text.strip_prefix("bytes=")?.split_once('-')?;
    let last = if last.is_empty() { None } else { Some(last.parse().ok()?) };
    Some((first.parse().ok()?, last))
}

/// The next request; `None` at the end of the connection or of the server.
fn read_request(
    shared: &Shared,
    reader: &mut BufReader<TcpStream>,
    out: &mut TcpStream,
) -> io::Result<Option<Request>> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        match reader.read_until(b'\n', &mut head) {
            Ok(0) => return Ok(None),
            Ok(_) if head.len() > HEAD_MAX => return Ok(None),
            Ok(_) => {}
            Err(error) if is_timeout(&error) && !shared.is_closed() => {}
            Err(_) => return Ok(None),
        }
    }
    let mut slots = [httparse::EMPTY_HEADER; 100];
    let mut parsed = httparse::Request::new(&mut slots);
    if parsed.parse(&head).is_err() {
        return Ok(None);
    }
    let target = parsed.path.unwrap_or("/");
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let mut request = Request {
        method: parsed.method.unwrap_or_default().to_owned(),
        path: decoded(path),
        query: query.split('&').filter(|pair| !pair.is_empty()).map(pair).collect(),
        headers: parsed.headers.iter().map(|header| (header.name.to_owned(), text(header.value))).collect(),
        body: Vec::new(),
    };
    if request.header("expect").is_some() {
        out.write_all(b"HTTP/1.1 100 Continue\r\n\r\n")?;
    }
    let len = request.header("content-length").and_then(|len| len.parse().ok()).unwrap_or(0);
    if len > BODY_MAX {
        return Ok(None);
    }
    read_body(shared, reader, len, &mut request.body)?;
    Ok(Some(request))
}

fn read_body(shared: &Shared, reader: &mut impl Read, len: u64, body: &mut Vec<u8>) -> io::Result<()> {
    body.resize(usize::try_from(len).expect("tests have 64 bits"), 0);
    let mut filled = 0;
    while filled < body.len() {
        match reader.read(&mut body[filled..]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => filled += count,
            Err(error) if is_timeout(&error) && !shared.is_closed() => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted)
}

fn pair(text: &str) -> (String, String) {
    let (name, value) = text.split_once('=').unwrap_or((text, ""));
    (decoded(name), decoded(value))
}

fn decoded(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        let digits = (byte == b'%').then(|| (rest.next(), rest.next()));
        bytes.push(match digits {
            Some((Some(high), Some(low))) => {
                let digit =
                    |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
                digit(high).zip(digit(low)).map_or(b'?', |(high, low)| high << 4 | low)
            }
            Some(_) => b'?',
            None => byte,
        });
    }
    String::from_utf8_lossy(&bytes).into_owned()
}
