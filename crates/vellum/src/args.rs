//! What several commands take: sizes, formats, `-o` options, and how an image is opened.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::ValueEnum;
use vellum_core::{Error, Result, Url, UrlPrefix};
use vellum_daemon::chunk_cache::CacheChoice;
use vellum_daemon::keys::NewEncryption;
use vellum_daemon::{
    Compression, FormatKind, Hash, ImageOptions, JOURNAL_BYTES_DEFAULT, NativeOptions, NbdTls, Prealloc,
    Preallocation, Qcow2Options, Remote, Secrets, TlsChoice,
};

use crate::config::allowed;
use crate::key_values::split_options;
use crate::names::{Named, named};
use crate::secrets::SecretArgs;

/// How results are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(crate) enum OutputFormat {
    /// Plain text
    #[default]
    Human,
    /// JSON, with qemu-img's field names where it has the same command
    Json,
}

/// How an image that is only looked at is opened
#[derive(Debug, clap::Args)]
pub(crate) struct ReadArgs {
    /// Format of the image: raw, qcow2, vellum, or one that is only read (vmdk, vdi, vpc, vhdx, qed, parallels, dmg, qcow). Default: detected from the file
    #[arg(short, long, value_name = "FMT", value_parser = parse_format)]
    pub(crate) format: Option<FormatKind>,
    /// Read the image even if another program has it open for writing
    ///
    /// The result may be inconsistent.
    #[arg(short = 'U', long)]
    pub(crate) force_share: bool,
    /// FILE is a list of options in the words of QEMU, such as driver=qcow2,file.filename=a.qcow2
    ///
    /// `json:{…}` with the same keys is understood in any case.
    #[arg(long, conflicts_with = "format")]
    pub(crate) image_opts: bool,
    #[command(flatten)]
    pub(crate) allow: AllowArgs,
    #[command(flatten)]
    pub(crate) secrets: SecretArgs,
}

/// Where the references of images may lead, and how long remote ones are waited for
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct AllowArgs {
    /// Also allow backing and data files in DIR; may be given several times
    ///
    /// By default, an image may only refer to files in its own directory.
    #[arg(long, value_name = "DIR")]
    pub(crate) allow_dir: Vec<PathBuf>,
    /// Also allow backing images at URLs that begin with PREFIX; may be given several times
    ///
    /// For example https://host/templates/ or s3://bucket/. By default, an image must not refer to a URL.
    #[arg(long, value_name = "PREFIX", value_parser = parse_url_prefix)]
    pub(crate) allow_url: Vec<UrlPrefix>,
    #[command(flatten)]
    pub(crate) remote: RemoteArgs,
}

/// How long remote images are waited for, and how exports of NBD servers are encrypted
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct RemoteArgs {
    /// How long to wait for a remote image that does not answer, in seconds (default 60)
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    remote_timeout: Option<Duration>,
    /// For NBD exports named nbds:…, ca-cert.pem in DIR, and client-cert.pem and client-key.pem if they exist
    ///
    /// Default: the authorities that this host trusts, and no certificate.
    #[arg(long, value_name = "DIR")]
    tls_certificates: Option<PathBuf>,
    /// For NBD exports named nbds:…, the name that the server's certificate must be for. Default: the host of the URL; at a Unix socket, any
    #[arg(long, value_name = "NAME")]
    tls_hostname: Option<String>,
    /// For NBD exports named nbds:…, accept any server
    #[arg(long, conflicts_with = "tls_hostname")]
    tls_unverified: bool,
}

impl RemoteArgs {
    /// As the library takes it, with the certificates that these images have been given by options.
    pub(crate) fn of(&self, named: &[&Named], secrets: &SecretArgs) -> Result<Remote> {
        with_certificates(self.usual(), named, secrets)
    }

    /// The same, where no image has its own.
    pub(crate) fn usual(&self) -> Remote {
        let usual = TlsChoice {
            directory: self.tls_certificates.clone(),
            hostname: self.tls_hostname.clone(),
            is_unverified: self.tls_unverified,
        };
        Remote { timeout: self.remote_timeout, nbd_tls: NbdTls { usual, of: Vec::new() }, is_bounded: false }
    }
}

