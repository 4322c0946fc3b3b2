//! Lists of managed objects: what a request may ask for, and reading a page of it with bounded work.
//!
//! What has an index (ids, parents, `type`) is asked of the store, everything else of each object that it returns. Objects
//! come in chunks, so that no statement is long and readers are shared; a list that would have to look at too many of them is
//! refused, and says so.

use std::borrow::Cow;
use std::collections::BTreeSet;

use futures_util::TryStreamExt as _;
use sqlx::{QueryBuilder, Sqlite, SqlitePool};

use super::inventory::ManagedObject;
use super::list::{ListError, Listed, id_list, text_parameter};
use super::object::member;
use super::page::{self, PageRequest, flag, parameter};
use super::query::{Expression, Property, Query, Subject};
use super::relation::{Kind, Relation, Side};
use super::{Sources, parse_id};
use crate::json::{self, Invalid};

/// Ids that `ids` may name.
const MAX_IDS: usize = 2000;
/// Objects that are read with one statement, and the bytes of their bodies.
const CHUNK_OBJECTS: usize = 500;
const CHUNK_BYTES: usize = 1 << 20;

/// What one list request may cost.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Bytes of the stored bodies of a page.
    pub page_bytes: usize,
    /// Objects that are looked at.
    pub scan_objects: usize,
    /// Bytes of their bodies.
    pub scan_bytes: usize,
}

impl Default for Bounds {
    fn default() -> Self {
        Self { page_bytes: page::MAX_BYTES, scan_objects: 100_000, scan_bytes: 128 << 20 }
    }
}

/// Which objects of a tenant a list request wants: those that fulfil all of it.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    /// One of these.
    ids: Option<BTreeSet<u64>>,
    /// `type`: exactly this one.
    kind: Option<Box<str>>,
    /// `text`: some property is this string.
    text: Option<Box<str>>,
    /// `owner`: exactly this one.
    owner: Option<Box<str>>,
    /// `fragmentType`, `query` and `q`.
    expressions: Vec<Expression>,
    /// The highest ids first.
    descending: bool,
}

impl Filter {
    /// All objects, those with the highest ids first.
    #[must_use]
    pub fn newest_first() -> Self {
        Self { descending: true, ..Self::default() }
    }

    /// Reads the parameters; the first of several with one name counts, unknown ones are left alone.
    ///
    /// # Errors
    /// Names the parameter whose value cannot be used.
    pub fn parse(query: &page::Query<'_>, sources: &Sources) -> Result<Self, Invalid> {
        // Ignored, it would give a list of others.
        if flag(query, "onlyRoots")? {
            return Err(Invalid::new("onlyRoots", "is not supported"));
        }
        let mut filter = Self::parse_query(query)?;
        filter.kind = text_parameter(query, "type")?;
        filter.text = text_parameter(query, "text")?;
        filter.owner = text_parameter(query, "owner")?;
        filter.expressions.extend(text_parameter(query, "fragmentType")?.map(Expression::Has));
        if let Some(ids) = text_parameter(query, "ids")? {
            filter.narrow(parse_ids(&ids)?);
        }
        for kind in Kind::ALL {
            let name = kind.parameter();
            if let Some(child) = text_parameter(query, name)? {
                let child = parse_id(&child).ok_or_else(|| Invalid::new(name, "must be an id of decimal digits"))?;
                let parents = sources.related(child, Relation { side: Side::Parents, kind }, 0, usize::MAX);
                filter.narrow(parents.objects.into_iter().map(|(id, _)| id).collect());
            }
        }
        Ok(filter)
    }

