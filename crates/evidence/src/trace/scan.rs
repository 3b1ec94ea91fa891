//! The events of a trace one after the other: of a file of any length no more is held than one event.

use std::io::{self, Read};

use super::TraceError;

/// The largest event; the arguments of one may list every group of ranks of a cluster.
const LARGEST_EVENT: usize = 16 << 20;
/// What is read at once.
const CHUNK: usize = 1 << 18;

/// Cuts the text of a trace into its events.
pub(super) struct Scanner<R> {
    source: R,
    buffer: Vec<u8>,
    /// What of the buffer is not taken yet.
    start: usize,
    /// Bytes taken from the source before the buffer.
    before: u64,
    ended: bool,
}

/// Where in a JSON value a byte stands.
#[derive(Clone, Copy, Default)]
struct Nesting {
    depth: usize,
    in_string: bool,
    escaped: bool,
}

impl Nesting {
    /// Follows `bytes` to the end of the value that it is in: the bytes up to there, where it ends.
    fn follow(&mut self, bytes: &[u8]) -> Option<usize> {
        for (index, byte) in bytes.iter().enumerate() {
            if self.in_string {
                match byte {
                    _ if self.escaped => self.escaped = false,
                    b'\\' => self.escaped = true,
                    b'"' => self.in_string = false,
                    _ => continue,
                }
                if self.depth == 0 && !self.in_string {
                    return Some(index + 1);
                }
                continue;
            }
            match byte {
                b'"' => self.in_string = true,
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' => {
                    self.depth = self.depth.saturating_sub(1);
                    if self.depth == 0 {
                        return Some(index + 1);
                    }
                }
                _ => {}
            }
        }
        None
    }
}

impl<R: Read> Scanner<R> {
    pub(super) fn new(source: R) -> Self {
        Self { source, buffer: Vec::new(), start: 0, before: 0, ended: false }
    }

    /// How many bytes were read.
    pub(super) fn bytes(&self) -> u64 {
        self.before + self.buffer.len() as u64
    }

    /// Reads on; whether there was more.
    fn fill(&mut self) -> Result<bool, TraceError> {
        if self.ended {
            return Ok(false);
        }
        self.before += self.start as u64;
        self.buffer.drain(..self.start);
        self.start = 0;
        let held = self.buffer.len();
        self.buffer.resize(held + CHUNK, 0);
        loop {
            match self.source.read(&mut self.buffer[held..]) {
                Ok(read) => {
                    self.buffer.truncate(held + read);
                    self.ended = read == 0;
                    return Ok(read > 0);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // A packed file that was cut off is read as far as it goes.
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    self.buffer.truncate(held);
                    self.ended = true;
                    return Ok(false);
                }
                Err(error) => return Err(TraceError::Source { at: self.before, source: error }),
            }
        }
    }

    /// The next byte that is no white space, which is not taken.
    fn peek(&mut self) -> Result<Option<u8>, TraceError> {
        loop {
            let rest = &self.buffer[self.start..];
            match rest.iter().position(|byte| !byte.is_ascii_whitespace()) {
                Some(blank) => {
                    self.start += blank;
                    return Ok(Some(self.buffer[self.start]));
                }
                None => self.start = self.buffer.len(),
            }
            if !self.fill()? {
                return Ok(None);
            }
        }
    }

    /// The string, object or list that begins here; none where the text ends in it.
    fn value(&mut self) -> Result<Option<&[u8]>, TraceError> {
        let (mut nesting, mut seen) = (Nesting::default(), 0);
        loop {
            if let Some(end) = nesting.follow(&self.buffer[self.start + seen..]) {
                let begin = self.start;
                self.start += seen + end;
                return Ok(Some(&self.buffer[begin..self.start]));
            }
            seen = self.buffer.len() - self.start;
            if seen > LARGEST_EVENT {
                return Err(TraceError::LargeEvent { at: self.before + self.start as u64 });
            }
            if !self.fill()? {
                return Ok(None);
            }
        }
    }

