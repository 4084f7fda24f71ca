//! The NBD client over TLS, in the simulator: against our own server, and against servers that do on the way to TLS what none may do.

use std::cell::{Cell, RefCell};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, date_time_ymd};
use vellum_core::{
    Buffer, ByteStream, ErrorKind, GuestOffset, ImageOffset, LocalFuture, MemoryDisk, Result, SharedDisk,
    Storage as _, WriteFlags, join_all,
};
use vellum_export::Shutdown;
use vellum_export::nbd::{
    Export, Exports, ServerIdentity, SessionLimits, Tls, TlsClient, TlsPolicy, serve_connection_with,
};
use vellum_remote::nbd::{ClientOptions, Dial, NbdStorage, prepare};
use vellum_sim::{SimStream, StreamOptions, World, stream_pair};

/// A directory with an authority and a server's certificate. Gone when it is dropped.
struct Certificates(PathBuf);

impl Certificates {
    fn new(name: &str, last_year: i32) -> Self {
        let path = std::env::temp_dir().join(format!("vellum-nbd-tls-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a directory");
        let mut params = CertificateParams::new(Vec::<String>::new()).expect("no names");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority =
            CertifiedIssuer::self_signed(params, KeyPair::generate().expect("a key")).expect("a CA");
        let key = KeyPair::generate().expect("a key");
        let mut params = CertificateParams::new(vec!["localhost".to_owned()]).expect("a name");
        params.not_after = date_time_ymd(last_year, 1, 1);
        let certificate = params.signed_by(&key, &authority).expect("a certificate");
        let put = |name: &str, text: String| std::fs::write(path.join(name), text).expect("a file");
        put("ca-cert.pem", authority.pem());
        put("server-cert.pem", certificate.pem());
        put("server-key.pem", key.serialize_pem());
        Self(path)
    }

    fn server(&self) -> TlsPolicy {
        TlsPolicy::Required(Tls::from_directory(&self.0, false).expect("they are right"))
    }

    fn client(&self, name: &str) -> TlsClient {
        client(Some(&self.0), name)
    }
}

fn client(directory: Option<&Path>, name: &str) -> TlsClient {
    TlsClient::new(directory, ServerIdentity::Named(name.to_owned())).expect("they are right")
}

impl Drop for Certificates {
    fn drop(&mut self) {
        drop(std::fs::remove_dir_all(&self.0));
    }
}

/// What a server does with a connection.
#[derive(Clone)]
enum Does {
    /// It serves, in this way.
    Serves(TlsPolicy),
    /// It greets, and says this once the client has asked for TLS; then it says nothing.
    Says(Vec<u8>),
}

struct Server {
    world: Rc<World>,
    exports: Exports,
    does: RefCell<Does>,
    options: StreamOptions,
    connections: Cell<u32>,
    shutdown: RefCell<Shutdown>,
    /// What clients have said in the clear to one that says something.
    heard: RefCell<Vec<u8>>,
    tls: Option<TlsClient>,
}

const LEN: u64 = 1 << 20;

impl Server {
    async fn new(world: &Rc<World>, does: Does, tls: Option<TlsClient>, options: StreamOptions) -> Rc<Self> {
        let disk: SharedDisk = MemoryDisk::new(LEN);
        disk.write(GuestOffset::new(0), Buffer::copy_of(&content()), WriteFlags::default()).await.unwrap();
        let exports = Exports::new();
        let (name, description) = ("disk".to_owned(), String::new());
        exports.add(Export { name, description, disk, read_only: false, marks: None }).unwrap();
        Rc::new(Self {
            world: world.clone(),
            exports,
            does: RefCell::new(does),
            options,
            connections: Cell::new(0),
            shutdown: RefCell::new(Shutdown::new()),
            heard: RefCell::default(),
            tls,
        })
    }

    fn cut(&self) {
        self.shutdown.replace(Shutdown::new()).cut();
    }
}

fn content() -> Vec<u8> {
    (0..u32::try_from(LEN).unwrap()).map(|at| u8::try_from(at / 7 % 251).unwrap()).collect()
}

struct Dialer(Rc<Server>);

impl Dial for Dialer {
    fn dial(&self) -> LocalFuture<'_, Result<Box<dyn ByteStream>>> {
        let server = self.0.clone();
        server.connections.set(server.connections.get() + 1);
        let (ours, theirs) = stream_pair(&server.world, &server.options);
        let does = server.does.borrow().clone();
        let work = async move {
            match does {
                Does::Serves(tls) => {
                    let (exports, shutdown) = (server.exports.clone(), server.shutdown.borrow().clone());
                    let clock = server.world.clock();
                    let limits = SessionLimits::default();
                    serve_connection_with(&tls, &theirs, &exports, &*clock, &limits, &shutdown).await;
                }
                Does::Says(bytes) => says(&server, &theirs, &bytes).await,
            }
        };
        drop(self.0.world.spawner().spawn(work));
        Box::pin(std::future::ready(Ok(Box::new(ours) as Box<dyn ByteStream>)))
    }

