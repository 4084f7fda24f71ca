//! The page: rows and figures of all papers, in one file that loads nothing.
//!
//! On top is how many rows of each paper have which verdict; then each paper with its rows, in the paper's order, and
//! its figures. On a narrow window a row becomes a card, so that nothing is cut off.

use std::fmt::Write;

use super::figure::escaped;
use super::{Made, Row, Tally, Verdict};

const STYLE: &str = include_str!("page.css");

/// The page, as a file. `command` is what made it, `day` when.
pub(crate) fn page(papers: &[Made], command: &str, day: &str) -> String {
    let mut html = String::new();
    let mut put = |line: &str| {
        html.push_str(line);
        html.push('\n');
    };
    put("<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">");
    put("<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">");
    put("<title>Vellum beside the papers</title>");
    put(&format!("<style>\n{STYLE}</style></head><body><main>"));
    put("<h1>Vellum beside the papers</h1>");
    put(&format!(
        "<p>Each row of the papers that Vellum is built on: what the paper reports, and what came out here. Sizes and \
         requests are counted. Times are virtual: the engine runs unchanged on modelled drives, and programs that can \
         no longer be run are models, so an advantage over them is an advantage over those models. Both are the same \
         on every machine. <em>Reproduced</em> is within a quarter of the paper’s ratio, unless the row says \
         otherwise.</p>\n<p class=\"made\">Made by <code>{}</code> on {}.</p>",
        escaped(command),
        escaped(day)
    ));
    put("<div class=\"scroll\"><table class=\"tally\"><thead><tr><th>paper</th>");
    Verdict::ALL.iter().for_each(|verdict| put(&format!("<th>{}</th>", verdict.name())));
    put("</tr></thead><tbody>");
    for made in papers {
        let tally = Tally::of(&made.rows);
        let cells: String =
            Verdict::ALL.map(|verdict| format!("<td class=\"number\">{}</td>", tally.get(verdict))).concat();
        let (short, _) = made.title.split_once(':').unwrap_or((made.title, ""));
        put(&format!(
            "<tr><td><a href=\"#{}\">{}, {}</a></td>{cells}</tr>",
            made.name,
            escaped(short),
            escaped(made.venue)
        ));
    }
    put("</tbody></table></div>");
    for made in papers {
        put(&format!("<section id=\"{}\"><h2>{}</h2>", made.name, escaped(made.title)));
        put(&format!("<p class=\"venue\">{}</p><p>{}</p>", escaped(made.venue), escaped(&made.setting)));
        put(
            "<table class=\"rows\"><thead><tr><th>row</th><th>where</th><th>what</th><th>paper</th><th>here</th>\
             <th>ratio</th><th>verdict</th></tr></thead><tbody>",
        );
        made.rows.iter().for_each(|row| put(&row_html(row)));
        put("</tbody></table>");
        if !made.figures.is_empty() {
            put("<div class=\"figures\">");
        }
        for figure in &made.figures {
            put(&format!(
                "<figure>{}<figcaption>{} (<a href=\"{file}.csv\">{file}.csv</a>)</figcaption></figure>",
                figure.svg(),
                escaped(&figure.title),
                file = escaped(&figure.file)
            ));
        }
        if !made.figures.is_empty() {
            put("</div>");
        }
        put("</section>");
    }
    put("</main></body></html>");
    html
}

fn row_html(row: &Row) -> String {
    let mut html = String::new();
    // A number and its percent sign stay together.
    let value = |text: &str| escaped(text).replace(" %", "\u{a0}%");
    let ratio = row.ratio.map_or_else(|| "–".to_owned(), |ratio| format!("{ratio:.2}"));
    let note =
        if row.note.is_empty() { String::new() } else { format!("<small>{}</small>", escaped(&row.note)) };
    write!(
        html,
        "<tr class=\"{}\"><td data-name=\"row\">{}</td><td data-name=\"where\">{}</td><td data-name=\"what\">{} \
         <span class=\"how\">{}</span></td><td data-name=\"paper\">{}</td><td data-name=\"here\">{}</td>\
         <td data-name=\"ratio\" class=\"number\">{ratio}</td><td data-name=\"verdict\"><b>{}</b>{note}</td></tr>",
        row.verdict.name().replace(' ', "-"),
        row.id,
        escaped(row.place),
        escaped(&row.what),
        row.how.name(),
        value(&row.paper),
        value(&row.here),
        row.verdict.name(),
    )
    .expect("memory");
    html
}

#[cfg(test)]
mod tests {
    use super::super::{Figure, Good, How, Series, Shape};
    use super::*;

    #[test]
    fn the_page_loads_nothing_and_has_every_row_and_figure() {
        let row = |id, value| {
            Row::judged(id, ("Fig. <1>", "a & b"), How::Simulated, ("1", "2"), value, Good::High(1.0))
        };
        let figure = Figure {
            file: "p-1".into(),
            title: "one".into(),
            shape: Shape::Bars,
            x_name: "x",
            y_name: "y",
            places: vec!["a".into()],
            series: vec![Series { name: "s".into(), is_of_the_paper: false, values: vec![Some(1.0)] }],
        };
        let made = Made {
            name: "p",
            title: "A paper",
            venue: "V 2000",
            setting: String::new(),
            rows: vec![row("R1", 1.0), row("R2", 2.0), row("R3", 0.1)],
            figures: vec![figure],
            runs: serde_json::Value::Null,
        };
        let html = page(&[made], "vellum-papers run p", "2000-01-01");
        assert_eq!(html.matches("<tr class=").count(), 3);
        assert_eq!((html.matches("<svg").count(), html.matches("href=\"p-1.csv\"").count()), (1, 1));
        assert!(
            ["class=\"reproduced\"", "class=\"better\"", "class=\"worse\"", "Fig. &lt;1&gt;", "a &amp; b"]
                .iter()
                .all(|part| html.contains(part))
        );
        let loads = ["src=", "url(", "@import", "http:", "https:", "<script", "<link"];
        assert!(loads.iter().all(|part| !html.contains(part)), "it loads nothing");
    }
}