/// The same for all images but those that have been given certificates by options.
pub(crate) fn with_certificates(
    mut remote: Remote,
    named: &[&Named],
    secrets: &SecretArgs,
) -> Result<Remote> {
    let of = &mut remote.nbd_tls.of;
    for named in named {
        let Some(tls) = &named.tls else { continue };
        let Some(url) = Url::of_path(&named.path).transpose()? else { continue };
        let choice = secrets.certificates(&tls.id, tls.hostname.as_deref(), url.scheme().is_nbd_socket())?;
        if of.iter().any(|(other, its)| *other == url && *its != choice) {
            return Err(Error::unsupported(format!("{url}: the same export with two different tls-creds")));
        }
        of.push((url, choice));
    }
    Ok(remote)
}

impl AllowArgs {
    /// The directories and the beginnings of URLs, as the library takes them.
    pub(crate) fn places(&self) -> Vec<PathBuf> {
        let urls = self.allow_url.iter().map(|prefix| PathBuf::from(prefix.to_string()));
        allowed(&self.allow_dir).into_iter().chain(urls).collect()
    }
}

/// The beginning of URLs.
pub(crate) fn parse_url_prefix(text: &str) -> Result<UrlPrefix> {
    UrlPrefix::parse(text)
}

/// A time from 1 second to a day.
pub(crate) fn parse_seconds(text: &str) -> Result<Duration> {
    let seconds = text.parse().ok().filter(|seconds| (1..=86_400).contains(seconds));
    seconds.map(Duration::from_secs).ok_or_else(|| {
        Error::invalid(format!("invalid time {text:?}: use a number of seconds from 1 to 86400"))
    })
}

impl ReadArgs {
    /// The image that the user names in this way, and how it is opened.
    pub(crate) fn open(&self, file: &Path) -> Result<(PathBuf, ImageOptions)> {
        let named = named(file, self.format, self.image_opts)?;
        let options = ImageOptions {
            must_be_encrypted: named.must_be_encrypted(),
            secrets: self.secrets.read()?,
            may_be_weak: true,
            format: named.format,
            force_share: self.force_share,
            allow_dirs: self.allow.places(),
            remote: self.allow.remote.of(&[&named], &self.secrets)?,
            ..ImageOptions::reading()
        };
        Ok((named.path, options))
    }
}

/// For commands that read templates in stores.
#[derive(clap::Args, Clone)]
pub(crate) struct ChunkCacheArgs {
    /// Keep what is fetched from stores in DIR, for all disks and programs of this host that name it
    ///
    /// The directory may be deleted at any time.
    #[arg(long, value_name = "DIR", env = "VELLUM_CHUNK_CACHE", hide_env = true)]
    pub(crate) chunk_cache: Option<PathBuf>,
    /// Keep at most about SIZE there, at least 64M
    #[arg(long, value_name = "SIZE", env = "VELLUM_CHUNK_CACHE_SIZE", hide_env = true, value_parser = parse_size, default_value = "10G")]
    pub(crate) chunk_cache_size: u64,
}

impl ChunkCacheArgs {
    pub(crate) fn choice(&self) -> Option<CacheChoice> {
        let dir = self.chunk_cache.clone();
        dir.map(|dir| CacheChoice { dir, bytes_max: self.chunk_cache_size })
    }
}

/// A format by its name.
pub(crate) fn parse_format(name: &str) -> Result<FormatKind> {
    name.parse()
}

