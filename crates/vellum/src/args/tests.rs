//! Sizes and `-o` options.

use super::*;

#[test]
fn sizes() {
    for (text, bytes) in [
        ("0", 0),
        ("512", 512),
        ("64k", 65_536),
        ("64K", 65_536),
        ("1M", 1 << 20),
        ("1.5G", 3 << 29),
        ("2T", 2 << 40),
        ("10GiB", 10 << 30),
        ("0.5k", 512),
        ("512B", 512),
        ("1024.0", 1024),
        ("0x10000", 65_536),
    ] {
        assert_eq!(parse_size(text).unwrap(), bytes, "{text}");
    }
    for text in
        ["", "k", "-1", "1X", "1.5", "1.2.3M", "99999999999E", "1 M", "1GB", "1kB", "5iB", "0x", "0xg"]
    {
        assert!(parse_size(text).is_err(), "{text:?}");
    }
}

#[test]
fn help_lists_each_option_under_the_formats_that_take_it() {
    for format in *b"rqnl" {
        let format = match format {
            b'r' => FormatKind::Raw,
            b'q' => FormatKind::Qcow2,
            b'l' => FormatKind::Luks,
            _ => FormatKind::Native,
        };
        let listed: Vec<&str> =
            CREATE_OPTIONS.iter().filter(|row| row.0.contains(&format)).map(|row| row.1).collect();
        assert!(listed.is_sorted(), "{listed:?}");
        let help = options_help(Some(format));
        for (_, name, ..) in CREATE_OPTIONS {
            let new = NewImage { said: vec![name.to_owned()], ..NewImage::default() };
            assert_eq!(new.suits(format, "-f").is_ok(), listed.contains(&name), "{format} {name}");
            assert_eq!(help.contains(&format!("  {name}=<")), listed.contains(&name), "{format} {name}");
        }
    }
    assert_eq!(options_help(None).matches("Options of").count(), 4);
}

#[test]
fn options_of_other_formats_are_refused() {
    use FormatKind::{Native, Qcow2, Raw};
    for (list, kinds) in [
        ("size=1M", [true, true, true]),
        ("preallocation=full", [true, true, false]),
        ("cluster_size=4k", [false, true, false]),
        ("journal=on", [false, true, false]),
        ("journal_size=1M", [false, true, true]),
        ("backing_file=a,backing_fmt=raw", [false, true, true]),
        ("layout=table,unit_size=64k", [false, false, true]),
        ("block_size=4k", [false, false, true]),
        ("layout=zoned,zone_size=16M,embed=on", [false, false, true]),
        ("zeroed=on", [false, false, true]),
        ("encrypt.format=luks,encrypt.key-secret=a", [false, true, true]),
        ("key-secret=a,cipher-alg=aes-128,hash-alg=sha1,iter-time=10", [false; 3]),
    ] {
        let new = NewImage::parse(&[list.to_owned()]).unwrap();
        assert_eq!([Raw, Qcow2, Native].map(|kind| new.suits(kind, "-f").is_ok()), kinds, "{list}");
    }
    let new = NewImage::parse(&["layout=table,unit_size=64k,journal_size=1M".to_owned()]).unwrap().native;
    assert_eq!((new.has_table, new.unit_size, new.journal_bytes), (true, Some(65_536), Some(1 << 20)));
    let new = NewImage::parse(&["layout=zoned,zone_size=1M,embed=off".to_owned()]).unwrap().native;
    assert_eq!((new.has_zones, new.zone_size, new.embed), (true, Some(1 << 20), Some(false)));
    assert!(NewImage::parse(&["layout=heap".to_owned()]).is_err());
    let luks = |list: &str| NewImage::parse(&[list.to_owned()])?.suits(FormatKind::Luks, "-f");
    for list in [
        "key-secret=a,cipher-mode=xts,ivgen-alg=plain64",
        "size=1M,preallocation=falloc",
        "detached-header=off",
    ] {
        luks(list).unwrap();
    }
    for list in [
        "encrypt.key-secret=a",
        "encrypt.format=luks,encrypt.key-secret=a",
        "cluster_size=4k",
        "cipher-alg=aes-192",
        "cipher-mode=cbc",
        "detached-header=on,key-secret=a",
        "format=luks",
        "ivgen-hash-alg=sha1",
    ] {
        assert!(luks(list).is_err(), "{list}");
    }
}

#[test]
fn options_with_commas_and_switches() {
    let lists = ["cluster_size=4k,lazy_refcounts".to_owned(), "backing_file=a,,b,size=1M".to_owned()];
    let new = NewImage::parse(&lists).unwrap();
    assert_eq!(new.qcow2.cluster_size, 4096);
    assert!(new.qcow2.lazy_refcounts);
    assert_eq!(new.backing_file.as_deref(), Some("a,b"));
    assert_eq!(new.size, Some(1 << 20));
    let journal = |list: &str| NewImage::parse(&[list.to_owned()]).map(|new| new.qcow2.journal);
    assert_eq!(journal("journal=on").unwrap(), Some(1 << 20));
    assert_eq!(journal("journal_size=256k").unwrap(), Some(256 << 10));
    assert_eq!(journal("journal=off").unwrap(), None);
    assert_eq!(journal("compat=v2").unwrap(), None);
    assert!(journal("journal=off,journal_size=1M").is_err());
    let prealloc = |list: &str| NewImage::parse(&[list.to_owned()]).map(|new| new.qcow2.prealloc);
    assert_eq!(prealloc("journal=on").unwrap(), Prealloc::Auto);
    for (text, wanted) in
        [("adaptive", Prealloc::Adaptive), ("off", Prealloc::Off), ("3M", Prealloc::Fixed(3 << 20))]
    {
        let found = prealloc(&format!("journal=on,prealloc={text}")).unwrap();
        assert_eq!(found, wanted);
        assert_eq!(prealloc_text(found).map(|text| parse_prealloc(&text).unwrap()), Some(wanted));
    }
    for text in ["", "1", "2G", "on", "auto"] {
        assert!(prealloc(&format!("prealloc={text}")).is_err(), "{text:?}");
    }
    assert!(NewImage::parse(&["nonsense=1".to_owned()]).is_err());
    assert!(NewImage::parse(&["extended_l2=maybe".to_owned()]).is_err());
}
