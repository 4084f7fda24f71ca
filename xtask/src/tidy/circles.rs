//! Rules for the modules of a crate: no two files use one another, except the circles listed here.
//!
//! An arrow is a path that begins with `crate::`, `super::` or `self::` and leads into another file. Paths to
//! a module's own ancestors and descendants are no arrows: a folder's `mod.rs` has what its files share and
//! uses them. The tests at the end of a file are left out, and so is what a name re-exported
//! elsewhere hides: this finds circles that are written, not all there are.

use std::collections::{BTreeMap, BTreeSet};

use super::{Complaint, File, complaint};

/// The circles that there are; each by the names of its files in the crate's `src`, sorted. New ones are not
/// added here: the part that both files need goes into a third.
const KNOWN: [(&str, &[&str]); 3] = [
    // Halves of one thing.
    ("vellum-io", &["driver", "timer", "worker"]),
    ("vellum-io", &["file/gate", "file/handle"]),
    ("vellum-sim", &["alarm", "world"]),
];

/// The arrows of one crate: from a module to those it uses. A module is its path inside the crate.
type Arrows<'a> = BTreeMap<Vec<&'a str>, BTreeSet<Vec<&'a str>>>;

/// Circles in any crate that are not known, and known ones that are gone.
pub(super) fn check(files: &[File]) -> Vec<(String, Complaint)> {
    let mut crates: BTreeMap<&str, BTreeMap<Vec<&str>, &str>> = BTreeMap::new();
    for file in files {
        if let Some((name, module)) = module_of(&file.path) {
            crates.entry(name).or_default().insert(module, &file.text);
        }
    }
    let mut found = Vec::new();
    for (name, modules) in &crates {
        for circle in circles(&arrows(modules)) {
            found.push((*name, circle));
        }
    }
    let is_known = |name: &str, circle: &[String]| {
        KNOWN.iter().any(|(known, files)| *known == name && circle.iter().eq(*files))
    };
    let new = found.iter().filter(|(name, circle)| !is_known(name, circle)).map(|(name, circle)| {
        let what = format!("these files use one another: {} (xtask/src/tidy/circles.rs)", circle.join(", "));
        (format!("crates/{name}"), complaint(0, what))
    });
    let gone = KNOWN.iter().filter(|(name, files)| {
        !found.iter().any(|(found, circle)| found == name && circle.iter().eq(*files))
    });
    let gone = gone.map(|(name, files)| {
        let what = format!("this circle is gone: {}: take it off the list", files.join(", "));
        ("xtask/src/tidy/circles.rs".to_owned(), complaint(0, format!("{name}: {what}")))
    });
    new.chain(gone).collect()
}

/// The crate and the module that a source file is.
fn module_of(path: &str) -> Option<(&str, Vec<&str>)> {
    let (name, file) = path.strip_prefix("crates/")?.split_once("/src/")?;
    let mut module: Vec<&str> = file.strip_suffix(".rs")?.split('/').collect();
    if ["mod", "lib", "main"].contains(module.last()?) {
        module.pop();
    }
    Some((name, module))
}

fn arrows<'a>(modules: &BTreeMap<Vec<&'a str>, &'a str>) -> Arrows<'a> {
    let mut arrows = Arrows::new();
    for (module, text) in modules {
        let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
        let used = paths(code).into_iter().filter_map(|path| {
            let mut full = absolute(module, &path)?;
            // The longest part of the path that is a file; the rest is names in it.
            while !modules.contains_key(&full) {
                full.pop()?;
            }
            let is_kin = full.starts_with(module) || module.starts_with(&full);
            (!is_kin).then_some(full)
        });
        arrows.insert(module.clone(), used.collect());
    }
    arrows
}

