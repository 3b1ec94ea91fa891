//! Documents in, bytes out: text, markdown, CSV.
