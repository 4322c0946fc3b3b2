//! Finds the ends of JSON values without building them. Offsets count bytes from 0. Nothing recurses, so that depth
//! costs no stack.

/// The text is not JSON at `offset`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Malformed {
    pub(crate) offset: usize,
}

pub(crate) fn skip_whitespace(text: &[u8], mut at: usize) -> usize {
    while matches!(text.get(at), Some(b' ' | b'\t' | b'\n' | b'\r')) {
        at += 1;
    }
    at
}

pub(crate) fn expect(text: &[u8], offset: usize, byte: u8) -> Result<(), Malformed> {
    if text.get(offset) == Some(&byte) { Ok(()) } else { Err(Malformed { offset }) }
}

/// Holds that nothing but whitespace follows.
pub(crate) fn expect_end(text: &[u8], at: usize) -> Result<(), Malformed> {
    let offset = skip_whitespace(text, at);
    if offset == text.len() { Ok(()) } else { Err(Malformed { offset }) }
}

/// The end of the string that starts at `start`, after its closing quote.
pub(crate) fn skip_string(text: &[u8], start: usize) -> Result<usize, Malformed> {
    expect(text, start, b'"')?;
    let mut at = start + 1;
    loop {
        at = find_quote_or_backslash(text, at);
        match text.get(at) {
            Some(b'"') => return Ok(at + 1),
            Some(_) => at += 2,
            None => return Err(Malformed { offset: text.len() }),
        }
    }
}

/// The first quote or backslash from `at` on, or the end of the text. Looks at eight bytes at once, since most bytes of
/// a body stand in strings.
fn find_quote_or_backslash(text: &[u8], mut at: usize) -> usize {
    while let Some(&eight) = text.get(at..).and_then(<[u8]>::first_chunk) {
        let word = u64::from_le_bytes(eight);
        let found = zero_bytes(word ^ repeat(b'"')) | zero_bytes(word ^ repeat(b'\\'));
        if found != 0 {
            return at + (found.trailing_zeros() / 8) as usize;
        }
        at += 8;
    }
    while text.get(at).is_some_and(|byte| !matches!(byte, b'"' | b'\\')) {
        at += 1;
    }
    at
}

const fn repeat(byte: u8) -> u64 {
    u64::from_ne_bytes([byte; 8])
}

/// Sets the top bit of the lowest byte that is zero, and of none below it.
const fn zero_bytes(word: u64) -> u64 {
    word.wrapping_sub(repeat(1)) & !word & repeat(0x80)
}

/// The end of the value that starts at `start`.
pub(crate) fn skip_value(text: &[u8], start: usize) -> Result<usize, Malformed> {
    match text.get(start) {
        Some(b'"') => skip_string(text, start),
        Some(b'{' | b'[') => skip_nested(text, start),
        _ => skip_scalar(text, start),
    }
}

/// The end of the object or array that starts at `start`. Which bracket closes which is not looked at.
fn skip_nested(text: &[u8], start: usize) -> Result<usize, Malformed> {
    let mut depth = 0_usize;
    let mut at = start;
    while let Some(byte) = text.get(at) {
        match byte {
            b'"' => {
                at = skip_string(text, at)?;
                continue;
            }
            b'{' | b'[' => depth += 1,
            b'}' | b']' => {
                depth -= 1;
                if depth == 0 {
                    return Ok(at + 1);
                }
            }
            _ => {}
        }
        at += 1;
    }
    Err(Malformed { offset: text.len() })
}

/// The end of the number or literal that starts at `start`.
fn skip_scalar(text: &[u8], start: usize) -> Result<usize, Malformed> {
    let mut at = start;
    while matches!(text.get(at), Some(b'0'..=b'9' | b'a'..=b'z' | b'E' | b'-' | b'+' | b'.')) {
        at += 1;
    }
    if at == start { Err(Malformed { offset: start }) } else { Ok(at) }
}

/// The content of a string given with its quotes; nothing for one that is not valid, a lone surrogate included.
pub(crate) fn decode_string(quoted: &[u8]) -> Option<String> {
    let raw = quoted.strip_prefix(b"\"")?.strip_suffix(b"\"")?;
    let mut rest = std::str::from_utf8(raw).ok()?.chars();
    let mut decoded = String::with_capacity(raw.len());
    while let Some(character) = rest.next() {
        decoded.push(match character {
            '\\' => decode_escape(&mut rest)?,
            '"' | '\0'..'\x20' => return None,
            _ => character,
        });
    }
    Some(decoded)
}

/// Reads what stands after a backslash.
fn decode_escape(rest: &mut std::str::Chars<'_>) -> Option<char> {
    Some(match rest.next()? {
        plain @ ('"' | '\\' | '/') => plain,
        'b' => '\x08',
        'f' => '\x0c',
        'n' => '\n',
        'r' => '\r',
        't' => '\t',
        'u' => {
            let first = decode_hex(rest)?;
            let mut units = [first, 0];
            let length = if (0xD800..0xDC00).contains(&first) {
                (rest.next()? == '\\' && rest.next()? == 'u').then_some(())?;
                units[1] = decode_hex(rest)?;
                2
            } else {
                1
            };
            char::decode_utf16(units[..length].iter().copied()).next()?.ok()?
        }
        _ => return None,
    })
}

fn decode_hex(rest: &mut std::str::Chars<'_>) -> Option<u16> {
    (0..4).try_fold(0, |unit, _| {
        let digit = rest.next()?.to_digit(16)?;
        Some(unit << 4 | digit as u16)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_quote_or_backslash_is_found_anywhere() {
        for other in [0, b'!', b'#', b'[', b']', 0x80, 0xA2, 0xDC, 0xFF] {
            for length in 0..20 {
                for at in 0..=length {
                    assert_eq!(find_quote_or_backslash(&vec![other; length], at), length);
                    for wanted in [b'"', b'\\'] {
                        let mut text = vec![wanted; length];
                        text[..at].fill(other);
                        assert_eq!(find_quote_or_backslash(&text, 0), at, "{other:#x} {length}");
                    }
                }
            }
        }
    }
}
