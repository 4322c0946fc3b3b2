//! Reading objects: one by its id, a page of a collection, or the ids of all that a filter selects. The same for every API.

use std::borrow::Cow;

use futures_util::TryStreamExt as _;
use sqlx::sqlite::SqliteRow;
use sqlx::{QueryBuilder, Row as _, Sqlite, SqliteConnection, SqliteExecutor};

use super::page::{PageRequest, Query, flag, parameter};
use super::relation::Kind;
use super::{Sources, TooMany, parse_id};
use crate::json::Invalid;
use crate::time;

/// An object that a table holds, with the columns `id`, `tenant`, `source`, `time` and `body`.
pub trait Stored: Sized + Send + Unpin {
    /// Name of the table.
    const TABLE: &'static str;
    /// The columns that [`Stored::from_row`] reads.
    const COLUMNS: &'static str;
    /// Lists begin with the newest.
    const NEWEST_FIRST: bool;
    /// Only objects count as fragments.
    const FRAGMENTS_ARE_OBJECTS: bool;
    /// By what the rows of a source are found where the table has no index for that: a view with `source`, `time` and `id`.
    const PLACES: Option<&'static str> = None;

    /// Whether a list is in the order of time, else in that of creation.
    fn in_order_of_time(filter: &Filter) -> bool;

    /// Reads a row.
    ///
    /// # Errors
    /// When a column is missing or of another type.
    fn from_row(row: &SqliteRow) -> sqlx::Result<Self>;

    /// Bytes of the stored body.
    fn bytes(&self) -> usize;

    /// Id, device, and type if it has one.
    fn subject(&self) -> (u64, u64, Option<&str>);
}

/// Which objects of a tenant a request wants. An API reads those parts that it documents.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// Of this device.
    pub source: Option<u64>,
    /// And of what is below it over links of these kinds.
    pub following: Vec<Kind>,
    /// What is below it, see [`Filter::follow`].
    pub below: Vec<u64>,
    /// Of one of these types; none: of any.
    pub kinds: Vec<Box<str>>,
    /// Alarms and operations: in one of these states; none: in any.
    pub statuses: Vec<Box<str>>,
    /// Alarms: with one of these severities; none: with any.
    pub severities: Vec<Box<str>>,
    /// `dateFrom` and `dateTo`: the object's own time.
    pub time: Range,
    /// `createdFrom` and `createdTo`.
    pub created: Range,
    /// `lastUpdatedFrom` and `lastUpdatedTo`.
    pub updated: Range,
    /// With this fragment.
    pub fragment: Option<Box<str>>,
    /// Whose value is this text.
    pub fragment_value: Option<Box<str>>,
    /// Measurements: with this series, in that fragment or, without one, in any.
    pub series: Option<Box<str>>,
    /// `revert`: in the other order. Documented for ranges of time only; here for every list.
    pub revert: bool,
}

/// A range of time in milliseconds. The platform does not say whether its end belongs to it; here it does not, so that ranges
/// can follow each other without an overlap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Range {
    /// Not before.
    pub from_ms: Option<i64>,
    /// Before.
    pub to_ms: Option<i64>,
}

impl Range {
    /// Reads the parameters of these names: dates, or dates and times.
    pub(super) fn parse(query: &Query<'_>, from: &str, to: &str) -> Result<Self, Invalid> {
        let time = |name: &str| {
            let parse = |text| time::parse_date_or_time(text).map_err(|error| Invalid::new(name, error.to_string()));
            parameter(query, name).map(parse).transpose()
        };
        Ok(Self { from_ms: time(from)?, to_ms: time(to)? })
    }

    fn is_given(self) -> bool {
        self.from_ms.is_some() || self.to_ms.is_some()
    }

