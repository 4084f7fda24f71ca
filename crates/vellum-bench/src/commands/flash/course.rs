//! The course of a cache from its first read on, and its plot: hit ratio, and what is written to flash and home.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;
use vellum_core::Result;

use super::cases::{Case, Loads};
use super::stand::{Counts, Stand};

const EVERY: Duration = Duration::from_millis(200);
/// A rate is that of this many points.
const SMOOTH: usize = 3;
const MIB: f64 = 1_048_576.0;

const WIDTH: f64 = 760.0;
const LEFT: f64 = 60.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 30.0;
const PANEL: f64 = 170.0;
const GAP: f64 = 40.0;
const BOTTOM: f64 = 50.0;

/// What was counted at a time.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Point {
    seconds: f64,
    counts: Counts,
}

/// What the guest does meanwhile.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Phase {
    name: &'static str,
    /// In seconds since the start.
    from: f64,
    to: f64,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Course {
    phases: Vec<Phase>,
    points: Vec<Point>,
}

impl Course {
    /// A new cache: a boot, the same again, commits, a mixture, and nothing.
    pub(super) fn run(stand: &Stand, loads: &Loads) -> Result<Self> {
        let (began, is_over) = (Instant::now(), AtomicBool::new(false));
        thread::scope(|scope| {
            let watch = scope.spawn(|| {
                let mut points = Vec::new();
                while !is_over.load(Ordering::Relaxed) {
                    if let Some(counts) = stand.counts()? {
                        points.push(Point { seconds: began.elapsed().as_secs_f64(), counts });
                    }
                    thread::sleep(EVERY);
                }
                Ok(points)
            });
            let phases = || {
                let mut phases = Vec::new();
                let all = [
                    ("boot", Some(Case::Boot)),
                    ("again", Some(Case::Boot)),
                    ("commits", Some(Case::Commit)),
                    ("mixed", Some(Case::Mixed)),
                    ("idle", None),
                ];
                for (number, (name, case)) in (1..).zip(all) {
                    let from = began.elapsed().as_secs_f64();
                    match case {
                        Some(case) => drop(loads.run(case, &stand.doors, number)?),
                        None => thread::sleep(loads.window / 2),
                    }
                    phases.push(Phase { name, from, to: began.elapsed().as_secs_f64() });
                }
                Ok(phases)
            };
            let phases = phases();
            is_over.store(true, Ordering::Relaxed);
            let points = watch.join().expect("a watcher does not panic");
            Ok(Self { phases: phases?, points: points? })
        })
    }

    pub(super) fn lines(&self) -> Vec<String> {
        let line = |phase: &Phase| {
            // The nearest points outside: a phase may be shorter than the time between two.
            let first = self.points.iter().rfind(|point| point.seconds <= phase.from).or(self.points.first());
            let last = self.points.iter().find(|point| point.seconds >= phase.to).or(self.points.last());
            let (Some(first), Some(last)) = (first, last) else {
                return format!("  {:<8} not seen", phase.name);
            };
            let counts = last.counts.since(&first.counts);
            let seconds = phase.to - phase.from;
            format!(
                "  {:<8} {:>5.1} s, hit ratio {}, flash {:.1} MiB, home {:.1} MiB",
                phase.name,
                seconds,
                ratio(&counts).map_or("-".to_owned(), |ratio| format!("{ratio:.3}")),
                counts.flash_bytes() as f64 / MIB,
                counts.written_home as f64 * 4096.0 / MIB
            )
        };
        self.phases.iter().map(line).collect()
    }