/// A number of bytes: digits, perhaps a fraction, and a suffix (k, M, G, T, P, E, or KiB and so on; powers of 1024).
pub(crate) fn parse_size(text: &str) -> Result<u64> {
    let bad =
        || Error::invalid(format!("invalid size {text:?}: use a number with k, M, G or T, for example 20G"));
    if let Some(digits) = text.strip_prefix("0x") {
        return u64::from_str_radix(digits, 16).map_err(|_| bad());
    }
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let suffix = &text[digits.len()..];
    let shift = match suffix.strip_suffix("iB").unwrap_or(suffix) {
        "" if !suffix.is_empty() => return Err(bad()),
        "" | "b" | "B" => 0,
        "k" | "K" => 10,
        "M" | "m" => 20,
        "G" | "g" => 30,
        "T" | "t" => 40,
        "P" | "p" => 50,
        "E" | "e" => 60,
        "kB" | "KB" | "MB" | "GB" | "TB" => {
            let unit = &suffix[..1];
            return Err(Error::invalid(format!(
                "invalid size {text:?}: {suffix} may mean powers of 1000 or of 1024; use {digits}{unit} (powers of 1024), or \
                 the number of bytes"
            )));
        }
        _ => return Err(bad()),
    };
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    let number: u64 = whole.parse().map_err(|_| bad())?;
    let bytes = number.checked_mul(1 << shift).ok_or_else(bad)?;
    if fraction.is_empty() {
        return Ok(bytes);
    }
    // Exact as far as it matters: nine digits of a fraction.
    if fraction.len() > 9 || !fraction.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(bad());
    }
    let fraction_value = fraction.parse::<u128>().map_err(|_| bad())?;
    if shift == 0 && fraction_value != 0 {
        return Err(bad());
    }
    let part = (fraction_value << shift) / 10u128.pow(u32::try_from(fraction.len()).expect("at most 9"));
    bytes.checked_add(u64::try_from(part).map_err(|_| bad())?).ok_or_else(bad)
}

/// How far ahead of need space is prepared.
pub(crate) fn parse_prealloc(text: &str) -> Result<Prealloc> {
    match text {
        "off" => Ok(Prealloc::Off),
        "adaptive" => Ok(Prealloc::Adaptive),
        size => match parse_size(size) {
            Ok(bytes) if (Prealloc::BYTES_MIN..=Prealloc::BYTES_MAX).contains(&bytes) => {
                Ok(Prealloc::Fixed(bytes.next_multiple_of(4096)))
            }
            _ => Err(Error::invalid(format!(
                "invalid value {text:?}: use adaptive, off, or a size from 64k to 64G"
            ))),
        },
    }
}

/// How it is said, where something was.
pub(crate) fn prealloc_text(prealloc: Prealloc) -> Option<String> {
    (prealloc != Prealloc::Auto).then(|| prealloc.to_string())
}

/// What `-o` can say of a new image.
#[derive(Debug, Clone, Default)]
pub(crate) struct NewImage {
    pub(crate) qcow2: Qcow2Options,
    pub(crate) size: Option<u64>,
    pub(crate) backing_file: Option<String>,
    pub(crate) backing_format: Option<FormatKind>,
    /// The version, in the word that was used for it.
    pub(crate) compat: Option<String>,
    /// What only images of the native format have.
    pub(crate) native: NativeOptions,
    /// How it is to be encrypted, if it is.
    encryption: Option<NewEncryption>,
    /// What was said, by its names.
    said: Vec<String>,
    /// What was said in the words of luks images.
    said_of_luks: Vec<(String, String)>,
    /// Whether somebody said if there are to be subclusters.
    says_subclusters: bool,
    /// Whether there is to be a journal, if somebody said so.
    journal: Option<bool>,
    /// How large, if somebody said so.
    journal_bytes: Option<u64>,
}

/// Whether images get a journal when nobody says.
const JOURNAL_UNLESS_SAID: bool = true;

/// Where nobody asked for one, images of smaller clusters get none: the first cluster may not have room for its names.
const JOURNAL_FROM: u64 = 4 << 10;

/// Subclusters are at least this large, and a cluster has 32 of them.
const SUBCLUSTERS_FROM: u64 = 16 << 10;

/// One line of `-o help`: the formats that have the option, its name, its values, what it means.
type OptionHelp = (&'static [FormatKind], &'static str, &'static str, &'static str);

const QCOW2: &[FormatKind] = &[FormatKind::Qcow2];
const NATIVE: &[FormatKind] = &[FormatKind::Native];
const ENCRYPTED: &[FormatKind] = &[FormatKind::Qcow2, FormatKind::Native];
const OVER_A_BASE: &[FormatKind] = &[FormatKind::Qcow2, FormatKind::Native];
const LUKS: &[FormatKind] = &[FormatKind::Luks];
const FLAT: &[FormatKind] = &[FormatKind::Raw, FormatKind::Luks];
const EVERY: &[FormatKind] = &[FormatKind::Raw, FormatKind::Qcow2, FormatKind::Native, FormatKind::Luks];

