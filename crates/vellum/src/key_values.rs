//! Lists of `key=value`, as `-o` and `--secret` take them.

use vellum_core::Result;

/// The options of `-o`, as `key=value`; a comma in a value is written twice.
pub(crate) fn split_options(lists: &[String]) -> Result<Vec<(String, String)>> {
    let mut options = Vec::new();
    for list in lists {
        let list = list.replace(",,", "\0");
        for option in list.split(',').filter(|option| !option.is_empty()) {
            let option = option.replace('\0', ",");
            let (key, value) = option.split_once('=').unwrap_or((&option, "on"));
            options.push((key.to_owned(), value.to_owned()));
        }
    }
    Ok(options)
}
