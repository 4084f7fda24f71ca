//! An image of the matrix with everything that belongs to it: the images below, its data file, its snapshots,
//! and what each of them must read as.

use std::path::{Path, PathBuf};

use vellum_core::Random;

use crate::config::{Config, DataFile, Packing};
use crate::support::dir::Dir;
use crate::support::program::{path_text, qemu_dump, qemu_io, succeed, vellum};
use crate::support::{first_difference, noise};

const SECTOR: usize = 512;

/// A file that must not change.
struct Fixed {
    path: PathBuf,
    bytes: Vec<u8>,
}

/// An image and what it must read as.
pub struct Image {
    pub dir: Dir,
    pub config: Config,
    pub path: PathBuf,
    pub model: Vec<u8>,
    /// Names of internal snapshots, and what they must read as.
    pub snapshots: Vec<(String, Vec<u8>)>,
    below: Vec<Fixed>,
    /// The name of the image below, as this one has it, and its format.
    base: Option<(String, &'static str)>,
    base_content: Vec<u8>,
}

impl Image {
    /// Made and filled by QEMU, with everything below it.
    pub fn made_by_qemu(config: Config, seed: u64) -> Self {
        let mut random = Random::from_seed(seed);
        let dir = Dir::new("interop");
        std::fs::create_dir(dir.join("below")).expect("a directory for the images below");
        std::fs::write(dir.join("noise"), noise(100_000, seed)).expect("a file of noise");
        let half: Vec<u8> = noise(70_001, seed + 1).iter().map(|byte| byte & 15).collect();
        std::fs::write(dir.join("half"), half).expect("a file that compresses to half");
        let mut image = Self {
            path: dir.join("image.qcow2"),
            dir,
            config,
            model: Vec::new(),
            snapshots: Vec::new(),
            below: Vec::new(),
            base: None,
            base_content: Vec::new(),
        };
        image.make_below(&mut random);
        image.create_with_qemu();
        image.compress(&mut random);
        image.scribble_with_qemu(&mut random, 40);
        for name in if config.snapshots { &["first", "second"][..] } else { &[] } {
            succeed("qemu-img", &["snapshot", "-c", name, path_text(&image.path)]);
            image.snapshots.push((name.to_string(), image.model.clone()));
            image.scribble_with_qemu(&mut random, 25);
        }
        if config.journal {
            let size = if seed.is_multiple_of(2) { "64k" } else { "1M" };
            vellum(&["journal", "enable", "--size", size, image.text()]).answer();
        }
        image
    }

    /// A new, empty image over the same images below, made by Vellum, in place of this one.
    pub fn made_anew_by_vellum(&mut self) {
        self.remove();
        let config = self.config;
        let mut options = config.options();
        if let Some(extra) = self.data_file_option() {
            options += &extra;
        }
        options += if config.journal { ",journal=on,journal_size=256k" } else { ",journal=off" };
        let mut arguments = vec!["create", "-q", "-f", "qcow2", "-o", &options];
        if let Some((name, format)) = &self.base {
            arguments.extend(["-b", name, "-F", format]);
        }
        let size = config.size().to_string();
        arguments.extend([path_text(&self.path), &size]);
        assert_eq!(vellum(&arguments).answer(), "", "quiet");
        self.snapshots.clear();
        self.model = resized(self.base_content.clone(), config.size());
    }

    fn remove(&self) {
        std::fs::remove_file(&self.path).expect("the image");
        if self.config.data_file != DataFile::None {
            std::fs::remove_file(self.data_file()).expect("its data file");
        }
    }

    pub fn data_file(&self) -> PathBuf {
        self.dir.join("image.data")
    }

    fn data_file_option(&self) -> Option<String> {
        let raw = match self.config.data_file {
            DataFile::None => return None,
            DataFile::Plain => "off",
            DataFile::Raw => "on",
        };
        Some(format!(",data_file={},data_file_raw={raw}", path_text(&self.data_file())))
    }

