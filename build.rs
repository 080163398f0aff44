//! Compiles the CUDA kernels, and gives the linker the tests' arguments.

#[cfg(feature = "cuda")]
#[path = "src/engine/cuda/kernels/compile.rs"]
mod kernels;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // The fault injection test opens the built plugin, which finds the TRITON* symbols in the test's executable.
    println!("cargo::rustc-link-arg-tests=-rdynamic");
    #[cfg(feature = "cuda")]
    kernels::build();
}
