//! A row: what a paper reports, what came out here, and a verdict that follows from the two.
//!
//! 1. Only a printed value is judged. Where a paper has a curve or a word, the row says whether ours runs as the
//!    paper says, and is not comparable.
//! 2. A row made with fewer bytes, files or requests than the paper's is not comparable, whatever it says.
//! 3. *Reproduced* is within a quarter of the paper's ratio, above or below, unless the row states another band. A
//!    higher-is-better row far above is *better*, not reproduced.
//! 4. A percentage is turned into the factor that it stands for: −77 % of the time is 4.3 times as fast.

use serde::Serialize;

/// Where a figure comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum How {
    /// Requests, bytes, sizes: the same on every machine.
    Counted,
    /// Virtual time on a modelled drive: the same on every machine.
    Simulated,
}

impl How {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Counted => "counted",
            Self::Simulated => "simulated",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Verdict {
    Reproduced,
    Better,
    Worse,
    NotComparable,
}

impl Verdict {
    pub(crate) const ALL: [Self; 4] = [Self::Reproduced, Self::Better, Self::Worse, Self::NotComparable];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Reproduced => "reproduced",
            Self::Better => "better",
            Self::Worse => "worse",
            Self::NotComparable => "not comparable",
        }
    }
}

/// What the paper's figure is to be compared by.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Good {
    /// More is better than the value.
    High(f64),
    /// Less is better than the value.
    Low(f64),
    /// The value is of somebody else's program, whose model should be near; being faster is no merit.
    Near(f64),
    /// A range that the paper prints; more is better.
    Within(f64, f64),
    /// No value is printed: what the paper says in words, and whether it is so here.
    Said(bool),
}

/// How far from the paper's ratio still counts as reproduced.
const BAND: f64 = 0.25;

#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Row {
    pub(crate) id: &'static str,
    /// Figure, table or section of the paper.
    pub(crate) place: &'static str,
    pub(crate) what: String,
    pub(crate) how: How,
    /// As the paper has it.
    pub(crate) paper: String,
    pub(crate) here: String,
    /// Here by the paper's, as factors; above 1 is better where one is better.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ratio: Option<f64>,
    pub(crate) verdict: Verdict,
    /// Why it is not comparable or worse, or with which band it is judged.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) note: String,
}

impl Row {
    /// A row whose value here is `value`, to be judged by `good`.
    pub(crate) fn judged(
        id: &'static str,
        (place, what): (&'static str, impl Into<String>),
        how: How,
        (paper, here): (impl Into<String>, impl Into<String>),
        value: f64,
        good: Good,
    ) -> Self {
        let (ratio, verdict) = judge(value, good);
        let note = match good {
            Good::Said(true) => "the paper prints no value; as it says".to_owned(),
            Good::Said(false) => "the paper prints no value; not as it says".to_owned(),
            Good::Within(least, most) => {
                let short = |value: f64| (value * 100.0).round() / 100.0;
                format!("judged by the range {} to {}", short(least), short(most))
            }
            Good::High(_) | Good::Low(_) | Good::Near(_) => String::new(),
        };
        let (what, paper, here) = (what.into(), paper.into(), here.into());
        Self { id, place, what, how, paper, here, ratio, verdict, note }
    }

    /// A size or a count that must be the paper's.
    pub(crate) fn exact(
        id: &'static str,
        (place, what): (&'static str, &'static str),
        (paper, here): (&'static str, String),
        (paper_value, value): (u64, u64),
    ) -> Self {
        let verdict = match value.cmp(&paper_value) {
            std::cmp::Ordering::Equal => Verdict::Reproduced,
            std::cmp::Ordering::Less => Verdict::Better,
            std::cmp::Ordering::Greater => Verdict::Worse,
        };
        let ratio = (paper_value > 0 && value > 0).then(|| paper_value as f64 / value as f64);
        let note = "judged exactly".to_owned();
        Self {
            id,
            place,
            what: what.into(),
            how: How::Counted,
            paper: paper.into(),
            here,
            ratio,
            verdict,
            note,
        }
    }

    /// A row of the paper for which there is nothing here.
    pub(crate) fn not_made(
        id: &'static str,
        (place, what): (&'static str, &'static str),
        paper: &'static str,
        why: &'static str,
    ) -> Self {
        Self {
            id,
            place,
            what: what.into(),
            how: How::Simulated,
            paper: paper.into(),
            here: "–".into(),
            ratio: None,
            verdict: Verdict::NotComparable,
            note: why.into(),
        }
    }

    /// Takes the verdict back, for what was made on another scale.
    pub(crate) fn not_judged(mut self, why: &str) -> Self {
        self.verdict = Verdict::NotComparable;
        why.clone_into(&mut self.note);
        self
    }

    /// Says why it is worse; a row that is not keeps its note.
    pub(crate) fn because(mut self, why: &str) -> Self {
        if self.verdict == Verdict::Worse {
            why.clone_into(&mut self.note);
        }
        self
    }
}

/// Ratio and verdict of a value.
fn judge(value: f64, good: Good) -> (Option<f64>, Verdict) {
    let by = |ratio: f64, is_merit: bool| {
        let verdict = match ratio {
            near if (near - 1.0).abs() <= BAND => Verdict::Reproduced,
            above if above > 1.0 && is_merit => Verdict::Better,
            _ => Verdict::Worse,
        };
        (Some(ratio), verdict)
    };
    match good {
        Good::High(paper) => by(value / paper, true),
        Good::Low(paper) => by(paper / value, true),
        Good::Near(paper) => by(value / paper, false),
        Good::Within(least, _) if value < least => (Some(value / least), Verdict::Worse),
        Good::Within(_, most) if value > most => (Some(value / most), Verdict::Better),
        Good::Within(..) => (None, Verdict::Reproduced),
        Good::Said(_) => (None, Verdict::NotComparable),
    }
}

/// How many rows have which verdict.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Tally {
    pub(crate) reproduced: usize,
    pub(crate) better: usize,
    pub(crate) worse: usize,
    pub(crate) not_comparable: usize,
}

impl Tally {
    pub(crate) fn of(rows: &[Row]) -> Self {
        let count = |verdict| rows.iter().filter(|row| row.verdict == verdict).count();
        Self {
            reproduced: count(Verdict::Reproduced),
            better: count(Verdict::Better),
            worse: count(Verdict::Worse),
            not_comparable: count(Verdict::NotComparable),
        }
    }

