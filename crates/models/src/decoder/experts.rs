//! A mixture of experts in place of the feed-forward part: a router and the experts' products, as transformers groups
//! them, and the loss that balances the router.

use std::cell::RefCell;
use std::rc::Rc;

use engine::{Session, Tensor, release};
use ledger::Dtype;

use super::DecoderConfig;
use crate::causal_lm::integers;
use crate::nn::{Activation, Builder};
use crate::run::PlanError;

/// The experts of a decoder.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Experts {
    pub(crate) count: u64,
    /// Experts of one token.
    pub(crate) per_token: u64,
    pub(crate) intermediate: u64,
    pub(crate) router: Router,
    /// The router's part of the loss is computed.
    pub(crate) balanced: bool,
    /// Each so many layers has experts, but for those of `dense`.
    pub(crate) step: u64,
    pub(crate) dense: Vec<u64>,
}

/// How the weights of a token's experts are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Router {
    /// In fp32, summing to one; inputs are multiplied by noise where `jitter` says so.
    Mixtral { jitter: bool },
    /// In the dtype of the logits, summing to one where `normalized`.
    Qwen3 { normalized: bool },
}

impl Experts {
    /// These experts, where a token can have as many as it wants.
    pub(crate) fn checked(self) -> Result<Self, PlanError> {
        if self.per_token <= self.count {
            return Ok(self);
        }
        let (wanted, count) = (self.per_token, self.count);
        Err(PlanError(format!("`num_experts_per_tok` is {wanted}, and there are {count} experts")))
    }

    /// Elements of the widest tensor, for each token.
    pub(crate) fn widest(&self, hidden: u64) -> u64 {
        self.count.max(self.per_token * hidden.max(2 * self.intermediate))
    }

    /// Elements of the largest weight.
    pub(crate) fn largest_weight(&self, hidden: u64) -> u128 {
        2 * u128::from(self.count) * u128::from(self.intermediate) * u128::from(hidden)
    }

    /// Whether any of `layers` has experts: of one more candidate than are spared, one is not.
    pub(crate) fn are_among(&self, layers: u64) -> bool {
        let candidates = (0..=self.dense.len() as u64).map(|n| (n + 1).saturating_mul(self.step) - 1);
        candidates.take_while(|index| *index < layers).any(|index| self.at(index))
    }

    /// Whether layer `index` has experts.
    pub(crate) fn at(&self, index: u64) -> bool {
        (index + 1).is_multiple_of(self.step) && !self.dense.contains(&index)
    }
}

/// The router's logits of each layer, collected in a forward pass that wants them.
pub(super) type RouterLogits = Rc<RefCell<Option<Vec<Tensor>>>>;

/// A layer's experts.
pub(super) struct Mixture {
    gate: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    per_token: u64,
    router: Router,
    activation: Activation,
    logits: RouterLogits,
}

impl Mixture {
    pub(super) fn build(
        config: &DecoderConfig,
        experts: &Experts,
        build: &mut Builder,
        logits: &RouterLogits,
    ) -> Self {
        let (hidden, intermediate, count) = (config.hidden, experts.intermediate, experts.count);
        let gate =
            |build: &mut Builder| build.module("gate", |build| build.parameter("weight", &[count, hidden]));
        let weights = |build: &mut Builder| {
            build.module("experts", |build| {
                let up = build.parameter("gate_up_proj", &[count, 2 * intermediate, hidden]);
                (up, build.parameter("down_proj", &[count, hidden, intermediate]))
            })
        };
        build.module("mlp", |build| {
            let (gate, (gate_up_proj, down_proj)) = match experts.router {
                Router::Mixtral { .. } => (gate(build), weights(build)),
                Router::Qwen3 { .. } => {
                    let weights = weights(build);
                    (gate(build), weights)
                }
            };
            Self {
                gate,
                gate_up_proj,
                down_proj,
                per_token: experts.per_token,
                router: experts.router,
                activation: config.activation,
                logits: Rc::clone(logits),
            }
        })
    }

    pub(super) fn forward(&self, hidden: &Tensor) -> Tensor {
        let session = hidden.session();
        session.scoped("mlp", || {
            let mut hidden = hidden.clone();
            if self.router == (Router::Mixtral { jitter: true }) {
                let noise = hidden.like("jitter");
                hidden = hidden.mul_in_place(&noise);
                release!(noise);
            }
            let shape = hidden.shape();
            let tokens = hidden.view(hidden.rows());
            let (logits, weights, places) = session.scoped("gate", || self.route(&tokens));
            let out = session.scoped("experts", || self.run_experts(&tokens, &weights, &places));
            let out = out.reshape(shape);
            release!(hidden, tokens, logits, weights, places);
            out
        })
    }

