//! Requests to a running server.

use std::path::Path;
use std::time::Duration;

use futures_lite::future::or;
use vellum_core::{Buffer, ByteStream, Context, Error, ErrorKind, Result};
use vellum_io::{Address, clock, connect};

use super::lines::Lines;
use super::{ANSWER_BYTES_MAX, Answer, Request};

/// Asks the server with this control socket, and waits for its answer. Must be called on a worker.
///
/// # Errors
/// `NotFound` or `Closed` when no server listens there, and the server's own error.
pub async fn call(socket: &Path, request: &Request) -> Result<serde_json::Value> {
    let stream = connect(&Address::unix(socket)).await?.attach();
    let mut line = serde_json::to_vec(request).expect("strings");
    line.push(b'\n');
    // A server that ends meanwhile may have answered before.
    let sent = stream.write_all(Buffer::copy_of(&line)).await;
    let context = || format!("{}: the server did not answer", socket.display());
    let answer = Lines::new(ANSWER_BYTES_MAX).next(&stream).await.context(context)?;
    let Some(answer) = answer else {
        sent?;
        return Err(Error::new(ErrorKind::Closed, context()));
    };
    let answer: Answer = serde_json::from_slice(&answer).map_err(|error| {
        Error::invalid(format!("{}: this is not the answer of a Vellum server: {error}", socket.display()))
    })?;
    answer.into_result()
}

/// As [`call`], for no longer than this.
///
/// # Errors
/// Those of `call`; `Io` where the server has not answered by then. It may still do what it was asked.
pub async fn call_within(socket: &Path, request: &Request, time: Duration) -> Result<serde_json::Value> {
    let late = async {
        clock().sleep(time).await;
        let why = format!("{}: the server has not answered for {} s", socket.display(), time.as_secs());
        Err(Error::new(ErrorKind::Io, why))
    };
    or(call(socket, request), late).await
}

/// How often a command is tried again that is to wait its turn.
const TURN_EVERY: Duration = Duration::from_millis(20);

/// As [`call_within`], again for this time where other commands come first.
///
/// # Errors
/// Those of `call_within`; `Locked` where it did not get its turn.
pub async fn call_in_turn(
    socket: &Path,
    request: &Request,
    time: Duration,
    turn: Duration,
) -> Result<serde_json::Value> {
    let until = clock().now() + turn;
    loop {
        match call_within(socket, request, time).await {
            Err(error) if error.kind() == ErrorKind::Locked && clock().now() < until => {
                clock().sleep(TURN_EVERY).await;
            }
            answer => return answer,
        }
    }
}

/// How often a server is asked how far a job is.
const JOB_EVERY: Duration = Duration::from_millis(100);

/// Waits until the work on the chain of a disk has ended. `progress` gets the bytes of the disk and those that are done.
///
/// # Errors
/// Those of [`call`].
pub async fn watch_job(
    socket: &Path,
    disk: Option<&str>,
    progress: &dyn Fn(u64, u64),
) -> Result<serde_json::Value> {
    loop {
        let request =
            Request::Job { disk: disk.map(str::to_owned), action: None, bytes_per_second_max: None };
        let answer = call(socket, &request).await?;
        let number = |name: &str| answer[name].as_u64().unwrap_or_default();
        progress(number("bytes-total"), number("bytes-done"));
        if !matches!(answer["state"].as_str(), Some("running" | "paused" | "switching")) {
            return Ok(answer);
        }
        clock().sleep(JOB_EVERY).await;
    }
}
