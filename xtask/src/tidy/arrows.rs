//! Rules for what depends on what: crates stand in ARCHITECTURE.md in dependency order, and each uses only
//! those above it.
//!
//! Development dependencies are left out: tests use the simulator, and a crate may test itself with features.

use super::{Complaint, complaint};

/// The page with the table of crates.
pub(super) const MAP: &str = "ARCHITECTURE.md";

/// The crate that makes worlds for tests, and the crates that use it to make figures.
const SIMULATOR: &str = "vellum-sim";
const SIMULATING: [&str; 1] = ["vellum-papers"];

/// The dependencies of the crate at `path`, against the table of crates on the map.
pub(super) fn check(path: &str, manifest: &str, map: &str) -> Vec<Complaint> {
    let Some(name) = crate_of(path) else { return Vec::new() };
    let order: Vec<&str> = crates(map).collect();
    let Some(own) = order.iter().position(|known| *known == name) else {
        return vec![complaint(0, format!("{name} is missing in the table of crates of {MAP}"))];
    };
    let mut complaints = Vec::new();
    for (line, used) in dependencies(manifest) {
        match order.iter().position(|known| *known == used) {
            Some(place) if place < own => {}
            Some(_) => complaints.push(complaint(line, format!("{used} is not above {name} in {MAP}"))),
            None => complaints.push(complaint(line, format!("{used} is missing in the table of {MAP}"))),
        }
        if used == SIMULATOR && !SIMULATING.contains(&name) {
            complaints.push(complaint(line, format!("{SIMULATOR} is for tests: a development dependency")));
        }
    }
    complaints
}

/// Crates on the map that are not in the tree. `exists` takes paths from the root of the tree.
pub(super) fn check_map(path: &str, map: &str, exists: impl Fn(&str) -> bool) -> Vec<Complaint> {
    if path != MAP {
        return Vec::new();
    }
    let gone = crates(map).filter(|name| name.starts_with("vellum"));
    gone.filter(|name| !exists(&format!("crates/{name}/Cargo.toml")))
        .map(|name| complaint(0, format!("there is no crate {name}")))
        .collect()
}

/// The crate that a manifest belongs to, if it is one of the product.
fn crate_of(path: &str) -> Option<&str> {
    path.strip_prefix("crates/")?.strip_suffix("/Cargo.toml")
}

/// The crates in the table, from the top: the first cell of each row that is a name in code quotes.
fn crates(map: &str) -> impl Iterator<Item = &str> {
    map.lines().filter_map(|line| line.strip_prefix("| `")?.split_once("` |")).map(|(name, _)| name)
}

/// The product's crates among the dependencies, with their lines.
fn dependencies(manifest: &str) -> impl Iterator<Item = (usize, &str)> {
    let lines = manifest.lines().enumerate().skip_while(|(_, line)| line.trim() != "[dependencies]").skip(1);
    let own = lines.take_while(|(_, line)| !line.starts_with('['));
    own.filter_map(|(index, line)| {
        let name = line.split(['.', '=', ' ']).next()?;
        name.starts_with("vellum").then_some((index + 1, name))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "| crate | what |\n|---|---|\n| `vellum-core` | a |\n| `vellum-sim` | b |\n\
                         | `vellum-io` | c |\n| `vellum-papers` | d |\n| `xtask` | e |\n";

    fn lines(path: &str, manifest: &str) -> Vec<usize> {
        check(path, manifest, TABLE).iter().map(|complaint| complaint.line).collect()
    }

    #[test]
    fn a_crate_uses_those_above_it() {
        let io =
            "[package]\nname = \"vellum-io\"\n\n[dependencies]\nlibc = \"1\"\nvellum-core.workspace = true\n";
        assert_eq!(lines("crates/vellum-io/Cargo.toml", io), [0_usize; 0]);
        let core = "[dependencies]\nvellum-io = { workspace = true }\n";
        assert_eq!(lines("crates/vellum-core/Cargo.toml", core), [2]);
        let own = "[dependencies]\nvellum-io.workspace = true\n";
        assert_eq!(lines("crates/vellum-io/Cargo.toml", own), [2], "a circle of one");
    }

    #[test]
    fn the_simulator_is_for_tests() {
        let tests = "[dependencies]\nvellum-core = \"1\"\n[dev-dependencies]\nvellum-sim.workspace = true\n";
        assert_eq!(lines("crates/vellum-io/Cargo.toml", tests), [0_usize; 0]);
        let uses = "[dependencies]\nvellum-sim.workspace = true\n";
        assert_eq!(lines("crates/vellum-io/Cargo.toml", uses), [2]);
        assert_eq!(lines("crates/vellum-papers/Cargo.toml", uses), [0_usize; 0]);
    }

    #[test]
    fn the_table_has_all_crates_and_no_others() {
        assert_eq!(lines("crates/vellum-new/Cargo.toml", ""), [0]);
        let unknown = "[dependencies]\nvellum-new.workspace = true\n";
        assert_eq!(lines("crates/vellum-io/Cargo.toml", unknown), [2]);
        assert_eq!(lines("xtask/Cargo.toml", unknown), [0_usize; 0]);
        let gone = check_map(MAP, TABLE, |path| path != "crates/vellum-io/Cargo.toml");
        assert_eq!(gone, [complaint(0, "there is no crate vellum-io")]);
    }
}
