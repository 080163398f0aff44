//! Compiles the CUDA kernels, and gives the linker the tests' arguments.

#[cfg(feature = "cuda")]
#[path = "src/engine/cuda/kernels/compile.rs"]
mod kernels;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // The fault injection test opens the built plugin, which finds the TRITON* symbols in the test's executable.
    // (Not -rdynamic, which would keep what no test calls.)
    println!("cargo::rustc-link-arg-tests=-Wl,--export-dynamic-symbol=TRITON*");
    #[cfg(feature = "cuda")]
    kernels::build();
}
