//! `vellum export list --nbd`: what an NBD server tells its clients.

use serde_json::{Map, Value, json};
use vellum_core::Result;
use vellum_daemon::{
    Address, IoMode, ListedExport, NBD_FLAG_NAMES, TlsChoice, list_nbd_exports, run as run_worker,
};

use super::List;
use crate::args::OutputFormat;
use crate::output::{printable, say, say_json};

pub(super) fn list(args: &List, address: &Address) -> Result<()> {
    let choice = TlsChoice {
        directory: args.tls_certificates.clone(),
        hostname: args.tls_hostname.clone(),
        is_unverified: args.tls_unverified,
    };
    let tls = args.tls_certificates.is_some().then(|| choice.client(address)).transpose()?;
    let exports = run_worker(IoMode::Auto, async || list_nbd_exports(address, tls.as_ref()).await)??;
    match args.output {
        OutputFormat::Json => say_json(&exports.iter().map(json_of).collect::<Value>()),
        OutputFormat::Human => {
            say(&format!("exports available: {}", exports.len()));
            exports.iter().flat_map(lines_of).for_each(|line| say(&line));
        }
    }
    Ok(())
}

fn flags_of(flags: u16) -> impl Iterator<Item = &'static str> {
    NBD_FLAG_NAMES.iter().filter(move |(bit, _)| flags & bit != 0).map(|(_, name)| *name)
}

/// As `qemu-nbd --list` has them.
fn lines_of(export: &ListedExport) -> Vec<String> {
    let mut lines = vec![format!(" export: '{}'", printable(&export.name))];
    if !export.description.is_empty() {
        lines.push(format!("  description: {}", printable(&export.description)));
    }
    // The lowest bit says that there are flags.
    if let Some((size, flags)) = export.size_and_flags.filter(|(_, flags)| flags & 1 != 0) {
        let names: String = flags_of(flags).map(|name| format!(" {name}")).collect();
        lines.push(format!("  size:  {size}"));
        lines.push(format!("  flags: 0x{flags:x} ({names} )"));
    }
    if let Some([min, preferred, max]) = export.block_bytes {
        lines.extend(
            [("min", min), ("opt", preferred), ("max", max)]
                .map(|(what, bytes)| format!("  {what} block: {bytes}")),
        );
    }
    lines.push(format!("  transaction size: {}", if export.has_long_requests { "64-bit" } else { "32-bit" }));
    if !export.contexts.is_empty() {
        lines.push(format!("  available meta contexts: {}", export.contexts.len()));
        lines.extend(export.contexts.iter().map(|name| format!("   {}", printable(name))));
    }
    lines
}

fn json_of(export: &ListedExport) -> Value {
    let mut object = Map::new();
    let mut put = |key: &str, value: Value| drop(object.insert(key.to_owned(), value));
    put("name", json!(export.name));
    put("description", json!(export.description));
    if let Some((size, flags)) = export.size_and_flags {
        put("size", json!(size));
        put("flags", json!(flags));
        put("flag-names", flags_of(flags).collect());
    }
    if let Some([min, preferred, max]) = export.block_bytes {
        put("block-sizes", json!({ "min": min, "preferred": preferred, "max": max }));
    }
    put("request-bits", json!(if export.has_long_requests { 64 } else { 32 }));
    put("contexts", json!(export.contexts));
    Value::Object(object)
}
