//! The formats that are read here.

use std::fmt;
use std::path::Path;

/// A format of another program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ForeignKind {
    /// VMware's.
    Vmdk,
    /// VirtualBox's.
    Vdi,
    /// That of Virtual PC, older Hyper-V, Xen and Azure.
    Vhd,
    /// That of Hyper-V.
    Vhdx,
    /// QEMU's former experiment.
    Qed,
    /// That of Parallels.
    Parallels,
    /// That of macOS.
    Dmg,
    /// QEMU's first one.
    Qcow1,
}

impl ForeignKind {
    /// All of them.
    pub const ALL: [Self; 8] =
        [Self::Vmdk, Self::Vdi, Self::Vhd, Self::Vhdx, Self::Qed, Self::Parallels, Self::Dmg, Self::Qcow1];

    /// Its common name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Vmdk => "VMDK",
            Self::Vdi => "VDI",
            Self::Vhd => "VHD",
            Self::Vhdx => "VHDX",
            Self::Dmg => "dmg",
            Self::Qed => "QED",
            Self::Parallels => "Parallels",
            Self::Qcow1 => "qcow (version 1)",
        }
    }

    /// Its name in `qemu-img`, and on the command line.
    pub fn qemu_name(self) -> &'static str {
        match self {
            Self::Vmdk => "vmdk",
            Self::Vdi => "vdi",
            Self::Vhd => "vpc",
            Self::Vhdx => "vhdx",
            Self::Dmg => "dmg",
            Self::Qed => "qed",
            Self::Parallels => "parallels",
            Self::Qcow1 => "qcow",
        }
    }

    /// The format with this name on the command line.
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "vhd" => Some(Self::Vhd),
            _ => Self::ALL.into_iter().find(|kind| kind.qemu_name() == name),
        }
    }

    /// The format that a file's name suggests, if any. `.qcow` suggests none, because many name version 2 so.
    pub fn of_name(path: &Path) -> Option<Self> {
        match path.extension()?.to_str()?.to_ascii_lowercase().as_str() {
            "vmdk" => Some(Self::Vmdk),
            "vdi" => Some(Self::Vdi),
            "vhd" | "vpc" => Some(Self::Vhd),
            "vhdx" => Some(Self::Vhdx),
            "dmg" => Some(Self::Dmg),
            "qed" => Some(Self::Qed),
            "parallels" | "hdd" | "hds" => Some(Self::Parallels),
            _ => None,
        }
    }
}

impl fmt::Display for ForeignKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.qemu_name())
    }
}
