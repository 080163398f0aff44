//! A checkpoint: the safetensors files of a model directory, mapped into memory while a model loads.

use std::collections::HashMap;
use std::fs::File;
use std::path::Path;

use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors};

use crate::error::{Error, Result};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// The mapped files of one checkpoint. Engines copy or pack what they need and drop it when the model is loaded, so
/// that a file which is overwritten later cannot fault a serving process.
pub struct Checkpoint {
    files: Vec<(String, Mmap)>,
    tensors: HashMap<String, Entry>,
}

struct Entry {
    file: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    range: std::ops::Range<usize>,
}

/// One tensor, borrowed from a [`Checkpoint`].
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a> {
    name: &'a str,
    dtype: Dtype,
    shape: &'a [usize],
    /// Little endian, of any alignment.
    data: &'a [u8],
}

impl Checkpoint {
    /// Opens `model.safetensors`, or the shards that `model.safetensors.index.json` lists, in `directory`.
    ///
    /// # Errors
    /// `Invalid`, with the file's name, when a file is missing, truncated or malformed.
    pub fn open(directory: &Path) -> Result<Self> {
        let names = if directory.join(SINGLE).exists() { vec![SINGLE.to_owned()] } else { shards(directory)? };
        let mut checkpoint = Self { files: Vec::new(), tensors: HashMap::new() };
        for name in names {
            checkpoint.add(directory, name)?;
        }
        Ok(checkpoint)
    }

    fn add(&mut self, directory: &Path, name: String) -> Result<()> {
        let fail = |why: String| Error::invalid(format!("{name}: {why}"));
        let file = File::open(directory.join(&name)).map_err(|e| fail(format!("cannot be opened ({})", e.kind())))?;
        // SAFETY: the map is only read, and only while the model loads. A file that another process truncates in that
        // time would fault; that cannot be excluded by any means short of copying every checkpoint first.
        #[allow(unsafe_code)]
        let map = unsafe { Mmap::map(&file) }.map_err(|e| fail(format!("cannot be mapped ({})", e.kind())))?;
        // The crate checks that header, offsets, shapes and file length agree.
        let parsed =
            SafeTensors::deserialize(&map).map_err(|e| fail(format!("is not a valid safetensors file ({e})")))?;
        let base = map.as_ptr().addr();
        for (tensor, view) in parsed.iter() {
            let start = view.data().as_ptr().addr() - base;
            let entry = Entry {
                file: self.files.len(),
                dtype: view.dtype(),
                shape: view.shape().to_vec(),
                range: start..start + view.data().len(),
            };
            if self.tensors.insert(tensor.to_owned(), entry).is_some() {
                return Err(fail(format!("tensor '{tensor}' is in two files")));
            }
        }
        self.files.push((name, map));
        Ok(())
    }

    /// The tensor of that name, if there is one.
    pub fn find(&self, name: &str) -> Option<Tensor<'_>> {
        let (name, entry) = self.tensors.get_key_value(name)?;
        let data = &self.files[entry.file].1[entry.range.clone()];
        Some(Tensor { name, dtype: entry.dtype, shape: &entry.shape, data })
    }

    /// The tensor of that name and shape, in a floating-point type.
    ///
    /// # Errors
    /// `Invalid`, with file and tensor named, when it is missing, of another shape or of a type that is not F32, F16
    /// or BF16.
    pub fn get(&self, name: &str, shape: &[usize]) -> Result<Tensor<'_>> {
        let Some(tensor) = self.find(name) else {
            return Err(Error::invalid(format!("{}: tensor '{name}' is missing", self.file_names())));
        };
        let file = &self.files[self.tensors[name].file].0;
        if tensor.shape != shape {
            return Err(Error::invalid(format!(
                "{file}: tensor '{name}' has shape {:?}, config.json asks for {shape:?}",
                tensor.shape
            )));
        }
        if !matches!(tensor.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16) {
            return Err(Error::invalid(format!(
                "{file}: tensor '{name}' has type {:?}; F32, F16 and BF16 are supported",
                tensor.dtype
            )));
        }
        Ok(tensor)
    }

    /// The names of the files, for messages.
    fn file_names(&self) -> String {
        self.files.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(", ")
    }
}

/// The shard names of the index file, each once.
fn shards(directory: &Path) -> Result<Vec<String>> {
    let Ok(text) = std::fs::read_to_string(directory.join(INDEX)) else {
        return Err(Error::invalid(format!(
            "{SINGLE}: not found in the version directory (nor {INDEX}); put the Hugging Face checkpoint there"
        )));
    };
    let index: serde_json::Value =
        serde_json::from_str(&text).map_err(|e| Error::invalid(format!("{INDEX}: is not valid JSON ({e})")))?;
    let Some(map) = index.get("weight_map").and_then(|m| m.as_object()) else {
        return Err(Error::invalid(format!("{INDEX}: has no object 'weight_map'")));
    };
    let mut names = Vec::new();
    for name in map.values() {
        // A plain file name: a shard cannot lead out of the model's directory.
        let name = name
            .as_str()
            .filter(|n| !n.is_empty() && !n.contains(['/', '\\']) && *n != "..")
            .ok_or_else(|| Error::invalid(format!("{INDEX}: 'weight_map' holds a value that is not a file name")))?;
        names.push(name.to_owned());
    }
    names.sort();
    names.dedup();
    if names.is_empty() {
        return Err(Error::invalid(format!("{INDEX}: 'weight_map' is empty")));
    }
    Ok(names)
}

impl<'a> Tensor<'a> {
    /// Its name in the checkpoint, for messages.
    pub fn name(&self) -> &'a str {
        self.name
    }

    /// The dimensions, outermost first.
    pub fn shape(&self) -> &'a [usize] {
        self.shape
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether it has no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Converts the elements `start .. start + out.len()` in row-major order to fp32.
    pub fn read(&self, start: usize, out: &mut [f32]) {
        match self.dtype {
            Dtype::F32 => convert(self.data, start, out, f32::from_le_bytes),
            Dtype::F16 => convert(self.data, start, out, |b| half::f16::from_le_bytes(b).to_f32()),
            Dtype::BF16 => convert(self.data, start, out, |b| half::bf16::from_le_bytes(b).to_f32()),
            other => unreachable!("Checkpoint::get admits no tensor of type {other:?}"),
        }
    }

    /// All elements in fp32, row-major.
    pub fn to_f32(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.len()];
        self.read(0, &mut out);
        out
    }
}

fn convert<const N: usize>(data: &[u8], start: usize, out: &mut [f32], element: impl Fn([u8; N]) -> f32) {
    let (elements, _) = data[start * N..].as_chunks::<N>();
    let elements = &elements[..out.len()];
    out.iter_mut().zip(elements).for_each(|(o, &bytes)| *o = element(bytes));
}
