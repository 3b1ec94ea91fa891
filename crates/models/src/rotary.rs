//! Rotary position embedding, as transformers computes and applies it.

use std::cell::RefCell;
use std::rc::Rc;

use engine::{Session, Tensor, cat, release};
use ledger::{Category, Dtype};

use crate::causal_lm::integers;
use crate::nn::Builder;

/// The rotary embedding of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rotary {
    /// The part of a head that turns, an even number.
    pub(crate) size: u64,
    pub(crate) scaling: RopeScaling,
    /// Different frequencies, for as many types of layers.
    pub(crate) types: usize,
    /// Angles stay fp32, and what they turn is cast back.
    pub(crate) fp32: bool,
    /// A part of each head is looked for that does not turn, even where it is empty.
    pub(crate) partial: bool,
}

/// What a pass does about the frequencies of the angles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RopeScaling {
    /// They are settled when the model is made.
    Fixed,
    /// `dynamic`: it makes others where the sequence is longer than `positions` and any before.
    Dynamic { positions: u64 },
    /// `longrope`: it picks one of two sets by the length of the sequence.
    Long,
}

/// The module.
pub(crate) struct RotaryEmbedding {
    rotary: Rotary,
    /// The frequencies for long sequences, made by the first pass.
    long: RefCell<Option<Tensor>>,
    dynamic: RefCell<Dynamic>,
}

/// The frequencies of `dynamic`, which do not stay those that the model was made with, and the longest sequence that
/// they are for, where it is longer than the model's.
#[derive(Default)]
struct Dynamic {
    frequencies: Option<Tensor>,
    longest: Option<(u64, Tensor)>,
}

/// Cosines and sines (1, s, d).
#[derive(Clone)]
pub(crate) struct Angles {
    pub(crate) cos: Tensor,
    pub(crate) sin: Tensor,
}

impl Angles {
    pub(crate) fn of(cos: &Tensor, sin: &Tensor) -> Self {
        Self { cos: cos.clone(), sin: sin.clone() }
    }
}

impl Rotary {
    /// What Llama has: whole heads of `size` turn, by settled frequencies.
    pub(crate) const fn whole(size: u64) -> Self {
        Self { size, scaling: RopeScaling::Fixed, types: 1, fp32: false, partial: false }
    }

    pub(crate) fn build(&self, build: &mut Builder) -> RotaryEmbedding {
        let shape = [self.size / 2];
        let mut dynamic = Dynamic::default();
        build.module("rotary_emb", |build| {
            for _ in 0..self.types {
                if self.scaling == RopeScaling::Fixed || self.scaling == RopeScaling::Long {
                    build.buffer("inv_freq", &shape, Dtype::Fp32);
                } else {
                    let session = &build.session;
                    let buffer =
                        Tensor::of_category(session, "inv_freq", Category::Buffer, shape, Dtype::Fp32);
                    dynamic.frequencies = Some(buffer);
                }
                build.buffer("original_inv_freq", &shape, Dtype::Fp32);
            }
        });
        RotaryEmbedding { rotary: *self, long: RefCell::default(), dynamic: RefCell::new(dynamic) }
    }

    /// `apply_rotary_pos_emb`: queries and keys (b, heads, s, d), turned.
    pub(crate) fn apply(&self, query: &Tensor, key: &Tensor, angles: &Angles) -> (Tensor, Tensor) {
        query.session().scoped("rotary", || {
            let cos = angles.cos.unsqueeze(1);
            let sin = angles.sin.unsqueeze(1);
            if self.partial {
                return self.apply_to_part(query, key, &cos, &sin);
            }
            let turned = (rotate(query, &cos, &sin), rotate(key, &cos, &sin));
            if self.fp32 { (turned.0.to(query.dtype()), turned.1.to(key.dtype())) } else { turned }
        })
    }

    fn apply_to_part(&self, query: &Tensor, key: &Tensor, cos: &Tensor, sin: &Tensor) -> (Tensor, Tensor) {
        let parts =
            |x: &Tensor| (x.narrow(-1, 0, self.size), x.narrow(-1, self.size, x.size(-1) - self.size));
        let (query_part, query_rest) = parts(query);
        let (key_part, key_rest) = parts(key);
        let join = |part: &Tensor, rest: &Tensor| {
            let turned = rotate(part, cos, sin);
            cat(&[&turned, rest], -1)
        };
        (join(&query_part, &query_rest), join(&key_part, &key_rest))
    }
}

impl RotaryEmbedding {
    /// Cosines and sines for each type of layer in `dtype`, computed in fp32.
    pub(crate) fn angles(&self, session: &Rc<Session>, length: u64, dtype: Dtype) -> Vec<Angles> {
        let one = |_| session.scoped("rotary_emb", || self.angles_of_type(session, length, dtype));
        (0..self.rotary.types).map(one).collect()
    }

