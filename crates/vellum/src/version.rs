//! What `vellum --version` prints: the program, its commit, what was built into it, the formats it knows.

use vellum_daemon::{ForeignKind, FormatKind};

/// The first line is what `-V` prints.
pub(crate) fn long() -> String {
    let version = env!("CARGO_PKG_VERSION");
    // Set by build.rs; absent in a development build, and where there is no repository.
    let commit = option_env!("VELLUM_COMMIT").unwrap_or("not recorded");
    let features: &[&str] = &[if cfg!(feature = "ublk") { "ublk" } else { "" }];
    let features: Vec<&str> = features.iter().copied().filter(|name| !name.is_empty()).collect();
    let features = if features.is_empty() { "none".to_owned() } else { features.join(", ") };
    let formats = [FormatKind::Raw, FormatKind::Qcow2, FormatKind::Native, FormatKind::Luks]
        .map(versions_of)
        .join(", ");
    let read = ForeignKind::ALL.map(ForeignKind::qemu_name).join(", ");
    format!("{version}\ncommit: {commit}\nfeatures: {features}\nformats: {formats}\nread only: {read}")
}

/// A format, and which versions of it are read and written.
fn versions_of(kind: FormatKind) -> String {
    let versions: Vec<String> = kind.format().versions().iter().map(u32::to_string).collect();
    match versions.len() {
        0 => kind.to_string(),
        1 => format!("{kind} (version {})", versions[0]),
        _ => format!("{kind} (versions {})", versions.join(" and ")),
    }
}
