//! Stub.
use crate::Outcome;
pub(crate) fn run(_: &[String]) -> Outcome {
    Ok(())
}
