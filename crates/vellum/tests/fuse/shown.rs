//! A disk as a file, a loop device over it, a file system on that: each removed again, whatever happened to
//! the test.

use std::path::{Path, PathBuf};

use super::support::program::{Ran, has, is_root, path_text, run, skipped};
use super::support::server::Server;

/// Whether FUSE is available; prints the reason if not.
pub fn is_here() -> bool {
    if !is_root() {
        skipped("mounting is root's");
    } else if !Path::new("/dev/fuse").exists() {
        skipped("there is no /dev/fuse");
    } else if let Err(why) = can_mount() {
        skipped(&format!("FUSE cannot be mounted here: {why}"));
    } else {
        return true;
    }
    false
}

/// A container may have the device, and not be allowed to mount. If no mount at all is allowed this one
/// cannot succeed; but if a tmpfs can be mounted, and a FUSE file cannot, the test has failed.
fn can_mount() -> Result<(), String> {
    let dir = super::support::dir::Dir::new("may-mount");
    let ran = run("mount", &["-t", "tmpfs", "-o", "size=64k", "tmpfs", &dir.text("")]);
    if ran.code != 0 {
        return Err(ran.err.trim().to_owned());
    }
    drop(run("umount", &[dir.text("")]));
    Ok(())
}

/// Whether loop devices and these programs are available; prints the reason if not.
pub fn has_loops_and(programs: &[&str]) -> bool {
    for program in [&["losetup", "mount", "umount"], programs].concat() {
        if !has(program) {
            skipped(&format!("{program} is not installed"));
            return false;
        }
    }
    if !Path::new("/dev/loop-control").exists() {
        skipped("there are no loop devices");
        return false;
    }
    true
}

/// A server that shows a disk as a file, beside NBD.
pub struct Shown {
    server: Option<Server>,
    pub file: PathBuf,
}

impl Shown {
    #[track_caller]
    pub fn start(file: &Path, arguments: &[&str]) -> Self {
        let server = Server::start(&[arguments, &["--fuse", path_text(file)]].concat());
        Self { server: Some(server), file: file.to_owned() }
    }

    /// How it ended, when it does not come up.
    pub fn try_start(file: &Path, arguments: &[&str]) -> Result<Self, Box<Ran>> {
        let server = Server::try_start(&[arguments, &["--fuse", path_text(file)]].concat())?;
        Ok(Self { server: Some(server), file: file.to_owned() })
    }

    pub fn server(&self) -> &Server {
        self.server.as_ref().expect("it runs")
    }

    /// Ends it in good order. Returns its output.
    #[track_caller]
    pub fn stop(mut self) -> String {
        let said = self.server.take().expect("it runs").stop().err;
        assert!(!is_mounted(&self.file), "{} is still mounted; {said}", self.file.display());
        said
    }

    /// Ends one in good order whose mount the test has removed; what is mounted there now is another's.
    /// Returns its output.
    #[track_caller]
    pub fn stop_elsewhere(mut self) -> String {
        self.file = PathBuf::new();
        self.server.take().expect("it runs").stop().err
    }

    /// Kills it. What was mounted stays so, without a server, as long as this is kept.
    pub fn kill(&mut self) {
        self.server.take().expect("it runs").kill();
    }
}

impl Drop for Shown {
    fn drop(&mut self) {
        drop(self.server.take());
        if is_mounted(&self.file) {
            drop(run("umount", &["-l", path_text(&self.file)]));
        }
    }
}

/// Whether something is mounted at a path.
pub fn is_mounted(path: &Path) -> bool {
    let table = std::fs::read_to_string("/proc/self/mountinfo").expect("the table of mounts");
    table.lines().any(|line| line.split(' ').nth(4) == Some(path_text(path)))
}

/// A loop device over a file.
pub struct Loop(pub String);

impl Loop {
    /// With O_DIRECT on request. Prints the reason if there is none.
    pub fn over(file: &Path, is_direct: bool) -> Option<Self> {
        let direct = if is_direct { "--direct-io=on" } else { "--direct-io=off" };
        let ran = run("losetup", &["--show", "-f", direct, path_text(file)]);
        if ran.code != 0 {
            skipped(&format!("no loop device: {}", ran.err.trim()));
            return None;
        }
        Some(Self(ran.out.trim().to_owned()))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        drop(run("losetup", &["-d", &self.0]));
    }
}

/// A file system that is mounted on a directory.
pub struct Tree(pub PathBuf);

impl Tree {
    #[track_caller]
    pub fn mount(device: &str, at: &Path) -> Self {
        std::fs::create_dir_all(at).expect("a directory");
        let ran = run("mount", &[device, path_text(at)]);
        assert_eq!(ran.code, 0, "mount {device}: {}", ran.err);
        Self(at.to_owned())
    }

    /// In good order: everything is written before it returns.
    #[track_caller]
    pub fn unmount(self) {
        let ran = run("umount", &[path_text(&self.0)]);
        assert_eq!(ran.code, 0, "umount: {}", ran.err);
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        if is_mounted(&self.0) {
            drop(run("umount", &["-l", path_text(&self.0)]));
        }
    }
}
