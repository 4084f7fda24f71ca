//! Whose cost is looked at: formats with their options, made and served by QEMU and by Vellum.

use std::path::Path;
use std::process::Command;

use vellum_core::Result;

use super::workloads::Workload;
use crate::images;

/// The program that makes and serves an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Maker {
    /// `vellum create`, `vellum serve`.
    Vellum,
    /// `qemu-img create`, `qemu-nbd`.
    Qemu,
}

/// A format with options, of a program.
#[derive(Debug, Clone, Copy)]
pub(super) struct Subject {
    /// The name in a table.
    pub(super) name: &'static str,
    pub(super) maker: Maker,
    /// The format's name, the same to both programs.
    pub(super) format: &'static str,
    options: &'static str,
    alone: bool,
    on_base: bool,
}

const fn alone(name: &'static str, maker: Maker, format: &'static str, options: &'static str) -> Subject {
    Subject { name, maker, format, options, alone: true, on_base: false }
}

const fn either(name: &'static str, maker: Maker, format: &'static str, options: &'static str) -> Subject {
    Subject { name, maker, format, options, alone: true, on_base: true }
}

/// All of them, ours first.
pub(super) const SUBJECTS: [Subject; 12] = [
    alone("vellum raw", Maker::Vellum, "raw", ""),
    either("vellum qcow2", Maker::Vellum, "qcow2", ""),
    Subject { alone: false, ..either("vellum qcow2 extended_l2", Maker::Vellum, "qcow2", "extended_l2=on") },
    alone("qemu raw", Maker::Qemu, "raw", ""),
    either("qemu qcow2", Maker::Qemu, "qcow2", ""),
    either("qemu qcow2 lazy_refcounts", Maker::Qemu, "qcow2", "lazy_refcounts=on"),
    alone("qemu qcow2 prealloc metadata", Maker::Qemu, "qcow2", "preallocation=metadata"),
    Subject { alone: false, ..either("qemu qcow2 extended_l2", Maker::Qemu, "qcow2", "extended_l2=on") },
    alone("qemu qed", Maker::Qemu, "qed", ""),
    alone("qemu vmdk", Maker::Qemu, "vmdk", ""),
    alone("qemu vhdx", Maker::Qemu, "vhdx", ""),
    alone("qemu vdi", Maker::Qemu, "vdi", ""),
];

impl Subject {
    /// Whether the workload is one for it.
    pub(super) fn takes(&self, workload: &Workload) -> bool {
        if workload.on_base { self.on_base } else { self.alone }
    }

    /// Makes an empty image; over `base`, which is raw, when there is one.
    pub(super) fn make(&self, vellum: &Path, image: &Path, size: u64, base: Option<&Path>) -> Result<()> {
        let mut command = match self.maker {
            Maker::Vellum => Command::new(vellum),
            Maker::Qemu => Command::new("qemu-img"),
        };
        command.args(["create", "-q", "-f", self.format]);
        if !self.options.is_empty() {
            command.args(["-o", self.options]);
        }
        if let Some(base) = base {
            command.arg("-b").arg(base).args(["-F", "raw"]);
        }
        command.arg(image).arg(size.to_string());
        images::run(&mut command)
    }
}
