//! The program under the name `qemu-img`: command lines of QEMU's program, turned into those of this one.
//!
//! ```text
//!   qemu-img convert -pO qcow2 -t none a.raw b.qcow2
//!        │ read by QEMU's rules: letters together, values attached, options anywhere
//!        ▼
//!   convert  -p · -O qcow2 · -t none · a.raw b.qcow2
//!        │ each option by its row in the table
//!        ▼
//!   vellum convert --progress --target-format=qcow2 --direct -- a.raw b.qcow2
//! ```
//!
//! 1. [`table`] has every option of every command, and what becomes of it. The guide's page is made from it, and a test
//!    compares it with the help of the `qemu-img` that is installed.
//! 2. An option that cannot be obeyed is refused, with the reason; none is dropped unless leaving it out changes neither
//!    what is written nor what is answered.
//! 3. Where this program has other defaults, those of QEMU are asked for: the format of new images is raw unless given,
//!    and new qcow2 images have no subclusters.
//! 4. The exit code of a command line that cannot be understood is 1, as it is there.

pub(crate) mod table;

use std::ffi::{OsStr, OsString};
use std::path::Path;

use crate::getopt::{self, Bad};
use crate::names;
use crate::protocol::{as_file, place_there};
use table::{COMMANDS, Command, Meaning, OptionRow};

type Argument = getopt::Argument<'static, OptionRow>;

/// The name under which command lines are read in this way.
pub(crate) const NAME: &str = "qemu-img";

/// The version whose options these are.
const VERSION: &str = "10.0.0";

/// What is to be done for a command line.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Request {
    /// Run this command line of ours.
    Run(Vec<OsString>),
    /// Print this, and end well.
    Say(String),
}

/// Reads a command line of `qemu-img`, without the name of the program. The error is one line for people.
pub(crate) fn translate(arguments: &[OsString]) -> Result<Request, String> {
    let mut arguments = arguments.iter();
    let name = loop {
        let Some(argument) = arguments.next() else {
            return Err("no command given: `qemu-img --help` lists them".to_owned());
        };
        match argument.to_str() {
            Some("-h" | "--help") => return Ok(Request::Say(help())),
            Some("-V" | "--version") => return Ok(Request::Say(version())),
            Some("-T" | "--trace") => drop(arguments.next()),
            Some(trace) if trace.starts_with("-T") || trace.starts_with("--trace=") => {}
            Some(option) if option.starts_with('-') => return Err(format!("unknown option {option}")),
            Some(name) => break name,
            None => return Err("the name of the command is not text".to_owned()),
        }
    };
    let Some(command) = COMMANDS.iter().find(|command| command.name == name) else {
        return Err(format!("there is no command {name}: `qemu-img --help` lists them"));
    };
    let rest: Vec<OsString> = arguments.cloned().collect();
    if rest.iter().any(|argument| argument == "--help" || argument == "-h") {
        return Ok(Request::Say(help_of(command)));
    }
    if command.ours.is_empty() {
        return Err(format!("{name}: {}", command.note));
    }
    of_command(command, &split(command, rest)?).map(Request::Run).map_err(|why| format!("{name}: {why}"))
}

fn version() -> String {
    format!("{NAME} version {VERSION} (vellum {})", env!("CARGO_PKG_VERSION"))
}

fn help() -> String {
    let mut text = format!("{}\nUsage: qemu-img COMMAND [OPTIONS]\n\nCommands:\n", version());
    for command in COMMANDS {
        let state = if command.ours.is_empty() { " (not supported)" } else { "" };
        text.push_str(&format!("  {}{state}\n", command.name));
    }
    text.push_str(
        "\nSupported formats: raw qcow2 vellum luks; read: vmdk vdi vpc vhdx qed parallels dmg qcow",
    );
    text
}

fn help_of(command: &Command) -> String {
    let mut text = format!("Usage: qemu-img {} {}\n", command.name, command.usage);
    for opt in command.options() {
        text.push_str(&format!("\n  {}", opt.shown()));
        if matches!(opt.means, Meaning::Refused) {
            text.push_str(" (not supported)");
        }
    }
    text
}

/// Takes a command line apart.
fn split(command: &'static Command, arguments: Vec<OsString>) -> Result<Vec<Argument>, String> {
    let rows: Vec<&'static OptionRow> = command.options().collect();
    getopt::split(&rows, command.has_sizes, arguments).map_err(|bad| {
        let why = match bad {
            Bad::Unknown(option) | Bad::Ambiguous(option, _) => format!("unknown option {option}"),
            Bad::Missing(option) => format!("option {option} needs a value"),
            Bad::Excess(option) => format!("option {option} takes no value"),
        };
        format!("{}: {why}", command.name)
    })
}

