//! The access rights of a server's Unix sockets (the mode and the group of their files), and those that it keeps itself.

use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use vellum_core::{Context, Error, Result};
use vellum_io::{Address, Identity};

/// The line of a user or a group in a table of the host, as fields.
fn entry(table: &str, name: &str) -> Option<Vec<String>> {
    let line_of = |text: &str| {
        let mut lines = text.lines().map(|line| line.split(':').map(str::to_owned).collect::<Vec<_>>());
        lines.find(|fields| {
            fields.first().is_some_and(|first| first == name)
                || fields.get(2).is_some_and(|number| number == name)
        })
    };
    if let Some(fields) =
        std::fs::read_to_string(format!("/etc/{table}")).ok().and_then(|text| line_of(&text))
    {
        return Some(fields);
    }
    // One of a directory service.
    let asked = Command::new("getent").args([table, "--", name]).output().ok()?;
    line_of(&String::from_utf8_lossy(&asked.stdout))
}

/// Who a server is to the host once it has started: the user, by name or number, with the groups of that user, or with
/// this group alone.
///
/// # Errors
/// `Invalid` when there is no such user or group.
pub fn identity_of(user: Option<&str>, group: Option<&str>) -> Result<Identity> {
    let group = group.map(SocketRights::group_of).transpose()?;
    let Some(user) = user else {
        return Ok(Identity { user: None, group, groups: group.into_iter().collect() });
    };
    let unknown = || Error::invalid(format!("there is no user {user:?} on this host"));
    let fields = entry("passwd", user);
    let number = |at: usize| fields.as_ref().and_then(|fields| fields.get(at)?.parse::<u32>().ok());
    let own = number(2).or_else(|| user.parse().ok()).ok_or_else(unknown)?;
    let Some(primary) = group.or_else(|| number(3)) else {
        return Err(Error::invalid(format!("user {user} has no entry on this host: give its group as well")));
    };
    let name = fields.as_ref().map_or(user, |fields| fields[0].as_str());
    let mut groups = vec![primary];
    if group.is_none() {
        let table = std::fs::read_to_string("/etc/group").unwrap_or_default();
        for fields in table.lines().map(|line| line.split(':').collect::<Vec<_>>()) {
            let is_member =
                fields.get(3).is_some_and(|members| members.split(',').any(|member| member == name));
            groups.extend(fields.get(2).and_then(|number| number.parse::<u32>().ok()).filter(|_| is_member));
        }
        groups.sort_unstable();
        groups.dedup();
    }
    Ok(Identity { user: Some(own), group: Some(primary), groups })
}

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
        entry("group", name).and_then(|fields| fields.get(2)?.parse().ok()).ok_or_else(unknown)
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