    fn push(self, column: &str, sql: &mut QueryBuilder<Sqlite>) {
        for (comparison, ms) in [(" >= ", self.from_ms), (" < ", self.to_ms)] {
            if let Some(ms) = ms {
                sql.push(" AND ").push(column).push(comparison).push_bind(ms);
            }
        }
    }
}

impl Filter {
    /// Reads what all APIs document: the device under the name `source`, the range of its time, and the order.
    pub(super) fn parse(query: &Query<'_>, source: &str) -> Result<Self, Invalid> {
        Ok(Self {
            source: id_parameter(query, source)?,
            time: Range::parse(query, "dateFrom", "dateTo")?,
            revert: flag(query, "revert")?,
            ..Self::default()
        })
    }

    /// Finds what is below the device, as `following` says.
    ///
    /// # Errors
    /// When that is more than `most` objects.
    pub fn follow(mut self, sources: &Sources, most: usize) -> Result<Self, Invalid> {
        if let Some(source) = self.source
            && !self.following.is_empty()
        {
            let too_many = |TooMany| Invalid::new("", format!("more than {most} objects are below object '{source}'"));
            self.below = sources.below(source, &self.following, most).map_err(too_many)?;
        }
        Ok(self)
    }

    /// Reads the parameters that widen `source` to what is below it.
    pub(super) fn parse_following(&mut self, query: &Query<'_>) -> Result<(), Invalid> {
        for (name, kind) in [("withSourceAssets", Kind::Assets), ("withSourceDevices", Kind::Devices)] {
            if flag(query, name)? {
                if self.source.is_none() {
                    return Err(Invalid::new(name, "is only for requests with source"));
                }
                self.following.push(kind);
            }
        }
        Ok(())
    }

    /// A device's or a range's objects.
    pub(super) fn has_source_or_time(&self) -> bool {
        self.source.is_some() || self.time.is_given()
    }

    fn order<T: Stored>(&self) -> &'static str {
        let is_placed = T::PLACES.is_some() && self.source.is_some();
        match (T::in_order_of_time(self), T::NEWEST_FIRST != self.revert) {
            (true, false) if is_placed => " ORDER BY placed_time, placed",
            (true, true) if is_placed => " ORDER BY placed_time DESC, placed DESC",
            (true, false) => " ORDER BY time, id",
            (true, true) => " ORDER BY time DESC, id DESC",
            (false, false) => " ORDER BY id",
            (false, true) => " ORDER BY id DESC",
        }
    }

    /// FROM and WHERE.
    fn push_where<T: Stored>(&self, tenant: &str, sql: &mut QueryBuilder<Sqlite>) {
        sql.push(" FROM ");
        if let Some(places) = T::PLACES
            && self.source.is_some()
        {
            sql.push("(SELECT time AS placed_time, id AS placed FROM ").push(places).push(" WHERE true");
            self.push_source(sql);
            self.time.push("time", sql);
            // Without a limit, SQLite would leave the order to the outer statement, which would sort all that the device has.
            sql.push(self.order::<T>()).push(" LIMIT -1) CROSS JOIN ").push(T::TABLE).push(" ON id = placed");
        } else {
            sql.push(T::TABLE);
        }
        // The plus keeps SQLite from taking the index on tenant and time where it does not help: a device's rows and the order
        // of ids have better ones.
        let by_time = T::in_order_of_time(self) || self.time.is_given();
        let tenant_column = if by_time && self.source.is_none() { "tenant" } else { "+tenant" };
        sql.push(" WHERE ").push(tenant_column).push(" = ").push_bind(tenant.to_owned());
        sql.push(" AND NOT EXISTS (SELECT 1 FROM gone WHERE gone.source = ").push(T::TABLE).push(".source)");
        if T::PLACES.is_none() {
            self.push_source(sql);
        }
        for (column, texts) in [("type", &self.kinds), ("status", &self.statuses), ("severity", &self.severities)] {
            push_any_of(column, texts, sql);
        }
        for (column, range) in [("time", self.time), ("created", self.created), ("updated", self.updated)] {
            range.push(column, sql);
        }
        self.push_fragment::<T>(sql);
    }

    fn push_source(&self, sql: &mut QueryBuilder<Sqlite>) {
        match self.source {
            Some(source) if self.below.is_empty() => {
                sql.push(" AND source = ").push_bind(source.cast_signed());
            }
            Some(source) => {
                let all = [&[source], &*self.below].concat();
                sql.push(" AND source IN (SELECT value FROM json_each(").push_bind(id_list(&all)).push("))");
            }
            None => {}
        }
    }

    fn push_fragment<T: Stored>(&self, sql: &mut QueryBuilder<Sqlite>) {
        if self.fragment.is_none() && self.series.is_none() {
            return;
        }
        sql.push(" AND EXISTS (SELECT 1 FROM json_each('{' || body || '}') AS fragment");
        if self.series.is_some() {
            // CASE, since nothing else promises that values which are no objects stay out of the inner json_each.
            sql.push(", json_each(CASE fragment.type WHEN 'object' THEN fragment.value ELSE '{}' END) AS series");
        }
        sql.push(if T::FRAGMENTS_ARE_OBJECTS { " WHERE fragment.type = 'object'" } else { " WHERE true" });
        if let Some(fragment) = &self.fragment {
            sql.push(" AND fragment.key = ").push_bind(fragment.to_string());
        }
        if let Some(value) = &self.fragment_value {
            sql.push(" AND fragment.type = 'text' AND fragment.value = ").push_bind(value.to_string());
        }
        if let Some(series) = &self.series {
            sql.push(" AND series.type = 'object' AND series.key = ").push_bind(series.to_string());
        }
        sql.push(")");
    }
}

