//! The documents: versioned JSON and the tape's file form.
