//! Places on the earth, in degrees, and what encloses them.

use serde::Deserialize;

/// The most vertices of a polygon.
pub const MAX_VERTICES: usize = 1000;

/// The mean radius of the earth.
const EARTH_METERS: f64 = 6_371_008.8;

/// A place, in degrees (WGS 84).
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Position {
    /// Latitude, north is positive.
    pub lat: f64,
    /// Longitude, east is positive.
    pub lng: f64,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Circle {
    lat: f64,
    lng: f64,
    meters: f64,
}

#[derive(Debug)]
pub(crate) enum Fence {
    Circle {
        center: Position,
        meters: f64,
    },
    /// Its edges are straight lines on a map with a grid of equal degrees. Longitudes go on beyond 180 degrees where an edge
    /// crosses the antimeridian: it takes the shorter way round.
    Polygon {
        vertices: Vec<Position>,
        /// The least longitude.
        west: f64,
    },
}

impl Fence {
    pub(crate) fn new(circle: Option<Circle>, polygon: Option<Vec<Position>>) -> Result<Self, String> {
        match (circle, polygon) {
            (Some(Circle { lat, lng, meters }), None) => {
                if meters <= 0.0 {
                    return Err("`circle`: `meters` must be more than 0".to_owned());
                }
                let center = Position { lat, lng }.checked().map_err(|error| format!("`circle`: {error}"))?;
                Ok(Self::Circle { center, meters })
            }
            (None, Some(vertices)) => {
                if !(3..=MAX_VERTICES).contains(&vertices.len()) {
                    return Err(format!("`polygon`: it must have from 3 to {MAX_VERTICES} vertices"));
                }
                for (index, vertex) in vertices.iter().enumerate() {
                    vertex.checked().map_err(|error| format!("`polygon`: vertex {}: {error}", index + 1))?;
                }
                Ok(Self::polygon(vertices))
            }
            (Some(_), Some(_)) => Err("only one of `circle` and `polygon` may be set".to_owned()),
            (None, None) => Err("either `circle` or `polygon` is needed".to_owned()),
        }
    }

    fn polygon(mut vertices: Vec<Position>) -> Self {
        for next in 1..vertices.len() {
            let before = vertices[next - 1].lng;
            vertices[next].lng = before + (vertices[next].lng - before + 180.0).rem_euclid(360.0) - 180.0;
        }
        let west = vertices.iter().map(|vertex| vertex.lng).fold(f64::INFINITY, f64::min);
        Self::Polygon { vertices, west }
    }

    pub(crate) fn contains(&self, position: Position) -> bool {
        match self {
            Self::Circle { center, meters } => center.meters_to(position) <= *meters,
            Self::Polygon { vertices, west } => {
                let position = Position { lng: west + (position.lng - west).rem_euclid(360.0), ..position };
                let edges = vertices.iter().zip(vertices.iter().cycle().skip(1));
                edges.filter(|(from, to)| position.is_west_of(**from, **to)).count() % 2 == 1
            }
        }
    }
}

impl Position {
    fn checked(self) -> Result<Self, &'static str> {
        if self.lat.abs() > 90.0 {
            Err("`lat` must be from -90 to 90")
        } else if self.lng.abs() > 180.0 {
            Err("`lng` must be from -180 to 180")
        } else {
            Ok(self)
        }
    }

    /// Along the great circle (haversine formula).
    fn meters_to(self, other: Self) -> f64 {
        let half_chord = |from: f64, to: f64| ((to - from).to_radians() / 2.0).sin().powi(2);
        let a = half_chord(self.lat, other.lat)
            + self.lat.to_radians().cos() * other.lat.to_radians().cos() * half_chord(self.lng, other.lng);
        2.0 * EARTH_METERS * a.sqrt().min(1.0).asin()
    }

    /// Whether the way from here to the east meets the edge.
    fn is_west_of(self, from: Self, to: Self) -> bool {
        let along = (self.lat - from.lat) / (to.lat - from.lat);
        (from.lat > self.lat) != (to.lat > self.lat) && from.lng + along * (to.lng - from.lng) > self.lng
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(lat: f64, lng: f64) -> Position {
        Position { lat, lng }
    }

    #[test]
    fn distances_are_those_of_the_earth() {
        // Paris to London, and a quarter of a meridian.
        assert!((at(48.8566, 2.3522).meters_to(at(51.5074, -0.1278)) - 343_556.0).abs() < 100.0);
        assert!((at(0.0, 0.0).meters_to(at(90.0, 0.0)) - 10_007_557.0).abs() < 1.0);
        assert_eq!(at(1.0, 179.9).meters_to(at(1.0, 179.9)), 0.0);
        assert!((at(0.0, 179.9).meters_to(at(0.0, -179.9)) - 22_239.0).abs() < 1.0, "over the antimeridian");
    }

    #[test]
    fn a_polygon_may_lie_anywhere() {
        for west in [-179.0, -1.0, 0.0, 178.0, 179.5] {
            let corner = |lat, east: f64| at(lat, (west + east + 180.0).rem_euclid(360.0) - 180.0);
            let square = Fence::polygon(vec![corner(0.0, 0.0), corner(0.0, 2.0), corner(2.0, 2.0), corner(2.0, 0.0)]);
            for (lat, east, inside) in [
                (1.0, 1.0, true),
                (1.9, 0.1, true),
                (1.0, 2.1, false),
                (1.0, -0.1, false),
                (2.1, 1.0, false),
                (1.0, 181.0, false),
            ] {
                assert_eq!(square.contains(corner(lat, east)), inside, "{west}: {lat} {east}");
            }
        }
    }

    #[test]
    fn a_polygon_may_have_dents() {
        let dented = Fence::polygon(vec![at(0.0, 0.0), at(0.0, 4.0), at(4.0, 4.0), at(1.0, 2.0), at(4.0, 0.0)]);
        assert!(dented.contains(at(2.0, 0.5)) && dented.contains(at(2.0, 3.5)));
        assert!(!dented.contains(at(2.0, 2.0)));
    }
}
