//! Command lines of both programs, the guide, and the options of the `qemu-nbd` that is installed.

use std::fmt::Write as _;
use std::path::Path;

use clap::{CommandFactory as _, Parser as _};

use super::*;

fn line(text: &str) -> Result<String, String> {
    let words: Vec<OsString> = text.split_whitespace().map(|word| word.trim_matches('\'').into()).collect();
    let request = translate(&words).map_err(|lines| lines.join("\n"))?;
    Ok(match request {
        Request::Run(line) => {
            crate::Cli::try_parse_from(&line).unwrap_or_else(|error| panic!("{text}: {error}"));
            line.iter().map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
        }
        Request::Say(text) => format!("says {}", text.lines().next().unwrap_or_default()),
    })
}

/// What is asked for where nothing is said, after the options and the address, and before `--`.
const USUAL: &str = "--shared=1 --discard=ignore --exit-when-unused --quiet --description=";

#[test]
fn command_lines_are_turned_into_ours() {
    let everywhere = "--nbd=tcp:0.0.0.0:10809";
    for (theirs, ours) in [
        ("a", format!("{everywhere} {USUAL} -- a")),
        ("-p 0 -b 127.0.0.1 a", format!("--nbd=tcp:127.0.0.1:0 {USUAL} -- a")),
        ("-b ::1 a", format!("--nbd=tcp:[::1]:10809 {USUAL} -- a")),
        ("a -k /s/x=y", format!("--nbd=unix:/s/x=y {USUAL} -- a")),
        ("-f raw -o 0x200 -k /s a", format!("--format=raw --offset=512 --nbd=unix:/s {USUAL} -- a")),
        (
            "-tvk/s -e 4 -x n=m -D text a",
            "--export-name=n=m --description=text --nbd=unix:/s --shared=4 --discard=ignore --log=debug -- a".to_owned(),
        ),
        (
            "--persist --shared=0 --fork --pid-file=/p --sock=/s a",
            "--fork --pid-file=/p --nbd=unix:/s --shared=0 --discard=ignore --quiet --description= -- a".to_owned(),
        ),
        ("-k /s -A --aio=threads -T x a", format!("--nbd=unix:/s {USUAL} -- a")),
        ("-k /s -B b0 --bitmap=b1 a", format!("--bitmap=b0 --bitmap=b1 --nbd=unix:/s {USUAL} -- a")),
        (
            "-k /s -l snapshot.name=one a",
            "--snapshot=snapshot.name=one --nbd=unix:/s --shared=1 --discard=ignore --read-only --exit-when-unused --quiet \
             --description= -- a"
                .to_owned(),
        ),
        (
            "-k /s --discard=on --detect-zeroes=unmap -n --aio=native a",
            "--nbd=unix:/s --shared=1 --discard=unmap --detect-zeroes=unmap --direct --exit-when-unused --quiet --description= \
             -- a"
                .to_owned(),
        ),
        (
            "-k /s --cache=directsync --handshake-limit=0 -s a",
            "--handshake-seconds=0 --nbd=unix:/s --shared=1 --discard=ignore --temporary --direct --durable --exit-when-unused \
             --quiet --description= -- a"
                .to_owned(),
        ),
        (
            "-c /dev/nbd0 a",
            "--nbd-device=/dev/nbd0 --fork --shared=1 --discard=ignore --exit-when-unused --quiet --description= -- a"
                .to_owned(),
        ),
        (
            "-t -v -c /dev/nbd0 -k /s a",
            "--nbd=unix:/s --nbd-device=/dev/nbd0 --shared=1 --discard=ignore --log=debug --description= -- a".to_owned(),
        ),
        (
            "-k /s -r -s a",
            "--nbd=unix:/s --shared=1 --discard=ignore --read-only --exit-when-unused --quiet --description= -- a".to_owned(),
        ),
        (
            "--object secret,id=s,file=f --object tls-creds-x509,id=t,endpoint=server,dir=/c,verify-peer=no --tls-creds t -k /s a",
            format!("--object=secret,id=s,file=f --tls=require --tls-certificates=/c --nbd=unix:/s {USUAL} -- a"),
        ),
        (
            "--object tls-creds-x509,id=t,dir=/c,endpoint=server --tls-creds=t -k /s a",
            format!("--tls=require --tls-certificates=/c --tls-verify-peer --nbd=unix:/s {USUAL} -- a"),
        ),
        (
            "--object tls-creds-x509,id=t,dir=/c,endpoint=server --object authz-simple,id=a,identity=CN=x,,O=y --tls-creds t --tls-authz a -k /s a",
            format!("--tls=require --tls-certificates=/c --tls-verify-peer --tls-allow=CN=x,O=y --nbd=unix:/s {USUAL} -- a"),
        ),
        (
            "--object tls-creds-x509,id=t,dir=/c,endpoint=server --object authz-list,id=a,rules.0.match=x,rules.0.policy=allow --tls-creds t \
             --tls-authz a -k /s a",
            format!(
                "--tls=require --tls-certificates=/c --tls-verify-peer \
                 --tls-access-list={{\"policy\":\"deny\",\"rules\":[{{\"format\":\"exact\",\"match\":\"x\",\"policy\":\"allow\"}}]}} --nbd=unix:/s \
                 {USUAL} -- a"
            ),
        ),
        (
            "-k /s --image-opts driver=raw,offset=1M,file.filename=a",
            format!("--image-opts --nbd=unix:/s {USUAL} -- driver=raw,offset=1M,file.filename=a"),
        ),
        (
            "--object tls-creds-x509,id=t,dir=/c,endpoint=client -k /s --image-opts driver=nbd,host=h,tls-creds=t",
            format!(
                "--object=tls-creds-x509,id=t,dir=/c,endpoint=client --image-opts --nbd=unix:/s {USUAL} -- driver=nbd,host=h,tls-creds=t"
            ),
        ),
    ] {
        let ours = format!("vellum serve {ours}");
        assert_eq!(line(theirs).as_deref(), Ok(ours.as_str()), "{theirs}");
    }
    let listing = |rest: &str| Ok(format!("vellum export list --nbd={rest}"));
    for (theirs, ours) in [
        ("-L -k /s", "unix:/s"),
        ("--list -p 5 -b h -e 3 -t -v", "tcp:h:5"),
        (
            "-L --object tls-creds-x509,id=t,dir=/c --tls-creds t --tls-hostname n -k /s",
            "unix:/s --tls-certificates=/c --tls-hostname=n",
        ),
        (
            "-L --object tls-creds-x509,id=t,dir=/c,endpoint=client,verify-peer=off --tls-creds t",
            "tcp:0.0.0.0:10809 --tls-certificates=/c --tls-unverified",
        ),
    ] {
        assert_eq!(line(theirs), listing(ours), "{theirs}");
    }
    assert_eq!(line("-d /dev/nbd0").as_deref(), Ok("vellum client disconnect --device=/dev/nbd0"));
    assert!(line("--version").unwrap().starts_with("says qemu-nbd 10."));
    assert!(line("-h").unwrap().starts_with("says Usage: qemu-nbd"));
}