/// What `-o help` lists, sorted by name.
const CREATE_OPTIONS: [OptionHelp; 38] = [
    (OVER_A_BASE, "backing_file", "NAME", "backing image, like -b"),
    (OVER_A_BASE, "backing_fmt", "raw|qcow2|vellum", "format of the backing image, like -F"),
    (
        NATIVE,
        "block_size",
        "SIZE",
        "granularity at which a clone tracks its own data, 4k to 1M (default 64k)",
    ),
    (LUKS, "cipher-alg", "aes-256|aes-128", "cipher, in XTS mode (default aes-256)"),
    (LUKS, "cipher-mode", "xts", "mode of the cipher"),
    (QCOW2, "cluster_size", "SIZE", "cluster size, 512 to 2M (default 64k)"),
    (QCOW2, "compat", "v2|v3", "version of the format, also written 0.10 and 1.1 (default v3)"),
    (QCOW2, "compression_type", "zlib|zstd", "compression of compressed clusters (default zlib)"),
    (
        OVER_A_BASE,
        "copy_on_read",
        "on|off",
        "ask servers to copy what guests read from the backing image, like `vellum serve --copy-on-read` (default off)",
    ),
    (QCOW2, "data_file", "NAME", "store guest data in this external file"),
    (QCOW2, "data_file_raw", "on|off", "keep the external data file valid as a raw image (default off)"),
    (
        NATIVE,
        "embed",
        "on|off",
        "store the allocation record inside the data where the data compresses; layout=zoned only (default on, with \
         encryption off)",
    ),
    (
        ENCRYPTED,
        "encrypt.cipher-alg",
        "aes-256|aes-128",
        "cipher of guest data, in XTS mode (default aes-256)",
    ),
    (ENCRYPTED, "encrypt.cipher-mode", "xts", "mode of the cipher"),
    (ENCRYPTED, "encrypt.format", "luks", "encrypt guest data with LUKS"),
    (ENCRYPTED, "encrypt.hash-alg", "sha256|sha512|...", "hash of the key slots (default sha256)"),
    (
        ENCRYPTED,
        "encrypt.iter-time",
        "MS",
        "how long opening the image takes, in milliseconds (default 2000)",
    ),
    (ENCRYPTED, "encrypt.ivgen-alg", "plain64", "how the cipher uses the place of a sector"),
    (
        ENCRYPTED,
        "encrypt.key-secret",
        "ID",
        "secret that opens the image, given with --secret id=ID,file=FILE",
    ),
    (
        QCOW2,
        "extended_l2",
        "on|off",
        "32 subclusters per cluster (default on with a backing image or encryption, otherwise off)",
    ),
    (LUKS, "hash-alg", "sha256|sha512|...", "hash of the key slots (default sha256)"),
    (LUKS, "iter-time", "MS", "how long opening the image takes, in milliseconds (default 2000)"),
    (LUKS, "ivgen-alg", "plain64", "how the cipher uses the place of a sector"),
    (
        QCOW2,
        "journal",
        "on|off",
        "write with a journal: each guest flush costs one host flush instead of two (default on)",
    ),
    (QCOW2, "journal_size", "SIZE", "size of the journal, 64k to 64M (default 1M); a closed image has none"),
    (NATIVE, "journal_size", "SIZE", "size of the journal, 64k to 64M (default 16M, layout=zoned 8M)"),
    (LUKS, "key-secret", "ID", "secret that opens the image, given with --secret id=ID,file=FILE"),
    (
        NATIVE,
        "layout",
        "linear|table|zoned",
        "linear: like a sparse raw file; table: allocation table; zoned: allocation recorded beside the data \
         (default). table and zoned support snapshots",
    ),
    (QCOW2, "lazy_refcounts", "on|off", "let other programs postpone refcount updates (default off)"),
    (
        QCOW2,
        "prealloc",
        "adaptive|SIZE|off",
        "while served, write zeros ahead of need, by SIZE (64k to 1G) or adaptively; needs the journal \
         (default adaptive on ext4 and XFS)",
    ),
    (FLAT, "preallocation", "off|falloc|full", "reserve space now (default off)"),
    (
        QCOW2,
        "preallocation",
        "off|metadata|falloc|full",
        "allocate clusters and reserve their space now (default off)",
    ),
    (
        OVER_A_BASE,
        "prefetch",
        "on|off",
        "ask servers to copy everything and to detach the image, like `vellum serve --prefetch` (default off)",
    ),
    (QCOW2, "refcount_bits", "1...64", "width of a refcount, a power of two (default 16)"),
    (EVERY, "size", "SIZE", "size of the disk, like the argument SIZE"),
    (NATIVE, "unit_size", "SIZE", "allocation unit, 64k to 2M (default 64k, layout=table 1M)"),
    (NATIVE, "zeroed", "on|off", "zero a block device first; layout=linear only (default off)"),
    (NATIVE, "zone_size", "SIZE", "zone size, 128k to 64M; layout=zoned only (default 64M)"),
];