/// One bound value however many there are.
fn push_any_of(column: &str, texts: &[Box<str>], sql: &mut QueryBuilder<Sqlite>) {
    if !texts.is_empty() {
        let list = serde_json::to_string(texts).expect("invariant: texts always serialize");
        sql.push(" AND ").push(column).push(" IN (SELECT value FROM json_each(").push_bind(list).push("))");
    }
}

/// A parameter that is an id.
pub(super) fn id_parameter(query: &Query<'_>, name: &str) -> Result<Option<u64>, Invalid> {
    let id = |text| parse_id(text).ok_or_else(|| Invalid::new(name, "must be an id of decimal digits"));
    parameter(query, name).map(id).transpose()
}

/// A parameter that is any text but an empty one.
pub(super) fn text_parameter(query: &Query<'_>, name: &str) -> Result<Option<Box<str>>, Invalid> {
    match parameter(query, name) {
        Some("") => Err(Invalid::new(name, "must not be empty")),
        value => Ok(value.map(Box::from)),
    }
}

/// A parameter that is one or several texts, separated by commas.
pub(super) fn texts_parameter(query: &Query<'_>, name: &str) -> Result<Vec<Box<str>>, Invalid> {
    let texts: Vec<Box<str>> =
        text_parameter(query, name)?.map_or_else(Vec::new, |texts| texts.split(',').map(Box::from).collect());
    if texts.iter().any(|text| text.is_empty()) {
        return Err(Invalid::new(name, "holds an empty value"));
    }
    Ok(texts)
}

/// As [`texts_parameter`], of the words `known`.
pub(super) fn words_parameter(query: &Query<'_>, name: &str, known: &[&str]) -> Result<Vec<Box<str>>, Invalid> {
    let words = texts_parameter(query, name)?;
    if words.iter().any(|word| !known.contains(&&**word)) {
        return Err(Invalid::new(name, format!("must be one of {}", known.join(", "))));
    }
    Ok(words)
}

