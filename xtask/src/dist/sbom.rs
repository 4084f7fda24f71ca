//! The bill of materials: every crate that is compiled into the program, with version, licence and checksum, and what it
//! depends on. CycloneDX 1.5, as JSON.
//!
//! `cargo tree` has the crates of this target and these features; `Cargo.lock` has the checksums.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::process::Command;

use crate::shell::{cargo, output, root};

/// A crate, as it is named in the bill.
type Reference = String;

#[derive(Debug, Default, PartialEq)]
struct Bill {
    /// Each crate: name, version, licence.
    crates: BTreeMap<Reference, (String, String, String)>,
    dependencies: BTreeMap<Reference, BTreeSet<Reference>>,
}

/// The bill of the program, whose version this is.
pub(super) fn of_vellum(version: &str, epoch: &str) -> Result<String, String> {
    let tree = ["tree", "-p", "vellum", "-e", "normal", "--prefix", "depth", "--format", "\t{p}\t{l}"];
    let tree = output(cargo(&tree).args(["--locked", "--offline"]))?;
    let lock =
        std::fs::read_to_string(root().join("Cargo.lock")).map_err(|error| format!("Cargo.lock: {error}"))?;
    let at = format!("@{epoch}");
    let time = output(Command::new("date").args(["-u", "-d", &at, "+%Y-%m-%dT%H:%M:%SZ"]))?;
    Ok(json(&parse(&tree)?, &checksums(&lock), version, &time))
}

/// Lines of `cargo tree`: depth, crate, licence. A crate that was listed before has a star at its end, and no crates below.
fn parse(tree: &str) -> Result<Bill, String> {
    let mut bill = Bill::default();
    let mut above: Vec<Reference> = Vec::new();
    for line in tree.lines() {
        let bad = || format!("`cargo tree` printed a line that is not understood: {line:?}");
        let mut fields = line.split('\t');
        let depth: usize = fields.next().unwrap_or_default().trim().parse().map_err(|_| bad())?;
        let mut words = fields.next().ok_or_else(bad)?.split(' ');
        let name = words.next().ok_or_else(bad)?.to_owned();
        let version = words.next().and_then(|word| word.strip_prefix('v')).ok_or_else(bad)?.to_owned();
        let licence = fields.next().unwrap_or_default().trim_end_matches("(*)").trim();
        if licence.is_empty() {
            return Err(format!("{name} {version} names no licence"));
        }
        let reference = format!("pkg:cargo/{name}@{version}");
        above.truncate(depth);
        if let Some(parent) = above.last() {
            bill.dependencies.entry(parent.clone()).or_default().insert(reference.clone());
        }
        above.push(reference.clone());
        bill.dependencies.entry(reference.clone()).or_default();
        // An older way of writing OR.
        bill.crates.insert(reference, (name, version, licence.replace('/', " OR ")));
    }
    Ok(bill)
}

/// The checksums of the crates of the registry.
fn checksums(lock: &str) -> BTreeMap<Reference, &str> {
    let value = |entry: &'_ str, key: &str| -> Option<(usize, usize)> {
        let start = entry.find(&format!("\n{key} = \""))? + key.len() + 5;
        Some((start, start + entry[start..].find('"')?))
    };
    let entries = lock.split("[[package]]").filter_map(|entry| {
        let text = |key: &str| value(entry, key).map(|(from, to)| &entry[from..to]);
        Some((format!("pkg:cargo/{}@{}", text("name")?, text("version")?), text("checksum")?))
    });
    entries.collect()
}

fn json(bill: &Bill, checksums: &BTreeMap<Reference, &str>, version: &str, time: &str) -> String {
    let root = format!("pkg:cargo/vellum@{version}");
    let component = |reference: &str, kind: &str| {
        let Some((name, version, licence)) = bill.crates.get(reference) else { return String::new() };
        let mut text = format!("{{\"type\": {}, \"bom-ref\": {}", quoted(kind), quoted(reference));
        let _ = write!(text, ", \"name\": {}, \"version\": {}", quoted(name), quoted(version));
        if let Some(sum) = checksums.get(reference) {
            let _ = write!(text, ", \"hashes\": [{{\"alg\": \"SHA-256\", \"content\": {}}}]", quoted(sum));
        }
        let _ = write!(text, ", \"licenses\": [{{\"expression\": {}}}]", quoted(licence));
        text + &format!(", \"purl\": {}}}", quoted(reference))
    };
    let others = bill.crates.keys().filter(|reference| **reference != root);
    let components: Vec<String> =
        others.map(|reference| format!("    {}", component(reference, "library"))).collect();
    let dependencies = bill.dependencies.iter().map(|(from, to)| {
        let to: Vec<String> = to.iter().map(|reference| quoted(reference)).collect();
        format!("    {{\"ref\": {}, \"dependsOn\": [{}]}}", quoted(from), to.join(", "))
    });
    let dependencies: Vec<String> = dependencies.collect();
    format!(
        "{{\n  \"bomFormat\": \"CycloneDX\",\n  \"specVersion\": \"1.5\",\n  \"version\": 1,\n  \"metadata\": {{\n    \
         \"timestamp\": {},\n    \"component\": {}\n  }},\n  \"components\": [\n{}\n  ],\n  \"dependencies\": [\n{}\n  ]\n}}\n",
        quoted(time),
        component(&root, "application"),
        components.join(",\n"),
        dependencies.join(",\n")
    )
}

fn quoted(text: &str) -> String {
    let mut quoted = String::from("\"");
    for letter in text.chars() {
        match letter {
            '"' | '\\' => quoted.extend(['\\', letter]),
            control if control.is_control() => {
                let _ = write!(quoted, "\\u{:04x}", u32::from(control));
            }
            other => quoted.push(other),
        }
    }
    quoted + "\""
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crate_that_is_listed_twice_is_one_with_all_that_depend_on_it() {
        let tree = "0\ta v1.0.0 (/x)\tMIT\n1\tb v2.0.0\tMIT/ISC\n2\tc v3.0.0 (proc-macro)\tMIT\n1\tc v3.0.0 (proc-macro)\tMIT (*)\n";
        let bill = parse(tree).unwrap();
        let of = |name: &str| bill.dependencies[name].iter().map(String::as_str).collect::<Vec<_>>();
        assert_eq!(bill.crates.len(), 3);
        assert_eq!(bill.crates["pkg:cargo/b@2.0.0"].2, "MIT OR ISC");
        assert_eq!(of("pkg:cargo/a@1.0.0"), ["pkg:cargo/b@2.0.0", "pkg:cargo/c@3.0.0"]);
        assert_eq!(of("pkg:cargo/b@2.0.0"), ["pkg:cargo/c@3.0.0"]);
        assert!(parse("0\ta v1.0.0\t\n").unwrap_err().contains("no licence"));
        assert!(parse("[build-dependencies]\n").is_err());
    }

    #[test]
    fn checksums_are_found() {
        let lock = "version = 4\n\n[[package]]\nname = \"a\"\nversion = \"1.0.0\"\n\n[[package]]\nname = \"b\"\n\
            version = \"2.0.0\"\nsource = \"x\"\nchecksum = \"0f\"\n";
        assert_eq!(checksums(lock), BTreeMap::from([("pkg:cargo/b@2.0.0".to_owned(), "0f")]));
    }

    #[test]
    fn names_are_quoted() {
        assert_eq!(quoted("a\"b\\c\n"), "\"a\\\"b\\\\c\\u000a\"");
    }
}
