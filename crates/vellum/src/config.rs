//! The configuration file: values that options have when neither the command line nor the environment gives them.
//!
//! ```text
//!   --config FILE, else VELLUM_CONFIG, else /etc/vellum/vellum.toml
//!        │ read
//!        ▼
//!   KEYS ──► key known? ──► does its option take the value? ──► default of that option
//! ```
//!
//! 1. Every key is an option of the command line ([`KEYS`]), and takes the values that the option takes.
//! 2. A file that is named must exist. The default one may be missing.
//! 3. A key that is unknown, or a value that its option refuses, is an error, also for commands that would not use it. The
//!    error names the file, the line and the key.
//! 4. A value from the command line wins over the environment, and that over the file. Directories add up.
//! 5. The file is read once, before the command begins, and at most [`FILE_BYTES_MAX`] of it.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use clap::{Arg, Command};
use toml::de::{DeTable, DeValue};
use vellum_core::{Context, Error, Result};

use crate::log;

/// The environment variable that names the file.
const VARIABLE: &str = "VELLUM_CONFIG";

/// The file when none is named.
const DEFAULT_PATH: &str = "/etc/vellum/vellum.toml";

/// A larger file is not a configuration.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// A key of the file: its table, its name, and the option that it gives a value.
type Key = (&'static str, &'static str, &'static str);

/// The table of keys that stand outside of tables. Every other table has the name of a command.
const TOP: &str = "";

/// The key that is a list of directories.
const ALLOW_DIRS: &str = "allow-dirs";

/// The key for the log.
const LOG: &str = "log";

/// All keys.
const KEYS: [Key; 14] = [
    (TOP, ALLOW_DIRS, "allow-dir"),
    (TOP, LOG, "log"),
    ("convert", "parallel", "parallel"),
    ("serve", "drain-seconds", "drain-seconds"),
    ("serve", "io", "io"),
    ("serve", "l2-cache-size", "l2-cache-size"),
    ("serve", "max-connections", "max-connections"),
    ("serve", "memory", "memory"),
    ("serve", "on-full", "on-full"),
    ("serve", "poll", "poll"),
    ("serve", "prealloc", "prealloc"),
    ("serve", "socket-group", "socket-group"),
    ("serve", "socket-mode", "socket-mode"),
    ("serve", "threads", "threads"),
];

/// What a file says.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Config {
    allow_dirs: Vec<PathBuf>,
    /// What is logged.
    pub(crate) log: Option<String>,
    /// Values of options: the command, the option, the value.
    defaults: Vec<(&'static str, &'static str, String)>,
}

static ALLOWED: OnceLock<Vec<PathBuf>> = OnceLock::new();

/// The directories from which images may open backing and data files: those of the command line, then those of the file.
/// Those of the environment are added by the library.
pub(crate) fn allowed(given: &[PathBuf]) -> Vec<PathBuf> {
    // One that is not there holds nothing that could be opened. On the command line it is a mistake.
    let of_file = ALLOWED.get().into_iter().flatten().filter(|dir| dir.is_dir());
    given.iter().chain(of_file).cloned().collect()
}

/// Reads the file that is named, or the default one. `command` is the command line, whose options say which values are good.
///
/// # Errors
/// When the file cannot be read, or says something that is not understood.
pub(crate) fn load(named: Option<&Path>, command: &Command) -> Result<Config> {
    let variable = std::env::var_os(VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from);
    let (path, by) = match (named, &variable) {
        (Some(path), _) => (path, "--config"),
        (None, Some(path)) => (path.as_path(), VARIABLE),
        (None, None) => (Path::new(DEFAULT_PATH), ""),
    };
    let file = match File::open(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && by.is_empty() => {
            return Ok(Config::default());
        }
        file => file,
    };
    let mut text = String::new();
    let read = file.and_then(|file| file.take(FILE_BYTES_MAX + 1).read_to_string(&mut text));
    let of = if by.is_empty() { String::new() } else { format!(" ({by})") };
    read.context(|| format!("can't read the configuration file {}{of}", path.display()))?;
    if text.len() as u64 > FILE_BYTES_MAX {
        let why = format!("the configuration file {} has more than {FILE_BYTES_MAX} bytes", path.display());
        return Err(Error::invalid(why));
    }
    parse(&path.display().to_string(), &text, command)
}

impl Config {
    /// Gives the options of the command line these values.
    pub(crate) fn apply(&self, command: Command) -> Command {
        self.defaults.iter().fold(command, |command, (table, option, value)| {
            command.mut_subcommand(table, |sub| {
                let id = option_of(&sub, option).map(|arg| arg.get_id().clone());
                match id {
                    Some(id) => sub.mut_arg(id, |arg| arg.default_value(value.clone())),
                    None => sub,
                }
            })
        })
    }

