//! Figures of papers, reproduced on modelled drives in virtual time.
//!
//! ```text
//!   postmark ─┐                 ┌─ the engine itself (vellum-format)       ┐
//!   a trace ──┴─ requests ─▶ player ─ the order of operations of old drivers ├─▶ modelled drive ─▶ time, what reached the medium
//! ```
//!
//! Our side is the engine that serves disks, unchanged. The other side is our own model of a program that can
//! no longer be run; a win over it is a win over that model. So each figure is printed with the paper's
//! beside it, a miss as a miss, and under the name of the drive's model.

pub(crate) mod fvd;
mod old_qcow2;
mod player;
mod postmark;
mod recent;
pub(crate) mod selfie;
mod then;
