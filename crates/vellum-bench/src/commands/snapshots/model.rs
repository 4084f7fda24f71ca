//! The expected content of the disk and of each of its snapshots.
//!
//! A unit of the allocated part has one block, at its beginning, that contains the number of the unit and a
//! generation. Some units, the hot ones, get new generations between snapshots; the others stay.

use std::path::Path;

use vellum_core::{Error, Random, Result};
use vellum_lab::guest::{Guest, Request};

/// The units of the image.
pub(super) const UNIT_BYTES: u64 = 1 << 20;
const BLOCK: usize = 4096;
/// Reads and writes of one guest, of a view that is checked in full.
const GUESTS: u64 = 4;

/// What was written when.
pub(super) struct Model {
    units: u64,
    /// Which units are hot, and the first generation of all.
    hot: Vec<u64>,
    first: u64,
    /// Of each hot unit: from which snapshot on (by its number) it has which generation.
    history: Vec<Vec<(usize, u64)>>,
    next: u64,
}

fn block(unit: u64, generation: u64) -> [u8; BLOCK] {
    let mut bytes = [0; BLOCK];
    for (index, word) in bytes.chunks_exact_mut(8).enumerate() {
        let value = if index.is_multiple_of(2) { unit } else { generation };
        word.copy_from_slice(&value.to_be_bytes());
    }
    bytes
}

/// All units of a part of them, by several guests at once.
fn each_unit(
    socket: &Path,
    export: &str,
    units: u64,
    work: impl Fn(&mut Guest, u64) -> Result<()> + Sync,
) -> Result<()> {
    std::thread::scope(|scope| {
        let guests: Vec<_> = (0..GUESTS)
            .map(|number| {
                let work = &work;
                scope.spawn(move || {
                    let mut guest = Guest::connect_to(socket, export)?;
                    for unit in (number * units / GUESTS)..((number + 1) * units / GUESTS) {
                        work(&mut guest, unit)?;
                    }
                    guest.leave()
                })
            })
            .collect();
        guests.into_iter().try_for_each(|guest| guest.join().expect("a guest does not panic"))
    })
}

/// Writes the first generation of every unit.
pub(super) fn fill(socket: &Path, units: u64, generation: u64) -> Result<()> {
    each_unit(socket, "", units, |guest, unit| guest.write(unit * UNIT_BYTES, &block(unit, generation)))?;
    let mut guest = Guest::connect(socket)?;
    guest.ask(Request::Flush)?;
    guest.leave()
}

impl Model {
    /// All units have this generation.
    pub(super) fn new(units: u64, generation: u64, hot: u64, random: &mut Random) -> Self {
        let mut hot: Vec<u64> = (0..hot).map(|_| random.below(units)).collect();
        hot.sort_unstable();
        hot.dedup();
        let history = hot.iter().map(|_| vec![(0, generation)]).collect();
        Self { units, hot, first: generation, history, next: generation + 1 }
    }

    /// Writes new generations of some hot units, that the snapshot with this number is the first to see.
    pub(super) fn write(
        &mut self,
        guest: &mut Guest,
        random: &mut Random,
        writes: u64,
        snapshot: usize,
    ) -> Result<()> {
        for _ in 0..writes {
            let index = random.index(self.hot.len());
            let generation = self.next;
            self.next += 1;
            guest.write(self.hot[index] * UNIT_BYTES, &block(self.hot[index], generation))?;
            self.history[index].push((snapshot, generation));
        }
        Ok(())
    }

    fn generation(&self, index: usize, snapshot: usize) -> u64 {
        let until = self.history[index].partition_point(|(from, _)| *from <= snapshot);
        self.history[index][until - 1].1
    }

    /// Checks all hot units of a snapshot. Returns their number.
    pub(super) fn verify_hot(&self, socket: &Path, export: &str, snapshot: usize) -> Result<u64> {
        let mut guest = Guest::connect_to(socket, export)?;
        for (index, unit) in self.hot.iter().enumerate() {
            expect(&mut guest, export, *unit, self.generation(index, snapshot))?;
        }
        guest.leave()?;
        Ok(self.hot.len() as u64)
    }

    /// Checks all units of a snapshot. Returns their number.
    pub(super) fn verify_all(&self, socket: &Path, export: &str, snapshot: usize) -> Result<u64> {
        each_unit(socket, export, self.units, |guest, unit| {
            let generation = match self.hot.binary_search(&unit) {
                Ok(index) => self.generation(index, snapshot),
                Err(_) => self.first,
            };
            expect(guest, export, unit, generation)
        })?;
        Ok(self.units)
    }
}

fn expect(guest: &mut Guest, export: &str, unit: u64, generation: u64) -> Result<()> {
    if guest.read(unit * UNIT_BYTES, BLOCK)? == block(unit, generation) {
        return Ok(());
    }
    Err(Error::corrupt(format!("export {export:?}: unit {unit} has not generation {generation}")))
}
