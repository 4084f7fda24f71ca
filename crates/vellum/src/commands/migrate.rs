//! `vellum migrate`: moving a disk to another host while it is served.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use vellum_core::{Error, ErrorKind, Result};
use vellum_daemon::control::{MigrateStep, Request, call_in_turn, call_within};
use vellum_daemon::migrate::{Goal, Handover, MoveNumber, NewTarget, Side, Step, Written, next, prepare};
use vellum_daemon::{FormatKind, IoMode, run as run_worker};

use super::Outcome;
use super::control::Target;
use crate::args::{NewImage, OutputFormat, RemoteArgs, parse_format};
use crate::output::{human_bytes, say, say_json};
use crate::secrets::SecretArgs;

/// Move a disk to another host while it is served
///
/// The disk runs on the target host at once: what was not copied yet is read from the source's NBD export. The
/// hand-over leaves one writer or none, whatever crashes, and can be continued: run the same command again.
///
///   source$ vellum serve disk.qcow2 --nbd tcp:0.0.0.0:10809 --control /run/disk.control
///   target$ vellum migrate prepare --from nbd://source/ copy.qcow2
///   target$ vellum serve copy.qcow2 --allow-url nbd://source/ --nbd unix:/run/copy.sock --control /run/copy.control
///   target$ vellum migrate run --source-control /run/disk.control --target-control /run/copy.control
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Subcommand,
}

#[derive(clap::Subcommand)]
enum Subcommand {
    Prepare(PrepareArgs),
    /// Hand the disk over: from then on it is written in the target
    Run(BothArgs),
    /// Keep the disk on the source: the target is given up
    Abort(BothArgs),
    /// Show which of the two images is written
    Status(BothArgs),
    Step(StepArgs),
}

/// Create the target image: it reads from the source, and is not written until the hand-over
///
/// The target of an encrypted disk is encrypted only if it is made so, with -o encrypt.format=luks,encrypt.key-secret=ID
/// and --secret.
#[derive(clap::Args)]
struct PrepareArgs {
    /// URL of the source's NBD export: nbd://HOST/EXPORT, nbd://HOST:PORT/EXPORT or nbd+unix:///EXPORT?socket=PATH; with nbds over TLS
    #[arg(long, value_name = "URL")]
    from: String,
    /// Format of the target: qcow2 or vellum
    #[arg(short, long, value_name = "FMT", value_parser = parse_format, default_value = "qcow2")]
    format: FormatKind,
    /// Options of the target, as for `vellum create -o`
    #[arg(short, long = "option", value_name = "NAME=VALUE")]
    options: Vec<String>,
    #[command(flatten)]
    secrets: SecretArgs,
    #[command(flatten)]
    remote: RemoteArgs,
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    output: OutputFormat,
    /// The image to create
    target: PathBuf,
}

/// How long a server may take for a step.
const ANSWER_WITHIN: Duration = Duration::from_secs(120);

/// How long a step is tried again that cannot begin beside another command: between two steps nothing is written.
const BUSY_FOR: Duration = Duration::from_secs(5);

/// Hand the disk over: the source is written no more, then the target's writes begin
///
/// Writes of clients of the target wait until then. The command prints for how long the disk was not writable.
/// A control socket of another host can be forwarded, for example with `ssh -L`. With `migrate abort` in place of
/// `migrate run` the disk stays with the source, which is possible until the target has taken over.
#[derive(clap::Args)]
struct BothArgs {
    /// Control socket of the server of the source
    #[arg(long, value_name = "PATH")]
    source_control: PathBuf,
    /// Export name of the source; optional if its server has one disk
    #[arg(long, value_name = "EXPORT")]
    source_disk: Option<String>,
    /// Control socket of the server of the target
    #[arg(long, value_name = "PATH")]
    target_control: PathBuf,
    /// Export name of the target; optional if its server has one disk
    #[arg(long, value_name = "EXPORT")]
    target_disk: Option<String>,
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    output: OutputFormat,
}

