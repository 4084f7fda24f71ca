//! Access lists for NBD clients with certificates, as text: the JSON that QEMU's `authz-list-file` has.
//!
//! ```text
//!   {"policy": "deny", "rules": [{"match": "CN=*,O=Example", "format": "glob", "policy": "allow"}]}
//! ```
//!
//! A list is read whole or not at all: what is not understood in it could be a rule that keeps somebody out.

use std::path::PathBuf;
use std::sync::Arc;

use rustix::fs::OFlags;
use serde::Deserialize;
use vellum_core::{Context, Error, Result};
use vellum_export::nbd::{AccessList, NamePattern, SharedAccessList, Verdict};

use crate::plain_file::read_at_most;

/// No list in a file is longer, in bytes.
const FILE_BYTES_MAX: u64 = 16 << 20;

/// Where an access list is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AccessSource {
    /// Here.
    Said(SharedAccessList),
    /// In this file, which is read again when it has changed.
    File(PathBuf),
}

impl AccessSource {
    /// Exactly these names.
    pub fn names(names: impl IntoIterator<Item = String>) -> Self {
        let rules = names.into_iter().map(|name| (NamePattern::Exact(name), Verdict::Allow)).collect();
        Self::Said(Arc::new(AccessList { rules, policy: Verdict::Deny }))
    }

    /// The list in a text.
    ///
    /// # Errors
    /// `Invalid` when it is none.
    pub fn text(text: &str) -> Result<Self> {
        parse(text).map(|list| Self::Said(Arc::new(list)))
    }

    pub(crate) fn read(&self) -> Result<SharedAccessList> {
        match self {
            Self::Said(list) => Ok(list.clone()),
            Self::File(path) => {
                let read = read_at_most(path, OFlags::empty(), FILE_BYTES_MAX);
                let text = read
                    .and_then(|bytes| String::from_utf8(bytes).map_err(std::io::Error::other))
                    .context(|| format!("can't read the access list {}", path.display()))?;
                parse(&text).map(Arc::new).map_err(|error| error.context(path.display().to_string()))
            }
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ListText {
    #[serde(default)]
    policy: VerdictText,
    #[serde(default)]
    rules: Vec<RuleText>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RuleText {
    #[serde(rename = "match")]
    names: String,
    policy: VerdictText,
    #[serde(default)]
    format: FormatText,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum VerdictText {
    Allow,
    #[default]
    Deny,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum FormatText {
    #[default]
    Exact,
    Glob,
}

impl From<VerdictText> for Verdict {
    fn from(text: VerdictText) -> Self {
        match text {
            VerdictText::Allow => Self::Allow,
            VerdictText::Deny => Self::Deny,
        }
    }
}

fn parse(text: &str) -> Result<AccessList> {
    let list: ListText = serde_json::from_str(text).map_err(|error| {
        Error::invalid(format!(
            "this is no access list: {error}; write {{\"policy\": \"deny\", \"rules\": [{{\"match\": NAME, \"policy\": \"allow\"}}]}}"
        ))
    })?;
    let rules = list.rules.into_iter().map(|rule| {
        let names = match rule.format {
            FormatText::Exact => NamePattern::Exact(rule.names),
            FormatText::Glob => NamePattern::Glob(rule.names),
        };
        (names, rule.policy.into())
    });
    Ok(AccessList { rules: rules.collect(), policy: list.policy.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pipe_a_device_and_a_long_file_are_no_list() {
        let dir = std::env::temp_dir().join(format!("vellum-access-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let (pipe, long) = (dir.join("pipe"), dir.join("long"));
        let made = std::process::Command::new("mkfifo").arg(&pipe).status().unwrap();
        assert!(made.success());
        std::fs::File::create(&long).unwrap().set_len(1 << 40).unwrap();
        let read = [pipe, "/dev/zero".into(), long].map(|path| AccessSource::File(path).read());
        std::fs::remove_dir_all(&dir).unwrap();
        let said = read.map(|read| read.unwrap_err().chain());
        for (said, why) in said.iter().zip(["no plain file", "no plain file", "more than 16777216 bytes"]) {
            assert!(said.contains("can't read the access list") && said.contains(why), "{said}");
        }
    }

    #[test]
    fn lists_are_read_whole_or_not_at_all() {
        let text = r#"{"policy":"allow","rules":[{"match":"CN=a","policy":"deny"},{"match":"CN=*","policy":"allow","format":"glob"}]}"#;
        let list = parse(text).unwrap();
        let rules = vec![
            (NamePattern::Exact("CN=a".to_owned()), Verdict::Deny),
            (NamePattern::Glob("CN=*".to_owned()), Verdict::Allow),
        ];
        assert_eq!(list, AccessList { rules, policy: Verdict::Allow });
        assert_eq!(parse("{}").unwrap(), AccessList::default());
        for text in [
            "",
            "[1]",
            "{",
            r#"{"policy":"maybe"}"#,
            r#"{"policy":"allow","x":1}"#,
            r#"{"rules":[{"match":"CN=a"}]}"#,
            r#"{"rules":[{"policy":"allow"}]}"#,
            r#"{"rules":[{"match":"CN=a","policy":"allow","format":"regex"}]}"#,
            r#"{"rules":[{"match":"CN=a","policy":"allow","y":1}]}"#,
            "{} {}",
        ] {
            assert!(parse(text).unwrap_err().chain().contains("this is no access list"), "{text}");
        }
    }
}
