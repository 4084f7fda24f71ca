//! `vellum-bench encryption`: what encryption costs a disk, beside a plain one and beside QEMU.
//!
//! ```text
//!   each program makes its images from the same bytes: plain, and with LUKS (AES-256, XTS)
//!   for each round     each image in turn, beginning with another one each time
//!     `vellum bench`, `qemu-img bench`   in the process: reads and overwrites of 4 and 64 KiB, in order, 32 in flight, page cache
//!     `vellum serve`, `qemu-nbd`         over NBD, one client of ours for both: 4 KiB at random, 1 and 32 in flight, and 64 KiB
//! ```
//!
//! What is timed in the process is the format and the cipher; the time is the program's own, without opening, which takes the
//! time that the key slot asks for. `qemu-img bench` takes no secret, so QEMU's encrypted disk is only served. The client checks
//! each reply.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use vellum_core::{Context, Error, Result};
use vellum_lab::cost::lab::Lab;
use vellum_lab::programs;
use vellum_lab::report::{Output, Table};
use vellum_lab::server::{Cache, Running, Serving, Vellum};

use crate::host::{Machine, cpu_seconds_of_ended};
use crate::images;
use crate::load::workload::{Operation, Order, Workload};
use crate::load::{self, Target, Timing};
use crate::report::{median, short};

/// Time an encrypted disk beside a plain one
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Size of the disks, in whole MiB
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = super::parse_size)]
    size: u64,
    /// Measured seconds of each turn over NBD
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, value_parser = parse_seconds)]
    seconds: f64,
    /// Number of rounds; each image has a turn in each
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Directory for images. Default: the directory of this program
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// vellum program to measure. Default: the one beside this program
    #[arg(long, value_name = "PATH [ARGUMENT ...]", value_parser = Vellum::parse)]
    vellum: Option<Vellum>,
}

/// An image: who makes and uses it, its format and options, and whether it is encrypted.
struct Subject {
    name: &'static str,
    is_qemu: bool,
    format: &'static str,
    options: &'static str,
    is_encrypted: bool,
    /// Which of the subjects this one is compared with: the plain one, and QEMU's.
    beside: &'static [usize],
}

const fn subject(name: &'static str, format: &'static str, options: &'static str) -> Subject {
    Subject { name, is_qemu: false, format, options, is_encrypted: false, beside: &[] }
}

const SUBJECTS: [Subject; 8] = [
    Subject { beside: &[6], ..subject("vellum table", "vellum", "layout=table") },
    Subject {
        is_encrypted: true,
        beside: &[0, 7],
        ..subject("vellum table, LUKS", "vellum", "layout=table")
    },
    Subject { beside: &[6], ..subject("vellum linear", "vellum", "layout=linear") },
    Subject {
        is_encrypted: true,
        beside: &[2, 7],
        ..subject("vellum linear, LUKS", "vellum", "layout=linear")
    },
    Subject { beside: &[6], ..subject("vellum qcow2", "qcow2", "extended_l2=off") },
    Subject {
        is_encrypted: true,
        beside: &[4, 7],
        ..subject("vellum qcow2, LUKS", "qcow2", "extended_l2=off")
    },
    Subject { is_qemu: true, ..subject("qemu qcow2", "qcow2", "cluster_size=64k") },
    Subject {
        is_qemu: true,
        is_encrypted: true,
        beside: &[6],
        ..subject("qemu qcow2, LUKS", "qcow2", "cluster_size=64k")
    },
];

/// What is asked of a disk in the process that has opened it.
struct Load {
    title: &'static str,
    bytes: u64,
    writes: bool,
    /// How often it is asked, for each mebibyte of the disk.
    per_mebibyte: u64,
}

const LOADS: [Load; 4] = [
    Load { title: "read 4 KiB", bytes: 4096, writes: false, per_mebibyte: 1024 },
    Load { title: "overwrite 4 KiB", bytes: 4096, writes: true, per_mebibyte: 512 },
    Load { title: "read 64 KiB", bytes: 65_536, writes: false, per_mebibyte: 128 },
    Load { title: "overwrite 64 KiB", bytes: 65_536, writes: true, per_mebibyte: 64 },
];

const fn served(operation: Operation, len: usize, depth: usize) -> Workload {
    Workload { operation, order: Order::Random, len, depth }
}

/// What a client asks over NBD.
const SERVED: [Workload; 6] = [
    served(Operation::Read, 4096, 1),
    served(Operation::Write, 4096, 1),
    served(Operation::Read, 4096, 32),
    served(Operation::Write, 4096, 32),
    served(Operation::Read, 65_536, 8),
    served(Operation::Write, 65_536, 8),
];

