//! Low-rank adapters, as peft puts them beside the linear layers of a frozen model.

use engine::{Tensor, release};
use ledger::Dtype;

use crate::contradiction::Contradiction;
use crate::nn::Builder;
use crate::setup::Setup;

/// The word for every linear layer but the head.
pub const ALL_LINEAR: &str = "all-linear";

/// The layers that peft adapts where it is not told which: attention's queries and values, under the names
/// of the families here.
const USUAL_TARGETS: &[&str] = &["q_proj", "v_proj", "c_attn"];

/// Low-rank adapters on a frozen model.
#[derive(Clone, Debug, PartialEq)]
pub struct Lora {
    /// The inner width of an adapter.
    pub rank: u64,
    /// Module names, or their last parts; [`ALL_LINEAR`] for every linear layer but the head. Empty: what peft
    /// adapts where it is not told.
    pub targets: Vec<String>,
    /// The probability with which an adapter's input is dropped.
    pub dropout: f64,
    /// The dtype of the adapters; peft makes them fp32 unless it is told not to.
    pub dtype: Dtype,
}

impl Lora {
    /// Adapters of `rank` that are otherwise peft's usual ones.
    pub const fn of_rank(rank: u64) -> Self {
        Self { rank, targets: Vec::new(), dropout: 0.0, dtype: Dtype::Fp32 }
    }

    /// Whether every linear layer is adapted, those inside a parameter of several among them.
    pub(crate) fn adapts_all(&self) -> bool {
        self.targets.iter().any(|target| target == ALL_LINEAR)
    }

    /// The target that names the module `path`, which is a linear layer and perhaps the head.
    pub(crate) fn target_of(&self, path: &str, head: bool) -> Option<&str> {
        let names = |target: &str| {
            path.strip_suffix(target).is_some_and(|before| before.is_empty() || before.ends_with('.'))
        };
        if self.targets.is_empty() {
            return USUAL_TARGETS.iter().copied().find(|target| names(target));
        }
        let mut given = self.targets.iter().map(String::as_str);
        given.find(|target| names(target) || (*target == ALL_LINEAR && !head))
    }
}

/// Why `setup` cannot freeze and adapt what it says, where it cannot; `mlp` tells whether that is the model.
pub(crate) fn contradiction(setup: &Setup, mlp: bool) -> Option<Contradiction> {
    let no = |settings: &[&'static str], sentence: &str| {
        Some(Contradiction { settings: settings.to_vec(), sentence: sentence.to_owned() })
    };
    if setup.quantize.is_some() && mlp {
        return no(&["quantize"], "`--quantize` is of models of transformers, not of an mlp");
    }
    if setup.quantize.is_some() && setup.lora.is_none() {
        return no(&["quantize"], "`--quantize` needs `--lora-rank`: weights of 4 bits are not trained");
    }
    if setup.prepare_kbit && setup.quantize.is_none() {
        return no(&["prepare-kbit"], "`--prepare-kbit` is of weights of 4 bits: it needs `--quantize`");
    }
    if setup.lora.is_some() && !setup.freeze.is_empty() {
        return no(
            &["freeze", "lora-rank"],
            "`--freeze`: with `--lora-rank` everything but the adapters is frozen",
        );
    }
    None
}

/// The adapter of one linear layer: `lora.Linear` of peft without its base layer.
pub(crate) struct Adapter {
    a: Tensor,
    b: Tensor,
    dropout: f64,
}

impl Adapter {
    /// An adapter from `inputs` to `outputs`, made after the layer's own parameters.
    pub(crate) fn new(build: &mut Builder, lora: &Lora, inputs: u64, outputs: u64) -> Self {
        let mut matrix = |name: &str, shape: [u64; 2]| {
            build.module(name, |build| build.trainable("weight", &shape, lora.dtype))
        };
        let a = matrix("lora_A", [lora.rank, inputs]);
        let b = matrix("lora_B", [outputs, lora.rank]);
        Self { a, b, dropout: lora.dropout }
    }

    /// What the adapter adds to its layer's result on an input of its own dtype.
    fn delta(&self, input: &Tensor) -> Tensor {
        let session = input.session();
        let dropped = session.scoped("lora_dropout", || input.dropout(self.dropout));
        let narrow = session.scoped("lora_A", || dropped.linear(&self.a, None));
        release!(dropped);
        let wide = session.scoped("lora_B", || narrow.linear(&self.b, None));
        release!(narrow);
        let scaled = wide.mul_scalar();
        release!(wide);
        scaled
    }

    /// The result of the base layer on `input`, with this adapter's part added.
    pub(crate) fn forward(&self, input: &Tensor, mut result: Tensor) -> Tensor {
        let dtype = result.dtype();
        let input = input.to(self.a.dtype());
        let delta = self.delta(&input);
        // Where a recomputation has ended within, the names of the call die in their order.
        if input.session().has_stopped() {
            release!(input, result);
            return delta;
        }
        let sum = result.add(&delta);
        release!(delta);
        result = sum;
        result = result.to(dtype);
        release!(input);
        result
    }

    /// The same beside a layer of 4 bits, whose result is copied first and which leaves casts to autocast.
    pub(crate) fn forward_beside_4bit(&self, input: &Tensor, mut result: Tensor) -> Tensor {
        let copy = result.copy();
        result = copy;
        let mut input = input.clone();
        let dtype = input.session().autocast_dtype().is_none().then(|| result.dtype());
        if dtype.is_some() {
            input = input.to(self.a.dtype());
        }
        let mut delta = self.delta(&input);
        if input.session().has_stopped() {
            release!(input, result);
            return delta;
        }
        if let Some(dtype) = dtype {
            delta = delta.to(dtype);
        }
        let sum = result.add(&delta);
        result = sum;
        release!(input, delta);
        result
    }
}
