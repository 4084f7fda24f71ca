//! The distinguished name of a certificate's subject, as text: to log it, and to look it up in an access list.
//!
//! ```text
//!   C=GB,O=Example\, Inc,OU=Backup,CN=host-7        in the order of the certificate, values escaped as RFC 4514 has it
//!   1.2.3.4=#0c0568656c6c6f                         an attribute without a name: its number, and its value in hexadecimal digits
//! ```
//!
//! 1. The certificate was verified before, by rustls; the parser that finds the subject in it is the one that verified it (webpki). What is
//!    taken apart here is the name alone, bytes that the authority has signed.
//! 2. The text is the one that GnuTLS gives (`gnutls_x509_crt_get_dn`), because access lists that are written for QEMU have it: names of
//!    attributes, order, escapes. Two different names have two different texts: whatever could end a value is escaped.
//! 3. Lengths are checked against the bytes that are there. What cannot be parsed has no name, and is in no list; nor has a subject that
//!    is empty, or in which a value is, as GnuTLS has it.
//!
//! Source: RFC 5280, 4.1.2.4; RFC 4514, 2; X.690 for the encoding.

use std::fmt::Write as _;

use rustls::pki_types::CertificateDer;

/// The longest name that is logged, in characters.
const LOGGED_MAX: usize = 256;
/// No name that is longer, in bytes, is taken apart.
const NAME_BYTES_MAX: usize = 64 << 10;

const SEQUENCE: u8 = 0x30;
const SET: u8 = 0x31;
const OBJECT_ID: u8 = 0x06;
const UTF8: u8 = 0x0C;
const NUMERIC: u8 = 0x12;
const PRINTABLE: u8 = 0x13;
const TELETEX: u8 = 0x14;
const IA5: u8 = 0x16;
const UNIVERSAL: u8 = 0x1C;
const BMP: u8 = 0x1E;

/// The kinds of string that most attributes may have.
const DIRECTORY: &[u8] = &[TELETEX, PRINTABLE, UNIVERSAL, UTF8, BMP];

/// The attributes that have a name, by their numbers, and the kinds of string that they may have.
const ATTRIBUTES: [(&str, &str, &[u8]); 37] = [
    ("2.5.4.3", "CN", DIRECTORY),
    ("2.5.4.4", "surName", DIRECTORY),
    ("2.5.4.5", "serialNumber", &[PRINTABLE]),
    ("2.5.4.6", "C", &[PRINTABLE]),
    ("2.5.4.7", "L", DIRECTORY),
    ("2.5.4.8", "ST", DIRECTORY),
    ("2.5.4.9", "street", DIRECTORY),
    ("2.5.4.10", "O", DIRECTORY),
    ("2.5.4.11", "OU", DIRECTORY),
    ("2.5.4.12", "title", DIRECTORY),
    ("2.5.4.13", "description", DIRECTORY),
    ("2.5.4.15", "businessCategory", DIRECTORY),
    ("2.5.4.17", "postalCode", DIRECTORY),
    ("2.5.4.20", "telephoneNumber", &[PRINTABLE]),
    ("2.5.4.41", "name", DIRECTORY),
    ("2.5.4.42", "givenName", DIRECTORY),
    ("2.5.4.43", "initials", DIRECTORY),
    ("2.5.4.44", "generationQualifier", DIRECTORY),
    ("2.5.4.46", "dnQualifier", &[PRINTABLE]),
    ("2.5.4.65", "pseudonym", DIRECTORY),
    ("0.9.2342.19200300.100.1.1", "UID", DIRECTORY),
    ("0.9.2342.19200300.100.1.25", "DC", &[IA5]),
    ("1.2.840.113549.1.9.1", "EMAIL", &[IA5]),
    ("1.2.840.113549.1.9.20", "1.2.840.113549.1.9.20", &[BMP]),
    ("1.2.840.113556.1.4.656", "userPrincipalName", DIRECTORY),
    ("1.2.643.100.1", "OGRN", &[NUMERIC]),
    ("1.2.643.100.3", "SNILS", &[NUMERIC]),
    ("1.2.643.100.5", "OGRNIP", &[NUMERIC]),
    ("1.2.643.3.131.1.1", "INN", &[NUMERIC]),
    ("1.3.6.1.4.1.311.60.2.1.1", "jurisdictionOfIncorporationLocalityName", DIRECTORY),
    ("1.3.6.1.4.1.311.60.2.1.2", "jurisdictionOfIncorporationStateOrProvinceName", DIRECTORY),
    ("1.3.6.1.4.1.311.60.2.1.3", "jurisdictionOfIncorporationCountryName", &[PRINTABLE]),
    ("1.3.6.1.5.5.7.8.5", "XmppAddr", &[UTF8]),
    ("1.3.6.1.5.5.7.9.2", "placeOfBirth", DIRECTORY),
    ("1.3.6.1.5.5.7.9.3", "gender", &[PRINTABLE]),
    ("1.3.6.1.5.5.7.9.4", "countryOfCitizenship", &[PRINTABLE]),
    ("1.3.6.1.5.5.7.9.5", "countryOfResidence", &[PRINTABLE]),
];

