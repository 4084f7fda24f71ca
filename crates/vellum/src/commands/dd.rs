//! `vellum dd`: copy a part of a disk, in the words of dd.

use std::cell::OnceCell;
use std::path::PathBuf;
use std::process::ExitCode;

use vellum_core::{Error, ErrorKind, Result};
use vellum_daemon::convert::{Conversion, Step, convert_part, same_file};
use vellum_daemon::signals::Stop;
use vellum_daemon::{FormatKind, ImageOptions, IoMode, open_image, run as run_worker};

use super::{Failure, Outcome, or_share, with_code};
use crate::args::{AllowArgs, NewImage, OutputFormat, parse_format, parse_size};
use crate::names::named;
use crate::output::complain;
use crate::progress::{Progress, Wish};
use crate::protocol::place;
use crate::secrets::SecretArgs;

/// Copy the disk of an image, or a part of it, in blocks, as dd does
///
/// Operands: if=FILE and of=FILE name the image to read and the one to create. bs=SIZE is the size of a block
/// (default 512), count=N copies at most N blocks, skip=N leaves out the first N. The size of the new disk is
/// rounded up to 512. As with `vellum convert`, an existing target stays intact until the copy is complete.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Format of the source: raw, qcow2, vellum, or one that is only read (vmdk, vdi, vpc, vhdx, qed, parallels, dmg, qcow). Default: detected from the file
    #[arg(short, long, value_name = "FMT", value_parser = parse_format)]
    format: Option<FormatKind>,
    /// Format of the target: raw, qcow2 or vellum
    #[arg(short = 'O', long, value_name = "FMT", value_parser = parse_format, default_value = "raw")]
    target_format: FormatKind,
    /// Read the source even if another program has it open for writing
    ///
    /// The copy may be inconsistent.
    #[arg(short = 'U', long)]
    force_share: bool,
    /// if= is a list of options in the words of QEMU, such as driver=qcow2,file.filename=a.qcow2
    #[arg(long, conflicts_with = "format")]
    image_opts: bool,
    /// Show progress on a terminal; SIGUSR1 prints it once, with or without this option
    #[arg(short, long)]
    progress: bool,
    #[command(flatten)]
    allow: AllowArgs,
    #[command(flatten)]
    secrets: SecretArgs,
    /// if=FILE, of=FILE, bs=SIZE, count=N, skip=N
    #[arg(value_name = "OPERAND", required = true)]
    operands: Vec<String>,
}

/// The operands.
struct Operands {
    source: PathBuf,
    target: PathBuf,
    block: u64,
    count: Option<u64>,
    skip: u64,
}

/// The largest block, which is that of qemu-img.
const BLOCK_MAX: u64 = (1 << 31) - 1;

impl Operands {
    fn parse(all: &[String]) -> Result<Self> {
        let (mut source, mut target, mut block, mut count, mut skip) = (None, None, 512, None, 0);
        for operand in all {
            let (name, value) = operand.split_once('=').ok_or_else(|| {
                Error::invalid(format!("{operand}: operands have the form NAME=VALUE, such as if=FILE"))
            })?;
            let number = || parse_size(value).map_err(|error| error.context(operand.clone()));
            match name {
                "if" => source = Some(PathBuf::from(value)),
                "of" => target = Some(PathBuf::from(value)),
                "bs" => block = number()?,
                "count" => count = Some(number()?),
                "skip" => skip = number()?,
                _ => {
                    return Err(Error::invalid(format!(
                        "{name}: unknown operand: use if, of, bs, count and skip"
                    )));
                }
            }
        }
        if !(1..=BLOCK_MAX).contains(&block) {
            return Err(Error::invalid(format!("bs={block}: use 1 to {BLOCK_MAX} bytes")));
        }
        let missing = |name: &str| Error::invalid(format!("{name}=FILE is missing"));
        Ok(Self {
            source: source.ok_or_else(|| missing("if"))?,
            target: target.ok_or_else(|| missing("of"))?,
            block,
            count,
            skip,
        })
    }

    /// Where the copy begins, and how many bytes it has at most.
    fn part(&self) -> (u64, u64) {
        let bytes = self.count.map_or(u64::MAX, |count| count.saturating_mul(self.block));
        (self.skip.saturating_mul(self.block), bytes)
    }
}

