//! A backup of a disk while it is served.
//!
//! ```text
//!   requests wait: the bitmap begins anew ► requests continue, and what was marked is copied
//!        ▲                                     │ much was written meanwhile: again
//!        └─────────────────────────────────────┤
//!                                              ▼ little was written
//!   requests wait: the bitmap begins anew ► what was marked is copied ► requests continue         the backup is of this moment
//! ```
//!
//! 1. The backup is what the disk was at one moment, between two requests: all that changed after it was copied is copied again, the last
//!    of it while no request runs.
//! 2. What is written from that moment on is marked for the next backup.
//! 3. A client that leaves before the backup has its name does not want it any more: it is given up, as if it had failed. Whether the
//!    client is there is asked before each piece, and last when the backup is durable and has only to be renamed.
//! 4. Requests wait as long as it takes to copy what was written during the round before: at most [`LAST_BYTES`], or after [`ROUNDS`]
//!    rounds whatever it is.

use vellum_core::{Context as _, Error, Result, SharedDisk};
use vellum_format::image::OpenBitmaps;

use super::{Served, Stage, Step};
use crate::backup::{BackedUp, Backup, Copying, Target, bitmaps_of, forget, refuse_plain_text_by_mistake};

/// This much may be copied while requests wait, in bytes.
const LAST_BYTES: u64 = 16 << 20;
/// After this many rounds all that is left is copied while requests wait.
const ROUNDS: usize = 6;

/// Marks again what was marked, unless the backup is made.
struct TakeBack<'a> {
    bitmaps: &'a dyn OpenBitmaps,
    name: &'a str,
    is_made: bool,
}

impl Drop for TakeBack<'_> {
    fn drop(&mut self) {
        if !self.is_made {
            self.bitmaps.take_back(self.name);
        }
    }
}

impl Served {
    /// Makes a backup of the disk, unless whoever wants it leaves before.
    pub(crate) async fn backup(&self, wish: &Backup, has_left: &dyn Fn() -> bool) -> Result<BackedUp> {
        let _step = self.begin(Step::Backup)?;
        let held = self.top().await?;
        let chain = held.0.as_ref().expect("it was looked at");
        if chain.flash().is_some() {
            return Err(Error::unsupported(format!(
                "{}: its flash cache may hold writes that are not marked yet: serve the disk without one for a backup",
                self.shown()
            )));
        }
        refuse_plain_text_by_mistake(chain, wish).context(|| self.shown())?;
        let bitmaps = bitmaps_of(chain)?;
        let source = chain.disk();
        let target = Target::make(wish, source.geometry().size).await?;
        let mut taken = TakeBack { bitmaps: &*bitmaps, name: &wish.bitmap, is_made: false };
        let mut done = BackedUp::default();
        let copied = self.copy_in_rounds(source, target.disk(), &*bitmaps, (wish, has_left), &mut done).await;
        let ended = match copied {
            Ok(()) => target.publish(has_left).await,
            Err(error) => Err(target.give_up(error).await),
        };
        if let Err(error) = ended {
            if has_left() {
                let (path, target) = (self.shown(), wish.target.display());
                tracing::warn!("the backup of {path} to {target} is given up, because its client has left");
            }
            return Err(error);
        }
        taken.is_made = true;
        forget(&*bitmaps, wish).await; // commit point
        Ok(done)
    }

    async fn copy_in_rounds(
        &self,
        source: &SharedDisk,
        target: &SharedDisk,
        bitmaps: &dyn OpenBitmaps,
        (wish, has_left): (&Backup, &dyn Fn() -> bool),
        done: &mut BackedUp,
    ) -> Result<()> {
        let is_stopped = || self.life().stage() != Stage::Serving || has_left();
        let copying = Copying { source, target, is_stopped: &is_stopped, progress: &|_, _| () };
        let mut is_first = true;
        for round in 0.. {
            let hold = self.hold_in_time().await?;
            let marked = bitmaps.begin_anew(&wish.bitmap);
            let is_all = std::mem::take(&mut is_first) && wish.before.is_none();
            let is_last = |bytes| !is_all && (bytes <= LAST_BYTES || round >= ROUNDS);
            match marked {
                Err(error) => {
                    hold.finish();
                    return Err(error);
                }
                Ok(marked) if is_last(marked.marked_bytes()) => {
                    let copied = copying.marked(&marked, done).await;
                    hold.finish();
                    return copied;
                }
                Ok(marked) => {
                    hold.finish();
                    match is_all {
                        true => copying.all(done).await?,
                        false => copying.marked(&marked, done).await?,
                    }
                }
            }
        }
        Ok(())
    }
}
