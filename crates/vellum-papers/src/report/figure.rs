//! A figure: series of points, as CSV and as SVG.
//!
//! Lines are for what is measured over threads, sizes or time; bars for what has names. What the paper prints in its
//! text is drawn with the series: a hollow circle at its place on a line, a hollow bar beside the bar. The colours are
//! the page's (`--series-1` …), so that a figure follows a light or a dark page.

use std::fmt::Write;

use serde::Serialize;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Shape {
    Lines,
    Bars,
}

#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Series {
    pub(crate) name: String,
    /// Values that the paper prints, not ours.
    pub(crate) is_of_the_paper: bool,
    /// A value for each place on the x axis; places without one have a hole.
    pub(crate) values: Vec<Option<f64>>,
}

#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Figure {
    /// The name of its file, such as `selfie-5a`.
    pub(crate) file: String,
    pub(crate) title: String,
    pub(crate) shape: Shape,
    pub(crate) x_name: &'static str,
    pub(crate) y_name: &'static str,
    /// The places on the x axis, from left to right.
    pub(crate) places: Vec<String>,
    pub(crate) series: Vec<Series>,
}

const WIDTH: f64 = 640.0;
const LEFT: f64 = 56.0;
const RIGHT: f64 = 12.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 60.0;
const PLOT_HEIGHT: f64 = 230.0;
const LEGEND_LINE: f64 = 18.0;
/// Legend entries beside each other.
const COLUMNS: usize = 3;
/// The colours that the page defines.
const COLOURS: usize = 8;

impl Figure {
    /// A line for each place: `place,series,value,of-the-paper`.
    pub(crate) fn csv(&self) -> String {
        let quoted = |text: &str| format!("\"{}\"", text.replace('"', "\"\""));
        let mut csv = format!("{},series,{},of-the-paper\n", quoted(self.x_name), quoted(self.y_name));
        for series in &self.series {
            for (place, value) in self.places.iter().zip(&series.values) {
                if let Some(value) = value {
                    writeln!(
                        csv,
                        "{},{},{value},{}",
                        quoted(place),
                        quoted(&series.name),
                        series.is_of_the_paper
                    )
                    .expect("memory");
                }
            }
        }
        csv
    }

    /// The figure for the page.
    pub(crate) fn svg(&self) -> String {
        let legend = self.series.len().div_ceil(COLUMNS) as f64 * LEGEND_LINE;
        let bottom = TOP + PLOT_HEIGHT;
        let height = bottom + BOTTOM + legend;
        let most =
            self.series.iter().flat_map(|series| series.values.iter().flatten()).copied().fold(0.0, f64::max);
        let top = round_up(most);
        let y = |value: f64| bottom - value / top * PLOT_HEIGHT;
        let step = (WIDTH - LEFT - RIGHT) / self.places.len().max(1) as f64;
        let middle = |index: usize| LEFT + (index as f64 + 0.5) * step;
        let mut svg = format!(
            "<svg viewBox=\"0 0 {WIDTH} {height:.0}\" role=\"img\" aria-label=\"{}\">\n",
            escaped(&self.title)
        );
        let mut put = |line: String| {
            svg.push_str(&line);
            svg.push('\n');
        };
        for part in 0..=4 {
            let value = top * f64::from(part) / 4.0;
            put(format!(
                "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{:.1}\" y1=\"{2:.1}\" y2=\"{2:.1}\"/><text x=\"{3:.1}\" y=\"{4:.1}\" text-anchor=\"end\">{1}</text>",
                WIDTH - RIGHT,
                short(value),
                y(value),
                LEFT - 6.0,
                y(value) + 4.0,
            ));
        }
        for (index, place) in self.places.iter().enumerate() {
            put(format!(
                "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
                middle(index),
                bottom + 16.0,
                escaped(place)
            ));
        }
        for (number, series) in self.series.iter().enumerate() {
            self.draw(number, series, (step, top), &mut put);
        }
        put(format!(
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>\
             <text transform=\"translate(13 {:.1}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
            f64::midpoint(LEFT, WIDTH - RIGHT),
            bottom + 34.0,
            escaped(self.x_name),
            TOP + PLOT_HEIGHT / 2.0,
            escaped(self.y_name)
        ));
        for (number, series) in self.series.iter().enumerate() {
            let column = (WIDTH - LEFT - RIGHT) / COLUMNS as f64;
            let x = LEFT + (number % COLUMNS) as f64 * column;
            let y = bottom + BOTTOM + (number / COLUMNS) as f64 * LEGEND_LINE;
            put(format!(
                "<rect class=\"{}\" x=\"{x:.1}\" y=\"{:.1}\" width=\"10\" height=\"10\"/>\
                 <text x=\"{:.1}\" y=\"{y:.1}\">{}</text>",
                class(number, series),
                y - 9.0,
                x + 15.0,
                escaped(&series.name)
            ));
        }
        svg.push_str("</svg>\n");
        svg
    }

