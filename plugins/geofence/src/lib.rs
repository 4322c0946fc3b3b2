//! Passes the messages whose position is inside or outside of a fence, or those with which a source enters or leaves it.
//!
//! [`Geofence`] is plain Rust that runs natively too; on wasm32 a thin layer makes it a component of the world `filter`.

#[cfg(target_arch = "wasm32")]
mod component;
mod fence;

use kit::{Missing, PerSource, Pointer};
use serde::Deserialize;

pub use fence::{MAX_VERTICES, Position};

use fence::{Circle, Fence};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a JSON object")]
struct Settings {
    position: Pointer,
    circle: Option<Circle>,
    polygon: Option<Vec<Position>>,
    pass: Pass,
    #[serde(default)]
    missing: Missing,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Pass {
    /// Every message from inside.
    Inside,
    /// Every message from outside.
    Outside,
    /// The first message from inside after one from outside, and the first of all if it is from inside.
    Enter,
    /// The first message from outside after one from inside, and the first of all if it is from outside.
    Leave,
    /// Those of both.
    Crossings,
}

/// The filter, with what it remembers.
#[derive(Debug)]
pub struct Geofence {
    position: Pointer,
    fence: Fence,
    pass: Pass,
    missing: Missing,
    /// On which side each source was; `None` before its first message.
    inside: PerSource<Option<bool>>,
}

impl Geofence {
    /// Reads the settings: `{"position": pointer of an object with lat and lng, "circle": {"lat", "lng", "meters"} or
    /// "polygon": [{"lat", "lng"}, …], "pass": "inside", "outside", "enter", "leave" or "crossings",
    /// "missing": "drop" (default) or "pass"}`.
    ///
    /// # Errors
    /// What is wrong with them, for their author.
    pub fn parse(settings: &str) -> Result<Self, String> {
        let Settings { position, circle, polygon, pass, missing } = kit::settings(settings)?;
        let fence = Fence::new(circle, polygon)?;
        Ok(Self { position, fence, pass, missing, inside: PerSource::default() })
    }

    /// Where in the body latitude and longitude are.
    #[must_use]
    pub fn pointers(&self) -> [String; 2] {
        ["lat", "lng"].map(|name| self.position.member(name))
    }

    /// Whether something is kept for each source.
    #[must_use]
    pub fn keeps_state(&self) -> bool {
        !matches!(self.pass, Pass::Inside | Pass::Outside)
    }

    /// Whether a message passes.
    pub fn passes(&mut self, source: &str, position: Option<Position>) -> bool {
        let Some(position) = position else {
            return self.missing.passes();
        };
        let inside = self.fence.contains(position);
        match self.pass {
            Pass::Inside => inside,
            Pass::Outside => !inside,
            Pass::Enter => self.crosses(source, inside) && inside,
            Pass::Leave => self.crosses(source, inside) && !inside,
            Pass::Crossings => self.crosses(source, inside),
        }
    }

    /// Whether the source was not on this side before.
    fn crosses(&mut self, source: &str, inside: bool) -> bool {
        self.inside.of(source).replace(inside) != Some(inside)
    }
}
