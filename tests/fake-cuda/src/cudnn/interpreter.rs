//! Computes a graph op by op: elements are f32, sums have a fixed order, and each result is rounded
//! to the type of its tensor.
#![expect(unsafe_code, reason = "tensors are given by address")]

use std::collections::BTreeMap;

use super::graph::{
    Action, Axes, Data, Fold, Graph, Mode, Operation, Place, Tensor, offset, packed,
};

/// The elements of the tensors that are known so far, by number, each without gaps.
#[derive(Debug)]
pub(super) struct Interpreter<'a> {
    addresses: &'a BTreeMap<u64, usize>,
    known: BTreeMap<u64, Vec<f32>>,
    /// Whether the sums of a matmul begin with the first element, else with the last.
    ascending: bool,
}

/// All indices of an array without gaps, in the order of its elements.
fn indices(sizes: Axes) -> impl Iterator<Item = Axes> {
    let steps = packed(sizes);
    let count: usize = sizes.iter().product();
    (0..count).map(move |i| std::array::from_fn(|axis| i / steps[axis] % sizes[axis]))
}

impl<'a> Interpreter<'a> {
    pub(super) fn new(
        addresses: &'a BTreeMap<u64, usize>,
        values: BTreeMap<u64, f32>,
        ascending: bool,
    ) -> Self {
        let known = values.into_iter().map(|(number, value)| (number, vec![value])).collect();
        Self { addresses, known, ascending }
    }

    /// Computes `graph`. The addresses of its tensors were checked.
    pub(super) fn run(mut self, graph: &Graph) {
        for operation in &graph.operations {
            for tensor in &operation.inputs {
                if !self.known.contains_key(&tensor.number) {
                    let read = self.read(tensor);
                    self.known.insert(tensor.number, read);
                }
            }
            let output = &operation.output;
            let mut result = match operation.action {
                Action::Pointwise(mode) => self.pointwise(mode, operation),
                Action::Matmul => self.matmul(operation),
                Action::Reduction(fold) => self.reduction(fold, operation),
                Action::Reshape => self.reshape(operation),
            };
            if let Data::Number(float) = output.data {
                result.iter_mut().for_each(|value| *value = float.rounded(*value));
            }
            if output.place == Place::Memory {
                self.write(output, &result);
            }
            self.known.insert(output.number, result);
        }
    }

    /// The elements of a tensor in memory.
    fn read(&self, tensor: &Tensor) -> Vec<f32> {
        let (address, Data::Number(float)) = (self.addresses[&tensor.number], tensor.data) else {
            unreachable!("a tensor in memory has numbers")
        };
        // SAFETY: the tensor's memory was checked.
        let load = |index| unsafe { float.load(address, offset(index, tensor.strides)) };
        indices(tensor.sizes).map(load).collect()
    }

    fn write(&self, tensor: &Tensor, elements: &[f32]) {
        let (address, Data::Number(float)) = (self.addresses[&tensor.number], tensor.data) else {
            unreachable!("a tensor in memory has numbers")
        };
        for (index, element) in indices(tensor.sizes).zip(elements) {
            // SAFETY: the tensor's memory was checked.
            unsafe { float.store(address, offset(index, tensor.strides), *element) };
        }
    }

    fn elements(&self, tensor: &Tensor) -> &[f32] {
        &self.known[&tensor.number]
    }

    fn pointwise(&self, mode: Mode, operation: &Operation) -> Vec<f32> {
        let inputs: Vec<(&[f32], Axes, Axes)> = operation
            .inputs
            .iter()
            .map(|tensor| (self.elements(tensor), tensor.sizes, packed(tensor.sizes)))
            .collect();
        let at = |input: usize, index: Axes| {
            let (elements, sizes, strides) = inputs[input];
            // An axis of size 1 is repeated.
            let own = std::array::from_fn(|axis| index[axis] % sizes[axis]);
            elements[offset(own, strides)]
        };
        let element = |index: Axes| match mode {
            Mode::Add => at(0, index) + at(1, index),
            Mode::Multiply => at(0, index) * at(1, index),
            Mode::Divide => at(0, index) / at(1, index),
            Mode::Subtract => at(0, index) - at(1, index),
            Mode::Exponential => at(0, index).exp(),
            Mode::Logarithm => at(0, index).ln(),
            Mode::AtLeast => f32::from(u8::from(at(0, index) >= at(1, index))),
            Mode::Index(axis) => index[axis] as f32,
            Mode::Select if at(2, index) != 0.0 => at(0, index),
            Mode::Select => at(1, index),
        };
        indices(operation.output.sizes).map(element).collect()
    }

    fn matmul(&self, operation: &Operation) -> Vec<f32> {
        let ([a_sizes, b_sizes], c) =
            ([0, 1].map(|input: usize| operation.inputs[input].sizes), operation.output.sizes);
        let [a, b] = [0, 1].map(|input: usize| self.elements(&operation.inputs[input]));
        let [samples, heads, rows, columns] = c;
        let depth = a_sizes[3];
        // Consecutive heads share one of an operand that has fewer.
        let first = |sizes: Axes, sample: usize, head: usize| {
            let own = head / (heads / sizes[1]);
            (sample * sizes[1] + own) * sizes[2] * sizes[3]
        };
        let mut result = Vec::with_capacity(samples * heads * rows * columns);
        let mut row_sums = vec![0.0f32; columns];
        for batch in 0..samples * heads {
            let (sample, head) = (batch / heads, batch % heads);
            let (a, b) = (&a[first(a_sizes, sample, head)..], &b[first(b_sizes, sample, head)..]);
            for row in 0..rows {
                row_sums.fill(0.0);
                for i in 0..depth {
                    let k = self.place(i, depth);
                    let x = a[row * depth + k];
                    let others = &b[k * columns..][..columns];
                    row_sums.iter_mut().zip(others).for_each(|(sum, y)| *sum += x * y);
                }
                result.extend_from_slice(&row_sums);
            }
        }
        result
    }

    /// The element of `count` that a sum takes at its place `i`.
    fn place(&self, i: usize, count: usize) -> usize {
        if self.ascending { i } else { count - 1 - i }
    }

    fn reduction(&self, fold: Fold, operation: &Operation) -> Vec<f32> {
        let (x, y) = (&operation.inputs[0], &operation.output);
        let empty = match fold {
            Fold::Sum => 0.0,
            Fold::Largest => f32::NEG_INFINITY,
        };
        let strides = packed(y.sizes);
        let mut result = vec![empty; y.len()];
        let groups: Axes = std::array::from_fn(|axis| x.sizes[axis] / y.sizes[axis]);
        for (index, element) in indices(x.sizes).zip(self.elements(x)) {
            let to = offset(std::array::from_fn(|axis| index[axis] / groups[axis]), strides);
            result[to] = match fold {
                Fold::Sum => result[to] + element,
                Fold::Largest => result[to].max(*element),
            };
        }
        result
    }

    /// The memory of x, read with the strides of y. What no element of x covers is NaN.
    fn reshape(&self, operation: &Operation) -> Vec<f32> {
        let (x, y) = (&operation.inputs[0], &operation.output);
        let mut memory = vec![f32::NAN; x.span()];
        for (index, element) in indices(x.sizes).zip(self.elements(x)) {
            memory[offset(index, x.strides)] = *element;
        }
        indices(y.sizes).map(|index| memory[offset(index, y.strides)]).collect()
    }
}
