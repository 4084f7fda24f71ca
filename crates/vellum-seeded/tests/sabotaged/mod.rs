//! Subjects with a mistake switched on in the engine itself, which the explorer must find.

use vellum_core::{GuestOffset, LocalFuture, Result, SharedDisk, SharedStorage};
use vellum_format::sabotage::{Bug, put_in};
use vellum_sim::Content;
use vellum_sim::explore::{Depth, Explorer, Plan, Subject, Thoroughness};

/// A subject whose engine has a bug.
struct Sabotaged<S> {
    inner: S,
    bug: Bug,
}

impl<S: Subject> Subject for Sabotaged<S> {
    fn name(&self) -> String {
        format!("{} with {:?}", self.inner.name(), self.bug)
    }

    fn image(&self) -> Content {
        self.inner.image()
    }

    fn guest(&self) -> Content {
        self.inner.guest()
    }

    fn places(&self) -> Vec<GuestOffset> {
        self.inner.places()
    }

    /// The thread does nothing else from here on.
    fn open(&self, image: SharedStorage) -> LocalFuture<'_, Result<SharedDisk>> {
        put_in(Some(self.bug));
        self.inner.open(image)
    }

    fn verify(&self, image: SharedStorage) -> LocalFuture<'_, std::result::Result<(), String>> {
        self.inner.verify(image)
    }
}

/// One recovered image in `whole_one_in` is compared as a whole.
pub(crate) fn thoroughness(whole_one_in: u64) -> Thoroughness {
    Thoroughness {
        depth: Depth { sampled: 8, ..Depth::FULL },
        nested_one_in: 20,
        sample_one_in: u64::MAX,
        whole_one_in,
    }
}

/// Explores until the bug is found, and once more by the name of the state.
#[allow(clippy::print_stderr, reason = "how soon each is found is worth knowing")]
pub(crate) fn find(inner: impl Subject, bug: Bug, plans: &[Plan], thoroughness: Thoroughness) {
    let subject = Sabotaged { inner, bug };
    let explorer = Explorer::new(&subject, thoroughness);
    let report = explorer.explore_all(plans, 1);
    let failure = report.failures.first().unwrap_or_else(|| panic!("not found: {report}"));
    eprintln!("{bug:?}: found after {} states: {failure}", report.counts.judged);
    let (_, verdict) = explorer.replay(&failure.case.to_string().parse().unwrap());
    assert!(
        verdict.is_err() || failure.what.starts_with("nothing failed"),
        "{failure}: passes when it is judged again"
    );
}
