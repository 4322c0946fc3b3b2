//! The processing mode of a request.

use crate::json::Invalid;

/// What becomes of an object, from the header `X-Cumulocity-Processing-Mode` (Cumulocity OpenAPI, "Processing mode").
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ProcessingMode {
    /// Stored, and subscriptions hear of it.
    Persistent,
    /// Subscriptions hear of it, nothing is stored.
    Transient,
    /// Stored, and no subscription hears of it.
    Quiescent,
}

impl ProcessingMode {
    /// Name of the header.
    pub const HEADER: &str = "X-Cumulocity-Processing-Mode";

    /// Reads the header; without one the mode is PERSISTENT.
    ///
    /// # Errors
    /// For a mode that does not exist or has nobody to process it.
    pub fn of(header: Option<&[u8]>) -> Result<Self, Invalid> {
        let Some(header) = header else { return Ok(Self::Persistent) };
        let is = |name: &str| header.eq_ignore_ascii_case(name.as_bytes());
        if is("PERSISTENT") {
            Ok(Self::Persistent)
        } else if is("TRANSIENT") {
            Ok(Self::Transient)
        } else if is("QUIESCENT") {
            Ok(Self::Quiescent)
        } else if is("CEP") {
            Err(Invalid::new(Self::HEADER, "CEP is not available, since this gateway has no streaming analytics"))
        } else {
            Err(Invalid::new(Self::HEADER, "must be PERSISTENT, TRANSIENT or QUIESCENT"))
        }
    }

    /// Whether the object is kept in the operational store.
    #[must_use]
    pub fn stores(self) -> bool {
        self != Self::Transient
    }

    /// Whether subscriptions hear of it.
    #[must_use]
    pub fn notifies(self) -> bool {
        self != Self::Quiescent
    }
}
