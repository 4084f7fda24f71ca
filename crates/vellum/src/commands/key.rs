//! `vellum key`: which secrets open an encrypted image.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Subcommand;
use serde_json::json;
use vellum_core::{Error, Result};
use vellum_daemon::keys::{KeyWish, KeysChanged, change, list};
use vellum_daemon::{FormatKind, IoMode, run as run_worker};

use super::Outcome;
use crate::args::{OutputFormat, parse_format};
use crate::output::{say, say_json};
use crate::protocol::image_name;
use crate::secrets::SecretArgs;

/// List, add and remove the keys of an image that is encrypted with LUKS
///
/// An image has eight key slots. Each of them holds the key of the data, and is opened by a secret of its own. To
/// change a secret, add the new one, then remove the old one.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    List(List),
    Add(Add),
    Remove(Remove),
}

/// Show which key slots are in use
#[derive(clap::Args)]
struct List {
    #[command(flatten)]
    common: Common,
}

/// Let one more secret open the image
#[derive(clap::Args)]
struct Add {
    /// The new secret: the id of one that is given with --secret
    #[arg(long, value_name = "ID")]
    new_secret: String,
    /// Use this slot, 0 to 7. Default: the first empty one
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(0..=7))]
    slot: Option<u8>,
    /// How long opening the image with the new secret is to take, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 2000, value_parser = clap::value_parser!(u32).range(1..=60_000))]
    iter_time: u32,
    #[command(flatten)]
    secrets: SecretArgs,
    #[command(flatten)]
    common: Common,
}

/// Let a secret open the image no more
///
/// The last key is never removed. Copies of the image that were made before can still be opened.
#[derive(clap::Args)]
struct Remove {
    /// Empty this slot, 0 to 7; if it has no key, only overwrite its key material again
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(0..=7), conflicts_with = "old_secret")]
    slot: Option<u8>,
    /// Empty the slots that this secret opens: the id of one that is given with --secret
    #[arg(long, value_name = "ID")]
    old_secret: Option<String>,
    #[command(flatten)]
    secrets: SecretArgs,
    #[command(flatten)]
    common: Common,
}

#[derive(clap::Args)]
struct Common {
    /// Format of the image: qcow2 or luks. Default: detected from the file
    #[arg(short, long, value_name = "FMT", value_parser = parse_format)]
    format: Option<FormatKind>,
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    output: OutputFormat,
    /// The image; while its keys change no program may have it open
    #[arg(value_name = "FILE", value_parser = image_name())]
    file: PathBuf,
}

pub(crate) fn run(args: &Args) -> Outcome {
    match &args.what {
        What::List(args) => show(&args.common)?,
        What::Add(args) => {
            let wish = KeyWish::Add {
                secret: args.new_secret.clone(),
                slot: args.slot.map(usize::from),
                time: Duration::from_millis(args.iter_time.into()),
            };
            carry_out(&args.common, &args.secrets, &wish, "added", "a key was added")?;
        }
        What::Remove(args) => {
            let wish = match (args.slot, &args.old_secret) {
                (Some(slot), _) => KeyWish::Remove { slot: slot.into() },
                (None, Some(secret)) => KeyWish::RemoveSecret { secret: secret.clone() },
                (None, None) => {
                    return Err(Error::invalid("say which key to remove: --slot N or --old-secret ID").into());
                }
            };
            carry_out(&args.common, &args.secrets, &wish, "removed", "the key was removed")?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn show(common: &Common) -> Result<()> {
    let slots = run_worker(IoMode::Auto, async || list(&common.file, common.format).await)??;
    match common.output {
        OutputFormat::Json => {
            let slots = slots.iter().map(|slot| match slot.iterations {
                Some(iterations) => json!({ "slot": slot.number, "active": true, "iters": iterations }),
                None => json!({ "slot": slot.number, "active": false }),
            });
            say_json(
                &json!({ "filename": common.file.display().to_string(), "slots": slots.collect::<Vec<_>>() }),
            );
        }
        OutputFormat::Human => {
            for slot in slots {
                match slot.iterations {
                    Some(iterations) => say(&format!("{}: in use, {iterations} iterations", slot.number)),
                    None => say(&format!("{}: empty", slot.number)),
                }
            }
        }
    }
    Ok(())
}

fn carry_out(common: &Common, secrets: &SecretArgs, wish: &KeyWish, word: &str, done: &str) -> Result<()> {
    let secrets = secrets.read()?;
    let work = async || change(&common.file, common.format, &secrets, wish).await;
    let KeysChanged { slots, was_empty } = run_worker(IoMode::Auto, work)??;
    let numbers: Vec<String> = slots.iter().map(usize::to_string).collect();
    match common.output {
        OutputFormat::Human if was_empty => say(&format!(
            "{}: slot {} had no key: its key material was overwritten again",
            common.file.display(),
            numbers.join(", ")
        )),
        OutputFormat::Human => {
            say(&format!("{}: {done} (slot {})", common.file.display(), numbers.join(", ")))
        }
        OutputFormat::Json => {
            say_json(&json!({ "filename": common.file.display().to_string(), word: slots }));
        }
    }
    Ok(())
}
