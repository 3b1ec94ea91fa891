//! What a stack says was at work when a request found no room.

use evidence::oom::Frame;
use ledger::Category;

/// What was at work.
#[derive(Clone, Copy, Debug)]
pub(super) struct Work {
    /// In words.
    pub(super) what: &'static str,
    /// The phase of the training step, where it tells.
    pub(super) phase: Option<&'static str>,
    /// What it makes objects for.
    categories: &'static [Category],
    /// What their names have one of; empty: anything.
    names: &'static [&'static str],
}

/// A rule: what file, function or line of a call have one of, and what that says.
struct Rule {
    files: &'static [&'static str],
    functions: &'static [&'static str],
    code: &'static [&'static str],
    work: Work,
}

const fn work(
    what: &'static str,
    phase: Option<&'static str>,
    categories: &'static [Category],
    names: &'static [&'static str],
) -> Work {
    Work { what, phase, categories, names }
}

use Category::{
    Activation, Buffer, CommunicationBuffer, Gradient, MasterWeight, OptimizerState, Parameter, Temporary,
};

const OPTIMIZERS: &[&str] = &["/optim/", "/optimizers/", "deepspeed/ops/", "optimizer"];

/// The rules, the narrower first. Of a stack the innermost call that one of them knows decides.
const RULES: &[Rule] = &[
    Rule {
        files: &[],
        functions: &["all_gather", "allgather", "unshard", "_rebuild_full"],
        code: &[
            "all_gather(",
            "all_gather_into_tensor(",
            "_all_gather_base(",
            "allgather_fn(",
            "allgather_params(",
        ],
        work: work(
            "a sharded parameter is put together (all_gather)",
            None,
            &[Parameter, CommunicationBuffer],
            &[],
        ),
    },
    Rule {
        files: &["nn/parallel/distributed.py"],
        functions: &["__init__", "_ddp_init_helper"],
        code: &[],
        work: work(
            "the reducer of DDP makes its gradient buckets",
            Some("load"),
            &[CommunicationBuffer, Gradient],
            &[],
        ),
    },
    Rule {
        files: &[],
        functions: &["Reducer"],
        code: &["Reducer("],
        work: work(
            "the reducer of DDP makes its gradient buckets",
            None,
            &[CommunicationBuffer, Gradient],
            &[],
        ),
    },
    Rule {
        files: &[],
        functions: &["reduce_scatter", "all_reduce", "allreduce", "reduce_gradients", "average_tensor"],
        code: &["reduce_scatter(", "all_reduce(", "allreduce("],
        work: work(
            "gradients are reduced over the ranks",
            Some("backward"),
            &[CommunicationBuffer, Gradient],
            &[],
        ),
    },
    Rule {
        files: &[],
        functions: &["flatten", "_flatten_dense_tensors", "flatten_dense_tensors_aligned"],
        code: &["_flatten_dense_tensors(", "flatten_dense_tensors"],
        work: work(
            "tensors are put together in one flat buffer",
            None,
            &[Parameter, MasterWeight, Gradient, CommunicationBuffer, Temporary],
            &[],
        ),
    },
    Rule {
        files: &[],
        functions: &[
            "cross_entropy",
            "nll_loss",
            "log_softmax",
            "fixed_cross_entropy",
            "ForCausalLMLoss",
            "loss_function",
        ],
        code: &["cross_entropy(", "nll_loss(", "logits.float()", "log_softmax("],
        work: work("the loss", Some("forward"), &[Activation, Temporary], &["loss", "lm_head", "logits"]),
    },
    Rule {
        files: OPTIMIZERS,
        functions: &["_init_group", "initialize_optimizer_states", "init_state"],
        code: &[],
        work: work("the optimizer makes its state", Some("update"), &[OptimizerState], &[]),
    },
    Rule {
        files: OPTIMIZERS,
        functions: &["step", "_single_tensor", "_multi_tensor", "_fused", "adam", "lamb", "sgd"],
        code: &["sqrt(", "addcdiv", "_foreach_"],
        work: work("the optimizer's step, in a temporary of it", Some("update"), &[Temporary], &[]),
    },
    Rule {
        files: &[],
        functions: &["clip_grad", "_unscale_grads_", "unscale_"],
        code: &[],
        work: work("gradients are clipped or unscaled", Some("update"), &[Temporary], &[]),
    },
    Rule {
        files: &["torch/autograd/", "torch/_tensor.py"],
        functions: &["backward", "_engine_run_backward", "grad"],
        code: &[],
        work: work("the backward pass", Some("backward"), &[Gradient, Temporary, Activation], &[]),
    },
    Rule {
        files: &[],
        functions: &["scaled_dot_product_attention", "eager_attention_forward", "sdpa_attention_forward"],
        code: &["scaled_dot_product_attention("],
        work: work("attention", Some("forward"), &[Activation, Temporary], &["attn", "attention"]),
    },
    Rule {
        files: &["nn/modules/module.py", "nn/init.py", "modeling_utils.py"],
        functions: &["_apply", "load_state_dict", "from_pretrained", "convert", "cuda", "_load"],
        code: &[],
        work: work("the model is made, moved or loaded", Some("load"), &[Parameter, Buffer], &[]),
    },
    Rule {
        files: &["nn/modules/"],
        functions: &["forward", "_call_impl", "_wrapped_call_impl"],
        code: &[],
        work: work("a module's forward pass", Some("forward"), &[Activation, Temporary], &[]),
    },
];

impl Work {
    /// What `stack`, outermost call first, says; none where it says nothing.
    pub(super) fn of(stack: &[Frame]) -> Option<Self> {
        stack.iter().rev().find_map(|frame| RULES.iter().find(|rule| rule.is_of(frame)).map(|rule| rule.work))
    }

    /// Whether objects of this name, purpose and phase are what it makes.
    pub(super) fn makes(&self, name: &str, category: Option<Category>, phase: Option<&str>) -> bool {
        let Some(category) = category else { return false };
        let named = self.names.is_empty() || self.names.iter().any(|part| name.contains(part));
        let then = self.phase.zip(phase).is_none_or(|(here, there)| here == there);
        named && then && self.categories.contains(&category)
    }
}

impl Rule {
    fn is_of(&self, frame: &Frame) -> bool {
        let has = |text: &str, parts: &[&str]| parts.iter().any(|part| text.contains(part));
        let file = frame.file.replace('\\', "/");
        let in_file = self.files.is_empty() || has(&file, self.files);
        let code = frame.code.as_deref().unwrap_or_default();
        in_file && (has(&frame.function, self.functions) || has(code, self.code))
    }
}