pub(crate) fn run(args: &Args) -> Outcome {
    let operands = Operands::parse(&args.operands)?;
    run_worker(IoMode::Auto, async || copy(args, &operands).await)??;
    Ok(ExitCode::SUCCESS)
}

async fn copy(args: &Args, operands: &Operands) -> Result<(), Failure> {
    let named = named(&operands.source, args.format, args.image_opts)?;
    let (source, target) = (&named.path, &place(&operands.target)?);
    args.target_format.check_is_written()?;
    if args.target_format == FormatKind::Luks {
        let why = "-O luks: a luks image needs a secret, and dd has no option that names one: use `vellum convert -O luks \
                   -o key-secret=ID`";
        return Err(Error::unsupported(why).into());
    }
    if same_file(source, target) {
        return Err(Error::invalid(format!("{} cannot be copied into itself", source.display())).into());
    }
    let mut stop = Stop::new()?;
    let secrets = args.secrets.read()?;
    let remote = args.allow.remote.of(&[&named], &args.secrets)?;
    let options = ImageOptions {
        secrets: secrets.clone(),
        may_be_weak: true,
        must_be_encrypted: named.must_be_encrypted(),
        format: named.format,
        force_share: args.force_share,
        allow_dirs: args.allow.places(),
        remote: remote.clone(),
        ..ImageOptions::reading()
    };
    let opened = match stop.or_stopped(open_image(source, &options)).await {
        Err(error) if stop.is_requested() => {
            return Err(with_code(130)(error.context("interrupted")));
        }
        opened => opened.map_err(or_share)?,
    };
    let (start, bytes) = operands.part();
    let size = opened.disk().geometry().size;
    if start > size {
        complain(&format!(
            "vellum dd: warning: {} has only {size} bytes, so the copy is empty: skip={} is too large",
            source.display(),
            operands.skip
        ));
    }
    if opened.is_any_encrypted() {
        complain(&format!(
            "vellum dd: warning: {} is encrypted and {} is not: its data can be read there without a secret (`vellum convert \
             -o encrypt.format=luks` makes an encrypted copy)",
            source.display(),
            target.display()
        ));
    }
    let new = NewImage::parse(&[])?;
    let conversion = Conversion {
        target: target.clone(),
        format: args.target_format,
        qcow2: new.qcow2,
        native: new.native,
        secrets,
        fills_existing: false,
        must_be_encrypted: None,
        target_is_zero: false,
        data_files: Vec::new(),
        allow_dirs: args.allow.places(),
        remote,
        direct: false,
        writes_direct: true,
        never_flushed: false,
        pieces_at_once: 8,
        sparse_bytes: 4096,
        out_of_order: false,
        rate: None,
        salvages: false,
        compression: None,
        backing: None,
        bitmaps: Vec::new(),
    };
    let bar = OnceCell::new();
    let wish = Wish { is_wanted: args.progress, quiet: false, output: OutputFormat::Human };
    let progress = |step| match step {
        Step::IsPlain | Step::Lost(_) | Step::LostInAll(_) => {}
        Step::Begins(size) => drop(bar.set(Progress::new(size, wish))),
        Step::Copied(bytes) => bar.get().into_iter().for_each(|bar: &Progress| bar.set(bytes)),
        Step::Ends => bar.get().into_iter().for_each(Progress::end),
    };
    let copied = convert_part(opened, (start, bytes), &conversion, &mut stop, &progress).await;
    copied.map_err(|error| match error.kind() {
        ErrorKind::Closed if stop.is_requested() => with_code(130)(error.context("interrupted")),
        _ => error.into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operands_are_those_of_dd() {
        let parse = |text: &str| {
            let operands: Vec<String> = text.split(' ').map(str::to_owned).collect();
            Operands::parse(&operands).map(|operands| operands.part())
        };
        assert_eq!(parse("if=a of=b").unwrap(), (0, u64::MAX));
        assert_eq!(parse("if=a of=b bs=1M count=3 skip=2").unwrap(), (2 << 20, 3 << 20));
        assert_eq!(parse("bs=3 of=b if=a skip=5").unwrap(), (15, u64::MAX));
        for text in [
            "if=a",
            "of=a",
            "if=a of=b bs=0",
            "if=a of=b bs=2G",
            "if=a of=b isize=3",
            "a b",
            "if=a of=b count=x",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
