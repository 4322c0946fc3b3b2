//! JSON text without trees: the members of an object as slices of the body they came in, and text on one line.
//!
//! A body is parsed once, its values stay raw text. What a room needs from a value it reads with [`string`], [`number`] and
//! [`boolean`]; what it passes on it copies with [`one_line`].

use std::borrow::Cow;
use std::collections::HashSet;

use memchr::{memchr, memchr2};
use serde::de::IgnoredAny;

/// What is wrong with a client's input and where; safe to show to the client.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}{}{reason}", if field.is_empty() { "" } else { ": " })]
pub struct Invalid {
    /// Path of the member or name of the parameter, as `measurements[3].source.id`; empty where the text as a whole is wrong.
    pub field: String,
    /// The reason, as `must be a string`.
    pub reason: String,
}

impl Invalid {
    /// Longest part of a client's name that is echoed, in bytes.
    const MAX_ECHO: usize = 128;

    /// An error of `field`, a long one cut.
    #[must_use]
    pub fn new(field: &str, reason: impl Into<String>) -> Self {
        Self { field: shortened(field).into_owned(), reason: reason.into() }
    }

    /// The same error seen from the object or array that holds the field: `id` within `source` is `source.id`.
    #[must_use]
    pub fn within(mut self, parent: &str) -> Self {
        let dot = if self.field.is_empty() { "" } else { "." };
        self.field = format!("{}{dot}{}", shortened(parent), self.field);
        self
    }
}

fn shortened(name: &str) -> Cow<'_, str> {
    if name.len() <= Invalid::MAX_ECHO {
        return Cow::Borrowed(name);
    }
    Cow::Owned(format!("{}…", &name[..name.floor_char_boundary(Invalid::MAX_ECHO)]))
}

/// How large the structure of a body may be; its bytes are limited by whoever receives it.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Objects and arrays within each other, the outermost included.
    pub depth: usize,
    /// Members of a top-level object, or of one element of a bulk request.
    pub members: usize,
    /// Elements of the array of a bulk request.
    pub elements: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { depth: 64, members: 1000, elements: 10_000 }
    }
}

/// One member of an object.
#[derive(Clone, Debug)]
pub struct Member<'a> {
    /// The name, its escapes resolved.
    pub name: Cow<'a, str>,
    /// The text of the value as the client wrote it, without whitespace around it.
    pub raw: &'a str,
}

/// The members of one JSON object, in the client's order, each name once.
#[derive(Debug)]
pub struct Members<'a>(Vec<Member<'a>>);

impl<'a> Members<'a> {
    /// Parses a body that is UTF-8 and one JSON object with nothing behind it.
    ///
    /// # Errors
    /// Syntax errors with line and column, halves of surrogate pairs, names that occur twice, and what passes a limit.
    pub fn parse(body: &'a [u8], limits: &Limits) -> Result<Self, Invalid> {
        let text = std::str::from_utf8(body)
            .map_err(|error| Invalid::new("", format!("invalid UTF-8 after byte {}", error.valid_up_to())))?;
        // Before the parser, whose error would echo the whole text of another kind of value.
        Cursor::open(text, b'{')?;
        serde_json::from_str::<IgnoredAny>(text).map_err(|error| Invalid::new("", error.to_string()))?;
        check_nesting_and_strings(text, limits.depth)?;
        Self::of(text, limits)
    }

    /// The members of an object inside text that [`Members::parse`] has already accepted.
    ///
    /// # Errors
    /// When it is no object, and as [`Members::parse`] for names and limits.
    pub fn of(object: &'a str, limits: &Limits) -> Result<Self, Invalid> {
        let mut members = Vec::with_capacity(8);
        each_member(object, |name, raw| {
            if members.len() == limits.members {
                return Err(Invalid::new("", format!("has more than {} members", limits.members)));
            }
            members.push(Member { name, raw });
            Ok(())
        })?;
        match first_duplicate(&members) {
            Some(name) => Err(Invalid::new(name, "occurs twice")),
            None => Ok(Self(members)),
        }
    }