    fn tls(&self) -> LocalFuture<'_, Result<Option<TlsClient>>> {
        Box::pin(std::future::ready(Ok(self.0.tls.clone())))
    }
}

/// The client's flags, and its wish for TLS.
const WISH: &[u8] = b"\0\0\0\x03IHAVEOPT\0\0\0\x05\0\0\0\0";

async fn says(server: &Server, stream: &SimStream, bytes: &[u8]) {
    let send = async |bytes: &[u8]| drop(stream.write_all(Buffer::copy_of(bytes)).await);
    send(b"NBDMAGICIHAVEOPT\0\x03").await;
    let mut has_said = false;
    loop {
        if !has_said && server.heard.borrow().len() >= WISH.len() {
            has_said = true;
            send(bytes).await;
        }
        let Ok((buffer, count)) = stream.read(Buffer::zeroed(4096)).await else { return };
        if count == 0 {
            return;
        }
        server.heard.borrow_mut().extend_from_slice(&buffer.slice()[..count]);
    }
}

async fn open(server: &Rc<Server>, options: ClientOptions) -> Result<Arc<NbdStorage>> {
    let (opening, client) = prepare("nbds://sim/disk".into(), "disk".into(), options);
    let (dialer, clock) = (Dialer(server.clone()), server.world.clock());
    drop(server.world.spawner().spawn(async move { client.run(&dialer, &*clock).await }));
    opening.opened().await
}

async fn read(storage: &NbdStorage, at: u64, len: usize) -> Result<Vec<u8>> {
    storage.read(ImageOffset::new(at), Buffer::for_overwrite(len)).await.map(|buffer| buffer.to_vec())
}

/// The server is cut off while bytes of reads are on the way, without TLS's own end: what is missing is asked for again, on a connection
/// that is encrypted, too.
#[test]
fn reads_over_tls_are_whole_whenever_the_connection_is_cut_off() {
    let certificates = Certificates::new("cut", 2126);
    for seed in 0..10 {
        let world = Rc::new(World::shuffled(seed));
        let late = Duration::ZERO..=Duration::from_millis(40);
        let options = StreamOptions { capacity: 5000, fragment: true, delay: late };
        world.run(async {
            let does = Does::Serves(certificates.server());
            let server = Server::new(&world, does, Some(certificates.client("localhost")), options).await;
            let storage = open(&server, ClientOptions::default()).await.unwrap();
            let troubles = async {
                for round in 0..6_u64 {
                    world.sleep(Duration::from_millis(300 + 170 * round)).await;
                    server.cut();
                    world.sleep(Duration::from_secs(3)).await;
                }
            };
            let reads = async {
                for round in 0..12 {
                    let parts = (0..8_u64).map(|part| {
                        let storage = &storage;
                        Box::pin(async move { read(storage, part * 131_072 + round, 50_000).await })
                    });
                    for (part, answer) in join_all(parts).await.into_iter().enumerate() {
                        let start = part * 131_072 + usize::try_from(round).unwrap();
                        assert!(answer.unwrap() == content()[start..start + 50_000], "seed {seed}");
                    }
                }
            };
            futures_lite::future::zip(troubles, reads).await;
            assert!(server.connections.get() > 2, "seed {seed}: it was connected to again");
            // One that has no TLS any more is not talked to in the clear.
            *server.does.borrow_mut() = Does::Serves(TlsPolicy::Off);
            server.cut();
            let error = read(&storage, 0, 512).await.unwrap_err();
            assert!(error.chain().contains("does not talk TLS"), "{}", error.chain());
        });
    }
}

#[test]
fn writes_over_tls_arrive() {
    let certificates = Certificates::new("writes", 2126);
    let world = Rc::new(World::new(2));
    world.run(async {
        let does = Does::Serves(certificates.server());
        let tls = Some(certificates.client("localhost"));
        let server = Server::new(&world, does, tls, StreamOptions::default()).await;
        let writing = ClientOptions { read_only: false, ..ClientOptions::default() };
        let storage = open(&server, writing.clone()).await.unwrap();
        storage.write(ImageOffset::new(5), Buffer::copy_of(&[9; 300_000])).await.unwrap();
        storage.flush().await.unwrap();
        drop(storage);
        let storage = open(&server, writing).await.unwrap();
        assert_eq!(read(&storage, 4, 4).await.unwrap(), [0, 9, 9, 9]);
        assert!(read(&storage, 5, 300_000).await.unwrap() == vec![9; 300_000]);
    });
}

