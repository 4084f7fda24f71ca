//! `vellum flash info`: what a cache holds, and of which disks.

use std::path::PathBuf;
use std::process::ExitCode;

use vellum_daemon::flash::{CacheFacts, facts_said, look, map_strip};
use vellum_daemon::{IoMode, run as run_worker};

use super::in_use;
use crate::args::OutputFormat;
use crate::commands::Outcome;
use crate::output::{human_bytes, say, say_json, table};

/// The widest picture of a cache, in characters; one with fewer parts is narrower.
const COLUMNS: usize = 76;

/// Show what a flash cache holds, and for which disks
///
/// No server may have the cache open: `vellum stats` shows the cache of a running server. Nothing is written.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Also draw the cache, from its first block to its last
    ///
    /// A character stands for a part: . for an empty one, - for up to half full, = for more, # for full, and * for one with
    /// blocks that images do not have yet.
    #[arg(long)]
    map: bool,
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    output: OutputFormat,
    /// The file or block device
    #[arg(value_name = "PATH")]
    path: PathBuf,
}

pub(super) fn run(args: &Args) -> Outcome {
    let found = run_worker(IoMode::Auto, async || look(&args.path).await)?.map_err(in_use)?;
    let facts = facts_said(&args.path, &found);
    let strip = args.map.then(|| map_strip(&found.strip, COLUMNS));
    match args.output {
        OutputFormat::Json => {
            let mut answer = serde_json::to_value(&facts).expect("numbers and strings");
            if let Some(strip) = strip {
                answer["map"] = strip.into();
            }
            say_json(&answer);
        }
        OutputFormat::Human => lines(&facts, strip.as_deref()).iter().for_each(|line| say(line)),
    }
    Ok(ExitCode::SUCCESS)
}

fn lines(facts: &CacheFacts, strip: Option<&str>) -> Vec<String> {
    let mut lines = vec![
        format!("flash cache: {}", facts.filename),
        format!("id: {}", facts.id),
        format!("size: {} ({} bytes)", human_bytes(facts.size), facts.size),
        format!("cached: {} of {}", human_bytes(facts.cached_bytes), human_bytes(facts.capacity_bytes)),
        format!("not home yet: {}, {} runs of zeros", human_bytes(facts.dirty_bytes), facts.zero_runs),
        format!(
            "memory in a server: {} for what is cached; with all besides {} of {}, unless `--flash-memory` says more or less",
            human_bytes(facts.memory_bytes),
            human_bytes(facts.budget_used_bytes),
            human_bytes(facts.budget_bytes)
        ),
    ];
    if facts.written_regions > 0 {
        let regions = facts.written_regions;
        lines.push(format!(
            "being written through: {regions} {} of 64 MiB, of which nothing counts at the next opening",
            if regions == 1 { "region" } else { "regions" }
        ));
    }
    if let Some(strip) = strip {
        lines.push(format!("[{strip}]"));
    }
    if !facts.disks.is_empty() {
        lines.push(String::new());
        let rows = facts.disks.iter().map(|disk| {
            [
                disk.disk.clone(),
                match &disk.session {
                    Some(session) => session.clone(),
                    None if disk.kind == "tables" => "tables of an image".to_owned(),
                    None => "none".to_owned(),
                },
                human_bytes(disk.cached_bytes),
                human_bytes(disk.dirty_bytes + disk.zero_bytes),
            ]
        });
        lines.extend(table(["DISK", "SESSION", "CACHED", "NOT HOME"], 2, rows));
    }
    lines
}