/// Command lines that both programs refuse at once, without looking at a file.
const WRONG: &[&str] = &[
    "",
    "a b",
    "-P 1 a",
    "--nonsense a",
    "--persistent=1 a",
    "-p",
    "--port",
    "-e -1 a",
    "-e x a",
    "-o x a",
    "-o 2M a",
    "-k relative a",
    "--discard=x a",
    "--discard=on --discard=on a",
    "--detect-zeroes=x a",
    "--detect-zeroes=unmap a",
    "--cache=x a",
    "-n --cache=none a",
    "--aio=x a",
    "--aio=threads --aio=threads a",
    "--handshake-limit=x a",
    "--tls-creds=x a",
    "--tls-authz x a",
    "--tls-hostname x a",
    "-L a",
    "-L -x n",
    "-L -f raw",
    "-L -A",
    "-L --cache=none",
    "-L -B b",
    "-L --fork",
    "-L --tls-authz x",
    "--object authz-simple,id=a a",
    "--object authz-simple,identity=x a",
    "--object authz-simple,id=a,identity=x,foo=1 a",
    "--object authz-list,id=a,policy=maybe a",
    "--object authz-list,id=a,rules.0.match=x a",
    "--object authz-list,id=a,rules.0.policy=allow a",
    "--object authz-list,id=a,rules.1.match=x,rules.1.policy=allow a",
    "--object authz-list,id=a,rules.0.match=x,rules.0.policy=allow,rules.0.format=regex a",
    "-k /s --image-opts -f raw driver=raw",
];

