//! Rules for Markdown, and for the pages that comments in Rust name.

use super::{Complaint, complaint};

/// The list of what is in `docs/`.
const INDEX: &str = "docs/README.md";

/// Pages of other projects, which comments also name by their paths.
const ELSEWHERE: [&str; 1] = [
    // The NBD protocol, in NetworkBlockDevice/nbd.
    "doc/proto.md",
];

/// Links to files lead to files that exist.
pub(super) fn check(path: &str, text: &str, exists: impl Fn(&str) -> bool) -> Vec<Complaint> {
    let links = links(text).filter(|(_, target)| !target.contains("://") && !target.starts_with('#'));
    let broken = links.filter(|(_, target)| {
        let file = target.split('#').next().unwrap_or(target);
        !exists(&resolve(path, file))
    });
    broken.map(|(line, target)| complaint(line, format!("the link to {target} leads nowhere"))).collect()
}

/// The pages that comments in Rust name exist. A name is a path from the root.
pub(super) fn check_comments(text: &str, exists: impl Fn(&str) -> bool) -> Vec<Complaint> {
    let broken = pages(text).filter(|(_, page)| !ELSEWHERE.contains(page) && !exists(page));
    broken.map(|(line, page)| complaint(line, format!("there is no page {page}"))).collect()
}

/// Every page of `docs/` is listed.
pub(super) fn check_index(path: &str, text: &str, all: &[&str]) -> Vec<Complaint> {
    if path != INDEX {
        return Vec::new();
    }
    let listed: Vec<String> = links(text).map(|(_, target)| resolve(path, target)).collect();
    let pages =
        all.iter().filter(|page| page.starts_with("docs/") && page.ends_with(".md") && **page != INDEX);
    let unlisted = pages.filter(|page| !listed.iter().any(|listed| listed == *page));
    unlisted.map(|page| complaint(0, format!("{page} is not listed"))).collect()
}

/// The targets of `[words](target)`, outside of what is quoted as code, with their lines.
fn links(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut in_code = false;
    let lines = text.lines().enumerate().filter(move |(_, line)| {
        let is_fence = line.trim_start().starts_with("```");
        in_code ^= is_fence;
        !in_code && !is_fence
    });
    lines.flat_map(|(index, line)| {
        line.split("](").skip(1).filter_map(move |rest| Some((index + 1, rest.split_once(')')?.0)))
    })
}

/// The names of Markdown files in the comments of a Rust file, with their lines.
fn pages(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let comments = text.lines().enumerate().filter_map(|(index, line)| Some((index + 1, comment(line)?)));
    comments.flat_map(|(line, comment)| {
        let words = comment.split(|letter: char| !letter.is_ascii_alphanumeric() && !"_-./".contains(letter));
        let words = words.map(|word| word.trim_end_matches('.'));
        words
            .filter(|word| word.strip_suffix(".md").is_some_and(|stem| !stem.is_empty()))
            .map(move |word| (line, word))
    })
}

/// The comment in a line: all of it, or what stands behind the code.
fn comment(line: &str) -> Option<&str> {
    let line = line.trim_start();
    if line.starts_with("//") { Some(line) } else { Some(line.split_once(" // ")?.1) }
}

/// A path from the root for one that is written in a file.
fn resolve(from: &str, target: &str) -> String {
    let mut parts: Vec<&str> = from.split('/').collect();
    parts.pop();
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            name => parts.push(name),
        }
    }
    parts.join("/")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_followed_from_where_they_stand() {
        let exists = |path: &str| ["README.md", "docs/a.md", "docs"].contains(&path);
        let text = "[a](a.md#b) [r](../README.md) [d](../docs/)\n[x](https://github.com) [h](#here)\n";
        assert_eq!(check("docs/b.md", text, exists), []);
        let broken = check("docs/b.md", "fine\n[a](c.md) and [b](../a.md)\n", exists);
        assert_eq!(broken.iter().map(|complaint| complaint.line).collect::<Vec<_>>(), [2, 2]);
    }

    #[test]
    fn what_is_quoted_is_no_link() {
        assert_eq!(check("a.md", "```text\n[a](b)\n```\n", |_| false), []);
    }

    #[test]
    fn pages_that_comments_name_exist() {
        // The comments behind code stand here in two pieces, so that this file passes.
        let exists = |path: &str| ["README.md", "docs/a-b.md"].contains(&path);
        let fine = [
            "//! See `docs/a-b.md`.\n",
            "    /// README.md, docs/a-b.md.\n",
            concat!("let a = 1; /", "/ `docs/a-b.md`: why\n"),
            "// `doc/proto.md` of another project, and any .md\n",
            "let page = \"docs/none.md\";\n",
        ];
        assert_eq!(check_comments(&fine.concat(), exists), []);
        let broken = [
            "//! `docs/c.md` and `docs/a-b.md`\n\n",
            "    /// docs/d.md says why\n",
            concat!("let a = 1; /", "/ README.md or e.md\n"),
        ];
        let broken = check_comments(&broken.concat(), exists);
        assert_eq!(broken.iter().map(|complaint| complaint.line).collect::<Vec<_>>(), [1, 3, 4]);
        assert_eq!(check_comments("// a-b.md\n", exists), [complaint(1, "there is no page a-b.md")]);
    }

    #[test]
    fn every_page_is_listed() {
        let all = ["docs/README.md", "docs/a.md", "docs/design/b.md", "README.md", "docs/c.png"];
        assert_eq!(check_index(INDEX, "[a](a.md) [b](design/b.md)", &all), []);
        let complaints = check_index(INDEX, "[a](a.md)", &all);
        assert_eq!(complaints, [complaint(0, "docs/design/b.md is not listed")]);
        assert_eq!(check_index("README.md", "", &all), []);
    }
}
