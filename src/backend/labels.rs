//! labels.txt for Triton's classification extension (`class_count` of a request).

use std::io::Write;
use std::path::Path;

use crate::config::triton::TritonConfig;
use crate::config::{ModelConfig, OutputKind};

const FILE: &str = "labels.txt";

/// Points the `label_filename` of LOGITS and PROBABILITIES at labels.txt in the model's directory, where the user gave
/// none, and writes that file from the class names, where there is none. Returns why it could not, for a WARN: the
/// LABEL output works all the same.
pub fn declare(config: &ModelConfig, triton: &mut TritonConfig, model_directory: &Path) -> Result<(), String> {
    let class_outputs = config.outputs.iter().filter(|(kind, tensor)| {
        matches!(kind, OutputKind::Logits | OutputKind::Probabilities) && triton.label_filename(&tensor.name).is_none()
    });
    let names: Vec<&str> = class_outputs.map(|(_, tensor)| tensor.name.as_str()).collect();
    if names.is_empty() {
        return Ok(());
    }
    write(&config.labels, &model_directory.join(FILE))?;
    names.iter().for_each(|name| triton.set_label_filename(name, FILE));
    Ok(())
}

/// Writes one name a line. A file that is there already stays as it is.
fn write(labels: &[String], path: &Path) -> Result<(), String> {
    if path.exists() {
        return Ok(());
    }
    if labels.iter().any(|label| label.contains(['\n', '\r'])) {
        return Err("a class name of config.json holds a line break".to_owned());
    }
    // Renamed into place, so that another server never reads half of it.
    let partial = path.with_extension(format!("txt.{}", std::process::id()));
    let written = std::fs::File::create(&partial)
        .and_then(|mut file| file.write_all(labels.join("\n").as_bytes()))
        .and_then(|()| std::fs::rename(&partial, path));
    written.map_err(|e| {
        let _ = std::fs::remove_file(&partial);
        format!("the model's directory cannot be written ({})", e.kind())
    })
}