    /// The raw value of a member; JSON null counts as absent.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&'a str> {
        let member = self.0.iter().find(|member| member.name == name)?;
        (!is_null(member.raw)).then_some(member.raw)
    }

    /// The members whose names are none of `names`.
    #[must_use]
    pub fn without(&self, names: &[&str]) -> Self {
        Self(self.0.iter().filter(|member| !names.contains(&&*member.name)).cloned().collect())
    }

    /// Refuses members of other names.
    ///
    /// # Errors
    /// That names the first of them.
    pub fn only(&self, names: &[&str]) -> Result<(), Invalid> {
        match self.0.iter().find(|member| !names.contains(&&*member.name)) {
            Some(unknown) => Err(Invalid::new(&unknown.name, "is not a known member of it")),
            None => Ok(()),
        }
    }

    /// All members in order.
    pub fn iter(&self) -> std::slice::Iter<'_, Member<'a>> {
        self.0.iter()
    }
}

impl<'m, 'a> IntoIterator for &'m Members<'a> {
    type Item = &'m Member<'a>;
    type IntoIter = std::slice::Iter<'m, Member<'a>>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

/// Few names are compared with each other; many go through a set, lest a hostile body cost quadratic time.
fn first_duplicate<'m>(members: &'m [Member<'_>]) -> Option<&'m str> {
    const FEW: usize = 16;
    let names = || members.iter().map(|member| &*member.name);
    if members.len() <= FEW {
        return names().enumerate().find_map(|(at, name)| names().take(at).any(|other| other == name).then_some(name));
    }
    let mut seen = HashSet::with_capacity(members.len());
    names().find(|name| !seen.insert(*name))
}

/// Calls `each` with the name and the raw value of every member of `object`, in order.
///
/// The text must lie within a body that [`Members::parse`] has accepted: its syntax is not checked again.
///
/// # Errors
/// The first error of `each`, or that the text is no object.
pub fn each_member<'a>(
    object: &'a str,
    mut each: impl FnMut(Cow<'a, str>, &'a str) -> Result<(), Invalid>,
) -> Result<(), Invalid> {
    let mut cursor = Cursor::open(object, b'{')?;
    while cursor.peek() == Some(b'"') {
        let name = string(cursor.value(), "")?;
        cursor.skip(b':');
        each(name, cursor.value())?;
        cursor.skip(b',');
    }
    Ok(())
}

/// Calls `each` with the raw text of every element of `array`, in order; otherwise as [`each_member`].
///
/// # Errors
/// The first error of `each`, or that the text is no array.
pub fn each_element<'a>(array: &'a str, mut each: impl FnMut(&'a str) -> Result<(), Invalid>) -> Result<(), Invalid> {
    let mut cursor = Cursor::open(array, b'[')?;
    while cursor.peek().is_some_and(|next| next != b']') {
        each(cursor.value())?;
        cursor.skip(b',');
    }
    Ok(())
}

/// A walk through valid text, which needs no more than the ends of values. On other text it ends somewhere.
struct Cursor<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Cursor<'a> {
    /// Steps into an object or array.
    fn open(text: &'a str, bracket: u8) -> Result<Self, Invalid> {
        let mut cursor = Self { text, at: 0 };
        if cursor.skip(bracket) {
            return Ok(cursor);
        }
        let wanted = if bracket == b'[' { "array" } else { "object" };
        Err(Invalid::new("", format!("must be a JSON {wanted}")))
    }

    /// The first byte of the next token.
    fn peek(&mut self) -> Option<u8> {
        let rest = &self.text.as_bytes()[self.at..];
        let blank = rest.iter().position(|byte| !is_blank(*byte)).unwrap_or(rest.len());
        self.at += blank;
        rest.get(blank).copied()
    }

    fn skip(&mut self, token: u8) -> bool {
        let found = self.peek() == Some(token);
        self.at += usize::from(found);
        found
    }

