//! Components to upload.

use std::fs;
use std::path::Path;

/// A component in `plugins/components`; `type-filter` and `fragments-to-copy` serve as ones of a tenant's own.
pub(crate) fn component(name: &str) -> Vec<u8> {
    fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../plugins/components/{name}.wasm"))).unwrap()
}

/// A sound filter whose bytes are like those of no other: with `content` in a custom section.
pub(crate) fn filter_with(content: &str) -> Vec<u8> {
    [component("type-filter"), section(0, &[&with_length(b"content"), content.as_bytes()].concat())].concat()
}

/// A section of a module or a component (core specification, "Sections").
pub(crate) fn section(id: u8, content: &[u8]) -> Vec<u8> {
    [&[id][..], &with_length(content)].concat()
}

/// A vector of bytes (core specification, "Vectors").
pub(crate) fn with_length(content: &[u8]) -> Vec<u8> {
    [&leb(content.len()), content].concat()
}

/// Unsigned LEB128 (core specification, "Integers").
pub(crate) fn leb(mut number: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    loop {
        let low = (number & 0x7f) as u8;
        number >>= 7;
        if number == 0 {
            bytes.push(low);
            return bytes;
        }
        bytes.push(low | 0x80);
    }
}
