//! Where the host refuses a ring threads do the work, and a caller that insists on the ring gets the reason.
//!
//! A child process forbids itself `io_uring_setup` with a seccomp filter, as containers do, and then does
//! I/O.

mod common;

use std::process::Command;

use common::{TempDir, unlocked};
use vellum_core::{Buffer, ErrorKind, ImageOffset, Storage};
use vellum_io::{File, IoMode, Workers, WorkersConfig, io_mode, run};

const CHILD: &str = "VELLUM_TEST_REFUSE";

#[test]
fn a_refused_ring_means_threads() {
    if let Ok(errno) = std::env::var(CHILD) {
        return child(errno.parse().expect("a number"));
    }
    for errno in [libc::EPERM, libc::ENOSYS, libc::EACCES, libc::ENOMEM] {
        let test = ["a_refused_ring_means_threads", "--exact", "--nocapture", "--test-threads=1"];
        let program = std::env::current_exe().expect("this program");
        let output =
            Command::new(program).args(test).env(CHILD, errno.to_string()).output().expect("it runs");
        assert!(output.status.success(), "errno {errno}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

fn child(errno: i32) {
    refuse_rings(errno);
    let error = run(IoMode::Uring, async || ()).expect_err("it is forbidden");
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error:?}");
    if errno == libc::EPERM {
        assert!(error.to_string().contains("kernel.io_uring_disabled"), "{error}");
        assert!(error.to_string().contains("seccomp"), "{error}");
    }
    let error = Workers::start(WorkersConfig { threads: 2, mode: IoMode::Uring, ..WorkersConfig::default() })
        .err()
        .expect("forbidden too");
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    run(IoMode::Auto, async || {
        assert_eq!(io_mode(), IoMode::Threads);
        let dir = TempDir::new();
        let file = File::create_new(dir.join("file"), unlocked(false)).await.expect("a file");
        file.write(ImageOffset::ZERO, Buffer::copy_of(b"bytes")).await.expect("a write");
        file.flush().await.expect("a flush");
        let read = file.read(ImageOffset::ZERO, Buffer::zeroed(5)).await.expect("a read");
        assert_eq!(read.to_vec(), b"bytes");
    })
    .expect("threads can always be had");
    let workers =
        Workers::start(WorkersConfig { threads: 2, mode: IoMode::Auto, ..WorkersConfig::default() })
            .expect("workers start");
    assert_eq!(workers.mode(), IoMode::Threads);
    workers.join();
}

/// Makes `io_uring_setup` fail with `errno` on this thread and those it starts.
fn refuse_rings(errno: i32) {
    const LOAD_WORD: u32 = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    const JUMP_EQUAL: u32 = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    const RETURN: u32 = libc::BPF_RET | libc::BPF_K;
    let step = |code, jt, jf, k| {
        let code = u16::try_from(code).expect("codes are small numbers");
        libc::sock_filter { code, jt, jf, k }
    };
    let setup = u32::try_from(libc::SYS_io_uring_setup).expect("a number of a system call");
    let mut program = [
        // The number of the system call is the first word of what a filter sees.
        step(LOAD_WORD, 0, 0, 0),
        step(JUMP_EQUAL, 0, 1, setup),
        step(RETURN, 0, 0, libc::SECCOMP_RET_ERRNO | errno.cast_unsigned()),
        step(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let filter = libc::sock_fprog { len: 4, filter: program.as_mut_ptr() };
    // SAFETY: a flag of this thread, with constants.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }, 0);
    // SAFETY: the kernel copies the filter, which lives through the call; its length is that of the program.
    let set = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter) };
    assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
}
