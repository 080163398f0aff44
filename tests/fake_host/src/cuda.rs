//! "GPU" memory, and a stand-in for the CUDA driver that knows it.
//!
//! A device pointer is an address of ordinary memory with a bit set that makes it non-canonical: whoever follows
//! it without the driver dies. The stand-in takes the bit off and copies.

use std::ffi::{CString, c_int};
use std::path::Path;
use std::process::Command;

const DEVICE_BIT: usize = 1 << 62;

/// The stand-in, loaded as `libcuda.so.1` into this process for good.
pub struct FakeCuda {
    copies: extern "C" fn() -> c_int,
    fail_next: extern "C" fn(c_int),
}

impl FakeCuda {
    /// Compiles it into `directory` and loads it, so that a later `dlopen("libcuda.so.1")` finds it.
    ///
    /// # Panics
    /// When that fails, or when the process has a CUDA driver already.
    pub fn load(directory: &Path) -> Self {
        let source = directory.join("fake_cuda.c");
        let library = directory.join("libcuda.so.1");
        std::fs::write(&source, include_str!("fake_cuda.c")).expect("writable directory");
        let compiled = Command::new("cc")
            .args(["-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1", "-o"])
            .args([&library, &source])
            .status()
            .expect("cc runs");
        assert!(compiled.success(), "cc fails");
        let path = CString::new(library.as_os_str().as_encoded_bytes()).expect("path without NUL");
        // SAFETY: a library whose loading runs no code; it is never closed.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
        assert!(!handle.is_null(), "the stand-in does not load");
        // SAFETY: the functions have these types in the stand-in's source.
        unsafe {
            let copies = libc::dlsym(handle, c"fake_cuda_copies".as_ptr());
            let fail_next = libc::dlsym(handle, c"fake_cuda_fail_next".as_ptr());
            assert!(!copies.is_null() && !fail_next.is_null(), "another libcuda.so.1 is loaded");
            Self {
                copies: std::mem::transmute::<*mut libc::c_void, extern "C" fn() -> c_int>(copies),
                fail_next: std::mem::transmute::<*mut libc::c_void, extern "C" fn(c_int)>(fail_next),
            }
        }
    }

    /// How many copies there were in all.
    pub fn copies(&self) -> i32 {
        (self.copies)()
    }

    /// Lets the next copy fail with this CUDA error (2: out of memory, 719: launch failure).
    pub fn fail_next(&self, error: i32) {
        (self.fail_next)(error);
    }
}

/// What the host hands out instead of `pointer` for GPU memory.
pub(crate) fn device_pointer(pointer: *const u8) -> *const u8 {
    pointer.map_addr(|address| address | DEVICE_BIT)
}
