//! Vocabulary-parallel token embedding, plus learned positions if the model has them.

use crate::kv_cache::{self, NewTokens};
use crate::params::{FlatBuffer, SegmentLayout, Split};
use crate::shape::{BatchTensors, DecoderShape, MicrobatchContext};
use device::{Device, Lane::Compute, Op, Tensor};

/// Dropout's "layer" of the embedding; blocks count from 1.
const LAYER: u64 = 0;

/// The tables, or their gradients. A tied token table is the output projection too.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Embedding {
    pub(crate) tokens: Tensor, // (V/t, C)
    positions: Option<Tensor>, // (T, C)
}

/// The gradient of the embedding's output.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OutputGradient {
    /// (rows, C): this rank's rows.
    pub(crate) rows: Tensor,
    /// (B T, C): buffer for the gathered rows of all ranks, if tokens are split over the ranks.
    pub(crate) whole: Option<Tensor>,
}

/// Layout of the embedding's parameters.
pub(crate) fn layout(shape: &DecoderShape, align: usize) -> SegmentLayout {
    let (t, trained) = (shape.tp_size, &shape.trained);
    SegmentLayout::new("embedding".into(), String::new(), t, trained, align, |params| {
        let (c, init) = (shape.hidden, shape.weight_init());
        params.add_padded("wte", (shape.vocab, c), shape.vocab_per_rank(), init);
        if shape.architecture.learned_positions {
            params.add("wpe", (shape.seq_len, c), Split::Replicated, init);
        }
    })
}

impl Embedding {
    pub(crate) fn cut(flat: FlatBuffer<'_>, shape: &DecoderShape) -> Self {
        let learned = shape.architecture.learned_positions;
        Self { tokens: flat.whole("wte"), positions: learned.then(|| flat.whole("wpe")) }
    }

    /// Computes tokens (B T) -> x (rows, C); `partial` (B T, C) is a transient.
    pub(crate) fn forward(
        &self,
        dev: &Device,
        shape: &DecoderShape,
        pass: &MicrobatchContext,
        batch: &BatchTensors,
        x: Tensor,
        partial: Tensor,
    ) {
        let (tokens, table, shard) = (batch.tokens, self.tokens, shape.vocab_shard(dev));
        let scale = shape.architecture.embedding_scale as f32;
        if dev.rank().tp_size == 1 {
            dev.submit(Compute, Op::Embedding { tokens, table, shard, y: x, scale });
        } else {
            dev.submit(Compute, Op::Embedding { tokens, table, shard, y: partial, scale });
            let summed = shape.region().sum(dev, partial);
            dev.submit(Compute, Op::Cast { x: summed, y: x });
        }
        if let Some(table) = self.positions {
            let (first_row, starts) = Self::first_position(dev, shape, pass);
            dev.submit(Compute, Op::AddPositions { x, table, first_row, starts });
        }
        let dropout = pass.dropout(shape, LAYER, 0, pass.first_row(dev, shape));
        if dropout.p > 0.0 {
            dev.submit(Compute, Op::Dropout { x, y: x, dropout, scale: 1.0 });
        }
    }

    /// Computes new tokens (1, rows) -> x (rows, C). Needs `tp_size` 1.
    pub(crate) fn extend(
        &self,
        dev: &Device,
        shape: &DecoderShape,
        tokens: Tensor,
        x: Tensor,
        new: &[NewTokens],
    ) {
        let (table, shard) = (self.tokens, shape.vocab_shard(dev));
        let scale = shape.architecture.embedding_scale as f32;
        dev.submit(Compute, Op::Embedding { tokens, table, shard, y: x, scale });
        let Some(table) = self.positions else { return };
        for (new, rows) in kv_cache::rows(new) {
            let (x, first_row) = (x.rows(rows), new.first);
            dev.submit(Compute, Op::AddPositions { x, table, first_row, starts: None });
        }
    }

    /// Computes `grads` from `d`, whose rows dropout changes in place. The gradient of a tied token
    /// table is added to the output projection's gradient; other gradients are overwritten.
    pub(crate) fn backward(
        &self,
        dev: &Device,
        shape: &DecoderShape,
        pass: &MicrobatchContext,
        batch: &BatchTensors,
        d: OutputGradient,
        grads: Self,
    ) {
        let OutputGradient { rows: d, whole } = d;
        let (d_table, positions) = (grads.tokens, grads.positions.filter(|d| !d.is_empty()));
        if d_table.is_empty() && positions.is_none() {
            return; // both tables are frozen
        }
        let dropout = pass.dropout(shape, LAYER, 0, pass.first_row(dev, shape));
        if dropout.p > 0.0 {
            dev.submit(Compute, Op::Dropout { x: d, y: d, dropout, scale: 1.0 });
        }
        if let Some(d_table) = positions {
            let (first_row, starts) = Self::first_position(dev, shape, pass);
            dev.submit(Compute, Op::PositionsBackward { d_y: d, first_row, starts, d_table });
        }
        if d_table.is_empty() {
            return;
        }
        let region = shape.region();
        let d_y = match whole {
            Some(full) if shape.sequence => {
                dev.submit(Compute, Op::Copy { src: d, dst: region.rows(dev, full) });
                region.gather(dev, full);
                full
            }
            _ => d,
        };
        let (tokens, order, shard) = (batch.tokens, batch.order, shape.vocab_shard(dev));
        if !shape.architecture.tied {
            dev.submit(Compute, Op::Zero { x: d_table });
        }
        let scale = shape.architecture.embedding_scale as f32;
        dev.submit(Compute, Op::EmbeddingBackward { tokens, order, d_y, shard, d_table, scale });
    }

    /// Position of this rank's first row in its sample, and document starts of its rows.
    fn first_position(
        dev: &Device,
        shape: &DecoderShape,
        pass: &MicrobatchContext,
    ) -> (usize, Option<Tensor>) {
        if !shape.sequence {
            return (0, pass.starts);
        }
        let first = dev.rank().tp * shape.rows();
        let starts = pass.starts.map(|starts| starts.slice(first..first + shape.rows()));
        (first % shape.seq_len, starts)
    }
}