    fn draw(&self, number: usize, series: &Series, (step, top): (f64, f64), put: &mut dyn FnMut(String)) {
        let bottom = TOP + PLOT_HEIGHT;
        let y = |value: f64| bottom - value / top * PLOT_HEIGHT;
        let middle = |index: usize| LEFT + (index as f64 + 0.5) * step;
        let class = class(number, series);
        let there = || series.values.iter().enumerate().filter_map(|(index, value)| Some((index, (*value)?)));
        let title = |index: usize, value: f64| {
            format!(
                "<title>{}, {}: {}</title>",
                escaped(&series.name),
                escaped(&self.places[index]),
                short(value)
            )
        };
        match self.shape {
            Shape::Lines => {
                if !series.is_of_the_paper {
                    let points: Vec<String> = there()
                        .map(|(index, value)| format!("{:.1},{:.1}", middle(index), y(value)))
                        .collect();
                    put(format!("<polyline class=\"{class}\" points=\"{}\"/>", points.join(" ")));
                }
                for (index, value) in there() {
                    let radius = if series.is_of_the_paper { 5 } else { 3 };
                    put(format!(
                        "<circle class=\"{class}\" cx=\"{:.1}\" cy=\"{:.1}\" r=\"{radius}\">{}</circle>",
                        middle(index),
                        y(value),
                        title(index, value)
                    ));
                }
            }
            Shape::Bars => {
                let width = step * 0.84 / self.series.len() as f64;
                for (index, value) in there() {
                    let left = middle(index) - step * 0.42 + number as f64 * width;
                    put(format!(
                        "<rect class=\"{class}\" x=\"{left:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{:.1}\">{}</rect>",
                        y(value),
                        (width - 1.5).max(1.0),
                        (bottom - y(value)).max(0.0),
                        title(index, value)
                    ));
                }
            }
        }
    }
}

fn class(number: usize, series: &Series) -> String {
    let whose = if series.is_of_the_paper { " paper" } else { "" };
    format!("series-{}{whose}", number % COLOURS + 1)
}

/// A value with as many digits as one can read off a figure.
fn short(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        large if large >= 100.0 => format!("{value:.0}"),
        middle if middle >= 10.0 => trimmed(&format!("{value:.1}")),
        _ => trimmed(&format!("{value:.2}")),
    }
}

fn trimmed(number: &str) -> String {
    number.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// A round number that is at least this.
fn round_up(value: f64) -> f64 {
    if value <= 0.0 {
        return 1.0;
    }
    let power = 10f64.powf(value.log10().floor());
    [1.0, 2.0, 4.0, 5.0, 8.0, 10.0]
        .into_iter()
        .map(|step| step * power)
        .find(|round| *round >= value)
        .unwrap_or(value)
}

/// Text as it may stand in HTML and in an attribute.
pub(super) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(shape: Shape) -> Figure {
        let series =
            |name: &str, is_of_the_paper, values| Series { name: name.into(), is_of_the_paper, values };
        Figure {
            file: "x".into(),
            title: "a \"b\" <c>".into(),
            shape,
            x_name: "threads",
            y_name: "MB/s",
            places: vec!["1".into(), "8".into()],
            series: vec![
                series("zoned, \"warm\"", false, vec![Some(1.0), Some(7.5)]),
                series("paper", true, vec![Some(6.0), None]),
            ],
        }
    }

    #[test]
    fn csv_has_a_line_for_each_value_and_quotes_names() {
        assert_eq!(
            figure(Shape::Lines).csv(),
            "\"threads\",series,\"MB/s\",of-the-paper\n\"1\",\"zoned, \"\"warm\"\"\",1,false\n\
             \"8\",\"zoned, \"\"warm\"\"\",7.5,false\n\"1\",\"paper\",6,true\n"
        );
    }

    #[test]
    fn svg_draws_each_value_within_the_plot() {
        let lines = figure(Shape::Lines).svg();
        assert_eq!((lines.matches("<polyline").count(), lines.matches("<circle").count()), (1, 3));
        let bars = figure(Shape::Bars).svg();
        assert_eq!(bars.matches("<title>").count(), 3);
        for svg in [lines, bars] {
            assert!(svg.contains("aria-label=\"a &quot;b&quot; &lt;c&gt;\"") && svg.ends_with("</svg>\n"));
            for (_, rest) in svg.match_indices(" y=\"").map(|(at, _)| svg.split_at(at + 4)) {
                let y: f64 = rest.split('"').next().expect("a value").parse().expect("a number");
                assert!((0.0..=400.0).contains(&y), "{y}");
            }
        }
        assert!(
            [(7.5, 8.0), (3.0, 4.0), (81.0, 100.0), (0.03, 0.04), (0.0, 1.0)]
                .iter()
                .all(|(is, up)| (round_up(*is) - up).abs() < 1e-9)
        );
    }
}
