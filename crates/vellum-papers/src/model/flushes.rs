//! The queue for flushes: one is carried out at a time, and all requests that arrive meanwhile share the
//! next, as in the block layer of Linux.

/// The flushes of a drive.
#[derive(Debug, Default)]
pub(super) struct Flushes {
    running: Vec<u64>,
    waiting: Vec<u64>,
}

impl Flushes {
    /// A flush is requested.
    pub(super) fn ask(&mut self, ticket: u64) {
        self.waiting.push(ticket);
    }

    /// Whether one is carried out.
    pub(super) fn is_running(&self) -> bool {
        !self.running.is_empty()
    }

    /// Begins the next flush if none is running and at least one waits.
    pub(super) fn begin(&mut self) -> bool {
        if self.is_running() || self.waiting.is_empty() {
            return false;
        }
        self.running = std::mem::take(&mut self.waiting);
        true
    }

    /// Ends the running flush: all requests that shared it are answered.
    pub(super) fn end(&mut self, ended: &mut Vec<u64>) {
        ended.append(&mut self.running);
    }
}
