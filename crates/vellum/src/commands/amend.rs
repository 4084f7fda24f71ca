//! `vellum amend`: what a qcow2 image is, changed in place; and the keys of an encrypted one, in the words of `qemu-img`.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use vellum_core::{BlockSize, Error, Result};
use vellum_daemon::closed::{ResizeOptions, amend, resize};
use vellum_daemon::keys::{KeyWish, change, named};
use vellum_daemon::{Amend, FormatKind, IoMode, run as run_worker};

use super::Outcome;
use crate::args::{parse_format, parse_size};
use crate::key_values::split_options;
use crate::output::say;
use crate::protocol::image_name;
use crate::secrets::SecretArgs;

/// What `-o help` prints, in the form of `qemu-img`.
const HELP: &str = "Amend options for 'qcow2':
  compat=<str>           - Compatibility level (v2 [0.10] or v3 [1.1])
  encrypt.iter-time=<num> - How long opening with the new key takes, in milliseconds
  encrypt.keyslot=<num>  - Key slot to fill or empty, 0 to 7
  encrypt.new-secret=<str> - Secret of the key that is added (state=active)
  encrypt.old-secret=<str> - Secret whose keys are removed (state=inactive)
  encrypt.state=<str>    - Add a key (active) or remove keys (inactive)
  lazy_refcounts=<bool (on/off)> - Postpone refcount updates
  refcount_bits=<num>    - Width of a reference count entry in bits
  size=<size>            - Size of the disk";

/// The same of a LUKS volume.
const HELP_LUKS: &str = "Amend options for 'luks':
  iter-time=<num>        - How long opening with the new key takes, in milliseconds
  keyslot=<num>          - Key slot to fill or empty, 0 to 7
  new-secret=<str>       - Secret of the key that is added (state=active)
  old-secret=<str>       - Secret whose keys are removed (state=inactive)
  size=<size>            - Size of the disk
  state=<str>            - Add a key (active) or remove keys (inactive)";

const SLOTS: usize = 8;

/// By default opening an image with a new key takes as long as with `vellum key add`.
const KEY_TIME: Duration = Duration::from_secs(2);

/// Change the version, refcount width or lazy refcounts of a qcow2 image, or the keys of an encrypted one, without a copy
///
/// The disk and its snapshots read the same before and after. compat=0.10 is refused where the image has what that version
/// lacks, such as bitmaps, subclusters, zstd, or zeros over a backing image; a journal is removed. A crash leaves the image with or without each of the
/// changes, and the same command can be run again. The image must not be in use.
///
/// `vellum key` changes keys, too, and lists them: encrypt.state=active adds the key of encrypt.new-secret, inactive removes that of
/// encrypt.old-secret or of encrypt.keyslot. size makes the disk larger, as `vellum resize` does, which can also
/// make it smaller. For the backing image there is `vellum rebase`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Options: compat=0.10|1.1, lazy_refcounts=on|off, refcount_bits=1|2|4|8|16|32|64, size=SIZE; encrypt.state=active|inactive,
    /// encrypt.new-secret=ID, encrypt.old-secret=ID, encrypt.keyslot=N, encrypt.iter-time=MS
    #[arg(short, long, value_name = "OPTIONS", required = true)]
    options: Vec<String>,
    #[command(flatten)]
    secrets: SecretArgs,
    /// Format of the image: qcow2; luks, to change its keys
    #[arg(short, long, value_name = "FMT", value_parser = parse_format)]
    format: Option<FormatKind>,
    /// The image
    #[arg(value_name = "FILE", value_parser = image_name(), required_unless_present = "options")]
    file: Option<PathBuf>,
}

pub(crate) fn run(args: &Args) -> Outcome {
    if args.options.iter().any(|list| list.split(',').any(|option| option == "help" || option == "?")) {
        say(if args.format == Some(FormatKind::Luks) { HELP_LUKS } else { HELP });
        return Ok(ExitCode::SUCCESS);
    }
    let Wishes { image: wish, keys, size } = wishes(&args.options)?;
    let file = args.file.as_ref().ok_or_else(|| Error::invalid("give the name of the image"))?;
    let keys = keys.wish()?;
    let secrets = args.secrets.read()?;
    if let Some(KeyWish::Add { secret, .. } | KeyWish::RemoveSecret { secret }) = &keys {
        named(&secrets, secret)?; // before anything changes
    }
    run_worker(IoMode::Auto, async || {
        let mut done = Vec::new();
        if wish != Amend::default() {
            amend(file, args.format, &wish).await?;
            done.push("the options of the image");
        }
        if let Some(size) = size {
            let options =
                ResizeOptions { format: args.format, secrets: secrets.clone(), ..ResizeOptions::default() };
            resize(file, &options, |before| not_smaller(before, size))
                .await
                .map_err(|error| after(&done, error))?;
            done.push("the size");
        }
        if let Some(keys) = &keys {
            change(file, args.format, &secrets, keys).await.map_err(|error| after(&done, error))?;
        }
        Ok::<_, Error>(())
    })??;
    Ok(ExitCode::SUCCESS)
}

