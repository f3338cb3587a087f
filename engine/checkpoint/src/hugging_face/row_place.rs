//! Rows of a parameter in a tensor of a folder that holds several parameters.

use layout::tensor_names::{Names, StackPlace};
use std::collections::BTreeMap;
use tensor_parallel::Param;

/// Place of a parameter among the parameters whose rows are one tensor of the folder.
pub(super) struct RowPlace {
    /// Number of the parameter's first row in the tensor.
    pub(super) first: usize,
    /// Number of rows of the tensor.
    pub(super) rows: usize,
    /// The runs of the parameter's rows, if runs of several parameters alternate.
    pub(super) runs: Option<RowRuns>,
}

/// Equally long runs of rows of a parameter in a tensor, equally far apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct RowRuns {
    /// Number of rows of a run.
    pub(super) rows: usize,
    /// Number of rows of the tensor from the start of a run to the start of the next.
    pub(super) stride: usize,
}

impl RowPlace {
    /// The place of `param`. `rows`: number of rows of each parameter, by name.
    pub(super) fn of(names: Names, param: &Param, rows: &BTreeMap<&str, usize>) -> Self {
        // The matrices of an expert in one tensor have the same number of rows.
        if let Some(stack) = names.stack_place(&param.name) {
            let (StackPlace { experts, parts, expert, part, .. }, rows) = (stack, param.global.0);
            let first = (expert * parts + part) * rows;
            return Self { first, rows: experts * parts * rows, runs: None };
        }
        let all = names.joined(&param.name);
        let rows_of = |name: &String| match rows.get(name.as_str()) {
            Some(rows) => *rows,
            None => unreachable!("`{name}` is a parameter as `{}` is", param.name),
        };
        let before = all.iter().take_while(|name| **name != param.name);
        let (before, all): (usize, usize) =
            (before.map(rows_of).sum(), all.iter().map(rows_of).sum());
        match names.runs_of(&param.name) {
            1 => Self { first: before, rows: all, runs: None },
            count => {
                let runs = RowRuns { rows: param.global.0 / count, stride: all / count };
                Self { first: before / count, rows: all, runs: Some(runs) }
            }
        }
    }
}

/// Distances of a parameter's elements in a tensor of the folder, in elements.
#[derive(Clone, Copy, Debug)]
pub(super) struct Steps {
    /// Number of the first element of the parameter.
    pub(super) first: usize,
    /// From a row of the parameter to the next.
    pub(super) row: usize,
    /// From a column of the parameter to the next.
    pub(super) column: usize,
}

impl Steps {
    /// Distances of a part of an expert whose parts alternate and whose matrices are transposed;
    /// `None` if the elements are one after the other.
    pub(super) fn of(stack: StackPlace, param: &Param) -> Option<Self> {
        let StackPlace { parts, expert, part, interleaved, .. } = stack;
        let (rows, columns) = param.global;
        let first = expert * parts * rows * columns + part;
        interleaved.then_some(Self { first, row: parts, column: parts * rows })
    }

    /// Elements of the tensor from the first element of the parameter to the last one, both included.
    pub(super) const fn run(self, (rows, columns): (usize, usize)) -> usize {
        (rows - 1) * self.row + (columns - 1) * self.column + 1
    }

    /// The elements of the parameter, from the elements of its [`run`](Self::run).
    pub(super) fn pick(self, run: &[f32], (rows, columns): (usize, usize)) -> Vec<f32> {
        let row =
            |row: usize| (0..columns).map(move |column| row * self.row + column * self.column);
        (0..rows).flat_map(row).map(|index| run[index]).collect()
    }
}