#[test]
fn what_is_wrong_is_said_as_there() {
    let mut compared = 0;
    for theirs in WRONG {
        let error = line(theirs).expect_err(theirs);
        let words = theirs.split_whitespace();
        let Ok(ran) =
            std::process::Command::new(NAME).args(words).stdin(std::process::Stdio::null()).output()
        else {
            continue;
        };
        let said = String::from_utf8_lossy(&ran.stderr).into_owned();
        let said: Vec<&str> =
            said.lines().map(|line| line.strip_prefix("qemu-nbd: ").unwrap_or(line)).collect();
        assert_eq!((error.lines().collect::<Vec<_>>(), ran.status.code()), (said, Some(1)), "{theirs}");
        compared += 1;
    }
    assert!(compared == 0 || compared == WRONG.len());
    for (theirs, word) in [
        ("-L --tls-creds x", "No TLS credentials with id 'x'"),
        ("--selinux-label x -k /s a", "--selinux-label is not supported"),
        (
            "--object tls-creds-psk,id=t,dir=/c,endpoint=server a",
            "rustls) has no pre-shared keys: use tls-creds-x509",
        ),
        ("--object tls-creds-anon,id=t,endpoint=server a", "use tls-creds-x509"),
        ("--object tls-creds-x509,id=t,dir=/c,endpoint=client --tls-creds t a", "server endpoint"),
        ("--object tls-creds-x509,id=t,dir=/c --tls-creds t a", "server endpoint"),
        ("-L --object tls-creds-x509,id=t,dir=/c,endpoint=server --tls-creds t", "client endpoint"),
        (
            "--object tls-creds-x509,id=t,dir=/c,endpoint=server --tls-creds t --tls-authz a a",
            "there is no --object",
        ),
        (
            "--object tls-creds-x509,id=t,dir=/c,endpoint=server,verify-peer=no --object authz-simple,id=a,identity=x --tls-creds t --tls-authz a a",
            "needs verify-peer=on",
        ),
        ("--object authz-list-file,id=a,filename=/f,refresh=off a", "refresh=off is not supported"),
        ("--object {\"qom-type\":1} a", "Invalid parameter type"),
        ("--s a", "option '--s' is ambiguous; possibilities: '--socket'"),
        ("-p x a", "address resolution failed for 0.0.0.0:x"),
    ] {
        let error = line(theirs).expect_err(theirs);
        assert!(error.contains(word), "{theirs}: {error}");
    }
}

#[test]
fn what_is_said_to_be_the_same_is_there() {
    let cli = crate::Cli::command();
    let ours = cli.find_subcommand("serve").expect("a command");
    for opt in table::rows() {
        match opt.means {
            Meaning::Same(name) => {
                let mut all = ours.get_arguments();
                let found = all.find(|argument| argument.get_long() == name.strip_prefix("--"));
                let found = found.unwrap_or_else(|| panic!("vellum serve has no {name}"));
                assert_eq!(found.get_action().takes_values(), opt.value, "vellum serve {name}");
            }
            Meaning::Own(shown) => {
                for name in shown.split('`').filter_map(|piece| piece.strip_prefix("--")) {
                    let name = name.split(' ').next().expect("a word");
                    let is_there = |command: &clap::Command| {
                        command.get_arguments().any(|argument| argument.get_long() == Some(name))
                    };
                    assert!(is_there(ours) || is_there(&cli), "vellum serve has no --{name}");
                }
            }
            Meaning::Aside | Meaning::Refused | Meaning::Cache => {
                assert!(!opt.why.is_empty(), "{}", opt.shown())
            }
        }
    }
}

/// The part of the guide that has a table for each group of options.
fn tables() -> String {
    let mut text = String::new();
    for (heading, rows) in table::GROUPS {
        writeln!(text, "### {heading}\n\n| qemu-nbd | here | |\n|---|---|---|").expect("to memory");
        for opt in *rows {
            let here = match opt.means {
                Meaning::Same(name) => format!("`{name}`"),
                Meaning::Own(shown) => shown.to_owned(),
                Meaning::Aside | Meaning::Cache => "accepted".to_owned(),
                Meaning::Refused => "refused".to_owned(),
            };
            writeln!(text, "| `{}` | {here} | {} |", opt.shown().replace(", ", "`, `"), opt.why)
                .expect("to memory");
        }
        text.push('\n');
    }
    text
}

#[test]
fn the_guide_has_these_tables() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/guide/qemu-nbd.md");
    let page = std::fs::read_to_string(&path).expect("the page of the guide");
    let begin = "<!-- tables -->\n\n";
    let end = "<!-- end of tables -->";
    let (before, rest) = page.split_once(begin).expect("where the tables begin");
    let (between, after) = rest.split_once(end).expect("where they end");
    if between != tables() && std::env::var("VELLUM_GUIDE").is_ok_and(|what| what == "write") {
        std::fs::write(&path, format!("{before}{begin}{}{end}{after}", tables()))
            .expect("the page is written");
        return;
    }
    assert_eq!(between, tables(), "VELLUM_GUIDE=write makes the tables of {} anew", path.display());
}

#[test]
fn the_installed_program_has_the_same_options() {
    let Ok(output) = std::process::Command::new(NAME).arg("--help").output() else { return };
    let help = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut theirs: Vec<String> = Vec::new();
    for line in help.lines().filter(|line| line.starts_with(' ') && line.trim_start().starts_with('-')) {
        let words = line.split([',', ' ', '=', '[']).filter(|word| word.starts_with('-'));
        theirs.extend(words.map(str::to_owned));
    }
    let named = |opt: &&'static OptionRow| {
        let letter = opt.short.map(|letter| format!("-{letter}"));
        letter.into_iter().chain([format!("--{}", opt.long)]).collect::<Vec<_>>()
    };
    let ours: Vec<String> = table::rows().iter().flat_map(named).collect();
    for name in theirs.iter().filter(|name| *name != "--help" && *name != "--trace") {
        assert!(ours.contains(name), "qemu-nbd has an option {name}");
    }
    for name in &ours {
        assert!(theirs.contains(name), "qemu-nbd has no option {name}");
    }
}
