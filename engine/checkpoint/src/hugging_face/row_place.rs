//! Rows of a parameter in a tensor of a folder that holds several parameters.

use super::names::{Names, StackPlace};
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
    /// The place of `param`; `rows` are those of all parameters by name.
    pub(super) fn of(names: Names, param: &Param, rows: &BTreeMap<&str, usize>) -> Self {
        // The matrices of an expert in one tensor have the same number of rows.
        if let Some(stack) = names.stack_place(&param.name) {
            let (StackPlace { experts, parts, expert, part }, rows) = (stack, param.global.0);
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
