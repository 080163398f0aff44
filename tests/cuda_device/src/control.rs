//! What tests do to the device: settings, faults, counts.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int};
use std::ops::Deref;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::library::function;

/// Stands for a device's number where pinned host memory is meant.
pub const PINNED: i32 = -1;

/// The order in which a block's threads run, and blocks of a grid, between the points where they wait for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// By rising number.
    Forward,
    /// By falling number.
    Reverse,
    /// By chance, with this seed.
    Random(u64),
}

static STATE: RwLock<()> = RwLock::new(());

/// Access for tests that only compute; many at a time.
pub struct Shared(Device, #[allow(dead_code, reason = "held")] RwLockReadGuard<'static, ()>);

/// Access for tests that change the device's state; one at a time. Dropping it makes the settings what they were.
pub struct Exclusive(Device, #[allow(dead_code, reason = "held")] RwLockWriteGuard<'static, ()>);

/// Waits until no test has [`exclusive`] access. On a real device nothing is installed, and nothing can be asked of it.
pub fn shared() -> Shared {
    if !crate::is_real() {
        crate::install();
    }
    Shared(Device(()), STATE.read().unwrap_or_else(PoisonError::into_inner))
}

/// Waits until no other test has access.
///
/// # Panics
/// On a real device. Tests that need this are in a module `software`, which is skipped there.
pub fn exclusive() -> Exclusive {
    assert!(!crate::is_real(), "a real device has no settings and no faults to inject: skip `software::`");
    crate::install();
    Exclusive(Device(()), STATE.write().unwrap_or_else(PoisonError::into_inner))
}

impl Deref for Shared {
    type Target = Device;
    fn deref(&self) -> &Device {
        &self.0
    }
}

impl Deref for Exclusive {
    type Target = Device;
    fn deref(&self) -> &Device {
        &self.0
    }
}

impl Drop for Exclusive {
    fn drop(&mut self) {
        self.set_order(Order::Forward);
        self.set_lazy(false);
        self.set_poison(true);
        self.set_verbose(true);
        self.set_memory(0);
        self.clear_faults();
        self.recover();
    }
}

/// What can be asked of the devices.
pub struct Device(());

impl Device {
    /// Bytes that are allocated on device `device` ([`PINNED`]: pinned host memory).
    pub fn allocated(&self, device: i32) -> u64 {
        // SAFETY: the function's type.
        unsafe { function::<unsafe extern "C" fn(c_int) -> u64>(c"cuda_device_allocated")(device) }
    }

    /// Whether host code that follows a device's address faults, which takes memory protection keys of CPU and kernel.
    pub fn protects_memory(&self) -> bool {
        // SAFETY: the function's type.
        unsafe { function::<unsafe extern "C" fn() -> bool>(c"cuda_device_protects_memory")() }
    }

    /// Objects that were created and not destroyed: `contexts` (retained), `streams`, `events`, `modules`, `cublasLt`
    /// (handles, descriptors, layouts and preferences).
    pub fn live(&self, kind: &str) -> i64 {
        let kind = c_string(kind);
        // SAFETY: the function's type; a NUL-terminated text.
        unsafe { function::<unsafe extern "C" fn(*const c_char) -> i64>(c"cuda_device_live")(kind.as_ptr()) }
    }

    /// How often the call `name` was made; `kernel NAME` counts launches of that kernel.
    pub fn calls(&self, name: &str) -> u64 {
        let name = c_string(name);
        // SAFETY: the function's type; a NUL-terminated text.
        unsafe { function::<unsafe extern "C" fn(*const c_char) -> u64>(c"cuda_device_calls")(name.as_ptr()) }
    }

    /// All calls that were made, and how often, kernels included.
    pub fn all_calls(&self) -> BTreeMap<String, u64> {
        let lines = text(c"cuda_device_all_calls");
        let pair =
            |line: &str| line.rsplit_once(' ').and_then(|(name, count)| Some((name.into(), count.parse().ok()?)));
        lines.lines().filter_map(pair).collect()
    }

    /// Why the device last refused something, with the thread's coordinates where a kernel was at fault.
    pub fn message(&self) -> String {
        text(c"cuda_device_message")
    }
}

impl Exclusive {
    /// The order of threads from now on.
    pub fn set_order(&self, order: Order) {
        let name = match order {
            Order::Forward => "forward",
            Order::Reverse => "reverse",
            Order::Random(seed) => {
                set("SEED", &seed.to_string());
                "random"
            }
        };
        set("ORDER", name);
    }

    /// Lazy streams do their work when the host waits for it, and no earlier.
    pub fn set_lazy(&self, lazy: bool) {
        set("LAZY", if lazy { "1" } else { "0" });
    }

    /// Whether fresh device, pinned and shared memory is filled with 0xff: NaN in every float type.
    pub fn set_poison(&self, poison: bool) {
        set("POISON", if poison { "1" } else { "0" });
    }

    /// Whether refusals are printed to standard error.
    pub fn set_verbose(&self, verbose: bool) {
        set("VERBOSE", if verbose { "1" } else { "0" });
    }

    /// Bytes that each device has (0: 4 GiB).
    pub fn set_memory(&self, bytes: u64) {
        set("MEMORY", &bytes.to_string());
    }

    /// Lets the `nth` call of `name` from now on, counted from 1, fail with `code`: a CUresult, or a cublasStatus for a
    /// function of cublasLt. `name` may be `*`: any call; code 2 then is CUBLAS_STATUS_ALLOC_FAILED in cublasLt, every
    /// other code CUBLAS_STATUS_EXECUTION_FAILED. A code of a fault (700, 714 to 719, ...) loses the device, too.
    pub fn fail(&self, name: &str, nth: u64, code: i32) {
        set("FAIL", &format!("{name}:{nth}:{code}"));
    }

    /// Faults that were set and have not happened yet.
    pub fn faults_left(&self) -> u64 {
        // SAFETY: the function's type.
        unsafe { function::<unsafe extern "C" fn() -> u64>(c"cuda_device_faults_left")() }
    }

    /// Forgets the faults that have not happened yet.
    pub fn clear_faults(&self) {
        set("FAIL", "");
    }

    /// Starts counting calls anew.
    pub fn forget_calls(&self) {
        // SAFETY: the function's type.
        unsafe { function::<unsafe extern "C" fn()>(c"cuda_device_forget_calls")() }
    }

    /// Device `device` is lost: every call gets `code`.
    pub fn lose(&self, device: i32, code: i32) {
        // SAFETY: the function's type.
        unsafe { function::<unsafe extern "C" fn(c_int, c_int)>(c"cuda_device_lose")(device, code) }
    }

    /// Lost devices work again. Nothing else changes: what was allocated is.
    pub fn recover(&self) {
        // SAFETY: the function's type.
        unsafe { function::<unsafe extern "C" fn()>(c"cuda_device_recover")() }
    }
}

fn set(name: &str, value: &str) {
    let (c_name, c_value) = (c_string(name), c_string(value));
    // SAFETY: the function's type; NUL-terminated texts.
    let known = unsafe {
        function::<unsafe extern "C" fn(*const c_char, *const c_char) -> bool>(c"cuda_device_set")(
            c_name.as_ptr(),
            c_value.as_ptr(),
        )
    };
    assert!(known, "{name} cannot be '{value}'");
}

/// What a function says that fills a buffer and returns the size it needs.
fn text(name: &CStr) -> String {
    let mut buffer: Vec<u8> = Vec::new();
    loop {
        // SAFETY: the function's type; a buffer of that size.
        let needed = unsafe {
            function::<unsafe extern "C" fn(*mut c_char, u64) -> u64>(name)(
                buffer.as_mut_ptr().cast::<c_char>(),
                buffer.len() as u64,
            )
        };
        if needed as usize <= buffer.len() {
            let said = CStr::from_bytes_until_nul(&buffer).expect("a NUL");
            return said.to_string_lossy().into_owned();
        }
        buffer = vec![0u8; needed as usize];
    }
}

fn c_string(text: &str) -> CString {
    CString::new(text).expect("no NUL")
}
