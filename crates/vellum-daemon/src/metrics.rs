//! The counters, for Prometheus: `GET /metrics`, in the OpenMetrics text format.
//!
//! ```text
//!   GET /metrics ──► head of the request, 8 KiB and 10 s at most ──► the counters as they are now ──► 200, and the end
//! ```
//!
//! 1. The interface is read-only, and only the first line of a client's request is used.
//! 2. A few clients are served at once; others wait in the socket's queue. Each has a time limit, so none
//!    keeps the others for long.
//! 3. Names and labels are stable: a figure whose meaning changes gets another name.

use std::fmt;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use futures_lite::future::or;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::exemplar::Exemplar;
use prometheus_client::registry::Registry;
use vellum_core::{Buffer, ByteStream, ErrorKind, Result};
use vellum_export::ConnectionSlots;
use vellum_export::nbd::Exports;
use vellum_format::fast::Reason;
use vellum_io::{Listener, Stream, clock, spawn_local};

use crate::contained::{contained, in_rounds};
use crate::flash::{FlashOperations, TableReads};
use crate::served::Disks;
use crate::stats::{DiskStats, HostOperations, Operations, Stats};

/// Clients at once.
const CLIENTS_MAX: usize = 4;
/// The longest head of a request.
const HEAD_BYTES_MAX: usize = 8 << 10;
/// How long a client has for asking, and for taking the answer.
const CLIENT_TIME: Duration = Duration::from_secs(10);
/// The format that Prometheus prefers.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// Every state that a disk can have.
const STATES: [&str; 7] = ["running", "pausing", "paused", "no space", "poisoned", "hung", "closed"];

/// Where Prometheus comes in.
#[derive(Clone)]
pub(crate) struct Metrics {
    pub(crate) disks: Arc<Disks>,
    pub(crate) exports: Exports,
}

impl Metrics {
    /// Lets clients in until it is dropped.
    pub(crate) async fn accept(self, listener: Listener) {
        let slots = ConnectionSlots::new(CLIENTS_MAX);
        in_rounds("the metrics listener", async || {
            let slot = slots.take().await;
            match listener.accept().await {
                Ok(socket) => {
                    let metrics = self.clone();
                    let answering = async move {
                        let stream = socket.attach();
                        let late = async {
                            clock().sleep(CLIENT_TIME).await;
                            Ok(())
                        };
                        if let Err(error) = or(metrics.answer(&stream), late).await {
                            tracing::debug!("metrics: {}", error.chain());
                        }
                        stream.shutdown();
                        drop(slot);
                        Ok(())
                    };
                    let answered = contained("a metrics request", answering);
                    spawn_local(async { drop(answered.await) }).detach();
                }
                Err(error) if error.kind() == ErrorKind::NoSpace => tracing::warn!("{}", error.chain()),
                Err(error) => {
                    tracing::error!("the metrics endpoint has stopped working: {}", error.chain());
                    return ControlFlow::Break(());
                }
            }
            ControlFlow::Continue(())
        })
        .await;
    }

    async fn answer(&self, stream: &Stream) -> Result<()> {
        let mut head = Vec::new();
        while !head.windows(4).any(|end| end == b"\r\n\r\n") {
            let (buffer, count) = stream.read(Buffer::for_overwrite(1024)).await?;
            if count == 0 || head.len() + count > HEAD_BYTES_MAX {
                break;
            }
            head.extend_from_slice(&buffer.slice()[..count]);
        }
        let answer = match asked_for(&head) {
            Asked::Metrics => reply("200 OK", OPEN_METRICS, &text(self.disks.stats(&self.exports))),
            Asked::Elsewhere => reply("404 Not Found", "text/plain", "the metrics are at /metrics\n"),
            Asked::Otherwise => reply("405 Method Not Allowed", "text/plain", "only GET is supported\n"),
            Asked::Nonsense => reply("400 Bad Request", "text/plain", "this is not an HTTP request\n"),
        };
        stream.write_all(Buffer::copy_of(answer.as_bytes())).await
    }
}

/// What a client wants.
#[derive(Debug, PartialEq, Eq)]
enum Asked {
    Metrics,
    Elsewhere,
    Otherwise,
    Nonsense,
}

