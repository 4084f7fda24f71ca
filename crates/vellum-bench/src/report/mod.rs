//! Reports on samples: medians, ratios, lines of a table. What prints them is [`vellum_lab::report`].

pub(crate) mod amplification;
pub(crate) mod replay;

use serde::Serialize;

use crate::load::Sample;

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

/// Half of the way from the smallest to the largest, in percent of the median.
pub(crate) fn spread_percent(values: impl IntoIterator<Item = f64>) -> f64 {
    let values: Vec<f64> = values.into_iter().collect();
    let (low, high) = values
        .iter()
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(*value), high.max(*value)));
    let middle = median(values);
    if middle > 0.0 { (high - low) / 2.0 / middle * 100.0 } else { 0.0 }
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

    /// Microseconds of the window for an operation.
    #[expect(clippy::cast_precision_loss, reason = "counts are far below 2^53")]
    pub(crate) fn elapsed_us(&self) -> f64 {
        self.seconds * 1e6 / self.operations as f64
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

    /// The median of a figure over the rounds.
    pub(crate) fn median_of(&self, figure: impl Fn(&Sample) -> f64) -> f64 {
        median(self.samples.iter().map(figure))
    }

    /// For each round the figure divided by the other's of the same round.
    pub(crate) fn ratios_to(&self, other: &Self, figure: impl Fn(&Sample) -> f64) -> Vec<f64> {
        self.samples.iter().zip(&other.samples).map(|(mine, theirs)| figure(mine) / figure(theirs)).collect()
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
        let spread = spread_percent(series.samples.iter().map(|sample| self.main_of(sample)));
        let (unit, more) = match self {
            Self::Rate => ("kIOPS", String::new()),
            Self::Throughput => ("MB/s", String::new()),
            Self::Latency => {
                ("µs", format!(", p99 {}", short(series.median_of(|sample| sample.latency_us_p99))))
            }
        };
        format!("{main} {unit} ±{spread:.0}%{more}")
    }

    /// Compares `ours` with `theirs`: the ratio of their rates (or times), and of their CPU times. Each is
    /// the median over the rounds, each of which gives one ratio. `None` where one of them was left out.
    pub(crate) fn compare(self, ours: &Series, theirs: &Series) -> Option<String> {
        let rates = ours.ratios_to(theirs, |sample| self.main_of(sample));
        let costs = ours.ratios_to(theirs, Sample::server_cpu_us);
        if rates.is_empty() {
            return None;
        }
        let spread = spread_percent(rates.iter().copied());
        Some(format!("{:.2}x ±{spread:.0}%, CPU {:.2}x", median(rates), median(costs)))
    }
}

/// Widths of the columns: the case, the program, what it did, the CPU time, the number of operations.
const COLUMNS: [usize; 5] = [14, 9, 26, 18, 13];

/// The lines of a case: what each program did, and how the first one compares to each of the others.
pub(crate) fn lines(name: &str, figures: Figures, series: &[Series]) -> Vec<String> {
    let [title, program, main, cpu, count] = COLUMNS;
    let mut lines = Vec::new();
    for (index, theirs) in series.iter().enumerate() {
        let mut line =
            format!("  {} {}", pad(if index == 0 { name } else { "" }, title), pad(&theirs.server, program));
        if theirs.skipped.is_some() {
            lines.push(line + " n/a");
            continue;
        }
        let cpu_us = short(theirs.median_of(Sample::server_cpu_us));
        let operations: u64 = theirs.samples.iter().map(|sample| sample.operations).sum();
        line += &format!(" {}", pad(&figures.show(theirs), main));
        line += &format!(" {}", pad(&format!("CPU {cpu_us} µs/op"), cpu));
        line += &format!(" {}", pad(&format!("{operations} ops"), count));
        if index > 0
            && let Some(compared) = figures.compare(&series[0], theirs)
        {
            line += &format!(" {}: {compared}", series[0].server);
        }
        lines.push(line.trim_end().to_owned());
    }
    lines
}

fn pad(text: &str, width: usize) -> String {
    format!("{text:<width$}")
}

/// Three digits.
pub(crate) fn short(number: f64) -> String {
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
        let lines = lines("raw", Figures::Rate, &all);
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(words(&lines[0]), "raw ours 55.0 kIOPS ±82% CPU 5.00 µs/op 220000 ops");
        assert_eq!(
            words(&lines[1]),
            "b 27.5 kIOPS ±82% CPU 10.0 µs/op 110000 ops ours: 2.00x ±0%, CPU 0.50x",
            "the machine was ten times slower in the second round, which is in both halves of a ratio"
        );
        assert_eq!(words(&lines[2]), "c n/a");
    }

    #[test]
    fn spreads() {
        assert_eq!(spread_percent([90.0, 100.0, 120.0]).to_bits(), 15f64.to_bits());
        assert_eq!(spread_percent([5.0]).to_bits(), 0f64.to_bits());
        assert_eq!(spread_percent([]).to_bits(), 0f64.to_bits());
    }
}
