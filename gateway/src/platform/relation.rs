//! How managed objects are linked: the three kinds, and the two ends of each.

/// What a child is to its parent. The numbers are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// `childDevices`
    Devices = 0,
    /// `childAssets`
    Assets = 1,
    /// `childAdditions`
    Additions = 2,
}

/// Which end of a link is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The children of an object.
    Children,
    /// Its parents.
    Parents,
}

/// One of the six members of a managed object that refer to others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Relation {
    /// The end that is listed.
    pub side: Side,
    /// The kind of link.
    pub kind: Kind,
}

impl Kind {
    /// Every kind.
    pub const ALL: [Self; 3] = [Self::Devices, Self::Assets, Self::Additions];

    /// The name of the member, and of the collection, as `childDevices`.
    #[must_use]
    pub fn children(self) -> &'static str {
        Relation { side: Side::Children, kind: self }.name()
    }

    /// The parameter that asks for the parents of a child, as `childDeviceId`.
    #[must_use]
    pub fn parameter(self) -> &'static str {
        match self {
            Self::Devices => "childDeviceId",
            Self::Assets => "childAssetId",
            Self::Additions => "childAdditionId",
        }
    }

    /// The kind of this number, as stored.
    #[must_use]
    pub fn stored(number: i64) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as i64 == number)
    }
}

impl Relation {
    /// In the order in which they are shown.
    pub const ALL: [Self; 6] = [
        Self { side: Side::Children, kind: Kind::Devices },
        Self { side: Side::Children, kind: Kind::Assets },
        Self { side: Side::Children, kind: Kind::Additions },
        Self { side: Side::Parents, kind: Kind::Devices },
        Self { side: Side::Parents, kind: Kind::Assets },
        Self { side: Side::Parents, kind: Kind::Additions },
    ];

    /// The name of the member.
    #[must_use]
    pub fn name(self) -> &'static str {
        match (self.side, self.kind) {
            (Side::Children, Kind::Devices) => "childDevices",
            (Side::Children, Kind::Assets) => "childAssets",
            (Side::Children, Kind::Additions) => "childAdditions",
            (Side::Parents, Kind::Devices) => "deviceParents",
            (Side::Parents, Kind::Assets) => "assetParents",
            (Side::Parents, Kind::Additions) => "additionParents",
        }
    }
}
