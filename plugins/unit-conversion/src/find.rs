//! Finds values in JSON text without building any: what is found is a slice of the text.

use std::collections::HashMap;

use serde::Deserialize;
use serde_json::value::RawValue;

/// The value that a JSON pointer (RFC 6901) finds through objects. Of members with the same name, the last counts.
pub(crate) fn pointed<'a>(text: &'a str, pointer: &str) -> Option<&'a RawValue> {
    let mut value: &RawValue = serde_json::from_str(text).ok()?;
    for name in pointer.split('/').skip(1) {
        let name = name.replace("~1", "/").replace("~0", "~");
        let members: HashMap<String, &RawValue> = HashMap::deserialize(value).ok()?;
        value = members.get(&name)?;
    }
    Some(value)
}
