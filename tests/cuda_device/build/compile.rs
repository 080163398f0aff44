//! Runs the C++ compiler, in parallel, on what has changed.

use std::collections::hash_map::DefaultHasher;
use std::ffi::OsStr;
use std::fs;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

/// Of everything. The instructions are those that the CPU engine's AVX2 kernels need, too.
const FLAGS: &[&str] = &[
    "-std=c++20",
    "-O3",
    "-g1",
    "-fPIC",
    "-fvisibility=hidden",
    "-mavx2",
    "-mfma",
    "-mf16c",
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",
    "-pthread",
];
/// Of kernels: a misaligned access or an index beyond an array ends the launch.
const CHECKS: &[&str] = &[
    "-fsanitize=alignment,bounds",
    "-fno-sanitize-recover=all",
    "-fno-strict-aliasing",
    "-fno-exceptions",
    "-Wno-unknown-pragmas",
];

/// One source file.
pub struct Job {
    source: PathBuf,
    checks: bool,
}

impl Job {
    pub fn source(source: PathBuf) -> Self {
        Self { source, checks: false }
    }

    /// Writes `text` to `source`.
    pub fn generated(source: PathBuf, text: String) -> Result<Self, String> {
        fs::write(&source, text).map_err(|e| format!("cannot write a generated source: {e}"))?;
        Ok(Self::source(source))
    }

    pub fn with_checks(mut self) -> Self {
        self.checks = true;
        self
    }
}

pub struct Compiler {
    command: String,
    out: PathBuf,
    include: PathBuf,
    /// Hashes of the compiler, the flags and the headers of all sources, and of kernels: these hold simt.h already.
    common: u64,
    of_kernels: u64,
}

impl Compiler {
    pub fn new(out: &Path, include: &Path) -> Result<Self, String> {
        let command = std::env::var("CXX").unwrap_or_else(|_| "g++".into());
        let version = Command::new(&command).arg("--version").output().map_err(|e| {
            format!("the software CUDA device needs a C++ compiler: {command}: {e}. Install g++, or set CXX.")
        })?;
        let mut hasher = DefaultHasher::new();
        (version.stdout, FLAGS, CHECKS).hash(&mut hasher);
        let mut of_kernels = hasher.clone();
        fs::read(include.join("kernel_table.h")).unwrap_or_default().hash(&mut of_kernels);
        for header in files_with_extension(include, "h") {
            fs::read(header).unwrap_or_default().hash(&mut hasher);
        }
        Ok(Self {
            command,
            out: out.into(),
            include: include.into(),
            common: hasher.finish(),
            of_kernels: of_kernels.finish(),
        })
    }

    /// What the preprocessor makes of a kernel's source.
    pub fn preprocess(&self, source: &Path, include: &[&Path]) -> Result<String, String> {
        let mut command = Command::new(&self.command);
        command.args(["-E", "-x", "c++", "-std=c++20", "-DSOFTWARE_DEVICE"]);
        for directory in include {
            command.arg("-I").arg(directory);
        }
        let output = command.arg(source).output().map_err(|e| format!("{}: {e}", self.command))?;
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).into_owned());
        }
        String::from_utf8(output.stdout).map_err(|e| format!("{}: {e}", source.display()))
    }

    /// Compiles `jobs` and links them as `lib/NAME`, against libraries that were linked before.
    pub fn link(&self, name: &str, jobs: Vec<Job>, libraries: &[&str]) -> Result<(), String> {
        let objects = self.compile(jobs)?;
        let directory = self.out.join("lib");
        fs::create_dir_all(&directory).map_err(|e| format!("cannot make a directory: {e}"))?;
        let mut command = Command::new(&self.command);
        command.args(["-shared", "-pthread", "-Wl,-z,defs", "-Wl,-rpath,$ORIGIN", &format!("-Wl,-soname,{name}")]);
        command.arg("-o").arg(directory.join(name)).args(objects).arg("-L").arg(&directory);
        command.args(libraries.iter().map(|library| format!("-l{library}")));
        run(&mut command)
    }

    fn compile(&self, jobs: Vec<Job>) -> Result<Vec<PathBuf>, String> {
        let threads = std::env::var("NUM_JOBS").ok().and_then(|n| n.parse().ok()).unwrap_or(1);
        let objects = jobs.iter().map(|job| self.object(job)).collect::<Result<Vec<_>, _>>()?;
        let work = Mutex::new(jobs.into_iter().zip(objects.clone()));
        let errors = Mutex::new(String::new());
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    loop {
                        let next = work.lock().ok().and_then(|mut work| work.next());
                        let Some((job, object)) = next else { break };
                        if let (Err(why), Ok(mut errors)) = (self.compile_one(&job, &object), errors.lock()) {
                            *errors += &why;
                        }
                    }
                });
            }
        });
        let errors = errors.into_inner().unwrap_or_default();
        if errors.is_empty() { Ok(objects) } else { Err(errors) }
    }

    fn compile_one(&self, job: &Job, object: &Path) -> Result<(), String> {
        if object.exists() {
            return Ok(());
        }
        // Under another name until it is whole.
        let partial = object.with_extension("partial");
        let mut command = Command::new(&self.command);
        command.args(FLAGS).args(if job.checks { CHECKS } else { &[] }).arg("-I").arg(&self.include);
        run(command.arg("-c").arg(&job.source).arg("-o").arg(&partial))?;
        fs::rename(&partial, object).map_err(|e| format!("cannot rename an object: {e}"))
    }

    /// The object's path, which has a hash of all that it is made from.
    fn object(&self, job: &Job) -> Result<PathBuf, String> {
        let mut hasher = DefaultHasher::new();
        let text = fs::read(&job.source).map_err(|e| format!("{}: {e}", job.source.display()))?;
        (if job.checks { self.of_kernels } else { self.common }, text).hash(&mut hasher);
        let name = job.source.file_stem().unwrap_or_default().to_string_lossy();
        Ok(self.out.join(format!("{name}-{:016x}.o", hasher.finish())))
    }
}

/// Sorted by name; none where there is no such directory.
pub fn files_with_extension(directory: &Path, extension: &str) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = fs::read_dir(directory)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension() == Some(OsStr::new(extension)))
        .collect();
    files.sort();
    files
}

fn run(command: &mut Command) -> Result<(), String> {
    let output = command.output().map_err(|e| format!("{}: {e}", command.get_program().display()))?;
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        return Err(said.into_owned());
    }
    for line in said.lines() {
        println!("cargo::warning={line}");
    }
    Ok(())
}
