//! Documents in, bytes out: text, markdown, CSV.
//!
//! A document becomes a [`Page`] (verdict, tables, lists: what a person reads) or a [`Sheet`] (rows
//! of exact bytes: what a program reads). Nothing is computed here: a figure that is not in the
//! document is not in the report, and only units and spelling change.

mod account;
mod answers;
mod compare;
mod growth;
mod html;
mod instants;
mod page;
mod plan;
mod rank;
mod ranks;
mod read;
mod read_ranks;
mod reconcile;
mod series;
mod sheet;
mod simulate;
mod units;
mod vary;

pub use instants::InstantsReport;
pub use page::{Block, Column, Page};
pub use plan::PlanReport;
pub use read::ReadReport;
pub use series::SeriesReport;
pub use sheet::Sheet;
pub use units::size;

/// A document that can be reported.
pub trait Report {
    /// What a person reads.
    fn page(&self) -> Page;
    /// What a program reads: one table, bytes exact.
    fn sheet(&self) -> Sheet;
}
