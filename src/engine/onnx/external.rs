//! Where model.onnx keeps its tensors. Large models have them in files beside it, named inside it; a name must not lead out
//! of the model's directory: what is read is memory that answers could be made to show.
//!
//! The file is walked as what it is, a protobuf message, to the entries that matter; all else is skipped unread.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufReader, ErrorKind, Read, Seek};
use std::path::{Component, Path};

use crate::error::{Error, Result};

const FILE: &str = "model.onnx";
/// Longest name of a file that is believed.
const MAX_LOCATION: u64 = 4096;
/// Graphs inside of graphs inside of ...
const MAX_DEPTH: usize = 64;

/// The messages of onnx.proto through which a tensor can be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Message {
    Model,
    Training,
    Graph,
    Node,
    Attribute,
    Function,
    Sparse,
    Tensor,
    Entry,
}

impl Message {
    /// What the field of this number holds, where it leads to a tensor.
    fn field(self, number: u64) -> Option<Self> {
        use Message::{Attribute, Entry, Function, Graph, Model, Node, Sparse, Tensor, Training};
        Some(match (self, number) {
            (Model, 7) | (Training, 1 | 2) | (Attribute, 6 | 11) => Graph,
            (Model, 20) => Training,
            (Model, 25) => Function,
            (Graph, 1) | (Function, 7) => Node,
            (Graph, 5) | (Attribute, 5 | 10) | (Sparse, 1 | 2) => Tensor,
            (Graph, 15) | (Attribute, 22 | 23) => Sparse,
            (Node, 5) | (Function, 11) => Attribute,
            (Tensor, 13) => Entry,
            _ => return None,
        })
    }
}

/// Refuses a model.onnx in `directory` with tensors in files that are not in the directory where model.onnx lies (where it
/// is a link: where that leads).
///
/// # Errors
/// `Invalid` when model.onnx cannot be read, is not a protobuf message, or names a file that is missing or elsewhere.
pub(super) fn check(directory: &Path) -> Result<()> {
    let fail = |why: &str| Error::invalid(format!("{FILE}: {why}"));
    let path = directory.join(FILE);
    let metadata = match std::fs::metadata(&path) {
        Err(e) if e.kind() == ErrorKind::NotFound => {
            return Err(fail("not found in the version directory, and engine is 'onnx'"));
        }
        other => other.map_err(|e| fail(&format!("cannot be read ({})", e.kind())))?,
    };
    // Opening a pipe would wait for a writer.
    if !metadata.is_file() {
        return Err(fail("is not a file"));
    }
    let file = File::open(&path).map_err(|e| fail(&format!("cannot be read ({})", e.kind())))?;
    let locations = locations(file, metadata.len()).map_err(|_| fail("is not a valid ONNX file"))?;
    let home = path.canonicalize().ok().and_then(|path| path.parent().map(Path::to_path_buf));
    let home = home.ok_or_else(|| fail("its directory cannot be found"))?;
    for location in locations {
        let inside =
            Path::new(&location).components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir));
        if !inside {
            return Err(fail("a tensor's external data leads out of the model's directory"));
        }
        match directory.join(&location).canonicalize() {
            Ok(real) if real.starts_with(&home) && real.is_file() => {}
            Ok(_) => return Err(fail("a tensor's external data leads out of the model's directory")),
            Err(e) => return Err(fail(&format!("external data '{location}' cannot be read ({})", e.kind()))),
        }
    }
    Ok(())
}

/// The file is not what it should be, or ends too early.
struct Malformed;

impl From<std::io::Error> for Malformed {
    fn from(_: std::io::Error) -> Self {
        Self
    }
}

/// The names of all files that tensors lie in.
fn locations(file: impl Read + Seek, length: u64) -> std::result::Result<BTreeSet<String>, Malformed> {
    let mut walk = Walk { file: BufReader::new(file), at: 0, found: BTreeSet::new() };
    walk.message(Message::Model, length, 0)?;
    Ok(walk.found)
}

struct Walk<F> {
    file: BufReader<F>,
    at: u64,
    found: BTreeSet<String>,
}

impl<F: Read + Seek> Walk<F> {
    fn message(&mut self, message: Message, end: u64, depth: usize) -> std::result::Result<(), Malformed> {
        if depth > MAX_DEPTH {
            return Err(Malformed);
        }
        let (mut key, mut value) = (String::new(), String::new());
        while self.at < end {
            let tag = self.varint(end)?;
            match tag & 7 {
                0 => drop(self.varint(end)?),
                1 => self.skip(8, end)?,
                5 => self.skip(4, end)?,
                2 => {
                    let length = self.varint(end)?;
                    let stop = self.at.checked_add(length).filter(|&stop| stop <= end).ok_or(Malformed)?;
                    match (message.field(tag >> 3), message, tag >> 3) {
                        (Some(inner), ..) => self.message(inner, stop, depth + 1)?,
                        (None, Message::Entry, 1) => key = self.text(length)?,
                        (None, Message::Entry, 2) => value = self.text(length)?,
                        _ => self.skip(length, end)?,
                    }
                }
                _ => return Err(Malformed),
            }
        }
        if key == "location" {
            self.found.insert(value);
        }
        Ok(())
    }

