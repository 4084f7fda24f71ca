//! The words in names: each is in the glossary, or an ordinary word, or one of the field's.
//!
//! ```text
//!   docs/glossary.md          the words in the first column, and the `Identifiers` beside them
//!   xtask/src/tidy/words.txt  words that need no entry there: one a line, in order
//! ```
//!
//! The names are those of items with any `pub` in the crates. They are split where the case changes and at
//! underscores. A word is also known by its stem: `claims`, `claimed` and `claiming` by `claim`.

use std::collections::BTreeSet;

use super::{Complaint, File, complaint};

const GLOSSARY: &str = "docs/glossary.md";
const LIST: &str = "xtask/src/tidy/words.txt";

/// The words from here on in the glossary are those that are not used any more.
const OLD: &str = "## Words of older notes";

/// What stands before the name of an item.
const KINDS: [&str; 9] = ["fn", "struct", "enum", "trait", "type", "const", "static", "mod", "union"];

/// What may stand between the kind of an item and its name, or instead of the name.
const MODIFIERS: [&str; 5] = ["fn", "mut", "unsafe", "async", "extern"];

/// What is wrong, each with the file and the line.
pub(super) fn check(files: &[File]) -> Vec<(String, Complaint)> {
    let text_of = |path: &str| files.iter().find(|file| file.path == path).map_or("", |file| &file.text);
    let (glossary, list) = (coined(text_of(GLOSSARY)), text_of(LIST));
    let mut complaints: Vec<_> =
        check_list(list, &glossary).into_iter().map(|wrong| (LIST.to_owned(), wrong)).collect();
    let known: BTreeSet<String> = glossary.into_iter().chain(list.lines().map(str::to_owned)).collect();
    for file in files.iter().filter(|file| is_source(&file.path)) {
        complaints
            .extend(check_names(&file.text, &known).into_iter().map(|wrong| (file.path.clone(), wrong)));
    }
    let place = |(path, wrong): (String, Complaint)| (format!("{path}:{}", wrong.line), wrong);
    complaints.into_iter().map(place).collect()
}

fn is_source(path: &str) -> bool {
    let mut parts = path.split('/');
    (parts.next(), parts.nth(1)) == (Some("crates"), Some("src")) && path.ends_with(".rs")
}

/// The words that the glossary explains.
fn coined(glossary: &str) -> BTreeSet<String> {
    let mut words = BTreeSet::new();
    let current = glossary.split(OLD).next().unwrap_or_default();
    for row in current.lines().filter_map(|line| line.strip_prefix("| ")) {
        let mut cells = row.splitn(2, " | ");
        let of_field = cells.next().unwrap_or_default();
        words.extend(of_field.split(|c: char| !c.is_alphabetic()).map(str::to_lowercase));
        let quoted = cells.next().unwrap_or_default().split('`').skip(1).step_by(2);
        let names = quoted.filter(|text| text.chars().all(|c| c.is_alphabetic() || c == '_'));
        words.extend(names.flat_map(words_of));
    }
    words.remove("");
    words
}

/// The list is in order, and has nothing that the glossary has.
fn check_list(list: &str, glossary: &BTreeSet<String>) -> Vec<Complaint> {
    let mut complaints = Vec::new();
    let mut before = "";
    for (index, word) in list.lines().enumerate() {
        if word <= before {
            complaints.push(complaint(index + 1, format!("{word:?} does not belong after {before:?}")));
        }
        if glossary.contains(word) {
            complaints.push(complaint(index + 1, format!("{word:?} is in {GLOSSARY}: remove it here")));
        }
        before = word;
    }
    complaints
}

fn check_names(text: &str, known: &BTreeSet<String>) -> Vec<Complaint> {
    let mut complaints = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let Some(name) = item(line) else { continue };
        for word in words_of(name).into_iter().filter(|word| !is_known(word, known)) {
            let why = format!(
                "{word:?} in the name {name} is in neither list: explain a coined word in {GLOSSARY}, add an \
                 ordinary one to {LIST}"
            );
            complaints.push(complaint(index + 1, why));
        }
    }
    complaints
}

/// The name of the item that begins in a line, if it has any `pub`.
fn item(line: &str) -> Option<&str> {
    let rest = line.trim_start().strip_prefix("pub")?;
    if !rest.starts_with([' ', '(']) {
        return None;
    }
    let mut tokens = rest.split_whitespace().skip_while(|token| !KINDS.contains(token));
    tokens.next()?;
    let name = tokens.find(|token| !MODIFIERS.contains(token))?;
    let end = name.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(name.len());
    Some(&name[..end])
}

