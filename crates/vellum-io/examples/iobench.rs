//! The cost of one operation: 4 KiB random reads, through a ring and through threads, cached and with
//! O_DIRECT.
//!
//! ```text
//! cargo run --release -p vellum-io --example iobench [-- FILE [MiB [seconds [part of "DRIVER CASE"]]]]
//! ```
//!
//! One worker keeps 32 reads in flight. The CPU time is that of the whole process, user and system, so that
//! the kernel threads that work for it count too. The file is created if it does not exist.
#![allow(clippy::print_stdout, reason = "it is there to print")]

use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vellum_core::{Buffer, ImageOffset, Random, Result, Storage, join_all};
use vellum_io::{File, IoMode, LockMode, OpenOptions, run, spawn_local};

const BLOCK: usize = 4096;
const DEPTH: u64 = 32;

struct Case {
    name: &'static str,
    direct: bool,
    write: bool,
    depth: u64,
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let path = PathBuf::from(arguments.next().unwrap_or_else(|| "/tmp/iobench.data".into()));
    let mut number = |default: u64| arguments.next().and_then(|text| text.parse().ok()).unwrap_or(default);
    let len = number(256) << 20;
    let time = Duration::from_secs(number(3));
    let wanted = arguments.next().unwrap_or_default();
    let cases = [
        Case { name: "cached read, depth 32", direct: false, write: false, depth: DEPTH },
        Case { name: "cached read, depth 1", direct: false, write: false, depth: 1 },
        Case { name: "O_DIRECT read, depth 32", direct: true, write: false, depth: DEPTH },
        Case { name: "O_DIRECT read, depth 1", direct: true, write: false, depth: 1 },
        Case { name: "O_DIRECT write, depth 32", direct: true, write: true, depth: DEPTH },
        Case { name: "cached write, depth 32", direct: false, write: true, depth: DEPTH },
    ];
    println!("{:<8} {:<24} {:>10} {:>12} {:>12}", "driver", "case", "kIOPS", "CPU µs/op", "system %");
    for mode in [IoMode::Uring, IoMode::Threads] {
        for case in cases.iter().filter(|case| format!("{mode:?} {}", case.name).contains(&wanted)) {
            match run(mode, async || measure(&path, len, time, case).await).and_then(|result| result) {
                Ok(line) => println!("{:<8} {:<24} {line}", format!("{mode:?}"), case.name),
                Err(error) => println!("{:<8} {:<24} {}", format!("{mode:?}"), case.name, error.chain()),
            }
        }
    }
}

async fn measure(path: &PathBuf, len: u64, time: Duration, case: &Case) -> Result<String> {
    let options = OpenOptions::writing().lock(LockMode::None).direct(case.direct);
    if !path.exists() {
        drop(File::create_new(path, options).await?);
    }
    let file = File::open(path, options).await?;
    if file.len() < len {
        fill(&file, len).await?;
    }
    // What the case before has left in the page cache is not to be in the way of this one.
    file.flush().await?;
    if case.direct {
        let _ = rustix::fs::fadvise(&*file, 0, None, rustix::fs::Advice::DontNeed);
    } else {
        let mut at = 0;
        while at < len {
            file.read(ImageOffset::new(at), Buffer::for_overwrite(1 << 20)).await?;
            at += 1 << 20;
        }
    }
    let until = Instant::now() + time;
    let (before, start) = (cpu(), Instant::now());
    let file = Rc::new(file);
    let write = case.write;
    let tasks: Vec<_> = (0..case.depth)
        .map(|seed| {
            let file = file.clone();
            spawn_local(async move { one_of_many(&file, len, seed, write, until).await })
        })
        .collect();
    let counts: u64 = join_all(tasks).await.into_iter().sum::<Result<u64>>()?;
    let (after, elapsed) = (cpu(), start.elapsed());
    #[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
    let operations = counts as f64;
    let (user, system) = (after.0 - before.0, after.1 - before.1);
    let total = (user + system).as_secs_f64();
    Ok(format!(
        "{:>10.1} {:>12.2} {:>12.0}",
        operations / elapsed.as_secs_f64() / 1e3,
        total * 1e6 / operations,
        system.as_secs_f64() / total * 100.0
    ))
}

async fn one_of_many(file: &Arc<File>, len: u64, seed: u64, write: bool, until: Instant) -> Result<u64> {
    let mut random = Random::from_seed(seed);
    let mut buffer = Buffer::zeroed(BLOCK);
    let mut count = 0;
    loop {
        // The clock is asked now and then, so that it is not what is measured.
        for _ in 0..16 {
            let at = ImageOffset::new(random.below(len / BLOCK as u64) * BLOCK as u64);
            if write {
                file.write(at, buffer).await?;
                buffer = Buffer::zeroed(BLOCK);
            } else {
                buffer = file.read(at, buffer).await?;
            }
            count += 1;
        }
        if Instant::now() >= until {
            return Ok(count);
        }
    }
}

async fn fill(file: &File, len: u64) -> Result<()> {
    let mut random = Random::from_seed(1);
    let mut at = 0;
    while at < len {
        let mut data = Buffer::for_overwrite(1 << 20);
        random.fill(data.slice_mut());
        file.write(ImageOffset::new(at), data).await?;
        at += 1 << 20;
    }
    file.flush().await
}

/// User and system time of the process so far, in the kernel's ticks of 10 ms.
fn cpu() -> (Duration, Duration) {
    let stat = std::fs::read_to_string("/proc/self/stat").expect("the kernel tells");
    let fields: Vec<&str> = stat[stat.rfind(')').expect("a name in brackets")..].split_whitespace().collect();
    let ticks = |index: usize| Duration::from_millis(10 * fields[index].parse::<u64>().expect("a number"));
    (ticks(12), ticks(13))
}
