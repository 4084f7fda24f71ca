//! The table: a line for each program at a case, with all of its figures, and their ratios to QEMU's.

use super::cases::Case;
use crate::load::Sample;
use crate::load::pattern::Pattern;
use crate::report::{Series, median, short, spread_percent};

/// The programs that the others are compared with.
const PEERS: [&str; 2] = ["qsd", "qemu-nbd"];

/// The heading of a group.
pub(super) fn heading(group: &str) -> String {
    row(&[group, "", "kIOPS", "p50 µs", "p99 µs", "CPU µs/op", "beside QEMU: rate", "CPU"])
}

/// Widths of the columns.
const WIDTHS: [usize; 8] = [24, 14, 14, 8, 8, 10, 18, 6];

fn row(cells: &[&str; 8]) -> String {
    let mut line = String::new();
    for (cell, width) in cells.iter().zip(WIDTHS) {
        line += &format!("{cell:<width$} ");
    }
    line.trim_end().to_owned()
}

/// The lines of a case.
pub(super) fn lines(case: &Case, series: &[Series]) -> Vec<String> {
    let peer = series.iter().find(|series| PEERS.contains(&series.server.as_str()));
    let rate = |sample: &Sample| match case.load.pattern {
        Pattern::Sequential => sample.megabytes_per_second(),
        _ => sample.per_second() / 1000.0,
    };
    let mut lines = Vec::new();
    for (index, each) in series.iter().enumerate() {
        let title = if index == 0 { format!("  {}", case.load.id()) } else { String::new() };
        let unit = if case.load.pattern == Pattern::Sequential { " MB/s" } else { "" };
        let spread = spread_percent(each.samples.iter().map(rate));
        let main = format!("{}{unit} ±{spread:.0}%", short(each.median_of(rate)));
        let latency = |figure: fn(&Sample) -> f64| short(each.median_of(figure));
        let (p50, p99) =
            (latency(|sample| sample.latency_us_median), latency(|sample| sample.latency_us_p99));
        let cpu = short(each.median_of(Sample::server_cpu_us));
        let beside = peer.filter(|peer| peer.server != each.server).map(|peer| {
            let rates = each.ratios_to(peer, rate);
            let costs = each.ratios_to(peer, Sample::server_cpu_us);
            let spread = spread_percent(rates.iter().copied());
            (format!("{:.2}x ±{spread:.0}%", median(rates)), format!("{:.2}x", median(costs)))
        });
        let (rates, costs) = beside.unwrap_or_default();
        lines.push(row(&[&title, &each.server, &main, &p50, &p99, &cpu, &rates, &costs]));
    }
    lines
}

/// What a second queue brings, where both cases were measured.
pub(super) fn second_queues(outcomes: &[(Case, Vec<Series>)]) -> Vec<String> {
    let mut lines = Vec::new();
    for (one, series) in outcomes.iter().filter(|(case, _)| case.load.queues == 1) {
        let mut wanted = *one;
        wanted.load.queues = 2;
        let Some((_, two)) = outcomes.iter().find(|(case, _)| *case == wanted) else {
            continue;
        };
        let ratios: Vec<String> = series
            .iter()
            .zip(two)
            .map(|(one, two)| {
                format!("{} {:.2}x", one.server, median(two.ratios_to(one, Sample::per_second)))
            })
            .collect();
        let id = one.id();
        let name = id.trim_end_matches("-q1");
        lines.push(format!("  {name:<36} {}", ratios.join(", ")));
    }
    if !lines.is_empty() {
        lines.insert(0, "two queues, as a multiple of the rate of one:".to_owned());
    }
    lines
}

#[cfg(test)]
mod tests {
    use vellum_lab::server::Cache;

    use super::super::cases::Disk;
    use super::super::way::Way;
    use super::*;
    use crate::images::Image;
    use crate::load::pattern::Load;

    fn series(server: &str, operations: u64) -> Series {
        let sample = Sample {
            operations,
            bytes: operations * 4096,
            seconds: 1.0,
            server_cpu_seconds: 0.5,
            client_cpu_seconds: 0.0,
            others_cpu_seconds: 0.0,
            latency_us_median: 50.0,
            latency_us_p99: 200.0,
        };
        Series { samples: vec![sample], ..Series::of(server.into()) }
    }

    fn case(queues: u16) -> Case {
        let load = Load { pattern: Pattern::Read, depth: 32, queues };
        Case { way: Way::Vhost, cache: Cache::Buffered, disk: Disk::Mapped(Image::Qcow2), load }
    }

    #[test]
    fn each_program_beside_that_of_qemu() {
        let all = [series("vellum", 100_000), series("qsd", 40_000)];
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        let lines = lines(&case(1), &all);
        assert_eq!(words(&lines[0]), "read-d32-q1 vellum 100 ±0% 50.0 200 5.00 2.50x ±0% 0.40x");
        assert_eq!(words(&lines[1]), "qsd 40.0 ±0% 50.0 200 12.5");
    }

    #[test]
    fn a_second_queue() {
        let outcomes =
            [(case(1), vec![series("vellum", 100_000)]), (case(2), vec![series("vellum", 150_000)])];
        let lines = second_queues(&outcomes);
        assert_eq!(lines.len(), 2);
        assert!(lines[1].contains("vhost/buffered/qcow2/read-d32 ") && lines[1].ends_with("vellum 1.50x"));
        assert!(second_queues(&outcomes[..1]).is_empty());
    }
}
