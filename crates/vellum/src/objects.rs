//! The objects of a command line in the words of QEMU: certificates, and who may use them.
//!
//! They are read as QEMU reads them, by keys (`authz-list,id=a,rules.0.match=…`) or as JSON, and refused in its words.

use std::ffi::{OsStr, OsString};

use serde_json::{Map, Value, json};
use vellum_daemon::TlsChoice;

use crate::key_values::split_options;

/// Certificates, and how they are used.
#[derive(Debug)]
pub(crate) struct Certificates {
    id: String,
    dir: String,
    is_for_server: bool,
    verifies: bool,
}

/// What has been said of objects.
#[derive(Debug, Default)]
pub(crate) struct Objects {
    certificates: Vec<Certificates>,
    /// Which clients are let in: the names, and the option of ours.
    access: Vec<(String, OsString)>,
}

impl Objects {
    /// Takes up one. `true` for one that images may be named with: a secret, and certificates of a client.
    pub(crate) fn note(&mut self, text: &str) -> Result<bool, String> {
        let (kind, mut keys) = Keys::of(text)?;
        match kind.as_str() {
            "secret" => return Ok(true),
            "tls-creds-x509" => {
                let id = keys.required("id")?;
                let dir = keys.required("dir")?;
                let is_for_server = match keys.take("endpoint").as_deref() {
                    Some("server") => true,
                    Some("client") | None => false,
                    Some(other) => return Err(not_accepted("endpoint", other)),
                };
                let verifies = keys.switch("verify-peer", true)?;
                // The files are looked at in any case.
                keys.switch("sanity-check", true)?;
                if let Some((key, value)) = keys.0.first() {
                    return Err(match key.as_str() {
                        "priority" | "passwordid" => {
                            format!("--object {kind}: {key}={value} is not supported")
                        }
                        _ => format!("Parameter '{key}' is unexpected"),
                    });
                }
                self.certificates.push(Certificates { id, dir, is_for_server, verifies });
                return Ok(!is_for_server);
            }
            "authz-simple" => {
                let id = keys.required("id")?;
                let identity = keys.required("identity")?;
                keys.end()?;
                self.access.push((id, format!("--tls-allow={identity}").into()));
            }
            "authz-list" => {
                let id = keys.required("id")?;
                let list = keys.access_list()?;
                keys.end()?;
                self.access.push((id, format!("--tls-access-list={list}").into()));
            }
            "authz-list-file" => {
                let id = keys.required("id")?;
                let file = keys.required("filename").map_err(|_| "filename not provided".to_owned())?;
                if !keys.switch("refresh", true)? {
                    return Err(format!(
                        "--object {kind}: refresh=off is not supported: the file is read again when it has changed"
                    ));
                }
                keys.end()?;
                // What begins with a brace would be taken for a list.
                let place = if file.starts_with('{') { "./" } else { "" };
                self.access.push((id, format!("--tls-access-list={place}{file}").into()));
            }
            "tls-creds-psk" => {
                return Err(format!(
                    "--object {kind} is not supported, because the TLS library (rustls) has no pre-shared keys: use tls-creds-x509, with a \
                     certificate for each client and verify-peer=on"
                ));
            }
            "tls-creds-anon" => {
                return Err(format!(
                    "--object {kind} is not supported, because the TLS library (rustls) has no anonymous credentials: use tls-creds-x509, with \
                     verify-peer=off where clients have no certificates"
                ));
            }
            kind => {
                return Err(format!(
                    "--object {kind} is not supported: the kinds are secret, tls-creds-x509, authz-simple, authz-list and authz-list-file"
                ));
            }
        }
        Ok(false)
    }

    /// Whether there are certificates among them.
    pub(crate) fn has_certificates(&self) -> bool {
        !self.certificates.is_empty()
    }

    /// The certificates of this name, for a server or for a client.
    fn find(&self, wanted: &str, is_for_server: bool) -> Result<&Certificates, String> {
        let failed = |why: String| format!("Failed to get TLS creds: {why}");
        let found = self.certificates.iter().find(|one| one.id == wanted);
        let found = found.ok_or_else(|| failed(format!("No TLS credentials with id '{wanted}'")))?;
        if found.is_for_server != is_for_server {
            let side = if is_for_server { "server" } else { "client" };
            return Err(failed(format!("Expecting TLS credentials with a {side} endpoint")));
        }
        Ok(found)
    }

    /// The options of `vellum serve` for these certificates, and for the access list of this name.
    pub(crate) fn of_server(&self, wanted: &str, authz: Option<&str>) -> Result<Vec<OsString>, String> {
        let found = self.find(wanted, true)?;
        let mut ours: Vec<OsString> =
            vec!["--tls=require".into(), format!("--tls-certificates={}", found.dir).into()];
        if found.verifies {
            ours.push("--tls-verify-peer".into());
        }
        if let Some(authz) = authz {
            let access = self.access.iter().find(|(id, _)| id == authz).ok_or_else(|| {
                format!(
                    "--tls-authz {authz}: there is no --object authz-simple, authz-list or authz-list-file with this id"
                )
            })?;
            if !found.verifies {
                return Err(format!(
                    "--tls-authz {authz} needs verify-peer=on: without it clients show no certificate, and everybody would be let in"
                ));
            }
            ours.push(access.1.clone());
        }
        Ok(ours)
    }

