//! A copy-on-write clone of a template: created, written, closed, opened again and read. The template stays
//! as it was.

#![expect(clippy::print_stdout, reason = "an example shows what it does")]

use std::fs;

use vellum_disk::{Buffer, GuestOffset, Image, IoMode, Result, WriteFlags, run};

pub(crate) fn main() -> Result<()> {
    let dir = std::env::temp_dir().join(format!("vellum-clone-template-{}", std::process::id()));
    fs::create_dir_all(&dir).expect("a temporary directory");
    let (template, clone) = (dir.join("template.raw"), dir.join("clone.qcow2"));
    fs::write(&template, vec![b't'; 1 << 20]).expect("a template");

    // `run` makes this thread a worker. Its futures stay here, and are polled to their end.
    run(IoMode::Auto, async || {
        let image = Image::clone_of(&template, &clone).await?;
        println!("created a clone of {} bytes", image.size());
        let hello = Buffer::copy_of(b"hello");
        image.disk().write(GuestOffset::new(4096), hello, WriteFlags::default()).await?;
        image.disk().flush().await?;
        image.close().await?;
        println!("wrote 5 bytes at 4096 and closed it");

        let image = Image::options().read_only().open(&clone).await?;
        let found = image.disk().read(GuestOffset::new(4094), Buffer::for_overwrite(9)).await?.to_vec();
        image.close().await?;
        assert_eq!(found, b"tthellott", "the clone's own bytes between those of the template");
        println!("read {:?} at 4094", String::from_utf8_lossy(&found));
        Ok(())
    })??;

    let untouched = fs::read(&template).expect("the template").iter().all(|byte| *byte == b't');
    assert!(untouched, "a clone never writes its template");
    println!("the template is as it was");
    fs::remove_dir_all(&dir).expect("the directory of the example");
    Ok(())
}
