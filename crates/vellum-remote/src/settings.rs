//! What a user says about stores: variables of the environment that other tools for S3 know, and the files
//! that these name.
//!
//! | variable | meaning |
//! |---|---|
//! | `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN` | credentials |
//! | `AWS_PROFILE`, `AWS_SHARED_CREDENTIALS_FILE`, `AWS_CONFIG_FILE` | a profile in files: credentials, a program that prints them (`credential_process`), region, endpoint |
//! | `AWS_ENDPOINT_URL_S3`, `AWS_ENDPOINT_URL`, `AWS_REGION`, `AWS_DEFAULT_REGION` | which store |
//! | `AWS_SKIP_SIGNATURE` | `true` for a public bucket |
//! | `VELLUM_STORE_TIMEOUT` | seconds that one request may take with all its retries, or a read may bring nothing |
//!
//! Other variables `AWS_…` that the crate `object_store` knows are passed on to it.
//!
//! 1. No secret is printed: `Debug` of everything here leaves the values out.
//! 2. Nothing here comes from an image or from the command line.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use vellum_core::{Error, Result};

/// How long one request may take with all its retries, or a read may bring nothing, unless the user says otherwise.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// The variable that changes it.
const DEADLINE_VARIABLE: &str = "VELLUM_STORE_TIMEOUT";

/// The settings for stores.
#[derive(Clone, Default)]
pub struct Settings {
    vars: BTreeMap<String, String>,
    /// Instead of what the variable says, and the option that says so, if one does.
    deadline: Option<(Duration, Option<&'static str>)>,
}

impl Settings {
    /// From variables, of which all but those for stores are dropped.
    pub fn from_vars(vars: impl IntoIterator<Item = (String, String)>) -> Self {
        let ours = |name: &str| name.starts_with("AWS_") || name == "HOME" || name == DEADLINE_VARIABLE;
        Self {
            vars: vars.into_iter().filter(|(name, value)| ours(name) && !value.is_empty()).collect(),
            deadline: None,
        }
    }

    /// Those of this process. Variables that are not text are ignored.
    pub fn from_env() -> Self {
        Self::from_vars(
            std::env::vars_os()
                .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?))),
        )
    }

    /// The same, with this deadline for one request, and the option that changes it.
    #[must_use]
    pub fn with_deadline(self, deadline: Duration, option: Option<&'static str>) -> Self {
        Self { deadline: Some((deadline, option)), ..self }
    }

    /// What changes the deadline, if anything does.
    pub(crate) fn deadline_option(&self) -> Option<&'static str> {
        self.deadline.map_or(Some(DEADLINE_VARIABLE), |(_, option)| option)
    }

    /// One variable.
    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        self.vars.get(name).map(String::as_str)
    }

    /// All variables `AWS_…`.
    pub(crate) fn of_stores(&self) -> impl Iterator<Item = (&str, &str)> {
        let all = self.vars.iter().filter(|(name, _)| name.starts_with("AWS_"));
        all.map(|(name, value)| (name.as_str(), value.as_str()))
    }

    /// How long one request may take with all its retries; how long a read may bring nothing.
    ///
    /// # Errors
    /// `Invalid` when the variable is not a number of seconds from 1 to 3600.
    pub fn deadline(&self) -> Result<Duration> {
        if let Some((deadline, _)) = self.deadline {
            return Ok(deadline);
        }
        let Some(text) = self.get(DEADLINE_VARIABLE) else { return Ok(DEADLINE) };
        match text.parse::<u64>() {
            Ok(seconds @ 1..=3600) => Ok(Duration::from_secs(seconds)),
            _ => {
                Err(Error::invalid(format!("{DEADLINE_VARIABLE} is {text:?}: give seconds, from 1 to 3600")))
            }
        }
    }

    /// A file that a variable names, else one in the home directory.
    pub(crate) fn file(&self, variable: &str, in_home: &str) -> Option<PathBuf> {
        let named = self.get(variable).map(PathBuf::from);
        named.or_else(|| Some(PathBuf::from(self.get("HOME")?).join(in_home)))
    }
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.vars.keys()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(vars: &[(&str, &str)]) -> Settings {
        Settings::from_vars(vars.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())))
    }

    #[test]
    fn only_variables_for_stores_are_kept_and_no_value_is_printed() {
        let settings = settings(&[("AWS_SECRET_ACCESS_KEY", "hush"), ("PATH", "/bin"), ("AWS_REGION", "")]);
        assert_eq!(settings.get("AWS_SECRET_ACCESS_KEY"), Some("hush"));
        assert_eq!(settings.get("PATH"), None);
        assert_eq!(settings.get("AWS_REGION"), None, "an empty variable is none");
        assert_eq!(format!("{settings:?}"), r#"{"AWS_SECRET_ACCESS_KEY"}"#);
    }

    #[test]
    fn the_deadline_is_a_number_of_seconds() {
        assert_eq!(settings(&[]).deadline().expect("a default"), DEADLINE);
        assert_eq!(
            settings(&[(DEADLINE_VARIABLE, "7")]).deadline().expect("a number"),
            Duration::from_secs(7)
        );
        for text in ["0", "x", "-1", "3601", "99999999999999999999"] {
            assert!(settings(&[(DEADLINE_VARIABLE, text)]).deadline().is_err(), "{text}");
        }
    }
}