/// The subject of a certificate in DER; `None` where it cannot be parsed, or has nothing in it.
pub(super) fn distinguished_name(certificate: &[u8]) -> Option<String> {
    let certificate = CertificateDer::from(certificate);
    let certificate = webpki::EndEntityCert::try_from(&certificate).ok()?;
    let subject = certificate.subject();
    let text = (subject.len() <= NAME_BYTES_MAX).then(|| text_of(subject)).flatten();
    text.filter(|text| !text.is_empty())
}

/// The same as it is logged: nothing that a terminal would obey, and not long.
pub(super) fn subject(certificate: &[u8]) -> Option<String> {
    distinguished_name(certificate).map(|name| loggable(&name))
}

/// A name as it is logged: as an access list has it, but for control characters.
pub(super) fn loggable(name: &str) -> String {
    let mut text = String::new();
    for letter in name.chars().take(LOGGED_MAX) {
        match letter.is_control() {
            true => text.extend(letter.escape_debug()),
            false => text.push(letter),
        }
    }
    text
}

/// The text of the relative names that lie one after the other.
fn text_of(names: &[u8]) -> Option<String> {
    let mut names = Der(names);
    let mut text = String::new();
    while !names.0.is_empty() {
        let mut pairs = Der(names.expect(SET)?);
        let mut separator = if text.is_empty() { "" } else { "," };
        while !pairs.0.is_empty() {
            let mut pair = Der(pairs.expect(SEQUENCE)?);
            let number = dotted(pair.expect(OBJECT_ID)?)?;
            let whole = pair.0;
            let (kind, value) = pair.next()?;
            if !pair.0.is_empty() {
                return None;
            }
            let known = ATTRIBUTES.iter().find(|(its, ..)| *its == number);
            let name = known.map_or(number.as_str(), |(_, name, _)| name);
            let value = known
                .filter(|(_, _, kinds)| kinds.contains(&kind))
                .and_then(|_| string_of(kind, value))
                .map_or_else(|| hexadecimal(whole), |value| escaped(&value));
            if value.is_empty() {
                return None;
            }
            write!(text, "{separator}{name}={value}").expect("to memory");
            separator = "+";
        }
    }
    Some(text)
}

/// What a string of this kind says; `None` if it cannot be told.
fn string_of(kind: u8, bytes: &[u8]) -> Option<String> {
    let text = match kind {
        // GnuTLS does not decode these. What it has in their place is escaped like a text.
        UNIVERSAL => hexadecimal(bytes),
        TELETEX if !bytes.is_ascii() => hexadecimal(bytes),
        BMP => {
            let units = bytes.chunks_exact(2).map(|pair| u16::from_be_bytes([pair[0], pair[1]]));
            let text: Option<String> = char::decode_utf16(units).map(Result::ok).collect();
            text.filter(|_| bytes.len().is_multiple_of(2)).unwrap_or_else(|| hexadecimal(bytes))
        }
        _ => std::str::from_utf8(bytes).ok()?.to_owned(),
    };
    (!text.contains('\0')).then_some(text)
}