    /// The router: logits (t, e), and weights and places (t, k) of each token's experts.
    fn route(&self, tokens: &Tensor) -> (Tensor, Tensor, Tensor) {
        let logits = tokens.reshape(tokens.rows()).linear(&self.gate.on_device(), None);
        let probabilities = match self.router {
            Router::Mixtral { .. } => logits.to(Dtype::Fp32).softmax(None),
            Router::Qwen3 { .. } => logits.softmax(Some(Dtype::Fp32)),
        };
        let (mut weights, places) = probabilities.top_k(self.per_token);
        if !matches!(self.router, Router::Qwen3 { normalized: false }) {
            weights = weights.div_in_place(&weights.sum_dim(-1, true));
        }
        if matches!(self.router, Router::Qwen3 { .. }) {
            weights = weights.to(logits.dtype());
        }
        if let Some(collected) = self.logits.borrow_mut().as_mut() {
            collected.push(logits.clone());
        }
        release!(probabilities);
        (logits, weights, places)
    }

    /// `grouped_mm_experts_forward`: tokens sorted by expert, two grouped products, and back in order.
    fn run_experts(&self, tokens: &Tensor, weights: &Tensor, places: &Tensor) -> Tensor {
        let session = tokens.session();
        let count = self.gate.size(0);
        let [rows, width] = [tokens.size(0), tokens.size(1)];
        let chosen = rows * self.per_token;
        let weights = weights.reshape([chosen]);
        let places = places.reshape([chosen]);
        let (sorted, order) = places.sort();
        let token_of = integers(session, "token_of", &[chosen]);
        let selected = tokens.rows_at(&token_of);
        release!(token_of);
        let weights_sorted = weights.rows_at(&order);
        let (small, counts, ends) = ends_of_groups(session, chosen, count);
        let mut experts = self.gate_up_proj.on_device();
        let mut out = grouped_linear(&selected, &experts, &ends);
        out = self.apply_gate(&out);
        experts = self.down_proj.on_device();
        out = grouped_linear(&out, &experts, &ends);
        let mut weighted = out.mul(&weights_sorted.unsqueeze(1));
        let back = integers(session, "inverse_order", &[chosen]);
        drop(integers(session, "order_range", &[chosen]));
        weighted.rebind(weighted.rows_at(&back));
        let sum = weighted.view([rows, self.per_token, width]).sum_dim(1, false);
        let result = sum.to(tokens.dtype());
        release!(weights, places, sorted, order, selected, weights_sorted);
        release!(small, counts, ends, experts, out, weighted, back, sum);
        result
    }

    fn apply_gate(&self, joined: &Tensor) -> Tensor {
        let parts = joined.split(-1, joined.size(-1) / 2);
        let active = joined.session().scoped("act_fn", || self.activation.forward(&parts[0]));
        let out = active.mul(&parts[1]);
        release!(active, parts);
        out
    }
}

/// `_grouped_linear`: rows sorted by expert times the experts' weights (e, out, in), in the weights' dtype.
fn grouped_linear(rows: &Tensor, weight: &Tensor, ends: &Tensor) -> Tensor {
    let transposed = weight.transpose(-2, -1);
    let rows = rows.to(weight.dtype());
    if rows.session().groups_products() {
        rows.grouped_mm(&transposed, ends)
    } else {
        rows.grouped_mm_by_loop(&transposed, ends)
    }
}

/// Where the rows of each expert end: expert numbers as int32, their counts and the running sum.
fn ends_of_groups(session: &Rc<Session>, chosen: u64, count: u64) -> (Tensor, Tensor, Tensor) {
    let int32 = |what, size: u64| Tensor::empty(session, what, [size], Dtype::Int32);
    let small = int32("expert_ids", chosen);
    let counts = int32("tokens_per_expert", count);
    let ends = int32("offsets", count);
    let workspace = session.scan_workspace(count, Dtype::Int32);
    drop(Tensor::empty(session, "offsets.scan", [workspace], Dtype::Uint8));
    (small, counts, ends)
}

/// `load_balancing_loss_func` of the router's logits.
pub(super) fn balance(session: &Rc<Session>, logits: &[Tensor], experts: &Experts) -> Tensor {
    session.scoped("loss.load_balancing", || {
        let sums = |what| Tensor::empty(session, what, [experts.count], Dtype::Fp32);
        let mut tokens = sums("tokens_per_expert");
        let mut probabilities = sums("router_prob");
        let mut routing = None;
        let mut chosen = None;
        for gate in logits {
            let weights = gate.softmax(None);
            routing = Some(weights.clone());
            let (values, places) = weights.top_k(experts.per_token);
            chosen = Some((values, places.clone()));
            let small = Tensor::empty(session, "expert_ids", [places.numel()], Dtype::Int32);
            let counts = Tensor::empty(session, "histogram", [experts.count], Dtype::Int32);
            release!(small);
            let sum = tokens.add(&counts);
            release!(counts);
            tokens = sum;
            let wide = weights.to(Dtype::Fp32);
            let sum = wide.sum_dim(0, false);
            release!(wide);
            let total = probabilities.add(&sum);
            release!(sum);
            probabilities = total;
        }
        let share = tokens.div_scalar();
        let probability = probabilities.div_scalar();
        let product = share.mul(&probability.unsqueeze(0));
        let overall = product.sum_all();
        release!(product);
        let out = overall.mul_scalar();
        release!(tokens, probabilities, routing, chosen, share, probability, overall);
        out
    })
}
