//! The built libraries, and how this process comes to have them.

use std::ffi::{CStr, CString, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// The directory of the stand-in libraries, for `LD_LIBRARY_PATH` of a server: `libcuda.so`, `libcublasLt.so`, and
/// `libcudart_device.so` for its `LD_PRELOAD`.
pub fn directory() -> PathBuf {
    Path::new(env!("OUT_DIR")).join("lib")
}

/// Whether the tests of this process run on the machine's own driver and cublasLt: `TRITON_RUST_REAL_GPU=1` says so.
pub fn is_real() -> bool {
    std::env::var_os("TRITON_RUST_REAL_GPU").is_some_and(|value| value == "1")
}

/// Loads the driver and cublasLt into this process for good, so that opening them by name finds them. Any number of
/// calls does it once.
///
/// # Panics
/// When a library does not load, or when the CPU lacks AVX2.
pub fn install() {
    driver();
}

/// The handle of the driver's library.
fn driver() -> *mut c_void {
    struct Handle(*mut c_void);
    // SAFETY: what dlopen returns may be used from any thread.
    unsafe impl Send for Handle {}
    // SAFETY: as above.
    unsafe impl Sync for Handle {}
    static DRIVER: OnceLock<Handle> = OnceLock::new();
    DRIVER
        .get_or_init(|| {
            assert!(
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c"),
                "the software CUDA device, which this test needs, runs on CPUs with AVX2, FMA and F16C only"
            );
            let driver = open("libcuda.so");
            open("libcublasLt.so");
            Handle(driver)
        })
        .0
}

fn open(name: &str) -> *mut c_void {
    let path = CString::new(directory().join(name).as_os_str().as_bytes()).expect("a path without NUL");
    // SAFETY: a library of ours, whose loading runs constructors that only fill its own tables; it is never closed.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    if handle.is_null() {
        // SAFETY: dlerror after a failure gives a NUL-terminated text.
        let why = unsafe { CStr::from_ptr(libc::dlerror()) };
        panic!("{name} does not load: {}", why.to_string_lossy());
    }
    handle
}

/// The driver library's function `name`.
///
/// # Safety
/// `F` is the type of that function in `native/control.cpp` or `native/driver.cpp`.
pub(crate) unsafe fn function<F: Copy>(name: &CStr) -> F {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    // SAFETY: an open library and a NUL-terminated name.
    let address = unsafe { libc::dlsym(driver(), name.as_ptr()) };
    assert!(!address.is_null(), "{name:?} is not in the stand-in driver");
    // SAFETY: not null, of the same size, and of that type by this function's contract.
    unsafe { std::mem::transmute_copy(&address) }
}
