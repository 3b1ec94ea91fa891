//! A page for people: text for a terminal, or markdown.

use anstyle::{AnsiColor, Style};
use comfy_table::{CellAlignment, Table, presets};

/// The columns of a terminal page.
const WIDTH: usize = 100;

/// What a person reads, from top to bottom.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Page {
    /// Its parts.
    pub blocks: Vec<Block>,
}

/// A part of a page.
#[derive(Clone, Debug, PartialEq)]
pub enum Block {
    /// The answer, first and in one sentence.
    Verdict {
        /// Whether it is a yes or a no, where it is either.
        good: Option<bool>,
        /// The sentence.
        text: String,
    },
    /// A line of text.
    Line(String),
    /// Rows of equal kind.
    Table {
        /// What stands above it.
        title: Option<String>,
        /// Its columns.
        columns: Vec<Column>,
        /// Its rows, a cell a column.
        rows: Vec<Vec<String>>,
    },
    /// Sentences of equal kind.
    List {
        /// What stands above it.
        title: String,
        /// Its items.
        items: Vec<String>,
    },
}

/// A column of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Column {
    /// Its heading.
    pub head: String,
    /// Whether its cells are numbers, which stand to the right.
    pub number: bool,
}

impl Column {
    /// A column of words.
    pub fn words(head: impl Into<String>) -> Self {
        Self { head: head.into(), number: false }
    }

    /// A column of numbers.
    pub fn numbers(head: impl Into<String>) -> Self {
        Self { head: head.into(), number: true }
    }
}

impl Page {
    /// The page of these parts, but for lists that have no items.
    pub(crate) fn of(mut blocks: Vec<Block>) -> Self {
        blocks.retain(|block| !matches!(block, Block::List { items, .. } if items.is_empty()));
        Self { blocks }
    }

    /// The page for a terminal of 100 columns, with ANSI styles (a stream that wants none strips them).
    pub fn text(&self) -> String {
        let mut text = String::new();
        let mut after_lines = true;
        for block in &self.blocks {
            let is_line = matches!(block, Block::Line(_));
            let joined = text.is_empty() || after_lines && is_line;
            if !joined {
                text.push('\n');
            }
            after_lines = matches!(block, Block::Line(_) | Block::Verdict { .. });
            match block {
                Block::Verdict { good, text: sentence } => {
                    let style = match good {
                        Some(true) => AnsiColor::Green.on_default().bold(),
                        Some(false) => AnsiColor::Red.on_default().bold(),
                        None => Style::new().bold(),
                    };
                    for line in textwrap::wrap(sentence, WIDTH) {
                        text.push_str(&format!("{style}{line}{style:#}\n"));
                    }
                }
                Block::Line(line) => {
                    for line in textwrap::wrap(line, WIDTH) {
                        text.push_str(&format!("{line}\n"));
                    }
                }
                Block::Table { title, columns, rows } => {
                    if let Some(title) = title {
                        text.push_str(&heading(title));
                    }
                    let table = table(columns, rows);
                    for (index, line) in table.lines().enumerate() {
                        let line = line.strip_prefix(' ').unwrap_or(&line).trim_end();
                        let style = if index == 0 { Style::new().underline() } else { Style::new() };
                        text.push_str(&format!("{style}{line}{style:#}\n"));
                    }
                }
                Block::List { title, items } => {
                    text.push_str(&heading(title));
                    for item in items {
                        let options =
                            textwrap::Options::new(WIDTH).initial_indent("  - ").subsequent_indent("    ");
                        for line in textwrap::wrap(item, options) {
                            text.push_str(&format!("{line}\n"));
                        }
                    }
                }
            }
        }
        text
    }

    /// The page as markdown.
    pub fn markdown(&self) -> String {
        let mut text = String::new();
        for block in &self.blocks {
            if !text.is_empty() {
                text.push('\n');
            }
            match block {
                Block::Verdict { text: sentence, .. } => text.push_str(&format!("**{sentence}**\n")),
                Block::Line(line) => text.push_str(&format!("{line}\n")),
                Block::Table { title, columns, rows } => {
                    if let Some(title) = title {
                        text.push_str(&format!("### {title}\n\n"));
                    }
                    let row = |cells: &mut dyn Iterator<Item = String>| {
                        format!("| {} |\n", cells.collect::<Vec<_>>().join(" | "))
                    };
                    text.push_str(&row(&mut columns.iter().map(|column| escape(&column.head))));
                    text.push_str(&row(&mut columns
                        .iter()
                        .map(|c| if c.number { "---:" } else { "---" }.into())));
                    for cells in rows {
                        text.push_str(&row(&mut cells.iter().map(|cell| escape(cell))));
                    }
                }
                Block::List { title, items } => {
                    text.push_str(&format!("### {title}\n\n"));
                    for item in items {
                        text.push_str(&format!("- {item}\n"));
                    }
                }
            }
        }
        text
    }
}

fn heading(title: &str) -> String {
    let style = Style::new().bold();
    format!("{style}{title}{style:#}\n")
}

/// Markdown reads a bar as the end of a cell, and leading spaces as nothing.
fn escape(cell: &str) -> String {
    let indent = cell.len() - cell.trim_start().len();
    format!("{}{}", "&nbsp;".repeat(indent), cell.trim_start().replace('|', "\\|"))
}

fn table(columns: &[Column], rows: &[Vec<String>]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(columns.iter().map(|column| column.head.as_str()).collect::<Vec<_>>());
    for row in rows {
        table.add_row(row.iter().map(String::as_str).collect::<Vec<_>>());
    }
    for (index, column) in columns.iter().enumerate() {
        if let Some(shown) = table.column_mut(index) {
            shown.set_cell_alignment(if column.number { CellAlignment::Right } else { CellAlignment::Left });
        }
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page() -> Page {
        Page {
            blocks: vec![
                Block::Verdict { good: Some(true), text: "it fits".into() },
                Block::Line("one card".into()),
                Block::Table {
                    title: Some("phases".into()),
                    columns: vec![Column::words("phase"), Column::numbers("MiB")],
                    rows: vec![vec!["forward".into(), "1900.00".into()], vec!["  a|b".into(), "7.00".into()]],
                },
                Block::List { title: "assumed".into(), items: vec!["nothing".into()] },
            ],
        }
    }

    #[test]
    fn text() {
        insta::assert_snapshot!(anstream_free(&page().text()), @r"
        it fits
        one card

        phases
        phase        MiB
        forward  1900.00
          a|b       7.00

        assumed
          - nothing
        ");
    }

    #[test]
    fn markdown() {
        insta::assert_snapshot!(page().markdown(), @r"
        **it fits**

        one card

        ### phases

        | phase | MiB |
        | --- | ---: |
        | forward | 1900.00 |
        | &nbsp;&nbsp;a\|b | 7.00 |

        ### assumed

        - nothing
        ");
    }

    /// The text without its ANSI styles.
    fn anstream_free(text: &str) -> String {
        let mut plain = String::new();
        let mut inside = false;
        for character in text.chars() {
            match character {
                '\u{1b}' => inside = true,
                'm' if inside => inside = false,
                _ if inside => {}
                _ => plain.push(character),
            }
        }
        plain
    }
}
