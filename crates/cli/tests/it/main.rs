//! The binary as a user meets it: exit code, standard output, standard error.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod emulate;
mod frame;
mod oom;
mod other_evidence;
mod pages;
mod plan;
mod published;
mod ranks;
mod read;
mod read_ranks;
mod reconcile;
mod run;
mod simulate;
mod vary;
mod vectors;
