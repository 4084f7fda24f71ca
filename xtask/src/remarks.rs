//! What the tests skipped, and why; and how much they did, where they count.
//!
//! A test that cannot do something here prints `skipped: REASON` to stderr and continues or passes. One that
//! explores prints `explored COUNTS`. The runner keeps what tests print: nextest in its JUnit report, `cargo
//! test` under `--show-output`. Both are read here.

/// A test, and what it said behind a mark.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Remark {
    pub(crate) what: String,
    pub(crate) test: String,
}

pub(crate) const SKIPPED: &str = "skipped: ";
pub(crate) const EXPLORED: &str = "explored ";

/// Reads the report of nextest: `<testcase name="…" classname="…">` … `<system-err>…</system-err>` …
/// `</testcase>`.
pub(crate) fn from_junit(text: &str, mark: &str) -> Vec<Remark> {
    let mut skips = Vec::new();
    for case in text.split("<testcase ").skip(1) {
        let (head, body) = case.split_once('>').unwrap_or((case, ""));
        let attribute = |name: &str| {
            let (_, rest) = head.split_once(&format!("{name}=\""))?;
            rest.split_once('"').map(|(value, _)| unescape(value))
        };
        // `name` is the end of `classname`, too.
        let class = attribute(" classname").unwrap_or_default();
        let name = head
            .strip_prefix("name=\"")
            .and_then(|rest| rest.split_once('"'))
            .map(|(value, _)| unescape(value));
        let test = format!("{class} {}", name.unwrap_or_default());
        skips.extend(body.lines().filter_map(|line| remark(line, &test, mark)));
    }
    sorted(skips)
}

/// Reads what `cargo test -- --show-output` prints: `---- TEST stdout ----`, and then what the test said.
pub(crate) fn from_libtest(lines: &[String], mark: &str) -> Vec<Remark> {
    let mut test = String::new();
    let mut skips = Vec::new();
    for line in lines {
        if let Some(name) = line.strip_prefix("---- ").and_then(|line| line.strip_suffix(" stdout ----")) {
            name.clone_into(&mut test);
        }
        skips.extend(remark(line, &test, mark));
    }
    sorted(skips)
}

/// By reason, with the number of tests that gave it, and their names where these are few.
pub(crate) fn show_skips(skips: &[Remark]) -> String {
    if skips.is_empty() {
        return "skipped: nothing\n".to_owned();
    }
    let mut text = String::from("skipped:\n");
    for same in skips.chunk_by(|one, next| one.what == next.what) {
        let names: Vec<&str> = same.iter().take(3).map(|skip| skip.test.as_str()).collect();
        let more = same.len() - names.len();
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        text.push_str(&format!("  {}: {}{more}\n", same[0].what, names.join(", ")));
    }
    text
}

fn remark(line: &str, test: &str, mark: &str) -> Option<Remark> {
    // The first line of a test's output stands behind the tag that begins it.
    let at = line.find(mark).filter(|&at| at == 0 || line[..at].ends_with('>'))?;
    let rest = &line[at + mark.len()..];
    let what = rest.split_once("</").map_or(rest, |(text, _)| text);
    Some(Remark { what: unescape(what).trim().to_owned(), test: test.to_owned() })
}

fn sorted(mut skips: Vec<Remark>) -> Vec<Remark> {
    skips.sort();
    skips.dedup();
    skips
}

fn unescape(text: &str) -> String {
    let pairs =
        [("&lt;", "<"), ("&gt;", ">"), ("&quot;", "\""), ("&apos;", "'"), ("&#39;", "'"), ("&amp;", "&")];
    pairs.iter().fold(text.to_owned(), |text, (from, to)| text.replace(from, to))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn skip(test: &str, what: &str) -> Remark {
        Remark { what: what.to_owned(), test: test.to_owned() }
    }

    #[test]
    fn a_report_gives_the_reasons_with_their_tests() {
        let text = r#"<testsuite name="x::y">
            <testcase name="one" classname="x::y" timestamp="t" time="0.1">
                <system-out>running 1 test
skipped is only a word here
</system-out>
                <system-err>skipped: no &quot;fio&quot;
said more
skipped: no loop &amp; no device</system-err>
            </testcase>
            <testcase name="two" classname="x::y" time="0.1"><system-err>it says skipped: within</system-err></testcase>
            <testcase name="three" classname="x::y" time="0.1"/>"#;
        assert_eq!(
            from_junit(text, SKIPPED),
            [skip("x::y one", "no \"fio\""), skip("x::y one", "no loop & no device")]
        );
    }

    #[test]
    fn output_of_cargo_gives_the_same() {
        let text =
            "test one ... ok\n\n---- one stdout ----\nskipped: no fio\n\n---- two stdout ----\nall well";
        let lines: Vec<String> = text.lines().map(str::to_owned).collect();
        assert_eq!(from_libtest(&lines, SKIPPED), [skip("one", "no fio")]);
    }

    #[test]
    fn many_tests_with_one_reason_are_one_line() {
        let mut skips: Vec<Remark> = (0..5).map(|number| skip(&format!("t{number}"), "no fio")).collect();
        skips.push(skip("u", "no root"));
        assert_eq!(show_skips(&skips), "skipped:\n  no fio: t0, t1, t2 and 2 more\n  no root: u\n");
        assert_eq!(show_skips(&[]), "skipped: nothing\n");
    }
}
