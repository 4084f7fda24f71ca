//! Credentials that come from files and from programs, and are renewed before they expire.
//!
//! ```text
//!   ~/.aws/credentials  [profile]          aws_access_key_id, aws_secret_access_key, aws_session_token
//!   ~/.aws/config       [profile NAME]     the same, or credential_process = PROGRAM…
//! ```
//!
//! Credentials in the environment itself, those of a container and those of a virtual machine in a cloud are
//! the business of the crate `object_store`.
//!
//! 1. A secret is in memory only: no `Debug`, error or log has it. A program that prints credentials gets
//!    nothing on its command line but what the user wrote in the file.
//! 2. What was read is used until [`RENEW_BEFORE`] before it expires (but for at least half of its time), else for [`KEPT`]. A store that denies
//!    a request makes it be read again at once ([`Profile::forget`]).
//! 3. The output of a program is at most [`OUTPUT_BYTES_MAX`] long and takes at most [`PROGRAM_TIME_MAX`]. A program that is
//!    given up is ended with all that it has started and that stayed in its group of processes; so are those that run when
//!    this process ends ([`end_programs`]), also when it is killed (a shell that watches it).

use std::collections::HashSet;
use std::io::Read;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use object_store::CredentialProvider;
use object_store::aws::AwsCredential;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use serde::Deserialize;
use tokio::sync::Mutex;
use vellum_core::{Context, Error, ErrorKind, Result, lock};

use crate::settings::Settings;

/// How long before they expire credentials are renewed.
const RENEW_BEFORE: Duration = Duration::from_secs(120);

/// How long credentials without an expiry are used before the file is read again.
const KEPT: Duration = Duration::from_secs(60);

/// The longest output of a program that is read.
const OUTPUT_BYTES_MAX: u64 = 64 << 10;

/// The longest file that is read.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// How long a program may take.
const PROGRAM_TIME_MAX: Duration = Duration::from_secs(30);

/// A profile in the user's files, which is read when credentials are wanted.
#[derive(Debug)]
pub(crate) struct Profile {
    name: String,
    /// In order of precedence.
    files: Vec<PathBuf>,
    kept: Mutex<Option<Kept>>,
}

struct Kept {
    credential: Arc<AwsCredential>,
    until: Instant,
}

impl std::fmt::Debug for Kept {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("credentials")
    }
}

impl Profile {
    /// The profile that the settings name, if a file has it.
    ///
    /// # Errors
    /// `NotFound` when the user named a profile and no file has it; the errors of the files.
    pub(crate) fn find(settings: &Settings) -> Result<Option<Self>> {
        let named = settings.get("AWS_PROFILE");
        let files = [
            settings.file("AWS_SHARED_CREDENTIALS_FILE", ".aws/credentials"),
            settings.file("AWS_CONFIG_FILE", ".aws/config"),
        ];
        let profile = Self {
            name: named.unwrap_or("default").to_owned(),
            files: files.into_iter().flatten().collect(),
            kept: Mutex::new(None),
        };
        let found = profile.value("region")?.is_some()
            || profile.value("endpoint_url")?.is_some()
            || profile.source()?.is_some();
        match (found, named) {
            (true, _) => Ok(Some(profile)),
            (false, None) => Ok(None),
            (false, Some(name)) => {
                let files: Vec<String> =
                    profile.files.iter().map(|path| path.display().to_string()).collect();
                Err(Error::new(
                    ErrorKind::NotFound,
                    format!(
                        "AWS_PROFILE names the profile {name:?}, which is not in {}",
                        files.join(" or in ")
                    ),
                ))
            }
        }
    }

    /// A key of the profile: from the first file that has it.
    ///
    /// # Errors
    /// Those of reading a file that exists.
    pub(crate) fn value(&self, key: &str) -> Result<Option<String>> {
        for path in &self.files {
            if let Some(text) = read_file(path)?
                && let Some(value) = key_of(&text, &self.name, key)
            {
                return Ok(Some(value));
            }
        }
        Ok(None)
    }

