//! cuDNN's recurrent networks: where in one buffer each weight lies, which PyTorch asks before it trains one.

use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::{Mutex, MutexGuard, OnceLock};

use crate::ffi::{Handle, Out, SUCCESS};

/// What `cudnnSetRNNDescriptor_v8` says of a network.
#[derive(Clone, Copy)]
struct Network {
    cell: c_int,
    has_bias: bool,
    directions: usize,
    kind: c_int,
    input: usize,
    hidden: usize,
    projection: usize,
    layers: usize,
}

/// A weight's place: offset in elements, rows and columns.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Weight {
    offset: usize,
    rows: usize,
    columns: usize,
}

impl Network {
    fn gates(self) -> usize {
        match self.cell {
            2 => 4, // LSTM
            3 => 3, // GRU
            _ => 1,
        }
    }

    fn is_projected(self) -> bool {
        self.projection != 0 && self.projection != self.hidden
    }

    /// Rows and columns of the matrices of one layer and direction, in the order of their numbers.
    fn matrices(self, pseudo_layer: usize) -> Vec<(usize, usize)> {
        let output = if self.is_projected() { self.projection } else { self.hidden };
        let layer = pseudo_layer / self.directions;
        let input = if layer == 0 { self.input } else { output * self.directions };
        let gates = self.gates();
        let mut all = vec![(self.hidden, input); gates];
        all.extend(vec![(self.hidden, output); gates]);
        if self.is_projected() {
            all.push((self.projection, self.hidden));
        }
        all
    }

    fn biases(self) -> usize {
        if self.has_bias { 2 * self.gates() } else { 0 }
    }

    /// Every matrix of every layer, then every bias.
    fn matrix_and_bias(self, pseudo_layer: usize, number: usize) -> (Option<Weight>, Option<Weight>) {
        let size = |layer| -> usize { self.matrices(layer).iter().map(|(r, c)| r * c).sum() };
        let pseudo_layers = self.layers * self.directions;
        let here = self.matrices(pseudo_layer);
        let start: usize = (0..pseudo_layer).map(size).sum();
        let before: usize = here.iter().take(number).map(|(r, c)| r * c).sum();
        let matrix =
            here.get(number).map(|&(rows, columns)| Weight { offset: start + before, rows, columns });
        let biases: usize = (0..pseudo_layers).map(size).sum();
        let bias = (number < self.biases()).then(|| Weight {
            offset: biases + (pseudo_layer * self.biases() + number) * self.hidden,
            rows: self.hidden,
            columns: 1,
        });
        (matrix, bias)
    }

    fn elements(self) -> usize {
        let pseudo_layers = self.layers * self.directions;
        let matrices: usize = (0..pseudo_layers).flat_map(|l| self.matrices(l)).map(|(r, c)| r * c).sum();
        matrices + pseudo_layers * self.biases() * self.hidden
    }

    fn element_bytes(self) -> usize {
        match self.kind {
            1 => 8,     // double
            2 | 9 => 2, // half, bfloat16
            _ => 4,
        }
    }
}

/// The descriptors in use, by handle.
#[derive(Default)]
struct Descriptors {
    networks: HashMap<Handle, Network>,
    weights: HashMap<Handle, (c_int, Option<Weight>)>,
}

fn descriptors() -> MutexGuard<'static, Descriptors> {
    static ALL: OnceLock<Mutex<Descriptors>> = OnceLock::new();
    ALL.get_or_init(Mutex::default).lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

// SAFETY of every `no_mangle` below: each name is cuDNN's own, is exported once, and has the parameters of
// its C declaration as far as it looks at them.