/// The columns that `-o help` takes.
const HELP_COLUMNS: usize = 100;
/// The column in which the meanings begin.
const MEANING_COLUMN: usize = 43;

/// What `-o help` prints: the options of one format, or of all.
pub(crate) fn options_help(format: Option<FormatKind>) -> String {
    let formats = EVERY.iter().filter(|one| format.is_none_or(|format| format == **one));
    let groups = formats.map(|format| {
        let rows = CREATE_OPTIONS.iter().filter(|(formats, ..)| formats.contains(format));
        let lines = rows.map(|(_, name, values, meaning)| help_row(&format!("{name}=<{values}>"), meaning));
        format!("Options of {format} images:{}", lines.collect::<String>())
    });
    groups.collect::<Vec<_>>().join("\n\n")
}

/// An option and its meaning, which is broken into lines.
fn help_row(option: &str, meaning: &str) -> String {
    let mut row = format!("\n  {option:<width$}", width = MEANING_COLUMN - 2);
    let mut column = MEANING_COLUMN;
    for word in meaning.split(' ') {
        let word_columns = word.chars().count() + 1;
        if column + word_columns > HELP_COLUMNS + 1 {
            row = format!("{}\n{:MEANING_COLUMN$}", row.trim_end(), "");
            column = MEANING_COLUMN;
        }
        row.push_str(word);
        row.push(' ');
        column += word_columns;
    }
    row.trim_end().to_owned()
}

/// Options that raw images have, and images of the native format; qcow2 has all but the last of these.
const FOR_RAW: [&str; 2] = ["size", "preallocation"];
const FOR_NATIVE: [&str; 6] =
    ["size", "backing_file", "backing_fmt", "copy_on_read", "journal_size", "prefetch"];
/// The options of encryption begin with this; qcow2 has them, and the native format.
const OF_ENCRYPTION: &str = "encrypt.";
/// The same of luks images, in the order in which `qemu-img create` prints them.
const OF_LUKS: [&str; 8] = [
    "key-secret",
    "cipher-alg",
    "cipher-mode",
    "ivgen-alg",
    "ivgen-hash-alg",
    "hash-alg",
    "iter-time",
    "detached-header",
];
/// What is said where a luks image is to be made without a secret.
pub(crate) const NO_KEY_SECRET: &str =
    "-o key-secret=ID is missing: it names the secret that opens the luks image (`--secret id=ID,file=FILE`)";
const ONLY_NATIVE: [&str; 6] = ["layout", "unit_size", "zone_size", "embed", "block_size", "zeroed"];

impl NewImage {
    pub(crate) fn parse(lists: &[String]) -> Result<Self> {
        let mut new = Self::default();
        for (key, value) in split_options(lists)? {
            new.set(&key, &value)?;
            if OF_LUKS.contains(&key.as_str()) {
                new.said_of_luks.push((key.clone(), value));
            }
            new.said.push(key);
        }
        new.qcow2.journal = new.journal_wish()?;
        if !new.says("layout") {
            // Only a device without units is made zero first.
            let is_zoned = !new.native.zero_device;
            (new.native.has_table, new.native.has_zones) = (is_zoned, is_zoned);
        }
        new.native.journal_bytes = new.journal_bytes;
        if new.encryption.as_ref().is_some_and(|encryption| encryption.secret.is_empty()) {
            if !new.said_of_luks.is_empty() {
                return Ok(new); // where one is made it is missed, and to measure one it is not needed
            }
            return Err(Error::invalid(
                "-o encrypt.key-secret=ID is missing: it names the secret (`--secret id=ID,file=FILE`)",
            ));
        }
        if new.encryption.is_some() {
            // A write of a part of a cluster would have to fill the rest of it with encrypted zeros.
            new.suit_overlay();
        }
        Ok(new)
    }