    /// The next value, which may be the name of a member.
    fn value(&mut self) -> &'a str {
        let first = self.peek();
        let rest = &self.text[self.at..];
        let len = match first {
            Some(b'"') => literal_len(rest.as_bytes()),
            Some(b'{' | b'[') => container_len(rest.as_bytes()),
            Some(_) => scalar_len(rest.as_bytes()),
            None => 0,
        };
        self.at += len;
        &rest[..len]
    }
}

/// Length of the string literal at the start of the text, both quotes included.
fn literal_len(bytes: &[u8]) -> usize {
    let mut at = 1;
    while let Some(found) = bytes.get(at..).and_then(|rest| memchr2(b'"', b'\\', rest)) {
        at += found;
        if bytes[at] == b'"' {
            return at + 1;
        }
        at += 2;
    }
    bytes.len()
}

/// Length of the object or array at the start of the text.
fn container_len(bytes: &[u8]) -> usize {
    let mut depth = 0;
    for (at, token) in structure(bytes) {
        match token {
            b'{' | b'[' => depth += 1,
            b'}' | b']' if depth == 1 => return at + 1,
            b'}' | b']' => depth -= 1,
            _ => {}
        }
    }
    bytes.len()
}

/// Length of the number, boolean or null at the start of the text; at least 1, so that every walk ends.
fn scalar_len(bytes: &[u8]) -> usize {
    let ends = |byte: &u8| matches!(byte, b',' | b'}' | b']') || is_blank(*byte);
    bytes.iter().position(ends).unwrap_or(bytes.len()).max(1)
}

/// The brackets of the text and the opening quotes of its literals, each with its place.
fn structure(bytes: &[u8]) -> impl Iterator<Item = (usize, u8)> {
    let mut next = 0;
    std::iter::from_fn(move || {
        let is_token = |byte: &u8| matches!(byte, b'"' | b'{' | b'}' | b'[' | b']');
        let at = next + bytes[next..].iter().position(is_token)?;
        next = match bytes[at] {
            b'"' => at + literal_len(&bytes[at..]),
            _ => at + 1,
        };
        Some((at, bytes[at]))
    })
}

fn is_blank(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\n' | b'\r')
}

/// The parser skips values without a limit of depth or a look at surrogates; consumers and plugins would stumble over them.
fn check_nesting_and_strings(text: &str, max_depth: usize) -> Result<(), Invalid> {
    let bytes = text.as_bytes();
    let openings = bytes.iter().filter(|byte| matches!(byte, b'{' | b'[')).count();
    if openings <= max_depth && memchr(b'\\', bytes).is_none() {
        return Ok(());
    }
    let mut depth = 0;
    for (at, token) in structure(bytes) {
        match token {
            b'{' | b'[' if depth == max_depth => {
                return Err(Invalid::new("", format!("nested deeper than {max_depth} levels")));
            }
            b'{' | b'[' => depth += 1,
            b'}' | b']' => depth -= 1,
            _ => check_escapes(&text[at..at + literal_len(&bytes[at..])])?,
        }
    }
    Ok(())
}

fn check_escapes(literal: &str) -> Result<(), Invalid> {
    // In accepted syntax only half of a surrogate pair keeps a literal from being decoded.
    if memchr(b'\\', literal.as_bytes()).is_some() && serde_json::from_str::<String>(literal).is_err() {
        return Err(Invalid::new("", "a string holds half of a surrogate pair"));
    }
    Ok(())
}

/// Whether the raw value is JSON null.
#[must_use]
pub fn is_null(raw: &str) -> bool {
    raw == "null"
}

/// Reads a raw value as a string.
///
/// # Errors
/// When it is something else; the error names `field`.
pub fn string<'a>(raw: &'a str, field: &str) -> Result<Cow<'a, str>, Invalid> {
    let inner = raw.strip_prefix('"').and_then(|rest| rest.strip_suffix('"'));
    match inner {
        Some(inner) if memchr(b'\\', inner.as_bytes()).is_none() => Ok(Cow::Borrowed(inner)),
        Some(_) => serde_json::from_str(raw).map(Cow::Owned).map_err(|_| Invalid::new(field, "must be a valid string")),
        None => Err(Invalid::new(field, "must be a string")),
    }
}

