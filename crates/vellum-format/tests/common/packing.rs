//! A disk whose writes are compressed, where they have whole clusters.

use std::sync::Arc;

use vellum_core::{Buffer, Disk, GuestOffset, LocalFuture, Result, SharedDisk, WriteFlags};
use vellum_format::Qcow2;
use vellum_format::image::Compressing as _;
use vellum_sim::{ForwardDisk, Forwarding};

pub(crate) struct Packing(Arc<Qcow2>);

impl Packing {
    pub(crate) fn shared(inner: Arc<Qcow2>) -> SharedDisk {
        Forwarding::new(Self(inner))
    }

    async fn write_packed(&self, at: GuestOffset, mut data: Buffer) -> Result<()> {
        let span = at.span(data.len() as u64);
        let (mut whole, mut parts) = (Vec::new(), Vec::new());
        for piece in self.0.block().pieces_of(span) {
            let bytes = data.split_to(usize::try_from(piece.len()).unwrap());
            let is_last = piece.end().bytes() == self.0.geometry().size;
            match self.0.block().within(piece.start()) == 0
                && (is_last || piece.len() == self.0.block().bytes())
            {
                true => whole.push((piece.start(), bytes)),
                false => parts.push((piece.start(), bytes)),
            }
        }
        let packed = self.0.compress(whole, None).await?;
        self.0.write_compressed(packed).await?;
        for (at, bytes) in parts {
            self.0.write(at, bytes, WriteFlags::default()).await?;
        }
        Ok(())
    }
}

impl ForwardDisk for Packing {
    fn inner(&self) -> &dyn Disk {
        &*self.0
    }

    fn write(&self, at: GuestOffset, data: Buffer, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.write_packed(at, data).await?;
            if flags.fua { self.0.flush().await } else { Ok(()) }
        })
    }
}