/// The words of a name, in small letters.
fn words_of(name: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let letters: Vec<char> = name.chars().collect();
    for (index, &letter) in letters.iter().enumerate() {
        let follows_small = index > 0 && letters[index - 1].is_lowercase();
        let leads_small = letters.get(index + 1).is_some_and(|next| next.is_lowercase());
        if letter.is_uppercase() && (follows_small || leads_small) || !letter.is_alphabetic() {
            words.push(String::new());
        }
        if letter.is_alphabetic() {
            words.last_mut().expect("one is begun").extend(letter.to_lowercase());
        }
    }
    words.retain(|word| !word.is_empty());
    words
}

/// Whether the word, or what it is without an ending, is known.
fn is_known(word: &str, known: &BTreeSet<String>) -> bool {
    let has = |stem: &str| known.contains(stem);
    if has(word) {
        return true;
    }
    ["s", "es", "ed", "ing", "er", "ers"].iter().filter_map(|ending| word.strip_suffix(ending)).any(|stem| {
        let mut letters = stem.chars().rev();
        let is_doubled = letters.next().is_some_and(|last| letters.next() == Some(last));
        let is_y = stem.strip_suffix('i').is_some_and(|stem| has(&format!("{stem}y")));
        has(stem) || has(&format!("{stem}e")) || is_y || (is_doubled && has(&stem[..stem.len() - 1]))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# Glossary\n\n| word | meaning |\n|---|---|\n| tail, durable tail | `HomePages`, `a/b` |\n\n\
                        ## Words of older notes\n\n| relief | gone |\n";

    fn set(words: &[&str]) -> BTreeSet<String> {
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    #[test]
    fn names_are_split_into_words() {
        for (name, words) in [
            ("HomePages", &["home", "pages"][..]),
            ("IOError", &["io", "error"]),
            ("BYTES_MAX", &["bytes", "max"]),
            ("qcow2_open", &["qcow", "open"]),
            ("crc32c", &["crc", "c"]),
        ] {
            assert_eq!(words_of(name), words, "{name}");
        }
    }

    #[test]
    fn items_with_any_pub_are_found() {
        for (line, name) in [
            ("pub struct Claims<'a> {", Some("Claims")),
            ("    pub(crate) const fn zero() -> Self {", Some("zero")),
            ("pub(in crate::native) async fn seal(&self) {", Some("seal")),
            ("pub const BYTES_MAX: u64 = 1;", Some("BYTES_MAX")),
            ("pub static mut X: u8 = 0;", Some("X")),
            ("pub use journal::Journal;", None),
            ("    pub size: u64,", None),
            ("fn private() {}", None),
            ("// pub fn in_a_comment() {}", None),
            ("publish(fn_name)", None),
        ] {
            assert_eq!(item(line), name, "{line}");
        }
    }

    #[test]
    fn the_glossary_gives_words_and_identifiers_but_not_old_ones() {
        assert_eq!(coined(TEXT), set(&["word", "tail", "durable", "home", "pages"]));
    }

    #[test]
    fn a_word_is_known_by_its_stem() {
        let known = set(&["claim", "seal", "write", "stop", "carry"]);
        for word in ["claim", "claims", "claimed", "sealing", "writing", "stopped", "carried", "writers"] {
            assert!(is_known(word, &known), "{word}");
        }
        for word in ["clai", "blaim", "stopper_", "s", "ing"] {
            assert!(!is_known(word, &known), "{word}");
        }
    }

    #[test]
    fn a_word_in_neither_list_is_named_with_its_place() {
        let file = |path: &str, text: &str| File { path: path.to_owned(), text: text.to_owned() };
        let files = |list: &str| {
            [
                file(GLOSSARY, TEXT),
                file(LIST, list),
                file("crates/a/src/b.rs", "//! Text.\npub struct TailFrob;\n"),
                file("crates/a/tests/b.rs", "pub struct Whatever;\n"),
            ]
        };
        let found = check(&files("of\n"));
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].0 == "crates/a/src/b.rs:2" && found[0].1.what.contains("\"frob\""), "{found:?}");
        assert!(check(&files("frob\n")).is_empty());
        assert_eq!(check(&files("frob\na\n")).len(), 1, "not in order");
        assert_eq!(check(&files("frob\nfrob\n")).len(), 1, "twice");
        assert_eq!(check(&files("frob\ntail\n")).len(), 1, "it is in the glossary");
    }
}
