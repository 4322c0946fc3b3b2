//! The query language of the inventory, a small part of the platform's (Cumulocity OpenAPI, "Query language"):
//!
//! ```text
//! query  = ["$filter="] [or] ["$orderby=" "id" ["asc" | "desc"]]
//! or     = and {"or" and}
//! and    = unary {"and" unary}
//! unary  = "not" unary | "(" or ")" | "has" "(" word ")" | ("id" | "name" | "type" | "owner") "eq" value
//! value  = "'" text "'" | word
//! ```
//! A quote within a text is doubled; `*` stands for any characters, also for none. Everything else is refused, with its place.

use crate::json::Invalid;

/// Longest query, in bytes.
const MAX_BYTES: usize = 8192;
/// Most comparisons in a query.
const MAX_TERMS: usize = 100;
/// Deepest nesting of parentheses and negations.
const MAX_DEPTH: usize = 32;
/// The parameter, for errors.
const PARAMETER: &str = "query";

/// A query as a whole.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Query {
    /// What objects must fulfil; `None` for all of them.
    pub filter: Option<Expression>,
    /// The highest ids first.
    pub descending: bool,
}

/// What an object fulfils or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expression {
    /// All of these.
    And(Vec<Expression>),
    /// One of these.
    Or(Vec<Expression>),
    /// Not this.
    Not(Box<Expression>),
    /// A property matches; one that an object does not have never does.
    Equals(Property, Pattern),
    /// The object has a fragment of this name.
    Has(Box<str>),
}

/// A property that can be compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Property {
    /// `id`
    Id,
    /// `name`
    Name,
    /// `type`
    Type,
    /// `owner`
    Owner,
}

/// A text in which `*` stands for any characters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pattern(Box<str>);

/// What an expression asks of an object.
pub trait Subject {
    /// Whether the property is there and `matches` it.
    fn is(&self, property: Property, matches: &dyn Fn(&str) -> bool) -> bool;
    /// Whether there is a fragment of this name.
    fn has(&self, fragment: &str) -> bool;
}

impl Expression {
    /// Whether `subject` fulfils this.
    pub fn holds(&self, subject: &impl Subject) -> bool {
        match self {
            Self::And(all) => all.iter().all(|one| one.holds(subject)),
            Self::Or(any) => any.iter().any(|one| one.holds(subject)),
            Self::Not(one) => !one.holds(subject),
            Self::Equals(property, pattern) => subject.is(*property, &|text| pattern.matches(text)),
            Self::Has(fragment) => subject.has(fragment),
        }
    }
}

impl Pattern {
    /// Whether the whole of `text` matches, case-sensitively.
    #[must_use]
    pub fn matches(&self, text: &str) -> bool {
        let Some((first, rest)) = self.0.split_once('*') else { return text == &*self.0 };
        let Some(mut text) = text.strip_prefix(first) else { return false };
        let (middle, last) = rest.rsplit_once('*').unwrap_or(("", rest));
        // The first place of each part leaves most to the parts behind it.
        for part in middle.split('*') {
            let Some(at) = text.find(part) else { return false };
            text = &text[at + part.len()..];
        }
        text.ends_with(last)
    }
}

impl Query {
    /// Reads a query.
    ///
    /// # Errors
    /// What was expected and where, as `query: 'eq' is expected at character 6`.
    pub fn parse(text: &str) -> Result<Self, Invalid> {
        if text.len() > MAX_BYTES {
            return Err(Invalid::new(PARAMETER, format!("is longer than {MAX_BYTES} bytes")));
        }
        let mut parser = Parser { text, at: 0, terms: 0 };
        parser.skip("$filter=");
        let filter = if matches!(parser.peek(), None | Some('$')) { None } else { Some(parser.or(0)?) };
        let mut descending = false;
        if parser.skip("$orderby=") {
            parser.expect("id")?;
            descending = parser.skip_word("desc");
            if !descending {
                parser.skip_word("asc");
            }
        }
        match parser.peek() {
            None => Ok(Self { filter, descending }),
            Some(_) => Err(parser.expected("'and', 'or' or the end")),
        }
    }
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
    terms: usize,
}

impl<'a> Parser<'a> {
    fn or(&mut self, depth: usize) -> Result<Expression, Invalid> {
        self.chain("or", depth, Self::and, Expression::Or)
    }

    fn and(&mut self, depth: usize) -> Result<Expression, Invalid> {
        self.chain("and", depth, Self::unary, Expression::And)
    }

    fn chain(
        &mut self,
        word: &str,
        depth: usize,
        part: impl Fn(&mut Self, usize) -> Result<Expression, Invalid>,
        join: impl Fn(Vec<Expression>) -> Expression,
    ) -> Result<Expression, Invalid> {
        let first = part(self, depth)?;
        if !self.skip_word(word) {
            return Ok(first);
        }
        let mut all = vec![first, part(self, depth)?];
        while self.skip_word(word) {
            all.push(part(self, depth)?);
        }
        Ok(join(all))
    }

