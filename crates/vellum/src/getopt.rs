//! Command lines as the C library's `getopt_long` reads them: letters together, values attached, options anywhere, long
//! names cut short.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};

/// An option that a program has.
pub(crate) trait Named {
    /// Its letter.
    fn short(&self) -> Option<char>;
    /// Its long name, and further ones.
    fn long(&self) -> (&'static str, &'static [&'static str]);
    /// Whether it has a value.
    fn has_value(&self) -> bool;
}

/// An argument, by the rules of options.
#[derive(Debug)]
pub(crate) enum Argument<'a, O> {
    Option { opt: &'a O, value: Option<OsString> },
    Operand(OsString),
}

/// What is wrong with a command line.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Bad {
    /// There is no such option: `-x`, or `--name`.
    Unknown(String),
    /// It needs a value.
    Missing(String),
    /// It takes none.
    Excess(String),
    /// These options begin with it.
    Ambiguous(String, Vec<&'static str>),
}

/// The option with this letter.
pub(crate) fn short<'a, O: Named>(rows: &[&'a O], letter: char) -> Option<&'a O> {
    rows.iter().copied().find(|opt| opt.short() == Some(letter))
}

/// A long option by its name, or by the beginning of it if that is no other's. The error is what it could be.
pub(crate) fn long<'a, O: Named>(rows: &[&'a O], name: &str) -> Result<&'a O, Vec<&'static str>> {
    let names = |opt: &O| {
        let (first, further) = opt.long();
        std::iter::once(first)
            .chain(further.iter().copied())
            .filter(|name| !name.is_empty())
            .collect::<Vec<_>>()
    };
    if let Some(opt) = rows.iter().copied().find(|opt| names(opt).contains(&name)) {
        return Ok(opt);
    }
    let begun: Vec<&O> =
        rows.iter().copied().filter(|opt| names(opt).iter().any(|one| one.starts_with(name))).collect();
    match begun[..] {
        [only] if !name.is_empty() => Ok(only),
        _ => Err(begun.iter().map(|opt| opt.long().0).collect()),
    }
}

/// Takes a command line apart. With `has_sizes`, a minus and a digit begin an operand.
pub(crate) fn split<'a, O: Named>(
    rows: &[&'a O],
    has_sizes: bool,
    arguments: Vec<OsString>,
) -> Result<Vec<Argument<'a, O>>, Bad> {
    let (mut found, mut rest) = (Vec::new(), arguments.into_iter());
    while let Some(argument) = rest.next() {
        let bytes = argument.as_bytes();
        if bytes == b"--" {
            found.extend(rest.map(Argument::Operand));
            break;
        }
        if let Some(words) = bytes.strip_prefix(b"--") {
            let end = words.iter().position(|byte| *byte == b'=').unwrap_or(words.len());
            let name = String::from_utf8_lossy(&words[..end]).into_owned();
            let said = format!("--{name}");
            let opt = long(rows, &name).map_err(|others| match others.len() {
                0 | 1 => Bad::Unknown(said.clone()),
                _ => Bad::Ambiguous(said.clone(), others),
            })?;
            let full = || format!("--{}", opt.long().0);
            let attached = words.get(end + 1..).map(|value| OsString::from_vec(value.to_vec()));
            let value = match (opt.has_value(), attached) {
                (false, Some(_)) => return Err(Bad::Excess(full())),
                (true, None) => Some(rest.next().ok_or_else(|| Bad::Missing(full()))?),
                (_, attached) => attached,
            };
            found.push(Argument::Option { opt, value });
        } else if bytes.len() > 1 && bytes[0] == b'-' && !(has_sizes && bytes[1].is_ascii_digit()) {
            for (at, letter) in bytes.iter().enumerate().skip(1) {
                let letter = char::from(*letter);
                let said = format!("-{letter}");
                let opt = short(rows, letter).ok_or_else(|| Bad::Unknown(said.clone()))?;
                let attached = &bytes[at + 1..];
                if !opt.has_value() {
                    found.push(Argument::Option { opt, value: None });
                    continue;
                }
                let value = match attached.is_empty() {
                    true => rest.next().ok_or(Bad::Missing(said))?,
                    false => OsString::from_vec(attached.to_vec()),
                };
                found.push(Argument::Option { opt, value: Some(value) });
                break;
            }
        } else {
            found.push(Argument::Operand(argument));
        }
    }
    Ok(found)
}
