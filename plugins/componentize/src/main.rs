//! `componentize MODULE COMPONENT`: makes the component that a core module describes in its custom sections, and
//! refuses one with imports that the gateway does not offer.

use std::{env, error::Error, fs};

use wit_component::{ComponentEncoder, DecodedWasm};

/// What the name of every import must start with.
const OFFERED: &str = "tidegate:plugin/";

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [module, component] = arguments.as_slice() else {
        return Err("usage: componentize MODULE COMPONENT".into());
    };
    let encoded = ComponentEncoder::default().validate(true).module(&fs::read(module)?)?.encode()?;
    if let Some(import) = imports(&encoded)?.iter().find(|import| !import.starts_with(OFFERED)) {
        return Err(format!("{module} imports {import}").into());
    }
    Ok(fs::write(component, encoded)?)
}

/// The names of everything that a component imports.
fn imports(component: &[u8]) -> Result<Vec<String>, Box<dyn Error>> {
    let DecodedWasm::Component(resolve, world) = wit_component::decode(component)? else {
        return Err("not a component".into());
    };
    Ok(resolve.worlds[world].imports.keys().map(|key| resolve.name_world_key(key)).collect())
}