/// Refuses parameters that are not `known`: what changes many objects must not take a misspelt filter for none.
///
/// # Errors
/// Names the first unknown parameter.
pub fn only_known(query: &Query<'_>, known: &[&str]) -> Result<(), Invalid> {
    match query.iter().find(|(name, _)| !known.contains(&&**name)) {
        Some((name, _)) => {
            Err(Invalid::new(name, format!("is not a parameter of this request; known: {}", known.join(", "))))
        }
        None => Ok(()),
    }
}

/// One page of a collection.
#[derive(Clone, Debug)]
pub struct Listed<T> {
    /// The objects of the page; none past the end.
    pub objects: Vec<T>,
    /// Whether others follow.
    pub more: bool,
    /// The number of all that match, where the page wants a total.
    pub total: Option<u64>,
}

/// Why there is no page.
#[derive(Debug, thiserror::Error)]
pub enum ListError {
    /// The store failed.
    #[error("the store could not be read")]
    Store(#[from] sqlx::Error),
    /// The page would not fit into memory; a smaller one may.
    #[error("pageSize: the page is larger than {max_bytes} bytes, ask for a smaller one")]
    TooLarge {
        /// The limit.
        max_bytes: usize,
    },
    /// Too many objects would have to be looked at.
    #[error("the list would look at more than {objects} objects or {bytes} bytes; narrow it by ids, type or children")]
    TooMuch {
        /// Limit of objects.
        objects: usize,
        /// Limit of bytes.
        bytes: usize,
    },
}

/// Reads one object of the tenant.
///
/// # Errors
/// When the store fails.
pub async fn get<T: Stored>(store: impl SqliteExecutor<'_>, tenant: &str, id: u64) -> sqlx::Result<Option<T>> {
    let mut sql = QueryBuilder::new(format!("SELECT {}", T::COLUMNS));
    Filter::default().push_where::<T>(tenant, &mut sql);
    sql.push(" AND id = ").push_bind(id.cast_signed());
    let row = sql.build().fetch_optional(store).await?;
    row.as_ref().map(T::from_row).transpose()
}

/// Reads a page whose stored bodies have at most `max_bytes` together.
///
/// # Errors
/// See [`ListError`].
pub async fn list<T: Stored>(
    store: &mut SqliteConnection,
    tenant: &str,
    filter: &Filter,
    page: &PageRequest,
    max_bytes: usize,
) -> Result<Listed<T>, ListError> {
    let total = if page.wants_total() { Some(count::<T>(&mut *store, tenant, filter).await?) } else { None };
    let mut sql = QueryBuilder::new(format!("SELECT {}", T::COLUMNS));
    filter.push_where::<T>(tenant, &mut sql);
    sql.push(filter.order::<T>());
    // One row past the page tells whether there is a next one.
    sql.push(" LIMIT ").push_bind(i64::from(page.size) + 1);
    sql.push(" OFFSET ").push_bind(page.offset().cast_signed());
    let mut rows = sql.build().fetch(store);
    let mut listed = Listed { objects: Vec::new(), more: false, total };
    let mut bytes = 0;
    while let Some(row) = rows.try_next().await? {
        if listed.objects.len() == page.size as usize {
            listed.more = true;
            break;
        }
        let object = T::from_row(&row)?;
        bytes += object.bytes();
        if bytes > max_bytes {
            return Err(ListError::TooLarge { max_bytes });
        }
        listed.objects.push(object);
    }
    Ok(listed)
}

/// Counts the objects that `filter` selects.
///
/// # Errors
/// When the store fails.
pub async fn count<T: Stored>(store: impl SqliteExecutor<'_>, tenant: &str, filter: &Filter) -> sqlx::Result<u64> {
    let mut sql = QueryBuilder::new("SELECT count(*)");
    filter.push_where::<T>(tenant, &mut sql);
    let count: i64 = sql.build_query_scalar().fetch_one(store).await?;
    Ok(count.cast_unsigned())
}

/// Ids of at most `most` of the objects below `below` that `filter` selects; in no order, for those who delete them and ask again.
///
/// # Errors
/// When the store fails.
pub async fn some_ids<T: Stored>(
    store: impl SqliteExecutor<'_>,
    tenant: &str,
    filter: &Filter,
    below: u64,
    most: u32,
) -> sqlx::Result<Vec<u64>> {
    let mut sql = QueryBuilder::new("SELECT id");
    filter.push_where::<T>(tenant, &mut sql);
    sql.push(" AND id < ").push_bind(below.cast_signed()).push(" LIMIT ").push_bind(i64::from(most));
    let ids: Vec<i64> = sql.build_query_scalar().fetch_all(store).await?;
    Ok(ids.into_iter().map(i64::cast_unsigned).collect())
}

/// Ids and devices of at most `most` of the objects between `after` and `below` that `filter` selects, by ascending id.
///
/// # Errors
/// When the store fails.
pub async fn ids_after<T: Stored>(
    store: impl SqliteExecutor<'_>,
    tenant: &str,
    filter: &Filter,
    (after, below): (u64, u64),
    most: u32,
) -> sqlx::Result<Vec<(u64, u64)>> {
    let mut sql = QueryBuilder::new("SELECT id, source");
    filter.push_where::<T>(tenant, &mut sql);
    sql.push(" AND id > ").push_bind(after.cast_signed()).push(" AND id < ").push_bind(below.cast_signed());
    sql.push(" ORDER BY id LIMIT ").push_bind(i64::from(most));
    let rows = sql.build().fetch_all(store).await?;
    rows.iter().map(|row| Ok((id_column(row, "id")?, id_column(row, "source")?))).collect()
}

/// Those of `ids` that `filter` selects, by ascending id, up to and including the one whose stored body passes `max_bytes`
/// together with those before it.
///
/// # Errors
/// When the store fails.
pub async fn those_of<T: Stored>(
    store: &mut SqliteConnection,
    tenant: &str,
    filter: &Filter,
    ids: &[u64],
    max_bytes: usize,
) -> sqlx::Result<Vec<T>> {
    let mut sql = QueryBuilder::new(format!("SELECT {}", T::COLUMNS));
    filter.push_where::<T>(tenant, &mut sql);
    sql.push(" AND id IN (SELECT value FROM json_each(").push_bind(id_list(ids)).push(")) ORDER BY id");
    let mut rows = sql.build().fetch(store);
    let (mut objects, mut bytes) = (Vec::new(), 0);
    while bytes <= max_bytes
        && let Some(row) = rows.try_next().await?
    {
        let object = T::from_row(&row)?;
        bytes += object.bytes();
        objects.push(object);
    }
    Ok(objects)
}

/// Ids as one value to bind, for `json_each`.
#[must_use]
pub fn id_list<'a>(ids: impl IntoIterator<Item = &'a u64>) -> String {
    let ids: Vec<_> = ids.into_iter().collect();
    serde_json::to_string(&ids).expect("invariant: numbers always serialize")
}