    /// Whether it has credentials, and how to come by them.
    pub(crate) fn source(&self) -> Result<Option<Source>> {
        for path in &self.files {
            let Some(text) = read_file(path)? else { continue };
            let key = |name| key_of(&text, &self.name, name);
            if let (Some(key_id), Some(secret_key)) = (key("aws_access_key_id"), key("aws_secret_access_key"))
            {
                let token = key("aws_session_token");
                return Ok(Some(Source::Stated(AwsCredential { key_id, secret_key, token })));
            }
            if let Some(command) = key("credential_process") {
                return Ok(Some(Source::Program { command, file: path.clone() }));
            }
        }
        Ok(None)
    }

    /// What was read is not used again.
    pub(crate) async fn forget(&self) {
        *self.kept.lock().await = None;
    }

    async fn credential(self: &Arc<Self>) -> Result<Arc<AwsCredential>> {
        // Held while a program runs: all requests wait for one run of it.
        let mut kept = self.kept.lock().await;
        if let Some(kept) = kept.as_ref().filter(|kept| Instant::now() < kept.until) {
            return Ok(kept.credential.clone());
        }
        let profile = self.clone();
        let (credential, lasts) = crate::runtime::blocking(move || profile.read())?.await?;
        let credential = Arc::new(credential);
        *kept = Some(Kept { credential: credential.clone(), until: Instant::now() + lasts });
        Ok(credential)
    }

    /// Reads the credentials, and says how long they may be used.
    fn read(&self) -> Result<(AwsCredential, Duration)> {
        match self.source()? {
            Some(Source::Stated(credential)) => Ok((credential, KEPT)),
            Some(Source::Program { command, file }) => {
                let context = || format!("the credential_process of {}", file.display());
                let output = run(&command, PROGRAM_TIME_MAX).context(context)?;
                parse_output(&output, Utc::now()).context(context)
            }
            None => Err(Error::new(
                ErrorKind::NotFound,
                format!("the profile {:?} has no credentials any more", self.name),
            )),
        }
    }
}

/// How to come by credentials.
pub(crate) enum Source {
    Stated(AwsCredential),
    Program { command: String, file: PathBuf },
}

/// The profile as `object_store` asks it.
#[derive(Debug)]
pub(crate) struct Provider(pub(crate) Arc<Profile>);

impl CredentialProvider for Provider {
    type Credential = AwsCredential;

    fn get_credential<'a, 'b>(
        &'a self,
    ) -> std::pin::Pin<Box<dyn Future<Output = object_store::Result<Arc<AwsCredential>>> + Send + 'b>>
    where
        'a: 'b,
        Self: 'b,
    {
        Box::pin(async {
            self.0
                .credential()
                .await
                .map_err(|error| object_store::Error::Generic { store: "S3", source: Box::new(error) })
        })
    }
}

fn read_file(path: &Path) -> Result<Option<String>> {
    let context = || format!("can't read {}", path.display());
    let file = match std::fs::File::open(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        file => file.context(context)?,
    };
    let mut text = String::new();
    file.take(FILE_BYTES_MAX).read_to_string(&mut text).context(context)?;
    Ok(Some(text))
}

/// The value of a key in a profile of a file.
fn key_of(text: &str, profile: &str, key: &str) -> Option<String> {
    let mut is_here = false;
    let mut found = None;
    for line in text.lines() {
        let line = line.trim();
        if let Some(section) = line.strip_prefix('[').and_then(|line| line.split_once(']')) {
            let section = section.0.trim();
            is_here = section.strip_prefix("profile ").unwrap_or(section).trim() == profile;
        } else if is_here
            && !line.starts_with(['#', ';'])
            && let Some((name, value)) = line.split_once('=')
            && name.trim() == key
            && !value.trim().is_empty()
        {
            found = Some(value.trim().to_owned());
        }
    }
    found
}

/// The programs that run: each is the first of a group of processes of its own.
#[derive(Default)]
struct Running {
    groups: HashSet<Pid>,
    /// The process ends: no other program is to start.
    is_over: bool,
}

static RUNNING: std::sync::LazyLock<std::sync::Mutex<Running>> = std::sync::LazyLock::new(Default::default);

/// Ends the programs that run, for the end of this process. No other one is started afterwards.
pub fn end_programs() {
    let mut running = lock(&RUNNING);
    running.is_over = true;
    for group in &running.groups {
        // One that has ended by itself is not there any more.
        let _ = kill_process_group(*group, Signal::KILL);
    }
}

