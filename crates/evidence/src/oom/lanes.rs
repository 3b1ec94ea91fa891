//! The lines of a log, told apart by who wrote them and joined to texts without white space.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use regex::Regex;

use super::forms::HINT;

/// How much of a file is looked at on each side of what speaks of memory.
const AROUND: usize = 1 << 16;
/// A file that is looked at whole in any case.
const SMALL: usize = 1 << 18;
/// The most prefixes of one line.
const MOST_PREFIXES: usize = 6;

/// What one process wrote.
#[derive(Debug, Default)]
pub(super) struct Lane<'a> {
    /// Its rank.
    pub(super) rank: Option<u32>,
    /// What its prefix calls it.
    pub(super) speaker: Option<String>,
    /// Its process number.
    pub(super) pid: Option<u64>,
    /// Its lines, joined without white space.
    pub(super) joined: String,
    /// For each line where it begins in `joined`, its number in the file, and itself.
    lines: Vec<(usize, u64, &'a str)>,
}

impl<'a> Lane<'a> {
    /// The row of the line that `place` of the joined text is of.
    pub(super) fn row_at(&self, place: usize) -> usize {
        self.lines.partition_point(|(start, ..)| *start <= place).saturating_sub(1)
    }

    /// The number in the file of the line that `place` of the joined text is of.
    pub(super) fn line_at(&self, place: usize) -> u64 {
        self.lines.get(self.row_at(place)).map_or(0, |(_, number, _)| *number)
    }

    /// The lines from row `from` on up to row `to`, with their rows.
    pub(super) fn lines_between(
        &self,
        from: usize,
        to: Option<usize>,
    ) -> impl DoubleEndedIterator<Item = (usize, &'a str)> + Clone + '_ {
        let to = to.unwrap_or(self.lines.len()).max(from);
        let rows = self.lines.get(from..to).unwrap_or_default();
        rows.iter().enumerate().map(move |(row, (_, _, text))| (from + row, *text))
    }

    fn push(&mut self, number: u64, line: &'a str) {
        self.lines.push((self.joined.len(), number, line));
        self.joined.extend(line.chars().filter(|letter| !letter.is_whitespace()));
    }
}

/// The parts of `bytes` that speak of memory, each with the number of its first line.
pub(super) fn windows(bytes: &[u8]) -> Vec<(u64, &[u8])> {
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    for found in HINT.find_iter(bytes) {
        let (from, to) = (found.start().saturating_sub(AROUND), bytes.len().min(found.end() + AROUND));
        match ranges.last_mut().filter(|last| last.1 >= from) {
            Some(last) => last.1 = to,
            None => ranges.push((from, to)),
        }
    }
    // Where launchers' prefixes stand within every word that tells, only reading all of it finds them.
    if ranges.is_empty() && bytes.len() <= SMALL {
        ranges.push((0, bytes.len()));
    }
    let (mut line, mut counted) = (1, 0);
    let window = |(from, to): (usize, usize)| {
        // A window begins with a whole line, where one is near.
        let from = match bytes[from..to].iter().position(|byte| *byte == b'\n') {
            Some(place) if from > 0 && place < AROUND / 2 => from + place + 1,
            _ => from,
        };
        line += bytes[counted..from].iter().filter(|byte| **byte == b'\n').count() as u64;
        counted = from;
        (line, &bytes[from..to])
    };
    ranges.into_iter().map(window).collect()
}

/// What `text`, whose first line has the number `first`, holds of each process.
pub(super) fn lanes(text: &str, first: u64) -> Vec<Lane<'_>> {
    let mut lanes: Vec<Lane<'_>> = vec![Lane::default()];
    let mut known: BTreeMap<String, usize> = BTreeMap::new();
    let mut at = 0;
    let mut number = first;
    for line in text.split_inclusive(['\n', '\r']) {
        for part in parts(line) {
            let (who, rest) = stripped(part);
            match who {
                Some(who) => {
                    let next = lanes.len();
                    at = *known.entry(who.key.clone()).or_insert(next);
                    if at == next {
                        let speaker = Some(who.key).filter(|_| who.rank.is_none());
                        lanes.push(Lane { rank: who.rank, pid: who.pid, speaker, ..Lane::default() });
                    }
                }
                // What has no prefix goes on with the line before it, unless it begins anew.
                None if BEGINS.is_match(rest) => at = 0,
                None => {}
            }
            lanes[at].push(number, rest);
        }
        number += u64::from(line.ends_with('\n'));
    }
    lanes
}

/// Who wrote a line.
struct Who {
    key: String,
    rank: Option<u32>,
    pid: Option<u64>,
}

