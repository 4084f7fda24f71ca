//! The kernel's interface: structures and numbers, as in `ublk_cmd.h`.
//!
//! None of the structures has padding, so they are plain bytes.

use std::mem::size_of;

/// The structure behind control commands, `struct ublksrv_ctrl_cmd`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct ControlCommand {
    pub(super) number: u32,
    /// All bits set: the command is for no queue.
    pub(super) queue: u16,
    pub(super) len: u16,
    pub(super) address: u64,
    pub(super) data: u64,
    pub(super) path_len: u16,
    pub(super) zero: u16,
    pub(super) reserved: u32,
}

/// What a device is, `struct ublksrv_ctrl_dev_info`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct DeviceInfo {
    pub(super) queues: u16,
    pub(super) depth: u16,
    pub(super) state: u16,
    pub(super) zero: u16,
    pub(super) request_bytes_max: u32,
    pub(super) number: u32,
    pub(super) pid: i32,
    pub(super) zero_too: u32,
    pub(super) flags: u64,
    /// The server's own; the driver keeps it.
    pub(super) mark: u64,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) reserved: [u64; 2],
}

/// The parameters, `struct ublk_params`, as far as they are used here, with what it takes to have no gap.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Parameters {
    pub(super) len: u32,
    pub(super) types: u32,
    // struct ublk_param_basic
    pub(super) attributes: u32,
    pub(super) logical_shift: u8,
    pub(super) physical_shift: u8,
    pub(super) best_shift: u8,
    pub(super) least_shift: u8,
    pub(super) sectors_max: u32,
    pub(super) chunk_sectors: u32,
    pub(super) sectors: u64,
    pub(super) boundary_mask: u64,
    // struct ublk_param_discard
    pub(super) discard_alignment: u32,
    pub(super) discard_granularity: u32,
    pub(super) discard_sectors_max: u32,
    pub(super) zeroes_sectors_max: u32,
    pub(super) discard_segments_max: u16,
    pub(super) zero: u16,
    // struct ublk_param_devt, which the kernel fills in
    pub(super) numbers: [u32; 4],
    pub(super) pad: u32,
}

/// How much of [`Parameters`] is the kernel's when they are set: nothing of what it fills in.
pub(super) const PARAMETERS_LEN: u32 = 60;

/// A request as the kernel shows it, `struct ublksrv_io_desc`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct IoDescriptor {
    pub(super) op_flags: u32,
    pub(super) sectors: u32,
    pub(super) start: u64,
    pub(super) address: u64,
}

/// What a queue sends, `struct ublksrv_io_cmd`. The address stays zero: data is moved by other calls.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct IoCommand {
    pub(super) queue: u16,
    pub(super) tag: u16,
    pub(super) result: i32,
    pub(super) address: u64,
}

const _: () = {
    assert!(size_of::<ControlCommand>() == 32);
    assert!(size_of::<DeviceInfo>() == 64);
    assert!(size_of::<Parameters>() == 80);
    assert!(size_of::<IoDescriptor>() == 24);
    assert!(size_of::<IoCommand>() == 16);
};

impl ControlCommand {
    /// Its layout at the end of a submission of 128 bytes.
    pub(super) fn bytes(self) -> [u8; 80] {
        // SAFETY: both are 32 bytes of integers without a gap.
        let words: [u8; 32] = unsafe { std::mem::transmute(self) };
        let mut bytes = [0; 80];
        bytes[..words.len()].copy_from_slice(&words);
        bytes
    }
}

impl IoCommand {
    /// Its layout at the end of a submission.
    pub(super) fn bytes(self) -> [u8; 16] {
        // SAFETY: both are 16 bytes of integers without a gap.
        unsafe { std::mem::transmute(self) }
    }
}

/// The number of a command as `ioctl` has it: which way `len` bytes go, a letter, and a number.
const fn code(ways: u32, number: u32, len: u32) -> u32 {
    ways << 30 | len << 16 | (b'u' as u32) << 8 | number
}

const READ: u32 = 2;
const BOTH: u32 = 3;
/// How long the structures are, as asserted above.
const CONTROL: u32 = 32;
const IO: u32 = 16;

pub(super) const GET_INFO: u32 = code(READ, 0x02, CONTROL);
pub(super) const ADD: u32 = code(BOTH, 0x04, CONTROL);
pub(super) const DELETE: u32 = code(BOTH, 0x05, CONTROL);
pub(super) const START: u32 = code(BOTH, 0x06, CONTROL);
pub(super) const STOP: u32 = code(BOTH, 0x07, CONTROL);
pub(super) const SET_PARAMETERS: u32 = code(BOTH, 0x08, CONTROL);
pub(super) const GET_PARAMETERS: u32 = code(READ, 0x09, CONTROL);
pub(super) const START_RECOVERY: u32 = code(BOTH, 0x10, CONTROL);
pub(super) const END_RECOVERY: u32 = code(BOTH, 0x11, CONTROL);
pub(super) const GET_FEATURES: u32 = code(READ, 0x13, CONTROL);
pub(super) const DELETE_LATER: u32 = code(READ, 0x14, CONTROL);
pub(super) const UPDATE_SIZE: u32 = code(BOTH, 0x15, CONTROL);

