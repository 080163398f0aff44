//! Prints the directory of the stand-in libraries, for `LD_LIBRARY_PATH` of a server.

fn main() {
    println!("{}", cuda_device::directory().display());
}