/// One turn, per request.
#[derive(Clone, Copy)]
struct Turn {
    elapsed_us: f64,
    cpu_us: f64,
}

struct Stand {
    lab: Lab,
    secret: PathBuf,
}

impl Stand {
    fn image(&self, index: usize) -> PathBuf {
        self.lab.dir.join(format!("image-{index}"))
    }

    fn program(&self, is_qemu: bool) -> Command {
        if is_qemu { Command::new("qemu-img") } else { Command::new(&self.lab.vellum.path) }
    }

    fn object(&self) -> String {
        format!("secret,id=s,file={}", self.secret.display())
    }

    fn make(&self, index: usize, source: &Path) -> Result<()> {
        let subject = &SUBJECTS[index];
        let luks = ",encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10";
        let options = format!("{}{}", subject.options, if subject.is_encrypted { luks } else { "" });
        let mut convert = self.program(subject.is_qemu);
        convert.args([
            "convert",
            "-f",
            "raw",
            "-O",
            subject.format,
            "--object",
            &self.object(),
            "-o",
            &options,
        ]);
        programs::run(convert.arg(source).arg(self.image(index)))?;
        images::settle(&self.image(index))
    }

    fn take_turn(&self, index: usize, load: &Load, size: u64) -> Result<Turn> {
        let subject = &SUBJECTS[index];
        let count = (load.per_mebibyte * (size >> 20)).to_string();
        let mut bench = self.program(subject.is_qemu);
        bench.args(["bench", "-c", &count, "-d", "32", "-s", &load.bytes.to_string()]);
        bench.args(load.writes.then_some("-w"));
        let image = self.image(index);
        match subject.is_qemu {
            true => {
                let options = format!("driver=qcow2,file.filename={}", image.display());
                bench.args(["-t", "writeback", "--image-opts", &options]);
            }
            false => {
                bench.args(["--output", "json", "-f", subject.format]);
                if subject.is_encrypted {
                    bench.args(["--object", &self.object()]);
                }
                bench.arg(&image);
            }
        }
        let cpu = cpu_seconds_of_ended()?;
        let output = bench.stdin(Stdio::null()).output().context(|| format!("can't run {bench:?}"))?;
        let cpu_seconds = cpu_seconds_of_ended()? - cpu;
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let seconds = if output.status.success() { seconds_of(&said) } else { None };
        let seconds = seconds.ok_or_else(|| {
            Error::invalid(format!("{bench:?} said {said}{}", String::from_utf8_lossy(&output.stderr)))
        })?;
        let requests: f64 = count.parse().expect("a number");
        Ok(Turn { elapsed_us: seconds * 1e6 / requests, cpu_us: cpu_seconds * 1e6 / requests })
    }

    /// The command that serves an image.
    fn server(&self, index: usize, socket: &Path) -> Command {
        let (subject, image) = (&SUBJECTS[index], self.image(index));
        let object = self.object();
        let secret = subject.is_encrypted.then_some(["--object", &object]);
        if subject.is_qemu {
            let mut command = Command::new("qemu-nbd");
            let key = if subject.is_encrypted { "encrypt.key-secret=s," } else { "" };
            let options = format!("driver=qcow2,{key}file.filename={}", image.display());
            command.args(["--persistent", "--shared=2", "--aio=io_uring", "--cache=writeback", "--socket"]);
            command.arg(socket).args(secret.iter().flatten()).args(["--image-opts", &options]);
            return command;
        }
        let mut command = Command::new(&self.lab.vellum.path);
        command.args(["serve", "--quiet", "--format", subject.format]).args(secret.iter().flatten());
        command.arg("--nbd").arg(format!("unix:{}", socket.display())).arg(image);
        command
    }

    fn take_served_turn(&self, index: usize, workload: &Workload, timing: Timing, seed: u64) -> Result<Turn> {
        let (image, socket) = (self.image(index), self.lab.dir.join("nbd.sock"));
        let format = SUBJECTS[index].format;
        let serving =
            Serving { image: &image, format, cache: Cache::Buffered, connections: 1, socket: &socket };
        let running = Running::start_command(self.server(index, &socket), &serving)?;
        let target =
            Target { pid: running.pid(), socket: running.socket(), connections: 1, structured: true };
        let sample = load::run(target, workload, timing, seed)?;
        drop(running);
        Ok(Turn { elapsed_us: sample.elapsed_us(), cpu_us: sample.server_cpu_us() })
    }
}

fn parse_seconds(text: &str) -> std::result::Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.01..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("between 0.01 and 3600 seconds".to_owned()),
    }
}

