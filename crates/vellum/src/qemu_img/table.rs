//! Every option of every command of `qemu-img` 10.0, and what becomes of it here.
//!
//! The rows are also those of docs/guide/qemu-img.md.

use crate::getopt;

/// One command.
pub(crate) struct Command {
    pub(crate) name: &'static str,
    /// The command of ours that does it; empty where there is none.
    pub(crate) ours: &'static str,
    pub(crate) usage: &'static str,
    /// What is the same, better or missing, for people.
    pub(crate) note: &'static str,
    /// Operands may begin with a minus and a digit.
    pub(crate) has_sizes: bool,
    own: &'static [OptionRow],
    common: &'static [&'static OptionRow],
}

/// One option.
#[derive(Debug)]
pub(crate) struct OptionRow {
    pub(crate) short: Option<char>,
    pub(crate) long: &'static str,
    /// Older names, and those of other versions.
    pub(crate) also: &'static [&'static str],
    pub(crate) value: bool,
    pub(crate) means: Meaning,
    /// What is different, or why it is not there.
    pub(crate) why: &'static str,
}

/// What becomes of an option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Meaning {
    /// This option of ours.
    Same(&'static str),
    /// It is accepted, and changes neither what is written nor what is answered.
    Aside,
    /// A cache mode: `none` and `directsync` bypass the page cache.
    Cache,
    /// Several options of ours, or none by default: as it is shown.
    Own(&'static str),
    /// It is refused.
    Refused,
}

impl Command {
    /// All of its options, in the order in which they are listed.
    pub(crate) fn options(&self) -> impl Iterator<Item = &'static OptionRow> {
        self.own.iter().chain(self.common.iter().copied())
    }
}

impl getopt::Named for OptionRow {
    fn short(&self) -> Option<char> {
        self.short
    }

    fn long(&self) -> (&'static str, &'static [&'static str]) {
        (self.long, self.also)
    }

    fn has_value(&self) -> bool {
        self.value
    }
}

impl OptionRow {
    /// The name by which messages call it.
    pub(crate) fn name(&self) -> String {
        match self.short {
            Some(letter) => format!("-{letter}"),
            None => format!("--{}", self.long),
        }
    }

    /// All of its names, as help shows them.
    pub(crate) fn shown(&self) -> String {
        let names = self.short.map(|letter| format!("-{letter}"));
        let names = names.into_iter().chain((!self.long.is_empty()).then(|| format!("--{}", self.long)));
        names.collect::<Vec<_>>().join(", ")
    }
}

pub(crate) const fn flag(
    short: Option<char>,
    long: &'static str,
    means: Meaning,
    why: &'static str,
) -> OptionRow {
    OptionRow { short, long, also: &[], value: false, means, why }
}

pub(crate) const fn with(
    short: Option<char>,
    long: &'static str,
    means: Meaning,
    why: &'static str,
) -> OptionRow {
    OptionRow { short, long, also: &[], value: true, means, why }
}

const fn also(opt: OptionRow, also: &'static [&'static str]) -> OptionRow {
    OptionRow { also, ..opt }
}

use Meaning::{Aside, Cache, Own, Refused, Same};

static QUIET: OptionRow = flag(Some('q'), "quiet", Same("--quiet"), "");
static FORMAT: OptionRow = with(Some('f'), "format", Same("--format"), "");
static IMAGE_OPTS: OptionRow =
    flag(None, "image-opts", Same("--image-opts"), "drivers and keys: [names](#names-of-images)");
static NAMED_BY_KEYS: OptionRow = flag(
    None,
    "image-opts",
    Own("`--format`"),
    "the path and the format of the image: [names](#names-of-images)",
);
static SHARE: OptionRow = flag(Some('U'), "force-share", Same("--force-share"), "");
static OBJECT: OptionRow = with(
    None,
    "object",
    Same("--object"),
    "the kinds secret: file=, and env= and fd= besides, not data=; tls-creds-x509 with endpoint=client: dir=, verify-peer=",
);
static NO_OBJECT: OptionRow = with(None, "object", Refused, "this command opens no encrypted data");
static OUTPUT: OptionRow = with(None, "output", Same("--output"), "");
static PROGRESS: OptionRow =
    flag(Some('p'), "progress", Same("--progress"), "a bar on a terminal; SIGUSR1 too");
