//! Generates the raw bindings from `include/triton_abi.h`.
//!
//! libclang comes from the PyPI wheel that `make deps` puts into `.venv`, unless `LIBCLANG_PATH` names
//! another. The header is read with our own three standard headers and none of the system's, so the
//! result is the same on every machine.

use std::env;
use std::path::{Path, PathBuf};
use std::process::exit;

fn main() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let include = root.join("include");
    for file in ["triton_abi.h", "shim/stddef.h", "shim/stdint.h", "shim/stdbool.h"] {
        println!("cargo::rerun-if-changed={}", include.join(file).display());
    }
    println!("cargo::rerun-if-env-changed=LIBCLANG_PATH");
    // The tests' executables stand in for the server: what they dlopen finds the TRITON* symbols in them.
    println!("cargo::rustc-link-arg-tests=-rdynamic");

    if env::var_os("LIBCLANG_PATH").is_none() {
        match libclang_of_the_project(&root) {
            // SAFETY: a build script has one thread here; nothing reads the environment meanwhile.
            Some(dir) => unsafe { env::set_var("LIBCLANG_PATH", dir) },
            None => fail(&format!("no libclang in {}/.venv", root.canonicalize().unwrap_or(root.clone()).display())),
        }
    }

    let bindings = bindgen::Builder::default()
        .header(include.join("triton_abi.h").display().to_string())
        .clang_args(["-nostdinc", "-isystem"])
        .clang_arg(include.join("shim").display().to_string())
        .allowlist_item("TRITON.*")
        .default_enum_style(bindgen::EnumVariation::Consts)
        .prepend_enum_name(false)
        .generate_comments(false)
        .layout_tests(false)
        .generate()
        .unwrap_or_else(|e| fail(&format!("bindgen: {e}")));
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    bindings.write_to_file(out.join("sys.rs")).unwrap_or_else(|e| fail(&format!("cannot write the bindings: {e}")));
}

fn libclang_of_the_project(root: &Path) -> Option<PathBuf> {
    let lib = root.join(".venv/lib");
    let mut found = std::fs::read_dir(lib)
        .ok()?
        .flatten()
        .map(|entry| entry.path().join("site-packages/clang/native"))
        .filter(|dir| dir.join("libclang.so").exists());
    found.next()
}

fn fail(why: &str) -> ! {
    println!("cargo::error={why}");
    println!(
        "cargo::error=Run `make deps` in the repository's top directory (it installs libclang from PyPI into .venv), or set LIBCLANG_PATH to a directory that holds libclang.so."
    );
    exit(1);
}
