//! What is measured: formats with their options, made and served by QEMU and by Vellum.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

use vellum_core::Result;

use crate::programs::{complaint, run};

/// The program that makes and serves an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Maker {
    /// `vellum create`, `vellum serve`.
    Vellum,
    /// `qemu-img create`, `qemu-nbd`.
    Qemu,
}

/// Whether an image has another one below it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Base {
    /// It never has one.
    Never,
    /// It is measured with one and without.
    Either,
    /// It always has one.
    Always,
}

/// How a qcow2 of Vellum makes its metadata durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Journal {
    /// Without a journal. Where `create` has the option, it is used to leave the journal out.
    Off,
    /// With a journal.
    On,
}

/// A format with options, of a program.
#[derive(Debug, Clone, Copy)]
pub struct Subject {
    /// The name in a table.
    pub name: &'static str,
    /// The program.
    pub maker: Maker,
    /// The format's name, the same for both programs.
    pub format: &'static str,
    options: &'static str,
    /// Whether it has a base.
    pub base: Base,
    journal: Journal,
}

/// One of Vellum.
pub const fn vellum(
    name: &'static str,
    format: &'static str,
    options: &'static str,
    base: Base,
    journal: Journal,
) -> Subject {
    Subject { name, maker: Maker::Vellum, format, options, base, journal }
}

/// One of QEMU.
pub const fn qemu(name: &'static str, format: &'static str, options: &'static str, base: Base) -> Subject {
    Subject { name, maker: Maker::Qemu, format, options, base, journal: Journal::Off }
}

/// Zeros are written ahead of need, in the background. How many there are depends on the time that passes.
const PREPARES: &str = "prealloc=adaptive";

/// What our native format is called. Its journal is no option: it is there when the layout or a base asks for
/// it.
pub const NATIVE: &str = "vellum";

/// All of them, ours first.
pub const SUBJECTS: [Subject; 18] = [
    vellum("vellum raw", "raw", "", Base::Never, Journal::Off),
    vellum("vellum linear", NATIVE, "layout=linear", Base::Either, Journal::Off),
    vellum("vellum table", NATIVE, "layout=table", Base::Either, Journal::Off),
    vellum("vellum zoned", NATIVE, "layout=zoned", Base::Either, Journal::Off),
    vellum("vellum zoned embed=off", NATIVE, "layout=zoned,embed=off", Base::Either, Journal::Off),
    vellum("vellum qcow2 plain", "qcow2", "", Base::Either, Journal::Off),
    vellum("vellum qcow2 extended_l2=off", "qcow2", "extended_l2=off", Base::Always, Journal::Off),
    vellum("vellum qcow2 journaled", "qcow2", "", Base::Either, Journal::On),
    vellum("vellum qcow2 prepared", "qcow2", PREPARES, Base::Never, Journal::On),
    qemu("qemu raw", "raw", "", Base::Never),
    qemu("qemu qcow2", "qcow2", "", Base::Either),
    qemu("qemu qcow2 lazy_refcounts", "qcow2", "lazy_refcounts=on", Base::Either),
    qemu("qemu qcow2 prealloc metadata", "qcow2", "preallocation=metadata", Base::Never),
    qemu("qemu qcow2 extended_l2", "qcow2", "extended_l2=on", Base::Always),
    qemu("qemu qed", "qed", "", Base::Either),
    qemu("qemu vmdk", "vmdk", "", Base::Never),
    qemu("qemu vhdx", "vhdx", "", Base::Never),
    qemu("qemu vdi", "vdi", "", Base::Never),
];

/// Vellum as it makes images.
#[derive(Debug, Clone, Copy)]
pub struct Tools<'a> {
    /// The program.
    pub vellum: &'a Path,
    /// Whether its `create` knows the option `journal`.
    pub knows_journal: bool,
}

impl<'a> Tools<'a> {
    /// Checks what this `vellum` supports, by making an image there.
    pub fn probe(vellum: &'a Path, image: &Path) -> Result<Self> {
        let mut command = create(vellum.as_os_str(), "qcow2", &["journal=off"]);
        let knows_journal = complaint(command.arg(image).arg("1M"))?.is_none();
        Ok(Self { vellum, knows_journal })
    }
}

fn create(program: &OsStr, format: &str, options: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(["create", "-q", "-f", format]);
    for option in options.iter().filter(|option| !option.is_empty()) {
        command.args(["-o", option]);
    }
    command
}

impl Subject {
    /// The command that makes an empty image; over `base`, which is raw, when there is one.
    fn making(&self, tools: Tools<'_>, image: &Path, size: u64, base: Option<&Path>) -> Command {
        let mut command = match self.maker {
            Maker::Vellum => {
                let journal = match self.journal {
                    Journal::On => "journal=on",
                    Journal::Off if tools.knows_journal && self.format == "qcow2" => "journal=off",
                    Journal::Off => "",
                };
                create(tools.vellum.as_os_str(), self.format, &[self.options, journal])
            }
            Maker::Qemu => create(OsStr::new("qemu-img"), self.format, &[self.options]),
        };
        if let Some(base) = base {
            command.arg("-b").arg(base).args(["-F", "raw"]);
        }
        command.arg(image).arg(size.to_string());
        command
    }

    /// Whether it is made with a journal that can be left out.
    pub fn has_journal(&self) -> bool {
        self.journal == Journal::On
    }

    /// Whether zeros are written ahead of need.
    pub fn prepares(&self) -> bool {
        self.options == PREPARES
    }

    /// Makes it.
    pub fn make(&self, tools: Tools<'_>, image: &Path, size: u64, base: Option<&Path>) -> Result<()> {
        run(&mut self.making(tools, image, size, base))
    }

    /// Whether snapshots are kept inside an image.
    pub fn keeps_snapshots(&self) -> bool {
        match self.format {
            NATIVE => self.options != "layout=linear",
            format => format == "qcow2",
        }
    }

    /// The command that makes one in a closed image. No qcow2 gets one from us.
    pub fn snapshot(&self, tools: Tools<'_>, image: &Path) -> Command {
        if self.format == NATIVE {
            let mut command = Command::new(tools.vellum);
            command.args(["snapshot", "create", "-f", NATIVE]).arg(image).arg("s");
            return command;
        }
        let mut command = Command::new("qemu-img");
        command.args(["snapshot", "-q", "-c", "s"]).arg(image);
        command
    }

    /// Why it cannot be measured: the error of the program that should make such an image. If a plain image
    /// of ours cannot be made, that is an error and not a reason.
    pub fn refusal(&self, tools: Tools<'_>, image: &Path) -> Result<Option<String>> {
        if self.maker == Maker::Vellum && self.journal == Journal::Off {
            return Ok(None);
        }
        complaint(&mut self.making(tools, image, 64 << 20, None))
    }
}
