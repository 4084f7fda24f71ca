//! What is told of samples: medians, ratios, lines of a table, a file of JSON. The only place that prints.

use std::fs;
use std::path::Path;

use serde::Serialize;
use vellum_core::{Context, Result};

use crate::load::Sample;

/// A line of the answer.
#[expect(clippy::print_stdout, reason = "answers go to stdout, and only here")]
pub(crate) fn say(line: &str) {
    println!("{line}");
}

/// A line that is no answer.
#[expect(clippy::print_stderr, reason = "everything that is no answer goes to stderr, and only here")]
pub(crate) fn complain(line: &str) {
    eprintln!("{line}");
}

/// Writes everything that was seen.
pub(crate) fn write_json(path: &Path, report: &impl Serialize) -> Result<()> {
    let mut text = serde_json::to_string_pretty(report).expect("numbers and strings");
    text.push('\n');
    fs::write(path, text).context(|| format!("can't write {}", path.display()))
}

/// The middle one; of an even number the mean of the two in the middle. Zero when there is none.
pub(crate) fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => 0.0,
        len if len % 2 == 1 => values[middle],
        _ => f64::midpoint(values[middle - 1], values[middle]),
    }
}

impl Sample {
    /// Operations in a second.
    #[expect(clippy::cast_precision_loss, reason = "counts are far below 2^53")]
    pub(crate) fn per_second(&self) -> f64 {
        self.operations as f64 / self.seconds
    }

    /// Megabytes (10^6) in a second.
    #[expect(clippy::cast_precision_loss, reason = "counts are far below 2^53")]
    pub(crate) fn megabytes_per_second(&self) -> f64 {
        self.bytes as f64 / self.seconds / 1e6
    }

    /// Microseconds of the server's CPU time for an operation.
    #[expect(clippy::cast_precision_loss, reason = "counts are far below 2^53")]
    pub(crate) fn server_cpu_us(&self) -> f64 {
        self.server_cpu_seconds * 1e6 / self.operations as f64
    }
}

/// The samples of one program at one case.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Series {
    /// Whose.
    pub(crate) server: String,
    /// Why there are none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) skipped: Option<String>,
    /// One for each round.
    pub(crate) samples: Vec<Sample>,
}

impl Series {
    /// No samples yet.
    pub(crate) fn of(server: String) -> Self {
        Self { server, skipped: None, samples: Vec::new() }
    }

    fn median_of(&self, figure: impl Fn(&Sample) -> f64) -> f64 {
        median(self.samples.iter().map(figure))
    }

    /// The median over the rounds of `this` sample's figure divided by the other's of the same round.
    fn ratio_to(&self, other: &Self, figure: impl Fn(&Sample) -> f64) -> f64 {
        median(self.samples.iter().zip(&other.samples).map(|(mine, theirs)| figure(mine) / figure(theirs)))
    }
}

/// Which figures of a case a table shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Figures {
    /// Thousands of operations in a second.
    Rate,
    /// Megabytes in a second.
    Throughput,
    /// Median and 99th percentile of the time an operation takes.
    Latency,
}

impl Figures {
    fn main_of(self, sample: &Sample) -> f64 {
        match self {
            Self::Rate => sample.per_second() / 1000.0,
            Self::Throughput => sample.megabytes_per_second(),
            Self::Latency => sample.latency_us_median,
        }
    }

    fn show(self, series: &Series) -> String {
        let main = short(series.median_of(|sample| self.main_of(sample)));
        match self {
            Self::Rate => format!("{main} kIOPS"),
            Self::Throughput => format!("{main} MB/s"),
            Self::Latency => {
                format!("{main} µs (p99 {})", short(series.median_of(|sample| sample.latency_us_p99)))
            }
        }
    }
}

/// Width of the name of a case, and of the three columns of a program.
const NAME: usize = 30;
const COLUMNS: [usize; 3] = [20, 9, 13];

/// The head of a table whose first program is compared to the others.
pub(crate) fn head(title: &str, servers: &[String]) -> String {
    let [main, cpu, ratio] = COLUMNS;
    let mut line = pad(title, NAME);
    for (index, server) in servers.iter().enumerate() {
        line += &format!(" | {} {}", pad(server, main), pad("CPU µs", cpu));
        if index > 0 {
            line += &format!(" {}", pad("ratio, CPU", ratio));
        }
    }
    line.trim_end().to_owned()
}

/// A line of a table: what each program did, and how the first compares to each of the others: so many times their rate (or
/// their time) at so many times their CPU time.
pub(crate) fn line(name: &str, figures: Figures, series: &[Series]) -> String {
    let [main, cpu, ratio] = COLUMNS;
    let mut line = pad(name, NAME);
    for (index, theirs) in series.iter().enumerate() {
        let shown = match &theirs.skipped {
            Some(_) => [pad("n/a", main), pad("", cpu)],
            None => {
                let cpu_us = short(theirs.median_of(Sample::server_cpu_us));
                [pad(&figures.show(theirs), main), pad(&cpu_us, cpu)]
            }
        };
        line += &format!(" | {} {}", shown[0], shown[1]);
        if index > 0 {
            let ours = &series[0];
            let told = if theirs.samples.is_empty() || ours.samples.is_empty() {
                String::new()
            } else {
                let rate = ours.ratio_to(theirs, |sample| figures.main_of(sample));
                let cost = ours.ratio_to(theirs, Sample::server_cpu_us);
                format!("{rate:.2}x, {cost:.2}x")
            };
            line += &format!(" {}", pad(&told, ratio));
        }
    }
    line.trim_end().to_owned()
}

fn pad(text: &str, width: usize) -> String {
    format!("{text:<width$}")
}

/// Three digits.
fn short(number: f64) -> String {
    let digits = if number >= 99.95 {
        0
    } else if number >= 9.995 {
        1
    } else {
        2
    };
    format!("{number:.digits$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(operations: u64, cpu: f64) -> Sample {
        Sample {
            operations,
            bytes: operations * 4096,
            seconds: 2.0,
            server_cpu_seconds: cpu,
            client_cpu_seconds: 0.0,
            others_cpu_seconds: 0.0,
            latency_us_median: 50.0,
            latency_us_p99: 200.0,
        }
    }

    #[test]
    fn medians() {
        assert_eq!(median([3.0, 1.0, 2.0]).to_bits(), 2f64.to_bits());
        assert_eq!(median([4.0, 1.0]).to_bits(), 2.5f64.to_bits());
        assert_eq!(median([]).to_bits(), 0f64.to_bits());
    }

    #[test]
    fn a_line_compares_the_first_program_with_the_others_round_by_round() {
        let ours =
            Series { samples: vec![sample(200_000, 1.0), sample(20_000, 0.1)], ..Series::of("ours".into()) };
        let theirs =
            Series { samples: vec![sample(100_000, 1.0), sample(10_000, 0.1)], ..Series::of("b".into()) };
        let absent = Series { skipped: Some("no plugin".into()), ..Series::of("c".into()) };
        let all = [ours, theirs, absent];
        let line = line("random read", Figures::Rate, &all);
        let words: Vec<&str> = line.split_whitespace().collect();
        let expected = "random read | 55.0 kIOPS 5.00 | 27.5 kIOPS 10.0 2.00x, 0.50x | n/a";
        assert_eq!(words.join(" "), expected, "the machine was ten times slower in the second round");
        let head = head("raw", &["ours".into(), "b".into(), "c".into()]);
        assert_eq!(head.find(" | "), line.find(" | "));
    }
}