    /// The options of a qcow2 image and of a native one, with the keys if it is to be encrypted: to be called on a worker,
    /// where that takes seconds.
    pub(crate) fn with_keys(&self, secrets: &Secrets) -> Result<(Qcow2Options, NativeOptions)> {
        if self.key_secret().is_some_and(str::is_empty) {
            return Err(Error::invalid(NO_KEY_SECRET));
        }
        let keys = self.encryption.as_ref().map(|encryption| encryption.keys(secrets)).transpose()?;
        let native = NativeOptions { encryption: keys.clone(), ..self.native.clone() };
        Ok((Qcow2Options { encryption: keys, ..self.qcow2.clone() }, native))
    }

    /// As above, of an image that is never made: the keys are as long, and made at once.
    pub(crate) fn with_keys_to_measure(&self, secrets: &Secrets) -> Result<(Qcow2Options, NativeOptions)> {
        let mut new = self.clone();
        if let Some(encryption) = &mut new.encryption {
            encryption.time = Duration::from_millis(1);
        }
        new.with_keys(secrets)
    }

    /// Refuses what is not about encryption, for commands that make images of one kind.
    pub(crate) fn refuse_all_but_encryption(&self) -> Result<()> {
        match self.said.iter().find(|key| !key.starts_with(OF_ENCRYPTION)) {
            None => Ok(()),
            Some(key) => {
                Err(Error::unsupported(format!("-o {key}: only the options encrypt.* can be given here")))
            }
        }
    }

    /// Refuses encryption, for commands that do not make encrypted images.
    pub(crate) fn refuse_encryption(&self) -> Result<()> {
        match self.encryption {
            None => Ok(()),
            Some(_) => Err(Error::unsupported(
                "-o encrypt.format: only `vellum create`, `vellum convert` and `vellum migrate prepare` make encrypted images",
            )),
        }
    }

    /// The name of the secret that is to open it, if it is to be encrypted.
    pub(crate) fn key_secret(&self) -> Option<&str> {
        self.encryption.as_ref().map(|encryption| encryption.secret.as_str())
    }

    /// How it is to be encrypted, if it is.
    pub(crate) fn encryption(&self) -> Option<&NewEncryption> {
        self.encryption.as_ref()
    }

    /// What is said of encryption where a new image is described.
    pub(crate) fn encryption_text(&self) -> Option<String> {
        let encryption = self.encryption.as_ref()?;
        Some(format!("encrypt.format=luks encrypt.key-secret={}", encryption.secret))
    }

    /// The same of a luks image: all that was said of it, behind a space each.
    pub(crate) fn luks_text(&self) -> String {
        let said = |name: &&str| self.said_of_luks.iter().rfind(|(key, _)| key == name);
        OF_LUKS.iter().filter_map(said).map(|(key, value)| format!(" {key}={value}")).collect()
    }

    /// Bytes that a luks image has before its data.
    pub(crate) fn luks_header_bytes(&self) -> u64 {
        let usual = NewEncryption::with_secret("");
        self.encryption.as_ref().unwrap_or(&usual).header_bytes()
    }

