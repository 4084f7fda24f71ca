//! Secrets on the command line: never themselves, only where they are.
//!
//! ```text
//!   --secret id=sec0,file=PATH            the bytes of a file, as they are
//!   --secret id=sec0,env=NAME             of an environment variable
//!   --secret id=sec0,fd=3                 of a descriptor that the caller has opened
//!   --object secret,id=sec0,file=PATH     the same in the words of qemu-img
//! ```
//!
//! Among the objects are also the certificates for servers of NBD exports: `--object tls-creds-x509,id=tls0,endpoint=client,dir=DIR`.
//!
//! `format=base64` says that what is there is the base64 text of the secret. What other processes can see, and what
//! shells keep (`data=` in the words of qemu-img), is refused, and no message repeats it.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

use vellum_core::{Context, Error, Result};
use vellum_daemon::control::SecretFile;
use vellum_daemon::{Secret, Secrets, TlsChoice};

use crate::key_values::split_options;
use crate::objects::Objects;

/// Where the secrets are that open encrypted images
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct SecretArgs {
    /// Secret that opens encrypted images: id=NAME, and file=FILE, env=VARIABLE or fd=NUMBER; may be given several times
    ///
    /// The bytes count as they are, also a line break at their end. With format=base64 they are decoded first. Each
    /// secret is tried on each encrypted image.
    #[arg(long, value_name = "id=NAME,file=FILE")]
    secret: Vec<String>,
    /// As --secret, in the words of qemu-img: secret,id=NAME,file=FILE
    ///
    /// Also certificates for images that are named by options with tls-creds=NAME: tls-creds-x509,id=NAME,endpoint=client,dir=DIR.
    #[arg(long, value_name = "secret,id=NAME,file=FILE")]
    object: Vec<String>,
}

impl SecretArgs {
    /// Where they are, for a server to read them: only files will do.
    pub(crate) fn files(&self) -> Result<Vec<SecretFile>> {
        let own = self.secret.iter().map(|spec| ("--secret", spec.as_str()));
        let theirs = self.object.iter().map(|spec| match spec.split_once(',') {
            Some(("secret", rest)) => Ok(("--object secret", rest)),
            _ => Err(only_secrets(spec)),
        });
        let all = own.map(Ok).chain(theirs).map(|spec| {
            let (option, spec) = spec?;
            match place_of(option, spec)? {
                (id, Source::File(path), base64) => {
                    let file =
                        std::path::absolute(&path).context(|| format!("can't find {}", path.display()))?;
                    Ok(SecretFile { id, file, base64 })
                }
                (id, ..) => Err(Error::unsupported(format!(
                    "{option} {id}: with --control the server reads the secret: use file=, or the name of a secret that the server was \
                     started with (`vellum serve --secret id={id},fd=NUMBER`)"
                ))),
            }
        });
        all.collect()
    }

    /// Reads them.
    pub(crate) fn read(&self) -> Result<Arc<Secrets>> {
        let mut secrets = Secrets::default();
        for spec in &self.secret {
            let (name, secret) = read_one("--secret", spec)?;
            secrets.add(&name, secret)?;
        }
        for spec in &self.object {
            let Some((_, rest)) = spec.split_once(',').filter(|(kind, _)| *kind == "secret") else {
                self.note_certificates(&mut Objects::default(), spec)?;
                continue;
            };
            let (name, secret) = read_one("--object secret", rest)?;
            secrets.add(&name, secret)?;
        }
        Ok(Arc::new(secrets))
    }

    /// The certificates of this name, for an image at an NBD server. A Unix socket has no name of its own.
    pub(crate) fn certificates(&self, id: &str, host: Option<&str>, is_unix: bool) -> Result<TlsChoice> {
        let mut objects = Objects::default();
        for spec in self.object.iter().filter(|spec| !spec.starts_with("secret,")) {
            self.note_certificates(&mut objects, spec)?;
        }
        objects.of_image(id, host, is_unix).map_err(|why| Error::invalid(format!("tls-creds={id}: {why}")))
    }

    fn note_certificates(&self, objects: &mut Objects, spec: &str) -> Result<()> {
        // A secret that is written as JSON is none of them.
        let kind = spec.split_once(',').map_or("", |(kind, _)| kind);
        let noted = objects.note(spec).map_err(|why| match why.starts_with("--object") {
            true => Error::unsupported(why),
            false => Error::invalid(format!("--object {kind}: {why}")),
        });
        let is_usable = noted? && objects.has_certificates();
        if is_usable { Ok(()) } else { Err(only_secrets(spec)) }
    }
}

fn only_secrets(spec: &str) -> Error {
    let kind = spec.split_once(',').map_or(spec, |(kind, _)| kind);
    let kind = if kind.starts_with('{') { "{…}" } else { kind };
    Error::unsupported(format!(
        "--object {kind}: the kinds of object are secret,id=NAME,file=FILE and tls-creds-x509,id=NAME,endpoint=client,dir=DIR"
    ))
}

/// The name of a secret, and what is where the user says.
fn read_one(option: &str, spec: &str) -> Result<(String, Secret)> {
    let (name, source, is_base64) = place_of(option, spec)?;
    let secret = source.read().context(|| format!("can't use the secret {name}"))?;
    let secret = if is_base64 {
        secret.from_base64().context(|| format!("can't use the secret {name}"))?
    } else {
        secret
    };
    Ok((name, secret))
}

