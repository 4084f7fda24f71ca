//! The course of prefetching as a plot: a line of rates over the phases of the guest.

use serde::Serialize;

use super::SMOOTH;

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 300.0;
const LEFT: f64 = 60.0;
const TOP: f64 = 30.0;
const RIGHT: f64 = 20.0;
const BOTTOM: f64 = 50.0;
const MIB: f64 = 1_048_576.0;

/// How far it is at a time.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Point {
    /// Since the start.
    pub(super) seconds: f64,
    /// Copied until then.
    pub(super) bytes: u64,
    /// What the prefetcher says of itself.
    pub(super) state: String,
}

/// What the guest does meanwhile.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Phase {
    pub(super) name: &'static str,
    /// In seconds since the start.
    pub(super) from: f64,
    pub(super) to: f64,
    pub(super) is_busy: bool,
}

/// Bytes a second in a phase.
pub(super) fn rate_in(points: &[Point], phase: &Phase) -> f64 {
    let within: Vec<&Point> =
        points.iter().filter(|point| (phase.from..=phase.to).contains(&point.seconds)).collect();
    match within[..] {
        [first, .., last] if last.seconds > first.seconds => {
            last.bytes.saturating_sub(first.bytes) as f64 / (last.seconds - first.seconds)
        }
        _ => 0.0,
    }
}

/// Time and rate, each over some points.
fn rates(points: &[Point]) -> Vec<(f64, f64)> {
    let rate = |from: &Point, to: &Point| {
        let bytes = to.bytes.saturating_sub(from.bytes) as f64;
        ((from.seconds + to.seconds) / 2.0, bytes / (to.seconds - from.seconds).max(1e-6))
    };
    points.windows(SMOOTH + 1).map(|some| rate(&some[0], &some[SMOOTH])).collect()
}

/// A round number that is at least this.
fn round_up(value: f64) -> f64 {
    let power = 10f64.powf(value.max(1.0).log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|step| step * power).find(|round| *round >= value).unwrap_or(value)
}

/// The plot, as a file.
pub(super) fn svg(points: &[Point], phases: &[Phase]) -> String {
    let rates = rates(points);
    let end = points.last().map_or(1.0, |point| point.seconds.max(1.0));
    let top = round_up(rates.iter().map(|(_, rate)| rate / MIB).fold(1.0, f64::max));
    let x = |seconds: f64| LEFT + seconds / end * (WIDTH - LEFT - RIGHT);
    let y = |mib: f64| HEIGHT - BOTTOM - mib / top * (HEIGHT - TOP - BOTTOM);
    let mut parts = vec![format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"white\"/>"
    )];
    for phase in phases {
        let (from, to) = (x(phase.from), x(phase.to));
        let fill = if phase.is_busy { "#f6d9c9" } else { "#eef2f6" };
        parts.push(format!(
            "<rect x=\"{from:.1}\" y=\"{TOP}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"{fill}\"/>\n\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            to - from,
            HEIGHT - TOP - BOTTOM,
            f64::midpoint(from, to),
            TOP - 8.0,
            phase.name
        ));
    }
    for step in 0..=4 {
        let (mib, seconds) = (top * f64::from(step) / 4.0, end * f64::from(step) / 4.0);
        parts.push(format!(
            "<line x1=\"{LEFT}\" x2=\"{:.1}\" y1=\"{1:.1}\" y2=\"{1:.1}\" stroke=\"#c8ccd0\"/>\n\
             <text x=\"{2:.1}\" y=\"{3:.1}\" text-anchor=\"end\">{mib:.0}</text>\n\
             <text x=\"{4:.1}\" y=\"{5:.1}\" text-anchor=\"middle\">{seconds:.0}</text>",
            WIDTH - RIGHT,
            y(mib),
            LEFT - 6.0,
            y(mib) + 4.0,
            x(seconds),
            HEIGHT - BOTTOM + 18.0
        ));
    }
    let line: Vec<String> =
        rates.iter().map(|(seconds, rate)| format!("{:.1},{:.1}", x(*seconds), y(rate / MIB))).collect();
    parts.push(format!(
        "<polyline fill=\"none\" stroke=\"#1f5fa8\" stroke-width=\"1.5\" points=\"{}\"/>\n\
         <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">seconds</text>\n\
         <text transform=\"translate(16 {:.1}) rotate(-90)\" text-anchor=\"middle\">prefetched, MiB/s</text>\n</svg>\n",
        line.join(" "),
        f64::midpoint(LEFT, WIDTH - RIGHT),
        HEIGHT - 12.0,
        HEIGHT / 2.0
    ));
    parts.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_those_of_the_points() {
        let point = |tenth: u32| Point {
            seconds: f64::from(tenth) / 10.0,
            bytes: u64::from(tenth.min(50)) << 20,
            state: String::new(),
        };
        let points: Vec<Point> = (0..100).map(point).collect();
        let phase = |from, to| Phase { name: "", from, to, is_busy: false };
        assert!((rate_in(&points, &phase(0.0, 5.0)) / MIB - 10.0).abs() < 1e-6);
        assert!(rate_in(&points, &phase(5.0, 9.0)) < 1e-6);
        assert!(rates(&points).iter().all(|(_, rate)| *rate <= 10.0 * MIB + 1.0));
        assert!(
            [(0.3, 1.0), (3.0, 5.0), (96.0, 100.0), (101.0, 200.0)]
                .iter()
                .all(|(is, up)| round_up(*is) == *up)
        );
        let plot = svg(&points, &[phase(0.0, 9.9)]);
        assert!(
            plot.starts_with("<svg")
                && plot.matches("polyline").count() == 1
                && plot.trim_end().ends_with("</svg>")
        );
    }
}