/// Take one step at one server, where no command can reach both
///
/// The order is `fix` at the source, `accept` at the target, then `seal` at the source, with the receipt that `accept` has printed. To
/// take the disk back: `void` at the target, then `restore` at the source. Take each step only after the one before it has succeeded.
#[derive(clap::Args)]
struct StepArgs {
    #[command(flatten)]
    target: Target,
    /// Number of the migration, as `migrate prepare` printed it
    #[arg(long, value_name = "NUMBER")]
    number: String,
    /// For `seal`: the receipt that `accept` has printed at the target
    #[arg(long, value_name = "RECEIPT")]
    receipt: Option<String>,
    /// The step
    #[arg(value_enum)]
    step: StepName,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum StepName {
    /// Stop writing the source, for good
    Fix,
    /// Begin to write the target
    Accept,
    /// Give the target up, for good
    Void,
    /// Write the source again; only after `void`
    Restore,
    /// Give the source up, for good; only after `accept`
    Seal,
}

impl From<StepName> for MigrateStep {
    fn from(name: StepName) -> Self {
        match name {
            StepName::Fix => Self::Fix,
            StepName::Accept => Self::Accept,
            StepName::Void => Self::Void,
            StepName::Restore => Self::Restore,
            StepName::Seal => Self::Seal,
        }
    }
}

pub(crate) fn run(args: &Args) -> Outcome {
    match &args.command {
        Subcommand::Prepare(args) => prepared(args),
        Subcommand::Run(args) => handed_over(args, Goal::Forward),
        Subcommand::Abort(args) => handed_over(args, Goal::Back),
        Subcommand::Status(args) => status(args),
        Subcommand::Step(args) => step(args),
    }
}

fn prepared(args: &PrepareArgs) -> Outcome {
    let new = NewImage::parse(&args.options)?;
    new.suits(args.format, "-f")?;
    if new.backing_file.is_some() || new.size.is_some() {
        return Err(Error::invalid("the target has the size of the source, and reads from it").into());
    }
    let secrets = args.secrets.read()?;
    let (number, size) = run_worker(IoMode::Auto, async || {
        let (qcow2, native) = new.with_keys(&secrets)?;
        let target = NewTarget {
            path: args.target.clone(),
            format: args.format,
            source: args.from.clone(),
            remote: args.remote.usual(),
            qcow2,
            native,
        };
        prepare(&target).await
    })??;
    let name = args.target.display().to_string();
    match args.output {
        OutputFormat::Json => say_json(&json!({
            "filename": name, "format": args.format.to_string(), "virtual-size": size, "number": number.to_string(),
        })),
        OutputFormat::Human => {
            say(&format!("{name} awaits a disk of {} (migration {number})", human_bytes(size)))
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// What one server says of its image.
struct Told {
    handover: Option<Handover>,
    size: u64,
    image: String,
    /// Its server carries out changes of it.
    is_written: bool,
}

impl BothArgs {
    async fn told(&self, side: Side) -> Result<Told> {
        let (socket, disk) = self.server(side);
        let told =
            call_in_turn(socket, &Request::MigrateStatus { disk: disk.cloned() }, ANSWER_WITHIN, BUSY_FOR)
                .await?;
        let image = told["image"].as_str().unwrap_or_default().to_owned();
        let handover = match told["state"].as_str() {
            None | Some("none") => None,
            Some(state) => Some(Handover::of_words(state, told["number"].as_str().unwrap_or_default())?),
        };
        let size = told["virtual-size"].as_u64().unwrap_or_default();
        Ok(Told { handover, size, image, is_written: told["written"].as_bool().unwrap_or(true) })
    }

    fn server(&self, side: Side) -> (&PathBuf, Option<&String>) {
        match side {
            Side::Source => (&self.source_control, self.source_disk.as_ref()),
            Side::Target => (&self.target_control, self.target_disk.as_ref()),
        }
    }

    async fn ask(&self, side: Side, step: MigrateStep, number: MoveNumber) -> Result<Value> {
        let (socket, disk) = self.server(side);
        let disk = disk.cloned();
        // It is asked for this only when the target says that it has taken over.
        let receipt = (step == MigrateStep::Seal).then(|| number.receipt());
        let request = Request::MigrateStep { disk, step, number: number.to_string(), receipt };
        call_in_turn(socket, &request, ANSWER_WITHIN, BUSY_FOR).await
    }

    /// Checks that the target reads from this source and from no other disk: the source shows a challenge, and the target
    /// looks for it. A target that has everything reads from nothing.
    ///
    /// # Errors
    /// `Refused` if it reads from another one. To take a disk back the target need not see its source.
    async fn are_of_one_migration(&self, goal: Goal, (source, target): (&Told, &Told)) -> Result<()> {
        let challenge = MoveNumber::random()?;
        let seen = match self.ask(Side::Source, MigrateStep::Show, challenge).await {
            Ok(_) => self.ask(Side::Target, MigrateStep::Look, challenge).await,
            refused => refused,
        };
        match seen {
            Ok(said) if said["seen"] == false => Err(Error::new(
                ErrorKind::Refused,
                format!(
                    "{} is not the disk that {} reads from, and nothing was changed: was another disk named as the source? \
                     (`vellum info {}` shows the address that it reads from)",
                    source.image, target.image, target.image
                ),
            )),
            Err(error) if goal == Goal::Forward => Err(error.context(match source.handover {
                Some(Handover::Moved(_)) if !target.is_written => {
                    "nothing was changed, and the disk is written nowhere: repeat the command, or take the disk back with \
                     `vellum migrate abort`"
                }
                _ => "nothing was changed",
            })),
            _ => Ok(()),
        }
    }

    /// What both servers say.
    async fn both(&self) -> Result<(Told, Told)> {
        Ok((self.told(Side::Source).await?, self.told(Side::Target).await?))
    }
}

/// Refuses a step towards a target of another size, before it takes over. A disk that has arrived may be resized, and to take
/// one back the sizes do not matter.
fn have_one_size(step: Step, source: &Told, target: &Told) -> Result<()> {
    let takes_over =
        matches!((step, target.handover), (Step::Fix | Step::Accept, Some(Handover::Awaiting(_))));
    if !takes_over || source.size == target.size {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "{} has {} bytes and {} has {}: they are not the source and the target of one migration, or the source was \
         resized after the target was prepared: give the target up with `vellum migrate abort`, and prepare another",
        source.image, source.size, target.image, target.size
    )))
}

fn written(source: &Told, target: &Told) -> Written {
    Written { source: source.is_written, target: target.is_written }
}

/// What was done, and for how long the disk could not be written.
async fn hand_over(args: &BothArgs, goal: Goal) -> Result<(Vec<Step>, Option<Duration>, Told, Told)> {
    let (mut steps, mut began) = (Vec::new(), None);
    let mut downtime = None;
    loop {
        let (source, target) = args.both().await?;
        let step =
            next(source.handover, target.handover, written(&source, &target), goal, steps.last().copied())?;
        have_one_size(step, &source, &target)?;
        let number = target.handover.expect("the table has checked that").number();
        let Some((side, _)) = step.writes(number) else { return Ok((steps, downtime, source, target)) };
        if steps.is_empty() {
            args.are_of_one_migration(goal, (&source, &target)).await?;
        }
        if step == Step::Fix {
            began = Some(Instant::now());
        }
        let step_name = match step {
            Step::Fix => MigrateStep::Fix,
            Step::Accept => MigrateStep::Accept,
            Step::Void => MigrateStep::Void,
            Step::Seal => MigrateStep::Seal,
            Step::Restore | Step::Done => MigrateStep::Restore,
        };
        let answer = args.ask(side, step_name, number).await;
        answer.map_err(|error| what_is_next(step, error))?;
        if step == Step::Accept {
            downtime = began.map(|began| began.elapsed());
        }
        steps.push(step);
    }
}

/// An error of a step, and where that leaves the disk.
fn what_is_next(step: Step, error: Error) -> Error {
    match step {
        Step::Accept => error.context(
            "the source is not written any more, and the target perhaps not yet: repeat the command, or take the disk \
             back with `vellum migrate abort`",
        ),
        Step::Seal => error.context(
            "the disk is written in the target; repeat the command, so that the source is given up for good",
        ),
        Step::Restore => {
            error.context("the target was given up, and the source is perhaps not written yet: repeat the command")
        }
        Step::Fix | Step::Void | Step::Done => error,
    }
}

fn handed_over(args: &BothArgs, goal: Goal) -> Outcome {
    let (steps, downtime, source, target) = run_worker(IoMode::Auto, async || hand_over(args, goal).await)??;
    let millis = downtime.map(|time| u64::try_from(time.as_micros()).unwrap_or(u64::MAX));
    let writer = if goal == Goal::Forward { &target } else { &source };
    match args.output {
        OutputFormat::Json => say_json(&json!({
            "written": writer.image,
            "source": source.image,
            "target": target.image,
            "steps": steps.iter().map(|step| format!("{step:?}").to_lowercase()).collect::<Vec<_>>(),
            "downtime-us": millis,
        })),
        OutputFormat::Human => {
            let time = downtime.map_or_else(String::new, |time| {
                format!(" (it was not writable for {:.1} ms)", time.as_secs_f64() * 1000.0)
            });
            let again = if steps.is_empty() { "already " } else { "" };
            say(&format!("The disk is {again}written in {}{time}.", writer.image));
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn status(args: &BothArgs) -> Outcome {
    let (source, target) = run_worker(IoMode::Auto, async || args.both().await)??;
    let word = |told: &Told| told.handover.map_or("none", Handover::word);
    let step = |goal| next(source.handover, target.handover, written(&source, &target), goal, None);
    let named = |goal| step(goal).map_or(Value::Null, |step| json!(format!("{step:?}").to_lowercase()));
    match args.output {
        OutputFormat::Json => say_json(&json!({
            "source": { "image": source.image, "state": word(&source) },
            "target": { "image": target.image, "state": word(&target) },
            "number": target.handover.map(|handover| handover.number().to_string()),
            "next": { "run": named(Goal::Forward), "abort": named(Goal::Back) },
        })),
        OutputFormat::Human => {
            let next = match step(Goal::Forward) {
                Ok(Step::Done) => "the target is written".to_owned(),
                Ok(Step::Accept) if target.is_written => {
                    "the target is written; `vellum migrate run` gives the source up for good".to_owned()
                }
                Ok(_) if source.handover.is_none_or(Handover::allows_writing) => {
                    "the source is written; `vellum migrate run` hands it over".to_owned()
                }
                Ok(_) => "neither is written; `vellum migrate run` continues".to_owned(),
                Err(error) => error.chain(),
            };
            say(&format!(
                "source {}: {}\ntarget {}: {}\n{next}",
                source.image,
                word(&source),
                target.image,
                word(&target)
            ));
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn step(args: &StepArgs) -> Outcome {
    let request = Request::MigrateStep {
        disk: args.target.disk.clone(),
        step: args.step.into(),
        number: args.number.clone(),
        receipt: args.receipt.clone(),
    };
    let control = &args.target.control;
    let answer = run_worker(IoMode::Auto, async || call_within(control, &request, ANSWER_WITHIN).await)??;
    match args.target.output {
        OutputFormat::Json => say_json(&answer),
        OutputFormat::Human => say(&format!(
            "{}: {}; its requests waited for {:.1} ms{}",
            answer["image"].as_str().unwrap_or_default(),
            answer["state"].as_str().unwrap_or_default(),
            answer["held-us"].as_f64().unwrap_or_default() / 1000.0,
            answer["receipt"].as_str().map_or_else(String::new, |receipt| format!(" (receipt {receipt})"))
        )),
    }
    Ok(ExitCode::SUCCESS)
}