    /// Reads the parameters that lists of children have, too: `query`, and `q`, which is a query for devices.
    ///
    /// # Errors
    /// Says what is not understood and where.
    pub fn parse_query(query: &page::Query<'_>) -> Result<Self, Invalid> {
        let mut filter = Self::default();
        for (name, devices) in [("query", false), ("q", true)] {
            if let Some(text) = parameter(query, name) {
                let Query { filter: expression, descending } = Query::parse(text)?;
                filter.expressions.extend(expression);
                filter.expressions.extend(devices.then(|| Expression::Has("c8y_IsDevice".into())));
                filter.descending |= descending;
            }
        }
        Ok(filter)
    }

    /// Wants no others than these.
    pub fn narrow(&mut self, ids: BTreeSet<u64>) {
        self.ids = Some(match self.ids.take() {
            None => ids,
            Some(others) => &others & &ids,
        });
    }

    /// Whether the store alone can tell which objects are wanted.
    fn is_indexed(&self) -> bool {
        self.text.is_none() && self.owner.is_none() && self.expressions.is_empty()
    }

    fn wants(&self, object: &ManagedObject) -> bool {
        let seen = Seen { object, body: object.text() };
        let is = |property, wanted: &Option<Box<str>>| {
            wanted.as_ref().is_none_or(|wanted| seen.is(property, &|text| text == &**wanted))
        };
        is(Property::Owner, &self.owner)
            && self.text.as_ref().is_none_or(|text| holds_string(&seen.body, text))
            && self.expressions.iter().all(|expression| expression.holds(&seen))
    }

    fn push_where(&self, tenant: &str, sql: &mut QueryBuilder<Sqlite>) {
        sql.push(" FROM managed_object WHERE tenant = ").push_bind(tenant.to_owned());
        if let Some(ids) = &self.ids {
            let ids = id_list(ids);
            sql.push(" AND id IN (SELECT value FROM json_each(").push_bind(ids).push("))");
        }
        if let Some(kind) = &self.kind {
            sql.push(" AND type = ").push_bind(kind.to_string());
        }
    }
}

fn parse_ids(text: &str) -> Result<BTreeSet<u64>, Invalid> {
    let mut ids = BTreeSet::new();
    for id in text.split(',') {
        ids.insert(
            parse_id(id.trim())
                .ok_or_else(|| Invalid::new("ids", "must be ids of decimal digits, separated by commas"))?,
        );
        if ids.len() > MAX_IDS {
            return Err(Invalid::new("ids", format!("names more than {MAX_IDS} objects")));
        }
    }
    Ok(ids)
}

/// An object that a query looks at.
struct Seen<'a> {
    object: &'a ManagedObject,
    body: String,
}

impl Seen<'_> {
    fn text(&self, name: &str) -> Option<Cow<'_, str>> {
        json::string(member(&self.body, name)?, name).ok()
    }
}

impl Subject for Seen<'_> {
    fn is(&self, property: Property, matches: &dyn Fn(&str) -> bool) -> bool {
        match property {
            Property::Id => matches(&self.object.id.to_string()),
            Property::Type => self.object.kind.as_deref().is_some_and(matches),
            Property::Name => self.text("name").is_some_and(|name| matches(&name)),
            Property::Owner => self.text("owner").is_some_and(|owner| matches(&owner)),
        }
    }

    fn has(&self, fragment: &str) -> bool {
        member(&self.body, fragment).is_some()
    }
}

/// Whether some string in the value is `wanted`, at any depth; the depth was limited when the value came.
fn holds_string(raw: &str, wanted: &str) -> bool {
    let mut found = false;
    let mut look = |raw: &str| {
        found = found || holds_string(raw, wanted);
        Ok(())
    };
    let walked = match raw.as_bytes().first() {
        Some(b'"') => return json::string(raw, "").is_ok_and(|text| text == wanted),
        Some(b'{') => json::each_member(raw, |_, raw| look(raw)),
        Some(b'[') => json::each_element(raw, look),
        _ => return false,
    };
    walked.is_ok() && found
}

