//! Text of separated values: commas, semicolons, tabs.

use super::LONGEST_LINE;

/// The fields of a line; one that is too long to be a row is one.
pub(crate) fn fields(line: &str, separator: char) -> Vec<String> {
    let mut fields = Vec::new();
    if line.len() > LONGEST_LINE {
        return vec![String::new()];
    }
    let mut field = String::new();
    let mut quoted = false;
    let mut characters = line.chars().peekable();
    while let Some(character) = characters.next() {
        match character {
            '"' if quoted && characters.peek() == Some(&'"') => {
                field.push('"');
                characters.next();
            }
            '"' => quoted = !quoted,
            _ if character == separator && !quoted => {
                fields.push(std::mem::take(&mut field).trim().to_owned())
            }
            _ => field.push(character),
        }
    }
    fields.push(field.trim().to_owned());
    fields
}

/// The separator of `line`, if it has two fields or more.
pub(crate) fn separator(line: &str) -> Option<char> {
    let count = |separator: &char| line.matches(*separator).count();
    let best = ['\t', ';', ',', '|'].into_iter().max_by_key(count)?;
    (count(&best) > 0).then_some(best)
}
