//! A client whose server says whatever the input holds.
//!
//! Rules for every input: no panic, every request is answered, and the client ends once its storage is dropped. One that lists exports
//! keeps no more than was said.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

use futures_lite::future::{block_on, zip};
use vellum_core::{
    Buffer, ByteStream, Clock, Error, ErrorKind, ImageOffset, LocalFuture, Result, Storage as _, Zeroes,
    join_all,
};

use vellum_export::nbd::wire::{OPTION_REPLY_MAGIC, option, option_reply};

use super::list::list_over;
use super::{ClientOptions, Dial, prepare};

/// A clock on which every sleep is over at its second poll.
#[derive(Default)]
struct HastyClock(Arc<AtomicU64>);

impl Clock for HastyClock {
    fn now(&self) -> Duration {
        Duration::from_millis(self.0.load(Ordering::Relaxed))
    }

    fn sleep(&self, wait: Duration) -> LocalFuture<'static, ()> {
        let clock = self.0.clone();
        let mut polled = false;
        let millis = u64::try_from(wait.as_millis()).unwrap_or(1 << 20);
        Box::pin(poll_fn(move |context| {
            if std::mem::replace(&mut polled, true) {
                clock.fetch_add(millis, Ordering::Relaxed);
                return Poll::Ready(());
            }
            context.waker().wake_by_ref();
            Poll::Pending
        }))
    }
}

/// The server's bytes; they are the same ones on the next connection, from where the last one stopped.
struct Script {
    bytes: Rc<RefCell<Vec<u8>>>,
    piece: usize,
}

impl ByteStream for Script {
    fn read(&self, mut buffer: Buffer) -> LocalFuture<'_, Result<(Buffer, usize)>> {
        let mut bytes = self.bytes.borrow_mut();
        let count = bytes.len().min(buffer.len()).min(self.piece);
        buffer.copy_from(0, &bytes[..count]);
        bytes.drain(..count);
        Box::pin(std::future::ready(Ok((buffer, count))))
    }

    fn write_all(&self, _data: Buffer) -> LocalFuture<'_, Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn shutdown(&self) {}
}

struct Scripts {
    bytes: Rc<RefCell<Vec<u8>>>,
    piece: usize,
    left: Cell<u32>,
}

impl Dial for Scripts {
    fn dial(&self) -> LocalFuture<'_, Result<Box<dyn ByteStream>>> {
        let left = self.left.get();
        self.left.set(left.saturating_sub(1));
        let stream = Script { bytes: self.bytes.clone(), piece: self.piece };
        let result: Result<Box<dyn ByteStream>> = match left {
            0 => Err(Error::new(ErrorKind::Closed, "the server is gone")),
            _ => Ok(Box::new(stream)),
        };
        Box::pin(std::future::ready(result))
    }
}

/// The first byte says how the export is used and how bytes arrive; the rest is what the server sends.
pub fn fuzz_client(input: &[u8]) {
    let Some((first, bytes)) = input.split_first() else { return };
    let options = ClientOptions { read_only: first & 1 != 0, ..ClientOptions::default() };
    let (opening, client) = prepare("nbd://fuzz/".into(), String::new(), options);
    let piece = if first & 2 == 0 { usize::MAX } else { usize::from(first >> 3) + 1 };
    let dial = Scripts {
        bytes: Rc::new(RefCell::new(bytes.to_vec())),
        piece,
        left: Cell::new(u32::from(first >> 2 & 1) + 1),
    };
    let work = async {
        let Ok(storage) = opening.opened().await else { return };
        let at = ImageOffset::new;
        let mut read = Vec::new();
        for (start, len) in [(0, 4096), (1, 511), (storage.len().saturating_sub(7), 100)] {
            read.push(Box::pin(storage.read(at(start), Buffer::for_overwrite(len))));
        }
        for (answer, len) in join_all(read).await.into_iter().zip([4096, 511, 100]) {
            assert!(answer.is_err() || answer.is_ok_and(|buffer| buffer.len() == len));
        }
        if let Ok(runs) = storage.runs(at(0).span(1 << 20)).await {
            let mut next = 0;
            for run in runs {
                assert_eq!(run.span.start().bytes(), next);
                assert!(!run.span.is_empty() && run.span.end().bytes() <= storage.len());
                next = run.span.end().bytes();
            }
        }
        let changes = [
            storage.write(at(0), Buffer::zeroed(512)),
            storage.write_zeroes(at(512).span(512), Zeroes::MayUnmap),
            storage.discard(at(1024).span(512)),
            storage.flush(),
        ];
        drop(join_all(changes).await);
    };
    block_on(zip(work, client.run(&dial, &HastyClock::default())));
}

/// The first byte says how bytes arrive; the rest is what a server sends whose exports are listed.
pub fn fuzz_list(input: &[u8]) {
    let Some((first, bytes)) = input.split_first() else { return };
    let piece = if first & 2 == 0 { usize::MAX } else { usize::from(first >> 3) + 1 };
    let stream = Script { bytes: Rc::new(RefCell::new(bytes.to_vec())), piece };
    let Ok(exports) = block_on(list_over(&stream, None)) else { return };
    // Each of them took some bytes to say, and is kept as it was said.
    let names = exports.iter().map(|export| export.name.len() + export.description.len() + 1);
    let contexts = exports.iter().flat_map(|export| export.contexts.iter().map(|_| 1));
    assert!(names.chain(contexts).sum::<usize>() <= 3 * bytes.len(), "no more is listed than was said");
}