#[unsafe(no_mangle)]
extern "C" fn cudnnSetRNNDescriptor_v8(
    rnn: Handle,
    _algorithm: c_int,
    cell: c_int,
    bias: c_int,
    direction: c_int,
    _input_mode: c_int,
    kind: c_int,
    _precision: c_int,
    _math: c_int,
    input: i32,
    hidden: i32,
    projection: i32,
    layers: i32,
) -> c_int {
    let network = Network {
        cell,
        has_bias: bias != 0,
        directions: if direction == 0 { 1 } else { 2 },
        kind,
        input: input as usize,
        hidden: hidden as usize,
        projection: projection as usize,
        layers: layers as usize,
    };
    descriptors().networks.insert(rnn, network);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cudnnDestroyRNNDescriptor(rnn: Handle) -> c_int {
    descriptors().networks.remove(&rnn);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cudnnGetRNNWeightSpaceSize(_handle: Handle, rnn: Handle, bytes: Out<usize>) -> c_int {
    let known = descriptors().networks.get(&rnn).copied();
    bytes.set(known.map_or(0, |network| network.elements() * network.element_bytes()));
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cudnnGetRNNWeightParams(
    _handle: Handle,
    rnn: Handle,
    pseudo_layer: i32,
    _bytes: usize,
    weights: Handle,
    number: i32,
    matrix: Handle,
    matrix_at: Out<Handle>,
    bias: Handle,
    bias_at: Out<Handle>,
) -> c_int {
    let mut all = descriptors();
    let Some(&network) = all.networks.get(&rnn) else { return SUCCESS };
    let found = network.matrix_and_bias(pseudo_layer as usize, number as usize);
    for (descriptor, at, weight) in [(matrix, matrix_at, found.0), (bias, bias_at, found.1)] {
        at.set(weight.map_or(0, |weight| weights + weight.offset * network.element_bytes()));
        all.weights.insert(descriptor, (network.kind, weight));
    }
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cudnnGetTensorNdDescriptor(
    tensor: Handle,
    _asked: c_int,
    kind: Out<c_int>,
    dimensions: Out<c_int>,
    sizes: Out<c_int>,
    strides: Out<c_int>,
) -> c_int {
    let known = descriptors().weights.get(&tensor).copied();
    let (element, weight) = known.unwrap_or((0, None));
    kind.set(element);
    // A weight that is not there has no dimensions.
    dimensions.set(if weight.is_some() { 3 } else { 0 });
    if let Some(Weight { rows, columns, .. }) = weight {
        for (index, (size, stride)) in
            [(1, rows * columns), (rows, columns), (columns, 1)].into_iter().enumerate()
        {
            sizes.set_at(index, size as c_int);
            strides.set_at(index, stride as c_int);
        }
    }
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cudnnDestroyTensorDescriptor(tensor: Handle) -> c_int {
    descriptors().weights.remove(&tensor);
    SUCCESS
}

#[cfg(test)]
mod tests {
    use super::{Network, Weight};

    const LSTM: Network = Network {
        cell: 2,
        has_bias: true,
        directions: 2,
        kind: 0,
        input: 64,
        hidden: 128,
        projection: 128,
        layers: 2,
    };

    #[test]
    fn the_buffer_holds_what_pytorch_counts_as_parameters() {
        // Two layers, two directions: four gates of input and recurrent weights and two biases each.
        let layer = |input: usize| 4 * (128 * input + 128 * 128 + 2 * 128);
        assert_eq!(LSTM.elements(), 2 * layer(64) + 2 * layer(256));
    }

    #[test]
    fn weights_follow_each_other_and_biases_come_last() {
        let mut end = 0;
        for layer in 0..4 {
            for number in 0..8 {
                let (matrix, _) = LSTM.matrix_and_bias(layer, number);
                let matrix = matrix.unwrap();
                assert_eq!(matrix.offset, end);
                end += matrix.rows * matrix.columns;
            }
        }
        let (_, first) = LSTM.matrix_and_bias(0, 0);
        assert_eq!(first, Some(Weight { offset: end, rows: 128, columns: 1 }));
        let (_, last) = LSTM.matrix_and_bias(3, 7);
        assert_eq!(last.unwrap().offset + 128, LSTM.elements());
    }
}