/// The seconds in what a program says: `"seconds": 1.5`, or `Run completed in 1.500 seconds.`
fn seconds_of(said: &str) -> Option<f64> {
    let after = ["\"seconds\":", "Run completed in"].into_iter().find_map(|words| said.split_once(words))?.1;
    let number: String =
        after.trim_start().chars().take_while(|one| one.is_ascii_digit() || *one == '.').collect();
    number.parse().ok()
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let size = args.size;
    if size == 0 || !size.is_multiple_of(1 << 20) {
        return Err(Error::invalid("--size is in whole MiB"));
    }
    let lab = Lab::open(args.dir.as_ref(), args.vellum.as_ref())?;
    let machine = Machine::with(&lab.dir);
    let table = Table::to(Output::Human);
    let say = |line: &str| table.say(line);
    say(&format!(
        "{} MiB; images on {}; Linux {}, {} processors; {} rounds, medians; page cache; in the process in order, 32 in \
         flight",
        size >> 20,
        machine.medium,
        machine.kernel,
        machine.processors,
        args.rounds
    ));
    lab.programs.iter().for_each(|program| say(program));
    let chosen: Vec<usize> =
        (0..SUBJECTS.len()).filter(|index| !SUBJECTS[*index].is_qemu || lab.no_qemu.is_none()).collect();
    let secret = lab.dir.join("secret");
    fs::write(&secret, "correct horse").context(|| "can't write the secret")?;
    let stand = Stand { lab, secret };
    let source = stand.lab.dir.join("source.raw");
    images::write_raw(&source, size).context(|| "can't write what is copied")?;
    for index in &chosen {
        stand.make(*index, &source).context(|| SUBJECTS[*index].name)?;
    }
    let rounds = |title: &str, chosen: &[usize], take: &dyn Fn(usize, u64) -> Result<Turn>| -> Result<()> {
        let mut turns = vec![Vec::new(); SUBJECTS.len()];
        for round in 0..args.rounds as usize {
            for turn in 0..chosen.len() {
                let index = chosen[(round + turn) % chosen.len()];
                images::prepare(&stand.image(index), true)?;
                turns[index].push(take(index, round as u64).context(|| SUBJECTS[index].name)?);
            }
        }
        say(&format!("  {title}"));
        chosen.iter().for_each(|index| say(&line(*index, &turns)));
        Ok(())
    };
    // First, as the client knows what it reads, and the others write zeros.
    let window = Duration::from_secs_f64(args.seconds);
    let timing = Timing { warm_up: Duration::from_millis(200), window };
    for workload in &SERVED {
        let title = format!("over NBD: {}", workload.title());
        let take = |index, round| stand.take_served_turn(index, workload, timing, round);
        rounds(&title, &chosen, &take)?;
    }
    // `qemu-img bench` takes no secret.
    let in_process = |index: &usize| !(SUBJECTS[*index].is_qemu && SUBJECTS[*index].is_encrypted);
    let opened: Vec<usize> = chosen.iter().copied().filter(in_process).collect();
    for load in &LOADS {
        rounds(load.title, &opened, &|index, _| stand.take_turn(index, load, size))?;
    }
    drop(fs::remove_dir_all(&stand.lab.dir));
    Ok(())
}

fn line(index: usize, turns: &[Vec<Turn>]) -> String {
    let mine = &turns[index];
    let of = |time: fn(&Turn) -> f64| median(mine.iter().map(time));
    let compared = SUBJECTS[index].beside.iter().filter(|other| !turns[**other].is_empty()).map(|other| {
        let ratio = |time: fn(&Turn) -> f64| {
            short(median(mine.iter().zip(&turns[*other]).map(|(mine, theirs)| time(mine) / time(theirs))))
        };
        let (wall, cpu) = (ratio(|turn| turn.elapsed_us), ratio(|turn| turn.cpu_us));
        format!("   {wall} times {} (CPU {cpu})", SUBJECTS[*other].name)
    });
    format!(
        "    {:<20} {:>6} us   CPU {:>6} us{}",
        SUBJECTS[index].name,
        short(of(|turn| turn.elapsed_us)),
        short(of(|turn| turn.cpu_us)),
        compared.collect::<String>()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_both_programs_say_is_understood() {
        assert_eq!(seconds_of("{\n  \"seconds\": 0.25\n}"), Some(0.25));
        assert_eq!(seconds_of("Sending 10 requests\nRun completed in 1.503 seconds.\n"), Some(1.503));
        assert_eq!(seconds_of("nothing"), None);
    }
}