/// Waits until this process has ended, however it did, and ends the group: it holds the other end of its input.
const WATCHER: &str = "read -r _; kill -s KILL -- \"-$0\"";

/// A program that runs, until dropped: then it is ended, with all of its group.
struct Program {
    child: Child,
    group: Pid,
    /// Of the same group, so that the number of that is not given to another one while it lives.
    watcher: Child,
}

impl Program {
    fn start(command: &str) -> Result<Self> {
        let mut running = lock(&RUNNING);
        if running.is_over {
            return Err(Error::new(ErrorKind::Closed, "is not started any more: this process ends"));
        }
        let mut child = Command::new("sh")
            .args(["-c", command])
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null()) // what it prints there may be secret, too
            .spawn()
            .context(|| "can't be started")?;
        let group = Pid::from_child(&child);
        let watcher = Command::new("sh")
            .args(["-c", WATCHER, &group.as_raw_nonzero().to_string()])
            .process_group(group.as_raw_nonzero().get())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let watcher = watcher.context(|| "can't be watched").inspect_err(|_| {
            let _ = kill_process_group(group, Signal::KILL);
            drop(child.wait());
        })?;
        running.groups.insert(group);
        Ok(Self { child, group, watcher })
    }

    /// Whether it has ended. Its number stays its own until it is dropped.
    fn has_ended(&self) -> Result<bool> {
        let how = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        match waitid(WaitId::Pid(self.group), how) {
            Err(rustix::io::Errno::INTR) => Ok(false),
            ended => Ok(ended.map_err(std::io::Error::from).context(|| "can't be waited for")?.is_some()),
        }
    }

    /// How it has ended. What it leaves running, without its output, is its own business.
    fn done(mut self) -> Result<ExitStatus> {
        lock(&RUNNING).groups.remove(&self.group);
        drop(self.watcher.kill());
        drop(self.watcher.wait());
        self.child.wait().context(|| "can't be waited for")
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let mut running = lock(&RUNNING);
        // It was not waited for, so the number is still that of its group.
        if running.groups.remove(&self.group) {
            let _ = kill_process_group(self.group, Signal::KILL);
            drop(self.child.wait());
            drop(self.watcher.wait());
        }
    }
}

/// Runs the command in a shell and returns what it prints.
fn run(command: &str, time_max: Duration) -> Result<Vec<u8>> {
    let mut program = Program::start(command)?;
    let stdout = program.child.stdout.take().expect("it is piped");
    // A child of the program may keep its output open for as long as it lives: so the thread is not joined.
    let (sender, read) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut output = Vec::new();
        drop(sender.send(stdout.take(OUTPUT_BYTES_MAX).read_to_end(&mut output).map(|_| output)));
    });
    let begun = Instant::now();
    while !program.has_ended()? {
        if begun.elapsed() > time_max {
            return Err(Error::new(ErrorKind::Io, format!("did not end within {} s", time_max.as_secs())));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let left = time_max.saturating_sub(begun.elapsed());
    let output = read.recv_timeout(left);
    let Ok(output) = output else {
        let why = format!(
            "left its output open for {} s: does something that it started still run?",
            time_max.as_secs()
        );
        return Err(Error::new(ErrorKind::Io, why));
    };
    let status = program.done()?;
    if !status.success() {
        return Err(Error::new(ErrorKind::Io, format!("failed with {status}")));
    }
    output.context(|| "its output could not be read")
}

/// What a program prints, as the AWS documentation of `credential_process` has it.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Output {
    version: u32,
    access_key_id: String,
    secret_access_key: String,
    session_token: Option<String>,
    expiration: Option<String>,
}