/// A path from the root of the crate.
fn absolute<'a>(module: &[&'a str], path: &[&'a str]) -> Option<Vec<&'a str>> {
    let mut full = match *path.first()? {
        "crate" => Vec::new(),
        "super" | "self" => module.to_vec(),
        _ => return None,
    };
    for part in path {
        match *part {
            "crate" | "self" => {}
            "super" => drop(full.pop()?),
            name => full.push(name),
        }
    }
    Some(full)
}

/// All paths in the code that begin inside the crate, groups in braces taken apart.
fn paths(code: &str) -> Vec<Vec<&str>> {
    let mut paths = Vec::new();
    for start in ["crate::", "super::", "self::"] {
        for (at, _) in code.match_indices(start) {
            let before = &code[..at];
            let line = before.rsplit('\n').next().unwrap_or_default();
            let is_name = before.ends_with(|letter: char| letter.is_alphanumeric() || "_:".contains(letter));
            if !is_name && !line.contains("//") {
                tree(&code[at..], &mut Vec::new(), &mut paths);
            }
        }
    }
    paths
}

/// Follows a path, and the group at its end. Returns what is behind it.
fn tree<'a>(mut text: &'a str, prefix: &mut Vec<&'a str>, paths: &mut Vec<Vec<&'a str>>) -> &'a str {
    let depth = prefix.len();
    loop {
        let end = text.find(|letter: char| !letter.is_alphanumeric() && letter != '_').unwrap_or(text.len());
        if end > 0 {
            prefix.push(&text[..end]);
        }
        text = &text[end..];
        let Some(rest) = text.strip_prefix("::") else { break };
        text = rest;
        if let Some(mut rest) = text.strip_prefix('{') {
            loop {
                rest = tree(rest.trim_start(), prefix, paths).trim_start();
                match rest.strip_prefix(',') {
                    Some(more) if !more.trim_start().starts_with('}') => rest = more,
                    _ => break,
                }
            }
            prefix.truncate(depth);
            return rest.trim_start_matches([',', ' ', '\n']).strip_prefix('}').unwrap_or(rest);
        }
    }
    paths.push(prefix.clone());
    prefix.truncate(depth);
    text
}

/// The groups of modules each of which can be reached from each other, by their file names, sorted.
fn circles(arrows: &Arrows<'_>) -> Vec<Vec<String>> {
    let reach: BTreeMap<_, _> = arrows.keys().map(|from| (from, reachable(arrows, from))).collect();
    let mut circles = BTreeSet::new();
    for from in arrows.keys() {
        let circle: Vec<String> = arrows
            .keys()
            .filter(|to| reach[from].contains(*to) && reach[*to].contains(from))
            .map(|module| module.join("/"))
            .collect();
        if circle.len() > 1 {
            circles.insert(circle);
        }
    }
    circles.into_iter().collect()
}

fn reachable<'a, 'b>(arrows: &'b Arrows<'a>, from: &Vec<&'a str>) -> BTreeSet<&'b Vec<&'a str>> {
    let mut seen = BTreeSet::new();
    let mut open: Vec<_> = arrows.get(from).into_iter().flatten().collect();
    while let Some(module) = open.pop() {
        if seen.insert(module) {
            open.extend(arrows.get(module).into_iter().flatten());
        }
    }
    seen
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, text: &str) -> File {
        File { path: path.to_owned(), text: text.to_owned() }
    }

    fn found(files: &[File]) -> Vec<String> {
        let found = check(files).into_iter().filter(|(place, _)| place.starts_with("crates/"));
        found.map(|(place, complaint)| format!("{place}: {}", complaint.what)).collect()
    }

    #[test]
    fn files_that_use_one_another_are_found() {
        let one = "use std::io;\nuse crate::{\n    a::{B, c},\n    two::{Two, more},\n};\n";
        let two = "pub fn f() -> crate::three::T { g() }\n";
        let three = "use super::one;\n// super::four is only spoken of\n";
        let four = "use super::one::One;\n#[cfg(test)]\nmod tests {\n    use super::two;\n}\n";
        let all = [("one", one), ("two", two), ("three", three), ("four", four)];
        let files = all.map(|(name, text)| file(&format!("crates/x/src/{name}.rs"), text));
        let found = found(&files);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(
            found[0].starts_with("crates/x: these files use one another: one, three, two ("),
            "{found:?}"
        );
    }

    #[test]
    fn a_folder_and_its_files_are_one_thing() {
        let files = [
            file("crates/x/src/lib.rs", "mod a;\nuse self::a::A;\n"),
            file("crates/x/src/a/mod.rs", "mod b;\nuse self::b::B;\n"),
            file("crates/x/src/a/b.rs", "use super::A;\nuse crate::Root;\nuse not_crate::a;\n"),
        ];
        assert!(found(&files).is_empty());
    }

    #[test]
    fn a_circle_that_is_gone_is_taken_off_the_list() {
        assert_eq!(check(&[]).len(), KNOWN.len());
    }
}
