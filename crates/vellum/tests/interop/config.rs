//! The properties of an image: the parameters of the matrix, which combinations are legal, and a small set of
//! them that contains every legal pair of values.
//!
//! A configuration is a row of digits, one for each parameter. The pairs are found greedily: of all legal
//! rows the one with the most pairs that are not yet covered comes next, the first of them where there are
//! several. So the set is the same everywhere, and a few dozen rows replace tens of thousands.

use std::collections::BTreeSet;
use std::fmt;

/// How clusters that QEMU compresses are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packing {
    None,
    Zlib,
    Zstd,
}

/// Where guest data is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DataFile {
    /// In the image.
    None,
    /// In a file of its own.
    Plain,
    /// In a file of its own that reads as the disk does.
    Raw,
}

/// One kind of image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    pub cluster: u64,
    pub refcount_bits: u32,
    pub subclusters: bool,
    pub packing: Packing,
    pub lazy: bool,
    pub version: u32,
    /// Images below.
    pub depth: usize,
    /// The lowest image is raw.
    pub raw_base: bool,
    /// The names of backing files start at the root.
    pub absolute: bool,
    /// The image below is longer than the disk; otherwise shorter.
    pub long_base: bool,
    pub data_file: DataFile,
    pub snapshots: bool,
    /// The disk does not end with a cluster.
    pub odd: bool,
    /// Vellum writes it with a journal.
    pub journal: bool,
}

const CLUSTERS: [u64; 4] = [512, 4096, 65_536, 2 << 20];
const REFCOUNTS: [u32; 4] = [1, 8, 16, 64];
const PACKINGS: [Packing; 3] = [Packing::None, Packing::Zlib, Packing::Zstd];
const DEPTHS: [usize; 4] = [0, 1, 2, 10];
const DATA_FILES: [DataFile; 3] = [DataFile::None, DataFile::Plain, DataFile::Raw];

const PARAMETERS: usize = 14;
const LEVELS: [u8; PARAMETERS] = [4, 4, 2, 3, 2, 2, 4, 2, 2, 2, 3, 2, 2, 2];

type Row = [u8; PARAMETERS];

impl Config {
    fn of(row: &Row) -> Self {
        let at = |parameter: usize| usize::from(row[parameter]);
        let on = |parameter: usize| row[parameter] == 1;
        Self {
            cluster: CLUSTERS[at(0)],
            refcount_bits: REFCOUNTS[at(1)],
            subclusters: on(2),
            packing: PACKINGS[at(3)],
            lazy: on(4),
            version: if on(5) { 2 } else { 3 },
            depth: DEPTHS[at(6)],
            raw_base: on(7),
            absolute: on(8),
            long_base: on(9),
            data_file: DATA_FILES[at(10)],
            snapshots: on(11),
            odd: on(12),
            journal: on(13),
        }
    }

    /// Whether QEMU makes such an image and can do to it what the matrix does.
    fn is_legal(&self) -> bool {
        let old = self.version == 2;
        let refuses = [
            // Version 2 has none of these.
            old && (self.refcount_bits != 16 || self.subclusters || self.lazy),
            old && (self.packing == Packing::Zstd || self.data_file != DataFile::None),
            self.subclusters && self.cluster < 16_384,
            // A snapshot shares clusters, which one bit cannot count.
            self.refcount_bits == 1 && self.snapshots,
            self.data_file != DataFile::None && (self.packing != Packing::None || self.snapshots),
            self.journal && (old || self.data_file != DataFile::None),
            // It would have to read as the disk does, and so hold the base.
            self.data_file == DataFile::Raw && self.depth > 0,
            // There is nothing below that could be called so.
            self.depth == 0 && (self.raw_base || self.absolute || self.long_base),
            // Disks are whole sectors.
            self.odd && self.cluster == 512,
        ];
        !refuses.contains(&true)
    }

    /// All configurations that are legal.
    pub fn all() -> Vec<Self> {
        legal_rows().iter().map(Self::of).collect()
    }

