//! The participants of a case, and one turn of one of them.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use vellum_core::{Context, Result};
use vellum_lab::programs;
use vellum_lab::server::{Cache, Vellum};

use super::cases::{Case, Disk};
use super::way::{Program, Served, Serving, Way};
use crate::images::{self, Image, Images};
use crate::load::fio::{self, Engine};
use crate::load::pattern::Pattern;
use crate::load::{Sample, Timing, vhost};

/// A disk without mapped clusters is this much larger than a mapped one, so that it does not become mapped.
const FRESH_TIMES: u64 = 128;

/// Our own format is zoned.
const NATIVE: &str = "vellum";
const NATIVE_OPTIONS: [&str; 2] = ["-o", "layout=zoned"];

/// A participant of a case.
#[derive(Debug, Clone)]
pub(super) struct Entrant {
    pub(super) name: String,
    program: Program,
    /// Its image is of our own format, whatever that of the others.
    is_native: bool,
}

impl Entrant {
    fn new(program: &Program) -> Self {
        Self { name: program.name(), program: program.clone(), is_native: false }
    }
}

/// What all turns share.
pub(super) struct Setting {
    pub(super) images: Images,
    /// The mapped image of our own format.
    native: PathBuf,
    pub(super) maker: Vellum,
    pub(super) programs: Vec<Program>,
    pub(super) size: u64,
    pub(super) timing: Timing,
}

impl Setting {
    pub(super) fn make(
        dir: &Path,
        maker: Vellum,
        programs: Vec<Program>,
        size: u64,
        window: Duration,
    ) -> Result<Self> {
        let images = Images::make(dir, size, &maker.path)?;
        let native = images.dir().join("disk.vlm");
        let mut convert = Command::new(&maker.path);
        convert.args(["convert", "-q", "-f", "raw", "-O", NATIVE]).args(NATIVE_OPTIONS);
        programs::run(convert.arg(images.path(Image::Raw)).arg(&native))?;
        images::prepare(&native, false)?;
        let timing = Timing { warm_up: (window / 5).min(Duration::from_millis(300)), window };
        Ok(Self { images, native, maker, programs, size, timing })
    }

    /// Those that can take part in a case, ours first, the program that the others are compared with last.
    pub(super) fn entrants(&self, case: &Case) -> Vec<Entrant> {
        let is_raw = case.disk == Disk::Mapped(Image::Raw);
        let mut entrants: Vec<Entrant> = Vec::new();
        for program in &self.programs {
            let takes_part = match program {
                Program::Vellum(_) => true,
                Program::StorageDaemon => case.way != Way::Nbd,
                Program::QemuNbd => case.way == Way::Nbd,
                Program::Nbdkit => case.way == Way::Nbd && is_raw && case.cache == Cache::Buffered,
                Program::Nobody => case.way == Way::Vhost && is_raw,
            };
            if takes_part {
                entrants.push(Entrant::new(program));
            }
            if matches!(program, Program::Vellum(_)) && !is_raw {
                let name = format!("{}, zoned", program.name());
                entrants.push(Entrant { name, is_native: true, ..Entrant::new(program) });
            }
        }
        entrants
    }

    /// The image of a turn, ready, its format and the size of the disk.
    fn image(&self, entrant: &Entrant, case: &Case) -> Result<(PathBuf, &'static str, u64)> {
        let Disk::Mapped(image) = case.disk else {
            let (format, options) =
                if entrant.is_native { (NATIVE, &NATIVE_OPTIONS[..]) } else { ("qcow2", &[][..]) };
            let (path, size) = (self.images.dir().join("fresh"), self.size * FRESH_TIMES);
            let mut create = Command::new(&self.maker.path);
            create.args(["create", "-q", "-f", format]).args(options).arg(&path).arg(size.to_string());
            programs::run(&mut create)?;
            return Ok((path, format, size));
        };
        let (path, format) = match entrant.is_native {
            true => (self.native.clone(), NATIVE),
            false if matches!(entrant.program, Program::Nobody) => (self.alone()?, image.format()),
            false => (self.images.path(image), image.format()),
        };
        images::prepare(&path, case.cache == Cache::Buffered)?;
        Ok((path, format, self.size))
    }

    /// A file of fio's own: what it writes has no tags, and others would miss them.
    fn alone(&self) -> Result<PathBuf> {
        let path = self.images.dir().join("alone.raw");
        if !path.exists() {
            let copied = std::fs::copy(self.images.path(Image::Raw), &path);
            copied.context(|| format!("can't make {}", path.display()))?;
            images::prepare(&path, false)?;
        }
        Ok(path)
    }

    pub(super) fn take_turn(&self, entrant: &Entrant, case: &Case, round: u32) -> Result<Sample> {
        let (image, format, size) = self.image(entrant, case)?;
        let sample = self.serve(entrant, case, round, (&image, format, size))?;
        match case.load.pattern {
            // It is many small pieces, and the next one should not wait for them.
            Pattern::Allocate => drop(std::fs::remove_file(&image)),
            Pattern::Overwrite | Pattern::Mixed => images::settle(&image)?,
            Pattern::Read | Pattern::Sequential => {}
        }
        Ok(sample)
    }

    fn serve(
        &self,
        entrant: &Entrant,
        case: &Case,
        round: u32,
        (image, format, size): (&Path, &str, u64),
    ) -> Result<Sample> {
        let window = self.timing.window;
        if matches!(entrant.program, Program::Nobody) {
            let engine = Engine::Alone { file: image, direct: case.cache == Cache::Direct };
            return fio::run_load(None, engine, &case.load, window);
        }
        let at = self.images.dir().join("served");
        let (way, cache, queues) = (case.way, case.cache, case.load.queues);
        let served =
            Served::start(&entrant.program, &Serving { way, image, format, cache, at: &at, size, queues })?;
        let pid = served.pid();
        let sample = match way {
            Way::Vhost => vhost::run(pid, &at, size, &case.load, self.timing, u64::from(round))?,
            Way::Fuse => fio::run_load(Some(pid), Engine::File(&at), &case.load, window)?,
            Way::Nbd => fio::run_load(Some(pid), Engine::Nbd(&at), &case.load, window)?,
        };
        served.stop()?;
        Ok(sample)
    }
}
