//! The processing mode of a request.

use crate::json::Invalid;
use crate::message::Api;

/// What becomes of an object, from the header `X-Cumulocity-Processing-Mode` (Cumulocity OpenAPI, "Processing mode").
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ProcessingMode {
    /// Stored, and subscriptions hear of it.
    Persistent,
    /// Subscriptions hear of it, nothing is stored.
    Transient,
    /// Stored, and no subscription hears of it. Documented for measurements, events and managed objects.
    Quiescent,
    /// For streaming analytics only: neither stored nor told to subscriptions. Documented for measurements and events.
    Cep,
}

impl ProcessingMode {
    /// Name of the header.
    pub const HEADER: &str = "X-Cumulocity-Processing-Mode";

    /// Reads the header of a request to `api`; without one the mode is PERSISTENT.
    ///
    /// # Errors
    /// For a mode that does not exist, or that the platform does not document for this API.
    pub fn of(header: Option<&[u8]>, api: Api) -> Result<Self, Invalid> {
        let Some(header) = header else { return Ok(Self::Persistent) };
        let modes = Self::documented_for(api);
        let mode = modes.iter().find(|(name, _)| header.eq_ignore_ascii_case(name.as_bytes()));
        mode.map(|(_, mode)| *mode).ok_or_else(|| {
            let names: Vec<_> = modes.iter().map(|(name, _)| *name).collect();
            Invalid::new(Self::HEADER, format!("must be one of {} for {}", names.join(", "), api.as_str()))
        })
    }

    fn documented_for(api: Api) -> &'static [(&'static str, Self)] {
        const ALL: [(&str, ProcessingMode); 4] = [
            ("PERSISTENT", ProcessingMode::Persistent),
            ("TRANSIENT", ProcessingMode::Transient),
            ("QUIESCENT", ProcessingMode::Quiescent),
            ("CEP", ProcessingMode::Cep),
        ];
        match api {
            Api::Measurements | Api::Events => &ALL,
            Api::ManagedObjects => &ALL[..3],
            Api::Alarms | Api::Operations => &ALL[..2],
        }
    }

    /// Whether the object is kept in the operational store.
    #[must_use]
    pub fn stores(self) -> bool {
        matches!(self, Self::Persistent | Self::Quiescent)
    }

    /// Whether subscriptions hear of it.
    #[must_use]
    pub fn notifies(self) -> bool {
        matches!(self, Self::Persistent | Self::Transient)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_api_has_the_documented_modes() {
        let apis = [Api::Measurements, Api::Events, Api::ManagedObjects, Api::Alarms, Api::Operations];
        for (name, stores, notifies, allowed) in [
            ("persistent", true, true, 5),
            ("TRANSIENT", false, true, 5),
            ("Quiescent", true, false, 3),
            ("CEP", false, false, 2),
            ("EAGER", false, false, 0),
            ("", false, false, 0),
        ] {
            for (at, api) in apis.into_iter().enumerate() {
                match ProcessingMode::of(Some(name.as_bytes()), api) {
                    Ok(mode) => {
                        assert_eq!((mode.stores(), mode.notifies(), at < allowed), (stores, notifies, true), "{name}");
                    }
                    Err(refused) => {
                        assert_eq!((at >= allowed, &*refused.field), (true, ProcessingMode::HEADER), "{name}");
                    }
                }
            }
        }
        assert_eq!(ProcessingMode::of(None, Api::Alarms), Ok(ProcessingMode::Persistent));
    }
}
