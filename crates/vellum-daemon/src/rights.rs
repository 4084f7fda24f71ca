//! The access rights of a server's Unix sockets: the mode and the group of their files.

use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use vellum_core::{Context, Error, Result};
use vellum_io::Address;

/// What the files of sockets get when they are bound. The control socket stays its owner's alone.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SocketRights {
    /// The mode, such as 0o660; as the process's umask has it, when not given.
    pub mode: Option<u32>,
    /// The number of the group; that of the process, when not given.
    pub group: Option<u32>,
}

impl SocketRights {
    /// The group of this name, or number.
    ///
    /// # Errors
    /// `Invalid` when there is no such group.
    pub fn group_of(name: &str) -> Result<u32> {
        if let Ok(number) = name.parse() {
            return Ok(number);
        }
        let unknown = || Error::invalid(format!("there is no group {name:?} on this host"));
        let line_of = |text: &str| {
            let mut lines = text.lines().map(|line| line.split(':').collect::<Vec<_>>());
            lines.find(|fields| fields.first() == Some(&name))?.get(2)?.parse().ok()
        };
        if let Some(number) = std::fs::read_to_string("/etc/group").ok().and_then(|text| line_of(&text)) {
            return Ok(number);
        }
        // One of a directory service.
        let asked = Command::new("getent").args(["group", "--", name]).output().ok();
        asked.and_then(|output| line_of(&String::from_utf8_lossy(&output.stdout))).ok_or_else(unknown)
    }

    /// Applies them to a socket that was just bound.
    pub(crate) fn give_to(&self, address: &Address) -> Result<()> {
        let Address::Unix(path) = address else { return Ok(()) };
        if let Some(group) = self.group {
            std::os::unix::fs::chown(path, None, Some(group))
                .context(|| format!("can't change the group of {} to {group}", path.display()))?;
        }
        if let Some(mode) = self.mode {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))
                .context(|| format!("can't change the mode of {} to {mode:o}", path.display()))?;
        }
        Ok(())
    }
}
