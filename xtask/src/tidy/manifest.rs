//! Rules for Cargo.toml and Cargo.lock.

use super::{Complaint, complaint};

/// What the manifest of each crate takes from the workspace.
const FROM_WORKSPACE: [&str; 5] = ["version", "edition", "rust-version", "license", "publish"];

/// Where dependencies come from: the public registry, under the name that cargo itself has for it.
const REGISTRY: &str = "registry+https://github.com/rust-lang/crates.io-index";

pub(super) fn check(path: &str, text: &str) -> Vec<Complaint> {
    match path.rsplit('/').next() {
        Some("Cargo.lock") => check_lock(text),
        // The fuzz targets are a workspace of their own, and compiled in another way.
        Some("Cargo.toml") if path != "Cargo.toml" && !path.starts_with("fuzz/") => check_crate(text),
        Some("config.toml") => check_config(text),
        _ => Vec::new(),
    }
}

fn check_crate(text: &str) -> Vec<Complaint> {
    let mut complaints = Vec::new();
    for key in FROM_WORKSPACE {
        if value(text, "[package]", &format!("{key}.workspace")) != Some("true") {
            complaints.push(complaint(0, format!("`{key}.workspace = true` is missing")));
        }
    }
    if value(text, "[lints]", "workspace") != Some("true") {
        complaints.push(complaint(0, "the lints of the workspace are missing: `[lints] workspace = true`"));
    }
    if value(text, "[package]", "description").is_none_or(|value| value.trim_matches('"').is_empty()) {
        complaints.push(complaint(0, "the crate has no description"));
    }
    complaints
}

fn check_lock(text: &str) -> Vec<Complaint> {
    let sources =
        text.lines().enumerate().filter_map(|(index, line)| Some((index, line.strip_prefix("source = ")?)));
    let foreign = sources.filter(|(_, source)| source.trim_matches('"') != REGISTRY);
    foreign
        .map(|(index, source)| complaint(index + 1, format!("{source} is not the public registry")))
        .collect()
}

/// Where one machine gets its packages from is that machine's business.
fn check_config(text: &str) -> Vec<Complaint> {
    let tables = text.lines().enumerate().filter(|(_, line)| {
        ["[source", "[registr", "[http", "[net"].iter().any(|table| line.starts_with(table))
    });
    tables
        .map(|(index, line)| complaint(index + 1, format!("{line} belongs to a machine, not to the project")))
        .collect()
}

/// The value of a key in a table, as it is written.
fn value<'a>(text: &'a str, table: &str, key: &str) -> Option<&'a str> {
    let lines = text.lines().skip_while(|line| line.trim() != table).skip(1);
    let pairs = lines.take_while(|line| !line.starts_with('[')).filter_map(|line| line.split_once('='));
    pairs
        .map(|(name, value)| (name.trim(), value.trim()))
        .find(|(name, _)| *name == key)
        .map(|(_, value)| value)
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHOLE: &str = "[package]\nname = \"a\"\ndescription = \"A\"\nversion.workspace = true\nedition.workspace = true\n\
        rust-version.workspace = true\nlicense.workspace = true\npublish.workspace = true\n\n[lints]\nworkspace = true\n";

    #[test]
    fn a_crate_takes_all_from_the_workspace() {
        assert_eq!(check("crates/a/Cargo.toml", WHOLE), []);
        for line in WHOLE.lines().filter(|line| line.contains("workspace = true") || line.starts_with("desc"))
        {
            let without = WHOLE.replacen(&format!("\n{line}\n"), "\n", 1);
            assert_eq!(check("crates/a/Cargo.toml", &without).len(), 1, "without {line}");
        }
        let elsewhere = WHOLE.replace("[lints]", "[profile]");
        assert_eq!(check("crates/a/Cargo.toml", &elsewhere).len(), 1, "in another table");
    }

    #[test]
    fn dependencies_come_from_the_public_registry() {
        let lock = format!("name = \"a\"\nsource = \"{REGISTRY}\"\n");
        assert_eq!(check("Cargo.lock", &lock), []);
        let other = lock.replace("rust-lang", "somebody");
        assert_eq!(check("Cargo.lock", &other)[0].line, 2);
    }

    #[test]
    fn settings_of_a_machine_stay_there() {
        assert_eq!(check(".cargo/config.toml", "[alias]\nxtask = \"run\"\n"), []);
        assert_eq!(check(".cargo/config.toml", "[source.x]\nregistry = \"y\"\n")[0].line, 1);
    }
}
