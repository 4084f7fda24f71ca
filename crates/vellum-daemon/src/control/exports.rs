//! Exports that are added and removed while others are served.
//!
//! ```text
//!   add      socket bound ► image opened, recovered ► exported ► front ends admitted     or nothing of it is left
//!   remove   flushed, unless broken ► no longer exported ► sessions end ► front ends get back their requests
//!            ► the image closed, with its last name
//! ```
//!
//! And those on which new images are put while they are served.

use std::path::Path;
use std::sync::Arc;

use futures_lite::future::{or, zip};
use serde_json::{Value, json};
use vellum_core::{Disk, Error, ErrorKind, Result, Url};
use vellum_export::nbd::View;
use vellum_io::{Address, Listener, clock};

use super::server::Control;
use super::{NewOverlay, Request};
use crate::flash::policy_of;
use crate::image::ImageOptions;
use crate::served::{IS_READ, Overlay, Served, put_on_top};
use crate::server::{send_away_when_broken, tell_what_may_be_missing, warn_if_open_to_all};
use crate::spec::{ExportSpec, VhostSpec, parse_address};
use vellum_layer::valve::RateLimits;

impl Control {
    pub(super) fn export_list(&self) -> Value {
        let of = |disk: &Arc<Served>| {
            let stats = disk.stats(&self.exports);
            let one = |name: &String| {
                json!({
                    "name": name,
                    "image": stats.image,
                    "virtual-size": stats.virtual_size,
                    "read-only": disk.disk().geometry().read_only,
                    "state": stats.state,
                    "connections": self.exports.sessions(name).unwrap_or(0),
                })
            };
            stats.exports.iter().map(one).collect::<Vec<_>>()
        };
        json!(self.disks.all().iter().flat_map(of).collect::<Vec<_>>())
    }

    pub(super) async fn export_add(&self, request: &Request) -> Result<Value> {
        let Request::ExportAdd { name, image, format, read_only, vhost_user_blk, nbd, limits, flash_policy } =
            request
        else {
            return Err(Error::invalid("an export-add request was expected"));
        };
        let nbd = nbd.as_deref().map(parse_address).transpose()?;
        let socket = match &nbd {
            Some(Address::Unix(path)) => Some(path),
            _ => None,
        };
        let is_remote = |path: &Path| path.to_str().is_some_and(|text| Url::parse(text).is_some());
        for path in [Some(image), vhost_user_blk.as_ref(), socket].into_iter().flatten() {
            let is_named = path.is_absolute() || path == image && is_remote(path);
            if !is_named {
                return Err(Error::invalid(format!("{} must be an absolute path", path.display())));
            }
        }
        // The options with which the server opened its images at the start, except those of a single image.
        let options = self.spec.image.clone();
        let options = ImageOptions {
            format: format.as_ref().map(|format| format.parse()).transpose()?.or(options.format),
            read_only: read_only.unwrap_or(options.read_only),
            // A medium that is open for what is left of it is not written.
            salvages: options.salvages && (read_only.unwrap_or(options.read_only) || !options.read_only),
            ..options
        };
        let limits = limits.iter().flatten().map(|(name, number)| (name.as_str(), *number));
        let export = ExportSpec {
            name: name.clone(),
            path: image.clone(),
            description: image
                .file_name()
                .map(|name| name.to_string_lossy().into_owned())
                .unwrap_or_default(),
            rate_limits: RateLimits::of(limits)?,
            image: options,
            hydration: self.spec.hydration.clone(),
            flash_policy: flash_policy.as_deref().map(policy_of).transpose()?.or(self.spec.flash_policy),
            bitmaps: Vec::new(),
        };
        if self.exports.sessions(name).is_some() {
            return Err(Error::new(ErrorKind::Locked, format!("an export named {name:?} already exists")));
        }
        let listener = match &nbd {
            Some(address) => {
                warn_if_open_to_all(address, self.spec.tls.as_ref());
                let listener = Listener::bind(address).await?;
                self.spec.rights.give_to(listener.address())?;
                Some(listener)
            }
            None => None,
        };
        let mut sockets = Vec::new();
        if let Some(path) = vhost_user_blk {
            let spec = VhostSpec {
                export: Some(name.clone()),
                path: path.clone(),
                queues: self.spec.queues,
                takes_unsealed: self.spec.vhost.iter().any(|spec| spec.takes_unsealed),
            };
            sockets.push(self.devices.bind(&spec, std::slice::from_ref(&export)).await?.1);
        }
        let (served, is_new) = match self.disks.add(export).await {
            Ok(added) => added,
            Err(error) => {
                sockets.iter().for_each(|socket| self.devices.forget(*socket));
                return Err(error);
            }
        };
        self.seats.count();
        if is_new {
            if served.may_miss_writes().await {
                tell_what_may_be_missing(&self.spec, &served.shown());
            }
            send_away_when_broken(&served, &self.clients);
        }
        self.devices.begin(&served, &sockets);
        if let Some(listener) = listener.filter(|_| !self.shutdown.is_requested()) {
            let view = View { names: Some(vec![name.clone()]), on_demand: self.spec.export_snapshots };
            self.accepting
                .begin(Some((served.number(), name.clone())), self.door.showing(view).accept(listener));
        }
        Ok(json!({ "name": name, "virtual-size": served.disk().geometry().size }))
    }

