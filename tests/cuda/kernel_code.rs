//! What the build made of the CUDA kernels: that no kernel keeps variables in memory instead of registers, how many of its
//! blocks a GPU runs at once, and that the library holds every kernel for every GPU. No GPU is needed, nor the software
//! device. `make check-kernels` shows the table.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

extern crate fake_host as _;

/// What ptxas reported, of all architectures.
const LOG: &str = include_str!(concat!(env!("OUT_DIR"), "/kernels.log"));
const FATBIN: &str = concat!(env!("OUT_DIR"), "/kernels.fatbin");

/// A generation of GPUs, and what one of its multiprocessors has: NVIDIA's table of compute capabilities.
struct Architecture {
    name: &'static str,
    warps: u32,
    blocks: u32,
    shared: u32,
}

const ARCHITECTURES: [Architecture; 6] = [
    Architecture { name: "sm_80", warps: 64, blocks: 32, shared: 164 << 10 },
    Architecture { name: "sm_86", warps: 48, blocks: 16, shared: 100 << 10 },
    Architecture { name: "sm_89", warps: 48, blocks: 24, shared: 100 << 10 },
    Architecture { name: "sm_90", warps: 64, blocks: 32, shared: 228 << 10 },
    Architecture { name: "sm_100", warps: 64, blocks: 32, shared: 228 << 10 },
    Architecture { name: "sm_120", warps: 48, blocks: 24, shared: 100 << 10 },
];

impl Architecture {
    /// Blocks of `warps` warps that a multiprocessor runs at once.
    fn resident(&self, warps: u32, registers: u32, shared: u32) -> u32 {
        // Registers are given in 256s to a warp, by each quarter of the multiprocessor from its 16,384; shared memory in
        // 128s, and 1,024 bytes of each block's are the system's.
        let by_registers = 16_384 / (registers * 32).next_multiple_of(256) * 4 / warps;
        let by_shared = self.shared / (shared + 1024).next_multiple_of(128);
        by_registers.min(by_shared).min(self.warps / warps).min(self.blocks)
    }
}

/// A kernel as it is launched: threads of a block, and shared memory that the launch asks for.
struct Kernel {
    name: String,
    threads: u32,
    dynamic: u32,
}

/// All kernels, with the largest launch of each for rows of 1,024.
fn kernels() -> Vec<Kernel> {
    let mut kernels = vec![Kernel { name: "gather_rows".into(), threads: 128, dynamic: 0 }];
    for dtype in ["f16", "bf16", "f32"] {
        let mut add = |name: &str, threads, dynamic| kernels.push(Kernel { name: name.into(), threads, dynamic });
        add(&format!("embed_layer_norm_{dtype}"), 128, 0);
        add(&format!("add_layer_norm_{dtype}"), 128, 0);
        add(&format!("activation_{dtype}"), 256, 0);
        add(&format!("pool_{dtype}"), 256, 0);
        add(&format!("classify_{dtype}"), 256, 4096);
        for (head_dim, ring, short_threads) in [(32, 24 << 10, 128), (64, 48 << 10, 64), (128, 48 << 10, 32)] {
            let half = dtype != "f32";
            add(&format!("attention_{dtype}_hd{head_dim}"), 128, if half { ring } else { 0 });
            if half {
                add(&format!("attention_short_{dtype}_hd{head_dim}"), short_threads, 48 << 10);
            }
        }
    }
    kernels.sort_by(|a, b| a.name.cmp(&b.name));
    kernels
}

/// What ptxas says about a kernel.
#[derive(Default)]
struct Usage {
    registers: u32,
    shared: u32,
    stack: u32,
    spilled: u32,
}

