//! Units that guests read often come to the fast medium of their disk, while they are at work.
//!
//! ```text
//!   every second    hot units? ─► a few of them are promoted ─► guests at work: rest, 24 times as long
//!                       │                 └── no room: cold ones that came for their heat go back, once
//!   every 10 min    heat fades ─► the heat file
//! ```
//!
//! 1. What a guest reads and writes comes first: the pace is that of prefetching (`vellum_layer::hydrate`), with its pauses
//!    when a medium is slow.
//! 2. While the disk is paused, or exchanged for another one, nothing is promoted: the chain is held from the look at the
//!    valve until a round is over.
//! 3. The task never waits for the chain: a step that has it may wait for the end of the task.
//! 4. The heat file, `.heat` behind the image's name, is a hint. One that is missing, damaged or old costs promotions.
//!
//! Left out: an image on a block device has no heat file.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use vellum_core::{Error, Random, Result};
use vellum_format::fast::{Promotion, Reason, Tiers};
use vellum_io::clock;
use vellum_layer::hydrate::{Pace, PrefetchLimits, Side, rest_after};
use vellum_layer::valve;

use super::Served;
use crate::pins::{heat_of, keep_heat};

/// How often to look for hot units.
const EVERY: Duration = Duration::from_secs(1);
/// How long it may take to notice that the task is to end.
const STEP: Duration = Duration::from_millis(50);
/// How often heat is halved.
const AGE: Duration = Duration::from_secs(600);
/// Units and bytes that are promoted together, at most.
const UNITS_AT_ONCE: u64 = 16;
const BYTES_AT_ONCE: u64 = 4 << 20;
/// How long to wait after an error.
const AFTER_ERROR: Duration = Duration::from_secs(60);

/// What the task knows from one round to the next.
struct Warming {
    pace: Pace,
    chance: Random,
    aged: Duration,
    has_failed: bool,
    /// What was looked at last. Its heat is kept at the end.
    tier: Option<Weak<dyn Tiers>>,
}

/// The task of a disk whose heat is counted.
pub(super) async fn warm(served: &Served, has_ended: &AtomicBool) {
    let now = clock().now();
    let mut warming = Warming {
        pace: Pace::new(PrefetchLimits::default(), now),
        // Disks are not to pause in step.
        chance: Random::from_seed(served.number() as u64 ^ u64::from(std::process::id()) << 32),
        aged: now,
        has_failed: false,
        tier: None,
    };
    let mut wait = Duration::ZERO;
    while sleep(wait, has_ended).await {
        wait = match warming.round(served).await {
            Ok(wait) => wait,
            Err(error) => {
                if !std::mem::replace(&mut warming.has_failed, true) {
                    let path = served.shown();
                    tracing::warn!(
                        "{path}: nothing comes to its fast medium for its heat now: {}",
                        error.chain()
                    );
                }
                AFTER_ERROR
            }
        };
    }
    let heat = warming.tier.and_then(|tier| tier.upgrade()?.heat());
    if let Some(heat) = heat
        && let Err(error) = keep_heat(&served.canonical(), heat).await
    {
        tracing::warn!("{}: its heat is lost: {}", served.shown(), error.chain());
    }
}

/// Whether the task goes on afterwards.
async fn sleep(time: Duration, has_ended: &AtomicBool) -> bool {
    let until = clock().now() + time;
    while !has_ended.load(Ordering::Acquire) {
        let now = clock().now();
        if now >= until {
            return true;
        }
        clock().sleep(STEP.min(until - now)).await;
    }
    false
}

/// A round that is under way.
struct Round<'a>(&'a AtomicBool);

impl<'a> Round<'a> {
    fn begin(is_warming: &'a AtomicBool) -> Self {
        is_warming.store(true, Ordering::Release);
        Self(is_warming)
    }
}

impl Drop for Round<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl Warming {
    /// Returns how long to wait for the next one.
    async fn round(&mut self, served: &Served) -> Result<Duration> {
        if served.tiering.want_alone.load(Ordering::Acquire) > 0 {
            return Ok(EVERY);
        }
        let Some(chain) = served.chain.try_read() else { return Ok(EVERY) };
        let _round = Round::begin(&served.tiering.is_warming);
        let Some(tier) = chain.as_ref().and_then(|chain| chain.tier()) else { return Ok(EVERY) };
        let is_known = |known: &Weak<dyn Tiers>| std::ptr::addr_eq(known.as_ptr(), Arc::as_ptr(tier));
        if !self.tier.as_ref().is_some_and(is_known) {
            // The disk was opened a moment ago.
            self.tier = Some(Arc::downgrade(tier));
            tier.count_heat();
            if let Some(heat) = heat_of(&served.canonical()).await?
                && !tier.take_up_heat(&heat)
            {
                tracing::debug!("{}: its heat file is not of this disk, or damaged", served.shown());
            }
        }
        let now = clock().now();
        if now.saturating_sub(self.aged) >= AGE {
            self.aged = now;
            tier.age_heat();
            if let Some(heat) = tier.heat() {
                keep_heat(&served.canonical(), heat).await?;
            }
        }
        let is_ready = self.pace.ready_at() <= now && served.valve.state() == valve::State::Running;
        let unit = tier.unit_bytes().max(1);
        let most = usize::try_from((BYTES_AT_ONCE / unit).clamp(1, UNITS_AT_ONCE)).expect("a few");
        let hot = if is_ready { tier.hot(most) } else { Vec::new() };
        if hot.is_empty() {
            return Ok(EVERY);
        }
        let requests = served.requests();
        let bytes = hot.iter().map(|span| span.len()).sum();
        for side in [Side::Base, Side::Image] {
            self.pace.begin(side, bytes, now);
        }
        let promoted = promote(&**tier, &hot).await;
        let done = clock().now();
        for side in [Side::Base, Side::Image] {
            self.pace.end(side, bytes, done);
        }
        self.pace.look(done, &mut self.chance);
        let is_full = !promoted?;
        self.has_failed = false;
        Ok(match (is_full, served.requests() == requests) {
            (true, _) => EVERY,
            (false, true) => Duration::ZERO,
            (false, false) => rest_after(done.saturating_sub(now)),
        })
    }
}

/// Promotes units for their heat. Where there is no room, cold ones make some. Whether all found room.
async fn promote(tier: &dyn Tiers, hot: &[vellum_core::GuestSpan]) -> Result<bool, Error> {
    let promotion = Promotion { ranges: hot.to_vec(), reason: Reason::Heat, copies_base: false };
    let done = tier.promote(promotion.clone()).await?;
    if done.no_room == 0 {
        return Ok(true);
    }
    let cold = tier.cold(hot.len());
    if cold.is_empty() {
        return Ok(false);
    }
    tier.demote(&cold).await?;
    Ok(tier.promote(promotion).await?.no_room == 0)
}
