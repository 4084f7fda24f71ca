//! The program under the name `qemu-nbd`: its command line, turned into one of `vellum serve`.
//!
//! ```text
//!   qemu-nbd -t -e 4 -k /run/d.sock -f qcow2 d.qcow2
//!        │ read by the rules of getopt, checked in QEMU's order and in its words
//!        ▼
//!   vellum serve --shared=4 --format=qcow2 --nbd=unix:/run/d.sock … -- d.qcow2
//! ```
//!
//! 1. [`table`] has every option, and what becomes of it. The guide's page is made from it, and a test compares it with the
//!    help of the `qemu-nbd` that is installed.
//! 2. An option that cannot be obeyed is refused, with the reason; none is dropped unless leaving it out changes neither
//!    what is written nor what is answered.
//! 3. Where this program has other defaults, those of QEMU are asked for: one client at a time, the end with the last one,
//!    discards that are ignored, no description.
//! 4. What is wrong with a command line is said in QEMU's words, and the exit code is 1, as it is there.

pub(crate) mod table;

use std::ffi::{OsStr, OsString};

use vellum_daemon::FormatKind;

use crate::getopt::{self, Argument, Bad};
use crate::objects::{Objects, with_value};
use crate::qemu_img::Request;
use crate::qemu_img::table::{Meaning, OptionRow};

/// The name under which command lines are read in this way.
pub(crate) const NAME: &str = "qemu-nbd";

/// The version whose options these are.
const VERSION: &str = "10.0.0";

/// The port where nothing else is said.
const PORT: &str = "10809";

/// The longest name of an export.
const NAME_BYTES_MAX: usize = 4096;

/// Options that say something of the disk, and have no meaning where exports are listed.
const DISK_SETTINGS: &[&str] = &[
    "aio",
    "allocation-depth",
    "bitmap",
    "cache",
    "connect",
    "description",
    "discard",
    "disconnect",
    "export-name",
    "format",
    "load-snapshot",
    "nocache",
    "offset",
];

/// The line that follows what is wrong with the form of a command line.
const TRY: &str = "Try `qemu-nbd --help' for more information.";

/// Reads a command line of `qemu-nbd`, without the name of the program. The error is what is printed, line by line, after
/// the name.
pub(crate) fn translate(arguments: &[OsString]) -> Result<Request, Vec<String>> {
    let rows = table::rows();
    let arguments = getopt::split(&rows, false, arguments.to_vec()).map_err(|bad| {
        let why = match bad {
            Bad::Unknown(option) if option.starts_with("--") => format!("unrecognized option '{option}'"),
            Bad::Unknown(option) => format!("invalid option -- '{}'", option.trim_start_matches('-')),
            Bad::Missing(option) if option.starts_with("--") => {
                format!("option '{option}' requires an argument")
            }
            Bad::Missing(option) => {
                format!("option requires an argument -- '{}'", option.trim_start_matches('-'))
            }
            Bad::Excess(option) => format!("option '{option}' doesn't allow an argument"),
            Bad::Ambiguous(option, names) => {
                let names: String = names.iter().map(|name| format!(" '--{name}'")).collect();
                format!("option '{option}' is ambiguous; possibilities:{names}")
            }
        };
        vec![why, TRY.to_owned()]
    })?;
    let mut said = Said::default();
    let mut operands = Vec::new();
    for argument in arguments {
        match argument {
            Argument::Operand(operand) => operands.push(operand),
            Argument::Option { opt, value } => match (opt.long, said.note(opt, value)) {
                ("help", Ok(())) => return Ok(Request::Say(help())),
                ("version", Ok(())) => return Ok(Request::Say(version())),
                (_, noted) => noted.map_err(|why| vec![why])?,
            },
        }
    }
    if said.lists {
        return said.list_line(operands.is_empty()).map(Request::Run).map_err(|why| vec![why]);
    }
    let [image] = &operands[..] else {
        return Err(vec!["Invalid number of arguments".to_owned(), TRY.to_owned()]);
    };
    said.line(image).map(Request::Run).map_err(|why| vec![why])
}

fn version() -> String {
    format!("{NAME} {VERSION} (vellum {})", env!("CARGO_PKG_VERSION"))
}

