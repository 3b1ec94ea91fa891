//! The library people use: the pipelines over the other crates.
