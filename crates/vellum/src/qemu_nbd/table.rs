//! Every option of `qemu-nbd` 10.0, and what becomes of it here.
//!
//! The rows are also those of docs/guide/qemu-nbd.md.

use crate::qemu_img::table::Meaning::{Aside, Own, Refused, Same};
use crate::qemu_img::table::{OptionRow, flag, with};

/// The options under the headings of QEMU's help.
pub(crate) static GROUPS: &[(&str, &[OptionRow])] = &[
    (
        "About the program",
        &[
            flag(Some('h'), "help", Own("the same"), "these options, and what becomes of them"),
            flag(Some('V'), "version", Own("the same"), ""),
        ],
    ),
    (
        "Connections",
        &[
            with(Some('p'), "port", Own("`--nbd tcp:HOST:PORT`"), "10809 by default"),
            with(
                Some('b'),
                "bind",
                Own("`--nbd tcp:HOST:PORT`"),
                "0.0.0.0 by default, which is warned of without TLS",
            ),
            with(
                Some('k'),
                "socket",
                Own("`--nbd unix:PATH`"),
                "the socket of a server that lives is not taken over; `--socket-mode` and `--socket-group` say who may connect",
            ),
            with(Some('e'), "shared", Same("--shared"), "1 by default; the next clients wait, as there"),
            flag(
                Some('t'),
                "persistent",
                Own("no `--exit-when-unused`"),
                "without -t the server ends with its last client",
            ),
            flag(Some('v'), "verbose", Own("`--log debug`, `--fork-verbose`"), ""),
            with(Some('x'), "export-name", Same("--export-name"), ""),
            with(Some('D'), "description", Same("--description"), ""),
            with(None, "handshake-limit", Same("--handshake-seconds"), "0 is no limit"),
        ],
    ),
    (
        "Part of the image",
        &[
            with(Some('o'), "offset", Same("--offset"), "a number of bytes; `--size` ends the part"),
            flag(Some('A'), "allocation-depth", Aside, "the context qemu:allocation-depth is always offered"),
            with(
                Some('B'),
                "bitmap",
                Same("--bitmap"),
                "the context qemu:dirty-bitmap:NAME of each other bitmap that is not inconsistent is offered too",
            ),
        ],
    ),
    (
        "General",
        &[
            flag(
                Some('L'),
                "list",
                Own("`vellum export list --nbd ADDRESS`"),
                "the same lines, also over TLS; `--output json` there",
            ),
            with(
                None,
                "object",
                Own("`--object`, `--tls-certificates`, `--tls-allow`, `--tls-access-list`"),
                "secret: file=, and env= and fd= besides, not data=; tls-creds-x509: dir=, endpoint= (client for --list, and for images named with tls-creds=), \
                 verify-peer=; authz-simple, \
                 authz-list, authz-list-file; tls-creds-psk and tls-creds-anon are refused, because the TLS library (rustls) has neither: \
                 certificates take their place",
            ),
            with(
                None,
                "tls-creds",
                Own("`--tls-certificates`, `--tls-verify-peer`"),
                "TLS is required, and client certificates unless verify-peer=off",
            ),
            with(
                None,
                "tls-authz",
                Own("`--tls-allow`, `--tls-access-list`"),
                "an id without an object is refused at once, and so is verify-peer=off, with which QEMU lets everybody in; authz-list-file, \
                 which QEMU 10.0 has in its manual only, is read again when it has changed",
            ),
            with(None, "tls-hostname", Own("`vellum export list --tls-hostname`"), "for --list, as there"),
            with(Some('T'), "trace", Aside, "`--log` says what is logged"),
            flag(None, "fork", Same("--fork"), ""),
            with(None, "pid-file", Same("--pid-file"), ""),
            with(
                None,
                "selinux-label",
                Refused,
                "the label of the socket's directory decides (`semanage fcontext`)",
            ),
        ],
    ),
    (
        "Block devices of the kernel",
        &[
            with(
                Some('c'),
                "connect",
                Own("`--nbd-device DEVICE --fork`"),
                "no socket is made unless -k, -p or -b asks for one; with -v it stays in the foreground, as there",
            ),
            flag(Some('d'), "disconnect", Own("`vellum client disconnect --device DEVICE`"), ""),
        ],
    ),
    (
        "The image",
        &[
            with(Some('f'), "format", Same("--format"), "a raw disk is written only with `-f raw`"),
            flag(Some('r'), "read-only", Same("--read-only"), ""),
            flag(
                Some('s'),
                "snapshot",
                Same("--temporary"),
                "the temporary file is in TMPDIR, else in /var/tmp; refused over an encrypted image, because it would not be encrypted",
            ),
            with(
                Some('l'),
                "load-snapshot",
                Same("--snapshot"),
                "an ID or a name; snapshot.id=, snapshot.name=",
            ),
            flag(Some('n'), "nocache", Own("`--direct`"), ""),
            with(
                None,
                "cache",
                Own("`--direct`, `--durable`"),
                "none and directsync: `--direct`; writethrough and directsync: `--durable`; unsafe is as writeback",
            ),
            with(
                None,
                "aio",
                Aside,
                "io_uring, or threads where there is none; native wants --cache=none, as there",
            ),
            with(None, "discard", Same("--discard"), "ignore by default, as there"),
            with(None, "detect-zeroes", Same("--detect-zeroes"), ""),
            flag(
                None,
                "image-opts",
                Same("--image-opts"),
                "drivers and keys: [names](qemu-img.md#names-of-images); driver=raw with offset= and size=",
            ),
        ],
    ),
];

/// All of them.
pub(crate) fn rows() -> Vec<&'static OptionRow> {
    GROUPS.iter().flat_map(|(_, rows)| rows.iter()).collect()
}
