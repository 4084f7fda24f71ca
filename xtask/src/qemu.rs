//! QEMU's packages, all of one version.
//!
//! A machine may have a `qemu-utils` from CODENAME-backports while its sources name only CODENAME. Then plain
//! `apt-get install qemu-system-x86` would take the release's old version and remove the installed programs.
//! So the installed version decides. If it is not offered, backports are tried, through a source derived from
//! the installed ones, in a temporary directory.
//!
//! ```text
//!   installed?  ── no ──►  whatever the sources offer
//!      │ yes, version V
//!   sources offer V?  ── yes ──►  V
//!      │ no
//!   backports offer V?  ── yes ──►  V from backports
//!      │ no
//!   the newest of backports, for all
//! ```

use std::process::Command;

use crate::Outcome;
use crate::apt::{self, Offer, Sources};
use crate::shell::{output, run};

const PACKAGES: [&str; 2] = ["qemu-system-x86", "qemu-utils"];

/// Installs all of them.
pub(crate) fn install() -> Outcome {
    let Some(installed) = installed_version("qemu-utils") else {
        return apt::install(&PACKAGES);
    };
    if policy(&[])?.iter().any(|offer| offer.version == installed) {
        return run(apt::get(&["install", "-y", "--no-install-recommends"]).args(at_version(&installed)));
    }
    let codename = apt::codename()?;
    let suite = format!("{codename}-backports");
    let sources = Sources::with_backports(&codename)?;
    run(apt::get(&["update"]).args(sources.options()))?;
    let offers = policy(&sources.options())?;
    let version =
        choose(&offers, &installed, &suite).ok_or_else(|| format!("{suite} has no {}", PACKAGES[0]))?;
    if version != installed {
        eprintln!("packages: QEMU {installed} is not offered any more; taking {version} for all of it");
    }
    let mut install = apt::get(&["install", "-y", "--no-install-recommends", "-t", &suite]);
    run(install.args(sources.options()).args(at_version(version)))
}

/// The installed version if there is one to match, else the newest of backports. Offers stand newest first.
fn choose<'a>(offers: &'a [Offer], installed: &str, suite: &str) -> Option<&'a str> {
    let same = offers.iter().find(|offer| offer.version == installed);
    let newest = || offers.iter().find(|offer| offer.suites.iter().any(|of| of == suite));
    same.or_else(newest).map(|offer| offer.version.as_str())
}

fn at_version(version: &str) -> [String; PACKAGES.len()] {
    PACKAGES.map(|package| format!("{package}={version}"))
}

fn installed_version(package: &str) -> Option<String> {
    let format = "-f=${db:Status-Status} ${Version}";
    let answer = output(Command::new("dpkg-query").args(["-W", format, package])).ok()?;
    answer.strip_prefix("installed ").map(str::to_owned)
}

/// What is offered of the program that is missing most often.
fn policy(options: &[String]) -> Result<Vec<Offer>, String> {
    let mut command = Command::new("apt-cache");
    command.env("LC_ALL", "C").args(options).args(["policy", PACKAGES[0]]);
    Ok(apt::parse_policy(&output(&mut command)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(version: &str, suites: &[&str]) -> Offer {
        Offer { version: version.to_owned(), suites: suites.iter().map(|&suite| suite.to_owned()).collect() }
    }

    #[test]
    fn the_installed_version_is_kept() {
        let offers = [offer("3", &["x-backports"]), offer("2", &["x-backports"]), offer("1", &["x"])];
        assert_eq!(choose(&offers, "2", "x-backports"), Some("2"));
        assert_eq!(choose(&offers, "1", "x-backports"), Some("1"));
    }

    #[test]
    fn a_version_that_is_gone_is_followed_by_the_newest_of_backports() {
        let offers = [offer("4", &["y"]), offer("3", &["x-backports"]), offer("1", &["x"])];
        assert_eq!(choose(&offers, "2", "x-backports"), Some("3"));
        assert_eq!(choose(&offers[2..], "2", "x-backports"), None);
    }
}
