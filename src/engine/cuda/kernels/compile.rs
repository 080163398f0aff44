//! Part of the build script: compiles the kernels of this directory for every supported GPU into one fatbin. The
//! compilers come from PyPI wheels that `make deps` puts into `.venv`; neither a GPU nor a driver nor a CUDA toolkit is
//! needed.
//!
//! NVRTC makes PTX of all files as one translation unit, ptxas makes of it the machine code of each architecture, and
//! nvFatbin joins them.

use std::env;
use std::ffi::{CString, c_char, c_int, c_void};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio, exit};
use std::ptr::null_mut;

use libloading::{Library, Symbol};

/// The machine code that is made. A later GPU's driver makes its own from the PTX.
const ARCHITECTURES: [&str; 6] = ["80", "86", "89", "90", "100", "120"];
/// What the PTX asks of a GPU.
const PTX_ARCHITECTURE: &str = "80";

const KERNELS: &str = "src/engine/cuda/kernels";

/// Writes `kernels.fatbin` and `kernels.log`, which says what ptxas reported, to `OUT_DIR`.
pub fn build() {
    println!("cargo::rerun-if-changed={KERNELS}");
    let compilers = Compilers::find();
    println!("cargo::rerun-if-changed={}", compilers.ptxas.display());

    let ptx = compile(&compilers.nvrtc);
    write("kernels.ptx", &ptx);
    let cubins = assemble(&compilers.ptxas);
    write("kernels.fatbin", &join(&compilers.nvfatbin, &ptx, &cubins));
}

/// Files of the wheels.
struct Compilers {
    nvrtc: PathBuf,
    ptxas: PathBuf,
    nvfatbin: PathBuf,
}

impl Compilers {
    fn find() -> Self {
        let packages = fs::read_dir(".venv/lib").into_iter().flatten().flatten();
        let find = |file: &str, dirs: &[PathBuf]| {
            let mut paths = dirs.iter().map(|dir| dir.join("site-packages/nvidia").join(file));
            paths.find(|path| path.exists()).unwrap_or_else(|| fail(&format!("no nvidia/{file} in .venv")))
        };
        let dirs: Vec<_> = packages.map(|entry| entry.path()).collect();
        Self {
            nvrtc: find("cuda_nvrtc/lib/libnvrtc.so.12", &dirs),
            ptxas: find("cuda_nvcc/bin/ptxas", &dirs),
            nvfatbin: find("nvfatbin/lib/libnvfatbin.so.12", &dirs),
        }
    }
}

/// Calls a C function of a library by its name; it returns its error, 0 for none.
macro_rules! call {
    ($library:expr, $name:ident: $($value:expr => $kind:ty),*) => {{
        // SAFETY: the function has these parameters in the header of the pinned version.
        let result = unsafe {
            let function: Symbol<unsafe extern "C" fn($($kind),*) -> c_int> = $library
                .get(concat!(stringify!($name), "\0").as_bytes())
                .unwrap_or_else(|e| fail(&format!("{}: {e}", stringify!($name))));
            function($($value),*)
        };
        result
    }};
}

/// PTX of all kernels.
fn compile(nvrtc: &Path) -> Vec<u8> {
    let library = open(nvrtc);
    let (mut names, mut texts, mut source) = (Vec::new(), Vec::new(), String::new());
    for path in sources() {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name.ends_with(".cu") {
            source.push_str(&format!("#include \"{name}\"\n"));
        }
        names.push(c_string(name));
        texts.push(c_string(fs::read(&path).unwrap_or_else(|e| fail(&format!("{}: {e}", path.display())))));
    }
    let source = c_string(source);
    let names: Vec<_> = names.iter().map(|name| name.as_ptr()).collect();
    let texts: Vec<_> = texts.iter().map(|text| text.as_ptr()).collect();
    let options = [format!("--gpu-architecture=compute_{PTX_ARCHITECTURE}"), "--std=c++17".into()].map(c_string);
    let options = options.each_ref().map(|option| option.as_ptr());

    let mut program: *mut c_void = null_mut();
    let error = call!(library, nvrtcCreateProgram: &mut program => *mut *mut c_void, source.as_ptr() => *const c_char,
        c"kernels.cu".as_ptr() => *const c_char, names.len() as c_int => c_int, texts.as_ptr() => *const *const c_char,
        names.as_ptr() => *const *const c_char);
    if error != 0 {
        fail(&format!("NVRTC makes no program, error {error}"));
    }
    let error = call!(library, nvrtcCompileProgram: program => *mut c_void, options.len() as c_int => c_int,
        options.as_ptr() => *const *const c_char);
    if error != 0 {
        let mut size = 0;
        call!(library, nvrtcGetProgramLogSize: program => *mut c_void, &mut size => *mut usize);
        let mut log = vec![0u8; size];
        call!(library, nvrtcGetProgramLog: program => *mut c_void, log.as_mut_ptr() => *mut u8);
        String::from_utf8_lossy(&log).lines().for_each(|line| println!("cargo::error={}", line.trim_end_matches('\0')));
        fail(&format!("the CUDA kernels do not compile, NVRTC's error {error}"));
    }
    let mut size = 0;
    call!(library, nvrtcGetPTXSize: program => *mut c_void, &mut size => *mut usize);
    let mut ptx = vec![0u8; size];
    call!(library, nvrtcGetPTX: program => *mut c_void, ptx.as_mut_ptr() => *mut u8);
    // ptxas takes no NUL at the end.
    ptx.pop_if(|last| *last == 0);
    ptx
}