    /// The chain below, from the bottom up; every second image is longer than the one above it, the others
    /// shorter.
    fn make_below(&mut self, random: &mut Random) {
        let config = self.config;
        let size = config.size();
        for level in (1..=config.depth).rev() {
            let is_long = (level % 2 == 1) == config.long_base;
            let len = (if is_long { size / 4 * 5 } else { size / 5 * 3 }).next_multiple_of(SECTOR);
            let format = if config.raw_base && level == config.depth { "raw" } else { "qcow2" };
            let name = format!("{level}.{format}");
            let path = self.dir.join("below").join(&name);
            let mut arguments = vec!["create".to_owned(), "-q".into(), "-f".into(), format.into()];
            if format == "qcow2" {
                let cluster = [65_536, 4096, 512, 2 << 20][level % 4];
                arguments.extend(["-o".into(), format!("cluster_size={cluster}")]);
            }
            if let Some((name, format)) = &self.base {
                // Images below are beside each other.
                let name = name.strip_prefix("below/").unwrap_or(name);
                arguments.extend(["-b".into(), name.into(), "-F".into(), (*format).into()]);
            }
            arguments.extend([path_text(&path).to_owned(), len.to_string()]);
            succeed("qemu-img", &arguments);
            let mut model = resized(std::mem::take(&mut self.base_content), len);
            let commands = self.script(random, &mut model, 12, None);
            qemu_io(&["-f", format, path_text(&path)], &commands);
            let absolute = config.absolute;
            let name = if absolute { path_text(&path).to_owned() } else { format!("below/{name}") };
            self.base = Some((name, format));
            self.base_content = model;
            let bytes = std::fs::read(&path).expect("what was made");
            self.below.push(Fixed { path, bytes });
        }
        self.model = resized(self.base_content.clone(), size);
    }

    fn create_with_qemu(&self) {
        let options = self.config.options() + &self.data_file_option().unwrap_or_default();
        let size = self.config.size().to_string();
        let mut arguments = vec!["create", "-q", "-f", "qcow2", "-o", &options];
        if let Some((name, format)) = &self.base {
            arguments.extend(["-b", name, "-F", format]);
        }
        arguments.extend([path_text(&self.path), &size]);
        succeed("qemu-img", &arguments);
    }

    /// Clusters that QEMU stores compressed, which it does only where nothing is yet.
    fn compress(&mut self, random: &mut Random) {
        if self.config.packing == Packing::None {
            return;
        }
        let cluster = usize::try_from(self.config.cluster).expect("small");
        let count = self.model.len() / cluster;
        let mut commands = Vec::new();
        let mut done = Vec::new();
        for _ in 0..60.min(count / 2) {
            let at = random.index(count) * cluster;
            if done.contains(&at) {
                continue;
            }
            done.push(at);
            let source = self.source(random);
            source.write_to(&mut self.model[at..at + cluster]);
            commands.push(format!("write -c {} {at} {cluster}", source.arguments));
        }
        qemu_io(&["-f", "qcow2", path_text(&self.path)], &commands);
    }

    /// Random writes, zeros and discards by QEMU.
    pub fn scribble_with_qemu(&mut self, random: &mut Random, count: usize) {
        let mut model = std::mem::take(&mut self.model);
        let mut discarded = vec![false; model.len().div_ceil(SECTOR)];
        // QEMU does not pass a discard on to a raw data file, which then no longer reads as the disk.
        let keeps_up = self.config.data_file != DataFile::Raw;
        let may_discard = keeps_up && (self.config.version == 3 || self.config.depth == 0);
        let doubt = may_discard.then_some(&mut discarded[..]);
        let commands = self.script(random, &mut model, count, doubt);
        qemu_io(&["-f", "qcow2", path_text(&self.path)], &commands);
        let dump = qemu_dump(&self.path, "qcow2", None);
        // What was discarded may read as before or as zero. The rest is settled.
        for (sector, _) in discarded.iter().enumerate().filter(|(_, is_discarded)| **is_discarded) {
            let end = ((sector + 1) * SECTOR).min(model.len());
            for at in sector * SECTOR..end {
                model[at] = if dump[at] == 0 { 0 } else { model[at] };
            }
        }
        let config = self.config;
        assert_eq!(first_difference(&dump, &model), None, "{config}: QEMU reads its own image");
        self.model = model;
        self.check_surroundings();
    }

