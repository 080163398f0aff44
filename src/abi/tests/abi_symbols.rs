//! Every function that `include/triton_abi.h` declares is one that a real libtritonserver exports: a missing one
//! would keep the plugin from loading.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

#[test]
fn the_real_server_exports_every_declared_function() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let declared = declared_functions(&root.join("include/triton_abi.h"));
    assert!(declared.len() > 40, "the header is not understood: {declared:?}");

    let library = real_library(&root).expect("libtritonserver in .venv: run `make deps`");
    let exported = exported_symbols(&library);
    let missing: Vec<_> = declared.difference(&exported).collect();
    assert!(missing.is_empty(), "not in {}: {missing:?}", library.display());
}

fn declared_functions(header: &Path) -> BTreeSet<String> {
    let text = std::fs::read_to_string(header).expect("readable header");
    // Comments first: they name functions too.
    let mut code = String::new();
    let mut rest = text.as_str();
    while let Some((before, after)) = rest.split_once("/*") {
        code.push_str(before);
        rest = after.split_once("*/").expect("closed comment").1;
    }
    code.push_str(rest);
    code.split(|c: char| !c.is_ascii_alphanumeric() && c != '_' && c != '(')
        .filter_map(|word| word.split_once('('))
        .map(|(name, _)| name.to_string())
        .filter(|name| name.starts_with("TRITON"))
        .collect()
}

fn real_library(root: &Path) -> Option<PathBuf> {
    let pythons = std::fs::read_dir(root.join(".venv/lib")).ok()?;
    pythons
        .flatten()
        .filter_map(|python| std::fs::read_dir(python.path().join("site-packages/nvidia_pytriton.libs")).ok())
        .flat_map(|libraries| libraries.flatten())
        .map(|library| library.path())
        .find(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            name.starts_with("libtritonserver") && name.contains(".so")
        })
}

fn exported_symbols(library: &Path) -> BTreeSet<String> {
    let output = Command::new("nm")
        .args(["-D", "--defined-only", "--format=posix"])
        .arg(library)
        .output()
        .expect("nm of binutils runs");
    assert!(output.status.success(), "nm fails on {}", library.display());
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter_map(|line| line.split(' ').next())
        .map(|symbol| symbol.split('@').next().unwrap_or(symbol).to_string())
        .collect()
}