/// Our command line for one of theirs.
fn of_command(command: &'static Command, arguments: &[Argument]) -> Result<Vec<OsString>, String> {
    let mut ours: Vec<OsString> = Vec::new();
    let mut has = |option: &str, value: Option<&OsStr>| {
        let mut text = OsString::from(option);
        if let Some(value) = value {
            text.push("=");
            text.push(value);
        }
        ours.push(text);
    };
    let (mut operands, mut is_direct, mut target_cache) = (Vec::new(), false, None);
    for argument in arguments {
        match argument {
            Argument::Operand(operand) => operands.push(operand.clone()),
            Argument::Option { opt, value } => match opt.means {
                Meaning::Same(name) if NAMES_BELOW.contains(&name) => {
                    has(name, value.as_deref().map(plain_file).as_deref());
                }
                Meaning::Same(name) => has(name, value.as_deref()),
                Meaning::Aside | Meaning::Own(_) => {}
                Meaning::Cache => match value.as_deref().and_then(OsStr::to_str) {
                    Some("none" | "directsync") if !is_direct => {
                        has("--direct", None);
                        is_direct = true;
                    }
                    Some("none" | "directsync") => {}
                    Some("unsafe" | "writeback" | "writethrough") if opt.long == "target-cache" => {
                        target_cache = value.as_deref(); // the last one counts
                    }
                    Some("writeback" | "writethrough" | "unsafe") => {}
                    _ => return Err(format!("{}: unknown cache mode", opt.name())),
                },
                Meaning::Refused => return Err(format!("{} is not supported: {}", opt.name(), opt.why)),
            },
        }
    }
    if let Some(mode) = target_cache {
        has("--target-cache", Some(mode));
    }
    let said = |name: &'static str| {
        arguments.iter().any(
            |argument| matches!(argument, Argument::Option { opt, .. } if opt.means == Meaning::Same(name)),
        )
    };
    check_names(command, arguments, &operands)?;
    check_values(command, arguments)?;
    let mut format_of_keys = None;
    let lists = |opt: &OptionRow| opt.long == "image-opts" && matches!(opt.means, Meaning::Own(_));
    if arguments.iter().any(|argument| matches!(argument, Argument::Option { opt, .. } if lists(opt))) {
        format_of_keys = name_by_path(command, &mut operands)?;
    }
    match command.name {
        "create" if !said("--format") => has("--format", Some(OsStr::new("raw"))),
        "convert" if !said("--target-format") && !said("--target-image-opts") => {
            has("--target-format", Some(OsStr::new("raw")));
        }
        _ => {}
    }
    if matches!(command.name, "create" | "convert") && makes_qcow2(arguments) {
        has("--options", Some(OsStr::new("extended_l2=off")));
    }
    let mut line = vec![OsString::from("vellum"), OsString::from(command.ours)];
    line.append(&mut ours);
    line.extend(format_of_keys);
    line.push("--".into());
    line.append(&mut operands);
    Ok(line)
}

/// An image that is named by keys, by its path and its format: the first operand becomes the path. What is returned says the
/// format.
fn name_by_path(command: &Command, operands: &mut [OsString]) -> Result<Option<OsString>, String> {
    let Some(first) = operands.first_mut() else { return Ok(None) };
    let named = names::named(Path::new(first), None, true).map_err(|error| error.chain())?;
    if let Some(tls) = &named.tls {
        return Err(format!("tls-creds={} is not supported here: name the export nbds://…", tls.id));
    }
    // The claim would be lost, and data could go where it can be read. A size is no data.
    if named.is_encrypted && !["amend", "resize"].contains(&command.name) {
        return Err("keys of an encrypted image are not supported here: name it by its path".to_owned());
    }
    *first = as_file(&named.path).into();
    Ok(named.format.map(|format| format!("--format={format}").into()))
}

/// Checks what would be guessed here.
fn check_values(command: &Command, arguments: &[Argument]) -> Result<(), String> {
    let said = |letter: char| {
        arguments.iter().rev().find_map(move |argument| match argument {
            Argument::Option { opt, value } if opt.short == Some(letter) => Some(value.as_deref()),
            _ => None,
        })
    };
    let text = |letter: char| said(letter).flatten().and_then(OsStr::to_str);
    match command.name {
        "rebase"
            if said('u').is_some()
                && said('F').is_none()
                && text('b').is_some_and(|name| !name.is_empty()) =>
        {
            return Err("the backing format must be specified: -F FMT".to_owned());
        }
        _ => {}
    }
    Ok(())
}

/// Options whose values name other images.
const NAMES_BELOW: [&str; 3] = ["--backing", "--base", "--source-file"];

/// A name that stands in an image: a protocol is left away where it means a file.
fn plain_file(name: &OsStr) -> OsString {
    match name.as_encoded_bytes().starts_with(b"file:") {
        true => place_there(name).map_or_else(|_| name.to_owned(), OsString::from),
        false => name.to_owned(),
    }
}

/// Checks the names of images among the operands, unless they are lists of options.
fn check_names(command: &Command, arguments: &[Argument], operands: &[OsString]) -> Result<(), String> {
    let said = |name: &str| {
        arguments.iter().any(|argument| matches!(argument, Argument::Option { opt, .. } if opt.long == name))
    };
    let images = match command.name {
        "create" | "resize" | "bitmap" => operands.len().min(1),
        // The last one is the target.
        "convert" if said("target-image-opts") => operands.len().saturating_sub(1),
        _ => operands.len(),
    };
    let lists = match command.name {
        "convert" if said("source-image-opts") => images.min(operands.len().saturating_sub(1)),
        // The name of the bitmap, and a size, are none.
        _ if said("image-opts") => images,
        _ => 0,
    };
    operands[..images].iter().skip(lists).try_for_each(|operand| {
        let name = match command.name {
            "dd" => operand.to_str().and_then(|text| text.strip_prefix("if=").or(text.strip_prefix("of="))),
            _ => None,
        };
        place_there(name.map_or(operand.as_os_str(), OsStr::new)).map(drop).map_err(|error| error.chain())
    })
}

/// Whether a new qcow2 image is made of which nobody says whether it has subclusters.
fn makes_qcow2(arguments: &[Argument]) -> bool {
    let value_of = |name: &'static str| {
        arguments.iter().filter_map(move |argument| match argument {
            Argument::Option { opt, value: Some(value) } if opt.means == Meaning::Same(name) => {
                value.to_str()
            }
            _ => None,
        })
    };
    let format = value_of("--target-format").next_back().or_else(|| value_of("--format").next_back());
    let is_said = value_of("--options").any(|list| list.contains("extended_l2") || list.contains("help"));
    format == Some("qcow2") && !is_said
}

#[cfg(test)]
mod tests;
