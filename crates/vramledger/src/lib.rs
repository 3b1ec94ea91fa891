//! The library people use: the pipelines over the other crates.

mod budget;
mod catalogue;
mod checkpoint_plan;
mod error;
mod explain;
mod model;
mod plan;
mod tradeoff;

pub use budget::{DEFAULT_SIZES, budget};
pub use catalogue::{find_gpu, gpu_catalogue, model_catalogue};
pub use checkpoint_plan::checkpoint_plan;
pub use error::Error;
pub use explain::{explain, levers};
pub use model::{NamedModel, load_model};
pub use plan::{Plan, PlanQuestion, plan, tape_file};
pub use tradeoff::{TradeoffQuestion, tradeoff};
pub use {ledger, models, wire};
