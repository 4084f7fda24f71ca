//! Small files that a server reads while it runs. Whatever lies there under their names, a pipe, a device or a large file, it neither
//! blocks nor takes more memory.

use std::fs::{File, OpenOptions};
use std::io::{Error, ErrorKind, Read as _, Result};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use rustix::fs::OFlags;

fn invalid(why: String) -> Error {
    Error::new(ErrorKind::InvalidData, why)
}

/// Opens it for reading, if it is a plain file; with `NOFOLLOW` among the flags, and no link.
pub(crate) fn open(path: &Path, flags: OFlags) -> Result<File> {
    let flags = i32::try_from((flags | OFlags::NONBLOCK).bits()).expect("flags of the kernel");
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(invalid("it is no plain file".to_owned())),
    }
}

/// The content of a plain file of at most this many bytes.
pub(crate) fn read_at_most(path: &Path, flags: OFlags, most: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path, flags)?.take(most + 1).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > most {
        true => Err(invalid(format!("it has more than {most} bytes"))),
        false => Ok(bytes),
    }
}
