//! The pickle machine alone, under a builder that takes over every dict and list.
#![no_main]

use evidence::pickle::{Builder, Built, Contents, Heap, Limits, Value, read};

/// Counts what it takes over.
#[derive(Default)]
struct Count(u32);

impl Builder for Count {
    const VOCABULARY: &'static [&'static str] = &["size", "frames"];

    fn dict(&mut self, heap: &mut Heap, items: &[Value]) -> Result<Option<Built>, String> {
        for item in items {
            touch(heap, *item);
        }
        self.0 += 1;
        Ok((self.0 % 2 == 0).then_some(Built { table: 1, row: self.0 }))
    }

    fn list(&mut self, heap: &mut Heap, _: Option<Built>, items: &[Value]) -> Result<Option<Built>, String> {
        self.dict(heap, items)
    }

    fn memory(&self) -> usize {
        0
    }
}

/// Looks at everything a value refers to directly.
fn touch(heap: &Heap, value: Value) {
    match value {
        Value::Text(text) => assert!(heap.text(text).len() < usize::MAX),
        Value::Tuple(tuple) => assert!(heap.tuple(tuple).len() < usize::MAX),
        Value::List(node) | Value::Dict(node) => match heap.contents(node) {
            Contents::Items(items) => assert!(items.len() < usize::MAX),
            Contents::Built(_) => {}
        },
        _ => {}
    }
}

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok((value, heap, taken)) = read(bytes, Limits::for_length(bytes.len()), &mut Count::default()) {
        assert!(taken <= bytes.len());
        touch(&heap, value);
    }
});
