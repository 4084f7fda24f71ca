//! Which clients are admitted, by the distinguished names of their certificates.
//!
//! A list is read from the top; the first rule that fits a name decides, and the policy of the list decides about all others. That is
//! how QEMU's authorization objects (`authz-simple`, `authz-list`) have it.

use std::sync::Arc;

/// What is done with a client.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Verdict {
    /// It is admitted.
    Allow,
    /// It is refused.
    #[default]
    Deny,
}

/// Which names a rule fits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NamePattern {
    /// This one.
    Exact(String),
    /// Those that match a pattern: `*` stands for any characters, also none, and `?` for one. Nothing is escaped in it.
    Glob(String),
}

impl NamePattern {
    fn fits(&self, name: &str) -> bool {
        match self {
            Self::Exact(its) => its == name,
            Self::Glob(pattern) => matches_glob(pattern, name),
        }
    }
}

/// Which clients are admitted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AccessList {
    /// The rules, from the top.
    pub rules: Vec<(NamePattern, Verdict)>,
    /// What is done with clients that no rule fits.
    pub policy: Verdict,
}

impl AccessList {
    /// What is done with a client of this name.
    pub fn verdict(&self, name: &str) -> Verdict {
        self.rules.iter().find(|(names, _)| names.fits(name)).map_or(self.policy, |(_, verdict)| *verdict)
    }
}

/// The same list, held by many connections.
pub type SharedAccessList = Arc<AccessList>;

/// Whether a text matches all of a pattern. Takes the product of their lengths at most.
fn matches_glob(pattern: &str, text: &str) -> bool {
    let (pattern, text): (Vec<char>, Vec<char>) = (pattern.chars().collect(), text.chars().collect());
    let (mut at, mut seen) = (0, 0);
    // Where the last star is, and up to where it reaches.
    let mut star: Option<(usize, usize)> = None;
    while seen < text.len() {
        match pattern.get(at) {
            Some('*') => {
                star = Some((at, seen));
                at += 1;
            }
            Some(letter) if *letter == '?' || *letter == text[seen] => {
                at += 1;
                seen += 1;
            }
            _ => match &mut star {
                Some((place, reach)) => {
                    *reach += 1;
                    (at, seen) = (*place + 1, *reach);
                }
                None => return false,
            },
        }
    }
    pattern[at..].iter().all(|letter| *letter == '*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_rule_that_fits_decides() {
        let glob = |text: &str| NamePattern::Glob(text.to_owned());
        let list = AccessList {
            rules: vec![
                (NamePattern::Exact("CN=a,O=x".to_owned()), Verdict::Deny),
                (glob("CN=*,O=x"), Verdict::Allow),
                (NamePattern::Exact("CN=*".to_owned()), Verdict::Allow),
            ],
            policy: Verdict::Deny,
        };
        for (name, verdict) in [
            ("CN=a,O=x", Verdict::Deny),
            ("CN=b,O=x", Verdict::Allow),
            ("CN=b,O=xy", Verdict::Deny),
            ("CN=*", Verdict::Allow),
            ("CN=c", Verdict::Deny),
            ("", Verdict::Deny),
        ] {
            assert_eq!(list.verdict(name), verdict, "{name}");
        }
        let open = AccessList { policy: Verdict::Allow, ..AccessList::default() };
        assert_eq!(open.verdict("CN=c"), Verdict::Allow);
        assert_eq!(AccessList::default().verdict("CN=c"), Verdict::Deny);
    }

    #[test]
    fn patterns_match_as_a_search_through_all_ways_does() {
        /// By the definition, and slow.
        fn slowly(pattern: &[char], text: &[char]) -> bool {
            match pattern.split_first() {
                None => text.is_empty(),
                Some(('*', rest)) => (0..=text.len()).any(|from| slowly(rest, &text[from..])),
                Some((letter, rest)) => text.split_first().is_some_and(|(first, behind)| {
                    (*letter == '?' || letter == first) && slowly(rest, behind)
                }),
            }
        }
        let words = |letters: &[char], most: usize| {
            let mut all = vec![String::new()];
            let mut from = 0;
            for _ in 0..most {
                let until = all.len();
                for at in from..until {
                    all.extend(
                        letters.iter().map(|letter| format!("{}{letter}", all[at])).collect::<Vec<_>>(),
                    );
                }
                from = until;
            }
            all
        };
        let mut matched = 0;
        for pattern in words(&['a', 'é', '*', '?'], 4) {
            for text in words(&['a', 'é'], 4) {
                let letters = |text: &str| text.chars().collect::<Vec<_>>();
                let expected = slowly(&letters(&pattern), &letters(&text));
                assert_eq!(matches_glob(&pattern, &text), expected, "{pattern:?} {text:?}");
                matched += usize::from(expected);
            }
        }
        assert!(matched > 500, "{matched}");
    }
}
