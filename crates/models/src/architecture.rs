//! What the planner asks of a kind of model.

use std::fmt::Debug;
use std::rc::Rc;

use engine::{Problem, Session};
use ledger::Dtype;

use crate::lora::Lora;
use crate::network::Built;
use crate::setup::Setup;

/// A kind of model with its extents: an mlp, or what a config.json says.
pub(crate) trait Architecture: Debug + Send + Sync {
    /// Puts the model on the device.
    fn build(&self, session: &Rc<Session>, setup: &Setup, dtype: Dtype) -> Built;

    /// What bounds the work and the memory of a run.
    fn extents(&self) -> Extents;

    /// What sdpa is asked to run in a pass over `seq` tokens, each kind of layer once; none for an mlp.
    fn attention(&self, dtype: Dtype, seq: u64) -> Vec<Problem>;

    /// What a plan has to assume of the family, a sentence each.
    fn assumptions(&self) -> Vec<String> {
        Vec::new()
    }

    /// Why `lora` cannot adapt the model, where it cannot.
    fn adapter_problem(&self, _lora: &Lora) -> Option<String> {
        None
    }

    /// Whether transformers lets the family use sdpa; where not, attention is eager whatever is asked.
    fn runs_sdpa(&self) -> bool {
        true
    }
}

/// What bounds the work and the memory of a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extents {
    pub(crate) layers: u64,
    /// The work of a layer, in layers of an mlp.
    pub(crate) work: u64,
    /// Elements of the widest tensor, for each token.
    pub(crate) widest: u64,
    /// Elements of the largest weight.
    pub(crate) largest_weight: u128,
    /// Width and rows of the head; none for an mlp.
    pub(crate) head: Option<[u64; 2]>,
    /// Attention heads.
    pub(crate) heads: u64,
    /// The longest sequence that the config speaks of; none for an mlp.
    pub(crate) positions: Option<u64>,
    /// Whether positions are learnt, so that no longer sequence can run.
    pub(crate) learnt_positions: bool,
}

/// The work of a decoder layer, in layers of an mlp.
pub(crate) const WORK_OF_DECODER_LAYER: u64 = 8;