/// Reads a page.
///
/// # Errors
/// See [`ListError`].
pub async fn list(
    store: &SqlitePool,
    tenant: &str,
    filter: &Filter,
    page: &PageRequest,
    bounds: &Bounds,
) -> Result<Listed<ManagedObject>, ListError> {
    let indexed = filter.is_indexed();
    let mut listed = Listed { objects: Vec::new(), more: false, total: None };
    if indexed && page.wants_total() {
        listed.total = Some(count(store, tenant, filter).await?);
    }
    // Objects of the page, and those before it, that are still to come; an index skips them by itself.
    let mut before = if indexed { 0 } else { page.offset() };
    let mut scan = Scan { offset: if indexed { page.offset() } else { 0 }, ..Scan::default() };
    let (mut found, mut page_bytes) = (0, 0);
    loop {
        let chunk = scan.next(store, tenant, filter).await?;
        if scan.objects > bounds.scan_objects || scan.bytes > bounds.scan_bytes {
            let Bounds { scan_objects: objects, scan_bytes: bytes, .. } = *bounds;
            return Err(ListError::TooMuch { objects, bytes });
        }
        for object in chunk {
            if !indexed && !filter.wants(&object) {
                continue;
            }
            found += 1;
            if before > 0 {
                before -= 1;
            } else if listed.objects.len() < page.size as usize {
                page_bytes += object.body.len();
                if page_bytes > bounds.page_bytes {
                    return Err(ListError::TooLarge { max_bytes: bounds.page_bytes });
                }
                listed.objects.push(object);
            } else {
                listed.more = true;
            }
        }
        let counting = !indexed && page.wants_total();
        if scan.ended || (listed.more && !counting) {
            if counting {
                listed.total = Some(found);
            }
            return Ok(listed);
        }
        // Many chunks in a row may come without a pause.
        tokio::task::yield_now().await;
    }
}

/// How far a walk through the objects has come.
#[derive(Default)]
struct Scan {
    /// The last id that was read.
    last: Option<u64>,
    /// Objects to be skipped first.
    offset: u64,
    objects: usize,
    bytes: usize,
    ended: bool,
}

impl Scan {
    async fn next(&mut self, store: &SqlitePool, tenant: &str, filter: &Filter) -> sqlx::Result<Vec<ManagedObject>> {
        let mut sql = QueryBuilder::new("SELECT id, type, created, updated, body");
        filter.push_where(tenant, &mut sql);
        if let Some(last) = self.last {
            sql.push(if filter.descending { " AND id < " } else { " AND id > " }).push_bind(last.cast_signed());
        }
        sql.push(if filter.descending { " ORDER BY id DESC LIMIT " } else { " ORDER BY id LIMIT " });
        sql.push_bind(CHUNK_OBJECTS as i64).push(" OFFSET ").push_bind(self.offset.cast_signed());
        self.offset = 0;
        let mut rows = sql.build().fetch(store);
        let (mut chunk, mut bytes) = (Vec::new(), 0);
        self.ended = true;
        while let Some(row) = rows.try_next().await? {
            let object = ManagedObject::from_row(&row)?;
            self.last = Some(object.id);
            bytes += object.body.len();
            chunk.push(object);
            if chunk.len() == CHUNK_OBJECTS || bytes >= CHUNK_BYTES {
                self.ended = false;
                break;
            }
        }
        self.objects += chunk.len();
        self.bytes += bytes;
        Ok(chunk)
    }
}