static WRITE_CACHE: OptionRow =
    with(Some('t'), "cache", Cache, "none: `--direct`; otherwise all is durable when the command ends");
static READ_CACHE: OptionRow = with(Some('T'), "cache", Aside, "the page cache is used");

static READS: &[&OptionRow] = &[&FORMAT, &IMAGE_OPTS, &SHARE, &OBJECT, &OUTPUT];

/// The commands, in the order of QEMU's help.
pub(crate) static COMMANDS: &[Command] = &[
    Command {
        name: "amend",
        ours: "amend",
        usage: "[OPTIONS] -o OPTIONS FILE",
        note: "`vellum key` changes keys, too, and lists them; `vellum resize` changes the size, `vellum rebase -u` the name of the backing \
               image",
        has_sizes: false,
        own: &[
            with(
                Some('o'),
                "options",
                Same("--options"),
                "compat, lazy_refcounts, refcount_bits; encrypt.state and the others for keys; `help` lists them",
            ),
            flag(None, "force", Refused, "no key in use is overwritten, and the last one is never removed"),
            flag(Some('p'), "progress", Aside, "nothing is printed"),
            flag(Some('q'), "quiet", Aside, "nothing is printed"),
            with(Some('t'), "cache", Aside, "all is durable when the command ends"),
        ],
        common: &[&FORMAT, &NAMED_BY_KEYS, &OBJECT],
    },
    Command {
        name: "bench",
        ours: "bench",
        usage: "[OPTIONS] FILE",
        note: "the same lines, and `--output json`",
        has_sizes: false,
        own: &[
            with(Some('c'), "count", Same("--count"), ""),
            with(Some('d'), "depth", Same("--depth"), ""),
            with(Some('o'), "offset", Same("--offset"), ""),
            with(Some('s'), "buffer-size", Same("--buffer-size"), ""),
            with(Some('S'), "step-size", Same("--step-size"), ""),
            flag(Some('w'), "write", Same("--write"), ""),
            with(None, "pattern", Same("--pattern"), ""),
            with(None, "flush-interval", Same("--flush-interval"), ""),
            flag(None, "no-drain", Same("--no-drain"), ""),
            with(Some('t'), "cache", Cache, "none: `--direct`"),
            with(Some('i'), "aio", Aside, "io_uring, or threads where there is none"),
            flag(Some('n'), "native", Aside, "io_uring, or threads where there is none"),
        ],
        common: &[&QUIET, &FORMAT, &IMAGE_OPTS, &SHARE],
    },
    Command {
        name: "bitmap",
        ours: "bitmap",
        usage: "[--add | --remove | --clear | --enable | --disable | --merge SOURCE]... [OPTIONS] FILE BITMAP",
        note: "all of a command line is done at once: a crash leaves the bitmaps as they were or as they were to be",
        has_sizes: false,
        own: &[
            flag(None, "add", Same("--add"), ""),
            flag(None, "remove", Same("--remove"), ""),
            flag(None, "clear", Same("--clear"), ""),
            flag(None, "enable", Same("--enable"), ""),
            flag(None, "disable", Same("--disable"), ""),
            with(None, "merge", Same("--merge"), ""),
            with(Some('g'), "granularity", Same("--granularity"), ""),
            with(Some('b'), "source-file", Same("--source-file"), ""),
            with(Some('F'), "source-format", Same("--source-format"), ""),
        ],
        common: &[&FORMAT, &NAMED_BY_KEYS, &NO_OBJECT],
    },
    Command {
        name: "check",
        ours: "check",
        usage: "[OPTIONS] FILE",
        note: "the same exit codes (0, 1, 2, 3, 63) and JSON; an image that was not closed is replayed by `-r`",
        has_sizes: false,
        own: &[
            with(Some('r'), "repair", Same("--repair"), ""),
            with(Some('T'), "cache", Aside, "the page cache is used"),
        ],
        common: &[&QUIET, &FORMAT, &IMAGE_OPTS, &SHARE, &OBJECT, &OUTPUT],
    },
    Command {
        name: "commit",
        ours: "commit",
        usage: "[OPTIONS] FILE",
        note: "the image keeps what it has; it reads the same as its backing image afterwards. An interrupted commit is run again",
        has_sizes: false,
        own: &[
            with(Some('b'), "base", Same("--base"), ""),
            flag(Some('d'), "drop", Aside, "the image is never emptied"),
            with(Some('r'), "rate", Refused, "there is no limit on its rate"),
        ],
        common: &[&QUIET, &PROGRESS, &FORMAT, &WRITE_CACHE, &NAMED_BY_KEYS, &OBJECT],
    },
    Command {
        name: "compare",
        ours: "compare",
        usage: "[OPTIONS] FILE1 FILE2",
        note: "the same exit codes and lines; `-l` compares a snapshot, and `--output json`",
        has_sizes: false,
        own: &[
            also(with(Some('f'), "a-format", Same("--format"), ""), &["format"]),
            also(with(Some('F'), "b-format", Same("--second-format"), ""), &["second-format"]),
            flag(Some('s'), "strict", Same("--strict"), ""),
        ],
        common: &[&QUIET, &PROGRESS, &READ_CACHE, &IMAGE_OPTS, &SHARE, &OBJECT],
    },
    Command {
        name: "convert",
        ours: "convert",
        usage: "[OPTIONS] SOURCE... TARGET",
        note: "the target gets its name when it is complete and durable; `--level` chooses how hard `-c` compresses. Other formats than raw, qcow2 and vellum are \
               only read (exit code 1)",
        has_sizes: false,
        own: &[
            also(with(Some('f'), "source-format", Same("--format"), ""), &["format"]),
            also(with(Some('O'), "target-format", Same("--target-format"), ""), &["output-format"]),
            also(
                with(Some('o'), "target-options", Same("--options"), "the options of `vellum create`"),
                &["options"],
            ),
            also(
                with(
                    Some('l'),
                    "source-snapshot",
                    Same("--snapshot"),
                    "an ID or a name; snapshot.id= of qcow2 images",
                ),
                &["snapshot"],
            ),
            flag(Some('c'), "compress", Same("--compress"), ""),
            with(Some('S'), "sparse-size", Same("--sparse-size"), "a multiple of 512 up to 16M"),
            also(
                with(Some('m'), "parallel", Same("--parallel"), "1 to 16; `vellum` takes 1 to 64"),
                &["num-coroutines"],
            ),
            also(flag(Some('W'), "oob-writes", Same("--out-of-order"), ""), &["unordered"]),
            flag(Some('n'), "no-create", Same("--no-create"), ""),
            flag(None, "target-is-zero", Same("--target-is-zero"), ""),
            with(Some('r'), "rate", Same("--rate"), ""),
            flag(None, "salvage", Same("--salvage"), ""),
            also(
                with(
                    Some('t'),
                    "target-cache",
                    Cache,
                    "none: `--direct`; otherwise `--target-cache`. With unsafe nothing is flushed; else, and by default, the copy is \
                     durable when the command ends. By default a raw or qcow2 target bypasses the page cache where that can be done",
                ),
                &["cache"],
            ),
            also(with(Some('T'), "source-cache", Cache, "none: `--direct`"), &["src-cache"]),
            also(
                flag(Some('C'), "copy-range-offloading", Aside, "data is read and written"),
                &["copy-range"],
            ),
            also(
                flag(
                    None,
                    "source-image-opts",
                    Same("--image-opts"),
                    "drivers and keys: [names](#names-of-images)",
                ),
                &["image-opts"],
            ),
            flag(None, "target-image-opts", Same("--target-image-opts"), "with `-n`"),
            with(
                Some('B'),
                "backing",
                Same("--backing"),
                "what reads the same in that image is not copied; not with -c, -n or -S",
            ),
            with(Some('F'), "backing-format", Same("--backing-format"), ""),
            flag(None, "bitmaps", Same("--bitmaps"), ""),
            flag(None, "skip-broken-bitmaps", Same("--skip-broken-bitmaps"), ""),
        ],
        common: &[&QUIET, &PROGRESS, &SHARE, &OBJECT],
    },
    Command {
        name: "create",
        ours: "create",
        usage: "[OPTIONS] FILE [SIZE]",
        note: "raw, qcow2, luks and vellum; other formats are refused (exit code 1), and a command that fails does not print its \
               `Formatting` line before",
        has_sizes: false,
        own: &[
            with(Some('f'), "format", Same("--format"), ""),
            with(Some('o'), "options", Same("--options"), "not nocow, extent_size_hint"),
            with(Some('b'), "backing", Same("--backing"), ""),
            with(Some('F'), "backing-format", Same("--backing-format"), ""),
            also(flag(Some('u'), "backing-unsafe", Same("--unsafe-backing"), ""), &[]),
        ],
        common: &[&QUIET, &OBJECT],
    },
    Command {
        name: "dd",
        ours: "dd",
        usage: "[OPTIONS] if=FILE of=FILE [bs=SIZE] [count=N] [skip=N]",
        note: "`count` blocks are copied after those that are skipped, as by QEMU from 10.1 on; `-O luks` is refused, as there is no option for its secret",
        has_sizes: false,
        own: &[with(Some('O'), "output-format", Same("--target-format"), "")],
        common: &[&FORMAT, &IMAGE_OPTS, &SHARE, &OBJECT],
    },
    Command {
        name: "info",
        ours: "info",
        usage: "[OPTIONS] FILE",
        note: "the same JSON, and what only this program knows besides",
        has_sizes: false,
        own: &[
            flag(Some('b'), "backing-chain", Same("--backing-chain"), ""),
            flag(None, "limits", Refused, "limits on requests are those of the host"),
        ],
        common: READS,
    },
    Command {
        name: "map",
        ours: "map",
        usage: "[OPTIONS] FILE",
        note: "the same JSON and table; `--snapshot`",
        has_sizes: false,
        own: &[
            with(Some('s'), "start-offset", Same("--start-offset"), ""),
            with(Some('l'), "max-length", Same("--max-length"), ""),
        ],
        common: READS,
    },
    Command {
        name: "measure",
        ours: "measure",
        usage: "[OPTIONS] [--size SIZE | FILE]",
        note: "the same JSON; with the journal that new images have, unless `-o journal=off`",
        has_sizes: false,
        own: &[
            also(with(Some('O'), "target-format", Same("--target-format"), ""), &["output-format"]),
            with(Some('o'), "options", Same("--options"), ""),
            with(Some('s'), "size", Same("--size"), ""),
            with(Some('l'), "snapshot", Same("--snapshot"), "an ID or a name; snapshot.id= of qcow2 images"),
        ],
        common: READS,
    },
    Command {
        name: "rebase",
        ours: "rebase",
        usage: "[OPTIONS] -b BACKING FILE",
        note: "an interrupted rebase is run again; what would ruin snapshots is refused",
        has_sizes: false,
        own: &[
            with(Some('b'), "backing", Same("--backing"), ""),
            with(Some('F'), "backing-format", Same("--backing-format"), "required with `-u`"),
            also(flag(Some('u'), "backing-unsafe", Same("--unsafe"), ""), &["unsafe"]),
            flag(Some('c'), "compress", Refused, "what is copied is stored as it is"),
            flag(Some('U'), "force-share", Refused, "an image that is changed must not be open elsewhere"),
            also(with(Some('T'), "backing-cache", Aside, "the page cache is used"), &["src-cache"]),
        ],
        common: &[&QUIET, &PROGRESS, &FORMAT, &WRITE_CACHE, &NAMED_BY_KEYS, &OBJECT],
    },
    Command {
        name: "resize",
        ours: "resize",
        usage: "[OPTIONS] FILE [+|-]SIZE",
        note: "`-f raw` is required for raw disks, because any file could be taken for one",
        has_sizes: true,
        own: &[
            flag(None, "shrink", Same("--shrink"), ""),
            with(None, "preallocation", Same("--preallocation"), "qcow2 and raw"),
        ],
        common: &[&QUIET, &FORMAT, &NAMED_BY_KEYS, &OBJECT],
    },
    Command {
        name: "snapshot",
        ours: "snapshot",
        usage: "[-l | -c NAME | -a NAME | -d NAME] FILE",
        note: "the options are also commands: `vellum snapshot list`, `create`, `revert`, `delete`, and `rename`",
        has_sizes: false,
        own: &[
            flag(Some('l'), "list", Same("--list"), ""),
            with(Some('c'), "create", Same("--create"), ""),
            with(Some('a'), "apply", Same("--apply"), ""),
            with(Some('d'), "delete", Same("--delete"), ""),
            with(Some('f'), "format", Same("--format"), ""),
        ],
        common: &[&QUIET, &NAMED_BY_KEYS, &SHARE, &NO_OBJECT],
    },
];
