//! A sheet for programs: comma-separated values as RFC 4180 writes them.

/// One table of exact figures.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sheet {
    /// The names of the columns.
    pub head: Vec<&'static str>,
    /// The rows, a field a column; what is not known is empty.
    pub rows: Vec<Vec<String>>,
}

impl Sheet {
    /// The sheet as CSV, with a heading.
    pub fn csv(&self) -> String {
        let head = self.head.iter().map(|name| field(name)).collect::<Vec<_>>().join(",");
        let mut text = head + "\n";
        for row in &self.rows {
            text.push_str(&row.iter().map(|value| field(value)).collect::<Vec<_>>().join(","));
            text.push('\n');
        }
        text
    }
}

fn field(value: &str) -> String {
    if value.contains([',', '"', '\n', '\r']) {
        format!("\"{}\"", value.replace('"', "\"\""))
    } else {
        value.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_with_commas_quotes_and_lines_are_quoted() {
        let sheet = Sheet { head: vec!["a", "b"], rows: vec![vec!["1,2".into(), "say \"x\"\n".into()]] };
        assert_eq!(sheet.csv(), "a,b\n\"1,2\",\"say \"\"x\"\"\n\"\n");
    }
}
