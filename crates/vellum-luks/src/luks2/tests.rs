//! Headers of version 2: made here, damaged, and with what is refused.

use serde_json::json;
use vellum_core::ErrorKind::{self, Corrupt, Unsupported};
use vellum_core::Random;

use super::*;

const COPY: usize = 16 << 10;
const SALT: &str = "AAECAwQFBgcICQoLDA0ODw==";

/// A copy of a header at this place, with this JSON.
fn copy(at: u64, sequence: u64, json: &Value) -> Vec<u8> {
    let mut bytes = vec![0; COPY];
    bytes[..6].copy_from_slice(MAGICS[usize::from(at != 0)]);
    bytes[7] = 2;
    bytes[8..16].copy_from_slice(&(COPY as u64).to_be_bytes());
    bytes[16..24].copy_from_slice(&sequence.to_be_bytes());
    bytes[72..78].copy_from_slice(b"sha256");
    bytes[168..180].copy_from_slice(b"a-name\0 junk");
    bytes[256..264].copy_from_slice(&at.to_be_bytes());
    let json = json.to_string();
    bytes[PREAMBLE_LEN..][..json.len()].copy_from_slice(json.as_bytes());
    put_checksum(&mut bytes);
    bytes
}

fn good() -> Value {
    let slot = |at: u64, kdf: Value| {
        json!({
            "type": "luks2", "key_size": 32, "af": { "type": "luks1", "stripes": 4000, "hash": "sha256" },
            "area": { "type": "raw", "encryption": "aes-xts-plain64", "key_size": 32, "offset": at.to_string(), "size": "131072" },
            "kdf": kdf,
        })
    };
    json!({
        "keyslots": {
            "0": slot(32768, json!({ "type": "pbkdf2", "hash": "sha256", "iterations": 1000, "salt": SALT })),
            "1": slot(163_840, json!({ "type": "argon2id", "memory": 32, "time": 4, "cpus": 4, "salt": SALT })),
        },
        "tokens": {},
        "segments": { "0": {
            "type": "crypt", "offset": "294912", "size": "dynamic", "iv_tweak": "0", "encryption": "aes-xts-plain64",
            "sector_size": 4096,
        } },
        "digests": { "0": {
            "type": "pbkdf2", "keyslots": ["0", "1"], "segments": ["0"], "hash": "sha256", "iterations": 1000, "salt": SALT,
            "digest": "AAECAwQFBgcICQoLDA0ODwABAgMEBQYHCAkKCwwNDg8=",
        } },
        "config": { "json_size": "12288", "keyslots_size": "262144" },
    })
}

/// As it is, with another value at this place.
fn with(path: &str, value: Value) -> Value {
    let mut json = good();
    let (parent, name) = path.rsplit_once('/').unwrap();
    json.pointer_mut(parent).unwrap().as_object_mut().unwrap().insert(name.to_owned(), value);
    json
}

fn parse(json: &Value) -> Result<Header2> {
    Header2::parse(&copy(0, 1, json), 0)
}

#[test]
fn both_copies_are_read() {
    let header = parse(&good()).unwrap();
    assert_eq!((header.sequence(), header.uuid(), header.cipher()), (1, "a-name", "aes-128"));
    let second = Header2::parse(&copy(COPY as u64, 7, &good()), COPY as u64).unwrap();
    assert_eq!(second.sequence(), 7);
    assert_eq!(
        (header.segment().at, header.segment().len, header.segment().sector_bytes),
        (294_912, None, 4096)
    );
    assert_eq!(header.slots()[1].material(), Some((163_840, 128_000)));
    let names: Vec<_> = header.slots().iter().map(|slot| slot.kdf().unwrap().name()).collect();
    assert_eq!(names, ["pbkdf2", "argon2id"]);
    header.check_work().unwrap();
}

#[test]
fn a_copy_counts_with_its_checksum_at_its_place() {
    let good = copy(0, 1, &good());
    for at in [20, 170, 300, 4096, COPY - 1] {
        let mut damaged = good.clone();
        damaged[at] ^= 1;
        assert_eq!(Header2::parse(&damaged, 0).unwrap_err().kind(), Corrupt, "{at}");
    }
    for len in [0, 100, 4095, 4096, COPY - 1] {
        assert_eq!(Header2::parse(&good[..len], 0).unwrap_err().kind(), Corrupt, "{len}");
    }
    assert!(Header2::parse(&good, COPY as u64).is_err(), "the other magic");
    let bad = |at: usize, bytes: &[u8], kind: ErrorKind, what: &str| {
        let mut damaged = good.clone();
        damaged[at..at + bytes.len()].copy_from_slice(bytes);
        put_checksum(&mut damaged);
        let error = Header2::parse(&damaged, 0).expect_err(what);
        assert!(error.kind() == kind && error.chain().contains(what), "{}", error.chain());
    };
    bad(7, &[3], Unsupported, "version 3");
    bad(8, &[0xFF; 8], Corrupt, "impossible");
    bad(8, &[0; 8], Corrupt, "impossible");
    bad(256, &[1], Corrupt, "impossible");
    bad(72, b"sha512", Unsupported, "sha256");
    bad(4096, b"[", Corrupt, "JSON");
    bad(4096, b"[]\0", Corrupt, "segments");
    bad(4096, &[b'['; 5000], Corrupt, "JSON");
}

