//! Memory of the tensors, and copies from and to GPU memory.
//!
//! Triton may hand out GPU memory for an input or an output even where the model runs on the CPU (CUDA shared
//! memory of the client, for instance). The CUDA driver is opened on the first such buffer and not before; where
//! there is none, only the request that needs it fails.

mod cuda;

use std::cell::Cell;

use crate::error::{Error, Result};
use crate::sys;

/// Where a tensor's buffer lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// Ordinary memory.
    Cpu,
    /// Page-locked memory: ordinary to the CPU, faster to copy from a GPU.
    Pinned,
    /// Memory of the CUDA device with this number.
    Gpu(i32),
}

impl Memory {
    pub(crate) fn to_raw(self) -> (sys::TRITONSERVER_MemoryType, i64) {
        match self {
            Memory::Cpu => (sys::TRITONSERVER_MEMORY_CPU, 0),
            Memory::Pinned => (sys::TRITONSERVER_MEMORY_CPU_PINNED, 0),
            Memory::Gpu(device) => (sys::TRITONSERVER_MEMORY_GPU, i64::from(device)),
        }
    }

    pub(crate) fn from_raw(kind: sys::TRITONSERVER_MemoryType, id: i64) -> Result<Self> {
        match kind {
            sys::TRITONSERVER_MEMORY_CPU => Ok(Memory::Cpu),
            sys::TRITONSERVER_MEMORY_CPU_PINNED => Ok(Memory::Pinned),
            sys::TRITONSERVER_MEMORY_GPU => {
                i32::try_from(id).map(Memory::Gpu).map_err(|_| Error::internal(format!("the server names GPU {id}")))
            }
            other => Err(Error::internal(format!("the server names an unknown memory type {other}"))),
        }
    }
}

/// Batches of so many bytes leave the allocator something to give back.
const LARGE_BATCH: usize = 4 << 20;

thread_local! {
    /// Bytes that this thread has copied out of requests since [`settle`].
    static COPIED: Cell<usize> = const { Cell::new(0) };
}

/// At the end of a batch. The allocator keeps what a thread has freed for that thread, so that a dozen instances of which
/// each has had one huge request would keep a dozen times its memory; after a large batch it is told not to.
pub(crate) fn settle() {
    if COPIED.replace(0) >= LARGE_BATCH {
        #[cfg(target_env = "gnu")]
        // SAFETY: may be called at any time, by any thread; it touches free memory only.
        unsafe {
            libc::malloc_trim(0);
        }
    }
}

/// Copies `to.len()` bytes at `from`, which lies in `memory`.
///
/// # Safety
/// `from` points to that many readable bytes in `memory`, which do not overlap `to`.
pub(crate) unsafe fn copy_to_host(memory: Memory, from: *const u8, to: &mut [u8]) -> Result<()> {
    COPIED.set(COPIED.get().saturating_add(to.len()));
    match memory {
        Memory::Cpu | Memory::Pinned => {
            // SAFETY: readable and not overlapping by this function's contract; `to` is a writable slice.
            unsafe { std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), to.len()) };
            Ok(())
        }
        // SAFETY: by this function's contract.
        Memory::Gpu(device) => unsafe { cuda::copy_from_device(device, from, to) },
    }
}

/// Copies `from` to `to`, which lies in `memory`.
///
/// # Safety
/// `to` points to `from.len()` writable bytes in `memory`, which do not overlap `from`.
pub(crate) unsafe fn copy_from_host(from: &[u8], memory: Memory, to: *mut u8) -> Result<()> {
    match memory {
        Memory::Cpu | Memory::Pinned => {
            // SAFETY: writable and not overlapping by this function's contract; `from` is a readable slice.
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
            Ok(())
        }
        // SAFETY: by this function's contract.
        Memory::Gpu(device) => unsafe { cuda::copy_to_device(device, from, to) },
    }
}
