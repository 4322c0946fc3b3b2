use std::fmt;

/// The longest `typeFilter`, in characters.
pub const MAX_CHARACTERS: usize = 4096;

/// The most terms that `or` may join.
pub const MAX_TERMS: usize = 200;

/// Why a text is no `typeFilter`. Positions count characters from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ParseError {
    /// Nothing but blanks.
    Empty,
    /// More than [`MAX_CHARACTERS`].
    TooLong {
        /// Length of the text in characters.
        characters: usize,
    },
    /// More than [`MAX_TERMS`].
    TooManyTerms {
        /// Where the first term too many starts.
        position: usize,
    },
    /// A quote that is never closed.
    Unbalanced {
        /// Where the quote was opened.
        position: usize,
    },
    /// `''`: no message has an empty type.
    EmptyType {
        /// Where its first quote stands.
        position: usize,
    },
    /// Something other than a quoted type where a term must stand.
    TermExpected {
        /// Where the term must stand.
        position: usize,
    },
    /// Two terms joined by `and`, which no message can meet.
    And {
        /// Where the `and` stands.
        position: usize,
    },
    /// Something other than `or` after a term.
    OrExpected {
        /// Where the `or` must stand.
        position: usize,
    },
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("typeFilter: ")?;
        match self {
            Self::Empty => f.write_str("the text is empty"),
            Self::TooLong { characters } => {
                write!(f, "{characters} characters are too many, at most {MAX_CHARACTERS} are allowed")
            }
            Self::TooManyTerms { position } => {
                write!(f, "more than {MAX_TERMS} types, the first too many is at character {position}")
            }
            Self::Unbalanced { position } => write!(f, "the quote at character {position} is never closed"),
            Self::EmptyType { position } => write!(f, "the type at character {position} is empty"),
            Self::TermExpected { position } => write!(f, "a quoted type is missing at character {position}"),
            Self::And { position } => {
                write!(f, "'and' at character {position} is not supported, types are joined by 'or'")
            }
            Self::OrExpected { position } => write!(f, "only 'or' may follow a type, at character {position}"),
        }
    }
}

impl std::error::Error for ParseError {}

/// The listed types, in the order of the text.
pub(crate) fn types(text: &str) -> Result<Vec<String>, ParseError> {
    let characters = text.chars().count();
    if characters > MAX_CHARACTERS {
        return Err(ParseError::TooLong { characters });
    }
    let mut rest = Cursor { text, offset: 0 };
    rest.skip_blanks();
    if rest.is_at_end() {
        return Err(ParseError::Empty);
    }
    if rest.peek() != Some('\'') && !rest.skip_long_form() {
        return Ok(vec![text.to_owned()]);
    }
    let mut types = vec![rest.quoted()?];
    while rest.skip_or()? {
        let position = rest.position();
        rest.skip_long_form();
        let next = rest.quoted()?;
        if types.len() == MAX_TERMS {
            return Err(ParseError::TooManyTerms { position });
        }
        types.push(next);
    }
    Ok(types)
}

/// A place in the text.
struct Cursor<'a> {
    text: &'a str,
    /// In bytes, on a character boundary.
    offset: usize,
}

impl Cursor<'_> {
    fn rest(&self) -> &str {
        &self.text[self.offset..]
    }

    fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    fn is_at_end(&self) -> bool {
        self.rest().is_empty()
    }

    /// In characters from 1.
    fn position(&self) -> usize {
        self.text[..self.offset].chars().count() + 1
    }

    fn skip_blanks(&mut self) {
        let rest = self.rest();
        self.offset += rest.len() - rest.trim_ascii_start().len();
    }

    /// Skips `word` in any case, unless more letters follow it.
    fn skip_word(&mut self, word: &str) -> bool {
        let rest = self.rest().as_bytes();
        let found = rest.get(..word.len()).is_some_and(|start| start.eq_ignore_ascii_case(word.as_bytes()))
            && !rest.get(word.len()).is_some_and(|&next| next.is_ascii_alphanumeric() || next == b'_');
        if found {
            self.offset += word.len();
        }
        found
    }

    /// Skips `type eq` and the blanks after it, or nothing.
    fn skip_long_form(&mut self) -> bool {
        let start = self.offset;
        if self.skip_word("type") {
            self.skip_blanks();
            if self.skip_word("eq") {
                self.skip_blanks();
                return true;
            }
        }
        self.offset = start;
        false
    }

    /// Skips `or` and the blanks around it; false at the end of the text.
    fn skip_or(&mut self) -> Result<bool, ParseError> {
        self.skip_blanks();
        if self.is_at_end() {
            return Ok(false);
        }
        let position = self.position();
        if self.skip_word("or") {
            self.skip_blanks();
            Ok(true)
        } else if self.skip_word("and") {
            Err(ParseError::And { position })
        } else {
            Err(ParseError::OrExpected { position })
        }
    }

    /// Reads a quoted type, in which a doubled quote stands for one.
    fn quoted(&mut self) -> Result<String, ParseError> {
        let position = self.position();
        if self.peek() != Some('\'') {
            return Err(ParseError::TermExpected { position });
        }
        self.offset += 1;
        let mut quoted = String::new();
        loop {
            let end = self.rest().find('\'').ok_or(ParseError::Unbalanced { position })?;
            quoted.push_str(&self.rest()[..end]);
            self.offset += end + 1;
            if self.peek() != Some('\'') {
                break;
            }
            quoted.push('\'');
            self.offset += 1;
        }
        if quoted.is_empty() {
            return Err(ParseError::EmptyType { position });
        }
        Ok(quoted)
    }
}