/// A value in which nothing can be taken for the end of it.
fn escaped(value: &str) -> String {
    let mut text = String::with_capacity(value.len());
    let last = value.len().wrapping_sub(1);
    for (at, letter) in value.char_indices() {
        let is_special = matches!(letter, ',' | '+' | '"' | '\\' | '<' | '>' | ';')
            || (at == 0 && letter == '#')
            || ((at == 0 || at == last) && letter == ' ');
        if is_special {
            text.push('\\');
        }
        text.push(letter);
    }
    text
}

fn hexadecimal(bytes: &[u8]) -> String {
    let mut text = String::from("#");
    for byte in bytes {
        write!(text, "{byte:02x}").expect("to memory");
    }
    text
}

/// The number of an attribute, with dots.
fn dotted(bytes: &[u8]) -> Option<String> {
    let mut numbers = Vec::new();
    let mut number = 0_u64;
    let mut is_inside = false;
    for byte in bytes {
        // A number has no zeros ahead.
        if !is_inside && *byte == 0x80 {
            return None;
        }
        number = number.checked_mul(128)? | u64::from(byte & 0x7F);
        is_inside = byte & 0x80 != 0;
        if !is_inside {
            numbers.push(std::mem::take(&mut number));
        }
    }
    let (first, rest) = numbers.split_first().filter(|_| !is_inside)?;
    // The first two are one.
    let (root, second) = match first {
        0..40 => (0, *first),
        40..80 => (1, first - 40),
        _ => (2, first - 80),
    };
    let mut text = format!("{root}.{second}");
    for number in rest {
        write!(text, ".{number}").expect("to memory");
    }
    Some(text)
}

/// Elements one after the other.
struct Der<'a>(&'a [u8]);

impl<'a> Der<'a> {
    /// The tag and the content of the next element.
    fn next(&mut self) -> Option<(u8, &'a [u8])> {
        let (&tag, rest) = self.0.split_first()?;
        let (&first, mut rest) = rest.split_first()?;
        let len = match first {
            0..=0x7F => usize::from(first),
            // Up to four bytes of length, and no more than it takes.
            0x81..=0x84 => {
                let (bytes, behind) = rest.split_at_checked(usize::from(first & 0x7F))?;
                rest = behind;
                let len = bytes.iter().fold(0, |len, byte| len << 8 | usize::from(*byte));
                if len < 0x80 || bytes[0] == 0 {
                    return None;
                }
                len
            }
            _ => return None,
        };
        let (content, behind) = rest.split_at_checked(len)?;
        self.0 = behind;
        Some((tag, content))
    }

    fn expect(&mut self, tag: u8) -> Option<&'a [u8]> {
        self.next().filter(|(its, _)| *its == tag).map(|(_, content)| content)
    }
}

#[cfg(test)]
mod tests {
    use rcgen::string::{BmpString, TeletexString};
    use rcgen::{CertificateParams, DnType, DnValue, KeyPair};

    use super::*;

    fn certificate(names: &[(DnType, DnValue)]) -> Vec<u8> {
        let mut params = CertificateParams::new(vec![]).expect("parameters");
        params.distinguished_name = rcgen::DistinguishedName::new();
        for (kind, value) in names {
            params.distinguished_name.push(kind.clone(), value.clone());
        }
        let key = KeyPair::generate().expect("a key");
        params.self_signed(&key).expect("a certificate").der().to_vec()
    }

    fn name_of(names: &[(DnType, DnValue)]) -> String {
        distinguished_name(&certificate(names)).expect("a name")
    }

    fn utf8(text: &str) -> DnValue {
        DnValue::Utf8String(text.to_owned())
    }

