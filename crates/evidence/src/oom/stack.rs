//! The stack that a log shows for a message.

use std::sync::LazyLock;

use regex::Regex;

/// One call of a stack.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Frame {
    /// The file, or the library of a native one.
    pub file: String,
    /// The line; none of a native one.
    pub line: Option<u64>,
    /// The function.
    pub function: String,
    /// The line of the program, where the log shows it.
    pub code: Option<String>,
}

/// The most frames that are kept of a stack: the innermost.
const MOST_FRAMES: usize = 64;

static PYTHON: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(r#"^\s*File "([^"]{1,400})", line ([0-9]{1,9})(?:, in (\S{1,200}))?"#)
        .expect("the form of a frame is a regular expression")
});
static BOXED: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(r"^\s*(\S{1,400}\.py):([0-9]{1,9}) in (\S{1,200})")
        .expect("the form of a frame is a regular expression")
});
static NATIVE: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(r"^\s*frame #[0-9]{1,4}: (.{1,400}?) \+ 0x[0-9a-f]{1,16} \(0x[0-9a-f]{1,16} in (\S{1,400})\)")
        .expect("the form of a frame is a regular expression")
});
static MARKED: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(r"^\s*\u{2771}\s*[0-9]{1,9}\s+\S").expect("a marked line is a regular expression")
});

/// The stack among `lines` (row, text) of the message that begins in row `head`: the one before it, else the one
/// after it. Outermost first.
pub(super) fn of<'a>(lines: impl Iterator<Item = (usize, &'a str)> + Clone, head: usize) -> Vec<Frame> {
    let before = frames(lines.clone().take_while(|(row, _)| *row < head));
    if !before.is_empty() {
        return before;
    }
    frames(lines.skip_while(|(row, _)| *row < head))
}

fn frames<'a>(lines: impl Iterator<Item = (usize, &'a str)>) -> Vec<Frame> {
    let mut frames: Vec<Frame> = Vec::new();
    let mut native: Vec<Frame> = Vec::new();
    let mut after_frame = false;
    for (_, line) in lines {
        if line.contains("Traceback (most recent call last)") {
            frames.clear();
            after_frame = false;
        } else if let Some(found) = PYTHON.captures(line).or_else(|| BOXED.captures(line)) {
            let function = found.get(3).map_or("", |function| function.as_str()).to_owned();
            frames.push(Frame { file: found[1].into(), line: found[2].parse().ok(), function, code: None });
            after_frame = true;
        } else if let Some(found) = NATIVE.captures(line) {
            native.push(Frame { file: found[2].into(), line: None, function: found[1].into(), code: None });
        } else if let Some(frame) = frames.last_mut() {
            let marked = MARKED.is_match(line);
            if marked || after_frame && !line.trim().is_empty() && !is_marker(line) {
                let code = line.trim().trim_start_matches(|letter: char| {
                    marked && (letter == '\u{2771}' || letter.is_ascii_digit() || letter.is_whitespace())
                });
                frame.code = Some(code.trim_start_matches('\u{2502}').trim().to_owned());
            }
            after_frame = false;
        }
    }
    // Native frames come innermost first, below those of the program.
    native.reverse();
    frames.extend(native);
    let extra = frames.len().saturating_sub(MOST_FRAMES);
    frames.split_off(extra)
}

/// Whether `line` only marks a part of the line above it.
fn is_marker(line: &str) -> bool {
    line.trim().bytes().all(|byte| matches!(byte, b'^' | b'~'))
}
