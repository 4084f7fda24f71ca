//! A disk served over NBD from one's own program, on a Unix socket, to a small client in another thread. Any
//! NBD client can connect: `nbdinfo`, `qemu-img`, a virtual machine.

#![expect(clippy::print_stdout, reason = "an example shows what it does")]

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use vellum_disk::nbd::{Address, Export, Exports, Listener, SessionLimits, Shutdown, serve};
use vellum_disk::{Image, IoMode, Result, run};

pub(crate) fn main() -> Result<()> {
    let dir = std::env::temp_dir().join(format!("vellum-serve-nbd-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a temporary directory");
    let (path, socket) = (dir.join("disk.qcow2"), dir.join("socket"));
    run(IoMode::Auto, async || {
        let image = Image::create(&path, 1 << 30).await?;
        let exports = Exports::new();
        exports.add(Export {
            name: "disk".to_owned(),
            description: "an example".to_owned(),
            disk: image.disk().clone(),
            read_only: false,
            marks: None,
        })?;
        let listener = Listener::bind(&Address::unix(&socket)).await?;
        println!("serving a disk of {} bytes on a Unix socket", image.size());

        // The client ends the server, however it ends itself.
        let shutdown = Shutdown::new();
        let drain = Drain(shutdown.clone());
        let client = std::thread::spawn(move || {
            let _drain = drain;
            talk(&socket)
        });
        let served = serve(&listener, &exports, &SessionLimits::default(), 16, &shutdown).await;
        let read = client.join().expect("the client has not panicked");
        image.close().await?;
        served?;
        assert_eq!(read.expect("the client was served"), *b"hello");
        println!("the client wrote and read 5 bytes, and the disk is closed");
        Ok(())
    })??;
    std::fs::remove_dir_all(&dir).expect("the directory of the example");
    Ok(())
}

/// Ends the server when it is dropped.
struct Drain(Shutdown);

impl Drop for Drain {
    fn drop(&mut self) {
        self.0.drain();
    }
}

/// The least that an NBD client can say: it chooses the export, writes, reads and disconnects. A real one
/// uses a library.
fn talk(socket: &Path) -> io::Result<[u8; 5]> {
    let mut stream = UnixStream::connect(socket)?;
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting)?;
    assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
    // The flags: fixed newstyle, and no padding behind the answer. Then option 1, the name of the export.
    stream.write_all(&[0, 0, 0, 3])?;
    stream.write_all(b"IHAVEOPT\0\0\0\x01\0\0\0\x04disk")?;
    let mut size_and_flags = [0; 10];
    stream.read_exact(&mut size_and_flags)?;
    assert_eq!(size_and_flags[..8], (1_u64 << 30).to_be_bytes());

    request(&mut stream, 1, 4096, b"hello", 5)?;
    request(&mut stream, 0, 4096, b"", 5)?;
    let mut data = [0; 5];
    stream.read_exact(&mut data)?;
    stream.write_all(&header(2, 0, 0))?;
    Ok(data)
}

/// Sends a request with its payload and receives the head of the answer.
fn request(stream: &mut UnixStream, command: u8, at: u64, payload: &[u8], len: u32) -> io::Result<()> {
    stream.write_all(&header(command, at, len))?;
    stream.write_all(payload)?;
    let mut reply = [0; 16];
    stream.read_exact(&mut reply)?;
    assert_eq!(reply[..8], [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0], "a simple reply without an error");
    Ok(())
}

/// Magic, no flags, command, no cookie, position, length.
fn header(command: u8, at: u64, len: u32) -> Vec<u8> {
    let begin = [0x25, 0x60, 0x95, 0x13, 0, 0, 0, command, 0, 0, 0, 0, 0, 0, 0, 0];
    [&begin[..], &at.to_be_bytes(), &len.to_be_bytes()].concat()
}
