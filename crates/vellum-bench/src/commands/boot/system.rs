//! The system that boots: Debian with systemd, a web server and the like, on one ext4 file system, made once and kept.
//!
//! Kernel and initramfs lie beside the disk, as QEMU's `-kernel` wants them. All else that a boot reads it reads from the disk:
//! modules, libraries, programs, configuration. When the last service is up, a unit prints [`UP`] on the console and switches the
//! machine off.

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use vellum_core::{Context, Error, ErrorKind, Result};
use vellum_lab::programs;
use vellum_lab::server::first_line_of;

/// What the guest prints when it is up.
pub(crate) const UP: &str = "guest: up";

const RELEASE: &str = "bookworm";
const PACKAGES: &str = "systemd-sysv,udev,dbus,linux-image-cloud-amd64,initramfs-tools,openssh-server,python3,nginx-light,cron,\
                        rsyslog,iproute2,ifupdown";
const DISK_BYTES: u64 = 2 << 30;

const UNIT: &str = "[Unit]\n\
                    Description=Say that the system is up\n\
                    After=nginx.service ssh.service cron.service rsyslog.service\n\
                    [Service]\n\
                    Type=idle\n\
                    ExecStart=/bin/sh -c 'echo guest: up >/dev/ttyS0; systemctl poweroff --force --no-wall'\n";

/// The files of a system.
pub(crate) struct System {
    pub(crate) disk: PathBuf,
    pub(crate) kernel: PathBuf,
    pub(crate) initramfs: PathBuf,
}

impl System {
    fn in_dir(dir: &Path) -> Self {
        let [disk, kernel, initramfs] = ["disk.raw", "vmlinuz", "initrd.img"].map(|name| dir.join(name));
        Self { disk, kernel, initramfs }
    }

    /// The one in this directory. If there is none it is made; `Unsupported` says what that lacks.
    pub(crate) fn get(dir: &Path, say: impl Fn(&str)) -> Result<Self> {
        let system = Self::in_dir(dir);
        if system.disk.exists() {
            return Ok(system);
        }
        for (program, version) in [("mmdebstrap", "--version"), ("mke2fs", "-V")] {
            let there = first_line_of(Command::new(program).arg(version));
            there.map_err(|error| Error::new(ErrorKind::Unsupported, error.chain()))?;
        }
        if !rustix::process::geteuid().is_root() {
            return Err(Error::unsupported("only root can make the root file system of the guest"));
        }
        fs::create_dir_all(dir).context(|| format!("can't make {}", dir.display()))?;
        say(&format!("making {} with mmdebstrap, which takes some minutes", dir.display()));
        let root = dir.join("root");
        drop(fs::remove_dir_all(&root));
        let made = system.make(&root);
        drop(fs::remove_dir_all(&root));
        made.map(|()| system)
    }

    fn make(&self, root: &Path) -> Result<()> {
        let mut debstrap = Command::new("mmdebstrap");
        debstrap.args(["--quiet", "--mode=root", "--variant=minbase", "--format=directory"]);
        debstrap.arg(format!("--include={PACKAGES}")).arg(RELEASE).arg(root);
        programs::run(&mut debstrap)?;
        let add = || {
            let units = root.join("etc/systemd/system");
            fs::write(units.join("vellum-report.service"), UNIT)?;
            fs::create_dir_all(units.join("multi-user.target.wants"))?;
            symlink("../vellum-report.service", units.join("multi-user.target.wants/vellum-report.service"))?;
            fs::write(root.join("etc/fstab"), "/dev/vda / ext4 defaults 0 1\n")?;
            for entry in fs::read_dir(root.join("boot"))? {
                let path = entry?.path();
                let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                match name {
                    name if name.starts_with("vmlinuz-") => fs::copy(&path, &self.kernel)?,
                    name if name.starts_with("initrd.img-") => fs::copy(&path, &self.initramfs)?,
                    _ => 0,
                };
            }
            Ok::<_, std::io::Error>(())
        };
        add().context(|| format!("can't finish {}", root.display()))?;
        // It gets its name only when it is whole.
        let unfinished = self.disk.with_extension("unfinished");
        let file = File::create(&unfinished).and_then(|file| file.set_len(DISK_BYTES));
        file.context(|| format!("can't make {}", unfinished.display()))?;
        programs::run(
            Command::new("mke2fs").args(["-q", "-F", "-t", "ext4", "-d"]).arg(root).arg(&unfinished),
        )?;
        fs::rename(&unfinished, &self.disk).context(|| format!("can't name {}", self.disk.display()))
    }
}
