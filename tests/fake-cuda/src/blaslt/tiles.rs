//! The matmul itself, on fp32 copies of the operands.

const PANEL: usize = 16;
const ROWS: usize = 4;

/// A matrix in fp32: by rows, or by panels of `PANEL` columns (rows within a panel are contiguous,
/// the last panel is filled up with zeros).
pub(super) struct GatheredMatrix {
    rows: usize,
    cols: usize,
    by_panels: bool,
    values: Vec<f32>,
}

impl GatheredMatrix {
    pub(super) fn new(
        rows: usize,
        cols: usize,
        by_panels: bool,
        element: impl Fn(usize, usize) -> f32,
    ) -> Self {
        let width = if by_panels { cols.next_multiple_of(PANEL) } else { cols };
        let mut matrix = Self { rows, cols, by_panels, values: vec![0.0; rows * width] };
        for j in 0..cols {
            for i in 0..rows {
                let index = matrix.index(i, j);
                matrix.values[index] = element(i, j);
            }
        }
        matrix
    }

    fn index(&self, i: usize, j: usize) -> usize {
        if self.by_panels {
            (j / PANEL * self.rows + i) * PANEL + j % PANEL
        } else {
            i * self.cols + j
        }
    }

    pub(super) fn get(&self, i: usize, j: usize) -> f32 {
        self.values[self.index(i, j)]
    }

    fn row(&self, i: usize) -> &[f32] {
        &self.values[i * self.cols..(i + 1) * self.cols]
    }

    fn panel(&self, index: usize) -> &[f32] {
        &self.values[index * self.rows * PANEL..(index + 1) * self.rows * PANEL]
    }
}

/// `sums` (m, n) = A (by rows) * B (by panels); each element adds its products in the order of k,
/// in `parts` sums over equal parts of k, and then these sums.
pub(super) fn multiply(
    a: &GatheredMatrix,
    b: &GatheredMatrix,
    sums: &mut [f32],
    m: usize,
    n: usize,
    parts: usize,
) {
    for panel in 0..n.div_ceil(PANEL) {
        let first = panel * PANEL;
        let width = PANEL.min(n - first);
        for i in (0..m).step_by(ROWS) {
            let rows: [&[f32]; ROWS] = std::array::from_fn(|r| a.row((i + r).min(m - 1)));
            let tile = multiply_tile(rows, b.panel(panel), parts);
            for (r, sums_of_row) in tile.iter().enumerate().take(m - i) {
                let start = (i + r) * n + first;
                sums[start..start + width].copy_from_slice(&sums_of_row[..width]);
            }
        }
    }
}

fn multiply_tile(rows: [&[f32]; ROWS], panel: &[f32], parts: usize) -> [[f32; PANEL]; ROWS] {
    let part = (panel.len() / PANEL).div_ceil(parts).max(1);
    let mut sums = [[0.0; PANEL]; ROWS];
    for (i, panel) in panel.chunks(part * PANEL).enumerate() {
        let of_part = rows.map(|row| &row[i * part..]);
        for (sums, part) in sums.iter_mut().zip(sum_part(of_part, panel)) {
            for (sum, part) in sums.iter_mut().zip(part) {
                *sum += part;
            }
        }
    }
    sums
}

fn sum_part(rows: [&[f32]; ROWS], panel: &[f32]) -> [[f32; PANEL]; ROWS] {
    let mut sums = [[0.0; PANEL]; ROWS];
    for (k, b) in panel.chunks_exact(PANEL).enumerate() {
        for (sums, row) in sums.iter_mut().zip(rows) {
            let a = row[k];
            for (sum, &b) in sums.iter_mut().zip(b) {
                *sum += a * b;
            }
        }
    }
    sums
}