async fn count(store: &SqlitePool, tenant: &str, filter: &Filter) -> sqlx::Result<u64> {
    let mut sql = QueryBuilder::new("SELECT count(*)");
    filter.push_where(tenant, &mut sql);
    let count: i64 = sql.build_query_scalar().fetch_one(store).await?;
    Ok(count.cast_unsigned())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use crate::json::Limits;
    use crate::platform::inventory;
    use crate::store::Store;

    use super::*;

    /// Objects with ids from 1.
    async fn filled(bodies: &[String]) -> (tempfile::TempDir, Store) {
        let place = tempfile::tempdir().unwrap();
        let mut store = Store::open(place.path(), &crate::config::Store::default()).await.unwrap();
        let mut insert = QueryBuilder::new("INSERT INTO managed_object(id, tenant, type, created, updated, body) ");
        let objects = bodies.iter().enumerate().map(|(at, body)| {
            let new = inventory::parse(body.as_bytes(), "admin", &Limits::default()).unwrap();
            new.created(at as u64 + 1, 0)
        });
        insert.push_values(objects, |mut row, object| {
            row.push_bind(object.id.cast_signed()).push_bind("t").push_bind(object.kind.map(String::from));
            row.push_bind(0).push_bind(0).push_bind(object.body.to_vec());
        });
        insert.build().execute(store.writer.connection()).await.unwrap();
        (place, store)
    }

    fn pairs<'a>(query: &'a str) -> Vec<(Cow<'a, str>, Cow<'a, str>)> {
        form_urlencoded::parse(query.as_bytes()).collect()
    }

    async fn asked(
        store: &Store,
        sources: &Sources,
        query: &str,
        bounds: &Bounds,
    ) -> Result<Listed<ManagedObject>, ListError> {
        let query = pairs(query);
        let (filter, page) = (Filter::parse(&query, sources).unwrap(), PageRequest::parse(&query).unwrap());
        list(&store.readers, "t", &filter, &page, bounds).await
    }

    #[tokio::test]
    async fn each_parameter_selects() {
        let bodies = [
            r#"{"name":"pump 1","type":"pump","c8y_IsDevice":{},"c8y_Hardware":{"model":["P1","P2"]}}"#,
            r#"{"name":"pump 2","type":"pump","owner":"me"}"#,
            r#"{"name":"hall","type":"room","note":"P1"}"#,
            r#"{"c8y_IsDevice":{}}"#,
        ];
        let (_place, store) = filled(&bodies.map(str::to_owned)).await;
        let sources = Sources::default();
        for id in 1..=4 {
            sources.insert(&"t".into(), id, None);
        }
        sources.link(Kind::Devices, 3, 1);
        sources.link(Kind::Devices, 2, 1);
        sources.link(Kind::Assets, 4, 1);
        sources.link(Kind::Additions, 1, 1);
        for (query, expected) in [
            ("", &[1, 2, 3, 4][..]),
            ("ids=4,1,99", &[1, 4]),
            ("type=pump", &[1, 2]),
            ("owner=me", &[2]),
            ("owner=admin&type=pump", &[1]),
            ("fragmentType=c8y_IsDevice", &[1, 4]),
            ("text=P1", &[1, 3]),
            ("text=P", &[]),
            ("text=pump+2", &[2]),
            ("childDeviceId=1", &[2, 3]),
            ("childAssetId=1", &[4]),
            ("childAdditionId=1", &[1]),
            ("childDeviceId=1&type=room", &[3]),
            ("childDeviceId=99", &[]),
            ("query=name+eq+'pump*'", &[1, 2]),
            ("query=$filter=(type+eq+'pump'+and+not+has(c8y_IsDevice))", &[2]),
            ("query=$orderby=id+desc", &[4, 3, 2, 1]),
            ("query=owner+eq+'a*'+$orderby=id+desc", &[4, 3, 1]),
            ("query=id+eq+'2'", &[2]),
            ("q=", &[1, 4]),
            ("q=$filter=name+eq+'*'", &[1]),
            ("ids=1,2&query=type+eq+room", &[]),
        ] {
            for (size, total) in [(100, "true"), (2, "false"), (1, "true")] {
                let mut seen = Vec::new();
                for current in 1.. {
                    let query = format!("{query}&pageSize={size}&currentPage={current}&withTotalElements={total}");
                    let listed = asked(&store, &sources, &query, &Bounds::default()).await.unwrap();
                    assert_eq!(listed.total, (total == "true").then_some(expected.len() as u64), "{query}");
                    let empty = listed.objects.is_empty();
                    seen.extend(listed.objects.into_iter().map(|object| object.id));
                    assert_eq!(listed.more, seen.len() < expected.len(), "{query}");
                    if empty {
                        break;
                    }
                }
                assert_eq!(seen, expected, "{query}");
            }
        }
        let none = Filter::parse(&[], &sources).unwrap();
        let page = PageRequest::parse(&[]).unwrap();
        assert!(list(&store.readers, "u", &none, &page, &Bounds::default()).await.unwrap().objects.is_empty());
    }

    #[tokio::test]
    async fn pages_go_over_chunks() {
        let bodies: Vec<_> = (1..=1203).map(|n| format!(r#"{{"name":"n{}"}}"#, n % 2)).collect();
        let (_place, store) = filled(&bodies).await;
        let sources = Sources::default();
        for (query, first, count, more, total) in [
            ("pageSize=2000&withTotalElements=true", 1, 1203, false, Some(1203)),
            ("pageSize=600&currentPage=2&withTotalElements=true", 601, 600, true, Some(1203)),
            ("pageSize=600&currentPage=3", 1201, 3, false, None),
            ("pageSize=300&currentPage=2&query=name+eq+n1&withTotalElements=true", 601, 300, true, Some(602)),
            ("pageSize=300&currentPage=3&query=name+eq+n1", 1201, 2, false, None),
            ("pageSize=5&currentPage=4000000000", 0, 0, false, None),
            ("pageSize=5&currentPage=4000000000&query=name+eq+n1", 0, 0, false, None),
        ] {
            let listed = asked(&store, &sources, query, &Bounds::default()).await.unwrap();
            let ids: Vec<_> = listed.objects.iter().map(|object| object.id).collect();
            assert_eq!((ids.first().copied().unwrap_or(0), ids.len()), (first, count), "{query}");
            assert_eq!((listed.more, listed.total), (more, total), "{query}");
        }
    }

    #[tokio::test]
    async fn work_is_bounded() {
        let bodies: Vec<_> = (0..1203).map(|_| r#"{"owner":"1234567"}"#.to_owned()).collect();
        let (_place, store) = filled(&bodies).await;
        let sources = Sources::default();
        let bytes = r#""owner":"1234567""#.len();
        let bounds = Bounds { page_bytes: 10 * bytes, scan_objects: 1203, scan_bytes: 1203 * bytes };
        for (query, fits) in [("pageSize=10", true), ("pageSize=11", false), ("text=none", true)] {
            assert_eq!(asked(&store, &sources, query, &bounds).await.is_ok(), fits, "{query}");
        }
        for bounds in [Bounds { scan_objects: 1202, ..bounds }, Bounds { scan_bytes: 1203 * bytes - 1, ..bounds }] {
            let refused = asked(&store, &sources, "text=none", &bounds).await.unwrap_err();
            assert!(matches!(refused, ListError::TooMuch { .. }), "{refused}");
            assert!(asked(&store, &sources, "", &bounds).await.is_ok());
        }
    }

    #[test]
    fn bad_parameters_are_named() {
        let ids = (0..=MAX_IDS).map(|id| id.to_string()).collect::<Vec<_>>().join(",");
        for (query, reason) in [
            ("ids=1,x", "ids: must be ids of decimal digits, separated by commas"),
            (&format!("ids={ids}"), "ids: names more than 2000 objects"),
            ("type=", "type: must not be empty"),
            ("text=", "text: must not be empty"),
            ("onlyRoots=true", "onlyRoots: is not supported"),
            ("childAssetId=x", "childAssetId: must be an id of decimal digits"),
            ("query=name", "query: 'eq' is expected at character 5"),
        ] {
            let refused = Filter::parse(&pairs(query), &Sources::default()).unwrap_err();
            assert_eq!(refused.to_string(), reason, "{query}");
        }
    }
}