    fn unary(&mut self, depth: usize) -> Result<Expression, Invalid> {
        if depth == MAX_DEPTH {
            return Err(Invalid::new(PARAMETER, format!("is nested deeper than {MAX_DEPTH} levels")));
        }
        if self.skip("(") {
            let inner = self.or(depth + 1)?;
            return if self.skip(")") { Ok(inner) } else { Err(self.expected("')'")) };
        }
        if self.skip_word("not") {
            return Ok(Expression::Not(Box::new(self.unary(depth + 1)?)));
        }
        self.terms += 1;
        if self.terms > MAX_TERMS {
            return Err(Invalid::new(PARAMETER, format!("has more than {MAX_TERMS} comparisons")));
        }
        if self.skip_word("has") {
            if !self.skip("(") {
                return Err(self.expected("'('"));
            }
            let fragment = self.word().ok_or_else(|| self.expected("the name of a fragment"))?;
            return if self.skip(")") { Ok(Expression::Has(fragment.into())) } else { Err(self.expected("')'")) };
        }
        let properties =
            [("id", Property::Id), ("name", Property::Name), ("type", Property::Type), ("owner", Property::Owner)];
        let Some((_, property)) = properties.into_iter().find(|(word, _)| self.skip_word(word)) else {
            return Err(self.expected("'id', 'name', 'type', 'owner', 'has', 'not' or '('"));
        };
        self.expect("eq")?;
        Ok(Expression::Equals(property, Pattern(self.value()?.into())))
    }

    fn value(&mut self) -> Result<String, Invalid> {
        if !self.skip("'") {
            return self.word().map(str::to_owned).ok_or_else(|| self.expected("a text in quotes"));
        }
        let mut value = String::new();
        loop {
            let rest = &self.text[self.at..];
            let Some(quote) = rest.find('\'') else {
                self.at = self.text.len();
                return Err(self.expected("a closing quote"));
            };
            value.push_str(&rest[..quote]);
            self.at += quote + 1;
            if !self.text[self.at..].starts_with('\'') {
                return Ok(value);
            }
            value.push('\'');
            self.at += 1;
        }
    }