    /// Passes over a value of any kind and length; whether the text goes on.
    fn skip(&mut self) -> Result<bool, TraceError> {
        let scalar = !matches!(self.peek()?, Some(b'"' | b'{' | b'['));
        let mut nesting = Nesting::default();
        loop {
            let rest = &self.buffer[self.start..];
            let end = if scalar {
                rest.iter().position(|byte| matches!(byte, b',' | b'}' | b']'))
            } else {
                nesting.follow(rest)
            };
            if let Some(end) = end {
                self.start += end;
                return Ok(true);
            }
            self.start = self.buffer.len();
            if !self.fill()? {
                return Ok(false);
            }
        }
    }

    /// Goes to the first event; whether there is a list of events.
    pub(super) fn begin(&mut self) -> Result<bool, TraceError> {
        // A byte order mark says nothing.
        while matches!(self.peek()?, Some(0xef | 0xbb | 0xbf)) {
            self.start += 1;
        }
        match self.peek()? {
            Some(b'[') => {
                self.start += 1;
                return Ok(true);
            }
            Some(b'{') => self.start += 1,
            _ => return Ok(false),
        }
        loop {
            while matches!(self.peek()?, Some(b',')) {
                self.start += 1;
            }
            if self.peek()? != Some(b'"') {
                return Ok(false);
            }
            let Some(key) = self.value()? else { return Ok(false) };
            let events = key == b"\"traceEvents\"";
            if self.peek()? != Some(b':') {
                return Ok(false);
            }
            self.start += 1;
            if events && self.peek()? == Some(b'[') {
                self.start += 1;
                return Ok(true);
            }
            if !self.skip()? {
                return Ok(false);
            }
        }
    }

    /// The text of the next event; none at the end of the list. Something else than an object is passed over.
    pub(super) fn next(&mut self) -> Result<Next<'_>, TraceError> {
        loop {
            match self.peek()? {
                Some(b',') => self.start += 1,
                Some(b']') => return Ok(Next::End),
                Some(b'{') => break,
                Some(b'}') | None => return Ok(Next::Cut),
                Some(_) => {
                    if !self.skip()? {
                        return Ok(Next::Cut);
                    }
                }
            }
        }
        Ok(self.value()?.map_or(Next::Cut, Next::Event))
    }
}

/// What comes next in a trace.
pub(super) enum Next<'a> {
    /// The text of an event.
    Event(&'a [u8]),
    /// The end of the list.
    End,
    /// The text ends before the list does.
    Cut,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Gives one byte at a time.
    struct Drops<'a>(&'a [u8]);

    impl Read for Drops<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let Some((first, rest)) = self.0.split_first() else { return Ok(0) };
            (buffer[0], self.0) = (*first, rest);
            Ok(1)
        }
    }

    fn events(text: &str) -> (Vec<String>, bool) {
        let mut scanner = Scanner::new(Drops(text.as_bytes()));
        assert!(scanner.begin().unwrap());
        let mut events = Vec::new();
        loop {
            match scanner.next().unwrap() {
                Next::Event(event) => events.push(String::from_utf8(event.to_vec()).unwrap()),
                Next::End => return (events, true),
                Next::Cut => return (events, false),
            }
        }
    }

    #[test]
    fn events_are_cut_out_wherever_the_buffer_ends() {
        let text = r#" {"a": "x]}\"", "b": [1, {"c": 2}], "d": 3.5, "traceEvents" : [
            {"name": "a } \\"}, {"args": {"k": [1]}} ], "e": 1}"#;
        assert_eq!(
            events(text),
            (vec![r#"{"name": "a } \\"}"#.into(), r#"{"args": {"k": [1]}}"#.into()], true)
        );
        assert_eq!(events("[{}, 7, \"x\", [1], {}]").0.len(), 2);
        assert!(!events("\u{feff}[{}").1);
        assert_eq!(events(r#"[{}, {"name"#), (vec!["{}".into()], false));
    }

    #[test]
    fn what_has_no_list_of_events_has_none() {
        for text in
            ["", "  ", "{", "{}", r#"{"traceEvents": 7}"#, r#"{"traceEvents"#, r#"{"a": [{"#, "7", "{7}"]
        {
            assert!(!Scanner::new(Drops(text.as_bytes())).begin().unwrap(), "{text}");
        }
    }
}
