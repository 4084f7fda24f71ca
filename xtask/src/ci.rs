//! Stub.
use crate::Outcome;
pub(crate) fn run() -> Outcome {
    Ok(())
}
pub(crate) fn soak(_: &[String]) -> Outcome {
    Ok(())
}