    /// A few, in which every two values that can meet do.
    pub fn pairs() -> Vec<Self> {
        let rows = legal_rows();
        let mut missing: BTreeSet<Pair> = rows.iter().flat_map(pairs_of).collect();
        let mut chosen = Vec::new();
        while !missing.is_empty() {
            let news = |row: &&Row| pairs_of(row).filter(|pair| missing.contains(pair)).count();
            // The first of the best: `max_by_key` would give the last.
            let best = rows.iter().rev().max_by_key(news).expect("what is missing is in some row");
            missing = missing.difference(&pairs_of(best).collect()).copied().collect();
            chosen.push(Self::of(best));
        }
        chosen
    }

    /// The size of the disk: a few tables, a few clusters.
    pub fn size(&self) -> usize {
        let size = match self.cluster {
            512 => 2 << 20,
            4096 => 5 << 20,
            65_536 => 8 << 20,
            _ => 20 << 20,
        };
        if self.odd { size - 1536 } else { size }
    }

    /// Its description for `-o`, without the files.
    pub fn options(&self) -> String {
        let switch = |on| if on { "on" } else { "off" };
        let mut options = format!("cluster_size={}", self.cluster);
        if self.version == 2 {
            return options + ",compat=0.10";
        }
        options += &format!(
            ",compat=1.1,refcount_bits={},extended_l2={},lazy_refcounts={}",
            self.refcount_bits,
            switch(self.subclusters),
            switch(self.lazy)
        );
        match self.packing {
            Packing::Zstd => options += ",compression_type=zstd",
            Packing::Zlib => options += ",compression_type=zlib",
            Packing::None => {}
        }
        options
    }
}

impl fmt::Display for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "v{} cluster={} refcount_bits={}", self.version, self.cluster, self.refcount_bits)?;
        let words = [
            (self.subclusters, "extended_l2"),
            (self.packing == Packing::Zlib, "zlib"),
            (self.packing == Packing::Zstd, "zstd"),
            (self.lazy, "lazy"),
            (self.data_file == DataFile::Plain, "data_file"),
            (self.data_file == DataFile::Raw, "raw data_file"),
            (self.snapshots, "snapshots"),
            (self.odd, "odd size"),
            (self.journal, "journal"),
        ];
        for (_, word) in words.iter().filter(|(is_so, _)| *is_so) {
            write!(f, " {word}")?;
        }
        if self.depth > 0 {
            let base = if self.raw_base { "raw" } else { "qcow2" };
            let name = if self.absolute { "absolute" } else { "relative" };
            let reach = if self.long_base { "longer" } else { "shorter" };
            write!(f, " over {} ({base} at the bottom, {name} names, {reach})", self.depth)?;
        }
        Ok(())
    }
}

/// Two parameters and their values.
type Pair = (usize, u8, usize, u8);

fn pairs_of(row: &Row) -> impl Iterator<Item = Pair> {
    let row = *row;
    (0..PARAMETERS).flat_map(move |a| (a + 1..PARAMETERS).map(move |b| (a, row[a], b, row[b])))
}

fn legal_rows() -> Vec<Row> {
    let mut rows = Vec::new();
    let mut row: Row = [0; PARAMETERS];
    loop {
        if Config::of(&row).is_legal() {
            rows.push(row);
        }
        // The next row, as an odometer counts.
        let Some(wheel) = (0..PARAMETERS).rev().find(|wheel| row[*wheel] + 1 < LEVELS[*wheel]) else {
            return rows;
        };
        row[wheel] += 1;
        row[wheel + 1..].fill(0);
    }
}

#[test]
fn the_pairs_cover_every_two_values_that_can_meet() {
    let rows = legal_rows();
    let wanted: BTreeSet<Pair> = rows.iter().flat_map(pairs_of).collect();
    let chosen = Config::pairs();
    let covered: BTreeSet<Pair> =
        rows.iter().filter(|row| chosen.contains(&Config::of(row))).flat_map(pairs_of).collect();
    assert_eq!(covered, wanted);
    assert!(chosen.len() <= 40 && chosen.iter().all(Config::is_legal), "{} rows", chosen.len());
    assert_eq!(chosen, Config::pairs(), "the set is always the same");
}
