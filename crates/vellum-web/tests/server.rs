//! The server as a client meets it: answers, conditions, and each fault.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use vellum_web::{Fault, Server};

/// One request on a connection of its own: the head of the answer, and as much of its body as came.
fn ask(server: &Server, method: &str, target: &str, headers: &str, body: &[u8]) -> Option<(String, Vec<u8>)> {
    let mut stream = TcpStream::connect(server.address()).expect("it listens");
    stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout");
    let head = format!(
        "{method} {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {}\r\n{headers}\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).ok()?;
    stream.write_all(body).ok()?;
    stream.shutdown(std::net::Shutdown::Write).ok()?;
    let mut all = Vec::new();
    stream.read_to_end(&mut all).ok()?;
    let end = all.windows(4).position(|four| four == b"\r\n\r\n")?;
    Some((String::from_utf8_lossy(&all[..end]).into_owned(), all[end + 4..].to_vec()))
}

fn status(answer: &Option<(String, Vec<u8>)>) -> &str {
    answer.as_ref().map_or("none", |(head, _)| head.split(' ').nth(1).expect("a status"))
}

#[test]
fn ranges_and_conditions() {
    let server = Server::start();
    server.put("/d/a", (0..100).collect());
    let (head, body) = ask(&server, "GET", "/d/%61", "Range: bytes=10-19\r\n", b"").expect("an answer");
    assert!(head.contains(" 206 ") && head.contains("Content-Range: bytes 10-19/100"), "{head}");
    assert_eq!(body, (10..20).collect::<Vec<u8>>());
    let tag = head.lines().find_map(|line| line.strip_prefix("ETag: ")).expect("a tag").to_owned();
    assert_eq!(status(&ask(&server, "GET", "/d/a", &format!("If-Match: {tag}\r\n"), b"")), "200");
    server.put("/d/a", vec![7; 100]);
    assert_eq!(status(&ask(&server, "GET", "/d/a", &format!("If-Match: {tag}\r\n"), b"")), "412");
    assert_eq!(status(&ask(&server, "GET", "/d/b", "", b"")), "404");
    assert_eq!(status(&ask(&server, "GET", "/d/a", "Range: bytes=100-\r\n", b"")), "416");
    let (head, body) = ask(&server, "HEAD", "/d/a", "", b"").expect("an answer");
    assert!(head.contains("Content-Length: 100") && body.is_empty());
    assert_eq!((server.counts().reads, server.counts().requests), (5, 6));
}

#[test]
fn each_fault_is_what_it_says() {
    let server = Server::start();
    server.put("/a", vec![1; 1000]);
    let get = || ask(&server, "GET", "/a", "Range: bytes=0-499\r\n", b"");
    server.next(&[
        Fault::Status(503),
        Fault::Short,
        Fault::OtherBytes,
        Fault::OtherTag,
        Fault::Whole,
        Fault::OtherRange,
        Fault::Redirect("http://x/".to_owned()),
        Fault::Late(Duration::from_millis(1)),
    ]);
    assert_eq!(status(&get()), "503");
    let (head, body) = get().expect("half of it");
    assert!(head.contains("Content-Length: 500") && body.len() == 250);
    assert_eq!(get().expect("others").1, vec![0xfe; 500]);
    assert!(get().expect("it").0.contains("ETag: \"another\""));
    let whole = get();
    assert!(status(&whole) == "200" && whole.expect("all").1.len() == 1000);
    assert!(get().expect("it").0.contains("bytes 1-500/1000"));
    assert!(get().expect("it").0.contains("Location: http://x/"));
    assert_eq!(get().expect("it").1, vec![1; 500]);
    server.next(&[Fault::Reset]);
    assert!(get().is_none_or(|(_, body)| body.is_empty()));
    server.always(Fault::Stall);
    let releaser = server.clone();
    std::thread::scope(|scope| {
        let stalled = scope.spawn(get);
        while server.counts().reads < 10 {
            std::thread::yield_now();
        }
        std::thread::sleep(Duration::from_millis(20));
        releaser.release();
        assert!(stalled.join().expect("it ends").is_none());
    });
    server.always(Fault::None);
    server.set_down(true);
    assert!(get().is_none());
    server.set_down(false);
    assert_eq!(status(&get()), "206");
}

#[test]
fn objects_are_put_listed_and_deleted_as_in_s3() {
    let server = Server::start();
    server.require_key(Some("KEY"));
    let signed = "Authorization: AWS4-HMAC-SHA256 Credential=KEY/20261125/x/s3/aws4_request, SignedHeaders=host, Signature=0\r\n";
    assert_eq!(status(&ask(&server, "PUT", "/b/k1", "", b"one")), "403");
    assert_eq!(status(&ask(&server, "PUT", "/b/k1", signed, b"one")), "200");
    let only_new = format!("{signed}If-None-Match: *\r\n");
    assert_eq!(status(&ask(&server, "PUT", "/b/k1", &only_new, b"two")), "412");
    let begun = ask(&server, "POST", "/b/d/k2?uploads", signed, b"").expect("an answer").1;
    let begun = String::from_utf8(begun).expect("text");
    let id =
        begun.split("<UploadId>").nth(1).and_then(|rest| rest.split('<').next()).expect("an id").to_owned();
    for (number, part) in [(2, b"two"), (1, b"one")] {
        let target = format!("/b/d/k2?partNumber={number}&uploadId={id}");
        assert_eq!(status(&ask(&server, "PUT", &target, signed, part)), "200");
    }
    assert_eq!(status(&ask(&server, "POST", &format!("/b/d/k2?uploadId={id}"), signed, b"<x/>")), "200");
    assert_eq!(server.get("/b/d/k2").as_deref(), Some(&b"onetwo"[..]));
    let list = |target: &str| {
        String::from_utf8(ask(&server, "GET", target, signed, b"").expect("a list").1).expect("text")
    };
    let all = list("/b?list-type=2&prefix=");
    assert!(
        all.contains("<Key>k1</Key>") && all.contains("<Key>d/k2</Key>") && all.contains("<KeyCount>2<"),
        "{all}"
    );
    let top = list("/b?list-type=2&prefix=&delimiter=%2F");
    assert!(top.contains("<Prefix>d/</Prefix>") && !top.contains("d/k2"), "{top}");
    assert_eq!(
        status(&ask(
            &server,
            "POST",
            "/b?delete",
            signed,
            b"<Delete><Object><Key>k1</Key></Object></Delete>"
        )),
        "200"
    );
    assert_eq!(server.paths(), ["/b/d/k2"]);
    for number in 0..1500 {
        server.put(&format!("/many/{number:04}"), Vec::new());
    }
    let first = list("/many?list-type=2");
    assert!(
        first.contains("<IsTruncated>true<") && first.contains("<NextContinuationToken>0999<"),
        "{}",
        first.len()
    );
    let second = list("/many?list-type=2&continuation-token=0999");
    assert!(second.contains("<KeyCount>500<") && second.contains("<IsTruncated>false<"));
}
