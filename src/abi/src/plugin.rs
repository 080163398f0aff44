//! Where the plugin itself lies.

use std::ffi::{CStr, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use crate::error::{Error, Result};

/// The directory of the shared library that this code is in, as an absolute path without links: what is installed beside the
/// backend is found there, however the server was told where that is.
pub fn plugin_directory() -> Result<PathBuf> {
    let unknown = || Error::internal("the backend does not find its own file");
    // SAFETY: all zeros is a valid value: pointers that are NULL.
    let mut found: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: the address of a function of this library, and a valid place to write to.
    let known = unsafe { libc::dladdr(plugin_directory as *const libc::c_void, &mut found) } != 0;
    if !known || found.dli_fname.is_null() {
        return Err(unknown());
    }
    // SAFETY: a NUL-terminated string of the loader's, which lives as long as the library.
    let name = unsafe { CStr::from_ptr(found.dli_fname) };
    let path = PathBuf::from(OsStr::from_bytes(name.to_bytes()));
    path.canonicalize().ok().and_then(|path| path.parent().map(PathBuf::from)).ok_or_else(unknown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_directory_of_the_running_file() {
        let own = std::env::current_exe().expect("Linux tells").canonicalize().expect("it runs");
        assert_eq!(plugin_directory().expect("found"), own.parent().expect("a directory"));
    }
}