    /// The certificates of this name, for an image at an NBD server. A Unix socket has no name of its own.
    pub(crate) fn of_image(
        &self,
        wanted: &str,
        host: Option<&str>,
        is_unix: bool,
    ) -> Result<TlsChoice, String> {
        let found = self.find(wanted, false)?;
        if found.verifies && host.is_none() && is_unix {
            return Err("No hostname for certificate validation: add tls-hostname=NAME".to_owned());
        }
        Ok(TlsChoice {
            directory: Some(found.dir.clone().into()),
            hostname: host.map(str::to_owned).filter(|_| found.verifies),
            is_unverified: !found.verifies,
        })
    }

    /// The options of `vellum export list` for these certificates. A Unix socket has no name of its own.
    pub(crate) fn of_client(
        &self,
        wanted: &str,
        host: Option<&str>,
        is_unix: bool,
    ) -> Result<Vec<OsString>, String> {
        let found = self.find(wanted, false)?;
        if found.verifies && host.is_none() && is_unix {
            return Err("No hostname for certificate validation".to_owned());
        }
        let mut ours: Vec<OsString> = vec![format!("--tls-certificates={}", found.dir).into()];
        match (found.verifies, host) {
            (false, _) => ours.push("--tls-unverified".into()),
            (true, Some(host)) => ours.push(format!("--tls-hostname={host}").into()),
            (true, None) => {}
        }
        Ok(ours)
    }
}

/// The keys of an object that were not recognised.
struct Keys(Vec<(String, String)>);

impl Keys {
    /// The kind of an object, and its keys.
    fn of(text: &str) -> Result<(String, Self), String> {
        let mut keys = Self(Vec::new());
        if text.starts_with('{') {
            let value: Map<String, Value> = serde_json::from_str(text)
                .map_err(|error| format!("--object: this is no JSON object: {error}"))?;
            keys.add("", &Value::Object(value))?;
            let kind = keys.required("qom-type")?;
            return Ok((kind, keys));
        }
        let (kind, rest) = text.split_once(',').unwrap_or((text, ""));
        keys.0 = split_options(&[rest.to_owned()]).map_err(|error| error.chain())?;
        Ok((kind.strip_prefix("qom-type=").unwrap_or(kind).to_owned(), keys))
    }

    /// The same keys as they are written without JSON.
    fn add(&mut self, name: &str, value: &Value) -> Result<(), String> {
        let below = |key: &str| if name.is_empty() { key.to_owned() } else { format!("{name}.{key}") };
        match value {
            Value::Object(map) => map.iter().try_for_each(|(key, value)| self.add(&below(key), value)),
            Value::Array(all) => {
                all.iter().enumerate().try_for_each(|(at, value)| self.add(&below(&at.to_string()), value))
            }
            Value::String(text) => {
                self.0.push((name.to_owned(), text.clone()));
                Ok(())
            }
            Value::Bool(is_on) => {
                self.0.push((name.to_owned(), if *is_on { "on" } else { "off" }.to_owned()));
                Ok(())
            }
            Value::Null | Value::Number(_) => Err(format!("Invalid parameter type for '{name}'")),
        }
    }

    /// The value of a key; the last one counts.
    fn take(&mut self, wanted: &str) -> Option<String> {
        let mut found = None;
        self.0.retain_mut(|(key, value)| {
            let is_it = key == wanted;
            if is_it {
                found = Some(std::mem::take(value));
            }
            !is_it
        });
        found
    }

    fn required(&mut self, wanted: &str) -> Result<String, String> {
        self.take(wanted).ok_or_else(|| format!("Parameter '{wanted}' is missing"))
    }

    fn switch(&mut self, wanted: &str, default: bool) -> Result<bool, String> {
        match self.take(wanted).as_deref() {
            None => Ok(default),
            Some("on" | "yes" | "true" | "y") => Ok(true),
            Some("off" | "no" | "false" | "n") => Ok(false),
            Some(_) => Err(format!("Parameter '{wanted}' expects 'on' or 'off'")),
        }
    }

    fn end(&self) -> Result<(), String> {
        self.0.first().map_or(Ok(()), |(key, _)| Err(format!("Parameter '{key}' is unexpected")))
    }

    /// The list that these keys have, as JSON.
    fn access_list(&mut self) -> Result<Value, String> {
        let policy = self.take("policy").unwrap_or_else(|| "deny".to_owned());
        let one_of = |name: &str, value: String, all: [&str; 2]| {
            if all.contains(&value.as_str()) { Ok(value) } else { Err(not_accepted(name, &value)) }
        };
        let policy = one_of("policy", policy, ["allow", "deny"])?;
        let mut rules = Vec::new();
        while self.0.iter().any(|(key, _)| key.starts_with("rules.")) {
            let at = format!("rules.{}", rules.len());
            if !self.0.iter().any(|(key, _)| key.starts_with(&format!("{at}."))) {
                return Err(format!("Parameter '{at}' missing"));
            }
            let names = self.required(&format!("{at}.match"))?;
            let verdict = one_of("policy", self.required(&format!("{at}.policy"))?, ["allow", "deny"])?;
            let format = self.take(&format!("{at}.format")).unwrap_or_else(|| "exact".to_owned());
            let format = one_of("format", format, ["exact", "glob"])?;
            if let Some((key, _)) = self.0.iter().find(|(key, _)| key.starts_with(&format!("{at}."))) {
                return Err(format!("Parameter '{key}' is unexpected"));
            }
            rules.push(json!({ "match": names, "policy": verdict, "format": format }));
        }
        Ok(json!({ "policy": policy, "rules": rules }))
    }
}

fn not_accepted(name: &str, value: &str) -> String {
    format!("Parameter '{name}' does not accept value '{value}'")
}

/// An option of ours with its value.
pub(crate) fn with_value(option: &str, value: &OsStr) -> OsString {
    let mut text = OsString::from(option);
    text.push("=");
    text.push(value);
    text
}
