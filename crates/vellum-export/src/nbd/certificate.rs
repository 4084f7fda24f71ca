//! The subject of a certificate: as much of X.509 as it takes to log it.
//!
//! The certificate was verified before, by rustls; here it is only read, and no decision depends on the
//! result. Lengths are checked against the bytes that are there. A certificate that cannot be parsed has no
//! name.
//!
//! Source: RFC 5280, 4.1; X.690 for the encoding.

/// The longest name that is reported, in characters.
const NAME_MAX: usize = 256;

const SEQUENCE: u8 = 0x30;
const SET: u8 = 0x31;
const VERSION: u8 = 0xA0;
const OBJECT_ID: u8 = 0x06;

/// The attributes that are reported, by the last byte of 2.5.4.x.
const ATTRIBUTES: [(u8, &str); 4] = [(3, "CN"), (10, "O"), (11, "OU"), (6, "C")];

/// The subject of a certificate in DER, such as `CN=host-7,O=Example`; `None` if it has none that can be
/// printed.
pub(super) fn subject(certificate: &[u8]) -> Option<String> {
    let mut certificate = Der(Der(certificate).expect(SEQUENCE)?);
    let mut fields = Der(certificate.expect(SEQUENCE)?);
    if fields.0.first() == Some(&VERSION) {
        fields.next()?;
    }
    // Serial number, algorithm, issuer, validity.
    for _ in 0..4 {
        fields.next()?;
    }
    let mut names = Der(fields.expect(SEQUENCE)?);
    let mut told = String::new();
    while !names.0.is_empty() {
        let mut pairs = Der(names.expect(SET)?);
        while !pairs.0.is_empty() {
            let mut pair = Der(pairs.expect(SEQUENCE)?);
            let kind = pair.expect(OBJECT_ID)?;
            let (_, value) = pair.next()?;
            let known = match kind {
                [0x55, 0x04, last] => ATTRIBUTES.iter().find(|(number, _)| number == last),
                _ => None,
            };
            if let Some((_, name)) = known {
                let separator = if told.is_empty() { "" } else { "," };
                let value = String::from_utf8_lossy(value);
                told.push_str(&format!("{separator}{name}={}", value.escape_debug()));
            }
        }
    }
    let told: String = told.chars().take(NAME_MAX).collect();
    (!told.is_empty()).then_some(told)
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
            // Up to four bytes of length.
            0x81..=0x84 => {
                let (bytes, behind) = rest.split_at_checked(usize::from(first & 0x7F))?;
                rest = behind;
                bytes.iter().fold(0, |len, byte| len << 8 | usize::from(*byte))
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
    use rcgen::{CertificateParams, DnType, KeyPair};

    use super::*;

    #[test]
    fn a_subject_is_told_and_nothing_cut_off_makes_a_panic() {
        let mut params = CertificateParams::new(vec![]).expect("parameters");
        params.distinguished_name.push(DnType::CommonName, "host\n7");
        params.distinguished_name.push(DnType::OrganizationName, "Example");
        let key = KeyPair::generate().expect("a key");
        let certificate = params.self_signed(&key).expect("a certificate");
        let der = certificate.der();
        let told = subject(der).expect("a name");
        assert!(told.contains("CN=host\\n7") && told.contains("O=Example"), "{told}");
        for len in 0..der.len() {
            let _ = subject(&der[..len]);
            let mut spoilt = der.to_vec();
            spoilt[len] ^= 0xFF;
            let _ = subject(&spoilt);
        }
    }
}
