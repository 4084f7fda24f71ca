//! Apt: where its sources are, what it offers, and how to ask it for something.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Outcome;
use crate::shell::{output, run, target_dir};

/// A file of package sources.
#[derive(Debug, PartialEq)]
pub(crate) struct Source {
    /// Without its directory. The ending says which of the two forms it has.
    pub(crate) name: String,
    pub(crate) text: String,
}

/// A version of a package, and the suites that have it. Newest first, as apt lists them.
#[derive(Debug, PartialEq)]
pub(crate) struct Offer {
    pub(crate) version: String,
    pub(crate) suites: Vec<String>,
}

/// An apt-get that asks nothing.
pub(crate) fn get(arguments: &[&str]) -> Command {
    let mut command = Command::new("apt-get");
    command.env("DEBIAN_FRONTEND", "noninteractive").env("LC_ALL", "C");
    command.args(["-qq", "-o", "Dpkg::Use-Pty=0"]).args(arguments);
    command
}

pub(crate) fn install(packages: &[&str]) -> Outcome {
    run(get(&["install", "-y", "--no-install-recommends"]).args(packages))
}

/// The name of the Debian release, such as `bookworm`.
pub(crate) fn codename() -> Result<String, String> {
    let text = fs::read_to_string("/etc/os-release").map_err(|error| format!("/etc/os-release: {error}"))?;
    let name = text.lines().find_map(|line| line.strip_prefix("VERSION_CODENAME="));
    name.map(|name| name.trim_matches('"').to_owned()).ok_or_else(|| "the system has no codename".to_owned())
}

/// The files apt reads: `sources.list`, and those of `sources.list.d` whose name has an ending it knows.
pub(crate) fn installed_sources() -> Vec<Source> {
    let etc = Path::new("/etc/apt");
    let parts =
        fs::read_dir(etc.join("sources.list.d")).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut paths: Vec<_> = [etc.join("sources.list")].into_iter().chain(parts).collect();
    paths.retain(|path| path.extension().is_some_and(|ending| ending == "list" || ending == "sources"));
    paths.sort();
    let read = |path: &Path| {
        let name = path.file_name()?.to_str()?.to_owned();
        Some(Source { name, text: fs::read_to_string(path).ok()? })
    };
    paths.iter().filter_map(|path| read(path)).collect()
}

/// A source of backports like the one that has the release itself: the same server, the same key.
pub(crate) fn derive_backports(source: &Source, codename: &str) -> Option<Source> {
    let suite = format!("{codename}-backports");
    if source.name.ends_with(".sources") {
        let stanza = source.text.split("\n\n").find_map(|stanza| derive_stanza(stanza, codename, &suite))?;
        Some(Source { name: "vellum-backports.sources".to_owned(), text: stanza })
    } else {
        let line = source.text.lines().find_map(|line| derive_line(line, codename, &suite))?;
        Some(Source { name: "vellum-backports.list".to_owned(), text: line })
    }
}

/// The form of many lines, one field each; a line that begins with a blank continues the field above.
fn derive_stanza(stanza: &str, codename: &str, suite: &str) -> Option<String> {
    let mut fields: Vec<(&str, String)> = Vec::new();
    for line in stanza.lines().filter(|line| !line.starts_with('#')) {
        if line.starts_with([' ', '\t']) {
            fields.last_mut()?.1.push_str(&format!("\n{line}"));
        } else if let Some((name, value)) = line.split_once(':') {
            fields.push((name, value.trim().to_owned()));
        }
    }
    let field = |wanted: &str| fields.iter().find(|(name, _)| name.eq_ignore_ascii_case(wanted));
    let has_word =
        |wanted, word| field(wanted).is_some_and(|(_, value)| value.split_whitespace().any(|it| it == word));
    if !has_word("Types", "deb") || !has_word("Suites", codename) || has_word("Enabled", "no") {
        return None;
    }
    let mut text = String::new();
    for (name, value) in &fields {
        let value = match name.to_ascii_lowercase().as_str() {
            "types" => "deb",
            "suites" => suite,
            _ => value,
        };
        text.push_str(&format!("{name}: {value}\n"));
    }
    Some(text)
}