/// The machine code of `kernels.ptx` for each architecture, all made at once.
fn assemble(ptxas: &Path) -> Vec<Vec<u8>> {
    let cubin = |architecture: &str| out_dir().join(format!("sm_{architecture}.cubin"));
    let start = |architecture: &&str| {
        let mut command = Command::new(ptxas);
        command.args(["-v", &format!("-arch=sm_{architecture}")]).arg(out_dir().join("kernels.ptx"));
        command.arg("-o").arg(cubin(architecture)).stdout(Stdio::null()).stderr(Stdio::piped());
        command.spawn().unwrap_or_else(|e| fail(&format!("cannot start ptxas: {e}")))
    };
    let running: Vec<Child> = ARCHITECTURES.iter().map(start).collect();
    let mut log = Vec::new();
    for child in running {
        let output = child.wait_with_output().unwrap_or_else(|e| fail(&format!("ptxas: {e}")));
        if !output.status.success() {
            String::from_utf8_lossy(&output.stderr).lines().for_each(|line| println!("cargo::error={line}"));
            fail("ptxas refuses the CUDA kernels");
        }
        log.extend(output.stderr);
    }
    write("kernels.log", &log);
    let read = |architecture| fs::read(out_dir().join(format!("sm_{architecture}.cubin")));
    ARCHITECTURES
        .iter()
        .map(|architecture| read(architecture).unwrap_or_else(|e| fail(&format!("cubin: {e}"))))
        .collect()
}

/// The fatbin of the PTX and of each architecture's machine code.
fn join(nvfatbin: &Path, ptx: &[u8], cubins: &[Vec<u8>]) -> Vec<u8> {
    let library = open(nvfatbin);
    let check = |error: c_int| {
        if error != 0 {
            fail(&format!("nvFatbin: error {error}"));
        }
    };
    // This mode every driver of CUDA 12 can unpack; those that pack better need a later one.
    let options = [c"-compress-all".as_ptr(), c"-compress-mode=speed".as_ptr()];
    let mut fatbin: *mut c_void = null_mut();
    check(call!(library, nvFatbinCreate: &mut fatbin => *mut *mut c_void, options.as_ptr() => *const *const c_char,
        options.len() => usize));
    for (architecture, cubin) in ARCHITECTURES.map(c_string).iter().zip(cubins) {
        check(
            call!(library, nvFatbinAddCubin: fatbin => *mut c_void, cubin.as_ptr() => *const u8, cubin.len() => usize,
            architecture.as_ptr() => *const c_char, c"kernels".as_ptr() => *const c_char),
        );
    }
    let architecture = c_string(PTX_ARCHITECTURE);
    let text = c_string(ptx);
    check(
        call!(library, nvFatbinAddPTX: fatbin => *mut c_void, text.as_ptr() => *const c_char, ptx.len() + 1 => usize,
        architecture.as_ptr() => *const c_char, c"kernels".as_ptr() => *const c_char, c"".as_ptr() => *const c_char),
    );
    let mut size = 0;
    check(call!(library, nvFatbinSize: fatbin => *mut c_void, &mut size => *mut usize));
    let mut bytes = vec![0u8; size];
    check(call!(library, nvFatbinGet: fatbin => *mut c_void, bytes.as_mut_ptr() => *mut u8));
    bytes
}

/// The kernel files and their header, in the order of their names.
fn sources() -> Vec<PathBuf> {
    let entries = fs::read_dir(KERNELS).unwrap_or_else(|e| fail(&format!("{KERNELS}: {e}")));
    let mut paths: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "cu" || extension == "cuh"));
    paths.sort();
    paths
}

fn open(path: &Path) -> Library {
    // SAFETY: NVIDIA's library, whose initializers need nothing of us.
    unsafe { Library::new(path) }.unwrap_or_else(|e| fail(&format!("cannot open a compiler: {e}")))
}

fn out_dir() -> PathBuf {
    env::var_os("OUT_DIR").unwrap_or_else(|| fail("cargo sets OUT_DIR")).into()
}

fn write(name: &str, bytes: &[u8]) {
    fs::write(out_dir().join(name), bytes).unwrap_or_else(|e| fail(&format!("{name}: {e}")));
}

fn c_string(text: impl Into<Vec<u8>>) -> CString {
    CString::new(text).unwrap_or_else(|_| fail("a NUL in a kernel file"))
}

fn fail(why: &str) -> ! {
    println!("cargo::error={why}");
    println!(
        "cargo::error=Run `make deps` in the repository's top directory (it installs the compilers from PyPI into .venv), or build without the CUDA engine: --no-default-features."
    );
    exit(1);
}
