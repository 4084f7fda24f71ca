//! Requests to the server over its control socket: a line there, a line back.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use vellum_core::{Context, Error, Result};
use vellum_lab::cost::stats::{self, Figures};

/// Deleting may take its time.
const PATIENCE: Duration = Duration::from_secs(120);

/// A connection to the control socket.
pub(super) struct Control {
    stream: BufReader<UnixStream>,
}

impl Control {
    pub(super) fn connect(socket: &Path) -> Result<Self> {
        let stream = UnixStream::connect(socket).context(|| "can't connect to the control socket")?;
        stream.set_read_timeout(Some(PATIENCE)).context(|| "can't set a timeout")?;
        Ok(Self { stream: BufReader::new(stream) })
    }

    fn ask(&mut self, request: &Value) -> Result<Value> {
        let context = || "can't ask the server";
        self.stream.get_mut().write_all(format!("{request}\n").as_bytes()).context(context)?;
        let mut line = String::new();
        self.stream.read_line(&mut line).context(context)?;
        let mut answer: Value = serde_json::from_str(&line)
            .map_err(|error| Error::corrupt(format!("an answer of another form: {error}")))?;
        match answer.pointer("/error/message") {
            None => Ok(answer["return"].take()),
            Some(message) => Err(Error::invalid(format!("{request}: {message}"))),
        }
    }

    fn timed(&mut self, command: &str, name: &str) -> Result<f64> {
        let begun = Instant::now();
        self.ask(&json!({ "command": command, "name": name }))?;
        Ok(begun.elapsed().as_secs_f64() * 1000.0)
    }

    /// Makes a snapshot; how many milliseconds it took until that was answered.
    pub(super) fn create(&mut self, name: &str) -> Result<f64> {
        self.timed("snapshot-create", name)
    }

    /// Deletes one; the same.
    pub(super) fn delete(&mut self, name: &str) -> Result<f64> {
        self.timed("snapshot-delete", name)
    }

    pub(super) fn stats(&mut self) -> Result<Figures> {
        stats::of(&self.ask(&json!({ "command": "stats" }))?.to_string())
    }
}
