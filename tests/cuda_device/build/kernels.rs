//! Makes C++ of a preprocessed kernel source, and finds its kernels.
//!
//! Two things of CUDA's language have no counterpart that a macro could give: `__shared__`, whose arrays belong to a block,
//! and the list of kernels, which the driver looks up by name.

/// The text to compile for the software device.
pub fn for_the_device(preprocessed: &str) -> Result<String, String> {
    let kernels = kernels(preprocessed)?;
    let mut text = String::from("#define __global__\n#define __launch_bounds__(...)\n");
    text += &shared_arrays(preprocessed)?;
    text += "\n#include \"kernel_table.h\"\n";
    for Kernel { name, threads } in kernels {
        text += &format!("static simt::Registration<{name}> registration_of_{name}(\"{name}\", {threads});\n");
    }
    Ok(text)
}

struct Kernel {
    name: String,
    /// A constant expression: its launch bounds.
    threads: String,
}

/// All `extern "C" __global__ void __launch_bounds__(THREADS) NAME(`.
fn kernels(text: &str) -> Result<Vec<Kernel>, String> {
    let mut found = Vec::new();
    for (at, mark) in text.match_indices("__global__") {
        let rest = text[at + mark.len()..].trim_start();
        let shape = "a kernel is declared as `extern \"C\" __global__ void __launch_bounds__(N) name(...)`";
        if !text[..at].trim_end().ends_with("extern \"C\"") {
            return Err(format!("{shape}: no extern \"C\" before `{}`", first_line(rest)));
        }
        let rest =
            rest.strip_prefix("void").map(str::trim_start).and_then(|rest| rest.strip_prefix("__launch_bounds__"));
        let rest = rest.ok_or(shape)?.trim_start().strip_prefix('(').ok_or(shape)?;
        let end = closing(rest).ok_or(shape)?;
        let threads = rest[..end].split(',').next().unwrap_or_default().trim().to_string();
        let rest = rest[end + 1..].trim_start();
        let name = rest.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default().to_string();
        if name.is_empty() {
            return Err(format!("{shape}: no name in `{}`", first_line(rest)));
        }
        found.push(Kernel { name, threads });
    }
    Ok(found)
}

/// Replaces each `__shared__ TYPE NAME[N];` by a reference to the block's array.
fn shared_arrays(text: &str) -> Result<String, String> {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("__shared__") {
        out += &rest[..at];
        let declaration = &rest[at + "__shared__".len()..];
        let end = declaration.find(';').ok_or("`__shared__` without a semicolon")?;
        let (declaration, after) = declaration.split_at(end);
        let declaration = declaration.trim();
        let (declaration, alignment) = match declaration.strip_prefix("alignas(") {
            Some(aligned) => {
                let (alignment, declaration) = aligned.split_once(')').ok_or("`alignas` without a parenthesis")?;
                (declaration.trim(), alignment.trim())
            }
            None => (declaration, "1"),
        };
        let (head, dimensions) = declaration.split_at(declaration.find('[').unwrap_or(declaration.len()));
        let head = head.trim_end();
        let name_at = head.rfind(|c: char| !c.is_alphanumeric() && c != '_').map_or(0, |at| at + 1);
        let (kind, name) = head.split_at(name_at);
        if kind.trim().is_empty() || kind.contains("extern") || declaration.contains(['=', '{']) {
            return Err(format!(
                "`__shared__ {declaration}`: only TYPE NAME[N] and TYPE NAME; DYNAMIC_SHARED for the rest"
            ));
        }
        out += &format!(
            "typedef {kind} {name}_shared_type {dimensions}; static_assert({alignment} <= 16); \
             auto& {name} = simt::shared_array<{name}_shared_type>([] {{ static char tag; return (const void*)&tag; }})"
        );
        rest = after;
    }
    out += rest;
    Ok(out)
}

/// Where the parenthesis closes that `text` starts within.
fn closing(text: &str) -> Option<usize> {
    let mut depth = 1;
    for (at, c) in text.char_indices() {
        match c {
            '(' => depth += 1,
            ')' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(at);
        }
    }
    None
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}
