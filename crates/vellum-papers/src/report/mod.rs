//! What a run has to say: rows, figures, one page.
//!
//! ```text
//!   rows ────┬─▶ a table on the terminal
//!            ├─▶ papers.json   everything, the runs' own figures included
//!   figures ─┼─▶ FIGURE.csv    the series of each figure, the paper's printed values among them
//!            └─▶ index.html    rows and figures (SVG) on one page; it loads nothing
//! ```

mod figure;
mod page;
mod row;

pub(crate) use figure::{Figure, Series, Shape};
pub(crate) use page::page;
pub(crate) use row::{Good, How, Row, Tally, Verdict};

use serde::Serialize;

/// What one paper's run made.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Made {
    /// The word by which `run` takes it.
    pub(crate) name: &'static str,
    pub(crate) title: &'static str,
    /// Authors' venue and year.
    pub(crate) venue: &'static str,
    /// What was modelled and what is the engine itself, in a sentence or two.
    pub(crate) setting: String,
    pub(crate) rows: Vec<Row>,
    pub(crate) figures: Vec<Figure>,
    /// The runs' own figures, for programs.
    pub(crate) runs: serde_json::Value,
}
