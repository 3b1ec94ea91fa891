//! A page as a fragment of HTML, for notebooks.

use crate::{Block, Page};

impl Page {
    /// The page as one `<div>` that needs nothing else.
    pub fn html(&self) -> String {
        let mut html = String::from("<div class=\"vramledger\">\n");
        for block in &self.blocks {
            match block {
                Block::Verdict { text, .. } => html.push_str(&format!("<p><b>{}</b></p>\n", escape(text))),
                Block::Line(line) => html.push_str(&format!("<p>{}</p>\n", escape(line))),
                Block::Table { title, columns, rows } => {
                    html.push_str("<table>\n");
                    if let Some(title) = title {
                        html.push_str(&format!("<caption><b>{}</b></caption>\n", escape(title)));
                    }
                    let heads = columns.iter().map(|column| cell("th", column.number, &column.head));
                    html.push_str(&format!("<tr>{}</tr>\n", heads.collect::<String>()));
                    for row in rows {
                        let cells =
                            row.iter().zip(columns).map(|(text, column)| cell("td", column.number, text));
                        html.push_str(&format!("<tr>{}</tr>\n", cells.collect::<String>()));
                    }
                    html.push_str("</table>\n");
                }
                Block::List { title, items } => {
                    let items = items.iter().map(|item| format!("<li>{}</li>", escape(item)));
                    let items = items.collect::<String>();
                    html.push_str(&format!("<p><b>{}</b></p>\n<ul>{items}</ul>\n", escape(title)));
                }
            }
        }
        html + "</div>\n"
    }
}

fn cell(tag: &str, number: bool, text: &str) -> String {
    let side = if number { "right" } else { "left" };
    let indent = text.len() - text.trim_start().len();
    let text = format!("{}{}", "&nbsp;".repeat(indent), escape(text.trim_start()));
    format!("<{tag} style=\"text-align:{side}\">{text}</{tag}>")
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use crate::{Block, Column, Page};

    #[test]
    fn html() {
        let page = Page {
            blocks: vec![
                Block::Verdict { good: Some(true), text: "a < b & c".into() },
                Block::Table {
                    title: Some("phases".into()),
                    columns: vec![Column::words("phase"), Column::numbers("MiB")],
                    rows: vec![vec!["  <script>".into(), "7.00".into()]],
                },
                Block::List { title: "assumed".into(), items: vec!["\"nothing\"".into()] },
            ],
        };
        insta::assert_snapshot!(page.html(), @r#"
        <div class="vramledger">
        <p><b>a &lt; b &amp; c</b></p>
        <table>
        <caption><b>phases</b></caption>
        <tr><th style="text-align:left">phase</th><th style="text-align:right">MiB</th></tr>
        <tr><td style="text-align:left">&nbsp;&nbsp;&lt;script&gt;</td><td style="text-align:right">7.00</td></tr>
        </table>
        <p><b>assumed</b></p>
        <ul><li>&quot;nothing&quot;</li></ul>
        </div>
        "#);
    }
}