fn help() -> String {
    let mut text =
        format!("Usage: qemu-nbd [OPTIONS] FILE\nQEMU Disk Network Block Device Utility, by {}\n", version());
    for (heading, rows) in table::GROUPS {
        text.push_str(&format!("\n{heading}:"));
        for opt in *rows {
            let here = match opt.means {
                Meaning::Same(name) => format!("vellum serve {name}"),
                Meaning::Own(shown) => shown.replace('`', ""),
                Meaning::Aside | Meaning::Cache => "accepted".to_owned(),
                Meaning::Refused => "not supported".to_owned(),
            };
            text.push_str(&format!("\n  {:<24}{here}", opt.shown()));
        }
        text.push('\n');
    }
    text
}

/// What a command line says.
#[derive(Default)]
struct Said {
    /// Options of ours that need no more thought.
    ours: Vec<OsString>,
    port: Option<String>,
    bind: Option<String>,
    socket: Option<OsString>,
    /// A block device of the kernel that is to show the image.
    device: Option<OsString>,
    /// What the operand names is such a device, and loses its server.
    disconnects: bool,
    shared: Option<u16>,
    is_persistent: bool,
    is_verbose: bool,
    is_forked: bool,
    has_description: bool,
    has_format: bool,
    has_image_opts: bool,
    is_read_only: bool,
    is_temporary: bool,
    cache: Option<Cache>,
    aio: Option<String>,
    unmaps: Option<bool>,
    detects: Option<String>,
    objects: Objects,
    tls: Option<String>,
    /// The access list that clients must be in.
    authz: Option<String>,
    /// The name that a server's certificate must be for.
    tls_hostname: Option<String>,
    /// The exports of a server are listed.
    lists: bool,
    /// Something was said of the disk that is served.
    has_disk_settings: bool,
}

/// How the host's cache is used.
#[derive(Debug, Clone, Copy, Default)]
struct Cache {
    is_direct: bool,
    is_durable: bool,
}

impl Said {
    /// Takes up one option.
    fn note(&mut self, opt: &'static OptionRow, value: Option<OsString>) -> Result<(), String> {
        let text = || value.as_deref().unwrap_or_default().to_string_lossy().into_owned();
        self.has_disk_settings |= DISK_SETTINGS.contains(&opt.long);
        match (opt.long, opt.means) {
            ("list", _) => self.lists = true,
            ("tls-authz", _) => self.authz = Some(text()),
            ("tls-hostname", _) => self.tls_hostname = Some(text()),
            ("port", _) => self.port = Some(text()),
            ("bind", _) => self.bind = Some(text()),
            ("socket", _) => {
                if !text().starts_with('/') {
                    return Err("socket path must be absolute".to_owned());
                }
                self.socket = value;
            }
            ("connect", _) => self.device = value,
            ("disconnect", _) => self.disconnects = true,
            ("shared", _) => {
                let number = number_of(&text()).and_then(|number| u16::try_from(number).ok());
                self.shared =
                    Some(number.ok_or_else(|| format!("Invalid shared device number '{}'", text()))?);
            }
            ("persistent", _) => self.is_persistent = true,
            ("verbose", _) => self.is_verbose = true,
            ("offset", _) => {
                let number = number_of(&text()).ok_or_else(|| format!("Invalid offset '{}'", text()))?;
                self.has("--offset", Some(OsStr::new(&number.to_string())));
            }
            ("handshake-limit", _) => {
                let number = number_of(&text()).filter(|number| *number <= 86_400);
                let number = number.ok_or_else(|| format!("Invalid handshake limit '{}'", text()))?;
                self.has("--handshake-seconds", Some(OsStr::new(&number.to_string())));
            }
            ("export-name", _) if text().len() > NAME_BYTES_MAX => {
                return Err(format!("export name '{}' too long", text()));
            }
            ("description", _) if text().len() > NAME_BYTES_MAX => {
                return Err(format!("export description '{}' too long", text()));
            }
            ("format", _) if text().parse::<FormatKind>().is_err() => {
                return Err(format!("Unknown driver '{}'", text()));
            }
            ("nocache" | "cache", _) => self.note_cache(opt, &text())?,
            ("aio", _) => {
                if self.aio.is_some() {
                    return Err("--aio can only be specified once".to_owned());
                }
                if !["native", "threads", "io_uring"].contains(&text().as_str()) {
                    return Err(format!("Invalid aio mode '{}'", text()));
                }
                self.aio = Some(text());
            }
            ("discard", _) => {
                if self.unmaps.is_some() {
                    return Err("--discard can only be specified once".to_owned());
                }
                self.unmaps = Some(match text().as_str() {
                    "ignore" | "off" => false,
                    "unmap" | "on" => true,
                    other => return Err(format!("Invalid discard mode `{other}'")),
                });
            }
            ("detect-zeroes", _) => {
                match text().as_str() {
                    "off" | "on" => self.detects = Some(text()),
                    "unmap" if self.unmaps == Some(true) => self.detects = Some(text()),
                    "unmap" => {
                        return Err("setting detect-zeroes to unmap is not allowed without setting discard operation \
                                to unmap"
                        .to_owned());
                    }
                    other => {
                        return Err(format!(
                            "Failed to parse detect_zeroes mode: invalid parameter value: {other}"
                        ));
                    }
                }
            }
            ("object", _) => self.note_object(&text(), value.as_deref())?,
            ("tls-creds", _) => self.tls = Some(text()),
            ("read-only", _) => self.is_read_only = true,
            ("snapshot", _) => self.is_temporary = true,
            ("load-snapshot", _) => {
                self.is_read_only = true;
                self.has("--snapshot", value.as_deref());
            }
            (_, Meaning::Refused) => return Err(format!("{} is not supported: {}", opt.name(), opt.why)),
            (name, Meaning::Same(ours)) => {
                match name {
                    "description" => self.has_description = true,
                    "format" => self.has_format = true,
                    "image-opts" => self.has_image_opts = true,
                    "fork" => self.is_forked = true,
                    _ => {}
                }
                self.has(ours, value.as_deref());
            }
            (_, Meaning::Aside | Meaning::Own(_) | Meaning::Cache) => {}
        }
        Ok(())
    }

