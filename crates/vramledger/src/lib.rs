//! The library people use: the pipelines over the other crates.

mod budget;
mod catalogue;
mod checkpoint_plan;
mod compare;
pub mod emulate;
mod error;
mod evidence;
mod explain;
mod failure;
mod fit;
mod levers;
mod model;
mod plan;
mod read;
mod reconcile;
mod simulate;
mod timeline;
mod tradeoff;

pub use budget::{DEFAULT_SIZES, budget};
pub use catalogue::{find_gpu, gpu_catalogue, model_catalogue};
pub use checkpoint_plan::checkpoint_plan;
pub use compare::compare;
pub use error::Error;
pub use evidence::read_ledger;
pub use explain::explain;
pub use levers::explain_plan;
pub use model::{NamedModel, load_model};
pub use plan::{CONTEXT, Plan, PlanQuestion, plan, tape_file};
pub use read::{By, DEPTH, Read, ReadQuestion, read};
pub use reconcile::reconcile;
pub use simulate::{SimulateQuestion, simulate};
pub use tradeoff::{TradeoffQuestion, tradeoff};
pub use {ledger, models, wire};