    fn varint(&mut self, end: u64) -> std::result::Result<u64, Malformed> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let mut byte = [0];
            if self.at >= end {
                break;
            }
            self.file.read_exact(&mut byte)?;
            self.at += 1;
            value |= u64::from(byte[0] & 0x7f) << shift;
            if byte[0] & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(Malformed)
    }

    fn text(&mut self, length: u64) -> std::result::Result<String, Malformed> {
        if length > MAX_LOCATION {
            return Err(Malformed);
        }
        let mut bytes = vec![0; length as usize];
        self.file.read_exact(&mut bytes)?;
        self.at += length;
        String::from_utf8(bytes).map_err(|_| Malformed)
    }

    fn skip(&mut self, length: u64, end: u64) -> std::result::Result<(), Malformed> {
        let stop = self.at.checked_add(length).filter(|&stop| stop <= end).ok_or(Malformed)?;
        self.file.seek_relative(i64::try_from(length).map_err(|_| Malformed)?)?;
        self.at = stop;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;

    fn field(number: u8, content: &[u8]) -> Vec<u8> {
        assert!(number < 16 && content.len() < 1 << 14);
        let length = content.len();
        let mut out = vec![number << 3 | 2, (length & 0x7f) as u8 | 0x80, (length >> 7) as u8];
        out.extend_from_slice(content);
        out
    }

    fn tensor(location: &str) -> Vec<u8> {
        let entry =
            |key: &str, value: &str| field(13, &[field(1, key.as_bytes()), field(2, value.as_bytes())].concat());
        // dims, name, and data_location EXTERNAL besides.
        [vec![8, 3], field(8, b"weight"), entry("offset", "0"), entry("location", location), vec![0x70, 1]].concat()
    }

    fn initializer(location: &str) -> Vec<u8> {
        [vec![8, 9], field(7, &[field(2, b"graph"), field(5, &tensor(location))].concat())].concat()
    }

    fn found(model: &[u8]) -> Option<Vec<String>> {
        locations(Cursor::new(model), model.len() as u64).ok().map(|found| found.into_iter().collect())
    }

    #[test]
    fn files_are_found_wherever_a_tensor_can_be() {
        assert_eq!(found(&initializer("weights.bin")).unwrap(), ["weights.bin"]);
        // In a branch of an If: model.graph.node.attribute.g.node.attribute.t
        let constant = field(1, &field(5, &field(5, &tensor("../deep"))));
        let model = field(7, &field(1, &field(5, &field(6, &constant))));
        assert_eq!(found(&model).unwrap(), ["../deep"]);
        assert!(found(&field(7, &field(2, b"no tensors"))).unwrap().is_empty());
        assert!(found(&[]).unwrap().is_empty());
    }

    #[test]
    fn what_is_no_message_is_refused() {
        let model = initializer("weights.bin");
        let refused = (1..model.len()).filter(|&cut| found(&model[..cut]).is_none()).count();
        assert!(refused > model.len() * 3 / 4, "{refused} of {} cuts", model.len());
        assert!(found(&[0xff; 64]).is_none());
        assert!(found(&[0x3a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01]).is_none(), "a huge length");
        assert!(found(&[0x3b]).is_none(), "a group");
        let mut nested = Vec::new();
        for _ in 0..2 * MAX_DEPTH {
            nested = field(1, &field(5, &field(6, &nested)));
        }
        assert!(found(&field(7, &nested)).is_none(), "deeper than any model");
    }

    #[test]
    fn only_files_of_the_models_directory_are_let_in() {
        let outside = tempfile::tempdir().unwrap();
        std::fs::write(outside.path().join("secret"), "x").unwrap();
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("data")).unwrap();
        std::fs::write(dir.path().join("data/weights.bin"), "x").unwrap();
        std::os::unix::fs::symlink(outside.path().join("secret"), dir.path().join("link")).unwrap();
        std::os::unix::fs::symlink(outside.path(), dir.path().join("other")).unwrap();
        let absolute = outside.path().join("secret").to_string_lossy().into_owned();
        let message = |location: &str| {
            std::fs::write(dir.path().join(FILE), initializer(location)).unwrap();
            check(dir.path()).err().map(|error| error.message)
        };
        assert_eq!(message("data/weights.bin"), None);
        for location in [absolute.as_str(), "../secret", "data/../../secret", "link", "other/secret", "data"] {
            let message = message(location).expect("refused");
            assert!(message.contains("leads out of the model's directory") && !message.contains("secret"), "{message}");
        }
        assert!(message("missing.bin").unwrap().contains("'missing.bin'"));
    }

    #[test]
    fn a_directory_of_links_to_one_place_is_let_in() {
        let real = tempfile::tempdir().unwrap();
        std::fs::write(real.path().join(FILE), initializer("weights.bin")).unwrap();
        std::fs::write(real.path().join("weights.bin"), "x").unwrap();
        let links = tempfile::tempdir().unwrap();
        for name in [FILE, "weights.bin"] {
            std::os::unix::fs::symlink(real.path().join(name), links.path().join(name)).unwrap();
        }
        check(links.path()).unwrap();
    }
}