/// Opens once, and gives the message.
fn refused(does: Does, tls: Option<TlsClient>, options: ClientOptions) -> (String, ErrorKind, Vec<u8>) {
    let world = Rc::new(World::new(3));
    world.run(async {
        let server = Server::new(&world, does, tls, StreamOptions::default()).await;
        let error = open(&server, options).await.err().expect("it is refused");
        let heard = server.heard.borrow().clone();
        (error.chain(), error.kind(), heard)
    })
}

#[test]
fn who_is_not_the_server_that_was_meant_is_told_from_it() {
    let [ours, others, old] =
        [("ours", 2126), ("others", 2126), ("old", 2020)].map(|(name, year)| Certificates::new(name, year));
    let ca = ours.0.join("ca-cert.pem").display().to_string();
    for (server, client, words) in [
        (
            &ours,
            ours.client("other.example"),
            &["another name than other.example", "localhost", "--tls-hostname"][..],
        ),
        (&others, ours.client("localhost"), &["by no authority in", &ca]),
        (&old, old.client("localhost"), &["has expired"]),
    ] {
        let (said, kind, _) = refused(Does::Serves(server.server()), Some(client), ClientOptions::default());
        assert_eq!(kind, ErrorKind::Refused, "{said}");
        for word in words.iter().chain(&["nbds://sim/disk"]) {
            assert!(said.contains(word), "{word}: {said}");
        }
    }
    let (said, ..) = refused(Does::Serves(ours.server()), None, ClientOptions::default());
    assert!(
        said.contains("wants TLS") && said.contains("nbds:") && said.contains("--tls-certificates"),
        "{said}"
    );
}

/// A reply to `NBD_OPT_STARTTLS`.
fn reply(kind: u32, data: &[u8]) -> Vec<u8> {
    let magic = 0x0003_e889_0455_65a9_u64.to_be_bytes();
    let len = u32::try_from(data.len()).unwrap().to_be_bytes();
    [&magic[..], &5_u32.to_be_bytes(), &kind.to_be_bytes(), &len, data].concat()
}

/// What comes in the clear behind the consent is not taken for what comes inside (CVE-2021-3716).
#[test]
fn a_server_that_breaks_the_way_to_tls_hears_nothing_in_the_clear() {
    const ACK: u32 = 1;
    let ours = Certificates::new("hostile", 2126);
    let tls = || Some(ours.client("localhost"));
    let inside = [reply(ACK, b""), vec![0; 64]].concat();
    let long =
        [&0x0003_e889_0455_65a9_u64.to_be_bytes()[..], b"\0\0\0\x05\0\0\0\x01\xff\xff\xff\xff"].concat();
    let many = [reply(3, b"x").repeat(70), reply(ACK, b"")].concat();
    for (bytes, words) in [
        (inside, "unencrypted bytes follow"),
        (long, "too long"),
        (many, "too many"),
        ([reply(3, b"x"), reply(ACK, b"")].concat(), "says more than"),
        (reply(ACK, b"data"), "says more than"),
        (reply((1 << 31) + 2, b"not today"), "does not talk TLS (it says: not today)"),
        (reply(7, b"").repeat(3), "no handshake within 15 seconds"),
        (Vec::new(), "no handshake within 15 seconds"),
        (reply(ACK, b""), "no handshake within 15 seconds"),
    ] {
        let (said, _, heard) = refused(Does::Says(bytes.clone()), tls(), ClientOptions::default());
        assert!(said.contains(words), "{words}: {said}");
        assert_eq!(heard[..WISH.len()], *WISH, "{words}");
        // Behind it there is nothing, or a record of TLS.
        let rest = &heard[WISH.len()..];
        assert!(rest.is_empty() || rest.starts_with(b"\x16\x03"), "{words}: {rest:x?}");
        assert_eq!(rest.is_empty(), bytes != reply(ACK, b""), "{words}");
    }
    // What follows a little later is no record of TLS.
    let (said, ..) = refused(
        Does::Says([reply(ACK, b"")].concat()),
        tls(),
        ClientOptions::with_timeout(Duration::from_secs(3)),
    );
    assert!(said.contains("no handshake within 3 seconds"), "{said}");
}

/// The certificates are those of the moment: a client whose files are gone says which.
#[test]
fn files_that_cannot_be_used_are_named() {
    let ours = Certificates::new("files", 2126);
    let open = |name: &str| TlsClient::new(Some(&ours.0), ServerIdentity::Named(name.to_owned())).map(drop);
    open("localhost").unwrap();
    assert!(open("a b").unwrap_err().chain().contains("neither the name nor the address"));
    std::fs::write(ours.0.join("client-cert.pem"), "no certificate").unwrap();
    let said = open("localhost").unwrap_err().chain();
    assert!(said.contains("client-key.pem"), "{said}");
    std::fs::write(ours.0.join("ca-cert.pem"), "nothing").unwrap();
    let said = open("localhost").unwrap_err().chain();
    assert!(said.contains("ca-cert.pem contains no PEM certificate"), "{said}");
}
