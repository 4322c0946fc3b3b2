//! Paging: the parameters of a list request and the envelope of its answer, the same for every collection.

use std::borrow::Cow;

use form_urlencoded::Serializer;

use super::push_decimal;
use crate::json::{self, Invalid};

/// Bytes of one page of a list.
pub const MAX_BYTES: usize = 16 << 20;
/// Largest `pageSize` (Cumulocity OpenAPI).
pub const MAX_SIZE: u32 = 2000;
const DEFAULT_SIZE: u32 = 5;

/// The decoded parameters of a request, in its order.
pub type Query<'a> = [(Cow<'a, str>, Cow<'a, str>)];

/// Which page of a collection is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRequest {
    /// `currentPage`, from 1. A page past the end is empty: clients page until they get an empty array.
    pub current: u32,
    /// `pageSize`, 1 to [`MAX_SIZE`], 5 where not given.
    pub size: u32,
    /// `withTotalPages`: the answer tells how many pages there are.
    pub with_total_pages: bool,
    /// `withTotalElements`: the answer tells how many elements there are.
    pub with_total_elements: bool,
}

impl PageRequest {
    /// Reads the paging parameters; the first of several with one name counts, others are left alone.
    ///
    /// # Errors
    /// Names the parameter whose value cannot be used.
    pub fn parse(query: &Query<'_>) -> Result<Self, Invalid> {
        Ok(Self {
            current: count(query, "currentPage", u32::MAX)?.unwrap_or(1),
            size: count(query, "pageSize", MAX_SIZE)?.unwrap_or(DEFAULT_SIZE),
            with_total_pages: flag(query, "withTotalPages")?,
            with_total_elements: flag(query, "withTotalElements")?,
        })
    }

    /// The first page, without totals.
    #[must_use]
    pub fn first(size: u32) -> Self {
        Self { current: 1, size, with_total_pages: false, with_total_elements: false }
    }

    /// How many elements come before the page.
    #[must_use]
    pub fn offset(&self) -> u64 {
        u64::from(self.current - 1) * u64::from(self.size)
    }

    /// Whether the elements of the collection must be counted.
    #[must_use]
    pub fn wants_total(&self) -> bool {
        self.with_total_pages || self.with_total_elements
    }
}

/// The value of the first parameter of that name.
pub(super) fn parameter<'q>(query: &'q Query<'_>, name: &str) -> Option<&'q str> {
    query.iter().find(|(other, _)| other == name).map(|(_, value)| &**value)
}

/// A parameter that is `true` or `false`, in any case since Python clients write `True`; false where it is not given.
pub(crate) fn flag(query: &Query<'_>, name: &str) -> Result<bool, Invalid> {
    flag_or(query, name, false)
}

/// [`flag`] with another value where it is not given.
pub(super) fn flag_or(query: &Query<'_>, name: &str, default: bool) -> Result<bool, Invalid> {
    match parameter(query, name) {
        None => Ok(default),
        Some(value) if value.eq_ignore_ascii_case("true") => Ok(true),
        Some(value) if value.eq_ignore_ascii_case("false") => Ok(false),
        Some(_) => Err(Invalid::new(name, "must be true or false")),
    }
}

fn count(query: &Query<'_>, name: &str, max: u32) -> Result<Option<u32>, Invalid> {
    let refusal = || Invalid::new(name, format!("must be a number from 1 to {max}"));
    let parse = |value: &str| value.parse().ok().filter(|number| (1..=max).contains(number)).ok_or_else(refusal);
    parameter(query, name).map(parse).transpose()
}

/// The answer to a list request around its elements.
#[derive(Clone, Copy, Debug)]
pub struct Envelope<'a> {
    /// URL of the collection without a query.
    pub url: &'a str,
    /// The parameters of the request; the links repeat them.
    pub query: &'a Query<'a>,
    /// Name of the array, as `measurements`.
    pub name: &'a str,
    /// The page. Where an API always tells the total of pages, set the flag here.
    pub page: PageRequest,
    /// Whether elements follow the page; only then there is a `next`.
    pub more: bool,
    /// The number of all elements, where the page wants it.
    pub total: Option<u64>,
}

