//! The object stores, each at the end of a slow line: moto for published templates, where it is installed, and our own server for
//! plain objects.
//!
//! moto reads an object whole for each range of it, so a plain object of some GiB in it would measure moto.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use vellum_core::{Context, Error, Result};
use vellum_lab::line::{Line, Speed};
use vellum_lab::server::{Running, first_line_of};

/// The bucket that all stores have.
pub(crate) const BUCKET: &str = "images";

enum Server {
    Moto { _running: Running },
    Own(vellum_web::Server),
}

/// A store behind a line.
pub(crate) struct Store {
    /// What to call it.
    pub(crate) name: &'static str,
    pub(crate) line: Line,
    server: Server,
    address: SocketAddr,
}

impl Store {
    /// moto, from `cargo xtask packages` or the path; our own server where there is none.
    pub(crate) fn moto_or_own(dir: &Path, speed: Speed) -> Result<Self> {
        let Some(program) = moto() else { return Self::own(speed) };
        let port = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
        let address = port.context(|| "can't find a free port")?;
        let mut command = Command::new(program);
        command.args(["-H", "127.0.0.1", "-p", &address.port().to_string()]).stdin(Stdio::null());
        let running =
            Running::start_until(command, &dir.join("moto"), || TcpStream::connect(address).is_ok())?;
        make_bucket(address)?;
        Ok(Self {
            name: "moto",
            line: Line::to(address, speed)?,
            server: Server::Moto { _running: running },
            address,
        })
    }

    /// The server of the tests.
    pub(crate) fn own(speed: Speed) -> Result<Self> {
        let server = vellum_web::Server::start();
        let address = server.address();
        Ok(Self { name: "vellum-web", line: Line::to(address, speed)?, server: Server::Own(server), address })
    }

    /// Puts a file there, which must not change meanwhile.
    pub(crate) fn put_file(&self, key: &str, file: &Path) -> Result<()> {
        let Server::Own(server) = &self.server else {
            return Err(Error::unsupported("files are put into our own server only"));
        };
        server
            .put_file(&format!("/{BUCKET}/{key}"), file)
            .context(|| format!("can't open {}", file.display()))
    }

    /// The environment of a program that uses it through the line.
    pub(crate) fn environment(&self, command: &mut Command) {
        Self::environment_at(command, self.line.address());
    }

    /// The same, past the line.
    pub(crate) fn environment_near(&self, command: &mut Command) {
        Self::environment_at(command, self.address);
    }

    fn environment_at(command: &mut Command, address: SocketAddr) {
        command.env("AWS_ENDPOINT_URL", format!("http://{address}")).env("AWS_REGION", "us-east-1");
        command.env("AWS_ACCESS_KEY_ID", "key").env("AWS_SECRET_ACCESS_KEY", "secret");
    }
}

fn moto() -> Option<PathBuf> {
    let me = std::env::current_exe().ok()?;
    let own = me.parent()?.parent()?.join("moto/bin/moto_server");
    let program = if own.exists() { own } else { PathBuf::from("moto_server") };
    first_line_of(Command::new(&program).arg("--help")).ok().map(|_| program)
}

fn make_bucket(address: SocketAddr) -> Result<()> {
    let ask = || {
        let mut stream = TcpStream::connect(address)?;
        stream.set_read_timeout(Some(Duration::from_secs(30)))?;
        write!(stream, "PUT /{BUCKET} HTTP/1.0\r\nHost: {address}\r\nContent-Length: 0\r\n\r\n")?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer)?;
        Ok::<_, std::io::Error>(
            String::from_utf8_lossy(&answer).lines().next().unwrap_or_default().to_owned(),
        )
    };
    let status = ask().context(|| "can't make a bucket")?;
    if status.contains(" 200 ") {
        Ok(())
    } else {
        Err(Error::invalid(format!("can't make a bucket: {status}")))
    }
}
