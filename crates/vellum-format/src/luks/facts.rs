//! The facts of an encrypted image, under the names that QEMU uses.

use vellum_luks::{Header, IvRule, Mode, SLOTS};

use crate::image::Fact;

/// The facts from a header.
pub(crate) fn facts(header: &Header) -> Vec<(&'static str, Fact)> {
    let (chaining, rule) = match header.mode() {
        Mode::Xts(rule) => ("xts", rule),
        Mode::Cbc(rule) => ("cbc", rule),
    };
    let mut facts: Vec<(&'static str, Fact)> = vec![(
        "ivgen-alg",
        match rule {
            IvRule::Plain => "plain",
            IvRule::Plain64 => "plain64",
            IvRule::Essiv(_) => "essiv",
        }
        .into(),
    )];
    if let IvRule::Essiv(hash) = rule {
        facts.push(("ivgen-hash-alg", hash.name().into()));
    }
    facts.extend([
        ("detached-header", false.into()),
        ("hash-alg", header.hash().name().into()),
        ("cipher-alg", header.cipher().into()),
        ("uuid", header.uuid().into()),
        ("cipher-mode", chaining.into()),
        ("slots", Fact::List((0..SLOTS).map(|slot| slot_facts(header, slot)).collect())),
        ("payload-offset", header.payload().into()),
        ("master-key-iters", u64::from(header.digest_iterations()).into()),
    ]);
    facts
}

fn slot_facts(header: &Header, slot: usize) -> Fact {
    let iterations = header.slot_iterations(slot);
    let mut facts: Vec<(&'static str, Fact)> = vec![("active", iterations.is_some().into())];
    facts.extend(iterations.map(|iterations| ("iters", u64::from(iterations).into())));
    facts.push(("key-offset", header.material(slot).0.into()));
    facts.extend(iterations.map(|_| ("stripes", 4000_u64.into())));
    Fact::Group(facts)
}