impl Envelope<'_> {
    /// Appends the collection on one line; `push` appends one element.
    pub fn render<T>(
        &self,
        elements: impl IntoIterator<Item = T>,
        mut push: impl FnMut(T, &mut Vec<u8>),
        out: &mut Vec<u8>,
    ) {
        out.push(b'{');
        self.push_link("self", self.page.current, out);
        out.push(b',');
        json::write_string(self.name, out);
        out.extend_from_slice(b":[");
        for (at, element) in elements.into_iter().enumerate() {
            if at > 0 {
                out.push(b',');
            }
            push(element, out);
        }
        out.extend_from_slice(b"],");
        self.push_statistics(out);
        if self.more {
            out.push(b',');
            self.push_link("next", self.page.current.saturating_add(1), out);
        }
        if self.page.current > 1 {
            out.push(b',');
            self.push_link("prev", self.page.current - 1, out);
        }
        out.push(b'}');
    }

    fn push_statistics(&self, out: &mut Vec<u8>) {
        let size = u64::from(self.page.size);
        let total_pages = self.total.filter(|_| self.page.with_total_pages).map(|total| total.div_ceil(size));
        let total_elements = self.total.filter(|_| self.page.with_total_elements);
        out.extend_from_slice(b"\"statistics\":{\"currentPage\":");
        push_decimal(self.page.current.into(), out);
        let rest = [("pageSize", Some(size)), ("totalPages", total_pages), ("totalElements", total_elements)];
        for (name, number) in rest.into_iter().filter_map(|(name, number)| Some((name, number?))) {
            out.push(b',');
            json::write_string(name, out);
            out.push(b':');
            push_decimal(number, out);
        }
        out.push(b'}');
    }

    fn push_link(&self, name: &str, page: u32, out: &mut Vec<u8>) {
        let others = self.query.iter().filter(|(name, _)| !matches!(&**name, "pageSize" | "currentPage"));
        let mut link = Serializer::for_suffix(format!("{}?", self.url), self.url.len() + 1);
        link.extend_pairs(others);
        link.append_pair("pageSize", &self.page.size.to_string());
        link.append_pair("currentPage", &page.to_string());
        json::write_string(name, out);
        out.push(b':');
        json::write_string(&link.finish(), out);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    fn query<'a>(pairs: &[(&'a str, &'a str)]) -> Vec<(Cow<'a, str>, Cow<'a, str>)> {
        pairs.iter().map(|(name, value)| (Cow::Borrowed(*name), Cow::Borrowed(*value))).collect()
    }

    fn parse(pairs: &[(&str, &str)]) -> Result<PageRequest, Invalid> {
        PageRequest::parse(&query(pairs))
    }

    fn rendered(pairs: &[(&str, &str)], more: bool, total: Option<u64>) -> String {
        let (query, page) = (query(pairs), parse(pairs).unwrap());
        let url = "http://gate/measurement/measurements";
        let envelope = Envelope { url, query: &query, name: "measurements", page, more, total };
        let mut out = Vec::new();
        envelope.render([1, 2], push_decimal, &mut out);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn defaults_are_the_platforms() {
        let page = parse(&[("other", "x")]).unwrap();
        assert_eq!((page.current, page.size, page.offset(), page.wants_total()), (1, 5, 0, false));
    }

    #[test]
    fn the_first_of_several_counts() {
        let page =
            parse(&[("currentPage", "3"), ("pageSize", "2000"), ("currentPage", "x"), ("withTotalPages", "True")]);
        let page = page.unwrap();
        assert_eq!((page.current, page.size, page.offset(), page.with_total_pages), (3, 2000, 4000, true));
    }

    #[test]
    fn bad_values_are_refused_by_name() {
        for (name, value, text) in [
            ("pageSize", "0", "pageSize: must be a number from 1 to 2000"),
            ("pageSize", "2001", "pageSize: must be a number from 1 to 2000"),
            ("pageSize", "", "pageSize: must be a number from 1 to 2000"),
            ("currentPage", "0", "currentPage: must be a number from 1 to 4294967295"),
            ("currentPage", "-1", "currentPage: must be a number from 1 to 4294967295"),
            ("withTotalPages", "yes", "withTotalPages: must be true or false"),
            ("withTotalElements", "1", "withTotalElements: must be true or false"),
        ] {
            assert_eq!(parse(&[(name, value)]).unwrap_err().to_string(), text);
        }
    }

    #[test]
    fn a_last_page_has_no_next() {
        assert_eq!(
            rendered(&[], false, Some(2)),
            "{\"self\":\"http://gate/measurement/measurements?pageSize=5&currentPage=1\",\"measurements\":[1,2],\
             \"statistics\":{\"currentPage\":1,\"pageSize\":5}}"
        );
    }

    #[test]
    fn links_repeat_the_parameters() {
        let pairs =
            [("type", "a b&\"é"), ("currentPage", "2"), ("dateFrom", "2021-09-03T12:00:00+02:00"), ("pageSize", "2")];
        let text = rendered(&pairs, true, None);
        let parsed: serde_json::Value = serde_json::from_str(&text).unwrap();
        let link = |page| {
            format!(
                "http://gate/measurement/measurements?type=a+b%26%22%C3%A9&dateFrom=2021-09-03T12%3A00%3A00%2B02%3A00\
                 &pageSize=2&currentPage={page}"
            )
        };
        for (name, page) in [("self", 2), ("next", 3), ("prev", 1)] {
            assert_eq!(parsed[name], link(page));
        }
    }

    #[test]
    fn totals_come_when_asked_for() {
        for (total, pages) in [(0, 0), (1, 1), (4, 1), (5, 2)] {
            let text = rendered(&[("pageSize", "4"), ("withTotalPages", "true")], false, Some(total));
            assert!(text.contains(&format!("\"pageSize\":4,\"totalPages\":{pages}}}")), "{text}");
        }
        let text = rendered(&[("withTotalElements", "true")], false, Some(7));
        assert!(text.contains("\"pageSize\":5,\"totalElements\":7}"), "{text}");
    }
}