    /// Puts new images on top of disks.
    pub(super) async fn snapshot_external(&self, overlays: &[NewOverlay]) -> Result<Value> {
        let mut all = Vec::with_capacity(overlays.len());
        for NewOverlay { disk, image, format } in overlays {
            let format = format.as_deref().map(str::parse).transpose()?;
            all.push((self.disks.find(disk.as_deref())?, Overlay { path: image.clone(), format }));
        }
        if all.is_empty() {
            return Err(Error::invalid("name at least one new image"));
        }
        let done = put_on_top(&all).await?;
        let mut facts = Vec::with_capacity(done.len());
        for ((served, _), done) in all.iter().zip(done) {
            let fast = self.spec.fast.as_ref().filter(|_| done.has_fast);
            facts.push(json!({
                "exports": served.names(),
                "image": done.image,
                "format": done.format.to_string(),
                "backing-filename": done.below,
                "held-us": u64::try_from(done.held.as_micros()).unwrap_or(u64::MAX),
                "key-slots-left": done.slots_left,
                "fast": fast.map(|fast| fast.display().to_string()),
            }));
        }
        Ok(json!({ "overlays": facts }))
    }

    pub(super) async fn export_remove(&self, name: &str, force: bool, lose_unflushed: bool) -> Result<Value> {
        let served = self.disks.find(Some(name))?;
        let removing = served.begin_removing(name)?;
        let is_last = removing.is_last();
        if is_last && served.is_held() {
            return Err(
                served.in_use("it is also served as a file or a block device, which must be stopped first")
            );
        }
        let mut _nobody_comes = None;
        if !force {
            match self.exports.suspend_unused(&[name.to_owned()]) {
                Ok(suspended) => _nobody_comes = Some(suspended),
                Err(clients) => {
                    let who = if clients == 1 {
                        "1 client is".to_owned()
                    } else {
                        format!("{clients} clients are")
                    };
                    let why = format!("{who} connected to {name:?}; use --force to disconnect them");
                    return Err(Error::new(ErrorKind::Locked, why));
                }
            }
        }
        // The last name has been taken: no other client can begin to read a snapshot.
        if is_last && !force && served.is_read_beside().await {
            return Err(served.in_use(&format!("{IS_READ}; use --force to disconnect it")));
        }
        // While its clients are still connected and can be notified.
        if is_last && !lose_unflushed {
            served.has_room_for_what_was_answered().await?;
        }
        // Requests that wait at a paused disk would wait forever.
        if is_last {
            served.open_for_good();
        }
        let id = (served.number(), name.to_owned());
        let ended = async {
            self.accepting.end(Some(&id)).await;
            zip(self.devices.drained(Some(&id)), removing.end_export(&self.exports)).await;
            removing.is_gone();
            match is_last {
                true => self.disks.end_one(&served).await,
                false => Ok(()),
            }
        };
        let late = async {
            clock().sleep(self.spec.drain_time).await;
            let hangs = served.what_hangs().unwrap_or_default();
            tracing::warn!("the export {name:?} cannot be stopped yet: {hangs}");
            std::future::pending().await
        };
        let ended = or(ended, late).await;
        self.seats.count();
        ended?;
        Ok(json!({ "name": name, "closed": is_last }))
    }
}
