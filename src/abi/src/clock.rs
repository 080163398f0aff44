//! The clock of the server's statistics.

/// Now, in nanoseconds of the monotonic clock that the server's statistics use.
pub fn now_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is a valid place to write to; this clock exists on every Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    let nanos = u64::try_from(now.tv_nsec).unwrap_or(0);
    seconds * 1_000_000_000 + nanos
}

/// When the computation for a request, or for a batch, began and ended ([`now_ns`]).
///
/// Triton shows what is before `start` as `compute_input`, what is after `end` as `compute_output`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ComputeTimes {
    /// Inputs were read, the computation begins.
    pub start: u64,
    /// The computation is done, outputs are written.
    pub end: u64,
}

impl ComputeTimes {
    /// Began at `start` and ends now.
    pub fn since(start: u64) -> Self {
        Self { start, end: now_ns() }
    }
}