pub(super) const FETCH: u32 = code(BOTH, 0x20, IO);
pub(super) const COMMIT_AND_FETCH: u32 = code(BOTH, 0x21, IO);

/// A device outlives its server, and waits for the next.
pub(super) const FEATURE_RECOVERY: u64 = 1 << 3;
/// Requests that the dead server had not answered are sent again.
pub(super) const FEATURE_REISSUE: u64 = 1 << 4;
/// Commands have the numbers of `ioctl`.
pub(super) const FEATURE_CODES: u64 = 1 << 6;
/// Data is moved by reading and writing the device.
pub(super) const FEATURE_USER_COPY: u64 = 1 << 7;
/// The size can be changed.
pub(super) const FEATURE_UPDATE_SIZE: u64 = 1 << 10;

pub(super) const ATTRIBUTE_READ_ONLY: u32 = 1 << 0;
pub(super) const ATTRIBUTE_VOLATILE_CACHE: u32 = 1 << 2;
pub(super) const ATTRIBUTE_FUA: u32 = 1 << 3;

pub(super) const TYPE_BASIC: u32 = 1 << 0;
pub(super) const TYPE_DISCARD: u32 = 1 << 1;

pub(super) const STATE_DEAD: u16 = 0;
pub(super) const STATE_LIVE: u16 = 1;

/// The most requests of a queue.
pub(super) const DEPTH_MAX: usize = 4096;

/// Where in the device the data of a request is: `BUFFERS_AT`, and behind it queue, tag and position.
pub(super) const BUFFERS_AT: u64 = 0x8000_0000;
pub(super) const TAG_SHIFT: u32 = 25;
pub(super) const QUEUE_SHIFT: u32 = TAG_SHIFT + 16;

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    #[test]
    fn codes_are_those_of_the_header() {
        // As a C compiler computes them from the header's macros.
        let rows = [
            (GET_INFO, 0x8020_7502),
            (ADD, 0xC020_7504),
            (DELETE, 0xC020_7505),
            (START, 0xC020_7506),
            (STOP, 0xC020_7507),
            (SET_PARAMETERS, 0xC020_7508),
            (GET_PARAMETERS, 0x8020_7509),
            (START_RECOVERY, 0xC020_7510),
            (END_RECOVERY, 0xC020_7511),
            (GET_FEATURES, 0x8020_7513),
            (DELETE_LATER, 0x8020_7514),
            (UPDATE_SIZE, 0xC020_7515),
            (FETCH, 0xC010_7520),
            (COMMIT_AND_FETCH, 0xC010_7521),
        ];
        for (ours, theirs) in rows {
            assert_eq!(ours, theirs, "{ours:#x}");
        }
    }

    #[test]
    fn fields_are_where_the_kernel_looks_for_them() {
        assert_eq!(offset_of!(ControlCommand, address), 8);
        assert_eq!(offset_of!(ControlCommand, data), 16);
        assert_eq!(offset_of!(ControlCommand, path_len), 24);
        assert_eq!(offset_of!(DeviceInfo, request_bytes_max), 8);
        assert_eq!(offset_of!(DeviceInfo, pid), 16);
        assert_eq!(offset_of!(DeviceInfo, flags), 24);
        assert_eq!(offset_of!(DeviceInfo, mark), 32);
        assert_eq!(offset_of!(Parameters, logical_shift), 12);
        assert_eq!(offset_of!(Parameters, sectors_max), 16);
        assert_eq!(offset_of!(Parameters, sectors), 24);
        assert_eq!(offset_of!(Parameters, discard_alignment), 40);
        assert_eq!(offset_of!(Parameters, discard_segments_max), 56);
        assert_eq!(offset_of!(Parameters, numbers), usize::try_from(PARAMETERS_LEN).expect("small"));
        assert_eq!(offset_of!(IoDescriptor, start), 8);
        assert_eq!(offset_of!(IoCommand, result), 4);
    }

    #[test]
    fn commands_are_their_fields_in_a_row() {
        let io = IoCommand { queue: 0x0102, tag: 0x0304, result: -5, address: 0 }.bytes();
        assert_eq!(&io[..8], &[0x02, 0x01, 0x04, 0x03, 0xFB, 0xFF, 0xFF, 0xFF]);
        assert_eq!(&io[8..], &[0; 8]);
        let control = ControlCommand { number: 7, queue: u16::MAX, data: 9, ..ControlCommand::default() };
        let bytes = control.bytes();
        assert_eq!((&bytes[..8], bytes[16]), (&[7, 0, 0, 0, 0xFF, 0xFF, 0, 0][..], 9));
        assert_eq!(bytes[32..], [0; 48]);
    }
}