    /// Whether a command line must be read again to have these values.
    pub(crate) fn has_defaults(&self) -> bool {
        !self.defaults.is_empty()
    }

    /// From now on images may also open files in these directories.
    pub(crate) fn publish_dirs(&mut self) {
        drop(ALLOWED.set(std::mem::take(&mut self.allow_dirs)));
    }
}

fn option_of<'a>(command: &'a Command, name: &str) -> Option<&'a Arg> {
    command.get_arguments().find(|arg| arg.get_long() == Some(name))
}

fn parse(path: &str, text: &str, command: &Command) -> Result<Config> {
    let line_at =
        |at: usize| text.as_bytes()[..at.min(text.len())].iter().filter(|byte| **byte == b'\n').count() + 1;
    let bad = |at: usize, what: &str| Error::invalid(format!("{path}, line {}: {what}", line_at(at)));
    let table = DeTable::parse(text)
        .map_err(|error| bad(error.span().map_or(0, |span| span.start), error.message()))?;
    let mut config = Config::default();
    for (key, value) in table.get_ref() {
        let (name, at) = (key.get_ref().as_ref(), key.span().start);
        let is_table = KEYS.iter().any(|(table, ..)| *table == name && *table != TOP);
        match value.get_ref() {
            DeValue::Table(keys) if is_table => {
                for (key, value) in keys {
                    let at = key.span().start;
                    config
                        .set(name, key.get_ref(), value.get_ref(), command)
                        .map_err(|what| bad(at, &what))?;
                }
            }
            DeValue::Table(_) => return Err(bad(at, &format!("unknown table [{name}]; {}", known(TOP)))),
            value => config.set(TOP, name, value, command).map_err(|what| bad(at, &what))?,
        }
    }
    Ok(config)
}

/// The keys of a table, for a message.
fn known(table: &str) -> String {
    let keys = KEYS.iter().filter(|(of, ..)| *of == table).map(|(_, name, _)| *name);
    let keys = keys.collect::<Vec<_>>().join(", ");
    if table != TOP {
        return format!("the keys of [{table}] are {keys}");
    }
    let mut tables: Vec<String> = KEYS.iter().map(|(of, ..)| format!("[{of}]")).collect();
    tables.dedup();
    format!("the keys are {keys}, the tables {}", tables[1..].join(" and "))
}

impl Config {
    fn set(&mut self, table: &str, name: &str, value: &DeValue<'_>, command: &Command) -> Result<(), String> {
        let Some((table, name, option)) = KEYS.iter().find(|key| key.0 == table && key.1 == name) else {
            return Err(format!("unknown key {name:?}; {}", known(table)));
        };
        let full = if *table == TOP { (*name).to_owned() } else { format!("{table}.{name}") };
        if *name == ALLOW_DIRS {
            self.allow_dirs = directories(value).map_err(|what| format!("{full}: {what}"))?;
            return Ok(());
        }
        let value = text_of(value)
            .ok_or_else(|| format!("{full}: the value must be a string or a decimal number"))?;
        if *name == LOG {
            self.log = Some(log::parse(&value).map_err(|what| format!("{full}: {what}"))?);
            return Ok(());
        }
        let arg = command.find_subcommand(table).and_then(|sub| option_of(sub, option));
        let arg = arg.ok_or_else(|| format!("{full}: this build has no option --{option}"))?;
        is_taken(arg, option, &value).map_err(|what| format!("{full}: {what}"))?;
        self.defaults.push((*table, *option, value));
        Ok(())
    }
}

fn directories(value: &DeValue<'_>) -> Result<Vec<PathBuf>, String> {
    let form = || "the value must be a list of absolute directories, such as [\"/srv/templates\"]".to_owned();
    let DeValue::Array(values) = value else { return Err(form()) };
    let absolute = values.iter().map(|value| match value.get_ref() {
        DeValue::String(dir) if Path::new(dir.as_ref()).is_absolute() => Ok(PathBuf::from(dir.as_ref())),
        _ => Err(form()),
    });
    absolute.collect()
}

/// A value as the command line would have it. `0o660` is not one: an option would read its digits in another base.
fn text_of(value: &DeValue<'_>) -> Option<String> {
    match value {
        DeValue::String(text) => Some(text.clone().into_owned()),
        DeValue::Integer(number) if number.radix() == 10 => {
            number.as_str().parse::<i64>().ok().map(|n| n.to_string())
        }
        _ => None,
    }
}