/// Reads a raw value as a number that a double can hold.
///
/// # Errors
/// When it is something else or out of range; the error names `field`.
pub fn number(raw: &str, field: &str) -> Result<f64, Invalid> {
    if !raw.starts_with(|first: char| first == '-' || first.is_ascii_digit()) {
        return Err(Invalid::new(field, "must be a number"));
    }
    match raw.parse::<f64>() {
        Ok(number) if number.is_finite() => Ok(number),
        _ => Err(Invalid::new(field, "is out of range")),
    }
}

/// Reads a raw value as a boolean.
///
/// # Errors
/// When it is something else; the error names `field`.
pub fn boolean(raw: &str, field: &str) -> Result<bool, Invalid> {
    match raw {
        "true" => Ok(true),
        "false" => Ok(false),
        _ => Err(Invalid::new(field, "must be true or false")),
    }
}

/// Appends valid JSON text to `out` on one line.
///
/// Whitespace between tokens goes, and the characters at which clients that split a frame into lines would break a string
/// (U+007F to U+009F, U+2028, U+2029) become `\u` escapes. Numbers, order and existing escapes stay as they are.
pub fn one_line(raw: &str, out: &mut Vec<u8>) {
    let bytes = raw.as_bytes();
    let may_break = bytes.iter().any(|byte| *byte >= 0x7f);
    let (mut copied, mut at) = (0, 0);
    while let Some(found) = bytes[at..].iter().position(|byte| *byte == b'"' || is_blank(*byte)) {
        at += found;
        let end = match bytes[at] {
            b'"' => at + literal_len(&bytes[at..]),
            _ => at + 1,
        };
        if is_blank(bytes[at]) {
            out.extend_from_slice(&bytes[copied..at]);
            copied = end;
        } else if may_break {
            out.extend_from_slice(&bytes[copied..at]);
            push_without_line_breaks(&raw[at..end], out);
            copied = end;
        }
        at = end;
    }
    out.extend_from_slice(&bytes[copied..]);
}

fn push_without_line_breaks(literal: &str, out: &mut Vec<u8>) {
    let mut copied = 0;
    for (at, char) in literal.char_indices().filter(|(_, char)| breaks_lines(*char)) {
        out.extend_from_slice(&literal.as_bytes()[copied..at]);
        push_unicode_escape(char, out);
        copied = at + char.len_utf8();
    }
    out.extend_from_slice(&literal.as_bytes()[copied..]);
}

/// Appends a JSON string literal of `text`, escaped as [`one_line`] does.
pub fn write_string(text: &str, out: &mut Vec<u8>) {
    out.push(b'"');
    write_escaped(text, out);
    out.push(b'"');
}

