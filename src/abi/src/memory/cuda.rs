//! The five functions of the CUDA driver that copies need, found with dlopen.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::error::{Code, Error, Result};

type CuResult = c_uint;
type CuDevice = c_int;
type CuContext = *mut c_void;
type CuDevicePtr = u64;

const CUDA_ERROR_OUT_OF_MEMORY: CuResult = 2;

struct Driver {
    device_get: unsafe extern "C" fn(*mut CuDevice, c_int) -> CuResult,
    primary_retain: unsafe extern "C" fn(*mut CuContext, CuDevice) -> CuResult,
    push_current: unsafe extern "C" fn(CuContext) -> CuResult,
    pop_current: unsafe extern "C" fn(*mut CuContext) -> CuResult,
    to_device: unsafe extern "C" fn(CuDevicePtr, *const c_void, usize) -> CuResult,
    to_host: unsafe extern "C" fn(*mut c_void, CuDevicePtr, usize) -> CuResult,
    synchronize: unsafe extern "C" fn() -> CuResult,
    error_name: unsafe extern "C" fn(CuResult, *mut *const c_char) -> CuResult,
    /// Primary contexts that we have retained, by device number. They are the process's anyway, and stay.
    contexts: Mutex<Vec<(i32, Context)>>,
}

#[derive(Clone, Copy)]
struct Context(CuContext);

// SAFETY: the driver allows a context to be current on any thread.
unsafe impl Send for Context {}

/// The driver, opened once; the reason is kept where there is none.
fn driver() -> Result<&'static Driver> {
    static DRIVER: OnceLock<Result<Driver>> = OnceLock::new();
    DRIVER.get_or_init(Driver::open).as_ref().map_err(Error::clone)
}

impl Driver {
    fn open() -> Result<Self> {
        // SAFETY: a constant NUL-terminated name. The library is never closed, so its functions stay valid.
        let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
        if library.is_null() {
            return Err(Error::unavailable(
                "a tensor lies in GPU memory and the CUDA driver (libcuda.so.1) cannot be loaded",
            ));
        }
        // SAFETY: each name has the type of its field, by the driver's documentation.
        let (init, driver) = unsafe {
            let init: unsafe extern "C" fn(c_uint) -> CuResult = symbol(library, c"cuInit")?;
            let driver = Driver {
                device_get: symbol(library, c"cuDeviceGet")?,
                primary_retain: symbol(library, c"cuDevicePrimaryCtxRetain")?,
                push_current: symbol(library, c"cuCtxPushCurrent_v2")?,
                pop_current: symbol(library, c"cuCtxPopCurrent_v2")?,
                to_device: symbol(library, c"cuMemcpyHtoD_v2")?,
                to_host: symbol(library, c"cuMemcpyDtoH_v2")?,
                synchronize: symbol(library, c"cuCtxSynchronize")?,
                error_name: symbol(library, c"cuGetErrorName")?,
                contexts: Mutex::new(Vec::new()),
            };
            (init, driver)
        };
        // SAFETY: 0 is the only flag value there is.
        driver.check("cuInit", unsafe { init(0) })?;
        Ok(driver)
    }

    fn check(&self, call: &str, result: CuResult) -> Result<()> {
        if result == 0 {
            return Ok(());
        }
        let mut name = std::ptr::null();
        // SAFETY: `name` is a valid place to write to; the string written is the driver's and constant.
        let name = unsafe {
            (self.error_name)(result, &mut name);
            crate::error::copy_c_str(name)
        };
        let code = if result == CUDA_ERROR_OUT_OF_MEMORY { Code::Unavailable } else { Code::Internal };
        Err(Error::new(code, format!("{call} fails: {name} ({result})")))
    }

