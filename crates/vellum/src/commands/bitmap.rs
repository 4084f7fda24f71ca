//! `vellum bitmap`: the bitmaps that say what of a disk has changed.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command, FromArgMatches};
use vellum_core::{Error, Result};
use vellum_daemon::bitmaps::{change, load};
use vellum_daemon::{BitmapChange, FormatKind, ImageOptions, IoMode, MergeSource, run as run_worker};

use super::Outcome;
use crate::args::{AllowArgs, parse_format, parse_size};
use crate::protocol::image_name;

/// Add, remove, clear, merge, enable or disable a bitmap of a qcow2 image
///
/// A bitmap says which parts of a disk have changed since it was added or cleared, so that a backup copies only these. An
/// enabled one is kept up by every program that writes the disk, also after a crash of Vellum. `vellum info` lists the bitmaps
/// of an image.
///
/// Several options are carried out in their order, and all of them at once: a crash leaves the bitmaps as they were or as they
/// were to be. The image must not be in use. It is checked first, and one that is damaged is refused. A data file is made durable
/// first.
#[derive(clap::Args)]
#[command(
    override_usage = "vellum bitmap [--add | --remove | --clear | --enable | --disable | --merge SOURCE]... [OPTIONS] FILE BITMAP"
)]
pub(crate) struct Args {
    #[command(flatten)]
    steps: Steps,
    /// With --add: how much of the disk one bit stands for, from 512 bytes to 2G. Default: the cluster size, from 4K to 64K
    #[arg(short, long, value_name = "SIZE", value_parser = parse_size)]
    granularity: Option<u64>,
    /// With --merge: SOURCE is a bitmap of this image
    #[arg(short = 'b', long, value_name = "SOURCE_FILE", value_parser = image_name())]
    source_file: Option<PathBuf>,
    /// Format of SOURCE_FILE
    #[arg(short = 'F', long, value_name = "FMT", value_parser = parse_format, requires = "source_file")]
    source_format: Option<FormatKind>,
    /// Format of the image: only qcow2 has bitmaps
    #[arg(short, long, value_name = "FMT", value_parser = parse_format)]
    format: Option<FormatKind>,
    /// Allow writing to FILE as the data file of the image
    #[arg(long, value_name = "FILE")]
    data_file: Vec<PathBuf>,
    #[command(flatten)]
    allow: AllowArgs,
    /// The image
    #[arg(value_name = "FILE", value_parser = image_name())]
    file: PathBuf,
    /// Name of the bitmap
    #[arg(value_name = "BITMAP")]
    bitmap: String,
}

/// What is to be done, in the order of the command line.
struct Steps(Vec<Step>);

#[derive(Clone)]
enum Step {
    Add,
    Remove,
    Clear,
    Enable,
    Disable,
    Merge(String),
}

const FLAGS: [(&str, Step, &str); 5] = [
    ("add", Step::Add, "Add the bitmap; it is enabled, and nothing is marked in it"),
    ("remove", Step::Remove, "Remove the bitmap, also one that is inconsistent"),
    ("clear", Step::Clear, "Clear the bitmap: nothing is marked in it any more"),
    ("enable", Step::Enable, "Enable the bitmap: changes of the disk are marked from now on"),
    ("disable", Step::Disable, "Disable the bitmap: changes of the disk are not marked any more"),
];

impl clap::Args for Steps {
    fn augment_args(command: Command) -> Command {
        let flag = |(name, _, help): &(&'static str, Step, &'static str)| {
            // As often as it is given, each at its place.
            let flag = Arg::new(*name).long(*name).help(*help);
            flag.action(ArgAction::Append).num_args(0).default_missing_value("true")
        };
        let merge = Arg::new("merge").long("merge").value_name("SOURCE").action(ArgAction::Append);
        command.args(FLAGS.iter().map(flag)).arg(merge.help("Mark also what is marked in the bitmap SOURCE"))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for Steps {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut steps: Vec<(usize, Step)> = Vec::new();
        for (name, step, _) in &FLAGS {
            if matches.value_source(name) == Some(ValueSource::CommandLine) {
                steps.extend(matches.indices_of(name).into_iter().flatten().map(|at| (at, step.clone())));
            }
        }
        let sources = matches.get_many::<String>("merge").into_iter().flatten();
        let places = matches.indices_of("merge").into_iter().flatten();
        steps.extend(places.zip(sources).map(|(at, source)| (at, Step::Merge(source.clone()))));
        steps.sort_by_key(|(at, _)| *at);
        Ok(Self(steps.into_iter().map(|(_, step)| step).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

pub(crate) fn run(args: &Args) -> Outcome {
    let has = |wanted: fn(&Step) -> bool| args.steps.0.iter().any(wanted);
    let bad = |why: &'static str| Err(Error::invalid(why).into());
    match () {
        () if args.steps.0.is_empty() => {
            return bad("give at least one of --add, --remove, --clear, --enable, --disable and --merge");
        }
        () if args.granularity.is_some() && !has(|step| matches!(step, Step::Add)) => {
            return bad("--granularity is for --add");
        }
        () if args.source_file.is_some() && !has(|step| matches!(step, Step::Merge(_))) => {
            return bad("--source-file is for --merge");
        }
        () => {}
    }
    run_worker(IoMode::Auto, async || {
        let options = ImageOptions {
            format: args.format,
            allow_dirs: args.allow.places(),
            data_files: args.data_file.clone(),
            ..ImageOptions::default()
        };
        let changes = changes(args).await?;
        change(&args.file, &options, &args.bitmap, &changes).await
    })??;
    Ok(ExitCode::SUCCESS)
}

async fn changes(args: &Args) -> Result<Vec<BitmapChange>> {
    let mut changes = Vec::new();
    for step in &args.steps.0 {
        changes.push(match step {
            Step::Add => BitmapChange::Add { granularity: args.granularity },
            Step::Remove => BitmapChange::Remove,
            Step::Clear => BitmapChange::Clear,
            Step::Enable => BitmapChange::Enable,
            Step::Disable => BitmapChange::Disable,
            Step::Merge(name) => BitmapChange::Merge(match &args.source_file {
                None => MergeSource::Own(name.clone()),
                Some(file) => MergeSource::Other(Arc::new(load(file, args.source_format, name).await?)),
            }),
        });
    }
    Ok(changes)
}