/// Asks the option's own parser.
fn is_taken(arg: &Arg, option: &'static str, value: &str) -> Result<(), String> {
    let alone = Arg::new(option).long(option).value_parser(arg.get_value_parser().clone());
    let command = Command::new("vellum").no_binary_name(true).arg(alone);
    let Err(error) = command.try_get_matches_from([format!("--{option}={value}")]) else { return Ok(()) };
    // The first paragraph; what follows is how to get help.
    let text = error.render().to_string();
    let lines = text.trim_start_matches("error: ").lines().take_while(|line| !line.trim().is_empty());
    Err(lines.map(str::trim).collect::<Vec<_>>().join(" "))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::Cli;

    const EXAMPLE: &str = include_str!("../../../packaging/vellum.toml");
    const GUIDE: &str = include_str!("../../../docs/guide/configuration.md");

    fn parsed(text: &str) -> Result<Config> {
        parse("a.toml", text, &Cli::command())
    }

    #[test]
    fn every_key_is_an_option() {
        let mut command = Cli::command();
        command.build();
        for (table, name, option) in KEYS {
            let places: Vec<&Command> = match (table, name) {
                (TOP, LOG) => vec![&command],
                (TOP, _) => {
                    command.get_subcommands().filter(|sub| option_of(sub, option).is_some()).collect()
                }
                (table, _) => command.find_subcommand(table).into_iter().collect(),
            };
            assert!(!places.is_empty(), "{table} {name}");
            assert!(places.iter().all(|place| option_of(place, option).is_some()), "{table} {name}");
        }
    }

    #[test]
    fn the_example_has_every_key_and_changes_nothing() {
        assert_eq!(parsed(EXAMPLE).unwrap(), Config::default());
        let keys = EXAMPLE.lines().map(|line| match line.strip_prefix('#') {
            Some(rest) if rest.starts_with(|c: char| c.is_ascii_lowercase() || c == '[') => rest,
            _ => line,
        });
        let config = parsed(&keys.collect::<Vec<_>>().join("\n")).unwrap();
        assert!(!config.allow_dirs.is_empty() && config.log.is_some());
        let set: Vec<(&str, &str)> =
            config.defaults.iter().map(|(table, option, _)| (*table, *option)).collect();
        for (table, name, option) in KEYS.into_iter().filter(|key| key.0 != TOP) {
            assert!(set.contains(&(table, option)), "the example has no {table}.{name}");
        }
    }

    #[test]
    fn the_guide_has_every_key_and_its_option() {
        for (table, name, option) in KEYS {
            let full = if table == TOP { name.to_owned() } else { format!("{table}.{name}") };
            let row = GUIDE.lines().find(|line| line.starts_with(&format!("| `{full}`")));
            assert!(row.is_some_and(|row| row.contains(&format!("`--{option}"))), "{full}");
        }
    }

    #[test]
    fn mistakes_are_named_with_line_and_key() {
        for (text, words) in [
            (
                "\n\nlogs = \"warn\"",
                &["a.toml, line 3", "\"logs\"", "allow-dirs, log", "[convert] and [serve]"][..],
            ),
            ("[serve]\nthread = 2", &["line 2", "\"thread\"", "keys of [serve]", "threads"]),
            ("[server]\nthreads = 2", &["line 1", "[server]", "[serve]"]),
            ("[serve]\nthreads = 5000", &["line 2", "serve.threads", "5000"]),
            ("[serve]\nthreads = true", &["line 2", "serve.threads", "string or a decimal number"]),
            ("[serve]\nsocket-mode = 0o660", &["line 2", "serve.socket-mode"]),
            ("[serve]\nio = \"fast\"", &["line 2", "serve.io", "uring", "threads"]),
            ("log = \"loud\"", &["line 1", "log", "loud"]),
            ("serve = 1", &["line 1", "\"serve\""]),
            ("allow-dirs = \"/x\"", &["line 1", "allow-dirs", "list of absolute"]),
            ("allow-dirs = [\n\"x\"]", &["line 1", "allow-dirs", "list of absolute"]),
            ("log = \"warn\"\nlog = \"warn\"", &["line 2", "duplicate key"]),
            ("log = warn", &["line 1"]),
            ("[serve", &["line 1"]),
        ] {
            let error = parsed(text).expect_err(text).chain();
            assert!(!error.contains('\n'), "{error}");
            assert!(words.iter().all(|word| error.contains(word)), "{text}: {error}");
        }
    }
}
