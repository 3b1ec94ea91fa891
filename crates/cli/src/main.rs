//! The `vramledger` binary.

fn main() {}