fn asked_for(head: &[u8]) -> Asked {
    let line = head.split(|byte| *byte == b'\r').next().unwrap_or_default();
    let words: Vec<&str> = std::str::from_utf8(line).unwrap_or_default().split(' ').collect();
    match words[..] {
        ["GET", path, version] if version.starts_with("HTTP/1.") => match path.split('?').next() {
            Some("/metrics" | "/") => Asked::Metrics,
            _ => Asked::Elsewhere,
        },
        [_, _, version] if version.starts_with("HTTP/") => Asked::Otherwise,
        _ => Asked::Nonsense,
    }
}

fn reply(status: &str, kind: &str, body: &str) -> String {
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    )
}

/// All of it, as text.
fn text(stats: Stats) -> String {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Counted(stats)));
    let mut text = String::new();
    encode(&mut text, &registry).expect("text takes all of it");
    text
}

#[derive(Debug)]
struct Counted(Stats);

/// No request is pointed out.
const NO_EXEMPLAR: Option<&Exemplar<[(&str, &str); 0], f64>> = None;

/// The label that identifies a disk: the first of its exports. Where that is empty the image identifies it.
fn name_of(disk: &DiskStats) -> String {
    disk.exports.first().cloned().unwrap_or_default()
}

#[expect(clippy::cast_precision_loss, reason = "seconds, as fine as anybody needs them")]
fn seconds(micros: u64) -> f64 {
    micros as f64 / 1e6
}

impl Counted {
    /// A number for each disk, or several with one more label.
    fn each<T, L: AsRef<str>>(
        &self,
        mut metric: MetricEncoder<'_>,
        label: &str,
        of: impl Fn(&DiskStats) -> Vec<(L, T)>,
        put: impl Fn(&mut MetricEncoder<'_>, T) -> fmt::Result,
    ) -> fmt::Result {
        for disk in &self.0.disks {
            let export = name_of(disk);
            for (value, number) in of(disk) {
                let mut labels = vec![("export", export.as_str()), ("image", disk.image.as_str())];
                if !label.is_empty() {
                    labels.push((label, value.as_ref()));
                }
                put(&mut metric.encode_family(&labels.as_slice())?, number)?;
            }
        }
        Ok(())
    }

    fn counters<L: AsRef<str>>(
        &self,
        encoder: &mut DescriptorEncoder<'_>,
        (name, help, label): (&str, &str, &str),
        of: impl Fn(&DiskStats) -> Vec<(L, u64)>,
    ) -> fmt::Result {
        let metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        self.each(metric, label, of, |metric, number| metric.encode_counter(&number, NO_EXEMPLAR))
    }

    fn gauges<L: AsRef<str>>(
        &self,
        encoder: &mut DescriptorEncoder<'_>,
        (name, help, label): (&str, &str, &str),
        of: impl Fn(&DiskStats) -> Vec<(L, u64)>,
    ) -> fmt::Result {
        let metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        self.each(metric, label, of, |metric, number| {
            metric.encode_gauge(&i64::try_from(number).unwrap_or(i64::MAX))
        })
    }
}

impl Counted {
    /// What disks have on their fast media.
    fn encode_tier(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let number = |disk: &DiskStats, field: &str| {
            disk.tier.as_ref().map(|tier| tier[field].as_u64().unwrap_or_default())
        };
        let of = |fields: [(&'static str, &'static str); 2]| {
            move |disk: &DiskStats| -> Vec<(&'static str, u64)> {
                let found = fields.iter().filter_map(|(label, field)| Some((*label, number(disk, field)?)));
                found.collect()
            }
        };
        let help = "Reads of disks with a fast medium, by the medium that answered";
        self.counters(
            to,
            ("vellum_tier_reads", help, "medium"),
            of([("fast", "fast-reads"), ("slow", "slow-reads")]),
        )?;
        let bytes = of([("fast", "fast-read-bytes"), ("slow", "slow-read-bytes")]);
        self.counters(to, ("vellum_tier_read_bytes", "Bytes of these reads", "medium"), bytes)?;
        let used =
            |disk: &DiskStats| number(disk, "used-bytes").map(|bytes| ("", bytes)).into_iter().collect();
        self.gauges(to, ("vellum_tier_bytes", "Bytes that a disk has on its fast medium", ""), used)?;
        let promoted = |disk: &DiskStats| -> Vec<(&'static str, u64)> {
            let Some(tier) = &disk.tier else { return Vec::new() };
            let by = &tier["promoted-by-reason"];
            Reason::ALL.iter().map(|one| (one.word(), by[one.word()].as_u64().unwrap_or_default())).collect()
        };
        self.counters(to, ("vellum_tier_promoted", "Units that were promoted", "why"), promoted)
    }