    /// Refuses what images of this format have not. `flag` is how the format is said.
    pub(crate) fn suits(&self, format: FormatKind, flag: &str) -> Result<()> {
        format.check_is_written()?;
        let suits = |key: &&String| match format {
            FormatKind::Raw => FOR_RAW.contains(&key.as_str()),
            FormatKind::Qcow2 => !ONLY_NATIVE.contains(&key.as_str()) && !OF_LUKS.contains(&key.as_str()),
            FormatKind::Luks => FOR_RAW.contains(&key.as_str()) || OF_LUKS.contains(&key.as_str()),
            FormatKind::Native => {
                let key = key.as_str();
                FOR_NATIVE.contains(&key) || ONLY_NATIVE.contains(&key) || key.starts_with(OF_ENCRYPTION)
            }
            FormatKind::Foreign(_) => false,
        };
        let Some(key) = self.said.iter().find(|key| !suits(key)) else { return Ok(()) };
        let other = match ONLY_NATIVE.contains(&key.as_str()) {
            true => FormatKind::Native,
            false => FormatKind::Qcow2,
        };
        Err(Error::invalid(match key.as_str() {
            key if OF_LUKS.contains(&key) && format != FormatKind::Raw => {
                format!("-o {key} is an option of luks images: for {format} use encrypt.{key}")
            }
            key if OF_LUKS.contains(&key) => format!("-o {key} is a luks option: use `{flag} luks`"),
            key if format == FormatKind::Luks && key.starts_with(OF_ENCRYPTION) => {
                format!("-o {key}: a luks image is always encrypted: its options have no `encrypt.` before them")
            }
            "preallocation" => format!("-o preallocation: {format} images do not support it"),
            "cluster_size" if format == FormatKind::Native => {
                "-o cluster_size is a qcow2 option: use unit_size, or block_size with a backing image".to_owned()
            }
            "journal" if format == FormatKind::Native => {
                "-o journal is a qcow2 option: a vellum image has a journal whenever it needs one; journal_size \
                 sets its size"
                    .to_owned()
            }
            "prealloc" if format == FormatKind::Native => {
                "-o prealloc is a qcow2 option: a vellum image always prepares units ahead of need".to_owned()
            }
            key => format!("-o {key} is a {other} option: use `{flag} {other}`"),
        }))
    }

    /// How large a journal there is to be, if any. Who says a size wants one; what nobody said is left out quietly where
    /// it cannot be.
    fn journal_wish(&self) -> Result<Option<u64>> {
        let bytes = self.journal_bytes.unwrap_or(JOURNAL_BYTES_DEFAULT);
        let qcow2 = &self.qcow2;
        let can = qcow2.version >= 3 && qcow2.data_file.is_none() && qcow2.cluster_size >= JOURNAL_FROM;
        match (self.journal, self.journal_bytes) {
            (Some(false), Some(_)) => Err(Error::invalid("-o journal_size contradicts journal=off")),
            (Some(false), None) => Ok(None),
            (Some(true), _) | (None, Some(_)) => Ok(Some(bytes)),
            (None, None) => Ok((JOURNAL_UNLESS_SAID && can).then_some(bytes)),
        }
    }

    fn says(&self, key: &str) -> bool {
        self.said.iter().any(|said| said == key)
    }

    /// Whether anything was said of a journal.
    pub(crate) fn says_journal(&self) -> bool {
        self.journal.is_some() || self.journal_bytes.is_some()
    }

    /// What is best for an image over another one, where nobody has said otherwise: with subclusters a write that covers
    /// only a part of a cluster copies nothing from below.
    pub(crate) fn suit_overlay(&mut self) {
        if !self.says_subclusters && self.qcow2.version >= 3 && self.qcow2.cluster_size >= SUBCLUSTERS_FROM {
            self.qcow2.extended_l2 = true;
        }
    }

    fn set_encryption(&mut self, key: &str, value: &str) -> Result<()> {
        let bad = |values: &str| Error::invalid(format!("-o {key}={value}: use {values}"));
        let encryption = self.encryption.get_or_insert_with(|| NewEncryption::with_secret(""));
        match (key.strip_prefix(OF_ENCRYPTION).unwrap_or(key), value) {
            ("format", "luks") => {}
            ("format", _) => return Err(bad("luks; the old scheme (aes) is broken and not written")),
            ("key-secret", "") => return Err(bad("the ID of a secret")),
            ("key-secret", id) => encryption.secret = id.to_owned(),
            ("cipher-alg", "aes-256") => encryption.key_bits = 256,
            ("cipher-alg", "aes-128") => encryption.key_bits = 128,
            ("cipher-alg", _) => return Err(bad("aes-256 or aes-128")),
            ("cipher-mode", "xts") | ("ivgen-alg", "plain64") => {}
            ("cipher-mode", _) => return Err(bad("xts")),
            ("ivgen-alg", _) => return Err(bad("plain64")),
            ("hash-alg", name) => encryption.hash = Hash::named(name)?,
            ("iter-time", time) => {
                let millis = time.parse().ok().filter(|millis| (1..=60_000).contains(millis));
                encryption.time =
                    Duration::from_millis(millis.ok_or_else(|| bad("1 to 60000 milliseconds"))?);
            }
            ("detached-header", value) if key == "detached-header" => match value {
                "off" | "no" | "false" => {}
                _ => {
                    return Err(Error::unsupported(
                        "-o detached-header: headers in a file of their own are not made: omit it",
                    ));
                }
            },
            ("ivgen-hash-alg", _) if key == "ivgen-hash-alg" => {
                return Err(bad("no such option: plain64 takes no hash"));
            }
            _ => return Err(Error::invalid(format!("-o {key}: unknown option (`-o help` lists them)"))),
        }
        Ok(())
    }

