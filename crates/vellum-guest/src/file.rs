//! What a file system says of a file.

/// What a file system says of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileFacts {
    /// Its size in bytes.
    pub bytes: u64,
    /// When it was written last, in seconds since 1970.
    pub modified: i64,
    /// When it was read last, as far as the guest keeps that, in seconds since 1970.
    pub accessed: i64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FileKind {
    Directory,
    File,
    Link,
    Other,
}
