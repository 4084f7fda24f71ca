//! Whether something would be lost if a file or a device were made into something else.

use vellum_core::{Buffer, ImageOffset, ImageSpan, Result, SharedStorage};

/// Data is looked through in pieces of this many bytes; of a device, so much of each end.
const LOOKED_AT: u64 = 1 << 20;

/// Whether a file has any data, or a device some at its ends. Space that is only reserved is none.
pub(crate) async fn holds_something(storage: &SharedStorage) -> Result<bool> {
    let all = ImageOffset::ZERO.span(storage.len());
    let ends = if storage.limits().fixed_len {
        let (first, rest) = all.split_at(LOOKED_AT);
        let (_, last) = rest.split_at(rest.len().saturating_sub(LOOKED_AT));
        vec![first, last]
    } else {
        let runs = storage.runs(all).await?;
        let known = runs.last().map_or(all.start(), |run| run.span.end());
        let data = runs.into_iter().filter(|run| run.is_data).map(|run| run.span);
        data.chain([ImageSpan::between(known, all.end())]).collect()
    };
    for mut rest in ends {
        while !rest.is_empty() {
            let now;
            (now, rest) = rest.split_at(LOOKED_AT);
            let len = usize::try_from(now.len()).expect("a mebibyte");
            if !storage.read(now.start(), Buffer::for_overwrite(len)).await?.is_zero() {
                return Ok(true);
            }
        }
    }
    Ok(false)
}
