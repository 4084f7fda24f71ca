//! One image, two programs: every kind of qcow2 image that QEMU makes is read, checked, mapped and written by
//! Vellum, and what Vellum wrote or made is read, checked and written by QEMU.
//!
//! ```text
//!   QEMU makes and fills it  ──►  both say the same of it: content, snapshots, check, info, map
//!         │
//!   Vellum writes on, 4,000 requests, reopened in between  ──►  QEMU checks and reads after every close
//!         │
//!   Vellum makes it anew  ──►  QEMU and Vellum take turns writing
//! ```
//!
//! `config.rs` chooses the kinds: by default a few dozen that contain every pair of properties; with
//! `VELLUM_FULL_MATRIX=1` all of them, which takes hours. `VELLUM_FULL_MATRIX=3/50` takes the third fiftieth
//! of all. A kind that fails is reported with its seed, and `VELLUM_MATRIX_ONLY=WORDS` runs only the kinds
//! whose name contains the words.

#![allow(unreachable_pub, reason = "the modules of a test are its own")]

#[path = "../support/mod.rs"]
mod support;

mod bitmaps;
mod compared;
mod config;
mod damaged;
mod image;
mod made;
mod opinions;
mod resizes;
mod snapshots;
mod writer;

use std::time::Instant;

use config::Config;
use image::Image;
use vellum_core::Random;
use vellum_daemon::ImageOptions;
use vellum_format::FormatKind;
use vellum_io::{IoMode, Workers, WorkersConfig};
use writer::Writer;

/// Requests for each kind of image, and how often it is reopened on the way.
const REQUESTS: usize = 4_000;
const ROUNDS: usize = 5;
/// How often the two programs take turns.
const TURNS: usize = 3;
/// Tests among which the kinds are dealt.
const SHARDS: usize = 8;

fn configurations() -> Vec<Config> {
    let only = std::env::var("VELLUM_MATRIX_ONLY").unwrap_or_default();
    let wanted = |config: &Config| only.is_empty() || config.to_string().contains(&only);
    let full = std::env::var("VELLUM_FULL_MATRIX").unwrap_or_default();
    let part = full.split_once('/').and_then(|(part, parts)| Some((part.parse().ok()?, parts.parse().ok()?)));
    let (part, parts): (usize, usize) = part.unwrap_or((1, 1));
    let all = if full.is_empty() { Config::pairs() } else { Config::all() };
    all.into_iter()
        .filter(wanted)
        .enumerate()
        .filter(|(n, _)| n % parts + 1 == part)
        .map(|(_, c)| c)
        .collect()
}

fn shard(number: usize) {
    requires!("qemu-img", "qemu-io");
    let begun = Instant::now();
    let configurations = configurations();
    let mut count = 0;
    for config in configurations.iter().skip(number).step_by(SHARDS) {
        one_kind(*config);
        count += 1;
    }
    report(&format!(
        "{count} of {} kinds of image, {} requests, {TURNS} turns each, in {:.1?}",
        configurations.len(),
        count * REQUESTS * support::scale(),
        begun.elapsed()
    ));
}

#[allow(clippy::print_stderr, reason = "how much was covered is part of what the test says")]
fn report(line: &str) {
    eprintln!("{line}");
}

/// The seed of a kind: the same whichever others run, and another one where `VELLUM_TEST_SEED` is.
fn seed_of(config: Config) -> u64 {
    let chosen: u64 = std::env::var("VELLUM_TEST_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    config.to_string().bytes().fold(chosen, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte.into())) >> 16
}

fn one_kind(config: Config) {
    let seed = seed_of(config);
    report(&format!("{config}; seed {seed}"));
    let mut random = Random::from_seed(seed);
    // How the host's I/O is done changes from kind to kind.
    let threads = 1 + random.index(2);
    let mode = if random.one_in(3) { IoMode::Threads } else { IoMode::Auto };
    let workers =
        Workers::start(WorkersConfig { threads, mode, ..WorkersConfig::default() }).expect("workers");
    let direct = random.one_in(4);

    let mut image = Image::made_by_qemu(config, seed);
    // Most have none.
    let data_files = Some(image.data_file()).filter(|file| file.exists()).into_iter().collect();
    let options =
        ImageOptions { format: Some(FormatKind::Qcow2), direct, data_files, ..ImageOptions::default() };
    opinions::both_agree(&image);
    for round in 0..ROUNDS * support::scale() {
        write_on(&mut image, &workers, &options, &mut random, REQUESTS / ROUNDS);
        opinions::qemu_is_content(&image, &format!("seed {seed}, round {round}"));
        image.check_surroundings();
    }
    opinions::both_agree(&image);

    image.made_anew_by_vellum();
    opinions::both_agree(&image);
    for turn in 0..TURNS {
        image.scribble_with_qemu(&mut random, 30);
        opinions::qemu_is_content(&image, &format!("seed {seed}, QEMU's turn {turn}"));
        write_on(&mut image, &workers, &options, &mut random, 200);
        opinions::qemu_is_content(&image, &format!("seed {seed}, our turn {turn}"));
        image.check_surroundings();
    }
    opinions::both_agree(&image);
    workers.shutdown();
}

fn write_on(
    image: &mut Image,
    workers: &Workers,
    options: &ImageOptions,
    random: &mut Random,
    requests: usize,
) {
    let mut writer = Writer {
        workers,
        model: &mut image.model,
        random,
        cluster: usize::try_from(image.config.cluster).expect("small"),
        name: image.config.to_string(),
    };
    writer.write_on(&image.path, options, requests);
}

macro_rules! shards {
    ($($name:ident: $number:expr,)+) => {
        $(#[test]
        fn $name() {
            shard($number);
        })+
    };
}

shards! {
    kinds_of_image_1: 0,
    kinds_of_image_2: 1,
    kinds_of_image_3: 2,
    kinds_of_image_4: 3,
    kinds_of_image_5: 4,
    kinds_of_image_6: 5,
    kinds_of_image_7: 6,
    kinds_of_image_8: 7,
}