#[test]
fn what_makes_the_data_another_is_refused_by_name() {
    let refused = |path: &str, value: Value, kind: ErrorKind, what: &str| {
        let error = parse(&with(path, value)).expect_err(what);
        assert!(error.kind() == kind && error.chain().contains(what), "{path}: {}", error.chain());
    };
    let wanted = |name: &str| json!({ "mandatory": [name] });
    refused(
        "/config/requirements",
        wanted("online-reencrypt-v2"),
        Unsupported,
        "reencryption is not finished",
    );
    refused("/config/requirements", wanted("inline-hw-tags"), Unsupported, "inline-hw-tags");
    // What is no list may name something all the same.
    for requirements in [
        json!("online-reencrypt-v2"),
        json!(["online-reencrypt-v2"]),
        json!(null),
        json!(1),
        json!({ "mandatory": "online-reencrypt-v2" }),
        json!({ "mandatory": { "online-reencrypt-v2": true } }),
        json!({ "mandatory": null }),
        json!({ "mandatory": [["online-reencrypt-v2"]] }),
    ] {
        refused("/config/requirements", requirements, Corrupt, "its requirements are not a list of names");
    }
    for requirements in [json!({}), json!({ "mandatory": [] })] {
        parse(&with("/config/requirements", requirements)).expect("nothing is required");
    }
    refused("/segments/0/flags", json!("backup-final"), Corrupt, "flags");
    refused("/segments/1", json!({ "type": "linear" }), Unsupported, "2 segments");
    refused("/segments/0/flags", json!(["backup-final"]), Unsupported, "reencrypted");
    refused("/segments/0/integrity", json!({ "type": "hmac(sha256)" }), Unsupported, "hmac(sha256)");
    refused("/segments/0/type", json!("hw-opal-crypt"), Unsupported, "hw-opal-crypt");
    refused("/segments/0/encryption", json!("serpent-xts-plain64"), Unsupported, "serpent");
    refused("/segments/0/encryption", json!("aes-cbc-plain64"), Unsupported, "sectors of 4096");
    refused("/segments/0/sector_size", json!(8192), Corrupt, "8192");
    refused("/segments/0/sector_size", json!("512"), Corrupt, "sector_size");
    refused("/segments/0/offset", json!("4096"), Corrupt, "place of the data");
    refused("/segments/0/offset", json!("294912000000000000000"), Corrupt, "offset");
    refused("/segments/0/offset", json!("163840"), Corrupt, "overlaps the data");
    refused("/segments/0/size", json!("513"), Corrupt, "place of the data");
    refused("/segments/0/size", json!("18446744073709547520"), Corrupt, "place of the data");
    refused("/segments/0/iv_tweak", json!(0), Corrupt, "iv_tweak");
    refused("/keyslots/0/area/offset", json!("0"), Corrupt, "overlaps the header");
    refused("/keyslots/1/area/offset", json!("32768"), Corrupt, "another slot");
    refused("/keyslots/99", json!({}), Corrupt, "number of a key slot");
    let mut many = good();
    for id in 0..40 {
        many["keyslots"][format!("0{id}")] = json!({});
    }
    assert!(parse(&many).unwrap_err().chain().contains("42 key slots"));
    for name in ["keyslots", "segments", "digests"] {
        let mut json = good();
        json.as_object_mut().unwrap().remove(name);
        assert!(parse(&json).map(|header| header.slots()[0].trouble().is_some()).unwrap_or(true), "{name}");
    }
}

