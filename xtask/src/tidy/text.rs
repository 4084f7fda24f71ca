//! Rules for every file.

use super::{Complaint, complaint};

/// What stands for something that is not done. In two pieces, so that this file passes.
const UNDONE: [&str; 4] =
    [concat!("FIX", "ME"), concat!("XX", "X:"), concat!("to", "do!("), concat!("unimple", "mented!(")];

/// Directories of one machine.
const PLACES: [&str; 4] =
    [concat!("/ho", "me/"), concat!("/ro", "ot/"), concat!("/wo", "rk/"), concat!("/Us", "ers/")];

/// The hosts that links may lead to. A name without a dot is an example, and so is one that ends in `.example`.
const HOSTS: [&str; 9] = [
    "127.0.0.1",
    "github.com",
    "www.apache.org",
    "www.debian.org",
    "www.w3.org",
    "keepachangelog.com",
    "semver.org",
    "doc.rust-lang.org",
    "docs.rs",
];

pub(super) fn check(path: &str, text: &str) -> Vec<Complaint> {
    let mut complaints = Vec::new();
    for (index, line) in text.split('\n').enumerate() {
        let number = index + 1;
        for word in UNDONE.iter().filter(|word| line.contains(**word)) {
            complaints.push(complaint(number, format!("`{word}`: do it, or say in words what is left")));
        }
        for place in PLACES.iter().filter(|place| line.contains(**place)) {
            complaints.push(complaint(number, format!("`{place}` is a place on one machine")));
        }
        for host in hosts(line)
            .filter(|host| host.contains('.') && !host.ends_with(".example") && !HOSTS.contains(host))
        {
            complaints.push(complaint(
                number,
                format!("{host} is no host that links lead to (xtask/src/tidy/text.rs)"),
            ));
        }
        // A line of Markdown that ends in two blanks breaks there, which is invisible.
        if line.ends_with([' ', '\t', '\r']) && !path.starts_with("LICENSE") {
            complaints.push(complaint(number, "blanks at the end of the line"));
        }
    }
    if !text.is_empty() && !text.ends_with('\n') {
        complaints.push(complaint(0, "the last line does not end"));
    }
    complaints
}

fn hosts(line: &str) -> impl Iterator<Item = &str> {
    let starts = ["http://", "https://"].into_iter().flat_map(|scheme| line.split(scheme).skip(1));
    starts.map(|rest| {
        let end = rest.find(|letter: char| !letter.is_ascii_alphanumeric() && !".-".contains(letter));
        rest[..end.unwrap_or(rest.len())].trim_end_matches('.')
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<usize> {
        check("a.rs", text).iter().map(|complaint| complaint.line).collect()
    }

    #[test]
    fn what_is_left_undone_is_found() {
        for word in UNDONE {
            assert_eq!(lines(&format!("fine\n// {word} later\n")), [2], "{word}");
        }
    }

    #[test]
    fn places_of_one_machine_are_found() {
        for place in PLACES {
            assert_eq!(lines(&format!("see {place}x\n")), [1], "{place}");
        }
        assert_eq!(lines("see /tmp/x and /proc/self\n"), [0; 0]);
    }

    #[test]
    fn links_lead_to_agreed_hosts() {
        assert_eq!(lines("https://github.com/a http://x/d https://docs.rs.\n"), [0; 0]);
        let host = concat!("https://", "mirror.example.org");
        assert_eq!(lines(&format!("ok\nfrom {host}:8080/x and https://github.com\n")), [2]);
    }

    #[test]
    fn lines_end_where_they_end() {
        assert_eq!(lines("a \nb\t\nc\r\nd"), [1, 2, 3, 0]);
        assert_eq!(lines(""), [0; 0]);
    }
}