/// The form of one line: `deb [option=value …] URI SUITE COMPONENT…`.
fn derive_line(line: &str, codename: &str, suite: &str) -> Option<String> {
    let rest = line.trim().strip_prefix("deb")?;
    let rest = rest.strip_prefix([' ', '\t'])?.trim_start();
    let (options, rest) = match rest.strip_prefix('[') {
        Some(rest) => rest.split_once(']')?,
        None => ("", rest),
    };
    let mut words = rest.split('#').next()?.split_whitespace();
    let (uri, _) = (words.next()?, words.next().filter(|&word| word == codename)?);
    let components: Vec<&str> = words.collect();
    let options = if options.is_empty() { String::new() } else { format!("[{}] ", options.trim()) };
    Some(format!("deb {options}{uri} {suite} {}\n", components.join(" ")))
}

/// Reads what `apt-cache policy PACKAGE` prints. What only the installed package has is no offer.
pub(crate) fn parse_policy(text: &str) -> Vec<Offer> {
    let table = text.lines().skip_while(|line| line.trim() != "Version table:").skip(1);
    let mut offers: Vec<Offer> = Vec::new();
    for line in table {
        let words: Vec<&str> = line.split_whitespace().filter(|&word| word != "***").collect();
        match words[..] {
            [version, _priority] if !version.contains('/') && !words[1].contains('/') => {
                offers.push(Offer { version: version.to_owned(), suites: Vec::new() });
            }
            [_priority, _uri, place, ..] => {
                if let (Some(offer), Some((suite, _component))) = (offers.last_mut(), place.split_once('/')) {
                    offer.suites.push(suite.to_owned());
                }
            }
            _ => {}
        }
    }
    offers.retain(|offer| !offer.suites.is_empty());
    offers
}

/// The package a package without content stands for: the first that it depends on. The options say which
/// sources, and which suite comes first.
pub(crate) fn first_dependency(package: &str, options: &[String]) -> Result<String, String> {
    let mut command = Command::new("apt-cache");
    let command = command.env("LC_ALL", "C").args(options);
    let shown = output(command.args(["show", "--no-all-versions", package]))?;
    parse_first_dependency(&shown).ok_or_else(|| format!("{package} depends on nothing"))
}

fn parse_first_dependency(shown: &str) -> Option<String> {
    let depends = shown.lines().find_map(|line| line.strip_prefix("Depends:"))?;
    depends.split([',', '(', '|']).next().map(|name| name.trim().to_owned())
}

/// A directory of package sources: the machine's own, and backports. It goes away again.
pub(crate) struct Sources(PathBuf);

impl Sources {
    pub(crate) fn with_backports(codename: &str) -> Result<Self, String> {
        let fail = |path: &Path, error: std::io::Error| format!("{}: {error}", path.display());
        let dir = target_dir().join("apt-sources");
        drop(fs::remove_dir_all(&dir));
        fs::create_dir_all(&dir).map_err(|error| fail(&dir, error))?;
        let sources = Self(dir);
        let mut found = None;
        for source in installed_sources() {
            let path = sources.0.join(&source.name);
            fs::write(&path, &source.text).map_err(|error| fail(&path, error))?;
            found = found.or_else(|| derive_backports(&source, codename));
        }
        let Source { name, text } = found.ok_or_else(|| format!("no package source names {codename}"))?;
        let path = sources.0.join(name);
        fs::write(&path, text).map_err(|error| fail(&path, error))?;
        Ok(sources)
    }

    /// The options that make apt use them.
    pub(crate) fn options(&self) -> [String; 4] {
        let parts = format!("Dir::Etc::sourceparts={}", self.0.display());
        ["-o".to_owned(), parts, "-o".to_owned(), "Dir::Etc::sourcelist=/dev/null".to_owned()]
    }
}