    /// What the flash cache does, where there is one.
    fn encode_flash(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let Some(cache) = &self.0.flash else { return Ok(()) };
        for (name, help, number) in [
            ("vellum_flash_failed", "1 if the flash cache has failed", u64::from(cache.state == "failed")),
            ("vellum_flash_capacity_bytes", "What the flash cache can hold", cache.capacity_bytes),
            ("vellum_flash_cached_bytes", "What the flash cache holds", cache.cached_bytes),
            ("vellum_flash_dirty_bytes", "What only the flash cache has", cache.dirty_bytes),
            ("vellum_flash_memory_bytes", "Memory for the map of the flash cache", cache.memory_bytes),
            ("vellum_flash_budget_bytes", "The most memory of the flash cache", cache.budget_bytes),
            ("vellum_flash_budget_used_bytes", "What counts against it", cache.budget_used_bytes),
        ] {
            to.encode_descriptor(name, help, None, MetricType::Gauge)?
                .encode_gauge(&i64::try_from(number).unwrap_or(i64::MAX))?;
        }
        let help = "Bytes that the flash cache wrote to flash for itself";
        let mut written = to.encode_descriptor("vellum_flash_own_bytes", help, None, MetricType::Counter)?;
        for (what, number) in [("record", cache.record_bytes), ("slice", cache.slice_bytes)] {
            written.encode_family(&[("for", what)])?.encode_counter(&number, NO_EXEMPLAR)?;
        }
        to.encode_descriptor("vellum_flash_flushes", "Flushes of the flash", None, MetricType::Counter)?
            .encode_counter(&cache.flushes, NO_EXEMPLAR)?;
        let help = "Bytes that became free and were discarded";
        to.encode_descriptor("vellum_flash_discard_bytes", help, None, MetricType::Counter)?
            .encode_counter(&cache.discard_bytes, NO_EXEMPLAR)?;
        // For the disk itself and for the images below it, which it may share with others.
        let both = |disk: &DiskStats, of: fn(&FlashOperations) -> Vec<(&'static str, u64)>| {
            let flash = disk.flash.iter();
            flash.flat_map(move |flash| of(&flash.disk)).collect::<Vec<_>>()
        };
        let blocks = |of: &FlashOperations| {
            vec![
                ("hit", of.hits),
                ("miss", of.misses),
                ("write", of.writes),
                ("admit", of.admitted),
                ("pass", of.passed),
                ("refuse", of.refused),
                ("demote", of.demoted),
                ("home", of.written_home),
            ]
        };
        let help = "Blocks of the disk: read from flash, read from the image, written to flash, kept when read, written and not \
                    kept, read and not kept, given up early, and written home";
        self.counters(to, ("vellum_flash_blocks", help, "what"), |disk| both(disk, blocks))?;
        let below = |disk: &DiskStats| disk.flash.iter().flat_map(|flash| blocks(&flash.below)).collect();
        let help = "The same for the images below it; disks that share those images share these";
        self.counters(to, ("vellum_flash_below_blocks", help, "what"), below)?;
        let bytes = |of: &FlashOperations| vec![("write", of.write_bytes), ("admit", of.admit_bytes)];
        let help = "Bytes written to flash for the disk, for writes and to keep what was read";
        self.counters(to, ("vellum_flash_bytes", help, "for"), |disk| both(disk, bytes))?;
        let reads = |of: &TableReads| {
            vec![
                ("memory", of.memory_hits),
                ("zero", of.zeros),
                ("flash", of.flash_hits),
                ("image", of.misses),
            ]
        };
        let tables = |disk: &DiskStats| disk.flash.iter().flat_map(|flash| reads(&flash.tables)).collect();
        let help = "Where tables of the image were found: lookups in memory, reads that were known to be zero, from flash, and from \
                    the image";
        self.counters(to, ("vellum_flash_tables", help, "where"), tables)?;
        let below =
            |disk: &DiskStats| disk.flash.iter().flat_map(|flash| reads(&flash.below_tables)).collect();
        let help = "The same for the images below it; disks that share those images share these";
        self.counters(to, ("vellum_flash_below_tables", help, "where"), below)?;
        let bytes =
            |disk: &DiskStats| disk.flash.iter().map(|flash| ("", flash.tables.flash_write_bytes)).collect();
        let help = "Bytes written to flash to keep tables of the image";
        self.counters(to, ("vellum_flash_table_bytes", help, ""), bytes)?;
        let dirty = |disk: &DiskStats| disk.flash.iter().map(|flash| ("", flash.dirty_bytes)).collect();
        self.gauges(
            to,
            ("vellum_flash_disk_dirty_bytes", "What only the flash cache has of the disk", ""),
            dirty,
        )
    }
}

fn requests(of: &Operations) -> Vec<(&'static str, u64)> {
    vec![
        ("read", of.reads),
        ("write", of.writes),
        ("flush", of.flushes),
        ("write-zeroes", of.zeroes),
        ("discard", of.discards),
    ]
}

fn bytes(of: &Operations) -> Vec<(&'static str, u64)> {
    vec![
        ("read", of.bytes_read),
        ("write", of.bytes_written),
        ("write-zeroes", of.bytes_zeroed),
        ("discard", of.bytes_discarded),
    ]
}

/// All requests to the host, for any purpose.
fn host(of: &HostOperations, list: fn(&Operations) -> Vec<(&'static str, u64)>) -> Vec<(&'static str, u64)> {
    let mut sum = list(&of.data);
    for part in [&of.metadata, &of.checkpoint, &of.prealloc] {
        for (total, (_, more)) in sum.iter_mut().zip(list(part)) {
            total.1 += more;
        }
    }
    sum
}

fn one(number: u64) -> Vec<(&'static str, u64)> {
    vec![("", number)]
}

impl Collector for Counted {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let to = &mut encoder;
        to.encode_descriptor("vellum_uptime_seconds", "Uptime of the server", None, MetricType::Gauge)?
            .encode_gauge(&self.0.uptime_seconds)?;
        self.gauges(to, ("vellum_disk_size_bytes", "Size of the disk", ""), |disk| one(disk.virtual_size))?;
        let state = |disk: &DiskStats| STATES.map(|state| (state, u64::from(disk.state == state))).to_vec();
        self.gauges(to, ("vellum_disk_state", "1 for the current state of the disk", "state"), state)?;
        self.gauges(to, ("vellum_connections", "Connections now", ""), |disk| one(disk.connections as u64))?;
        self.gauges(
            to,
            ("vellum_requests_waiting", "Requests that wait for a limit, a pause or space", ""),
            |disk| one((disk.held + disk.limited) as u64),
        )?;
        self.gauges(to, ("vellum_requests_under_way", "Requests in flight to the image", ""), |disk| {
            one(disk.under_way.count as u64)
        })?;
        self.gauges(
            to,
            ("vellum_request_oldest_seconds", "Age of the oldest request in flight, once it is 10 s", ""),
            |disk| one(disk.under_way.long.first().map_or(0, |request| request.seconds)),
        )?;
        self.counters(to, ("vellum_guest_requests", "Guest requests", "request"), |disk| {
            requests(&disk.guest)
        })?;
        self.counters(to, ("vellum_guest_bytes", "Bytes of these requests", "request"), |disk| {
            bytes(&disk.guest)
        })?;
        self.counters(
            to,
            ("vellum_guest_errors", "Requests that failed", ""),
            |disk| one(disk.guest_errors),
        )?;
        self.counters(to, ("vellum_failures", "Requests that failed in the image", "kind"), |disk| {
            disk.failures.iter().map(|(kind, count)| (kind.clone(), *count)).collect()
        })?;
        self.gauges(
            to,
            ("vellum_last_error_timestamp_seconds", "Time of the last failed request", ""),
            |disk| disk.last_error.iter().map(|error| ("", error.date_sec)).collect(),
        )?;
        self.counters(to, ("vellum_host_requests", "Host operations of the image", "request"), |disk| {
            host(&disk.host, requests)
        })?;
        self.counters(to, ("vellum_host_bytes", "Bytes of these requests", "request"), |disk| {
            host(&disk.host, bytes)
        })?;
        let copied = |disk: &DiskStats| {
            disk.hydration
                .iter()
                .flat_map(|hydration| {
                    vec![
                        ("read", hydration.bytes_filled),
                        ("prefetch", hydration.bytes_prefetched),
                        ("dropped", hydration.bytes_dropped),
                    ]
                })
                .collect()
        };
        let help = "Bytes of the backing images: copied because they were read, copied ahead of need, and not copied";
        self.counters(to, ("vellum_hydration_bytes", help, "why"), copied)?;
        let missing = |disk: &DiskStats| {
            let missing = disk.hydration.as_ref().and_then(|hydration| hydration.bytes_missing);
            missing.map(|bytes| ("", bytes)).into_iter().collect()
        };
        let help = "Bytes that only the backing images have, as far as is known";
        self.gauges(to, ("vellum_hydration_missing_bytes", help, ""), missing)?;
        let events = |disk: &DiskStats| {
            disk.hydration
                .iter()
                .flat_map(|hydration| {
                    vec![
                        ("commit", hydration.commits),
                        ("pause", hydration.pauses),
                        ("error", hydration.errors),
                    ]
                })
                .collect()
        };
        let help =
            "Flushes of its own, pauses because of contention, and errors of copying from the backing images";
        self.counters(to, ("vellum_hydration_events", help, "event"), events)?;
        self.encode_flash(to)?;
        self.encode_tier(to)?;
        let metric = to.encode_descriptor(
            "vellum_request_duration_seconds",
            "Latency of requests, from admission to the answer",
            None,
            MetricType::Histogram,
        )?;
        let times = |disk: &DiskStats| {
            disk.latency.iter().map(|(kind, latency)| (kind.clone(), latency.clone())).collect()
        };
        self.each(metric, "request", times, |metric, latency| {
            let mut before = 0;
            let mut buckets: Vec<(f64, u64)> = latency
                .below_us
                .iter()
                .map(|(bound, below)| {
                    let count = below.saturating_sub(before);
                    before = *below;
                    (seconds(*bound), count)
                })
                .collect();
            buckets.push((f64::INFINITY, latency.count.saturating_sub(before)));
            metric.encode_histogram::<[(&str, &str); 0]>(
                seconds(latency.sum_us),
                latency.count,
                &buckets,
                None,
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::flash::{CacheStats, FlashStats};
    use crate::stats::{HydrationStats, LastError, Latency};

    fn disk() -> DiskStats {
        DiskStats {
            exports: vec!["web \"1\"".to_owned(), "other".to_owned()],
            image: "/images/web.vlm".to_owned(),
            virtual_size: 1 << 30,
            state: "no space".to_owned(),
            hydration: Some(HydrationStats {
                state: "running".to_owned(),
                bytes_missing: Some(1 << 20),
                bytes_filled: 8192,
                commits: 2,
                ..HydrationStats::default()
            }),
            flash: Some(FlashStats {
                policy: "writeback".to_owned(),
                dirty_bytes: 8192,
                last_error: None,
                disk: FlashOperations { hits: 9, ..FlashOperations::default() },
                below: FlashOperations { admitted: 3, ..FlashOperations::default() },
                tables: TableReads { flash_hits: 11, flash_write_bytes: 65_536, ..TableReads::default() },
                below_tables: TableReads { misses: 12, ..TableReads::default() },
            }),
            tier: Some(serde_json::json!({
                "fast-reads": 21, "fast-read-bytes": 4096, "slow-reads": 22, "slow-read-bytes": 8192, "failed-reads": 0,
                "units": 23, "unit-size": 65536, "used-bytes": 65536, "demoted": 1,
                "promoted-by-reason": {"asked": 1, "rule": 2, "times": 3, "heat": 24},
            })),
            job: None,
            paused_seconds: None,
            held: 2,
            limits: BTreeMap::new(),
            limited: 1,
            connections: 3,
            guest: Operations { reads: 7, bytes_read: 4096, ..Operations::default() },
            guest_errors: 5,
            failures: BTreeMap::from([("no-space".to_owned(), 4)]),
            last_error: Some(LastError {
                request: "a write".to_owned(),
                kind: "no-space".to_owned(),
                message: "full".to_owned(),
                date_sec: 1_800_000_000,
            }),
            under_way: crate::stats::UnderWay::default(),
            latency: BTreeMap::from([(
                "read".to_owned(),
                Latency {
                    count: 7,
                    sum_us: 7_000_000,
                    below_us: vec![(16, 2), (64, 5)],
                    ..Latency::default()
                },
            )]),
            host: HostOperations::default(),
            below: HostOperations::default(),
        }
    }

    fn cache() -> CacheStats {
        CacheStats {
            path: "/flash/cache".to_owned(),
            id: "1".repeat(32),
            state: "running".to_owned(),
            last_error: None,
            capacity_bytes: 1 << 20,
            cached_bytes: 65_536,
            dirty_bytes: 8192,
            zero_runs: 0,
            written_regions: 0,
            memory_bytes: 1000,
            budget_bytes: 4000,
            budget_used_bytes: 2000,
            records: 1,
            record_bytes: 4096,
            slices: 0,
            slice_bytes: 0,
            flushes: 1,
            discard_bytes: 0,
        }
    }

    #[test]
    fn all_of_a_disk_is_told() {
        let stats = Stats {
            uptime_seconds: 1.5,
            io: "uring".to_owned(),
            disks: vec![disk()],
            flash: Some(cache()),
            remote: Vec::new(),
        };
        let text = text(stats);
        let disk = r#"export="web \"1\"",image="/images/web.vlm""#;
        for line in [
            "vellum_uptime_seconds 1.5".to_owned(),
            format!("vellum_disk_size_bytes{{{disk}}} 1073741824"),
            format!(r#"vellum_disk_state{{{disk},state="no space"}} 1"#),
            format!(r#"vellum_disk_state{{{disk},state="running"}} 0"#),
            format!("vellum_requests_waiting{{{disk}}} 3"),
            format!(r#"vellum_guest_requests_total{{{disk},request="read"}} 7"#),
            format!(r#"vellum_failures_total{{{disk},kind="no-space"}} 4"#),
            format!(r#"vellum_hydration_bytes_total{{{disk},why="read"}} 8192"#),
            format!(r#"vellum_tier_reads_total{{{disk},medium="slow"}} 22"#),
            format!(r#"vellum_tier_promoted_total{{{disk},why="heat"}} 24"#),
            format!("vellum_tier_bytes{{{disk}}} 65536"),
            format!(r#"vellum_hydration_events_total{{{disk},event="commit"}} 2"#),
            format!("vellum_hydration_missing_bytes{{{disk}}} 1048576"),
            format!("vellum_last_error_timestamp_seconds{{{disk}}} 1800000000"),
            "vellum_flash_failed 0".to_owned(),
            "vellum_flash_cached_bytes 65536".to_owned(),
            r#"vellum_flash_own_bytes_total{for="record"} 4096"#.to_owned(),
            format!(r#"vellum_flash_blocks_total{{{disk},what="hit"}} 9"#),
            format!(r#"vellum_flash_below_blocks_total{{{disk},what="admit"}} 3"#),
            format!("vellum_flash_disk_dirty_bytes{{{disk}}} 8192"),
            format!(r#"vellum_request_duration_seconds_count{{{disk},request="read"}} 7"#),
            format!(r#"vellum_request_duration_seconds_bucket{{le="0.000064",{disk},request="read"}} 5"#),
            format!(r#"vellum_request_duration_seconds_bucket{{le="+Inf",{disk},request="read"}} 7"#),
            "# TYPE vellum_request_duration_seconds histogram".to_owned(),
            "# EOF".to_owned(),
        ] {
            assert!(text.lines().any(|one| one == line), "{line} is not in\n{text}");
        }
    }

    #[test]
    fn only_metrics_are_given_out() {
        for (head, asked) in [
            ("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", Asked::Metrics),
            ("GET /metrics?x=1 HTTP/1.0\r\n\r\n", Asked::Metrics),
            ("GET /etc/passwd HTTP/1.1\r\n\r\n", Asked::Elsewhere),
            ("POST /metrics HTTP/1.1\r\n\r\n", Asked::Otherwise),
            ("", Asked::Nonsense),
            ("\u{1}\r\n\r\n", Asked::Nonsense),
        ] {
            assert_eq!(asked_for(head.as_bytes()), asked, "{head:?}");
        }
    }
}