/// The id and the device of a row, for [`Stored::from_row`].
pub(super) fn id_column(row: &SqliteRow, name: &str) -> sqlx::Result<u64> {
    Ok(row.try_get::<i64, _>(name)?.cast_unsigned())
}

/// A text column, for [`Stored::from_row`].
pub(super) fn text_column(row: &SqliteRow, name: &str) -> sqlx::Result<Box<str>> {
    Ok(row.try_get::<Cow<'_, str>, _>(name)?.into())
}

/// The body of a row, for [`Stored::from_row`].
pub(super) fn body_column(row: &SqliteRow) -> sqlx::Result<bytes::Bytes> {
    Ok(row.try_get::<Vec<u8>, _>("body")?.into())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use sqlx::Connection as _;

    use super::super::alarm::Alarm;
    use super::super::event::Event;
    use super::super::measurement::Measurement;
    use super::super::operation::Operation;
    use super::*;

    const MAX_BYTES: usize = 1 << 20;

    /// Ids from 1, times in the order given; the last one is another tenant's.
    const ROWS: &[(&str, i64, &str, i64, &str)] = &[
        ("a", 7, "t", 3000, r#""c8y_T":{"T":{"value":1}},"note":"c8y_S""#),
        ("a", 7, "u", 1000, r#""c8y_S":{"S":{"value":1},"T":2}"#),
        ("a", 8, "t", 2000, r#""c8y\u005fT":{"\u0053":{"value":1}},"c8y_S":"text""#),
        ("a", 7, "t", 2000, ""),
        ("a", 7, "t", 2000, r#""odd\"'name":{"x'y":{"value":1}}"#),
        ("b", 7, "t", 2000, r#""c8y_T":{"T":{"value":1}}"#),
    ];

    async fn store() -> SqliteConnection {
        let mut store = SqliteConnection::connect("sqlite::memory:").await.unwrap();
        sqlx::migrate!("../migrations").run(&mut store).await.unwrap();
        for (tenant, source, kind, time, body) in ROWS {
            sqlx::query("INSERT INTO measurement(tenant, source, type, time, body) VALUES (?, ?, ?, ?, ?)")
                .bind(*tenant)
                .bind(*source)
                .bind(*kind)
                .bind(*time)
                .bind(body.as_bytes())
                .execute(&mut store)
                .await
                .unwrap();
        }
        store
    }

    const ALL: PageRequest =
        PageRequest { current: 1, size: 2000, with_total_pages: false, with_total_elements: false };

    async fn listed(
        store: &mut SqliteConnection,
        filter: &Filter,
        page: &PageRequest,
    ) -> (Vec<u64>, bool, Option<u64>) {
        let listed = list::<Measurement>(store, "a", filter, page, MAX_BYTES).await.unwrap();
        (listed.objects.iter().map(|m| m.id).collect(), listed.more, listed.total)
    }

    #[tokio::test]
    async fn one_measurement_is_read_by_its_tenant_only() {
        let mut store = store().await;
        let found = get::<Measurement>(&mut store, "a", 1).await.unwrap().unwrap();
        assert_eq!((found.id, found.source, &found.body[..]), (1, 7, ROWS[0].4.as_bytes()));
        assert_eq!(get::<Measurement>(&mut store, "b", 1).await.unwrap(), None);
        assert_eq!(get::<Measurement>(&mut store, "a", 99).await.unwrap(), None);
    }

    #[tokio::test]
    async fn filters_select_and_order() {
        let mut store = store().await;
        let text = |text: &str| Some(Box::from(text));
        let any = Filter::default;
        for (filter, ids) in [
            (any(), vec![1, 2, 3, 4, 5]),
            (Filter { revert: true, ..any() }, vec![5, 4, 3, 2, 1]),
            (Filter { source: Some(7), ..any() }, vec![2, 4, 5, 1]),
            (Filter { source: Some(7), revert: true, ..any() }, vec![1, 5, 4, 2]),
            (Filter { kinds: vec!["t".into()], ..any() }, vec![1, 3, 4, 5]),
            (Filter { time: Range { from_ms: Some(2000), to_ms: None }, ..any() }, vec![3, 4, 5, 1]),
            (Filter { time: Range { from_ms: None, to_ms: Some(2000) }, ..any() }, vec![2]),
            (
                Filter { time: Range { from_ms: Some(1000), to_ms: Some(3000) }, revert: true, ..any() },
                vec![5, 4, 3, 2],
            ),
            (Filter { fragment: text("c8y_T"), ..any() }, vec![1, 3]),
            (Filter { fragment: text("c8y_S"), ..any() }, vec![2]),
            (Filter { fragment: text("note"), ..any() }, vec![]),
            (Filter { series: text("S"), ..any() }, vec![2, 3]),
            (Filter { series: text("T"), ..any() }, vec![1]),
            (Filter { fragment: text("c8y_T"), series: text("S"), ..any() }, vec![3]),
            (Filter { fragment: text("odd\"'name"), series: text("x'y"), ..any() }, vec![5]),
            (Filter { kinds: vec!["' OR 1=1 --".into()], ..any() }, vec![]),
        ] {
            assert_eq!(listed(&mut store, &filter, &ALL).await.0, ids, "{filter:?}");
        }
    }

    #[tokio::test]
    async fn pages_end_and_are_counted() {
        let mut store = store().await;
        let page = |current, size| PageRequest { current, size, ..ALL };
        let all = Filter::default();
        assert_eq!(listed(&mut store, &all, &page(1, 2)).await, (vec![1, 2], true, None));
        assert_eq!(listed(&mut store, &all, &page(3, 2)).await, (vec![5], false, None));
        assert_eq!(listed(&mut store, &all, &page(1, 5)).await, (vec![1, 2, 3, 4, 5], false, None));
        assert_eq!(listed(&mut store, &all, &page(4, 2)).await, (vec![], false, None));
        assert_eq!(listed(&mut store, &all, &page(u32::MAX, 2000)).await, (vec![], false, None));
        let counted = PageRequest { with_total_pages: true, ..page(1, 1) };
        let device = Filter { source: Some(7), ..all };
        assert_eq!(listed(&mut store, &device, &counted).await, (vec![2], true, Some(4)));
    }

    #[tokio::test]
    async fn the_bytes_of_a_page_are_limited() {
        let mut store = store().await;
        let bytes = ROWS[..5].iter().map(|row| row.4.len()).sum::<usize>();
        assert!(list::<Measurement>(&mut store, "a", &Filter::default(), &ALL, bytes).await.is_ok());
        let refused = list::<Measurement>(&mut store, "a", &Filter::default(), &ALL, bytes - 1).await;
        assert!(matches!(refused, Err(ListError::TooLarge { .. })));
        let still_usable =
            list::<Measurement>(&mut store, "a", &Filter::default(), &PageRequest { size: 1, ..ALL }, MAX_BYTES).await;
        assert_eq!(still_usable.unwrap().objects.len(), 1);
    }

    #[tokio::test]
    async fn what_is_left_of_a_managed_object_that_is_gone_is_not_seen() {
        let mut store = store().await;
        sqlx::raw_sql("INSERT INTO managed_object VALUES (7, 'a', NULL, 0, 0, x''); DELETE FROM managed_object")
            .execute(&mut store)
            .await
            .unwrap();
        assert_eq!(listed(&mut store, &Filter::default(), &ALL).await.0, [3]);
        assert_eq!(get::<Measurement>(&mut store, "a", 1).await.unwrap(), None);
        assert_eq!(count::<Measurement>(&mut store, "a", &Filter::default()).await.unwrap(), 1);
    }

    #[tokio::test]
    async fn ids_come_in_chunks() {
        let mut store = store().await;
        let of_7 = Filter { source: Some(7), ..Filter::default() };
        let some = some_ids::<Measurement>(&mut store, "a", &of_7, 5, 2).await.unwrap();
        assert_eq!(some.len(), 2);
        assert!(some.iter().all(|id| [1, 2, 4].contains(id)), "{some:?}");
        let next = ids_after::<Measurement>(&mut store, "a", &of_7, (1, 5), 9).await.unwrap();
        assert_eq!(next, [(2, 7), (4, 7)]);
        let ids = async |store: &mut SqliteConnection, max_bytes| -> Vec<u64> {
            let those = those_of::<Measurement>(store, "a", &of_7, &[1, 3, 4, 5], max_bytes).await.unwrap();
            those.iter().map(|one| one.id).collect()
        };
        assert_eq!(ids(&mut store, MAX_BYTES).await, [1, 4, 5]);
        assert_eq!(ids(&mut store, 1).await, [1], "at least one");
    }

    /// No list sorts more than its page, and none looks at another device's rows.
    #[tokio::test]
    async fn lists_take_the_index_that_helps() {
        async fn plan<T: Stored>(store: &mut SqliteConnection, filter: &Filter) -> String {
            let mut sql = QueryBuilder::new("EXPLAIN QUERY PLAN SELECT id");
            filter.push_where::<T>("a", &mut sql);
            sql.push(filter.order::<T>()).push(" LIMIT 6");
            let rows = sql.build().fetch_all(store).await.unwrap();
            let steps: Vec<String> = rows.iter().map(|row| row.try_get("detail").unwrap()).collect();
            steps.join("; ")
        }
        let mut store = store().await;
        let any = Filter::default;
        let of_device = Filter { source: Some(7), ..any() };
        let range = Filter { time: Range { from_ms: Some(1), to_ms: Some(2) }, ..any() };
        let both = Filter { source: Some(7), ..range.clone() };
        for filter in [&of_device, &Filter { revert: true, ..both.clone() }] {
            let plan = plan::<Measurement>(&mut store, filter).await;
            let access = if filter.revert { "(source=? AND time>? AND time<?)" } else { "(source=?)" };
            let (merged, found) =
                plan.split_once("SCAN measurement_recent; USE TEMP B-TREE FOR ORDER BY; ").expect(&plan);
            assert!(merged.contains(&format!("SEARCH measurement_by_source USING PRIMARY KEY {access}")), "{plan}");
            assert!(
                found.contains("SEARCH measurement USING INTEGER PRIMARY KEY") && !found.contains("TEMP"),
                "{plan}"
            );
        }
        for (plan, access) in [
            (plan::<Measurement>(&mut store, &any()).await, "SCAN measurement"),
            (plan::<Measurement>(&mut store, &range).await, "measurement_tenant_time (tenant=? AND time>? AND time<?)"),
            (plan::<Event>(&mut store, &any()).await, "event_tenant_time (tenant=?)"),
            (plan::<Event>(&mut store, &of_device).await, "event_source_time (source=?)"),
            (plan::<Alarm>(&mut store, &any()).await, "alarm_tenant_time (tenant=?)"),
            (plan::<Alarm>(&mut store, &both).await, "alarm_source_time (source=? AND time>? AND time<?)"),
            (plan::<Operation>(&mut store, &any()).await, "SCAN operation"),
            (plan::<Operation>(&mut store, &of_device).await, "operation_source (source=?)"),
        ] {
            assert!(plan.contains(access) && !plan.contains("TEMP B-TREE"), "{access}: {plan}");
        }
    }

    fn query<'a>(pairs: &[(&'a str, &'a str)]) -> Vec<(Cow<'a, str>, Cow<'a, str>)> {
        pairs.iter().map(|(name, value)| (Cow::Borrowed(*name), Cow::Borrowed(*value))).collect()
    }

    #[test]
    fn several_words_are_separated_by_commas() {
        let words = |text| words_parameter(&query(&[("status", text)]), "status", &["A", "B"]);
        assert_eq!(words("A").unwrap(), ["A".into()]);
        assert_eq!(words("B,A").unwrap(), ["B".into(), "A".into()]);
        for (text, refusal) in [
            ("", "status: must not be empty"),
            ("A,", "status: holds an empty value"),
            ("a", "status: must be one of A, B"),
        ] {
            assert_eq!(words(text).unwrap_err().to_string(), refusal);
        }
    }

    #[test]
    fn a_misspelt_filter_is_not_no_filter() {
        assert!(only_known(&query(&[("type", "t")]), &["source", "type"]).is_ok());
        let refused = only_known(&query(&[("source", "1"), ("typ", "t")]), &["source", "type"]).unwrap_err();
        assert_eq!(refused.to_string(), "typ: is not a parameter of this request; known: source, type");
    }
}
