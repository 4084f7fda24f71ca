//! The crash explorer against mistakes in filling: copies of the disk below that the image keeps.

extern crate vellum_seeded as vellum_format;

#[path = "../../vellum-format/tests/common/mod.rs"]
mod common;
mod sabotaged;
#[path = "../../vellum-format/tests/subjects/mod.rs"]
mod subjects;

use subjects::native::NativeSubject;
use subjects::{QcowSubject, kinds};
use vellum_format::sabotage::Bug;
use vellum_sim::explore::Subject;

fn find(inner: impl Subject, bug: Bug) {
    sabotaged::find(inner, bug, &kinds::copies(60), sabotaged::thoroughness(50));
}

macro_rules! found {
    ($($subject:ident::$kind:ident { $($name:ident: $bug:ident,)* })*) => {
        $($(
            #[test]
            fn $name() {
                find($subject::$kind(), Bug::$bug);
            }
        )*)*
    };
}

found! {
    NativeSubject::linear_over_a_base {
        filled_behind_zeros: FilledBehindZeros,
        zeros_not_filled: ZerosNotFilled,
        filled_before_durable: FilledBeforeDurable,
        filled_forgotten: FilledForgotten,
    }
    NativeSubject::table_over_a_base {
        copy_not_checked_in_a_table: CopyNotChecked,
        copy_over_newer: CopyOverNewer,
    }
    QcowSubject::journal_over_a_base {
        copy_not_checked: CopyNotChecked,
    }
}
