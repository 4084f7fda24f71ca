//! Which commands are compared.
//!
//! QEMU's ways are those that its manual gives for speed: writes out of order (`-W`), more requests at once (`-m`), O_DIRECT
//! (`-t none`), offload to the file system (`-C`), and its defaults.

/// Whose command it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Program {
    Vellum,
    Qemu,
}

/// A command line, run where the images are.
pub(super) struct Way {
    pub(super) program: Program,
    pub(super) line: &'static str,
    /// Files that are made durable afterwards, within the time.
    pub(super) synced: &'static str,
}

impl Way {
    /// As it is shown.
    pub(super) fn shown(&self) -> String {
        let name = match self.program {
            Program::Vellum => "vellum",
            Program::Qemu => "qemu-img",
        };
        let sync = if self.synced.is_empty() { String::new() } else { format!("; sync {}", self.synced) };
        format!("{name} {}{sync}", self.line)
    }
}

/// What is compared.
pub(super) struct Case {
    pub(super) title: &'static str,
    /// The first one is ours.
    pub(super) ways: &'static [Way],
    /// Files that a way changes, and of which each way gets a copy: from, to.
    pub(super) copies: &'static [(&'static str, &'static str)],
    /// Files that a way makes.
    pub(super) makes: &'static [&'static str],
}

const fn ours(line: &'static str) -> Way {
    Way { program: Program::Vellum, line, synced: "" }
}

const fn theirs(line: &'static str, synced: &'static str) -> Way {
    Way { program: Program::Qemu, line, synced }
}

const T: &[&str] = &["target"];