    fn context(&self, device: i32) -> Result<Context> {
        let mut contexts = self.contexts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, context)) = contexts.iter().find(|(number, _)| *number == device) {
            return Ok(*context);
        }
        let mut handle = 0;
        let mut context = std::ptr::null_mut();
        // SAFETY: both calls write to valid places; an unknown device number is an error of the first.
        unsafe {
            self.check("cuDeviceGet", (self.device_get)(&mut handle, device))?;
            self.check("cuDevicePrimaryCtxRetain", (self.primary_retain)(&mut context, handle))?;
        }
        contexts.push((device, Context(context)));
        Ok(Context(context))
    }

    /// Runs `copy` with the device's context current, and waits until what it started is done.
    fn on_device(&self, device: i32, copy: impl FnOnce() -> Result<()>) -> Result<()> {
        let context = self.context(device)?;
        // SAFETY: a context that we retained.
        self.check("cuCtxPushCurrent", unsafe { (self.push_current)(context.0) })?;
        let result = copy().and_then(|()| {
            // SAFETY: a context is current.
            self.check("cuCtxSynchronize", unsafe { (self.synchronize)() })
        });
        let mut popped = std::ptr::null_mut();
        // SAFETY: undoes the push above; `popped` is a valid place to write to.
        let restored = self.check("cuCtxPopCurrent", unsafe { (self.pop_current)(&mut popped) });
        result.and(restored)
    }
}

/// The function `name` of `library`.
///
/// # Safety
/// `F` is the type of a C function pointer, and the type of that function.
unsafe fn symbol<F: Copy>(library: *mut c_void, name: &CStr) -> Result<F> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    // SAFETY: an open library and a NUL-terminated name.
    let address = unsafe { libc::dlsym(library, name.as_ptr()) };
    if address.is_null() {
        return Err(Error::unavailable(format!(
            "the CUDA driver (libcuda.so.1) is too old: it has no {}",
            name.to_string_lossy()
        )));
    }
    // SAFETY: not NULL, of the same size, and of that type by this function's contract.
    Ok(unsafe { std::mem::transmute_copy(&address) })
}

/// # Safety
/// `from` points to `to.len()` readable bytes of device `device`.
pub(super) unsafe fn copy_from_device(device: i32, from: *const u8, to: &mut [u8]) -> Result<()> {
    let driver = driver()?;
    driver.on_device(device, || {
        // SAFETY: the device's context is current; both sides are valid by this function's contract.
        driver.check("cuMemcpyDtoH", unsafe {
            (driver.to_host)(to.as_mut_ptr().cast(), from.addr() as CuDevicePtr, to.len())
        })
    })
}

/// # Safety
/// `to` points to `from.len()` writable bytes of device `device`.
pub(super) unsafe fn copy_to_device(device: i32, from: &[u8], to: *mut u8) -> Result<()> {
    let driver = driver()?;
    driver.on_device(device, || {
        // SAFETY: the device's context is current; both sides are valid by this function's contract.
        driver.check("cuMemcpyHtoD", unsafe {
            (driver.to_device)(to.addr() as CuDevicePtr, from.as_ptr().cast(), from.len())
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Needs a GPU; passes without a look at anything where there is no driver.
    #[test]
    fn bytes_survive_the_way_to_a_gpu_and_back() {
        let Ok(driver) = driver() else { return };
        let data: Vec<u8> = (0..1_000_003u32).map(|i| (i * 7) as u8).collect();
        let mut back = vec![0; data.len() - 1];
        // SAFETY: the driver's own allocation, by its documented type, with room for all that is copied; the
        // addresses are handed to this module's functions as a tensor's would be.
        unsafe {
            let library = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW);
            let allocate: unsafe extern "C" fn(*mut CuDevicePtr, usize) -> CuResult =
                symbol(library, c"cuMemAlloc_v2").expect("a driver allocates");
            let mut memory: CuDevicePtr = 0;
            driver.on_device(0, || driver.check("cuMemAlloc", allocate(&mut memory, data.len()))).expect("memory");
            let at = |offset: u64| std::ptr::without_provenance_mut::<u8>((memory + offset) as usize);
            copy_to_device(0, &data, at(0)).expect("copied there");
            // From an odd address, on a thread that never saw the context.
            let address = at(1).addr();
            let from = move || std::ptr::without_provenance::<u8>(address);
            std::thread::scope(|scope| {
                let copied = scope.spawn(|| copy_from_device(0, from(), &mut back)).join();
                copied.expect("no panic").expect("copied back");
            });
        }
        assert_eq!(back, data[1..]);
        // SAFETY: an unknown device is refused before anything is copied.
        let refused = unsafe { copy_from_device(77, std::ptr::null(), &mut back) };
        assert!(refused.expect_err("no such device").message().contains("cuDeviceGet"));
    }
}
