//! Typed launchers of the kernels in `kernels/*.cu`, which the build script compiles for every supported GPU.