    /// The plot, as a file.
    pub(super) fn svg(&self) -> String {
        let points = &self.points;
        let end = points.last().map_or(1.0, |point| point.seconds.max(1.0));
        let rate = |of: fn(&Counts) -> f64| -> Vec<(f64, f64)> {
            let one = |some: &[Point]| {
                let (from, to) = (some[0], some[some.len() - 1]);
                let seconds = (to.seconds - from.seconds).max(1e-6);
                (f64::midpoint(from.seconds, to.seconds), of(&to.counts.since(&from.counts)) / MIB / seconds)
            };
            points.windows(SMOOTH + 1).map(one).collect()
        };
        let (flash, home) =
            (rate(|counts| counts.flash_bytes() as f64), rate(|counts| counts.written_home as f64 * 4096.0));
        let hits: Vec<(f64, f64)> = points
            .windows(SMOOTH + 1)
            .filter_map(|some| {
                let (from, to) = (some[0], some[SMOOTH]);
                Some((f64::midpoint(from.seconds, to.seconds), ratio(&to.counts.since(&from.counts))?))
            })
            .collect();
        let highest = flash.iter().chain(&home).map(|(_, rate)| *rate).fold(1.0, f64::max).ceil();
        let x = |seconds: f64| LEFT + seconds / end * (WIDTH - LEFT - RIGHT);
        let y = |panel: f64, share: f64| TOP + panel * (PANEL + GAP) + (1.0 - share) * PANEL;
        let height = TOP + 2.0 * PANEL + GAP + BOTTOM;
        let mut parts = vec![format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" \
             font-size=\"12\">\n<rect width=\"{WIDTH}\" height=\"{height}\" fill=\"white\"/>"
        )];
        for (number, phase) in self.phases.iter().enumerate() {
            let fill = ["#eef2f6", "#f6eede"][number % 2];
            for panel in [0.0, 1.0] {
                parts.push(format!(
                    "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{PANEL}\" fill=\"{fill}\"/>",
                    x(phase.from),
                    y(panel, 1.0),
                    (x(phase.to.min(end)) - x(phase.from)).max(0.0)
                ));
            }
            parts.push(format!(
                "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
                x(f64::midpoint(phase.from, phase.to)),
                TOP - 8.0,
                phase.name
            ));
        }
        for step in 0..=4 {
            let share = f64::from(step) / 4.0;
            for (panel, label) in [(0.0, format!("{share:.2}")), (1.0, format!("{:.1}", share * highest))] {
                parts.push(format!(
                    "<line x1=\"{LEFT}\" x2=\"{:.1}\" y1=\"{2:.1}\" y2=\"{2:.1}\" stroke=\"#c8ccd0\"/>\n\
                     <text x=\"{1:.1}\" y=\"{3:.1}\" text-anchor=\"end\">{label}</text>",
                    WIDTH - RIGHT,
                    LEFT - 6.0,
                    y(panel, share),
                    y(panel, share) + 4.0
                ));
            }
            parts.push(format!(
                "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{:.0}</text>",
                x(share * end),
                height - BOTTOM + 18.0,
                share * end
            ));
        }
        let mut line = |panel: f64, highest: f64, color: &str, of: &[(f64, f64)]| {
            let places: Vec<String> = of
                .iter()
                .map(|(seconds, value)| format!("{:.1},{:.1}", x(*seconds), y(panel, value / highest)))
                .collect();
            parts.push(format!(
                "<polyline fill=\"none\" stroke=\"{color}\" stroke-width=\"1.5\" points=\"{}\"/>",
                places.join(" ")
            ));
        };
        line(0.0, 1.0, "#1f5fa8", &hits);
        line(1.0, highest, "#b0451f", &flash);
        line(1.0, highest, "#4f7f3a", &home);
        for (panel, text) in [(0.0, "hit ratio"), (1.0, "written, MiB/s")] {
            parts.push(format!(
                "<text transform=\"translate(16 {:.1}) rotate(-90)\" text-anchor=\"middle\">{text}</text>",
                y(panel, 0.5)
            ));
        }
        parts.push(format!(
            "<text x=\"{0:.1}\" y=\"{1:.1}\" fill=\"#b0451f\">to flash</text>\n\
             <text x=\"{2:.1}\" y=\"{1:.1}\" fill=\"#4f7f3a\">home</text>\n\
             <text x=\"{3:.1}\" y=\"{4:.1}\" text-anchor=\"middle\">seconds</text>\n</svg>\n",
            LEFT + 8.0,
            y(1.0, 1.0) - 6.0,
            LEFT + 72.0,
            f64::midpoint(LEFT, WIDTH - RIGHT),
            height - 12.0
        ));
        parts.join("\n")
    }
}

fn ratio(counts: &Counts) -> Option<f64> {
    let all = counts.hits + counts.misses;
    (all > 0).then(|| counts.hits as f64 / all as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_course_is_drawn_with_three_lines() {
        let point = |tenth: u32| {
            let hits = u64::from(tenth * tenth);
            let counts =
                Counts { hits, misses: 100, write_bytes: u64::from(tenth) << 20, ..Counts::default() };
            Point { seconds: f64::from(tenth) / 10.0, counts }
        };
        let phase = |name, from, to| Phase { name, from, to };
        let points = (0..100).map(point).collect();
        let course = Course { phases: vec![phase("reads", 0.0, 5.0), phase("idle", 5.0, 9.9)], points };
        let plot = course.svg();
        assert!(plot.starts_with("<svg") && plot.trim_end().ends_with("</svg>"));
        assert_eq!(plot.matches("polyline").count(), 3);
        let lines = course.lines();
        assert!(lines[0].contains("  5.0 s, hit ratio 1.000, flash 50.0 MiB"), "{lines:?}");
        assert_eq!(ratio(&Counts::default()), None);
    }
}