/// Prefixes that say who wrote a line. What a group `rank` or `pid` holds is its number.
static WHO: LazyLock<Vec<Regex>> = LazyLock::new(|| {
    regexes(&[
        r"^\[(?i:rank|default|local_rank|worker|node|gpu|trainer)?[ _:=#-]?(?<rank>[0-9]{1,6})\]:\s?",
        r"^\[(?i:rank|default|local_rank|worker|node|gpu|trainer)[ _:=#-]?(?<rank>[0-9]{1,6})\]:?\s?",
        r"^\[[0-9]{1,6},(?<rank>[0-9]{1,6})\]<[0-9A-Za-z_]{1,8}>:\s?",
        r"^\((?:[0-9A-Za-z_.:<>\[\]-]{1,80}(?:\([^)]{0,80}\))?\s)?pid=(?<pid>[0-9]{1,10})(?:,\s?ip=[0-9A-Za-z_.:-]{1,60})?\)\s?",
        r"^(?i:rank|worker|gpu|node|proc|trainer)[ _:#-]?(?<rank>[0-9]{1,6})\s?[:|>]\s",
        r"^(?<rank>[0-9]{1,6}):\s",
        r"^(?:localhost|[A-Za-z0-9][0-9A-Za-z_.-]{0,60}[0-9][0-9A-Za-z_.-]{0,60}?)\s?[:|]\s",
    ])
});

/// Prefixes that say something else: the time, a level, the edge of a box, a quotation.
static OTHER: LazyLock<Vec<Regex>> = LazyLock::new(|| {
    regexes(&[
        r"^\[?[0-9]{4}[-/][0-9][0-9][-/][0-9][0-9][T ][0-9][0-9]:[0-9][0-9]:[0-9][0-9](?:[.,][0-9]{1,9})?(?:Z|[+-][0-9][0-9]:?[0-9][0-9])?\]?:?\s?",
        r"^\[?[0-9][0-9]:[0-9][0-9]:[0-9][0-9](?:[.,][0-9]{1,9})?\]?\s",
        r"^(?:E\s{2,8}|stderr:\s|err:\s|[>|]\s?)",
        r"^[\u{2500}-\u{257f}]+\s?",
        "^\u{1b}\\[[0-9;]{0,20}[A-Za-z]",
    ])
});

/// What begins anew and does not go on with the line before it.
static BEGINS: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(r#"^\s*(?:Traceback|File "|(?:[0-9A-Za-z_]+\.)*[0-9A-Za-z_]*(?:Error|Exception|Warning)\b)"#)
        .expect("the beginning of a line is a regular expression")
});

fn regexes(texts: &[&str]) -> Vec<Regex> {
    texts.iter().map(|text| Regex::new(text).expect("a prefix is a regular expression")).collect()
}

/// `line` in parts, each of which begins with its own rank: two processes may have written one line.
fn parts(line: &str) -> Vec<&str> {
    static WITHIN: LazyLock<Regex> = LazyLock::new(|| {
        Regex::new(r"\[(?:rank|default)[0-9]{1,6}\]:").expect("a rank is a regular expression")
    });
    let mut parts = Vec::new();
    let mut from = 0;
    for found in WITHIN.find_iter(line).filter(|found| found.start() > 0) {
        parts.push(&line[from..found.start()]);
        from = found.start();
    }
    parts.push(&line[from..]);
    parts
}

/// `line` without its prefixes and edges, and who its prefixes say wrote it.
fn stripped(line: &str) -> (Option<Who>, &str) {
    let mut rest = line.trim_end().trim_end_matches(is_edge).trim_end();
    let mut who: Option<Who> = None;
    for _ in 0..MOST_PREFIXES {
        let inner = rest.trim_start();
        let found = WHO.iter().find_map(|regex| regex.captures(inner));
        if let Some(found) = found.filter(|found| !found[0].trim_end().ends_with("Error:")) {
            let whole =
                found[0].trim_matches(|letter: char| letter.is_whitespace() || "[]():|<>".contains(letter));
            let number = |name| found.name(name).and_then(|number| number.as_str().parse::<u64>().ok());
            let part = Who {
                key: whole.to_owned(),
                rank: number("rank").and_then(|rank| u32::try_from(rank).ok()),
                pid: number("pid"),
            };
            rest = &inner[found[0].len()..];
            who = Some(match who {
                None => part,
                Some(before) => Who {
                    key: format!("{} {}", before.key, part.key),
                    rank: part.rank.or(before.rank),
                    pid: part.pid.or(before.pid),
                },
            });
        } else if let Some(found) = OTHER.iter().find_map(|regex| regex.find(inner)) {
            rest = &inner[found.end()..];
        } else {
            break;
        }
    }
    (who, rest)
}

/// Whether `letter` is the edge of a box.
fn is_edge(letter: char) -> bool {
    ('\u{2500}'..='\u{257f}').contains(&letter)
}