    fn note_cache(&mut self, opt: &OptionRow, mode: &str) -> Result<(), String> {
        if self.cache.is_some() {
            return Err("-n and --cache can only be specified once".to_owned());
        }
        let mode = if opt.value { mode } else { "none" };
        self.cache = Some(match mode {
            "none" | "off" => Cache { is_direct: true, is_durable: false },
            "directsync" => Cache { is_direct: true, is_durable: true },
            "writethrough" => Cache { is_direct: false, is_durable: true },
            "writeback" | "unsafe" => Cache::default(),
            other => return Err(format!("Invalid cache mode `{other}'")),
        });
        Ok(())
    }

    fn note_object(&mut self, text: &str, value: Option<&OsStr>) -> Result<(), String> {
        if self.objects.note(text)? {
            self.has("--object", value);
        }
        Ok(())
    }

    fn has(&mut self, option: &str, value: Option<&OsStr>) {
        self.ours.push(value.map_or_else(|| option.into(), |value| with_value(option, value)));
    }

    /// The command line of ours.
    fn line(mut self, image: &OsStr) -> Result<Vec<OsString>, String> {
        if self.disconnects {
            let mut device = OsString::from("--device=");
            device.push(image);
            return Ok(["vellum", "client", "disconnect"]
                .map(OsString::from)
                .into_iter()
                .chain([device])
                .collect());
        }
        self.refuse_tls_options_alone()?;
        if let Some(wanted) = self.tls.take() {
            if self.device.is_some() {
                return Err("TLS is not supported with a host device".to_owned());
            }
            if self.tls_hostname.is_some() {
                return Err("TLS hostname is only supported with export list".to_owned());
            }
            let mut ours = self.objects.of_server(&wanted, self.authz.as_deref())?;
            self.ours.append(&mut ours);
        }
        if self.has_image_opts && self.has_format {
            return Err("--image-opts and -f are mutually exclusive".to_owned());
        }
        let cache = self.cache.unwrap_or_default();
        if self.aio.as_deref() == Some("native") && !cache.is_direct {
            return Err(
                "aio=native was specified, but it requires cache.direct=on, which was not specified."
                    .to_owned(),
            );
        }
        let is_asked = self.socket.is_some() || self.bind.is_some() || self.port.is_some();
        let address = self.address()?;
        // Sockets that were passed replace the address, and a device needs none.
        if std::env::var_os("LISTEN_FDS").is_none() && (self.device.is_none() || is_asked) {
            self.has("--nbd", Some(&address));
        }
        if let Some(device) = self.device.take() {
            self.has("--nbd-device", Some(&device));
            if !self.is_verbose && !self.is_forked {
                self.has("--fork", None);
            }
        }
        let shared = self.shared.unwrap_or(1).to_string();
        self.has("--shared", Some(OsStr::new(&shared)));
        let unmaps = self.unmaps.unwrap_or(false);
        self.has("--discard", Some(OsStr::new(if unmaps { "unmap" } else { "ignore" })));
        if let Some(detects) = self.detects.take() {
            self.has("--detect-zeroes", Some(OsStr::new(&detects)));
        }
        // Nothing is written to a disk that is only read, so nothing has to be thrown away.
        let is_temporary = self.is_temporary && !self.is_read_only;
        let wanted = [
            ("--read-only", self.is_read_only),
            ("--temporary", is_temporary),
            ("--direct", cache.is_direct),
            ("--durable", cache.is_durable),
            ("--exit-when-unused", !self.is_persistent),
            ("--log=debug", self.is_verbose),
            ("--fork-verbose", self.is_verbose && self.is_forked),
            ("--quiet", !self.is_verbose),
            ("--description=", !self.has_description),
        ];
        for (option, _) in wanted.into_iter().filter(|(_, is_wanted)| *is_wanted) {
            self.has(option, None);
        }
        let mut line = vec![OsString::from("vellum"), OsString::from("serve")];
        line.append(&mut self.ours);
        line.extend(["--".into(), image.to_owned()]);
        Ok(line)
    }
}

