//! Servers that answer without end: what the NBD client takes of it is bounded.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use vellum_core::{Buffer, ByteStream, ErrorKind, ImageOffset, LocalFuture, Result, Storage as _};
use vellum_remote::nbd::{ClientOptions, Dial, NbdStorage, prepare};
use vellum_sim::{SimStream, StreamOptions, World, stream_pair};

/// A server that answers each read with chunks of errors, of which the last one says that it is.
struct Server {
    world: Rc<World>,
    /// How many chunks an answer has.
    chunks: u64,
    connections: Cell<u64>,
    /// How many of them clients have let it send.
    sent: Cell<u64>,
}

struct Dialer(Rc<Server>);

impl Dial for Dialer {
    fn dial(&self) -> LocalFuture<'_, Result<Box<dyn ByteStream>>> {
        let server = self.0.clone();
        server.connections.set(server.connections.get() + 1);
        let options = StreamOptions { capacity: 4096, ..StreamOptions::default() };
        let (ours, theirs) = stream_pair(&server.world, &options);
        drop(self.0.world.spawner().spawn(async move { drop(serve(&server, &theirs).await) }));
        Box::pin(std::future::ready(Ok(Box::new(ours) as Box<dyn ByteStream>)))
    }
}

fn reply(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    let magic = 0x0003_e889_0455_65a9_u64.to_be_bytes();
    let len = u32::try_from(data.len()).unwrap().to_be_bytes();
    [&magic[..], &option.to_be_bytes(), &kind.to_be_bytes(), &len, data].concat()
}

async fn exactly(stream: &SimStream, len: usize) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    while bytes.len() < len {
        let (buffer, count) = stream.read(Buffer::zeroed(len - bytes.len())).await?;
        if count == 0 {
            return Err(vellum_core::Error::new(ErrorKind::Closed, "the client has gone"));
        }
        bytes.extend_from_slice(&buffer.slice()[..count]);
    }
    Ok(bytes)
}

async fn serve(server: &Server, stream: &SimStream) -> Result<()> {
    let send = |bytes: Vec<u8>| stream.write_all(Buffer::copy_of(&bytes));
    send(b"NBDMAGICIHAVEOPT\0\x03".to_vec()).await?;
    exactly(stream, 4).await?;
    loop {
        let head = exactly(stream, 16).await?;
        let [option, len] = [8, 12].map(|at| u32::from_be_bytes(head[at..at + 4].try_into().unwrap()));
        exactly(stream, len as usize).await?;
        match option {
            7 => {
                // A mebibyte that is read-only.
                send(reply(7, 3, &[0, 0, 0, 0, 0, 0, 0, 16, 0, 0, 0, 3])).await?;
                send(reply(7, 1, &[])).await?;
                break;
            }
            8 => send(reply(8, 1, &[])).await?,
            other => send(reply(other, (1 << 31) + 1, &[])).await?,
        }
    }
    loop {
        let request = exactly(stream, 28).await?;
        if request[7] != 0 {
            return Ok(());
        }
        for left in (0..server.chunks).rev() {
            let done = u16::from(left == 0).to_be_bytes();
            let head =
                [&0x668e_33ef_u32.to_be_bytes()[..], &done, &0x8001_u16.to_be_bytes(), &request[8..16]];
            send([&head.concat()[..], &6_u32.to_be_bytes(), &5_u32.to_be_bytes(), &[0, 0]].concat()).await?;
            server.sent.set(server.sent.get() + 1);
        }
    }
}

/// What a read of such a server ends with, and the server.
fn read(chunks: u64) -> (vellum_core::Error, Rc<Server>) {
    let world = Rc::new(World::new(8));
    let server =
        Rc::new(Server { world: world.clone(), chunks, connections: Cell::default(), sent: Cell::default() });
    let error = world.run(async {
        let (opening, client) = prepare("nbd://sim/disk".into(), "disk".into(), ClientOptions::default());
        let (dialer, clock) = (Dialer(server.clone()), world.clock());
        drop(world.spawner().spawn(async move { client.run(&dialer, &*clock).await }));
        let storage: Arc<NbdStorage> = opening.opened().await.unwrap();
        storage.read(ImageOffset::ZERO, Buffer::for_overwrite(512)).await.expect_err("no bytes have come")
    });
    (error, server)
}

#[test]
fn errors_without_end_are_not_an_answer() {
    // What a server may say of one request.
    let (error, server) = read(1024);
    assert!(error.chain().contains("fails a read with NBD error 5"), "{}", error.chain());
    assert_eq!((server.connections.get(), server.sent.get()), (1, 1024));
    for chunks in [1025, 1 << 20] {
        let (error, server) = read(chunks);
        assert!(error.chain().contains("says too often why a request has failed"), "{}", error.chain());
        let (connections, sent) = (server.connections.get(), server.sent.get());
        assert!(connections > 1, "it is asked again");
        // Those that were on the way when the client had enough are in the stream, which holds few.
        assert!(sent <= connections * (1025 + 4096 / 26 + 1), "{sent} on {connections} connections");
    }
}
