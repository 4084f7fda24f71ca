//! The command line, as a user of `qemu-img` meets it.
//!
//! ```text
//!   about.rs     the version, completions, manual pages
//!   answers.rs   info, map, check: the same JSON and the same text as qemu-img, for the same images
//!   making.rs    create, convert, quickstart; options, sizes, and how bad ones are refused
//!   config.rs    the configuration file
//!   damage.rs    check, compare, recover: exit codes, repairs, files that are broken
//!   chains.rs    rebase and commit, with qemu-img as judge
//!   cloning.rs   many images over one template
//!   delta.rs     diff and apply
//!   encrypted.rs LUKS: images to and fro between both programs, secrets, keys
//!   encrypted_elsewhere.rs      what is only read: volumes of cryptsetup, qcow2 images of the old scheme
//!   endless.rs   NBD servers that answer without end
//!   flash.rs     images of which a flash cache holds writes
//!   flatten.rs   clones without their template
//!   foreign.rs   images of other programs: read, mapped, served, below others
//!   layout.rs    where the parts of a copy lie
//!   locks.rs     two programs and one image; references that lead out of a directory; the rule for raw disks
//!   named.rs     the program under the name qemu-img; images that are named by keys
//!   notify.rs    notifications to a service manager
//!   output.rs    closed pipes and full disks below what is printed; progress
//!   published.rs templates in stores
//!   remote.rs    images at URLs: clones of them, servers that change, fail and lie
//!   signals.rs   what ends a server and what does not: signals, a log without a reader; rights of sockets
//!   sizes.rs     measure, dd, bench, beside qemu-img
//!   sockets.rs   sockets that a service manager passes
//!   space.rs     full file systems, block devices
//!   tier.rs      disks with copies on a fast medium
//!   tier_words.rs               what commands on fast media refuse, say and leave behind
//!   trust.rs     images whose headers name files of others
//!   ublk.rs      what is said where there can be no block devices
//!   unit.rs      the unit for systemd: checked by systemd, and its command carried out
//!   vhost.rs     which disk is at which socket for virtual machines
//!   words.rs     what is refused, and how; formats of others
//! ```

#![allow(unreachable_pub, reason = "the modules of a test are its own")]

#[path = "../support/mod.rs"]
mod support;

mod about;
mod answers;
mod chains;
mod cloning;
mod compressed;
mod config;
mod damage;
mod delta;
mod durable;
mod encrypted;
mod encrypted_elsewhere;
mod endless;
mod flash;
mod flatten;
mod foreign;
mod layout;
mod locks;
mod lost;
mod luks_volumes;
mod making;
mod meant;
mod named;
mod notify;
mod output;
mod published;
mod refused_ring;
mod remote;
mod signals;
mod sizes;
mod sockets;
mod space;
mod tier;
mod tier_files;
mod tier_lost;
mod tier_words;
mod trust;
mod ublk;
mod unit;
mod vhost;
mod words;

use support::program::{Ran, vellum};

const MIB: usize = 1 << 20;

/// Runs our program, which must fail with one line on stderr that has all of these words, and say nothing
/// else.
#[track_caller]
fn refused(code: i32, words: &[&str], arguments: &[&str]) -> Ran {
    let ran = vellum(arguments);
    is_refusal(&ran, code, words, arguments);
    ran
}

#[track_caller]
fn is_refusal(ran: &Ran, code: i32, words: &[&str], arguments: &[&str]) {
    assert_eq!(ran.code, code, "{arguments:?}: {ran:?}");
    assert_eq!(ran.out, "", "stdout is for data: {arguments:?}");
    assert_eq!(ran.err.lines().count(), 1, "one line: {arguments:?}: {}", ran.err);
    assert!(ran.err.starts_with("vellum "), "{arguments:?}: {}", ran.err);
    assert!(!ran.err.contains("panicked"), "{arguments:?}: {}", ran.err);
    for word in words {
        assert!(ran.err.contains(word), "{arguments:?} does not say {word:?}: {}", ran.err);
    }
}