    pub(crate) fn get(self, verdict: Verdict) -> usize {
        match verdict {
            Verdict::Reproduced => self.reproduced,
            Verdict::Better => self.better,
            Verdict::Worse => self.worse,
            Verdict::NotComparable => self.not_comparable,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verdict_follows_from_the_ratio_and_from_what_is_good() {
        let verdict = |value, good| judge(value, good).1;
        // What users were misled by: +350 % for the paper's +45 % was "met", +245 % for +249 % "missed".
        assert_eq!(verdict(4.5, Good::High(1.45)), Verdict::Better);
        assert_eq!(verdict(3.45, Good::High(3.49)), Verdict::Reproduced);
        assert_eq!(verdict(1.67, Good::High(3.49)), Verdict::Worse);
        assert_eq!(verdict(1.78, Good::Low(1.9)), Verdict::Reproduced);
        assert_eq!(verdict(0.5, Good::Low(1.9)), Verdict::Better);
        assert_eq!(verdict(2.6, Good::Low(1.9)), Verdict::Worse);
        assert_eq!(verdict(7.4, Good::Near(6.0)), Verdict::Reproduced);
        assert_eq!(verdict(9.0, Good::Near(6.0)), Verdict::Worse);
        assert_eq!(verdict(9.0, Good::Within(2.0, 8.0)), Verdict::Better);
        assert_eq!(verdict(5.0, Good::Within(2.0, 8.0)), Verdict::Reproduced);
        assert_eq!(verdict(1.9, Good::Within(2.0, 8.0)), Verdict::Worse);
        assert_eq!(verdict(1.0, Good::Said(true)), Verdict::NotComparable);
    }

    #[test]
    fn a_row_of_another_scale_is_not_judged() {
        let row =
            Row::judged("F1", ("Fig. 4", "x"), How::Simulated, ("+249 %", "+900 %"), 10.0, Good::High(3.49));
        assert_eq!(row.verdict, Verdict::Better);
        let row = row.not_judged("1/100 of the files");
        assert_eq!((row.verdict, &*row.note), (Verdict::NotComparable, "1/100 of the files"));
        let exact =
            |value| Row::exact("F5", ("§2.2", "bitmap"), ("2 MB", String::new()), (2 << 20, value)).verdict;
        assert_eq!(
            [exact(1 << 20), exact(2 << 20), exact(4 << 20)],
            [Verdict::Better, Verdict::Reproduced, Verdict::Worse]
        );
        assert_eq!(Tally::of(&[row]), Tally { not_comparable: 1, ..Tally::default() });
    }
}
