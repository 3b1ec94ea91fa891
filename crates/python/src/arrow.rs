//! A sheet as a stream of Arrow, which pandas, polars and pyarrow read.

use std::sync::Arc;

use arrow_array::ffi_stream::FFI_ArrowArrayStream;
use arrow_array::{ArrayRef, Float64Array, Int64Array, RecordBatch, RecordBatchIterator, StringArray};
use arrow_schema::{ArrowError, Field, Schema};
use report::Sheet;

/// The stream of one batch that has the rows of `sheet`; what is not known is null.
///
/// # Errors
/// What Arrow refuses, which it does of no sheet.
pub fn stream(sheet: &Sheet) -> Result<FFI_ArrowArrayStream, ArrowError> {
    let columns: Vec<(Field, ArrayRef)> = sheet
        .head
        .iter()
        .enumerate()
        .map(|(column, head)| {
            let fields: Vec<Option<&str>> = sheet
                .rows
                .iter()
                .map(|row| row.get(column).map(String::as_str).filter(|f| !f.is_empty()))
                .collect();
            let array = array(head, &fields);
            (Field::new(*head, array.data_type().clone(), true), array)
        })
        .collect();
    let (fields, arrays): (Vec<Field>, Vec<ArrayRef>) = columns.into_iter().unzip();
    let schema = Arc::new(Schema::new(fields));
    let batch = RecordBatch::try_new(Arc::clone(&schema), arrays)?;
    Ok(FFI_ArrowArrayStream::new(Box::new(RecordBatchIterator::new([Ok(batch)], schema))))
}

/// Columns that are whole numbers even where none of them is known; others tell by what is in them.
const WHOLE: [&str; 6] = ["device", "step", "micro_batch", "oom_step", "retries", "rank"];
/// Columns that are words, whatever they look like: names that the user gave.
const WORDS: [&str; 7] = ["name", "model", "of", "line", "row", "source", "alloc_conf"];

fn array(head: &str, fields: &[Option<&str>]) -> ArrayRef {
    let is_known = fields.iter().any(Option::is_some);
    let all = |is: fn(&str) -> bool| fields.iter().flatten().all(|field| is(field));
    let counts = is_known || head.ends_with("bytes") || WHOLE.contains(&head);
    if WORDS.contains(&head) || !counts {
        Arc::new(fields.iter().copied().collect::<StringArray>())
    } else if all(|field| field.parse::<i64>().is_ok()) {
        Arc::new(
            fields.iter().map(|field| field.and_then(|field| field.parse().ok())).collect::<Int64Array>(),
        )
    } else if all(|field| field.parse::<f64>().is_ok()) {
        Arc::new(
            fields.iter().map(|field| field.and_then(|field| field.parse().ok())).collect::<Float64Array>(),
        )
    } else {
        Arc::new(fields.iter().copied().collect::<StringArray>())
    }
}