/// Amending loses no data.
fn not_smaller(before: u64, size: u64) -> Result<u64> {
    if size < before {
        return Err(Error::invalid(format!(
            "-o size={size}: the disk has {before} bytes, and what is behind the new end would be lost: use `vellum resize --shrink`"
        )));
    }
    Ok(size)
}

/// The error of a step, with those that were done before it.
fn after(done: &[&str], error: Error) -> Error {
    match done {
        [] => error,
        done => error.context(format!("{} did change; then", done.join(" and "))),
    }
}

/// What is said of the keys. QEMU's names: with `encrypt.` before them for qcow2, without for LUKS.
#[derive(Default)]
struct KeyOptions {
    is_active: Option<bool>,
    new_secret: Option<String>,
    old_secret: Option<String>,
    slot: Option<usize>,
    time: Option<Duration>,
}

impl KeyOptions {
    /// Takes an option; returns whether it is one of keys.
    fn take(&mut self, key: &str, value: &str) -> Result<bool> {
        let bad = |allowed: &str| Error::invalid(format!("-o {key}={value}: expected {allowed}"));
        match key.strip_prefix("encrypt.").unwrap_or(key) {
            "state" => {
                self.is_active = Some(match value {
                    "active" => true,
                    "inactive" => false,
                    _ => return Err(bad("active, inactive")),
                });
            }
            "new-secret" => self.new_secret = Some(value.to_owned()),
            "old-secret" => self.old_secret = Some(value.to_owned()),
            "keyslot" => {
                let slot = value.parse().ok().filter(|slot| *slot < SLOTS);
                self.slot = Some(slot.ok_or_else(|| bad("a slot from 0 to 7"))?);
            }
            "iter-time" => {
                let millis = value.parse().ok().filter(|millis| (1..=60_000).contains(millis));
                let millis = millis.ok_or_else(|| bad("milliseconds from 1 to 60000"))?;
                self.time = Some(Duration::from_millis(millis));
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// What is to be done, if anything.
    fn wish(self) -> Result<Option<KeyWish>> {
        let Self { is_active, new_secret, old_secret, slot, time } = self;
        let is_said = new_secret.is_some() || old_secret.is_some() || slot.is_some() || time.is_some();
        let bad = |why: &'static str| Err(Error::invalid(why));
        match is_active {
            None if is_said => {
                bad("say what the keys are to be: encrypt.state=active or encrypt.state=inactive")
            }
            None => Ok(None),
            Some(true) if old_secret.is_some() => bad(
                "encrypt.old-secret is for encrypt.state=inactive: add the new key first, then remove the old one",
            ),
            Some(true) => match new_secret {
                Some(secret) => Ok(Some(KeyWish::Add { secret, slot, time: time.unwrap_or(KEY_TIME) })),
                None => bad("encrypt.state=active needs the new key's secret: encrypt.new-secret=ID"),
            },
            Some(false) if new_secret.is_some() || time.is_some() => {
                bad("encrypt.new-secret and encrypt.iter-time are for encrypt.state=active")
            }
            Some(false) => match (slot, old_secret) {
                (Some(_), Some(_)) => bad("give one of encrypt.keyslot and encrypt.old-secret"),
                (Some(slot), None) => Ok(Some(KeyWish::Remove { slot })),
                (None, Some(secret)) => Ok(Some(KeyWish::RemoveSecret { secret })),
                (None, None) => bad("say which key is to go: encrypt.old-secret=ID or encrypt.keyslot=N"),
            },
        }
    }
}

/// All that is to change, in the order in which it does.
#[derive(Default)]
struct Wishes {
    image: Amend,
    size: Option<u64>,
    keys: KeyOptions,
}

fn wishes(options: &[String]) -> Result<Wishes> {
    let mut wishes = Wishes::default();
    let Wishes { image: wish, size, keys } = &mut wishes;
    for (key, value) in split_options(options)? {
        let bad = |allowed: &str| Error::invalid(format!("-o {key}={value}: expected {allowed}"));
        let elsewhere = |command: &str| {
            Err(Error::unsupported(format!("-o {key}: use `vellum {command}`, which changes it")))
        };
        match key.as_str() {
            "compat" => {
                wish.version = Some(match value.as_str() {
                    "0.10" | "v2" => 2,
                    "1.1" | "v3" => 3,
                    _ => return Err(bad("v2 (0.10), v3 (1.1)")),
                });
            }
            "lazy_refcounts" => {
                wish.lazy_refcounts = Some(match value.as_str() {
                    "on" | "true" | "yes" => true,
                    "off" | "false" | "no" => false,
                    _ => return Err(bad("on, off")),
                });
            }
            "refcount_bits" => {
                wish.refcount_bits = Some(value.parse().map_err(|_| bad("1, 2, 4, 8, 16, 32, 64"))?);
            }
            "size" => *size = Some(BlockSize::SECTOR.round_up(parse_size(&value)?)),
            "backing_file" | "backing_fmt" => return elsewhere("rebase"),
            "journal" | "journal_size" => return elsewhere("journal"),
            key if keys.take(key, &value)? => {}
            _ => {
                return Err(Error::unsupported(format!(
                    "-o {key}: an image that exists cannot change that: copy it with `vellum convert`"
                )));
            }
        }
    }
    Ok(wishes)
}