/// What a server sends that has two exports, one of them with contexts; with extended headers, structured replies, or neither.
pub fn listing(has_extended: bool, has_structured: bool) -> Vec<u8> {
    let mut bytes = b"NBDMAGICIHAVEOPT\x00\x03".to_vec();
    let mut reply = |option: u32, kind: u32, data: &[u8]| {
        bytes.extend_from_slice(&option_reply_header(option, kind, data.len()));
        bytes.extend_from_slice(data);
    };
    let agrees = |does: bool| if does { option_reply::ACK } else { option_reply::ERR_UNSUP };
    reply(option::EXTENDED_HEADERS, agrees(has_extended), &[]);
    if !has_extended {
        reply(option::STRUCTURED_REPLY, agrees(has_structured), &[]);
    }
    for name in [&b"\0\0\0\0the default"[..], b"\0\0\0\x02d1"] {
        reply(option::LIST, option_reply::SERVER, name);
    }
    reply(option::LIST, option_reply::ACK, &[]);
    for contexts in [&[&b"\0\0\0\x01base:allocation"[..], b"\0\0\0\x02qemu:allocation-depth"][..], &[]] {
        reply(option::INFO, option_reply::INFO, &[0, 0, 0, 0, 0, 0, 0, 16, 0, 0, 0, 0x6d]);
        reply(option::INFO, option_reply::INFO, b"\0\x03\0\0\0\x01\0\0\x10\0\x02\0\0\0");
        reply(option::INFO, option_reply::ACK, &[]);
        if has_extended || has_structured {
            contexts.iter().for_each(|one| reply(option::LIST_META_CONTEXT, option_reply::META_CONTEXT, one));
            reply(option::LIST_META_CONTEXT, option_reply::ACK, &[]);
        }
    }
    bytes
}

fn option_reply_header(option: u32, kind: u32, len: usize) -> Vec<u8> {
    let len = u32::try_from(len).expect("short");
    [&OPTION_REPLY_MAGIC.to_be_bytes()[..], &option.to_be_bytes(), &kind.to_be_bytes(), &len.to_be_bytes()]
        .concat()
}

/// The handshake of a server that has the export: what every session begins with.
pub fn greeting_and_facts() -> Vec<u8> {
    let mut bytes = b"NBDMAGICIHAVEOPT\x00\x03".to_vec();
    let mut reply = |option: u32, kind: u32, data: &[u8]| {
        bytes.extend_from_slice(&0x0003_e889_0455_65a9_u64.to_be_bytes());
        bytes.extend_from_slice(&option.to_be_bytes());
        bytes.extend_from_slice(&kind.to_be_bytes());
        bytes.extend_from_slice(&u32::try_from(data.len()).expect("short").to_be_bytes());
        bytes.extend_from_slice(data);
    };
    reply(8, 1, &[]);
    reply(10, 4, b"\0\0\0\x01base:allocation");
    reply(10, 1, &[]);
    reply(7, 3, &[0, 0, 0, 0, 0, 0, 0, 16, 0, 0, 0, 0x6d]);
    reply(7, 1, &[]);
    bytes
}

#[cfg(test)]
mod tests {
    use vellum_core::Random;

    use super::*;

    #[test]
    fn listings_of_random_servers_harm_nothing() {
        let mut random = Random::from_seed(6);
        for round in 0..20_000 {
            let mut input = vec![u8::try_from(round % 256).unwrap()];
            input.extend(listing(random.one_in(2), random.one_in(2)));
            for _ in 0..random.below(4) {
                let at = random.index(input.len());
                input[at] = u8::try_from(random.below(256)).unwrap();
            }
            if random.one_in(8) {
                input.truncate(random.index(input.len()));
            }
            fuzz_list(&input);
        }
    }

    #[test]
    fn a_listing_that_nobody_has_changed_is_understood() {
        for (has_extended, has_structured) in [(true, true), (false, true), (false, false)] {
            let bytes = listing(has_extended, has_structured);
            let stream = Script { bytes: Rc::new(RefCell::new(bytes)), piece: 7 };
            let exports = block_on(list_over(&stream, None)).unwrap();
            let names: Vec<_> = exports.iter().map(|export| export.name.as_str()).collect();
            assert_eq!(names, ["", "d1"]);
            assert_eq!(exports[0].description, "the default");
            assert_eq!(exports[0].contexts.len(), if has_extended || has_structured { 2 } else { 0 });
            assert_eq!(exports[1].block_bytes, Some([1, 4096, 32 << 20]));
            assert!(stream.bytes.borrow().is_empty());
        }
    }

    #[test]
    fn random_servers_harm_nothing() {
        let mut random = Random::from_seed(5);
        for round in 0..20_000 {
            let mut input = vec![u8::try_from(round % 256).unwrap()];
            input.extend(greeting_and_facts());
            // Chunks that are nearly right, for the requests that are on the wire.
            for _ in 0..random.below(8) {
                let kind = *random.pick(&[0_u16, 1, 2, 5, 0x8001, 0x8002]);
                let len = *random.pick(&[0_u32, 6, 12, 20, 8 + 512, 8 + 4096]);
                input.extend_from_slice(&0x668e_33ef_u32.to_be_bytes());
                input.extend_from_slice(&u16::try_from(random.below(2)).unwrap().to_be_bytes());
                input.extend_from_slice(&kind.to_be_bytes());
                input.extend_from_slice(&(random.below(5) + 1).to_be_bytes());
                input.extend_from_slice(&len.to_be_bytes());
                let mut payload = vec![0; len as usize];
                if random.one_in(2) {
                    random.fill(&mut payload);
                }
                input.extend_from_slice(&payload);
            }
            for _ in 0..random.below(4) {
                let at = random.index(input.len());
                input[at] = u8::try_from(random.below(256)).unwrap();
            }
            fuzz_client(&input);
        }
    }
}
