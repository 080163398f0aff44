//! Builds the stand-in libraries: `libcuda.so` with all kernels, `libcublasLt.so`, and `libcudart_device.so`, which a
//! server is started with.
//!
//! A C++ compiler (`CXX`, else `g++`) is all that is needed. What has not changed is not compiled again.

#[path = "build/compile.rs"]
mod compile;
#[path = "build/kernels.rs"]
mod kernels;

use std::env;
use std::path::{Path, PathBuf};
use std::process::exit;

use compile::{Compiler, Job};

/// Where the engine's kernels are, from this package's directory.
const KERNELS: &str = "../../src/engine/cuda/kernels";

fn main() {
    if env::var("CARGO_CFG_TARGET_ARCH").as_deref() != Ok("x86_64")
        || env::var("CARGO_CFG_TARGET_OS").as_deref() != Ok("linux")
    {
        fail("the software CUDA device, which the tests need, runs on x86-64 Linux only");
    }
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    let kernels = root.join(KERNELS);
    let watched = if kernels.is_dir() { kernels.clone() } else { root.join("../../src/engine") };
    for path in ["build.rs", "build", "native", "selftest"].map(|name| root.join(name)).iter().chain([&watched]) {
        println!("cargo::rerun-if-changed={}", path.display());
    }
    println!("cargo::rerun-if-env-changed=CXX");
    if let Err(why) = build(&root, &out, &kernels) {
        fail(&why);
    }
}

fn build(root: &Path, out: &Path, kernels: &Path) -> Result<(), String> {
    let native = root.join("native");
    let compiler = Compiler::new(out, &native)?;
    let mut driver = Vec::new();
    for file in ["block", "control", "copy", "driver", "executor", "extension", "launch", "memory", "stream"] {
        driver.push(Job::source(native.join(format!("{file}.cpp"))));
    }
    driver.push(stubs(root, out, "driver")?);
    for directory in [kernels, &root.join("selftest")] {
        for source in compile::files_with_extension(directory, "cu") {
            let text = compiler.preprocess(&source, &[directory, &native])?;
            let name = source.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            let text = kernels::for_the_device(&text).map_err(|why| format!("{name}.cu: {why}"))?;
            driver.push(Job::generated(out.join(format!("kernel_{name}.cpp")), text)?.with_checks());
        }
    }
    compiler.link("libcuda.so", driver, &[])?;
    let cublaslt = ["cublaslt", "gemm"].map(|file| Job::source(native.join(format!("{file}.cpp"))));
    let cublaslt = cublaslt.into_iter().chain([stubs(root, out, "cublaslt")?]).collect();
    compiler.link("libcublasLt.so", cublaslt, &["cuda"])?;
    compiler.link("libcudart_device.so", vec![Job::source(native.join("cudart.cpp"))], &["cuda"])?;
    Ok(())
}

/// Weak functions of all names that the library has, for those that are not implemented.
fn stubs(root: &Path, out: &Path, library: &str) -> Result<Job, String> {
    let names = std::fs::read_to_string(root.join(format!("native/{library}_symbols.txt")))
        .map_err(|e| format!("{library}_symbols.txt: {e}"))?;
    let mut text = String::from("extern \"C\" int software_device_stub(const char* name);\n");
    for name in names.lines() {
        text += &format!(
            "extern \"C\" __attribute__((weak, visibility(\"default\"))) int {name}() {{ return software_device_stub(\"{name}\"); }}\n"
        );
    }
    Job::generated(out.join(format!("stubs_{library}.cpp")), text)
}

fn fail(why: &str) -> ! {
    for line in why.lines() {
        println!("cargo::error={line}");
    }
    exit(1);
}