/// The name of a secret, where it is, and whether its base64 text is there.
fn place_of(option: &str, spec: &str) -> Result<(String, Source, bool)> {
    let (mut name, mut source, mut is_base64) = (None, None, false);
    for (key, value) in split_options(&[spec.to_owned()])? {
        match key.as_str() {
            "id" => name = Some(value),
            "file" | "env" | "fd" if source.is_some() => {
                return Err(Error::invalid(format!("{option}: give one of file=, env= and fd=")));
            }
            "file" => source = Some(Source::File(value.into())),
            "env" => source = Some(Source::Variable(value)),
            "fd" => {
                source = Some(Source::Descriptor(value.parse().map_err(|_| {
                    Error::invalid(format!("{option}: fd={value}: use the number of an open descriptor"))
                })?))
            }
            "format" => match value.as_str() {
                "raw" => is_base64 = false,
                "base64" => is_base64 = true,
                _ => return Err(Error::invalid(format!("{option}: format={value}: use raw or base64"))),
            },
            "data" => {
                return Err(Error::invalid(format!(
                    "{option}: a secret on the command line is seen by all users of this host: put it into a file that \
                     only you can read, and use file="
                )));
            }
            "keyid" | "iv" => {
                return Err(Error::unsupported(format!(
                    "{option}: secrets that are encrypted themselves ({key}=) are not supported"
                )));
            }
            // Not shown: it may be the secret.
            _ => {
                return Err(Error::invalid(format!(
                    "{option}: use id=NAME with one of file=FILE, env=VARIABLE and fd=NUMBER"
                )));
            }
        }
    }
    let name =
        name.ok_or_else(|| Error::invalid(format!("{option}: the secret has no name: add id=NAME")))?;
    let source = source.ok_or_else(|| {
        Error::invalid(format!("{option} {name}: say where it is: file=FILE, env=VARIABLE or fd=NUMBER"))
    })?;
    Ok((name, source, is_base64))
}

/// Where a secret is.
enum Source {
    File(PathBuf),
    Variable(String),
    Descriptor(u32),
}

impl Source {
    fn read(self) -> Result<Secret> {
        match self {
            Self::File(path) => {
                let file = File::open(&path).context(|| format!("can't open {}", path.display()))?;
                Secret::read(file).context(|| path.display().to_string())
            }
            Self::Variable(variable) => {
                let value = std::env::var_os(&variable).ok_or_else(|| {
                    Error::invalid(format!("the environment variable {variable} is not set"))
                })?;
                Secret::new(value.into_encoded_bytes()).context(|| format!("environment variable {variable}"))
            }
            Self::Descriptor(number) => {
                let path = format!("/dev/fd/{number}");
                let file = File::open(&path).context(|| format!("can't read descriptor {number}"))?;
                Secret::read(file).context(|| format!("descriptor {number}"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(option: &str, spec: &str) -> String {
        let args = match option {
            "secret" => SecretArgs { secret: vec![spec.to_owned()], object: Vec::new() },
            _ => SecretArgs { secret: Vec::new(), object: vec![spec.to_owned()] },
        };
        args.read().expect_err(spec).chain()
    }

    #[test]
    fn no_message_repeats_a_secret() {
        for (option, spec, says) in [
            ("secret", "id=a,data=hunter2", "on the command line"),
            ("secret", "hunter2", "use id=NAME"),
            ("secret", "id=a", "say where it is"),
            ("secret", "file=/dev/null", "no name"),
            ("secret", "id=a,file=/dev/null", "empty"),
            ("secret", "id=a,file=/dev/null,env=B", "one of"),
            ("secret", "id=a,env=NO_SUCH_VARIABLE", "not set"),
            ("secret", "id=a,fd=x", "number"),
            ("secret", "id=a,file=/nonexistent", "/nonexistent"),
            ("secret", "id=a,file=/dev/null,format=hex", "base64"),
            ("secret", "id=a,file=/dev/null,keyid=b", "not supported"),
            ("object", "secret,id=a,data=hunter2", "on the command line"),
            ("object", "tls-creds-x509,id=a", "tls-creds-x509"),
        ] {
            let error = error(option, spec);
            assert!(error.contains(says) && !error.contains("hunter2"), "{spec}: {error}");
        }
    }

    #[test]
    fn secrets_come_from_where_they_are() {
        let file = std::env::temp_dir().join(format!("vellum-secret-{}", std::process::id()));
        std::fs::write(&file, "aHVudGVyMg==").unwrap();
        let name = file.display();
        let args = SecretArgs {
            secret: vec![
                format!("id=a,file={name}"),
                format!("format=base64,id=b,file={name}"),
                "id=c,env=PATH".into(),
            ],
            object: vec![format!("secret,id=d,format=raw,file={name}")],
        };
        let secrets = args.read();
        std::fs::remove_file(&file).unwrap();
        let secrets = secrets.unwrap();
        assert!(["a", "b", "c", "d"].iter().all(|name| secrets.named(name).is_some()));
        assert_eq!(format!("{:?}", secrets.named("b").unwrap()), "Secret(…)");
    }
}