    fn source(&self, random: &mut Random) -> Source {
        let file = |name: &str| {
            let path = self.dir.join(name);
            let bytes = std::fs::read(&path).expect("the file");
            Source { arguments: format!("-s {}", path_text(&path)), bytes }
        };
        match random.below(3) {
            0 => file("noise"),
            1 => file("half"),
            _ => {
                let byte = u8::try_from(1 + random.below(255)).expect("a byte");
                Source { arguments: format!("-P {byte}"), bytes: vec![byte] }
            }
        }
    }

    /// Commands for `qemu-io`, applied to the model too. Discards are among them if the test wants to know
    /// which sectors were discarded and not written since.
    fn script(
        &self,
        random: &mut Random,
        model: &mut [u8],
        count: usize,
        mut discarded: Option<&mut [bool]>,
    ) -> Vec<String> {
        let cluster = usize::try_from(self.config.cluster).expect("small");
        let longest = (model.len() / 8).min(300_000);
        let mut commands = Vec::new();
        for _ in 0..count {
            let align = *random.pick(&[1, SECTOR, 4096, cluster]);
            let at = random.index(model.len()) / align * align;
            let len = (1 + random.index(longest)).next_multiple_of(align).min(model.len() - at);
            let touched = at / SECTOR..(at + len).div_ceil(SECTOR);
            match random.below(10) {
                0 | 1 => {
                    let unmap = if random.one_in(2) { "-u " } else { "" };
                    commands.push(format!("write -z {unmap}{at} {len}"));
                    model[at..at + len].fill(0);
                    settle(discarded.as_deref_mut().map(|doubt| &mut doubt[touched]), at, len);
                }
                2 if discarded.is_some() => {
                    commands.push(format!("discard {at} {len}"));
                    discarded.as_mut().expect("asked for")[touched].fill(true);
                }
                _ => {
                    let source = self.source(random);
                    commands.push(format!("write {} {at} {len}", source.arguments));
                    source.write_to(&mut model[at..at + len]);
                    settle(discarded.as_deref_mut().map(|doubt| &mut doubt[touched]), at, len);
                }
            }
        }
        commands
    }

    /// What belongs to the image and must not change has not.
    pub fn check_surroundings(&self) {
        let config = self.config;
        for file in &self.below {
            let now = std::fs::read(&file.path).expect("an image below");
            assert!(now == file.bytes, "{config}: {} was changed", file.path.display());
        }
        if config.data_file == DataFile::Raw {
            let data = std::fs::read(self.data_file()).expect("the data file");
            // QEMU makes it as long as whole clusters are.
            let difference = first_difference(&data[..self.model.len()], &self.model);
            assert_eq!(difference, None, "{config}: the raw data file");
        }
    }

    pub fn text(&self) -> &str {
        path_text(&self.path)
    }
}

/// What `qemu-io` writes.
struct Source {
    arguments: String,
    /// Repeated as often as needed.
    bytes: Vec<u8>,
}

impl Source {
    fn write_to(&self, target: &mut [u8]) {
        for (byte, source) in target.iter_mut().zip(self.bytes.iter().cycle()) {
            *byte = *source;
        }
    }
}

/// Sectors that are written whole are as they were written; one that is written in part keeps its doubt.
fn settle(sectors: Option<&mut [bool]>, at: usize, len: usize) {
    let Some(sectors) = sectors else { return };
    let (first, last) = (0, sectors.len() - 1);
    for (index, doubt) in sectors.iter_mut().enumerate() {
        let begins_within = index == first && !at.is_multiple_of(SECTOR);
        let ends_within = index == last && !(at + len).is_multiple_of(SECTOR);
        *doubt &= begins_within || ends_within;
    }
}

/// As a longer or shorter disk above would read it.
fn resized(mut bytes: Vec<u8>, len: usize) -> Vec<u8> {
    bytes.resize(len, 0);
    bytes
}

/// The file's bytes.
pub fn content(path: &Path) -> Vec<u8> {
    std::fs::read(path).expect("a file that was written")
}