/// Appends `text` as it stands between the quotes of a literal, for literals made of several parts.
pub fn write_escaped(text: &str, out: &mut Vec<u8>) {
    let needs_escape = |byte: u8| !(0x20..0x7f).contains(&byte) || matches!(byte, b'"' | b'\\');
    if !text.bytes().any(needs_escape) {
        out.extend_from_slice(text.as_bytes());
        return;
    }
    for char in text.chars() {
        match char {
            '"' => out.extend_from_slice(b"\\\""),
            '\\' => out.extend_from_slice(b"\\\\"),
            '\n' => out.extend_from_slice(b"\\n"),
            '\r' => out.extend_from_slice(b"\\r"),
            '\t' => out.extend_from_slice(b"\\t"),
            _ if breaks_lines(char) => push_unicode_escape(char, out),
            _ => out.extend_from_slice(char.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
}

/// Appends `"name":value` of a raw value on one line, with a comma before it unless `out` is empty.
pub fn push_member(name: &str, raw: &str, out: &mut Vec<u8>) {
    push_name(name, out);
    one_line(raw, out);
}

/// Appends `"name":"text"`, as [`push_member`] does.
pub fn push_string_member(name: &str, text: &str, out: &mut Vec<u8>) {
    push_name(name, out);
    write_string(text, out);
}

fn push_name(name: &str, out: &mut Vec<u8>) {
    if !out.is_empty() {
        out.push(b',');
    }
    write_string(name, out);
    out.push(b':');
}

fn breaks_lines(char: char) -> bool {
    char.is_control() || matches!(char, '\u{2028}' | '\u{2029}')
}

/// All characters that break lines lie in the basic plane, so four digits are enough.
fn push_unicode_escape(char: char, out: &mut Vec<u8>) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let code = u32::from(char);
    out.extend_from_slice(b"\\u");
    out.extend([12, 8, 4, 0].map(|shift| DIGITS[((code >> shift) & 0xf) as usize]));
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    fn parse(body: &str) -> Result<Members<'_>, Invalid> {
        Members::parse(body.as_bytes(), &Limits::default())
    }

    fn refusal(body: &str) -> String {
        parse(body).unwrap_err().to_string()
    }

    fn lined(raw: &str) -> String {
        let mut out = Vec::new();
        one_line(raw, &mut out);
        String::from_utf8(out).unwrap()
    }

    fn literal(text: &str) -> String {
        let mut out = Vec::new();
        write_string(text, &mut out);
        String::from_utf8(out).unwrap()
    }

    /// Where Python's `str.splitlines` splits.
    fn splits_lines(text: &str) -> bool {
        text.contains(|c: char| {
            matches!(c, '\n' | '\r' | '\x0b' | '\x0c' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}')
        })
    }

    #[test]
    fn members_come_in_order_with_raw_values() {
        let members = parse(" {\"b\" : 1.50 , \"a\\u0062\":{ \"x\": [1, 2] },\"n\":null}\n").unwrap();
        let seen: Vec<_> = members.iter().map(|m| (&*m.name, m.raw)).collect();
        assert_eq!(seen, [("b", "1.50"), ("ab", "{ \"x\": [1, 2] }"), ("n", "null")]);
        assert_eq!(members.get("b"), Some("1.50"));
        assert_eq!((members.get("n"), members.get("z")), (None, None));
        assert!(matches!(members.0[0].name, Cow::Borrowed(_)));
    }

    #[test]
    fn broken_bodies_are_refused_with_a_place() {
        for (body, reason) in [
            ("", "must be a JSON object"),
            ("[1]", "must be a JSON object"),
            ("\"long text\"", "must be a JSON object"),
            ("{\"a\":1", "line 1 column 6"),
            ("{\"a\":1}x", "trailing characters at line 1 column 8"),
            ("{\"a\":1}{}", "trailing characters"),
            ("{\"a\":\n01}", "line 2 column 2"),
            ("{\"a\":\"\x0b\"}", "control character"),
            ("{\"a\":[{\"b\":\"\\ud800\"}]}", "half of a surrogate pair"),
            ("{\"a\":{\"\\udc00\":1}}", "half of a surrogate pair"),
            ("{\"a\":1,\"\\u0061\":2}", "a: occurs twice"),
        ] {
            let refused = refusal(body);
            assert!(refused.contains(reason), "{body:?} gave {refused:?}");
        }
        let not_utf8 = Members::parse(b"{\"a\":\"\xff\"}", &Limits::default()).unwrap_err();
        assert_eq!(not_utf8.to_string(), "invalid UTF-8 after byte 6");
    }

    #[test]
    fn surrogate_pairs_and_escaped_quotes_pass() {
        parse(r#"{"a":"\ud83d\ude00","b":"\\\"]}","c":{"\"":"\\"}}"#).unwrap();
    }

    #[test]
    fn depth_is_limited() {
        let nested = |depth: usize| format!("{{\"a\":{}{}}}", "[".repeat(depth - 1), "]".repeat(depth - 1));
        assert!(parse(&nested(64)).is_ok());
        assert_eq!(refusal(&nested(65)), "nested deeper than 64 levels");
        assert_eq!(refusal(&nested(100_000)), "nested deeper than 64 levels");
        let flat = format!("{{\"a\":[{}[]],\"b\":\"{}\"}}", "[],".repeat(99), "[".repeat(99));
        assert!(parse(&flat).is_ok(), "many brackets are not depth");
    }

    #[test]
    fn the_number_of_members_is_limited() {
        let wide = |count: usize| {
            let members: Vec<_> = (0..count).map(|n| format!("\"m{n}\":{n}")).collect();
            format!("{{{}}}", members.join(","))
        };
        assert!(parse(&wide(1000)).is_ok());
        assert_eq!(refusal(&wide(1001)), "has more than 1000 members");
        let twice = wide(100).replace("\"m99\"", "\"m7\"");
        assert_eq!(refusal(&twice), "m7: occurs twice");
    }

    #[test]
    fn long_names_are_cut_in_errors() {
        let name = "ä".repeat(5000);
        let refused = refusal(&format!("{{\"{name}\":1,\"{name}\":2}}"));
        assert!(refused.len() < 200 && refused.ends_with("…: occurs twice"), "{refused}");
    }

    #[test]
    fn the_path_grows_from_the_inside() {
        let inner = Invalid::new("value", "is missing").within("T").within("c8y_Temp");
        assert_eq!(inner.to_string(), "c8y_Temp.T.value: is missing");
        assert_eq!(Invalid::new("", "is wrong").within("a[3]").to_string(), "a[3]: is wrong");
    }

    #[test]
    fn elements_come_in_order_and_stop_at_an_error() {
        let mut seen = Vec::new();
        each_element(" [1, {\"a\":2},[ ]]", |raw| {
            seen.push(raw);
            Ok(())
        })
        .unwrap();
        assert_eq!(seen, ["1", "{\"a\":2}", "[ ]"]);
        let stopped = each_element("[1,2]", |raw| Err(Invalid::new("at", raw))).unwrap_err();
        assert_eq!(stopped.to_string(), "at: 1");
        assert_eq!(each_element("{}", |_| Ok(())).unwrap_err().to_string(), "must be a JSON array");
    }

    #[test]
    fn values_are_read_by_kind() {
        assert_eq!(string(r#""plain""#, "f").unwrap(), "plain");
        assert_eq!(string(r#""a\nb\"""#, "f").unwrap(), "a\nb\"");
        assert_eq!(string("\"\"", "f").unwrap(), "");
        assert_eq!(number("-1.5e3", "f").unwrap(), -1500.0);
        assert!(boolean("true", "f").unwrap() && !boolean("false", "f").unwrap());
        for (refused, text) in [
            (string("1", "source.id").unwrap_err(), "source.id: must be a string"),
            (string(r#""\ud800""#, "f").unwrap_err(), "f: must be a valid string"),
            (number("\"1\"", "f").unwrap_err(), "f: must be a number"),
            (number("null", "f").unwrap_err(), "f: must be a number"),
            (number("1e999", "f").unwrap_err(), "f: is out of range"),
            (boolean("1", "f").unwrap_err(), "f: must be true or false"),
        ] {
            assert_eq!(refused.to_string(), text);
        }
    }

    #[test]
    fn one_line_keeps_text_and_drops_layout() {
        for (raw, line) in [
            ("{ \"a\" :\r\n\t[ 1.50 , -0e+1,true ] }", "{\"a\":[1.50,-0e+1,true]}"),
            ("\" two  spaces \"", "\" two  spaces \""),
            (r#"{"a\" b":"\\" , "c":"\u2028\/"}"#, r#"{"a\" b":"\\","c":"\u2028\/"}"#),
            ("\"a\u{2028}b\u{2029}\u{85}\u{7f}é😀\"", "\"a\\u2028b\\u2029\\u0085\\u007fé😀\""),
            ("null", "null"),
        ] {
            assert_eq!(lined(raw), line);
        }
    }

    #[test]
    fn members_are_joined_with_commas() {
        let mut out = Vec::new();
        push_member("a", "{ }", &mut out);
        push_member("b\"", "[1, 2]", &mut out);
        push_string_member("c", "1\\", &mut out);
        assert_eq!(out, br#""a":{},"b\"":[1,2],"c":"1\\"#.iter().chain(b"\"").copied().collect::<Vec<_>>());
    }

    /// JSON text of any shape, with any layout and any escape.
    fn json_text() -> impl Strategy<Value = String> {
        let blank = "[ \t\r\n]{0,3}";
        let text = prop_oneof![
            any::<String>().prop_map(|s| serde_json::to_string(&s).unwrap()),
            Just("\"\u{2028}\u{85}\\\"\u{2029}\\\\\"".to_owned()),
            Just("\"\\u2028\\ud83d\\ude00\u{9f}\u{7f}\"".to_owned()),
        ];
        let leaf = prop_oneof![
            text.clone(),
            any::<i64>().prop_map(|n| n.to_string()),
            Just("-1.50e+02".to_owned()),
            Just("null".to_owned()),
            Just("true".to_owned())
        ];
        leaf.prop_recursive(4, 32, 5, move |inner| {
            let item = (blank, inner.clone(), blank).prop_map(|(a, v, b)| a + &v + &b);
            let member = (blank, text.clone(), blank, item.clone()).prop_map(|(a, k, b, v)| a + &k + &b + ":" + &v);
            prop_oneof![
                prop::collection::vec(item, 1..5).prop_map(|items| format!("[{}]", items.join(","))),
                prop::collection::vec(member, 1..5).prop_map(|members| format!("{{{}}}", members.join(","))),
            ]
        })
    }

    /// The tree of a text by walks alone.
    fn walked(raw: &str) -> Value {
        match raw.trim_start().as_bytes()[0] {
            b'{' => {
                let mut members = serde_json::Map::new();
                each_member(raw, |name, raw| {
                    members.insert(name.into_owned(), walked(raw));
                    Ok(())
                })
                .unwrap();
                Value::Object(members)
            }
            b'[' => {
                let mut elements = Vec::new();
                each_element(raw, |raw| {
                    elements.push(walked(raw));
                    Ok(())
                })
                .unwrap();
                Value::Array(elements)
            }
            _ => serde_json::from_str(raw).unwrap(),
        }
    }

    proptest! {
        #[test]
        fn one_line_changes_nothing_but_the_text(raw in json_text()) {
            let line = lined(&raw);
            prop_assert_eq!(serde_json::from_str::<Value>(&line).unwrap(), serde_json::from_str::<Value>(&raw).unwrap());
            prop_assert!(!splits_lines(&line), "{}", line);
            prop_assert_eq!(lined(&line), line);
        }

        #[test]
        fn written_strings_are_read_back_on_one_line(text in any::<String>()) {
            let written = literal(&text);
            prop_assert_eq!(serde_json::from_str::<String>(&written).unwrap(), text);
            prop_assert!(!splits_lines(&written));
            prop_assert_eq!(lined(&written), written);
        }

        #[test]
        fn any_bytes_are_parsed_or_refused(body in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ = Members::parse(&body, &Limits::default());
        }

        #[test]
        fn the_walk_sees_what_the_parser_sees(raw in json_text()) {
            prop_assert_eq!(walked(&raw), serde_json::from_str::<Value>(&raw).unwrap());
        }

        #[test]
        fn a_walk_through_anything_ends(text in "[\\[\\]{}:,\" \\\\1aé]{0,24}") {
            let _ = each_member(&text, |_, _| Ok(()));
            let _ = each_element(&text, |_| Ok(()));
        }

        #[test]
        fn members_agree_with_a_tree(raw in json_text()) {
            let tree = serde_json::from_str::<Value>(&raw).unwrap();
            if let (Ok(members), Value::Object(tree)) = (parse(&raw), tree) {
                prop_assert_eq!(members.iter().count(), tree.len());
                for member in &members {
                    prop_assert_eq!(&serde_json::from_str::<Value>(member.raw).unwrap(), &tree[&*member.name]);
                }
            }
        }
    }

    #[test]
    fn every_line_break_is_escaped_in_written_strings() {
        let breaks = "\n\r\t\x0b\x0c\x1c\x1e\u{7f}\u{85}\u{2028}\u{2029}\"\\";
        assert_eq!(literal(breaks), r#""\n\r\t\u000b\u000c\u001c\u001e\u007f\u0085\u2028\u2029\"\\""#);
    }
}
