//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use vramledger::ledger::Dtype;

use crate::value;

/// The books of GPU training memory: what is on the device, when and why.
#[derive(Parser)]
#[command(name = "vramledger", version, arg_required_else_help = true, max_term_width = 100)]
#[command(
    after_help = "Exit codes: 0 yes, 1 no (it does not fit, it does not agree), 2 the question could not be answered."
)]
pub struct Cli {
    /// The question.
    #[command(subcommand)]
    pub command: Command,
    /// What every command takes.
    #[command(flatten)]
    pub common: Common,
}

/// What every command takes.
#[derive(Args, Clone)]
pub struct Common {
    /// The form of the answer
    #[arg(long, value_enum, default_value_t = Format::Text, global = true, help_heading = "Output")]
    pub format: Format,
    /// Write the answer to FILE, whole or not at all
    #[arg(short, long, value_name = "FILE", global = true, help_heading = "Output")]
    pub output: Option<PathBuf>,
    /// No warnings or hints
    #[arg(long, short, global = true, help_heading = "Output")]
    pub quiet: bool,
    /// Colours (NO_COLOR is heeded too)
    #[arg(long, value_enum, default_value_t = Color::Auto, global = true, help_heading = "Output")]
    pub color: Color,
}

/// The form of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// A page for a terminal
    Text,
    /// The versioned document
    Json,
    /// A page for a report
    Markdown,
    /// One table, bytes exact
    Csv,
}

/// Whether to use colours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Color {
    /// On a terminal
    Auto,
    /// Always
    Always,
    /// Never
    Never,
}

impl From<Color> for anstream::ColorChoice {
    fn from(color: Color) -> Self {
        match color {
            Color::Auto => Self::Auto,
            Color::Always => Self::Always,
            Color::Never => Self::Never,
        }
    }
}

/// The questions.
#[derive(Subcommand)]
pub enum Command {
    /// Bytes a parameter by recipe, the largest model that N cards hold, the cards that a size needs
    Budget(BudgetArgs),
    /// What checkpointing every S of L layers keeps: L/S + S
    CheckpointPlan(CheckpointPlanArgs),
    /// What a smaller dtype and a smaller saved fraction do to one saved tensor
    Tradeoff(TradeoffArgs),
    /// The models that are known by name
    Models,
    /// The GPUs that are known by name
    Gpus,
}

/// Arguments of `budget`.
#[derive(Args)]
pub struct BudgetArgs {
    /// Sizes of models: 7B,70B (default: 124M,1.5B,7B,70B,405B)
    #[arg(long, value_name = "N,…", value_delimiter = ',', value_parser = value::parameters)]
    pub params: Vec<u64>,
    /// The card
    #[arg(long, value_name = "NAME", default_value = "H100-80GB")]
    pub gpu: String,
    /// How many cards
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = value::positive, allow_negative_numbers = true)]
    pub gpus: u64,
}

/// Arguments of `checkpoint-plan`.
#[derive(Args)]
pub struct CheckpointPlanArgs {
    /// Layers of the model
    #[arg(long, value_name = "L", value_parser = value::positive, allow_negative_numbers = true)]
    pub layers: u64,
    /// Layers of a segment, 1 to L (default: all that divide L)
    #[arg(long, value_name = "S", value_parser = value::positive, allow_negative_numbers = true)]
    pub segment: Option<u64>,
}

/// Arguments of `tradeoff`.
#[derive(Args)]
pub struct TradeoffArgs {
    /// Samples of one micro-batch
    #[arg(long, value_name = "N", value_parser = value::positive, allow_negative_numbers = true)]
    pub batch: u64,
    /// Tokens of one sample
    #[arg(long, value_name = "N", value_parser = value::positive, allow_negative_numbers = true)]
    pub seq: u64,
    /// Width of the tensor
    #[arg(long, value_name = "N", value_parser = value::positive, allow_negative_numbers = true)]
    pub hidden: u64,
    /// Element type (default: fp32 beside bf16)
    #[arg(long, value_name = "DTYPE", value_parser = value::float_dtype())]
    pub dtype: Option<Dtype>,
    /// The fraction that is kept, in (0, 1] (default: 0.5)
    #[arg(long, value_name = "X", value_parser = value::finite, allow_negative_numbers = true)]
    pub saved_fraction: Option<f64>,
    /// The fraction of the forward pass that runs again, in [0, 1] (default: what is not kept)
    #[arg(long, value_name = "X", value_parser = value::finite, allow_negative_numbers = true)]
    pub extra_forward: Option<f64>,
}