    fn angles_of_type(&self, session: &Rc<Session>, length: u64, dtype: Dtype) -> Angles {
        match self.rotary.scaling {
            RopeScaling::Fixed => {}
            RopeScaling::Dynamic { positions } => self.follow_length(session, length, positions),
            RopeScaling::Long => self.pick_frequencies(session),
        }
        let size = self.rotary.size;
        let fp32 = |what, size| Tensor::empty(session, what, [1, length, size], Dtype::Fp32);
        let positions = fp32("positions", 1);
        let frequencies = fp32("freqs", size / 2);
        release!(positions);
        let embedding = fp32("emb", size);
        let of_embedding = |what, scaled| {
            let plain = fp32(what, size);
            let result = fp32(scaled, size);
            release!(plain);
            result
        };
        let cos = of_embedding("cos", "cos_scaled");
        let sin = of_embedding("sin", "sin_scaled");
        let dtype = if self.rotary.fp32 { Dtype::Fp32 } else { dtype };
        let angles = Angles { cos: cos.to(dtype), sin: sin.to(dtype) };
        release!(frequencies, embedding, cos, sin);
        angles
    }

    /// `dynamic_frequency_update`: other frequencies for a sequence longer than any before, those of the model again
    /// for one that it knows.
    fn follow_length(&self, session: &Rc<Session>, length: u64, positions: u64) {
        let question = |what| drop(Tensor::empty(session, what, [], Dtype::Bool));
        let mut state = self.dynamic.borrow_mut();
        let length_tensor = sequence_length(session);
        let known = state.longest.clone();
        question("is_longer");
        if length > known.as_ref().map_or(positions, |(longest, _)| *longest) {
            state.frequencies = Some(self.frequencies_for_length(session));
            state.longest = Some((length, length_tensor.clone()));
        }
        question("is_shorter");
        if length < positions && state.longest.is_some() {
            question("was_longer");
            *state = Dynamic::default();
        }
        release!(length_tensor, known);
    }

    /// `_compute_dynamic_ntk_parameters`.
    fn frequencies_for_length(&self, session: &Rc<Session>) -> Tensor {
        let scalar = |what, dtype| Tensor::empty(session, what, [], dtype);
        let vector = |what| Tensor::empty(session, what, [self.rotary.size / 2], Dtype::Fp32);
        let positions = scalar("positions", Dtype::Int64);
        let longest = scalar("longest", Dtype::Int64);
        release!(positions);
        let mut base = scalar("base", Dtype::Fp32);
        for _ in 0..4 {
            base = scalar("base", Dtype::Fp32);
        }
        let range = vector("frequency_range");
        let exponents = vector("exponents");
        release!(range);
        let powers = vector("powers");
        release!(exponents);
        let reciprocals = vector("reciprocals");
        let frequencies = vector("inv_freq");
        release!(reciprocals, powers, longest, base);
        frequencies
    }

    /// `longrope_frequency_update`: the first pass computes the frequencies for long sequences, each one
    /// copies those it wants into the buffer.
    fn pick_frequencies(&self, session: &Rc<Session>) {
        let fp32 = |what| Tensor::empty(session, what, [self.rotary.size / 2], Dtype::Fp32);
        let length = sequence_length(session);
        self.long.borrow_mut().get_or_insert_with(|| {
            let factors = fp32("long_factors");
            let range = integers(session, "frequency_range", &[self.rotary.size / 2]);
            let floats = fp32("frequency_range");
            release!(range);
            let exponents = fp32("exponents");
            release!(floats);
            let powers = fp32("powers");
            drop(integers(session, "base", &[]));
            let products = fp32("periods");
            release!(powers);
            let reciprocals = fp32("reciprocals");
            let frequencies = fp32("long_inv_freq");
            release!(reciprocals, products, factors, exponents);
            frequencies
        });
        let is_long = Tensor::empty(session, "is_long", [], Dtype::Bool);
        let picked = fp32("inv_freq");
        release!(is_long, length, picked);
    }
}

/// `torch.max(position_ids) + 1`.
fn sequence_length(session: &Rc<Session>) -> Tensor {
    let last = integers(session, "last_position", &[]);
    let length = integers(session, "sequence_length", &[]);
    release!(last);
    length
}

/// `rotate_half`: the halves of the last dimension exchanged, the second negated.
fn rotate_half(x: &Tensor) -> Tensor {
    let half = x.size(-1) / 2;
    let x1 = x.narrow(-1, 0, half);
    let x2 = x.narrow(-1, half, half);
    let negative = x2.neg();
    let out = cat(&[&negative, &x1], -1);
    release!(negative, x1, x2);
    out
}

/// Rotary position embedding of one (b, heads, s, d) tensor.
fn rotate(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Tensor {
    let direct = x.mul(cos);
    let rotated = rotate_half(x);
    let crossed = rotated.mul(sin);
    release!(rotated);
    let out = direct.add(&crossed);
    release!(direct, crossed);
    out
}