/// In the order in which they run.
pub(super) static CASES: &[Case] = &[
    Case {
        title: "convert raw to qcow2, durable",
        ways: &[
            ours("convert -q -f raw -O qcow2 disk.raw target"),
            theirs("convert -f raw -O qcow2 disk.raw target", "target"),
            theirs("convert -W -m 16 -f raw -O qcow2 disk.raw target", "target"),
            theirs("convert -W -m 16 -t none -f raw -O qcow2 disk.raw target", "target"),
        ],
        copies: &[],
        makes: T,
    },
    Case {
        title: "convert qcow2 to raw, durable",
        ways: &[
            ours("convert -q -f qcow2 -O raw disk.qcow2 target"),
            theirs("convert -f qcow2 -O raw disk.qcow2 target", "target"),
            theirs("convert -W -m 16 -f qcow2 -O raw disk.qcow2 target", "target"),
            theirs("convert -W -m 16 -t none -f qcow2 -O raw disk.qcow2 target", "target"),
        ],
        copies: &[],
        makes: T,
    },
    Case {
        title: "convert raw to qcow2, nothing flushed",
        ways: &[
            ours("convert -q -t unsafe -f raw -O qcow2 disk.raw target"),
            theirs("convert -f raw -O qcow2 disk.raw target", ""),
            theirs("convert -W -m 16 -f raw -O qcow2 disk.raw target", ""),
        ],
        copies: &[],
        makes: T,
    },
    Case {
        title: "convert qcow2 to raw, nothing flushed",
        ways: &[
            ours("convert -q -t unsafe -f qcow2 -O raw disk.qcow2 target"),
            theirs("convert -f qcow2 -O raw disk.qcow2 target", ""),
            theirs("convert -W -m 16 -f qcow2 -O raw disk.qcow2 target", ""),
        ],
        copies: &[],
        makes: T,
    },
    Case {
        title: "convert -c, zlib, its defaults",
        ways: &[
            ours("convert -q -c -f raw -O qcow2 small.raw target"),
            theirs("convert -c -f raw -O qcow2 small.raw target", "target"),
        ],
        copies: &[],
        makes: T,
    },
    Case {
        title: "convert -c, zlib, its best options",
        ways: &[
            ours("convert -q -c -f raw -O qcow2 small.raw target"),
            theirs("convert -c -W -m 8 -f raw -O qcow2 small.raw target", "target"),
            theirs("convert -c -W -m 16 -f raw -O qcow2 small.raw target", "target"),
        ],
        copies: &[],
        makes: T,
    },
    Case {
        title: "convert -c, zstd, its defaults",
        ways: &[
            ours("convert -q -c -o compression_type=zstd -f raw -O qcow2 small.raw target"),
            theirs("convert -c -o compression_type=zstd -f raw -O qcow2 small.raw target", "target"),
        ],
        copies: &[],
        makes: T,
    },
    Case {
        title: "convert -c, zstd, its best options",
        ways: &[
            ours("convert -q -c -o compression_type=zstd -f raw -O qcow2 small.raw target"),
            theirs("convert -c -W -m 8 -o compression_type=zstd -f raw -O qcow2 small.raw target", "target"),
            theirs("convert -c -W -m 16 -o compression_type=zstd -f raw -O qcow2 small.raw target", "target"),
        ],
        copies: &[],
        makes: T,
    },
    Case {
        title: "check, a full image",
        ways: &[ours("check -q -f qcow2 full.qcow2"), theirs("check -q -f qcow2 full.qcow2", "")],
        copies: &[],
        makes: &[],
    },
    Case {
        title: "check, a full image in no order",
        ways: &[ours("check -q -f qcow2 mixed.qcow2"), theirs("check -q -f qcow2 mixed.qcow2", "")],
        copies: &[],
        makes: &[],
    },
    Case {
        title: "map, a full image",
        ways: &[
            ours("map --output json -f qcow2 full.qcow2"),
            theirs("map --output=json -f qcow2 full.qcow2", ""),
        ],
        copies: &[],
        makes: &[],
    },
    Case {
        title: "map, a full image in no order, its end",
        ways: &[
            ours("map --output json -f qcow2 -s 960G mixed.qcow2"),
            theirs("map --output=json -f qcow2 -s 960G mixed.qcow2", ""),
        ],
        copies: &[],
        makes: &[],
    },
    Case {
        title: "compare raw with qcow2, the same",
        ways: &[
            ours("compare -q -f raw -F qcow2 disk.raw disk.qcow2"),
            theirs("compare -q -f raw -F qcow2 disk.raw disk.qcow2", ""),
            theirs("compare -q -T none -f raw -F qcow2 disk.raw disk.qcow2", ""),
        ],
        copies: &[],
        makes: &[],
    },
    Case {
        title: "compare raw with raw, the same",
        ways: &[
            ours("compare -q -f raw -F raw disk.raw again.raw"),
            theirs("compare -q -f raw -F raw disk.raw again.raw", ""),
        ],
        copies: &[],
        makes: &[],
    },
    Case {
        title: "commit",
        ways: &[
            ours("commit -q -f qcow2 over.qcow2"),
            theirs("commit -q -f qcow2 over.qcow2", "under.qcow2 over.qcow2"),
            theirs("commit -q -d -f qcow2 over.qcow2", "under.qcow2 over.qcow2"),
        ],
        copies: &[("disk.qcow2", "under.qcow2"), ("kept/over-under.qcow2", "over.qcow2")],
        makes: &[],
    },
    Case {
        title: "rebase onto another image",
        ways: &[
            ours("rebase -q -f qcow2 -b other.qcow2 -F qcow2 over.qcow2"),
            theirs("rebase -q -f qcow2 -b other.qcow2 -F qcow2 over.qcow2", "over.qcow2"),
        ],
        copies: &[("kept/over-disk.qcow2", "over.qcow2")],
        makes: &[],
    },
    Case {
        title: "measure, raw to qcow2",
        ways: &[
            ours("measure --output json -f raw -O qcow2 disk.raw"),
            theirs("measure --output=json -f raw -O qcow2 disk.raw", ""),
        ],
        copies: &[],
        makes: &[],
    },
    Case {
        title: "measure, qcow2 to qcow2",
        ways: &[
            ours("measure --output json -f qcow2 -O qcow2 disk.qcow2"),
            theirs("measure --output=json -f qcow2 -O qcow2 disk.qcow2", ""),
        ],
        copies: &[],
        makes: &[],
    },
    Case {
        title: "measure, a full image to qcow2",
        ways: &[
            ours("measure --output json -f qcow2 -O qcow2 full.qcow2"),
            theirs("measure --output=json -f qcow2 -O qcow2 full.qcow2", ""),
        ],
        copies: &[],
        makes: &[],
    },
];
