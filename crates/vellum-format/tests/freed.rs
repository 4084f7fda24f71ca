//! A cluster that is freed, on an image without a journal: one thread is stopped in the middle of the change
//! that frees it, while everything else continues.
//!
//! What must hold (`docs/design/0002-ordered-commit.md`): a commit takes up a freed cluster only together
//! with the page that no longer refers to it. Otherwise the cluster is punched, and allocated again, while a
//! table on the medium still refers to it.
//!
//! Where the engine is correct, the commit waits for the stopped thread, which therefore continues by itself
//! after a moment; only that moment depends on a clock. With the seeded mistake each of these fails
//! (`crates/vellum-seeded/tests/found.rs`).

mod common;
#[path = "freed/trials.rs"]
mod trials;

use trials::{compressed_data, foreign_bytes, late_write, yielding_threads};

#[test]
fn a_block_that_is_being_freed_never_reads_as_another() {
    for version in [2, 3] {
        foreign_bytes(version).unwrap();
    }
}

#[test]
fn compressed_data_stays_until_the_medium_names_its_copy() {
    compressed_data().unwrap();
}

#[test]
fn a_late_write_never_lands_in_a_cluster_that_was_given_away() {
    late_write().unwrap();
}

#[test]
fn no_thread_has_a_cluster_punched_that_is_still_named() {
    for version in [2, 3] {
        for seed in 0..4 * common::scale() {
            yielding_threads(version, seed, || ()).unwrap_or_else(|what| panic!("seed {seed}: {what}"));
        }
    }
}