/// By architecture and kernel.
fn usages() -> BTreeMap<(String, String), Usage> {
    let mut usages = BTreeMap::<_, Usage>::new();
    let mut current = (String::new(), String::new());
    let quoted = |line: &str, i| line.split('\'').nth(i).expect("a quoted name").to_owned();
    // The number before a phrase, 0 where it is not there.
    let number = |line: &str, phrase: &str| {
        let before = line.split_once(phrase).map(|(before, _)| before);
        before.and_then(|text| text.trim_end().rsplit(' ').next()).map_or(0, |n| n.parse::<u32>().expect("a number"))
    };
    for line in LOG.lines() {
        if line.contains("Compiling entry function") {
            current = (quoted(line, 3), quoted(line, 1));
        }
        let usage = usages.entry(current.clone()).or_default();
        usage.stack += number(line, "bytes stack frame");
        usage.spilled += number(line, "bytes spill stores") + number(line, "bytes spill loads");
        if line.contains("Used ") {
            usage.registers = number(line, "registers");
            usage.shared = number(line, "bytes smem");
        }
    }
    usages
}

#[test]
fn no_kernel_spills_registers() {
    let usages = usages();
    let mut wrong = Vec::new();
    print!("\n{:30} {:>7} {:>6}", "kernel", "threads", "shared");
    ARCHITECTURES.iter().for_each(|architecture| print!("  {:>11}", architecture.name));
    println!(
        "\n{:30} {:>7} {:>6}{}",
        "",
        "",
        "bytes",
        "   reg blk wrp".repeat(ARCHITECTURES.len()).replace("   reg", "  reg")
    );
    for kernel in kernels() {
        let warps = kernel.threads / 32;
        for (i, architecture) in ARCHITECTURES.iter().enumerate() {
            let key = (architecture.name.to_owned(), kernel.name.clone());
            let usage = usages.get(&key).unwrap_or_else(|| panic!("ptxas did not compile {key:?}"));
            assert!(usage.registers > 0, "ptxas does not say what {key:?} uses");
            let shared = usage.shared + kernel.dynamic;
            if i == 0 {
                print!("{:30} {:>7} {:>6}", kernel.name, kernel.threads, shared);
            }
            let blocks = architecture.resident(warps, usage.registers, shared);
            print!("  {:>3} {:>3} {:>3}", usage.registers, blocks, blocks * warps);
            if usage.stack + usage.spilled > 0 {
                wrong.push(format!("{key:?}: stack frame {}, spilled {} bytes", usage.stack, usage.spilled));
            }
            if blocks == 0 {
                wrong.push(format!("{key:?} does not fit into a multiprocessor"));
            }
        }
        println!();
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Calls cuobjdump of the wheel on the fatbin.
fn cuobjdump(what: &str) -> String {
    let packages = std::fs::read_dir(".venv/lib").into_iter().flatten().flatten();
    let mut paths = packages.map(|entry| entry.path().join("site-packages/nvidia/cu13/bin/cuobjdump"));
    let path = paths.find(|path| path.exists()).expect("`make deps` installs cuobjdump");
    let output = Command::new(path).args([what, FATBIN]).output().expect("cuobjdump runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn the_library_holds_every_kernel_for_every_gpu() {
    let right: BTreeSet<String> = kernels().into_iter().map(|kernel| kernel.name).collect();
    let mut found = BTreeMap::<String, BTreeSet<String>>::new();
    let mut architecture = String::new();
    for line in cuobjdump("-symbols").lines() {
        let mut words = line.split_whitespace();
        match (words.next(), words.next()) {
            (Some("arch"), Some("=")) => architecture = words.next().unwrap_or_default().to_owned(),
            // Kernels are the functions that others may see.
            (Some("FUNC"), Some("GLOBAL")) => {
                let name = words.next_back().unwrap_or_default().to_owned();
                found.entry(architecture.clone()).or_default().insert(name);
            }
            _ => {}
        }
    }
    let names: BTreeSet<&str> = found.keys().map(String::as_str).collect();
    assert_eq!(names, ARCHITECTURES.iter().map(|architecture| architecture.name).collect());
    for (architecture, names) in found {
        assert_eq!(names, right, "{architecture}");
    }

    let ptx = cuobjdump("-ptx");
    assert!(ptx.contains(".target sm_80"), "the PTX is for compute capability 8.0");
    let entries = ptx.lines().filter_map(|line| line.split_once(".entry "));
    let names: BTreeSet<String> = entries.map(|(_, name)| name.trim_end_matches('(').to_owned()).collect();
    assert_eq!(names, right, "PTX");
}