    fn set(&mut self, key: &str, value: &str) -> Result<()> {
        let bad = |values: &str| Error::invalid(format!("-o {key}={value}: use one of {values}"));
        let switch = || match value {
            "on" | "yes" | "true" => Ok(true),
            "off" | "no" | "false" => Ok(false),
            _ => Err(bad("on, off")),
        };
        match key {
            "size" => self.size = Some(parse_size(value)?),
            "preallocation" => {
                self.qcow2.preallocation = match value {
                    "off" => Preallocation::Off,
                    "metadata" => Preallocation::Metadata,
                    "falloc" => Preallocation::Falloc,
                    "full" => Preallocation::Full,
                    _ => return Err(bad("off, metadata, falloc, full")),
                }
            }
            "cluster_size" => self.qcow2.cluster_size = parse_size(value)?,
            "compat" => {
                self.qcow2.version = match value {
                    "0.10" | "v2" => 2,
                    "1.1" | "v3" => 3,
                    _ => return Err(bad("v2 (0.10), v3 (1.1)")),
                };
                self.compat = Some(value.to_owned());
            }
            "backing_file" => self.backing_file = Some(value.to_owned()),
            "backing_fmt" => self.backing_format = Some(value.parse()?),
            "extended_l2" => {
                self.qcow2.extended_l2 = switch()?;
                self.says_subclusters = true;
            }
            "refcount_bits" => {
                self.qcow2.refcount_bits = value.parse().map_err(|_| bad("1, 2, 4, 8, 16, 32, 64"))?;
            }
            "lazy_refcounts" => self.qcow2.lazy_refcounts = switch()?,
            "compression_type" => {
                self.qcow2.compression = match value {
                    "zlib" => Compression::Zlib,
                    "zstd" => Compression::Zstd,
                    _ => return Err(bad("zlib, zstd")),
                }
            }
            "data_file" => self.qcow2.data_file = Some(value.to_owned()),
            "journal" => self.journal = Some(switch()?),
            "journal_size" => self.journal_bytes = Some(parse_size(value)?),
            "prealloc" => {
                let fits = |how: &Prealloc| match how {
                    Prealloc::Fixed(bytes) => *bytes <= Prealloc::STORED_BYTES_MAX,
                    _ => true,
                };
                self.qcow2.prealloc = parse_prealloc(value)
                    .ok()
                    .filter(fits)
                    .ok_or_else(|| bad("adaptive, off, a size from 64k to 1G"))?;
            }
            "data_file_raw" => self.qcow2.data_file_raw = switch()?,
            "layout" => {
                (self.native.has_table, self.native.has_zones) = match value {
                    "linear" => (false, false),
                    "table" => (true, false),
                    "zoned" => (true, true),
                    _ => return Err(bad("linear, table, zoned")),
                }
            }
            "zone_size" => self.native.zone_size = Some(parse_size(value)?),
            "embed" => self.native.embed = Some(switch()?),
            "unit_size" => self.native.unit_size = Some(parse_size(value)?),
            "block_size" => self.native.block_size = Some(parse_size(value)?),
            "copy_on_read" => {
                self.qcow2.wish.copy_on_read = switch()?;
                self.native.wish.copy_on_read = switch()?;
            }
            "prefetch" => {
                self.qcow2.wish.prefetch = switch()?;
                self.native.wish.prefetch = switch()?;
            }
            "zeroed" => self.native.zero_device = switch()?,
            "encryption" if value != "off" => {
                return Err(Error::unsupported(
                    "-o encryption: the old scheme is broken and not written: use encrypt.format=luks",
                ));
            }
            "encryption" => {}
            _ if key.starts_with(OF_ENCRYPTION) || OF_LUKS.contains(&key) => {
                self.set_encryption(key, value)?
            }
            _ => {
                return Err(Error::invalid(format!("-o {key}: unknown option (`-o help` lists them)")));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
