//! What a family and its config.json say of a decoder.

use super::Experts;
use crate::config::{Fields, divides};
use crate::nn::Activation;
use crate::norm::Norm;
use crate::rotary::Rotary;
use crate::run::PlanError;

/// A decoder; [`DecoderConfig::read`] gives a Llama's, in which a family changes what is its own.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct DecoderConfig {
    pub(crate) vocab: u64,
    pub(crate) hidden: u64,
    pub(crate) intermediate: u64,
    pub(crate) layers: u64,
    pub(crate) heads: u64,
    pub(crate) kv_heads: u64,
    pub(crate) head: u64,
    pub(crate) max_positions: u64,
    /// Queries, keys and values come from one projection, and so do gate and up.
    pub(crate) fused: bool,
    pub(crate) qkv_bias: bool,
    pub(crate) o_bias: bool,
    pub(crate) mlp_bias: bool,
    /// Experts in place of the feed-forward part.
    pub(crate) experts: Option<Experts>,
    pub(crate) attention_dropout: f64,
    /// Of what attention and the feed-forward part add to the residual.
    pub(crate) residual_dropout: f64,
    /// Attention scores and logits are kept small by a tanh; for scores, eager attention does it.
    pub(crate) attention_softcap: bool,
    pub(crate) logit_softcap: bool,
    /// Whether the family can use sdpa; where not, attention is eager whatever is asked.
    pub(crate) runs_sdpa: bool,
    /// Embeddings are multiplied by a number.
    pub(crate) scaled_embedding: bool,
    pub(crate) tied: bool,
    pub(crate) use_cache: bool,
    pub(crate) activation: Activation,
    pub(crate) rotary: Rotary,
    pub(crate) masks: Masks,
    pub(crate) windowed: Windowed,
    pub(crate) norm: Norm,
    pub(crate) norm_places: NormPlaces,
    pub(crate) head_norm: HeadNorm,
    /// In the call of a layer, the position ids stand before the angles: a checkpoint lets go of them first.
    pub(crate) position_ids_first: bool,
}

/// The masks that a pass makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Masks {
    /// The causal mask.
    pub(crate) causal: bool,
    /// The mask of a window of so many tokens, the token itself included.
    pub(crate) window: Option<u64>,
    /// Masks and what they are made from are kept in dictionaries until the pass ends.
    pub(crate) by_type: bool,
}

/// The layers that see a window instead of all earlier tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Windowed {
    None,
    All,
    /// From this layer on.
    From(u64),
    /// All but each n-th, as the counting from 1 goes.
    AllButEvery(u64),
    /// As `layer_types` lists them.
    Listed(Vec<bool>),
}

impl Windowed {
    /// Whether layer `index` sees a window.
    pub(crate) fn at(&self, index: u64) -> bool {
        match self {
            Self::None => false,
            Self::All => true,
            Self::From(first) => index >= *first,
            Self::AllButEvery(period) => !(index + 1).is_multiple_of(*period),
            Self::Listed(layers) => layers.get(index as usize).copied().unwrap_or(false),
        }
    }

    /// Whether any of `layers` sees a window, and whether any does not.
    pub(crate) fn among(&self, layers: u64) -> (bool, bool) {
        match self {
            Self::None => (false, true),
            Self::All => (true, false),
            Self::From(first) => (*first < layers, *first > 0),
            Self::AllButEvery(period) => (*period > 1, *period <= layers),
            Self::Listed(listed) => (listed.contains(&true), listed.contains(&false)),
        }
    }
}

/// The norms of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HeadNorm {
    None,
    /// Over each head, before heads and tokens are exchanged.
    EachHead,
    /// Over each head, after that.
    EachHeadTransposed,
    /// Over all heads together.
    AllHeads,
}

/// Where the norms of a layer stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NormPlaces {
    /// Before attention and before the feed-forward part.
    Before,
    /// After each.
    After,
    /// Before and after each.
    Around,
}

/// What transformers' config class of a family takes where a file says nothing.
pub(crate) struct Defaults {
    pub(crate) vocab: u64,
    pub(crate) hidden: u64,
    pub(crate) intermediate: u64,
    pub(crate) layers: u64,
    pub(crate) heads: u64,
    /// None: as many as heads.
    pub(crate) kv_heads: Option<u64>,
    /// None: the hidden size over the heads.
    pub(crate) head: Option<u64>,
    pub(crate) max_positions: u64,
    pub(crate) tied: bool,
}

impl DecoderConfig {
    /// Reads the fields that all families have.
    pub(crate) fn read(fields: &Fields<'_>, defaults: Defaults) -> Result<Self, PlanError> {
        let hidden = fields.size(&["hidden_size"], defaults.hidden)?;
        let heads = fields.size(&["num_attention_heads"], defaults.heads)?;
        let usual = defaults.kv_heads.filter(|_| !fields.is_null("num_key_value_heads")).unwrap_or(heads);
        let kv_heads = fields.size(&["num_key_value_heads"], usual)?;
        divides("num_key_value_heads", kv_heads, "num_attention_heads", heads)?;
        if defaults.head.is_none() && !fields.has("head_dim") {
            divides("num_attention_heads", heads, "hidden_size", hidden)?;
        }
        let head = fields.size(&["head_dim"], defaults.head.unwrap_or(hidden / heads))?;
        if !head.is_multiple_of(2) {
            return Err(PlanError(format!("rotary embedding needs an even `head_dim`, and it is {head}")));
        }
        let max_positions = fields.size(&["max_position_embeddings"], defaults.max_positions)?;
        Ok(Self {
            vocab: fields.size(&["vocab_size"], defaults.vocab)?,
            hidden,
            intermediate: fields.size(&["intermediate_size"], defaults.intermediate)?,
            layers: fields.size(&["num_hidden_layers"], defaults.layers)?,
            heads,
            kv_heads,
            head,
            max_positions,
            fused: false,
            qkv_bias: false,
            o_bias: false,
            mlp_bias: false,
            experts: None,
            attention_dropout: fields.probability("attention_dropout", 0.0)?,
            residual_dropout: 0.0,
            attention_softcap: false,
            logit_softcap: false,
            runs_sdpa: true,
            scaled_embedding: false,
            tied: fields.flag("tie_word_embeddings", defaults.tied)?,
            use_cache: fields.flag("use_cache", true)?,
            activation: fields.activation("hidden_act", "silu")?,
            rotary: Rotary { scaling: fields.rope_scaling(max_positions)?, ..Rotary::whole(head) },
            masks: Masks { causal: true, window: None, by_type: false },
            windowed: Windowed::None,
            norm: Norm::Cast,
            norm_places: NormPlaces::Before,
            head_norm: HeadNorm::None,
            position_ids_first: false,
        })
    }

    /// One mask for all layers: of the window where there is one.
    pub(crate) fn with_one_mask(self, window: Option<u64>) -> Self {
        let windowed = if window.is_some() { Windowed::All } else { Windowed::None };
        Self { masks: Masks { causal: window.is_none(), window, by_type: false }, windowed, ..self }
    }

    /// A causal mask, and that of the `window` which the layers of `windowed` see.
    pub(crate) fn with_masks_by_type(self, window: Option<u64>, windowed: Windowed) -> Self {
        Self { masks: Masks { causal: true, window, by_type: true }, windowed, ..self }
    }
}
