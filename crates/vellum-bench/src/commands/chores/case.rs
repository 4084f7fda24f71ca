//! What is measured, and how it is reported.

use std::time::Duration;

use serde::Serialize;

use super::{QEMU, Row, short};

/// A time that a caller waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Figure {
    Fill,
    FillFlush,
    Discard,
    DiscardFlush,
    FillAgain,
    Stop,
    Copy,
    FullFirst,
    FullSecond,
}

impl Figure {
    pub(super) const ALL: [Self; 9] = [
        Self::Fill,
        Self::FillFlush,
        Self::Discard,
        Self::DiscardFlush,
        Self::FillAgain,
        Self::Stop,
        Self::Copy,
        Self::FullFirst,
        Self::FullSecond,
    ];

    pub(super) fn title(self) -> &'static str {
        match self {
            Self::Fill => "fill, 1 MiB writes in order",
            Self::FillFlush => "the flush behind that",
            Self::Discard => "discard all of it, one request",
            Self::DiscardFlush => "the flush behind that",
            Self::FillAgain => "fill again",
            Self::Stop => "stop the server",
            Self::Copy => "convert from raw",
            Self::FullFirst => "first new cluster of a full image",
            Self::FullSecond => "the second one",
        }
    }
}

/// One time.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sample {
    pub(super) wall_ms: f64,
    /// Of the server; zero where there is none.
    pub(super) cpu_ms: f64,
}

/// All times of one program.
#[derive(Debug, Clone, Default)]
pub(super) struct Samples(Vec<(Figure, Sample)>);

impl Samples {
    pub(super) fn note(&mut self, figure: Figure, wall: Duration, cpu_seconds: f64) {
        self.0.push((figure, Sample { wall_ms: wall.as_secs_f64() * 1000.0, cpu_ms: cpu_seconds * 1000.0 }));
    }

    /// Of one figure, in the order of the rounds.
    pub(super) fn of(&self, figure: Figure) -> Vec<Sample> {
        self.0.iter().filter(|(of, _)| *of == figure).map(|(_, sample)| *sample).collect()
    }
}

/// The table.
pub(super) fn lines(rows: &[Row]) -> Vec<String> {
    let mut lines = Vec::new();
    for figure in rows.chunk_by(|a, b| a.figure == b.figure) {
        lines.push(format!("  {}", figure[0].figure.title()));
        for row in figure {
            let compared = match row.times_qemu {
                Some(times) => format!("{} times {QEMU}", short(times)),
                None => String::new(),
            };
            let line = format!(
                "    {:<26} {:>8} ms   CPU {:>7} ms   {compared}",
                row.subject,
                short(row.median_ms),
                short(row.cpu_median_ms)
            );
            lines.push(line.trim_end().to_owned());
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_keep_the_order_of_their_rounds() {
        let mut samples = Samples::default();
        for round in 1..=3 {
            samples.note(Figure::Fill, Duration::from_millis(round), 0.5);
            samples.note(Figure::Stop, Duration::from_millis(10 * round), 0.0);
        }
        let fill: Vec<f64> = samples.of(Figure::Fill).iter().map(|sample| sample.wall_ms).collect();
        assert_eq!(fill, [1.0, 2.0, 3.0]);
        assert!(samples.of(Figure::Copy).is_empty());
    }
}
