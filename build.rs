//! Linker arguments of the tests.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // The fault injection test opens the built plugin, which finds the TRITON* symbols in the test's executable.
    println!("cargo::rustc-link-arg-tests=-rdynamic");
}