/// A slot that cannot be used says why, and the other one is used.
#[test]
fn a_slot_that_cannot_be_used_is_left_out() {
    let troubles = [
        ("/keyslots/0/type", json!("reencrypt"), "reencrypt"),
        ("/keyslots/0/key_size", json!(33), "33 bytes"),
        ("/keyslots/0/af/stripes", json!(2), "4000 stripes"),
        ("/keyslots/0/af/hash", json!("whirlpool"), "whirlpool"),
        ("/keyslots/0/area/size", json!("127999"), "too small"),
        ("/keyslots/0/area/encryption", json!("aes-lrw-benbi"), "lrw"),
        ("/keyslots/0/kdf/iterations", json!(0), "no iterations"),
        ("/keyslots/0/kdf/iterations", json!(u32::MAX), "iterations"),
        ("/keyslots/0/kdf/iterations", json!(u64::MAX), "iterations"),
        ("/keyslots/0/kdf/salt", json!("AAEC"), "salt"),
        ("/keyslots/0/kdf/salt", json!("!"), "salt"),
        ("/keyslots/0/kdf/type", json!("scrypt"), "memory"),
        ("/digests/0/keyslots", json!(["1"]), "not for the data"),
        ("/digests/0/segments", json!(["3"]), "not for the data"),
    ];
    for (path, value, what) in troubles {
        let header = parse(&with(path, value)).unwrap_or_else(|error| panic!("{path}: {}", error.chain()));
        let why = header.slots()[0].trouble().expect(what);
        assert!(why.contains(what), "{path}: {why}");
        assert_eq!(header.slots()[0].material(), None);
    }
    for (memory, time, cpus, what) in [
        (u32::MAX, 1, 1, "of memory"),
        ((4 << 20) + 1, 1, 1, "of memory"),
        (4 << 20, 1000, 1, "passes"),
        (32, u32::MAX, 1, "passes"),
        (32, 4, 5, "lanes"),
        (7, 1, 1, "impossible"),
        (32, 0, 1, "impossible"),
        (32, 4, 0, "impossible"),
    ] {
        let kdf = json!({ "type": "argon2id", "memory": memory, "time": time, "cpus": cpus, "salt": SALT });
        let header = parse(&with("/keyslots/1/kdf", kdf)).unwrap();
        let why = header.slots()[1].trouble().expect(what);
        assert!(why.contains(what), "{memory} {time} {cpus}: {why}");
        assert!(header.slots()[0].trouble().is_none());
    }
}

#[test]
fn the_work_of_all_slots_is_bounded() {
    let mut json = good();
    let slot = json["keyslots"]["1"].clone();
    for id in 0..8_u64 {
        let mut slot = slot.clone();
        slot["kdf"]["memory"] = json!(4 << 20);
        slot["area"]["offset"] = json!((32768 + id * 131_072).to_string());
        slot["kdf"]["time"] = json!(8);
        json["keyslots"][id.to_string()] = slot;
    }
    json["digests"]["0"]["keyslots"] = json!(["0", "1", "2", "3", "4", "5", "6", "7"]);
    json["segments"]["0"]["offset"] = json!("16777216");
    let error = parse(&json).unwrap().check_work().unwrap_err();
    assert!(error.chain().contains("8 key slots"), "{}", error.chain());
}

/// A slot that is filled here, for each way of deriving a key.
#[test]
fn a_slot_opens_with_its_secret() {
    let secret = Secret::new(b"correct horse".to_vec()).unwrap();
    let mut key = vec![0; 32];
    Random::from_seed(1).fill(&mut key);
    let mut json = good();
    let salt = decode_base64(SALT.as_bytes()).unwrap();
    let digest = Hash::Sha256.derive(&key, &salt, 1000, 32);
    let base64 = |bytes: &[u8]| {
        const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        let mut text = String::new();
        for group in bytes.chunks(3) {
            let bits = group.iter().fold(0_u32, |bits, byte| bits << 8 | u32::from(*byte))
                << (8 * (3 - group.len()));
            for digit in 0..4 {
                let is_there = digit <= group.len();
                text.push(if is_there {
                    DIGITS[(bits >> (18 - 6 * digit)) as usize & 63] as char
                } else {
                    '='
                });
            }
        }
        text
    };
    json["digests"]["0"]["digest"] = json!(base64(&digest));
    for kind in ["argon2i", "argon2id"] {
        json["keyslots"]["1"]["kdf"]["type"] = json!(kind);
        let header = parse(&json).unwrap();
        for slot in header.slots() {
            let mut material = vec![0; 128_000];
            Random::from_seed(2).fill(&mut material);
            Hash::Sha256.split(&key, &mut material);
            let derived = slot.kdf().unwrap().derive(b"correct horse", 32).unwrap();
            SectorCipher::with_key(header.segment().mode, &derived).unwrap().encrypt(0, &mut material);
            let opened = slot.open(&material, &secret).unwrap().expect("the right one");
            assert_eq!(opened.bytes(), key);
            let wrong = Secret::new(b"correct hors".to_vec()).unwrap();
            assert!(slot.open(&material, &wrong).unwrap().is_none());
            material[5] ^= 1;
            assert!(slot.open(&material, &secret).unwrap().is_none());
            let cipher = header.segment().cipher(&opened).unwrap();
            assert_eq!(cipher.sector_bytes(), 4096);
        }
    }
}