impl Said {
    /// Options for TLS without certificates.
    fn refuse_tls_options_alone(&self) -> Result<(), String> {
        match (&self.tls, &self.authz, &self.tls_hostname) {
            (None, Some(_), _) => Err("--tls-authz is not permitted without --tls-creds".to_owned()),
            (None, None, Some(_)) => Err("--tls-hostname is not permitted without --tls-creds".to_owned()),
            _ => Ok(()),
        }
    }

    /// Where the server is, or will be.
    fn address(&mut self) -> Result<OsString, String> {
        if let Some(path) = self.socket.take() {
            let mut address = OsString::from("unix:");
            address.push(path);
            return Ok(address);
        }
        let host = self.bind.take().unwrap_or_else(|| "0.0.0.0".to_owned());
        let host = if host.contains(':') && !host.starts_with('[') { format!("[{host}]") } else { host };
        let port = self.port.take().unwrap_or_else(|| PORT.to_owned());
        if port.parse::<u16>().is_err() {
            return Err(format!("address resolution failed for {host}:{port}: use a number from 1 to 65535"));
        }
        Ok(format!("tcp:{host}:{port}").into())
    }

    /// The command line of ours that lists the exports of a server.
    fn list_line(mut self, has_no_file: bool) -> Result<Vec<OsString>, String> {
        if !has_no_file {
            return Err("List mode is incompatible with a file name".to_owned());
        }
        if self.has_disk_settings {
            return Err("List mode is incompatible with per-device settings".to_owned());
        }
        if self.is_forked {
            return Err("List mode is incompatible with forking".to_owned());
        }
        self.refuse_tls_options_alone()?;
        if self.tls.is_some() && self.authz.is_some() {
            return Err("TLS authorization is incompatible with export list".to_owned());
        }
        // Without certificates there is no name to look for.
        let tls = match self.tls.take() {
            Some(wanted) => {
                let host = self.tls_hostname.as_deref();
                self.objects.of_client(&wanted, host, self.socket.is_some())?
            }
            None => Vec::new(),
        };
        let address = self.address()?;
        let line = ["vellum", "export", "list"].map(OsString::from);
        Ok(line.into_iter().chain([with_value("--nbd", &address)]).chain(tls).collect())
    }
}

/// A number as C reads it: decimal, with `0x` hexadecimal, with `0` octal.
fn number_of(text: &str) -> Option<u64> {
    match (text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")), text.strip_prefix('0')) {
        (Some(digits), _) => u64::from_str_radix(digits, 16).ok(),
        (None, Some(digits)) if !digits.is_empty() => u64::from_str_radix(digits, 8).ok(),
        _ => text.parse().ok(),
    }
}

#[cfg(test)]
mod tests;