impl Drop for Sources {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn derive(name: &str, text: &str) -> Option<String> {
        let source = Source { name: name.to_owned(), text: text.to_owned() };
        derive_backports(&source, "sarge").map(|source| source.text)
    }

    #[test]
    fn a_stanza_keeps_server_and_key() {
        let text = "Types: deb\nURIs: http://x/security\nSuites: sarge-security\nComponents: main\n\n\
                    # a word\nTypes: deb deb-src\nURIs: http://x/d\nSuites: sarge sarge-updates\n\
                    Components: main\nSigned-By: /k.gpg\n";
        let expected =
            "Types: deb\nURIs: http://x/d\nSuites: sarge-backports\nComponents: main\nSigned-By: /k.gpg\n";
        assert_eq!(derive("debian.sources", text).as_deref(), Some(expected));
    }

    #[test]
    fn a_key_within_the_stanza_is_kept_whole() {
        let text =
            "Types: deb\nURIs: http://x/d\nSuites: sarge\nSigned-By:\n -----BEGIN\n .\n abc\n -----END\n";
        let derived = derive("debian.sources", text).expect("it names the release");
        assert!(derived.ends_with("Signed-By: \n -----BEGIN\n .\n abc\n -----END\n"), "{derived}");
    }

    #[test]
    fn what_is_switched_off_or_another_release_gives_nothing() {
        let stanza = |more: &str| format!("Types: deb\nURIs: http://x/d\nSuites: {more}\n");
        assert_eq!(derive("a.sources", &stanza("sarge\nEnabled: no")), None);
        assert_eq!(derive("a.sources", &stanza("woody")), None);
        assert_eq!(derive("a.sources", "Types: deb-src\nURIs: http://x/d\nSuites: sarge\n"), None);
        assert_eq!(derive("a.list", "# deb http://x/d sarge main\ndeb-src http://x/d sarge main\n"), None);
    }

    #[test]
    fn a_line_keeps_server_and_options() {
        let text = "deb http://x/s sarge-security main\ndeb [signed-by=/k.gpg arch=amd64] http://x/d sarge main contrib\n";
        let expected = "deb [signed-by=/k.gpg arch=amd64] http://x/d sarge-backports main contrib\n";
        assert_eq!(derive("sources.list", text).as_deref(), Some(expected));
        assert_eq!(
            derive("sources.list", "deb\thttp://x/d sarge main # mine").as_deref(),
            Some("deb http://x/d sarge-backports main\n")
        );
    }

    #[test]
    fn policy_tells_offers_from_what_is_installed() {
        let text = "\
qemu-utils:
  Installed: 1:10.0+x
  Candidate: 1:10.0+x
  Version table:
 *** 1:10.0+x 100
        100 /var/lib/dpkg/status
     1:7.2-b3 500
        500 http://x/d sarge/main amd64 Packages
        500 http://x/s sarge-security/main amd64 Packages
     5 100
        100 http://x/d sarge-backports/main amd64 Packages
";
        let offer = |version: &str, suites: &[&str]| Offer {
            version: version.to_owned(),
            suites: suites.iter().map(|&suite| suite.to_owned()).collect(),
        };
        assert_eq!(
            parse_policy(text),
            [offer("1:7.2-b3", &["sarge", "sarge-security"]), offer("5", &["sarge-backports"])]
        );
    }

    #[test]
    fn the_first_dependency_is_read_without_its_version() {
        let shown = "Package: linux-image-cloud-amd64\nDepends: linux-image-6.1-cloud-amd64 (= 6.1), x\n";
        assert_eq!(parse_first_dependency(shown).as_deref(), Some("linux-image-6.1-cloud-amd64"));
        assert_eq!(parse_first_dependency("Package: x\n"), None);
    }
}
