//! `c-bindings WIT WORLD FOLDER`: writes the bindings of a world for C, as `wit-bindgen c` does, but without the object file that
//! describes the world: `wasm-tools component embed` takes its place, so that text is all there is.

use std::{env, error::Error, fs, path::Path};

use wit_bindgen_core::Files;
use wit_bindgen_core::wit_parser::Resolve;

/// From here on the text asks for the object file.
const TAIL: &str = "\n// Ensure that the *_component_type.o object is linked in";

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [wit, world, folder] = arguments.as_slice() else {
        return Err("usage: c-bindings WIT WORLD FOLDER".into());
    };
    let mut resolve = Resolve::default();
    let (package, _) = resolve.push_path(wit)?;
    let id = resolve.select_world(&[package], Some(world))?;
    let mut files = Files::default();
    wit_bindgen_c::Opts::default().build().generate(&mut resolve, id, &mut files)?;
    for (name, content) in files.iter().filter(|(name, _)| !name.ends_with(".o")) {
        let text = std::str::from_utf8(content)?;
        fs::write(Path::new(folder).join(name), text.split(TAIL).next().unwrap_or(text))?;
    }
    Ok(())
}