    /// The texts are those of GnuTLS for the same certificates; a test with QEMU's server compares others.
    #[test]
    fn a_name_has_the_text_that_gnutls_gives() {
        use DnType::{CommonName, CountryName, CustomDnType, OrganizationName, OrganizationalUnitName};
        let plain = [
            (CountryName, DnValue::PrintableString("GB".try_into().expect("letters"))),
            (OrganizationName, utf8("Example, Inc")),
            (OrganizationalUnitName, utf8("a+b\"c\\d<e>f;g=h")),
            (CommonName, utf8("host 7")),
        ];
        assert_eq!(name_of(&plain), "C=GB,O=Example\\, Inc,OU=a\\+b\\\"c\\\\d\\<e\\>f\\;g=h,CN=host 7");
        for (value, text) in [
            (" lead", "CN=\\ lead"),
            ("#x", "CN=\\#x"),
            ("trail ", "CN=trail\\ "),
            (" ", "CN=\\ "),
            ("a b#c", "CN=a b#c"),
            ("Größe 日本", "CN=Größe 日本"),
            ("a\0b", "CN=#0c03610062"),
        ] {
            assert_eq!(name_of(&[(CommonName, utf8(value))]), text);
        }
        let bmp = DnValue::BmpString(BmpString::try_from("Größe").expect("letters"));
        assert_eq!(name_of(&[(OrganizationName, bmp)]), "O=Größe");
        let teletex = DnValue::TeletexString(TeletexString::try_from("abc").expect("letters"));
        assert_eq!(name_of(&[(OrganizationName, teletex)]), "O=abc");
        let unnamed = CustomDnType(vec![1, 2, 3, 4, 5]);
        assert_eq!(name_of(&[(unnamed, utf8("hello"))]), "1.2.3.4.5=#0c0568656c6c6f");
        let misused = CustomDnType(vec![2, 5, 4, 20]);
        assert_eq!(name_of(&[(misused, utf8("123"))]), "telephoneNumber=#0c03313233");
        let number = DnType::CustomDnType(vec![1, 2, 643, 3, 131, 1, 1]);
        assert_eq!(name_of(&[(number, utf8("123"))]), "INN=#0c03313233");
    }

    #[test]
    fn an_empty_subject_or_value_is_no_name() {
        let empty = [(DnType::OrganizationName, utf8("a")), (DnType::CommonName, utf8(""))];
        assert_eq!(distinguished_name(&certificate(&empty)), None);
        assert_eq!(distinguished_name(&certificate(&[])), None);
        assert_eq!(subject(&certificate(&[])), None);
    }

    #[test]
    fn what_differs_has_another_text() {
        use DnType::{CommonName, OrganizationName};
        let one = name_of(&[(OrganizationName, utf8("a,CN=b"))]);
        let two = name_of(&[(OrganizationName, utf8("a")), (CommonName, utf8("b"))]);
        assert_eq!((one.as_str(), two.as_str()), ("O=a\\,CN=b", "O=a,CN=b"));
    }

    #[test]
    fn several_values_of_one_name_are_joined() {
        let pair = |last: u8, text: &str| {
            let len = u8::try_from(text.len()).expect("short");
            let mut bytes = vec![SEQUENCE, 7 + len, OBJECT_ID, 3, 0x55, 4, last, UTF8, len];
            bytes.extend_from_slice(text.as_bytes());
            bytes
        };
        let set = |pairs: &[Vec<u8>]| {
            let pairs = pairs.concat();
            [&[SET, u8::try_from(pairs.len()).expect("short")][..], &pairs].concat()
        };
        let names = [set(&[pair(6, "GB"), pair(11, "Multi")]), set(&[pair(3, "x")])].concat();
        assert_eq!(text_of(&names).as_deref(), Some("C=#0c024742+OU=Multi,CN=x"));
    }

    #[test]
    fn a_subject_is_told_and_nothing_cut_off_makes_a_panic() {
        let names = [(DnType::CommonName, utf8("host\n7")), (DnType::OrganizationName, utf8("Example"))];
        let der = certificate(&names);
        assert_eq!(subject(&der).as_deref(), Some("CN=host\\n7,O=Example"));
        for len in 0..der.len() {
            let _ = subject(&der[..len]);
            let mut spoilt = der.clone();
            spoilt[len] ^= 0xFF;
            let _ = subject(&spoilt);
        }
        for bytes in [&[SET][..], &[SET, 0x81, 1, 0], &[SET, 0x82, 0, 1, 0], &[SET, 5, 0x30, 0]] {
            assert_eq!(text_of(bytes), None, "{bytes:?}");
        }
        for bytes in [&[][..], &[0x80, 1], &[0x55, 0x84], &[0xFF; 12]] {
            assert_eq!(dotted(bytes), None, "{bytes:?}");
        }
    }
}
