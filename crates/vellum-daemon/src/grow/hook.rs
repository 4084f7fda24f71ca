//! The command that enlarges a device, such as `lvextend -L {size}b {device}`.

use std::fmt;
use std::process::{Command, Stdio};
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use vellum_core::{Context, Error, Result};
use vellum_io::{clock, unblock};

/// A hook that runs longer is killed.
const TIME_MAX: Duration = Duration::from_secs(30);
/// How often to check whether it has ended.
const LOOKED_EVERY: Duration = Duration::from_millis(10);

/// A command that is to make a device larger: words, in which `{device}`, `{size}` and `{more}` stand for the
/// device, the bytes that it should have, and by how many more that is. No shell sees them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GrowHook {
    words: Vec<Vec<Part>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    Text(String),
    Device,
    Size,
    More,
}

impl FromStr for GrowHook {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let words: Vec<Vec<Part>> = text.split_whitespace().map(parts).collect::<Result<_>>()?;
        if words.is_empty() {
            return Err(Error::invalid("give a command, such as `lvextend -L {size}b {device}`"));
        }
        Ok(Self { words })
    }
}

fn parts(word: &str) -> Result<Vec<Part>> {
    let mut parts = Vec::new();
    let mut rest = word;
    while let Some((before, after)) = rest.split_once('{') {
        let (name, behind) = after
            .split_once('}')
            .ok_or_else(|| Error::invalid(format!("{word:?}: the brace is not closed")))?;
        parts.push(Part::Text(before.to_owned()));
        parts.push(match name {
            "device" => Part::Device,
            "size" => Part::Size,
            "more" => Part::More,
            _ => {
                return Err(Error::invalid(format!(
                    "unknown placeholder {{{name}}}: use {{device}}, {{size}} (the new size in bytes) or {{more}} \
                     (the bytes to add)"
                )));
            }
        });
        rest = behind;
    }
    parts.push(Part::Text(rest.to_owned()));
    Ok(parts)
}

impl fmt::Display for GrowHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.words("{device}", "{size}", "{more}").join(" "))
    }
}

impl GrowHook {
    fn words(&self, device: &str, size: &str, more: &str) -> Vec<String> {
        let text = |part: &Part| match part {
            Part::Text(text) => text.clone(),
            Part::Device => device.to_owned(),
            Part::Size => size.to_owned(),
            Part::More => more.to_owned(),
        };
        self.words.iter().map(|word| word.iter().map(text).collect()).collect()
    }

    /// Runs it to its end, which it must reach in time and well.
    pub(super) async fn run(&self, device: &str, size: u64, more: u64, has_ended: &AtomicBool) -> Result<()> {
        let words = self.words(device, &size.to_string(), &more.to_string());
        let context = || format!("the grow hook ({})", words.join(" "));
        let mut command = Command::new(&words[0]);
        // What it has to say of errors goes where ours go.
        command.args(&words[1..]).stdin(Stdio::null()).stdout(Stdio::null());
        let mut child = unblock(move || command.spawn()).await.context(context)?;
        let begun = clock().now();
        loop {
            if let Some(status) = child.try_wait().context(context)? {
                return match status.success() {
                    true => Ok(()),
                    false => Err(Error::invalid(format!("{} failed: {status}", context()))),
                };
            }
            if has_ended.load(Ordering::Acquire) || clock().now() - begun > TIME_MAX {
                child.kill().context(context)?;
                unblock(move || child.wait()).await.context(context)?;
                return Err(Error::invalid(format!(
                    "{} did not finish within {TIME_MAX:?} and was killed",
                    context()
                )));
            }
            clock().sleep(LOOKED_EVERY).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_and_what_stands_for_something() {
        for (text, wanted) in [
            ("lvextend  -L {size}b {device}", vec!["lvextend", "-L", "70b", "/dev/a {more}"]),
            ("grow --by={more} --to={size}", vec!["grow", "--by=5", "--to=70"]),
            ("/sbin/grow-it $HOME;true", vec!["/sbin/grow-it", "$HOME;true"]),
        ] {
            let hook: GrowHook = text.parse().unwrap();
            assert_eq!(hook.words("/dev/a {more}", "70", "5"), wanted);
            assert_eq!(hook.to_string().parse::<GrowHook>().unwrap(), hook);
        }
        for (text, why) in
            [("", "give a command"), (" ", "give a command"), ("a {b}", "placeholder {b}"), ("a {", "closed")]
        {
            let error = text.parse::<GrowHook>().unwrap_err().to_string();
            assert!(error.contains(why), "{text:?}: {error}");
        }
    }
}