    /// The characters up to the next blank or parenthesis.
    fn word(&mut self) -> Option<&'a str> {
        self.peek();
        let rest = &self.text[self.at..];
        let end = rest.find(|char: char| char.is_whitespace() || "()'$".contains(char)).unwrap_or(rest.len());
        self.at += end;
        Some(&rest[..end]).filter(|word| !word.is_empty())
    }

    fn peek(&mut self) -> Option<char> {
        let rest = &self.text[self.at..];
        self.at += rest.len() - rest.trim_start().len();
        self.text[self.at..].chars().next()
    }

    fn skip(&mut self, token: &str) -> bool {
        self.peek();
        let found = self.text[self.at..].starts_with(token);
        self.at += if found { token.len() } else { 0 };
        found
    }

    /// Skips a word of its own, as `or` but not `order`.
    fn skip_word(&mut self, word: &str) -> bool {
        let before = self.at;
        let found = self.word() == Some(word);
        if !found {
            self.at = before;
        }
        found
    }

    fn expect(&mut self, word: &str) -> Result<(), Invalid> {
        if self.skip_word(word) { Ok(()) } else { Err(self.expected(&format!("'{word}'"))) }
    }

    fn expected(&mut self, what: &str) -> Invalid {
        self.peek();
        let place = self.text[..self.at].chars().count() + 1;
        Invalid::new(PARAMETER, format!("{what} is expected at character {place}"))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use proptest::prelude::*;

    use super::*;

    /// An object with one property and one fragment.
    struct Thing(&'static str);

    impl Subject for Thing {
        fn is(&self, property: Property, matches: &dyn Fn(&str) -> bool) -> bool {
            match property {
                Property::Id => matches("17"),
                Property::Name => matches(self.0),
                Property::Type => matches("c8y_Linux"),
                Property::Owner => false,
            }
        }

        fn has(&self, fragment: &str) -> bool {
            fragment == "c8y_IsDevice"
        }
    }

    #[test]
    fn queries_select() {
        for (query, expected) in [
            ("name eq 'pump 1'", true),
            ("$filter=name eq 'pump*'", true),
            ("$filter=(name eq '*1') $orderby=id", true),
            ("name eq '*'", true),
            ("name eq 'Pump 1'", false),
            ("name eq 'pump'", false),
            ("type eq c8y_Linux and id eq '17'", true),
            ("type eq 'c8y_Linux' and id eq 18", false),
            ("owner eq '*'", false),
            ("not owner eq 'x' and not (id eq 1 or id eq 2)", true),
            ("id eq 17 or id eq 2 and id eq 3", true),
            ("(id eq 17 or id eq 2) and id eq 3", false),
            ("has(c8y_IsDevice)", true),
            ("not has(c8y_IsDevice)", false),
            ("has( c8y_Hardware )", false),
            ("name eq 'it''s'", false),
            ("not(not(has(c8y_IsDevice)))", true),
        ] {
            let filter = Query::parse(query).unwrap().filter.unwrap();
            assert_eq!(filter.holds(&Thing("pump 1")), expected, "{query}");
        }
        assert!(Query::parse("name eq 'it''s'").unwrap().filter.unwrap().holds(&Thing("it's")));
    }

    #[test]
    fn the_order_is_that_of_ids() {
        for (query, filtered, descending) in [
            ("", false, false),
            ("$filter=", false, false),
            ("$orderby=id", false, false),
            ("$orderby=id asc", false, false),
            ("$orderby=id desc", false, true),
            ("$filter=id eq 1 $orderby=id desc", true, true),
            ("id eq 1$orderby=id desc", true, true),
        ] {
            let query = Query::parse(query).unwrap();
            assert_eq!((query.filter.is_some(), query.descending), (filtered, descending));
        }
    }

    #[test]
    fn what_is_not_understood_is_refused_with_its_place() {
        for (query, reason) in [
            ("size eq 1", "'id', 'name', 'type', 'owner', 'has', 'not' or '(' is expected at character 1"),
            ("name gt 'x'", "'eq' is expected at character 6"),
            ("name", "'eq' is expected at character 5"),
            ("name eq", "a text in quotes is expected at character 8"),
            ("ä", "'id', 'name', 'type', 'owner', 'has', 'not' or '(' is expected at character 1"),
            ("name eq 'ä", "a closing quote is expected at character 11"),
            ("(id eq 1", "')' is expected at character 9"),
            ("has c8y_IsDevice", "'(' is expected at character 5"),
            ("has()", "the name of a fragment is expected at character 5"),
            ("has(a", "')' is expected at character 6"),
            ("id eq 1 xor id eq 2", "'and', 'or' or the end is expected at character 9"),
            ("id eq 1)", "'and', 'or' or the end is expected at character 8"),
            ("$orderby=name", "'id' is expected at character 10"),
            ("$orderby=id up", "'and', 'or' or the end is expected at character 13"),
            ("bygroupid(12)", "'id', 'name', 'type', 'owner', 'has', 'not' or '(' is expected at character 1"),
        ] {
            assert_eq!(Query::parse(query).unwrap_err().to_string(), format!("query: {reason}"), "{query}");
        }
    }

    #[test]
    fn queries_are_limited() {
        let nested = |depth: usize| format!("{}id eq 1{}", "(".repeat(depth), ")".repeat(depth));
        assert!(Query::parse(&nested(MAX_DEPTH - 1)).is_ok());
        assert_eq!(Query::parse(&nested(MAX_DEPTH)).unwrap_err().to_string(), "query: is nested deeper than 32 levels");
        let deep = "not ".repeat(2000) + "id eq 1";
        assert_eq!(Query::parse(&deep).unwrap_err().to_string(), "query: is nested deeper than 32 levels");
        let wide = |terms: usize| vec!["id eq 1"; terms].join(" or ");
        assert!(Query::parse(&wide(MAX_TERMS)).is_ok());
        assert_eq!(Query::parse(&wide(MAX_TERMS + 1)).unwrap_err().to_string(), "query: has more than 100 comparisons");
        let long = format!("name eq '{}'", "x".repeat(MAX_BYTES));
        assert_eq!(Query::parse(&long).unwrap_err().to_string(), "query: is longer than 8192 bytes");
    }

    /// The meaning of `*`, spelled out.
    fn naive(pattern: &[char], text: &[char]) -> bool {
        match pattern.split_first() {
            None => text.is_empty(),
            Some(('*', rest)) => (0..=text.len()).any(|at| naive(rest, &text[at..])),
            Some((char, rest)) => text.first() == Some(char) && naive(rest, &text[1..]),
        }
    }

    proptest! {
        #[test]
        fn patterns_match_what_a_naive_matcher_matches(pattern in "[ab*é]{0,7}", text in "[abé]{0,7}") {
            let chars = |text: &str| text.chars().collect::<Vec<_>>();
            let expected = naive(&chars(&pattern), &chars(&text));
            prop_assert_eq!(Pattern(pattern.into()).matches(&text), expected);
        }

        #[test]
        fn any_text_is_parsed_or_refused(text in "[()'$a-z =é]{0,40}|(\\(|not |and |or |id eq 1|has\\(x\\)|\\)|'| ){0,12}") {
            let _ = Query::parse(&text);
        }
    }
}
