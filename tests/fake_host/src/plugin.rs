//! A plugin, opened as the server opens it.

use std::ffi::{CStr, CString, c_void};
use std::hint::black_box;
use std::path::Path;

use crate::sys::*;
use crate::{model_calls, request_calls, server_calls};

type OnBackend = unsafe extern "C" fn(*mut TRITONBACKEND_Backend) -> *mut TRITONSERVER_Error;
type OnModel = unsafe extern "C" fn(*mut TRITONBACKEND_Model) -> *mut TRITONSERVER_Error;
type OnInstance = unsafe extern "C" fn(*mut TRITONBACKEND_ModelInstance) -> *mut TRITONSERVER_Error;

/// The entry points of a plugin. It stays loaded to the end of the process, as in the server.
pub struct Plugin {
    pub(crate) initialize: OnBackend,
    pub(crate) finalize: OnBackend,
    pub(crate) attributes: unsafe extern "C" fn(
        *mut TRITONBACKEND_Backend,
        *mut TRITONBACKEND_BackendAttribute,
    ) -> *mut TRITONSERVER_Error,
    pub(crate) model_initialize: OnModel,
    pub(crate) model_finalize: OnModel,
    pub(crate) instance_initialize: OnInstance,
    pub(crate) instance_finalize: OnInstance,
    pub(crate) instance_ready: OnInstance,
    pub(crate) execute: unsafe extern "C" fn(
        *mut TRITONBACKEND_ModelInstance,
        *mut *mut TRITONBACKEND_Request,
        u32,
    ) -> *mut TRITONSERVER_Error,
}

impl Plugin {
    /// Opens a plugin.
    ///
    /// # Panics
    /// When it does not load, with the loader's reason.
    pub fn open(path: &Path) -> Self {
        let c_path = CString::new(path.as_os_str().as_encoded_bytes()).expect("path without NUL");
        // SAFETY: a NUL-terminated path. The plugin runs no code of its own when it is loaded.
        let library = unsafe { libc::dlopen(c_path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!library.is_null(), "{} does not load: {}", path.display(), loader_error());
        Self::with_symbols_of(library)
    }

    /// Opens a plugin that cargo built for this test: `file` is relative to the directory of the build's profile
    /// (`target/debug`), which is found from the test's own executable.
    ///
    /// # Panics
    /// When it is not there, or does not load.
    pub fn built(file: &str) -> Self {
        let executable = std::env::current_exe().expect("a test has an executable");
        let directory = executable.ancestors().nth(2).expect("an executable lies in target/*/deps");
        let path = directory.join(file);
        assert!(path.exists(), "{} is not built: run `cargo build --all-targets`", path.display());
        Self::open(&path)
    }

    /// The plugin that is linked into the test's executable itself.
    ///
    /// # Panics
    /// When there is none.
    pub fn in_this_executable() -> Self {
        // SAFETY: NULL asks for the executable, which is loaded already.
        let library = unsafe { libc::dlopen(std::ptr::null(), libc::RTLD_NOW) };
        assert!(!library.is_null(), "{}", loader_error());
        Self::with_symbols_of(library)
    }

    fn with_symbols_of(library: *mut c_void) -> Self {
        keep_the_host();
        // SAFETY: each entry point has the type that the server calls it with.
        unsafe {
            Self {
                initialize: symbol(library, c"TRITONBACKEND_Initialize"),
                finalize: symbol(library, c"TRITONBACKEND_Finalize"),
                attributes: symbol(library, c"TRITONBACKEND_GetBackendAttribute"),
                model_initialize: symbol(library, c"TRITONBACKEND_ModelInitialize"),
                model_finalize: symbol(library, c"TRITONBACKEND_ModelFinalize"),
                instance_initialize: symbol(library, c"TRITONBACKEND_ModelInstanceInitialize"),
                instance_finalize: symbol(library, c"TRITONBACKEND_ModelInstanceFinalize"),
                instance_ready: symbol(library, c"TRITONBACKEND_ModelInstanceReady"),
                execute: symbol(library, c"TRITONBACKEND_ModelInstanceExecute"),
            }
        }
    }
}

/// Names every function of the host, so that the linker keeps them all for the plugin to find.
fn keep_the_host() {
    black_box((
        server_calls::addresses(),
        server_calls::infallible_addresses(),
        model_calls::addresses(),
        request_calls::addresses(),
        request_calls::send_address(),
    ));
}

/// # Safety
/// `F` is the type of the function with this name.
unsafe fn symbol<F: Copy>(library: *mut c_void, name: &CStr) -> F {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    // SAFETY: an open library and a NUL-terminated name.
    let address = unsafe { libc::dlsym(library, name.as_ptr()) };
    assert!(!address.is_null(), "the plugin has no {}", name.to_string_lossy());
    // SAFETY: of the same size, and of that type by this function's contract.
    unsafe { std::mem::transmute_copy(&address) }
}

fn loader_error() -> String {
    // SAFETY: dlerror gives NULL or a NUL-terminated string that lives until the next call of the loader.
    unsafe {
        let text = libc::dlerror();
        if text.is_null() {
            return String::new();
        }
        CStr::from_ptr(text).to_string_lossy().into_owned()
    }
}