fn parse_output(output: &[u8], now: DateTime<Utc>) -> Result<(AwsCredential, Duration)> {
    // The parser's message would quote the output.
    let parsed: Output = serde_json::from_slice(output).map_err(|_| {
        Error::invalid(
            "printed no JSON object with Version, AccessKeyId and SecretAccessKey, as AWS documents it",
        )
    })?;
    if parsed.version != 1 {
        return Err(Error::unsupported(format!("printed version {}; only 1 is known", parsed.version)));
    }
    let lasts = match parsed.expiration {
        None => KEPT,
        Some(text) => {
            let end = DateTime::parse_from_rfc3339(&text)
                .map_err(|_| Error::invalid("printed an Expiration that is no time of ISO 8601"))?;
            let left = end.with_timezone(&Utc).signed_duration_since(now).to_std().unwrap_or_default();
            if left.is_zero() {
                return Err(Error::invalid("printed credentials that have expired"));
            }
            // What lives shorter than that is used for half of its life, and not for one request alone.
            left.saturating_sub(RENEW_BEFORE).max(left / 2)
        }
    };
    let credential = AwsCredential {
        key_id: parsed.access_key_id,
        secret_key: parsed.secret_access_key,
        token: parsed.session_token,
    };
    Ok((credential, lasts))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILES: &str = "# mine\n[default]\naws_access_key_id = one\naws_secret_access_key=two\n\n[profile other]\n\
        region = eu-west-1\ncredential_process = print-them --for me\n; region = no\n";

    #[test]
    fn a_profile_is_a_section_with_or_without_the_word() {
        assert_eq!(key_of(FILES, "default", "aws_access_key_id").as_deref(), Some("one"));
        assert_eq!(key_of(FILES, "default", "region"), None);
        assert_eq!(key_of(FILES, "other", "region").as_deref(), Some("eu-west-1"));
        assert_eq!(key_of(FILES, "other", "credential_process").as_deref(), Some("print-them --for me"));
        assert_eq!(key_of(FILES, "third", "region"), None);
    }

    #[test]
    fn the_output_of_a_program_is_used_until_shortly_before_it_expires() {
        let now = DateTime::parse_from_rfc3339("2026-01-01T00:00:00Z").expect("a time").with_timezone(&Utc);
        let print = |rest: &str| {
            let text = format!(r#"{{"Version":1,"AccessKeyId":"a","SecretAccessKey":"b"{rest}}}"#);
            parse_output(text.as_bytes(), now).map(|(_, lasts)| lasts)
        };
        assert_eq!(print("").expect("without an end"), KEPT);
        let lasts = print(r#","Expiration":"2026-01-01T01:00:00Z""#).expect("an hour");
        assert_eq!(lasts, Duration::from_secs(3600) - RENEW_BEFORE);
        let lasts = print(r#","Expiration":"2026-01-01T00:01:00Z""#).expect("a minute");
        assert_eq!(lasts, Duration::from_secs(30));
        assert!(print(r#","Expiration":"2025-12-31T00:00:00Z""#).is_err(), "expired");
        assert!(print(r#","Expiration":"soon""#).is_err());
        let error = parse_output(b"{\"SecretAccessKey\":\"hush\"", now).expect_err("no JSON");
        assert!(!error.chain().contains("hush"), "{}", error.chain());
    }

    #[test]
    fn a_program_that_fails_or_hangs_is_an_error() {
        assert_eq!(run("printf x", PROGRAM_TIME_MAX).expect("prints"), b"x");
        assert!(run("exit 3", PROGRAM_TIME_MAX).expect_err("fails").chain().contains("exit status: 3"));
        let error = run("exec sleep 60", Duration::from_millis(20)).expect_err("hangs");
        assert!(error.chain().contains("did not end"), "{}", error.chain());
        let error = run("sleep 2 & echo x", Duration::from_millis(50)).expect_err("its output stays open");
        assert!(error.chain().contains("left its output open"), "{}", error.chain());
    }

    /// Completes when no process of this number is left.
    fn gone(file: &Path) {
        let pid = loop {
            let text = std::fs::read_to_string(file).unwrap_or_default();
            if let Some(pid) = text.strip_suffix('\n') {
                break pid.to_owned();
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        let state = || std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        // One whose end its new parent has not looked at yet has ended all the same.
        while !state().is_empty() && !state().contains(") Z ") {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn a_program_that_is_given_up_leaves_nothing_running() {
        let directory = crate::tests::Directory::new("programs");
        let file = directory.0.join("pid");
        let below = format!("(sleep 1000 & echo $! > {}; wait)", file.display());
        for command in [format!("{below}; true"), format!("{below} & sleep 1000"), format!("{below} & true")]
        {
            drop(std::fs::remove_file(&file));
            let ran = run(&command, Duration::from_millis(300));
            assert_eq!(ran.expect_err("it hangs").kind(), ErrorKind::Io, "{command}");
            gone(&file);
        }
    }
}
